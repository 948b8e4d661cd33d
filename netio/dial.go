package netio

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// dial is what a connection that is not there yet knows of itself.
type dial struct {
	addr       string // as asked for
	deny       func(netip.Addr) bool
	tls        *tls.Config // nil: plaintext
	serverName string
	port       uint16
	candidates []netip.Addr // not tried yet
	trying     netip.Addr
	resolving  bool
	until      time.Duration // the deadline of the whole
	reason     session.NetReason
	err        error // of the last candidate
}

// dial begins to connect op's endpoint to its address.
func (l *loop) dial(op *session.Op) {
	addr := op.Addr
	d := &dial{addr: addr, deny: op.Deny, until: l.clock() + l.e.cfg.DialTimeout, reason: session.NetDialFailed}
	c := &conn{fd: -1, ep: op.Endpoint, dial: d}
	l.live++
	l.counters.dials.Add(1)
	if l.stopping {
		l.fail(c, session.NetShutdown, nil)
		return
	}
	if op.TLS != "" {
		d.serverName = op.ServerName
		if d.tls = l.clientTLS(op.TLS, op.ServerName); d.tls == nil {
			l.fail(c, session.NetTLSFailed, fmt.Errorf("dial %s: there is no TLS configuration for %q", addr, op.TLS))
			return
		}
	}
	host, port, err := splitHostPort(addr)
	if err != nil {
		l.fail(c, session.NetDialFailed, err)
		return
	}
	d.port = port
	if ip, err := netip.ParseAddr(host); err == nil {
		d.candidates = []netip.Addr{ip}
		l.tryNext(c)
		return
	}
	d.resolving = true
	l.timers.set(c, d.until)
	addrs, err, known := l.e.resolver.resolve(host, l.now, func(addrs []netip.Addr, err error) {
		l.post(func() {
			l.resolved(c, addrs, err)
			l.perform(nil)
		})
	})
	if known {
		l.resolved(c, addrs, err)
	}
}

func (l *loop) resolved(c *conn, addrs []netip.Addr, err error) {
	if c.dead {
		return
	}
	c.dial.resolving = false
	if err != nil {
		l.fail(c, session.NetResolve, fmt.Errorf("dial %s: %w", c.dial.addr, err))
		return
	}
	c.dial.candidates = addrs // shared with the resolver's cache: only ever resliced
	l.tryNext(c)
}

// tryNext connects to the next address that may be dialled, each with its share of the time that is left.
func (l *loop) tryNext(c *conn) {
	d := c.dial
	for len(d.candidates) > 0 {
		ip := d.candidates[0].Unmap()
		left := (d.until - l.clock()) / time.Duration(len(d.candidates))
		d.candidates = d.candidates[1:]
		d.trying = ip
		if d.deny != nil && d.deny(ip) {
			d.note(session.NetDialDenied, errors.New("this address must not be dialled"))
			continue
		}
		connected, err := l.connect(c, ip)
		if err != nil {
			d.note(session.NetDialFailed, err)
			continue
		}
		if connected {
			l.connected(c)
		} else {
			l.timers.set(c, l.clock()+left)
		}
		return
	}
	if d.err == nil {
		d.err = fmt.Errorf("dial %s: the name has no address", d.addr)
	}
	l.fail(c, d.reason, d.err)
}

// note keeps why the current candidate failed; a denied one only counts when no other was tried.
func (d *dial) note(reason session.NetReason, err error) {
	if reason == session.NetDialDenied && d.err != nil {
		return
	}
	d.reason = reason
	d.err = fmt.Errorf("dial %s at %s: %w", d.addr, d.trying, err)
}

func (l *loop) connect(c *conn, ip netip.Addr) (connected bool, err error) {
	family := unix.AF_INET6
	if ip.Is4() {
		family = unix.AF_INET
	}
	fd, err := streamSocket(family)
	if err != nil {
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			return false, fmt.Errorf("no descriptor left (%w); raise the limit of open files (ulimit -n, fs.file-max)", err)
		}
		return false, fmt.Errorf("socket: %w", err)
	}
	if err := setStreamOptions(fd); err != nil {
		unix.Close(fd)
		return false, fmt.Errorf("TCP options: %w", err)
	}
	err = unix.Connect(fd, sockaddr(netip.AddrPortFrom(ip, c.dial.port)))
	if err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EINTR) {
		unix.Close(fd)
		if errors.Is(err, unix.EADDRNOTAVAIL) {
			return false, fmt.Errorf("no source port left for this address (%w); widen net.ipv4.ip_local_port_range or add broker addresses", err)
		}
		return false, fmt.Errorf("connect: %w", err)
	}
	c.fd = int32(fd)
	l.live-- // enter counts it again, now with a descriptor
	l.enter(c)
	if werr := l.watch(fd, true); werr != nil {
		l.disconnect(c)
		return false, werr
	}
	return err == nil, nil
}

// disconnect gives up the current attempt; the dial goes on.
func (l *loop) disconnect(c *conn) {
	l.conns[c.fd] = nil
	unix.Close(int(c.fd))
	l.counters.conns.Add(-1)
	c.fd, c.id = -1, 0
}

// dialEvent looks whether the connection is made. The event may be one of a descriptor that had the same number before.
func (l *loop) dialEvent(c *conn) {
	if err := socketError(c); err != nil {
		c.dial.note(session.NetDialFailed, fmt.Errorf("connect: %w", err))
		l.disconnect(c)
		l.tryNext(c)
	} else if _, err := unix.Getpeername(int(c.fd)); err != nil {
		return
	} else {
		l.connected(c)
	}
	l.perform(nil)
}

// dialExpired gives up the current candidate, or the whole when none is left.
func (l *loop) dialExpired(c *conn) {
	d := c.dial
	if d.resolving {
		l.fail(c, session.NetResolve, fmt.Errorf("dial %s: the name was not resolved within %v", d.addr, l.e.cfg.DialTimeout))
		return
	}
	d.note(session.NetDialTimeout, fmt.Errorf("no answer (%v for all addresses of the name)", l.e.cfg.DialTimeout))
	l.disconnect(c)
	l.tryNext(c)
}

func (l *loop) connected(c *conn) {
	l.timers.stop(c)
	if d := c.dial; d.tls != nil {
		l.secure(c, d.tls)
		return
	}
	c.dial = nil
	l.notices = append(l.notices, notice{kind: noticeDialed, c: c})
}

func splitHostPort(addr string) (host string, port uint16, err error) {
	i := strings.LastIndexByte(addr, ':')
	if i < 0 {
		return "", 0, fmt.Errorf("dial %q: no port; an address is host:port", addr)
	}
	host = addr[:i]
	if n := len(host); n >= 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	p, err := strconv.ParseUint(addr[i+1:], 10, 16)
	if err != nil || p == 0 || host == "" {
		return "", 0, fmt.Errorf("dial %q: an address is host:port with a port from 1 to 65535", addr)
	}
	return host, uint16(p), nil
}
