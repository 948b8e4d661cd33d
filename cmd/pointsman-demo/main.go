// Command pointsman-demo shows Pointsman at work with nothing but this binary: two embedded clusters, the real proxy in
// front of them, a real client, and a topic that moves from one cluster to the other while it is in use. It tells what
// happened and ends by itself. It is the program of `make demo`; it must need no network beyond loopback and no fixed port.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/prometheus/client_golang/prometheus"

	"pointsman/internal/admin"
	"pointsman/internal/app"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
)

// demoLimit is how long the whole demo may take.
const demoLimit = 45 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Stdout, os.Stderr, pace{before: 2 * time.Second, after: 3 * time.Second}))
}

// pace is how long the streams run before and after the switch.
type pace struct{ before, after time.Duration }

// run plays the demo, tells it on out and returns the exit code.
func run(ctx context.Context, out, errOut io.Writer, p pace) int {
	ctx, cancel := context.WithTimeout(ctx, demoLimit)
	defer cancel()
	log := new(safeBuffer)
	res, err := play(ctx, out, log, p)
	if err != nil {
		res.errors++
		fmt.Fprintf(errOut, "demo: %v\n", err)
	}
	if res.lost != 0 || res.errors != 0 {
		fmt.Fprintf(errOut, "%sdemo: this is what the proxy had to say:\n%s", res.faults, log)
		fmt.Fprintf(out, "demo: failed %s\n", res)
		return 1
	}
	fmt.Fprintf(out, "demo: ok %s\n", res)
	return 0
}

// play sets everything up, runs the streams, switches, and takes everything down again.
func play(ctx context.Context, out, log io.Writer, p pace) (res result, err error) {
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }

	// Both clusters call their brokers by the same names, as clusters built from one recipe do. The ledger ids of green
	// are above those of blue: an immediate switch does not translate message ids.
	names := []string{"broker-0:6650", "broker-1:6650"}
	blue := testkit.NewCluster("blue", testkit.Options{Brokers: 2, Advertised: names, LedgerBase: 1_000})
	defer blue.Close()
	green := testkit.NewCluster("green", testkit.Options{Brokers: 2, Advertised: names, LedgerBase: 500_000})
	defer green.Close()
	if err := placeTogether(blue, ordersTopic, invoicesTopic); err != nil {
		return res, err
	}
	replication := testkit.Replicate(blue, green, testkit.ReplicationOptions{
		Topics: func(name string) bool { return name == ordersTopic }, Delay: 5 * time.Millisecond, Subscriptions: true,
	})
	defer replication.Close()

	proxy, err := startProxy(ctx, log, blue, green)
	if err != nil {
		return res, fmt.Errorf("start the proxy: %w", err)
	}
	defer func() {
		if e := proxy.stop(); e != nil && err == nil {
			err = fmt.Errorf("stop the proxy: %w", e)
		}
	}()
	say("Pointsman: two Pulsar clusters behind one address")
	say("")
	say("clusters   blue and green, 2 brokers each, inside this process; both call them broker-0 and broker-1")
	say("proxy      %s, operations on %s, the map in a file", proxy.url(), proxy.app.OpsURL())
	say("client     pulsar-client-go, one client: it knows the proxy's address only")

	client, err := pulsar.NewClient(pulsar.ClientOptions{
		URL: proxy.url(), Logger: pulsarlog.DefaultNopLogger(), MetricsRegisterer: prometheus.NewRegistry(),
	})
	if err != nil {
		return res, err
	}
	defer client.Close()
	orders, err := open(client, ordersTopic)
	if err != nil {
		return res, err
	}
	defer orders.close()
	invoices, err := open(client, invoicesTopic)
	if err != nil {
		return res, err
	}
	defer invoices.close()
	for _, s := range []*stream{orders, invoices} {
		s.start(ctx)
	}

	if err := pause(ctx, p.before); err != nil {
		return res, err
	}
	say("")
	say("before     orders:   %s", orders.soFar())
	say("           invoices: %s", invoices.soFar())
	say("           stored on blue: %d orders, %d invoices; on green: %d orders that came by geo-replication",
		published(blue, ordersTopic), published(blue, invoicesTopic), len(green.Messages(ordersTopic)))

	switched, err := proxy.move(ctx, ordersTopic, "green")
	if err != nil {
		return res, fmt.Errorf("switch orders to green: %w", err)
	}
	say("")
	say("switch     pointsman switch start --topic %s --to green --mode immediate", ordersTopic)
	say("           %d producer and %d consumer were sent to green; done %d ms after the command",
		switched.producers, switched.consumers, switched.to.Sub(switched.from).Milliseconds())

	if err := pause(ctx, p.after); err != nil {
		return res, err
	}
	orders.await(ctx, func() bool { return published(green, ordersTopic) > 0 })
	for _, s := range []*stream{orders, invoices} {
		s.finish(ctx)
	}
	res = judge(orders, invoices, blue, green, switched)
	say("           longest wait for a receipt: %d ms around the switch, %d ms before it", res.gap.Milliseconds(), orders.gap(time.Time{}, switched.from).Milliseconds())
	say("")
	say("after      orders:   %s", orders.soFar())
	say("           published to green: %d; to blue since the switch: %d", published(green, ordersTopic), publishedSince(blue, ordersTopic, switched.to))
	say("           every acknowledged order was read: %d lost, %d read twice (an immediate switch promises the first only)", res.lost, res.duplicates)
	say("neighbour  invoices: %s", invoices.soFar())
	say("           all on blue, on the same TCP connection, its producer opened %d time(s); longest wait %d ms around the switch",
		opened(blue, invoicesTopic), invoices.gap(switched.from, switched.to.Add(settle)).Milliseconds())
	say("")
	return res, nil
}

// The topics of the demo: one that moves and its neighbour.
const (
	ordersTopic   = "persistent://public/default/orders"
	invoicesTopic = "persistent://public/default/invoices"
)

// placeTogether gives topics to one broker, so that a client uses one connection for them.
func placeTogether(c *testkit.Cluster, topics ...string) error {
	for _, name := range topics {
		c.CreateTopic(name, 0)
		if err := c.Unload(name, c.Broker(0), false); err != nil {
			return err
		}
	}
	return nil
}

// pause waits for d unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the demo was ended: %w", ctx.Err())
	}
}

// proxy is the real one, with a store of its own.
type proxy struct {
	app    *app.App
	admin  *admin.Client
	dir    string
	cancel context.CancelFunc
	ended  chan error
}

func startProxy(ctx context.Context, log io.Writer, clusters ...*testkit.Cluster) (*proxy, error) {
	dir, err := os.MkdirTemp("", "pointsman-demo-")
	if err != nil {
		return nil, err
	}
	cfg := config.Default()
	cfg.Listeners = config.Listeners{Pulsar: "127.0.0.1:0", Ops: "127.0.0.1:0"}
	cfg.Store = config.Store{Type: "file", Path: dir}
	cfg.DefaultCluster = clusters[0].Name()
	cfg.Shutdown = config.Shutdown{Timeout: config.Duration(5 * time.Second)}
	cfg.Eviction.ReceiptWait = config.Duration(10 * time.Second) // or what is on its way to blue on a slow machine would arrive after the switch
	for _, c := range clusters {
		cfg.Clusters[c.Name()] = &config.Cluster{ServiceURL: "pulsar://broker-0:6650,broker-1:6650", Resolve: c.Resolve()}
	}
	p := &proxy{dir: dir, ended: make(chan error, 1)}
	p.app, err = app.New(ctx, cfg, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx)) // it outlives the demo's own end, to be drained
	p.cancel = cancel
	go func() { p.ended <- p.app.Run(run) }()
	if p.admin, err = admin.NewClient(p.app.OpsURL(), 30*time.Second, nil); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	if err := p.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return p, nil
}

func (p *proxy) awaitReady(ctx context.Context) error {
	for {
		r, err := p.admin.Ready(ctx)
		if err == nil && r.Ready {
			return nil
		}
		if e := pause(ctx, 10*time.Millisecond); e != nil {
			return fmt.Errorf("not ready, %v (%v): %w", r.Reasons, err, e)
		}
	}
}

func (p *proxy) url() string { return "pulsar://" + p.app.PulsarAddr() }

// stop drains the proxy and removes its store.
func (p *proxy) stop() error {
	p.cancel()
	err := <-p.ended
	if p.admin != nil {
		p.admin.Close()
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

// move is a switch that has ended.
type move struct {
	from, to             time.Time // command given, every client told
	producers, consumers int
}

// move switches a topic in immediate mode, as the command line does, and waits until every client was told.
func (p *proxy) move(ctx context.Context, topic, to string) (move, error) {
	m := move{from: time.Now()}
	st, err := p.admin.StartSwitch(ctx, admin.SwitchRequest{
		Topics: []string{topic}, To: to, Mode: "immediate", Who: "pointsman-demo", Why: "to show it",
	})
	if err != nil {
		return m, err
	}
	if st, err = p.admin.WaitSwitch(ctx, st.ID, nil); err != nil {
		return m, err
	}
	if !st.Done() {
		return m, fmt.Errorf("the switch ended as %s: %v", st.State, st.Failed)
	}
	m.to = time.Now()
	for _, d := range st.Switches {
		m.producers += d.Producers
		m.consumers += d.Consumers
		if !d.Ended.IsZero() {
			m.to = d.Ended
		}
	}
	return m, nil
}

// safeBuffer keeps the newest lines of the proxy's log, for when something goes wrong.
type safeBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

const logKept = 256 << 10

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf.Len() > logKept {
		b.buf.Next(b.buf.Len() / 2)
	}
	return b.buf.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
