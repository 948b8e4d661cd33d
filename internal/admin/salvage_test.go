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

// other writes a switch of a command, as one that has moved a topic of its own.
func (r *rig) other(t *testing.T, batch string) {
	t.Helper()
	r.switches++
	now := time.Now()
	rec := switching.Record{
		ID: fmt.Sprintf("%s-%d", batch, r.switches), Rev: 1, Batch: batch, Topic: fmt.Sprintf("persistent://acme/other/t%d", r.switches), From: "a", To: "b", Mode: switching.ModeFailover,
		State: switching.StateDone, Started: now, Flipped: now,
	}
	if err := r.st.PutSwitch(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
}

// A drain that a failover has ended is among what the failover did, though the record of the switch is another command's.
func TestTheDrainsThatAFailoverEndsAreSalvagedWithIt(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		r.drainsBy("sw-drain", topic1, "a", "b")
		only := must(t)(r.switchAndWait(failover("", "b", topic1)))
		if !only.Done() || only.Flipped != 1 || len(only.Switches) != 1 || only.Switches[0].Topic != topic1 || !strings.Contains(only.Switches[0].Note, "sw-drain") {
			t.Errorf("status of an order that has ended a drain alone: %+v", only)
		}
		r.drainsBy("sw-drain-2", topic2, "a", "b")
		r.set("persistent://acme/orders/t3", "a")
		time.Sleep(time.Millisecond) // the ids of orders are times
		both := must(t)(r.switchAndWait(failover("a", "b", topic2, "persistent://acme/orders/t3")))
		if !both.Done() || both.Flipped != 2 || len(both.Switches) != 2 {
			t.Errorf("status of an order with a drain: %+v", both)
		}
		for id, want := range map[string][]string{only.ID: {topic1}, both.ID: {topic2, "persistent://acme/orders/t3"}} {
			if _, err := r.client("p1").Salvage(t.Context(), id, 10, ""); err != nil {
				t.Fatalf("salvage %s: %v", id, err)
			}
			got := slices.Sorted(slices.Values(r.salvaged.Topics))
			if q := r.salvaged; q.From != "a" || q.To != "b" || !slices.Equal(got, want) || len(q.Scopes) != 0 {
				t.Errorf("salvage of %s looks at %+v, want %v", id, q, want)
			}
		}
		// One that stays on b when the others go to c, and an order that does nothing else.
		topic4, topic5 := "persistent://acme/orders/t4", "persistent://acme/orders/t5"
		r.drainsBy("sw-drain-4", topic4, "a", "b")
		r.set(topic5, "a")
		time.Sleep(time.Millisecond)
		third := must(t)(r.switchAndWait(failover("a", "c", topic4, topic5)))
		found, err := r.client("p1").Salvage(t.Context(), third.ID, 10, "")
		if q := r.salvaged; err != nil || q.To != "c" || !slices.Equal(q.Topics, []string{topic5}) || len(found.Unread) != 1 || !strings.HasPrefix(found.Unread[0], topic4) {
			t.Fatalf("salvage of what went two ways looks at %+v: %+v, %v", q, found, err)
		}
		_, own, _ := strings.Cut(strings.TrimSuffix(found.Unread[0], "`"), "switch salvage ")
		if _, err := r.client("p1").Salvage(t.Context(), own, 10, ""); err != nil || r.salvaged.To != "b" || !slices.Equal(r.salvaged.Topics, []string{topic4}) {
			t.Errorf("salvage %q looks at %+v, %v", own, r.salvaged, err)
		}
		// They were on b before, by somebody's decision: the way back is for what the failover has moved.
		_, err = r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: only.ID, DryRun: true})
		refused(t, err, admin.CodeConflict, topic1)
		st, err := r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: both.ID, DryRun: true})
		if err != nil || st.Total != 1 || !strings.Contains(strings.Join(st.Notes, "; "), topic2) {
			t.Errorf("reverse of both: %+v, %v", st, err)
		}
	})
}

// A leader dies after it has ended a drain and before it has written that down in the order, or in the middle of ending it.
func TestTheNextLeaderCountsADrainThatWasEndedOnce(t *testing.T) {
	for name, c := range map[string]struct {
		faults store.Faults
		state  route.State // in which the leader leaves the topic
	}{
		"before it is counted":   {store.Faults{}, route.StateActive},
		"between the two writes": {store.Faults{Hang: true, Only: []string{"Apply"}}, route.StateDraining},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, r *rig) {
				r.dead(t)
				r.drainsBy("sw-drain", topic1, "a", "b")
				st := must(t)(r.client("p1").StartSwitch(t.Context(), failover("a", "b", topic1, topic2)))
				r.work.Find(func(string) (switching.FailoverFacts, error) { // of topic2
					time.Sleep(600 * time.Millisecond) // of the bubble; progress is written down once a second
					return switching.FailoverFacts{Topics: 1}, nil
				})
				r.stores["p1"].SetFaults(c.faults)
				stop := admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
				time.Sleep(300 * time.Millisecond)
				stop()
				if d := r.stored(topic1); d.State != c.state || d.Cluster != "b" {
					t.Fatalf("the leader leaves %s as %+v", topic1, d)
				}
				r.stores["p1"].SetFaults(store.Faults{})
				admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"])
				st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
				if !st.Done() || st.Total != 2 || st.Flipped != 2 || st.Ended != 2 || len(st.Switches) != 2 || st.Order.Unreplicated != 1 {
					t.Errorf("status = %+v, %+v", st, st.Order)
				}
				if d := r.stored(topic1); d.State != route.StateActive || d.Cluster != "b" {
					t.Errorf("the topic is %+v", d)
				}
			})
		})
	}
}

// What an order has moved is found however many switches came after it, and what is not kept any more is not passed over in silence.
func TestAnOldFailoverGoesBackWholeOrNotAtAll(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		var topics []string
		for i := range 50 {
			topic := fmt.Sprintf("persistent://acme/many/t%02d", i)
			r.set(topic, "a")
			topics = append(topics, topic)
		}
		r.dead(t)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		st := must(t)(r.switchAndWait(failover("a", "b", topics...)))
		reverse := func(id string) (admin.SwitchStatus, error) {
			return r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: id, DryRun: true})
		}
		for range 280 { // a batch of others
			r.other(t, "sw-later")
		}
		if back, err := reverse(st.ID); err != nil || back.Total != 50 {
			t.Errorf("%d topics go back, %v", back.Total, err)
		}
		if now := must(t)(r.client("p1").Switch(t.Context(), st.ID)); len(now.Switches) != 50 {
			t.Errorf("%d switches are shown", len(now.Switches))
		}
		// Of an order whose oldest records are dropped, and of one that has none left.
		for id, kept := range map[string]int{"fo-part": 2, "fo-none": 0} {
			o := switching.Failover{ID: id, From: "a", To: "b", Topics: topics[:3], State: switching.FailoverDone, Total: 3, Moved: 3, Done: 3, Asked: time.Now()}
			if err := store.PutFailover(t.Context(), r.st, &o); err != nil {
				t.Fatal(err)
			}
			for range kept {
				r.other(t, id)
			}
			_, err := reverse(id)
			refused(t, err, admin.CodeConflict, fmt.Sprintf("has moved 3 topics and rules, and the map store keeps the records of %d", kept))
			found, err := r.client("p1").Salvage(t.Context(), id, 10, "")
			if kept == 0 {
				refused(t, err, admin.CodeNotFound, "keeps the records of 0")
			} else if err != nil || len(found.Unread) != 1 || !strings.Contains(found.Unread[0], "keeps the records of 2") || len(r.salvaged.Topics) != 2 {
				t.Errorf("salvage of what is left: %+v, %v, of %v", found, err, r.salvaged.Topics)
			}
		}
	})
}
