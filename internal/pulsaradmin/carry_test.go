package pulsaradmin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// carryAll carries everything from a to b twice, checks that the second time nothing is moved, and returns the plans.
func carryAll(t require, a, b *fakeTopic) []Plan {
	t.Helper()
	p := newPair("persistent://acme/geo/t", a, b)
	plans, differences, err := p.Carry(context.Background())
	if err != nil {
		t.Fatalf("carry: %v", err)
	}
	if wrong := Differences(differences); wrong != "" {
		t.Fatalf("read back: %s", wrong)
	}
	moves := b.moves
	if _, _, err := newPair("persistent://acme/geo/t", a, b).Carry(context.Background()); err != nil || b.moves != moves {
		t.Fatalf("again: %d cursors moved, %v; want nothing done", b.moves-moves, err)
	}
	return plans
}

type require interface {
	Helper()
	Fatalf(format string, args ...any)
}

// Whatever has happened on two clusters, with markers, a third cluster, roll-overs, repeated copies and brokers that do not say where copies come from: the
// subscription on the new cluster gets exactly what the old one would still have delivered, each message once.
func TestACarriedSubscriptionGetsExactlyWhatWasLeft(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := newFake("a", rapid.Int64Range(1, 50).Draw(t, "ledger of a")), newFake("b", rapid.Int64Range(1, 50).Draw(t, "ledger of b"))
		b.silent = rapid.IntRange(0, 3).Draw(t, "silent") == 0
		a.silent = b.silent
		n := 0
		for range rapid.IntRange(0, 80).Draw(t, "steps") {
			run := rapid.IntRange(1, 6).Draw(t, "run")
			switch rapid.SampledFrom([]string{"a", "a", "a", "b", "c", "markers", "replicate", "roll", "repeat"}).Draw(t, "step") {
			case "a", "b":
				side := a
				if rapid.Bool().Draw(t, "on b") {
					side = b
				}
				for range run {
					n++
					side.append(message("p", n))
				}
			case "c":
				for range run {
					n++
					e := message("c", n)
					e.From, e.Source = "c", Position{70, int64(n)}
					a.append(e)
					b.append(e)
				}
			case "markers":
				for range run {
					a.append(marker())
				}
				b.append(marker())
			case "replicate":
				replicate(a, b, run)
				replicate(b, a, run)
			case "roll":
				a.roll()
				b.roll()
			case "repeat": // a replicator begins anew a little before where it was
				if !b.silent {
					a.sent = max(0, a.sent-run)
				}
			}
		}
		settle(a, b)
		a.subs["s"] = Sub{Type: "Shared"}
		a.cursors["s"] = Cursor{MarkDelete: NoPosition}
		// Acknowledge a beginning, and some behind it.
		upTo := rapid.IntRange(0, len(a.entries)).Draw(t, "acknowledged")
		c := a.cursors["s"]
		for _, e := range a.entries[:upTo] {
			c = a.acknowledge(c, e.Position)
		}
		if upTo > 0 {
			c.MarkDelete = a.entries[upTo-1].Position
		}
		for _, i := range rapid.SliceOfN(rapid.IntRange(0, max(0, len(a.entries)-1)), 0, 40).Draw(t, "singly") {
			if len(a.entries) > 0 {
				c = a.acknowledge(c, a.entries[i].Position)
			}
		}
		a.cursors["s"] = c
		want := a.delivered("s")
		carryAll(t, a, b)
		got := b.delivered("s")
		slices.Sort(want)
		slices.Sort(got)
		if want = slices.Compact(want); !slices.Equal(got, want) {
			t.Fatalf("delivered on b\n  %v\nwant\n  %v", got, want)
		}
	})
}

// history publishes numbers on a and has them replicated.
func history(n int) (a, b *fakeTopic) {
	a, b = newFake("a", 7), newFake("b", 3)
	for i := range n {
		a.append(message("p", i))
	}
	settle(a, b)
	return a, b
}

// sub makes a subscription on f that has acknowledged everything below n and the numbers behind.
func sub(f *fakeTopic, name string, n int, acked ...int) {
	f.subs[name] = Sub{Type: "Exclusive"}
	c := Cursor{MarkDelete: Position{f.last.Ledger, -1}}
	if n > 0 {
		c.MarkDelete = f.entries[n-1].Position
	}
	for _, i := range acked {
		c = f.acknowledge(c, f.entries[i].Position)
	}
	f.cursors[name] = c
}

func TestASubscriptionThatIsThereIsMovedOnlyWhenItHasTo(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 10, 12, 13)
	for _, c := range []struct {
		what  string
		setup func()
		moves int
	}{
		{"missing", func() {}, 1},
		{"as it should be", func() {}, 0},
		{"behind", func() { sub(b, "s", 4) }, 1},
		{"ahead", func() { sub(b, "s", 15) }, 1},
		{"without the holes", func() { sub(b, "s", 10) }, 0},
		{"with one hole of two", func() { sub(b, "s", 10, 12) }, 0},
		{"with a hole too many", func() { sub(b, "s", 10, 12, 13, 17) }, 1},
	} {
		c.setup()
		before := b.moves
		carryAll(t, a, b)
		if got := b.cursors["s"]; b.moves-before != c.moves || got.MarkDelete != b.entries[9].Position || len(got.Acked) != 1 || got.Acked[0].String() != "(3:11..3:13]" {
			t.Errorf("%s: moved %d times, and the cursor is %+v", c.what, b.moves-before, got)
		}
	}
}

// A replicated subscription on the new cluster stands where the last snapshot put it, which may be before markers: the cluster counts them, the plan begins behind them.
func TestMarkersBeforeTheFirstMessageAreNoDifference(t *testing.T) {
	a, b := history(10)
	for range 4 {
		b.append(marker())
	}
	for i := 10; i < 20; i++ {
		a.append(message("p", i))
	}
	settle(a, b)
	sub(a, "s", 10, 12, 13)
	for acked := 9; acked <= 13; acked++ { // the last one of them is a marker, or none
		sub(b, "s", acked+1)
		before := b.moves
		carryAll(t, a, b)
		if b.moves != before {
			t.Errorf("moved from behind %v to %v, and there are only markers between", b.entries[acked].Position, b.cursors["s"].MarkDelete)
		}
		if got := len(b.delivered("s")); got != 8 {
			t.Errorf("from behind %v on: %d messages are left, want 8", b.entries[acked].Position, got)
		}
	}
	sub(b, "s", 9)
	before := b.moves
	carryAll(t, a, b)
	if b.moves == before {
		t.Error("a message lies before the first one of the plan, and the subscription was not moved")
	}
}

// SW-02: positions of the new cluster only, whatever the numbers are on the old one.
func TestAReplicatedSubscriptionStaysReplicated(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 10)
	s := a.subs["s"]
	s.Replicated, s.Properties = true, map[string]string{"k": "v"}
	a.subs["s"] = s
	carryAll(t, a, b)
	if got := b.subs["s"]; !got.Replicated || got.Properties["k"] != "v" {
		t.Errorf("made: %+v", got)
	}
	sub(b, "s", 4)
	carryAll(t, a, b)
	if !b.subs["s"].Replicated {
		t.Error("moved: the subscription is not replicated any more")
	}
}

// The log of a topic is long: the search must not read all of it to find that no copy says where it comes from; nor miss what was copied before, or since, the
// brokers were upgraded.
func TestFindingAmongBareCopiesReadsLittle(t *testing.T) {
	const n = 30_000
	for name, says := range map[string]func(i int) bool{ // which copies say where they come from
		"none":                 func(int) bool { return false },
		"since the upgrade":    func(i int) bool { return i >= n/2 },
		"until the downgrade":  func(i int) bool { return i < n/2 },
		"since a moment ago":   func(i int) bool { return i >= n-3 },
		"all but a moment ago": func(i int) bool { return i < n-3 },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newFake("a", 7), newFake("b", 3)
			for i := range n {
				e := message("p", i)
				a.append(e)
				b.silent = !says(i)
				replicate(a, b, 1)
			}
			for _, i := range []int{n - 1, n - 10, n/2 + 1, n/2 - 1, 5} {
				b.reads = 0
				p := newPair("persistent://t/n/x", a, b)
				if err := p.Load(t.Context()); err != nil {
					t.Fatal(err)
				}
				f, err := p.Find(t.Context(), a.entries[i].Position)
				want := ByProducer
				if says(i) {
					want = ByOrigin
				}
				if err != nil || f.Position != b.entries[i].Position || f.How != want || b.reads > 40 {
					t.Errorf("number %d: %+v, %v after %d reads; want %v by %s, and few reads", i, f, err, b.reads, b.entries[i].Position, want)
				}
			}
		})
	}
}

// Many messages within the time that producers' clocks may differ by: the copy is found all the same.
func TestACopyThatSaysNothingIsFoundAmongManyOfTheSameSecond(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	b.silent = true
	const n = 3 * printScan
	for i := range n {
		e := message("p", i)
		e.Time = int64(1_000_000 + i/10) // ten within a millisecond
		if i == n-5 {
			e.Time -= 300 // a producer whose clock is late
		}
		a.append(e)
	}
	settle(a, b)
	for _, i := range []int{n - 1, n - 5, n / 2, 0} {
		sub(a, "s", i)
		p := newPair("persistent://t/n/x", a, b)
		plans, err := p.Plans(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if plan := plans[0]; plan.How != ByProducer || plan.First != b.entries[i].Position || plan.Repeated != 0 {
			t.Errorf("number %d: plan %+v, want %v by producer", i, plan, b.entries[i].Position)
		}
	}
}

func TestASubscriptionThatSomebodyUsesIsNotMoved(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 10)
	sub(b, "s", 4)
	s := b.subs["s"]
	s.Consumers = []Consumer{{Name: "mine", Address: "/10.1.2.3:4", ClientVersion: "x"}}
	b.subs["s"] = s
	_, _, err := newPair("persistent://acme/geo/t", a, b).Carry(t.Context())
	if err == nil || !strings.Contains(err.Error(), `consumer "mine" from 10.1.2.3:4 (x) is connected to it on cluster b`) || b.moves != 0 {
		t.Errorf("error %v after %d moves, want a refusal that names the client", err, b.moves)
	}
}

// A late Apply of plans from before a message was written must not jump over it (protocol rule C8).
func TestALatePlanDoesNotSkipWhatCameAfterIt(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 20)
	p := newPair("persistent://acme/geo/t", a, b)
	plans := ok[[]Plan](t)(p.Plans(t.Context()))
	if plans[0].How != AtEnd || plans[0].First != pos("3:20") {
		t.Errorf("plan %+v, want one behind the last copy", plans[0])
	}
	b.append(message("q", 1))
	if err := p.Apply(t.Context(), plans); err != nil {
		t.Fatal(err)
	}
	if got := b.delivered("s"); !slices.Equal(got, []string{"q/1"}) {
		t.Errorf("delivered %v, want the message that came after the plan", got)
	}
}

func TestWhatIsNotReplicatedYetStopsTheCarrying(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 20)
	a.append(message("p", 20))
	_, err := newPair("persistent://acme/geo/t", a, b).Plans(t.Context())
	var behind *ErrBehind
	if !errors.As(err, &behind) || behind.Position != pos("7:20") || !strings.Contains(err.Error(), "pulsar.repl.b") {
		t.Errorf("error %v, want one that says that b is behind", err)
	}
}

// The search among a hundred thousand entries takes a few reads, also behind a long run that comes from elsewhere.
func TestFindReadsLittle(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	for i := range 50_000 {
		b.append(message("q", i))
		if i%7 == 0 {
			b.append(marker())
		}
	}
	for i := range 50_000 {
		a.append(message("p", i))
		if i%5 == 0 {
			a.append(marker())
		}
	}
	replicate(a, b, 1<<30)
	most := 0
	for _, i := range []int{0, 1, 777, 30_000, 59_999} {
		p := newPair("persistent://acme/geo/t", a, b)
		if err := p.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.reads, b.reads = 0, 0
		f := ok[Found](t)(p.Find(t.Context(), a.entries[i].Position))
		copied := ok[Entry](t)(b.Entry(t.Context(), f.Position))
		if f.How != ByOrigin || copied.Source != f.Entry.Position || f.Entry.Position.Before(a.entries[i].Position) {
			t.Errorf("entry %v is found at %v (%s), which is a copy of %v", a.entries[i].Position, f.Position, f.How, copied.Source)
		}
		most = max(most, a.reads+b.reads)
	}
	if most > 40 {
		t.Errorf("%d reads for one search, want at most 40", most)
	}
}

func TestTailsAreCompared(t *testing.T) {
	a, b := history(600)
	tailsTo := func(last Position) TailReport {
		p := newPair("persistent://acme/geo/t", a, b)
		if err := p.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		return ok[TailReport](t)(p.CompareTails(t.Context(), last, 20))
	}
	tails := func() TailReport { return tailsTo(a.last) }
	if r := tails(); r.Compared != 20 || r.String() != "" || r.First != pos("3:580") || r.Last != pos("3:599") {
		t.Errorf("report %+v of equal tails", r)
	}
	kept := b.entries
	b.entries = nil
	if r := tails(); len(r.Missing) != 20 || !strings.Contains(r.String(), "of the last 20 messages that were looked for none has a copy any more") {
		t.Errorf("report %q of a tail that was removed", r)
	}
	b.entries = kept
	a.sent = 100 // the replicator begins anew, and the broker finds the second copies by their time
	settle(a, b)
	if r := tails(); r.Compared != 20 || r.String() != "" || r.First != pos("3:580") {
		t.Errorf("report %+v of a tail that is there twice", r)
	}
	b.entries[590].Source, b.entries[591].Source = b.entries[591].Source, b.entries[590].Source
	if r := tails(); r.OutOfOrder != 1 || !strings.Contains(r.String(), "lie in another order") {
		t.Errorf("report %+v, want one that lies in another order", r)
	}
	a.append(message("late", 7))
	if r := tails(); len(r.Missing) != 1 || !strings.Contains(r.String(), `1 of the last 20 messages have no copy; the first is at 7:600 (producer "late", sequence id 7)`) {
		t.Errorf("report %q, want the message that is missing", r)
	}
	// After the flip the new cluster's messages come to the old one, and may be read there before they are read where they are from.
	if r := tailsTo(pos("7:589")); r.Compared != 20 || r.String() != "" || r.First != pos("3:570") || r.Last != pos("3:589") {
		t.Errorf("report %+v of what lies up to the end of the drain", r)
	}
}

// What is too far away to be looked at comes again, and is counted; nothing is skipped for it.
func TestWhatIsAcknowledgedTooFarBehindComesAgain(t *testing.T) {
	a, b := history(maxWindow + 10)
	sub(a, "s", 3)
	c := a.cursors["s"]
	c.Acked = []Range{{pos("7:3"), pos("7:5")}, {Position{7, maxWindow + 4}, Position{7, maxWindow + 6}}}
	a.cursors["s"] = c
	p := newPair("persistent://acme/geo/t", a, b)
	plans := ok[[]Plan](t)(p.Plans(t.Context()))
	if plan := plans[0]; plan.First != pos("3:3") || len(plan.Holes) != 1 || plan.Holes[0].String() != "(3:3..3:5]" || plan.Repeated != 2 || plan.Note == "" {
		t.Errorf("plan %+v, want the near hole, and two entries that come again", plan)
	}
}

// third is the copy of a message of a third cluster.
func third(sequence int) Entry {
	e := message("c", sequence)
	e.From, e.Source = "c", Position{90, int64(sequence)}
	return e
}

// Replication from a stood still while a third cluster wrote to both: on b its messages lie far before a's, and none of them may be skipped.
func TestMessagesFromElsewhereThatLieFarBeforeAreNotSkipped(t *testing.T) {
	for name, order := range map[string]func(a *fakeTopic, c []Entry){
		"right behind": func(a *fakeTopic, c []Entry) {
			for _, e := range c {
				a.append(e)
			}
			for i := range 2_000 {
				a.append(message("p", 2+i))
			}
		},
		"at the end": func(a *fakeTopic, c []Entry) {
			for i := range 2_000 {
				a.append(message("p", 2+i))
			}
			for _, e := range c {
				a.append(e)
			}
		},
	} {
		a, b := newFake("a", 7), newFake("b", 3)
		var c []Entry
		for i := range 900 {
			c = append(c, third(i))
			b.append(c[i])
		}
		a.append(message("p", 0))
		a.append(message("p", 1))
		order(a, c)
		settle(a, b)
		sub(a, "s", 1)
		carryAll(t, a, b)
		if got := b.delivered("s"); len(got) != 2_901 || got[0] != "c/0" || slices.Contains(got, "p/0") {
			t.Errorf("%s: %d messages, the first is %s; want all but p/0", name, len(got), got[0])
		}
	}
}

// A message that was published on b and not sent to a was never delivered there.
func TestWhatTheOldClusterNeverGotIsDelivered(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	b.append(message("q", 0))
	for i := range 20 {
		a.append(message("p", i))
	}
	replicate(a, b, 1<<30)
	sub(a, "s", 20)
	carryAll(t, a, b)
	if got := b.delivered("s"); !slices.Equal(got, []string{"q/0"}) {
		t.Errorf("delivered %v, want the one that a never got", got)
	}
}

func TestASubscriptionMadeBySomebodyElseMeanwhileIsMoved(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 10)
	sub(b, "s", 3)
	b.hidden = true
	p := newPair("persistent://acme/geo/t", a, b)
	if err := p.Apply(t.Context(), ok[[]Plan](t)(p.Plans(t.Context()))); err != nil {
		t.Fatal(err)
	}
	if got := b.delivered("s"); len(got) != 10 {
		t.Errorf("%d messages are left, want 10", len(got))
	}
}

// Two clusters that have nothing to do with each other: a time of publishing alone is no position.
func TestWithoutAnyCopyThereIsNoPosition(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	for i := range 20 {
		a.append(message("p", i))
		b.append(message("q", i))
	}
	sub(a, "s", 5)
	plans, err := newPair("persistent://acme/geo/t", a, b).Plans(t.Context())
	var behind *ErrBehind
	if !errors.As(err, &behind) {
		t.Errorf("plans %+v, error %v; want none", plans, err)
	}
}

func TestAllPartitionsAreCarried(t *testing.T) {
	var pairs []*Pair
	for range 3 * partitionsAtOnce {
		a, b := history(20)
		sub(a, "s", 10, 12)
		pairs = append(pairs, newPair("persistent://acme/geo/t", a, b))
	}
	for _, done := range ok[[]Carried](t)(CarryAll(t.Context(), pairs)) {
		if len(done.Plans) != 1 || len(done.Differences) != 1 || Differences(done.Differences) != "" {
			t.Errorf("%+v", done)
		}
	}
}

func TestReadBackSaysWhatIsWrong(t *testing.T) {
	a, b := history(20)
	sub(a, "s", 10, 12, 13)
	p := newPair("persistent://acme/geo/t", a, b)
	plans := ok[[]Plan](t)(p.Plans(t.Context()))
	for want, setup := range map[string]func(){
		"cluster b does not have it":                            func() { delete(b.subs, "s"); delete(b.cursors, "s") },
		"it begins at 3:4 and should begin at 3:10":             func() { sub(b, "s", 4) },
		"3:10 is acknowledged and should not be":                func() { sub(b, "s", 11) },
		"(3:11..3:13] and 0 more ranges should be acknowledged": func() { sub(b, "s", 10) },
		"3:17 is acknowledged and should not be":                func() { sub(b, "s", 10, 12, 13, 17) },
	} {
		setup()
		if got := Differences(ok[[]Difference](t)(p.ReadBack(t.Context(), plans))); !strings.Contains(got, want) {
			t.Errorf("read back %q, want %q", got, want)
		}
	}
}

// After the flip clients acknowledge and publish. That is told from a subscription that has lost what was acknowledged.
func TestTheSubscriptionsAreLookedAtOnceMoreWhenTheyAreInUse(t *testing.T) {
	var b *fakeTopic
	var p *Pair
	var before []Difference
	carried := func() {
		var a *fakeTopic
		a, b = history(20)
		sub(a, "s", 10, 12, 13)
		p = newPair("persistent://acme/geo/t", a, b)
		plans := ok[[]Plan](t)(p.Plans(t.Context()))
		if err := p.Apply(t.Context(), plans); err != nil {
			t.Fatal(err)
		}
		before = ok[[]Difference](t)(p.ReadBack(t.Context(), plans))
	}
	look := func(name string, backlog, forecast int64, wrong string) {
		t.Helper()
		d := ok[[]Difference](t)(p.Later(t.Context(), before))[0]
		if d.Backlog != backlog || d.Forecast != forecast || !strings.Contains(d.Wrong, wrong) || (d.Wrong == "") != (wrong == "") {
			t.Errorf("%s: %+v; want a backlog of %d of %d entries, and %q", name, d, backlog, forecast, wrong)
		}
	}
	carried()
	look("nothing has happened", 8, 8, "")
	for i := range 5 {
		b.append(message("q", i))
	}
	look("published", 13, 13, "")
	b.roll()
	b.append(message("q", 5))
	b.cursors["s"] = Cursor{MarkDelete: b.entries[17].Position}
	look("acknowledged", 8, 14, "")
	b.trim(b.last)
	look("acknowledged, and the ledger removed", 1, 9, "")

	carried()
	sub(b, "s", 10)
	b.append(message("q", 0))
	look("holes lost", 11, 9, "2 more than if nobody had acknowledged anything")
	delete(b.subs, "s")
	look("unsubscribed", 0, 9, "cluster b does not have it any more")
}

// A message of a third cluster lies far in front on the new one, and behind everything on the old one: that it may be skipped is said, and not called exact.
func TestOriginsThatAreNotSettledAreSaid(t *testing.T) {
	for before, unsettled := range map[int]bool{maxWindow - guard: false, maxWindow + guard: true} {
		a, b := newFake("a", 7), newFake("b", 3)
		late := message("c", 0)
		late.From, late.Source = "c", Position{1, 0}
		b.append(late)
		for i := range before + 10 {
			a.append(message("p", i))
		}
		settle(a, b)
		a.append(late)
		sub(a, "s", before)
		plan := ok[[]Plan](t)(newPair("persistent://t/n/x", a, b).Plans(t.Context()))[0]
		if plan.Unsettled != unsettled || (plan.Note != "") != unsettled || (plan.First == b.entries[0].Position) == unsettled {
			t.Errorf("%d entries in between: %+v", before, plan)
		}
	}
}
