package store

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"pointsman/core/switching"
)

// Batches is where the records of batches are kept. A batch has one record and some parts, each with revisions of its own.
type Batches interface {
	// Batch reads the record of a batch; ErrNotFound.
	Batch(ctx context.Context, id string) (switching.Batch, error)
	// Batches lists the records, newest first, at most limit.
	Batches(ctx context.Context, limit int) ([]switching.Batch, error)
	// RunningBatches reads the records that are not over, oldest first, as of now. However many have ended, it costs what the running ones cost.
	RunningBatches(ctx context.Context) ([]switching.Batch, error)
	// PutBatch writes a record over the one with the revision before: revision 1 creates, revision n replaces n−1. Anything else is
	// a *ConflictError. Beyond KeptBatches the oldest that are over are dropped when one is created, with their parts.
	PutBatch(ctx context.Context, b switching.Batch) error
	// BatchParts reads the parts of a batch, as of now, in the order of their indexes; ErrNotFound when there is no such batch.
	BatchParts(ctx context.Context, id string) ([]switching.BatchPart, error)
	// PutBatchPart writes a part by the same rule as PutBatch does a record; ErrNotFound when there is no such batch.
	PutBatchPart(ctx context.Context, id string, p switching.BatchPart) error
}

const (
	// KeptBatches is how many batches a store keeps, but for those that are not over.
	KeptBatches = 64
	// MaxPartIndex is the highest index of a part.
	MaxPartIndex = 9999
	// MaxBatchValue bounds a record or a part as it is stored, in bytes.
	MaxBatchValue = 256 << 10
)

// CheckBatch tells what makes the record of a batch unfit for every store.
func CheckBatch(b switching.Batch) error {
	if b.Rev == 0 {
		return fmt.Errorf("batch %s: the record has revision 0: want 1 for a new one, else one more than that of the record that it replaces", b.ID)
	}
	return CheckID("batch", b.ID)
}

// CheckPart tells what makes a part unfit for every store.
func CheckPart(id string, p switching.BatchPart) error {
	switch {
	case p.Rev == 0:
		return fmt.Errorf("batch %s: part %d has revision 0: want 1 for a new one, else one more than that of the part that it replaces", id, p.Index)
	case p.Index < 0 || p.Index > MaxPartIndex:
		return fmt.Errorf("batch %s: part %d: want an index from 0 to %d", id, p.Index, MaxPartIndex)
	}
	return CheckID("batch", id)
}

// RevisionConflict compares a stored revision (0: none) with the next one. Nil: it may be written.
func RevisionConflict(name string, next, have uint64) *ConflictError {
	if next == have+1 {
		return nil
	}
	text := func(rev uint64) string {
		if rev == 0 {
			return "absent"
		}
		return fmt.Sprintf("revision %d", rev)
	}
	return &ConflictError{Name: name, Want: text(next - 1), Have: text(have)}
}

// PartName names a part in a conflict.
func PartName(id string, index int) string { return fmt.Sprintf("part %d of batch %s", index, id) }

// SortBatches puts records into the order in which they began.
func SortBatches(all []switching.Batch) {
	slices.SortFunc(all, func(a, b switching.Batch) int {
		return cmp.Or(a.Started.Compare(b.Started), strings.Compare(a.ID, b.ID))
	})
}

// batchState is a batch in a core.
type batchState struct {
	Batch switching.Batch             `json:"batch"`
	Parts map[int]switching.BatchPart `json:"parts,omitempty"`
}

type partRecord struct {
	ID   string              `json:"id"`
	Part switching.BatchPart `json:"part"`
}

// putBatchRecord makes the record of a PutBatch, or says with what it conflicts.
func (c *core) putBatchRecord(b switching.Batch) (record, error) {
	have := uint64(0)
	if s := c.batches[b.ID]; s != nil {
		have = s.Batch.Rev
	}
	if conflict := RevisionConflict("batch "+b.ID, b.Rev, have); conflict != nil {
		return record{}, conflict
	}
	return record{Seq: c.seq + 1, Batch: &b}, nil
}

// putPartRecord makes the record of a PutBatchPart, or says with what it conflicts.
func (c *core) putPartRecord(id string, p switching.BatchPart) (record, error) {
	s := c.batches[id]
	if s == nil {
		return record{}, fmt.Errorf("batch %s: %w", id, ErrNotFound)
	}
	if conflict := RevisionConflict(PartName(id, p.Index), p.Rev, s.Parts[p.Index].Rev); conflict != nil {
		return record{}, conflict
	}
	p.Items = slices.Clone(p.Items) // the caller goes on with his
	return record{Seq: c.seq + 1, Part: &partRecord{id, p}}, nil
}

// setBatch carries out what putBatchRecord and putPartRecord have made.
func (c *core) setBatch(r record) {
	switch {
	case r.Part != nil:
		if s := c.batches[r.Part.ID]; s != nil {
			s.Parts[r.Part.Part.Index] = r.Part.Part
		}
	case c.batches[r.Batch.ID] != nil:
		c.batches[r.Batch.ID].Batch = *r.Batch
	default:
		c.batches[r.Batch.ID] = &batchState{Batch: *r.Batch, Parts: map[int]switching.BatchPart{}}
		for _, old := range DroppedBatches(c.listBatches(func(switching.Batch) bool { return true })) {
			delete(c.batches, old)
		}
	}
}

// DroppedBatches are the ids of those that are beyond KeptBatches; all is in the order in which they began.
func DroppedBatches(all []switching.Batch) (ids []string) {
	for _, b := range all {
		if len(all)-len(ids) <= KeptBatches {
			break
		}
		if b.State.Over() {
			ids = append(ids, b.ID)
		}
	}
	return ids
}

func (c *core) batch(id string) (switching.Batch, error) {
	s := c.batches[id]
	if s == nil {
		return switching.Batch{}, fmt.Errorf("batch %s: %w", id, ErrNotFound)
	}
	return s.Batch, nil
}

// listBatches lists those that keep wants, in the order in which they began.
func (c *core) listBatches(keep func(switching.Batch) bool) []switching.Batch {
	all := []switching.Batch{}
	for _, s := range c.batches {
		if keep(s.Batch) {
			all = append(all, s.Batch)
		}
	}
	SortBatches(all)
	return all
}

func (c *core) newestBatches(limit int) []switching.Batch {
	all := c.listBatches(func(switching.Batch) bool { return true })
	slices.Reverse(all)
	return all[:min(len(all), max(limit, 0))]
}

func (c *core) runningBatches() []switching.Batch {
	return c.listBatches(func(b switching.Batch) bool { return !b.State.Over() })
}

func (c *core) batchParts(id string) ([]switching.BatchPart, error) {
	s := c.batches[id]
	if s == nil {
		return nil, fmt.Errorf("batch %s: %w", id, ErrNotFound)
	}
	parts := make([]switching.BatchPart, 0, len(s.Parts))
	for _, i := range slices.Sorted(maps.Keys(s.Parts)) {
		p := s.Parts[i]
		p.Items = slices.Clone(p.Items)
		parts = append(parts, p)
	}
	return parts, nil
}

// Batch implements Store.
func (m *Memory) Batch(ctx context.Context, id string) (switching.Batch, error) {
	if err := m.begin(ctx, "Batch"); err != nil {
		return switching.Batch{}, err
	}
	defer m.core.mu.Unlock()
	return m.core.batch(id)
}

// Batches implements Store.
func (m *Memory) Batches(ctx context.Context, limit int) ([]switching.Batch, error) {
	if err := m.begin(ctx, "Batches"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.newestBatches(limit), nil
}

// RunningBatches implements Store.
func (m *Memory) RunningBatches(ctx context.Context) ([]switching.Batch, error) {
	if err := m.begin(ctx, "RunningBatches"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.runningBatches(), nil
}

// PutBatch implements Store.
func (m *Memory) PutBatch(ctx context.Context, b switching.Batch) error {
	if err := CheckBatch(b); err != nil {
		return err
	}
	return m.putBatch(ctx, "PutBatch", func() (record, error) { return m.core.putBatchRecord(b) })
}

// BatchParts implements Store.
func (m *Memory) BatchParts(ctx context.Context, id string) ([]switching.BatchPart, error) {
	if err := m.begin(ctx, "BatchParts"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.batchParts(id)
}

// PutBatchPart implements Store.
func (m *Memory) PutBatchPart(ctx context.Context, id string, p switching.BatchPart) error {
	if err := CheckPart(id, p); err != nil {
		return err
	}
	return m.putBatch(ctx, "PutBatchPart", func() (record, error) { return m.core.putPartRecord(id, p) })
}

func (m *Memory) putBatch(ctx context.Context, op string, make func() (record, error)) error {
	if err := m.begin(ctx, op); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	r, err := make()
	if err != nil {
		return err
	}
	m.core.apply(r)
	return m.answer(op)
}

// Batch implements Store.
func (f *File) Batch(ctx context.Context, id string) (switching.Batch, error) {
	if err := f.begin(ctx); err != nil {
		return switching.Batch{}, err
	}
	defer f.core.mu.Unlock()
	return f.core.batch(id)
}

// Batches implements Store.
func (f *File) Batches(ctx context.Context, limit int) ([]switching.Batch, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.newestBatches(limit), nil
}

// RunningBatches implements Store.
func (f *File) RunningBatches(ctx context.Context) ([]switching.Batch, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.runningBatches(), nil
}

// PutBatch implements Store.
func (f *File) PutBatch(ctx context.Context, b switching.Batch) error {
	if err := CheckBatch(b); err != nil {
		return err
	}
	return f.putBatch(ctx, func() (record, error) { return f.core.putBatchRecord(b) })
}

// BatchParts implements Store.
func (f *File) BatchParts(ctx context.Context, id string) ([]switching.BatchPart, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.batchParts(id)
}

// PutBatchPart implements Store.
func (f *File) PutBatchPart(ctx context.Context, id string, p switching.BatchPart) error {
	if err := CheckPart(id, p); err != nil {
		return err
	}
	return f.putBatch(ctx, func() (record, error) { return f.core.putPartRecord(id, p) })
}

func (f *File) putBatch(ctx context.Context, make func() (record, error)) error {
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	r, err := make()
	if err != nil {
		return err
	}
	return f.commit(r)
}
