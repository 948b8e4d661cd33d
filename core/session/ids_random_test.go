package session

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// SW-02, SW-03: whatever clients say under ids of whatever cluster, while the topic moves to and fro:
//   - no broker gets an id that it has not told, the sentinels apart;
//   - no id means two messages to a client, and those of a later epoch are larger, a translated one apart;
//   - a message that was delivered to a live consumer reaches its client, or the client had acknowledged it, its original or a copy;
//   - every request is answered once.
func TestMessageIDsAreNeverMisread(t *testing.T) { rapid.Check(t, idConversation) }

// original is a message, as the cluster that it was published on has it.
type original struct {
	cluster string
	at      Position
}

type idWorld struct {
	t       *rapid.T
	p       *player
	cluster string
	epoch   uint64
	entry   uint64
	req     uint64

	live    map[string]bool                // "c1 3": a consumer of the cluster that has the topic
	has     map[string]bool                // "d1 3": a consumer that its broker has
	told    map[string]map[Position]bool   // cluster → ids that it has told, or that a translation gave
	from    map[original]original          // copy → original
	means   map[Position]original          // what clients were shown → which message
	shown   []Position                     // all of that
	acked   map[string]map[original]bool   // subscription → messages that clients acknowledged
	upTo    map[string]map[string]Position // subscription → cluster → everything before it
	answers map[string]int                 // "c1 7" → answers
	asked   map[string]bool
	got     []Position // what reached a client in this step
	answer  []string   // of brokers, to be given next
}

func subscriptionOf(id int) string { return fmt.Sprint("s", id) }

const wanderingTopic = "persistent://public/default/t1"

func idConversation(t *rapid.T) {
	w := &idWorld{
		t: t, p: newPlayer(quietTB{}, false), cluster: "a", live: map[string]bool{}, has: map[string]bool{},
		told: map[string]map[Position]bool{"a": {}, "b": {}}, from: map[original]original{}, means: map[Position]original{}, acked: map[string]map[original]bool{},
		upTo: map[string]map[string]Position{}, answers: map[string]int{}, asked: map[string]bool{},
	}
	w.p.onFrame = w.take
	w.step("rule public/default a")
	for i, cluster := range []string{"a", "b"} {
		client, leg := fmt.Sprint("c", i+1), fmt.Sprint("d", i+1)
		w.step("client " + client)
		w.step(fmt.Sprintf(`%s> connect{client_version:"x" protocol_version:21 proxy_to_broker_url:"TAG(%s,broker-0:6650)"}`, client, cluster))
		w.step(leg + " up")
		w.step(leg + `> connected{server_version:"x" protocol_version:21}`)
	}
	t.Repeat(map[string]func(*rapid.T){
		"subscribe": w.subscribe, "deliver": w.deliver, "ack": w.ack, "seek": w.seek, "translated": w.translated, "move": w.move,
		"close": func(t *rapid.T) { w.closeOne(t) },
		"time":  func(t *rapid.T) { w.tick(rapid.SampledFrom([]int{100, 2000, 6000, 31000}).Draw(t, "ms")) },
	})
	w.tick(6000)
	for req := range w.asked {
		if w.answers[req] != 1 {
			t.Fatalf("request %s got %d answers", req, w.answers[req])
		}
	}
	if n := len(w.p.sh.translations.list); n > 0 || w.p.sh.translations.bytes != 0 {
		t.Fatalf("%d translations wait, of %d bytes", n, w.p.sh.translations.bytes)
	}
	w.tick(200_000)
	for _, c := range w.p.sh.carrying.subs {
		if len(c.acks) > 0 {
			t.Fatal("acknowledgements are remembered for ever")
		}
	}
	if n := w.p.sh.carrying.count; n != 0 {
		t.Fatalf("%d positions are counted, none is remembered", n)
	}
}

// step plays a line, and then what the brokers answer.
func (w *idWorld) step(line string) {
	for lines := []string{line}; len(lines) > 0; lines = lines[1:] {
		if err := w.p.step(lines[0]); err != nil {
			w.t.Fatalf("%s: %v", lines[0], err)
		}
		lines = append(lines, w.answer...)
		w.answer = nil
	}
}

func (w *idWorld) tick(ms int) {
	for ; ms > 0; ms -= 5000 {
		w.step(fmt.Sprintf("tick %dms", min(ms, 5000)))
		w.step("c1> pong{} ; pong{}")
		w.step("c2> pong{}")
		w.step("d1> pong{}")
		w.step("d2> pong{}")
	}
}

func (w *idWorld) sides() (client, leg string) {
	if w.cluster == "a" {
		return "c1", "d1"
	}
	return "c2", "d2"
}

func (w *idWorld) ask(client string) uint64 {
	w.req++
	w.asked[fmt.Sprint(client, " ", w.req)] = true
	return w.req
}

// anID is one that a client may come with.
func (w *idWorld) anID(t *rapid.T) (Position, string) {
	at := Position{math.MaxUint64, math.MaxUint64}
	if len(w.shown) > 0 && rapid.IntRange(0, 5).Draw(t, "known") > 0 {
		at = rapid.SampledFrom(w.shown).Draw(t, "which")
	}
	return at, fmt.Sprintf("{ledger_id:%d entry_id:%d}", at.Ledger, at.Entry)
}

func (w *idWorld) subscribe(t *rapid.T) {
	client, _ := w.sides()
	id := rapid.IntRange(1, 3).Draw(t, "id")
	if key := fmt.Sprint(client, " ", id); w.live[key] {
		return
	}
	start := ""
	if rapid.Bool().Draw(t, "reader") {
		_, text := w.anID(t)
		start = " durable:false start_message_id" + text
		w.forget(id)
	}
	w.step(fmt.Sprintf(`%s> subscribe{topic:"t1" subscription:%q sub_type:0 consumer_id:%d request_id:%d%s}`, client, subscriptionOf(id), id, w.ask(client), start))
}

// forget: somebody moved the subscription, so everything may come again.
func (w *idWorld) forget(id int) {
	delete(w.acked, subscriptionOf(id))
	delete(w.upTo, subscriptionOf(id))
}

func (w *idWorld) liveOne(t *rapid.T) (client, leg string, id int, ok bool) {
	client, leg = w.sides()
	id = rapid.IntRange(1, 3).Draw(t, "id")
	return client, leg, id, w.live[fmt.Sprint(client, " ", id)]
}

func (w *idWorld) deliver(t *rapid.T) {
	_, leg, id, ok := w.liveOne(t)
	if !ok {
		return
	}
	other := "a"
	if w.cluster == "a" {
		other = "b"
	}
	inOrder := func(cluster string) []Position {
		return slices.SortedFunc(maps.Keys(w.told[cluster]), func(a, b Position) int { return int(a.Entry) - int(b.Entry) })
	}
	w.entry++
	at := Position{map[string]uint64{"a": 900, "b": 4}[w.cluster], w.entry}
	msg := original{w.cluster, at}
	if before := inOrder(w.cluster); len(before) > 0 && rapid.IntRange(0, 2).Draw(t, "again") == 0 {
		msg.at = rapid.SampledFrom(before).Draw(t, "which")
		at = msg.at
	} else if first := inOrder(other); len(first) > 0 && rapid.Bool().Draw(t, "copy") {
		w.from[msg] = original{other, rapid.SampledFrom(first).Draw(t, "of")}
	}
	src := ""
	if _, known := w.from[msg]; !known {
		w.from[msg] = msg
	}
	if o := w.from[msg]; o != msg {
		src = fmt.Sprintf(" FROM(%s,%d:%d,1)", other, o.at.Ledger, o.at.Entry)
	}
	w.told[w.cluster][at] = true
	w.got = nil
	w.step(fmt.Sprintf("%s> message{consumer_id:%d message_id{ledger_id:%d entry_id:%d}}%s +20", leg, id, at.Ledger, at.Entry, src))
	sub := subscriptionOf(id)
	if len(w.got) == 0 {
		o := w.from[msg]
		if !w.acked[sub][o] && !o.at.less(w.upTo[sub][o.cluster]) && !w.acked[sub][msg] && !msg.at.less(w.upTo[sub][msg.cluster]) {
			t.Fatalf("%v, the copy of %v, was kept from %s, whose client has not acknowledged it", msg, o, sub)
		}
		return
	}
	if ledger := w.got[0].Ledger; ledger>>codec.EpochShift != w.epoch && w.means[w.got[0]] == msg {
		t.Fatalf("%v of epoch %d is shown as ledger %d", at, w.epoch, ledger)
	}
}

func (w *idWorld) ack(t *rapid.T) {
	client, _, id, ok := w.liveOne(t)
	if !ok {
		client = rapid.SampledFrom([]string{"c1", "c2"}).Draw(t, "client") // perhaps one that was closed
	}
	kind, ids := rapid.IntRange(0, 1).Draw(t, "type"), ""
	n := 1
	if kind == 0 {
		n = rapid.IntRange(1, 3).Draw(t, "n")
	}
	sub := subscriptionOf(id)
	for range n {
		at, text := w.anID(t)
		o, known := w.means[at]
		if !known {
			continue
		}
		if rapid.IntRange(0, 4).Draw(t, "partial") == 0 {
			ids += " message_id" + strings.TrimSuffix(text, "}") + " ack_set:5}"
			if kind == 1 {
				w.cumulative(sub, o.cluster, o.at)
			}
			continue
		}
		ids += " message_id" + text
		if kind == 1 {
			w.cumulative(sub, o.cluster, Position{o.at.Ledger, o.at.Entry + 1})
			continue
		}
		if w.acked[sub] == nil {
			w.acked[sub] = map[original]bool{}
		}
		w.acked[sub][o], w.acked[sub][w.from[o]] = true, true
	}
	if ids == "" {
		return
	}
	req := ""
	if ok && rapid.Bool().Draw(t, "receipt") {
		req = fmt.Sprintf(" request_id:%d", w.ask(client))
	}
	w.step(fmt.Sprintf("%s> ack{consumer_id:%d ack_type:%d%s%s}", client, id, kind, ids, req))
	if kind == 0 && rapid.Bool().Draw(t, "redeliver") {
		w.step(fmt.Sprintf("%s> redeliver_unacknowledged_messages{consumer_id:%d%s}", client, id, strings.ReplaceAll(ids, "message_id{", "message_ids{")))
	}
}

// cumulative notes that a client has acknowledged everything before a place, and so the originals of the copies there.
func (w *idWorld) cumulative(sub, cluster string, before Position) {
	for copied, o := range w.from {
		if copied.cluster == cluster && copied.at.less(before) && copied != o {
			w.upToOf(sub, o.cluster, Position{o.at.Ledger, o.at.Entry + 1})
		}
	}
	w.upToOf(sub, cluster, before)
}

func (w *idWorld) upToOf(sub, cluster string, before Position) {
	if w.upTo[sub] == nil {
		w.upTo[sub] = map[string]Position{}
	}
	if w.upTo[sub][cluster].less(before) {
		w.upTo[sub][cluster] = before
	}
}

func (w *idWorld) seek(t *rapid.T) {
	client, _, id, ok := w.liveOne(t)
	if !ok {
		return
	}
	_, text := w.anID(t)
	w.forget(id)
	w.step(fmt.Sprintf("%s> seek{consumer_id:%d request_id:%d message_id%s}", client, id, w.ask(client), text))
}

func (w *idWorld) translated(t *rapid.T) {
	list := w.p.sh.translations.list
	if len(list) == 0 {
		return
	}
	tr := list[rapid.SampledFrom(slices.Sorted(maps.Keys(list))).Draw(t, "translation")]
	kind := rapid.SampledFrom([]string{"copy", "next", "failed", "busy", "unknown"}).Draw(t, "kind")
	if kind != "copy" && kind != "next" {
		w.step(fmt.Sprintf("translated %d %s why", tr.id, kind))
		return
	}
	w.entry++
	at := Position{map[string]uint64{"a": 900, "b": 4}[tr.h.leg.cluster], w.entry}
	w.told[tr.h.leg.cluster][at] = true
	w.step(fmt.Sprintf("translated %d %s %d:%d", tr.id, kind, at.Ledger, at.Entry))
}

func (w *idWorld) move(*rapid.T) {
	if w.cluster == "a" {
		w.cluster = "b"
	} else {
		w.cluster = "a"
	}
	w.epoch++
	w.step("map " + wanderingTopic + " " + w.cluster)
	w.step("evict " + wanderingTopic)
	for range 5 {
		w.step("tick 100ms")
	}
	clear(w.live)
}

func (w *idWorld) closeOne(t *rapid.T) {
	client, _, id, ok := w.liveOne(t)
	if ok {
		w.step(fmt.Sprintf("%s> close_consumer{consumer_id:%d request_id:%d}", client, id, w.ask(client)))
		delete(w.live, fmt.Sprint(client, " ", id))
	}
}

// take looks at every frame that is written; the brokers answer at once.
func (w *idWorld) take(to string, frame []byte) {
	h, ok, err := codec.ParseHead(frame, codec.DefaultMaxFrame)
	if !ok {
		w.t.Fatalf("%s got what is no frame: %v", to, err)
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		w.t.Fatal(err)
	}
	if to[0] == 'c' {
		w.takeClient(to, &cmd)
	} else {
		w.takeBroker(to, &cmd)
	}
}

func (w *idWorld) takeClient(client string, cmd *pulsarpb.BaseCommand) {
	var req uint64
	switch {
	case cmd.Message != nil:
		w.delivered(client, cmd.Message)
		return
	case cmd.Success != nil:
		req = cmd.Success.GetRequestId()
	case cmd.Error != nil:
		req = cmd.Error.GetRequestId()
	case cmd.AckResponse != nil:
		req = cmd.AckResponse.GetRequestId()
	default:
		return
	}
	w.answers[fmt.Sprint(client, " ", req)]++
}

func (w *idWorld) delivered(client string, m *pulsarpb.CommandMessage) {
	at := Position{m.GetMessageId().GetLedgerId(), m.GetMessageId().GetEntryId()}
	w.got = append(w.got, at)
	real := original{w.cluster, Position{at.Ledger & (1<<codec.EpochShift - 1), at.Entry}}
	if at.Ledger>>codec.EpochShift != w.epoch {
		c := w.p.endpoints[client].(*Session).consumers[m.GetConsumerId()].carried
		if c == nil || c.shown != at {
			w.t.Fatalf("%v is shown at epoch %d, and no translation says so", at, w.epoch)
		}
		return // the copy of the message that the client knows by this id
	}
	if was, known := w.means[at]; known && was != w.from[real] && was != real {
		w.t.Fatalf("%v is the id of %v and of %v", at, was, real)
	}
	w.means[at] = real
	w.shown = append(w.shown, at)
}

func (w *idWorld) takeBroker(leg string, cmd *pulsarpb.BaseCommand) {
	cluster := map[string]string{"d1": "a", "d2": "b"}[leg]
	client := "c" + leg[1:]
	for _, of := range []uint64{cmd.GetAck().GetConsumerId(), cmd.GetRedeliverUnacknowledgedMessages().GetConsumerId(), cmd.GetSeek().GetConsumerId()} {
		if of != 0 && !w.has[fmt.Sprint(leg, " ", of)] {
			return // about none that it has
		}
	}
	for _, id := range slices.Concat(cmd.GetAck().GetMessageId(), cmd.GetRedeliverUnacknowledgedMessages().GetMessageIds(),
		[]*pulsarpb.MessageIdData{cmd.GetSubscribe().GetStartMessageId(), cmd.GetSeek().GetMessageId()}) {
		if at := (Position{id.GetLedgerId(), id.GetEntryId()}); id != nil && at.Ledger != math.MaxUint64 && !w.told[cluster][at] {
			w.t.Fatalf("the broker of cluster %s got %v, which is none of its ids, in %s", cluster, at, codec.Type(cmd.GetType()))
		}
	}
	if cmd.RedeliverUnacknowledgedMessages != nil && len(cmd.RedeliverUnacknowledgedMessages.MessageIds) == 0 {
		w.t.Fatal("a REDELIVER of some messages became one of all")
	}
	var answer string
	switch {
	case cmd.Subscribe != nil:
		if cluster != w.cluster {
			w.t.Fatalf("SUBSCRIBE reached cluster %s, the topic is in %s", cluster, w.cluster)
		}
		w.live[fmt.Sprint(client, " ", cmd.Subscribe.GetConsumerId())] = true
		w.has[fmt.Sprint(leg, " ", cmd.Subscribe.GetConsumerId())] = true
		answer = fmt.Sprintf("success{request_id:%d}", cmd.Subscribe.GetRequestId())
	case cmd.Seek != nil:
		answer = fmt.Sprintf("success{request_id:%d}", cmd.Seek.GetRequestId())
	case cmd.CloseConsumer != nil:
		delete(w.has, fmt.Sprint(leg, " ", cmd.CloseConsumer.GetConsumerId()))
		answer = fmt.Sprintf("success{request_id:%d}", cmd.CloseConsumer.GetRequestId())
	case cmd.Ack != nil && cmd.Ack.RequestId != nil:
		answer = fmt.Sprintf("ack_response{consumer_id:%d request_id:%d}", cmd.Ack.GetConsumerId(), cmd.Ack.GetRequestId())
	default:
		return
	}
	w.answer = append(w.answer, leg+"> "+answer)
}
