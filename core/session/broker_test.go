package session

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// Whatever clients do with their ids, and however a switch and a create race: once brokers have done what they were told, none has
// a producer or consumer of a topic that the map has moved away. Brokers behave as Pulsar's do about ids.
func TestNoProducerStaysWhereTheMapDoesNotNameIt(t *testing.T) { rapid.Check(t, brokerConversation) }

// modelBroker is what a broker knows of one connection.
type modelBroker struct {
	leg     string
	cluster string
	inbox   []*pulsarpb.BaseCommand
	has     map[string]*modelHandle // "producer 1"
}

type modelHandle struct {
	topic   string
	req     uint64
	created bool
}

type brokerWorld struct {
	conversation
	brokers map[string]*modelBroker // by leg
}

func brokerConversation(t *rapid.T) {
	w := &brokerWorld{brokers: map[string]*modelBroker{}, conversation: conversation{
		t: t, p: newPlayer(quietTB{}, false), legs: map[string]string{}, where: map[string]string{}, ids: map[string]string{}, had: map[string]bool{}, open: map[string]map[string]bool{},
		closed: map[string]map[string]bool{}, asked: map[string][]func() string{}, rest: map[string][]byte{}, nextReq: map[string]uint64{},
	}}
	w.p.onFrame = w.take
	for _, cluster := range []string{"a", "b"} {
		w.brokers[fmt.Sprintf("d%d", w.p.dials+1)] = &modelBroker{leg: fmt.Sprintf("d%d", w.p.dials+1), cluster: cluster, has: map[string]*modelHandle{}}
		w.connect(cluster)
	}
	t.Repeat(map[string]func(*rapid.T){
		"create":      func(t *rapid.T) { w.client(t, w.create) },
		"close":       func(t *rapid.T) { w.client(t, w.closeHandle) },
		"send":        func(t *rapid.T) { w.client(t, w.send) },
		"unsubscribe": func(t *rapid.T) { w.client(t, w.unsubscribe) },
		"handle one":  func(t *rapid.T) { w.client(t, func(t *rapid.T, _, leg string) { w.handle(w.brokers[leg]) }) },
		"handle all":  func(t *rapid.T) { w.client(t, func(t *rapid.T, _, leg string) { w.handleAll(w.brokers[leg]) }) },
		"complete":    func(t *rapid.T) { w.client(t, func(t *rapid.T, _, leg string) { w.complete(t, w.brokers[leg]) }) },
		"unload":      func(t *rapid.T) { w.client(t, func(t *rapid.T, _, leg string) { w.close(t, w.brokers[leg]) }) },
		"move":        w.move,
		"switch":      w.planned,
		"lease":       func(t *rapid.T) { w.step("lease " + rapid.SampledFrom([]string{"on", "on", "off"}).Draw(t, "lease")) },
		"time":        func(t *rapid.T) { w.step(fmt.Sprintf("tick %dms", rapid.IntRange(1, 700).Draw(t, "ms"))) },
		"":            func(*rapid.T) { w.invariants() },
	})
	for _, client := range slices.Sorted(maps.Keys(w.legs)) { // what was cut
		if err := w.p.deliver(client, w.rest[client]); err != nil {
			t.Fatal(err)
		}
	}
	w.step("lease on")
	for _, topic := range topics {
		w.step("state persistent://public/default/" + topic + " active")
		w.step("unfence persistent://public/default/" + topic)
	}
	w.settle()
	w.check()
	for _, cluster := range []string{"a", "b"} {
		for _, topic := range topics {
			w.step("map persistent://public/default/" + topic + " " + cluster)
		}
		w.settle()
		w.check()
	}
	for range 5 { // evicted ids are forgotten
		w.step("tick 31s")
		for client, leg := range w.legs {
			w.step(client + "> pong{}")
			w.step(leg + "> pong{}")
		}
	}
	for client, leg := range w.legs {
		s := w.p.endpoints[client].(*Session)
		if len(s.pending) > 0 {
			t.Fatalf("%s has nothing under way at %s, and %d answers are waited for", client, leg, len(s.pending))
		}
	}
}

// settle lets the watcher of the map catch up and brokers do everything that they were told.
func (w *brokerWorld) settle() {
	w.step("review")
	for range 3 {
		for _, leg := range slices.Sorted(maps.Keys(w.brokers)) {
			w.handleAll(w.brokers[leg])
		}
		for range 20 { // evictions are paced, and wait for receipts
			w.step("tick 100ms")
		}
	}
}

// check looks for what the map forbids.
func (w *brokerWorld) check() {
	for _, b := range w.brokers {
		for id, h := range b.has {
			topic, err := route.ParseTopic(h.topic)
			if err != nil {
				w.t.Fatal(err)
			}
			if d := w.p.table.Decide(topic, "a"); d.Cluster != b.cluster {
				w.t.Fatalf("the broker of cluster %s still has %s of %s, which the map sends to %s", b.cluster, id, h.topic, d.Cluster)
			}
		}
	}
}

func (w *brokerWorld) tell(b *modelBroker, frames string) { w.step(b.leg + "> " + frames) }

// take is where the player's frames go.
func (w *brokerWorld) take(to string, frame []byte) {
	b := w.brokers[to]
	if b == nil {
		return
	}
	h, ok, err := codec.ParseHead(frame, codec.DefaultMaxFrame)
	if !ok {
		w.t.Fatalf("%s got what is no frame: %v", to, err)
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		w.t.Fatal(err)
	}
	b.inbox = append(b.inbox, &cmd)
}

// handle has a broker take the next command.
func (w *brokerWorld) handle(b *modelBroker) {
	if len(b.inbox) == 0 {
		return
	}
	cmd := b.inbox[0]
	b.inbox = b.inbox[1:]
	switch {
	case cmd.Producer != nil:
		w.made(b, fmt.Sprint("producer ", cmd.Producer.GetProducerId()), cmd.Producer.GetTopic(), cmd.Producer.GetRequestId())
	case cmd.Subscribe != nil:
		w.made(b, fmt.Sprint("consumer ", cmd.Subscribe.GetConsumerId()), cmd.Subscribe.GetTopic(), cmd.Subscribe.GetRequestId())
	case cmd.CloseProducer != nil:
		w.gone(b, fmt.Sprint("producer ", cmd.CloseProducer.GetProducerId()), cmd.CloseProducer.GetRequestId())
	case cmd.CloseConsumer != nil:
		w.gone(b, fmt.Sprint("consumer ", cmd.CloseConsumer.GetConsumerId()), cmd.CloseConsumer.GetRequestId())
	case cmd.Unsubscribe != nil:
		w.gone(b, fmt.Sprint("consumer ", cmd.Unsubscribe.GetConsumerId()), cmd.Unsubscribe.GetRequestId())
	case cmd.Seek != nil:
		w.tell(b, fmt.Sprintf("success{request_id:%d}", cmd.Seek.GetRequestId()))
	case cmd.Send != nil:
		if h := b.has[fmt.Sprint("producer ", cmd.Send.GetProducerId())]; h != nil && h.created {
			w.tell(b, fmt.Sprintf("send_receipt{producer_id:%d sequence_id:1}", cmd.Send.GetProducerId()))
		}
	}
}

// handleAll has it take all of them and end the creations.
func (w *brokerWorld) handleAll(b *modelBroker) {
	for len(b.inbox) > 0 {
		w.handle(b)
	}
	for _, id := range slices.Sorted(maps.Keys(b.has)) {
		if h := b.has[id]; !h.created {
			h.created = true
			w.tell(b, createdAnswer(id, h.req))
		}
	}
}

// made is what a broker does about a PRODUCER or SUBSCRIBE: it answers for the one that it has, and refuses while it makes one.
func (w *brokerWorld) made(b *modelBroker, id, topic string, req uint64) {
	switch h := b.has[id]; {
	case h == nil:
		b.has[id] = &modelHandle{topic: topic, req: req}
	case h.created:
		w.tell(b, createdAnswer(id, req))
	default:
		w.tell(b, fmt.Sprintf(`error{request_id:%d error:6 message:"already present on the connection"}`, req))
	}
}

// gone is what it does about a CLOSE: a creation that it ends is never answered.
func (w *brokerWorld) gone(b *modelBroker, id string, req uint64) {
	if b.has[id] == nil {
		w.tell(b, fmt.Sprintf(`error{request_id:%d error:0 message:"not registered"}`, req))
		return
	}
	delete(b.has, id)
	w.tell(b, fmt.Sprintf("success{request_id:%d}", req))
}

// complete ends a creation, well or not.
func (w *brokerWorld) complete(t *rapid.T, b *modelBroker) {
	id, h := w.any(t, b, false)
	if rapid.IntRange(0, 3).Draw(t, "well") > 0 {
		h.created = true
		w.tell(b, createdAnswer(id, h.req))
		return
	}
	delete(b.has, id)
	w.tell(b, fmt.Sprintf(`error{request_id:%d error:1 message:"no"}`, h.req))
}

// close is a broker's own CLOSE, as when it unloads a topic.
func (w *brokerWorld) close(t *rapid.T, b *modelBroker) {
	id, _ := w.any(t, b, true)
	delete(b.has, id)
	var n int
	kind := "producer"
	if _, err := fmt.Sscanf(id, "producer %d", &n); err != nil {
		kind = "consumer"
		if _, err := fmt.Sscanf(id, "consumer %d", &n); err != nil {
			t.Fatal(err)
		}
	}
	w.tell(b, fmt.Sprintf("close_%s{%s_id:%d request_id:18446744073709551615}", kind, kind, n))
}

// any is one that the broker has.
func (w *brokerWorld) any(t *rapid.T, b *modelBroker, created bool) (string, *modelHandle) {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(b.has)) {
		if b.has[id].created == created {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		t.Skip("none")
	}
	id := rapid.SampledFrom(ids).Draw(t, "id")
	return id, b.has[id]
}

func (w *brokerWorld) unsubscribe(t *rapid.T, client, _ string) {
	w.nextReq[client]++
	w.say(t, client, fmt.Sprintf("unsubscribe{consumer_id:%d request_id:%d}", rapid.IntRange(1, 3).Draw(t, "id"), w.nextReq[client]))
}

func createdAnswer(id string, req uint64) string {
	if id[0] == 'c' {
		return fmt.Sprintf("success{request_id:%d}", req)
	}
	return fmt.Sprintf(`producer_success{request_id:%d producer_name:"p" topic_epoch:3}`, req)
}
