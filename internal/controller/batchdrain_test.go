package controller

import (
	"context"
	"strings"
	"sync"
	"testing"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// drainField is a field whose topics have one subscription each, with so many entries left on the old cluster.
type drainField struct {
	*field
	mu   sync.Mutex
	left map[string]int64 // by topic; guarded by mu
}

type drainedTopic struct {
	carriedTopic
	f *drainField
}

func (d drainedTopic) Carry(ctx context.Context) ([]switching.Carried, error) {
	_, err := d.carriedTopic.Carry(ctx)
	return []switching.Carried{{Topic: d.topic, Subscription: "s", How: howAtEnd}}, err
}

func (d drainedTopic) Drained(context.Context) (switching.Drained, []switching.Left, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	n := d.f.left[d.topic]
	return switching.Drained{Subs: []switching.SubFact{{Name: "s", Backlog: n}}}, []switching.Left{{Subscription: "s", Backlog: n}}, nil
}

func (d drainedTopic) Returnable(context.Context) (string, error) { return "", nil }

func (d drainedTopic) CopyBack(context.Context, route.Drain, bool) (copied, left int64, err error) {
	return 0, 0, nil
}

func (d drainedTopic) PassOver(context.Context, func() error) error { return nil }

func (f *drainField) controller(id string) *Controller {
	c := f.field.controller(id, f.w.st.Join())
	c.cfg.Open = func(_ context.Context, rec switching.Record) (Topic, error) {
		return drainedTopic{carriedTopic{f.w.topic, f.field, rec.Topic}, f}, nil
	}
	return c
}

func (f *drainField) consume(left int64, topics ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range topics {
		f.left[t] = left
	}
}

// A namespace whose topics drain: its producers move wave by wave, its leader dies while subscriptions still read the old cluster, one topic is taken back, and moves after all. Only then is there a rule.
func TestABatchOfDrainsOutlivesItsLeaderAndEndsAsOneRule(t *testing.T) {
	in(t, func(t *testing.T) {
		f := &drainField{field: newField(t, 6, "p1", "p2"), left: map[string]int64{}}
		f.consume(9, f.onA...)
		c := f.controller("p1")
		stop := f.lead(c)
		f.start("sw-1", c, func(b *switching.Batch) { b.Mode, b.Limits.MaxBacklog = switching.ModeDrain, 0 })
		b := f.await("sw-1", "draining", func(b switching.Batch) bool { return b.Count.Draining == 6 && b.State == switching.BatchDraining })
		if b.Count.Moved != 6 || b.Rule != 0 || b.Count.Left() != 0 {
			t.Errorf("%+v", b)
		}
		stop()
		c = f.controller("p2")
		defer f.lead(c)()
		keeps := f.onA[2]
		for _, topic := range f.onA {
			if topic != keeps {
				f.consume(0, topic)
			}
		}
		f.await("sw-1", "almost done", func(b switching.Batch) bool { return b.Count.Draining == 1 })
		var id string
		for _, rec := range must(f.w.st.Running(t.Context())) {
			if id = rec.ID; rec.Topic != keeps || rec.State != switching.StateDraining {
				t.Fatalf("under way: %+v", rec)
			}
			if err := f.w.st.PutSwitch(t.Context(), rec.Back()); err != nil {
				t.Fatal(err)
			}
		}
		b = f.await("sw-1", "over", isOver)
		if rec := must(f.w.st.Switch(t.Context(), id)); rec.State != switching.StateReturned {
			t.Fatalf("%+v", rec)
		}
		if b.State != switching.BatchIncomplete || b.Count.Failed != 1 || b.Count.Moved != 5 || b.Rule != 0 || b.Runner != "p2" {
			t.Errorf("%+v", b)
		}
		for _, p := range must(f.w.st.BatchParts(t.Context(), "sw-1")) {
			for _, it := range p.Items {
				if want := it.Topic == keeps; want != strings.Contains(it.Note, "was taken back to cluster a") || want != (it.State == switching.ItemFailed) {
					t.Errorf("%+v", it)
				}
			}
		}
		f.expectFlips(6)

		f.consume(0, keeps)
		f.change("sw-1", func(b *switching.Batch) { resume(b); b.State = switching.BatchMoving })
		b = f.await("sw-1", "done", isOver)
		if b.State != switching.BatchDone || b.Count.Moved != 6 || b.Rule == 0 || f.rules != 1 {
			t.Errorf("%+v, pause %+v", b, b.Pause)
		}
		if rec := must(f.w.st.Switch(t.Context(), id)); rec.State != switching.StateDone || rec.Attempt != 3 || rec.Return {
			t.Errorf("%+v", rec)
		}
	})
}

// With many drains each is looked at more rarely, but for those of which somebody is about to move.
func TestManyDrainsAreLookedAtMoreRarely(t *testing.T) {
	var s drainStats
	for i := range 40 {
		s.set(string(rune('a'+i)), [2]int64{1, 1})
	}
	if p := s.patience(); p != 0 {
		t.Errorf("with 40 drains each is looked at %v later", p)
	}
	for i := range 460 {
		s.set(string(rune(0x100+i)), [2]int64{1, 1})
	}
	if p := s.patience(); p != 9*switching.DrainInterval {
		t.Errorf("with 500 drains each is looked at %v later", p)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
