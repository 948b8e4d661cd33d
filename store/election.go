package store

import (
	"context"
	"slices"
	"time"
)

// election is the leadership among the handles of one core; guarded by core.mu. Who campaigns longest is next.
type election struct {
	candidates []*candidate
	leader     *candidate
}

// candidate is one campaign.
type candidate struct {
	id      string
	fit     func() bool // under core.mu: may it lead now?
	elected chan struct{}
	depose  context.CancelFunc // ends the context of its lead
}

// elect deposes a leader that is not fit any more and finds the next one. core.mu is held.
func (e *election) elect() {
	if e.leader != nil && !e.leader.fit() {
		e.leader.depose()
		e.leader = nil
	}
	if e.leader != nil {
		return
	}
	for _, c := range e.candidates {
		if c.fit() {
			e.leader = c
			e.remove(c)
			close(c.elected)
			return
		}
	}
}

func (e *election) remove(c *candidate) {
	e.candidates = slices.DeleteFunc(e.candidates, func(other *candidate) bool { return other == c })
}

// lead campaigns until ctx ends or closed is.
func (c *core) lead(ctx context.Context, closed <-chan struct{}, id string, fit func() bool, lead func(context.Context)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		term, depose := context.WithCancel(ctx)
		me := &candidate{id: id, fit: fit, elected: make(chan struct{}), depose: depose}
		c.mu.Lock()
		c.election.candidates = append(c.election.candidates, me)
		c.election.elect()
		c.mu.Unlock()
		select {
		case <-me.elected:
			lead(term)
		case <-ctx.Done():
		}
		depose()
		c.mu.Lock()
		c.election.remove(me)
		if c.election.leader == me {
			c.election.leader = nil
		}
		c.election.elect()
		c.mu.Unlock()
		select {
		case <-time.After(LeadPause):
		case <-ctx.Done():
		}
	}
}

func (c *core) leaderID() string {
	if c.election.leader == nil {
		return ""
	}
	return c.election.leader.id
}
