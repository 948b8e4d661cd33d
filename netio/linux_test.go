package netio

import (
	"fmt"
	"io"
	"testing"

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
	e.loops[0].plain = true
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
