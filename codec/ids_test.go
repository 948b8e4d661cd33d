package codec

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// show and hide are the two mappers as the session has them, without old ids.
type show uint64

func (s show) MapID(id MessageID) (uint64, uint64, bool) {
	return ShowLedger(id.Ledger, uint64(s)), id.Entry, true
}

type hide uint64

func (s hide) MapID(id MessageID) (uint64, uint64, bool) {
	if real, epoch, ok := SplitLedger(id.Ledger); ok && epoch == uint64(s) {
		return real, id.Entry, true
	}
	return id.Ledger, id.Entry, true
}

// mapCommand is the slow honest way: every message id of a decoded command.
func mapCommand(cmd *pulsarpb.BaseCommand, m IDMapper) {
	ledgerOf := func(id *pulsarpb.MessageIdData) bool {
		if id == nil || id.LedgerId == nil {
			return false
		}
		ledger, _, _ := m.MapID(MessageID{Ledger: id.GetLedgerId(), Entry: id.GetEntryId()})
		id.LedgerId = &ledger
		return true
	}
	one := func(id *pulsarpb.MessageIdData) {
		if ledgerOf(id) {
			ledgerOf(id.FirstChunkMessageId)
		}
	}
	switch Type(uint32(cmd.GetType())) {
	case TypeSubscribe:
		one(cmd.GetSubscribe().GetStartMessageId())
	case TypeSend:
		one(cmd.GetSend().GetMessageId())
	case TypeSendReceipt:
		one(cmd.GetSendReceipt().GetMessageId())
	case TypeMessage:
		one(cmd.GetMessage().GetMessageId())
	case TypeSeek:
		one(cmd.GetSeek().GetMessageId())
	case TypeGetLastMessageIDResponse:
		one(cmd.GetGetLastMessageIdResponse().GetLastMessageId())
		one(cmd.GetGetLastMessageIdResponse().GetConsumerMarkDeletePosition())
	case TypeAck:
		for _, id := range cmd.GetAck().GetMessageId() {
			one(id)
		}
	case TypeRedeliver:
		for _, id := range cmd.GetRedeliverUnacknowledgedMessages().GetMessageIds() {
			one(id)
		}
	}
}

func messageID(ledger, entry uint64) *pulsarpb.MessageIdData {
	return &pulsarpb.MessageIdData{LedgerId: &ledger, EntryId: &entry}
}

// idCommands are the commands with message ids, by name.
func idCommands() map[string]*pulsarpb.BaseCommand {
	u, n := proto.Uint64, func(t Type) *int32 { return proto.Int32(int32(t)) }
	batch := messageID(146, 36)
	batch.Partition, batch.BatchIndex, batch.BatchSize, batch.AckSet = proto.Int32(2), proto.Int32(7), proto.Int32(10), []int64{-1, 5}
	chunked := messageID(150, 9)
	chunked.FirstChunkMessageId = messageID(149, 3)
	unknown := messageID(7, 1)
	unknown.ProtoReflect().SetUnknown(join(bytesField(77, []byte("new")), varintField(78, 5)))
	late := &pulsarpb.CommandMessage{ConsumerId: u(1), MessageId: unknown, RedeliveryCount: proto.Uint32(3), AckSet: []int64{1}, ConsumerEpoch: u(2)}
	late.ProtoReflect().SetUnknown(bytesField(99, make([]byte, 300)))
	var many []*pulsarpb.MessageIdData
	for i := range uint64(40) {
		many = append(many, messageID(i<<30, i))
	}
	return map[string]*pulsarpb.BaseCommand{
		"message":         {Type: n(TypeMessage), Message: &pulsarpb.CommandMessage{ConsumerId: u(1), MessageId: messageID(146, 36)}},
		"message batch":   {Type: n(TypeMessage), Message: &pulsarpb.CommandMessage{ConsumerId: u(1 << 40), MessageId: batch}},
		"message unknown": {Type: n(TypeMessage), Message: late},
		"receipt":         {Type: n(TypeSendReceipt), SendReceipt: &pulsarpb.CommandSendReceipt{ProducerId: u(1), SequenceId: u(5), MessageId: chunked, HighestSequenceId: u(9)}},
		"receipt of none": {Type: n(TypeSendReceipt), SendReceipt: &pulsarpb.CommandSendReceipt{ProducerId: u(1), SequenceId: u(5), MessageId: messageID(math.MaxUint64, math.MaxUint64)}},
		"receipt bare":    {Type: n(TypeSendReceipt), SendReceipt: &pulsarpb.CommandSendReceipt{ProducerId: u(1), SequenceId: u(5)}},
		"send":            {Type: n(TypeSend), Send: &pulsarpb.CommandSend{ProducerId: u(1), SequenceId: u(5), MessageId: messageID(3, 4)}},
		"ack":             {Type: n(TypeAck), Ack: &pulsarpb.CommandAck{ConsumerId: u(1), AckType: proto.Int32(0), MessageId: []*pulsarpb.MessageIdData{batch, chunked, unknown}, RequestId: u(8), TxnidLeastBits: u(3), TxnidMostBits: u(4)}},
		"ack many":        {Type: n(TypeAck), Ack: &pulsarpb.CommandAck{ConsumerId: u(1), AckType: proto.Int32(0), MessageId: many}},
		"redeliver":       {Type: n(TypeRedeliver), RedeliverUnacknowledgedMessages: &pulsarpb.CommandRedeliverUnacknowledgedMessages{ConsumerId: u(1), MessageIds: []*pulsarpb.MessageIdData{messageID(1, 2), batch}}},
		"seek":            {Type: n(TypeSeek), Seek: &pulsarpb.CommandSeek{ConsumerId: u(1), RequestId: u(2), MessageId: messageID(math.MaxInt64, math.MaxInt64)}},
		"seek by time":    {Type: n(TypeSeek), Seek: &pulsarpb.CommandSeek{ConsumerId: u(1), RequestId: u(2), MessagePublishTime: u(12)}},
		"subscribe":       {Type: n(TypeSubscribe), Subscribe: &pulsarpb.CommandSubscribe{Topic: proto.String("t"), Subscription: proto.String("s"), SubType: proto.Int32(0), ConsumerId: u(1), RequestId: u(2), StartMessageId: messageID(5, 6), Durable: proto.Bool(false)}},
		"last":            {Type: n(TypeGetLastMessageIDResponse), GetLastMessageIdResponse: &pulsarpb.CommandGetLastMessageIdResponse{LastMessageId: messageID(9, math.MaxUint64), RequestId: u(2), ConsumerMarkDeletePosition: messageID(8, 1)}},
		"flow":            {Type: n(TypeFlow), Flow: &pulsarpb.CommandFlow{ConsumerId: u(1), MessagePermits: proto.Uint32(500)}},
	}
}

func mustHead(t testing.TB, src []byte) Head {
	t.Helper()
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if err != nil || !ok {
		t.Fatalf("% x: %v %v", src, ok, err)
	}
	return h
}

// rewritten is the whole frame with its ids mapped.
func rewritten(t testing.TB, src []byte, m IDMapper) []byte {
	t.Helper()
	h := mustHead(t, src)
	before := []byte("before")
	out, err := AppendIDs(bytes.Clone(before), src, h, m)
	if err != nil {
		t.Fatalf("%v: % x", err, src)
	}
	if !bytes.HasPrefix(out, before) {
		t.Fatal("what was there is gone")
	}
	return append(out[len(before):], src[h.CmdEnd:h.Size]...)
}

// SW-02: an id that clients see is larger than every one of an earlier epoch, whatever the clusters' ledger ids are.
func TestShownLedgersGrowWithTheEpochAndStayPositive(t *testing.T) {
	for _, real := range []uint64{0, 1, 146, maxLedger} {
		for _, epoch := range []uint64{1, 2, 1000, MaxEpoch} {
			shown := ShowLedger(real, epoch)
			if before := ShowLedger(maxLedger, epoch-1); shown <= before || int64(shown) < 0 || shown >= math.MaxInt64 {
				t.Errorf("ledger %d of epoch %d is shown as %d, and the largest of the epoch before as %d", real, epoch, int64(shown), before)
			}
			if r, e, ok := SplitLedger(shown); !ok || r != real || e != epoch {
				t.Errorf("%d came back as %d of epoch %d (%v), was %d of %d", shown, r, e, ok, real, epoch)
			}
		}
	}
}

func TestSentinelsPassUntouched(t *testing.T) {
	for _, id := range []uint64{math.MaxUint64, math.MaxInt64, 1 << 63, maxLedger + 1} {
		if got := ShowLedger(id, 7); got != id {
			t.Errorf("%d is shown as %d", int64(id), int64(got))
		}
	}
	for _, id := range []uint64{math.MaxUint64, math.MaxInt64, 1 << 63} {
		if got, _, ok := SplitLedger(id); ok || got != id {
			t.Errorf("%d is taken for ledger %d", int64(id), got)
		}
	}
}

func TestIDsAreRewrittenAsTheDecoderWould(t *testing.T) {
	for name, cmd := range idCommands() {
		src := frame(AppendCommand(nil, cmd)[prefixLen:], []byte("payload")...)
		for _, m := range []IDMapper{show(1), show(MaxEpoch), hide(1)} {
			want := proto.CloneOf(cmd)
			mapCommand(want, m)
			got := rewritten(t, src, m)
			if expect := frame(AppendCommand(nil, want)[prefixLen:], []byte("payload")...); !bytes.Equal(got, expect) {
				t.Errorf("%s, %T(%d):\n% x\n% x the decoder's way", name, m, m, got, expect)
			}
		}
		if got := rewritten(t, rewritten(t, src, show(3)), hide(3)); !bytes.Equal(got, src) {
			t.Errorf("%s comes back as\n% x, was\n% x", name, got, src)
		}
	}
}

func TestHasIDsAgreesWithTheDecoder(t *testing.T) {
	for name, cmd := range idCommands() {
		src := AppendCommand(nil, cmd)
		want := !bytes.Equal(rewritten(t, src, showAll{}), src)
		if got := HasIDs(src, mustHead(t, src)); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// showAll changes every id.
type showAll struct{}

func (showAll) MapID(id MessageID) (uint64, uint64, bool) { return id.Ledger ^ 1, id.Entry, true }

// without leaves out the ids of one ledger.
type without uint64

func (w without) MapID(id MessageID) (uint64, uint64, bool) {
	return id.Ledger, id.Entry, id.Ledger != uint64(w)
}

func TestAnIDCanBeLeftOutOfAList(t *testing.T) {
	for _, name := range []string{"ack", "redeliver"} {
		src := AppendCommand(nil, idCommands()[name])
		var cmd pulsarpb.BaseCommand
		out := rewritten(t, src, without(146))
		if err := Parse(&cmd, out, mustHead(t, out)); err != nil {
			t.Fatal(err)
		}
		left := append(cmd.GetAck().GetMessageId(), cmd.GetRedeliverUnacknowledgedMessages().GetMessageIds()...)
		if was := idCommands()[name]; len(left) != len(was.GetAck().GetMessageId())+len(was.GetRedeliverUnacknowledgedMessages().GetMessageIds())-1 {
			t.Errorf("%s: %d ids are left", name, len(left))
		}
		for _, id := range left {
			if id.GetLedgerId() == 146 {
				t.Errorf("%s still has it", name)
			}
		}
	}
}

// notes collects what a mapper is asked.
type notes []MessageID

func (n *notes) MapID(id MessageID) (uint64, uint64, bool) {
	*n = append(*n, id)
	return id.Ledger, id.Entry, true
}

func TestAMapperIsToldWhatAnIDIs(t *testing.T) {
	var got notes
	src := AppendCommand(nil, idCommands()["ack"])
	rewritten(t, src, &got)
	want := notes{{Ledger: 146, Entry: 36, Partial: true}, {Ledger: 150, Entry: 9}, {Ledger: 149, Entry: 3, Chunk: true}, {Ledger: 7, Entry: 1}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestRewritingAllocatesNothing(t *testing.T) {
	dst := make([]byte, 0, 1<<12)
	for name, cmd := range idCommands() {
		src := AppendCommand(nil, cmd)
		h := mustHead(t, src)
		var m IDMapper = show(2)
		if n := testing.AllocsPerRun(100, func() {
			if _, err := AppendIDs(dst[:0], src, h, m); err != nil || !HasIDs(src, h) && h.Type == TypeMessage {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// Properties: a rewritten command is what the decoder would have made of it; undone it is the old one; what is refused no decoder takes.
func FuzzIDs(f *testing.F) {
	for _, cmd := range idCommands() {
		f.Add(AppendCommand(nil, cmd)[prefixLen:], uint64(1))
	}
	f.Add(join(varintField(1, 9), bytesField(9, join(varintField(1, 5), bytesField(2, varintField(1, 6)), bytesField(2, varintField(2, 7)), bytesField(2, varintField(1, 8))))), uint64(3))
	f.Fuzz(func(t *testing.T, cmd []byte, epoch uint64) {
		epoch = 1 + epoch%MaxEpoch
		if len(cmd) < minCommand || len(cmd) > 1<<12 {
			return
		}
		src := frame(cmd, 1, 2, 3)
		h, ok, err := ParseHead(src, DefaultMaxFrame)
		if err != nil || !ok {
			return
		}
		decode := func(src []byte, h Head) (*pulsarpb.BaseCommand, bool) {
			c := new(pulsarpb.BaseCommand)
			return c, (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(src[prefixLen:h.CmdEnd], c) == nil
		}
		was, valid := decode(src, h)
		out, err := AppendIDs(nil, src, h, show(epoch))
		if err != nil {
			if valid {
				t.Fatalf("refused what a decoder takes: % x", cmd)
			}
			return
		}
		if !valid {
			return
		}
		out = append(out, src[h.CmdEnd:]...)
		h2, ok, err := ParseHead(out, DefaultMaxFrame+1<<12)
		if err != nil || !ok || h2.Type != h.Type || h2.Size != len(out) || h2.Size-h2.CmdEnd != 3 {
			t.Fatalf("%+v %v %v, was %+v", h2, ok, err, h)
		}
		got, ok := decode(out, h2)
		if !ok {
			t.Fatalf("% x became what is no command: % x", src, out)
		}
		want := proto.CloneOf(was)
		mapCommand(want, show(epoch))
		if !proto.Equal(got, want) {
			t.Fatalf("%v\nbecame %v,\nwant   %v", was, got, want)
		}
		huge := &tooLarge{}
		mapCommand(proto.CloneOf(was), huge)
		if huge.found {
			return // no cluster has such ledgers
		}
		back, err := AppendIDs(nil, out, h2, hide(epoch))
		if err != nil {
			t.Fatal(err)
		}
		back = append(back, out[h2.CmdEnd:]...)
		h3, ok, err := ParseHead(back, DefaultMaxFrame+1<<12)
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		if again, ok := decode(back, h3); !ok || !proto.Equal(again, was) {
			t.Fatalf("%v came back as %v", was, again)
		}
	})
}

type tooLarge struct{ found bool }

func (l *tooLarge) MapID(id MessageID) (uint64, uint64, bool) {
	l.found = l.found || id.Ledger > maxLedger && id.Ledger < math.MaxInt64
	return id.Ledger, id.Entry, true
}

// replicated is a MESSAGE with metadata as a replicator writes it.
func replicated(entryMetadata, checksum bool, meta *pulsarpb.MessageMetadata) []byte {
	cmd := AppendCommand(nil, idCommands()["message"])
	var rest []byte
	if entryMetadata {
		rest = binary.BigEndian.AppendUint16(rest, 0x0e02)
		rest = binary.BigEndian.AppendUint32(rest, 6)
		rest = append(rest, 1, 2, 3, 4, 5, 6)
	}
	if checksum {
		rest = binary.BigEndian.AppendUint16(rest, 0x0e01)
		rest = binary.BigEndian.AppendUint32(rest, 12345)
	}
	bytes, err := proto.MarshalOptions{AllowPartial: true}.Marshal(meta)
	if err != nil {
		panic(err)
	}
	rest = binary.BigEndian.AppendUint32(rest, uint32(len(bytes)))
	rest = append(append(rest, bytes...), "payload"...)
	return frame(cmd[prefixLen:], rest...)
}

func property(key, value string) *pulsarpb.KeyValue {
	return &pulsarpb.KeyValue{Key: &key, Value: &value}
}

func sampleMetadata() *pulsarpb.MessageMetadata {
	return &pulsarpb.MessageMetadata{ProducerName: proto.String("p"), SequenceId: proto.Uint64(1), PublishTime: proto.Uint64(2),
		Properties: []*pulsarpb.KeyValue{property("other", "1:2"), property(SourceProperty, "146:36")}, ReplicatedFrom: proto.String("a"), NumMessagesInBatch: proto.Int32(10)}
}

func TestTheSourceOfAReplicatedMessageIsReadAtEveryCut(t *testing.T) {
	for i := range 4 {
		src := replicated(i&1 > 0, i&2 > 0, sampleMetadata())
		h := mustHead(t, src)
		end := len(src) - len("payload")
		for cut := h.CmdEnd; cut <= len(src); cut++ {
			s, found, ok := ParseSource(src[:cut], h)
			if ok != (cut >= end) {
				t.Fatalf("form %d cut at %d of %d: ok %v", i, cut, end, ok)
			}
			if ok && (!found || string(s.Cluster) != "a" || s.Ledger != 146 || s.Entry != 36 || s.Messages != 10) {
				t.Fatalf("form %d: %+v %v", i, s, found)
			}
		}
		if n := testing.AllocsPerRun(100, func() { ParseSource(src, h) }); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

func TestWhatDoesNotSayItsSourceOnceHasNone(t *testing.T) {
	for name, change := range map[string]func(*pulsarpb.MessageMetadata){
		"first published here": func(m *pulsarpb.MessageMetadata) { m.ReplicatedFrom = nil },
		"by an old replicator": func(m *pulsarpb.MessageMetadata) { m.Properties = m.Properties[:1] },
		"twice": func(m *pulsarpb.MessageMetadata) {
			m.Properties = append(m.Properties, property(SourceProperty, "146:37"))
		},
		"no position":   func(m *pulsarpb.MessageMetadata) { m.Properties[1] = property(SourceProperty, "146") },
		"half of one":   func(m *pulsarpb.MessageMetadata) { m.Properties[1] = property(SourceProperty, "146:") },
		"more than one": func(m *pulsarpb.MessageMetadata) { m.Properties[1] = property(SourceProperty, "1:2:3") },
		"too large":     func(m *pulsarpb.MessageMetadata) { m.Properties[1] = property(SourceProperty, "1:9999999999999999999") },
		"negative":      func(m *pulsarpb.MessageMetadata) { m.Properties[1] = property(SourceProperty, "-1:2") },
	} {
		m := sampleMetadata()
		change(m)
		src := replicated(false, true, m)
		if s, found, ok := ParseSource(src, mustHead(t, src)); found || !ok {
			t.Errorf("%s: %+v %v", name, s, ok)
		}
	}
	huge := sampleMetadata()
	huge.Properties[0] = property("large", string(make([]byte, maxMetadata)))
	src := replicated(false, true, huge)
	h := mustHead(t, src)
	if _, found, ok := ParseSource(src[:h.CmdEnd+64], h); found || !ok {
		t.Error("large metadata is waited for")
	}
	bare := AppendCommand(nil, idCommands()["message"])
	if _, found, ok := ParseSource(bare, mustHead(t, bare)); found || !ok {
		t.Error("a message without payload is waited for")
	}
}

// Property: the source is what the decoder sees, or none.
func FuzzSource(f *testing.F) {
	whole := replicated(true, true, sampleMetadata())
	f.Add(whole[mustHead(f, whole).CmdEnd:])
	f.Fuzz(func(t *testing.T, rest []byte) {
		src := frame(AppendCommand(nil, idCommands()["message"])[prefixLen:], rest...)
		h := mustHead(t, src)
		s, found, ok := ParseSource(src, h)
		if !ok {
			t.Fatalf("more than the whole frame is wanted: % x", rest)
		}
		for cut := h.CmdEnd; cut < len(src); cut++ {
			if part, partFound, partOK := ParseSource(src[:cut], h); partOK && (partFound != found || part.Ledger != s.Ledger || part.Entry != s.Entry) {
				t.Fatalf("cut at %d: %+v %v, whole %+v %v", cut, part, partFound, s, found)
			}
		}
		if !found {
			return
		}
		at := rest
		if binary.BigEndian.Uint16(at) == 0x0e02 {
			at = at[6+binary.BigEndian.Uint32(at[2:]):]
		}
		if binary.BigEndian.Uint16(at) == 0x0e01 {
			at = at[6:]
		}
		m := new(pulsarpb.MessageMetadata)
		if (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(at[4:4+binary.BigEndian.Uint32(at)], m) != nil {
			return // the client will say so
		}
		if m.GetReplicatedFrom() != string(s.Cluster) || max(int(m.GetNumMessagesInBatch()), 1) != s.Messages {
			t.Fatalf("%+v, the decoder says %v", s, m)
		}
		positions := 0
		for _, p := range m.GetProperties() {
			if p.GetKey() != SourceProperty {
				continue
			}
			positions++
			var ledger, entry uint64
			if _, err := fmt.Sscanf(p.GetValue(), "%d:%d", &ledger, &entry); err != nil || ledger != s.Ledger || entry != s.Entry {
				t.Fatalf("%+v, the decoder says %q", s, p.GetValue())
			}
		}
		if positions != 1 {
			t.Fatalf("%d positions are noted, and %+v is believed", positions, s)
		}
	})
}

// BenchmarkAppendIDs is what a frame of a moved topic costs beyond its classification.
func BenchmarkAppendIDs(b *testing.B) {
	for _, name := range []string{"message", "receipt of none", "ack"} {
		src := AppendCommand(nil, idCommands()[name])
		h := mustHead(b, src)
		var m IDMapper = show(2)
		dst := make([]byte, 0, 1<<12)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := AppendIDs(dst[:0], src, h, m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkParseSource(b *testing.B) {
	src := replicated(false, true, sampleMetadata())
	h := mustHead(b, src)
	b.ReportAllocs()
	for b.Loop() {
		ParseSource(src, h)
	}
}
