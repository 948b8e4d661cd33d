package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Run is one long run of TestPlannedSwitch by hand (E2E_SWITCHES, E2E_RATE, E2E_FLAGS): one topic under load, moved there and back many times. What is lost, doubled or out
// of order is the sum of what the live consumer got and of what a reader found in the logs of both clusters afterwards.
type Run struct {
	Date        string  `json:"date"`
	Client      string  `json:"client"`
	Traffic     string  `json:"traffic"`      // how it was sent
	Asked       int     `json:"rate_asked"`   // messages per second
	Reached     float64 `json:"rate_reached"` // receipts per second, from the first to the last
	Switches    int     `json:"switches"`
	Messages    int     `json:"messages"` // with a receipt
	Lost        int     `json:"lost"`
	Duplicates  int     `json:"duplicates"`
	OrderBreaks int     `json:"order_breaks"`
	Errors      int     `json:"errors"` // that the application saw
	HoldP50     float64 `json:"hold_p50_ms"`
	HoldP99     float64 `json:"hold_p99_ms"`
	HoldMax     float64 `json:"hold_max_ms"`
}

// take adds what a comparison found.
func (r *Run) take(d Digest) {
	r.Lost, r.Duplicates, r.OrderBreaks = r.Lost+len(d.Lost)+len(d.Corrupt), r.Duplicates+d.Duplicates, r.OrderBreaks+d.OrderBreaks
}

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

// rateOf is receipts per second; receipts need not be sorted.
func rateOf(acks []Event) float64 {
	if len(acks) == 0 {
		return 0
	}
	first, last := acks[0].T, acks[0].T
	for _, e := range acks {
		first, last = min(first, e.T), max(last, e.T)
	}
	return float64(len(acks)) / max(last-first, 1) * 1000
}

// ReadRuns reads lines of JSON.
func ReadRuns(from io.Reader) (runs []Run, err error) {
	for lines := bufio.NewScanner(from); lines.Scan(); {
		var r Run
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(runs)+1, err)
		}
		runs = append(runs, r)
	}
	return runs, nil
}

// RunsTable shows runs in their order.
func RunsTable(runs []Run) string {
	var b strings.Builder
	b.WriteString("| date | client | traffic | messages/s asked / reached | switches | messages | lost | duplicates | order breaks | errors | hold p50 / p99 / max ms |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range runs {
		fmt.Fprintf(&b, "| %s | %s | %s | %d / %.0f | %d | %d | %d | %d | %d | %d | %.0f / %.0f / %.0f |\n", r.Date, r.Client, r.Traffic, r.Asked, r.Reached, r.Switches, r.Messages,
			r.Lost, r.Duplicates, r.OrderBreaks, r.Errors, r.HoldP50, r.HoldP99, r.HoldMax)
	}
	return b.String()
}
