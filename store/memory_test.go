package store_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
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

func TestMemoryFaultsOfOneOperationLeaveTheOthersAlone(t *testing.T) {
	m := store.NewMemory()
	ctx := context.Background()
	broken := errors.New("broken")
	m.SetFaults(store.Faults{Err: broken, Only: []string{"PutAck", "Proxies"}})
	if err := m.PutSwitch(ctx, switching.Record{ID: "s", Rev: 1}); err != nil {
		t.Errorf("PutSwitch: %v", err)
	}
	if err := m.PutAck(ctx, "s", switching.Ack{Proxy: "p"}); !errors.Is(err, broken) {
		t.Errorf("PutAck: %v", err)
	}
	if _, err := m.Proxies(ctx); !errors.Is(err, broken) {
		t.Errorf("Proxies: %v", err)
	}
	m.SetFaults(store.Faults{LoseAnswers: true, Only: []string{"PutSwitch", "PutAck"}})
	if err := m.PutSwitch(ctx, switching.Record{ID: "s", Rev: 2}); !errors.Is(err, store.ErrUnknown) {
		t.Errorf("PutSwitch: %v, want ErrUnknown", err)
	}
	if err := m.PutAck(ctx, "s", switching.Ack{Proxy: "p"}); !errors.Is(err, store.ErrUnknown) {
		t.Errorf("PutAck: %v, want ErrUnknown", err)
	}
	r, err := m.Switch(ctx, "s")
	acks, ackErr := m.Acks(ctx, "s")
	if err != nil || ackErr != nil || r.Rev != 2 || len(acks) != 1 {
		t.Errorf("what lost its answer was not written: %+v, %v, %v, %v", r, acks, err, ackErr)
	}
	if err := m.Apply(ctx, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1))); err != nil {
		t.Errorf("Apply: %v", err)
	}
}

func TestMemoryWhoseSessionExpiresLosesLeaseAndLeadership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := store.NewMemory()
		two := one.Join()
		ctx, cancel := context.WithCancel(context.Background())
		begun := make(chan string, 10)
		done := make(chan error)
		for id, m := range map[string]*store.Memory{"one": one, "two": two} {
			if err := m.Register(ctx, store.Proxy{ID: id, Incarnation: "i"}); err != nil {
				t.Fatal(err)
			}
			go func() {
				done <- m.Lead(ctx, id, func(ctx context.Context) {
					begun <- id
					<-ctx.Done()
				})
			}()
		}
		handle := map[string]*store.Memory{"one": one, "two": two}
		other := map[string]string{"one": "two", "two": "one"}
		leader := <-begun
		// Each way in which a leader goes hands over at once.
		for name, lose := range map[string]func(m *store.Memory){
			"expired": (*store.Memory).Expire,
			"failing": func(m *store.Memory) { m.SetFaults(store.Faults{Err: errors.New("broken"), Only: []string{"Lead"}}) },
			"hanging": func(m *store.Memory) { m.SetFaults(store.Faults{Hang: true}) },
		} {
			lose(handle[leader])
			if next := <-begun; next != other[leader] {
				t.Fatalf("%s: %s leads again", name, next)
			}
			if name == "expired" {
				if handle[leader].Lease() != 0 {
					t.Error("there is a lease without a session")
				}
				proxies, err := two.Proxies(ctx)
				if err != nil || len(proxies) != 2 || proxies[0].Live == proxies[1].Live {
					t.Errorf("Proxies: %+v, %v; want one that is not live", proxies, err)
				}
			}
			handle[leader].SetFaults(store.Faults{})
			if err := handle[leader].Register(ctx, store.Proxy{ID: leader, Incarnation: "i"}); err != nil {
				t.Fatal(err)
			}
			if handle[leader].Lease() != store.Forever {
				t.Error("there is no lease after a new registration")
			}
			leader = other[leader]
			time.Sleep(2 * store.LeadPause) // of the bubble: the other one campaigns again
		}
		handle[leader].SetFaults(store.Faults{NoLease: true})
		if handle[leader].Lease() != 0 {
			t.Error("NoLease leaves a lease")
		}
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestMemoryRegistersWhenItsWatchesHaveTheMap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := store.NewMemory()
		other := m.Join()
		m.SetFaults(store.Faults{HoldWatches: true})
		v := storetest.Watch(t, m)
		synctest.Wait()
		begin := time.Now()
		if err := m.Register(context.Background(), store.Proxy{ID: "p"}); !errors.Is(err, store.ErrUnavailable) || time.Since(begin) != store.DefaultTimeout {
			t.Errorf("Register while the watch is held: %v after %s, want ErrUnavailable by the deadline", err, time.Since(begin))
		}
		if err := other.Register(context.Background(), store.Proxy{ID: "q"}); err != nil {
			t.Errorf("another handle, without a watch: %v", err)
		}
		m.SetFaults(store.Faults{})
		v.AwaitSynced(t)
	})
}

func TestSwitchesThatAreNotOverAreKept(t *testing.T) {
	m := store.NewMemory()
	ctx := context.Background()
	const most = 10_000
	for n := range most + 2 {
		r := switching.Record{ID: fmt.Sprint("s-", n), Rev: 1, State: switching.StateDone}
		if n == 0 {
			r.State = switching.StateFenced
		}
		if err := m.PutSwitch(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	for id, kept := range map[string]bool{"s-0": true, "s-1": false, "s-2": false, "s-3": true} {
		if _, err := m.Switch(ctx, id); (err == nil) != kept {
			t.Errorf("%s: %v, want that it is kept: %v", id, err, kept)
		}
	}
}

// P6: who had no lease has one again when the map was delivered since, and not before.
func TestALeaseComesBackWithTheMap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := store.NewMemory()
		mine := m.Join()
		updates := make(chan store.Update)
		go func() { _ = mine.Watch(t.Context(), func(u store.Update) { updates <- u }) }()
		lease := func(when string, want bool) {
			t.Helper()
			synctest.Wait()
			if have := mine.Lease() != 0; have != want {
				t.Errorf("%s: a lease is %v", when, have)
			}
		}
		<-updates
		lease("from the start", true)
		for what, lose := range map[string]func(){
			"faults":                 func() { mine.SetFaults(store.Faults{NoLease: true, HoldWatches: true}) },
			"the end of the session": mine.Expire,
		} {
			lose()
			lease(what, false)
			m.Redeliver()
			mine.SetFaults(store.Faults{})
			registered := make(chan error, 1)
			go func() { registered <- mine.Register(t.Context(), store.Proxy{ID: "p", Incarnation: "i"}) }()
			lease("after "+what+", before the map", false)
			<-updates
			if err := <-registered; err != nil {
				t.Error(err)
			}
			lease("after "+what+", with the map", true)
		}
	})
}
