package route

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestADrainHasOneText(t *testing.T) {
	is := func(d Drain, want string) {
		t.Helper()
		if got := d.String(); got != want {
			t.Errorf("%+v is written %q, want %q", d, got, want)
		}
		back, err := ParseDrain(want)
		if err != nil {
			t.Errorf("%q: %v", want, err)
			return
		}
		if back.String() != want || !reflect.DeepEqual(back.Tails, d.Tails) || len(back.Subs) != len(d.Subs) {
			t.Errorf("%q is read as %+v", want, back)
		}
	}
	is(Drain{From: "a"}, "a;0;")
	is(Drain{From: "a", Gone: 3, Tails: []Tail{{12, 5}, {-1, -1}}}, "a;3;12:5,-1:-1")
	is(Drain{From: "a", Subs: []DrainSub{{Name: "z"}, {Name: "b", Leaving: true}}, Tails: []Tail{{math.MaxInt64, math.MinInt64}}},
		"a;0;9223372036854775807:-9223372036854775808;>b;=z")
	is(Drain{From: "a;b%", Subs: []DrainSub{{Name: ""}, {Name: "\x00\xff;=x%"}, {Name: "ä b"}}}, "a%3Bb%25;0;;=;=%00%FF%3B=x%25;=%C3%A4%20b")
}

func TestADrainThatIsWrittenOtherwiseIsRefused(t *testing.T) {
	for _, text := range []string{"", "a", "a;0", ";0;", "a;00;", "a;-1;", "a;x;", "a;0;1", "a;0;1:", "a;0;01:1", "a;0;1:1,", "a;0;;", "a;0;;x", "a;0;;=b;=a", "a;0;;=a;=a", "a;0;;=a;>a",
		"a;0;;=%41", "a;0;;=%0", "a;0;;=%0g", "a;0;;=%c3", "a;0;;= ", "a;0;;=\x00", "a;0;;=ä", "a;0;99999999999999999999:1", "a;0;;=" + strings.Repeat("x", MaxDrainText)} {
		if d, err := ParseDrain(text); err == nil {
			t.Errorf("%q is read as %+v", clip(text), d)
		}
	}
	many := Drain{From: "a"}
	for i := range MaxDrainSubs + 1 {
		many.Subs = append(many.Subs, DrainSub{Name: fmt.Sprintf("%04d", i)})
	}
	if err := many.Check(); err == nil || !strings.Contains(err.Error(), "1001 subscriptions, more than the 1000") {
		t.Errorf("too many subscriptions: %v", err)
	}
	many.Subs = many.Subs[1:]
	if err := many.Check(); err != nil {
		t.Error(err)
	}
}

func TestLookingIntoADrainAgreesWithReadingIt(t *testing.T) {
	check := func(d Drain, others ...string) {
		t.Helper()
		text := d.String()
		for _, s := range d.Subs {
			if listed, leaving := DrainHas(text, s.Name); !listed || leaving != s.Leaving {
				t.Errorf("%q has %q: %v, leaving %v", text, s.Name, listed, leaving)
			}
		}
		for _, other := range others {
			_, want := d.Find(other)
			if listed, _ := DrainHas(text, other); listed != want {
				t.Errorf("%q has %q: %v", text, other, listed)
			}
		}
		for i, want := range d.Tails {
			if got, ok := DrainTail(text, i); !ok || got != want {
				t.Errorf("%q: tail %d is %v %v", text, i, got, ok)
			}
		}
		for _, i := range []int{-1, len(d.Tails)} {
			if got, ok := DrainTail(text, i); ok {
				t.Errorf("%q: tail %d is %v", text, i, got)
			}
		}
		if got := DrainFrom(text); got != d.From {
			t.Errorf("%q drains %q", text, got)
		}
	}
	odd := []string{"", "a", "aa", "b", ";", "%", "%3B", "%25", "=a", ">a", "\xff", "0", "1:1", "ä"}
	check(Drain{From: "a"}, odd...)
	check(Drain{From: "x%;", Subs: []DrainSub{{Name: "", Leaving: true}, {Name: "%3B"}, {Name: ";", Leaving: true}, {Name: "aa"}, {Name: "ä"}}, Tails: []Tail{{1, 2}, {-1, -1}, {3, 4}}}, odd...)
	if listed, leaving := DrainHas("", ""); listed || leaving || DrainFrom("") != "" {
		t.Error("something drains that does not")
	}
	if _, ok := DrainTail("", 0); ok {
		t.Error("what does not drain has a tail")
	}
	big := Drain{From: "a", Tails: []Tail{{1, 2}}}
	for i := range MaxDrainSubs {
		big.Subs = append(big.Subs, DrainSub{Name: fmt.Sprintf("subscription %04d", i)})
	}
	text := big.String()
	if n := testing.AllocsPerRun(100, func() {
		DrainHas(text, "subscription 0999")
		DrainTail(text, 0)
		DrainFrom(text)
	}); n != 0 {
		t.Errorf("looking into a drain allocates %v times", n)
	}
}

func TestAnEntryDrainsOnlyAsAWhole(t *testing.T) {
	x := "persistent://t/ns/x"
	drain := Drain{From: "a", Subs: []DrainSub{{Name: "s"}}, Tails: []Tail{{3, 4}}}.String()
	fits := func(e Entry, want string) {
		t.Helper()
		_, _, err := Empty().With(bucketed(e), nil)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v: %v, want %q", e, err, want)
		}
	}
	good := Entry{Topic: x, Cluster: "b", State: StateDraining, Epoch: 2, SwitchID: "s1", Attempt: 1, Drain: drain}
	with := func(change func(*Entry)) Entry { e := good; change(&e); return e }
	fits(good, "")
	fits(with(func(e *Entry) { e.State = StatePrepared }), "")
	fits(with(func(e *Entry) { e.State = StateFenced }), "")
	fits(with(func(e *Entry) { e.State = StateActive }), "active and drains")
	fits(with(func(e *Entry) { e.Drain = "" }), "does not say what")
	fits(with(func(e *Entry) { e.Drain = "a;0" }), "fewer than 3")
	fits(with(func(e *Entry) { e.Cluster = "a" }), "drains a into itself")
}

func TestTheTextOfADrainCountsInEverything(t *testing.T) {
	x := "persistent://t/ns/x"
	e := Entry{Topic: x, Cluster: "b", State: StateDraining, Epoch: 2, SwitchID: "s1", Attempt: 1, Drain: "a;0;3:4;=s"}
	before := mustWith(t, Empty(), nil, e)
	if d := before.Decide(mustTopic(t, x+"-partition-1"), ""); d.Drain != e.Drain || d.SwitchID != "s1" || d.Cluster != "b" || d.State != StateDraining {
		t.Errorf("decided %+v", d)
	}
	if got, ok := before.Entry(x); !ok || got != e {
		t.Errorf("stored %+v", got)
	}
	e.Drain = "a;0;3:4;>s"
	after, changes, err := before.With(bucketed(e), nil)
	if err != nil || !slices.Equal(changes.Topics, []string{x}) {
		t.Errorf("changes %v, %v", changes, err)
	}
	if after.Digest() == before.Digest() {
		t.Error("the digest does not see the drain")
	}
	e.Drain = Drain{From: "a", Subs: []DrainSub{{Name: strings.Repeat("x", MaxDrainText-10)}}}.String()
	if got, ok := mustWith(t, Empty(), nil, e).Entry(x); !ok || got != e {
		t.Error("a long drain does not come back")
	}
}

func TestASubscriptionIsAtHomeWhereItStillReads(t *testing.T) {
	d := Decision{Cluster: "b", State: StateDraining, Drain: Drain{From: "a", Subs: []DrainSub{{Name: "s"}, {Name: "t", Leaving: true}}}.String()}
	is := func(d Decision, sub, want string, wantWait bool) {
		t.Helper()
		if got, wait := d.Home(sub); got != want || wait != wantWait {
			t.Errorf("%q is at home on %s, waits %v; want %s, %v", sub, got, wait, want, wantWait)
		}
	}
	is(d, "s", "a", false)
	is(d, "t", "a", true)
	is(d, "u", "b", false)
	is(Decision{Cluster: "b"}, "s", "b", false)
}

func FuzzParseDrain(f *testing.F) {
	f.Add("a;0;12:5,-1:-1;=b;>c", "b")
	f.Add("a%3B;7;;=%00", "\x00")
	f.Add("a;0;;=a;>a", "a")
	f.Fuzz(func(t *testing.T, text, sub string) {
		// Whatever the bytes are: a drain made of them comes back.
		made := Drain{From: text, Gone: len(sub), Subs: []DrainSub{{Name: sub, Leaving: true}}, Tails: []Tail{{int64(len(text)), -1}}}
		if made.Check() == nil {
			if back, err := ParseDrain(made.String()); err != nil || !reflect.DeepEqual(back, made) {
				t.Fatalf("%+v came back as %+v, %v", made, back, err)
			}
		}
		d, err := ParseDrain(text)
		if err != nil {
			DrainHas(text, sub) // must not panic
			DrainTail(text, 1)
			DrainFrom(text)
			return
		}
		if d.String() != text {
			t.Fatalf("%q is read as %q", text, d.String())
		}
		at, want := d.Find(sub)
		listed, leaving := DrainHas(text, sub)
		if listed != want || leaving != (want && d.Subs[at].Leaving) {
			t.Fatalf("%q has %q: %v %v, want %v", text, sub, listed, leaving, want)
		}
		for i := range len(d.Tails) + 1 {
			if tail, ok := DrainTail(text, i); ok != (i < len(d.Tails)) || ok && tail != d.Tails[i] {
				t.Fatalf("%q: tail %d is %v %v", text, i, tail, ok)
			}
		}
	})
}
