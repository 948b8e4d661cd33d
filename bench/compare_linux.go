package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Run is one scenario on one target, once.
type Run struct {
	Target  string             `json:"target"`
	Round   int                `json:"round"`
	Measure map[string]float64 `json:"measures"`
	Seconds float64            `json:"seconds"` // of the window that was measured
	Ops     uint64             `json:"operations"`

	Negotiated string `json:"negotiated,omitempty"` // of TLS

	// Latency is the histogram of latencies in ns, in HdrHistogram's compressed form.
	Latency []byte `json:"latency_hdr,omitempty"`

	// Processor time during the window, as shares of one core.
	ProxyCores  float64 `json:"proxy_cores"`
	BrokerCores float64 `json:"broker_cores"`
	LoadCores   float64 `json:"load_cores"`
	OtherCores  float64 `json:"other_cores"` // everything else on the machine: a noisy neighbour shows here
	Load1       float64 `json:"load_average"`
}

// Result is a comparison: all of its runs and what they say.
type Result struct {
	Params  Params                      `json:"params"`
	Machine Machine                     `json:"machine"`
	Started time.Time                   `json:"started"`
	Runs    []Run                       `json:"runs"`
	Skipped map[string]string           `json:"skipped,omitempty"` // targets that could not be measured, and why
	Ratios  map[string]map[string]Ratio `json:"ratios"`            // pointsman ÷ peer, by peer and measure

	names      []string // of the targets
	peerRounds int      // see standardCase
}

// Machine is where a result was made.
type Machine struct {
	CPUs   int    `json:"cpus"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	Commit string `json:"commit"`
}

// measures are what each scenario is compared by, the most important first; smaller is better in all of them.
var measures = map[string][]string{
	"produce": {"cpu_per_message", "switches_per_message", "rss_mib"},
	"consume": {"cpu_per_message", "switches_per_message", "rss_mib"},
	"rate":    {"added_p50", "cpu_per_message", "switches_per_message", "p50", "p99", "p99_to_p50"},
	"lookup":  {"cpu_per_100k_lookups", "p50", "p99", "broker_connections"},
	"connect": {"cpu_per_10k_cycles", "p50"},
	"churn":   {"cpu_per_10k_cycles", "p50"},
	"hold":    {"kib_per_connection", "files_per_connection"},
	"stall":   {"rss_growth_mib", "p99_growth"},
}

// units are the measures' units, for the tables.
var units = map[string]string{
	"cpu_per_message": "µs", "switches_per_message": "", "added_p50": "µs", "p50": "µs", "p99": "µs", "cpu_per_100k_lookups": "s", "broker_connections": "",
	"cpu_per_10k_cycles": "s", "kib_per_connection": "KiB", "files_per_connection": "", "rss_growth_mib": "MiB", "p99_growth": "×", "rss_mib": "MiB", "p99_to_p50": "×",
}

// Compare runs a scenario over all targets, interleaved (A B C A B C …), and sums it up.
func Compare(lab *Lab, p Params, names []string, repeat int, progress io.Writer) (*Result, error) {
	r, err := newResult(lab, p, names)
	if err != nil {
		return nil, err
	}
	k, err := newRack(lab, r.Params.Connections, progress)
	if err != nil {
		return nil, err
	}
	defer k.close()
	for round := range repeat {
		if err := k.round(r, round); err != nil {
			return nil, err
		}
	}
	r.sum()
	return r, nil
}

// newResult checks what is asked for.
func newResult(lab *Lab, p Params, names []string) (*Result, error) {
	if p.Scenario == "produce" && p.Rate > 0 {
		p.Scenario = "rate"
	}
	p = p.withDefaults()
	if p.Rate > 0 && p.Scenario != "rate" && p.Scenario != "stall" {
		return nil, fmt.Errorf("a rate for %q: only produce, rate and stall send at fixed times, the others keep a window in flight", p.Scenario)
	}
	if measures[p.Scenario] == nil {
		return nil, fmt.Errorf("scenario %q cannot be compared: want one of %v (switch and routes are commands of their own)", p.Scenario, comparables())
	}
	for _, name := range names {
		if !slices.Contains(Targets, name) {
			return nil, fmt.Errorf("target %q: want some of %v", name, Targets)
		}
	}
	if err := checkTLS(p, names); err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return name == "direct" && (fresh(p.Scenario) || p.Scenario == "rate")
	})
	if p.Scenario == "rate" {
		names = append([]string{"direct"}, names...) // what the others add is counted from it
	}
	return &Result{Params: p, names: names, Machine: lab.machine(), Started: time.Now().UTC(), Skipped: map[string]string{}}, nil
}

// fresh tells whether a scenario needs a new process for each run, because memory that was taken once is kept.
func fresh(scenario string) bool { return scenario == "hold" || scenario == "stall" }

func comparables() (names []string) {
	for _, s := range Scenarios {
		if measures[s] != nil {
			names = append(names, s)
		}
	}
	return names
}

// measure runs a load against a target once.
func measure(t *target, p Params) (run Run, err error) {
	run.Measure = map[string]float64{}
	var before footprint
	if fresh(p.Scenario) {
		// What the first connections cost once (threads, code that was not touched yet) is no cost per connection.
		first := p
		first.Scenario, first.Connections, first.Warmup, first.Duration = "produce", 50, 0, 300*time.Millisecond
		if _, err := measure(t, first.withDefaults()); err != nil {
			return run, err
		}
		if before, err = settled(t.proc.pid()); err != nil {
			return run, err
		}
	}
	l, err := startLoad(p, t.at)
	if err != nil {
		return run, err
	}
	defer l.close()
	if err := l.base().runFor(p.Warmup); err != nil {
		return run, err
	}
	l.base().reset()
	if s, ok := l.(*stallLoad); ok {
		if err := s.before(); err != nil {
			return run, err
		}
	}
	w, err := openWindow(t)
	if err != nil {
		return run, err
	}
	if err := l.base().runFor(p.Duration); err != nil {
		return run, err
	}
	if err := w.close(&run); err != nil {
		return run, err
	}
	run.Ops, run.Negotiated = l.base().done, t.at.tls.negotiated()
	ops := float64(run.Ops)
	if run.Ops == 0 && p.Scenario != "hold" {
		return run, errors.New("nothing was done in the whole window")
	}
	m := run.Measure
	m["ops_per_second"] = ops / run.Seconds
	if h := l.base().latency; h.TotalCount() > 0 {
		m["p50"], m["p99"], m["max"] = micros(h.ValueAtQuantile(50)), micros(h.ValueAtQuantile(99)), micros(h.Max())
		m["p99_to_p50"] = m["p99"] / m["p50"]
		if run.Latency, err = h.Encode(hdrhistogram.V2CompressedEncodingCookieBase); err != nil {
			return run, fmt.Errorf("histogram of latencies: %w", err)
		}
	}
	if t.proc == nil {
		return run, nil
	}
	after, err := processFootprint(t.proc.pid())
	if err != nil {
		return run, err
	}
	m["rss_mib"], m["pss_mib"] = float64(after.RSS)/1024, float64(after.PSS)/1024
	cpu := w.cpu.Seconds()
	switch p.Scenario {
	case "produce", "consume", "rate":
		m["cpu_per_message"], m["switches_per_message"] = cpu*1e6/ops, float64(w.switches)/ops
		m["cpu_per_gb"] = cpu / (ops * float64(p.Size) / 1e9)
	case "lookup":
		m["cpu_per_100k_lookups"] = cpu * 1e5 / ops
		n, err := connectionsBetween(t.proc.pid(), t.broker.pid())
		if err != nil {
			return run, err
		}
		m["broker_connections"] = float64(n)
	case "churn", "connect":
		m["cpu_per_10k_cycles"] = cpu * 1e4 / ops
	case "hold":
		n := float64(p.Connections)
		m["kib_per_connection"] = float64(after.PSS-before.PSS) / n
		m["pss_growth_mib"] = float64(after.PSS-before.PSS) / 1024
		m["files_per_connection"] = float64(after.Files-before.Files) / n
	case "stall":
		m["rss_growth_mib"] = max(float64(after.RSS-before.RSS)/1024, 0.1)
		m["p99_growth"] = m["p99"] / l.(*stallLoad).quiet
	}
	return run, nil
}

// settled is the footprint of a process once its connections are closed.
func settled(pid int) (f footprint, err error) {
	const polls, pause = 50, 100 * time.Millisecond
	for range polls {
		last := f
		if f, err = processFootprint(pid); err != nil || f.Files == last.Files {
			return f, err
		}
		time.Sleep(pause)
	}
	return f, fmt.Errorf("process %d still opens or closes files after %s", pid, polls*pause)
}

// before measures the healthy traffic alone, then lets the others stall. It comes back when the set-up, which kept this
// thread from sending, is forgotten: when buffers are full and the healthy traffic is on time again.
func (l *stallLoad) before() error {
	const settle = time.Second
	if err := l.runFor(l.p.Duration / 2); err != nil {
		return err
	}
	l.quiet = micros(l.latency.ValueAtQuantile(99))
	if err := l.addStalled(); err != nil {
		return err
	}
	if err := l.runFor(settle); err != nil {
		return err
	}
	l.reset()
	return nil
}

func micros(ns int64) float64 { return float64(ns) / 1e3 }

// window is a stretch of time over which processor time is attributed.
type window struct {
	target, broker *process
	at             time.Time
	start          [3]usage // proxy, broker, load
	busy           time.Duration

	// Of the proxy, after close.
	cpu      time.Duration
	switches int64
}

func (w *window) read() (u [3]usage, busy time.Duration, err error) {
	if w.target != nil {
		if u[0], err = processUsage(w.target.pid()); err != nil {
			return u, 0, fmt.Errorf("the proxy: %w\n%s", err, w.target.logTail())
		}
	}
	if u[1], err = processUsage(w.broker.pid()); err != nil {
		return u, 0, fmt.Errorf("the fake broker: %w\n%s", err, w.broker.logTail())
	}
	if u[2], err = processUsage(os.Getpid()); err != nil {
		return u, 0, err
	}
	busy, err = machineBusy()
	return u, busy, err
}

func openWindow(t *target) (w *window, err error) {
	w = &window{target: t.proc, broker: t.broker}
	w.start, w.busy, err = w.read()
	w.at = time.Now()
	return w, err
}

func (w *window) close(run *Run) error {
	took := time.Since(w.at)
	end, busy, err := w.read()
	if err != nil {
		return err
	}
	share := func(i int) float64 { return (end[i].cpu - w.start[i].cpu).Seconds() / took.Seconds() }
	w.cpu, w.switches = end[0].cpu-w.start[0].cpu, end[0].switches-w.start[0].switches
	run.Seconds = took.Seconds()
	run.ProxyCores, run.BrokerCores, run.LoadCores = share(0), share(1), share(2)
	run.OtherCores = max((busy-w.busy).Seconds()/took.Seconds()-run.ProxyCores-run.BrokerCores-run.LoadCores, 0)
	run.Load1 = loadAverage()
	return nil
}

// values are a measure of a target, by round.
func (r *Result) values(name, measure string) (v []float64) {
	for _, run := range r.Runs {
		if x, ok := run.Measure[measure]; ok && run.Target == name {
			v = append(v, x)
		}
	}
	return v
}

// targets are those that were measured, in order.
func (r *Result) targets() (names []string) {
	for _, run := range r.Runs {
		if !slices.Contains(names, run.Target) {
			names = append(names, run.Target)
		}
	}
	return names
}

// sum fills in what each target adds to the median latency of direct in the same round, and the ratios of Pointsman to every other target.
func (r *Result) sum() {
	base := map[int]float64{}
	for _, run := range r.Runs {
		if run.Target == "direct" {
			base[run.Round] = run.Measure["p50"]
		}
	}
	for _, run := range r.Runs {
		if p50, ok := base[run.Round]; ok && run.Target != "direct" && r.Params.Scenario == "rate" {
			run.Measure["added_p50"] = run.Measure["p50"] - p50
		}
	}
	r.Ratios = map[string]map[string]Ratio{}
	for _, name := range r.targets() {
		if name == "pointsman" {
			continue
		}
		for _, m := range measures[r.Params.Scenario] {
			if ratio, ok := pairedRatio(r.values("pointsman", m), r.values(name, m)); ok {
				if r.Ratios[name] == nil {
					r.Ratios[name] = map[string]Ratio{}
				}
				r.Ratios[name][m] = ratio
			}
		}
	}
}

func (run Run) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "round %d %-13s", run.Round+1, run.Target)
	for _, m := range append([]string{"ops_per_second"}, slices.Sorted(maps.Keys(units))...) {
		if v, ok := run.Measure[m]; ok {
			fmt.Fprintf(&b, " %s=%s%s", m, number(v), units[m])
		}
	}
	fmt.Fprintf(&b, " [cores: proxy %.2f broker %.2f load %.2f other %.2f; load average %.1f]", run.ProxyCores, run.BrokerCores, run.LoadCores, run.OtherCores, run.Load1)
	return b.String()
}

// WriteRaw keeps everything under bench/results, in a file named after the case and the time.
func (r *Result) WriteRaw(root string) (file string, err error) {
	dir := filepath.Join(root, "bench", "results")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return "", err
	}
	file = filepath.Join(dir, r.Started.Format("20060102T150405")+"-"+strings.NewReplacer(" ", "-", "/", "-per-", "×", "x").Replace(r.Params.Label())+".json")
	return file, os.WriteFile(file, append(text, '\n'), 0o644)
}

func (l *Lab) machine() Machine {
	m := Machine{CPUs: runtime.NumCPU(), Go: runtime.Version()}
	var u syscall.Utsname
	if syscall.Uname(&u) == nil {
		for _, c := range u.Release {
			if c == 0 {
				break
			}
			m.Kernel += string(rune(c))
		}
	}
	cmd := exec.Command("git", "describe", "--always", "--dirty")
	cmd.Dir = l.Root
	if out, err := cmd.Output(); err == nil {
		m.Commit = strings.TrimSpace(string(out))
	}
	return m
}
