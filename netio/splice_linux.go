package netio

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Splicing moves the rest of a large frame from socket to socket inside the kernel, through a pipe.
const (
	tailMin   = 32 << 10 // shorter rests are cheaper to copy
	headRead  = 512      // what is read of a large frame, so that something is left to splice
	pipeSize  = 256 << 10
	maxPipes  = 64 // open ones per loop; with none free bytes are copied
	keepPipes = 8
)

// pipe carries bytes of one direction; between calls it is either empty and free, or in the queue of the connection that its bytes go to.
type pipe struct {
	r, w int
	n    int
}

// pipes are the pipes of one loop. mem counts what is in those that wait.
type pipes struct {
	mem  *atomic.Int64
	free []*pipe
	open int
	off  bool // the kernel does not splice these sockets
}

func (l *loop) canSplice(n int) bool {
	p := &l.pipes
	return n >= tailMin && !p.off && (len(p.free) > 0 || p.open < maxPipes)
}

// splice moves up to n bytes from c to dst, whose queue is empty. It tells c's endpoint and returns how many, or ok == false when
// they have to be copied.
func (l *loop) splice(c, dst *conn, n int) (moved int, ok bool) {
	p := l.pipes.take()
	if p == nil {
		return 0, false
	}
	k, err := unix.Splice(int(c.fd), nil, p.w, nil, min(n, pipeSize), unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	if k <= 0 {
		l.pipes.give(p)
		if errors.Is(err, unix.EINVAL) {
			l.pipes.off = true
			return 0, false
		}
		if err == nil {
			l.readEnd(c, 0, nil)
		} else {
			l.readEnd(c, -1, err)
		}
		return 0, true
	}
	c.bulk = true
	p.n = int(k)
	l.counters.reads.Add(1)
	l.counters.readBytes.Add(k)
	l.corked = dst
	if err := l.drain(p, dst, unix.SPLICE_F_MORE); err != nil {
		l.pipes.give(p)
		l.writeFailed(dst, err)
	} else if p.n > 0 {
		l.queueFor(dst)
		dst.out.pipe = p
		dst.out.n += p.n
		l.counters.queued.Add(int64(p.n))
		l.pipes.mem.Add(int64(p.n))
		l.block(c, dst)
	} else {
		l.pipes.give(p)
	}
	if c.dead {
		l.perform(nil)
		return int(k), true
	}
	c.ep.Moved(l.now, int(k))
	l.perform(c)
	return int(k), true
}

// drain moves p's bytes to dst until one of them has had enough.
func (l *loop) drain(p *pipe, dst *conn, more int) error {
	for p.n > 0 {
		k, err := unix.Splice(p.r, nil, int(dst.fd), nil, p.n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE|more)
		switch {
		case k > 0:
			p.n -= int(k)
			l.counters.writes.Add(1)
			l.counters.writtenBytes.Add(k)
			l.counters.spliced.Add(k)
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
		default:
			return fmt.Errorf("splice to the socket: %w", err)
		}
	}
	return nil
}

// flushPipe sends what waits in the pipe of c's queue.
func (l *loop) flushPipe(c *conn) error {
	q := c.out
	if q.pipe == nil {
		return nil
	}
	before := q.pipe.n
	err := l.drain(q.pipe, c, 0)
	sent := before - q.pipe.n
	q.n -= sent
	l.pipes.mem.Add(-int64(sent))
	if q.pipe.n == 0 {
		l.pipes.give(q.pipe)
		q.pipe = nil
	}
	return err
}

func (ps *pipes) take() *pipe {
	if n := len(ps.free); n > 0 {
		p := ps.free[n-1]
		ps.free = ps.free[:n-1]
		return p
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		return nil
	}
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize) // refused beyond the user's share of pipe memory: then it is a smaller one
	ps.open++
	return &pipe{r: fds[0], w: fds[1]}
}

// give takes back a pipe that is in nobody's queue. One that is not empty is closed.
func (ps *pipes) give(p *pipe) {
	if p.n == 0 && len(ps.free) < keepPipes {
		ps.free = append(ps.free, p)
		return
	}
	unix.Close(p.r)
	unix.Close(p.w)
	ps.open--
}

// discard takes back the pipe of a queue that is given up; nil is fine.
func (ps *pipes) discard(p *pipe) {
	if p != nil {
		ps.mem.Add(-int64(p.n))
		ps.give(p)
	}
}

func (ps *pipes) close() {
	for _, p := range ps.free {
		unix.Close(p.r)
		unix.Close(p.w)
	}
	ps.free = nil
}
