package admin_test

import (
	"strings"
	"testing"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/store"
)

// SW-16: a topic that drains is its switch's alone, for as long as that takes. Whoever wants something else is told which one, and what to do.
func TestATopicThatDrainsIsLeftAloneAndExplained(t *testing.T) {
	r := newRig(t, "p1")
	drain := route.Drain{From: "a", Gone: 2, Subs: []route.DrainSub{{Name: "billing"}, {Name: "mail", Leaving: true}}, Tails: []route.Tail{{Ledger: 3, Entry: 4}}}
	e := route.Entry{Topic: topic1, Cluster: "b", State: route.StateDraining, Epoch: 1, SwitchID: "s-1", Attempt: 1, Drain: drain.String()}
	rec := switching.Record{ID: "s-1", Rev: 1, Attempt: 1, Topic: topic1, From: "a", To: "b", Mode: switching.ModeDrain, State: switching.StateDraining, Epoch: 1}
	if err := r.st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: topic1, After: &e}}, Switch: &rec}); err != nil {
		t.Fatal(err)
	}
	r.proxies["p1"].Await(t, topic1, r.served)
	c := r.client("p1")
	now := admin.ChangeOptions{Immediate: true, Who: "somebody"}
	left := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s of a topic that drains is accepted", what)
			return
		}
		for _, want := range []string{"draining from cluster a by switch s-1", "pointsman switch status s-1", "pointsman switch reverse s-1"} {
			if !strings.Contains(refusal(t, err), want) {
				t.Errorf("%s: %q does not say %q", what, refusal(t, err), want)
			}
		}
		if got := r.stored(topic1); got.Drain != e.Drain || got.State != route.StateDraining {
			t.Errorf("%s has changed it: %+v", what, got)
		}
	}
	_, err := c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "c", ChangeOptions: now})
	left("a set", err)
	_, err = c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "b", ChangeOptions: now})
	left("a set to where it goes", err)
	_, err = c.Remove(t.Context(), admin.RemoveRequest{Name: topic1, ChangeOptions: now})
	left("a removal", err)
	_, err = c.Import(t.Context(), admin.ImportRequest{Routes: []admin.ImportItem{{Name: topic1, Cluster: "c"}}, ChangeOptions: now})
	left("an import", err)
	_, err = c.StartSwitch(t.Context(), immediate("c", topic1))
	left("an immediate switch", err)

	x, err := c.Explain(t.Context(), topic1)
	if err != nil {
		t.Fatal(err)
	}
	notes := strings.Join(x.Notes, "\n")
	for _, want := range []string{`read cluster a until they have nothing left there: "billing", "mail" (about to move)`, "2 have moved", "producers and new subscriptions are on cluster b"} {
		if !strings.Contains(notes, want) {
			t.Errorf("explain says %q, not %q", notes, want)
		}
	}
	if x.State != "draining" || x.Cluster != "b" || x.SwitchID != "s-1" {
		t.Errorf("explain = %+v", x)
	}
}
