package session

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// Whatever clients, brokers and operators do in whatever order, with frames cut anywhere:
//   - every connection gets whole frames only, and they are never mixed;
//   - no PRODUCER or SUBSCRIBE reaches a cluster that the map does not name for the topic at that moment;
//   - after a client was told that an id is closed, nothing of that id reaches it, or its broker from it, until it is made anew;
//   - the index knows exactly the handles that are open, and ends empty.
func TestRandomConversations(t *testing.T) { rapid.Check(t, randomConversation) }

func FuzzConversations(f *testing.F) { f.Fuzz(rapid.MakeFuzz(randomConversation)) }

type conversation struct {
	t       *rapid.T
	p       *player
	legs    map[string]string          // client → its leg
	cluster map[string]string          // leg → cluster
	open    map[string]map[string]bool // client → "producer 1" → told that it is open
	closed  map[string]map[string]bool // client → told that it is closed
	asked   map[string][]func() string // leg → answers that its broker may give
	rest    map[string][]byte          // connection → bytes of a frame that was begun
	nextReq map[string]uint64
}

func randomConversation(t *rapid.T) {
	c := &conversation{
		t: t, p: newPlayer(quietTB{}, false), legs: map[string]string{}, cluster: map[string]string{}, open: map[string]map[string]bool{},
		closed: map[string]map[string]bool{}, asked: map[string][]func() string{}, rest: map[string][]byte{}, nextReq: map[string]uint64{},
	}
	c.p.onFrame = c.check
	t.Repeat(map[string]func(*rapid.T){
		"connect": func(t *rapid.T) {
			if len(c.legs) < 3 {
				c.connect(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "cluster"))
			}
		},
		"create":  func(t *rapid.T) { c.client(t, c.create) },
		"send":    func(t *rapid.T) { c.client(t, c.send) },
		"close":   func(t *rapid.T) { c.client(t, c.closeHandle) },
		"answer":  func(t *rapid.T) { c.client(t, c.answer) },
		"deliver": func(t *rapid.T) { c.client(t, c.deliver) },
		"unload":  func(t *rapid.T) { c.client(t, c.unload) },
		"hang up": func(t *rapid.T) { c.client(t, c.hangUp) },
		"move":    c.move,
		"switch":  c.planned,
		"lease":   func(t *rapid.T) { c.step("lease " + rapid.SampledFrom([]string{"on", "on", "off"}).Draw(t, "lease")) },
		"time":    func(t *rapid.T) { c.step(fmt.Sprintf("tick %dms", rapid.IntRange(1, 700).Draw(t, "ms"))) },
		"":        func(t *rapid.T) { c.invariants() },
	})
	for name := range c.legs {
		c.step(name + " closed reset")
	}
	for _, topic := range topics {
		c.step("state persistent://public/default/" + topic + " active")
		c.step("unfence persistent://public/default/" + topic)
	}
	if n, pk := len(c.p.sh.moving), c.p.sh.parking; n != 0 || pk.count != 0 || pk.bytes != 0 || pk.first != nil || pk.last != nil || len(c.p.sh.debts.open) != 0 {
		t.Fatalf("%d topics move, %d requests and %d bytes wait, debts are open: %v", n, pk.count, pk.bytes, c.p.sh.debts.open)
	}
	if n := len(c.p.sh.index); n != 0 {
		t.Fatalf("%d topics are left in the index", n)
	}
	if n := len(c.p.sh.sessions); n != 0 {
		t.Fatalf("%d sessions are left", n)
	}
}

// quietTB is for newPlayer, which only needs Fatal.
type quietTB struct{ testing.TB }

func (quietTB) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

func (c *conversation) step(line string) {
	if err := c.p.step(line); err != nil {
		c.t.Fatalf("%s: %v", line, err)
	}
}

func (c *conversation) connect(cluster string) {
	client, leg := fmt.Sprintf("c%d", c.p.clients+1), fmt.Sprintf("d%d", c.p.dials+1)
	c.open[client], c.closed[client] = map[string]bool{}, map[string]bool{}
	c.legs[client], c.cluster[leg] = leg, cluster
	c.step("client " + client)
	c.step(fmt.Sprintf(`%s> connect{client_version:"x" protocol_version:21 proxy_to_broker_url:"TAG(%s,broker-0:6650)"}`, client, cluster))
	c.step(leg + " up")
	c.step(leg + `> connected{server_version:"x" protocol_version:21}`)
}

// client runs f for one of the open clients.
func (c *conversation) client(t *rapid.T, f func(t *rapid.T, client, leg string)) {
	var names []string
	for i := range c.p.clients {
		if name := fmt.Sprintf("c%d", i+1); c.legs[name] != "" {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		c.connect("a")
		return
	}
	name := rapid.SampledFrom(names).Draw(t, "client")
	f(t, name, c.legs[name])
}

// say sends frames, now and then only a part of them; the rest comes with the next ones.
func (c *conversation) say(t *rapid.T, name, frames string) {
	bytes, err := c.p.frames(frames)
	if err != nil {
		t.Fatal(err)
	}
	bytes = append(c.rest[name], bytes...)
	n := len(bytes)
	if rapid.Bool().Draw(t, "cut") {
		n = rapid.IntRange(0, n).Draw(t, "at")
	}
	c.rest[name] = append([]byte(nil), bytes[n:]...)
	if err := c.p.deliver(name, bytes[:n]); err != nil {
		t.Fatal(err)
	}
}

var topics = []string{"t1", "t2", "t3"}

func (c *conversation) create(t *rapid.T, client, _ string) {
	c.nextReq[client]++
	req, id, topic := c.nextReq[client], rapid.IntRange(1, 3).Draw(t, "id"), rapid.SampledFrom(topics).Draw(t, "topic")
	if rapid.Bool().Draw(t, "producer") {
		c.say(t, client, fmt.Sprintf(`producer{topic:%q producer_id:%d request_id:%d topic_epoch:7}`, topic, id, req))
	} else {
		c.say(t, client, fmt.Sprintf(`subscribe{topic:%q subscription:"s" sub_type:1 consumer_id:%d request_id:%d}`, topic, id, req))
	}
}

func (c *conversation) send(t *rapid.T, client, _ string) {
	id := rapid.IntRange(1, 3).Draw(t, "id")
	c.say(t, client, rapid.SampledFrom([]string{
		fmt.Sprintf(`send{producer_id:%d sequence_id:1} +50`, id),
		fmt.Sprintf(`flow{consumer_id:%d messagePermits:1}`, id),
		fmt.Sprintf(`ack{consumer_id:%d ack_type:0 message_id{ledger_id:1 entry_id:1}}`, id),
		fmt.Sprintf(`seek{consumer_id:%d request_id:%d message_publish_time:1}`, id, 1000+id),
		`ping{}`, `pong{}`,
	}).Draw(t, "frame"))
}

func (c *conversation) closeHandle(t *rapid.T, client, _ string) {
	c.nextReq[client]++
	kind := rapid.SampledFrom([]string{"producer", "consumer"}).Draw(t, "kind")
	c.say(t, client, fmt.Sprintf(`close_%s{%s_id:%d request_id:%d}`, kind, kind, rapid.IntRange(1, 3).Draw(t, "id"), c.nextReq[client]))
}

func (c *conversation) answer(t *rapid.T, _, leg string) {
	if len(c.asked[leg]) == 0 {
		return
	}
	i := rapid.IntRange(0, len(c.asked[leg])-1).Draw(t, "which")
	answer := c.asked[leg][i]()
	c.asked[leg] = append(c.asked[leg][:i:i], c.asked[leg][i+1:]...)
	c.say(t, leg, answer)
}

func (c *conversation) deliver(t *rapid.T, _, leg string) {
	id := rapid.IntRange(1, 3).Draw(t, "id")
	c.say(t, leg, rapid.SampledFrom([]string{
		fmt.Sprintf(`message{consumer_id:%d message_id{ledger_id:1 entry_id:1}} +50`, id),
		fmt.Sprintf(`send_receipt{producer_id:%d sequence_id:1}`, id),
		fmt.Sprintf(`active_consumer_change{consumer_id:%d is_active:true}`, id),
		`ping{}`,
	}).Draw(t, "frame"))
}

func (c *conversation) unload(t *rapid.T, _, leg string) {
	id := rapid.IntRange(1, 3).Draw(t, "id")
	c.say(t, leg, rapid.SampledFrom([]string{
		fmt.Sprintf(`close_producer{producer_id:%d request_id:18446744073709551615 assignedBrokerServiceUrl:"pulsar://broker-1:6650"}`, id),
		fmt.Sprintf(`close_consumer{consumer_id:%d request_id:18446744073709551615}`, id),
		fmt.Sprintf(`topic_migrated{resource_id:%d resource_type:0 brokerServiceUrl:"pulsar://elsewhere:6650"}`, id),
	}).Draw(t, "frame"))
}

func (c *conversation) hangUp(t *rapid.T, client, leg string) {
	c.step(rapid.SampledFrom([]string{client, leg}).Draw(t, "side") + " closed reset")
	delete(c.legs, client)
}

func (c *conversation) move(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics).Draw(t, "topic")
	c.step("map " + topic + " " + rapid.SampledFrom([]string{"a", "b"}).Draw(t, "to"))
	if rapid.IntRange(0, 3).Draw(t, "watch") > 0 { // the watcher of the map may be late
		c.step("evict " + topic + " " + topic + "=broker-0:6650")
	} else if rapid.Bool().Draw(t, "rule") {
		c.step("review")
	}
}

// planned goes a step of a planned switch, in any order and now and then without telling.
func (c *conversation) planned(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics).Draw(t, "topic")
	state := rapid.SampledFrom([]string{"prepared", "fenced", "active"}).Draw(t, "state")
	c.step("state " + topic + " " + state)
	if rapid.IntRange(0, 5).Draw(t, "watch") > 0 {
		c.step(map[string]string{"prepared": "prepare ", "fenced": "fence ", "active": "unfence "}[state] + topic)
	}
}

// check looks at every frame that is written.
func (c *conversation) check(to string, frame []byte) {
	h, ok, err := codec.ParseHead(frame, codec.DefaultMaxFrame)
	if !ok {
		c.t.Fatalf("%s got what is no frame: %v", to, err)
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		c.t.Fatalf("%s got what is no command: %v", to, err)
	}
	if to[0] == 'd' {
		c.checkToBroker(to, &cmd)
	} else {
		c.checkToClient(to, &cmd)
	}
}

func (c *conversation) checkToBroker(leg string, cmd *pulsarpb.BaseCommand) {
	client := ""
	for name, l := range c.legs {
		if l == leg {
			client = name
		}
	}
	topic, id, req := "", "", uint64(0)
	switch {
	case cmd.Producer != nil:
		topic, id, req = cmd.Producer.GetTopic(), fmt.Sprint("producer ", cmd.Producer.GetProducerId()), cmd.Producer.GetRequestId()
	case cmd.Subscribe != nil:
		topic, id, req = cmd.Subscribe.GetTopic(), fmt.Sprint("consumer ", cmd.Subscribe.GetConsumerId()), cmd.Subscribe.GetRequestId()
	case cmd.CloseProducer != nil:
		req := cmd.CloseProducer.GetRequestId()
		c.asked[leg] = append(c.asked[leg], func() string { return fmt.Sprintf("success{request_id:%d}", req) })
		return
	case cmd.CloseConsumer != nil:
		req := cmd.CloseConsumer.GetRequestId()
		c.asked[leg] = append(c.asked[leg], func() string { return fmt.Sprintf("success{request_id:%d}", req) })
		return
	case cmd.Send != nil:
		if id := fmt.Sprint("producer ", cmd.Send.GetProducerId()); c.closed[client][id] {
			c.t.Fatalf("%s of %s is closed and its SEND reached %s", id, client, leg)
		}
		return
	default:
		return
	}
	parsed, err := route.ParseTopic(topic)
	if err != nil {
		c.t.Fatal(err)
	}
	if d := c.p.table.Decide(parsed, "a"); d.Cluster != c.cluster[leg] {
		c.t.Fatalf("%s of %s reached cluster %s, the map says %s", id, topic, c.cluster[leg], d.Cluster)
	}
	delete(c.closed[client], id)
	success := "success"
	if cmd.Producer != nil {
		success = `producer_success`
	}
	c.asked[leg] = append(c.asked[leg], func() string {
		if success == "success" {
			return fmt.Sprintf("success{request_id:%d}", req)
		}
		return fmt.Sprintf(`producer_success{request_id:%d producer_name:"p" topic_epoch:3}`, req)
	})
}

func (c *conversation) checkToClient(client string, cmd *pulsarpb.BaseCommand) {
	told := func(id string) {
		if c.closed[client][id] {
			c.t.Fatalf("%s was told about %s (%s) after it was told that it is closed", client, id, codec.Type(cmd.GetType()))
		}
	}
	switch {
	case cmd.CloseProducer != nil:
		c.closed[client][fmt.Sprint("producer ", cmd.CloseProducer.GetProducerId())] = c.evicted(client, cmd.CloseProducer.GetProducerId(), true)
	case cmd.CloseConsumer != nil:
		c.closed[client][fmt.Sprint("consumer ", cmd.CloseConsumer.GetConsumerId())] = c.evicted(client, cmd.CloseConsumer.GetConsumerId(), false)
	case cmd.Message != nil:
		told(fmt.Sprint("consumer ", cmd.Message.GetConsumerId()))
	case cmd.SendReceipt != nil:
		told(fmt.Sprint("producer ", cmd.SendReceipt.GetProducerId()))
	}
}

// evicted tells whether the proxy closed the handle; one that its broker closed is none of its business any more.
func (c *conversation) evicted(client string, id uint64, producer bool) bool {
	s := c.p.endpoints[client].(*Session)
	h := s.consumers[id]
	if producer {
		h = s.producers[id]
	}
	return h != nil && h.state == handleEvicted
}

func (c *conversation) invariants() {
	live := 0
	for _, t := range c.p.sh.index {
		for i, h := range t.list {
			if h.pos != i || h.topic != t || h.state == handleEvicted {
				c.t.Fatalf("the index of %s is broken at %d", t.base, i)
			}
		}
		live += len(t.list)
	}
	if n := c.p.sh.counters.Handles.Load(); n != int64(live) {
		c.t.Fatalf("the counter says %d handles, there are %d", n, live)
	}
	for s := range c.p.sh.sessions {
		awaiting, evicted := 0, 0
		for _, handles := range []map[uint64]*handle{s.producers, s.consumers} {
			for _, h := range handles {
				switch h.state {
				case handleEvicting:
					awaiting++
					if h.overdue.Before(c.p.now.Add(-time.Second)) {
						c.t.Fatalf("producer %d still waits for receipts %s after its time", h.id, c.p.now.Sub(h.overdue))
					}
				case handleEvicted:
					evicted++
				}
			}
		}
		if awaiting != s.awaiting || evicted != s.evicted {
			c.t.Fatalf("session %x counts %d awaiting and %d evicted, there are %d and %d", s.id, s.awaiting, s.evicted, awaiting, evicted)
		}
	}
}
