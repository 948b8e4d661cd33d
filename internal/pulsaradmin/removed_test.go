package pulsaradmin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestWhatRetentionRemovedIsCountedAndNotHidden(t *testing.T) {
	for how, silent := range map[How]bool{NotThere: false, ByTime: true} {
		a, b := newFake("a", 7), newFake("b", 3)
		b.silent = silent
		for i := range 30 {
			if i%10 == 0 {
				b.roll()
			}
			a.append(message("p", i))
			settle(a, b)
		}
		sub(a, "s", 5, 7, 8, 25)
		b.trim(b.entries[20].Position)
		plans := carryAll(t, a, b)
		if p := plans[0]; p.How != how || p.Missing != 13 || p.Repeated != 0 || p.First != b.entries[0].Position || len(b.delivered("s")) != 9 || !strings.Contains(p.Note, "no copy of the first message") {
			t.Errorf("plan %+v, and %v are delivered; want 13 missing, found by %s", p, b.delivered("s"), how)
		}
	}
}

// A place that is found by the time of publishing alone: what lies before it is missing, what lies behind it and is acknowledged comes again unless it is recognised, and nothing is passed over unseen.
func TestAPlaceByTimeAloneHidesNothing(t *testing.T) {
	const apart = 10              // milliseconds between two messages
	const far = clockSkew + 1_000 // more than a copy is looked for
	for name, c := range map[string]struct {
		late      int  // milliseconds that the clock of number 0's producer is behind
		lost      bool // number 0 was not replicated
		strange   int  // messages of b's that say they come from a, and are not on a, lie at the place
		unsent    bool // nor has the replicator come to it
		missing   int64
		repeated  int64
		delivered int
	}{
		"its copy lies far behind the place":        {late: far, delivered: 11},
		"it was passed over, and others lie around": {late: 20 * apart, lost: true, missing: 1, delivered: 10},
		"some are not recognised":                   {late: far, strange: 3, repeated: 3, delivered: 14},
		"it is the next to be sent":                 {late: 20 * apart, lost: true, unsent: true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newFake("a", 7), newFake("b", 3)
			b.silent = true
			at := int64(1_000_000)
			publish := func(n int, late int) {
				at += apart
				e := message("p", n)
				e.Time = at - int64(late)
				a.append(e)
			}
			before := far/apart + 50
			for i := range before {
				publish(1_000_000+i, 0)
				if i == before-c.late/apart+1 {
					settle(a, b)
					for k := range c.strange {
						e := message("x", k)
						e.Time, e.From, e.Source = at, "a", NoPosition
						b.append(e)
					}
				}
			}
			settle(a, b)
			publish(0, c.late)
			if c.lost {
				a.sent++
			}
			for i := range 10 {
				if !c.unsent {
					publish(1+i, 0)
				}
			}
			if !c.unsent {
				settle(a, b)
			}
			sub(a, "s", before)
			p := newPair("persistent://acme/geo/t", a, b)
			plans, err := p.Plans(t.Context())
			if c.unsent {
				var behind *ErrBehind
				if !errors.As(err, &behind) {
					t.Errorf("plans %+v, error %v; want one that says that b is behind", plans, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			carryAll(t, a, b)
			if plan, got := plans[0], b.delivered("s"); plan.How != ByTime || plan.Missing != c.missing || plan.Repeated != c.repeated || len(got) != c.delivered {
				t.Errorf("plan %+v without its holes %d, and %d are delivered; want %d missing, %d again, %d delivered", plan.How, len(plan.Holes), len(got), c.missing, c.repeated, c.delivered)
				t.Logf("missing %d, repeated %d, first %v, note %q", plan.Missing, plan.Repeated, plan.First, plan.Note)
			}
		})
	}
}

// Retention on the old cluster removes what all have acknowledged: it must not come again.
func TestWhatTheOldClusterRemovedDoesNotComeAgain(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	for i := range 5 {
		b.append(message("q", i))
		e := third(i)
		a.append(e)
		b.append(e)
	}
	settle(a, b)
	a.roll()
	clock += 2 * clockSkew
	for i := range 10 {
		a.append(message("p", i))
	}
	settle(a, b)
	sub(a, "s", 20)
	sub(a, "r", 15)
	a.trim(a.entries[10].Position)
	carryAll(t, a, b)
	if got := b.delivered("s"); len(got) != 0 {
		t.Errorf("s gets %v again", got)
	}
	if got := b.delivered("r"); len(got) != 5 {
		t.Errorf("r gets %v, want the last five", got)
	}
}

// The topic is quiet, and the new cluster has removed the copies that nobody there had subscribed to: what the replicator has passed long ago never comes. But what it has not may.
func TestWhatWasReplicatedAndRemovedIsNotWaitedFor(t *testing.T) {
	for name, c := range map[string]struct {
		acked   int
		sent    int // of the twenty
		how     How
		missing int64
	}{
		"all is acknowledged":                              {acked: 20, sent: 20, how: AtEnd},
		"all is acknowledged, and one not yet sent":        {acked: 20, sent: 19},
		"three are not acknowledged":                       {acked: 17, sent: 20, how: NotThere, missing: 3},
		"three are not acknowledged, and one not yet sent": {acked: 17, sent: 19, how: NotThere, missing: 2},
		"one is not acknowledged, and not yet sent":        {acked: 19, sent: 19},
	} {
		for _, silent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, copies say nothing: %v", name, silent), func(t *testing.T) {
				a, b := newFake("a", 7), newFake("b", 3)
				b.silent = silent
				for i := range 20 {
					a.append(message("p", i))
				}
				replicate(a, b, c.sent)
				sub(a, "s", c.acked)
				b.roll()
				b.trim(b.last)
				p := newPair("persistent://acme/geo/t", a, b)
				plans, err := p.Plans(t.Context())
				var behind *ErrBehind
				if c.how == "" {
					if !errors.As(err, &behind) || behind.Position != pos("7:19") {
						t.Fatalf("plans %+v, error %v; want one that says that b is behind", plans, err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if plan, end := plans[0], (Position{b.last.Ledger, 0}); plan.How != c.how || plan.Missing != c.missing || plan.First != end {
					t.Errorf("plan %+v, want %s with %d missing, at %v", plan, c.how, c.missing, end)
				}
				carryAll(t, a, b)
				b.append(message("q", 1))
				if got := b.delivered("s"); !slices.Equal(got, []string{"q/1"}) {
					t.Errorf("delivered %v, want what came after", got)
				}
			})
		}
	}
}
