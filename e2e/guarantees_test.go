package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pointsman/internal/golden"
)

// docs/guarantees.md says what the tests have measured last, and nothing else (`make guarantees`).
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
	golden.Sections(t, filepath.Join("..", "docs", "guarantees.md"), map[string]string{"table": Table(rows)})
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

func TestRowsOfOneSubscriptionAreSummedUp(t *testing.T) {
	two := int64(2)
	text := Table([]Row{
		{Mode: "planned", Scenario: "s", Client: "go", Subscription: "shared", Acked: 10, Duplicates: 2, Forecast: &two, Unordered: true, Holds: []float64{10, 30}, Gaps: []float64{50}},
		{Mode: "planned", Scenario: "t", Client: "go", Subscription: "shared", Acked: 5, Duplicates: 1, AtMost: &two},
		{Mode: "planned", Scenario: "t", Client: "go", Subscription: "shared", Acked: 5, Duplicates: 2, AtMost: &two},
		{Mode: "planned", Scenario: "s", Client: "go", Subscription: "exclusive", Acked: 7, Lost: 1, OrderBreaks: 3, Errors: 4, Outcome: "aborted"},
		{Mode: "planned", Scenario: "s", Client: "go", Subscription: "shared", Acked: 5, Duplicates: 2, Forecast: &two, Unordered: true, Holds: []float64{20}},
	})
	for _, line := range []string{
		"| planned: s | go | shared | 3 | 15 | 0 | 4 (forecast 4) | – | 0 | 20 / 30 | 50 / 50 |\n",
		"| planned: t | go | shared | 0 | 10 | 0 | 3 (forecast at most 4) | 0 | 0 | – | – |\n",
		"| planned: s (aborted) | go | exclusive | 0 | 7 | 1 | 0 | 3 | 4 | – | – |\n",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("the table lacks %s\n%s", line, text)
		}
	}
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
