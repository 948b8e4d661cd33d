// Package controller drives planned switches in the proxy that leads. core/switching decides what is to be done next; this package does
// it, with the map store and with both clusters (Topic), and writes down what it cost. internal/app runs it; internal/admin asks for
// switches by writing records, and never calls it but to say that there is one.
//
// It must never decide by itself: what is safe follows from the entry, the acks and the roster alone, and any process may be frozen
// between a decision and its write.
package controller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// Config is what a controller works with.
type Config struct {
	Store store.Store
	// ID of this proxy.
	ID string
	// DefaultCluster decides for topics without entry or rule.
	DefaultCluster string
	// Open prepares the work on both clusters for one switch; it may ask them.
	Open func(ctx context.Context, rec switching.Record) (Topic, error)
	// Assign asks a cluster for the brokers of a topic's partitions: full name → host:port, and how many could not be found out.
	Assign func(ctx context.Context, cluster, base string) (brokers map[string]string, missing int)
	// Clients ask the clusters in a preflight: one for each that has an admin address.
	Clients map[string]*pulsaradmin.Client
	// Fleet is what batches ask of the proxies; nil: nothing is known of clients, and no rules are written.
	Fleet Fleet
	// Ground is what batches ask of the clusters; nil: they are asked.
	Ground *Ground
	// NativeIDs tells that message ids are passed on as they are (message_ids: native).
	NativeIDs bool
	// Receipt, when not nil, is handed every record that is over.
	Receipt func(switching.Record)
	// Beside, when not nil, runs as long as this process leads.
	Beside func(ctx context.Context)
	Log    *slog.Logger
}

// Controller drives the planned switches and the drains while this process leads.
type Controller struct {
	cfg   Config
	nudge chan struct{} // capacity 1
	stats stats
	// roster is shared by all switches that look at it in the same moment, names and seats by all preflights of a batch.
	roster store.Joint[roster]
	names  listing
	seats  seats
	began  func(switching.Step) // tests look on; nil otherwise
}

const (
	// lookEvery is how often the leader looks for new switches, unless it is told.
	lookEvery = 500 * time.Millisecond
	// rosterEvery is how often the leader looks who is not live, while it drives nothing.
	rosterEvery = 10 * time.Second
	// maxDriven is how many switches are under way at once: each holds a topic. Batches say how many of theirs may be.
	maxDriven = switching.MaxBatchParallel
	// stepTimeout bounds one step on the store or the clusters. The deadlines of the protocol are shorter; this only
	// frees a driver whose call hangs.
	stepTimeout = 20 * time.Second
	// warmTimeout bounds the work on a topic's subscriptions before it is prepared.
	warmTimeout = 5 * time.Minute
)

// New makes a controller; Run runs it.
func New(cfg Config) *Controller { return &Controller{cfg: cfg, nudge: make(chan struct{}, 1)} }

// Nudge tells that a record was written: the leader, if it is here, looks at once.
func (c *Controller) Nudge() {
	select {
	case c.nudge <- struct{}{}:
	default:
	}
}

// Run campaigns for the leadership, and drives switches while it has it, until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	return c.cfg.Store.Lead(ctx, c.cfg.ID, c.lead)
}

// lead drives all switches and batches that are not over. Another leader goes on where this one stops: nothing is cleaned up.
func (c *Controller) lead(ctx context.Context) {
	c.cfg.Log.Info("this proxy leads the switches", "id", c.cfg.ID)
	c.stats.drains.reset()
	c.stats.leading.Store(true)
	defer c.stats.leading.Store(false)
	l := &leadership{c: c, missing: newUnseen(), running: map[string]*driver{}, batches: map[string]*batchDriver{}}
	defer l.drivers.Wait()
	if c.cfg.Beside != nil {
		l.drivers.Go(func() { c.cfg.Beside(ctx) })
	}
	failed := "" // what was said last of the reading
	l.drivers.Go(func() { c.watchRoster(ctx, l.missing) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-timer.C:
		case <-c.nudge:
		case <-ctx.Done():
			return
		}
		records, err := c.cfg.Store.Running(ctx)
		batches, batchErr := c.cfg.Store.RunningBatches(ctx)
		err = errors.Join(err, batchErr)
		if text := errText(err); text != failed && ctx.Err() == nil {
			if failed = text; err != nil {
				c.cfg.Log.Error("the leader cannot read all switches that are under way, and tries on; the others go on", "err", err)
			}
		}
		c.stats.note(records)
		c.stats.batches.note(batches)
		// Oldest first: what was asked for first begins first.
		for _, rec := range records {
			// A pause that was asked for before the switch began takes no place from others.
			if driven(rec) && !paused(rec) || l.drives(rec.ID) {
				l.begin(ctx, rec)
			}
		}
		for _, b := range batches {
			l.beginBatch(ctx, b, drainsOf(records, b.ID))
		}
		timer.Reset(lookEvery)
	}
}

// driven tells whether a switch is the controller's business.
func driven(rec switching.Record) bool {
	return rec.Mode.Driven()
}

// drainsOf is how many topics of a batch drain, or are being taken back.
func drainsOf(running []switching.Record, batch string) (n int) {
	for _, rec := range running {
		if rec.Batch == batch && (rec.State == switching.StateDraining || rec.Return) {
			n++
		}
	}
	return n
}

// leadership is what a leader has under way.
type leadership struct {
	c       *Controller
	drivers sync.WaitGroup
	missing *unseen

	mu      sync.Mutex
	running map[string]*driver      // by switch; guarded by mu
	batches map[string]*batchDriver // guarded by mu
}

// begin has a switch driven, unless that is so or too many are; a driver that has not seen this revision of the record looks.
func (l *leadership) begin(ctx context.Context, rec switching.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.running[rec.ID]; d != nil {
		if rec.Rev > d.seen.Load() {
			d.look()
		}
		return
	}
	if l.held() >= maxDriven && rec.State != switching.StateDraining {
		return // a later look finds it
	}
	d := newDriver(l.c, l.missing, rec)
	l.running[rec.ID] = d
	l.drivers.Go(func() {
		d.drive(ctx)
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.running, rec.ID)
		if b := l.batches[rec.Batch]; b != nil {
			b.ended(rec.ID) // it has the next one
			return
		}
		l.c.Nudge() // another one may begin
	})
}

// held is how many of the switches under way hold a topic, or are about to: not those that drain. l.mu is held.
func (l *leadership) held() (n int) {
	for _, d := range l.running {
		if !d.drains.Load() {
			n++
		}
	}
	return n
}

func (l *leadership) drives(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running[id] != nil
}

// look has the driver of a switch read its record.
func (l *leadership) look(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.running[id]; d != nil {
		d.look()
	}
}

// beginBatch has a batch driven, or hands its record to who drives it.
func (l *leadership) beginBatch(ctx context.Context, b switching.Batch, drains int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := l.batches[b.ID]; d != nil {
		d.observe(b, drains)
		return
	}
	d := newBatchDriver(l, b.ID)
	l.batches[b.ID] = d
	l.drivers.Go(func() {
		d.drive(ctx)
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.batches, b.ID)
		l.c.Nudge() // somebody may have resumed it
	})
}

// watchRoster notes who is not live, and who is not a member any more: a switch that begins later need not wait for a member that has promised to hold its
// publishes, nor have the old cluster unload the topic for one that is gone for long.
func (c *Controller) watchRoster(ctx context.Context, missing *unseen) {
	ticker := time.NewTicker(rosterEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		if r, err := c.roster.Get(ctx, stepTimeout, c.readRoster); err == nil { // otherwise the time begins later
			missing.note(time.Now(), r)
		}
	}
}

// paused tells whether a switch has not begun and is not to begin. It has no driver: it may stay so for days.
func paused(rec switching.Record) bool {
	return rec.State == switching.StateRequested && rec.Wish == switching.WishPause
}

// driver drives one attempt of one switch. Owned by its goroutine, but for the channel and the atomics.
type driver struct {
	c      *Controller
	unseen *unseen
	log    *slog.Logger
	key    switching.Key
	base   string
	looks  chan struct{} // capacity 1: the record may have changed
	// drains: the topic is not held any more, and subscriptions follow one by one.
	drains atomic.Bool
	seen   atomic.Uint64 // revision of rec

	progress progress
	patient  bool                     // a drain whose subscriptions are all busy: it may be looked at later
	rec      switching.Record         // as last read or written
	floor    *route.Entry             // the entry that only keeps an epoch, of a topic that rules decide
	topic    Topic                    // nil before it is opened
	ways     [len(carryWays)]int      // subscriptions that it has carried, by how
	inexact  [len(inexactKinds)]int64 // what it could not carry exactly
	acks     []switching.Ack          // of the last survey
	assign   chan assignment
	brokers  *assignment
}

type assignment struct {
	brokers map[string]string
	missing int
}

func newDriver(c *Controller, missing *unseen, rec switching.Record) *driver {
	rec.Receipt = cloneReceipt(rec.Receipt)
	d := &driver{
		c: c, unseen: missing, key: switching.Key{Switch: rec.ID, Attempt: rec.Attempt}, base: rec.Topic, rec: rec, looks: make(chan struct{}, 1),
		log: c.cfg.Log.With("switch", rec.ID, "attempt", rec.Attempt, "topic", rec.Topic),
	}
	d.seen.Store(rec.Rev)
	d.drains.Store(rec.State == switching.StateDraining)
	return d
}

// take goes by a record that was read or written.
func (d *driver) take(rec switching.Record) {
	d.rec = rec
	d.seen.Store(rec.Rev)
	d.drains.Store(rec.State == switching.StateDraining)
}

func (d *driver) look() {
	select {
	case d.looks <- struct{}{}:
	default:
	}
}

// drive takes step after step until the switch is over or ctx ends.
func (d *driver) drive(ctx context.Context) {
	defer func() {
		if d.topic != nil {
			d.topic.Close()
		}
	}()
	d.log.Info("driving a switch", "mode", d.rec.Mode, "return", d.rec.Return, "from", d.rec.From, "to", d.rec.To, "state", d.rec.State, "who", cmp.Or(d.rec.WishBy, d.rec.Who), "why", d.rec.Why)
	d.prepare(ctx)
	machine, aborting := switching.NewController(d.rec), false
	refused := 0 // writes in a row that found something else, or have no answer
	for ctx.Err() == nil {
		step := machine.Next(time.Now())
		switch step.Work {
		case switching.WorkOver:
			d.over(ctx)
			return
		case switching.WorkWait:
			if paused(d.rec) {
				return
			}
			if d.patient {
				step.Until = step.Until.Add(d.c.stats.drains.patience())
			}
			changed := d.wait(ctx, step)
			machine.Observe(time.Now(), step, switching.Report{})
			if changed {
				machine.Nudge()
				if !aborting && d.abortWanted(ctx) {
					// Not every step reads the record. A new machine begins with it, and with what the map says.
					aborting, machine = true, switching.NewController(d.rec)
				}
			}
			continue
		}
		if d.c.began != nil {
			d.c.began(step)
		}
		began := time.Now()
		r, cut := d.do(ctx, step, machine.Deadline(), !aborting)
		r.Began = began
		took := time.Since(began)
		d.note(step, r, took)
		if r.Answer != switching.OK && ctx.Err() == nil {
			d.log.Debug("a step of a switch was not done", "work", step.Work, "answer", r.Answer, "why", r.Why, "took", took)
		}
		machine.Observe(time.Now(), step, r)
		switch {
		case cut:
			aborting, machine = true, switching.NewController(d.rec)
		case r.Answer == switching.Conflict || r.Answer == switching.Unknown:
			// The map is read again, and mostly that is it. What is refused again and again must not become a storm on the store.
			if refused++; refused > 1 {
				d.wait(ctx, switching.Step{Until: time.Now().Add(switching.RetryInterval)})
			}
		case step.Work == switching.WorkWrite || step.Work == switching.WorkRecord:
			refused = 0
		}
	}
}

// wait returns at the time that the step names, or true as soon as something may have changed.
func (d *driver) wait(ctx context.Context, step switching.Step) (changed bool) {
	timer := time.NewTimer(time.Until(step.Until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.looks:
		return true
	case <-ctx.Done():
	}
	return false
}

// abortWanted tells whether the operator wants the switch to be given up.
func (d *driver) abortWanted(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(store.AsOf(ctx, store.Boottime()), stepTimeout) // the step may have begun long ago
	defer cancel()
	rec, err := d.c.cfg.Store.Switch(ctx, d.key.Switch)
	return err == nil && rec.Wish == switching.WishAbort // of the next attempt too: then this one is over
}

// unlessAborted has ctx end as soon as the operator, or a failover, wants the switch to be given up: a cluster that hangs would keep the topic fenced until the deadline
// of the step. end has to be called; it tells whether that has happened.
func (d *driver) unlessAborted(ctx context.Context) (_ context.Context, end func() (wanted bool)) {
	ctx, cancel := context.WithCancel(ctx)
	looked, wanted, done := false, false, make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-d.looks:
				looked = true
				if wanted = d.abortWanted(ctx); wanted {
					cancel()
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() bool {
		cancel()
		<-done
		if looked && !wanted {
			d.look() // whoever waits next wants to know as well
		}
		return wanted
	}
}

// prepare does before the first write what would prolong the hold later: the clusters are asked which brokers have the topic, and the
// subscriptions are carried once. What it finds is looked at again, within the fence.
func (d *driver) prepare(ctx context.Context) {
	if d.rec.State == switching.StateRequested && d.rec.Return {
		d.ask(ctx, d.rec.From)
		return
	}
	if d.rec.State != switching.StateRequested || !d.begins(ctx) {
		return // a fence may be waiting: a successor of its leader has no time
	}
	if d.rec.Mode == switching.ModeDrain {
		defer d.ask(ctx, d.rec.To) // it need not have the topic yet
	} else {
		d.ask(ctx, d.rec.To)
	}
	warm, cancel := context.WithTimeout(ctx, warmTimeout)
	defer cancel()
	began := time.Now()
	warmed := make(chan error, 1)
	go func() {
		err := d.open(warm)
		if err == nil {
			err = d.topic.Warm(warm)
		}
		warmed <- err
	}()
	for {
		select {
		case <-d.looks:
			if d.abortWanted(ctx) {
				cancel()
			}
			continue
		case err := <-warmed:
			if err != nil && ctx.Err() == nil {
				d.log.Warn("the subscriptions could not be carried before the fence; it is tried again within", "err", err)
			}
			d.addStep("warm up", began, time.Since(began), errText(err))
		}
		return
	}
}

// ask has a cluster asked for the brokers of the topic.
func (d *driver) ask(ctx context.Context, cluster string) {
	found := make(chan assignment, 1)
	d.assign = found
	go func() {
		brokers, missing := d.c.cfg.Assign(ctx, cluster, d.base)
		found <- assignment{brokers, missing}
	}()
}

// begins tells whether nothing of the switch has been done yet, as of now. The list that it was found in may be seconds old, and on a cluster that
// clients use no cursor is touched (C8).
func (d *driver) begins(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(store.AsOf(ctx, store.Boottime()), stepTimeout)
	defer cancel()
	r := d.read(ctx)
	return r.Answer == switching.OK && d.rec.Attempt == d.key.Attempt && d.rec.State == switching.StateRequested && d.rec.Wish == "" &&
		r.Entry.Cluster == d.rec.From && r.Entry.State == route.StateActive
}

func (d *driver) open(ctx context.Context) error {
	if d.topic != nil {
		return nil
	}
	t, err := d.c.cfg.Open(ctx, d.rec)
	if err == nil {
		d.topic = t
	}
	return err
}

// over tells of the end.
func (d *driver) over(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	if rec, err := d.c.cfg.Store.Switch(ctx, d.key.Switch); err == nil {
		d.rec = rec
	} else if !errors.Is(err, store.ErrNotFound) {
		d.log.Warn("the record of a switch that is over cannot be read", "err", err)
	}
	if d.rec.Attempt != d.key.Attempt || !d.rec.State.Over() {
		return // somebody else's by now
	}
	d.forget(ctx)
	d.c.stats.ended(d.rec.State)
	hold := 0.0
	if d.rec.Receipt != nil {
		hold = d.rec.Receipt.HoldMillis
		if d.rec.State != switching.StateAborted {
			d.c.stats.hold.observe(hold / 1000)
			for i, n := range d.ways {
				d.c.stats.carried[i].Add(uint64(n))
			}
		}
	}
	for i, n := range d.inexact {
		// Nothing comes again because of a switch that was aborted, which what is missing does.
		if d.rec.State != switching.StateAborted || inexactKinds[i] == "missing" {
			d.c.stats.inexact[i].Add(uint64(n))
		}
	}
	d.log.Info("a switch is over", "mode", d.rec.Mode, "state", d.rec.State, "from", d.rec.From, "to", d.rec.To, "epoch", d.rec.Epoch, "hold_ms", hold, "note", d.rec.Note)
	if d.c.cfg.Receipt != nil {
		d.c.cfg.Receipt(d.rec)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
