package testkit

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Replication copies topics both ways between two clusters, as Pulsar's geo-replication does: what was published in one
// appears in the other after a delay, marked with its origin so that it is not copied back.
type Replication struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	ways   [2]*direction
}

// ReplicationOptions say what is copied and when.
type ReplicationOptions struct {
	Topics        func(name string) bool // nil: every persistent topic
	Delay         time.Duration          // between the publish and its copy
	Subscriptions bool                   // acknowledgements of durable subscriptions are copied as well
}

// direction is one of the two ways; its goroutine is the only one that uses copied and acked.
type direction struct {
	src, dst *Cluster
	opts     ReplicationOptions
	signal   chan struct{}
	behind   map[*topic]bool             // of src, and guarded by its mu: they may have something to copy
	acked    map[string]map[string]int64 // by topic and subscription: positions below it were looked at
}

// Replicate starts to copy between a and b, everything that is stored already included. Close it before the clusters.
func Replicate(a, b *Cluster, opts ReplicationOptions) *Replication {
	ctx, cancel := context.WithCancel(context.Background())
	r := &Replication{cancel: cancel}
	for i, d := range []*direction{{src: a, dst: b}, {src: b, dst: a}} {
		d.opts, d.signal, d.behind, d.acked = opts, make(chan struct{}, 1), map[*topic]bool{}, map[string]map[string]int64{}
		r.ways[i] = d
		d.src.mu.Lock()
		d.src.ways = append(d.src.ways, d)
		for _, t := range d.src.topics {
			d.behind[t] = true
		}
		d.src.mu.Unlock()
		r.wg.Go(func() { d.run(ctx) })
	}
	return r
}

// Close stops copying and waits until it has ended.
func (r *Replication) Close() {
	r.cancel()
	r.wg.Wait()
	for _, d := range r.ways {
		d.src.mu.Lock()
		d.src.ways = slices.DeleteFunc(d.src.ways, func(o *direction) bool { return o == d })
		for _, t := range d.src.topics {
			delete(t.cursors, d)
		}
		d.src.mu.Unlock()
	}
}

// wake has it look for what is to be copied.
func (d *direction) wake() {
	select {
	case d.signal <- struct{}{}:
	default:
	}
}

func (d *direction) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-d.signal:
			if d.opts.Subscriptions && d.opts.Delay > 0 {
				// Acknowledgements carry no time of their own: let them wait for one delay.
				wait := time.NewTimer(d.opts.Delay)
				select {
				case <-wait.C:
				case <-ctx.Done():
					wait.Stop()
					return
				}
			}
		}
		if next, ok := d.copyDue(time.Now()); ok {
			timer.Reset(time.Until(next))
		}
		if d.opts.Subscriptions {
			d.copyAcks()
		}
	}
}

func (d *direction) covers(t *topic) bool {
	return t.persistent() && (d.opts.Topics == nil || d.opts.Topics(t.name))
}

// retryFull is how long a topic waits whose copy has no room.
const retryFull = 50 * time.Millisecond

// due is what is to be copied of one topic.
type due struct {
	topic   *topic
	entries []*entry
	from    []int64 // position of each entry
	copies  []int64 // position of each copy; shorter when the copy is full
	upTo    int64   // position that comes after all that was looked at
}

// copyDue copies what is old enough, and returns when to look again; ok is false when only a signal can bring more.
func (d *direction) copyDue(now time.Time) (next time.Time, ok bool) {
	var work []*due
	again := func(at time.Time) {
		if !ok || at.Before(next) {
			next, ok = at, true
		}
	}
	d.src.mu.Lock()
	for t := range d.behind {
		if !d.covers(t) {
			delete(d.behind, t)
			continue
		}
		w := &due{topic: t, upTo: max(t.cursors[d], t.first)}
		for ; w.upTo < t.end(); w.upTo++ {
			e := t.at(w.upTo)
			if e.from != "" {
				continue
			}
			if at := e.at.Add(d.opts.Delay); at.After(now) {
				again(at)
				break
			}
			w.entries, w.from = append(w.entries, e), append(w.from, w.upTo)
		}
		work = append(work, w)
	}
	d.src.mu.Unlock()

	d.dst.mu.Lock()
	for _, w := range work {
		if len(w.entries) > 0 && !d.store(d.dst.topic(w.topic.name), w) {
			again(now.Add(retryFull))
		}
	}
	d.dst.notify()
	d.dst.mu.Unlock()

	d.src.mu.Lock()
	defer d.src.mu.Unlock()
	for _, w := range work {
		for i, pos := range w.copies {
			w.entries[i].peer = pos
		}
		w.topic.cursors[d] = w.upTo
		if w.upTo == w.topic.end() {
			delete(d.behind, w.topic)
		}
	}
	d.src.notify()
	return next, ok
}

// store appends the copies to t as long as it has room. Callers hold dst.mu.
func (d *direction) store(t *topic, w *due) (all bool) {
	for i, e := range w.entries {
		source := fmt.Sprintf("%d:%d", e.ledger, e.entry)
		raw := withReplicatedFrom(e.raw, e.meta, d.src.name, source)
		meta, err := parseMetadata(raw)
		if err != nil {
			panic("testkit: a stored message cannot be copied: " + err.Error())
		}
		if !t.hasRoom(len(raw)) {
			w.upTo = w.from[i]
			return false
		}
		w.copies = append(w.copies, t.end())
		t.append(&entry{raw: raw, meta: meta, from: d.src.name, source: source, peer: w.from[i]})
	}
	return true
}

// copyAcks acknowledges the counterparts of what is acknowledged in src. A subscription that dst lacks begins at its
// first entry, so that nothing is skipped.
func (d *direction) copyAcks() {
	type ack struct {
		topic, sub string
		typ        int32
		peers      []int64
	}
	var work []ack
	d.src.mu.Lock()
	for name, t := range d.src.topics {
		if !d.covers(t) {
			continue
		}
		if d.acked[name] == nil {
			d.acked[name] = map[string]int64{}
		}
		for _, s := range t.subs {
			if !s.durable {
				continue
			}
			a := ack{topic: name, sub: s.name, typ: s.typ}
			pos := max(d.acked[name][s.name], t.first)
			for ; pos <= s.mark && pos < t.end() && t.at(pos).peer >= 0; pos++ {
				a.peers = append(a.peers, t.at(pos).peer)
			}
			d.acked[name][s.name] = pos
			for p := range s.acked { // beyond the mark, again each time: acknowledging twice is harmless
				if p >= pos && p >= t.first && p < t.end() && t.at(p).peer >= 0 {
					a.peers = append(a.peers, t.at(p).peer)
				}
			}
			work = append(work, a)
		}
	}
	d.src.mu.Unlock()

	d.dst.mu.Lock()
	defer d.dst.mu.Unlock()
	for _, a := range work {
		t := d.dst.topics[a.topic]
		if t == nil {
			continue
		}
		s := t.subs[a.sub]
		if s == nil {
			s = newSubscription(t, a.sub, a.typ, true, t.first)
		}
		for _, pos := range a.peers {
			if pos >= t.first && pos < t.end() {
				s.ack(pos)
			}
		}
	}
	d.dst.notify()
}
