package zk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

const (
	// maxWrite is the size of the largest write: below the server's default limit of 1 MiB for a whole request.
	maxWrite = 1000 << 10
	// opOverhead is what one operation of a write needs beside its path and its data, generously.
	opOverhead = 128
	// maxRulesBytes bounds the node of the rules, as store.MaxBucketBytes does a bucket.
	maxRulesBytes = store.MaxBucketBytes

	// The history: how many changes and bytes end a segment (each proxy counts its own bytes), and how many segments
	// are kept.
	segmentRecords = 1000
	segmentBytes   = 4 << 20
	keptSegments   = 32
)

// found is what a change found in the store.
type found struct {
	buckets map[int]*store.Bucket // never nil values
	stats   map[int]*zk.Stat      // of the buckets that exist
	moving  map[int]*movingNode   // of those of which something moves
	// movingStat is that of the node above them all.
	movingStat *zk.Stat
	rules      []route.Rule
	rulesStat  *zk.Stat // nil: not read
	segment    int64
	headStat   *zk.Stat
	record     *switching.Record // of the change's own switch id; nil: there is none

	recordNode node
	inRunning  bool // it has a node in running; read only where that may change
}

func (b *found) entry(topic string) (route.Entry, bool) {
	if e, ok := b.moving[route.Bucket(topic)].entry(topic); ok {
		return e, true
	}
	return b.buckets[route.Bucket(topic)].Entry(topic)
}

func (b *found) rule(scope string) (route.Rule, bool) {
	i := slices.IndexFunc(b.rules, func(r route.Rule) bool { return r.Scope == scope })
	if i < 0 {
		return route.Rule{}, false
	}
	return b.rules[i], true
}

// Apply implements store.Store: one write of all buckets, the rules, the switch and the history entry, on condition of
// the versions that were read.
func (s *Store) Apply(ctx context.Context, c store.Change) error {
	if err := c.Validate(); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if c.At.IsZero() {
		c.At = time.Now()
	}
	if err := s.boot(ctx); err != nil {
		return err
	}
	return s.write(ctx, "applying the change", &changeWrite{s: s, change: c})
}

// conditional is a write that depends on what is stored.
type conditional interface {
	// look reads, as of now, everything that the write depends on; the others judge by what it found.
	look(ctx context.Context) error
	// done tells whether the write has been carried out already: asked when an answer was lost.
	done() bool
	// conflict tells why it must not be.
	conflict() error
	// ops are its operations, all on condition of what was found.
	ops() ([]any, error)
	written(results []zk.MultiResponse, ops []any)
}

// write carries w out as one write. A version that has changed since it was read is most often a neighbour's change, so what
// is stored is read and compared again.
func (s *Store) write(ctx context.Context, what string, w conditional) error {
	lost := false // an answer was lost: an earlier attempt may have been carried out
	for attempt := 0; ; attempt++ {
		if attempt > 0 {
			if err := pause(ctx, time.Duration(rand.Int64N(int64(min(attempt, 20))*int64(2*time.Millisecond)))); err != nil {
				return s.writeError(ctx, what, err, lost)
			}
			ctx = store.AsOf(ctx, store.Boottime()) // what was read was not the newest
		}
		if err := w.look(ctx); err != nil {
			return s.writeError(ctx, what, err, lost)
		}
		if lost && w.done() {
			return nil
		}
		conflict := w.conflict()
		if conflict != nil && lost {
			return fmt.Errorf("%s: %w: its answer was lost, and what is stored is neither as before nor as after it: %w",
				what, store.ErrUnknown, conflict)
		}
		if conflict != nil {
			return conflict
		}
		ops, err := w.ops()
		if err != nil {
			return err
		}
		results, err := call(ctx, s.client, func(conn *zk.Conn) ([]zk.MultiResponse, error) { return conn.Multi(ops...) })
		switch {
		case err == nil:
			w.written(results, ops)
			return nil
		case errors.Is(err, zk.ErrBadVersion), errors.Is(err, zk.ErrNodeExists), errors.Is(err, zk.ErrNoNode):
			continue // not carried out
		case errors.Is(err, zk.ErrNoServer):
			continue // not sent
		case errors.Is(err, errNotSent):
			return s.writeError(ctx, what, err, lost)
		case ctx.Err() != nil, errors.Is(err, store.ErrClosed):
			return s.writeError(ctx, what, err, true)
		case lostAnswer(err):
			lost = true
		default:
			return s.writeError(ctx, what, err, lost)
		}
	}
}

func (s *Store) writeError(ctx context.Context, what string, err error, lost bool) error {
	if !errors.Is(err, store.ErrUnavailable) {
		err = s.client.describe(ctx, what, err)
	}
	if lost {
		return fmt.Errorf("%w; %w: an answer was lost", err, store.ErrUnknown)
	}
	return err
}

// batch gathers the operations of a write.
type batch struct {
	ops  []any
	size int
}

func newBatch() *batch { return &batch{} }

func (b *batch) add(path string, data []byte, op any) {
	b.size += opOverhead + len(path) + len(data)
	b.ops = append(b.ops, op)
}

// changeWrite is an Apply.
type changeWrite struct {
	s      *Store
	change store.Change
	found  *found
}

func (w *changeWrite) look(ctx context.Context) error {
	return w.s.synced(ctx, func() (err error) {
		w.found, err = w.s.before(ctx, w.change)
		return err
	})
}

func (w *changeWrite) done() bool {
	if w.change.Switch != nil {
		return w.found.holds(*w.change.Switch)
	}
	return w.change.Applied(w.found.entry, w.found.rule)
}

func (w *changeWrite) conflict() error {
	// The entry first: it is the truth, and a record may lag.
	if conflict := w.change.Conflict(w.found.entry, w.found.rule); conflict != nil {
		return conflict
	}
	if w.change.Switch != nil {
		return w.found.recordConflict(*w.change.Switch)
	}
	return nil
}

func (w *changeWrite) ops() ([]any, error) { return w.s.writes(w.found, w.change) }

func (w *changeWrite) written(results []zk.MultiResponse, ops []any) {
	w.s.wrote(w.found, results[len(results)-1].String, ops[len(ops)-1].(*zk.CreateRequest).Data)
}

// before reads everything that c depends on.
func (s *Store) before(ctx context.Context, c store.Change) (*found, error) {
	b := &found{buckets: map[int]*store.Bucket{}, stats: map[int]*zk.Stat{}}
	var indexes []int
	for _, e := range c.Entries {
		if index := route.Bucket(e.Topic); b.buckets[index] == nil {
			b.buckets[index] = store.NewBucket(nil)
			indexes = append(indexes, index)
		}
	}
	// Each writes what no other does: somebody waits for all of them, and maybe a fenced topic.
	parts := []func() error{
		func() error { return s.findEntries(ctx, b, indexes) },
		func() (err error) {
			b.segment, b.headStat, err = s.head(ctx)
			return err
		},
	}
	if len(c.Rules) > 0 {
		parts = append(parts, func() (err error) {
			b.rules, b.rulesStat, err = s.rules(ctx)
			return err
		})
	}
	if c.Switch != nil {
		parts = append(parts, func() error { return s.findRecord(ctx, b, *c.Switch) })
	}
	err := parallel(len(parts), func(i int) error { return parts[i]() })
	return b, err
}

// findEntries reads what moves of some buckets, and then the buckets.
func (s *Store) findEntries(ctx context.Context, b *found, indexes []int) error {
	if len(indexes) == 0 {
		return nil
	}
	if err := s.findMoving(ctx, b, indexes); err != nil {
		return err
	}
	buckets := make([]*store.Bucket, len(indexes))
	stats := make([]*zk.Stat, len(indexes))
	err := parallel(len(indexes), func(i int) (err error) {
		buckets[i], stats[i], err = s.bucket(ctx, indexes[i])
		return err
	})
	for i, index := range indexes {
		if err == nil && buckets[i] != nil {
			b.buckets[index], b.stats[index] = buckets[i], stats[i]
		}
	}
	return err
}

// writes are the operations that carry c out; the last one writes the history entry. It alters b.
func (s *Store) writes(b *found, c store.Change) ([]any, error) {
	out := newBatch()
	if len(c.Entries) > 0 {
		if err := s.writeEntries(out, b, c.Entries); err != nil {
			return nil, err
		}
	}
	if len(c.Rules) > 0 {
		if err := s.writeRules(out, b, c.Rules); err != nil {
			return nil, err
		}
	}
	kind := kindChange
	if c.Switch != nil {
		if c.Switch.Rev == 1 {
			kind = kindSwitch
		}
		if err := s.addRecord(out, b, *c.Switch); err != nil {
			return nil, err
		}
	}
	if err := s.addHistory(out, b, kind, c.HistoryEntry(0, c.At)); err != nil {
		return nil, err
	}
	if out.size > maxWrite {
		return nil, fmt.Errorf("%w: it needs %d bytes in %d buckets, ZooKeeper takes %d", store.ErrTooLarge, out.size, len(b.buckets), maxWrite)
	}
	return out.ops, nil
}

// writeRules writes the rules. When a change only compares them it makes sure that they are still what was compared: written, every proxy would read
// them again.
func (s *Store) writeRules(out *batch, b *found, changes []store.RuleChange) error {
	path, rules := s.root+"/rules", changeRules(b.rules, changes)
	if slices.Equal(rules, b.rules) {
		out.add(path, nil, &zk.CheckVersionRequest{Path: path, Version: b.rulesStat.Version})
		return nil
	}
	data, err := encodeRules(rules)
	if err != nil {
		return err
	}
	if len(data) > maxRulesBytes {
		return fmt.Errorf("the rules would have %d bytes, more than the %d that they may have: remove some", len(data), maxRulesBytes)
	}
	out.add(path, data, &zk.SetDataRequest{Path: path, Data: data, Version: b.rulesStat.Version})
	return nil
}

// The kinds of history entries, the first letter of their names: changes, changes that made a switch, and switches that
// were made without a change.
const (
	kindChange  = "c"
	kindSwitch  = "s"
	kindRequest = "r"
)

// addHistory writes a history entry. The segment that is written to must still be the newest one, or the order of the
// history would not be that of the changes.
func (s *Store) addHistory(b *batch, f *found, kind string, h store.HistoryEntry) error {
	data, err := encodeJSON(h)
	if err != nil {
		return err
	}
	head := s.root + "/history"
	b.add(head, nil, &zk.CheckVersionRequest{Path: head, Version: f.headStat.Version})
	path := s.segmentPath(f.segment) + "/" + kind + "-"
	b.add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl, Flags: zk.FlagSequence})
	return nil
}

func changeRules(rules []route.Rule, changes []store.RuleChange) []route.Rule {
	rules = slices.Clone(rules)
	for _, c := range changes {
		rules = slices.DeleteFunc(rules, func(r route.Rule) bool { return r.Scope == c.Scope })
		if c.After != nil {
			rules = append(rules, *c.After)
		}
	}
	slices.SortFunc(rules, func(a, b route.Rule) int { return strings.Compare(a.Scope, b.Scope) })
	return rules
}

func (s *Store) head(ctx context.Context) (segment int64, stat *zk.Stat, err error) {
	path := s.root + "/history"
	n, err := s.get(ctx, path)
	if err != nil {
		return 0, nil, err
	}
	if !n.exists() {
		return 0, nil, s.rootGone(path)
	}
	var head historyHead
	if err := json.Unmarshal(n.data, &head); err != nil || head.Segment < 1 {
		return 0, nil, fmt.Errorf("%s is damaged: want the number of the newest segment, as in {\"segment\":%d}", path, 1)
	}
	return head.Segment, n.stat, nil
}

// wrote ends the segment when it is full; if that fails, the next change tries again.
func (s *Store) wrote(b *found, historyPath string, data []byte) {
	if s.segment.Swap(b.segment) != b.segment {
		s.written.Store(0)
	}
	written := s.written.Add(int64(len(data)))
	_, seq, _ := historyName(historyPath[strings.LastIndexByte(historyPath, '/')+1:])
	if seq+1 < segmentRecords && written < segmentBytes || !s.trimming.CompareAndSwap(false, true) {
		return
	}
	s.background.Add(1)
	go func() {
		defer s.background.Done()
		defer s.trimming.Store(false)
		ctx, cancel := context.WithTimeout(s.client.ctx, time.Minute)
		defer cancel()
		if err := s.rollHistory(ctx, b); err != nil && s.client.ctx.Err() == nil {
			s.log.Warn("ending a segment of the history failed, the next change tries again", "segment", b.segment, "err", err)
		}
	}()
}

func (s *Store) rollHistory(ctx context.Context, b *found) error {
	next := b.segment + 1
	head, err := json.Marshal(historyHead{Segment: next})
	if err != nil {
		return err
	}
	_, err = call(ctx, s.client, func(c *zk.Conn) ([]zk.MultiResponse, error) {
		return c.Multi(&zk.CreateRequest{Path: s.segmentPath(next), Acl: s.acl},
			&zk.SetDataRequest{Path: s.root + "/history", Data: head, Version: b.headStat.Version})
	})
	if err != nil && !errors.Is(err, zk.ErrNodeExists) && !errors.Is(err, zk.ErrBadVersion) {
		return err
	}
	segments, err := s.segments(ctx)
	if err != nil {
		return err
	}
	for _, segment := range segments {
		if segment <= next-keptSegments {
			if err := s.dropSegment(ctx, segment); err != nil {
				return err
			}
		}
	}
	return nil
}

// dropSegment removes a segment and the switches that began in it, in an order that can be taken up again. Switches that
// are not over stay, and with them their entries and the segment: the next roll tries again.
func (s *Store) dropSegment(ctx context.Context, segment int64) error {
	path := s.segmentPath(segment)
	names, err := s.historyNames(ctx, segment, kindChange+kindSwitch+kindRequest)
	if err != nil {
		return err
	}
	var kept atomic.Int64
	err = parallel(len(names), func(i int) error {
		if !strings.HasPrefix(names[i], kindChange) {
			running, err := s.dropSwitchOf(ctx, segment, names[i])
			if err != nil {
				return err
			}
			if running {
				kept.Add(1)
				return nil
			}
		}
		return s.delete(ctx, path+"/"+names[i])
	})
	if err != nil || kept.Load() > 0 {
		return err
	}
	return s.delete(ctx, path)
}

// dropSwitchOf removes the switch of a history entry unless it is running.
func (s *Store) dropSwitchOf(ctx context.Context, segment int64, name string) (running bool, err error) {
	h, err := s.historyEntry(ctx, segment, name)
	if err != nil || h.Switch == "" || store.CheckID("switch", h.Switch) != nil {
		return false, err
	}
	r, _, err := s.record(ctx, h.Switch)
	switch {
	case err == nil && !r.State.Over():
		return true, nil
	case errors.Is(err, store.ErrUnavailable):
		return false, err
	}
	return false, s.dropSwitch(ctx, h.Switch) // it is over, gone, or damaged
}

func (s *Store) dropSwitch(ctx context.Context, id string) error {
	path := s.switchPath(id)
	acks, err := s.children(ctx, path+"/acks")
	if err != nil {
		return err
	}
	for _, ack := range acks {
		if err := s.delete(ctx, path+"/acks/"+ack); err != nil {
			return err
		}
	}
	for _, gone := range []string{path + "/acks", path, s.runningPath(id)} {
		if err := s.delete(ctx, gone); err != nil {
			return err
		}
	}
	return nil
}

// delete removes a node, whatever its version; one that is gone is fine.
func (s *Store) delete(ctx context.Context, path string) error {
	_, err := read(ctx, s.client, "removing "+path, func(c *zk.Conn) (struct{}, error) { return struct{}{}, c.Delete(path, -1) })
	if errors.Is(err, zk.ErrNoNode) {
		return nil
	}
	return err
}

// historyName reads the name of a history entry: kind and sequence number in its segment.
func historyName(name string) (kind string, seq int64, ok bool) {
	kind, digits, ok := strings.Cut(name, "-")
	if !ok || kind != kindChange && kind != kindSwitch && kind != kindRequest {
		return "", 0, false
	}
	seq, err := strconv.ParseInt(digits, 10, 64)
	return kind, seq, err == nil && seq >= 0
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
