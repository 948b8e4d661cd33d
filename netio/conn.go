package netio

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// conn is one connection, or a dial that is to become one. Owned by its loop. An idle one holds no buffer.
type conn struct {
	id    session.Conn
	ep    session.Endpoint // nil once the endpoint has been told, or has asked, that the connection ends
	in    []byte           // received and not consumed
	out   *outQueue        // nil while nothing is queued
	dial  *dial            // nil once connected
	tls   *tlsLayer        // nil: plaintext
	werr  error            // of a write: what the peer sent before is still read, then the connection ends with it
	due   time.Duration    // deadline, when timer is not -1
	until time.Duration    // closing: when it is given up
	timer int32            // place in loop.timers + 1; 0 = no deadline
	fd    int32            // -1 = none yet
	first int32            // of its views in the batch + 1; 0 = none
	last  int32

	blockers uint16 // full sinks that its reading waits for
	blocking bool   // it is one of those itself: it asks without taking the answers
	accepted bool   // counted in clients
	readable bool   // the socket may have bytes
	hangup   bool   // the peer's end was seen by the poller: read until it is met
	held     bool   // OpPause
	again    bool   // hand over in once more
	relays   bool   // its bytes went to another connection as they were
	bulk     bool   // large frames: read only their heads, so that the rest can be spliced
	relayed  bool   // in this batch: written with Relay
	answered bool   // in this batch: written without Relay
	gather   bool   // in this batch: written with Gather

	scheduled bool // in loop.ready
	gathering bool // in loop.gathered, for what is queued
	closing   bool // taking its queue; the endpoint is gone
	dead      bool
}

// splicedShare is what a spliced byte counts less than a copied one in a connection's share of a turn: the more frames pass at a time, the
// less often their receiver is woken.
const splicedShare = 4

// inlineRest is how long an unconsumed rest may be to be copied in front of the next read; longer ones are read behind.
const inlineRest = 64 << 10

// linger is how long a connection that was closed with Flush waits for the peer's end after its last byte was sent, and again as long as the
// peer's kernel has not taken that: closed before, bytes of the peer that nobody read would make ours send a reset, which can destroy our last words.
const linger = time.Second

func (l *loop) connEvent(c *conn, ev netpoll.IOEvent, flags netpoll.IOFlags) {
	if c.dial != nil && !c.shaking() {
		l.dialEvent(c)
		if c.dead || c.dial != nil {
			return
		}
	}
	readable, writable, hangup := decode(ev, flags)
	if c.shaking() {
		c.hangup = c.hangup || hangup // it comes once, and is met by whoever reads afterwards
		l.shakeEvent(c)
		return
	}
	if writable && c.out != nil {
		l.flush(c)
		l.perform(nil)
		if c.dead {
			return
		}
	}
	if hangup {
		c.hangup = true
		if c.stopped() && !c.closing {
			// Nobody reads it now. An orderly end waits like the bytes in front of it; a reset is told at once.
			if errno := socketError(c); errno != nil {
				l.fail(c, session.NetReset, fmt.Errorf("while reading was paused: %w", errno))
				l.perform(nil)
				return
			}
		}
	}
	if readable || hangup {
		c.readable = true
		switch {
		case c.scheduled: // its turn comes anyway, after those that wait longer
		case c.relays:
			l.turn(c)
		default: // what is no relay may be work: bytes that only pass go first
			l.schedule(c)
		}
	}
}

func socketError(c *conn) error {
	if v, err := unix.GetsockoptInt(int(c.fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil {
		return err
	} else if v != 0 {
		return unix.Errno(v)
	}
	return nil
}

// stopped says that c is not to be read.
func (c *conn) stopped() bool {
	return c.dead || c.closing || c.held || c.blockers > 0 || c.shaking()
}

// turn reads c until it is dry, stopped, or has used up its share of this turn.
func (l *loop) turn(c *conn) {
	if c.closing {
		l.discard(c)
		return
	}
	if c.again && !c.stopped() {
		c.again = false
		if len(c.in) > 0 {
			l.handRest(c)
		}
	}
	for budget := l.e.cfg.ReadBuffer; c.readable && !c.again && !c.stopped(); {
		if budget <= 0 {
			l.schedule(c)
			break
		}
		budget -= l.read(c)
	}
	l.uncork()
}

// uncork sends what was held back for more to come.
func (l *loop) uncork() {
	if c := l.corked; c != nil {
		l.corked = nil
		if !c.dead && !c.closing {
			push(int(c.fd))
		}
	}
}

// read reads once and returns how much.
func (l *loop) read(c *conn) int {
	if c.tls != nil {
		return l.readTLS(c)
	}
	limit := l.readLimit()
	if len(c.in) == 0 {
		name, n := c.ep.Tail()
		if n >= tailMin {
			if dst := l.conn(name); dst != nil && !dst.closing && dst.werr == nil {
				return l.moveTail(c, dst, n)
			}
		}
		if c.bulk { // the end of this frame and the head of the next one
			limit = min(limit, n+headRead)
		}
	}
	rest := len(c.in)
	if rest > inlineRest {
		rest = 0
	}
	n, errno := readSocket(int(c.fd), l.buf[rest:rest+limit])
	if n <= 0 {
		l.readEnd(c, n, errno)
		return 0
	}
	l.counters.reads.Add(1)
	l.counters.readBytes.Add(int64(n))
	if n < limit && !c.hangup && c.werr == nil {
		c.readable = false
	}
	l.follows = c.bulk && n == limit
	l.deliver(c, rest, n)
	l.follows = false
	if c.bulk && n == limit && !c.stopped() {
		if _, t := c.ep.Tail(); t < tailMin {
			c.bulk = false // small frames: back to reading as much as there is
		}
	}
	return n
}

// deliver hands over n bytes that are in buf behind room for rest ones: all that was left before, or none if that is too long.
func (l *loop) deliver(c *conn, rest, n int) {
	if rest == len(c.in) {
		copy(l.buf, c.in)
		l.hand(c, l.buf[:rest+n])
	} else {
		l.grow(c, l.buf[:n])
		l.hand(c, c.in)
	}
}

// readEnd deals with a read that returned no byte.
func (l *loop) readEnd(c *conn, n int, errno error) {
	switch {
	case n == 0:
		if c.werr != nil {
			l.fail(c, session.NetReset, c.werr)
		} else {
			l.finish(c, session.NetEOF, io.EOF)
		}
		l.perform(nil)
	case errno == unix.EINTR:
	case errno == unix.EAGAIN:
		c.readable, c.hangup = false, false
		if c.werr != nil {
			l.fail(c, session.NetReset, c.werr)
			l.perform(nil)
		}
	default:
		l.fail(c, session.NetReset, fmt.Errorf("read: %w", errno))
		l.perform(nil)
	}
}

// hand gives src, all that is unconsumed, to the endpoint, performs what it asks and keeps the rest.
func (l *loop) hand(c *conn, src []byte) {
	n := c.ep.Data(l.now, src)
	if n < 0 || n > len(src) {
		panic(fmt.Sprintf("netio: endpoint %T consumed %d of %d bytes", c.ep, n, len(src)))
	}
	l.perform(c)
	if c.dead || c.closing {
		return
	}
	rest := src[n:]
	if len(rest) == 0 {
		l.pool.give(c.in)
		c.in = nil
		return
	}
	if len(rest) > l.e.cfg.MaxRest || len(rest) > inlineRest && l.e.mem.Load() > l.e.cfg.BufferMemory {
		l.fail(c, session.NetReset, fmt.Errorf("%d bytes received that nobody consumed (at most %d per connection, and %d while all buffers together use %d of %d bytes)",
			len(rest), l.e.cfg.MaxRest, inlineRest, l.e.mem.Load(), l.e.cfg.BufferMemory))
		l.perform(nil)
		return
	}
	if cap(c.in) < len(rest) || cap(c.in) > 4*max(len(rest), smallChunk) {
		in := append(l.pool.take(len(rest)), rest...)
		l.pool.give(c.in)
		c.in = in
		return
	}
	c.in = c.in[:len(rest)]
	copy(c.in, rest)
}

// handRest hands over what was left, without new bytes.
func (l *loop) handRest(c *conn) {
	src := c.in
	if len(src) <= inlineRest { // its buffer is a pooled one, and may be taken while views of it are still needed
		src = l.buf[:copy(l.buf, src)]
	}
	l.hand(c, src)
}

// grow appends b to a rest that is too long to be copied at every read. Its buffers are never pooled, so views of the old one stay valid.
func (l *loop) grow(c *conn, b []byte) {
	if need := len(c.in) + len(b); need > cap(c.in) {
		in := append(l.pool.take(max(need, 2*cap(c.in))), c.in...)
		l.pool.give(c.in)
		c.in = in
	}
	c.in = append(c.in, b...)
}

// moveTail moves up to n bytes of a large frame's rest to dst without showing them to the endpoint.
func (l *loop) moveTail(c, dst *conn, n int) int {
	if dst.out == nil && dst.tls == nil && l.canSplice(n) {
		if moved, ok := l.splice(c, dst, n); ok {
			return moved / splicedShare
		}
	}
	limit := min(n, l.readLimit())
	n, errno := readSocket(int(c.fd), l.buf[:limit])
	if n <= 0 {
		l.readEnd(c, n, errno)
		return 0
	}
	l.counters.reads.Add(1)
	l.counters.readBytes.Add(int64(n))
	if n < limit && !c.hangup && c.werr == nil {
		c.readable = false
	}
	l.view(dst, l.buf[:n])
	dst.relayed = true
	l.send(dst, c)
	l.endBatch()
	if c.dead {
		l.perform(nil)
		return n
	}
	c.ep.Moved(l.now, n)
	l.perform(c)
	return n
}

// discard reads a closing connection to learn of its end; what comes is nobody's.
func (l *loop) discard(c *conn) {
	for range 4 {
		n, errno := readSocket(int(c.fd), l.buf)
		switch {
		case n == len(l.buf):
			continue
		case n > 0:
			if !c.hangup {
				c.readable = false
				return
			}
		case n == 0:
			if c.out != nil { // its own end only: it may still take what is queued
				c.readable, c.hangup = false, false
				return
			}
			l.drop(c)
			return
		case errno == unix.EAGAIN:
			c.readable, c.hangup = false, false
			return
		case errno != unix.EINTR:
			l.drop(c)
			return
		}
	}
	l.schedule(c)
}

// readLimit is how much may be read at once: less when the buffer memory is used up, because all of it may have to be queued.
func (l *loop) readLimit() int {
	return max(minRead, l.scaled(l.e.cfg.ReadBuffer))
}

// scaled is v while at most half of the buffer memory is used, and goes down to 0 when all is.
func (l *loop) scaled(v int) int {
	limit := l.e.cfg.BufferMemory
	used := l.e.mem.Load()
	if used <= limit/2 {
		return v
	}
	return int(int64(v) * max(0, limit-used) / max(1, limit-limit/2))
}

// expired is called when c's deadline has passed.
func (l *loop) expired(c *conn) {
	switch {
	case c.shaking():
		l.shakeExpired(c)
	case c.dial != nil:
		l.dialExpired(c)
	case c.closing:
		if c.out == nil && l.clock() < c.until && unsentBytes(int(c.fd)) > 0 { // the kernel has what a slow peer has not taken yet, and would throw it away
			l.timers.set(c, min(c.until, l.clock()+linger))
			return
		}
		l.drop(c)
	case c.out != nil:
		l.checkStall(c)
	}
}

// checkStall looks, twice within the write deadline (so that it may last half as long again), whether the peer took anything: from our queue or, because the poller calls only when
// a third of the kernel's is free, from that.
func (l *loop) checkStall(c *conn) {
	q, now, stall := c.out, l.clock(), l.e.cfg.WriteStall
	unsent := unsentBytes(int(c.fd))
	if unsent < q.unsent || q.unsent < 0 { // the first look only measures
		q.progress = now
	}
	q.unsent = unsent
	if now < q.progress+stall {
		l.timers.set(c, min(now+stall/2, q.progress+stall))
		return
	}
	l.counters.stalled.Add(1)
	l.fail(c, session.NetWriteStalled, fmt.Errorf("the peer took none of %d queued bytes for %v", q.n, stall))
}

// close ends c at the endpoint's wish. The endpoint is not called any more.
func (l *loop) close(c *conn, flush bool) {
	if c.closing {
		if !flush {
			l.drop(c)
		}
		return
	}
	c.ep = nil
	if c.werr != nil || c.shaking() || !flush && c.out != nil {
		l.drop(c)
		return
	}
	c.closing = true
	l.sayGoodbye(c)
	if !flush {
		l.drop(c)
	}
	if c.dead {
		return
	}
	l.leave(c)
	c.until = l.clock() + l.e.cfg.FlushTimeout
	l.timers.set(c, c.until)
	if c.out == nil {
		l.sayEnd(c)
	}
}

// sayEnd sends our end of a closing connection, whose queue is empty, and waits a little for the peer's.
func (l *loop) sayEnd(c *conn) {
	if err := unix.Shutdown(int(c.fd), unix.SHUT_WR); err != nil {
		l.drop(c)
		return
	}
	l.timers.set(c, min(c.until, l.clock()+linger))
	c.readable = true
	l.schedule(c)
}

// finish ends c after an orderly end by the peer or by us: its endpoint is told; what is queued may still be taken.
func (l *loop) finish(c *conn, reason session.NetReason, err error) {
	if !c.shaking() {
		l.sayGoodbye(c)
	}
	if c.out == nil || c.dead {
		l.fail(c, reason, err)
		return
	}
	l.notices = append(l.notices, notice{kind: noticeClosed, ep: c.ep, reason: reason, err: err})
	l.close(c, true)
}

// fail ends c, or a dial, and has its endpoint told.
func (l *loop) fail(c *conn, reason session.NetReason, err error) {
	if c.ep != nil {
		if c.dial != nil {
			l.counters.dialFailures.Add(1)
			if errors.Is(err, unix.EADDRNOTAVAIL) {
				l.counters.portsUsedUp.Add(1)
			}
		}
		if reason == session.NetTLSFailed || reason == session.NetPlaintext {
			l.counters.handshakeFailures.Add(1)
		}
		l.notices = append(l.notices, notice{kind: noticeClosed, ep: c.ep, reason: reason, err: err})
		c.ep = nil
	}
	l.drop(c)
}

// leave takes c out of everything that concerns its reading, and lets those go on that waited for it.
func (l *loop) leave(c *conn) {
	if c.blockers > 0 {
		c.blockers = 0
		l.counters.paused.Add(-1)
	}
	l.pool.give(c.in)
	c.in = nil
	if c.out != nil {
		l.unblock(c)
	}
}

// drop closes c's descriptor and forgets it. Nobody is told.
func (l *loop) drop(c *conn) {
	if c.dead {
		return
	}
	l.leave(c)
	c.dead, c.ep, c.dial = true, nil, nil
	c.first = 0
	l.timers.stop(c)
	if c.out != nil {
		l.counters.queued.Add(-int64(c.out.n))
		l.pipes.discard(c.out.pipe)
		c.out.pipe = nil
		l.pool.giveQueue(c.out)
		c.out = nil
	}
	if c.fd >= 0 {
		if l.conns[c.fd] == c {
			l.conns[c.fd] = nil
		}
		if l.dropTLS(c) {
			unix.Close(int(c.fd))
		}
		if c.id != 0 {
			l.counters.conns.Add(-1)
		}
	}
	if c.accepted {
		l.uncount()
	}
	l.live--
	if l.stopping && l.live == 0 {
		l.quit = true
	}
}
