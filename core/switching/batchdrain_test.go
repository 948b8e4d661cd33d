package switching

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func newDrains(t *testing.T, n int, change func(*Batch)) *run {
	return newRun(t, n, func(b *Batch) {
		b.Mode, b.Namespace = ModeDrain, "acme/orders"
		if change != nil {
			change(b)
		}
	})
}

// The producers of all topics have moved long before the last subscription has: only then is the batch over, and the namespace a rule.
func TestABatchOfDrainsEndsWhenNothingDrainsAnyMore(t *testing.T) {
	r := newDrains(t, 20, nil)
	r.r.Drains(0)
	looks := 0
	drive := func() BatchStep { // with a map that says what the list of switches says
		for {
			step := r.drive()
			if step.Do != BatchSettle {
				return step
			}
			looks++
			r.r.Settled(r.now, r.r.Batch(r.now).Count.Draining, nil, "")
		}
	}
	r.end = func(int) ItemEnd {
		r.r.Drains(r.r.Batch(r.now).Count.Draining + 1)
		return ItemEnd{State: ItemMoved, HoldMillis: 100}
	}
	if step := drive(); step.Do != BatchWait || !strings.Contains(step.Why, "20 topics to drain") {
		t.Errorf("step %+v", step)
	}
	r.expect(BatchDraining, "", 20, 0, 0)
	if b := r.r.Batch(r.now); b.Rule != 0 || b.Count.Draining != 20 || looks != 0 || b.State.Over() {
		t.Errorf("%+v after %d looks at the map", b, looks)
	}
	r.r.Drains(1)
	if step := drive(); !r.r.Counted() || !strings.Contains(step.Why, "1 topic to drain") {
		t.Errorf("step %+v, to be written: %v", step, r.r.Counted())
	}
	r.r.Drains(0)
	drive()
	r.expect(BatchDone, "", 20, 0, 0)
	if b := r.r.Batch(r.now); b.Rule != 7 || looks != 1 {
		t.Errorf("%+v after %d looks at the map", b, looks)
	}
}

// The list of the switches under way may be older than the last of them, or be read in part: the map has the last word, and is looked at now and then only.
func TestABatchOfDrainsBelievesTheMap(t *testing.T) {
	r := newDrains(t, 3, nil)
	if step := r.drive(); step.Do != BatchSettle {
		t.Fatalf("step %+v", step)
	}
	r.r.Settled(r.now, 2, map[int]ItemEnd{}, "")
	if step := r.drive(); step.Do != BatchWait || !step.Until.IsZero() {
		t.Errorf("step %+v, want it to wait for two topics", step)
	}
	r.r.Drains(0)
	began := r.now
	if step := r.drive(); step.Do != BatchSettle || r.now.Sub(began) != SettleInterval {
		t.Fatalf("step %+v after %v", step, r.now.Sub(began))
	}
	r.r.Settled(r.now, 0, nil, "ZooKeeper is away")
	r.expect(BatchDraining, "", 3, 0, 0)
	began = r.now
	if step := r.drive(); step.Do != BatchSettle || r.now.Sub(began) != SettleInterval {
		t.Fatalf("step %+v after %v: a look that failed is repeated, and not at once", step, r.now.Sub(began))
	}
	// One was taken back meanwhile: the namespace is no rule, and a resume tries that one again, by a later attempt.
	r.r.Settled(r.now, 0, map[int]ItemEnd{1: TakenBack(Record{ID: "sw-1-2", From: "a", Attempt: 2})}, "")
	r.drive()
	r.expect(BatchIncomplete, "", 2, 1, 0)
	if b := r.r.Batch(r.now); b.Rule != 0 || !strings.Contains(b.Note, "the namespace has no rule") || !strings.Contains(r.r.Items()[1].Note, "taken back to cluster a") {
		t.Errorf("%+v, item %+v", b, r.r.Items()[1])
	}
	r.resume(nil)
	r.started = nil
	if step := r.drive(); step.Do != BatchSettle || !slices.Equal(r.started, []int{1}) || r.r.Items()[1].Attempt != 3 {
		t.Errorf("step %+v, started %v, item %+v", step, r.started, r.r.Items()[1])
	}
	r.r.Settled(r.now, 0, nil, "")
	r.drive()
	r.expect(BatchDone, "", 3, 0, 0)
}

func TestNoMoreTopicsDrainAtOnceThanTheLeaderCanLookAt(t *testing.T) {
	r := newDrains(t, MaxBatchDraining+100, func(b *Batch) { b.Limits.Parallel = 7 })
	r.end = func(int) ItemEnd {
		r.r.Drains(r.r.Batch(r.now).Count.Draining + 1)
		return ItemEnd{State: ItemMoved}
	}
	step := r.drive()
	if step.Do != BatchWait || !strings.Contains(step.Why, "no more than that") || len(r.started) != MaxBatchDraining {
		t.Fatalf("%d have begun; %+v", len(r.started), step)
	}
	r.r.Drains(MaxBatchDraining - 60)
	r.drive()
	if len(r.started) != MaxBatchDraining+60 {
		t.Errorf("%d have begun", len(r.started))
	}
}

func TestABatchOfDrainsThatIsGivenUpSaysWhatGoesOn(t *testing.T) {
	r := newDrains(t, 5, nil)
	r.drive()
	r.r.Settled(r.now, 4, nil, "")
	b := r.r.Batch(r.now)
	b.Rev++
	b.Abort = true
	r.r.Observe(b)
	r.now = r.now.Add(time.Second)
	r.drive()
	r.expect(BatchAborted, "", 5, 0, 0)
	if note := r.r.Batch(r.now).Note; !strings.Contains(note, "4 topics go on to drain") {
		t.Errorf("note %q", note)
	}
}
