package zk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
}

// Register implements store.Store.
func (s *Store) Register(ctx context.Context, p store.Proxy) error {
	if err := store.CheckID("proxy", p.ID); err != nil {
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
	err := s.announce(ctx)
	if err != nil {
		r.signal() // keepRegistered goes on
	}
	return err
}

// Unregister implements store.Store.
func (s *Store) Unregister(ctx context.Context) error {
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
	if err := s.removeMember(ctx, r.desired.ID); err != nil {
		return err
	}
	r.desired = nil
	return nil
}

func (s *Store) removeMember(ctx context.Context, id string) error {
	r := &s.registrar
	r.member, r.session = "", 0
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
	if err := s.fresh(ctx); err != nil {
		return err
	}
	path := s.root + "/proxies/" + id
	live, err := s.get(ctx, path)
	if err != nil {
		return err
	}
	if live.exists() {
		return fmt.Errorf("proxy %s: %w", id, store.ErrLive)
	}
	member, err := s.get(ctx, s.root+"/members/"+id)
	if err != nil {
		return err
	}
	if !member.exists() {
		return fmt.Errorf("proxy %s: %w", id, store.ErrNotFound)
	}
	return s.delete(ctx, s.root+"/members/"+id)
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
			err = s.announce(ctx)
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

// announce makes the nodes say what is desired; registrar.lock is held. Every step may be repeated.
func (s *Store) announce(ctx context.Context) error {
	r := &s.registrar
	if r.desired == nil {
		return nil
	}
	if err := s.boot(ctx); err != nil {
		return err
	}
	// The member node says who it is and not what it serves, or each change of the map would write it.
	identity := *r.desired
	identity.Digest, identity.Entries, identity.Live = "", 0, false
	member, err := json.Marshal(identity)
	if err != nil {
		return err
	}
	data, err := json.Marshal(r.desired)
	if err != nil {
		return err
	}
	if session := s.client.sessionID(); r.member != string(member) || r.session != session {
		if err := s.put(ctx, s.root+"/members/"+r.desired.ID, member); err != nil {
			return err
		}
		r.member = string(member)
	}
	path := s.root + "/proxies/" + r.desired.ID
	for {
		n, err := s.client.getWatched(ctx, path)
		if err != nil {
			return err
		}
		session := s.client.sessionID()
		var ops []any
		switch {
		case !n.exists():
			ops = []any{&zk.CreateRequest{Path: path, Data: data, Acl: s.acl, Flags: zk.FlagEphemeral}}
		case n.stat.EphemeralOwner == session && string(n.data) == string(data):
			r.session = session
			return nil
		case n.stat.EphemeralOwner == session:
			ops = []any{&zk.SetDataRequest{Path: path, Data: data, Version: n.stat.Version}}
		case r.session == session:
			// We held the node in this session and somebody replaced it: taking it back would go on for ever.
			return fmt.Errorf("another process registered itself as proxy %s too: give each proxy an id of its own", r.desired.ID)
		default:
			// A session of our own that has not expired yet, or that of a predecessor.
			ops = []any{&zk.DeleteRequest{Path: path, Version: n.stat.Version},
				&zk.CreateRequest{Path: path, Data: data, Acl: s.acl, Flags: zk.FlagEphemeral}}
		}
		_, err = call(ctx, s.client, func(c *zk.Conn) ([]zk.MultiResponse, error) { return c.Multi(ops...) })
		switch {
		case err == nil, lostAnswer(err) && ctx.Err() == nil,
			errors.Is(err, zk.ErrNodeExists), errors.Is(err, zk.ErrNoNode), errors.Is(err, zk.ErrBadVersion):
			// Look whether it is as it should be.
		default:
			return s.client.describe(ctx, "registering proxy "+r.desired.ID, err)
		}
	}
}

// Proxies implements store.Store.
func (s *Store) Proxies(ctx context.Context) ([]store.Proxy, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
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
	err = parallel(len(ids), func(i int) error {
		for _, parent := range []string{"/proxies/", "/members/"} {
			path := s.root + parent + ids[i]
			n, err := s.get(ctx, path)
			if err != nil {
				return err
			}
			if !n.exists() {
				continue
			}
			p := store.Proxy{}
			if err := json.Unmarshal(n.data, &p); err != nil {
				return fmt.Errorf("%s is damaged: remove it: %w", path, err)
			}
			p.ID, p.Live = ids[i], n.stat.EphemeralOwner != 0
			proxies[i] = &p
			return nil
		}
		return nil
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
