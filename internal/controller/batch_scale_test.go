package controller

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/zk"
)

// A batch is small in ordinary tests; docs/adr/009-batches.md reports 2,000 topics.
var (
	scaleTopics   = flag.Int("batch.topics", 150, "topics of the batches that are measured")
	scaleParallel = flag.Int("batch.parallel", 16, "their switches at once")
)

// answer is a proxy that acknowledges what changes, each once.
func answer(ctx context.Context, t *testing.T, st store.Store, id string) {
	acked := map[route.Entry]bool{}
	work := make(chan route.Entry, 10_000)
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			for e := range work {
				a := switching.Ack{Attempt: e.Attempt, Proxy: id, Incarnation: "i-" + id, Clean: true, Phase: switching.StateEvicting}
				switch e.State {
				case route.StatePrepared:
					a.Phase = switching.StatePrepared
				case route.StateFenced:
					a.Phase = switching.StateFenced
				}
				if err := insist(ctx, func() error { return st.PutAck(ctx, e.SwitchID, a) }); err != nil && ctx.Err() == nil {
					t.Errorf("ack: %v", err)
				}
			}
		})
	}
	defer group.Wait()
	defer close(work)
	_ = st.Watch(ctx, func(u store.Update) {
		for _, entries := range u.Buckets {
			for _, e := range entries {
				if !acked[e] && e.SwitchID != "" {
					acked[e] = true
					work <- e
				}
			}
		}
	})
}

// insist repeats what the map store could not do in time, as proxies do: on a busy machine the first calls of a server may need longer than they have. What a call that was not
// answered has done is a conflict for the next one.
func insist(ctx context.Context, do func() error) error {
	err := do()
	for errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		if ctx.Err() != nil {
			return err
		}
		if err = do(); errors.Is(err, store.ErrConflict) {
			return nil
		}
	}
	return err
}

// measureBatch moves topics of a namespace by a leader and three proxies, each on a store of its own, and tells how long it took.
func measureBatch(t *testing.T, open func() store.Store) (took time.Duration, leader store.Store) {
	f := newField(t, *scaleTopics)
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	for i := range 3 {
		id, st := fmt.Sprintf("p%d", i), open()
		group.Go(func() { answer(ctx, t, st, id) })
		if err := insist(ctx, func() error { return st.Register(ctx, store.Proxy{ID: id, Incarnation: "i-" + id}) }); err != nil {
			t.Fatal(err)
		}
	}
	leader = open()
	c := f.controller("p0", leader)
	c.cfg.Log = slog.New(slog.DiscardHandler)
	c.cfg.Open = func(context.Context, switching.Record) (Topic, error) { return quickTopic{}, nil }
	group.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	f.st = leader
	f.start("sw-1", c, func(b *switching.Batch) {
		b.Limits.Parallel, b.Namespace, b.Limits.MaxHoldMillis = *scaleParallel, "", 0 // a busy machine is no reason to pause
	})
	began := time.Now()
	for {
		b, err := leader.Batch(ctx, "sw-1")
		if err != nil && !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
		if b.State.Over() || b.Pause != nil || time.Since(began) > 10*time.Minute {
			if b.State != switching.BatchDone || b.Count.Moved != *scaleTopics {
				t.Fatalf("%+v, %+v", b, b.Pause)
			}
			t.Logf("hold p50 %.0f ms, p99 %.0f ms", b.HoldP50, b.HoldP99)
			return time.Since(began), leader
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// quickTopic are clusters that answer at once.
type quickTopic struct{ Topic }

func (quickTopic) Warm(context.Context) error                         { return nil }
func (quickTopic) Tail(context.Context) (string, error)               { return "t=7:41", nil }
func (quickTopic) Replicated(context.Context, string) (string, error) { return "", nil }
func (quickTopic) Carry(context.Context) ([]switching.Carried, error) { return nil, nil }
func (quickTopic) ReadBack(context.Context) (string, error)           { return "", nil }
func (quickTopic) Since(context.Context, string) (string, []switching.Publisher, error) {
	return "", nil, nil
}
func (quickTopic) Verify(context.Context, string) (Verified, error) { return Verified{}, nil }
func (quickTopic) Close()                                           {}

func TestABatchInMemory(t *testing.T) {
	st := store.NewMemory()
	took, _ := measureBatch(t, func() store.Store { return st.Join() })
	t.Logf("%d topics, %d at once: %v, %.1f ms a topic", *scaleTopics, *scaleParallel, took.Round(time.Millisecond), took.Seconds()*1000/float64(*scaleTopics))
}

// What a topic costs the ensemble of the map is a promise, and checked; times are printed.
func TestABatchOnZooKeeper(t *testing.T) {
	server := zktest.Start(t)
	var all []*zk.Store
	took, leader := measureBatch(t, func() store.Store {
		st, err := zk.Open(t.Context(), zk.Config{Servers: server.Addr(), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { st.Close() })
		all = append(all, st)
		return st
	})
	ops := func(st *zk.Store) (sum float64, text string) {
		for name, n := range st.Operations() {
			sum += float64(n)
			text += fmt.Sprintf(" %s %.1f", name, float64(n)/float64(*scaleTopics))
		}
		return sum / float64(*scaleTopics), text
	}
	each, text := ops(leader.(*zk.Store))
	t.Logf("%d topics, %d at once: %v, %.1f ms a topic", *scaleTopics, *scaleParallel, took.Round(time.Millisecond), took.Seconds()*1000/float64(*scaleTopics))
	t.Logf("operations of the leader for each topic: %.0f:%s", each, text)
	proxy, text := ops(all[0])
	t.Logf("operations of each proxy for each topic: %.0f:%s", proxy, text)
	if each > maxLeaderOperations {
		t.Errorf("a topic costs the leader %.0f operations, want at most %d", each, maxLeaderOperations)
	}
}

// maxLeaderOperations is what the leader may spend on one topic, whatever the size of the batch.
const maxLeaderOperations = 400
