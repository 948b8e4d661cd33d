package route

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/puzpuzpuz/xsync/v4"
)

// The table against what one might have used instead, in one run, so that only ratios are read:
//
//	go test -run '^$' -bench Decide ./core/route
//
// The others are keyed by base name with an Entry as value and answer exact entries only, so they do less work. plain is a Go map without any
// protection, which a writer would have to copy as a whole.
var benchSizes = []int{1_000, 100_000, 1_000_000}

type lookup func(Topic) (cluster string, epoch uint64)

func BenchmarkDecide(b *testing.B) {
	for _, n := range benchSizes {
		table, names := syntheticTable(b, n)
		// The order is one that caches cannot foresee; but the asked name itself is at hand, as it is when a frame has just been parsed.
		asked := make([]string, n)
		for i := range asked {
			asked[i] = names[i*7919%n]
		}
		text := strings.Join(asked, "")
		topics := make([]Topic, n)
		for i := range topics {
			topics[i] = mustTopic(b, text[:len(asked[i])])
			text = text[len(asked[i]):]
		}
		plain, other, xs := map[string]Entry{}, new(sync.Map), xsync.NewMap[string, Entry]()
		for e := range table.Each {
			plain[e.Topic] = e
			other.Store(e.Topic, e)
			xs.Store(e.Topic, e)
		}
		var current atomic.Pointer[Table]
		current.Store(table)
		run := func(name string, f lookup) {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if _, epoch := f(topics[i%n]); epoch > 6 {
						b.Fatal("wrong answer")
					}
				}
			})
		}
		decide := func(t Topic) (string, uint64) {
			d := current.Load().Decide(t, "a")
			return d.Cluster, d.Epoch
		}
		run("table", decide)
		run("plain", func(t Topic) (string, uint64) { e := plain[t.Base()]; return e.Cluster, e.Epoch })
		run("syncmap", func(t Topic) (string, uint64) {
			v, _ := other.Load(t.Base())
			e := v.(Entry)
			return e.Cluster, e.Epoch
		})
		run("xsync", func(t Topic) (string, uint64) { e, _ := xs.Load(t.Base()); return e.Cluster, e.Epoch })

		// The same while a writer replaces one entry after the other, 1,000 a second.
		entry, _ := table.Entry(names[0])
		runWriting := func(name string, f lookup, write func(epoch uint64)) {
			stop, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(ended)
				tick := time.NewTicker(time.Millisecond)
				defer tick.Stop()
				for epoch := uint64(0); ; epoch++ {
					select {
					case <-stop:
						return
					case <-tick.C:
						write(epoch % 7)
					}
				}
			}()
			run(name, f)
			close(stop)
			<-ended
		}
		runWriting("table+writer", decide, func(epoch uint64) {
			e := entry
			e.Epoch = epoch
			next, err := current.Load().WithEntry(e.Topic, &e)
			if err != nil {
				panic(err)
			}
			current.Store(next)
		})
		runWriting("syncmap+writer", func(t Topic) (string, uint64) {
			v, _ := other.Load(t.Base())
			e := v.(Entry)
			return e.Cluster, e.Epoch
		}, func(epoch uint64) { e := entry; e.Epoch = epoch; other.Store(e.Topic, e) })
		runWriting("xsync+writer", func(t Topic) (string, uint64) { e, _ := xs.Load(t.Base()); return e.Cluster, e.Epoch },
			func(epoch uint64) { e := entry; e.Epoch = epoch; xs.Store(e.Topic, e) })
	}
}

// BenchmarkDecideByRule is a topic without an entry: a miss and up to three rules.
func BenchmarkDecideByRule(b *testing.B) {
	table, _ := syntheticTable(b, 100_000)
	for what, name := range map[string]string{"namespace": "persistent://tenant-02/namespace-002/none", "tenant": "persistent://tenant-01/x/none", "default": "persistent://t/ns/none"} {
		topic := mustTopic(b, name)
		b.Run(what, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				table.Decide(topic, "a")
			}
		})
	}
}

// BenchmarkWith is one change of one bucket, from the store's update to the table to publish, against the copy of a whole map.
func BenchmarkWith(b *testing.B) {
	for _, n := range benchSizes {
		table, names := syntheticTable(b, n)
		bucket := Bucket(names[n/2])
		updates := [2]map[int][]Entry{{bucket: table.Entries(bucket)}, {bucket: table.Entries(bucket)}}
		updates[1][bucket][0].Epoch = 9
		b.Run(fmt.Sprintf("table/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				next, changes, err := table.With(updates[(i+1)%2], nil)
				if err != nil || len(changes.Topics) != 1 {
					b.Fatal(changes, err)
				}
				table = next
			}
		})
		plain := map[string]Entry{}
		for e := range table.Each {
			plain[e.Topic] = e
		}
		b.Run(fmt.Sprintf("plain/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				next := make(map[string]Entry, len(plain))
				for k, v := range plain {
					next[k] = v
				}
				plain = next
			}
		})
	}
}

// BenchmarkMemory prints bytes per topic, names included.
func BenchmarkMemory(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				perTopic, nameLen := memoryPerTopic(b, n)
				b.ReportMetric(perTopic, "B/topic")
				b.ReportMetric(nameLen, "nameB/topic")
			}
		})
	}
}

func memoryPerTopic(t testing.TB, n int) (perTopic, nameLen float64) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	table, names := syntheticTable(t, n)
	length := 0
	for _, name := range names {
		length += len(name)
	}
	names = nil
	after := heap()
	runtime.KeepAlive(table)
	_ = names
	return float64(after-before) / float64(n), float64(length) / float64(n)
}

func TestATopicTakesAtMostAHundredBytes(t *testing.T) {
	perTopic, nameLen := memoryPerTopic(t, 100_000)
	t.Logf("%.1f bytes per topic, %.1f of them the name", perTopic, nameLen)
	if perTopic > 100 {
		t.Errorf("%.1f bytes per topic with names of %.1f bytes", perTopic, nameLen)
	}
}

func BenchmarkParseTopic(b *testing.B) {
	for _, name := range []string{"persistent://tenant-02/namespace-002/topic-000123-partition-12", "short-name"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseTopic(name); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
