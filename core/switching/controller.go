package switching

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
)

// Controller decides one attempt of one planned switch: from what was observed to the next step. It is a value: copy and compare
// it freely. Whoever leads drives one, and only one step at a time:
//
//	for {
//		step := c.Next(now)
//		c.Observe(now, step, do(step))
//	}
//
// A leader begins with New, whatever another leader has done: the first step reads the entry, which is the truth (C7). Two leaders
// at once do no harm: every write replaces exactly what this attempt wrote before (C6).
type Controller struct {
	topic, from, to string
	key             Key
	epoch           uint64 // that the flip writes
	rev             uint64 // of the record, as last read or written
	wish            Wish
	wishBy          string
	stage           stage
	base            route.Entry // the entry that prepare replaces; zero when absent
	// Until when the topic may be prepared and fenced, and the proxies may take to report the eviction; zero before.
	preparedBy, fencedBy, evictedBy time.Time
	due                             time.Time // not before: the next look at what was not yet so
	waiting                         string    // for whom or what
	abort                           string    // why it must go back
	claims                          string    // names of the producers that proxies have on the old cluster, one a line
	tail                            string
	evicted                         bool
	notes                           string // for the receipt
	end                             State  // of stageEnd

	drains bool   // mode drain
	back   bool   // it leads back: from, to and epoch are those of the way back
	drain  string // the text of the route.Drain that the map has, or is to have
	// Until when subscriptions may be about to leave, and when those may try again that did not; zero before.
	leaveBy, leaveAgain time.Time
}

// stage is what the controller believes to be at. Only stageRead learns it from the entry.
type stage uint8

const (
	stageRead      stage = iota
	stagePutBack         // of a way back, as the next two
	stageMayReturn       // and nothing is held yet
	stageCopy
	stageRequested
	stagePrepared
	stageFence
	stageFenced
	stageEvict
	stageTail
	stageUntouched // of a way back
	stageReplicated
	stageCarry
	stageReadBack
	stageTailAgain
	stageFlip
	stageFlipped
	stageVerify
	stageDrain // of a drain, as the next three
	stageLook
	stageChange
	stageEmpty
	stageEnd
	stageOver
)

// RetryInterval is how long a controller waits after the store refused.
const RetryInterval = 200 * time.Millisecond

// LookInterval is how often a controller looks again at what was not yet so, without a Nudge.
const LookInterval = 20 * time.Millisecond

// PauseInterval is how often it looks whether a pause has ended.
const PauseInterval = time.Second

// NewController drives the attempt that rec asks for. Of rec only what never changes within an attempt is taken: a leader may
// have read it long ago.
func NewController(rec Record) Controller {
	c := Controller{topic: rec.Topic, from: rec.From, to: rec.To, key: Key{rec.ID, rec.Attempt}, epoch: rec.Epoch}
	c.direct(rec)
	return c
}

// Over tells that nothing is left to do.
func (c Controller) Over() bool { return c.stage == stageOver }

// Deadline is until when work on the clusters may go on: the topic is fenced meanwhile, and is given back then. It is zero when nobody waits for it.
func (c Controller) Deadline() time.Time {
	if c.stage < stageFenced || c.stage > stageFlip {
		return time.Time{}
	}
	return c.fencedBy
}

// Nudge makes the next look due: an ack, the roster or the record has changed.
func (c *Controller) Nudge() { c.due = time.Time{} }

// Next is the step to take now.
func (c Controller) Next(now time.Time) Step {
	if now.Before(c.due) && c.stage != stageOver {
		return Step{Work: WorkWait, Until: c.due, Why: c.waiting}
	}
	if c.stage >= stagePrepared && c.stage <= stageFlip {
		if why := c.reason(now); why != "" {
			return c.giveUp(why)
		}
	}
	switch c.stage {
	case stageRead:
		return Step{Work: WorkRead}
	case stageRequested:
		if why := c.reason(now); why != "" {
			return c.giveUpUnprepared(why)
		}
		return c.write(c.base, c.entry(route.StatePrepared), StatePrepared, "")
	case stagePrepared, stageFenced:
		return Step{Work: WorkSurvey}
	case stageFence:
		return c.write(c.entry(route.StatePrepared), c.entry(route.StateFenced), StateFenced, "")
	case stageEvict:
		return Step{Work: WorkEvict, Return: c.back}
	case stageTail:
		return Step{Work: WorkTail, Return: c.back}
	case stageReplicated:
		return Step{Work: WorkReplicated, Tail: c.tail}
	case stageCarry:
		if c.back {
			return Step{Work: WorkCopy, Tail: c.tail, Drain: c.drain, Return: true}
		}
		return Step{Work: WorkCarry, Tail: c.tail}
	case stageReadBack:
		return Step{Work: WorkReadBack, Tail: c.tail}
	case stageTailAgain:
		return Step{Work: WorkTailAgain, Tail: c.tail, Return: c.back}
	case stageFlip:
		return c.write(c.entry(route.StateFenced), c.flippedEntry(), StateEvicting, c.notes)
	case stageFlipped:
		return Step{Work: WorkSurvey}
	case stageVerify:
		return Step{Work: WorkVerify, Tail: c.tail}
	case stageEnd:
		return c.record(c.end, c.notes)
	case stageOver:
		return Step{Work: WorkOver}
	}
	return c.nextOfDrain(now)
}

// entry is the entry of this attempt on the old cluster.
func (c Controller) entry(s route.State) route.Entry {
	e := route.Entry{Topic: c.topic, Cluster: c.from, State: s, Epoch: c.epoch - 1, SwitchID: c.key.Switch, Attempt: c.key.Attempt}
	if c.back && s != route.StateActive {
		e.Drain = c.drain
	}
	return e
}

// inMap is the state that the map has at the present stage.
func (c Controller) inMap() route.State {
	if c.stage <= stageFence {
		return route.StatePrepared
	}
	return route.StateFenced
}

func (c Controller) write(before, after route.Entry, s State, note string) Step {
	return Step{Work: WorkWrite, Before: before, After: after, Record: RecordState{Rev: c.rev + 1, Attempt: c.key.Attempt, State: s, Note: note, Return: c.back}}
}

func (c Controller) record(s State, note string) Step {
	return Step{Work: WorkRecord, Record: RecordState{Rev: c.rev + 1, Attempt: c.key.Attempt, State: s, Note: note, Return: c.back}}
}

// reason is why the switch must go back; "" when it need not.
func (c Controller) reason(now time.Time) string {
	state, by := "prepared", c.preparedBy
	if c.stage >= stageFenced {
		state, by = "fenced", c.fencedBy
	}
	switch {
	case c.abort != "":
		return c.abort
	case c.wish == WishAbort:
		return "aborted by " + cmp.Or(c.wishBy, "the operator")
	case c.stage >= stagePrepared && !now.Before(by):
		why := "the time that a topic may be " + state + " is over"
		if c.waiting != "" {
			why += ": " + c.waiting
		}
		return why
	}
	return ""
}

// Observe takes what became of step.
func (c *Controller) Observe(now time.Time, step Step, r Report) {
	switch {
	case step.Work == WorkOver:
		return
	case step.Work == WorkWait:
		if c.stage <= stageRequested {
			c.stage = stageRead // what does the operator want by now?
		}
		return
	}
	if r.Late && c.waiting != "" {
		return // the next step goes back, and says why
	}
	c.due, c.waiting = time.Time{}, ""
	switch {
	case r.Answer == NotYet && step.Work.onStore():
		c.due, c.waiting = now.Add(RetryInterval), r.Why
		return
	case r.Answer != OK && step.Work == WorkDrained:
		c.lookAgain(now, DrainInterval, r.Why)
		return
	case r.Answer == NotYet && c.stage < stageRequested:
		c.due, c.waiting = now.Add(RetryInterval), r.Why
		return
	case r.Answer == NotYet:
		c.due, c.waiting = now.Add(LookInterval), r.Why
		if step.Work == WorkReadBack {
			c.stage = stageCarry
		}
		return
	case r.Answer == Never && step.Work.onStore():
		// The store will say so again, of the abort as well: only what the map says now helps.
		c.abort, c.stage, c.due = r.Why, stageRead, now.Add(RetryInterval)
		return
	case r.Answer == Never && step.Work != WorkVerify:
		c.abort = r.Why
		return
	}
	switch step.Work {
	case WorkRead:
		c.reconcile(now, r)
	case WorkWrite:
		c.wrote(now, step, r)
	case WorkRecord:
		c.rev = step.Record.Rev
		if c.stage = stageOver; r.Answer == Conflict || r.Answer == Unknown || !step.Record.State.Over() && !c.gaveUp(step) {
			c.stage = stageRead
		}
	case WorkSurvey:
		c.hear(r.Record)
		switch {
		case r.Record.Attempt != c.key.Attempt || r.Record.Return != c.back || r.Record.State.Over():
			c.stage = stageRead
		case c.wish == WishAbort && c.stage != stageFlipped: // Next goes back
		case c.stage == stagePrepared:
			c.judgePrepared(now, r.Survey)
		case c.stage == stageFenced:
			c.judgeFenced(now, r.Survey)
		default:
			c.judgeEvicted(now, r.Survey)
		}
	case WorkEvict:
		c.evicted, c.claims, c.stage = true, "", stageTail
	case WorkTail:
		c.tail, c.stage = r.Tail, c.afterTail()
		c.noteTails(r.Tails)
	case WorkReplicated:
		c.stage = stageCarry
	case WorkCarry:
		if c.stage = c.afterCarry(); c.drains {
			c.noteSubs(r.Subs)
		}
	case WorkReturnable:
		c.stage = map[stage]stage{stageMayReturn: stageCopy, stageUntouched: stageCarry}[c.stage]
	case WorkCopy:
		c.stage = map[stage]stage{stageCopy: stageRequested, stageCarry: stageTailAgain}[c.stage]
	case WorkDrained:
		c.judgeDrained(now, r.Drained)
	case WorkReadBack:
		c.stage = stageTailAgain
	case WorkTailAgain:
		if r.Foreign != "" {
			c.abort = fmt.Sprintf("somebody writes to cluster %s past the proxies: %s; send it through a proxy, then switch again", c.from, r.Foreign)
			return
		}
		c.judgePublishers(now, r.Publishers)
	case WorkVerify:
		c.addNote(r.Why)
		c.stage = stageEnd
	}
}

// hear takes what the record says of the operator's wish, and which revision that was.
func (c *Controller) hear(rec RecordState) { c.rev, c.wish, c.wishBy = rec.Rev, rec.Wish, rec.WishBy }

// wrote takes the outcome of a write of entry and record.
func (c *Controller) wrote(now time.Time, step Step, r Report) {
	s := step.Record.State
	if c.gaveUp(step) {
		if c.abort = c.reason(now); c.abort == "" {
			c.abort = step.Record.Note
		}
	}
	// The time runs from the sending: the write may have been done long before its answer.
	switch {
	case r.Answer == Conflict:
	case s == StatePrepared:
		earliest(&c.preparedBy, r.Began.Add(PrepareLimit))
	case s == StateFenced:
		earliest(&c.fencedBy, r.Began.Add(FenceLimit))
	}
	if r.Answer != OK {
		// C6: nothing is assumed. A write whose outcome is unknown may even come later; then it finds what we write from here on, and
		// fails.
		c.stage = stageRead
		return
	}
	c.rev = step.Record.Rev
	switch s {
	case StatePrepared:
		c.stage = stagePrepared
	case StateFenced:
		c.stage = stageFenced
	case StateEvicting:
		c.flipped(now)
	case StateAborted, StateDone:
		c.stage = stageOver
	case StateRequested:
		c.stage = stageRead
	case StateDraining:
		if c.stage = stageRead; c.back {
			c.stage = stageOver
		} else {
			c.due = now.Add(LeaveInterval) // proxies need a moment
		}
	}
}

// earliest sets a deadline unless there is one: nothing that a controller meets on the way prolongs it.
func earliest(deadline *time.Time, to time.Time) {
	if deadline.IsZero() {
		*deadline = to
	}
}

func (c *Controller) flipped(now time.Time) {
	c.stage = stageFlipped
	earliest(&c.evictedBy, now.Add(EvictLimit))
}

// reconcile goes on from what the map says (C7). The record decides only when the entry is not of this attempt.
func (c *Controller) reconcile(now time.Time, r Report) {
	if c.drains {
		c.reconcileDrain(now, r)
		return
	}
	e, rec := r.Entry, r.Record
	c.hear(rec)
	mine := !r.Absent && KeyOf(e) == c.key
	switch {
	case rec.Attempt != c.key.Attempt:
		c.stage = stageOver // the next attempt is somebody else's work
	case mine && c.goesOn(now, e):
	case rec.State.Over():
		c.stage = stageOver
	case mine && e.Cluster == c.to:
		c.flipped(now)
	case mine:
		c.finish(StateAborted, "aborted; the record was mended from the map")
	case rec.State == StateEvicting:
		c.finish(StateIncomplete, "overtaken by "+by(e))
	case rec.State == StateRequested && e.Cluster == c.from && e.State == route.StateActive && e.Epoch+1 == c.epoch:
		c.begin(now, r)
	default:
		c.finish(StateAborted, fmt.Sprintf("the topic is %s on cluster %s at epoch %d, changed by %s; plan the switch again", stateName(e.State), e.Cluster, e.Epoch, by(e)))
	}
}

// goesOn takes up an entry of this attempt that is prepared or fenced; of any other it changes nothing.
func (c *Controller) goesOn(now time.Time, e route.Entry) bool {
	switch e {
	case c.entry(route.StatePrepared):
		c.stage = stagePrepared
		earliest(&c.preparedBy, now.Add(PrepareLimit))
	case c.entry(route.StateFenced):
		// Whatever was found before does not count: C3 begins anew.
		c.stage, c.evicted, c.claims, c.tail = stageFenced, false, "", ""
		earliest(&c.fencedBy, now.Add(ResumeLimit))
	default:
		return false
	}
	return true
}

// begin goes on with a switch that was asked for, from the entry that the topic has.
func (c *Controller) begin(now time.Time, r Report) {
	if c.wish == WishPause {
		c.due, c.waiting = now.Add(PauseInterval), "paused before it began"
		return // and read again
	}
	c.stage, c.base, c.preparedBy = stageRequested, r.Entry, time.Time{}
	if r.Absent {
		c.base = route.Entry{}
	}
}

func by(e route.Entry) string {
	if e.SwitchID == "" {
		return "a change of the routes"
	}
	return "switch " + e.SwitchID
}

func stateName(s route.State) string {
	return map[route.State]string{route.StateActive: "active", route.StatePrepared: "prepared", route.StateFenced: "fenced", route.StateDraining: "draining"}[s]
}

func (c *Controller) finish(s State, note string) {
	c.stage, c.end = stageEnd, s
	c.addNote(note)
}

func (c *Controller) addNote(note string) { c.notes = join(c.notes, note) }

func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

func (c *Controller) wait(now time.Time, why string) { c.due, c.waiting = now.Add(LookInterval), why }

// judgePrepared: every member must have this attempt on its disk (C2), also one that is not running: it could start, cut off
// from the store, and go on with the map from before.
func (c *Controller) judgePrepared(now time.Time, s Survey) {
	var missing []string
	for _, m := range s.Members {
		if !m.Aged && !c.acked(s, m.ID, "", StatePrepared) && !c.acked(s, m.ID, "", StateFenced) {
			missing = append(missing, describe(m))
		}
	}
	switch {
	case len(s.Members) == 0:
		c.wait(now, "no proxy is in the roster")
	case len(missing) > 0:
		c.wait(now, "not acknowledged by "+strings.Join(missing, ", "))
	default:
		c.stage = stageFence
	}
}

// judgeFenced: each member has a fenced ack, or a prepared ack of this attempt and an expired session (C3). The latter can publish no
// more, but what it had sent may not have arrived: whoever is not clean makes the controller evict (C4).
func (c *Controller) judgeFenced(now time.Time, s Survey) {
	var missing, dirty, claims []string
	for _, m := range s.Members {
		ack, ok := c.fencedAck(s, m)
		switch {
		case ok:
			claims = append(claims, ack.Claims...)
			if !ack.Clean {
				dirty = append(dirty, m.ID+": "+ack.Why)
			}
		case m.Aged:
			dirty = append(dirty, m.ID+": not seen for longer than max_map_age")
		case !m.Live && c.acked(s, m.ID, "", StatePrepared):
			dirty = append(dirty, m.ID+": gone")
		default:
			missing = append(missing, describe(m))
		}
	}
	for _, id := range s.Tombstones {
		dirty = append(dirty, id+": forgotten, and this leader has not known it for a minute")
	}
	switch {
	case len(s.Members) == 0:
		c.wait(now, "no proxy is in the roster")
	case len(missing) > 0:
		c.wait(now, "not acknowledged by "+strings.Join(missing, ", "))
	case len(dirty) > 0:
		c.stage = stageEvict
		c.addNote("evicted on cluster " + c.from + " (" + strings.Join(dirty, ", ") + ")")
	default:
		slices.Sort(claims)
		c.stage, c.claims = stageTail, strings.Join(claims, "\n")
	}
}

// judgeEvicted waits for the proxies that had the topic fenced and are still the same process. Safety does not depend on it.
func (c *Controller) judgeEvicted(now time.Time, s Survey) {
	var missing []string
	for _, m := range s.Members {
		if _, fenced := c.fencedAck(s, m); fenced && m.Live && !c.acked(s, m.ID, m.Incarnation, StateEvicting) {
			missing = append(missing, m.ID)
		}
	}
	switch late := !now.Before(c.evictedBy); {
	case len(missing) == 0:
		c.afterReports(StateDone)
	case late:
		c.afterReports(StateIncomplete)
		c.addNote("no report from " + strings.Join(missing, ", ") + ": clients there may not have been told; they find the new cluster when they come back")
	default:
		c.wait(now, "not reported by "+strings.Join(missing, ", "))
	}
}

// judgePublishers lets nobody flip while somebody could publish on the old cluster who is no client of a proxy. A client that was just closing
// when the topic was fenced is on no proxy any more and at the broker for a moment still: so it is looked again, until the fence's deadline.
func (c *Controller) judgePublishers(now time.Time, all []Publisher) {
	claimed := strings.Split(c.claims, "\n")
	var strangers []string
	for _, p := range all {
		if _, ok := slices.BinarySearch(claimed, p.Name); !ok {
			strangers = append(strangers, p.Text)
		}
	}
	switch {
	case len(strangers) == 0:
		c.stage = stageFlip
	case c.evicted:
		c.wait(now, fmt.Sprintf("cluster %s still has publishers after the eviction: %s", c.from, strings.Join(strangers, ", ")))
	default:
		c.wait(now, fmt.Sprintf("cluster %s has publishers that are clients of no proxy: %s; send them through a proxy, then switch again", c.from, strings.Join(strangers, ", ")))
	}
}

// fencedAck is the fenced ack of a member: of the process that is running; of any that ran when none is, then rather one that is not
// clean.
func (c Controller) fencedAck(s Survey, m MemberFact) (found Ack, ok bool) {
	for _, a := range s.Acks {
		if a.Proxy == m.ID && a.Attempt == c.key.Attempt && a.Phase == StateFenced && (a.Incarnation == m.Incarnation || !m.Live) && (!ok || !a.Clean) {
			found, ok = a, true
		}
	}
	return found, ok
}

// acked tells whether a member has acknowledged the phase for this attempt; an empty incarnation accepts any.
func (c Controller) acked(s Survey, id, incarnation string, phase State) bool {
	return slices.ContainsFunc(s.Acks, func(a Ack) bool {
		return a.Proxy == id && a.Attempt == c.key.Attempt && a.Phase == phase && (incarnation == "" || a.Incarnation == incarnation)
	})
}

func describe(m MemberFact) string {
	if m.Live {
		return m.ID
	}
	if m.AgedIn > 0 {
		return fmt.Sprintf("%s (not running or cut off from the store; start it, or wait: in %s at the latest it takes no publishes any more, by its max_map_age)", m.ID, m.AgedIn.Round(time.Second))
	}
	return m.ID + " (not running or cut off from the store; start it, or forget it once its disk copy is destroyed)"
}
