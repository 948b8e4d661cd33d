package bench

import (
	"crypto/tls"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Broker is a fake broker that does as little as it can: it owns every topic, stores nothing, acknowledges what it is sent, one
// write of receipts per read, and sends template messages while it has permits.
type Broker struct {
	loop  *loop
	tls   *tls.Config // nil: plaintext
	addrs []string
	next  int            // of addrs, for the next lookup
	out   []byte         // answers to the frames of one read
	sizes map[int]*batch // of messages, by the size of their payload

	shakes  sync.WaitGroup // TLS handshakes, each on a goroutine of its own
	closing bool
}

// BrokerConfig is what a broker is given.
type BrokerConfig struct {
	Ports int              // listening ports, each a broker address of its own; lookups name one after the other
	TLS   *tls.Certificate // nil: plaintext
}

// NewBroker listens; Run serves.
func NewBroker(cfg BrokerConfig) (*Broker, error) {
	l, err := newLoop()
	if err != nil {
		return nil, err
	}
	b := &Broker{loop: l, sizes: map[int]*batch{}}
	for range max(cfg.Ports, 1) {
		port, err := l.listenOn(0)
		if err != nil {
			l.close()
			return nil, err
		}
		b.addrs = append(b.addrs, fmt.Sprintf("127.0.0.1:%d", port))
	}
	l.accept = func(fd int) {
		_, _ = l.add(fd, &brokerConn{broker: b})
	}
	if cfg.TLS != nil {
		b.tls = serverTLS(*cfg.TLS)
		l.accept = b.acceptTLS
	}
	return b, nil
}

// Addrs are the addresses that the broker listens on, as host:port.
func (b *Broker) Addrs() []string { return b.addrs }

// Run serves until Stop, and then closes everything.
func (b *Broker) Run() error {
	err := b.loop.run(time.Time{})
	b.closing = true
	b.shakes.Wait()
	b.loop.runPosted()
	b.loop.close()
	return err
}

// acceptTLS hands a connection to the loop after its handshake; one that fails is closed.
func (b *Broker) acceptTLS(fd int) {
	b.shakes.Go(func() {
		k, err := acceptLink(fd, b.tls)
		if err != nil {
			return
		}
		b.loop.post(func() {
			if b.closing {
				k.close()
				return
			}
			_, _ = b.loop.take(k, &brokerConn{broker: b})
		})
	})
}

// Stop ends Run; any goroutine may call it.
func (b *Broker) Stop() { b.loop.stop() }

// brokerConn is one client of the broker.
type brokerConn struct {
	broker    *Broker
	consumers []*feed
	late      []byte // answers that wait for the end of a message
}

// feed is one consumer.
type feed struct {
	stream
	batch   *batch
	permits int
}

// newFeed makes a consumer of messages of the size that its subscription is named after: see subscribeFrame.
func (b *Broker) newFeed(id byte, subscription string) (*feed, error) {
	size, err := strconv.Atoi(strings.TrimPrefix(subscription, sizePrefix))
	if err != nil || size <= 0 || size > maxFrame/2 {
		return nil, fmt.Errorf("subscription %q: want %s and a number of bytes", subscription, sizePrefix)
	}
	if b.sizes[size] == nil {
		b.sizes[size] = newBatch(messageTemplate(size))
	}
	return &feed{stream: stream{tmpl: b.sizes[size].tmpl, handle: id, next: firstID}, batch: b.sizes[size]}, nil
}

func (bc *brokerConn) frame(c *conn, h codec.Head, cmd []byte) {
	b := bc.broker
	switch h.Type {
	case codec.TypeSend:
		id, _ := subField(cmd, h.Type, 1)
		seq, _ := subField(cmd, h.Type, 2)
		var msg, sub [48]byte
		m := appendUint(appendUint(msg[:0], 1, ledgerID), 2, seq)
		s := appendUint(appendUint(sub[:0], 1, id), 2, seq)
		s = protowire.AppendBytes(protowire.AppendTag(s, 3, protowire.BytesType), m)
		b.out = appendFrame(b.out, codec.TypeSendReceipt, s)
	case codec.TypeFlow:
		id, _ := subField(cmd, h.Type, 1)
		permits, _ := subField(cmd, h.Type, 2)
		for _, f := range bc.consumers {
			if uint64(f.handle) == id {
				f.permits += int(permits)
			}
		}
	case codec.TypeAck:
	case codec.TypeLookup:
		request, _ := subField(cmd, h.Type, 2)
		addr := b.addrs[b.next%len(b.addrs)]
		b.next++
		var sub [128]byte
		var s []byte
		if b.tls == nil {
			s = appendText(sub[:0], 1, plainScheme+addr)
		} else {
			s = appendText(sub[:0], 2, secureScheme+addr)
		}
		s = appendUint(s, 3, uint64(codec.LookupConnect))
		b.out = appendFrame(b.out, codec.TypeLookupResponse, appendUint(appendUint(s, 4, request), 5, 1))
	case codec.TypePing:
		b.out = appendFrame(b.out, codec.TypePong, nil)
	case codec.TypePong:
	default:
		b.out = append(b.out, bc.rare(h, cmd)...)
	}
}

// rare answers what a connection says a few times only; it may allocate.
func (bc *brokerConn) rare(h codec.Head, cmd []byte) []byte {
	field := func(n protowire.Number) *uint64 {
		v, _ := subField(cmd, h.Type, n)
		return &v
	}
	switch h.Type {
	case codec.TypeConnect:
		return commandFrame(codec.TypeConnected, &pulsarpb.BaseCommand{Connected: &pulsarpb.CommandConnected{
			ServerVersion: proto.String("pointsman-bench"), ProtocolVersion: proto.Int32(codec.ProtocolVersion), MaxMessageSize: proto.Int32(codec.DefaultMaxFrame - codec.FrameSlack),
			FeatureFlags: &pulsarpb.FeatureFlags{SupportsBrokerEntryMetadata: proto.Bool(true), SupportsPartialProducer: proto.Bool(true)},
		}})
	case codec.TypePartitionedMetadata:
		return commandFrame(codec.TypePartitionedMetadataResp, &pulsarpb.BaseCommand{PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
			Partitions: proto.Uint32(0), RequestId: field(2), Response: proto.Int32(0)}})
	case codec.TypeProducer:
		return commandFrame(codec.TypeProducerSuccess, &pulsarpb.BaseCommand{ProducerSuccess: &pulsarpb.CommandProducerSuccess{
			RequestId: field(3), ProducerName: proto.String("pointsman-bench"), LastSequenceId: proto.Int64(-1), SchemaVersion: []byte{}}})
	case codec.TypeSubscribe:
		id := *field(4)
		f, err := bc.broker.newFeed(byte(id), subscriptionOf(cmd))
		if id > maxHandles {
			err = errors.New("consumer id above the broker's limit")
		}
		if err != nil {
			return commandFrame(codec.TypeError, &pulsarpb.BaseCommand{Error: &pulsarpb.CommandError{
				RequestId: field(5), Error: proto.Int32(int32(codec.ErrorNotAllowed)), Message: proto.String(err.Error())}})
		}
		bc.consumers = append(bc.consumers, f)
		return commandFrame(codec.TypeSuccess, &pulsarpb.BaseCommand{Success: &pulsarpb.CommandSuccess{RequestId: field(5)}})
	case codec.TypeCloseConsumer, codec.TypeCloseProducer:
		if id := *field(1); h.Type == codec.TypeCloseConsumer {
			for i, f := range bc.consumers {
				if uint64(f.handle) == id && f.off == 0 {
					bc.consumers = append(bc.consumers[:i], bc.consumers[i+1:]...)
					break
				}
			}
		}
		return commandFrame(codec.TypeSuccess, &pulsarpb.BaseCommand{Success: &pulsarpb.CommandSuccess{RequestId: field(2)}})
	}
	id := *field(1)
	return commandFrame(codec.TypeError, &pulsarpb.BaseCommand{Error: &pulsarpb.CommandError{
		RequestId: &id, Error: proto.Int32(int32(codec.ErrorNotAllowed)), Message: proto.String("the load harness's broker does not know " + h.Type.String())}})
}

// flush writes the answers, then messages. Nothing may come inside a message that is half written: answers wait for its end.
func (bc *brokerConn) flush(c *conn) {
	out := bc.broker.out
	bc.broker.out = out[:0]
	if bc.partial() != nil {
		bc.late = append(bc.late, out...)
	} else if len(out) > 0 {
		c.send(out)
	}
	bc.writable(c)
}

func (bc *brokerConn) partial() *feed {
	for _, f := range bc.consumers {
		if f.off > 0 {
			return f
		}
	}
	return nil
}

func (bc *brokerConn) writable(c *conn) {
	if f := bc.partial(); f != nil {
		f.permits -= c.pump(&f.stream, f.batch, 1)
		if f.off > 0 {
			return
		}
	}
	if len(bc.late) > 0 {
		c.send(bc.late)
		bc.late = bc.late[:0]
	}
	for _, f := range bc.consumers {
		if f.permits > 0 && !c.full && !c.ended {
			f.permits -= c.pump(&f.stream, f.batch, f.permits)
		}
	}
}

// closed forgets answers to the last frames, which would go to another client otherwise: TLS can tell of the end together with them.
func (bc *brokerConn) closed(*conn, error) { bc.broker.out = bc.broker.out[:0] }
