package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// drainWorld is a world with two fake clusters, and a leader that drives what is asked for.
type drainWorld struct {
	*world
	a, b *testkit.Cluster
	c    *Controller
}

func newDrainWorld(t *testing.T, partitions int) *drainWorld {
	w := &drainWorld{world: newWorld(t, "p1", "p2")}
	w.a, w.b = testkit.NewCluster("a", testkit.Options{}), testkit.NewCluster("b", testkit.Options{LedgerBase: 500})
	t.Cleanup(w.a.Close)
	t.Cleanup(w.b.Close)
	w.a.CreateTopic(base, partitions)
	clients := map[string]*pulsaradmin.Client{}
	for _, k := range []*testkit.Cluster{w.a, w.b} {
		clients[k.Name()] = pulsaradmin.New(pulsaradmin.Config{Cluster: k.Name(), WebURLs: []string{k.Web()}})
		t.Cleanup(clients[k.Name()].Close)
	}
	w.c = New(Config{
		Store: w.st, ID: "p1", DefaultCluster: "a", Log: slog.New(slog.DiscardHandler), Clients: clients, Open: OpenPulsar(clients),
		Assign: func(_ context.Context, cluster, _ string) (map[string]string, int) {
			return map[string]string{base: "broker-of-" + cluster + ":6650"}, 0
		},
	})
	w.lead(t)
	return w
}

// lead has the controller lead until the test ends, or what it returns is called.
func (w *drainWorld) lead(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = w.c.Run(ctx)
	}()
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return stop
}

func (w *drainWorld) drain(id string) {
	w.t.Helper()
	rec := switching.Record{ID: id, Rev: 1, Attempt: 1, Topic: base, From: "a", To: "b", Mode: switching.ModeDrain, State: switching.StateRequested, Epoch: 1, Started: time.Now()}
	if err := w.st.PutSwitch(w.t.Context(), rec); err != nil {
		w.t.Fatal(err)
	}
	w.c.Nudge()
}

// until waits for a record, and for the entry that the map has then.
func (w *drainWorld) until(id, what string, reached func(switching.Record, route.Entry) bool) (rec switching.Record, e route.Entry) {
	w.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		var err error
		if rec, err = w.st.Switch(w.t.Context(), id); err != nil {
			w.t.Fatal(err)
		}
		if e, _, err = w.st.Entry(w.t.Context(), base); err != nil {
			w.t.Fatal(err)
		}
		if reached(rec, e) {
			return rec, e
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s did not come: record %s (%s, receipt %+v), entry %+v", what, rec.State, rec.Note, rec.Receipt, e)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// amend changes the record as an operator does.
func (w *drainWorld) amend(id string, change func(switching.Record) switching.Record) {
	w.t.Helper()
	for range 50 {
		rec, err := w.st.Switch(w.t.Context(), id)
		if err == nil {
			next := change(rec)
			next.Rev = rec.Rev + 1
			if err = w.st.PutSwitch(w.t.Context(), next); err == nil {
				w.c.Nudge()
				return
			}
		}
	}
	w.t.Fatal("the record is written to all the time")
}

func (w *drainWorld) told(id string) (t switching.Draining, ok bool) {
	docs, err := w.st.Documents(w.t.Context(), DrainDocuments)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, d := range docs {
		if d.Name == id {
			if err := json.Unmarshal(d.Data, &t); err != nil {
				w.t.Fatal(err)
			}
			return t, true
		}
	}
	return t, false
}

func draining(rec switching.Record, _ route.Entry) bool { return rec.State == switching.StateDraining }

func subs(e route.Entry) (names []string) {
	d, _ := route.ParseDrain(e.Drain)
	for _, s := range d.Subs {
		names = append(names, s.Name)
	}
	return names
}

// publish has n messages stored on each partition.
func publish(k *testkit.Cluster, partitions, from, n int) {
	for _, name := range pulsaradmin.PartitionNames(base, partitions) {
		for i := range n {
			k.Publish(name, "app", uint64(from+i), fmt.Appendf(nil, "%s %d", k.Name(), from+i))
		}
	}
}

func done(int) bool { return true }

func TestSubscriptionsFollowOneByOneAndTheReceiptSaysWhen(t *testing.T) {
	t.Parallel()
	w := newDrainWorld(t, 2)
	parts := pulsaradmin.PartitionNames(base, 2)
	publish(w.a, 2, 0, 10)
	for _, p := range parts {
		w.a.Acknowledge(p, "quick", done)
		w.a.Acknowledge(p, "slow", func(n int) bool { return n < 4 })
	}
	w.drain("sw-1")
	rec, e := w.until("sw-1", "the first to move", func(rec switching.Record, e route.Entry) bool {
		return rec.State == switching.StateDraining && slices.Equal(subs(e), []string{"slow"})
	})
	if e.Cluster != "b" || e.State != route.StateDraining || e.Epoch != 1 || rec.Assigned[base] != "broker-of-b:6650" {
		t.Errorf("entry %+v, record %+v", e, rec)
	}
	rc := rec.Receipt
	if rc.MovedCount != 1 || rc.Moved[0].Subscription != "quick" || rc.SubscriptionCount != 4 || rc.Subscriptions[0].How != howAtEnd || rc.First[parts[0]] != "500:-1" || rc.Tail[parts[1]] != "2:9" || rc.HoldMillis <= 0 {
		t.Errorf("receipt %+v", rc)
	}
	// What is published on the new cluster is there for all of them, from the first message on.
	publish(w.b, 2, 10, 3)
	for _, p := range parts {
		info, _ := w.b.Topic(p)
		if info.Subscriptions["quick"].Backlog != 3 || info.Subscriptions["slow"].Backlog != 3 {
			t.Errorf("%s on b: %+v", p, info.Subscriptions)
		}
	}
	w.until("sw-1", "the leader to tell what is left", func(switching.Record, route.Entry) bool {
		told, ok := w.told("sw-1")
		return ok && told.Subscriptions == 1 && told.Backlog == 12 && told.Left[0].Subscription == "slow"
	})
	if n, backlog := w.c.stats.drains.sum(); n != 1 || backlog != 12 {
		t.Errorf("metrics: %d subscriptions with %d entries", n, backlog)
	}
	for _, p := range parts {
		w.a.Acknowledge(p, "slow", done)
	}
	rec, e = w.until("sw-1", "the end", func(rec switching.Record, _ route.Entry) bool { return rec.State.Over() })
	if e.State != route.StateActive || e.Cluster != "b" || e.Drain != "" || rec.State != switching.StateDone || rec.Receipt.MovedCount != 2 || rec.Receipt.Moved[1].Seconds < 1 {
		t.Errorf("entry %+v, %s, receipt %+v", e, rec.State, rec.Receipt)
	}
	w.until("sw-1", "the telling to end", func(switching.Record, route.Entry) bool { _, ok := w.told("sw-1"); return !ok })
}

// A pause keeps subscriptions where they are; another leader goes on with what it finds.
func TestADrainIsPausedAndOutlivesItsLeader(t *testing.T) {
	t.Parallel()
	w := newDrainWorld(t, 0)
	publish(w.a, 0, 0, 3)
	w.a.Acknowledge(base, "s", func(int) bool { return false })
	w.drain("sw-1")
	w.until("sw-1", "the drain", draining)
	w.amend("sw-1", func(r switching.Record) switching.Record { r.Wish = switching.WishPause; return r })
	w.a.Acknowledge(base, "s", done)
	w.until("sw-1", "the leader to see that nothing is left", func(switching.Record, route.Entry) bool {
		told, _ := w.told("sw-1")
		return told.Subscriptions == 1 && told.Backlog == 0
	})
	if _, e := w.until("sw-1", "the drain", draining); !slices.Equal(subs(e), []string{"s"}) {
		t.Errorf("entry %+v: a pause keeps what drains where it is", e)
	}
	w.amend("sw-1", func(r switching.Record) switching.Record { r.Wish = ""; return r })
	rec, _ := w.until("sw-1", "the end", func(rec switching.Record, _ route.Entry) bool { return rec.State.Over() })
	if rec.State != switching.StateDone || rec.Receipt.MovedCount != 1 {
		t.Errorf("%s, %+v", rec.State, rec.Receipt)
	}
}

func TestWhatWasPublishedMeanwhileIsCopiedBackByAReturn(t *testing.T) {
	t.Parallel()
	w := newDrainWorld(t, 2)
	parts := pulsaradmin.PartitionNames(base, 2)
	publish(w.a, 2, 0, 5)
	for _, p := range parts {
		w.a.Acknowledge(p, "s", func(n int) bool { return n < 2 })
	}
	w.drain("sw-1")
	w.until("sw-1", "the drain", draining)
	publish(w.b, 2, 5, 20)
	w.b.Acknowledge(parts[0], "new", func(int) bool { return false }) // somebody subscribes anew
	w.amend("sw-1", switching.Record.Back)
	rec, e := w.until("sw-1", "the return", func(rec switching.Record, _ route.Entry) bool { return rec.State.Over() })
	if rec.State != switching.StateReturned || e.Cluster != "a" || e.State != route.StateActive || e.Epoch != 2 || rec.Receipt.Copied != 40 || rec.Assigned[base] != "broker-of-a:6650" {
		t.Fatalf("%s (%s), entry %+v, receipt %+v", rec.State, rec.Note, e, rec.Receipt)
	}
	for _, p := range parts {
		var got []string
		for _, m := range w.a.Messages(p) {
			got = append(got, string(m.Payload))
		}
		var want []string
		for i := range 25 {
			want = append(want, fmt.Sprintf("%s %d", map[bool]string{true: "a", false: "b"}[i < 5], i))
		}
		if info, _ := w.a.Topic(p); !slices.Equal(got, want) || info.Subscriptions["s"].Backlog != 23 {
			t.Errorf("%s on a: %q, %+v", p, got, info.Subscriptions)
		}
	}
	if info, _ := w.a.Topic(parts[0]); info.Subscriptions["new"].Backlog != 20 {
		t.Errorf("the new subscription: %+v, want all that was copied", info.Subscriptions)
	}
	// What was copied is consumed on a: it must not be there a second time when the topic drains to b again.
	for _, p := range parts {
		if info, _ := w.b.Topic(p); info.Subscriptions["s"].Backlog+info.Subscriptions["new"].Backlog != 0 {
			t.Errorf("%s on b: %+v, want nothing left", p, info.Subscriptions)
		}
	}
}

// What the operator wanted of a way back is done when it is given up: nobody wants the drain to be aborted.
func TestAWayBackThatWasGivenUpLeavesNoWishBehind(t *testing.T) {
	w := newWorld(t)
	d := newDriver(w.controller("p1", w.st), newUnseen(), switching.Record{
		ID: "sw-1", Rev: 7, Attempt: 2, Mode: switching.ModeDrain, State: switching.StateFenced, Return: true, Wish: switching.WishAbort, WishBy: "bob",
	})
	if rec := d.next(switching.RecordState{Rev: 8, Attempt: 2, State: switching.StateFenced, Return: true}); rec.Wish != switching.WishAbort || rec.WishBy != "bob" {
		t.Errorf("on its way back: %+v", rec)
	}
	if rec := d.next(switching.RecordState{Rev: 8, Attempt: 2, State: switching.StateDraining}); rec.Wish != "" || rec.WishBy != "" {
		t.Errorf("given up: %+v", rec)
	}
}

// After the first message on the new cluster there is no way back, and the drain goes on.
func TestAReturnIsGivenUpWhenSomebodyHadAMessage(t *testing.T) {
	t.Parallel()
	w := newDrainWorld(t, 0)
	publish(w.a, 0, 0, 5)
	w.a.Acknowledge(base, "s", func(n int) bool { return n < 2 })
	w.drain("sw-1")
	w.until("sw-1", "the drain", draining)
	publish(w.b, 0, 5, 4)
	w.b.Acknowledge(base, "other", func(n int) bool { return n == 1 })
	w.amend("sw-1", switching.Record.Back)
	rec, e := w.until("sw-1", "the drain again", func(rec switching.Record, _ route.Entry) bool {
		return rec.Attempt == 2 && rec.State == switching.StateDraining && !rec.Return
	})
	if !strings.Contains(rec.Note, `subscription "other" of `+base+" had messages on cluster b already: let the drain end, then switch from b to a") || e.State != route.StateDraining || len(w.a.Messages(base)) != 5 {
		t.Errorf("note %q, entry %+v, %d messages on a", rec.Note, e, len(w.a.Messages(base)))
	}
	w.a.Acknowledge(base, "s", done)
	if rec, _ := w.until("sw-1", "the end", func(rec switching.Record, _ route.Entry) bool { return rec.State.Over() }); rec.State != switching.StateDone || rec.Attempt != 2 {
		t.Errorf("%s of attempt %d", rec.State, rec.Attempt)
	}
}

// A transaction that was begun after the preflight is found within the fence, also when the old cluster is made to unload the topic, which forgets it.
func TestATransactionThatThePreflightHasNotSeenEndsTheAttempt(t *testing.T) {
	t.Parallel()
	for _, clean := range []bool{true, false} {
		w := newDrainWorld(t, 2)
		w.clean.Store(clean)
		publish(w.a, 2, 0, 5)
		w.a.Transactions(pulsaradmin.PartitionNames(base, 2)[1], 1)
		w.drain("sw-1")
		rec, e := w.until("sw-1", "the end", func(rec switching.Record, _ route.Entry) bool { return rec.State.Over() })
		if rec.State != switching.StateAborted || !strings.Contains(rec.Note, "1 open transaction on cluster a") || e.Cluster == "b" || e.State != route.StateActive {
			t.Errorf("clean %v: %s (%s), entry %+v", clean, rec.State, rec.Note, e)
		}
		if rec.Receipt.HoldMillis > 5000 {
			t.Errorf("clean %v: the topic was held for %.0f ms: waiting is of no use", clean, rec.Receipt.HoldMillis)
		}
		w.a.Transactions(pulsaradmin.PartitionNames(base, 2)[1], 0)
		w.amend("sw-1", func(r switching.Record) switching.Record { next := r.Again(time.Now()); next.Epoch = 1; return next })
		if rec, _ := w.until("sw-1", "the drain", func(rec switching.Record, _ route.Entry) bool {
			return rec.State.Over() || rec.State == switching.StateDraining
		}); rec.State == switching.StateAborted {
			t.Errorf("clean %v: %s: %s", clean, rec.State, rec.Note)
		}
	}
}

// The speed is measured from where a backlog began to fall, over a minute at most.
func TestTheTimeLeftFollowsFromTheSpeed(t *testing.T) {
	d := newDriver(&Controller{cfg: Config{Log: slog.New(slog.DiscardHandler)}}, newUnseen(), switching.Record{})
	drain := route.Drain{From: "a", Subs: []route.DrainSub{{Name: "s"}, {Name: "t", Leaving: true}}}
	at := func(second int, s int64) switching.Draining {
		return d.draining(time.Unix(int64(second), 0), drain, []switching.Left{{Subscription: "s", Backlog: s}, {Subscription: "t"}, {Subscription: "gone"}, {Subscription: "r", Reader: true, Consumers: 2}})
	}
	first := at(0, 1000)
	if first.ETA != 0 || len(first.Left) != 3 || first.Readers != 2 || first.Backlog != 1000 || !first.Left[2].Leaving && !first.Left[1].Leaving {
		t.Errorf("%+v", first)
	}
	if now := at(0, 990); now.ETA != 0 || now.Left[0].PerSecond != 0 {
		t.Errorf("%+v: no time has passed", now)
	}
	if now := at(10, 900); now.ETA != 90 || now.Left[0].PerSecond != 10 {
		t.Errorf("%+v, want 10 a second and 90 s left", now)
	}
	if now := at(11, 2000); now.ETA != 0 {
		t.Errorf("%+v: it has grown", now)
	}
	if now := at(12, 1995); now.Left[0].PerSecond != 5 || now.ETA != 399 {
		t.Errorf("%+v, want 5 a second since it has grown", now)
	}
	stuck := []switching.Left{{Subscription: "s", Backlog: 1990}, {Subscription: "t", Backlog: 1}}
	if now := d.draining(time.Unix(13, 0), drain, stuck); now.ETA != 0 {
		t.Errorf("%+v: nobody knows when t is done", now)
	}
	for s := 14; s <= 300; s++ {
		at(s, int64(2000-5*(s-11)))
	}
	if now := at(301, 545); now.Left[0].PerSecond < 4.8 || now.Left[0].PerSecond > 5.2 {
		t.Errorf("%+v, want 5 a second", now)
	}
}

func TestADrainThatAnotherModeCannotDoIsRefused(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t, "p1")
		rec := w.request("sw-1")
		d := newDriver(w.controller("p1", w.st), newUnseen(), rec)
		d.topic = w.topic
		if r := d.onClusters(t.Context(), switching.Step{Work: switching.WorkDrained}); r.Answer != switching.Never || !strings.Contains(r.Why, "this proxy cannot do that") {
			t.Errorf("%+v", r)
		}
	})
}

// fakeDrainer is a topic that drains, as far as the driver asks.
type fakeDrainer struct {
	*fakeTopic
	copies, left int64
	err          error
	had          string
}

func (f *fakeDrainer) Drained(context.Context) (switching.Drained, []switching.Left, error) {
	return switching.Drained{}, []switching.Left{{Subscription: "one", Backlog: 7}}, f.err
}
func (f *fakeDrainer) Returnable(context.Context) (string, error) { return f.had, f.err }
func (f *fakeDrainer) CopyBack(context.Context, route.Drain, bool) (int64, int64, error) {
	f.copies++
	return 10, f.left, f.err
}
func (f *fakeDrainer) PassOver(_ context.Context, still func() error) error { return still() }

// saying is a store whose map has the topic by an entry that no single write would make.
type saying struct {
	*store.Memory
	entry route.Entry
}

func (s saying) Entry(context.Context, string) (route.Entry, bool, error) { return s.entry, true, nil }

const oneDrains = "a;0;3:4;=one"

// returning is the driver of a way back, attempt 2 of sw-1, while the map has the topic as entry says.
func returning(t *testing.T, w *world, entry route.Entry) (*driver, *fakeDrainer) {
	rec := switching.Record{ID: "sw-1", Rev: 1, Attempt: 2, Topic: base, From: "a", To: "b", Mode: switching.ModeDrain, State: switching.StatePrepared, Return: true, Epoch: 1}
	if err := w.st.PutSwitch(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	entry.Topic = base
	f := &fakeDrainer{fakeTopic: w.topic}
	d := newDriver(w.controller("p1", saying{w.st, entry}), newUnseen(), rec)
	d.topic = f
	return d, f
}

// C8: a leader that was frozen comes when the topic is somewhere else, or the next attempt's. It copies nothing, and passes nothing over.
func TestALateLeaderTouchesNothingOnTheWayBack(t *testing.T) {
	for name, c := range map[string]struct {
		e              route.Entry
		copies, passes bool
	}{
		"drains":              {e: route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Attempt: 1, Drain: oneDrains}, copies: true},
		"fenced":              {e: route.Entry{Cluster: "b", Epoch: 1, State: route.StateFenced, SwitchID: "sw-1", Attempt: 2, Drain: oneDrains}, copies: true},
		"another switch":      {e: route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-2", Attempt: 1, Drain: oneDrains}},
		"the next attempt":    {e: route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Attempt: 3, Drain: oneDrains}},
		"active":              {e: route.Entry{Cluster: "b", Epoch: 1, SwitchID: "sw-1", Attempt: 2}},
		"back":                {e: route.Entry{Cluster: "a", Epoch: 2, SwitchID: "sw-1", Attempt: 2}, passes: true},
		"back by another":     {e: route.Entry{Cluster: "a", Epoch: 2, SwitchID: "sw-2", Attempt: 2}},
		"back, and fenced":    {e: route.Entry{Cluster: "a", Epoch: 2, State: route.StateFenced, SwitchID: "sw-1", Attempt: 2}},
		"back, and gone":      {e: route.Entry{Cluster: "b", Epoch: 3, SwitchID: "sw-1", Attempt: 2}},
		"back long ago":       {e: route.Entry{Cluster: "a", Epoch: 2, SwitchID: "sw-1", Attempt: 3}},
		"fenced on the other": {e: route.Entry{Cluster: "a", Epoch: 2, State: route.StateFenced, SwitchID: "sw-1", Attempt: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t)
				d, f := returning(t, w, c.e)
				r := d.onClusters(t.Context(), switching.Step{Work: switching.WorkCopy, Drain: oneDrains})
				if (f.copies == 1) != c.copies || (r.Answer == switching.OK) != c.copies {
					t.Errorf("copied %d times: %+v", f.copies, r)
				}
				rec := switching.RecordState{Note: "returned"}
				if d.passOver(t.Context(), &rec); (rec.Note == "returned") != c.passes || !strings.HasPrefix(rec.Note, "returned") {
					t.Errorf("the note is %q", rec.Note)
				}
			})
		})
	}
}

// Before the fence little may be left to copy, within it nothing; what was copied is told, but not while the topic is held.
func TestACopyIsDoneWhenWhatIsLeftIsShort(t *testing.T) {
	for name, c := range map[string]struct {
		left int64
		tail string
		err  error
		want switching.Answer
		why  string
	}{
		"much":               {left: fewToCopy + 1, want: switching.NotYet, why: "501 entries to be copied from cluster b to a"},
		"little":             {left: fewToCopy, want: switching.OK},
		"much, and an error": {left: fewToCopy + 1, err: errors.New("no answer"), want: switching.NotYet, why: "no answer"},
		"fenced, one":        {left: 1, tail: "x", want: switching.NotYet, why: "1 entry to be copied"},
		"fenced, nothing":    {tail: "x", want: switching.OK},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T) {
				w := newWorld(t)
				d, f := returning(t, w, route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Attempt: 1, Drain: oneDrains})
				f.left, f.err = c.left, c.err
				var r switching.Report
				for range 2 {
					r = d.onClusters(t.Context(), switching.Step{Work: switching.WorkCopy, Drain: oneDrains, Tail: c.tail})
					time.Sleep(tellEvery) // of the bubble
				}
				if r.Answer != c.want || !strings.Contains(r.Why, c.why) || r.Copied != 10 || d.receipt().Copied != 20 {
					t.Errorf("%+v, receipt %+v", r, d.receipt())
				}
				told, ok := (&drainWorld{world: w}).told("sw-1")
				if ok != (c.tail == "") || ok && (told.Copied != 20 || told.ToCopy != c.left) {
					t.Errorf("told %v: %+v", ok, told)
				}
			})
		})
	}
}

// How far a drain is is written down when it looks different, and otherwise now and then, whoever wrote before; what cannot be seen changes no number.
func TestHowFarADrainIsIsWrittenDownNowAndThen(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t)
		d, f := returning(t, w, route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Attempt: 1, Drain: oneDrains})
		rev := func() uint64 {
			docs, err := w.st.Documents(t.Context(), DrainDocuments)
			if err != nil || len(docs) > 1 {
				t.Fatalf("%+v, %v", docs, err)
			}
			if len(docs) == 0 {
				return 0
			}
			return docs[0].Rev
		}
		look := func(pass time.Duration, want uint64) {
			t.Helper()
			time.Sleep(pass) // of the bubble
			d.onClusters(t.Context(), switching.Step{Work: switching.WorkDrained, Drain: oneDrains})
			if have := rev(); have != want {
				t.Errorf("revision %d, want %d", have, want)
			}
		}
		look(0, 1)
		look(tellEvery/5, 1)
		look(tellEvery, 2)
		if !d.patient {
			t.Error("nobody is leaving, and it is looked at as often as when somebody is")
		}
		if subs, backlog := d.c.stats.drains.sum(); subs != 1 || backlog != 7 {
			t.Errorf("%d subscriptions, %d entries", subs, backlog)
		}
		f.err = errors.New("cluster a: no answer")
		look(0, 3)
		if told, _ := (&drainWorld{world: w}).told("sw-1"); !strings.Contains(told.Why, "no answer") {
			t.Errorf("told %+v", told)
		}
		if subs, backlog := d.c.stats.drains.sum(); subs != 1 || backlog != 7 {
			t.Errorf("%d subscriptions, %d entries after a look that failed", subs, backlog)
		}
		f.err = nil
		if err := w.st.PutDocument(t.Context(), DrainDocuments, store.Document{Name: "sw-1", Rev: 4, Data: []byte("{}")}); err != nil { // another leader's
			t.Fatal(err)
		}
		look(0, 5)
		if err := w.st.DropDocument(t.Context(), DrainDocuments, "sw-1"); err != nil {
			t.Fatal(err)
		}
		look(tellEvery, 1)
		many := switching.Draining{Subscriptions: 10_000}
		for i := range 10_000 {
			many.Left = append(many.Left, switching.Left{Subscription: fmt.Sprintf("a-subscription-with-a-long-name-%050d", i)})
		}
		d.tell(t.Context(), many)
		if told, _ := (&drainWorld{world: w}).told("sw-1"); rev() != 2 || len(told.Left) < 100 {
			t.Errorf("revision %d with %d of many subscriptions", rev(), len(told.Left))
		}
		d.forget(t.Context())
		if subs, _ := d.c.stats.drains.sum(); subs != 0 || rev() != 0 {
			t.Errorf("after the end there are %d subscriptions and revision %d", subs, rev())
		}
		d.tell(t.Context(), many)
		d.c.stats.drains.reset()
		if subs, _ := d.c.stats.drains.sum(); subs != 0 {
			t.Errorf("a new leadership begins with %d subscriptions", subs)
		}
	})
}

// A drain whose subscriptions could not be made on the new cluster does not flip.
func TestADrainGoesOnOnlyWhenItsSubscriptionsAreMade(t *testing.T) {
	in(t, func(t *testing.T) {
		w := newWorld(t)
		d, _ := returning(t, w, route.Entry{Cluster: "a", State: route.StateFenced, SwitchID: "sw-1", Attempt: 2})
		w.topic.failures["carry"] = 1
		for _, want := range []switching.Answer{switching.NotYet, switching.OK} {
			if r := d.onClusters(t.Context(), switching.Step{Work: switching.WorkCarry}); r.Answer != want || want == switching.OK && len(r.Subs) != 1 {
				t.Errorf("%+v, want %v", r, want)
			}
		}
	})
}

// Messages that somebody has had on the new cluster end a way back at once; that it is not known is no such thing.
func TestAWayBackIsNoWayWhenSomebodyHadAMessage(t *testing.T) {
	for want, f := range map[switching.Answer]*fakeDrainer{
		switching.OK: {}, switching.Never: {had: `subscription "one"`}, switching.NotYet: {had: `subscription "one"`, err: errors.New("no answer")},
	} {
		in(t, func(t *testing.T) {
			w := newWorld(t)
			d, _ := returning(t, w, route.Entry{Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Attempt: 1, Drain: oneDrains})
			f.fakeTopic, d.topic = w.topic, f
			if r := d.onClusters(t.Context(), switching.Step{Work: switching.WorkReturnable, Drain: oneDrains}); r.Answer != want {
				t.Errorf("%+v, want %v", r, want)
			}
		})
	}
}
