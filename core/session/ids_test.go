package session

import (
	"bytes"
	"testing"

	"pointsman/codec"
)

// tagged is bridged for a topic that has moved twice: what clients see carries epoch 2.
func tagged(t testing.TB) (p *player, s *Session, l *leg) {
	return bridgedBy(t, "map persistent://public/default/t1 a", "map persistent://public/default/t1 b", "map persistent://public/default/t1 a")
}

// movedCopyFrame is a message that was published to the other cluster.
const movedCopyFrame = `message{consumer_id:1 message_id{ledger_id:123456 entry_id:789 partition:0}} FROM(b,654321:987,10) +1000`

const taggedAckFrame = `ack{consumer_id:1 ack_type:0 message_id{ledger_id:35184372212288 entry_id:789}}` // 123456 of epoch 2

// A steady flow of a moved topic is rewritten without allocation, and a read full of small frames goes on as one write.
func TestRewritingIDsAllocatesNothing(t *testing.T) {
	p, s, l := tagged(t)
	up := append(flow(t, p, 20, sendFrame), flow(t, p, 20, taggedAckFrame)...)
	down := append(flow(t, p, 20, messageFrame), flow(t, p, 20, receiptFrame)...)
	copied := flow(t, p, 40, movedCopyFrame)
	large := flow(t, p, 2, `message{consumer_id:1 message_id{ledger_id:123456 entry_id:789 partition:0}} +40000`)
	for _, c := range []struct {
		name   string
		ep     Endpoint
		src    []byte
		writes int
	}{{"up", s, up, 2}, {"down", l, down, 1}, {"copies", l, copied, 1}, {"large", l, large, 4}} {
		allocs := testing.AllocsPerRun(100, func() {
			p.sh.ResetOps()
			if n := c.ep.Data(p.now, c.src); n != len(c.src) {
				t.Fatalf("%s consumed %d of %d", c.name, n, len(c.src))
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations per read of 40 frames, want 0", c.name, allocs)
		}
		if len(p.sh.ops) != c.writes {
			t.Errorf("%s: %d ops, want %d writes", c.name, len(p.sh.ops), c.writes)
		}
	}
}

// The rest of a large frame is the loop's to move (splice), whole, after its head was rewritten.
func TestTheRestOfALargeFrameIsStillATail(t *testing.T) {
	for _, c := range []struct{ name, frame string }{
		{"down", `message{consumer_id:1 message_id{ledger_id:123456 entry_id:789}} FROM(b,1:2,1) +100000`},
		{"up", `send{producer_id:1 sequence_id:1 message_id{ledger_id:123456 entry_id:1}} +100000`},
	} {
		p, s, l := tagged(t)
		ep, to := Endpoint(l), s.conn
		if c.name == "up" {
			ep, to = s, l.conn
		}
		src := flow(t, p, 1, c.frame)
		h, _, _ := codec.ParseHead(src, codec.DefaultMaxFrame)
		p.sh.ResetOps()
		if n := ep.Data(p.now, src[:4096]); n != 4096 {
			t.Fatalf("%s: consumed %d of the head", c.name, n)
		}
		var got []byte
		for _, op := range p.sh.ops {
			got = append(got, op.Data...)
		}
		dst, n := ep.Tail()
		if dst != to || n != len(src)-4096 {
			t.Errorf("%s: %d bytes are left for %d, want %d for %d", c.name, n, dst, len(src)-4096, to)
		}
		head, ok, err := codec.ParseHead(got, codec.DefaultMaxFrame)
		if err != nil || !ok || head.Size-head.CmdEnd != h.Size-h.CmdEnd || len(got)+n != head.Size {
			t.Errorf("%s: %+v (%v %v), %d bytes and a tail of %d", c.name, head, ok, err, len(got), n)
		}
		if !bytes.Equal(got[head.CmdEnd:], src[h.CmdEnd:4096]) {
			t.Errorf("%s: the payload has changed", c.name)
		}
		ep.Moved(p.now, n)
		if _, n := ep.Tail(); n != 0 {
			t.Errorf("%s: %d bytes are left after all were moved", c.name, n)
		}
	}
}

func TestNativeIDsAreLeftAlone(t *testing.T) {
	p, _, l := bridgedBy(t, "native ids", "map persistent://public/default/t1 b", "map persistent://public/default/t1 a")
	src := flow(t, p, 3, messageFrame)
	p.sh.ResetOps()
	l.Data(p.now, src)
	if len(p.sh.ops) != 1 || !bytes.Equal(p.sh.ops[0].Data, src) {
		t.Errorf("%d ops, want one write of what came", len(p.sh.ops))
	}
}

// Beside BenchmarkRelay…: what the same frames cost on a topic that has moved.
func benchmarkMoved(b *testing.B, frame string, up bool) {
	p, s, l := tagged(b)
	benchmarkFrames(b, p, s, l, frame, up, 60)
}

func BenchmarkRelayMovedSend(b *testing.B)    { benchmarkMoved(b, sendFrame, true) }
func BenchmarkRelayMovedAck(b *testing.B)     { benchmarkMoved(b, taggedAckFrame, true) }
func BenchmarkRelayMovedMessage(b *testing.B) { benchmarkMoved(b, messageFrame, false) }
func BenchmarkRelayMovedCopy(b *testing.B)    { benchmarkMoved(b, movedCopyFrame, false) }
func BenchmarkRelayMovedReceipt(b *testing.B) { benchmarkMoved(b, receiptFrame, false) }
