package store

import (
	"context"
	"sync"
	"time"
)

// Joint shares one reading among all who want it at the same moment: whoever asks gets the result of a reading that has begun after he asked, so it is
// no older than for one who reads alone. At most one runs at a time. The zero value is ready; it must not be copied.
type Joint[T any] struct {
	mu      sync.Mutex
	running bool
	next    *reading[T] // that has not begun, with those who wait for it; nil without
}

type reading[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// Get is what read says. The reading outlives the context of who asked first, by timeout at most, for others wait for it as well.
func (j *Joint[T]) Get(ctx context.Context, timeout time.Duration, read func(context.Context) (T, error)) (T, error) {
	j.mu.Lock()
	if j.next == nil {
		j.next = &reading[T]{done: make(chan struct{})}
	}
	mine := j.next
	if !j.running {
		j.running = true
		go j.run(context.WithoutCancel(ctx), timeout, read)
	}
	j.mu.Unlock()
	select {
	case <-mine.done:
		return mine.value, mine.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// run reads until nobody waits.
func (j *Joint[T]) run(ctx context.Context, timeout time.Duration, read func(context.Context) (T, error)) {
	for {
		j.mu.Lock()
		r := j.next
		j.next, j.running = nil, r != nil
		j.mu.Unlock()
		if r == nil {
			return
		}
		limited, cancel := context.WithTimeout(ctx, timeout)
		r.value, r.err = read(limited)
		cancel()
		close(r.done)
	}
}
