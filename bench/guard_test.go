//go:build linux

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/internal/admin"
	"pointsman/internal/app"
	"pointsman/internal/config"
	"pointsman/internal/tlstest"
)

// The guards count what a message costs the proxy where counting is exact: system calls and allocations. Traffic goes in
// lockstep (a batch, then all of its receipts), the least of several rounds is taken, and nothing is timed: they hold on any machine,
// however busy. The bounds leave room for a third more than was measured when they were set, so that half as much again is found.

// startProxy runs a whole proxy in this process, in front of two fake clusters, and returns where clients reach it (security is
// Params.TLS) and the address of its operations port.
func startProxy(t testing.TB, security string) (at server, ops string) {
	t.Helper()
	cfg := config.Default()
	cfg.Listeners = config.Listeners{Pulsar: "127.0.0.1:0", Ops: "127.0.0.1:0"}
	if withClientTLS(security) {
		ca, err := tlstest.NewCA("bench test")
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.Issue(certificateName)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Listeners = config.Listeners{PulsarTLS: "127.0.0.1:0", Ops: "127.0.0.1:0"}
		if cfg.TLS.CertificateFile, cfg.TLS.KeyFile, err = tlstest.Write(t.TempDir(), "proxy", cert); err != nil {
			t.Fatal(err)
		}
		at.tls = newTLSClient(ca)
	}
	cfg.Store.Path = t.TempDir()
	cfg.DefaultCluster = "a"
	cfg.Clusters = map[string]*config.Cluster{}
	for _, name := range []string{"a", "b"} {
		if !withBrokerTLS(security) {
			cfg.Clusters[name] = &config.Cluster{ServiceURL: plainScheme + startBrokerHere(t, 1)[0].String()}
			continue
		}
		broker, ca := startTLSBrokerHere(t)
		file := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(file, ca.PEM(), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg.Clusters[name] = &config.Cluster{ServiceURL: secureScheme + broker.String(), TLS: &config.ClusterTLS{CAFile: file}}
	}
	cfg.Shutdown = config.Shutdown{Timeout: config.Duration(5 * time.Second)}
	ctx, cancel := context.WithCancel(context.Background())
	proxy, err := app.New(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- proxy.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the proxy ended with: %v", err)
		}
	})
	listen := proxy.PulsarAddr()
	if at.tls != nil {
		listen = proxy.PulsarTLSAddr()
	}
	at.AddrPort = netip.MustParseAddrPort(listen)
	return at, proxy.OpsURL()
}

// calls are the read and write system calls of the proxy's loops so far.
func calls(t *testing.T, ops string) (n float64) {
	t.Helper()
	m, err := scrape(ops)
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range []string{"pointsman_loop_reads_total", "pointsman_loop_writes_total"} {
		v, err := m.sum(family, "")
		if err != nil {
			t.Fatal(err)
		}
		n += v
	}
	return n
}

// lockstep sends a batch of messages, waits for all receipts, and so on; or grants permits and waits for all messages; or looks up and
// waits for all answers.
type lockstep struct {
	t       *testing.T
	conn    *conn
	batch   *batch
	stream  stream
	window  int
	want    codec.Type // what is waited for
	lookups lookupTemplate
	asked   int
	missing int
	rounds  int // left
	buf     []byte
}

func (l *lockstep) begin() {
	l.missing = l.window
	switch l.want {
	case codec.TypeMessage:
		l.buf = flowFrame(l.buf[:0], 0, l.window)
		l.conn.send(l.buf)
	case codec.TypeLookupResponse:
		l.buf = l.buf[:0]
		for range l.window {
			l.buf = append(l.buf, l.lookups.set(l.asked%1000, firstID+uint64(l.asked%1000))...)
			l.asked++
		}
		l.conn.send(l.buf)
	default:
		l.writable(l.conn)
	}
}

func (l *lockstep) writable(c *conn) {
	if l.want == codec.TypeSendReceipt {
		c.pump(&l.stream, l.batch, l.window-int(l.stream.next-firstID)%l.window)
	}
}

func (l *lockstep) frame(_ *conn, h codec.Head, _ []byte) {
	switch h.Type {
	case l.want:
		l.missing--
	case codec.TypePing:
		l.conn.send(pongFrame)
	default:
		l.t.Errorf("received %s", h.Type)
		l.conn.loop.ended = true
	}
}

func (l *lockstep) flush(c *conn) {
	if l.missing > 0 {
		return
	}
	if l.rounds--; l.rounds == 0 {
		c.loop.ended = true
		return
	}
	l.begin()
}

func (l *lockstep) closed(_ *conn, err error) {
	l.t.Errorf("the connection ended: %v", err)
	l.conn.loop.ended = true
}

// linksFor opens what a lockstep for want goes over.
func linksFor(at server, want codec.Type, size int) ([]*link, error) {
	if want == codec.TypeLookupResponse {
		return connections(at, 1)
	}
	return bridges(at, 1, func(k *link, i int) error {
		if want == codec.TypeMessage {
			return k.consumer(benchTopic(i), 0, size)
		}
		return k.producer(benchTopic(i), 0)
	})
}

// A batch is read and written once on its way to the broker, its receipts on their way back: 4 calls, and no allocation. So are LOOKUPs and
// their answers, each of which allocates its topic.
const (
	callsPerBatch   = 4.4
	allocsPerBatch  = 0.5
	allocsPerLookup = 1.3
)

func TestAMessageCostsNoMoreSystemCallsAndAllocationsThanBefore(t *testing.T) {
	for _, c := range []struct {
		name         string
		size, window int
		want         codec.Type
		batches      int // per round
	}{
		{"100 B, 400 at once", 100, 400, codec.TypeSendReceipt, 300},
		{"1 KiB, 32 at once", 1 << 10, 32, codec.TypeSendReceipt, 1000},
		{"16 KiB, one by one", 16 << 10, 1, codec.TypeSendReceipt, 1000},
		{"consume, 1 KiB, 32 at once", 1 << 10, 32, codec.TypeMessage, 1000},
		{"100 lookups at once", 0, 100, codec.TypeLookupResponse, 500},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr, ops := startProxy(t, "")
			links, err := linksFor(addr, c.want, c.size)
			if err != nil {
				t.Fatal(err)
			}
			l, err := newLoop()
			if err != nil {
				t.Fatal(err)
			}
			defer l.close()
			tmpl := sendTemplate(c.size)
			step := &lockstep{t: t, batch: newBatch(tmpl), stream: stream{tmpl: tmpl, next: firstID}, window: c.window, want: c.want, lookups: newLookupTemplate()}
			if step.conn, err = l.add(links[0].fd, step); err != nil {
				t.Fatal(err)
			}
			const repeats = 5
			million := float64(c.batches*c.window) / 1e6
			maxCalls, maxAllocs := callsPerBatch*1e6/float64(c.window), allocsPerBatch*1e6/float64(c.window)
			if c.want == codec.TypeLookupResponse {
				maxAllocs = allocsPerLookup * 1e6
			}
			leastCalls, leastAllocs := math.Inf(1), math.Inf(1)
			for range repeats {
				step.rounds, l.ended = c.batches, false
				before := calls(t, ops)
				var m0, m1 runtime.MemStats
				runtime.ReadMemStats(&m0)
				step.begin()
				if err := l.run(time.Now().Add(30 * time.Second)); err != nil || step.rounds > 0 {
					t.Fatalf("%d batches are missing: %v", step.rounds, err)
				}
				runtime.ReadMemStats(&m1)
				leastCalls = min(leastCalls, (calls(t, ops)-before)/million)
				leastAllocs = min(leastAllocs, float64(m1.Mallocs-m0.Mallocs)/million)
			}
			t.Logf("per million messages: %.0f read and write system calls, %.0f allocations", leastCalls, leastAllocs)
			if leastCalls > maxCalls {
				t.Errorf("%.0f read and write system calls per million messages, at most %.0f: is each read handed on as a whole, and each socket read once per event?", leastCalls, maxCalls)
			}
			if leastAllocs > maxAllocs {
				t.Errorf("%.0f allocations per million messages, at most %.0f: the relay must not allocate per message", leastAllocs, maxAllocs)
			}
		})
	}
}

func TestASwitchUnderLoadBringsEveryProducerOverAndLeavesTheOthers(t *testing.T) {
	for _, namespace := range []bool{false, true} {
		t.Run(fmt.Sprintf("namespace=%t", namespace), func(t *testing.T) { switchUnderLoad(t, namespace) })
	}
}

func switchUnderLoad(t *testing.T, namespace bool) {
	addr, ops := startProxy(t, "")
	control, err := admin.NewClient(ops, time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	p := Params{Scenario: "switch", Connections: 2, Producers: 10, Rate: 1000, Namespace: namespace}.withDefaults()
	l, err := newSwitchLoad(p, addr.AddrPort)
	if err != nil {
		t.Fatal(err)
	}
	defer l.loop.close()
	if err := l.follow(control); err != nil {
		t.Fatal(err)
	}
	if len(l.gaps) != 10 || len(l.moving) != 10 || l.errors > 0 {
		t.Errorf("%d of %d producers are back, %d errors", len(l.gaps), len(l.moving), l.errors)
	}
	if len(l.evictions) != 10 || len(l.connects) != 3*p.Connections || len(l.lookups) < len(l.producers) {
		t.Errorf("%d evictions, %d connections, %d lookups", len(l.evictions), len(l.connects), len(l.lookups))
	}
	for _, m := range l.producers {
		if old := m.client.byAddr; len(old) != 3 || m.on == nil {
			t.Errorf("%s: connections %v, want one for lookups and one per cluster", m.topic, old)
		}
	}
	if l.latency.TotalCount() == 0 {
		t.Error("the neighbours sent nothing meanwhile")
	}
}

// BenchmarkProxy has broker, proxy and load in one process: for profiles of the proxy's own functions, as in
//
//	go test ./bench -run '^$' -bench Proxy/lookup -cpuprofile cpu.prof
//
// Its times include the other two; compare proxies with pointsman-bench.
func BenchmarkProxy(b *testing.B) {
	for _, p := range []Params{
		{Scenario: "produce", Size: 100, Connections: 500}, {Scenario: "produce"}, {Scenario: "consume"}, {Scenario: "lookup"}, {Scenario: "churn"},
		{Scenario: "produce", Size: 16 << 10, TLS: tlsClients}, {Scenario: "produce", TLS: tlsClients}, {Scenario: "churn", TLS: tlsClients},
	} {
		p = p.withDefaults()
		b.Run(strings.ReplaceAll(p.Label(), " ", "_"), func(b *testing.B) {
			addr, _ := startProxy(b, p.TLS)
			l, err := startLoad(p, addr)
			if err != nil {
				b.Fatal(err)
			}
			defer l.close()
			b.ReportAllocs()
			b.ResetTimer()
			runUntil(b, l, uint64(b.N))
		})
	}
}
