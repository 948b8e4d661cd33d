package zk

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestMovingEntries(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a write that was compared with what is no more is not carried out": testLateWrites,
		"a step of a switch leaves the bucket alone":                        testStepsAreSmall,
		"a watch on the map has none on what does not move":                 testFewWatches,
		"one more that moves costs a watch no more than the first":          testOneMoreMoves,
		"a flip between the two nodes that are read shows no old entry":     testFlipWhileReading,
		"a watch that begins anew does not go back":                         testMovingOverExpiry,
		"a copy of a bucket with a moving entry is read again":              testMovingResume,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

// step is a change of one topic by switch id.
func step(before, after *route.Entry, id string, rev uint64) store.Change {
	topic := ""
	if before != nil {
		topic = before.Topic
	} else {
		topic = after.Topic
	}
	c := storetest.Set(topic, before, after)
	c.Switch = &switching.Record{ID: id, Rev: rev}
	return c
}

// moving is the entry of topic n while switch id moves it from a.
func moving(n int, state route.State, id string, attempt uint32) *route.Entry {
	e := storetest.Entry(n, "a", 1)
	e.State, e.SwitchID, e.Attempt = state, id, attempt
	return e
}

// testLateWrites has a change compared, then lets others change what it was compared with in every way that leaves the
// version numbers as they were, and then sends it.
func testLateWrites(t *testing.T, server *zktest.Server) {
	root := chroot()
	late, other := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	if err := errors.Join(late.boot(within(t, 20*time.Second)), other.boot(within(t, 20*time.Second))); err != nil {
		t.Fatal(err)
	}
	prepared := func(n int, id string) *route.Entry { return moving(n, route.StatePrepared, id, 1) }
	one := storetest.Entry(1, "a", 1)
	for name, c := range map[string]struct {
		before, late, meanwhile []store.Change
	}{
		"a prepare, and the entry is made in a bucket that did not exist": {
			late:      []store.Change{step(nil, prepared(1, "p"), "p", 1)},
			meanwhile: []store.Change{storetest.Set(one.Topic, nil, one)},
		},
		"a prepare, and the entry is removed": {
			before:    []store.Change{storetest.Set(one.Topic, nil, one)},
			late:      []store.Change{step(one, prepared(1, "p"), "p", 1)},
			meanwhile: []store.Change{storetest.Set(one.Topic, one, nil)},
		},
		"a prepare, and another switch prepares": {
			late:      []store.Change{step(nil, prepared(1, "p"), "p", 1)},
			meanwhile: []store.Change{step(nil, prepared(1, "q"), "q", 1)},
		},
		"a plain change, and a switch prepares": {
			before:    []store.Change{storetest.Set(one.Topic, nil, one)},
			late:      []store.Change{storetest.Set(one.Topic, one, storetest.Entry(1, "b", 2))},
			meanwhile: []store.Change{step(one, prepared(1, "q"), "q", 1)},
		},
		"a plain change, and what moved beside it ends and another one begins": {
			before:    []store.Change{storetest.Set(one.Topic, nil, one), step(nil, prepared(neighbour, "q"), "q", 1)},
			late:      []store.Change{storetest.Set(one.Topic, one, storetest.Entry(1, "b", 2))},
			meanwhile: []store.Change{step(prepared(neighbour, "q"), nil, "q", 2), step(one, prepared(1, "r"), "r", 1)},
		},
		"a plain change, and the entry is made anew": {
			before:    []store.Change{storetest.Set(one.Topic, nil, one)},
			late:      []store.Change{storetest.Set(one.Topic, one, storetest.Entry(1, "b", 2))},
			meanwhile: []store.Change{storetest.Set(one.Topic, one, nil), storetest.Set(one.Topic, nil, storetest.Entry(1, "c", 3))},
		},
		"a fence, and the next attempt has come as far": {
			before:    []store.Change{step(nil, prepared(1, "p"), "p", 1)},
			late:      []store.Change{step(prepared(1, "p"), moving(1, route.StateFenced, "p", 1), "p", 2)},
			meanwhile: []store.Change{step(prepared(1, "p"), nil, "p", 2), step(nil, moving(1, route.StatePrepared, "p", 2), "p", 3)},
		},
	} {
		for _, change := range c.before {
			apply(t, other, change)
		}
		w := &changeWrite{s: late, change: c.late[0]}
		if err := w.look(within(t, 10*time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := w.conflict(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		// Its record must not be what stops it.
		w.change.Switch = nil
		ops, err := w.ops()
		if err != nil {
			t.Fatal(err)
		}
		for _, change := range c.meanwhile {
			apply(t, other, change)
		}
		_, err = call(within(t, 10*time.Second), late.client, func(conn *zk.Conn) ([]zk.MultiResponse, error) { return conn.Multi(ops...) })
		if !errors.Is(err, zk.ErrBadVersion) && !errors.Is(err, zk.ErrNodeExists) && !errors.Is(err, zk.ErrNoNode) {
			t.Errorf("%s: %v, want that it is not carried out", name, err)
		}
		// The next case begins with nothing.
		for _, dir := range []string{"/routes", "/moving", "/switches"} {
			names, err := other.children(within(t, 10*time.Second), other.root+dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				removeTree(t, other, other.root+dir+"/"+name)
			}
		}
	}
}

// neighbour is the number of a topic in the bucket of topic 1.
var neighbour = func() int {
	for n := 2; ; n++ {
		if route.Bucket(storetest.Topic(n)) == route.Bucket(storetest.Topic(1)) {
			return n
		}
	}
}()

func testStepsAreSmall(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	e := storetest.Entry(1, "a", 1)
	apply(t, s, storetest.Set(e.Topic, nil, e))
	written := func() (bucket, moving node) {
		t.Helper()
		bucket, err := s.get(within(t, 10*time.Second), s.bucketPath(route.Bucket(e.Topic)))
		if err == nil {
			moving, err = s.get(within(t, 10*time.Second), s.movingPath(route.Bucket(e.Topic)))
		}
		if err != nil {
			t.Fatal(err)
		}
		return bucket, moving
	}
	first, _ := written()
	prepared, fenced := moving(1, route.StatePrepared, "p", 1), moving(1, route.StateFenced, "p", 1)
	for i, c := range []store.Change{step(e, prepared, "p", 1), step(prepared, fenced, "p", 2)} {
		apply(t, s, c)
		bucket, small := written()
		if bucket.stat.Mzxid != first.stat.Mzxid || !small.exists() {
			t.Errorf("step %d: the bucket was written, or the moving node was not", i)
		}
	}
	apply(t, s, step(fenced, e, "p", 3)) // an abort
	if bucket, small := written(); bucket.stat.Mzxid != first.stat.Mzxid || small.exists() {
		t.Error("the abort wrote the bucket, or left a moving node")
	}
	apply(t, s, step(e, prepared, "p", 4))
	apply(t, s, step(prepared, storetest.Entry(1, "b", 2), "p", 5))
	if bucket, small := written(); bucket.stat.Mzxid == first.stat.Mzxid || small.exists() {
		t.Error("the flip did not write the bucket, or left a moving node")
	}
}

func testFewWatches(t *testing.T, server *zktest.Server) {
	root := chroot()
	s, other := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	v := storetest.Watch(t, s)
	v.AwaitSynced(t)
	awaitWatched := func(want int) {
		t.Helper()
		await(t, "the watches", func() bool {
			answer, err := server.Ask("wchp") // the paths with watches on their data
			if err != nil {
				t.Fatal(err)
			}
			watched := 0
			for line := range strings.Lines(answer) {
				if strings.HasPrefix(strings.TrimSpace(line), root+"/pointsman/moving/") {
					watched++
				}
			}
			return watched == want
		})
	}
	for n := range 20 {
		e := moving(n, route.StatePrepared, "p", 1)
		apply(t, other, step(nil, e, "p", uint64(2*n+1)))
		v.AwaitEntry(t, *e)
		awaitWatched(1)
		apply(t, other, step(e, nil, "p", uint64(2*n+2)))
		v.AwaitMap(t, nil, nil)
	}
	awaitWatched(0)
}

// testOneMoreMoves has topics begin to move beside many that do, and counts what a watch reads for each.
func testOneMoreMoves(t *testing.T, server *zktest.Server) {
	root := chroot()
	s, other := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	v := storetest.Watch(t, s)
	v.AwaitSynced(t)
	rev := uint64(0)
	begin := func(from, to int) (gets uint64) {
		before := s.Operations()["get"]
		for n := from; n < to; n++ {
			e := moving(n, route.StatePrepared, "p", 1)
			rev++
			apply(t, other, step(nil, e, "p", rev))
			v.AwaitEntry(t, *e)
		}
		return s.Operations()["get"] - before
	}
	begin(0, 40)
	if gets := begin(40, 50); gets > 60 {
		t.Errorf("10 topics that begin to move beside 40 others cost %d reads", gets)
	}
	// What is read less often still follows: each of them goes on, and goes.
	for n := range 50 {
		e, fenced := moving(n, route.StatePrepared, "p", 1), moving(n, route.StateFenced, "p", 1)
		apply(t, other, step(e, fenced, "p", rev+1))
		apply(t, other, step(fenced, nil, "p", rev+2))
		if n%2 == 0 { // made anew at once
			apply(t, other, step(nil, e, "p", rev+3))
			v.AwaitEntry(t, *e)
			apply(t, other, step(e, nil, "p", rev+4))
			rev += 2
		}
		rev += 2
	}
	v.AwaitMap(t, nil, nil)
}

// testFlipWhileReading has the server answer for the bucket as it was before the flip, and holds that answer back until the
// flip has happened.
func testFlipWhileReading(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 30*time.Second)
	e := storetest.Entry(1, "a", 1)
	apply(t, near, storetest.Set(e.Topic, nil, e))
	prepared, fenced := moving(1, route.StatePrepared, "p", 1), moving(1, route.StateFenced, "p", 1)
	flipped := storetest.Entry(1, "b", 2)
	v := storetest.Watch(t, far)
	v.Track(e.Topic)
	v.AwaitEntry(t, *e)
	apply(t, near, step(e, prepared, "p", 1))
	v.AwaitEntry(t, *prepared)
	held := make(chan struct{})
	path := []byte(far.bucketPath(route.Bucket(e.Topic)))
	relay.HoldRepliesFrom(func(request []byte) bool {
		if !bytes.Contains(request, path) {
			return false
		}
		close(held)
		return true
	})
	apply(t, near, step(prepared, fenced, "p", 2))
	select {
	case <-held:
	case <-time.After(20 * time.Second):
		t.Fatal("the bucket is not read after its moving entry has changed")
	}
	outstanding := func() int64 { // requests that the server has and has not answered
		answer, err := server.Ask("mntr")
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(answer, "zk_outstanding_requests\t")
		number, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			t.Fatalf("mntr says %q", answer)
		}
		return n
	}
	await(t, "the server to answer", func() bool { return outstanding() == 0 })
	apply(t, near, step(fenced, flipped, "p", 3))
	relay.Release()
	v.AwaitEntry(t, *flipped)
	v.Stop(t)
	want := []route.Entry{*e, *prepared, *fenced, *flipped}
	if got := v.Steps(); !slices.Equal(got, want) {
		t.Errorf("the watch showed %+v, want %+v", got, want)
	}
}

// testMovingOverExpiry loses the session while steps are made that it does not see.
func testMovingOverExpiry(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, shortSession)
	e := storetest.Entry(1, "a", 1)
	apply(t, near, storetest.Set(e.Topic, nil, e))
	prepared, fenced := moving(1, route.StatePrepared, "p", 1), moving(1, route.StateFenced, "p", 1)
	flipped := storetest.Entry(1, "b", 2)
	v := storetest.Watch(t, far)
	v.Track(e.Topic)
	v.AwaitEntry(t, *e)
	register(t, far, "p", "1")
	session := far.client.sessionID()
	for rev, c := range []store.Change{step(e, prepared, "p", 1), step(prepared, fenced, "p", 2), step(fenced, flipped, "p", 3)} {
		relay.Cut()
		apply(t, near, c)
		if rev == 1 {
			await(t, "the session to end", func() bool {
				proxies, err := near.Proxies(within(t, 10*time.Second))
				return err == nil && len(proxies) == 1 && !proxies[0].Live
			})
		}
		relay.Restore()
		v.AwaitEntry(t, *c.Entries[0].After)
	}
	if far.client.sessionID() == session {
		t.Error("the session did not expire; this test tests nothing")
	}
	v.Stop(t)
	want := []route.Entry{*e, *prepared, *fenced, *flipped}
	if got := v.Steps(); !slices.Equal(got, want) {
		t.Errorf("the watch showed %+v, want %+v", got, want)
	}
}

func testMovingResume(t *testing.T, server *zktest.Server) {
	root := chroot()
	first, writer := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	e := storetest.Entry(1, "a", 1)
	apply(t, writer, storetest.Set(e.Topic, nil, e))
	active := stopped(t, first)
	prepared := moving(1, route.StatePrepared, "p", 1)
	apply(t, writer, step(e, prepared, "p", 1))
	during := stopped(t, first)
	v := storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), active)
	v.AwaitMap(t, []route.Entry{*prepared}, nil) // the bucket is as it was, and does not count
	apply(t, writer, step(prepared, e, "p", 2))
	v.AwaitMap(t, []route.Entry{*e}, nil)
	v = storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), during)
	v.AwaitMap(t, []route.Entry{*e}, nil)
}
