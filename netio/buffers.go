package netio

import (
	"sync/atomic"
	"time"
)

// The sizes of pooled buffers, and how many free ones a loop keeps (the rest is the garbage collector's).
const (
	smallChunk  = 4 << 10
	mediumChunk = 20 << 10 // any TLS record
	largeChunk  = 64 << 10
	keepSmall   = 256
	keepMedium  = 64
	keepLarge   = 64
	keepQueues  = 256
)

// minRead is the least that is read at a time, however full the buffer memory is.
const minRead = 4 << 10

// pool hands out the buffers of one loop. mem counts, over all loops, the capacity of what is handed out.
type pool struct {
	mem    *atomic.Int64
	small  [][]byte
	medium [][]byte
	large  [][]byte
	queues []*outQueue
}

// take returns an empty buffer that holds at least n bytes.
func (p *pool) take(n int) []byte {
	var b []byte
	switch {
	case n <= smallChunk:
		b = takeFrom(&p.small, smallChunk)
	case n <= mediumChunk:
		b = takeFrom(&p.medium, mediumChunk)
	case n <= largeChunk:
		b = takeFrom(&p.large, largeChunk)
	default:
		b = make([]byte, 0, n)
	}
	p.mem.Add(int64(cap(b)))
	return b
}

// give takes back a buffer of take. nil is fine.
func (p *pool) give(b []byte) {
	if b == nil {
		return
	}
	p.mem.Add(-int64(cap(b)))
	switch {
	case cap(b) == smallChunk && len(p.small) < keepSmall:
		p.small = append(p.small, b[:0])
	case cap(b) == mediumChunk && len(p.medium) < keepMedium:
		p.medium = append(p.medium, b[:0])
	case cap(b) == largeChunk && len(p.large) < keepLarge:
		p.large = append(p.large, b[:0])
	}
}

func takeFrom(free *[][]byte, size int) []byte {
	if n := len(*free); n > 0 {
		b := (*free)[n-1]
		(*free)[n-1] = nil
		*free = (*free)[:n-1]
		return b
	}
	return make([]byte, 0, size)
}

// outQueue is what a connection's peer has not taken yet: a spliced rest in a pipe first, then copied bytes. A connection has one only
// while something is queued.
type outQueue struct {
	bufs     [][]byte // unsent bytes; the first starts at off
	off      int
	n        int           // bytes in bufs and pipe
	pipe     *pipe         // sent before bufs; nil when there is none
	sources  []*conn       // not read until n falls below the low watermark
	progress time.Duration // when the peer was last seen to take a byte, or the queue began
	unsent   int           // bytes in the kernel's queue when the write deadline was last looked at; -1 = not yet
}

func (p *pool) takeQueue(now time.Duration) *outQueue {
	var q *outQueue
	if n := len(p.queues); n > 0 {
		q = p.queues[n-1]
		p.queues = p.queues[:n-1]
	} else {
		q = new(outQueue)
	}
	q.progress, q.unsent = now, -1
	return q
}

// giveQueue takes back q and its buffers. Its sources and pipe must be gone.
func (p *pool) giveQueue(q *outQueue) {
	for i, b := range q.bufs {
		p.give(b)
		q.bufs[i] = nil
	}
	*q = outQueue{bufs: q.bufs[:0], sources: q.sources[:0]}
	if len(p.queues) < keepQueues && cap(q.bufs) <= 64 && cap(q.sources) <= 64 {
		p.queues = append(p.queues, q)
	}
}

// append copies b to the end of q.
func (q *outQueue) append(p *pool, b []byte) {
	q.n += len(b)
	for len(b) > 0 {
		last := len(q.bufs) - 1
		if last < 0 || len(q.bufs[last]) == cap(q.bufs[last]) {
			n := largeChunk
			if len(b) <= 2*smallChunk {
				n = smallChunk
			}
			q.bufs = append(q.bufs, p.take(n))
			last++
		}
		c := q.bufs[last]
		n := copy(c[len(c):cap(c)], b)
		q.bufs[last] = c[:len(c)+n]
		b = b[n:]
	}
}

// views appends to dst up to limit pieces of what comes next, valid until consume or append.
func (q *outQueue) views(dst [][]byte, limit int) [][]byte {
	for i, b := range q.bufs[:min(limit, len(q.bufs))] {
		if i == 0 {
			b = b[q.off:]
		}
		dst = append(dst, b)
	}
	return dst
}

// consume drops the first n copied bytes.
func (q *outQueue) consume(p *pool, n int) {
	q.n -= n
	done := 0
	for n > 0 {
		left := len(q.bufs[done]) - q.off
		if n < left {
			q.off += n
			break
		}
		n -= left
		q.off = 0
		p.give(q.bufs[done])
		done++
	}
	if done > 0 {
		rest := copy(q.bufs, q.bufs[done:])
		clear(q.bufs[rest:])
		q.bufs = q.bufs[:rest]
	}
}
