package admin_test

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/golden"
	"pointsman/store"
)

const (
	topic1 = "persistent://acme/orders/t1"
	topic2 = "persistent://acme/orders/t2"
	topic3 = "persistent://acme/bills/t3"
)

func TestARouteIsStoredUnderItsCanonicalNameAndWrittenToTheHistory(t *testing.T) {
	r := newRig(t, "p1")
	res, err := r.client("p1").Set(t.Context(), admin.SetRequest{Name: "acme/orders/t1", Cluster: "b", ChangeOptions: admin.ChangeOptions{Who: "ann@ops", Why: "ticket 1"}})
	if err != nil {
		t.Fatal(err)
	}
	want := []admin.RouteChange{{Name: topic1, After: &admin.Route{Name: topic1, Kind: "topic", Cluster: "b", Epoch: 1, State: "active"}, Moved: true}}
	if !reflect.DeepEqual(res.Changed, want) {
		t.Errorf("changed %+v, want %+v", res.Changed, want)
	}
	if got, err := r.client("p1").Route(t.Context(), "acme/orders/t1"); err != nil || got != *want[0].After {
		t.Errorf("get = %+v, %v", got, err)
	}
	res = r.set(topic1, "b")
	if len(res.Changed) != 0 || res.Unchanged != 1 {
		t.Errorf("the same again changes %+v, unchanged %d", res.Changed, res.Unchanged)
	}
	h, err := r.client("p1").History(t.Context(), 10)
	if err != nil || len(h.Changes) != 1 {
		t.Fatalf("history = %+v, %v; want one entry (the second write changed nothing)", h, err)
	}
	if e := h.Changes[0]; e.Who != "ann@ops" || e.Why != "ticket 1" || len(e.Changes) != 1 || e.Changes[0].Name != topic1 || e.Changes[0].Before != nil || e.Changes[0].After.Cluster != "b" {
		t.Errorf("history entry = %+v", e)
	}
}

func TestRulesDecideFromTheMostSpecificToTheDefault(t *testing.T) {
	r := newRig(t, "p1")
	r.expect(topic1, "a", 0)
	r.set("*", "b")
	r.expect(topic1, "b", 1)
	r.set("acme", "c")
	r.expect(topic1, "c", 2)
	r.set("acme/orders", "a")
	r.expect(topic1, "a", 3)
	r.set(topic1, "b")
	r.expect(topic1, "b", 4)
	for _, name := range []string{topic1, "acme/orders", "tenant:acme", "*"} {
		if _, err := r.client("p1").Remove(t.Context(), admin.RemoveRequest{Name: name}); err != nil {
			t.Fatalf("rm %s: %v", name, err)
		}
	}
	if d := r.stored(topic1); d.Cluster != "a" || d.Epoch <= 4 {
		t.Errorf("after removing everything: %q, epoch %d; the epoch must have grown beyond 4", d.Cluster, d.Epoch)
	}
	list, err := r.client("p1").Routes(t.Context(), admin.RouteQuery{})
	if err != nil || list.Total != 0 || len(list.Routes) != 0 {
		t.Errorf("floors are listed as routes: %+v, %v", list, err)
	}
}

func TestListingFiltersSortsAndPages(t *testing.T) {
	r := newRig(t, "p1")
	for _, name := range []string{topic2, topic1, topic3, "acme/orders", "acme", "*", "namespace:v1/east/ns"} {
		r.set(name, "b")
	}
	r.set(topic2, "c")
	names := func(q admin.RouteQuery) string {
		t.Helper()
		list, err := r.client("p1").Routes(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, x := range list.Routes {
			out = append(out, x.Name)
		}
		return fmt.Sprint(list.Total, " ", strings.Join(out, " "))
	}
	check := func(q admin.RouteQuery, want string) {
		t.Helper()
		if got := names(q); got != want {
			t.Errorf("%+v lists %s, want %s", q, got, want)
		}
	}
	check(admin.RouteQuery{}, "7 * acme acme/orders namespace:v1/east/ns "+topic3+" "+topic1+" "+topic2)
	check(admin.RouteQuery{Within: "acme/orders"}, "3 acme/orders "+topic1+" "+topic2)
	check(admin.RouteQuery{Within: "acme", Cluster: "c"}, "1 "+topic2)
	check(admin.RouteQuery{Limit: 2, After: "acme/orders"}, "7 namespace:v1/east/ns "+topic3)
	check(admin.RouteQuery{Limit: 2, After: topic1}, "7 "+topic2)
}

// The text of every refusal is part of the product.
func TestEveryRefusalSaysWhyAndWhatToDo(t *testing.T) {
	var out strings.Builder
	note := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s was not refused", what)
			return
		}
		fmt.Fprintf(&out, "== %s\n%s", what, refusal(t, err))
	}
	r := newRig(t, "p1", "p2")
	c := r.client("p1")
	set := func(what, name, cluster string, o admin.ChangeOptions) {
		t.Helper()
		_, err := c.Set(t.Context(), admin.SetRequest{Name: name, Cluster: cluster, ChangeOptions: o})
		note(what, err)
	}
	sw := func(what string, req admin.SwitchRequest) {
		t.Helper()
		if req.Mode == "" {
			req.Mode = "immediate"
		}
		_, err := c.StartSwitch(t.Context(), req)
		note(what, err)
	}
	imp := func(what string, items ...admin.ImportItem) {
		t.Helper()
		_, err := c.Import(t.Context(), admin.ImportRequest{Routes: items})
		note(what, err)
	}

	set("a partition is named (LK-20)", topic1+"-partition-3", "b", admin.ChangeOptions{})
	set("a system topic is named", "persistent://acme/orders/__change_events", "b", admin.ChangeOptions{})
	set("an empty name", "", "b", admin.ChangeOptions{})
	set("a name with an unknown domain", "kafka://acme/orders/t", "b", admin.ChangeOptions{})
	set("a scope with a bad character", "acme/or ders", "b", admin.ChangeOptions{})
	set("a tenant with a slash", "tenant:acme/orders", "b", admin.ChangeOptions{})
	set("a namespace without one", "namespace:acme", "b", admin.ChangeOptions{})
	set("no cluster", topic1, "", admin.ChangeOptions{})
	set("a cluster that nobody knows", topic1, "z", admin.ChangeOptions{})
	r.start("p3", "a", "b")
	set("a cluster that one proxy does not know", topic1, "c", admin.ChangeOptions{})
	_, err := c.Remove(t.Context(), admin.RemoveRequest{Name: topic1})
	note("rm of what is not there", err)
	_, err = c.Route(t.Context(), "acme")
	note("get of what is not there", err)
	_, err = c.Routes(t.Context(), admin.RouteQuery{Within: topic1})
	note("ls within a topic", err)
	_, err = c.Routes(t.Context(), admin.RouteQuery{Limit: 1 << 30})
	note("ls with too large a page", err)

	r.clients("p1", topic1, 1, 0)
	r.clients("p2", topic1, 2, 5)
	r.clients("p2", topic3, 9, 9)
	set("live clients on two proxies", topic1, "b", admin.ChangeOptions{})
	set("a namespace rule that moves live clients", "acme/orders", "b", admin.ChangeOptions{})
	r.net.Add("p2:7780", http.NotFoundHandler())
	set("live clients, and a proxy that answers with something else", topic1, "b", admin.ChangeOptions{})
	set("a proxy that answers with something else", topic2, "b", admin.ChangeOptions{})
	if err := r.stores["p3"].Unregister(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	r.proxies["p2"].Do(func(f *admintest.Fields) { f.Info.Live = false })

	imp("an empty import")
	imp("an import with every fault", admin.ImportItem{Name: topic1, Cluster: "b"}, admin.ImportItem{Name: "acme/orders/t1", Cluster: "a"},
		admin.ImportItem{Name: topic2 + "-partition-0", Cluster: "b"}, admin.ImportItem{Name: topic3}, admin.ImportItem{Name: "acme", Cluster: "-"},
		admin.ImportItem{Name: "acme/x", Cluster: "b", Epoch: 1 << 40})
	imp("an import with unknown clusters", admin.ImportItem{Name: topic1, Cluster: "y"}, admin.ImportItem{Name: topic2, Cluster: "b"})

	r2 := newRig(t, "p1")
	r, c = r2, r2.client("p1")
	sw("no mode", admin.SwitchRequest{Topics: []string{topic1}, To: "b", Mode: " "})
	sw("a namespace in planned mode", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", To: "b"})
	sw("a planned switch to an unknown cluster", admin.SwitchRequest{Mode: "planned", Topics: []string{topic1}, To: "z"})
	sw("a planned switch of what is there already", admin.SwitchRequest{Mode: "planned", Topics: []string{topic1}, To: "a"})
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.Preflight = func(_ switching.CheckRequest, p *switching.Preflight) error {
			p.Add(switching.Finding{Item: "policies", Verdict: switching.Warning, Evidence: "they differ", Remedy: "make them equal"})
			return nil
		}
	})
	sw("a planned switch with a warning", admin.SwitchRequest{Mode: "planned", Topics: []string{topic1}, To: "b"})
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.Preflight = func(_ switching.CheckRequest, p *switching.Preflight) error {
			p.Add(
				switching.Finding{Item: "policies", Verdict: switching.Warning, Evidence: "they differ", Remedy: "make them equal"},
				switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "there is none", Remedy: "configure it"},
			)
			return nil
		}
	})
	sw("a planned switch with a blocker, by force", admin.SwitchRequest{Mode: "planned", Topics: []string{topic1}, To: "b", Force: true})
	sw("a prefix that names no namespace", admin.SwitchRequest{Mode: "planned", Prefix: "eu-", To: "b"})
	sw("a prefix in another namespace", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", Prefix: "acme/other/eu-", To: "b"})
	sw("a share of named topics", admin.SwitchRequest{Mode: "planned", Topics: []string{topic1}, Percent: 10, To: "b"})
	sw("a share that is none", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", Percent: 101, To: "b"})
	sw("a prefix in immediate mode", admin.SwitchRequest{Mode: "immediate", Prefix: "acme/orders/eu-", To: "b"})
	sw("waves that shrink", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", To: "b", BatchOptions: admin.BatchOptions{Waves: []string{"10%", "5%"}}})
	sw("too many at once", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", To: "b", BatchOptions: admin.BatchOptions{Parallel: 65}})
	sw("a policy that is none", admin.SwitchRequest{Mode: "planned", Namespace: "acme/orders", To: "b", BatchOptions: admin.BatchOptions{OnBlocked: "ask"}})
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Preflight = nil })
	sw("no target", admin.SwitchRequest{Topics: []string{topic1}})
	sw("nothing to move", admin.SwitchRequest{To: "b"})
	sw("topics and a namespace", admin.SwitchRequest{Topics: []string{topic1}, Namespace: "acme/orders", To: "b"})
	sw("a tenant as namespace", admin.SwitchRequest{Namespace: "acme", To: "b"})
	sw("one bad topic", admin.SwitchRequest{Topics: []string{topic1 + "-partition-1"}, To: "b"})
	sw("several bad topics", admin.SwitchRequest{Topics: []string{"acme", topic1, "x://y"}, To: "b"})
	sw("a topic that is there already", admin.SwitchRequest{Topics: []string{topic1}, To: "a"})
	sw("topics that are there already", admin.SwitchRequest{Topics: []string{topic1, topic2}, To: "a"})
	sw("a namespace that is there already", admin.SwitchRequest{Namespace: "acme/orders", To: "a"})
	sw("a switch to an unknown cluster", admin.SwitchRequest{Topics: []string{topic1}, To: "z"})
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Missing["b"] = true })
	sw("a switch to a cluster without the namespace (SW-10)", admin.SwitchRequest{Topics: []string{topic1}, To: "b"})
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.Clusters[1].Health, f.Clusters[1].Detail = "down", "5 lookups failed, last: connection refused"
	})
	sw("a switch to a cluster that is down", admin.SwitchRequest{Topics: []string{topic1}, To: "b"})
	_, err = c.Switch(t.Context(), "sw-1")
	note("status of what does not exist", err)
	_, err = c.Explain(t.Context(), "persistent://acme")
	note("explain of what is no topic", err)
	r.stores["p1"].SetFaults(store.Faults{Err: store.ErrUnavailable})
	set("the map store is away (ZK-01)", topic1, "b", admin.ChangeOptions{})
	sw("a switch while the map store is away (ZK-01)", admin.SwitchRequest{Topics: []string{topic1}, To: "c"})
	golden.File(t, "refusals.txt", out.String())
}

func TestOnlyTheClientsThatAChangeMovesAreInItsWay(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.set(topic1, "b")
	r.clients("p2", topic1, 1, 1) // pinned: a rule does not move it
	r.clients("p2", topic3, 1, 1) // another namespace
	c := r.client("p1")
	if _, err := c.Set(t.Context(), admin.SetRequest{Name: "acme/orders", Cluster: "c"}); err != nil {
		t.Errorf("a rule that moves no client was refused: %v", err)
	}
	if _, err := c.Set(t.Context(), admin.SetRequest{Name: topic3, Cluster: "a"}); err != nil {
		t.Errorf("pinning a topic where it is was refused: %v", err)
	}
	if _, err := c.Remove(t.Context(), admin.RemoveRequest{Name: topic1}); err == nil {
		t.Error("removing an entry moves its clients to the rule's cluster, and was not refused")
	}
	if _, err := c.Set(t.Context(), admin.SetRequest{Name: "acme", Cluster: "b"}); err != nil {
		t.Errorf("a rule above others moves nobody, and was refused: %v", err)
	}
	res, err := c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "c", ChangeOptions: admin.ChangeOptions{Immediate: true}})
	if err != nil || len(res.Clients) != 1 || res.Clients[0].Proxy != "p2" || res.Clients[0].Producers != 1 {
		t.Errorf("--immediate = %+v, %v; want the clients of p2 named", res, err)
	}
	r.expect(topic1, "c", 2)
	res, err = c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "a", ChangeOptions: admin.ChangeOptions{DryRun: true}})
	if err != nil || len(res.Changed) != 1 || len(res.Notes) != 1 || !strings.HasPrefix(res.Notes[0], "would be refused: ") {
		t.Errorf("dry run = %+v, %v", res, err)
	}
	r.expect(topic1, "c", 2)
}

func TestAnUnknownClusterNeedsForce(t *testing.T) {
	r := newRig(t, "p1")
	if _, err := r.client("p1").Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "z", ChangeOptions: admin.ChangeOptions{Force: true}}); err != nil {
		t.Fatal(err)
	}
	r.expect(topic1, "z", 1)
}

// exported is the whole map as `routes export` writes it.
func exported(t testing.TB, r *rig) []admin.ImportItem {
	t.Helper()
	routes, err := r.client("p1").AllRoutes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	items := []admin.ImportItem{}
	for _, x := range routes {
		cluster := x.Cluster
		if cluster == "" {
			cluster = "-"
		}
		items = append(items, admin.ImportItem{Name: x.Name, Cluster: cluster, Epoch: x.Epoch})
	}
	return items
}

// drawItems makes an import that is valid by construction.
func drawItems(t *rapid.T) []admin.ImportItem {
	names := []string{"*", "acme", "acme/orders", "acme/bills", "namespace:v1/east/ns", topic1, topic2, topic3, "persistent://v1/east/ns/t4", "non-persistent://acme/orders/t1"}
	names = rapid.Permutation(names).Draw(t, "names")[:rapid.IntRange(1, len(names)).Draw(t, "count")]
	items := []admin.ImportItem{}
	for _, n := range names {
		item := admin.ImportItem{Name: n, Cluster: rapid.SampledFrom([]string{"a", "b", "c", "-"}).Draw(t, "cluster"), Epoch: uint64(rapid.IntRange(0, 9).Draw(t, "epoch"))}
		if item.Cluster == "-" {
			item.Epoch++
		}
		items = append(items, item)
	}
	return items
}

func TestWhatIsExportedCanBeImportedElsewhereAndAgain(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		src, dst := newRig(t, "p1"), newRig(t, "p1")
		for range rapid.IntRange(1, 3).Draw(rt, "imports") {
			if _, err := src.client("p1").Import(t.Context(), admin.ImportRequest{Routes: drawItems(rt), Prune: rapid.Bool().Draw(rt, "prune")}); err != nil {
				rt.Fatal(err)
			}
		}
		want := exported(t, src)
		if len(want) == 0 {
			return
		}
		for range 2 {
			res, err := dst.client("p1").Import(t.Context(), admin.ImportRequest{Routes: want})
			if err != nil {
				rt.Fatal(err)
			}
			for _, topic := range []string{topic1, topic2, topic3, "persistent://v1/east/ns/t4", "non-persistent://acme/orders/t1"} {
				from, to := src.stored(topic), dst.stored(topic)
				if from.Cluster != to.Cluster || to.Epoch < from.Epoch {
					rt.Fatalf("%s: exported %+v, imported %+v", topic, from, to)
				}
			}
			again, err := dst.client("p1").Import(t.Context(), admin.ImportRequest{Routes: want})
			if err != nil || len(again.Changed) != 0 {
				rt.Fatalf("importing the same again changes %+v, %v (first: %+v)", again.Changed, err, res.Changed)
			}
		}
	})
}

// The promise of core/route, through the API: the decided epoch never shrinks, and grows whenever the cluster changes.
func TestEpochsNeverShrinkAndGrowWithEachMove(t *testing.T) {
	topics := []string{topic1, topic2, topic3, "persistent://other/ns/t"}
	names := []string{"*", "acme", "acme/orders", "acme/bills", topic1, topic2, topic3}
	rapid.Check(t, func(rt *rapid.T) {
		r := newRig(t, "p1")
		c := r.client("p1")
		o := admin.ChangeOptions{Immediate: true}
		last := map[string]route.Decision{}
		for _, topic := range topics {
			last[topic] = r.stored(topic)
		}
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			name, cluster := rapid.SampledFrom(names).Draw(rt, "name"), rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "cluster")
			var err error
			what := rapid.SampledFrom([]string{"set", "rm", "import", "prune", "switch"}).Draw(rt, "what")
			switch what {
			case "set":
				_, err = c.Set(t.Context(), admin.SetRequest{Name: name, Cluster: cluster, ChangeOptions: o})
			case "rm":
				_, err = c.Remove(t.Context(), admin.RemoveRequest{Name: name, ChangeOptions: o})
			case "import", "prune":
				_, err = c.Import(t.Context(), admin.ImportRequest{Routes: drawItems(rt), Prune: what == "prune", ChangeOptions: o})
			case "switch":
				req := admin.SwitchRequest{Topics: []string{topic1, topic3}, To: cluster, Mode: "immediate"}
				if strings.Count(name, "/") == 1 {
					req.Topics, req.Namespace = nil, name
				}
				_, err = r.switchAndWait(req)
			}
			if err != nil && !strings.Contains(err.Error(), "already") && !strings.Contains(err.Error(), "no route") {
				rt.Fatal(err)
			}
			for _, topic := range topics {
				now := r.stored(topic)
				if now.Epoch < last[topic].Epoch || now.Cluster != last[topic].Cluster && now.Epoch == last[topic].Epoch {
					rt.Fatalf("after %s %s %s, %s: %+v → %+v", what, name, cluster, topic, last[topic], now)
				}
				last[topic] = now
			}
		}
	})
}

func TestALargeImportIsWrittenInChunksAndPrunes(t *testing.T) {
	r := newRig(t, "p1")
	items := []admin.ImportItem{{Name: "acme/orders", Cluster: "c"}}
	for i := range 3*store.MaxChange + 5 {
		items = append(items, admin.ImportItem{Name: fmt.Sprintf("acme/orders/n%d", i), Cluster: "b"})
	}
	res, err := r.client("p1").Import(t.Context(), admin.ImportRequest{Routes: items})
	if err != nil || len(res.Changed) != len(items) {
		t.Fatalf("changed %d of %d, %v", len(res.Changed), len(items), err)
	}
	h, err := r.client("p1").History(t.Context(), 100)
	if err != nil || len(h.Changes) < 4 {
		t.Errorf("%d writes, %v; want at least 4", len(h.Changes), err)
	}
	r.expect("persistent://acme/orders/n77", "b", 1)
	res, err = r.client("p1").Import(t.Context(), admin.ImportRequest{Routes: items[:2], Prune: true})
	if err != nil || len(res.Changed) != len(items)-2 || res.Unchanged != 2 {
		t.Fatalf("prune changed %d, left %d, %v", len(res.Changed), res.Unchanged, err)
	}
	r.expect("persistent://acme/orders/n0", "b", 1)
	if d := r.stored("persistent://acme/orders/n77"); d.Cluster != "c" || d.Epoch < 2 {
		t.Errorf("pruned topic: %+v", d)
	}
}

// SW-16: versioned writes, exactly one wins each round, and the loser is told who won.
func TestOfTwoOperatorsOneWinsAndTheOtherIsToldWho(t *testing.T) {
	r := newRig(t, "p1", "p2")
	const writers = 8
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for i := range writers {
		wg.Go(func() {
			c := r.client([]string{"p1", "p2"}[i%2])
			_, errs[i] = c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: []string{"b", "c"}[i%2], ChangeOptions: admin.ChangeOptions{Who: fmt.Sprintf("op%d", i), Immediate: true}})
		})
	}
	wg.Wait()
	wins := 0
	for _, err := range errs {
		if err == nil {
			wins++
			continue
		}
		if text := refusal(t, err); !strings.Contains(text, "409 conflict") || !strings.Contains(text, "changed by op") {
			t.Errorf("the loser reads: %s", text)
		}
	}
	if wins == 0 {
		t.Error("nobody won")
	}
	// The history must be one chain: every write began where the one before it ended.
	h, err := r.client("p1").History(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(h.Changes)
	var last *admin.Route
	for _, e := range h.Changes {
		if !reflect.DeepEqual(e.Changes[0].Before, last) {
			t.Errorf("write %d began from %+v, but the one before it left %+v", e.Seq, e.Changes[0].Before, last)
		}
		last = e.Changes[0].After
	}
}

func TestALostAnswerIsReportedAsUnknown(t *testing.T) {
	r := newRig(t, "p1")
	r.stores["p1"].SetFaults(store.Faults{LoseAnswers: true, Only: []string{"Apply"}})
	_, err := r.client("p1").Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "b"})
	if text := refusal(t, err); !strings.Contains(text, "503 outcome_unknown") || !strings.Contains(text, "routes get") {
		t.Error(text)
	}
}

// An epoch is computed from the rules above as well: when one of them changes before the write, the write must fail, or a
// topic's epoch could shrink.
func TestAChangeFailsWhenARuleAboveChangesMeanwhile(t *testing.T) {
	for name, change := range map[string]func(c *admin.Client) error{
		"set": func(c *admin.Client) error {
			_, err := c.Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "b"})
			return err
		},
		"set of a rule": func(c *admin.Client) error {
			_, err := c.Set(t.Context(), admin.SetRequest{Name: "acme/orders", Cluster: "b"})
			return err
		},
	} {
		for _, scope := range []string{"acme", ""} {
			r := newRig(t, "p1")
			rule := route.Rule{Scope: scope, Cluster: "c", Epoch: 5}
			hook := &hookStore{Memory: r.stores["p1"], before: func() {
				if err := r.st.Apply(t.Context(), store.Change{Rules: []store.RuleChange{{Scope: scope, After: &rule}}, Who: "eve", Why: "race"}); err != nil {
					t.Error(err)
				}
			}}
			s := admin.New(admin.Config{Store: hook, Proxy: r.proxies["p1"], PeerTransport: r.net})
			t.Cleanup(func() { _ = s.Shutdown(context.Background()) })
			r.net.Add("hooked:7780", s.Handler())
			if text := refusal(t, change(r.client("hooked"))); !strings.HasPrefix(text, "409 conflict: ") || !strings.Contains(text, "changed by eve") {
				t.Errorf("%s: %s", name, text)
			}
			r.expect(topic1, "c", 5)
			if err := change(r.client("hooked")); err != nil { // once more, from what is there now
				t.Errorf("%s: %v", name, err)
			}
			r.expect(topic1, "b", 6)
		}
	}
}
