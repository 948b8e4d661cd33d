package zk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-zookeeper/zk"

	"pointsman/core/switching"
	"pointsman/store"
)

func (s *Store) batchPath(id string) string { return s.root + "/batches/" + id }

func (s *Store) batchingPath(id string) string { return s.root + "/batching/" + id }

func (s *Store) partPath(id string, index int) string {
	return fmt.Sprintf("%s/%04d", s.batchPath(id), index)
}

// Batch implements store.Store.
func (s *Store) Batch(ctx context.Context, id string) (switching.Batch, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return switching.Batch{}, err
	}
	b, _, err := s.batchRecord(ctx, id)
	return b, err
}

func (s *Store) batchRecord(ctx context.Context, id string) (b switching.Batch, n node, err error) {
	if store.CheckID("batch", id) != nil {
		return b, n, fmt.Errorf("batch %q: %w", id, store.ErrNotFound)
	}
	if n, err = s.get(ctx, s.batchPath(id)); err != nil {
		return b, n, err
	}
	if !n.exists() {
		return b, n, fmt.Errorf("batch %s: %w", id, store.ErrNotFound)
	}
	if err = decodeJSON(n.data, &b); err != nil {
		err = fmt.Errorf("batch %s: %w", id, err)
	}
	return b, n, err
}

// Batches implements store.Store.
func (s *Store) Batches(ctx context.Context, limit int) ([]switching.Batch, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	all, err := s.batchesIn(ctx, s.root+"/batches")
	slices.Reverse(all)
	return all[:min(len(all), max(limit, 0))], err
}

// RunningBatches implements store.Store.
func (s *Store) RunningBatches(ctx context.Context) ([]switching.Batch, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	all, err := s.batchesIn(ctx, s.root+"/batching")
	return slices.DeleteFunc(all, func(b switching.Batch) bool { return b.State.Over() }), err
}

// batchesIn reads the batches that are named by the children of a node, in the order in which they began.
func (s *Store) batchesIn(ctx context.Context, path string) ([]switching.Batch, error) {
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	var all []switching.Batch
	err := s.synced(ctx, func() error {
		ids, err := s.children(ctx, path)
		if err != nil {
			return err
		}
		found := make([]switching.Batch, len(ids))
		err = parallel(len(ids), func(i int) (err error) {
			if found[i], _, err = s.batchRecord(ctx, ids[i]); errors.Is(err, store.ErrNotFound) {
				return nil
			}
			return err
		})
		all = slices.DeleteFunc(found, func(b switching.Batch) bool { return b.Rev == 0 })
		return err
	})
	if err != nil {
		return nil, err
	}
	store.SortBatches(all)
	return all, nil
}

// PutBatch implements store.Store. A batch that is not over has a node in batching, made and removed in the write of its record.
func (s *Store) PutBatch(ctx context.Context, b switching.Batch) error {
	if err := store.CheckBatch(b); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	w := &revisionWrite{s: s, name: "batch " + b.ID, path: s.batchPath(b.ID), rev: b.Rev, value: b, index: s.batchingPath(b.ID), runs: !b.State.Over()}
	if err := s.write(ctx, "writing batch "+b.ID, w); err != nil || b.Rev > 1 {
		return err
	}
	if err := s.dropBatches(ctx); err != nil {
		s.log.Warn("old batches could not be removed; the next one that begins tries again", "err", err)
	}
	return nil
}

// BatchParts implements store.Store.
func (s *Store) BatchParts(ctx context.Context, id string) ([]switching.BatchPart, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	var parts []switching.BatchPart
	err := s.synced(ctx, func() error {
		if _, _, err := s.batchRecord(ctx, id); err != nil {
			return err
		}
		names, err := s.children(ctx, s.batchPath(id))
		if err != nil {
			return err
		}
		slices.Sort(names)
		parts = make([]switching.BatchPart, len(names))
		return parallel(len(names), func(i int) error {
			n, err := s.get(ctx, s.batchPath(id)+"/"+names[i])
			if err == nil && n.exists() {
				err = decodeJSON(n.data, &parts[i])
			}
			if err != nil {
				return fmt.Errorf("part %s of batch %s: %w", names[i], id, err)
			}
			return nil
		})
	})
	return slices.DeleteFunc(parts, func(p switching.BatchPart) bool { return p.Rev == 0 }), err
}

// PutBatchPart implements store.Store.
func (s *Store) PutBatchPart(ctx context.Context, id string, p switching.BatchPart) error {
	if err := store.CheckPart(id, p); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	name := store.PartName(id, p.Index)
	return s.write(ctx, "writing "+name, &revisionWrite{s: s, name: name, path: s.partPath(id, p.Index), rev: p.Rev, value: p, parent: s.batchPath(id)})
}

// revisionWrite writes a value over the one with the revision before.
type revisionWrite struct {
	s      *Store
	name   string
	path   string
	parent string // what has to be there; "" is nothing
	rev    uint64
	value  any
	// index, when not "", is a node that is there while the value runs.
	index string
	runs  bool

	data    []byte
	found   node
	have    uint64
	indexed bool
	orphan  bool // parent is not there
}

func (w *revisionWrite) look(ctx context.Context) (err error) {
	if w.data == nil {
		if w.data, err = encodeJSON(w.value); err != nil {
			return err
		}
	}
	if err := w.s.sync(ctx); err != nil {
		return err
	}
	if w.parent != "" {
		n, err := w.s.get(ctx, w.parent)
		if w.orphan = !n.exists(); err != nil || w.orphan {
			return err
		}
	}
	if w.found, err = w.s.get(ctx, w.path); err != nil {
		return err
	}
	w.have = 0
	if w.found.exists() {
		var stored struct {
			Rev uint64 `json:"rev"`
		}
		if err := decodeJSON(w.found.data, &stored); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		w.have = stored.Rev
	}
	if w.index != "" {
		n, err := w.s.get(ctx, w.index)
		w.indexed = n.exists()
		return err
	}
	return nil
}

func (w *revisionWrite) done() bool { return w.found.exists() && bytes.Equal(w.found.data, w.data) }

func (w *revisionWrite) conflict() error {
	if w.orphan {
		return fmt.Errorf("%s: %w", w.name, store.ErrNotFound)
	}
	if conflict := store.RevisionConflict(w.name, w.rev, w.have); conflict != nil {
		return conflict
	}
	return nil
}

func (w *revisionWrite) ops() ([]any, error) {
	if len(w.data) > store.MaxBatchValue {
		return nil, fmt.Errorf("%w: %s has %d bytes, more than the %d that a value may have", store.ErrTooLarge, w.name, len(w.data), store.MaxBatchValue)
	}
	var ops []any
	if w.found.exists() {
		ops = append(ops, &zk.SetDataRequest{Path: w.path, Data: w.data, Version: w.found.stat.Version})
	} else {
		ops = append(ops, &zk.CreateRequest{Path: w.path, Data: w.data, Acl: w.s.acl})
	}
	switch {
	case w.index == "" || w.runs == w.indexed:
	case w.runs:
		ops = append(ops, &zk.CreateRequest{Path: w.index, Acl: w.s.acl})
	default:
		ops = append(ops, &zk.DeleteRequest{Path: w.index, Version: -1})
	}
	return ops, nil
}

func (w *revisionWrite) written([]zk.MultiResponse, []any) {}

// dropBatches removes the oldest batches that are over, beyond those that are kept.
func (s *Store) dropBatches(ctx context.Context) error {
	ids, err := s.children(ctx, s.root+"/batches")
	if err != nil || len(ids) <= store.KeptBatches {
		return err
	}
	all, err := s.batchesIn(ctx, s.root+"/batches")
	if err != nil {
		return err
	}
	for _, id := range store.DroppedBatches(all) {
		parts, err := s.children(ctx, s.batchPath(id))
		if err != nil {
			return err
		}
		err = parallel(len(parts), func(i int) error { return s.delete(ctx, s.batchPath(id)+"/"+parts[i]) })
		for _, path := range []string{s.batchingPath(id), s.batchPath(id)} {
			if err == nil {
				err = s.delete(ctx, path)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
