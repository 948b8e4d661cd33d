package storetest

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

func testRegister(t *testing.T, f *fixture) {
	s := f.open()
	p := store.Proxy{ID: "p-1:7780", Incarnation: "i-1", Version: "v", Advertised: "pulsar://x:6650", Ops: "http://x:7780", Clusters: []string{"a", "b"},
		Digest: "d-1", Entries: 5, Started: time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC), MaxMapAgeMillis: 90_000}
	mark := "" // of the first in the last reading
	expect := func(what string, want ...store.Proxy) {
		t.Helper()
		got, err := f.open().Proxies(context.Background())
		for i := range got {
			if i == 0 {
				mark = got[0].Mark
			}
			got[i].Mark = ""
		}
		if err != nil || len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, want)
		}
	}
	if err := s.Forget(context.Background(), "nobody"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("forgetting nobody: %v, want ErrNotFound", err)
	}
	if err := s.Unregister(context.Background(), true); err != nil {
		t.Errorf("Unregister without a registration: %v", err)
	}
	if err := s.Register(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	p.Live = true
	expect("registered", p)
	p.Digest, p.Entries = "d-2", 6
	p.Health = map[string]switching.ClusterHealth{"a": {State: "down", Since: time.Date(2024, 5, 6, 7, 9, 9, 0, time.UTC)}}
	if err := s.Register(context.Background(), p); err != nil {
		t.Fatal(err)
	}
	expect("replaced", p)
	if !f.m.Single {
		q := store.Proxy{ID: "p-0", Incarnation: "i"}
		second := f.open()
		if err := second.Register(context.Background(), q); err != nil {
			t.Fatal(err)
		}
		q.Live = true
		expect("two", q, p)
		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		gone := func() { // Close does not wait for a server that is slow
			t.Helper()
			for deadline := time.Now().Add(patience); ; {
				proxies, err := s.Proxies(context.Background())
				if err == nil && !slices.ContainsFunc(proxies, func(p store.Proxy) bool { return p.ID == q.ID && p.Live }) {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("a process that was closed stays: %+v, %v", proxies, err)
				}
				<-time.After(10 * time.Millisecond)
			}
		}
		gone()
		q.Live = false
		expect("one is gone without a word", q, p)
		// P8: as long as nobody was announced, the mark stays.
		before := mark
		expect("and still is", q, p)
		if before == "" || mark != before {
			t.Errorf("mark %q, before %q, of a member that was away", mark, before)
		}
		again := f.open()
		if err := errors.Join(again.Register(context.Background(), q), again.Close()); err != nil {
			t.Fatal(err)
		}
		gone()
		expect("and is again", q, p)
		if mark == before {
			t.Error("a member that was back for a moment has the same mark")
		}
		if err := s.Forget(context.Background(), p.ID); !errors.Is(err, store.ErrLive) {
			t.Errorf("a live proxy is forgotten: %v", err)
		}
		if err := s.Forget(context.Background(), q.ID); err != nil {
			t.Errorf("forget: %v", err)
		}
		expect("it is forgotten", p)
		// SW-05: what it had sent may still arrive somewhere.
		if tombs, err := s.Tombstones(context.Background()); err != nil || len(tombs) != 1 || tombs[0].ID != q.ID || tombs[0].Incarnation != "i" || time.Since(tombs[0].At) > time.Minute {
			t.Errorf("Tombstones: %+v, %v; want one of proxy %s", tombs, err, q.ID)
		}
		// The same proxy starts anew.
		third := f.open()
		q.Incarnation = "j"
		if err := third.Register(context.Background(), q); err != nil {
			t.Fatal(err)
		}
		q.Live = true
		expect("it is back", q, p)
		if err := third.Unregister(context.Background(), true); err != nil {
			t.Fatal(err)
		}
	}
	expect("one is left", p)
	if err := s.Unregister(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	expect("unregistered")
	if tombs, err := s.Tombstones(context.Background()); err != nil || (len(tombs) > 0) != !f.m.Single {
		t.Errorf("a clean stop leaves no tombstone: %+v, %v", tombs, err)
	}
	// C4: of one that leaves with something unanswered it may still arrive.
	if !f.m.Single {
		unsettled := f.open()
		if err := unsettled.Register(context.Background(), store.Proxy{ID: "p-2", Incarnation: "k"}); err != nil {
			t.Fatal(err)
		}
		if err := unsettled.Unregister(context.Background(), false); err != nil {
			t.Fatal(err)
		}
		if tombs, err := s.Tombstones(context.Background()); err != nil || len(tombs) != 2 || tombs[1].ID != "p-2" || tombs[1].Incarnation != "k" || time.Since(tombs[1].At) > time.Minute {
			t.Errorf("Tombstones: %+v, %v; want one of p-2 too", tombs, err)
		}
		expect("unregistered, unsettled")
	}
	if err := s.Register(context.Background(), store.Proxy{ID: "a/b"}); err == nil {
		t.Error("an id with '/' is taken")
	}
}

// testIncarnations starts a second process under the id of one that is still connected, as a restart does before the old
// session has expired.
func testIncarnations(t *testing.T, f *fixture) {
	s := f.open()
	if err := s.Register(context.Background(), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	next := f.open()
	if err := next.Register(context.Background(), store.Proxy{ID: "p", Incarnation: "2"}); err != nil {
		t.Fatal(err)
	}
	proxies, err := next.Proxies(context.Background())
	if err != nil || len(proxies) != 1 || proxies[0].Incarnation != "2" || !proxies[0].Live {
		t.Errorf("Proxies: %+v, %v; want the second process, live", proxies, err)
	}
}

func testRegisterDelivers(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	v := Watch(t, s)
	v.AwaitSynced(t)
	for n := range 20 {
		mustApply(t, other, Set(Topic(n), nil, Entry(n, "a", 1)))
	}
	if err := s.Register(context.Background(), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := len(v.entries()); n != 20 {
		t.Errorf("%d of 20 entries are there when Register returns", n)
	}
}

// A watch that began since the first registration has to come as far as well.
func testRegisterAgain(t *testing.T, f *fixture) {
	s := f.open()
	p := store.Proxy{ID: "p", Incarnation: "1"}
	if err := s.Register(f.ctx(), p); err != nil {
		t.Fatal(err)
	}
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	began, gate := make(chan struct{}), make(chan struct{})
	var delivered atomic.Bool
	first := sync.OnceFunc(func() {
		close(began)
		<-gate
	})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- s.Watch(ctx, func(u store.Update) {
			first()
			if u.Synced {
				delivered.Store(true)
			}
		})
	}()
	<-began
	registered := make(chan error, 1)
	go func() { registered <- s.Register(f.ctx(), p) }()
	select {
	case err := <-registered:
		t.Errorf("Register returns (%v) before a watch that runs has delivered the map", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(gate)
	if err := <-registered; err != nil || !delivered.Load() {
		t.Errorf("Register: %v; the map was delivered: %v", err, delivered.Load())
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("Watch: %v", err)
	}
}

func testLease(t *testing.T, f *fixture) {
	s := f.open()
	v := Watch(t, s)
	v.AwaitSynced(t)
	if err := s.Register(context.Background(), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	if lease, now := s.Lease(), store.Boottime(); lease <= now {
		t.Errorf("the lease is over since %s", now-lease)
	}
	if contact, now := s.Confirmed(), store.Boottime(); contact <= 0 || contact > now {
		t.Errorf("the last contact was at %s, and it is %s", contact, now)
	}
}
