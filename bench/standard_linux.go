package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The peers of the standard set. The wide list is for what depends on how bytes are moved.
var (
	fewPeers  = []string{"pointsman", "haproxy", "java-proxy"}
	widePeers = []string{"pointsman", "haproxy", "haproxy64k", "java-proxy"}
	tlsPeers  = []string{"pointsman", "haproxy", "go-relay"}
)

// standardCase is one line of the standard set.
type standardCase struct {
	params     Params
	names      []string
	peerRounds int // peers are measured in that many rounds only, Pointsman in all; 0: in all
}

// standardSet is what make bench-peers measures: short windows and many rounds, because neighbours on the machine come and go.
func standardSet() (set []standardCase) {
	const warm, window = 150 * time.Millisecond, 400 * time.Millisecond
	add := func(names []string, p Params) {
		p.Warmup, p.Duration = warm, window
		if p.Scenario == "rate" {
			p.Duration = 2 * window // little work, and percentiles of what is sent meanwhile
		}
		set = append(set, standardCase{params: p, names: names})
	}
	for _, size := range []int{100, 1 << 10, 16 << 10, 128 << 10} {
		for _, connections := range []int{50, 500} {
			add(widePeers, Params{Scenario: "produce", Size: size, Connections: connections})
		}
	}
	for _, size := range []int{1 << 10, 16 << 10} {
		add(widePeers, Params{Scenario: "consume", Size: size, Connections: 50})
	}
	for _, rate := range []int{5_000, 10_000, 20_000, 40_000} {
		add(fewPeers, Params{Scenario: "rate", Rate: rate, Connections: 50})
	}
	for _, connections := range []int{50, 500} {
		add(fewPeers, Params{Scenario: "lookup", Connections: connections})
	}
	add(fewPeers, Params{Scenario: "churn"})
	add(tlsPeers, Params{Scenario: "produce", Size: 16 << 10, Connections: 50, TLS: tlsClients})
	add(tlsPeers, Params{Scenario: "connect", TLS: tlsClients})
	add(tlsPeers, Params{Scenario: "churn", TLS: tlsClients})
	add(tlsPeers, Params{Scenario: "produce", Size: 16 << 10, Connections: 50, TLS: tlsBrokers})
	add(tlsPeers, Params{Scenario: "connect", TLS: tlsBrokers})
	return set
}

// slowSet needs new processes for each run. Its goals are limits of Pointsman's own, so peers are there for the picture only.
func slowSet() []standardCase {
	const peerRounds = 2
	const quiet, stalled = 500 * time.Millisecond, 2 * time.Second
	return []standardCase{
		{Params{Scenario: "hold", Warmup: quiet, Duration: quiet}, fewPeers, peerRounds},
		{Params{Scenario: "stall", Stall: "consumers", Warmup: quiet, Duration: stalled}, fewPeers, peerRounds},
		{Params{Scenario: "stall", Stall: "lookups", Warmup: quiet, Duration: stalled}, fewPeers, peerRounds},
		{Params{Scenario: "hold", Connections: tlsHeld, Warmup: quiet, Duration: quiet, TLS: tlsClients}, tlsPeers, peerRounds},
	}
}

// tlsHeld is how many idle connections with TLS there are: each costs two handshakes to set up.
const tlsHeld = 1000

// How the time of the standard set is shared out: see TestTheStandardSetFitsItsTime for the arithmetic.
const (
	slowTime = 360 * time.Second // for the slow set
	restTime = 80 * time.Second  // for the switch and the route table
)

// Standard measures the standard set in at most limit and writes its tables into file, between markers. All cases go
// round by round, so that a noisy minute hurts all of them a little and none of them much.
func Standard(lab *Lab, limit time.Duration, file string, progress io.Writer) error {
	start := time.Now()
	k, err := newRack(lab, 0, progress)
	if err != nil {
		return err
	}
	defer k.close()
	var results []*Result
	measureSet := func(set []standardCase, until time.Time, most int) error {
		from := len(results)
		for _, c := range set {
			r, err := newResult(lab, c.params, c.names)
			if err != nil {
				return err
			}
			r.peerRounds = c.peerRounds
			results = append(results, r)
		}
		longest := time.Duration(0)
		for round := 0; round < most && (round == 0 || time.Now().Add(longest).Before(until)); round++ {
			began := time.Now()
			for _, r := range results[from:] {
				if err := k.round(r, round); err != nil {
					return err
				}
			}
			if longest = max(longest, time.Since(began)); round == 0 {
				longest = 0 // the round in which everything is started
			}
			fmt.Fprintf(progress, "round %d took %s\n", round+1, time.Since(began).Round(time.Second))
		}
		return nil
	}
	const unlimited = 1000
	if err := measureSet(standardSet(), start.Add(limit-slowTime-restTime), unlimited); err != nil {
		return err
	}
	k.stopTargets() // their memory and their timers are in nobody's way from here on
	if err := measureSet(slowSet(), start.Add(limit-restTime), pairsWanted); err != nil {
		return err
	}
	moved, err := Switch(lab, Params{Warmup: time.Second, Duration: 2 * time.Second})
	if err != nil {
		return err
	}
	var routes []RoutesResult
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		r, err := Routes(n)
		if err != nil {
			return err
		}
		routes = append(routes, r)
	}
	for _, r := range results {
		r.sum()
		if _, err := r.WriteRaw(lab.Root); err != nil {
			return err
		}
	}
	if err := writeSummary(filepath.Join(lab.Root, "bench", "standard.json"), results, moved, routes); err != nil {
		return err
	}
	text := standardText(results, moved, routes, time.Since(start))
	fmt.Fprintln(progress, text)
	return replaceBetween(file, peersMarker, text)
}

// stopTargets ends the targets that are up.
func (k *rack) stopTargets() {
	for name, t := range k.live {
		t.stop()
		delete(k.live, name)
	}
}

// standardText is everything between the markers.
func standardText(results []*Result, moved *SwitchResult, routes []RoutesResult, took time.Duration) string {
	var b strings.Builder
	m := results[0].Machine
	fmt.Fprintf(&b, "Made by `make bench-peers` on %s in %s: %d CPUs, Linux %s, %s, commit %s. Raw runs: `bench/results/` of that machine; summary: `bench/standard.json`.\n\n",
		results[0].Started.Format(time.DateOnly), took.Round(time.Second), m.CPUs, m.Kernel, m.Go, m.Commit)
	b.WriteString("### Goals\n\n" + goalTable(results) + "\n### Cases\n\n")
	var secure []*Result
	for _, r := range results {
		if r.Params.TLS != "" {
			secure = append(secure, r)
			continue
		}
		b.WriteString(r.Table() + "\n")
	}
	b.WriteString("### TLS\n\n" + tlsTable(secure) + "\n")
	b.WriteString("### Switch, immediate mode\n\n" + moved.Table() + "\n### Route table\n\n" + RoutesTable(routes))
	return b.String()
}

// writeSummary keeps what scripts may compare from version to version.
func writeSummary(file string, results []*Result, moved *SwitchResult, routes []RoutesResult) error {
	var cases []json.RawMessage
	for _, r := range results {
		line, err := r.Line()
		if err != nil {
			return err
		}
		cases = append(cases, json.RawMessage(line))
	}
	text, err := json.MarshalIndent(map[string]any{"machine": results[0].Machine, "started": results[0].Started, "cases": cases, "switch": moved, "routes": routes}, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// The names of the markers between which tables are replaced.
const (
	peersMarker = "bench-peers"
	scaleMarker = "bench-scale"
)

// replaceBetween puts text between the markers of that name in file; a file that is missing is made with nothing else in it.
func replaceBetween(file, name, text string) error {
	markerBegin, markerEnd := "<!-- "+name+": begin -->", "<!-- "+name+": end -->"
	old, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		old = []byte("# Benchmarks\n\n" + markerBegin + "\n" + markerEnd + "\n")
	} else if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(old), markerBegin)
	_, after, ok2 := strings.Cut(rest, markerEnd)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no place for the tables: add the lines %q and %q", file, markerBegin, markerEnd)
	}
	return os.WriteFile(file, []byte(before+markerBegin+"\n"+text+markerEnd+after), 0o644)
}

// goal is what Pointsman wants to reach in a case: at most limit times the best of peers, or of a fixed value when there are none.
type goal struct {
	label   string
	measure string
	peers   []string
	limit   float64
}

// goals of the data path. Where several peers are named, the best of them counts.
func goals() (all []goal) {
	add := func(p Params, measure string, limit float64, peers ...string) {
		all = append(all, goal{p.withDefaults().Label(), measure, peers, limit})
	}
	for _, connections := range []int{50, 500} {
		produce := func(size int) Params {
			return Params{Scenario: "produce", Size: size, Connections: connections}
		}
		add(produce(100), "cpu_per_message", 1, "haproxy", "haproxy64k", "java-proxy")
		for _, size := range []int{1 << 10, 16 << 10} {
			add(produce(size), "cpu_per_message", 0.95, "java-proxy")
			add(produce(size), "cpu_per_message", 0.6, "haproxy")
			add(produce(size), "cpu_per_message", 0.95, "haproxy64k")
		}
		add(produce(128<<10), "cpu_per_message", 0.75, "java-proxy")
		add(produce(128<<10), "cpu_per_message", 0.35, "haproxy")
		add(produce(1<<10), "rss_mib", 0.1, "java-proxy")
		add(Params{Scenario: "lookup", Connections: connections}, "cpu_per_100k_lookups", 0.35, "java-proxy")
	}
	for _, size := range []int{1 << 10, 16 << 10} {
		consume := Params{Scenario: "consume", Size: size, Connections: 50}
		add(consume, "cpu_per_message", 0.95, "java-proxy")
		add(consume, "cpu_per_message", 0.6, "haproxy")
		add(consume, "cpu_per_message", 0.95, "haproxy64k")
	}
	for _, rate := range []int{5_000, 10_000, 20_000} {
		p := Params{Scenario: "rate", Rate: rate, Connections: 50}
		add(p, "cpu_per_message", 1, "haproxy")
		add(p, "switches_per_message", 1.1, "haproxy")
	}
	for _, rate := range []int{5_000, 20_000, 40_000} {
		add(Params{Scenario: "rate", Rate: rate, Connections: 50}, "added_p50", 1, "haproxy", "java-proxy")
		add(Params{Scenario: "rate", Rate: rate, Connections: 50}, "p99", 1, "haproxy", "java-proxy")
	}
	add(Params{Scenario: "churn"}, "cpu_per_10k_cycles", 0.4, "java-proxy")
	add(Params{Scenario: "churn"}, "cpu_per_10k_cycles", 1.1, "haproxy")
	add(Params{Scenario: "hold"}, "kib_per_connection", 3)
	add(Params{Scenario: "hold"}, "files_per_connection", 2)
	for _, stall := range []string{"consumers", "lookups"} {
		add(Params{Scenario: "stall", Stall: stall}, "rss_growth_mib", 256) // the default of limits.buffer_memory
		add(Params{Scenario: "stall", Stall: stall}, "p99_growth", 1.2)
	}
	// Nine tenths of HAProxy's bytes per core, eight tenths of its handshakes, and what a connection may hold.
	for _, where := range []string{tlsClients, tlsBrokers} {
		add(Params{Scenario: "produce", Size: 16 << 10, Connections: 50, TLS: where}, "cpu_per_message", 1/0.9, "haproxy")
		add(Params{Scenario: "connect", TLS: where}, "cpu_per_10k_cycles", 1/0.8, "haproxy")
	}
	add(Params{Scenario: "hold", Connections: tlsHeld, TLS: tlsClients}, "kib_per_connection", 25)
	return all
}

// goalTable says which goals were reached.
func goalTable(results []*Result) string {
	var b strings.Builder
	b.WriteString("| case | measure | goal | reached, 95 % interval | pairs | |\n|---|---|---|---|---|---|\n")
	for _, g := range goals() {
		i := slices.IndexFunc(results, func(r *Result) bool { return r.Params.Label() == g.label })
		if i < 0 {
			continue
		}
		r := results[i]
		limit, reached := strings.TrimSpace(number(g.limit)+" "+units[g.measure]), Ratio{}
		if len(g.peers) == 0 {
			v := r.values("pointsman", g.measure)
			if len(v) == 0 {
				continue
			}
			reached = summary(v)
		} else {
			peer := r.best(g.measure, g.peers)
			if peer == "" {
				continue
			}
			limit, reached = number(g.limit)+" × "+peer, r.Ratios[peer][g.measure]
		}
		fmt.Fprintf(&b, "| %s | %s | ≤ %s | %s | %d | %s |\n", g.label, strings.ReplaceAll(g.measure, "_", " "), limit, reached.Spread(), reached.Pairs, verdict(reached, g.limit))
	}
	fmt.Fprintf(&b, "\nA goal is met when the median of at least %d pairs (of the same round; without a peer: rounds) meets it. Less than %.0f %% beyond it is a tie; with fewer pairs it is open.\n", pairsWanted, 100*tieWithin)
	return b.String()
}

// best is the peer with the smallest median of a measure among those that have a ratio; "" when there is none.
func (r *Result) best(measure string, peers []string) (best string) {
	for _, name := range peers {
		if _, ok := r.Ratios[name][measure]; !ok {
			continue
		}
		if best == "" || medianOf(r.values(name, measure)) < medianOf(r.values(best, measure)) {
			best = name
		}
	}
	return best
}

// pairsWanted is how many pairs a verdict needs.
const pairsWanted = 10

// verdict compares with a goal; what misses it by less than counts as a difference is a tie.
func verdict(reached Ratio, limit float64) string {
	const rounding = 0.005 // what three digits do not show
	word := "**missed**"
	switch {
	case reached.Median <= limit*(1+rounding):
		word = "met"
	case reached.Median < limit*(1+tieWithin):
		word = "tie"
	}
	if reached.Pairs < pairsWanted {
		return "open (" + word + " so far)"
	}
	return word
}
