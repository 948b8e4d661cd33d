package bench

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Label names the case in a few words.
func (p Params) Label() string {
	if p.TLS != "" {
		prefix := map[string]string{tlsClients: "TLS ", tlsBrokers: "broker TLS ", tlsBoth: "TLS twice "}[p.TLS]
		p.TLS = ""
		return prefix + p.Label()
	}
	switch p.Scenario {
	case "produce", "consume":
		return fmt.Sprintf("%s %s %d connections%s", p.Scenario, sizeText(p.Size), p.Connections, p.perConnection())
	case "rate":
		return fmt.Sprintf("rate %d/s %s %d connections", p.Rate, sizeText(p.Size), p.Connections)
	case "lookup":
		return fmt.Sprintf("lookup %d × %d", p.Connections, p.Window)
	case "churn", "connect":
		return fmt.Sprintf("%s %d at a time", p.Scenario, p.Connections)
	case "hold":
		if p.Unbridged {
			return fmt.Sprintf("hold %d connections for lookups", p.Connections)
		}
		return fmt.Sprintf("hold %d connections", p.Connections)
	case "stall":
		return fmt.Sprintf("stall %d %s", p.Stalled, p.Stall)
	}
	return p.Scenario
}

func (p Params) perConnection() string {
	if p.Producers == 1 {
		return ""
	}
	return fmt.Sprintf(" × %d", p.Producers)
}

// sizeText writes a size as parseSize of the command line reads it.
func sizeText(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "KiB"
	}
	return strconv.Itoa(n) + "B"
}

// Table is the comparison for people, in Markdown: medians, and Pointsman's ratios with their intervals.
func (r *Result) Table() string {
	var b strings.Builder
	names := r.targets()
	fmt.Fprintf(&b, "| %s |", r.Params.Label())
	for _, name := range names {
		fmt.Fprintf(&b, " %s |", name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(names)) + "\n")
	rows := slices.Clone(measures[r.Params.Scenario])
	switch r.Params.Scenario {
	case "produce", "consume":
		rows = append(rows, "ops_per_second")
	case "lookup", "churn", "connect":
		rows = append(rows, "ops_per_second", "rss_mib")
	}
	for _, m := range rows {
		fmt.Fprintf(&b, "| %s |", strings.TrimSuffix(strings.ReplaceAll(m, "_", " ")+", "+units[m], ", "))
		for _, name := range names {
			if v := r.values(name, m); len(v) > 0 {
				fmt.Fprintf(&b, " %s |", number(medianOf(v)))
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
		if !slices.Contains(measures[r.Params.Scenario], m) {
			continue
		}
		fmt.Fprintf(&b, "| &nbsp; pointsman ÷ peer |")
		for _, name := range names {
			if ratio, ok := r.Ratios[name][m]; ok {
				fmt.Fprintf(&b, " %s |", ratio)
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
	}
	other, load := r.noise()
	fmt.Fprintf(&b, "\n%d rounds%s; others used %s cores (most in one run: %s); load average %s.\n", r.rounds(), r.peersIn(), number(medianOf(other)), number(slices.Max(other)), number(medianOf(load)))
	if text := negotiated(r); text != "" {
		fmt.Fprintf(&b, "Negotiated: %s.\n", text)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Skipped)) {
		fmt.Fprintf(&b, "**%s was skipped**: %s.\n", name, r.Skipped[name])
	}
	return b.String()
}

// negotiated says which TLS was measured, and with whom; "" for plaintext.
func negotiated(results ...*Result) string {
	with := map[string][]string{}
	for _, r := range results {
		for _, run := range r.Runs {
			if run.Negotiated != "" && !slices.Contains(with[run.Negotiated], run.Target) {
				with[run.Negotiated] = append(with[run.Negotiated], run.Target)
			}
		}
	}
	var texts []string
	for _, what := range slices.Sorted(maps.Keys(with)) {
		texts = append(texts, fmt.Sprintf("%s (%s)", what, strings.Join(with[what], ", ")))
	}
	return strings.Join(texts, "; ")
}

// tlsTable is the standard set's cases with TLS, a line for each measure.
func tlsTable(results []*Result) string {
	var b strings.Builder
	b.WriteString("| case | measure |")
	for _, name := range tlsPeers {
		fmt.Fprintf(&b, " %s |", name)
	}
	for _, name := range tlsPeers[1:] {
		fmt.Fprintf(&b, " ÷ %s |", name)
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", 2*len(tlsPeers)-1) + "\n")
	var other, load []float64
	for _, r := range results {
		o, n := r.noise()
		other, load = append(other, o...), append(load, n...)
		for _, m := range measures[r.Params.Scenario] {
			fmt.Fprintf(&b, "| %s | %s |", r.Params.Label(), strings.TrimSuffix(strings.ReplaceAll(m, "_", " ")+", "+units[m], ", "))
			for _, name := range tlsPeers {
				fmt.Fprintf(&b, " %s |", number(medianOf(r.values(name, m))))
			}
			for _, name := range tlsPeers[1:] {
				if ratio, ok := r.Ratios[name][m]; ok {
					fmt.Fprintf(&b, " %s |", ratio)
				} else {
					b.WriteString(" |")
				}
			}
			b.WriteString("\n")
		}
	}
	fmt.Fprintf(&b, "\nNegotiated: %s. Others used %s cores; load average %s.\n", negotiated(results...), number(medianOf(other)), number(medianOf(load)))
	return b.String()
}

// noise is what else the machine did during each run.
func (r *Result) noise() (other, load []float64) {
	for _, run := range r.Runs {
		other, load = append(other, run.OtherCores), append(load, run.Load1)
	}
	if len(other) == 0 {
		return []float64{math.NaN()}, []float64{math.NaN()}
	}
	return other, load
}

// peersIn says in how many of the rounds peers were measured, when that is not all.
func (r *Result) peersIn() string {
	if r.peerRounds == 0 || r.peerRounds >= r.rounds() {
		return ""
	}
	return fmt.Sprintf(" (peers in the first %d)", r.peerRounds)
}

func (r *Result) rounds() (n int) {
	for _, run := range r.Runs {
		n = max(n, run.Round+1)
	}
	return n
}

// Line is the comparison as one line of JSON for scripts: per peer each measure's median ratio, with its interval under
// "<measure>_spread" ("spread" for the scenario's first), and the medians of all targets under "medians".
func (r *Result) Line() (string, error) {
	ratios := map[string]map[string]any{}
	for name, byMeasure := range r.Ratios {
		one := map[string]any{}
		for m, ratio := range byMeasure {
			spread := []float64{round4(ratio.Lo), round4(ratio.Hi)}
			one[m], one[m+"_spread"] = round4(ratio.Median), spread
			if m == measures[r.Params.Scenario][0] {
				one["spread"], one["pairs"], one["coverage"] = spread, ratio.Pairs, round4(ratio.Coverage)
			}
		}
		ratios[name] = one
	}
	medians := map[string]map[string]float64{}
	for _, run := range r.Runs {
		if medians[run.Target] != nil {
			continue
		}
		medians[run.Target] = map[string]float64{}
		for m := range run.Measure {
			medians[run.Target][m] = round4(medianOf(r.values(run.Target, m)))
		}
	}
	other, load := r.noise()
	line, err := json.Marshal(struct {
		Scenario    string                        `json:"scenario"`
		Label       string                        `json:"label"`
		Size        int                           `json:"size"`
		Connections int                           `json:"connections"`
		Ratios      map[string]map[string]any     `json:"ratios"`
		Medians     map[string]map[string]float64 `json:"medians"`
		Skipped     map[string]string             `json:"skipped,omitempty"`
		Other       float64                       `json:"other_cores"`
		Load1       float64                       `json:"load_average"`
	}{r.Params.Scenario, r.Params.Label(), r.Params.Size, r.Params.Connections, ratios, medians, r.Skipped, round4(medianOf(other)), round4(medianOf(load))})
	return string(line), err
}

// round4 keeps four digits: more would only look exact.
func round4(v float64) float64 {
	f, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64)
	return f
}
