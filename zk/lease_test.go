package zk

import (
	"context"
	"slices"
	"testing"
	"time"

	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestLease(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a lease needs an announcement and a watch":                 testLeaseConditions,
		"SW-05 a lease is over before the session is":               testLeaseEndsFirst,
		"a lease is renewed while a server answers":                 testLeaseRenewed,
		"who takes the id of a process takes its lease":             testLeaseOfTwo,
		"ZK-02 after an expiry the map is read before there is one": testLeaseAfterExpiry,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

func leased(s *Store) bool { return s.Lease() > store.Boottime() }

func register(t *testing.T, s *Store, id, incarnation string) {
	t.Helper()
	if err := s.Register(within(t, 20*time.Second), store.Proxy{ID: id, Incarnation: incarnation}); err != nil {
		t.Fatal(err)
	}
}

func testLeaseConditions(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	register(t, s, "p", "1")
	if leased(s) {
		t.Error("there is a lease without a watch")
	}
	v := storetest.Watch(t, s)
	v.AwaitSynced(t)
	await(t, "the lease", func() bool { return leased(s) })
	if lease, most := s.Lease()-store.Boottime(), DefaultSessionTimeout*2/3; lease > most {
		t.Errorf("the lease is %s, want at most %s", lease, most)
	}
	if err := s.Unregister(within(t, 10*time.Second), true); err != nil {
		t.Fatal(err)
	}
	if s.Lease() != 0 {
		t.Error("there is a lease without a registration")
	}
	register(t, s, "p", "1")
	if !leased(s) {
		t.Error("there is no lease when Register has returned")
	}
	if err := s.Close(); err != nil || s.Lease() != 0 {
		t.Errorf("a closed store has a lease until %s, %v", s.Lease(), err)
	}
}

// testLeaseEndsFirst cuts a process off again and again: whenever another one sees it gone, it has known for a while.
func testLeaseEndsFirst(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 2*time.Second)
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	register(t, far, "p", "1")
	for range 3 {
		await(t, "a lease", func() bool { return leased(far) })
		relay.Hold() // nothing comes through, and nothing says so
		await(t, "the session to end", func() bool {
			proxies, err := near.Proxies(within(t, 10*time.Second))
			return err == nil && len(proxies) == 1 && !proxies[0].Live
		})
		if left := far.Lease() - store.Boottime(); left > 0 {
			t.Fatalf("the session has ended, and the lease goes on for %s", left)
		}
		relay.Cut()
		relay.Release()
		relay.Restore()
	}
}

func testLeaseRenewed(t *testing.T, server *zktest.Server) {
	const timeout = 6 * time.Second
	far, _, relay := pair(t, server, timeout)
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	register(t, far, "p", "1")
	steps := []time.Duration{}
	for session := far.client.sessionID(); len(steps) < 3; {
		until := far.Lease()
		renewed := until
		await(t, "a longer lease", func() bool {
			renewed = far.Lease()
			return renewed != until && renewed != 0 // it is none between two sessions
		})
		step := renewed - until
		if now := far.client.sessionID(); now != session { // the machine stood still for longer than the time-out
			session = now
			continue
		}
		if step < 0 {
			t.Fatalf("the lease became shorter by %s", -step)
		}
		steps = append(steps, step)
	}
	// A step is the time between the sending of two syncs. One that is longer than the lease was late; not all of them can be, however slow the machine.
	if slices.Min(steps) >= timeout*2/3 {
		t.Errorf("the lease of %s was renewed after %s: it was over each time", timeout*2/3, steps)
	}
	// A short loss of the line is no loss of the session.
	for range 5 {
		session, until := far.client.sessionID(), far.Lease()
		relay.Cut()
		await(t, "the loss to be noticed", func() bool { return !far.Status().Connected })
		relay.Restore()
		await(t, "the connection", func() bool { return far.Status().Connected })
		await(t, "a longer lease", func() bool { return far.Lease() > until })
		if far.client.sessionID() == session {
			return
		}
	}
	t.Error("each loss of the line was a loss of the session")
}

func testLeaseOfTwo(t *testing.T, server *zktest.Server) {
	root := chroot()
	one, two := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	storetest.Watch(t, one).AwaitSynced(t)
	storetest.Watch(t, two).AwaitSynced(t)
	register(t, one, "p", "1")
	register(t, two, "p", "2")
	await(t, "the first to lose its lease", func() bool { return one.Lease() == 0 })
	if !leased(two) {
		t.Error("the second has none")
	}
}

func testLeaseAfterExpiry(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, shortSession)
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	register(t, far, "p", "1")
	session, mark := far.client.sessionID(), ""
	for epoch := uint64(1); epoch <= 3; epoch++ {
		relay.Cut()
		var seen time.Duration
		var gone store.Proxy
		await(t, "the session to end", func() bool {
			proxies, err := near.Proxies(within(t, 10*time.Second))
			if err != nil || len(proxies) != 1 || proxies[0].Live {
				return false
			}
			seen, gone = store.Boottime(), proxies[0]
			return true
		})
		// P8: who has seen it gone may count from then on, as long as it has the same mark.
		if far.Confirmed() >= seen || gone.Mark == "" || gone.Mark == mark {
			t.Errorf("gone since %s with mark %q, after %q; the last contact was at %s", seen, gone.Mark, mark, far.Confirmed())
		}
		mark = gone.Mark
		if again, err := near.Proxies(within(t, 10*time.Second)); err != nil || len(again) != 1 || again[0].Mark != mark {
			t.Errorf("another mark without an announcement: %+v, %v", again, err)
		}
		contact := far.Confirmed()
		e := storetest.Entry(int(epoch), "a", epoch)
		apply(t, near, storetest.Set(e.Topic, nil, e))
		relay.Restore()
		await(t, "the lease", func() bool { return leased(far) })
		if far.Confirmed() <= contact {
			t.Errorf("there is a lease, and no contact since %s", contact)
		}
		v.Await(t, "the map", func(v *storetest.View) bool {
			if v.Entries() != int(epoch) {
				t.Fatalf("there is a lease with %d entries of %d", v.Entries(), epoch)
			}
			return true
		})
		await(t, "an answer before the lease is over", func() bool {
			until := far.Lease()
			proxies, err := near.Proxies(within(t, 10*time.Second))
			if store.Boottime() >= until {
				return false // it says nothing of the time before
			}
			if err != nil || len(proxies) != 1 || !proxies[0].Live {
				t.Errorf("there is a lease without an announcement: %+v, %v", proxies, err)
			}
			return true
		})
		if next := far.client.sessionID(); next == session {
			t.Error("the session did not expire; this test tests nothing")
		} else {
			session = next
		}
	}
}

// TestALeaseIsOfOneSession tries what no server does at will.
func TestALeaseIsOfOneSession(t *testing.T) {
	const granted = 12 * time.Second
	w := &mapWatch{signal: make(chan struct{}, 1)}
	begin := func(asked time.Duration) *lease {
		l := newLease(asked)
		l.watched(w, 0)
		l.connected(7, granted)
		return l
	}
	l := begin(granted)
	expect := func(what string, want time.Duration) {
		t.Helper()
		if got := time.Duration(l.until.Load()); got != want {
			t.Errorf("%s: the lease ends at %s, want %s", what, got, want)
		}
	}
	known := func(what string, want time.Duration) {
		t.Helper()
		if got := time.Duration(l.confirmed.Load()); got != want {
			t.Errorf("%s: the last contact was at %s, want %s", what, got, want)
		}
	}
	l.answered(7, time.Second)
	expect("neither announced nor read", 0)
	known("neither announced nor read", 0)
	l.watched(w, 7)
	expect("read, not announced", 0)
	l.announce(7)
	expect("read before it was announced", 0)
	l.watched(w, 7)
	expect("read after that", 9*time.Second)
	l.answered(7, 3*time.Second)
	l.answered(7, 2*time.Second) // it was sent before the other one
	expect("renewed", 11*time.Second)
	known("renewed", 3*time.Second)
	l.answered(6, 20*time.Second)
	expect("an answer of the session before", 11*time.Second)
	other := &mapWatch{signal: make(chan struct{}, 1)}
	l.watched(other, 0)
	expect("another watch that has not read yet", 0)
	l.unwatched(other)
	expect("and that ends", 11*time.Second)
	l.connected(8, granted)
	expect("another session", 0)
	l.answered(8, 30*time.Second)
	l.watched(w, 8)
	expect("read, and announced in the session before", 0)
	known("what a session answers before the map of it was read", 3*time.Second)
	l.announce(8)
	l.watched(w, 8)
	expect("announced and read again", 38*time.Second)
	known("announced and read again", 30*time.Second)
	l.connected(8, 9*time.Second)
	expect("a server that grants less than asked for, and less than is safe", 0)
	l.connected(8, granted)
	expect("another one, before it has answered", 0)
	l.answered(8, 31*time.Second)
	expect("and afterwards", 39*time.Second)
	l.ended()
	expect("the end of the session", 0)
	known("what was known outlives it", 31*time.Second)

	l = begin(4 * time.Second) // as a test asks
	l.connected(7, 4*time.Second)
	l.announce(7)
	l.watched(w, 7)
	l.answered(7, 6*time.Second)
	expect("a short session that was asked for", 6*time.Second+4*time.Second*2/3)
}

// Servers may be configured to grant different time-outs: a session that comes to one with a shorter one ends sooner than was counted before.
func TestALeaseIsNotOfATimeOutThatWasLonger(t *testing.T) {
	l := newLease(30 * time.Second)
	l.connected(7, 30*time.Second)
	l.answered(7, 100*time.Second)
	if _, until := l.present(); until != 120*time.Second {
		t.Fatalf("the session surely lives until %s, want 2m0s", until)
	}
	l.connected(7, 30*time.Second)
	if _, until := l.present(); until != 120*time.Second {
		t.Errorf("after a reconnect with the same time-out: %s, want 2m0s", until)
	}
	l.connected(7, 12*time.Second)
	if _, until := l.present(); until != 0 {
		t.Errorf("the session surely lives until %s, by a time-out that it has no more", until)
	}
	l.answered(7, 101*time.Second)
	if _, until := l.present(); until != 109*time.Second {
		t.Errorf("the session surely lives until %s, want 1m49s", until)
	}
}

// Who reads several things as of one moment (store.AsOf) has the server catch up once; a moment that is later than the last sync needs another one.
func TestWhatIsReadAsOfOneMomentSharesASync(t *testing.T) {
	server := zktest.Start(t)
	s := open(t, Config{Servers: server.Addr() + chroot()})
	ctx := within(t, 20*time.Second)
	read := func(ctx context.Context) (syncs uint64) {
		t.Helper()
		before := s.Operations()["sync"]
		for range 10 {
			if _, err := s.Rules(ctx); err != nil {
				t.Fatal(err)
			}
			if _, _, err := s.Entry(ctx, "persistent://acme/orders/t"); err != nil {
				t.Fatal(err)
			}
		}
		return s.Operations()["sync"] - before
	}
	read(ctx) // the tree is there
	if n := read(ctx); n < 20 {
		t.Errorf("20 reads as of now took %d syncs", n)
	}
	for range 3 { // each moment its own; the lease is renewed besides
		since := store.Boottime()
		if n := read(store.AsOf(ctx, since)); n > 3 {
			t.Errorf("20 reads as of one moment took %d syncs", n)
		}
		if !s.client.lease.syncedSince(since, s.client.sessionID()) {
			t.Error("nothing was synced since that moment")
		}
		if s.client.lease.syncedSince(store.Boottime()+time.Hour, s.client.sessionID()) || s.client.lease.syncedSince(since, s.client.sessionID()+1) {
			t.Error("a sync counts for what is later than it, or for another session")
		}
	}
}
