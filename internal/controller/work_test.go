package controller

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// hooked is a store that notes what is called, and has others act between two calls of the driver.
type hooked struct {
	*store.Memory
	mu    sync.Mutex
	calls []string
	after func(call string, nth int, change *store.Change) // after it succeeded
}

func (h *hooked) called(name string, change *store.Change) {
	h.mu.Lock()
	h.calls = append(h.calls, name)
	n := 0
	for _, c := range h.calls {
		if c == name {
			n++
		}
	}
	h.mu.Unlock()
	if h.after != nil {
		h.after(name, n, change)
	}
}

func (h *hooked) Switch(ctx context.Context, id string) (switching.Record, error) {
	r, err := h.Memory.Switch(ctx, id)
	h.called("Switch", nil)
	return r, err
}

func (h *hooked) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	e, ok, err := h.Memory.Entry(ctx, topic)
	h.called("Entry", nil)
	return e, ok, err
}

func (h *hooked) Rules(ctx context.Context) ([]route.Rule, error) {
	rules, err := h.Memory.Rules(ctx)
	h.called("Rules", nil)
	return rules, err
}

func (h *hooked) Proxies(ctx context.Context) ([]store.Proxy, error) {
	all, err := h.Memory.Proxies(ctx)
	h.called("Proxies", nil)
	return all, err
}

func (h *hooked) Tombstones(ctx context.Context) ([]store.Tombstone, error) {
	all, err := h.Memory.Tombstones(ctx)
	h.called("Tombstones", nil)
	return all, err
}

func (h *hooked) Acks(ctx context.Context, id string) ([]switching.Ack, error) {
	all, err := h.Memory.Acks(ctx, id)
	h.called("Acks", nil)
	return all, err
}

func (h *hooked) Apply(ctx context.Context, c store.Change) error {
	err := h.Memory.Apply(ctx, c)
	if err == nil {
		h.called("Apply", &c)
	}
	return err
}

// apply is a change by somebody else.
func (w *world) apply(c store.Change) {
	w.t.Helper()
	c.Who = "somebody else"
	if err := w.st.Apply(w.t.Context(), c); err != nil {
		w.t.Errorf("somebody else's change: %v", err)
	}
}

func (w *world) set(before, after *route.Entry) {
	w.t.Helper()
	w.apply(store.Change{Entries: []store.EntryChange{{Topic: base, Before: before, After: after}}})
}

// entry is what the map has of the topic; the zero entry when that is nothing.
func (w *world) entry() route.Entry {
	w.t.Helper()
	e, _, err := w.st.Entry(w.t.Context(), base)
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

// A topic that rules decide is prepared only if the same rules decide it still: each of those above it is compared in the write, absent
// ones too.
func TestATopicWhoseRulesHaveChangedIsNotPrepared(t *testing.T) {
	for scope, epoch := range map[string]uint64{"acme/orders": 1, "acme": 0, "": 1} {
		for name, nth := range map[string]int{"before the write is computed": 2, "after the write was computed": 3} { // the first reading is before what is done ahead
			t.Run(name+", "+scope, func(t *testing.T) {
				in(t, func(t *testing.T) {
					w := newWorld(t, "p1")
					h := &hooked{Memory: w.st}
					h.after = func(call string, n int, _ *store.Change) {
						if call == "Rules" && n == nth {
							w.apply(store.Change{Rules: []store.RuleChange{{Scope: scope, After: &route.Rule{Scope: scope, Cluster: "b", Epoch: epoch}}}})
						}
					}
					w.request("sw-1")
					rec, e := w.run(w.controller("p1", h), "sw-1")
					if rec.State != switching.StateAborted || e != (route.Entry{}) || !strings.Contains(rec.Note, "cluster b") {
						t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
					}
					if history, err := w.st.History(t.Context(), 9); err != nil || len(history) != 1 {
						t.Errorf("%d changes of the map (%v), want the one of the rule", len(history), err)
					}
				})
			})
		}
	}
}

// A rule that leads to the same cluster at a later epoch ends the switch: the epoch that it would write is behind.
func TestARuleOfALaterEpochEndsTheSwitch(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		h := &hooked{Memory: w.st}
		h.after = func(call string, n int, _ *store.Change) {
			if call == "Rules" && n == 2 {
				w.apply(store.Change{Rules: []store.RuleChange{{Scope: "acme", After: &route.Rule{Scope: "acme", Cluster: "a", Epoch: 7}}}})
			}
		}
		w.request("sw-1")
		rec, e := w.run(w.controller("p1", h), "sw-1")
		if rec.State != switching.StateAborted || e != (route.Entry{}) || !strings.Contains(rec.Note, "epoch 7") {
			t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
		}
	})
}

// C8: a leader that was frozen before it carried the subscriptions comes when the topic is in use on the new cluster, or fenced by the
// next attempt. It touches no cursor.
func TestALateLeaderCarriesNothing(t *testing.T) {
	for name, meanwhile := range map[string]func(w *world, rec switching.Record, fenced route.Entry){
		"flipped": func(w *world, rec switching.Record, fenced route.Entry) {
			flipped := fenced
			flipped.Cluster, flipped.Epoch, flipped.State = "b", 1, route.StateActive
			rec.Rev, rec.State = rec.Rev+1, switching.StateEvicting
			w.apply(store.Change{Entries: []store.EntryChange{{Topic: base, Before: &fenced, After: &flipped}}, Switch: &rec})
		},
		"given up": func(w *world, rec switching.Record, fenced route.Entry) {
			active := fenced
			active.State = route.StateActive
			rec.Rev, rec.State = rec.Rev+1, switching.StateAborted
			w.apply(store.Change{Entries: []store.EntryChange{{Topic: base, Before: &fenced, After: &active}}, Switch: &rec})
		},
		"the next attempt": func(w *world, rec switching.Record, fenced route.Entry) {
			active := fenced
			active.State = route.StateActive
			rec.Rev, rec.State = rec.Rev+1, switching.StateAborted
			w.apply(store.Change{Entries: []store.EntryChange{{Topic: base, Before: &fenced, After: &active}}, Switch: &rec})
			rec = rec.Again(time.Now())
			if err := w.st.PutSwitch(w.t.Context(), rec); err != nil {
				w.t.Error(err)
			}
			next := fenced
			next.Attempt = 2
			rec.Rev, rec.State = rec.Rev+1, switching.StateFenced
			w.apply(store.Change{Entries: []store.EntryChange{{Topic: base, Before: &active, After: &next}}, Switch: &rec})
		},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				w.request("sw-1")
				c := w.controller("p1", w.st)
				done, frozen := make(chan struct{}), false
				c.began = func(step switching.Step) {
					if step.Work != switching.WorkCarry || frozen {
						return
					}
					frozen = true
					rec, err := w.st.Switch(t.Context(), "sw-1")
					if err != nil {
						t.Error(err)
					}
					meanwhile(w, rec, w.entry())
					time.AfterFunc(lookEvery/10, func() { close(done) }) // before the successor of this one comes to it
				}
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_ = c.Run(ctx)
				}()
				<-done
				w.topic.mu.Lock()
				if n := w.topic.calls["carry"]; n != 0 {
					t.Errorf("the subscriptions were carried %d times", n)
				}
				w.topic.mu.Unlock()
				stop()
				<-ended
			})
		})
	}
}

// What kept the epoch of a topic that had moved before is there again after an abort: the next epoch is above it.
func TestAnAbortPutsTheFloorBack(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.foreign = "somebody"
		floor := route.Entry{Topic: base, Epoch: 4}
		w.set(nil, &floor)
		rec := switching.Record{ID: "sw-1", Rev: 1, Attempt: 1, Topic: base, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: 5, Started: time.Now()}
		if err := w.st.PutSwitch(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		rec, _ = w.run(w.controller("p1", w.st), "sw-1")
		if e := w.entry(); rec.State != switching.StateAborted || e != floor {
			t.Errorf("%s (%s), entry %+v, want %+v", rec.State, rec.Note, e, floor)
		}
	})
}

// C2, C3, C7: what is read later must not be older than what is judged with it: the record before the entry, the record, the roster, the
// tombstones and then the acks. No write waits for acks that the last survey has read.
func TestTheDriverReadsInTheOrderOfTheProtocol(t *testing.T) {
	for foreign, end := range map[string]switching.State{"": switching.StateDone, "somebody": switching.StateAborted} {
		in(t, func(t *testing.T) {
			w := newWorld(t, "p1")
			w.topic.foreign = foreign
			h := &hooked{Memory: w.st}
			w.request("sw-1")
			if rec, _ := w.run(w.controller("p1", h), "sw-1"); rec.State != end {
				t.Fatalf("%s: %s", rec.State, rec.Note)
			}
			if len(h.calls) < 2 || h.calls[0] != "Switch" || h.calls[1] != "Entry" {
				t.Errorf("it begins with %v", h.calls[:min(2, len(h.calls))])
			}
			surveys := 0
			for i, call := range h.calls {
				if call != "Proxies" && call != "Acks" {
					continue
				}
				if call == "Acks" {
					i -= 2
				} else {
					surveys++
				}
				if i < 1 || len(h.calls) < i+3 || !slices.Equal(h.calls[i-1:i+3], []string{"Switch", "Proxies", "Tombstones", "Acks"}) {
					t.Errorf("a survey reads %v", h.calls[max(0, i-1):min(len(h.calls), i+3)])
				}
			}
			if surveys < 2 {
				t.Errorf("%d surveys are too few for a switch", surveys)
			}
		})
	}
}

// skewed is the store of a proxy whose clock is ahead of the one that has written the tombstones.
type skewed struct {
	*store.Memory
	ahead time.Duration
}

func (s *skewed) Tombstones(ctx context.Context) ([]store.Tombstone, error) {
	all, err := s.Memory.Tombstones(ctx)
	for i := range all {
		all[i].At = all[i].At.Add(-s.ahead)
	}
	return all, err
}

// C4: what a forgotten member has sent may be on its way until the leader itself has known the tombstone for SettleTime, and no longer: the clock of
// the proxy that has forgotten it is another one.
func TestAFreshTombstoneHasTheOldClusterUnloadTheTopic(t *testing.T) {
	const seen = switching.SettleTime + 2*rosterEvery
	for name, c := range map[string]struct {
		ahead, pass time.Duration // pass: from the tombstone until the switch, while the leader leads
		again       bool          // the member has come back meanwhile, and was forgotten anew
		evicts      bool
	}{
		"just now":                            {evicts: true},
		"just now, by a clock that is behind": {ahead: switching.SettleTime + time.Second, evicts: true},
		"half a minute ago":                   {pass: switching.SettleTime / 2, evicts: true},
		"long ago":                            {pass: seen},
		"long ago, by a clock that is far before": {ahead: -time.Hour, pass: seen},
		"long ago, and again just now":            {pass: seen, again: true, evicts: true},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				forget := func() {
					dead := w.st.Join()
					if err := dead.Register(t.Context(), store.Proxy{ID: "p2", Incarnation: "i"}); err != nil {
						t.Fatal(err)
					}
					if err := dead.Close(); err != nil {
						t.Fatal(err)
					}
					if err := w.st.Forget(t.Context(), "p2"); err != nil {
						t.Fatal(err)
					}
				}
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					_ = w.controller("p1", &skewed{w.st, c.ahead}).Run(ctx)
				}()
				forget()
				time.Sleep(c.pass) // of the bubble
				if c.again {
					forget()
				}
				w.request("sw-1")
				rec, _ := w.await("sw-1")
				stop()
				<-ended
				if rec.State != switching.StateDone || rec.Receipt.Evicted != c.evicts || strings.Contains(rec.Note, "p2: forgotten") != c.evicts {
					t.Errorf("%s, evicted %v, note %q", rec.State, rec.Receipt.Evicted, rec.Note)
				}
			})
		})
	}
}

// C6: nothing is assumed of a write whose answer was lost, and only a write that surely never comes is sent again as it is.
func TestWhatBecameOfAWriteIsNotGuessed(t *testing.T) {
	for want, err := range map[switching.Answer]error{
		switching.OK: nil, switching.Conflict: &store.ConflictError{Name: base}, switching.Unknown: fmt.Errorf("%w: %w", store.ErrUnavailable, store.ErrUnknown),
		switching.Never: store.ErrTooLarge, switching.NotYet: store.ErrUnavailable,
	} {
		if r := written(err); r.Answer != want || (r.Why == "") != (err == nil) {
			t.Errorf("%v is taken for %v (%q), want %v", err, r.Answer, r.Why, want)
		}
	}
}

// A successor takes the entry away as well that its predecessor has made of a topic which rules decide, and puts the floor back.
func TestASuccessorTakesTheEntryOfAnAbortAwayToo(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1", "p2")
		w.topic.foreign = "somebody"
		floor := route.Entry{Topic: base, Epoch: 4}
		w.set(nil, &floor)
		rec := switching.Record{ID: "sw-1", Rev: 1, Attempt: 1, Topic: base, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: 5, Started: time.Now()}
		if err := w.st.PutSwitch(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		ctx, die := context.WithCancel(t.Context())
		first := w.controller("p1", &hooked{Memory: w.st.Join(), after: func(_ string, _ int, c *store.Change) {
			if c != nil && c.Switch.State == switching.StatePrepared {
				die()
			}
		}})
		if err := first.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if e := w.entry(); e.State != route.StatePrepared {
			t.Fatalf("the first leader has left %+v", e)
		}
		rec, _ = w.run(w.controller("p2", w.st.Join()), "sw-1")
		if e := w.entry(); rec.State != switching.StateAborted || e != floor {
			t.Errorf("%s (%s), entry %+v, want %+v", rec.State, rec.Note, e, floor)
		}
	})
}

// stubborn refuses every change.
type stubborn struct {
	*store.Memory
	asked atomic.Int64
}

func (s *stubborn) Apply(context.Context, store.Change) error {
	s.asked.Add(1)
	return &store.ConflictError{Name: base, Want: "this", Have: "that"}
}

// What the store refuses again and again is tried with pauses.
func TestADriverWhoseWritesAlwaysConflictPauses(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.request("sw-1")
		s := &stubborn{Memory: w.st}
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		if err := w.controller("p1", s).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if n := s.asked.Load(); n < 20 || n > 110 {
			t.Errorf("%d writes in 20 s, want one each %s", n, switching.RetryInterval)
		}
	})
}

// C7: what the store does not tell is not taken for nothing there: no entry, no member, no tombstone. A successor in the fence waits until it is told.
func TestWhatTheStoreDoesNotTellIsNotTakenForNothing(t *testing.T) {
	for _, op := range []string{"Switch", "Entry", "Proxies", "Tombstones", "Acks"} {
		t.Run(op, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1", "p2")
				w.request("sw-1")
				ctx, die := context.WithCancel(t.Context())
				first := w.controller("p1", &hooked{Memory: w.st.Join(), after: func(_ string, _ int, c *store.Change) {
					if c != nil && c.Switch.State == switching.StateFenced {
						die()
					}
				}})
				if err := first.Run(ctx); err != nil {
					t.Fatal(err)
				}
				mine := w.st.Join()
				mine.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{op}})
				time.AfterFunc(2*time.Second, func() { // of the bubble
					if e := w.entry(); e.State != route.StateFenced || len(w.topic.calls) > 1 { // the first leader has carried ahead
						t.Errorf("without it the switch went on: entry %+v, calls %v", e, w.topic.calls)
					}
					mine.SetFaults(store.Faults{})
				})
				if rec, _ := w.run(w.controller("p2", mine), "sw-1"); rec.State != switching.StateDone {
					t.Errorf("%s: %s", rec.State, rec.Note)
				}
			})
		})
	}
}

// Rules that decide a topic are compared in the writes of its switch, and nothing is made of them.
func TestTheRulesAboveATopicStayAsTheyAre(t *testing.T) {
	for _, foreign := range []string{"", "somebody"} {
		in(t, func(t *testing.T) {
			w := newWorld(t, "p1")
			w.topic.foreign = foreign
			for _, r := range []route.Rule{{Scope: "acme", Cluster: "b", Epoch: 1}, {Scope: "acme/orders", Cluster: "a", Epoch: 3}} {
				w.apply(store.Change{Rules: []store.RuleChange{{Scope: r.Scope, After: &r}}})
			}
			before, err := w.st.Rules(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			w.requestAt("sw-1", 4)
			rec, e := w.run(w.controller("p1", w.st), "sw-1")
			switch {
			case foreign == "" && (rec.State != switching.StateDone || e.Cluster != "b" || e.Epoch != 4), foreign != "" && (rec.State != switching.StateAborted || e != route.Entry{}):
				t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
			}
			if after, err := w.st.Rules(t.Context()); err != nil || !slices.Equal(after, before) {
				t.Errorf("the rules were %+v and are %+v, %v", before, after, err)
			}
		})
	}
}

// A topic with an entry of its own keeps one when its switch is given up.
func TestAnAbortLeavesATopicItsOwnEntry(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		w.topic.foreign = "somebody"
		own := route.Entry{Topic: base, Cluster: "a", Epoch: 2}
		w.set(nil, &own)
		w.requestAt("sw-1", 3)
		rec, e := w.run(w.controller("p1", w.st), "sw-1")
		own.SwitchID, own.Attempt = "sw-1", 1
		if rec.State != switching.StateAborted || e != own {
			t.Errorf("%s (%s), entry %+v, want %+v", rec.State, rec.Note, e, own)
		}
	})
}

// A store keeps the records that it is given: what a driver writes down goes into its own.
func TestADriverWritesIntoItsOwnReceipt(t *testing.T) {
	for _, name := range []string{"read", "survey"} {
		rec := switching.Record{ID: "sw-1", Rev: 1, Receipt: &switching.Receipt{Steps: append(make([]switching.StepTime, 0, 8), switching.StepTime{Work: "read"})}}
		newDriver(New(Config{Log: slog.New(slog.DiscardHandler)}), newUnseen(), rec).addStep(name, time.Now(), 0, "")
		if all := rec.Receipt.Steps[:2]; all[0] != (switching.StepTime{Work: "read"}) || all[1] != (switching.StepTime{}) {
			t.Errorf("the step is in the record of the list: %+v", all)
		}
	}
}

// A receipt has what happened once, however often it is made, and in a drain only what is not done every second; many subscriptions and steps do not make it larger than a node.
func TestAReceiptIsExactAndBounded(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		rec := w.request("sw-1")
		if err := w.st.PutAck(t.Context(), "sw-1", switching.Ack{Attempt: 1, Phase: switching.StatePrepared, Proxy: "p1", Incarnation: "i"}); err != nil {
			t.Fatal(err)
		}
		d := newDriver(w.controller("p1", w.st), newUnseen(), rec)
		for range 2 {
			d.addAcks(t.Context(), switching.StateAborted)
		}
		if n := len(d.receipt().Acks); n != 1 {
			t.Errorf("%d acks, want 1", n)
		}
		for i := range maxSteps {
			d.addStep(fmt.Sprintf("step %d", i%2), time.Now(), 0, "")
			d.addStep("again", time.Now(), 0, "")
		}
		if steps := d.receipt().Steps; len(steps) != maxSteps {
			t.Errorf("%d steps", len(steps))
		}
		many := make([]switching.Carried, switching.MaxCarried+1)
		for i := range many {
			many[i] = switching.Carried{Subscription: fmt.Sprintf("s%04d", i), By: string(carryWays[0]), Unacked: 1}
		}
		d.carried(many)
		if rc := d.receipt(); rc.SubscriptionCount != len(many) || len(rc.Subscriptions) != switching.MaxCarried || d.ways[0] != len(many) {
			t.Errorf("%d subscriptions, %d of them listed, %v", rc.SubscriptionCount, len(rc.Subscriptions), d.ways)
		}

		d.rec.Mode, d.rec.State, d.rec.Receipt = switching.ModeDrain, switching.StateDraining, nil
		if d.carried(many); d.ways[0] != 0 {
			t.Errorf("a drain counts as carried: %v", d.ways)
		}
		d.note(switching.Step{Work: switching.WorkSurvey}, switching.Report{}, 0)
		if steps := d.receipt().Steps; len(steps) != 0 {
			t.Errorf("steps %+v", steps)
		}
		d.note(switching.Step{Work: switching.WorkSurvey}, switching.Report{Answer: switching.NotYet, Why: "no answer"}, 0)
		d.note(switching.Step{Work: switching.WorkWrite, Record: switching.RecordState{State: switching.StateDraining}}, switching.Report{}, 0)
		d.rec.Return = true
		d.note(switching.Step{Work: switching.WorkSurvey}, switching.Report{}, 0)
		if steps := d.receipt().Steps; len(steps) != 3 || steps[0].Why != "no answer" || steps[1].Work != "write draining" {
			t.Errorf("steps %+v", steps)
		}
		drain := route.Drain{From: "a", Tails: []route.Tail{{Ledger: 1, Entry: 1}}}
		for _, c := range many {
			drain.Subs = append(drain.Subs, route.DrainSub{Name: c.Subscription})
		}
		d.noteMoved(switching.Step{Before: route.Entry{Drain: drain.String()}}, time.Now())
		if rc := d.receipt(); rc.MovedCount != len(many) || len(rc.Moved) != switching.MaxCarried {
			t.Errorf("%d have moved, %d of them listed", rc.MovedCount, len(rc.Moved))
		}
		var h histogram
		if h.observe(holdBuckets[0]); h.counts[0].Load() != 1 {
			t.Error("a bucket does not have its bound")
		}
	})
}

// once is a store that refuses the first flip.
type once struct {
	*store.Memory
	refused bool
}

func (s *once) Apply(ctx context.Context, c store.Change) error {
	if c.Switch != nil && c.Switch.State == switching.StateEvicting && !s.refused {
		s.refused = true
		return &store.ConflictError{Name: base, Want: "this", Have: "that"}
	}
	return s.Memory.Apply(ctx, c)
}

// Whom clients are sent to was asked for once, and is told by whichever write is the flip, with how many are not known.
func TestAFlipThatIsRepeatedStillTellsTheBrokers(t *testing.T) {
	for name, c := range map[string]struct {
		brokers    map[string]string
		hangs      bool
		unassigned int
	}{
		"known": {brokers: map[string]string{base: "broker-1:6650"}, unassigned: 2}, "not in time": {hangs: true, unassigned: 1},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t, "p1")
				w.request("sw-1")
				s := &once{Memory: w.st}
				ctrl := w.controller("p1", s)
				ctrl.cfg.Assign = func(ctx context.Context, _, _ string) (map[string]string, int) {
					if c.hangs {
						<-ctx.Done()
					}
					return c.brokers, c.unassigned
				}
				rec, _ := w.run(ctrl, "sw-1")
				if rec.State != switching.StateDone || !s.refused || rec.Assigned[base] != c.brokers[base] || rec.Unassigned != c.unassigned {
					t.Errorf("%s (%s): assigned %v, and %d not", rec.State, rec.Note, rec.Assigned, rec.Unassigned)
				}
			})
		})
	}
}

// What kept the epoch of a topic has given way to a rule that does, between two looks: the write is about what is there.
func TestAFloorThatHasGoneIsNotExpected(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		floor := route.Entry{Topic: base, Epoch: 1}
		w.set(nil, &floor)
		h := &hooked{Memory: w.st}
		h.after = func(call string, n int, _ *store.Change) {
			if call == "Rules" && n == 1 {
				w.apply(store.Change{
					Entries: []store.EntryChange{{Topic: base, Before: &floor}}, Rules: []store.RuleChange{{Scope: "acme", After: &route.Rule{Scope: "acme", Cluster: "a", Epoch: 1}}},
				})
			}
		}
		w.requestAt("sw-1", 2)
		if rec, e := w.run(w.controller("p1", h), "sw-1"); rec.State != switching.StateDone || e.Cluster != "b" {
			t.Errorf("%s (%s), entry %+v", rec.State, rec.Note, e)
		}
	})
}
