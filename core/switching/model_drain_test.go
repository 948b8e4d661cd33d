package switching

import "pointsman/core/route"

// This file is what the model has of a drain: no replication, up to two subscriptions, each with one consumer that may go to another proxy, the
// way back, and the next drain of a topic that was taken back.
//
// What is simplified: a seek comes only through a proxy that has the map of the moment, a copy to a is of one message at a time, and subscriptions pass over
// copies in one instant.

var subNames = [maxSubs]string{"s", "t"}

// home is where a proxy that goes by e sends subscription k.
func (m *model) home(e route.Entry, k int) (cluster string, waits bool) {
	if m.is(homeIgnored) {
		return e.Cluster, false
	}
	return route.Decision{Cluster: e.Cluster, Drain: e.Drain}.Home(subNames[k])
}

// followDrain is what a session does with a consumer when the map goes on.
func (m *model) followDrain(h *handle, k int, was, now route.Entry) {
	home, _ := m.home(now, k)
	stays := false
	switch {
	case now.Epoch == was.Epoch:
		stays = true
	case now.Epoch != was.Epoch+1:
	case now.Drain != "":
		stays = was.Drain == "" && was.Cluster == route.DrainFrom(now.Drain)
	default:
		stays = was.Drain != "" && now.Cluster == route.DrainFrom(was.Drain)
	}
	if stays && h.b == (home == "b") {
		h.g.Follow(now.Epoch)
	}
}

// had notes that the consumer of subscription k has a message.
func (m *model) had(w *world, k int, b bool, x uint8) {
	earlier := (uint8(1)<<x - 1) &^ 1
	switch {
	case !m.drain:
	case m.listed(k) && w.processed[k]>>x&1 == 0 && earlier&^w.processed[k] != 0:
		m.fail("order: subscription %d has message %d before messages %b", k, x, earlier&^w.processed[k])
	case b && w.ackA[k]&w.copies>>x&1 == 1 && w.want[k]>>x&1 == 0 && !w.inexact && !m.leftover:
		m.fail("twice: subscription %d has message %d on b, of which it has acknowledged the copy on a", k, x)
	}
	w.processed[k] |= 1 << x
	w.want[k] &^= 1 << x
	if b {
		w.hadOnB[k] |= 1 << x
	}
}

// checkDrain is what must hold of a write of entry and record, before it is done.
func (m *model) checkDrain(w *world, s Step) {
	for k := range m.subs() {
		before, _ := route.Decision{Cluster: w.entry.Cluster, Drain: w.entry.Drain}.Home(subNames[k])
		after, _ := route.Decision{Cluster: s.After.Cluster, Drain: s.After.Drain}.Home(subNames[k])
		switch {
		case w.onA>>k&1 == 0:
		case before == "a" && after == "b" && w.entry.Cluster == "a":
			m.fail("drain: subscription %d does not stay on a at the flip", k)
		case before == "a" && after == "b":
			// A copy that comes late is on b as well.
			if left := w.a.set() &^ w.ackA[k] &^ (w.b.set() &^ w.ackB[k]); left != 0 {
				m.fail("drain: subscription %d leaves messages %b on a", k, left)
			}
			if lost := w.want[k] & w.a.set(); lost != 0 {
				m.fail("drain: subscription %d leaves, and its client wants messages %b again", k, lost)
			}
		}
		if w.entry.Cluster == "b" && s.After.Cluster == "a" && w.hadOnB[k] != 0 {
			m.fail("return: subscription %d has had messages %b on b", k, w.hadOnB[k])
		}
	}
	if w.entry.Cluster == "b" && s.After.Cluster == "a" {
		if lost := w.b.set() &^ w.a.set() &^ 1; lost != 0 {
			m.fail("return: messages %b of b are not on a", lost)
		}
	}
}

// kindOfDrain names a write.
func (m *model) kindOfDrain(s Step) kind {
	before, err := route.ParseDrain(s.Before.Drain)
	switch {
	case err != nil:
		return evWrite
	case s.After.State == route.StateActive:
		return evEmpty
	case s.After.State != route.StateDraining:
		return evWrite
	case s.Before.State != route.StateDraining:
		return evGivenUp
	}
	after, _ := route.ParseDrain(s.After.Drain)
	for _, sub := range before.Subs {
		at, there := after.Find(sub.Name)
		switch {
		case !there:
			return evLeft
		case after.Subs[at].Leaving && !sub.Leaving:
			return evLeaving
		case sub.Leaving && !after.Subs[at].Leaving:
			return evPutBack
		}
	}
	return evWrite
}

// eachOfOperator: the way back, and a leader that finds that its attempt is over.
func (m *model) eachOfOperator(w *world, do doer) {
	if w.left.back > 0 && w.rec.State == StateDraining {
		do(evBack, 0, true, func(w *world) {
			w.left.back--
			rec := Record{Rev: w.rec.Rev, Attempt: w.rec.Attempt}.Back()
			w.rec.Rev, w.rec.Attempt, w.rec.State, w.rec.Wish, w.rec.Return = rec.Rev, rec.Attempt, rec.State, rec.Wish, rec.Return
		})
	}
	if w.leaders[0].c.Over() && !w.rec.State.Over() {
		do(evRedrive, 0, false, func(w *world) { w.leaders[0] = leader{on: true, c: m.leader(w)} })
	}
}

// eachOfMove: the consumer of subscription k goes to another proxy.
func (m *model) eachOfMove(w *world, i, k int, do doer) {
	if !m.drain || w.left.move == 0 || m.proxies < 2 {
		return
	}
	do(evConsumerMoves, i, true, func(w *world) {
		w.left.move--
		w.at[k] = uint8((i + 1) % m.proxies)
		p := &w.procs[i]
		p.cons[k] = handle{}
		m.settle(p)
	})
}

// eachOfSeek: the consumer of subscription k wants everything on a again.
func (m *model) eachOfSeek(w *world, i, k int, do doer) {
	p := &w.procs[i]
	if w.left.seek == 0 || p.cons[k].b || p.cons[k].dead || p.cons[k].g.Poisoned || p.p.Entry() != w.entry || Admit(m.standing(p)).Other != Pass || w.ackA[k] == 0 {
		return
	}
	if home, waits := m.home(p.p.Entry(), k); home != "a" || waits {
		return
	}
	do(evSeek, i, true, func(w *world) {
		w.left.seek--
		w.ackA[k], w.want[k] = 0, w.a.set()
		h := &w.procs[i].cons[k]
		h.seen, h.unread = 0, 0
	})
}

// carryDrain makes the subscriptions on b.
func (m *model) carryDrain(i int, do doer, observe func(*world, Report)) {
	do(evCarry, i, false, func(w *world) {
		r := Report{}
		for k := range m.subs() {
			if w.onA>>k&1 == 0 {
				continue
			}
			r.Subs = append(r.Subs, subNames[k])
			if w.made>>k&1 == 0 && !m.is(subsNotMade) {
				w.made |= 1 << k
				w.ackB[k] |= w.b.set() // at the end
			}
		}
		observe(w, r)
	})
}

// eachOfDrain: the works of a leader that only drains have.
func (m *model) eachOfDrain(w *world, i int, step Step, do doer, observe func(*world, Report)) {
	l := &w.leaders[i]
	switch {
	case step.Work == WorkDrained && !l.half:
		do(evConnected, i, false, func(w *world) {
			l := &w.leaders[i]
			l.half, l.snap = true, 0
			for n := range m.proxies {
				for k := range m.subs() {
					if h := &w.procs[n].cons[k]; h.on && !h.b && !h.dead {
						l.snap |= 1 << k
					}
				}
			}
		})
	case step.Work == WorkDrained:
		r := Report{Drained: m.remaining(w, l.snap)}
		do(evDrained, i, false, func(w *world) {
			w.leaders[i].snap = 0
			observe(w, r)
			m.skipLeaving(&w.leaders[i])
			m.forgetGone(&w.leaders[i])
		})
		probe := l.c
		if probe.Observe(modelLate, step, r); !probe.leaveAgain.IsZero() && w.left.late > 0 {
			do(evLate, i, true, func(w *world) {
				w.left.late--
				l := &w.leaders[i]
				l.half, l.snap = false, 0
				l.c.Observe(modelLate, step, r)
				l.normalize()
			})
		}
	case step.Work == WorkReturnable:
		r, k := Report{}, evReturnable
		for n := range m.subs() {
			if w.hadOnB[n] != 0 && !m.is(alwaysReturnable) && (!m.is(returnableOnce) || l.c.stage == stageMayReturn) {
				r.Answer, r.Why, k = Never, "x", evTouched
			}
		}
		do(k, i, false, func(w *world) { observe(w, r) })
	case l.half: // it knows how much a has, and goes on behind it
		if l.snap >= w.b.n || m.is(copyInPart) && l.snap > 0 {
			do(evCopied, i, false, func(w *world) {
				l := &w.leaders[i]
				if l.snap = 0; step.Tail != "" {
					m.carryNew(w)
				}
				if step.Tail != "" && m.is(passWhileFenced) {
					m.readEnd(w, l)
					m.passOver(w, l)
					l.pass = notPassing
				}
				observe(w, Report{})
			})
			return
		}
		do(evCopy, i, false, func(w *world) {
			l := &w.leaders[i]
			w.inexact = w.inexact || w.entry.Cluster != "b" || w.rec.Attempt != l.c.key.Attempt || !w.rec.Return // it comes late
			x := w.b.m[l.snap]
			w.copies |= 1 << x &^ w.a.set()
			m.store(w, false, true, x)
			w.copied = max(w.copied, l.snap+1)
			l.half, l.snap = false, 0
		})
	default:
		do(evCopyReads, i, false, func(w *world) {
			w.leaders[i].half, w.leaders[i].snap = true, w.copied
		})
	}
}

// skipLeaving is a mutant: who has nothing left leaves at once.
func (m *model) skipLeaving(l *leader) {
	if l.c.stage != stageChange || !m.is(leavesAtOnce) {
		return
	}
	d := l.c.parsed()
	kept := d.Subs[:0]
	for _, s := range d.Subs {
		if s.Leaving {
			d.Gone++
		} else {
			kept = append(kept, s)
		}
	}
	d.Subs = kept
	l.c.drain = d.String()
}

// forgetGone is a mutant: who has left does not close the way back.
func (m *model) forgetGone(l *leader) {
	if l.c.stage != stageChange || !m.is(goneForgotten) {
		return
	}
	d := l.c.parsed()
	d.Gone = 0
	l.c.drain = d.String()
}

// remaining is what cluster a has of the subscriptions.
func (m *model) remaining(w *world, connected uint8) Drained {
	var d Drained
	for k := range m.subs() {
		if w.onA>>k&1 == 0 {
			continue
		}
		f := SubFact{Name: subNames[k]}
		for x := range w.a.m {
			if x < int(w.a.n) && w.ackA[k]>>w.a.m[x]&1 == 0 && (!m.is(leftByDelivery) || w.processed[k]>>w.a.m[x]&1 == 0) {
				f.Backlog++
			}
		}
		if connected>>k&1 == 1 {
			f.Consumers = 1
		}
		d.Subs = append(d.Subs, f)
	}
	return d
}

// first is the message with which logs begin.
func (m *model) first() uint8 {
	if m.leftover {
		return 0
	}
	return 1
}

// noteDrain notes what a write of entry and record means, before it is done.
func (m *model) noteDrain(w *world, s Step) {
	switch {
	case !m.drain:
	case s.Work == WorkWrite && w.entry.Cluster == "a" && s.After.Cluster == "b":
		for n := s.Record.Attempt - 1; n < maxAttempts; n++ {
			w.boundary[n] = w.b.n
		}
		w.copied = max(w.copied, w.b.n)
	case w.rec.Return && !s.Record.Return && w.rec.Attempt == s.Record.Attempt && w.copied > w.boundary[w.rec.Attempt-1]:
		w.inexact = true // given up: what was copied by then comes on a and on b
	}
}

// carryNew makes the subscriptions on a that b alone has: behind what was there before the copies.
func (m *model) carryNew(w *world) {
	for k := range m.subs() {
		if bit := uint8(1) << k; w.made&bit != 0 && w.onA&bit == 0 {
			w.onA |= bit
			w.ackA[k] = w.a.set() &^ w.b.set()
		}
	}
}

// eachOfPassOver is what leader i has still to do on b before its record says that the topic was taken back: it reads where b ends, asks the map whether the topic is
// still on a by this attempt, and then has those subscriptions that have had everything up to the flip pass over the rest. It tells whether that is what comes next.
func (m *model) eachOfPassOver(w *world, i int, step Step, do doer) bool {
	l := &w.leaders[i]
	if !m.drain || step.Record.State != StateReturned || m.is(notPassedOver) || m.is(recordFirst) && step.Work == WorkRecord {
		return false
	}
	next := l.pass + 1
	if m.is(passAskedFirst) {
		next = map[passing]passing{notPassing: mapAsked, mapAsked: endRead, endRead: passedOver}[l.pass]
	}
	switch {
	case l.pass == passedOver:
		return false
	case next == endRead:
		do(evEndRead, i, false, func(w *world) { m.readEnd(w, &w.leaders[i]) })
	case next == mapAsked:
		k := evStill
		if w.entry.State != route.StateActive || w.entry.Cluster != "a" || KeyOf(w.entry) != l.c.key {
			k = evNotStill
		}
		do(k, i, false, func(w *world) {
			l := &w.leaders[i]
			if l.pass = mapAsked; k == evNotStill && !m.is(passUnasked) {
				l.pass, l.snap, l.over = passedOver, 0, 0
			}
		})
	default:
		do(evPassOver, i, false, func(w *world) { m.passOver(w, &w.leaders[i]) })
	}
	return true
}

// readEnd finds who has something left on b, and nothing of what was there before the topic came.
func (m *model) readEnd(w *world, l *leader) {
	l.pass, l.snap, l.over = endRead, w.b.n, 0
	for k := range m.subs() {
		before := queue{n: w.boundary[l.c.key.Attempt-1], m: w.b.m}.set()
		if w.made>>k&1 == 1 && w.b.set()&^w.ackB[k] != 0 && (before&^w.ackB[k] == 0 || m.is(passAll)) {
			l.over |= 1 << k
		}
	}
}

// passOver places the subscriptions at the end that was read, wherever they are by now.
func (m *model) passOver(w *world, l *leader) {
	to := queue{n: l.snap, m: w.b.m}.set()
	for k := range m.subs() {
		if l.over>>k&1 == 0 {
			continue
		}
		w.inexact = w.inexact || w.ackB[k]&^to != 0 // it is put back: a leader that was frozen comes late
		w.ackB[k] = to
		for n := range m.proxies { // whoever consumes is disconnected
			if h := &w.procs[n].cons[k]; h.on && h.b {
				*h = handle{}
			}
		}
	}
	l.pass, l.snap, l.over = passedOver, 0, 0
}
