package zk

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cespare/xxhash/v2"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/zktest"
	"pointsman/store"
)

// The fleet is small in ordinary tests; `make robustness` runs it at the size that docs/capacity.md reports.
var (
	fleetProxies = flag.Int("fleet.proxies", 12, "proxies of the fleet")
	fleetTopics  = flag.Int("fleet.topics", 10_000, "topics in the map of the fleet")
	fleetChanges = flag.Int("fleet.changes", 20, "single changes made under the fleet; its burst is ten times as long")
)

// TestAFleetOnOneServer is what many proxies cost one ZooKeeper, and how soon they agree. What is counted is a promise, and
// checked; times are printed.
func TestAFleetOnOneServer(t *testing.T) {
	f := &fleet{t: t, server: zktest.Start(t), n: *fleetProxies, topics: *fleetTopics, announcing: announceAs(*fleetProxies)}
	f.servers = f.server.Addr() + chroot()
	f.writer = open(t, Config{Servers: f.servers, Logger: slog.New(slog.DiscardHandler)})
	fill(t, f.writer, f.topics)
	defer f.stop()

	cold := f.measure("cold start: all read the whole map at once", func() { f.start(nil) })
	f.agree()
	stored := f.storedBytes()
	t.Logf("  the map: %d topics, %d bytes stored, %.1f a topic", f.topics, stored, float64(stored)/float64(f.topics))
	perProxy := int64(f.n)
	if max := 3*stored + 500_000; cold.received/perProxy > max {
		t.Errorf("a cold start reads %d bytes a proxy, want at most %d", cold.received/perProxy, max)
	}
	if max := perProxy * (route.BucketCount + 100); cold.requests > max {
		t.Errorf("a cold start takes %d requests a proxy, want at most %d: each node once", cold.requests/perProxy, max/perProxy)
	}
	watches := f.server.Counters()["watch_count"]
	t.Logf("  watches: %d, %.0f a proxy", watches, float64(watches)/float64(f.n))
	if want := perProxy * (route.BucketCount + 4); watches > want {
		t.Errorf("%d watches, want at most %d", watches, want)
	}

	changes := *fleetChanges
	var each, last []time.Duration
	single := f.measure(fmt.Sprintf("%d changes, one after the other", changes), func() {
		for range changes {
			begin := time.Now()
			f.change(1, "")
			each, last = f.visible(begin, each, last)
		}
	})
	t.Logf("  a change is visible on a proxy after   %s", quantiles(each))
	t.Logf("  a change is visible on every proxy after %s (goal: p99 at most 100ms)", quantiles(last))
	single.perChange(t, changes, f.n)
	f.agree()

	alone := max(changes/10, 1)
	lonely := f.measure(fmt.Sprintf("%d changes, each announced before the next", alone), func() {
		for range alone {
			f.change(1, "")
			f.awaitTotal()
			f.quiet()
		}
	})
	lonely.perChange(t, alone, f.n)
	if requests := float64(lonely.requests) / float64(alone*f.n); requests > 8 {
		t.Errorf("a change costs %.1f requests a proxy, want at most 8", requests)
	}

	switches := max(changes/5, 1)
	moved := f.measure(fmt.Sprintf("%d switches with an ack of every proxy", switches), func() {
		for i := range switches {
			id := fmt.Sprintf("switch-%d", i)
			f.change(1, id)
			f.awaitAcks(id)
		}
	})
	moved.perChange(t, switches, f.n)
	f.agree()

	burst := f.measure(fmt.Sprintf("a burst of %d changes by 8 writers", 10*changes), func() {
		f.change(10*changes, "")
		f.awaitTotal()
	})
	burst.perChange(t, 10*changes, f.n)
	f.agree()

	f.server.Stop()
	f.server.Start() // its counters begin anew
	again := f.measure("the server was restarted, until all have seen a change made after it", func() {
		f.change(1, "")
		f.awaitTotal()
	})
	if max := int64(450_000); again.received/perProxy > max {
		t.Errorf("after a restart of the server a proxy read %d bytes, want at most %d: states, not values", again.received/perProxy, max)
	}
	f.agree()

	before := f.clients
	f.stop()
	f.change(10, "")
	warm := f.measure("warm start: all have a copy, 10 topics were changed meanwhile", func() { f.start(before) })
	f.agree()
	for _, c := range f.clients {
		if c.delivered > 10 {
			t.Errorf("%s read %d buckets of which at most 10 had changed", c.id, c.delivered)
		}
	}
	t.Logf("  warm ÷ cold: bytes %.2f, requests %.2f, CPU of ZooKeeper %.2f, CPU of the proxies %.2f", float64(warm.received)/float64(cold.received),
		float64(warm.requests)/float64(cold.requests), warm.serverCPU.Seconds()/cold.serverCPU.Seconds(), warm.ownCPU.Seconds()/cold.ownCPU.Seconds())
}

// announcing is when a proxy announces that it serves another map.
type announcing struct{ settle, spread, pace time.Duration }

// announceAs is as in internal/app for a large fleet, and ten times as soon for a small one, which nobody should wait for.
func announceAs(proxies int) announcing {
	a := announcing{200 * time.Millisecond, 800 * time.Millisecond, 2 * time.Second}
	if proxies < 100 {
		a = announcing{a.settle / 10, a.spread / 10, a.pace / 10}
	}
	return a
}

// fleet is n proxies without a data path on one server.
type fleet struct {
	t         *testing.T
	server    *zktest.Server
	servers   string
	n, topics int
	announcing
	writer  *Store
	next    int    // topic to change
	total   uint64 // sum of all epochs that are stored
	clients []*mapClient
}

// start makes all proxies at once. before are those that they were, of whose map they have a copy; nil: none.
func (f *fleet) start(before []*mapClient) {
	f.t.Helper()
	f.clients = make([]*mapClient, f.n)
	for i := range f.n {
		c := &mapClient{id: fmt.Sprintf("proxy-%03d", i), acks: make(chan string, 1000), moved: make(chan struct{}, 1),
			seenAt: map[uint64]time.Time{}, switches: map[string]bool{}, known: store.Known{Versions: map[int]string{}}}
		c.changed = sync.NewCond(&c.mu)
		if before != nil {
			b := before[i]
			c.sums, c.epochs, c.total, c.known = b.sums, b.epochs, b.total, b.known
		}
		f.clients[i] = c
		s, err := Open(f.t.Context(), Config{Servers: f.servers, SessionTimeout: 20 * time.Second, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			f.t.Fatal(err)
		}
		c.run(s, f.announcing)
	}
	f.await("the whole map", func(c *mapClient) bool { return c.synced })
	if before == nil {
		f.total = f.clients[0].total
	}
}

func (f *fleet) stop() {
	var group sync.WaitGroup
	for _, c := range f.clients {
		group.Go(func() {
			c.stop()
			c.tasks.Wait()
			if err := c.store.Close(); err != nil {
				f.t.Error(err)
			}
		})
	}
	group.Wait()
	f.clients = nil
}

// change moves n topics, each by a change of its own, by 8 writers if there are so many. switchID is that of the only one.
func (f *fleet) change(n int, switchID string) {
	f.t.Helper()
	begin := f.next
	f.next += n
	f.total += uint64(n)
	errs := make(chan error, n)
	limit := make(chan struct{}, 8)
	for i := range n {
		limit <- struct{}{}
		go func() {
			defer func() { <-limit }()
			errs <- f.move((begin+i)%f.topics, switchID)
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fleet) move(topic int, switchID string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	name := fillTopic(topic)
	before, ok, err := f.writer.Entry(ctx, name)
	if err != nil || !ok {
		return fmt.Errorf("%s: %v, %w", name, ok, err)
	}
	after := before
	after.Epoch++
	after.Cluster, after.SwitchID = map[string]string{"a": "b", "b": "a"}[before.Cluster], switchID
	c := store.Change{Entries: []store.EntryChange{{Topic: name, Before: &before, After: &after}}}
	if switchID != "" {
		c.Switch = &switching.Record{ID: switchID, Rev: 1, Topic: name, From: before.Cluster, To: after.Cluster, Epoch: after.Epoch, Started: time.Now()}
	}
	return f.writer.Apply(ctx, c)
}

// await waits until ok, which is called with the client locked, is true for each client.
func (f *fleet) await(what string, ok func(*mapClient) bool) {
	f.t.Helper()
	var late atomic.Bool
	timer := time.AfterFunc(4*time.Minute, func() {
		late.Store(true)
		for _, c := range f.clients {
			c.changed.Broadcast()
		}
	})
	defer timer.Stop()
	for _, c := range f.clients {
		c.mu.Lock()
		for !ok(c) && !late.Load() && c.fault == nil {
			c.changed.Wait()
		}
		done, fault, total := ok(c), c.fault, c.total
		c.mu.Unlock()
		if !done || fault != nil {
			f.t.Fatalf("%s: gave up waiting for %s: fault %v, sum of epochs %d of %d", c.id, what, fault, total, f.total)
		}
	}
}

func (f *fleet) awaitTotal() {
	f.t.Helper()
	f.await("all changes", func(c *mapClient) bool { return c.total == f.total })
}

// visible appends when the newest change was seen by each proxy, and by the last of them.
func (f *fleet) visible(begin time.Time, each, last []time.Duration) (_, _ []time.Duration) {
	f.t.Helper()
	f.awaitTotal()
	slowest := time.Duration(0)
	for _, c := range f.clients {
		c.mu.Lock()
		d := c.seenAt[f.total].Sub(begin)
		c.mu.Unlock()
		each = append(each, d)
		slowest = max(slowest, d)
	}
	return each, append(last, slowest)
}

func (f *fleet) awaitAcks(id string) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	path := f.writer.switchPath(id) + "/acks"
	for {
		names, err := f.writer.children(ctx, path)
		if err != nil {
			f.t.Fatal(err)
		}
		if len(names) == f.n {
			return
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			f.t.Fatalf("%d of %d proxies have acknowledged %s", len(names), f.n, id)
		}
	}
}

// agree checks that every proxy has exactly the map that is stored.
func (f *fleet) agree() {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	all, err := f.writer.Entries(ctx)
	if err != nil {
		f.t.Fatal(err)
	}
	var want [route.BucketCount]uint64
	for i := range all {
		want[route.Bucket(all[i].Topic)] += entrySum(&all[i])
	}
	for _, c := range f.clients {
		c.mu.Lock()
		if c.sums != want {
			f.t.Errorf("%s has another map than the store", c.id)
		}
		c.mu.Unlock()
	}
}

func (f *fleet) storedBytes() (n int64) {
	f.t.Helper()
	for i := range route.BucketCount {
		v, err := f.writer.get(f.t.Context(), f.writer.bucketPath(i))
		if err != nil {
			f.t.Fatal(err)
		}
		n += int64(len(v.data))
	}
	return n
}

// cost is what something cost the server and the proxies, which share the machine.
type cost struct {
	took              time.Duration
	requests          int64
	received, sent    int64 // bytes, seen from the proxies
	serverCPU, ownCPU time.Duration
}

func (f *fleet) now() (c cost) {
	for _, p := range f.clients {
		c.requests += p.store.client.traffic.requests.Load()
		c.received += p.store.client.traffic.received.Load()
		c.sent += p.store.client.traffic.sent.Load()
	}
	if cpu, err := f.server.CPU(); err == nil {
		c.serverCPU = cpu
	}
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err == nil {
		c.ownCPU = time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return c
}

// quiet waits until every proxy has announced the map that it serves, which is the last that a change has it do.
func (f *fleet) quiet() cost {
	f.t.Helper()
	f.await("announcements", func(c *mapClient) bool { return c.announced == c.total })
	return f.now()
}

func (f *fleet) measure(what string, do func()) cost {
	f.t.Helper()
	begin, at := f.now(), time.Now()
	do()
	took := time.Since(at)
	end := f.quiet()
	c := cost{took, end.requests - begin.requests, end.received - begin.received, end.sent - begin.sent, end.serverCPU - begin.serverCPU, end.ownCPU - begin.ownCPU}
	n := float64(f.n)
	f.t.Logf("%d proxies: %s: %s; a proxy: %.0f requests, %.0f KB from and %.0f KB to ZooKeeper; in all: %.1f MB, CPU of ZooKeeper %.2fs, of the proxies %.2fs",
		f.n, what, took.Round(time.Millisecond), float64(c.requests)/n, float64(c.received)/n/1e3, float64(c.sent)/n/1e3, float64(c.received+c.sent)/1e6,
		c.serverCPU.Seconds(), c.ownCPU.Seconds())
	return c
}

func (c cost) perChange(t *testing.T, changes, proxies int) {
	t.Helper()
	n := float64(changes)
	t.Logf("  a change: %.1f requests and %.1f KB a proxy, %.2f ms of CPU of ZooKeeper in all; %.0f changes a second", float64(c.requests)/n/float64(proxies),
		float64(c.received+c.sent)/n/float64(proxies)/1e3, float64(c.serverCPU.Microseconds())/n/1e3, n/c.took.Seconds())
}

func quantiles(d []time.Duration) string {
	d = slices.Clone(d)
	slices.Sort(d)
	at := func(q float64) time.Duration {
		return d[min(int(q*float64(len(d))), len(d)-1)].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("p50 %s, p99 %s, max %s (%d samples)", at(.5), at(.99), d[len(d)-1].Round(10*time.Microsecond), len(d))
}

// mapClient is a proxy without a data path: it follows the map, announces what it serves, and acknowledges switches, by the
// store's own code, on a connection of its own. Of the map it keeps sums: two hundred whole ones would not fit.
type mapClient struct {
	id    string
	store *Store
	acks  chan string   // switches to be acknowledged
	moved chan struct{} // capacity 1: announce another map
	tasks sync.WaitGroup
	stop  context.CancelFunc

	mu        sync.Mutex // guards what follows
	changed   *sync.Cond
	sums      [route.BucketCount]uint64 // of entrySum
	epochs    [route.BucketCount]uint64 // of epochs
	total     uint64                    // sum of all epochs: one more with each change
	seenAt    map[uint64]time.Time      // when total was reached
	switches  map[string]bool           // that were seen
	announced uint64                    // total of the last announcement
	synced    bool
	delivered int // buckets with entries
	known     store.Known
	fault     error
}

func (c *mapClient) run(s *Store, a announcing) {
	ctx, cancel := context.WithCancel(context.Background())
	c.store, c.stop = s, cancel
	known := store.Known{Map: c.known.Map, Versions: maps.Clone(c.known.Versions)}
	fail := func(err error) {
		if err == nil || ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.fault = err
		c.changed.Broadcast()
	}
	c.tasks.Go(func() {
		p := store.Proxy{ID: c.id, Incarnation: "i", Version: "fleet", Advertised: "pulsar://pulsar.example.com:6650", Clusters: []string{"a", "b"}}
		// As internal/app does: what is read of the map is of after that, and read once; unless the server has too much to do.
		_ = s.Register(ctx, p)
		c.tasks.Go(func() { fail(s.Resume(ctx, known, c.take)) })
		for {
			c.mu.Lock()
			total := c.total
			c.mu.Unlock()
			p.Digest = fmt.Sprintf("%016x", total)
			begin := time.Now()
			if s.Register(ctx, p) == nil {
				c.mu.Lock()
				c.announced = total
				c.changed.Broadcast()
				c.mu.Unlock()
				select {
				case <-c.moved:
				case <-ctx.Done():
					return
				}
			}
			if pause(ctx, max(a.settle+rand.N(a.spread), a.pace-time.Since(begin))) != nil {
				return
			}
		}
	})
	c.tasks.Go(func() {
		for {
			select {
			case id := <-c.acks:
				_, err := s.Switch(ctx, id)
				fail(err)
				fail(s.PutAck(ctx, id, switching.Ack{Proxy: c.id, Incarnation: "i", At: time.Now()}))
			case <-ctx.Done():
				return
			}
		}
	})
}

func (c *mapClient) take(u store.Update) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, entries := range u.Buckets {
		epochs, sum := uint64(0), uint64(0)
		for j := range entries {
			e := &entries[j]
			epochs += e.Epoch
			sum += entrySum(e)
			if e.SwitchID != "" && !c.switches[e.SwitchID] {
				c.switches[e.SwitchID] = true
				if c.synced {
					c.acks <- e.SwitchID
				}
			}
		}
		c.total += epochs - c.epochs[i]
		c.epochs[i], c.sums[i] = epochs, sum
		if len(entries) > 0 {
			c.delivered++
		}
		delete(c.known.Versions, i)
	}
	maps.Copy(c.known.Versions, u.Versions)
	if u.Map != "" {
		c.known.Map = u.Map
	}
	for i, err := range u.Bad {
		c.fault = fmt.Errorf("part %d of the map: %w", i, err)
	}
	if c.synced = c.synced || u.Synced; c.synced {
		c.seenAt[c.total] = now
	}
	c.changed.Broadcast()
	select {
	case c.moved <- struct{}{}:
	default:
	}
}

func entrySum(e *route.Entry) uint64 {
	return xxhash.Sum64String(e.Topic)*(2*e.Epoch+1) + xxhash.Sum64String(e.Cluster) + 3*xxhash.Sum64String(e.SwitchID)
}
