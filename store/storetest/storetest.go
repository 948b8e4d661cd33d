// Package storetest is the suite that every store passes: the promises of store.Store, tried from outside. Tests of
// package store and of package zk call Run; nothing else may import it.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// Map is one empty map that a test may open.
type Map struct {
	// Open makes a handle to the map, as another process would. The suite closes it.
	Open func(t *testing.T) store.Store
	// Single: only one handle at a time can be open.
	Single bool
}

// patience bounds every wait of the suite.
const patience = 30 * time.Second

// Run tries everything on fresh maps that begin makes.
func Run(t *testing.T, begin func(t *testing.T) Map) {
	for name, test := range map[string]func(*testing.T, *fixture){
		"a watch first names every bucket and the rules":               testFirstUpdates,
		"a watch delivers changes of entries and rules":                testWatchChanges,
		"a watch never goes back and ends where the store is":          testWatchMonotonic,
		"ending a watch twice touches no other":                        testWatchEnds,
		"what a watch delivers is the receiver's to keep":              testWatchOwnership,
		"an entry that is not as expected is a conflict, nothing else": testConflict,
		"a change happens as a whole or not at all":                    testAtomic,
		"writers on one topic never overwrite each other":              testCompareAndSet,
		"neighbours in a bucket are no conflict":                       testNeighbours,
		"the history explains every state of the map":                  testHistoryExplains,
		"any sequence of changes is as in a plain map":                 testModel,
		"a change of MaxChange entries is written, one more is not":    testMaxChange,
		"the history is newest first and complete":                     testHistory,
		"switches are created with their change and end once":          testSwitches,
		"acks are kept for each proxy and incarnation":                 testAcks,
		"a registration is announced, replaced and ended":              testRegister,
		"the tag key is made once":                                     testTagKey,
		"a context that has ended ends the operation":                  testContext,
		"a closed store ends its watches and refuses the rest":         testClose,
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{t: t, m: begin(t)}
			test(t, f)
		})
	}
}

// fixture opens handles to one map.
type fixture struct {
	t     *testing.T
	m     Map
	first store.Store
}

// open makes another handle, or hands out the only one.
func (f *fixture) open() store.Store {
	f.t.Helper()
	if f.m.Single && f.first != nil {
		return f.first
	}
	s := f.m.Open(f.t)
	f.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.t.Errorf("Close: %v", err)
		}
	})
	if f.first == nil {
		f.first = s
	}
	return s
}

func (f *fixture) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	f.t.Cleanup(cancel)
	return ctx
}

// View is a map built from the updates of a watch.
type View struct {
	mu      sync.Mutex
	changed *sync.Cond
	buckets map[int][]route.Entry
	rules   []route.Rule
	bad     map[int]error
	synced  bool
	updates int
	fault   string
	epochs  map[string]uint64
	known   store.Known
	got     map[int]bool // buckets that were delivered
	done    chan error
	cancel  context.CancelFunc
}

// Watch starts a watch on s that ends with the test, and checks on the way that no epoch of an entry that is there
// goes back.
func Watch(t *testing.T, s store.Store) *View {
	t.Helper()
	v := &View{buckets: map[int][]route.Entry{}, epochs: map[string]uint64{}, known: store.Known{Versions: map[int]string{}}}
	v.start(t, s.Watch)
	return v
}

// Resume is Watch with what an earlier view, which was stopped, has seen.
func Resume(t *testing.T, s store.Resumer, before *View) *View {
	t.Helper()
	v := &View{buckets: maps.Clone(before.buckets), epochs: maps.Clone(before.epochs)}
	v.known = store.Known{Map: before.known.Map, Versions: maps.Clone(before.known.Versions)}
	known := store.Known{Map: v.known.Map, Versions: maps.Clone(v.known.Versions)}
	v.start(t, func(ctx context.Context, sink func(store.Update)) error { return s.Resume(ctx, known, sink) })
	return v
}

func (v *View) start(t *testing.T, watch func(context.Context, func(store.Update)) error) {
	v.bad, v.got, v.done = map[int]error{}, map[int]bool{}, make(chan error, 1)
	v.changed = sync.NewCond(&v.mu)
	ctx, cancel := context.WithCancel(context.Background())
	v.cancel = cancel
	go func() { v.done <- watch(ctx, v.take) }()
	t.Cleanup(func() {
		if v.cancel != nil {
			v.Stop(t)
		}
	})
}

// Stop ends the watch.
func (v *View) Stop(t *testing.T) {
	t.Helper()
	v.cancel()
	v.cancel = nil
	select {
	case err := <-v.done:
		if err != nil {
			t.Errorf("Watch: %v", err)
		}
	case <-time.After(patience):
		t.Error("Watch does not return after its context has ended")
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.fault != "" {
		t.Error(v.fault)
	}
}

func (v *View) take(u store.Update) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.updates++
	for i, b := range u.Buckets {
		for _, e := range b {
			if e.Epoch < v.epochs[e.Topic] {
				v.fault = fmt.Sprintf("the watch went back: %s had epoch %d, then %d", e.Topic, v.epochs[e.Topic], e.Epoch)
			}
			if route.Bucket(e.Topic) != i {
				v.fault = fmt.Sprintf("%s came in bucket %d", e.Topic, i)
			}
			v.epochs[e.Topic] = e.Epoch
		}
		v.buckets[i] = b
		v.got[i] = true
		delete(v.bad, i)
		delete(v.known.Versions, i)
	}
	for i, version := range u.Versions {
		v.known.Versions[i] = version
	}
	if u.Map != "" {
		v.known.Map = u.Map
	}
	for _, i := range u.Kept {
		if v.known.Versions[i] == "" || v.got[i] {
			v.fault = fmt.Sprintf("bucket %d is said to be kept, and is not known from before", i)
		}
		delete(v.bad, i)
	}
	if u.Rules != nil {
		v.rules = *u.Rules
		delete(v.bad, store.BadRules)
	}
	for i, err := range u.Bad {
		v.bad[i] = err
	}
	if v.synced && !u.Synced {
		v.fault = "Synced went back to false"
	}
	v.synced = u.Synced
	v.changed.Broadcast()
}

// Await waits until ok, which is called with the view locked, is true.
func (v *View) Await(t *testing.T, what string, ok func(v *View) bool) {
	t.Helper()
	timer := time.AfterFunc(patience, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.fault = "gave up waiting: " + what
		v.changed.Broadcast()
	})
	defer timer.Stop()
	v.mu.Lock()
	defer v.mu.Unlock()
	for !ok(v) && v.fault == "" {
		v.changed.Wait()
	}
	if v.fault != "" {
		fault := v.fault
		t.Fatalf("%s: %s (entries %d, rules %v, bad %d, synced %v, updates %d)", what, fault, len(v.entries()), v.rules, len(v.bad), v.synced, v.updates)
	}
}

// AwaitSynced waits for the whole map.
func (v *View) AwaitSynced(t *testing.T) {
	t.Helper()
	v.Await(t, "the whole map", func(v *View) bool { return v.synced })
}

// AwaitEntry waits until the view holds exactly e for its topic.
func (v *View) AwaitEntry(t *testing.T, e route.Entry) {
	t.Helper()
	v.Await(t, fmt.Sprintf("entry %+v", e), func(v *View) bool { return slices.Contains(v.buckets[route.Bucket(e.Topic)], e) })
}

// AwaitMap waits until the view holds exactly these.
func (v *View) AwaitMap(t *testing.T, entries []route.Entry, rules []route.Rule) {
	t.Helper()
	entries, rules = sortEntries(entries), sortRules(rules)
	v.Await(t, "the map to be as the store says", func(v *View) bool {
		return slices.Equal(v.entries(), entries) && slices.Equal(sortRules(v.rules), rules)
	})
}

// Entries is the number of entries, Bad the fault of a bucket, Buckets the number of buckets that were named, Got tells
// whether a bucket was delivered, Known is what a Resume may be told. Within Await's function, or after Stop.
func (v *View) Entries() int        { return len(v.entries()) }
func (v *View) Bad(index int) error { return v.bad[index] }
func (v *View) Buckets() int        { return len(v.buckets) }
func (v *View) Rules() []route.Rule { return v.rules }
func (v *View) Got(index int) bool  { return v.got[index] }
func (v *View) Known() store.Known  { return v.known }

func (v *View) entries() []route.Entry {
	var all []route.Entry
	for _, b := range v.buckets {
		all = append(all, b...)
	}
	return sortEntries(all)
}

func sortEntries(entries []route.Entry) []route.Entry {
	entries = slices.Clone(entries)
	slices.SortFunc(entries, func(a, b route.Entry) int { return strings.Compare(a.Topic, b.Topic) })
	return entries
}

func sortRules(rules []route.Rule) []route.Rule {
	rules = slices.Clone(rules)
	slices.SortFunc(rules, func(a, b route.Rule) int { return strings.Compare(a.Scope, b.Scope) })
	return rules
}

// Topic is the n-th topic of the tests.
func Topic(n int) string { return fmt.Sprintf("persistent://tenant/namespace/topic-%d", n) }

// Entry is an entry of that topic.
func Entry(n int, cluster string, epoch uint64) *route.Entry {
	return &route.Entry{Topic: Topic(n), Cluster: cluster, Epoch: epoch}
}

// Neighbours are two topics of one bucket.
func Neighbours() (a, b string) {
	first := map[int]string{}
	for n := 0; ; n++ {
		topic := Topic(n)
		if other, ok := first[route.Bucket(topic)]; ok {
			return other, topic
		}
		first[route.Bucket(topic)] = topic
	}
}

// Set is a change of one entry.
func Set(topic string, before, after *route.Entry) store.Change {
	return store.Change{Entries: []store.EntryChange{{Topic: topic, Before: before, After: after}}, Who: "test", Why: "to see"}
}

func mustApply(t *testing.T, s store.Store, c store.Change) {
	t.Helper()
	if err := s.Apply(context.Background(), c); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

func mustEntry(t *testing.T, s store.Store, topic string) (route.Entry, bool) {
	t.Helper()
	e, ok, err := s.Entry(context.Background(), topic)
	if err != nil {
		t.Fatalf("Entry: %v", err)
	}
	return e, ok
}

func testFirstUpdates(t *testing.T, f *fixture) {
	s := f.open()
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	mustApply(t, s, store.Change{Rules: []store.RuleChange{{Scope: "", After: &route.Rule{Cluster: "a"}}}})
	v := Watch(t, f.open())
	v.Await(t, "Synced", func(v *View) bool {
		if v.synced && (len(v.buckets) != route.BucketCount || len(v.rules) != 1) {
			v.fault = fmt.Sprintf("Synced with %d of %d buckets and %d of 1 rules", len(v.buckets), route.BucketCount, len(v.rules))
		}
		return v.synced
	})
	v.AwaitEntry(t, *Entry(1, "a", 1))
}

func testWatchChanges(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	v := Watch(t, other)
	v.AwaitSynced(t)
	one, two := Neighbours()
	first := route.Entry{Topic: one, Cluster: "a", Epoch: 3, State: route.StateFenced, SwitchID: "s-1", Attempt: 2}
	second := route.Entry{Topic: two, Epoch: 7} // only the floor of its epoch
	rule := route.Rule{Scope: "tenant/namespace", Cluster: "b", Epoch: 4, SwitchID: "s-2"}
	mustApply(t, s, Set(one, nil, &first))
	v.AwaitMap(t, []route.Entry{first}, nil)
	mustApply(t, s, Set(two, nil, &second))
	v.AwaitMap(t, []route.Entry{first, second}, nil)
	mustApply(t, s, store.Change{Rules: []store.RuleChange{{Scope: rule.Scope, After: &rule}}})
	v.AwaitMap(t, []route.Entry{first, second}, []route.Rule{rule})
	mustApply(t, s, Set(one, &first, nil))
	v.AwaitMap(t, []route.Entry{second}, []route.Rule{rule})
	mustApply(t, s, Set(two, &second, nil))
	mustApply(t, s, store.Change{Rules: []store.RuleChange{{Scope: rule.Scope, Before: &rule}}})
	v.AwaitMap(t, nil, nil)
	// A bucket that was emptied comes back.
	mustApply(t, s, Set(one, nil, &first))
	v.AwaitMap(t, []route.Entry{first}, nil)
}

func testWatchMonotonic(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	v := Watch(t, other)
	var before *route.Entry
	for epoch := uint64(1); epoch <= 100; epoch++ {
		after := Entry(1, "a", epoch)
		mustApply(t, s, Set(Topic(1), before, after))
		// Whoever asks after the write sees it, on any handle.
		if e, ok := mustEntry(t, other, Topic(1)); !ok || e != *after {
			t.Fatalf("after the write of epoch %d another handle reads %+v, %v", epoch, e, ok)
		}
		before = after
	}
	v.AwaitEntry(t, *before)
}

func testWatchEnds(t *testing.T, f *fixture) {
	s := f.open()
	one, two := Watch(t, s), Watch(t, s)
	one.AwaitSynced(t)
	two.AwaitSynced(t)
	cancel := one.cancel
	one.Stop(t)
	cancel()
	updates := one.updates
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	two.AwaitEntry(t, *Entry(1, "a", 1))
	if one.updates != updates {
		t.Error("the sink was called after Watch had returned")
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Watch(ended, func(store.Update) {}); err != nil {
		t.Errorf("Watch with a context that has ended: %v", err)
	}
}

func testWatchOwnership(t *testing.T, f *fixture) {
	s := f.open()
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err := s.Watch(ctx, func(u store.Update) {
		for _, b := range u.Buckets {
			for i := range b {
				b[i].Cluster = "scribbled"
			}
		}
		if u.Synced {
			cancel()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if e, _ := mustEntry(t, s, Topic(1)); e.Cluster != "a" {
		t.Errorf("a receiver could alter the store: %+v", e)
	}
	all, err := s.Entries(context.Background())
	if err != nil || len(all) != 1 || all[0] != *Entry(1, "a", 1) {
		t.Errorf("Entries: %v, %v", all, err)
	}
}

func testConflict(t *testing.T, f *fixture) {
	s := f.open()
	have := &route.Entry{Topic: Topic(1), Cluster: "a", Epoch: 3, State: route.StatePrepared, SwitchID: "s", Attempt: 1}
	mustApply(t, s, Set(Topic(1), nil, have))
	wrong := map[string]*route.Entry{"absent": nil}
	for name, alter := range map[string]func(e *route.Entry){
		"cluster": func(e *route.Entry) { e.Cluster = "b" }, "epoch": func(e *route.Entry) { e.Epoch++ },
		"state": func(e *route.Entry) { e.State = route.StateFenced }, "switch": func(e *route.Entry) { e.SwitchID = "t" },
		"attempt": func(e *route.Entry) { e.Attempt++ },
	} {
		e := *have
		alter(&e)
		wrong[name] = &e
	}
	for name, before := range wrong {
		err := s.Apply(context.Background(), Set(Topic(1), before, Entry(1, "b", 9)))
		var conflict *store.ConflictError
		if !errors.Is(err, store.ErrConflict) || !errors.As(err, &conflict) || conflict.Name != Topic(1) {
			t.Errorf("another %s: got %v, want a conflict that names the topic", name, err)
		}
	}
	if err := s.Apply(context.Background(), Set(Topic(2), Entry(2, "a", 1), nil)); !errors.Is(err, store.ErrConflict) {
		t.Errorf("an entry that is not there: got %v, want a conflict", err)
	}
	rule := &route.Rule{Scope: "tenant", Cluster: "a", Epoch: 1}
	err := s.Apply(context.Background(), store.Change{Rules: []store.RuleChange{{Scope: "tenant", Before: rule, After: nil}}})
	if !errors.Is(err, store.ErrConflict) {
		t.Errorf("a rule that is not there: got %v, want a conflict", err)
	}
	if e, _ := mustEntry(t, s, Topic(1)); e != *have {
		t.Errorf("a conflict altered the entry: %+v", e)
	}
	if h, err := s.History(context.Background(), 10); err != nil || len(h) != 1 {
		t.Errorf("conflicts are in the history: %v, %v", h, err)
	}
}

func testAtomic(t *testing.T, f *fixture) {
	s := f.open()
	mustApply(t, s, Set(Topic(5), nil, Entry(5, "a", 1)))
	rule := &route.Rule{Scope: "tenant", Cluster: "a", Epoch: 1}
	c := store.Change{
		Entries: []store.EntryChange{{Topic: Topic(1), After: Entry(1, "a", 1)}, {Topic: Topic(2), After: Entry(2, "a", 1)}, {Topic: Topic(5), After: Entry(5, "b", 2)}},
		Rules:   []store.RuleChange{{Scope: "tenant", After: rule}},
		Switch:  &switching.Record{ID: "s-1", Topic: Topic(1)},
	}
	if err := s.Apply(context.Background(), c); !errors.Is(err, store.ErrConflict) {
		t.Fatalf("got %v, want a conflict", err)
	}
	check := func(entries, rules int) {
		t.Helper()
		all, err := s.Entries(context.Background())
		if err != nil || len(all) != entries {
			t.Errorf("%d entries, want %d (%v)", len(all), entries, err)
		}
		if r, err := s.Rules(context.Background()); err != nil || len(r) != rules {
			t.Errorf("%d rules, want %d (%v)", len(r), rules, err)
		}
	}
	check(1, 0)
	if _, err := s.Switch(context.Background(), "s-1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the switch of a refused change: %v, want ErrNotFound", err)
	}
	c.Entries[2].Before = Entry(5, "a", 1)
	mustApply(t, s, c)
	check(3, 1)
	if _, err := s.Switch(context.Background(), "s-1"); err != nil {
		t.Errorf("the switch of a written change: %v", err)
	}
	// The same id once more: nothing of the change happens.
	c = Set(Topic(9), nil, Entry(9, "a", 1))
	c.Switch = &switching.Record{ID: "s-1"}
	if err := s.Apply(context.Background(), c); !errors.Is(err, store.ErrConflict) {
		t.Errorf("a switch id that is taken: got %v, want a conflict", err)
	}
	check(3, 1)
}

// testCompareAndSet lets writers count up: each success must have been from the number before.
func testCompareAndSet(t *testing.T, f *fixture) {
	const writers, each = 4, 15
	mustApply(t, f.open(), Set(Topic(1), nil, Entry(1, "a", 0)))
	var group sync.WaitGroup
	for range writers {
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			for done := 0; done < each; {
				e, ok, err := s.Entry(context.Background(), Topic(1))
				if err != nil || !ok {
					t.Errorf("Entry: %v, %v", ok, err)
					return
				}
				err = s.Apply(context.Background(), Set(Topic(1), &e, Entry(1, "a", e.Epoch+1)))
				switch {
				case err == nil:
					done++
				case !errors.Is(err, store.ErrConflict):
					t.Errorf("Apply: %v", err)
					return
				}
			}
		}()
	}
	group.Wait()
	if e, _ := mustEntry(t, f.open(), Topic(1)); e.Epoch != writers*each {
		t.Errorf("epoch %d after %d successful writes", e.Epoch, writers*each)
	}
}

func testNeighbours(t *testing.T, f *fixture) {
	one, two := Neighbours()
	var group sync.WaitGroup
	for _, scope := range []string{"tenant-1", "tenant-2"} { // rules are neighbours too
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			var before *route.Rule
			for epoch := uint64(1); epoch <= 25; epoch++ {
				after := &route.Rule{Scope: scope, Cluster: "a", Epoch: epoch}
				if err := s.Apply(context.Background(), store.Change{Rules: []store.RuleChange{{Scope: scope, Before: before, After: after}}}); err != nil {
					t.Errorf("%s: %v", scope, err)
					return
				}
				before = after
			}
		}()
	}
	for _, topic := range []string{one, two} {
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			var before *route.Entry
			for epoch := uint64(1); epoch <= 25; epoch++ {
				after := &route.Entry{Topic: topic, Cluster: "a", Epoch: epoch}
				if err := s.Apply(context.Background(), Set(topic, before, after)); err != nil {
					t.Errorf("%s: %v", topic, err)
					return
				}
				before = after
			}
		}()
	}
	group.Wait()
	for _, topic := range []string{one, two} {
		if e, _ := mustEntry(t, f.open(), topic); e.Epoch != 25 {
			t.Errorf("%s: %+v", topic, e)
		}
	}
	want := []route.Rule{{Scope: "tenant-1", Cluster: "a", Epoch: 25}, {Scope: "tenant-2", Cluster: "a", Epoch: 25}}
	if rules, err := f.open().Rules(context.Background()); err != nil || !slices.Equal(sortRules(rules), want) {
		t.Errorf("rules: %+v, %v; want %+v", rules, err, want)
	}
}

// testHistoryExplains lets writers race over few topics and rules, in changes of several at once, and then replays the
// history: each change must have found what its Before says, and the last state must be that of the store. That is a
// witness of one order in which all successful changes happened.
func testHistoryExplains(t *testing.T, f *fixture) {
	const writers, each, topics = 4, 20, 4
	var group sync.WaitGroup
	var mu sync.Mutex
	succeeded := 0
	for w := range writers {
		s := f.open()
		random := rand.New(rand.NewPCG(uint64(w), 1))
		group.Add(1)
		go func() {
			defer group.Done()
			for range each {
				c := store.Change{Who: fmt.Sprint("writer ", w)}
				for _, n := range random.Perm(topics)[:2] {
					e, ok, err := s.Entry(context.Background(), Topic(n))
					if err != nil {
						t.Errorf("Entry: %v", err)
						return
					}
					change := store.EntryChange{Topic: Topic(n), After: Entry(n, "b", e.Epoch+1)}
					if ok {
						change.Before = &e
					}
					if ok && random.IntN(4) == 0 {
						change.After = nil
					}
					c.Entries = append(c.Entries, change)
				}
				err := s.Apply(context.Background(), c)
				if err == nil {
					mu.Lock()
					succeeded++
					mu.Unlock()
				} else if !errors.Is(err, store.ErrConflict) {
					t.Errorf("Apply: %v", err)
					return
				}
			}
		}()
	}
	group.Wait()
	s := f.open()
	history, err := s.History(context.Background(), 1000)
	if err != nil {
		t.Fatal(err)
	}
	if len(history) != succeeded {
		t.Errorf("%d changes in the history, %d succeeded", len(history), succeeded)
	}
	state := map[string]route.Entry{}
	slices.Reverse(history)
	for _, h := range history {
		for _, e := range h.Entries {
			have, ok := state[e.Topic]
			if ok != (e.Before != nil) || ok && have != *e.Before {
				t.Fatalf("change %d of %s expects %+v and finds %+v, %v", h.Seq, e.Topic, e.Before, have, ok)
			}
			if e.After == nil {
				delete(state, e.Topic)
			} else {
				state[e.Topic] = *e.After
			}
		}
	}
	all, err := s.Entries(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var want []route.Entry
	for _, e := range state {
		want = append(want, e)
	}
	if !slices.Equal(sortEntries(all), sortEntries(want)) {
		t.Errorf("the store holds %+v, its history leads to %+v", all, want)
	}
}

func testModel(t *testing.T, f *fixture) {
	s := f.open()
	v := Watch(t, f.open())
	entries, rules := map[string]route.Entry{}, map[string]route.Rule{}
	one, two := Neighbours()
	names := []string{one, two, Topic(70), Topic(71), Topic(72)}
	scopes := []string{"", "t", "t/n"}
	epoch := uint64(0)
	rapid.Check(t, func(rt *rapid.T) {
		for range rapid.IntRange(1, 3).Draw(rt, "changes") {
			var c store.Change
			for _, topic := range rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 3, rapid.ID).Draw(rt, "topics") {
				change := store.EntryChange{Topic: topic}
				if e, ok := entries[topic]; ok {
					change.Before = &e
				}
				if rapid.Bool().Draw(rt, "keep") {
					e := route.Entry{Topic: topic, Cluster: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "cluster"), SwitchID: rapid.SampledFrom([]string{"", "s"}).Draw(rt, "switch"),
						State: route.State(rapid.IntRange(0, 3).Draw(rt, "state")), Attempt: rapid.Uint32().Draw(rt, "attempt")}
					epoch += rapid.Uint64Range(1, 1<<40).Draw(rt, "step")
					e.Epoch = epoch
					change.After = &e
				}
				c.Entries = append(c.Entries, change)
			}
			for _, scope := range rapid.SliceOfNDistinct(rapid.SampledFrom(scopes), 0, 2, rapid.ID).Draw(rt, "scopes") {
				change := store.RuleChange{Scope: scope}
				if r, ok := rules[scope]; ok {
					change.Before = &r
				}
				if rapid.Bool().Draw(rt, "keep") {
					change.After = &route.Rule{Scope: scope, Cluster: "a", Epoch: rapid.Uint64().Draw(rt, "epoch")}
				}
				c.Rules = append(c.Rules, change)
			}
			if len(c.Entries)+len(c.Rules) == 0 {
				continue
			}
			if err := s.Apply(context.Background(), c); err != nil {
				rt.Fatalf("Apply(%+v): %v", c, err)
			}
			for _, e := range c.Entries {
				if delete(entries, e.Topic); e.After != nil {
					entries[e.Topic] = *e.After
				}
			}
			for _, r := range c.Rules {
				if delete(rules, r.Scope); r.After != nil {
					rules[r.Scope] = *r.After
				}
			}
		}
	})
	var wantEntries []route.Entry
	for _, e := range entries {
		wantEntries = append(wantEntries, e)
	}
	var wantRules []route.Rule
	for _, r := range rules {
		wantRules = append(wantRules, r)
	}
	gotEntries, err := s.Entries(context.Background())
	if err != nil || !slices.Equal(sortEntries(gotEntries), sortEntries(wantEntries)) {
		t.Errorf("Entries: %+v, %v; want %+v", gotEntries, err, wantEntries)
	}
	gotRules, err := s.Rules(context.Background())
	if err != nil || !slices.Equal(sortRules(gotRules), sortRules(wantRules)) {
		t.Errorf("Rules: %+v, %v; want %+v", gotRules, err, wantRules)
	}
	v.AwaitMap(t, wantEntries, wantRules)
}

func testMaxChange(t *testing.T, f *fixture) {
	s := f.open()
	var c store.Change
	for n := range store.MaxChange {
		c.Entries = append(c.Entries, store.EntryChange{Topic: Topic(n), After: Entry(n, "a", 1)})
	}
	tooMany := c
	tooMany.Rules = []store.RuleChange{{Scope: "t", After: &route.Rule{Scope: "t", Cluster: "a"}}}
	if err := s.Apply(context.Background(), tooMany); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("one too many: got %v, want ErrTooLarge", err)
	}
	mustApply(t, s, c)
	all, err := s.Entries(context.Background())
	if err != nil || len(all) != store.MaxChange {
		t.Errorf("%d entries, want %d (%v)", len(all), store.MaxChange, err)
	}
	for name, bad := range map[string]store.Change{
		"nothing":              {},
		"a topic twice":        {Entries: []store.EntryChange{{Topic: Topic(1)}, {Topic: Topic(1)}}},
		"a rule twice":         {Rules: []store.RuleChange{{Scope: "t"}, {Scope: "t"}}},
		"another topic":        Set(Topic(1), Entry(1, "a", 1), Entry(2, "a", 2)),
		"no topic":             Set("", nil, &route.Entry{Cluster: "a"}),
		"a bad switch id":      {Rules: []store.RuleChange{{Scope: "t"}}, Switch: &switching.Record{ID: "a/b"}},
		"a state nobody knows": Set(Topic(1), Entry(1, "a", 1), &route.Entry{Topic: Topic(1), State: 99}),
	} {
		if err := s.Apply(context.Background(), bad); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: got %v, want a refusal", name, err)
		}
	}
}

func testHistory(t *testing.T, f *fixture) {
	s := f.open()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	rule := route.Rule{Scope: "t", Cluster: "a", Epoch: 1}
	for n := range 5 {
		c := Set(Topic(n), nil, Entry(n, "a", 1))
		c.Who, c.Why, c.At = fmt.Sprint("who ", n), fmt.Sprint("why ", n), at.Add(time.Duration(n)*time.Second)
		c.Rules = []store.RuleChange{{Scope: "t", After: &rule}}
		if n > 0 {
			c.Rules[0].Before = &rule
		}
		if n == 3 {
			c.Switch = &switching.Record{ID: "s-3"}
		}
		mustApply(t, s, c)
	}
	h, err := f.open().History(context.Background(), 3)
	if err != nil || len(h) != 3 {
		t.Fatalf("History(3): %v, %v", h, err)
	}
	for i, n := range []int{4, 3, 2} {
		e := h[i]
		if e.Who != fmt.Sprint("who ", n) || e.Why != fmt.Sprint("why ", n) || !e.At.Equal(at.Add(time.Duration(n)*time.Second)) ||
			len(e.Entries) != 1 || e.Entries[0].Before != nil || *e.Entries[0].After != *Entry(n, "a", 1) || len(e.Rules) != 1 || (e.Switch == "s-3") != (n == 3) {
			t.Errorf("change %d: %+v", n, e)
		}
		if i > 0 && h[i-1].Seq <= e.Seq {
			t.Errorf("sequence numbers %d, %d do not fall", h[i-1].Seq, e.Seq)
		}
	}
	if all, err := s.History(context.Background(), 100); err != nil || len(all) != 5 {
		t.Errorf("History(100): %d changes, %v", len(all), err)
	}
	if none, err := s.History(context.Background(), 0); err != nil || len(none) != 0 {
		t.Errorf("History(0): %d changes, %v", len(none), err)
	}
}

func testSwitches(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	var records []switching.Record
	for n := range 4 {
		r := switching.Record{ID: fmt.Sprintf("s-%d", 9-n), Batch: "b", Topic: Topic(n), From: "a", To: "b", Mode: switching.ModeImmediate, State: switching.StateEvicting,
			Epoch: 2, Assigned: map[string]string{Topic(n): "broker-0:6650"}, Who: "w", Why: "y", Started: at, Flipped: at.Add(time.Second)}
		c := Set(Topic(n), nil, Entry(n, "b", 2))
		c.Switch = &r
		mustApply(t, s, c)
		mustApply(t, s, Set(Topic(100+n), nil, Entry(100+n, "b", 2))) // not a switch
		records = append(records, r)
	}
	got, err := other.Switch(context.Background(), "s-8")
	if err != nil || !reflect.DeepEqual(got, records[1]) {
		t.Errorf("Switch: %+v, %v; want %+v", got, err, records[1])
	}
	list, err := other.Switches(context.Background(), 3)
	if err != nil || len(list) != 3 || list[0].ID != "s-6" || list[1].ID != "s-7" || list[2].ID != "s-8" {
		t.Errorf("Switches(3), newest first: %+v, %v", list, err)
	}
	ended := at.Add(time.Minute)
	if err := other.EndSwitch(context.Background(), "s-8", switching.StateDone, ended, "fine"); err != nil {
		t.Fatal(err)
	}
	want := records[1]
	want.State, want.Ended, want.Note = switching.StateDone, ended, "fine"
	if got, err := s.Switch(context.Background(), "s-8"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("ended: %+v, %v; want %+v", got, err, want)
	}
	for _, id := range []string{"none", "", "a/b", ".."} {
		if _, err := s.Switch(context.Background(), id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("Switch(%q): %v, want ErrNotFound", id, err)
		}
		if err := s.EndSwitch(context.Background(), id, switching.StateDone, ended, ""); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("EndSwitch(%q): %v, want ErrNotFound", id, err)
		}
	}
}

func testAcks(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	c := Set(Topic(1), nil, Entry(1, "b", 2))
	c.Switch = &switching.Record{ID: "s-1"}
	mustApply(t, s, c)
	if acks, err := s.Acks(context.Background(), "s-1"); err != nil || len(acks) != 0 {
		t.Errorf("before any: %v, %v", acks, err)
	}
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	want := []switching.Ack{
		{Proxy: "p-1", Incarnation: "i", Producers: 3, At: at},
		{Proxy: "p-2:7780", Incarnation: "i", Consumers: 2, At: at},
		{Proxy: "p-2:7780", Incarnation: "j", Unresolved: 1, At: at},
	}
	first := want[0]
	first.Producers = 1
	for _, a := range []switching.Ack{want[2], first, want[1], want[0]} { // want[0] replaces first
		if err := s.PutAck(context.Background(), "s-1", a); err != nil {
			t.Fatal(err)
		}
	}
	acks, err := other.Acks(context.Background(), "s-1")
	if err != nil || !reflect.DeepEqual(acks, want) {
		t.Errorf("Acks: %+v, %v; want %+v", acks, err, want)
	}
	if err := s.PutAck(context.Background(), "none", want[0]); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("PutAck of no switch: %v, want ErrNotFound", err)
	}
	if _, err := s.Acks(context.Background(), "none"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("Acks of no switch: %v, want ErrNotFound", err)
	}
	if err := s.PutAck(context.Background(), "s-1", switching.Ack{Proxy: "a/b"}); err == nil {
		t.Error("an ack of a proxy with '/' in its id is taken")
	}
}

func testRegister(t *testing.T, f *fixture) {
	s := f.open()
	p := store.Proxy{ID: "p-1:7780", Incarnation: "i-1", Version: "v", Advertised: "pulsar://x:6650", Ops: "http://x:7780", Clusters: []string{"a", "b"},
		Digest: "d-1", Entries: 5, Started: time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)}
	expect := func(what string, want ...store.Proxy) {
		t.Helper()
		got, err := f.open().Proxies(context.Background())
		if err != nil || len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, want)
		}
	}
	if err := s.Forget(context.Background(), "nobody"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("forgetting nobody: %v, want ErrNotFound", err)
	}
	if err := s.Unregister(context.Background()); err != nil {
		t.Errorf("Unregister without a registration: %v", err)
	}
	if err := s.Register(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	p.Live = true
	expect("registered", p)
	p.Digest, p.Entries = "d-2", 6
	if err := s.Register(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	expect("replaced", p)
	if !f.m.Single {
		q := store.Proxy{ID: "p-0", Incarnation: "i"}
		second := f.open()
		if err := second.Register(context.Background(), q); err != nil {
			t.Fatal(err)
		}
		q.Live = true
		expect("two", q, p)
		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		q.Live = false
		expect("one is gone without a word", q, p)
		if err := s.Forget(context.Background(), p.ID); !errors.Is(err, store.ErrLive) {
			t.Errorf("a live proxy is forgotten: %v", err)
		}
		if err := s.Forget(context.Background(), q.ID); err != nil {
			t.Errorf("forget: %v", err)
		}
		expect("it is forgotten", p)
		// The same proxy starts anew.
		third := f.open()
		q.Incarnation = "j"
		if err := third.Register(context.Background(), q); err != nil {
			t.Fatal(err)
		}
		q.Live = true
		expect("it is back", q, p)
		if err := third.Unregister(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	expect("one is left", p)
	if err := s.Unregister(context.Background()); err != nil {
		t.Fatal(err)
	}
	expect("unregistered")
	if err := s.Register(context.Background(), store.Proxy{ID: "a/b"}); err == nil {
		t.Error("an id with '/' is taken")
	}
}

func testTagKey(t *testing.T, f *fixture) {
	keys := make([][]byte, 4)
	var group sync.WaitGroup
	for i := range keys {
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			var err error
			if keys[i], err = s.TagKey(context.Background()); err != nil {
				t.Errorf("TagKey: %v", err)
			}
		}()
	}
	group.Wait()
	for _, key := range keys {
		if len(key) < 16 || !slices.Equal(key, keys[0]) {
			t.Errorf("keys of %d and %d bytes differ or are short", len(key), len(keys[0]))
		}
	}
}

func testContext(t *testing.T, f *fixture) {
	s := f.open()
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := s.Entry(ended, Topic(1)); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Entry: %v, want ErrUnavailable", err)
	}
	if err := s.Apply(ended, Set(Topic(1), Entry(1, "a", 1), nil)); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		t.Errorf("Apply: %v, want ErrUnavailable and a known outcome", err)
	}
	if _, ok := mustEntry(t, s, Topic(1)); !ok {
		t.Error("a change that was not begun happened")
	}
}

func testClose(t *testing.T, f *fixture) {
	s := f.m.Open(t)
	v := Watch(t, s)
	v.AwaitSynced(t)
	if st := s.Status(); !st.Connected || st.Contact.IsZero() || st.Kind == "" {
		t.Errorf("Status: %+v", st)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	select {
	case err := <-v.done:
		if err != nil {
			t.Errorf("Watch: %v", err)
		}
	case <-f.ctx().Done():
		t.Error("Watch goes on after Close")
	}
	v.cancel()
	v.cancel = nil
	if _, _, err := s.Entry(context.Background(), Topic(1)); !errors.Is(err, store.ErrClosed) {
		t.Errorf("Entry: %v, want ErrClosed", err)
	}
	if err := s.Apply(context.Background(), Set(Topic(1), nil, Entry(1, "a", 1))); !errors.Is(err, store.ErrClosed) {
		t.Errorf("Apply: %v, want ErrClosed", err)
	}
	if s.Status().Connected {
		t.Error("a closed store says that it is connected")
	}
}
