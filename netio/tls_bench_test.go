//go:build linux

package netio

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// anyone trusts whoever answers: children of the tests have authorities of their own.
func anyone(c *tls.Config) { c.InsecureSkipVerify = true }

// relayTLSChild starts, in a child, what NETIO_RELAY names: the loop with TLS towards clients, or goroutines with crypto/tls and io.CopyBuffer.
func relayTLSChild(t *testing.T, kind, target string) (address string) {
	if kind == "tlscopy" {
		config := serverTLS(nil)
		return server(t, func(tcp *net.TCPConn) {
			client := tls.Server(tcp, config)
			c, err := net.Dial("tcp", target)
			if err != nil {
				return
			}
			defer c.Close()
			go func() {
				_, _ = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{client}, make([]byte, 32<<10))
				c.Close()
			}()
			_, _ = io.CopyBuffer(struct{ io.Writer }{client}, struct{ io.Reader }{c}, make([]byte, 32<<10))
		})
	}
	return addr(engine(t, secret(Config{Loops: 1}, nil), relayLate(target, "")))
}

// BenchmarkTLSRelay is BenchmarkRelay with TLS 1.3 towards the client and without it towards the server.
func BenchmarkTLSRelay(b *testing.B) {
	for _, size := range []int{1024, 16 << 10, 128 << 10} {
		for _, kind := range []string{"tlsloop", "tlscopy"} {
			b.Run(fmt.Sprintf("%dB/%s", size, kind), func(b *testing.B) {
				r := startRelay(b, kind, sinkServer(b, size))
				defer r.stop()
				const conns = 20
				window := max(4, min(100, 1<<20/size))
				left := atomic.Int64{}
				drive := func(n int64) {
					left.Store(n)
					var wg sync.WaitGroup
					for range conns {
						c := connectTLS(b, r.addr, anyone)
						wg.Go(func() { closedLoop(b, c, size, window, &left) })
					}
					wg.Wait()
				}
				drive(int64(conns * window))
				cpu, _ := r.usage(b)
				b.SetBytes(int64(size))
				b.ResetTimer()
				drive(int64(b.N))
				b.StopTimer()
				cpu2, _ := r.usage(b)
				b.ReportMetric(float64((cpu2-cpu).Nanoseconds())/1000/float64(b.N), "cpu-µs/msg")
			})
		}
	}
}

// BenchmarkTLSHandshake measures the CPU of a connection with a full handshake and one small frame.
func BenchmarkTLSHandshake(b *testing.B) {
	for _, kind := range []string{"tlsloop", "tlscopy"} {
		b.Run(kind, func(b *testing.B) {
			r := startRelay(b, kind, echoServer(b))
			defer r.stop()
			one := func() {
				c := connectTLS(b, r.addr, anyone)
				msg := binary.BigEndian.AppendUint32(nil, 4)
				msg = append(msg, "ping"...)
				if _, err := c.Write(msg); err != nil {
					b.Error(err)
				}
				if _, err := io.ReadFull(c, msg); err != nil {
					b.Error(err)
				}
				c.Close()
			}
			one()
			cpu, _ := r.usage(b)
			b.ResetTimer()
			var wg sync.WaitGroup
			var left atomic.Int64
			left.Store(int64(b.N))
			for range 8 {
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						one()
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			cpu2, _ := r.usage(b)
			b.ReportMetric(float64((cpu2-cpu).Nanoseconds())/1000/float64(b.N), "cpu-µs/conn")
		})
	}
}

// What the loop does for each turn of a TLS connection allocates nothing, however records are cut.
func TestTLSIsSealedAndOpenedWithoutAllocation(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) // they block, so that nobody has to wake the handshakes
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	var mem atomic.Int64
	l := &loop{e: &Engine{fields: findTLSFields()}, pool: pool{mem: &mem}}
	layer := func(fd int, over func(net.Conn) *tls.Conn) *conn {
		c := &conn{tls: &tlsLayer{loop: l, shake: &handshake{fd: fd, slots: make(chan struct{}, 1)}}}
		c.tls.conn = over(c.tls)
		return c
	}
	from := layer(fds[0], func(n net.Conn) *tls.Conn { return tls.Client(n, prepared(clientTLS(nil))) })
	to := layer(fds[1], func(n net.Conn) *tls.Conn { return tls.Server(n, prepared(serverTLS(nil))) })
	errs := make(chan error, 2)
	for _, c := range []*conn{from, to} {
		go func() {
			c.tls.shake.enter()
			errs <- c.tls.conn.Handshake()
		}()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		t.Fatal(err)
	}
	from.tls.begin(l.e.fields)
	to.tls.begin(l.e.fields)
	raw, dst := make([]byte, recordRoom+DefaultReadBuffer), make([]byte, recordRoom+DefaultReadBuffer)
	for _, size := range []int{100, 1 << 10, 16 << 10, 200 << 10} {
		views := [][]byte{make([]byte, size), make([]byte, size/4)}
		turn := func() {
			if err := l.seal(from, views); err != nil {
				t.Fatal(err)
			}
			sealed := len(l.sealed)
			got := 0
			for at := 0; at < sealed; { // in three pieces, with what was left of the last one in front
				n := min(sealed-at, sealed/3+1)
				kept := copy(raw, to.tls.rest)
				copy(raw[kept:], l.sealed[at:at+n])
				k, err := l.decrypt(to, raw[:kept+n], dst)
				l.sealed = l.sealed[:sealed]
				if err != nil {
					t.Fatal(err)
				}
				got, at = got+k, at+n
			}
			if got != size+size/4 {
				t.Fatalf("%d bytes came out, %d went in", got, size+size/4)
			}
		}
		turn()
		if allocs := testing.AllocsPerRun(200, turn); allocs != 0 && !poolsForget() {
			t.Errorf("%v allocations for views of %d bytes", allocs, size)
		}
	}
	l.keepRecord(to.tls, nil)
	if mem.Load() != 0 {
		t.Errorf("%d bytes are still counted", mem.Load())
	}
}

// poolsForget tells that sync.Pool, from which crypto/tls takes its buffers, loses things at random: under the race detector.
func poolsForget() bool {
	var p sync.Pool
	for range 1000 {
		p.Put(new(int))
		if p.Get() == nil {
			return true
		}
	}
	return false
}

// The promise: 25 KiB for an idle TLS connection. Both sides are measured: clients and servers are in a child process, and each
// connection has carried full records before it fell idle.
func TestIdleTLSConnectionsHoldLittle(t *testing.T) {
	const pairs, limit = 400, 12 << 10
	child := exec.Command(os.Args[0], "-test.run=^TestIdleTLSChild$", "-test.timeout=2m")
	child.Env = append(os.Environ(), "NETIO_IDLE="+strconv.Itoa(pairs))
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); _ = child.Wait() })
	lines := bufio.NewReader(stdout)
	line := func() string {
		s, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(s)
	}
	cfg := secret(Config{}, nil)
	trusting := clientTLS(anyone)
	cfg.ClientTLS = func(string) *tls.Config { return trusting }
	e := engine(t, cfg, relayLate(line(), "b"))
	heap := func() int {
		runtime.GC()
		runtime.GC() // what pools hold goes with the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse)
	}
	before := heap()
	fmt.Fprintln(stdin, addr(e))
	if got := line(); got != "idle" {
		t.Fatalf("the child says %q", got)
	}
	eventually(t, "both sides are there and nothing is buffered", func() bool {
		s := e.Stats()
		return s.Loops[0].Conns == 2*pairs && s.BufferMemory == 0
	})
	per := (heap() - before) / (2 * pairs)
	t.Logf("%d idle TLS connections: %d bytes each", 2*pairs, per)
	if per > limit {
		t.Errorf("an idle TLS connection costs %d bytes, at most %d are expected", per, limit)
	}
}

// TestIdleTLSChild serves a TLS echo, and fills connections through the relay that its parent names.
func TestIdleTLSChild(t *testing.T) {
	pairs, err := strconv.Atoi(os.Getenv("NETIO_IDLE"))
	if err != nil {
		t.Skip("only as a child of the test of idle connections")
	}
	fmt.Println(tlsServer(t, nil, func(c *tls.Conn) { _, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) }))
	var relay string
	stdin := bufio.NewReader(os.Stdin)
	if _, err := fmt.Fscanln(stdin, &relay); err != nil {
		t.Fatal(err)
	}
	msg := binary.BigEndian.AppendUint32(nil, 64<<10)
	msg = append(msg, make([]byte, 64<<10)...)
	got := make([]byte, len(msg))
	for range pairs {
		c := connectTLS(t, relay, anyone)
		_ = c.SetDeadline(time.Time{})
		if _, err := c.Write(msg); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, got); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Println("idle")
	_, _ = io.Copy(io.Discard, stdin) // until the parent goes away
}
