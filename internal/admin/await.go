package admin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file waits for what the proxies report of a flip that nobody drives: of immediate mode and of failovers.

// members are all proxies, dead ones included.
func (s *Server) members(ctx context.Context) ([]store.Proxy, error) {
	return s.roster.Get(ctx, store.DefaultTimeout, s.store.Proxies)
}

func liveMembers(proxies []store.Proxy) []switching.Member {
	var ms []switching.Member
	for _, p := range proxies {
		if p.Live {
			ms = append(ms, switching.Member{ID: p.ID, Incarnation: p.Incarnation})
		}
	}
	return ms
}

// await waits until every proxy has reported, at most until the deadline, and ends the record.
func (s *Server) await(ctx context.Context, rec *switching.Record) error {
	waitCtx, cancel := context.WithDeadline(ctx, rec.Deadline)
	defer cancel()
	pause, looked := 10*time.Millisecond, time.Now()
	if rec.Mode == switching.ModeFailover {
		pause = 50 * time.Millisecond // of many at once: each look is work for the store
	}
	for {
		look := s.reports
		if time.Since(looked) > time.Second { // whether it was overtaken costs one more
			look, looked = s.judge, time.Now()
		}
		o, err := look(waitCtx, rec)
		if err == nil && o.Done() || waitCtx.Err() != nil {
			break
		}
		select {
		case <-waitCtx.Done():
		case <-time.After(pause):
			pause = min(2*pause, 250*time.Millisecond)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err() // this proxy stops; whoever asks for the switch later ends it
	}
	return s.end(ctx, rec)
}

// judge is what the proxies have reported of a switch, and whether it was overtaken.
func (s *Server) judge(ctx context.Context, rec *switching.Record) (switching.Outcome, error) {
	o, err := s.reports(ctx, rec)
	if err == nil && !o.Done() {
		o.Overtaken, err = s.overtakenBy(ctx, rec)
	}
	return o, err
}

func (s *Server) reports(ctx context.Context, rec *switching.Record) (switching.Outcome, error) {
	acks, err := s.store.Acks(ctx, rec.ID)
	if err != nil {
		return switching.Outcome{}, err
	}
	proxies, err := s.members(ctx)
	if err != nil {
		return switching.Outcome{}, err
	}
	return switching.Judge(rec.Expect, acks, liveMembers(proxies)), nil
}

// overtakenBy tells what has changed the topic or rule of a switch since; "" when the switch is still the last.
func (s *Server) overtakenBy(ctx context.Context, rec *switching.Record) (string, error) {
	id := ""
	if strings.Contains(rec.Topic, "://") {
		e, _, err := s.store.Entry(ctx, rec.Topic)
		if err != nil {
			return "", err
		}
		id = e.SwitchID
	} else {
		rules, err := s.store.Rules(ctx)
		if err != nil {
			return "", err
		}
		if i := slices.IndexFunc(rules, func(r route.Rule) bool { return r.Scope == rec.Topic }); i >= 0 {
			id = rules[i].SwitchID
		}
	}
	switch id {
	case rec.ID:
		return "", nil
	case "":
		return "a later change of the map", nil
	}
	return "switch " + id, nil
}

// end writes how a switch ended.
func (s *Server) end(ctx context.Context, rec *switching.Record) error {
	o, err := s.judge(ctx, rec)
	if err != nil {
		return err
	}
	rec.State, rec.Ended, rec.Note = switching.StateDone, time.Now(), o.Note()
	if !o.Done() {
		rec.State = switching.StateIncomplete
	}
	rec.Rev++
	if err := s.store.PutSwitch(ctx, *rec); !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
		return err
	}
	// Another proxy may have ended it at the same time, or this one did and did not hear of it.
	*rec, err = s.store.Switch(ctx, rec.ID)
	return err
}
