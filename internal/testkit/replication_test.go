package testkit

import (
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

func TestReplicationCopiesOnceMarksTheOriginAndCarriesAcknowledgements(t *testing.T) {
	a, b := start(t, Options{}), NewCluster("b", Options{LedgerBase: 5000})
	t.Cleanup(b.Close)
	r := Replicate(a, b, ReplicationOptions{Delay: time.Millisecond, Subscriptions: true, Topics: func(name string) bool { return name == topicT }})
	t.Cleanup(r.Close)
	a.Publish("persistent://t/n/not-replicated", "p", 0, []byte("x"))
	for i := range uint64(5) {
		a.Publish(topicT, "p", i, []byte{'a', byte(i)})
	}
	await(t, b, "copies on b", func() bool { return len(b.Messages(topicT)) == 5 })
	b.Publish(topicT, "q", 0, []byte("from b"))
	await(t, a, "copy on a", func() bool { return len(a.Messages(topicT)) == 6 })
	for i, m := range b.Messages(topicT)[:5] {
		if m.ReplicatedFrom != "a" || m.Producer != "p" || m.Sequence != uint64(i) || m.Payload[1] != byte(i) || m.Ledger < 5000 {
			t.Errorf("copy %d: %+v", i, m)
		}
	}
	if got := a.Messages(topicT)[5]; got.ReplicatedFrom != "b" || string(got.Payload) != "from b" {
		t.Errorf("copy on a: %+v", got)
	}

	client := connect(t, a.Broker(0))
	client.send(subscribeCommand(topicT, "s", Exclusive, 1))
	client.readType(codec.TypeSuccess)
	third := a.Messages(topicT)[2]
	client.send(ackCommand(1, 1, &pulsarpb.MessageIdData{LedgerId: &third.Ledger, EntryId: &third.Entry}))
	client.readType(codec.TypeAckResponse)
	await(t, b, "position on b", func() bool {
		info, _ := b.Topic(topicT)
		return info.Subscriptions["s"].Backlog == 3
	})
	if n := len(b.Messages(topicT)); n != 6 {
		t.Errorf("%d entries on b, want 6: something bounced", n)
	}
	if got := b.Topics(); len(got) != 1 {
		t.Errorf("topics on b: %v", got)
	}
}

func TestWhatWasNotCopiedYetIsKept(t *testing.T) {
	a, b := start(t, Options{MaxTopicBytes: 5000}), start(t, Options{})
	a.CreateTopic(topicT, 0)
	r := Replicate(a, b, ReplicationOptions{Delay: time.Hour})
	t.Cleanup(r.Close)
	await(t, a, "the replication has begun", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.topics[topicT].cursors) == 1
	})
	c := connect(t, a.Broker(0))
	c.send(producerCommand(topicT, "p", 1))
	c.readType(codec.TypeProducerSuccess)
	for i := uint64(0); ; i++ {
		c.write(sendFrame(1, i, make([]byte, 1000)))
		if cmd := c.read(); cmd.SendError != nil {
			break
		}
		if i == 10 {
			t.Fatal("entries were dropped before they were copied")
		}
	}
}

func TestAnAcknowledgementWaitsForItsCopy(t *testing.T) {
	a, b := start(t, Options{}), start(t, Options{})
	d := &direction{src: a, dst: b, signal: make(chan struct{}, 1), acked: map[string]map[string]int64{}}
	a.Publish(topicT, "p", 0, nil)
	b.CreateTopic(topicT, 0)
	a.mu.Lock()
	d.behind = map[*topic]bool{a.topics[topicT]: true}
	newSubscription(a.topics[topicT], "s", Shared, true, 0).ack(0)
	a.mu.Unlock()
	d.copyAcks() // nothing was copied yet
	d.copyDue(time.Now().Add(time.Hour))
	if info, _ := b.Topic(topicT); info.Subscriptions["s"].Backlog != 1 {
		t.Fatalf("on b: %+v, want the copy unacknowledged", info.Subscriptions["s"])
	}
	d.copyAcks()
	if info, _ := b.Topic(topicT); info.Subscriptions["s"].Backlog != 0 {
		t.Fatalf("on b: %+v, want the copy acknowledged", info.Subscriptions["s"])
	}
}
