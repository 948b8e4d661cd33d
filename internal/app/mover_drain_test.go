package app

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// A topic that drains is served from the disk while the store is away, as it was known last: it holds nothing, and does not stop the proxy from
// being ready. The small copy lets go of it once the copy of the whole map has it; a way back is acknowledged when the small copy has that.
func TestATopicThatDrainsOutlivesARestart(t *testing.T) {
	st, dir := store.NewMemory(), t.TempDir()
	k, _, stop := keeping(t, st, dir, "first")
	<-k.synced
	m := newMoves(t, st)
	m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	m.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	m.acked(t, switching.StateFenced, "first")
	m.drain = "a;0;3:4;=one;=two"
	m.write(t, switching.StateEvicting, "b", route.StateDraining, 1)
	m.acked(t, switching.StateEvicting, "first")
	// The list changes before anything is written: the proxy follows, and owes nothing more.
	m.drain = "a;0;3:4;=one;>two"
	m.write(t, switching.StateDraining, "b", route.StateDraining, 1)
	inTable := func(k *mapKeeper) func() bool {
		return func() bool { e, _ := k.table.Load().Entry(movedTopic); return e == m.entry }
	}
	m.await(t, "drain in the table", inTable(k))
	stop()
	if e := onDisk(t, dir); e != (route.Entry{}) {
		t.Errorf("the copy of the map has the topic as it drains, and the small copy has %+v", e)
	}

	away := st.Join()
	away.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
	k, _, stop = keeping(t, away, dir, "second")
	<-k.loaded
	if e, _ := k.table.Load().Entry(movedTopic); e != m.entry {
		t.Fatalf("it starts with %+v", e)
	}
	if held := k.mover.held(); len(held) != 0 {
		t.Errorf("held without the store: %v", held)
	}
	m.drain = "a;0;3:4;=one;=two"
	m.rec = m.rec.Back()
	if err := st.PutSwitch(t.Context(), m.rec); err != nil {
		t.Fatal(err)
	}
	m.write(t, switching.StatePrepared, "b", route.StatePrepared, 1)
	away.SetFaults(store.Faults{})
	m.acked(t, switching.StatePrepared, "second")
	if e := onDisk(t, dir); e != m.entry {
		t.Errorf("the way back is acknowledged, and the small copy has %+v", e)
	}
	m.write(t, switching.StateFenced, "b", route.StateFenced, 1)
	m.acked(t, switching.StateFenced, "second")
	stop()

	// The way back was given up while this process was away; its copies have it fenced.
	m.write(t, switching.StateDraining, "b", route.StateDraining, 1)
	k, _, stop = keeping(t, st, dir, "third")
	<-k.synced
	m.await(t, "drain in the table", inTable(k))
	m.drain = ""
	m.write(t, switching.StateDone, "b", route.StateActive, 1)
	m.await(t, "end of the drain in the table", inTable(k))
	m.await(t, "end of the move in the proxy", func() bool {
		k.mover.mu.Lock()
		defer k.mover.mu.Unlock()
		return len(k.mover.topics) == 0
	})
	stop()
	if e := onDisk(t, dir); e != (route.Entry{}) {
		t.Errorf("all of it is over, and the small copy has %+v", e)
	}
}

// A crash between the flip and the next copy of the map leaves the attempt on the disk, prepared or fenced: the topic is held until the store answers.
func TestACrashBeforeTheDrainIsOnTheDiskLeavesTheTopicHeld(t *testing.T) {
	st, dir, crashed := store.NewMemory(), t.TempDir(), t.TempDir()
	k, _, stop := keeping(t, st, dir, "first")
	<-k.synced
	stop() // saves the map of before
	k, _, _ = keeping(t, st, dir, "second")
	<-k.synced
	m := newMoves(t, st)
	m.write(t, switching.StatePrepared, "a", route.StatePrepared, 0)
	m.write(t, switching.StateFenced, "a", route.StateFenced, 0)
	m.acked(t, switching.StateFenced, "second")
	fenced := m.entry
	for _, name := range []string{"last-good-map", "moving-topics"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(crashed, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	m.drain = "a;0;3:4;=one"
	m.write(t, switching.StateEvicting, "b", route.StateDraining, 1)
	away := st.Join()
	away.SetFaults(store.Faults{Err: store.ErrUnavailable, NoLease: true})
	k, log, _ := keeping(t, away, crashed, "third")
	<-k.loaded
	if e, _ := k.table.Load().Entry(movedTopic); switching.KeyOf(e) != switching.KeyOf(fenced) || e.State != route.StatePrepared && e.State != route.StateFenced {
		t.Fatalf("it starts with %+v", e)
	}
	if held := k.mover.held(); len(held) != 1 {
		t.Errorf("held without the store: %v", held)
	}
	away.SetFaults(store.Faults{})
	m.acked(t, switching.StateEvicting, "third") // it was told of the flip alone
	if e, _ := k.table.Load().Entry(movedTopic); e != m.entry {
		t.Errorf("the map says %+v", e)
	}
	for _, line := range log.with("switch waits for this proxy") {
		if !strings.Contains(line, "unavailable") && !strings.Contains(line, "cannot be reached") {
			t.Error(line)
		}
	}
}
