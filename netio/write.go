package netio

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// view is one piece of a connection's writes in this batch.
type view struct {
	data []byte
	next int32 // index + 1 of its next one; 0 = last
}

// perform performs the ops at hand, then makes the calls that waited for it, until neither is left. src is the connection whose
// Data or Moved brought the ops; nil for anything else. It returns whether there was anything to do.
func (l *loop) perform(src *conn) (worked bool) {
	for done := 0; ; {
		if ops := l.shard.Ops(); len(ops) > 0 {
			worked = true
			for i := range ops {
				l.performOne(&ops[i], src)
			}
			for _, c := range l.dirty {
				l.send(c, src)
			}
			l.endBatch()
			l.shard.ResetOps()
		}
		src = nil
		if done == len(l.notices) {
			clear(l.notices)
			l.notices = l.notices[:0]
			return worked
		}
		worked = true
		n := l.notices[done]
		done++
		switch {
		case n.kind == noticeClosed:
			n.ep.Closed(l.now, n.reason, n.err)
		case n.c.ep == nil: // it ended meanwhile
		case n.kind == noticeDialed:
			n.c.ep.Dialed(l.now, n.c.id)
		default:
			n.c.ep.ReadPaused(l.now, n.kind == noticePaused)
		}
	}
}

func (l *loop) performOne(op *session.Op, src *conn) {
	switch op.Kind {
	case session.OpDial:
		l.dial(op)
		return
	case session.OpReport:
		if l.e.cfg.Report != nil && op.Report != nil {
			l.e.cfg.Report(*op.Report)
		}
		return
	case session.OpTranslate, session.OpOldAcks:
		if l.e.cfg.Ask != nil {
			l.e.cfg.Ask(l.index, *op)
		}
		return
	}
	c := l.conn(op.Conn)
	if c == nil || c.closing {
		return // gone: its endpoint knows, or did it itself
	}
	switch op.Kind {
	case session.OpWrite:
		if c.werr != nil {
			return
		}
		if c.shaking() {
			l.fail(c, session.NetReset, errors.New("its endpoint wrote before the TLS handshake was over"))
			return
		}
		l.view(c, op.Data)
		if !op.Relay {
			c.answered = true
		} else if src != nil {
			c.relayed, src.relays = true, true
		}
		c.gather = c.gather || op.Gather
	case session.OpClose:
		l.send(c, src)
		if !c.dead {
			l.close(c, op.Flush)
		}
	case session.OpPause:
		c.held = true
		if c.werr != nil {
			l.fail(c, session.NetReset, c.werr)
		}
	case session.OpResume:
		c.held = false
		c.again = true
		l.schedule(c)
	default:
		panic(fmt.Sprintf("netio: op of unknown kind %d", op.Kind))
	}
}

// view adds data to what is written to c at the end of the batch. Pieces that lie one behind the other in memory become one.
func (l *loop) view(c *conn, data []byte) {
	if len(data) == 0 {
		return
	}
	if c.first == 0 {
		l.views = append(l.views, view{data: data})
		c.first = int32(len(l.views))
		c.last = c.first
		l.dirty = append(l.dirty, c)
		return
	}
	last := &l.views[c.last-1]
	if n := len(last.data); cap(last.data) > n && &last.data[:n+1][n] == &data[0] && cap(last.data) >= n+len(data) {
		last.data = last.data[:n+len(data)]
		return
	}
	l.views = append(l.views, view{data: data})
	l.views[c.last-1].next = int32(len(l.views))
	c.last = int32(len(l.views))
}

func (l *loop) endBatch() {
	clear(l.views)
	l.views = l.views[:0]
	clear(l.dirty)
	l.dirty = l.dirty[:0]
}

// send writes c's views of this batch, queues what the socket does not take, and pauses who has to wait for that.
func (l *loop) send(c *conn, src *conn) {
	if c.first == 0 || c.dead {
		return
	}
	vecs := l.vecs[:0]
	for i := c.first; i != 0; i = l.views[i-1].next {
		vecs = append(vecs, l.views[i-1].data)
	}
	l.vecs = vecs
	c.first = 0
	if c.tls != nil {
		if err := l.seal(c, vecs); err != nil {
			clear(l.vecs)
			l.writeFailed(c, fmt.Errorf("TLS: %w", err))
			return
		}
		clear(l.vecs)
		l.pushSealed(c, src)
		return
	}
	l.push(c, src, vecs)
}

// push writes vecs, which are in l.vecs, behind what is queued for c; bytes that the socket does not take are copied.
func (l *loop) push(c *conn, src *conn, vecs [][]byte) {
	relayed, answered, gather := c.relayed, c.answered, c.gather && c.out == nil
	c.relayed, c.answered, c.gather = false, false, false
	if c.out == nil && !gather {
		var err error
		if vecs, err = l.write(c, vecs, l.follows && len(vecs) == 1 && src != nil && l.tailFollows(src, c)); err != nil {
			l.writeFailed(c, err)
			return
		}
	}
	if len(vecs) == 0 {
		clear(l.vecs)
		return
	}
	l.queueFor(c)
	q := c.out
	before := q.n
	for _, b := range vecs {
		q.append(&l.pool, b)
	}
	clear(l.vecs)
	l.counters.queued.Add(int64(q.n - before))
	high, _ := l.marks()
	if gather {
		c.gathering = true
		l.gathered = append(l.gathered, c)
	}
	if c.gathering && q.n > min(high, maxGathered) { // enough to be written
		if l.flush(c); c.out == nil {
			return
		}
	}
	if q.n > high {
		if relayed && src != nil && !src.dead {
			l.block(src, c)
		}
	}
	if q.n > min(high, maxAnswers) && answered && !c.blocking && !c.dead {
		c.blocking = true
		l.block(c, c)
	}
}

// maxAnswers is how much of what was written without Relay may wait for a peer that is heard: more than that it only asks for.
const maxAnswers = 128 << 10

// maxGathered is how much gathers at most for one connection.
const maxGathered = 32 << 10

// queueFor makes c's queue, and sets the deadline by which its peer must take something.
func (l *loop) queueFor(c *conn) {
	if c.out != nil {
		return
	}
	c.out = l.pool.takeQueue(l.clock())
	if c.timer == 0 {
		l.timers.set(c, c.out.progress+l.e.cfg.WriteStall/2)
	}
}

// tailFollows tells whether the rest of a large frame from src, which is there already, will be spliced behind what is written to c.
func (l *loop) tailFollows(src, c *conn) bool {
	if src.stopped() {
		return false
	}
	name, n := src.ep.Tail()
	return name == c.id && l.canSplice(n)
}

// write writes vecs until the socket is full and returns what is left of them. more: one view only, and more comes at once, so that the
// kernel should not send a packet of its own for it.
func (l *loop) write(c *conn, vecs [][]byte, more bool) ([][]byte, error) {
	for len(vecs) > 0 {
		var n int
		var errno error
		if more {
			l.corked = c
			n, errno = writeMore(int(c.fd), vecs[0])
		} else {
			n, errno = l.iov.write(int(c.fd), vecs)
		}
		if n < 0 {
			switch errno {
			case unix.EINTR:
				continue
			case unix.EAGAIN:
				return vecs, nil
			}
			return nil, fmt.Errorf("write: %w", errno)
		}
		l.counters.writes.Add(1)
		l.counters.writtenBytes.Add(int64(n))
		for len(vecs) > 0 && n >= len(vecs[0]) {
			n -= len(vecs[0])
			vecs = vecs[1:]
		}
		if n > 0 {
			vecs[0] = vecs[0][n:]
		}
	}
	return nil, nil
}

// writeFailed ends a connection whose peer is gone, after what it sent before has been read: often that says why.
func (l *loop) writeFailed(c *conn, err error) {
	if c.closing || c.held || c.blockers > 0 {
		l.fail(c, session.NetReset, err)
		return
	}
	c.werr = err
	c.readable = true
	if c.out != nil {
		l.unblock(c)
		l.counters.queued.Add(-int64(c.out.n))
		l.pipes.discard(c.out.pipe)
		c.out.pipe = nil
		l.pool.giveQueue(c.out)
		c.out = nil
	}
	l.schedule(c)
}

// flush writes what is queued for c, now that its socket has room.
func (l *loop) flush(c *conn) {
	q := c.out
	c.gathering = false
	before := q.n
	err := l.flushPipe(c)
	for err == nil && q.pipe == nil && q.n > 0 {
		vecs := q.views(l.vecs[:0], maxIovecs)
		n, errno := l.iov.write(int(c.fd), vecs)
		clear(vecs)
		l.vecs = vecs
		if n < 0 {
			if errno == unix.EAGAIN {
				break
			}
			if errno != unix.EINTR {
				err = fmt.Errorf("write: %w", errno)
			}
			continue
		}
		l.counters.writes.Add(1)
		l.counters.writtenBytes.Add(int64(n))
		q.consume(&l.pool, n)
	}
	l.counters.queued.Add(int64(q.n - before))
	if err != nil {
		l.writeFailed(c, err)
		return
	}
	if q.n != before {
		q.progress = l.clock()
	}
	if _, low := l.marks(); q.pipe == nil && q.n <= low {
		l.unblock(c)
	}
	if q.n == 0 {
		c.out = nil
		l.pool.giveQueue(q)
		if c.closing {
			l.sayEnd(c)
		} else {
			l.timers.stop(c)
		}
	}
}

// marks are the watermarks of now: near the end of the buffer memory they go down to nothing, so that a sink with anything queued stops
// its source and the number of stalled peers does not matter.
func (l *loop) marks() (high, low int) {
	high = l.scaled(l.e.cfg.HighWater)
	return high, min(l.e.cfg.LowWater, high/4)
}

// block stops the reading of src until sink's queue is below the low watermark.
func (l *loop) block(src, sink *conn) {
	if src.werr != nil { // it was only read for its last words, and there is no room for them
		l.fail(src, session.NetReset, src.werr)
		return
	}
	sink.out.sources = append(sink.out.sources, src)
	src.blockers++
	if src.blockers == 1 {
		l.counters.paused.Add(1)
		l.notices = append(l.notices, notice{kind: noticePaused, c: src})
	}
}

// unblock lets those be read again that waited for sink.
func (l *loop) unblock(sink *conn) {
	q := sink.out
	sink.blocking = false
	for i, src := range q.sources {
		q.sources[i] = nil
		if src.dead || src.closing || src.blockers == 0 {
			continue
		}
		src.blockers--
		if src.blockers == 0 {
			l.counters.paused.Add(-1)
			l.notices = append(l.notices, notice{kind: noticeResumed, c: src})
			l.schedule(src)
		}
	}
	q.sources = q.sources[:0]
}
