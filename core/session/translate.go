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
	// TranslatedUnknown: nobody can know. A reader begins with the oldest message rather than skip one.
	TranslatedUnknown
)

// translateTime is how long a command waits for a translation.
const translateTime = 5 * time.Second

// What may wait for translations in one shard.
const (
	maxTranslations     = 1000
	maxTranslationBytes = 8 << 20
)

// translation is a SUBSCRIBE or SEEK that waits. Loop-owned.
type translation struct {
	h     *handle
	id    uint64
	req   uint64
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
	t.h.waiting = nil
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
	if d := sh.decide(h.full); d.Cluster != h.leg.cluster || d.State != route.StateActive {
		s.failStart(now, h, t.req, t.seek, RefusedMoved, "topic "+h.full+" is moving to another cluster: look it up again")
		return
	}
	c := sh.carrying.of(now, h.key())
	found := a.Kind == TranslatedCopy || a.Kind == TranslatedNext
	if !found {
		sh.counters.TranslationsFailed.Add(1)
		if c != nil {
			c.failed++
		}
		if t.seek || a.Kind == TranslatedFailed && (c == nil || c.failed <= maxTranslateFail) {
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
	if c != nil && found {
		c.failed = 0
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
