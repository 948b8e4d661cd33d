package e2e

import (
	"iter"
	"slices"
	"testing"
)

// numbers makes messages with the number as contents.
func numbers(ns ...int64) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for _, n := range ns {
			if !yield(Message{N: n, CRC: uint32(n), T: float64(n)}) {
				return
			}
		}
	}
}

func TestADigestFindsWhatWasLostDoubledAndReordered(t *testing.T) {
	corrupt := Message{N: 4, CRC: 99}
	d := Compare(numbers(1, 2, 3, 4, 5), Joined(numbers(1, 3, 3, 2, 7), slices.Values([]Message{corrupt})))
	if d.Acked != 5 || d.Received != 5 || d.Duplicates != 1 || d.OrderBreaks != 2 {
		t.Errorf("got %v, want acknowledged 5, received 5 (1 2 3 4 7), one duplicate (3), order breaks at 2 and 4", d)
	}
	if !slices.Equal(d.Lost, []int64{5}) || !slices.Equal(d.Unexpected, []int64{7}) || !slices.Equal(d.Corrupt, []int64{4}) {
		t.Errorf("got lost %v, without receipt %v, corrupt %v; want 5, 7, 4", d.Lost, d.Unexpected, d.Corrupt)
	}
}

func TestADigestOfADuplicateIsNotAnOrderBreak(t *testing.T) {
	if d := Compare(numbers(1, 2), numbers(1, 2, 1)); d.OrderBreaks != 0 || d.Duplicates != 1 {
		t.Errorf("got %v, want one duplicate and no order break: a message may come again after a move", d)
	}
}

func TestWhatCameAgainIsToldByBursts(t *testing.T) {
	at := func(ms float64, n int64) Message { return Message{N: n, T: ms} }
	acks := slices.Values([]Message{at(40, 2), at(50, 3)})
	got := Again(acks, slices.Values([]Message{at(0, 1), at(1, 2), at(2, 3), at(500, 3), at(1400, 2), at(1500, 4), at(2500, 1), at(2600, 5)}))
	want := []Burst{{From: 500, To: 1400, Messages: 2, Lowest: 2, Highest: 3, Behind: 460}, {From: 2500, To: 2500, Messages: 1, Lowest: 1, Highest: 1, Behind: -1}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestTheLongestGapIsTheOneThatTouchesTheWindow(t *testing.T) {
	times := TimesOf(numbers(2000, 1000, 1900, 2300, 2310, 9000))
	for _, c := range []struct{ from, to, want float64 }{
		{1950, 2305, 300}, // all of 2000..2300
		{2100, 2200, 300}, // inside it
		{2302, 2309, 10},
		{2302, 2400, 6690}, // begins inside, ends after
	} {
		if got := LongestGap(times, c.from, c.to); got != c.want {
			t.Errorf("LongestGap(%v to %v) = %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

func TestPercentilesOfAFewValues(t *testing.T) {
	values := []float64{5, 1, 3}
	if got := [3]float64{Percentile(values, 0.5), Percentile(values, 1), Percentile(nil, 0.5)}; got != [3]float64{3, 5, 0} {
		t.Errorf("got p50, max, p50 of none = %v, want 3, 5, 0", got)
	}
}
