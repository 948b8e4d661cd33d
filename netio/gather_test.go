//go:build linux

package netio

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"pointsman/core/session"
)

// gatherer writes what comes to sink at the end of the turn, and plainly behind it a mark of its own.
type gatherer struct {
	base
	sink *base
	mark []byte
	last bool // closes sink in the same turn

	heard func() // may be nil
}

func (g *gatherer) Data(_ time.Time, src []byte) int {
	if g.heard != nil {
		g.heard()
	}
	g.s.do(session.Op{Kind: session.OpWrite, Conn: g.sink.c, Data: src, Gather: true})
	if g.mark != nil {
		g.s.do(session.Op{Kind: session.OpWrite, Conn: g.sink.c, Data: g.mark})
	}
	if g.last {
		g.s.do(session.Op{Kind: session.OpClose, Conn: g.sink.c, Flush: true})
	}
	return len(src)
}

// gathering is an engine whose clients all write to one sink. It returns the clients and the other end of the sink. prepare is called for each
// client's endpoint.
func gathering(t *testing.T, clients int, wait func(*loop) func() error, prepare func(i int, g *gatherer)) (e *Engine, ends []*net.TCPConn, sink *net.TCPConn) {
	accepted := make(chan *net.TCPConn, 1)
	done := make(chan struct{})
	to := server(t, func(c *net.TCPConn) { accepted <- c; <-done })
	t.Cleanup(func() { close(done) })
	n := 0
	out := &base{}
	e = engineAs(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		if n == 0 {
			out.s = s
			s.do(session.Op{Kind: session.OpDial, Addr: to, Endpoint: out})
		}
		g := &gatherer{base: base{s: s, c: c}, sink: out}
		prepare(n, g)
		n++
		return g
	}, func(e *Engine) {
		if wait != nil {
			e.loops[0].wait = wait(e.loops[0])
		}
	})
	for i := range clients {
		ends = append(ends, connect(t, addr(e)))
		eventually(t, "the client is accepted", func() bool { return e.Stats().Loops[0].Accepted == int64(i+1) })
	}
	sink = <-accepted
	eventually(t, "the sink is connected", func() bool { return e.Stats().Loops[0].Conns == int64(clients+1) })
	if err := sink.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return e, ends, sink
}

// inOneTurn has everything that happens in f come to the loop at once.
func inOneTurn(e *Engine, f func()) {
	begun, end := make(chan struct{}), make(chan struct{})
	e.loops[0].post(func() { close(begun); <-end })
	<-begun
	f()
	close(end)
}

// arrived waits, within f of inOneTurn, until n of e's clients have bytes that are not read: the kernel may take its time to hand them over.
func arrived(e *Engine, n int) {
	for have := -1; have < n; {
		have = 0
		for _, c := range e.loops[0].conns {
			if c != nil && c.accepted && receivedBytes(int(c.fd)) > 0 {
				have++
			}
		}
	}
}

// sendAll has each client send its message, all within one turn, and returns them in order.
func sendAll(t *testing.T, e *Engine, ends []*net.TCPConn, size int) (all [][]byte) {
	inOneTurn(e, func() {
		for i, c := range ends {
			all = append(all, bytes.Repeat([]byte{byte('a' + i)}, size))
			if _, err := c.Write(all[i]); err != nil {
				t.Error(err)
			}
		}
		arrived(e, len(ends))
	})
	return all
}

func TestSmallWritesOfATurnGatherIntoOne(t *testing.T) {
	const clients = 20
	for name, wait := range map[string]func(*loop) func() error{
		"the loop's own way of waiting": nil,
		"the poller's":                  func(l *loop) func() error { return func() error { return l.poller.Polling(l.event) } },
	} {
		t.Run(name, func(t *testing.T) {
			var e *Engine
			turns := map[int64]bool{} // in which clients were read: one, or more when the loop was slow (readyTime)
			heard := func() {
				turn := int64(0)
				for i := range e.loops[0].counters.turns {
					turn += e.loops[0].counters.turns[i].Load()
				}
				turns[turn] = true
			}
			e, ends, sink := gathering(t, clients, wait, func(_ int, g *gatherer) { g.heard = heard })
			before := e.Stats().Loops[0].Writes
			want := bytes.Join(sendAll(t, e, ends, 100), nil)
			got := make([]byte, len(want))
			if _, err := io.ReadFull(sink, got); err != nil {
				t.Fatal(err)
			}
			for _, letter := range want {
				if n := bytes.Count(got, []byte{letter}); n != 100 {
					t.Fatalf("%q came %d times, want 100", letter, n)
				}
			}
			inOneTurn(e, func() {}) // the counters of the turn before are complete
			if n := e.Stats().Loops[0].Writes - before; n != int64(len(turns)) || n > clients/2 {
				t.Errorf("%d writes for %d messages of %d turns, want one for each turn", n, clients, len(turns))
			}
			if n := e.Stats().Loops[0].QueuedBytes; n != 0 {
				t.Errorf("%d bytes are queued at the end of the turn", n)
			}
		})
	}
}

func TestWhatIsWrittenBehindGatheredBytesStaysBehindThem(t *testing.T) {
	e, ends, sink := gathering(t, 1, nil, func(_ int, g *gatherer) { g.mark = []byte("!") })
	for range 3 {
		sendAll(t, e, ends, 3)
		got := make([]byte, 4)
		if _, err := io.ReadFull(sink, got); err != nil || string(got) != "aaa!" {
			t.Fatalf("%q, %v; want aaa!", got, err)
		}
	}
}

func TestGatheredBytesAreBounded(t *testing.T) {
	const clients, size = 8, maxGathered / 2
	e, ends, sink := gathering(t, clients, nil, func(int, *gatherer) {})
	before := e.Stats().Loops[0].Writes
	sendAll(t, e, ends, size)
	if n, err := io.CopyN(io.Discard, sink, clients*size); err != nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
	inOneTurn(e, func() {})
	// Three halves are more than may gather.
	if n := e.Stats().Loops[0].Writes - before; n < clients/3 {
		t.Errorf("%d writes for %d bytes: more than %d have gathered", n, clients*size, maxGathered)
	}
}

func TestGatheredBytesArriveBeforeTheEnd(t *testing.T) {
	e, ends, sink := gathering(t, 3, nil, func(i int, g *gatherer) { g.last = i == 2 })
	sendAll(t, e, ends[:2], 10)
	sendAll(t, e, ends[2:], 10)
	got, err := io.ReadAll(sink)
	if err != nil || len(got) != 30 {
		t.Errorf("%d bytes, %v; want 30 and the end", len(got), err)
	}
}

func TestGatheredBytesForAPeerThatIsGoneEndItsConnection(t *testing.T) {
	ended := make(chan session.NetReason, 1)
	e, ends, sink := gathering(t, 1, nil, func(_ int, g *gatherer) { g.sink.onEnd = func(r session.NetReason, _ error) { ended <- r } })
	inOneTurn(e, func() {
		_ = sink.SetLinger(0)
		sink.Close()
		if _, err := ends[0].Write([]byte("late")); err != nil {
			t.Error(err)
		}
	})
	if r := <-ended; r != session.NetReset {
		t.Errorf("ended with reason %d, want NetReset", r)
	}
}
