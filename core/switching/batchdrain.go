package switching

import (
	"fmt"
	"time"
)

// This file is what a batch of drains does beyond one of planned switches: a topic has moved when its producers have, and the batch ends when none of its
// topics drains any more. Only then can a rule take the place of their entries.

// SettleInterval is how often a batch looks at the whole map that only waits for topics to drain.
const SettleInterval = 10 * time.Second

// Drains notes how many topics of the batch drain, as far as the list of the switches under way says.
func (r *BatchRun) Drains(n int) {
	r.counted = r.counted || n != r.b.Count.Draining
	r.b.Count.Draining = n
}

// Counted tells that the counts of the record are not as they are stored, though nobody has to see it at once.
func (r *BatchRun) Counted() bool { return r.counted }

// drain is the stage between the last wave and the end. The list of switches may be older than the last one of the batch: the map has the last word.
func (r *BatchRun) drain(now time.Time) BatchStep {
	switch {
	case r.looking:
		return BatchStep{Why: "a look at the map"}
	case r.b.Count.Draining > 0:
		return BatchStep{Why: count(r.b.Count.Draining, "topic to drain", "topics to drain")}
	case now.Before(r.lookAt):
		return BatchStep{Until: r.lookAt, Why: "a look at the map"}
	}
	r.looking = true
	return BatchStep{Do: BatchSettle}
}

// Settled reports how many topics of the batch drain by the map, and those that have moved and are not on the new cluster any more: they count as failed. why is set when
// the map could not be read.
func (r *BatchRun) Settled(now time.Time, draining int, gone map[int]ItemEnd, why string) {
	r.looking, r.lookAt = false, now.Add(SettleInterval)
	if why != "" || r.b.State != BatchDraining || r.b.Pause != nil || r.b.Abort { // somebody has paused it meanwhile: a resume looks again
		return
	}
	r.Drains(draining)
	if draining > 0 {
		return
	}
	for i, e := range gone {
		r.set(i, e)
	}
	r.finish(now)
}

// TakenBack is the end of a topic of a batch whose drain was led back.
func TakenBack(rec Record) ItemEnd {
	return ItemEnd{State: ItemFailed, Attempt: rec.Attempt, Note: fmt.Sprintf("was taken back to cluster %s, by `pointsman switch reverse %s`", rec.From, rec.ID)}
}
