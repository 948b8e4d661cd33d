package bench

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// Ratio compares one measure of two targets over paired runs.
type Ratio struct {
	Median float64 `json:"median"`
	Lo     float64 `json:"lo"`
	Hi     float64 `json:"hi"`
	// Coverage is the confidence with which the true median lies between Lo and Hi: at least 0.95 when there are enough pairs
	// (6), less with fewer, where Lo and Hi are the extremes.
	Coverage float64 `json:"coverage"`
	Pairs    int     `json:"pairs"`
}

// tieWithin is the difference from 1 below which two targets count as level.
const tieWithin = 0.10

// Tie tells whether the difference is too small to be one.
func (r Ratio) Tie() bool { return math.Abs(r.Median-1) < tieWithin }

// Spread is the median with its interval.
func (r Ratio) Spread() string {
	return fmt.Sprintf("%s (%s–%s)", number(r.Median), number(r.Lo), number(r.Hi))
}

// String is the ratio with its interval, and the word for a difference that is none.
func (r Ratio) String() string {
	s := r.Spread()
	if r.Tie() {
		s += " tie"
	}
	return s
}

// pairedRatio is a[i]/b[i] over all i, summed up. Pairs whose values are not positive are left out; ok is false when none is left.
func pairedRatio(a, b []float64) (r Ratio, ok bool) {
	var ratios []float64
	for i := range min(len(a), len(b)) {
		if a[i] > 0 && b[i] > 0 {
			ratios = append(ratios, a[i]/b[i])
		}
	}
	if len(ratios) == 0 {
		return Ratio{}, false
	}
	return summary(ratios), true
}

// summary is the median of values, at least one, with its interval. It sorts them.
func summary(values []float64) Ratio {
	slices.Sort(values)
	n := len(values)
	k, coverage := medianInterval(n)
	return Ratio{Median: median(values), Lo: values[k], Hi: values[n-1-k], Coverage: coverage, Pairs: n}
}

// medianInterval says which order statistics enclose the median of n values with a confidence of at least 95 %: the (k+1)th smallest and
// largest. It needs no assumption on how the values are distributed. With fewer than 6 values they are the extremes.
func medianInterval(n int) (k int, coverage float64) {
	const want = 0.95
	below := math.Pow(0.5, float64(n)) // P(at most k of n values are below the median)
	term := below
	coverage = max(1-2*below, 0)
	for i := 1; i < (n+1)/2; i++ {
		term *= float64(n-i+1) / float64(i)
		below += term
		if 1-2*below < want {
			break
		}
		k, coverage = i, 1-2*below
	}
	return k, coverage
}

// median of sorted values; NaN of none.
func median(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func medianOf(values []float64) float64 {
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	return median(sorted)
}

// number writes three digits, or whole numbers from 100 on.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1 || v == 0:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'g', 2, 64)
}
