package netio

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"
)

// Reads and writes are raw system calls: the sockets never block, so telling the scheduler about each would only cost.

// readSocket reads once; n is -1 with an errno.
func readSocket(fd int, p []byte) (n int, err error) {
	r, _, errno := syscall.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// writeSocket writes once; n is -1 with an errno.
func writeSocket(fd int, p []byte) (n int, err error) {
	r, _, errno := syscall.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// writeMore is writeSocket for bytes behind which more are written at once: no packet is sent for them alone. Should nothing follow, push
// sends them (the kernel would do so after 200 ms).
func writeMore(fd int, p []byte) (n int, err error) {
	r, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), unix.MSG_MORE|unix.MSG_NOSIGNAL, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// push sends what writeMore held back.
func push(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
}

const maxIovecs = 64

// iovecs is the scratch of one loop's writes.
type iovecs [maxIovecs]unix.Iovec

// write writes as much of vecs, none of them empty, as the socket takes at once; n is -1 with an errno.
func (iov *iovecs) write(fd int, vecs [][]byte) (n int, err error) {
	if len(vecs) == 1 {
		return writeSocket(fd, vecs[0])
	}
	count := min(len(vecs), maxIovecs)
	for i, b := range vecs[:count] {
		iov[i].Base = &b[0]
		iov[i].SetLen(len(b))
	}
	r, _, errno := syscall.RawSyscall(unix.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&iov[0])), uintptr(count))
	clear(iov[:count])
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// decode tells what the poller says about a connection.
func decode(ev netpoll.IOEvent, _ netpoll.IOFlags) (readable, writable, hangup bool) {
	return ev&unix.EPOLLIN != 0,
		ev&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0,
		ev&(unix.EPOLLRDHUP|unix.EPOLLERR|unix.EPOLLHUP) != 0
}

// unsentBytes is how much of what was written the peer has not acknowledged.
func unsentBytes(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// receivedBytes is how much the peer sent that was not read.
func receivedBytes(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		return 0
	}
	return n
}

func streamSocket(family int) (int, error) {
	return unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
}

func acceptSocket(fd int) (int, unix.Sockaddr, error) {
	return unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
}

// setStreamOptions sets what every connection has: no delay, and the kernel's keep-alive, which finds dead peers below ours.
func setStreamOptions(fd int) error {
	for _, o := range [...]struct{ level, name, value int }{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 60},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 10},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 6},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set option %d/%d to %d: %w", o.level, o.name, o.value, err)
		}
	}
	return nil
}

// waker is a descriptor that wakes the poller. It is registered edge-triggered, so each write is an event and nothing has to be read.
type waker struct{ descriptor int }

func openWaker() (waker, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return noWaker(), os.NewSyscallError("eventfd", err)
	}
	return waker{fd}, nil
}

func noWaker() waker { return waker{-1} }

func (w *waker) fd() int { return w.descriptor }

// wake may be called from any goroutine.
func (w *waker) wake() {
	one := [8]byte{}
	binary.NativeEndian.PutUint64(one[:], 1)
	if _, _, errno := syscall.RawSyscall(unix.SYS_WRITE, uintptr(w.descriptor), uintptr(unsafe.Pointer(&one)), 8); errno == unix.EAGAIN { // the count is full: after 2^64 wake-ups
		w.clear()
		w.wake()
	}
}

// woken is called when the wake-up arrived.
func (w *waker) woken() {}

func (w *waker) clear() {
	var count [8]byte
	_, _ = unix.Read(w.descriptor, count[:])
}

func (w *waker) close() { closeDescriptor(&w.descriptor) }

// alarm is a timer that the poller waits for like for any descriptor; the poller itself has no time-out. Edge-triggered: nothing to read.
type alarm struct {
	descriptor int
	at         time.Duration // when it will ring, on the scale of deadlines
}

func openAlarm() (alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return noAlarm(), os.NewSyscallError("timerfd_create", err)
	}
	return alarm{fd, never}, nil
}

func noAlarm() alarm { return alarm{-1, never} }

func (a *alarm) fd() int { return a.descriptor }

// set has the alarm ring at at; now is on the same scale.
func (a *alarm) set(at, now time.Duration) error {
	in := max(at-now, 1) // zero would disarm it
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(in))}
	if err := unix.TimerfdSettime(a.descriptor, 0, &spec, nil); err != nil {
		return os.NewSyscallError("timerfd_settime", err)
	}
	a.at = at
	return nil
}

// fired notes that it rang.
func (a *alarm) fired() { a.at = never }

func (a *alarm) close() { closeDescriptor(&a.descriptor) }

func closeDescriptor(fd *int) {
	if *fd >= 0 {
		unix.Close(*fd)
		*fd = -1
	}
}
