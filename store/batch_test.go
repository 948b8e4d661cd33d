package store

import (
	"reflect"
	"testing"
	"time"

	"pointsman/core/switching"
)

func TestBatchesOutliveAProcessByTheJournalAndByASnapshot(t *testing.T) {
	dir := t.TempDir()
	f, err := OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	b := switching.Batch{ID: "b-1", Rev: 1, State: switching.BatchMoving, Started: time.Unix(1000, 0).UTC()}
	part := switching.BatchPart{Index: 3, Rev: 1, Items: []switching.BatchItem{{Topic: "persistent://t/n/x", State: switching.ItemMoved, Note: "n"}}}
	if err := f.PutBatch(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	if err := f.PutBatchPart(t.Context(), "b-1", part); err != nil {
		t.Fatal(err)
	}
	b.Rev, b.Wave = 2, 1
	if err := f.PutBatch(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	expect := func(how string, c *core) {
		t.Helper()
		have, err := c.batch("b-1")
		parts, partErr := c.batchParts("b-1")
		if err != nil || partErr != nil || !reflect.DeepEqual(have, b) || len(parts) != 1 || !reflect.DeepEqual(parts[0], part) {
			t.Errorf("by the %s: %+v, %v; parts %+v, %v", how, have, err, parts, partErr)
		}
	}
	im, err := f.core.image()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f, err = OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	expect("journal", f.core)
	if _, err := im.write(dir); err != nil {
		t.Fatal(err)
	}
	c, _, err := readSnapshot(dir, im.seq)
	if err != nil {
		t.Fatal(err)
	}
	expect("snapshot", c)
}
