package switching

import (
	"math/rand/v2"
	"testing"
	"time"
)

// crowded is a world with room for a number of switches at once: beyond it each holds its topic for all that are under way.
type crowded struct {
	room int
	hold time.Duration // of one alone
}

// play moves n topics and tells how many were under way at once at most and at the end, and how long it took.
func (q crowded) play(t *testing.T, n, parallel int) (most, last int, took time.Duration, run *BatchRun) {
	t.Helper()
	r := newRun(t, n, func(b *Batch) { b.Limits.Parallel, b.Ends = parallel, []int{n} })
	r.late = true
	random := rand.New(rand.NewPCG(1, 2))
	type work struct {
		began, ends time.Time
	}
	busy := map[int]work{}
	began := r.now
	for {
		if r.drive().Do == BatchOver {
			return most, last, r.now.Sub(began), r.r
		}
		for _, i := range r.busy {
			crowd := max(1, float64(len(busy)+1)/float64(q.room))
			busy[i] = work{r.now, r.now.Add(time.Duration(float64(q.hold) * crowd * (0.8 + 0.4*random.Float64())))}
		}
		r.busy = nil
		if most = max(most, len(busy)); len(busy) > 0 && r.r.Batch(r.now).Count.Left() > parallel {
			last = len(busy)
		}
		next := -1
		for i, w := range busy {
			if next < 0 || w.ends.Before(busy[next].ends) {
				next = i
			}
		}
		if next < 0 {
			t.Fatal("nothing is under way, and the batch is not over")
		}
		w := busy[next]
		r.now = w.ends
		delete(busy, next)
		r.end = func(int) ItemEnd {
			return ItemEnd{State: ItemMoved, HoldMillis: float64(w.ends.Sub(w.began).Microseconds()) / 1000}
		}
		r.finish(next)
	}
}

func TestSwitchesAtOnceGrowToWhatWasAskedForAsLongAsHoldsAreShort(t *testing.T) {
	most, last, _, run := crowded{room: 1000, hold: 100 * time.Millisecond}.play(t, 2000, 32)
	if most != 32 || last != 32 || run.Batch(time.Time{}).AtOnce != 0 {
		t.Errorf("%d at once, %d at the end, the record says %d; want 32", most, last, run.Batch(time.Time{}).AtOnce)
	}
	// One alone takes as long: fewer would shorten nothing.
	if most, last, _, _ := (crowded{room: 1000, hold: 2 * time.Second}).play(t, 2000, 32); most != 32 || last != 32 {
		t.Errorf("with holds of 2 s: %d at once, %d at the end, want 32", most, last)
	}
	if most, _, _, _ := (crowded{room: 1000, hold: 100 * time.Millisecond}).play(t, 100, 4); most != 4 {
		t.Errorf("%d at once, want the 4 that were asked for", most)
	}
}

func TestFewerSwitchesAreUnderWayAtOnceWhenEachHoldsItsTopicForTheOthers(t *testing.T) {
	// Three times as long as alone is 900 ms, which 6 at once take.
	q := crowded{room: 2, hold: 300 * time.Millisecond}
	most, last, took, run := q.play(t, 2000, 64)
	if most > 12 || last < 3 || last > 9 {
		t.Errorf("%d at once, %d at the end; want at most 12, and about 6 at the end", most, last)
	}
	if b := run.Batch(time.Time{}); b.HoldP50 > 1000 || b.HoldP99 > 2000 {
		t.Errorf("hold p50 %.0f ms, p99 %.0f ms, with 300 ms alone", b.HoldP50, b.HoldP99)
	}
	// It takes as long as with all at once, which is what room there is.
	if least := 2000 / 2 * q.hold; took > least*5/4 {
		t.Errorf("it took %v, and all at once take %v", took, least)
	}
}

func TestTheRecordSaysWhenFewerAreUnderWayThanWasAskedFor(t *testing.T) {
	r := newRun(t, 2000, func(b *Batch) { b.Limits.Parallel, b.Ends = 32, []int{2000} })
	r.late = true
	r.drive()
	if n := r.r.Batch(r.now).AtOnce; len(r.busy) != 8 || n != 8 {
		t.Errorf("%d began, the record says %d; want 8", len(r.busy), n)
	}
}
