package admin

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file is how the leader carries out a failover: what is decided anew from the map at each begin, so that a successor goes on with what is left.

const (
	// failoverParallel is how many topics move at once; of each the reports of all proxies are waited for, and those go at the pace of evictions.
	failoverParallel = 32
	// failoverRounds bounds how often the map is looked at for what has been mapped to the dead cluster meanwhile.
	failoverRounds = 3
	// abortPatience is how long the end of a planned switch is waited for that stands in the way: its fence ends by itself before.
	abortPatience = switching.PrepareLimit + switching.FenceLimit
	// readySlice is how many topics of a rule are made ready between two looks at what the operator wishes.
	readySlice = 200
	// maxLeftBehind bounds the topics that a rule leaves behind: of more, it is the new cluster that cannot serve.
	maxLeftBehind = 1_000
	// progressEvery is how often it is written down how far an order is.
	progressEvery = time.Second
)

// failoverRun is one process's work on an order.
type failoverRun struct {
	s    *Server
	seen switching.Seen

	mu    sync.Mutex
	order switching.Failover // guarded by mu, as all below
	saved time.Time
	tried map[string]bool // names that were tried in this run

	awaited sync.WaitGroup // moves whose proxies have not all reported
}

// RunFailover carries out an order until it is over, or ctx ends. What keeps it from that is logged; whoever leads begins it again.
func (s *Server) RunFailover(ctx context.Context, o switching.Failover) {
	r := &failoverRun{s: s, order: o, tried: map[string]bool{}}
	if err := r.run(ctx); err != nil && ctx.Err() == nil {
		s.log.Error("a failover cannot go on now, and is tried again", "failover", o.ID, "err", err)
		select {
		case <-time.After(progressEvery):
		case <-ctx.Done():
		}
		return
	}
	if ctx.Err() == nil {
		s.log.Warn("a failover is over", "failover", o.ID, "from", o.From, "to", o.To, "state", r.order.State, "moved", r.order.Moved, "failed", r.order.FailedCount,
			"subscriptions_created", r.order.Created, "unreplicated", r.order.Backlog)
	}
}

func (r *failoverRun) run(ctx context.Context) (err error) {
	defer r.awaited.Wait()
	if r.seen, err = r.s.failover.Seen(ctx, r.order.From); err != nil {
		return err
	}
	if err := r.resume(ctx); err != nil {
		return err
	}
	for range failoverRounds {
		_, items, err := r.s.planFailover(ctx, &r.order)
		if err != nil {
			return err
		}
		items = slices.DeleteFunc(items, func(it failing) bool { return r.tried[it.target.name()] })
		r.mu.Lock()
		// A move whose proxies are waited for counts as neither yet, and is not among the items any more.
		r.order.Total = max(r.order.Total, r.order.Moved+r.order.FailedCount+len(items))
		r.mu.Unlock()
		if len(items) == 0 {
			break
		}
		if err := r.save(ctx, true); err != nil {
			return err
		}
		// Rules are first, one after the other: each moves much. What their proxies report is not waited for: a namespace of many clients has minutes.
		for len(items) > 0 && !items[0].target.isTopic {
			account := r.move(ctx, items[0])
			r.awaited.Go(account)
			items = items[1:]
		}
		var wg sync.WaitGroup
		free := make(chan struct{}, failoverParallel)
		for _, it := range items {
			free <- struct{}{}
			wg.Go(func() {
				defer func() { <-free }()
				r.move(ctx, it)()
			})
		}
		wg.Wait()
		if ctx.Err() != nil || r.aborted() {
			break
		}
	}
	r.awaited.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r.order.Ended = time.Now().UTC()
	if r.order.Wish != switching.WishAbort {
		r.order.Total = r.order.Moved + r.order.FailedCount // others have left the cluster by themselves
	}
	switch {
	case r.order.Wish == switching.WishAbort:
		r.order.State = switching.FailoverAborted
	case r.order.FailedCount > 0 || r.order.Done < r.order.Moved:
		r.order.State = switching.FailoverIncomplete
	default:
		r.order.State = switching.FailoverDone
	}
	return r.save(ctx, true)
}

// resume finds out what was moved before, by a leader that has ended, and ends what that has begun.
func (r *failoverRun) resume(ctx context.Context) error {
	o := &r.order
	begun := o.State != switching.FailoverRequested
	o.State = switching.FailoverRunning
	if err := r.abortWaiting(ctx); err != nil {
		return err
	}
	if !begun {
		return nil
	}
	records, err := r.s.store.SwitchesOf(ctx, o.ID)
	if err != nil {
		return err
	}
	o.Failed, o.FailedCount, o.Late = nil, 0, nil
	if len(records) >= o.Moved { // else the oldest are not kept any more, and what the last leader has counted is the best that is known
		o.Moved, o.Done, o.Created, o.Again, o.Backlog, o.Unreplicated, o.Unknown = 0, 0, 0, 0, 0, 0, 0
	} else {
		records = slices.DeleteFunc(records, func(rec switching.Record) bool { return rec.State != switching.StateEvicting })
		o.Moved = max(0, o.Moved-len(records))
	}
	r.mu.Lock() // whoever is awaited may be counted before the last of the others is
	defer r.mu.Unlock()
	for _, rec := range records {
		if rec.State != switching.StateEvicting {
			r.count(&rec)
			continue
		}
		r.awaited.Go(func() {
			if err := r.s.await(ctx, &rec); err != nil && ctx.Err() == nil {
				r.s.log.Warn("what the proxies say of a move cannot be read", "failover", o.ID, "topic", rec.Topic, "err", err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.count(&rec)
		})
	}
	return nil
}

// count takes in a move; r.mu is held.
func (r *failoverRun) count(rec *switching.Record) {
	o := &r.order
	o.Moved++
	if f := rec.Failover; f != nil {
		o.Created, o.Again, o.Backlog = o.Created+f.Created, o.Again+f.Again, o.Backlog+f.Backlog
		o.Unreplicated, o.Unknown = o.Unreplicated+f.Unreplicated, o.Unknown+f.Unknown
	}
	if rec.State == switching.StateDone {
		o.Done++
	} else if len(o.Late) < switching.MaxFailed {
		o.Late = append(o.Late, rec.ID)
	}
}

// abortWaiting aborts planned switches of topics on the dead cluster that have not begun.
func (r *failoverRun) abortWaiting(ctx context.Context) error {
	running, err := r.s.store.Running(ctx)
	if err != nil {
		return err
	}
	for _, rec := range running {
		if !notBegun(&rec, &r.order) {
			continue
		}
		if err := r.s.wishAbort(ctx, rec, "failover "+r.order.ID); err != nil {
			return err
		}
		r.note(fmt.Sprintf("switch %s of %s was aborted: it had not begun", rec.ID, rec.Topic))
	}
	return nil
}

// notBegun tells that a switch off the cluster that an order leaves is to be aborted, and that the map does not say so: it has written nothing there yet.
func notBegun(rec *switching.Record, o *switching.Failover) bool {
	return rec.From == o.From && rec.State == switching.StateRequested && !rec.Return && concerns(o, rec.Topic)
}

// concerns tells whether an order is about a topic.
func concerns(o *switching.Failover, base string) bool {
	t, err := route.ParseTopic(base)
	if err != nil {
		return false
	}
	return o.All || slices.Contains(o.Topics, base) || o.Scope != "" && t.In(o.Scope)
}

// wishAbort asks the leader, for who, to give up a switch that is not over, if that is still possible.
func (s *Server) wishAbort(ctx context.Context, rec switching.Record, who string) error {
	err := s.amend(ctx, rec, who, func(rec *switching.Record) error {
		if !rec.State.Over() && rec.State != switching.StateEvicting {
			rec.Wish = switching.WishAbort
		}
		return nil
	})
	s.nudge()
	return err
}

// move moves one topic or rule. What it returns waits for the proxies, and writes down what became of it.
func (r *failoverRun) move(ctx context.Context, it failing) (account func()) {
	name := it.target.name()
	r.mu.Lock()
	stop := r.order.Wish == switching.WishAbort || ctx.Err() != nil
	r.tried[name] = !stop
	r.mu.Unlock()
	if stop {
		return func() {}
	}
	rec, err := r.moveOne(ctx, it)
	return func() {
		if rec != nil && rec.State == switching.StateEvicting {
			err = errors.Join(err, r.s.await(ctx, rec))
		}
		defer r.progress(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case errors.Is(err, errAlreadyThere), errors.Is(err, errStopped):
		case err != nil && ctx.Err() == nil:
			r.s.log.Error("a topic could not be moved off a dead cluster", "failover", r.order.ID, "topic", name, "err", err)
			if r.order.FailedCount++; len(r.order.Failed) < switching.MaxFailed {
				r.order.Failed = append(r.order.Failed, switching.FailedMove{Name: name, Problem: asError(err).Error()})
			}
		case rec != nil:
			r.count(rec)
		}
	}
}

// errStopped ends a move before the map was changed: somebody has aborted the order.
var errStopped = errors.New("the failover is aborted")

func (r *failoverRun) moveOne(ctx context.Context, it failing) (*switching.Record, error) {
	o := &r.order
	if e := it.moving; e != nil && e.State != route.StateDraining {
		var err error
		if it.moving, err = r.s.freeTopic(ctx, *e, "failover "+o.ID); err != nil {
			return nil, err
		}
	}
	if it.stays(o.From) {
		return r.leaveThere(ctx, it.moving)
	}
	facts, err := r.ready(ctx, it)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, moveTimeout)
	defer cancel()
	if it.moving != nil { // it drains to the dead cluster
		if err := r.endDrain(ctx, it.moving); err != nil && !errors.Is(err, errAlreadyThere) {
			return nil, err
		}
	}
	rec, err := r.s.flipFailover(ctx, o, it.target, facts)
	if rec == nil {
		return nil, err
	}
	r.s.log.Warn("moved off a dead cluster", "failover", o.ID, "switch", rec.ID, "topic", it.target.name(), "from", o.From, "to", o.To, "epoch", rec.Epoch,
		"unreplicated", facts.Backlog, "measured", facts.Measured, "subscriptions_created", facts.Created)
	return rec, err
}

// moveTimeout bounds what one topic or rule takes until the map has it, once the new cluster is ready for it.
const moveTimeout = 5 * time.Minute

// ready makes on the new cluster what a topic, or each topic of a rule, lacks there. What of a rule cannot be served there is left behind, so that the others go.
func (r *failoverRun) ready(ctx context.Context, it failing) (facts switching.FailoverFacts, err error) {
	o := &r.order
	var behind []string
	var why *Error // of the first of them
	for some := range slices.Chunk(it.topics, readySlice) {
		if r.progress(ctx); r.aborted() {
			return facts, errStopped
		}
		for _, f := range r.s.readyEach(ctx, o, some, &r.seen, true) {
			switch {
			case f.unfit == nil:
				facts.Add(f.facts)
				continue
			case it.target.isTopic:
				return facts, f.unfit
			case why == nil:
				why = f.unfit
			}
			behind = append(behind, f.base)
		}
		if err := ctx.Err(); err != nil {
			return facts, err
		}
		if len(behind) > maxLeftBehind {
			return facts, &Error{Code: why.Code, Message: fmt.Sprintf("cluster %s cannot serve %d topics of %s, too many to be left behind one by one: %s", o.To, len(behind), it.target.name(), why.Message), Remedy: why.Remedy}
		}
	}
	if len(behind) == 0 {
		return facts, nil
	}
	r.note(fmt.Sprintf("%s moves without %d topics that cluster %s cannot serve: they stay on cluster %s, each by an entry of its own. %s: %v", it.target.name(), len(behind), o.To, o.From, behind[0], why))
	return facts, r.s.leaveBehind(ctx, o, behind)
}

// leaveBehind gives topics that a rule of the dead cluster decides an entry that says the same. They are tried once more by themselves, and listed when that fails too.
func (s *Server) leaveBehind(ctx context.Context, o *switching.Failover, topics []string) error {
	for range wishAttempts {
		p, err := s.plan(ctx, "")
		if err != nil {
			return err
		}
		for _, base := range topics {
			t, err := parseTopicName(base)
			if err != nil {
				return err
			}
			if e, ok := p.table.Entry(base); ok && !e.Floor() || p.decided(t) != o.From {
				continue // somebody was faster
			}
			if _, err := p.set(t, o.From, 0, ""); err != nil {
				return err
			}
		}
		_, err = s.write(ctx, p, nil, o.Who, fmt.Sprintf("failover %s: cluster %s cannot serve it, and its rule moves", o.ID, o.To))
		if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
			return err
		}
	}
	return &Error{Code: CodeConflict, Message: fmt.Sprintf("the map changed %d times while topics were to be left behind", wishAttempts), Remedy: "order the failover again"}
}

// freeTopic has a planned switch of a topic aborted, by who, and waits for the end of that. What it returns is not nil when the topic drains then: a drain that had just
// begun, or whose way back was given up.
func (s *Server) freeTopic(ctx context.Context, e route.Entry, who string) (*route.Entry, error) {
	ctx, cancel := context.WithTimeout(ctx, abortPatience)
	defer cancel()
	rec, err := s.store.Switch(ctx, e.SwitchID)
	if err == nil {
		err = s.wishAbort(ctx, rec, who)
	}
	if err != nil {
		return nil, fmt.Errorf("switch %s stands in the way and could not be aborted: %w", e.SwitchID, err)
	}
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		now, ok, err := s.store.Entry(ctx, e.Topic)
		switch {
		case err == nil && (!ok || now.State == route.StateActive):
			return nil, nil
		case err == nil && now.State == route.StateDraining:
			return &now, nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, &Error{Code: CodeSwitching, Message: fmt.Sprintf("%s is %s by switch %s, which did not end within %v of being aborted", e.Topic, stateName(e.State), e.SwitchID, abortPatience),
				Remedy: fmt.Sprintf("look at `pointsman switch status %s`", e.SwitchID)}
		}
	}
}

// flipFailover changes the map for one topic or rule. A record is returned when it was changed, even if something went wrong afterwards.
func (s *Server) flipFailover(ctx context.Context, o *switching.Failover, t target, facts switching.FailoverFacts) (*switching.Record, error) {
	const attempts = 5
	b := &batch{id: o.ID, to: o.To, mode: switching.ModeFailover, who: o.Who, why: o.Why}
	it := &item{target: t, from: o.From, id: failoverRecordID(o.ID, t.name())}
	started := time.Now()
	var conflict error
	for range attempts {
		p, err := s.planFor(ctx, t)
		if err != nil {
			return nil, err
		}
		if now := p.decided(t); now == o.To {
			return nil, errAlreadyThere
		} else if now != o.From {
			return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("%s was on %q when the failover began and is on %q now", t.name(), o.From, now), Remedy: "look at `pointsman history` and decide anew"}
		}
		if _, err := p.set(t, o.To, 0, it.id); err != nil {
			return nil, err
		}
		rec, again, err := s.writeItem(ctx, b, it, p, started, &facts, whyFailover(o))
		if !again {
			return rec, err
		}
		conflict = err // perhaps only of a rule above: look again
	}
	return nil, conflict
}

func whyFailover(o *switching.Failover) string {
	if o.Why != "" {
		return o.Why
	}
	return fmt.Sprintf("failover %s: cluster %s is dead", o.ID, o.From)
}

// failoverRecordID is the id of the record of one topic or rule: the same whoever makes it.
func failoverRecordID(order, name string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	return order + "-" + hex.EncodeToString(h.Sum(nil))[:12]
}

func (r *failoverRun) aborted() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.order.Wish == switching.WishAbort
}

func (r *failoverRun) note(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.order.Notes) < switching.MaxFailoverNames {
		r.order.Notes = append(r.order.Notes, text)
	}
}

// progress is save now and then, when it does not matter whether it can be done.
func (r *failoverRun) progress(ctx context.Context) {
	if err := r.save(ctx, false); err != nil && ctx.Err() == nil {
		r.s.log.Warn("how far a failover is could not be written down", "failover", r.order.ID, "err", err)
	}
}

// save writes down how far the order is, and takes in what its operator wishes.
func (r *failoverRun) save(ctx context.Context, now bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.saveLocked(ctx, now)
}

func (r *failoverRun) saveLocked(ctx context.Context, now bool) error {
	if !now && time.Since(r.saved) < progressEvery {
		return nil
	}
	for range wishAttempts {
		err := store.PutFailover(ctx, r.s.store, &r.order)
		if err == nil {
			r.saved = time.Now()
			return nil
		}
		if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
			return err
		}
		have, err := store.Failover(ctx, r.s.store, r.order.ID)
		if err != nil {
			return err
		}
		if have.State.Over() {
			return fmt.Errorf("failover %s was ended by somebody else", have.ID)
		}
		r.order.Rev, r.order.Wish = have.Rev, have.Wish
		if r.order.State.Over() && have.Wish == switching.WishAbort {
			r.order.Wish = "" // too late
		}
	}
	return &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s changed %d times while it was written to", r.order.ID, wishAttempts)}
}
