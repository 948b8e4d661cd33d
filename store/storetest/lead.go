package storetest

import (
	"context"
	"sync"
	"testing"
	"time"

	"pointsman/store"
)

// campaign is one Lead under way.
type campaign struct {
	begun   chan struct{} // one value for each leadership
	release chan struct{} // one value ends a leadership from inside
	cancel  context.CancelFunc
	done    chan error
}

// lead starts a campaign. running, guarded by mu, counts the leaders whose context has not ended.
func lead(t *testing.T, s store.Store, id string, mu *sync.Mutex, running map[string]bool) *campaign {
	ctx, cancel := context.WithCancel(context.Background())
	c := &campaign{begun: make(chan struct{}, 100), release: make(chan struct{}), cancel: cancel, done: make(chan error, 1)}
	go func() {
		c.done <- s.Lead(ctx, id, func(ctx context.Context) {
			mu.Lock()
			if len(running) > 0 {
				t.Errorf("%s leads while %v does", id, running)
			}
			running[id] = true
			mu.Unlock()
			c.begun <- struct{}{}
			select {
			case <-ctx.Done():
			case <-c.release:
			}
			mu.Lock()
			delete(running, id)
			mu.Unlock()
		})
	}()
	t.Cleanup(cancel)
	return c
}

func (c *campaign) await(t *testing.T, what string) {
	t.Helper()
	select {
	case <-c.begun:
	case <-time.After(patience):
		t.Fatal("gave up waiting: " + what)
	}
}

func (c *campaign) ended(t *testing.T) {
	t.Helper()
	select {
	case err := <-c.done:
		if err != nil {
			t.Errorf("Lead: %v", err)
		}
	case <-time.After(patience):
		t.Error("Lead does not return")
	}
}

func mustLeader(t *testing.T, s store.Store, want string) {
	t.Helper()
	if id, err := s.Leader(context.Background()); err != nil || id != want {
		t.Errorf("Leader: %q, %v; want %q", id, err, want)
	}
}

func testLead(t *testing.T, f *fixture) {
	if f.m.Single {
		t.Skip("one process")
	}
	var mu sync.Mutex
	running := map[string]bool{}
	observer := f.open()
	mustLeader(t, observer, "")
	one, two, three := f.open(), f.open(), f.m.Open(t)
	first := lead(t, one, "p-1", &mu, running)
	first.await(t, "the first to lead")
	mustLeader(t, observer, "p-1")
	second := lead(t, two, "p-2", &mu, running)
	select {
	case <-second.begun:
		t.Error("two lead at once")
	case <-time.After(50 * time.Millisecond):
	}
	first.cancel() // released at once
	first.ended(t)
	second.await(t, "the second to follow the one that has stopped")
	mustLeader(t, observer, "p-2")
	third := lead(t, three, "p-3", &mu, running)
	second.release <- struct{}{} // from inside: the other one is first, unless it is later than store.LeadPause
	for led := false; !led; {
		select {
		case <-third.begun:
			led = true
		case <-second.begun:
			second.release <- struct{}{}
		case <-time.After(patience):
			t.Fatal("gave up waiting: the third to follow the one that has returned")
		}
	}
	mustLeader(t, observer, "p-3")
	if err := three.Close(); err != nil { // a process that stops
		t.Error(err)
	}
	third.ended(t)
	second.await(t, "the second to follow the one that was closed")
	second.cancel()
	second.ended(t)
	mustLeader(t, observer, "")
}

func testLeadAgain(t *testing.T, f *fixture) {
	s := f.open()
	var mu sync.Mutex
	c := lead(t, s, "p", &mu, map[string]bool{})
	c.await(t, "to lead")
	mustLeader(t, s, "p")
	begin := time.Now()
	c.release <- struct{}{}
	c.await(t, "to lead again")
	if took := time.Since(begin); took < store.LeadPause {
		t.Errorf("after %s: a lead that returns at once would be called in an endless loop", took)
	}
	c.cancel()
	c.ended(t)
	mustLeader(t, s, "")
	if err := s.Lead(context.Background(), "a/b", func(context.Context) {}); err == nil {
		t.Error("an id with '/' is taken")
	}
}
