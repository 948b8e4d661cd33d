//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"

	"pointsman/internal/pulsaradmin"
)

const (
	carryMessages = 1_000
	carryBatch    = 10
	carryRead     = 600 // of them are received and, but for some, acknowledged
)

// carrier asks a cluster of the rig by its admin addresses, as a controller does.
func carrier(t *testing.T, c *Cluster) *pulsaradmin.Client {
	t.Helper()
	// As proxies are configured: both clusters have brokers of the same names.
	cfg := pulsaradmin.Config{Cluster: c.Name, ListenerName: "external", Resolve: map[string]string{}}
	for _, b := range c.Brokers {
		cfg.WebURLs = append(cfg.WebURLs, b.WebURL)
		cfg.Resolve[b.Logical] = b.Addr
	}
	a := pulsaradmin.New(cfg)
	t.Cleanup(a.Close)
	return a
}

// goClient is the Go client, connected to a cluster directly.
func goClient(t *testing.T, c *Cluster) pulsar.Client {
	t.Helper()
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: c.URL(), Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	t.Cleanup(client.Close)
	return client
}

// entryOf is the place of the batch that a message came in.
func entryOf(id pulsar.MessageID) string {
	return fmt.Sprintf("%d:%d:%d", id.PartitionIdx(), id.LedgerID(), id.EntryID())
}

// publish sends numbers from first on, in batches, and tells which of them share an entry.
func publish(t *testing.T, c *Cluster, topic string, first, count int) map[string][]int {
	t.Helper()
	client := goClient(t, c)
	producer, err := client.CreateProducer(pulsar.ProducerOptions{
		Topic: topic, Name: fmt.Sprintf("carry-%s-%d", runID, topicSeq.Add(1)), BatchingMaxMessages: carryBatch, BatchingMaxPublishDelay: time.Second,
		MaxPendingMessages: count + 1,
	})
	must(t, err)
	defer producer.Close()
	type sent struct {
		id  pulsar.MessageID
		n   int
		err error
	}
	receipts := make(chan sent, count)
	for n := first; n < first+count; n++ {
		producer.SendAsync(t.Context(), &pulsar.ProducerMessage{Payload: []byte(strconv.Itoa(n)), Key: fmt.Sprintf("k%d", n%7)},
			func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { receipts <- sent{id, n, err} })
	}
	must(t, producer.FlushWithCtx(t.Context()))
	entries := map[string][]int{}
	for range count {
		s := <-receipts
		must(t, s.err)
		entries[entryOf(s.id)] = append(entries[entryOf(s.id)], s.n)
	}
	return entries
}

// take is what a subscription does on the old cluster: it receives read messages and acknowledges those for which keep says false.
type take struct {
	kind       pulsar.SubscriptionType
	replicated bool
	cumulative bool
	read       int
	keep       func(n int) bool
}

func subscribe(t *testing.T, c *Cluster, topic, name string, how take) pulsar.Consumer {
	t.Helper()
	consumer, err := goClient(t, c).Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: name, Type: how.kind, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
		ReplicateSubscriptionState: how.replicated, AckWithResponse: true, ReceiverQueueSize: 1_000,
	})
	must(t, err)
	t.Cleanup(consumer.Close)
	return consumer
}

// consume does what how says and returns the numbers that must come again: those of every entry that is not acknowledged whole.
func consume(t *testing.T, c *Cluster, topic, name string, how take, entries map[string][]int) []int {
	t.Helper()
	consumer := subscribe(t, c, topic, name, how)
	acked := map[int]bool{}
	for range how.read {
		msg, err := consumer.Receive(limited(t, 20*time.Second))
		must(t, err)
		n, err := strconv.Atoi(string(msg.Payload()))
		must(t, err)
		if how.keep != nil && how.keep(n) {
			continue
		}
		acked[n] = true
		if !how.cumulative {
			must(t, consumer.Ack(msg))
		} else if len(acked) == how.read {
			must(t, consumer.AckCumulative(msg))
		}
	}
	consumer.Close()
	var again []int
	for _, numbers := range entries {
		if slices.ContainsFunc(numbers, func(n int) bool { return !acked[n] }) {
			again = append(again, numbers...)
		}
	}
	slices.Sort(again)
	return again
}

// expect consumes a subscription on the new cluster and wants exactly these numbers.
func expect(t *testing.T, c *Cluster, topic, name string, how take, want []int) {
	t.Helper()
	consumer := subscribe(t, c, topic, name, how)
	var got []int
	for len(got) < len(want) {
		msg, err := consumer.Receive(limited(t, 10*time.Second))
		if err != nil {
			t.Errorf("subscription %s on cluster %s: %d of %d messages, then %v", name, c.Name, len(got), len(want), err)
			break
		}
		n, _ := strconv.Atoi(string(msg.Payload()))
		got = append(got, n)
		must(t, consumer.Ack(msg))
	}
	must(t, WaitUntil(limited(t, 10*time.Second), "subscription "+name+" to have nothing left", func() (bool, error) {
		var left int64
		names, err := c.TopicsOf(t.Context(), topic)
		for _, part := range names {
			var stats TopicStats
			if stats, err = c.Stats(t.Context(), part); err != nil {
				return false, err
			}
			left += stats.Subscriptions[name].MsgBacklog
		}
		return left == 0, err
	}))
	consumer.Close()
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("subscription %s on cluster %s: %d messages, want %d: first difference %s", name, c.Name, len(got), len(want), firstDifference(got, want))
	}
}

func firstDifference(got, want []int) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("%d instead of %d", got[i], want[i])
		}
	}
	return "one is longer"
}

// drain waits until everything that cluster from has is on cluster to.
func drain(t *testing.T, from, to *Cluster, parts []string) {
	t.Helper()
	a := carrier(t, from)
	must(t, WaitUntil(limited(t, 30*time.Second), "replication from "+from.Name+" to "+to.Name, func() (bool, error) {
		for _, part := range parts {
			r, err := a.Replicator(t.Context(), part, to.Name, time.Now())
			if err != nil || !r.Drained() {
				return false, err
			}
		}
		return true, nil
	}))
}

// carry carries all subscriptions of all partitions and wants them to be exactly as planned.
func carry(t *testing.T, from, to *Cluster, parts []string) map[string][]pulsaradmin.Plan {
	t.Helper()
	a, b := carrier(t, from), carrier(t, to)
	all := map[string][]pulsaradmin.Plan{}
	for _, part := range parts {
		began := time.Now()
		pair := pulsaradmin.NewPair(part, a, b)
		plans, differences, err := pair.Carry(limited(t, 60*time.Second))
		must(t, err)
		first := time.Since(began)
		if wrong := pulsaradmin.Differences(differences); wrong != "" {
			t.Errorf("%s: %s", part, wrong)
		}
		for i := range differences {
			if !plans[i].How.Exact() || plans[i].Missing+plans[i].Repeated != 0 {
				t.Errorf("%s: plan %+v is not exact", part, plans[i])
			}
		}
		// Once more, with everything in memory: what is right is left alone.
		began = time.Now()
		_, differences, err = pair.Carry(limited(t, 60*time.Second))
		must(t, err)
		if wrong := pulsaradmin.Differences(differences); wrong != "" {
			t.Errorf("%s, again: %s", part, wrong)
		}
		t.Logf("%s: %d subscriptions carried in %v, again in %v", part, len(plans), first.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
		log, err := a.Tail(t.Context(), part)
		must(t, err)
		tails, err := pair.CompareTails(t.Context(), log.Last, 500)
		must(t, err)
		if tails.String() != "" {
			t.Error(tails.String())
		}
		pair.Close()
		all[part] = plans
	}
	return all
}

// Every type of subscription, with holes, missing and existing on the new cluster, replicated, drained and untouched; one topic and three partitions (SW-01,
// SW-14, GR-02, GR-03). A consumer on the new cluster gets exactly what one on the old cluster would have got.
func TestSubscriptionsAreCarriedExactly(t *testing.T) {
	for _, partitions := range []int{0, 3} {
		t.Run(fmt.Sprintf("%d partitions", partitions), func(t *testing.T) {
			topic := newTopic("acme/geo", "carry")
			ctx := limited(t, 2*time.Minute)
			if partitions > 0 {
				must(t, rig.A.CreatePartitioned(ctx, topic, partitions))
			}
			parts := pulsaradmin.PartitionNames(topic, partitions)
			holes := func(n int) bool { return n%97 == 3 || n > 300 && n < 330 }
			subs := map[string]take{
				"exclusive":         {kind: pulsar.Exclusive, read: carryRead, keep: holes},
				"failover":          {kind: pulsar.Failover, read: carryRead, keep: holes},
				"shared":            {kind: pulsar.Shared, read: carryRead, keep: holes},
				"key-shared":        {kind: pulsar.KeyShared, read: carryRead, keep: holes},
				"replicated":        {kind: pulsar.Shared, replicated: true, read: carryRead, keep: holes},
				"there-behind":      {kind: pulsar.Shared, read: carryRead, keep: holes},
				"there-ahead":       {kind: pulsar.Shared, read: carryRead, keep: holes},
				"cumulative":        {kind: pulsar.Exclusive, read: carryRead, cumulative: partitions == 0},
				"drained":           {kind: pulsar.Shared, read: carryMessages},
				"untouched":         {kind: pulsar.Shared},
				"name with / and %": {kind: pulsar.Shared, read: carryRead, keep: holes},
			}
			for name, how := range subs {
				subscribe(t, rig.A, topic, name, how).Close()
			}
			entries := publish(t, rig.A, topic, 0, carryMessages)
			want := map[string][]int{}
			for name, how := range subs {
				want[name] = consume(t, rig.A, topic, name, how, entries)
			}
			drain(t, rig.A, rig.B, parts)
			// Two exist on the new cluster: one that has had nothing, and one that somebody has consumed there.
			subscribe(t, rig.B, topic, "there-behind", subs["there-behind"]).Close()
			consume(t, rig.B, topic, "there-ahead", take{kind: pulsar.Shared, read: 900}, nil)

			plans := carry(t, rig.A, rig.B, parts)
			if got := len(plans[parts[0]]); got != len(subs) {
				t.Errorf("%d subscriptions were planned, want %d", got, len(subs))
			}
			for name, how := range subs {
				expect(t, rig.B, topic, name, how, want[name])
			}
			if len(want["shared"]) == 0 || len(want["shared"]) >= carryMessages-carryBatch || len(want["drained"]) != 0 || len(want["untouched"]) != carryMessages {
				t.Errorf("the subscriptions did not do what they should have: %v", lengths(want))
			}
		})
	}
}

func lengths(m map[string][]int) (text string) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		text += fmt.Sprintf("%s %d ", name, len(m[name]))
	}
	return strings.TrimSpace(text)
}

// An empty topic, and one to which something is published only after the carrying: nothing is skipped (protocol rule C8).
func TestACarriedSubscriptionWithNothingToDoMissesNothingLater(t *testing.T) {
	topic := newTopic("acme/geo", "carry-empty")
	parts := []string{topic}
	how := take{kind: pulsar.Shared}
	subscribe(t, rig.A, topic, "s", how).Close()
	publish(t, rig.B, newTopic("acme/geo", "other"), 0, 1) // a ledger of another topic, so that ids differ
	must(t, WaitUntil(limited(t, 20*time.Second), "the topic on cluster b", func() (bool, error) {
		names, err := rig.B.TopicsOf(t.Context(), topic)
		return len(names) == 1, err
	}))
	a, b := carrier(t, rig.A), carrier(t, rig.B)
	pair := pulsaradmin.NewPair(topic, a, b)
	defer pair.Close()
	plans, err := pair.Plans(limited(t, 20*time.Second))
	must(t, err)
	// A late call of a leader that was frozen: a message is there by now.
	publish(t, rig.B, topic, 0, 1)
	must(t, pair.Apply(limited(t, 20*time.Second), plans))
	expect(t, rig.B, topic, "s", how, []int{0})
	drain(t, rig.B, rig.A, parts)
	expect(t, rig.A, topic, "s", how, []int{0})
	carry(t, rig.A, rig.B, parts)
	publish(t, rig.B, topic, 1, 1)
	expect(t, rig.B, topic, "s", how, []int{1})
}

// The first move of a quiet topic: all is acknowledged, and the new cluster has thrown the copies away, which nobody there had subscribed to. What is not acknowledged is counted then, and never passed over unseen.
func TestCopiesThatTheNewClusterHasRemovedAreNotWaitedFor(t *testing.T) {
	namespace := replicatedNamespace(t, "removed")
	must(t, rig.B.Admin(limited(t, 20*time.Second), http.MethodPost, "/admin/v2/namespaces/"+namespace+"/retention", map[string]int{"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}, nil))
	topic := newTopic(namespace, "quiet")
	parts := []string{topic}
	how := take{kind: pulsar.Shared, read: 20}
	entries := publish(t, rig.A, topic, 0, 20)
	consume(t, rig.A, topic, "done", how, entries)
	subscribe(t, rig.A, topic, "behind", how).Close()
	drain(t, rig.A, rig.B, parts)
	a, b := carrier(t, rig.A), carrier(t, rig.B)
	must(t, b.Evict(limited(t, 20*time.Second), topic)) // its ledger is full now
	must(t, WaitUntil(limited(t, 60*time.Second), "cluster b to remove the copies", func() (bool, error) {
		if err := rig.B.Admin(t.Context(), http.MethodPost, strings.Replace(topic, "persistent://", "/admin/v2/persistent/", 1)+"/trim", nil, nil); err != nil {
			return false, err
		}
		log, err := b.Tail(t.Context(), topic)
		return log.Len() == 0, err
	}))
	pair := pulsaradmin.NewPair(topic, a, b)
	defer pair.Close()
	plans, differences, err := pair.Carry(limited(t, 30*time.Second))
	must(t, err)
	if wrong := pulsaradmin.Differences(differences); wrong != "" || len(plans) != 2 {
		t.Fatalf("%d subscriptions carried: %s", len(plans), wrong)
	}
	if behind, done := plans[0], plans[1]; behind.How != pulsaradmin.NotThere || behind.Missing != int64(len(entries)) || done.How != pulsaradmin.AtEnd || done.Missing != 0 {
		t.Errorf("plans %+v; want all %d entries missing for one that is behind, and nothing for one that is done", plans, len(entries))
	}
	publish(t, rig.B, topic, 20, 1)
	expect(t, rig.B, topic, "done", how, []int{20})
}

// There, back and there again, with messages of both clusters and holes in both parts (DESIGN: reversible; SW-01).
func TestSubscriptionsAreCarriedThereAndBackAndThereAgain(t *testing.T) {
	topic := newTopic("acme/geo", "carry-back")
	parts := []string{topic}
	how := take{kind: pulsar.Shared, replicated: true}
	holes := func(n int) bool { return n%90 == 5 }
	home, other := rig.B, rig.A
	subscribe(t, home, topic, "s", how).Close()
	left := []int{}
	for round := range 4 {
		entries := publish(t, home, topic, round*300, 300)
		// Of the messages that are left over all numbers come again; their entries are theirs on this cluster.
		consumer := subscribe(t, home, topic, "s", how)
		want := append(slices.Clone(left), flat(entries)...)
		var got []int
		byEntry, acked := map[string][]int{}, map[int]bool{}
		for len(got) < len(want) {
			msg, err := consumer.Receive(limited(t, 10*time.Second))
			must(t, err)
			n, _ := strconv.Atoi(string(msg.Payload()))
			got = append(got, n)
			byEntry[entryOf(msg.ID())] = append(byEntry[entryOf(msg.ID())], n)
			if !holes(n) && n < round*300+200 {
				must(t, consumer.Ack(msg))
				acked[n] = true
			}
		}
		consumer.Close()
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("round %d on cluster %s: %d messages, want %d: %s", round, home.Name, len(got), len(want), firstDifference(got, want))
		}
		left = nil
		for _, numbers := range byEntry {
			if slices.ContainsFunc(numbers, func(n int) bool { return !acked[n] }) {
				left = append(left, numbers...)
			}
		}
		slices.Sort(left)
		if round%2 == 1 { // as after acks that are not clean: everything is read from storage again, and the replicator may repeat itself
			must(t, carrier(t, home).Evict(limited(t, 20*time.Second), topic))
		}
		drain(t, home, other, parts)
		carry(t, home, other, parts)
		home, other = other, home
	}
	expect(t, home, topic, "s", how, left)
}

func flat(entries map[string][]int) (all []int) {
	for _, numbers := range entries {
		all = append(all, numbers...)
	}
	slices.Sort(all)
	return all
}

// Chunked and delayed messages, one whose properties are too large for the admin API to show, and a topic with a sign in its name that URLs treat
// specially.
func TestUnusualMessagesAreCarried(t *testing.T) {
	topic := newTopic("acme/geo", "odd+topic")
	how := take{kind: pulsar.Shared}
	sub := subscribe(t, rig.A, topic, "s", how)
	producer, err := goClient(t, rig.A).CreateProducer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true, EnableChunking: true, ChunkMaxMessageSize: 1_000})
	must(t, err)
	send := func(payload string, m pulsar.ProducerMessage) {
		t.Helper()
		m.Payload = []byte(payload)
		_, err := producer.Send(limited(t, 10*time.Second), &m)
		must(t, err)
	}
	chunked := strings.Repeat("c", 5_000)
	for range 5 {
		send(chunked, pulsar.ProducerMessage{})
	}
	send("large", pulsar.ProducerMessage{Properties: map[string]string{"p": strings.Repeat("x", 12_000)}})
	send("delayed", pulsar.ProducerMessage{DeliverAfter: 3 * time.Second})
	send("late", pulsar.ProducerMessage{})
	for i := range 7 { // the delayed one is not delivered yet
		msg, err := sub.Receive(limited(t, 10*time.Second))
		must(t, err)
		if i != 2 && string(msg.Payload()) != "delayed" {
			must(t, sub.Ack(msg))
		}
	}
	sub.Close()
	producer.Close()
	drain(t, rig.A, rig.B, []string{topic})
	carry(t, rig.A, rig.B, []string{topic})
	consumer := subscribe(t, rig.B, topic, "s", how)
	for _, want := range []string{chunked, "delayed"} {
		msg, err := consumer.Receive(limited(t, 15*time.Second))
		must(t, err)
		if got := string(msg.Payload()); got != want {
			t.Errorf("got %.20q (%d bytes), want %.20q", got, len(got), want)
		}
		must(t, consumer.Ack(msg))
	}
}

// Hundreds of subscriptions within a fence.
func TestTwoHundredSubscriptionsAreCarriedWithinAFence(t *testing.T) {
	const count = 200
	topic := newTopic("acme/geo", "carry-many")
	client := goClient(t, rig.A)
	entries := publish(t, rig.A, topic, 0, carryMessages)
	for i := range count {
		consumer, err := client.Subscribe(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: fmt.Sprintf("s%03d", i), Type: pulsar.Shared, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
		})
		must(t, err)
		for n := range 2*i + 20 {
			msg, err := consumer.Receive(limited(t, 10*time.Second))
			must(t, err)
			if n/carryBatch%3 != 1 {
				must(t, consumer.Ack(msg))
			}
		}
		consumer.Close()
	}
	if len(entries) < carryMessages/carryBatch {
		t.Fatalf("%d entries, want at least %d", len(entries), carryMessages/carryBatch)
	}
	drain(t, rig.A, rig.B, []string{topic})
	began := time.Now()
	plans := carry(t, rig.A, rig.B, []string{topic})
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("carrying %d subscriptions twice took %v, which is more than a fence may last", count, d)
	}
	holes := 0
	for _, p := range plans[topic] {
		holes += len(p.Holes)
	}
	if len(plans[topic]) != count || holes < count {
		t.Errorf("%d subscriptions with %d holes, want %d with at least one each", len(plans[topic]), holes, count)
	}
}

// What a preflight and a drain ask, against real clusters (SW-08, SW-09, SW-10, GR-01).
func TestFactsOfARealTopic(t *testing.T) {
	topic := newTopic("acme/geo", "facts")
	ctx := limited(t, time.Minute)
	a, b := carrier(t, rig.A), carrier(t, rig.B)
	if f, err := a.Facts(ctx, topic); err != nil || !f.Tenant || !f.Namespace || f.Exists {
		t.Errorf("facts of a topic that does not exist: %+v, %v", f, err)
	}
	if f, err := b.Facts(ctx, "persistent://acme/none/t"); err != nil || !f.Tenant || f.Namespace {
		t.Errorf("facts of a namespace that does not exist: %+v, %v", f, err)
	}
	publish(t, rig.A, topic, 0, 100)
	drain(t, rig.A, rig.B, []string{topic})
	tail, err := a.Tail(ctx, topic)
	must(t, err)
	client := goClient(t, rig.A)
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "stranger", Schema: pulsar.NewStringSchema(nil)})
	must(t, err)
	_, err = producer.Send(ctx, &pulsar.ProducerMessage{Value: "x"})
	must(t, err)
	consumer := subscribe(t, rig.A, topic, "s", take{kind: pulsar.KeyShared})
	defer consumer.Close()
	f, err := a.Facts(ctx, topic)
	must(t, err)
	if !f.Exists || !f.Replicates("b") || len(f.Schemas) != 1 || f.Schemas[0].Type != "STRING" || len(f.Parts) != 1 {
		t.Errorf("facts %+v", f)
	}
	publishers, sub := f.Parts[0].Stats.Publishers, f.Parts[0].Stats.Subscriptions["s"]
	if len(publishers) != 1 || publishers[0].Name != "stranger" || publishers[0].Address == "" || publishers[0].AccessMode != "Shared" || !strings.Contains(publishers[0].ClientVersion, "Go") {
		t.Errorf("publishers %+v", publishers)
	}
	if sub.Type != "Key_Shared" || len(sub.Consumers) != 1 || !sub.Durable {
		t.Errorf("subscription %+v", sub)
	}
	for claimed, want := range map[string]int{"stranger": 0, "other": 1} {
		if got, err := a.Strangers(ctx, topic, []string{claimed}); err != nil || len(got) != want {
			t.Errorf("with %q claimed the strangers are %v, %v; want %d", claimed, got, err, want)
		}
	}
	own, err := a.OwnSince(ctx, topic, tail.Last)
	if err != nil || len(own) != 1 || own[0].Producer != "stranger" {
		t.Errorf("published since %v: %+v, %v; want one message of the stranger", tail.Last, own, err)
	}
	drain(t, rig.A, rig.B, []string{topic})
	if own, err = b.OwnSince(ctx, topic, pulsaradmin.NoPosition); err != nil || len(own) != 0 {
		t.Errorf("on cluster b everything is a copy, but %+v, %v", own, err)
	}
	before, after, err := a.Progress(ctx, []string{topic}, "b", time.Second)
	must(t, err)
	if alive, why := pulsaradmin.Alive(before[0], after[0]); !alive {
		t.Errorf("the replicator is not alive: %s", why)
	}
	producer.Close()
	must(t, a.Evict(ctx, topic))
	must(t, WaitUntil(ctx, "the topic to be back", func() (bool, error) {
		again, err := a.Tail(ctx, topic)
		return err == nil && again.Len() >= tail.Len()+1, nil
	}))
}

// A stored id finds its message on the other cluster, and the next one to be read.
func TestStoredIdsAreTranslated(t *testing.T) {
	topic := newTopic("acme/geo", "translate")
	publish(t, rig.B, newTopic("acme/geo", "shift"), 0, 1)
	publish(t, rig.A, topic, 0, 300)
	drain(t, rig.A, rig.B, []string{topic})
	a, b := carrier(t, rig.A), carrier(t, rig.B)
	ctx := limited(t, 30*time.Second)
	reader := func(c *Cluster) []pulsar.Message {
		r, err := goClient(t, c).CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()})
		must(t, err)
		defer r.Close()
		var all []pulsar.Message
		for range 300 {
			msg, err := r.Next(ctx)
			must(t, err)
			all = append(all, msg)
		}
		return all
	}
	onA, onB := reader(rig.A), reader(rig.B)
	at := func(m pulsar.Message) pulsaradmin.Position {
		return pulsaradmin.Position{Ledger: m.ID().LedgerID(), Entry: m.ID().EntryID()}
	}
	var ids pulsaradmin.Translator
	for _, n := range []int{0, 137, 299} {
		got, err := ids.Translate(ctx, topic, a, b, at(onA[n]))
		must(t, err)
		want := at(onB[n])
		if got.At != want || got.Next != (pulsaradmin.Position{Ledger: want.Ledger, Entry: want.Entry + 1}) || got.How != pulsaradmin.ByOrigin {
			t.Errorf("message %d at %v of cluster a is %+v on cluster b, want %v", n, at(onA[n]), got, want)
		}
		// And back: the copy on a is where it came from.
		if back, err := ids.Translate(ctx, topic, b, a, want); err != nil || back.At != at(onA[n]) {
			t.Errorf("message %d at %v of cluster b is %+v (%v) on cluster a, want %v", n, want, back, err, at(onA[n]))
		}
	}
}

// A partition that nobody has used exists on no cluster until somebody creates it.
func TestMissingPartitionsAreCreated(t *testing.T) {
	topic := newTopic("acme/geo", "missing")
	ctx := limited(t, 30*time.Second)
	must(t, rig.A.CreatePartitioned(ctx, topic, 2))
	a, b := carrier(t, rig.A), carrier(t, rig.B)
	must(t, WaitUntil(ctx, "the partitions on cluster b", func() (bool, error) {
		names, err := rig.B.TopicsOf(ctx, topic)
		return len(names) == 2, err
	}))
	must(t, rig.B.Admin(ctx, "DELETE", "/admin/v2/"+adminPath(topic)+"-partition-1?force=true", nil, nil))
	f, err := b.Facts(ctx, topic)
	must(t, err)
	if !f.Exists || f.Partitions != 2 || f.Parts[0].Missing || !f.Parts[1].Missing {
		t.Errorf("facts %+v, want the second partition missing", f)
	}
	pairs := pulsaradmin.NewPairs(topic, 2, a, b)
	if _, err := pulsaradmin.CarryAll(ctx, pairs); err == nil || !strings.Contains(err.Error(), "-partition-1 does not exist on cluster b") {
		t.Errorf("error %v, want the missing partition", err)
	}
	for range 2 {
		must(t, b.CreateMissing(ctx, topic, 2))
	}
	if _, err := pulsaradmin.CarryAll(ctx, pairs); err != nil {
		t.Error(err)
	}
	single := newTopic("acme/plain", "single")
	for range 2 {
		must(t, b.CreateMissing(ctx, single, 0))
	}
}

// A topic that cluster b has not got yet is an error that says so, never a position.
func TestWhatIsNotReplicatedIsNotCarried(t *testing.T) {
	topic := newTopic("acme/plain", "alone")
	publish(t, rig.A, topic, 0, 10)
	subscribe(t, rig.A, topic, "s", take{kind: pulsar.Shared}).Close()
	publish(t, rig.B, topic, 0, 10)
	pair := pulsaradmin.NewPair(topic, carrier(t, rig.A), carrier(t, rig.B))
	defer pair.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	plans, err := pair.Plans(ctx)
	if err == nil || !strings.Contains(err.Error(), "wait until replication") {
		t.Errorf("plans %+v, error %v; want one that names replication", plans, err)
	}
}
