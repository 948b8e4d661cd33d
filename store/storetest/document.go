package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"pointsman/store"
)

func testDocuments(t *testing.T, f *fixture) {
	s, ctx := f.open(), f.ctx()
	expect := func(what, kind string, want ...store.Document) {
		t.Helper()
		got, err := f.open().Documents(ctx, kind)
		if err != nil || len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, want)
		}
	}
	put := func(kind string, d store.Document) {
		t.Helper()
		if err := s.PutDocument(ctx, kind, d); err != nil {
			t.Fatalf("%s/%s: %v", kind, d.Name, err)
		}
	}
	expect("a kind that nobody has written", "seen")
	if err := s.DropDocument(ctx, "seen", "nothing"); err != nil {
		t.Errorf("dropping what is not there: %v", err)
	}
	b, a := store.Document{Name: "b", Rev: 1, Data: []byte("one")}, store.Document{Name: "a", Rev: 1, Data: bytes.Repeat([]byte{0, 1, 0xff}, store.MaxDocument/3)}
	put("seen", b)
	put("seen", a)
	put("orders", store.Document{Name: "b", Rev: 1, Data: []byte("another kind")})
	expect("two in the order of their names", "seen", a, b)
	for _, rev := range []uint64{1, 3} {
		if err := s.PutDocument(ctx, "seen", store.Document{Name: "b", Rev: rev, Data: []byte("late")}); !errors.Is(err, store.ErrConflict) {
			t.Errorf("revision %d over revision 1: %v, want a conflict", rev, err)
		}
	}
	if err := s.PutDocument(ctx, "seen", store.Document{Name: "c", Rev: 2}); !errors.Is(err, store.ErrConflict) {
		t.Errorf("revision 2 of nothing: %v, want a conflict", err)
	}
	b.Rev, b.Data = 2, []byte("two")
	put("seen", b)
	expect("a revision replaces the one before", "seen", a, b)
	if err := s.PutDocument(ctx, "seen", store.Document{Name: "d", Rev: 1, Data: make([]byte, store.MaxDocument+1)}); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("a byte too many: %v, want ErrTooLarge", err)
	}
	for _, bad := range []string{"", "a/b", "a@b", "a b"} {
		if s.PutDocument(ctx, "seen", store.Document{Name: bad, Rev: 1}) == nil || s.PutDocument(ctx, bad, store.Document{Name: "x", Rev: 1}) == nil {
			t.Errorf("the name %q is taken", bad)
		}
	}
	if err := s.DropDocument(ctx, "seen", "b"); err != nil {
		t.Fatal(err)
	}
	expect("dropped", "seen", a)
	put("seen", store.Document{Name: "b", Rev: 1, Data: []byte{}})
	if got, err := s.Documents(ctx, "seen"); err != nil || len(got) != 2 || got[1].Rev != 1 || len(got[1].Data) != 0 {
		t.Errorf("created anew, empty: %+v, %v", got, err)
	}
	if history, err := s.History(ctx, 10); err != nil || len(history) != 0 {
		t.Errorf("documents are in the history: %+v, %v", history, err)
	}
}

// testDocumentWriters has writers race for each revision: one wins.
func testDocumentWriters(t *testing.T, f *fixture) {
	const writers, revisions = 4, 10
	var group sync.WaitGroup
	var won atomic.Int64
	for w := range writers {
		s := f.open()
		group.Go(func() {
			for rev := range uint64(revisions) {
				err := s.PutDocument(context.Background(), "race", store.Document{Name: "one", Rev: rev + 1, Data: fmt.Append(nil, w)})
				switch {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, store.ErrConflict):
					t.Errorf("PutDocument: %v", err)
				}
			}
		})
	}
	group.Wait()
	got, err := f.open().Documents(context.Background(), "race")
	if err != nil || len(got) != 1 || int64(got[0].Rev) != won.Load() || won.Load() == 0 {
		t.Errorf("%d writes succeeded, and there is %+v, %v", won.Load(), got, err)
	}
}
