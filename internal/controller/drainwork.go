package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// DrainDocuments is the kind of the store's documents in which the leader says how far drains are: a switching.Draining by the id of the switch.
const DrainDocuments = "drain"

const (
	// tellEvery is how often the leader writes down how far a drain is, unless it looks different.
	tellEvery = 5 * time.Second
	// rateOver is over how long the speed of a drain is measured, at most.
	rateOver = time.Minute
	// looksApart is how far apart the looks at drains are, over all of them: with hundreds, each is looked at more rarely.
	looksApart = 20 * time.Millisecond
)

// progress is what a driver remembers of a drain, to tell how it goes on.
type progress struct {
	began  map[string]sample // by subscription: where its speed is measured from
	told   time.Time
	shape  string // what was told, without what changes all the time
	rev    uint64 // of the document; 0: not known
	copied int64
}

type sample struct {
	at      time.Time
	backlog int64
}

// onDrain performs the works that only a drain has.
func (d *driver) onDrain(ctx context.Context, step switching.Step) (r switching.Report, err error) {
	t, ok := d.topic.(Drainer)
	if !ok {
		return r, fmt.Errorf("%w: switch %s is in mode %s, and this proxy cannot do that", ErrHopeless, d.key.Switch, d.rec.Mode)
	}
	drain, err := route.ParseDrain(step.Drain)
	if err != nil {
		return r, fmt.Errorf("%w: %w", ErrHopeless, err)
	}
	switch step.Work {
	case switching.WorkDrained:
		var left []switching.Left
		if r.Drained, left, err = t.Drained(ctx); err != nil {
			if errors.Is(err, ErrRevived) {
				d.log.Warn("a drain stood still", "err", err)
			}
			d.tellTrouble(ctx, err)
			return r, err
		}
		d.tell(ctx, d.draining(time.Now(), drain, left))
		d.patient = !slices.ContainsFunc(drain.Subs, func(s route.DrainSub) bool { return s.Leaving })
	case switching.WorkReturnable:
		had, err := t.Returnable(ctx)
		if err == nil && had != "" {
			err = fmt.Errorf("%w: %s: let the drain end, then switch from %s to %s", ErrHopeless, had, d.rec.To, d.rec.From)
		}
		return r, err
	case switching.WorkCopy:
		if err := d.mayCopy(ctx); err != nil {
			return notYet(err), nil
		}
		all := step.Tail != ""
		var left int64
		r.Copied, left, err = t.CopyBack(ctx, drain, all)
		d.progress.copied += r.Copied
		d.receipt().Copied += r.Copied
		if err == nil && (left > fewToCopy || all && left > 0) {
			r.Answer, r.Why = switching.NotYet, fmt.Sprintf("%s to be copied from cluster %s to %s", entries(left), d.rec.To, d.rec.From)
		}
		if !all {
			d.tell(ctx, switching.Draining{At: time.Now(), Subscriptions: len(drain.Subs), Left: []switching.Left{}, Copied: d.progress.copied, ToCopy: left, Why: errText(err)})
		}
	}
	return r, err
}

// mayCopy tells why nothing must be copied: a leader that was frozen comes late.
func (d *driver) mayCopy(ctx context.Context) error {
	e, _, err := d.c.cfg.Store.Entry(ctx, d.base)
	if err == nil && (e.SwitchID != d.key.Switch || e.Attempt > d.key.Attempt || e.Cluster != d.rec.To || e.State == route.StateActive) {
		err = fmt.Errorf("the topic is %v on cluster %s by switch %s now", e.State, e.Cluster, e.SwitchID)
	}
	return err
}

// passOver does what is left to be done when a topic has been taken back. Without it what was copied comes twice, should the topic drain again: then the record says so.
func (d *driver) passOver(ctx context.Context, rec *switching.RecordState) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout/2)
	defer cancel()
	began := time.Now()
	err := d.open(ctx)
	if t, ok := d.topic.(Drainer); err == nil && ok {
		err = t.PassOver(ctx, func() error {
			e, _, err := d.c.cfg.Store.Entry(store.AsOf(ctx, store.Boottime()), d.base) // the step has begun before the end was read
			if err == nil && (e.State != route.StateActive || e.Cluster != d.rec.From || switching.KeyOf(e) != d.key) {
				err = fmt.Errorf("the topic is %v on cluster %s by switch %s by now", e.State, e.Cluster, e.SwitchID) // a leader that was frozen comes late
			}
			return err
		})
		d.addStep("pass over", began, time.Since(began), errText(err))
	}
	if err != nil {
		note := fmt.Sprintf("what was copied back is still to be delivered on cluster %s, and would come again if the topic drained there again: %v", d.rec.To, err)
		if rec.Note != "" {
			note = rec.Note + "; " + note
		}
		rec.Note = note
	}
}

// noteEnds writes down where both clusters end when the topic moves: what the new one has behind that was published after the switch.
func (d *driver) noteEnds(tail string) error {
	t, ok := d.topic.(interface {
		Tails(tail string) (old, new map[string]string, err error)
	})
	if !ok {
		return nil
	}
	old, new, err := t.Tails(tail)
	if err == nil {
		d.receipt().Tail, d.receipt().First = old, new
	}
	return err
}

// noteMoved writes down which subscriptions a write takes off the list.
func (d *driver) noteMoved(step switching.Step, now time.Time) {
	before, err := route.ParseDrain(step.Before.Drain)
	if err != nil {
		return
	}
	rc := d.receipt()
	for _, s := range before.Subs {
		// Only the end of a drain has none: then all have left.
		if still, _ := route.DrainHas(step.After.Drain, s.Name); still {
			continue
		}
		if rc.MovedCount++; len(rc.Moved) < switching.MaxCarried {
			rc.Moved = append(slices.Clip(rc.Moved), switching.Moved{Subscription: s.Name, At: now, Seconds: now.Sub(d.rec.Flipped).Round(time.Millisecond).Seconds()})
		}
	}
}

// draining is what there is to tell of what was found.
func (d *driver) draining(now time.Time, drain route.Drain, found []switching.Left) switching.Draining {
	t := switching.Draining{At: now, Subscriptions: len(drain.Subs), Left: []switching.Left{}}
	if d.progress.began == nil {
		d.progress.began = map[string]sample{}
	}
	known := true // when all will be done
	listed := map[string]bool{}
	for _, l := range found {
		at, ok := drain.Find(l.Subscription)
		switch {
		case l.Reader:
			t.Readers += l.Consumers
		case ok:
			listed[l.Subscription] = true
			l.Leaving = drain.Subs[at].Leaving
			t.Backlog += l.Backlog
			d.measure(now, &l)
			if t.ETA = max(t.ETA, l.ETA); l.ETA == 0 && l.Backlog > 0 {
				known = false
			}
		case l.Consumers == 0:
			continue // it has moved
		}
		t.Left = append(t.Left, l)
	}
	for name := range d.progress.began {
		if !listed[name] {
			delete(d.progress.began, name)
		}
	}
	if !known {
		t.ETA = 0
	}
	t.Left = longestFirst(t.Left)
	return t
}

// measure says how fast a subscription gets on.
func (d *driver) measure(now time.Time, l *switching.Left) {
	from, ok := d.progress.began[l.Subscription]
	if !ok || l.Backlog > from.backlog {
		d.progress.began[l.Subscription] = sample{now, l.Backlog}
		return
	}
	took := now.Sub(from.at).Seconds()
	if took < 1 {
		return
	}
	if l.PerSecond = float64(from.backlog-l.Backlog) / took; l.PerSecond > 0 {
		l.ETA = float64(l.Backlog) / l.PerSecond
	}
	if now.Sub(from.at) > rateOver {
		d.progress.began[l.Subscription] = sample{now.Add(-rateOver / 2), l.Backlog + int64(l.PerSecond*rateOver.Seconds()/2)}
	}
}

// tellTrouble adds to what was told that it cannot be seen now.
func (d *driver) tellTrouble(ctx context.Context, err error) {
	drain := switching.Draining{At: time.Now(), Left: []switching.Left{}, Why: err.Error()}
	d.tell(ctx, drain)
}

// tell writes down how far a drain is, for status and for the next leader's operator. Nothing depends on it.
func (d *driver) tell(ctx context.Context, t switching.Draining) {
	if t.Why == "" {
		d.c.stats.drains.set(d.key.Switch, [2]int64{int64(t.Subscriptions), t.Backlog})
	}
	shape := fmt.Sprintf("%d %d %v %s", t.Subscriptions, t.Readers, t.Backlog == 0, t.Why)
	for _, l := range t.Left {
		shape += fmt.Sprintf(" %s:%d:%v", l.Subscription, l.Consumers, l.Leaving)
	}
	if shape == d.progress.shape && t.At.Sub(d.progress.told) < tellEvery {
		return
	}
	text, err := json.Marshal(t)
	for len(text) > store.MaxDocument && err == nil {
		t.Left = t.Left[:len(t.Left)/2]
		text, err = json.Marshal(t)
	}
	if err == nil {
		err = d.putProgress(ctx, text)
	}
	if err != nil && ctx.Err() == nil {
		d.log.Debug("how far a drain is could not be written down", "err", err)
		return
	}
	d.progress.told, d.progress.shape = t.At, shape
}

// putProgress replaces the document, whoever wrote it last.
func (d *driver) putProgress(ctx context.Context, text []byte) error {
	st := d.c.cfg.Store
	for range 2 {
		err := st.PutDocument(ctx, DrainDocuments, store.Document{Name: d.key.Switch, Rev: d.progress.rev + 1, Data: text})
		if err == nil {
			d.progress.rev++
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
		all, err := st.Documents(ctx, DrainDocuments)
		if err != nil {
			return err
		}
		d.progress.rev = 0
		for _, doc := range all {
			if doc.Name == d.key.Switch {
				d.progress.rev = doc.Rev
			}
		}
	}
	return nil // another leader is faster
}

// forget drops what was told, of a switch that is over.
func (d *driver) forget(ctx context.Context) {
	d.c.stats.drains.drop(d.key.Switch)
	if d.rec.Mode != switching.ModeDrain {
		return
	}
	if err := d.c.cfg.Store.DropDocument(ctx, DrainDocuments, d.key.Switch); err != nil && ctx.Err() == nil {
		d.log.Debug("how far a drain was could not be dropped", "err", err)
	}
}

// drainStats are what the drains of this leader have left, by the id of the switch: subscriptions and entries.
type drainStats struct {
	mu  sync.Mutex
	now map[string][2]int64 // guarded by mu
}

func (s *drainStats) set(id string, left [2]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil {
		s.now = map[string][2]int64{}
	}
	s.now[id] = left
}

func (s *drainStats) drop(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.now, id)
}

// patience is how much later than usual a drain is looked at, of which nobody waits to move.
func (s *drainStats) patience() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(time.Duration(len(s.now))*looksApart-switching.DrainInterval, 0)
}

// reset forgets what an earlier leadership has seen.
func (s *drainStats) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.now)
}

func (s *drainStats) sum() (subscriptions, backlog int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, left := range s.now {
		subscriptions, backlog = subscriptions+left[0], backlog+left[1]
	}
	return subscriptions, backlog
}

var (
	descDrainSubs    = prometheus.NewDesc("pointsman_drain_subscriptions", "Subscriptions that still read the old cluster of a drain, over all drains; the leader tells, on other proxies it is absent.", nil, nil)
	descDrainBacklog = prometheus.NewDesc("pointsman_drain_backlog_entries", "Entries that those have not acknowledged on the old cluster.", nil, nil)
)
