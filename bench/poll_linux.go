package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"syscall"
	"time"

	"pointsman/codec"
)

// loop is one thread with an edge-triggered epoll instance: the leanest thing that can serve many sockets, so that broker and
// load leave the machine to the proxy between them. Everything of a loop belongs to the goroutine that calls run.
type loop struct {
	epfd   int
	wakeFD int // an eventfd: written to by post
	conns  []*conn
	buf    []byte
	plain  []byte // decrypted bytes; nil without TLS
	sealed []byte // encrypted bytes
	events [256]syscall.EpollEvent
	accept func(fd int) // takes over an accepted descriptor
	listen map[int32]bool
	ended  bool

	timerFD int
	tick    func() (next time.Duration)

	mu     sync.Mutex
	posted []func() // guarded by mu
}

// handler is what a connection's owner does. All calls come from the loop's goroutine.
type handler interface {
	// frame is called for each complete frame; cmd ends with the command and is valid during the call. Payloads are not kept.
	frame(c *conn, h codec.Head, cmd []byte)
	// flush is called once after the frames of one read.
	flush(c *conn)
	// writable is called when the socket takes bytes again.
	writable(c *conn)
	// closed is called once when the peer has ended the connection or it failed.
	closed(c *conn, err error)
}

type conn struct {
	loop *loop
	fd   int
	tls  *tlsStream // nil: plaintext
	h    handler
	id   int  // the owner's number
	mute bool // not read: a peer that stops reading

	held  []byte     // an incomplete command, or the command of the frame whose payload is being skipped
	head  codec.Head // of the frame that is being skipped
	skip  int        // bytes of it still to come
	out   []byte     // own commands that the socket has not taken
	full  bool       // the socket takes nothing; an edge will come
	ended bool
}

const (
	epollET   = 1 << 31
	readSize  = 256 << 10
	maxFrame  = 64 << 20
	connEvent = syscall.EPOLLIN | syscall.EPOLLOUT | syscall.EPOLLRDHUP | epollET
)

func newLoop() (*loop, error) {
	epfd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	l := &loop{epfd: epfd, buf: make([]byte, readSize), listen: map[int32]bool{}, timerFD: -1}
	fd, _, errno := syscall.Syscall(syscall.SYS_EVENTFD2, 0, syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errno != 0 {
		syscall.Close(epfd)
		return nil, fmt.Errorf("eventfd2: %w", errno)
	}
	l.wakeFD = int(fd)
	if err := l.ctl(l.wakeFD, syscall.EPOLLIN); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *loop) ctl(fd int, events int) error {
	ev := syscall.EpollEvent{Events: uint32(events), Fd: int32(fd)}
	if err := syscall.EpollCtl(l.epfd, syscall.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// listenOn adds a listening socket on 127.0.0.1 and returns its port.
func (l *loop) listenOn(port int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		syscall.Close(fd)
		return 0, fmt.Errorf("bind 127.0.0.1:%d: %w", port, err)
	}
	if err := syscall.Listen(fd, 4096); err != nil {
		syscall.Close(fd)
		return 0, fmt.Errorf("listen: %w", err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		syscall.Close(fd)
		return 0, fmt.Errorf("getsockname: %w", err)
	}
	l.listen[int32(fd)] = true
	return sa.(*syscall.SockaddrInet4).Port, l.ctl(fd, syscall.EPOLLIN)
}

// add takes over a connected, or connecting, descriptor.
func (l *loop) add(fd int, h handler) (*conn, error) {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("set nonblocking: %w", err)
	}
	_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	c := &conn{loop: l, fd: fd, h: h}
	for len(l.conns) <= fd {
		l.conns = append(l.conns, nil)
	}
	l.conns[fd] = c
	return c, l.ctl(fd, connEvent)
}

// schedule calls tick from run, again and again, each time after the time that it returned: as exactly as the kernel's timers are.
func (l *loop) schedule(tick func() (next time.Duration)) error {
	fd, _, errno := syscall.Syscall(syscall.SYS_TIMERFD_CREATE, clockMonotonic, syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errno != 0 {
		return fmt.Errorf("timerfd_create: %w", errno)
	}
	l.timerFD, l.tick = int(fd), tick
	if err := setTimer(l.timerFD, time.Nanosecond); err != nil {
		return err
	}
	return l.ctl(l.timerFD, syscall.EPOLLIN)
}

// run serves until the deadline, or until stop when it is zero.
func (l *loop) run(deadline time.Time) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for !l.ended {
		wait := -1
		if !deadline.IsZero() {
			left := time.Until(deadline)
			if left <= 0 {
				return nil
			}
			wait = int((left + time.Millisecond - 1) / time.Millisecond)
		}
		n, err := syscall.EpollWait(l.epfd, l.events[:], wait)
		if err != nil && err != syscall.EINTR {
			return fmt.Errorf("epoll_wait: %w", err)
		}
		for i := range max(n, 0) {
			l.event(l.events[i])
		}
	}
	return nil
}

// stop ends run; any goroutine may call it.
func (l *loop) stop() { l.post(func() { l.ended = true }) }

// post has run call f; any goroutine may call it, until the loop is closed.
func (l *loop) post(f func()) {
	l.mu.Lock()
	l.posted = append(l.posted, f)
	l.mu.Unlock()
	one := [8]byte{1}
	_, _ = syscall.Write(l.wakeFD, one[:])
}

// runPosted calls what was posted.
func (l *loop) runPosted() {
	l.mu.Lock()
	posted := l.posted
	l.posted = nil
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

func (l *loop) close() {
	for _, c := range l.conns {
		if c != nil {
			c.close()
		}
	}
	for fd := range l.listen {
		syscall.Close(int(fd))
	}
	if l.timerFD >= 0 {
		syscall.Close(l.timerFD)
	}
	syscall.Close(l.wakeFD)
	syscall.Close(l.epfd)
}

func (l *loop) event(ev syscall.EpollEvent) {
	switch {
	case ev.Fd == int32(l.wakeFD):
		var count [8]byte
		_, _ = syscall.Read(l.wakeFD, count[:])
		l.runPosted()
		return
	case ev.Fd == int32(l.timerFD):
		var count [8]byte
		_, _ = syscall.Read(l.timerFD, count[:])
		if err := setTimer(l.timerFD, l.tick()); err != nil {
			panic("bench: a timer that was set before cannot be set: " + err.Error())
		}
		return
	case l.listen[ev.Fd]:
		for {
			fd, _, err := syscall.Accept4(int(ev.Fd), syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			l.accept(fd)
		}
	}
	c := l.conns[ev.Fd]
	if c == nil {
		return
	}
	if ev.Events&syscall.EPOLLOUT != 0 && c.full {
		c.full = false
		c.resend()
		if c.send(nil); !c.full && !c.ended {
			c.h.writable(c)
		}
	}
	if ev.Events&^uint32(syscall.EPOLLOUT) != 0 && !c.ended && !c.mute {
		c.read()
	}
}

func (c *conn) read() {
	for !c.ended && !c.mute {
		n, err := syscall.Read(c.fd, c.loop.buf)
		switch {
		case err == syscall.EAGAIN:
			return
		case err == syscall.EINTR:
			continue
		case err != nil:
			c.fail(err)
			return
		case n == 0:
			c.fail(io.EOF)
			return
		}
		c.got(c.loop.buf[:n])
		if n < len(c.loop.buf) {
			return // an edge comes with the next byte
		}
	}
}

// got takes what was read.
func (c *conn) got(src []byte) {
	var end error
	if c.tls != nil {
		var n int
		n, end = c.tls.open(c.loop.plain, src)
		src = c.loop.plain[:n]
	}
	if err := c.feed(src); err != nil {
		end = err
	}
	if end == nil && !c.ended {
		c.h.flush(c)
	}
	if end != nil {
		c.fail(end)
	}
}

// feed cuts bytes into frames.
func (c *conn) feed(src []byte) error {
	for len(src) > 0 && !c.ended {
		switch {
		case c.skip > 0:
			n := min(c.skip, len(src))
			c.skip -= n
			src = src[n:]
			if c.skip == 0 {
				c.h.frame(c, c.head, c.held)
				c.held = c.held[:0]
			}
			continue
		case len(c.held) > 0:
			n := min(c.missing(), len(src))
			c.held = append(c.held, src[:n]...)
			src = src[n:]
			if c.missing() > 0 {
				continue
			}
			h, err := parseHead(c.held)
			if err != nil {
				return err
			}
			if c.head, c.skip = h, h.Size-h.CmdEnd; c.skip == 0 {
				c.h.frame(c, h, c.held)
				c.held = c.held[:0]
			}
			continue
		case len(src) < 8 || len(src) < 8+int(binary.BigEndian.Uint32(src[4:])):
			n := min(len(src), 8)
			c.held = append(c.held[:0], src[:n]...)
			src = src[n:]
			continue
		}
		h, err := parseHead(src)
		if err != nil {
			return err
		}
		if h.Size <= len(src) {
			c.h.frame(c, h, src[:h.CmdEnd])
			src = src[h.Size:]
			continue
		}
		c.head, c.skip = h, h.Size-len(src)
		c.held = append(c.held[:0], src[:h.CmdEnd]...)
		src = nil
	}
	return nil
}

// missing is how many bytes held needs until its command is complete, as far as can be told.
func (c *conn) missing() int {
	if len(c.held) < 8 {
		return 8 - len(c.held)
	}
	return 8 + int(binary.BigEndian.Uint32(c.held[4:])) - len(c.held)
}

func parseHead(src []byte) (codec.Head, error) {
	h, ok, err := codec.ParseHead(src, maxFrame)
	if err == nil && !ok {
		err = errors.New("a complete command whose type cannot be told")
	}
	return h, err
}

// send writes src, or keeps what the socket does not take.
func (c *conn) send(src []byte) {
	if len(c.out) > 0 || c.full {
		c.out = append(c.out, src...)
		if c.full || len(c.out) == 0 {
			return
		}
		n := c.write(c.out)
		c.out = c.out[:copy(c.out, c.out[n:])]
		return
	}
	if len(src) > 0 {
		n := c.write(src)
		c.out = append(c.out, src[n:]...)
	}
}

// write writes what the socket takes; c.full is set when that is not everything.
func (c *conn) write(src []byte) (n int) {
	if c.tls != nil {
		return c.writeTLS(src)
	}
	return c.put(src)
}

// put is write without TLS.
func (c *conn) put(src []byte) (n int) {
	for n < len(src) && !c.ended {
		k, err := syscall.Write(c.fd, src[n:])
		switch {
		case err == syscall.EAGAIN:
			c.full = true
			return n
		case err == syscall.EINTR:
			continue
		case err != nil:
			c.fail(err)
			return n
		}
		n += k
	}
	return n
}

// pump writes frames of s from b until owed of them are complete or the socket is full, and returns how many are complete.
func (c *conn) pump(s *stream, b *batch, owed int) (done int) {
	for done < owed && !c.full && !c.ended && len(c.out) == 0 {
		done += s.wrote(c.write(b.fill(s, owed-done)))
	}
	return done
}

func (c *conn) fail(err error) {
	if c.ended {
		return
	}
	c.close()
	c.h.closed(c, err)
}

func (c *conn) close() {
	if c.ended {
		return
	}
	c.ended = true
	c.tls.goodbye()
	c.loop.conns[c.fd] = nil
	syscall.Close(c.fd)
}
