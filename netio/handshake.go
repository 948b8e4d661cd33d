package netio

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// A TLS handshake runs on a goroutine of its own, because it computes for up to milliseconds and crypto/tls cannot stop in the middle
// of one. Only the computing takes one of the engine's slots, so that peers that are slow starve nobody; a goroutine for an accepted
// connection is not even started before its hello has arrived whole. The goroutine reads and writes the descriptor by itself; the
// loop only tells it about events.

// handshake is one that is under way. fd, slots, buf and rest belong to its goroutine, due and started to the loop; the rest is guarded by mu.
type handshake struct {
	fd      int
	slots   chan struct{}
	buf     []byte
	rest    []byte // read and not taken
	inSlot  bool
	started bool
	waiting bool          // for its turn
	since   time.Duration // when it started, or began to wait for its turn

	mu    sync.Mutex
	moved *sync.Cond
	ready bool // there was an event since the socket was last found dry or full
	gone  bool // the loop has given it up: the goroutine closes fd
	done  bool
}

// lane is the handshakes of one loop and side, so that slow brokers take nothing from clients and the other way round.
type lane struct {
	running []*conn
	waiting []*conn // for their turn. The last one is next: in a flood the older ones are more likely to be given up by their peers, or part of it
}

// handshakeBuffer is what is read at a time.
const handshakeBuffer = 4 << 10

// handshakePatience is how long a handshake may be under way when others wait for their turn.
const handshakePatience = time.Second

// secure puts TLS on c, whose socket is connected. An accepted connection waits for its peer's hello.
func (l *loop) secure(c *conn, config *tls.Config) {
	h := &handshake{fd: int(c.fd), slots: l.e.slots}
	h.moved = sync.NewCond(&h.mu)
	c.tls = &tlsLayer{loop: l, shake: h}
	if c.accepted {
		c.tls.conn = tls.Server(c.tls, config)
	} else {
		c.tls.conn = tls.Client(c.tls, config)
	}
	l.timers.set(c, l.clock()+l.e.cfg.HandshakeTimeout)
	if !c.accepted {
		l.startHandshake(c)
	}
}

func (l *loop) lane(c *conn) *lane {
	if c.accepted {
		return &l.lanes[0]
	}
	return &l.lanes[1]
}

// startHandshake starts the goroutine, or has c wait for its turn.
func (l *loop) startHandshake(c *conn) {
	lane := l.lane(c)
	h := c.tls.shake
	h.since = l.clock()
	l.timers.set(c, h.since+l.e.cfg.HandshakeTimeout)
	if len(lane.running) >= l.e.cfg.MaxHandshakes {
		h.waiting = true
		lane.waiting = append(lane.waiting, c)
		if len(lane.waiting) == 1 {
			for _, other := range lane.running {
				l.hurry(other)
			}
		}
		return
	}
	h.started = true
	lane.running = append(lane.running, c)
	if len(lane.waiting) > 0 {
		l.hurry(c)
	}
	l.counters.handshaking.Add(1)
	t := c.tls
	l.e.handshakes.Go(func() {
		h.enter()
		err := t.conn.Handshake()
		h.leave()
		h.buf = nil
		if h.finish() {
			unix.Close(h.fd)
			return
		}
		// Should the loop have ended, it has dropped the connection, and with it the descriptor.
		l.post(func() { l.shaken(c, err) })
	})
}

// hurry shortens the deadline of a handshake because others wait.
func (l *loop) hurry(c *conn) {
	l.timers.set(c, c.tls.shake.since+min(handshakePatience, l.e.cfg.HandshakeTimeout))
}

// leaveLane takes c out, and starts who waited for its place.
func (l *loop) leaveLane(c *conn) {
	lane := l.lane(c)
	h := c.tls.shake
	if h.waiting {
		i := slices.Index(lane.waiting, c)
		lane.waiting = slices.Delete(lane.waiting, i, i+1)
		h.waiting = false
	}
	if !h.started {
		return
	}
	i := slices.Index(lane.running, c)
	lane.running = slices.Delete(lane.running, i, i+1)
	l.counters.handshaking.Add(-1)
	if n := len(lane.waiting); n > 0 && !l.stopping {
		next := lane.waiting[n-1]
		lane.waiting[n-1] = nil
		lane.waiting = lane.waiting[:n-1]
		next.tls.shake.waiting = false
		l.startHandshake(next)
	}
}

// shaken takes a connection over from its handshake.
func (l *loop) shaken(c *conn, err error) {
	if c.dead {
		return
	}
	t := c.tls
	if err != nil {
		l.fail(c, handshakeReason(c, err), l.handshakeError(c, err))
		l.perform(nil)
		return
	}
	l.counters.handshakes.Add(1)
	l.leaveLane(c)
	l.timers.stop(c)
	if rest := t.shake.rest; len(rest) > 0 {
		t.rest, t.fresh = append(l.pool.take(len(rest)), rest...), true
	}
	t.begin(l.e.fields)
	if c.dial != nil {
		c.dial = nil
		l.notices = append(l.notices, notice{kind: noticeDialed, c: c})
	}
	c.readable = true // events of the time before went to the handshake
	l.perform(nil)
	l.schedule(c)
}

// shakeEvent is connEvent during a handshake.
func (l *loop) shakeEvent(c *conn) {
	h := c.tls.shake
	if h.started {
		h.wake()
		return
	}
	if !c.accepted || h.waiting {
		return
	}
	var head [recordHeader]byte
	n, _, err := unix.Recvfrom(int(c.fd), head[:], unix.MSG_PEEK)
	switch {
	case err == unix.EAGAIN, err == unix.EINTR:
		return
	case err != nil:
		l.fail(c, session.NetReset, fmt.Errorf("before the TLS handshake: %w", err))
		l.perform(nil)
		return
	case n == 0:
		l.finish(c, session.NetEOF, io.EOF)
		l.perform(nil)
		return
	}
	hello := recordHeader + int(head[3])<<8 + int(head[4])
	if head[0] == recordHandshake && (n < recordHeader || hello <= recordRoom && receivedBytes(int(c.fd)) < hello) {
		return // not all of it is there; if no more comes, the deadline does
	}
	l.startHandshake(c)
	l.perform(nil)
}

// recordHandshake is the type of the first record of any TLS.
const recordHandshake = 22

// shakeExpired ends a connection whose handshake took too long.
func (l *loop) shakeExpired(c *conn) {
	h, limit, most := c.tls.shake, l.e.cfg.HandshakeTimeout, l.e.cfg.MaxHandshakes
	switch lasted := l.clock() - h.since; {
	case h.started && lasted >= limit:
		l.fail(c, session.NetTLSFailed, l.handshakeError(c, fmt.Errorf("not complete within %v", limit)))
	case h.started && len(l.lane(c).waiting) > 0:
		l.fail(c, session.NetTLSFailed, l.handshakeError(c, fmt.Errorf("not complete within %v, and others wait for their turn: %d are under way, the most at a time", min(handshakePatience, limit), most)))
	case h.started: // nobody waits any more
		l.timers.set(c, h.since+limit)
	case h.waiting:
		l.fail(c, session.NetTLSFailed, l.handshakeError(c, fmt.Errorf("its turn did not come within %v: %d are under way, the most at a time", limit, most)))
	default:
		l.fail(c, session.NetTLSFailed, fmt.Errorf("no TLS hello within %v", limit))
	}
}

// abandon gives a handshake up. It returns false when the goroutine still uses the descriptor and will close it.
func (l *loop) abandon(c *conn) bool {
	l.leaveLane(c)
	h := c.tls.shake
	if !h.started {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done {
		return true
	}
	h.gone = true
	_ = unix.Shutdown(h.fd, unix.SHUT_RDWR) // for the peer: the goroutine may be computing
	h.moved.Signal()
	return false
}

// finish ends the goroutine's part. It returns whether the loop has given the handshake up.
func (h *handshake) finish() (gone bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.done = true
	return h.gone
}

func (h *handshake) wake() {
	h.mu.Lock()
	h.ready = true
	h.mu.Unlock()
	h.moved.Signal()
}

// enter and leave take and give back a slot for computing.
func (h *handshake) enter() {
	h.slots <- struct{}{}
	h.inSlot = true
}

func (h *handshake) leave() {
	if h.inSlot {
		h.inSlot = false
		<-h.slots
	}
}

// wait waits, outside the slot, until the socket had an event.
func (h *handshake) wait() error {
	h.leave()
	h.mu.Lock()
	for !h.ready && !h.gone {
		h.moved.Wait()
	}
	h.ready = false
	gone := h.gone
	h.mu.Unlock()
	if gone {
		return net.ErrClosed
	}
	h.enter()
	return nil
}

// read is for the tls.Conn.
func (h *handshake) read(p []byte, cut *recordCutter) (int, error) {
	for len(h.rest) == 0 {
		if h.buf == nil {
			h.buf = make([]byte, handshakeBuffer)
		}
		n, errno := readSocket(h.fd, h.buf)
		switch {
		case n > 0:
			h.rest = h.buf[:n]
		case n == 0:
			return 0, io.EOF
		case errno == unix.EAGAIN:
			if err := h.wait(); err != nil {
				return 0, err
			}
		case errno != unix.EINTR:
			return 0, fmt.Errorf("read: %w", errno)
		}
	}
	n := cut.copy(p, h.rest)
	h.rest = h.rest[n:]
	return n, nil
}

// write is for the tls.Conn.
func (h *handshake) write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n, errno := writeSocket(h.fd, p[sent:])
		switch {
		case n >= 0:
			sent += n
		case errno == unix.EAGAIN:
			if err := h.wait(); err != nil {
				return sent, err
			}
		case errno != unix.EINTR:
			return sent, fmt.Errorf("write: %w", errno)
		}
	}
	return len(p), nil
}

// handshakeReason tells a peer that does not speak TLS at all from one that does not come to terms.
func handshakeReason(c *conn, err error) session.NetReason {
	var header tls.RecordHeaderError
	if c.accepted && errors.As(err, &header) && foreign(header.RecordHeader) != "" {
		return session.NetPlaintext
	}
	return session.NetTLSFailed
}

// handshakeError says what went wrong, on which side, and what to look at.
func (l *loop) handshakeError(c *conn, err error) error {
	var header tls.RecordHeaderError
	isHeader := errors.As(err, &header)
	var op *net.OpError
	if c.accepted {
		switch {
		case isHeader && foreign(header.RecordHeader) != "":
			return fmt.Errorf("%s on the TLS port", foreign(header.RecordHeader))
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.ECONNRESET):
			return fmt.Errorf("TLS handshake: the client closed the connection in the middle of it (%w); some clients do that when they do not trust the certificate", err)
		case errors.As(err, &op) && op.Op == "local error": // an alert that is not encrypted as it should be cannot be read
			return fmt.Errorf("TLS handshake: %w; some clients answer so when they do not trust the certificate", err)
		case isHeader:
			return fmt.Errorf("TLS handshake: the client's first bytes are % x, which is not TLS: %w", header.RecordHeader, err)
		}
		return fmt.Errorf("TLS handshake: %w", err)
	}
	d := c.dial
	what := fmt.Sprintf("dial %s at %s: TLS handshake (server name %q)", d.addr, d.trying, d.serverName)
	switch {
	case isHeader:
		return fmt.Errorf("%s: the first bytes of the answer are % x, which is not TLS; is this a plaintext port? %w", what, header.RecordHeader, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, unix.ECONNRESET):
		return fmt.Errorf("%s: the peer closed the connection; is this a plaintext port? %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// foreign names the protocol of a first record's header that is not TLS; "" when it is not known.
func foreign(head [recordHeader]byte) string {
	switch string(head[:4]) {
	case "GET ", "HEAD", "POST", "PUT ", "OPTI", "DELE", "CONN", "PRI ":
		return "an HTTP request"
	}
	if head[0] == 0 { // a frame's size, which is below 16 MiB for any CONNECT
		return "plaintext Pulsar protocol"
	}
	return ""
}

// clientTLS is the configuration of the name, for one server name. Copies are kept, because each connection refers to its own.
func (l *loop) clientTLS(name, serverName string) *tls.Config {
	if l.e.cfg.ClientTLS == nil {
		return nil
	}
	base := l.e.cfg.ClientTLS(name)
	if base == nil {
		return nil
	}
	key := clientKey{base, serverName}
	if config := l.clientConfigs[key]; config != nil {
		return config
	}
	if len(l.clientConfigs) >= maxNames {
		clear(l.clientConfigs)
	}
	config := prepared(base)
	config.ServerName = serverName
	l.clientConfigs[key] = config
	return config
}

type clientKey struct {
	base       *tls.Config
	serverName string
}

// prepared is a copy for our use: records are full from the start, because the loop hands over whole batches.
func prepared(config *tls.Config) *tls.Config {
	config = config.Clone()
	config.DynamicRecordSizingDisabled = true
	return config
}
