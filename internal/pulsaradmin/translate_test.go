package pulsaradmin

import (
	"math"
	"testing"
)

// An id of a marker or of what is gone is no message: what follows counts.
func TestTranslateGoesToTheCopyOrToWhatFollows(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	b.append(message("q", 0))
	a.append(message("p", 0))
	a.append(marker())
	a.append(message("p", 1))
	settle(a, b) // b: q0, p0 (7:0), marker (7:1), p1 (7:2)
	p := newPair("persistent://acme/geo/t", a, b)
	if err := p.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	for stored, want := range map[string]Translation{
		"7:0":  {pos("3:1"), pos("3:2"), ByOrigin},
		"7:1":  {NoPosition, pos("3:3"), ByOrigin},
		"7:2":  {pos("3:3"), pos("3:4"), ByOrigin},
		"7:4":  {NoPosition, pos("3:1"), AtEnd},    // behind the end: behind the copy of the last, which here is b's own message
		"6:99": {NoPosition, pos("3:0"), NotThere}, // before everything
	} {
		if got := ok[Translation](t)(p.Translate(t.Context(), pos(stored))); got != want {
			t.Errorf("%s is %+v, want %+v", stored, got, want)
		}
	}
}

// What the old cluster removed, the new one may still have: nothing of it is skipped. A stored id of it is known by where its copy comes from.
func TestTranslateFindsWhatTheOldClusterHasNoMore(t *testing.T) {
	phase := func(from, to *fakeTopic, first, n int) {
		from.roll()
		for i := range n {
			from.append(message("p", first+i))
		}
		settle(from, to)
	}
	translate := func(a, b *fakeTopic, at Position) Translation {
		t.Helper()
		p := newPair("persistent://acme/geo/t", a, b)
		if err := p.LoadForIDs(t.Context()); err != nil {
			t.Fatal(err)
		}
		return ok[Translation](t)(p.Translate(t.Context(), at))
	}
	exact := func(at Position) Translation {
		return Translation{At: at, Next: Position{at.Ledger, at.Entry + 1}, How: ByOrigin}
	}
	a, b := newFake("a", 7), newFake("b", 3)
	phase(a, b, 0, 20)
	phase(a, b, 20, 10)
	five := a.entries[5].Position
	a.trim(a.entries[20].Position)
	if got, want := translate(a, b, five), exact(b.entries[5].Position); got != want {
		t.Errorf("trimmed on a: %+v, want %+v", got, want)
	}
	a.deleted = true
	if got, want := translate(a, b, five), exact(b.entries[5].Position); got != want {
		t.Errorf("deleted on a: %+v, want %+v", got, want)
	}
	a.deleted = false
	b.roll()
	b.trim(Position{math.MaxInt64, 0})
	end := Position{b.last.Ledger, 0}
	if got := translate(a, b, five); got.At != NoPosition || got.Next != end {
		t.Errorf("removed by both: %+v, want the end of b, %v", got, end)
	}

	// The message that the id is of came from b in the first place: no copy on b says that it lay there on a.
	a, b = newFake("a", 7), newFake("b", 3)
	phase(b, a, 0, 40_000)
	phase(a, b, 40_000, 10)
	phase(b, a, 40_010, 10)
	first, second := a.entries[5].Position, a.entries[40_014].Position
	a.trim(Position{math.MaxInt64, 0})
	if got := translate(a, b, first); got.At != NoPosition || got.Next != b.entries[0].Position {
		t.Errorf("an early copy: %+v, want the oldest message of b", got)
	}
	if got, want := translate(a, b, second), b.entries[40_010].Position; got.At != NoPosition || got.Next != want {
		t.Errorf("a late copy: %+v, want what follows the last message of a, %v", got, want)
	}

	// Here it is b that has removed it, with what follows.
	a, b = newFake("a", 7), newFake("b", 3)
	phase(a, b, 0, 20)
	phase(b, a, 20, 10)
	phase(b, a, 30, 10)
	phase(a, b, 40, 10)
	b.trim(b.entries[30].Position)
	if got := translate(a, b, a.entries[5].Position); got.At != NoPosition || got.Next != b.entries[0].Position {
		t.Errorf("removed on b: %+v, want the oldest message of b, %v", got, b.entries[0].Position)
	}

	// Copies that do not say where they come from.
	a, b = newFake("a", 7), newFake("b", 3)
	b.silent = true
	phase(a, b, 0, 20)
	phase(a, b, 20, 10)
	a.trim(a.entries[20].Position)
	if got := translate(a, b, five); got.At != NoPosition || got.Next != b.entries[0].Position {
		t.Errorf("bare copies: %+v, want the oldest message of b", got)
	}
}

// SW-03: readers of one partition that come at the same time share what was read; a failure is nobody else's.
func TestThoseWhoTranslateAtTheSameTimeShareWhatWasRead(t *testing.T) {
	a, b := history(20)
	key := partition{topic: "persistent://acme/geo/t"}
	open := func() *Pair { return newPair(key.topic, a, b) }
	var tr Translator
	translate := func(p *sharedPair, i int) {
		t.Helper()
		if got := ok[Translation](t)(p.translate(t.Context(), a.entries[i].Position)); got.At != b.entries[i].Position {
			t.Errorf("message %d: %+v, want %v", i, got, b.entries[i].Position)
		}
	}
	first, second := tr.enter(key, open), tr.enter(key, open)
	translate(first, 5)
	translate(second, 7)
	tr.leave(key, first, false)
	third := tr.enter(key, open)
	translate(third, 9)
	if a.loads != 1 || b.loads != 1 {
		t.Errorf("the logs were read %d and %d times for three, want once", a.loads, b.loads)
	}
	tr.leave(key, second, true)
	a.deleted, b.deleted = true, true
	fourth := tr.enter(key, open)
	if _, err := fourth.translate(t.Context(), a.entries[5].Position); err == nil {
		t.Error("of a topic that is on neither cluster something was found")
	}
	translate(third, 11)
	tr.leave(key, fourth, true)
	tr.leave(key, third, false)
	if len(tr.shared) > 0 {
		t.Errorf("%d pairs are kept that nobody uses", len(tr.shared))
	}
}
