package switching

import (
	"pointsman/core/route"
)

// each calls emit with everything that can happen next. emit may
// change the world that it gets, which is the model's again afterwards.
func (m *model) each(w *world, emit func(event, *world)) {
	n := 0
	do := func(k kind, who int, fault bool, change func(*world)) {
		if n++; m.only < 0 {
			emit(event{k, uint8(who), fault}, nil)
			return
		} else if m.only > 0 && m.only != n {
			return
		}
		m.next = *w
		change(&m.next)
		emit(event{k, uint8(who), fault}, &m.next)
	}
	for i := range m.proxies {
		m.eachOfProcess(w, i, do)
		m.eachOfStore(w, i, do)
		m.eachOfProducer(w, i, do)
		for k := range m.subs() {
			m.eachOfConsumer(w, i, k, do)
		}
	}
	if w.replicated < w.a.n && !m.drain {
		do(evReplicate, 0, false, func(w *world) {
			m.store(w, true, true, w.a.m[w.replicated])
			w.replicated++
		})
	}
	for i := range w.leaders {
		if w.leaders[i].on {
			m.eachOfLeader(w, i, do)
		}
	}
	if w.haunted {
		do(evGhost, 0, false, func(w *world) {
			m.apply(w, w.ghost)
			w.haunted, w.ghost = false, Step{}
		})
	}
	if w.left.change > 0 && !w.rec.State.Over() && (!m.lateChange || w.leaders[0].c.end == StateReturned) {
		do(evLeaderChange, 0, true, func(w *world) {
			w.left.change--
			w.leaders[1] = w.leaders[0]
			w.leaders[0] = leader{on: true, c: m.leader(w)}
		})
	}
	if w.left.wish > 0 && !w.rec.State.Over() {
		do(evWish, 0, true, func(w *world) {
			w.left.wish--
			w.rec.Rev, w.rec.Wish = w.rec.Rev+1, WishAbort
		})
	}
	if w.left.again > 0 && (w.rec.State == StateAborted || w.rec.State == StateReturned) {
		k := evAgain
		if w.rec.State == StateReturned {
			k = evDrainsAgain
		}
		do(k, 0, true, func(w *world) {
			w.left.again--
			w.rec.Rev, w.rec.Attempt, w.rec.State, w.rec.Wish, w.rec.Return = w.rec.Rev+1, w.rec.Attempt+1, StateRequested, "", false
			w.epoch = w.entry.Epoch + 1
			if w.left.change > 0 { // whoever led before may be frozen
				w.leaders[1] = w.leaders[0]
			}
			w.leaders[0] = leader{on: true, c: m.leader(w)}
		})
	}
	if m.drain {
		m.eachOfOperator(w, do)
	}
}

func (m *model) leader(w *world) Controller {
	rec := m.record()
	rec.Attempt, rec.Return, rec.Epoch = w.rec.Attempt, w.rec.Return, w.epoch
	return NewController(rec)
}

type doer func(k kind, who int, fault bool, change func(*world))

// eachOfProcess: crash, start, what it owes, time.
func (m *model) eachOfProcess(w *world, i int, do doer) {
	p := &w.procs[i]
	if !p.up {
		k := evStart
		if p.disk.Topic != "" {
			k = evStartFromDisk
		}
		do(k, i, false, func(w *world) { m.start(w, i) })
		return
	}
	if w.left.crash > 0 {
		do(evCrash, i, true, func(w *world) {
			w.left.crash--
			m.crash(w, i)
		})
	}
	switch d := p.p.Next(modelNow); d.Do {
	case DoSave:
		do(evSave, i, false, func(w *world) {
			p := &w.procs[i]
			if !m.is(ackBeforeDisk) {
				p.disk, p.oldDisk = d.Entry, p.aged
			}
			p.p.Saved(d.Entry)
		})
	case DoAck:
		if m.contact(p) {
			k := map[State]kind{StatePrepared: evAckPrepared, StateFenced: evAckDirty, StateEvicting: evAckEvicting}[d.Phase]
			if d.Clean {
				k = evAckClean
			}
			do(k, i, false, func(w *world) { m.ack(&w.procs[i], d) })
		}
	}
	if settled := p.p.Entry().State == route.StateActive || p.p.Entry().State == route.StateDraining; w.left.crash > 0 && settled && p.p.synced && (p.disk != p.p.Entry() || p.oldDisk && !p.aged) {
		do(evLazySave, i, false, func(w *world) {
			p := &w.procs[i]
			if p.disk, p.oldDisk = p.p.Entry(), p.aged; p.disk.State == route.StateActive {
				p.p.Saved(p.disk)
			}
		})
	}
	if p.orphans.n == 0 && p.orphansB.n == 0 && (p.lost || p.p.started == modelNow) {
		do(evSettle, i, false, func(w *world) {
			p := &w.procs[i]
			p.lost, p.p.started = false, modelOld
			m.settle(p)
		})
	}
	if m.is(localUndo) && p.cut && p.p.Entry().State == route.StateFenced {
		do(evLocalUndo, i, false, func(w *world) {
			e := w.procs[i].p.Entry()
			e.State = route.StateActive
			m.learn(w, i, e)
			w.procs[i].p.synced = false
		})
	}
}

func (m *model) start(w *world, i int) {
	p := &w.procs[i]
	p.up, p.inc, p.aged = true, p.inc+1, p.oldDisk
	disk := p.disk
	if m.is(noHoldFromDisk) {
		disk.State = route.StateActive
	}
	p.p = NewProxy(modelNow, disk)
	if p.inc == 1 && m.joiner && i == m.proxies-1 || m.is(youngClean) {
		p.p.started = modelOld // there was none before it
	}
	if m.is(leaseAtStart) && disk.Topic != "" {
		p.lease = NewLease(modelTimeout)
		p.lease.Synced(0)
		p.p.synced = true
	}
	m.told(p)
}

func (m *model) crash(w *world, i int) {
	p := &w.procs[i]
	m.loseLeg(w, i)
	p.cons = [maxSubs]handle{}
	p.lost = false // nobody knows any more
	p.up, p.conn, p.lease, p.p = false, noSession, Lease{}, Proxy{}
	if p.session {
		p.old, p.session = true, false
		if p.node == thisSession {
			p.node = oldSession
		}
	}
}

// loseLeg ends the leg of the producer: what it had sent stays in the broker's buffers.
func (m *model) loseLeg(w *world, i int) {
	p := &w.procs[i]
	if !p.prod.on {
		return
	}
	p.prod.g.LegLost()
	p.lost = p.lost || p.prod.g.Lost
	orphans := &p.orphans
	if p.prod.b {
		orphans = &p.orphansB
	}
	if (!p.prod.b || m.drain) && !p.prod.dead {
		for _, x := range p.prod.sent.m[:p.prod.sent.n] {
			if !orphans.push(x) {
				m.full = true
			}
		}
	}
	p.prod = handle{}
}

// told does the duties that are instant here, and reports what the loops would.
func (m *model) told(p *proc) {
	for {
		d := p.p.Next(modelNow)
		if d.Do < DoPrepare || d.Do > DoEvict {
			break
		}
		p.p.Told(d.Entry)
	}
	m.settle(p)
}

func (m *model) settle(p *proc) {
	e := p.p.Entry()
	switch {
	case e.State == route.StateFenced && !p.p.drained:
		if h := &p.prod; !h.on || h.b != (e.Cluster == "b") || h.g.Drained() || m.is(noReceipts) {
			p.p.Drained(KeyOf(e), !p.lost || m.is(dirtyLegClean), "")
		}
	case (e.State == route.StateActive || e.State == route.StateDraining) && !p.p.evicted:
		old := p.prod.on && p.prod.g.Epoch != e.Epoch
		for k := range p.cons {
			old = old || p.cons[k].on && p.cons[k].g.Epoch != e.Epoch
		}
		if !old {
			p.p.Evicted(e)
		}
	}
}

func (m *model) learn(w *world, i int, e route.Entry) {
	p := &w.procs[i]
	was := p.p.Entry()
	p.p.Learn(e)
	now := p.p.Entry()
	for k := range p.cons {
		h := &p.cons[k]
		if m.drain && h.on {
			m.followDrain(h, k, was, now)
		}
		if (now.State == route.StateActive || now.State == route.StateDraining || now.State == route.StatePrepared) && h.held != 0 { // of prepared: when the watch has skipped the abort
			if now.Cluster == "b" && (!m.drain || h.b) {
				w.ackB[k] |= h.held
			} else if !m.drain || !h.b {
				w.ackA[k] |= h.held
			}
			h.held = 0
		}
	}
	m.told(p)
}

func (m *model) ack(p *proc, d Duty) {
	key := KeyOf(d.Entry)
	set, bit := key.Attempt-1, uint8(1)<<p.inc
	switch d.Phase {
	case StatePrepared:
		p.prepared[set] |= bit
	case StateFenced:
		p.fenced[set] |= bit
		if d.Clean {
			p.clean[set] |= bit
		}
	case StateEvicting:
		p.evicting[set] |= bit
	}
	p.p.Acked(d.Phase, key)
}

// contact tells that the process reaches the store in a session that still is.
func (m *model) contact(p *proc) bool { return p.conn == connected && p.session && !p.cut }

// eachOfStore: sessions, watches, the roster.
func (m *model) eachOfStore(w *world, i int, do doer) {
	p := &w.procs[i]
	if p.old {
		do(evOldExpire, i, false, func(w *world) {
			p := &w.procs[i]
			if p.old = false; p.node == oldSession {
				p.node = nobody
			}
		})
	}
	if w.left.forget > 0 && p.member && !p.up && p.node == nobody {
		do(evForget, i, true, func(w *world) {
			p := &w.procs[i]
			w.left.forget--
			if p.member, p.tomb = false, true; !m.is(forgetKeepsDisk) {
				p.disk, p.oldDisk = route.Entry{}, false
			}
		})
	}
	if w.left.age > 0 && !p.aged && p.disk.Topic != "" && (!p.up || p.cut && !p.session) {
		do(evAge, i, true, func(w *world) {
			w.left.age--
			w.procs[i].aged, w.procs[i].oldDisk = true, true
		})
	}
	if !p.up {
		return
	}
	if leased := p.lease.Left(0) > 0; p.session && !leased && p.cut {
		do(evExpire, i, false, func(w *world) {
			p := &w.procs[i]
			if p.session = false; p.node == thisSession {
				p.node = nobody
			}
		})
	} else if p.session && p.cut && m.is(leaseFromPings) {
		// The leader's clock runs on while a follower still answers.
		do(evExpire, i, false, func(w *world) {
			p := &w.procs[i]
			if p.session = false; p.node == thisSession {
				p.node = nobody
			}
		})
	} else if leased && p.cut {
		do(evLapse, i, false, func(w *world) { w.procs[i].lease.until = 0 })
	}
	switch {
	case p.cut:
		do(evHeal, i, false, func(w *world) { w.procs[i].cut = false })
		return
	case w.left.cut > 0:
		do(evCut, i, true, func(w *world) {
			w.left.cut--
			w.procs[i].cut = true
		})
	}
	if p.conn != noSession && !p.session {
		do(evSession, i, false, func(w *world) {
			p := &w.procs[i]
			m.newSession(p)
		})
		return
	}
	switch p.conn {
	case noSession:
		do(evSession, i, false, func(w *world) { m.newSession(&w.procs[i]) })
	case hasSession:
		if m.is(registerAfterRead) {
			do(evSync, i, false, func(w *world) { m.sync(w, i) })
		} else {
			do(evRegister, i, false, func(w *world) { m.register(&w.procs[i]) })
		}
	case halfway:
		if m.is(registerAfterRead) {
			do(evRegister, i, false, func(w *world) { m.register(&w.procs[i]) })
		} else {
			do(evSync, i, false, func(w *world) { m.sync(w, i) })
		}
	case connected:
		if p.p.Entry() != w.entry {
			do(evLearn, i, false, func(w *world) { m.learn(w, i, w.entry) })
		}
		if p.lease.Left(0) == 0 {
			do(evRenew, i, false, func(w *world) { w.procs[i].lease.Answered(0) })
		}
	}
}

func (m *model) newSession(p *proc) {
	p.conn, p.session = hasSession, true
	p.lease = NewLease(modelTimeout)
	if m.is(leaseBeforeRead) {
		p.lease.Synced(0)
		p.p.synced = true
		return
	}
	p.p.SessionLost()
}

func (m *model) register(p *proc) {
	p.conn++
	p.member = true
	if p.node == nobody || !m.is(notOwnNode) {
		p.node = thisSession
	}
}

func (m *model) sync(w *world, i int) {
	p := &w.procs[i]
	p.conn++
	p.aged = false
	p.lease.Synced(0)
	m.learn(w, i, w.entry)
}
