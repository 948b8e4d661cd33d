package zk

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/internal/zktest"
)

func TestLead(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"SW-05 a leader that is cut off ends before another begins": testLeaderCutOff,
		"a leader survives a short loss of its line":                testLeaderReconnects,
		"who holds the node in the same session is not followed":    testLeaderOfOneSession,
		"a node that was removed by hand ends the leadership":       testLeaderRemoved,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

// term is one leadership.
type term struct {
	begun time.Time
	ctx   context.Context
	early bool // another one led when it began
}

// campaign leads whenever it can until the test ends, and tells of each term.
func campaign(t *testing.T, s *Store, id string) <-chan term {
	return campaignAgainst(t, s, id, func() bool { return false })
}

// campaignAgainst is campaign with a look, at the begin of each term, whether another one leads.
func campaignAgainst(t *testing.T, s *Store, id string, other func() bool) <-chan term {
	terms := make(chan term, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- s.Lead(ctx, id, func(ctx context.Context) {
			terms <- term{time.Now(), ctx, other()}
			<-ctx.Done()
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Lead: %v", err)
		}
	})
	return terms
}

func next(t *testing.T, terms <-chan term, what string) term {
	t.Helper()
	select {
	case term := <-terms:
		return term
	case <-time.After(30 * time.Second):
		t.Fatal("gave up waiting: " + what)
		return term{}
	}
}

func ended(t *testing.T, now term) {
	t.Helper()
	select {
	case <-now.ctx.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("it goes on leading")
	}
}

func testLeaderCutOff(t *testing.T, server *zktest.Server) {
	const timeout = 7500 * time.Millisecond // a third of it is for a machine that stands still
	far, near, relay := pair(t, server, timeout)
	first := campaign(t, far, "p-far")
	old := next(t, first, "the first to lead")
	var leads atomic.Pointer[term]
	leads.Store(&old)
	second := campaignAgainst(t, near, "p-near", func() bool { return leads.Load().ctx.Err() == nil })
	for range 2 {
		cut := time.Now()
		relay.Hold()
		now := next(t, second, "the second to follow")
		if now.early {
			t.Error("the second began before the first had ended")
		}
		if took := now.begun.Sub(cut); took > timeout+6*time.Second { // an event tells it; it looks by itself each leadAudit
			t.Errorf("the second followed after %s, want the session time-out of %s and a moment", took, timeout)
		}
		ended(t, old)
		if id, err := near.Leader(within(t, 10*time.Second)); err != nil || id != "p-near" {
			t.Errorf("Leader: %q, %v", id, err)
		}
		relay.Cut()
		relay.Release()
		relay.Restore()
		// The second gives way, again and again, until the first is there to follow.
		await(t, "the first to lead again", func() bool {
			if err := near.delete(within(t, 10*time.Second), near.root+"/leader"); err != nil {
				t.Fatal(err)
			}
			select {
			case now := <-first:
				old = now
				leads.Store(&now)
				return true
			case <-second:
				return false
			case <-time.After(30 * time.Second):
				t.Fatal("nobody leads")
				return false
			}
		})
	}
}

func testLeaderReconnects(t *testing.T, server *zktest.Server) {
	far, _, relay := pair(t, server, 30*time.Second)
	terms := campaign(t, far, "p")
	now := next(t, terms, "to lead")
	for range 3 {
		relay.Cut()
		await(t, "the loss to be noticed", func() bool { return !far.Status().Connected })
		relay.Restore()
		await(t, "the connection", func() bool { return far.Status().Connected })
		if id, err := far.Leader(within(t, 10*time.Second)); err != nil || id != "p" || now.ctx.Err() != nil {
			t.Errorf("after a short loss the leader is %q, %v, and its context has ended: %v", id, err, now.ctx.Err())
		}
	}
}

// testLeaderOfOneSession has two campaigns in one process.
func testLeaderOfOneSession(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	first := campaign(t, s, "p")
	now := next(t, first, "the first to lead")
	second := campaign(t, s, "p")
	select {
	case <-second:
		t.Fatal("two lead in one session")
	case <-time.After(300 * time.Millisecond):
	}
	if now.ctx.Err() != nil {
		t.Error("the first has ended")
	}
}

func testLeaderRemoved(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	terms := campaign(t, s, "p")
	for range 2 {
		now := next(t, terms, "to lead")
		if err := s.delete(within(t, 10*time.Second), s.root+"/leader"); err != nil {
			t.Fatal(err)
		}
		ended(t, now)
	}
}

// TestALeaderWhoseServerStops loses every server for longer than its lease and leads again.
func TestALeaderWhoseServerStops(t *testing.T) {
	server := zktest.Start(t)
	s := open(t, Config{Servers: server.Addr() + chroot(), SessionTimeout: 3 * time.Second})
	terms := campaign(t, s, "p")
	now := next(t, terms, "to lead")
	server.Kill()
	ended(t, now)
	server.Start()
	next(t, terms, "to lead again")
	if id, err := s.Leader(within(t, 20*time.Second)); err != nil || id != "p" {
		t.Errorf("Leader: %q, %v", id, err)
	}
}
