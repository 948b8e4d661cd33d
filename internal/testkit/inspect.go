package testkit

import (
	"encoding/binary"
	"hash/crc32"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Command is one command that a broker saw, whether a hook took it or not.
type Command struct {
	At      time.Time
	Broker  int
	Conn    uint64
	Type    codec.Type
	Cmd     *pulsarpb.BaseCommand // shared: not to be changed
	Payload int                   // bytes that followed the command
	seq     int
}

// ring keeps the newest commands, in no order.
type ring struct {
	commands []Command
	next     int // the one to be replaced when it is full
}

func (r *ring) add(e Command, size int) {
	if len(r.commands) < size {
		r.commands = append(r.commands, e)
		return
	}
	r.commands[r.next] = e
	r.next = (r.next + 1) % size
}

func (c *Cluster) record(conn *Conn, t codec.Type, cmd *pulsarpb.BaseCommand, payload int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry := Command{time.Now(), conn.broker.index, conn.id, t, cmd, payload, c.logged}
	c.logged++
	c.counts[t]++
	switch t {
	case codec.TypeSend, codec.TypeAck, codec.TypeFlow, codec.TypePing, codec.TypePong, codec.TypeRedeliver:
		c.data.add(entry, c.opts.LogSize)
	default:
		c.control.add(entry, c.opts.LogSize)
	}
	c.notify()
}

// Commands are the last commands that the cluster saw, oldest first; of the given types when there are any.
func (c *Cluster) Commands(types ...codec.Type) []Command {
	c.mu.Lock()
	defer c.mu.Unlock()
	var seen []Command
	for _, r := range []ring{c.data, c.control} {
		for _, e := range r.commands {
			if len(types) == 0 || slices.Contains(types, e.Type) {
				seen = append(seen, e)
			}
		}
	}
	slices.SortFunc(seen, func(a, b Command) int { return a.seq - b.seq })
	return seen
}

// Count is how many commands of a type the cluster ever saw.
func (c *Cluster) Count(t codec.Type) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[t]
}

// Kind is what a connection is used for.
type Kind string

// The kinds of connections.
const (
	KindSilent Kind = "silent" // has not said CONNECT
	KindIdle   Kind = "idle"   // has said nothing but CONNECT
	KindLookup Kind = "lookup" // has only asked
	KindData   Kind = "data"   // has, or had, producers or consumers
)

// ConnInfo describes a live connection.
type ConnInfo struct {
	ID        uint64
	Broker    int
	Remote    string
	Kind      Kind
	Connect   *pulsarpb.CommandConnect // nil before it; shared: not to be changed
	Producers int
	Consumers int
}

// Conns describes the live connections of all brokers.
func (c *Cluster) Conns() []ConnInfo {
	var infos []ConnInfo
	for _, b := range c.brokers {
		infos = append(infos, b.Conns()...)
	}
	return infos
}

// Conns describes the broker's live connections, oldest first.
func (b *Broker) Conns() []ConnInfo {
	conns := b.liveConns()
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	infos := make([]ConnInfo, 0, len(conns))
	for _, c := range conns {
		info := ConnInfo{
			ID: c.id, Broker: b.index, Remote: c.nc.RemoteAddr().String(), Kind: KindIdle, Connect: c.connect,
			Producers: len(c.producers), Consumers: len(c.consumers),
		}
		switch {
		case c.connect == nil:
			info.Kind = KindSilent
		case c.everUsed:
			info.Kind = KindData
		case c.lookups > 0:
			info.Kind = KindLookup
		}
		infos = append(infos, info)
	}
	return infos
}

// Conn is the live connection of that number, or nil.
func (c *Cluster) Conn(id uint64) *Conn {
	for _, b := range c.brokers {
		for _, conn := range b.liveConns() {
			if conn.id == id {
				return conn
			}
		}
	}
	return nil
}

// Accepted is how many connections the broker ever accepted.
func (b *Broker) Accepted() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted
}

// Accepted is how many connections the brokers ever accepted.
func (c *Cluster) Accepted() int {
	n := 0
	for _, b := range c.brokers {
		n += b.Accepted()
	}
	return n
}

// Topics are the names of the topics and partitions that exist here, in order.
func (c *Cluster) Topics() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return sortedKeys(c.topics)
}

// TopicInfo describes a topic.
type TopicInfo struct {
	Broker        int
	Stored        int   // entries that are still there
	Written       int64 // entries ever stored
	Bytes         int
	Producers     []string // names
	Subscriptions map[string]SubscriptionInfo
}

// SubscriptionInfo describes a subscription.
type SubscriptionInfo struct {
	Type      int32
	Durable   bool
	Consumers []string // names, the active one of a Failover subscription first
	Backlog   int      // entries that are not acknowledged
	Pending   int      // entries that consumers have and did not acknowledge
	Permits   int      // messages that consumers have asked for and not been sent
}

// Topic describes a topic; ok is false when it does not exist here.
func (c *Cluster) Topic(name string) (info TopicInfo, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topics[canonical(name)]
	if t == nil {
		return TopicInfo{}, false
	}
	info = TopicInfo{Broker: t.owner.index, Stored: len(t.entries), Written: t.written, Bytes: t.bytes,
		Subscriptions: map[string]SubscriptionInfo{}}
	for _, p := range t.producers {
		info.Producers = append(info.Producers, p.name)
	}
	for name, s := range t.subs {
		si := SubscriptionInfo{Type: s.typ, Durable: s.durable, Pending: len(s.pending)}
		for _, o := range s.consumers {
			si.Consumers = append(si.Consumers, o.name)
			si.Permits += max(o.permits, 0)
		}
		si.Backlog = s.backlog()
		info.Subscriptions[name] = si
	}
	return info, true
}

// Message is one stored entry: a message, a batch or a chunk.
type Message struct {
	Ledger, Entry  uint64
	At             time.Time
	Producer       string
	Sequence       uint64
	Metadata       *pulsarpb.MessageMetadata // shared: not to be changed
	Payload        []byte                    // shared: not to be changed
	Encoded        bool                      // compressed or encrypted
	ReplicatedFrom string
}

// Messages are the stored entries of a topic, oldest first.
func (c *Cluster) Messages(name string) []Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topics[canonical(name)]
	if t == nil {
		return nil
	}
	msgs := make([]Message, 0, len(t.entries))
	for _, e := range t.entries {
		msgs = append(msgs, Message{
			Ledger: e.ledger, Entry: e.entry, At: e.at, Producer: e.meta.GetProducerName(), Sequence: e.meta.GetSequenceId(),
			Metadata: e.meta.MessageMetadata, Payload: e.raw[e.meta.body:], Encoded: e.meta.encoded, ReplicatedFrom: e.from,
		})
	}
	return msgs
}

// Payloads are the payloads of the messages in the entry: one, or those of a batch. It returns nil when the entry is
// compressed, encrypted or broken.
func (m Message) Payloads() [][]byte {
	if m.Encoded {
		return nil
	}
	if m.Metadata.NumMessagesInBatch == nil {
		return [][]byte{m.Payload}
	}
	var payloads [][]byte
	for rest := m.Payload; len(rest) > 0; {
		if len(rest) < sizeLen {
			return nil
		}
		size := int(binary.BigEndian.Uint32(rest))
		if rest = rest[sizeLen:]; size > len(rest) {
			return nil
		}
		n := payloadSize(rest[:size])
		if rest = rest[size:]; n < 0 || n > len(rest) {
			return nil
		}
		payloads = append(payloads, rest[:n])
		rest = rest[n:]
	}
	return payloads
}

// payloadSize reads field 3, payload_size, of a SingleMessageMetadata; −1 when it is not there.
func payloadSize(src []byte) int {
	size := -1
	for len(src) > 0 {
		num, typ, n := protowire.ConsumeTag(src)
		if n < 0 {
			return -1
		}
		if num == 3 && typ == protowire.VarintType {
			v, k := protowire.ConsumeVarint(src[n:])
			if k < 0 {
				return -1
			}
			size = int(int32(v))
		}
		k := protowire.ConsumeFieldValue(num, typ, src[n:])
		if k < 0 {
			return -1
		}
		src = src[n+k:]
	}
	return size
}

// EncodeMessage is what follows the command of a SEND or MESSAGE: checksum, metadata and payload.
func EncodeMessage(meta *pulsarpb.MessageMetadata, payload []byte) []byte {
	m, err := proto.Marshal(meta)
	if err != nil {
		panic("testkit: metadata without its required fields: " + err.Error())
	}
	dst := append(make([]byte, 0, checksumLen+sizeLen+len(m)+len(payload)), 0x0e, 0x01, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(m)))
	dst = append(append(dst, m...), payload...)
	binary.BigEndian.PutUint32(dst[2:], crc32.Checksum(dst[checksumLen:], castagnoli))
	return dst
}
