package admintest

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/controller"
	"pointsman/store"
)

// Work stands in for what a failover asks of clusters: it tells what was last seen of a dead one, and notes what is made on the other.
type Work struct {
	mu   sync.Mutex
	seen map[string]switching.Seen
	// guarded by mu:
	facts func(base string) (switching.FailoverFacts, error)
	made  []string // base names that were made ready
}

// See sets what was last seen of a cluster.
func (w *Work) See(s switching.Seen) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seen == nil {
		w.seen = map[string]switching.Seen{}
	}
	w.seen[s.Cluster] = s
}

// Find sets what is found on the new cluster for a topic.
func (w *Work) Find(f func(base string) (switching.FailoverFacts, error)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.facts = f
}

// Made are the topics that were made ready, in their order.
func (w *Work) Made() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.made...)
}

// Seen implements admin.FailoverWork.
func (w *Work) Seen(_ context.Context, cluster string) (switching.Seen, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.seen[cluster]
	s.Cluster = cluster
	return s, nil
}

// Ready implements admin.FailoverWork.
func (w *Work) Ready(_ context.Context, base, _, _ string, seen *switching.Seen, create bool) (switching.FailoverFacts, error) {
	w.mu.Lock()
	find := w.facts
	if create {
		w.made = append(w.made, base)
	}
	w.mu.Unlock()
	if find != nil {
		f, err := find(base)
		if create {
			f.Created = f.Missing
		}
		return f, err
	}
	if _, at, ok := seen.Topic(base); ok {
		return switching.FailoverFacts{Topics: 1, Measured: at}, nil
	}
	return switching.FailoverFacts{Topics: 1, Unknown: 1}, nil
}

// LeadFailovers has the server of a proxy carry out failovers, as the proxy that leads does, and judges the pairs, until the test ends or stop is called.
func LeadFailovers(t testing.TB, st store.Store, p *Proxy, s *admin.Server, pairs ...switching.FailoverPair) (stop func()) {
	t.Helper()
	f := controller.NewFailovers(controller.FailoverConfig{
		Store: st, Pairs: pairs, Table: func() *route.Table { return p.Table() }, DefaultCluster: p.DefaultCluster(), Execute: s.RunFailover, Log: slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); f.Lead(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return stop
}

// Health has the proxy say of a cluster that it is up, down or unknown.
func (p *Proxy) Health(t testing.TB, cluster, state string) {
	t.Helper()
	p.Do(func(f *Fields) {
		health := map[string]switching.ClusterHealth{}
		for name, h := range f.Info.Health {
			health[name] = h
		}
		h := switching.ClusterHealth{State: state, Since: time.Now().UTC().Truncate(time.Second)}
		if state == switching.HealthDown {
			h.Why = "cluster " + cluster + " did not answer within 5s"
		}
		health[cluster] = h
		f.Info.Health = health
	})
	p.Register(t)
}
