package storetest

import (
	"context"
	"fmt"
	"testing"

	"pointsman/core/route"
	"pointsman/store"
)

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
	first := route.Entry{Topic: one, Cluster: "a", Epoch: 3, SwitchID: "s-1", Attempt: 2}
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
