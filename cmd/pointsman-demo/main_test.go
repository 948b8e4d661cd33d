package main

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"pointsman/internal/testkit"
)

// The last line is a promise to scripts.
func TestTheDemoEndsWellAndSaysSo(t *testing.T) {
	var out, errOut strings.Builder
	code := run(t.Context(), &out, &errOut, pace{before: 300 * time.Millisecond, after: 300 * time.Millisecond})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := lines[len(lines)-1]
	if code != 0 || !regexp.MustCompile(`^demo: ok lost=0 duplicates=\d+ errors=0 gap_ms=\d+$`).MatchString(last) {
		t.Fatalf("exit code %d, last line %q\n%s", code, last, errOut.String())
	}
	for _, want := range []string{"before ", "switch ", "after ", "neighbour "} {
		if !strings.Contains(out.String(), "\n"+want) {
			t.Errorf("the story has no %q:\n%s", want, out.String())
		}
	}
}

func TestADemoThatIsInterruptedFails(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out, errOut strings.Builder
	if code := run(ctx, &out, &errOut, pace{before: time.Minute, after: time.Minute}); code != 1 {
		t.Fatalf("exit code %d", code)
	}
	if !strings.HasPrefix(out.String()[strings.LastIndex(strings.TrimSpace(out.String()), "\n")+1:], "demo: failed lost=0 ") {
		t.Errorf("last line of %q", out.String())
	}
}

func TestLostAndRepeatedMessagesAreCounted(t *testing.T) {
	s, now := newStream(), time.Now()
	for n := range 4 {
		s.noteReceipt(n, nil, now)
	}
	s.sent = 5
	s.noteReceipt(4, errors.New("time-out"), now) // not acknowledged, so it may be missing
	s.noteRead(0)
	s.noteRead(1)
	s.noteRead(1)
	s.noteRead(1)
	s.noteRead(3)
	if lost, duplicates := s.tally(); lost != 1 || duplicates != 2 {
		t.Fatalf("lost %d, duplicates %d, want 1 and 2", lost, duplicates)
	}
	if s.complete() {
		t.Fatal("complete although number 2 was not read")
	}
	if s.noteRead(2); !s.complete() {
		t.Fatal("not complete although everything acknowledged was read")
	}
}

func TestTheGapIsTheLongestWaitThatTouchesTheSwitch(t *testing.T) {
	s, start := newStream(), time.Now()
	for n, ms := range []int{0, 500, 510, 600, 605, 900} {
		s.noteReceipt(n, nil, start.Add(time.Duration(ms)*time.Millisecond))
	}
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct{ from, to, want int }{{505, 603, 90}, {550, 560, 90}, {510, 511, 90}, {0, 2000, 500}, {603, 604, 5}} {
		if got := s.gap(at(c.from), at(c.to)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("gap of %d..%d: %v, want %d ms", c.from, c.to, got, c.want)
		}
	}
}

// A demo that cannot fail shows nothing: every broken promise must count.
func TestBrokenPromisesAreErrors(t *testing.T) {
	blue, green := testkit.NewCluster("blue", testkit.Options{}), testkit.NewCluster("green", testkit.Options{})
	defer blue.Close()
	defer green.Close()
	m := move{from: time.Now().Add(-time.Minute), to: time.Now().Add(-time.Minute)}
	blue.Publish(ordersTopic, "p", 0, []byte("1"))
	green.Publish(invoicesTopic, "p", 0, []byte("1"))
	r := judge(newStream(), newStream(), blue, green, m)
	for _, want := range []string{"1 orders were published to blue", "no order was published to green", "1 invoices are on green", "opened 0 times", "did not share one connection"} {
		if !strings.Contains(r.faults.String(), want) {
			t.Errorf("not noticed: %s", want)
		}
	}
	if r.errors != len(r.faults) || r.errors != 5 {
		t.Errorf("%d errors for %v", r.errors, r.faults)
	}
}
