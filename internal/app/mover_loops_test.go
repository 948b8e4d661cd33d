package app

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/store"
)

// These tests are the loops that a mover tells: what it owes is in their hands, and the clock is faked where it matters.

// slowLoop is an event loop that does what it is asked to when the test says so.
type slowLoop struct {
	sh    *session.Shard
	posts chan func(time.Time, *session.Shard)
}

func (slowLoop) Loops() int { return 1 }

func (l slowLoop) Post(_ int, f func(time.Time, *session.Shard)) bool {
	l.posts <- f
	return true
}

func (l slowLoop) run() {
	for {
		select {
		case f := <-l.posts:
			f(time.Now(), l.sh)
		default:
			return
		}
	}
}

// slowly runs a keeper with one slow loop in a bubble, until the test ends.
func slowly(t *testing.T, st store.Store, log slog.Handler) (*mapKeeper, slowLoop) {
	t.Helper()
	loop := slowLoop{posts: make(chan func(time.Time, *session.Shard), 100)}
	k := newMapKeeper(st, slog.New(log), nil)
	k.loops, k.self, k.def = loop, func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }, "a"
	loop.sh = session.NewShard(&session.Config{Table: k.table.Load, DefaultCluster: "a"}, 0, 1)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return k, loop
}

// P2, P3: who acknowledges prepared says that no loop publishes without a lease any more.
func TestPreparedIsAcknowledgedAfterEveryLoopHasIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewMemory()
		_, loop := slowly(t, st, slog.DiscardHandler)
		rec := switching.Record{ID: "sw-1", Rev: 1, Attempt: 1, Topic: movedTopic, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StatePrepared}
		prepared := route.Entry{Topic: movedTopic, Cluster: "a", State: route.StatePrepared, SwitchID: "sw-1", Attempt: 1}
		synctest.Wait()
		loop.run()
		if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: movedTopic, After: &prepared}}, Switch: &rec}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // of the bubble
		synctest.Wait()
		if acks, err := st.Acks(t.Context(), "sw-1"); err != nil || len(acks) != 0 {
			t.Errorf("acknowledged before the loop knows of it: %+v, %v", acks, err)
		}
		loop.run()
		synctest.Wait()
		if acks, err := st.Acks(t.Context(), "sw-1"); err != nil || len(acks) != 1 || acks[0].Phase != switching.StatePrepared {
			t.Errorf("acks: %+v, %v", acks, err)
		}
	})
}

// An ack must fit into a node of ZooKeeper, however many producers a topic has: without their names it vouches for nothing, and the topic is unloaded.
func TestAnAckOfVeryManyProducersIsSmallAndNotClean(t *testing.T) {
	for n, c := range map[int]struct {
		name  string
		named bool
	}{1_000: {"standalone-%06d", true}, 60_000: {"standalone-%06d", false}, 100_000: {"%x", false}} {
		named := c.named
		st := store.NewMemory()
		rec := switching.Record{ID: "sw-1", Rev: 1, Attempt: 1, Topic: movedTopic, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateFenced}
		if err := st.PutSwitch(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
		k.self = func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }
		k.mover.life = t.Context()
		m := &movingTopic{fenced: session.Fenced{Producers: n, Clean: true}}
		for i := range n {
			m.fenced.Claims = append(m.fenced.Claims, fmt.Sprintf(c.name, i))
		}
		duty := switching.Duty{Do: switching.DoAck, Phase: switching.StateFenced, Clean: true, Entry: route.Entry{Topic: movedTopic, SwitchID: "sw-1", Attempt: 1}}
		if err := k.mover.acknowledge(m, duty); err != nil {
			t.Fatal(err)
		}
		acks, err := st.Acks(t.Context(), "sw-1")
		if err != nil || len(acks) != 1 {
			t.Fatalf("%+v, %v", acks, err)
		}
		if a := acks[0]; a.Producers != n || a.Clean != named || (len(a.Claims) == n) != named || (a.Why == "") != named {
			t.Errorf("%d producers: %d are named, clean %v, because %q", n, len(a.Claims), a.Clean, a.Why)
		}
		if text, err := json.Marshal(acks[0]); err != nil || len(text) > 1_000_000 {
			t.Errorf("%d producers: an ack of %d bytes, %v", n, len(text), err)
		}
	}
}

// moving is how many topics the mover looks after.
func (v *mover) moving() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.topics)
}

// P2: what was learned before the lease was lost is not vouched for, and what is owed then is owed when the lease is back.
func TestWithoutALeaseNothingIsAcknowledgedAndNothingForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewMemory()
		k, loop := slowly(t, st, slog.DiscardHandler)
		m := newMoves(t, st)
		lease := func(there bool) {
			st.SetFaults(store.Faults{NoLease: !there})
			time.Sleep(2 * leaseLook) // of the bubble
			synctest.Wait()
		}
		step := func(phase switching.State, cluster string, state route.State, epoch uint64) {
			t.Helper()
			synctest.Wait()
			m.write(t, phase, cluster, state, epoch)
			synctest.Wait()
			lease(false)
			loop.run()
			synctest.Wait()
			if m.has(t, phase, "i") {
				t.Errorf("%s is acknowledged without a lease", phase)
			}
			if k.mover.moving() != 1 {
				t.Errorf("%s: the topic is forgotten", phase)
			}
			if held := k.mover.held(); (len(held) == 1) != (state != route.StateActive) {
				t.Errorf("%s: without a lease %v are held", phase, held)
			}
			lease(true)
			loop.run()
			synctest.Wait()
			if !m.has(t, phase, "i") {
				t.Errorf("%s is not acknowledged with the lease back", phase)
			}
			if held := k.mover.held(); len(held) != 0 {
				t.Errorf("%s: with the lease back %v are held", phase, held)
			}
		}
		lease(true)
		step(switching.StatePrepared, "a", route.StatePrepared, 0)
		step(switching.StateFenced, "a", route.StateFenced, 0)
		step(switching.StateEvicting, "b", route.StateActive, 1)
		if k.mover.moving() != 0 {
			t.Error("the move is over, and the topic is looked after still")
		}
	})
}

// P2: clients are told of a flip before it is acknowledged, however fast it was found out.
func TestAFlipIsAcknowledgedAfterEveryLoopHasIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewMemory()
		k, loop := slowly(t, st, slog.DiscardHandler)
		m := newMoves(t, st)
		m.write(t, switching.StateFenced, "a", route.StateFenced, 0)
		time.Sleep(time.Second) // of the bubble
		synctest.Wait()
		loop.run()
		m.write(t, switching.StateEvicting, "b", route.StateActive, 1)
		time.Sleep(time.Second)
		synctest.Wait()
		if m.has(t, switching.StateEvicting, "i") || k.mover.moving() != 1 {
			t.Errorf("the loop does not know of the flip: acknowledged %v, %d topics move", m.has(t, switching.StateEvicting, "i"), k.mover.moving())
		}
		loop.run()
		synctest.Wait()
		if !m.has(t, switching.StateEvicting, "i") {
			t.Error("the flip is not acknowledged")
		}
	})
}

// An ack that cannot be written is tried once each ackRetry, however often the topic is looked at, and the topic is kept as long: a task of an earlier attempt must not
// write after one of the next.
func TestATopicHasOneTaskAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, log := store.NewMemory(), &logRecorder{}
		k, loop := slowly(t, st, slog.NewTextHandler(log, nil))
		m := newMoves(t, st)
		st.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{"PutAck"}})
		m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
		synctest.Wait()
		loop.run()
		const looks = 10
		for range looks {
			k.mover.takes(movedTopic, m.entry)
			time.Sleep(ackRetry) // of the bubble
			synctest.Wait()
		}
		if n := len(log.with("acknowledging prepared")); n < looks-1 || n > looks+1 {
			t.Errorf("the ack was tried %d times in %d pauses", n, looks)
		}
		time.Sleep(ackRetry / 2) // in the middle of a pause
		m.write(t, switching.StateAborted, "a", route.StateActive, 0)
		synctest.Wait()
		loop.run()
		synctest.Wait()
		if k.mover.moving() != 1 {
			t.Error("the topic is forgotten before its task has ended")
		}
		time.Sleep(ackRetry)
		synctest.Wait()
		if k.mover.moving() != 0 {
			t.Error("the topic is looked after still")
		}
	})
}

// twoLoops are event loops of which the first ones live: they do at once what they are asked to, one after the other.
type twoLoops struct {
	shards [2]*session.Shard
	turn   *sync.Mutex
	live   int
}

func (twoLoops) Loops() int { return 2 }

func (l twoLoops) Post(loop int, f func(time.Time, *session.Shard)) bool {
	if loop < l.live {
		go func() {
			l.turn.Lock()
			defer l.turn.Unlock()
			f(time.Now(), l.shards[loop])
		}()
	}
	return loop < l.live
}

// P5: clean is what every loop has said, and only of a process that is old enough to know. The reason goes with it.
func TestAFencedAckIsCleanWhenEveryLoopSaysSo(t *testing.T) {
	for name, c := range map[string]struct {
		live int
		age  time.Duration
		why  string
	}{
		"all is answered":  {2, switching.SettleTime, ""},
		"a loop has ended": {1, switching.SettleTime, "event loop 1 has ended"},
		"a young process":  {2, switching.SettleTime / 2, "too young"},
		"no loop is left":  {0, switching.SettleTime, "event loop 0 has ended"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := store.NewMemory()
				k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
				k.self, k.def = func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }, "a"
				cfg := &session.Config{Table: k.table.Load, DefaultCluster: "a"}
				k.loops = twoLoops{[2]*session.Shard{session.NewShard(cfg, 0, 2), session.NewShard(cfg, 1, 2)}, new(sync.Mutex), c.live}
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- k.run(ctx) }()
				m := newMoves(t, st)
				time.Sleep(c.age) // of the bubble
				m.write(t, switching.StateFenced, "a", route.StateFenced, 0)
				synctest.Wait()
				acks, err := st.Acks(t.Context(), "sw-1")
				if err != nil || len(acks) != 1 || acks[0].Clean != (c.why == "") || !strings.Contains(acks[0].Why, c.why) || acks[0].At.IsZero() {
					t.Errorf("acks %+v, %v; want one with the reason %q", acks, err, c.why)
				}
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// An abort that leaves a topic to the rules releases it by its name, on their cluster, also when an entry without a cluster keeps its epoch. A topic that
// leaves its switch by nobody's switch is looked up: there is no record to read.
func TestATopicThatLeavesItsSwitchIsTakenForWhatTheMapSays(t *testing.T) {
	for name, c := range map[string]struct {
		after *route.Entry
		line  string
	}{
		"by the rules":            {nil, "a topic goes on where it was"},
		"by the rules, its epoch": {&route.Entry{Topic: movedTopic, Epoch: 4}, "a topic goes on where it was"},
		"by a command":            {&route.Entry{Topic: movedTopic, Cluster: "b", Epoch: 5}, "clients were told that their topic moved"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, log := store.NewMemory(), &logRecorder{}
				k, loop := slowly(t, st, slog.NewTextHandler(log, nil))
				m := newMoves(t, st)
				cluster, epoch := "cluster=a", uint64(0)
				if c.after != nil {
					epoch = 4
					if c.after.Cluster != "" {
						cluster = "cluster=" + c.after.Cluster
					}
				}
				m.write(t, switching.StateFenced, "a", route.StateFenced, epoch)
				time.Sleep(2 * leaseLook) // of the bubble
				synctest.Wait()
				loop.run()
				m.put(t, switching.StateAborted, c.after)
				synctest.Wait()
				loop.run()
				synctest.Wait()
				if len(log.with(c.line, "topic="+movedTopic, cluster)) != 1 {
					t.Errorf("no line %q with %s: %v", c.line, cluster, log.last(9))
				}
				if lines := log.with("record of a switch cannot be read"); len(lines) != 0 {
					t.Error(lines)
				}
				if k.mover.moving() != 0 {
					t.Error("the topic is looked after still")
				}
			})
		})
	}
}

// A process tells its loops at once what it knows of topics in a switch, whether it has a lease or not; and nobody any more once it has ended.
func TestLoopsAreToldFromTheStartToTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewMemory()
		st.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
		loop := slowLoop{posts: make(chan func(time.Time, *session.Shard), 100)}
		k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
		k.loops, k.def = loop, "a"
		k.mover.begin(route.Entry{Topic: movedTopic, Cluster: "a", State: route.StateFenced, SwitchID: "sw-1", Attempt: 1})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); k.mover.run(ctx) }()
		synctest.Wait()
		if len(loop.posts) != 1 {
			t.Errorf("%d calls of the loop for a topic that was fenced on the disk", len(loop.posts))
		}
		stop()
		<-ended
		late := route.Entry{Topic: movedTopic + "-2", Cluster: "a", State: route.StatePrepared, SwitchID: "sw-2", Attempt: 1}
		k.table.Store(tableOf(t, late))
		k.mover.takes(late.Topic, late)
		if len(loop.posts) != 1 {
			t.Error("a process that has ended begins something")
		}
	})
}

// A stop waits neither for an answer of the store nor for the next time that it would be asked.
func TestAnAckThatCannotBeWrittenHoldsUpNoStop(t *testing.T) {
	for name, faults := range map[string]store.Faults{
		"it hangs": {Hang: true, Only: []string{"PutAck"}},
		"it fails": {Err: store.ErrUnavailable, Only: []string{"PutAck"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, log := store.NewMemory(), &logRecorder{}
				k := newMapKeeper(st, slog.New(slog.NewTextHandler(log, nil)), nil)
				k.loops, k.self, k.def = noLoops{}, func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }, "a"
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- k.run(ctx) }()
				st.SetFaults(faults)
				m := newMoves(t, st)
				m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
				synctest.Wait()
				before, lines := time.Now(), len(log.with("a switch waits"))
				stop()
				if err := <-ended; err != nil || time.Since(before) != 0 {
					t.Errorf("the stop took %v, %v", time.Since(before), err)
				}
				k.mover.mu.Lock()
				defer k.mover.mu.Unlock()
				for topic, m := range k.mover.topics {
					if m.busy {
						t.Errorf("it has stopped, and a task of %s is under way still", topic)
					}
				}
				if len(log.with("a switch waits")) != lines {
					t.Error("that the ack is not written is said of a process that stops")
				}
			})
		})
	}
}

// What the loops count of a flip goes into its ack.
func TestTheAckOfAFlipSaysWhatBecameOfTheClients(t *testing.T) {
	st := store.NewMemory()
	newMoves(t, st)
	k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
	k.self = func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }
	k.mover.life = t.Context()
	m := &movingTopic{evicted: session.Evicted{Producers: 1, Consumers: 2, Unresolved: 3}, fenced: session.Fenced{Producers: 4, Consumers: 5}}
	duty := switching.Duty{Do: switching.DoAck, Phase: switching.StateEvicting, Entry: route.Entry{Topic: movedTopic, SwitchID: "sw-1", Attempt: 1}}
	if err := k.mover.acknowledge(m, duty); err != nil {
		t.Fatal(err)
	}
	if acks, err := st.Acks(t.Context(), "sw-1"); err != nil || len(acks) != 1 || acks[0].Producers != 1 || acks[0].Consumers != 2 || acks[0].Unresolved != 3 {
		t.Errorf("%+v, %v", acks, err)
	}
}
