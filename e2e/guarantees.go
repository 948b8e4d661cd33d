package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Row is what one subscription of one client went through in a scenario. The tests write such lines (Row.save), and docs/guarantees.md and docs/guarantees-scenarios.md are made
// of them.
type Row struct {
	Test         string    `json:"test"` // that has measured it
	Run          string    `json:"run"`  // in which run of the tests; of each test the newest one counts
	Date         string    `json:"date"`
	Load         float64   `json:"load"` // average of the machine over a minute, when the traffic had ended
	Mode         string    `json:"mode"`
	Class        string    `json:"class,omitempty"` // what is special about the scenario: one of classes
	Scenario     string    `json:"scenario"`
	Client       string    `json:"client"`
	Subscription string    `json:"subscription"` // its type, and behind a comma how it was used
	Acked        int       `json:"acknowledged"` // publishes with a receipt
	Lost         int       `json:"lost"`
	Duplicates   int       `json:"duplicates"`
	OrderBreaks  int       `json:"order_breaks"`
	Unordered    bool      `json:"unordered,omitempty"` // several consumers share the messages: there is no order to be kept
	Errors       int       `json:"errors"`              // that the application saw
	Forecast     *int64    `json:"forecast,omitempty"`  // duplicates, where the test wants exactly so many
	AtMost       *int64    `json:"at_most,omitempty"`   // and where it allows no more than were forecast
	Holds        []float64 `json:"holds_ms,omitempty"`  // of each switch
	Gaps         []float64 `json:"gaps_ms,omitempty"`   // longest time between two receipts around each switch
}

// What can be special about a scenario, in the order of the tables.
const (
	classOrdinary  = ""
	classHand      = "messages in hand"  // consumers hold some back on purpose
	classVersions  = "between versions"  // of Pulsar
	classBatch     = "a batch"           // of many topics
	classTakenBack = "taken back"        // a drain, while it drains
	classFaults    = "faults and aborts" // of proxies, of the map's store, of replication, by operators
)

var (
	modes   = []string{"planned", "drain", "immediate", "failover"}
	classes = []string{classOrdinary, classHand, classBatch, classTakenBack, classVersions, classFaults}
)

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

// Newest are the rows of the last run of each test, sorted.
func Newest(rows []Row) (newest []Row) {
	run := map[string]string{}
	for _, r := range rows {
		run[r.Test] = r.Run
	}
	for _, r := range rows {
		if r.Run == run[r.Test] {
			newest = append(newest, r)
		}
	}
	slices.SortStableFunc(newest, func(a, b Row) int {
		return slices.Compare([]string{a.Test, a.Scenario, a.Subscription}, []string{b.Test, b.Scenario, b.Subscription})
	})
	return newest
}

// Lines is what ReadLines reads.
func Lines(rows []Row) (string, error) {
	var b bytes.Buffer
	lines := json.NewEncoder(&b)
	lines.SetEscapeHTML(false)
	for _, r := range rows {
		if err := lines.Encode(r); err != nil {
			return "", err
		}
	}
	return b.String(), nil
}

// kind is the type of the subscription.
func (r *Row) kind() string {
	kind, _, _ := strings.Cut(r.Subscription, ",")
	return kind
}

// heading is mode and class.
func (r *Row) heading() string {
	if r.Class == classOrdinary {
		return r.Mode
	}
	return r.Mode + ", " + r.Class
}

// place sorts headings.
func (r *Row) place() string {
	return fmt.Sprintf("%d%d", slices.Index(modes, r.Mode)+1, slices.Index(classes, r.Class)+1)
}

// total adds up rows. Those of one load, which has several subscriptions, share its publishes, switches and errors: they count once.
func total(rows []Row) Row {
	t := rows[0]
	t.Acked, t.Lost, t.Duplicates, t.OrderBreaks, t.Errors, t.Holds, t.Gaps, t.Unordered, t.Forecast, t.AtMost = 0, 0, 0, 0, 0, nil, nil, true, nil, nil
	loads := map[string]bool{}
	exact, bounded, forecast := true, true, int64(0)
	for _, r := range rows {
		t.Lost, t.Duplicates, t.OrderBreaks, t.Unordered = t.Lost+r.Lost, t.Duplicates+r.Duplicates, t.OrderBreaks+r.OrderBreaks, t.Unordered && r.Unordered
		if load := strings.Join([]string{r.Test, r.Scenario, r.Client}, "\x00"); !loads[load] {
			loads[load] = true
			t.Acked, t.Errors, t.Holds, t.Gaps = t.Acked+r.Acked, t.Errors+r.Errors, slices.Concat(t.Holds, r.Holds), slices.Concat(t.Gaps, r.Gaps)
		}
		switch {
		case r.Forecast != nil:
			forecast += *r.Forecast
		case r.AtMost != nil:
			forecast, exact = forecast+*r.AtMost, false
		default:
			exact, bounded = false, false
		}
	}
	switch {
	case exact:
		t.Forecast = &forecast
	case bounded:
		t.AtMost = &forecast
	}
	return t
}

// totals are the rows of each key added up, in the order of the keys.
func totals(rows []Row, key func(*Row) []string) (sums []Row) {
	of := map[string][]Row{}
	for _, r := range rows {
		k := strings.Join(append([]string{r.place()}, key(&r)...), "\x00")
		of[k] = append(of[k], r)
	}
	for _, k := range slices.Sorted(maps.Keys(of)) {
		sums = append(sums, total(of[k]))
	}
	return sums
}

// Overview is one line for each mode and class.
func Overview(rows []Row) string {
	var b strings.Builder
	b.WriteString("| mode | switches | messages | lost | duplicates | order breaks | errors | hold p50 / p99 / max ms |\n|---|---|---|---|---|---|---|---|\n")
	for _, r := range totals(rows, func(*Row) []string { return nil }) {
		fmt.Fprintf(&b, "| %s | %d | %d | %s | %s |\n", r.heading(), r.switches(), r.Acked, r.outcome(), spread(r.Holds, 0.5, 0.99, 1))
	}
	return b.String()
}

// Summary is one line for each client and type of subscription, with a heading for each mode and class.
func Summary(rows []Row) string {
	return tables("###", totals(rows, func(r *Row) []string { return []string{r.Client, r.kind()} }),
		"| client | subscription | switches | messages | lost | duplicates | order breaks | errors | hold p50 / max ms |\n|---|---|---|---|---|---|---|---|---|\n",
		func(r *Row) string {
			return fmt.Sprintf("| %s | %s | %d | %d | %s | %s |\n", r.Client, r.kind(), r.switches(), r.Acked, r.outcome(), spread(r.Holds, 0.5, 1))
		})
}

// Scenarios is one line for each scenario, client and subscription, with a heading for each mode and class.
func Scenarios(rows []Row) string {
	return tables("##", totals(rows, func(r *Row) []string { return []string{r.Scenario, r.Client, r.Subscription} }),
		"| scenario | client | subscription | switches | messages | lost | duplicates | order breaks | errors | hold p50 / max ms | gap p50 / max ms |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
		func(r *Row) string {
			return fmt.Sprintf("| %s | %s | %s | %d | %d | %s | %s | %s |\n", r.Scenario, r.Client, r.Subscription, r.switches(), r.Acked, r.outcome(), spread(r.Holds, 0.5, 1), spread(r.Gaps, 0.5, 1))
		})
}

// Measured says when the rows were measured, and how busy the machine was.
func Measured(rows []Row) string {
	tests, dates, loads := map[string]bool{}, map[string]bool{}, []float64(nil)
	for _, r := range rows {
		tests[r.Test], dates[r.Date] = true, true
		loads = append(loads, r.Load)
	}
	return fmt.Sprintf("%d rows of %d tests, measured on %s. Load average of the machine at the end of each: %.0f to %.0f, in the middle %.0f.\n", len(rows), len(tests),
		strings.Join(slices.Sorted(maps.Keys(dates)), " and "), Percentile(loads, 0), Percentile(loads, 1), Percentile(loads, 0.5))
}

// tables has a table for each heading, of that level.
func tables(level string, rows []Row, head string, line func(*Row) string) string {
	var b strings.Builder
	last := ""
	for _, r := range rows {
		if heading := r.heading(); heading != last {
			fmt.Fprintf(&b, "\n%s %s%s\n\n%s", level, strings.ToUpper(heading[:1]), heading[1:], head)
			last = heading
		}
		b.WriteString(line(&r))
	}
	return b.String() + "\n"
}

func (r *Row) switches() int { return max(len(r.Holds), len(r.Gaps)) }

// outcome is what became of the messages: four columns.
func (r *Row) outcome() string {
	duplicates, order := fmt.Sprint(r.Duplicates), fmt.Sprint(r.OrderBreaks)
	switch {
	case r.Forecast != nil && *r.Forecast > 0:
		duplicates += fmt.Sprintf(" (forecast %d)", *r.Forecast)
	case r.AtMost != nil && *r.AtMost > 0:
		duplicates += fmt.Sprintf(" (forecast at most %d)", *r.AtMost)
	}
	if r.Unordered {
		order = "–"
	}
	return fmt.Sprintf("%d | %s | %s | %d", r.Lost, duplicates, order, r.Errors)
}

// spread is some percentiles of some times.
func spread(ms []float64, percentiles ...float64) string {
	if len(ms) == 0 {
		return "–"
	}
	var texts []string
	for _, p := range percentiles {
		texts = append(texts, fmt.Sprintf("%.0f", Percentile(ms, p)))
	}
	return strings.Join(texts, " / ")
}
