package switching

import (
	"testing"
)

// configs are the bounded worlds in which no rule may be broken. Those that are not deep take a minute of one processor together and
// are part of every run of the tests; `make model` goes through all of them.
var configs = []config{
	{name: "nothing goes wrong", proxies: 2, messages: 2, live: true},
	{name: "a consumer", proxies: 2, messages: 2, consumer: true, live: true},
	{name: "a crash", proxies: 1, messages: 2, live: true, left: budget{crash: 1}},
	{name: "a crash with a consumer", proxies: 1, messages: 1, consumer: true, live: true, left: budget{crash: 1}},
	{name: "a cut-off proxy", proxies: 2, messages: 2, live: true, left: budget{cut: 1}},
	{name: "a cut-off proxy with a consumer", proxies: 1, messages: 2, consumer: true, live: true, left: budget{cut: 1}},
	{name: "a lost leg", proxies: 2, messages: 2, live: true, left: budget{leg: 1}},
	{name: "a client that moves", proxies: 2, messages: 2, live: true, left: budget{move: 1}},
	{name: "a new proxy", proxies: 2, messages: 1, joiner: true, live: true, left: budget{move: 1}},
	{name: "a leader change", proxies: 1, messages: 2, live: true, left: budget{change: 1}},
	{name: "a late cursor", proxies: 1, messages: 1, consumer: true, live: true, left: budget{change: 1}},
	{name: "two leader changes and an operator", proxies: 1, messages: 0, live: true, left: budget{change: 2, wish: 1, unknown: 1}},
	{name: "unknown outcomes", proxies: 1, messages: 1, live: true, left: budget{unknown: 2, again: 1}},
	{name: "a second attempt", proxies: 2, messages: 1, live: true, left: budget{again: 1}},
	{name: "a second attempt with cursors", proxies: 1, messages: 1, consumer: true, live: true, left: budget{again: 1}},
	{name: "a second attempt under a frozen leader", proxies: 1, messages: 1, live: true, left: budget{change: 1, again: 1}},
	{name: "surveys that take their time", proxies: 2, messages: 1, slow: true, left: budget{cut: 1}},
	{name: "surveys that take their time, and a crash", proxies: 1, messages: 1, slow: true, left: budget{crash: 1}},
	{name: "a record that lags", proxies: 1, messages: 0, mutant: recordLags, left: budget{change: 1, wish: 1}},
	{name: "a forgotten member", proxies: 2, messages: 1, left: budget{crash: 1, forget: 1}},
	{name: "a map that is too old", proxies: 2, messages: 1, left: budget{cut: 1, age: 1}},

	{name: "a drain with a client that moves", proxies: 2, messages: 1, drain: true, consumer: true, live: true, left: budget{move: 1}},
	{name: "two subscriptions that drain", proxies: 1, messages: 2, drain: true, two: true, live: true},
	{name: "a drain in which somebody stays connected", proxies: 1, messages: 2, drain: true, consumer: true, live: true, left: budget{late: 1}},
	{name: "a drain in which somebody seeks", proxies: 1, messages: 1, drain: true, consumer: true, live: true, left: budget{seek: 1}},
	{name: "a drain with a cut-off proxy", proxies: 2, messages: 1, drain: true, consumer: true, live: true, left: budget{cut: 1}},
	{name: "a drain with a crash", proxies: 1, messages: 1, drain: true, consumer: true, live: true, left: budget{crash: 1}},
	{name: "a drain under two leaders", proxies: 1, messages: 0, drain: true, live: true, left: budget{change: 1, unknown: 1}},
	{name: "a drain that is taken back", proxies: 1, messages: 2, drain: true, consumer: true, live: true, left: budget{back: 1}},
	{name: "a drain that is taken back, with a new subscription", proxies: 1, messages: 1, drain: true, consumer: true, fresh: true, live: true, left: budget{back: 1}},
	{name: "a drain that is taken back, and drains again", proxies: 1, messages: 1, drain: true, consumer: true, live: true, left: budget{back: 1, again: 1}},
	{name: "a drain that is taken back and drains again, with a new subscription", proxies: 1, messages: 1, drain: true, consumer: true, fresh: true, left: budget{back: 1, again: 1}},
	{name: "a drain that is taken back and drains again, to a cluster that has had the topic", proxies: 1, messages: 1, drain: true, consumer: true, leftover: true, left: budget{back: 1, again: 1}},
	{name: "a drain that is taken back and drains again, and a leader that comes late", proxies: 1, messages: 1, drain: true, consumer: true, lateChange: true, left: budget{change: 1, back: 1, again: 1}},
	{name: "a drain that is taken back by a cut-off proxy", proxies: 1, messages: 1, drain: true, consumer: true, live: true, left: budget{cut: 1, back: 1}},
	{name: "a drain that is taken back with a lost leg", proxies: 1, messages: 1, drain: true, consumer: true, live: true, left: budget{leg: 1, back: 1}},

	{name: "crash and cut", proxies: 1, messages: 1, left: budget{crash: 1, cut: 1}, live: true, deep: true},
	{name: "two crashes", proxies: 1, messages: 1, left: budget{crash: 2}, live: true, deep: true},
	{name: "two cuts", proxies: 1, messages: 2, left: budget{cut: 2}, live: true, deep: true},
	{name: "cut and leader change", proxies: 1, messages: 1, left: budget{cut: 1, change: 1}, deep: true},
	{name: "crash and leader change", proxies: 1, messages: 1, left: budget{crash: 1, change: 1}, deep: true},
	{name: "cut and move", proxies: 2, messages: 1, left: budget{cut: 1, move: 1}, deep: true},
	{name: "crash and move", proxies: 2, messages: 1, left: budget{crash: 1, move: 1}, deep: true},
	{name: "cut, second attempt", proxies: 1, messages: 1, left: budget{cut: 1, again: 1}, deep: true},
	{name: "crash, second attempt", proxies: 1, messages: 1, left: budget{crash: 1, again: 1}, deep: true},
	{name: "three proxies, crash", proxies: 3, messages: 1, left: budget{crash: 1}, deep: true},
	{name: "three proxies, cut", proxies: 3, messages: 1, left: budget{cut: 1}, deep: true},
	{name: "crash with a consumer, two proxies", proxies: 2, messages: 1, consumer: true, left: budget{crash: 1}, deep: true},
	{name: "cut with a late cursor", proxies: 1, messages: 1, consumer: true, left: budget{cut: 1, change: 1}, deep: true},
	{name: "a drain with a cut-off proxy, and a consumer that moves", proxies: 2, messages: 1, drain: true, consumer: true, left: budget{move: 1, cut: 1}, deep: true},
	{name: "a drain that is taken back under two leaders", proxies: 1, messages: 0, drain: true, live: true, left: budget{change: 1, back: 1, wish: 1}, deep: true},
	{name: "a drain of one message under two leaders", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{change: 1}, deep: true},
	{name: "a drain that is taken back under two leaders, of one message", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{change: 1, back: 1}, deep: true},
	{name: "a drain that is taken back and crashes", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{crash: 1, back: 1}, deep: true},
	{name: "a drain of one message that is taken back and drains again, under two leaders", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{change: 1, back: 1, again: 1}, deep: true},
	{name: "a drain that is taken back and drains again, with a cut-off proxy", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{cut: 1, back: 1, again: 1}, deep: true},
	{name: "a drain that is taken back and drains again, with a crash", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{crash: 1, back: 1, again: 1}, deep: true},
	{name: "a drain that is taken back and drains again, with a lost leg", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{leg: 1, back: 1, again: 1}, deep: true},
	{name: "a drain that is taken back and drains again, unless its operator aborts", proxies: 1, messages: 1, drain: true, consumer: true, left: budget{back: 1, again: 1, wish: 1}, deep: true},
	{name: "a drain that is taken back, of two subscriptions", proxies: 2, messages: 2, drain: true, two: true, left: budget{back: 1}, deep: true},
}

// testLimit bounds the states of one world in the tests; none of those that are not deep comes near it without the race detector.
// The other two keep make model below 2 GiB.
const (
	testLimit     = 4_000_000
	deepLimit     = 25_000_000
	deepLiveLimit = 8_000_000
	raceLimit     = 10_000
)

func TestNoInterleavingBreaksTheProtocol(t *testing.T) {
	var coverage [kinds]int
	cut := false
	for _, c := range configs {
		if c.deep && !modelDeep {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			limit := testLimit
			switch {
			case raceEnabled:
				limit = raceLimit
			case modelDeep && c.live:
				limit = deepLiveLimit
			case modelDeep:
				limit = deepLimit
			}
			s := newSearch(c, limit)
			began := cpu()
			bad := s.run()
			t.Log(s.summary(cpu() - began))
			cut = cut || s.cut
			if bad != "" {
				t.Errorf("%s\n%s", bad, s.trace)
			}
			for k, n := range s.coverage {
				coverage[k] += n
			}
			if s.cut && !raceEnabled && !modelDeep {
				t.Errorf("the world has more than %d states: make it smaller, or deep", limit)
			}
		})
	}
	// I9: a model in which something never happens proves nothing of it.
	for k, n := range coverage {
		if kind(k) != evLocalUndo && n == 0 && !cut {
			t.Errorf("%q never happened", kindNames[k])
		}
	}
}
