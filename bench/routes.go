package bench

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
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

	// While a writer changes one entry after the other, writesPerSecond: nil where there are more topics than mutableTopics.
	Writing []WritingResult `json:"while_writing,omitempty"`
}

// WritingResult is what a decision costs beside a writer, ns per decision and reader (median), in turns. The mutex guards a Go map that is changed in
// place; the copy is a Go map that is replaced as a whole, as often as there is time for it.
type WritingResult struct {
	Readers   int     `json:"readers"`
	TableNs   float64 `json:"table_ns"`
	MutexNs   float64 `json:"rwmutex_map_ns"`
	CopyNs    float64 `json:"copied_map_ns"`
	ToMutex   Ratio   `json:"table_to_rwmutex_map"`
	ToCopy    Ratio   `json:"table_to_copied_map"`
	Copies    float64 `json:"copies_per_second"`
	TableRate float64 `json:"table_changes_per_second"`
}

// writesPerSecond is how often the writer changes an entry, if it can.
const writesPerSecond = 1000

// mutableTopics bounds what is measured beside a writer: three maps and a copy of one have to fit.
const mutableTopics = 1_000_000

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
	plain := make(map[string]route.Entry, n) // cluster, epoch and state, as a decision has them
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
		plain[e.Topic] = e
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
				if plain[t.Base()].Cluster == "" {
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
	if n <= mutableTopics {
		r.Writing = writing(&current, plain, topics)
	}
	return r, r.change(&current)
}

// writing measures the three beside a writer, with 1 and 2 readers.
func writing(current *atomic.Pointer[route.Table], plain map[string]route.Entry, topics []route.Topic) (all []WritingResult) {
	const rounds, window = 10, 100 * time.Millisecond
	first := topics[0].Base()
	var mu sync.RWMutex
	var copied atomic.Pointer[map[string]route.Entry]
	copied.Store(&plain)
	clusters := [2]string{"a", "b"}
	mutable := maps.Clone(plain)
	kinds := []struct {
		read  func(t route.Topic) string
		write func(i int)
	}{
		{func(t route.Topic) string { return current.Load().Decide(t, "").Cluster }, func(i int) {
			e, _ := current.Load().Entry(first)
			e.Cluster = clusters[i%2]
			next, err := current.Load().WithEntry(first, &e)
			if err != nil {
				panic("bench: an entry of the table cannot be changed: " + err.Error())
			}
			current.Store(next)
		}},
		{func(t route.Topic) string {
			mu.RLock()
			defer mu.RUnlock()
			return mutable[t.Base()].Cluster
		}, func(i int) {
			mu.Lock()
			defer mu.Unlock()
			e := mutable[first]
			e.Cluster = clusters[i%2]
			mutable[first] = e
		}},
		{func(t route.Topic) string { return (*copied.Load())[t.Base()].Cluster }, func(i int) {
			next := maps.Clone(*copied.Load())
			e := next[first]
			e.Cluster = clusters[i%2]
			next[first] = e
			copied.Store(&next)
		}},
	}
	for _, readers := range []int{1, 2} {
		var ns [3][]float64
		var writes [3]float64
		for range rounds {
			for i, kind := range kinds {
				took, n := besideWriter(readers, window, topics, kind.read, kind.write)
				ns[i] = append(ns[i], took)
				writes[i] += n / rounds
			}
		}
		r := WritingResult{Readers: readers, TableNs: medianOf(ns[0]), MutexNs: medianOf(ns[1]), CopyNs: medianOf(ns[2]), TableRate: writes[0], Copies: writes[2]}
		r.ToMutex, _ = pairedRatio(ns[0], ns[1])
		r.ToCopy, _ = pairedRatio(ns[0], ns[2])
		all = append(all, r)
	}
	return all
}

// besideWriter lets readers ask for a while beside one writer: ns per question and reader, and changes per second.
func besideWriter(readers int, window time.Duration, topics []route.Topic, read func(route.Topic) string, write func(i int)) (ns, perSecond float64) {
	var stop atomic.Bool
	var wg, writer sync.WaitGroup
	writer.Go(func() {
		start, writes := time.Now(), 0
		for !stop.Load() {
			write(writes)
			writes++
			time.Sleep(time.Until(start.Add(time.Duration(writes) * time.Second / writesPerSecond)))
		}
		perSecond = float64(writes) / time.Since(start).Seconds()
	})
	var asked atomic.Int64
	start := time.Now()
	for reader := range readers {
		wg.Go(func() {
			const batch = 256 // questions between two looks at the clock
			n := 0
			for at := reader * len(topics) / readers; time.Since(start) < window; at += batch {
				for i := range batch {
					if read(topics[(at+i)%len(topics)]) == "" {
						panic("bench: a topic has lost its cluster")
					}
				}
				n += batch
			}
			asked.Add(int64(n))
		})
	}
	wg.Wait()
	ns = float64(time.Since(start).Nanoseconds()) * float64(readers) / float64(asked.Load())
	stop.Store(true)
	writer.Wait()
	return ns, perSecond
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
	b.WriteString("\n| topics, beside a writer | readers | decide, ns per reader | ÷ RWMutex map | ÷ copied map | changes per s: table | copied map |\n|---|---|---|---|---|---|---|\n")
	for _, r := range results {
		for _, w := range r.Writing {
			fmt.Fprintf(&b, "| %d | %d | %.0f | %s | %s | %.0f | %.1f |\n", r.Topics, w.Readers, w.TableNs, w.ToMutex, w.ToCopy, w.TableRate, w.Copies)
		}
	}
	return b.String()
}
