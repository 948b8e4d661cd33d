package session

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"pointsman/codec"
)

// This file is what a failover means for clients of a cluster that may hang rather than refuse: whose connections stand, and of which no answer
// comes any more. Nothing that it owes is waited for, and whoever cannot be told with a command is told by the end of the connection.

// sweeper has everything go on that waits for an answer of a cluster which was left for dead, and is of no connection with a handle: lookups, and connections that are being
// made. Many topics that move at once are one sweep. Loop-owned.
type sweeper struct {
	sh       *Shard
	timer    timer
	clusters map[string]bool
}

const (
	// sweepSoon is how long after the first of several moves a sweep begins.
	sweepSoon = 5 * time.Millisecond
	// sweepQuestions bounds the questions that one step puts anew; the others are next, after reviewStep.
	sweepQuestions = 512
)

func (w *sweeper) init(sh *Shard) {
	w.sh, w.timer.owner, w.clusters = sh, w, make(map[string]bool)
}

// note has a sweep begin soon; dead is "" when nothing was left for dead.
func (w *sweeper) note(now time.Time, dead string) {
	if dead != "" {
		w.clusters[dead] = true
		w.sh.timers.sooner(&w.timer, now.Add(sweepSoon))
	}
}

func (w *sweeper) fire(now time.Time) {
	if w.connections(now); w.questions(now) {
		w.sh.timers.set(&w.timer, now.Add(reviewStep))
		return
	}
	clear(w.clusters)
}

func deadText(cluster string) string {
	return fmt.Sprintf("cluster %s was left for dead by a failover: look the topic up again", cluster)
}

// connections ends those that are being made. What topic they are for is not known; whoever wants one that stays asks again.
func (w *sweeper) connections(now time.Time) {
	var found []*Session
	for s := range w.sh.sessions {
		if s.state == stateConnecting && w.clusters[s.leg.cluster] || s.aside != nil {
			found = append(found, s)
		}
	}
	slices.SortFunc(found, func(a, b *Session) int { return cmp.Compare(a.id, b.id) })
	for _, s := range found {
		if s.state == stateConnecting {
			s.leg.cut = true
			s.failConnect(now, CauseClusterDead, deadText(s.leg.cluster))
			continue
		}
		for _, l := range slices.Clone(s.extraLegs()) {
			if !l.ready && !l.dead && w.clusters[l.cluster] {
				l.cut = true
				l.fail(now, CauseClusterDead, deadText(l.cluster))
			}
		}
	}
}

// questions puts anew those that the map sends elsewhere by now, and ends those that are for the dead cluster alone; the proxy's own are left alone. more
// tells that there are others.
func (w *sweeper) questions(now time.Time) (more bool) {
	p := &w.sh.pool
	var elsewhere, over []*question
	for q := p.first; q != nil && !more; q = q.newer {
		switch {
		case !w.clusters[q.cluster]:
		case len(elsewhere) == sweepQuestions:
			more = true
		case q.overtaken():
			elsewhere = append(elsewhere, q)
		case q.table == nil && !slices.ContainsFunc(q.waiters, func(a waiter) bool { return a.far == nil }):
			over = append(over, q)
		}
	}
	for _, q := range elsewhere {
		p.reroute(now, q, failure(RefusedClusterUnreachable, codec.ErrorMetadata, deadText(q.cluster)))
	}
	for _, q := range over {
		p.finish(now, q, failure(RefusedClusterUnreachable, codec.ErrorMetadata, deadText(q.cluster)))
	}
	return more
}

// leftForDead tells whether h is closed because its cluster is.
func (h *handle) leftForDead() bool {
	return h.move != nil && h.move.assigned.Dead != "" && h.move.assigned.Dead == h.leg.cluster
}

// leaveDead ends a connection to a cluster that was left for dead once nothing of it is of use: no handle is left, or a frame of that cluster has
// begun and may never end, so that nothing else can be said. What was not sent to the broker yet is not sent any more.
func (s *Session) leaveDead(now time.Time, l *leg) {
	if s.state != stateBridged {
		return
	}
	stuck := s.talking() != nil && s.talking().cluster == l.cluster
	if !stuck && (l != s.leg || len(s.producers)+len(s.consumers) > s.evicted) {
		return
	}
	for _, o := range append(slices.Clone(s.extraLegs()), s.leg) {
		o.cut = o.cluster == l.cluster
	}
	s.close(now, CauseClusterDead, deadText(l.cluster))
}
