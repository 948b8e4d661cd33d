package e2e

import (
	"fmt"
	"slices"
	"strings"
)

// Run is one long run of TestPlannedSwitch by hand (E2E_SWITCHES, E2E_RATE, E2E_FLAGS): one topic under load, moved there and back many times. What is lost, doubled or out
// of order is the sum of what the live consumer got and of what a reader found in the logs of both clusters afterwards.
type Run struct {
	Date        string    `json:"date"`
	Client      string    `json:"client"`
	Traffic     string    `json:"traffic"`    // how it was sent
	Asked       int       `json:"rate_asked"` // messages per second
	Seconds     float64   `json:"seconds"`    // from the first receipt to the last
	Undone      int       `json:"undone"`     // switches that a preflight refused, or that were aborted; they were asked for again
	Messages    int       `json:"messages"`   // with a receipt
	Lost        int       `json:"lost"`
	Duplicates  int       `json:"duplicates"`
	OrderBreaks int       `json:"order_breaks"`
	Errors      int       `json:"errors"`   // that the application saw
	Holds       []float64 `json:"holds_ms"` // of each switch that was done
}

// take adds what a comparison found.
func (r *Run) take(d Digest) {
	r.Lost, r.Duplicates, r.OrderBreaks = r.Lost+len(d.Lost)+len(d.Corrupt), r.Duplicates+d.Duplicates, r.OrderBreaks+d.OrderBreaks
}

// reached is receipts per second.
func (r *Run) reached() float64 { return float64(r.Messages) / max(r.Seconds, 0.001) }

// TrafficOf names how a live driver with these flags sends.
func TrafficOf(flags []string) string {
	given := map[string]string{}
	for i := 0; i+1 < len(flags); i += 2 {
		given[flags[i]] = flags[i+1]
	}
	traffic := "asynchronous"
	if given["--sync"] == "true" {
		traffic = "synchronous"
	}
	if given["--batch"] == "false" {
		return traffic + ", no batches"
	}
	return traffic + ", batches"
}

// secondsOf is the time from the first receipt to the last, of their times in ms, sorted.
func secondsOf(times []float64) float64 {
	if len(times) == 0 {
		return 0
	}
	return (times[len(times)-1] - times[0]) / 1000
}

// RunsTable shows runs in their order, those of a client with the same traffic and rate as one.
func RunsTable(runs []Run) string {
	var sums []Run
	for _, r := range runs {
		i := slices.IndexFunc(sums, func(s Run) bool { return s.Client == r.Client && s.Traffic == r.Traffic && s.Asked == r.Asked })
		if i < 0 {
			sums = append(sums, r)
			continue
		}
		s := &sums[i]
		s.Date, s.Seconds, s.Undone, s.Messages, s.Errors = max(s.Date, r.Date), s.Seconds+r.Seconds, s.Undone+r.Undone, s.Messages+r.Messages, s.Errors+r.Errors
		s.Lost, s.Duplicates, s.OrderBreaks, s.Holds = s.Lost+r.Lost, s.Duplicates+r.Duplicates, s.OrderBreaks+r.OrderBreaks, slices.Concat(s.Holds, r.Holds)
	}
	var b strings.Builder
	b.WriteString("| date | client | traffic | messages/s asked / reached | switches | not done | messages | lost | duplicates | order breaks | errors | hold p50 / p99 / max ms |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range sums {
		fmt.Fprintf(&b, "| %s | %s | %s | %d / %.0f | %d | %d | %d | %d | %d | %d | %d | %.0f / %.0f / %.0f |\n", r.Date, r.Client, r.Traffic, r.Asked, r.reached(), len(r.Holds), r.Undone,
			r.Messages, r.Lost, r.Duplicates, r.OrderBreaks, r.Errors, Percentile(r.Holds, 0.5), Percentile(r.Holds, 0.99), Percentile(r.Holds, 1))
	}
	return b.String()
}
