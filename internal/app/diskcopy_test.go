package app

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// scriptedStore delivers what a test says, and notes what its watch was told.
type scriptedStore struct {
	store.Store
	known   chan store.Known
	updates chan store.Update
}

func newScriptedStore() *scriptedStore {
	return &scriptedStore{known: make(chan store.Known, 1), updates: make(chan store.Update)}
}

func (s *scriptedStore) Resume(ctx context.Context, known store.Known, sink func(store.Update)) error {
	s.known <- known
	for {
		select {
		case u := <-s.updates:
			sink(u)
		case <-ctx.Done():
			return nil
		}
	}
}

// Running implements store.Store: nothing moves.
func (s *scriptedStore) Running(context.Context) ([]switching.Record, error) { return nil, nil }

// PutAck may come before a test ends: an entry that it delivers is of a switch.
func (s *scriptedStore) PutAck(context.Context, string, switching.Ack) error { return nil }

// Lease is looked at now and then while a test lasts.
func (s *scriptedStore) Lease() time.Duration { return store.Boottime() + time.Minute }

// run keeps the map of s with a copy in dir until the returned function is called.
func (s *scriptedStore) run(t *testing.T, dir string) (k *mapKeeper, stop func()) {
	t.Helper()
	disk, err := newDiskCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	k = newMapKeeper(s, slog.New(slog.DiscardHandler), disk)
	k.loops, k.self = noLoops{}, func() store.Proxy { return store.Proxy{} }
	if err := k.loadCopy(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	return k, func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// named are the topics of three buckets.
func named(t *testing.T) (topics [3]route.Topic, entries map[int][]route.Entry) {
	t.Helper()
	entries = map[int][]route.Entry{}
	for i := range topics {
		var err error
		if topics[i], err = route.ParseTopic(fmt.Sprintf("persistent://acme/orders/t%d", i)); err != nil {
			t.Fatal(err)
		}
		bucket := route.Bucket(topics[i].Base())
		if entries[bucket] != nil {
			t.Fatal("two topics have one bucket")
		}
		entries[bucket] = []route.Entry{{Topic: topics[i].Base(), Cluster: "b", Epoch: 1}}
	}
	return topics, entries
}

func clusterOf(k *mapKeeper, topic route.Topic) string {
	return k.table.Load().Decide(topic, "default").Cluster
}

// A proxy that starts with a copy tells the store what it has, keeps what has not changed, and has the rest replaced.
func TestAStartWithACopyTakesOnlyWhatChanged(t *testing.T) {
	dir := t.TempDir()
	topics, entries := named(t)
	var at [3]int
	for i := range topics {
		at[i] = route.Bucket(topics[i].Base())
	}
	first := newScriptedStore()
	k, stop := first.run(t, dir)
	if known := <-first.known; len(known.Versions) != 0 {
		t.Fatalf("without a copy the watch is told %+v", known)
	}
	first.updates <- store.Update{Buckets: entries, Rules: &[]route.Rule{}, Map: "m", Versions: map[int]string{at[0]: "v0", at[1]: "v1", at[2]: "v2"}}
	first.updates <- store.Update{Synced: true, Map: "m"}
	// A value without a version, and one whose entry the table refuses: the copy must not claim to have them.
	first.updates <- store.Update{Synced: true, Map: "m", Buckets: map[int][]route.Entry{at[1]: entries[at[1]]}}
	first.updates <- store.Update{Synced: true, Map: "m", Buckets: map[int][]route.Entry{at[2]: {{Topic: "no topic", Cluster: "b"}}}, Versions: map[int]string{at[2]: "v2-refused"}}
	first.updates <- store.Update{Synced: true, Map: "m"}
	stop()
	if n := k.bad.Load(); n != 1 {
		t.Fatalf("%d bad parts, want the refused one", n)
	}

	second := newScriptedStore()
	k, stop = second.run(t, dir)
	if known := <-second.known; known.Map != "m" || !maps.Equal(known.Versions, map[int]string{at[0]: "v0", at[2]: "v2"}) {
		t.Errorf("the watch is told %+v, want the versions v0 and v2 of map m", known)
	}
	second.updates <- store.Update{Kept: []int{at[0]}, Rules: &[]route.Rule{}, Map: "m", Synced: true,
		Buckets: map[int][]route.Entry{at[1]: {{Topic: topics[1].Base(), Cluster: "c", Epoch: 2}}}, Versions: map[int]string{at[1]: "v1-new"}}
	second.updates <- store.Update{Synced: true, Map: "m"} // the one before is done
	if a, b, c := clusterOf(k, topics[0]), clusterOf(k, topics[1]), clusterOf(k, topics[2]); a != "b" || b != "c" || c != "default" {
		t.Errorf("kept, replaced and gone topics belong to %s, %s, %s; want b, c, default", a, b, c)
	}
	stop()
	third := newScriptedStore()
	_, stop = third.run(t, dir)
	if known := <-third.known; !maps.Equal(known.Versions, map[int]string{at[0]: "v0", at[1]: "v1-new"}) {
		t.Errorf("the third start knows %+v", known)
	}
	stop()
}

// Nothing of another map stays in force, also where the new one cannot be read.
func TestACopyOfAnotherMapLeavesNothingBehind(t *testing.T) {
	dir := t.TempDir()
	topics, entries := named(t)
	versions := map[int]string{}
	for i := range entries {
		versions[i] = "v"
	}
	first := newScriptedStore()
	_, stop := first.run(t, dir)
	<-first.known
	first.updates <- store.Update{Buckets: entries, Rules: &[]route.Rule{{Cluster: "b"}}, Map: "m", Versions: versions, Synced: true}
	first.updates <- store.Update{Synced: true, Map: "m"}
	stop()

	second := newScriptedStore()
	k, stop := second.run(t, dir)
	<-second.known
	bad := route.Bucket(topics[0].Base())
	second.updates <- store.Update{Map: "other", Synced: true, Bad: map[int]error{bad: errors.New("damaged"), store.BadRules: errors.New("damaged")}}
	second.updates <- store.Update{Synced: true, Map: "other"}
	if d := k.table.Load().Decide(topics[0], "default"); d.Source != route.SourceUnknown {
		t.Errorf("a topic whose bucket cannot be read: %+v, want SourceUnknown", d)
	}
	if d := k.table.Load().Decide(topics[1], "default"); d.Source != route.SourceUnknown {
		t.Errorf("a topic whose rules cannot be read: %+v, want SourceUnknown", d)
	}
	if known := k.served().known; known.Map != "other" || len(known.Versions) != 0 {
		t.Errorf("versions of the other map are left: %+v", known)
	}
	stop()
}

// What was unreadable is unknown after a restart too: an empty bucket would send its topics to the default cluster.
func TestACopyRemembersWhatCouldNotBeRead(t *testing.T) {
	dir := t.TempDir()
	topics, entries := named(t)
	bad := route.Bucket(topics[0].Base())
	delete(entries, bad)
	first := newScriptedStore()
	_, stop := first.run(t, dir)
	<-first.known
	first.updates <- store.Update{Buckets: entries, Map: "m", Synced: true, Bad: map[int]error{bad: errors.New("damaged"), store.BadRules: errors.New("damaged")}}
	first.updates <- store.Update{Synced: true, Map: "m"}
	stop()

	second := newScriptedStore()
	k, stop := second.run(t, dir)
	defer stop()
	if d := k.table.Load().Decide(topics[0], "default"); d.Source != route.SourceUnknown {
		t.Errorf("a topic whose bucket was never read: %+v, want SourceUnknown", d)
	}
	if c := clusterOf(k, topics[1]); c != "b" {
		t.Errorf("a topic with an entry belongs to %q", c)
	}
	if unknown := k.table.Load().Unknown(); !slices.Equal(unknown, []int{route.RulesBucket, bad}) {
		t.Errorf("unknown parts %v", unknown)
	}
}

// Copies of the version before have no versions of buckets; they serve, and are read again.
func TestACopyWithoutVersionsServes(t *testing.T) {
	_, entries := named(t)
	table, _, err := route.Empty().With(entries, &[]route.Rule{{Cluster: "b"}})
	if err != nil {
		t.Fatal(err)
	}
	disk, err := newDiskCopy(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	saved := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	if err := disk.save(servedMap{table: table}, saved); err != nil {
		t.Fatal(err)
	}
	m, at, err := disk.load()
	if err != nil || !at.Equal(saved) || m.table.Digest() != table.Digest() || len(m.known.Versions) != 0 {
		t.Errorf("%+v, %v, %v", m.known, at, err)
	}
}

// sealed is a copy with the checksum that it should have.
func sealed(head, body string) []byte {
	text := []byte(head + body)
	sum := sha256.Sum256(text)
	return append(text, sum[:]...)
}

// Nothing is served from a copy that is not what was written, or that a later version wrote; whatever it is, reading it ends with a reason.
func TestACopyThatIsNotWholeIsRefused(t *testing.T) {
	const digest = `"digest":"0000000000000000","rules":[]`
	whole := sealed(`{"format":1,`+digest+"}\n", "")
	if _, _, err := parseCopy(whole); err != nil {
		t.Fatalf("an empty copy: %v", err)
	}
	torn := slices.Clone(whole)
	torn[12] ^= 1
	for want, raw := range map[string][]byte{
		"it is cut off":                    whole[:sha256.Size-1],
		"checksum does not match":          torn,
		"it has no header":                 sealed(`{"format":1,`+digest+"}", ""),
		"format 2, this version knows 1":   sealed(`{"format":2,`+digest+"}\n", ""),
		"format 0, this version knows 1":   sealed(`{`+digest+"}\n", ""),
		"a bucket is cut off":              sealed(`{"format":1,"buckets":1,`+digest+"}\n", "\x00\x01\x00\x00\x00"),
		"bucket is cut off":                sealed(`{"format":1,"buckets":1,`+digest+"}\n", "\x00\x01\x00\x00\x00\x02x"),
		"there is no part 1024 of a map":   sealed(`{"format":1,"unknown":[1024],`+digest+"}\n", ""),
		"there is no part -2 of a map":     sealed(`{"format":1,"unknown":[-2],`+digest+"}\n", ""),
		"its header says 0000000000000001": sealed(`{"format":1,"digest":"0000000000000001","rules":[]}`+"\n", ""),
	} {
		if _, _, err := parseCopy(raw); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", want, err)
		}
	}
}

// The copy is written anew when anything of it has changed.
func TestACopyIsTheSameOnlyIfAllOfItIs(t *testing.T) {
	m := servedMap{tableOf(t, movedEntry(route.StatePrepared)), store.Known{Map: "m", Versions: map[int]string{1: "v"}}}
	if !m.same(m) {
		t.Error("a map is not the same as itself")
	}
	for name, o := range map[string]servedMap{
		"no table": {}, "table": {route.Empty(), m.known}, "map": {m.table, store.Known{Map: "n", Versions: m.known.Versions}},
		"versions": {m.table, store.Known{Map: "m", Versions: map[int]string{1: "w"}}},
	} {
		if m.same(o) {
			t.Errorf("with another %s it counts as the same", name)
		}
	}
}

// A file that could not be replaced is left alone, and nothing beside it; the directory is for its owner.
func TestAFileThatCannotBeReplacedLeavesNothingBehind(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	d, err := newDiskCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.MkdirAll(filepath.Join(d.path, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeDurably(d.path, []byte("text")); err == nil {
		t.Error("a directory was replaced by a file")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}

// A start that finds nothing new does not write the file again.
func TestAnUnchangedMapIsNotWrittenAgain(t *testing.T) {
	dir := t.TempDir()
	_, entries := named(t)
	versions := map[int]string{}
	var all []int
	for i := range entries {
		versions[i] = "v"
		all = append(all, i)
	}
	first := newScriptedStore()
	k, stop := first.run(t, dir)
	<-first.known
	first.updates <- store.Update{Buckets: entries, Rules: &[]route.Rule{}, Map: "m", Versions: versions, Synced: true}
	first.updates <- store.Update{Synced: true, Map: "m"}
	stop()
	before, err := os.Stat(k.copy.path)
	if err != nil {
		t.Fatal(err)
	}
	second := newScriptedStore()
	k, stop = second.run(t, dir)
	<-second.known
	second.updates <- store.Update{Kept: all, Rules: &[]route.Rule{}, Map: "m", Synced: true}
	second.updates <- store.Update{Synced: true, Map: "m"}
	stop()
	after, err := os.Stat(k.copy.path)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("the copy was replaced although nothing has changed")
	}
}

// movedEntry is one of a planned switch.
func movedEntry(state route.State) route.Entry {
	return route.Entry{Topic: "persistent://acme/orders/moved", Cluster: "a", State: state, SwitchID: "sw-1", Attempt: 1}
}

func tableOf(t *testing.T, entries ...route.Entry) *route.Table {
	t.Helper()
	table := route.Empty()
	for _, e := range entries {
		var err error
		if table, err = table.WithEntry(e.Topic, &e); err != nil {
			t.Fatal(err)
		}
	}
	return table
}

// P3: an entry that is acknowledged while the copy of a map from before is being written must outlive a crash.
func TestAnEntryThatMovesWhileTheMapIsWrittenStaysOnTheDisk(t *testing.T) {
	dir := t.TempDir()
	c := newMovingCopy(dir)
	e := movedEntry(route.StatePrepared)
	known := c.all()
	before := tableOf(t, route.Entry{Topic: e.Topic, Cluster: "a"})
	if err := c.put(e); err != nil {
		t.Fatal(err)
	}
	if err := c.settle(before, known); err != nil {
		t.Fatal(err)
	}
	table, err := newMovingCopy(dir).load(before)
	if have, _ := table.Entry(e.Topic); err != nil || have != e {
		t.Fatalf("after a crash the topic is %+v, %v", have, err)
	}
	// The copy of a later map, which has its end, lets it go.
	if err := c.settle(tableOf(t, movedEntry(route.StateActive)), c.all()); err != nil {
		t.Fatal(err)
	}
	if table, err = newMovingCopy(dir).load(before); err != nil || table != before {
		t.Errorf("an entry whose switch has ended is still on the disk: %v", err)
	}
}

// BenchmarkDiskCopy is what the copy of a map of 100,000 topics costs, with versions.
func BenchmarkDiskCopy(b *testing.B) {
	const topics = 100_000
	buckets, versions := map[int][]route.Entry{}, map[int]string{}
	for i := range topics {
		topic := fmt.Sprintf("persistent://tenant-%d/namespace-%d/some-topic-name-%d", i%7, i%91, i)
		bucket := route.Bucket(topic)
		buckets[bucket] = append(buckets[bucket], route.Entry{Topic: topic, Cluster: "a", Epoch: 1})
		versions[bucket] = "1000001a2.1000001a2.1.19ad0c1f2b4.3b0"
	}
	table, _, err := route.Empty().With(buckets, nil)
	if err != nil {
		b.Fatal(err)
	}
	disk, err := newDiskCopy(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	m := servedMap{table, store.Known{Map: "m", Versions: versions}}
	b.Run("save", func(b *testing.B) {
		for b.Loop() {
			if err := disk.save(m, time.Now()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("load", func(b *testing.B) {
		for b.Loop() {
			if _, _, err := disk.load(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
