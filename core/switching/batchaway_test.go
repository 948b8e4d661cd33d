package switching

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// A proxy that has gone keeps every topic from moving. It is waited for, whatever is to be done with topics that are blocked, and only when that takes long
// somebody is asked.
func TestABatchWaitsForAProxyThatHasGone(t *testing.T) {
	for _, policy := range []OnBlocked{StopOnBlocked, SkipOnBlocked} {
		for name, c := range map[string]struct {
			away time.Duration
			ends BatchState
			gate BatchGate
		}{"for a minute": {time.Minute, BatchDone, ""}, "for long": {2 * AwayLimit, BatchMoving, GatePreflight}} {
			t.Run(fmt.Sprintf("%s, %s", policy, name), func(t *testing.T) {
				r := newRun(t, 100, func(b *Batch) { b.Limits.OnBlocked = policy })
				r.late = true
				gone := time.Time{}
				for step := r.drive(); len(r.busy) > 0 || step.Do == BatchWait && step.Until.After(r.now); step = r.drive() {
					if len(r.busy) == 0 {
						r.now = step.Until
						if step.Why != "proxies that are not there" || r.r.Batch(r.now).Note != "waits: proxies: p2 is not there" {
							t.Fatalf("it waits for %q, and notes %q", step.Why, r.r.Batch(r.now).Note)
						}
						continue
					}
					i := r.busy[0]
					r.busy = r.busy[1:]
					if moved := r.r.Batch(r.now).Count.Moved; moved == 30 && gone.IsZero() {
						gone = r.now
					}
					e := ItemEnd{State: ItemMoved}
					if !gone.IsZero() && r.now.Sub(gone) < c.away {
						e = ItemEnd{State: ItemBlocked, Away: true, Note: "proxies: p2 is not there"}
					}
					r.r.Ended(r.now, i, e)
				}
				if c.gate == "" {
					r.expect(c.ends, "", 100, 0, 0)
					if b := r.r.Batch(r.now); b.Note != "" || len(r.started) > 100+4*13 {
						t.Errorf("it notes %q, and has begun %d switches", b.Note, len(r.started))
					}
					return
				}
				r.expect(c.ends, c.gate, 30, 0, 0)
				if b := r.r.Batch(r.now); !strings.Contains(b.Pause.Why, "waited for 5m0s: proxies: p2 is not there") || b.Note != "" || r.now.Sub(gone) > AwayLimit+awayRetry {
					t.Errorf("after %s: %+v, note %q", r.now.Sub(gone), b.Pause, b.Note)
				}
				r.late = false
				r.resume(nil)
				r.drive()
				r.expect(BatchDone, "", 100, 0, 0)
			})
		}
	}
}

// Who waits for a proxy is given up, paused, or followed as ever.
func TestABatchThatWaitsForAProxyHeedsItsOperator(t *testing.T) {
	waiting := func(t *testing.T) *run {
		r := newRun(t, 10, nil)
		r.late = true
		r.drive()
		for _, i := range r.busy {
			r.r.Ended(r.now, i, ItemEnd{State: ItemBlocked, Away: true, Note: "p2"})
		}
		r.busy = nil
		if step := r.drive(); step.Do != BatchWait || step.Until.Sub(r.now) != awayRetry {
			t.Fatalf("%+v", step)
		}
		return r
	}
	order := func(r *run, change func(*Batch)) {
		b := r.r.Batch(r.now)
		b.Rev++
		change(&b)
		r.r.Observe(b)
		r.now = r.now.Add(awayRetry)
		r.drive()
	}
	r := waiting(t)
	order(r, func(b *Batch) { b.Abort = true })
	r.expect(BatchAborted, "", 0, 0, 0)

	r = waiting(t)
	began := len(r.started)
	order(r, func(b *Batch) { b.Pause = &BatchPause{Gate: GateOperator} })
	if r.expect(BatchMoving, GateOperator, 0, 0, 0); len(r.started) != began {
		t.Error("it has begun a switch while it is paused")
	}

	r = waiting(t)
	r.r = NewBatchRun(r.r.Batch(r.now), slices.Clone(r.r.Items()))
	r.late = false
	r.drive()
	r.expect(BatchDone, "", 10, 0, 0)
	if b := r.r.Batch(r.now); b.Note != "" {
		t.Errorf("it still notes %q", b.Note)
	}
}
