package pulsaradmin

import (
	"context"
	"strings"
	"testing"
)

// SW-18: a reader's position on a dead cluster is found by the copies alone.
func TestAPositionOnADeadClusterIsFoundByTheCopiesAlone(t *testing.T) {
	for _, own := range []int{0, 100} {
		b := newFake("b", 3)
		for i := range int64(2000) {
			if i == 700 { // a marker of the old cluster was never copied
				continue
			}
			b.append(Entry{Time: 1000 + i, Producer: "p", Sequence: i, Messages: 1, From: "a", Source: Position{7 + i/500, i % 500}})
		}
		for i := range own {
			b.append(Entry{Time: int64(9000 + i), Producer: "q", Sequence: int64(i), Messages: 1, Source: NoPosition})
		}
		find := func(at Position) (Translation, error) {
			p := newPair("persistent://t/n/x", dead{cluster: "a"}, b)
			if err := p.to.load(context.Background()); err != nil {
				t.Fatal(err)
			}
			return p.translateAlone(context.Background(), at)
		}
		for _, i := range []int64{0, 1, 699, 1234, 1999} {
			at := i // where it lies
			if i > 700 {
				at--
			}
			if got, err := find(Position{7 + i/500, i % 500}); err != nil || got.At != (Position{3, at}) || got.Next != (Position{3, at + 1}) || !got.How.Exact() {
				t.Errorf("message %d: %+v, %v; want 3:%d", i, got, err, at)
			}
		}
		if got, err := find(Position{8, 200}); err != nil || got.At != NoPosition || got.Next != (Position{3, 700}) {
			t.Errorf("a marker: %+v, %v; want what follows it, 3:700", got, err)
		}
		if got, err := find(Position{99, 0}); err == nil || !strings.Contains(err.Error(), "never came") {
			t.Errorf("a message that never came: %+v, %v", got, err)
		}
	}
	// The topic was on b first: what its reader had of that on a, b does not know.
	b := newFake("b", 3)
	for i := range int64(20) {
		b.append(Entry{Time: 1000 + i, Producer: "q", Sequence: i, Messages: 1, Source: NoPosition})
	}
	b.append(Entry{Time: 2000, Producer: "p", Messages: 1, From: "a", Source: Position{7, 20}})
	first := newPair("persistent://t/n/x", dead{cluster: "a"}, b)
	if err := first.to.load(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got, err := first.translateAlone(context.Background(), Position{7, 5}); err != nil || got.At != NoPosition || got.Next != (Position{3, 0}) {
		t.Errorf("a copy of b's own: %+v, %v; want the oldest message", got, err)
	}
	silent := newFake("b", 3)
	silent.silent = true
	silent.append(Entry{Time: 1, Producer: "p", Messages: 1, From: "a", Source: Position{7, 0}})
	p := newPair("persistent://t/n/x", dead{cluster: "a"}, silent)
	if err := p.to.load(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.translateAlone(context.Background(), Position{7, 0}); err == nil || !strings.Contains(err.Error(), "do not say") {
		t.Errorf("copies that do not say: %+v, %v", got, err)
	}
}
