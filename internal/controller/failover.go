package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// Failovers is what the leader does about clusters that may die: it writes down what it sees of each (failover_seen.go), judges by what all proxies
// see whether one is dead, and carries out failovers, whoever asked for them. Other processes read what it has written.
type Failovers struct {
	cfg   FailoverConfig
	nudge chan struct{} // capacity 1
	state atomic.Pointer[failoverState]
}

// FailoverConfig is what Failovers works with.
type FailoverConfig struct {
	Store store.Store
	Pairs []switching.FailoverPair
	// SampleEvery is how often each cluster with an admin address is looked at; 0 for never.
	SampleEvery time.Duration
	Clients     map[string]*pulsaradmin.Client
	// Table is the map that is served, and DefaultCluster decides where it does not.
	Table          func() *route.Table
	DefaultCluster string
	// Execute moves what an order says until that is over, or ctx ends. It writes how far it is with store.PutFailover.
	Execute func(ctx context.Context, order switching.Failover)
	Log     *slog.Logger
}

// failoverState is what metrics tell, while this process leads.
type failoverState struct {
	proposals []switching.Proposal
	running   int
}

const (
	// judgeEvery is how often the leader judges the clusters, and looks for orders unless it is told.
	judgeEvery = time.Second
	// failoverTimeout bounds what the leader asks of the store in one such turn.
	failoverTimeout = 10 * time.Second
)

// NewFailovers makes it; Lead runs it.
func NewFailovers(cfg FailoverConfig) *Failovers {
	f := &Failovers{cfg: cfg, nudge: make(chan struct{}, 1)}
	f.state.Store(&failoverState{})
	return f
}

// Nudge tells that an order was written.
func (f *Failovers) Nudge() {
	select {
	case f.nudge <- struct{}{}:
	default:
	}
}

// Lead works until ctx ends: as long as this process leads. Its successor goes on where it stops.
func (f *Failovers) Lead(ctx context.Context) {
	defer f.state.Store(&failoverState{})
	l := &failoverLeader{f: f, running: map[string]bool{}}
	defer l.parts.Wait()
	if f.cfg.SampleEvery > 0 {
		for name := range f.cfg.Clients {
			l.parts.Go(func() { f.sample(ctx, name) })
		}
	}
	for _, p := range f.cfg.Pairs {
		l.judges = append(l.judges, switching.NewFailoverJudge(p))
	}
	ticker := time.NewTicker(judgeEvery)
	defer ticker.Stop()
	said := ""
	for ctx.Err() == nil {
		err := l.turn(ctx)
		if text := errText(err); text != said && ctx.Err() == nil {
			if said = text; err != nil {
				f.cfg.Log.Warn("the leader cannot look after dead clusters now, and tries on", "err", err)
			}
		}
		select {
		case <-ticker.C:
		case <-f.nudge:
		case <-ctx.Done():
		}
	}
}

// failoverLeader is one leadership. Owned by the goroutine of Lead, but for running.
type failoverLeader struct {
	f      *Failovers
	judges []*switching.FailoverJudge // as Pairs
	parts  sync.WaitGroup

	mu      sync.Mutex
	running map[string]bool // guarded by mu: orders that this process carries out
}

// turn begins what was ordered, and judges.
func (l *failoverLeader) turn(lead context.Context) error {
	ctx, cancel := context.WithTimeout(lead, failoverTimeout)
	defer cancel()
	orders, err := store.Failovers(ctx, l.f.cfg.Store)
	if err != nil {
		return err
	}
	l.begin(ctx, lead, orders)
	proposals, err := l.judge(ctx, lead, orders)
	if err != nil {
		return err
	}
	l.f.state.Store(&failoverState{proposals: proposals, running: len(orders)})
	return nil
}

// begin has the orders carried out that this process does not carry out yet.
func (l *failoverLeader) begin(ctx, lead context.Context, orders []switching.Failover) {
	for _, o := range orders {
		if o.State.Over() { // whoever ended it did not come to the end
			if err := store.CloseFailover(ctx, l.f.cfg.Store, o); err != nil {
				l.f.cfg.Log.Warn("a failover that is over could not be put aside", "failover", o.ID, "err", err)
			}
			continue
		}
		l.mu.Lock()
		busy := l.running[o.ID]
		l.running[o.ID] = true
		l.mu.Unlock()
		if busy {
			continue
		}
		l.parts.Go(func() {
			defer func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				delete(l.running, o.ID)
			}()
			l.f.cfg.Log.Warn("carrying out a failover", "failover", o.ID, "from", o.From, "to", o.To, "state", o.State, "automatic", o.Automatic, "who", o.Who, "why", o.Why)
			l.f.cfg.Execute(lead, o)
		})
	}
}

// judge judges all pairs and returns the proposals in force.
func (l *failoverLeader) judge(ctx, lead context.Context, orders []switching.Failover) ([]switching.Proposal, error) {
	f := l.f
	states, revs, err := store.FailoverPairs(ctx, f.cfg.Store)
	if err != nil {
		return nil, err
	}
	if err := l.dropOld(ctx, states, revs); err != nil {
		return nil, err
	}
	if len(l.judges) == 0 {
		return nil, nil
	}
	members, err := f.cfg.Store.Proxies(ctx)
	if err != nil {
		return nil, err
	}
	views := store.LiveHealth(members)
	var proposals []switching.Proposal
	for i, judge := range l.judges {
		pair := f.cfg.Pairs[i]
		at := slices.IndexFunc(states, func(s switching.PairState) bool { return s.From == pair.From && s.To == pair.To })
		if at < 0 {
			states, at = append(states, switching.PairState{From: pair.From, To: pair.To}), len(states)
		}
		before := states[at]
		next, step := judge.Judge(time.Now(), before, switching.FailoverInput{
			From: switching.CountVotes(pair.From, views), To: switching.CountVotes(pair.To, views), Members: len(members),
			Mapped: mapped(f.cfg.Table(), pair.From, f.cfg.DefaultCluster), Running: l.underWay(orders, pair.From), Others: states,
		})
		if step == switching.FailoverExecute {
			next.Order = switching.FailoverID(time.Now())
		}
		if step != switching.FailoverNothing {
			if err := store.PutFailoverPair(ctx, f.cfg.Store, next, revs[[2]string{pair.From, pair.To}]); err != nil {
				return nil, err // somebody else leads by now, or nobody can; what was judged is judged again
			}
			states[at] = next
			f.tell(before, next, step)
		}
		if next.Proposal != nil {
			proposals = append(proposals, *next.Proposal)
		}
		if step == switching.FailoverExecute {
			if err := l.order(ctx, next); err != nil {
				return nil, err
			}
		}
	}
	return proposals, l.missed(ctx, states, orders)
}

// order writes the order of an automatic failover that the state of a pair has decided.
func (l *failoverLeader) order(ctx context.Context, s switching.PairState) error {
	o := switching.Failover{
		ID: s.Order, From: s.From, To: s.To, All: true, Automatic: true, State: switching.FailoverRequested, Asked: s.Executed,
		Who: "pointsman", Why: fmt.Sprintf("cluster %s is dead (failover.%s.automatic)", s.From, s.From),
	}
	err := store.PutFailover(ctx, l.f.cfg.Store, &o)
	if errors.Is(err, store.ErrConflict) {
		return nil // it was written before
	}
	l.f.Nudge()
	return err
}

// missed writes the orders that a leader has decided, and then ended before it wrote them.
func (l *failoverLeader) missed(ctx context.Context, states []switching.PairState, orders []switching.Failover) error {
	for _, s := range states {
		if s.Order == "" || time.Since(s.Executed) > missedFor || slices.ContainsFunc(orders, func(o switching.Failover) bool { return o.ID == s.Order }) {
			continue
		}
		_, err := store.Failover(ctx, l.f.cfg.Store, s.Order)
		if errors.Is(err, store.ErrNotFound) {
			err = l.order(ctx, s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// missedFor is how long after the decision a lost order is looked for: a leader that died is followed within a minute, and nobody wants it hours later.
const missedFor = 10 * time.Minute

// dropOld withdraws the proposals of pairs that are not configured any more.
func (l *failoverLeader) dropOld(ctx context.Context, states []switching.PairState, revs map[[2]string]uint64) error {
	for _, s := range states {
		if s.Proposal == nil || slices.ContainsFunc(l.f.cfg.Pairs, func(p switching.FailoverPair) bool { return p.From == s.From && p.To == s.To }) {
			continue
		}
		s.Proposal = nil
		if err := store.PutFailoverPair(ctx, l.f.cfg.Store, s, revs[[2]string{s.From, s.To}]); err != nil {
			return err
		}
		l.f.cfg.Log.Info("the proposal of a failover is withdrawn: the pair is not configured any more", "from", s.From, "to", s.To)
	}
	return nil
}

func (l *failoverLeader) underWay(orders []switching.Failover, from string) bool {
	return slices.ContainsFunc(orders, func(o switching.Failover) bool { return o.From == from })
}

// tell logs what was judged.
func (f *Failovers) tell(before, next switching.PairState, step switching.FailoverStep) {
	switch p := next.Proposal; step {
	case switching.FailoverPropose:
		f.cfg.Log.Warn("a cluster is dead: a failover is proposed", "from", p.From, "to", p.To, "down_since", p.Down, "votes", p.Votes.String(), "automatic", p.Automatic,
			"blocked", p.Blocked, "run", p.Command())
	case switching.FailoverWithdraw:
		f.cfg.Log.Info("the proposal of a failover is withdrawn: the cluster is back, or nothing is mapped to it", "from", before.From, "to", before.To)
	case switching.FailoverExecute:
		f.cfg.Log.Warn("a cluster is dead: its topics move by themselves, as is configured", "from", next.From, "to", next.To, "failover", next.Order)
	}
}

// mapped tells whether anything is mapped to a cluster, or drains from it.
func mapped(t *route.Table, cluster, fallback string) bool {
	if t.DecideScope("", fallback).Cluster == cluster {
		return true
	}
	for _, r := range t.Rules() {
		if r.Cluster == cluster {
			return true
		}
	}
	for e := range t.Each {
		if e.Cluster == cluster || route.DrainFrom(e.Drain) == cluster {
			return true
		}
	}
	return false
}

// The metrics of failovers; they tell something in the leader only.
var (
	proposedDesc = prometheus.NewDesc("pointsman_failover_proposed", "1 while a failover is proposed from one cluster to another, in the proxy that leads.", []string{"source_cluster", "target_cluster"}, nil)
	failingDesc  = prometheus.NewDesc("pointsman_failovers_running", "Failovers that are being carried out, in the proxy that leads.", nil, nil)
)

// Describe implements prometheus.Collector.
func (f *Failovers) Describe(ch chan<- *prometheus.Desc) {
	ch <- proposedDesc
	ch <- failingDesc
}

// Collect implements prometheus.Collector: every configured pair has its series from the start.
func (f *Failovers) Collect(ch chan<- prometheus.Metric) {
	now := f.state.Load()
	for _, p := range f.cfg.Pairs {
		value := 0.0
		if slices.ContainsFunc(now.proposals, func(q switching.Proposal) bool { return q.From == p.From && q.To == p.To }) {
			value = 1
		}
		ch <- prometheus.MustNewConstMetric(proposedDesc, prometheus.GaugeValue, value, p.From, p.To)
	}
	ch <- prometheus.MustNewConstMetric(failingDesc, prometheus.GaugeValue, float64(now.running))
}
