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
//   - what is about a consumer goes to the leg that has it, and comes from that alone;
//   - the index knows exactly the handles that are open, and ends empty.
func TestRandomConversations(t *testing.T) { rapid.Check(t, randomConversation) }

func FuzzConversations(f *testing.F) { f.Fuzz(rapid.MakeFuzz(randomConversation)) }

type conversation struct {
	t       *rapid.T
	p       *player
	legs    map[string]string          // client → its leg
	where   map[string]string          // "c1 consumer 1" → leg that its SUBSCRIBE went to last, until somebody closes it
	open    map[string]map[string]bool // client → "producer 1" → told that it is open
	had     map[string]bool            // "d1 1": a SUBSCRIBE for consumer 1 went there
	ids     map[string]string          // "c1 7", a SUBSCRIBE → "c1 consumer 1"
	closed  map[string]map[string]bool // client → told that it is closed
	asked   map[string][]func() string // leg → answers that its broker may give
	rest    map[string][]byte          // connection → bytes of a frame that was begun
	nextReq map[string]uint64
	late    bool // a frame goes on that was begun before: what the proxy says itself has waited for its end
}

func randomConversation(t *rapid.T) {
	c := &conversation{
		t: t, p: newPlayer(quietTB{}, false), legs: map[string]string{}, where: map[string]string{}, ids: map[string]string{}, had: map[string]bool{}, open: map[string]map[string]bool{},
		closed: map[string]map[string]bool{}, asked: map[string][]func() string{}, rest: map[string][]byte{}, nextReq: map[string]uint64{},
	}
	c.p.onFrame = c.check
	if rapid.Bool().Draw(t, "drains") { // from the beginning, or a run is too short for much to happen on a leg beside
		for _, topic := range topics[:2] {
			c.step("draining persistent://public/default/" + topic + " a b 1:1 s")
		}
		c.step("map persistent://public/default/t3 b")
		c.connect("b")
		c.step(`c1> subscribe{topic:"t1" subscription:"s" sub_type:1 consumer_id:1 request_id:1} ; subscribe{topic:"t2" subscription:"s" sub_type:1 consumer_id:2 request_id:2} ; subscribe{topic:"t3" subscription:"s" sub_type:1 consumer_id:3 request_id:3}`)
		c.nextReq["c1"] = 3
		for _, name := range []string{"d2", "d2", "d2", "d2", "d3", "d3", "d4", "d4", "d3", "d4"} {
			c.goOn(t, name)
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"connect": func(t *rapid.T) {
			if len(c.legs) < 3 {
				c.connect(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "cluster"))
			}
		},
		"create":   func(t *rapid.T) { c.client(t, c.create) },
		"send":     func(t *rapid.T) { c.client(t, c.send) },
		"close":    func(t *rapid.T) { c.client(t, c.closeHandle) },
		"answer":   func(t *rapid.T) { c.client(t, c.answer) },
		"deliver":  func(t *rapid.T) { c.client(t, c.deliver) },
		"deliver ": func(t *rapid.T) { c.client(t, c.deliver) },
		"unload":   func(t *rapid.T) { c.client(t, c.unload) },
		"hang up":  func(t *rapid.T) { c.client(t, c.hangUp) },
		"move":     c.move,
		"switch":   c.planned,
		"drain":    c.drain,
		"network":  c.network,
		"lease":    func(t *rapid.T) { c.step("lease " + rapid.SampledFrom([]string{"on", "on", "off"}).Draw(t, "lease")) },
		"time":     func(t *rapid.T) { c.step(fmt.Sprintf("tick %dms", rapid.IntRange(1, 700).Draw(t, "ms"))) },
		"":         func(t *rapid.T) { c.invariants() },
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
	c.legs[client] = leg
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
	f(t, name, rapid.SampledFrom(c.legsOf(name)).Draw(t, "leg"))
	if c.p.endpoints[name] == nil {
		delete(c.legs, name)
	}
}

// legsOf are the legs of a client that talk, the one that it asked for first.
func (c *conversation) legsOf(client string) []string {
	legs := []string{c.legs[client]}
	for i := range c.p.dials {
		name := fmt.Sprintf("d%d", i+1)
		if l, ok := c.p.endpoints[name].(*leg); ok && l.extra != nil && l.ready && l.s == c.p.endpoints[client] {
			legs = append(legs, name)
		}
	}
	return legs
}

// network has something happen to a connection that the proxy has dialled by itself: a leg beside, or one for lookups.
func (c *conversation) network(t *rapid.T) {
	var dialled []string
	for i := range c.p.dials {
		name := fmt.Sprintf("d%d", i+1)
		switch ep := c.p.endpoints[name].(type) {
		case *upstream:
			dialled = append(dialled, name)
		case *leg:
			if ep.extra != nil {
				dialled = append(dialled, name)
			}
		}
	}
	if len(dialled) == 0 {
		return
	}
	name := rapid.SampledFrom(dialled).Draw(t, "dialled")
	if rapid.IntRange(0, 9).Draw(t, "luck") == 0 {
		c.step(name + " closed reset")
	} else {
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			c.goOn(t, name)
		}
	}
	for client := range c.legs {
		if c.p.endpoints[client] == nil {
			delete(c.legs, client)
		}
	}
}

// goOn has a connection that the proxy has dialled come about, and say what it is asked.
func (c *conversation) goOn(t *rapid.T, name string) {
	up, ready := false, false
	switch ep := c.p.endpoints[name].(type) {
	case *upstream:
		up, ready = ep.conn != 0, ep.connected != nil
	case *leg:
		up, ready = ep.conn != 0, ep.ready
	}
	switch {
	case c.p.endpoints[name] == nil: // it has ended, or was never needed
	case !up:
		c.step(name + " up")
	case !ready:
		c.step(name + `> connected{server_version:"x" protocol_version:21}`)
	case len(c.asked[name]) > 0:
		c.step(name + "> " + c.takeAnswer(t, name))
	}
}

// drain has a topic leave a cluster without replication, or goes a step of that.
func (c *conversation) drain(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics).Draw(t, "topic")
	from, to := "a", "b"
	if rapid.Bool().Draw(t, "direction") {
		from, to = to, from
	}
	c.step("draining " + topic + " " + from + " " + to + " 1:1 " + rapid.SampledFrom([]string{"s", "s", ">s", "other"}).Draw(t, "subscriptions"))
	if rapid.IntRange(0, 4).Draw(t, "watch") > 0 {
		c.step("evict " + topic + " " + topic + "=broker-0:6650")
	}
}

// say sends frames, now and then only a part of them; the rest comes with the next ones.
func (c *conversation) say(t *rapid.T, name, frames string) {
	bytes, err := c.p.frames(frames)
	if err != nil {
		t.Fatal(err)
	}
	c.late = len(c.rest[name]) > 0
	bytes = append(c.rest[name], bytes...)
	n := len(bytes)
	if rapid.Bool().Draw(t, "cut") {
		n = rapid.IntRange(0, n).Draw(t, "at")
	}
	c.rest[name] = append([]byte(nil), bytes[n:]...)
	if err := c.p.deliver(name, bytes[:n]); err != nil {
		t.Fatal(err)
	}
	c.late = false
}

var topics = []string{"t1", "t2", "t3"}

func (c *conversation) create(t *rapid.T, client, _ string) {
	c.nextReq[client]++
	req, id, topic := c.nextReq[client], rapid.IntRange(1, 3).Draw(t, "id"), rapid.SampledFrom(topics).Draw(t, "topic")
	if rapid.Bool().Draw(t, "producer") {
		c.say(t, client, fmt.Sprintf(`producer{topic:%q producer_id:%d request_id:%d topic_epoch:7}`, topic, id, req))
	} else {
		c.ids[fmt.Sprint(client, " ", req)] = fmt.Sprint(client, " consumer ", id)
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
	kind, id := rapid.SampledFrom([]string{"producer", "consumer"}).Draw(t, "kind"), rapid.IntRange(1, 3).Draw(t, "id")
	delete(c.where, fmt.Sprint(client, " ", kind, " ", id))
	c.say(t, client, fmt.Sprintf(`close_%s{%s_id:%d request_id:%d}`, kind, kind, id, c.nextReq[client]))
}

func (c *conversation) answer(t *rapid.T, _, leg string) {
	if len(c.asked[leg]) > 0 {
		c.say(t, leg, c.takeAnswer(t, leg))
	}
}

func (c *conversation) takeAnswer(t *rapid.T, leg string) string {
	i := rapid.IntRange(0, len(c.asked[leg])-1).Draw(t, "which")
	answer := c.asked[leg][i]()
	c.asked[leg] = append(c.asked[leg][:i:i], c.asked[leg][i+1:]...)
	return answer
}

func (c *conversation) deliver(t *rapid.T, _, leg string) {
	id := rapid.IntRange(1, 3).Draw(t, "id")
	for n := range 3 { // rather one of which there are messages
		if !c.had[fmt.Sprint(leg, " ", id)] {
			id = n + 1
		}
	}
	message := ""
	if c.had[fmt.Sprint(leg, " ", id)] {
		message = fmt.Sprintf(`message{consumer_id:%d message_id{ledger_id:%s entry_id:1}} +%d`, id, leg[1:], rapid.SampledFrom([]int{50, 5000}).Draw(t, "size"))
	} else {
		message = `pong{}`
	}
	c.say(t, leg, rapid.SampledFrom([]string{
		message, message,
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
	delete(c.rest, leg)
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

func (c *conversation) checkToBroker(at string, cmd *pulsarpb.BaseCommand) {
	if lookup := cmd.LookupTopic; lookup != nil {
		req := lookup.GetRequestId()
		c.asked[at] = append(c.asked[at], func() string {
			return fmt.Sprintf(`lookup_topic_response{request_id:%d response:1 brokerServiceUrl:"pulsar://broker-%d:6650"}`, req, req%2)
		})
		return
	}
	l, ok := c.p.endpoints[at].(*leg)
	if !ok {
		return
	}
	client := c.p.names[l.s.conn]
	topic, id, req := "", "", uint64(0)
	switch {
	case cmd.Producer != nil:
		topic, id, req = cmd.Producer.GetTopic(), fmt.Sprint("producer ", cmd.Producer.GetProducerId()), cmd.Producer.GetRequestId()
	case cmd.Subscribe != nil:
		topic, id, req = cmd.Subscribe.GetTopic(), fmt.Sprint("consumer ", cmd.Subscribe.GetConsumerId()), cmd.Subscribe.GetRequestId()
	case cmd.CloseProducer != nil:
		req := cmd.CloseProducer.GetRequestId()
		c.asked[at] = append(c.asked[at], func() string { return fmt.Sprintf("success{request_id:%d}", req) })
		return
	case cmd.CloseConsumer != nil:
		req := cmd.CloseConsumer.GetRequestId()
		c.asked[at] = append(c.asked[at], func() string { return fmt.Sprintf("success{request_id:%d}", req) })
		return
	case cmd.Send != nil:
		if id := fmt.Sprint("producer ", cmd.Send.GetProducerId()); c.closed[client][id] {
			c.t.Fatalf("%s of %s is closed and its SEND reached %s", id, client, at)
		}
		return
	case cmd.Ack != nil:
		c.checkPlace(client, at, cmd.Ack.GetConsumerId(), "ACK")
		return
	case cmd.Flow != nil:
		c.checkPlace(client, at, cmd.Flow.GetConsumerId(), "FLOW")
		return
	case cmd.Seek != nil:
		c.checkPlace(client, at, cmd.Seek.GetConsumerId(), "SEEK")
		return
	default:
		return
	}
	parsed, err := route.ParseTopic(topic)
	if err != nil {
		c.t.Fatal(err)
	}
	d := c.p.table.Decide(parsed, "a")
	if listed, leaving := route.DrainHas(d.Drain, "s"); c.late {
		d.Cluster = l.cluster // it was judged before
	} else if cmd.Subscribe != nil && leaving {
		c.t.Fatalf("%s of %s reached cluster %s while its subscription is between two", id, topic, l.cluster)
	} else if cmd.Subscribe != nil && listed {
		d.Cluster = route.DrainFrom(d.Drain)
	}
	if d.Cluster != l.cluster {
		c.t.Fatalf("%s of %s reached cluster %s, the map says %s", id, topic, l.cluster, d.Cluster)
	}
	delete(c.closed[client], id)
	if cmd.Subscribe != nil {
		c.where[client+" "+id] = at
		c.had[fmt.Sprint(at, " ", cmd.Subscribe.GetConsumerId())] = true
	}
	success := "success"
	if cmd.Producer != nil {
		success = `producer_success`
	}
	c.asked[at] = append(c.asked[at], func() string {
		if success == "success" {
			return fmt.Sprintf("success{request_id:%d}", req)
		}
		return fmt.Sprintf(`producer_success{request_id:%d producer_name:"p" topic_epoch:3}`, req)
	})
}

// checkPlace tells whether what is about a consumer is at the broker that has it.
func (c *conversation) checkPlace(client, leg string, id uint64, what string) {
	if s, ok := c.p.endpoints[client].(*Session); !ok || s.consumers[id] == nil {
		return // its client has closed it
	}
	if at := c.where[fmt.Sprint(client, " consumer ", id)]; at != "" && at != leg && c.p.endpoints[at] != nil {
		c.t.Fatalf("%s about consumer %d of %s went to %s, it is at %s", what, id, client, leg, at)
	}
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
		delete(c.where, fmt.Sprint(client, " consumer ", cmd.CloseConsumer.GetConsumerId()))
	case cmd.Error != nil:
		delete(c.where, c.ids[fmt.Sprint(client, " ", cmd.Error.GetRequestId())])
	case cmd.Message != nil:
		told(fmt.Sprint("consumer ", cmd.Message.GetConsumerId()))
		real, _, _ := codec.SplitLedger(cmd.Message.GetMessageId().GetLedgerId())
		c.checkPlace(client, fmt.Sprint("d", real), cmd.Message.GetConsumerId(), "MESSAGE")
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
		c.oneTalks(s)
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

// oneTalks: at most one leg is in the middle of a frame towards the client, and whoever waits will be called.
func (c *conversation) oneTalks(s *Session) {
	if s.aside == nil || s.state != stateBridged {
		return
	}
	talking, held := 0, 0
	for _, l := range append([]*leg{s.leg}, s.aside.legs...) {
		if l.down.busy() {
			talking++
		}
		if l.held {
			held++
		}
	}
	if talking > 1 {
		c.t.Fatalf("%d legs of session %x are in the middle of a frame", talking, s.id)
	}
	if held != len(s.aside.queue) || held > 0 && talking == 0 && s.aside.turn == nil {
		c.t.Fatalf("session %x has %d legs that wait, %d in the queue, %d talk, and the turn is %v", s.id, held, len(s.aside.queue), talking, s.aside.turn)
	}
}
