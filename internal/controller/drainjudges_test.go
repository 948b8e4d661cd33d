package controller

import (
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

// drainable is a survey of a topic that may be drained: as good, without replication, with a busy subscription and one that is caught up.
func drainable() *survey {
	s := good()
	s.req.Mode, s.now = switching.ModeDrain, time.UnixMilli(1_000_000_000)
	s.from.Policies.Replication, s.to.Policies.Replication = []string{"a"}, []string{"b"}
	s.forth, s.back, s.subs = replication{}, replication{}, nil
	busy := []pulsaradmin.Consumer{{Name: "c1", Address: "/10.0.0.2:1", ClientVersion: "Pulsar-Go-v0.15.0"}}
	s.left = []pulsaradmin.Remaining{
		{Name: "busy", Backlog: 900, Unacked: 20, Consumers: append(busy, busy...), Partitions: 2},
		{Name: "s", Partitions: 2},
	}
	s.oldest = map[string]time.Time{"busy": s.now.Add(-time.Hour)}
	return s
}

func TestATopicThatMayDrainHasOnlyFineFindings(t *testing.T) {
	p := drainable().judge()
	for _, f := range p.Findings {
		if f.Verdict != switching.Fine || f.Remedy != "" || f.Evidence == "" {
			t.Errorf("%+v", f)
		}
	}
	for _, item := range items(t) {
		looked := slices.ContainsFunc(p.Findings, func(f switching.Finding) bool { return f.Item == item })
		if looked == (item == itemAddress) {
			t.Errorf("%s: in the findings: %v", item, looked)
		}
	}
	want := []switching.Left{
		{Subscription: "busy", Backlog: 900, Unacked: 20, Consumers: 2, By: []string{`consumer "c1" from 10.0.0.2:1 (Pulsar-Go-v0.15.0)`}, Oldest: time.UnixMilli(1_000_000_000).Add(-time.Hour)},
		{Subscription: "s"},
	}
	if p.Forecast == nil || fmt.Sprint(p.Forecast.Draining) != fmt.Sprint(want) || p.SubscriptionCount != 2 || p.Forecast.HoldMillis < 60 {
		t.Errorf("preflight %+v, forecast %+v", p, p.Forecast)
	}
}

func TestWhatIsInTheWayOfADrainIsFound(t *testing.T) {
	check := func(what string, change func(*survey), item string, verdict switching.Verdict, says string) {
		t.Helper()
		s := drainable()
		change(s)
		p := s.judge()
		bad := slices.DeleteFunc(slices.Clone(p.Findings), func(f switching.Finding) bool { return f.Verdict == switching.Fine })
		if len(bad) != 1 || bad[0].Item != item || bad[0].Verdict != verdict || !strings.Contains(bad[0].Evidence, says) || bad[0].Remedy == "" || p.Verdict != verdict {
			t.Errorf("%s: %+v, want one %s of %s that says %q", what, bad, verdict, item, says)
		}
	}
	seconds := func(n int64) *int64 { return &n }
	const b, w = switching.Blocker, switching.Warning
	check("replication (SW-17)", func(s *survey) { s.from.Policies.Replication = []string{"a", "b"} }, itemReplication, b, "cluster a replicates the topic to b: each message would be delivered twice")
	check("replication back (SW-17)", func(s *survey) { s.to.Policies.Replication = []string{"b", "a"} }, itemReplication, b, "cluster b replicates the topic to a")
	check("a third cluster", func(s *survey) { s.from.Policies.Replication = []string{"a", "c"} }, itemReplication, w, "cluster b does not")
	check("no namespace (SW-10)", func(s *survey) { s.to.Namespace = false }, itemClusters, b, "namespace acme/orders does not exist on cluster b")
	check("other partitions (SW-10)", func(s *survey) { s.to.Partitions = 1 }, itemTopic, b, "2 partitions on cluster a and 1 partition on cluster b")
	check("a partition that nobody has used", func(s *survey) { s.from.Parts[1].Missing = true }, itemTopic, b, base+"-partition-1")
	check("another schema (SW-10)", func(s *survey) { s.to.Schemas[0].Fingerprint = "bb" }, itemSchema, b, "version 0 of the schema is STRING aa")
	check("too many subscriptions", func(s *survey) {
		s.left = nil
		for i := range route.MaxDrainSubs + 1 {
			s.left = append(s.left, pulsaradmin.Remaining{Name: fmt.Sprintf("s%04d", i)})
		}
	}, itemSubscriptions, b, "1001 subscriptions, more than the 1000")
	check("names that are too long", func(s *survey) {
		s.left = nil
		for i := range 200 {
			s.left = append(s.left, pulsaradmin.Remaining{Name: fmt.Sprintf("%0200d", i)})
		}
	}, itemSubscriptions, b, "bytes, more than")
	check("what cannot be read", func(s *survey) { s.left, s.leftErr = nil, errors.New("no answer") }, itemSubscriptions, b, "no answer")
	check("nobody consumes", func(s *survey) { s.left[0].Consumers = nil }, itemSubscriptions, w, `subscription "busy" has 900 entries left on cluster a, and no consumer`)
	check("a backlog from before there", func(s *survey) {
		s.to.Parts[0].Stats.Subscriptions["s"] = pulsaradmin.SubscriptionStats{Durable: true, Backlog: 7}
	}, itemSubscriptions, w, `subscription "s" of `+base+`-partition-0 has 7 entries on cluster b, from before`)
	check("a consumer there", func(s *survey) {
		s.to.Parts[0].Stats.Subscriptions["s"] = pulsaradmin.SubscriptionStats{Durable: true, Consumers: []pulsaradmin.Consumer{{Name: "c", Address: "/10.0.0.9:1"}}}
	}, itemSubscriptions, w, `in use on cluster b already, by consumer "c" from 10.0.0.9:1`)
	check("subscriptions that expire there", func(s *survey) {
		s.to.Policies.SubExpiration = seconds(10)
		s.from.Policies.SubExpiration = seconds(10)
	}, itemRetention, w, "removes subscriptions that nobody has used for 10 minutes")
	check("history", func(s *survey) {
		policy := json.RawMessage(`{"retentionTimeInMinutes":60,"retentionSizeInMB":-1}`)
		s.from.Policies.Retention, s.to.Policies.Retention = policy, policy
	}, itemRetention, w, "readers and seeks find only what was published after it")
	check("native ids (SW-02, SW-03)", func(s *survey) { s.nativeIDs = true }, itemReaders, w, "message_ids is native")
	check("open transactions (SW-15)", func(s *survey) { s.from.Parts[0].Stats.OngoingTxn = 2 }, itemTransactions, b, "2 open transactions")
	check("delayed messages", func(s *survey) { s.left[0].Delayed = 8 }, itemDelayed, w, "8 messages are delayed: their subscriptions stay on cluster a")
	check("a compacted topic", func(s *survey) { s.from.Parts[1].Internal.Compacted = true }, itemCompaction, w, "finds only the keys that were published after it")
	check("a DLQ that stays", func(s *survey) { s.siblings = []sibling{{base + "-s-DLQ", "a"}} }, itemSiblings, w, "stay behind")
}

// A message TTL counts on both clusters: here for what is old, there for what waits until its subscription has moved.
func TestAMessageTTLIsHeldAgainstWhatIsLeft(t *testing.T) {
	check := func(here, there string, change func(*survey), want ...string) {
		t.Helper()
		s := drainable()
		s.from.TopicPolicies, s.to.TopicPolicies = map[string]json.RawMessage{"messageTTL": json.RawMessage(here)}, map[string]json.RawMessage{"messageTTL": json.RawMessage(there)}
		change(s)
		found := s.drainRetention()
		if len(want) == 0 && len(found) == 1 && found[0].Verdict == switching.Fine {
			return
		}
		if len(found) != len(want) {
			t.Fatalf("TTL %s and %s: %+v", here, there, found)
		}
		for i, says := range want {
			if found[i].Verdict != switching.Warning || !strings.Contains(found[i].Evidence, says) {
				t.Errorf("TTL %s and %s: %+v, want %q", here, there, found[i], says)
			}
		}
	}
	as := func(*survey) {}
	const old, new = `the oldest message of subscription "busy" is 1h0m0s old, and the message TTL on cluster a is 1h30m0s`, "the message TTL on cluster b is 2h0m0s"
	check("5400", "0", as, old)
	check("0", "7200", as, new)
	check("5400", "7200", as, old, new)
	check("86400", "0", as)
	check("5400", "7200", func(s *survey) { s.left = s.left[1:] })
	check("0", "0", func(s *survey) { n := int64(5400); s.from.Policies.TTL = &n }) // the topic's own counts
}

// What stops a planned switch and not this one.
func TestWhatADrainDoesNotMindIsFine(t *testing.T) {
	check := func(what string, change func(*survey)) {
		t.Helper()
		s := drainable()
		change(s)
		p := s.judge()
		for _, f := range p.Findings {
			if f.Verdict != switching.Fine {
				t.Errorf("%s: %+v", what, f)
			}
		}
		if p.Forecast == nil {
			t.Errorf("%s: no forecast", what)
		}
	}
	check("a topic that is not there yet", func(s *survey) { s.to.Exists, s.to.Parts, s.to.Partitions, s.to.Schemas = false, nil, 0, nil })
	check("a partition that is not there yet", func(s *survey) { s.to.Parts[1] = pulsaradmin.PartFacts{Topic: s.to.Parts[1].Topic, Missing: true} })
	check("an exclusive producer", func(s *survey) { s.from.Parts[0].Stats.Publishers[0].AccessMode = "Exclusive" })
	check("readers", func(s *survey) { s.from.Parts[0].Stats.Subscriptions["reader-1"] = pulsaradmin.SubscriptionStats{} })
	check("a subscription that nobody uses and that is caught up", func(s *survey) { s.left = append(s.left, pulsaradmin.Remaining{Name: "t"}) })
	check("transactions that have ended", func(s *survey) { s.from.Parts[0].Stats.CommittedTxn = 2 })
	check("no subscription", func(s *survey) { s.left = nil })
}

// The whole preflight against fake clusters: it writes nothing, though the new cluster lacks the topic.
func TestThePreflightOfADrainReadsWhatIsLeft(t *testing.T) {
	a, b := testkit.NewCluster("a", testkit.Options{}), testkit.NewCluster("b", testkit.Options{})
	t.Cleanup(a.Close)
	t.Cleanup(b.Close)
	a.CreateTopic(base, 0)
	b.CreateTopic("persistent://acme/orders/other", 0)
	for i := range uint64(10) {
		a.Publish(base, "p", i, []byte("x"))
	}
	a.Acknowledge(base, "holes", func(n int) bool { return n < 4 || n == 6 })
	a.Acknowledge(base, "done", func(int) bool { return true })
	st := store.NewMemory()
	t.Cleanup(func() { st.Close() })
	if err := st.Register(t.Context(), store.Proxy{ID: "p1", Incarnation: "i", Clusters: []string{"a", "b"}}); err != nil {
		t.Fatal(err)
	}
	clients := map[string]*pulsaradmin.Client{}
	for _, k := range []*testkit.Cluster{a, b} {
		clients[k.Name()] = pulsaradmin.New(pulsaradmin.Config{Cluster: k.Name(), WebURLs: []string{k.Web()}})
		t.Cleanup(clients[k.Name()].Close)
	}
	c := New(Config{Store: st, ID: "p1", DefaultCluster: "a", Log: slog.New(slog.DiscardHandler), Clients: clients})
	p, err := c.Check(t.Context(), switching.CheckRequest{Topic: base, From: "a", To: "b", Mode: switching.ModeDrain})
	if err != nil || p.Forecast == nil {
		t.Fatalf("%+v, %v", p, err)
	}
	left := p.Forecast.Draining
	if len(left) != 2 || left[0].Subscription != "holes" || left[0].Backlog != 5 || left[1].Backlog != 0 || time.Since(left[0].Oldest) > time.Minute {
		t.Errorf("left: %+v", left)
	}
	var bad []string
	for _, f := range p.Findings {
		if f.Verdict != switching.Fine && f.Item != itemLeader {
			bad = append(bad, f.Item+": "+f.Evidence)
		}
	}
	if want := []string{`subscriptions: subscription "holes" has 5 entries left on cluster a, and no consumer: it stays there until somebody consumes them`}; !slices.Equal(bad, want) {
		t.Errorf("findings %q, want %q", bad, want)
	}
	if topics := b.Topics(); len(topics) != 1 {
		t.Errorf("the preflight made %q", topics)
	}
}
