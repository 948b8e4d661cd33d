package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file is what a failover makes of a topic that drains, whichever of its two clusters is dead (docs/adr/008-failover.md).

// stays tells that the topic drains from the cluster that is left: only subscriptions read it there, and when they do not any more it is where its producers are.
func (it *failing) stays(from string) bool {
	return it.moving != nil && route.DrainFrom(it.moving.Drain) == from
}

// ends is what becomes of the switch that the topic is in the middle of.
func (it *failing) ends(o *switching.Failover) string {
	e := it.moving
	text := fmt.Sprintf("switch %s of %s, which is %s", e.SwitchID, e.Topic, stateName(e.State))
	if e.Drain == "" {
		return text
	}
	text += ": " + drainLeaves(e, o)
	if old := route.DrainFrom(e.Drain); old != o.From && old != o.To {
		text += fmt.Sprintf("; `--to %s` would have them go on there", old)
	}
	return text
}

// drainLeaves is what is where when a failover has ended the drain of an entry.
func drainLeaves(e *route.Entry, o *switching.Failover) string {
	old := route.DrainFrom(e.Drain)
	d, _ := route.ParseDrain(e.Drain) // it was checked when it was stored
	subs := fmt.Sprintf("%d subscriptions", len(d.Subs))
	if len(d.Subs) == 1 {
		subs = "subscription " + d.Subs[0].Name
	}
	left := fmt.Sprintf("what %s had not read on cluster %s stays there", subs, old)
	switch {
	case old == o.To:
		return fmt.Sprintf("cluster %s goes on serving %s, and has the producers again", old, subs)
	case old == o.From && e.Cluster != o.To:
		return fmt.Sprintf("the topic stays on cluster %s, where its producers are; %s", e.Cluster, left)
	}
	return left
}

// drainFacts is what is known of a topic that stays: drains are not replicated, so that the new cluster has nothing of before.
func drainFacts() switching.FailoverFacts {
	return switching.FailoverFacts{Topics: 1, Unreplicated: 1}
}

// leaveThere ends the drain of a topic that stays where its producers are. The order gets a record of its own for it, as of what it moves, by which everybody finds what it has done;
// it has no time of a flip. It comes first: afterwards nobody could tell who has ended the drain.
func (r *failoverRun) leaveThere(ctx context.Context, drains *route.Entry) (*switching.Record, error) {
	o, facts, now := &r.order, drainFacts(), time.Now()
	rec := switching.Record{
		ID: failoverRecordID(o.ID, drains.Topic), Rev: 1, Batch: o.ID, Topic: drains.Topic, From: o.From, To: drains.Cluster, Mode: switching.ModeFailover, State: switching.StateDone,
		Epoch: drains.Epoch, Runner: r.s.proxy.Info().ID, Who: o.Who, Why: whyFailover(o), Started: now, Ended: now, Failover: &facts,
		Note: fmt.Sprintf("its drain, switch %s, was ended: %s", drains.SwitchID, drainLeaves(drains, o)),
	}
	err := r.s.store.PutSwitch(ctx, rec)
	if errors.Is(err, store.ErrUnknown) {
		_, err = r.s.settle(ctx, &rec, err)
	}
	counted := errors.Is(err, store.ErrConflict) // by resume: a leader before this one has ended in between
	if err != nil && !counted {
		return nil, err
	}
	if err := r.endDrain(ctx, drains); err != nil {
		return nil, err
	}
	if counted {
		return nil, errAlreadyThere
	}
	return &rec, nil
}

// endDrain has a topic that drains be on the cluster of its producers alone, because one of its two clusters is dead: then nobody reads the other one, or nobody writes there.
// Where the cluster of its producers is the dead one, it moves on from there.
func (r *failoverRun) endDrain(ctx context.Context, drains *route.Entry) error {
	s, o := r.s, &r.order
	var lost *switching.Record // written, it may be: no answer came
	for range wishAttempts {
		e, ok, err := s.store.Entry(ctx, drains.Topic)
		if err != nil {
			return err
		}
		rec, err := s.store.Switch(ctx, drains.SwitchID)
		if err != nil {
			return err
		}
		if !ok || e.State != route.StateDraining || e.SwitchID != drains.SwitchID {
			if lost == nil || rec.Rev != lost.Rev || rec.Note != lost.Note {
				return errAlreadyThere
			}
			r.ended(lost)
			return nil
		}
		after := e
		after.State, after.Drain = route.StateActive, ""
		rec.Rev++
		rec.State, rec.Return, rec.Ended = switching.StateIncomplete, false, time.Now()
		rec.Note = fmt.Sprintf("ended by failover %s: cluster %s is dead; %s", o.ID, o.From, drainLeaves(&e, o))
		if old := route.DrainFrom(e.Drain); old != o.To {
			rec.Note += fmt.Sprintf(" (`pointsman switch salvage %s` when cluster %s is back)", rec.ID, o.From)
		}
		if rec.From == o.From { // the proxies read of it that nobody waits for that cluster
			facts := drainFacts()
			rec.Failover = &facts
		}
		err = s.store.Apply(ctx, store.Change{Entries: []store.EntryChange{{Topic: e.Topic, Before: &e, After: &after}}, Switch: &rec, Who: o.Who, Why: whyFailover(o)})
		switch {
		case err == nil:
			r.ended(&rec)
			return nil
		case errors.Is(err, store.ErrUnknown):
			lost = &rec
		case !errors.Is(err, store.ErrConflict):
			return err
		}
	}
	return &Error{Code: CodeConflict, Message: fmt.Sprintf("the drain of %s changed %d times while it was to be ended", drains.Topic, wishAttempts), Remedy: "order the failover again"}
}

// ended tells of a drain that was ended.
func (r *failoverRun) ended(rec *switching.Record) {
	r.s.log.Warn("a drain was ended", "failover", r.order.ID, "switch", rec.ID, "topic", rec.Topic, "from", rec.From, "to", rec.To, "dead", r.order.From)
	r.note(fmt.Sprintf("switch %s of %s was %s", rec.ID, rec.Topic, rec.Note))
}
