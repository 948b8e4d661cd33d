package zk

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/store"
)

// The lease: for so long a server that has not heard of this process since cannot have ended its session, so that whoever
// asks for the sessions still finds it.
//
//   - It is leaseShare of the granted session time-out, from the *sending* of the last answered sync. Pings do not count:
//     a follower answers those by itself, while it is cut off from the leader that ends the sessions.
//   - A new session begins without one: the session before it may have been counted as ended meanwhile. It has one once this
//     process is announced in it and, after that, every watch has delivered the whole map after a sync.
//   - It ends with the session.
const (
	leaseShare  = 2.0 / 3
	renewShare  = 1.0 / 6 // of the session time-out: how often a sync renews it
	renewIfDown = 200 * time.Millisecond
)

// lease is the state of that; it belongs to the client.
type lease struct {
	until     atomic.Int64 // of Lease, on store.Boottime; 0: none
	confirmed atomic.Int64 // of Confirmed; only grows

	mu        sync.Mutex // guards what follows; never held while asking a server
	session   int64      // the newest one
	contact   time.Duration
	sent      time.Duration       // the last answered sync of this session; 0: none
	announced int64               // the session in which this process is announced
	read      map[*mapWatch]int64 // the session in which each watch has delivered the map, after it was announced
	changed   chan struct{}       // closed, and replaced, when any of them changes
	asked     time.Duration       // session time-out
	granted   time.Duration       // session time-out of the newest session
}

func newLease(asked time.Duration) *lease {
	return &lease{asked: asked, read: map[*mapWatch]int64{}, changed: make(chan struct{})}
}

// connected: there is a connection, on that session. Another server may have granted another time-out for it.
func (l *lease) connected(session int64, granted time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.session != session || granted < l.granted {
		l.session, l.contact, l.sent = session, 0, 0 // what was counted with a longer time-out is not true any more
	}
	l.granted = granted
	l.update()
}

// ended: there is no session.
func (l *lease) ended() { l.connected(0, 0) }

// answered: a sync of that session was answered that was sent at that time.
func (l *lease) answered(session int64, sent time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if session != l.session {
		return
	}
	l.sent = max(l.sent, sent)
	l.contact = max(l.contact, sent+time.Duration(float64(l.granted)*leaseShare))
	l.update()
}

// syncedSince tells whether a sync of that session, which is the newest, was sent at since or later and answered.
func (l *lease) syncedSince(since time.Duration, session int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.session == session && l.session != 0 && l.sent != 0 && l.sent >= since
}

// announce: this process is announced in that session; 0: in none. If that is new, the watches deliver the map once more.
func (l *lease) announce(session int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.announced != session {
		l.announced = session
		for w := range l.read {
			l.read[w] = 0
			w.connected()
		}
	}
	l.update()
}

// watched: a watch has begun (0), or has delivered the whole map as of a moment in that session at which this process was
// announced in it.
func (l *lease) watched(w *mapWatch, session int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.read[w] = session
	l.update()
}

func (l *lease) unwatched(w *mapWatch) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.read, w)
	l.update()
}

// update is called with mu held.
func (l *lease) update() {
	until := time.Duration(0)
	if l.whole() {
		l.confirmed.Store(max(l.confirmed.Load(), int64(l.sent)))
		if !l.tooShort() {
			until = l.contact
		}
	}
	l.until.Store(int64(until))
	close(l.changed)
	l.changed = make(chan struct{})
}

// whole tells whether what this process knows is of the present session. mu is held.
func (l *lease) whole() bool {
	return l.session != 0 && l.announced == l.session && len(l.read) > 0 && l.delivered()
}

func (l *lease) delivered() bool {
	for _, session := range l.read {
		if session != l.session {
			return false
		}
	}
	return true
}

// tooShort: the servers have granted less than was asked for, and less than is safe. mu is held.
func (l *lease) tooShort() bool { return l.granted < min(l.asked, store.MinSessionTimeout) }

// present are the session and the time until which it surely lives; 0 when that is over.
func (l *lease) present() (session int64, until time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.session, l.contact
}

// timeout is that of the present session.
func (l *lease) timeout() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.granted
}

// announcedIn is the session in which this process is announced, if that is the present one; else 0.
func (l *lease) announcedIn() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.announced != l.session {
		return 0
	}
	return l.announced
}

// awaitDelivered waits until every watch has delivered the map since this process was announced in the present session.
// False: it is not announced in it (any more).
func (l *lease) awaitDelivered(ctx context.Context) (bool, error) {
	for {
		l.mu.Lock()
		announced, delivered, changed := l.session != 0 && l.announced == l.session, l.delivered(), l.changed
		l.mu.Unlock()
		if !announced || delivered {
			return announced, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return true, ctx.Err()
		}
	}
}

// Lease implements store.Store.
func (s *Store) Lease() time.Duration { return time.Duration(s.client.lease.until.Load()) }

// Confirmed implements store.Store.
func (s *Store) Confirmed() time.Duration { return time.Duration(s.client.lease.confirmed.Load()) }

// sync makes the server catch up with the leader; what a follower answers may be old otherwise. One that was sent since the moment that ctx names
// (store.AsOf), on the present session, is as good: no session ever goes back to what it was.
func (s *Store) sync(ctx context.Context) error {
	if since, ok := store.Since(ctx); ok && s.client.lease.syncedSince(since, s.client.sessionID()) {
		return nil
	}
	_, err := s.syncs.Get(ctx, store.DefaultTimeout, s.syncAlone)
	if err != nil && ctx.Err() != nil {
		return s.client.describe(ctx, "syncing", err)
	}
	return err
}

func (s *Store) syncAlone(ctx context.Context) (struct{}, error) {
	var session int64
	var sent time.Duration
	_, err := read(ctx, s.client, "syncing", func(c *zk.Conn) (string, error) {
		session, sent = s.client.sessionID(), store.Boottime()
		return c.Sync(s.root)
	})
	if err == nil {
		s.client.lease.answered(session, sent)
	}
	return struct{}{}, err
}

// synced calls f, which reads, after a sync on the same session: on a new one a follower may know less than the one before.
func (s *Store) synced(ctx context.Context, f func() error) error {
	for {
		session := s.client.sessionID()
		if err := s.sync(ctx); err != nil {
			return err
		}
		if err := f(); err != nil || s.client.sessionID() == session {
			return err
		}
	}
}

// keepLease renews the lease until Close.
func (s *Store) keepLease() {
	for {
		session, _ := s.client.lease.present()
		every := renewIfDown
		if session != 0 {
			every = time.Duration(float64(s.client.lease.timeout()) * renewShare)
			ctx, cancel := context.WithTimeout(s.client.ctx, store.DefaultTimeout)
			_ = s.sync(ctx) // it is said in Status, and the lease ends
			cancel()
		}
		if pause(s.client.ctx, every) != nil {
			return
		}
	}
}
