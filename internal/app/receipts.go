package app

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"pointsman/core/switching"
)

const (
	// receiptsDir is where in state_dir the receipts of switches are kept that this proxy has driven.
	receiptsDir = "receipts"
	// keptReceipts is how many of them there are at most; the oldest go.
	keptReceipts = 1000
	receiptEnd   = ".json"
)

// receipts writes the record of each switch that is over into a file of its own, beside the one in the store, which ends with the history.
type receipts struct {
	dir string
	log *slog.Logger

	mu sync.Mutex // held while the directory is changed: several switches may end at once
}

// keep writes a record. A failure is said in the log and stops nobody: the store has the record as well.
func (r *receipts) keep(rec switching.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	text, err := json.MarshalIndent(rec, "", "  ")
	if err == nil {
		err = os.MkdirAll(r.dir, 0o700)
	}
	if err == nil {
		err = writeDurably(filepath.Join(r.dir, rec.ID+receiptEnd), append(text, '\n'))
	}
	if err == nil {
		err = r.prune()
	}
	if err != nil {
		r.log.Error("the receipt of a switch could not be written, or older ones not be removed", "switch", rec.ID, "dir", r.dir, "err", err)
	}
}

// prune removes the oldest receipts, and what a crash left of one that was being written. Files of other names are somebody else's.
func (r *receipts) prune() error {
	files, err := os.ReadDir(r.dir)
	if err != nil {
		return err
	}
	files = slices.DeleteFunc(files, func(f fs.DirEntry) bool { return !f.Type().IsRegular() || !strings.Contains(f.Name(), receiptEnd) })
	if len(files) <= keptReceipts {
		return nil
	}
	var all []fs.FileInfo
	for _, f := range files {
		info, err := f.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // somebody clears up as well
		}
		if err != nil {
			return err
		}
		all = append(all, info)
	}
	slices.SortFunc(all, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), strings.Compare(a.Name(), b.Name()))
	})
	for _, f := range all[:max(0, len(all)-keptReceipts)] {
		if err := os.Remove(filepath.Join(r.dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
