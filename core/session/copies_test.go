package session

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// copiesText is how conversations show copies.
func copiesText(blocks []copyBlock) string {
	var all []string
	for _, b := range blocks {
		for place := range uint64(copiesPerBlock) {
			if b.has>>place&1 == 1 {
				all = append(all, fmt.Sprintf("%d:%d=%s,%d:%d", b.at.Ledger, b.at.Entry+place, b.cluster, b.of.Ledger, b.of.Entry+place))
			}
		}
	}
	return strings.Join(all, " ")
}

// What is remembered in blocks is what a map would remember.
func TestCopiesAreRememberedExactly(t *testing.T) {
	type original struct {
		cluster string
		at      Position
	}
	rapid.Check(t, func(t *rapid.T) {
		cs := carrying{}
		c := &carried{}
		honest := map[Position]original{}
		at, of := Position{900, 0}, map[string]Position{"b": {4, 0}, "c": {7, 50}}
		for range rapid.IntRange(1, 300).Draw(t, "messages") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				at = Position{at.Ledger + 1, 0}
			case 1:
				at.Entry += uint64(rapid.IntRange(1, 100).Draw(t, "gap")) // own messages, and what other consumers get
			}
			at.Entry++
			from := rapid.SampledFrom([]string{"b", "b", "b", "c"}).Draw(t, "from")
			next := of[from]
			if next.Entry += uint64(rapid.IntRange(0, 9).Draw(t, "markers") / 9); rapid.IntRange(0, 30).Draw(t, "ledger") == 0 {
				next = Position{next.Ledger + 1, 0}
			}
			next.Entry++
			of[from] = next
			honest[at] = original{from, next}
			start, place := blockOf(at)
			for range rapid.IntRange(1, 2).Draw(t, "times") { // redelivered
				cs.addCopies(time.Time{}, c, "a", copyBlock{start, from, Position{next.Ledger, next.Entry - place}, 1 << place})
			}
		}
		known := c.copies["a"]
		if cs.blocks != len(known.blocks) {
			t.Fatalf("%d blocks are counted, there are %d", cs.blocks, len(known.blocks))
		}
		asked := Position{rapid.Uint64Range(900, at.Ledger).Draw(t, "ledger"), rapid.Uint64Range(0, at.Entry+200).Draw(t, "entry")}
		for p := range honest {
			for _, p := range []Position{p, {p.Ledger, p.Entry + 1}, {p.Ledger, p.Entry - 1}} {
				cluster, of, ok := known.original(p)
				if want, isCopy := honest[p]; ok != isCopy || isCopy && (original{cluster, of}) != want {
					t.Fatalf("%v is a copy of %s %v (%v), want %v (%v)", p, cluster, of, ok, want, isCopy)
				}
			}
		}
		want, got := map[string]Position{}, map[string]Position{}
		for p, o := range honest {
			if p.less(asked) && want[o.cluster].less(o.at) {
				want[o.cluster] = o.at
			}
		}
		known.before(asked, func(cluster string, last Position) { got[cluster] = last })
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("before %v the last originals are %v, want %v", asked, got, want)
		}
	})
}

// Memory is bounded: the oldest copies of a subscription are forgotten, and what is counted is what is there.
func TestCopiesOfASubscriptionThatAreTooManyAreForgotten(t *testing.T) {
	cs := carrying{}
	add := func(c *carried, block uint64) {
		cs.addCopies(time.Time{}, c, "a", copyBlock{at: Position{1, block * copiesPerBlock}, cluster: "b", of: Position{2, block}, has: 1})
	}
	var all []*carried
	for range 2 * maxCopyBlocksOfAll / maxCopyBlocks {
		c := &carried{}
		all = append(all, c)
		for block := range uint64(maxCopyBlocks + 10) {
			add(c, block)
		}
	}
	sum := 0
	for _, c := range all {
		n := len(c.copies["a"].blocks)
		if sum += n; n > maxCopyBlocks {
			t.Errorf("%d blocks of one subscription, want at most %d", n, maxCopyBlocks)
		}
	}
	if sum != cs.blocks || sum > maxCopyBlocksOfAll || sum < maxCopyBlocksOfAll/2 {
		t.Errorf("%d blocks are counted, there are %d; want at most %d", cs.blocks, sum, maxCopyBlocksOfAll)
	}
	newest := Position{1, (maxCopyBlocks + 9) * copiesPerBlock}
	if _, _, ok := all[0].copies["a"].original(newest); !ok {
		t.Errorf("the newest copy of a subscription is forgotten, and older ones are not")
	}
	for _, c := range all {
		if cs.forgetCopies(c, time.Time{}) {
			t.Errorf("copies are remembered for ever")
		}
	}
	if cs.blocks != 0 {
		t.Errorf("%d blocks are counted, none is there", cs.blocks)
	}
}
