package pulsaradmin

import (
	"context"
	"runtime"
	"testing"
	"time"
)

// endless is a partition of n messages that are made up as they are read.
type endless struct {
	*fakeTopic
	n     int64
	reads int64 // entries that were read
}

func (f *endless) entry(i int64) Entry {
	return Entry{Position: Position{7, i}, Time: 1000 + i, Producer: "p", Sequence: i, Messages: 1, Source: NoPosition}
}

func (f *endless) Load(context.Context) (Internal, error) {
	return Internal{Log: Log{Last: Position{7, f.n - 1}, Ledgers: []Ledger{{ID: 7, Entries: f.n}}}, Cursors: f.cursors}, nil
}

func (f *endless) Entry(_ context.Context, p Position) (Entry, error) { return f.entry(p.Entry), nil }

func (f *endless) Heads(_ context.Context, first, last Position) (all []Entry, err error) {
	for i := first.Entry; i <= last.Entry; i++ {
		all = append(all, f.entry(i))
	}
	f.reads += int64(len(all))
	return all, nil
}

func (f *endless) Block(ctx context.Context, first, last, _ Position) ([]Entry, error) {
	return f.Heads(ctx, first, last)
}

func (f *endless) AtTime(_ context.Context, ms int64) (Position, error) {
	return Position{7, min(max(ms-1000, 0), f.n)}, nil
}

// A million messages are missing: each is on one page, none on two, a page costs what it shows, and nothing is kept of it.
func TestAMillionMissingMessagesAreListedByPages(t *testing.T) {
	const sent, missing, limit = 500, 1_000_000, 10_000
	a := &endless{fakeTopic: newFake("a", 7), n: sent + missing}
	a.cursors[replicatorCursor+"b"] = Cursor{MarkDelete: Position{7, sent - 1}}
	b := newFake("b", 3)
	for i := range int64(sent) {
		e := a.entry(i)
		b.append(Entry{Time: e.Time, Producer: e.Producer, Sequence: e.Sequence, Messages: 1, From: "a", Source: e.Position})
	}
	look := func(page Page) Absent {
		t.Helper()
		p := newPair("persistent://t/n/x", a, b)
		if err := p.Load(context.Background()); err != nil {
			t.Fatal(err)
		}
		a.reads = 0
		got, err := p.Absent(context.Background(), page)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(p.from.single); n > salvageKept {
			t.Fatalf("%d entries are kept", n)
		}
		return got
	}
	began := time.Now()
	first := look(Page{After: NoPosition, Limit: 100, Count: true})
	if first.Behind != missing || first.Count != salvageScan || !first.More || len(first.Entries) != 100 || first.Entries[0].Sequence != sent {
		t.Fatalf("the first page counts %d of %d, more %v, and lists %d", first.Count, first.Behind, first.More, len(first.Entries))
	}
	t.Logf("the summary: %v", time.Since(began))
	next, after, peak := int64(sent), NoPosition, uint64(0)
	var before, now runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for pages := 1; ; pages++ {
		page := look(Page{After: after, Limit: limit})
		for _, e := range page.Entries {
			if e.Sequence != next {
				t.Fatalf("message %d of the list is %d", next-sent, e.Sequence-sent)
			}
			next++
		}
		if a.reads > limit+3*blockSize {
			t.Fatalf("page %d has read %d entries to list %d", pages, a.reads, len(page.Entries))
		}
		runtime.ReadMemStats(&now)
		peak = max(peak, now.HeapAlloc)
		if after = page.Seen; !page.More {
			break
		}
	}
	if next != sent+missing {
		t.Errorf("%d messages are listed", next-sent)
	}
	t.Logf("%d pages: %v, heap %d MiB above what it was", missing/limit, time.Since(began), (max(peak, before.HeapAlloc)-before.HeapAlloc)>>20)
	if peak > before.HeapAlloc+64<<20 {
		t.Errorf("the heap grew from %d to %d MiB", before.HeapAlloc>>20, peak>>20)
	}
}
