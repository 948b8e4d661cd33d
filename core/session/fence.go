package session

import (
	"fmt"
	"slices"
	"time"

	"pointsman/codec"
	"pointsman/core/route"
	"pointsman/core/switching"
)

// moving is a topic that is prepared or fenced, or that was until its last handle has been told. Loop-owned.
type moving struct {
	sh      *Shard
	base    string
	state   route.State
	epoch   uint64
	cluster string // that the map names
	drain   string // what it says of the cluster that the topic is leaving; "" when it is leaving none
	key     switching.Key
	readers map[subscriptionKey]readerStay // who was sent round, and will come back

	fence   func(Fenced) // who waits until everything that was forwarded is answered; nil when nobody does
	waiting int          // what it waits for: handles that are awaited, debts that are open, and marks
	round   int          // counts the fences
	since   time.Time    // when the fence was asked for
	why     string       // why the fence is not clean, when that was found out during it

	parked []*parked // lookups and creations, in the order in which they came
	timer  timer     // looks for a lease, or for a map that went on, while something waits for that
}

// motion is what a handle of a moving topic has beyond its gate.
type motion struct {
	m       *moving
	awaited bool      // a fence waits for it
	gone    bool      // the broker has closed it by itself, which the client was not told
	left    bool      // the client has closed it; the broker still has it, for the acknowledgements in queue
	heard   time.Time // when the client of a fenced consumer last said something about it
	lingers bool      // the topic has moved, and it is to be closed soon
	queue   []*parked // what the client of a fenced consumer sent, in order
	bytes   int       // of queue
}

// Fenced is what a fence came to: nothing that this shard has sent is unanswered.
type Fenced struct {
	Producers, Consumers int
	// Clean tells that nothing that was sent before can still arrive at the cluster (protocol rule P5); Why says why not.
	Clean bool
	Why   string
	// Claims are the names of the producers that clients of this shard have on the cluster, sorted.
	Claims []string
}

// Add sums up two.
func (f Fenced) Add(o Fenced) Fenced {
	sum := Fenced{Producers: f.Producers + o.Producers, Consumers: f.Consumers + o.Consumers, Clean: f.Clean && o.Clean, Why: f.Why}
	if sum.Why == "" {
		sum.Why = o.Why
	} else if o.Why != "" {
		sum.Why += "; " + o.Why
	}
	sum.Claims = slices.Compact(slices.Sorted(slices.Values(slices.Concat(f.Claims, o.Claims))))
	return sum
}

// Prepare tells that the map has the topic as prepared: from here on its publishes, creations and lookups go on only with a lease.
func (sh *Shard) Prepare(now time.Time, base string) {
	sh.follow(now, base, Assigned{}, func(Evicted) {})
}

// Fence tells that the map has the topic as fenced by the attempt key: SENDs and MESSAGEs are dropped, acknowledgements held, creations
// and lookups parked. done is called once, on the loop, when every SEND and creation that was forwarded is answered or given
// up; it may be called before Fence returns, and never when the map has left that attempt first.
func (sh *Shard) Fence(now time.Time, base string, key switching.Key, done func(Fenced)) {
	sh.follow(now, base, Assigned{}, func(Evicted) {})
	m := sh.moving[base]
	if m == nil || !m.fenced() {
		return // overtaken: the map has gone on
	}
	m.key, m.fence, m.why, m.since = key, done, "", now
	m.await()
	m.maybeDone(now)
}

// Unfence tells that the topic is active again on the cluster that it never left. Producers that dropped a SEND and consumers that dropped a
// MESSAGE are closed, with the address of their broker; the others go on as if nothing had been. done is called as by Evict.
func (sh *Shard) Unfence(now time.Time, base string, assigned Assigned, done func(Evicted)) {
	sh.follow(now, base, assigned, done)
}

// follow brings the handles of a topic in line with the map, whatever this shard was told before: the watch of a map may skip states. Those
// that lead to another cluster, and those that dropped something and could be of use again, are closed.
func (sh *Shard) follow(now time.Time, base string, assigned Assigned, done func(Evicted)) {
	m := sh.moving[base]
	d := sh.decide(base)
	if m == nil && d.State != route.StateActive {
		m = sh.startMoving(base, d)
	}
	follows := false
	if m != nil {
		follows = m.keepsConsumers(d)
		m.turn(d)
	}
	var leave, reopen []*handle
	if t := sh.index[base]; t != nil {
		for _, h := range t.list {
			home := h.home(d)
			if follows && !h.producer && h.leg.cluster == home {
				h.gate.Follow(d.Epoch) // message ids keep the one of its creation
			}
			switch {
			case h.leg.cluster != home:
				if h.move == nil {
					leave = append(leave, h)
				}
			case !settled(d.State) && (h.producer || m.fenced()) && h.motion == nil:
				h.watch(m)
				fallthrough
			case h.motion != nil, h.producer && h.judged && h.state < handleEvicting: // the latter: the map was too old
				if h.motion != nil && m != nil {
					h.motion.m = m
				}
				switch {
				case h.mustClose():
					if h.move == nil {
						leave = append(leave, h)
					}
				case h.mayReopen():
					reopen = append(reopen, h)
				}
			}
		}
	}
	sh.evict.add(now, leave, &eviction{sh: sh, assigned: assigned, done: done})
	for _, h := range reopen {
		if h.topic != nil && h.state < handleEvicting && (h.motion != nil || h.producer && h.judged) {
			h.s.reopen(now, h)
		}
	}
	if m == nil {
		return
	}
	if !m.fenced() {
		m.release(now)
	}
	if d.State == route.StateActive {
		sh.timers.stop(&m.timer)
		delete(sh.moving, base)
	}
}

// decide is what the map says of a topic; nothing when the name is none.
func (sh *Shard) decide(name string) route.Decision {
	topic, err := route.ParseTopic(name)
	if err != nil {
		return route.Decision{}
	}
	return sh.cfg.Table().Decide(topic, sh.cfg.DefaultCluster)
}

// standing is what protocol rule P6 goes by.
func (sh *Shard) standing(state route.State, epoch uint64) switching.Standing {
	return switching.Standing{State: state, Epoch: epoch, Lease: sh.cfg.Lease == nil || sh.cfg.Lease(), Aged: sh.aging.on}
}

// holds tells whether a request of this kind about a topic that is not active has to wait.
func (sh *Shard) holds(d route.Decision, kind codec.Type) bool {
	table := switching.Admit(sh.standing(d.State, d.Epoch))
	if kind == codec.TypeProducer {
		return table.Produce == switching.Hold
	}
	return table.Open == switching.Hold
}

// movingTopic is the record of a topic that the map has as prepared or fenced. The loop may not have been told yet.
func (sh *Shard) movingTopic(base string, d route.Decision) *moving {
	if m := sh.moving[base]; m != nil {
		return m
	}
	return sh.startMoving(base, d)
}

// movingOf is the record of a moving topic, by any of its names; nil when it does not move.
func (sh *Shard) movingOf(name string) *moving {
	if len(sh.moving) == 0 {
		return nil
	}
	topic, err := route.ParseTopic(name)
	if err != nil {
		return nil
	}
	return sh.moving[topic.Base()]
}

// keepsConsumers tells whether d is the next that the map says of a topic whose consumers stay where they are: producers have left the cluster, or have come back to it.
func (m *moving) keepsConsumers(d route.Decision) bool {
	switch {
	case d.Epoch == m.epoch:
		return true
	case d.Epoch != m.epoch+1:
		return false
	case d.Drain != "":
		return m.drain == "" && m.cluster == route.DrainFrom(d.Drain)
	}
	return m.drain != "" && d.Cluster == route.DrainFrom(m.drain)
}

// startMoving makes the record of a topic that the map does not have as active.
func (sh *Shard) startMoving(base string, d route.Decision) *moving {
	m := &moving{sh: sh, base: base, cluster: d.Cluster, key: switching.Key{Switch: d.SwitchID}}
	m.timer.owner = m
	sh.moving[base] = m
	m.turn(d)
	return m
}

// turn notes what the map says now.
func (m *moving) turn(d route.Decision) {
	was := m.fenced()
	if d.Cluster != m.cluster || d.Epoch != m.epoch {
		m.fence = nil // the topic was elsewhere meanwhile
	}
	m.state, m.epoch, m.cluster, m.drain = d.State, d.Epoch, d.Cluster, d.Drain
	switch {
	case m.fenced() && !was:
		m.sh.counters.FencedTopics.Add(1)
	case was && !m.fenced():
		m.sh.counters.FencedTopics.Add(-1)
		m.fence = nil
	}
}

func (m *moving) standing() switching.Standing { return m.sh.standing(m.state, m.epoch) }

// fenced tells whether nothing of the topic passes. A state that this version does not know counts as that.
func (m *moving) fenced() bool { return fenced(m.state) }

func fenced(state route.State) bool {
	return state != route.StateActive && state != route.StatePrepared && state != route.StateDraining
}

// settled tells whether a topic is open to everybody: nothing of it waits for a flip.
func settled(state route.State) bool {
	return state == route.StateActive || state == route.StateDraining
}

// watch has the frames of a handle judged one by one.
func (h *handle) watch(m *moving) {
	h.judged = true
	h.motion = &motion{m: m}
}

// mustClose tells whether a handle has to be closed now although its topic stays where it is.
func (h *handle) mustClose() bool {
	if h.motion == nil {
		return h.gate.Poisoned && !h.s.sh.aging.on
	}
	st := h.motion.m.standing()
	return h.gate.MustClose(st) || (h.motion.gone || h.motion.left) && switching.Admit(st).Produce == switching.Pass
}

// mayReopen tells whether a handle of a topic that is no longer fenced is like any other again.
func (h *handle) mayReopen() bool {
	if h.damaged() || h.motion == nil {
		return !h.damaged()
	}
	state := h.motion.m.state
	return settled(state) || state == route.StatePrepared && !h.producer
}

// damaged tells whether a handle has to be closed some time, for it cannot go on as if nothing had been.
func (h *handle) damaged() bool {
	return h.gate.Poisoned || h.motion != nil && (h.motion.gone || h.motion.left)
}

// reopen lets a handle go on that dropped nothing: what its client said meanwhile goes to the broker, in order.
func (s *Session) reopen(now time.Time, h *handle) {
	queue := h.takeQueue()
	h.judged, h.motion = h.reader != nil || h.producer && s.sh.aging.on, nil
	s.replay(now, queue)
}

// await counts what a fence waits for.
func (m *moving) await() {
	m.round++
	m.waiting = m.sh.debts.openOf(m.base, m.cluster)
	if m.drain != "" {
		m.waiting += m.sh.debts.openOf(m.base, route.DrainFrom(m.drain))
	}
	if t := m.sh.index[m.base]; t != nil {
		for _, h := range t.list {
			if h.motion != nil && h.motion.m == m {
				if h.motion.awaited = h.unanswered(); h.motion.awaited {
					m.waiting++
				}
				if !h.producer && m.concerns(h.leg.cluster) && h.leg.mark(m) {
					m.waiting++
				}
			}
		}
	}
}

// concerns tells whether a fence of the topic waits for brokers of a cluster: the one that the map names, and with the way back of a drain the one that
// subscriptions still read.
func (m *moving) concerns(cluster string) bool {
	return cluster == m.cluster || m.drain != "" && cluster == route.DrainFrom(m.drain)
}

// mark is a fence that waits until a broker has taken what was sent on a leg before: acknowledgements have no answer, and one that came
// into force after the subscriptions were carried would be forgotten. A PONG comes when everything before its PING was handled.
type mark struct {
	m     *moving
	round int
	after uint32 // PINGs
}

// mark puts one; false when this round has one here.
func (l *leg) mark(m *moving) bool {
	if n := len(l.marks); n > 0 && l.marks[n-1].m == m && l.marks[n-1].round == m.round {
		return false
	}
	l.ping(pingFrame)
	l.marks = append(l.marks, mark{m, m.round, l.asked})
	return true
}

// ping sends a PING.
func (l *leg) ping(frame []byte) {
	l.asked++
	l.send(frame)
}

func (l *leg) handlePong(now time.Time) {
	if l.answered != l.asked {
		l.answered++
	}
	for len(l.marks) > 0 && l.marks[0].after == l.answered {
		k := l.marks[0]
		if l.marks = l.marks[1:]; len(l.marks) == 0 {
			l.marks = nil
		}
		k.passed(now)
	}
}

// passMarks ends what waits for a PONG of a leg that has ended.
func (l *leg) passMarks(now time.Time) {
	for _, k := range l.marks {
		k.passed(now)
	}
	l.marks = nil
}

// passed tells the fence, if it is the same one still.
func (k *mark) passed(now time.Time) {
	if k.round == k.m.round && k.m.fence != nil {
		k.m.waiting--
		k.m.maybeDone(now)
	}
}

// unanswered tells whether the broker still has to say something about what it was sent of a handle.
func (h *handle) unanswered() bool {
	return h.state < handleEvicted && h.motion.m.concerns(h.leg.cluster) && (!h.gate.Drained() || h.state == handleCreating && !h.answered && h.waiting == nil)
}

// noteAnswered is called when something that a fence may wait for was answered, or the handle is gone.
func (h *handle) noteAnswered(now time.Time, gone bool) {
	mo := h.motion
	if mo == nil || !mo.awaited || !gone && h.unanswered() {
		return
	}
	mo.awaited = false
	mo.m.waiting--
	mo.m.maybeDone(now)
}

// maybeDone tells who waits for the fence when there is nothing left to wait for.
func (m *moving) maybeDone(now time.Time) {
	if m.fence == nil || m.waiting > 0 {
		return
	}
	done := m.fence
	m.fence = nil
	// The map may have gone on without us, and others have opened the topic since.
	if e, ok := m.sh.cfg.Table().Entry(m.base); ok && fenced(e.State) && switching.KeyOf(e) == m.key {
		done(m.result(now))
	}
}

func (m *moving) result(now time.Time) Fenced {
	f := Fenced{Why: m.why}
	if f.Why == "" {
		f.Why = m.sh.debts.reason(now, m.base, m.cluster)
	}
	f.Clean = f.Why == ""
	if t := m.sh.index[m.base]; t != nil {
		n := m.sh.count(t)
		f.Producers, f.Consumers = n.Producers, n.Consumers
		for _, h := range t.list {
			if h.producer && h.name != "" && h.leg.cluster == m.cluster {
				f.Claims = append(f.Claims, h.name)
			}
		}
	}
	slices.Sort(f.Claims)
	f.Claims = slices.Compact(f.Claims)
	return f
}

// judgedSend judges a SEND of a handle that is not like any other.
func (s *Session) judgedSend(now time.Time, h *handle) verdict {
	switch {
	case h.state >= handleEvicting:
		return drop
	case h.motion == nil: // the map is too old, or was and has not been looked at for this one
		h.gate.Poisoned = true
		s.sh.counters.DroppedSends.Add(1)
		return drop
	case h.gate.Send(h.motion.m.standing()) == switching.Pass:
		return forward
	}
	s.sh.counters.DroppedSends.Add(1)
	h.motion.m.lookAgain(now)
	return drop
}

// judgedMessage judges a MESSAGE.
func (l *leg) judgedMessage(h *handle, frame []byte, head codec.Head) verdict {
	if h.state == handleEvicted {
		return drop
	}
	if h.motion != nil && h.gate.Message(h.motion.m.standing()) != switching.Pass {
		l.s.sh.counters.DroppedMessages.Add(1)
		return drop
	}
	if h.reader != nil {
		return l.noteDelivered(h, frame, head)
	}
	return forward
}

// judgedReceipt takes note of a SEND_RECEIPT or SEND_ERROR, after it went to the client.
func (s *Session) judgedReceipt(now time.Time, h *handle) {
	if h.state == handleEvicting {
		s.receiptOfEvicting(now, h)
		return
	}
	h.gate.Receipt()
	h.noteAnswered(now, false)
}

// swallowsClose tells whether a broker's own CLOSE of h is kept from the client until the topic has been flipped or has come back (P5).
func (s *Session) swallowsClose(now time.Time, h *handle) bool {
	if h == nil || h.motion == nil || h.state >= handleEvicting || !h.motion.lingers && switching.Admit(h.motion.m.standing()).Message != switching.Drop {
		return false
	}
	if h.state == handleCreating && !h.again {
		return true // it is about a predecessor, which the client closed itself
	}
	h.motion.gone, h.gate.Poisoned = true, true
	if h.producer && !h.gate.Drained() {
		// The broker may store them still, or again when the topic is loaded elsewhere.
		s.sh.debts.lose(now, h)
		h.gate.Outstanding = 0
	}
	h.noteAnswered(now, false)
	return true
}

// movePoll is how often a moving topic looks whether what waits may go on.
const movePoll = 100 * time.Millisecond

// lookAgain has the topic looked at soon, for what waits for a lease.
func (m *moving) lookAgain(now time.Time) { m.sh.timers.sooner(&m.timer, now.Add(movePoll)) }

// fire looks whether what waits for a lease, or for a map that has gone on, may go on. What leads to another cluster is left to Evict, which
// knows the new brokers.
func (m *moving) fire(now time.Time) {
	sh := m.sh
	if sh.moving[m.base] != m {
		return
	}
	d := sh.decide(m.base)
	st := sh.standing(d.State, d.Epoch)
	if d.State == route.StateDraining && m.state == d.State {
		return // what waits for a subscription to move is looked at when the map says so
	}
	if switching.Admit(st).Produce != switching.Pass {
		if len(m.parked) > 0 || d.State == route.StatePrepared {
			m.lookAgain(now)
		}
		return
	}
	if d.State == route.StatePrepared {
		sh.follow(now, m.base, Assigned{}, func(Evicted) {})
		return
	}
	m.release(now)
}

// movingText says why something of the topic waits, or was refused.
func (m *moving) movingText() string {
	by := ""
	if m.key.Switch != "" {
		by = " by switch " + m.key.Switch
	}
	if m.state == route.StateDraining {
		return m.drainText()
	}
	if m.state == route.StatePrepared {
		return fmt.Sprintf("topic %s is about to be moved%s, and this proxy has lost contact with the map store: it may not open it", m.base, by)
	}
	return fmt.Sprintf("topic %s is being moved to another cluster%s", m.base, by)
}
