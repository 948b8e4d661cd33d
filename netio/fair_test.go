//go:build linux

package netio

import (
	"bytes"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"pointsman/core/session"
)

// worker is an endpoint that never comes to an end with what it was sent once.
type worker struct {
	base
	work func()
}

func (w *worker) Data(_ time.Time, src []byte) int {
	w.work()
	w.s.do(session.Op{Kind: session.OpResume, Conn: w.c})
	return 0
}

// listening is a relay's side that tells when bytes came.
type listening struct {
	*relay
	heard func()
}

func (l listening) Data(now time.Time, src []byte) int {
	l.heard()
	return l.relay.Data(now, src)
}

// working is an engine with workers and, connected first, a relay. It returns the client ends of both.
func working(t *testing.T, workers int, work, heard func()) (e *Engine, ends []*net.TCPConn, relayed *net.TCPConn) {
	to := server(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
	pair := relayTo(to, false, nil)
	n := 0
	e = engine(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		if n++; n > 1 {
			return &worker{base{s: s, c: c}, work}
		}
		return listening{pair(s, c).(*relay), heard}
	})
	relayed = connect(t, addr(e))
	echoed(t, relayed)
	for i := range workers {
		ends = append(ends, connect(t, addr(e)))
		eventually(t, "the client is accepted", func() bool { return e.Stats().Loops[0].Accepted == int64(i+2) })
	}
	return e, ends, relayed
}

// echoed sends a few bytes and waits until they come back.
func echoed(t *testing.T, c *net.TCPConn) {
	t.Helper()
	want, got := []byte("passing"), make([]byte, 7)
	if _, err := c.Write(want); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("received %q, %v", got, err)
	}
}

// Of what comes at once, bytes that only pass go first, whoever came first.
func TestBytesThatPassGoBeforeWork(t *testing.T) {
	var order []string
	note := func(what string) func() {
		return func() {
			if len(order) < 100 {
				order = append(order, what)
			}
		}
	}
	e, ends, relayed := working(t, 20, note("work"), note("relay"))
	inOneTurn(e, func() {
		order = nil
		for _, c := range ends {
			if _, err := c.Write([]byte("work")); err != nil {
				t.Error(err)
			}
		}
		if _, err := relayed.Write([]byte("passing")); err != nil {
			t.Error(err)
		}
		arrived(e, len(ends)+1)
	})
	if _, err := io.ReadFull(relayed, make([]byte, 7)); err != nil {
		t.Fatal(err)
	}
	inOneTurn(e, func() {
		if len(order) == 0 || order[0] != "relay" {
			t.Errorf("in this order: %v; want the relay first", order[:min(len(order), 25)])
		}
	})
}

// However much work waits, the loop looks for new bytes after readyTime.
func TestWorkThatWaitsDoesNotKeepTheLoopFromNewBytes(t *testing.T) {
	const workers = 50
	var relayed *net.TCPConn
	var here *conn // relayed's other end
	calls, sentAt, heardAt := 0, 0, 0
	e, ends, passing := working(t, workers, func() {
		calls++
		for begun := time.Now(); time.Since(begun) < readyTime; { // a hard worker
		}
		if calls == 2*workers+workers/2 {
			sentAt = calls
			if _, err := relayed.Write([]byte("passing")); err != nil {
				t.Error(err)
			}
			for receivedBytes(int(here.fd)) == 0 { // the kernel may take its time to hand them over
			}
		}
	}, func() {
		if sentAt > 0 && heardAt == 0 {
			heardAt = calls
		}
	})
	inOneTurn(e, func() {
		relayed = passing
		for _, c := range e.loops[0].conns {
			if c != nil && c.accepted && c.relays {
				here = c
			}
		}
		for _, c := range ends {
			if _, err := c.Write([]byte("work")); err != nil {
				t.Error(err)
			}
		}
	})
	if _, err := io.ReadFull(passing, make([]byte, 7)); err != nil {
		t.Fatal(err)
	}
	inOneTurn(e, func() {
		if between := heardAt - sentAt; heardAt == 0 || between > 2 {
			t.Errorf("%d of %d workers had a turn before what came meanwhile", between, workers)
		}
	})
}

// All of those that wait get their turns, in order.
func TestWorkersTakeTurns(t *testing.T) {
	const workers = 10
	var turns []session.Conn
	e := engine(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		w := &worker{base: base{s: s, c: c}}
		w.work = func() { turns = append(turns, c) }
		return w
	})
	for range workers {
		if _, err := connect(t, addr(e)).Write([]byte("work")); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all work", func() bool {
		done := make(chan bool, 1)
		e.loops[0].post(func() {
			last := turns[max(0, len(turns)-workers):]
			seen := slices.Compact(slices.Sorted(slices.Values(last)))
			done <- len(seen) == workers
		})
		return <-done
	})
}
