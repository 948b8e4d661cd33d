package zk

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/zktest"
)

func TestRunningSwitches(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a look costs what the running ones cost":                testLookIsCheap,
		"those of a tree without the index are found":            testOlderTree,
		"a record that cannot be read hides no other":            testDamagedRecord,
		"who ends a switch meets who puts it into the index":     testIndexMeetsEnd,
		"a step of a switch that goes on leaves the index alone": testStepLeavesIndex,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

// putRecord writes the next revision of a switch.
func putRecord(t *testing.T, s *Store, id string, rev uint64, state switching.State) {
	t.Helper()
	r := switching.Record{ID: id, Rev: rev, State: state, Started: time.Unix(int64(rev), 0).UTC()}
	if err := s.PutSwitch(within(t, 10*time.Second), r); err != nil {
		t.Fatal(err)
	}
}

func listed(t *testing.T, s *Store) string {
	t.Helper()
	records, err := s.Running(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return idsOf(records)
}

func idsOf(records []switching.Record) string {
	var ids []string
	for _, r := range records {
		ids = append(ids, r.ID)
	}
	return strings.Join(ids, " ")
}

func nodes(t *testing.T, s *Store) string {
	t.Helper()
	ids, err := s.children(within(t, 10*time.Second), s.root+"/running")
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

// The leader looks twice a second, whatever the history holds.
func testLookIsCheap(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	putRecord(t, s, "first", 1, switching.StateRequested)
	for n := range 60 {
		putRecord(t, s, fmt.Sprintf("over-%d", n), 1, switching.StateEvicting)
		putRecord(t, s, fmt.Sprintf("over-%d", n), 2, switching.StateDone)
	}
	putRecord(t, s, "last", 1, switching.StateRequested)
	for range 2 {
		requests := func() (n uint64) { // without those that renew the lease
			for name, count := range s.Operations() {
				if name != "sync" && name != "ping" {
					n += count
				}
			}
			return n
		}
		before := requests()
		if have := listed(t, s); have != "first last" {
			t.Errorf("running: %q", have)
		}
		cost := requests() - before
		if s.indexed.Load() && cost > 6 {
			t.Errorf("a look at two running switches of 62 took %d requests", cost)
		}
	}
}

// older makes the tree one of a version without the index.
func older(t *testing.T, s *Store) {
	t.Helper()
	ids, err := s.children(within(t, 10*time.Second), s.root+"/running")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range append(ids, "") {
		path := strings.TrimSuffix(s.runningPath(id), "/")
		if err := s.delete(within(t, 10*time.Second), path); err != nil {
			t.Fatal(err)
		}
	}
}

func testOlderTree(t *testing.T, server *zktest.Server) {
	servers := server.Addr() + chroot()
	old := open(t, Config{Servers: servers})
	putRecord(t, old, "one", 1, switching.StateRequested)
	putRecord(t, old, "over", 1, switching.StateAborted)
	putRecord(t, old, "two", 1, switching.StateEvicting)
	putRecord(t, old, "three", 1, switching.StateEvicting)
	older(t, old)
	s, other := open(t, Config{Servers: servers}), open(t, Config{Servers: servers})
	putRecord(t, s, "three", 2, switching.StateDone) // before anybody has looked
	if have := listed(t, s); have != "one two" {
		t.Errorf("running: %q", have)
	}
	putRecord(t, other, "two", 2, switching.StateDone)
	if have := listed(t, other); have != "one" {
		t.Errorf("running on another process: %q", have)
	}
	if have := nodes(t, s); have != "one" {
		t.Errorf("index: %q", have)
	}
	if n, err := s.get(within(t, 10*time.Second), s.root+"/running"); err != nil || string(n.data) != runningWhole {
		t.Errorf("the index says %q, %v", n.data, err)
	}
	// It was made once: who comes later does not list all switches.
	older(t, old)
	if err := s.ensure(within(t, 10*time.Second), s.root+"/running", []byte(runningWhole), s.acl); err != nil {
		t.Fatal(err)
	}
	if have := listed(t, open(t, Config{Servers: servers})); have != "" {
		t.Errorf("an index that is whole was made again: %q", have)
	}
}

func testDamagedRecord(t *testing.T, server *zktest.Server) {
	servers := server.Addr() + chroot()
	s := open(t, Config{Servers: servers})
	putRecord(t, s, "bad", 1, switching.StateRequested)
	putRecord(t, s, "good", 1, switching.StateRequested)
	if err := s.put(within(t, 10*time.Second), s.switchPath("bad"), []byte("{")); err != nil {
		t.Fatal(err)
	}
	look := func(s *Store) {
		t.Helper()
		records, err := s.Running(within(t, 10*time.Second))
		if err == nil || !strings.Contains(err.Error(), "switch bad") || idsOf(records) != "good" {
			t.Errorf("Running: %q, %v; want good, and an error that names bad", idsOf(records), err)
		}
	}
	look(s)
	older(t, s)
	look(open(t, Config{Servers: servers}))
}

// An end that was compared before the switch came into the index, and is written after it, must not leave it there.
func testIndexMeetsEnd(t *testing.T, server *zktest.Server) {
	servers := server.Addr() + chroot()
	s := open(t, Config{Servers: servers})
	putRecord(t, s, "one", 1, switching.StateEvicting)
	older(t, s)
	late := open(t, Config{Servers: servers})
	if err := late.boot(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	w := &meeting{recordWrite: recordWrite{s: late, record: switching.Record{ID: "one", Rev: 2, State: switching.StateDone}}, between: func() {
		if err := late.index(within(t, 10*time.Second), "one"); err != nil {
			t.Error(err)
		}
		if have := nodes(t, late); have != "one" {
			t.Errorf("index: %q", have)
		}
	}}
	if err := late.write(within(t, 10*time.Second), "ending it", w); err != nil {
		t.Fatal(err)
	}
	if have := nodes(t, late); have != "" || w.looks != 2 {
		t.Errorf("index: %q after %d looks", have, w.looks)
	}
}

// meeting is a write that something comes before.
type meeting struct {
	recordWrite
	between func()
	looks   int
}

func (w *meeting) ops() ([]any, error) {
	ops, err := w.recordWrite.ops()
	if w.looks++; w.looks == 1 {
		w.between()
	}
	return ops, err
}

// The flip of a planned switch is a step within it: it must not wait for the index.
func testStepLeavesIndex(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	putRecord(t, s, "one", 1, switching.StateRequested)
	before, err := s.get(within(t, 10*time.Second), s.runningPath("one"))
	if err != nil || !before.exists() {
		t.Fatalf("the node of a running switch: %v", err)
	}
	w := &recordWrite{s: s, record: switching.Record{ID: "one", Rev: 2, State: switching.StateFenced}}
	if err := w.look(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	if ops, err := w.ops(); err != nil || len(ops) != 1 || w.found.inRunning {
		t.Errorf("%d operations, %v, and the node was read: %v; want the one on the record", len(ops), err, w.found.inRunning)
	}
}
