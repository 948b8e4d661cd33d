package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// wires is how many connections of the binary protocol one Apply uses.
const wires = 4

// Difference is how one subscription on the new cluster differs from its plan.
type Difference struct {
	Subscription string
	// Backlog is what the cluster counts, Forecast what the plan says of the log as it was just before, and Grown how many entries (markers, most of all)
	// were written while the cluster counted: Backlog is from Forecast to Forecast + Grown.
	Backlog, Forecast, Grown int64
	// End is where the log ended when it had grown so far.
	End Position
	// Wrong says in words what is not as planned; "" when all is.
	Wrong string
}

// Apply makes the subscriptions of the new cluster what the plans say: it creates them, or moves them, by absolute positions, and then acknowledges
// the holes. What is right already is left alone, so that it may be called again, and early: a subscription that exists keeps retention
// from removing what it needs. Nobody may be connected to a subscription that has to be moved.
//
// The plans must be of this pair; Load comes before, and is done again in between.
func (p *Pair) Apply(ctx context.Context, plans []Plan) error {
	to, ok := p.to.side.(target)
	if !ok {
		panic("pulsaradmin: a pair whose second cluster cannot be written to")
	}
	now, err := to.Subscriptions(ctx)
	if err != nil {
		return err
	}
	have := map[string]Sub{}
	for _, s := range now.Subs {
		have[s.Name] = s
	}
	var mu sync.Mutex
	var acks []Plan
	err = each(len(plans), Parallel, func(i int) error {
		todo, err := p.position(ctx, to, plans[i], have)
		if err == nil && len(todo.Holes) > 0 {
			mu.Lock()
			defer mu.Unlock()
			acks = append(acks, todo)
		}
		return err
	})
	if err != nil || len(acks) == 0 {
		return err
	}
	work := make(chan Plan, len(acks))
	for _, a := range acks {
		work <- a
	}
	close(work)
	return each(min(wires, len(acks)), wires, func(int) error {
		acker := to.Acker(ctx)
		defer acker.Close()
		for a := range work {
			if err := acker.Ack(a.Subscription, a.Type, p.positions(a.Holes)); err != nil {
				return fmt.Errorf("%s: subscription %s: %w", p.Topic, a.Subscription, err)
			}
		}
		return nil
	})
}

// target is a side whose subscriptions can be made.
type target interface {
	side
	Subscriptions(ctx context.Context) (Snapshot, error)
	Create(ctx context.Context, subscription string, first Position, replicated bool, properties map[string]string) error
	Move(ctx context.Context, subscription string, first Position) error
	SetReplicated(ctx context.Context, subscription string) error
	Acker(ctx context.Context) acker
}

// acker acknowledges for one subscription after the other.
type acker interface {
	Ack(subscription, kind string, positions []Position) error
	Close()
}

// position creates or moves one subscription and returns what is left to be acknowledged.
func (p *Pair) position(ctx context.Context, to target, plan Plan, have map[string]Sub) (todo Plan, err error) {
	todo = plan
	fail := func(err error) (Plan, error) {
		return Plan{}, fmt.Errorf("%s: subscription %s: %w", p.Topic, plan.Subscription, err)
	}
	s, exists := have[plan.Subscription]
	if !exists {
		err := to.Create(ctx, plan.Subscription, plan.First, plan.Replicated, plan.Properties)
		if errors.Is(err, ErrConflict) { // somebody else made it just now
			err = to.Move(ctx, plan.Subscription, plan.First)
		}
		if err != nil {
			return fail(err)
		}
		return todo, p.mark(ctx, to, plan)
	}
	missing, _, extra := p.compare(&s.Cursor, &plan)
	if extra == "" {
		todo.Holes = missing
	} else {
		if len(s.Consumers) > 0 {
			return fail(fmt.Errorf("%v is connected to it on cluster %s, and it has to be moved (%s); end that client, it does not come through the proxies", s.Consumers[0], p.to.Cluster(), extra))
		}
		if err := to.Move(ctx, plan.Subscription, plan.First); err != nil {
			return fail(err)
		}
	}
	if len(todo.Holes) > 0 && len(s.Consumers) > 0 {
		return fail(fmt.Errorf("%v is connected to it on cluster %s, and messages have to be acknowledged; end that client, it does not come through the proxies", s.Consumers[0], p.to.Cluster()))
	}
	if plan.Replicated && (extra != "" || !s.Replicated) {
		return todo, p.mark(ctx, to, plan)
	}
	return todo, nil
}

// mark has the subscription replicated when it was: moving a cursor makes a broker forget it.
func (p *Pair) mark(ctx context.Context, to target, plan Plan) error {
	if !plan.Replicated {
		return nil
	}
	if err := to.SetReplicated(ctx, plan.Subscription); err != nil {
		return fmt.Errorf("%s: subscription %s: %w", p.Topic, plan.Subscription, err)
	}
	return nil
}

// compare holds a cursor of the new cluster against a plan: missing is what is still to be acknowledged, extra says in words what is acknowledged too much or
// too little to be mended by acknowledging. markers is how many more of them are acknowledged than the plan says, or fewer, which does not matter but for the
// backlog.
func (p *Pair) compare(c *Cursor, plan *Plan) (missing []Range, markers int64, extra string) {
	log := &p.to.in.Log
	after := func(q Position) int64 { return log.Index(Position{q.Ledger, q.Entry + 1}) }
	first := log.Index(plan.First)
	// Between the cursor and the plan's first position there may be markers only; whatever it is, the cursor stands before it.
	if at := after(c.MarkDelete); at < first {
		for i := at; i < first; i++ {
			switch q := log.At(i); {
			case c.acked(q):
			case !p.isMarker(q):
				return nil, 0, fmt.Sprintf("it begins at %v and should begin at %v", q, plan.First)
			default:
				markers--
			}
		}
	}
	holes := &Cursor{MarkDelete: Position{plan.First.Ledger, plan.First.Entry - 1}, Acked: plan.Holes}
	end := max(after(c.lastAcked()), after(holes.lastAcked()))
	for i := first; i < end && i < log.Len(); i++ {
		q := log.At(i)
		switch want, have := holes.acked(q), c.acked(q); {
		case have && !want && !p.isMarker(q):
			return nil, 0, fmt.Sprintf("%v is acknowledged and should not be", q)
		case have && !want:
			markers++
		case want && !have:
			if n := len(missing); n > 0 && after(missing[n-1].Last) == i {
				missing[n-1].Last = q
			} else {
				missing = append(missing, Range{Position{q.Ledger, q.Entry - 1}, q})
			}
		}
	}
	return missing, markers, ""
}

// isMarker tells whether an entry of the new cluster, read before, is none that a consumer may get. What was not read counts as a message.
func (p *Pair) isMarker(q Position) bool {
	p.to.mu.Lock()
	defer p.to.mu.Unlock()
	if e, ok := p.to.single[q]; ok {
		return !e.deliverable()
	}
	b, ok := p.to.blocks[blockStart(q)]
	if !ok || b.upTo.Before(q) {
		return false
	}
	i, found := slices.BinarySearchFunc(b.entries, q, comparePosition)
	return !found || !b.entries[i].deliverable() // blocks may leave markers out
}

// positions lists the entries of ranges.
func (p *Pair) positions(ranges []Range) []Position {
	var all []Position
	for _, r := range ranges {
		for q, ok := p.to.in.Next(r.After); ok && !r.Last.Before(q); q, ok = p.to.in.Next(q) {
			all = append(all, q)
		}
	}
	return all
}

// ReadBack compares the subscriptions of the new cluster with the plans, as they are now: one Difference for each plan.
func (p *Pair) ReadBack(ctx context.Context, plans []Plan) ([]Difference, error) {
	if err := p.to.load(ctx); err != nil {
		return nil, err
	}
	now, err := p.to.side.(target).Subscriptions(ctx)
	if err != nil {
		return nil, err
	}
	before := p.to.in.Len()
	forecasts := make([]int64, len(plans))
	for i := range plans {
		forecasts[i] = p.backlog(&plans[i])
	}
	if err := p.to.load(ctx); err != nil {
		return nil, err
	}
	all := make([]Difference, len(plans))
	err = each(len(plans), Parallel, func(i int) error {
		plan, d := plans[i], &all[i]
		*d = Difference{Subscription: plan.Subscription, Forecast: forecasts[i], Grown: p.to.in.Len() - before, End: p.to.in.End()}
		at := slices.IndexFunc(now.Subs, func(s Sub) bool { return s.Name == plan.Subscription })
		if at < 0 {
			d.Wrong = fmt.Sprintf("cluster %s does not have it", p.to.Cluster())
			return nil
		}
		s := now.Subs[at]
		d.Backlog = s.Backlog
		if err := p.readAround(ctx, &s.Cursor, &plan); err != nil {
			return err
		}
		missing, markers, extra := p.compare(&s.Cursor, &plan)
		d.Forecast -= markers
		switch {
		case extra != "":
			d.Wrong = extra
		case len(missing) > 0:
			d.Wrong = fmt.Sprintf("%v and %d more ranges should be acknowledged and are not", missing[0], len(missing)-1)
		case d.Backlog < d.Forecast || d.Backlog > d.Forecast+d.Grown:
			d.Wrong = fmt.Sprintf("cluster %s counts a backlog of %d entries where %d were to be expected", p.to.Cluster(), d.Backlog, d.Forecast)
		}
		return nil
	})
	return all, err
}

// Later holds the subscriptions of the new cluster, in use by now, against what ReadBack has read of them: Forecast is what the cluster would count if nobody had
// acknowledged anything since. It counts less where somebody has, and more only where somebody has moved a subscription back.
func (p *Pair) Later(ctx context.Context, before []Difference) ([]Difference, error) {
	now, err := p.to.side.(target).Subscriptions(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.to.load(ctx); err != nil { // afterwards: what was counted is in the log
		return nil, err
	}
	log := &p.to.in.Log
	all := make([]Difference, len(before))
	for i, b := range before {
		d := Difference{Subscription: b.Subscription, Forecast: b.Forecast + b.Grown + log.Len() - log.Index(b.End)}
		if at := slices.IndexFunc(now.Subs, func(s Sub) bool { return s.Name == d.Subscription }); at < 0 {
			d.Wrong = fmt.Sprintf("cluster %s does not have it any more", p.to.Cluster())
		} else if d.Backlog = now.Subs[at].Backlog; d.Backlog > d.Forecast {
			d.Wrong = fmt.Sprintf("cluster %s counts a backlog of %d entries after the flip, %d more than if nobody had acknowledged anything: unless a client has sought back, they come again",
				p.to.Cluster(), d.Backlog, d.Backlog-d.Forecast)
		}
		all[i] = d
	}
	return all, nil
}

// readAround reads the entries between a cursor and the plan's first position, when they are few: compare has to know markers.
func (p *Pair) readAround(ctx context.Context, c *Cursor, plan *Plan) error {
	i, end := p.to.in.Index(Position{c.MarkDelete.Ledger, c.MarkDelete.Entry + 1}), p.to.in.Index(plan.First)
	if end-i > 4*blockSize {
		return nil
	}
	return p.to.forward(ctx, i, func(e Entry) (bool, error) { return p.to.in.Index(e.Position) >= end, nil })
}

// backlog is what the new cluster counts for a plan, with the log as it was loaded.
func (p *Pair) backlog(plan *Plan) int64 {
	log := &p.to.in.Log
	return log.without(log.Index(plan.First), log.Len(), plan.Holes)
}

// resetTo is the body of calls that place a subscription.
type resetTo struct {
	Ledger     int64             `json:"ledgerId"`
	Entry      int64             `json:"entryId"`
	Partition  int               `json:"partitionIndex"`
	Properties map[string]string `json:"properties,omitempty"`
}

func (r *remote) Subscriptions(ctx context.Context) (Snapshot, error) {
	return r.Client.Snapshot(ctx, r.topic)
}

func (r *remote) Create(ctx context.Context, subscription string, first Position, replicated bool, properties map[string]string) error {
	at, err := subscriptionPath(r.topic, subscription)
	if err != nil {
		return err
	}
	if replicated {
		at += "?replicated=true"
	}
	_, err = r.call(ctx, http.MethodPut, at, resetTo{first.Ledger, first.Entry, -1, properties}, nil)
	return err
}

func (r *remote) Move(ctx context.Context, subscription string, first Position) error {
	at, err := subscriptionPath(r.topic, subscription, "resetcursor")
	if err != nil {
		return err
	}
	_, err = r.call(ctx, http.MethodPost, at, resetTo{first.Ledger, first.Entry, -1, nil}, nil)
	return err
}

func (r *remote) SetReplicated(ctx context.Context, subscription string) error {
	at, err := subscriptionPath(r.topic, subscription, "replicatedSubscriptionStatus")
	if err != nil {
		return err
	}
	_, err = r.call(ctx, http.MethodPost, at, true, nil)
	return err
}

func (r *remote) Acker(ctx context.Context) acker { return &wireAcker{ctx: ctx, r: r} }

// wireAcker opens its connection when it is used first.
type wireAcker struct {
	ctx context.Context // of the Apply that it belongs to
	r   *remote
	w   *wire
}

func (a *wireAcker) Ack(subscription, kind string, positions []Position) (err error) {
	if a.w == nil {
		if a.w, err = a.r.open(a.ctx, a.r.topic); err != nil {
			return err
		}
	}
	return a.w.ack(a.ctx, subscription, kind, positions)
}

func (a *wireAcker) Close() {
	if a.w != nil {
		a.w.close()
	}
}

// Differences are those of all that are not as planned, in words; "" when there are none.
func Differences(all []Difference) string {
	var lines []string
	for _, d := range all {
		if d.Wrong != "" {
			lines = append(lines, fmt.Sprintf("subscription %s: %s", d.Subscription, d.Wrong))
		}
	}
	return strings.Join(lines, "; ")
}
