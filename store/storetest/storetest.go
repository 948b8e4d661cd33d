// Package storetest is the suite that every store passes: the promises of store.Store, tried from outside. Tests of
// package store and of package zk call Run; nothing else may import it.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/store"
)

// Map is one empty map that a test may open.
type Map struct {
	// Open makes a handle to the map, as another process would. The suite closes it.
	Open func(t *testing.T) store.Store
	// Single: only one handle at a time can be open.
	Single bool
}

// patience bounds every wait of the suite.
const patience = 30 * time.Second

// Run tries everything on fresh maps that begin makes.
func Run(t *testing.T, begin func(t *testing.T) Map) {
	for name, test := range map[string]func(*testing.T, *fixture){
		"a watch first names every bucket and the rules":               testFirstUpdates,
		"a watch delivers changes of entries and rules":                testWatchChanges,
		"a watch never goes back and ends where the store is":          testWatchMonotonic,
		"a watch shows the steps of a switch in their order":           testWatchMoving,
		"ending a watch twice touches no other":                        testWatchEnds,
		"what a watch delivers is the receiver's to keep":              testWatchOwnership,
		"an entry that is not as expected is a conflict, nothing else": testConflict,
		"a change happens as a whole or not at all":                    testAtomic,
		"writers on one topic never overwrite each other":              testCompareAndSet,
		"neighbours in a bucket are no conflict":                       testNeighbours,
		"any sequence of changes is as in a plain map":                 testModel,
		"a change of MaxChange entries is written, one more is not":    testMaxChange,
		"a moving entry is its switch's alone":                         testMoving,
		"a draining entry moves until nothing is left":                 testDraining,
		"an abort leaves what was there before":                        testMovingAbort,
		"neighbours of a moving entry are no conflict":                 testMovingNeighbours,
		"a plain change and a prepare never both succeed":              testMovingRace,
		"a stale leader cannot write another attempt":                  testStaleLeader,
		"the history explains every state of the map":                  testHistoryExplains,
		"the history is newest first and complete":                     testHistory,
		"switches are kept by revision":                                testSwitches,
		"what is running is listed, whatever has ended since":          testRunning,
		"of two writers of a revision one succeeds":                    testRevisions,
		"acks are kept for each attempt, phase and process":            testAcks,
		"batches are kept by revision, with their parts":               testBatches,
		"batches that run are listed, and old ones dropped":            testBatchesBounded,
		"a registration is announced, replaced and ended":              testRegister,
		"a member is live with the incarnation that it names":          testIncarnations,
		"who has registered has the map of that moment":                testRegisterDelivers,
		"who registers again has it of the watches that began since":   testRegisterAgain,
		"a member that serves has a lease":                             testLease,
		"one process leads and another one follows it":                 testLead,
		"a process leads again after a pause":                          testLeadAgain,
		"documents are kept by kind, name and revision":                testDocuments,
		"of two writers of a document one succeeds":                    testDocumentWriters,
		"the tag key is made once":                                     testTagKey,
		"a context that has ended ends the operation":                  testContext,
		"a closed store ends its watches and refuses the rest":         testClose,
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{t: t, m: begin(t)}
			test(t, f)
		})
	}
}

// fixture opens handles to one map.
type fixture struct {
	t     *testing.T
	m     Map
	first store.Store
}

// open makes another handle, or hands out the only one.
func (f *fixture) open() store.Store {
	f.t.Helper()
	if f.m.Single && f.first != nil {
		return f.first
	}
	s := f.m.Open(f.t)
	f.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.t.Errorf("Close: %v", err)
		}
	})
	if f.first == nil {
		f.first = s
	}
	return s
}

func (f *fixture) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	f.t.Cleanup(cancel)
	return ctx
}

// Topic is the n-th topic of the tests.
func Topic(n int) string { return fmt.Sprintf("persistent://tenant/namespace/topic-%d", n) }

// Entry is an entry of that topic.
func Entry(n int, cluster string, epoch uint64) *route.Entry {
	return &route.Entry{Topic: Topic(n), Cluster: cluster, Epoch: epoch}
}

// Neighbours are two topics of one bucket.
func Neighbours() (a, b string) {
	first := map[int]string{}
	for n := 0; ; n++ {
		topic := Topic(n)
		if other, ok := first[route.Bucket(topic)]; ok {
			return other, topic
		}
		first[route.Bucket(topic)] = topic
	}
}

// Set is a change of one entry.
func Set(topic string, before, after *route.Entry) store.Change {
	return store.Change{Entries: []store.EntryChange{{Topic: topic, Before: before, After: after}}, Who: "test", Why: "to see"}
}

func mustApply(t *testing.T, s store.Store, c store.Change) {
	t.Helper()
	if err := s.Apply(context.Background(), c); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

func mustEntry(t *testing.T, s store.Store, topic string) (route.Entry, bool) {
	t.Helper()
	e, ok, err := s.Entry(context.Background(), topic)
	if err != nil {
		t.Fatalf("Entry: %v", err)
	}
	return e, ok
}

func testTagKey(t *testing.T, f *fixture) {
	keys := make([][]byte, 4)
	var group sync.WaitGroup
	for i := range keys {
		s := f.open()
		group.Add(1)
		go func() {
			defer group.Done()
			var err error
			if keys[i], err = s.TagKey(context.Background()); err != nil {
				t.Errorf("TagKey: %v", err)
			}
		}()
	}
	group.Wait()
	for _, key := range keys {
		if len(key) < 16 || !slices.Equal(key, keys[0]) {
			t.Errorf("keys of %d and %d bytes differ or are short", len(key), len(keys[0]))
		}
	}
}

func testContext(t *testing.T, f *fixture) {
	s := f.open()
	mustApply(t, s, Set(Topic(1), nil, Entry(1, "a", 1)))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := s.Entry(ended, Topic(1)); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Entry: %v, want ErrUnavailable", err)
	}
	if err := s.Apply(ended, Set(Topic(1), Entry(1, "a", 1), nil)); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		t.Errorf("Apply: %v, want ErrUnavailable and a known outcome", err)
	}
	if _, ok := mustEntry(t, s, Topic(1)); !ok {
		t.Error("a change that was not begun happened")
	}
}

func testClose(t *testing.T, f *fixture) {
	s := f.m.Open(t)
	v := Watch(t, s)
	v.AwaitSynced(t)
	if st := s.Status(); !st.Connected || st.Contact.IsZero() || st.Kind == "" {
		t.Errorf("Status: %+v", st)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	select {
	case err := <-v.done:
		if err != nil {
			t.Errorf("Watch: %v", err)
		}
	case <-f.ctx().Done():
		t.Error("Watch goes on after Close")
	}
	v.cancel()
	v.cancel = nil
	if _, _, err := s.Entry(context.Background(), Topic(1)); !errors.Is(err, store.ErrClosed) {
		t.Errorf("Entry: %v, want ErrClosed", err)
	}
	if err := s.Apply(context.Background(), Set(Topic(1), nil, Entry(1, "a", 1))); !errors.Is(err, store.ErrClosed) {
		t.Errorf("Apply: %v, want ErrClosed", err)
	}
	if s.Status().Connected {
		t.Error("a closed store says that it is connected")
	}
}
