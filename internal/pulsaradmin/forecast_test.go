package pulsaradmin

import (
	"testing"
)

// GR-02: what clients have in hand may come again, and is forecast. An eviction makes the old cluster forget it; what it said before counts, but nothing when all
// was acknowledged since.
func TestTheForecastIsOfWhatConsumersHave(t *testing.T) {
	consumers := func(unacked ...int64) (all []Consumer) {
		for _, n := range unacked {
			all = append(all, Consumer{Unacked: n})
		}
		return all
	}
	for name, c := range map[string]struct {
		kind          string
		silent        bool
		before, after []Consumer
		done          bool // everything is acknowledged
		want          int64
	}{
		"shared, as the broker counts":                    {kind: "Shared", after: consumers(3, 4), want: 7},
		"shared, forgotten":                               {kind: "Shared", before: consumers(40), want: 40},
		"shared, more by now":                             {kind: "Shared", before: consumers(1), after: consumers(3), want: 3},
		"shared, all acknowledged since":                  {kind: "Shared", before: consumers(40), done: true},
		"exclusive":                                       {kind: "Exclusive", after: consumers(0), want: 5 * 10}, // brokers do not count those
		"failover, forgotten":                             {kind: "Failover", before: consumers(0, 0), want: 5 * 10},
		"exclusive, no consumer":                          {kind: "Exclusive"},
		"exclusive, copies that say nothing":              {kind: "Exclusive", silent: true, after: consumers(0), want: 5 * 10},
		"exclusive, copies that say nothing, forgotten":   {kind: "Exclusive", silent: true, before: consumers(0), want: 5 * 10},
		"exclusive, copies that say nothing, no consumer": {kind: "Exclusive", silent: true},
		"shared, copies that say nothing":                 {kind: "Key_Shared", silent: true, after: consumers(7), want: 7},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newFake("a", 7), newFake("b", 3)
			b.silent = c.silent
			for i := range 20 {
				e := message("p", i)
				e.Messages = 10
				a.append(e)
			}
			settle(a, b)
			sub(a, "s", 10, 12, 14) // 10 to 16 were delivered
			if c.done {
				sub(a, "s", 20)
			}
			set := func(consumers []Consumer, read Position) {
				s, cursor := a.subs["s"], a.cursors["s"]
				s.Type, s.Consumers, cursor.Read = c.kind, consumers, read
				a.subs["s"], a.cursors["s"] = s, cursor
			}
			p := newPair("persistent://t/n/x", a, b)
			if c.before != nil {
				set(c.before, a.entries[17].Position)
				for range 2 { // a second time, everything is forgotten already
					if err := p.NoteGiven(t.Context()); err != nil {
						t.Fatal(err)
					}
					set(nil, a.entries[10].Position)
				}
			}
			read := a.entries[17].Position
			if c.after == nil {
				read = a.entries[10].Position
			}
			set(c.after, read)
			plans, err := p.Plans(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if plan := plans[0]; plan.Unacked != c.want || plan.By.Bare() != c.silent || (plan.Note != "") != c.silent {
				t.Errorf("plan %+v; want %d in hand, and a note if copies do not say where they come from", plan, c.want)
			}
		})
	}
}

// One old message that nobody acknowledges has thousands of acknowledged ones behind it, which do not come again: not all of them are read, and none is counted.
func TestTheForecastBehindAnOldMessageReadsLittle(t *testing.T) {
	a, b := newFake("a", 7), newFake("b", 3)
	for i := range 12_000 {
		e := message("p", i)
		e.Messages = 10
		a.append(e)
	}
	settle(a, b)
	sub(a, "s", 0)
	s, cursor := a.subs["s"], a.cursors["s"]
	s.Type, s.Consumers, cursor.Read = "Exclusive", []Consumer{{}}, a.entries[11_900].Position
	cursor.Acked = []Range{{a.entries[0].Position, a.entries[5_000].Position}, {a.entries[5_002].Position, a.entries[11_800].Position}}
	a.subs["s"], a.cursors["s"] = s, cursor
	p := newPair("persistent://t/n/x", a, b)
	plans, err := p.Plans(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The old one and two more count as one message each, being far from what was delivered last.
	if n, want := plans[0].Unacked, int64(1+2+99*10); n != want {
		t.Errorf("%d messages in hand, want %d", n, want)
	}
	if n := a.reads; n > 50 {
		t.Errorf("cluster a was read %d times", n)
	}
}
