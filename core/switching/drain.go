package switching

import (
	"fmt"
	"strings"
	"time"

	"pointsman/core/route"
)

// This file is what a Controller does of a drain beyond a planned switch (docs/adr/007-drain.md): after the flip it watches what is left on
// the old cluster and has one subscription after the other move; and it leads back, as long as nobody has left or had a message on the new cluster.

const (
	// DrainInterval is how often a controller looks what is left on the old cluster.
	DrainInterval = time.Second
	// LeaveInterval is how often it looks while subscriptions are about to move: their clients wait.
	LeaveInterval = 200 * time.Millisecond
	// LeaveLimit is how long a subscription may be about to move: longer than proxies need to close its consumers, and well below what clients
	// give a SUBSCRIBE.
	LeaveLimit = 10 * time.Second
	// LeavePause is after how long a subscription may try again whose consumers were still connected then.
	LeavePause = 30 * time.Second
)

// direct turns the controller of a way back around.
func (c *Controller) direct(rec Record) {
	if c.drains = rec.Mode == ModeDrain; c.drains && rec.Return {
		c.back, c.from, c.to, c.epoch = true, rec.To, rec.From, rec.Epoch+1
	}
}

// giveUp is the step that ends this attempt before its flip, from the present entry: to the old cluster, or back to draining.
func (c Controller) giveUp(why string) Step {
	if c.back {
		step := c.write(c.entry(c.inMap()), c.entry(route.StateDraining), StateDraining, join("the way back was given up: "+why, c.notes))
		step.Record.Return = false
		return step
	}
	return c.write(c.entry(c.inMap()), c.entry(route.StateActive), StateAborted, join(why, c.notes))
}

// giveUpUnprepared is the same before anything was prepared.
func (c Controller) giveUpUnprepared(why string) Step {
	if c.back {
		step := c.record(StateDraining, join("the way back was given up: "+why, c.notes))
		step.Record.Return = false
		return step
	}
	return c.record(StateAborted, why)
}

// gaveUp tells that a step is one of those.
func (c Controller) gaveUp(step Step) bool {
	return step.Record.State == StateAborted || c.back && !step.Record.Return
}

// nextOfDrain is the step of a stage that only drains have.
func (c Controller) nextOfDrain(now time.Time) Step {
	if c.stage < stageRequested {
		if why := c.reason(now); why != "" {
			return c.giveUpUnprepared(why)
		}
	}
	switch c.stage {
	case stagePutBack:
		d := c.parsed()
		for i := range d.Subs {
			d.Subs[i].Leaving = false
		}
		return c.write(c.base, c.draining(d), StateRequested, "")
	case stageMayReturn, stageUntouched:
		return Step{Work: WorkReturnable, Drain: c.drain, Return: true}
	case stageCopy:
		return Step{Work: WorkCopy, Drain: c.drain, Return: true}
	case stageDrain:
		return c.record(StateDraining, c.notes)
	case stageLook:
		return Step{Work: WorkDrained, Drain: c.base.Drain}
	case stageChange:
		after := c.base
		after.Drain = c.drain
		return c.write(c.base, after, StateDraining, c.notes)
	case stageEmpty:
		after := c.base
		after.State, after.Drain = route.StateActive, ""
		return c.write(c.base, after, StateDone, c.notes)
	}
	panic("switching: no such stage of a drain")
}

// draining is the entry of this attempt that drains, as d.
func (c Controller) draining(d route.Drain) route.Entry {
	e := c.base
	e.Attempt, e.Drain = c.key.Attempt, d.String()
	return e
}

// parsed is what c.drain says: reconcile or the flip has made sure that it can be read.
func (c Controller) parsed() route.Drain {
	d, err := route.ParseDrain(c.drain)
	if err != nil {
		panic("switching: a drain that cannot be read was taken over: " + err.Error())
	}
	return d
}

// flippedEntry is what the flip of this attempt writes.
func (c Controller) flippedEntry() route.Entry {
	e := c.entry(route.StateActive)
	e.Cluster, e.Epoch, e.Drain = c.to, c.epoch, ""
	if c.drains && !c.back {
		e.State, e.Drain = route.StateDraining, c.drain
	}
	return e
}

// noteTails and noteSubs make the drain that the flip will write.
func (c *Controller) noteTails(tails []route.Tail) {
	if c.drains && !c.back {
		c.drain = route.Drain{From: c.from, Tails: tails}.String()
	}
}

func (c *Controller) noteSubs(subs []string) {
	d := c.parsed()
	d.Subs = make([]route.DrainSub, len(subs))
	for i, name := range subs {
		d.Subs[i].Name = name
	}
	if err := d.Check(); err != nil {
		c.abort = fmt.Sprintf("what is to drain from cluster %s does not fit into the map: %v; switch with --mode planned", c.from, err)
		return
	}
	c.drain = d.String()
}

// afterTail, afterCarry and afterReports are where a switch goes on.
func (c Controller) afterTail() stage {
	switch {
	case c.back:
		return stageUntouched
	case c.drains:
		return stageCarry // nothing is replicated
	}
	return stageReplicated
}

func (c Controller) afterCarry() stage {
	if c.drains {
		return stageTailAgain
	}
	return stageReadBack
}

func (c *Controller) afterReports(end State) {
	switch {
	case c.back:
		c.finish(StateReturned, "")
	case c.drains:
		c.stage = stageDrain
	default:
		c.stage, c.end = stageVerify, end
	}
}

// reconcileDrain goes on from what the map says, of a drain (C7).
func (c *Controller) reconcileDrain(now time.Time, r Report) {
	e, rec := r.Entry, r.Record
	c.hear(rec)
	if rec.State == StateEvicting || rec.State == StateDraining {
		c.notes = rec.Note // a drain outlives its leaders
	}
	own := !r.Absent && e.SwitchID == c.key.Switch
	mine := own && e.Attempt == c.key.Attempt
	if own && e.Drain != "" {
		if _, err := route.ParseDrain(e.Drain); err != nil {
			c.lookAgain(now, DrainInterval, "the map cannot be used: "+err.Error())
			return
		}
		c.drain = e.Drain
	}
	switch {
	case rec.Attempt != c.key.Attempt || rec.Return != c.back:
		c.stage = stageOver
	case mine && c.goesOn(now, e):
	case rec.State.Over():
		c.stage = stageOver
	case own && e.State == route.StateDraining && c.back:
		c.base = e
		c.reconcileReturn(now, rec)
	case own && e.State == route.StateDraining:
		if c.base = e; rec.State == StateDraining {
			c.stage = stageLook
		} else {
			c.flipped(now)
		}
	case mine && e.Cluster == c.to && c.back:
		c.flipped(now)
	case own && e.Cluster == c.to && !c.back:
		c.finish(StateDone, "the record was mended from the map")
	case mine && !c.back:
		c.finish(StateAborted, "aborted; the record was mended from the map")
	case rec.State == StateRequested && !c.back && e.Cluster == c.from && e.State == route.StateActive && e.Epoch+1 == c.epoch:
		c.begin(now, r)
	case rec.State == StateRequested && !c.back:
		c.finish(StateAborted, fmt.Sprintf("the topic is %s on cluster %s at epoch %d, changed by %s; plan the switch again", stateName(e.State), e.Cluster, e.Epoch, by(e)))
	default:
		c.finish(StateIncomplete, "overtaken by "+by(e))
	}
}

// reconcileReturn goes on with a way back whose topic drains.
func (c *Controller) reconcileReturn(now time.Time, rec RecordState) {
	d := c.parsed()
	leaving := false
	for _, s := range d.Subs {
		leaving = leaving || s.Leaving
	}
	c.stage, c.preparedBy = stageMayReturn, time.Time{}
	switch {
	case rec.State != StateRequested && c.abort == "":
		c.abort = "given up; the record was mended from the map"
	case d.Gone > 0:
		c.abort = fmt.Sprintf("%s left cluster %s already: let the drain end, then switch from %s to %s", count(d.Gone, "subscription has", "subscriptions have"), c.to, c.from, c.to)
	case c.wish == WishPause:
		c.stage, c.due, c.waiting = stageRead, now.Add(PauseInterval), "paused before it began"
	case leaving && c.abort == "":
		c.stage = stagePutBack
	}
}

// judgeDrained decides who may leave the old cluster, who has left it, and whether that is all.
//
// Those that may leave do so together: nobody else begins until all of them have left or been put back. Then one deadline is enough.
func (c *Controller) judgeDrained(now time.Time, found Drained) {
	d := c.parsed()
	facts := make(map[string]SubFact, len(found.Subs))
	connected := found.Readers
	for _, f := range found.Subs {
		facts[f.Name] = f
		connected += f.Consumers
	}
	round := false // somebody was about to leave before
	for _, s := range d.Subs {
		round = round || s.Leaving
	}
	if round {
		earliest(&c.leaveBy, now.Add(LeaveLimit))
	}
	late := round && !now.Before(c.leaveBy)
	stay, leaving, changed := d.Subs[:0:0], 0, false
	var left []string
	for _, s := range d.Subs {
		f, there := facts[s.Name]
		empty := f.Backlog == 0 // Unacked drifts on old brokers, below 0 too, and what is acknowledged is nobody's any more
		was := s.Leaving
		switch {
		case s.Leaving && empty && f.Consumers == 0:
			d.Gone++
			changed = true
			if !there {
				c.addNoteOnce(fmt.Sprintf("subscription %s was removed on cluster %s while it drained: it is still on cluster %s", s.Name, c.from, c.to))
			}
			continue
		case s.Leaving && !empty:
			s.Leaving = false
		case s.Leaving && late:
			s.Leaving = false
			c.leaveAgain = now.Add(LeavePause)
		case !round && empty && c.wish != WishPause && (f.Consumers == 0 || !now.Before(c.leaveAgain)):
			s.Leaving = true
		}
		if changed = changed || s.Leaving != was; s.Leaving {
			leaving++
		}
		stay = append(stay, s)
		left = append(left, describeSub(s, f))
	}
	if d.Subs = stay; leaving == 0 || !round {
		c.leaveBy = time.Time{}
	}
	interval := DrainInterval
	if leaving > 0 {
		interval = LeaveInterval
	}
	switch {
	case changed:
		c.drain, c.stage = d.String(), stageChange
	case len(d.Subs) == 0 && connected == 0:
		c.stage = stageEmpty
	case len(d.Subs) == 0:
		c.lookAgain(now, interval, fmt.Sprintf("%s still connected on cluster %s, %d without a durable subscription", count(connected, "consumer is", "consumers are"), c.from, found.Readers))
	default:
		c.lookAgain(now, interval, fmt.Sprintf("%s on cluster %s: %s", count(len(left), "subscription", "subscriptions"), c.from, Few(left, 3)))
	}
}

// lookAgain waits, and begins with the record: the operator may want something else by then.
func (c *Controller) lookAgain(now time.Time, interval time.Duration, why string) {
	c.stage, c.due, c.waiting = stageRead, now.Add(interval), why
}

func describeSub(s route.DrainSub, f SubFact) string {
	text := fmt.Sprintf("%s (%d left", s.Name, f.Backlog)
	if f.Unacked > 0 {
		text += fmt.Sprintf(", %d unacknowledged", f.Unacked)
	}
	if f.Consumers > 0 {
		text += fmt.Sprintf(", %d connected", f.Consumers)
	}
	if s.Leaving {
		text += ", leaving"
	}
	if s.Leaving && f.By != "" {
		text += ", held by " + f.By
	}
	return text + ")"
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// Few names the first of them, at most that many, and says how many more there are.
func Few(names []string, most int) string {
	text := strings.Join(names[:min(most, len(names))], ", ")
	if more := len(names) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// addNoteOnce keeps what is said of many subscriptions short.
func (c *Controller) addNoteOnce(note string) {
	const enough = 1000 // bytes
	if !strings.Contains(c.notes, note) && len(c.notes) < enough {
		c.addNote(note)
	}
}
