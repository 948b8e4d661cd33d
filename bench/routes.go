package bench

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"pointsman/core/route"
)

// RoutesResult is what the route table costs at one size.
type RoutesResult struct {
	Topics        int     `json:"topics"`
	LoadSeconds   float64 `json:"load_seconds"`    // from decoded entries to a table
	BytesPerTopic float64 `json:"bytes_per_topic"` // live heap, names included
	DecideNs      float64 `json:"decide_ns"`       // a random topic that has an entry
	MissNs        float64 `json:"miss_ns"`         // a topic that has none
	PlainNs       float64 `json:"plain_ns"`        // the same question to a Go map, in turns with DecideNs
	Ratio         Ratio   `json:"decide_to_plain"`
	DecideAllocs  float64 `json:"decide_allocs"`
	ChangeP50     float64 `json:"change_p50_us"` // one entry changed: its bucket rebuilt and the pointer swapped
	ChangeMax     float64 `json:"change_max_us"`
}

// routeTenants and routeNamespaces shape the names: realistic lengths, many topics per namespace.
const (
	routeTenants    = 50
	routeNamespaces = 1000
)

func routeName(i int) string {
	return fmt.Sprintf("persistent://tenant-%02d/namespace-%03d/topic-%08d", i%routeTenants, i%routeNamespaces, i)
}

// Routes loads n entries into a table and measures it beside a plain Go map.
func Routes(n int) (RoutesResult, error) {
	r := RoutesResult{Topics: n}
	buckets := make(map[int][]route.Entry, route.BucketCount)
	plain := make(map[string]string, n)
	for i := range n {
		name := routeName(i)
		buckets[route.Bucket(name)] = append(buckets[route.Bucket(name)], route.Entry{Topic: name, Cluster: [2]string{"a", "b"}[i%2], Epoch: uint64(i % 3)})
	}
	before := liveHeap()
	start := time.Now()
	table, _, err := route.Empty().With(buckets, nil)
	if err != nil {
		return r, err
	}
	r.LoadSeconds = time.Since(start).Seconds()
	r.BytesPerTopic = float64(liveHeap()-before) / float64(n)
	clear(buckets)
	for e := range table.Each {
		plain[e.Topic] = e.Cluster
	}
	var current atomic.Pointer[route.Table]
	current.Store(table)

	// What is asked is parsed already and in no order that a cache could foresee; the text lies in one piece, as a frame's does.
	const asked = 1 << 17
	topics, missing := make([]route.Topic, asked), make([]route.Topic, asked)
	for i := range asked {
		if topics[i], err = route.ParseTopic(routeName(rand.IntN(n))); err != nil {
			return r, err
		}
		if missing[i], err = route.ParseTopic(routeName(n + rand.IntN(n))); err != nil {
			return r, err
		}
	}
	const rounds = 10
	var decide, ask []float64
	wrong := 0
	r.DecideAllocs = allocations(asked, func() {
		for _, t := range topics {
			if current.Load().Decide(t, "").Cluster == "" {
				wrong++
			}
		}
	})
	for range rounds {
		decide = append(decide, perCall(asked, func() {
			for _, t := range topics {
				if current.Load().Decide(t, "").Cluster == "" {
					wrong++
				}
			}
		}))
		ask = append(ask, perCall(asked, func() {
			for _, t := range topics {
				if plain[t.Base()] == "" {
					wrong++
				}
			}
		}))
	}
	r.DecideNs, r.PlainNs = medianOf(decide), medianOf(ask)
	r.Ratio, _ = pairedRatio(decide, ask)
	r.MissNs = perCall(asked, func() {
		for _, t := range missing {
			if current.Load().Decide(t, "").Cluster != "" {
				wrong++
			}
		}
	})
	if wrong > 0 {
		return r, fmt.Errorf("%d of the answers about %d topics were wrong", wrong, n)
	}
	return r, r.change(&current)
}

// change rebuilds one bucket after the other, as a watcher does that was told of one changed entry.
func (r *RoutesResult) change(current *atomic.Pointer[route.Table]) error {
	const changes = 500
	var took []float64
	for i := range changes {
		bucket := route.Bucket(routeName(rand.IntN(r.Topics)))
		entries := current.Load().Entries(bucket)
		entries[i%len(entries)].Epoch += 10
		start := time.Now()
		next, diff, err := current.Load().With(map[int][]route.Entry{bucket: entries}, nil)
		if err != nil {
			return err
		}
		current.Store(next)
		took = append(took, float64(time.Since(start).Nanoseconds())/1e3)
		if len(diff.Topics) != 1 {
			return fmt.Errorf("one entry was changed, and the table says %d were", len(diff.Topics))
		}
	}
	r.ChangeP50, r.ChangeMax = medianOf(took), slices.Max(took)
	return nil
}

// perCall runs f, which does n things, and returns ns per thing.
func perCall(n int, f func()) float64 {
	start := time.Now()
	f()
	return float64(time.Since(start).Nanoseconds()) / float64(n)
}

func allocations(n int, f func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(n)
}

func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// RoutesTable is the results as a table in Markdown.
func RoutesTable(results []RoutesResult) string {
	var b strings.Builder
	b.WriteString("| topics | load, s | B per topic | decide, ns | ÷ plain map | allocations | topic without entry, ns | one change p50, µs | max, µs |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range results {
		fmt.Fprintf(&b, "| %d | %.3f | %.0f | %.0f | %s | %.0f | %.0f | %.0f | %.0f |\n", r.Topics, r.LoadSeconds, r.BytesPerTopic, r.DecideNs, r.Ratio, r.DecideAllocs, r.MissNs, r.ChangeP50, r.ChangeMax)
	}
	return b.String()
}
