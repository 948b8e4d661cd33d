package switching

import (
	"time"

	"pointsman/core/route"
)

// eachOfProducer: the client that publishes, its handle in proxy i, and the brokers behind it.
func (m *model) eachOfProducer(w *world, i int, do doer) {
	p := &w.procs[i]
	h := &p.prod
	if p.orphans.n > 0 {
		do(evOrphan, i, false, func(w *world) { m.store(w, false, false, w.procs[i].orphans.pop()) })
	}
	if p.orphansB.n > 0 {
		do(evOrphanB, i, false, func(w *world) { m.store(w, true, false, w.procs[i].orphansB.pop()) })
	}
	home := int(w.home) == i
	if !p.up {
		return
	}
	s := m.standing(p)
	if !h.on {
		if home && w.acked < m.messages && Admit(s).Produce == Pass {
			do(evOpen, i, false, func(w *world) {
				p := &w.procs[i]
				p.prod = handle{on: true, client: true, b: p.p.Entry().Cluster == "b", g: Gate{Epoch: p.p.Entry().Epoch}}
				w.next = w.acked + 1
			})
		}
	} else {
		m.eachOfProducerHandle(w, i, s, do)
	}
	if w.left.move > 0 && home && m.proxies > 1 {
		do(evMove, i, true, func(w *world) {
			w.left.move--
			w.home = uint8((i + 1) % m.proxies)
			m.clientGone(&w.procs[i])
		})
	}
}

// clientGone: the proxy closes what the client had, and waits for the broker's answer.
func (m *model) clientGone(p *proc) {
	if p.prod.client {
		p.prod.client = false
		p.prod.g.Close()
	}
}

func (m *model) eachOfProducerHandle(w *world, i int, s Standing, do doer) {
	h := &w.procs[i].prod
	if h.client && w.next <= m.messages {
		probe := h.g
		if probe.Send(s) == Pass {
			do(evSend, i, false, func(w *world) {
				h := &w.procs[i].prod
				h.g.Send(s)
				if h.dead {
					h.g.BrokerClosed() // and tells so
				} else if !h.sent.push(w.next) {
					m.full = true
				}
				w.next++
			})
		} else {
			do(evDrop, i, false, func(w *world) {
				h := &w.procs[i].prod
				if h.g.Send(s); m.is(notPoisoned) {
					h.g.Poisoned = false
				}
				w.next++
			})
		}
	}
	if h.sent.n > 0 {
		k := evStoreA
		if h.b {
			k = evStoreB
		}
		do(k, i, false, func(w *world) {
			h := &w.procs[i].prod
			x := h.sent.pop()
			m.store(w, h.b, false, x)
			h.back.push(x)
		})
	}
	if h.back.n > 0 {
		do(evReceipt, i, false, func(w *world) {
			p := &w.procs[i]
			x := p.prod.back.pop()
			p.prod.g.Receipt()
			if p.prod.client {
				w.acked = max(w.acked, x)
			}
			m.settle(p)
		})
	}
	if h.client && h.g.MustClose(s) {
		do(evCloseHandle, i, false, func(w *world) { m.clientGone(&w.procs[i]) })
	}
	if h.g.Closing && h.sent.n == 0 && h.back.n == 0 {
		do(evCloseAnswered, i, false, func(w *world) {
			p := &w.procs[i]
			p.prod.g.Closed()
			p.prod = handle{}
			m.settle(p)
		})
	}
	if w.left.leg > 0 {
		do(evLegLost, i, true, func(w *world) {
			w.left.leg--
			m.loseLeg(w, i)
			m.settle(&w.procs[i])
		})
	}
}

// evict is an unload on the cluster that the map names: its handles are gone, and so is what they had sent.
func (m *model) evict(w *world) {
	b := w.entry.Cluster == "b"
	for i := range m.proxies {
		p := &w.procs[i]
		if b {
			p.orphansB = queue{}
		} else {
			p.orphans = queue{}
		}
		m.evictHandle(p, &p.prod, b)
		for k := range p.cons {
			if held := p.cons[k].held; m.evictHandle(p, &p.cons[k], b) && !b {
				w.ackA[k] |= held
			}
		}
		m.settle(p)
	}
}

// evictHandle tells whether the client was told, and so gave up what was held.
func (m *model) evictHandle(p *proc, h *handle, b bool) bool {
	if !h.on || h.b != b {
		return false
	}
	h.sent, h.dead = queue{}, true
	if Admit(m.standing(p)).Message == Drop { // swallowed under the fence
		h.g.BrokerClosed()
		h.g.Outstanding = uint32(h.back.n)
		return false
	}
	*h = handle{} // the client comes back
	return true
}

// eachOfConsumer: the client that consumes subscription k.
func (m *model) eachOfConsumer(w *world, i, k int, do doer) {
	p := &w.procs[i]
	if int(w.at[k]) != i || !p.up {
		return
	}
	s := m.standing(p)
	h := &p.cons[k]
	home, waits := m.home(p.p.Entry(), k)
	if !h.on {
		if Admit(s).Open == Pass && !waits && (w.onA>>k&1 == 1 || home == "b") {
			do(evSubscribe, i, false, func(w *world) {
				p := &w.procs[i]
				p.cons[k] = handle{on: true, client: true, b: home == "b", g: Gate{Epoch: p.p.Entry().Epoch}}
				if m.drain && home == "b" && w.made>>k&1 == 0 { // by the SUBSCRIBE: at the end, or where the log begins
					if w.made |= 1 << k; m.listed(k) {
						w.ackB[k] |= w.b.set()
					}
				}
			})
		}
		m.eachOfMove(w, i, k, do)
		return
	}
	log, acked := w.a, w.ackA[k]
	if h.b {
		log, acked = w.b, w.ackB[k]
	}
	for x := m.first(); x <= m.messages && !h.dead; x++ {
		if log.set()>>x&1 == 0 || acked>>x&1 == 1 || h.seen>>x&1 == 1 {
			continue
		}
		probe := h.g
		e := evDeliver
		if probe.Message(s) != Pass {
			e = evMessageDropped
		}
		do(e, i, false, func(w *world) {
			h := &w.procs[i].cons[k]
			h.seen |= 1 << x
			if h.g.Message(s) == Pass {
				h.unread |= 1 << x
				m.had(w, k, h.b, x)
			}
		})
		break // in order
	}
	for x := m.first(); x <= m.messages; x++ {
		if h.unread>>x&1 == 0 {
			continue
		}
		action := h.g.Ack(s)
		if m.is(acksNotHeld) && action == Hold {
			action = Pass
		}
		e := evAck
		if action == Hold {
			e = evAckHeld
		}
		do(e, i, false, func(w *world) {
			h := &w.procs[i].cons[k]
			h.unread &^= 1 << x
			switch {
			case action == Hold:
				h.held |= 1 << x
			case action == Pass && h.b:
				w.ackB[k] |= 1 << x
			case action == Pass && !h.dead:
				w.ackA[k] |= 1 << x
			}
		})
		if m.drain {
			break // in order, for the worlds to stay small
		}
	}
	if h.g.MustClose(s) || m.drain && !h.g.Closing && (h.b != (home == "b") || waits) {
		do(evCloseHandle, i, false, func(w *world) {
			p := &w.procs[i]
			p.cons[k] = handle{}
			m.settle(p)
		})
	}
	m.eachOfSeek(w, i, k, do)
	m.eachOfMove(w, i, k, do)
}

// eachOfLeader: the next step of one that believes to lead.
func (m *model) eachOfLeader(w *world, i int, do doer) {
	l := &w.leaders[i]
	now := modelNow
	step := l.c.Next(now)
	if late := l.c.Next(modelLate); late.Work == WorkWrite && l.c.gaveUp(late) && !l.c.gaveUp(step) && l.c.stage >= stagePrepared && l.c.stage <= stageFlip {
		do(evDeadline, i, false, func(w *world) { m.write(w, i, late, evDeadline) })
	}
	observe := func(w *world, r Report) {
		l := &w.leaders[i]
		r.Began = now
		l.half = false
		l.c.Observe(now, step, r)
		l.normalize()
		// What nobody else can notice happens at once.
		if !m.consumer && l.c.stage == stageReadBack {
			l.c.stage = stageTailAgain
		}
		if l.c.stage == stageVerify {
			l.c.Observe(now, l.c.Next(now), Report{Began: now})
		}
	}
	plain := func(k kind, r Report) { do(k, i, false, func(w *world) { observe(w, r) }) }
	switch step.Work {
	case WorkRead:
		alone := !w.leaders[1].on && w.left.change == 0 && w.left.unknown == 0 && w.left.wish == 0 && w.left.back == 0
		if alone {
			plain(evRead, Report{Record: w.rec, Entry: w.entry})
			return
		}
		if !l.half {
			do(evRead, i, false, func(w *world) {
				w.leaders[i].half, w.leaders[i].rec = true, w.rec
			})
			return
		}
		r := Report{Record: l.rec, Entry: w.entry}
		if m.is(recordIsTruth) {
			r.Entry = m.entryOf(l.rec)
		}
		do(evRead, i, false, func(w *world) {
			w.leaders[i].rec = RecordState{}
			observe(w, r)
		})
	case WorkWrite:
		k := evWrite
		switch {
		case step.Record.State == StateAborted:
			k = evAbort
		case step.Record.State == StateEvicting && step.Record.Return:
			k = evReturn
		case step.Record.State == StateEvicting:
			k = evFlip
		case m.drain:
			k = m.kindOfDrain(step)
		}
		if w.entry != step.Before || w.rec.Rev+1 != step.Record.Rev {
			k = evConflict
		}
		do(k, i, false, func(w *world) { m.write(w, i, step, k) })
		if w.left.unknown > 0 {
			do(evUnknownDone, i, true, func(w *world) {
				w.left.unknown--
				m.apply(w, step)
				observe(w, Report{Answer: Unknown})
			})
			if !w.haunted {
				do(evUnknownLost, i, true, func(w *world) {
					w.left.unknown--
					w.ghost, w.haunted = step, true
					observe(w, Report{Answer: Unknown})
				})
			}
		}
	case WorkRecord:
		if m.eachOfPassOver(w, i, step, do) {
			return
		}
		do(evRecord, i, false, func(w *world) {
			l := &w.leaders[i]
			if w.rec.Rev+1 != step.Record.Rev {
				l.pass, l.over = notPassing, 0
				observe(w, Report{Answer: Conflict})
				return
			}
			m.noteDrain(w, step)
			w.rec.Rev, w.rec.State, w.rec.Return = step.Record.Rev, step.Record.State, step.Record.Return
			m.checkRecord(w)
			l.pass, l.over = notPassing, 0
			observe(w, Report{})
		})
	case WorkSurvey:
		if m.slow && !l.half {
			do(evRoster, i, false, func(w *world) { m.roster(w, i) })
			return
		}
		do(evSurvey, i, false, func(w *world) {
			rec := w.rec
			if w.leaders[i].half {
				rec = w.leaders[i].rec
			}
			s := m.survey(w, i)
			w.leaders[i].incs = [maxProxies]uint8{}
			observe(w, Report{Record: rec, Survey: s})
		})
	case WorkEvict:
		do(evEvict, i, false, func(w *world) {
			if !m.is(noEvict) && !w.leaders[i].early {
				m.evict(w)
			}
			observe(w, Report{})
		})
	case WorkTail:
		tail := w.a.n
		if l.tailSeen {
			tail = l.tail
		}
		if step.Return {
			tail = w.b.n
		}
		plain(evTail, Report{Tail: tails[tail]})
	case WorkReplicated:
		if step.Tail <= tails[w.replicated] {
			plain(evReplicated, Report{})
		}
	case WorkCarry:
		if m.drain {
			m.carryDrain(i, do, observe)
			return
		}
		if !l.half && m.consumer {
			do(evCarrySnap, i, false, func(w *world) { w.leaders[i].half, w.leaders[i].snap = true, w.ackA[0] })
			return
		}
		do(evCarry, i, false, func(w *world) {
			if i == 1 {
				w.inexact = true
			}
			attempt := uint8(1) << l.c.key.Attempt
			switch {
			case m.is(cursorsAtEnd):
				w.ackB[0] |= w.b.set()
			case !m.is(carryOnce) || w.carried&^attempt == 0:
				w.ackB[0] = w.leaders[i].snap
			}
			for n := range m.proxies { // a reset disconnects whoever consumes
				if h := &w.procs[n].cons[0]; h.on && h.b {
					*h = handle{}
				}
			}
			w.carried |= attempt
			w.leaders[i].snap = 0
			observe(w, Report{})
		})
	case WorkReadBack:
		if w.ackB == w.ackA || m.is(carryOnce) || m.is(cursorsAtEnd) || m.is(acksNotHeld) || w.inexact {
			plain(evReadBack, Report{})
		} else {
			plain(evReadBack, Report{Answer: NotYet})
		}
	case WorkTailAgain:
		r, log := Report{}, &w.a
		if step.Return {
			log = &w.b
		}
		if step.Tail < tails[log.n] && !m.is(drainBeforeFence) {
			r.Foreign = "x"
		}
		plain(evTailAgain, r)
	case WorkDrained, WorkReturnable, WorkCopy:
		m.eachOfDrain(w, i, step, do, observe)
	case WorkOver:
		if m.is(recordFirst) {
			m.eachOfPassOver(w, i, Step{Record: RecordState{State: l.c.end}}, do)
		}
	}
}

// normalize forgets what is for people, and that time passes.
func (l *leader) normalize() {
	if l.c.Nudge(); l.c.abort != "" {
		l.c.abort = "x"
	}
	l.c.notes, l.c.waiting, l.c.leaveAgain = "", "", time.Time{}
}

// roster is the first half of a slow survey.
func (m *model) roster(w *world, i int) {
	l := &w.leaders[i]
	l.half, l.rec, l.members, l.live = true, w.rec, 0, 0
	for n := range m.proxies {
		p := &w.procs[n]
		if l.incs[n] = p.inc; p.up && p.node == oldSession {
			l.incs[n]--
		}
		if p.member {
			l.members |= 1 << n
		}
		if p.node != nobody {
			l.live |= 1 << n
		}
	}
}

// entryOf is what the record alone would make one believe.
func (m *model) entryOf(r RecordState) route.Entry {
	e := route.Entry{Topic: "t", Cluster: "a", Epoch: 1, SwitchID: "s", Attempt: r.Attempt}
	switch r.State {
	case StateRequested:
		e.SwitchID, e.Attempt = "", 0
	case StatePrepared:
		e.State = route.StatePrepared
	case StateFenced:
		e.State = route.StateFenced
	case StateEvicting, StateDone, StateIncomplete:
		e.Cluster, e.Epoch = "b", 2
	}
	return e
}

// write does a write of leader i and tells it.
func (m *model) write(w *world, i int, step Step, k kind) {
	l := &w.leaders[i]
	now := modelNow
	if k == evDeadline {
		now = modelLate
	}
	r := Report{Began: modelNow}
	if !m.apply(w, step) {
		r.Answer = Conflict
	}
	l.half, l.snap = false, 0
	l.c.Observe(now, step, r)
	l.normalize()
}

// survey reads roster, sessions and acks.
func (m *model) survey(w *world, i int) Survey {
	l := &w.leaders[i]
	var s Survey
	var members, live uint8
	for n := range m.proxies {
		if p := &w.procs[n]; p.member {
			members |= 1 << n
			if p.node != nobody {
				live |= 1 << n
			}
		}
	}
	if l.half {
		members, live = l.members, l.live
		w.leaders[i].rec = RecordState{}
	}
	if l.c.stage == stagePrepared {
		l.gone |= members &^ live
		l.members, l.live = members, live
		if m.is(drainBeforeFence) {
			l.tailSeen, l.tail = true, w.a.n
		}
	}
	if m.is(sessionsBeforeFence) && l.c.stage == stageFenced {
		members, live = l.members, l.live
	}
	if m.is(rememberVanished) {
		live &^= l.gone
	}
	if !m.is(sessionsBeforeFence) {
		l.members, l.live = 0, 0
	}
	if !m.is(rememberVanished) {
		l.gone = 0
	}
	for n := range m.proxies {
		p := &w.procs[n]
		if p.tomb && !m.is(noTombstone) {
			s.Tombstones = append(s.Tombstones, ids[n])
		}
		for a := range p.prepared {
			attempt := uint32(a + 1)
			if m.is(acksOfAnyAttempt) {
				attempt = w.rec.Attempt
			}
			for inc := range incs {
				ack := Ack{Proxy: ids[n], Incarnation: incs[inc], Attempt: attempt}
				for _, phase := range []struct {
					state State
					set   uint8
				}{{StatePrepared, p.prepared[a]}, {StateFenced, p.fenced[a]}, {StateEvicting, p.evicting[a]}} {
					if phase.set>>inc&1 == 1 {
						ack.Phase, ack.Clean = phase.state, phase.state == StateFenced && p.clean[a]>>inc&1 == 1
						s.Acks = append(s.Acks, ack)
					}
				}
			}
		}
		if members>>n&1 == 0 || m.is(noRoster) && live>>n&1 == 0 {
			continue
		}
		inc := p.inc
		if p.up && p.node == oldSession {
			inc--
		}
		if l.half {
			inc = l.incs[n]
		}
		fact := MemberFact{Member: Member{ids[n], incs[inc]}, Live: live>>n&1 == 1, Aged: p.aged}
		w.inexact = w.inexact || p.aged
		if m.is(noExpiry) && p.prepared[w.rec.Attempt-1] != 0 && p.fenced[w.rec.Attempt-1] == 0 {
			fact.Live = false
		}
		s.Members = append(s.Members, fact)
	}
	if m.is(evictBeforeAcks) && l.c.stage == stageFenced && !l.early {
		l.early = true
		m.evict(w)
	}
	return s
}
