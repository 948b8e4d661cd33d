//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/log"

	"pointsman/core/switching"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// What one command moves, all topics of a namespace: how long it takes, what each topic feels, what it costs. E2E_TOPICS and E2E_REAL_TOPICS are the numbers of
// topics on fake and on real brokers; `make bench-batch` runs 10,000 and 500.
func TestANamespaceOfManyTopicsMoves(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		n := count("E2E_TOPICS", 60)
		a, config, topics := fakePair(t, "acme/many", "many-fake-"+runID, n)
		for _, topic := range topics {
			a.Acknowledge(topic, subscriptionOf(topic), func(int) bool { return true })
		}
		moveNamespace(t, many{
			what: fmt.Sprintf("%d topics on fake brokers", n), namespace: "acme/many", topics: topics, config: config, chroot: "many-fake-" + runID,
			rate: max(0.05, 200/float64(n)), each: 150 * time.Millisecond,
		})
	})
	t.Run("real", func(t *testing.T) {
		n := count("E2E_REAL_TOPICS", 10)
		namespace := replicatedNamespace(t, "many")
		topics := make([]string, n)
		for i := range topics {
			topics[i] = fmt.Sprintf("persistent://%s/t-%05d", namespace, i)
		}
		chroot := "many-real-" + runID
		moveNamespace(t, many{
			what: fmt.Sprintf("%d topics on real brokers", n), namespace: namespace, topics: topics, config: rig.PointsmanConfig(chroot, ""), chroot: chroot,
			rate: max(0.5, 100/float64(n)), each: 2 * time.Second,
		})
	})
}

// fakePair are two fake clusters with the topics of a namespace, and what proxies need to know of them.
func fakePair(t *testing.T, namespace, chroot string, n int) (a *testkit.Cluster, config string, topics []string) {
	t.Helper()
	a = testkit.NewCluster("a", testkit.Options{Brokers: 2, LogSize: 1})
	b := testkit.NewCluster("b", testkit.Options{Brokers: 2, LedgerBase: 1 << 20, LogSize: 1})
	t.Cleanup(a.Close)
	t.Cleanup(b.Close)
	replication := testkit.Replicate(a, b, testkit.ReplicationOptions{})
	t.Cleanup(replication.Close)
	topics = make([]string, n)
	for i := range topics {
		topics[i] = fmt.Sprintf("persistent://%s/t-%06d", namespace, i)
		a.CreateTopic(topics[i], 0)
		b.CreateTopic(topics[i], 0)
	}
	return a, rig.listenerTLS("proxy") + fmt.Sprintf("store: { type: zookeeper, servers: %q, session_timeout: 10s }\ndefault_cluster: a\nclusters:\n", rig.MapZK+"/"+chroot) +
		fmt.Sprintf("  a: { service_url: %q, web_url: %q }\n  b: { service_url: %q, web_url: %q }\n", a.ServiceURL(), a.Web(), b.ServiceURL(), b.Web()), topics
}

// The largest batch that one command may ask for: what its plan takes, and to write it down. E2E_PLANNED is the number of topics; nothing moves.
func TestALargeBatchIsPlannedAndWrittenDown(t *testing.T) {
	n := count("E2E_PLANNED", 2000)
	chroot := "planned-many-" + runID
	_, config, _ := fakePair(t, "acme/huge", chroot, n)
	ctx := limited(t, 5*time.Minute)
	p, err := StartPointsman(ctx, artifacts, processes, rig.Dir, chroot, "log: { level: info }\n"+config)
	must(t, err)
	t.Cleanup(func() { _ = p.Proc.Stop(20 * time.Second) })
	idle := peakMemory(t, p)
	var dry, started struct {
		ID         string `json:"id"`
		Total      int    `json:"total"`
		Preflights []any  `json:"preflights"`
	}
	began := time.Now()
	must(t, p.CLI(ctx, &dry, "switch", "start", "--namespace", "acme/huge", "--to", "b", "--dry-run", "--force"))
	planned, plannedMemory := time.Since(began), peakMemory(t, p)
	if dry.Total != n || dry.ID != "" || len(dry.Preflights) != min(n, 64) {
		t.Errorf("dry run: %d topics, %d preflights, id %q; want %d, %d, none", dry.Total, len(dry.Preflights), dry.ID, n, min(n, 64))
	}
	began = time.Now()
	must(t, p.CLI(ctx, &started, "switch", "start", "--namespace", "acme/huge", "--to", "b", "--force", "--no-wait"))
	written := time.Since(began)
	must(t, p.CLI(ctx, nil, "switch", "abort", started.ID, "--no-wait"))
	p.Map = rig.MapZK + "/" + chroot
	st := openMap(t, p)
	b := awaitBatch(t, st, started.ID, "to end", func(b switching.Batch) bool { return b.State.Over() })
	parts, err := st.BatchParts(ctx, started.ID)
	must(t, err)
	topics, largest := 0, 0
	for _, part := range parts {
		topics += len(part.Items)
		largest = max(largest, len(part.Items))
	}
	t.Logf("PLANNED %d topics: --dry-run %.1f s; asked for, written down in %d parts, in %.1f s; peak memory of the proxy %.0f MiB when idle, %.0f MiB after the dry run, %.0f MiB in the end",
		n, planned.Seconds(), len(parts), written.Seconds(), idle, plannedMemory, peakMemory(t, p))
	if b.State != switching.BatchAborted || b.Count.Moved != 0 || topics != n || started.Total != n {
		t.Errorf("%s, %+v, %d topics in %d parts, of at most %d; want %d, and none moved", b.State, b.Count, topics, len(parts), largest, n)
	}
}

func count(variable string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return otherwise
}

// many is a namespace that moves.
type many struct {
	what, namespace, config, chroot string
	topics                          []string
	rate                            float64       // messages per second and topic
	each                            time.Duration // what a topic may take on a slow machine
}

// subscriptionOf is the subscription of a topic: with one name for all, those of a client would count as consumed together, and a batch would move them together.
func subscriptionOf(topic string) string { return "s-" + topic[strings.LastIndex(topic, "/")+1:] }

// proxiesOfMany is how many proxies share the clients and the work.
const proxiesOfMany = 3

func moveNamespace(t *testing.T, m many) {
	ctx := limited(t, 5*time.Minute+time.Duration(len(m.topics))*m.each)
	proxies := make([]*Pointsman, proxiesOfMany)
	for i := range proxies {
		p, err := StartPointsman(ctx, artifacts, processes, rig.Dir, fmt.Sprintf("%s-%d", m.chroot, i+1), "log: { level: info }\n"+m.config)
		must(t, err)
		t.Cleanup(func() { _ = p.Proc.Stop(20 * time.Second) })
		p.Map, proxies[i] = rig.MapZK+"/"+m.chroot, p
	}
	traffic := startTraffic(t, m, proxies)
	st := openMap(t, proxies[0])
	// A process that is younger than a minute vouches for nothing of its predecessor: every topic would be evicted on the old cluster.
	requests, before, began := zookeeperRequests(t), operations(t, proxies), time.Now()
	evicted := evictions(t, proxies)
	peak := watch(ctx, t, proxies, evicted)
	batch := moveAll(ctx, t, st, proxies[0], m.namespace)
	took := time.Since(began)
	records := recordsOf(ctx, t, st, batch.ID, len(m.topics))
	perSecond, busiest := peak()
	asked, after := zookeeperRequests(t)-requests, operations(t, proxies)
	sent, digest := traffic.stop()

	holds := make([]float64, 0, len(records))
	states := map[switching.State]int{}
	for _, r := range records {
		states[r.State]++
		if r.Receipt != nil {
			holds = append(holds, r.Receipt.HoldMillis)
		}
	}
	slices.Sort(holds)
	memory := make([]string, len(proxies))
	for i, p := range proxies {
		memory[i] = fmt.Sprintf("%.0f MiB", peakMemory(t, p))
	}
	t.Logf("MOVED %s: %.1f s in all; hold p50 %.0f ms, p99 %.0f ms, max %.0f ms; evictions %.0f/s, in the busiest second %.0f; %.1f ZooKeeper requests per topic; peak memory of the proxies %s; %d messages, %d receipts, lost %d, duplicates %d, order breaks %d, errors %d; %v",
		m.what, took.Seconds(), quantile(holds, .5), quantile(holds, .99), quantile(holds, 1), perSecond, busiest, asked/float64(len(m.topics)), strings.Join(memory, ", "),
		sent, digest.Acked, digest.Lost, digest.Duplicates, digest.Breaks, digest.Errors, states)
	t.Logf("of the %d switches whose records are still there, steps in the order of their beginning, p50/p99 ms, between the end of the one before and their own: %s", len(records), stepTimes(records))
	t.Logf("the record of the batch: hold p50 %.0f ms, p99 %.0f ms of the last ones; peak memory of clients and fake brokers %.0f MiB", batch.HoldP50, batch.HoldP99, residentPeak(t, os.Getpid()))
	for i, p := range proxies {
		var text []string
		sum := 0.0
		for _, kind := range slices.Sorted(maps.Keys(after[i])) {
			if n := (after[i][kind] - before[i][kind]) / float64(len(m.topics)); n >= 0.05 {
				sum += n
				text = append(text, fmt.Sprintf("%s %.1f", kind, n))
			}
		}
		t.Logf("%s asked ZooKeeper %.1f times per topic (leader: %v): %s", p.Name, sum, metric(t, p, "pointsman_switch_leader") == 1, strings.Join(text, ", "))
	}
	if c := batch.Count; batch.State != switching.BatchDone || c.Moved != len(m.topics) {
		t.Errorf("the batch is %s with %+v; want %d topics moved: %s", batch.State, c, len(m.topics), batch.Note)
	}
	if digest.Lost+digest.Breaks+digest.Errors > 0 {
		t.Errorf("%+v", digest)
	}
}

// stepTimes sums up how long after the end of the step before each step of the switches was over, waits included.
func stepTimes(records []switching.Record) string {
	var order []string
	times := map[string][]float64{}
	for _, r := range records {
		if r.Receipt == nil {
			continue
		}
		last := r.Started
		for _, s := range r.Receipt.Steps {
			if times[s.Work] == nil {
				order = append(order, s.Work)
			}
			end := s.Began.Add(time.Duration(s.Millis * float64(time.Millisecond)))
			times[s.Work] = append(times[s.Work], float64(end.Sub(last).Microseconds())/1000)
			last = end
		}
	}
	var text []string
	for _, work := range order {
		slices.Sort(times[work])
		text = append(text, fmt.Sprintf("%s %.0f/%.0f", work, quantile(times[work], .5), quantile(times[work], .99)))
	}
	return strings.Join(text, ", ")
}

func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	return sorted[int(q*float64(len(sorted)-1))]
}

// moveAll asks for the move of the whole namespace and waits for its end. It looks at the record alone, twice a second: what a status shows besides
// would count among what a topic costs.
func moveAll(ctx context.Context, t *testing.T, st store.Store, p *Pointsman, namespace string) (b switching.Batch) {
	t.Helper()
	var started struct {
		ID string `json:"id"`
	}
	must(t, p.CLI(ctx, &started, "switch", "start", "--namespace", namespace, "--to", "b", "--force", "--no-wait", "--parallel", "32", "--waves", "1,1%,10%,100%", "--max-hold", "0s"))
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	for told := time.Now(); ; {
		var err error
		if b, err = st.Batch(ctx, started.ID); err != nil && !errors.Is(err, store.ErrUnavailable) {
			t.Fatal(err)
		}
		switch {
		case b.State.Over():
			return b
		case b.Pause != nil:
			t.Fatalf("the batch has paused: %+v; %+v", *b.Pause, b.Count)
		case time.Since(told) > 20*time.Second:
			told = time.Now()
			t.Logf("%s: %+v, hold p50 %.0f ms, p99 %.0f ms", b.State, b.Count, b.HoldP50, b.HoldP99)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			t.Fatalf("the batch is %s: %+v", b.State, b.Count)
		}
	}
}

// recordsOf are those of a batch.
func recordsOf(ctx context.Context, t *testing.T, st store.Store, batch string, topics int) []switching.Record {
	t.Helper()
	all, err := st.Switches(ctx, 2*topics+100)
	must(t, err)
	return slices.DeleteFunc(all, func(r switching.Record) bool { return r.Batch != batch })
}

// trafficDigest is what became of the messages of all topics.
type trafficDigest struct {
	Acked, Lost, Duplicates, Breaks, Errors int64
}

// traffic is one producer and one consumer of each topic, spread over the proxies.
type traffic struct {
	t       *testing.T
	clients []pulsar.Client
	ends    []context.CancelFunc // of the sending, then of the receiving
	wg      sync.WaitGroup
	sent    atomic.Int64
	errors  atomic.Int64
	topics  []*topicTraffic
	wait    sync.WaitGroup // receipts
}

type topicTraffic struct {
	producer pulsar.Producer
	consumer pulsar.Consumer
	next     uint64 // of the sender

	mu    sync.Mutex
	acked []bool   // by number; all guarded by mu
	got   []uint16 // how often each came
	high  uint64   // the next one if all is in order
	wrong int64
}

func startTraffic(t *testing.T, m many, proxies []*Pointsman) *traffic {
	t.Helper()
	tr := &traffic{t: t, topics: make([]*topicTraffic, len(m.topics))}
	sending, endSending := context.WithCancel(t.Context())
	receiving, endReceiving := context.WithCancel(t.Context())
	tr.ends = []context.CancelFunc{endSending, endReceiving}
	for _, p := range proxies {
		c, err := pulsar.NewClient(pulsar.ClientOptions{URL: p.URL, MaxConnectionsPerBroker: 2, Logger: log.DefaultNopLogger(), OperationTimeout: 60 * time.Second})
		must(t, err)
		tr.clients = append(tr.clients, c)
	}
	var opening sync.WaitGroup
	slots := make(chan struct{}, 64)
	failed := make(chan error, 1)
	fail := func(err error) {
		select {
		case failed <- err:
		default:
		}
	}
	for i, topic := range m.topics {
		tt := &topicTraffic{}
		tr.topics[i] = tt
		slots <- struct{}{}
		opening.Go(func() {
			defer func() { <-slots }()
			var err error
			client := tr.clients[i%len(tr.clients)]
			if tt.consumer, err = client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: subscriptionOf(topic), Type: pulsar.Exclusive, ReceiverQueueSize: 10}); err != nil {
				fail(err)
				return
			}
			if tt.producer, err = client.CreateProducer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true, MaxPendingMessages: 50, SendTimeout: 60 * time.Second}); err != nil {
				fail(err)
				return
			}
			tr.wg.Go(func() { tt.receive(receiving) })
		})
	}
	opening.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	// One goroutine sends for all, so that ten thousand topics need no ten thousand timers.
	tr.wg.Go(func() {
		every := time.Duration(float64(time.Second) / (m.rate * float64(len(m.topics))))
		ticker := time.NewTicker(max(every, time.Millisecond))
		defer ticker.Stop()
		began, i := time.Now(), 0
		for {
			select {
			case <-sending.Done():
				return
			case <-ticker.C:
			}
			for due := int(time.Since(began) / every); i < due; i++ {
				tr.send(tr.topics[i%len(tr.topics)])
			}
		}
	})
	return tr
}

func (tr *traffic) send(tt *topicTraffic) {
	n := tt.next
	tt.next++
	tr.sent.Add(1)
	tr.wait.Add(1)
	payload := binary.BigEndian.AppendUint64(nil, n)
	tt.producer.SendAsync(context.Background(), &pulsar.ProducerMessage{Payload: payload}, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
		defer tr.wait.Done()
		if err != nil {
			tr.errors.Add(1)
			return
		}
		tt.mu.Lock()
		defer tt.mu.Unlock()
		tt.acked = grown(tt.acked, n)
		tt.acked[n] = true
	})
}

// grown is a list with a place for n.
func grown[T any](list []T, n uint64) []T {
	if more := int(n) + 1 - len(list); more > 0 {
		list = append(list, make([]T, more)...)
	}
	return list
}

func (tt *topicTraffic) receive(ctx context.Context) {
	for {
		msg, err := tt.consumer.Receive(ctx)
		if err != nil {
			return
		}
		n := binary.BigEndian.Uint64(msg.Payload())
		tt.mu.Lock()
		tt.got = grown(tt.got, n)
		if tt.got[n]++; tt.got[n] == 1 {
			if n < tt.high {
				tt.wrong++
			}
			tt.high = n + 1
		}
		tt.mu.Unlock()
		_ = tt.consumer.Ack(msg)
	}
}

// stop ends sending, waits until what has a receipt was received, and sums up.
func (tr *traffic) stop() (sent int64, d trafficDigest) {
	tr.t.Helper()
	tr.ends[0]()
	settled := make(chan struct{})
	go func() { tr.wait.Wait(); close(settled) }()
	select {
	case <-settled:
	case <-time.After(90 * time.Second):
		tr.t.Error("receipts are missing 90 s after the last message was sent")
	}
	_ = WaitUntil(limited(tr.t, 60*time.Second), "everything to be received", func() (bool, error) { return tr.digest().Lost == 0, nil })
	d = tr.digest()
	tr.ends[1]()
	tr.wg.Wait()
	for _, c := range tr.clients {
		c.Close()
	}
	return tr.sent.Load(), d
}

func (tr *traffic) digest() (d trafficDigest) {
	d.Errors = tr.errors.Load()
	for _, tt := range tr.topics {
		tt.mu.Lock()
		d.Breaks += tt.wrong
		for n, acked := range tt.acked {
			if acked {
				d.Acked++
			}
			if acked && (n >= len(tt.got) || tt.got[n] == 0) {
				d.Lost++
			}
		}
		for _, times := range tt.got {
			d.Duplicates += max(0, int64(times)-1)
		}
		tt.mu.Unlock()
	}
	return d
}

// evictions is how many handles the proxies have sent to another cluster so far.
func evictions(t *testing.T, proxies []*Pointsman) (n float64) {
	t.Helper()
	for _, p := range proxies {
		n += metric(t, p, "pointsman_evicted_producers_total") + metric(t, p, "pointsman_evicted_consumers_total")
	}
	return n
}

// watch looks at the evictions once a second, until the function that it returns is called.
func watch(ctx context.Context, t *testing.T, proxies []*Pointsman, before float64) (end func() (perSecond, busiest float64)) {
	ctx, cancel := context.WithCancel(ctx)
	var seconds []float64
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for last := before; ; {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			now := 0.0
			for _, p := range proxies {
				for _, kind := range []string{"producers", "consumers"} {
					n, err := p.Metric(ctx, "pointsman_evicted_"+kind+"_total")
					if err != nil {
						return
					}
					now += n
				}
			}
			seconds = append(seconds, now-last)
			last = now
		}
	}()
	return func() (perSecond, busiest float64) {
		cancel()
		<-done
		busy := 0
		for _, n := range seconds {
			if n > 0 {
				perSecond += n
				busy++
			}
			busiest = max(busiest, n)
		}
		return perSecond / float64(max(busy, 1)), busiest
	}
}

// operations are what each proxy has asked of the map's ZooKeeper so far, by kind.
func operations(t *testing.T, proxies []*Pointsman) []map[string]float64 {
	t.Helper()
	all := make([]map[string]float64, len(proxies))
	for i, p := range proxies {
		all[i] = map[string]float64{}
		for _, kind := range []string{"create", "delete", "exists", "get", "set", "sync", "children", "multi"} {
			all[i][kind] = metric(t, p, "pointsman_map_store_operations_total", fmt.Sprintf("operation=%q", kind))
		}
	}
	return all
}

// peakMemory is the largest resident size of a process so far, in MiB.
func peakMemory(t *testing.T, p *Pointsman) float64 { return residentPeak(t, p.Proc.Pid) }

func residentPeak(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 64)
			must(t, err)
			return kib / 1024
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// zookeeperRequests is how many requests the map's ZooKeeper has received so far, from everybody.
func zookeeperRequests(t *testing.T) float64 {
	t.Helper()
	conn, err := net.DialTimeout("tcp", rig.MapZK, 5*time.Second)
	must(t, err)
	defer conn.Close()
	must(t, errors.Join(conn.SetDeadline(time.Now().Add(5*time.Second)), err))
	_, err = conn.Write([]byte("srvr"))
	must(t, err)
	text, err := io.ReadAll(conn)
	must(t, err)
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte("Received: ")); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(string(rest)), 64)
			must(t, err)
			return n
		}
	}
	t.Fatalf("ZooKeeper says %s", text)
	return 0
}
