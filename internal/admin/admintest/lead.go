package admintest

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/controller"
	"pointsman/store"
)

// Topic is both clusters of a planned switch, as they should be. A test may have one of its works fail, by the name that receipts have for it.
type Topic struct {
	mu    sync.Mutex
	fail  string // guarded by mu
	hangs bool   // guarded by mu: rather than fail, the work has no answer
	left  int64  // guarded by mu
}

// Fail has a work fail from now on; "" has none.
func (t *Topic) Fail(work string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fail, t.hangs = work, false
}

// Left says what subscription s has left on the old cluster of every drain from now on.
func (t *Topic) Left(entries int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left = entries
}

// Hang has a work not return before its context ends.
func (t *Topic) Hang(work string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fail, t.hangs = work, true
}

func (t *Topic) done(ctx context.Context, work string) error {
	t.mu.Lock()
	fails, hangs := t.fail == work, t.hangs
	t.mu.Unlock()
	if !fails {
		return nil
	}
	if hangs {
		<-ctx.Done()
	}
	return errors.New("cluster a: " + work + ": no answer")
}

// Warm, Evict, Tail, Replicated, Carry, ReadBack, Since, Verify and Close are controller.Topic.

func (t *Topic) Warm(ctx context.Context) error  { return t.done(ctx, "warm up") }
func (t *Topic) Evict(ctx context.Context) error { return t.done(ctx, "evict") }
func (t *Topic) Tail(ctx context.Context) (string, error) {
	return "t=7:41", t.done(ctx, "tail")
}

// Replicated and Carry take a moment, so that the topic is held for some time.
func (t *Topic) Replicated(ctx context.Context, _ string) (string, error) {
	moment(ctx)
	return "", t.done(ctx, "replicated")
}
func (t *Topic) Carry(ctx context.Context) ([]switching.Carried, error) {
	moment(ctx)
	return []switching.Carried{{Topic: "t", Subscription: "s", How: "source position", First: "9:42", Holes: 2, Backlog: 7, Unacked: 3}}, t.done(ctx, "carry")
}
func (t *Topic) ReadBack(ctx context.Context) (string, error) { return "", t.done(ctx, "read back") }
func (t *Topic) Since(ctx context.Context, _ string) (string, []switching.Publisher, error) {
	return "", nil, t.done(ctx, "tail again")
}
func (t *Topic) Verify(ctx context.Context, _ string) (controller.Verified, error) {
	return controller.Verified{Tail: map[string]string{"t": "7:41"}, First: map[string]string{"t": "9:41"}, Text: "the last 100 messages are there"}, t.done(ctx, "verify")
}
func (t *Topic) Close() {}

// Drained, Returnable and CopyBack make it a controller.Drainer.

func (t *Topic) Drained(ctx context.Context) (switching.Drained, []switching.Left, error) {
	t.mu.Lock()
	n := t.left
	t.mu.Unlock()
	return switching.Drained{Subs: []switching.SubFact{{Name: "s", Backlog: n}}}, []switching.Left{{Subscription: "s", Backlog: n}}, t.done(ctx, "drained")
}
func (t *Topic) Returnable(ctx context.Context) (string, error) {
	return "", t.done(ctx, "returnable")
}
func (t *Topic) CopyBack(ctx context.Context, _ route.Drain, _ bool) (copied, left int64, err error) {
	return 0, 0, t.done(ctx, "copy")
}

// PassOver is the last work of a way back.
func (t *Topic) PassOver(ctx context.Context, _ func() error) error { return t.done(ctx, "pass over") }

func moment(ctx context.Context) {
	select {
	case <-time.After(time.Millisecond):
	case <-ctx.Done():
	}
}

// Ground is what batches ask of the clusters: each has the topics that listed names, and every preflight finds all fine, unless check says otherwise.
func Ground(listed map[string][]string, check func(switching.CheckRequest, *switching.Preflight)) *controller.Ground {
	return &controller.Ground{
		List: func(_ context.Context, cluster, namespace string) ([]string, error) {
			return slices.DeleteFunc(slices.Clone(listed[cluster]), func(name string) bool { return !strings.HasPrefix(name, "persistent://"+namespace+"/") }), nil
		},
		Check: func(_ context.Context, r switching.CheckRequest) (switching.Preflight, error) {
			p := switching.Preflight{Topic: r.Topic, From: r.From, To: r.To, Forecast: &switching.Forecast{HoldMillis: 180, Duplicates: 2, Producers: r.Handles.Producers, Consumers: r.Handles.Consumers}}
			if check != nil {
				check(r, &p)
			}
			return p, nil
		},
		Backlog: func(context.Context, string, string, string) (int64, error) { return 0, nil },
	}
}

// Plan is an admin.Config.Plan over the topics that clusters have.
func Plan(st store.Store, listed map[string][]string) func(context.Context, switching.BatchRequest) (switching.BatchPlan, error) {
	return controller.New(controller.Config{Store: st, DefaultCluster: "a", Log: slog.New(slog.DiscardHandler), Ground: Ground(listed, nil)}).PlanBatch
}

// Lead drives planned switches on a store until the test ends, or stop is called; change, when not nil, alters its configuration.
func Lead(t testing.TB, st store.Store, id string, topic *Topic, change ...func(*controller.Config)) (c *controller.Controller, stop func()) {
	t.Helper()
	cfg := controller.Config{
		Store: st, ID: id, DefaultCluster: "a", Log: slog.New(slog.DiscardHandler),
		Open: func(context.Context, switching.Record) (controller.Topic, error) { return topic, nil },
		Assign: func(_ context.Context, cluster, base string) (map[string]string, int) {
			return map[string]string{base: "broker-0." + cluster + ":6650"}, 0
		},
		Ground: Ground(nil, nil),
	}
	for _, f := range change {
		f(&cfg)
	}
	c = controller.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Errorf("leader %s: %v", id, err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return c, stop
}
