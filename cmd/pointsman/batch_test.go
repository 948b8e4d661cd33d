package main

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/controller"
	"pointsman/internal/golden"
)

// batchSession is an operator who moves a namespace.
func batchSession(t *testing.T, output string) (text string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newShell(t)
		for i := range 12 {
			s.listed["a"] = append(s.listed["a"], fmt.Sprintf("persistent://acme/orders/t%d", i+1))
		}
		s.listed["a"] = append(s.listed["a"], "persistent://acme/orders/t3-billing-DLQ")
		var blocked atomic.Bool
		blocked.Store(true)
		check := func(r switching.CheckRequest, p *switching.Preflight) {
			if r.Topic == topic2 && blocked.Load() {
				p.Add(switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "cluster a replicates the topic to [a] and not to b", Remedy: "pulsar-admin namespaces set-clusters"})
			}
		}
		s.p1.Do(func(f *admintest.Fields) {
			f.Preflight = func(r switching.CheckRequest, p *switching.Preflight) error { check(r, p); return nil }
		})
		s.leader, _ = admintest.Lead(t, s.st.Join(), "p1", &admintest.Topic{}, func(c *controller.Config) {
			c.Fleet, c.Ground = s.servers["p1"], admintest.Ground(s.listed, check)
		})
		var b strings.Builder
		run := func(line string) {
			t.Helper()
			s.transcribe(&b, line, output)
		}
		run("switch start --namespace acme/orders --to b --dry-run")
		run("switch start --prefix acme/orders/t3 --to b --waves 1,100% --pace 5/s --max-hold 0s --on-blocked skip --dry-run")
		run("switch start --topic acme/orders/t3 --topic acme/orders/t4 --to b --dry-run")
		run("switch start --namespace acme/orders --to b --why ticket-3")
		all, err := s.st.Batches(t.Context(), 1)
		if err != nil || len(all) != 1 {
			t.Fatalf("no batch: %v", err)
		}
		id := all[0].ID
		run("switch list --limit 1")
		run("switch start --topic acme/orders/t5 --to b")
		blocked.Store(false)
		run("switch resume " + id)
		if output == "" {
			run("switch status " + id)
			run("switch abort " + id)
			run("switch pause " + id)
			run("switch resume " + id)
			s.listed["b"] = s.listed["a"]
			run("switch reverse " + id + " --dry-run")
			run("switch start --namespace acme/orders --to b --waves 5%,1%")
			run("switch start --namespace acme/orders --to b --pace fast")
			run("switch start --namespace acme/orders --to b --max-failed 3")
			run("switch start --topic acme/other/x --to b --mode immediate --parallel 8")
			run("switch start --topic acme/other/x --to b --mode drain --max-backlog 5")
			run("switch resume " + id + " --on-blocked leave")
		}
		text = b.String()
	})
	return text
}

func TestABatchReadsAsDocumented(t *testing.T) { golden.File(t, "batch.txt", batchSession(t, "")) }

func TestABatchInJSONIsAsDocumented(t *testing.T) {
	golden.File(t, "batch.json.txt", batchSession(t, "--output json"))
}

// A namespace without replication: its producers move at once, and the batch ends when its subscriptions have followed.
func TestABatchOfDrainsReadsAsDocumented(t *testing.T) {
	var b strings.Builder
	synctest.Test(t, func(t *testing.T) {
		s := newShell(t)
		s.listed["a"] = []string{topic1, topic2}
		check := func(_ switching.CheckRequest, p *switching.Preflight) {
			p.Forecast.Draining = []switching.Left{{Subscription: "s", Backlog: 500}}
		}
		s.p1.Do(func(f *admintest.Fields) {
			f.Preflight = func(r switching.CheckRequest, p *switching.Preflight) error { check(r, p); return nil }
		})
		clusters := &admintest.Topic{}
		clusters.Left(500)
		s.leader, _ = admintest.Lead(t, s.st.Join(), "p1", clusters, func(c *controller.Config) {
			c.Fleet, c.Ground = s.servers["p1"], admintest.Ground(s.listed, check)
		})
		run := func(line string) {
			t.Helper()
			s.transcribe(&b, line, "")
		}
		run("switch start --namespace acme/orders --to b --mode drain --dry-run")
		run("switch start --namespace acme/orders --to b --mode drain")
		all, err := s.st.Batches(t.Context(), 1)
		if err != nil || len(all) != 1 {
			t.Fatalf("no batch: %v", err)
		}
		id := all[0].ID
		run("switch list --limit 1")
		run("switch reverse " + id)
		run("switch pause " + id + "-1")
		run("switch start --topic " + topic1 + " --to a")
		run("switch resume " + id + "-1")
		clusters.Left(0)
		run("switch watch " + id)
		run("switch start --namespace acme/orders --to b --mode drain")
	})
	golden.File(t, "batchdrain.txt", b.String())
}

// Who watches a batch learns what it waits for, and that it has gone on.
func TestTheProgressOfABatchSaysWhatItWaitsFor(t *testing.T) {
	for state, want := range map[string]string{"running": "moving, wave 1 of 1: 3 of 9 moved; waits: proxy p2\n", "done": "moving, wave 1 of 1: 3 of 9 moved\n"} {
		var out bytes.Buffer
		writeProgress(&out, admin.SwitchStatus{State: state, Batch: &switching.Batch{State: switching.BatchMoving, Count: switching.BatchCount{Total: 9, Moved: 3}, Note: "waits: proxy p2"}})
		if out.String() != want {
			t.Errorf("%s: %q, want %q", state, out.String(), want)
		}
	}
}

func TestTheProgressOfABatchIsOneLine(t *testing.T) {
	now := time.Unix(1000, 0)
	f := func(b switching.Batch, want string) {
		t.Helper()
		if have := batchProgress(b, now); have != want {
			t.Errorf("%q, want %q", have, want)
		}
	}
	b := switching.Batch{State: switching.BatchNew}
	f(b, "new: its topics are being written down")
	b.State, b.Ends, b.Count = switching.BatchChecking, []int{1, 1000}, switching.BatchCount{Total: 1000, Checked: 300, Blocked: 2}
	f(b, "checking: 300 of 1000 looked at, 2 blocked")
	b.State, b.Wave, b.Count = switching.BatchMoving, 1, switching.BatchCount{Total: 1000, Moved: 400, Running: 8, Failed: 3, Blocked: 2, Skipped: 1, Troubled: 1}
	b.HoldP50, b.HoldP99, b.ETA = 120.4, 310, now.Add(83*time.Second)
	f(b, "moving, wave 2 of 2: 400 of 1000 moved, 8 under way, 3 failed, 2 blocked, 1 skipped, 1 incomplete; hold p50 120 ms, p99 310 ms; done in about 1m23s")
	b.AtOnce = 5
	f(b, "moving, wave 2 of 2: 400 of 1000 moved, 8 under way, 3 failed, 2 blocked, 1 skipped, 1 incomplete; hold p50 120 ms, p99 310 ms; 5 at once for now; done in about 1m23s")
	b.Pause, b.ETA = &switching.BatchPause{}, time.Time{}
	f(b, "paused, wave 2 of 2: 400 of 1000 moved, 8 under way, 3 failed, 2 blocked, 1 skipped, 1 incomplete; hold p50 120 ms, p99 310 ms")
	b.State, b.Pause, b.AtOnce, b.Count = switching.BatchDraining, nil, 0, switching.BatchCount{Total: 1000, Moved: 997, Draining: 40, Failed: 3}
	f(b, "draining: 997 of 1000 moved, 40 of them still drain, 3 failed; hold p50 120 ms, p99 310 ms")
	b.State, b.Count = switching.BatchDone, switching.BatchCount{Total: 1, Moved: 1}
	f(b, "done: 1 of 1 moved; hold p50 120 ms, p99 310 ms")
}

// Where the rules named the cluster before, a namespace's rule has the epoch of those, which may be 0.
func TestARuleOfEpochZeroIsToldOf(t *testing.T) {
	var b strings.Builder
	writeBatch(&b, admin.SwitchStatus{ID: "sw-1", Batch: &switching.Batch{ID: "sw-1", Namespace: "acme/orders", State: switching.BatchDone, Ruled: true, Removed: 6}})
	if want := "namespace acme/orders is one rule now, epoch 0, in place of 6 entries\n"; !strings.Contains(b.String(), want) {
		t.Errorf("%q is not in %s", want, b.String())
	}
}
