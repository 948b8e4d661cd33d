package store

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// maxSwitches is how many switch records a memory or file store keeps; the oldest that are over are dropped.
const maxSwitches = 10_000

// tagKeyBytes is the length of the shared key for tagged broker addresses.
const tagKeyBytes = 32

// core is a whole map in memory with its watchers: what the memory store is, and what the file store keeps beside its
// files. Everything is guarded by mu. Slices of entries and rules are never altered in place, so that they may be read
// after mu was released.
type core struct {
	mu            sync.Mutex
	seq           uint64
	buckets       [route.BucketCount][]route.Entry // each in the order of its topics
	rules         []route.Rule                     // in the order of their scopes
	switches      map[string]*switchState
	order         []string        // ids of switches, oldest first
	running       map[string]bool // ids of those that are not over
	batches       map[string]*batchState
	tagKey        []byte
	proxies       map[string]Proxy
	announcements int                  // of Register, ever
	tombs         map[string]Tombstone // by proxy and incarnation
	docs          map[string]map[string]Document
	bad           map[int]error
	watchers      map[*watcher]struct{}
	// delivered is closed, and replaced, when a sink has returned.
	delivered chan struct{}
	election  election
}

type switchState struct {
	Record switching.Record         `json:"record"`
	Acks   map[string]switching.Ack `json:"acks,omitempty"` // by AckName
}

// record is one change of a core, as it is written to a journal: a change with or without a switch record, a switch record
// alone, an ack, the tag key, or something of a batch.
type record struct {
	Seq    uint64            `json:"seq"`
	Change *HistoryEntry     `json:"change,omitempty"`
	Switch *switching.Record `json:"switch,omitempty"`
	Ack    *ackRecord        `json:"ack,omitempty"`
	TagKey []byte            `json:"tag_key,omitempty"`
	Batch  *switching.Batch  `json:"batch,omitempty"`
	Part   *partRecord       `json:"part,omitempty"`
}

type ackRecord struct {
	ID  string        `json:"id"`
	Ack switching.Ack `json:"ack"`
}

// watcher is what one Watch has not delivered yet; guarded by core.mu.
type watcher struct {
	owner   Store // whose Watch it is
	busy    bool  // the sink is running
	whole   bool  // the map was delivered once
	buckets [route.BucketCount]bool
	rules   bool
	some    bool          // any of the above
	signal  chan struct{} // capacity 1: look again
}

func newCore() *core {
	return &core{
		switches: map[string]*switchState{},
		running:  map[string]bool{},
		batches:  map[string]*batchState{},
		proxies:  map[string]Proxy{},
		tombs:    map[string]Tombstone{},
		docs:     map[string]map[string]Document{},
		bad:      map[int]error{},
		watchers: map[*watcher]struct{}{},

		delivered: make(chan struct{}),
	}
}

func (c *core) entry(topic string) (route.Entry, bool) {
	bucket := c.buckets[route.Bucket(topic)]
	i, ok := findEntry(bucket, topic)
	if !ok {
		return route.Entry{}, false
	}
	return bucket[i], true
}

func (c *core) rule(scope string) (route.Rule, bool) {
	i, ok := findRule(c.rules, scope)
	if !ok {
		return route.Rule{}, false
	}
	return c.rules[i], true
}

func (c *core) entries() []route.Entry {
	n := 0
	for _, b := range c.buckets {
		n += len(b)
	}
	all := make([]route.Entry, 0, n)
	for _, b := range c.buckets {
		all = append(all, b...)
	}
	return all
}

// change makes the record of a valid change, or says with what it conflicts.
func (c *core) change(ch Change, now time.Time) (record, error) {
	if conflict := ch.Conflict(c.entry, c.rule); conflict != nil {
		return record{}, conflict
	}
	if ch.Switch != nil {
		if err := c.recordConflict(*ch.Switch); err != nil {
			return record{}, err
		}
	}
	for _, e := range ch.Entries {
		if err := c.bad[route.Bucket(e.Topic)]; err != nil {
			return record{}, badBucket(route.Bucket(e.Topic), err)
		}
	}
	h := ch.HistoryEntry(c.seq+1, now)
	return record{Seq: c.seq + 1, Change: &h, Switch: ch.Switch}, nil
}

// putSwitchRecord makes the record of a PutSwitch, or says with what it conflicts.
func (c *core) putSwitchRecord(r switching.Record) (record, error) {
	if err := c.recordConflict(r); err != nil {
		return record{}, err
	}
	return record{Seq: c.seq + 1, Switch: &r}, nil
}

func (c *core) recordConflict(r switching.Record) error {
	var have *switching.Record
	if s := c.switches[r.ID]; s != nil {
		have = &s.Record
	}
	if conflict := RecordConflict(r, have); conflict != nil {
		return conflict
	}
	return nil
}

// putAckRecord makes the record of a PutAck.
func (c *core) putAckRecord(id string, a switching.Ack) (record, error) {
	_, err := c.switchRecord(id)
	return record{Seq: c.seq + 1, Ack: &ackRecord{ID: id, Ack: a}}, err
}

// apply carries out r, which was made for this state, and wakes the watchers.
func (c *core) apply(r record) {
	c.seq = r.Seq
	if r.Change != nil {
		for _, e := range r.Change.Entries {
			c.setEntry(e.Topic, e.After)
		}
		for _, u := range r.Change.Rules {
			c.setRule(u.Scope, u.After)
		}
	}
	switch {
	case r.Switch != nil:
		s := &switchState{Record: *r.Switch}
		if have := c.switches[r.Switch.ID]; have != nil {
			s.Acks = have.Acks
		}
		c.putSwitch(s)
	case r.Ack != nil:
		if s := c.switches[r.Ack.ID]; s != nil {
			if s.Acks == nil {
				s.Acks = map[string]switching.Ack{}
			}
			s.Acks[AckName(r.Ack.Ack)] = r.Ack.Ack
		}
	case r.TagKey != nil:
		c.tagKey = r.TagKey
	case r.Batch != nil || r.Part != nil:
		c.setBatch(r)
	}
	c.wake()
}

func (c *core) putSwitch(s *switchState) {
	id := s.Record.ID
	if c.switches[id] == nil {
		c.order = append(c.order, id)
	}
	c.switches[id] = s
	if s.Record.State.Over() {
		delete(c.running, id)
	} else {
		c.running[id] = true
	}
	for len(c.order) > maxSwitches {
		i := slices.IndexFunc(c.order, func(id string) bool { return c.switches[id].Record.State.Over() })
		if i < 0 {
			return
		}
		delete(c.switches, c.order[i])
		c.order = slices.Delete(c.order, i, i+1)
	}
}

func (c *core) setEntry(topic string, e *route.Entry) {
	index := route.Bucket(topic)
	old := c.buckets[index]
	i, ok := findEntry(old, topic)
	next := make([]route.Entry, 0, len(old)+1)
	next = append(next, old[:i]...)
	if e != nil {
		next = append(next, *e)
	}
	if ok {
		i++
	}
	c.buckets[index] = append(next, old[i:]...)
	for w := range c.watchers {
		w.buckets[index], w.some = true, true
	}
}

func (c *core) setRule(scope string, r *route.Rule) {
	i, ok := findRule(c.rules, scope)
	next := slices.Clone(c.rules[:i])
	if r != nil {
		next = append(next, *r)
	}
	if ok {
		i++
	}
	c.rules = append(next, c.rules[i:]...)
	for w := range c.watchers {
		w.rules, w.some = true, true
	}
}

func (c *core) wake() {
	for w := range c.watchers {
		select {
		case w.signal <- struct{}{}:
		default:
		}
	}
}

// markAll makes every watcher deliver everything again.
func (c *core) markAll() {
	for w := range c.watchers {
		w.markAll()
	}
	c.wake()
}

func (w *watcher) markAll() {
	for i := range w.buckets {
		w.buckets[i] = true
	}
	w.rules, w.some = true, true
}

// watch runs one Watch. held tells, under mu, whether deliveries are held back now; twice, whether to repeat them.
func (c *core) watch(ctx context.Context, owner Store, closed <-chan struct{}, sink func(Update), held, twice func() bool) {
	w := &watcher{owner: owner, signal: make(chan struct{}, 1)}
	w.markAll()
	w.signal <- struct{}{}
	c.mu.Lock()
	c.watchers[w] = struct{}{}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.watchers, w)
		c.noteDelivered()
		c.mu.Unlock()
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-closed:
			return
		case <-w.signal:
		}
		c.mu.Lock()
		u, ok := Update{}, false
		if !held() {
			u, ok = c.take(w)
		}
		repeat := twice()
		w.busy = ok
		c.mu.Unlock()
		if !ok || ctx.Err() != nil {
			continue
		}
		if repeat {
			sink(copyUpdate(u))
		}
		sink(u)
		c.mu.Lock()
		w.busy, w.whole = false, true
		c.noteDelivered()
		c.mu.Unlock()
	}
}

// noteDelivered is called with mu held.
func (c *core) noteDelivered() {
	close(c.delivered)
	c.delivered = make(chan struct{})
}

// awaitWatches waits until the watches of owner have delivered what there is now; without anew, until they have delivered the map at all.
func (c *core) awaitWatches(ctx context.Context, owner Store, anew bool) error {
	for {
		c.mu.Lock()
		behind := c.behind(owner, anew)
		delivered := c.delivered
		c.mu.Unlock()
		if !behind {
			return nil
		}
		select {
		case <-delivered:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the watches of the map: %w: %w", ErrUnavailable, ctx.Err())
		}
	}
}

// behind tells whether a watch of owner has to deliver something, or, without anew, the map at all. It is called with mu held.
func (c *core) behind(owner Store, anew bool) bool {
	for w := range c.watchers {
		if w.owner == owner && (!w.whole || anew && (w.some || w.busy)) {
			return true
		}
	}
	return false
}

// take is what w has to deliver now.
func (c *core) take(w *watcher) (Update, bool) {
	if !w.some {
		return Update{}, false
	}
	u := Update{Synced: true}
	for i, dirty := range w.buckets {
		if !dirty {
			continue
		}
		if err := c.bad[i]; err != nil {
			u.setBad(i, err)
			continue
		}
		if u.Buckets == nil {
			u.Buckets = map[int][]route.Entry{}
		}
		u.Buckets[i] = slices.Clone(c.buckets[i])
	}
	if w.rules {
		if err := c.bad[BadRules]; err != nil {
			u.setBad(BadRules, err)
		} else {
			rules := slices.Clone(c.rules)
			u.Rules = &rules
		}
	}
	w.buckets, w.rules, w.some = [route.BucketCount]bool{}, false, false
	return u, true
}

func (u *Update) setBad(index int, err error) {
	if u.Bad == nil {
		u.Bad = map[int]error{}
	}
	u.Bad[index] = err
}

func copyUpdate(u Update) Update {
	buckets := make(map[int][]route.Entry, len(u.Buckets))
	for i, b := range u.Buckets {
		buckets[i] = slices.Clone(b)
	}
	u.Buckets = buckets
	if u.Rules != nil {
		rules := slices.Clone(*u.Rules)
		u.Rules = &rules
	}
	return u
}

func (c *core) switchRecord(id string) (switching.Record, error) {
	s := c.switches[id]
	if s == nil {
		return switching.Record{}, fmt.Errorf("switch %s: %w", id, ErrNotFound)
	}
	return s.Record, nil
}

func (c *core) switchRecords(limit int) []switching.Record {
	var all []switching.Record
	for i := len(c.order) - 1; i >= 0 && len(all) < limit; i-- {
		all = append(all, c.switches[c.order[i]].Record)
	}
	return all
}

func (c *core) recordsOf(batch string) []switching.Record {
	var all []switching.Record
	for id, s := range c.switches {
		if s.Record.Batch == batch && strings.HasPrefix(id, batch+"-") {
			all = append(all, s.Record)
		}
	}
	SortRecords(all)
	return all
}

func (c *core) runningRecords() []switching.Record {
	all := make([]switching.Record, 0, len(c.running))
	for id := range c.running {
		all = append(all, c.switches[id].Record)
	}
	SortRecords(all)
	return all
}

func (c *core) acks(id string) ([]switching.Ack, error) {
	s := c.switches[id]
	if s == nil {
		return nil, fmt.Errorf("switch %s: %w", id, ErrNotFound)
	}
	acks := make([]switching.Ack, 0, len(s.Acks))
	for _, a := range s.Acks {
		acks = append(acks, a)
	}
	SortAcks(acks)
	return acks, nil
}

func (c *core) forget(id string, now time.Time) error {
	p, ok := c.proxies[id]
	switch {
	case !ok:
		return fmt.Errorf("proxy %s: %w", id, ErrNotFound)
	case p.Live:
		return fmt.Errorf("proxy %s: %w", id, ErrLive)
	}
	delete(c.proxies, id)
	c.bury(p, now)
	return nil
}

// bury leaves a tombstone, and drops those that are of no use any more.
func (c *core) bury(p Proxy, now time.Time) {
	c.tombs[p.ID+"@"+p.Incarnation] = Tombstone{ID: p.ID, Incarnation: p.Incarnation, At: now}
	for key, tomb := range c.tombs {
		if now.Sub(tomb.At) > TombstoneKept {
			delete(c.tombs, key)
		}
	}
}

// leave ends the membership of the proxy with that id.
func (c *core) leave(id string, settled bool, now time.Time) {
	if p, ok := c.proxies[id]; ok && !settled {
		c.bury(p, now)
	}
	delete(c.proxies, id)
}

func (c *core) tombstones() []Tombstone {
	all := slices.Collect(maps.Values(c.tombs))
	SortTombstones(all)
	return all
}

// SortTombstones puts tombstones into the order in which every store lists them: the oldest first.
func SortTombstones(all []Tombstone) {
	slices.SortFunc(all, func(a, b Tombstone) int {
		return cmp.Or(a.At.Compare(b.At), strings.Compare(a.ID, b.ID), strings.Compare(a.Incarnation, b.Incarnation))
	})
}

func (c *core) listProxies() []Proxy {
	all := make([]Proxy, 0, len(c.proxies))
	for _, p := range c.proxies {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b Proxy) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// NewTagKey makes a key for tagged broker addresses.
func NewTagKey() []byte {
	key := make([]byte, tagKeyBytes)
	_, _ = rand.Read(key) // never fails: the runtime ends the process instead
	return key
}

func badBucket(index int, err error) error {
	return fmt.Errorf("bucket %04d cannot be used and is not written: %w", index, err)
}

func findEntry(bucket []route.Entry, topic string) (int, bool) {
	return slices.BinarySearchFunc(bucket, topic, func(e route.Entry, t string) int { return strings.Compare(e.Topic, t) })
}

func findRule(rules []route.Rule, scope string) (int, bool) {
	return slices.BinarySearchFunc(rules, scope, func(r route.Rule, s string) int { return strings.Compare(r.Scope, s) })
}
