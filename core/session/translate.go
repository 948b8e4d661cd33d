package session

import (
	"fmt"
	"math"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// This file has message ids translated that a client got before a move and wants to start from: the start id of a SUBSCRIBE, and SEEK.
// The command waits meanwhile.

// Translation asks where a message of a cluster that had the topic before is in the one that has it now. The application answers with Shard.Translated.
type Translation struct {
	ID      uint64 // for the answer
	Topic   string // full name, with the partition
	Epoch   uint64 // of the topic when the id was told: the map's history has the cluster
	At      Position
	Cluster string // that has the topic now
	// Last asks for something else: the last message of Cluster, if there is one behind what corresponds to At, the last one of a cluster that the topic is
	// leaving. The answer is TranslatedCopy, or TranslatedUnknown when there is none.
	Last bool
}

// Translated is the answer to a Translation.
type Translated struct {
	Kind TranslatedKind
	At   Position // TranslatedCopy, TranslatedNext
	Text string   // the others: why
}

// TranslatedKind is how much is known.
type TranslatedKind uint8

// The kinds.
const (
	// TranslatedCopy: At is the copy of the message itself.
	TranslatedCopy TranslatedKind = iota
	// TranslatedNext: there is no copy, or it cannot be told for sure; At is the first message to be delivered to somebody who has had the one asked for. Nothing
	// that he has not had lies before it.
	TranslatedNext
	// TranslatedFailed: it could not be found out now.
	TranslatedFailed
	// TranslatedBusy: nobody has looked, for too many wait.
	TranslatedBusy
	// TranslatedUnknown: nobody can know. A reader begins with the oldest message rather than skip one.
	TranslatedUnknown
	// TranslatedGone: what is asked for is on the old cluster alone, and the topic has left that without taking it along. It is refused.
	TranslatedGone
)

const (
	// translateTime is how long a command waits for a translation.
	translateTime = 5 * time.Second
	// restartAfter is how long translations for a reader fail before it begins with the oldest message.
	restartAfter = 30 * time.Second
	// retryTime is longer than clients wait before they try again.
	retryTime = 2 * time.Minute
)

// What may wait for translations in one shard.
const (
	maxTranslations     = 1000
	maxTranslationBytes = 8 << 20
)

// translation is a SUBSCRIBE or SEEK that waits. Loop-owned.
type translation struct {
	h     *handle // with last, it may have ended
	id    uint64
	req   uint64
	last  *pulsarpb.MessageIdData // of a GET_LAST_MESSAGE_ID: the answer unless there is a later one
	seek  bool
	frame []byte // of its own
	from  oldID
	timer timer
}

// translations are all that wait. Loop-owned.
type translations struct {
	list  map[uint64]*translation
	last  uint64
	bytes int
}

// translate has a SUBSCRIBE or SEEK of h wait until the application has told where the message is now.
func (s *Session) translate(now time.Time, h *handle, req uint64, frame []byte, head codec.Head, from oldID) {
	ts := &s.sh.translations
	seek := head.Type == codec.TypeSeek
	if h.waiting != nil || len(ts.list) >= maxTranslations || ts.bytes+head.Size > maxTranslationBytes {
		s.untranslated(now, h, req, seek, "too many of them wait: try again")
		return
	}
	ts.last++
	t := &translation{h: h, id: ts.last, req: req, seek: seek, frame: append([]byte(nil), frame[:head.Size]...), from: from}
	t.timer.owner = t
	if ts.list == nil {
		ts.list = make(map[uint64]*translation)
	}
	ts.list[t.id] = t
	ts.bytes += len(t.frame)
	h.waiting = t
	s.sh.timers.set(&t.timer, now.Add(translateTime))
	s.sh.counters.Translations.Add(1)
	s.sh.ops = append(s.sh.ops, Op{Kind: OpTranslate, Translation: &Translation{ID: t.id, Topic: h.full, Epoch: from.epoch, At: from.at, Cluster: h.leg.cluster}})
}

// forget takes t out.
func (t *translation) forget() {
	ts := &t.h.s.sh.translations
	delete(ts.list, t.id)
	ts.bytes -= len(t.frame)
	t.h.s.sh.timers.stop(&t.timer)
	if t.last == nil {
		t.h.waiting = nil
	}
}

// cancel is called when its consumer ends. What ends a SUBSCRIBE answers it.
func (t *translation) cancel() {
	if t == nil {
		return
	}
	t.forget()
	if s := t.h.s; t.seek && s.state == stateBridged {
		s.deny(RefusedMoved, t.req, codec.ErrorServiceNotReady, t.h.full, fmt.Sprintf("consumer %d was closed while its SEEK to a message of before a move was under way", t.h.id))
	}
}

// fire gives up.
func (t *translation) fire(now time.Time) {
	t.end(now, Translated{Kind: TranslatedFailed, Text: fmt.Sprintf("there was no answer within %s", translateTime)})
}

// Translated brings the answer to a Translation. One that comes too late is ignored.
func (sh *Shard) Translated(now time.Time, id uint64, a Translated) {
	if t := sh.translations.list[id]; t != nil {
		t.end(now, a)
	}
}

func (t *translation) end(now time.Time, a Translated) {
	t.forget()
	h, s, sh := t.h, t.h.s, t.h.s.sh
	if t.last != nil {
		s.answerLast(t, a)
		return
	}
	if d := sh.decide(h.full); !settled(d.State) || h.home(d) != h.leg.cluster {
		s.failStart(now, h, t.req, t.seek, RefusedMoved, "topic "+h.full+" is moving to another cluster: look it up again")
		return
	}
	c := sh.carrying.of(now, h.key())
	found := a.Kind == TranslatedCopy || a.Kind == TranslatedNext
	if !found {
		sh.counters.TranslationsFailed.Add(1)
		if a.Kind == TranslatedGone {
			s.failStart(now, h, t.req, t.seek, RefusedTranslation, fmt.Sprintf("topic %s has left the cluster that told this message id, and has not taken along what is behind it: %s", h.full, a.Text))
			return
		}
		if t.seek || a.Kind == TranslatedBusy || a.Kind == TranslatedFailed && !c.failsLong(now) {
			s.untranslated(now, h, t.req, t.seek, a.Text)
			return
		}
	}
	head, _, _ := codec.ParseHead(t.frame, math.MaxInt32)
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, t.frame, head); err != nil {
		panic("session: a command that was parsed before cannot be parsed: " + err.Error())
	}
	start := cmd.GetSeek().GetMessageId()
	if !t.seek {
		start = cmd.GetSubscribe().GetStartMessageId()
	}
	if c != nil && !t.seek {
		c.failing = time.Time{}
	}
	switch {
	case a.Kind == TranslatedCopy && c != nil:
		c.aliasTag, c.real, c.shown = h.tag, a.At, Position{start.GetLedgerId(), start.GetEntryId()}
		start.LedgerId, start.EntryId, start.FirstChunkMessageId = &a.At.Ledger, &a.At.Entry, nil
	case found:
		// Batch index and ack_set are those of another message.
		*start = pulsarpb.MessageIdData{LedgerId: &a.At.Ledger, EntryId: &a.At.Entry, Partition: start.Partition}
	default:
		*start = pulsarpb.MessageIdData{LedgerId: proto.Uint64(math.MaxUint64), EntryId: proto.Uint64(math.MaxUint64), Partition: start.Partition}
		sh.counters.ReadersRestarted.Add(1)
		sh.report(Report{Event: EventRestarted, Session: s.id, Peer: s.peer, Topic: h.full, Cluster: h.leg.cluster,
			Text: fmt.Sprintf("subscription %s begins with the oldest message: where %d:%d of epoch %d is now is not known: %s", h.sub, t.from.at.Ledger, t.from.at.Entry, t.from.epoch, a.Text)})
	}
	if t.seek {
		s.expect(now, t.req, pendingSeek, h)
	}
	h.leg.send(sh.encode(&cmd))
}

// failsLong notes that the start position of a reader could not be found out, and tells whether that has been so for restartAfter.
func (c *carried) failsLong(now time.Time) bool {
	if c == nil {
		return false
	}
	if c.failing.IsZero() {
		c.failing = now
	}
	c.until = now.Add(retryTime)
	return now.Sub(c.failing) >= restartAfter
}

// askLast has a GET_LAST_MESSAGE_ID of a reader answered that was given the last message of the cluster which its topic is leaving. That cluster would say that there is no more, and
// an application that asks before each message would not wait for what the new cluster has.
func (s *Session) askLast(now time.Time, h *handle, req uint64) {
	sh := s.sh
	topic, err := route.ParseTopic(h.full)
	if err != nil {
		panic("session: a handle's topic has no valid name: " + h.full)
	}
	d := sh.decide(h.full)
	ledger, entry := codec.ShowLedger(uint64(h.reader.tail.Ledger), h.tag), uint64(h.reader.tail.Entry)
	last := &pulsarpb.MessageIdData{LedgerId: &ledger, EntryId: &entry, Partition: proto.Int32(int32(topic.Partition()))}
	if n := h.stay().batch; n > 1 {
		last.BatchIndex = proto.Int32(int32(n - 1))
	}
	ts := &sh.translations
	ts.last++
	t := &translation{h: h, id: ts.last, req: req, last: last}
	t.timer.owner = t
	if len(ts.list) >= maxTranslations {
		s.answerLast(t, Translated{Kind: TranslatedFailed})
		return
	}
	if ts.list == nil {
		ts.list = make(map[uint64]*translation)
	}
	ts.list[t.id] = t
	sh.timers.set(&t.timer, now.Add(translateTime))
	sh.ops = append(sh.ops, Op{Kind: OpTranslate, Translation: &Translation{ID: t.id, Topic: h.full, Epoch: d.Epoch - 1,
		At: Position{uint64(h.reader.tail.Ledger), entry}, Cluster: d.Cluster, Last: true}})
}

// answerLast answers a GET_LAST_MESSAGE_ID: with what the new cluster has, or else with the last message of the old one.
func (s *Session) answerLast(t *translation, a Translated) {
	if s.state != stateBridged {
		return
	}
	last := t.last
	if a.Kind == TranslatedCopy {
		ledger := codec.ShowLedger(a.At.Ledger, s.sh.cfg.tag(s.sh.decide(t.h.full).Epoch))
		last = &pulsarpb.MessageIdData{LedgerId: &ledger, EntryId: &a.At.Entry, Partition: last.Partition}
	}
	s.sendCommand(command(codec.TypeGetLastMessageIDResponse, &pulsarpb.BaseCommand{GetLastMessageIdResponse: &pulsarpb.CommandGetLastMessageIdResponse{
		RequestId: &t.req, LastMessageId: last,
	}}))
}

// untranslated answers a SUBSCRIBE or SEEK whose message cannot be found.
func (s *Session) untranslated(now time.Time, h *handle, req uint64, seek bool, why string) {
	s.failStart(now, h, req, seek, RefusedTranslation, fmt.Sprintf("topic %s has moved to another cluster since this message id was told, and where that message is now could not be found out: %s", h.full, why))
}

func (s *Session) failStart(now time.Time, h *handle, req uint64, seek bool, reason Refusal, text string) {
	s.deny(reason, req, codec.ErrorServiceNotReady, h.full, text)
	switch {
	case seek:
	case h.again: // the broker still has the one that was live
		s.settled(h.req)
		s.nowLive(now, h)
	default:
		s.remove(now, h)
	}
}
