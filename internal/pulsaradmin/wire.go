package pulsaradmin

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// wire is a connection of the binary protocol to the broker that owns a topic, for what the admin API cannot do: acknowledging single
// messages, and reading many. One goroutine uses it at a time.
type wire struct {
	c     *Client
	topic string
	addr  string
	conn  net.Conn
	in    *bufio.Reader
	frame []byte // the one read last
	last  uint64 // request or consumer id
}

const (
	// clientVersion is what brokers log and show of these connections.
	clientVersion = "pointsman-controller"
	// maxFrame bounds what a broker may send at once, in bytes.
	maxFrame = 128 << 20
	// acksPerCommand bounds an ACK; its command stays below 64 KiB.
	acksPerCommand = 2_000
	// permits is how many messages a broker may send ahead of the reading.
	permits = 1_000
)

// subscriptionTypes are the numbers of the protocol.
var subscriptionTypes = map[string]int32{"Exclusive": 0, "Shared": 1, "Failover": 2, "Key_Shared": 3}

// open looks the owner of a topic up, connects to it and authenticates.
func (c *Client) open(ctx context.Context, topic string) (*wire, error) {
	ctx, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	addr, err := c.Lookup(ctx, topic)
	if err != nil {
		return nil, err
	}
	w := &wire{c: c, topic: topic, addr: addr}
	if w.conn, err = c.dial(ctx, "tcp", addr); err != nil {
		return nil, w.fail("connect", err)
	}
	if c.cfg.BinaryTLS {
		trust := c.cfg.TLS.Clone()
		if trust == nil {
			trust = &tls.Config{}
		}
		if trust.ServerName = c.cfg.ServerName; trust.ServerName == "" {
			trust.ServerName, _, _ = net.SplitHostPort(addr)
		}
		w.conn = tls.Client(w.conn, trust)
	}
	w.in = bufio.NewReaderSize(w.conn, 64<<10)
	if err := w.connect(ctx); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *wire) close() { _ = w.conn.Close() }

func (w *wire) fail(what string, err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	return &Error{Cluster: w.c.cfg.Cluster, Call: fmt.Sprintf("%s at broker %s for %s", what, w.addr, w.topic), Err: err}
}

func (w *wire) token() (method *string, secret []byte, err error) {
	if w.c.cfg.Token == nil {
		return nil, nil, nil
	}
	token, err := w.c.cfg.Token()
	return proto.String("token"), []byte(token), err
}

func (w *wire) connect(ctx context.Context) error {
	defer w.within(ctx)()
	method, secret, err := w.token()
	if err != nil {
		return w.fail("CONNECT", err)
	}
	err = w.write(&pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeConnect)), Connect: &pulsarpb.CommandConnect{
		ClientVersion: proto.String(clientVersion), ProtocolVersion: proto.Int32(codec.ProtocolVersion),
		AuthMethodName: method, AuthData: secret, FeatureFlags: &pulsarpb.FeatureFlags{SupportsAuthRefresh: proto.Bool(true)},
	}})
	if err != nil {
		return w.fail("CONNECT", err)
	}
	_, _, err = w.await("CONNECT", func(cmd *pulsarpb.BaseCommand, _ codec.Head) bool { return cmd.Connected != nil })
	return err
}

// within makes all reading and writing end with ctx, at the latest after CallTimeout. What it returns ends that.
func (w *wire) within(ctx context.Context) func() {
	deadline := time.Now().Add(CallTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = w.conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = w.conn.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

func (w *wire) write(cmd *pulsarpb.BaseCommand) error {
	_, err := w.conn.Write(codec.AppendCommand(nil, cmd))
	return err
}

// read reads one frame; it is valid until the next one is read.
func (w *wire) read() (codec.Head, error) {
	var sizes [8]byte
	if _, err := io.ReadFull(w.in, sizes[:]); err != nil {
		return codec.Head{}, err
	}
	total := binary.BigEndian.Uint32(sizes[:])
	if total > maxFrame-4 || total < 4 {
		return codec.Head{}, fmt.Errorf("it announces a frame of %d bytes", total)
	}
	w.frame = append(w.frame[:0], sizes[:]...)
	rest := bytes.NewBuffer(w.frame)
	if _, err := io.CopyN(rest, w.in, int64(total)-4); err != nil {
		return codec.Head{}, err
	}
	w.frame = rest.Bytes()
	h, ok, err := codec.ParseHead(w.frame, maxFrame)
	if err == nil && !ok {
		err = errors.New("it sent a frame that cannot be parsed")
	}
	return h, err
}

// await reads until done says that a command is the wanted one. Commands of the connection itself are answered meanwhile.
func (w *wire) await(what string, done func(cmd *pulsarpb.BaseCommand, h codec.Head) bool) (*pulsarpb.BaseCommand, codec.Head, error) {
	for {
		h, err := w.read()
		if err != nil {
			return nil, h, w.fail(what, err)
		}
		var cmd pulsarpb.BaseCommand
		if err := codec.Parse(&cmd, w.frame, h); err != nil {
			return nil, h, w.fail(what, err)
		}
		switch {
		case done(&cmd, h):
			return &cmd, h, nil
		case cmd.Error != nil:
			return nil, h, w.refused(what, cmd.Error.GetError(), cmd.Error.GetMessage())
		case cmd.CloseConsumer != nil:
			return nil, h, w.fail(what, errors.New("the broker closed the consumer: the topic has moved to another broker, or is being unloaded"))
		case cmd.Ping != nil:
			err = w.write(&pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypePong)), Pong: &pulsarpb.CommandPong{}})
		case cmd.AuthChallenge != nil:
			var method *string
			var secret []byte
			if method, secret, err = w.token(); err == nil {
				err = w.write(&pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeAuthResponse)), AuthResponse: &pulsarpb.CommandAuthResponse{
					ClientVersion: proto.String(clientVersion), Response: &pulsarpb.AuthData{AuthMethodName: method, AuthData: secret}, ProtocolVersion: proto.Int32(codec.ProtocolVersion),
				}})
			}
		}
		if err != nil {
			return nil, h, w.fail(what, err)
		}
	}
}

// errRefused is in every ERROR of a broker: trying again soon will not help.
var errRefused = errors.New("error")

// refused is an ERROR of the broker.
func (w *wire) refused(what string, code int32, message string) error {
	e := &Error{Cluster: w.c.cfg.Cluster, Call: fmt.Sprintf("%s at broker %s for %s", what, w.addr, w.topic), Code: codec.ServerError(code), Err: fmt.Errorf("%w %d: %s", errRefused, code, reason([]byte(message)))}
	switch codec.ServerError(code) {
	case codec.ErrorAuthentication:
		e.Remedy = w.c.remedy(401)
	case codec.ErrorAuthorization:
		e.Remedy = w.c.remedy(403)
	case codec.ErrorProducerFenced, codec.ErrorProducerBusy:
		e.Remedy = "somebody publishes on the topic there; end that client if it does not come through the proxies, or wait until the broker has noticed that a proxy has died"
	case codec.ErrorConsumerBusy:
		e.Remedy = "somebody is connected to the subscription already; end that client, it does not come through the proxies"
	}
	return e
}

// request sends a command and waits for the SUCCESS or ACK_RESPONSE with that request id.
func (w *wire) request(what string, id uint64, cmd *pulsarpb.BaseCommand) error {
	if err := w.write(cmd); err != nil {
		return w.fail(what, err)
	}
	answer, _, err := w.await(what, func(cmd *pulsarpb.BaseCommand, _ codec.Head) bool {
		return cmd.Success != nil && cmd.Success.GetRequestId() == id || cmd.AckResponse != nil && cmd.AckResponse.GetRequestId() == id
	})
	if err == nil && answer.AckResponse != nil && (answer.AckResponse.Error != nil || answer.AckResponse.GetMessage() != "") {
		return w.refused(what, answer.AckResponse.GetError(), answer.AckResponse.GetMessage())
	}
	return err
}

func (w *wire) id() uint64 { w.last++; return w.last }

// ack acknowledges single entries of a subscription that exists, as a consumer of that type which asks for no message, and waits until the broker
// has taken them.
func (w *wire) ack(ctx context.Context, subscription, kind string, positions []Position) error {
	defer w.within(ctx)()
	what := "acknowledge for subscription " + subscription
	consumer, request := w.id(), w.id()
	err := w.request(what, request, &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeSubscribe)), Subscribe: &pulsarpb.CommandSubscribe{
		Topic: &w.topic, Subscription: &subscription, SubType: proto.Int32(subscriptionTypes[kind]), ConsumerId: &consumer, RequestId: &request,
		ConsumerName: proto.String(clientVersion), Durable: proto.Bool(true),
	}})
	for len(positions) > 0 && err == nil {
		n := min(len(positions), acksPerCommand)
		ids := make([]*pulsarpb.MessageIdData, n)
		for i, p := range positions[:n] {
			ids[i] = &pulsarpb.MessageIdData{LedgerId: proto.Uint64(uint64(p.Ledger)), EntryId: proto.Uint64(uint64(p.Entry))}
		}
		positions = positions[n:]
		request := w.id()
		err = w.request(what, request, &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeAck)), Ack: &pulsarpb.CommandAck{
			ConsumerId: &consumer, AckType: proto.Int32(0), MessageId: ids, RequestId: &request,
		}})
	}
	if err != nil {
		return err
	}
	return w.closeConsumer(what, consumer)
}

func (w *wire) closeConsumer(what string, consumer uint64) error {
	request := w.id()
	return w.request(what, request, &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeCloseConsumer)), CloseConsumer: &pulsarpb.CommandCloseConsumer{
		ConsumerId: &consumer, RequestId: &request,
	}})
}

// scan reads the messages from position first on, as a reader, until visit says stop. Markers are left out. Nobody ends it but visit and ctx: the
// caller must know a message that will come.
func (w *wire) scan(ctx context.Context, first Position, visit func(e Entry) (stop bool)) error {
	return w.scanBodies(ctx, first, func(e Entry, _ []byte) (bool, error) { return visit(e), nil })
}

// scanBodies is scan for who wants what a MESSAGE carries behind its command as well; body is valid until visit returns. An error of visit ends it.
func (w *wire) scanBodies(ctx context.Context, first Position, visit func(e Entry, body []byte) (stop bool, err error)) error {
	defer w.within(ctx)()
	what := "read from " + first.String()
	consumer, request := w.id(), w.id()
	err := w.request(what, request, &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeSubscribe)), Subscribe: &pulsarpb.CommandSubscribe{
		Topic: &w.topic, Subscription: proto.String(fmt.Sprintf("pointsman-reader-%d-%d", time.Now().UnixNano(), consumer)), SubType: proto.Int32(subscriptionTypes["Exclusive"]),
		ConsumerId: &consumer, RequestId: &request, ConsumerName: proto.String(clientVersion), Durable: proto.Bool(false),
		// The start is the last message that the reader has had.
		StartMessageId: &pulsarpb.MessageIdData{LedgerId: proto.Uint64(uint64(first.Ledger)), EntryId: proto.Uint64(uint64(first.Entry - 1))},
	}})
	if err != nil {
		return err
	}
	for left, stop := 0, false; !stop; {
		if left <= permits/2 {
			if err := w.write(&pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeFlow)), Flow: &pulsarpb.CommandFlow{
				ConsumerId: &consumer, MessagePermits: proto.Uint32(uint32(permits - left)),
			}}); err != nil {
				return w.fail(what, err)
			}
			left = permits
		}
		_ = w.conn.SetReadDeadline(w.soon(ctx))
		cmd, h, err := w.await(what, func(cmd *pulsarpb.BaseCommand, _ codec.Head) bool { return cmd.Message != nil })
		if err != nil {
			return err
		}
		if cmd.Message.GetConsumerId() != consumer {
			continue // of a scan before this one
		}
		id := cmd.Message.GetMessageId()
		body := w.frame[h.CmdEnd:h.Size]
		e, err := messageEntry(Position{int64(id.GetLedgerId()), int64(id.GetEntryId())}, body)
		if err != nil {
			return w.fail(what, err)
		}
		left -= e.Messages
		if e.Position.Before(first) {
			continue // whether the start itself comes depends on the broker
		}
		if stop, err = visit(e, body); err != nil {
			return err
		}
	}
	_ = w.conn.SetReadDeadline(w.soon(ctx))
	return w.closeConsumer(what, consumer)
}

// soon is when a message that is there has to have come, at the latest; the past when ctx has ended.
func (w *wire) soon(ctx context.Context) time.Time {
	deadline := time.Now().Add(w.c.messageWait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if ctx.Err() != nil {
		deadline = time.Unix(1, 0)
	}
	return deadline
}

// messageWait is short because what is read lies within a fence, and there is another way to read it.
const messageWait = 2 * time.Second

// Magic numbers in front of what a MESSAGE carries.
const (
	magicBroker   = 0x0e02 // metadata that the broker adds
	magicChecksum = 0x0e01
)

var errMessage = errors.New("it sent a message whose metadata cannot be parsed")

// splitBody takes apart what a MESSAGE carries behind its command.
func splitBody(body []byte) (metadata, payload []byte, err error) {
	sized := func(skip int) ([]byte, bool) {
		if len(body) < skip+4 {
			return nil, false
		}
		n := uint64(binary.BigEndian.Uint32(body[skip:]))
		if uint64(len(body)-skip-4) < n {
			return nil, false
		}
		part := body[skip+4:][:n]
		body = body[skip+4+int(n):]
		return part, true
	}
	if len(body) >= 2 && binary.BigEndian.Uint16(body) == magicBroker {
		if _, ok := sized(2); !ok {
			return nil, nil, errMessage
		}
	}
	skip := 0
	if len(body) >= 2 && binary.BigEndian.Uint16(body) == magicChecksum {
		skip = 6 // and the checksum
	}
	metadata, ok := sized(skip)
	if !ok {
		return nil, nil, errMessage
	}
	return metadata, body, nil
}

// messageEntry reads the metadata in front of a message's payload.
func messageEntry(p Position, src []byte) (Entry, error) {
	metadata, payload, err := splitBody(src)
	if err != nil {
		return Entry{}, err
	}
	e := Entry{Position: p, Source: NoPosition, Messages: 1, Bytes: len(payload)}
	for len(metadata) > 0 {
		num, typ, n := protowire.ConsumeTag(metadata)
		if n < 0 {
			return Entry{}, errMessage
		}
		metadata = metadata[n:]
		var number uint64
		var text []byte
		switch typ {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(metadata)
		case protowire.BytesType:
			text, n = protowire.ConsumeBytes(metadata)
		default:
			n = protowire.ConsumeFieldValue(num, typ, metadata)
		}
		if n < 0 {
			return Entry{}, errMessage
		}
		metadata = metadata[n:]
		switch num { // of MessageMetadata
		case 1:
			e.Producer = string(text)
		case 2:
			e.Sequence = int64(number)
		case 3:
			e.Time = int64(number)
		case 4:
			var pair pulsarpb.KeyValue
			if proto.Unmarshal(text, &pair) == nil && pair.GetKey() == sourceProperty {
				source, err := ParsePosition(pair.GetValue())
				if err != nil {
					return Entry{}, fmt.Errorf("property %s: %w", sourceProperty, err)
				}
				e.Source = source
			}
		case 5:
			e.From = string(text)
		case 6:
			e.Key = string(text)
		case 11:
			e.Messages = int(int32(number))
		case 20:
			e.Marker = true
		case 29:
			e.Chunk = int32(number)
		}
	}
	if e.From == "" {
		e.Source = NoPosition // an application that copies properties from one message to another
	}
	return e, nil
}
