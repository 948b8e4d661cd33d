//go:build e2e

package e2e

import (
	"errors"
	"strconv"
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
	t.Run("transaction", func(t *testing.T) { transactionsThereAndBack(t, proxies, both, newTopic(tenant+"/geo", "open")) })
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

// SW-15: a topic with an open transaction is not switched, and the reason names it; the commit completes where the transaction began. What was committed moves with the topic like any other
// message, and nothing of what was aborted comes, there and back, to those who read along and to who reads everything in the end. Transactions are of Java: the Go client (0.19.0) does not mark
// the messages (docs/guarantees.md).
func transactionsThereAndBack(t *testing.T, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	if len(someClients(Java)) == 0 {
		return
	}
	l := startLoad(t, loadConfig{
		scenario: "there and back, with transactions", client: Java, topic: topic, rate: 100, reader: true, proxies: proxies, clusters: clusters, flags: []string{"--transactions", "true"},
		subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
	})
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: proxies[1].URL, Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	defer client.Close()
	subscribeAt(t, client, topic, "idle").Close()
	awaitTopic(t, clusters[1], topic)
	ended := 0
	transaction := func(how string, meanwhile func()) {
		t.Helper()
		done := func(what string) {
			t.Helper()
			must(t, l.driver.Say(what))
			ended++
			await(t, l.driver, what, func(r Record) bool {
				n := 0
				for _, e := range r.Ready {
					if e.What == "transaction" || e.What == "commit" || e.What == "abort" {
						n++
					}
				}
				return n == ended
			})
		}
		done("begin")
		meanwhile()
		done(how)
	}
	for range often(1, 2) {
		transaction("abort", func() {})
		transaction("commit", func() {
			var refused *CLIError
			err := proxies[1].CLI(limited(t, time.Minute), nil, "switch", "start", "--topic", topic, "--to", clusters[1].Name, "--force")
			if !errors.As(err, &refused) || !strings.Contains(refused.Output, "1 open transactions have messages in the topic") {
				t.Fatalf("a switch in the middle of a transaction: %v", err)
			}
		})
		transaction("abort", func() {})
		l.thereAndBack(2)
	}
	transaction("abort", func() {})
	transaction("commit", func() {})
	l.thereAndBack(1)
	l.end(true)
	sent := l.driver.Record()
	all := runDriver(t, time.Minute, Go, "consume", "--url", proxies[0].URL, "--topic", topic, "--sub", "idle", "--type", "failover", "--count", strconv.Itoa(sent.Acks.Len()), "--linger", "2000")
	if d := Compare(sent.Acks.All(), all.Recvs.All()); !d.Perfect() {
		t.Errorf("who reads everything in the end: %v", d)
	}
}

// A drain copies nothing, but of an open transaction the producer would publish the rest on the other cluster: it is refused.
func drainWithTransactions(t *testing.T, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	setRoute(t, proxies[0], topic, clusters[0].Name)
	for _, p := range proxies {
		awaitRouteOn(t, p, topic, clusters[0].Name)
	}
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: proxies[0].URL, EnableTransaction: true, Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	defer client.Close()
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, SendTimeout: -1}) // as transactions want it
	must(t, err)
	defer producer.Close()
	txn, err := client.NewTransaction(5 * time.Minute)
	must(t, err)
	_, err = producer.Send(limited(t, time.Minute), &pulsar.ProducerMessage{Payload: []byte("within"), Transaction: txn})
	must(t, err)
	var refused *CLIError
	err = proxies[1].CLI(limited(t, time.Minute), nil, "switch", "start", "--mode", "drain", "--topic", topic, "--to", clusters[1].Name, "--force")
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "1 open transactions have messages in the topic") {
		t.Fatalf("a drain in the middle of a transaction: %v", err)
	}
	must(t, txn.Commit(limited(t, time.Minute)))
}
