package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/controller"
)

// This file is what is particular to the surface of switches that drain (docs/adr/007-drain.md): they are asked for and looked at as planned ones are.

// stateDraining is that of a command whose producers have moved, and of which nothing but drains is left.
const stateDraining = string(switching.StateDraining)

// abortDrain is what an abort means for a switch that drains, or is taken back.
func abortDrain(rec *switching.Record) error {
	switch {
	case rec.Return && rec.State != switching.StateEvicting: // the way back is given up, and the topic drains on
		rec.Wish = switching.WishAbort
		return nil
	case rec.Return:
		return tooLate(*rec, "the map names the old cluster again, which is never undone; plan a new switch when it has ended")
	case rec.State == switching.StateDraining:
		return tooLate(*rec, "its producers are on the new cluster already; `pointsman switch reverse %s` leads back as long as all subscriptions read the old one and none has had a message there")
	}
	return nil
}

// pauseDrain keeps subscriptions from leaving the old cluster.
func pauseDrain(rec *switching.Record) bool {
	if rec.State != switching.StateDraining {
		return false
	}
	rec.Wish = switching.WishPause
	return true
}

// told is what the leader has said last of a drain; nil when it has said nothing yet.
func (s *Server) told(ctx context.Context, id string) (*switching.Draining, error) {
	docs, err := s.store.Documents(ctx, controller.DrainDocuments)
	if err != nil {
		return nil, err
	}
	for _, doc := range docs {
		if doc.Name != id {
			continue
		}
		var t switching.Draining
		if err := json.Unmarshal(doc.Data, &t); err != nil {
			return nil, fmt.Errorf("what is left of switch %s: %w", id, err)
		}
		return &t, nil
	}
	return nil, nil
}

// mayReturn tells whether a switch that drains can be taken back, as far as the map says; the clusters are asked by the preflight, and again by the leader.
func (s *Server) mayReturn(ctx context.Context, rec switching.Record) error {
	refuse := func(format string, args ...any) error {
		return &Error{
			Code: CodeTooLate, Message: fmt.Sprintf("switch %s of %s cannot be taken back: ", rec.ID, rec.Topic) + fmt.Sprintf(format, args...),
			Remedy: fmt.Sprintf("let the drain end (`pointsman switch watch %s`), then `pointsman switch start --mode drain --topic %s --to %s`", rec.ID, rec.Topic, rec.From),
		}
	}
	if rec.Return {
		return tooLate(rec, "it is being taken back already")
	}
	e, _, err := s.store.Entry(ctx, rec.Topic)
	if err != nil {
		return err
	}
	d, err := route.ParseDrain(e.Drain)
	switch {
	case e.SwitchID != rec.ID || e.State != route.StateDraining:
		return refuse("the topic does not drain by it any more")
	case err != nil:
		return refuse("%v", err)
	case d.Gone > 0:
		return refuse("%d of its subscriptions left cluster %s already, and read cluster %s", d.Gone, rec.From, rec.To)
	}
	return nil
}

// takeBack asks for the way back of switches that drain: the next attempt of each.
func (s *Server) takeBack(ctx context.Context, r *SwitchCommand, records []switching.Record) (any, error) {
	var moves []move
	since := map[string]map[string]string{}
	for _, rec := range records {
		if rec.State.Over() {
			return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("of the switches of %s some drain and some have ended: %s is %s", r.ID, rec.ID, rec.State), Remedy: "reverse them one by one"}
		}
		if rec.State != switching.StateDraining && !rec.Return {
			return nil, tooLate(rec, "it has only just begun; `pointsman switch abort %s` before the map names the new cluster, and afterwards try again in a moment")
		}
		if err := s.mayReturn(ctx, rec); err != nil {
			return nil, err
		}
		t, err := parseTopicName(rec.Topic)
		if err != nil {
			return nil, err
		}
		moves = append(moves, move{target: t, from: rec.To, to: rec.From, epoch: rec.Epoch})
		if since[rec.Topic] = map[string]string{}; rec.Receipt != nil {
			since[rec.Topic] = rec.Receipt.First
		}
	}
	checks, err := s.check(ctx, moves, order{mode: switching.ModeDrain, since: since})
	if err != nil {
		return nil, err
	}
	if r.DryRun {
		return &SwitchStatus{
			To: records[0].From, Mode: string(switching.ModeDrain), State: statePlanned, Total: len(records), Switches: []SwitchDetail{}, Preflights: checks,
			Promised: switching.Promised(switching.ModeDrain), NotPromised: switching.NotPromised(switching.ModeDrain),
		}, nil
	}
	if err := judged(checks, r.Force); err != nil {
		return nil, err
	}
	return s.wish(ctx, r.ID, r.Who, func(rec *switching.Record) error {
		if rec.State != switching.StateDraining || rec.Return {
			return tooLate(*rec, "it has changed meanwhile; look with `pointsman switch status %s`")
		}
		next := rec.Back()
		next.Rev-- // the write counts it
		next.Why = cmp.Or(r.Why, rec.Why)
		*rec = next
		s.log.Info("the way back of a drain asked for", "switch", rec.ID, "topic", rec.Topic, "who", whoOr(r.Who), "why", r.Why, "at", time.Now().UTC().Format(time.RFC3339))
		return nil
	})
}
