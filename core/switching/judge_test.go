package switching

import (
	"slices"
	"strings"
	"testing"

	"pointsman/core/route"
)

func TestTheModesThatExistAreNamedForAnyOther(t *testing.T) {
	for text, want := range map[string]Mode{"": ModePlanned, "planned": ModePlanned, "drain": ModeDrain, "immediate": ModeImmediate, "failover": ModeFailover} {
		if m, err := ParseMode(text); err != nil || m != want {
			t.Errorf("%q: %q, %v", text, m, err)
		}
	}
	for _, mode := range []string{"teleport", "Immediate"} {
		if _, err := ParseMode(mode); err == nil || !strings.Contains(err.Error(), "planned, drain, immediate and failover") {
			t.Errorf("mode %q: %v", mode, err)
		}
	}
	for _, m := range []Mode{ModePlanned, ModeDrain, ModeImmediate, ModeFailover} {
		if len(Promised(m)) == 0 {
			t.Errorf("mode %s promises nothing", m)
		}
	}
	if len(NotPromised(ModeImmediate)) != 4 || len(NotPromised(ModePlanned)) != 1 || len(NotPromised(ModeFailover)) != 5 {
		t.Error("what is not promised must be said for each mode")
	}
}

func TestTheVerdictOfAPreflightIsTheWorstOfItsFindings(t *testing.T) {
	check := func(want Verdict, verdicts ...Verdict) {
		t.Helper()
		var p Preflight
		for _, v := range verdicts {
			p.Add(Finding{Item: "x", Verdict: v})
		}
		if p.Verdict != want || len(p.Findings) != len(verdicts) {
			t.Errorf("%v: verdict %q of %d findings, want %q", verdicts, p.Verdict, len(p.Findings), want)
		}
	}
	check(Fine, Fine)
	check(Warning, Warning, Fine)
	check(Blocker, Warning, Blocker, Fine, Warning)
}

func TestJudge(t *testing.T) {
	expect := []Member{{"p1", "i1"}, {"p2", "i2"}}
	check := func(what string, acks []Ack, running []Member, waiting, restarted []string, note string) {
		t.Helper()
		o := Judge(expect, acks, running)
		if !slices.Equal(o.Waiting, waiting) || !slices.Equal(o.Restarted, restarted) || o.Done() != (len(waiting) == 0) || !strings.Contains(o.Note(), note) || (note == "") != (o.Note() == "") {
			t.Errorf("%s: %+v, note %q", what, o, o.Note())
		}
	}
	a1, a2 := Ack{Proxy: "p1", Incarnation: "i1", Producers: 1}, Ack{Proxy: "p2", Incarnation: "i2", Consumers: 2, Unresolved: 3}
	both := []Member{{"p1", "i1"}, {"p2", "i2"}}
	check("nobody has reported", nil, both, []string{"p1", "p2"}, nil, "no report from p1, p2")
	check("one has", []Ack{a1}, both, []string{"p2"}, nil, "no report from p2")
	check("both have", []Ack{a1, {Proxy: "p2", Incarnation: "i2"}}, both, nil, nil, "")
	check("a report of an older incarnation does not count", []Ack{a1, {Proxy: "p2", Incarnation: "i0"}}, both, []string{"p2"}, nil, "p2")
	check("who is gone may be cut off and go on with the old map", []Ack{a1}, both[:1], []string{"p2"}, nil, "p2")
	check("a successor proves that the process has ended", []Ack{a1}, []Member{{"p1", "i1"}, {"p2", "i3"}}, nil, []string{"p2"}, "restarted meanwhile: p2")
	check("messages without a receipt are told", []Ack{a1, a2}, both, nil, nil, "3 messages had no receipt")
	if o := Judge(expect, []Ack{a1, a2}, both); o.Producers != 1 || o.Consumers != 2 || o.Unresolved != 3 {
		t.Errorf("sums = %+v", o)
	}
	phases := []Ack{a1, a2}
	for _, phase := range []State{StatePrepared, StateFenced} {
		phases = append(phases, Ack{Phase: phase, Proxy: "p1", Incarnation: "i1", Producers: 7}, Ack{Phase: phase, Proxy: "p2", Incarnation: "i2", Unresolved: 7})
	}
	if o := Judge(expect, phases, both); o.Producers != 1 || o.Consumers != 2 || o.Unresolved != 3 {
		t.Errorf("acks of other phases count: %+v", o)
	}
	check("who has acknowledged other phases only has not reported", phases[2:], both, []string{"p1", "p2"}, nil, "no report from p1, p2")
	o := Judge(expect, nil, both)
	o.Overtaken = "switch x"
	if !o.Done() || o.Note() != "overtaken by switch x" {
		t.Errorf("overtaken: done %v, note %q", o.Done(), o.Note())
	}
}

func TestANamespacePlanNamesWhatIsElsewhereAndWhatBecomesSuperfluous(t *testing.T) {
	table := route.Empty()
	for _, e := range []route.Entry{
		{Topic: "persistent://acme/ns/t1", Cluster: "a", Epoch: 1}, {Topic: "persistent://acme/ns/t2", Cluster: "b", Epoch: 2},
		{Topic: "persistent://acme/ns/t3", Epoch: 3}, {Topic: "persistent://acme/other/t4", Cluster: "a", Epoch: 1},
	} {
		next, err := table.WithEntry(e.Topic, &e)
		if err != nil {
			t.Fatal(err)
		}
		table = next
	}
	p := PlanNamespace(table, "acme/ns", "b", "a")
	if !slices.Equal(p.Topics, []string{"persistent://acme/ns/t1"}) || !p.Rule || !slices.Equal(p.Redundant, []string{"persistent://acme/ns/t1", "persistent://acme/ns/t2"}) || p.Empty() {
		t.Errorf("plan to b = %+v", p)
	}
	if p = PlanNamespace(table, "acme/other", "a", "a"); !p.Empty() {
		t.Errorf("plan of what is there = %+v", p)
	}
}
