//go:build e2e

package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"
)

// Clusters whose brokers deduplicate and coordinate transactions: both are off in the rig's own.
func TestSwitchesOfClustersWithTransactionsAndDeduplication(t *testing.T) {
	t.Parallel()
	ctx := limited(t, versionsLimit)
	began := time.Now()
	var both [2]*Cluster
	for i, name := range []string{"ta" + runID, "tb" + runID} {
		c, err := rig.StartLone(ctx, name, newVersion, "transactionCoordinatorEnabled=true", "brokerDeduplicationEnabled=true")
		if c != nil {
			t.Cleanup(func() {
				if err := rig.StopLone(c); err != nil {
					t.Error(err)
				}
			})
		}
		must(t, err)
		both[i] = c
	}
	tenant := "exactly" + runID
	must(t, rig.Introduce(ctx, tenant, both[:]...))
	t.Logf("two clusters with transactions and deduplication are ready after %.1f s", time.Since(began).Seconds())
	proxies := pairOf(t, "exactly", rig.ConfigOf("exactly-"+runID, both[:]...))
	t.Run("deduplication", func(t *testing.T) { deduplicatingProducer(t, proxies, both, newTopic(tenant+"/geo", "dedup")) })
	t.Run("transaction", func(t *testing.T) { openTransaction(t, proxies, both, newTopic(tenant+"/geo", "open")) })
	t.Run("drain", func(t *testing.T) { drainWithTransactions(t, proxies, both, newTopic(tenant+"/plain", "drain")) })
}

// A producer that the brokers deduplicate goes there and back: nothing is lost, and nothing twice.
func deduplicatingProducer(t *testing.T, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	for _, client := range someClients(Java) {
		l := startLoad(t, loadConfig{
			scenario: "there and back, brokers deduplicate", client: client, topic: topic + "-" + string(client), rate: 300, reader: true, proxies: proxies, clusters: clusters,
			subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
		})
		awaitTopic(t, clusters[1], l.c.topic)
		l.thereAndBack(2)
		l.end(true)
	}
}

// transactional maps a topic to a cluster, and makes a client of the first proxy that may begin transactions. send publishes, within one or (nil) in none.
func transactional(t *testing.T, proxies [2]*Pointsman, c *Cluster, topic string) (client pulsar.Client, send func(text string, txn pulsar.Transaction)) {
	t.Helper()
	setRoute(t, proxies[0], topic, c.Name)
	for _, p := range proxies {
		awaitRouteOn(t, p, topic, c.Name)
	}
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: proxies[0].URL, EnableTransaction: true, Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	t.Cleanup(client.Close)
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, SendTimeout: -1}) // as transactions want it
	must(t, err)
	t.Cleanup(producer.Close)
	return client, func(text string, txn pulsar.Transaction) {
		t.Helper()
		_, err := producer.Send(limited(t, time.Minute), &pulsar.ProducerMessage{Payload: []byte(text), Transaction: txn})
		must(t, err)
	}
}

// SW-15: a topic with an open transaction is not switched, and the reason names it; the commit completes where the transaction began, and afterwards the switch is done.
func openTransaction(t *testing.T, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	client, send := transactional(t, proxies, clusters[0], topic)
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "s", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest})
	must(t, err)
	defer consumer.Close()
	receive := func(want string) {
		t.Helper()
		m, err := consumer.Receive(limited(t, time.Minute))
		must(t, err)
		must(t, consumer.Ack(m))
		if got := string(m.Payload()); got != want {
			t.Errorf("received %q, want %q", got, want)
		}
	}
	send("before", nil)
	receive("before")
	awaitTopic(t, clusters[1], topic)
	txn, err := client.NewTransaction(5 * time.Minute)
	must(t, err)
	send("within", txn)
	var refused *CLIError
	err = proxies[1].CLI(limited(t, time.Minute), nil, "switch", "start", "--topic", topic, "--to", clusters[1].Name, "--force")
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "1 open transactions have messages in the topic") {
		t.Fatalf("a switch in the middle of a transaction: %v", err)
	}
	must(t, txn.Commit(limited(t, time.Minute)))
	receive("within")
	// Replication does not carry the commit: the other cluster would deliver nothing behind the copy (docs/guarantees.md).
	err = proxies[1].CLI(limited(t, time.Minute), nil, "switch", "start", "--topic", topic, "--to", clusters[1].Name, "--force")
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "1 transactions have ended") {
		t.Fatalf("a switch after a transaction: %v", err)
	}
}

// A drain copies nothing, but of an open transaction the producer would publish the rest on the other cluster: it is refused.
func drainWithTransactions(t *testing.T, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	client, send := transactional(t, proxies, clusters[0], topic)
	send("1", nil)
	txn, err := client.NewTransaction(5 * time.Minute)
	must(t, err)
	send("2", txn)
	var refused *CLIError
	err = proxies[1].CLI(limited(t, time.Minute), nil, "switch", "start", "--mode", "drain", "--topic", topic, "--to", clusters[1].Name, "--force")
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "1 open transactions have messages in the topic") {
		t.Fatalf("a drain in the middle of a transaction: %v", err)
	}
	must(t, txn.Commit(limited(t, time.Minute)))
}
