package storetest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/store"
)

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
	tracked string
	steps   []route.Entry // of the tracked topic
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
			if e.Topic == v.tracked && (len(v.steps) == 0 || v.steps[len(v.steps)-1] != e) {
				v.steps = append(v.steps, e)
			}
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

// Track has every value of a topic noted from now on.
func (v *View) Track(topic string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tracked = topic
}

// Steps are the values of the tracked topic, as they came. Within Await's function, or after Stop.
func (v *View) Steps() []route.Entry { return v.steps }

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
