package zk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/store"
)

const (
	// auditEvery is how often a watch compares all nodes even without an event: watches are not all there is to trust.
	auditEvery = 5 * time.Minute
	// watchChunk is how many buckets one update holds at most while the map is loaded.
	watchChunk = 64
	// rulesNode is the place of the rules behind those of the buckets.
	rulesNode = route.BucketCount
	// movingList is the index of the list of the moving nodes.
	movingList = -1
)

// mapWatch is one Watch: a data watch on each bucket, on those that do not exist too, on the rules, and on meta; one on the
// list of the moving nodes and on each of those, which are few.
//
// One watch per bucket is cheap for both sides (a few hundred bytes) and needs to trust nobody: a bucket that was
// written by hand is seen as well. A watch on the children of routes would tell less, and a shared change counter
// would make every writer wait for every other. After a reconnect the 1,025 nodes are asked for their state only, which
// takes some milliseconds; only changed ones are read. So it is at the start of a proxy that has a copy of the map.
type mapWatch struct {
	s      *Store
	signal chan struct{} // capacity 1

	mu    sync.Mutex
	dirty [rulesNode + 1]bool // guarded by mu
	all   bool                // guarded by mu: connected anew, compare everything
	trees uint64              // guarded by mu: counts what may have put another tree in place
	tree  uint64              // guarded by mu: trees when the tree was last found to be the right one
	// Guarded by mu: the same of the moving nodes.
	dirtyMoving [route.BucketCount]bool
	listMoving  bool

	// Owned by the goroutine of Watch:
	known     [rulesNode + 1]known
	moving    map[int]followed
	session   int64  // that of the last sync
	treeFault string // what was last reported of the whole tree
}

// known is what was last delivered of a node.
type known struct {
	seen  bool // anything was delivered or reported
	stat  zk.Stat
	exist bool
	// copied is the version that the receiver had at the start, until it is confirmed or replaced.
	copied string
}

// Watch implements store.Store.
func (s *Store) Watch(ctx context.Context, sink func(store.Update)) error {
	return s.Resume(ctx, store.Known{}, sink)
}

// Resume implements store.Resumer. A bucket that the receiver has is asked for its state only, as after a reconnect.
func (s *Store) Resume(ctx context.Context, have store.Known, sink func(store.Update)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.client.ctx, cancel)() // the store was closed
	if err := s.bootForWatch(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	w := &mapWatch{s: s, signal: make(chan struct{}, 1), all: true, trees: 1, moving: map[int]followed{}}
	if have.Map == *s.mapID.Load() {
		for index, version := range have.Versions {
			if index >= 0 && index < route.BucketCount {
				w.known[index].copied = version
			}
		}
	}
	w.signal <- struct{}{}
	stop := s.client.listen(&listener{event: w.event, connected: w.connected})
	defer stop()
	s.client.lease.watched(w, 0)
	defer s.client.lease.unwatched(w)
	synced := false
	for {
		audit := time.NewTimer(auditEvery + rand.N(auditEvery/5))
		select {
		case <-ctx.Done():
			audit.Stop()
			return nil
		case <-w.signal:
			audit.Stop()
		case <-audit.C:
			w.connected()
			continue
		}
		w.pass(ctx, &synced, sink)
	}
}

// bootForWatch waits for the tree as long as it takes.
func (s *Store) bootForWatch(ctx context.Context) error {
	for {
		err := s.boot(ctx)
		switch {
		case err == nil, errors.Is(err, errTree), errors.Is(err, zk.ErrNoAuth):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
		s.log.Warn("the map is not there yet, trying on", "err", err)
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
	}
}

// event is called on the library's goroutine.
func (w *mapWatch) event(path string) {
	if path == w.s.root+"/meta" {
		w.connected()
		return
	}
	index := -1
	switch kind, name, _ := strings.Cut(strings.TrimPrefix(path, w.s.root+"/"), "/"); kind {
	case "moving":
		if i, ok := bucketIndex(name); ok || name == "" {
			if !ok {
				i = movingList
			}
			w.movingEvent(i)
		}
	case "routes":
		if i, ok := bucketIndex(name); ok {
			index = i
		}
	case "rules":
		index = rulesNode
	}
	if index < 0 {
		return
	}
	w.mu.Lock()
	w.dirty[index] = true
	w.mu.Unlock()
	w.wake()
}

// connected has everything compared.
func (w *mapWatch) connected() {
	w.mu.Lock()
	w.all = true
	w.trees++
	w.mu.Unlock()
	w.wake()
}

func (w *mapWatch) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// pass reads what may have changed and delivers what has. It ends early only with ctx.
func (w *mapWatch) pass(ctx context.Context, synced *bool, sink func(store.Update)) {
	w.mu.Lock()
	all := w.all
	dirty, dirtyMoving, listMoving := w.dirty, w.dirtyMoving, w.listMoving
	w.dirty, w.dirtyMoving, w.listMoving = [len(w.dirty)]bool{}, [len(w.dirtyMoving)]bool{}, false
	w.all = false
	w.mu.Unlock()
	indexes, moving := marked(dirty[:], all), marked(dirtyMoving[:], false)
	if len(indexes) == 0 && len(moving) == 0 && !listMoving && !all {
		return
	}
	var err error
	announced := w.s.client.lease.announcedIn()
	whole := all
	if all {
		// A new session may be with a follower that is behind.
		w.session = w.s.client.sessionID()
		err = w.s.sync(ctx)
	}
	if err == nil {
		err = w.checkTree(ctx)
	}
	var others []int
	if err == nil {
		others, err = w.followMoving(ctx, all, listMoving, moving)
	}
	if ctx.Err() != nil {
		return
	}
	if errors.Is(err, errStale) {
		w.connected()
		return
	}
	if err != nil {
		w.allBad(ctx, err, *synced, sink)
		return
	}
	w.treeFault = ""
	for _, index := range others {
		w.known[index].seen = false // delivered once more, with other entries over it
		indexes = append(indexes, index)
	}
	slices.Sort(indexes)
	indexes = slices.Compact(indexes)
	for len(indexes) > 0 && ctx.Err() == nil {
		n := min(len(indexes), watchChunk)
		last := n == len(indexes)
		u := w.read(ctx, indexes[:n], all)
		indexes = indexes[n:]
		// What was read may be of a tree that has been put in place meanwhile.
		err := w.checkTree(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			w.allBad(ctx, err, *synced, sink)
			return
		}
		for _, err := range u.Bad {
			whole = whole && !errors.Is(err, store.ErrUnavailable)
		}
		done := all && last
		if u.Buckets == nil && u.Rules == nil && u.Bad == nil && u.Kept == nil && (*synced || !done) {
			continue
		}
		*synced = *synced || done
		u.Synced = *synced
		sink(u)
	}
	if session := w.s.client.sessionID(); whole && announced == session && w.session == session {
		w.s.client.lease.watched(w, session)
	}
}

// marked are the indexes of what is true, or all.
func marked(marks []bool, all bool) []int {
	var indexes []int
	for i, marked := range marks {
		if all || marked {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// allBad reports that nothing of the tree can be used, once for each reason, and looks again after a while.
func (w *mapWatch) allBad(ctx context.Context, err error, synced bool, sink func(store.Update)) {
	if w.treeFault != err.Error() {
		w.treeFault = err.Error()
		u := store.Update{Bad: map[int]error{store.BadRules: err}, Synced: synced}
		for i := range route.BucketCount {
			u.Bad[i] = err
		}
		sink(u)
	}
	for i := range w.known {
		w.known[i].seen = false // what is good again must be delivered again
	}
	if pause(ctx, time.Second) == nil {
		w.connected()
	}
}

// checkTree tells why what is there now is not the map that was being watched: a tree that was wiped must not empty
// the map of running proxies.
//
// It asks the server only after a connect and after an event of meta: ZooKeeper tells a session of such an event before it
// answers anything that was read later, so without one the tree is the one that it was.
func (w *mapWatch) checkTree(ctx context.Context) error {
	w.mu.Lock()
	trees, right := w.trees, w.tree == w.trees
	w.mu.Unlock()
	if right {
		return nil
	}
	path := w.s.root + "/meta"
	n, err := w.s.client.getWatched(ctx, path)
	if err != nil {
		return err
	}
	m, err := w.s.parseMeta(n)
	switch {
	case err != nil:
		return err
	case m == nil:
		return w.s.rootGone(path)
	case m.ID != *w.s.mapID.Load():
		return fmt.Errorf("ZooKeeper %s: %s holds another map (%s) than before (%s): it was wiped and begun anew; restart the proxies to take the new one",
			w.s.client.ensemble, w.s.root, m.ID, *w.s.mapID.Load())
	}
	w.mu.Lock()
	w.tree = trees
	w.mu.Unlock()
	return nil
}

// read compares nodes with what is known of them. all: each of them, because anything may have changed.
func (w *mapWatch) read(ctx context.Context, indexes []int, all bool) store.Update {
	var mu sync.Mutex
	u := store.Update{Map: *w.s.mapID.Load()}
	_ = parallel(len(indexes), func(i int) error {
		index := indexes[i]
		over := w.moving[index]
		if over.movingNode != nil || over.err != nil {
			w.known[index].copied = "" // of the copy nobody knows what was laid over it
		}
		n, found, err := w.node(ctx, index, all)
		if err == nil && over.err != nil {
			w.known[index].seen = false
			err = over.err
		}
		if err == nil && found == asKnown {
			return nil
		}
		var p part
		if err == nil && found == changed {
			p, err = w.decode(index, n)
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil:
		case err != nil:
			if index == rulesNode {
				index = store.BadRules
			}
			put(&u.Bad, index, err)
		case found == asCopied:
			u.Kept = append(u.Kept, index)
		case index == rulesNode:
			u.Rules = &p.rules
		default:
			put(&u.Buckets, index, p.entries)
			if p.version != "" {
				put(&u.Versions, index, p.version)
			}
		}
		return nil
	})
	return u
}

func put[V any](m *map[int]V, key int, value V) {
	if *m == nil {
		*m = map[int]V{}
	}
	(*m)[key] = value
}

func (w *mapWatch) path(index int) string {
	if index == rulesNode {
		return w.s.root + "/rules"
	}
	return w.s.bucketPath(index)
}

// part is a decoded node.
type part struct {
	entries []route.Entry
	version string // "" when the value must be read again by whoever has it
	rules   []route.Rule
}

func (w *mapWatch) decode(index int, n node) (part, error) {
	switch {
	case index == rulesNode && len(n.data) > maxRulesBytes:
		return part{}, fmt.Errorf("the stored rules have %d bytes, more than the %d that they may have", len(n.data), maxRulesBytes)
	case index == rulesNode:
		rules, err := decodeRules(n.data)
		return part{rules: rules}, err
	}
	over := w.moving[index].movingNode
	if !n.exists() {
		return part{entries: over.over(nil)}, nil
	}
	b, err := store.DecodeBucket(index, n.data)
	if err != nil {
		return part{}, fmt.Errorf("%s: %w", w.s.bucketPath(index), err)
	}
	understood := b.Understood()
	p := part{entries: over.over(b)}
	if understood && over == nil {
		p.version = version(n.stat)
	}
	return p, nil
}

// version names one value of a node. The transaction numbers would do in the life of one tree, but a server that was
// restored from a backup counts some of them a second time: then the other numbers tell values apart.
func version(stat *zk.Stat) string {
	return fmt.Sprintf("%x.%x.%x.%x.%x", stat.Czxid, stat.Mzxid, stat.Version, stat.Mtime, stat.DataLength)
}

// finding is how a node is, compared with what the receiver has.
type finding int

const (
	changed  finding = iota
	asKnown          // as this watch has delivered it
	asCopied         // as the receiver had it before this watch, which has not said so yet
)

// node reads a node unless it is as known, and leaves a watch on it. all: there was no event, so most likely it is.
func (w *mapWatch) node(ctx context.Context, index int, all bool) (n node, found finding, err error) {
	path, k := w.path(index), &w.known[index]
	if k.copied != "" || k.seen && (all || w.s.client.isArmed(path)) {
		stat, err := w.s.client.statWatched(ctx, path)
		switch {
		case err != nil:
			return node{}, changed, err
		case k.seen && k.same(stat):
			return node{}, asKnown, nil
		case k.copied != "" && stat != nil && version(stat) == k.copied:
			k.seen, k.exist, k.stat, k.copied = true, true, *stat, ""
			return node{}, asCopied, nil
		}
		k.copied = ""
	}
	n, err = w.s.client.getWatched(ctx, path)
	if err == nil && k.olderThanKnown(n) {
		// This server is behind. After a sync it is not, and what it says then is the truth, whatever its number:
		// an ensemble that was restored from a backup counts anew.
		if err = w.s.sync(ctx); err == nil {
			n, err = w.s.get(ctx, path)
		}
	}
	if err == nil && !n.exists() {
		if index == rulesNode {
			err = w.s.rootGone(path)
		} else if k.exist {
			err = w.checkTree(ctx)
		}
	}
	if err != nil {
		k.seen = false // ask again at the next occasion
		return node{}, changed, err
	}
	if k.same(n.stat) && k.seen {
		return node{}, asKnown, nil
	}
	k.seen, k.exist = true, n.exists()
	if n.exists() {
		k.stat = *n.stat
	}
	return n, changed, nil
}

// same tells whether a node with that stat (nil: absent) is the one that was delivered.
func (k *known) same(stat *zk.Stat) bool {
	if stat == nil {
		return !k.exist
	}
	return k.exist && stat.Mzxid == k.stat.Mzxid && stat.Czxid == k.stat.Czxid
}

func (k *known) olderThanKnown(n node) bool {
	if !n.exists() {
		return false // a delete has no number; sync has made sure of the session's beginning
	}
	return n.stat.Mzxid < k.stat.Mzxid || !k.exist && n.stat.Mzxid == k.stat.Mzxid
}

// statWatched asks for a node's state, nil when it is absent, and makes sure that there is a watch on it, as getWatched
// does.
func (c *client) statWatched(ctx context.Context, path string) (*zk.Stat, error) {
	return read(ctx, c, "reading "+path, func(conn *zk.Conn) (*zk.Stat, error) {
		var exists bool
		var stat *zk.Stat
		var err error
		if confirm := c.arming(path, false); confirm == nil {
			exists, stat, err = conn.Exists(path)
		} else if exists, stat, _, err = conn.ExistsW(path); err == nil {
			confirm()
		}
		if err != nil || !exists {
			return nil, err
		}
		return stat, nil
	})
}

// getWatched reads a node and makes sure that there is a watch on it, on its creation when it does not exist.
func (c *client) getWatched(ctx context.Context, path string) (node, error) {
	return read(ctx, c, "reading "+path, func(conn *zk.Conn) (node, error) {
		for {
			confirm := c.arming(path, false)
			if confirm == nil {
				data, stat, err := conn.Get(path)
				if errors.Is(err, zk.ErrNoNode) {
					return node{}, nil
				}
				return node{data, stat}, err
			}
			data, stat, _, err := conn.GetW(path)
			if err == nil {
				confirm()
				return node{data, stat}, nil
			}
			if !errors.Is(err, zk.ErrNoNode) {
				return node{}, err
			}
			exists, _, _, err := conn.ExistsW(path)
			if err != nil {
				return node{}, err
			}
			confirm()
			if !exists {
				return node{}, nil
			}
			// Created in between: read it, the watch is set.
		}
	})
}

func (c *client) isArmed(path string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.watches[watchKey{path, false}].armed
}

// arming begins to set a watch; nil when there is one already. The returned function is called when the server has
// answered, and marks the watch as set unless an event or a new session came meanwhile: then it may be gone already.
func (c *client) arming(path string, children bool) (confirm func()) {
	key := watchKey{path, children}
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.watches[key]
	if w.armed {
		return nil
	}
	fired, sessions := w.fired, c.sessions
	c.watches[key] = w
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if w := c.watches[key]; w.fired == fired && c.sessions == sessions {
			c.watches[key] = watchState{armed: true, fired: fired}
		}
	}
}
