package session

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// This file has what a topic that moves without replication needs (ADR 007): producers are on the new cluster, and each durable subscription reads the old one
// until it has nothing left there. Readers, which no cluster remembers, go by the message that they want to start with: one reads the old cluster up to its last
// message, is closed then, and comes back with the id of the last message that it has really had.

// home is the cluster to which a handle belongs by what the map says of its topic; "" while its subscription is between the two.
func (h *handle) home(d route.Decision) string {
	switch {
	case d.Drain == "" || h.producer:
		return d.Cluster
	case h.fleeting && h.gate.Epoch == d.Epoch:
		return h.leg.cluster // it was placed after the flip
	case h.fleeting:
		return d.Cluster
	}
	cluster, wait := d.Home(h.sub)
	if wait {
		return ""
	}
	return cluster
}

// atHome tells whether a handle is where the map has it now.
func (h *handle) atHome() bool { return h.home(h.s.sh.decide(h.full)) == h.leg.cluster }

// place is where a PRODUCER or SUBSCRIBE belongs.
type place struct {
	cluster string
	epoch   uint64 // in the message ids there
	wait    bool   // its subscription is between two clusters
}

func (sh *Shard) placeOf(topic route.Topic, d route.Decision, c *pulsarpb.CommandSubscribe) place {
	at := place{cluster: d.Cluster, epoch: d.Epoch}
	switch {
	case d.Drain == "" || c == nil:
	case c.GetDurable():
		at.cluster, at.wait = d.Home(c.GetSubscription())
	case sh.readsOld(topic, d, c):
		at.cluster = route.DrainFrom(d.Drain)
	}
	if at.cluster != d.Cluster {
		at.epoch = d.Epoch - 1
	}
	return at
}

// readsOld tells whether what a reader wants to start with is on the cluster that its topic is leaving.
func (sh *Shard) readsOld(topic route.Topic, d route.Decision, c *pulsarpb.CommandSubscribe) bool {
	tail, ok := drainTail(topic, d)
	if !ok {
		return false
	}
	stays := sh.moving[topic.Base()].readerOf(topic.Full(), c.GetSubscription())
	if stays.idle {
		return false
	}
	start := c.StartMessageId
	if c.GetStartMessageRollbackDurationSec() > 0 || start == nil && c.GetInitialPosition() == initialEarliest {
		return true
	}
	if start == nil {
		return false
	}
	real, epoch, ok := codec.SplitLedger(start.GetLedgerId())
	switch {
	case !ok:
		return real == math.MaxUint64 // the oldest message; otherwise the newest
	case epoch == sh.cfg.tag(d.Epoch) && epoch != sh.cfg.tag(d.Epoch-1):
		return false // of the new cluster
	case epoch != sh.cfg.tag(d.Epoch-1):
		return true // of before an earlier move
	}
	switch at := (route.Tail{Ledger: int64(real), Entry: int64(start.GetEntryId())}); {
	case before(at, tail):
		return true
	case before(tail, at):
		return false
	}
	// The last message itself: whoever has not been sent round for it may want it still, and of a batch the rest.
	part := start.BatchIndex != nil && start.GetBatchIndex() >= 0 && int(start.GetBatchIndex()) < stays.batch-1
	return stays.rounds == 0 || part
}

// notBeforeTail is where a reader begins that was let to the new cluster with an id of the one that its topic is leaving: it has had all of that.
func (sh *Shard) notBeforeTail(h *handle, id oldID) oldID {
	d := sh.decide(h.full)
	topic, err := route.ParseTopic(h.full)
	if err != nil || d.Drain == "" || !h.fleeting || h.leg.cluster != d.Cluster || id.epoch != sh.cfg.tag(d.Epoch-1) {
		return id
	}
	if tail, ok := drainTail(topic, d); ok && before(route.Tail{Ledger: int64(id.at.Ledger), Entry: int64(id.at.Entry)}, tail) {
		id.at = Position{uint64(tail.Ledger), uint64(tail.Entry)}
	}
	return id
}

// initialEarliest is CommandSubscribe.initial_position for the oldest message.
const initialEarliest = 1

// drainTail is the last message of a topic on the cluster that it is leaving; false when there is none.
func drainTail(topic route.Topic, d route.Decision) (route.Tail, bool) {
	tail, ok := route.DrainTail(d.Drain, max(topic.Partition(), 0))
	return tail, ok && tail.Ledger >= 0
}

func before(a, b route.Tail) bool {
	return a.Ledger < b.Ledger || a.Ledger == b.Ledger && a.Entry < b.Entry
}

// reader is what a handle has beyond the others that reads, of a cluster that its topic is leaving, what is left there. Loop-owned.
type reader struct {
	tail route.Tail
	had  bool      // its last message was delivered
	some bool      // since due was set
	due  time.Time // when it is closed, or its broker is asked
}

// readerStay is what is remembered of a reader that was closed and will come back.
type readerStay struct {
	rounds int  // how often it was
	idle   bool // that had nothing more for it, whatever it comes back with
	batch  int  // messages in the last entry; 0: not known
}

const (
	// readerPause is how long a reader that was given the last message may take to have it. It doubles with each round, up to readerPauses times.
	readerPause  = time.Second
	readerPauses = 6
	// readerIdle is how long a reader may be given nothing before its broker is asked whether there is anything: retention may have taken what it wants.
	readerIdle = time.Minute
	// maxReaderStays bounds what is remembered per topic.
	maxReaderStays = 4096
)

// readerOf is what is remembered of a reader.
func (m *moving) readerOf(full, name string) readerStay {
	if m == nil {
		return readerStay{}
	}
	return m.readers[subscriptionKey{full, name}]
}

// watchReader has a reader closed in time that was let to the cluster that its topic is leaving, with the id that it wants to start with.
func (h *handle) watchReader(now time.Time, tail route.Tail, start *pulsarpb.MessageIdData) {
	h.reader = &reader{tail: tail, due: now.Add(readerIdle)}
	if real, _, ok := codec.SplitLedger(start.GetLedgerId()); ok && (route.Tail{Ledger: int64(real), Entry: int64(start.GetEntryId())}) == tail {
		h.reader.due = now.Add(readerPause) // most have had it
	}
	h.judged = true
	h.s.sh.timers.sooner(&h.s.timer, h.reader.due)
	h.s.makeAside().readers++
}

// forgetReader is called when h ends.
func (h *handle) forgetReader() {
	if h.reader != nil {
		h.reader = nil
		h.s.aside.readers--
	}
}

// noteDelivered looks whether the MESSAGE that is passed to a reader is the last one there. It answers more when that cannot be told yet.
func (l *leg) noteDelivered(h *handle, frame []byte, head codec.Head) verdict {
	r, sh := h.reader, l.s.sh
	r.some = true
	start := len(sh.scratch)
	_, _, err := sh.mapIDs(frame, head, h, false)
	sh.scratch = sh.scratch[:start]
	if err != nil {
		return bad
	}
	at := sh.ids.last
	if before(route.Tail{Ledger: int64(at.Ledger), Entry: int64(at.Entry)}, r.tail) {
		return forward
	}
	n, ok := codec.ParseBatchSize(frame, head)
	if !ok {
		return more
	}
	stay := h.stay()
	stay.batch = n
	h.remember(stay)
	if !r.had {
		r.had = true
		r.due = l.heard.Add(readerPause << min(stay.rounds, readerPauses))
		sh.timers.sooner(&l.s.timer, r.due)
	}
	return forward
}

func (h *handle) stay() readerStay {
	return h.s.sh.movingOf(h.full).readerOf(h.full, h.sub)
}

func (h *handle) remember(stay readerStay) {
	m := h.s.sh.movingOf(h.full)
	if m == nil {
		return // the topic has gone on
	}
	key := subscriptionKey{h.full, h.sub}
	if _, known := m.readers[key]; !known && len(m.readers) >= maxReaderStays {
		clear(m.readers)
	}
	if m.readers == nil {
		m.readers = make(map[subscriptionKey]readerStay)
	}
	m.readers[key] = stay
}

// sendRound closes a reader: it comes back with the message that it has really had.
func (s *Session) sendRound(now time.Time, h *handle, idle bool) {
	stay := h.stay()
	stay.rounds++
	stay.idle = idle
	h.remember(stay)
	s.sh.counters.ReadersSentRound.Add(1)
	s.startEviction(now, h)
}

// lookAtReaders closes those whose time has come, and returns when the next one's is.
func (s *Session) lookAtReaders(now time.Time) (next time.Time) {
	for _, id := range slices.Sorted(maps.Keys(s.consumers)) {
		h := s.consumers[id]
		if h == nil || h.reader == nil || h.state >= handleEvicting {
			continue
		}
		r := h.reader
		if !r.due.After(now) {
			if r.had {
				s.sendRound(now, h, false)
				continue
			}
			if !r.some && h.state == handleLive {
				s.nextReq++
				s.expect(now, s.nextReq, pendingReader, h)
				h.leg.send(s.sh.encode(command(codec.TypeGetLastMessageID, &pulsarpb.BaseCommand{GetLastMessageId: &pulsarpb.CommandGetLastMessageId{
					ConsumerId: &h.id, RequestId: proto.Uint64(s.nextReq),
				}})))
			}
			r.some, r.due = false, now.Add(readerIdle)
			if h.state == handleCreating {
				r.due = now.Add(readerPause)
			}
		}
		if next.IsZero() || r.due.Before(next) {
			next = r.due
		}
	}
	return next
}

// readerAt takes the broker's word on how far a reader is that was given nothing for a while. Only what the broker counts as behind it is left out.
func (s *Session) readerAt(now time.Time, h *handle, at *pulsarpb.MessageIdData) {
	if h.reader == nil || h.state != handleLive || h.reader.some || at == nil {
		return
	}
	if !before(route.Tail{Ledger: int64(at.GetLedgerId()), Entry: int64(at.GetEntryId())}, h.reader.tail) {
		s.sendRound(now, h, true)
	}
}

// readerAcked looks whether a reader has had the last message: clients acknowledge what they have given to the application, although no cluster remembers it. It
// answers true when the reader was closed for that.
func (s *Session) readerAcked(now time.Time, h *handle, ack *pulsarpb.CommandAck) bool {
	if !h.reader.had || h.stay().rounds > readerPauses {
		return false
	}
	for _, id := range ack.GetMessageId() {
		real, epoch, ok := codec.SplitLedger(id.GetLedgerId())
		if !ok || epoch != h.tag || len(id.AckSet) > 0 || before(route.Tail{Ledger: int64(real), Entry: int64(id.GetEntryId())}, h.reader.tail) {
			continue
		}
		if ack.RequestId != nil {
			s.answerAck(h, ack.GetRequestId())
		}
		s.sendRound(now, h, false)
		return true
	}
	return false
}

// waitText says why a SUBSCRIBE of a draining topic waits.
func (m *moving) drainText() string {
	return fmt.Sprintf("a subscription of topic %s has read all of cluster %q and is about to go on in cluster %q", m.base, route.DrainFrom(m.drain), m.cluster)
}
