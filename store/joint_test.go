package store

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestAJointReadingHasBegunAfterItWasAskedForAndIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j Joint[int64]
		var reads, now atomic.Int64
		read := func(context.Context) (int64, error) {
			reads.Add(1)
			begun := now.Load()
			time.Sleep(10 * time.Millisecond) // of the bubble
			return begun, nil
		}
		var group sync.WaitGroup
		for i := range int64(100) {
			group.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				asked := now.Add(1)
				if begun, err := j.Get(t.Context(), time.Minute, read); err != nil || begun < asked {
					t.Errorf("asked at %d, the reading began at %d (%v)", asked, begun, err)
				}
			})
		}
		group.Wait()
		if n := reads.Load(); n < 10 || n > 12 {
			t.Errorf("%d readings of 10 ms for 100 who asked within 100 ms", n)
		}
	})
}

func TestWhoGivesUpAJointReadingTakesItFromNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j Joint[string]
		read := func(ctx context.Context) (string, error) {
			select {
			case <-time.After(time.Second):
				return "read", nil
			case <-ctx.Done():
				return "", ctx.Err()
			}
		}
		short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		var group sync.WaitGroup
		group.Go(func() {
			if _, err := j.Get(short, time.Minute, read); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("who gives up: %v", err)
			}
		})
		synctest.Wait()
		if v, err := j.Get(t.Context(), time.Minute, read); v != "read" || err != nil {
			t.Errorf("who waits: %q, %v", v, err)
		}
		group.Wait()
		synctest.Wait() // nobody reads any more
		if _, err := j.Get(t.Context(), 10*time.Millisecond, read); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a reading that hangs: %v", err)
		}
	})
}
