//go:build linux

package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// parse reads one whole frame, and checks the checksum of its payload when it has one.
func parse(t *testing.T, frame []byte) *pulsarpb.BaseCommand {
	t.Helper()
	h, ok, err := codec.ParseHead(frame, maxFrame)
	if err != nil || !ok || h.Size != len(frame) {
		t.Fatalf("%d bytes: head %+v, %v, %v", len(frame), h, ok, err)
	}
	cmd := new(pulsarpb.BaseCommand)
	if err := codec.Parse(cmd, frame, h); err != nil {
		t.Fatal(err)
	}
	if rest := frame[h.CmdEnd:]; len(rest) > 0 {
		if magic := binary.BigEndian.Uint16(rest); magic != 0x0e01 {
			t.Fatalf("magic %x", magic)
		}
		if got, want := binary.BigEndian.Uint32(rest[2:]), crc32.Checksum(rest[6:], crc32.MakeTable(crc32.Castagnoli)); got != want {
			t.Fatalf("checksum %x, want %x", got, want)
		}
	}
	return cmd
}

func TestTemplatesAreRealFramesWhateverTheIDs(t *testing.T) {
	for _, size := range []int{1, 100, 1 << 10, 128 << 10} {
		for _, id := range []uint64{firstID, firstID + 1, 1<<32 - 1, 1<<35 - 1} {
			for _, handle := range []byte{0, 1, maxHandles} {
				send, message := sendTemplate(size), messageTemplate(size)
				for _, tmpl := range []*template{send, message} {
					tmpl.frame[tmpl.handle] = handle
					putID(tmpl.frame[tmpl.id:], id)
				}
				s, m := parse(t, send.frame).GetSend(), parse(t, message.frame).GetMessage()
				if s.GetProducerId() != uint64(handle) || s.GetSequenceId() != id {
					t.Errorf("SEND %v, want handle %d, id %d", s, handle, id)
				}
				if m.GetConsumerId() != uint64(handle) || m.GetMessageId().GetEntryId() != id || m.GetMessageId().GetLedgerId() != ledgerID {
					t.Errorf("MESSAGE %v, want handle %d, id %d", m, handle, id)
				}
				if n := len(send.frame) - size; n < 40 || n > 100 {
					t.Errorf("a SEND of %d bytes takes %d more", size, n)
				}
			}
		}
	}
}

func TestALookupTemplateNamesItsTopicAndRequest(t *testing.T) {
	tmpl := newLookupTemplate()
	for _, topic := range []int{0, 7, 1234567} {
		a := parse(t, tmpl.set(topic, firstID+uint64(topic))).GetLookupTopic()
		if a.GetTopic() != benchTopic(topic) || a.GetRequestId() != firstID+uint64(topic) {
			t.Errorf("LOOKUP %v, want topic %d", a, topic)
		}
	}
}

func TestASubFieldIsFoundAsTheDecoderFindsIt(t *testing.T) {
	h := codec.TypeLookup
	frame := lookupFrame("persistent://a/b/c", 99)
	if v, ok := subField(frame, h, 2); !ok || v != 99 {
		t.Errorf("request id %d, %v", v, ok)
	}
	if _, ok := subField(frame, h, 3); ok {
		t.Error("a field that is not there")
	}
	if _, ok := subField(frame, codec.TypeSend, 2); ok {
		t.Error("a field of another command")
	}
	for end := range len(frame) {
		subField(frame[:max(end, 8)], h, 2) // cut short: anything but a panic
	}
}

func TestAStreamResumesAnywhereInAFrame(t *testing.T) {
	const frames = 200
	for _, size := range []int{10, 3000, 100_000} {
		tmpl := sendTemplate(size)
		b := newBatch(tmpl)
		s := &stream{tmpl: tmpl, handle: 3, next: firstID}
		var got []byte
		for done := 0; done < frames; {
			src := b.fill(s, frames-done)
			n := 1 + rand.IntN(len(src)) // what the socket took
			got = append(got, src[:n]...)
			done += s.wrote(n)
		}
		for i := range frames {
			frame := got[i*tmpl.size():][:tmpl.size()]
			if c := parse(t, frame).GetSend(); c.GetSequenceId() != firstID+uint64(i) || c.GetProducerId() != 3 {
				t.Fatalf("frame %d of %d bytes: %v", i, size, c)
			}
		}
		if len(got) != frames*tmpl.size() {
			t.Errorf("%d bytes, want %d", len(got), frames*tmpl.size())
		}
	}
}

// noted is a handler that writes down what it is called with.
type noted struct{ lines []string }

func (n *noted) frame(_ *conn, h codec.Head, cmd []byte) {
	n.lines = append(n.lines, fmt.Sprintf("%s %d %x", h.Type, h.Size, cmd))
}
func (n *noted) flush(*conn)         {}
func (n *noted) writable(*conn)      {}
func (n *noted) closed(*conn, error) {}

func TestBytesAreCutIntoTheSameFramesHoweverTheyArrive(t *testing.T) {
	var src []byte
	src = append(src, connectFrame("broker:6650")...)
	src = append(src, sendTemplate(200).frame...)
	src = append(src, pongFrame...)
	src = append(src, messageTemplate(1).frame...)
	src = append(src, lookupFrame("t", 1)...)
	whole := &noted{}
	if err := (&conn{h: whole}).feed(src); err != nil || len(whole.lines) != 5 {
		t.Fatal(whole.lines, err)
	}
	for cut := 1; cut < len(src); cut++ {
		for _, chunks := range [][][]byte{{src[:cut], src[cut:]}, slices.Collect(slices.Chunk(src, cut))} {
			got := &noted{}
			c := &conn{h: got}
			for _, chunk := range chunks {
				if err := c.feed(bytes.Clone(chunk)); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.Equal(got.lines, whole.lines) {
				t.Fatalf("cut at %d:\n%s\nwant\n%s", cut, strings.Join(got.lines, "\n"), strings.Join(whole.lines, "\n"))
			}
		}
	}
}

func TestLatencyCountsFromTheTimeAMessageWasDue(t *testing.T) {
	l := &produceLoad{tally: tally{latency: newHistogram()}, interval: time.Millisecond, start: time.Now().Add(-time.Second), conns: make([]*producing, 2)}
	c := &producing{load: l, streams: make([]stream, 1)}
	// The 11th message of the second of two connections is number 21 of all, due after 21 ms. It does not matter when it was sent.
	sub := appendUint(appendUint(nil, 1, 0), 2, firstID+10)
	receipt := appendFrame(nil, codec.TypeSendReceipt, sub)
	h, _, _ := codec.ParseHead(receipt, maxFrame)
	c.frame(&conn{id: 1}, h, receipt)
	if got := time.Duration(l.latency.Max()); got < 978*time.Millisecond || got > time.Second+setupTimeout {
		t.Errorf("latency %s, want the 979 ms that it is late", got)
	}
}

func TestALatencyBeyondTheHistogramCountsAsItsEnd(t *testing.T) {
	l := tally{latency: newHistogram()}
	l.record(time.Hour)
	l.record(-time.Second)
	if n, high := l.latency.TotalCount(), l.latency.Max(); n != 2 || high < int64(4*time.Minute) {
		t.Errorf("%d values, the largest %s", n, time.Duration(high))
	}
}

// startBrokerHere runs a fake broker in this process.
func startBrokerHere(t testing.TB, ports int) []server {
	t.Helper()
	return runBrokerHere(t, BrokerConfig{Ports: ports})
}

func runBrokerHere(t testing.TB, cfg BrokerConfig) []server {
	t.Helper()
	b, err := NewBroker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- b.Run() }()
	t.Cleanup(func() {
		b.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var addrs []server
	for _, a := range b.Addrs() {
		addrs = append(addrs, server{AddrPort: netip.MustParseAddrPort(a)})
	}
	return addrs
}

// runUntil lets a load work until it has done n operations.
func runUntil(t testing.TB, l load, n uint64) {
	t.Helper()
	const limit = time.Minute
	for deadline := time.Now().Add(limit); l.base().done < n; {
		if err := l.base().runFor(5 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("only %d of %d operations", l.base().done, n)
		}
	}
}

func TestEveryLoadMakesProgressAgainstTheFakeBroker(t *testing.T) {
	addr := startBrokerHere(t, 1)[0]
	for _, p := range []Params{
		{Scenario: "produce", Connections: 5},
		{Scenario: "produce", Connections: 2, Producers: 7, Size: 300 << 10},
		{Scenario: "consume", Connections: 3, Producers: 2},
		{Scenario: "consume", Connections: 2, Producers: 3, Size: 1 << 20},
		{Scenario: "rate", Connections: 3, Rate: 5000},
		{Scenario: "lookup", Connections: 4},
		{Scenario: "churn", Connections: 10},
		{Scenario: "connect", Connections: 10},
	} {
		p = p.withDefaults()
		t.Run(p.Label(), func(t *testing.T) {
			l, err := startLoad(p, addr)
			if err != nil {
				t.Fatal(err)
			}
			defer l.close()
			runUntil(t, l, 500)
			if n := l.base().latency.TotalCount(); (p.Scenario == "rate" || p.Scenario == "lookup" || p.Scenario == "churn" || p.Scenario == "connect") && uint64(n) != l.base().done {
				t.Errorf("%d latencies of %d operations", n, l.base().done)
			}
		})
	}
}

func TestConnectionsForLookupsAreHeldWithoutABroker(t *testing.T) {
	at, ops := startProxy(t, "")
	l, err := startLoad(Params{Scenario: "hold", Connections: 20, Unbridged: true}.withDefaults(), at)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	m, err := scrape(ops)
	if err != nil {
		t.Fatal(err)
	}
	for family, want := range map[string]float64{"pulsar_proxy_active_connections": 20, "pointsman_bridged_connections": 0} {
		if n, err := m.sum(family, ""); err != nil || n != want {
			t.Errorf("%s is %v, want %v: %v", family, n, want, err)
		}
	}
}

func TestHealthyTrafficGoesOnBesideStalledPeers(t *testing.T) {
	addr := startBrokerHere(t, 1)[0]
	for _, stall := range []string{"consumers", "lookups"} {
		p := Params{Scenario: "stall", Stall: stall, Stalled: 5, Duration: 20 * time.Millisecond}.withDefaults()
		l, err := newStallLoad(p, addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.before(); err != nil {
			t.Fatal(err)
		}
		runUntil(t, l, 100)
		muted := 0
		for _, c := range l.loop.conns {
			if c != nil && c.mute {
				muted++
			}
		}
		if muted != p.Stalled {
			t.Errorf("%s: %d peers do not read, want %d", stall, muted, p.Stalled)
		}
		l.close()
	}
}

func TestLookupsNameOneAddressAfterTheOther(t *testing.T) {
	addrs := startBrokerHere(t, 3)
	k, err := openLink(addrs[0], 0, "")
	if err != nil {
		t.Fatal(err)
	}
	defer k.close()
	seen := map[string]int{}
	for i := range 6 {
		target, err := k.lookup(benchTopic(i))
		if err != nil {
			t.Fatal(err)
		}
		seen[target]++
	}
	for _, a := range addrs {
		if seen[a.String()] != 2 {
			t.Errorf("%s was named %d times: %v", a, seen[a.String()], seen)
		}
	}
}

func TestARefusedRequestNamesTheReason(t *testing.T) {
	addr := startBrokerHere(t, 1)[0]
	k, err := openLink(addr, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	defer k.close()
	_, err = k.ask(subscribeFrame("t", 1, 1, 0), codec.TypeSuccess)
	if err == nil || !strings.Contains(err.Error(), "size-0") {
		t.Errorf("a subscription without a size: %v", err)
	}
	if _, err = startLoad(Params{Scenario: "rate", Producers: 2}, addr); err == nil {
		t.Error("two producers per connection at a fixed rate must be refused: the message's number tells when it was due")
	}
	if _, err = startLoad(Params{Scenario: "nonsense"}, addr); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("an unknown scenario: %v", err)
	}
}

func TestTheRelayCopiesBothWaysAndPassesTheEndOn(t *testing.T) {
	for _, user := range []bool{false, true} {
		echo, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				c, err := echo.Accept()
				if err != nil {
					return
				}
				go func() {
					_, _ = io.Copy(c, c)
					_ = c.Close()
				}()
			}
		}()
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = Relay(ln, []string{echo.Addr().String()}, nil, user) }()
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		want := bytes.Repeat([]byte("0123456789"), 50_000)
		go func() {
			_, _ = c.Write(want)
			_ = c.(*net.TCPConn).CloseWrite()
		}()
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want) {
			t.Errorf("user=%v: %d bytes came back of %d, %v", user, len(got), len(want), err)
		}
		c.Close()
		ln.Close()
		echo.Close()
	}
}
