package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

func openFile(t *testing.T, dir string) *File {
	t.Helper()
	f, err := OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func topic(n int) string { return fmt.Sprintf("persistent://tenant/namespace/topic-%d", n) }

// set moves topic n to an epoch.
func set(t *testing.T, s Store, n int, from, to uint64) {
	t.Helper()
	c := Change{Entries: []EntryChange{{Topic: topic(n), After: &route.Entry{Topic: topic(n), Cluster: "a", Epoch: to}}}, Who: "test"}
	if from > 0 {
		c.Entries[0].Before = &route.Entry{Topic: topic(n), Cluster: "a", Epoch: from}
	}
	if err := s.Apply(context.Background(), c); err != nil {
		t.Fatal(err)
	}
}

func epoch(t *testing.T, s Store, n int) uint64 {
	t.Helper()
	e, _, err := s.Entry(context.Background(), topic(n))
	if err != nil {
		t.Fatal(err)
	}
	return e.Epoch
}

// copyDir is the directory as it would be after a crash at this moment.
func copyDir(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, f.Name()), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// snapshotNow makes a snapshot and waits for it.
func snapshotNow(t *testing.T, f *File) {
	t.Helper()
	f.core.mu.Lock()
	f.startSnapshot()
	done := f.snapping
	f.core.mu.Unlock()
	<-done
	f.core.mu.Lock()
	defer f.core.mu.Unlock()
	if f.snapError != nil {
		t.Fatal(f.snapError)
	}
}

func TestFileKeepsEverythingOverAReopen(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		dir := t.TempDir()
		f := openFile(t, dir)
		set(t, f, 1, 0, 1)
		rule := Rule("tenant", "b")
		c := Change{Rules: []RuleChange{{Scope: "tenant", After: &rule}}, Switch: &switching.Record{ID: "s-1", Rev: 1, Topic: "tenant", Started: time.Unix(5, 0).UTC()}}
		if err := f.Apply(context.Background(), c); err != nil {
			t.Fatal(err)
		}
		ack := switching.Ack{Proxy: "p", Incarnation: "i", Producers: 3}
		if err := f.PutAck(context.Background(), "s-1", ack); err != nil {
			t.Fatal(err)
		}
		rec := switching.Record{ID: "s-1", Rev: 2, Topic: "tenant", State: switching.StateDone, Ended: time.Unix(9, 0).UTC(), Note: "fine"}
		if err := f.PutSwitch(context.Background(), rec); err != nil {
			t.Fatal(err)
		}
		if err := f.PutSwitch(context.Background(), switching.Record{ID: "s-2", Rev: 1, State: switching.StateRequested}); err != nil {
			t.Fatal(err)
		}
		key, err := f.TagKey(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if snapshot {
			snapshotNow(t, f)
		}
		set(t, f, 1, 1, 2)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		f = openFile(t, dir)
		if epoch(t, f, 1) != 2 {
			t.Error("the entry is lost")
		}
		if rules, _ := f.Rules(context.Background()); len(rules) != 1 || rules[0] != rule {
			t.Errorf("rules: %v", rules)
		}
		r, err := f.Switch(context.Background(), "s-1")
		if err != nil || r.State != switching.StateDone || r.Note != "fine" || !r.Ended.Equal(time.Unix(9, 0)) {
			t.Errorf("switch: %+v, %v", r, err)
		}
		if running, err := f.Running(context.Background()); err != nil || len(running) != 1 || running[0].ID != "s-2" {
			t.Errorf("running: %+v, %v; want s-2", running, err)
		}
		if acks, err := f.Acks(context.Background(), "s-1"); err != nil || len(acks) != 1 || !reflect.DeepEqual(acks[0], ack) {
			t.Errorf("acks: %v, %v", acks, err)
		}
		if again, err := f.TagKey(context.Background()); err != nil || string(again) != string(key) {
			t.Errorf("the tag key changed: %v", err)
		}
		if h, err := f.History(context.Background(), 9); err != nil || len(h) != 3 || h[0].Entries[0].After.Epoch != 2 {
			t.Errorf("history: %v, %v", h, err)
		}
		set(t, f, 1, 2, 3)
	}
}

// Rule is a rule of the tests.
func Rule(scope, cluster string) route.Rule {
	return route.Rule{Scope: scope, Cluster: cluster, Epoch: 1}
}

func TestFileSurvivesACutAtEveryByteOfTheNewestSegment(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	ends := []int64{0} // of each record
	const records = 2
	for n := uint64(1); n <= records; n++ {
		set(t, f, 1, n-1, n)
		ends = append(ends, f.journal.size)
	}
	name := segmentName(1)
	for cut := int64(0); cut <= ends[records]; cut++ {
		crashed := copyDir(t, dir)
		if err := os.Truncate(filepath.Join(crashed, name), cut); err != nil {
			t.Fatal(err)
		}
		want := uint64(0)
		for want < records && ends[want+1] <= cut {
			want++
		}
		g, err := OpenFile(crashed)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		if got := epoch(t, g, 1); got != want {
			t.Fatalf("cut at %d: epoch %d, want %d", cut, got, want)
		}
		if cut%9 != 0 && cut != ends[1] {
			_ = g.Close()
			continue
		}
		// It goes on from there, and what it writes now is read again.
		set(t, g, 1, want, want+1)
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		g, err = OpenFile(crashed)
		if err != nil {
			t.Fatalf("cut at %d, second start: %v", cut, err)
		}
		if got := epoch(t, g, 1); got != want+1 {
			t.Fatalf("cut at %d, second start: epoch %d, want %d", cut, got, want+1)
		}
		if h, err := g.History(context.Background(), 9); err != nil || len(h) != int(want)+1 {
			t.Fatalf("cut at %d, second start: %d changes in the history, want %d (%v)", cut, len(h), want+1, err)
		}
		_ = g.Close()
	}
}

func TestFileSurvivesNoiseBehindTheLastRecordAndRefusesItBefore(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	set(t, f, 1, 0, 1)
	last := f.journal.size // where the last record begins
	set(t, f, 1, 1, 2)
	size := f.journal.size
	for what, noise := range map[string][]byte{"zeros": make([]byte, 700), "magic": []byte(frameMagic), "text": []byte("power failure")} {
		crashed := copyDir(t, dir)
		appendTo(t, filepath.Join(crashed, segmentName(1)), noise)
		g := openFile(t, crashed)
		if got := epoch(t, g, 1); got != 2 {
			t.Errorf("%s: epoch %d, want 2", what, got)
		}
		// The noise is gone for good: not even the end of the segment leaves it behind.
		set(t, g, 1, 2, 3)
		if err := g.journal.roll(); err != nil {
			t.Fatal(err)
		}
		set(t, g, 1, 3, 4)
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
		if got := epoch(t, openFile(t, crashed), 1); got != 4 {
			t.Errorf("%s: epoch %d, want 4", what, got)
		}
	}
	// A byte that rots in any record but the last is damage, in the last it cannot be told from a torn write.
	for at := int64(0); at < size; at++ {
		crashed := copyDir(t, dir)
		name := filepath.Join(crashed, segmentName(1))
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		data[at] ^= 0x40
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		g, err := OpenFile(crashed)
		if at < last {
			if err == nil || !strings.Contains(err.Error(), segmentName(1)) || !strings.Contains(err.Error(), "damaged") {
				t.Fatalf("byte %d rotted: %v, want an error that names the file", at, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("byte %d of the last record rotted: %v", at, err)
		}
		if got := epoch(t, g, 1); got != 1 {
			t.Fatalf("byte %d of the last record rotted: epoch %d, want 1", at, got)
		}
		_ = g.Close()
	}
}

func appendTo(t *testing.T, name string, data []byte) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
}

func TestFileStartsFromTheOlderSnapshotWhenTheNewestIsDamaged(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	set(t, f, 1, 0, 1)
	snapshotNow(t, f)
	set(t, f, 1, 1, 2)
	snapshotNow(t, f)
	set(t, f, 1, 2, 3)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	newest := snapshotName(2)
	whole, err := os.ReadFile(filepath.Join(dir, newest))
	if err != nil {
		t.Fatal(err)
	}
	for cut := range len(whole) {
		crashed := copyDir(t, dir)
		if err := os.Truncate(filepath.Join(crashed, newest), int64(cut)); err != nil {
			t.Fatal(err)
		}
		g, err := OpenFile(crashed)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		if got := epoch(t, g, 1); got != 3 {
			t.Fatalf("cut at %d: epoch %d, want 3", cut, got)
		}
		_ = g.Close()
	}
	// Half a snapshot under its temporary name is no snapshot.
	crashed := copyDir(t, dir)
	if err := os.WriteFile(filepath.Join(crashed, snapshotName(3)+temporaryEnd), whole[:20], 0o600); err != nil {
		t.Fatal(err)
	}
	g := openFile(t, crashed)
	if got := epoch(t, g, 1); got != 3 {
		t.Errorf("epoch %d, want 3", got)
	}
	if _, err := os.Stat(filepath.Join(crashed, snapshotName(3)+temporaryEnd)); !errors.Is(err, os.ErrNotExist) {
		t.Error("the half snapshot is still there")
	}
}

func TestFileRefusesAJournalWithAHole(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	for n := uint64(1); n <= 3; n++ {
		set(t, f, 1, n-1, n)
		f.core.mu.Lock()
		err := f.journal.roll()
		f.core.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, segmentName(2))); err != nil {
		t.Fatal(err)
	}
	_, err := OpenFile(dir)
	if err == nil || !strings.Contains(err.Error(), "lacks the records 2 to 2") {
		t.Errorf("got %v, want an error that names the hole", err)
	}
	// Nor may a lost snapshot be passed over when the journal does not reach back to the start.
	if err := os.Remove(filepath.Join(dir, segmentName(1))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, snapshotName(2)), []byte("noise"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = OpenFile(dir); err == nil || !strings.Contains(err.Error(), "restore the directory") {
		t.Errorf("got %v, want a remedy", err)
	}
}

func TestFileRefusesASecondProcessByName(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	_, err := OpenFile(dir)
	if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "process "+strconv.Itoa(os.Getpid())) {
		t.Errorf("got %v, want an error that names the directory and the process", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	openFile(t, dir)
}

func TestFileHistoryAndDiskAreBounded(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	n := uint64(0)
	for range maxSegments + 6 {
		for range 3 {
			n++
			set(t, f, 1, n-1, n)
		}
		f.core.mu.Lock()
		err := f.journal.roll()
		f.core.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		snapshotNow(t, f)
	}
	segments, err := numbered(dir, segmentPrefix)
	if err != nil || len(segments) > maxSegments+1 {
		t.Errorf("%d segments are kept, want at most %d (%v)", len(segments), maxSegments+1, err)
	}
	if snapshots, err := numbered(dir, snapshotPrefix); err != nil || len(snapshots) != 2 {
		t.Errorf("%d snapshots are kept, want 2 (%v)", len(snapshots), err)
	}
	if h, err := f.History(context.Background(), 10_000); err != nil || len(h) < 3*(maxSegments-1) || h[0].Seq != n {
		t.Errorf("%d changes are in the history, newest %v (%v)", len(h), h[0].Seq, err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got := epoch(t, openFile(t, dir), 1); got != n {
		t.Errorf("epoch %d, want %d", got, n)
	}
}

func TestFileTakesNoMoreWritesWhenItsJournalIsBroken(t *testing.T) {
	dir := t.TempDir()
	f := openFile(t, dir)
	set(t, f, 1, 0, 1)
	// A closed file stands for a disk that fails: neither the write nor its undoing works.
	if err := f.journal.file.Close(); err != nil {
		t.Fatal(err)
	}
	c := Change{Entries: []EntryChange{{Topic: topic(2), After: &route.Entry{Topic: topic(2), Cluster: "a"}}}}
	for range 2 {
		if err := f.Apply(context.Background(), c); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("got %v, want an error that names the directory", err)
		}
	}
	if _, ok, _ := f.Entry(context.Background(), topic(2)); ok {
		t.Error("a change that is not on the disk is served")
	}
	if st := f.Status(); !strings.Contains(st.Detail, "no more writes") {
		t.Errorf("Status: %+v", st)
	}
	f.journal.file = nil // closed already
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got := epoch(t, openFile(t, dir), 1); got != 1 {
		t.Errorf("epoch %d, want 1", got)
	}
}

// TestFileSurvivesKill9 lets another process write and kills it at moments that nobody chose.
func TestFileSurvivesKill9(t *testing.T) {
	if dir := os.Getenv("POINTSMAN_TEST_KILLED_WRITER"); dir != "" {
		writeForEver(dir)
	}
	dir := t.TempDir()
	last := uint64(0)
	for round := range 8 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestFileSurvivesKill9$")
		cmd.Env = append(os.Environ(), "POINTSMAN_TEST_KILLED_WRITER="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		confirmed := uint64(0)
		for count := 0; count < 20+37*round && lines.Scan(); count++ {
			confirmed, err = strconv.ParseUint(lines.Text(), 10, 64)
			if err != nil {
				t.Fatalf("the writer says %q", lines.Text())
			}
		}
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() { // what it confirmed before the signal came
			if n, err := strconv.ParseUint(lines.Text(), 10, 64); err == nil && len(lines.Text()) > 0 {
				confirmed = max(confirmed, n)
			}
		}
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		f, err := OpenFile(dir)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		got := epoch(t, f, 1)
		if got < confirmed || got > confirmed+1 || got <= last {
			t.Errorf("round %d: epoch %d after a start, %d was confirmed", round, got, confirmed)
		}
		last = got
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// writeForEver runs in the process that is killed.
func writeForEver(dir string) {
	f, err := OpenFile(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		e, ok, err := f.Entry(context.Background(), topic(1))
		after := &route.Entry{Topic: topic(1), Cluster: "a", Epoch: e.Epoch + 1}
		c := Change{Entries: []EntryChange{{Topic: topic(1), After: after}}}
		if ok {
			c.Entries[0].Before = &e
		}
		if err == nil {
			err = f.Apply(context.Background(), c)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(after.Epoch)
		if after.Epoch%25 == 0 { // snapshots and pruning are killed as well
			f.core.mu.Lock()
			if f.snapping == nil {
				f.startSnapshot()
			}
			_ = f.journal.roll()
			f.core.mu.Unlock()
		}
	}
}
