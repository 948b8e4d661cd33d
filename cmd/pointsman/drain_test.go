package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/controller"
	"pointsman/internal/golden"
	"pointsman/store"
)

// drainSession is what an operator sees of a switch that drains: the parts of the leader and of the clusters are written by hand.
func drainSession(t *testing.T) string {
	s := newShell(t)
	var b strings.Builder
	run := func(line string) {
		t.Helper()
		code, out, errs := s.run(line)
		fmt.Fprintf(&b, "$ pointsman %s\n%s%s", line, out, errs)
		if code != exitOK {
			fmt.Fprintf(&b, "exit code %d\n", code)
		}
		b.WriteString("\n")
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	left := []switching.Left{
		{Subscription: "audit", Backlog: 90_000, Unacked: 200, Delayed: 3, Consumers: 7, By: []string{`consumer "c1" from 10.0.0.2:1 (Pulsar-Go-v0.15.0)`}, Oldest: at.Add(-time.Hour)},
		{Subscription: "idle", Backlog: 1},
		{Subscription: "billing"},
	}
	check := func(fs ...switching.Finding) {
		s.p1.Do(func(f *admintest.Fields) {
			f.Preflight = func(r switching.CheckRequest, p *switching.Preflight) error {
				if r.Mode != switching.ModeDrain {
					t.Errorf("asked for %+v", r)
				}
				p.Add(fs...)
				p.At, p.SubscriptionCount, p.Forecast.HoldMillis = at, 3, 80
				if r.Since == nil {
					p.Forecast.Draining = left
				}
				return nil
			}
		})
	}
	s.must("routes set " + topic1 + " a")
	s.settle()
	check(switching.Finding{Item: "subscriptions", Verdict: switching.Warning, Evidence: `subscription "idle" has 1 entry left on cluster a, and no consumer: it stays there until somebody consumes them`, Remedy: "start its consumers"})
	run("switch check --topic " + topic1 + " --to b --mode drain")
	check()
	run("switch start --topic " + topic1 + " --to b --mode drain --no-wait --why ticket-9")
	id := s.newest()
	entry, _, err := s.st.Entry(t.Context(), topic1)
	if err != nil {
		t.Fatal(err)
	}
	step := func(state switching.State, drain *route.Drain, change func(*switching.Record)) {
		t.Helper()
		rec, err := s.st.Switch(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		rec.Rev++
		rec.State = state
		change(&rec)
		before, after := entry, entry
		after.SwitchID, after.Attempt, after.Cluster, after.Epoch = id, rec.Attempt, "b", rec.Epoch
		after.State, after.Drain = route.StateActive, ""
		if drain != nil {
			after.State, after.Drain = route.StateDraining, drain.String()
		}
		if err := s.st.Apply(t.Context(), store.Change{Switch: &rec, Entries: []store.EntryChange{{Topic: topic1, Before: &before, After: &after}}}); err != nil {
			t.Fatal(err)
		}
		entry = after
	}
	drain := &route.Drain{From: "a", Subs: []route.DrainSub{{Name: "audit"}, {Name: "billing"}, {Name: "idle"}}, Tails: []route.Tail{{Ledger: 7, Entry: 9}}}
	step(switching.StatePrepared, nil, func(r *switching.Record) {})
	entry.Cluster = "b"
	step(switching.StateDraining, drain, func(r *switching.Record) {
		r.Flipped = at
		r.Receipt = &switching.Receipt{HoldMillis: 80, SubscriptionCount: 3, Tail: map[string]string{topic1: "7:9"}, First: map[string]string{topic1: "3:-1"}}
	})
	tell := func(d switching.Draining) {
		text, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.st.DropDocument(t.Context(), controller.DrainDocuments, id)
		if err := s.st.PutDocument(t.Context(), controller.DrainDocuments, store.Document{Name: id, Rev: 1, Data: text}); err != nil {
			t.Fatal(err)
		}
	}
	left[0].PerSecond, left[0].ETA, left[0].Oldest = 300, 300, time.Time{}
	left[2].Leaving = true
	tell(switching.Draining{At: at, Subscriptions: 3, Backlog: 90_001, Readers: 1, Left: append(left, switching.Left{Subscription: "reader-5", Reader: true, Consumers: 1, By: []string{`consumer "r" from 10.0.0.3:1 (Pulsar-Java-v4.0.8)`}})})
	run("switch status " + id)
	var told struct {
		Switches []struct {
			Draining switching.Draining `json:"draining"`
		} `json:"switches"`
	}
	if err := json.Unmarshal([]byte(s.must("switch status "+id+" --output json")), &told); err != nil || told.Switches[0].Draining.Backlog != 90_001 || len(told.Switches[0].Draining.Left) != 4 {
		t.Errorf("as JSON: %+v, %v", told, err)
	}
	run("switch abort " + id)
	run("switch pause " + id)
	run("switch list")
	run("switch resume " + id + " --no-wait")
	check(switching.Finding{Item: "way back", Verdict: switching.Fine, Evidence: "nobody has had a message on cluster b yet; 12 entries to be copied to cluster a"})
	run("switch reverse " + id + " --dry-run")
	run("switch reverse " + id + " --no-wait")
	tell(switching.Draining{At: at, Subscriptions: 3, Left: []switching.Left{}, Copied: 5, ToCopy: 7})
	run("switch reverse " + id)
	run("switch abort " + id + " --no-wait")
	drain.Gone, drain.Subs = 1, drain.Subs[:1]
	step(switching.StateDraining, drain, func(r *switching.Record) {
		r.Return, r.Wish, r.WishBy = false, "", ""
		r.Receipt.Copied, r.Receipt.MovedCount, r.Receipt.Moved = 5, 1, []switching.Moved{{Subscription: "billing", At: at, Seconds: 2.34}}
	})
	run("switch reverse " + id)
	if err := s.st.DropDocument(t.Context(), controller.DrainDocuments, id); err != nil {
		t.Fatal(err)
	}
	step(switching.StateDone, nil, func(r *switching.Record) { r.Ended = at })
	run("switch watch " + id)
	run("switch reverse " + id + " --dry-run")
	return b.String()
}

func TestADrainReadsAsDocumented(t *testing.T) {
	text := volatileGone(drainSession(t))
	// When the proxies acknowledge what is written here by hand depends on the scheduler.
	golden.File(t, "drain.txt", regexp.MustCompile(`(?m)^(  proxy|waiting for proxy) .*\n`).ReplaceAllString(text, ""))
}

// volatileGone replaces what differs from run to run.
func volatileGone(text string) string {
	for _, v := range volatile {
		text = v.re.ReplaceAllString(text, v.with)
	}
	return text
}
