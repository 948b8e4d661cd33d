package session

import "time"

// This file gives the clients of a topic that has moved the time to work off what they have in hand. Libraries throw away what they have not handed to the application when their
// consumer is closed, and keep acknowledgements back for up to 100 ms. Those of batches they send when the whole batch is done. So the consumers of a fenced topic, which get nothing any more, are closed when their
// clients have said nothing for a while, the beginning of the fence counting as a word: what they acknowledge until then is not delivered again. Producers, and consumers that were never given a message, do not wait.

const (
	// lingerQuiet is how long a client must have said nothing about a consumer: longer than libraries keep acknowledgements back.
	lingerQuiet = 200 * time.Millisecond
	// lingerMost is how long after the flip consumers are closed whatever their clients do: at least once is all that slower ones get.
	lingerMost = time.Second
)

// lingering are the consumers of one eviction that are not closed yet. Loop-owned.
type lingering struct {
	sh    *Shard
	timer timer
	until time.Time
	list  []*handle
	ev    *eviction
}

// linger takes the consumers out of moved that are closed later, and counts them as part of ev.
func (sh *Shard) linger(now time.Time, moved []*handle, ev *eviction) []*handle {
	busy := busySubscriptions(now, moved)
	if len(busy) == 0 || ev.assigned.Dead != "" {
		return moved
	}
	g := &lingering{sh: sh, until: now.Add(lingerMost), ev: ev}
	g.timer.owner = g
	var gone []*handle
	for _, h := range moved {
		if _, ok := busy[h.key()]; !ok || !h.mayLinger() {
			gone = append(gone, h)
			continue
		}
		h.move, h.motion.lingers = ev, true
		g.list = append(g.list, h)
	}
	g.wait(now, busy)
	return gone
}

// busySubscriptions tells until when subscriptions are busy whose clients have said something about a consumer a moment ago. All consumers of one wait for each other:
// the first that comes to the new cluster would get what the others have in hand.
func busySubscriptions(now time.Time, list []*handle) map[subscriptionKey]time.Time {
	var busy map[subscriptionKey]time.Time
	for _, h := range list {
		if !h.mayLinger() {
			continue
		}
		heard := h.motion.heard
		if since := h.motion.m.since; h.given && since.After(heard) {
			heard = since // it may be at work, and its library may keep its acknowledgements back for longer than the fence lasted
		}
		if quiet := heard.Add(lingerQuiet); quiet.After(now) && quiet.After(busy[h.key()]) {
			if busy == nil {
				busy = make(map[subscriptionKey]time.Time)
			}
			busy[h.key()] = quiet
		}
	}
	return busy
}

// mayLinger tells whether h is a consumer that was fenced, and whose topic has moved.
func (h *handle) mayLinger() bool {
	return !h.producer && h.topic != nil && h.state == handleLive && h.motion != nil && !h.atHome()
}

func (g *lingering) wait(now time.Time, busy map[subscriptionKey]time.Time) {
	next := g.until
	for _, quiet := range busy {
		if quiet.Before(next) {
			next = quiet
		}
	}
	g.sh.timers.set(&g.timer, next)
}

// fire closes those whose subscriptions have fallen silent.
func (g *lingering) fire(now time.Time) {
	busy := busySubscriptions(now, g.list)
	if !g.until.After(now) {
		busy = nil
	}
	var gone, left []*handle
	for _, h := range g.list {
		_, wait := busy[h.key()]
		switch {
		case h.topic == nil: // went by itself, and was counted then
		case wait:
			left = append(left, h)
		default:
			gone = append(gone, h)
		}
	}
	g.list = left
	if len(left) > 0 {
		g.wait(now, busy)
	}
	g.sh.evict.enqueue(now, gone, g.ev)
}
