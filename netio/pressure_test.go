//go:build linux

package netio

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/session"
)

// EL-02, short: checksummed frames of all sizes both ways at once, through two loops and several connections.
func TestEL02ChecksummedTrafficBothWaysIsNotCorrupted(t *testing.T) {
	const perConn = 24 << 20
	var corrupt atomic.Int64
	check := func(c net.Conn, seed byte) error {
		var wg sync.WaitGroup
		errs := make(chan error, 2)
		wg.Go(func() { errs <- sendChecked(c, seed, perConn) })
		wg.Go(func() {
			if seed%2 == 1 { // so that queues, and pipes in them, fill
				errs <- readChecked(slow{c}, perConn)
			} else {
				errs <- readChecked(c, perConn)
			}
		})
		wg.Wait()
		return errors.Join(<-errs, <-errs)
	}
	target := server(t, func(c *net.TCPConn) {
		if err := check(c, 99); err != nil {
			corrupt.Add(1)
		}
	})
	var moved atomic.Int64
	e := engine(t, Config{Loops: 2, HighWater: 256 << 10}, relayTo(target, true, func(a, b *relay) { a.moved, b.moved = &moved, &moved }))
	var wg sync.WaitGroup
	for i := range 6 {
		c := connect(t, addr(e))
		wg.Go(func() {
			if err := check(c, byte(i)); err != nil {
				t.Errorf("connection %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	if n := corrupt.Load(); n != 0 {
		t.Errorf("%d servers saw wrong bytes", n)
	}
	if moved.Load() == 0 {
		t.Error("no tail of a large frame was moved by the loop")
	}
	var spliced int64
	for _, l := range e.Stats().Loops {
		spliced += l.SplicedBytes
	}
	t.Logf("%d MiB moved as tails, %d MiB of them spliced", moved.Load()>>20, spliced>>20)
	if spliced == 0 && canSpliceHere {
		t.Error("nothing was spliced")
	}
}

// sendChecked sends frames (length, CRC, payload) until total bytes are sent; the last frame is empty.
func sendChecked(w io.Writer, seed byte, total int) error {
	rng := rand.New(rand.NewChaCha8([32]byte{seed}))
	payload := make([]byte, 512<<10)
	for i := range payload {
		payload[i] = byte(rng.Uint32())
	}
	for sent := 0; sent < total; {
		n := 1 + rng.IntN(1<<(4+rng.IntN(15)))
		off := rng.IntN(len(payload) - n)
		b := binary.BigEndian.AppendUint32(nil, uint32(4+n))
		b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(payload[off:off+n]))
		b = append(b, payload[off:off+n]...)
		if _, err := w.Write(b); err != nil {
			return fmt.Errorf("write after %d bytes: %w", sent, err)
		}
		sent += len(b)
	}
	_, err := w.Write([]byte{0, 0, 0, 0})
	return err
}

func readChecked(r io.Reader, total int) error {
	buf := make([]byte, 512<<10)
	for got := 0; ; {
		if _, err := io.ReadFull(r, buf[:4]); err != nil {
			return fmt.Errorf("read after %d bytes: %w", got, err)
		}
		n := int(binary.BigEndian.Uint32(buf))
		if n == 0 {
			if got < total {
				return fmt.Errorf("ended after %d of %d bytes", got, total)
			}
			return nil
		}
		if n > len(buf) {
			return fmt.Errorf("frame of %d bytes after %d", n, got)
		}
		if _, err := io.ReadFull(r, buf[:n]); err != nil {
			return fmt.Errorf("read after %d bytes: %w", got, err)
		}
		if crc32.ChecksumIEEE(buf[4:n]) != binary.BigEndian.Uint32(buf) {
			return fmt.Errorf("checksum after %d bytes", got)
		}
		got += 4 + n
	}
}

// CN-09: much one way, then the other, with a reader that is slow.
func TestCN09OneWayTrafficDoesNotStallWithSlowReaders(t *testing.T) {
	const total = 64 << 20
	target := server(t, func(c *net.TCPConn) {
		if n, err := io.CopyN(io.Discard, slow{c}, total); err != nil {
			t.Errorf("server read %d: %v", n, err)
		}
		if _, err := c.Write(make([]byte, total)); err != nil {
			t.Error(err)
		}
	})
	e := engine(t, Config{HighWater: 64 << 10, LowWater: 16 << 10}, relayTo(target, false, nil))
	c := connect(t, addr(e))
	if _, err := c.Write(make([]byte, total)); err != nil {
		t.Fatal(err)
	}
	if n, err := io.CopyN(io.Discard, slow{c}, total); err != nil {
		t.Fatalf("client read %d: %v", n, err)
	}
}

// slow reads little at a time.
type slow struct{ net.Conn }

func (s slow) Read(p []byte) (int, error) { return s.Conn.Read(p[:min(len(p), 3000)]) }

// A peer that asks without reading the answers is not read any more: memory is bounded by its watermark.
func TestAPeerThatNeverReadsItsAnswersIsNotHeard(t *testing.T) {
	ends := make(chan *echo, 1)
	e := engine(t, Config{HighWater: 128 << 10}, func(s *fakeShard, c session.Conn) session.Endpoint {
		ep := &echo{base{s: s, c: c}}
		ends <- ep
		return ep
	})
	c := connect(t, addr(e))
	go pour(c)
	ep := <-ends
	eventually(t, "reading is paused", func() bool { return ep.paused.Load() > 0 && e.Stats().Loops[0].Paused == 1 })
	if m := e.Stats().BufferMemory; m > 128<<10+DefaultReadBuffer+2*largeChunk {
		t.Errorf("%d bytes are buffered for one peer", m)
	}
}

// pour writes until it fails.
func pour(w io.Writer) {
	b := make([]byte, 64<<10)
	for {
		if _, err := w.Write(b); err != nil {
			return
		}
	}
}

// 200 sinks that do not read, with sources that push: memory stays within its limit whatever their number, others go on.
func TestStalledSinksStayWithinTheBufferMemoryAndOthersGoOn(t *testing.T) {
	const sinks, limit = 200, 16 << 20
	deaf := deafServer(t)
	live := echoServer(t)
	n := atomic.Int32{}
	e := engine(t, Config{BufferMemory: limit, HighWater: 1 << 20, FlushTimeout: time.Millisecond}, func(s *fakeShard, c session.Conn) session.Endpoint {
		if n.Add(1) <= sinks {
			return relayTo(deaf, false, nil)(s, c)
		}
		return relayTo(live, false, nil)(s, c)
	})
	before := rss(t)
	var pours sync.WaitGroup
	for range sinks {
		c := connect(t, addr(e))
		_ = c.SetWriteBuffer(16 << 10)
		pours.Go(func() { pour(c) })
		t.Cleanup(func() { c.Close() })
	}
	var highest int64
	eventually(t, "all sources are paused", func() bool {
		s := e.Stats()
		highest = max(highest, s.BufferMemory)
		return s.Loops[0].Paused == sinks
	})
	c := connect(t, addr(e))
	began := time.Now()
	for range 200 {
		if _, err := c.Write([]byte("still here")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	s := e.Stats()
	highest = max(highest, s.BufferMemory)
	t.Logf("%d stalled sinks: at most %d KiB of buffers (limit %d KiB), %d KiB queued, resident size grew by %d KiB; 200 round trips of a neighbour in %v",
		sinks, highest>>10, limit>>10, s.Loops[0].QueuedBytes>>10, rss(t)-before, time.Since(began).Round(time.Millisecond))
	if highest > limit+sinks*smallChunk {
		t.Errorf("%d bytes of buffers exceed the limit of %d", highest, limit)
	}
	events, still := int64(0), 0 // the sources go on until the kernel's buffers are full
	eventually(t, "the loop rests, and does not spin on paused connections", func() bool {
		still++
		if now := e.Stats().Loops[0].Events; now != events {
			events, still = now, 0
		}
		return still == 10
	})
	echoed(t, c)
}

// deafServer accepts and never reads.
func deafServer(t testing.TB) string {
	hold := make(chan struct{})
	address := server(t, func(c *net.TCPConn) {
		_ = c.SetReadBuffer(16 << 10)
		<-hold
	})
	t.Cleanup(func() { close(hold) }) // runs before the server's own, which waits
	return address
}

// rss is the resident size in KiB.
func rss(t testing.TB) int {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("no /proc here")
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// CN-04: a reset on one side closes the other at once, also while that side's reading is paused.
func TestCN04AResetOnOneSideClosesTheOtherAtOnce(t *testing.T) {
	reset := make(chan struct{})
	target := server(t, func(c *net.TCPConn) {
		<-reset
		_ = c.SetLinger(0)
	})
	e := engine(t, Config{HighWater: 32 << 10}, relayTo(target, false, nil))
	quiet, pushing := connect(t, addr(e)), connect(t, addr(e))
	go pour(pushing)
	eventually(t, "the pushing side is paused", func() bool { return e.Stats().Loops[0].Paused == 1 && e.Stats().Loops[0].Conns == 4 })
	close(reset)
	for _, c := range []net.Conn{quiet, pushing} {
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read: %v; want the end", err)
		}
	}
	eventually(t, "all connections are gone", func() bool { return e.Stats().Loops[0].Conns == 0 })
}

// A connection that is not read because its sink is full still notices a reset.
func TestAPausedConnectionNoticesItsPeersReset(t *testing.T) {
	deaf := deafServer(t)
	reasons := make(chan session.NetReason, 1)
	e := engine(t, Config{HighWater: 32 << 10, FlushTimeout: time.Millisecond}, relayTo(deaf, false, func(client, _ *relay) {
		client.onEnd = func(r session.NetReason, _ error) { reasons <- r }
	}))
	c := connect(t, addr(e))
	go pour(c)
	eventually(t, "the client is paused", func() bool { return e.Stats().Loops[0].Paused == 1 })
	_ = c.SetLinger(0)
	c.Close()
	if r := <-reasons; r != session.NetReset {
		t.Errorf("reason %d, want NetReset", r)
	}
}

// CN-05: after a half-close everything that came before arrives, then both sides end; nothing spins or leaks.
func TestCN05HalfCloseDeliversWhatCameBefore(t *testing.T) {
	got := make(chan int64, 1)
	target := server(t, func(c *net.TCPConn) {
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	e := engine(t, Config{HighWater: 32 << 10}, relayTo(target, false, nil))
	c := connect(t, addr(e))
	const total = 5 << 20
	if _, err := c.Write(make([]byte, total)); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != total {
		t.Errorf("%d of %d bytes arrived", n, total)
	}
	wantEOF(t, c)
	eventually(t, "all connections are gone", func() bool { return e.Stats().Loops[0].Conns == 0 })
}

// EL-04: 1,000 connections cut with full queues: memory returns, Closed comes once each.
func TestEL04ThousandConnectionsCutWithFullQueues(t *testing.T) {
	const conns = 1000
	var mu sync.Mutex
	var ends []*echo
	var told atomic.Int32
	e := engine(t, Config{Loops: 2, HighWater: 16 << 10, BufferMemory: 64 << 20}, func(s *fakeShard, c session.Conn) session.Endpoint {
		ep := &echo{base{s: s, c: c, onEnd: func(session.NetReason, error) { told.Add(1) }}}
		s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: make([]byte, 6<<20)}) // more than the socket takes
		mu.Lock()
		ends = append(ends, ep)
		mu.Unlock()
		return ep
	})
	peers := make([]*net.TCPConn, conns)
	for i := range peers {
		c, err := net.Dial("tcp", addr(e))
		if err != nil {
			t.Fatal(err)
		}
		peers[i] = c.(*net.TCPConn)
		if i%100 == 99 { // the payload of a full queue is large: cut as we go
			for _, c := range peers[i-99 : i+1] {
				_ = c.SetLinger(0)
				c.Close()
			}
		}
	}
	eventually(t, "every endpoint is told", func() bool { return told.Load() == conns })
	eventually(t, "memory returns", func() bool {
		s := e.Stats()
		return s.BufferMemory == 0 && s.Loops[0].Conns+s.Loops[1].Conns == 0
	})
	mu.Lock()
	defer mu.Unlock()
	for i, ep := range ends {
		if n := ep.closed.Load(); n != 1 {
			t.Errorf("endpoint %d: Closed %d times", i, n)
		}
	}
}

// EL-06, OP-05: 500 dials to hosts that do not answer and 500 to names that do not resolve fail within the limit; the loop does not notice.
func TestEL06BlackHoledDialsFailInTimeAndTheLoopStaysResponsive(t *testing.T) {
	const dials, limit, trips = 500, time.Hour, 100
	hole := blackHole(t)
	var mu sync.Mutex
	reasons := map[session.NetReason]int{}
	e := engine(t, Config{DialTimeout: limit, Lookup: func(ctx context.Context, _ string) ([]netip.Addr, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}, echoing)
	c := connect(t, addr(e))
	echoed(t, c)
	e.Post(0, func(now time.Time, sh Shard) {
		s := sh.(*fakeShard)
		for i := range 2 * dials {
			target := hole
			if i%2 == 1 {
				target = fmt.Sprintf("broker-%d.invalid:6650", i)
			}
			s.do(session.Op{Kind: session.OpDial, Addr: target, Endpoint: &base{onEnd: func(r session.NetReason, _ error) {
				mu.Lock()
				reasons[r]++
				mu.Unlock()
			}}})
		}
	})
	ended := func(r session.NetReason) int {
		mu.Lock()
		defer mu.Unlock()
		return reasons[r]
	}
	for range trips { // a loop that waits for one of them does not answer
		echoed(t, c)
	}
	passes(e, limit-time.Minute)
	for range trips {
		echoed(t, c)
	}
	if n := ended(session.NetDialTimeout); n != 0 {
		t.Errorf("%d dials ended before their time", n)
	}
	passes(e, time.Minute)
	if timeouts, names := ended(session.NetDialTimeout), ended(session.NetResolve); timeouts != dials || names != dials {
		t.Errorf("after %v: %d time-outs and %d names, want %d of each", limit, timeouts, names, dials)
	}
}

// blackHole is an address that does not answer to SYN: a listener whose backlog is full.
func blackHole(t *testing.T) string {
	t.Helper()
	ln := fullListener(t)
	return ln
}

// EL-08, EL-04: what is asked for a connection that is gone is ignored, whoever has its descriptor now.
func TestEL08OpsForAClosedConnectionAreIgnored(t *testing.T) {
	names := make(chan session.Conn, 2)
	e := engine(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		names <- c
		return &echo{base{s: s, c: c}}
	})
	first := connect(t, addr(e))
	gone := <-names
	first.Close()
	eventually(t, "the first is gone", func() bool { return e.Stats().Loops[0].Conns == 0 })
	second := connect(t, addr(e))
	now := <-names
	if now&maxFD == gone&maxFD && now == gone {
		t.Fatalf("the name %x was used twice", now)
	}
	done := make(chan struct{})
	e.Post(0, func(_ time.Time, sh Shard) {
		s := sh.(*fakeShard)
		for _, op := range []session.Op{
			{Kind: session.OpWrite, Conn: gone, Data: []byte("for nobody")},
			{Kind: session.OpPause, Conn: gone}, {Kind: session.OpResume, Conn: gone},
			{Kind: session.OpClose, Conn: gone, Flush: true}, {Kind: session.OpClose, Conn: gone},
			{Kind: session.OpWrite, Conn: 0, Data: []byte("for none")},
			{Kind: session.OpClose, Conn: 1<<32 | maxFD},
		} {
			s.do(op)
		}
		close(done)
	})
	<-done
	if _, err := second.Write([]byte("mine")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(second, got); err != nil || string(got) != "mine" {
		t.Fatalf("read %q, %v", got, err)
	}
}
