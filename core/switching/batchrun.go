package switching

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// BatchDo is what a BatchRun wants done.
type BatchDo uint8

// The kinds of work of a batch. All but checks and switches are done one at a time.
const (
	// BatchWait: call Next again at Until (zero: when something has ended, or the record has changed).
	BatchWait BatchDo = iota
	// BatchCheck: run the first preflight of Item. Report with Checked.
	BatchCheck
	// BatchStart: begin the switch of Item, after another preflight, and see to it until it is over. Report with Ended. Of a batch that is given up: only a switch that has begun, which is given up as well.
	BatchStart
	// BatchMeasure: look how much replication has to send of Next, the topics that come next. Report with Measured.
	BatchMeasure
	// BatchSettle, of mode drain: look in the map whether any topic of the batch drains, and which ones are not on the new cluster any more. Report with Settled.
	BatchSettle
	// BatchRule: look for topics of the namespace that are still on the old cluster (report with Found), else write its rule (report with Ruled).
	BatchRule
	// BatchWrite: something of the record that others have to see has changed: a pause, another wave, an end. Write it, now.
	BatchWrite
	// BatchOver: nothing more. The record and the parts are as they stay.
	BatchOver
)

func (d BatchDo) String() string {
	return [...]string{"wait", "check", "start", "measure", "settle", "rule", "write", "over"}[d]
}

// BatchStep is the next work of a batch.
type BatchStep struct {
	Do    BatchDo
	Item  int   // of BatchCheck and BatchStart
	Next  []int // of BatchMeasure
	Until time.Time
	Why   string // of BatchWait: who or what is waited for
}

// ItemEnd is how one topic's work has ended.
type ItemEnd struct {
	State ItemState // checked or blocked of a check; moved, failed, blocked or skipped of a switch
	Note  string
	// Away: it is blocked by nothing but proxies of the roster that are not there now. One that was killed may be back in a moment.
	Away bool
	// Inherited: its switch was under way when this leader came. How long it has held its topic is no reason to pause, and one that is aborted is begun again.
	Inherited bool
	// Troubled: it has moved, and its switch is incomplete.
	Troubled bool
	// Attempt of its switch, of one that was aborted or taken back: a later one begins anew. It may be later than the item's, which was written down before.
	Attempt    uint32
	HoldMillis float64   // of a switch that has held the topic; 0 otherwise
	Forecast   *Forecast // of a check
}

const (
	// BatchCheckParallel is how many preflights of one batch run at once.
	BatchCheckParallel = 16
	// MeasureInterval is how often replication is looked at between two waves and within one.
	MeasureInterval = 10 * time.Second
	// measured is how many topics are looked at.
	measured = 8
	// holdsKept is how many holds a percentile is of, endsKept how many ends a pace.
	holdsKept, endsKept = 1000, 200
	// maxRounds is how often new topics of a namespace are moved before its rule; then somebody should stop who makes them.
	maxRounds = 5
	// AwayLimit is how long a batch that moves waits for proxies that are not there, before it pauses; awayRetry how long until it looks again.
	AwayLimit = 5 * time.Minute
	awayRetry = 5 * time.Second
)

// BatchRun decides which topics of a batch begin, and when it pauses. It is owned by the leader's one goroutine for the batch:
//
//	for {
//		step := r.Next(now)
//		… do it; report with the method that the step names
//	}
//
// A new leader makes a new one from what is stored: topics whose end is not stored yet are begun again, which finds their switches (Batch.SwitchID).
type BatchRun struct {
	b     Batch
	items []BatchItem
	dirty []bool // items that differ from what is stored

	busy    map[int]bool // items whose check or switch is under way
	next    int          // no item before it waits for its turn in this stage
	begin   time.Time    // when the next switch may begin
	away    time.Time    // since when it waits for proxies that are not there; zero: it does not
	written bool         // the record is as others have to see it
	counted bool         // its counts are not as they are stored

	ease      ease
	holds     []float64 // the last ones, since the last resume
	p50, p99  float64   // of holds
	ends      []time.Time
	judged    int // switches that have ended since the last resume, and how many of them with trouble
	troubled  int
	lookAt    time.Time // when replication is to be looked at again
	looked    bool      // it has been, since the last wave
	looking   bool
	ruling    bool
	rounds    int
	overtaken bool // another leader has ended it: this one was frozen
	unbegun   int  // of a batch that is given up: topics that were checked and that nobody has begun, since one that somebody has
}

// NewBatchRun goes on with a batch from what is stored of it. It takes over items.
func NewBatchRun(b Batch, items []BatchItem) *BatchRun {
	r := &BatchRun{b: b, items: items, dirty: make([]bool, len(items)), busy: map[int]bool{}, written: true}
	r.b.Ends = slices.Clone(b.Ends)
	for i, end := range r.b.Ends {
		r.b.Ends[i] = min(end, len(items)) // what a frozen leader has written over was found for the rule, and is found again
	}
	if n := len(b.Ends); n > 0 && b.Ends[n-1] < len(items) {
		r.b.Ends, r.written = append(r.b.Ends, len(items)), false // topics that were found for the rule: their leader died before it wrote that
	}
	if b.State == BatchMoving && b.Note != "" {
		r.b.Note, r.written = "", false // what a leader before has waited for may be there now
	}
	r.recount()
	if first := r.firstLeft(); first >= 0 && (b.State == BatchDraining || b.State == BatchRuling || b.State == BatchMoving && r.waveOf(first) < b.Wave) {
		// A leader that was frozen has written a part late: what it says of topics that have ended is to be found out again.
		r.b.State, r.b.Wave, r.written = BatchMoving, r.waveOf(first), false
	} else if b.State == BatchRuling && b.Mode == ModeDrain {
		r.b.State, r.written = BatchDraining, false // that nothing drains may have been written by a leader that was frozen
	}
	return r
}

// Batch is the record as it should be stored, Rev apart.
func (r *BatchRun) Batch(now time.Time) Batch {
	b := r.b
	b.Count.Running = 0
	b.AtOnce = 0
	if b.State == BatchMoving {
		b.Count.Running = len(r.busy)
		if limit := r.parallel(); r.ease.most(limit) < limit {
			b.AtOnce = r.ease.most(limit)
		}
	}
	if len(r.holds) > 0 {
		b.HoldP50, b.HoldP99 = r.p50, r.p99
	}
	b.ETA = r.eta(now)
	return b
}

// Items are the topics. They are read only.
func (r *BatchRun) Items() []BatchItem { return r.items }

// Busy tells whether work on an item is under way.
func (r *BatchRun) Busy(i int) bool { return r.busy[i] }

// AnyBusy tells whether any is.
func (r *BatchRun) AnyBusy() bool { return len(r.busy) > 0 || r.looking || r.ruling }

// Dirty tells whether one of the items from, up to and without to, differs from what is stored; Saved that they no longer do.
func (r *BatchRun) Dirty(from, to int) bool { return slices.Contains(r.dirty[from:to], true) }

// Saved notes that the items from, up to and without to, are stored as they are.
func (r *BatchRun) Saved(from, to int) { clear(r.dirty[from:to]) }

// Observe takes a record that somebody else has written over the one that this run goes by: only what operators may change counts, and that it is over.
func (r *BatchRun) Observe(b Batch) {
	r.b.Rev, r.b.Abort, r.b.Pause, r.b.WishBy, r.b.Resumed, r.b.Limits = b.Rev, b.Abort, b.Pause, b.WishBy, b.Resumed, b.Limits
	if over := b.State.Over(); over || r.b.State.Over() {
		r.overtaken, r.written = over, r.written || over
		r.b.State, r.b.Ended, r.b.Note = b.State, b.Ended, b.Note
		if over {
			r.b.Retried = b.Retried
		}
	}
}

// Overtaken tells, of a batch that is over, that another leader has ended it: what this run knows is older, and must not be stored.
func (r *BatchRun) Overtaken() bool { return r.overtaken }

// Wrote notes that the record is stored at a revision.
func (r *BatchRun) Wrote(rev uint64) { r.b.Rev, r.written, r.counted = rev, true, false }

// Next is what is to be done now.
func (r *BatchRun) Next(now time.Time) BatchStep {
	r.retry(now)
	if !r.written && !r.overtaken {
		return BatchStep{Do: BatchWrite}
	}
	switch {
	case r.b.State.Over():
		return BatchStep{Do: BatchOver}
	case r.b.Abort:
		if i, ok := r.begun(); ok {
			r.busy[i] = true
			return BatchStep{Do: BatchStart, Item: i}
		}
		if r.AnyBusy() {
			return BatchStep{Why: "the switches that have begun"}
		}
		if n := r.b.Count.Draining; n > 0 {
			r.b.Note = fmt.Sprintf("%s to drain, each by its own switch (`pointsman switch list`)", count(n, "topic goes on", "topics go on"))
		}
		return r.end(now, BatchAborted)
	case r.b.Pause != nil:
		return BatchStep{Why: "somebody to resume it"}
	case r.b.State == BatchChecking:
		return r.check(now)
	case r.b.State == BatchMoving:
		return r.move(now)
	case r.b.State == BatchDraining:
		return r.drain(now)
	case r.b.State == BatchRuling:
		if r.ruling || len(r.busy) > 0 {
			return BatchStep{Why: "the rule of the namespace"}
		}
		r.ruling = true
		return BatchStep{Do: BatchRule}
	}
	return BatchStep{Why: "its topics to be written down"}
}

// Checked reports the end of a BatchCheck.
func (r *BatchRun) Checked(i int, e ItemEnd) {
	delete(r.busy, i)
	r.set(i, e)
	r.b.Forecast.Add(e.Forecast)
}

// Ended reports the end of a BatchStart.
func (r *BatchRun) Ended(now time.Time, i int, e ItemEnd) {
	delete(r.busy, i)
	if e.State != ItemWaiting {
		r.unbegun = 0
	} else if r.items[i].State == ItemChecked { // others wait again, and may do so in front of one that has begun
		r.unbegun++
	}
	if e.State == ItemFailed && e.Inherited && !r.b.Abort {
		r.set(i, ItemEnd{})
		r.items[i].Attempt = max(r.items[i].Attempt, e.Attempt, 1) + 1
		r.next = min(r.next, i)
		return
	}
	if e.State == ItemBlocked && e.Away && !r.b.Abort {
		r.set(i, ItemEnd{})
		r.next = min(r.next, i)
		r.awaitProxies(now, e.Note)
		return
	}
	r.back()
	r.set(i, e)
	if e.State == ItemWaiting && !r.b.Abort { // the batch was given up when its turn came, and goes on after all
		r.next = min(r.next, i)
	}
	if e.HoldMillis > 0 && !e.Inherited {
		r.holds = keep(r.holds, e.HoldMillis, holdsKept)
		r.p50, r.p99 = quantile(r.holds, 0.5), quantile(r.holds, 0.99)
		r.ease.ended(e.HoldMillis, len(r.busy), r.parallel())
	}
	switch {
	case e.State == ItemMoved:
		r.ends = keep(r.ends, now, endsKept)
		r.judged++
	case e.State == ItemFailed:
		r.judged++
		r.troubled++
	case e.State == ItemBlocked && r.b.Limits.OnBlocked != SkipOnBlocked:
		r.hold(now, GatePreflight, fmt.Sprintf("%s cannot move: %s", r.items[i].Topic, e.Note))
	}
	if e.Troubled {
		r.b.Count.Troubled++
		r.troubled++
	}
}

// awaitProxies has the next switch wait for proxies that are not there: that is no fault of its topic, which is neither left behind nor a reason for somebody
// to get up, unless it takes long.
func (r *BatchRun) awaitProxies(now time.Time, why string) {
	if r.b.Pause != nil {
		return
	}
	if r.away.IsZero() {
		r.away, r.b.Note, r.written = now, CutNote("waits: "+why), false
	}
	if now.Sub(r.away) >= AwayLimit {
		r.hold(now, GatePreflight, fmt.Sprintf("it has waited for %s: %s", now.Sub(r.away).Round(time.Second), why))
		r.back()
		return
	}
	r.begin = now.Add(awayRetry)
}

// back ends such a wait.
func (r *BatchRun) back() {
	if !r.away.IsZero() {
		r.away, r.b.Note, r.written = time.Time{}, "", false
	}
}

// Measured reports how many entries of the topics looked at are not replicated yet: of the worst one, which it names.
func (r *BatchRun) Measured(now time.Time, backlog int64, topic string) {
	r.looking, r.looked, r.lookAt = false, true, now.Add(MeasureInterval)
	if limit := r.b.Limits.MaxBacklog; limit > 0 && backlog > limit {
		r.looked = false
		r.hold(now, GateBacklog, fmt.Sprintf("%d entries of %s are not replicated yet, more than %d", backlog, topic, limit))
	}
}

// Found reports topics of the namespace that are on the old cluster and not in the batch: they move before the rule is written.
func (r *BatchRun) Found(now time.Time, topics []BatchItem) {
	r.ruling = false
	r.rounds++
	if r.rounds > maxRounds {
		names := make([]string, 0, MaxBatchListed)
		for _, it := range topics[:min(len(topics), MaxBatchListed)] {
			names = append(names, it.Topic)
		}
		r.rounds = 0
		r.hold(now, GateNamespace, fmt.Sprintf("new topics keep appearing on the old cluster: %s; stop what creates them, and resume", CutNote(strings.Join(names, ", "))))
		return
	}
	r.items = append(r.items, topics...)
	r.dirty = append(r.dirty, slices.Repeat([]bool{true}, len(topics))...)
	r.b.Ends = append(r.b.Ends, len(r.items))
	r.b.Wave = len(r.b.Ends) - 1
	r.b.State, r.written = BatchMoving, false
	r.recount()
}

// Ruled reports that the rule of the namespace is written, at that epoch, in place of so many entries; note is what was found afterwards.
func (r *BatchRun) Ruled(now time.Time, epoch uint64, removed int, note string) {
	r.ruling = false
	r.b.Ruled, r.b.Rule, r.b.Removed, r.b.Note = true, epoch, r.b.Removed+removed, note
	r.end(now, BatchDone)
}

// Unruled reports that the rule could not be written: it is tried again after a resume.
func (r *BatchRun) Unruled(now time.Time, why string) {
	r.ruling = false
	r.hold(now, GateNamespace, why)
}

// check is the stage before anything moves.
func (r *BatchRun) check(now time.Time) BatchStep {
	if len(r.busy) < BatchCheckParallel {
		for ; r.next < len(r.items); r.next++ {
			if r.items[r.next].State == ItemWaiting && !r.busy[r.next] {
				r.busy[r.next] = true
				return BatchStep{Do: BatchCheck, Item: r.next}
			}
		}
	}
	if len(r.busy) > 0 {
		return BatchStep{Why: "preflights"}
	}
	if n := r.b.Count.Blocked; n > 0 && r.b.Limits.OnBlocked != SkipOnBlocked {
		first := slices.IndexFunc(r.items, func(it BatchItem) bool { return it.State == ItemBlocked })
		r.hold(now, GatePreflight, fmt.Sprintf("%d of %d topics cannot move, and nothing has; the first is %s: %s", n, len(r.items), r.items[first].Topic, r.items[first].Note))
		return BatchStep{Do: BatchWrite}
	}
	r.b.State, r.b.Moving, r.next, r.written = BatchMoving, now, 0, false
	if first := r.firstLeft(); first >= 0 {
		r.b.Wave = r.waveOf(first) // of a batch that was over, and is checked again
	}
	return BatchStep{Do: BatchWrite}
}

// move is the stage of the waves.
func (r *BatchRun) move(now time.Time) BatchStep {
	if gate, why := r.gate(); gate != "" {
		r.hold(now, gate, why)
		return BatchStep{Do: BatchWrite}
	}
	for r.next < r.waveEnd() && (r.items[r.next].State.Over() || r.busy[r.next]) {
		r.next++
	}
	switch {
	case r.next < r.waveEnd():
	case len(r.busy) > 0:
		return BatchStep{Why: fmt.Sprintf("the end of wave %d", r.b.Wave+1)}
	case r.b.Wave+1 < len(r.b.Ends):
		r.b.Wave++
		r.looked, r.written = false, false
		return BatchStep{Do: BatchWrite}
	default:
		return r.finish(now)
	}
	if r.b.Limits.MaxBacklog > 0 && !r.looking && (!r.looked || !now.Before(r.lookAt)) {
		r.looking = true
		return BatchStep{Do: BatchMeasure, Next: r.coming()}
	}
	switch {
	case r.looking && !r.looked: // of a new wave
		return BatchStep{Why: "a look at replication"}
	case r.b.Count.Draining+len(r.busy) >= MaxBatchDraining: // of other modes there are none
		return BatchStep{Why: fmt.Sprintf("%d topics to drain; no more than that may do so at once", r.b.Count.Draining)}
	case len(r.busy) >= r.ease.most(r.parallel()):
		if r.looking { // its end is reported
			return BatchStep{Why: "switches under way"}
		}
		return BatchStep{Until: r.lookAt, Why: "switches under way"}
	case now.Before(r.begin) && !r.away.IsZero():
		return BatchStep{Until: r.begin, Why: "proxies that are not there"}
	case now.Before(r.begin):
		return BatchStep{Until: r.begin, Why: "its pace"}
	}
	if r.b.Limits.Pace > 0 {
		gap := time.Duration(float64(time.Second) / r.b.Limits.Pace)
		if r.begin = r.begin.Add(gap); r.begin.Before(now) {
			r.begin = now.Add(gap)
		}
	}
	i := r.next
	r.busy[i] = true
	return BatchStep{Do: BatchStart, Item: i}
}

// parallel is how many switches the batch may have under way at once by its limits.
func (r *BatchRun) parallel() int { return min(max(r.b.Limits.Parallel, 1), MaxBatchParallel) }

// waveEnd is where the wave under way ends.
func (r *BatchRun) waveEnd() int {
	if r.b.Wave >= len(r.b.Ends) {
		return len(r.items)
	}
	return r.b.Ends[r.b.Wave]
}

// coming are some of the topics that begin next.
func (r *BatchRun) coming() (next []int) {
	for i := r.next; i < len(r.items) && len(next) < measured; i++ {
		if !r.items[i].State.Over() && !r.busy[i] {
			next = append(next, i)
		}
	}
	return next
}

// gate is what stops a batch whose topics move.
func (r *BatchRun) gate() (BatchGate, string) {
	l := r.b.Limits
	if r.troubled > 0 && float64(r.troubled) > l.MaxFailed*float64(r.judged) {
		return GateFailed, fmt.Sprintf("%d of %d switches were aborted or are incomplete, more than %s", r.troubled, r.judged, percent(l.MaxFailed))
	}
	if l.MaxHoldMillis > 0 && len(r.holds) > 0 && r.p99 > l.MaxHoldMillis {
		return GateHold, fmt.Sprintf("publishers wait %.0f ms (99th percentile of the last %d switches), more than %.0f ms", r.p99, len(r.holds), l.MaxHoldMillis)
	}
	return "", ""
}

func percent(share float64) string { return fmt.Sprintf("%g%%", share*100) }

// hold pauses the batch. The first reason stays.
func (r *BatchRun) hold(now time.Time, gate BatchGate, why string) {
	if r.b.Pause == nil {
		r.b.Pause, r.written = &BatchPause{Gate: gate, Why: why, At: now}, false
	}
}

// retry takes up a resume: what was found until then does not count any more, and what failed or was blocked has its turn again.
func (r *BatchRun) retry(now time.Time) {
	if r.b.Retried == r.b.Resumed {
		return
	}
	r.b.Retried, r.written, r.next = r.b.Resumed, false, 0
	r.back()
	r.holds, r.ends, r.judged, r.troubled, r.looked, r.rounds, r.unbegun, r.begin, r.ease = nil, nil, 0, 0, false, 0, 0, now, ease{}
	for i := range r.items {
		it := &r.items[i]
		if r.busy[i] || it.State != ItemFailed && (it.State != ItemBlocked || r.b.Limits.OnBlocked == SkipOnBlocked) {
			continue
		}
		if it.State == ItemFailed {
			it.Attempt = max(it.Attempt, 1) + 1
		}
		it.State, it.Note, r.dirty[i] = ItemWaiting, "", true
	}
	r.recount()
	if r.b.State == BatchChecking {
		return
	}
	r.b.State = BatchMoving
	if first := r.firstLeft(); first >= 0 {
		r.b.Wave = r.waveOf(first)
	}
}

// firstLeft is the first topic that the batch has still to do with; -1 without one.
func (r *BatchRun) firstLeft() int {
	return slices.IndexFunc(r.items, func(it BatchItem) bool { return !it.State.Over() })
}

// begun is a topic of a batch that is given up whose switch a leader before this one may have begun: it is looked for, to be given up as well. Topics begin in their order, and no more
// at once than the limits say, so that the search ends soon.
func (r *BatchRun) begun() (int, bool) {
	if r.b.State != BatchMoving || r.unbegun >= r.parallel() || len(r.busy) >= 2*r.parallel() {
		return 0, false
	}
	for r.next < len(r.items) && (r.items[r.next].State.Over() || r.busy[r.next]) {
		r.next++
	}
	if r.next == len(r.items) {
		return 0, false
	}
	r.next++ // it is looked for once
	return r.next - 1, true
}

// waveOf is the wave that an item is in.
func (r *BatchRun) waveOf(i int) int {
	for w, end := range r.b.Ends {
		if i < end {
			return w
		}
	}
	return max(len(r.b.Ends)-1, 0)
}

// finish is what comes after the last wave.
func (r *BatchRun) finish(now time.Time) BatchStep {
	switch c := r.b.Count; {
	case r.b.Mode == ModeDrain && r.b.State == BatchMoving && c.Moved > 0:
		r.b.State, r.lookAt, r.written = BatchDraining, now, false
		return BatchStep{Do: BatchWrite}
	case c.Blocked+c.Failed > 0:
		if r.b.Namespace != "" {
			r.b.Note = "not all topics have moved, so the namespace has no rule; " + r.hint()
		} else {
			r.b.Note = r.hint()
		}
		return r.end(now, BatchIncomplete)
	case r.b.Namespace != "" && !r.b.Ruled:
		r.b.State, r.written = BatchRuling, false
		return BatchStep{Do: BatchWrite}
	case c.Troubled > 0:
		return r.end(now, BatchIncomplete)
	}
	return r.end(now, BatchDone)
}

func (r *BatchRun) hint() string {
	return fmt.Sprintf("`pointsman switch resume %s` tries those again that have not", r.b.ID)
}

func (r *BatchRun) end(now time.Time, s BatchState) BatchStep {
	if c := r.b.Count; s == BatchDone && c.Troubled+c.Failed+c.Blocked > 0 {
		s = BatchIncomplete
	}
	r.b.State, r.b.Ended, r.b.Pause, r.b.Abort, r.written = s, now, nil, false, false
	return BatchStep{Do: BatchWrite}
}

// set notes what has become of an item.
func (r *BatchRun) set(i int, e ItemEnd) {
	r.count(i, -1)
	r.items[i].State, r.items[i].Note, r.dirty[i] = e.State, CutNote(e.Note), true
	r.items[i].Attempt = max(r.items[i].Attempt, e.Attempt)
	r.count(i, 1)
}

// count adds an item to the counts, or takes it out.
func (r *BatchRun) count(i, n int) {
	c := &r.b.Count
	switch r.items[i].State {
	case ItemBlocked:
		c.Blocked += n
		c.Checked += n
	case ItemSkipped:
		c.Skipped += n
		c.Checked += n
	case ItemMoved:
		c.Moved += n
		c.Checked += n
	case ItemFailed:
		c.Failed += n
		c.Checked += n
	case ItemChecked:
		c.Checked += n
	}
}

func (r *BatchRun) recount() {
	r.b.Count = BatchCount{Total: len(r.items), Troubled: r.b.Count.Troubled, Draining: r.b.Count.Draining}
	for i := range r.items {
		r.count(i, 1)
	}
}

// eta is when the batch would end at the pace of its last topics.
func (r *BatchRun) eta(now time.Time) time.Time {
	left := r.b.Count.Left()
	if r.b.State != BatchMoving || r.b.Pause != nil || left == 0 || len(r.ends) < 2 {
		return time.Time{}
	}
	each := now.Sub(r.ends[0]) / time.Duration(len(r.ends)-1)
	if p := r.b.Limits.Pace; p > 0 {
		each = max(each, time.Duration(float64(time.Second)/p))
	}
	return now.Add(each * time.Duration(left)).Truncate(time.Second)
}

// keep appends to a list of which only the last n are kept.
func keep[T any](list []T, v T, n int) []T {
	if len(list) >= n {
		list = slices.Delete(list, 0, len(list)-n+1)
	}
	return append(list, v)
}

// quantile is the value below which the share q of all lies; 0 of none.
func quantile(all []float64, q float64) float64 {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(int(math.Ceil(q*float64(len(sorted)))), len(sorted))-1]
}
