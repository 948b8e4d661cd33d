package app

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
)

// keepAlive is short for a test, and long for the moment in which a machine with other things to do does not run one of the two sides.
const keepAlive = 2 * time.Second

func shortKeepAlive(c *config.Config) { c.Limits.KeepAliveInterval = config.Duration(keepAlive) }

// await waits for a state of a cluster.
func awaitCluster(t *testing.T, c *testkit.Cluster, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := contextWithPatience(t)
	defer cancel()
	if err := c.Await(ctx, what, cond); err != nil {
		t.Fatal(err)
	}
}

// awaitClients waits until a cluster has so many producers and consumers of a topic: those that were told to leave it do so in their own time.
func awaitClients(t *testing.T, c *testkit.Cluster, topic string, producers, consumers int) {
	t.Helper()
	awaitCluster(t, c, fmt.Sprintf("%d producers and %d consumers of %s", producers, consumers, topic), func() bool {
		info, _ := c.Topic(topic)
		n := 0
		for _, s := range info.Subscriptions {
			n += len(s.Consumers)
		}
		return len(info.Producers) == producers && n == consumers
	})
}

// dataConns are the connections to a cluster that have, or had, producers or consumers.
func dataConns(c *testkit.Cluster) (conns []testkit.ConnInfo) {
	for _, info := range c.Conns() {
		if info.Kind == testkit.KindData {
			conns = append(conns, info)
		}
	}
	return conns
}

// CN-07: a client that vanishes, as behind a network that drops everything, is noticed within two keep-alive periods, and its
// producer's name and its subscription are free then.
func TestAClientThatVanishesIsClosedWithItsBrokerLeg(t *testing.T) {
	const topic = "persistent://public/default/vanishes"
	r := newRig(t, testkit.Options{}, shortKeepAlive)
	target := r.owner(t, topic)
	p := r.connect(t, target)
	p.produce(topic, "the-name", 1)
	before := r.closed(t, "client", "silent")
	vanished := time.Now() // after this SUBSCRIBE it says nothing, not even PONG
	p.subscribe(topic, "sub", testkit.Exclusive, 1)

	awaitCluster(t, r.a, "end of the broker leg", func() bool { return len(dataConns(r.a)) == 0 })
	took := time.Since(vanished)
	t.Logf("noticed after %s, keep-alive %s", took, keepAlive)
	if took < 2*keepAlive || took > 6*keepAlive {
		t.Errorf("the broker leg ended after %s, want about two keep-alive periods of %s", took, keepAlive)
	}
	r.await(t, "count", func() bool { return r.closed(t, "client", "silent") == before+1 })

	successor := r.connect(t, target)
	successor.produce(topic, "the-name", 1)
	successor.subscribe(topic, "sub", testkit.Exclusive, 1)
	p.dumb = true
	p.ended(patience) // it was sent a PING, and its connection was ended
}

// CN-06, its other half: a client that answers PINGs stays, however idle.
func TestAnIdleClientThatAnswersStays(t *testing.T) {
	const topic = "persistent://public/default/idle"
	r := newRig(t, testkit.Options{}, shortKeepAlive)
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	start := time.Now()
	const periods = 2 // after which it would be closed
	for range periods {
		p.expectNothingButPing()
	}
	if took := time.Since(start); took < (periods-1)*keepAlive {
		t.Errorf("%d PINGs within %s", periods, took)
	}
	p.publish(1, 1, []byte("still here"))
}

// A broker asks to learn whether an old producer is dead: it is answered for a client that proves alive, never for one that does not.
func TestABrokersPingIsAnsweredOnlyByALiveClient(t *testing.T) {
	const topic = "persistent://public/default/pinged"
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Limits.KeepAliveInterval = config.Duration(2 * keepAlive) })
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	leg := r.a.Conn(dataConns(r.a)[0].ID)

	pongs, pings := r.a.Count(codec.TypePong), r.a.Count(codec.TypePing)
	leg.Send(pingCommand())
	p.nc.SetReadDeadline(time.Now().Add(patience))
	if b, err := p.r.Peek(13); err != nil || b[9] != byte(codec.TypePing) {
		t.Fatalf("the client was not asked: % x, %v", b, err)
	}
	// When the proxy's own PING has come to the broker, after a silence, a PONG from before would have come as well.
	awaitCluster(t, r.a, "the proxy's PING", func() bool { return r.a.Count(codec.TypePing) > pings })
	if n := r.a.Count(codec.TypePong) - pongs; n != 0 {
		t.Errorf("%d PONGs for a client that has said nothing", n)
	}
	p.send(pongCommand())
	awaitCluster(t, r.a, "PONG of the live client", func() bool { return r.a.Count(codec.TypePong) == pongs+1 })

	// A newcomer takes the name of a dead one, and gets a refusal while the old one lives.
	old := r.bridge(t, topic)
	old.produce(topic, "taken", 7)
	old.attend()
	young := r.bridge(t, topic)
	young.send(producerCommand(topic, "taken", 7, 1))
	cmd, _, err := young.next()
	if err != nil || codec.ServerError(cmd.GetError().GetError()) != codec.ErrorProducerBusy {
		t.Fatalf("while the old one lives: %v, %v", cmd, err)
	}
}

// expectNothingButPing answers one PING.
func (p *peer) expectNothingButPing() {
	p.Helper()
	p.nc.SetReadDeadline(time.Now().Add(patience))
	frame := make([]byte, 13)
	if _, err := io.ReadFull(p.r, frame); err != nil || frame[9] != byte(codec.TypePing) {
		p.Fatalf("received % x, %v, want a PING", frame, err)
	}
	p.send(pongCommand())
}

func TestADeadHolderLosesItsNameThroughTheProxy(t *testing.T) {
	const topic = "persistent://public/default/dead-holder"
	r := newRig(t, testkit.Options{LivenessTimeout: 200 * time.Millisecond}, nil)
	old := r.bridge(t, topic)
	old.produce(topic, "taken", 7) // and is never heard of again
	young := r.bridge(t, topic)
	young.produce(topic, "taken", 7)
	old.dumb = true
	old.ended(patience)
}

// CN-03: a broker that accepts and says nothing. The time for the handshake closes both legs; the other cluster is not
// affected; everything works again once the broker does, without a restart.
func TestAFrozenBrokerIsCutOffAndComesBack(t *testing.T) {
	const topic, onB = "persistent://public/default/frozen", "persistent://public/b/thawed"
	r := newRig(t, testkit.Options{}, func(c *config.Config) {
		c.Limits.DialTimeout = config.Duration(time.Second)
		c.Limits.HandshakeTimeout = config.Duration(2 * time.Second)
		c.Limits.LookupTimeout = config.Duration(4 * time.Second)
		c.Limits.KeepAliveInterval = config.Duration(keepAlive)
	})
	r.route(t, "public/b", "b")
	target := r.owner(t, topic)
	bridged := r.connect(t, target)
	bridged.produce(topic, "", 1)
	bridged.attend()
	lookups := r.connect(t, "").attend()
	neighbour := r.neighbourOn(t, onB, 2*time.Millisecond)
	handshakes, silent := r.closed(t, "broker", "handshake_timeout"), r.closed(t, "broker", "silent")

	for _, b := range r.a.Brokers() {
		b.Freeze()
	}
	frozen := time.Now()
	p := r.dial(t)
	p.send(connectCommand(target))
	cmd, _, err := p.next()
	if err != nil || codec.ServerError(cmd.GetError().GetError()) != codec.ErrorServiceNotReady {
		t.Fatalf("a connection to a frozen broker: %v, %v", cmd, err)
	}
	if text := cmd.GetError().GetMessage(); !strings.Contains(text, `cluster a`) || !strings.Contains(text, "handshake") {
		t.Errorf("the error does not say which cluster and what: %q", text)
	}
	p.ended(patience)
	if d := time.Since(frozen); d > 10*time.Second {
		t.Errorf("refused after %s, want about 3 s", d)
	}
	if n := r.closed(t, "broker", "handshake_timeout") - handshakes; n != 1 {
		t.Errorf("counted %v times", n)
	}
	bridged.ended(patience) // an old connection is cut by keep-alive
	r.await(t, "count of the silent broker", func() bool { return r.closed(t, "broker", "silent") == silent+1 })

	lookups.send(lookupCommand(topic, 5))
	a := lookups.expect(codec.TypeLookupResponse).GetLookupTopicResponse()
	if a.GetResponse() != codec.LookupFailed || codec.ServerError(a.GetError()) != codec.ErrorMetadata || a.GetRequestId() != 5 {
		t.Errorf("a lookup in a frozen cluster: %v", a) // never ServiceNotReady: clients close a shared connection on it
	}

	for _, b := range r.a.Brokers() {
		b.Thaw()
	}
	thawed := time.Now()
	r.await(t, "lookup in the cluster that is back", func() bool {
		lookups.send(lookupCommand(topic, 6))
		return lookups.expect(codec.TypeLookupResponse).GetLookupTopicResponse().GetResponse() == codec.LookupConnect
	})
	again := r.connect(t, target).attend()
	again.produce(topic, "", 1)
	again.publish(1, 1, []byte("back"))
	t.Logf("back %s after the thaw", time.Since(thawed))
	if times := neighbour.stop(); len(times) < 10 {
		t.Errorf("the neighbour on the other cluster published %d messages only", len(times))
	} else {
		t.Logf("the neighbour on the other cluster: %d messages, p99 %s", len(times), percentile(times, 99))
	}
	awaitCluster(t, r.a, "end of what was opened to the frozen broker", func() bool { return len(dataConns(r.a)) == 1 })
}

// CN-04: when the broker's side dies, the client's side is closed at once.
func TestABrokerLegThatDiesTakesTheClientSideWithIt(t *testing.T) {
	const topic = "persistent://public/default/leg-dies"
	r := newRig(t, testkit.Options{}, nil)
	target := r.owner(t, topic)
	for _, c := range []struct {
		reason string
		end    func(*testkit.Conn)
	}{{"reset", (*testkit.Conn).Reset}, {"eof", (*testkit.Conn).Close}} {
		p := r.connect(t, target)
		p.produce(topic, "", 1)
		before := r.closed(t, "broker", c.reason)
		start := time.Now()
		c.end(r.a.Conn(dataConns(r.a)[0].ID))
		p.ended(patience)
		t.Logf("%s: the client saw it after %s", c.reason, time.Since(start))
		r.await(t, "count", func() bool { return r.closed(t, "broker", c.reason) == before+1 })
		awaitCluster(t, r.a, "no connection left", func() bool { return len(dataConns(r.a)) == 0 })
	}
}

// CN-05: a client that shuts down its writing and still reads: everything it sent arrives, both legs end, nothing spins or leaks.
func TestAHalfCloseEndsBothLegsCleanly(t *testing.T) {
	const topic = "persistent://public/default/half-close"
	r := newRig(t, testkit.Options{}, nil)
	before := r.conns()
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	p.publish(1, 0, []byte("x"))
	// A broker that is late, and answers when the proxy has waited long enough for its end, is reset, and reads no further: this one does not answer.
	t.Cleanup(r.a.Handle(codec.TypeSend, testkit.Drop))
	const n = 100
	for i := range uint64(n) {
		p.write(sendFrame(1, 1+i, make([]byte, 1000)))
	}
	if err := p.nc.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	p.ended(patience)
	awaitCluster(t, r.a, "all messages", func() bool { return r.a.Count(codec.TypeSend) == 1+n })
	awaitCluster(t, r.a, "end of the leg", func() bool { return len(dataConns(r.a)) == 0 })
	r.await(t, "end of the connections", func() bool { return r.conns() <= before+int64(len(r.a.Conns())) && r.active() == 0 })
	r.quiet(t)
}

// quiet checks that the loops sleep when nothing happens.
func (r *rig) quiet(t *testing.T) {
	t.Helper()
	events := func() (n int64) {
		for _, l := range r.app.engine.Stats().Loops {
			n += l.Events
		}
		return n
	}
	const limit = 200
	r.await(t, "quiet loops", func() bool { // a spinning loop never has a quiet tenth of a second
		before := events()
		timer := time.NewTimer(100 * time.Millisecond)
		<-timer.C
		return events()-before < limit
	})
}

// CN-02: clients that look up and leave, in every way of leaving, leave nothing behind.
func TestClientsThatLookUpAndLeaveLeaveNothingBehind(t *testing.T) {
	n := scaled(2_000)
	r := newRig(t, testkit.Options{}, nil)
	r.owner(t, "persistent://public/default/first")
	goroutines, conns := runtime.NumGoroutine(), r.conns()
	var group sync.WaitGroup
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	for range 16 {
		group.Go(func() {
			for i := range next {
				p := r.dial(t)
				topic := fmt.Sprintf("persistent://public/default/t%d", i)
				_ = p.tryWrite(append(codec.AppendCommand(nil, connectCommand("")), codec.AppendCommand(nil, lookupCommand(topic, 1))...))
				switch i % 4 {
				case 0, 1: // in good order
					for range 2 {
						if _, _, err := p.next(); err != nil {
							t.Errorf("client %d: %v", i, err)
						}
					}
					p.nc.Close()
				case 2: // without waiting for the answer
					p.nc.Close()
				case 3:
					p.reset()
				}
			}
		})
	}
	group.Wait()
	r.await(t, "end of the clients", func() bool { return r.active() == 0 })
	brokers := int64(2 * len(r.a.Brokers()) * r.app.Loops()) // those for the clients, and those of the proxy's own questions
	r.await(t, "end of their connections", func() bool { return r.conns() <= conns+brokers })
	r.await(t, "end of the goroutines", func() bool { return runtime.NumGoroutine() <= goroutines+2*int(brokers)+10 })
	if got := int64(len(r.a.Conns())); got > brokers {
		t.Errorf("%d connections to the brokers, want at most one per broker, loop and identity (%d)", got, brokers)
	}
	if got := len(dataConns(r.a)); got != 0 {
		t.Errorf("%d connections with producers or consumers", got)
	}
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
}

// EL-04: connections that are cut with full queues give their memory back, and each end is counted once.
func TestConnectionsCutWithFullQueuesGiveEverythingBack(t *testing.T) {
	n := scaled(300)
	const topic = "persistent://public/default/cut"
	r := newRig(t, testkit.Options{}, nil)
	published := uint64(0)
	publish := func(n int) {
		for range n {
			r.a.Publish(topic, "p", published, make([]byte, 20<<10)) // small enough to be copied, not spliced: the queues hold buffers
			published++
		}
	}
	publish(200)
	target := r.owner(t, topic)
	ends := func() (sum float64) { return r.metric(t, "pointsman_closed_connections_total") }
	var peers []*peer
	for i := range n {
		p := r.connect(t, target)
		p.nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		p.subscribe(topic, fmt.Sprintf("s%d", i), testkit.Exclusive, 1)
		p.send(flowCommand(1, 100_000))
		peers = append(peers, p)
	}
	r.await(t, "full queues", func() bool {
		if r.app.engine.Stats().BufferMemory > int64(n)*32<<10 {
			return true
		}
		publish(10) // the kernel takes megabytes for each connection before it leaves something to us; how many depends on what it remembers of those before
		return false
	})
	t.Logf("%d bytes are queued for %d connections", r.app.engine.Stats().BufferMemory, n)
	before := ends()
	for i, p := range peers {
		if i%2 == 0 {
			p.reset()
		} else {
			p.nc.Close() // unread bytes: a reset as well, but the kernel's
		}
	}
	r.await(t, "end of all", func() bool { return r.active() == 0 && len(dataConns(r.a)) == 0 })
	if got := ends() - before; got != float64(n) {
		t.Errorf("%v ends were counted, want %d", got, n)
	}
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
	var queued int64
	for _, l := range r.app.engine.Stats().Loops {
		queued += l.QueuedBytes + l.Paused
	}
	if queued != 0 {
		t.Errorf("queued bytes and paused connections: %d, want none", queued)
	}
	r.bridge(t, topic).produce(topic, "", 1)
}
