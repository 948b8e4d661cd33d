package app

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/testkit"
)

// receiver takes messages that hold ascending numbers.
type receiver struct {
	t    *testing.T
	name string
	next func(context.Context) (pulsar.Message, error)
	want int
}

// until takes the numbers up to n, each once and in order.
func (r *receiver) until(n int) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	for ; r.want <= n; r.want++ {
		m, err := r.next(ctx)
		if err != nil {
			r.t.Fatalf("%s waits for message %d: %v", r.name, r.want, err)
		}
		if got, err := strconv.Atoi(string(m.Payload())); err != nil || got != r.want {
			r.t.Fatalf("%s got message %s (%v), want %d", r.name, m.Payload(), m.ID(), r.want)
		}
	}
}

// nothing tells that nothing comes for a while.
func (r *receiver) nothing() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 300*time.Millisecond)
	defer cancel()
	if m, err := r.next(ctx); err == nil {
		r.t.Fatalf("%s got message %s, although it must not go on", r.name, m.Payload())
	}
}

// A topic moves without replication (SW-17): the producer at once, a subscription when it has read all of the old cluster, through a connection beside the client's
// when it is opened anew, and a reader by itself. Each gets everything once, in order.
func TestATopicDrainsUnderItsClients(t *testing.T) {
	if raceScale > 1 {
		t.Skip("pulsar-client-go races with itself when it reconnects after it has sent")
	}
	r := newRig(t, testkit.Options{}, nil)
	h := newHand(t, r, "sw-1")
	h.rec.Mode = switching.ModeDrain
	client := newClient(t, r.url())
	// From the oldest message, for there is no controller that makes the subscriptions on the new cluster.
	subscribe := func(name string) (pulsar.Consumer, *receiver) {
		t.Helper()
		s, err := client.Subscribe(pulsar.ConsumerOptions{Topic: movedTopic, SubscriptionName: name, Type: pulsar.Exclusive, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest})
		if err != nil {
			t.Fatal(err)
		}
		return s, &receiver{t: t, name: name, want: 1, next: func(ctx context.Context) (pulsar.Message, error) {
			m, err := s.Receive(ctx)
			if err == nil {
				err = s.AckID(m.ID())
			}
			return m, err
		}}
	}
	stays, old := subscribe("stays")
	first, anew := subscribe("anew")
	p, err := client.CreateProducer(pulsar.ProducerOptions{Topic: movedTopic, DisableBatching: true})
	if err != nil {
		t.Fatal(err)
	}
	sent := 0
	send := func(n int) {
		t.Helper()
		for range n {
			sent++
			if _, err := p.Send(t.Context(), &pulsar.ProducerMessage{Payload: fmt.Append(nil, sent)}); err != nil {
				t.Fatalf("message %d: %v", sent, err)
			}
		}
	}
	send(100)
	old.until(30)
	anew.until(40)

	h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	h.ack(t, switching.StatePrepared)
	h.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	h.ack(t, switching.StateFenced)
	messages := r.a.Messages(movedTopic)
	tail := messages[len(messages)-1]
	drain := route.Drain{From: "a", Tails: []route.Tail{{Ledger: int64(tail.Ledger), Entry: int64(tail.Entry)}}}
	h.rec.Receipt = &switching.Receipt{Tail: map[string]string{movedTopic: fmt.Sprintf("%d:%d", tail.Ledger, tail.Entry)}, First: map[string]string{movedTopic: "-1:-1"}}
	list := func(state switching.State, subs ...route.DrainSub) {
		t.Helper()
		drain.Subs = subs
		h.drain = drain.String()
		h.write(t, state, "b", route.StateDraining, 1)
	}
	list(switching.StateEvicting, route.DrainSub{Name: "anew"}, route.DrainSub{Name: "stays"})
	h.ack(t, switching.StateEvicting)
	send(100)
	if a, b := len(r.a.Messages(movedTopic)), len(r.b.Messages(movedTopic)); a != 100 || b != 100 {
		t.Fatalf("%d messages are on a, %d on b; want 100 and 100", a, b)
	}
	old.until(60)
	if n := r.metric(t, "pointsman_extra_broker_connections"); n != 0 {
		t.Errorf("%v connections beside the clients', and nobody needs one", n)
	}
	first.Close()
	second, again := subscribe("anew")
	defer second.Close()
	again.want = anew.want
	again.until(90)
	if n := r.metric(t, "pointsman_extra_broker_connections"); n != 1 {
		t.Errorf("%v connections beside the clients', want 1: a subscription was opened anew", n)
	}
	reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: movedTopic, StartMessageID: pulsar.EarliestMessageID()})
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	reads := &receiver{t: t, name: "the reader", want: 1, next: reader.Next}
	reads.until(200) // by itself
	if n := r.metric(t, "pointsman_readers_sent_round_total"); n == 0 {
		t.Error("the reader was never sent round, and has messages of both clusters")
	}
	old.until(100)
	again.until(100)
	old.nothing()
	again.nothing()

	leave := func(name string, rest ...route.DrainSub) {
		t.Helper()
		list(switching.StateDraining, append([]route.DrainSub{{Name: name, Leaving: true}}, rest...)...)
		r.await(t, "the consumers of "+name+" to leave a", func() bool {
			info, _ := r.a.Topic(movedTopic)
			s := info.Subscriptions[name]
			return len(s.Consumers) == 0 && s.Backlog == 0
		})
		list(switching.StateDraining, rest...)
	}
	leave("anew", route.DrainSub{Name: "stays"})
	again.until(200)
	old.nothing()
	leave("stays")
	h.write(t, switching.StateDone, "b", route.StateActive, 1)
	send(20)
	old.until(220)
	again.until(220)
	reads.until(220)
	stays.Close()
	info, _ := r.a.Topic(movedTopic)
	for name, s := range info.Subscriptions {
		if len(s.Consumers) > 0 || s.Durable && s.Backlog > 0 {
			t.Errorf("subscription %s of the old cluster is left with %+v", name, s)
		}
	}
}
