package zk

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/store"
)

// Entries that are not active are stored apart from their bucket, in moving/<bucket>, as a bucket of their own that
// exists only meanwhile: a step of a switch writes some hundred bytes, and the bucket once, at the flip. Where the map is
// read, they are laid over the entries of the bucket.
//
// Whoever reads both reads moving first. Then an entry that has gone from there was put into the bucket before the bucket was
// read, and a topic is never seen as it was before its switch.
//
// Two nodes are compared and one is written, so a write must make sure of the other: each change checks the version of the
// bucket or of the moving node that it leaves alone, and that of moving itself, which counts the moving nodes that were
// ever made. With that a node that was not there is known not to be there still, and one that was removed and made
// again, whose versions begin anew, is not taken for the one before. Nodes of buckets are never removed, for the same reason.

func (s *Store) movingPath(index int) string { return fmt.Sprintf("%s/moving/%04d", s.root, index) }

// movingNode is a moving node as it was read; nil: nothing of that bucket moves.
type movingNode struct {
	entries *store.Bucket
	stat    zk.Stat
}

func (m *movingNode) entry(topic string) (route.Entry, bool) {
	if m == nil {
		return route.Entry{}, false
	}
	return m.entries.Entry(topic)
}

// over lays the moving entries over those of their bucket; nil stands for a bucket without entries.
func (m *movingNode) over(b *store.Bucket) []route.Entry {
	if b == nil {
		b = store.NewBucket(nil)
	}
	if m != nil {
		for _, e := range m.entries.Entries() {
			b.Set(e.Topic, &e)
		}
	}
	return b.Entries()
}

func (s *Store) decodeMoving(index int, n node) (*movingNode, error) {
	if !n.exists() {
		return nil, nil
	}
	b, err := store.DecodeBucket(index, n.data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.movingPath(index), err)
	}
	for _, e := range b.Entries() {
		if !store.Moving(e) {
			return nil, fmt.Errorf("%s: %s has state %d, which is no step of a switch", s.movingPath(index), e.Topic, e.State)
		}
	}
	return &movingNode{b, *n.stat}, nil
}

// moving reads what moves of a bucket.
func (s *Store) moving(ctx context.Context, index int) (*movingNode, error) {
	n, err := s.get(ctx, s.movingPath(index))
	if err != nil {
		return nil, err
	}
	return s.decodeMoving(index, n)
}

// allMoving reads what moves of all buckets.
func (s *Store) allMoving(ctx context.Context) (map[int]*movingNode, error) {
	names, err := s.children(ctx, s.root+"/moving")
	if err != nil {
		return nil, err
	}
	nodes := make([]*movingNode, route.BucketCount)
	err = parallel(len(names), func(i int) (err error) {
		if index, ok := bucketIndex(names[i]); ok {
			nodes[index], err = s.moving(ctx, index)
		}
		return err
	})
	all := map[int]*movingNode{}
	for index, m := range nodes {
		if m != nil {
			all[index] = m
		}
	}
	return all, err
}

// findMoving reads, for a change, what moves of its buckets.
func (s *Store) findMoving(ctx context.Context, b *found, indexes []int) error {
	path := s.root + "/moving"
	n, err := s.get(ctx, path)
	if err != nil {
		return err
	}
	if !n.exists() {
		return s.rootGone(path)
	}
	b.moving, b.movingStat = map[int]*movingNode{}, n.stat
	if n.stat.NumChildren == 0 {
		return nil
	}
	nodes := make([]*movingNode, len(indexes))
	err = parallel(len(indexes), func(i int) (err error) {
		nodes[i], err = s.moving(ctx, indexes[i])
		return err
	})
	for i, m := range nodes {
		if m != nil {
			b.moving[indexes[i]] = m
		}
	}
	return err
}

// writeEntries adds what carries out the changes of entries. It alters b.
func (s *Store) writeEntries(out *batch, b *found, changes []store.EntryChange) error {
	altered := map[int]bool{} // buckets
	moved := map[int]bool{}   // moving nodes
	next := map[int]*store.Bucket{}
	for _, c := range changes {
		index := route.Bucket(c.Topic)
		if next[index] == nil {
			next[index] = store.NewBucket(b.moving[index].over(nil))
		}
		_, was := b.moving[index].entry(c.Topic)
		if c.After != nil && store.Moving(*c.After) {
			next[index].Set(c.Topic, c.After)
			moved[index] = true
			continue
		}
		if was {
			next[index].Set(c.Topic, nil)
			moved[index] = true
		}
		own, ok := b.buckets[index].Entry(c.Topic)
		if ok != (c.After != nil) || ok && own != *c.After {
			b.buckets[index].Set(c.Topic, c.After)
			altered[index] = true
		}
	}
	for index, bucket := range b.buckets {
		if err := s.writeBucket(out, s.bucketPath(index), index, bucket, b.stats[index], altered[index]); err != nil {
			return err
		}
	}
	return s.writeMoving(out, b, next, moved)
}

// writeBucket writes a bucket, or makes sure that it is still the one that was compared. One that does not exist is made
// either way.
func (s *Store) writeBucket(out *batch, path string, index int, bucket *store.Bucket, stat *zk.Stat, altered bool) error {
	if stat != nil && !altered {
		out.add(path, nil, &zk.CheckVersionRequest{Path: path, Version: stat.Version})
		return nil
	}
	data := bucket.Append(nil)
	if len(data) > store.MaxBucketBytes {
		return fmt.Errorf("%s would have %d bytes with %d entries, more than the %d that a bucket may have: "+
			"replace entries by namespace rules", path, len(data), bucket.Len(), store.MaxBucketBytes)
	}
	if stat == nil {
		out.add(path, data, &zk.CreateRequest{Path: path, Data: data, Acl: s.acl})
	} else {
		out.add(path, data, &zk.SetDataRequest{Path: path, Data: data, Version: stat.Version})
	}
	return nil
}

// writeMoving writes the moving nodes of a change, and makes sure of those that it leaves alone.
func (s *Store) writeMoving(out *batch, b *found, next map[int]*store.Bucket, moved map[int]bool) error {
	made, relied := false, false // nodes that are made; those that were read, or were found not to be there
	for index, bucket := range next {
		path, m := s.movingPath(index), b.moving[index]
		relied = relied || m != nil || !moved[index]
		switch {
		case m == nil && !moved[index]:
		case m == nil:
			made = true
			if err := s.writeBucket(out, path, index, bucket, nil, true); err != nil {
				return err
			}
		case bucket.Len() == 0:
			out.add(path, nil, &zk.DeleteRequest{Path: path, Version: m.stat.Version})
		default:
			if err := s.writeBucket(out, path, index, bucket, &m.stat, moved[index]); err != nil {
				return err
			}
		}
	}
	path := s.root + "/moving"
	switch {
	case made && relied:
		out.add(path, nil, &zk.SetDataRequest{Path: path, Version: b.movingStat.Version})
	case made: // others that make nodes are no conflict
		out.add(path, nil, &zk.SetDataRequest{Path: path, Version: -1})
	case relied:
		out.add(path, nil, &zk.CheckVersionRequest{Path: path, Version: b.movingStat.Version})
	}
	return nil
}

// followed is a moving node as a watch knows it.
type followed struct {
	*movingNode
	err error // not nil: it cannot be used
}

// movingEvent takes note of a change of a moving node, or of their list; it is called on the library's goroutine.
func (w *mapWatch) movingEvent(index int) {
	w.mu.Lock()
	if index < 0 {
		w.listMoving = true
	} else {
		w.dirtyMoving[index] = true
	}
	w.mu.Unlock()
	w.wake()
}

// errStale: what was read is of another session than what was read before, and may be older.
var errStale = errors.New("the session has changed")

// followMoving reads the moving nodes that may have changed and names the buckets whose entries are others now: those named, with list
// those that have come to the list or gone from it, with all any of them. Nothing has been taken over when it fails.
//
// A node that is known and still listed is not read for the list's sake: the watch that was left on it tells when it changes or goes, even if
// it has been made anew by then. So what one topic costs does not grow with how many move.
//
// All is read on the session that the last sync was on: a server that is behind could show an entry that has gone, or miss
// one that is there.
func (w *mapWatch) followMoving(ctx context.Context, all, list bool, indexes []int) (changed []int, err error) {
	if all || list {
		if indexes, err = w.listedMoving(ctx, all, indexes); err != nil {
			return nil, err
		}
	}
	nodes := make([]followed, len(indexes))
	err = parallel(len(indexes), func(i int) error {
		n, err := w.s.client.getFollowed(ctx, w.s.movingPath(indexes[i]))
		if err != nil {
			return err
		}
		nodes[i].movingNode, nodes[i].err = w.s.decodeMoving(indexes[i], n)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if w.s.client.sessionID() != w.session {
		return nil, errStale
	}
	for i, index := range indexes {
		old, had := w.moving[index]
		now := nodes[i]
		has := now.movingNode != nil || now.err != nil
		if had && has && old.err == nil && now.err == nil && old.stat.Mzxid == now.stat.Mzxid {
			continue
		}
		if !had && !has {
			continue
		}
		changed = append(changed, index)
		if has {
			w.moving[index] = now
		} else {
			delete(w.moving, index)
		}
	}
	return changed, nil
}

// listedMoving are the buckets of which something moves that is not known, or was moving and is not listed, or with all of either kind; and
// those named.
func (w *mapWatch) listedMoving(ctx context.Context, all bool, indexes []int) ([]int, error) {
	path := w.s.root + "/moving"
	names, err := w.s.client.childrenWatched(ctx, path)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 && len(w.moving) > 0 {
		if stat, err := w.s.client.stat(ctx, path); err != nil {
			return nil, err
		} else if stat == nil {
			return nil, w.s.rootGone(path)
		}
	}
	listed := make(map[int]bool, len(names))
	for _, name := range names {
		if index, ok := bucketIndex(name); ok {
			listed[index] = true
			if old, known := w.moving[index]; all || !known || old.err != nil {
				indexes = append(indexes, index)
			}
		}
	}
	for index := range w.moving {
		if all || !listed[index] {
			indexes = append(indexes, index)
		}
	}
	slices.Sort(indexes)
	return slices.Compact(indexes), nil
}

// stat asks for a node's state; nil when it is absent.
func (c *client) stat(ctx context.Context, path string) (*zk.Stat, error) {
	return read(ctx, c, "reading "+path, func(conn *zk.Conn) (*zk.Stat, error) {
		ok, stat, err := conn.Exists(path)
		if err != nil || !ok {
			return nil, err
		}
		return stat, nil
	})
}

// getFollowed reads a node and makes sure that there is a watch on it while it exists. One that does not leaves none:
// whoever follows it watches the list of its parent.
func (c *client) getFollowed(ctx context.Context, path string) (node, error) {
	n, err := read(ctx, c, "reading "+path, func(conn *zk.Conn) (node, error) {
		confirm := c.arming(path, false)
		if confirm == nil {
			data, stat, err := conn.Get(path)
			return node{data, stat}, err
		}
		data, stat, _, err := conn.GetW(path)
		if err == nil {
			confirm()
		}
		return node{data, stat}, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return node{}, nil
	}
	return n, err
}
