package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// keeping runs a keeper of the map of st with a copy in dir, as process incarnation, without event loops, until the returned function
// is called.
func keeping(t *testing.T, st store.Store, dir, incarnation string) (k *mapKeeper, log *logRecorder, stop func()) {
	t.Helper()
	disk, err := newDiskCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	log = &logRecorder{}
	k = newMapKeeper(st, slog.New(slog.NewTextHandler(log, nil)), disk)
	k.def = "a"
	k.loops, k.self = noLoops{}, func() store.Proxy { return store.Proxy{ID: "p", Incarnation: incarnation} }
	if err := k.loadCopy(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return k, log, stop
}

// moves is a planned switch of movedTopic in a store.
type moves struct {
	*hand
}

func newMoves(t *testing.T, st store.Store) moves {
	t.Helper()
	m := moves{&hand{rig: &rig{world: &world{}}, st: st, rec: switching.Record{ID: "sw-1", Rev: 1, Attempt: 1, Topic: movedTopic, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested, Epoch: 1}}}
	if err := st.PutSwitch(t.Context(), m.rec); err != nil {
		t.Fatal(err)
	}
	return m
}

// acked waits for the ack of a phase by an incarnation.
func (m moves) acked(t *testing.T, phase switching.State, incarnation string) {
	t.Helper()
	m.await(t, fmt.Sprintf("ack of %s by %s", phase, incarnation), func() bool { return m.has(t, phase, incarnation) })
}

func (m moves) has(t *testing.T, phase switching.State, incarnation string) bool {
	t.Helper()
	acks, err := m.st.Acks(t.Context(), m.rec.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range acks {
		if a.Phase == phase && a.Incarnation == incarnation && a.Attempt == m.rec.Attempt {
			return true
		}
	}
	return false
}

// P3: what a restart would not know of is not acknowledged.
func TestAnAttemptThatTheDiskDoesNotTakeIsNotAcknowledged(t *testing.T) {
	for _, state := range []route.State{route.StatePrepared, route.StateFenced} { // fenced: it missed the first
		phase := map[route.State]switching.State{route.StatePrepared: switching.StatePrepared, route.StateFenced: switching.StateFenced}[state]
		t.Run(string(phase), func(t *testing.T) {
			st, dir := store.NewMemory(), filepath.Join(t.TempDir(), "state")
			k, log, _ := keeping(t, st, dir, "i")
			<-k.synced
			if err := os.Rename(dir, dir+"-gone"); err != nil {
				t.Fatal(err)
			}
			m := newMoves(t, st)
			m.write(t, phase, "a", state, 0)
			m.await(t, "line about the disk", func() bool { return len(log.with("a switch waits for this proxy", "copy of moving topics")) > 1 })
			if m.has(t, phase, "i") {
				t.Error("it is acknowledged, and the disk does not have it")
			}
			if err := os.Rename(dir+"-gone", dir); err != nil {
				t.Fatal(err)
			}
			m.acked(t, phase, "i")
			if e := onDisk(t, dir); e != m.entry {
				t.Errorf("acknowledged, and the disk has %+v", e)
			}
		})
	}
}

// An ack that the store does not take is given again; one that nobody waits for any more is not.
func TestAnAckIsGivenUntilTheStoreHasIt(t *testing.T) {
	st := store.NewMemory()
	mine := st.Join()
	k, log, _ := keeping(t, mine, t.TempDir(), "i")
	<-k.synced
	m := newMoves(t, st)
	mine.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{"PutAck"}})
	m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	m.await(t, "failure", func() bool { return len(log.with("acknowledging prepared")) > 0 })
	mine.SetFaults(store.Faults{})
	m.acked(t, switching.StatePrepared, "i")
	mine.SetFaults(store.Faults{Err: store.ErrNotFound, Only: []string{"PutAck"}})
	m.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	m.write(t, switching.StateEvicting, "b", route.StateActive, 1)
	m.await(t, "end of the move", func() bool {
		k.mover.mu.Lock()
		defer k.mover.mu.Unlock()
		return len(k.mover.topics) == 0
	})
	for _, phase := range []string{"fenced", "evicting"} {
		if lines := log.with("acknowledging " + phase); len(lines) > 0 {
			t.Errorf("nobody waits for the ack: %v", lines)
		}
	}
}

// A process that starts from the disk in the middle of a switch owes the acks of its predecessor anew as soon as it hears from the store,
// although the map has not changed.
func TestAProcessThatStartsInAFenceAcknowledgesIt(t *testing.T) {
	for phase, state := range map[switching.State]route.State{switching.StatePrepared: route.StatePrepared, switching.StateFenced: route.StateFenced} {
		t.Run(string(phase), func(t *testing.T) {
			st, dir := store.NewMemory(), t.TempDir()
			k, _, stop := keeping(t, st, dir, "first")
			<-k.synced
			m := newMoves(t, st)
			m.write(t, phase, "a", state, 0)
			m.acked(t, phase, "first")
			stop()
			away := st.Join()
			away.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
			k, _, _ = keeping(t, away, dir, "second")
			<-k.loaded
			if e, _ := k.table.Load().Entry(movedTopic); e != m.entry {
				t.Fatalf("it starts with %+v", e)
			}
			if held := k.mover.held(); len(held) != 1 || held[0] != movedTopic {
				t.Errorf("held without the store: %v", held)
			}
			away.SetFaults(store.Faults{})
			m.acked(t, phase, "second")
		})
	}
}

// The small copy keeps a topic until the copy of the whole map, on the disk, has what became of it.
func TestTheSmallCopyKeepsATopicUntilTheMapIsOnTheDisk(t *testing.T) {
	st, dir := store.NewMemory(), t.TempDir()
	k, _, stop := keeping(t, st, dir, "i")
	<-k.synced
	m := newMoves(t, st)
	m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	m.acked(t, switching.StatePrepared, "i")
	prepared := m.entry
	stop() // saves the map, where the topic is prepared still
	if e := onDisk(t, dir); e != prepared {
		t.Errorf("the topic is prepared, and the small copy has %+v", e)
	}

	k, log, stop := keeping(t, st, dir, "i")
	<-k.synced
	// A file cannot take the place of a directory with something in it.
	if err := os.Remove(k.copy.path); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(k.copy.path, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	m.write(t, switching.StateAborted, "a", route.StateActive, 0)
	m.await(t, "abort in the table", func() bool {
		e, _ := k.table.Load().Entry(movedTopic)
		return e == m.entry
	})
	stop()
	if len(log.with("last good map could not be written")) == 0 {
		t.Fatal("the map was saved")
	}
	if e := onDisk(t, dir); e != prepared {
		t.Errorf("the disk does not have the abort, and the small copy has %+v", e)
	}

	if err := os.RemoveAll(k.copy.path); err != nil {
		t.Fatal(err)
	}
	k, _, stop = keeping(t, st, dir, "i") // from nothing: what the small copy has is no map
	<-k.synced
	if e, _ := k.table.Load().Entry(movedTopic); e != m.entry {
		t.Errorf("the map says %+v", e)
	}
	stop()
	if e := onDisk(t, dir); e != (route.Entry{}) {
		t.Errorf("all of it is over, and the small copy has %+v", e)
	}
}

// What was acknowledged is laid over the map of before; but not over what is newer than it. The store is asked for that bucket in any case.
func TestAnAcknowledgedAttemptIsLaidOverTheCopyOfTheMap(t *testing.T) {
	active := route.Entry{Topic: movedTopic, Cluster: "a", Epoch: 3}
	prepared := active
	prepared.State, prepared.SwitchID, prepared.Attempt = route.StatePrepared, "sw-1", 1
	for name, c := range map[string]struct{ inMap, want route.Entry }{
		"the map of before":           {active, prepared},
		"a map that has it":           {prepared, prepared},
		"a map in which it has moved": {route.Entry{Topic: movedTopic, Cluster: "b", Epoch: 4, SwitchID: "sw-1", Attempt: 1}, route.Entry{Topic: movedTopic, Cluster: "b", Epoch: 4, SwitchID: "sw-1", Attempt: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, bucket := t.TempDir(), route.Bucket(movedTopic)
			first := newScriptedStore()
			_, stop := first.run(t, dir)
			<-first.known
			first.updates <- store.Update{Buckets: map[int][]route.Entry{bucket: {c.inMap}, bucket ^ 1: nil}, Versions: map[int]string{bucket: "v", bucket ^ 1: "w"}, Map: "m", Rules: &[]route.Rule{}, Synced: true}
			first.updates <- store.Update{Synced: true, Map: "m"}
			stop()
			if err := newMovingCopy(dir).put(prepared); err != nil {
				t.Fatal(err)
			}
			second := newScriptedStore()
			k, stop := second.run(t, dir)
			defer stop()
			if e, _ := k.table.Load().Entry(movedTopic); e != c.want {
				t.Errorf("the start goes by %+v, want %+v", e, c.want)
			}
			known := <-second.known
			if _, ok := known.Versions[bucket]; ok != (c.want != prepared) {
				t.Errorf("the store is told that version %q of the bucket is known", known.Versions[bucket])
			}
			if known.Versions[bucket^1] != "w" {
				t.Error("other buckets are read again as well")
			}
		})
	}
}

// A small copy that cannot be used keeps the map from being served without the store, and is replaced with it.
func TestABrokenSmallCopyIsReplacedOnceTheMapWasRead(t *testing.T) {
	st, dir := store.NewMemory(), t.TempDir()
	k, _, stop := keeping(t, st, dir, "i")
	<-k.synced
	m := newMoves(t, st)
	m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	m.acked(t, switching.StatePrepared, "i")
	stop()
	path := filepath.Join(dir, "moving-topics")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"a"`, `"b"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := newDiskCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	k = newMapKeeper(st, slog.New(slog.DiscardHandler), disk)
	k.def, k.loops, k.self = "a", noLoops{}, func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "j"} }
	if err := k.loadCopy(); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("the copy is loaded: %v", err)
	}
	if k.table.Load().Len() != 0 {
		t.Error("a map is served without what was laid over it")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	<-k.synced
	m.write(t, switching.StateAborted, "a", route.StateActive, 0)
	m.await(t, "abort in the table", func() bool {
		e, _ := k.table.Load().Entry(movedTopic)
		return e == m.entry
	})
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if e := onDisk(t, dir); e != (route.Entry{}) {
		t.Errorf("the small copy has %+v", e)
	}
}

// S2: with the membership ends the copy. Nothing of it is loaded by a later start, and nothing brings it back; when the membership goes on it
// counts again.
func TestACopyThatWasSetAsideIsNotLoadedOrWritten(t *testing.T) {
	dir := t.TempDir()
	d, err := newDiskCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	entry := route.Entry{Topic: movedTopic, Cluster: "a", Epoch: 1}
	table, err := route.Empty().WithEntry(movedTopic, &entry)
	if err != nil {
		t.Fatal(err)
	}
	prepared := entry
	prepared.State, prepared.SwitchID = route.StatePrepared, "sw-1"
	other := prepared
	other.Topic = movedTopic + "-2"
	save := func() {
		t.Helper()
		if err := d.save(servedMap{table: table}, time.Now()); err != nil {
			t.Error(err)
		}
	}
	loaded := func() (whole, small bool) {
		t.Helper()
		fresh, err := newDiskCopy(dir)
		if err != nil {
			t.Fatal(err)
		}
		m, _, err := fresh.load()
		if err != nil {
			t.Error(err)
		}
		return m.table != nil, onDisk(t, dir) == prepared
	}
	save()
	if err := d.moving.put(prepared); err != nil {
		t.Fatal(err)
	}
	if whole, small := loaded(); !whole || !small {
		t.Fatalf("before: map %v, moving topics %v", whole, small)
	}
	if err := d.setAside(); err != nil {
		t.Fatal(err)
	}
	if err := d.save(servedMap{table: table}, time.Now()); !errors.Is(err, errAside) {
		t.Errorf("a map counts as written by a process that has left: %v", err)
	}
	for _, e := range []route.Entry{prepared, other} { // also one that was written before
		if err := d.moving.put(e); !errors.Is(err, errAside) {
			t.Errorf("an attempt is taken down by a process that has left: %v", err)
		}
	}
	if err := d.moving.settle(table, d.moving.all()); err != nil {
		t.Error(err)
	}
	if whole, small := loaded(); whole || small {
		t.Errorf("set aside: map %v, moving topics %v", whole, small)
	}
	if err := d.takeBack(); err != nil {
		t.Fatal(err)
	}
	if whole, small := loaded(); !whole || !small || d.moving.all()[movedTopic] != prepared {
		t.Errorf("taken back: map %v, moving topics %v, %v", whole, small, d.moving.all())
	}
	save()
	if err := d.moving.put(prepared); err != nil {
		t.Error(err)
	}
	if whole, small := loaded(); !whole || !small {
		t.Errorf("taken back: map %v, moving topics %v", whole, small)
	}
	if err := d.setAside(); err != nil {
		t.Fatal(err)
	}
	d.discard()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("discarded, and there is %v, %v", left, err)
	}
}

// A clean stop ends the membership and the copy together; when the store does not take the one, the other stays.
func TestAStopEndsMembershipAndCopyTogether(t *testing.T) {
	for _, stays := range []bool{false, true} {
		t.Run(fmt.Sprintf("the store refuses: %v", stays), func(t *testing.T) {
			dir := t.TempDir()
			r := newRig(t, testkit.Options{}, func(c *config.Config) { c.StateDir = dir })
			st := r.app.store.(*store.Memory)
			h := newHand(t, r, "sw-1")
			h.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
			h.ack(t, switching.StatePrepared)
			r.await(t, "copy of the map", func() bool { _, err := os.Stat(filepath.Join(dir, "last-good-map")); return err == nil })
			if stays {
				st.SetFaults(store.Faults{Err: store.ErrUnavailable, Only: []string{"Unregister"}})
			}
			if err := r.stop(); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"last-good-map", "moving-topics"} {
				if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != stays {
					t.Errorf("%s: %v", name, err)
				}
				if _, err := os.Stat(filepath.Join(dir, name+asideSuffix)); err == nil {
					t.Errorf("%s is left", name+asideSuffix)
				}
			}
			members, err := st.Join().Proxies(t.Context())
			if err != nil || (len(members) == 1) != stays {
				t.Errorf("the roster is %+v, %v", members, err)
			}
		})
	}
}

// waitingIn is how many goroutines wait for a lock in that method of a movingCopy, once one does; 0 when ended comes first.
func waitingIn(method string, ended func() bool) (n int) {
	stacks := make([]byte, 4<<20)
	for !ended() {
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, ".(*movingCopy)."+method+"(") && strings.Contains(stack, "sync.(*Mutex).Lock(") {
				n++
			}
		}
		if n > 0 {
			return n
		}
		runtime.Gosched()
	}
	return 0
}

// S2: a write that is under way when the copy is put aside, or taken back, must not bring the file back, or away, behind it.
func TestACopyIsPutAsideBehindTheWriteThatIsUnderWay(t *testing.T) {
	for method, move := range map[string]func(*movingCopy) error{"setAside": (*movingCopy).setAside, "takeBack": (*movingCopy).takeBack} {
		c := newMovingCopy(t.TempDir())
		c.file.Lock() // as a write does
		ended := make(chan error, 1)
		go func() { ended <- move(c) }()
		if waitingIn(method, func() bool { return len(ended) > 0 }) != 1 {
			t.Errorf("%s does not wait for the write", method)
		}
		c.file.Unlock()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// Of many topics that are prepared at the same moment each is on the disk when its own put has returned, and they take a few writes, not one each.
func TestTopicsThatArePreparedTogetherShareAWrite(t *testing.T) {
	dir := t.TempDir()
	c := newMovingCopy(dir)
	const topics = 64
	c.file.Lock() // as if another write were under way
	var group sync.WaitGroup
	var mu sync.Mutex
	writes := map[uint64]bool{}
	for i := range topics {
		e := route.Entry{Topic: fmt.Sprintf("persistent://acme/orders/t%d", i), Cluster: "a", State: route.StatePrepared, SwitchID: "sw-1", Attempt: 1}
		group.Go(func() {
			if err := c.put(e); err != nil {
				t.Error(err)
				return
			}
			again := newMovingCopy(dir)
			if _, err := again.load(route.Empty()); err != nil || again.entries[e.Topic] != e {
				t.Errorf("%s was put, and the disk has %+v, %v", e.Topic, again.entries[e.Topic], err)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			mu.Lock()
			defer mu.Unlock()
			writes[c.written] = true
		})
	}
	for {
		c.mu.Lock()
		all := len(c.entries)
		c.mu.Unlock()
		if all == topics {
			break
		}
		runtime.Gosched()
	}
	if n := waitingIn("write", func() bool { _, err := os.Stat(c.path); return err == nil }); n != 1 {
		t.Errorf("while another write is under way %d wait for its end, want one for all", n)
	}
	c.file.Unlock()
	group.Wait()
	if len(writes) > 3 {
		t.Errorf("%d writes for %d topics", len(writes), topics)
	}
}

// What is found broken is replaced although nothing is over, and what cannot be read is no copy without entries.
func TestASmallCopyThatCannotBeUsedIsNotTakenForAnEmptyOne(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "moving-topics")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := newMovingCopy(dir)
	if _, err := c.load(route.Empty()); err == nil {
		t.Error("a copy that was cut off is loaded")
	}
	if err := c.settle(route.Empty(), c.all()); err != nil {
		t.Error(err)
	}
	if _, err := newMovingCopy(dir).load(route.Empty()); err != nil {
		t.Errorf("the broken copy is still there: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := newMovingCopy(dir).load(route.Empty()); err == nil {
		t.Error("a copy that cannot be read is loaded")
	}
}

// A later attempt outlives the end of the one before, and an entry that could not be taken out is told of.
func TestOnlyWhatIsOverLeavesTheSmallCopy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c := newMovingCopy(dir)
	first := movedEntry(route.StatePrepared)
	if err := c.put(first); err != nil {
		t.Fatal(err)
	}
	known, aborted := c.all(), tableOf(t, movedEntry(route.StateActive))
	second := first
	second.Attempt = 2
	if err := c.put(second); err != nil {
		t.Fatal(err)
	}
	if err := c.settle(aborted, known); err != nil {
		t.Fatal(err)
	}
	again := newMovingCopy(dir)
	if _, err := again.load(route.Empty()); err != nil || again.entries[second.Topic] != second {
		t.Errorf("the disk has %+v, %v; want %+v", again.entries, err, second)
	}
	if err := os.Rename(dir, dir+"-gone"); err != nil {
		t.Fatal(err)
	}
	if err := c.settle(aborted, c.all()); err == nil {
		t.Error("what could not be written is no error")
	}
}

// S2: a proxy must not end its membership while its copies could be loaded again, nor take back the one of the map without the one of moving topics.
func TestCopiesThatCannotBeMovedAreNotSaidToBe(t *testing.T) {
	block := func(path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(path, "x"), 0o700); err != nil { // a file cannot take its place
			t.Fatal(err)
		}
	}
	for _, name := range []string{"last-good-map", "moving-topics"} {
		fresh := func() (*diskCopy, string) {
			d, err := newDiskCopy(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if err := d.setAside(); err != nil {
				t.Fatalf("there is nothing to put aside yet: %v", err)
			}
			if err := d.takeBack(); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(d.save(servedMap{table: route.Empty()}, time.Now()), d.moving.put(movedEntry(route.StatePrepared))); err != nil {
				t.Fatal(err)
			}
			return d, filepath.Join(filepath.Dir(d.path), name)
		}
		d, path := fresh()
		block(path + asideSuffix)
		if err := d.setAside(); err == nil {
			t.Errorf("%s is in its place, and counts as put aside", name)
		}
		d, path = fresh()
		if err := d.setAside(); err != nil {
			t.Fatal(err)
		}
		block(path)
		if err := d.takeBack(); err == nil {
			t.Errorf("%s is aside, and counts as taken back", name)
		}
		if _, err := os.Stat(d.path); err == nil && name == "moving-topics" {
			t.Error("the map would be loaded without the topics that move")
		}
	}
}
