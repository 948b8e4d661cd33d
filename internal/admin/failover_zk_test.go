package admin_test

import (
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/zk"
)

var failoverTopics = flag.Int("failover.topics", 150, "topics that TestAFailoverOnZooKeeper moves; docs/adr/008-failover.md has 5000")

// maxFailoverOperations is what a topic may cost the ensemble of the map, of the leaders together: 37 here; more on a slow machine, for who waits looks again.
const maxFailoverOperations = 60

// What a topic of a failover costs the ensemble is a promise, and checked, with a leader that dies in the middle; times are printed.
func TestAFailoverOnZooKeeper(t *testing.T) {
	server := zktest.Start(t)
	topics := *failoverTopics
	ids := []string{"p1", "p2", "p3"}
	r := &rig{t: t, net: &admintest.Net{}, work: &admintest.Work{}}
	stores, proxies, servers := map[string]*zk.Store{}, map[string]*admintest.Proxy{}, map[string]*admin.Server{}
	for _, id := range ids {
		st, err := zk.Open(t.Context(), zk.Config{Servers: server.Addr(), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { st.Close() })
		p := admintest.Start(t, st, id, "a", "b")
		s := admin.New(admin.Config{Store: st, Proxy: p, Check: p.Check, Failover: r.work, PeerTransport: r.net})
		r.net.Add(id+":7780", s.Handler())
		stores[id], proxies[id], servers[id] = st, p, s
		p.Health(t, "a", "down")
		p.Health(t, "b", "up")
	}
	var entries []store.EntryChange
	for i := range topics {
		base := fmt.Sprintf("persistent://acme/many/t%04d", i)
		entries = append(entries, store.EntryChange{Topic: base, After: &route.Entry{Topic: base, Cluster: "a"}})
	}
	for chunk := range slices.Chunk(entries, store.MaxChange) {
		if err := stores["p1"].Apply(t.Context(), store.Change{Entries: chunk}); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		proxies[id].Await(t, "the map", func(table *route.Table) bool { return table.Len() == topics })
	}
	operations := func(ids ...string) (sum float64) {
		for _, id := range ids {
			for _, n := range stores[id].Operations() {
				sum += float64(n)
			}
		}
		return sum
	}
	before, idle := operations("p1", "p2"), operations("p3")
	req := failover("a", "b")
	req.Namespace = "acme/many"
	began := time.Now()
	st := must(t)(r.client("p3").StartSwitch(t.Context(), req))
	stop := admintest.LeadFailovers(t, stores["p1"], proxies["p1"], servers["p1"])
	for st.Flipped < topics/2 {
		time.Sleep(50 * time.Millisecond)
		st = must(t)(r.client("p3").Switch(t.Context(), st.ID))
	}
	stop()
	half := time.Since(began)
	admintest.LeadFailovers(t, stores["p2"], proxies["p2"], servers["p2"])
	st = must(t)(r.client("p3").WaitSwitch(t.Context(), st.ID, nil))
	took := time.Since(began)
	if !st.Done() || st.Total != topics+1 || st.Flipped != st.Total {
		t.Fatalf("%s: %d of %d, %+v, late %v", st.State, st.Flipped, st.Total, st.Failed, st.Order.Late)
	}
	each := (operations("p1", "p2") - before) / float64(topics)
	t.Logf("%d topics: half after %v, all after %v, %.1f ms a topic; operations of the two leaders for each topic %.1f, of the proxy that is asked how far it is %.1f",
		topics, half.Round(time.Millisecond), took.Round(time.Millisecond), took.Seconds()*1000/float64(topics), each, (operations("p3")-idle)/float64(topics))
	if each > maxFailoverOperations {
		t.Errorf("a topic costs the leaders %.1f operations, want %d at most", each, maxFailoverOperations)
	}
}
