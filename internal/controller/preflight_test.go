package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// good is a survey of a topic that may move: two partitions of one message each, a subscription, two proxies.
func good() *survey {
	side := func(cluster, other string) pulsaradmin.Facts {
		f := pulsaradmin.Facts{
			Cluster: cluster, Topic: base, Tenant: true, Namespace: true, Exists: true, Partitions: 2,
			Policies: pulsaradmin.Policies{Replication: []string{cluster, other}},
			Schemas:  []pulsaradmin.Schema{{Version: 0, Type: "STRING", Fingerprint: "aa"}},
		}
		for _, name := range pulsaradmin.PartitionNames(base, 2) {
			f.Parts = append(f.Parts, pulsaradmin.PartFacts{Topic: name, Stats: pulsaradmin.Stats{Subscriptions: map[string]pulsaradmin.SubscriptionStats{"s": {Durable: true, Type: "Shared"}}}})
		}
		return f
	}
	at := pulsaradmin.Position{Ledger: 7, Entry: 0}
	sent := pulsaradmin.Replicator{Exists: true, Position: at, Last: at}
	both := replication{before: []pulsaradmin.Replicator{sent, sent}, after: []pulsaradmin.Replicator{sent, sent}}
	s := &survey{
		req:     switching.CheckRequest{Topic: base, From: "a", To: "b", With: []string{base}, Handles: switching.HandleFacts{Producers: 2}},
		members: []store.Proxy{{ID: "p1", Live: true, Clusters: []string{"a", "b"}}, {ID: "p2", Live: true, Clusters: []string{"a", "b"}}}, leader: "p1",
		from: side("a", "b"), to: side("b", "a"), forth: both, back: both,
	}
	s.from.Parts[0].Stats.Publishers = []pulsaradmin.Publisher{{Name: "x", Address: "/10.0.0.1:5", ClientVersion: "Pulsar-Java-v4.0.8", AccessMode: "Shared"}}
	for _, p := range s.from.Parts {
		s.subs = append(s.subs, subscription{topic: p.Topic, sub: pulsaradmin.Sub{Name: "s", Backlog: 3}, plan: pulsaradmin.Plan{Topic: p.Topic, Subscription: "s", How: pulsaradmin.ByOrigin}})
	}
	return s
}

func TestATopicThatMayMoveHasOnlyFineFindings(t *testing.T) {
	p := good().judge()
	for _, f := range p.Findings {
		if f.Verdict != switching.Fine || f.Remedy != "" || f.Evidence == "" {
			t.Errorf("%+v", f)
		}
	}
	if p.Verdict != switching.Fine || p.Forecast == nil || p.SubscriptionCount != 2 || len(p.Subscriptions) != 2 {
		t.Errorf("preflight = %+v", p)
	}
	// Every item of the list has its line, so that an operator sees what was looked at.
	for _, item := range items(t) {
		looked := slices.ContainsFunc(p.Findings, func(f switching.Finding) bool { return f.Item == item })
		if looked == (item == itemAddress) { // said only when one is missing
			t.Errorf("%s: in the findings: %v", item, looked)
		}
	}
}

// items are all there are, from the source.
func items(t *testing.T) (all []string) {
	t.Helper()
	source, err := os.ReadFile("judges.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^\titem\w+ += "([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		all = append(all, m[1])
	}
	if len(all) < 19 {
		t.Fatalf("items: %q", all)
	}
	return all
}

// Clusters of old versions: what falls back is said and counted before it is done, and keeps nobody from it.
func TestCopiesThatDoNotSayWhereTheyComeFromAreForecast(t *testing.T) {
	s := good()
	if p := s.judge(); p.Forecast.Bare != 0 {
		t.Fatalf("forecast %+v", p.Forecast)
	}
	for i := range s.subs {
		s.subs[i].plan.How, s.subs[i].plan.By, s.subs[i].plan.Unacked = pulsaradmin.AtEnd, pulsaradmin.ByProducer, 5
	}
	p := s.judge()
	i := slices.IndexFunc(p.Findings, func(f switching.Finding) bool { return f.Item == itemSubscriptions })
	if says := p.Findings[i].Evidence; p.Verdict != switching.Fine || !strings.Contains(says, "whose brokers are older than 4.0.4") || !strings.Contains(says, "the 10 messages that they have now") {
		t.Errorf("%s: %s", p.Verdict, says)
	}
	if p.Forecast.Bare != 2 || p.Forecast.Duplicates != 10 || p.Subscriptions[0].By != "producer and sequence id" {
		t.Errorf("forecast %+v of %+v", p.Forecast, p.Subscriptions)
	}
}

// Each change of what is good has exactly one finding that is not, with evidence and remedy.
func TestWhatIsNotAsItShouldBeIsFound(t *testing.T) {
	check := func(what string, change func(*survey), item string, verdict switching.Verdict, says string) {
		t.Helper()
		s := good()
		change(s)
		p := s.judge()
		bad := slices.DeleteFunc(slices.Clone(p.Findings), func(f switching.Finding) bool { return f.Verdict == switching.Fine })
		if len(bad) != 1 || bad[0].Item != item || bad[0].Verdict != verdict || !strings.Contains(bad[0].Evidence, says) || bad[0].Remedy == "" || p.Verdict != verdict {
			t.Errorf("%s: %+v, want one %s of %s that says %q", what, bad, verdict, item, says)
		}
	}
	const b, w = switching.Blocker, switching.Warning
	check("other names than the clusters have among themselves", func(s *survey) { s.from.Known, s.to.Known = []string{"a", "b"}, []string{"east", "west"} }, itemClusters, b,
		"cluster b knows no cluster a but east, west: replication goes by those names")
	check("a proxy that is away", func(s *survey) { s.members[1].Live = false }, itemProxies, b, "proxy p2 is on the roster and not connected")
	check("a proxy that is away, and holds its publishes then", func(s *survey) { s.members[1].Live, s.members[1].MaxMapAgeMillis = false, 50_000 }, itemProxies, w,
		"proxy p2 is on the roster and not connected to the map store: the switch does not wait for it once the leader has not seen it for 1m52s (its max_map_age of 50s and a margin)")
	check("a proxy that does not know the cluster", func(s *survey) { s.members[1].Clusters = []string{"a"} }, itemProxies, b, "proxy p2 does not know cluster b (it has a)")
	check("subscriptions that only the new cluster has", func(s *survey) {
		for _, part := range s.to.Parts { // once for all partitions; what is no subscription of an application, or ends with its consumer, is left out
			part.Stats.Subscriptions["gone"] = pulsaradmin.SubscriptionStats{Durable: true, Backlog: 2}
			part.Stats.Subscriptions["pulsar.dedup"] = pulsaradmin.SubscriptionStats{Durable: true}
			part.Stats.Subscriptions["reader"] = pulsaradmin.SubscriptionStats{}
		}
		s.to.Parts[1].Stats.Subscriptions["old"] = pulsaradmin.SubscriptionStats{Durable: true}
	}, itemSubscriptions, w, "cluster b has 2 subscriptions that cluster a does not have: gone, old. They are not carried")
	check("messages of different origin in very different orders", func(s *survey) {
		s.subs[1].plan.Unsettled, s.subs[1].plan.Note = true, "look at subscription s after the switch"
	}, itemSubscriptions, w, "it may skip messages that came from other clusters (look at subscription s after the switch)")
	check("no proxy", func(s *survey) { s.members = nil }, itemProxies, b, "no proxy is on the roster")
	check("no leader", func(s *survey) { s.leader = "" }, itemLeader, w, "no proxy drives the switches")
	check("no web_url", func(s *survey) { s.noAddress = []string{"b"} }, itemAddress, b, "clusters.b.web_url is not set")
	check("a cluster that does not answer", func(s *survey) { s.toErr = errors.New("connection refused") }, itemClusters, b, "connection refused")
	check("credentials (SW-11)", func(s *survey) { s.toErr = &pulsaradmin.Error{Cluster: "b", Status: 401} }, itemClusters, b, "cluster b does not accept the controller's credentials")
	check("no tenant", func(s *survey) { s.to.Tenant = false }, itemClusters, b, "tenant acme does not exist on cluster b")
	check("no namespace (SW-10)", func(s *survey) { s.to.Namespace = false }, itemClusters, b, "namespace acme/orders does not exist on cluster b")
	check("a migrated namespace", func(s *survey) { s.to.Policies.Migrated = true }, itemClusters, b, "marked as migrated on cluster b")
	check("no topic here", func(s *survey) { s.from.Exists = false }, itemTopic, b, "does not exist on cluster a")
	check("no topic there", func(s *survey) { s.to.Exists = false }, itemTopic, b, "does not exist on cluster b")
	check("other partitions (SW-10)", func(s *survey) { s.to.Partitions = 1 }, itemTopic, b, "2 partitions on cluster a and 1 partition on cluster b")
	check("a partition that is not there", func(s *survey) { s.from.Parts[1].Missing = true }, itemTopic, b, base+"-partition-1")
	check("another schema (SW-10)", func(s *survey) { s.to.Schemas[0].Fingerprint = "bb" }, itemSchema, b, "version 0 of the schema is STRING aa on cluster a and STRING bb on cluster b")
	check("a schema there only", func(s *survey) { s.to.Schemas = append(s.to.Schemas, pulsaradmin.Schema{Version: 1}) }, itemSchema, w, "cluster a lacks version 1")
	check("the same, and a way back", func(s *survey) {
		s.to.Schemas, s.req.Reversible = append(s.to.Schemas, pulsaradmin.Schema{Version: 1}), true
	}, itemSchema, b, "cluster a lacks version 1")
	check("a replicator that stands (GR-01)", func(s *survey) {
		stuck := pulsaradmin.Replicator{Exists: true, Connected: true, Position: pulsaradmin.Position{Ledger: 7}, Last: pulsaradmin.Position{Ledger: 7, Entry: 9}, Backlog: 9}
		s.forth.before, s.forth.after = []pulsaradmin.Replicator{stuck, stuck}, []pulsaradmin.Replicator{stuck, stuck}
	}, itemReplication, b, "9 entries wait to be replicated and none was sent")
	check("a large backlog (SW-08)", backlog(10_000), itemReplication, b, "20000 entries wait to be replicated from a to b (20010 a moment before)")
	check("a backlog", backlog(500), itemReplication, w, "1000 entries wait")
	check("replication that cannot be read", func(s *survey) { s.forth.err = errors.New("no answer") }, itemReplication, b, "no answer")
	check("no way back (SW-17)", func(s *survey) {
		s.to.Policies.Replication = []string{"b"}
		s.from.Policies.Replication = []string{"a", "b"}
	}, itemWayBack, w, "cluster b replicates the topic to [b] and not to a")
	check("no way back where it is wanted", func(s *survey) { s.to.Policies.Replication, s.req.Reversible = nil, true }, itemWayBack, b, "there would be no way back")
	check("a subscription without copies", func(s *survey) { s.subs[0].plan.Missing, s.subs[0].plan.How = 4, pulsaradmin.NotThere }, itemSubscriptions, b, "4 entries that are not acknowledged have no copy on cluster b")
	check("acknowledgements that are too far (GR-02)", func(s *survey) { s.subs[0].plan.Repeated = 5 }, itemSubscriptions, w, "5 entries come again")
	check("a place found by time", func(s *survey) { s.subs[0].plan.How = pulsaradmin.ByTime }, itemSubscriptions, w, "found by publish time only")
	check("a subscription that cannot be planned", func(s *survey) { s.subs[0].err = errors.New("broken") }, itemSubscriptions, b, `subscription "s" of `+base+`-partition-0: broken`)
	check("one that may not be read", func(s *survey) { s.subs[0].err = &pulsaradmin.Error{Status: 403} }, itemSubscriptions, b, "status 403")
	silent := func(asked int) error {
		return fmt.Errorf("subscription s: %w", &pulsaradmin.Error{Cluster: "a", Call: "GET /x", Err: context.DeadlineExceeded, Asked: asked})
	}
	check("a cluster that does not answer in time", func(s *survey) { s.fromErr = silent(3) }, itemClusters, b, "cluster a does not answer (a preflight waits for 25s at most): subscription s: cluster a: GET /x: context deadline exceeded (asked 3 times)")
	check("subscriptions that cannot be listed", func(s *survey) { s.subs[0] = subscription{topic: base, err: silent(2)} }, itemSubscriptions, b, "the subscriptions of "+base+": subscription s: cluster a: GET /x: context deadline exceeded (asked 2 times)")
	check("one that there was no time to ask for again", func(s *survey) { s.subs[0].err = silent(0) }, itemSubscriptions, w, "was not looked at")
	check("one that was not looked at in time", func(s *survey) { s.subs[0].err = context.DeadlineExceeded }, itemSubscriptions, w, "was not looked at")
	check("a consumer there", func(s *survey) {
		s.to.Parts[0].Stats.Subscriptions["s"] = pulsaradmin.SubscriptionStats{Durable: true, Consumers: []pulsaradmin.Consumer{{Name: "c", Address: "/10.0.0.9:1"}}}
	}, itemSubscriptions, b, `in use on cluster b already, by consumer "c" from 10.0.0.9:1`)
	check("a backlog without retention", func(s *survey) { delete(s.to.Parts[0].Stats.Subscriptions, "s") }, itemRetention, w, "keeps no messages without a subscription")
	check("a backlog without retention, on its way", func(s *survey) {
		delete(s.to.Parts[0].Stats.Subscriptions, "s")
		s.subs[0].err = &pulsaradmin.ErrBehind{Topic: base}
	}, itemRetention, w, "keeps no messages without a subscription")
	check("native ids (SW-02, SW-03)", func(s *survey) { s.nativeIDs = true }, itemReaders, w, "message_ids is native")
	check("a reader that begins anew", func(s *survey) {
		s.from.Parts[0].Stats.Subscriptions["reader"] = pulsaradmin.SubscriptionStats{Consumers: []pulsaradmin.Consumer{{ClientVersion: "pulsar-rs-v6.9.1"}}}
	}, itemReaders, w, "1 reader of the Rust client")
	check("an exclusive producer", func(s *survey) { s.from.Parts[0].Stats.Publishers[0].AccessMode = "Exclusive" }, itemProducers, b, `producer "x" from 10.0.0.1:5 (Pulsar-Java-v4.0.8) has access mode Exclusive`)
	check("a client that nobody measured", func(s *survey) { s.from.Parts[0].Stats.Publishers[0].ClientVersion = "DotPulsar-v3" }, itemClients, w, `"DotPulsar-v3" (1)`)
	check("a producer past the proxies", func(s *survey) { s.req.Handles.Producers = 0 }, itemBypass, w, "cluster a has 1 producers on the topic, and the proxies have 0")
	check("a proxy that was not asked", func(s *survey) { s.req.Handles = switching.HandleFacts{Unasked: []string{"p2: timeout"}} }, itemBypass, w, "p2: timeout")
	check("a producer there", func(s *survey) { s.to.Parts[1].Stats.Publishers = []pulsaradmin.Publisher{{Name: "y"}} }, itemBypass, w, `somebody publishes on cluster b already: producer "y"`)
	check("open transactions (SW-15)", func(s *survey) { s.from.Parts[0].Stats.OngoingTxn = 2 }, itemTransactions, b, "2 open transactions")
	check("transactions of old brokers (SW-15)", func(s *survey) { s.from.Parts[0].Stats.CommittedTxn, s.from.Version = 2, "3.0.0" }, itemTransactions, b,
		`2 transactions have ended since the topic was loaded, and brokers of cluster a (version "3.0.0") do not tell what was aborted`)
	check("transactions of brokers that do not tell their version (SW-15)", func(s *survey) { s.from.Parts[0].Stats.AbortedTxn, s.from.Version = 2, "" }, itemTransactions, b, "2 transactions have ended")
	check("delayed messages", func(s *survey) {
		s.from.Parts[0].Stats.Subscriptions["s"] = pulsaradmin.SubscriptionStats{Durable: true, Delayed: 8}
	}, itemDelayed, w, "8 messages are delayed")
	check("a DLQ that stays", func(s *survey) { s.siblings = []sibling{{base + "-s-DLQ", "a"}, {base + "-s-RETRY", "b"}} }, itemSiblings, w, "stay behind: "+base+"-s-DLQ (on a)")
	check("siblings that cannot be listed", func(s *survey) { s.siblingErr = errors.New("no answer") }, itemSiblings, w, "no answer")
	check("a compacted topic", func(s *survey) { s.from.Parts[1].Internal.Compacted = true }, itemCompaction, w, base+"-partition-1 is compacted on cluster a")
	check("another policy", func(s *survey) { s.from.Policies.SchemaEnforced = true }, itemPolicies, w, "required schema in the namespace: true on cluster a, false on cluster b")
}

// backlog has both partitions wait with n entries, a moment after five more.
func backlog(n int64) func(*survey) {
	return func(s *survey) {
		before := pulsaradmin.Replicator{Exists: true, Position: pulsaradmin.Position{Ledger: 7, Entry: 5}, Last: pulsaradmin.Position{Ledger: 7, Entry: 1 << 20}, Backlog: n + 5}
		after := before
		after.Position.Entry, after.Backlog = 10, n
		s.forth.before, s.forth.after = []pulsaradmin.Replicator{before, before}, []pulsaradmin.Replicator{after, after}
	}
}

// What looks wrong and is not.
func TestWhatIsInOrderIsFine(t *testing.T) {
	check := func(what string, change func(*survey)) {
		t.Helper()
		s := good()
		change(s)
		for _, f := range s.judge().Findings {
			if f.Verdict != switching.Fine {
				t.Errorf("%s: %+v", what, f)
			}
		}
	}
	check("a replicator that is not connected because all is sent (SW-09)", func(s *survey) { s.forth.after[0].Connected = false })
	check("a partition to which nothing was ever published has no replicator", func(s *survey) {
		empty := pulsaradmin.Replicator{Position: pulsaradmin.NoPosition, Last: pulsaradmin.Position{Ledger: 3, Entry: -1}}
		s.forth.before, s.forth.after = []pulsaradmin.Replicator{empty, s.forth.after[1]}, []pulsaradmin.Replicator{empty, s.forth.after[1]}
	})
	check("a subscription at the end, which the replicator is about to reach", func(s *survey) {
		s.subs[0].err = fmt.Errorf("subscription s: %w", &pulsaradmin.ErrBehind{Topic: base})
	})
	check("a sibling that moves too", func(s *survey) {
		s.siblings, s.req.With = []sibling{{base + "-s-DLQ", "a"}}, []string{base, base + "-s-DLQ"}
	})
	check("a new subscription where retention keeps messages", func(s *survey) {
		delete(s.to.Parts[0].Stats.Subscriptions, "s")
		policy := json.RawMessage(`{"retentionTimeInMinutes":60,"retentionSizeInMB":-1}`)
		s.from.Policies.Retention, s.to.Policies.Retention = policy, policy
	})
	check("transactions that have ended, of which replication carries what was committed (SW-15)", func(s *survey) {
		s.from.Parts[0].Stats.CommittedTxn, s.from.Parts[1].Stats.AbortedTxn, s.from.Version = 2, 1, "4.0.8"
	})
	check("readers", func(s *survey) { s.from.Parts[0].Stats.Subscriptions["reader-1"] = pulsaradmin.SubscriptionStats{} })
	check("no clients", func(s *survey) { s.from.Parts[0].Stats.Publishers = nil })
}

func TestOfManySubscriptionsTheFirstAreNamedAndTheOthersCounted(t *testing.T) {
	s := good()
	for i := range 300 {
		s.subs = append(s.subs, subscription{topic: base, sub: pulsaradmin.Sub{Name: fmt.Sprintf("s%d", i)}, plan: pulsaradmin.Plan{How: pulsaradmin.ByOrigin, Missing: 1}})
	}
	p := s.judge()
	var said []string
	for _, f := range p.Findings {
		if f.Verdict == switching.Blocker {
			said = append(said, f.Evidence)
		}
	}
	if len(said) != maxNamed+1 || !strings.Contains(said[maxNamed], "and 295 more subscriptions") || p.SubscriptionCount != 302 || len(p.Subscriptions) != switching.MaxCarried {
		t.Errorf("%d subscriptions, %d listed, blockers: %q", p.SubscriptionCount, len(p.Subscriptions), said)
	}
}

func TestTheForecastAddsUpWhatMoves(t *testing.T) {
	s := good()
	from := &s.from.Parts[0].Stats
	from.BytesIn, from.BytesOut = 1000, 3000
	s.from.Parts[1].Stats.BytesIn = 500
	s.from.Parts[1].Stats.Publishers = []pulsaradmin.Publisher{{Name: "y", Address: "/10.0.0.1:5"}, {Name: "z", Address: "/10.0.0.2:5"}}
	from.Subscriptions["s"] = pulsaradmin.SubscriptionStats{Durable: true, Consumers: []pulsaradmin.Consumer{{Address: "/10.0.0.2:5"}, {Address: "/10.0.0.3:5"}}}
	s.subs[0].plan.Unacked, s.subs[1].plan.Repeated = 3, 4
	s.planTook, s.readTook = 40*time.Millisecond, 10*time.Millisecond
	backlog(100)(s)
	f := *s.judge().Forecast
	want := switching.Forecast{HoldMillis: 60 + 200 + 40 + 50, Duplicates: 7, Producers: 3, Consumers: 2, Connections: 3, BytesIn: 1500, BytesOut: 3000, Unreplicated: 200}
	if !reflect.DeepEqual(f, want) {
		t.Errorf("forecast %+v, want %+v: 200 entries at 1,000 a second, one look at the subscriptions and five at the ends", f, want)
	}
}

// adminAddress asks a cluster that answers by adminAnswers.
func adminAddress(t *testing.T, cluster, other string, siblings ...string) *pulsaradmin.Client {
	return adminClient(t, cluster, adminAnswers(t, cluster, other, siblings...))
}

func adminClient(t *testing.T, cluster string, answers http.Handler) *pulsaradmin.Client {
	srv := httptest.NewServer(answers)
	t.Cleanup(srv.Close)
	c := pulsaradmin.New(pulsaradmin.Config{Cluster: cluster, WebURLs: []string{srv.URL}})
	t.Cleanup(c.Close)
	return c
}

// adminAnswers are those of a cluster that has the topic, empty, with one subscription. Anything but reading fails the test.
func adminAnswers(t *testing.T, cluster, other string, siblings ...string) http.Handler {
	list, err := json.Marshal(append([]string{base}, siblings...))
	if err != nil {
		t.Fatal(err)
	}
	const at = "/admin/v2/persistent/acme/orders/created/"
	answers := map[string]string{
		"/admin/v2/tenants/acme":                       `{}`,
		"/admin/v2/namespaces/acme/orders":             fmt.Sprintf(`{"replication_clusters":[%q,%q]}`, cluster, other),
		"/admin/v2/persistent/acme/orders":             string(list),
		"/admin/v2/persistent/acme/orders/partitioned": `[]`,
		at + "partitions":                              `{"partitions":0}`,
		at + "stats":                                   `{"publishers":[],"subscriptions":{"s":{"type":"Shared","isDurable":true}},"replication":{}}`,
		at + "internalStats":                           fmt.Sprintf(`{"lastConfirmedEntry":"3:-1","ledgers":[{"ledgerId":3,"entries":0}],"cursors":{"s":{"markDeletePosition":"3:-1","readPosition":"3:0","individuallyDeletedMessages":"[]"},"pulsar.repl.%s":{"markDeletePosition":"3:-1","readPosition":"3:0","individuallyDeletedMessages":"[]"}}}`, other),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("cluster %s: a preflight wrote: %s %s", cluster, r.Method, r.URL)
		}
		text, ok := answers[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = io.WriteString(w, text)
	})
}

// A broker that is too busy for one question of many blocks no switch, and one that never answers does.
func TestAClusterThatDoesNotAnswerIsAskedAgainBeforeItIsJudged(t *testing.T) {
	check := func(busy int64) (clusters switching.Finding, worst switching.Verdict) {
		t.Helper()
		answers := adminAnswers(t, "b", "a")
		var asked atomic.Int64
		b := adminClient(t, "b", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/partitions") && asked.Add(1) <= busy {
				panic(http.ErrAbortHandler) // the connection breaks off
			}
			answers.ServeHTTP(w, r)
		}))
		st := store.NewMemory()
		t.Cleanup(func() { st.Close() })
		if err := st.Register(t.Context(), store.Proxy{ID: "p1", Incarnation: "i", Clusters: []string{"a", "b"}}); err != nil {
			t.Fatal(err)
		}
		c := New(Config{Store: st, ID: "p1", DefaultCluster: "a", Log: slog.New(slog.DiscardHandler), Clients: map[string]*pulsaradmin.Client{"a": adminAddress(t, "a", "b"), "b": b}})
		p, err := c.Check(t.Context(), switching.CheckRequest{Topic: base, From: "a", To: "b"})
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(p.Findings, func(f switching.Finding) bool { return f.Item == itemClusters })
		return p.Findings[i], p.Verdict
	}
	if f, worst := check(0); f.Verdict != switching.Fine || f.Evidence != "both answer, and have the namespace" || worst == switching.Blocker {
		t.Errorf("it answers at once: %+v, %s", f, worst)
	}
	if f, worst := check(2); f.Verdict != switching.Fine || worst == switching.Blocker ||
		f.Evidence != "both answer, and have the namespace; cluster b answered 1 question only when asked again: are its brokers overloaded?" {
		t.Errorf("it answers the third time: %+v, %s", f, worst)
	}
	if f, _ := check(1000); f.Verdict != switching.Blocker || !strings.Contains(f.Evidence, "cluster b does not answer (a preflight waits for 25s at most): ") || !strings.Contains(f.Evidence, "(asked 3 times)") ||
		f.Remedy != "see whether its brokers run, and what keeps them busy; then try again" {
		t.Errorf("it never answers: %+v", f)
	}
}

func TestAPreflightReadsBothClustersAndTheStoreAndWritesNothing(t *testing.T) {
	st := store.NewMemory()
	t.Cleanup(func() { st.Close() })
	if err := st.Register(t.Context(), store.Proxy{ID: "p1", Incarnation: "i", Clusters: []string{"a", "b"}}); err != nil {
		t.Fatal(err)
	}
	// The map has one of the two siblings on the new cluster already.
	there := route.Entry{Topic: base + "-s-RETRY", Cluster: "b", Epoch: 1}
	if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: there.Topic, After: &there}}}); err != nil {
		t.Fatal(err)
	}
	c := New(Config{
		Store: st, ID: "p1", DefaultCluster: "a", Log: slog.New(slog.DiscardHandler),
		Clients: map[string]*pulsaradmin.Client{"a": adminAddress(t, "a", "b", base+"-s-DLQ", there.Topic, base+"-other"), "b": adminAddress(t, "b", "a")},
	})
	p, err := c.Check(t.Context(), switching.CheckRequest{Topic: base, From: "a", To: "b"})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range p.Findings {
		switch f.Item {
		case itemLeader: // nobody runs
			if f.Verdict != switching.Warning {
				t.Errorf("%+v", f)
			}
		case itemSiblings:
			if f.Verdict != switching.Warning || f.Evidence != "DLQ and RETRY topics stay behind: "+base+"-s-DLQ (on a)" {
				t.Errorf("%+v", f)
			}
		default:
			if f.Verdict != switching.Fine {
				t.Errorf("%+v", f)
			}
		}
	}
	if p.Topic != base || p.From != "a" || p.To != "b" || p.Verdict != switching.Warning || p.SubscriptionCount != 1 || p.Subscriptions[0].How != string(pulsaradmin.AtEnd) || p.Forecast.HoldMillis < 60 {
		t.Errorf("preflight = %+v, forecast %+v", p, p.Forecast)
	}
	p, err = c.Check(t.Context(), switching.CheckRequest{Topic: base, From: "a", To: "c"})
	if err != nil || p.Verdict != switching.Blocker || !strings.Contains(fmt.Sprint(p.Findings), "clusters.c.web_url is not set") || p.Forecast != nil {
		t.Errorf("to a cluster without web_url: %+v, %v", p, err)
	}
}

// docs/operations.md explains every item and every metric of this package, and no other items.
func TestTheOperatorsGuideExplainsEveryItemAndMetric(t *testing.T) {
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "### What a preflight finds\n")
	section, _, _ = strings.Cut(section, "\n#")
	var explained []string
	for line := range strings.Lines(section) {
		if name, found := strings.CutPrefix(line, "| `"); found {
			name, _, _ = strings.Cut(name, "`")
			explained = append(explained, name)
		}
	}
	want := items(t)
	slices.Sort(explained)
	slices.Sort(want)
	if !ok || !slices.Equal(explained, want) {
		t.Errorf("explained: %q\nthere are: %q", explained, want)
	}
	descs := make(chan *prometheus.Desc, 100)
	New(Config{}).Describe(descs)
	close(descs)
	for desc := range descs {
		if name := regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(desc.String())[1]; !strings.Contains(string(text), "`"+name) {
			t.Errorf("docs/operations.md does not list %s", name)
		}
	}
}
