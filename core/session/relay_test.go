package session

import (
	"testing"
)

// bridged is a session that relays, with one producer and one consumer, and the frames of a steady flow.
func bridged(t testing.TB) (p *player, s *Session, l *leg) { return bridgedBy(t) }

// bridgedBy is bridged after some lines of a scenario; the line "native ids" is the configuration.
func bridgedBy(t testing.TB, before ...string) (p *player, s *Session, l *leg) {
	p = newPlayer(t, false)
	if len(before) > 0 && before[0] == "native ids" {
		cfg := *p.sh.cfg
		cfg.NativeIDs = true
		p.sh.cfg, before = &cfg, before[1:]
	}
	for _, line := range append(append([]string{"rule public/default a"}, before...),
		"client c1",
		`c1> connect{client_version:"x" protocol_version:21 proxy_to_broker_url:"TAG(a,broker-0:6650)"}`,
		"d1 up",
		`d1> connected{server_version:"4.0.8" protocol_version:21}`,
		`c1> producer{topic:"t1" producer_id:1 request_id:1} ; subscribe{topic:"t1" subscription:"s" sub_type:1 consumer_id:1 request_id:2}`,
		`d1> producer_success{request_id:1 producer_name:"p"} ; success{request_id:2}`,
	) {
		if err := p.step(line); err != nil {
			t.Fatal(err)
		}
	}
	s = p.endpoints["c1"].(*Session)
	return p, s, s.leg
}

func flow(t testing.TB, p *player, n int, frame string) (all []byte) {
	one, err := p.frames(frame)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		all = append(all, one...)
	}
	return all
}

const (
	sendFrame    = `send{producer_id:1 sequence_id:12345 num_messages:1} +1000`
	messageFrame = `message{consumer_id:1 message_id{ledger_id:123456 entry_id:789 partition:0}} +1000`
	receiptFrame = `send_receipt{producer_id:1 sequence_id:12345 message_id{ledger_id:123456 entry_id:789}}`
	ackFrame     = `ack{consumer_id:1 ack_type:0 message_id{ledger_id:123456 entry_id:789}}`
)

// A steady flow is relayed without allocation, and a read full of frames goes on as one write.
func TestRelayAllocatesNothing(t *testing.T) {
	p, s, l := bridged(t)
	up := append(flow(t, p, 20, sendFrame), flow(t, p, 20, ackFrame)...)
	down := append(flow(t, p, 20, messageFrame), flow(t, p, 20, receiptFrame)...)
	for _, c := range []struct {
		name string
		ep   Endpoint
		src  []byte
	}{{"up", s, up}, {"down", l, down}} {
		allocs := testing.AllocsPerRun(100, func() {
			p.sh.ResetOps()
			if n := c.ep.Data(p.now, c.src); n != len(c.src) {
				t.Fatalf("%s consumed %d of %d", c.name, n, len(c.src))
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations per read of 40 frames, want 0", c.name, allocs)
		}
		if len(p.sh.ops) != 1 || len(p.sh.ops[0].Data) != len(c.src) {
			t.Errorf("%s: %d ops for 40 frames, want 1 write of all", c.name, len(p.sh.ops))
		}
	}
}

// Beside a fenced topic of the same connection, the others are relayed as ever; judging a frame of the fenced one allocates nothing either.
func TestAFenceCostsItsNeighboursNothing(t *testing.T) {
	p, s, l := bridged(t)
	for _, line := range []string{
		`c1> producer{topic:"t2" producer_id:2 request_id:3} ; subscribe{topic:"t2" subscription:"s" sub_type:1 consumer_id:2 request_id:4}`,
		`d1> producer_success{request_id:3 producer_name:"q"} ; success{request_id:4}`,
		"state persistent://public/default/t2 fenced", "fence persistent://public/default/t2",
	} {
		if err := p.step(line); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name   string
		ep     Endpoint
		frame  string
		passes bool
	}{
		{"SEND of a neighbour", s, sendFrame, true},
		{"ACK of a neighbour", s, ackFrame, true},
		{"MESSAGE of a neighbour", l, messageFrame, true},
		{"SEND of the fenced one", s, `send{producer_id:2 sequence_id:1} +1000`, false},
		{"MESSAGE of the fenced one", l, `message{consumer_id:2 message_id{ledger_id:1 entry_id:1}} +1000`, false},
	} {
		src := flow(t, p, 20, c.frame)
		if allocs := testing.AllocsPerRun(100, func() {
			p.sh.ResetOps()
			c.ep.Data(p.now, src)
		}); allocs != 0 {
			t.Errorf("%s: %v allocations per read of 20 frames, want 0", c.name, allocs)
		}
		if n := len(p.sh.ops); c.passes && (n != 1 || len(p.sh.ops[0].Data) != len(src)) || !c.passes && n != 0 {
			t.Errorf("%s: %d ops", c.name, n)
		}
	}
}

// A view of a read is cut where a frame is dropped, and nowhere else.
func TestOnlyTheEvictedHandleIsCutOut(t *testing.T) {
	p, s, _ := bridged(t)
	for _, line := range []string{
		`c1> producer{topic:"t2" producer_id:2 request_id:3}`, `d1> producer_success{request_id:3 producer_name:"q"}`,
		"map persistent://public/default/t1 b", "evict persistent://public/default/t1",
	} {
		if err := p.step(line); err != nil {
			t.Fatal(err)
		}
	}
	kept := flow(t, p, 1, `send{producer_id:2 sequence_id:1} +500`)
	gone := flow(t, p, 1, sendFrame)
	var src, want []byte
	for range 3 {
		src = append(append(src, kept...), gone...)
		want = append(want, kept...)
	}
	p.sh.ResetOps()
	s.Data(p.now, src)
	var got []byte
	for _, op := range p.sh.ops {
		got = append(got, op.Data...)
	}
	if string(got) != string(want) {
		t.Errorf("relayed %d bytes, want the %d of the other producer", len(got), len(want))
	}
	if n := p.sh.counters.DroppedFrames.Load(); n != 3 {
		t.Errorf("dropped %d frames, want 3", n)
	}
}

func benchmarkRelay(b *testing.B, frame string, up bool, perRead int) {
	p, s, l := bridged(b)
	benchmarkFrames(b, p, s, l, frame, up, perRead)
}

func benchmarkFrames(b *testing.B, p *player, s *Session, l *leg, frame string, up bool, perRead int) {
	src := flow(b, p, perRead, frame)
	ep := Endpoint(l)
	if up {
		ep = s
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		p.sh.ResetOps()
		ep.Data(p.now, src)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(perRead), "ns/frame")
}

func BenchmarkRelaySend(b *testing.B)    { benchmarkRelay(b, sendFrame, true, 60) }
func BenchmarkRelayAck(b *testing.B)     { benchmarkRelay(b, ackFrame, true, 60) }
func BenchmarkRelayMessage(b *testing.B) { benchmarkRelay(b, messageFrame, false, 60) }
func BenchmarkRelayReceipt(b *testing.B) { benchmarkRelay(b, receiptFrame, false, 60) }

func TestAnIdleSessionKeepsNoMapOfPendingRequests(t *testing.T) {
	_, s, _ := bridged(t)
	if s.pending != nil {
		t.Errorf("%d requests are pending, in a map of its own, though all were answered", len(s.pending))
	}
	if len(s.producers) == 0 {
		t.Error("no producer was made")
	}
}
