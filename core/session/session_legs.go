package session

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// This file has the legs beside the one that the client asked for: a subscription that still reads the cluster which its topic is leaving is served by one
// (ADR 007). The client's side is one stream, so only one leg may be in the middle of a frame there: the others wait, unread, for their turn.

// aside is what a session has beyond its leg. Loop-owned.
type aside struct {
	s          *Session
	legs       []*leg // dialled or connected
	challenged []*leg // whose AUTH_CHALLENGE the client has not answered, in order; any leg
	queue      []*leg // wait, unread, for their turn to talk to the client; any leg
	turn       *leg   // has been given it; nil: who comes first
	readers    int    // handles that are readers of what is left on a cluster
}

// extraLeg is what a leg has that the client did not ask for.
type extraLeg struct {
	deadline time.Time // of its handshake
	waiting  []*parked // SUBSCRIBEs, until it is ready
}

const (
	// maxExtraLegs bounds those of one client: the brokers of the clusters that its topics are leaving.
	maxExtraLegs = 64
	// talkBytes is about how much a leg may say before another one that waits gets its turn.
	talkBytes = 64 << 10
	// maxChallenged bounds the challenges that a client leaves unanswered; brokers hang up long before.
	maxChallenged = 256
)

func (s *Session) makeAside() *aside {
	if s.aside == nil {
		s.aside = &aside{s: s}
	}
	return s.aside
}

func (s *Session) extraLegs() []*leg {
	if s.aside == nil {
		return nil
	}
	return s.aside.legs
}

// talking is the leg that is in the middle of a frame towards the client; nil when none is.
func (s *Session) talking() *leg {
	if s.leg != nil && s.leg.down.busy() {
		return s.leg
	}
	for _, l := range s.extraLegs() {
		if l.down.busy() {
			return l
		}
	}
	return nil
}

// mayTalk tells whether l may go on towards the client; otherwise it is not read until it may.
func (a *aside) mayTalk(l *leg) bool {
	if l.down.busy() {
		return true
	}
	if talker := a.s.talking(); talker == nil && (a.turn == nil || a.turn == l) {
		return true
	}
	a.wait(l)
	return false
}

// yield has l, which is between two frames, wait behind those that wait already; false when none does.
func (a *aside) yield(now time.Time, l *leg) bool {
	if len(a.queue) == 0 {
		return false
	}
	a.wait(l)
	a.next(now)
	return true
}

func (a *aside) wait(l *leg) {
	if l.held {
		return
	}
	l.held = true
	a.queue = append(a.queue, l)
	a.s.sh.ops = append(a.s.sh.ops, Op{Kind: OpPause, Conn: l.conn})
}

// next gives the turn to the leg that has waited longest.
func (a *aside) next(now time.Time) {
	a.turn = nil
	if len(a.queue) == 0 {
		return
	}
	l := a.queue[0]
	a.queue[0] = nil
	if a.queue = a.queue[1:]; len(a.queue) == 0 {
		a.queue = nil
	}
	a.turn = l
	l.held, l.pinged, l.heard = false, false, now
	a.s.sh.ops = append(a.s.sh.ops, Op{Kind: OpResume, Conn: l.conn})
}

// answerPing tells the broker that the client is alive.
func (l *leg) answerPing() {
	l.pingOwed = false
	l.send(pongFrame)
}

func (a *aside) answerPings() {
	for _, l := range a.legs {
		if l.pingOwed {
			l.answerPing()
		}
	}
}

// noteChallenge remembers that the client's next AUTH_RESPONSE but those before is for l.
func (s *Session) noteChallenge(l *leg) {
	if a := s.makeAside(); len(a.challenged) < maxChallenged {
		a.challenged = append(a.challenged, l)
	}
}

// authResponse finds the leg that an AUTH_RESPONSE is for, and has connections that are made from now on use the new token in it.
func (s *Session) authResponse(frame []byte, h codec.Head) verdict {
	if h.Size <= maxConnectFrame {
		if len(frame) < h.Size {
			return more
		}
		s.refresh(frame[:h.Size], h)
	}
	if s.aside == nil || len(s.aside.challenged) == 0 {
		return forward
	}
	l := s.aside.challenged[0]
	if s.aside.challenged = s.aside.challenged[1:]; len(s.aside.challenged) == 0 {
		s.aside.challenged = nil
	}
	if l.dead {
		return drop
	}
	s.sh.target = l
	return forward
}

// refresh takes a token that the client says in answer to a challenge for its CONNECT, where it is the same. Other methods speak of something else
// there.
func (s *Session) refresh(frame []byte, h codec.Head) {
	var cmd, connect pulsarpb.BaseCommand
	if codec.Parse(&cmd, frame, h) != nil || cmd.GetAuthResponse().GetResponse().GetAuthMethodName() != methodToken {
		return
	}
	head, _, err := codec.ParseHead(s.ident.connect, len(s.ident.connect))
	if err != nil || codec.Parse(&connect, s.ident.connect, head) != nil || connect.GetConnect().GetAuthMethodName() != methodToken {
		return
	}
	connect.Connect.AuthData = cmd.GetAuthResponse().GetResponse().GetAuthData()
	old := s.ident
	s.ident = s.sh.pool.identityOf(connect.Connect)
	s.sh.pool.releaseIdentity(old)
}

// methodToken is CONNECT's auth_method_name of JSON web tokens.
const methodToken = "token"

// legTo finds, or begins to make, the leg to a broker; nil when there are too many.
func (s *Session) legTo(now time.Time, clusterName, broker string) *leg {
	if s.leg.cluster == clusterName && s.leg.broker == broker {
		return s.leg
	}
	a := s.makeAside()
	for _, l := range a.legs {
		if l.cluster == clusterName && l.broker == broker {
			return l
		}
	}
	c, ok := s.sh.cfg.Clusters().Get(clusterName)
	if !ok || len(a.legs) >= maxExtraLegs {
		return nil
	}
	l := &leg{s: s, cluster: clusterName, broker: broker, connect: s.ident.connect, heard: now,
		extra: &extraLeg{deadline: now.Add(s.sh.cfg.HandshakeTimeout)}}
	a.legs = append(a.legs, l)
	s.sh.counters.ExtraLegs.Add(1)
	s.sh.counters.ExtraLegsOpened.Add(1)
	s.sh.dial(c, broker, l)
	s.sh.timers.sooner(&s.timer, l.extra.deadline)
	return l
}

// extraHandshake takes the broker's answers to CONNECT. The client hears of challenges only: it has been told what its own broker supports.
func (l *leg) extraHandshake(now time.Time, src []byte) (pos int) {
	s := l.s
	for pos < len(src) {
		h, ok, err := codec.ParseHead(src[pos:], s.sh.cfg.MaxControl)
		if err != nil {
			l.fail(now, CauseBrokerFrame, fmt.Sprintf("it answered CONNECT with what is no frame: %v", err))
			return len(src)
		}
		if !ok || len(src)-pos < h.Size {
			return pos
		}
		frame := src[pos : pos+h.Size]
		pos += h.Size
		switch h.Type {
		case codec.TypeConnected:
			l.connected(now)
			if l.dead {
				return len(src)
			}
			return pos + l.relayDown(now, src[pos:])
		case codec.TypeAuthChallenge:
			s.noteChallenge(l)
			s.send(frame)
		case codec.TypePing:
			l.send(pongFrame)
		case codec.TypePong:
		case codec.TypeError:
			l.fail(now, CauseBrokerError, brokerErrorText(frame, h))
			return len(src)
		default:
			l.fail(now, CauseBrokerFrame, fmt.Sprintf("it answered CONNECT with %s", h.Type))
			return len(src)
		}
	}
	return pos
}

// connected sends what has waited for the leg.
func (l *leg) connected(now time.Time) {
	l.ready = true
	l.s.sh.pool.noteAlive(l.cluster, l.broker)
	waiting := l.extra.waiting
	l.extra.waiting = nil
	for _, p := range waiting {
		l.carry(now, p)
	}
}

// carry has a SUBSCRIBE judged again, now that its leg is there.
func (l *leg) carry(now time.Time, p *parked) {
	if p.over || l.s.state != stateBridged {
		return
	}
	s, sh := l.s, l.s.sh
	sh.parking.remove(p)
	p.leave()
	sh.via = l
	s.until = p.until
	s.replay(now, []*parked{p})
	s.until = time.Time{}
	sh.via = nil
}

// fail ends a leg: with it the client connection when the client asked for it, or has got a part of a frame from it, and otherwise its consumers alone.
func (l *leg) fail(now time.Time, cause Cause, text string) {
	s := l.s
	if l.dead {
		return
	}
	if l.extra == nil {
		s.close(now, cause, text)
		return
	}
	where := fmt.Sprintf("broker %s of cluster %s, for a topic that is leaving that: ", l.broker, l.cluster)
	if l.down.busy() {
		s.close(now, cause, where+text+" in the middle of a frame")
		return
	}
	s.sh.counters.ExtraLegsFailed.Add(1)
	if !l.ready {
		s.sh.counters.cluster(l.cluster).DialFailures.Add(1)
		if cause != CauseBrokerError {
			s.sh.pool.noteFailure(now, l.cluster, l.broker)
		}
	}
	s.sh.report(Report{Event: EventLegLost, Session: s.id, Peer: s.peer, Cause: cause, Cluster: l.cluster, Broker: l.broker, Text: text})
	waiting := l.extra.waiting
	l.extra.waiting = nil
	s.dropLeg(now, l)
	for _, p := range waiting {
		switch {
		case p.over || s.state != stateBridged:
		case cause == CauseBrokerError, cause == CauseClusterDead: // asking again would not help
			p.giveUpOn(now, RefusedClusterUnreachable, where+text)
		default:
			s.findFar(now, p, where+text)
		}
	}
}

// dropLeg ends an extra leg, its consumers, and what its broker owes answers to.
func (s *Session) dropLeg(now time.Time, l *leg) {
	l.close()
	a := s.aside
	a.legs = slices.DeleteFunc(a.legs, func(o *leg) bool { return o == l })
	a.forget(now, l)
	s.sh.counters.ExtraLegs.Add(-1)
	if s.upLeg == l {
		s.upLeg, s.up.drop = s.leg, s.up.left > 0
	}
	l.deferred = nil
	gone := fmt.Sprintf("the connection to broker %s of cluster %s was lost: try again", l.broker, l.cluster)
	for _, req := range slices.Sorted(maps.Keys(s.pending)) {
		p := s.pending[req]
		if p.h.leg != l {
			continue
		}
		key := keyOf(p.h)
		s.settled(req)
		switch p.kind {
		case pendingCreate:
			s.deny(RefusedLegLost, req, codec.ErrorServiceNotReady, p.h.full, gone)
		case pendingSeek, pendingUnsubscribe:
			s.sh.answered(now, key)
			fallthrough
		case pendingLastID:
			s.deny(RefusedLegLost, req, codec.ErrorServiceNotReady, p.h.full, gone)
		case pendingAck:
			s.refuseAck(RefusedLegLost, p.h.id, req, p.h.full, gone)
		case pendingOwed:
			s.sh.payDebt(now, p.h, true)
			s.sendCommand(successCommand(req))
		case pendingClose:
			s.sh.payDebt(now, p.h, true)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(s.consumers)) {
		h := s.consumers[id]
		if h == nil || h.leg != l {
			continue
		}
		tell := h.state == handleLive || h.state == handleCreating && h.again
		if h.motion != nil && h.motion.left {
			tell = false
		}
		h.gate.Closed()
		if tell {
			s.sendCommand(closeCommand(h, codec.NoRequest, nil, nil))
		}
		s.remove(now, h)
		if s.state == stateClosed {
			return
		}
	}
	l.passMarks(now)
}

// handleAckAnswer passes an ACK_RESPONSE.
func (l *leg) handleAckAnswer(frame []byte, head codec.Head) verdict {
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, head); err != nil {
		return bad
	}
	req := cmd.GetAckResponse().GetRequestId()
	if p, ok := l.s.pending[req]; ok && p.kind == pendingAck && p.h.leg == l {
		l.s.settled(req)
	}
	return forward
}

// forget takes l out of all that waits.
func (a *aside) forget(now time.Time, l *leg) {
	a.queue = slices.DeleteFunc(a.queue, func(o *leg) bool { return o == l })
	if a.turn == l {
		a.next(now)
	} else if len(a.queue) > 0 && a.turn == nil && a.s.talking() == nil {
		a.next(now)
	}
}

// closeAside ends what is left of the extra legs of a session that has closed them.
func (s *Session) closeAside(now time.Time) {
	if s.aside == nil {
		return
	}
	for _, l := range s.aside.legs {
		l.passMarks(now)
	}
	s.sh.counters.ExtraLegs.Add(-int64(len(s.aside.legs)))
	s.aside = nil
}

// lookAfter has a leg's broker asked for a sign of life, and ends a silent one. at is when to look again.
func (l *leg) lookAfter(now time.Time) (at time.Time) {
	cfg := l.s.sh.cfg
	if l.paused || l.held {
		return now.Add(cfg.KeepAlive)
	}
	at, dead := cfg.keepAlive(now, l.heard, &l.pinged, l.ping)
	if dead {
		l.fail(now, CauseBrokerSilent, fmt.Sprintf("silent for %s although asked", now.Sub(l.heard).Round(time.Second)))
	}
	return at
}

// lookAside looks after the extra legs: those that take too long, are silent, or have nothing to do.
func (s *Session) lookAside(now time.Time) (next time.Time) {
	next = now.Add(s.sh.cfg.KeepAlive)
	for _, l := range slices.Clone(s.aside.legs) {
		at := next
		switch {
		case l.dead:
		case l.ready && !l.used() && !l.down.busy():
			s.dropLeg(now, l)
		case l.ready:
			at = l.lookAfter(now)
		case now.Before(l.extra.deadline):
			at = l.extra.deadline
		default:
			l.fail(now, CauseBrokerHandshake, fmt.Sprintf("it did not complete the handshake within %s", s.sh.cfg.HandshakeTimeout))
		}
		if s.state == stateClosed {
			return next
		}
		if at.Before(next) {
			next = at
		}
	}
	return next
}

// used tells whether an extra leg has a consumer, or an answer to wait for.
func (l *leg) used() bool {
	for _, h := range l.s.consumers {
		if h.leg == l && (h.state != handleEvicted || h.gate.Closing) {
			return true
		}
	}
	for _, p := range l.s.pending {
		if p.h.leg == l {
			return true
		}
	}
	return false
}

// far is the way of a SUBSCRIBE to another cluster than that of the connection.
type far struct {
	cluster string
	full    string // topic
	trouble string
}

// parkFar has a SUBSCRIBE wait for a leg to the broker that has its topic on another cluster. It is judged again when the map says something else of the topic.
func (s *Session) parkFar(now time.Time, m *moving, kind codec.Type, frame []byte, name, full, clusterName string, req, id uint64) {
	if s.creationParked(kind, id) != nil {
		s.denyBusyID(req, id, name)
		return
	}
	p := &parked{s: s, until: s.until, frame: append([]byte(nil), frame...), kind: kind, id: id, req: req, name: name, far: &far{cluster: clusterName, full: full}}
	if !s.sh.parking.add(now, p) {
		p.refuse(now, fmt.Sprintf("a subscription of topic %s still reads cluster %q, and too many requests wait for connections to that (limits.parked_requests): try again", name, clusterName))
		return
	}
	s.sh.counters.ParkedTotal.Add(1)
	p.m = m
	m.parked = append(m.parked, p)
	s.findFar(now, p, "")
}

// findFar asks the cluster which broker has the topic.
func (s *Session) findFar(now time.Time, p *parked, trouble string) {
	if trouble != "" {
		p.far.trouble = trouble
	}
	req := uint64(0)
	q := s.sh.pool.take(s.ident)
	q.kind, q.cluster, q.topic = RequestLookup, p.far.cluster, p.far.full
	q.cmd = command(codec.TypeLookup, &pulsarpb.BaseCommand{LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &p.far.full, RequestId: &req}})
	s.sh.pool.turn++
	s.sh.pool.ask(now, q, waiter{far: p})
}

// found goes on with a SUBSCRIBE whose topic's broker was asked for.
func (p *parked) found(now time.Time, a Answer) {
	s := p.s
	if p.over || s.state != stateBridged {
		return
	}
	if a.Failed() {
		reason := a.Refusal
		if reason == notRefused {
			reason = RefusedClusterUnreachable
		}
		p.giveUpOn(now, reason, fmt.Sprintf("cluster %q, which the subscription still reads, says of topic %s: %s", p.far.cluster, p.name, a.Text))
		return
	}
	l := s.legTo(now, p.far.cluster, a.Broker)
	switch {
	case l == nil:
		p.giveUpOn(now, RefusedTooManyLegs, fmt.Sprintf("this connection has %d more to brokers of clusters that its topics are leaving, the limit of the proxy: try again", len(s.extraLegs())))
	case l.ready:
		l.carry(now, p)
	default:
		l.extra.waiting = append(l.extra.waiting, p)
	}
}

// giveUpOn answers p, which waited for an extra leg, with an error that clients retry.
func (p *parked) giveUpOn(now time.Time, reason Refusal, text string) {
	p.s.sh.parking.remove(p)
	p.leave()
	p.s.deny(reason, p.req, codec.ErrorServiceNotReady, p.name, text)
}
