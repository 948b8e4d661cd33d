package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Row is what one subscription of one client went through in a scenario. The tests write such lines (Row.save), and docs/guarantees.md is made of them.
type Row struct {
	Mode         string    `json:"mode"`
	Scenario     string    `json:"scenario"`
	Client       string    `json:"client"`
	Subscription string    `json:"subscription"`
	Acked        int       `json:"acknowledged"` // publishes with a receipt
	Lost         int       `json:"lost"`
	Duplicates   int       `json:"duplicates"`
	OrderBreaks  int       `json:"order_breaks"`
	Unordered    bool      `json:"unordered,omitempty"` // several consumers share the messages: there is no order to be kept
	Errors       int       `json:"errors"`              // that the application saw
	Forecast     *int64    `json:"forecast,omitempty"`  // duplicates, where the test wants exactly so many
	AtMost       *int64    `json:"at_most,omitempty"`   // and where it allows no more than were forecast
	Outcome      string    `json:"outcome,omitempty"`   // of switches that were not all done
	Holds        []float64 `json:"holds_ms,omitempty"`  // of each switch
	Gaps         []float64 `json:"gaps_ms,omitempty"`   // longest time between two receipts around each switch
}

// ReadLines reads one JSON value from each line.
func ReadLines[T any](from io.Reader) (all []T, err error) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var one T
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(all)+1, err)
		}
		all = append(all, one)
	}
	return all, lines.Err()
}

// Table shows rows of equal mode, scenario, client and subscription as one.
func Table(rows []Row) string {
	type key struct{ mode, scenario, client, subscription string }
	of := map[key]*Row{}
	var keys []key
	for _, r := range rows {
		k := key{r.Mode, r.Scenario, r.Client, r.Subscription}
		sum := of[k]
		if sum == nil {
			c := r
			of[k], keys = &c, append(keys, k)
			continue
		}
		sum.Acked, sum.Lost, sum.Duplicates, sum.OrderBreaks, sum.Errors = sum.Acked+r.Acked, sum.Lost+r.Lost, sum.Duplicates+r.Duplicates, sum.OrderBreaks+r.OrderBreaks, sum.Errors+r.Errors
		sum.Holds, sum.Gaps = slices.Concat(sum.Holds, r.Holds), slices.Concat(sum.Gaps, r.Gaps)
		if r.Outcome != "" && !strings.Contains(sum.Outcome, r.Outcome) {
			sum.Outcome += "; " + r.Outcome
		}
		if r.Forecast != nil && sum.Forecast != nil {
			both := *r.Forecast + *sum.Forecast
			sum.Forecast = &both
		}
		if r.AtMost != nil && sum.AtMost != nil {
			both := *r.AtMost + *sum.AtMost
			sum.AtMost = &both
		}
	}
	slices.SortStableFunc(keys, func(a, b key) int {
		return strings.Compare(a.mode+"\x00"+a.scenario+"\x00"+a.client+"\x00"+a.subscription, b.mode+"\x00"+b.scenario+"\x00"+b.client+"\x00"+b.subscription)
	})
	var b strings.Builder
	b.WriteString("| mode, scenario | client | subscription | switches | messages | lost | duplicates | order breaks | errors | hold p50 / max ms | gap p50 / max ms |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, k := range keys {
		r := of[k]
		scenario := k.mode + ": " + k.scenario
		if r.Outcome != "" {
			scenario += " (" + r.Outcome + ")"
		}
		duplicates, order := fmt.Sprint(r.Duplicates), fmt.Sprint(r.OrderBreaks)
		if r.Forecast != nil {
			duplicates += fmt.Sprintf(" (forecast %d)", *r.Forecast)
		}
		if r.AtMost != nil {
			duplicates += fmt.Sprintf(" (forecast at most %d)", *r.AtMost)
		}
		if r.Unordered {
			order = "–"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %s | %s | %d | %s | %s |\n", scenario, k.client, k.subscription, max(len(r.Holds), len(r.Gaps)), r.Acked, r.Lost, duplicates,
			order, r.Errors, spread(r.Holds), spread(r.Gaps))
	}
	return b.String()
}

// spread is the median and the largest of some times.
func spread(ms []float64) string {
	if len(ms) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f / %.0f", Percentile(ms, 0.5), Percentile(ms, 1))
}
