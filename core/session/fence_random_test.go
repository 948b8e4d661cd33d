package session

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
	"pointsman/core/switching"
)

// Whatever clients, brokers and switches do, in whatever order, with leases that come and go and loops that are told late or not at all:
//   - what a broker gets from one producer has no gap: after a SEND was dropped, none follows before the producer was made anew (P4);
//     the same for what a client gets of one consumer (P7);
//   - after a fence is done no SEND reaches the cluster, and no creation while the map says fenced;
//   - a fence that is done and clean has left nothing behind that its brokers have not answered (P5), and no acknowledgement on its way;
//   - every request gets exactly one answer, and a lookup that of the cluster which the map names at that moment;
//   - of a map that is too old no SEND reaches a broker once the loop knows, and no PRODUCER from then on that it is (P8);
//   - nothing waits for ever;
//   - with topics that drain, a consumer reaches the cluster alone that its subscription reads, by whichever leg, and none while that is between the two.
func TestFencesKeepTheirPromises(t *testing.T) { rapid.Check(t, fenceConversation) }

func FuzzFences(f *testing.F) { f.Fuzz(rapid.MakeFuzz(fenceConversation)) }

type fenceWorld struct {
	conversation
	brokers  map[string]*fenceBroker
	requests map[string]map[uint64]*fenceRequest // by client
	seq      map[string]uint64                   // by client and producer
	seen     map[uint64]uint64                   // of the consumer with that ledger the last entry
	ended    map[string]bool                     // consumers that their client has closed: it ignores what comes for them
	done     map[string]bool                     // topics whose fence is done
	lost     map[debtKey]time.Time
	serial   uint64
	up       int  // dials that were seen
	amid     bool // who speaks was in the middle of a frame: the proxy's own frames wait for its end
}

// fenceBroker is one connection of a broker. It answers in order.
type fenceBroker struct {
	conn    string
	cluster string
	client  string // "" for a lookup connection
	has     map[string]*fenceHandle
	closing []*fenceHandle
	answers []fenceAnswer
}

type fenceHandle struct {
	base       string
	producer   bool
	serial     uint64
	answered   bool // its creation
	unanswered int  // SENDs
	acks       int  // on their way
	seeks      int  // that are not answered
	next       uint64
	sent       uint64
}

type fenceAnswer struct {
	text string
	then func()
	of   *fenceHandle
}

// fenceRequest is one that a client waits for.
type fenceRequest struct {
	what     string
	id       string
	optional bool
}

func fenceConversation(t *rapid.T) {
	w := &fenceWorld{
		brokers: map[string]*fenceBroker{}, requests: map[string]map[uint64]*fenceRequest{}, seq: map[string]uint64{}, seen: map[uint64]uint64{},
		ended: map[string]bool{}, done: map[string]bool{}, lost: map[debtKey]time.Time{},
		conversation: conversation{
			t: t, p: newPlayer(quietTB{}, false), legs: map[string]string{}, where: map[string]string{}, ids: map[string]string{}, had: map[string]bool{}, open: map[string]map[string]bool{},
			closed: map[string]map[string]bool{}, asked: map[string][]func() string{}, rest: map[string][]byte{}, nextReq: map[string]uint64{},
		},
	}
	w.p.onFrame = w.take
	act := func(f func(*rapid.T, string, string)) func(*rapid.T) {
		return func(t *rapid.T) {
			if len(w.legs) == 0 {
				w.join(t)
			}
			w.client(t, f)
		}
	}
	seldom := func(f func(*rapid.T)) func(*rapid.T) {
		return func(t *rapid.T) {
			if rapid.IntRange(0, 2).Draw(t, "seldom") == 0 {
				f(t)
			}
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"join":     w.join,
		"create":   act(w.create),
		"close":    seldom(act(w.closeOne)),
		"send":     act(w.send),
		"send ":    act(w.send),
		"ask":      act(w.ask),
		"look up":  act(w.lookUp),
		"deliver":  act(w.deliver),
		"answer":   w.answer,
		"answer ":  w.answer,
		"unload":   seldom(act(w.unload)),
		"hang up":  seldom(act(func(t *rapid.T, client, leg string) { w.hangUp(t, client, leg) })),
		"move":     w.move,
		"drain":    w.drain,
		"drain ":   w.drain,
		"switch":   w.planned,
		"switch  ": w.planned,
		"lease":    func(t *rapid.T) { w.step("lease " + rapid.SampledFrom([]string{"on", "on", "off"}).Draw(t, "lease")) },
		"age": func(t *rapid.T) {
			w.step(rapid.SampledFrom([]string{"age off", "age off", "age on", "too old"}).Draw(t, "age"))
		},
		"time": func(t *rapid.T) {
			w.step(fmt.Sprintf("tick %dms", rapid.SampledFrom([]int{1, 50, 100, 600, 3000}).Draw(t, "ms")))
		},
		"": func(*rapid.T) {
			w.dialled()
			w.invariants()
			if p := w.p.sh.parking.first; p != nil && p.until.Before(w.p.now.Add(-2*time.Second)) {
				t.Fatalf("a %s waits although its time is over", p.kind)
			}
		},
	})
	w.end()
}

// end lets everything end, and looks what is left.
func (w *fenceWorld) end() {
	for _, client := range slices.Sorted(maps.Keys(w.legs)) {
		w.finish(client)
	}
	w.step("lease on")
	w.step("age off")
	for _, topic := range topics {
		w.tell("persistent://public/default/"+topic, "active")
	}
	w.step("review")
	for n := range 130 {
		w.answerAll()
		w.step("tick 100ms")
		for _, client := range slices.Sorted(maps.Keys(w.legs)) {
			if n%20 == 0 {
				w.step(client + "> pong{}")
			}
		}
	}
	for _, client := range slices.Sorted(maps.Keys(w.legs)) {
		for req, r := range w.requests[client] {
			if !r.optional {
				w.t.Fatalf("%s still waits for the answer to its %s %d", client, r.what, req)
			}
		}
	}
	sh := w.p.sh
	if pk := &sh.parking; pk.count != 0 || pk.bytes != 0 || sh.counters.Parked.Load() != 0 || sh.counters.HeldBytes.Load() != 0 || len(sh.moving) != 0 || sh.counters.FencedTopics.Load() != 0 {
		w.t.Fatalf("%d requests and %d bytes still wait, %d topics move", pk.count, pk.bytes, len(sh.moving))
	}
	for _, topic := range topics {
		base := "persistent://public/default/" + topic
		w.tell(base, "fenced")
		w.answerAll()
		if !w.done[base] {
			w.t.Fatalf("the fence of %s waits, and everything was answered", topic)
		}
	}
}

func (w *fenceWorld) join(t *rapid.T) {
	if len(w.legs) == 2 {
		return
	}
	cluster := rapid.SampledFrom([]string{"a", "a", "b"}).Draw(t, "cluster")
	client, leg := fmt.Sprintf("c%d", w.p.clients+1), fmt.Sprintf("d%d", w.p.dials+1)
	w.brokers[leg] = &fenceBroker{conn: leg, cluster: cluster, client: client, has: map[string]*fenceHandle{}}
	w.requests[client] = map[uint64]*fenceRequest{}
	w.connect(cluster)
	w.brokers[leg].answers = nil // connect answers by itself
	w.up = w.p.dials
}

func (w *fenceWorld) say(t *rapid.T, name, frames string) {
	w.within(name, func() { w.conversation.say(t, name, frames) })
}

// within notes whether who speaks is in the middle of a frame.
func (w *fenceWorld) within(name string, f func()) {
	switch ep := w.p.endpoints[name].(type) {
	case *Session:
		w.amid = ep.up.busy()
	case *leg:
		w.amid = ep.down.busy()
	}
	f()
	w.amid = false
}

// dialled brings up the lookup connections that were asked for.
func (w *fenceWorld) dialled() {
	for ; w.up < w.p.dials; w.up++ {
		conn := fmt.Sprintf("d%d", w.up+1)
		switch ep := w.p.endpoints[conn].(type) {
		case *upstream:
			w.brokers[conn] = &fenceBroker{conn: conn, cluster: ep.key.cluster}
			w.step(conn + " up")
		case *leg:
			w.brokers[conn] = &fenceBroker{conn: conn, cluster: ep.cluster, has: map[string]*fenceHandle{}}
			w.step(conn + " up")
		}
	}
}

func (w *fenceWorld) request(client, what, id string) uint64 {
	w.nextReq[client]++
	w.requests[client][w.nextReq[client]] = &fenceRequest{what: what, id: id}
	return w.nextReq[client]
}

func (w *fenceWorld) create(t *rapid.T, client, _ string) {
	id, topic := rapid.IntRange(1, 2).Draw(t, "id"), rapid.SampledFrom(topics[:2]).Draw(t, "topic")
	if rapid.IntRange(0, 2).Draw(t, "producer") > 0 {
		w.say(t, client, fmt.Sprintf(`producer{topic:%q producer_id:%d request_id:%d}`, topic, id, w.request(client, "producer", fmt.Sprint("producer ", id))))
		return
	}
	delete(w.ended, fmt.Sprint(client, " consumer ", id))
	w.say(t, client, fmt.Sprintf(`subscribe{topic:%q subscription:"s" sub_type:1 consumer_id:%d request_id:%d}`, topic, id, w.request(client, "subscribe", fmt.Sprint("consumer ", id))))
}

// closeOne closes an id: a creation of it that is under way may stay without an answer.
func (w *fenceWorld) closeOne(t *rapid.T, client, _ string) {
	kind, id := rapid.SampledFrom([]string{"producer", "consumer"}).Draw(t, "kind"), rapid.IntRange(1, 2).Draw(t, "id")
	w.endsCreation(client, fmt.Sprint(kind, " ", id))
	w.say(t, client, fmt.Sprintf(`close_%s{%s_id:%d request_id:%d}`, kind, kind, id, w.request(client, "close", "")))
}

func (w *fenceWorld) endsCreation(client, id string) {
	w.ended[client+" "+id] = true
	for _, r := range w.requests[client] {
		if r.id == id {
			r.optional = true
		}
	}
}

func (w *fenceWorld) send(t *rapid.T, client, _ string) {
	id := rapid.IntRange(1, 2).Draw(t, "id")
	key := fmt.Sprint(client, " ", id)
	for range rapid.IntRange(1, 3).Draw(t, "n") {
		w.seq[key]++
		w.say(t, client, fmt.Sprintf(`send{producer_id:%d sequence_id:%d} +50`, id, w.seq[key]))
	}
}

func (w *fenceWorld) ask(t *rapid.T, client, _ string) {
	id := rapid.IntRange(1, 2).Draw(t, "id")
	switch rapid.IntRange(0, 5).Draw(t, "what") {
	case 0:
		w.say(t, client, fmt.Sprintf(`flow{consumer_id:%d messagePermits:1}`, id))
	case 1:
		w.say(t, client, fmt.Sprintf(`ack{consumer_id:%d ack_type:0 message_id{ledger_id:1 entry_id:1}}`, id))
	case 2:
		w.say(t, client, fmt.Sprintf(`ack{consumer_id:%d ack_type:0 request_id:%d message_id{ledger_id:1 entry_id:1}}`, id, w.request(client, "ack", "")))
	case 3:
		w.say(t, client, fmt.Sprintf(`seek{consumer_id:%d request_id:%d message_publish_time:1}`, id, w.request(client, "seek", "")))
	case 4:
		w.endsCreation(client, fmt.Sprint("consumer ", id))
		w.say(t, client, fmt.Sprintf(`unsubscribe{consumer_id:%d request_id:%d}`, id, w.request(client, "unsubscribe", "")))
	case 5:
		w.say(t, client, fmt.Sprintf(`get_last_message_id{consumer_id:%d request_id:%d}`, id, w.request(client, "get_last_message_id", "")))
	}
}

func (w *fenceWorld) lookUp(t *rapid.T, client, _ string) {
	topic := rapid.SampledFrom(topics[:2]).Draw(t, "topic")
	if rapid.Bool().Draw(t, "partitions") {
		w.say(t, client, fmt.Sprintf(`partition_metadata{topic:%q request_id:%d}`, topic, w.request(client, "partitions", topic)))
		return
	}
	w.say(t, client, fmt.Sprintf(`lookup_topic{topic:%q request_id:%d}`, topic, w.request(client, "lookup", topic)))
}

// deliver has a broker send MESSAGEs to one of its consumers.
func (w *fenceWorld) deliver(t *rapid.T, _, leg string) {
	id, h := w.pick(t, w.brokers[leg], false)
	h.sent++
	w.say(t, leg, fmt.Sprintf(`message{consumer_id:%s message_id{ledger_id:%d entry_id:%d}} +50`, strings.Fields(id)[1], h.serial, h.sent))
}

// pick is a producer or consumer that the broker has made.
func (w *fenceWorld) pick(t *rapid.T, b *fenceBroker, producer bool) (string, *fenceHandle) {
	var ids []string
	for _, id := range slices.Sorted(maps.Keys(b.has)) {
		if h := b.has[id]; h.answered && h.producer == producer {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		t.Skip("none")
	}
	id := rapid.SampledFrom(ids).Draw(t, "id")
	return id, b.has[id]
}

// answer has a broker say what it has to.
func (w *fenceWorld) answer(t *rapid.T) {
	var conns []string
	for _, conn := range slices.Sorted(maps.Keys(w.brokers)) {
		if len(w.brokers[conn].answers) > 0 && w.p.endpoints[conn] != nil {
			conns = append(conns, conn)
		}
	}
	if len(conns) == 0 {
		return
	}
	b := w.brokers[rapid.SampledFrom(conns).Draw(t, "broker")]
	for range rapid.IntRange(1, len(b.answers)).Draw(t, "n") {
		if w.p.endpoints[b.conn] == nil || len(b.answers) == 0 {
			return // an answer ended it, or was the last one
		}
		a := b.answers[0]
		b.answers = b.answers[1:]
		if a.then != nil {
			a.then()
		}
		if a.text != "" {
			w.say(t, b.conn, a.text)
		}
	}
}

// finish sends the rest of what a connection has begun.
func (w *fenceWorld) finish(name string) {
	rest := w.rest[name]
	w.rest[name] = nil
	if w.p.endpoints[name] == nil {
		return
	}
	w.within(name, func() {
		if err := w.p.deliver(name, rest); err != nil {
			w.t.Fatal(err)
		}
	})
}

func (w *fenceWorld) answerAll() {
	for busy := true; busy; {
		busy = false
		w.dialled()
		for _, conn := range slices.Sorted(maps.Keys(w.brokers)) {
			b := w.brokers[conn]
			w.finish(conn)
			for len(b.answers) > 0 && w.p.endpoints[conn] != nil {
				busy = true
				a := b.answers[0]
				b.answers = b.answers[1:]
				if a.then != nil {
					a.then()
				}
				if a.text != "" {
					w.step(conn + "> " + a.text)
				}
			}
		}
	}
}

// unload closes a producer or consumer as brokers do by themselves: what its SENDs came to is not said.
func (w *fenceWorld) unload(t *rapid.T, _, leg string) {
	b := w.brokers[leg]
	id, h := w.pick(t, b, rapid.Bool().Draw(t, "producer"))
	delete(b.has, id)
	if h.unanswered > 0 {
		w.lost[debtKey{h.base, b.cluster}] = w.p.now
		b.answers = slices.DeleteFunc(b.answers, func(a fenceAnswer) bool { return a.of == h && strings.Contains(a.text, "receipt") })
	}
	kind, n, _ := strings.Cut(id, " ")
	b.will(nil, nil, "%s", fmt.Sprintf(`close_%s{%s_id:%s request_id:18446744073709551615 assignedBrokerServiceUrl:"pulsar://broker-1:6650"}`, kind, kind, n))
}

func (w *fenceWorld) hangUp(t *rapid.T, client, leg string) {
	b := w.brokers[leg]
	for _, h := range append(slices.Collect(maps.Values(b.has)), b.closing...) {
		if h.producer && (h.unanswered > 0 || !h.answered) {
			w.lost[debtKey{h.base, b.cluster}] = w.p.now
		}
	}
	delete(w.brokers, leg)
	w.conversation.hangUp(t, client, leg)
	if w.p.endpoints[client] == nil {
		delete(w.requests, client)
	}
}

// drain has a topic drain from a to b, or goes a step of that.
func (w *fenceWorld) drain(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics[:2]).Draw(t, "topic")
	if d := w.p.sh.decide(topic); d.Cluster != "a" && d.Drain == "" {
		return
	}
	delete(w.done, topic)
	w.step("draining " + topic + " a b 1:1 " + rapid.SampledFrom([]string{"s", "s", "s", ">s", "other"}).Draw(t, "subscriptions"))
	if rapid.IntRange(0, 4).Draw(t, "watch") > 0 {
		w.step("evict " + topic + " " + topic + "=broker-0:6650")
	}
}

// move is an immediate switch, or the flip of a planned one.
func (w *fenceWorld) move(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics[:2]).Draw(t, "topic")
	to := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "to")
	if w.p.sh.mappedCluster(topic) == to {
		return
	}
	delete(w.done, topic)
	w.step("map " + topic + " " + to)
	if rapid.IntRange(0, 3).Draw(t, "watch") > 0 {
		w.step("evict " + topic + " " + topic + "=broker-0:6650")
	}
}

func (w *fenceWorld) planned(t *rapid.T) {
	topic := "persistent://public/default/" + rapid.SampledFrom(topics[:2]).Draw(t, "topic")
	next := []string{"prepared", "fenced", "fenced"}
	switch w.p.sh.decide(topic).State {
	case route.StatePrepared:
		next = []string{"prepared", "fenced", "active"}
	case route.StateFenced:
		next = []string{"active", "active", "fenced", "prepared"}
	}
	state := rapid.SampledFrom(next).Draw(t, "state")
	if rapid.IntRange(0, 5).Draw(t, "watch") > 0 {
		w.tell(topic, state)
		return
	}
	delete(w.done, topic)
	w.step("state " + topic + " " + state)
}

// tell changes the map and tells the shard.
func (w *fenceWorld) tell(base, state string) {
	delete(w.done, base)
	w.step("state " + base + " " + state)
	switch state {
	case "prepared":
		w.step("prepare " + base)
	case "active":
		w.step("unfence " + base)
	default:
		cluster, called := w.p.sh.mappedCluster(base), false
		w.p.sh.Fence(w.p.now, base, switching.Key{Switch: "s1", Attempt: 1}, func(f Fenced) {
			if called {
				w.t.Fatalf("the fence of %s is done twice", base)
			}
			called = true
			w.checkDone(base, cluster, f)
		})
		w.p.perform()
	}
}

func (w *fenceWorld) checkDone(base, cluster string, f Fenced) {
	w.done[base] = true
	if f.Clean != (f.Why == "") {
		w.t.Fatalf("clean %v, because %q", f.Clean, f.Why)
	}
	if at, ok := w.lost[debtKey{base, cluster}]; ok && f.Clean && w.p.now.Sub(at) < switching.SettleTime {
		w.t.Fatalf("the fence of %s is clean, and something was lost %s ago", base, w.p.now.Sub(at))
	}
	for _, b := range w.brokers {
		if b.cluster != cluster && b.cluster != route.DrainFrom(w.p.sh.decide(base).Drain) || w.p.endpoints[b.conn] == nil {
			continue
		}
		for _, h := range append(slices.Collect(maps.Values(b.has)), b.closing...) {
			if h.base == base && h.acks > 0 {
				w.t.Fatalf("the fence of %s is done, and %d acknowledgements are on their way to %s", base, h.acks, b.conn)
			}
			if h.base == base && h.unanswered > 0 && f.Clean && b.cluster == cluster {
				w.t.Fatalf("the fence of %s is clean, and %s has %d SENDs to answer", base, b.conn, h.unanswered)
			}
		}
		for _, h := range b.closing {
			if h.base == base && !h.producer {
				w.t.Fatalf("the fence of %s is done, and %s has still to end a consumer", base, b.conn)
			}
		}
		for id, h := range b.has {
			if h.base == base && h.seeks > 0 {
				w.t.Fatalf("the fence of %s is done, and %s has still to answer a SEEK of %s", base, b.conn, id)
			}
			if h.base == base && !h.answered && (!h.producer || b.cluster == cluster) {
				w.t.Fatalf("the fence of %s is done, and %s has still to make %s", base, b.conn, id)
			}
		}
	}
}

// take is where the player's frames go.
func (w *fenceWorld) take(to string, frame []byte) {
	h, ok, err := codec.ParseHead(frame, codec.DefaultMaxFrame)
	if !ok {
		w.t.Fatalf("%s got what is no frame: %v", to, err)
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		w.t.Fatal(err)
	}
	if to[0] == 'c' {
		w.toClient(to, h.Type, &cmd)
	} else if b := w.brokers[to]; b != nil {
		w.toBroker(b, &cmd)
	}
}

func (b *fenceBroker) will(of *fenceHandle, then func(), format string, args ...any) {
	b.answers = append(b.answers, fenceAnswer{fmt.Sprintf(format, args...), then, of})
}

func (w *fenceWorld) toBroker(b *fenceBroker, cmd *pulsarpb.BaseCommand) {
	switch {
	case cmd.Connect != nil && b.client == "":
		b.will(nil, nil, `connected{server_version:"x" protocol_version:21}`)
	case cmd.Ping != nil:
		b.will(nil, nil, "pong{}")
	case cmd.LookupTopic != nil:
		b.will(nil, nil, `lookup_topic_response{brokerServiceUrl:"pulsar://broker-0:6650" response:1 request_id:%d authoritative:true}`, cmd.LookupTopic.GetRequestId())
	case cmd.PartitionMetadata != nil:
		b.will(nil, nil, `partition_metadata_response{partitions:%d request_id:%d response:0}`, map[string]int{"a": 1, "b": 2}[b.cluster], cmd.PartitionMetadata.GetRequestId())
	case cmd.Producer != nil:
		w.make(b, fmt.Sprint("producer ", cmd.Producer.GetProducerId()), cmd.Producer.GetTopic(), cmd.Producer.GetRequestId())
	case cmd.Subscribe != nil:
		w.make(b, fmt.Sprint("consumer ", cmd.Subscribe.GetConsumerId()), cmd.Subscribe.GetTopic(), cmd.Subscribe.GetRequestId())
	case cmd.CloseProducer != nil:
		w.gone(b, fmt.Sprint("producer ", cmd.CloseProducer.GetProducerId()), cmd.CloseProducer.GetRequestId())
	case cmd.CloseConsumer != nil:
		w.gone(b, fmt.Sprint("consumer ", cmd.CloseConsumer.GetConsumerId()), cmd.CloseConsumer.GetRequestId())
	case cmd.Unsubscribe != nil:
		w.gone(b, fmt.Sprint("consumer ", cmd.Unsubscribe.GetConsumerId()), cmd.Unsubscribe.GetRequestId())
	case cmd.Seek != nil:
		answered := func() {}
		if h := b.has[fmt.Sprint("consumer ", cmd.Seek.GetConsumerId())]; h != nil {
			h.seeks++
			answered = func() { h.seeks-- }
		}
		b.will(nil, answered, `success{request_id:%d}`, cmd.Seek.GetRequestId())
	case cmd.GetLastMessageId != nil:
		b.will(nil, nil, `get_last_message_id_response{request_id:%d last_message_id{ledger_id:1 entry_id:1}}`, cmd.GetLastMessageId.GetRequestId())
	case cmd.Ack != nil && cmd.Ack.RequestId == nil:
		if h := b.has[fmt.Sprint("consumer ", cmd.Ack.GetConsumerId())]; h != nil {
			h.acks++
			b.will(h, func() { h.acks-- }, "")
		}
	case cmd.Ack != nil:
		b.will(nil, nil, `ack_response{consumer_id:%d request_id:%d}`, cmd.Ack.GetConsumerId(), cmd.Ack.GetRequestId())
	case cmd.Send != nil:
		w.sent(b, cmd.Send)
	}
}

func (w *fenceWorld) sent(b *fenceBroker, send *pulsarpb.CommandSend) {
	h := b.has[fmt.Sprint("producer ", send.GetProducerId())]
	if h == nil {
		return
	}
	if n := send.GetSequenceId(); h.next != 0 && n != h.next {
		w.t.Fatalf("%s got SEND %d of producer %d, and waited for %d", b.conn, n, send.GetProducerId(), h.next)
	}
	if w.p.sh.aging.on && !w.amid {
		w.t.Fatalf("%s got SEND %d, and the map is too old", b.conn, send.GetSequenceId())
	}
	if w.done[h.base] && w.p.sh.mappedCluster(h.base) == b.cluster {
		w.t.Fatalf("%s got SEND %d of %s after the fence was done", b.conn, send.GetSequenceId(), h.base)
	}
	h.next = send.GetSequenceId() + 1
	h.unanswered++
	b.will(h, func() { h.unanswered-- }, `send_receipt{producer_id:%d sequence_id:%d}`, send.GetProducerId(), send.GetSequenceId())
}

func (w *fenceWorld) make(b *fenceBroker, id, topic string, req uint64) {
	parsed, err := route.ParseTopic(topic)
	if err != nil {
		w.t.Fatal(err)
	}
	d := w.p.table.Decide(parsed, "a")
	if id[0] == 'c' {
		var wait bool
		if d.Cluster, wait = d.Home("s"); wait && !w.amid {
			w.t.Fatalf("%s of %s reached cluster %s, and its subscription is between two", id, topic, b.cluster)
		}
	}
	if !w.amid && (d.Cluster != b.cluster || d.State == route.StateFenced || d.State == route.StatePrepared && w.p.noLease) {
		w.t.Fatalf("%s of %s reached cluster %s, and the map says %+v, lease %v", id, topic, b.cluster, d, !w.p.noLease)
	}
	if id[0] == 'p' && w.p.tooOld && !w.amid {
		w.t.Fatalf("%s of %s reached cluster %s, and the map is too old", id, topic, b.cluster)
	}
	h := b.has[id]
	if h != nil && !h.answered {
		b.will(nil, nil, `error{request_id:%d error:6 message:"already present on the connection"}`, req)
		return
	}
	if h == nil {
		w.serial++
		h = &fenceHandle{base: parsed.Base(), producer: id[0] == 'p', serial: w.serial}
		b.has[id] = h
	}
	b.will(h, func() { h.answered = true }, "%s", createdAnswer(id, req))
}

// gone is what a broker does about a CLOSE: it comes behind the receipts of earlier SENDs; a creation that it ends is never answered.
func (w *fenceWorld) gone(b *fenceBroker, id string, req uint64) {
	h := b.has[id]
	if h == nil {
		b.will(nil, nil, `error{request_id:%d error:0 message:"not registered"}`, req)
		return
	}
	delete(b.has, id)
	if !h.answered {
		b.answers = slices.DeleteFunc(b.answers, func(a fenceAnswer) bool { return a.of == h && !strings.Contains(a.text, "receipt") })
	}
	b.closing = append(b.closing, h)
	b.will(h, func() { b.closing = slices.DeleteFunc(b.closing, func(o *fenceHandle) bool { return o == h }) }, "success{request_id:%d}", req)
}

func (w *fenceWorld) toClient(client string, t codec.Type, cmd *pulsarpb.BaseCommand) {
	switch {
	case cmd.Message != nil:
		ledger, entry := cmd.Message.GetMessageId().GetLedgerId()&(1<<codec.EpochShift-1), cmd.Message.GetMessageId().GetEntryId()
		gone := w.ended[fmt.Sprint(client, " consumer ", cmd.Message.GetConsumerId())]
		if last, ok := w.seen[ledger]; !gone && (ok && entry != last+1 || !ok && entry != 1) {
			w.t.Fatalf("%s got message %d of consumer %d, and has seen %d", client, entry, cmd.Message.GetConsumerId(), last)
		}
		w.seen[ledger] = entry
		return
	case cmd.LookupTopicResponse.GetResponse() == codec.LookupConnect:
		w.located(client, cmd.LookupTopicResponse.GetRequestId(), map[bool]string{true: "a", false: "b"}[strings.Contains(cmd.LookupTopicResponse.GetBrokerServiceUrl(), ".a.")])
	case cmd.PartitionMetadataResponse.GetPartitions() > 0:
		w.located(client, cmd.PartitionMetadataResponse.GetRequestId(), map[uint32]string{1: "a", 2: "b"}[cmd.PartitionMetadataResponse.GetPartitions()])
	}
	req, ok := answeredRequest(cmd)
	if !ok || w.requests[client] == nil {
		return
	}
	r := w.requests[client][req]
	if r == nil {
		w.t.Fatalf("%s got an answer (%s) to request %d, which it does not wait for", client, t, req)
	}
	delete(w.requests[client], req)
}

// located checks where a lookup led.
func (w *fenceWorld) located(client string, req uint64, cluster string) {
	d := w.p.sh.decide(w.requests[client][req].id)
	if !w.amid && (d.Cluster != cluster || d.State == route.StateFenced) {
		w.t.Fatalf("a lookup of %s leads to cluster %s, and the map says %+v", w.requests[client][req].id, cluster, d)
	}
}

func answeredRequest(cmd *pulsarpb.BaseCommand) (uint64, bool) {
	switch {
	case cmd.Success != nil:
		return cmd.Success.GetRequestId(), true
	case cmd.ProducerSuccess != nil:
		return cmd.ProducerSuccess.GetRequestId(), true
	case cmd.Error != nil:
		return cmd.Error.GetRequestId(), cmd.Error.GetRequestId() != codec.NoRequest
	case cmd.AckResponse != nil:
		return cmd.AckResponse.GetRequestId(), true
	case cmd.GetLastMessageIdResponse != nil:
		return cmd.GetLastMessageIdResponse.GetRequestId(), true
	case cmd.LookupTopicResponse != nil:
		return cmd.LookupTopicResponse.GetRequestId(), true
	case cmd.PartitionMetadataResponse != nil:
		return cmd.PartitionMetadataResponse.GetRequestId(), true
	}
	return 0, false
}
