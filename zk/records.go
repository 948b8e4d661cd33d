package zk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"pointsman/core/switching"
	"pointsman/store"
)

// segmentSpan is the distance of the sequence numbers of two segments: HistoryEntry.Seq is segment × span + number.
const segmentSpan = 1 << 32

// historyBatch is how many history entries are read at a time.
const historyBatch = 64

// Switch implements store.Store.
func (s *Store) Switch(ctx context.Context, id string) (switching.Record, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return switching.Record{}, err
	}
	r, _, err := s.record(ctx, id)
	return r, err
}

func (s *Store) record(ctx context.Context, id string) (switching.Record, node, error) {
	var r switching.Record
	if store.CheckID("switch", id) != nil {
		return r, node{}, fmt.Errorf("switch %q: %w", id, store.ErrNotFound)
	}
	n, err := s.get(ctx, s.switchPath(id))
	if err != nil {
		return r, node{}, err
	}
	if !n.exists() {
		return r, node{}, fmt.Errorf("switch %s: %w", id, store.ErrNotFound)
	}
	if err := decodeJSON(n.data, &r); err != nil {
		return r, node{}, fmt.Errorf("switch %s: %w", id, err)
	}
	return r, n, nil
}

// Switches implements store.Store. The history tells which switches are the newest: their own nodes have no order.
func (s *Store) Switches(ctx context.Context, limit int) ([]switching.Record, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	var records []switching.Record
	err := s.walkHistory(ctx, kindSwitch+kindRequest, limit, func(changes []store.HistoryEntry) error {
		found := make([]*switching.Record, len(changes))
		err := parallel(len(changes), func(i int) error {
			r, _, err := s.record(ctx, changes[i].Switch)
			if errors.Is(err, store.ErrNotFound) {
				return nil
			}
			found[i] = &r
			return err
		})
		for _, r := range found {
			if r != nil {
				records = append(records, *r)
			}
		}
		return err
	})
	return records, err
}

// SwitchesOf implements store.Store: of all nodes only the names are read.
func (s *Store) SwitchesOf(ctx context.Context, batch string) ([]switching.Record, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	ids, err := s.children(ctx, s.root+"/switches")
	if err != nil {
		return nil, err
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return !strings.HasPrefix(id, batch+"-") })
	records := make([]switching.Record, len(ids))
	err = parallel(len(ids), func(i int) (err error) {
		records[i], _, err = s.record(ctx, ids[i])
		if errors.Is(err, store.ErrNotFound) { // dropped meanwhile: the oldest are
			return nil
		}
		return err
	})
	records = slices.DeleteFunc(records, func(r switching.Record) bool { return r.Batch != batch })
	store.SortRecords(records)
	return records, err
}

// PutSwitch implements store.Store. The first revision is noted in the history too, which has the order of the switches.
func (s *Store) PutSwitch(ctx context.Context, r switching.Record) error {
	if err := store.CheckRecord(r); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	return s.write(ctx, "writing switch "+r.ID, &recordWrite{s: s, record: r})
}

// recordWrite is a PutSwitch.
type recordWrite struct {
	s      *Store
	record switching.Record
	found  *found
}

func (w *recordWrite) look(ctx context.Context) (err error) {
	if err := w.s.sync(ctx); err != nil {
		return err
	}
	w.found = &found{}
	if w.found.segment, w.found.headStat, err = w.s.head(ctx); err != nil {
		return err
	}
	return w.s.findRecord(ctx, w.found, w.record)
}

func (w *recordWrite) done() bool { return w.found.holds(w.record) }

func (w *recordWrite) conflict() error { return w.found.recordConflict(w.record) }

func (w *recordWrite) ops() ([]any, error) {
	b := newBatch()
	if err := w.s.addRecord(b, w.found, w.record); err != nil {
		return nil, err
	}
	if w.record.Rev > 1 {
		return b.ops, nil
	}
	h := store.HistoryEntry{At: w.record.Started, Who: w.record.Who, Why: w.record.Why, Switch: w.record.ID}
	err := w.s.addHistory(b, w.found, kindRequest, h)
	return b.ops, err
}

func (w *recordWrite) written(results []zk.MultiResponse, ops []any) {
	if w.record.Rev == 1 {
		w.s.wrote(w.found, results[len(results)-1].String, ops[len(ops)-1].(*zk.CreateRequest).Data)
	}
}

// findRecord reads what is stored of the switch that next is a record of.
func (s *Store) findRecord(ctx context.Context, b *found, next switching.Record) error {
	r, n, err := s.record(ctx, next.ID)
	if err == nil {
		b.record, b.recordNode = &r, n
	} else if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	if b.runs() == !next.State.Over() {
		return nil
	}
	n, err = s.get(ctx, s.runningPath(next.ID))
	b.inRunning = n.exists()
	return err
}

// runs tells whether there is a record that is not over.
func (b *found) runs() bool { return b.record != nil && !b.record.State.Over() }

// addRecord writes r over the record that was found.
func (s *Store) addRecord(b *batch, f *found, r switching.Record) error {
	data, err := encodeJSON(r)
	if err != nil {
		return err
	}
	path := s.switchPath(r.ID)
	if r.Rev > 1 {
		b.add(path, data, &zk.SetDataRequest{Path: path, Data: data, Version: f.recordNode.stat.Version})
	} else {
		b.add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl})
		b.add(path+"/acks", nil, &zk.CreateRequest{Path: path + "/acks", Acl: s.acl})
	}
	index := s.runningPath(r.ID)
	switch run := !r.State.Over(); {
	case run == f.runs():
	case run && f.inRunning: // of a switch whose record somebody has removed
		b.add(index, nil, &zk.CheckVersionRequest{Path: index, Version: -1})
	case run:
		b.add(index, nil, &zk.CreateRequest{Path: index, Acl: s.acl})
	case f.inRunning:
		b.add(index, nil, &zk.DeleteRequest{Path: index, Version: -1})
	}
	return nil
}

func (f *found) recordConflict(r switching.Record) error {
	if conflict := store.RecordConflict(r, f.record); conflict != nil {
		return conflict
	}
	return nil
}

// holds tells whether r, or what came after its first revision, is what is stored: a write whose answer was lost was
// carried out. Nobody else begins a switch of that id, topic and time.
func (f *found) holds(r switching.Record) bool {
	if f.record == nil {
		return false
	}
	if r.Rev == 1 {
		return f.record.Topic == r.Topic && f.record.Started.Equal(r.Started)
	}
	data, err := encodeJSON(r)
	return err == nil && bytes.Equal(data, f.recordNode.data)
}

// PutAck implements store.Store.
func (s *Store) PutAck(ctx context.Context, id string, a switching.Ack) error {
	if err := store.CheckAck(a); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	data, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if store.CheckID("switch", id) != nil {
		return fmt.Errorf("switch %q: %w", id, store.ErrNotFound)
	}
	// Most often it is new, and to set a node that is not there is a write of the ensemble as well.
	path := s.switchPath(id) + "/acks/" + store.AckName(a)
	_, err = read(ctx, s.client, "creating "+path, func(c *zk.Conn) (string, error) { return c.Create(path, data, 0, s.acl) })
	if errors.Is(err, zk.ErrNodeExists) {
		err = s.put(ctx, path, data)
	}
	if errors.Is(err, zk.ErrNoNode) {
		return fmt.Errorf("switch %s: %w", id, store.ErrNotFound)
	}
	return err
}

// put writes a node and creates it when it is not there; zk.ErrNoNode when its parent is not.
func (s *Store) put(ctx context.Context, path string, data []byte) error {
	for {
		_, err := read(ctx, s.client, "writing "+path, func(c *zk.Conn) (*zk.Stat, error) { return c.Set(path, data, -1) })
		if !errors.Is(err, zk.ErrNoNode) {
			return err
		}
		_, err = read(ctx, s.client, "creating "+path, func(c *zk.Conn) (string, error) { return c.Create(path, data, 0, s.acl) })
		if !errors.Is(err, zk.ErrNodeExists) {
			return err
		}
	}
}

// Acks implements store.Store.
func (s *Store) Acks(ctx context.Context, id string) ([]switching.Ack, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	if store.CheckID("switch", id) != nil {
		return nil, fmt.Errorf("switch %q: %w", id, store.ErrNotFound)
	}
	// The node is made and removed with the record of the switch.
	path := s.switchPath(id) + "/acks"
	names, err := read(ctx, s.client, "listing "+path, func(c *zk.Conn) ([]string, error) {
		names, _, err := c.Children(path)
		return names, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return nil, fmt.Errorf("switch %s: %w", id, store.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	acks := make([]switching.Ack, len(names))
	err = parallel(len(names), func(i int) error {
		n, err := s.get(ctx, path+"/"+names[i])
		if err == nil && n.exists() {
			err = json.Unmarshal(n.data, &acks[i])
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("acks of switch %s: %w", id, err)
	}
	store.SortAcks(acks)
	return acks, nil
}

// History implements store.Store.
func (s *Store) History(ctx context.Context, limit int) ([]store.HistoryEntry, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	var all []store.HistoryEntry
	err := s.walkHistory(ctx, kindChange+kindSwitch, limit, func(changes []store.HistoryEntry) error {
		all = append(all, changes...)
		return nil
	})
	return all, err
}

// walkHistory calls f with at most limit changes, newest first, some at a time, of these kinds.
func (s *Store) walkHistory(ctx context.Context, kinds string, limit int, f func([]store.HistoryEntry) error) error {
	segments, err := s.segments(ctx)
	if err != nil {
		return err
	}
	for _, segment := range slices.Backward(segments) {
		names, err := s.historyNames(ctx, segment, kinds)
		if err != nil {
			return err
		}
		slices.Reverse(names)
		for len(names) > 0 && limit > 0 {
			n := min(len(names), limit, historyBatch)
			changes := make([]store.HistoryEntry, n)
			err := parallel(n, func(i int) (err error) {
				changes[i], err = s.historyEntry(ctx, segment, names[i])
				return err
			})
			if err != nil {
				return err
			}
			// The segment may be on its way out.
			changes = slices.DeleteFunc(changes, func(h store.HistoryEntry) bool { return h.Seq == 0 })
			if err := f(changes); err != nil {
				return err
			}
			names, limit = names[n:], limit-n
		}
	}
	return nil
}

// segments lists the segments of the history, oldest first.
func (s *Store) segments(ctx context.Context) ([]int64, error) {
	names, err := s.children(ctx, s.root+"/history")
	if err != nil {
		return nil, err
	}
	var segments []int64
	for _, name := range names {
		if n, err := strconv.ParseInt(name, 10, 64); err == nil {
			segments = append(segments, n)
		}
	}
	slices.Sort(segments)
	return segments, nil
}

// historyNames lists the entries of a segment that are of these kinds, oldest first.
func (s *Store) historyNames(ctx context.Context, segment int64, kinds string) ([]string, error) {
	names, err := s.children(ctx, s.segmentPath(segment))
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		have, _, ok := historyName(name)
		return !ok || !strings.Contains(kinds, have)
	})
	slices.SortFunc(names, func(a, b string) int {
		_, x, _ := historyName(a)
		_, y, _ := historyName(b)
		return int(x - y)
	})
	return names, nil
}

// historyEntry reads one entry; Seq is 0 when it is gone.
func (s *Store) historyEntry(ctx context.Context, segment int64, name string) (store.HistoryEntry, error) {
	var h store.HistoryEntry
	path := s.segmentPath(segment) + "/" + name
	n, err := s.get(ctx, path)
	if err != nil || !n.exists() {
		return h, err
	}
	if err := decodeJSON(n.data, &h); err != nil {
		return h, fmt.Errorf("%s: %w", path, err)
	}
	_, seq, _ := historyName(name)
	h.Seq = uint64(segment)*segmentSpan + uint64(seq)
	return h, nil
}

type storedKey struct {
	Format int    `json:"format"`
	Key    []byte `json:"key"`
}

// TagKey implements store.Store.
func (s *Store) TagKey(ctx context.Context) ([]byte, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	path := s.root + "/tagkey"
	n, err := s.get(ctx, path)
	if err == nil && !n.exists() {
		var data []byte
		if data, err = json.Marshal(storedKey{Format: treeFormat, Key: store.NewTagKey()}); err != nil {
			return nil, err
		}
		if err = s.ensure(ctx, path, data, s.secretACL); err == nil {
			n, err = s.get(ctx, path)
		}
	}
	if err != nil {
		return nil, err
	}
	var k storedKey
	// What is in the node is a secret, and a message of the JSON decoder may quote it.
	if json.Unmarshal(n.data, &k) != nil || k.Format != treeFormat || len(k.Key) == 0 {
		return nil, fmt.Errorf("%s is damaged or of a newer version: remove it to have a new key made (clients reconnect then)", path)
	}
	return k.Key, nil
}
