package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pointsman/internal/golden"
)

// docs/guarantees.md says what the tests have measured last, and nothing else (`make guarantees`); what a newer run has measured again is left out of the file of rows.
func TestTheTableOfGuaranteesIsOfTheMeasuredRows(t *testing.T) {
	file, err := os.Open(filepath.Join("testdata", "guarantees.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rows, err := ReadLines[Row](file)
	if err != nil {
		t.Fatal(err)
	}
	rows = Newest(rows)
	text, err := Lines(rows)
	if err != nil {
		t.Fatal(err)
	}
	golden.File(t, "guarantees.jsonl", text)
	golden.Sections(t, filepath.Join("..", "docs", "guarantees.md"), map[string]string{"measured": Measured(rows), "modes": Overview(rows), "table": Summary(rows)})
	golden.Sections(t, filepath.Join("..", "docs", "guarantees-scenarios.md"), map[string]string{"rows": Scenarios(rows)})
}

func TestTheTableOfLongRunsIsOfTheMeasuredOnes(t *testing.T) {
	file, err := os.Open(filepath.Join("testdata", "runs.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	runs, err := ReadLines[Run](file)
	if err != nil {
		t.Fatal(err)
	}
	golden.Sections(t, filepath.Join("..", "docs", "guarantees.md"), map[string]string{"runs": RunsTable(runs)})
}

func TestRunsOfTheSameTrafficAreSummedUp(t *testing.T) {
	acks := numbers(0, 2, 1)
	run := Run{Date: "2026-11-29", Client: "go", Traffic: TrafficOf([]string{"--sync", "true", "--batch", "false"}), Asked: 5, Seconds: secondsOf([]float64{1000, 1500, 2000}), Messages: 3, Holds: []float64{30, 10.4, 20}}
	for _, recvs := range [][]int64{{0, 1, 2}, {0, 2, 1, 1}, {0, 1}} {
		run.take(Compare(acks, numbers(recvs...)))
	}
	other := Run{Date: "2026-11-28", Client: "go", Traffic: TrafficOf(nil), Asked: 5}
	again := Run{Date: "2026-11-30", Client: "go", Traffic: run.Traffic, Asked: 5, Seconds: 3, Messages: 1, Undone: 2, Errors: 4, Holds: []float64{40}}
	text := RunsTable([]Run{run, other, again})
	for _, line := range []string{
		"| 2026-11-30 | go | synchronous, no batches | 5 / 1 | 4 | 2 | 4 | 1 | 1 | 1 | 4 | 30 / 40 / 40 |\n",
		"| 2026-11-28 | go | asynchronous, batches | 5 / 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 / 0 / 0 |\n",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("got %s, want the line %s", text, line)
		}
	}
}

func TestRowsAreSummedUp(t *testing.T) {
	two := int64(2)
	row := func(test, class, scenario, subscription string, r Row) Row {
		r.Test, r.Mode, r.Class, r.Scenario, r.Client, r.Subscription = test, "planned", class, scenario, "go", subscription
		return r
	}
	rows := []Row{
		row("one", classOrdinary, "s", "shared, individual acks, 2 consumer(s)", Row{Acked: 10, Unordered: true, Errors: 4, Holds: []float64{10, 30}, Gaps: []float64{50}}),
		row("one", classOrdinary, "s", "exclusive, cumulative acks, 1 consumer(s)", Row{Acked: 10, Lost: 1, OrderBreaks: 3, Errors: 4, Holds: []float64{10, 30}, Gaps: []float64{50}}),
		row("two", classOrdinary, "t", "exclusive, individual acks, 1 consumer(s)", Row{Acked: 5, Duplicates: 1, Holds: []float64{20}}),
		row("three", classHand, "u", "shared, individual acks, 1 consumer(s)", Row{Acked: 5, Duplicates: 2, Forecast: &two}),
		row("four", classVersions, "u", "shared, individual acks, 1 consumer(s)", Row{Acked: 5, Duplicates: 1, AtMost: &two}),
		row("five", classVersions, "u", "shared, individual acks, 1 consumer(s)", Row{Acked: 6, Duplicates: 2, Forecast: &two}),
		row("six", classFaults, "u", "shared, individual acks, 1 consumer(s)", Row{Acked: 5, Duplicates: 1, AtMost: &two}),
		row("seven", classFaults, "u", "shared, individual acks, 1 consumer(s)", Row{Acked: 5, Duplicates: 1}),
	}
	for what, want := range map[string][]string{
		Overview(rows): {
			"| planned | 3 | 15 | 1 | 1 | 3 | 4 | 20 / 30 / 30 |\n", // the messages, switches and errors of test one count once
			"| planned, messages in hand | 0 | 5 | 0 | 2 (forecast 2) | 0 | 0 | – |\n",
			"| planned, between versions | 0 | 11 | 0 | 3 (forecast at most 4) | 0 | 0 | – |\n",
			"| planned, faults and aborts | 0 | 10 | 0 | 2 | 0 | 0 | – |\n",
		},
		Summary(rows): {
			"### Planned\n\n| client |",
			"| go | exclusive | 3 | 15 | 1 | 1 | 3 | 4 | 20 / 30 |\n| go | shared | 2 | 10 | 0 | 0 | – | 4 | 30 / 30 |\n\n### Planned, messages in hand\n",
		},
		Scenarios(rows): {
			"| s | go | exclusive, cumulative acks, 1 consumer(s) | 2 | 10 | 1 | 0 | 3 | 4 | 30 / 30 | 50 / 50 |\n",
			"| t | go | exclusive, individual acks, 1 consumer(s) | 1 | 5 | 0 | 1 | 0 | 0 | 20 / 20 | – |\n",
		},
	} {
		for _, line := range want {
			if !strings.Contains(what, line) {
				t.Errorf("the table lacks %s\n%s", line, what)
			}
		}
	}
}

func TestOfEachTestTheNewestRowsCount(t *testing.T) {
	rows := Newest([]Row{{Test: "b", Run: "1"}, {Test: "a", Run: "1", Subscription: "x"}, {Test: "a", Run: "1", Subscription: "y"}, {Test: "a", Run: "2", Subscription: "z"}})
	if want := []Row{{Test: "a", Run: "2", Subscription: "z"}, {Test: "b", Run: "1"}}; !slices.Equal(namesOf(rows), namesOf(want)) {
		t.Errorf("got %+v, want %+v", rows, want)
	}
}

func namesOf(rows []Row) (names []string) {
	for _, r := range rows {
		names = append(names, r.Test+r.Run+r.Subscription)
	}
	return names
}

func TestOrderIsJudgedKeyByKey(t *testing.T) {
	sent := numbers(0, 1, 2, 3, 4, 5)
	if d := CompareKeys(sent, numbers(1, 3, 5, 0, 2, 4), 2); !d.Perfect() {
		t.Errorf("two keys, each in order: %v", d)
	}
	if d := CompareKeys(sent, numbers(1, 5, 3, 0, 2, 4), 2); d.OrderBreaks != 1 || d.Perfect() {
		t.Errorf("one key out of order: %v", d)
	}
	if d := CompareKeys(sent, numbers(1, 3, 5, 0, 2, 4), 0); d.OrderBreaks != 3 {
		t.Errorf("without keys all are one: %v", d)
	}
}
