//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"

	"pointsman/core/switching"
)

// Topics that move without replication: docs/adr/007-drain.md.

// drainKinds are the subscriptions of topics that drain under load.
var drainKinds = []string{"exclusive:exclusive:individual:1", "failover:failover:cumulative:1", "shared:shared:individual:2", "key-shared:key_shared:individual:2"}

// Under load every client's producer moves within a fence, and each subscription follows by itself, in order; nothing is lost.
func TestDrainUnderLoad(t *testing.T) {
	for _, client := range []Client{Go, Python, Java} { // versions_test.go has partitions
		if !slices.Contains(artifacts.Clients, client) {
			continue
		}
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			topic := newTopic("acme/plain", "drain-"+string(client))
			l := startLoad(t, loadConfig{
				scenario: "every subscription, without replication", mode: switching.ModeDrain, client: client, topic: topic, rate: 200, keys: 20, reader: true,
				subs: drainKinds,
			})
			l.began = append(l.began, nowMillis())
			rec, err := tryPlanned(t, l.c.proxies[0], "start", "--mode", "drain", "--topic", topic, "--to", "b", "--force")
			if rec.ID == "" {
				t.Fatal(err)
			}
			id := rec.ID
			if rec, err = tryPlanned(t, l.c.proxies[1], "watch", id); rec.State != switching.StateDone { // another proxy tells of it as well
				tellOfDrain(t, topic, id)
			}
			wantDone(t, rec, rig.B, err)
			if rec.Receipt.MovedCount != len(l.c.subs) {
				t.Errorf("moved: %+v, want all %d subscriptions", rec.Receipt.Moved, len(l.c.subs))
			}
			l.moved(rec, rig.B)
			l.flow("after the drain")
			l.nothingNewOn(rec)
			l.end(false) // what consumers had in hand at the fence may come again to those that had to reconnect
		})
	}
}

// tellOfDrain logs what a drain that does not end waits for, as the leader and the old cluster have it.
func tellOfDrain(t *testing.T, topic, id string) {
	t.Helper()
	for name, call := range map[string]func(into any) error{
		"the switch": func(into any) error { return pair(t)[0].CLI(limited(t, 20*time.Second), into, "switch", "status", id) },
		"the old broker": func(into any) error {
			return rig.A.Admin(limited(t, 20*time.Second), http.MethodGet, "/admin/v2/"+adminPath(topic)+"/stats", nil, into)
		},
	} {
		var said any
		err := call(&said)
		text, _ := json.Marshal(said)
		t.Logf("%s says %s %v", name, text, err)
	}
}

// session is a Go client at a proxy.
func session(t *testing.T, p *Pointsman) pulsar.Client {
	t.Helper()
	c, err := pulsar.NewClient(pulsar.ClientOptions{URL: p.URL, Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	t.Cleanup(c.Close)
	return c
}

// send publishes the numbers from first to last, each with its receipt.
func send(t *testing.T, c pulsar.Client, topic string, first, last int) {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	p, err := c.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	must(t, err)
	defer p.Close()
	for i := first; i <= last; i++ {
		_, err := p.Send(ctx, &pulsar.ProducerMessage{Payload: fmt.Appendf(nil, "%d", i)})
		must(t, err)
	}
}

// acksAtOnce has a consumer send each acknowledgement by itself. By default they wait for up to 100 ms, or for as long as this process is kept from running: a topic
// that is unloaded meanwhile delivers those messages again.
var acksAtOnce = &pulsar.AckGroupingOptions{MaxSize: 1}

// subscribeAt is a consumer of a subscription that begins with the first message, through a proxy.
func subscribeAt(t *testing.T, c pulsar.Client, topic, name string) pulsar.Consumer {
	t.Helper()
	consumer, err := c.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: name, Type: pulsar.Failover, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, ReceiverQueueSize: 10, AckGroupingOptions: acksAtOnce,
	})
	must(t, err)
	return consumer
}

// receive takes n messages and acknowledge them.
func receive(t *testing.T, consumer pulsar.Consumer, n int) (got []string) {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	for range n {
		m, err := consumer.Receive(ctx)
		if err != nil {
			t.Fatalf("after %d of %d messages (%q): %v", len(got), n, got[max(0, len(got)-3):], err)
		}
		got = append(got, string(m.Payload()))
		must(t, consumer.Ack(m))
	}
	return got
}

// nothing checks what comes next.
func nothing(t *testing.T, consumer pulsar.Consumer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if m, err := consumer.Receive(ctx); err == nil {
		t.Errorf("%q came as well", m.Payload())
	}
}

func inOrder(first, last int) (all []string) {
	for i := first; i <= last; i++ {
		all = append(all, fmt.Sprint(i))
	}
	return all
}

// numbered are texts of numbers as messages.
func numbered(texts []string) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for _, text := range texts {
			if !yield(Message{N: numberIn([]byte(text))}) {
				return
			}
		}
	}
}

// drains asks for a drain to cluster b, and waits until the producers have moved.
func drains(t *testing.T, topic string) switching.Record {
	t.Helper()
	return drainsTo(t, pair(t)[0], topic, rig.B)
}

func drainsTo(t *testing.T, p *Pointsman, topic string, to *Cluster) switching.Record {
	t.Helper()
	rec, err := tryPlanned(t, p, "start", "--mode", "drain", "--topic", topic, "--to", to.Name, "--force")
	if rec.State != switching.StateDraining {
		t.Fatalf("%s: %s, %v\n%s", rec.State, rec.Note, err, steps(rec))
	}
	return rec
}

func onA(t *testing.T, what string) string {
	topic := newTopic("acme/plain", what)
	setRoute(t, pair(t)[0], topic, "a")
	awaitRoute(t, topic, "a")
	return topic
}

// A consumer that was away with a backlog comes back while its topic drains, by an extra leg beside its client's connection; then it follows. Another
// one that was caught up has left by then: that closes the way back, and the refusal says so.
func TestDrainServesAConsumerThatComesBack(t *testing.T) {
	t.Parallel()
	topic := onA(t, "comes-back")
	c := session(t, pair(t)[1])
	subscribeAt(t, c, topic, "late").Close()
	quick := subscribeAt(t, c, topic, "quick")
	send(t, c, topic, 1, 100)
	got := receive(t, quick, 100)
	rec := drains(t, topic)
	send(t, c, topic, 101, 150)
	if got = append(got, receive(t, quick, 50)...); !slices.Equal(got, inOrder(1, 150)) {
		t.Errorf("quick: %q", got)
	}
	var refused *CLIError
	if err := pair(t)[1].CLI(limited(t, 30*time.Second), nil, "switch", "reverse", rec.ID); !errors.As(err, &refused) || !strings.Contains(refused.Output, "cannot be taken back") {
		t.Errorf("the way back was not refused: %v", err)
	} else {
		t.Logf("%s", refused.Output)
	}
	late := subscribeAt(t, c, topic, "late")
	if got := receive(t, late, 150); !slices.Equal(got, inOrder(1, 150)) {
		t.Errorf("late: %q, want all, first those of cluster a", got)
	}
	rec, err := tryPlanned(t, pair(t)[0], "watch", rec.ID)
	wantDone(t, rec, rig.B, err)
	nothing(t, late)
	nothing(t, quick)
	onlyNow := wantMoved(rec)
	if !slices.Equal(onlyNow, []string{"quick", "late"}) {
		t.Errorf("moved: %q", onlyNow)
	}
}

func wantMoved(rec switching.Record) (names []string) {
	for _, m := range rec.Receipt.Moved {
		names = append(names, m.Subscription)
	}
	return names
}

// Paused, nothing leaves; taken back, what was published on b comes behind what a had, once and in order.
func TestDrainIsPausedAndTakenBack(t *testing.T) {
	t.Parallel()
	topic := onA(t, "taken-back")
	c := session(t, pair(t)[1])
	consumer := subscribeAt(t, c, topic, "s")
	send(t, c, topic, 1, 60)
	got := receive(t, consumer, 20)
	rec := drains(t, topic)
	must(t, pair(t)[1].CLI(limited(t, 20*time.Second), nil, "switch", "pause", rec.ID))
	got = append(got, receive(t, consumer, 40)...)
	send(t, c, topic, 61, 90)
	nothing(t, consumer) // caught up with a, and it stays there
	var back struct {
		Switches []switching.Record `json:"switches"`
	}
	must(t, pair(t)[0].CLI(limited(t, 60*time.Second), &back, "switch", "reverse", rec.ID))
	if r := back.Switches[0]; r.State != switching.StateReturned || r.Receipt.Copied != 30 {
		t.Fatalf("%s: %s, %+v\n%s", r.State, r.Note, r.Receipt, steps(r))
	}
	send(t, c, topic, 91, 100)
	if got = append(got, receive(t, consumer, 40)...); !slices.Equal(got, inOrder(1, 100)) {
		t.Errorf("s: %q, want all in order", got)
	}
	nothing(t, consumer)
	wantActive(t, openMap(t, pair(t)[0]), topic, "a")
}

// SW-17: with replication in any direction each message would come twice, so that only the planned mode is right; without it only this one.
func TestDrainIsRefusedWhereThereIsReplication(t *testing.T) {
	t.Parallel()
	topic := newTopic("acme/geo", "not-drained")
	setRoute(t, pair(t)[0], topic, "a")
	awaitRoute(t, topic, "a")
	send(t, session(t, pair(t)[0]), topic, 1, 3)
	var refused *CLIError
	err := pair(t)[1].CLI(limited(t, 30*time.Second), nil, "switch", "start", "--mode", "drain", "--topic", topic, "--to", "b", "--force")
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "each message would be delivered twice") || !strings.Contains(refused.Output, "--mode planned") {
		t.Errorf("not refused as it should be: %v", err)
	}
}

// A namespace without replication moves by one command: every topic by a drain of its own, wave after wave, and when none drains any more the namespace is one rule. One topic is taken back
// meanwhile; a resume moves it after all.
func TestANamespaceDrainsAsABatch(t *testing.T) {
	t.Parallel()
	const perTopic, last = 20, 2*20 + 5
	row := Row{Mode: "drain", Class: classBatch, Scenario: "a namespace as one batch, one topic taken back meanwhile and moved by a resume", Client: string(Go), Subscription: "failover, individual acks, 1 consumer(s)"}
	namespace := "acme/drained-" + runID
	ctx := limited(t, 60*time.Second)
	for _, c := range []*Cluster{rig.A, rig.B} {
		must(t, c.Admin(ctx, http.MethodPut, "/admin/v2/namespaces/"+namespace, map[string]any{"replication_clusters": []string{c.Name}, "bundles": map[string]any{"numBundles": 4}}, nil))
	}
	setRoute(t, pair(t)[0], namespace, "a")
	st := openMap(t, pair(t)[0])
	c := session(t, pair(t)[1])
	var topics []string
	consumers, got := map[string]pulsar.Consumer{}, map[string][]string{}
	for range often(4, 12) {
		topic := newTopic(namespace, "t")
		awaitRoute(t, topic, "a")
		topics = append(topics, topic)
		consumers[topic] = subscribeAt(t, c, topic, "s")
		send(t, c, topic, 1, perTopic)
	}
	aged(t, st)
	var b struct {
		ID    string          `json:"id"`
		State string          `json:"state"`
		Batch switching.Batch `json:"batch"`
	}
	must(t, pair(t)[0].CLI(limited(t, 90*time.Second), &b, "switch", "start", "--mode", "drain", "--namespace", namespace, "--to", "b", "--force", "--max-hold", "0s"))
	if b.State != "draining" || b.Batch.Count.Moved != len(topics) || b.Batch.Count.Draining == 0 {
		t.Fatalf("the command ended with %s: %+v, pause %+v", b.State, b.Batch.Count, b.Batch.Pause)
	}
	for _, topic := range topics {
		send(t, c, topic, perTopic+1, 2*perTopic)
	}
	running, err := st.Running(limited(t, 30*time.Second))
	must(t, err)
	back := running[slices.IndexFunc(running, func(r switching.Record) bool { return r.Batch == b.ID })]
	takenBack(t, pair(t)[1], back.ID)
	for _, topic := range topics {
		if topic == back.Topic {
			continue
		}
		if got[topic] = receive(t, consumers[topic], 2*perTopic); !slices.Equal(got[topic], inOrder(1, 2*perTopic)) {
			t.Errorf("%s: %q", topic, got[topic])
		}
	}
	over := awaitBatch(t, st, b.ID, "to end", func(b switching.Batch) bool { return b.State.Over() })
	if over.State != switching.BatchIncomplete || over.Count.Failed != 1 || over.Count.Moved != len(topics)-1 || over.Rule != 0 {
		t.Fatalf("%s: %+v, rule %d; want the topic that was taken back to have failed", over.State, over.Count, over.Rule)
	}
	must(t, pair(t)[1].CLI(limited(t, 60*time.Second), nil, "switch", "resume", b.ID, "--force", "--no-wait"))
	if got[back.Topic] = receive(t, consumers[back.Topic], 2*perTopic); !slices.Equal(got[back.Topic], inOrder(1, 2*perTopic)) {
		t.Errorf("%s: %q", back.Topic, got[back.Topic])
	}
	over = awaitBatch(t, st, b.ID, "to be done", func(b switching.Batch) bool { return b.State.Over() })
	if over.State != switching.BatchDone || over.Rule == 0 || over.Removed != len(topics) {
		t.Fatalf("%s: %+v, rule %d in place of %d entries; %s", over.State, over.Count, over.Rule, over.Removed, over.Note)
	}
	for _, topic := range topics {
		awaitRoute(t, topic, "b")
		send(t, c, topic, 2*perTopic+1, last)
		rest := receive(t, consumers[topic], last-2*perTopic)
		if !slices.Equal(rest, inOrder(2*perTopic+1, last)) {
			t.Errorf("%s on cluster b: %q", topic, rest)
		}
		nothing(t, consumers[topic])
		d := Compare(numbered(inOrder(1, last)), numbered(append(got[topic], rest...)))
		row.Acked, row.Lost, row.Duplicates, row.OrderBreaks = row.Acked+d.Acked, row.Lost+len(d.Lost), row.Duplicates+d.Duplicates, row.OrderBreaks+d.OrderBreaks
	}
	for _, r := range recordsOf(limited(t, 30*time.Second), t, st, b.ID, 2*len(topics)) {
		if r.Receipt != nil {
			row.Holds = append(row.Holds, r.Receipt.HoldMillis)
		}
	}
	row.save(t)
	t.Logf("%d topics: hold p50 %.0f ms, p99 %.0f ms, rule of epoch %d", len(topics), over.HoldP50, over.HoldP99, over.Rule)
}
