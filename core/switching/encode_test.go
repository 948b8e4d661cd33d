package switching

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"pointsman/core/route"
)

// appendWorld writes a world so that different worlds differ: hashing a few hundred bytes is ten times as fast as hashing the
// structs. Whatever has no place here must be constant in the model, and is checked to be.
func (m *model) appendWorld(dst []byte, w *world) []byte {
	dst = appendEntry(dst, w.entry)
	dst = appendRecordState(dst, w.rec)
	for i := range m.proxies {
		dst = m.appendProc(dst, &w.procs[i])
	}
	for i := range w.leaders {
		l := &w.leaders[i]
		if !l.on {
			dst = append(dst, 0)
			continue
		}
		dst = append(dst, bits(true, l.half, l.early, l.tailSeen), l.snap, l.members, l.live, l.gone, l.tail, l.incs[0]|l.incs[1]<<4, l.incs[2], byte(l.pass)|l.over<<4)
		if l.half {
			dst = appendRecordState(dst, l.rec)
		}
		dst = appendController(dst, &l.c)
	}
	if w.haunted {
		dst = append(dst, byte(w.ghost.Work))
		dst = appendEntry(dst, w.ghost.Before)
		dst = appendEntry(dst, w.ghost.After)
		dst = appendRecordState(dst, w.ghost.Record)
	}
	dst = appendQueue(dst, w.a)
	dst = appendQueue(dst, w.b)
	l := &w.left
	dst = append(dst, w.replicated, w.home, w.next, w.acked, w.carried, bits(w.inexact, w.haunted))
	for k := range m.subs() {
		if dst = append(dst, w.ackA[k], w.ackB[k], w.processed[k]); m.drain {
			dst = append(dst, w.at[k], w.hadOnB[k], w.want[k])
		}
	}
	if m.drain {
		dst = append(dst, w.made|w.onA<<4, w.copied, w.copies, byte(w.epoch), byte(l.back|l.seek<<4), byte(l.late))
		dst = append(dst, w.boundary[:]...)
	}
	return append(dst, byte(l.crash|l.cut<<4), byte(l.leg|l.move<<4), byte(l.change|l.unknown<<4), byte(l.again|l.forget<<4), byte(l.age|l.wish<<4))
}

func (m *model) appendProc(dst []byte, p *proc) []byte {
	dst = append(dst, bits(p.up, p.cut, p.lost, p.aged, p.member, p.tomb, p.session, p.old), p.conn|p.node<<4, p.inc,
		bits(p.lease.until > 0, p.lease.synced, p.p.started == modelNow, p.p.known, p.p.synced, p.p.drained, p.p.clean, p.p.evicted),
		byte(p.p.saved.Attempt)|stateCode(p.p.acked)<<4|bits(p.oldDisk)<<7)
	constant(p.p.why)
	dst = appendEntry(dst, p.p.entry)
	dst = appendEntry(dst, p.p.told)
	dst = appendEntry(dst, p.disk)
	dst = appendHandle(dst, &p.prod)
	for k := range m.subs() {
		dst = appendHandle(dst, &p.cons[k])
	}
	if dst = appendQueue(dst, p.orphans); m.drain {
		dst = appendQueue(dst, p.orphansB)
	}
	for a := range p.prepared {
		dst = append(dst, p.prepared[a], p.fenced[a], p.clean[a], p.evicting[a])
	}
	return dst
}

func appendHandle(dst []byte, h *handle) []byte {
	if !h.on {
		return append(dst, 0)
	}
	dst = append(dst, bits(true, h.client, h.b, h.dead, h.g.Poisoned, h.g.Closing, h.g.Lost), byte(h.g.Epoch)|byte(h.g.Outstanding)<<4, h.seen, h.unread, h.held)
	dst = appendQueue(dst, h.sent)
	return appendQueue(dst, h.back)
}

func appendController(dst []byte, c *Controller) []byte {
	constant(c.claims + c.notes + c.waiting + c.wishBy)
	dst = append(dst, byte(c.key.Attempt), byte(c.epoch), byte(c.stage), byte(c.rev), seconds(c.preparedBy), seconds(c.fencedBy), seconds(c.evictedBy),
		bits(c.abort != "", c.evicted, c.wish != "", c.back), stateCode(c.end))
	if c.drains {
		dst = append(dst, seconds(c.leaveBy), seconds(c.leaveAgain))
		dst = appendText(dst, c.drain)
	}
	dst = appendText(dst, c.tail)
	return appendEntry(dst, c.base)
}

func appendEntry(dst []byte, e route.Entry) []byte {
	if e.Topic == "" {
		return append(dst, 0)
	}
	dst = append(dst, 1|byte(e.State)<<1|byte(e.Epoch)<<3|bits(e.Cluster == "b", e.SwitchID != "")<<6, byte(e.Attempt))
	if e.State == route.StateActive {
		constant(e.Drain)
		return dst
	}
	return appendText(dst, e.Drain)
}

func appendText(dst []byte, text string) []byte {
	return append(append(dst, byte(len(text))), text...)
}

func appendRecordState(dst []byte, r RecordState) []byte {
	constant(r.WishBy)
	return append(dst, byte(r.Rev), byte(r.Attempt)|bits(r.Wish != "", r.Return)<<4, stateCode(r.State))
}

func appendQueue(dst []byte, q queue) []byte {
	return append(append(dst, q.n), q.m[:q.n]...)
}

func bits(flags ...bool) (b byte) {
	for i, f := range flags {
		if f {
			b |= 1 << i
		}
	}
	return b
}

func stateCode(s State) byte {
	switch s {
	case "":
		return 0
	case StateRequested:
		return 1
	case StatePrepared:
		return 2
	case StateFenced:
		return 3
	case StateEvicting:
		return 4
	case StateDone:
		return 5
	case StateIncomplete:
		return 6
	case StateAborted:
		return 7
	case StateDraining:
		return 8
	case StateReturned:
		return 9
	}
	panic("unknown state " + s)
}

func seconds(t time.Time) byte {
	if t.IsZero() {
		return 0
	}
	d := t.Sub(modelNow) / time.Second
	if d < 0 || d > 255 {
		panic(fmt.Sprintf("a deadline %v from now", d))
	}
	return byte(d)
}

func constant(s string) {
	if s != "" {
		panic("not constant in the model: " + s)
	}
}

func TestTheModelKnowsEveryFieldOfTheStates(t *testing.T) {
	for _, known := range []struct {
		of     any
		fields int
	}{{Gate{}, 5}, {Proxy{}, 11}, {Lease{}, 3}, {Controller{}, 26}, {route.Entry{}, 7}, {RecordState{}, 7}, {world{}, 27}, {proc{}, 23}, {leader{}, 14}, {handle{}, 10}, {budget{}, 13}} {
		if n := reflect.TypeOf(known.of).NumField(); n != known.fields {
			t.Errorf("%T has %d fields, and appendWorld was written for %d: add the new one, or worlds that differ count as one", known.of, n, known.fields)
		}
	}
}
