package bench

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// SessionsResult is the memory that idle sessions take in Pointsman, at several sizes, and the line through them.
type SessionsResult struct {
	Unbridged bool      `json:"unbridged"`
	Sizes     []int     `json:"connections"`
	MiB       []float64 `json:"pss_growth_mib"` // of the whole process, by size: medians
	// The line of least squares: MiB = Fixed + connections × PerKiB / 1024.
	PerKiB    float64 `json:"kib_per_connection"`
	Fixed     float64 `json:"fixed_mib"`
	Deviation float64 `json:"largest_deviation"` // of a size from the line, as a share of it
	Projected float64 `json:"projected_mib"`     // for projectedSessions: a projection, where the limit of open files forbids to measure
}

// projectedSessions is the number of sessions that the goal is about.
const projectedSessions = 50_000

// Sessions holds connections of one kind, in a new proxy for each size and round.
func Sessions(lab *Lab, sizes []int, unbridged bool, repeat int, progress io.Writer) (r SessionsResult, err error) {
	if len(sizes) < 3 {
		return r, errors.New("a line through fewer than 3 sizes says nothing: name more")
	}
	r = SessionsResult{Unbridged: unbridged, Sizes: sizes}
	var results []*Result
	for _, n := range sizes {
		const quiet = time.Second
		one, err := newResult(lab, Params{Scenario: "hold", Connections: n, Unbridged: unbridged, Warmup: quiet, Duration: quiet}, []string{"pointsman"})
		if err != nil {
			return r, err
		}
		results = append(results, one)
	}
	k, err := newRack(lab, 0, progress)
	if err != nil {
		return r, err
	}
	defer k.close()
	for round := range repeat {
		for _, one := range results {
			if err := k.round(one, round); err != nil {
				return r, err
			}
			if why := one.Skipped["pointsman"]; why != "" {
				return r, errors.New(why)
			}
		}
	}
	for _, one := range results {
		if _, err := one.WriteRaw(lab.Root); err != nil {
			return r, err
		}
		r.MiB = append(r.MiB, medianOf(one.values("pointsman", "pss_growth_mib")))
	}
	r.fit()
	return r, nil
}

// fit draws the line.
func (r *SessionsResult) fit() {
	var x, y, xx, xy float64
	n := float64(len(r.Sizes))
	for i, size := range r.Sizes {
		s := float64(size)
		x, y, xx, xy = x+s, y+r.MiB[i], xx+s*s, xy+s*r.MiB[i]
	}
	slope := (n*xy - x*y) / (n*xx - x*x)
	r.PerKiB, r.Fixed = slope*1024, (y-slope*x)/n
	line := func(size float64) float64 { return r.Fixed + slope*size }
	for i, size := range r.Sizes {
		r.Deviation = max(r.Deviation, math.Abs(r.MiB[i]/line(float64(size))-1))
	}
	r.Projected = line(projectedSessions)
}

// SessionsTable is the results in Markdown.
func SessionsTable(results []SessionsResult) string {
	var b strings.Builder
	for _, r := range results {
		kind := "bridged, a producer each"
		if r.Unbridged {
			kind = "for lookups"
		}
		fmt.Fprintf(&b, "| idle connections, %s |", kind)
		for _, size := range r.Sizes {
			fmt.Fprintf(&b, " %d |", size)
		}
		b.WriteString("\n|---|" + strings.Repeat("---|", len(r.Sizes)) + "\n| growth of the proxy's memory (PSS), MiB |")
		for _, mib := range r.MiB {
			fmt.Fprintf(&b, " %s |", number(mib))
		}
		fmt.Fprintf(&b, "\n\n%.2f KiB per connection and %s MiB fixed; no size is more than %.1f %% off that line. Projection, not measured: %s MiB for %d.\n\n",
			r.PerKiB, number(r.Fixed), 100*r.Deviation, number(r.Projected), projectedSessions)
	}
	return b.String()
}
