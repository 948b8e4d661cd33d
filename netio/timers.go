package netio

import (
	"math"
	"time"
)

// never is a deadline that does not come.
const never = time.Duration(math.MaxInt64)

// timerHeap holds the connections that have a deadline (at most one each: dial, write stall or flush), the earliest first.
type timerHeap struct{ heap []*conn }

// next is the earliest deadline, or never.
func (h *timerHeap) next() time.Duration {
	if len(h.heap) == 0 {
		return never
	}
	return h.heap[0].due
}

// set gives c the deadline at, instead of the one it had.
func (h *timerHeap) set(c *conn, at time.Duration) {
	c.due = at
	if c.timer == 0 {
		h.heap = append(h.heap, c)
		c.timer = int32(len(h.heap))
	}
	h.fix(int(c.timer) - 1)
}

// stop takes c's deadline away.
func (h *timerHeap) stop(c *conn) {
	if c.timer == 0 {
		return
	}
	i, last := int(c.timer)-1, len(h.heap)-1
	c.timer = 0
	moved := h.heap[last]
	h.heap[last] = nil
	h.heap = h.heap[:last]
	if i < last {
		h.heap[i] = moved
		moved.timer = int32(i + 1)
		h.fix(i)
	}
}

// due takes out and returns a connection whose deadline is now or before, or nil.
func (h *timerHeap) due(now time.Duration) *conn {
	if len(h.heap) == 0 || h.heap[0].due > now {
		return nil
	}
	c := h.heap[0]
	h.stop(c)
	return c
}

// dialing lists the dials.
func (h *timerHeap) dialing() []*conn {
	var dials []*conn
	for _, c := range h.heap {
		if c.dial != nil {
			dials = append(dials, c)
		}
	}
	return dials
}

func (h *timerHeap) fix(i int) {
	for i > 0 && h.heap[i].due < h.heap[(i-1)/2].due {
		h.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
	for {
		child := 2*i + 1
		if child >= len(h.heap) {
			return
		}
		if r := child + 1; r < len(h.heap) && h.heap[r].due < h.heap[child].due {
			child = r
		}
		if h.heap[i].due <= h.heap[child].due {
			return
		}
		h.swap(i, child)
		i = child
	}
}

func (h *timerHeap) swap(i, j int) {
	h.heap[i], h.heap[j] = h.heap[j], h.heap[i]
	h.heap[i].timer, h.heap[j].timer = int32(i+1), int32(j+1)
}
