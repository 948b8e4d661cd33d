package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"pointsman/codec/pulsarpb"
)

// frame wraps the bytes of a command, and what follows it, into a frame.
func frame(cmd []byte, payload ...byte) []byte {
	dst := binary.BigEndian.AppendUint32(nil, uint32(4+len(cmd)+len(payload)))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(cmd)))
	return append(append(dst, cmd...), payload...)
}

func bytesField(num protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), value)
}

func varintField(num protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, num, protowire.VarintType), value)
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

// sendFrame is a SEND as the clients write it, with a payload of size bytes.
func sendFrame(producer, sequence uint64, size int) []byte {
	cmd := AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeSend)), Send: &pulsarpb.CommandSend{
		ProducerId: &producer, SequenceId: &sequence, NumMessages: proto.Int32(1),
	}})
	return frame(cmd[prefixLen:], make([]byte, size)...)
}

func messageFrame(consumer uint64, size int) []byte {
	cmd := AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeMessage)), Message: &pulsarpb.CommandMessage{
		ConsumerId: &consumer, MessageId: &pulsarpb.MessageIdData{LedgerId: proto.Uint64(1 << 40), EntryId: proto.Uint64(7)},
	}})
	return frame(cmd[prefixLen:], make([]byte, size)...)
}

// corpus is one frame of each shape that matters, by name.
func corpus() map[string][]byte {
	return map[string][]byte{
		"send":    sendFrame(3, 1<<40, 300),
		"message": messageFrame(1<<33, 200),
		"ping":    AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypePing)), Ping: &pulsarpb.CommandPing{}}),
		"lookup": AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeLookup)), LookupTopic: &pulsarpb.CommandLookupTopic{
			Topic: proto.String("persistent://t/n/x"), RequestId: proto.Uint64(9)}}),
		"producer": AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeProducer)), Producer: &pulsarpb.CommandProducer{
			Topic: proto.String("persistent://t/n/x"), ProducerId: proto.Uint64(4), RequestId: proto.Uint64(9)}}),
		"bare type":             frame(varintField(1, 18)),
		"long type":             frame(join([]byte{0x08, 0x86, 0x00}, bytesField(6, varintField(1, 5)))),
		"long tag":              frame(join([]byte{0x88, 0x00, 0x06}, bytesField(6, varintField(1, 5)))),
		"unknown type":          frame(join(varintField(1, 900), bytesField(900, varintField(1, 77)))),
		"type last":             frame(join(bytesField(6, varintField(1, 5)), varintField(1, 6))),
		"hidden type":           frame(join(varintField(1, 6), bytesField(6, varintField(1, 5)), bytesField(5, varintField(2, 1)), varintField(1, 5))),
		"type beyond 32 bits":   frame(join(varintField(1, 1<<32|6), bytesField(6, varintField(1, 5)))),
		"negative type":         frame(varintField(1, math.MaxUint64)),
		"hidden id":             frame(join(varintField(1, 6), bytesField(6, join(varintField(1, 5), varintField(2, 1), varintField(1, 8))))),
		"two sub-messages":      frame(join(varintField(1, 6), bytesField(6, varintField(1, 5)), bytesField(6, varintField(1, 8)))),
		"id last":               frame(join(varintField(1, 6), bytesField(6, join(varintField(2, 5), varintField(1, 8))))),
		"unknown field between": frame(join(varintField(1, 7), varintField(2000, 1), bytesField(7, varintField(1, 8)))),
	}
}

// slowType is the honest answer: what a full decoder makes of the command. ok is false when it refuses it.
func slowType(cmd []byte) (typ Type, id uint64, hasID, ok bool) {
	var base pulsarpb.BaseCommand
	if (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(cmd, &base) != nil || base.Type == nil {
		return 0, 0, false, false
	}
	typ = min(Type(uint32(base.GetType())), TypeUnknown)
	m := base.ProtoReflect()
	fd := m.Descriptor().Fields().ByNumber(protoreflect.FieldNumber(base.GetType()))
	if fd == nil || fd.Kind() != protoreflect.MessageKind || !m.Has(fd) {
		return typ, 0, false, true
	}
	sub := m.Get(fd).Message()
	one := sub.Descriptor().Fields().ByNumber(1)
	if one == nil || one.Kind() != protoreflect.Uint64Kind || !sub.Has(one) {
		return typ, 0, false, true
	}
	return typ, sub.Get(one).Uint(), true, true
}

// checkPeek compares ParseHead and ParseID with the full decoder, for a whole frame and for every shorter prefix.
func checkPeek(t *testing.T, src []byte) {
	t.Helper()
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if err != nil || !ok {
		t.Fatalf("whole frame % x: ok %v, error %v", src, ok, err)
	}
	if h.Size != len(src) {
		t.Fatalf("size %d of a frame of %d bytes", h.Size, len(src))
	}
	id, found, ok, err := ParseID(src, h)
	typ, wantID, wantFound, valid := slowType(src[prefixLen:h.CmdEnd])
	if valid {
		if h.Type != typ {
			t.Fatalf("type %v, the decoder says %v: % x", h.Type, typ, src)
		}
		if err != nil || !ok {
			t.Fatalf("id of a valid command: ok %v, error %v: % x", ok, err, src)
		}
		if wantFound && (!found || id != wantID) {
			t.Fatalf("id %d (%v), the decoder says %d: % x", id, found, wantID, src)
		}
	}
	for cut := range src {
		part, partOK, err := ParseHead(src[:cut], DefaultMaxFrame)
		if err != nil {
			t.Fatalf("error %v when cut at %d", err, cut)
		}
		if !partOK {
			if cut >= h.CmdEnd {
				t.Fatalf("more bytes wanted at %d although the command ends at %d", cut, h.CmdEnd)
			}
			continue
		}
		if part != h {
			t.Fatalf("cut at %d: %+v, whole: %+v", cut, part, h)
		}
		partID, partFound, idOK, err := ParseID(src[:cut], part)
		if idOK != (cut >= h.CmdEnd) && valid {
			t.Fatalf("id known %v when cut at %d, command ends at %d", idOK, cut, h.CmdEnd)
		}
		if idOK && (partID != id || partFound != found || err != nil) {
			t.Fatalf("cut at %d: id %d %v %v, whole: %d %v", cut, partID, partFound, err, id, found)
		}
	}
}

func TestPeekAgreesWithTheFullDecoderAtEveryCut(t *testing.T) {
	for name, src := range corpus() {
		t.Run(name, func(t *testing.T) { checkPeek(t, src) })
	}
}

func TestAHiddenTypeOrIDIsSeen(t *testing.T) {
	want := map[string]struct {
		typ Type
		id  uint64
	}{"hidden type": {TypeProducer, 0}, "type beyond 32 bits": {TypeSend, 5}, "hidden id": {TypeSend, 8}, "two sub-messages": {TypeSend, 8}, "long tag": {TypeSend, 5}}
	all := corpus()
	for name, w := range want {
		h, ok, err := ParseHead(all[name], DefaultMaxFrame)
		if err != nil || !ok || h.Type != w.typ {
			t.Errorf("%s: type %v (%v, %v), want %v", name, h.Type, ok, err, w.typ)
		}
		if id, _, _, _ := ParseID(all[name], h); id != w.id {
			t.Errorf("%s: id %d, want %d", name, id, w.id)
		}
	}
}

func TestHotCommandsAreClassifiedFromTheirFirstBytes(t *testing.T) {
	for name, src := range map[string][]byte{"send": sendFrame(1, 1, 1<<20), "message": messageFrame(1, 1<<20)} {
		h, ok, err := ParseHead(src[:12], DefaultMaxFrame)
		if err != nil || !ok {
			t.Fatalf("%s: not classified from 12 bytes: %v %v", name, ok, err)
		}
		if h.Size != len(src) {
			t.Errorf("%s: size %d, want %d", name, h.Size, len(src))
		}
	}
}

// ME-06: wrong protocol on the port. Each is refused by its first bytes and with a reason of its own.
func TestWhatIsNoFrameIsRefusedWithItsReason(t *testing.T) {
	size := func(total, cmd uint32) []byte {
		return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, total), cmd)
	}
	cases := []struct {
		name string
		src  []byte
		from int // refused from this many bytes on
		want error
	}{
		{"TLS hello", []byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), 4, ErrTLSHello},
		{"HTTP GET", []byte("GET / HTTP/1.1\r\n"), 4, ErrHTTP},
		{"HTTP/2 preface", []byte("PRI * HTTP/2.0\r\n"), 4, ErrHTTP},
		{"all ones", bytes.Repeat([]byte{0xff}, 64), 4, ErrFrameTooLarge},
		{"one byte over the limit", size(DefaultMaxFrame-3, 10), 4, ErrFrameTooLarge},
		{"zero total", make([]byte, 64), 4, ErrFrameShape},
		{"total smaller than a command", size(5, 1), 4, ErrFrameShape},
		{"zero command size", size(100, 0), 8, ErrFrameShape},
		{"command size one", size(100, 1), 8, ErrFrameShape},
		{"command larger than the frame", size(100, 97), 8, ErrFrameShape},
		{"command size all ones", size(100, math.MaxUint32), 8, ErrFrameShape},
		{"no type", frame(bytesField(6, varintField(1, 5))), prefixLen + 4, ErrCommand},
		{"text for a type", frame(bytesField(1, []byte("SEND"))), prefixLen + 6, ErrCommand},
		{"cut field after the type", frame([]byte{0x08, 0x06, 0x32, 0x05, 0x01}), prefixLen + 5, ErrCommand},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for cut := range len(c.src) + 1 {
				_, ok, err := ParseHead(c.src[:cut], DefaultMaxFrame)
				if ok {
					t.Fatalf("accepted at %d", cut)
				}
				if cut < c.from && err != nil {
					t.Fatalf("refused at %d already: %v", cut, err)
				}
				if cut >= c.from && !errors.Is(err, c.want) {
					t.Fatalf("at %d: %v, want %v", cut, err, c.want)
				}
			}
		})
	}
}

func TestTheLargestAllowedFrameIsAccepted(t *testing.T) {
	src := sendFrame(1, 1, 100)
	binary.BigEndian.PutUint32(src, DefaultMaxFrame-4)
	if h, ok, err := ParseHead(src, DefaultMaxFrame); err != nil || !ok || h.Size != DefaultMaxFrame {
		t.Fatalf("%+v %v %v", h, ok, err)
	}
}

// relay calls the two hot functions as the session does.
func relay(src []byte) uint64 {
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if !ok || err != nil {
		panic("not a frame")
	}
	id, _, _, _ := ParseID(src, h)
	return id
}

func TestClassifyingAllocatesNothing(t *testing.T) {
	for name, src := range corpus() {
		if n := testing.AllocsPerRun(100, func() { relay(src) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestUnfinishedHostileInputAllocatesNothing(t *testing.T) {
	big := binary.BigEndian.AppendUint32(nil, DefaultMaxFrame-4)
	big = binary.BigEndian.AppendUint32(big, DefaultMaxFrame-8)
	inputs := map[string][]byte{
		"nothing":         {},
		"claims 5 MiB":    big,
		"claims a string": append(bytes.Clone(big), 0x08, 0x06, 0x32, 0xff, 0xff, 0xff, 0x01),
		"endless varint":  append(bytes.Clone(big), bytes.Repeat([]byte{0xff}, 9)...),
	}
	for name, src := range inputs {
		n := testing.AllocsPerRun(100, func() {
			if _, ok, err := ParseHead(src, DefaultMaxFrame); ok || err != nil {
				t.Fatalf("%s: %v %v", name, ok, err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestARefusalNeverAllocatesTheClaimedSize(t *testing.T) {
	for name, src := range map[string][]byte{
		"all ones":   bytes.Repeat([]byte{0xff}, 16),
		"TLS hello":  []byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
		"false size": {0, 0x4f, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 8, 6},
	} {
		var before, after runtime.MemStats
		const times = 1000
		runtime.ReadMemStats(&before)
		for range times {
			if _, _, err := ParseHead(src, DefaultMaxFrame); err == nil {
				t.Fatal("accepted")
			}
		}
		runtime.ReadMemStats(&after)
		if n := (after.TotalAlloc - before.TotalAlloc) / times; n > 1024 {
			t.Errorf("%s: %d bytes allocated to refuse it", name, n)
		}
	}
}

func TestACommandIsWrittenAsItIsRead(t *testing.T) {
	for name, src := range corpus() {
		h, _, err := ParseHead(src, DefaultMaxFrame)
		if err != nil {
			t.Fatal(err)
		}
		var cmd pulsarpb.BaseCommand
		if err := Parse(&cmd, src, h); err != nil {
			continue // the partial ones among them
		}
		again := AppendCommand([]byte("before"), &cmd)
		if !bytes.HasPrefix(again, []byte("before")) {
			t.Fatalf("%s: what was there is gone", name)
		}
		again = again[len("before"):]
		h2, ok, err := ParseHead(again, DefaultMaxFrame)
		if err != nil || !ok || h2.Type != h.Type || h2.CmdEnd != h2.Size || h2.Size != len(again) {
			t.Fatalf("%s: %+v %v %v from %+v", name, h2, ok, err, h)
		}
		var back pulsarpb.BaseCommand
		if err := Parse(&back, again, h2); err != nil || !proto.Equal(&cmd, &back) {
			t.Fatalf("%s: %v differs from %v (%v)", name, &back, &cmd, err)
		}
	}
}

func TestUnknownFieldsSurviveRewriting(t *testing.T) {
	sub := join(bytesField(1, []byte("persistent://t/n/x")), varintField(2, 9), bytesField(3000, []byte("a new thing")))
	src := frame(join(varintField(1, 23), bytesField(23, sub), varintField(400, 5)))
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	var cmd pulsarpb.BaseCommand
	if err := Parse(&cmd, src, h); err != nil {
		t.Fatal(err)
	}
	cmd.LookupTopic.RequestId = proto.Uint64(1 << 50)
	again := AppendCommand(nil, &cmd)
	for _, want := range [][]byte{bytesField(3000, []byte("a new thing")), varintField(400, 5), varintField(2, 1<<50)} {
		if !bytes.Contains(again, want) {
			t.Errorf("% x lost in % x", want, again)
		}
	}
}

func TestParseReportsABrokenCommandWithItsType(t *testing.T) {
	src := frame(join(varintField(1, 23), bytesField(23, varintField(2, 9)))) // no topic
	h, _, _ := ParseHead(src, DefaultMaxFrame)
	err := Parse(new(pulsarpb.BaseCommand), src, h)
	if !errors.Is(err, ErrCommand) || !bytes.Contains([]byte(err.Error()), []byte("LOOKUP")) {
		t.Fatal(err)
	}
}

func TestTypesHaveTheProtocolsNames(t *testing.T) {
	if got := TypeRedeliver.String(); got != "REDELIVER_UNACKNOWLEDGED_MESSAGES" {
		t.Error(got)
	}
	if got := Type(900).String(); got != "command 900" {
		t.Error(got)
	}
	// The number of the sub-message's field is the type: the description must agree with the constants.
	fields := (&pulsarpb.BaseCommand{}).ProtoReflect().Descriptor().Fields()
	for typ := range typeNames {
		if fields.ByNumber(protoreflect.FieldNumber(typ)) == nil {
			t.Errorf("%v has no sub-message with its number", typ)
		}
	}
}
