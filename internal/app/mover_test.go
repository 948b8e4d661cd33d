package app

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/codec"
	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

const movedTopic = "persistent://public/default/moved"

// hand writes the steps of a planned switch of movedTopic as its controller would.
type hand struct {
	*rig
	st    store.Store
	rec   switching.Record
	entry route.Entry // in the map now; the zero entry is none
	drain string      // of the entries that it writes, but for active ones
}

func newHand(t *testing.T, r *rig, id string) *hand {
	h := &hand{rig: r, st: r.app.store, rec: switching.Record{ID: id, Attempt: 1, Topic: movedTopic, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: 1}}
	lead(t, h.st.(*store.Memory))
	h.rec.Rev++
	if err := h.st.PutSwitch(t.Context(), h.rec); err != nil {
		t.Fatal(err)
	}
	return h
}

// lead keeps the proxies of a store from driving the switch that a test writes by hand.
func lead(t *testing.T, st *store.Memory) {
	t.Helper()
	leads, ended := make(chan struct{}), make(chan error, 1)
	st.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{"Lead"}})
	go func() {
		ended <- st.Join().Lead(t.Context(), "hand", func(ctx context.Context) {
			close(leads)
			<-ctx.Done()
		})
	}()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	<-leads
	st.SetFaults(store.Faults{})
}

// again asks for the next attempt.
func (h *hand) again(t *testing.T) {
	t.Helper()
	h.rec = h.rec.Again(time.Now())
	if err := h.st.PutSwitch(t.Context(), h.rec); err != nil {
		t.Fatal(err)
	}
}

func (h *hand) write(t *testing.T, state switching.State, cluster string, s route.State, epoch uint64) {
	t.Helper()
	after := route.Entry{Topic: movedTopic, Cluster: cluster, State: s, Epoch: epoch, SwitchID: h.rec.ID, Attempt: h.rec.Attempt}
	if s != route.StateActive {
		after.Drain = h.drain
	}
	h.put(t, state, &after)
}

// put writes a step with any entry, or with none.
func (h *hand) put(t *testing.T, state switching.State, after *route.Entry) {
	t.Helper()
	change := store.EntryChange{Topic: movedTopic, After: after}
	if h.entry.Topic != "" {
		before := h.entry
		change.Before = &before
	}
	h.rec.Rev++
	h.rec.State = state
	if err := h.st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{change}, Switch: &h.rec}); err != nil {
		t.Fatal(err)
	}
	if h.entry = (route.Entry{}); after != nil {
		h.entry = *after
	}
}

// ack waits for the proxy's ack of a phase.
func (h *hand) ack(t *testing.T, phase switching.State) (found switching.Ack) {
	t.Helper()
	h.await(t, "the ack of "+string(phase), func() bool {
		acks, err := h.st.Acks(t.Context(), h.rec.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range acks {
			if a.Phase == phase && a.Attempt == h.rec.Attempt {
				found = a
				return true
			}
		}
		return false
	})
	if self := h.app.Info(); found.Proxy != self.ID || found.Incarnation != self.Incarnation {
		t.Errorf("the ack of %s is %+v, of proxy %s %s", phase, found, self.ID, self.Incarnation)
	}
	return found
}

// held publishes while the topic is fenced: there must be no receipt before it is released.
func (h *hand) held(t *testing.T, f *follower) (received chan bool) {
	t.Helper()
	received = make(chan bool, 1)
	dropped := h.metric(t, "pointsman_fence_dropped_sends_total")
	go func() { received <- f.trySend([]byte("held")) }()
	h.await(t, "a dropped SEND", func() bool { return h.metric(t, "pointsman_fence_dropped_sends_total") > dropped })
	select {
	case <-received:
		t.Error("a message to a fenced topic has a receipt")
	default:
	}
	return received
}

// A proxy acknowledges prepared once its disk would tell a restart of it, fenced when nothing is unanswered, and evicted when its clients
// were told; a message that was sent meanwhile arrives on the new cluster, once.
func TestAProxyPassesThePhasesOfAPlannedSwitch(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.StateDir = dir })
	f := follow(t, r.app.PulsarAddr(), movedTopic, "p", 0)
	f.mustSend(3)
	h := newHand(t, r, "sw-1")
	h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	h.ack(t, switching.StatePrepared)
	if e := onDisk(t, dir); e != h.entry {
		t.Errorf("acknowledged, and the disk has %+v", e)
	}
	f.mustSend(2) // prepared: all goes on
	h.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	if a := h.ack(t, switching.StateFenced); a.Clean || a.Producers != 1 || len(a.Claims) != 1 || a.Claims[0] != "p" {
		t.Errorf("the fenced ack is %+v; a young process is not clean, and its client p has a producer", a)
	}
	received := h.held(t, f)
	h.write(t, switching.StateEvicting, "b", route.StateActive, 1)
	if a := h.ack(t, switching.StateEvicting); a.Producers != 1 {
		t.Errorf("the evicted ack is %+v", a)
	}
	if !<-received {
		t.Error("the message that was sent during the fence has no receipt")
	}
	if a, b := len(r.a.Messages(movedTopic)), len(r.b.Messages(movedTopic)); a != 5 || b != 1 {
		t.Errorf("%d messages are on a, %d on b; want 5 and 1", a, b)
	}
	r.await(t, "the end of the move in the proxy", func() bool {
		r.app.maps.mover.mu.Lock()
		defer r.app.maps.mover.mu.Unlock()
		return len(r.app.maps.mover.topics) == 0
	})
}

// An abort gives the topic back to its cluster, by an entry of its own or by the rules again: what was sent during the fence arrives there.
func TestAnAbortedSwitchGivesTheTopicBack(t *testing.T) {
	for name, abort := range map[string]func(*hand){
		"by an entry":  func(h *hand) { h.write(t, switching.StateAborted, "a", route.StateActive, 0) },
		"by the rules": func(h *hand) { h.put(t, switching.StateAborted, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			r := newRig(t, testkit.Options{}, func(c *config.Config) { c.StateDir = dir })
			f := follow(t, r.app.PulsarAddr(), movedTopic, "p", 0)
			f.mustSend(3)
			h := newHand(t, r, "sw-1")
			h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
			h.ack(t, switching.StatePrepared)
			h.write(t, switching.StateFenced, "a", route.StateFenced, 0)
			h.ack(t, switching.StateFenced)
			received := h.held(t, f)
			abort(h)
			if !<-received {
				t.Error("the message that was sent during the fence has no receipt")
			}
			f.mustSend(2)
			if a, b := len(r.a.Messages(movedTopic)), len(r.b.Messages(movedTopic)); a != 6 || b != 0 {
				t.Errorf("%d messages are on a, %d on b; want 6 and 0", a, b)
			}
			// The next attempt has acks, and a place on the disk, of its own.
			h.again(t)
			h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
			h.ack(t, switching.StatePrepared)
			if e := onDisk(t, dir); e.Attempt != 2 {
				t.Errorf("attempt 2 is acknowledged, and the disk has %+v", e)
			}
			abort(h)
			f.mustSend(1)
		})
	}
}

// onDisk is what the small copy in dir has of movedTopic.
func onDisk(t *testing.T, dir string) route.Entry {
	t.Helper()
	table, err := newMovingCopy(dir).load(route.Empty())
	if err != nil {
		t.Fatal(err)
	}
	e, _ := table.Entry(movedTopic)
	return e
}

// SW-05, P6: a proxy that is cut off from the store holds the publishes of a prepared topic when its lease is over, and says that it is not
// ready; others go on. With the store back, all goes on.
func TestAProxyWithoutALeaseHoldsAPreparedTopic(t *testing.T) {
	const other = "persistent://public/default/other"
	st := store.NewMemory()
	r := &rig{world: &world{}}
	first := newRig(t, testkit.Options{}, nil)
	r.a, r.b = first.a, first.b
	r.cfg = r.config(nil)
	r.run(t, st, r.cfg)
	f, g := follow(t, r.app.PulsarAddr(), movedTopic, "p", 0), follow(t, r.app.PulsarAddr(), other, "q", 0)
	f.mustSend(1)
	h := newHand(t, r, "sw-1")
	h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	h.ack(t, switching.StatePrepared)
	st.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
	r.await(t, "the loss of the lease", func() bool {
		ok, reasons := r.app.Ready()
		return !ok && len(reasons) == 1
	})
	received := h.held(t, f)
	g.mustSend(3)
	st.SetFaults(store.Faults{})
	select {
	case ok := <-received:
		if !ok {
			t.Error("the held message has no receipt")
		}
	case <-time.After(patience):
		t.Error("the held message has no receipt after the lease is back")
	}
	if n := len(r.a.Messages(movedTopic)); n != 2 {
		t.Errorf("%d messages are on a, want 2", n)
	}
}

// SW-05, P6: a proxy that starts from its disk while the store is away, in the middle of a switch, holds the topic and serves all others.
// When the store is back and the topic has moved meanwhile, whoever waited goes to the new cluster; nothing went to the old one.
func TestAProxyThatStartsInTheMiddleOfASwitchWaitsForTheStore(t *testing.T) {
	for phase, state := range map[switching.State]route.State{switching.StatePrepared: route.StatePrepared, switching.StateFenced: route.StateFenced} {
		t.Run(string(phase), func(t *testing.T) {
			const other = "persistent://public/default/other"
			dir := t.TempDir()
			r := newRig(t, testkit.Options{}, func(c *config.Config) { c.StateDir = dir })
			st := r.app.store.(*store.Memory).Join()
			r.await(t, "copy of the map", func() bool { _, err := os.Stat(filepath.Join(dir, "last-good-map")); return err == nil })
			crashed := t.TempDir() // what is on the disk after a crash: the map of before the switch, and the attempt
			keep := func(names ...string) {
				t.Helper()
				for _, name := range names {
					text, err := os.ReadFile(filepath.Join(dir, name))
					if err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(filepath.Join(crashed, name), text, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			keep("last-good-map", "tag-key")
			toOld := r.owner(t, movedTopic)
			h := newHand(t, r, "sw-1")
			h.st = st
			h.write(t, phase, "a", state, 0)
			h.ack(t, phase)
			keep("moving-topics")
			if err := r.stop(); err != nil {
				t.Fatal(err)
			}
			away := st.Join()
			away.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
			late := &rig{world: &world{a: r.a, b: r.b}}
			late.cfg = late.config(func(c *config.Config) { c.StateDir = crashed })
			late.launch(t, away, late.cfg)
			late.await(t, "readiness but for the topic", func() bool {
				ok, reasons := late.app.Ready()
				return !ok && len(reasons) == 1 && strings.Contains(reasons[0], movedTopic)
			})
			f := follow(t, late.app.PulsarAddr(), movedTopic, "p", 0)
			received := make(chan bool, 1)
			go func() { received <- f.trySend([]byte("held")) }()
			lookups := late.connect(t, "")
			lookups.send(lookupCommand(movedTopic, 1))
			lookups.send(lookupCommand(other, 2))
			if a := lookups.expect(codec.TypeLookupResponse).GetLookupTopicResponse(); a.GetRequestId() != 2 || a.GetResponse() != codec.LookupConnect {
				t.Errorf("the first answer is %v, want that for the topic that does not move", a)
			}
			cached := late.connect(t, toOld)
			cached.send(producerCommand(movedTopic, "cached", 1, 7))
			cached.send(pingCommand())
			cached.expect(codec.TypePong) // and no answer before it

			h.write(t, switching.StateEvicting, "b", route.StateActive, 1)
			away.SetFaults(store.Faults{})
			if a := lookups.expect(codec.TypeLookupResponse).GetLookupTopicResponse(); a.GetRequestId() != 1 || a.GetResponse() != codec.LookupConnect {
				t.Errorf("the parked lookup is answered %v", a)
			}
			if e := cached.expect(codec.TypeError).GetError(); e.GetRequestId() != 7 {
				t.Errorf("the parked PRODUCER for the old cluster is answered %v", e)
			}
			select {
			case ok := <-received:
				if !ok {
					t.Error("the held message has no receipt")
				}
			case <-time.After(patience):
				t.Error("the held message has no receipt after the store is back")
			}
			if a, b := len(r.a.Messages(movedTopic)), len(r.b.Messages(movedTopic)); a != 0 || b != 1 {
				t.Errorf("%d messages are on a, %d on b; want 0 and 1", a, b)
			}
			h.rig = late
			h.ack(t, switching.StateEvicting)
		})
	}
}

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

// Whoever has to leave is told the broker that the switch looked up: producers at the flip, and consumers of a drain when it is their turn.
func TestClientsOfAPlannedSwitchAreToldWhereToGo(t *testing.T) {
	r := newRig(t, testkit.Options{}, nil)
	p := r.bridge(t, movedTopic)
	p.produce(movedTopic, "", 1)
	p.subscribe(movedTopic, "one", 0, 2)
	p.subscribe(movedTopic, "two", 0, 3)
	h := newHand(t, r, "sw-1")
	h.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	if a := h.ack(t, switching.StateFenced); a.Producers != 1 || a.Consumers != 2 {
		t.Errorf("the fenced ack is %+v, want 1 producer and 2 consumers", a)
	}
	h.rec.Assigned = map[string]string{movedTopic: r.b.Broker(0).Advertised()}
	h.drain = "a;0;3:4;=one;=two"
	h.write(t, switching.StateEvicting, "b", route.StateDraining, 1)
	told := p.expect(codec.TypeCloseProducer).GetCloseProducer()
	const want = "pulsar://broker-0.b."
	if told.GetProducerId() != 1 || !strings.HasPrefix(told.GetAssignedBrokerServiceUrl(), want) {
		t.Errorf("the producer is told %v, want %s", told, want)
	}
	if a := h.ack(t, switching.StateEvicting); a.Producers != 1 || a.Consumers != 0 {
		t.Errorf("the ack of the flip is %+v, want 1 producer and no consumer", a)
	}
	h.drain = "a;0;3:4;=one"
	h.write(t, switching.StateDraining, "b", route.StateDraining, 1)
	if told := p.expect(codec.TypeCloseConsumer).GetCloseConsumer(); told.GetConsumerId() != 3 || !strings.HasPrefix(told.GetAssignedBrokerServiceUrl(), want) {
		t.Errorf("the consumer of a subscription that has moved is told %v, want %s", told, want)
	}
}
