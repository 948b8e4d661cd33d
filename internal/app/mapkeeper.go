package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/store"
)

// mapKeeper follows the map in the store: it builds the table that all loops read, and has the handles evicted whose
// topics have moved. Its update method is called by the store's watch, one call at a time.
type mapKeeper struct {
	store store.Store
	log   *slog.Logger
	loops poster
	copy  *diskCopy // nil without a state directory
	self  func() store.Proxy
	def   string // cluster of topics that no rule decides
	mover *mover
	old   *oldIDs // nil: nobody asks

	table atomic.Pointer[route.Table] // written under mu
	mu    sync.Mutex                  // guards known, and that it is of table
	known store.Known                 // versions of buckets, as the table has them

	loaded  chan struct{} // closed when there is a map, from the store or from the disk
	load    func()        // closes loaded, once
	synced  chan struct{} // closed when the store has delivered the whole map since the start
	bad     atomic.Int64
	changed chan struct{} // capacity 1: the table was replaced

	// Owned by the watch:
	initial store.Update // what came before the map was whole
	badNow  map[int]bool

	onDisk servedMap // what the copy holds; of saveChanges, once it runs

	work  chan func() // evictions whose switch record has to be read first
	tasks sync.WaitGroup
}

// poster runs functions on event loops.
type poster interface {
	Loops() int
	Post(loop int, fn func(now time.Time, sh *session.Shard)) bool
}

const (
	// evictionWorkers is how many switch records are read at a time.
	evictionWorkers = 8
	// recordTimeout bounds the reading of a switch record; without it clients go by an ordinary lookup.
	recordTimeout = time.Second
	// ackTimeout bounds the writing of an ack.
	ackTimeout = 10 * time.Second
)

func newMapKeeper(st store.Store, log *slog.Logger, copy *diskCopy) *mapKeeper {
	k := &mapKeeper{store: st, log: log, copy: copy, changed: make(chan struct{}, 1), badNow: make(map[int]bool), work: make(chan func(), 1024), loaded: make(chan struct{}), synced: make(chan struct{})}
	k.mover = newMover(k)
	k.load = sync.OnceFunc(func() { close(k.loaded) })
	k.table.Store(route.Empty())
	return k
}

// loadCopy serves the map from the disk until the store answers.
func (k *mapKeeper) loadCopy() error {
	if k.copy == nil {
		return nil
	}
	m, saved, err := k.copy.load()
	table := m.table
	if table == nil {
		// What the small copy holds is of no use alone, but must end when the next map is saved.
		_, alone := k.copy.moving.load(route.Empty())
		return errors.Join(err, alone)
	}
	if table, err = k.copy.moving.load(table); err != nil {
		return err
	}
	k.table.Store(table)
	k.known, k.onDisk = m.known, m
	k.onDisk.known.Versions = maps.Clone(m.known.Versions)
	for e := range table.Each {
		if e.State != route.StateActive {
			delete(k.known.Versions, route.Bucket(e.Topic)) // what has become of it is to be read
			k.mover.begin(e)
		}
	}
	k.load()
	k.log.Info("serving the map from the disk until the store answers", "saved", saved.Format(time.RFC3339), "entries", table.Len(), "digest", table.Digest())
	return nil
}

// run follows the store until ctx ends.
func (k *mapKeeper) run(ctx context.Context) error {
	for range evictionWorkers {
		k.tasks.Go(func() {
			for {
				select {
				case f := <-k.work:
					f()
				case <-ctx.Done():
					return
				}
			}
		})
	}
	k.tasks.Go(func() { k.saveChanges(ctx) })
	k.tasks.Go(func() { k.mover.run(ctx) })
	err := k.watch(ctx, func(u store.Update) { k.update(ctx, u) })
	if ctx.Err() != nil {
		err = nil
	}
	k.tasks.Wait()
	return err
}

// watch has delivered what the copy on the disk does not have, if the store can tell.
func (k *mapKeeper) watch(ctx context.Context, sink func(store.Update)) error {
	if r, ok := k.store.(store.Resumer); ok {
		return r.Resume(ctx, k.served().known, sink)
	}
	return k.store.Watch(ctx, sink)
}

// served is the table with the versions of its buckets; both are the caller's.
func (k *mapKeeper) served() servedMap {
	k.mu.Lock()
	defer k.mu.Unlock()
	return servedMap{k.table.Load(), store.Known{Map: k.known.Map, Versions: maps.Clone(k.known.Versions)}}
}

// swap replaces the table. u is what was taken over into it: of these buckets the versions count from now on.
func (k *mapKeeper) swap(next *route.Table, u store.Update) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.table.Store(next)
	if u.Map != "" && u.Map != k.known.Map {
		k.known = store.Known{Map: u.Map}
	}
	for i := range u.Buckets {
		delete(k.known.Versions, i)
		if version, ok := u.Versions[i]; ok {
			if k.known.Versions == nil {
				k.known.Versions = make(map[int]string)
			}
			k.known.Versions[i] = version
		}
	}
}

func (k *mapKeeper) isSynced() bool {
	select {
	case <-k.synced:
		return true
	default:
		return false
	}
}

// update takes one event of the watch.
func (k *mapKeeper) update(ctx context.Context, u store.Update) {
	k.noteBad(u)
	if !k.isSynced() {
		k.collect(u)
		if !u.Synced {
			return
		}
		// Only now is known what is not in the map: the disk's copy may have more, and be one of another map.
		u = k.initial
		k.initial = store.Update{}
		known := k.served().known
		stranger := known.Map != "" && u.Map != "" && known.Map != u.Map
		kept := make(map[int]bool, len(u.Kept))
		for _, i := range u.Kept {
			kept[i] = true
		}
		for i := range route.BucketCount {
			if _, ok := u.Buckets[i]; !ok && (u.Bad[i] == nil || stranger) && !kept[i] {
				u.Buckets[i] = nil
			}
		}
		if stranger && u.Rules == nil {
			u.Rules = &[]route.Rule{}
		}
		k.apply(ctx, u, true)
		close(k.synced)
		k.load()
		k.log.Info("the map is loaded", "entries", k.table.Load().Len(), "rules", len(k.table.Load().Rules()), "digest", k.table.Load().Digest(),
			"buckets_kept_from_disk", len(kept))
		return
	}
	k.apply(ctx, u, false)
}

func (k *mapKeeper) collect(u store.Update) {
	if k.initial.Buckets == nil {
		k.initial.Buckets = make(map[int][]route.Entry)
		k.initial.Bad = make(map[int]error)
		k.initial.Versions = make(map[int]string)
	}
	if u.Map != "" {
		k.initial.Map = u.Map
	}
	for i, entries := range u.Buckets {
		k.initial.Buckets[i] = entries
		delete(k.initial.Versions, i)
	}
	maps.Copy(k.initial.Versions, u.Versions)
	k.initial.Kept = append(k.initial.Kept, u.Kept...)
	maps.Copy(k.initial.Bad, u.Bad)
	if u.Rules != nil {
		k.initial.Rules = u.Rules
	}
}

func (k *mapKeeper) noteBad(u store.Update) {
	for i, err := range u.Bad {
		k.badNow[i] = true
		k.log.Error("a part of the map cannot be used; the last good one stays in force", "part", partName(i), "err", err)
	}
	for i := range u.Buckets {
		delete(k.badNow, i)
	}
	for _, i := range u.Kept {
		delete(k.badNow, i)
	}
	if u.Rules != nil {
		delete(k.badNow, -1)
	}
	k.bad.Store(int64(len(k.badNow)))
}

func partName(i int) string {
	if i < 0 {
		return "rules"
	}
	return fmt.Sprintf("routes/%04d", i)
}

// apply builds the next table, swaps it in, and has evicted what moved. first: that may be every topic of the map, and the switches
// that moved them are over.
func (k *mapKeeper) apply(ctx context.Context, u store.Update, first bool) {
	old := k.table.Load()
	next, changes, err := old.With(u.Buckets, u.Rules)
	if err != nil {
		next, changes = k.applySingly(old, &u)
	}
	if first && len(k.badNow) > 0 {
		// Parts that could not be used, and of which no older copy is there, are unknown: their topics are refused rather
		// than sent to the default cluster.
		next = next.WithUnknown(slices.Collect(maps.Keys(k.badNow))...)
	}
	if k.old != nil {
		k.old.note(old, next, changes)
	}
	k.swap(next, u)
	if next == old {
		return
	}
	select {
	case k.changed <- struct{}{}:
	default:
	}
	for _, topic := range changes.Topics {
		e, _ := next.Entry(topic)
		if !k.mover.takes(topic, e) && !first {
			k.evictTopic(ctx, topic, switching.KeyOf(e))
		}
	}
	if first {
		k.reviewAll(ctx, nil, session.Assigned{})
		k.tasks.Go(func() { k.reportExpected(ctx) })
		return
	}
	if len(changes.Scopes) > 0 {
		k.review(ctx, next, changes.Scopes)
	}
}

// applySingly is apply's way when something in u cannot be used: whatever can is, and the rest is taken out of u.
func (k *mapKeeper) applySingly(table *route.Table, u *store.Update) (*route.Table, route.Changes) {
	var all route.Changes
	try := func(part int, buckets map[int][]route.Entry, rules *[]route.Rule) bool {
		next, changes, err := table.With(buckets, rules)
		if err != nil {
			k.badNow[part] = true
			k.bad.Store(int64(len(k.badNow)))
			k.log.Error("a part of the map cannot be used; the last good one stays in force", "part", partName(part), "err", err)
			return false
		}
		table = next
		all.Topics = append(all.Topics, changes.Topics...)
		all.Scopes = append(all.Scopes, changes.Scopes...)
		return true
	}
	for i, entries := range u.Buckets {
		if !try(i, map[int][]route.Entry{i: entries}, nil) {
			delete(u.Buckets, i)
		}
	}
	if u.Rules != nil {
		try(-1, nil, u.Rules)
	}
	return table, all
}

// evictTopic has the handles of a moved topic closed on every loop, with the addresses that its switch looked up, and
// acknowledges the switch.
func (k *mapKeeper) evictTopic(ctx context.Context, topic string, by switching.Key) {
	do := func(assigned session.Assigned, switches ...switching.Key) {
		k.onLoops(ctx, switches, topic, func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
			sh.Evict(now, topic, assigned, done)
		})
	}
	if by.Switch == "" {
		do(session.Assigned{})
		return
	}
	k.later(ctx, func() { do(k.assigned(ctx, by.Switch), by) })
}

// reportExpected acknowledges the switches in immediate mode that wait for this process: one that began after it was announced, and before
// the first map was read, is in that map like any other.
func (k *mapKeeper) reportExpected(ctx context.Context) {
	records, err := k.store.Running(ctx)
	if err != nil && ctx.Err() == nil {
		k.log.Warn("switches that wait for this proxy may be shown as incomplete: those under way cannot be read", "err", err)
	}
	self, table := k.self(), k.table.Load()
	var waiting []switching.Key
	for _, r := range records {
		e, _ := table.Entry(r.Topic)
		rule, _ := table.Rule(r.Topic)
		here := e.SwitchID == r.ID || rule.SwitchID == r.ID // else it comes with the next change, or was overtaken
		if here && (r.Mode == switching.ModeImmediate || r.Mode == switching.ModeFailover) && slices.Contains(r.Expect, switching.Member{ID: self.ID, Incarnation: self.Incarnation}) {
			waiting = append(waiting, switching.Key{Switch: r.ID, Attempt: r.Attempt})
		}
	}
	if len(waiting) > 0 {
		k.reviewAll(ctx, waiting, session.Assigned{})
	}
}

func (k *mapKeeper) assigned(ctx context.Context, switchID string) session.Assigned {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	r, err := k.store.Switch(ctx, switchID)
	if err != nil {
		k.log.Warn("the record of a switch cannot be read: clients will look their topic up", "switch", switchID, "err", err)
		return session.Assigned{}
	}
	if r.Return && (r.State == switching.StateEvicting || r.State.Over()) {
		return session.Assigned{Cluster: r.From, Brokers: r.Assigned} // its flip led back
	}
	a := session.Assigned{Cluster: r.To, Brokers: r.Assigned}
	if r.Failover != nil {
		a.Dead = r.From
	}
	return a
}

// later runs f on a worker; when all are busy the watch waits.
func (k *mapKeeper) later(ctx context.Context, f func()) {
	select {
	case k.work <- f:
	case <-ctx.Done():
	}
}

// review has every handle checked: rules have changed.
func (k *mapKeeper) review(ctx context.Context, table *route.Table, scopes []string) {
	var switches []switching.Key
	for _, scope := range scopes {
		if r, ok := table.Rule(scope); ok && r.SwitchID != "" {
			switches = append(switches, switching.Key{Switch: r.SwitchID})
		}
	}
	if len(switches) == 0 {
		k.reviewAll(ctx, nil, session.Assigned{})
		return
	}
	// Two switches in one event of the watch are rare: clients of all but the last look their topics up.
	k.later(ctx, func() { k.reviewAll(ctx, switches, k.assigned(ctx, switches[len(switches)-1].Switch)) })
}

func (k *mapKeeper) reviewAll(ctx context.Context, switches []switching.Key, assigned session.Assigned) {
	k.onLoops(ctx, switches, "(all that follow the rules)", func(now time.Time, sh *session.Shard, done func(session.Evicted)) {
		sh.Review(now, assigned, done)
	})
}

// onLoops runs an eviction on every loop; when all have ended it acknowledges the switches.
func (k *mapKeeper) onLoops(ctx context.Context, switches []switching.Key, name string, start func(time.Time, *session.Shard, func(session.Evicted))) {
	gatherEvicted(k.loops, start, func(total session.Evicted) {
		if total.Producers+total.Consumers > 0 {
			k.log.Info("clients were told that their topic moved", "topic", name, "switch", switchIDs(switches),
				"producers", total.Producers, "consumers", total.Consumers, "unresolved", total.Unresolved)
		}
		for _, key := range switches {
			// This runs on an event loop: the ack is written elsewhere.
			go k.acknowledge(ctx, key, total)
		}
	})
}

func switchIDs(switches []switching.Key) string {
	ids := make([]string, len(switches))
	for i, key := range switches {
		ids[i] = key.Switch
	}
	return strings.Join(ids, ",")
}

// gather runs start on every loop and hands all the sum of what they report, beginning with zero, once the last one has. A loop that has ended counts
// as ended says. all runs on an event loop, or on a goroutine of its own.
func gather[T interface{ Add(T) T }](loops poster, zero T, ended func(loop int) T, start func(time.Time, *session.Shard, func(T)), all func(T)) {
	var mu sync.Mutex // guards left and total
	left, total := loops.Loops(), zero
	finish := func(part T) {
		mu.Lock()
		left--
		total = total.Add(part)
		sum, last := total, left == 0
		mu.Unlock()
		if last {
			all(sum)
		}
	}
	if left == 0 {
		go all(zero)
		return
	}
	for i := range loops.Loops() {
		if !loops.Post(i, func(now time.Time, sh *session.Shard) { start(now, sh, finish) }) {
			go finish(ended(i))
		}
	}
}

// gatherEvicted is gather for what has nothing to tell of a loop that has ended.
func gatherEvicted(loops poster, start func(time.Time, *session.Shard, func(session.Evicted)), all func(session.Evicted)) {
	gather(loops, session.Evicted{}, func(int) session.Evicted { return session.Evicted{} }, start, all)
}

func (k *mapKeeper) acknowledge(ctx context.Context, by switching.Key, e session.Evicted) {
	ctx, cancel := context.WithTimeout(ctx, ackTimeout)
	defer cancel()
	self := k.self()
	err := k.store.PutAck(ctx, by.Switch, switching.Ack{
		Attempt: by.Attempt, Phase: switching.StateEvicting, Proxy: self.ID, Incarnation: self.Incarnation,
		Producers: e.Producers, Consumers: e.Consumers, Unresolved: e.Unresolved, At: time.Now(),
	})
	if err != nil && ctx.Err() == nil {
		k.log.Warn("a switch could not be acknowledged: it will be shown as incomplete", "switch", by.Switch, "err", err)
	}
}

const (
	// saveEvery is how often the table is written to the disk at most.
	saveEvery = 2 * time.Second
	// saveShare is the inverse of the share of a core that may go into it: a map of ten million topics takes seconds.
	saveShare = 20
)

// saveChanges keeps the copy on the disk up to date.
func (k *mapKeeper) saveChanges(ctx context.Context) {
	if k.copy == nil {
		return
	}
	ticker := time.NewTicker(saveEvery)
	defer ticker.Stop()
	var next time.Time
	save := func() {
		known := k.copy.moving.all() // before the table is taken
		m := k.served()
		if !k.isSynced() {
			return
		}
		if !m.same(k.onDisk) {
			begin := time.Now()
			defer func() { next = time.Now().Add(saveShare * time.Since(begin)) }()
			if err := k.copy.save(m, time.Now()); errors.Is(err, errAside) {
				return
			} else if err != nil {
				k.log.Error("the last good map could not be written to the disk", "err", err)
				return
			}
			k.onDisk = m
		}
		if err := k.copy.moving.settle(m.table, known); err != nil {
			k.log.Error("the disk copy of moving topics could not be cleared", "err", err)
		}
	}
	for {
		select {
		case <-ticker.C:
			if !time.Now().Before(next) {
				save()
			}
		case <-ctx.Done():
			save()
			return
		}
	}
}
