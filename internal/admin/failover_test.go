package admin_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/store"
)

func failover(from, to string, topics ...string) admin.SwitchRequest {
	return admin.SwitchRequest{Topics: topics, From: from, To: to, Mode: "failover", Who: "ann@ops", Why: "a burns"}
}

// dead has all proxies say that a is down, and b up.
func (r *rig) dead(t *testing.T) {
	t.Helper()
	for _, p := range r.proxies {
		p.Health(t, "a", "down")
		p.Health(t, "b", "up")
	}
}

// sees has topics been seen on a.
func (r *rig) sees(names ...string) {
	topics := make([]switching.SeenTopic, len(names))
	for i, name := range names {
		topics[i].Topic = name
	}
	seen := switching.Seen{Cluster: "a"}
	r.work.See(seen.Merge(time.Now(), topics, "", func(string) bool { return true }))
}

// many names n topics.
func many(n int, format string) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf(format, i)
	}
	return names
}

// SW-18: a topic moves, with its facts in the record, its clients sent over, and the epoch counted up.
func TestAFailoverMovesATopicOffADeadClusterByTheLeader(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		r.clients("p1", topic1, 2, 1)
		r.sees(topic1)
		r.work.Find(func(string) (switching.FailoverFacts, error) {
			return switching.FailoverFacts{Topics: 1, Measured: time.Now(), Backlog: 42, Subscriptions: 2, Missing: 1, Again: 7, Names: []string{topic1 + " billing"}}, nil
		})
		// Any proxy takes the order; the one that leads carries it out.
		admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"])
		st := must(t)(r.switchAndWait(failover("", "b", "acme/orders/t1")))
		if !st.Done() || st.Mode != "failover" || st.Total != 1 || st.Flipped != 1 || st.Ended != 1 || len(st.Switches) != 1 || len(st.NotPromised) != 5 {
			t.Fatalf("status = %+v", st)
		}
		o := st.Order
		if o == nil || o.State != switching.FailoverDone || o.From != "a" || o.Created != 1 || o.Again != 7 || o.Backlog != 42 || o.Who != "ann@ops" {
			t.Errorf("order = %+v", o)
		}
		d := st.Switches[0]
		if d.State != switching.StateDone || d.From != "a" || d.To != "b" || d.Epoch != 1 || d.Batch != st.ID || d.Runner != "p2" || d.Producers != 2 || len(d.Acks) != 2 || len(d.Assigned) != 1 {
			t.Errorf("record = %+v", d)
		}
		if f := d.Failover; f == nil || f.Created != 1 || f.Backlog != 42 || len(f.Names) != 1 {
			t.Errorf("facts = %+v", f)
		}
		r.expect(topic1, "b", 1)
		if made := r.work.Made(); !slices.Equal(made, []string{topic1}) {
			t.Errorf("made ready: %v", made)
		}
		// It is an order of the past by now, and found all the same.
		if again, err := r.client("p2").Switch(t.Context(), st.ID); err != nil || !again.Done() {
			t.Errorf("at p2: %+v, %v", again, err)
		}
		_, err := r.client("p1").StartSwitch(t.Context(), failover("a", "b", topic1))
		refused(t, err, admin.CodeAlreadyThere, "nothing on cluster a")
		_, err = r.client("p1").AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "switch reverse "+st.ID)
	})
}

func TestAFailoverFromAClusterThatLivesIsRefusedUnlessForced(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		for _, p := range r.proxies {
			p.Health(t, "a", "up")
			p.Health(t, "b", "up")
		}
		start := func(force, dry bool) (admin.SwitchStatus, error) {
			req := failover("a", "b", topic1)
			req.Force, req.DryRun = force, dry
			return r.client("p1").StartSwitch(t.Context(), req)
		}
		_, err := start(false, false)
		refused(t, err, admin.CodeClusterUp, "--mode planned")
		_, err = start(false, true)
		refused(t, err, admin.CodeClusterUp, "2 are answered by it")
		r.expect(topic1, "a", 0)
		// One of two is no majority.
		r.proxies["p2"].Health(t, "a", "down")
		if st, err := start(false, true); err != nil || st.Failover.Votes != (switching.Votes{Up: 1, Down: 1, Live: 2}) || len(st.Failover.Views) != 2 {
			t.Errorf("a tie: %+v, %v", st.Failover, err)
		}
		r.proxies["p2"].Health(t, "a", "up")
		st := must(t)(start(true, false))
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if !st.Done() {
			t.Errorf("forced: %+v", st)
		}
		r.expect(topic1, "b", 1)
		r.proxies["p1"].Health(t, "b", "down")
		r.proxies["p2"].Health(t, "b", "down")
		_, err = r.client("p1").StartSwitch(t.Context(), failover("b", "a", topic1))
		if err != nil {
			t.Errorf("from a dead cluster to one that lives: %v", err)
		}
		_, err = r.client("p1").StartSwitch(t.Context(), failover("a", "b", topic2))
		refused(t, err, admin.CodeClusterUp, "cluster a answers")
		for _, p := range r.proxies {
			p.Health(t, "a", "down")
		}
		_, err = r.client("p1").StartSwitch(t.Context(), failover("a", "b", topic2))
		refused(t, err, admin.CodeClusterDown, "cluster b does not answer either")
	})
}

func TestEverythingOfADeadClusterMovesRulesFirst(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.set("acme/orders", "a")
		r.set("acme/stock", "c")
		r.set(topic1, "a")
		r.set(topic2, "c")
		r.set("persistent://acme/stock/x", "a")
		r.dead(t)
		r.sees("persistent://acme/orders/ruled", topic1, "persistent://other/ns/t", "persistent://acme/stock/elsewhere")
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		req := failover("a", "b")
		req.DryRun = true
		dry := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		var names []string
		for _, m := range dry.Failover.Moves {
			names = append(names, fmt.Sprintf("%s %d/%d", m.Name, m.Facts.Topics, m.Facts.Unknown))
		}
		want := []string{"* 1/0", "acme/orders 1/0", topic1 + " 1/0", "persistent://acme/stock/x 1/1"}
		if !slices.Equal(names, want) {
			t.Errorf("moves %v, want %v", names, want)
		}
		if made := r.work.Made(); len(made) > 0 {
			t.Errorf("a dry run makes %v", made)
		}
		r.expect(topic1, "a", 0)
		st := must(t)(r.switchAndWait(failover("a", "b")))
		if !st.Done() || st.Total != 4 || st.Flipped != 4 {
			t.Fatalf("status = %+v, %+v", st, st.Order)
		}
		if made := r.work.Made(); len(made) != 4 || made[0] != "persistent://other/ns/t" || made[1] != "persistent://acme/orders/ruled" {
			t.Errorf("made ready: %v", made)
		}
		r.expect(topic1, "b", 1)
		r.expect(topic2, "c", r.stored(topic2).Epoch)
		r.expect("persistent://acme/orders/ruled", "b", r.stored("persistent://acme/orders/ruled").Epoch)
		r.expect("persistent://acme/stock/elsewhere", "c", r.stored("persistent://acme/stock/elsewhere").Epoch)
		r.expect("persistent://acme/stock/x", "b", r.stored("persistent://acme/stock/x").Epoch)
		if d := r.stored("persistent://other/ns/t"); d.Cluster != "b" || d.Epoch == 0 {
			t.Errorf("what only the default decided is at %+v", d)
		}
	})
}

// One topic that the new cluster cannot serve must not keep all others of its rule on the dead one, nor be sent where it loses its place: it stays, by an entry of its own.
func TestARuleMovesWithoutTheTopicsThatCannotBeServed(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		const unfit, few = "persistent://other/ns/t", "persistent://other/ns/few"
		r.dead(t)
		r.sees(few, unfit, "persistent://third/ns/x")
		mended := false
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			facts := switching.FailoverFacts{Topics: 1}
			switch {
			case base == unfit && !mended:
				return facts, errors.New("namespace not found")
			case base == few && !mended:
				facts.Problems = []string{few + " has 3 partitions on cluster a and 2 partitions on cluster b"}
			}
			return facts, nil
		})
		req := failover("a", "b")
		req.DryRun = true
		dry := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		p := dry.Failover
		if p.Staying != 2 || len(p.Stays) != 2 || p.Stays[0].Name != few || p.Stays[1].Name != unfit || !strings.Contains(p.Stays[1].Problem, "namespace not found") || len(p.Moves) != 1 || p.Facts.Topics != 1 {
			t.Errorf("the plan is %+v", p)
		}
		if notes := strings.Join(p.Notes, "; "); !strings.Contains(notes, "2 of the 3 topics looked at stay on cluster a") {
			t.Errorf("the plan says %q", notes)
		}
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		st := must(t)(r.switchAndWait(failover("a", "b")))
		slices.SortFunc(st.Failed, func(a, b admin.Detail) int { return strings.Compare(a.Name, b.Name) }) // they were tried at once
		if st.State != "incomplete" || st.Total != 3 || st.Flipped != 1 || len(st.Failed) != 2 || st.Failed[0].Name != few || st.Failed[1].Name != unfit {
			t.Fatalf("status = %+v, %+v", st, st.Order)
		}
		if notes := strings.Join(st.Notes, "; "); !strings.Contains(notes, "moves without 2 topics that cluster b cannot serve: they stay on cluster a") {
			t.Errorf("the order says %q", notes)
		}
		r.expect(unfit, "a", 0)
		r.expect(few, "a", 0)
		r.expect("persistent://third/ns/x", "b", 1)
		r.expect("persistent://other/ns/never-seen", "b", 1)
		// When it is mended they follow, one by one.
		mended = true
		if st = must(t)(r.switchAndWait(failover("a", "b"))); !st.Done() || st.Flipped != 2 {
			t.Fatalf("status = %+v, %+v", st, st.Order)
		}
		r.expect(unfit, "b", 1)
		r.expect(few, "b", 1)
	})
}

// Where nothing of what was seen can move, the order is refused: the new cluster is the trouble, and the plan says of each topic why.
func TestAFailoverOfWhichNothingCanMoveIsRefused(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		r.sees(topic1, topic2)
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			return switching.FailoverFacts{Topics: 1, Problems: []string{base + ": its namespace does not exist on cluster b"}}, nil
		})
		_, err := r.client("p1").StartSwitch(t.Context(), failover("a", "b"))
		refused(t, err, admin.CodePreflight, "namespace does not exist")
		var e *admin.Error
		if !errors.As(err, &e) || len(e.Details) != 2 || e.Details[1].Name != topic2 {
			t.Errorf("details = %+v", e)
		}
		// An operator who knows better is listened to.
		req := failover("a", "b")
		req.Force, req.DryRun = true, true
		if st := must(t)(r.client("p1").StartSwitch(t.Context(), req)); len(st.Failover.Moves) != 1 || len(st.Failover.Facts.Problems) != 2 {
			t.Errorf("forced: %+v", st.Failover)
		}
	})
}

// Too many that cannot be served are no exceptions any more: the rule stays, and nothing is written for them.
func TestARuleStaysWhoseTopicsCannotBeServed(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		r.sees(many(1300, "persistent://acme/many/t%04d")...)
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			if strings.HasSuffix(base, "0") { // enough for a plan
				return switching.FailoverFacts{Topics: 1}, nil
			}
			return switching.FailoverFacts{Topics: 1}, errors.New("refused")
		})
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		st := must(t)(r.switchAndWait(failover("a", "b")))
		if st.State != "incomplete" || st.Flipped != 0 || len(st.Failed) != 1 || !strings.Contains(st.Failed[0].Problem, "too many to be left behind one by one") {
			t.Errorf("status = %+v, %+v", st, st.Order)
		}
		r.expect("persistent://acme/many/t0000", "a", 0)
		if n := r.storedTable().Len(); n != 0 {
			t.Errorf("%d entries were written", n)
		}
	})
}

// What a rule takes is bounded by topic, not in all; and an operator who has waited enough is listened to in the middle of it.
func TestARuleOfManyTopicsMovesThoughTheNewClusterIsSlow(t *testing.T) {
	for _, abort := range []bool{false, true} {
		t.Run(fmt.Sprint("aborted ", abort), func(t *testing.T) {
			in(t, func(t *testing.T, r *rig) {
				r.dead(t)
				r.sees(many(600, "persistent://acme/many/t%03d")...)
				st := must(t)(r.client("p1").StartSwitch(t.Context(), failover("a", "b")))
				r.work.Find(func(string) (switching.FailoverFacts, error) {
					time.Sleep(20 * time.Second) // 600 topics, 16 at a time: 12 minutes
					return switching.FailoverFacts{Topics: 1}, nil
				})
				admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
				time.Sleep(time.Minute)
				want, state := "b", "done"
				if abort {
					want, state = "a", "aborted"
					if _, err := r.client("p2").AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}); err != nil {
						t.Fatal(err)
					}
				}
				st = must(t)(r.client("p2").WaitSwitch(t.Context(), st.ID, nil))
				if st.State != state || len(st.Failed) != 0 {
					t.Errorf("status = %+v, %+v", st, st.Order)
				}
				if took := time.Since(st.Order.Asked); abort && took > 6*time.Minute {
					t.Errorf("the abort came after %v", took)
				}
				if d := r.stored("persistent://acme/many/t000"); d.Cluster != want {
					t.Errorf("the topic is %+v", d)
				}
			})
		})
	}
}

func TestANamespaceMovesWhatOfItIsOnTheDeadCluster(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.set(topic1, "a")
		r.set(topic2, "c")
		r.dead(t)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		req := failover("", "b")
		req.Namespace = "acme/orders"
		st := must(t)(r.switchAndWait(req))
		if !st.Done() || st.Total != 2 {
			t.Fatalf("status = %+v", st)
		}
		r.expect(topic1, "b", 1)
		if d := r.stored(topic2); d.Cluster != "c" {
			t.Errorf("a topic on a third cluster moved: %+v", d)
		}
		if d := r.stored("persistent://other/ns/t"); d.Cluster != "a" {
			t.Errorf("another namespace moved: %+v", d)
		}
		_, err := r.client("p1").StartSwitch(t.Context(), failover("", "b", topic2, "acme/other/x"))
		refused(t, err, admin.CodeBadRequest, "add --from CLUSTER")
	})
}

// What narrows a planned switch down must not be passed over: the rest would move as well.
func TestAFailoverOfAPartIsRefusedAndNotOneOfEverything(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		for _, change := range []func(*admin.SwitchRequest){
			func(q *admin.SwitchRequest) { q.Prefix = "acme/stock/eu-" },
			func(q *admin.SwitchRequest) { q.Namespace, q.Percent = "acme/orders", 1 },
		} {
			req := failover("a", "b")
			change(&req)
			_, err := r.client("p1").StartSwitch(t.Context(), req)
			refused(t, err, admin.CodeUnsupportedMode, "no prefix or share")
			r.expect(topic1, "a", 0)
		}
	})
}

// A planned switch of a topic whose cluster dies is aborted, and the failover goes on from there; a cluster that hangs keeps nobody waiting.
func TestAFailoverAbortsAPlannedSwitchAndGoesOn(t *testing.T) {
	t.Run("refuses", func(t *testing.T) { testAFailoverInAFence(t, (*admintest.Topic).Fail) })
	t.Run("hangs", func(t *testing.T) { testAFailoverInAFence(t, (*admintest.Topic).Hang) })
}

func testAFailoverInAFence(t *testing.T, dies func(c *admintest.Topic, work string)) {
	in(t, func(t *testing.T, r *rig) {
		topic := &admintest.Topic{}
		dies(topic, "tail") // the old cluster, in the fence
		admintest.Lead(t, r.st.Join(), "p1", topic)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		planned := must(t)(r.client("p1").StartSwitch(t.Context(), plan("c", topic1)))
		time.Sleep(2 * time.Second) // of the bubble
		if d := r.stored(topic1); d.State != route.StateFenced {
			t.Fatalf("the planned switch is %+v", d)
		}
		waiting := must(t)(r.client("p1").StartSwitch(t.Context(), plan("b", topic2)))
		must(t)(r.client("p1").PauseSwitch(t.Context(), admin.SwitchCommand{ID: waiting.ID}))
		r.dead(t)
		req := failover("a", "b", topic1, topic2)
		req.DryRun = true
		dry := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		if len(dry.Failover.Aborts) == 0 || !strings.Contains(strings.Join(dry.Failover.Aborts, "; "), planned.ID) {
			t.Errorf("the plan does not name what is aborted: %v", dry.Failover.Aborts)
		}
		began := time.Now()
		st := must(t)(r.switchAndWait(failover("a", "b", topic1, topic2)))
		if !st.Done() || st.Total != 2 {
			t.Fatalf("status = %+v, %+v", st, st.Order)
		}
		if took := time.Since(began); took > 4*time.Second { // the fence has eight left
			t.Errorf("the failover waited %v for a call to the dead cluster", took)
		}
		for _, id := range []string{planned.ID, waiting.ID} {
			if rec, err := r.st.Switch(t.Context(), id); err != nil || rec.State != switching.StateAborted {
				t.Errorf("switch %s is %+v, %v", id, rec, err)
			}
		}
		for _, topic := range []string{topic1, topic2} {
			if d := r.stored(topic); d.Cluster != "b" || d.State != route.StateActive {
				t.Errorf("%s: %+v", topic, d)
			}
		}
	})
}

// What the new cluster lacks and cannot be made is never passed over in silence.
func TestAFailoverIsRefusedWhenSubscriptionsCannotBeMade(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		r.work.Find(func(string) (switching.FailoverFacts, error) {
			return switching.FailoverFacts{Topics: 1, Missing: 1}, errors.New("cluster b has no admin address")
		})
		_, err := r.client("p1").StartSwitch(t.Context(), failover("a", "b", topic1))
		refused(t, err, admin.CodeSubscriptions, "--subscriptions none")
		r.expect(topic1, "a", 0)
		req := failover("a", "b", topic1)
		req.Subscriptions = "none"
		if st := must(t)(r.switchAndWait(req)); !st.Done() {
			t.Errorf("status = %+v", st)
		}
		if made := r.work.Made(); len(made) > 0 {
			t.Errorf("made ready: %v", made)
		}

		// Later than the plan: the topic stays where it is, the others go on, and the order says so.
		asked := false
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			facts := switching.FailoverFacts{Topics: 1}
			if base != topic2 {
				return facts, nil
			}
			if asked {
				return facts, errors.New("refused")
			}
			asked = true
			return facts, nil
		})
		st := must(t)(r.switchAndWait(failover("a", "b", topic2, "acme/orders/t3")))
		if st.State != "incomplete" || st.Flipped != 1 || len(st.Failed) != 1 || st.Failed[0].Name != topic2 || !strings.Contains(st.Failed[0].Problem, "--subscriptions none") {
			t.Errorf("status = %+v", st)
		}
		r.expect(topic2, "a", 0)
		r.expect("persistent://acme/orders/t3", "b", 1)
	})
}

// A leader that ends in the middle is followed by one that goes on; nothing moves twice.
func TestTheNextLeaderGoesOnWithAFailover(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		for i := range 100 {
			r.set(fmt.Sprintf("persistent://acme/many/t%d", i), "a")
		}
		moved := make(chan struct{}, 1000)
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			time.Sleep(time.Second) // of the bubble
			moved <- struct{}{}
			return switching.FailoverFacts{Topics: 1}, nil
		})
		req := failover("a", "b")
		req.Namespace = "acme/many"
		st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		for range 100 { // the plan looks as well
			<-moved
		}
		stop := admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		for range 40 {
			<-moved
		}
		stop()
		before := 0
		for e := range r.storedTable().Each {
			if e.Cluster == "b" {
				before++
			}
		}
		if before == 0 || before >= 100 {
			t.Fatalf("%d topics have moved when the leader ends", before)
		}
		admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"])
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if !st.Done() || st.Total != 101 || st.Flipped != 101 {
			t.Fatalf("status = %+v, %+v", st.State, st.Order)
		}
		history, err := r.st.History(t.Context(), 1000)
		if err != nil {
			t.Fatal(err)
		}
		flips := map[string]int{}
		for _, h := range history {
			for _, c := range h.Entries {
				if c.After != nil && c.After.Cluster == "b" {
					flips[c.Topic]++
				}
			}
		}
		for name, n := range flips {
			if n != 1 {
				t.Errorf("%s moved %d times", name, n)
			}
		}
		if len(flips) != 100 {
			t.Errorf("%d topics moved", len(flips))
		}
	})
}

func TestAnAbortedFailoverLeavesTheRestWhereItIs(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.dead(t)
		for i := range 100 {
			r.set(fmt.Sprintf("persistent://acme/many/t%d", i), "a")
		}
		r.work.Find(func(base string) (switching.FailoverFacts, error) {
			time.Sleep(2 * time.Second)
			return switching.FailoverFacts{Topics: 1}, nil
		})
		req := failover("a", "b")
		req.Namespace = "acme/many"
		st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"])
		time.Sleep(4 * time.Second)
		if _, err := r.client("p1").AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}); err != nil {
			t.Fatal(err)
		}
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "aborted" || st.Flipped == 0 || st.Flipped == 101 {
			t.Errorf("status = %+v, %+v", st.State, st.Order)
		}
	})
}

// Real stores, real proposals: from what proxies say to what an operator reads, and to the move.
func TestADeadClusterIsProposedAndWhenConfiguredMovedOnce(t *testing.T) {
	for _, automatic := range []bool{false, true} {
		t.Run(fmt.Sprint("automatic ", automatic), func(t *testing.T) {
			in(t, func(t *testing.T, r *rig) {
				pair := switching.FailoverPair{From: "a", To: "b", After: time.Minute, Automatic: automatic, Cooldown: 24 * time.Hour}
				stop := admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"], pair)
				proposals := func() []admin.Proposal {
					t.Helper()
					list, err := r.client("p2").Switches(t.Context(), 10)
					clusters, err2 := r.client("p2").Clusters(t.Context())
					if err := errors.Join(err, err2); err != nil {
						t.Fatal(err)
					}
					if !reflect.DeepEqual(list.Proposals, clusters.Proposals) {
						t.Errorf("switch list says %v, clusters ls %v", list.Proposals, clusters.Proposals)
					}
					return list.Proposals
				}
				r.dead(t)
				time.Sleep(50 * time.Second)
				if p := proposals(); len(p) != 0 {
					t.Errorf("too early: %+v", p)
				}
				// A new leader begins to count anew.
				stop()
				admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"], pair)
				time.Sleep(50 * time.Second)
				if p := proposals(); len(p) != 0 {
					t.Errorf("too early after a change of leaders: %+v", p)
				}
				time.Sleep(30 * time.Second)
				synctest.Wait()
				over, err := store.FailoversOver(t.Context(), r.st)
				if err != nil {
					t.Fatal(err)
				}
				if !automatic {
					p := proposals()
					if len(p) != 1 || p[0].From != "a" || p[0].To != "b" || p[0].Command != "pointsman switch start --mode failover --from a --to b" || len(over) != 0 {
						t.Fatalf("proposals %+v, orders %+v", p, over)
					}
					r.expect(topic1, "a", 0)
					r.proxies["p1"].Health(t, "a", "up")
					r.proxies["p2"].Health(t, "a", "up")
					time.Sleep(3 * time.Second)
					if p := proposals(); len(p) != 0 {
						t.Errorf("the cluster is back: %+v", p)
					}
					return
				}
				if len(over) != 1 || !over[0].Automatic || over[0].State != switching.FailoverDone || over[0].Moved != 1 {
					t.Fatalf("orders %+v", over)
				}
				r.expect(topic1, "b", 1)
				// SW-18: it comes back, and dies again with something on it: nothing moves by itself, there or back.
				for _, p := range r.proxies {
					p.Health(t, "a", "up")
				}
				time.Sleep(time.Hour)
				r.expect(topic1, "b", 1)
				r.set(topic2, "a")
				r.dead(t)
				time.Sleep(time.Hour)
				if p := proposals(); len(p) != 1 || !strings.Contains(p[0].Blocked, over[0].ID) {
					t.Errorf("within the cool-down: %+v", p)
				}
				if d := r.stored(topic2); d.Cluster != "a" {
					t.Errorf("moved a second time by itself: %+v", d)
				}
			})
		})
	}
}

// The way back is a batch of planned switches that somebody asks for: of topics by name, or of one namespace; for more the error says the commands.
func TestAFailoverIsReversedByItsID(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		for i := range 80 { // more than one command moves in planned mode without a batch
			topic := fmt.Sprintf("persistent://acme/many/t%02d", i)
			r.set(topic, "a")
			r.listed["b"] = append(r.listed["b"], topic)
		}
		r.dead(t)
		stop := admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		reverse := func(id string) (admin.SwitchStatus, error) {
			return r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: id, DryRun: true, Who: "ann@ops"})
		}
		move := func(change func(*admin.SwitchRequest)) string {
			t.Helper()
			req := failover("a", "b")
			change(&req)
			st := must(t)(r.switchAndWait(req))
			if !st.Done() {
				t.Fatalf("status = %+v, %+v", st, st.Order)
			}
			return st.ID
		}
		topics := move(func(q *admin.SwitchRequest) { q.Topics = slices.Clone(r.listed["b"][:70]) })
		if st, err := reverse(topics); err != nil || st.To != "a" || st.Mode != "planned" || st.Total != 70 {
			t.Errorf("70 topics: %+v, %v", st, err)
		}
		// The rest of the namespace follows with its rule, but the others were not on b by that.
		rest := move(func(q *admin.SwitchRequest) { q.Namespace = "acme/many" })
		_, err := reverse(rest)
		refused(t, err, admin.CodeConflict, "persistent://acme/many/t00 was on b without it")
		// A namespace with nothing else goes back as one.
		r.set("acme/alone", "a")
		r.listed["b"] = append(r.listed["b"], "persistent://acme/alone/x")
		alone := move(func(q *admin.SwitchRequest) { q.Namespace = "acme/alone" })
		if st, err := reverse(alone); err != nil || st.To != "a" || st.Total != 1 {
			t.Errorf("a namespace: %+v, %v", st, err)
		}
		// Everything: step by step, and the error says which.
		r.set("persistent://acme/single/x", "a") // and what goes back by name
		r.listed["b"] = append(r.listed["b"], "persistent://acme/single/x")
		all := move(func(*admin.SwitchRequest) {})
		_, err = reverse(all)
		refused(t, err, admin.CodeConflict, "step by step")
		var e *admin.Error
		if !errors.As(err, &e) || len(e.Details) != 2 || e.Details[0].Name != "*" || !strings.Contains(e.Details[0].Problem, "routes set '*' a") ||
			e.Details[1].Problem != "`pointsman switch start --topic persistent://acme/single/x --to a`" {
			t.Errorf("details = %+v", e)
		}
		// What has moved on is not moved back.
		r.set(r.listed["b"][0], "c")
		_, err = reverse(topics)
		refused(t, err, admin.CodeConflict, "persistent://acme/many/t00 is on c by now")
		stop()
		r.set("persistent://acme/many/new", "a")
		st := must(t)(r.client("p1").StartSwitch(t.Context(), failover("a", "b", "persistent://acme/many/new")))
		_, err = reverse(st.ID)
		refused(t, err, admin.CodeTooLate, "wait for its end")
	})
}
