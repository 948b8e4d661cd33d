package session

import (
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// topicHandles are the live handles of one topic in one shard.
type topicHandles struct {
	base string
	list []*handle
}

func (sh *Shard) addToIndex(h *handle, base string) {
	t := sh.index[base]
	if t == nil {
		t = &topicHandles{base: base}
		sh.index[base] = t
	}
	h.topic, h.pos = t, len(t.list)
	t.list = append(t.list, h)
	sh.counters.Handles.Add(1)
}

// unindex takes a handle out of the index of its topic.
func (s *Session) unindex(now time.Time, h *handle) {
	t := h.topic
	if t == nil {
		return
	}
	last := len(t.list) - 1
	t.list[h.pos] = t.list[last]
	t.list[h.pos].pos = h.pos
	t.list[last] = nil
	t.list = t.list[:last]
	h.topic = nil
	if len(t.list) == 0 {
		delete(s.sh.index, t.base)
	}
	s.sh.counters.Handles.Add(-1)
	if h.move != nil {
		s.settle(h, !h.gate.Drained())
	}
	h.noteAnswered(now, true)
}

// mappedCluster is where the map sends a topic now; "" when the name is none.
func (sh *Shard) mappedCluster(name string) string { return sh.decide(name).Cluster }

// HandleCount is how many live producers and consumers there are.
type HandleCount struct {
	Producers, Consumers int
	// Leaving are those of Consumers that read a cluster which the topic is leaving.
	Leaving int
}

// Handles counts the live handles of every topic that match accepts, by base name.
func (sh *Shard) Handles(match func(base string) bool) map[string]HandleCount {
	found := make(map[string]HandleCount)
	for base, t := range sh.index {
		if !match(base) {
			continue
		}
		found[base] = sh.count(t)
	}
	return found
}

// HandlesOf counts the live handles of one topic.
func (sh *Shard) HandlesOf(base string) HandleCount {
	if t := sh.index[base]; t != nil {
		return sh.count(t)
	}
	return HandleCount{}
}

func (sh *Shard) count(t *topicHandles) (n HandleCount) {
	drain := sh.decide(t.base).Drain
	for _, h := range t.list {
		if h.producer {
			n.Producers++
			continue
		}
		n.Consumers++
		if drain != "" && h.leg.cluster == route.DrainFrom(drain) {
			n.Leaving++
		}
	}
	return n
}

// Evicted is what an eviction did.
type Evicted struct {
	Producers, Consumers int
	Unresolved           int // producers closed although a SEND had no receipt
}

// Add sums two.
func (e Evicted) Add(o Evicted) Evicted {
	return Evicted{e.Producers + o.Producers, e.Consumers + o.Consumers, e.Unresolved + o.Unresolved}
}

// Assigned says which brokers a switch has found out for the topics that it moves. The zero Assigned: none.
type Assigned struct {
	Cluster string            // whose brokers they are
	Brokers map[string]string // full topic name → logical broker address
	// Dead is the cluster that is left because it is dead (a failover): nothing that it owes is waited for. "" when none is.
	Dead string
}

// eviction is one call of Evict or Review under way.
type eviction struct {
	sh       *Shard
	assigned Assigned
	left     int // handles that were not told yet
	result   Evicted
	done     func(Evicted)
}

// Evict closes the handles of a topic that lead to a cluster which the map does not name any more. Clients get the tagged
// address of the broker that assigned names for their partition, and come back there. done is called, on the loop, once all of
// them were told; it may be called before Evict returns. What waits for the end of a fence is released: lookups are asked of the cluster that the map names now.
func (sh *Shard) Evict(now time.Time, base string, assigned Assigned, done func(Evicted)) {
	sh.follow(now, base, assigned, done)
	sh.sweep.note(now, assigned.Dead)
}

// Review is Evict for every topic: a rule has changed. It looks at some topics a step, for there may be more than a loop may look at without
// keeping everybody waiting. Handles that come meanwhile were judged by the new map already.
func (sh *Shard) Review(now time.Time, assigned Assigned, done func(Evicted)) {
	r := &review{sh: sh, topics: make([]*topicHandles, 0, len(sh.index))}
	r.timer.owner = r
	r.ev = &eviction{sh: sh, assigned: assigned, done: done, left: 1} // the review itself
	for _, t := range sh.index {
		r.topics = append(r.topics, t)
	}
	r.fire(now)
	sh.sweep.note(now, assigned.Dead)
}

// review is one call of Review under way.
type review struct {
	sh     *Shard
	timer  timer
	topics []*topicHandles // not looked at yet
	ev     *eviction
}

const (
	// reviewSlice is how many topics a review looks at in one step, well below a millisecond.
	reviewSlice = 1024
	// reviewStep is the time between two steps.
	reviewStep = time.Millisecond
)

func (r *review) fire(now time.Time) {
	n := min(reviewSlice, len(r.topics))
	var moved []*handle
	for _, t := range r.topics[:n] {
		moved = t.appendMoved(r.sh, moved)
	}
	clear(r.topics[:n])
	r.topics = r.topics[n:]
	r.ev.left += len(moved)
	r.sh.evict.enqueue(now, moved, r.ev)
	if len(r.topics) > 0 {
		r.sh.timers.set(&r.timer, now.Add(reviewStep))
		return
	}
	r.ev.one()
}

func (t *topicHandles) appendMoved(sh *Shard, dst []*handle) []*handle {
	d := sh.decide(t.base)
	for _, h := range t.list {
		if h.leg.cluster != h.home(d) && h.move == nil {
			dst = append(dst, h)
		}
	}
	return dst
}

// evictor paces evictions: a burst at once, the rest in random order at a fixed rate.
type evictor struct {
	sh     *Shard
	timer  timer
	queue  []*handle
	credit float64
	last   time.Time
}

// evictStep is how often the evictor works while it has a queue.
const evictStep = 5 * time.Millisecond

func (e *evictor) init(sh *Shard) {
	e.sh = sh
	e.timer.owner = e
	e.credit = float64(sh.cfg.EvictBurst)
}

func (e *evictor) add(now time.Time, moved []*handle, ev *eviction) {
	ev.left = len(moved)
	if ev.left == 0 {
		ev.done(Evicted{})
		return
	}
	e.enqueue(now, e.sh.linger(now, moved, ev), ev)
}

// enqueue has handles closed that ev counts already.
func (e *evictor) enqueue(now time.Time, moved []*handle, ev *eviction) {
	for _, h := range moved {
		h.move = ev
	}
	e.sh.rng.Shuffle(len(moved), func(i, j int) { moved[i], moved[j] = moved[j], moved[i] })
	e.queue = append(e.queue, moved...)
	e.fire(now)
}

// fire tells as many clients as the pace allows.
func (e *evictor) fire(now time.Time) {
	cfg := e.sh.cfg
	e.credit = min(e.credit+now.Sub(e.last).Seconds()*float64(cfg.EvictRate), float64(cfg.EvictBurst))
	e.last = now
	n := 0
	for ; n < len(e.queue) && e.credit >= 1; n++ {
		e.credit--
		h := e.queue[n]
		e.queue[n] = nil
		switch {
		case h.topic == nil: // went by itself, and was counted then
		case h.stays():
			e.credit++
			h.s.spare(now, h)
		case h.leftForDead():
			l := h.leg
			h.s.finish(now, h, true)
			h.s.leaveDead(now, l)
		default:
			h.s.startEviction(now, h)
		}
	}
	e.queue = e.queue[n:]
	if len(e.queue) == 0 {
		e.queue = nil
	} else {
		wait := evictStep
		if cfg.EvictJitter > 0 {
			wait += time.Duration(e.sh.rng.Int64N(int64(cfg.EvictJitter)))
		}
		e.sh.timers.set(&e.timer, now.Add(wait))
	}
	e.sh.counters.EvictQueue.Store(int64(len(e.queue)))
}

// stays tells whether a handle that waits for its eviction may stay after all: the map names its cluster again, and it dropped nothing.
func (h *handle) stays() bool {
	return h.state < handleEvicting && h.atHome() && !h.mustClose()
}

// spare takes a handle out of its eviction.
func (s *Session) spare(now time.Time, h *handle) {
	ev := h.move
	h.move = nil
	if h.motion != nil && h.mayReopen() {
		s.reopen(now, h)
	}
	ev.one()
}

// startEviction begins to close a handle whose topic is no longer mapped to the cluster of its leg. From here on SENDs of
// the id are dropped (the client holds them unacknowledged and sends them again), while a live broker's receipts of earlier ones are still awaited
// and delivered, so that they are not sent twice.
func (s *Session) startEviction(now time.Time, h *handle) {
	if h.state >= handleEvicting {
		return
	}
	if h.state == handleLive && h.producer && !h.gate.Drained() && s.sh.cfg.ReceiptWait > 0 {
		h.state, h.judged = handleEvicting, true
		h.overdue = now.Add(s.sh.cfg.ReceiptWait)
		s.awaiting++
		s.sh.timers.sooner(&s.timer, h.overdue)
		return
	}
	s.finish(now, h, true)
}

// receiptOfEvicting counts a receipt that an eviction waits for.
func (s *Session) receiptOfEvicting(now time.Time, h *handle) {
	h.gate.Receipt()
	h.noteAnswered(now, false)
	if h.gate.Drained() {
		s.finish(now, h, true)
	}
}

// finishOverdue ends the waits that are over and returns when the next one is.
func (s *Session) finishOverdue(now time.Time) (next time.Time) {
	for _, h := range s.producers {
		if h.state != handleEvicting {
			continue
		}
		if !h.overdue.After(now) {
			s.finish(now, h, true)
		} else if next.IsZero() || h.overdue.Before(next) {
			next = h.overdue
		}
	}
	return next
}

// evictedKept is how long the id of an evicted handle is remembered, for frames that the client sent before it knew.
const evictedKept = time.Minute

func (s *Session) forgetEvicted(now time.Time) {
	for _, handles := range [...]map[uint64]*handle{s.producers, s.consumers} {
		for _, h := range handles {
			if h.state == handleEvicted && !h.gate.Closing && now.Sub(h.since) > evictedKept {
				s.remove(now, h)
			}
		}
	}
}

// finish closes a handle towards the broker, and towards the client unless that closed it itself.
func (s *Session) finish(now time.Time, h *handle, tell bool) {
	if h.state == handleEvicting {
		s.awaiting--
	}
	creating := h.state == handleCreating
	// What its client said meanwhile goes to the broker if the topic stays there; otherwise it is judged as that of an evicted one.
	queue, left, stays := h.takeQueue(), h.motion != nil && h.motion.left, h.atHome()
	gone := h.motion != nil && h.motion.gone
	// The broker has no consumer any more whose acknowledgements those are: they are remembered, as those that come when the topic has moved.
	late := !stays || gone && !h.producer && s.sh.mappedCluster(h.full) != h.leg.cluster
	if h.owes() {
		s.sh.openDebt(h)
	}
	if late && !h.producer {
		s.tellCopies(now, h)
	}
	h.noteAnswered(now, true)
	h.motion, h.judged = nil, true
	if !late {
		s.replay(now, queue)
		if s.state == stateClosed {
			return
		}
	}
	h.waiting.cancel()
	h.forgetReader()
	h.state, h.since = handleEvicted, now
	h.gate.Close()
	s.evicted++
	s.sh.counters.countEvicted(h)

	s.nextReq++
	s.expect(now, s.nextReq, pendingClose, h)
	h.leg.send(s.sh.encode(closeCommand(h, s.nextReq, nil, nil)))
	switch {
	case creating:
		s.pending[h.req] = pendingRequest{pendingOrphan, h, h.req}
		s.deny(RefusedMoved, h.req, codec.ErrorServiceNotReady, h.full, "topic "+h.full+" has moved to another cluster meanwhile: look it up again")
	case tell && !left:
		plain, tls := s.assignedURLs(h, !gone)
		s.sendCommand(closeCommand(h, codec.NoRequest, plain, tls))
	}
	s.unindex(now, h)
	if late {
		s.replay(now, queue)
	}
}

// assignedURLs is where the client of an evicted handle should go: nil when that is not known. When its topic stays in the cluster, that
// is where it was, if the broker still has the topic.
func (s *Session) assignedURLs(h *handle, there bool) (plain, tls *string) {
	if h.move == nil {
		return nil, nil
	}
	cluster, broker := h.move.assigned.Cluster, h.move.assigned.Brokers[h.full]
	// The topic may have moved on: what one cluster has named must not be signed as a broker of another.
	d := s.sh.decide(h.full)
	to := h.home(d)
	if to == "" {
		to = d.Cluster
	}
	if broker == "" || to != cluster {
		if cluster, broker = h.leg.cluster, h.leg.broker; to != cluster || !there {
			return nil, nil
		}
	}
	p, t, err := s.sh.cfg.Clusters().TagURL(cluster, "pulsar://"+broker)
	if err != nil {
		return nil, nil
	}
	return &p, &t
}

// settle counts a handle of an eviction as done.
func (s *Session) settle(h *handle, unresolved bool) {
	ev := h.move
	h.move = nil
	if h.producer {
		ev.result.Producers++
	} else {
		ev.result.Consumers++
	}
	if unresolved {
		ev.result.Unresolved++
		s.sh.counters.Unresolved.Add(1)
	}
	ev.one()
}

// one notes that there is one handle, or the review itself, less to wait for.
func (ev *eviction) one() {
	if ev.left--; ev.left == 0 {
		ev.done(ev.result)
	}
}

func (c *Counters) countEvicted(h *handle) {
	if h.producer {
		c.EvictedProducers.Add(1)
	} else {
		c.EvictedConsumers.Add(1)
	}
}

func closeCommand(h *handle, req uint64, plain, tls *string) *pulsarpb.BaseCommand {
	if h.producer {
		return command(codec.TypeCloseProducer, &pulsarpb.BaseCommand{CloseProducer: &pulsarpb.CommandCloseProducer{
			ProducerId: &h.id, RequestId: &req, AssignedBrokerServiceUrl: plain, AssignedBrokerServiceUrlTls: tls,
		}})
	}
	return command(codec.TypeCloseConsumer, &pulsarpb.BaseCommand{CloseConsumer: &pulsarpb.CommandCloseConsumer{
		ConsumerId: &h.id, RequestId: &req, AssignedBrokerServiceUrl: plain, AssignedBrokerServiceUrlTls: tls,
	}})
}
