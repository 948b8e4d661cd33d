package admin_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
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

// drains has a topic drain from one cluster to another, by switch sw-drain: two subscriptions have something left there.
func (r *rig) drains(base, from, to string) {
	r.t.Helper()
	r.drainsBy("sw-drain", base, from, to)
}

func (r *rig) drainsBy(id, base, from, to string) {
	r.t.Helper()
	drain := route.Drain{From: from, Gone: 1, Subs: []route.DrainSub{{Name: "billing"}, {Name: "mail"}}, Tails: []route.Tail{{Ledger: 7, Entry: 9}}}
	rec := switching.Record{ID: id, Rev: 1, Attempt: 1, Topic: base, From: from, To: to, Mode: switching.ModeDrain, State: switching.StateDraining, Epoch: 1, Started: time.Now()}
	entry := route.Entry{Topic: base, Cluster: to, Epoch: 1, State: route.StateDraining, SwitchID: rec.ID, Attempt: 1, Drain: drain.String()}
	if err := r.st.Apply(r.t.Context(), store.Change{Entries: []store.EntryChange{{Topic: base, After: &entry}}, Switch: &rec}); err != nil {
		r.t.Fatal(err)
	}
}

// SW-18: a topic drains from a to b when one of the two dies. It ends on a cluster that lives, its drain is over, and the plan and the record say what is left where.
func TestAFailoverEndsADrainWhicheverOfItsClustersIsDead(t *testing.T) {
	for _, c := range []struct {
		dead, to string
		cluster  string // that the topic is on afterwards
		epoch    uint64
		plan     string
		note     string // of the drain's record
	}{
		{"a", "b", "b", 1, "what 2 subscriptions had not read on cluster a stays there", "`pointsman switch salvage sw-drain` when cluster a is back"},
		{"a", "c", "b", 1, "stays on cluster b, where its producers are", "`pointsman switch salvage sw-drain` when cluster a is back"},
		{"b", "a", "a", 2, "cluster a goes on serving 2 subscriptions, and has the producers again", "cluster b is dead; cluster a goes on serving 2 subscriptions"},
		{"b", "c", "c", 2, "`--to a` would have them go on there", "what 2 subscriptions had not read on cluster a stays there"},
	} {
		for _, how := range []string{"by name", "everything"} {
			t.Run(fmt.Sprintf("%s is dead, to %s, %s", c.dead, c.to, how), func(t *testing.T) {
				in(t, func(t *testing.T, r *rig) {
					r.set("*", "c") // so that nothing but the topic is to be moved
					r.drains(topic1, "a", "b")
					for _, p := range r.proxies {
						p.Health(t, c.dead, "down")
					}
					admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
					req := failover(c.dead, c.to)
					if how == "by name" {
						req.Topics = []string{topic1}
					}
					req.DryRun = true
					dry := must(t)(r.client("p1").StartSwitch(t.Context(), req))
					if all := strings.Join(dry.Failover.Aborts, "; "); !strings.Contains(all, "switch sw-drain of "+topic1) || !strings.Contains(all, c.plan) {
						t.Errorf("the plan says %q, not %q", all, c.plan)
					}
					if m := dry.Failover.Moves; len(m) != 1 || m[0].Epoch != c.epoch {
						t.Errorf("the plan moves %+v, want %s at epoch %d", m, topic1, c.epoch)
					}
					req.DryRun = false
					st := must(t)(r.switchAndWait(req))
					if !st.Done() || st.Total != 1 || st.Flipped != 1 {
						t.Fatalf("status = %+v, %+v", st, st.Order)
					}
					e, _, err := r.st.Entry(t.Context(), topic1)
					if err != nil || e.Cluster != c.cluster || e.Epoch != c.epoch || e.State != route.StateActive || e.Drain != "" {
						t.Errorf("entry = %+v, %v", e, err)
					}
					rec, err := r.st.Switch(t.Context(), "sw-drain")
					if err != nil || rec.State != switching.StateIncomplete || !strings.Contains(rec.Note, c.note) {
						t.Errorf("record = %+v, %v; want %q", rec, err, c.note)
					}
					if all := strings.Join(st.Notes, "; "); !strings.Contains(all, "switch sw-drain of "+topic1+" was "+rec.Note) {
						t.Errorf("the order says %q", all)
					}
					if living := rec.From != c.dead; living && rec.Failover != nil {
						t.Errorf("the record of the drain says that cluster %s is dead, which lives", rec.From)
					}
					if moved := c.cluster != "b"; moved != slices.ContainsFunc(st.Switches, func(d admin.SwitchDetail) bool { return d.From == "b" && d.To == c.to && d.Batch == st.ID }) {
						t.Errorf("switches = %+v", st.Switches)
					}
				})
			})
		}
	}
}

// What the map says decides which cluster is left; where it says two, the operator does.
func TestAFailoverOfATopicThatDrainsAsksWhichClusterIsDead(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.drains(topic1, "a", "b")
		for to, from := range map[string]string{"b": "a", "a": "b"} {
			for _, p := range r.proxies {
				p.Health(t, from, "down")
				p.Health(t, to, "up")
			}
			req := failover("", to, topic1)
			req.DryRun = true
			if st := must(t)(r.client("p1").StartSwitch(t.Context(), req)); st.Failover.From != from {
				t.Errorf("to %s: it leaves %s, want %s", to, st.Failover.From, from)
			}
		}
		_, err := r.client("p1").StartSwitch(t.Context(), failover("", "c", topic1))
		refused(t, err, admin.CodeBadRequest, "add --from a or --from b")
	})
}

// A way back that is under way when a cluster dies is given up first, which leaves a drain, and that is ended.
func TestAFailoverEndsADrainThatIsBeingTakenBack(t *testing.T) {
	for _, dead := range []string{"a", "b"} {
		t.Run(dead+" is dead", func(t *testing.T) {
			in(t, func(t *testing.T, r *rig) {
				r.set("*", "c")
				topic := &admintest.Topic{}
				topic.Left(5)
				admintest.Lead(t, r.st.Join(), "p1", topic)
				r.set(topic1, "a")
				req := plan("b", topic1)
				req.Mode = "drain"
				st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
				time.Sleep(2 * time.Second)
				topic.Hang("tail") // in the fence of the way back
				must(t)(r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Force: true}))
				time.Sleep(2 * time.Second)
				if d := r.stored(topic1); d.State != route.StateFenced || d.Drain == "" {
					t.Fatalf("the way back is %+v", d)
				}
				for _, p := range r.proxies {
					p.Health(t, dead, "down")
				}
				admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
				fo := must(t)(r.switchAndWait(failover(dead, map[string]string{"a": "b", "b": "a"}[dead])))
				if !fo.Done() || fo.Flipped != 1 {
					t.Fatalf("status = %+v, %+v", fo, fo.Order)
				}
				if d := r.stored(topic1); d.State != route.StateActive || d.Cluster == dead {
					t.Errorf("the topic is %+v", d)
				}
				if rec, err := r.st.Switch(t.Context(), st.ID); err != nil || rec.State != switching.StateIncomplete || rec.Return {
					t.Errorf("record = %+v, %v", rec, err)
				}
			})
		})
	}
}

// An answer of the store that is lost does not make a drain that was ended uncounted.
func TestTheEndOfADrainCountsThoughItsAnswerWasLost(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.set("*", "c")
		r.drains(topic1, "a", "b")
		r.dead(t)
		st := must(t)(r.client("p2").StartSwitch(t.Context(), failover("a", "b")))
		r.stores["p1"].SetFaults(store.Faults{LoseAnswers: true, Only: []string{"Apply", "PutSwitch"}})
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		st = must(t)(r.client("p2").WaitSwitch(t.Context(), st.ID, nil))
		if !st.Done() || st.Flipped != 1 || st.Total != 1 || st.Order.Unreplicated != 1 {
			t.Errorf("status = %+v, %+v", st, st.Order)
		}
		r.expect(topic1, "b", 1)
	})
}
