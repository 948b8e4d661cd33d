package switching

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

var (
	seeds    = flag.Int("seeds", 2000, "how many random switches TestRandomSwitches plays")
	seedFrom = flag.Uint64("seed", 1, "the first of them")
)

// walk is one random switch, in a world that is larger than any that can be searched: three proxies, up to six messages, many faults at
// once, and delays: some of what could happen is put off for long, so that things overtake each other.
type walk struct {
	model
	rng      *rand.Rand
	w        world
	put      map[event]int // events that wait, until which step
	trace    []event
	coverage *[kinds]int
}

func newWalk(seed uint64, coverage *[kinds]int) *walk {
	rng := rand.New(rand.NewPCG(seed, 0))
	some := func() int8 { return int8(max(0, rng.IntN(5)-1)) }
	r := &walk{rng: rng, put: map[event]int{}, coverage: coverage}
	r.config = config{proxies: 1 + rng.IntN(maxProxies), messages: uint8(1 + rng.IntN(6)), consumer: rng.IntN(2) == 0, slow: true,
		left: budget{crash: min(some(), 3), cut: some(), leg: some(), move: some(), change: some(), unknown: some(), again: 1, forget: some(), age: some(), wish: int8(rng.IntN(2))}}
	r.joiner = r.proxies > 1 && rng.IntN(3) == 0
	if rng.IntN(3) == 0 {
		r.drain, r.two = true, r.consumer && rng.IntN(2) == 0
		r.left.again, r.left.back, r.left.age = int8(rng.IntN(2)), int8(rng.IntN(3)), 0
		r.left.seek, r.left.late = some(), some()
		if r.fresh = r.two && rng.IntN(2) == 0; r.fresh {
			r.left.back = max(r.left.back, 1)
		}
		r.leftover = r.consumer && rng.IntN(5) == 0
		if r.lateChange = r.left.back > 0 && rng.IntN(2) == 0; r.lateChange {
			r.left.change, r.left.again = 1, 1
		}
	}
	r.w = r.initial()
	return r
}

// step takes one event; false when there is none.
func (r *walk) step(n int, faults bool) bool {
	type choice struct {
		nth    int
		e      event
		weight int
	}
	var choices []choice
	total, nth := 0, 0
	r.only = -1
	r.each(&r.w, func(e event, _ *world) {
		nth++
		weight := 100
		switch {
		case e.fault && !faults:
			return
		case e.kind == evDeadline:
			weight = 1 // or nothing would ever flip
		case e.fault:
			weight = 15
		case r.put[e] > n:
			weight = 1
		case e.kind >= evEndRead && e.kind <= evPassOver && e.who == 1:
			weight = 2 // it is frozen
		}
		choices = append(choices, choice{nth, e, weight})
		total += weight
	})
	if total == 0 {
		return false
	}
	pick := r.rng.IntN(total)
	for _, c := range choices {
		if pick -= c.weight; pick >= 0 {
			continue
		}
		if r.rng.IntN(20) == 0 && faults {
			r.put[c.e] = n + r.rng.IntN(150) // not now, but perhaps much later
			return true
		}
		r.only = c.nth
		r.each(&r.w, func(e event, next *world) {
			r.trace = append(r.trace, e)
			r.coverage[e.kind]++
			r.w = *next
		})
		return true
	}
	panic("the weights do not add up")
}

func (r *walk) run() string {
	for n := range 1200 {
		if !r.step(n, n < 400) || r.bad != "" || r.full {
			break
		}
		if r.check(&r.w); r.bad != "" {
			break
		}
	}
	for n := 0; r.bad == "" && !r.full && !r.good(&r.w); n++ {
		if !r.step(n, false) || n == 20_000 {
			r.fail("I5: at rest before everything is acknowledged")
		}
		r.check(&r.w)
	}
	return r.bad
}

func TestRandomSwitches(t *testing.T) {
	n := *seeds
	if raceEnabled {
		n /= 20
	}
	var coverage [kinds]int
	full, flips, began := 0, 0, cpu()
	for seed := *seedFrom; seed < *seedFrom+uint64(n); seed++ {
		r := newWalk(seed, &coverage)
		if bad := r.run(); bad != "" {
			var text strings.Builder
			for _, e := range r.trace {
				fmt.Fprintf(&text, "%v\n", e)
			}
			t.Fatalf("seed %d (go test ./core/switching -run RandomSwitches -seed %d -seeds 1): %s\n%+v\n%s%+v\n%+v\n%+v", seed, seed, bad, r.config, text.String(), r.w.entry, r.w.rec, r.w.leaders)
		}
		if r.full {
			full++
		}
		if r.w.entry.Cluster == "b" {
			flips++
		}
	}
	t.Logf("%d switches in %v CPU: %d flipped, %d met a bound of the model", n, cpu()-began, flips, full)
	if flips < n/10 || full > n/5 {
		t.Errorf("of %d switches %d flipped and %d met a bound: that tells too little", n, flips, full)
	}
	for k, n := range coverage {
		if n == 0 && kind(k) != evLocalUndo && !raceEnabled && *seeds >= 2000 {
			t.Errorf("%q never happened", kindNames[k])
		}
	}
}
