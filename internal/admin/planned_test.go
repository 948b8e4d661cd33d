package admin_test

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/store"
)

func plan(to string, topics ...string) admin.SwitchRequest {
	return admin.SwitchRequest{Topics: topics, To: to, Who: "ann@ops", Why: "test"}
}

// in runs a test in a bubble of its own time, with two proxies.
func in(t *testing.T, f func(t *testing.T, r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, newRig(t, "p1", "p2")) })
}

// must is a request that succeeds.
func must(t *testing.T) func(st admin.SwitchStatus, err error) admin.SwitchStatus {
	return func(st admin.SwitchStatus, err error) admin.SwitchStatus {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
}

// refused wants an error of a code whose text says something.
func refused(t *testing.T, err error, code admin.Code, says string) {
	t.Helper()
	var e *admin.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(refusal(t, err), says) {
		t.Errorf("error is %v, want %s that says %q", err, code, says)
	}
}

// SW-01: planned is the mode without one. Every state is passed, and any proxy tells of it.
func TestAPlannedSwitchIsAskedForCheckedAndDrivenToItsReceipt(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.clients("p1", topic1, 2, 1)
		r.clients("p2", topic1, 1, 4)
		admintest.Lead(t, r.st.Join(), "p2", &admintest.Topic{})
		st := must(t)(r.switchAndWait(plan("b", "acme/orders/t1")))
		if !st.Done() || st.Mode != "planned" || st.Total != 1 || st.Flipped != 1 || st.Ended != 1 || len(st.Switches) != 1 {
			t.Fatalf("status = %+v", st)
		}
		d := st.Switches[0]
		if d.ID != st.ID || d.Batch != "" || d.From != "a" || d.To != "b" || d.Epoch != 1 || d.Attempt != 1 || d.Who != "ann@ops" || d.Why != "test" || d.Runner != "p2" {
			t.Errorf("record = %+v", d)
		}
		if d.Producers != 3 || d.Consumers != 5 || len(d.Acks) != 6 || len(d.Waiting) != 0 {
			t.Errorf("moved %d producers and %d consumers, %d acks, waiting for %v; want 3, 5, three of each proxy, nobody", d.Producers, d.Consumers, len(d.Acks), d.Waiting)
		}
		if rc := d.Receipt; rc == nil || rc.SubscriptionCount != 1 || rc.DuplicatesForecast != 3 || rc.Verified == "" || len(rc.Steps) < 10 {
			t.Errorf("receipt = %+v", rc)
		}
		r.expect(topic1, "b", 1)
		other := must(t)(r.client("p2").Switch(t.Context(), st.ID))
		if !reflect.DeepEqual(other, st) {
			t.Errorf("p2 says %+v\np1 %+v", other, st)
		}
	})
}

func TestSeveralTopicsAreOneBatchAndThoseThatAreThereAreSkipped(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		r.set(topic2, "b")
		admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		started := must(t)(r.client("p1").StartSwitch(t.Context(), plan("b", topic1, topic2, topic3)))
		if len(started.Skipped) != 1 || started.Skipped[0].Name != topic2 || started.Total != 2 || started.Batch == nil || started.Batch.Count.Total != 2 {
			t.Errorf("started = %+v", started)
		}
		st := must(t)(r.client("p2").WaitSwitch(t.Context(), started.ID, nil))
		if !st.Done() || st.Total != 2 || st.Flipped != 2 || st.Switches[0].Batch != st.ID {
			t.Errorf("status = %+v", st)
		}
		r.expect(topic1, "b", 1)
		r.expect(topic3, "b", 1)
		one := must(t)(r.client("p1").Switch(t.Context(), st.Switches[1].ID))
		if len(one.Switches) != 1 || one.Switches[0].Topic != st.Switches[1].Topic || one.Batch != nil {
			t.Errorf("the second: %+v", one)
		}
	})
}

func TestADryRunOfAPlannedSwitchIsThePreflightAndWritesNothing(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.clients("p2", topic1, 3, 4)
	r.net.Add("p2:7780", http.NotFoundHandler())
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.Preflight = func(req switching.CheckRequest, p *switching.Preflight) error {
			if want := []string{topic1, topic2}; req.From != "a" || req.To != "b" || !req.Reversible || !slices.Equal(req.With, want) || len(req.Handles.Unasked) != 1 || !strings.HasPrefix(req.Handles.Unasked[0], "p2: ") {
				t.Errorf("the preflight is asked for %+v", req)
			}
			p.Add(switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "there is none"})
			return nil
		}
	})
	req := plan("b", topic1, topic2)
	req.DryRun, req.Reversible = true, true
	st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
	if st.State != "planned" || st.ID != "" || len(st.Preflights) != 2 || st.Preflights[0].Verdict != switching.Blocker || st.Preflights[0].Epoch != 1 {
		t.Errorf("dry run = %+v", st)
	}
	if list, err := r.client("p1").Switches(t.Context(), 5); err != nil || len(list.Switches) != 0 {
		t.Errorf("switches = %+v, %v", list, err)
	}
}

func TestWarningsNeedForceAndBlockersStay(t *testing.T) {
	r := newRig(t, "p1")
	verdict := switching.Warning
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.Preflight = func(_ switching.CheckRequest, p *switching.Preflight) error {
			p.Add(switching.Finding{Item: "policies", Verdict: verdict, Evidence: "they differ", Remedy: "make them equal"})
			return nil
		}
	})
	c := r.client("p1")
	force := plan("b", topic1)
	force.Force = true
	_, err := c.StartSwitch(t.Context(), plan("b", topic1))
	refused(t, err, admin.CodePreflight, "they differ")
	verdict = switching.Blocker
	_, err = c.StartSwitch(t.Context(), force)
	refused(t, err, admin.CodePreflight, "nothing overrides them")
	if list, err := c.Switches(t.Context(), 5); err != nil || len(list.Switches) != 0 {
		t.Errorf("refused switches left %+v, %v", list, err)
	}
	verdict = switching.Warning
	if st := must(t)(c.StartSwitch(t.Context(), force)); !st.Running() || len(st.Preflights) != 1 {
		t.Errorf("with --force: %+v", st)
	}
}

func TestATopicWithASwitchUnderWayIsRefusedNamingIt(t *testing.T) {
	r := newRig(t, "p1", "p2") // nobody leads: it stays requested
	first := must(t)(r.client("p1").StartSwitch(t.Context(), plan("b", topic1)))
	_, err := r.client("p2").StartSwitch(t.Context(), plan("c", topic2, topic1))
	refused(t, err, admin.CodeSwitching, first.ID+" of ann@ops from a to b is requested")
	_, err = r.client("p2").StartSwitch(t.Context(), immediate("c", topic1))
	refused(t, err, admin.CodeSwitching, first.ID)
	if _, err := r.client("p2").StartSwitch(t.Context(), plan("c", topic2)); err != nil {
		t.Errorf("another topic: %v", err)
	}
}

// SW-16: of two operators at the same moment at most one has a switch, and whoever has none knows of the other.
func TestOfTwoPlannedSwitchesOfOneTopicAtMostOneBegins(t *testing.T) {
	for range 20 {
		r := newRig(t, "p1", "p2")
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, id := range []string{"p1", "p2"} {
			wg.Go(func() { _, errs[i] = r.client(id).StartSwitch(t.Context(), plan([]string{"b", "c"}[i], topic1)) })
		}
		wg.Wait()
		list, err := r.client("p1").Switches(t.Context(), 5)
		if err != nil {
			t.Fatal(err)
		}
		running, started := 0, 0
		for _, rec := range list.Switches {
			if !rec.State.Over() {
				running++
			} else if !strings.Contains(rec.Note, "withdrawn: ") {
				t.Errorf("note of the one that gave way: %q", rec.Note)
			}
		}
		for _, err := range errs {
			if err == nil {
				started++
			} else {
				refused(t, err, admin.CodeSwitching, "of ann@ops from a to ")
			}
		}
		if running > 1 || running != started {
			t.Errorf("%d switches run, %d operators were told so; want the same, at most one", running, started)
		}
	}
}

func TestAnAbortGivesTheTopicBackAndResumeTriesAgain(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		topic := &admintest.Topic{}
		topic.Fail("replicated") // the topic is fenced until its deadline
		admintest.Lead(t, r.st.Join(), "p1", topic)
		c := r.client("p2")
		st := must(t)(c.StartSwitch(t.Context(), plan("b", topic1)))
		r.proxies["p2"].Await(t, "the fence", isFenced)
		must(t)(c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "bob@ops"}))
		st = must(t)(c.WaitSwitch(t.Context(), st.ID, nil))
		if st.State != "aborted" || st.Switches[0].Note != "aborted by bob@ops" || st.Switches[0].WishBy != "bob@ops" || st.Switches[0].Who != "ann@ops" || st.Flipped != 0 {
			t.Fatalf("status = %+v", st)
		}
		r.expect(topic1, "a", 0)
		_, err := c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "is aborted")
		_, err = c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeConflict, "never left a")

		topic.Fail("")
		must(t)(c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "cat@ops"}))
		st = must(t)(c.WaitSwitch(t.Context(), st.ID, nil))
		if !st.Done() || st.Switches[0].Attempt != 2 || len(st.Switches[0].Acks) != 6 {
			t.Errorf("resumed: %+v", st)
		}
		r.expect(topic1, "b", 1)
		_, err = c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "switch reverse "+st.ID)
		_, err = c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "is done")

		history, err := r.st.History(t.Context(), 9)
		if err != nil {
			t.Fatal(err)
		}
		var by []string
		for _, h := range slices.Backward(history) { // the newest is the first
			by = append(by, h.Who)
		}
		if want := []string{"ann@ops", "ann@ops", "bob@ops", "cat@ops", "cat@ops", "cat@ops"}; !slices.Equal(by, want) {
			t.Errorf("the map was changed by %v, want %v: prepared, fenced, aborted, prepared, fenced, flipped", by, want)
		}
	})
}

func TestAPauseKeepsASwitchFromBeginning(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		c := r.client("p1")
		st := must(t)(c.StartSwitch(t.Context(), plan("b", topic1)))
		st = must(t)(c.PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "bob@ops"}))
		if st.State != "paused" || !st.Running() || st.Switches[0].WishBy != "bob@ops" {
			t.Errorf("paused: %+v", st)
		}
		must(t)(c.PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Who: "cat@ops"})) // twice does no harm
		ctl, _ := admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		ctl.Nudge()
		synctest.Wait()
		r.expect(topic1, "a", 0)
		// Days may have passed: what was fine when it was asked for need not be so any more.
		verdict := switching.Blocker
		r.proxies["p1"].Do(func(f *admintest.Fields) {
			f.Preflight = func(req switching.CheckRequest, p *switching.Preflight) error {
				if req.Topic != topic1 || req.From != "a" || req.To != "b" || req.Mode != switching.ModePlanned {
					t.Errorf("the preflight is asked for %+v", req)
				}
				p.Add(switching.Finding{Item: "subscriptions", Verdict: verdict, Evidence: "3 entries have no copy"})
				return nil
			}
		})
		_, err := c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Force: true})
		refused(t, err, admin.CodePreflight, "3 entries have no copy")
		verdict = switching.Warning
		_, err = c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodePreflight, "3 entries have no copy")
		synctest.Wait()
		if st = must(t)(c.Switch(t.Context(), st.ID)); st.State != "paused" || st.Switches[0].WishBy != "bob@ops" {
			t.Errorf("refused: %+v", st)
		}
		must(t)(c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID, Force: true, Who: "cat@ops"}))
		if st = must(t)(c.WaitSwitch(t.Context(), st.ID, nil)); !st.Done() || st.Switches[0].Attempt != 1 || st.Switches[0].WishBy != "cat@ops" {
			t.Errorf("resumed: %+v", st)
		}
		_, err = c.PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeTooLate, "has ended")
	})
}

func TestResumingAnAbortedSwitchHasAPreflightAndKnowsWhereTheTopicIs(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		c := r.client("p1")
		st := must(t)(c.StartSwitch(t.Context(), plan("b", topic1)))
		must(t)(c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		_, stop := admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		must(t)(c.WaitSwitch(t.Context(), st.ID, nil))
		stop()
		r.proxies["p1"].Do(func(f *admintest.Fields) {
			f.Preflight = func(_ switching.CheckRequest, p *switching.Preflight) error {
				p.Add(switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "there is none"})
				return nil
			}
		})
		_, err := c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodePreflight, "there is none")
		r.proxies["p1"].Do(func(f *admintest.Fields) { f.Preflight = nil })
		other := must(t)(c.StartSwitch(t.Context(), plan("c", topic1)))
		_, err = c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeSwitching, other.ID)
		must(t)(c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: other.ID}))
		_, stop = admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		must(t)(c.WaitSwitch(t.Context(), other.ID, nil))
		stop()
		r.set(topic1, "c") // and back: the epoch has grown by two
		r.set(topic1, "a")
		must(t)(c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		if rec, err := r.st.Switch(t.Context(), st.ID); err != nil || rec.Epoch != 3 || rec.Attempt != 2 || rec.State != switching.StateRequested {
			t.Errorf("record = %+v, %v; want the next attempt with epoch 3", rec, err)
		}
		must(t)(c.AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		_, stop = admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		must(t)(c.WaitSwitch(t.Context(), st.ID, nil))
		stop()
		r.set(topic1, "c")
		_, err = c.ResumeSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
		refused(t, err, admin.CodeConflict, "is on c by now")
	})
}

func TestAReverseIsANewSwitchBackUnlessTheTopicHasMovedOn(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		c := r.client("p2")
		there := must(t)(r.switchAndWait(plan("b", topic1, topic2)))
		back := must(t)(c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: there.ID, Who: "bob", DryRun: true}))
		if back.State != "planned" || len(back.Preflights) != 2 || back.Preflights[0].From != "b" || back.Preflights[0].To != "a" || back.Preflights[0].Epoch != 2 {
			t.Errorf("dry run: %+v", back)
		}
		back = must(t)(c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: there.ID, Who: "bob"}))
		back = must(t)(c.WaitSwitch(t.Context(), back.ID, nil))
		if d := back.Switches[0]; !back.Done() || back.ID == there.ID || back.Total != 2 || d.From != "b" || d.To != "a" || d.Epoch != 2 || d.Who != "bob" || d.Why != "reverse of "+there.ID {
			t.Errorf("reversed: %+v", back)
		}
		r.expect(topic1, "a", 2)
		_, err := c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: there.ID})
		refused(t, err, admin.CodeConflict, "is on a at epoch 2 by now")
		// The other way round and once more: the reverse of the reverse.
		again := must(t)(c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: back.ID}))
		if again = must(t)(c.WaitSwitch(t.Context(), again.ID, nil)); !again.Done() {
			t.Errorf("reversed again: %+v", again)
		}
		r.expect(topic2, "b", 3)
		// It is on b again, but not by the first switch: whatever it did is over.
		_, err = c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: there.ID})
		refused(t, err, admin.CodeConflict, "is on b at epoch 3 by now")
		_, err = c.ReverseSwitch(t.Context(), admin.SwitchCommand{ID: "sw-0"})
		refused(t, err, admin.CodeNotFound, "switch list")
	})
}

func TestAnImmediateSwitchCanBeReversedButNotAborted(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		st := must(t)(r.switchAndWait(immediate("b", topic1)))
		for what, call := range map[string]func(context.Context, admin.SwitchCommand) (admin.SwitchStatus, error){
			"abort": r.client("p1").AbortSwitch, "pause": r.client("p1").PauseSwitch, "resume": r.client("p1").ResumeSwitch,
		} {
			_, err := call(t.Context(), admin.SwitchCommand{ID: st.ID})
			t.Log(what)
			refused(t, err, admin.CodeTooLate, "is in immediate mode")
		}
		admintest.Lead(t, r.st.Join(), "p1", &admintest.Topic{})
		back := must(t)(r.client("p1").ReverseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID}))
		if back = must(t)(r.client("p1").WaitSwitch(t.Context(), back.ID, nil)); !back.Done() || back.Mode != "planned" {
			t.Errorf("reversed: %+v", back)
		}
	})
}

// The leader writes records as well: what the operator wants is written over what the leader wrote last, or not at all.
func TestAWishIsWrittenOverWhatTheLeaderHasWrittenMeanwhile(t *testing.T) {
	r := newRig(t, "p1")
	st := must(t)(r.client("p1").StartSwitch(t.Context(), plan("b", topic1)))
	begin := func(rec switching.Record) {
		rec.Rev++
		rec.State, rec.Runner = switching.StatePrepared, "p1"
		if err := r.st.PutSwitch(t.Context(), rec); err != nil {
			t.Error(err)
		}
	}
	overtaken := &overtakenStore{Memory: r.stores["p1"], before: begin}
	s := admin.New(admin.Config{Store: overtaken, Proxy: r.proxies["p1"], PeerTransport: r.net})
	r.net.Add("hooked:7780", s.Handler())
	t.Cleanup(func() { _ = s.Shutdown(context.Background()) })
	_, err := r.client("hooked").PauseSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})
	refused(t, err, admin.CodeTooLate, "a topic is not left in the middle")
	overtaken.once = sync.Once{}
	if st = must(t)(r.client("hooked").AbortSwitch(t.Context(), admin.SwitchCommand{ID: st.ID})); st.Switches[0].Wish != switching.WishAbort || st.Switches[0].Rev != 4 {
		t.Errorf("record = %+v; want the wish in revision 4, over the leader's third", st.Switches[0])
	}
	if !slices.Equal(st.Switches[0].Waiting, []string{"p1"}) {
		t.Errorf("waiting for %v, want p1, which has not acknowledged", st.Switches[0].Waiting)
	}
}

// overtakenStore runs before once, ahead of the first PutSwitch, with the record as it is stored.
type overtakenStore struct {
	*store.Memory
	once   sync.Once
	before func(switching.Record)
}

func (o *overtakenStore) PutSwitch(ctx context.Context, rec switching.Record) error {
	o.once.Do(func() {
		if have, err := o.Memory.Switch(ctx, rec.ID); err == nil {
			o.before(have)
		}
	})
	return o.Memory.PutSwitch(ctx, rec)
}

func isFenced(tb *route.Table) bool {
	e, ok := tb.Entry(topic1)
	return ok && e.State == route.StateFenced
}
