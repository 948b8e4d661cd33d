package pulsaradmin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Snapshot is what the subscriptions of one partition have acknowledged on one cluster, at one moment.
type Snapshot struct {
	Topic   string
	Cluster string
	Log     Log
	Subs    []Sub // durable ones, by name
	// Readers are the names of subscriptions that are not durable: they are not carried, their clients go on by the message ids that they have.
	Readers []string
	Sent    map[string]Position // by cluster that it replicates to: everything up to it is stored there
}

// Sub is the state of one durable subscription.
type Sub struct {
	Name       string
	Type       string // Exclusive, Shared, Failover, Key_Shared; None when nobody knows
	Replicated bool
	Properties map[string]string
	Cursor     Cursor
	Backlog    int64 // entries that are not acknowledged, markers included
	Delayed    int64
	Consumers  []Consumer
}

// acked tells whether an entry at p is acknowledged. Batches that are acknowledged in part count as not acknowledged: no admin call
// shows which of their messages are.
func (c *Cursor) acked(p Position) bool {
	if !c.MarkDelete.Before(p) {
		return true
	}
	// The first range that ends at p or later.
	i, _ := slices.BinarySearchFunc(c.Acked, p, func(r Range, p Position) int { return r.Last.Compare(p) })
	return i < len(c.Acked) && c.Acked[i].Contains(p)
}

// lastAcked is where the last range ends, or the mark-delete position without any.
func (c *Cursor) lastAcked() Position {
	if n := len(c.Acked); n > 0 && c.MarkDelete.Before(c.Acked[n-1].Last) {
		return c.Acked[n-1].Last
	}
	return c.MarkDelete
}

// Reserved tells whether a cursor belongs to the broker itself.
func Reserved(name string) bool {
	return strings.HasPrefix(name, replicatorCursor) || strings.HasPrefix(name, "pulsar.dedup") || name == "__compaction"
}

// sent is how far each replicator is, by the cluster that it sends to.
func (in *Internal) sent() map[string]Position {
	all := map[string]Position{}
	for name, c := range in.Cursors {
		if cluster, ok := strings.CutPrefix(name, replicatorCursor); ok {
			all[cluster] = c.MarkDelete
		}
	}
	return all
}

// Snapshot reads the subscriptions of one partition.
func (c *Client) Snapshot(ctx context.Context, topic string) (Snapshot, error) {
	in, err := c.Internal(ctx, topic)
	if err != nil {
		return Snapshot{}, err
	}
	return c.snapshot(ctx, topic, in)
}

func (c *Client) snapshot(ctx context.Context, topic string, in Internal) (Snapshot, error) {
	stats, err := c.Stats(ctx, topic)
	if err != nil {
		return Snapshot{}, err
	}
	return newSnapshot(topic, c.cfg.Cluster, in, stats), nil
}

func newSnapshot(topic, cluster string, in Internal, stats Stats) Snapshot {
	s := Snapshot{Topic: topic, Cluster: cluster, Log: in.Log, Sent: in.sent()}
	for _, name := range slices.Sorted(maps.Keys(stats.Subscriptions)) {
		sub, cursor := stats.Subscriptions[name], in.Cursors[name]
		_, known := in.Cursors[name]
		switch {
		case Reserved(name):
		case !sub.Durable:
			s.Readers = append(s.Readers, name)
		case known:
			s.Subs = append(s.Subs, Sub{
				Name: name, Type: sub.Type, Replicated: sub.Replicated, Properties: sub.Properties, Cursor: cursor,
				Backlog: sub.Backlog, Delayed: sub.Delayed, Consumers: sub.Consumers,
			})
		}
	}
	return s
}

// Plan is how one subscription of one partition will be carried. It is made of facts only, so that applying it twice does no harm.
type Plan struct {
	Topic        string
	Subscription string
	Type         string // the one to acknowledge with; Shared when nobody knows
	Replicated   bool
	Properties   map[string]string
	// First is the first position to be delivered on the new cluster.
	First Position
	// Holes are behind First: acknowledged on the old cluster one by one, or second copies of what will be delivered already.
	Holes []Range
	How   How
	// By is how copies are recognised, which How leaves open at the end of the log.
	By How
	// Backlog is what the new cluster will count for the subscription, in entries, markers included, with nothing written meanwhile.
	Backlog int64
	// Unacked is how many messages were delivered by the old cluster and not acknowledged, as far as can be told: they may come again, as they would have
	// there. Brokers count them for shared subscriptions only; for the others they are counted from the cursor to what was read for it.
	Unacked int64
	// Repeated is how many entries that were acknowledged one by one will come again, because they lie too far behind First to be carried or, with ByTime, may be
	// among those that were not recognised.
	Repeated int64
	// Missing is how many entries that are not acknowledged have no copy before the first one that has.
	Missing int64
	// Unsettled tells that messages from other clusters may be skipped: the search for those that are not acknowledged has ended before all were found, or known to be none.
	Unsettled bool
	Note      string
}

// Bounds of a plan.
const (
	// guard is how many entries before the position found are looked at for such as are not acknowledged, and how many behind the last acknowledged
	// one for such as are: the two clusters may have messages of different origin in a different order.
	guard = 512
	// maxWindow is how many entries behind the first one to be delivered are looked at for such as are acknowledged. What lies further comes again.
	maxWindow = 50_000
)

// Plan makes out how a subscription is carried from one cluster to the other. Load comes first; s must be as new.
func (p *Pair) Plan(ctx context.Context, s Sub) (Plan, error) {
	plan := Plan{Topic: p.Topic, Subscription: s.Name, Type: s.Type, Replicated: s.Replicated, Properties: s.Properties}
	if plan.Type == "" || plan.Type == "None" {
		plan.Type = "Shared"
	}
	fail := func(err error) (Plan, error) {
		return Plan{}, fmt.Errorf("subscription %s: %w", s.Name, err)
	}
	found, err := p.firstUnacked(ctx, &s.Cursor)
	if err != nil {
		return fail(err)
	}
	plan.First, plan.How = found.Position, found.How
	plan.By = found.By
	if plan.Unacked, err = p.inHand(ctx, &s, found.Entry); err != nil {
		return fail(err)
	}
	if err := p.guard(ctx, &s.Cursor, found.Entry, &plan); err != nil {
		return fail(err)
	}
	if found.Entry.Position != NoPosition && !plan.How.Exact() {
		if plan.Missing, err = p.missing(ctx, &s.Cursor, &plan, found.Entry); err != nil {
			return fail(err)
		}
	}
	switch {
	case plan.Missing > 0:
		plan.Note = fmt.Sprintf("cluster %s has no copy of the first message that is not acknowledged (%v on cluster %s); delivery would begin at %v", p.to.Cluster(), found.Entry.Position, p.from.Cluster(), plan.First)
	case plan.Note != "":
	case !plan.How.Exact():
		plan.Note = "found by the time of publishing: messages that were acknowledged may come again"
	case plan.By.Bare():
		plan.Note = fmt.Sprintf("the copies do not say where they lay on cluster %s (its brokers are older than 4.0.4): they were found by producer, sequence id and time of publishing, and what clients acknowledge while the topic moves comes again",
			p.from.Cluster())
	}
	if err := p.holes(ctx, &s.Cursor, &plan); err != nil {
		return fail(err)
	}
	plan.Backlog = p.backlog(&plan)
	return plan, nil
}

// given is what a subscription had been given at some moment.
type given struct {
	read    Position // everything before it
	unacked int64    // as brokers count it
}

// NoteGiven remembers how much of each subscription was delivered, for plans that are made after an eviction: the cluster forgets it then. The first time counts.
func (p *Pair) NoteGiven(ctx context.Context) error {
	s, err := p.Snapshot(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.given != nil {
		return nil
	}
	p.given = map[string]given{}
	for _, sub := range s.Subs {
		p.given[sub.Name] = givenOf(&sub)
	}
	return nil
}

// givenOf is what the consumers of a subscription have been given; nothing when there are none.
func givenOf(s *Sub) (g given) {
	if g.read = NoPosition; len(s.Consumers) > 0 {
		g.read = s.Cursor.Read
	}
	for _, c := range s.Consumers {
		g.unacked += c.Unacked
	}
	return g
}

// inHand is how many messages the consumers of a subscription have been given and did not acknowledge; first is the first one that is not acknowledged.
func (p *Pair) inHand(ctx context.Context, s *Sub, first Entry) (n int64, err error) {
	now := givenOf(s)
	p.mu.Lock()
	before, noted := p.given[s.Name]
	p.mu.Unlock()
	if n = now.unacked; noted && s.Backlog > 0 {
		if now.read.Before(before.read) {
			now.read = before.read
		}
		n = max(n, before.unacked)
	}
	if n > 0 || first.Position == NoPosition || !first.Position.Before(now.read) || s.Type == "Shared" || s.Type == "Key_Shared" {
		return n, nil
	}
	log := &p.from.in.Log
	i, end := log.Index(first.Position), log.Index(now.read)
	begin := max(i, end-maxInHand)
	n = log.without(i, begin, s.Cursor.Acked)
	if err = p.from.readAhead(ctx, begin, end-begin); err != nil {
		return 0, err
	}
	err = p.from.forward(ctx, begin, func(e Entry) (bool, error) {
		if !e.Position.Before(now.read) {
			return true, nil
		}
		if e.deliverable() && !s.Cursor.acked(e.Position) {
			n += int64(e.Messages)
		}
		return false, nil
	})
	return n, err
}

// maxInHand is how many entries are looked at for how many messages they have, up to the last one that was given: more than any client keeps. Of those before them each counts as one.
const maxInHand = 4_096

// firstUnacked finds the copy of the first message that is not acknowledged. One that was stored on the new cluster before its log was read, and is not in it, never comes again: it was removed there,
// or the replicator passed it over.
func (p *Pair) firstUnacked(ctx context.Context, c *Cursor) (Found, error) {
	f, err := p.copyOfUnacked(ctx, c)
	var behind *ErrBehind
	if !errors.As(err, &behind) || p.sentUpTo().Before(behind.Position) {
		return f, err
	}
	at := p.to.in.End()
	if c.acked(behind.Position) { // it is the last one
		return Found{Position: at, How: AtEnd, By: AtEnd, Entry: Entry{Position: NoPosition, Source: NoPosition}, Next: at}, nil
	}
	e, readErr := p.from.at(ctx, behind.Position)
	if readErr != nil || e.From != "" { // what comes from elsewhere, others send
		return Found{}, cmp.Or(readErr, err)
	}
	return Found{Position: at, How: NotThere, By: NotThere, Entry: e, Next: at}, nil
}

// sentUpTo is where the old cluster's replicator stood when Snapshot looked.
func (p *Pair) sentUpTo() Position {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sent
}

// copyOfUnacked is firstUnacked as far as the logs tell.
func (p *Pair) copyOfUnacked(ctx context.Context, c *Cursor) (Found, error) {
	log := &p.from.in.Log
	after := c.MarkDelete
	for _, r := range append(slices.Clone(c.Acked), Range{After: Position{math.MaxInt64, 0}}) {
		// What lies between after and the range is not acknowledged; it may be nothing but markers.
		i := log.Index(Position{after.Ledger, after.Entry + 1})
		e, ok, err := p.from.firstData(ctx, i)
		if err != nil {
			return Found{}, err
		}
		if !ok {
			return p.end(ctx)
		}
		if !c.acked(e.Position) {
			return p.copyOf(ctx, e)
		}
		after = r.Last
	}
	return p.end(ctx) // not reached: behind the last range something is not acknowledged, or there is nothing
}

// missing counts the entries that are not acknowledged, from the first such one up to the next of its origin whose copy lies at or behind the plan's first position.
func (p *Pair) missing(ctx context.Context, c *Cursor, plan *Plan, first Entry) (int64, error) {
	origin, next := first.from(p.from.Cluster()), NoPosition
	begin := p.to.in.Index(plan.First)
	err := p.to.forward(ctx, begin, func(e Entry) (bool, error) {
		if e.from(p.to.Cluster()) == origin && e.deliverable() {
			if _, at, err := p.acked(ctx, c, &e); err != nil {
				return true, err
			} else if !at.Before(first.Position) {
				next = at
			}
		}
		return next != NoPosition || p.to.in.Index(e.Position)-begin >= maxWindow, nil
	})
	log, sent := &p.from.in.Log, p.sentUpTo()
	end := log.Len()
	switch {
	case err != nil:
		return 0, err
	case next != NoPosition:
		end = log.Index(next)
	case first.From == "" && !sent.Before(first.Position): // what was not sent yet will come
		end = log.Index(Position{sent.Ledger, sent.Entry + 1})
	case plan.How == ByTime: // it may itself be on its way
		return 0, p.behind(&first)
	}
	return log.without(log.Index(first.Position), end, c.Acked), nil
}

// original is where the original, or another copy, of an entry of the new cluster lies on the old one, as far as that is known without
// asking.
func (p *Pair) original(e *Entry) (Position, bool) {
	if e.From == p.from.Cluster() && e.Source != NoPosition {
		return e.Source, true
	}
	return p.from.lookup(e, p.to.Cluster())
}

// acked tells whether an entry of the new cluster is acknowledged on the old one; at is where it lies there. It is NoPosition when
// the old cluster does not have it: then it was acknowledged and removed if it had been sent there, and else never delivered.
func (p *Pair) acked(ctx context.Context, c *Cursor, e *Entry) (acked bool, at Position, err error) {
	if at, ok := p.original(e); ok {
		return c.acked(at), at, nil
	}
	// removed tells, of an entry that the old cluster does not have, whether it had it; followed: it has a later one of the same origin.
	removed := func(followed bool) (bool, Position, error) {
		if e.From == "" {
			r, ok := p.to.in.Cursors[replicatorCursor+p.from.Cluster()]
			return ok && !r.MarkDelete.Before(e.Position), NoPosition, nil
		}
		first, ok := p.from.in.First()
		if followed || !ok {
			return followed, NoPosition, nil
		}
		oldest, err := p.from.at(ctx, first)
		return err == nil && e.Time+clockSkew < oldest.Time, NoPosition, err
	}
	if p.isAbsent(e) {
		return removed(false)
	}
	f, err := p.back.copyOf(ctx, *e)
	var behind *ErrBehind
	switch {
	case errors.As(err, &behind):
		p.setAbsent(e, Position{math.MaxInt64, 0})
		return removed(false)
	case err != nil:
		return false, NoPosition, err
	case !f.How.Exact():
		if later, err := p.from.at(ctx, f.Position); err == nil && later.From == p.to.Cluster() && later.Source != NoPosition {
			p.setAbsent(e, later.Source)
		}
		return removed(f.How == NotThere)
	}
	// Its neighbours will be asked for next.
	if _, err := p.from.block(ctx, f.Position); err != nil {
		return false, NoPosition, err
	}
	return c.acked(f.Position), f.Position, nil
}

// isAbsent tells whether it is known that the old cluster does not have an entry that was published on the new one.
func (p *Pair) isAbsent(e *Entry) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return e.From == "" && slices.ContainsFunc(p.absent, func(r Range) bool { return !e.Position.Before(r.After) && e.Position.Before(r.Last) })
}

// setAbsent remembers that nothing published on the new cluster from e on and before end has a copy on the old one.
func (p *Pair) setAbsent(e *Entry, end Position) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.From == "" {
		p.absent = append(p.absent, Range{e.Position, end})
	}
}

// guard moves the plan's first position back to the first message before it that is not acknowledged. Messages from one cluster have the same order
// everywhere, so that nothing of an origin is left before the last one of it that is at or before the mark-delete position: with that one, the
// origin is settled. It goes back at least as far as the constant says, and until every origin that it met is settled.
func (p *Pair) guard(ctx context.Context, c *Cursor, first Entry, plan *Plan) error {
	open, err := p.elsewhere(ctx, first.Position) // origins met: not settled yet?
	if err != nil {
		return err
	}
	unsettled := func() (n int) {
		for _, yes := range open {
			if yes {
				n++
			}
		}
		return n
	}
	begin := p.to.in.Index(plan.First)
	for end := begin; end > 0 && (begin-end < guard || unsettled() > 0); {
		if begin-end >= maxWindow {
			plan.Unsettled = true
			plan.Note = fmt.Sprintf("the clusters have messages of different origin in orders that differ by more than %d entries: look at subscription %s after the switch", maxWindow, plan.Subscription)
			return nil
		}
		from := max(0, end-blockSize)
		var chunk []Entry
		if err := p.to.forward(ctx, from, func(e Entry) (bool, error) {
			if p.to.in.Index(e.Position) >= end {
				return true, nil
			}
			chunk = append(chunk, e)
			return false, nil
		}); err != nil {
			return err
		}
		for _, e := range slices.Backward(chunk) {
			origin := e.from(p.to.Cluster())
			if settled, met := open[origin]; !e.deliverable() || met && !settled {
				continue
			}
			acked, at, err := p.acked(ctx, c, &e)
			switch {
			case err != nil:
				return err
			case !acked:
				plan.First = e.Position
				open[origin] = true
			case at == NoPosition || !c.MarkDelete.Before(at):
				open[origin] = false
			}
		}
		end = from
	}
	return nil
}

// elsewhere names the origins of messages from elsewhere that the old cluster has at or behind a position: near it, and in samples up to the end.
func (p *Pair) elsewhere(ctx context.Context, pos Position) (map[string]bool, error) {
	met := map[string]bool{}
	if pos == NoPosition {
		return met, nil
	}
	first, last := p.from.in.Index(pos), p.from.in.Len()-1
	for sample := range int64(samples) {
		if first > last {
			break
		}
		entries, err := p.from.block(ctx, p.from.in.At(first+(last-first)*sample/(samples-1)))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.From != "" && e.deliverable() {
				met[e.From] = true
			}
		}
	}
	return met, nil
}

// samples is how many blocks of the old cluster's log are looked at for messages from elsewhere.
const samples = 5

// holes lists what lies behind the plan's first position and is acknowledged, or is there twice.
func (p *Pair) holes(ctx context.Context, c *Cursor, plan *Plan) error {
	last := c.lastAcked()
	begin := p.to.in.Index(plan.First)
	end := int64(math.MaxInt64)
	// The new cluster has about as many entries there.
	if err := p.to.readAhead(ctx, begin, min(p.from.in.Index(last)-p.from.in.Index(c.MarkDelete), maxWindow)); err != nil {
		return err
	}
	seen := map[Position]bool{}
	var hole *Range // the one that grows
	return p.to.forward(ctx, begin, func(e Entry) (bool, error) {
		i := p.to.in.Index(e.Position)
		if i >= end {
			return true, nil
		}
		if i-begin >= maxWindow {
			for _, r := range c.Acked {
				plan.Repeated += p.from.in.Index(r.Last) - p.from.in.Index(r.After)
			}
			for _, r := range plan.Holes {
				plan.Repeated -= p.to.in.Index(r.Last) - p.to.in.Index(r.After)
			}
			plan.Note = fmt.Sprintf("messages that were acknowledged more than %d entries behind the first unacknowledged one come again", maxWindow)
			return true, nil
		}
		if !e.deliverable() {
			return false, nil // a hole grows over markers when it goes on behind them
		}
		acked, at, err := p.acked(ctx, c, &e)
		if err != nil {
			return false, err
		}
		if last.Before(at) && e.From == p.from.Cluster() { // copies from there keep their order; what comes from elsewhere may be late
			end = min(end, i+guard)
		}
		if at == NoPosition && plan.How == ByTime && e.From == p.from.Cluster() {
			plan.Repeated++ // its original was not found, so that it may be acknowledged
		}
		acked = at != NoPosition && (acked || seen[at])
		seen[at] = true
		switch {
		case !acked:
			hole = nil
		case hole == nil:
			plan.Holes = append(plan.Holes, Range{Position{e.Position.Ledger, e.Position.Entry - 1}, e.Position})
			hole = &plan.Holes[len(plan.Holes)-1]
		default:
			hole.Last = e.Position
		}
		return false, nil
	})
}

// Snapshot is that of the old cluster as it is now. Load comes after it, so that what was sent by then is in the new cluster's log, or gone.
func (p *Pair) Snapshot(ctx context.Context) (Snapshot, error) {
	from, ok := p.from.side.(target)
	if !ok {
		panic("pulsaradmin: a pair whose first cluster has no subscriptions")
	}
	s, err := from.Subscriptions(ctx)
	if err != nil {
		return s, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent = NoPosition
	if at, ok := s.Sent[p.to.Cluster()]; ok {
		p.sent = at
	}
	return s, nil
}

// Plans makes the plans of all durable subscriptions. It reads the logs and the subscriptions as they are now.
func (p *Pair) Plans(ctx context.Context) ([]Plan, error) {
	s, err := p.Snapshot(ctx) // first: what is acknowledged then was in the log then
	if err != nil {
		return nil, err
	}
	if err := p.Load(ctx); err != nil {
		return nil, err
	}
	plans := make([]Plan, len(s.Subs))
	err = each(len(plans), Parallel, func(i int) (err error) {
		plans[i], err = p.Plan(ctx, s.Subs[i])
		return err
	})
	return plans, err
}

// Carry does it all for one partition: it makes the plans, applies them and reads back. It may be called as often as one likes; the call that counts is
// the one within the fence, and earlier ones make it short.
func (p *Pair) Carry(ctx context.Context) ([]Plan, []Difference, error) {
	plans, err := p.Plans(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := p.Apply(ctx, plans); err != nil {
		return plans, nil, err
	}
	differences, err := p.ReadBack(ctx, plans)
	return plans, differences, err
}

// Carried is what was done for one partition.
type Carried struct {
	Topic       string
	Plans       []Plan
	Differences []Difference
}

// partitionsAtOnce is how many partitions are carried at the same time; each has calls of its own under way, and all share the clients' bounds.
const partitionsAtOnce = 8

// CarryAll is Carry for all partitions of a topic. What was done is returned with an error, too.
func CarryAll(ctx context.Context, pairs []*Pair) ([]Carried, error) {
	all := make([]Carried, len(pairs))
	err := each(len(pairs), partitionsAtOnce, func(i int) (err error) {
		all[i].Topic = pairs[i].Topic
		all[i].Plans, all[i].Differences, err = pairs[i].Carry(ctx)
		return err
	})
	return all, err
}

// NewPairs makes the pairs of all partitions of a topic (base name; 0: it is not partitioned).
func NewPairs(base string, partitions int, from, to *Client) []*Pair {
	var all []*Pair
	for _, topic := range PartitionNames(base, partitions) {
		all = append(all, NewPair(topic, from, to))
	}
	return all
}
