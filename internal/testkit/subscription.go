package testkit

import (
	"cmp"
	"hash/fnv"
	"maps"
	"math/bits"
	"slices"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// The subscription types of the protocol.
const (
	Exclusive int32 = 0
	Shared    int32 = 1
	Failover  int32 = 2
	KeyShared int32 = 3
)

// subscription is a cursor on a topic and the consumers that share it. Guarded by cluster.mu.
type subscription struct {
	topic     *topic
	name      string
	typ       int32
	durable   bool
	consumers []*consumer // Exclusive, Failover: the active one first
	turn      int         // Shared: whose turn it is

	mark       int64              // everything up to here is acknowledged
	acked      map[int64]bool     // beyond mark
	partial    map[int64][]int64  // batches of which a part is acknowledged: the bits that are left
	read       int64              // next position that was never delivered
	replay     []int64            // to be delivered again, in order
	pending    map[int64]delivery // delivered, not acknowledged
	deliveries map[int64]uint32   // how often it came back
	keys       map[string]keyHold // Key_Shared: who has something of a key pending
}

// delivery is who has an entry.
type delivery struct {
	to  *consumer
	key string
}

// keyHold is a consumer and how many entries of one key it has pending.
type keyHold struct {
	to *consumer
	n  int
}

// consumer is a client's handle on a subscription. Guarded by cluster.mu.
type consumer struct {
	conn     *Conn
	id       uint64
	name     string
	priority int32
	sub      *subscription
	permits  int
	epoch    uint64
	hasEpoch bool
	active   bool // as told to the client
}

// newSubscription adds a subscription that begins at position start.
func newSubscription(t *topic, name string, typ int32, durable bool, start int64) *subscription {
	s := &subscription{topic: t, name: name, typ: typ, durable: durable}
	s.reset(start)
	t.subs[name] = s
	return s
}

// reset moves the cursor so that the entry at start comes next.
func (s *subscription) reset(start int64) {
	s.mark, s.read = start-1, start
	s.acked, s.partial, s.replay = map[int64]bool{}, map[int64][]int64{}, nil
	s.pending, s.deliveries, s.keys = map[int64]delivery{}, map[int64]uint32{}, map[string]keyHold{}
}

// isAcked tells whether a position is done with.
func (s *subscription) isAcked(pos int64) bool { return pos <= s.mark || s.acked[pos] }

// peek is the position to be delivered next.
func (s *subscription) peek() (int64, bool) {
	for len(s.replay) > 0 && s.isAcked(s.replay[0]) {
		s.replay = s.replay[1:]
	}
	if len(s.replay) > 0 {
		return s.replay[0], true
	}
	for s.read = max(s.read, s.topic.first); s.read < s.topic.end() && s.isAcked(s.read); s.read++ {
	}
	return s.read, s.read < s.topic.end()
}

// dispatch delivers as long as there is something to deliver and someone who may have it.
func (s *subscription) dispatch() {
	for {
		pos, ok := s.peek()
		if !ok {
			return
		}
		e := s.topic.at(pos)
		to := s.pick(e)
		if to == nil {
			return
		}
		if len(s.replay) > 0 {
			s.replay = s.replay[1:]
		} else {
			s.read++
		}
		s.pending[pos] = delivery{to, e.meta.key}
		if s.typ == KeyShared {
			s.keys[e.meta.key] = keyHold{to, s.keys[e.meta.key].n + 1}
		}
		to.deliver(e, s.deliveries[pos], s.partial[pos])
	}
}

// deliverNow offers an entry of a non-persistent topic, which is lost when nobody may have it.
func (s *subscription) deliverNow(e *entry) {
	if to := s.pick(e); to != nil {
		to.deliver(e, 0, nil)
	}
}

// pick is the consumer that e goes to now, or nil.
func (s *subscription) pick(e *entry) *consumer {
	if len(s.consumers) == 0 {
		return nil
	}
	switch s.typ {
	case Shared:
		for range s.consumers {
			s.turn = (s.turn + 1) % len(s.consumers)
			if c := s.consumers[s.turn]; c.mayTake() {
				return c
			}
		}
		return nil
	case KeyShared:
		c := s.keyOwner(e.meta.key)
		if c.mayTake() {
			return c
		}
		return nil // order per key: nobody else may overtake
	default:
		if c := s.consumers[0]; c.mayTake() {
			return c
		}
		return nil
	}
}

// keyOwner is the consumer of a key: who has something of it pending keeps it.
func (s *subscription) keyOwner(key string) *consumer {
	if hold, ok := s.keys[key]; ok {
		return hold.to
	}
	// The highest hash of key and name, so that a newcomer takes keys only for itself.
	return slices.MaxFunc(s.consumers, func(a, b *consumer) int { return cmp.Compare(a.weight(key), b.weight(key)) })
}

func (c *consumer) weight(key string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(key))
	h.Write([]byte{0})
	h.Write([]byte(c.name))
	h.Write(beBytes(int64(c.id)))
	return bits.ReverseBytes64(h.Sum64() * 0x9e3779b97f4a7c15)
}

func (c *consumer) mayTake() bool { return c.permits > 0 && c.conn.hasRoom() }

// deliver sends an entry. left are the bits of a batch that are not acknowledged yet; nil: all.
func (c *consumer) deliver(e *entry, redelivered uint32, left []int64) {
	n := int(e.meta.GetNumMessagesInBatch())
	if left != nil {
		n = 0
		for _, w := range left {
			n += bits.OnesCount64(uint64(w))
		}
	}
	c.permits -= n
	msg := &pulsarpb.CommandMessage{
		ConsumerId: &c.id, MessageId: c.sub.topic.messageID(e), AckSet: left,
	}
	if redelivered > 0 {
		msg.RedeliveryCount = &redelivered
	}
	if c.hasEpoch {
		msg.ConsumerEpoch = ptr(c.epoch)
	}
	head := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypeMessage), Message: msg})
	head = withPayload(head, len(e.raw))
	c.conn.SendRaw(head, e.raw)
}

// withPayload corrects the total size of a frame that n bytes of payload will follow.
func withPayload(frame []byte, n int) []byte {
	total := len(frame) - 4 + n
	frame[0], frame[1], frame[2], frame[3] = byte(total>>24), byte(total>>16), byte(total>>8), byte(total)
	return frame
}

func (t *topic) messageID(e *entry) *pulsarpb.MessageIdData {
	return &pulsarpb.MessageIdData{LedgerId: ptr(e.ledger), EntryId: ptr(e.entry), Partition: ptr(t.partition)}
}

// ack marks a position as done.
func (s *subscription) ack(pos int64) {
	if s.isAcked(pos) {
		return
	}
	s.acked[pos] = true
	s.forgetPending(pos)
	delete(s.partial, pos)
	delete(s.deliveries, pos)
	for s.acked[s.mark+1] {
		s.mark++
		delete(s.acked, s.mark)
	}
	s.topic.cluster.signalAcks()
}

// ackPart marks the messages of a batch as done whose bits are not in left.
func (s *subscription) ackPart(pos int64, left []int64) {
	if s.isAcked(pos) {
		return
	}
	have := s.partial[pos]
	rest := slices.Clone(left)
	any := false
	for i := range rest {
		if i < len(have) {
			rest[i] &= have[i]
		}
		any = any || rest[i] != 0
	}
	if !any {
		s.ack(pos)
		return
	}
	s.partial[pos] = rest
}

// ackTo marks everything up to pos as done.
func (s *subscription) ackTo(pos int64) {
	if pos <= s.mark {
		return
	}
	s.mark = pos
	for s.acked[s.mark+1] {
		s.mark++
	}
	s.read = max(s.read, s.mark+1)
	maps.DeleteFunc(s.acked, func(p int64, _ bool) bool { return p <= s.mark })
	maps.DeleteFunc(s.partial, func(p int64, _ []int64) bool { return p <= s.mark })
	maps.DeleteFunc(s.deliveries, func(p int64, _ uint32) bool { return p <= s.mark })
	for p := range s.pending {
		if p <= s.mark {
			s.forgetPending(p)
		}
	}
	s.topic.cluster.signalAcks()
}

func (s *subscription) forgetPending(pos int64) {
	d, ok := s.pending[pos]
	if !ok {
		return
	}
	delete(s.pending, pos)
	if hold := s.keys[d.key]; hold.n > 1 {
		s.keys[d.key] = keyHold{hold.to, hold.n - 1}
	} else {
		delete(s.keys, d.key)
	}
}

// again puts what one consumer has pending, and match agrees to, back in line. count tells that it counts as a redelivery.
func (s *subscription) again(of *consumer, count bool, match func(pos int64) bool) {
	for pos, d := range s.pending {
		if d.to != of || !match(pos) {
			continue
		}
		s.forgetPending(pos)
		if count {
			s.deliveries[pos]++
		}
		s.replay = append(s.replay, pos)
	}
	slices.Sort(s.replay)
	s.replay = slices.Compact(s.replay)
}

// add lets a consumer join.
func (s *subscription) add(c *consumer) {
	s.consumers = append(s.consumers, c)
	c.conn.consumers[c.id] = c
	c.conn.everUsed = true
	s.elect()
}

// elect puts the active consumer of a Failover subscription first and tells those for whom it changed.
func (s *subscription) elect() {
	if s.typ != Failover || len(s.consumers) == 0 {
		return
	}
	slices.SortStableFunc(s.consumers, func(a, b *consumer) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.name, b.name))
	})
	if p := s.topic.partition; p > 0 {
		i := int(p) % len(s.consumers)
		s.consumers[0], s.consumers[i] = s.consumers[i], s.consumers[0]
	}
	for i, c := range s.consumers {
		if active := i == 0; active != c.active {
			c.active = active
			if !active {
				s.again(c, false, func(int64) bool { return true })
			}
			c.conn.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeActiveConsumerChange),
				ActiveConsumerChange: &pulsarpb.CommandActiveConsumerChange{ConsumerId: &c.id, IsActive: &active}})
		}
	}
}

// remove lets a consumer leave; what it had pending goes to the others.
func (c *consumer) remove() {
	s := c.sub
	if c.conn.consumers[c.id] != c {
		return
	}
	delete(c.conn.consumers, c.id)
	s.consumers = slices.DeleteFunc(s.consumers, func(x *consumer) bool { return x == c })
	s.again(c, false, func(int64) bool { return true })
	if !s.durable && len(s.consumers) == 0 {
		delete(s.topic.subs, s.name)
		return
	}
	s.elect()
	s.dispatch()
}

// closeCommand is what tells a client that its consumer is gone, naming a broker to go to when url is set.
func (c *consumer) closeCommand(url string) *pulsarpb.BaseCommand {
	cmd := &pulsarpb.CommandCloseConsumer{ConsumerId: &c.id, RequestId: ptr(codec.NoRequest)}
	if url != "" {
		cmd.AssignedBrokerServiceUrl, cmd.AssignedBrokerServiceUrlTls = urlFields(url)
	}
	return &pulsarpb.BaseCommand{Type: typeOf(codec.TypeCloseConsumer), CloseConsumer: cmd}
}
