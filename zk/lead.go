package zk

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/store"
)

const (
	// leadCheck is how often a leader looks whether its session may have ended; it must be short beside what is left of a
	// session when the lease is over.
	leadCheck = 100 * time.Millisecond
	// leadAudit is how often a candidate looks at the node without an event.
	leadAudit = 10 * time.Second
	// leadRelease is how long the end of a leadership waits for its release.
	leadRelease = 5 * time.Second
)

// leaderNode is what the node of the leader holds.
type leaderNode struct {
	ID string `json:"id"`
	// Term is new with each Lead: two of one process, whose session is the same, are not one.
	Term string `json:"term"`
}

// candidate is one Lead. The leader is who owns the one ephemeral node, which all candidates watch: there are as many as
// proxies, and a handful of attempts when it goes is cheaper than a queue of nodes whose answers may be lost.
type candidate struct {
	s       *Store
	path    string
	data    []byte
	changed chan struct{} // capacity 1: look at the node
}

// Lead implements store.Store.
func (s *Store) Lead(ctx context.Context, id string, lead func(context.Context)) error {
	if err := store.CheckID("proxy", id); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)() // the store is being closed
	s.leading.RLock()
	defer s.leading.RUnlock()
	data, err := json.Marshal(leaderNode{ID: id, Term: rand.Text()})
	if err != nil {
		return err
	}
	c := &candidate{s: s, path: s.root + "/leader", data: data, changed: make(chan struct{}, 1)}
	signal := func() {
		select {
		case c.changed <- struct{}{}:
		default:
		}
	}
	defer s.client.listen(&listener{connected: signal, event: func(path string) {
		if path == c.path {
			signal()
		}
	}})()
	failed := false
	for ctx.Err() == nil {
		err := c.campaign(ctx, lead)
		if err != nil && ctx.Err() == nil && !failed {
			s.log.Warn("campaigning for the leadership failed, trying on", "err", err)
		}
		failed = err != nil
		_ = pause(ctx, store.LeadPause)
	}
	return nil
}

// campaign waits for the leadership, has lead run and releases it.
func (c *candidate) campaign(ctx context.Context, lead func(context.Context)) error {
	if err := c.s.boot(ctx); err != nil {
		return err
	}
	session, err := c.win(ctx)
	if err != nil {
		return err
	}
	defer c.release(session)
	term, depose := context.WithCancel(ctx)
	defer depose()
	guarded := make(chan struct{})
	go func() {
		defer close(guarded)
		defer depose()
		c.guard(term, session)
	}()
	lead(term)
	depose()
	<-guarded
	return nil
}

// win returns when this candidate leads, with the session that it leads in.
func (c *candidate) win(ctx context.Context) (int64, error) {
	for {
		session, n, err := c.look(ctx)
		switch {
		case err != nil:
			return 0, err
		case c.owns(n, session):
			// Only a lease that was counted in this session tells until when.
			if err := c.s.sync(ctx); err != nil {
				return 0, err
			}
			return session, nil
		case !n.exists():
			_, err = call(ctx, c.s.client, func(conn *zk.Conn) (string, error) {
				return conn.Create(c.path, c.data, zk.FlagEphemeral, c.s.acl)
			})
			if err == nil || errors.Is(err, zk.ErrNodeExists) || lostAnswer(err) && ctx.Err() == nil {
				continue // look whose it is
			}
			return 0, c.s.client.describe(ctx, "becoming the leader", err)
		}
		select {
		case <-c.changed:
		case <-time.After(leadAudit):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// look reads the node and leaves a watch on it.
func (c *candidate) look(ctx context.Context) (session int64, n node, err error) {
	for {
		session = c.s.client.sessionID()
		n, err = c.s.client.getWatched(ctx, c.path)
		if err != nil || c.s.client.sessionID() == session {
			return session, n, err
		}
	}
}

func (c *candidate) owns(n node, session int64) bool {
	return n.exists() && n.stat.EphemeralOwner == session && string(n.data) == string(c.data)
}

// guard returns as soon as another process may lead.
func (c *candidate) guard(ctx context.Context, session int64) {
	check := time.NewTicker(leadCheck)
	defer check.Stop()
	for {
		now, until := c.s.client.lease.present()
		if now != session || store.Boottime() >= until {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-check.C:
		case <-c.changed:
			asked, cancel := context.WithTimeout(ctx, until-store.Boottime())
			session, n, err := c.look(asked)
			cancel()
			if err == nil && !c.owns(n, session) {
				return
			}
		}
	}
}

// release gives the leadership up if it is still this candidate's. While no server can be reached it goes on beside the
// caller: the session, and the node with it, may outlive the trouble.
func (c *candidate) release(session int64) {
	released := make(chan struct{})
	c.s.background.Add(1)
	go func() {
		defer c.s.background.Done()
		defer close(released)
		for c.s.client.sessionID() == session {
			n, err := c.s.get(c.s.client.ctx, c.path)
			if err == nil && !c.owns(n, session) {
				return
			}
			if err == nil {
				err = c.s.deleteVersion(c.s.client.ctx, c.path, n.stat.Version)
			}
			if err == nil || pause(c.s.client.ctx, leadCheck) != nil {
				return
			}
		}
	}()
	select {
	case <-released:
	case <-time.After(leadRelease):
	}
}

// deleteVersion removes a node of that version, once.
func (s *Store) deleteVersion(ctx context.Context, path string, version int32) error {
	_, err := call(ctx, s.client, func(c *zk.Conn) (struct{}, error) { return struct{}{}, c.Delete(path, version) })
	return err
}

// Leader implements store.Store.
func (s *Store) Leader(ctx context.Context) (string, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return "", err
	}
	path := s.root + "/leader"
	var n node
	err := s.synced(ctx, func() (err error) {
		n, err = s.get(ctx, path)
		return err
	})
	if err != nil || !n.exists() {
		return "", err
	}
	var l leaderNode
	if err := json.Unmarshal(n.data, &l); err != nil {
		return "", fmt.Errorf("%s is damaged: remove it, and the proxies elect another leader: %w", path, err)
	}
	return l.ID, nil
}
