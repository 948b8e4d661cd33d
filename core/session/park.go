package session

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/switching"
)

// parked is a request of a client that waits for the end of a fence, for a lease, or for a broker's answer to our CLOSE. It is judged
// again then, as if it had just come.
type parked struct {
	s            *Session
	until        time.Time // zero for what needs no answer
	older, newer *parked   // in parking, by until

	q   *question // a lookup, or
	req uint64

	size  int    // bytes that it counts for in parking
	frame []byte // a command on a bridged connection, or several that need no answer
	kind  codec.Type
	id    uint64  // of its producer or consumer
	name  string  // of its topic
	of    *handle // in whose motion.queue or waiter it is; nil for one in moving.parked
	m     *moving // in whose parked it is
	far   *far    // a SUBSCRIBE that waits for an extra leg
	aged  bool    // it is in aging.parked
	over  bool    // answered, or nobody waits any more
}

// parking is all that waits, the first to give up first. Loop-owned.
type parking struct {
	sh          *Shard
	first, last *parked
	timer       timer
	count       int
	bytes       int
}

// Bytes that a consumer of a fenced topic may have held, and all that waits in one shard.
const (
	maxHeldOfHandle = 1 << 20
	maxHeld         = 32 << 20
)

func (pk *parking) init(sh *Shard) {
	pk.sh = sh
	pk.timer.owner = pk
}

// add parks p until its time; false when there is no room for more.
func (pk *parking) add(now time.Time, p *parked) bool {
	cfg := pk.sh.cfg
	p.size = len(p.frame)
	if p.q != nil {
		if p.size = len(p.q.topic) + len(p.q.fields); p.q.cmd != nil {
			p.size += proto.Size(p.q.cmd)
		}
	}
	if pk.count >= cfg.MaxParked || len(p.s.parked) >= cfg.LookupsPerConnection || pk.bytes+p.size > maxHeld {
		return false
	}
	if p.until.IsZero() {
		p.until = now.Add(cfg.ParkTime)
	}
	// What is parked again keeps its time, and goes before what came later.
	at := pk.last
	for at != nil && p.until.Before(at.until) {
		at = at.older
	}
	p.older = at
	if at == nil {
		p.newer, pk.first = pk.first, p
	} else {
		p.newer, at.newer = at.newer, p
	}
	if p.newer == nil {
		pk.last = p
	} else {
		p.newer.older = p
	}
	p.over = false
	pk.count++
	pk.bytes += p.size
	if p.s.parked == nil {
		p.s.parked = make(map[*parked]struct{})
	}
	p.s.parked[p] = struct{}{}
	pk.sh.counters.Parked.Add(1)
	pk.sh.timers.sooner(&pk.timer, pk.first.until)
	return true
}

// remove takes p out: somebody looks after it now.
func (pk *parking) remove(p *parked) {
	if p.over {
		return
	}
	p.over = true
	if p.older != nil {
		p.older.newer = p.newer
	} else {
		pk.first = p.newer
	}
	if p.newer != nil {
		p.newer.older = p.older
	} else {
		pk.last = p.older
	}
	p.older, p.newer = nil, nil
	pk.count--
	pk.bytes -= p.size
	delete(p.s.parked, p)
	pk.sh.counters.Parked.Add(-1)
}

// fire gives up what has waited for its time.
func (pk *parking) fire(now time.Time) {
	for n := 0; n < timersPerTick && pk.first != nil && !now.Before(pk.first.until); n++ {
		p := pk.first
		pk.remove(p)
		p.leave()
		p.giveUp(now)
	}
	if pk.first != nil {
		pk.sh.timers.set(&pk.timer, pk.first.until)
	}
}

// leave takes p out of what it is in.
func (p *parked) leave() {
	switch {
	case p.aged:
		p.s.sh.aging.parked = without(p.s.sh.aging.parked, p)
	case p.m != nil:
		p.m.parked = without(p.m.parked, p)
	case p.of != nil && p.of.waiter == p:
		p.of.waiter = nil
	case p.of != nil && p.of.motion != nil:
		p.of.motion.queue = without(p.of.motion.queue, p)
		p.of.motion.bytes -= len(p.frame)
	}
	p.m, p.of = nil, nil
}

// without removes p, which is at or near the front, keeping the order.
func without(list []*parked, p *parked) []*parked {
	for i, one := range list {
		if one == p {
			copy(list[1:i+1], list[:i])
			list[0] = nil
			return list[1:]
		}
	}
	return list
}

// giveUp answers p with an error that clients retry.
func (p *parked) giveUp(now time.Time) {
	s := p.s
	text := fmt.Sprintf("topic %s: the broker has not closed the predecessor of id %d within %s: try again", p.name, p.id, s.sh.cfg.ParkTime)
	if p.aged {
		text = fmt.Sprintf("%s, and that has not ended within %s: try again", s.sh.aging.text(p.name), s.sh.cfg.ParkTime)
	} else if m := s.sh.movingOf(p.name); m != nil {
		text = fmt.Sprintf("%s, and that has not ended within %s: try again", m.movingText(), s.sh.cfg.ParkTime)
	}
	if p.far != nil {
		text = fmt.Sprintf("topic %s is leaving cluster %q, and the broker that has it there was not reached within %s: try again", p.name, p.far.cluster, s.sh.cfg.ParkTime)
		if p.far.trouble != "" {
			text += "; " + p.far.trouble
		}
	}
	p.refuse(now, text)
}

// refuse answers p with an error: on a connection for lookups never ServiceNotReady.
func (p *parked) refuse(now time.Time, text string) {
	s := p.s
	switch {
	case p.aged:
		s.deny(RefusedMapTooOld, p.req, codec.ErrorServiceNotReady, p.name, text)
	case p.q != nil:
		s.inflight += s.sh.cfg.cost(p.q.kind)
		s.sh.pool.refuse(now, p.q, waiter{s: s, req: p.req}, failure(RefusedSwitching, codec.ErrorMetadata, text))
	case p.kind == codec.TypeAck:
		s.refuseAck(RefusedSwitching, p.id, p.req, p.name, text)
	default:
		s.deny(RefusedSwitching, p.req, codec.ErrorServiceNotReady, p.name, text)
	}
}

// drop forgets p, whose client is gone.
func (p *parked) drop() {
	p.s.sh.parking.remove(p)
	p.leave()
	if p.q != nil {
		p.s.sh.pool.give(p.q)
		p.q = nil
	}
}

// release has everything that waits for m judged again.
func (m *moving) release(now time.Time) {
	list := m.parked
	m.parked = nil
	for _, p := range list {
		if p.over {
			continue
		}
		m.sh.parking.remove(p)
		p.m = nil
		p.again(now)
	}
}

// again has p judged as if it had just come; when it has to wait once more, it keeps its time.
func (p *parked) again(now time.Time) {
	s := p.s
	if p.q != nil {
		s.inflight += s.sh.cfg.cost(p.q.kind)
		s.route(now, p.q, p.req, p.until)
		return
	}
	s.until = p.until
	s.replay(now, []*parked{p})
	s.until = time.Time{}
}

// replay judges commands of a bridged client as if they had just come.
func (s *Session) replay(now time.Time, queue []*parked) {
	for _, p := range queue {
		for rest := p.frame; len(rest) > 0 && s.state == stateBridged; {
			h, _, _ := codec.ParseHead(rest, s.maxFrame)
			frame := rest[:h.Size]
			rest = rest[h.Size:]
			v := s.judgeSend(now, frame, h)
			to := s.leg
			switch v {
			case replace:
				v = s.judgeUp(now, frame, h)
				to = s.sh.target
			case besides:
				v, to = s.judgeBesides(h)
			}
			switch v {
			case forward:
				to.send(frame)
			case remap:
				if v, out, n := s.remap(now, frame, h); v == remap {
					to.send(append(out[:len(out):len(out)], frame[n:]...))
				}
			case drop:
				s.sh.counters.DroppedFrames.Add(1)
			}
		}
	}
}

// parkLookup has a lookup wait. It does not count as one under way meanwhile: the other topics of the client go on.
func (s *Session) parkLookup(now time.Time, m *moving, q *question, req uint64, until time.Time) {
	s.inflight -= s.sh.cfg.cost(q.kind)
	m.park(now, &parked{s: s, until: until, q: q, req: req, kind: codec.TypeLookup, name: q.topic, m: m})
	s.maybeRelease(now)
}

// park has p wait for m, or answers it when there is no room.
func (m *moving) park(now time.Time, p *parked) {
	if !m.sh.parking.add(now, p) {
		p.refuse(now, m.movingText()+", and too many requests wait for that (limits.parked_requests): try again")
		return
	}
	m.sh.counters.ParkedTotal.Add(1)
	m.parked = append(m.parked, p)
	m.lookAgain(now)
}

// parkCreation has a PRODUCER or SUBSCRIBE wait for m, for the broker's answer to the CLOSE of old, or, without both, for contact with the map store.
func (s *Session) parkCreation(now time.Time, m *moving, old *handle, kind codec.Type, frame []byte, name string, req, id uint64) {
	if s.creationParked(kind, id) != nil {
		s.denyBusyID(req, id, name)
		return
	}
	p := &parked{s: s, until: s.until, frame: append([]byte(nil), frame...), kind: kind, id: id, req: req, name: name}
	if m != nil {
		p.m = m
		m.park(now, p)
		return
	}
	if old == nil {
		s.sh.aging.park(now, p)
		return
	}
	p.of = old
	if !s.sh.parking.add(now, p) {
		p.of = nil
		s.deny(RefusedClosing, req, codec.ErrorServiceNotReady, name, fmt.Sprintf("the broker has not closed the evicted predecessor of id %d yet: try again", id))
		return
	}
	s.sh.counters.ParkedTotal.Add(1)
	old.waiter = p
}

func (s *Session) denyBusyID(req, id uint64, name string) {
	s.deny(RefusedIDInUse, req, codec.ErrorServiceNotReady, name, fmt.Sprintf("an earlier request for id %d waits: try again, or close it first", id))
}

// creationParked finds the PRODUCER or SUBSCRIBE for an id that waits.
func (s *Session) creationParked(kind codec.Type, id uint64) *parked {
	for p := range s.parked {
		if p.kind == kind && p.id == id && p.q == nil {
			return p
		}
	}
	return nil
}

// closeParked answers a creation that waits, because the client closes its id; false when none does.
func (s *Session) closeParked(now time.Time, kind codec.Type, id, req uint64) bool {
	p := s.creationParked(kind, id)
	if p == nil {
		return false
	}
	s.sh.parking.remove(p)
	p.leave()
	p.refuse(now, fmt.Sprintf("id %d was closed before topic %s could be opened", id, p.name))
	s.sendCommand(successCommand(req))
	return true
}

// waiterMayGo has the creation judged that waited for the broker to close h.
func (h *handle) waiterMayGo(now time.Time) {
	if p := h.waiter; p != nil {
		h.waiter = nil
		p.of = nil
		h.s.sh.parking.remove(p)
		p.again(now)
	}
}

// holdCommand keeps what the client of a fenced consumer says until the fence ends: acknowledgements are for the cluster that the topic
// has then. It answers false when the frame may pass.
func (s *Session) holdCommand(now time.Time, frame []byte, t codec.Type, cmd *pulsarpb.BaseCommand) bool {
	var id, req uint64
	answer := true
	switch t {
	case codec.TypeAck:
		id, req, answer = cmd.GetAck().GetConsumerId(), cmd.GetAck().GetRequestId(), cmd.Ack != nil && cmd.Ack.RequestId != nil
	case codec.TypeSeek:
		id, req = cmd.GetSeek().GetConsumerId(), cmd.GetSeek().GetRequestId()
	case codec.TypeUnsubscribe:
		id, req = cmd.GetUnsubscribe().GetConsumerId(), cmd.GetUnsubscribe().GetRequestId()
	case codec.TypeFlow:
		id, answer = cmd.GetFlow().GetConsumerId(), false
	case codec.TypeRedeliver:
		id, answer = cmd.GetRedeliverUnacknowledgedMessages().GetConsumerId(), false
	default:
		return false // what only reads does no harm
	}
	c := s.consumers[id]
	if c == nil || c.motion == nil || c.state >= handleEvicting {
		return false
	}
	st := c.motion.m.standing()
	if t == codec.TypeAck && c.gate.Ack(st) == switching.Pass || t != codec.TypeAck && switching.Admit(st).Other == switching.Pass && c.gate.Epoch == st.Epoch {
		return false
	}
	mo, pk := c.motion, &s.sh.parking
	mo.heard = now
	room := mo.bytes+len(frame) <= maxHeldOfHandle && pk.bytes+len(frame) <= maxHeld
	if !answer {
		if !room {
			// It comes again: the message that was not acknowledged, or with the new consumer the permits.
			c.gate.Poisoned = true
			s.sh.counters.HeldLost.Add(1)
			return true
		}
		s.sh.counters.HeldTotal.Add(1)
		mo.bytes += len(frame)
		pk.bytes += len(frame)
		s.sh.counters.HeldBytes.Add(int64(len(frame)))
		if n := len(mo.queue); n > 0 && mo.queue[n-1].over {
			mo.queue[n-1].frame = append(mo.queue[n-1].frame, frame...)
			return true
		}
		mo.queue = append(mo.queue, &parked{s: s, over: true, frame: append([]byte(nil), frame...)})
		return true
	}
	p := &parked{s: s, frame: append([]byte(nil), frame...), kind: t, id: id, req: req, name: c.full, of: c}
	if !room || !pk.add(now, p) {
		p.of = nil
		p.refuse(now, mo.m.movingText()+", and too many requests wait for that (limits.parked_requests): try again")
		return true
	}
	s.sh.counters.ParkedTotal.Add(1)
	mo.bytes += len(frame)
	mo.queue = append(mo.queue, p)
	return true
}

// takeQueue is what was held of h, which nobody holds any more.
func (h *handle) takeQueue() []*parked {
	mo := h.motion
	if mo == nil {
		return nil
	}
	queue := mo.queue
	for _, p := range queue {
		if p.over { // needs no answer
			h.s.sh.parking.bytes -= len(p.frame)
			h.s.sh.counters.HeldBytes.Add(-int64(len(p.frame)))
		} else {
			h.s.sh.parking.remove(p)
		}
		p.of = nil
	}
	mo.queue, mo.bytes = nil, 0
	return queue
}
