package zk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/store"
)

// registerRetry is the pause after a failed attempt to register again.
const registerRetry = time.Second

// registrar keeps one proxy announced.
type registrar struct {
	changed chan struct{} // capacity 1: look again

	lock    lock // guards what follows, and is held while nodes are written
	desired *store.Proxy
	member  string // what is stored in the member node
	session int64  // the session that holds the ephemeral node
	data    string // what the node holds, as long as there is a watch on it
}

// Register implements store.Store.
func (s *Store) Register(ctx context.Context, p store.Proxy) error {
	if err := store.CheckProxy(p); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	r := &s.registrar
	if err := r.lock.take(ctx); err != nil {
		return s.client.describe(ctx, "registering proxy "+p.ID, err)
	}
	defer r.lock.give()
	if old := r.desired; old != nil && old.ID != p.ID {
		if err := s.removeMember(ctx, old.ID); err != nil {
			return err
		}
	}
	p.Live = true
	r.desired = &p
	for {
		if err := s.announce(ctx, true); err != nil {
			r.signal() // keepRegistered goes on
			return err
		}
		// The map is read once more: a switch may have begun before this process was on the roster.
		announced, err := s.client.lease.awaitDelivered(ctx)
		if err != nil {
			return s.client.describe(ctx, "reading the map after registering proxy "+p.ID, err)
		}
		if announced {
			return nil
		}
		// The session was lost in between: start over.
	}
}

// Unregister implements store.Store.
func (s *Store) Unregister(ctx context.Context, settled bool) error {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	r := &s.registrar
	if err := r.lock.take(ctx); err != nil {
		return s.client.describe(ctx, "ending the registration", err)
	}
	defer r.lock.give()
	if r.desired == nil {
		return nil
	}
	if !settled {
		// First: whoever finds the member gone must find this.
		if err := s.bury(ctx, r.desired.ID, r.desired.Incarnation); err != nil {
			return err
		}
	}
	if err := s.removeMember(ctx, r.desired.ID); err != nil {
		return err
	}
	r.desired = nil
	return nil
}

// bury leaves a tombstone.
func (s *Store) bury(ctx context.Context, id, incarnation string) error {
	data, err := json.Marshal(store.Tombstone{ID: id, Incarnation: incarnation, At: time.Now()})
	if err != nil {
		return err
	}
	if err := s.put(ctx, s.tombstonePath(id, incarnation), data); err != nil {
		return err
	}
	return s.dropTombstones(ctx)
}

func (s *Store) tombstonePath(id, incarnation string) string {
	return s.root + "/tombstones/" + id + "@" + incarnation
}

func (s *Store) removeMember(ctx context.Context, id string) error {
	r := &s.registrar
	r.member, r.session = "", 0
	s.client.lease.announce(0)
	if err := s.delete(ctx, s.root+"/proxies/"+id); err != nil {
		return err
	}
	return s.delete(ctx, s.root+"/members/"+id)
}

// Forget implements store.Store.
func (s *Store) Forget(ctx context.Context, id string) error {
	if err := store.CheckID("proxy", id); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	if err := s.write(ctx, "forgetting proxy "+id, &forgetting{s: s, id: id}); err != nil {
		return err
	}
	return s.dropTombstones(ctx)
}

// forgetting is a Forget.
type forgetting struct {
	s                       *Store
	id                      string
	live, member, tombstone node
	old                     store.Proxy // what member says
}

func (w *forgetting) tombstonePath() string { return w.s.tombstonePath(w.id, w.old.Incarnation) }

func (w *forgetting) look(ctx context.Context) (err error) {
	if err := w.s.sync(ctx); err != nil {
		return err
	}
	if w.live, err = w.s.get(ctx, w.s.root+"/proxies/"+w.id); err != nil {
		return err
	}
	path := w.s.root + "/members/" + w.id
	if w.member, err = w.s.get(ctx, path); err != nil || !w.member.exists() {
		return err
	}
	if err := json.Unmarshal(w.member.data, &w.old); err != nil {
		return fmt.Errorf("%s is damaged: remove it: %w", path, err)
	}
	w.tombstone, err = w.s.get(ctx, w.tombstonePath())
	return err
}

func (w *forgetting) done() bool { return !w.member.exists() && !w.live.exists() }

func (w *forgetting) conflict() error {
	switch {
	case w.live.exists():
		return fmt.Errorf("proxy %s: %w", w.id, store.ErrLive)
	case !w.member.exists():
		return fmt.Errorf("proxy %s: %w", w.id, store.ErrNotFound)
	}
	return nil
}

func (w *forgetting) ops() ([]any, error) {
	data, err := json.Marshal(store.Tombstone{ID: w.id, Incarnation: w.old.Incarnation, At: time.Now()})
	if err != nil {
		return nil, err
	}
	bury := any(&zk.CreateRequest{Path: w.tombstonePath(), Data: data, Acl: w.s.acl})
	if w.tombstone.exists() {
		bury = &zk.SetDataRequest{Path: w.tombstonePath(), Data: data, Version: w.tombstone.stat.Version}
	}
	live := w.s.root + "/proxies/" + w.id
	return []any{
		// Made and removed: nobody can have announced himself since.
		&zk.CreateRequest{Path: live, Acl: w.s.acl}, &zk.DeleteRequest{Path: live, Version: -1},
		&zk.DeleteRequest{Path: w.s.root + "/members/" + w.id, Version: w.member.stat.Version}, bury,
	}, nil
}

func (w *forgetting) written([]zk.MultiResponse, []any) {}

// Tombstones implements store.Store.
func (s *Store) Tombstones(ctx context.Context) ([]store.Tombstone, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	var all []store.Tombstone
	err := s.synced(ctx, func() error {
		names, err := s.children(ctx, s.root+"/tombstones")
		if err != nil {
			return err
		}
		found := make([]store.Tombstone, len(names))
		err = parallel(len(names), func(i int) error {
			path := s.root + "/tombstones/" + names[i]
			n, err := s.get(ctx, path)
			if err != nil || !n.exists() {
				return err
			}
			if err := json.Unmarshal(n.data, &found[i]); err != nil {
				return fmt.Errorf("%s is damaged: remove it: %w", path, err)
			}
			return nil
		})
		all = slices.DeleteFunc(found, func(t store.Tombstone) bool { return t.ID == "" })
		return err
	})
	if err != nil {
		return nil, err
	}
	store.SortTombstones(all)
	return all, nil
}

// dropTombstones removes those that are of no use any more.
func (s *Store) dropTombstones(ctx context.Context) error {
	all, err := s.Tombstones(ctx)
	if err != nil {
		return err
	}
	for _, t := range all {
		if time.Since(t.At) <= store.TombstoneKept {
			break // they are in the order of their age
		}
		if err := s.delete(ctx, s.tombstonePath(t.ID, t.Incarnation)); err != nil {
			return err
		}
	}
	return nil
}

// keepRegistered announces the proxy again whenever a session was lost or its node was removed, until Close.
func (s *Store) keepRegistered() {
	r := &s.registrar
	prefix := s.root + "/proxies/"
	stop := s.client.listen(&listener{connected: r.signal, event: func(path string) {
		if strings.HasPrefix(path, prefix) {
			r.signal()
		}
	}})
	defer stop()
	failures := 0
	for {
		select {
		case <-s.client.ctx.Done():
			return
		case <-r.changed:
		}
		ctx, cancel := context.WithTimeout(s.client.ctx, store.DefaultTimeout)
		err := r.lock.take(ctx)
		if err == nil {
			err = s.announce(ctx, false)
			r.lock.give()
		}
		cancel()
		if err == nil || s.client.ctx.Err() != nil {
			failures = 0
			continue
		}
		if failures++; failures == 1 {
			s.log.Error("registering this proxy again failed, trying on", "err", err)
		}
		if pause(s.client.ctx, registerRetry) == nil {
			r.signal()
		}
	}
}

func (r *registrar) signal() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// announce makes the nodes say what is desired; registrar.lock is held. Every step may be repeated. look: ask the server in
// any case; otherwise a watch without an event is enough.
func (s *Store) announce(ctx context.Context, look bool) error {
	r := &s.registrar
	if r.desired == nil {
		return nil
	}
	if err := s.boot(ctx); err != nil {
		return err
	}
	// The member node says who it is and not what it serves, or each change of the map would write it.
	identity := *r.desired
	identity.Digest, identity.Entries, identity.Health, identity.Live = "", 0, nil, false
	member, err := json.Marshal(identity)
	if err != nil {
		return err
	}
	data, err := json.Marshal(r.desired)
	if err != nil {
		return err
	}
	id := r.desired.ID
	path := s.root + "/proxies/" + id
	if !look && r.session == s.client.sessionID() && r.data == string(data) && s.client.isArmed(path) {
		return nil // the event was of our own write, and what it left has been looked at
	}
	for {
		if r.member != string(member) || r.session != s.client.sessionID() {
			if err := s.put(ctx, s.root+"/members/"+id, member); err != nil {
				return err
			}
			r.member = string(member)
		}
		n, err := s.client.getWatched(ctx, path)
		if err != nil {
			return err
		}
		session := s.client.sessionID()
		// A member that was forgotten meanwhile would be announced without being on the roster. It is written with the other node, so that
		// it tells of every time at which somebody was connected (store.Proxy.Mark).
		create := []any{&zk.SetDataRequest{Path: s.root + "/members/" + id, Data: member, Version: -1},
			&zk.CreateRequest{Path: path, Data: data, Acl: s.acl, Flags: zk.FlagEphemeral}}
		var ops []any
		switch {
		case !n.exists():
			ops = create
		case n.stat.EphemeralOwner == session && string(n.data) == string(data):
			r.session, r.data = session, string(data)
			s.client.lease.announce(session)
			return nil
		case n.stat.EphemeralOwner == session:
			ops = []any{&zk.SetDataRequest{Path: path, Data: data, Version: n.stat.Version}}
		case r.session == session:
			// We held the node in this session and somebody replaced it: taking it back would go on for ever.
			r.data = ""
			s.client.lease.announce(0)
			return fmt.Errorf("another process registered itself as proxy %s too: give each proxy an id of its own", id)
		default:
			// A session of our own that has not expired yet, or that of a predecessor.
			ops = append([]any{&zk.DeleteRequest{Path: path, Version: n.stat.Version}}, create...)
		}
		_, err = call(ctx, s.client, func(c *zk.Conn) ([]zk.MultiResponse, error) { return c.Multi(ops...) })
		switch {
		case errors.Is(err, zk.ErrNoNode):
			r.member = "" // perhaps it was forgotten
		case err == nil, lostAnswer(err) && ctx.Err() == nil, errors.Is(err, zk.ErrNodeExists), errors.Is(err, zk.ErrBadVersion):
			// Look whether it is as it should be.
		default:
			return s.client.describe(ctx, "registering proxy "+id, err)
		}
	}
}

// Proxies implements store.Store.
func (s *Store) Proxies(ctx context.Context) ([]store.Proxy, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	var all []store.Proxy
	err := s.synced(ctx, func() (err error) {
		all, err = s.roster(ctx)
		return err
	})
	return all, err
}

// roster reads the member nodes and those of who is connected.
func (s *Store) roster(ctx context.Context) ([]store.Proxy, error) {
	members, err := s.children(ctx, s.root+"/members")
	if err != nil {
		return nil, err
	}
	live, err := s.children(ctx, s.root+"/proxies")
	if err != nil {
		return nil, err
	}
	ids := append(members, live...)
	slices.Sort(ids)
	ids = slices.Compact(ids)
	proxies := make([]*store.Proxy, len(ids))
	err = parallel(len(ids), func(i int) (err error) {
		proxies[i], err = s.member(ctx, ids[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	all := make([]store.Proxy, 0, len(proxies))
	for _, p := range proxies {
		if p != nil {
			all = append(all, *p)
		}
	}
	return all, nil
}

// member is a proxy by id; nil when it is gone. It is live if what is connected is the process that the member node names: a
// node of a process before it says nothing of this one. Who is connected and no member, which only a hand in the tree
// brings about, counts as one.
func (s *Store) member(ctx context.Context, id string) (*store.Proxy, error) {
	var found [2]*store.Proxy
	for i, parent := range []string{"/members/", "/proxies/"} {
		path := s.root + parent + id
		n, err := s.get(ctx, path)
		if err != nil {
			return nil, err
		}
		if !n.exists() {
			continue
		}
		p := &store.Proxy{}
		if err := json.Unmarshal(n.data, p); err != nil {
			return nil, fmt.Errorf("%s is damaged: remove it: %w", path, err)
		}
		p.ID, p.Live, p.Mark = id, n.stat.EphemeralOwner != 0, strconv.FormatInt(n.stat.Mzxid, 16)
		found[i] = p
	}
	member, connected := found[0], found[1]
	if connected != nil && connected.Live && (member == nil || member.Incarnation == connected.Incarnation) {
		return connected, nil
	}
	return member, nil
}
