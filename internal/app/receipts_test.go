package app

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
)

// The directory is bounded by number: the receipts of the newest switches stay, and nothing that is not one is touched.
func TestTheNewestReceiptsAreKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), receiptsDir)
	log := &logRecorder{}
	r := &receipts{dir: dir, log: slog.New(slog.NewTextHandler(log, nil))}
	r.keep(switching.Record{ID: "sw-first", Note: "made the directory"})
	old := time.Now().Add(-24 * time.Hour)
	put := func(name string, at time.Time) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	put("sw-torn.json.12345", old.Add(-time.Hour)) // of a write that a crash has interrupted
	put("NOTES", old.Add(-2*time.Hour))
	for i := range keptReceipts - 1 {
		put(fmt.Sprintf("sw-%04d.json", i), old.Add(time.Duration(i)*time.Second))
	}
	again := switching.Record{ID: "sw-0000", Attempt: 2, Note: "its next attempt"}
	r.keep(again) // now the newest
	r.keep(switching.Record{ID: "sw-last"})
	for name, want := range map[string]bool{
		"NOTES": true, "sw-torn.json.12345": false, "sw-0000.json": true, "sw-0001.json": false, "sw-0002.json": true, "sw-first.json": true, "sw-last.json": true,
	} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", name, err, want)
		}
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != keptReceipts+1 {
		t.Errorf("%d files, %v; want %d receipts and the notes", len(files), err, keptReceipts)
	}
	text, err := os.ReadFile(filepath.Join(dir, "sw-0000.json"))
	var have switching.Record
	if err == nil {
		err = json.Unmarshal(text, &have)
	}
	if err != nil || have.Note != again.Note || have.Attempt != 2 {
		t.Errorf("the receipt of sw-0000 is %+v, %v", have, err)
	}
	if lines := log.last(9); len(lines) != 0 {
		t.Errorf("it complains: %s", strings.Join(lines, "\n"))
	}
}

// A disk that cannot be written stops no switch; it is said.
func TestAReceiptThatCannotBeWrittenIsSaid(t *testing.T) {
	file := filepath.Join(t.TempDir(), "no-directory")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	log := &logRecorder{}
	r := &receipts{dir: file, log: slog.New(slog.NewTextHandler(log, nil))}
	r.keep(switching.Record{ID: "sw-1"})
	if lines := log.with("receipt", "sw-1", file); len(lines) != 1 {
		t.Errorf("the log says %v", log.last(9))
	}
}
