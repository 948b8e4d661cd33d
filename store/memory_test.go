package store_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestMemoryThatFailsWritesNothing(t *testing.T) {
	m := store.NewMemory()
	broken := errors.New("broken")
	m.SetFaults(store.Faults{Err: broken})
	if err := m.Apply(context.Background(), storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1))); !errors.Is(err, broken) {
		t.Errorf("Apply: %v", err)
	}
	if m.Status().Connected {
		t.Error("it says that it is connected")
	}
	if _, ok, err := m.Join().Entry(context.Background(), storetest.Topic(1)); ok || err != nil {
		t.Errorf("another handle: %v, %v", ok, err)
	}
}

func TestMemoryThatHangsEndsByTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := store.NewMemory()
		m.SetFaults(store.Faults{Hang: true})
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := m.Rules(ctx); !errors.Is(err, store.ErrUnavailable) || time.Since(begin) != time.Second {
			t.Errorf("Rules: %v after %s", err, time.Since(begin))
		}
		begin = time.Now()
		if _, err := m.Rules(context.Background()); !errors.Is(err, store.ErrUnavailable) || time.Since(begin) != store.DefaultTimeout {
			t.Errorf("Rules without a deadline: %v after %s", err, time.Since(begin))
		}
	})
}

func TestMemoryThatLosesAnswersHasWritten(t *testing.T) {
	m := store.NewMemory()
	m.SetFaults(store.Faults{LoseAnswers: true})
	err := m.Apply(context.Background(), storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	if !errors.Is(err, store.ErrUnknown) || !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Apply: %v", err)
	}
	if _, ok, err := m.Entry(context.Background(), storetest.Topic(1)); !ok || err != nil {
		t.Errorf("Entry: %v, %v", ok, err)
	}
}

func TestMemoryThatHoldsUpdatesSkipsAllButTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := store.NewMemory()
		reader := m.Join()
		ctx, cancel := context.WithCancel(context.Background())
		var updates []store.Update
		done := make(chan error)
		go func() { done <- reader.Watch(ctx, func(u store.Update) { updates = append(updates, u) }) }()
		synctest.Wait()
		reader.SetFaults(store.Faults{HoldWatches: true})
		var before *route.Entry
		for epoch := range uint64(5) {
			after := storetest.Entry(1, "a", epoch)
			if err := m.Apply(context.Background(), storetest.Set(after.Topic, before, after)); err != nil {
				t.Fatal(err)
			}
			before = after
		}
		synctest.Wait()
		if len(updates) != 1 {
			t.Errorf("%d updates while they are held, want only the first", len(updates))
		}
		reader.SetFaults(store.Faults{})
		synctest.Wait()
		if len(updates) != 2 || updates[1].Buckets[route.Bucket(before.Topic)][0] != *before || updates[1].Rules != nil {
			t.Errorf("updates after they were held: %+v", updates[1:])
		}
		m.Redeliver()
		synctest.Wait()
		if len(updates) != 3 || len(updates[2].Buckets) != route.BucketCount || updates[2].Rules == nil {
			t.Errorf("Redeliver does not repeat the whole map: %d updates", len(updates))
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestMemoryWithABadBucketReportsAndKeepsIt(t *testing.T) {
	m := store.NewMemory()
	e := storetest.Entry(1, "a", 1)
	if err := m.Apply(context.Background(), storetest.Set(e.Topic, nil, e)); err != nil {
		t.Fatal(err)
	}
	v := storetest.Watch(t, m)
	v.AwaitEntry(t, *e)
	m.SetBad(route.Bucket(e.Topic), errors.New("broken"))
	m.SetBad(store.BadRules, errors.New("broken"))
	v.Await(t, "both to be reported", func(v *storetest.View) bool {
		return v.Bad(route.Bucket(e.Topic)) != nil && v.Bad(store.BadRules) != nil && v.Entries() == 1
	})
	if err := m.Apply(context.Background(), storetest.Set(e.Topic, e, nil)); err == nil {
		t.Error("a bad bucket is written")
	}
	m.SetBad(route.Bucket(e.Topic), nil)
	m.SetBad(store.BadRules, nil)
	v.Await(t, "both to be mended", func(v *storetest.View) bool {
		return v.Bad(route.Bucket(e.Topic)) == nil && v.Bad(store.BadRules) == nil
	})
}
