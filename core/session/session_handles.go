package session

import (
	"fmt"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
	"pointsman/core/switching"
)

// handleState is how a producer or consumer is doing.
type handleState uint8

const (
	handleCreating handleState = iota // the broker has not answered yet
	handleLive
	handleEvicting // a producer whose SENDs are dropped, while receipts of forwarded ones are still delivered
	handleEvicted  // the client and the broker were told; frames of the id are dropped both ways
)

// handle is one producer or consumer of a session. Loop-owned.
type handle struct {
	s        *Session
	leg      *leg
	id       uint64
	producer bool
	state    handleState
	topic    *topicHandles // nil once it is out of the index
	pos      int           // in topic.list
	full     string        // canonical topic name with partition suffix
	req      uint64        // of its creation
	name     string        // a producer's, as the broker has it
	gate     switching.Gate
	sub      string  // a consumer's subscription
	reader   *reader // nil but for what reads the rest of a cluster that the topic is leaving
	carried  *carried
	waiting  *translation
	tag      uint64 // epoch in the message ids that the client sees; 0: none

	fleeting bool      // a consumer that no cluster remembers: a reader
	given    bool      // a consumer that has been given a message
	judged   bool      // its frames are judged one by one: its topic moves, it is evicting or evicted, or it is such a reader
	again    bool      // creating: it was live when the client asked for it once more
	answered bool      // creating: the broker has answered, and will once more when the producer is ready
	owed     bool      // it is a debt
	overdue  time.Time // evicting: when it stops waiting for receipts
	since    time.Time // evicted: when
	move     *eviction // to be closed: who counts it
	motion   *motion   // of a moving topic
	waiter   *parked   // evicted: the PRODUCER or SUBSCRIBE that waits for the broker's answer to our CLOSE
}

// pendingRequest is a request whose answer the session has to see.
type pendingRequest struct {
	kind    pendingKind
	h       *handle
	created uint64 // request id of h's creation at that time
}

type pendingKind uint8

const (
	pendingCreate      pendingKind = iota
	pendingUnsubscribe             // the client's, forwarded
	pendingSeek                    // the client's, forwarded
	pendingClose                   // our own, its answer is swallowed
	pendingLastID                  // the client's GET_LAST_MESSAGE_ID, forwarded
	pendingOwed                    // the client's CLOSE_PRODUCER behind what the broker has not answered yet
	pendingAck                     // the client's ACK that wants an answer, forwarded by an extra leg
	pendingReader                  // our own GET_LAST_MESSAGE_ID, about a reader that is given nothing
	pendingOrphan                  // a creation that was refused meanwhile: its late answer is swallowed
)

// moves tells whether a fence waits for the answer: the subscription is carried as it is then, and must not be moved afterwards.
func (k pendingKind) moves() bool { return k == pendingUnsubscribe || k == pendingSeek }

// producer finds a producer by id; most frames are about the one before.
func (s *Session) producer(id uint64) *handle {
	if p := s.lastP; p != nil && p.id == id {
		return p
	}
	p := s.producers[id]
	if p != nil {
		s.lastP = p
	}
	return p
}

func (s *Session) consumer(id uint64) *handle {
	if c := s.lastC; c != nil && c.id == id {
		return c
	}
	c := s.consumers[id]
	if c != nil {
		s.lastC = c
	}
	return c
}

// admit decides whether a PRODUCER, or the SUBSCRIBE c, may go to a leg, and to which: the map rules, whatever the client remembers.
func (s *Session) admit(now time.Time, frame []byte, name string, req, id uint64, c *pulsarpb.CommandSubscribe) (h *handle, ok bool) {
	producer := c == nil
	topic, err := route.ParseTopic(name)
	if err != nil {
		s.deny(RefusedTopicName, req, codec.ErrorInvalidTopicName, name, err.Error())
		return nil, false
	}
	d := s.sh.cfg.Table().Decide(topic, s.sh.cfg.DefaultCluster)
	if fault := undecidedText(d, name); fault != "" {
		s.deny(RefusedUnmapped, req, codec.ErrorServiceNotReady, name, fault)
		return nil, false
	}
	kind := codec.TypeSubscribe
	if producer {
		kind = codec.TypeProducer
	}
	if d.State != route.StateActive && s.sh.holds(d, kind) {
		s.parkCreation(now, s.sh.movingTopic(topic.Base(), d), nil, kind, frame, name, req, id)
		return nil, false
	}
	if producer && s.sh.mapTooOld() {
		s.parkCreation(now, nil, nil, kind, frame, name, req, id)
		return nil, false
	}
	at := s.sh.placeOf(topic, d, c)
	if at.wait {
		s.parkCreation(now, s.sh.movingTopic(topic.Base(), d), nil, kind, frame, name, req, id)
		return nil, false
	}
	far := at.cluster != s.leg.cluster
	if far && at.cluster == d.Cluster {
		s.deny(RefusedWrongCluster, req, codec.ErrorServiceNotReady, name,
			fmt.Sprintf("topic %s is mapped to cluster %q (epoch %d), this connection leads to cluster %q: look the topic up again", name, d.Cluster, d.Epoch, s.leg.cluster))
		return nil, false
	}
	handles := &s.consumers
	if producer {
		handles = &s.producers
	}
	old := (*handles)[id]
	if old != nil {
		// For an id that it has, the broker answers for the one that it has, whatever the command says.
		switch {
		case old.state == handleEvicting, old.state == handleEvicted && old.gate.Reopen() == switching.Hold, old.state < handleEvicting && old.damaged():
			s.parkCreation(now, nil, old, kind, frame, name, req, id)
			return nil, false
		case old.state == handleEvicted: // remembered until there is a new one
		case old.state == handleCreating && old.leg.cluster == at.cluster:
			s.deny(RefusedIDInUse, req, codec.ErrorServiceNotReady, name, fmt.Sprintf("the broker has not answered the request before for id %d yet: try again, or close it first", id))
			return nil, false
		case old.full != topic.Full():
			s.deny(RefusedIDInUse, req, codec.ErrorNotAllowed, name, fmt.Sprintf("id %d is that of %s on this connection: close it first", id, old.full))
			return nil, false
		case old.leg.cluster != at.cluster:
			s.deny(RefusedMoved, req, codec.ErrorServiceNotReady, name, fmt.Sprintf("topic %s is moving from cluster %q to cluster %q: try again", name, old.leg.cluster, at.cluster))
			return nil, false
		default:
			old.state, old.again, old.answered, old.req, old.gate.Epoch = handleCreating, true, false, req, d.Epoch
			s.expect(now, req, pendingCreate, old)
			return old, true
		}
	}
	if old == nil && len(s.producers)+len(s.consumers) >= s.sh.cfg.MaxHandles {
		s.deny(RefusedTooManyHandles, req, codec.ErrorNotAllowed, name, fmt.Sprintf("this connection has %d producers and consumers, the limit of the proxy", s.sh.cfg.MaxHandles))
		return nil, false
	}
	l := s.leg
	if far {
		if l = s.sh.via; l == nil || l.dead || l.s != s || l.cluster != at.cluster {
			s.parkFar(now, s.sh.movingTopic(topic.Base(), d), kind, frame, name, topic.Full(), at.cluster, req, id)
			return nil, false
		}
	}
	if old != nil {
		s.remove(now, old)
	}
	h = &handle{s: s, leg: l, id: id, producer: producer, full: topic.Full(), req: req, gate: switching.Gate{Epoch: d.Epoch}, tag: s.sh.cfg.tag(at.epoch)}
	if c != nil {
		h.sub, h.fleeting = c.GetSubscription(), !c.GetDurable()
	}
	if *handles == nil {
		*handles = make(map[uint64]*handle)
	}
	(*handles)[id] = h
	s.expect(now, req, pendingCreate, h)
	s.sh.addToIndex(h, topic.Base())
	if d.State != route.StateActive {
		m := s.sh.movingTopic(topic.Base(), d)
		switch {
		case producer && !settled(d.State):
			h.watch(m)
		case h.fleeting && at.cluster != d.Cluster:
			tail, _ := drainTail(topic, d)
			h.watchReader(now, tail, c.GetStartMessageId())
		}
	}
	return h, true
}

func (s *Session) expect(now time.Time, req uint64, kind pendingKind, h *handle) {
	if s.pending == nil {
		s.pending = make(map[uint64]pendingRequest)
	}
	old, ok := s.pending[req]
	s.pending[req] = pendingRequest{kind, h, h.req}
	if kind.moves() {
		s.sh.open(keyOf(h))
	}
	switch { // no client has two requests of one id under way
	case !ok:
	case old.kind == pendingOwed:
		s.sh.payDebt(now, old.h, true)
	case old.kind.moves():
		s.sh.answered(now, keyOf(old.h))
	}
}

// settled takes a request out of pending. The map is as large as all else that a session with one producer has, so that an empty one is not kept.
func (s *Session) settled(req uint64) {
	if delete(s.pending, req); len(s.pending) == 0 {
		s.pending = nil
	}
}

// epochShift is where the map's epoch sits in a topic_epoch that clients see.
const epochShift = 44

func (s *Session) handleProducer(now time.Time, frame []byte, cmd *pulsarpb.BaseCommand) verdict {
	p := cmd.GetProducer()
	if p == nil {
		return forward
	}
	h, ok := s.admit(now, frame, p.GetTopic(), p.GetRequestId(), p.GetProducerId(), nil)
	if !ok {
		return replace
	}
	if p.TopicEpoch == nil || h.gate.Epoch == 0 {
		return forward
	}
	// A topic_epoch is a cluster's own count: one that comes from the cluster before the move is left out, or B
	// answers that the topic epoch has already moved. The map's epoch in its upper bits tells.
	if p.GetTopicEpoch()>>epochShift == h.gate.Epoch {
		real := p.GetTopicEpoch() & (1<<epochShift - 1)
		p.TopicEpoch = &real
	} else {
		p.TopicEpoch = nil
	}
	s.leg.send(s.sh.encode(cmd))
	return replace
}

func (s *Session) handleSubscribe(now time.Time, frame []byte, head codec.Head, cmd *pulsarpb.BaseCommand) verdict {
	c := cmd.GetSubscribe()
	if c == nil {
		return forward
	}
	h, ok := s.admit(now, frame, c.GetTopic(), c.GetRequestId(), c.GetConsumerId(), c)
	if !ok {
		return replace
	}
	s.sh.target = h.leg
	return s.openConsumer(now, h, c, frame, head)
}

func (s *Session) handleCloseProducer(now time.Time, c *pulsarpb.CommandCloseProducer) verdict {
	if len(s.parked) > 0 && s.closeParked(now, codec.TypeProducer, c.GetProducerId(), c.GetRequestId()) {
		return replace
	}
	h := s.producers[c.GetProducerId()]
	if h == nil {
		return forward
	}
	return s.handleClientClose(now, h, c.GetRequestId())
}

func (s *Session) handleCloseConsumer(now time.Time, c *pulsarpb.CommandCloseConsumer) verdict {
	if len(s.parked) > 0 && s.closeParked(now, codec.TypeSubscribe, c.GetConsumerId(), c.GetRequestId()) {
		return replace
	}
	h := s.consumers[c.GetConsumerId()]
	if h == nil {
		return forward
	}
	return s.handleClientClose(now, h, c.GetRequestId())
}

func (s *Session) handleClientClose(now time.Time, h *handle, req uint64) verdict {
	s.sh.target = h.leg
	switch h.state {
	case handleEvicting:
		s.finish(now, h, false)
		fallthrough
	case handleEvicted:
		s.sendCommand(successCommand(req))
		return replace
	}
	if h.waiting != nil && h.state == handleCreating && !h.again {
		s.remove(now, h) // the broker has never heard of it
		s.sendCommand(successCommand(req))
		return replace
	}
	if h.motion != nil && h.motion.lingers {
		h.motion.left = true
		s.finish(now, h, true)
		s.sendCommand(successCommand(req))
		return replace
	}
	if h.motion != nil && h.motion.m.fenced() && !h.producer {
		// The broker keeps it, for the acknowledgements that are held, until the fence ends.
		h.motion.left, h.gate.Poisoned = true, true
		s.sendCommand(successCommand(req))
		return replace
	}
	if h.owes() {
		s.sh.openDebt(h)
		s.remove(now, h)
		s.expect(now, req, pendingOwed, h)
		return forward
	}
	s.remove(now, h)
	return forward
}

// handleConsumerRequest looks at requests about a consumer. Those of an evicted one are answered here, or the client
// would wait for its timeout.
func (s *Session) handleConsumerRequest(now time.Time, frame []byte, head codec.Head, cmd *pulsarpb.BaseCommand) verdict {
	t := head.Type
	var id, req uint64
	switch t {
	case codec.TypeAck:
		id, req = cmd.GetAck().GetConsumerId(), cmd.GetAck().GetRequestId()
	case codec.TypeFlow:
		id = cmd.GetFlow().GetConsumerId()
	case codec.TypeRedeliver:
		id = cmd.GetRedeliverUnacknowledgedMessages().GetConsumerId()
	case codec.TypeSeek:
		id, req = cmd.GetSeek().GetConsumerId(), cmd.GetSeek().GetRequestId()
	case codec.TypeUnsubscribe:
		id, req = cmd.GetUnsubscribe().GetConsumerId(), cmd.GetUnsubscribe().GetRequestId()
	case codec.TypeGetLastMessageID:
		id, req = cmd.GetGetLastMessageId().GetConsumerId(), cmd.GetGetLastMessageId().GetRequestId()
	case codec.TypeConsumerStats:
		id, req = cmd.GetConsumerStats().GetConsumerId(), cmd.GetConsumerStats().GetRequestId()
	}
	h := s.consumers[id]
	if h == nil {
		return forward
	}
	if h.state != handleEvicted {
		s.sh.target = h.leg
		if t == codec.TypeUnsubscribe {
			s.expect(now, req, pendingUnsubscribe, h)
		}
		return s.consumerRequest(now, h, cmd, frame, head)
	}
	s.sh.counters.DroppedFrames.Add(1)
	if t == codec.TypeFlow || t == codec.TypeRedeliver {
		return replace
	}
	text := fmt.Sprintf("topic %s has moved to another cluster, consumer %d was closed", h.full, id)
	if t != codec.TypeAck {
		s.deny(RefusedMoved, req, codec.ErrorServiceNotReady, h.full, text)
		return replace
	}
	carried := s.carryEvicted(now, h, cmd.GetAck())
	switch {
	case cmd.GetAck().RequestId == nil:
	case carried:
		s.answerAck(h, req)
	default:
		s.refuseAck(RefusedMoved, id, req, h.full, text)
	}
	return replace
}

// refuseAck answers an ACK that wants an answer with an error.
func (s *Session) refuseAck(reason Refusal, id, req uint64, topic, text string) {
	code := int32(codec.ErrorServiceNotReady)
	text = s.say(text)
	s.noteRefusal(reason, topic, text)
	s.sendCommand(command(codec.TypeAckResponse, &pulsarpb.BaseCommand{AckResponse: &pulsarpb.CommandAckResponse{
		ConsumerId: &id, RequestId: &req, Error: &code, Message: &text,
	}}))
}

// handleAnswer takes a broker's answer to a request that the session waits for.
func (l *leg) handleAnswer(now time.Time, frame []byte, head codec.Head, req uint64, p pendingRequest) verdict {
	s := l.s
	failed := head.Type == codec.TypeError
	switch p.kind {
	case pendingClose:
		s.settled(req)
		p.h.gate.Closed()
		s.sh.payDebt(now, p.h, failed) // a broker that does not have it any more has closed it itself, and says nothing of its SENDs
		p.h.waiterMayGo(now)
		return replace
	case pendingOwed:
		s.settled(req)
		s.sh.payDebt(now, p.h, failed)
		return forward
	case pendingOrphan, pendingReader:
		s.settled(req)
		return replace
	case pendingLastID:
		s.settled(req)
		return forward
	case pendingSeek:
		s.settled(req)
		s.sh.answered(now, keyOf(p.h))
		return forward
	case pendingUnsubscribe:
		s.settled(req)
		key := keyOf(p.h)
		switch {
		case failed:
		case p.h.req == p.created:
			s.remove(now, p.h)
		default: // what the client made since is a new one
			p.h.again = false
		}
		s.sh.answered(now, key)
		return forward
	}
	p.h.answered = true
	if failed {
		s.settled(req)
		if p.h.again { // the broker still has the one that was live
			s.nowLive(now, p.h)
		} else {
			s.remove(now, p.h)
		}
		return forward
	}
	if head.Type != codec.TypeProducerSuccess {
		s.settled(req)
		s.nowLive(now, p.h)
		return forward
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, head); err != nil || cmd.ProducerSuccess == nil {
		return forward
	}
	success := cmd.ProducerSuccess
	if p.h.name != success.GetProducerName() {
		p.h.name = success.GetProducerName()
	}
	if success.GetProducerReady() { // otherwise the client waits for exclusive access; a second answer follows
		s.settled(req)
		s.nowLive(now, p.h)
	} else {
		p.h.noteAnswered(now, false)
	}
	if success.TopicEpoch == nil || p.h.gate.Epoch == 0 {
		return forward
	}
	shown := success.GetTopicEpoch()&(1<<epochShift-1) | p.h.gate.Epoch<<epochShift
	success.TopicEpoch = &shown
	s.send(s.sh.encode(&cmd))
	return replace
}

// nowLive notes that the broker has made it.
func (s *Session) nowLive(now time.Time, h *handle) {
	h.state, h.again = handleLive, false
	h.noteAnswered(now, false)
}

// handleBrokerClosedProducer relays the broker's own CLOSE_PRODUCER, with the address that it suggests made ours.
func (l *leg) handleBrokerClosedProducer(now time.Time, cmd *pulsarpb.BaseCommand) {
	c := cmd.GetCloseProducer()
	h := l.s.producers[c.GetProducerId()]
	if h != nil && (h.state == handleEvicted || h.leg != l) || l.s.swallowsClose(now, h) {
		return // the client was told already, or will be
	}
	c.AssignedBrokerServiceUrl, c.AssignedBrokerServiceUrlTls = l.rewriteAssigned(h, c.GetAssignedBrokerServiceUrl(), c.GetAssignedBrokerServiceUrlTls())
	l.brokerClosed(now, h, cmd)
}

func (l *leg) handleBrokerClosedConsumer(now time.Time, cmd *pulsarpb.BaseCommand) {
	c := cmd.GetCloseConsumer()
	h := l.s.consumers[c.GetConsumerId()]
	if h != nil && (h.state == handleEvicted || h.leg != l) || l.s.swallowsClose(now, h) {
		return
	}
	c.AssignedBrokerServiceUrl, c.AssignedBrokerServiceUrlTls = l.rewriteAssigned(h, c.GetAssignedBrokerServiceUrl(), c.GetAssignedBrokerServiceUrlTls())
	l.brokerClosed(now, h, cmd)
}

func (l *leg) brokerClosed(now time.Time, h *handle, cmd *pulsarpb.BaseCommand) {
	// A CLOSE about one that the broker has not announced is about its predecessor, which the client closed meanwhile.
	switch {
	case h == nil:
	case h.state != handleCreating:
		if !h.producer {
			l.s.forgetAcks(h) // somebody may have reset the subscription
		}
		if h.owes() {
			l.s.sh.debts.lose(now, h)
		}
		l.s.remove(now, h)
	case h.again: // the one that was live is closed, and the broker makes it anew
		if !h.gate.Drained() {
			l.s.sh.debts.lose(now, h)
		}
		h.again, h.gate.Outstanding = false, 0
	}
	l.s.sendCommand(cmd)
}

// rewriteAssigned turns a broker's own addresses into tagged ones. Nothing is suggested when the topic is no longer
// mapped to the broker's cluster: the client has to ask.
func (l *leg) rewriteAssigned(h *handle, plain, tls string) (*string, *string) {
	set := l.s.sh.cfg.Clusters()
	c, ok := set.Get(l.cluster)
	if !ok {
		return nil, nil
	}
	url, missing := c.OwnURL(plain, tls)
	if missing != "" || h == nil || !h.atHome() {
		return nil, nil
	}
	newPlain, newTLS, err := set.TagURL(l.cluster, url)
	if err != nil {
		return nil, nil
	}
	return &newPlain, &newTLS
}

// handleMigrated turns a TOPIC_MIGRATED, which would lead the client around the proxy, into a plain close: the next lookup asks the map.
func (l *leg) handleMigrated(now time.Time, m *pulsarpb.CommandTopicMigrated) {
	s := l.s
	if m.GetResourceType() == 0 {
		h := s.producers[m.GetResourceId()]
		if h != nil && h.leg == l && h.state != handleEvicted && !s.swallowsClose(now, h) {
			s.startEviction(now, h)
		}
		return
	}
	if h := s.consumers[m.GetResourceId()]; h != nil && h.leg == l && h.state != handleEvicted && !s.swallowsClose(now, h) {
		s.startEviction(now, h)
	}
}

// remove forgets a handle, and that its creation has to be answered: brokers do not answer one that was closed meanwhile.
func (s *Session) remove(now time.Time, h *handle) {
	handles := s.consumers
	if h.producer {
		handles = s.producers
	}
	if handles[h.id] != h {
		return // an answer to UNSUBSCRIBE may come when the next one has the id
	}
	delete(handles, h.id)
	h.waiting.cancel()
	h.forgetReader()
	if p := s.pending[h.req]; p.h == h && (p.kind == pendingCreate || p.kind == pendingOrphan) {
		s.settled(h.req)
	}
	s.unindex(now, h)
	switch h.state {
	case handleEvicting:
		s.awaiting--
	case handleEvicted:
		s.evicted--
	}
	if s.lastP == h {
		s.lastP = nil
	}
	if s.lastC == h {
		s.lastC = nil
	}
	h.waiterMayGo(now)
	s.replay(now, h.takeQueue())
}
