package netio

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A loop takes new connections until one of these marks is reached; then the next loop is used (packed before spread: one busy loop
// costs 30 to 40 % less per message than two sleepy ones). The mark of accepts keeps a reconnect burst, whose cost shows in
// the utilisation too late, from ending on loop 0 altogether.
const (
	packUtilisation = 0.7
	packConns       = 10000
	packAccepts     = 256 // per loadWindow
)

// acceptsPerTurn bounds how long accepting keeps loop 0 from its connections; backlog is the kernel's.
const (
	acceptsPerTurn = 64
	backlog        = 4096
)

// faultPause is the least time between two reports of the same fault, and the pause of accepting when nothing helps.
const faultPause = time.Second

// acceptor accepts for all loops. Owned by loop 0 once the engine runs.
type acceptor struct {
	e          *Engine
	listeners  []*listener
	meter      meter
	loads      []load
	window     int
	reserve    int // a descriptor to give up when there is no other, so that a connection can be accepted to be closed; -1 = none
	faulted    time.Time
	outOfFiles atomic.Int64
}

type listener struct {
	fd   int // -1 = closed
	id   int
	addr netip.AddrPort
	more bool // not empty when last looked at
	tls  *tls.Config
}

// load is what the acceptor knows of a loop.
type load struct {
	util    float64 // of the last window
	clients int
	accepts int // handed over in this window
}

// pick chooses the loop for the next connection.
func pick(loads []load) int {
	best, least := 0, 0.0
	for i, l := range loads {
		if l.util < packUtilisation && l.clients < packConns && l.accepts < packAccepts {
			return i
		}
		score := l.util + float64(l.clients)/packConns + float64(l.accepts)/packAccepts
		if i == 0 || score < least {
			best, least = i, score
		}
	}
	return best
}

func (a *acceptor) listen(cfg Listener) error {
	addr, err := net.ResolveTCPAddr(cfg.Network, cfg.Addr)
	if err != nil {
		return fmt.Errorf("netio: listener address %s %q: %w", cfg.Network, cfg.Addr, err)
	}
	fd, err := listenSocket(cfg.Network, addr.AddrPort())
	if err != nil {
		return fmt.Errorf("netio: listen on %s %q: %w", cfg.Network, cfg.Addr, err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return fmt.Errorf("netio: listen on %s %q: getsockname: %w", cfg.Network, cfg.Addr, err)
	}
	ln := &listener{fd: fd, id: cfg.ID, addr: addrPort(sa)}
	if cfg.TLS != nil {
		ln.tls = prepared(cfg.TLS)
	}
	a.listeners = append(a.listeners, ln)
	return nil
}

// listenSocket opens a listening socket. What is set on it, its connections inherit.
func listenSocket(network string, addr netip.AddrPort) (int, error) {
	host := addr.Addr()
	v4 := network == "tcp4" || host.Is4() || host.Is4In6()
	if !host.IsValid() {
		host = netip.IPv6Unspecified()
		if v4 {
			host = netip.IPv4Unspecified()
		}
	}
	family := unix.AF_INET6
	if v4 {
		family = unix.AF_INET
	}
	fd, err := streamSocket(family)
	if errors.Is(err, unix.EAFNOSUPPORT) && host == netip.IPv6Unspecified() && network == "tcp" { // a host without IPv6
		host, family = netip.IPv4Unspecified(), unix.AF_INET
		fd, err = streamSocket(family)
	}
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	fail := func(what string, err error) (int, error) {
		unix.Close(fd)
		return -1, fmt.Errorf("%s: %w", what, err)
	}
	if family == unix.AF_INET6 {
		only := 0
		if network == "tcp6" || host != netip.IPv6Unspecified() {
			only = 1
		}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only); err != nil {
			return fail("IPV6_V6ONLY", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fail("SO_REUSEADDR", err)
	}
	if err := setStreamOptions(fd); err != nil {
		return fail("TCP options", err)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(host, addr.Port()))); err != nil {
		return fail("bind (is another process using the address?)", err)
	}
	if err := unix.Listen(fd, backlog); err != nil {
		return fail("listen", err)
	}
	return fd, nil
}

// start has loop 0 watch the listeners.
func (a *acceptor) start() error {
	done := make(chan error, 1)
	l := a.e.loops[0]
	ok := l.post(func() {
		a.loads = make([]load, len(a.e.loops))
		for _, ln := range a.listeners {
			if err := l.watch(ln.fd, false); err != nil {
				done <- fmt.Errorf("netio: watch listener %s: %w", ln.addr, err)
				return
			}
		}
		done <- nil
	})
	if !ok {
		return errors.New("netio: loop 0 ended before it could accept")
	}
	return <-done
}

// ready is called by loop 0 when fd, perhaps a listener, has an event.
func (a *acceptor) ready(l *loop, fd int) {
	for _, ln := range a.listeners {
		if ln.fd == fd {
			a.accept(l, ln)
		}
	}
}

// again goes on with the listeners that were not emptied.
func (a *acceptor) again(l *loop) {
	for _, ln := range a.listeners {
		if ln.more && ln.fd >= 0 {
			a.accept(l, ln)
		}
	}
}

func (a *acceptor) accept(l *loop, ln *listener) {
	ln.more = false
	for range acceptsPerTurn {
		fd, sa, err := acceptSocket(ln.fd)
		switch {
		case err == nil:
			a.place(l, ln, fd, addrPort(sa))
		case errors.Is(err, unix.EAGAIN):
			return
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			a.outOfFiles.Add(1)
			a.complain(l, fmt.Errorf("netio: listener %s: no descriptor left (%w): new connections are closed; raise the limit of open files (ulimit -n, fs.file-max)", ln.addr, err))
			if !a.shed(ln) {
				ln.more = true
				l.acceptAt = l.clock() + faultPause
				return
			}
		default:
			a.complain(l, fmt.Errorf("netio: accept on %s: %w", ln.addr, err))
			ln.more = true
			l.acceptAt = l.clock() + faultPause
			return
		}
	}
	ln.more = true
	l.wake()
}

// shed closes the next waiting connection with the help of the reserve, so that its client learns at once that there is no room.
func (a *acceptor) shed(ln *listener) bool {
	if a.reserve < 0 {
		a.reserve = openReserve()
		if a.reserve < 0 {
			return false
		}
	}
	unix.Close(a.reserve)
	fd, _, err := acceptSocket(ln.fd)
	if err == nil {
		unix.Close(fd)
	}
	a.reserve = openReserve()
	return err == nil || errors.Is(err, unix.EAGAIN)
}

func (a *acceptor) complain(l *loop, err error) {
	if l.now.Sub(a.faulted) >= faultPause {
		a.faulted = l.now
		a.e.fault(err)
	}
}

// place gives the connection fd to a loop.
func (a *acceptor) place(l *loop, ln *listener, fd int, peer netip.AddrPort) {
	e := a.e
	if m := e.cfg.MaxConns; m > 0 && e.clients.Load() >= int64(m) {
		l.counters.refused.Add(1)
		unix.Close(fd)
		return
	}
	to := e.loops[a.choose(l.now)]
	e.clients.Add(1)
	to.counters.clients.Add(1)
	if to == l {
		l.attach(fd, ln.id, ln.tls, peer)
		return
	}
	if !to.post(func() { to.attach(fd, ln.id, ln.tls, peer) }) {
		e.clients.Add(-1)
		to.counters.clients.Add(-1)
		unix.Close(fd)
	}
}

// choose picks the loop for a connection that comes at now, and counts it.
func (a *acceptor) choose(now time.Time) int {
	if w := a.meter.current(now, a.loads); w != a.window {
		a.window = w
		for i := range a.loads {
			a.loads[i].accepts = 0
		}
	}
	for i, l := range a.e.loops {
		a.loads[i].clients = int(l.counters.clients.Load())
	}
	i := pick(a.loads)
	a.loads[i].accepts++
	return i
}

func (a *acceptor) close() {
	for _, ln := range a.listeners {
		if ln.fd >= 0 {
			unix.Close(ln.fd)
			ln.fd = -1
		}
	}
}

func (a *acceptor) closeReserve() {
	if a.reserve >= 0 {
		unix.Close(a.reserve)
		a.reserve = -1
	}
}

func openReserve() int {
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
}

// addrPort turns a socket address into one that compares well: IPv4 in IPv6 becomes IPv4.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if ip := a.Addr().Unmap(); ip.Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: ip.As4()}
	}
	ip := a.Addr()
	sa := &unix.SockaddrInet6{Port: int(a.Port()), Addr: ip.As16()}
	if zone := ip.Zone(); zone != "" {
		if ifi, err := net.InterfaceByName(zone); err == nil {
			sa.ZoneId = uint32(ifi.Index)
		}
	}
	return sa
}
