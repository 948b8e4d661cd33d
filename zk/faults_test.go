package zk

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

// shortSession is the shortest session that the test servers grant.
const shortSession = 2 * zktest.TickTime

// pair is a store behind a relay that can be cut, and another one with a line of its own.
func pair(t *testing.T, server *zktest.Server, timeout time.Duration) (far, near *Store, relay *zktest.Relay) {
	root := chroot()
	relay = zktest.NewRelay(t, server.Addr())
	near = open(t, Config{Servers: server.Addr() + root, SessionTimeout: timeout})
	far = open(t, Config{Servers: relay.Addr() + root, SessionTimeout: timeout})
	return far, near, relay
}

func apply(t *testing.T, s store.Store, c store.Change) {
	t.Helper()
	if err := s.Apply(context.Background(), c); err != nil {
		t.Fatalf("Apply: %v", err)
	}
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatal("gave up waiting: " + what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// awaitOne waits until one connection is open; the relay takes its time to see the end of others.
func awaitOne(t *testing.T, relay *zktest.Relay) {
	t.Helper()
	open := 0
	await(t, "one connection to be left", func() bool {
		_, open = relay.Connections()
		return open == 1
	})
}

// raw writes a node past the store, as a person with a shell would.
func raw(t *testing.T, s *Store, path string, data []byte) {
	t.Helper()
	if err := s.put(within(t, 10*time.Second), path, data); err != nil {
		t.Fatal(err)
	}
}

func TestFaults(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"changes made while the line was cut arrive":                          testCutLine,
		"ZK-02 after a session expired everything is read and announced anew": testExpiry,
		"ZK-06 100,000 entries survive reconnects without a loop":             testManyEntries,
		"ZK-08 any number of reconnects leaves one connection":                testOneConnection,
		"ZK-03 a server that moved to another address is found":               testAddressChange,
		"ZK-04 a name that does not resolve stops nobody":                     testUnresolvable,
		"ZK-09 closing while events arrive ends in time":                      testCloseUnderEvents,
		"ZK-09 closing while the line is cut ends in time":                    testCloseUnderCuts,
		"a server that accepts and hangs is left in time":                     testHangingHandshake,
		"operations on a hanging server end by their deadline":                testHangingServer,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

func testCutLine(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 30*time.Second)
	apply(t, near, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	apply(t, near, storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "a", 1)))
	v := storetest.Watch(t, far)
	v.AwaitEntry(t, *storetest.Entry(1, "a", 1))
	session := far.client.sessionID()
	for round := uint64(1); round <= 3; round++ {
		relay.Cut()
		await(t, "the loss to be noticed", func() bool { return !far.Status().Connected })
		apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", round), storetest.Entry(1, "b", round+1)))
		// One that is made and one that goes.
		apply(t, near, storetest.Set(storetest.Topic(10+int(round)), nil, storetest.Entry(10+int(round), "a", 1)))
		if round == 2 {
			apply(t, near, storetest.Set(storetest.Topic(2), storetest.Entry(2, "a", 1), nil))
		}
		relay.Restore()
		v.AwaitEntry(t, *storetest.Entry(1, "b", round+1))
		apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", round+1), storetest.Entry(1, "a", round+1)))
		v.AwaitEntry(t, *storetest.Entry(1, "a", round+1)) // the watches are alive
	}
	v.AwaitMap(t, []route.Entry{*storetest.Entry(1, "a", 4), *storetest.Entry(11, "a", 1), *storetest.Entry(12, "a", 1), *storetest.Entry(13, "a", 1)}, nil)
	if far.client.sessionID() != session {
		t.Error("the session was lost although its time-out had not passed")
	}
}

func testExpiry(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, shortSession)
	apply(t, near, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	if err := far.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "i"}); err != nil {
		t.Fatal(err)
	}
	live := func() bool {
		proxies, err := near.Proxies(within(t, 10*time.Second))
		if err != nil || len(proxies) != 1 || proxies[0].Incarnation != "i" {
			t.Fatalf("Proxies: %+v, %v", proxies, err)
		}
		return proxies[0].Live
	}
	v := storetest.Watch(t, far)
	v.AwaitEntry(t, *storetest.Entry(1, "a", 1))
	session := far.client.sessionID()
	relay.Cut()
	await(t, "the registration to go", func() bool { return !live() })
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), storetest.Entry(1, "b", 2)))
	relay.Restore()
	v.AwaitEntry(t, *storetest.Entry(1, "b", 2))
	await(t, "the registration to come back", live)
	if far.client.sessionID() == session {
		t.Error("the session did not expire; this test tests nothing")
	}
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", 2), storetest.Entry(1, "a", 3)))
	v.AwaitEntry(t, *storetest.Entry(1, "a", 3)) // the watches are set again
	awaitOne(t, relay)
}

// fill writes n entries straight into their buckets.
func fill(t testing.TB, s *Store, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		t.Fatal(err)
	}
	buckets := make([][]route.Entry, route.BucketCount)
	for i := range n {
		topic := fillTopic(i)
		index := route.Bucket(topic)
		buckets[index] = append(buckets[index], route.Entry{Topic: topic, Cluster: []string{"a", "b"}[i%2], Epoch: uint64(i % 5)})
	}
	err := parallel(len(buckets), func(i int) error {
		if len(buckets[i]) == 0 {
			return nil
		}
		return s.put(ctx, s.bucketPath(i), store.NewBucket(buckets[i]).Append(nil))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// fillTopic is the i-th topic of fill.
func fillTopic(i int) string {
	return fmt.Sprintf("persistent://tenant-%d/namespace-%d/some-topic-name-%d", i%7, i%91, i)
}

func testManyEntries(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 30*time.Second)
	fill(t, near, 100_000)
	begin := time.Now()
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	v.Await(t, "all entries", func(v *storetest.View) bool { return v.Entries() == 100_000 })
	t.Logf("100,000 entries were loaded in %s", time.Since(begin))
	before, _ := relay.Connections()
	var last *route.Entry
	for round := uint64(1); round <= 5; round++ {
		relay.Cut()
		await(t, "the loss to be noticed", func() bool { return !far.Status().Connected })
		e := storetest.Entry(1, "a", round)
		apply(t, near, storetest.Set(e.Topic, last, e))
		relay.Restore()
		begin := time.Now()
		v.AwaitEntry(t, *e)
		t.Logf("reconnect %d: the change was seen after %s", round, time.Since(begin))
		last = e
	}
	awaitOne(t, relay)
	if made, _ := relay.Connections(); made-before > 10 {
		t.Errorf("5 reconnects made %d connections", made-before)
	}
	// A watch on a bucket that nobody has touched since the beginning.
	all, err := near.Entries(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	e := all[len(all)/2]
	moved := e
	moved.Epoch += 10
	apply(t, near, storetest.Set(e.Topic, &e, &moved))
	v.AwaitEntry(t, moved)
	far.client.mu.Lock()
	watches := len(far.client.watches)
	far.client.mu.Unlock()
	if watches > route.BucketCount+10 {
		t.Errorf("%d watches are remembered", watches)
	}
}

func testOneConnection(t *testing.T, server *zktest.Server) {
	far, _, relay := pair(t, server, 30*time.Second)
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	for range 10 {
		relay.Cut()
		await(t, "the loss to be noticed", func() bool { return !far.Status().Connected })
		relay.Restore()
		await(t, "the connection", func() bool { return far.Status().Connected })
	}
	awaitOne(t, relay)
}

func testAddressChange(t *testing.T, server *zktest.Server) {
	// Two addresses of one name, on the same port: the name moves from the first to the second.
	first := zktest.NewRelayOn(t, "127.0.0.2:0", server.Addr())
	_, port, err := net.SplitHostPort(first.Addr())
	if err != nil {
		t.Fatal(err)
	}
	second := zktest.NewRelayOn(t, "127.0.0.3:"+port, server.Addr())
	addresses := make(chan string, 1)
	addresses <- "127.0.0.2"
	s := open(t, Config{Servers: "moving.test:" + port + chroot(), resolve: func(_ context.Context, host string) ([]string, error) {
		if host != "moving.test" {
			return nil, fmt.Errorf("asked for %q", host)
		}
		a := <-addresses
		addresses <- a
		return []string{a}, nil
	}})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	<-addresses
	addresses <- "127.0.0.3"
	first.Cut()
	await(t, "a connection to the second address", func() bool { made, _ := second.Connections(); return made > 0 })
	apply(t, s, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), storetest.Entry(1, "b", 2)))
}

func testUnresolvable(t *testing.T, server *zktest.Server) {
	_, port, err := net.SplitHostPort(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, Config{Servers: "gone-1.test:" + port + ",here.test:" + port + ",gone-2.test:" + port + chroot(),
		resolve: func(_ context.Context, host string) ([]string, error) {
			if host == "here.test" {
				return []string{"127.0.0.1"}, nil
			}
			return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}})
	if err := s.Apply(within(t, 10*time.Second), storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1))); err != nil {
		t.Error(err)
	}
}

func testCloseUnderEvents(t *testing.T, server *zktest.Server) {
	root := chroot()
	near := open(t, Config{Servers: server.Addr() + root})
	far := open(t, Config{Servers: server.Addr() + root})
	v := storetest.Watch(t, far)
	v.AwaitSynced(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		before := (*route.Entry)(nil)
		for epoch := uint64(1); ; epoch++ {
			select {
			case <-stop:
				return
			default:
			}
			after := storetest.Entry(1, "a", epoch)
			if err := near.Apply(context.Background(), storetest.Set(after.Topic, before, after)); err != nil {
				t.Errorf("Apply: %v", err)
				return
			}
			before = after
		}
	}()
	v.Await(t, "events", func(v *storetest.View) bool { return v.Entries() > 0 })
	if err := far.Close(); err != nil { // should the library not end, testLog says so
		t.Error(err)
	}
	close(stop)
	<-stopped
}

// testCloseUnderCuts closes stores whose operations are under way while their lines are cut: the library must end.
func testCloseUnderCuts(t *testing.T, server *zktest.Server) {
	root := chroot()
	relay := zktest.NewRelay(t, server.Addr())
	for round := range 20 {
		s, err := Open(context.Background(), Config{Servers: relay.Addr() + root, Logger: testLog(t)})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.fresh(within(t, 20*time.Second)); err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		for range 20 {
			group.Add(1)
			go func() {
				defer group.Done()
				for s.sync(context.Background()) == nil {
				}
			}()
		}
		<-time.After(time.Duration(round) * time.Millisecond / 2)
		group.Add(1)
		go func() {
			defer group.Done()
			s.client.dialer.close() // as a network does, at the worst moment
		}()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		group.Wait()
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
}

// late is when an operation surely has not ended by its deadline; without one it would wait for as long as its server hangs.
const late = 10 * time.Second

func testHangingHandshake(t *testing.T, server *zktest.Server) {
	relay := zktest.NewRelay(t, server.Addr())
	relay.Hold()
	s := open(t, Config{Servers: relay.Addr() + chroot(), SessionTimeout: 30 * time.Second})
	begin := time.Now()
	_, err := s.TagKey(within(t, 300*time.Millisecond))
	if !errors.Is(err, store.ErrUnavailable) || time.Since(begin) > late {
		t.Errorf("TagKey: %v after %s, want ErrUnavailable by the deadline", err, time.Since(begin))
	}
	await(t, "a second attempt, though the first one hangs", func() bool { made, _ := relay.Connections(); return made >= 2 })
	relay.Release()
	if _, err := s.TagKey(within(t, 20*time.Second)); err != nil {
		t.Error(err)
	}
}

func testHangingServer(t *testing.T, server *zktest.Server) {
	far, _, relay := pair(t, server, 30*time.Second)
	apply(t, far, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	contact := far.Status().Contact
	relay.Hold()
	for name, op := range map[string]func(ctx context.Context) error{
		"Entry":      func(ctx context.Context) error { _, _, err := far.Entry(ctx, storetest.Topic(1)); return err },
		"Entries":    func(ctx context.Context) error { _, err := far.Entries(ctx); return err },
		"Rules":      func(ctx context.Context) error { _, err := far.Rules(ctx); return err },
		"Switches":   func(ctx context.Context) error { _, err := far.Switches(ctx, 5); return err },
		"SwitchesOf": func(ctx context.Context) error { _, err := far.SwitchesOf(ctx, "b"); return err },
		"History":    func(ctx context.Context) error { _, err := far.History(ctx, 5); return err },
		"Proxies":    func(ctx context.Context) error { _, err := far.Proxies(ctx); return err },
		"Register":   func(ctx context.Context) error { return far.Register(ctx, store.Proxy{ID: "p"}) },
		"Apply": func(ctx context.Context) error {
			return far.Apply(ctx, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), nil))
		},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		begin := time.Now()
		err := op(ctx)
		cancel()
		if !errors.Is(err, store.ErrUnavailable) || time.Since(begin) > late {
			t.Errorf("%s: %v after %s, want ErrUnavailable by the deadline", name, err, time.Since(begin))
		}
	}
	if got := far.Status().Contact; got.Before(contact) || time.Since(got) < 200*time.Millisecond {
		t.Errorf("the last contact is said to be %s ago", time.Since(got))
	}
	relay.Release()
	if _, ok, err := far.Entry(within(t, 20*time.Second), storetest.Topic(1)); err != nil || !ok {
		t.Errorf("Entry after the hang: %v, %v", ok, err)
	}
	await(t, "the registration that failed meanwhile", func() bool {
		proxies, err := far.Proxies(within(t, 10*time.Second))
		return err == nil && len(proxies) == 1 && proxies[0].Live
	})
	relay.Hold()
	if err := far.Close(); err != nil { // should the library not end, testLog says so
		t.Errorf("Close with a hanging server: %v", err)
	}
}

// TestRestartOfTheServer also covers ZK-01: the ensemble is away, nothing is called, and it comes back by itself.
func TestZK01RestartOfTheServerLosesNothing(t *testing.T) {
	server := zktest.Start(t)
	root := chroot()
	s := open(t, Config{Servers: server.Addr() + root, SessionTimeout: 30 * time.Second})
	other := open(t, Config{Servers: server.Addr() + root, SessionTimeout: 30 * time.Second})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	if err := s.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "i"}); err != nil {
		t.Fatal(err)
	}
	v := storetest.Watch(t, s)
	v.AwaitEntry(t, *storetest.Entry(1, "a", 1))
	for round := uint64(1); round <= 2; round++ {
		server.Kill()
		await(t, "the loss to be noticed", func() bool { return !s.Status().Connected })
		err := s.Apply(within(t, 500*time.Millisecond), storetest.Set(storetest.Topic(1), nil, nil))
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), server.Addr()) {
			t.Errorf("Apply without a server: %v, want ErrUnavailable that names the server", err)
		}
		server.Start()
		apply(t, other, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", round), storetest.Entry(1, "a", round+1)))
		v.AwaitEntry(t, *storetest.Entry(1, "a", round+1))
	}
	proxies, err := other.Proxies(within(t, 10*time.Second))
	if err != nil || len(proxies) != 1 || !proxies[0].Live {
		t.Errorf("Proxies: %+v, %v", proxies, err)
	}
}

// TestZK08LeaderElections kills the leader of three servers again and again.
func TestZK08LeaderElectionsKeepOneConnectionAndEveryChange(t *testing.T) {
	if testing.Short() {
		t.Skip("three servers")
	}
	servers := zktest.Ensemble(t, 3)
	var names []string
	for _, s := range servers {
		names = append(names, s.Addr())
	}
	text := strings.Join(names, ",") + chroot()
	s := open(t, Config{Servers: text, SessionTimeout: 20 * time.Second})
	other := open(t, Config{Servers: text, SessionTimeout: 20 * time.Second})
	v := storetest.Watch(t, other)
	v.AwaitSynced(t)
	var before *route.Entry
	for epoch := uint64(1); epoch <= 3; epoch++ {
		after := storetest.Entry(1, "a", epoch)
		if err := s.Apply(within(t, 60*time.Second), storetest.Set(after.Topic, before, after)); err != nil {
			t.Fatalf("epoch %d: %v", epoch, err)
		}
		v.AwaitEntry(t, *after)
		if e, _, err := other.Entry(within(t, 30*time.Second), after.Topic); err != nil || e != *after {
			t.Errorf("epoch %d: another proxy reads %+v, %v", epoch, e, err)
		}
		before = after
		leader := -1
		await(t, "a server to lead", func() bool {
			leader = slices.IndexFunc(servers, (*zktest.Server).Leader)
			return leader >= 0
		})
		servers[leader].Kill()
		servers[leader].Start()
	}
	await(t, "both to be connected", func() bool { return s.Status().Connected && other.Status().Connected })
	await(t, "two stores to have two connections", func() bool { // a server takes its time to see the end of others
		total := 0
		for _, server := range servers {
			total += server.Connections()
		}
		return total == 2
	})
}

// TestZK08TheDialerKeepsOneConnection: the library forgets the connection of a session that had expired.
func TestZK08TheDialerKeepsOneConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := &dialer{ctx: within(t, 10*time.Second), resolve: net.DefaultResolver.LookupHost, failed: func(string, error) {}, traffic: &traffic{}}
	first, err := d.dial("tcp", l.Addr().String(), 0)
	if err != nil {
		t.Fatal(err)
	}
	begin := d.last
	if _, err := d.dial("tcp", l.Addr().String(), 0); err != nil {
		t.Fatal(err)
	}
	if d.last.Sub(begin) < dialPause {
		t.Error("there is no pause between two connections")
	}
	if err := first.(*wire).Conn.SetDeadline(time.Now()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the connection before is still open: %v", err)
	}
	if n, err := first.Write([]byte("request")); n != len("request") || err != nil {
		t.Errorf("Write to a closed connection: %d, %v; the library must hear of it from the reading side only", n, err)
	}
	d.close()
}

// TestZK10 uses a node whose number is behind what was delivered, as a lagging follower shows it.
func TestZK10AnOlderVersionIsRecognised(t *testing.T) {
	stat := func(czxid, mzxid int64) *zk.Stat { return &zk.Stat{Czxid: czxid, Mzxid: mzxid} }
	k := known{seen: true, exist: true, stat: *stat(5, 20)}
	for _, c := range []struct {
		what        string
		known       known
		node        node
		older, same bool
	}{
		{"the same", k, node{stat: stat(5, 20)}, false, true},
		{"newer", k, node{stat: stat(5, 21)}, false, false},
		{"older", k, node{stat: stat(5, 19)}, true, false},
		{"made again", k, node{stat: stat(30, 30)}, false, false},
		{"deleted", k, node{}, false, false},
		{"deleted before, and here not yet", known{seen: true, stat: *stat(5, 20)}, node{stat: stat(5, 20)}, true, false},
		{"deleted before, and made again", known{seen: true, stat: *stat(5, 20)}, node{stat: stat(40, 40)}, false, false},
	} {
		if got := c.known.olderThanKnown(c.node); got != c.older {
			t.Errorf("%s: older is %v", c.what, got)
		}
		if got := c.known.same(c.node.stat); got != c.same {
			t.Errorf("%s: same is %v", c.what, got)
		}
	}
}
