package app

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// The robustness tests hold the whole proxy, over real sockets between two fake clusters, against peers that are silent,
// slow, broken, hostile or many. Their numbers are divided by raceScale under the race detector.

// patience bounds everything that a robustness test waits for and that has no limit of its own.
const patience = 30 * time.Second

// scaled divides a number under the race detector.
func scaled(n int) int { return max(n/raceScale, 1) }

// rig is a world whose log can be read.
type rig struct {
	*world
	cfg *config.Config
	log *logRecorder
}

// newRig starts two clusters and a proxy on a store in memory.
func newRig(t *testing.T, opts testkit.Options, change func(*config.Config)) *rig {
	t.Helper()
	r := &rig{world: &world{}}
	opts.Brokers = max(opts.Brokers, 2)
	for i, c := range []**testkit.Cluster{&r.a, &r.b} {
		o := opts
		o.LedgerBase = uint64(1000 * (i + 1))
		o.Advertised = []string{"broker-0:6650", "broker-1:6650"}
		*c = testkit.NewCluster(string(rune('a'+i)), o)
		t.Cleanup((*c).Close)
	}
	r.cfg = r.config(change)
	r.run(t, store.NewMemory(), r.cfg)
	return r
}

// config is for a proxy in front of the rig's clusters, on a store that the caller provides.
func (r *rig) config(change func(*config.Config)) *config.Config {
	cfg := config.Default()
	cfg.Listeners = config.Listeners{Pulsar: "127.0.0.1:0", Ops: "127.0.0.1:0"}
	cfg.Store.Type = "memory"
	cfg.DefaultCluster = "a"
	cfg.Clusters = map[string]*config.Cluster{"a": clusterConfig(r.a), "b": clusterConfig(r.b)}
	cfg.Shutdown = config.Shutdown{DrainDelay: 0, Timeout: config.Duration(5 * time.Second)}
	if change != nil {
		change(cfg)
	}
	return cfg
}

// beside starts one more proxy in front of the same clusters.
func (r *rig) beside(t *testing.T, st store.Store, change func(*config.Config)) *rig {
	t.Helper()
	other := &rig{world: &world{a: r.a, b: r.b}}
	other.cfg = r.config(change)
	other.run(t, st, other.cfg)
	return other
}

// run starts a proxy and waits until it is ready.
func (r *rig) run(t *testing.T, st store.Store, cfg *config.Config) {
	t.Helper()
	r.launch(t, st, cfg)
	r.await(t, "readiness", func() bool {
		a, err := r.admin.Ready(t.Context())
		return err == nil && a.Ready
	})
}

func (r *rig) launch(t *testing.T, st store.Store, cfg *config.Config) {
	t.Helper()
	r.log = &logRecorder{}
	var err error
	r.app, err = newOn(t.Context(), st, cfg, slog.New(slog.NewTextHandler(r.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.app.Run(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	if r.admin, err = admin.NewClient(r.app.OpsURL(), 30*time.Second, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.admin.Close()
		if err := r.stop(); err != nil {
			t.Errorf("the proxy ended with: %v", err)
		}
		if n := r.log.long; n > 0 {
			t.Errorf("%d lines of the log are longer than %d bytes", n, maxLine)
		}
		if t.Failed() {
			t.Logf("the proxy's last lines:\n%s", strings.Join(r.log.last(30), "\n"))
		}
	})
}

// logRecorder keeps the lines of a log.
type logRecorder struct {
	mu    sync.Mutex // guards what follows
	lines []string
	long  int // lines above maxLine
}

// maxLine is what a line may have: names that peers make up must not become pages.
const maxLine = 2 << 10

func (l *logRecorder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := strings.TrimSpace(string(p))
	if len(line) > maxLine {
		line = fmt.Sprintf("%s… (a line of %d bytes)", line[:maxLine], len(line))
		l.long++
	}
	l.lines = append(l.lines, line)
	return len(p), nil
}

// with returns the lines that contain all words.
func (l *logRecorder) with(words ...string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
next:
	for _, line := range l.lines {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

func (l *logRecorder) last(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.lines[max(0, len(l.lines)-n):]...)
}

// metric sums the series of a family in /metrics whose labels contain all of labels, as in `side="client"`.
func (r *rig) metric(t testing.TB, family string, labels ...string) float64 {
	t.Helper()
	resp, err := http.Get(r.app.OpsURL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	sum, found := 0.0, false
next:
	for line := range strings.Lines(string(body)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != family && !strings.HasPrefix(name, family+"{") {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(name, label) {
				continue next
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("metric %q: %v", line, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		t.Fatalf("/metrics has no series %s with %v", family, labels)
	}
	return sum
}

// closed is how many client connections were closed for that reason.
func (r *rig) closed(t testing.TB, side, reason string) float64 {
	t.Helper()
	return r.metric(t, "pointsman_closed_connections_total", `side="`+side+`"`, `reason="`+reason+`"`)
}

// conns is how many connections the loops have, both sides.
func (r *rig) conns() (n int64) {
	for _, l := range r.app.engine.Stats().Loops {
		n += l.Conns
	}
	return n
}

// active is how many client connections are open, bridged how many of them lead to a broker.
func (r *rig) active() (n int64) {
	for _, sh := range r.app.shards {
		n += sh.Counters().Active.Load()
	}
	return n
}

func (r *rig) bridged() (n int64) {
	for _, sh := range r.app.shards {
		n += sh.Counters().Bridged.Load()
	}
	return n
}

// joiner is a store that more proxies can share.
type joiner interface{ Join() *store.Memory }

// peer is a client that speaks in frames and does nothing by itself but answer PINGs while it reads.
type peer struct {
	testing.TB
	nc      net.Conn
	r       *bufio.Reader
	dumb    bool // does not answer PINGs
	lastReq uint64
	frames  chan received // of attend
}

type received struct {
	cmd     *pulsarpb.BaseCommand
	payload []byte
	err     error
}

// dial opens a connection and says nothing.
func (r *rig) dial(t testing.TB) *peer {
	t.Helper()
	nc, err := net.Dial("tcp", r.app.PulsarAddr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	return &peer{TB: t, nc: nc, r: bufio.NewReaderSize(nc, 64<<10)}
}

// connect dials and says CONNECT; target is what a LOOKUP named, "" for a connection for lookups.
func (r *rig) connect(t testing.TB, target string) *peer {
	t.Helper()
	p := r.dial(t)
	p.send(connectCommand(target))
	if c := p.expect(codec.TypeConnected).GetConnected(); c.GetProtocolVersion() == 0 {
		t.Fatalf("CONNECTED without a version: %v", c)
	}
	return p
}

// bridge looks a topic up, and connects to its broker.
func (r *rig) bridge(t testing.TB, topic string) *peer {
	t.Helper()
	return r.connect(t, r.owner(t, topic))
}

// owner is the target that a LOOKUP of topic names.
func (r *rig) owner(t testing.TB, topic string) string {
	t.Helper()
	p := r.connect(t, "")
	defer p.nc.Close()
	p.send(lookupCommand(topic, 1))
	return p.target()
}

// target reads the answer to a LOOKUP, which must be a broker.
func (p *peer) target() string {
	p.Helper()
	a := p.expect(codec.TypeLookupResponse).GetLookupTopicResponse()
	if a.GetResponse() != codec.LookupConnect || !a.GetProxyThroughServiceUrl() {
		p.Fatalf("LOOKUP answered %v", a)
	}
	return strings.TrimPrefix(a.GetBrokerServiceUrl(), "pulsar://")
}

func connectCommand(target string) *pulsarpb.BaseCommand {
	c := &pulsarpb.CommandConnect{ClientVersion: proto.String("robust"), ProtocolVersion: proto.Int32(codec.ProtocolVersion)}
	if target != "" {
		c.ProxyToBrokerUrl = &target
	}
	return commandOf(codec.TypeConnect, &pulsarpb.BaseCommand{Connect: c})
}

func commandOf(t codec.Type, cmd *pulsarpb.BaseCommand) *pulsarpb.BaseCommand {
	cmd.Type = proto.Int32(int32(t))
	return cmd
}

func lookupCommand(topic string, req uint64) *pulsarpb.BaseCommand {
	return commandOf(codec.TypeLookup, &pulsarpb.BaseCommand{LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: &req}})
}

func partitionsCommand(topic string, req uint64) *pulsarpb.BaseCommand {
	return commandOf(codec.TypePartitionedMetadata, &pulsarpb.BaseCommand{PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{
		Topic: &topic, RequestId: &req, MetadataAutoCreationEnabled: proto.Bool(true)}})
}

func producerCommand(topic, name string, id, req uint64) *pulsarpb.BaseCommand {
	c := &pulsarpb.CommandProducer{Topic: &topic, ProducerId: &id, RequestId: &req}
	if name != "" {
		c.ProducerName, c.UserProvidedProducerName = &name, proto.Bool(true)
	}
	return commandOf(codec.TypeProducer, &pulsarpb.BaseCommand{Producer: c})
}

func subscribeCommand(topic, name string, typ int32, id, req uint64) *pulsarpb.BaseCommand {
	return commandOf(codec.TypeSubscribe, &pulsarpb.BaseCommand{Subscribe: &pulsarpb.CommandSubscribe{
		Topic: &topic, Subscription: &name, SubType: &typ, ConsumerId: &id, RequestId: &req, InitialPosition: proto.Int32(1)}})
}

func flowCommand(id uint64, permits uint32) *pulsarpb.BaseCommand {
	return commandOf(codec.TypeFlow, &pulsarpb.BaseCommand{Flow: &pulsarpb.CommandFlow{ConsumerId: &id, MessagePermits: &permits}})
}

func ackCommand(id uint64, msg *pulsarpb.MessageIdData) *pulsarpb.BaseCommand {
	return commandOf(codec.TypeAck, &pulsarpb.BaseCommand{Ack: &pulsarpb.CommandAck{
		ConsumerId: &id, AckType: proto.Int32(0), MessageId: []*pulsarpb.MessageIdData{msg}}})
}

func pongCommand() *pulsarpb.BaseCommand {
	return commandOf(codec.TypePong, &pulsarpb.BaseCommand{Pong: &pulsarpb.CommandPong{}})
}

func pingCommand() *pulsarpb.BaseCommand {
	return commandOf(codec.TypePing, &pulsarpb.BaseCommand{Ping: &pulsarpb.CommandPing{}})
}

// sendFrame is a SEND of one message.
func sendFrame(id, sequence uint64, payload []byte) []byte {
	body := testkit.EncodeMessage(&pulsarpb.MessageMetadata{
		ProducerName: proto.String("p"), SequenceId: &sequence, PublishTime: proto.Uint64(uint64(time.Now().UnixMilli()))}, payload)
	frame := codec.AppendCommand(nil, commandOf(codec.TypeSend, &pulsarpb.BaseCommand{Send: &pulsarpb.CommandSend{ProducerId: &id, SequenceId: &sequence}}))
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4+len(body)))
	return append(frame, body...)
}

func (p *peer) send(cmd *pulsarpb.BaseCommand) {
	p.Helper()
	p.write(codec.AppendCommand(nil, cmd))
}

func (p *peer) write(src []byte) {
	p.Helper()
	if err := p.tryWrite(src); err != nil {
		p.Fatal(err)
	}
}

func (p *peer) tryWrite(src []byte) error {
	p.nc.SetWriteDeadline(time.Now().Add(patience))
	_, err := p.nc.Write(src)
	return err
}

// attend makes the peer answer PINGs from now on even while nobody calls next.
func (p *peer) attend() *peer {
	p.frames = make(chan received, 1000)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(p.frames)
		for {
			cmd, payload, err := p.read(2 * patience)
			p.frames <- received{cmd, payload, err}
			if err != nil {
				return
			}
		}
	}()
	p.Cleanup(func() {
		p.nc.Close()
		for range p.frames {
		}
		<-done
	})
	return p
}

// next reads one frame, with its payload. PINGs are answered and left out.
func (p *peer) next() (*pulsarpb.BaseCommand, []byte, error) {
	if p.frames == nil {
		return p.read(patience)
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case f, ok := <-p.frames:
		if !ok {
			return nil, nil, io.EOF
		}
		return f.cmd, f.payload, f.err
	case <-timer.C:
		return nil, nil, os.ErrDeadlineExceeded
	}
}

func (p *peer) read(limit time.Duration) (*pulsarpb.BaseCommand, []byte, error) {
	for {
		p.nc.SetReadDeadline(time.Now().Add(limit))
		size, err := p.r.Peek(4)
		if err != nil {
			return nil, nil, err
		}
		frame := make([]byte, 4+binary.BigEndian.Uint32(size))
		if _, err := io.ReadFull(p.r, frame); err != nil {
			return nil, nil, err
		}
		h, _, err := codec.ParseHead(frame, len(frame))
		if err != nil {
			return nil, nil, err
		}
		cmd := new(pulsarpb.BaseCommand)
		if err := codec.Parse(cmd, frame, h); err != nil {
			return nil, nil, err
		}
		if h.Type != codec.TypePing {
			return cmd, frame[h.CmdEnd:], nil
		}
		if !p.dumb {
			if err := p.tryWrite(codec.AppendCommand(nil, pongCommand())); err != nil {
				return nil, nil, err
			}
		}
	}
}

// expect reads one command, which must be of that type.
func (p *peer) expect(want codec.Type) *pulsarpb.BaseCommand {
	p.Helper()
	cmd, _, err := p.next()
	if err != nil {
		p.Fatalf("waiting for %s: %v", want, err)
	}
	if got := codec.Type(cmd.GetType()); got != want {
		p.Fatalf("received %s, want %s: %v", got, want, cmd)
	}
	return cmd
}

// ended reads until the proxy ends the connection, which it must do within limit.
func (p *peer) ended(limit time.Duration) {
	p.Helper()
	if p.frames != nil {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		for {
			select {
			case f, ok := <-p.frames:
				if !ok || f.err != nil {
					return
				}
			case <-timer.C:
				p.Fatalf("the connection is still open after %s", limit)
			}
		}
	}
	p.nc.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.Copy(io.Discard, p.r); errors.Is(err, os.ErrDeadlineExceeded) {
		p.Fatalf("the connection is still open after %s", limit)
	}
}

// produce opens a producer.
func (p *peer) produce(topic, name string, id uint64) {
	p.Helper()
	p.lastReq++
	p.send(producerCommand(topic, name, id, p.lastReq))
	if got := p.expect(codec.TypeProducerSuccess).GetProducerSuccess().GetRequestId(); got != p.lastReq {
		p.Fatalf("PRODUCER_SUCCESS of request %d, want %d", got, p.lastReq)
	}
}

// subscribe opens a consumer.
func (p *peer) subscribe(topic, name string, typ int32, id uint64) {
	p.Helper()
	p.lastReq++
	p.send(subscribeCommand(topic, name, typ, id, p.lastReq))
	if got := p.expect(codec.TypeSuccess).GetSuccess().GetRequestId(); got != p.lastReq {
		p.Fatalf("SUCCESS of request %d, want %d", got, p.lastReq)
	}
}

// publish sends one message and waits for its receipt.
func (p *peer) publish(id, sequence uint64, payload []byte) time.Duration {
	p.Helper()
	start := time.Now()
	p.write(sendFrame(id, sequence, payload))
	if got := p.expect(codec.TypeSendReceipt).GetSendReceipt().GetSequenceId(); got != sequence {
		p.Fatalf("receipt of %d, want %d", got, sequence)
	}
	return time.Since(start)
}

// reset ends the connection with a TCP reset.
func (p *peer) reset() {
	p.nc.(*net.TCPConn).SetLinger(0)
	p.nc.Close()
}

// neighbour is a well-behaved client whose traffic must go on whatever others do: it publishes again and again.
type neighbour struct {
	times []time.Duration
	stop  func() []time.Duration
}

// neighbourOn starts one that publishes a small message every interval.
func (r *rig) neighbourOn(t *testing.T, topic string, interval time.Duration) *neighbour {
	t.Helper()
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	n := &neighbour{}
	quit, done := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for seq := uint64(0); ; seq++ {
			select {
			case <-tick.C:
			case <-quit:
				done <- nil
				return
			}
			start := time.Now()
			if err := p.tryWrite(sendFrame(1, seq, make([]byte, 100))); err != nil {
				done <- err
				return
			}
			cmd, _, err := p.next()
			if err == nil && cmd.GetSendReceipt().GetSequenceId() != seq {
				err = errors.New("instead of a receipt: " + cmd.String())
			}
			if err != nil {
				done <- err
				return
			}
			n.times = append(n.times, time.Since(start))
		}
	}()
	n.stop = sync.OnceValue(func() []time.Duration {
		close(quit)
		if err := <-done; err != nil {
			t.Errorf("the neighbour on %s was disturbed: %v", topic, err)
		}
		p.nc.Close()
		return n.times
	})
	t.Cleanup(func() { n.stop() })
	return n
}

// rss is the resident memory of this process in bytes.
func rss(t testing.TB) int64 {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("memory is measured on Linux only: %v", err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(raw))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// heap is the live heap after a collection.
func heap() int64 {
	runtime.GC()
	runtime.GC() // what pools kept over the first one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// allocated is everything that was ever allocated.
func allocated() int64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.TotalAlloc)
}

func percentile(times []time.Duration, p int) time.Duration {
	if len(times) == 0 {
		return 0
	}
	times = slices.Sorted(slices.Values(times))
	return times[min(len(times)*p/100, len(times)-1)]
}

func contextWithPatience(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), patience)
}

// route maps a canonical topic or a scope to a cluster, and waits until this proxy serves that.
func (r *rig) route(t *testing.T, name, cluster string) {
	t.Helper()
	if _, err := r.admin.Set(t.Context(), admin.SetRequest{Name: name, Cluster: cluster, ChangeOptions: admin.ChangeOptions{Immediate: true}}); err != nil {
		t.Fatal(err)
	}
	r.await(t, "the route of "+name, func() bool {
		if strings.Contains(name, "://") {
			e, _ := r.app.Table().Entry(name)
			return e.Cluster == cluster
		}
		rule, _ := r.app.Table().Rule(name)
		return rule.Cluster == cluster
	})
}

// switchTo moves topics in immediate mode and waits for the end.
func (r *rig) switchTo(t testing.TB, cluster string, topics ...string) error {
	s, err := r.admin.StartSwitch(t.Context(), admin.SwitchRequest{Topics: topics, To: cluster, Mode: "immediate", Why: "test"})
	if err != nil {
		return err
	}
	if s, err = r.admin.WaitSwitch(t.Context(), s.ID, nil); err != nil {
		return err
	}
	if !s.Done() {
		return &endedError{s}
	}
	return nil
}

// endedError is a switch that ended as anything but done.
type endedError struct{ status admin.SwitchStatus }

func (e *endedError) Error() string {
	return fmt.Sprintf("switch %s to %s ended as %s: failed %+v, switches %+v", e.status.ID, e.status.To, e.status.State, e.status.Failed, e.status.Switches)
}

var (
	faultsNone        = store.Faults{}
	faultsHoldWatches = store.Faults{HoldWatches: true}
	faultsAway        = store.Faults{Err: store.ErrUnavailable}
)
