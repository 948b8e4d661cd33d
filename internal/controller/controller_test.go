package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

func TestAPlannedSwitchEndsOnTheNewClusterWithAReceipt(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1", "p2")
		w.topic.failures["replicated"], w.topic.failures["carry"], w.topic.failures["read back"] = 2, 1, 1
		w.request("sw-1")
		rec, e := w.run(w.controller("p1", w.st), "sw-1")
		if want := (route.Entry{Topic: base, Cluster: "b", Epoch: 1, SwitchID: "sw-1", Attempt: 1}); rec.State != switching.StateDone || e != want {
			t.Fatalf("%s (%s), entry %+v", rec.State, rec.Note, e)
		}
		rc := rec.Receipt
		if rc == nil || rc.HoldMillis <= 0 || rc.HoldMillis > 1000 || rc.Evicted || rc.SubscriptionCount != 1 || rc.DuplicatesForecast != 4 || len(rc.Acks) != 6 || rc.Tail[base] != "7:41" || rc.Verified != "all there" {
			t.Errorf("receipt: %+v", rc)
		}
		for _, a := range rc.Acks {
			if a.Attempt != 1 || a.Claims != nil {
				t.Errorf("the receipt has the ack %+v, want those of the attempt, without the producers' names", a)
			}
		}
		times := map[string]int{}
		for _, step := range rc.Steps {
			times[step.Work] += max(step.Times, 1)
		}
		if rc.First[base] != "9:41" || times["replicated"] != 3 || times["write fenced"] != 1 || times["verify"] != 1 {
			t.Errorf("receipt: first %v, steps %+v", rc.First, rc.Steps)
		}
		if !rec.Deadline.Equal(rec.Flipped.Add(switching.EvictLimit)) {
			t.Errorf("flipped at %v, the deadline of the acks is %v", rec.Flipped, rec.Deadline)
		}
		if rec.Assigned[base] != "broker-1:6650" || rec.Runner != "p1" || rec.Flipped.IsZero() || rec.Ended.IsZero() {
			t.Errorf("record: %+v", rec)
		}
		if w.topic.calls["warm"] != 1 || w.topic.calls["replicated"] != 3 || w.topic.calls["carry"] < 2 || w.topic.calls["read back"] != 2 || w.topic.calls["evict"] != 0 {
			t.Errorf("calls: %v", w.topic.calls)
		}
		history, err := w.st.History(t.Context(), 10)
		if err != nil || len(history) != 3 {
			t.Errorf("%d changes of the map (%v), want prepared, fenced and flipped", len(history), err)
		}
	})
}

// Promise 3: what each subscription has left after the flip is held against what was carried. It is for the receipt: the switch is done, also when nothing can be read any more.
func TestTheReceiptHoldsTheSubscriptionsAgainstThePlan(t *testing.T) {
	for failures, verified := range map[int]string{0: "all there", 1: "not compared: cluster a: verify: no answer"} {
		in(t, func(t *testing.T) {
			w := newWorld(t, "p1")
			w.topic.failures["differs later"], w.topic.failures["verify"] = 1, failures
			w.request("sw-1")
			rec, e := w.run(w.controller("p1", w.st), "sw-1")
			if rec.State != switching.StateDone || e.Cluster != "b" || !strings.Contains(rec.Note, "subscription s: 2 more") || strings.Contains(rec.Note, "could not be compared") != (failures > 0) {
				t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
			}
			subs := rec.Receipt.Subscriptions
			if rec.Receipt.Verified != verified || rec.Receipt.DuplicatesForecast != 4 || len(subs) != 1 || subs[0].After == nil || *subs[0].After != (switching.After{Backlog: 12, Difference: 2}) {
				t.Errorf("receipt %+v, want what was found of the subscription, and %q", rec.Receipt, verified)
			}
		})
	}
}

func TestAnUncleanAckHasTheOldClusterUnloadTheTopic(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.clean.Store(false)
		w.topic.failures["evict"] = 2 // nothing goes on before it is done
		w.request("sw-1")
		rec, _ := w.run(w.controller("p1", w.st), "sw-1")
		if rec.State != switching.StateDone || !rec.Receipt.Evicted || w.topic.calls["evict"] != 3 {
			t.Errorf("%s, note %q, calls %v", rec.State, rec.Note, w.topic.calls)
		}
	})
}

// P8: a member that has promised to hold its publishes is waited for until it does, and not blocked on for ever; one that was back in between counts anew.
func TestAMemberThatHasPromisedMaxMapAgeIsNotWaitedForAfterwards(t *testing.T) {
	const age = time.Minute
	wait := age + switching.AgeMargin(age)
	for name, c := range map[string]struct {
		promised time.Duration
		pass     time.Duration // until the switch is asked for
		back     bool          // for a moment, in between
		want     switching.State
		note     string
	}{
		"in time":      {promised: age, pass: wait + 2*rosterEvery, want: switching.StateDone, note: "p2: not seen for longer than max_map_age"},
		"while it has": {promised: age, pass: wait - 10*time.Second, want: switching.StateDone, note: "p2: not seen for longer than max_map_age"},
		"too early":    {promised: age, pass: age, want: switching.StateAborted, note: "by its max_map_age"},
		"it was back":  {promised: age, pass: wait, back: true, want: switching.StateAborted, note: "by its max_map_age"},
		"no promise":   {pass: 10 * wait, want: switching.StateAborted, note: "not acknowledged by p2 (not running or cut off from the store; start it, or forget it"},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				away := w.st.Join()
				p2 := store.Proxy{ID: "p2", Incarnation: "i-p2", MaxMapAgeMillis: c.promised.Milliseconds()}
				register := func() {
					if err := away.Register(t.Context(), p2); err != nil {
						t.Fatal(err)
					}
				}
				register()
				away.Expire()
				ctrl := w.controller("p1", w.st)
				ended := make(chan struct{})
				ctx, stop := context.WithCancel(t.Context())
				go func() { defer close(ended); _ = ctrl.Run(ctx) }()
				time.Sleep(c.pass / 2) // of the bubble
				if c.back {
					register()
					away.Expire()
				}
				time.Sleep(c.pass / 2)
				w.request("sw-1")
				time.Sleep(switching.PrepareLimit + switching.FenceLimit)
				rec, err := w.st.Switch(t.Context(), "sw-1")
				if err != nil || rec.State != c.want || !contains(rec.Note, c.note) {
					t.Errorf("%s (%s), %v; want %s with %q", rec.State, rec.Note, err, c.want, c.note)
				}
				if evicted := w.topic.calls["evict"] > 0; evicted != (c.want == switching.StateDone) {
					t.Errorf("evicted on the old cluster: %v", evicted)
				}
				stop()
				<-ended
			})
		})
	}
}

// SW-08, C4, C5: whatever is not as it must be gives the topic back, and the record says why.
func TestASwitchThatCannotBeSafeGivesTheTopicBack(t *testing.T) {
	for name, change := range map[string]func(*world){
		"entries are not replicated": func(w *world) { w.topic.failures["replicated"] = -1 },
		"no answer":                  func(w *world) { w.topic.failures["carry"] = -1 },
		"past the proxies":           func(w *world) { w.topic.foreign = `producer "x" from 10.0.0.9:5` },
		"clients of no proxy: producer \"stranger\" from 10.0.0.9:4711": func(w *world) {
			w.topic.publishers = []switching.Publisher{{Name: "p-p1"}, {Name: "stranger", Text: `producer "stranger" from 10.0.0.9:4711`}}
		},
		"subscription \"s\" of " + base + ": 3 entries that are not acknowledged have no copy on cluster b": func(w *world) { w.topic.missing = 3 },
		"p1": func(w *world) { w.mute.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				change(w)
				w.request("sw-1")
				rec, e := w.run(w.controller("p1", w.st), "sw-1")
				if rec.State != switching.StateAborted || e.Cluster == "b" || e.State != route.StateActive || e.Epoch != 0 {
					t.Errorf("%s, entry %+v", rec.State, e)
				}
				if entries, err := w.st.Entries(t.Context()); err != nil || len(entries) != 0 {
					t.Errorf("a topic that rules decide has been left with %+v, %v", entries, err)
				}
				if want := name; !contains(rec.Note, want) {
					t.Errorf("the note %q does not say %q", rec.Note, want)
				}
				if n := w.topic.calls["carry"]; w.topic.missing > 0 && n != 1 {
					t.Errorf("carried %d times: trying again brings no copy", n)
				}
				if rec.Receipt == nil || rec.Receipt.HoldMillis > float64(switching.FenceLimit.Milliseconds())+1000 {
					t.Errorf("receipt: %+v", rec.Receipt)
				}
			})
		})
	}
}

func contains(text, part string) bool {
	for i := range len(text) - len(part) + 1 {
		if text[i:i+len(part)] == part {
			return true
		}
	}
	return false
}

// C7: the leader dies before each step in turn, and also right after the step was done. Another one ends the switch, done or aborted,
// never fenced; nothing is done twice that must not be.
func TestALeaderThatDiesAtAnyStepIsSucceeded(t *testing.T) {
	diesAtEachStep(t, 12, func(w *world) { w.request("sw-1") }, func(t *testing.T, w *world, rec switching.Record) {
		switch e := w.entry(); {
		case rec.State == switching.StateDone && e.Cluster == "b" && e.State == route.StateActive && e.Epoch == 1:
			if rec.Receipt == nil || rec.Receipt.HoldMillis <= 0 {
				t.Error("the receipt does not tell how long the topic was fenced")
			}
			if rec.Receipt != nil && rec.Receipt.Verified != "all there" {
				t.Errorf("whoever comes after the flip does not know where the old cluster ended: %s", rec.Receipt.Verified)
			}
		case rec.State == switching.StateAborted && e == (route.Entry{}):
			t.Errorf("aborted without need: %s", rec.Note)
		default:
			t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
		}
	})
}

// The same of a switch that is given up, of a topic that rules decide: they decide it again, whoever has died when, and its epoch is what it was.
func TestALeaderThatDiesAtAnyStepOfAnAbortLeavesTheTopicToTheRules(t *testing.T) {
	floor := route.Entry{Topic: base, Epoch: 4}
	diesAtEachStep(t, 11, func(w *world) {
		w.topic.foreign = "somebody"
		w.set(nil, &floor)
		w.requestAt("sw-1", floor.Epoch+1)
	}, func(t *testing.T, w *world, rec switching.Record) {
		if e := w.entry(); rec.State != switching.StateAborted || e != floor || !strings.Contains(rec.Note, "somebody") {
			t.Errorf("%s (%s), entry %+v, want %+v", rec.State, rec.Note, e, floor)
		}
		if rec.Receipt == nil || len(rec.Receipt.Acks) < 4 {
			t.Errorf("the receipt does not tell what the proxies have said: %+v", rec.Receipt)
		}
	})
}

// diesAtEachStep has the leader of a switch die before each of its steps in turn, and right after it: then nobody hears its answer. Another one ends the
// switch. It has steps at least.
func diesAtEachStep(t *testing.T, least int, prepare func(*world), judge func(*testing.T, *world, switching.Record)) {
	steps := 0
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1", "p2")
		prepare(w)
		c := w.controller("p1", w.st)
		c.began = func(switching.Step) { steps++ }
		rec, _ := w.run(c, "sw-1")
		judge(t, w, rec)
	})
	if steps < least {
		t.Fatalf("%d steps are too few to be a switch", steps)
	}
	for n := 1; n <= steps; n++ {
		for _, lost := range []bool{false, true} {
			t.Run(fmt.Sprintf("step %d, its answer lost: %v", n, lost), func(t *testing.T) {
				in(t, func(t *testing.T) {
					w := newWorld(t, "p1", "p2")
					prepare(w)
					mine := w.st.Join()
					first := w.controller("p1", mine)
					ctx, die := context.WithCancel(t.Context())
					seen := 0
					first.began = func(step switching.Step) {
						switch seen++; {
						case seen == n && lost:
							mine.SetFaults(store.Faults{LoseAnswers: true})
						case seen == n, seen == n+1 && lost:
							die()
							mine.SetFaults(store.Faults{Err: store.ErrUnavailable})
						}
					}
					dead := make(chan struct{})
					go func() {
						defer close(dead)
						_ = first.Run(ctx)
					}()
					for ctx.Err() == nil { // with fewer steps than the first time, it may be over before the n-th
						if rec, err := w.st.Switch(t.Context(), "sw-1"); err == nil && rec.State.Over() {
							die()
						}
						time.Sleep(time.Millisecond) // of the bubble
					}
					<-dead
					rec, _ := w.run(w.controller("p2", w.st.Join()), "sw-1")
					judge(t, w, rec)
				})
			})
		}
	}
}

func TestAnOperatorAbortsAndAsksAgain(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.failures["replicated"] = -1
		w.request("sw-1")
		c := w.controller("p1", w.st)
		c.began = func(step switching.Step) {
			if step.Work != switching.WorkReplicated {
				return
			}
			rec, err := w.st.Switch(t.Context(), "sw-1")
			if err != nil || rec.Wish == switching.WishAbort {
				return
			}
			rec.Rev++
			rec.Wish, rec.WishBy = switching.WishAbort, "bob"
			if err := w.st.PutSwitch(t.Context(), rec); err != nil {
				t.Errorf("wish: %v", err)
			}
		}
		rec, e := w.run(c, "sw-1")
		if rec.State != switching.StateAborted || rec.Note != "aborted by bob" || e != (route.Entry{}) {
			t.Fatalf("%s (%s), entry %+v", rec.State, rec.Note, e)
		}
		if rec.Receipt.HoldMillis > 2000 {
			t.Errorf("the topic was held for %v ms after it was given up", rec.Receipt.HoldMillis)
		}
		history, err := w.st.History(t.Context(), 9)
		if err != nil || len(history) != 3 || history[0].Who != "bob" || history[2].Who != "alice" {
			t.Errorf("history %+v, %v; want that alice has begun it and bob has ended it", history, err)
		}
		w.topic.failures["replicated"] = 0
		if err := w.st.PutSwitch(t.Context(), rec.Again(time.Now())); err != nil {
			t.Fatal(err)
		}
		rec, e = w.run(w.controller("p1", w.st), "sw-1")
		if rec.State != switching.StateDone || e.Cluster != "b" || e.Attempt != 2 {
			t.Errorf("again: %s (%s), entry %+v", rec.State, rec.Note, e)
		}
		for _, a := range rec.Receipt.Acks {
			if a.Attempt != 2 {
				t.Errorf("the receipt of attempt 2 has an ack of attempt %d", a.Attempt)
			}
		}
	})
}

// A pause holds a switch that has not begun; resumed, it goes on.
func TestAPausedSwitchBeginsWhenItIsResumed(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		rec := w.request("sw-1")
		rec.Rev, rec.Wish = 2, switching.WishPause
		if err := w.st.PutSwitch(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		go func() {
			time.Sleep(time.Minute)
			if _, ok, err := w.st.Entry(t.Context(), base); ok || err != nil {
				t.Errorf("a paused switch has begun: %v", err)
			}
			rec.Rev, rec.Wish = 3, ""
			if err := w.st.PutSwitch(t.Context(), rec); err != nil {
				t.Errorf("resume: %v", err)
			}
		}()
		c := w.controller("p1", w.st)
		rec, _ = w.run(c, "sw-1")
		if rec.State != switching.StateDone || time.Since(rec.Started) < time.Minute {
			t.Errorf("%s after %v: %s", rec.State, time.Since(rec.Started), rec.Note)
		}
	})
}

// A last look that the end of the fence cuts off does not hide what the earlier ones have found (SW-08).
func TestTheReasonOfAnAbortIsWhatWasFoundAndNotThatTheLastLookWasCutOff(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.failures["replicated"], w.topic.hangs = 5, "replicated"
		w.request("sw-1")
		rec, _ := w.run(w.controller("p1", w.st), "sw-1")
		if rec.State != switching.StateAborted || !strings.Contains(rec.Note, "3 entries are not replicated yet") || strings.Contains(rec.Note, "deadline exceeded") {
			t.Errorf("%s: %s", rec.State, rec.Note)
		}
	})
}

// numbers are the metrics of a controller whose name begins with prefix, by state.
func numbers(t *testing.T, c *Controller, name string) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]float64{}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			found[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return found
}

// The leader asks twice a second: the list of all switches is not for it.
func TestTheLeaderCountsWhatRunsAndWhatItEnded(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		mine := w.st.Join()
		mine.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{"Switches"}})
		c := w.controller("p1", mine)
		ended := map[string]float64{"done": 0, "incomplete": 0, "aborted": 0, "returned": 0}
		if have := numbers(t, c, "pointsman_switches_ended_total"); !maps.Equal(have, ended) {
			t.Errorf("ended at first: %v", have)
		}
		if have := numbers(t, c, "pointsman_switches"); len(have) != 0 {
			t.Errorf("a proxy that does not lead counts %v", have)
		}
		w.topic.failures["differs"], w.topic.failures["differs later"] = 2, 1
		w.request("sw-1")
		other := switching.Record{ID: "sw-2", Rev: 1, Attempt: 1, Topic: base + "-2", From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Wish: switching.WishPause, Epoch: 1, Started: time.Now()}
		if err := w.st.PutSwitch(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		c.began = func(step switching.Step) {
			if step.Work == switching.WorkVerify {
				time.Sleep(2 * lookEvery) // of the bubble
				if have := numbers(t, c, "pointsman_switches"); !maps.Equal(have, map[string]float64{"requested": 1, "prepared": 0, "fenced": 0, "evicting": 1, "draining": 0}) {
					t.Errorf("under way: %v", have)
				}
			}
		}
		if rec, _ := w.run(c, "sw-1"); rec.State != switching.StateDone {
			t.Fatalf("%s: %s", rec.State, rec.Note)
		}
		ended["done"] = 1
		if have := numbers(t, c, "pointsman_switches_ended_total"); !maps.Equal(have, ended) {
			t.Errorf("ended: %v", have)
		}
		carried := map[string]float64{"source_position": 0, "producer_and_sequence_id": 1, "publish_time": 0, "end_of_what_was_copied": 0, "no_copy": 0}
		if have := numbers(t, c, "pointsman_switch_subscriptions_total"); !maps.Equal(have, carried) {
			t.Errorf("carried: %v", have)
		}
		if have, want := numbers(t, c, "pointsman_switch_carried_entries_total"), map[string]float64{"in_hand": 3, "repeated": 1, "missing": 0}; !maps.Equal(have, want) {
			t.Errorf("not carried exactly: %v, want %v", have, want)
		}
		if have, want := numbers(t, c, "pointsman_switch_carry_differences_total"), map[string]float64{"fence": 2, "after_flip": 1}; !maps.Equal(have, want) {
			t.Errorf("looks that found differences: %v, want %v", have, want)
		}
	})
}

// Only so many are driven at once. Those that were paused before they began are none of them.
func TestPausedSwitchesTakeNoPlaceFromOthers(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		for n := range maxDriven {
			rec := switching.Record{ID: fmt.Sprintf("paused-%d", n), Rev: 1, Attempt: 1, Topic: fmt.Sprintf("%s-%d", base, n), From: "a", To: "b", Mode: switching.ModePlanned,
				State: switching.StateRequested, Wish: switching.WishPause, Epoch: 1, Started: time.Now().Add(-time.Hour)}
			if err := w.st.PutSwitch(t.Context(), rec); err != nil {
				t.Fatal(err)
			}
		}
		w.request("sw-1")
		if rec, _ := w.run(w.controller("p1", w.st), "sw-1"); rec.State != switching.StateDone {
			t.Errorf("%s: %s", rec.State, rec.Note)
		}
	})
}

// A record that is damaged is said once, and hides no other.
func TestARecordThatCannotBeReadStopsNoOtherSwitch(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.request("sw-1")
		c := w.controller("p1", damaged{w.st})
		if rec, _ := w.run(c, "sw-1"); rec.State != switching.StateDone {
			t.Errorf("%s: %s", rec.State, rec.Note)
		}
	})
}

// damaged is a store with one record that cannot be read.
type damaged struct{ *store.Memory }

func (d damaged) Running(ctx context.Context) ([]switching.Record, error) {
	records, err := d.Memory.Running(ctx)
	return records, errors.Join(err, errors.New("switch sw-0: the stored value is damaged"))
}

// C8: a list of switches that is older than the end of one must not have its subscriptions moved: the new cluster is in use.
func TestASwitchThatIsOverByNowTouchesNoCluster(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		listed := w.request("sw-1")
		c := w.controller("p1", w.st)
		if rec, _ := w.run(c, "sw-1"); rec.State != switching.StateDone {
			t.Fatalf("%s: %s", rec.State, rec.Note)
		}
		clear(w.topic.calls)
		newDriver(c, newUnseen(), listed).drive(t.Context())
		if len(w.topic.calls) != 0 {
			t.Errorf("calls of the clusters after the end: %v", w.topic.calls)
		}
	})
}

// So must one that is to wait since: it may do so for days.
func TestASwitchThatIsToWaitTouchesNoCluster(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		listed := w.request("sw-1")
		waits := listed
		waits.Rev, waits.Wish = 2, switching.WishPause
		if err := w.st.PutSwitch(t.Context(), waits); err != nil {
			t.Fatal(err)
		}
		newDriver(w.controller("p1", w.st), newUnseen(), listed).drive(t.Context())
		if len(w.topic.calls) != 0 {
			t.Errorf("calls of the clusters before the resume: %v", w.topic.calls)
		}
	})
}

// The end of the next attempt is told by who drives that.
func TestADriverOfAnEarlierAttemptTellsNothingOfTheEnd(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		listed := w.request("sw-1")
		next := listed.Again(time.Now())
		for _, state := range []switching.State{switching.StateRequested, switching.StateDone} {
			next.State = state
			if err := w.st.PutSwitch(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			next.Rev++
		}
		c := w.controller("p1", w.st)
		c.cfg.Receipt = func(rec switching.Record) { t.Errorf("it hands out the receipt of attempt %d", rec.Attempt) }
		newDriver(c, newUnseen(), listed).drive(t.Context())
	})
}

// However many switches are asked for, few hold their topics and ask the clusters at once.
func TestSwitchesUnderWayAtOnceAreBounded(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		for i := range maxDriven + 5 {
			rec := switching.Record{ID: fmt.Sprintf("sw-%03d", i), Rev: 1, Attempt: 1, Topic: fmt.Sprintf("persistent://acme/orders/t%d", i), From: "a", To: "b",
				Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: 1, Started: time.Now()}
			if err := w.st.PutSwitch(t.Context(), rec); err != nil {
				t.Fatal(err)
			}
		}
		c := w.controller("p1", w.st)
		var opened atomic.Int64
		c.cfg.Open = func(ctx context.Context, _ switching.Record) (Topic, error) {
			opened.Add(1)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
		defer stop()
		if err := c.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if n := opened.Load(); n != maxDriven {
			t.Errorf("%d switches were under way at once, want %d", n, maxDriven)
		}
	})
}

// An abort gives the topic back to where it was, also when a rule that has come meanwhile would have it elsewhere: nobody has fenced it for that. And it does
// so when nobody can tell what the rules are.
func TestAnAbortDoesNotMoveTheTopicByARuleThatCameMeanwhile(t *testing.T) {
	const before, after, damaged = "before the abort is computed", "after the abort was computed", "the rules cannot be read"
	for _, when := range []string{before, after, damaged} {
		t.Run(when, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				w.topic.failures["replicated"] = -1
				w.request("sw-1")
				h, fenced, changed := &hooked{Memory: w.st.Join()}, false, false
				change := func(now string) {
					if !fenced || changed || when != now {
						return
					}
					changed = true
					w.apply(store.Change{Rules: []store.RuleChange{{Scope: "acme/orders", After: &route.Rule{Scope: "acme/orders", Cluster: "b", Epoch: 1}}}})
				}
				h.after = func(call string, _ int, _ *store.Change) {
					if call == "Rules" {
						change(after)
					}
				}
				c := w.controller("p1", h)
				c.began = func(step switching.Step) {
					if fenced = step.Work == switching.WorkReplicated || fenced; fenced && when == damaged {
						changed = true
						h.SetFaults(store.Faults{Err: errors.New("the stored rules are damaged"), Only: []string{"Rules"}})
					}
					change(before)
				}
				rec, e := w.run(c, "sw-1")
				if want := (route.Entry{Topic: base, Cluster: "a", SwitchID: "sw-1", Attempt: 1}); rec.State != switching.StateAborted || e != want || !changed {
					t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
				}
			})
		})
	}
}

// C1: a call that hangs keeps a topic fenced no longer than an answer that does not come true.
func TestACallThatHangsKeepsNoTopicFencedForLonger(t *testing.T) {
	for _, call := range []string{"tail", "replicated", "carry", "read back", "since"} {
		t.Run(call, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				w.topic.hangs = call
				w.request("sw-1")
				rec, _ := w.run(w.controller("p1", w.st), "sw-1")
				if limit := float64(switching.FenceLimit.Milliseconds()) + 1000; rec.State != switching.StateAborted || rec.Receipt.HoldMillis > limit {
					t.Errorf("%s (%s) after %v ms of a fence", rec.State, rec.Note, rec.Receipt.HoldMillis)
				}
			})
		})
	}
}

// An operator need not wait for what is done before the fence.
func TestASwitchIsGivenUpWhileItsSubscriptionsAreCarriedAhead(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.hangs = "warm"
		rec := w.request("sw-1")
		go func() {
			time.Sleep(3 * time.Second)
			rec.Rev, rec.Wish = 2, switching.WishAbort
			if err := w.st.PutSwitch(t.Context(), rec); err != nil {
				t.Errorf("wish: %v", err)
			}
		}()
		rec, _ = w.run(w.controller("p1", w.st), "sw-1")
		if took := rec.Ended.Sub(rec.Started); rec.State != switching.StateAborted || took > 5*time.Second {
			t.Errorf("%s (%s) after %v", rec.State, rec.Note, took)
		}
	})
}

// Nor for a cluster that does not answer within the fence, and clients wait as little.
func TestASwitchIsGivenUpWhileAClusterHangsInTheFence(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.hangs = "carry"
		w.request("sw-1")
		c := w.controller("p1", w.st)
		c.began = func(step switching.Step) {
			if rec, err := w.st.Switch(t.Context(), "sw-1"); step.Work == switching.WorkCarry && (err != nil || rec.Wish == "") {
				rec.Rev, rec.Wish = rec.Rev+1, switching.WishAbort
				if err := w.st.PutSwitch(t.Context(), rec); err != nil {
					t.Errorf("wish: %v", err)
				}
			}
		}
		rec, _ := w.run(c, "sw-1")
		if limit := float64(4 * lookEvery.Milliseconds()); rec.State != switching.StateAborted || rec.Note != "aborted by the operator" || rec.Receipt.HoldMillis > limit {
			t.Errorf("%s (%s) after %v ms of a fence", rec.State, rec.Note, rec.Receipt.HoldMillis)
		}
	})
}

// What trying again does not mend is not tried until the limit.
func TestAClusterThatCanNeverBeWorkedOnEndsTheSwitchAtOnce(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.request("sw-1")
		c := w.controller("p1", w.st)
		c.cfg.Open = func(context.Context, switching.Record) (Topic, error) {
			return nil, fmt.Errorf("cluster b has no admin address: %w", ErrHopeless)
		}
		rec, _ := w.run(c, "sw-1")
		if rec.State != switching.StateAborted || !strings.Contains(rec.Note, "no admin address") || rec.Receipt.HoldMillis > 1000 {
			t.Errorf("%s (%s) after %v ms of a fence", rec.State, rec.Note, rec.Receipt.HoldMillis)
		}
	})
}
