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
	buckets   map[int]*store.Bucket // never nil values; empty ones do not exist as nodes
	stats     map[int]*zk.Stat      // of the buckets that exist
	rules     []route.Rule
	rulesStat *zk.Stat // nil: not read
	segment   int64
	headStat  *zk.Stat
	record    *switching.Record // of the change's own switch id
}

func (b *found) entry(topic string) (route.Entry, bool) {
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
// the versions that were read. A version that has changed is most often a neighbour's change, so what is stored is read
// and compared again.
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
	lost := false // an answer was lost: an earlier attempt may have been carried out
	for attempt := 0; ; attempt++ {
		if attempt > 0 {
			if err := pause(ctx, time.Duration(rand.Int64N(int64(min(attempt, 20))*int64(2*time.Millisecond)))); err != nil {
				return s.applyError(ctx, err, lost)
			}
		}
		b, err := s.before(ctx, c)
		if err != nil {
			return s.applyError(ctx, err, lost)
		}
		if lost && b.applied(c) {
			return nil
		}
		conflict := b.conflict(c)
		if conflict != nil && lost {
			return fmt.Errorf("applying the change: %w: its answer was lost, and what is stored is neither as before nor as after it: %w",
				store.ErrUnknown, conflict)
		}
		if conflict != nil {
			return conflict
		}
		ops, historyAt, err := s.writes(b, c)
		if err != nil {
			return err
		}
		results, err := call(ctx, s.client, func(conn *zk.Conn) ([]zk.MultiResponse, error) { return conn.Multi(ops...) })
		switch {
		case err == nil:
			s.wrote(b, results[historyAt].String, ops[historyAt].(*zk.CreateRequest).Data)
			return nil
		case errors.Is(err, zk.ErrBadVersion), errors.Is(err, zk.ErrNodeExists), errors.Is(err, zk.ErrNoNode):
			continue // not carried out
		case errors.Is(err, zk.ErrNoServer):
			continue // not sent
		case errors.Is(err, errNotSent):
			return s.applyError(ctx, err, lost)
		case ctx.Err() != nil, errors.Is(err, store.ErrClosed):
			return s.applyError(ctx, err, true)
		case lostAnswer(err):
			lost = true
		default:
			return s.applyError(ctx, err, lost)
		}
	}
}

func (s *Store) applyError(ctx context.Context, err error, lost bool) error {
	if !errors.Is(err, store.ErrUnavailable) {
		err = s.client.describe(ctx, "applying the change", err)
	}
	if lost {
		return fmt.Errorf("%w; %w: an answer was lost", err, store.ErrUnknown)
	}
	return err
}

// before reads, as of now, everything that c depends on.
func (s *Store) before(ctx context.Context, c store.Change) (*found, error) {
	if err := s.sync(ctx); err != nil {
		return nil, err
	}
	b := &found{buckets: map[int]*store.Bucket{}, stats: map[int]*zk.Stat{}}
	var indexes []int
	for _, e := range c.Entries {
		if index := route.Bucket(e.Topic); b.buckets[index] == nil {
			b.buckets[index] = store.NewBucket(nil)
			indexes = append(indexes, index)
		}
	}
	buckets := make([]*store.Bucket, len(indexes))
	stats := make([]*zk.Stat, len(indexes))
	err := parallel(len(indexes), func(i int) (err error) {
		buckets[i], stats[i], err = s.bucket(ctx, indexes[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	for i, index := range indexes {
		if buckets[i] != nil {
			b.buckets[index], b.stats[index] = buckets[i], stats[i]
		}
	}
	if len(c.Rules) > 0 {
		if b.rules, b.rulesStat, err = s.rules(ctx); err != nil {
			return nil, err
		}
	}
	if b.segment, b.headStat, err = s.head(ctx); err != nil {
		return nil, err
	}
	if c.Switch != nil {
		r, _, err := s.record(ctx, c.Switch.ID)
		if err == nil {
			b.record = &r
		} else if !errors.Is(err, store.ErrNotFound) {
			return nil, err
		}
	}
	return b, nil
}

func (b *found) conflict(c store.Change) error {
	if b.record != nil {
		return store.SwitchConflict(c.Switch.ID)
	}
	if conflict := c.Conflict(b.entry, b.rule); conflict != nil {
		return conflict
	}
	return nil
}

// applied tells whether an attempt whose answer was lost was carried out.
func (b *found) applied(c store.Change) bool {
	if c.Switch == nil {
		return c.Applied(b.entry, b.rule)
	}
	// The record was made by the same write; nobody else makes one with that id, topic, epoch and time of start.
	r := b.record
	return r != nil && r.Topic == c.Switch.Topic && r.Epoch == c.Switch.Epoch && r.Started.Equal(c.Switch.Started)
}

// writes are the operations that carry c out; historyAt is the one that writes the history entry. It alters b.
func (s *Store) writes(b *found, c store.Change) (ops []any, historyAt int, err error) {
	for _, e := range c.Entries {
		b.buckets[route.Bucket(e.Topic)].Set(e.Topic, e.After)
	}
	size := 0
	add := func(path string, data []byte, op any) {
		size += opOverhead + len(path) + len(data)
		ops = append(ops, op)
	}
	for index, bucket := range b.buckets {
		path, stat := s.bucketPath(index), b.stats[index]
		if bucket.Len() == 0 {
			if stat != nil {
				add(path, nil, &zk.DeleteRequest{Path: path, Version: stat.Version})
			}
			continue
		}
		data := bucket.Append(nil)
		switch {
		case len(data) > store.MaxBucketBytes:
			return nil, 0, fmt.Errorf("bucket %04d would have %d bytes with %d entries, more than the %d that a bucket may have: "+
				"replace entries by namespace rules", index, len(data), bucket.Len(), store.MaxBucketBytes)
		case stat == nil:
			add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl})
		default:
			add(path, data, &zk.SetDataRequest{Path: path, Data: data, Version: stat.Version})
		}
	}
	if len(c.Rules) > 0 {
		data, err := encodeRules(changeRules(b.rules, c.Rules))
		if err != nil {
			return nil, 0, err
		}
		if len(data) > maxRulesBytes {
			return nil, 0, fmt.Errorf("the rules would have %d bytes, more than the %d that they may have: remove some", len(data), maxRulesBytes)
		}
		path := s.root + "/rules"
		add(path, data, &zk.SetDataRequest{Path: path, Data: data, Version: b.rulesStat.Version})
	}
	kind := "c-"
	if c.Switch != nil {
		kind = "s-"
		data, err := encodeJSON(c.Switch)
		if err != nil {
			return nil, 0, err
		}
		path := s.switchPath(c.Switch.ID)
		add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl})
		add(path+"/acks", nil, &zk.CreateRequest{Path: path + "/acks", Acl: s.acl})
	}
	data, err := encodeJSON(c.HistoryEntry(0, c.At))
	if err != nil {
		return nil, 0, err
	}
	// The segment that is written to must still be the newest one, or the order of the history would not be that of the
	// changes.
	head := s.root + "/history"
	add(head, nil, &zk.CheckVersionRequest{Path: head, Version: b.headStat.Version})
	historyAt = len(ops)
	path := s.segmentPath(b.segment) + "/" + kind
	add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl, Flags: zk.FlagSequence})
	if size > maxWrite {
		return nil, 0, fmt.Errorf("%w: it needs %d bytes in %d buckets, ZooKeeper takes %d", store.ErrTooLarge, size, len(b.buckets), maxWrite)
	}
	return ops, historyAt, nil
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

// dropSegment removes a segment and the switches that its changes made, in an order that can be taken up again.
func (s *Store) dropSegment(ctx context.Context, segment int64) error {
	path := s.segmentPath(segment)
	names, err := s.historyNames(ctx, segment, "")
	if err != nil {
		return err
	}
	err = parallel(len(names), func(i int) error {
		if strings.HasPrefix(names[i], "s-") {
			h, err := s.historyEntry(ctx, segment, names[i])
			if err != nil {
				return err
			}
			if h.Switch != "" && store.CheckID("switch", h.Switch) == nil {
				if err := s.dropSwitch(ctx, h.Switch); err != nil {
					return err
				}
			}
		}
		return s.delete(ctx, path+"/"+names[i])
	})
	if err != nil {
		return err
	}
	return s.delete(ctx, path)
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
	if err := s.delete(ctx, path+"/acks"); err != nil {
		return err
	}
	return s.delete(ctx, path)
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
	if !ok || kind != "c" && kind != "s" {
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
