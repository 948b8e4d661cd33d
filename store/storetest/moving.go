package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// planned is one planned switch of a topic, as a leader drives it.
type planned struct {
	now   *route.Entry // what the map says
	rec   switching.Record
	other string // the cluster to move to
}

// newPlanned begins with the entry e of the map; nil when a rule has the topic.
func newPlanned(topic string, e *route.Entry, id string, attempt uint32) *planned {
	p := &planned{now: e, other: "b", rec: switching.Record{ID: id, Attempt: attempt, Topic: topic, From: "a", To: "b", Mode: switching.ModePlanned, State: switching.StateRequested}}
	if e != nil && e.Cluster == "b" {
		p.other, p.rec.From, p.rec.To = "a", "b", "a"
	}
	return p
}

// step is the change to the next entry.
func (p *planned) step(to *route.Entry, state switching.State) store.Change {
	rec := p.rec
	rec.Rev++
	rec.State = state
	c := Set(p.rec.Topic, p.now, to)
	c.Switch = &rec
	return c
}

func (p *planned) entry(state route.State) *route.Entry {
	e := route.Entry{Topic: p.rec.Topic, Cluster: p.rec.From, State: state, SwitchID: p.rec.ID, Attempt: p.rec.Attempt}
	if p.now != nil {
		e.Epoch = p.now.Epoch
	}
	return &e
}

func (p *planned) prepare() store.Change {
	return p.step(p.entry(route.StatePrepared), switching.StatePrepared)
}

func (p *planned) fence() store.Change {
	return p.step(p.entry(route.StateFenced), switching.StateFenced)
}

func (p *planned) flip() store.Change {
	e := p.entry(route.StateActive)
	e.Cluster, e.Epoch = p.rec.To, e.Epoch+1
	return p.step(e, switching.StateEvicting)
}

// did takes note of a change that was written.
func (p *planned) did(c store.Change) { p.now, p.rec = c.Entries[0].After, *c.Switch }

func (p *planned) must(t *testing.T, s store.Store, c store.Change) {
	t.Helper()
	mustApply(t, s, c)
	p.did(c)
}

func testMoving(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	topic := Topic(1)
	before := Entry(1, "a", 5)
	mustApply(t, s, Set(topic, nil, before))
	p := newPlanned(topic, before, "s-1", 1)
	check := func(what string) {
		t.Helper()
		if e, ok := mustEntry(t, other, topic); !ok || e != *p.now {
			t.Errorf("%s: Entry reads %+v, want %+v", what, e, *p.now)
		}
		if all, err := other.Entries(context.Background()); err != nil || len(all) != 1 || all[0] != *p.now {
			t.Errorf("%s: Entries reads %+v, %v, want %+v", what, all, err, *p.now)
		}
		if r, err := other.Switch(context.Background(), "s-1"); err != nil || r.State != p.rec.State || r.Rev != p.rec.Rev {
			t.Errorf("%s: the record is %+v, %v, want %+v", what, r, err, p.rec)
		}
	}
	foreign := func(what string) {
		t.Helper()
		// Somebody who reads the entry and does not know of the switch, and one who overlooks it.
		for _, c := range []store.Change{Set(topic, p.now, Entry(1, "b", 9)), Set(topic, p.now, nil)} {
			if err := other.Apply(context.Background(), c); !errors.Is(err, store.ErrMoving) {
				t.Errorf("%s: a plain change: %v, want ErrMoving", what, err)
			}
		}
		if err := other.Apply(context.Background(), Set(topic, before, Entry(1, "b", 9))); !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: a plain change from the entry below: %v, want a conflict", what, err)
		}
		// SW-16: another switch, and another attempt of this one.
		if err := other.Apply(context.Background(), newPlanned(topic, before, "s-2", 1).prepare()); !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: another switch: %v, want a conflict", what, err)
		}
		stolen := newPlanned(topic, p.now, "s-2", 1).flip()
		if err := other.Apply(context.Background(), stolen); !errors.Is(err, store.ErrMoving) {
			t.Errorf("%s: another switch that flips this one's entry: %v, want ErrMoving", what, err)
		}
		late := *p
		e := *p.now
		e.Attempt++
		late.now = &e
		if err := other.Apply(context.Background(), late.flip()); !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: a flip of another attempt: %v, want a conflict", what, err)
		}
		check(what)
	}
	p.must(t, s, p.prepare())
	foreign("prepared")
	p.must(t, other, p.fence()) // another leader
	foreign("fenced")
	p.must(t, s, p.flip())
	check("flipped")
	if p.now.Cluster != "b" || p.now.Epoch != 6 {
		t.Fatalf("the flip leads to %+v", p.now)
	}
	mustApply(t, other, Set(topic, p.now, nil)) // the entry is everybody's again
	if h, err := s.History(context.Background(), 10); err != nil || len(h) != 5 || h[1].Switch != "s-1" || h[2].Switch != "s-1" || h[3].Switch != "s-1" {
		t.Errorf("the history holds %+v, %v", h, err)
	}
}

// testDraining: a topic that drains for days, is taken back half, and ends; it moves all the time.
func testDraining(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	v := Watch(t, other)
	topic := Topic(1)
	p := newPlanned(topic, nil, "s-1", 1)
	p.must(t, s, p.prepare())
	p.must(t, s, p.fence())
	drain := route.Drain{From: "a", Tails: []route.Tail{{Ledger: 7, Entry: 9}, {Ledger: -1, Entry: -1}}}
	for i := range route.MaxDrainSubs {
		drain.Subs = append(drain.Subs, route.DrainSub{Name: fmt.Sprintf("sub\x00\xff;%04d", i)})
	}
	draining := func(state route.State) *route.Entry {
		return &route.Entry{Topic: topic, Cluster: "b", State: state, Epoch: 1, SwitchID: "s-1", Attempt: p.rec.Attempt, Drain: drain.String()}
	}
	step := func(e *route.Entry, state switching.State) {
		t.Helper()
		p.must(t, s, p.step(e, state))
		v.AwaitEntry(t, *e)
		if have, ok := mustEntry(t, other, topic); !ok || have != *e {
			t.Fatalf("%s: Entry reads %+v, want %+v", state, have, *e)
		}
		if all, err := other.Entries(context.Background()); err != nil || len(all) != 1 || all[0] != *e {
			t.Fatalf("%s: Entries reads %+v, %v, want %+v", state, all, err, *e)
		}
		if e.State == route.StateActive {
			return
		}
		for _, c := range []store.Change{Set(topic, e, Entry(1, "b", 9)), Set(topic, e, nil), newPlanned(topic, e, "s-2", 1).prepare()} {
			if err := other.Apply(context.Background(), c); !errors.Is(err, store.ErrMoving) || !strings.Contains(err.Error(), "s-1") {
				t.Errorf("%s: a foreign change: %v, want ErrMoving that names the switch", state, err)
			}
		}
		last := *e
		last.Drain = "a;0;7:9" // all but the drain
		stale := *p
		stale.now = &last
		if err := other.Apply(context.Background(), stale.step(Entry(1, "b", 1), switching.StateDone)); !errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: a step from another drain: %v, want a conflict", state, err)
		}
	}
	step(draining(route.StateDraining), switching.StateEvicting)
	drain.Subs[3].Leaving = true
	step(draining(route.StateDraining), switching.StateDraining)
	drain.Subs[3].Leaving = false
	p.rec.Attempt++
	step(draining(route.StatePrepared), switching.StatePrepared) // the way back
	step(draining(route.StateFenced), switching.StateFenced)
	step(draining(route.StateDraining), switching.StateDraining) // given up
	drain.Subs, drain.Gone = drain.Subs[:1], len(drain.Subs)-1
	step(draining(route.StateDraining), switching.StateDraining)
	drain.Subs = nil
	step(draining(route.StateDraining), switching.StateDraining)
	ended := draining(route.StateActive)
	ended.Drain = ""
	step(ended, switching.StateDone)
	mustApply(t, other, Set(topic, ended, nil)) // the entry is everybody's again
	if h, err := s.History(context.Background(), 1000); err != nil || len(h) < 11 || len(h[9].Entries) == 0 {
		t.Errorf("the history has %d changes, %v", len(h), err)
	}
}

func testMovingAbort(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	v := Watch(t, other)
	mapped := Entry(1, "a", 5)
	mapped.SwitchID = "s-0"
	mustApply(t, s, Set(mapped.Topic, nil, mapped))
	for i, before := range []*route.Entry{mapped, nil} {
		topic := Topic(1 + i)
		for attempt := range uint32(3) {
			p := newPlanned(topic, before, fmt.Sprint("s-", i, "-", attempt), attempt)
			p.must(t, s, p.prepare())
			v.AwaitEntry(t, *p.now)
			if attempt > 0 {
				p.must(t, s, p.fence())
				v.AwaitEntry(t, *p.now)
			}
			p.must(t, s, p.step(before, switching.StateAborted))
			v.AwaitMap(t, []route.Entry{*mapped}, nil)
		}
		if e, ok := mustEntry(t, other, topic); ok != (before != nil) || ok && e != *before {
			t.Errorf("after three aborts: %+v, %v; want %+v", e, ok, before)
		}
	}
}

func testMovingNeighbours(t *testing.T, f *fixture) {
	one, two := Neighbours()
	first := &route.Entry{Topic: one, Cluster: "a"}
	mustApply(t, f.open(), Set(one, nil, first))
	var group sync.WaitGroup
	move, plain, second := f.open(), f.open(), f.open()
	v := Watch(t, f.open())
	group.Add(3)
	go func() { // moves one there and back
		defer group.Done()
		e := first
		for n := range 10 {
			p := newPlanned(one, e, fmt.Sprint("s-", n), 1)
			for _, step := range []func() store.Change{p.prepare, p.fence, p.flip} {
				c := step()
				if err := move.Apply(context.Background(), c); err != nil {
					t.Errorf("round %d: %v", n, err)
					return
				}
				p.did(c)
			}
			e = p.now
		}
		first = e
	}()
	var last *route.Entry
	go func() { // and its neighbour changes
		defer group.Done()
		for epoch := uint64(1); epoch <= 20; epoch++ {
			after := &route.Entry{Topic: two, Cluster: "a", Epoch: epoch}
			if err := plain.Apply(context.Background(), Set(two, last, after)); err != nil {
				t.Errorf("neighbour: %v", err)
				return
			}
			last = after
		}
	}()
	go func() { // as does a topic elsewhere, which begins to move and is aborted
		defer group.Done()
		for n := range 10 {
			p := newPlanned(Topic(7777), nil, fmt.Sprint("t-", n), 1)
			for _, step := range []func() store.Change{p.prepare, func() store.Change { return p.step(nil, switching.StateAborted) }} {
				c := step()
				if err := second.Apply(context.Background(), c); err != nil {
					t.Errorf("elsewhere: %v", err)
					return
				}
				p.did(c)
			}
		}
	}()
	group.Wait()
	if first.Epoch != 10 || first.Cluster != "a" {
		t.Errorf("after 10 moves: %+v", first)
	}
	if all, err := plain.Entries(context.Background()); err != nil || !slices.Equal(sortEntries(all), sortEntries([]route.Entry{*first, *last})) {
		t.Errorf("Entries: %+v, %v; want %+v and %+v", all, err, first, last)
	}
	v.AwaitMap(t, []route.Entry{*first, *last}, nil)
}

// testMovingRace: a plain change writes the bucket and a prepare something else, and yet only one may be from the entry
// before.
func testMovingRace(t *testing.T, f *fixture) {
	one, two := f.open(), f.open()
	var e *route.Entry
	for n := range 40 {
		topic := Topic(n % 8)
		if n%8 == 0 || n%16 == 1 {
			e = nil
		}
		have, ok := mustEntry(t, one, topic)
		e = nil
		if ok {
			e = &have
		}
		p := newPlanned(topic, e, fmt.Sprint("s-", n), 1)
		after := Entry(n%8, "c", 1)
		if e != nil {
			after.Epoch = e.Epoch + 1
		}
		prepare := p.prepare()
		errs := make([]error, 2)
		var group sync.WaitGroup
		group.Add(2)
		go func() {
			defer group.Done()
			errs[0] = one.Apply(context.Background(), prepare)
		}()
		go func() {
			defer group.Done()
			errs[1] = two.Apply(context.Background(), Set(topic, e, after))
		}()
		group.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), store.ErrConflict) {
			t.Fatalf("round %d: prepare: %v, plain: %v; want one conflict", n, errs[0], errs[1])
		}
		if errs[0] == nil {
			p.did(prepare)
			p.must(t, two, p.flip())
		}
	}
}

// testStaleLeader: a leader that was frozen since an earlier attempt, which has ended and been followed by another one that
// looks the same but for its identity.
func testStaleLeader(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	for n, before := range []*route.Entry{nil, Entry(1, "a", 5)} {
		topic := Topic(n)
		if before != nil {
			mustApply(t, s, Set(topic, nil, before))
		}
		id := fmt.Sprint("s-", before != nil)
		p := newPlanned(topic, before, id, 1)
		p.must(t, s, p.prepare())
		p.must(t, s, p.fence())
		frozen := *p
		p.must(t, other, p.step(before, switching.StateAborted))
		p.rec.Attempt = 2
		p.must(t, other, p.prepare())
		p.must(t, other, p.fence())
		frozen.rec.Rev = p.rec.Rev // even one that has read the record anew
		for name, c := range map[string]store.Change{"flip": frozen.flip(), "abort": frozen.step(before, switching.StateAborted)} {
			var conflict *store.ConflictError
			if err := s.Apply(context.Background(), c); !errors.As(err, &conflict) || conflict.Name != topic {
				t.Errorf("a late %s: %v, want a conflict on the topic", name, err)
			}
		}
		if e, ok := mustEntry(t, s, topic); !ok || e != *p.now {
			t.Errorf("after the late writes: %+v, want %+v", e, p.now)
		}
	}
}

// testWatchMoving: every state of a moving topic follows the one before it, however it is stored, or is skipped.
func testWatchMoving(t *testing.T, f *fixture) {
	s, other := f.open(), f.open()
	one, two := Neighbours()
	e := &route.Entry{Topic: one, Cluster: "a", Epoch: 1}
	mustApply(t, s, Set(one, nil, e))
	v := Watch(t, other)
	v.Track(one)
	v.AwaitEntry(t, *e)
	var want []route.Entry
	want = append(want, *e)
	var neighbour *route.Entry
	for n := range 30 {
		p := newPlanned(one, e, fmt.Sprint("s-", n), 1)
		for _, step := range []func() store.Change{p.prepare, p.fence, p.flip} {
			p.must(t, s, step())
			want = append(want, *p.now)
			if n%3 == 0 {
				v.AwaitEntry(t, *p.now)
			} else { // the bucket is read for another reason
				after := &route.Entry{Topic: two, Cluster: "a", Epoch: uint64(len(want))}
				mustApply(t, s, Set(two, neighbour, after))
				neighbour = after
			}
		}
		e = p.now
	}
	v.AwaitEntry(t, *e)
	v.Stop(t)
	at := 0
	for i, got := range v.Steps() {
		for at < len(want) && want[at] != got {
			at++
		}
		if at == len(want) {
			t.Fatalf("step %d goes back: %+v after %+v", i, got, v.Steps()[max(0, i-1)])
		}
	}
	if n := len(v.Steps()); n < 30 {
		t.Errorf("%d of %d steps were seen: the watch skips those that were waited for", n, len(want))
	}
}
