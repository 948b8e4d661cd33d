package admin_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/controller"
	"pointsman/store"
)

// orders are n topics of namespace acme/orders on cluster a.
func (r *rig) orders(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("persistent://acme/orders/n%03d", i))
	}
	r.listed["a"] = append(r.listed["a"], names...)
	return names
}

// lead drives batches as p1; check changes what preflights find.
func (r *rig) lead(check func(switching.CheckRequest, *switching.Preflight)) {
	topic := &admintest.Topic{}
	admintest.Lead(r.t, r.st.Join(), "p1", topic, func(c *controller.Config) {
		c.Fleet, c.Ground = r.servers["p1"], admintest.Ground(r.listed, check)
	})
}

func namespaced(change func(*admin.SwitchRequest)) admin.SwitchRequest {
	req := admin.SwitchRequest{Namespace: "acme/orders", To: "b", Who: "ann@ops", Why: "test"}
	if change != nil {
		change(&req)
	}
	return req
}

// A namespace moves topic by topic and then is one rule; new topics and clients of the old ones notice nothing; and all of it back.
func TestANamespaceInPlannedModeEndsAsOneRuleAndCanBeReversed(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		names := r.orders(30)
		r.clients("p2", names[3], 2, 1)
		r.lead(nil)
		st := must(t)(r.switchAndWait(namespaced(nil)))
		if !st.Done() || st.Total != 30 || st.Flipped != 30 || st.Batch.Rule != 1 || st.Batch.Removed != 30 || len(st.Switches) != 30 || st.Batch.Scope != "namespace acme/orders" {
			t.Fatalf("status = %+v, batch %+v", st, st.Batch)
		}
		table := r.storedTable()
		if table.Len() != 0 {
			t.Errorf("%d entries are left", table.Len())
		}
		for _, name := range append(names, "persistent://acme/orders/to-come") {
			if d := r.stored(name); d.Cluster != "b" || d.Epoch != 1 || d.Source != route.SourceNamespace {
				t.Errorf("%s: %+v; the epoch is the one that each topic had, or its clients would notice", name, d)
			}
		}
		r.expect("persistent://acme/other/x", "a", 0)
		other := must(t)(r.client("p2").Switch(t.Context(), st.ID))
		if other.State != "done" || len(other.Switches) != 30 {
			t.Errorf("p2 says %+v", other)
		}
		list, err := r.client("p2").Switches(t.Context(), 5)
		if err != nil || len(list.Batches) != 1 || list.Batches[0].ID != st.ID || len(list.Switches) != 5 {
			t.Errorf("list = %+v, %v", list, err)
		}

		r.listed["b"], r.listed["a"] = names, nil
		back := must(t)(r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "bob"}))
		back = must(t)(r.client("p1").WaitSwitch(t.Context(), back.ID, nil))
		if !back.Done() || back.Flipped != 30 || back.Batch.To != "a" || back.Batch.Rule != 2 || back.Batch.Who != "bob" || back.Batch.Why != "reverse of "+st.ID {
			t.Errorf("reversed: %+v, batch %+v", back, back.Batch)
		}
		r.expect(names[7], "a", 2)
		_, err = r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeConflict, "is on a at epoch 2 by now")
	})
}

func TestABatchThatIsBlockedPausesAndTellsWhatToDo(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		names := r.orders(10)
		var mu sync.Mutex
		mended := false
		r.lead(func(c switching.CheckRequest, p *switching.Preflight) {
			mu.Lock()
			defer mu.Unlock()
			if c.Topic == names[4] && !mended {
				p.Add(switching.Finding{Item: "schema", Verdict: switching.Blocker, Evidence: "version 3 differs", Remedy: "upload it"})
			}
			if c.Topic == names[5] {
				p.Add(switching.Finding{Item: "policies", Verdict: switching.Warning, Evidence: "they differ"})
			}
		})
		st := must(t)(r.switchAndWait(namespaced(nil)))
		if st.State != "paused" || st.Batch.Pause.Gate != switching.GatePreflight || st.Flipped != 0 || len(st.Skipped) != 2 || st.Skipped[0].Code != admin.CodePreflight || !strings.Contains(st.Batch.Pause.Why, "2 of 10 topics cannot move") {
			t.Fatalf("status = %+v, batch %+v", st, st.Batch)
		}
		// A warning needs --force, a blocker stays.
		st = must(t)(r.client("p2").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Force: true}))
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "paused" || len(st.Skipped) != 1 || st.Skipped[0].Name != names[4] || st.Skipped[0].Problem != "schema: version 3 differs; upload it" {
			t.Fatalf("status = %+v, batch %+v", st, st.Batch)
		}
		must(t)(r.client("p2").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, OnBlocked: switching.SkipOnBlocked}))
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "incomplete" || st.Flipped != 9 || len(st.Skipped) != 1 || !strings.Contains(st.Batch.Note, "the namespace has no rule") {
			t.Fatalf("status = %+v, batch %+v", st, st.Batch)
		}
		r.expect(names[4], "a", 0)
		mu.Lock()
		mended = true
		mu.Unlock()
		must(t)(r.client("p2").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, OnBlocked: switching.StopOnBlocked}))
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "done" || st.Flipped != 10 || st.Batch.Rule == 0 {
			t.Errorf("status = %+v, batch %+v", st, st.Batch)
		}
		_, err := r.client("p1").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "every topic has moved")
		_, err = r.client("p1").AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "switch reverse "+st.ID)
		_, err = r.client("p1").PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "nothing to pause")
	})
}

func TestABatchIsPausedAndAbortedByItsOperator(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.orders(40)
		r.lead(nil)
		c := r.client("p2")
		st := must(t)(c.StartSwitch(t.Context(), namespaced(func(q *admin.SwitchRequest) { q.Pace = 2 })))
		time.Sleep(5 * time.Second) // of the bubble
		st = must(t)(c.PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "bob", Why: "lunch"}))
		if st.State != "paused" || st.Batch.Pause.Why != "paused by bob: lunch" {
			t.Errorf("paused: %+v", st)
		}
		time.Sleep(time.Minute) // of the bubble
		synctest.Wait()
		st = must(t)(c.Switch(t.Context(), st.ID))
		if st.Flipped < 5 || st.Flipped > 20 {
			t.Errorf("moved %d", st.Flipped)
		}
		moved := st.Flipped
		must(t)(c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		_, err := c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "is not paused")
		time.Sleep(3 * time.Second) // of the bubble
		must(t)(c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "eve"}))
		st = must(t)(c.WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "aborted" || st.Flipped <= moved || st.Flipped > 30 || st.Batch.Rule != 0 || st.Batch.WishBy != "eve" {
			t.Errorf("aborted: %+v, batch %+v", st, st.Batch)
		}
		// What has moved goes back by a batch of those topics.
		back := must(t)(c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, DryRun: true}))
		if back.Total != st.Flipped || back.Batch.Namespace != "" || back.To != "a" {
			t.Errorf("reversed: %+v", back)
		}
	})
}

// Who asks for a namespace of a dead cluster must not be told to look for a fault of the proxy, or to wait for the map store.
func TestTopicsThatCannotBeListedAreTheClustersFault(t *testing.T) {
	r := newRig(t, "p1")
	for _, c := range []struct {
		err  error
		code admin.Code
		text string
	}{
		{errors.New("cluster a: GET /admin/v2/persistent/acme/orders: connection refused"), admin.CodeClusterDown, "--mode failover"},
		{fmt.Errorf("cluster a: %w", context.DeadlineExceeded), admin.CodeClusterDown, "--mode failover"},
		{fmt.Errorf("100001 topics are %w", switching.ErrTooManyTopics), admin.CodeBadRequest, "more than one batch moves"},
		{fmt.Errorf("syncing: %w", store.ErrUnavailable), admin.CodeStoreUnavailable, "until the map store is back"},
	} {
		s := admin.New(admin.Config{Store: r.stores["p1"], Proxy: r.proxies["p1"], Check: r.proxies["p1"].Check, PeerTransport: r.net, Plan: func(context.Context, switching.BatchRequest) (switching.BatchPlan, error) {
			return switching.BatchPlan{}, c.err
		}})
		r.net.Add("p1:7780", s.Handler())
		_, err := r.client("p1").StartSwitch(t.Context(), namespaced(nil))
		refused(t, err, c.code, c.text)
		if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// SW-16.
func TestATopicOfABatchIsRefusedToOthersNamingIt(t *testing.T) {
	r := newRig(t, "p1", "p2") // nobody leads
	names := r.orders(5)
	st := must(t)(r.client("p1").StartSwitch(t.Context(), namespaced(nil)))
	for what, req := range map[string]admin.SwitchRequest{"one topic": plan("c", names[2]), "some": plan("c", names[2], topic1), "all": namespaced(func(q *admin.SwitchRequest) { q.To = "c" }), "at once": immediate("c", names[2])} {
		_, err := r.client("p2").StartSwitch(t.Context(), req)
		t.Log(what)
		refused(t, err, admin.CodeSwitching, "batch "+st.ID+" of ann@ops to b, which is checking, has it")
		refused(t, err, admin.CodeSwitching, "`pointsman switch abort "+st.ID+"`")
	}
	must(t)(r.client("p2").StartSwitch(t.Context(), plan("c", topic1)))
	// Of several at once at most one begins.
	for round := range 10 {
		r := newRig(t, "p1", "p2")
		r.orders(3)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, id := range []string{"p1", "p2"} {
			wg.Go(func() {
				_, errs[i] = r.client(id).StartSwitch(t.Context(), namespaced(func(q *admin.SwitchRequest) { q.To = []string{"b", "c"}[i] }))
			})
		}
		wg.Wait()
		running, err := r.st.RunningBatches(t.Context())
		started := 0
		for _, err := range errs {
			if err == nil {
				started++
			}
		}
		if err != nil || len(running) != started || started > 1 {
			t.Errorf("round %d: %d run, %d were told so (%v)", round, len(running), started, errs)
		}
	}
}

func TestADryRunOfABatchIsASampleAndSaysSo(t *testing.T) {
	r := newRig(t, "p1")
	names := r.orders(1000)
	r.set(names[0], "b")
	r.listed["a"] = append(r.listed["a"], names[1]+"-billing-DLQ")
	req := namespaced(func(q *admin.SwitchRequest) { q.DryRun, q.Percent = true, 50 })
	st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
	if st.State != "planned" || st.ID != "" || len(st.Preflights) != 64 || st.Total < 400 || st.Total > 600 || !strings.Contains(strings.Join(st.Notes, " "), fmt.Sprintf("a sample of 64 of the %d topics", st.Total)) || st.Batch.Forecast.Topics != 64 {
		t.Errorf("dry run = %+v, %+v", st.Notes, st.Batch)
	}
	if b := st.Batch; b.Ends[0] != 1 || b.Ends[len(b.Ends)-1] != st.Total || b.Namespace != "" || b.Scope != "50% of namespace acme/orders" {
		t.Errorf("batch = %+v", b)
	}
	if all, err := r.st.Batches(t.Context(), 5); err != nil || len(all) != 0 {
		t.Errorf("a dry run has left %+v, %v", all, err)
	}
	req.Percent, req.Prefix = 0, "n00"
	st = must(t)(r.client("p1").StartSwitch(t.Context(), req))
	if st.Total != 10 || len(st.Preflights) != 10 || len(st.Notes) != 0 || len(st.Skipped) != 1 { // n001 to n009, and the DLQ of n001
		t.Errorf("by prefix: %+v", st)
	}
}

// What no client of the namespace may notice: the rule sends its topics where their entries did, at the same epoch.
func TestTheRuleOfANamespaceIsNotBelowItsEntries(t *testing.T) {
	r := newRig(t, "p1")
	r.set(topic1, "b")
	r.set(topic2, "b")
	r.set(topic2, "a")
	r.set(topic2, "b") // epoch 3
	r.set("persistent://acme/orders/t3", "c")
	epoch, removed, floors, err := r.servers["p1"].RuleNamespace(t.Context(), switching.Batch{ID: "sw-1", Namespace: "acme/orders", To: "b"})
	if err != nil || epoch != 3 || removed != 2 || floors != 0 {
		t.Errorf("epoch %d, %d removed, %d floors, %v", epoch, removed, floors, err)
	}
	r.expect(topic1, "b", 3)
	r.expect(topic2, "b", 3)
	r.expect("persistent://acme/orders/t3", "c", 1)
	if again, n, _, err := r.servers["p1"].RuleNamespace(t.Context(), switching.Batch{ID: "sw-1", Namespace: "acme/orders", To: "b"}); err != nil || again != 3 || n != 0 {
		t.Errorf("once more: epoch %d, %d removed, %v", again, n, err)
	}
}

// The way back is that of the batch's topics: one that was on the new cluster before, by an entry or without, or has come there since, is none of them.
func TestTheWayBackOfANamespaceIsThatOfWhatTheBatchHasMoved(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		names := r.orders(6)
		there, since, elsewhere := names[5], "persistent://acme/orders/since", "persistent://acme/orders/elsewhere"
		r.set(there, "b")
		r.lead(nil)
		st := must(t)(r.switchAndWait(namespaced(nil)))
		if !st.Done() || st.Flipped != 5 || st.Batch.Rule == 0 {
			t.Fatalf("status = %+v, batch %+v", st, st.Batch)
		}
		r.listed["b"], r.listed["a"] = append(names[1:], since), nil // names[0] was deleted
		r.set(elsewhere, "c")

		dry := must(t)(r.client("p2").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, DryRun: true}))
		said := strings.Join(dry.Batch.Warnings, "\n")
		for _, text := range []string{"3 topics of acme/orders that batch " + st.ID + " has not moved stay where they are", elsewhere, there, since, "its rule goes on naming b", "`pointsman switch start --namespace acme/orders --to a`"} {
			if !strings.Contains(said, text) {
				t.Errorf("the dry run does not say %q: %s", text, said)
			}
		}
		back := must(t)(r.client("p2").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		back = must(t)(r.client("p2").WaitSwitch(t.Context(), back.ID, nil))
		if !back.Done() || back.Flipped != 4 || back.Batch.Rule != 0 || strings.Join(back.Batch.Warnings, "\n") != said {
			t.Errorf("reversed: %+v, batch %+v", back, back.Batch)
		}
		for _, name := range names[1:5] {
			r.expect(name, "a", 2)
		}
		for name, cluster := range map[string]string{there: "b", since: "b", elsewhere: "c"} {
			if d := r.stored(name); d.Cluster != cluster {
				t.Errorf("%s has followed to %s: %+v", name, d.Cluster, d)
			}
		}
	})
}

func TestWhatAResumeAsksForHoldsFromThenOn(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		names := r.orders(2)
		r.lead(func(c switching.CheckRequest, p *switching.Preflight) {
			switch {
			case c.Reversible:
				p.Add(switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "nothing comes back"})
			case c.Topic == names[1]:
				p.Add(switching.Finding{Item: "schema", Verdict: switching.Blocker, Evidence: "version 3 differs"})
			}
		})
		st := must(t)(r.switchAndWait(namespaced(nil)))
		if len(st.Skipped) != 1 {
			t.Fatalf("status = %+v", st)
		}
		_, err := r.client("p1").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, OnBlocked: "leave"})
		refused(t, err, admin.CodeBadRequest, `--on-blocked "leave"`)
		must(t)(r.client("p1").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Reversible: true, OnBlocked: switching.SkipOnBlocked}))
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		if st.Flipped != 0 || len(st.Skipped) != 2 || !st.Batch.Limits.Reversible {
			t.Errorf("without a way back %d moved: %+v, limits %+v", st.Flipped, st.Skipped, st.Batch.Limits)
		}
	})
}

// What is asked for and cannot be had is refused, and not forgotten.
func TestOptionsOfABatchMakeOneOrAreRefused(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		names := r.orders(3)
		r.lead(nil)
		hold := 10.0
		for what, set := range map[string]func(*admin.SwitchRequest){
			"--waves":      func(q *admin.SwitchRequest) { q.Waves = []string{"2"} },
			"--pace":       func(q *admin.SwitchRequest) { q.Pace = 1 },
			"--parallel":   func(q *admin.SwitchRequest) { q.Parallel = 2 },
			"--max-hold":   func(q *admin.SwitchRequest) { q.MaxHoldMillis = &hold },
			"--on-blocked": func(q *admin.SwitchRequest) { q.OnBlocked = switching.SkipOnBlocked },
		} {
			for _, mode := range []switching.Mode{switching.ModePlanned, switching.ModeDrain} {
				req := plan("b", names[0])
				if req.Mode = string(mode); mode == switching.ModeDrain {
					req.Topics = names
				}
				req.DryRun = true
				set(&req)
				if st := must(t)(r.client("p1").StartSwitch(t.Context(), req)); st.Batch == nil {
					t.Errorf("%s with %d topics by name in mode %s is left out: no batch", what, len(req.Topics), mode)
				}
			}
			for _, mode := range []switching.Mode{switching.ModeImmediate, switching.ModeFailover} {
				req := plan("b", names[0])
				req.Mode, req.DryRun = string(mode), true
				set(&req)
				_, err := r.client("p1").StartSwitch(t.Context(), req)
				refused(t, err, admin.CodeUnsupportedMode, what+" is for batches, in mode planned or drain")
			}
		}
		req := plan("b", names...)
		req.Mode, req.Parallel = string(switching.ModeDrain), 1000
		_, err := r.client("p1").StartSwitch(t.Context(), req)
		refused(t, err, admin.CodeBadRequest, "--parallel 1000: want 1 to 64")

		for what, req := range map[string]admin.SwitchRequest{
			"--reversible":         {Topics: names, To: "b", Mode: string(switching.ModeImmediate), Reversible: true},
			"--subscriptions none": {Topics: names, To: "b", Subscriptions: "none"},
		} {
			_, err := r.client("p1").StartSwitch(t.Context(), req)
			refused(t, err, admin.CodeUnsupportedMode, what+" is for")
		}
		st := must(t)(r.switchAndWait(plan("b", names[0])))
		_, err = r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, OnBlocked: switching.SkipOnBlocked})
		refused(t, err, admin.CodeBadRequest, "--on-blocked is for batches")
		_, err = r.client("p1").ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, OnBlocked: switching.SkipOnBlocked})
		refused(t, err, admin.CodeBadRequest, "--on-blocked is for batches")
	})
}

// A part of a namespace goes there, comes back with all of it by a rule that is not above its epochs, and goes there again: nothing of that is taken for somebody else's move.
func TestABatchWhoseRuleHasLeftFloorsCanBeReversed(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.orders(20)
		r.lead(nil)
		share := must(t)(r.switchAndWait(namespaced(func(q *admin.SwitchRequest) { q.Percent = 40 })))
		n := share.Flipped
		if !share.Done() || n < 2 || n > 18 {
			t.Fatalf("status = %+v, batch %+v", share, share.Batch)
		}
		whole := must(t)(r.switchAndWait(namespaced(func(q *admin.SwitchRequest) { q.To = "a" })))
		if b := whole.Batch; !whole.Done() || whole.Flipped != n || !b.Ruled || b.Rule != 0 || b.Removed != n || !strings.Contains(b.Note, fmt.Sprintf("%d topics have moved more often than the rule", n)) {
			t.Fatalf("status = %+v, batch %+v", whole, b)
		}
		moved := whole.Switches[0].Topic
		r.expect(moved, "a", 2)
		back := must(t)(r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: whole.ID, DryRun: true}))
		if back.Total != n || back.To != "b" {
			t.Errorf("back: %+v", back)
		}
		// When the rule has been another one since, nothing is as the batch has left it.
		r.set("acme/orders", "c")
		r.set("acme/orders", "a")
		_, err := r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: whole.ID, DryRun: true})
		refused(t, err, admin.CodeConflict, ": is on a at epoch 4 by now")
	})
}

// Where the rules name the cluster already, topics that never moved keep their epoch, and floors those of the others.
func TestARuleThatChangesNoClusterRaisesNoEpoch(t *testing.T) {
	r := newRig(t, "p1")
	still := "persistent://acme/orders/still"
	rule := func(floors int, want uint64) {
		t.Helper()
		epoch, removed, kept, err := r.servers["p1"].RuleNamespace(t.Context(), switching.Batch{ID: "sw-1", Namespace: "acme/orders", To: "a"})
		if err != nil || epoch != want || removed != 2 || kept != floors {
			t.Errorf("epoch %d, %d removed, %d floors, %v; want epoch %d, 2 removed, %d floors", epoch, removed, kept, err, want, floors)
		}
	}
	r.set(topic1, "b")
	r.set(topic1, "a") // epoch 2
	r.set(topic2, "a") // never moved
	r.expect(still, "a", 0)
	rule(1, 0)
	r.expect(topic1, "a", 2)
	r.expect(topic2, "a", 0)
	r.expect(still, "a", 0)
	// The next move of the namespace takes the floor away.
	for _, name := range []string{topic1, topic2} {
		r.set(name, "b")
	}
	if epoch, removed, kept, err := r.servers["p1"].RuleNamespace(t.Context(), switching.Batch{ID: "sw-2", Namespace: "acme/orders", To: "b"}); err != nil || epoch != 3 || removed != 2 || kept != 0 {
		t.Errorf("epoch %d, %d removed, %d floors, %v", epoch, removed, kept, err)
	}
	r.expect(topic1, "b", 3)
	r.expect(still, "b", 3)
	if n := r.storedTable().Len(); n != 0 {
		t.Errorf("%d entries are left", n)
	}
}
