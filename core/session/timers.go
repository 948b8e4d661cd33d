package session

import (
	"container/heap"
	"time"
)

// timer is a deadline of one owner. The zero timer is not set. Owned by the shard whose timers it is in.
type timer struct {
	at    time.Time
	pos   int // index in the heap + 1; 0 = not set
	owner interface{ fire(now time.Time) }
}

// timers is the heap of a shard's deadlines.
type timers struct{ heap timerHeap }

// set arms t for at, whether or not it was armed.
func (ts *timers) set(t *timer, at time.Time) {
	t.at = at
	if t.pos == 0 {
		heap.Push(&ts.heap, t)
		return
	}
	heap.Fix(&ts.heap, t.pos-1)
}

// sooner arms t for at unless it is armed for an earlier time.
func (ts *timers) sooner(t *timer, at time.Time) {
	if t.pos == 0 || at.Before(t.at) {
		ts.set(t, at)
	}
}

// stop disarms t.
func (ts *timers) stop(t *timer) {
	if t.pos != 0 {
		heap.Remove(&ts.heap, t.pos-1)
	}
}

// fire calls the owner of every timer that is due, each at most once, at most limit of them, and returns the next deadline (zero: none).
func (ts *timers) fire(now time.Time, limit int) time.Time {
	for ; limit > 0 && len(ts.heap) > 0 && !ts.heap[0].at.After(now); limit-- {
		t := heap.Pop(&ts.heap).(*timer)
		t.owner.fire(now)
	}
	if len(ts.heap) == 0 {
		return time.Time{}
	}
	return ts.heap[0].at
}

type timerHeap []*timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

func (h *timerHeap) Push(x any) {
	t := x.(*timer)
	t.pos = len(*h) + 1
	*h = append(*h, t)
}

func (h *timerHeap) Pop() any {
	old := *h
	n := len(old)
	t := old[n-1]
	old[n-1] = nil
	*h = old[:n-1]
	t.pos = 0
	return t
}
