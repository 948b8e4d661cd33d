package session

import (
	"fmt"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// debts remembers, per topic and cluster, what was sent to a broker that may still come into force there: it decides whether a fence
// is clean (protocol rule P5). A debt is open while an answer is awaited of a handle that is closed: our CLOSE_PRODUCER, or the
// client's, behind unanswered SENDs; and while one is awaited to a command that moves a subscription (pendingKind.moves). It is lost when the connection ends first; then only time settles it. Loop-owned.
type debts struct {
	open  map[debtKey]int
	lost  map[debtKey]loss // since turned
	older map[debtKey]loss // in the SettleTime before
	// turned is when lost was begun; flood when more was lost than is remembered: everything counts as lost then.
	turned, flood time.Time
}

type debtKey struct{ base, cluster string }

// loss is what was lost last.
type loss struct {
	at     time.Time
	broker string
	sends  uint32
}

// maxLosses bounds the memory of debts. Some thousands of producers going at once is a client or a broker that crashed.
const maxLosses = 1 << 15

func keyOf(h *handle) debtKey {
	if h.topic != nil {
		return debtKey{h.topic.base, h.leg.cluster}
	}
	topic, err := route.ParseTopic(h.full)
	if err != nil {
		panic("session: a handle's topic has no valid name: " + h.full)
	}
	return debtKey{topic.Base(), h.leg.cluster}
}

// owes tells whether something that the broker was sent of h may still come into force: of a consumer acknowledgements, which have no answer.
func (h *handle) owes() bool {
	return !h.producer || !h.gate.Drained() || h.state == handleCreating && !h.answered
}

// openDebt notes that h, which owes, is closed at the broker, and the answer awaited.
func (sh *Shard) openDebt(h *handle) {
	h.owed = true
	sh.open(keyOf(h))
}

// open notes that an answer is awaited which a fence has to wait for.
func (sh *Shard) open(key debtKey) {
	if sh.debts.open == nil {
		sh.debts.open = make(map[debtKey]int)
	}
	sh.debts.open[key]++
	if m := sh.moving[key.base]; m != nil && m.fence != nil && m.concerns(key.cluster) {
		m.waiting++
	}
}

// answered notes that it has come, or never will.
func (sh *Shard) answered(now time.Time, key debtKey) {
	if sh.debts.open[key]--; sh.debts.open[key] == 0 {
		delete(sh.debts.open, key)
	}
	if m := sh.moving[key.base]; m != nil && m.fence != nil && m.concerns(key.cluster) {
		m.waiting--
		m.maybeDone(now)
	}
}

// payDebt notes the answer, or with lost that there will be none.
func (sh *Shard) payDebt(now time.Time, h *handle, lost bool) {
	if !h.owed {
		return
	}
	h.owed = false
	if lost {
		sh.debts.lose(now, h)
	}
	sh.answered(now, keyOf(h))
}

// Unsettled tells whether a producer has ended, no longer ago than SettleTime, with something that its broker has not answered: it may still come into
// force there. A process that leaves the roster says so, for it answers nobody any more.
func (sh *Shard) Unsettled(now time.Time) bool {
	d := &sh.debts
	if !d.flood.IsZero() && now.Sub(d.flood) <= switching.SettleTime {
		return true
	}
	for _, losses := range [...]map[debtKey]loss{d.lost, d.older} {
		for _, l := range losses {
			if now.Sub(l.at) <= switching.SettleTime {
				return true
			}
		}
	}
	return false
}

func (d *debts) openOf(base, cluster string) int { return d.open[debtKey{base, cluster}] }

// lose notes that what h owes will never be answered. Nothing of a consumer can be stored late.
func (d *debts) lose(now time.Time, h *handle) {
	if !h.producer {
		return
	}
	switch age := now.Sub(d.turned); {
	case age > 2*switching.SettleTime:
		d.older, d.lost, d.turned = nil, nil, now
	case age > switching.SettleTime:
		d.older, d.lost, d.turned = d.lost, nil, now
	}
	if d.lost == nil {
		d.lost = make(map[debtKey]loss)
	}
	if len(d.lost) >= maxLosses {
		d.flood = now
		return
	}
	d.lost[keyOf(h)] = loss{at: now, broker: h.leg.broker, sends: h.gate.Outstanding}
}

// reason says why something may still arrive at the cluster; "" when nothing can.
func (d *debts) reason(now time.Time, base, cluster string) string {
	if !d.flood.IsZero() && now.Sub(d.flood) <= switching.SettleTime {
		return fmt.Sprintf("more than %d producers ended without an answer %s ago", maxLosses, now.Sub(d.flood).Round(time.Second))
	}
	key := debtKey{base, cluster}
	l, ok := d.lost[key]
	if !ok {
		l, ok = d.older[key]
	}
	if !ok || now.Sub(l.at) > switching.SettleTime {
		return ""
	}
	what := fmt.Sprintf("%d SENDs of a producer", l.sends)
	if l.sends == 0 {
		what = "the creation of a producer"
	}
	return fmt.Sprintf("%s to broker %s unanswered when the connection or the producer ended %s ago", what, l.broker, now.Sub(l.at).Round(time.Second))
}
