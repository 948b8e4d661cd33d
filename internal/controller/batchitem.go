package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file is the work on single topics of a batch. It runs beside the batch's own goroutine, many at once, and reports to that.

// check is the first preflight of a topic.
func (d *batchDriver) check(ctx context.Context, j job) {
	e := switching.ItemEnd{}
	if !d.isGiven() {
		var ok bool
		if _, e, ok = d.preflight(ctx, j); !ok {
			return
		}
	}
	d.report(func(time.Time) { d.run.Checked(j.item, e) })
}

// move sees to the switch of a topic until it is over: it goes on with one that a leader before has asked for, and otherwise asks for it.
func (d *batchDriver) move(ctx context.Context, j job) {
	for ctx.Err() == nil {
		e, err := d.moveOnce(ctx, j)
		if err == nil {
			d.report(func(now time.Time) { d.run.Ended(now, j.item, e) })
			return
		}
		if ctx.Err() == nil {
			d.log.Warn("a topic of a batch waits for the store", "topic", j.topic, "err", err)
			d.sleep(ctx, switching.RetryInterval)
		}
	}
}

func (d *batchDriver) moveOnce(ctx context.Context, j job) (e switching.ItemEnd, err error) {
	id := j.b.SwitchID(j.item)
	rec, err := d.c.cfg.Store.Switch(ctx, id)
	known := err == nil
	switch {
	case errors.Is(err, store.ErrNotFound):
	case err != nil:
		return e, err
	case !rec.State.Over(), rec.Attempt >= j.attempt, rec.State != switching.StateAborted && rec.State != switching.StateReturned:
		inherited := !rec.State.Over()
		e, err := d.follow(ctx, j, rec)
		e.Inherited = inherited
		return e, err
	}
	if d.isGiven() {
		return e, nil // it has not begun, and does not
	}
	from, e, ok := d.preflight(ctx, j)
	if !ok {
		return e, ctx.Err()
	}
	if e.State != switching.ItemChecked {
		return e, nil
	}
	now := time.Now()
	next := switching.Record{
		ID: id, Rev: 1, Attempt: j.attempt, Batch: j.b.ID, Topic: j.topic, From: from.Cluster, To: j.b.To, Mode: j.b.Mode, State: switching.StateRequested,
		Epoch: route.NextEpoch(from.Epoch), Who: j.b.Who, Why: j.b.Why, Started: now,
	}
	if known {
		if rec.From != from.Cluster {
			return switching.ItemEnd{State: switching.ItemFailed, Note: fmt.Sprintf("is on %s by now, not on %s where its switch began", from.Cluster, rec.From)}, nil
		}
		next = rec.Again(now)
		next.Epoch, next.Attempt = route.NextEpoch(from.Epoch), max(next.Attempt, j.attempt)
	}
	if err := d.c.cfg.Store.PutSwitch(ctx, next); err != nil {
		return e, err // whoever was faster: the next look finds what is there
	}
	return d.follow(ctx, j, next)
}

// follow waits until a switch is over, and has it aborted when the batch is given up.
func (d *batchDriver) follow(ctx context.Context, j job, rec switching.Record) (e switching.ItemEnd, err error) {
	for !over(rec) {
		done := d.await(rec.ID)
		if !paused(rec) {
			d.l.begin(ctx, rec)
		}
		given := d.given
		if rec.Wish == switching.WishAbort {
			given = nil
		}
		select {
		case <-done:
		case <-given:
			rec.Rev++
			rec.Wish, rec.WishBy = switching.WishAbort, "batch "+j.b.ID
			if err := d.c.cfg.Store.PutSwitch(ctx, rec); err != nil && !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
				return e, err
			}
			d.l.look(rec.ID)
		case <-time.After(reread):
		case <-ctx.Done():
			return e, ctx.Err()
		}
		if rec, err = d.c.cfg.Store.Switch(ctx, rec.ID); err != nil {
			return e, err
		}
	}
	e = switching.ItemEnd{State: switching.ItemMoved, Note: rec.Note, Troubled: rec.State == switching.StateIncomplete}
	if rec.Receipt != nil {
		e.HoldMillis = rec.Receipt.HoldMillis
	}
	switch rec.State {
	case switching.StateAborted:
		e.State, e.Attempt = switching.ItemFailed, rec.Attempt
	case switching.StateReturned:
		e = switching.TakenBack(rec)
	}
	return e, nil
}

// over tells whether a batch has nothing to wait for any more: a topic that drains may do so for days.
func over(rec switching.Record) bool {
	return rec.State.Over() || rec.State == switching.StateDraining
}

// await is closed when the switch is over, or its driver has gone.
func (d *batchDriver) await(id string) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	done := d.waiting[id]
	if done == nil {
		done = make(chan struct{})
		d.waiting[id] = done
	}
	return done
}

// preflight tells whether a topic may move now, and from where. What the store does not say is asked again; ok is false when ctx has ended.
func (d *batchDriver) preflight(ctx context.Context, j job) (from route.Decision, e switching.ItemEnd, ok bool) {
	for ctx.Err() == nil {
		from, e, err := d.judge(ctx, j)
		if err == nil {
			return from, e, true
		}
		if ctx.Err() == nil {
			d.log.Warn("a preflight could not be made; it is tried again", "topic", j.topic, "err", err)
			d.sleep(ctx, time.Second)
		}
	}
	return from, e, false
}

func (d *batchDriver) judge(ctx context.Context, j job) (from route.Decision, e switching.ItemEnd, err error) {
	ctx = store.AsOf(ctx, store.Boottime())
	if from, err = d.c.decide(ctx, j.topic); err != nil {
		return from, e, err
	}
	switch {
	case from.State != route.StateActive:
		return from, switching.ItemEnd{State: switching.ItemBlocked, Note: fmt.Sprintf("switch %s is moving it: wait for its end, or `pointsman switch abort %s`", from.SwitchID, from.SwitchID)}, nil
	case from.Cluster == j.b.To:
		return from, switching.ItemEnd{State: switching.ItemSkipped, Note: "is on " + j.b.To + " already"}, nil
	case from.Cluster == "":
		return from, switching.ItemEnd{State: switching.ItemSkipped, Note: "is mapped nowhere"}, nil
	}
	facts, err := d.handleFacts(ctx, j)
	if err != nil {
		return from, e, err
	}
	pre, err := d.c.ground().Check(ctx, switching.CheckRequest{
		Topic: j.topic, From: from.Cluster, To: j.b.To, Mode: j.b.Mode, Reversible: j.b.Limits.Reversible, With: j.with, Handles: facts, Batch: true,
	})
	if err != nil {
		return from, e, err
	}
	e = switching.ItemEnd{State: switching.ItemChecked, Forecast: pre.Forecast}
	if why := pre.Refusal(j.b.Limits.Force); why != "" {
		e = switching.ItemEnd{State: switching.ItemBlocked, Note: why, Away: pre.Passes(j.b.Limits.Force)}
	}
	return from, e, nil
}

// handleFacts are what the proxies say of a topic's clients: they are asked for many topics at once.
func (d *batchDriver) handleFacts(ctx context.Context, j job) (switching.HandleFacts, error) {
	if d.c.cfg.Fleet == nil {
		return switching.HandleFacts{}, nil
	}
	d.asking.Lock()
	defer d.asking.Unlock()
	if facts, ok := d.facts[j.topic]; ok && time.Since(d.factsAt) < factsKept {
		return facts, nil
	}
	at := time.Now()
	all, err := d.c.cfg.Fleet.HandleFacts(ctx, j.coming)
	if err != nil {
		return switching.HandleFacts{}, err
	}
	d.facts, d.factsAt = all, at
	return all[j.topic], nil
}

// measure looks at the replication of the topics that come next. Topics that cannot be asked count as having nothing: their preflights tell of it.
func (d *batchDriver) measure(ctx context.Context, b switching.Batch, topics []string) {
	limited, cancel := context.WithTimeout(ctx, measureTimeout)
	defer cancel()
	worst, which := int64(0), ""
	for _, topic := range topics {
		from, err := d.c.decide(limited, topic)
		if err != nil || from.Cluster == "" || from.Cluster == b.To {
			continue
		}
		if n, err := d.c.ground().Backlog(limited, topic, from.Cluster, b.To); err == nil && n > worst {
			worst, which = n, topic
		}
	}
	if ctx.Err() == nil {
		d.report(func(now time.Time) { d.run.Measured(now, worst, which) })
	}
}

// settle looks in the map which of the topics that have moved drain, or are not on the new cluster any more: somebody has taken them back, or moved them on.
func (d *batchDriver) settle(ctx context.Context, b switching.Batch, moved map[int]string) {
	draining, gone := 0, map[int]switching.ItemEnd{}
	table, err := d.c.mapNow(ctx)
	for i, topic := range moved {
		if err != nil {
			break
		}
		t, parseErr := route.ParseTopic(topic)
		if parseErr != nil {
			continue
		}
		switch now := table.Decide(t, d.c.cfg.DefaultCluster); {
		case now.State != route.StateActive && now.SwitchID == b.SwitchID(i):
			draining++
		case now.Cluster != b.To:
			e := switching.ItemEnd{State: switching.ItemFailed, Note: fmt.Sprintf("is on %s by now: it has left cluster %s since it moved there", now.Cluster, b.To)}
			var rec switching.Record
			if rec, err = d.c.cfg.Store.Switch(ctx, b.SwitchID(i)); err == nil && rec.State == switching.StateReturned {
				e = switching.TakenBack(rec)
			} else if errors.Is(err, store.ErrNotFound) {
				err = nil
			}
			gone[i] = e
		}
	}
	if ctx.Err() == nil {
		if err != nil {
			d.log.Warn("which topics of a batch drain cannot be read; it is tried again", "err", err)
		}
		d.report(func(now time.Time) { d.run.Settled(now, draining, gone, errText(err)) })
	}
}

// rule looks for topics of the namespace that are still elsewhere, and writes its rule when there are none.
func (d *batchDriver) rule(ctx context.Context, b switching.Batch, names []string) {
	fail := func(format string, args ...any) {
		if ctx.Err() == nil {
			d.report(func(now time.Time) { d.run.Unruled(now, fmt.Sprintf(format, args...)) })
		}
	}
	left, err := d.c.left(ctx, b.Namespace, b.To)
	if err != nil {
		fail("the topics of %s cannot be listed: %v", b.Namespace, err)
		return
	}
	var fresh []string
	for _, name := range left {
		if _, ours := slices.BinarySearch(names, name); ours {
			fail("%s has left cluster %s since it moved there: look at `pointsman history`", name, b.To)
			return
		}
		fresh = append(fresh, name)
	}
	if len(fresh) > 0 {
		items := switching.OrderBatch(fresh, nil)
		d.report(func(now time.Time) { d.run.Found(now, items) })
		return
	}
	if d.c.cfg.Fleet == nil {
		fail("this proxy writes no rules")
		return
	}
	before, err := d.c.on(ctx, b.From, b.Namespace)
	if err != nil {
		fail("the topics of %s cannot be listed: %v", b.Namespace, err)
		return
	}
	epoch, removed, floors, err := d.c.cfg.Fleet.RuleNamespace(ctx, b)
	if err != nil {
		fail("the rule of %s: %v", b.Namespace, err)
		return
	}
	// Whoever made a topic between the look and the rule did so on the old cluster.
	var notes []string
	after, err := d.c.on(ctx, b.From, b.Namespace)
	late := slices.DeleteFunc(slices.Sorted(maps.Keys(after)), func(name string) bool { return before[name] })
	switch {
	case err != nil:
		notes = append(notes, fmt.Sprintf("whether topics appeared on the old cluster while the rule was written could not be seen: %v", err))
	case len(late) > 0:
		notes = append(notes, "appeared on the old cluster while the rule was written, which may hold messages of theirs: "+switching.Few(late, 5))
	}
	if floors > 0 {
		notes = append(notes, fmt.Sprintf("%d topics have moved more often than the rule, so the map keeps their epochs (`pointsman routes ls %s --floors`)", floors, b.Namespace))
	}
	d.report(func(now time.Time) { d.run.Ruled(now, epoch, removed, strings.Join(notes, "; ")) })
}
