package codec

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

const fuzzMaxFrame = 1 << 16

// split cuts a stream into frames as a reader does that is handed chunks of the given sizes (cycled); it keeps an
// incomplete frame in front of the next chunk. It stops at the first error.
func split(stream []byte, chunks []byte) (frames [][]byte, heads []Head, failed bool) {
	var kept []byte
	for at, i := 0, 0; at < len(stream); i++ {
		n := len(stream)
		if len(chunks) > 0 {
			n = 1 + int(chunks[i%len(chunks)])
		}
		end := min(at+n, len(stream))
		kept = append(kept, stream[at:end]...)
		at = end
		for {
			h, ok, err := ParseHead(kept, fuzzMaxFrame)
			if err != nil {
				return frames, heads, true
			}
			if !ok || len(kept) < h.Size {
				break
			}
			frames, heads = append(frames, bytes.Clone(kept[:h.Size])), append(heads, h)
			kept = kept[h.Size:]
		}
	}
	return frames, heads, false
}

// EL-01: frames split at every byte, many frames in one read. Property: how a stream is cut changes nothing.
func FuzzChunksEqualWhole(f *testing.F) {
	var all []byte
	for _, src := range corpus() {
		all = append(all, src...)
	}
	f.Add(all, []byte{0})
	f.Add(all, []byte{6, 0, 40})
	f.Add([]byte("GET / HTTP/1.1\r\n"), []byte{2})
	f.Add([]byte{0, 0, 0, 6, 0, 0, 0, 2, 8, 6, 0, 0, 0, 0}, []byte{3})
	f.Fuzz(func(t *testing.T, stream, chunks []byte) {
		frames, heads, failed := split(stream, nil)
		got, gotHeads, gotFailed := split(stream, chunks)
		if failed != gotFailed || len(frames) != len(got) {
			t.Fatalf("whole: %d frames, failed %v; in chunks: %d frames, failed %v", len(frames), failed, len(got), gotFailed)
		}
		for i := range frames {
			if !bytes.Equal(frames[i], got[i]) || heads[i] != gotHeads[i] {
				t.Fatalf("frame %d differs", i)
			}
		}
	})
}

// Property: the type and the id that are peeked are those that a full decoder sees, at every cut.
func FuzzPeekAgainstDecoder(f *testing.F) {
	for _, src := range corpus() {
		h, _, _ := ParseHead(src, DefaultMaxFrame)
		f.Add(src[prefixLen:h.CmdEnd])
	}
	f.Fuzz(func(t *testing.T, cmd []byte) {
		if len(cmd) < minCommand || len(cmd) > 1<<12 {
			return
		}
		src := frame(cmd, 1, 2, 3)
		if _, ok, err := ParseHead(src, DefaultMaxFrame); err != nil || !ok {
			if _, _, _, valid := slowType(cmd); valid {
				t.Fatalf("refused (%v %v) what a decoder takes: % x", ok, err, cmd)
			}
			return
		}
		checkPeek(t, src)
	})
}

// Property: Parse, then AppendCommand, loses no field, known or unknown.
func FuzzRewriteKeepsFields(f *testing.F) {
	for _, src := range corpus() {
		h, _, _ := ParseHead(src, DefaultMaxFrame)
		f.Add(src[prefixLen:h.CmdEnd])
	}
	f.Fuzz(func(t *testing.T, cmd []byte) {
		src := frame(cmd)
		h, ok, err := ParseHead(src, DefaultMaxFrame)
		if err != nil || !ok {
			return
		}
		var first, second pulsarpb.BaseCommand
		if Parse(&first, src, h) != nil {
			return
		}
		again := AppendCommand(nil, &first)
		h2, ok, err := ParseHead(again, 2*DefaultMaxFrame)
		if err != nil || !ok || h2.Size != len(again) || h2.Type != h.Type {
			t.Fatalf("%+v %v %v, was %+v", h2, ok, err, h)
		}
		if err := Parse(&second, again, h2); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(&first, &second) {
			t.Fatalf("%v became %v", &first, &second)
		}
	})
}
