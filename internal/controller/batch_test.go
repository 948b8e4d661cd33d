package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

const namespace = "acme/orders"

// field is a namespace on fake clusters, with proxies that acknowledge everything.
type field struct {
	t      *testing.T
	w      *world
	st     store.Store   // w.st, unless a test has another one
	sets   [][]string    // consumed together
	seated bool          // preflights judge the proxies of the roster
	stale  []store.Proxy // the roster as preflights know it, when it has changed since; guarded by mu

	mu      sync.Mutex      // guards what follows
	onA     []string        // what cluster a lists
	blocked map[string]bool // by topic
	fails   map[string]bool // topics whose cursors cannot be carried
	checks  map[string]int
	asked   []switching.CheckRequest
	rules   int // how often the rule was written
	floors  int // that are left beside it
	backlog int64
	late    []string // appear while the rule is being written
}

func newField(t *testing.T, topics int, members ...string) *field {
	f := &field{t: t, w: newWorld(t, members...), blocked: map[string]bool{}, fails: map[string]bool{}, checks: map[string]int{}}
	f.st = f.w.st
	for i := range topics {
		f.onA = append(f.onA, fmt.Sprintf("persistent://%s/t%03d", namespace, i))
	}
	return f
}

// do changes the field.
func (f *field) do(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// carriedTopic is a fakeTopic that may fail for one topic of many.
type carriedTopic struct {
	*fakeTopic
	f     *field
	topic string
}

func (c carriedTopic) Carry(context.Context) ([]switching.Carried, error) {
	fails := false
	c.f.do(func() { fails = c.f.fails[c.topic] })
	if fails {
		return nil, fmt.Errorf("cluster b refuses: %w", ErrHopeless)
	}
	time.Sleep(time.Millisecond) // of the bubble
	return nil, nil
}

func (f *field) controller(id string, st store.Store) *Controller {
	c := f.w.controller(id, st)
	c.cfg.Fleet = f
	c.cfg.Open = func(_ context.Context, rec switching.Record) (Topic, error) {
		return carriedTopic{f.w.topic, f, rec.Topic}, nil
	}
	c.cfg.Ground = &Ground{
		List: func(_ context.Context, cluster, ns string) (names []string, err error) {
			if cluster == "a" && ns == namespace {
				f.do(func() { names = slices.Clone(f.onA) })
			}
			return names, nil
		},
		Check: func(_ context.Context, r switching.CheckRequest) (switching.Preflight, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.checks[r.Topic]++
			f.asked = append(f.asked, r)
			p := switching.Preflight{Topic: r.Topic, From: r.From, To: r.To, Forecast: &switching.Forecast{HoldMillis: 5, Duplicates: 1}}
			var err error
			if s := (&survey{req: r, members: f.stale}); f.seated {
				if s.members == nil {
					s.members, err = f.w.st.Proxies(f.t.Context())
				}
				p.Add(s.judgeProxies()...)
			}
			if f.blocked[r.Topic] {
				p.Add(switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "there is none", Remedy: "configure it"})
			}
			return p, err
		},
		Backlog: func(context.Context, string, string, string) (n int64, err error) {
			f.do(func() { n = f.backlog })
			return n, nil
		},
	}
	return c
}

func (f *field) HandleFacts(_ context.Context, topics []string) (map[string]switching.HandleFacts, error) {
	facts := map[string]switching.HandleFacts{}
	for _, t := range topics {
		facts[t] = switching.HandleFacts{Producers: 1}
	}
	return facts, nil
}

func (f *field) Together(context.Context, string) ([][]string, error) { return f.sets, nil }

// RuleNamespace does without guards.
func (f *field) RuleNamespace(ctx context.Context, b switching.Batch) (uint64, int, int, error) {
	f.do(func() {
		f.rules++
		f.onA = append(f.onA, f.late...)
	})
	entries, err := f.w.st.Entries(ctx)
	if err != nil {
		return 0, 0, 0, err
	}
	rule := route.Rule{Scope: b.Namespace, Cluster: b.To, Epoch: 1}
	if err := f.w.st.Apply(ctx, store.Change{Rules: []store.RuleChange{{Scope: b.Namespace, After: &rule}}}); err != nil {
		return 0, 0, 0, err
	}
	for _, e := range entries {
		if err := f.w.st.Apply(ctx, store.Change{Entries: []store.EntryChange{{Topic: e.Topic, Before: &e}}}); err != nil {
			return 0, 0, 0, err
		}
	}
	return rule.Epoch, len(entries), f.floors, nil
}

// start writes a batch of the whole namespace down as the control API does.
func (f *field) start(id string, c *Controller, change func(*switching.Batch)) switching.Batch {
	f.t.Helper()
	must := func(err error) {
		f.t.Helper()
		if err != nil {
			f.t.Fatal(err)
		}
	}
	var plan switching.BatchPlan
	var err error
	must(insist(f.t.Context(), func() error {
		plan, err = c.PlanBatch(f.t.Context(), switching.BatchRequest{Namespace: namespace, To: "b"})
		return err
	}))
	b := switching.Batch{
		ID: id, Rev: 1, From: plan.From, To: "b", Mode: switching.ModePlanned, State: switching.BatchNew, Started: time.Now(), Warnings: plan.Warnings, Namespace: namespace,
		Limits: switching.BatchLimits{Waves: switching.DefaultWaves(), Parallel: 4, MaxFailed: 0.05, MaxHoldMillis: 5000, MaxBacklog: 1000, OnBlocked: switching.StopOnBlocked},
	}
	b.Ends, err = switching.WaveEnds(b.Limits.Waves, len(plan.Items))
	must(err)
	b.Ends = switching.JoinWaves(b.Ends, plan.Items)
	if change != nil {
		change(&b)
	}
	put := func(do func(ctx context.Context) error) {
		f.t.Helper()
		must(insist(f.t.Context(), func() error { return do(f.t.Context()) }))
	}
	put(func(ctx context.Context) error { return f.st.PutBatch(ctx, b) })
	parts := switching.SplitBatch(plan.Items, 0)
	for _, p := range parts {
		p.Rev = 1
		put(func(ctx context.Context) error { return f.st.PutBatchPart(ctx, id, p) })
	}
	b.Rev, b.State, b.Parts = 2, switching.BatchChecking, len(parts)
	put(func(ctx context.Context) error { return f.st.PutBatch(ctx, b) })
	return b
}

// lead runs a leader until stop.
func (f *field) lead(c *Controller) (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := c.Run(ctx); err != nil {
			f.t.Errorf("Run: %v", err)
		}
	})
	return func() { cancel(); wg.Wait() }
}

func (f *field) await(id, what string, is func(switching.Batch) bool) (b switching.Batch) {
	f.t.Helper()
	for range 20_000 {
		var err error
		if b, err = f.w.st.Batch(f.t.Context(), id); err != nil {
			f.t.Fatal(err)
		}
		if is(b) {
			return b
		}
		time.Sleep(50 * time.Millisecond) // of the bubble
	}
	f.t.Fatalf("the batch never is %s: %+v, pause %+v", what, b, b.Pause)
	return b
}

func isOver(b switching.Batch) bool   { return b.State.Over() }
func isPaused(b switching.Batch) bool { return b.Pause != nil }

// change is what an operator writes.
func (f *field) change(id string, change func(*switching.Batch)) {
	f.t.Helper()
	for {
		b, err := f.w.st.Batch(f.t.Context(), id)
		if err != nil {
			f.t.Fatal(err)
		}
		b.Rev++
		change(&b)
		if err = f.w.st.PutBatch(f.t.Context(), b); err == nil {
			return
		} else if !errors.Is(err, store.ErrConflict) {
			f.t.Fatal(err)
		}
	}
}

func resume(b *switching.Batch) { b.Pause, b.Resumed = nil, b.Resumed+1 }

// expectFlips wants n topics to have moved to b, each once, by the history of the map.
func (f *field) expectFlips(n int) {
	f.t.Helper()
	history, err := f.w.st.History(f.t.Context(), 10_000)
	if err != nil {
		f.t.Fatal(err)
	}
	flips := map[string]int{}
	for _, h := range history {
		for _, e := range h.Entries {
			if e.Before != nil && e.After != nil && e.Before.Cluster == "a" && e.After.Cluster == "b" {
				flips[e.Topic]++
			}
		}
	}
	if len(flips) != n {
		f.t.Errorf("%d topics have moved, want %d", len(flips), n)
	}
	for topic, n := range flips {
		if n != 1 {
			f.t.Errorf("%s has moved %d times", topic, n)
		}
	}
}

func TestANamespaceMovesTopicByTopicAndEndsAsOneRule(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 60, "p1", "p2")
		f.late, f.floors = []string{"persistent://acme/orders/late"}, 7
		f.sets = [][]string{{f.onA[1], f.onA[50]}}
		c := f.controller("p1", f.w.st)
		defer f.lead(c)()
		f.start("sw-1", c, nil)
		fresh := "persistent://acme/orders/fresh"
		f.await("sw-1", "on its way", func(b switching.Batch) bool { return b.Count.Moved > 0 })
		f.do(func() { f.onA = append(f.onA, fresh) })
		b := f.await("sw-1", "over", isOver)
		if b.State != switching.BatchDone || b.Count.Moved != 61 || b.Rule != 1 || b.Removed != 61 || !strings.Contains(b.Note, "persistent://acme/orders/late") || strings.Contains(b.Note, "fresh") || !strings.Contains(b.Note, "; 7 topics have moved more often than the rule") || b.Forecast.Duplicates != 60 {
			t.Errorf("%+v", b)
		}
		f.expectFlips(61)
		entries, err := f.w.st.Entries(t.Context())
		if err != nil || len(entries) != 0 || f.rules != 1 {
			t.Errorf("%d entries are left, the rule was written %d times (%v)", len(entries), f.rules, err)
		}
		parts, err := f.w.st.BatchParts(t.Context(), "sw-1")
		if err != nil || len(parts) != 2 || len(parts[1].Items) != 1 || parts[1].Items[0].Topic != fresh {
			t.Errorf("%v: %+v", err, parts)
		}
		for _, p := range parts {
			for _, it := range p.Items {
				if it.State != switching.ItemMoved {
					t.Errorf("%+v", it)
				}
			}
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.checks[f.onA[3]] != 2 {
			t.Errorf("a topic has had %d preflights, want one at the start and one when its turn came", f.checks[f.onA[3]])
		}
		if r := f.asked[0]; len(r.With) != 60 || r.Handles.Producers != 1 || !r.Batch || r.From != "a" {
			t.Errorf("a preflight was asked for %+v", r)
		}
	})
}

// A leader that dies is followed by another one, which may know less than has happened; no topic moves twice.
func TestABatchOutlivesItsLeaders(t *testing.T) {
	for seed := range uint64(5) {
		in(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			f := newField(t, 50, "p1")
			f.start("sw-1", f.controller("p1", f.w.st), nil)
			for round := 1; ; round++ {
				stop := f.lead(f.controller(fmt.Sprintf("p%d", round), f.w.st.Join()))
				time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond) // of the bubble
				stop()
				b, err := f.w.st.Batch(t.Context(), "sw-1")
				if err != nil || round > 400 {
					t.Fatalf("after %d leaders: %+v, %v", round, b, err)
				}
				if b.State.Over() {
					if b.State != switching.BatchDone || b.Count.Moved != 50 || round < 3 {
						t.Errorf("after %d leaders: %+v", round, b)
					}
					break
				}
			}
			f.expectFlips(50)
		})
	}
}

func TestABatchPausesForWhatIsWrongAndGoesOnWhenSomebodySaysSo(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 30, "p1")
		c := f.controller("p1", f.w.st)
		defer f.lead(c)()
		bad := f.onA[7]
		f.blocked[bad] = true
		f.start("sw-1", c, nil)
		b := f.await("sw-1", "paused", isPaused)
		if b.Pause.Gate != switching.GatePreflight || !strings.Contains(b.Pause.Why, bad+": replication: there is none; configure it") || b.Count.Moved != 0 {
			t.Errorf("%+v", b.Pause)
		}
		time.Sleep(time.Hour) // of the bubble: it never goes on by itself
		f.expectFlips(0)

		f.do(func() { // it is mended, but others cannot be carried
			delete(f.blocked, bad)
			f.fails[f.onA[7]], f.fails[f.onA[9]], f.fails[f.onA[11]] = true, true, true
		})
		f.change("sw-1", resume)
		b = f.await("sw-1", "paused by failures", isPaused)
		if b.Pause.Gate != switching.GateFailed || b.Count.Failed == 0 {
			t.Errorf("%+v, %+v", b.Pause, b.Count)
		}
		f.do(func() { clear(f.fails); f.backlog = 1001 })
		f.change("sw-1", resume)
		if b = f.await("sw-1", "paused by replication", isPaused); b.Pause.Gate != switching.GateBacklog {
			t.Errorf("%+v", b.Pause)
		}
		f.do(func() { f.backlog = 0 })
		f.change("sw-1", resume)
		b = f.await("sw-1", "over", isOver)
		if b.State != switching.BatchDone || b.Count.Moved != 30 || b.Count.Failed != 0 {
			t.Errorf("%+v", b)
		}
		f.expectFlips(30)
	})
}

// A proxy that was killed keeps every topic from moving until it is back, and nobody has to get up for it; a topic that is blocked for something else stops the batch as ever.
func TestABatchGoesOnWhenAKilledProxyIsBack(t *testing.T) {
	for _, other := range []bool{false, true} {
		in(t, func(t *testing.T) {
			f := newField(t, 20, "p1")
			f.seated = true
			p2 := f.w.st.Join()
			back := func() {
				if err := p2.Register(t.Context(), store.Proxy{ID: "p2", Incarnation: "i-p2", Clusters: []string{"a", "b"}}); err != nil {
					t.Fatal(err)
				}
			}
			back()
			f.w.follow(p2, "p2")
			c := f.controller("p1", f.w.st)
			defer f.lead(c)()
			f.start("sw-1", c, func(b *switching.Batch) { b.Limits.Pace, b.Limits.Parallel = 1, 1 })
			f.await("sw-1", "on its way", func(b switching.Batch) bool { return b.Count.Moved > 3 })
			time.Sleep(500 * time.Millisecond) // of the bubble: between two switches
			p2.Expire()
			b := f.await("sw-1", "waiting", func(b switching.Batch) bool { return b.Note != "" })
			if !strings.Contains(b.Note, "waits: proxies: proxy p2 is on the roster and not connected") {
				t.Errorf("it notes %q", b.Note)
			}
			moved := b.Count.Moved
			f.do(func() {
				for _, topic := range f.onA {
					f.blocked[topic] = other
				}
			})
			time.Sleep(time.Minute) // of the bubble
			if b = f.await("sw-1", "there", func(switching.Batch) bool { return true }); b.Count.Moved != moved || b.Count.Blocked > 1 || (b.Pause != nil) != other {
				t.Errorf("while it waits: %+v", b)
			}
			f.do(func() { clear(f.blocked) })
			back()
			if other {
				f.change("sw-1", resume)
			}
			if b = f.await("sw-1", "over", isOver); b.State != switching.BatchDone || b.Count.Moved != 20 || b.Count.Failed+b.Count.Blocked != 0 {
				t.Errorf("%+v", b)
			}
			f.expectFlips(20)
		})
	}
}

// What a preflight has seen decides, and not who is there when it ends: a proxy that came back meanwhile is no reason to pause.
func TestABatchWaitsAlsoForAProxyThatIsBackAlready(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 10, "p1")
		f.seated = true
		c := f.controller("p1", f.w.st)
		defer f.lead(c)()
		f.start("sw-1", c, func(b *switching.Batch) { b.Limits.Pace, b.Limits.Parallel = 1, 1 })
		f.await("sw-1", "on its way", func(b switching.Batch) bool { return b.Count.Moved > 3 })
		f.do(func() { f.stale = []store.Proxy{{ID: "p2", Clusters: []string{"a", "b"}}} })
		if b := f.await("sw-1", "waiting", func(b switching.Batch) bool { return b.Note != "" || b.Pause != nil }); b.Pause != nil {
			t.Errorf("it pauses: %+v", b.Pause)
		}
		f.do(func() { f.stale = nil })
		if b := f.await("sw-1", "over", func(b switching.Batch) bool { return b.State.Over() || b.Pause != nil }); b.State != switching.BatchDone || b.Count.Moved != 10 {
			t.Errorf("%+v", b)
		}
	})
}

func TestAnAbortedBatchGivesBackWhatHasBegun(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 30, "p1")
		c := f.controller("p1", f.w.st)
		defer f.lead(c)()
		f.w.mute.Store(true) // topics stay fenced
		f.start("sw-1", c, func(b *switching.Batch) { b.Ends = []int{30} })
		f.await("sw-1", "moving", func(b switching.Batch) bool { return b.State == switching.BatchMoving })
		time.Sleep(time.Second) // of the bubble
		f.change("sw-1", func(b *switching.Batch) { b.Abort = true })
		began := time.Now()
		b := f.await("sw-1", "over", isOver)
		if b.State != switching.BatchAborted || b.Count.Moved != 0 || b.Count.Failed != 4 || time.Since(began) > switching.FenceLimit/2 {
			t.Errorf("after %v: %+v", time.Since(began), b)
		}
		if entries, err := f.w.st.Entries(t.Context()); err != nil || len(entries) != 0 {
			t.Errorf("%+v, %v", entries, err)
		}
		f.w.mute.Store(false)
		f.change("sw-1", func(b *switching.Batch) { resume(b); b.State = switching.BatchMoving })
		if b = f.await("sw-1", "over", isOver); b.State != switching.BatchDone || b.Count.Moved != 30 {
			t.Errorf("%+v", b)
		}
		f.expectFlips(30)
	})
}

// A leader dies while topics are fenced, and the batch is given up before the next one comes: that one gives back what was begun, and says so.
func TestWhatADeadLeaderHasBegunIsGivenBackByAnAbort(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 30, "p1")
		c := f.controller("p1", f.w.st)
		stop := f.lead(c)
		f.w.mute.Store(true) // topics stay fenced
		f.start("sw-1", c, func(b *switching.Batch) { b.Ends = []int{30} })
		f.await("sw-1", "moving", func(b switching.Batch) bool { return b.State == switching.BatchMoving })
		time.Sleep(time.Second) // of the bubble
		stop()
		f.change("sw-1", func(b *switching.Batch) { b.Abort = true })
		defer f.lead(f.controller("p2", f.w.st.Join()))()
		b := f.await("sw-1", "over", isOver)
		if b.State != switching.BatchAborted || b.Count.Moved != 0 || b.Count.Failed != 4 {
			t.Errorf("%+v", b)
		}
		if entries, err := f.w.st.Entries(t.Context()); err != nil || len(entries) != 0 {
			t.Errorf("%+v, %v", entries, err)
		}
	})
}

// SW-16: a topic that somebody else moves is left to him, by name.
func TestATopicInAnotherSwitchIsLeftToIt(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 5, "p1")
		c := f.controller("p1", f.w.st)
		theirs := route.Entry{Topic: f.onA[2], Cluster: "a", State: route.StatePrepared, SwitchID: "sw-theirs", Attempt: 1}
		rec := switching.Record{ID: "sw-theirs", Rev: 1, Attempt: 1, Topic: f.onA[2], From: "a", To: "c", Mode: "other", State: switching.StatePrepared}
		if err := f.w.st.Apply(t.Context(), store.Change{Switch: &rec, Entries: []store.EntryChange{{Topic: theirs.Topic, After: &theirs}}}); err != nil {
			t.Fatal(err)
		}
		f.start("sw-1", c, func(b *switching.Batch) { b.Limits.OnBlocked = switching.SkipOnBlocked })
		defer f.lead(c)()
		b := f.await("sw-1", "over", isOver)
		parts, err := f.w.st.BatchParts(t.Context(), "sw-1")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(parts[0].Items, func(it switching.BatchItem) bool { return it.Topic == theirs.Topic })
		if b.State != switching.BatchIncomplete || b.Count.Moved != 4 || !strings.Contains(parts[0].Items[i].Note, "switch sw-theirs is moving it") {
			t.Errorf("%+v; %+v", b, parts[0].Items[i])
		}
		f.expectFlips(4)
	})
}

func TestABatchWhoseTopicsWereNotAllWrittenDownIsGivenUp(t *testing.T) {
	in(t, func(t *testing.T) {
		f := newField(t, 5, "p1")
		if err := f.w.st.PutBatch(t.Context(), switching.Batch{ID: "sw-1", Rev: 1, State: switching.BatchNew, Started: time.Now()}); err != nil {
			t.Fatal(err)
		}
		defer f.lead(f.controller("p1", f.w.st))()
		b := f.await("sw-1", "over", isOver)
		if b.State != switching.BatchAborted || !strings.Contains(b.Note, "ask for it again") || b.Ended.Sub(b.Started) < newTimeout {
			t.Errorf("%+v", b)
		}
	})
}

func TestARequestIsWhatTheMapAndTheClusterSayOfANamespace(t *testing.T) {
	f := newField(t, 10, "p1")
	c := f.controller("p1", f.w.st)
	dlq := f.onA[4] + "-billing-DLQ"
	f.onA = append(f.onA, dlq, "persistent://acme/orders/left-over")
	for topic, cluster := range map[string]string{"persistent://acme/orders/left-over": "b", "persistent://acme/orders/third": "c", f.onA[0]: "b", "persistent://acme/other/x": "a"} {
		e := route.Entry{Topic: topic, Cluster: cluster, Epoch: 1}
		if err := f.w.st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: topic, After: &e}}}); err != nil {
			t.Fatal(err)
		}
	}
	plan := func(r switching.BatchRequest) (names []string, p switching.BatchPlan) {
		t.Helper()
		r.To = "b"
		p, err := c.PlanBatch(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, it := range p.Items {
			names = append(names, it.Topic)
		}
		return names, p
	}
	names, p := plan(switching.BatchRequest{Namespace: namespace})
	want := append(slices.Clone(f.onA[1:11]), "persistent://acme/orders/third")
	if !slices.Equal(slices.Sorted(slices.Values(names)), slices.Sorted(slices.Values(want))) || len(p.There) != 2 || !slices.Equal(p.From, []string{"a", "c"}) || len(p.Warnings) != 0 {
		t.Errorf("%v; %+v", names, p)
	}
	if i := slices.Index(names, dlq); !p.Items[i].Joined || names[i-1] != f.onA[4] {
		t.Errorf("the DLQ is not behind its topic: %+v", p.Items)
	}
	if names, _ = plan(switching.BatchRequest{Namespace: namespace, Prefix: "persistent://acme/orders/t00"}); len(names) != 10 {
		t.Errorf("by prefix: %v", names)
	}
	names, p = plan(switching.BatchRequest{Topics: []string{f.onA[4], f.onA[0], f.onA[4]}})
	if !slices.Equal(names, f.onA[4:5]) || len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "-billing-DLQ is not in the batch") {
		t.Errorf("by name: %v, %+v", names, p)
	}
	half, _ := plan(switching.BatchRequest{Namespace: namespace, Percent: 50})
	if len(half) == 0 || len(half) == len(want) || slices.ContainsFunc(half, func(name string) bool { return !slices.Contains(want, name) }) {
		t.Errorf("half of them: %v", half)
	}
}
