package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// do performs one step. It never repeats a write by itself. by, when not zero, is until when the clusters may take. With watch a step on the clusters ends, as cut, when
// the switch is to be given up.
func (d *driver) do(ctx context.Context, step switching.Step, by time.Time, watch bool) (r switching.Report, cut bool) {
	ctx, cancel := context.WithTimeout(store.AsOf(ctx, store.Boottime()), stepTimeout)
	defer cancel()
	d.patient = false // unless the step says so
	switch step.Work {
	case switching.WorkRead:
		return d.read(ctx), false
	case switching.WorkWrite:
		return d.write(ctx, step), false
	case switching.WorkRecord:
		return d.record(ctx, step), false
	case switching.WorkSurvey:
		return d.survey(ctx), false
	}
	if !by.IsZero() {
		// A call that hangs must not keep the topic fenced.
		ctx, cancel = context.WithDeadline(ctx, by)
		defer cancel()
	}
	if watch {
		watched, end := d.unlessAborted(ctx)
		ctx = watched
		defer func() { cut = end() }()
	}
	if err := d.open(ctx); err != nil {
		r := notYet(err)
		if errors.Is(err, ErrHopeless) {
			r.Answer = switching.Never
		}
		return r, false
	}
	return d.onClusters(ctx, step), false
}

func notYet(err error) switching.Report {
	return switching.Report{Answer: switching.NotYet, Why: err.Error()}
}

// read takes the record and then the entry, both as of now.
func (d *driver) read(ctx context.Context) switching.Report {
	if err := d.readRecord(ctx); err != nil {
		return notYet(err)
	}
	e, ok, err := d.c.cfg.Store.Entry(ctx, d.base)
	if err != nil {
		return notYet(err)
	}
	if ok && !e.Floor() {
		return switching.Report{Entry: e, Record: recordState(d.rec)}
	}
	rules, err := d.c.cfg.Store.Rules(ctx)
	if err != nil {
		return notYet(err)
	}
	buckets := map[int][]route.Entry{}
	d.floor = nil
	if ok {
		d.floor = &e
		buckets[route.Bucket(d.base)] = []route.Entry{e}
	}
	table, _, err := route.Empty().With(buckets, &rules)
	if err != nil {
		return switching.Report{Answer: switching.Never, Why: "the stored rules cannot be used: " + err.Error()}
	}
	topic, err := route.ParseTopic(d.base)
	if err != nil {
		return switching.Report{Answer: switching.Never, Why: err.Error()}
	}
	decided := table.Decide(topic, d.c.cfg.DefaultCluster)
	return switching.Report{
		Entry:  route.Entry{Topic: d.base, Cluster: decided.Cluster, Epoch: decided.Epoch, SwitchID: decided.SwitchID},
		Absent: true, Record: recordState(d.rec),
	}
}

// readRecord reads the record. The receipt stays the one that this driver is making.
func (d *driver) readRecord(ctx context.Context) error {
	rec, err := d.c.cfg.Store.Switch(ctx, d.key.Switch)
	if err != nil {
		return err
	}
	if rec.Attempt == d.key.Attempt && d.rec.Receipt != nil && !rec.State.Over() {
		rec.Receipt = d.rec.Receipt
	} else {
		rec.Receipt = cloneReceipt(rec.Receipt)
	}
	d.take(rec)
	return nil
}

func recordState(r switching.Record) switching.RecordState {
	return switching.RecordState{Rev: r.Rev, Attempt: r.Attempt, State: r.State, Wish: r.Wish, WishBy: r.WishBy, Note: r.Note, Return: r.Return}
}

// next is the record that a step asks for.
func (d *driver) next(s switching.RecordState) switching.Record {
	rec := d.rec
	rec.Receipt = cloneReceipt(rec.Receipt)
	rec.Rev, rec.State, rec.Note, rec.Runner, rec.Return = s.Rev, s.State, s.Note, d.c.cfg.ID, s.Return
	if d.rec.Return && !s.Return {
		rec.Wish, rec.WishBy = "", "" // it was given up as was wanted, and nobody wants anything of the drain
	}
	now := time.Now()
	switch {
	case s.State == switching.StateFenced:
		rec.Fenced = now
	case s.State == switching.StateEvicting:
		rec.Flipped, rec.Deadline = now, now.Add(switching.EvictLimit)
	case s.State.Over():
		rec.Ended = now
	}
	return rec
}

// write replaces the entry and the record at once.
func (d *driver) write(ctx context.Context, step switching.Step) switching.Report {
	rec := d.next(step.Record)
	after := step.After
	change := store.Change{
		Switch: &rec, Who: cmp.Or(d.rec.WishBy, d.rec.Who), Why: fmt.Sprintf("switch %s: %s", d.key.Switch, step.Record.State), At: time.Now(),
		Entries: []store.EntryChange{{Topic: d.base, After: &after}},
	}
	if before := step.Before; before.Topic != "" {
		change.Entries[0].Before = &before
	} else {
		change.Entries[0].Before = d.floor
		rec.Ruled, rec.Floor = true, d.floor
		// The rules decided so far: the write must fail when one of them has changed.
		rules, err := d.guards(ctx, step.After)
		if err != nil {
			return written(err)
		}
		change.Rules = rules
	}
	began := time.Now()
	if step.Record.State == switching.StateEvicting {
		rec.Assigned, rec.Unassigned = d.assigned()
	}
	if step.Before.State == route.StateFenced && !d.rec.Fenced.IsZero() {
		d.receipt().HoldMillis = millis(began.Sub(d.rec.Fenced))
	}
	if step.Before.State == route.StateDraining {
		d.noteMoved(step, began)
	}
	if rec.State.Over() {
		d.addAcks(ctx, rec.State)
	}
	rec.Receipt = cloneReceipt(d.rec.Receipt)
	apply := d.c.cfg.Store.Apply
	if rec.State == switching.StateAborted && rec.Ruled {
		apply = d.applyRuled
	}
	r := written(apply(ctx, change))
	if r.Answer == switching.OK {
		rec.Receipt = d.rec.Receipt
		d.take(rec)
		d.log.Info("the map has the step of a switch", "state", rec.State, "cluster", after.Cluster, "epoch", after.Epoch, "note", rec.Note)
	}
	return r
}

// applyRuled ends an attempt on a topic that rules decided before it: with what was there then in place of the entry that the abort would leave, so that
// they decide again whoever dies next. If they have changed they could move the topic, and nobody has fenced it for that: then it stays where it is, by that
// entry. It must come back whatever the rules are.
func (d *driver) applyRuled(ctx context.Context, abort store.Change) error {
	ruled, entry := abort, abort.Entries[0]
	var err error
	if ruled.Rules, err = d.guards(ctx, *entry.After); err == nil {
		entry.After = d.rec.Floor
		ruled.Entries = []store.EntryChange{entry}
		err = d.c.cfg.Store.Apply(ctx, ruled)
	}
	if err == nil || errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		return err
	}
	pinned := d.c.cfg.Store.Apply(ctx, abort)
	if pinned == nil {
		d.log.Warn("an aborted switch leaves an entry of its topic in the map, which rules decided before (pointsman routes rm takes it away)", "err", err)
	}
	return pinned
}

// guards are the rules that decide the topic when it has no entry: those above it, absent ones too. They must send it where e does, or
// the error matches store.ErrConflict.
func (d *driver) guards(ctx context.Context, e route.Entry) ([]store.RuleChange, error) {
	rules, err := d.c.cfg.Store.Rules(ctx)
	if err != nil {
		return nil, err
	}
	topic, err := route.ParseTopic(d.base)
	if err != nil {
		return nil, err
	}
	table, _, err := route.Empty().With(nil, &rules)
	if err != nil {
		return nil, err
	}
	if byRule := table.Decide(topic, d.c.cfg.DefaultCluster); byRule.Cluster != e.Cluster || byRule.Epoch > e.Epoch {
		return nil, fmt.Errorf("the rules send the topic to cluster %s at epoch %d now: %w", byRule.Cluster, byRule.Epoch, store.ErrConflict)
	}
	var guards []store.RuleChange
	for _, scope := range []string{topic.Namespace(), topic.Tenant(), ""} {
		g := store.RuleChange{Scope: scope}
		if r, ok := table.Rule(scope); ok {
			g.Before, g.After = &r, &r
		}
		guards = append(guards, g)
	}
	return guards, nil
}

// record writes the record alone.
func (d *driver) record(ctx context.Context, step switching.Step) switching.Report {
	if step.Record.State == switching.StateReturned {
		d.passOver(ctx, &step.Record)
	}
	rec := d.next(step.Record)
	if rec.State.Over() {
		d.addAcks(ctx, rec.State)
		rec.Receipt = cloneReceipt(d.rec.Receipt)
	}
	r := written(d.c.cfg.Store.PutSwitch(ctx, rec))
	if r.Answer == switching.OK {
		rec.Receipt = d.rec.Receipt
		d.take(rec)
	}
	return r
}

// written is what became of a write.
func written(err error) switching.Report {
	switch {
	case err == nil:
		return switching.Report{}
	case errors.Is(err, store.ErrConflict):
		return switching.Report{Answer: switching.Conflict, Why: err.Error()}
	case errors.Is(err, store.ErrUnknown):
		return switching.Report{Answer: switching.Unknown, Why: err.Error()}
	case errors.Is(err, store.ErrTooLarge):
		return switching.Report{Answer: switching.Never, Why: err.Error()}
	}
	return notYet(err)
}

// survey reads the record, the roster and then the acks, as of now.
func (d *driver) survey(ctx context.Context) switching.Report {
	st := d.c.cfg.Store
	if err := d.readRecord(ctx); err != nil {
		return notYet(err)
	}
	r := switching.Report{Record: recordState(d.rec)}
	seen, err := d.c.roster.Get(ctx, stepTimeout, d.c.readRoster)
	if err != nil {
		return notYet(err)
	}
	now := time.Now()
	d.unseen.note(now, seen)
	r.Survey.Members, r.Survey.Tombstones = d.unseen.facts(now, seen.proxies), d.unseen.fresh(now, seen.stones)
	if r.Survey.Acks, err = st.Acks(ctx, d.key.Switch); err != nil {
		return notYet(err)
	}
	d.acks = r.Survey.Acks
	return r
}

// roster is who could act on any topic.
type roster struct {
	proxies []store.Proxy
	stones  []store.Tombstone
}

func (c *Controller) readRoster(ctx context.Context) (r roster, err error) {
	ctx = store.AsOf(ctx, store.Boottime()) // and not of who asked first: this is for others too
	if r.proxies, err = c.cfg.Store.Proxies(ctx); err == nil {
		r.stones, err = c.cfg.Store.Tombstones(ctx)
	}
	return r, err
}

// mine tells whether the map has the topic on the old cluster, in this state, by this attempt.
func (d *driver) mine(ctx context.Context, state route.State) error {
	e, _, err := d.c.cfg.Store.Entry(ctx, d.base)
	if err == nil && (e.State != state || e.Cluster != d.rec.From || switching.KeyOf(e) != d.key) {
		err = fmt.Errorf("the topic is %v on cluster %s by switch %s now", e.State, e.Cluster, e.SwitchID)
	}
	return err
}

// assigned is which brokers of the new cluster have the topic, as far as was found out in time.
func (d *driver) assigned() (map[string]string, int) {
	if d.brokers == nil {
		select {
		case a := <-d.assign: // of a successor: nil, and never ready
			d.brokers = &a
		default:
			return nil, 1
		}
	}
	return d.brokers.brokers, d.brokers.missing
}

// skips tells that subscriptions would pass over messages. A preflight refuses that, but it may be of days ago, or not have looked at all of them; and within the fence nobody acknowledges any more.
func (d *driver) skips(carried []switching.Carried) error {
	without := slices.DeleteFunc(slices.Clone(carried), func(c switching.Carried) bool { return c.Missing == 0 })
	if len(without) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s; have them consumed on cluster %s, and set a retention on cluster %s that keeps them", ErrHopeless, named(without, func(c switching.Carried) string {
		return fmt.Sprintf("subscription %q of %s: %d entries that are not acknowledged have no copy on cluster %s (%s)", c.Subscription, c.Topic, c.Missing, d.rec.To, c.Note)
	}), d.rec.From, d.rec.To)
}

// onClusters performs a step on the clusters.
func (d *driver) onClusters(ctx context.Context, step switching.Step) (r switching.Report) {
	var err error
	switch step.Work {
	case switching.WorkEvict:
		d.receipt().Evicted = true
		err = d.topic.Evict(ctx)
	case switching.WorkTail:
		switch r.Tail, err = d.topic.Tail(ctx); {
		case err != nil:
		case d.rec.Mode == switching.ModeDrain:
			r.Tails, err = tailsOf(r.Tail)
		default:
			d.receipt().Tail, d.receipt().First = tailMap(r.Tail), nil // whoever goes on after the flip compares with it
		}
	case switching.WorkReplicated:
		r.Why, err = d.topic.Replicated(ctx, step.Tail)
	case switching.WorkCarry:
		// A leader that was frozen comes late: on a cluster that clients use no cursor is touched any more (C8).
		if err := d.mine(ctx, route.StateFenced); err != nil {
			return notYet(err)
		}
		var carried []switching.Carried
		if carried, err = d.topic.Carry(ctx); err == nil {
			d.carried(carried)
			err = d.skips(carried)
		}
		if err == nil && d.rec.Mode == switching.ModeDrain {
			r.Subs = subscriptionsOf(carried)
			err = d.noteEnds(step.Tail)
		}
	case switching.WorkReadBack:
		if r.Why, err = d.topic.ReadBack(ctx); r.Why != "" {
			d.c.stats.differs[0].Add(1)
		}
	case switching.WorkTailAgain:
		r.Foreign, r.Publishers, err = d.topic.Since(ctx, step.Tail)
	case switching.WorkVerify:
		var found Verified
		tail := step.Tail
		if tail == "" { // another leader has drained it
			tail = tailText(d.receipt().Tail)
		}
		// It is for the receipt only: the switch is done.
		found, err = d.topic.Verify(ctx, tail)
		if found.Carried != nil {
			d.carried(found.Carried)
		}
		if found.Differences != "" {
			d.c.stats.differs[1].Add(1)
		}
		rc := d.receipt()
		if err != nil {
			rc.Verified = "not compared: " + err.Error()
			found.Wrong = "the tails of both clusters could not be compared: " + err.Error()
		} else {
			rc.Tail, rc.First, rc.Verified = found.Tail, found.First, found.Text
		}
		return switching.Report{Why: joined([]string{found.Wrong, found.Differences}, "; ")}
	case switching.WorkDrained, switching.WorkReturnable, switching.WorkCopy:
		r, err = d.onDrain(ctx, step)
	default:
		panic("controller: no such work: " + step.Work.String())
	}
	switch {
	case errors.Is(err, ErrHopeless):
		r.Answer, r.Why = switching.Never, err.Error()
	case err != nil:
		r.Answer, r.Why, r.Late = switching.NotYet, err.Error(), errors.Is(ctx.Err(), context.DeadlineExceeded)
	case r.Why != "":
		r.Answer = switching.NotYet
	}
	return r
}
