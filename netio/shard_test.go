//go:build linux

package netio

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/session"
	"pointsman/internal/leaktest"
)

var _ Shard = (*session.Shard)(nil) // what runs on the loops in the product

// fakeShard is what the tests put on a loop: accept makes the endpoints, tick fires deadlines. Endpoints add to ops.
type fakeShard struct {
	accept func(s *fakeShard, c session.Conn) session.Endpoint
	tick   func(s *fakeShard, now time.Time) time.Time
	ops    []session.Op
	peer   netip.AddrPort
}

func (s *fakeShard) Accept(_ time.Time, c session.Conn, _ int, peer, _ netip.AddrPort) session.Endpoint {
	s.peer = peer
	return s.accept(s, c)
}

func (s *fakeShard) Tick(now time.Time) time.Time {
	if s.tick == nil {
		return time.Time{}
	}
	return s.tick(s, now)
}

func (s *fakeShard) Ops() []session.Op { return s.ops }
func (s *fakeShard) ResetOps()         { clear(s.ops); s.ops = s.ops[:0] }

func (s *fakeShard) do(op session.Op) { s.ops = append(s.ops, op) }

// base is an endpoint that does nothing and checks that Closed is the last call and comes once.
type base struct {
	s      *fakeShard
	c      session.Conn
	closed atomic.Int32
	onEnd  func(session.NetReason, error)
	paused atomic.Int32 // times that reading was paused
}

func (b *base) Dialed(_ time.Time, c session.Conn) { b.c = c }
func (b *base) Data(_ time.Time, src []byte) int   { return len(src) }
func (b *base) Tail() (session.Conn, int)          { return 0, 0 }
func (b *base) Moved(time.Time, int)               {}
func (b *base) ReadPaused(_ time.Time, p bool) {
	if b.closed.Load() != 0 {
		panic("ReadPaused after Closed")
	}
	if p {
		b.paused.Add(1)
	}
}

func (b *base) Closed(_ time.Time, reason session.NetReason, err error) {
	if b.closed.Add(1) != 1 {
		panic(fmt.Sprintf("Closed twice: %v %v", reason, err))
	}
	if b.onEnd != nil {
		b.onEnd(reason, err)
	}
}

// echo writes back what comes.
type echo struct{ base }

func (e *echo) Data(_ time.Time, src []byte) int {
	e.s.do(session.Op{Kind: session.OpWrite, Conn: e.c, Data: src})
	return len(src)
}

// relay is one side of a pair: what comes goes to the other side, once that is there. With frames it forwards whole frames only (4 bytes
// of length, then that many), and hands the rest of a large one to the loop.
type relay struct {
	base
	other  *relay
	frames bool
	whole  bool // with frames: an incomplete one is left with the loop
	tail   int
	moved  *atomic.Int64
}

func (r *relay) Dialed(_ time.Time, c session.Conn) {
	r.c = c
	if r.other.closed.Load() != 0 {
		r.s.do(session.Op{Kind: session.OpClose, Conn: c})
		return
	}
	r.s.do(session.Op{Kind: session.OpResume, Conn: r.other.c})
}

func (r *relay) Data(_ time.Time, src []byte) int {
	if r.other.c == 0 {
		r.s.do(session.Op{Kind: session.OpPause, Conn: r.c})
		return 0
	}
	if !r.frames {
		r.s.do(session.Op{Kind: session.OpWrite, Conn: r.other.c, Data: src, Relay: true})
		return len(src)
	}
	n := 0
	if r.tail > 0 {
		n = min(r.tail, len(src))
		r.tail -= n
		r.s.do(session.Op{Kind: session.OpWrite, Conn: r.other.c, Data: src[:n], Relay: true})
	}
	for r.tail == 0 && len(src)-n >= 4 {
		size := 4 + int(binary.BigEndian.Uint32(src[n:]))
		have := min(size, len(src)-n)
		if r.whole && have < size {
			break
		}
		r.s.do(session.Op{Kind: session.OpWrite, Conn: r.other.c, Data: src[n : n+have], Relay: true})
		r.tail = size - have
		n += have
	}
	return n
}

func (r *relay) Tail() (session.Conn, int) {
	if r.tail == 0 {
		return 0, 0
	}
	return r.other.c, r.tail
}

func (r *relay) Moved(_ time.Time, n int) {
	r.tail -= n
	if r.moved != nil {
		r.moved.Add(int64(n))
	}
}

func (r *relay) Closed(now time.Time, reason session.NetReason, err error) {
	r.base.Closed(now, reason, err)
	if r.other.c != 0 && r.other.closed.Load() == 0 {
		r.other.closed.Store(1)
		r.s.do(session.Op{Kind: session.OpClose, Conn: r.other.c, Flush: true})
	}
}

// relayTo pairs every accepted connection with a dial to addr.
func relayTo(addr string, frames bool, each func(client, server *relay)) func(*fakeShard, session.Conn) session.Endpoint {
	return func(s *fakeShard, c session.Conn) session.Endpoint {
		client := &relay{base: base{s: s, c: c}, frames: frames}
		server := &relay{base: base{s: s}, frames: frames, other: client}
		client.other = server
		if each != nil {
			each(client, server)
		}
		s.do(session.Op{Kind: session.OpDial, Addr: addr, Endpoint: server})
		return client
	}
}

func echoing(s *fakeShard, c session.Conn) session.Endpoint {
	return &echo{base{s: s, c: c}}
}

// engine runs an engine with accept on every loop, and checks at the end that nothing is counted any more.
func engine(t testing.TB, cfg Config, accept func(*fakeShard, session.Conn) session.Endpoint) *Engine {
	t.Helper()
	return engineAs(t, cfg, accept, func(*Engine) {})
}

// engineAs is engine with a change of what New has made.
func engineAs(t testing.TB, cfg Config, accept func(*fakeShard, session.Conn) session.Endpoint, change func(*Engine)) *Engine {
	t.Helper()
	if cfg.Loops == 0 {
		cfg.Loops = 1
	}
	if cfg.Listeners == nil {
		cfg.Listeners = []Listener{{Network: "tcp", Addr: "127.0.0.1:0", ID: 1}}
	}
	if cfg.NewShard == nil {
		cfg.NewShard = func(int) Shard { return &fakeShard{accept: accept} }
	}
	if cfg.Fault == nil {
		cfg.Fault = func(err error) { t.Errorf("fault: %v", err) }
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	change(e)
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := e.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		if s := e.Stats(); s.BufferMemory != 0 {
			t.Errorf("%d bytes of buffers are still counted after the end", s.BufferMemory)
		}
		for i, l := range e.Stats().Loops {
			if l.Conns != 0 || l.Clients != 0 || l.QueuedBytes != 0 || l.Paused != 0 || l.Handshaking != 0 {
				t.Errorf("loop %d after the end: %+v", i, l)
			}
		}
	})
	return e
}

func TestMain(m *testing.M) { leaktest.Main(m) }

func descriptors(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc here")
	}
	return len(entries)
}

func addr(e *Engine) string { return e.Addrs()[0].String() }

func connect(t testing.TB, address string) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", address, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// server accepts and runs serve for each connection; it ends with the test.
func server(t testing.TB, serve func(*net.TCPConn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	conns := map[*net.TCPConn]struct{}{}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			tc := c.(*net.TCPConn)
			mu.Lock()
			conns[tc] = struct{}{}
			mu.Unlock()
			wg.Go(func() {
				serve(tc)
				tc.Close()
				mu.Lock()
				delete(conns, tc)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().String()
}

func echoServer(t testing.TB) string {
	return server(t, func(c *net.TCPConn) { _, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
}

// patience bounds what a test waits for that has to come: long enough for a machine that does much else.
const patience = 3 * time.Minute

// passes has that much time pass on the clock of e, which has one loop, and does what is due by then before it returns: real time that a busy machine
// takes proves nothing.
func passes(e *Engine, d time.Duration) {
	done := make(chan struct{})
	e.loops[0].post(func() {
		e.base = e.base.Add(-d)
		e.loops[0].fire()
		close(done)
	})
	<-done
}

// eventually waits for a state that other goroutines bring about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		time.Sleep(2 * time.Millisecond) // a poll of an outside state, not a wait for time to pass
	}
}

func wantEOF(t testing.TB, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("read %d bytes, %v; want the end", n, err)
	}
}
