package storetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

func testBatches(t *testing.T, f *fixture) {
	ctx := context.Background()
	s, other := f.open(), f.open()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	b := switching.Batch{ID: "b-1", Rev: 1, To: "b", Mode: switching.ModePlanned, State: switching.BatchNew, Ends: []int{1, 2}, Started: at, Limits: switching.BatchLimits{Waves: []string{"1"}, Parallel: 3}}
	if err := s.PutBatchPart(ctx, "b-1", switching.BatchPart{Rev: 1}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a part of no batch: %v, want ErrNotFound", err)
	}
	if err := s.PutBatch(ctx, b); err != nil {
		t.Fatal(err)
	}
	if have, err := other.Batch(ctx, "b-1"); err != nil || !reflect.DeepEqual(have, b) {
		t.Errorf("Batch: %+v, %v; want %+v", have, err, b)
	}
	if parts, err := other.BatchParts(ctx, "b-1"); err != nil || len(parts) != 0 {
		t.Errorf("before any part: %v, %v", parts, err)
	}
	parts := []switching.BatchPart{
		{Index: 0, Rev: 1, Items: []switching.BatchItem{{Topic: Topic(1)}, {Topic: Topic(2), Joined: true}}}, {Index: 2, Rev: 1, Items: []switching.BatchItem{{Topic: Topic(3)}}}, {Index: 11, Rev: 1},
	}
	for _, i := range []int{2, 0, 1} {
		if err := s.PutBatchPart(ctx, "b-1", parts[i]); err != nil {
			t.Fatal(err)
		}
	}
	parts[0].Items[0].State = "changed by the caller" // the store has its own
	if have, err := other.BatchParts(ctx, "b-1"); err != nil || len(have) != 3 || have[0].Items[0] != (switching.BatchItem{Topic: Topic(1)}) || !have[0].Items[1].Joined || have[1].Index != 2 || have[2].Index != 11 {
		t.Fatalf("BatchParts: %+v, %v", have, err)
	}
	parts[0].Rev, parts[0].Items[0].State, parts[0].Items[0].Note = 2, switching.ItemFailed, "no answer"
	if err := other.PutBatchPart(ctx, "b-1", parts[0]); err != nil {
		t.Fatal(err)
	}
	if have, err := s.BatchParts(ctx, "b-1"); err != nil || !reflect.DeepEqual(have[0], parts[0]) {
		t.Errorf("revision 2: %+v, %v; want %+v", have, err, parts[0])
	}
	b.Rev, b.State, b.Pause = 2, switching.BatchMoving, &switching.BatchPause{Gate: switching.GateHold, Why: "slow", At: at}
	if err := other.PutBatch(ctx, b); err != nil {
		t.Fatal(err)
	}
	if have, err := s.Batch(ctx, "b-1"); err != nil || !reflect.DeepEqual(have, b) {
		t.Errorf("revision 2: %+v, %v; want %+v", have, err, b)
	}
	for name, err := range map[string]error{
		"the same revision":           s.PutBatch(ctx, b),
		"one ahead":                   s.PutBatch(ctx, switching.Batch{ID: "b-1", Rev: 4}),
		"a new one of that id":        s.PutBatch(ctx, switching.Batch{ID: "b-1", Rev: 1}),
		"a second one of nothing":     s.PutBatch(ctx, switching.Batch{ID: "none", Rev: 2}),
		"the same revision of a part": s.PutBatchPart(ctx, "b-1", parts[0]),
		"a new part of that index":    s.PutBatchPart(ctx, "b-1", parts[1]),
		"a part one ahead":            s.PutBatchPart(ctx, "b-1", switching.BatchPart{Index: 5, Rev: 2}),
	} {
		if !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: %v, want a conflict", name, err)
		}
	}
	for name, err := range map[string]error{
		"revision 0": s.PutBatch(ctx, switching.Batch{ID: "b-2"}), "a bad id": s.PutBatch(ctx, switching.Batch{ID: "a/b", Rev: 1}),
		"revision 0 of a part": s.PutBatchPart(ctx, "b-1", switching.BatchPart{}), "a bad index": s.PutBatchPart(ctx, "b-1", switching.BatchPart{Index: 10_000, Rev: 1}),
	} {
		if err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}
	for _, id := range []string{"none", "", "a/b"} {
		if _, err := s.Batch(ctx, id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("Batch(%q): %v, want ErrNotFound", id, err)
		}
		if _, err := s.BatchParts(ctx, id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("BatchParts(%q): %v, want ErrNotFound", id, err)
		}
	}
	// Of two leaders that write the same revision one succeeds.
	var group sync.WaitGroup
	won := make([]error, 4)
	for i := range won {
		next, st := b, f.open()
		next.Rev, next.Note = 3, fmt.Sprint(i)
		group.Go(func() { won[i] = st.PutBatch(ctx, next) })
	}
	group.Wait()
	won = slices.DeleteFunc(won, func(err error) bool { return errors.Is(err, store.ErrConflict) })
	if len(won) != 1 || won[0] != nil {
		t.Errorf("of four writers of one revision these did not lose: %v", won)
	}
}

func testBatchesBounded(t *testing.T, f *fixture) {
	ctx := context.Background()
	s, other := f.open(), f.open()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	put := func(b switching.Batch) {
		t.Helper()
		if err := s.PutBatch(ctx, b); err != nil {
			t.Fatal(err)
		}
	}
	ids := func(all []switching.Batch, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		var text []string
		for _, b := range all {
			text = append(text, b.ID)
		}
		return fmt.Sprint(text)
	}
	expect := func(what, have, want string) {
		t.Helper()
		if have != want {
			t.Errorf("%s: %s, want %s", what, have, want)
		}
	}
	expect("none runs", ids(s.RunningBatches(ctx)), "[]")
	put(switching.Batch{ID: "runs", Rev: 1, State: switching.BatchMoving, Started: at})
	put(switching.Batch{ID: "early", Rev: 1, State: switching.BatchChecking, Started: at.Add(-time.Hour)})
	expect("the oldest first", ids(other.RunningBatches(ctx)), "[early runs]")
	put(switching.Batch{ID: "early", Rev: 2, State: switching.BatchDone, Started: at.Add(-time.Hour)})
	if err := s.PutBatchPart(ctx, "early", switching.BatchPart{Rev: 1, Items: []switching.BatchItem{{Topic: Topic(1)}}}); err != nil {
		t.Fatal(err)
	}
	expect("one has ended", ids(other.RunningBatches(ctx)), "[runs]")
	expect("the newest first", ids(other.Batches(ctx, 5)), "[runs early]")
	put(switching.Batch{ID: "early", Rev: 3, State: switching.BatchMoving, Started: at.Add(-time.Hour)})
	expect("it goes on", ids(other.RunningBatches(ctx)), "[early runs]")
	put(switching.Batch{ID: "early", Rev: 4, State: switching.BatchAborted, Started: at.Add(-time.Hour)})
	for n := range store.KeptBatches + 3 {
		put(switching.Batch{ID: fmt.Sprintf("later-%02d", n), Rev: 1, State: switching.BatchIncomplete, Started: at.Add(time.Duration(n+1) * time.Second)})
	}
	all, err := other.Batches(ctx, 1000)
	if err != nil || len(all) != store.KeptBatches || all[0].ID != "later-66" || all[len(all)-1].ID != "runs" {
		t.Errorf("%d batches are kept (%s), %v; want %d, and the one that runs", len(all), ids(all, nil), err, store.KeptBatches)
	}
	expect("the newest alone", ids(other.Batches(ctx, 1)), "[later-66]")
	for _, gone := range []string{"early", "later-00"} {
		if _, err := other.BatchParts(ctx, gone); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("parts of %s: %v, want ErrNotFound", gone, err)
		}
	}
}
