package controller

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

const (
	// saveEvery is how often the progress of a batch is written down. What a dead leader has not written, its successor finds in the switches' own records.
	saveEvery = time.Second
	// newTimeout is how long the topics of a new batch may take to be written down.
	newTimeout = 2 * time.Minute
	// reread is how often the record of a switch is looked at whose end may have been missed.
	reread = 2 * time.Second
	// factsKept is how long what the proxies have said of their clients counts for a preflight, and factsAtOnce how many topics are asked for at once.
	factsKept   = 5 * time.Second
	factsAtOnce = 256
	// measureTimeout bounds a look at the replication of a few topics.
	measureTimeout = 15 * time.Second
)

// batchDriver drives one batch. Owned by its goroutine, but for what is said to be guarded.
type batchDriver struct {
	l   *leadership
	c   *Controller
	log *slog.Logger
	id  string

	run   *switching.BatchRun
	parts []storedPart
	saved time.Time
	// names are those of all topics, sorted: they move together. It is replaced and never altered.
	names []string

	wake chan struct{} // capacity 1: something is in inbox, or switches have ended
	work sync.WaitGroup
	// given is closed when the batch is to be given up; replaced, by its goroutine, when it goes on after all.
	given chan struct{}

	mu      sync.Mutex
	inbox   []func(now time.Time)    // reports for run; guarded by mu
	waiting map[string]chan struct{} // by switch: closed when it is over; guarded by mu
	record  *switching.Batch         // newer than the one that run goes by; nil: none; guarded by mu
	drains  int                      // topics of the batch that drain; guarded by mu

	asking  sync.Mutex // held while the proxies are asked
	facts   map[string]switching.HandleFacts
	factsAt time.Time // both guarded by asking
}

// job is the work on one topic, as of its beginning. It is read only.
type job struct {
	item    int
	topic   string
	attempt uint32
	b       switching.Batch
	with    []string // all topics of the batch
	coming  []string // this one, and some that come next
}

// storedPart says where a part begins, and how it is stored.
type storedPart struct {
	from, to int
	rev      uint64
	index    int
}

func newBatchDriver(l *leadership, id string) *batchDriver {
	return &batchDriver{
		l: l, c: l.c, id: id, log: l.c.cfg.Log.With("batch", id), wake: make(chan struct{}, 1), given: make(chan struct{}), waiting: map[string]chan struct{}{},
	}
}

// observe hands over the record as the leader has just read it, and how many topics of the batch drain.
func (d *batchDriver) observe(b switching.Batch, drains int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.record, d.drains = &b, drains
	d.poke()
}

func (d *batchDriver) poke() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// ended tells that a switch is over, or that its driver has gone.
func (d *batchDriver) ended(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if done := d.waiting[id]; done != nil {
		close(done)
		delete(d.waiting, id)
	}
}

// report hands run what became of some work.
func (d *batchDriver) report(f func(now time.Time)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inbox = append(d.inbox, f)
	d.poke()
}

// drive goes on with the batch until it is over or ctx ends.
func (d *batchDriver) drive(ctx context.Context) {
	ctx, stop := context.WithCancel(ctx)
	defer d.work.Wait()
	defer stop()
	if err := d.load(ctx); err != nil {
		if ctx.Err() == nil {
			d.log.Error("a batch cannot be read; it is tried again", "err", err)
			d.sleep(ctx, reread)
		}
		return
	}
	d.log.Info("driving a batch", "state", d.run.Batch(time.Now()).State, "topics", len(d.run.Items()), "to", d.run.Batch(time.Now()).To)
	for ctx.Err() == nil {
		d.take()
		now := time.Now()
		step := d.run.Next(now)
		var err error
		switch step.Do {
		case switching.BatchOver:
			if d.run.Overtaken() {
				d.log.Warn("another leader has ended this batch", "state", d.run.Batch(now).State)
				return
			}
			if d.save(ctx, true) == nil {
				b := d.run.Batch(now)
				d.log.Info("a batch is over", "state", b.State, "moved", b.Count.Moved, "failed", b.Count.Failed, "blocked", b.Count.Blocked, "note", b.Note)
				return
			}
			d.sleep(ctx, switching.RetryInterval)
		case switching.BatchWrite:
			if err = d.save(ctx, true); err == nil {
				d.tell()
			}
		case switching.BatchWait:
			if now.Sub(d.saved) >= saveEvery {
				err = d.save(ctx, false)
			}
			d.wait(ctx, step)
		case switching.BatchCheck:
			j := d.job(step.Item)
			d.work.Go(func() { d.check(ctx, j) })
		case switching.BatchStart:
			j := d.job(step.Item)
			d.work.Go(func() { d.move(ctx, j) })
		case switching.BatchMeasure:
			var topics []string
			for _, i := range step.Next {
				topics = append(topics, d.run.Items()[i].Topic)
			}
			b := d.run.Batch(now)
			d.work.Go(func() { d.measure(ctx, b, topics) })
		case switching.BatchSettle:
			b, moved := d.run.Batch(now), map[int]string{}
			for i, it := range d.run.Items() {
				if it.State == switching.ItemMoved {
					moved[i] = it.Topic
				}
			}
			d.work.Go(func() { d.settle(ctx, b, moved) })
		case switching.BatchRule:
			b, names := d.run.Batch(now), d.names
			d.work.Go(func() { d.rule(ctx, b, names) })
		}
		if err == nil && now.Sub(d.saved) >= saveEvery {
			err = d.save(ctx, false)
		}
		if err != nil && ctx.Err() == nil {
			d.log.Warn("the progress of a batch was not written down; it is tried again", "err", err)
			d.sleep(ctx, switching.RetryInterval)
		}
	}
}

// load reads what is stored. A batch whose topics are still being written down is waited for, and given up after a while.
func (d *batchDriver) load(ctx context.Context) error {
	var b switching.Batch
	var err error
	for {
		if b, err = d.c.cfg.Store.Batch(ctx, d.id); err != nil {
			return err
		}
		if b.State != switching.BatchNew || time.Since(b.Started) > newTimeout || b.Abort {
			break
		}
		d.sleep(ctx, switching.RetryInterval)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if b.State == switching.BatchNew {
		b.Rev++
		b.State, b.Ended, b.Note = switching.BatchAborted, time.Now(), "its topics were not all written down: whoever asked for it has ended; ask for it again"
		if err := d.c.cfg.Store.PutBatch(ctx, b); err != nil {
			return err
		}
	}
	parts, err := d.c.cfg.Store.BatchParts(ctx, d.id)
	if err != nil {
		return err
	}
	var items []switching.BatchItem
	d.parts = nil
	for _, p := range parts {
		d.parts = append(d.parts, storedPart{from: len(items), to: len(items) + len(p.Items), rev: p.Rev, index: p.Index})
		items = append(items, p.Items...)
	}
	d.run = switching.NewBatchRun(b, items)
	d.rename()
	if b.Abort {
		close(d.given)
	}
	return nil
}

// take applies what has been reported.
func (d *batchDriver) take() {
	d.mu.Lock()
	reports, record, drains := d.inbox, d.record, d.drains
	d.inbox, d.record = nil, nil
	d.mu.Unlock()
	now := time.Now()
	for _, f := range reports {
		f(now)
	}
	if record != nil {
		d.run.Drains(drains)
	}
	if record == nil || record.Rev <= d.run.Batch(now).Rev {
		return
	}
	d.heed(*record)
}

// heed goes on by a record that somebody else has written.
func (d *batchDriver) heed(b switching.Batch) {
	d.run.Observe(b)
	switch given := d.isGiven(); {
	case b.Abort && !given:
		close(d.given)
	case !b.Abort && given: // it had ended, and was resumed before this driver has: nothing is under way that looks at given
		d.given = make(chan struct{})
	}
}

func (d *batchDriver) isGiven() bool {
	select {
	case <-d.given:
		return true
	default:
		return false
	}
}

// job is the work on one item, as of now.
func (d *batchDriver) job(i int) job {
	items := d.run.Items()
	j := job{item: i, topic: items[i].Topic, attempt: max(items[i].Attempt, 1), b: d.run.Batch(time.Now()), with: d.names}
	for _, it := range items[i:min(len(items), i+factsAtOnce)] {
		j.coming = append(j.coming, it.Topic)
	}
	return j
}

// rename gathers the names anew.
func (d *batchDriver) rename() {
	d.names = make([]string, 0, len(d.run.Items()))
	for _, it := range d.run.Items() {
		d.names = append(d.names, it.Topic)
	}
	slices.Sort(d.names)
}

// tell says in the log what the record says now.
func (d *batchDriver) tell() {
	b := d.run.Batch(time.Now())
	if b.Pause != nil {
		d.log.Warn("a batch pauses", "gate", b.Pause.Gate, "why", b.Pause.Why, "moved", b.Count.Moved, "of", b.Count.Total)
		return
	}
	d.log.Info("a batch goes on", "state", b.State, "wave", b.Wave+1, "of", len(b.Ends), "moved", b.Count.Moved, "topics", b.Count.Total)
}

// wait returns when something was reported, when the step's time has come, or when the progress is to be written down.
func (d *batchDriver) wait(ctx context.Context, step switching.BatchStep) {
	pause := saveEvery
	if !step.Until.IsZero() {
		pause = min(pause, time.Until(step.Until))
	}
	timer := time.NewTimer(max(pause, 0))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.wake:
	case <-ctx.Done():
	}
}

func (d *batchDriver) sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
}

// save writes the parts that have changed, and then the record: what that counts is in the parts. Without force the record is left alone when no part has changed.
func (d *batchDriver) save(ctx context.Context, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	d.saved = time.Now()
	changed := false
	items := d.run.Items()
	if last := 0; len(items) > 0 {
		if n := len(d.parts); n > 0 {
			last = d.parts[n-1].to
		}
		for _, p := range switching.SplitBatch(items[last:], len(d.parts)) { // topics that were found later
			d.parts = append(d.parts, storedPart{from: last, to: last + len(p.Items), index: p.Index})
			last += len(p.Items)
		}
		if len(d.names) != len(items) {
			d.rename()
		}
	}
	for i := range d.parts {
		p := &d.parts[i]
		if !d.run.Dirty(p.from, p.to) {
			continue
		}
		changed = true
		next := switching.BatchPart{Index: p.index, Rev: p.rev + 1, Items: slices.Clone(items[p.from:p.to])}
		err := d.c.cfg.Store.PutBatchPart(ctx, d.id, next)
		if errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrUnknown) {
			// Nobody else writes parts but a leader that was frozen, or one whose answer was lost: whatever is stored, the switches' records are the truth.
			p.rev, err = d.storedRev(ctx, p.index, err)
		}
		if err != nil {
			return err
		}
		p.rev++
		d.run.Saved(p.from, p.to)
	}
	if !force && !changed && !d.run.Counted() {
		return nil
	}
	b := d.run.Batch(time.Now())
	b.Rev, b.Parts, b.Runner = b.Rev+1, len(d.parts), d.c.cfg.ID
	err := d.c.cfg.Store.PutBatch(ctx, b)
	switch {
	case err == nil:
		d.run.Wrote(b.Rev)
	case errors.Is(err, store.ErrConflict), errors.Is(err, store.ErrUnknown):
		// An operator was faster, or the answer was lost.
		have, readErr := d.c.cfg.Store.Batch(ctx, d.id)
		if readErr != nil {
			return errors.Join(err, readErr)
		}
		if have.Rev == b.Rev && have.Runner == b.Runner && have.Count == b.Count && have.State == b.State && errors.Is(err, store.ErrUnknown) {
			d.run.Wrote(b.Rev)
			return nil
		}
		d.heed(have)
		return nil // the next turn writes again
	}
	return err
}

// storedRev is the revision of a part that could not be written for the reason why: the next attempt writes over it.
func (d *batchDriver) storedRev(ctx context.Context, index int, why error) (uint64, error) {
	parts, err := d.c.cfg.Store.BatchParts(ctx, d.id)
	if err != nil {
		return 0, errors.Join(why, err)
	}
	for _, p := range parts {
		if p.Index == index {
			return p.Rev, why
		}
	}
	return 0, why
}
