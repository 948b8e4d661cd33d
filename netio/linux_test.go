//go:build linux

package netio

import (
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"
)

const canSpliceHere = true

// fullListener is a listening socket whose queue of connections is full: the kernel drops further SYNs without an answer.
func fullListener(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	for range 4 { // one is queued; the others wait for an answer, like those of the test will
		c, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(c) })
		_ = unix.Connect(c, sa)
	}
	return fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port)
}

// The loop's own way of waiting needs the epoll instance of gnet's poller; without it the loop falls back to a slower one.
func TestTheEpollInstanceOfThePollerIsFound(t *testing.T) {
	p, err := netpoll.OpenPoller()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	fd, ok := epollDescriptor(p)
	if !ok {
		t.Fatal("netpoll.Poller has no field fd any more: look how it is called now")
	}
	event, err := openWaker()
	if err != nil {
		t.Fatal(err)
	}
	defer event.close()
	if err := p.AddRead(&netpoll.PollAttachment{FD: event.fd()}, true); err != nil {
		t.Fatal(err)
	}
	event.wake()
	events := make([]unix.EpollEvent, 4)
	if n, err := unix.EpollWait(int(fd), events, 1000); err != nil || n != 1 || int(events[0].Fd) != event.fd() {
		t.Errorf("waited on %d: %d events, %v, %+v", fd, n, err, events[0])
	}
}

func TestTheLoopRunsInThePollersOwnPollingAsWell(t *testing.T) {
	e, err := New(Config{Loops: 1, Listeners: []Listener{{Network: "tcp4", Addr: "127.0.0.1:0"}}, NewShard: func(int) Shard { return &fakeShard{accept: echoing} }})
	if err != nil {
		t.Fatal(err)
	}
	l := e.loops[0]
	l.wait = func() error { return l.poller.Polling(l.event) }
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	c := connect(t, addr(e))
	go func() { _, _ = c.Write(make([]byte, 4<<20)) }()
	if n, err := io.CopyN(io.Discard, c, 4<<20); err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if err := e.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

// What a sink does not take of a spliced rest waits in its pipe; the source waits, and everything goes on in order.
func TestAFullSinkKeepsSplicedBytesInAPipeAndGoesOn(t *testing.T) {
	const size = 32 << 20
	read := make(chan struct{})
	sum := make(chan uint32, 1)
	target := server(t, func(c *net.TCPConn) {
		<-read
		h := crc32.NewIEEE()
		if _, err := io.CopyN(h, c, 2*(4+size)); err != nil {
			t.Error(err)
		}
		sum <- h.Sum32()
	})
	e := engine(t, Config{}, relayTo(target, true, nil))
	c := connect(t, addr(e))
	rng := rand.NewChaCha8([32]byte{7})
	all := append(frame(rng, size), frame(rng, size)...)
	go func() { _, _ = c.Write(all) }()
	eventually(t, "the source waits, until the kernel has room again", func() (waits bool) {
		inOneTurn(e, func() {
			s := e.Stats()
			l := s.Loops[0]
			if waits = l.Paused == 1; waits && (l.QueuedBytes == 0 || l.QueuedBytes > pipeSize || s.BufferMemory != l.QueuedBytes || l.SplicedBytes == 0) {
				t.Errorf("%d bytes queued, %d counted as memory, %d spliced; want at most one pipe of %d", l.QueuedBytes, s.BufferMemory, l.SplicedBytes, pipeSize)
			}
		})
		return waits
	})
	close(read)
	if got, want := <-sum, crc32.ChecksumIEEE(all); got != want {
		t.Errorf("checksum %x, want %x", got, want)
	}
	eventually(t, "nothing is queued", func() bool { s := e.Stats(); return s.Loops[0].QueuedBytes == 0 && s.BufferMemory == 0 })
}

// The head of a large frame is held back for the rest that comes behind it, but not when its source falls silent there.
func TestTheHeadOfALargeFrameDoesNotWaitForASilentSource(t *testing.T) {
	const size, tries, kernel = 1 << 20, 10, 200 * time.Millisecond // after kernel it is sent in any case
	arrived := make(chan time.Time, 1)
	target := server(t, func(c *net.TCPConn) {
		for range tries {
			for _, n := range []int64{headRead, 4 + size - headRead} {
				if _, err := io.CopyN(io.Discard, c, n); err != nil {
					t.Error(err)
					close(arrived)
					return
				}
				arrived <- time.Now()
			}
		}
	})
	e := engine(t, Config{}, relayTo(target, true, nil))
	c := connect(t, addr(e))
	rng := rand.NewChaCha8([32]byte{3})
	fastest := time.Hour
	for i := range tries {
		one := frame(rng, size)
		sent := time.Now()
		if _, err := c.Write(one[:headRead]); err != nil {
			t.Fatal(err)
		}
		if at := <-arrived; i > 0 { // from then on the connection is known to have large frames
			fastest = min(fastest, at.Sub(sent))
		}
		if _, err := c.Write(one[headRead:]); err != nil {
			t.Fatal(err)
		}
		<-arrived
		eventually(t, "everything is acknowledged", func() bool { // an acknowledgement would send what is held back
			unsent := make(chan int, 1)
			e.loops[0].post(func() {
				n := 0
				for _, c := range e.loops[0].conns {
					if c != nil {
						n += unsentBytes(int(c.fd))
					}
				}
				unsent <- n
			})
			return <-unsent == 0
		})
	}
	if e.Stats().Loops[0].SplicedBytes == 0 {
		t.Fatal("nothing was spliced")
	}
	if fastest > kernel/2 {
		t.Errorf("it waited for %v at least", fastest)
	}
}

// A connection with large frames stays with splicing them, though a short rest of one comes together with the next.
func TestLargeFramesAreSplicedForAsLongAsTheyCome(t *testing.T) {
	const size, short, frames = 200 << 10, 1000, 50
	arrived := make(chan error, 1)
	target := server(t, func(c *net.TCPConn) {
		n := int64(4 + size - short)
		for range frames {
			_, err := io.CopyN(io.Discard, c, n)
			arrived <- err
			n = 4 + size
		}
	})
	e := engine(t, Config{}, relayTo(target, true, nil))
	c := connect(t, addr(e))
	one := frame(rand.NewChaCha8([32]byte{5}), size)
	next := one[:len(one)-short]
	for i := range frames {
		if _, err := c.Write(next); err != nil {
			t.Fatal(err)
		}
		if err := <-arrived; err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			next = append(one[len(one)-short:len(one):len(one)], next...)
		}
	}
	s := e.Stats().Loops[0]
	if share := float64(s.SplicedBytes) / float64(s.WrittenBytes); share < 0.97 {
		t.Errorf("%.1f %% of the bytes were spliced, want 97 at least", 100*share)
	}
}

// A loop with traffic keeps its processor of the Go scheduler for a while; without, it must not.
func TestALoopWithoutTrafficLeavesItsProcessorToOthers(t *testing.T) {
	e := engine(t, Config{}, echoing)
	c := connect(t, addr(e))
	for range 100 {
		echoed(t, c)
	}
	eventually(t, "the scheduler knows that the loop waits", func() bool {
		stacks := make([]byte, 1<<20)
		for one := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(one, "(*loop).poll(") {
				return strings.Contains(one, "[syscall")
			}
		}
		t.Fatal("no loop runs")
		return false
	})
}
