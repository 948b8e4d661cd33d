package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Remaining is what one subscription has still to do on a cluster, over all partitions.
type Remaining struct {
	Name string
	// Backlog is how many entries are not acknowledged: those that are held back by delayed delivery are among them, and those that no consumer will
	// ever get (markers) are not, once nobody is connected.
	Backlog   int64
	Unacked   int64 // messages that consumers have and did not acknowledge; brokers lose count of it now and then (-2 was seen with 3.0.0)
	Delayed   int64
	Consumers []Consumer
	// Partitions is how many partitions have the subscription.
	Partitions int
}

// Drained tells whether everything is acknowledged. Somebody may be connected all the same.
func (r Remaining) Drained() bool { return r.Backlog == 0 }

// Watch looks again and again at what is left on one topic. It is used by one goroutine at a time.
type Watch struct {
	c      *Client
	topics []string
	views  []*view
	// real remembers, by partition and subscription, the backlog that has a message in it: nobody publishes there, so that it is so as long as the number stays.
	real []map[string]int64
	// stalls are, by partition, the subscriptions that the last Look found at a standstill.
	stalls   []map[string]stall
	patience time.Duration // how long the next one may last
}

// stall is a subscription that nothing is delivered of although its consumers ask, and have nothing in hand. Brokers (3.0.0 was seen to) leave key-shared ones so now and
// then when their consumers have reconnected, until the next message is published: of a topic that drains there is none.
type stall struct {
	backlog int64
	since   time.Time
}

const (
	// stallLimit is how long a subscription may stand still before its topic is loaded anew; it doubles each time, up to stallMost.
	stallLimit = 10 * time.Second
	stallMost  = 10 * time.Minute
)

// NewWatch watches the partitions (full names) of a topic.
func NewWatch(c *Client, topics []string) *Watch {
	w := &Watch{c: c, topics: topics, views: make([]*view, len(topics)), real: make([]map[string]int64, len(topics)), stalls: make([]map[string]stall, len(topics)), patience: stallLimit}
	for i, topic := range topics {
		w.views[i], w.real[i], w.stalls[i] = newView(&remote{Client: c, topic: topic}), map[string]int64{}, map[string]stall{}
	}
	return w
}

// Close ends what the watch has open.
func (w *Watch) Close() {
	for _, v := range w.views {
		v.side.Close()
	}
}

// Look reads the durable subscriptions, by name, and what is not durable: readers, with those that are connected. A broker counts who is connected before it counts
// what is left, so that nobody has made more of it and gone by the time that nothing is left. A partition that was removed has nothing left.
func (w *Watch) Look(ctx context.Context) (durable, readers []Remaining, err error) {
	stats := make([]Stats, len(w.topics))
	if err := each(len(w.topics), Parallel, func(i int) (err error) {
		stats[i], err = w.c.Stats(ctx, w.topics[i])
		switch {
		case err == nil:
			return w.leaveMarkersOut(ctx, i, stats[i].Subscriptions)
		case errors.Is(err, ErrNotFound):
			// A broker that has just taken the topic over says so, too.
			if exists, listErr := w.c.listed(ctx, w.topics[i]); listErr != nil || exists {
				return errors.Join(err, listErr)
			}
			stats[i] = Stats{}
			return nil
		}
		return err
	}); err != nil {
		return nil, nil, err
	}
	for i := range stats {
		w.noteStalls(i, stats[i].Subscriptions, time.Now())
	}
	durable, readers = remaining(stats)
	return durable, readers, nil
}

func (w *Watch) noteStalls(i int, subs map[string]SubscriptionStats, now time.Time) {
	before := w.stalls[i]
	w.stalls[i] = map[string]stall{}
	for name, s := range subs {
		if !s.Durable || Reserved(name) || s.Type != "Shared" && s.Type != "Key_Shared" || s.Unacked > 0 || s.Delayed > 0 || s.Backlog == 0 ||
			!slices.ContainsFunc(s.Consumers, func(c Consumer) bool { return c.Permits > 0 }) {
			continue
		}
		still := stall{backlog: s.Backlog, since: now}
		if b, ok := before[name]; ok && b.backlog == s.Backlog {
			still = b
		}
		w.stalls[i][name] = still
	}
}

// Revive has the broker load those partitions anew that have stood still for too long, by the last Look, and says so. Consumers reconnect, and get again what they have
// in hand of other subscriptions; "" when nothing had to be done.
func (w *Watch) Revive(ctx context.Context, now time.Time) (said string, err error) {
	for i, topic := range w.topics {
		for _, name := range slices.Sorted(maps.Keys(w.stalls[i])) {
			s := w.stalls[i][name]
			if now.Sub(s.since) < w.patience {
				continue
			}
			said = fmt.Sprintf("the broker of cluster %s has delivered nothing of subscription %s of %s for %s, although its consumers ask for the %d entries that are left: the topic was loaded anew there",
				w.c.Cluster(), name, topic, now.Sub(s.since).Round(time.Second), s.backlog)
			if err = w.c.Evict(ctx, topic); err != nil {
				return "", fmt.Errorf("%s: subscription %s stands still, and the topic cannot be loaded anew: %w", topic, name, err)
			}
			clear(w.stalls[i])
			break
		}
	}
	if said != "" {
		w.patience = min(2*w.patience, stallMost)
	}
	return said, nil
}

// listed tells whether the namespace's list of topics has one.
func (c *Client) listed(ctx context.Context, topic string) (bool, error) {
	n, err := split(topic)
	if err != nil {
		return false, err
	}
	var all []string
	if _, err := c.call(ctx, http.MethodGet, "/admin/v2/persistent/"+n.tenant+"/"+n.namespace, nil, &all); err != nil {
		return false, err
	}
	return slices.Contains(all, topic), nil
}

// remaining sums up the partitions.
func remaining(parts []Stats) (durable, readers []Remaining) {
	sums := [2]map[string]*Remaining{{}, {}}
	for _, part := range parts {
		for name, s := range part.Subscriptions {
			if Reserved(name) {
				continue
			}
			consumers := slices.DeleteFunc(slices.Clone(s.Consumers), Consumer.own)
			kind := sums[0]
			if !s.Durable {
				kind = sums[1]
				if len(consumers) == 0 {
					continue // nobody's any more, or one of ours
				}
			}
			r := kind[name]
			if r == nil {
				r = &Remaining{Name: name}
				kind[name] = r
			}
			r.Backlog += s.Backlog
			r.Unacked += s.Unacked
			r.Delayed += s.Delayed
			r.Consumers = append(r.Consumers, consumers...)
			r.Partitions++
		}
	}
	var lists [2][]Remaining
	for i, all := range sums {
		for _, name := range slices.Sorted(maps.Keys(all)) {
			lists[i] = append(lists[i], *all[name])
		}
	}
	return lists[0], lists[1]
}

// own tells that the consumer is a controller's: it reads messages in order to compare positions.
func (c Consumer) own() bool { return c.Name == clientVersion }

// leaveMarkersOut sets the backlog of subscriptions to 0 that have nothing but markers left. A broker passes over those only while it delivers, so that
// a subscription without consumers would never be done.
func (w *Watch) leaveMarkersOut(ctx context.Context, i int, subs map[string]SubscriptionStats) error {
	var ask []string
	for name, s := range subs {
		if s.Durable && !Reserved(name) && s.Backlog > 0 && s.Unacked == 0 && len(s.Consumers) == 0 && w.real[i][name] != s.Backlog {
			ask = append(ask, name)
		}
	}
	if ask == nil {
		return nil
	}
	v := w.views[i]
	if err := v.load(ctx); err != nil {
		return err
	}
	for _, name := range ask {
		cursor, ok := v.in.Cursors[name]
		if !ok {
			continue
		}
		_, some, err := v.firstLeft(ctx, &cursor)
		if err != nil {
			return fmt.Errorf("%s: subscription %s: %w", w.topics[i], name, err)
		}
		s := subs[name]
		if some {
			w.real[i][name] = s.Backlog
		} else {
			s.Backlog = 0
			subs[name] = s
		}
	}
	return nil
}

// Oldest is when the oldest message that is not acknowledged was published, by durable subscription, by the clocks of the producers; those that have none are left out.
func (w *Watch) Oldest(ctx context.Context) (map[string]time.Time, error) {
	var mu sync.Mutex
	oldest := map[string]time.Time{}
	err := each(len(w.topics), partitionsAtOnce, func(i int) error {
		s, err := w.views[i].side.(target).Subscriptions(ctx)
		if err == nil {
			err = w.views[i].load(ctx)
		}
		if err != nil {
			return err
		}
		return each(len(s.Subs), Parallel, func(k int) error {
			sub := s.Subs[k]
			if sub.Backlog == 0 {
				return nil
			}
			e, ok, err := w.views[i].firstLeft(ctx, &sub.Cursor)
			if err != nil || !ok {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			if at := time.UnixMilli(e.Time); oldest[sub.Name].IsZero() || at.Before(oldest[sub.Name]) {
				oldest[sub.Name] = at
			}
			return nil
		})
	})
	return oldest, err
}

// firstLeft is the first message of a cursor that is not acknowledged and that a consumer may get; ok is false when there is none.
func (v *view) firstLeft(ctx context.Context, c *Cursor) (e Entry, ok bool, err error) {
	for after := c.MarkDelete; ; {
		e, ok, err := v.firstData(ctx, v.in.Index(Position{after.Ledger, after.Entry + 1}))
		if err != nil || !ok || !c.acked(e.Position) {
			return e, ok && err == nil, err
		}
		// It lies in an acknowledged range: go on behind that.
		at, _ := slices.BinarySearchFunc(c.Acked, e.Position, func(r Range, p Position) int { return r.Last.Compare(p) })
		after = c.Acked[at].Last
	}
}

// Had names the durable subscriptions of a partition that have had a message behind a position, each with the consumers that it has now. Messages that were delivered, not
// acknowledged, and forgotten by a broker that was restarted since do not count.
func (c *Client) Had(ctx context.Context, topic string, after Position) (names []string, err error) {
	in, err := c.Internal(ctx, topic)
	if err != nil {
		return nil, err
	}
	s, err := c.snapshot(ctx, topic, in)
	if err != nil {
		return nil, err
	}
	first := in.Index(Position{after.Ledger, after.Entry + 1})
	for _, sub := range s.Subs {
		last := sub.Cursor.lastAcked()
		if in.Index(sub.Cursor.Read) <= first && in.Index(Position{last.Ledger, last.Entry + 1}) <= first {
			continue
		}
		text := fmt.Sprintf("subscription %q of %s", sub.Name, topic)
		if len(sub.Consumers) > 0 {
			text += fmt.Sprintf(" (%v)", sub.Consumers[0])
		}
		names = append(names, text)
	}
	return names, nil
}

// CarryNew makes those subscriptions on the second cluster of a pair that it lacks and that have acknowledged just what the first cluster has up to a position: each at the copy of
// its first message. It names them.
func (p *Pair) CarryNew(ctx context.Context, after Position) (names []string, err error) {
	now, err := p.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.Load(ctx); err != nil {
		return nil, err
	}
	to := p.to.side.(target)
	there, err := to.Subscriptions(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range now.Subs {
		if s.Cursor.MarkDelete.Before(after) || slices.ContainsFunc(there.Subs, func(have Sub) bool { return have.Name == s.Name }) {
			continue
		}
		found, err := p.firstUnacked(ctx, &s.Cursor)
		if err == nil {
			err = to.Create(ctx, s.Name, found.Position, s.Replicated, s.Properties)
		}
		if err != nil && !errors.Is(err, ErrConflict) {
			return names, fmt.Errorf("%s: subscription %s: %w", p.Topic, s.Name, err)
		}
		names = append(names, s.Name)
	}
	return names, nil
}

// CreateSubscriptions makes those subscriptions that a partition lacks, all at one position: the first to be delivered. What exists is left where it is; the call may be repeated,
// and may come late. existing are the subscriptions of that name that were there before, as the cluster has them.
func (c *Client) CreateSubscriptions(ctx context.Context, topic string, at Position, subs []Sub) (existing []Sub, err error) {
	now, err := c.Snapshot(ctx, topic)
	if err != nil {
		return nil, err
	}
	have := map[string]Sub{}
	for _, s := range now.Subs {
		have[s.Name] = s
	}
	to := &remote{Client: c, topic: topic}
	var mu sync.Mutex
	err = each(len(subs), Parallel, func(i int) error {
		want := subs[i]
		s, exists := have[want.Name]
		if exists {
			mu.Lock()
			existing = append(existing, s)
			mu.Unlock()
		} else if err := to.Create(ctx, want.Name, at, want.Replicated, want.Properties); err != nil && !errors.Is(err, ErrConflict) { // a conflict: somebody else made it just now
			return fmt.Errorf("%s: subscription %s: %w", topic, want.Name, err)
		}
		if want.Replicated && !s.Replicated { // placing a cursor makes a broker forget it
			if err := to.SetReplicated(ctx, want.Name); err != nil {
				return fmt.Errorf("%s: subscription %s: %w", topic, want.Name, err)
			}
		}
		return nil
	})
	slices.SortFunc(existing, func(a, b Sub) int { return strings.Compare(a.Name, b.Name) })
	return existing, err
}

// CreateTopic makes a topic (base name) that does not exist, with as many partitions (0: not partitioned), and the partitions that nobody has used. It
// is no error when it is there; that it has so many partitions the caller must look up.
func (c *Client) CreateTopic(ctx context.Context, base string, partitions int) error {
	if partitions > 0 {
		p, err := path(base, "partitions")
		if err != nil {
			return err
		}
		if _, err = c.call(ctx, http.MethodPut, p, partitions, nil); err != nil && !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return c.CreateMissing(ctx, base, partitions)
}
