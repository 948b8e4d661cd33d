package storetest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

func testConflict(t *testing.T, f *fixture) {
	s := f.open()
	have := &route.Entry{Topic: Topic(1), Cluster: "a", Epoch: 3, State: route.StateDraining, SwitchID: "s", Attempt: 1, Drain: "z;0;3:4;=sub"}
	begin := Set(Topic(1), nil, have)
	begin.Switch = &switching.Record{ID: "s", Rev: 1, State: switching.StateFenced}
	mustApply(t, s, begin)
	wrong := map[string]*route.Entry{"absent": nil}
	for name, alter := range map[string]func(e *route.Entry){
		"cluster": func(e *route.Entry) { e.Cluster = "b" }, "epoch": func(e *route.Entry) { e.Epoch++ },
		"state": func(e *route.Entry) { e.State = route.StateFenced }, "switch": func(e *route.Entry) { e.SwitchID = "t" },
		"attempt": func(e *route.Entry) { e.Attempt++ }, "drain": func(e *route.Entry) { e.Drain = "z;0;3:4;>sub" },
	} {
		e := *have
		alter(&e)
		wrong[name] = &e
	}
	for name, before := range wrong {
		c := Set(Topic(1), before, Entry(1, "b", 9))
		if c.Switch = begin.Switch; before != nil {
			c.Switch = &switching.Record{ID: before.SwitchID, Rev: 2, State: switching.StateDone}
		}
		err := s.Apply(context.Background(), c)
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
		Switch:  &switching.Record{ID: "s-1", Rev: 1, Topic: Topic(1)},
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
	c.Switch = &switching.Record{ID: "s-1", Rev: 1}
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

func testModel(t *testing.T, f *fixture) {
	s := f.open()
	v := Watch(t, f.open())
	entries, rules := map[string]route.Entry{}, map[string]route.Rule{}
	one, two := Neighbours()
	names := []string{one, two, Topic(70), Topic(71), Topic(72)}
	scopes := []string{"", "t", "t/n"}
	epoch, rev := uint64(0), uint64(0)
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
					if store.Moving(e) {
						e.SwitchID = "s"
					}
					if e.State == route.StateDraining || store.Moving(e) && rapid.Bool().Draw(rt, "drains") {
						e.Drain = route.Drain{From: "z", Subs: []route.DrainSub{{Name: rapid.String().Draw(rt, "sub"), Leaving: rapid.Bool().Draw(rt, "leaving")}}}.String()
					}
					change.After = &e
				}
				if change.Before != nil && store.Moving(*change.Before) || change.After != nil && store.Moving(*change.After) {
					c.Switch = &switching.Record{ID: "s", Rev: rev + 1}
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
			if c.Switch != nil {
				rev++
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
		"nothing":                     {},
		"a topic twice":               {Entries: []store.EntryChange{{Topic: Topic(1)}, {Topic: Topic(1)}}},
		"a rule twice":                {Rules: []store.RuleChange{{Scope: "t"}, {Scope: "t"}}},
		"another topic":               Set(Topic(1), Entry(1, "a", 1), Entry(2, "a", 2)),
		"no topic":                    Set("", nil, &route.Entry{Cluster: "a"}),
		"a bad switch id":             {Rules: []store.RuleChange{{Scope: "t"}}, Switch: &switching.Record{ID: "a/b", Rev: 1}},
		"a record without a revision": {Rules: []store.RuleChange{{Scope: "t"}}, Switch: &switching.Record{ID: "s"}},
		"a fence without a switch":    Set(Topic(1), Entry(1, "a", 1), &route.Entry{Topic: Topic(1), Cluster: "a", State: route.StateFenced}),
		"a drain without a text":      Set(Topic(1), nil, &route.Entry{Topic: Topic(1), Cluster: "a", State: route.StateDraining, SwitchID: "s"}),
		"a drain that is misspelt":    Set(Topic(1), nil, &route.Entry{Topic: Topic(1), Cluster: "a", State: route.StateFenced, SwitchID: "s", Drain: "z;0"}),
		"a state nobody knows":        Set(Topic(1), Entry(1, "a", 1), &route.Entry{Topic: Topic(1), State: 99}),
	} {
		if err := s.Apply(context.Background(), bad); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: got %v, want a refusal", name, err)
		}
	}
}
