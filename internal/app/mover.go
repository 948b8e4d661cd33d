package app

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/store"
)

// mover is this process's part in switches that fence: for each topic that moves it keeps a switching.Proxy, and does what that one
// owes: tell the loops, write the disk copy, acknowledge. mapKeeper tells it of entries; the loops tell it of fences.
type mover struct {
	k       *mapKeeper
	started time.Time

	mu     sync.Mutex
	life   context.Context         // guarded by mu; nil before run
	over   bool                    // guarded by mu: run is about to end, no task begins any more
	topics map[string]*movingTopic // guarded by mu, with what is in it
	leased bool                    // guarded by mu: the last look at the lease
	tasks  sync.WaitGroup
}

// movingTopic is one topic of a mover.
type movingTopic struct {
	p       switching.Proxy
	busy    bool            // its disk copy or its ack is being written
	pending int             // evictions that the loops have not reported
	telling int             // preparations that not every loop has carried out
	fenced  session.Fenced  // of the last fence
	evicted session.Evicted // of the last eviction
}

const (
	// ackRetry is the pause after an ack, or a disk copy, that could not be written.
	ackRetry = 200 * time.Millisecond
	// leaseLook is how often a mover looks whether the lease was lost or has come back.
	leaseLook = 200 * time.Millisecond
)

// maxClaimBytes bounds the producers' names in an ack: ZooKeeper takes no node above 1 MB. Without the names nobody can tell them from clients
// that come past the proxies; so the ack is not clean then, and the old cluster is made to unload the topic, after which there are none.
const maxClaimBytes = 512 << 10

func claimBytes(claims []string) (n int) {
	for _, name := range claims {
		n += len(name) + len(`"",`)
	}
	return n
}

func newMover(k *mapKeeper) *mover {
	return &mover{k: k, started: time.Now(), topics: make(map[string]*movingTopic)}
}

// begin starts with an entry that was moving when the process before this one ended.
func (v *mover) begin(e route.Entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.topics[e.Topic] = &movingTopic{p: switching.NewProxy(v.started, e)}
}

// run looks after the lease until ctx ends.
func (v *mover) run(ctx context.Context) {
	v.mu.Lock()
	v.life = ctx
	for topic := range v.topics {
		v.step(topic)
	}
	v.mu.Unlock()
	ticker := time.NewTicker(leaseLook)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ticker.C:
			v.lookAtLease(v.k.store.Lease() > store.Boottime())
		case <-ctx.Done():
		}
	}
	v.mu.Lock()
	v.over = true
	v.mu.Unlock()
	v.tasks.Wait()
}

// lookAtLease has everything count as unread while there is no lease. When there is one, the map was read since it was lost, or since the start: also what
// has not changed counts as read then.
func (v *mover) lookAtLease(leased bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if leased == v.leased {
		return
	}
	v.leased = leased
	for topic, m := range v.topics {
		if leased {
			m.p.Learn(v.entry(topic))
			v.step(topic)
		} else {
			m.p.SessionLost()
		}
	}
}

// takes tells whether a changed entry is the mover's business, and if so learns it. The table that the sessions ask has it already.
func (v *mover) takes(topic string, e route.Entry) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	m := v.topics[topic]
	if m == nil {
		if e.State == route.StateActive {
			return false
		}
		m = &movingTopic{p: switching.NewProxy(v.started, route.Entry{})}
		v.topics[topic] = m
	}
	m.p.Learn(v.entry(topic))
	v.step(topic)
	return true
}

// entry is what the map says of a topic, by an entry of its own or by the rules.
func (v *mover) entry(topic string) route.Entry {
	table := v.k.table.Load()
	e, ok := table.Entry(topic)
	if ok && !e.Floor() {
		return e
	}
	t, err := route.ParseTopic(topic)
	if err != nil {
		panic("app: the map holds an entry of " + topic + ", which is no topic: " + err.Error())
	}
	d := table.Decide(t, v.k.def)
	return route.Entry{Topic: topic, Cluster: d.Cluster, Epoch: d.Epoch}
}

// step does what is owed for a topic; mu is held.
func (v *mover) step(topic string) {
	if v.life == nil || v.over {
		return
	}
	m := v.topics[topic]
	for m != nil {
		duty := m.p.Next(time.Now())
		switch duty.Do {
		case switching.DoNothing:
			// Without a lease something may be owed that only a contact with the store brings up.
			if v.leased && !m.busy && m.pending == 0 && m.p.Entry().State == route.StateActive {
				delete(v.topics, topic)
			}
			return
		case switching.DoPrepare, switching.DoFence, switching.DoRelease, switching.DoFollow, switching.DoEvict:
			m.p.Told(duty.Entry)
			v.tell(m, duty)
		case switching.DoSave, switching.DoAck:
			// A loop that goes by the lease only from now on must not be vouched for.
			if !m.busy && m.telling == 0 {
				m.busy = true
				v.tasks.Go(func() { v.perform(m, duty) })
			}
			return
		}
	}
}

// tell hands an entry to the loops.
func (v *mover) tell(m *movingTopic, duty switching.Duty) {
	e := duty.Entry
	switch duty.Do {
	case switching.DoPrepare:
		v.k.log.Info("a topic is prepared for its move", "topic", e.Topic, "switch", e.SwitchID, "attempt", e.Attempt, "cluster", e.Cluster)
		m.telling++
		gatherEvicted(v.k.loops, func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
			sh.Prepare(now, e.Topic)
			done(session.Evicted{})
		}, func(session.Evicted) {
			v.report(e.Topic, func() { m.telling-- })
		})
	case switching.DoFence:
		v.fence(m, e)
	case switching.DoRelease:
		v.k.log.Info("a topic goes on where it was", "topic", e.Topic, "switch", e.SwitchID, "attempt", e.Attempt, "cluster", e.Cluster)
		gatherEvicted(v.k.loops, func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
			sh.Unfence(now, e.Topic, session.Assigned{}, done)
		}, func(session.Evicted) {})
	case switching.DoFollow:
		v.k.log.Info("other subscriptions of a topic drain", "topic", e.Topic, "switch", e.SwitchID, "cluster", e.Cluster)
		v.tasks.Go(func() {
			assigned := v.k.assigned(v.life, e.SwitchID)
			gatherEvicted(v.k.loops, func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
				sh.Evict(now, e.Topic, assigned, done)
			}, func(session.Evicted) {})
		})
	case switching.DoEvict:
		// The record is read elsewhere: this may be the watch of the map.
		m.pending++
		v.tasks.Go(func() {
			assigned := session.Assigned{}
			if e.SwitchID != "" {
				assigned = v.k.assigned(v.life, e.SwitchID)
			}
			gatherEvicted(v.k.loops, func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
				sh.Evict(now, e.Topic, assigned, done)
			}, func(total session.Evicted) {
				v.k.log.Info("clients were told that their topic moved", "topic", e.Topic, "switch", e.SwitchID, "cluster", e.Cluster,
					"producers", total.Producers, "consumers", total.Consumers, "unresolved", total.Unresolved)
				v.report(e.Topic, func() {
					m.pending--
					m.evicted = total
					m.p.Evicted(e)
				})
			})
		})
	}
}

// fence has every loop fence the topic; when all that was forwarded is answered, the proxy learns of it.
func (v *mover) fence(m *movingTopic, e route.Entry) {
	v.k.log.Info("a topic is fenced for its move", "topic", e.Topic, "switch", e.SwitchID, "attempt", e.Attempt, "cluster", e.Cluster)
	key := switching.KeyOf(e)
	gather(v.k.loops, session.Fenced{Clean: true}, func(loop int) session.Fenced {
		return session.Fenced{Why: fmt.Sprintf("event loop %d has ended", loop)}
	}, func(now time.Time, sh *session.Shard, done func(session.Fenced)) {
		sh.Fence(now, e.Topic, key, done)
	}, func(total session.Fenced) {
		v.report(e.Topic, func() {
			m.fenced = total
			m.p.Drained(key, total.Clean, total.Why)
		})
	})
}

// report hands a proxy what the loops have done. It comes from an event loop, which must not wait for mu as long as a disk takes: nobody
// holds mu while he writes.
func (v *mover) report(topic string, note func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	note()
	v.step(topic)
}

// perform writes the disk copy or an ack, and goes on.
func (v *mover) perform(m *movingTopic, duty switching.Duty) {
	var err error
	e := duty.Entry
	if duty.Do == switching.DoSave {
		if v.k.copy != nil {
			err = v.k.copy.moving.put(e)
		}
	} else {
		err = v.acknowledge(m, duty)
	}
	if err != nil && v.life.Err() == nil {
		v.k.log.Warn("a switch waits for this proxy", "topic", e.Topic, "switch", e.SwitchID, "attempt", e.Attempt, "err", err)
		select {
		case <-time.After(ackRetry):
		case <-v.life.Done():
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	m.busy = false
	switch {
	case err != nil:
	case duty.Do == switching.DoSave:
		m.p.Saved(e)
	default:
		m.p.Acked(duty.Phase, switching.KeyOf(e))
	}
	v.step(e.Topic)
}

func (v *mover) acknowledge(m *movingTopic, duty switching.Duty) error {
	self := v.k.self()
	a := switching.Ack{
		Attempt: duty.Entry.Attempt, Phase: duty.Phase, Proxy: self.ID, Incarnation: self.Incarnation,
		Clean: duty.Clean, Why: duty.Why, At: time.Now(),
	}
	v.mu.Lock()
	switch duty.Phase {
	case switching.StateFenced:
		a.Producers, a.Consumers, a.Claims = m.fenced.Producers, m.fenced.Consumers, m.fenced.Claims
		if size := claimBytes(a.Claims); size > maxClaimBytes {
			if a.Claims = nil; a.Clean {
				a.Clean, a.Why = false, fmt.Sprintf("the names of %d producers are too many to be told one by one", len(m.fenced.Claims))
			}
		}
	case switching.StateEvicting:
		a.Producers, a.Consumers, a.Unresolved = m.evicted.Producers, m.evicted.Consumers, m.evicted.Unresolved
	}
	v.mu.Unlock()
	ctx, cancel := context.WithTimeout(v.life, ackTimeout)
	defer cancel()
	if err := v.k.store.PutAck(ctx, duty.Entry.SwitchID, a); err != nil && !errors.Is(err, store.ErrNotFound) { // nobody waits for an ack of a record that is gone
		return fmt.Errorf("acknowledging %s: %w", duty.Phase, err)
	}
	return nil
}

// held are the topics that wait for the store: they are in a switch, and this process has no lease.
func (v *mover) held() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.leased {
		return nil
	}
	var topics []string
	for topic, m := range v.topics {
		if s := m.p.Entry().State; s != route.StateActive && s != route.StateDraining {
			topics = append(topics, topic)
		}
	}
	return topics
}
