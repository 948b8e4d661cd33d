package testkit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// raw is a client that speaks in frames.
type raw struct {
	*testing.T
	nc net.Conn
	r  *bufio.Reader
}

const patience = time.Minute

func start(t *testing.T, opts Options) *Cluster {
	t.Helper()
	c := NewCluster("a", opts)
	t.Cleanup(c.Close)
	return c
}

func dial(t *testing.T, b *Broker) *raw {
	t.Helper()
	nc, err := net.Dial("tcp", b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	return &raw{T: t, nc: nc, r: bufio.NewReader(nc)}
}

// connect dials and says CONNECT.
func connect(t *testing.T, b *Broker) *raw {
	t.Helper()
	c := dial(t, b)
	c.send(connectCommand())
	if got := c.read().GetConnected(); got.GetProtocolVersion() != codec.ProtocolVersion {
		t.Fatalf("CONNECTED %v", got)
	}
	return c
}

func connectCommand() *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeConnect), Connect: &pulsarpb.CommandConnect{
		ClientVersion: ptr("raw"), ProtocolVersion: ptr(int32(codec.ProtocolVersion))}}
}

func (c *raw) send(cmd *pulsarpb.BaseCommand) {
	c.Helper()
	c.write(codec.AppendCommand(nil, cmd))
}

func (c *raw) write(src []byte) {
	c.Helper()
	if _, err := c.nc.Write(src); err != nil {
		c.Fatal(err)
	}
}

func (c *raw) frame() (*pulsarpb.BaseCommand, []byte, error) {
	c.nc.SetReadDeadline(time.Now().Add(patience))
	src, err := readFrame(c.r, codec.DefaultMaxFrame)
	if err != nil {
		return nil, nil, err
	}
	h, _, err := codec.ParseHead(src, codec.DefaultMaxFrame)
	if err != nil {
		return nil, nil, err
	}
	cmd := new(pulsarpb.BaseCommand)
	return cmd, src[h.CmdEnd:], codec.Parse(cmd, src, h)
}

func (c *raw) read() *pulsarpb.BaseCommand {
	c.Helper()
	cmd, _, err := c.frame()
	if err != nil {
		c.Fatal(err)
	}
	return cmd
}

// readType reads one command, which must be of that type.
func (c *raw) readType(want codec.Type) *pulsarpb.BaseCommand {
	c.Helper()
	cmd := c.read()
	if got := codec.Type(cmd.GetType()); got != want {
		c.Fatalf("received %v, want %v: %v", got, want, cmd)
	}
	return cmd
}

// ended checks that the broker ends the connection.
func (c *raw) ended() {
	c.Helper()
	c.nc.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, c.r); errors.Is(err, os.ErrDeadlineExceeded) {
		c.Fatal("the connection is still open")
	}
}

// mute checks that nothing comes for a moment.
func (c *raw) mute() {
	c.Helper()
	c.nc.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if b, err := c.r.ReadByte(); err == nil {
		c.Fatalf("received %#x, silence was expected", b)
	} else if ne := net.Error(nil); !errors.As(err, &ne) || !ne.Timeout() {
		c.Fatal(err)
	}
}

func lookup(topic string, request uint64) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeLookup), LookupTopic: &pulsarpb.CommandLookupTopic{
		Topic: &topic, RequestId: &request}}
}

func producerCommand(topic, name string, id uint64) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeProducer), Producer: &pulsarpb.CommandProducer{
		Topic: &topic, ProducerId: &id, RequestId: ptr(100 + id), ProducerName: &name}}
}

func subscribeCommand(topic, sub string, typ int32, id uint64) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeSubscribe), Subscribe: &pulsarpb.CommandSubscribe{
		Topic: &topic, Subscription: &sub, SubType: &typ, ConsumerId: &id, RequestId: ptr(200 + id), InitialPosition: ptr(int32(1))}}
}

func flow(id uint64, permits uint32) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeFlow), Flow: &pulsarpb.CommandFlow{ConsumerId: &id, MessagePermits: &permits}}
}

func ackCommand(id uint64, typ int32, ids ...*pulsarpb.MessageIdData) *pulsarpb.BaseCommand {
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeAck), Ack: &pulsarpb.CommandAck{
		ConsumerId: &id, AckType: &typ, MessageId: ids, RequestId: ptr(uint64(7))}}
}

// sendFrame is a SEND of one message.
func sendFrame(id, sequence uint64, payload []byte) []byte {
	body := EncodeMessage(&pulsarpb.MessageMetadata{
		ProducerName: ptr("p"), SequenceId: &sequence, PublishTime: ptr(uint64(time.Now().UnixMilli()))}, payload)
	head := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypeSend), Send: &pulsarpb.CommandSend{
		ProducerId: &id, SequenceId: &sequence}})
	return append(withPayload(head, len(body)), body...)
}

const topicT = "persistent://t/n/x"

func await(t *testing.T, c *Cluster, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.Await(ctx, what, cond); err != nil {
		t.Fatal(err)
	}
}

func TestCommandsBeforeConnectAndASecondConnectEndTheConnection(t *testing.T) {
	c := start(t, Options{})
	early := dial(t, c.Broker(0))
	early.send(lookup(topicT, 1))
	early.ended()
	twice := connect(t, c.Broker(0))
	twice.send(connectCommand())
	twice.ended()
	await(t, c, "no connection left", func() bool { return len(c.Conns()) == 0 })
}

func TestWhatIsNoFrameEndsTheConnection(t *testing.T) {
	c := start(t, Options{})
	for _, src := range []string{"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "\xff\xff\xff\xff\xff\xff\xff\xff", "\x00\x00\x00\x00"} {
		r := dial(t, c.Broker(0))
		r.write([]byte(src))
		r.ended()
	}
}

func TestLookupsAreRedirectedAsOftenAsOrdered(t *testing.T) {
	c := start(t, Options{Brokers: 2, Redirects: 3, Advertised: []string{"broker-0:6650", "broker-1:6650"}})
	r := connect(t, c.Broker(0))
	for i := range uint64(8) {
		r.send(lookup(topicT, i))
		resp := r.readType(codec.TypeLookupResponse).GetLookupTopicResponse()
		want := codec.LookupRedirect
		if i%4 == 3 {
			want = codec.LookupConnect
		}
		if resp.GetResponse() != want || resp.GetRequestId() != i || !resp.GetAuthoritative() {
			t.Fatalf("answer %d: %v", i, resp)
		}
		if url := resp.GetBrokerServiceUrl(); url != "pulsar://broker-0:6650" && url != "pulsar://broker-1:6650" {
			t.Fatalf("answer %d names %s, not a logical name", i, url)
		}
	}
	if got := c.Resolve()["broker-1:6650"]; got != c.Broker(1).Addr() {
		t.Errorf("resolve says %s, want %s", got, c.Broker(1).Addr())
	}
}

// LK-12: asking for a missing topic without creation creates nothing. LK-11: creation as partitioned.
func TestAskingWithoutCreatingCreatesNothing(t *testing.T) {
	c := start(t, Options{AutoPartitions: 4})
	r := connect(t, c.Broker(0))
	ask := func(auto bool) *pulsarpb.CommandPartitionedTopicMetadataResponse {
		r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePartitionedMetadata), PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{
			Topic: ptr(topicT), RequestId: ptr(uint64(5)), MetadataAutoCreationEnabled: &auto}})
		return r.readType(codec.TypePartitionedMetadataResp).GetPartitionMetadataResponse()
	}
	if resp := ask(false); resp.GetResponse() != codec.MetadataFailed || codec.ServerError(resp.GetError()) != codec.ErrorTopicNotFound {
		t.Fatalf("answer %v", resp)
	}
	if got := c.Topics(); len(got) != 0 {
		t.Fatalf("created %v", got)
	}
	if resp := ask(true); resp.GetPartitions() != 4 || len(c.Topics()) != 4 {
		t.Fatalf("answer %v, topics %v", resp, c.Topics())
	}
}

func TestTopicListsCarryAHashAndAreNotRepeated(t *testing.T) {
	c := start(t, Options{})
	c.CreateTopic("persistent://t/n/b", 0)
	c.CreateTopic("persistent://t/n/a", 0)
	c.CreateTopic("non-persistent://t/n/c", 0)
	c.CreateTopic("persistent://t/other/d", 0)
	r := connect(t, c.Broker(0))
	ask := func(mode int32, hash string) *pulsarpb.CommandGetTopicsOfNamespaceResponse {
		r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetTopicsOfNamespace), GetTopicsOfNamespace: &pulsarpb.CommandGetTopicsOfNamespace{
			RequestId: ptr(uint64(5)), Namespace: ptr("t/n"), Mode: &mode, TopicsHash: &hash}})
		return r.readType(codec.TypeGetTopicsOfNamespaceResp).GetGetTopicsOfNamespaceResponse()
	}
	resp := ask(0, "")
	if len(resp.Topics) != 2 || resp.Topics[0] != "persistent://t/n/a" || !resp.GetChanged() {
		t.Fatalf("answer %v", resp)
	}
	if again := ask(0, resp.GetTopicsHash()); len(again.Topics) != 0 || again.GetChanged() {
		t.Fatalf("answer %v to its own hash", again)
	}
	if all := ask(2, ""); len(all.Topics) != 3 {
		t.Fatalf("all: %v", all)
	}
	// As Pulsar 4.0.8 answered for these two.
	if got := TopicsHash([]string{"persistent://public/default/diff-11026", "persistent://public/default/diff-7993"}); got != "2e87e1a8" {
		t.Errorf("hash %s", got)
	}
	// "123456789" has the well-known CRC32C e3069283; a broker prints its bytes in little-endian order.
	if got := TopicsHash([]string{"123456789"}); got != "839206e3" {
		t.Errorf("hash %s", got)
	}
}

func TestReceiptsAndDeliveryCarryTheSameIDs(t *testing.T) {
	c := start(t, Options{LedgerBase: 1000, EntriesPerLedger: 2})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	if got := r.readType(codec.TypeProducerSuccess).GetProducerSuccess(); got.GetProducerName() != "p" || got.GetRequestId() != 101 {
		t.Fatalf("answer %v", got)
	}
	var ids []*pulsarpb.MessageIdData
	for i := range uint64(3) {
		r.write(sendFrame(1, i, []byte{byte(i)}))
		receipt := r.readType(codec.TypeSendReceipt).GetSendReceipt()
		if receipt.GetSequenceId() != i {
			t.Fatalf("receipt %v, want sequence %d", receipt, i)
		}
		ids = append(ids, receipt.GetMessageId())
	}
	if ids[0].GetLedgerId() != 1000 || ids[1].GetEntryId() != 1 || ids[2].GetLedgerId() != 1001 || ids[2].GetEntryId() != 0 {
		t.Fatalf("ids %v", ids)
	}
	r.send(subscribeCommand(topicT, "s", Exclusive, 9))
	r.readType(codec.TypeSuccess)
	r.mute() // no permits yet
	r.send(flow(9, 2))
	for i := range 2 {
		cmd, payload, err := r.frame()
		if err != nil || cmd.GetMessage().GetMessageId().GetEntryId() != ids[i].GetEntryId() {
			t.Fatalf("message %d: %v %v", i, cmd, err)
		}
		if m, err := parseMetadata(payload); err != nil || payload[m.body] != byte(i) {
			t.Fatalf("message %d: payload % x, %v", i, payload, err)
		}
	}
	r.mute() // permits used up
	r.send(ackCommand(9, 0, ids[0]))
	r.readType(codec.TypeAckResponse)
	info, _ := c.Topic(topicT)
	if got := info.Subscriptions["s"]; got.Backlog != 2 || got.Pending != 1 {
		t.Fatalf("after one ack: %+v", got)
	}
	r.send(ackCommand(9, 1, ids[2]))
	r.readType(codec.TypeAckResponse)
	info, _ = c.Topic(topicT)
	if got := info.Subscriptions["s"]; got.Backlog != 0 || got.Pending != 0 {
		t.Fatalf("after the cumulative ack: %+v", got)
	}
}

func TestSeekUnderstandsTheSentinels(t *testing.T) {
	c := start(t, Options{})
	for i := range uint64(3) {
		c.Publish(topicT, "p", i, []byte{byte(i)})
	}
	r := connect(t, c.Broker(0))
	for _, want := range []struct {
		ledger  uint64
		backlog int
	}{{1<<63 - 1, 0}, {^uint64(0), 3}} {
		r.send(subscribeCommand(topicT, "s", Exclusive, 9))
		r.readType(codec.TypeSuccess)
		r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeSeek), Seek: &pulsarpb.CommandSeek{ConsumerId: ptr(uint64(9)), RequestId: ptr(uint64(1)),
			MessageId: &pulsarpb.MessageIdData{LedgerId: &want.ledger, EntryId: &want.ledger}}})
		if got := r.readType(codec.TypeCloseConsumer).GetCloseConsumer(); got.GetRequestId() != codec.NoRequest {
			t.Fatalf("close %v", got)
		}
		r.readType(codec.TypeSuccess)
		if info, _ := c.Topic(topicT); info.Subscriptions["s"].Backlog != want.backlog {
			t.Fatalf("backlog %d after a seek to %d, want %d", info.Subscriptions["s"].Backlog, want.ledger, want.backlog)
		}
	}
}

func TestADamagedMessageIsRefused(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	src := sendFrame(1, 5, []byte("hello"))
	src[len(src)-1] ^= 1
	r.write(src)
	if got := r.readType(codec.TypeSendError).GetSendError(); codec.ServerError(got.GetError()) != codec.ErrorChecksum || got.GetSequenceId() != 5 {
		t.Fatalf("answer %v", got)
	}
	if len(c.Messages(topicT)) != 0 {
		t.Fatal("it was stored")
	}
}

func TestATopicHoldsNoMoreThanItsLimit(t *testing.T) {
	c := start(t, Options{MaxTopicBytes: 10_000})
	r := connect(t, c.Broker(0))
	r.send(subscribeCommand(topicT, "s", Exclusive, 9))
	r.readType(codec.TypeSuccess)
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	var last *pulsarpb.MessageIdData
	for i := uint64(0); ; i++ {
		r.write(sendFrame(1, i, make([]byte, 1000)))
		cmd := r.read()
		if cmd.SendError != nil {
			break
		}
		if last = cmd.GetSendReceipt().GetMessageId(); i > 10 {
			t.Fatal("never full")
		}
	}
	if info, _ := c.Topic(topicT); info.Bytes > 10_000 {
		t.Fatalf("holds %d bytes", info.Bytes)
	}
	r.send(ackCommand(9, 1, last))
	r.readType(codec.TypeAckResponse)
	r.write(sendFrame(1, 99, make([]byte, 1000)))
	r.readType(codec.TypeSendReceipt)
}

func TestASlowConsumerIsNotFedMoreThanItsShare(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	payload := make([]byte, 256<<10)
	for i := range uint64(200) { // 50 MiB, far beyond what the sockets hold
		c.Publish(topicT, "p", i, payload)
	}
	r.send(subscribeCommand(topicT, "s", Shared, 9))
	r.readType(codec.TypeSuccess)
	r.send(flow(9, 1000))
	await(t, c, "delivery has begun", func() bool {
		info, _ := c.Topic(topicT)
		return info.Subscriptions["s"].Pending > 0
	})
	conn := c.Conn(c.Conns()[0].ID)
	conn.mu.Lock()
	queued := conn.outBytes
	conn.mu.Unlock()
	if queued > deliverBelow+len(payload)+1000 {
		t.Fatalf("%d bytes are queued", queued)
	}
	for range 200 {
		r.readType(codec.TypeMessage)
	}
}

// A name's holder is PINGed before a newcomer is refused; one that does not answer loses the name.
func TestAHolderThatIsDeadLosesItsName(t *testing.T) {
	hold := func(liveness time.Duration) (old, young *raw) {
		c := start(t, Options{LivenessTimeout: liveness})
		old, young = connect(t, c.Broker(0)), connect(t, c.Broker(0))
		old.send(producerCommand(topicT, "p", 1))
		old.readType(codec.TypeProducerSuccess)
		old.send(subscribeCommand(topicT, "s", Exclusive, 1))
		old.readType(codec.TypeSuccess)
		return old, young
	}
	old, young := hold(time.Hour)
	young.send(producerCommand(topicT, "p", 1))
	old.readType(codec.TypePing)
	old.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePong), Pong: &pulsarpb.CommandPong{}})
	if got := young.readType(codec.TypeError).GetError(); codec.ServerError(got.GetError()) != codec.ErrorProducerBusy {
		t.Fatalf("answer %v while the holder lives", got)
	}
	old, young = hold(50 * time.Millisecond)
	young.send(subscribeCommand(topicT, "s", Exclusive, 1)) // this time the holder says nothing
	young.readType(codec.TypeSuccess)
	old.ended()
	young.send(producerCommand(topicT, "p", 1))
	young.readType(codec.TypeProducerSuccess)
}

func TestUnansweredPingsEndTheConnection(t *testing.T) {
	t.Parallel() // it takes its time
	c := start(t, Options{PingInterval: 20 * time.Millisecond})
	r := connect(t, c.Broker(0))
	r.readType(codec.TypePing)
	r.ended()
	c = start(t, Options{PingInterval: 3 * time.Second}) // a PONG has to come within that
	r = connect(t, c.Broker(0))
	r.readType(codec.TypePing)
	r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePong), Pong: &pulsarpb.CommandPong{}})
	r.readType(codec.TypePing)
}

func TestUnloadTellsEveryClientWhereToGo(t *testing.T) {
	c := start(t, Options{Brokers: 2})
	c.CreateTopic(topicT, 0)
	info, _ := c.Topic(topicT)
	from, to := c.Broker(info.Broker), c.Broker(1-info.Broker)
	r := connect(t, from)
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	r.send(subscribeCommand(topicT, "s", Shared, 2))
	r.readType(codec.TypeSuccess)
	if err := c.Unload(topicT, to, true); err != nil {
		t.Fatal(err)
	}
	p, s := r.readType(codec.TypeCloseProducer).GetCloseProducer(), r.readType(codec.TypeCloseConsumer).GetCloseConsumer()
	if p.GetAssignedBrokerServiceUrl() != to.URL() || s.GetAssignedBrokerServiceUrl() != to.URL() || p.GetRequestId() != codec.NoRequest {
		t.Fatalf("closes %v %v, want %s", p, s, to.URL())
	}
	r.send(producerCommand(topicT, "p", 3))
	if got := r.readType(codec.TypeError).GetError(); codec.ServerError(got.GetError()) != codec.ErrorServiceNotReady {
		t.Fatalf("the old broker says %v", got)
	}
	if err := c.Migrate(topicT, "pulsar://elsewhere:6650"); err != nil {
		t.Fatal(err)
	}
	if err := c.Unload("persistent://t/n/missing", nil, false); err == nil {
		t.Fatal("unload of a missing topic succeeded")
	}
}

func TestMigrateSaysSoBeforeItCloses(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	if err := c.Migrate(topicT, "pulsar://elsewhere:6650"); err != nil {
		t.Fatal(err)
	}
	if got := r.readType(codec.TypeTopicMigrated).GetTopicMigrated(); got.GetBrokerServiceUrl() != "pulsar://elsewhere:6650" || got.GetResourceId() != 1 {
		t.Fatalf("received %v", got)
	}
	r.readType(codec.TypeCloseProducer)
}

func TestABatchIsCountedAndAcknowledgedByItsMessages(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	one := []byte{0, 0, 0, 2, 0x18, 3, 'a', 'b', 'c'} // metadata with payload_size 3
	body := EncodeMessage(&pulsarpb.MessageMetadata{ProducerName: ptr("p"), SequenceId: ptr(uint64(0)), PublishTime: ptr(uint64(1)),
		NumMessagesInBatch: ptr(int32(3))}, append(append(append([]byte{}, one...), one...), one...))
	head := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypeSend), Send: &pulsarpb.CommandSend{
		ProducerId: ptr(uint64(1)), SequenceId: ptr(uint64(0)), NumMessages: ptr(int32(3))}})
	r.write(append(withPayload(head, len(body)), body...))
	id := r.readType(codec.TypeSendReceipt).GetSendReceipt().GetMessageId()
	if got := c.Messages(topicT)[0].Payloads(); len(got) != 3 || string(got[2]) != "abc" {
		t.Fatalf("payloads %q", got)
	}
	r.send(subscribeCommand(topicT, "s", Shared, 9))
	r.readType(codec.TypeSuccess)
	r.send(flow(9, 10))
	r.readType(codec.TypeMessage)
	for _, left := range []struct {
		set     int64
		backlog int
	}{{0b110, 1}, {0b101, 1}, {0b011, 0}} { // what one ack leaves, the next one takes from
		part := proto.Clone(id).(*pulsarpb.MessageIdData)
		part.AckSet = []int64{left.set}
		r.send(ackCommand(9, 0, part))
		r.readType(codec.TypeAckResponse)
		if info, _ := c.Topic(topicT); info.Subscriptions["s"].Backlog != left.backlog {
			t.Fatalf("backlog %d after %b", info.Subscriptions["s"].Backlog, left.set)
		}
	}
}

// keyed is a SEND of one message with a key.
func keyed(id, sequence uint64, key string) []byte {
	meta := &pulsarpb.MessageMetadata{ProducerName: ptr("p"), SequenceId: &sequence, PublishTime: ptr(uint64(1))}
	meta.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 6, protowire.BytesType), key))
	body := EncodeMessage(meta, []byte(key))
	head := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypeSend), Send: &pulsarpb.CommandSend{
		ProducerId: &id, SequenceId: &sequence}})
	return append(withPayload(head, len(body)), body...)
}

func TestAKeyStaysWhereItIsPendingAndMovesWhenItIsNot(t *testing.T) {
	c := start(t, Options{})
	p, a, b := connect(t, c.Broker(0)), connect(t, c.Broker(0)), connect(t, c.Broker(0))
	p.send(producerCommand(topicT, "p", 1))
	p.readType(codec.TypeProducerSuccess)
	const keys = 20
	round := func(sequence uint64) {
		for i := range uint64(keys) {
			p.write(keyed(1, sequence+i, string(rune('a'+i))))
			p.readType(codec.TypeSendReceipt)
		}
	}
	join := func(r *raw, id uint64) {
		r.send(subscribeCommand(topicT, "s", KeyShared, id))
		r.readType(codec.TypeSuccess)
		r.send(flow(id, 1000))
	}
	join(a, 1)
	round(0)
	var last *pulsarpb.MessageIdData
	for range keys {
		a.readType(codec.TypeMessage)
	}
	join(b, 2)
	round(keys)
	for range keys {
		last = a.readType(codec.TypeMessage).GetMessage().GetMessageId()
	}
	b.mute()
	for _, m := range c.Messages(topicT) {
		a.send(ackCommand(1, 0, &pulsarpb.MessageIdData{LedgerId: &m.Ledger, EntryId: &m.Entry}))
		a.readType(codec.TypeAckResponse)
	}
	if info, _ := c.Topic(topicT); info.Subscriptions["s"].Backlog != 0 {
		t.Fatalf("backlog %d after all acks, the last was %v", info.Subscriptions["s"].Backlog, last)
	}
	round(2 * keys)
	b.readType(codec.TypeMessage)
}

func TestFailoverTellsWhoIsActive(t *testing.T) {
	c := start(t, Options{})
	join := func(r *raw, name string) {
		cmd := subscribeCommand(topicT, "s", Failover, 1)
		cmd.Subscribe.ConsumerName = &name
		r.send(cmd)
		r.readType(codec.TypeSuccess)
	}
	active := func(r *raw) bool {
		return r.readType(codec.TypeActiveConsumerChange).GetActiveConsumerChange().GetIsActive()
	}
	b := connect(t, c.Broker(0))
	if join(b, "b"); !active(b) {
		t.Fatal("the only one is not active")
	}
	a := connect(t, c.Broker(0))
	if join(a, "a"); !active(a) || active(b) {
		t.Fatal("the first by name has to take over")
	}
	a.nc.Close()
	if !active(b) {
		t.Fatal("the one that is left is not active")
	}
}

func TestAProducerThatCameBackReplacesItsFormerSelf(t *testing.T) {
	c := start(t, Options{LivenessTimeout: time.Hour})
	old, young := connect(t, c.Broker(0)), connect(t, c.Broker(0))
	cmd := producerCommand(topicT, "given-by-a-broker", 1)
	cmd.Producer.UserProvidedProducerName = ptr(false)
	old.send(cmd)
	old.readType(codec.TypeProducerSuccess)
	cmd.Producer.Epoch = ptr(uint64(1))
	young.send(cmd)
	young.readType(codec.TypeProducerSuccess)
	old.readType(codec.TypeCloseProducer)
}

func TestPermitsCountTheMessagesOfABatch(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	for i := range uint64(2) {
		body := EncodeMessage(&pulsarpb.MessageMetadata{ProducerName: ptr("p"), SequenceId: &i, PublishTime: ptr(uint64(1)),
			NumMessagesInBatch: ptr(int32(3))}, nil)
		head := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypeSend), Send: &pulsarpb.CommandSend{
			ProducerId: ptr(uint64(1)), SequenceId: &i, NumMessages: ptr(int32(3))}})
		r.write(append(withPayload(head, len(body)), body...))
		r.readType(codec.TypeSendReceipt)
	}
	r.send(subscribeCommand(topicT, "s", Shared, 9))
	r.readType(codec.TypeSuccess)
	r.send(flow(9, 3))
	r.readType(codec.TypeMessage)
	r.mute()
	r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetLastMessageID), GetLastMessageId: &pulsarpb.CommandGetLastMessageId{
		ConsumerId: ptr(uint64(9)), RequestId: ptr(uint64(1))}})
	if got := r.readType(codec.TypeGetLastMessageIDResponse).GetGetLastMessageIdResponse().GetLastMessageId(); got.GetBatchIndex() != 2 || got.GetEntryId() != 1 {
		t.Fatalf("last message id %v, want entry 1, batch index 2", got)
	}
}
