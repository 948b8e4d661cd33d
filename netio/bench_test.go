//go:build linux

package netio

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// The steady relay allocates nothing: not for reads that end inside a frame's head, nor for full sinks.
func TestTheSteadyRelayDoesNotAllocate(t *testing.T) {
	const messages, size = 100_000, 1024
	target := server(t, func(c *net.TCPConn) {
		buf := make([]byte, 256<<10)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	e := engine(t, Config{}, relayTo(target, true, func(client, server *relay) { client.whole, server.whole = true, true }))
	c := connect(t, addr(e))
	out := make([]byte, 64*(size+4)-3) // not whole frames, so that rests are kept
	stream := make([]byte, 64*(size+4))
	for i := range 64 {
		binary.BigEndian.PutUint32(stream[i*(size+4):], size)
	}
	in := make([]byte, 256<<10)
	run := func(n int, late bool) {
		total := n * (size + 4)
		go func() {
			for at := 0; at < total; {
				k := copy(out, stream[at%len(stream):])
				k = min(k, total-at)
				if _, err := c.Write(out[:k]); err != nil {
					return
				}
				at += k
			}
		}()
		if late {
			eventually(t, "the queues are full", func() bool { return e.Stats().Loops[0].Paused > 0 })
		}
		for got := 0; got < total; {
			n, err := c.Read(in)
			if err != nil {
				t.Fatal(err)
			}
			got += n
		}
	}
	run(messages, true) // warms the pools, with all that they may ever need
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	run(messages, false)
	runtime.ReadMemStats(&after)
	allocs := after.Mallocs - before.Mallocs
	t.Logf("%d allocations for %d messages, both ways", allocs, messages)
	if allocs > 100 { // the test's own goroutine, the runtime
		t.Errorf("%d allocations for %d messages", allocs, messages)
	}
}

// Thousands of idle connections: what one costs.
func TestIdleConnectionsHoldNoBuffer(t *testing.T) {
	conns := 8000
	if testing.Short() {
		conns = 1000
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur < uint64(2*conns+200) {
		t.Skipf("needs %d descriptors, the limit is %d", 2*conns+200, limit.Cur)
	}
	var s *fakeShard
	e := engine(t, Config{NewShard: func(int) Shard {
		s = &fakeShard{accept: func(s *fakeShard, c session.Conn) session.Endpoint { return nobody{} }}
		return s
	}}, nil)
	to := e.Addrs()[0]
	fds := make([]int, 0, conns)
	t.Cleanup(func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	})
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	before := heap()
	for range conns {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		if err := unix.Connect(fd, sockaddr(to)); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(fd, []byte("hello")); err != nil { // it had a buffer once
			t.Fatal(err)
		}
	}
	eventually(t, "all have spoken", func() bool { return e.Stats().Loops[0].ReadBytes == int64(5*conns) })
	per := (int(heap()) - int(before)) / conns
	t.Logf("%d idle connections: %d bytes each; %d bytes of buffers in all", conns, per, e.Stats().BufferMemory)
	if per > 256 || e.Stats().BufferMemory != 0 {
		t.Errorf("an idle connection costs %d bytes, and all together hold %d bytes of buffers", per, e.Stats().BufferMemory)
	}
}

// nobody is an endpoint without any state.
type nobody struct{}

func (nobody) Dialed(time.Time, session.Conn)             {}
func (nobody) Data(_ time.Time, src []byte) int           { return len(src) }
func (nobody) Tail() (session.Conn, int)                  { return 0, 0 }
func (nobody) Moved(time.Time, int)                       {}
func (nobody) ReadPaused(time.Time, bool)                 {}
func (nobody) Closed(time.Time, session.NetReason, error) {}

func TestTheTimerHeapGivesBackInOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var h timerHeap
	conns := make([]*conn, 300)
	for i := range conns {
		conns[i] = &conn{}
	}
	for range 20_000 {
		c := conns[rng.IntN(len(conns))]
		if rng.IntN(3) == 0 {
			h.stop(c)
		} else {
			h.set(c, time.Duration(rng.IntN(1000)))
		}
	}
	var want []time.Duration
	for _, c := range conns {
		if c.timer != 0 {
			want = append(want, c.due)
		}
	}
	slices.Sort(want)
	for i, w := range want {
		if c := h.due(w - 1); c != nil {
			t.Fatalf("%d: too early: %v", i, c.due)
		}
		if c := h.due(w); c == nil || c.due != w || c.timer != 0 {
			t.Fatalf("%d: got %+v, want %v", i, c, w)
		}
	}
	if h.next() != never {
		t.Error("something is left")
	}
}

// The benchmarks relay from this process through a relay in a child process, whose CPU and context switches the kernel accounts.
// NETIO_RELAY names the child's relay: loop (one event loop), loop2, or copy (goroutines with io.Copy and 32 KiB buffers); tlsloop and
// tlscopy speak TLS with the client.

func TestRelayChild(t *testing.T) {
	kind, target := os.Getenv("NETIO_RELAY"), os.Getenv("NETIO_TARGET")
	if kind == "" {
		t.Skip("only as a child of the benchmarks")
	}
	address := ""
	switch kind {
	case "loop", "loop2":
		e, err := New(Config{Loops: map[string]int{"loop": 1, "loop2": 2}[kind], Listeners: []Listener{{Network: "tcp", Addr: "127.0.0.1:0"}},
			NewShard: func(int) Shard { return &fakeShard{accept: relayTo(target, true, nil)} }})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		address = addr(e)
		defer func() { _ = e.Shutdown(t.Context()) }()
	case "tlsloop", "tlscopy":
		address = relayTLSChild(t, kind, target)
	case "copy":
		address = copyRelay(t, target)
	}
	fmt.Printf("relay=%s\n", address)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent goes away
}

func copyRelay(t testing.TB, target string) string {
	type rw struct{ io.Reader }
	return server(t, func(client *net.TCPConn) {
		c, err := net.Dial("tcp", target)
		if err != nil {
			return
		}
		defer c.Close()
		go func() {
			_, _ = io.CopyBuffer(struct{ io.Writer }{c}, rw{client}, make([]byte, 32<<10))
			c.Close()
		}()
		_, _ = io.CopyBuffer(struct{ io.Writer }{client}, rw{c}, make([]byte, 32<<10))
	})
}

type child struct {
	cmd   *exec.Cmd
	addr  string
	stdin io.Closer
}

func startRelay(b *testing.B, kind, target string) *child {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestRelayChild$", "-test.timeout=10m")
	cmd.Env = append(os.Environ(), "NETIO_RELAY="+kind, "NETIO_TARGET="+target)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	c := &child{cmd: cmd, stdin: stdin}
	if _, err := fmt.Fscanf(stdout, "relay=%s\n", &c.addr); err != nil {
		b.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return c
}

func (c *child) stop() {
	c.stdin.Close()
	_ = c.cmd.Wait()
}

// usage is the child's CPU time and its threads' context switches so far.
func (c *child) usage(b *testing.B) (cpu time.Duration, switches int64) {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	var ticks [2]int64
	after := stat[slices.Index(stat, ')')+2:]
	var skip string
	args := []any{}
	for range 11 {
		args = append(args, &skip)
	}
	if _, err := fmt.Sscan(string(after), append(args, &ticks[0], &ticks[1])...); err != nil {
		b.Fatal(err)
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.cmd.Process.Pid))
	if err != nil {
		b.Fatal(err)
	}
	for _, task := range tasks {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", c.cmd.Process.Pid, task.Name()))
		if err != nil {
			continue // the thread ended
		}
		for line := range strings.Lines(string(status)) {
			var n int64
			if _, err := fmt.Sscanf(line, "voluntary_ctxt_switches: %d", &n); err == nil {
				switches += n
			}
			if _, err := fmt.Sscanf(line, "nonvoluntary_ctxt_switches: %d", &n); err == nil {
				switches += n
			}
		}
	}
	return time.Duration(ticks[0]+ticks[1]) * 10 * time.Millisecond, switches
}

// sinkServer answers each message of a frame stream with a frame of 32 bytes, one write per read, as a broker does with receipts.
func sinkServer(b testing.TB, size int) string {
	receipts := make([]byte, 36*1024)
	for i := range 1024 {
		binary.BigEndian.PutUint32(receipts[i*36:], 32)
	}
	return server(b, func(c *net.TCPConn) {
		buf := make([]byte, 64<<10)
		rest := 0
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			rest += n
			for k := rest / (size + 4); k > 0; k = rest / (size + 4) {
				k = min(k, 1024)
				rest -= k * (size + 4)
				if _, err := c.Write(receipts[:k*36]); err != nil {
					return
				}
			}
		}
	})
}

// BenchmarkRelay measures the CPU of relaying one message and its receipt, closed loop: 50 connections, a window each. Compare the
// sub-benchmarks of one size as ratios within one run.
func BenchmarkRelay(b *testing.B) {
	for _, size := range []int{100, 1024, 16 << 10, 128 << 10} {
		for _, kind := range []string{"loop", "copy", "loop2"} {
			b.Run(fmt.Sprintf("%dB/%s", size, kind), func(b *testing.B) {
				r := startRelay(b, kind, sinkServer(b, size))
				defer r.stop()
				const conns = 50
				window := max(4, min(100, 1<<20/size))
				left := atomic.Int64{}
				drive := func(n int64) {
					left.Store(n)
					var wg sync.WaitGroup
					for range conns {
						c := connect(b, r.addr)
						wg.Go(func() { closedLoop(b, c, size, window, &left) })
					}
					wg.Wait()
				}
				drive(int64(conns * window))
				cpu, switches := r.usage(b)
				b.SetBytes(int64(size))
				b.ResetTimer()
				drive(int64(b.N))
				b.StopTimer()
				cpu2, switches2 := r.usage(b)
				b.ReportMetric(float64((cpu2-cpu).Nanoseconds())/1000/float64(b.N), "cpu-µs/msg")
				b.ReportMetric(float64(switches2-switches)/float64(b.N), "switches/msg")
			})
		}
	}
}

// closedLoop keeps window messages in flight until left is used up.
func closedLoop(b testing.TB, c net.Conn, size, window int, left *atomic.Int64) {
	defer c.Close()
	batch := make([]byte, max(64<<10, size+4)/(size+4)*(size+4))
	for i := 0; i < len(batch); i += size + 4 {
		binary.BigEndian.PutUint32(batch[i:], uint32(size))
	}
	send := func(k int) error {
		for k > 0 {
			n := min(k, len(batch)/(size+4))
			if _, err := c.Write(batch[:n*(size+4)]); err != nil {
				return err
			}
			k -= n
		}
		return nil
	}
	claim := func(k int) int {
		now := left.Add(-int64(k))
		return max(0, min(k, int(now)+k))
	}
	flying := claim(window)
	if err := send(flying); err != nil {
		b.Error(err)
		return
	}
	buf := make([]byte, 64<<10)
	rest := 0
	for flying > 0 {
		n, err := c.Read(buf)
		if err != nil {
			b.Error(err)
			return
		}
		rest += n
		k := rest / 36
		rest -= k * 36
		next := claim(k)
		flying += next - k
		if err := send(next); err != nil {
			b.Error(err)
			return
		}
	}
}

// BenchmarkPacedRelay measures CPU and context switches per message at 10,000 messages of 1 KiB a second over 50 connections.
func BenchmarkPacedRelay(b *testing.B) {
	const size, conns, rate = 1024, 50, 10_000
	for _, kind := range []string{"loop", "copy", "loop2"} {
		b.Run(kind, func(b *testing.B) {
			r := startRelay(b, kind, sinkServer(b, size))
			defer r.stop()
			var peers []*net.TCPConn
			var receipts atomic.Int64
			for range conns {
				c := connect(b, r.addr)
				peers = append(peers, c)
				go func() {
					buf := make([]byte, 4096)
					for {
						n, err := c.Read(buf)
						receipts.Add(int64(n))
						if err != nil {
							return
						}
					}
				}()
			}
			msg := binary.BigEndian.AppendUint32(nil, size)
			msg = append(msg, make([]byte, size)...)
			pace := func(n int) {
				target := receipts.Load() + int64(n)*36
				began := time.Now()
				for i := range n {
					for due := time.Duration(i) * time.Second / rate; time.Since(began) < due; {
						time.Sleep(due - time.Since(began))
					}
					if _, err := peers[i%conns].Write(msg); err != nil {
						b.Fatal(err)
					}
				}
				for receipts.Load() < target {
					runtime.Gosched()
				}
			}
			pace(rate / 5)
			cpu, switches := r.usage(b)
			b.ResetTimer()
			pace(b.N)
			b.StopTimer()
			cpu2, switches2 := r.usage(b)
			b.ReportMetric(float64((cpu2-cpu).Nanoseconds())/1000/float64(b.N), "cpu-µs/msg")
			b.ReportMetric(float64(switches2-switches)/float64(b.N), "switches/msg")
			for _, c := range peers {
				c.Close()
			}
		})
	}
}

func TestBuffersAreReusedAndCounted(t *testing.T) {
	var mem atomic.Int64
	p := pool{mem: &mem}
	use := func() {
		q := p.takeQueue(0)
		a, b := p.take(100), p.take(smallChunk+1)
		for range 3 {
			q.append(&p, make([]byte, 0))
			q.append(&p, b[:cap(b)])
			q.consume(&p, 10)
		}
		q.consume(&p, q.n)
		p.give(a)
		p.give(b)
		p.giveQueue(q)
	}
	use()
	if n := testing.AllocsPerRun(100, use); n != 0 {
		t.Errorf("%v allocations for buffers that were there", n)
	}
	if mem.Load() != 0 {
		t.Errorf("%d bytes are counted and nobody has them", mem.Load())
	}
}
