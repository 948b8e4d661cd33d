package app

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
)

// LK-05: redirects are followed inside the proxy, with the flag that the broker gave; beyond the limit the client gets an
// error after which it asks again, and never a redirect. The connection stays.
func TestRedirectsAreFollowedUpToTheLimit(t *testing.T) {
	for _, c := range []struct {
		redirects int
		want      int32
	}{{0, codec.LookupConnect}, {1, codec.LookupConnect}, {10, codec.LookupConnect}, {11, codec.LookupFailed}, {-1, codec.LookupFailed}} {
		t.Run(fmt.Sprint(c.redirects), func(t *testing.T) {
			r := newRig(t, testkit.Options{Redirects: c.redirects}, nil)
			const topic = "persistent://public/default/redirected"
			p := r.connect(t, "")
			p.send(lookupCommand(topic, 7))
			a := p.expect(codec.TypeLookupResponse).GetLookupTopicResponse()
			if a.GetResponse() != c.want || a.GetRequestId() != 7 {
				t.Fatalf("answer %v, want response %d", a, c.want)
			}
			if c.want == codec.LookupFailed && (codec.ServerError(a.GetError()) != codec.ErrorMetadata || !strings.Contains(a.GetMessage(), "redirected")) {
				t.Errorf("answer %v: clients keep the connection and ask again after MetadataError only", a)
			}
			asked := 0
			for _, cmd := range r.a.Commands(codec.TypeLookup) {
				if cmd.Cmd.GetLookupTopic().GetTopic() != topic {
					continue
				}
				if got := cmd.Cmd.GetLookupTopic().GetAuthoritative(); got != (asked > 0) {
					t.Errorf("question %d was authoritative: %v", asked, got)
				}
				asked++
			}
			want := c.redirects + 1
			if c.redirects < 0 || c.redirects > 10 {
				want = 11
			}
			if asked != want {
				t.Errorf("the brokers were asked %d times, want %d", asked, want)
			}
			p.send(partitionsCommand("persistent://public/default/other", 8)) // the connection lives
			if got := p.expect(codec.TypePartitionedMetadataResp).GetPartitionMetadataResponse(); got.GetRequestId() != 8 {
				t.Errorf("answer %v", got)
			}
		})
	}
}

// LK-07: a storm of lookups far above limits.lookups_per_cluster. The surplus gets TooManyRequests, no socket is closed, and
// everybody is connected in bounded time.
func TestALookupStormConnectsEverybody(t *testing.T) {
	clients, topics := 50, scaled(100) // 5,000 producers
	const limit = 40
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Limits.LookupsPerCluster = limit })
	t.Cleanup(r.a.Handle(codec.TypeLookup, testkit.Delay(200*time.Microsecond))) // so that they pile up
	before, start := heap(), time.Now()
	var refused, connected atomic.Int64
	var group sync.WaitGroup
	for i := range clients {
		group.Go(func() {
			p := r.connect(t, "")
			open := map[uint64]string{}
			for k := range uint64(topics) {
				open[k] = fmt.Sprintf("persistent://public/default/storm-%d-%d", i, k)
				p.send(lookupCommand(open[k], k))
			}
			bridges := map[string]*peer{}
			for len(open) > 0 {
				cmd, _, err := p.next()
				if err != nil {
					t.Errorf("client %d, with %d lookups open: %v", i, len(open), err)
					return
				}
				a := cmd.GetLookupTopicResponse()
				topic, ok := open[a.GetRequestId()]
				switch {
				case !ok:
					t.Errorf("client %d: an answer to nothing: %v", i, cmd)
					return
				case a.GetResponse() == codec.LookupConnect:
					delete(open, a.GetRequestId())
					target := strings.TrimPrefix(a.GetBrokerServiceUrl(), "pulsar://")
					if bridges[target] == nil {
						bridges[target] = r.connect(t, target)
					}
					bridges[target].produce(topic, "", a.GetRequestId())
					connected.Add(1)
				case codec.ServerError(a.GetError()) == codec.ErrorTooManyRequests:
					refused.Add(1)
					<-time.After(10 * time.Millisecond) // a client's backoff
					p.send(lookupCommand(topic, a.GetRequestId()))
				default:
					t.Errorf("client %d: %v", i, a)
					return
				}
			}
			for _, b := range bridges {
				b.nc.Close()
			}
			p.nc.Close()
		})
	}
	group.Wait()
	took := time.Since(start)
	t.Logf("%d producers in %s, %d times TooManyRequests, heap grew by %d bytes", connected.Load(), took, refused.Load(), heap()-before)
	if got, want := connected.Load(), int64(clients*topics); got != want {
		t.Errorf("%d producers, want %d", got, want)
	}
	if took > 90*time.Second {
		t.Errorf("it took %s", took)
	}
	if refused.Load() == 0 {
		t.Error("nobody was refused: the limit was not put to the test")
	}
	if n := r.metric(t, "pointsman_refused_requests_total", `reason="too_many_lookups"`); int64(n) != refused.Load() {
		t.Errorf("%v refusals were counted, clients saw %d", n, refused.Load())
	}
}

// LK-08: a throttled PARTITIONED_METADATA is answered in its own type, under its own request id.
func TestThrottledPartitionMetadataHasTheRightResponseType(t *testing.T) {
	const limit, surplus = 5, 3
	r := newRig(t, testkit.Options{}, func(c *config.Config) {
		probedOnce(c)
		c.Limits.LookupsPerCluster, c.Loops = limit, 1
	})
	release := make(chan struct{})
	t.Cleanup(r.a.Handle(codec.TypePartitionedMetadata, testkit.Hold(release)))
	p := r.connect(t, "")
	for i := range uint64(limit + surplus) {
		p.send(partitionsCommand(fmt.Sprintf("persistent://public/default/t%d", i), 100+i))
	}
	for i := range uint64(surplus) {
		a := p.expect(codec.TypePartitionedMetadataResp).GetPartitionMetadataResponse()
		if a.GetResponse() != codec.MetadataFailed || codec.ServerError(a.GetError()) != codec.ErrorTooManyRequests || a.GetRequestId() != 100+limit+i {
			t.Errorf("refusal %d: %v", i, a)
		}
	}
	close(release)
	seen := map[uint64]bool{}
	for range limit {
		a := p.expect(codec.TypePartitionedMetadataResp).GetPartitionMetadataResponse()
		if a.GetResponse() == codec.MetadataFailed || seen[a.GetRequestId()] {
			t.Errorf("answer %v", a)
		}
		seen[a.GetRequestId()] = true
	}
}

// LK-09: an owner that was killed. While it is known to refuse connections no answer names it, and its successor is named as soon
// as the cluster does.
func TestAKilledBrokerIsNotNamed(t *testing.T) {
	const topic = "persistent://public/default/killed"
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Loops = 1 }) // each loop learns for itself
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	info, _ := r.a.Topic(topic)
	dead, heir := r.a.Broker(info.Broker), r.a.Broker(1-info.Broker)
	target := r.owner(t, topic)

	dead.Stop()
	p.ended(patience)
	again := r.dial(t)
	again.send(connectCommand(target)) // the client's first try: the proxy learns that nobody listens
	cmd, _, err := again.next()
	if err != nil || codec.ServerError(cmd.GetError().GetError()) != codec.ErrorServiceNotReady {
		t.Fatalf("a connection to a dead broker: %v, %v", cmd, err)
	}
	again.ended(patience)

	lookups := r.connect(t, "")
	asked := time.Now()
	lookups.send(lookupCommand(topic, 1)) // the other broker still names the dead one
	awaitCluster(t, r.a, "question to the living broker", func() bool {
		for _, c := range r.a.Commands(codec.TypeLookup) {
			if c.At.After(asked) && c.Broker == heir.Index() && c.Cmd.GetLookupTopic().GetTopic() == topic {
				return true
			}
		}
		return false
	})
	if err := r.a.Unload(topic, heir, false); err != nil { // the cluster's take-over
		t.Fatal(err)
	}
	taken := time.Now()
	named := lookups.target()
	t.Logf("answered %s after the take-over, %s after the question", time.Since(taken), time.Since(asked))
	if time.Since(taken) > 10*time.Second {
		t.Errorf("the successor was named %s after it took over", time.Since(taken))
	}
	if named == target {
		t.Fatal("the answer names the dead broker")
	}
	back := r.connect(t, named)
	back.produce(topic, "", 1)
	back.publish(1, 1, []byte("recovered"))
}

// LK-18: PRODUCER and SUBSCRIBE for a topic that moved, on a connection that still leads to its old cluster: an error after which
// the client looks the topic up again, and nothing reaches the old cluster.
func TestAConnectionToTheOldClusterIsNoWayIn(t *testing.T) {
	const topic, stays = "persistent://public/default/moved", "persistent://public/default/stays"
	r := newRig(t, testkit.Options{}, nil)
	p := r.bridge(t, topic)
	other := r.connect(t, r.owner(t, stays))
	other.produce(stays, "", 1)
	r.route(t, topic, "b")
	producers, consumers := r.a.Count(codec.TypeProducer), r.a.Count(codec.TypeSubscribe)
	for i, cmd := range [...][]byte{
		codec.AppendCommand(nil, producerCommand(topic, "", 1, 501)),
		codec.AppendCommand(nil, subscribeCommand(topic, "s", testkit.Shared, 1, 502)),
		codec.AppendCommand(nil, producerCommand(topic+"-partition-3", "", 2, 503)),
		codec.AppendCommand(nil, producerCommand("public/default/moved", "", 3, 504)), // its short form
	} {
		p.write(cmd)
		e := p.expect(codec.TypeError).GetError()
		if codec.ServerError(e.GetError()) != codec.ErrorServiceNotReady || e.GetRequestId() != 501+uint64(i) {
			t.Errorf("command %d: %v", i, e)
		}
		for _, word := range []string{`"a"`, `"b"`, "look the topic up again"} {
			if !strings.Contains(e.GetMessage(), word) {
				t.Errorf("command %d: the error lacks %s: %s", i, word, e.GetMessage())
			}
		}
	}
	p.write(sendFrame(1, 1, []byte("must not arrive"))) // a SEND of a producer that was refused: a broker ends such a connection
	p.ended(patience)
	if a, b := r.a.Count(codec.TypeProducer), r.a.Count(codec.TypeSubscribe); a != producers || b != consumers {
		t.Errorf("%d PRODUCERs and %d SUBSCRIBEs reached the old cluster", a-producers, b-consumers)
	}
	if n := len(r.a.Messages(topic)); n != 0 {
		t.Errorf("%d messages are on the old cluster", n)
	}
	other.publish(1, 1, []byte("the neighbour's"))
	if n := r.metric(t, "pointsman_refused_requests_total", `reason="wrong_cluster"`); n != 4 {
		t.Errorf("%v refusals were counted, want 4", n)
	}
}

// TOPIC_MIGRATED would lead a client around the proxy: it sees a plain close, asks the map, and ends where that says.
func TestAMigratedTopicComesBackThroughTheProxy(t *testing.T) {
	const topic = "persistent://public/default/migrated"
	r := newRig(t, testkit.Options{}, probedOnce)
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	p.subscribe(topic, "s", testkit.Shared, 2)
	producer := follow(t, r.app.PulsarAddr(), topic, "", 0)
	producer.mustSend(3)
	direct := r.b.Accepted()

	if err := r.a.Migrate(topic, "pulsar://"+r.b.Broker(0).Addr()); err != nil {
		t.Fatal(err)
	}
	closed := p.expect(codec.TypeCloseProducer).GetCloseProducer()
	if closed.GetProducerId() != 1 || closed.GetRequestId() != codec.NoRequest || closed.AssignedBrokerServiceUrl != nil || closed.AssignedBrokerServiceUrlTls != nil {
		t.Errorf("close of the producer: %v", closed)
	}
	if got := p.expect(codec.TypeCloseConsumer).GetCloseConsumer(); got.GetConsumerId() != 2 || got.AssignedBrokerServiceUrl != nil {
		t.Errorf("close of the consumer: %v", got)
	}
	producer.mustSend(3)
	if n := len(r.a.Messages(topic)); n != 6 {
		t.Errorf("%d messages are on the mapped cluster, want 6", n)
	}
	if _, ok := r.b.Topic(topic); ok {
		t.Error("the topic exists on the cluster that the map does not name")
	}
	if n := r.b.Accepted() - direct; n != 0 {
		t.Errorf("%d connections to the other cluster", n)
	}
}

// LK-17: the old cluster unloads a bundle and assigns its topic to another of its own brokers, while the topic is switched. The
// client must not be led back there.
func TestAnAssignedBrokerOfTheOldClusterIsNoWayBack(t *testing.T) {
	const topic = "persistent://public/default/transferred"
	r := newRig(t, testkit.Options{}, nil)
	producer := follow(t, r.app.PulsarAddr(), topic, "", 0)
	producer.mustSend(3)
	clusters := []*testkit.Cluster{r.a, r.b}
	for round := range 6 {
		from, to := clusters[round%2], clusters[1-round%2]
		info, _ := from.Topic(topic)
		other := from.Broker(1 - info.Broker)
		unload := func() {
			if err := from.Unload(topic, other, true); err != nil {
				t.Error(err)
			}
		}
		var group sync.WaitGroup
		switch round / 2 {
		case 0: // the transfer first
			unload()
		case 1: // at once
			group.Go(unload)
		}
		moved := make(chan error, 1)
		go func() { moved <- r.switchTo(t, to.Name(), topic) }()
		if round/2 == 2 { // after the flip
			r.await(t, "flip", func() bool {
				e, _ := r.app.Table().Entry(topic)
				return e.Cluster == to.Name()
			})
			unload()
		}
		group.Wait()
		if err := <-moved; err != nil {
			t.Fatal(err)
		}
		awaitClients(t, from, topic, 0, 0)
		written := from.Count(codec.TypeProducer)
		producer.mustSend(5)
		if info, _ := to.Topic(topic); len(info.Producers) != 1 {
			t.Errorf("round %d: cluster %s has %d producers, want 1", round, to.Name(), len(info.Producers))
		}
		if n := from.Count(codec.TypeProducer) - written; n != 0 {
			t.Errorf("round %d: %d PRODUCERs reached the old cluster after the switch", round, n)
		}
	}
}

// LK-17, the narrow moment: the map has changed, the eviction of a producer waits for its turn, and the old cluster closes it with an
// address of its own. The client is told of the close, and nothing of that address.
func TestAnAssignedBrokerIsNotToldOnceTheMapHasChanged(t *testing.T) {
	const topic = "persistent://public/default/assigned-late"
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Eviction = config.Eviction{Rate: 1, Burst: 1} })
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	p.produce(topic, "", 2)
	r.route(t, topic, "b")
	first := p.expect(codec.TypeCloseProducer).GetCloseProducer().GetProducerId() // the other's turn comes in a second
	info, _ := r.a.Topic(topic)
	if err := r.a.Unload(topic, r.a.Broker(1-info.Broker), true); err != nil {
		t.Fatal(err)
	}
	closed := p.expect(codec.TypeCloseProducer).GetCloseProducer()
	if closed.GetProducerId() != 3-first || closed.AssignedBrokerServiceUrl != nil || closed.AssignedBrokerServiceUrlTls != nil {
		t.Errorf("after producer %d the client was told %v", first, closed)
	}
}

// An assigned address is the broker's own: the client is told the tagged one, and comes back by it.
func TestAnAssignedBrokerIsToldByItsTaggedAddress(t *testing.T) {
	const topic = "persistent://public/default/assigned"
	r := newRig(t, testkit.Options{}, nil)
	p := r.bridge(t, topic)
	p.produce(topic, "", 1)
	info, _ := r.a.Topic(topic)
	heir := r.a.Broker(1 - info.Broker)
	if err := r.a.Unload(topic, heir, true); err != nil {
		t.Fatal(err)
	}
	url := p.expect(codec.TypeCloseProducer).GetCloseProducer().GetAssignedBrokerServiceUrl()
	if url == "" || strings.Contains(url, heir.Addr()) || strings.TrimPrefix(url, "pulsar://") != r.owner(t, topic) {
		t.Fatalf("assigned %q, want what a LOOKUP answers now", url)
	}
	back := r.connect(t, strings.TrimPrefix(url, "pulsar://"))
	back.produce(topic, "", 1)
	back.publish(1, 1, []byte("x"))
	if info, _ := r.a.Topic(topic); info.Broker != heir.Index() || len(info.Producers) != 1 {
		t.Errorf("the topic is on broker %d with producers %v", info.Broker, info.Producers)
	}
}

// LK-03, LK-04: a target that no cluster vouches for is refused with a text that names the field and the value, and nothing is dialled.
func TestTargetsThatNobodyVouchesForAreRefused(t *testing.T) {
	const topic = "persistent://public/default/target"
	r := newRig(t, testkit.Options{}, probedOnce)
	good := r.owner(t, topic)
	tampered := []byte(good)
	tampered[3] ^= 1
	dials := func() (n int64) {
		for _, l := range r.app.engine.Stats().Loops {
			n += l.Dials
		}
		return n
	}
	before := dials()
	refused := r.closed(t, "client", "target_refused")
	targets := []string{
		"example.com:6650", "169.254.169.254:80", "127.0.0.1:22", r.a.Broker(0).Addr(), "broker-0:6650", // the last: two clusters have it
		"unknown-broker:6650", "no-port", "", "host:99999", "[::1]:6650", "pulsar://", strings.Repeat("x", 4096) + ":6650", string(tampered), "\x00\xff:6650", "pulsar://" + good,
	}
	for _, target := range targets {
		p := r.dial(t)
		cmd := connectCommand("x")
		cmd.Connect.ProxyToBrokerUrl = proto.String(target)
		p.send(cmd)
		got, _, err := p.next()
		if err != nil || codec.ServerError(got.GetError().GetError()) != codec.ErrorServiceNotReady || !strings.Contains(got.GetError().GetMessage(), "proxy_to_broker_url") {
			t.Errorf("target %.40q: %v, %v", target, got, err)
			continue
		}
		if len(got.GetError().GetMessage()) > 1000 {
			t.Errorf("target %.40q: a text of %d bytes", target, len(got.GetError().GetMessage()))
		}
		p.ended(patience)
	}
	if n := dials() - before; n > 0 {
		t.Errorf("%d connections were dialled", n)
	}
	if n := r.closed(t, "client", "target_refused") - refused; n != float64(len(targets)) {
		t.Errorf("%v refusals were counted, want %d", n, len(targets))
	}
	r.connect(t, good).produce(topic, "", 1)
}
