package codec

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// BenchmarkClassify is what the session does per SEND: ParseHead and ParseID. The payload must not matter.
func BenchmarkClassify(b *testing.B) {
	for _, size := range []int{64, 1 << 10, 16 << 10, 128 << 10, 1 << 20} {
		for name, src := range map[string][]byte{"send": sendFrame(3, 1<<20, size), "message": messageFrame(3, size)} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(src)))
				for b.Loop() {
					relay(src)
				}
			})
		}
	}
}

// BenchmarkClassifyByDecoder is the slow honest way, for comparison in the same run.
func BenchmarkClassifyByDecoder(b *testing.B) {
	src := sendFrame(3, 1<<20, 64)
	h, _, _ := ParseHead(src, DefaultMaxFrame)
	var cmd pulsarpb.BaseCommand
	b.ReportAllocs()
	for b.Loop() {
		if err := Parse(&cmd, src, h); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkParseHeadOfTwoByteTag(b *testing.B) {
	src := corpus()["lookup"]
	b.ReportAllocs()
	for b.Loop() {
		relay(src)
	}
}

func BenchmarkAppendCommand(b *testing.B) {
	cmd := &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeCloseProducer)), CloseProducer: &pulsarpb.CommandCloseProducer{
		ProducerId: proto.Uint64(3), RequestId: proto.Uint64(NoRequest), AssignedBrokerServiceUrl: proto.String("pulsar://broker:6650"),
	}}
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = AppendCommand(dst[:0], cmd)
	}
}
