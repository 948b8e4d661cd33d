//go:build linux

package bench

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// coverageByCounting is the confidence of the interval from the (k+1)th smallest to the (k+1)th largest of n values: the share of
// the 2ⁿ equally likely patterns of values below and above the median in which it lies between them.
func coverageByCounting(n, k int) float64 {
	hit := 0
	for pattern := range 1 << n {
		below := 0
		for i := range n {
			below += pattern >> i & 1
		}
		if below > k && below < n-k {
			hit++
		}
	}
	return float64(hit) / float64(int(1)<<n)
}

func TestTheIntervalOfAMedianCoversAtLeast95PercentOrIsTheWholeRange(t *testing.T) {
	for n := 1; n <= 16; n++ {
		k, coverage := medianInterval(n)
		if want := coverageByCounting(n, k); math.Abs(coverage-want) > 1e-9 {
			t.Errorf("%d values, from the %dth: coverage %v, counted %v", n, k+1, coverage, want)
		}
		if n >= 6 && coverage < 0.95 {
			t.Errorf("%d values: coverage %v", n, coverage)
		}
		if n < 6 && k != 0 {
			t.Errorf("%d values are too few for anything but the range, and %d were cut off", n, k)
		}
		if k+1 < (n+1)/2 && coverageByCounting(n, k+1) >= 0.95 {
			t.Errorf("%d values: a narrower interval covers 95 %% as well", n)
		}
	}
}

func TestRatiosArePairedByRound(t *testing.T) {
	// The machine was ten times slower in the second round; each pair says 0.5.
	r, ok := pairedRatio([]float64{1, 10, 1}, []float64{2, 20, 2})
	if !ok || r.Median != 0.5 || r.Lo != 0.5 || r.Hi != 0.5 || r.Pairs != 3 {
		t.Errorf("%+v", r)
	}
	if r, ok = pairedRatio([]float64{1, 2, 3}, []float64{0, -1, 3}); !ok || r.Pairs != 1 || r.Median != 1 {
		t.Errorf("pairs without a positive value must not count: %+v", r)
	}
	if _, ok = pairedRatio([]float64{0}, []float64{1}); ok {
		t.Error("a ratio of nothing")
	}
}

func TestLessThanTenPercentIsATie(t *testing.T) {
	for ratio, want := range map[float64]bool{0.89: false, 0.91: true, 1: true, 1.09: true, 1.11: false} {
		if got := (Ratio{Median: ratio}).Tie(); got != want {
			t.Errorf("%v: tie %v", ratio, got)
		}
	}
}

func TestTheStateIsReadWhateverTheProcessIsCalled(t *testing.T) {
	line := "77 (a) b (c 1 2) S 1 77 77 0 -1 4194304 100 0 0 0 250 50 9 9 20 0 4 0 100 1 1"
	if state := processState([]byte(line)); state != 'S' {
		t.Errorf("state %q", state)
	}
	if state := processState(nil); state != 0 {
		t.Errorf("state %q of nothing", state)
	}
}

func TestThisProcessCanBeMeasured(t *testing.T) {
	before, err := processUsage(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if before.switches == 0 {
		t.Error("no context switch so far: are they read?")
	}
	var own syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &own); err != nil {
		t.Fatal(err)
	}
	after, err := processUsage(os.Getpid()) // reading is work
	if used := time.Duration(own.Utime.Nano() + own.Stime.Nano()); err != nil || after.cpu <= before.cpu || before.cpu > used+2*tickLength || after.cpu < used-2*tickLength {
		t.Errorf("%s, then %s, and %s in between: %v", before.cpu, after.cpu, used, err)
	}
	const nobody = 1 << 22 // beyond the largest process id
	if u, err := processUsage(nobody); err == nil {
		t.Errorf("a process that there is not used %s", u.cpu)
	}
	f, err := processFootprint(os.Getpid())
	if err != nil || f.RSS < 1000 || f.PSS < 1000 || f.PSS > f.RSS || f.Files < 3 {
		t.Errorf("%+v, %v", f, err)
	}
	if busy, err := machineBusy(); err != nil || busy < before.cpu {
		t.Errorf("the machine was busy for %s, this process alone for %s: %v", busy, before.cpu, err)
	}
}

func TestConnectionsAreCountedBetweenTwoProcesses(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1000 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 20 1
   1: 0100007F:2001 0100007F:1000 01 00000000:00000000 00:00000000 00000000     0        0 10 1
   2: 0100007F:1000 0100007F:2001 01 00000000:00000000 00:00000000 00000000     0        0 21 1
   3: 0100007F:2002 0100007F:1000 06 00000000:00000000 00:00000000 00000000     0        0 0 1
   4: 0100007F:2003 0100007F:1000 01 00000000:00000000 00:00000000 00000000     0        0 30 1
   5: 0100007F:1000 0100007F:2003 01 00000000:00000000 00:00000000 00000000     0        0 22 1
   6: 0100007F:2004 0100007F:9000 01 00000000:00000000 00:00000000 00000000     0        0 11 1
   7: 0100007F:1000 0100007F:2005 01 00000000:00000000 00:00000000 00000000     0        0 23 1
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF00000100007F:2005 0000000000000000FFFF00000100007F:1000 01 00000000:00000000 00:00000000 00000000     0        0 12 1
`
	theirs := map[string]bool{"20": true, "21": true, "22": true, "23": true}
	if n := countConnections(table, map[string]bool{"10": true, "11": true, "12": true}, theirs); n != 2 {
		t.Errorf("%d connections, want 2: one of each family, and none in TIME_WAIT, of a third process, or to another one", n)
	}
}

// result is a made-up comparison.
func result() *Result {
	r := &Result{Params: Params{Scenario: "rate", Size: 1024, Connections: 50, Rate: 1000}.withDefaults(), Skipped: map[string]string{"haproxy64k": "no haproxy"}}
	for round, slow := range []float64{1, 3} {
		for name, p50 := range map[string]float64{"direct": 50, "pointsman": 70, "haproxy": 90} {
			r.Runs = append(r.Runs, Run{Target: name, Round: round, Measure: map[string]float64{"p50": p50 * slow, "cpu_per_message": p50 * slow}})
		}
	}
	r.sum()
	return r
}

func TestAddedLatencyIsCountedFromDirectInTheSameRound(t *testing.T) {
	r := result()
	if got := r.Ratios["haproxy"]["added_p50"]; got.Median != 0.5 || got.Pairs != 2 {
		t.Errorf("added p50 of pointsman ÷ haproxy: %+v, want 20/40 in both rounds", got)
	}
	if _, ok := r.Ratios["direct"]["added_p50"]; ok {
		t.Error("direct adds nothing to itself")
	}
}

func TestTheLineForScriptsHasRatiosAndSpreads(t *testing.T) {
	line, err := result().Line()
	if err != nil || strings.Contains(line, "\n") {
		t.Fatal(line, err)
	}
	var got struct {
		Scenario string
		Ratios   map[string]struct {
			AddedP50 float64 `json:"added_p50"`
			Spread   []float64
			CPU      float64   `json:"cpu_per_message"`
			CPUs     []float64 `json:"cpu_per_message_spread"`
		}
	}
	if err := json.Unmarshal([]byte(line), &got); err != nil {
		t.Fatal(err)
	}
	h := got.Ratios["haproxy"]
	if got.Scenario != "rate" || h.AddedP50 != 0.5 || !slices.Equal(h.Spread, []float64{0.5, 0.5}) || h.CPU != 0.7778 || len(h.CPUs) != 2 {
		t.Errorf("%s\n%+v", line, got)
	}
}

func TestTheTableNamesWhatWasSkipped(t *testing.T) {
	table := result().Table()
	for _, want := range []string{"| rate 1000/s 1KiB 50 connections |", "0.50 (0.50–0.50)", "**haproxy64k was skipped**: no haproxy"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
}

func TestEveryGoalBelongsToACaseOfTheStandardSet(t *testing.T) {
	peers := map[string][]string{}
	for _, c := range append(standardSet(), slowSet()...) {
		label := c.params.withDefaults().Label()
		if peers[label] != nil {
			t.Errorf("the case %q is there twice", label)
		}
		peers[label] = c.names
	}
	for _, g := range goals() {
		names, ok := peers[g.label]
		if !ok {
			t.Errorf("the goal for %q is never measured", g.label)
		}
		for _, p := range g.peers {
			if !slices.Contains(names, p) {
				t.Errorf("%s: %s is not measured, only %v", g.label, p, names)
			}
		}
	}
}

func TestGoalsAreComparedWithTheBestPeer(t *testing.T) {
	r := &Result{Params: Params{Scenario: "produce", Size: 100, Connections: 50}.withDefaults()}
	held := &Result{Params: Params{Scenario: "hold"}.withDefaults()}
	for round := range pairsWanted {
		for name, v := range map[string]float64{"pointsman": 8, "haproxy": 20, "haproxy64k": 10} {
			r.Runs = append(r.Runs, Run{Target: name, Round: round, Measure: map[string]float64{"cpu_per_message": v}})
		}
		held.Runs = append(held.Runs, Run{Target: "pointsman", Round: round, Measure: map[string]float64{"kib_per_connection": float64(round)}})
	}
	r.sum()
	table := goalTable([]*Result{r, held})
	for _, want := range []string{"≤ 1.00 × haproxy64k | 0.80 (0.80–0.80) | 10 | met |", "≤ 3.00 KiB | 4.50 (1.00–8.00) | 10 | **missed** |"} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
	for value, want := range map[float64]string{1: "met", 1.05: "tie", 1.2: "**missed**"} {
		if got := verdict(Ratio{Median: value, Pairs: pairsWanted}, 1); got != want {
			t.Errorf("%v of 1: %s", value, got)
		}
		if got, want := verdict(Ratio{Median: value, Pairs: pairsWanted - 1}, 1), "open ("+want+" so far)"; got != want {
			t.Errorf("%v of 1 with a pair too few: %s, want %s", value, got, want)
		}
	}
}

// Arithmetic with what runs took on two busy cores beyond their windows, so that the set cannot outgrow its time unnoticed.
func TestTheStandardSetFitsItsTime(t *testing.T) {
	const limit = 20 * time.Minute
	const (
		setUp     = 250 * time.Millisecond // connections, and the end of them
		warmRack  = 45 * time.Second       // broker and targets, the official proxy's compilers
		startJava = 8 * time.Second
		start     = 500 * time.Millisecond
		first     = 700 * time.Millisecond // the traffic before a footprint, and its settling
		hold      = 2 * time.Second        // to set thousands of connections up
		settle    = 1500 * time.Millisecond
	)
	var round time.Duration
	for _, c := range standardSet() {
		runs := len(c.names)
		if c.params.Scenario == "rate" {
			runs++ // direct
		}
		round += time.Duration(runs) * (c.params.Warmup + c.params.Duration + setUp)
	}
	if total := warmRack + pairsWanted*round; total > limit-slowTime-restTime {
		t.Errorf("%d rounds of %s and %s of warming up take %s, and there are %s", pairsWanted, round, warmRack, total, limit-slowTime-restTime)
	}
	var slow time.Duration
	for _, c := range slowSet() {
		for _, name := range c.names {
			one := start + first + c.params.Warmup + c.params.Duration
			switch c.params.Scenario {
			case "hold":
				one += hold
			case "stall":
				one += c.params.Duration/2 + settle
			}
			switch name {
			case "pointsman":
				slow += pairsWanted * one
			case "java-proxy":
				slow += time.Duration(c.peerRounds) * (one + startJava)
			default:
				slow += time.Duration(c.peerRounds) * one
			}
		}
	}
	if slow > slowTime {
		t.Errorf("the slow set takes %s, and has %s", slow, slowTime)
	}
	t.Logf("a round %s, the slow set %s", round, slow)
}

func TestTheLineThroughTheSizesIsExtended(t *testing.T) {
	r := SessionsResult{Sizes: []int{1024, 2048, 4096}, MiB: []float64{5, 7, 11}} // 3 MiB and 2 KiB each
	r.fit()
	if math.Abs(r.PerKiB-2) > 1e-9 || math.Abs(r.Fixed-3) > 1e-9 || r.Deviation > 1e-9 || math.Abs(r.Projected-(3+50_000*2/1024.)) > 1e-9 {
		t.Errorf("%+v", r)
	}
	if table := SessionsTable([]SessionsResult{r}); !strings.Contains(table, "2.00 KiB per connection and 3.00 MiB fixed") || !strings.Contains(table, "Projection, not measured: 101 MiB for 50000") {
		t.Error(table)
	}
	r.MiB[1] = 14
	if r.fit(); r.Deviation < 0.3 {
		t.Errorf("7 MiB off the line, and the deviation is %v", r.Deviation)
	}
	if _, err := Sessions(nil, []int{1, 2}, false, 1, nil); err == nil {
		t.Error("a line through two sizes")
	}
}

func TestTheBusiestSecondMayBeginAnywhere(t *testing.T) {
	var times []time.Time
	for _, ms := range []int{0, 900, 1100, 1200, 1899, 1900, 5000} {
		times = append(times, time.UnixMilli(int64(ms)))
	}
	if n := busiest(times); n != 4 {
		t.Errorf("%d in the busiest second, want the 4 from .9 to 1.899", n)
	}
	if n := busiest(nil); n != 0 {
		t.Errorf("%d of nothing", n)
	}
}

func TestAFamilyOfMetricsIsSummedUp(t *testing.T) {
	const m = metrics("# HELP a_b help\na_b{loop=\"0\",le=\"1\"} 2\na_b{loop=\"1\",le=\"1\"} 3\na_b{loop=\"1\",le=\"+Inf\"} 7\na_bc 100\nplain 1.5\n")
	for _, c := range []struct {
		family, label string
		want          float64
	}{{"a_b", "", 12}, {"a_b", `le="1"`, 5}, {"a_b", `loop="1"`, 10}, {"plain", "", 1.5}} {
		if got, err := m.sum(c.family, c.label); err != nil || got != c.want {
			t.Errorf("%s %s: %v, %v, want %v", c.family, c.label, got, err, c.want)
		}
	}
	if v, err := m.sum("a", ""); err == nil {
		t.Errorf("a family that there is not: %v", v)
	}
}

func TestARateIsForProducersOnly(t *testing.T) {
	lab := &Lab{Root: t.TempDir()}
	r, err := newResult(lab, Params{Scenario: "produce", Rate: 1000}, []string{"pointsman"})
	if err != nil || r.Params.Scenario != "rate" || r.names[0] != "direct" {
		t.Errorf("producers at a rate are the scenario rate, beside direct: %+v, %v", r, err)
	}
	if _, err = newResult(lab, Params{Scenario: "consume", Rate: 1000}, []string{"pointsman"}); err == nil || !strings.Contains(err.Error(), `"consume"`) {
		t.Errorf("consumers at a rate: %v", err)
	}
}

func TestOnlyWhatIsBetweenTheMarkersIsReplaced(t *testing.T) {
	file := filepath.Join(t.TempDir(), "b.md")
	for _, text := range []string{"one\n", "two\n"} {
		if err := replaceBetween(file, peersMarker, text); err != nil {
			t.Fatal(err)
		}
	}
	old, err := os.ReadFile(file)
	if err != nil || strings.Count(string(old), "one") != 0 || strings.Count(string(old), "two") != 1 {
		t.Fatalf("%s %v", old, err)
	}
	if err := os.WriteFile(file, append(old, "after\n"...), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := replaceBetween(file, peersMarker, "three\n"); err != nil {
		t.Fatal(err)
	}
	if now, _ := os.ReadFile(file); string(now) != strings.Replace(string(old), "two", "three", 1)+"after\n" {
		t.Errorf("%s", now)
	}
	if err := os.WriteFile(file, []byte("no markers"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := replaceBetween(file, peersMarker, "four"); err == nil || !strings.Contains(err.Error(), "<!-- bench-peers: begin -->") {
		t.Errorf("a file without markers must be refused with what to add: %v", err)
	}
}

func TestDefaultsDependOnTheScenario(t *testing.T) {
	for _, c := range []struct {
		p      Params
		window int
	}{
		{Params{Scenario: "produce", Connections: 1}, 1000},
		{Params{Scenario: "produce", Connections: 50}, 100},
		{Params{Scenario: "produce", Connections: 500}, 20},
		{Params{Scenario: "produce", Connections: 50, Size: 1 << 20}, 4},
		{Params{Scenario: "lookup"}, 10},
		{Params{Scenario: "produce", Window: 7}, 7},
	} {
		if got := c.p.withDefaults().Window; got != c.window {
			t.Errorf("%+v: window %d, want %d", c.p, got, c.window)
		}
	}
	if p := (Params{Scenario: "stall"}).withDefaults(); p.Size != 1<<20 || p.Stalled != 200 || p.Rate != 1000 || p.Duration != 3*time.Second {
		t.Errorf("%+v", p)
	}
}

func TestTheRouteTableIsMeasuredAndRight(t *testing.T) {
	r, err := Routes(5000)
	if err != nil {
		t.Fatal(err)
	}
	if r.DecideAllocs != 0 || r.DecideNs <= 0 || r.PlainNs <= 0 || r.BytesPerTopic < 20 || r.BytesPerTopic > 500 || r.ChangeP50 <= 0 {
		t.Errorf("%+v", r)
	}
	if len(r.Writing) != 2 || r.Writing[0].TableNs <= 0 || r.Writing[1].MutexNs <= 0 || r.Writing[1].CopyNs <= 0 || r.Writing[1].ToMutex.Pairs != 10 || r.Writing[0].TableRate <= 0 || r.Writing[0].Copies <= 0 {
		t.Errorf("%+v", r.Writing)
	}
	if table := RoutesTable([]RoutesResult{r}); !strings.Contains(table, "| 5000 |") || !strings.Contains(table, "| 5000 | 2 |") {
		t.Error(table)
	}
}
