package pulsaradmin

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/testkit"
	"pointsman/internal/tlstest"
)

const wireTopic = "persistent://acme/geo/wire"

// broker is a fake cluster with ten messages, and a client whose lookups name its broker.
func broker(t *testing.T, opts testkit.Options, cfg Config) (*testkit.Cluster, *Client) {
	t.Helper()
	k := testkit.NewCluster("b", opts)
	t.Cleanup(k.Close)
	k.CreateTopic(wireTopic, 0)
	for i := range 10 {
		k.Publish(wireTopic, "p", uint64(i), []byte("x"))
	}
	field := "brokerUrl"
	if cfg.BinaryTLS {
		field = "brokerUrlTls"
	}
	cfg.Cluster = "b"
	cfg.WebURLs = []string{serve(t, map[string]string{
		"GET /lookup/v2/topic/persistent/acme/geo/wire": fmt.Sprintf(`{"%s":"%s"}`, field, k.Broker(0).URL()),
	}).URL}
	c := New(cfg)
	c.messageWait = CallTimeout
	t.Cleanup(c.Close)
	return k, c
}

func connected(t *testing.T, c *Client) *wire {
	t.Helper()
	w := ok[*wire](t)(c.open(t.Context(), wireTopic))
	t.Cleanup(w.close)
	return w
}

func place(m testkit.Message) Position {
	return Position{int64(m.Ledger), int64(m.Entry)}
}

func TestSingleMessagesAreAcknowledgedWithoutBeingDelivered(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	w := connected(t, c)
	all := k.Messages(wireTopic)
	for _, kind := range []string{"Exclusive", "Shared", "Failover", "Key_Shared"} {
		if err := w.ack(t.Context(), "sub-"+kind, kind, []Position{place(all[3]), place(all[4]), place(all[8])}); err != nil {
			t.Fatal(err)
		}
	}
	if n := k.Count(codec.TypeFlow); n != 0 {
		t.Errorf("%d FLOWs: a consumer that asks for messages takes them from others", n)
	}
	acks := k.Commands(codec.TypeAck)
	if len(acks) != 4 || len(acks[0].Cmd.Ack.GetMessageId()) != 3 || acks[0].Cmd.Ack.GetAckType() != 0 {
		t.Errorf("acks %v, want one for each subscription, of three single messages", acks)
	}
	info, _ := k.Topic(wireTopic)
	if len(info.Subscriptions) != 4 {
		t.Errorf("subscriptions %v, want four that outlive their consumers", info.Subscriptions)
	}
}

func TestManyAcknowledgementsGoInSeveralCommands(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	all := slices.Repeat([]Position{place(k.Messages(wireTopic)[2])}, 2*acksPerCommand+1)
	if err := connected(t, c).ack(t.Context(), "s", "Shared", all); err != nil {
		t.Fatal(err)
	}
	if acks := k.Commands(codec.TypeAck); len(acks) != 3 || len(acks[2].Cmd.Ack.GetMessageId()) != 1 {
		t.Errorf("%d commands, want 3", len(acks))
	}
}

func TestMessagesAreReadFromAPositionOn(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	w := connected(t, c)
	all := k.Messages(wireTopic)
	for _, first := range []int{1, 4, 9} { // one after the other on the same connection
		var got []int64
		err := w.scan(t.Context(), place(all[first]), func(e Entry) bool {
			got = append(got, e.Sequence)
			return e.Sequence == 9
		})
		want := []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}[first:]
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("from %d on: %v, %v; want %v", first, got, err, want)
		}
	}
	if info, _ := k.Topic(wireTopic); len(info.Subscriptions) != 0 { // CLOSE_CONSUMER was answered
		t.Errorf("subscriptions %v are left behind", info.Subscriptions)
	}
}

// A broker may have more messages than permits.
func TestReadingAsksForMoreInTime(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	for i := range 3 * permits {
		k.Publish(wireTopic, "p", uint64(10+i), nil)
	}
	n := 0
	if err := connected(t, c).scan(t.Context(), place(k.Messages(wireTopic)[1]), func(Entry) bool { n++; return n == 3*permits+9 }); err != nil {
		t.Error(err)
	}
}

func TestCredentialsTravelByTheBinaryProtocolAndStayOutOfErrors(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{Token: func() (string, error) { return "s3cret", nil }})
	connected(t, c)
	if got := k.Commands(codec.TypeConnect)[0].Cmd.Connect; got.GetAuthMethodName() != "token" || string(got.GetAuthData()) != "s3cret" || got.GetProxyToBrokerUrl() != "" {
		t.Errorf("CONNECT %v", got)
	}
	k.Handle(codec.TypeConnect, testkit.Refuse(codec.ErrorAuthentication, "no"))
	_, err := c.open(t.Context(), wireTopic)
	if err == nil || !strings.Contains(err.Error(), "error 3: no; give clusters.b.controller_token_file a token that cluster b accepts") || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("error %v, want the remedy and not the token", err)
	}
}

func TestAConsumerInTheWayIsNamedAsTheCause(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	k.Handle(codec.TypeSubscribe, testkit.Refuse(codec.ErrorConsumerBusy, "Exclusive consumer is already connected"))
	err := connected(t, c).ack(t.Context(), "s", "Exclusive", nil)
	if err == nil || !strings.Contains(err.Error(), "acknowledge for subscription s at broker ") || !strings.Contains(err.Error(), "somebody is connected to the subscription already") {
		t.Errorf("error %v", err)
	}
}

// PING and AUTH_CHALLENGE may come at any time.
func TestCommandsOfTheConnectionAreAnsweredInBetween(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{Token: func() (string, error) { return "fresh", nil }})
	k.Handle(codec.TypeSubscribe, func(conn *testkit.Conn, _ *pulsarpb.BaseCommand) bool {
		conn.Send(&pulsarpb.BaseCommand{Type: number(codec.TypePing), Ping: &pulsarpb.CommandPing{}})
		conn.Send(&pulsarpb.BaseCommand{Type: number(codec.TypeAuthChallenge), AuthChallenge: &pulsarpb.CommandAuthChallenge{}})
		return false
	})
	if err := connected(t, c).ack(t.Context(), "s", "Shared", nil); err != nil {
		t.Fatal(err)
	}
	answers := k.Commands(codec.TypePong, codec.TypeAuthResponse)
	if len(answers) != 2 || string(answers[1].Cmd.AuthResponse.GetResponse().GetAuthData()) != "fresh" {
		t.Errorf("answers %v, want PONG and the token as it is now", answers)
	}
}

func number(t codec.Type) *int32 { n := int32(t); return &n }

func TestBrokersAreVerifiedByTLS(t *testing.T) {
	ca := ok[*tlstest.CA](t)(tlstest.NewCA("test"))
	cert := ok[tls.Certificate](t)(ca.Issue("127.0.0.1"))
	server := &tls.Config{Certificates: []tls.Certificate{cert}}
	_, c := broker(t, testkit.Options{TLS: server}, Config{BinaryTLS: true, TLS: &tls.Config{RootCAs: ca.Pool()}})
	connected(t, c)
	_, c = broker(t, testkit.Options{TLS: server}, Config{BinaryTLS: true, TLS: &tls.Config{RootCAs: ca.Pool()}, ServerName: "elsewhere"})
	if _, err := c.open(t.Context(), wireTopic); err == nil || !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("error %v, want a certificate that is not for elsewhere", err)
	}
}

// A reader whose consumer is refused reads entry by entry instead.
func TestBlocksAreReadByAdminCallsWhenReadingAsAConsumerFails(t *testing.T) {
	k, _ := broker(t, testkit.Options{}, Config{})
	k.Handle(codec.TypeSubscribe, testkit.Refuse(codec.ErrorAuthorization, "no"))
	asked := 0
	web := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/lookup") {
			_, _ = fmt.Fprintf(w, `{"brokerUrl":"%s"}`, k.Broker(0).URL())
			return
		}
		asked++
		w.Header().Set("X-Pulsar-publish-time", "2026-11-29T20:31:29.613Z")
	})
	c := New(Config{Cluster: "b", WebURLs: []string{web}})
	defer c.Close()
	r := &remote{Client: c, topic: wireTopic}
	defer r.Close()
	for range 2 {
		if all, err := r.Block(t.Context(), pos("7:3"), pos("7:3"), pos("7:9")); err != nil || len(all) != 1 || all[0].Position != pos("7:3") {
			t.Errorf("block %v, %v", all, err)
		}
	}
	if n := k.Count(codec.TypeSubscribe); n != 1 || asked != 2 {
		t.Errorf("%d attempts as a consumer and %d calls, want 1 and 2", n, asked)
	}
}

// A broker that was too busy once, or moved the topic, is read as a consumer again: at once, and the next time.
func TestABlockIsReadAsAConsumerAgainAfterATrouble(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	var troubles atomic.Int32
	troubles.Store(1)
	k.Handle(codec.TypeSubscribe, func(c *testkit.Conn, cmd *pulsarpb.BaseCommand) bool {
		if troubles.Add(-1) >= 0 {
			return testkit.HangUp(c, cmd)
		}
		return false
	})
	r := &remote{Client: c, topic: wireTopic}
	defer r.Close()
	all := k.Messages(wireTopic)
	for range 2 { // an admin call would fail: the cluster has none for entries
		got, err := r.Block(t.Context(), place(all[2]), place(all[4]), place(all[9]))
		if err != nil || len(got) != 3 {
			t.Errorf("block %v, %v; want three entries", got, err)
		}
		troubles.Store(1)
	}
	troubles.Store(scans)
	if _, err := r.Block(t.Context(), place(all[2]), place(all[4]), place(all[9])); err == nil || r.plain {
		t.Errorf("after %d troubles: %v, given up for good: %v; want what the admin call said, and another try the next time", scans, err, r.plain)
	}
}

// Properties may be larger than the head of an HTTP answer: the broker answers 500, and the consumer's way is left.
func TestAnEntryThatTheAdminAPICannotShowIsReadAsAConsumer(t *testing.T) {
	k, _ := broker(t, testkit.Options{}, Config{})
	c := New(Config{Cluster: "b", WebURLs: []string{serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/lookup") {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		_, _ = fmt.Fprintf(w, `{"brokerUrl":"%s"}`, k.Broker(0).URL())
	})}})
	defer c.Close()
	r := &remote{Client: c, topic: wireTopic}
	defer r.Close()
	want := place(k.Messages(wireTopic)[6])
	if e := ok[Entry](t)(r.Entry(t.Context(), want)); e.Position != want || e.Sequence != 6 {
		t.Errorf("entry %+v, want the seventh", e)
	}
	k.Handle(codec.TypeSubscribe, testkit.Refuse(codec.ErrorAuthorization, "no"))
	if _, err := r.Entry(t.Context(), want); err == nil || !strings.Contains(err.Error(), "status 500") {
		t.Errorf("error %v, want what the admin API said", err)
	}
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	k, c := broker(t, testkit.Options{}, Config{})
	w := connected(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	k.Handle(codec.TypeSubscribe, func(*testkit.Conn, *pulsarpb.BaseCommand) bool { cancel(); return true })
	began := time.Now()
	if err := w.ack(ctx, "s", "Shared", nil); err == nil || time.Since(began) > CallTimeout/2 {
		t.Errorf("error %v after %v, want one as soon as the context ended", err, time.Since(began))
	}
}

// The head of an entry as a real broker sends it, of this and of an older form.
func TestEntriesAreReadFromRecordedHeaders(t *testing.T) {
	header := func(pairs ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			h.Set(pairs[i], pairs[i+1])
		}
		return h
	}
	want := Entry{Position: pos("6:36"), Time: 1795984289617, Producer: "pp", Sequence: 360, Messages: 10, From: "a", Source: pos("7:36")}
	common := []string{
		"X-Pulsar-Message-ID", "6:36", "X-Pulsar-publish-time", "2026-11-29T20:31:29.617Z", "X-Pulsar-num-batch-message", "10", "X-Pulsar-batch-size", "180",
		"X-Pulsar-producer-name", "pp", "X-Pulsar-sequence-id", "360", "X-Pulsar-replicated-from", "a", "X-Pulsar-txn-uncommitted", "false",
	}
	for _, form := range [][]string{
		{"X-Pulsar-PROPERTY", `{"__MSG_PROP_REPL_SOURCE_POSITION":"7:36","x":"y"}`},
		{"X-Pulsar-PROPERTY-__MSG_PROP_REPL_SOURCE_POSITION", "7:36"},
	} {
		if got := ok[Entry](t)(headerEntry(pos("6:36"), header(append(form, common...)...))); got != want {
			t.Errorf("entry %+v, want %+v", got, want)
		}
	}
	bare := ok[Entry](t)(headerEntry(pos("6:36"), header(common...)))
	if want.Source = NoPosition; bare != want || !bare.deliverable() {
		t.Errorf("without the property: %+v", bare)
	}
	marker := ok[Entry](t)(headerEntry(pos("7:100"), header("X-Pulsar-publish-time", "2026-11-29T20:31:30.583Z", "X-Pulsar-producer-name", "pulsar.marker", "X-Pulsar-marker-type", "10")))
	if marker.deliverable() || marker.Messages != 1 || marker.Source != NoPosition {
		t.Errorf("marker %+v", marker)
	}
	if _, err := headerEntry(pos("6:36"), header("X-Pulsar-producer-name", "pp")); err == nil {
		t.Error("an answer without a time of publishing was taken for an entry")
	}
	if _, err := headerEntry(pos("6:36"), header(append([]string{"X-Pulsar-PROPERTY", `{"__MSG_PROP_REPL_SOURCE_POSITION":"x"}`}, common...)...)); err == nil {
		t.Error("a source position that is none was taken")
	}
}

// What the binary protocol says of an entry; cut anywhere, it is refused or says less, and never panics.
func TestEntriesAreReadFromMessages(t *testing.T) {
	var m []byte
	text := func(field protowire.Number, s string) {
		m = protowire.AppendBytes(protowire.AppendTag(m, field, protowire.BytesType), []byte(s))
	}
	number := func(field protowire.Number, n uint64) {
		m = protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), n)
	}
	text(1, "pp")
	number(2, 360)
	number(3, 1795984289617)
	text(4, "\x0a\x1f__MSG_PROP_REPL_SOURCE_POSITION\x12\x047:36")
	text(4, "\x0a\x01k\x12\x01v")
	text(5, "a")
	number(11, 10)
	number(29, 2)
	m = protowire.AppendFixed64(protowire.AppendTag(m, 99, protowire.Fixed64Type), 1) // of a later version
	sized := func(part []byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(part))), part...)
	}
	plain := append(sized(m), "payload"...)
	checked := slices.Concat([]byte{0x0e, 0x01, 1, 2, 3, 4}, plain)
	broker := slices.Concat([]byte{0x0e, 0x02}, sized([]byte("whatever")), checked)
	want := Entry{Position: pos("6:36"), Time: 1795984289617, Producer: "pp", Sequence: 360, Chunk: 2, Messages: 10, From: "a", Source: pos("7:36"), Bytes: len("payload")}
	for _, src := range [][]byte{plain, checked, broker} {
		if got := ok[Entry](t)(messageEntry(pos("6:36"), src)); !reflect.DeepEqual(got, want) {
			t.Errorf("entry %+v, want %+v", got, want)
		}
		for cut := range len(src) - len("payload") {
			if got, err := messageEntry(pos("6:36"), src[:cut]); err == nil {
				t.Errorf("cut after %d of %d bytes: %+v", cut, len(src), got)
			}
		}
	}
}
