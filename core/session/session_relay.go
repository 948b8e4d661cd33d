package session

import (
	"fmt"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// verdict is what becomes of a frame.
type verdict uint8

const (
	forward verdict = iota // as it is
	drop                   // thrown away
	remap                  // its message ids are rewritten, the rest streamed
	besides                // it is for the extra leg of its consumer
	replace                // handled here; the whole frame is in the buffer
	more                   // cannot be judged yet
	stop                   // not now (held) or never (closed)
	bad                    // it is no command
)

// undecided is the verdict on a frame whose id could not be read.
func undecided(err error) verdict {
	if err != nil {
		return bad
	}
	return more
}

func badCommand(h codec.Head) error { return fmt.Errorf("%w: %s", codec.ErrCommand, h.Type) }

// relayUp moves frames from the client to their legs. Frames are never collected: a SEND is judged by its first bytes and
// streamed, and a run of frames that go on goes out as one view of src.
func (s *Session) relayUp(now time.Time, src []byte) (pos int) {
	run := 0 // src[run:pos] goes to upLeg and was not written yet
	commands := 0
	if !s.up.busy() {
		s.upLeg = s.leg
	}
	for pos < len(src) && !s.held {
		if s.up.left > 0 {
			n := min(s.up.left, len(src)-pos)
			s.up.left -= n
			pos += n
			if s.up.drop {
				run = pos
			} else if s.up.left == 0 && len(s.upLeg.deferred) > 0 {
				s.sh.write(s.upLeg.conn, src[run:pos], true)
				run = pos
				s.upLeg.flushDeferred()
			}
			continue
		}
		frame := src[pos:]
		h, ok, err := codec.ParseHead(frame, s.maxFrame)
		if err != nil {
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			s.closeMalformed(now, err)
			return len(src)
		}
		if !ok {
			break
		}
		to := s.leg
		v := s.judgeSend(now, frame, h)
		switch v {
		case replace: // not a frame of the fast path
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			run = pos
			if commands++; commands > commandsPerCall {
				s.goOn()
				return pos
			}
			v = s.judgeUp(now, frame, h)
			if s.state == stateClosed {
				return len(src)
			}
			to = s.sh.target
		case besides:
			v, to = s.judgeBesides(h)
		}
		if to != s.upLeg {
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			run = pos
			s.upLeg = to
		}
		taken := 0
		if v == remap {
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			run = pos
			var out []byte
			v, out, taken = s.remap(now, frame, h)
			s.sh.write(s.upLeg.conn, out, true)
		}
		if v == bad {
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			s.closeMalformed(now, badCommand(h))
			return len(src)
		}
		if v == more || v == stop {
			break
		}
		s.sh.counters.ClientFrames.Add(1)
		switch v {
		case forward:
			s.up = stream{left: h.Size}
		case drop:
			s.sh.write(s.upLeg.conn, src[run:pos], true)
			s.sh.counters.DroppedFrames.Add(1)
			s.up = stream{left: h.Size, drop: true}
		case remap:
			pos += taken
			run = pos
			s.up = stream{left: h.Size - taken}
		case replace:
			pos += h.Size
			run = pos
		}
	}
	s.sh.write(s.upLeg.conn, src[run:pos], true)
	return pos
}

// judgeSend is the fast path of relayUp: SEND, ACK and FLOW. It answers replace for everything else.
func (s *Session) judgeSend(now time.Time, frame []byte, h codec.Head) verdict {
	switch h.Type {
	case codec.TypeSend:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		p := s.producer(id)
		if p == nil || !found {
			return forward // the broker knows what to say
		}
		if p.judged {
			if v := s.judgedSend(now, p); v != forward {
				return v
			}
		} else {
			p.gate.Outstanding++
		}
		if p.tag > 0 && codec.HasIDs(frame, h) {
			return s.sh.remapFor(p)
		}
		return forward
	case codec.TypeAck, codec.TypeFlow, codec.TypeRedeliver:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		if found {
			c := s.consumer(id)
			switch {
			case c == nil:
			case c.judged && (h.Type == codec.TypeAck || c.state != handleEvicted):
				return replace // it may want an answer, or have to wait
			case c.judged:
				return drop
			case c.leg != s.leg && h.Type == codec.TypeAck:
				return replace // it may want an answer, which the leg may owe when it is lost
			case c.leg != s.leg:
				return besides
			case c.tag > 0 && h.Type != codec.TypeFlow:
				return s.sh.remapFor(c)
			}
		}
		return forward
	}
	return replace
}

// judgeBesides goes on where judgeSend has found a frame for an extra leg.
func (s *Session) judgeBesides(h codec.Head) (verdict, *leg) {
	c := s.lastC
	if c.tag > 0 && h.Type != codec.TypeFlow {
		return s.sh.remapFor(c), c.leg
	}
	return forward, c.leg
}

// judgeUp looks at the rarer frames of a client. It answers replace only for a frame that is whole. What goes on goes to sh.target.
func (s *Session) judgeUp(now time.Time, frame []byte, h codec.Head) verdict {
	s.sh.target = s.leg
	switch h.Type {
	case codec.TypeProducer, codec.TypeSubscribe, codec.TypeCloseProducer, codec.TypeCloseConsumer, codec.TypeAck, codec.TypeFlow, codec.TypeRedeliver,
		codec.TypeSeek, codec.TypeUnsubscribe, codec.TypeGetLastMessageID, codec.TypeConsumerStats,
		codec.TypeLookup, codec.TypePartitionedMetadata, codec.TypeGetTopicsOfNamespace, codec.TypeGetSchema,
		codec.TypePing, codec.TypePong, codec.TypeConnect:
		if h.Size > s.maxControl() {
			s.closeMalformed(now, tooLarge(h, s.maxControl()))
			return stop
		}
		if len(frame) < h.Size {
			return more
		}
		frame = frame[:h.Size]
	case codec.TypeAuthResponse:
		return s.authResponse(frame, h)
	default:
		return forward // streamed, whatever it is
	}
	switch h.Type {
	case codec.TypePing:
		s.send(pongFrame)
		return replace
	case codec.TypePong:
		return replace
	case codec.TypeConnect:
		s.close(now, CauseClientProtocol, "a second CONNECT")
		return stop
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		s.closeMalformed(now, err)
		return stop
	}
	switch h.Type {
	case codec.TypeProducer:
		return s.handleProducer(now, frame, &cmd)
	case codec.TypeSubscribe:
		return s.handleSubscribe(now, frame, h, &cmd)
	case codec.TypeCloseProducer:
		return s.handleCloseProducer(now, cmd.GetCloseProducer())
	case codec.TypeCloseConsumer:
		return s.handleCloseConsumer(now, cmd.GetCloseConsumer())
	case codec.TypeLookup, codec.TypePartitionedMetadata, codec.TypeGetTopicsOfNamespace, codec.TypeGetSchema:
		s.handleQuestion(now, &cmd)
		if s.state == stateClosed {
			return stop
		}
		return replace
	default:
		if s.holdCommand(now, frame, h.Type, &cmd) {
			return replace
		}
		return s.handleConsumerRequest(now, frame, h, &cmd)
	}
}

// relayDown moves frames from the leg to the client.
func (l *leg) relayDown(now time.Time, src []byte) (pos int) {
	s := l.s
	if s.aside != nil && !s.aside.mayTalk(l) {
		return 0
	}
	run := 0
	midFrame := l.down.left > 0
	for pos < len(src) {
		if l.down.left > 0 {
			n := min(l.down.left, len(src)-pos)
			l.down.left -= n
			pos += n
			if l.down.drop {
				run = pos
			} else if l.down.left == 0 && len(s.deferred) > 0 {
				s.sh.write(s.conn, src[run:pos], true)
				run = pos
				s.flushDeferred()
			}
			continue
		}
		if s.aside != nil && (midFrame || pos >= talkBytes) && s.aside.yield(now, l) {
			break
		}
		frame := src[pos:]
		h, ok, err := codec.ParseHead(frame, s.maxFrame)
		if err != nil {
			s.sh.write(s.conn, src[run:pos], true)
			l.fail(now, CauseBrokerFrame, err.Error())
			return len(src)
		}
		if !ok {
			break
		}
		v := l.judgeMessage(frame, h)
		if v == replace {
			s.sh.write(s.conn, src[run:pos], true)
			run = pos
			v = l.judgeDown(now, frame, h)
			if l.dead {
				return len(src)
			}
		}
		taken := 0
		if v == remap {
			s.sh.write(s.conn, src[run:pos], true)
			run = pos
			v, taken = l.remap(now, frame, h)
		}
		if v == bad {
			s.sh.write(s.conn, src[run:pos], true)
			l.fail(now, CauseBrokerFrame, badCommand(h).Error())
			return len(src)
		}
		if v == more || v == stop {
			break
		}
		s.sh.counters.BrokerFrames.Add(1)
		switch v {
		case forward:
			l.down = stream{left: h.Size}
		case drop:
			s.sh.write(s.conn, src[run:pos], true)
			s.sh.counters.DroppedFrames.Add(1)
			l.down = stream{left: h.Size, drop: true}
		case remap:
			pos += taken
			run = pos
			l.down = stream{left: h.Size - taken}
		case replace:
			pos += h.Size
			run = pos
		}
	}
	s.sh.write(s.conn, src[run:pos], true)
	if a := s.aside; a != nil && !l.down.busy() && (a.turn == l || a.turn == nil) {
		a.next(now)
	}
	return pos
}

// judgeMessage is the fast path of relayDown: MESSAGE and SEND_RECEIPT. It answers replace for everything else, and for
// a receipt that an eviction or a fence waits for.
func (l *leg) judgeMessage(frame []byte, h codec.Head) verdict {
	switch h.Type {
	case codec.TypeMessage:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		c := l.s.consumer(id)
		if c == nil || !found {
			return forward
		}
		if c.leg != l {
			return drop // of one that had the id before
		}
		c.given = true
		if c.judged {
			if v := l.judgedMessage(c, frame, h); v != forward {
				return v
			}
		}
		if c.tag > 0 || c.carried != nil && len(c.carried.acks) > 0 {
			return l.s.sh.remapFor(c)
		}
		return forward
	case codec.TypeSendReceipt, codec.TypeSendError:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		p := l.s.producer(id)
		if p == nil || !found {
			return forward
		}
		if p.leg != l {
			return drop
		}
		if p.judged {
			if p.state == handleEvicted {
				return drop
			}
			return replace // somebody waits for it
		}
		p.gate.Receipt()
		if p.tag > 0 && h.Type == codec.TypeSendReceipt {
			return l.s.sh.remapFor(p)
		}
		return forward
	}
	return replace
}

// judgeDown looks at the rarer frames of a broker. It answers replace only for a frame that is whole.
func (l *leg) judgeDown(now time.Time, frame []byte, h codec.Head) verdict {
	s := l.s
	switch h.Type {
	case codec.TypeActiveConsumerChange, codec.TypeReachedEndOfTopic:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		if c := s.consumers[id]; found && c != nil && (c.state == handleEvicted || c.leg != l) {
			return drop
		}
		return forward
	case codec.TypeAuthChallenge:
		s.noteChallenge(l)
		return forward
	case codec.TypeGetLastMessageIDResponse:
		if len(s.pending) == 0 || h.Size > s.sh.cfg.MaxControl {
			return forward
		}
		if len(frame) < h.Size {
			return more
		}
		return l.handleLastID(now, frame[:h.Size], h)
	case codec.TypeAckResponse:
		if l.extra == nil || len(s.pending) == 0 || h.Size > s.sh.cfg.MaxControl {
			return forward
		}
		if len(frame) < h.Size {
			return more
		}
		return l.handleAckAnswer(frame[:h.Size], h)
	case codec.TypeSuccess, codec.TypeError, codec.TypeProducerSuccess:
		id, found, ok, err := codec.ParseID(frame, h)
		if !ok {
			return undecided(err)
		}
		p, ours := s.pending[id]
		switch {
		case found && ours && p.h.leg != l, l.extra != nil && id == codec.NoRequest:
			return drop // what is said of the whole connection does not concern the client's
		case !found, !ours:
			return forward
		}
		if len(frame) < h.Size {
			return more
		}
		return l.handleAnswer(now, frame[:h.Size], h, id, p)
	case codec.TypeSendReceipt, codec.TypeSendError, codec.TypeCloseProducer, codec.TypeCloseConsumer, codec.TypeTopicMigrated, codec.TypePing, codec.TypePong:
		if h.Size > s.sh.cfg.MaxControl {
			l.fail(now, CauseBrokerFrame, tooLarge(h, s.sh.cfg.MaxControl).Error())
			return stop
		}
		if len(frame) < h.Size {
			return more
		}
		frame = frame[:h.Size]
	default:
		return forward
	}
	switch h.Type {
	case codec.TypePing:
		// Brokers ask to learn whether an old producer or exclusive consumer is dead: only the client may answer that.
		l.pingOwed = true
		s.send(pingFrame)
		return replace
	case codec.TypePong:
		l.handlePong(now)
		return replace
	case codec.TypeSendReceipt, codec.TypeSendError:
		id, _, _, _ := codec.ParseID(frame, h)
		p := s.producers[id]
		s.sh.write(s.conn, s.sh.shown(frame, h, p), true)
		s.judgedReceipt(now, p)
		return replace
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		l.fail(now, CauseBrokerFrame, err.Error())
		return stop
	}
	switch h.Type {
	case codec.TypeCloseProducer:
		l.handleBrokerClosedProducer(now, &cmd)
	case codec.TypeCloseConsumer:
		l.handleBrokerClosedConsumer(now, &cmd)
	default:
		l.handleMigrated(now, cmd.GetTopicMigrated())
	}
	return replace
}
