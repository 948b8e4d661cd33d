package app

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/core/route"
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
