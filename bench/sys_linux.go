package bench

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"
	"unsafe"
)

// clockMonotonic is CLOCK_MONOTONIC.
const clockMonotonic = 1

// setTimer makes a timerfd fire once, after d.
func setTimer(fd int, d time.Duration) error {
	spec := [2]syscall.Timespec{{}, syscall.NsecToTimespec(int64(max(d, 1)))} // interval, first
	if _, _, errno := syscall.Syscall6(syscall.SYS_TIMERFD_SETTIME, uintptr(fd), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("timerfd_settime: %w", errno)
	}
	return nil
}

// dial connects to addr from a loopback source address that depends on i, so that many connections do not use up the ports of
// one. A nonblocking dial may return before the connection stands.
func dial(addr netip.AddrPort, i int, nonblock bool) (fd int, err error) {
	kind := syscall.SOCK_STREAM | syscall.SOCK_CLOEXEC
	if nonblock {
		kind |= syscall.SOCK_NONBLOCK
	}
	if fd, err = syscall.Socket(syscall.AF_INET, kind, 0); err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	const bindNoPort = 24 // IP_BIND_ADDRESS_NO_PORT: the port is chosen at connect, per destination
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, bindNoPort, 1)
	if err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, byte(2 + i%sources)}}); err == nil {
		err = syscall.Connect(fd, &syscall.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())})
	}
	if err != nil && err != syscall.EINPROGRESS {
		syscall.Close(fd)
		return -1, fmt.Errorf("connect %s: %w", addr, err)
	}
	return fd, nil
}

// sources is the number of source addresses.
const sources = 100

// raiseFiles lifts the limit of open descriptors as far as it goes and returns it; children inherit it.
func raiseFiles() int {
	var r syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return 0
	}
	for _, want := range []uint64{1 << 20, 1 << 18, 1 << 17, r.Max} {
		if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: want, Max: max(want, r.Max)}) == nil {
			return int(want)
		}
	}
	return int(r.Cur)
}
