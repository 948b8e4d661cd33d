package route

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// world holds a table that is changed only as the control API would, and the topics that are watched meanwhile.
type world struct {
	table    *Table
	topics   []Topic
	defaults []string // of the listeners
	shared   string   // what the writing functions are told: the default of all, or ""
}

func newWorld(t *rapid.T) *world {
	w := &world{table: Empty()}
	for _, name := range []string{
		"persistent://t/a/x", "persistent://t/a/y", "persistent://t/b/x", "persistent://u/a/x", "persistent://t/c/v1/x", "non-persistent://t/a/x",
		"persistent://t/a/__change_events", "persistent://pulsar/system/assign", "persistent://pulsar/h:1/healthcheck",
	} {
		topic, err := ParseTopic(name)
		if err != nil {
			t.Fatal(err)
		}
		w.topics = append(w.topics, topic)
	}
	switch rapid.IntRange(0, 2).Draw(t, "listeners") {
	case 0:
		w.defaults = []string{""}
	case 1:
		w.defaults, w.shared = []string{"a"}, "a"
	case 2:
		w.defaults = []string{"a", "b"} // they differ, so the writing functions are told none
	}
	return w
}

// change makes one change and returns which topics it may touch.
func (w *world) change(t *rapid.T) (what string, covers func(Topic) bool) {
	cluster := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "cluster")
	topic := rapid.SampledFrom(w.topics).Draw(t, "topic")
	scope := rapid.SampledFrom([]string{"", "t", "u", "t/a", "t/b", "t/c/v1", "pulsar", "pulsar/system"}).Draw(t, "scope")
	var err error
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0: // routes set TOPIC, switch, import
		var before *Entry
		if e, ok := w.table.Entry(topic.Base()); ok {
			before = &e
		}
		after := Move(topic, before, w.table.Decide(topic, w.shared), cluster, "s")
		w.table, err = w.table.WithEntry(topic.Base(), &after)
		what, covers = fmt.Sprintf("set %s %s", topic, cluster), func(o Topic) bool { return o.Base() == topic.Base() }
	case 1: // routes rm TOPIC
		if before, ok := w.table.Entry(topic.Base()); ok {
			w.table, err = w.table.WithEntry(topic.Base(), Remove(before, w.table.DecideByRule(topic, w.shared)))
		}
		what, covers = fmt.Sprintf("rm %s", topic), func(o Topic) bool { return o.Base() == topic.Base() }
	case 2: // routes set SCOPE
		after, e := SetRule(w.table, scope, cluster, "s", w.shared)
		if e != nil {
			t.Fatal(e)
		}
		w.table, err = w.table.WithRule(scope, &after)
		what, covers = fmt.Sprintf("set %q %s", scope, cluster), func(o Topic) bool { return o.In(scope) }
	case 3: // routes rm SCOPE
		after, e := RemoveRule(w.table, scope, w.shared)
		if e != nil {
			t.Fatal(e)
		}
		w.table, err = w.table.WithRule(scope, after)
		what, covers = fmt.Sprintf("rm %q", scope), func(o Topic) bool { return o.In(scope) }
	}
	if err != nil {
		t.Fatal(err)
	}
	return what, covers
}

// The promise of the package, after every change of any sequence, for every topic and through every listener.
func TestAnEpochNeverShrinksAndGrowsWhenTheClusterChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		history := ""
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			old := w.table
			what, covers := w.change(t)
			history += "\n  " + what
			for _, topic := range w.topics {
				for _, def := range w.defaults {
					before, after := old.Decide(topic, def), w.table.Decide(topic, def)
					if after.Epoch < before.Epoch {
						t.Fatalf("%s: the epoch shrank\n%+v\n%+v%s", topic, before, after, history)
					}
					if after.Cluster != before.Cluster && after.Epoch == before.Epoch {
						t.Fatalf("%s: the cluster changed without the epoch\n%+v\n%+v%s", topic, before, after, history)
					}
					if !covers(topic) && before != after {
						t.Fatalf("%s: a neighbour noticed\n%+v\n%+v%s", topic, before, after, history)
					}
				}
			}
		}
	})
}

func entryOf(e Entry) *Entry { return &e }

func TestMoveRaisesTheEpochOnlyWhenTheClusterChanges(t *testing.T) {
	x := mustTopic(t, "persistent://t/ns/x-partition-3")
	base := x.Base()
	is := func(before *Entry, decided Decision, to string, want Entry) {
		t.Helper()
		if got := Move(x, before, decided, to, "s2"); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	here := Entry{Topic: base, Cluster: "a", Epoch: 4, SwitchID: "s1", State: StateActive}
	is(&here, Decision{Cluster: "a", Epoch: 4}, "b", Entry{Topic: base, Cluster: "b", Epoch: 5, SwitchID: "s2"})
	is(&here, Decision{Cluster: "a", Epoch: 4}, "a", here) // unchanged, the old switch id included
	is(nil, Decision{Cluster: "a", Epoch: 3}, "a", Entry{Topic: base, Cluster: "a", Epoch: 3, SwitchID: "s2"})
	is(nil, Decision{Cluster: "a", Epoch: 3}, "b", Entry{Topic: base, Cluster: "b", Epoch: 4, SwitchID: "s2"})
	is(nil, Decision{Source: SourceNone}, "b", Entry{Topic: base, Cluster: "b", Epoch: 1, SwitchID: "s2"})
	is(entryOf(Entry{Topic: base, Epoch: 7}), Decision{Cluster: "a", Epoch: 7}, "a", Entry{Topic: base, Cluster: "a", Epoch: 7, SwitchID: "s2"})
	is(entryOf(Entry{Topic: base, Epoch: 7}), Decision{Cluster: "a", Epoch: 7}, "b", Entry{Topic: base, Cluster: "b", Epoch: 8, SwitchID: "s2"})
}

func TestRemoveLeavesAFloorOnlyWhereTheEpochWouldShrinkOrStand(t *testing.T) {
	is := func(before Entry, byRule Decision, want *Entry) {
		t.Helper()
		got := Remove(before, byRule)
		if (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("Remove(%+v, %+v) = %+v, want %+v", before, byRule, got, want)
		}
	}
	is(Entry{Topic: "x", Cluster: "a"}, Decision{Cluster: "a"}, nil)
	is(Entry{Topic: "x", Cluster: "a", Epoch: 3, SwitchID: "s"}, Decision{Cluster: "a", Epoch: 1}, &Entry{Topic: "x", Epoch: 3})
	is(Entry{Topic: "x", Cluster: "a", Epoch: 3}, Decision{Cluster: "a", Epoch: 3}, nil)
	is(Entry{Topic: "x", Cluster: "a"}, Decision{Cluster: "b"}, &Entry{Topic: "x", Epoch: 1})
	is(Entry{Topic: "x", Cluster: "a", Epoch: 3}, Decision{Cluster: "b", Epoch: 3}, &Entry{Topic: "x", Epoch: 4})
	is(Entry{Topic: "x", Cluster: "a", Epoch: 3}, Decision{Cluster: "b", Epoch: 4}, nil)
	is(Entry{Topic: "x", Epoch: 3}, Decision{Cluster: "b", Epoch: 1}, &Entry{Topic: "x", Epoch: 3}) // a floor stays one
	is(Entry{Topic: "x", Epoch: 3}, Decision{Cluster: "b", Epoch: 3}, nil)
}

func TestARuleThatReplacesExactEntriesLeavesNoFloors(t *testing.T) {
	x := mustTopic(t, "persistent://t/ns/x")
	table := mustWith(t, Empty(), []Rule{{Scope: "", Cluster: "a", Epoch: 2}}, Entry{Topic: x.Base(), Cluster: "c", Epoch: 9}, Entry{Topic: "persistent://u/ns/x", Epoch: 40})
	rule, err := SetRule(table, "t/ns", "b", "s", "")
	if err != nil || rule != (Rule{Scope: "t/ns", Cluster: "b", Epoch: 10, SwitchID: "s"}) {
		t.Fatalf("%+v, %v", rule, err)
	}
	if table, err = table.WithRule("t/ns", &rule); err != nil {
		t.Fatal(err)
	}
	e, _ := table.Entry(x.Base())
	if floor := Remove(e, table.DecideByRule(x, "")); floor != nil {
		t.Errorf("a floor stays: %+v", floor)
	}
	// The same cluster as before is no move.
	if r, err := SetRule(table, "t", "a", "s", ""); err != nil || r.Epoch != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := SetRule(table, "t/ns", "b", "other", ""); err != nil || r != rule {
		t.Errorf("setting a rule again gives %+v, %v", r, err)
	}
}

func TestARemovedRuleLeavesItsEpochBehind(t *testing.T) {
	table := mustWith(t, Empty(), []Rule{{Scope: "", Cluster: "a"}, {Scope: "t", Cluster: "b", Epoch: 3}, {Scope: "t/ns", Cluster: "b", Epoch: 1}, {Scope: "u", Cluster: "a"}},
		Entry{Topic: "persistent://t/ns/x", Epoch: 6})
	is := func(scope string, want *Rule) {
		t.Helper()
		got, err := RemoveRule(table, scope, "")
		if err != nil || (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("RemoveRule(%q) = %+v, %v; want %+v", scope, got, err, want)
		}
	}
	is("t/ns", nil)                      // the same cluster, and t has a higher epoch
	is("t", &Rule{Scope: "t", Epoch: 7}) // to another cluster: above the floor in it
	is("u", nil)                         // never moved
	is("", &Rule{Scope: "", Epoch: 7})   // from a to nothing
	is("none", nil)                      // no such rule
	if _, err := RemoveRule(table, "a b", ""); err == nil {
		t.Error("a bad scope is accepted")
	}
	if _, err := SetRule(table, "a b", "a", "", ""); err == nil {
		t.Error("a bad scope is accepted")
	}
}

func TestNextEpochIsAboveAll(t *testing.T) {
	if NextEpoch() != 1 || NextEpoch(3, 9, 2) != 10 {
		t.Error("NextEpoch is wrong")
	}
}
