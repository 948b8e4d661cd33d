package app

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// exclusiveAccess is the access mode of a producer that is the only one.
const exclusiveAccess = 1

// OP-01: a proxy is stopped under load. It says that it is not ready while it still takes connections; its clients go to the
// second proxy, where names and subscriptions are free; everything acknowledged is there.
func TestAStopUnderLoadSendsClientsToTheNextProxy(t *testing.T) {
	const topic, delay = "persistent://public/default/rolling", 4 * time.Second
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Shutdown.DrainDelay = config.Duration(delay) })
	other := r.beside(t, r.app.store.(joiner).Join(), nil)
	var busy atomic.Int64 // refusals that a client saw because its own predecessor was still there
	for _, typ := range []codec.Type{codec.TypeProducer, codec.TypeSubscribe} {
		t.Cleanup(r.a.Handle(typ, testkit.ForTopic(topic, func(*testkit.Conn, *pulsarpb.BaseCommand) bool {
			info, _ := r.a.Topic(topic)
			for _, s := range info.Subscriptions {
				if typ == codec.TypeSubscribe && len(s.Consumers) > 0 {
					busy.Add(1)
				}
			}
			if typ == codec.TypeProducer && len(info.Producers) > 0 {
				busy.Add(1)
			}
			return false
		})))
	}
	balancer := newRelay(t, r.app.PulsarAddr(), other.app.PulsarAddr())
	producer := follow(t, balancer.Addr().String(), topic, "the-only", exclusiveAccess)
	consumer := followAs(t, balancer.Addr().String(), topic, "s", testkit.Failover)
	producer.mustSend(10)
	held := r.connect(t, r.owner(t, topic)) // a raw one, to see the order of things
	held.subscribe(topic+"-held", "s", testkit.Exclusive, 1)

	quit, done := make(chan struct{}), make(chan int, 1)
	go func() {
		n := 0
		defer func() { done <- n }()
		pace := time.NewTicker(time.Millisecond) // a consumer is permitted a limited number
		defer pace.Stop()
		for {
			select {
			case <-quit:
				return
			case <-pace.C:
			}
			if !producer.trySend(fmt.Append(nil, n)) {
				t.Errorf("message %d has no receipt", n)
				return
			}
			n++
		}
	}()
	stopped := make(chan error, 1)
	start := time.Now()
	go func() { stopped <- r.stop() }()

	r.await(t, "not ready", func() bool {
		ready, err := r.admin.Ready(t.Context())
		return err == nil && !ready.Ready && strings.Contains(strings.Join(ready.Reasons, ";"), "draining")
	})
	late := r.connect(t, "") // the listener is still open: balancers have not noticed yet
	late.ended(patience)
	held.ended(patience)
	r.await(t, "closed listener", func() bool {
		nc, err := net.Dial("tcp", r.app.PulsarAddr())
		if err == nil {
			nc.Close()
		}
		return err != nil
	})
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	t.Logf("stopped after %s", time.Since(start))
	other.await(t, "the clients on the other proxy", func() bool { return other.bridged() > 0 })
	back, sent := time.Since(start), r.a.Count(codec.TypeSend)
	awaitCluster(t, r.a, "messages through the other proxy", func() bool { return r.a.Count(codec.TypeSend) > sent+100 })
	close(quit)
	n := <-done
	payloads := map[string]bool{}
	for _, m := range r.a.Messages(topic) {
		payloads[string(m.Payload)] = true
	}
	for i := range n {
		if !payloads[fmt.Sprint(i)] {
			t.Errorf("message %d was acknowledged and is nowhere", i)
		}
	}
	consumer.mustReceive(10 + n)
	if got := busy.Load(); got != 0 {
		t.Errorf("%d creations met their predecessor", got)
	}
	t.Logf("on the other proxy after %s; %d messages", back, n)
}

// Broker legs end before client sides: when a client sees its end, its name is free at the broker.
func TestADrainedClientFindsItsNameFree(t *testing.T) {
	const topic = "persistent://public/default/drained"
	n := scaled(100)
	r := newRig(t, testkit.Options{}, nil)
	other := r.beside(t, r.app.store.(joiner).Join(), nil)
	target, again := r.owner(t, topic), other.owner(t, topic)
	var group sync.WaitGroup
	var refused atomic.Int64
	ready := make(chan struct{}, n)
	for i := range n {
		group.Go(func() {
			p := r.connect(t, target)
			p.produce(topic, fmt.Sprintf("name-%d", i), 1)
			ready <- struct{}{}
			p.ended(patience)
			next := other.connect(t, again)
			next.send(producerCommand(topic, fmt.Sprintf("name-%d", i), 1, 1))
			if cmd, _, err := next.next(); err != nil || cmd.GetProducerSuccess() == nil {
				refused.Add(1)
				t.Errorf("producer %d: %v, %v", i, cmd, err)
			}
		})
	}
	for range n {
		<-ready
	}
	asked := r.a.Count(codec.TypePong)
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	group.Wait()
	t.Logf("%d clients came back, the broker had to ask %d predecessors whether they live", n, r.a.Count(codec.TypePong)-asked)
	if got := r.a.Count(codec.TypePong) - asked; got != 0 {
		t.Errorf("%d predecessors answered that they live: a leg outlived its client", got)
	}
}

// The store is away at the start. The last good map is served from the disk; with a damaged copy the proxy says so, and serves
// nobody rather than by an empty map.
func TestTheLastGoodMapIsServedWhileTheStoreIsAway(t *testing.T) {
	const onB, onA = "persistent://public/default/on-b", "persistent://public/default/on-a"
	dir := t.TempDir()
	withDir := func(c *config.Config) { c.StateDir, c.ProxyID = dir, "the-proxy" }
	first := newRig(t, testkit.Options{}, nil)
	shared := first.app.store.(joiner)
	mine := shared.Join()
	saved := first.beside(t, mine, withDir)
	saved.route(t, onB, "b")
	saved.route(t, "public/ns", "b")
	digest := saved.app.Table().Digest()
	mine.SetFaults(faultsAway)           // it cannot leave the roster, so that switches reckon with it, and it may come back
	if err := saved.stop(); err != nil { // writes the copy
		t.Fatal(err)
	}

	away := shared.Join()
	away.SetFaults(faultsAway)
	r := first.beside(t, away, withDir)
	if got := r.app.Table().Digest(); got != digest {
		t.Errorf("the map from the disk has digest %s, want %s", got, digest)
	}
	if len(r.log.with("serving the map from the disk", digest)) != 1 {
		t.Errorf("no line says where the map comes from: %q", r.log.last(10))
	}
	for _, topic := range []string{onB, "persistent://public/ns/x", onA} {
		follow(t, r.app.PulsarAddr(), topic, "", 0).mustSend(3)
	}
	if a, b := len(r.a.Messages(onB))+len(r.a.Messages("persistent://public/ns/x"))+len(r.b.Messages(onA)), len(r.b.Messages(onB)); a != 0 || b != 3 {
		t.Errorf("%d messages are on the wrong cluster, %d on the right one", a, b)
	}
	if err := r.switchTo(t, "b", onA); err == nil {
		t.Error("a switch was accepted without a store")
	}
	if age := r.metric(t, "pointsman_map_age_seconds"); age <= 0 {
		t.Errorf("the age of the map is %v", age)
	}
	first.route(t, onA, "b")
	away.SetFaults(faultsNone)
	awaitCluster(t, r.b, "the client that the map's change moves", func() bool {
		info, _ := r.b.Topic(onA)
		return len(info.Producers) == 1
	})
	name := filepath.Join(dir, "last-good-map")
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if files, err := filepath.Glob(name + "*"); err != nil || len(files) > 0 {
		t.Errorf("a proxy that has left the roster has kept %q (%v): switches do not reckon with it any more", files, err)
	}
	for what, bad := range map[string][]byte{"one bit": append(append([]byte{}, good[:len(good)/2]...), append([]byte{good[len(good)/2] ^ 1}, good[len(good)/2+1:]...)...), "cut off": good[:len(good)-7], "empty": {}} {
		t.Run("damaged copy: "+what, func(t *testing.T) {
			if err := os.WriteFile(name, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			away := shared.Join()
			away.SetFaults(faultsAway)
			r := &rig{world: &world{a: first.a, b: first.b}}
			r.cfg = first.config(withDir)
			r.launch(t, away, r.cfg)
			if lines := r.log.with("no map from the disk", name, "remove the file"); len(lines) != 1 {
				t.Errorf("lines: %q", r.log.last(10))
			}
			r.await(t, "answer of /readyz", func() bool {
				a, err := r.admin.Ready(t.Context())
				return err == nil && !a.Ready && strings.Contains(strings.Join(a.Reasons, ";"), "map was never loaded")
			})
			// A client waits or is refused, but is never sent by a map that is not known.
			p := r.dial(t)
			p.send(connectCommand(""))
			p.send(lookupCommand(onB, 1))
			answer := make(chan string, 1)
			go func() {
				for {
					cmd, _, err := p.next()
					if err != nil || cmd.GetLookupTopicResponse() != nil {
						answer <- cmd.GetLookupTopicResponse().GetBrokerServiceUrl()
						return
					}
				}
			}()
			away.SetFaults(faultsNone)
			if url := <-answer; !strings.Contains(url, ".b.") {
				t.Errorf("the lookup of a topic of cluster b was answered with %q", url)
			}
			r.await(t, "readiness", func() bool {
				a, err := r.admin.Ready(t.Context())
				return err == nil && a.Ready
			})
		})
	}
}

// A proxy whose map has not come yet does not answer by an empty one: its topics may belong to any cluster.
func TestNobodyIsServedBeforeTheMapIsThere(t *testing.T) {
	const topic = "persistent://public/default/early"
	first := newRig(t, testkit.Options{}, nil)
	first.route(t, topic, "b")
	late := first.app.store.(joiner).Join()
	late.SetFaults(faultsHoldWatches)
	r := &rig{world: &world{a: first.a, b: first.b}}
	r.cfg = first.config(nil)
	r.launch(t, late, r.cfg)
	p := r.dial(t)
	p.send(connectCommand(""))
	p.send(lookupCommand(topic, 1))
	r.await(t, "answer of /readyz", func() bool {
		a, err := r.admin.Ready(t.Context())
		return err == nil && !a.Ready
	})
	p.nc.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	if b, err := p.r.Peek(1); err == nil {
		t.Errorf("the proxy answered % x without a map", b)
	}
	late.SetFaults(faultsNone)
	p.expect(codec.TypeConnected)
	if target := p.target(); !strings.Contains(target, ".b.") {
		t.Errorf("the lookup was answered with %q, want a broker of b", target)
	}
}

// A store that is in use by another process is refused with a reason, and nothing is left open.
func TestASecondProcessOnTheSameStoreIsRefused(t *testing.T) {
	r := newRig(t, testkit.Options{}, nil)
	cfg := r.config(nil)
	cfg.Store = config.Store{Type: "file", Path: t.TempDir()}
	held, err := store.OpenFile(cfg.Store.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if _, err := New(t.Context(), cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), cfg.Store.Path) {
		t.Errorf("error %v, want one that names %s", err, cfg.Store.Path)
	}
}

// C4: a SEND that the broker has not answered may still arrive after the proxy has left the roster. The tombstone has the next switch unload the topic;
// a proxy that has all its answers leaves none, or every rolling restart would.
func TestAStopLeavesATombstoneWhenSomethingWasUnanswered(t *testing.T) {
	const topic = "persistent://public/default/late"
	for _, answered := range []bool{true, false} {
		t.Run(fmt.Sprintf("answered: %v", answered), func(t *testing.T) {
			r := newRig(t, testkit.Options{}, nil)
			other := r.app.store.(joiner).Join()
			p := r.bridge(t, topic)
			p.produce(topic, "p", 1)
			p.publish(1, 0, []byte("x"))
			if !answered {
				r.a.Handle(codec.TypeSend, testkit.Drop)
				p.write(sendFrame(1, 1, []byte("y")))
				awaitCluster(t, r.a, "the SEND", func() bool { return r.a.Count(codec.TypeSend) == 2 })
			}
			self := r.app.Info()
			if err := r.stop(); err != nil {
				t.Error(err)
			}
			members, err := other.Proxies(t.Context())
			if err != nil || len(members) != 0 {
				t.Errorf("on the roster: %+v, %v", members, err)
			}
			tombs, err := other.Tombstones(t.Context())
			if err != nil || len(tombs) > 0 == answered {
				t.Errorf("tombstones: %+v, %v", tombs, err)
			}
			if !answered && len(tombs) == 1 && (tombs[0].ID != self.ID || tombs[0].Incarnation != self.Incarnation) {
				t.Errorf("the tombstone is of %s %s, want %s %s", tombs[0].ID, tombs[0].Incarnation, self.ID, self.Incarnation)
			}
		})
	}
}

// rosterWatch is a store that holds back announcements, and notes whether the proxy leaves the roster while one is under way.
type rosterWatch struct {
	*store.Memory
	hold     atomic.Bool
	announce atomic.Int64 // announcements under way
	begun    chan struct{}
	overlaps atomic.Int64
}

func (s *rosterWatch) Register(ctx context.Context, p store.Proxy) error {
	if s.hold.Load() {
		s.announce.Add(1)
		defer s.announce.Add(-1)
		select {
		case s.begun <- struct{}{}:
		default:
		}
		<-ctx.Done()
		return ctx.Err()
	}
	return s.Memory.Register(ctx, p)
}

func (s *rosterWatch) Unregister(ctx context.Context, settled bool) error {
	s.overlaps.Add(s.announce.Load())
	return s.Memory.Unregister(ctx, settled)
}

// A proxy that leaves the roster does not announce itself afterwards: nobody would answer for it, and every switch would wait for it.
func TestAProxyThatLeavesTheRosterDoesNotComeBack(t *testing.T) {
	first := newRig(t, testkit.Options{}, nil)
	st := &rosterWatch{Memory: store.NewMemory(), begun: make(chan struct{}, 1)}
	r := first.beside(t, st, nil)
	st.hold.Store(true)
	r.route(t, "persistent://public/default/any", "b") // another map is served: the proxy announces it
	<-st.begun
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if n := st.overlaps.Load(); n != 0 {
		t.Error("the proxy has left the roster while it was announcing itself")
	}
}
