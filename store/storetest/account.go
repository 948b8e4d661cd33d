package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

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
			c.Switch = &switching.Record{ID: "s-3", Rev: 1}
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
		r := switching.Record{ID: fmt.Sprintf("s-%d", 9-n), Rev: 1, Batch: "b", Topic: Topic(n), From: "a", To: "b", Mode: switching.ModeImmediate, State: switching.StateEvicting,
			Epoch: 2, Assigned: map[string]string{Topic(n): "broker-0:6650"}, Who: "w", Why: "y", Started: at, Flipped: at.Add(time.Second)}
		if n == 2 { // requested first, without a change of the map
			if err := s.PutSwitch(context.Background(), r); err != nil {
				t.Fatal(err)
			}
		} else {
			c := Set(Topic(n), nil, Entry(n, "b", 2))
			c.Switch = &r
			mustApply(t, s, c)
		}
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
	if h, err := other.History(context.Background(), 100); err != nil || len(h) != 7 {
		t.Errorf("a record alone is no change of the map: %d in the history, %v", len(h), err)
	}
	// A step of its own, and one with a change.
	want := records[1]
	want.Rev, want.State, want.Ended, want.Note = 2, switching.StateDone, at.Add(time.Minute), "fine"
	if err := other.PutSwitch(context.Background(), want); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Switch(context.Background(), "s-8"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("revision 2: %+v, %v; want %+v", got, err, want)
	}
	want.Rev, want.Note = 3, "again"
	c := Set(Topic(1), Entry(1, "b", 2), Entry(1, "a", 3))
	c.Switch = &want
	mustApply(t, s, c)
	if got, err := other.Switch(context.Background(), "s-8"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("revision 3: %+v, %v; want %+v", got, err, want)
	}
	if list, err := other.Switches(context.Background(), 9); err != nil || len(list) != 4 {
		t.Errorf("a switch that was written three times is listed once: %d records, %v", len(list), err)
	}
	for name, r := range map[string]switching.Record{
		"the same revision": {ID: "s-8", Rev: 3}, "an older one": {ID: "s-8", Rev: 2}, "one ahead": {ID: "s-8", Rev: 5}, "one of nothing": {ID: "none", Rev: 2}, "a new one": {ID: "s-8", Rev: 1},
	} {
		var conflict *store.ConflictError
		if err := s.PutSwitch(context.Background(), r); !errors.As(err, &conflict) || conflict.Name != "switch "+r.ID {
			t.Errorf("%s alone: %v, want a conflict that names the switch", name, err)
		}
		c := Set(Topic(50), nil, Entry(50, "a", 1))
		c.Switch = &r
		if err := s.Apply(context.Background(), c); !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s with a change: %v, want a conflict", name, err)
		}
	}
	if _, ok := mustEntry(t, s, Topic(50)); ok {
		t.Error("a change whose record was a conflict happened")
	}
	if got, err := s.Switch(context.Background(), "s-8"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("after the conflicts: %+v, %v; want %+v", got, err, want)
	}
	for _, r := range []switching.Record{{ID: "s-8"}, {ID: "a/b", Rev: 1}, {Rev: 1}} {
		if err := s.PutSwitch(context.Background(), r); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("PutSwitch(%+v): %v, want a refusal", r, err)
		}
	}
	for _, id := range []string{"none", "", "a/b", ".."} {
		if _, err := s.Switch(context.Background(), id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("Switch(%q): %v, want ErrNotFound", id, err)
		}
	}
	for _, r := range []switching.Record{{ID: "b-9", Batch: "b", Started: at.Add(time.Second)}, {ID: "b-10", Batch: "b", Started: at.Add(time.Second)}, {ID: "b-x", Batch: "b", Started: at}, {ID: "b-x-1", Batch: "b-x"}, {ID: "bb-1", Batch: "bb"}, {ID: "b"}} {
		r.Rev, r.State = 1, switching.StateDone
		if err := s.PutSwitch(context.Background(), r); err != nil {
			t.Fatal(err)
		}
	}
	for batch, want := range map[string][]string{"b": {"b-x", "b-10", "b-9"}, "b-x": {"b-x-1"}, "b-9": nil, "": nil, "..": nil} {
		var ids []string
		of, err := other.SwitchesOf(context.Background(), batch)
		for _, r := range of {
			ids = append(ids, r.ID)
		}
		if err != nil || !slices.Equal(ids, want) {
			t.Errorf("SwitchesOf(%q): %v, %v; want %v", batch, ids, err, want)
		}
	}
}

func testRunning(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	expect := func(why string, want ...switching.Record) {
		t.Helper()
		for _, s := range []store.Store{s, other} {
			if have, err := s.Running(context.Background()); err != nil || len(have) != len(want) || len(want) > 0 && !reflect.DeepEqual(have, want) {
				t.Errorf("%s: Running: %+v, %v; want %+v", why, have, err, want)
			}
		}
	}
	put := func(r switching.Record) switching.Record {
		t.Helper()
		if err := s.PutSwitch(context.Background(), r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	expect("before any")
	planned := put(switching.Record{ID: "s-1", Rev: 1, Attempt: 1, Mode: switching.ModePlanned, State: switching.StateRequested, Started: at.Add(2 * time.Second)})
	if err := s.PutAck(context.Background(), "s-1", switching.Ack{Proxy: "p", Incarnation: "i"}); err != nil {
		t.Fatal(err)
	}
	immediate := switching.Record{ID: "s-2", Rev: 1, Mode: switching.ModeImmediate, State: switching.StateEvicting, Started: at, Flipped: at}
	c := Set(Topic(1), nil, Entry(1, "b", 1))
	c.Switch = &immediate
	mustApply(t, s, c)
	twin := put(switching.Record{ID: "s-0", Rev: 1, State: switching.StateRequested, Started: at.Add(2 * time.Second)})
	put(switching.Record{ID: "s-4", Rev: 1, State: switching.StateAborted, Started: at})
	expect("three that run and one that was over at once", immediate, twin, planned)
	for n := range 40 {
		r := put(switching.Record{ID: fmt.Sprintf("later-%d", n), Rev: 1, State: switching.StateEvicting, Started: at.Add(time.Hour)})
		r.Rev, r.State = 2, switching.StateDone
		put(r)
	}
	planned.Rev, planned.State = 2, switching.StatePrepared
	put(planned)
	expect("many have ended since", immediate, twin, planned)
	over := planned
	over.Rev, over.State = 9, switching.StateAborted
	if err := other.PutSwitch(context.Background(), over); !errors.Is(err, store.ErrConflict) {
		t.Fatalf("a revision too far: %v", err)
	}
	expect("a conflict ends nothing", immediate, twin, planned)
	over.Rev = 3
	c = Set(Topic(1), Entry(1, "b", 1), Entry(1, "a", 2))
	c.Switch = &over
	mustApply(t, s, c)
	expect("ended with a change", immediate, twin)
	immediate.Rev, immediate.State = 2, switching.StateIncomplete
	if err := other.PutSwitch(context.Background(), immediate); err != nil {
		t.Fatal(err)
	}
	expect("ended alone", twin)
	immediate.Rev, immediate.Note = 3, "written once more"
	put(immediate)
	expect("over stays over", twin)
	again := put(over.Again(at.Add(-time.Hour)))
	expect("the next attempt runs", again, twin)
	if acks, err := other.Acks(context.Background(), "s-1"); err != nil || len(acks) != 1 {
		t.Errorf("the ack of a switch that ended and runs again: %v, %v", acks, err)
	}
}

func testRevisions(t *testing.T, f *fixture) {
	const writers, each = 4, 10
	if err := f.open().PutSwitch(context.Background(), switching.Record{ID: "s", Rev: 1}); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for w := range writers {
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			for done := 0; done < each; {
				r, err := s.Switch(context.Background(), "s")
				if err != nil {
					t.Errorf("Switch: %v", err)
					return
				}
				r.Rev++
				r.Note = fmt.Sprint(w)
				r.Unassigned++
				switch err := s.PutSwitch(context.Background(), r); {
				case err == nil:
					done++
				case !errors.Is(err, store.ErrConflict):
					t.Errorf("PutSwitch: %v", err)
					return
				}
			}
		}()
	}
	group.Wait()
	if r, err := f.open().Switch(context.Background(), "s"); err != nil || r.Rev != writers*each+1 || r.Unassigned != writers*each {
		t.Errorf("after %d writes: revision %d, counted %d, %v", writers*each, r.Rev, r.Unassigned, err)
	}
}

func testAcks(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	if err := s.PutSwitch(context.Background(), switching.Record{ID: "s-1", Rev: 1}); err != nil {
		t.Fatal(err)
	}
	if acks, err := s.Acks(context.Background(), "s-1"); err != nil || len(acks) != 0 {
		t.Errorf("before any: %v, %v", acks, err)
	}
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	want := []switching.Ack{
		{Proxy: "p-1", Incarnation: "i", Producers: 3, At: at}, // no phase: evicting
		{Proxy: "p-2:7780", Incarnation: "i", Consumers: 2, At: at},
		{Proxy: "p-2:7780", Incarnation: "j", Unresolved: 1, At: at},
		{Attempt: 1, Phase: switching.StatePrepared, Proxy: "p-1", Incarnation: "i", At: at},
		{Attempt: 1, Phase: switching.StateFenced, Proxy: "p-1", Incarnation: "i", Clean: true, Claims: []string{"a", "b"}, At: at},
		{Attempt: 1, Phase: switching.StateFenced, Proxy: "p-1", Incarnation: "j", Why: "young", At: at},
		{Attempt: 1, Phase: switching.StateEvicting, Proxy: "p-1", Incarnation: "i", At: at},
		{Attempt: 2, Phase: switching.StatePrepared, Proxy: "p-1", Incarnation: "i", At: at},
	}
	first := want[0]
	first.Producers, first.Phase = 1, switching.StateEvicting
	for _, a := range []switching.Ack{want[7], want[2], first, want[1], want[0], want[6], want[4], want[3], want[5]} { // want[0] replaces first
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
	for name, a := range map[string]switching.Ack{
		"a proxy with '/' in its id": {Proxy: "a/b"}, "an incarnation with '@'": {Proxy: "p", Incarnation: "a@b"}, "a phase without acks": {Proxy: "p", Phase: switching.StateDone},
	} {
		if err := s.PutAck(context.Background(), "s-1", a); err == nil || errors.Is(err, store.ErrNotFound) {
			t.Errorf("an ack with %s: %v, want a refusal", name, err)
		}
	}
}
