package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

const base = "persistent://acme/orders/created"

// world is a store with members that acknowledge whatever the map says, and a topic that is never where it should not be.
type world struct {
	t     *testing.T
	st    *store.Memory
	topic *fakeTopic
	clean atomic.Bool
	mute  atomic.Bool // the members do not acknowledge fenced
}

// fakeTopic is both clusters. Each method fails as often as failures says.
type fakeTopic struct {
	hangs      string // the method that ends with its context
	mu         sync.Mutex
	failures   map[string]int
	calls      map[string]int
	publishers []switching.Publisher
	foreign    string
	missing    int64 // what Carry finds to have no copy
}

func (f *fakeTopic) call(ctx context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[name]++
	if name == f.hangs && f.failures[name] == 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	if f.failures[name] != 0 {
		f.failures[name]--
		return errors.New("cluster a: " + name + ": no answer")
	}
	return nil
}

func (f *fakeTopic) Warm(ctx context.Context) error  { return f.call(ctx, "warm") }
func (f *fakeTopic) Evict(ctx context.Context) error { return f.call(ctx, "evict") }
func (f *fakeTopic) Tail(ctx context.Context) (string, error) {
	return base + "=7:41", f.call(ctx, "tail")
}
func (f *fakeTopic) Replicated(ctx context.Context, tail string) (string, error) {
	if err := f.call(ctx, "replicated"); ctx.Err() != nil {
		return "", err
	} else if err != nil {
		return "3 entries are not replicated yet", nil
	}
	return "", nil
}
func (f *fakeTopic) Carry(ctx context.Context) ([]switching.Carried, error) {
	time.Sleep(time.Millisecond) // of the bubble: a fence takes time
	return []switching.Carried{{Topic: base, Subscription: "s", How: "end of what was copied", By: "producer and sequence id", First: "9:42", Unacked: 3, Repeated: 1, Missing: f.missing}}, f.call(ctx, "carry")
}
func (f *fakeTopic) ReadBack(ctx context.Context) (string, error) {
	if f.call(ctx, "differs") != nil {
		return "subscription s: it begins at 9:43 and should begin at 9:42", nil
	}
	return "", f.call(ctx, "read back")
}
func (f *fakeTopic) Since(ctx context.Context, _ string) (string, []switching.Publisher, error) {
	return f.foreign, f.publishers, f.call(ctx, "since")
}
func (f *fakeTopic) Verify(ctx context.Context, tail string) (Verified, error) {
	if tail != base+"=7:41" {
		return Verified{}, fmt.Errorf("the tail is %q", tail)
	}
	v := Verified{Tail: map[string]string{base: "7:41"}, First: map[string]string{base: "9:41"}, Text: "all there"}
	if f.call(ctx, "differs later") != nil {
		v.Carried, _ = f.Carry(ctx)
		v.Carried[0].After = &switching.After{Backlog: 12, Difference: 2}
		v.Differences = "subscription s: 2 more"
	}
	return v, f.call(ctx, "verify")
}
func (f *fakeTopic) Close() {}

func newWorld(t *testing.T, members ...string) *world {
	w := &world{t: t, st: store.NewMemory(), topic: &fakeTopic{failures: map[string]int{}, calls: map[string]int{}}}
	w.clean.Store(true)
	for _, id := range members {
		st := w.st.Join()
		if err := st.Register(t.Context(), store.Proxy{ID: id, Incarnation: "i-" + id, Clusters: []string{"a", "b"}}); err != nil {
			t.Fatal(err)
		}
		w.follow(st, id)
	}
	return w
}

// follow is a proxy that acknowledges.
func (w *world) follow(st store.Store, id string) {
	ctx := w.t.Context()
	go func() {
		_ = st.Watch(ctx, func(u store.Update) {
			for _, entries := range u.Buckets {
				for _, e := range entries {
					a := switching.Ack{Attempt: e.Attempt, Proxy: id, Incarnation: "i-" + id, Clean: w.clean.Load(), Claims: []string{"p-" + id}}
					switch {
					case e.SwitchID == "":
						continue
					case e.State == route.StatePrepared:
						a.Phase = switching.StatePrepared
					case e.State == route.StateFenced && !w.mute.Load():
						a.Phase = switching.StateFenced
						if !a.Clean {
							a.Why = "a leg was lost"
						}
					case e.State == route.StateActive && e.Cluster == "b", e.Drain != "" && e.State == route.StateDraining, e.State == route.StateActive && e.Epoch > 1:
						a.Phase = switching.StateEvicting
					default:
						continue
					}
					if err := st.PutAck(ctx, e.SwitchID, a); err != nil && ctx.Err() == nil && !errors.Is(err, store.ErrNotFound) {
						w.t.Errorf("ack: %v", err)
					}
				}
			}
		})
	}()
}

func (w *world) request(id string) switching.Record { return w.requestAt(id, 1) }

// requestAt asks for a switch whose flip writes that epoch.
func (w *world) requestAt(id string, epoch uint64) switching.Record {
	rec := switching.Record{ID: id, Rev: 1, Attempt: 1, Topic: base, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: epoch, Who: "alice", Started: time.Now()}
	if err := w.st.PutSwitch(w.t.Context(), rec); err != nil {
		w.t.Fatal(err)
	}
	return rec
}

func (w *world) controller(id string, st store.Store) *Controller {
	return New(Config{
		Store: st, ID: id, DefaultCluster: "a", Log: slog.New(slog.DiscardHandler),
		Open: func(context.Context, switching.Record) (Topic, error) { return w.topic, nil },
		Assign: func(context.Context, string, string) (map[string]string, int) {
			return map[string]string{base: "broker-1:6650"}, 0
		},
	})
}

// run runs a controller until the switch is over, and returns its record and the entry then.
func (w *world) run(c *Controller, id string) (switching.Record, route.Entry) {
	w.t.Helper()
	ctx, stop := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := c.Run(ctx); err != nil {
			w.t.Errorf("Run: %v", err)
		}
	}()
	defer func() {
		stop()
		<-ended
	}()
	rec, e := w.await(id)
	synctest.Wait() // what follows the last write of the record is done as well
	return rec, e
}

func (w *world) await(id string) (switching.Record, route.Entry) {
	w.t.Helper()
	for range 2000 {
		rec, err := w.st.Switch(w.t.Context(), id)
		if err != nil {
			w.t.Fatal(err)
		}
		if rec.State.Over() {
			e, _, err := w.st.Entry(w.t.Context(), base)
			if err != nil {
				w.t.Fatal(err)
			}
			return rec, e
		}
		time.Sleep(50 * time.Millisecond) // of the bubble
	}
	w.t.Fatal("the switch does not end")
	return switching.Record{}, route.Entry{}
}

// in runs a test in a bubble of its own time.
func in(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}
