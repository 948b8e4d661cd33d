package pulsaradmin

import (
	"context"
	"fmt"
	"testing"
)

// SW-18: what the dead cluster had acknowledged and not sent is listed exactly, whatever the new one has got by itself meanwhile; what arrives late drops
// out of the list.
func TestWhatWasNotReplicatedIsListedUntilItArrives(t *testing.T) {
	for _, silent := range []bool{false, true} { // copies that do not say where they come from
		for _, cursor := range []bool{false, true} {
			for _, lag := range []int{0, 3} { // copies that the replicator's cursor does not know of yet
				t.Run(fmt.Sprintf("silent %v, cursor %v, lag %d", silent, cursor, lag), func(t *testing.T) {
					a, b := newFake("a", 7), newFake("b", 3)
					b.silent = silent
					const all, sent = 1000, 900
					copied := func(i int) {
						e := a.entries[i]
						b.append(Entry{Time: e.Time, Producer: e.Producer, Sequence: e.Sequence, Messages: 1, From: "a", Source: e.Position})
					}
					for i := range all {
						a.append(Entry{Time: int64(1000 + i), Producer: "p", Sequence: int64(i), Messages: 1, Source: NoPosition})
						if i%100 == 99 {
							a.append(Entry{Time: int64(1000 + i), Marker: true, Source: NoPosition})
						}
					}
					var own []int
					for i, e := range a.entries {
						if !e.Marker {
							own = append(own, i)
						}
					}
					for _, i := range own[:sent] {
						copied(i)
					}
					if cursor {
						a.cursors[replicatorCursor+"b"] = Cursor{MarkDelete: a.entries[own[sent-1-lag]].Position}
					}
					for i := range 5000 { // the new cluster goes on, with messages of its own
						b.append(Entry{Time: int64(5000 + i), Producer: "q", Sequence: int64(i), Messages: 1, Source: NoPosition})
					}
					check := func(what string, want int) {
						t.Helper()
						p := newPair("persistent://t/n/x", a, b)
						if err := p.Load(context.Background()); err != nil {
							t.Fatal(err)
						}
						got, err := p.Absent(context.Background(), Page{After: NoPosition, Limit: 10, Count: true})
						if err != nil || got.Count != int64(want) || got.More || len(got.Entries) != min(want, 10) {
							t.Fatalf("%s: %d (%d listed), %v; want %d", what, got.Count, len(got.Entries), err, want)
						}
						for i, e := range got.Entries {
							if first := all - want; e.Sequence != int64(first+i) {
								t.Errorf("%s: message %d of the list is %d", what, i, e.Sequence)
							}
						}
					}
					check("the old cluster is back", all-sent)
					if was, ok := a.cursors[replicatorCursor+"b"]; ok && !silent { // made anew, at the end
						a.cursors[replicatorCursor+"b"] = Cursor{MarkDelete: a.last}
						check("replication was switched off and on", all-sent)
						a.cursors[replicatorCursor+"b"] = was
					}
					for n, i := range own[sent:] {
						copied(i)
						if n == 49 {
							check("half of it has arrived", 50)
						}
					}
					check("all of it has arrived", 0)
				})
			}
		}
	}
}

func TestOfATopicThatWasNeverReplicatedEverythingIsMissing(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	for i := range 20 {
		a.append(Entry{Time: int64(i), Producer: "p", Sequence: int64(i), Messages: 1, Source: NoPosition})
	}
	a.append(Entry{Time: 30, Producer: "r", From: "b", Source: Position{3, 0}, Messages: 1})
	p := newPair("persistent://t/n/x", a, b)
	if err := p.Load(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.Absent(context.Background(), Page{After: NoPosition, Limit: 100, Count: true}); err != nil || got.Count != 20 || len(got.Entries) != 20 {
		t.Errorf("%+v, %v", got, err)
	}
}
