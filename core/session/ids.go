package session

import (
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// This file keeps the message ids of a topic growing over its moves. Clients remember ids and compare them: with ledgers of the new cluster
// below those of the old one, readers and cumulative consumers would silently skip everything (SW-02). So on a topic whose epoch is above 0
// clients see ledger ids as real | epoch << codec.EpochShift. Only handles with a tag pay for it.

// tag is the epoch that the handles of a topic put into message ids; 0 leaves them as they are.
func (c *Config) tag(epoch uint64) uint64 {
	if c.NativeIDs {
		return 0
	}
	return min(epoch, codec.MaxEpoch)
}

// oldID is a message id that a client got from a cluster that had the topic before.
type oldID struct {
	at      Position // there
	epoch   uint64
	partial bool // some messages of the batch
}

// idMap maps the message ids of one frame. Shard-owned, used for one frame at a time.
type idMap struct {
	h    *handle
	up   bool     // client → broker
	kept int      // ids that are among what goes on
	last Position // the last id that came, as it came
	old  []oldID  // up: what was left out
}

// MapID implements codec.IDMapper.
func (m *idMap) MapID(id codec.MessageID) (ledger, entry uint64, keep bool) {
	if !id.Chunk {
		m.last = Position{id.Ledger, id.Entry}
	}
	c := m.h.carried
	if c != nil && (c.aliasTag != m.h.tag || m.h.tag == 0) {
		c = nil
	}
	if !m.up {
		if c != nil && m.last == c.real && !id.Chunk {
			return c.shown.Ledger, c.shown.Entry, true
		}
		return codec.ShowLedger(id.Ledger, m.h.tag), id.Entry, true
	}
	real, epoch, ok := codec.SplitLedger(id.Ledger)
	switch {
	case !ok, epoch != m.h.tag && (id.Chunk || m.h.producer): // a SEND has ids of the cluster that a replicator reads from
	case epoch == m.h.tag:
		id.Ledger = real
	case c != nil && c.shown == Position{id.Ledger, id.Entry}:
		id.Ledger, id.Entry = c.real.Ledger, c.real.Entry
	default:
		m.old = append(m.old, oldID{Position{real, id.Entry}, epoch, id.Partial})
		return 0, 0, false
	}
	if !id.Chunk {
		m.kept++
	}
	return id.Ledger, id.Entry, true
}

// mapIDs appends the head of a frame of h to the scratch buffer, every id in it mapped, and the rest when all of it is there and small. It returns what it
// appended, valid until ResetOps, and how many bytes of the frame that stands for.
func (sh *Shard) mapIDs(frame []byte, head codec.Head, h *handle, up bool) (out []byte, n int, err error) {
	m := &sh.ids
	m.h, m.up, m.kept, m.old = h, up, 0, m.old[:0]
	start := len(sh.scratch)
	all, err := codec.AppendIDs(sh.scratch, frame, head, m)
	if err != nil {
		return nil, 0, err
	}
	n = head.CmdEnd
	if head.Size-n <= smallRest && len(frame) >= head.Size {
		all = append(all, frame[n:head.Size]...)
		n = head.Size
	}
	sh.scratch = all
	sh.counters.MappedFrames.Add(1)
	return all[start:], n, nil
}

// smallRest is the size up to which copying what follows a command is cheaper than a write of its own.
const smallRest = 4 << 10

// remapFor is the verdict on a frame of h whose message ids have to be rewritten.
func (sh *Shard) remapFor(h *handle) verdict {
	sh.ids.h = h
	return remap
}

// remap carries out the verdict remap of judgeSend: out is the head of the frame with the ids that the broker knows, in the place of the first n bytes of the frame,
// valid until ResetOps. The verdict is drop when nothing is left to be said.
func (s *Session) remap(now time.Time, frame []byte, head codec.Head) (v verdict, out []byte, n int) {
	h := s.sh.ids.h
	out, n, err := s.sh.mapIDs(frame, head, h, true)
	if err != nil {
		return bad, nil, 0
	}
	if len(s.sh.ids.old) > 0 {
		s.sh.counters.OldIDs.Add(uint64(len(s.sh.ids.old)))
		if head.Type == codec.TypeAck {
			s.handleOldAck(now, frame, head, h)
		}
		if s.sh.ids.kept == 0 { // REDELIVER without ids would mean all
			return drop, nil, 0
		}
	}
	return remap, out, n
}

// handleOldAck remembers what an ACK says of messages from before a move. It answers it when the broker has nothing to answer.
func (s *Session) handleOldAck(now time.Time, frame []byte, head codec.Head, h *handle) {
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, head); err != nil || cmd.Ack == nil {
		return // a broker would not answer it
	}
	carried := s.carryAcks(now, h, cmd.Ack, s.sh.ids.old)
	if cmd.Ack.RequestId == nil || s.sh.ids.kept > 0 {
		return
	}
	if carried {
		s.answerAck(h, cmd.GetAck().GetRequestId())
		return
	}
	s.refuseAck(RefusedMoved, h.id, cmd.GetAck().GetRequestId(), h.full, "topic "+h.full+" has moved to another cluster since these messages were delivered: they are delivered again")
}

// remap carries out the verdict remap of judgeMessage: it writes the head of a frame with the ids that clients see, in the place of the first n bytes of the frame.
func (l *leg) remap(now time.Time, frame []byte, head codec.Head) (v verdict, n int) {
	s, h := l.s, l.s.sh.ids.h
	remembers := h.carried != nil && len(h.carried.acks) > 0
	notes := h.tag > 0 && !h.fleeting
	var src codec.Source
	var isCopy bool
	if head.Type == codec.TypeMessage && (remembers || notes) {
		var ok bool
		if src, isCopy, ok = codec.ParseSource(frame, head); !ok {
			return more, 0
		}
	} else {
		remembers = false
	}
	out, n, err := s.sh.mapIDs(frame, head, h, false)
	if err != nil {
		return bad, 0
	}
	at := s.sh.ids.last
	if remembers {
		c := h.carried
		known := isCopy && s.sh.carrying.take(c, c.acks[string(src.Cluster)], Position{src.Ledger, src.Entry})
		if !known && s.sh.carrying.take(c, c.acks[l.cluster], at) {
			// The original itself: its copy was acknowledged, or the subscription still reads the cluster which its topic is leaving.
			known = true
			src.Messages, _ = codec.ParseBatchSize(frame, head)
		}
		if known {
			l.skip(h, at, src.Messages)
			return drop, 0
		}
	}
	if isCopy && notes {
		l.noteCopy(now, h, at, src)
	}
	s.sh.write(s.conn, out, true)
	return remap, n
}

// shown is a whole frame of a broker as clients see it, valid until ResetOps.
func (sh *Shard) shown(frame []byte, head codec.Head, h *handle) []byte {
	if h.tag == 0 {
		return frame
	}
	out, n, err := sh.mapIDs(frame, head, h, false)
	if err != nil {
		return frame // the client will say that it is none
	}
	if n < len(frame) {
		sh.scratch = append(sh.scratch, frame[n:]...)
		out = sh.scratch[len(sh.scratch)-len(out)-len(frame)+n:]
	}
	return out
}

// openConsumer passes a SUBSCRIBE of a topic that has moved.
func (s *Session) openConsumer(now time.Time, h *handle, c *pulsarpb.CommandSubscribe, frame []byte, head codec.Head) verdict {
	h.carried = s.sh.carrying.subs[h.key()]
	if h.tag == 0 {
		if h.carried != nil && (c.StartMessageId != nil || c.GetStartMessageRollbackDurationSec() > 0) {
			s.forgetAcks(h)
		}
		return forward
	}
	if c.StartMessageId != nil || c.GetStartMessageRollbackDurationSec() > 0 {
		s.moveTo(h, c.StartMessageId)
	}
	if c.StartMessageId == nil {
		return forward
	}
	return s.startAt(now, h, c.GetRequestId(), frame, head)
}

// consumerRequest passes a request about a consumer of a topic that has moved.
func (s *Session) consumerRequest(now time.Time, h *handle, cmd *pulsarpb.BaseCommand, frame []byte, head codec.Head) verdict {
	if cmd.Seek != nil && (h.tag == 0 || cmd.Seek.MessageId == nil) {
		s.expect(now, cmd.GetSeek().GetRequestId(), pendingSeek, h)
	}
	if h.reader != nil {
		switch {
		case cmd.Ack != nil && s.readerAcked(now, h, cmd.Ack):
			return replace
		case cmd.GetLastMessageId != nil && h.reader.had:
			s.askLast(now, h, cmd.GetGetLastMessageId().GetRequestId())
			return replace
		}
	}
	if h.leg.extra != nil && cmd.Ack != nil && cmd.Ack.RequestId != nil {
		s.expect(now, cmd.GetAck().GetRequestId(), pendingAck, h) // should the leg be lost
	}
	switch {
	case cmd.GetLastMessageId != nil && (h.tag > 0 || h.leg.extra != nil):
		s.expect(now, cmd.GetGetLastMessageId().GetRequestId(), pendingLastID, h) // the response does not name the consumer
	case h.tag == 0:
		if cmd.Unsubscribe != nil || cmd.Seek != nil {
			s.forgetAcks(h)
		}
	case head.Type == codec.TypeAck, head.Type == codec.TypeRedeliver:
		return s.sh.remapFor(h)
	case cmd.Unsubscribe != nil:
		s.forgetAcks(h)
	case cmd.Seek != nil:
		s.moveTo(h, cmd.Seek.MessageId)
		if cmd.Seek.MessageId == nil {
			return forward
		}
		return s.startAt(now, h, cmd.GetSeek().GetRequestId(), frame, head)
	}
	return forward
}

// startAt passes a SUBSCRIBE or SEEK that names the message to begin with.
func (s *Session) startAt(now time.Time, h *handle, req uint64, frame []byte, head codec.Head) verdict {
	out, _, err := s.sh.mapIDs(frame, head, h, true)
	if err == nil && len(s.sh.ids.old) > 0 {
		s.sh.counters.OldIDs.Add(1)
		s.translate(now, h, req, frame, head, s.sh.notBeforeTail(h, s.sh.ids.old[0]))
		return replace
	}
	if head.Type == codec.TypeSeek {
		s.expect(now, req, pendingSeek, h)
	}
	if err != nil {
		return forward // the broker knows what to say
	}
	h.leg.send(out)
	return replace
}

// handleLastID passes a GET_LAST_MESSAGE_ID_RESPONSE.
func (l *leg) handleLastID(now time.Time, frame []byte, head codec.Head) verdict {
	s := l.s
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, head); err != nil {
		return bad
	}
	req := cmd.GetGetLastMessageIdResponse().GetRequestId()
	p, ok := s.pending[req]
	if !ok || p.kind != pendingLastID && p.kind != pendingReader || p.h.leg != l {
		return forward
	}
	s.settled(req)
	if p.kind == pendingReader {
		s.readerAt(now, p.h, cmd.GetGetLastMessageIdResponse().GetConsumerMarkDeletePosition())
		return replace
	}
	s.sh.write(s.conn, s.sh.shown(frame, head, p.h), true)
	return replace
}
