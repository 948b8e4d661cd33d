package netio

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"
)

// The loop on a Mac, for development: kqueue through gnet's poller, no splice, a Go timer for the alarm.

func (l *loop) poll() error { return l.poller.Polling(l.event) }

func readSocket(fd int, p []byte) (n int, err error) {
	if n, err = unix.Read(fd, p); err != nil {
		return -1, err
	}
	return n, nil
}

func writeSocket(fd int, p []byte) (n int, err error) {
	if n, err = unix.Write(fd, p); err != nil {
		return -1, err
	}
	return n, nil
}

// writeMore is writeSocket: nothing is spliced here, so that it is never called.
func writeMore(fd int, p []byte) (n int, err error) { return writeSocket(fd, p) }

// push has nothing to send.
func push(int) {}

const maxIovecs = 64

type iovecs struct{}

// write writes the first of vecs; the caller goes on with the next.
func (*iovecs) write(fd int, vecs [][]byte) (n int, err error) {
	return writeSocket(fd, vecs[0])
}

func decode(ev netpoll.IOEvent, flags netpoll.IOFlags) (readable, writable, hangup bool) {
	return ev == unix.EVFILT_READ, ev == unix.EVFILT_WRITE, flags&unix.EV_EOF != 0
}

func unsentBytes(fd int) int {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NWRITE)
	if err != nil {
		return 0
	}
	return n
}

func receivedBytes(fd int) int {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_NREAD)
	if err != nil {
		return 0
	}
	return n
}

func streamSocket(family int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if err != nil {
		return -1, err
	}
	return fd, nonblocking(fd)
}

func acceptSocket(fd int) (int, unix.Sockaddr, error) {
	c, sa, err := unix.Accept(fd)
	if err != nil {
		return -1, nil, err
	}
	return c, sa, nonblocking(c)
}

func nonblocking(fd int) error {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return err
	}
	return nil
}

func setStreamOptions(fd int) error {
	for _, o := range [...]struct{ level, name, value int }{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.SOL_SOCKET, unix.SO_NOSIGPIPE, 1},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set option %d/%d to %d: %w", o.level, o.name, o.value, err)
		}
	}
	return nil
}

// waker is a pipe whose reading end the poller watches.
type waker struct{ r, w int }

func openWaker() (waker, error) {
	var fds [2]int
	if err := unix.Pipe(fds[:]); err != nil {
		return noWaker(), os.NewSyscallError("pipe", err)
	}
	w := waker{fds[0], fds[1]}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			w.close()
			return noWaker(), err
		}
	}
	return w, nil
}

func noWaker() waker { return waker{-1, -1} }

func (w *waker) fd() int { return w.r }
func (w *waker) wake()   { _, _ = unix.Write(w.w, []byte{1}) } // a full pipe wakes as well

func (w *waker) woken() {
	var b [64]byte
	for {
		if n, err := unix.Read(w.r, b[:]); n < len(b) || err != nil {
			return
		}
	}
}

func (w *waker) close() {
	for _, fd := range []*int{&w.r, &w.w} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// alarm is a Go timer that writes to a pipe.
type alarm struct {
	at    time.Duration
	bell  *bell
	timer *time.Timer
}

// bell outlives the timer's last call. Guarded by mu.
type bell struct {
	mu    sync.Mutex
	waker waker
}

func openAlarm() (alarm, error) {
	w, err := openWaker()
	if err != nil {
		return noAlarm(), err
	}
	return alarm{at: never, bell: &bell{waker: w}}, nil
}

func noAlarm() alarm { return alarm{at: never, bell: &bell{waker: noWaker()}} }

func (a *alarm) fd() int { return a.bell.waker.fd() }

func (a *alarm) set(at, now time.Duration) error {
	a.at = at
	if a.timer != nil {
		a.timer.Stop()
	}
	b := a.bell
	a.timer = time.AfterFunc(at-now, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.waker.w >= 0 {
			b.waker.wake()
		}
	})
	return nil
}

func (a *alarm) fired() {
	a.bell.waker.woken()
	a.at = never
}

func (a *alarm) close() {
	if a.timer != nil {
		a.timer.Stop()
	}
	a.bell.mu.Lock()
	defer a.bell.mu.Unlock()
	a.bell.waker.close()
}

// tailMin is the shortest rest of a large frame that is moved without its endpoint; headRead bounds a read where rests are spliced.
const (
	tailMin  = 32 << 10
	headRead = 512
)

// There is no splice here: tails are read and written.
type (
	pipe  struct{}
	pipes struct{ mem *atomic.Int64 }
)

func (*loop) canSplice(int) bool                   { return false }
func (*loop) splice(_, _ *conn, _ int) (int, bool) { return 0, false }
func (*loop) flushPipe(*conn) error                { return nil }
func (*pipes) discard(*pipe)                       {}
func (*pipes) close()                              {}
