package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// Sizes of a file store.
const (
	// segmentBytes and segmentRecords end a journal segment.
	segmentBytes   = 4 << 20
	segmentRecords = 1000
	// maxSegments is how many segments are kept as history, beyond those that a start needs.
	maxSegments = 32
	// snapshotEvery is how many journal bytes lead to a snapshot at least; a big map waits for twice its own size.
	snapshotEvery = 8 << 20
)

// File is a store in a directory of one node. One process owns the directory. Reads come from memory; every write is
// on the disk before it is confirmed.
//
// The directory holds LOCK (kernel lock, and the owner's process id), journal segments and the two newest snapshots.
// A start reads the newest good snapshot and the journal from there on. The journal is the history as well.
type File struct {
	dir  string
	lock *os.File
	core *core

	// Guarded by core.mu:
	journal    journal
	registered string
	isClosed   bool
	sinceSnap  int64         // journal bytes since the newest snapshot
	snapSize   int64         // of the newest snapshot
	snapping   chan struct{} // not nil while a snapshot is being written; closed when it is done
	snapError  error         // of the last snapshot

	closed chan struct{}
}

// OpenFile opens the store in dir, which is made when it does not exist. A second process is refused.
func OpenFile(dir string) (*File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	lock, err := LockDir(dir)
	if err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	f := &File{dir: dir, lock: lock, closed: make(chan struct{})}
	if err := f.load(); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("map store %s: %w", dir, err)
	}
	return f, nil
}

// LockDir takes the kernel's lock on the directory, which ends with the process whatever becomes of it.
func LockDir(dir string) (*os.File, error) {
	name := filepath.Join(dir, "LOCK")
	lock, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		owner := "another process"
		if text, err := os.ReadFile(name); err == nil && len(text) > 0 && len(text) < 20 {
			owner = "process " + strings.TrimSpace(string(text))
		}
		_ = lock.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking %s failed: %w", name, err)
		}
		return nil, fmt.Errorf("directory %s is in use by %s: stop it, or give this process a directory of its own", dir, owner)
	}
	if err := lock.Truncate(0); err == nil {
		_, err = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		if err != nil {
			_ = lock.Close()
			return nil, fmt.Errorf("writing %s failed: %w", name, err)
		}
	}
	return lock, nil
}

// load reads the newest good snapshot and the journal behind it.
func (f *File) load() error {
	snapshots, err := numbered(f.dir, snapshotPrefix)
	if err != nil {
		return err
	}
	segments, err := numbered(f.dir, segmentPrefix)
	if err != nil {
		return err
	}
	if err := f.removeTemporary(); err != nil {
		return err
	}
	f.core = newCore()
	var damage error
	for _, seq := range slices.Backward(snapshots) {
		c, size, err := readSnapshot(f.dir, seq)
		if err == nil {
			f.core, f.snapSize = c, size
			break
		}
		damage = errors.Join(damage, err)
	}
	if damage != nil && f.core.seq == 0 && (len(segments) == 0 || segments[0] > 1) {
		return fmt.Errorf("no snapshot can be read and the journal does not reach back to the start; restore the directory from a copy: %w", damage)
	}
	if err := f.loadDocuments(); err != nil {
		return err
	}
	f.journal.dir = f.dir
	for i, first := range segments {
		if i+1 < len(segments) && segments[i+1] <= f.core.seq+1 {
			continue // history only: everything in it is in the snapshot
		}
		if first > f.core.seq+1 {
			return fmt.Errorf("the journal lacks the records %d to %d, before %s; restore the directory from a copy", f.core.seq+1, first-1, segmentName(first))
		}
		if err := f.replay(first, i == len(segments)-1); err != nil {
			return err
		}
	}
	return nil
}

func (f *File) removeTemporary() error {
	files, err := filepath.Glob(filepath.Join(f.dir, "*"+temporaryEnd))
	if err != nil {
		return err
	}
	for _, name := range files {
		if err := os.Remove(name); err != nil {
			return err
		}
	}
	return nil
}

// replay applies a segment; the newest one is cut behind its last good record and left open.
func (f *File) replay(first uint64, newest bool) error {
	name := filepath.Join(f.dir, segmentName(first))
	data, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	next, count := first, 0
	end, clean, more, err := readFrames(data, func(payload []byte) error {
		var r record
		if err := json.Unmarshal(payload, &r); err != nil {
			return err
		}
		if r.Seq != next {
			return fmt.Errorf("record %d where %d belongs", r.Seq, next)
		}
		next++
		count++
		if r.Seq > f.core.seq {
			f.core.apply(r)
		}
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("%s is damaged: %w", name, err)
	case !clean && (more || !newest):
		return fmt.Errorf("%s is damaged at byte %d of %d, and good records follow; restore it from a copy, or move it and all newer ones away "+
			"(this loses every change from record %d on)", name, end, len(data), next)
	}
	f.sinceSnap += int64(end)
	if !newest {
		return nil
	}
	file, err := os.OpenFile(name, os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if !clean {
		// The write that a crash interrupted; it was never confirmed.
		err = file.Truncate(int64(end))
		if err == nil {
			err = file.Sync()
		}
		if err != nil {
			_ = file.Close()
			return fmt.Errorf("cutting the unfinished record off %s failed: %w", name, err)
		}
	}
	f.journal.file, f.journal.first, f.journal.size, f.journal.count = file, first, int64(end), count
	return nil
}

// commit writes r to the journal and applies it. core.mu is held.
func (f *File) commit(r record) error {
	payload, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := f.journal.append(r.Seq, payload); err != nil {
		return fmt.Errorf("map store %s: %w", f.dir, err)
	}
	f.core.apply(r)
	f.sinceSnap += int64(len(payload))
	if f.journal.size >= segmentBytes || f.journal.count >= segmentRecords {
		if err := f.journal.roll(); err != nil {
			f.journal.broken = fmt.Errorf("closing a journal segment failed: %w; %w", err, errUnwritable)
		}
	}
	if f.snapping == nil && f.sinceSnap >= max(snapshotEvery, 2*f.snapSize) {
		f.startSnapshot()
	}
	return nil
}

// startSnapshot writes a snapshot beside the running store. core.mu is held.
func (f *File) startSnapshot() {
	im, err := f.core.image()
	if err != nil {
		f.snapError = err
		return
	}
	f.sinceSnap = 0
	done := make(chan struct{})
	f.snapping = done
	go func() {
		defer close(done)
		size, err := im.write(f.dir)
		f.core.mu.Lock()
		defer f.core.mu.Unlock()
		f.snapping, f.snapError = nil, err
		if err == nil {
			f.snapSize = size
			f.snapError = f.prune()
		}
	}()
}

// prune removes the snapshots but the two newest, and the segments that neither a start from the older of them nor the
// history needs. core.mu is held.
func (f *File) prune() error {
	snapshots, err := numbered(f.dir, snapshotPrefix)
	if err != nil {
		return err
	}
	segments, err := numbered(f.dir, segmentPrefix)
	if err != nil {
		return err
	}
	for len(snapshots) > 2 {
		if err := os.Remove(filepath.Join(f.dir, snapshotName(snapshots[0]))); err != nil {
			return err
		}
		snapshots = snapshots[1:]
	}
	if len(snapshots) < 2 {
		return nil
	}
	for len(segments) > maxSegments && segments[1] <= snapshots[0]+1 {
		if err := os.Remove(filepath.Join(f.dir, segmentName(segments[0]))); err != nil {
			return err
		}
		segments = segments[1:]
	}
	return nil
}

// begin starts an operation: it returns with core.mu locked, or an error.
func (f *File) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	f.core.mu.Lock()
	if f.isClosed {
		f.core.mu.Unlock()
		return ErrClosed
	}
	return nil
}

// Watch implements Store.
func (f *File) Watch(ctx context.Context, sink func(Update)) error {
	never := func() bool { return false }
	f.core.watch(ctx, f, f.closed, sink, never, never)
	return nil
}

// Entry implements Store.
func (f *File) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	if err := f.begin(ctx); err != nil {
		return route.Entry{}, false, err
	}
	defer f.core.mu.Unlock()
	e, ok := f.core.entry(topic)
	return e, ok, nil
}

// Entries implements Store.
func (f *File) Entries(ctx context.Context) ([]route.Entry, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.entries(), nil
}

// Rules implements Store.
func (f *File) Rules(ctx context.Context) ([]route.Rule, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return slices.Clone(f.core.rules), nil
}

// Apply implements Store.
func (f *File) Apply(ctx context.Context, c Change) error {
	if err := c.Validate(); err != nil {
		return err
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	r, err := f.core.change(c, time.Now())
	if err != nil {
		return err
	}
	return f.commit(r)
}

// Switch implements Store.
func (f *File) Switch(ctx context.Context, id string) (switching.Record, error) {
	if err := f.begin(ctx); err != nil {
		return switching.Record{}, err
	}
	defer f.core.mu.Unlock()
	return f.core.switchRecord(id)
}

// Switches implements Store.
func (f *File) Switches(ctx context.Context, limit int) ([]switching.Record, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.switchRecords(limit), nil
}

// SwitchesOf implements Store.
func (f *File) SwitchesOf(ctx context.Context, batch string) ([]switching.Record, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.recordsOf(batch), nil
}

// Running implements Store.
func (f *File) Running(ctx context.Context) ([]switching.Record, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.runningRecords(), nil
}

// PutSwitch implements Store.
func (f *File) PutSwitch(ctx context.Context, rec switching.Record) error {
	if err := CheckRecord(rec); err != nil {
		return err
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	r, err := f.core.putSwitchRecord(rec)
	if err != nil {
		return err
	}
	return f.commit(r)
}

// PutAck implements Store.
func (f *File) PutAck(ctx context.Context, id string, a switching.Ack) error {
	if err := CheckAck(a); err != nil {
		return err
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	r, err := f.core.putAckRecord(id, a)
	if err != nil {
		return err
	}
	return f.commit(r)
}

// Acks implements Store.
func (f *File) Acks(ctx context.Context, id string) ([]switching.Ack, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.acks(id)
}

// History implements Store: it reads the journal, which is not kept in memory, beside the running store.
func (f *File) History(ctx context.Context, limit int) ([]HistoryEntry, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	segments, err := numbered(f.dir, segmentPrefix)
	newest, size := f.journal.first, f.journal.size
	f.core.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var all []HistoryEntry
	for _, first := range slices.Backward(segments) {
		if len(all) >= limit {
			break
		}
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("reading the history: %w: %w", ErrUnavailable, err)
		}
		end := int64(-1)
		if first == newest {
			end = size // more may be on its way
		}
		changes, err := f.readHistory(first, end)
		if errors.Is(err, os.ErrNotExist) {
			break // it and all older ones were dropped meanwhile
		}
		if err != nil {
			return nil, err
		}
		slices.Reverse(changes)
		all = append(all, changes[:min(len(changes), limit-len(all))]...)
	}
	return all, nil
}

// readHistory reads a segment up to end, or as a whole when end is negative.
func (f *File) readHistory(first uint64, end int64) ([]HistoryEntry, error) {
	name := filepath.Join(f.dir, segmentName(first))
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if end >= 0 && end < int64(len(data)) {
		data = data[:end]
	}
	var changes []HistoryEntry
	_, clean, _, err := readFrames(data, func(payload []byte) error {
		var r record
		if err := json.Unmarshal(payload, &r); err != nil {
			return err
		}
		if r.Change != nil {
			changes = append(changes, *r.Change)
		}
		return nil
	})
	if err == nil && !clean {
		err = errBrokenFrame
	}
	if err != nil {
		return nil, fmt.Errorf("history: %s is damaged: %w", name, err)
	}
	return changes, nil
}

// Register implements Store. A file store has one member, this process, and forgets it with the process.
func (f *File) Register(ctx context.Context, p Proxy) error {
	if err := CheckProxy(p); err != nil {
		return err
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	anew := f.registered != p.ID
	delete(f.core.proxies, f.registered)
	p.Live = true
	f.core.proxies[p.ID] = p
	f.registered = p.ID
	f.core.mu.Unlock()
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	return f.core.awaitWatches(ctx, f, anew)
}

// Unregister implements Store. It leaves no tombstone: nobody else is there to see it, and the next process is young.
func (f *File) Unregister(ctx context.Context, _ bool) error {
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	delete(f.core.proxies, f.registered)
	f.registered = ""
	return nil
}

// Forget implements Store.
func (f *File) Forget(ctx context.Context, id string) error {
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	return f.core.forget(id, time.Now())
}

// Proxies implements Store.
func (f *File) Proxies(ctx context.Context) ([]Proxy, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.listProxies(), nil
}

// Tombstones implements Store. There are none: the only member of a file store is this process.
func (f *File) Tombstones(ctx context.Context) ([]Tombstone, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.tombstones(), nil
}

// Lease implements Store: nothing can come between this process and its directory, and no other process has it.
func (f *File) Lease() time.Duration { return Forever }

// Confirmed implements Store.
func (f *File) Confirmed() time.Duration { return Boottime() }

// Lead implements Store: only this process can lead.
func (f *File) Lead(ctx context.Context, id string, lead func(context.Context)) error {
	if err := CheckID("proxy", id); err != nil {
		return err
	}
	f.core.lead(ctx, f.closed, id, func() bool { return !f.isClosed }, lead)
	return nil
}

// Leader implements Store.
func (f *File) Leader(ctx context.Context) (string, error) {
	if err := f.begin(ctx); err != nil {
		return "", err
	}
	defer f.core.mu.Unlock()
	return f.core.leaderID(), nil
}

// TagKey implements Store.
func (f *File) TagKey(ctx context.Context) ([]byte, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	if f.core.tagKey == nil {
		if err := f.commit(record{Seq: f.core.seq + 1, TagKey: NewTagKey()}); err != nil {
			return nil, err
		}
	}
	return slices.Clone(f.core.tagKey), nil
}

// Status implements Store.
func (f *File) Status() Status {
	f.core.mu.Lock()
	defer f.core.mu.Unlock()
	s := Status{Kind: "file", Connected: true, Contact: time.Now(), Detail: f.dir}
	switch {
	case f.isClosed:
		s.Connected, s.Detail = false, f.dir+": closed"
	case f.journal.broken != nil:
		s.Detail = f.dir + ": " + f.journal.broken.Error()
	case f.snapError != nil:
		s.Detail = f.dir + ": the last snapshot failed: " + f.snapError.Error()
	}
	return s
}

// Close implements Store. It waits for a snapshot that is being written.
func (f *File) Close() error {
	f.core.mu.Lock()
	if f.isClosed {
		f.core.mu.Unlock()
		return nil
	}
	f.isClosed = true
	close(f.closed)
	f.core.election.elect()
	err := f.journal.roll()
	snapping := f.snapping
	f.core.mu.Unlock()
	if snapping != nil {
		<-snapping
	}
	return errors.Join(err, f.lock.Close())
}

var _ Store = (*File)(nil)
