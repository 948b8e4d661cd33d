//go:build linux

package netio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// once is an endpoint whose Data is a function.
type once struct {
	base
	data func(e *once, src []byte) int
}

func (e *once) Data(_ time.Time, src []byte) int { return e.data(e, src) }

// Our last words arrive although the peer goes on sending what nobody reads.
func TestCloseWithFlushDeliversTheLastWordsToAPeerThatGoesOnSending(t *testing.T) {
	words := bytes.Repeat([]byte("why"), 1<<20)
	e := lastWords(t, Config{FlushTimeout: 30 * time.Second}, words)
	c := connect(t, addr(e))
	if _, err := c.Write(make([]byte, 200<<10)); err != nil {
		t.Fatal(err)
	}
	go pour(c)
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, words) {
		t.Fatalf("%d of %d bytes, %v", len(got), len(words), err)
	}
	eventually(t, "the connection is gone although its peer did not close", func() bool { return e.Stats().Loops[0].Conns == 0 })
}

// lastWords is an engine that answers the first bytes of a connection with words, and its end.
func lastWords(t *testing.T, cfg Config, words []byte) *Engine {
	return engine(t, cfg, func(s *fakeShard, c session.Conn) session.Endpoint {
		return &once{base{s: s, c: c}, func(e *once, src []byte) int {
			s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: words})
			s.do(session.Op{Kind: session.OpClose, Conn: c, Flush: true})
			return len(src)
		}}
	})
}

// What the kernel has taken of our last words is not thrown away as long as a slow peer may take it, though the peer goes on sending.
func TestCloseWithFlushWaitsForAPeerThatReadsLate(t *testing.T) {
	words := bytes.Repeat([]byte("why"), 300_000)
	e := lastWords(t, Config{FlushTimeout: time.Hour}, words)
	c := connect(t, addr(e))
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	go pour(c)
	open := func(only bool) (n int) { // with nothing queued
		inOneTurn(e, func() {
			for _, c := range e.loops[0].conns {
				if c != nil && (!only || c.closing && c.out == nil) {
					n++
				}
			}
		})
		return n
	}
	eventually(t, "the kernel has taken all", func() bool { return open(true) == 1 })
	for range 5 {
		passes(e, linger)
	}
	if open(false) != 1 {
		t.Error("the connection was closed, and its peer has not read what it was told")
	}
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, words) {
		t.Fatalf("%d of %d bytes, %v", len(got), len(words), err)
	}
	passes(e, time.Hour)
	if open(false) != 0 {
		t.Error("the connection is open after the last deadline")
	}
}

func TestCloseWithFlushGivesUpAtItsDeadline(t *testing.T) {
	e := engine(t, Config{FlushTimeout: 50 * time.Millisecond}, func(s *fakeShard, c session.Conn) session.Endpoint {
		s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: make([]byte, 16<<20)})
		s.do(session.Op{Kind: session.OpClose, Conn: c, Flush: true})
		return &base{s: s, c: c, onEnd: func(session.NetReason, error) { t.Error("Closed after OpClose") }}
	})
	connect(t, addr(e))
	eventually(t, "the connection was there", func() bool { return e.Stats().Loops[0].Accepted == 1 })
	eventually(t, "the connection is gone", func() bool { s := e.Stats(); return s.Loops[0].Conns == 0 && s.BufferMemory == 0 })
}

func TestAPeerThatTakesNothingIsClosedAtTheWriteDeadlineAndASlowOneIsNot(t *testing.T) {
	const stall = time.Hour // of the engine's clock
	stalled := make(chan session.NetReason, 1)
	var slowEnded atomic.Bool
	n := 0
	var slowConn session.Conn
	e := engine(t, Config{WriteStall: stall}, func(s *fakeShard, c session.Conn) session.Endpoint {
		n++
		ep := &base{s: s, c: c}
		if n == 1 {
			slowConn = c
			ep.onEnd = func(r session.NetReason, _ error) { slowEnded.Store(true) }
		} else {
			ep.onEnd = func(r session.NetReason, _ error) { stalled <- r }
		}
		s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: make([]byte, 12<<20)})
		return ep
	})
	// Its kernel holds little, so that what it takes shows in ours; ours holds so much that the poller says nothing of what it takes.
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 64<<10) })
	}}
	slowPeer, err := dialer.Dial("tcp", addr(e))
	if err != nil {
		t.Fatal(err)
	}
	defer slowPeer.Close()
	eventually(t, "accepted", func() bool { return e.Stats().Loops[0].Accepted == 1 })
	connect(t, addr(e)) // takes nothing
	eventually(t, "accepted", func() bool { return e.Stats().Loops[0].Accepted == 2 })
	inOneTurn(e, func() {}) // what they were sent is written, and the rest queued
	buf := make([]byte, 32<<10)
	// takes has the slow peer read until its kernel has told ours, or for the first time.
	takes := func() {
		seen := false
		for !seen {
			if _, err := io.ReadFull(slowPeer, buf); err != nil {
				t.Fatal(err)
			}
			inOneTurn(e, func() {
				c := e.loops[0].conn(slowConn)
				seen = c == nil || c.out == nil || c.out.unsent < 0 || unsentBytes(int(c.fd)) < c.out.unsent || c.out.progress > e.loops[0].clock()-stall/4
			})
		}
	}
	for range 50 { // the kernels may go on with what they have for a while
		takes()
		passes(e, stall/2)
		if slowEnded.Load() {
			t.Fatal("the slow peer was closed")
		}
		select {
		case r := <-stalled:
			if r != session.NetWriteStalled {
				t.Fatalf("reason %d", r)
			}
			for range 4 {
				takes()
				passes(e, stall/2)
			}
			if slowEnded.Load() {
				t.Fatal("the slow peer was closed as well")
			}
			return
		default:
		}
	}
	t.Fatal("the stalled peer was not closed")
}

// What Data did not consume is handed over again on OpResume, in front of what came meanwhile.
func TestOpPauseKeepsTheRestAndOpResumeHandsItOverAgain(t *testing.T) {
	type seen struct{ data string }
	got := make(chan seen, 4)
	open := false
	e := engine(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		return &once{base{s: s, c: c}, func(e *once, src []byte) int {
			got <- seen{string(src)}
			if open {
				return len(src)
			}
			s.do(session.Op{Kind: session.OpPause, Conn: c})
			return 1
		}}
	})
	c := connect(t, addr(e))
	if _, err := c.Write([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	if g := <-got; g.data != "abc" {
		t.Fatalf("first %q", g.data)
	}
	if _, err := c.Write([]byte("def")); err != nil {
		t.Fatal(err)
	}
	resume := func(release bool) {
		e.Post(0, func(_ time.Time, sh Shard) {
			s := sh.(*fakeShard)
			open = release
			for _, c := range e.loops[0].conns {
				if c != nil {
					s.do(session.Op{Kind: session.OpResume, Conn: c.id})
				}
			}
		})
	}
	resume(false)
	if g := <-got; g.data != "bc" {
		t.Fatalf("after the first resume %q", g.data)
	}
	resume(true)
	if g := <-got; g.data != "c" {
		t.Fatalf("after the second resume %q", g.data)
	}
	if g := <-got; g.data != "def" {
		t.Fatalf("then %q", g.data)
	}
}

// An endpoint that consumes nothing sees everything each time, contiguous, and is closed at the limit.
func TestUnconsumedBytesStayContiguousUpToTheLimit(t *testing.T) {
	const limit = 1 << 20
	end := make(chan error, 1)
	var highest atomic.Int64
	e := engine(t, Config{MaxRest: limit}, func(s *fakeShard, c session.Conn) session.Endpoint {
		return &once{base{s: s, c: c, onEnd: func(_ session.NetReason, err error) { end <- err }}, func(e *once, src []byte) int {
			for i, b := range src {
				if b != byte(i%251) {
					panic("out of order")
				}
			}
			highest.Store(int64(len(src)))
			return 0
		}}
	})
	c := connect(t, addr(e))
	all := make([]byte, limit+1)
	for i := range all {
		all[i] = byte(i % 251)
	}
	for i := 0; i < limit; i += 50_000 {
		if _, err := c.Write(all[i:min(limit, i+50_000)]); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all is seen", func() bool { return highest.Load() == limit })
	if m := e.Stats().BufferMemory; m > 2*limit {
		t.Errorf("%d bytes for a rest of %d", m, limit)
	}
	if _, err := c.Write(all[limit:]); err != nil {
		t.Fatal(err)
	}
	if err := <-end; err == nil || !strings.Contains(err.Error(), "nobody consumed") {
		t.Errorf("ended with %v", err)
	}
}

// What a peer said before it went away is delivered, although a write to it fails first.
func TestTheLastWordsOfAPeerAreReadAfterAWriteToItFailed(t *testing.T) {
	type end struct {
		heard  string
		reason session.NetReason
	}
	ended := make(chan end, 1)
	dialed, speak, gone := make(chan session.Conn, 1), make(chan struct{}), make(chan struct{})
	target := server(t, func(c *net.TCPConn) {
		<-speak
		_, _ = c.Write([]byte("refused: because"))
		_ = c.SetLinger(0) // a reset follows the words
		c.Close()
		close(gone)
	})
	e := engine(t, Config{}, echoing)
	e.Post(0, func(_ time.Time, sh Shard) {
		s := sh.(*fakeShard)
		var all []byte
		ep := &talker{dialed: dialed}
		ep.base = base{s: s, onEnd: func(r session.NetReason, _ error) { ended <- end{string(all), r} }}
		ep.data = func(_ *once, src []byte) int { all = append(all, src...); return len(src) }
		s.do(session.Op{Kind: session.OpDial, Addr: target, Endpoint: ep})
	})
	c := <-dialed
	e.Post(0, func(_ time.Time, sh Shard) {
		close(speak)
		<-gone // the loop could not read the words before it writes
		sh.(*fakeShard).do(session.Op{Kind: session.OpWrite, Conn: c, Data: []byte("hello?")})
	})
	if got := <-ended; got.heard != "refused: because" || got.reason != session.NetReset {
		t.Errorf("heard %q, reason %d", got.heard, got.reason)
	}
}

// talker says when it is connected.
type talker struct {
	once
	dialed chan session.Conn
}

func (k *talker) Dialed(_ time.Time, c session.Conn) {
	k.c = c
	k.dialed <- c
}

func TestMoreThanMaxConnsAreClosedAndCounted(t *testing.T) {
	e := engine(t, Config{MaxConns: 2}, echoing)
	first := connect(t, addr(e))
	connect(t, addr(e))
	eventually(t, "two are in", func() bool { return e.Stats().Loops[0].Clients == 2 })
	third := connect(t, addr(e))
	wantEOF(t, third)
	if n := e.Stats().Loops[0].Refused; n != 1 {
		t.Errorf("%d refused", n)
	}
	first.Close()
	eventually(t, "there is room again", func() bool { return e.Stats().Loops[0].Clients == 1 })
	again := connect(t, addr(e))
	if _, err := again.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(again, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestAShardMayRefuseWithAWord(t *testing.T) {
	e := engine(t, Config{}, func(s *fakeShard, c session.Conn) session.Endpoint {
		s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: []byte("full")})
		return nil
	})
	c := connect(t, addr(e))
	if got, err := io.ReadAll(c); err != nil || string(got) != "full" {
		t.Fatalf("read %q, %v", got, err)
	}
}

// CN-13 and its like: with no descriptor left new connections are closed at once and counted, the loop does not spin, and it goes on afterwards.
func TestWithoutDescriptorsConnectionsAreClosedAndTheLoopGoesOn(t *testing.T) {
	var faults atomic.Int32
	e := engine(t, Config{Fault: func(err error) {
		if !errors.Is(err, unix.EMFILE) {
			t.Errorf("fault %v", err)
		}
		faults.Add(1)
	}}, echoing)
	before := connect(t, addr(e))
	if _, err := before.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(before, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	var spare [3]int
	for i := range spare {
		c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(c)
		if err := unix.SetsockoptTimeval(c, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
			t.Fatal(err)
		}
		spare[i] = c
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := old
	low.Cur = uint64(highestDescriptor(t)) + 1
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	var fill []int // the holes below the limit
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		fill = append(fill, fd)
	}
	for _, c := range spare {
		if err := unix.Connect(c, sockaddr(e.Addrs()[0])); err != nil {
			t.Error(err)
		}
		n, err := unix.Read(c, make([]byte, 1))
		for err == unix.EINTR { // the scheduler's signals end a read with a time-out
			n, err = unix.Read(c, make([]byte, 1))
		}
		if n != 0 || err != nil {
			t.Errorf("read %d, %v; want the end", n, err)
		}
	}
	events := e.Stats().Loops[0].Events
	if s := e.Stats(); s.OutOfFiles == 0 || faults.Load() == 0 {
		t.Errorf("counted %d, %d faults", s.OutOfFiles, faults.Load())
	}
	for _, fd := range fill {
		unix.Close(fd)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if _, err := before.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(before, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if spun := e.Stats().Loops[0].Events - events; spun > 20 {
		t.Errorf("%d events: the loop spins", spun)
	}
	after := connect(t, addr(e))
	if _, err := after.Write([]byte("z")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(after, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

func highestDescriptor(t *testing.T) int {
	descriptors(t)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	highest := 0
	for _, e := range fds {
		n := 0
		for _, d := range e.Name() {
			n = n*10 + int(d-'0')
		}
		highest = max(highest, n)
	}
	return highest
}

func TestShutdownTellsEveryEndpointOnceAndLeavesNothing(t *testing.T) {
	before := descriptors(t)
	var told atomic.Int32
	wrong := make(chan session.NetReason, 100)
	hole := ""
	t.Run("engine", func(t *testing.T) {
		hole = fullListener(t)
		e, err := New(Config{Loops: 2, Listeners: []Listener{{Network: "tcp", Addr: "127.0.0.1:0"}, {Network: "tcp", Addr: "[::1]:0"}},
			NewShard: func(int) Shard {
				return &fakeShard{accept: func(s *fakeShard, c session.Conn) session.Endpoint {
					end := func(r session.NetReason, _ error) {
						told.Add(1)
						if r != session.NetShutdown {
							wrong <- r
						}
					}
					s.do(session.Op{Kind: session.OpWrite, Conn: c, Data: make([]byte, 8<<20)})
					s.do(session.Op{Kind: session.OpDial, Addr: hole, Endpoint: &base{onEnd: end}})
					return &base{s: s, c: c, onEnd: end}
				}}
			}})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			connect(t, e.Addrs()[i%2].String())
		}
		eventually(t, "all are in", func() bool { s := e.Stats(); return s.Loops[0].Accepted+s.Loops[1].Accepted == 20 })
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := e.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("queues were full, Shutdown returned %v", err)
		}
		if err := e.Shutdown(t.Context()); err != nil {
			t.Errorf("the second Shutdown: %v", err)
		}
		if e.Post(0, func(time.Time, Shard) { t.Error("ran") }) {
			t.Error("Post after the end says that it will run")
		}
		if _, err := net.DialTimeout("tcp", e.Addrs()[0].String(), time.Second); err == nil {
			t.Error("still accepting")
		}
		if s := e.Stats(); s.BufferMemory != 0 {
			t.Errorf("%d bytes left", s.BufferMemory)
		}
	})
	if n := told.Load(); n != 40 {
		t.Errorf("%d endpoints were told, want 40", n)
	}
	close(wrong)
	for r := range wrong {
		t.Errorf("reason %d", r)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestAnEngineThatWasNotStartedIsReleasedByShutdown(t *testing.T) {
	before := descriptors(t)
	e, err := New(Config{Loops: 2, Listeners: []Listener{{Network: "tcp", Addr: "127.0.0.1:0"}}, NewShard: func(int) Shard { return &fakeShard{} }})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if err := e.Start(); err == nil {
		t.Error("started after the end")
	}
}

func TestStopAcceptingKeepsConnections(t *testing.T) {
	e := engine(t, Config{}, echoing)
	c := connect(t, addr(e))
	eventually(t, "accepted", func() bool { return e.Stats().Loops[0].Accepted == 1 })
	e.StopAccepting()
	if _, err := net.DialTimeout("tcp", addr(e), time.Second); err == nil {
		t.Error("still accepting")
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	e.StopAccepting()
}

func TestATakenAddressIsAnErrorThatNamesIt(t *testing.T) {
	e := engine(t, Config{}, echoing)
	before := descriptors(t)
	_, err := New(Config{Loops: 1, Listeners: []Listener{{Network: "tcp", Addr: addr(e)}}, NewShard: func(int) Shard { return &fakeShard{} }})
	if err == nil || !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), addr(e)) {
		t.Errorf("error %v", err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestTheShardIsTickedAtItsDeadline(t *testing.T) {
	ticked := make(chan time.Duration, 1)
	e := engine(t, Config{NewShard: func(int) Shard {
		var due time.Time
		s := &fakeShard{}
		s.accept = func(s *fakeShard, c session.Conn) session.Endpoint {
			return &once{base{s: s, c: c}, func(_ *once, src []byte) int { // a call other than Tick sets the deadline
				due = time.Now().Add(30 * time.Millisecond)
				return len(src)
			}}
		}
		s.tick = func(_ *fakeShard, now time.Time) time.Time {
			if !due.IsZero() && !now.Before(due) {
				ticked <- now.Sub(due)
				due = time.Time{}
			}
			return due
		}
		return s
	}}, nil)
	c := connect(t, addr(e))
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if late := <-ticked; late > 10*time.Second { // it is microseconds, unless the machine stands still
		t.Errorf("%v late", late)
	}
	events := e.Stats().Loops[0].Events
	if events > 20 {
		t.Errorf("%d events for one message and one deadline", events)
	}
}

// Every source of a full sink is paused, and every one goes on when there is room.
func TestSeveralSourcesOfOneSinkArePausedAndGoOn(t *testing.T) {
	const sources, each = 8, 8 << 20
	var sink session.Conn
	e := engine(t, Config{HighWater: 64 << 10}, func(s *fakeShard, c session.Conn) session.Endpoint {
		if sink == 0 {
			sink = c
			return &base{s: s, c: c}
		}
		return &once{base{s: s, c: c}, func(_ *once, src []byte) int {
			s.do(session.Op{Kind: session.OpWrite, Conn: sink, Data: src, Relay: true})
			return len(src)
		}}
	})
	out := connect(t, addr(e))
	eventually(t, "the sink is in", func() bool { return e.Stats().Loops[0].Accepted == 1 })
	for range sources {
		c := connect(t, addr(e))
		go func() { _, _ = c.Write(make([]byte, each)) }()
	}
	eventually(t, "all sources are paused", func() bool { return e.Stats().Loops[0].Paused == sources })
	if n, err := io.CopyN(io.Discard, out, sources*each); err != nil {
		t.Fatalf("%d of %d bytes: %v", n, sources*each, err)
	}
}
