package testkit

import (
	"fmt"
	"math"
	"slices"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// The access modes of the protocol that are not shared.
const (
	accessExclusive            int32 = 1
	accessWaitForExclusive     int32 = 2
	accessExclusiveWithFencing int32 = 3
)

// producer is a client's handle for publishing. Guarded by cluster.mu.
type producer struct {
	conn      *Conn
	id        uint64
	name      string
	topic     *topic
	access    int32
	epoch     uint64
	userNamed bool
	request   uint64 // of its PRODUCER
}

// served returns the topic that a PRODUCER or SUBSCRIBE names, or answers why this broker does not serve it.
func (c *Conn) served(cmd *pulsarpb.BaseCommand) *topic {
	cl, name := c.broker.cluster, canonical(topicOf(cmd))
	switch {
	case cl.owner(name) != c.broker:
		c.Fail(cmd, codec.ErrorServiceNotReady,
			"namespace bundle of "+name+" is not served by this instance, please redo the lookup")
	case cl.partitions[name] > 0:
		c.Fail(cmd, codec.ErrorNotAllowed, name+" is partitioned: its partitions can be used, itself cannot")
	case cl.topics[name] == nil && cl.opts.NoAutoCreation:
		c.Fail(cmd, codec.ErrorTopicNotFound, "topic not found: "+name)
	default:
		return cl.topic(name)
	}
	return nil
}

func (c *Conn) handleProducer(cmd *pulsarpb.BaseCommand, mayProve bool) {
	cl, r := c.broker.cluster, cmd.GetProducer()
	if p := c.producers[r.GetProducerId()]; p != nil {
		if p.topic.name == canonical(r.GetTopic()) {
			p.answer(r.GetRequestId(), true, nil) // a retry of what already succeeded
		} else {
			c.Fail(cmd, codec.ErrorUnknown, fmt.Sprintf("producer id %d is in use for %s", p.id, p.topic.name))
		}
		return
	}
	t := c.served(cmd)
	if t == nil {
		return
	}
	p := &producer{
		conn: c, id: r.GetProducerId(), name: r.GetProducerName(), topic: t, access: r.GetProducerAccessMode(),
		epoch: r.GetEpoch(), userNamed: r.GetUserProvidedProducerName(), request: r.GetRequestId(),
	}
	if p.name == "" {
		cl.nextName++
		p.name = fmt.Sprintf("%s-%d-%d", cl.name, c.broker.index, cl.nextName)
	}
	if i := slices.IndexFunc(t.producers, func(o *producer) bool { return o.name == p.name }); i >= 0 {
		old := t.producers[i]
		switch {
		case !p.userNamed && p.epoch > old.epoch:
			old.disconnect("")
		case old.conn != c && mayProve:
			c.afterProof(old.conn, func() { c.handleProducer(cmd, false) })
			return
		default:
			c.Fail(cmd, codec.ErrorProducerBusy, fmt.Sprintf("producer with name %q is already connected to %s", p.name, t.name))
			return
		}
	}
	if r.TopicEpoch != nil && r.GetTopicEpoch() < t.epoch {
		c.Fail(cmd, codec.ErrorProducerFenced, fmt.Sprintf("topic epoch has already moved to %d", t.epoch))
		return
	}
	schema := cl.addSchema(t.name, r.GetSchema())
	exclusive := slices.ContainsFunc(t.producers, func(o *producer) bool { return o.access != 0 })
	switch {
	case p.access == accessExclusiveWithFencing:
		for _, o := range slices.Clone(t.producers) {
			o.disconnect("")
		}
	case p.access == accessExclusive && len(t.producers) > 0:
		c.Fail(cmd, codec.ErrorProducerFenced, t.name+" has other producers")
		return
	case p.access == accessWaitForExclusive && len(t.producers) > 0:
		t.waiting = append(t.waiting, p)
		c.producers[p.id] = p
		p.answer(p.request, false, schema)
		return
	case p.access == 0 && exclusive:
		c.Fail(cmd, codec.ErrorProducerBusy, t.name+" has an exclusive producer")
		return
	}
	c.producers[p.id] = p
	delete(c.dismissed, p.id)
	c.everUsed = true
	p.join(r.TopicEpoch != nil)
	p.answer(p.request, true, schema)
}

// join lets a producer in. An exclusive one begins an epoch, unless it comes back with the current one.
func (p *producer) join(back bool) {
	t := p.topic
	t.producers = append(t.producers, p)
	if p.access == 0 {
		return
	}
	if t.hadEpoch && !back {
		t.epoch++
	}
	t.hadEpoch = true
}

func (p *producer) answer(request uint64, ready bool, schema []byte) {
	ok := &pulsarpb.CommandProducerSuccess{
		RequestId: &request, ProducerName: &p.name, LastSequenceId: ptr(int64(-1)), SchemaVersion: schema, ProducerReady: &ready,
	}
	if schema == nil {
		ok.SchemaVersion = []byte{} // a broker sends the empty version as well
	}
	if p.access != 0 && ready {
		ok.TopicEpoch = ptr(p.topic.epoch)
	}
	p.conn.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeProducerSuccess), ProducerSuccess: ok})
}

// remove lets a producer leave; one that waits for exclusive access takes its place.
func (p *producer) remove() {
	if p.conn.producers[p.id] != p {
		return
	}
	t := p.topic
	delete(p.conn.producers, p.id)
	same := func(o *producer) bool { return o == p }
	t.producers = slices.DeleteFunc(t.producers, same)
	t.waiting = slices.DeleteFunc(t.waiting, same)
	if len(t.producers) == 0 && len(t.waiting) > 0 {
		next := t.waiting[0]
		t.waiting = t.waiting[1:]
		next.join(false)
		next.answer(next.request, true, nil)
	}
}

// disconnect tells the client that its producer is gone, naming a broker to go to when url is set.
func (p *producer) disconnect(url string) {
	cmd := &pulsarpb.CommandCloseProducer{ProducerId: &p.id, RequestId: ptr(codec.NoRequest)}
	if url != "" {
		cmd.AssignedBrokerServiceUrl, cmd.AssignedBrokerServiceUrlTls = urlFields(url)
	}
	p.conn.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeCloseProducer), CloseProducer: cmd})
	p.conn.dismissed[p.id] = true
	p.remove()
}

// handleSend stores a message. It returns false when the connection must end.
func (c *Conn) handleSend(cmd *pulsarpb.BaseCommand, payload []byte) bool {
	r := cmd.GetSend()
	p := c.producers[r.GetProducerId()]
	if p == nil || !slices.Contains(p.topic.producers, p) {
		// Brokers ignore the late messages of a producer that they have closed. Of any other that does not exist they
		// close the whole connection.
		return c.dismissed[r.GetProducerId()]
	}
	meta, err := parseMetadata(payload)
	if err != nil {
		c.Fail(cmd, codec.ErrorChecksum, err.Error())
		return true
	}
	if !p.topic.hasRoom(len(payload)) {
		c.Fail(cmd, codec.ErrorPersistence, fmt.Sprintf("%s holds %d unacknowledged bytes, which is what MaxTopicBytes allows",
			p.topic.name, p.topic.bytes))
		return true
	}
	e := &entry{raw: payload, meta: meta, peer: -1, from: meta.GetReplicatedFrom()}
	for _, property := range meta.GetProperties() {
		if e.from != "" && property.GetKey() == sourceProperty {
			e.source = property.GetValue()
		}
	}
	p.topic.append(e)
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeSendReceipt), SendReceipt: &pulsarpb.CommandSendReceipt{
		ProducerId: r.ProducerId, SequenceId: r.SequenceId, HighestSequenceId: ptr(highest(r)),
		MessageId: &pulsarpb.MessageIdData{LedgerId: &e.ledger, EntryId: &e.entry},
	}})
	return true
}

// highest is the highest sequence id of a SEND, as it is told in the receipt: −1 unless it is a batch that says so.
func highest(r *pulsarpb.CommandSend) uint64 {
	if r.HighestSequenceId != nil && r.GetSequenceId() <= r.GetHighestSequenceId() {
		return r.GetHighestSequenceId()
	}
	return math.MaxUint64
}

func (c *Conn) handleSubscribe(cmd *pulsarpb.BaseCommand, mayProve bool) {
	r := cmd.GetSubscribe()
	if s := c.consumers[r.GetConsumerId()]; s != nil {
		if s.sub.topic.name == canonical(r.GetTopic()) && s.sub.name == r.GetSubscription() {
			c.succeed(cmd) // a retry of what already succeeded
		} else {
			c.Fail(cmd, codec.ErrorUnknown, fmt.Sprintf("consumer id %d is in use for %s", s.id, s.sub.topic.name))
		}
		return
	}
	t := c.served(cmd)
	if t == nil {
		return
	}
	s := t.subs[r.GetSubscription()]
	if s != nil && len(s.consumers) > 0 {
		switch holder := s.consumers[0]; {
		case s.typ != r.GetSubType():
			c.Fail(cmd, codec.ErrorConsumerBusy, fmt.Sprintf("subscription %q of %s is of a different type", s.name, t.name))
			return
		case s.typ == Exclusive && holder.conn != c && mayProve:
			c.afterProof(holder.conn, func() { c.handleSubscribe(cmd, false) })
			return
		case s.typ == Exclusive:
			c.Fail(cmd, codec.ErrorConsumerBusy, fmt.Sprintf("exclusive consumer is already connected to %q of %s", s.name, t.name))
			return
		}
	}
	if s == nil {
		s = newSubscription(t, r.GetSubscription(), r.GetSubType(), r.GetDurable(), t.startOf(r))
	}
	s.typ = r.GetSubType()
	if sc := r.GetSchema(); sc != nil {
		c.broker.cluster.addSchema(t.name, sc)
	}
	name := r.GetConsumerName()
	if name == "" {
		c.broker.cluster.nextName++
		name = fmt.Sprintf("%s-%d-%d", c.broker.cluster.name, c.broker.index, c.broker.cluster.nextName)
	}
	c.succeed(cmd)
	s.add(&consumer{
		conn: c, id: r.GetConsumerId(), name: name, priority: r.GetPriorityLevel(), sub: s,
		epoch: r.GetConsumerEpoch(), hasEpoch: r.ConsumerEpoch != nil,
	})
}

// startOf is the position at which a new subscription begins.
func (t *topic) startOf(r *pulsarpb.CommandSubscribe) int64 {
	if id := r.GetStartMessageId(); id != nil && !r.GetDurable() {
		return t.seekTo(id)
	}
	if r.GetInitialPosition() == 0 {
		return t.end()
	}
	return t.first
}

// seekTo is the position that a message id means, the two sentinels included: the entry itself, or what comes after it.
func (t *topic) seekTo(id *pulsarpb.MessageIdData) int64 {
	switch id.GetLedgerId() {
	case math.MaxUint64: // −1: earliest
		return t.first
	case math.MaxInt64: // latest
		return t.end()
	}
	if id.GetEntryId() == math.MaxUint64 { // −1: before the first of the ledger
		return t.find(id.GetLedgerId(), 0)
	}
	return t.find(id.GetLedgerId(), id.GetEntryId())
}

// handleConsumerCommand handles what names a consumer that must exist.
func (c *Conn) handleConsumerCommand(t codec.Type, cmd *pulsarpb.BaseCommand) {
	id, _ := subField(cmd, "consumer_id")
	s := c.consumers[id.Uint()]
	if s == nil {
		if requestID(cmd) != codec.NoRequest && t != codec.TypeAck {
			c.Fail(cmd, codec.ErrorMetadata, "Consumer not found")
		}
		return
	}
	switch t {
	case codec.TypeFlow:
		s.permits += int(cmd.GetFlow().GetMessagePermits())
		s.sub.dispatch()
	case codec.TypeAck:
		s.handleAck(cmd.GetAck())
	case codec.TypeRedeliver:
		s.handleRedeliver(cmd.GetRedeliverUnacknowledgedMessages())
	case codec.TypeUnsubscribe:
		if len(s.sub.consumers) > 1 && !cmd.GetUnsubscribe().GetForce() {
			c.Fail(cmd, codec.ErrorMetadata, fmt.Sprintf("subscription %q has other consumers", s.sub.name))
			return
		}
		for _, o := range slices.Clone(s.sub.consumers) {
			if o != s {
				o.conn.Send(o.closeCommand(""))
			}
			o.remove()
		}
		delete(s.sub.topic.subs, s.sub.name)
		c.succeed(cmd)
	case codec.TypeSeek:
		s.handleSeek(cmd)
	case codec.TypeGetLastMessageID:
		s.handleGetLastMessageID(cmd.GetGetLastMessageId())
	case codec.TypeConsumerStats:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeConsumerStatsResponse),
			ConsumerStatsResponse: &pulsarpb.CommandConsumerStatsResponse{RequestId: cmd.GetConsumerStats().RequestId}})
	}
}

func (s *consumer) handleAck(r *pulsarpb.CommandAck) {
	for _, id := range r.GetMessageId() {
		pos, known := s.sub.topic.lookup(id.GetLedgerId(), id.GetEntryId())
		switch cumulative := r.GetAckType() == 1; {
		case cumulative && len(id.GetAckSet()) == 0:
			if !known {
				pos = s.sub.topic.find(id.GetLedgerId(), id.GetEntryId()) - 1
			}
			s.sub.ackTo(pos)
		case cumulative && known:
			s.sub.ackTo(pos - 1)
			s.sub.ackPart(pos, id.GetAckSet())
		case known && len(id.GetAckSet()) == 0:
			s.sub.ack(pos)
		case known:
			s.sub.ackPart(pos, id.GetAckSet())
		}
	}
	if r.RequestId != nil {
		s.conn.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeAckResponse), AckResponse: &pulsarpb.CommandAckResponse{
			ConsumerId: &s.id, RequestId: r.RequestId}})
	}
	s.sub.dispatch() // a key may be free now
}

func (s *consumer) handleRedeliver(r *pulsarpb.CommandRedeliverUnacknowledgedMessages) {
	if r.ConsumerEpoch != nil {
		s.epoch = r.GetConsumerEpoch()
	}
	named := map[int64]bool{}
	for _, id := range r.GetMessageIds() {
		if pos, ok := s.sub.topic.lookup(id.GetLedgerId(), id.GetEntryId()); ok {
			named[pos] = true
		}
	}
	s.sub.again(s, true, func(pos int64) bool { return len(r.GetMessageIds()) == 0 || named[pos] })
	s.sub.dispatch()
}

// handleSeek moves the cursor. Like a broker it closes the subscription's consumers first; the clients come back.
func (s *consumer) handleSeek(cmd *pulsarpb.BaseCommand) {
	r, sub := cmd.GetSeek(), s.sub
	var start int64
	if r.MessageId != nil {
		start = sub.topic.seekTo(r.GetMessageId())
	} else {
		for start = sub.topic.first; start < sub.topic.end(); start++ {
			if sub.topic.at(start).meta.GetPublishTime() >= r.GetMessagePublishTime() {
				break
			}
		}
	}
	durable := sub.durable
	sub.durable = true // or the subscription would end with its consumers
	for _, o := range slices.Clone(sub.consumers) {
		o.conn.Send(o.closeCommand(""))
		o.remove()
	}
	sub.durable = durable
	sub.reset(start)
	if left := r.GetMessageId().GetAckSet(); len(left) > 0 && start < sub.topic.end() {
		sub.partial[start] = slices.Clone(left)
	}
	s.conn.succeed(cmd)
}

func (s *consumer) handleGetLastMessageID(r *pulsarpb.CommandGetLastMessageId) {
	t := s.sub.topic
	last := &pulsarpb.MessageIdData{LedgerId: ptr(codec.NoRequest), EntryId: ptr(codec.NoRequest), Partition: &t.partition}
	if n := t.end(); n > t.first {
		e := t.at(n - 1)
		last = t.messageID(e)
		if e.meta.NumMessagesInBatch != nil {
			last.BatchIndex = ptr(e.meta.GetNumMessagesInBatch() - 1)
		}
	}
	if last.BatchIndex == nil {
		last.BatchIndex = ptr(int32(-1))
	}
	resp := &pulsarpb.CommandGetLastMessageIdResponse{RequestId: r.RequestId, LastMessageId: last}
	if m := s.sub.mark; m >= t.first && m < t.end() {
		resp.ConsumerMarkDeletePosition = t.messageID(t.at(m))
	} else {
		resp.ConsumerMarkDeletePosition = &pulsarpb.MessageIdData{LedgerId: ptr(t.ledger), EntryId: ptr(codec.NoRequest)}
	}
	s.conn.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetLastMessageIDResponse), GetLastMessageIdResponse: resp})
}

// Unload moves a topic to another broker (nil: it stays) and starts a new ledger: its producers and consumers are
// closed, and told where to go when assign is set.
func (c *Cluster) Unload(name string, to *Broker, assign bool) error {
	return c.evict(name, func(t *topic) (string, bool) {
		if to != nil {
			t.owner = to
		}
		if t.roll(); assign {
			return t.owner.URL(), false
		}
		return "", false
	})
}

// Migrate tells a topic's clients that the topic is now served at url, of another cluster, by TOPIC_MIGRATED.
func (c *Cluster) Migrate(name, url string) error {
	return c.evict(name, func(*topic) (string, bool) { return url, true })
}

// evict closes what a topic's clients have open, after decide said which URL they are told and with which command.
func (c *Cluster) evict(name string, decide func(*topic) (url string, migrated bool)) error {
	name = canonical(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topics[name]
	if t == nil {
		return fmt.Errorf("cluster %s has no topic %s", c.name, name)
	}
	url, migrated := decide(t)
	t.transactions = 0
	for _, p := range slices.Concat(t.producers, t.waiting) {
		if migrated {
			p.conn.sendMigrated(p.id, 0, url)
		}
		p.disconnect(unless(migrated, url))
	}
	for _, s := range t.subs {
		for _, o := range slices.Clone(s.consumers) {
			if migrated {
				o.conn.sendMigrated(o.id, 1, url)
			}
			o.conn.Send(o.closeCommand(unless(migrated, url)))
			o.remove()
		}
	}
	c.notify()
	return nil
}

func unless(not bool, s string) string {
	if not {
		return ""
	}
	return s
}

func (c *Conn) sendMigrated(id uint64, kind int32, url string) {
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeTopicMigrated), TopicMigrated: &pulsarpb.CommandTopicMigrated{
		ResourceId: &id, ResourceType: &kind, BrokerServiceUrl: &url}})
}

// Publish stores a message as if a producer of that name had sent it.
func (c *Cluster) Publish(name, producerName string, sequence uint64, payload []byte) {
	meta := &pulsarpb.MessageMetadata{
		ProducerName: &producerName, SequenceId: &sequence, PublishTime: ptr(uint64(time.Now().UnixMilli())),
	}
	raw := EncodeMessage(meta, payload)
	m, err := parseMetadata(raw)
	if err != nil {
		panic("testkit: its own message cannot be read: " + err.Error())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topic(canonical(name))
	t.append(&entry{raw: raw, meta: m, peer: -1})
	c.notify()
}

// Transactions says how many open transactions the statistics of a topic tell of; a broker that loads the topic anew knows none.
func (c *Cluster) Transactions(name string, open int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.topic(canonical(name)).transactions = open
}

// Acknowledge marks entries of a topic as done for a subscription, which begins at the first one when it does not exist: those whose number, counted from the
// oldest that is there, done agrees to.
func (c *Cluster) Acknowledge(name, subscription string, done func(n int) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.topic(canonical(name))
	s := t.subs[subscription]
	if s == nil {
		s = newSubscription(t, subscription, Shared, true, t.first)
	}
	for pos := t.first; pos < t.end(); pos++ {
		if done(int(pos - t.first)) {
			s.ack(pos)
		}
	}
	c.notify()
}
