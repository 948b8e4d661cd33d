package testkit_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"pointsman/internal/pulsaradmin"
	"pointsman/internal/testkit"
)

// What carries subscriptions between real clusters carries them between two of these, holes included.
func TestSubscriptionsAreCarriedByTheAdminAddress(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, b := testkit.NewCluster("a", testkit.Options{EntriesPerLedger: 7}), testkit.NewCluster("b", testkit.Options{EntriesPerLedger: 5, LedgerBase: 500})
	t.Cleanup(a.Close)
	t.Cleanup(b.Close)
	replication := testkit.Replicate(a, b, testkit.ReplicationOptions{})
	t.Cleanup(replication.Close)
	from := pulsaradmin.New(pulsaradmin.Config{Cluster: "a", WebURLs: []string{a.Web()}})
	to := pulsaradmin.New(pulsaradmin.Config{Cluster: "b", WebURLs: []string{b.Web()}})
	t.Cleanup(from.Close)
	t.Cleanup(to.Close)
	const topic = "persistent://acme/orders/created"
	a.CreateTopic(topic, 0)
	b.CreateTopic(topic, 0)
	const messages = 40
	for i := range uint64(messages) {
		a.Publish(topic, "p", i, fmt.Append(nil, i))
	}
	a.Acknowledge(topic, "holes", func(n int) bool { return n < 10 || n%3 == 0 })
	a.Acknowledge(topic, "nothing", func(int) bool { return false })
	a.Acknowledge(topic, "all", func(int) bool { return true })
	log, err := from.Tail(ctx, topic)
	if err != nil || log.Len() != messages {
		t.Fatalf("%d entries, %v", log.Len(), err)
	}
	if err := a.Await(ctx, "everything to be replicated", func() bool {
		r, err := from.Replicator(ctx, topic, "b", time.Now())
		return err == nil && r.Reached(log.Last)
	}); err != nil {
		t.Fatal(err)
	}
	facts, err := from.Facts(ctx, topic)
	if err != nil || !facts.Exists || !facts.Replicates("b") || len(facts.Parts) != 1 {
		t.Fatalf("%+v, %v", facts, err)
	}
	pair := pulsaradmin.NewPair(topic, from, to)
	t.Cleanup(pair.Close)
	plans, err := pair.Plans(ctx)
	if err != nil || len(plans) != 3 {
		t.Fatalf("%d plans, %v", len(plans), err)
	}
	if err := pair.Apply(ctx, plans); err != nil {
		t.Fatal(err)
	}
	differences, err := pair.ReadBack(ctx, plans)
	if err != nil || pulsaradmin.Differences(differences) != "" {
		t.Fatalf("%s, %v", pulsaradmin.Differences(differences), err)
	}
	info, _ := b.Topic(topic)
	for name, want := range map[string]int{"holes": 20, "nothing": messages, "all": 0} {
		if have := info.Subscriptions[name].Backlog; have != want {
			t.Errorf("subscription %s has a backlog of %d on b, want %d", name, have, want)
		}
	}
	for _, p := range plans {
		if !p.How.Exact() {
			t.Errorf("%s was found by %s", p.Subscription, p.How)
		}
	}
}
