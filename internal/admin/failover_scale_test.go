package admin_test

import (
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin/admintest"
	"pointsman/store"
)

// A namespace of 5,000 topics with entries of their own, and a leader that dies in the middle: each moves once, in bounded time and memory, and progress can be seen.
func TestAFailoverOfThousandsOfTopicsGoesOnWithTheNextLeader(t *testing.T) {
	in(t, func(t *testing.T, r *rig) {
		const topics, ask = 5_000, 20 * time.Millisecond
		r.dead(t)
		var entries []store.EntryChange
		for i := range topics {
			base := fmt.Sprintf("persistent://acme/many/t%04d", i)
			entries = append(entries, store.EntryChange{Topic: base, After: &route.Entry{Topic: base, Cluster: "a"}})
		}
		for chunk := range slices.Chunk(entries, store.MaxChange) {
			if err := r.st.Apply(t.Context(), store.Change{Entries: chunk}); err != nil {
				t.Fatal(err)
			}
		}
		var asked atomic.Int64
		r.work.Find(func(string) (switching.FailoverFacts, error) {
			asked.Add(1)
			time.Sleep(ask) // of the bubble
			return switching.FailoverFacts{Topics: 1}, nil
		})
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		computing := processTime()
		req := failover("a", "b")
		req.Namespace = "acme/many"
		st := must(t)(r.client("p1").StartSwitch(t.Context(), req))
		planned := asked.Load()
		began := time.Now()
		stop := admintest.LeadFailovers(t, r.stores["p1"], r.proxies["p1"], r.servers["p1"])
		seen, last := 0, 0
		for last < topics/2 {
			time.Sleep(time.Second)
			now := must(t)(r.client("p2").Switch(t.Context(), st.ID))
			if now.Flipped < last || now.Total != topics+1 {
				t.Fatalf("%d of %d have moved after %d", now.Flipped, now.Total, last)
			}
			if now.Flipped > last {
				seen++
			}
			if last = now.Flipped; len(now.Switches) > 100 {
				t.Fatalf("%d switches are shown", len(now.Switches))
			}
		}
		stop()
		half := time.Since(began)
		admintest.LeadFailovers(t, r.stores["p2"], r.proxies["p2"], r.servers["p2"])
		st = must(t)(r.client("p1").WaitSwitch(t.Context(), st.ID, nil))
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if !st.Done() || st.Total != topics+1 || st.Flipped != st.Total || st.Ended != st.Total {
			t.Fatalf("%s: %d of %d, %d ended, %+v", st.State, st.Flipped, st.Total, st.Ended, st.Failed)
		}
		for e := range r.storedTable().Each {
			if e.Cluster != "b" || e.Epoch != 1 {
				t.Fatalf("%s is on %s at epoch %d", e.Topic, e.Cluster, e.Epoch)
			}
		}
		t.Logf("%d topics: half after %v, all after %v (the other cluster takes %v an answer); %v of computing; %d looks planned, %d in all; heap +%d MiB, progress seen %d times",
			topics, half, took, ask, processTime()-computing, planned, asked.Load(), (max(after.HeapAlloc, before.HeapAlloc)-before.HeapAlloc)>>20, seen)
		// 32 at a time; a leader that dies repeats at most those that were under way.
		if most := topics * (ask + 300*time.Millisecond) / 32; took > most || seen < 3 {
			t.Errorf("it took %v, want %v at most; progress was seen %d times", took, most, seen)
		}
		if again := asked.Load() - planned - topics; again > 64 {
			t.Errorf("%d topics were looked at again", again)
		}
	})
}

// processTime is what this process has computed; clocks stand still in a bubble.
func processTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Round(10 * time.Millisecond)
}
