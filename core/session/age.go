package session

import (
	"fmt"
	"time"
)

// aging is what a shard does while its process has had no contact with the map store for longer than max_map_age (protocol rule P8): every
// SEND is dropped and every PRODUCER waits, on topics that do not move as well. SENDs go by a mark on the producers, so that nothing is asked
// of a clock for each frame; PRODUCERs, of which there are few, by the clock: a process that was frozen must not open one before it is told.
// Loop-owned.
type aging struct {
	sh     *Shard
	on     bool
	timer  timer
	topics []*topicHandles // not looked at yet
	parked []*parked       // PRODUCERs that wait, in the order in which they came
}

func (a *aging) init(sh *Shard) {
	a.sh = sh
	a.timer.owner = a
}

// Age tells that the process is too long without contact (on), or that it has contact again and the map of since then. Then
// producers that dropped a SEND are closed, with the address of their broker, and the others go on. It looks at some topics a step, as
// Review does.
func (sh *Shard) Age(now time.Time, on bool) {
	a := &sh.aging
	a.on = on
	a.topics = make([]*topicHandles, 0, len(sh.index))
	for _, t := range sh.index {
		a.topics = append(a.topics, t)
	}
	sh.timers.stop(&a.timer)
	a.fire(now)
}

func (a *aging) fire(now time.Time) {
	n := min(reviewSlice, len(a.topics))
	for _, t := range a.topics[:n] {
		if !a.on {
			a.sh.follow(now, t.base, Assigned{}, func(Evicted) {})
			continue
		}
		for _, h := range t.list {
			if h.producer {
				h.judged = true
			}
		}
	}
	clear(a.topics[:n])
	a.topics = a.topics[n:]
	switch {
	case len(a.topics) > 0:
		a.sh.timers.set(&a.timer, now.Add(reviewStep))
	case !a.on:
		a.release(now)
	}
}

// mapTooOld tells whether a PRODUCER has to wait.
func (sh *Shard) mapTooOld() bool { return sh.aging.on || sh.cfg.TooOld != nil && sh.cfg.TooOld() }

// park has a PRODUCER wait, or answers it when there is no room.
func (a *aging) park(now time.Time, p *parked) {
	p.aged = true
	if !a.sh.parking.add(now, p) {
		p.refuse(now, a.text(p.name)+", and too many requests wait for that (limits.parked_requests): try again")
		return
	}
	a.sh.counters.ParkedTotal.Add(1)
	a.parked = append(a.parked, p)
	// It may have come before the shard was told that there is contact, or in the moment in which it was lost.
	if !a.on {
		a.sh.timers.sooner(&a.timer, now.Add(movePoll))
	}
}

// release has everything that waits judged again.
func (a *aging) release(now time.Time) {
	list := a.parked
	a.parked = nil
	for _, p := range list {
		if !p.over {
			a.sh.parking.remove(p)
			p.aged = false
			p.again(now)
		}
	}
}

// text says why a PRODUCER waits, or was refused.
func (a *aging) text(topic string) string {
	return fmt.Sprintf("topic %s: this proxy has had no contact with the map store for longer than max_map_age and takes no publishes", topic)
}
