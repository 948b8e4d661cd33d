package zk

import (
	"context"
	"encoding/binary"
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
	"pointsman/core/switching"
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
		"a lost answer is looked up and not repeated":                         testLostAnswer,
		"a value that cannot be used keeps the last good one":                 testBadValues,
		"a tree that was wiped empties nobody's map":                          testWipedTree,
		"a tree of a newer version is refused":                                testNewerTree,
		"credentials hide the tag key and the map":                            testCredentials,
		"a change that no request can hold is refused":                        testTooLarge,
		"the history is bounded and takes old switches with it":               testHistoryBound,
		"two processes under one id do not fight":                             testSameID,
		"an announcement that was removed comes back":                         testAnnouncementRemoved,
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
	if _, open := relay.Connections(); open != 1 {
		t.Errorf("%d connections are open after an expiry, want 1", open)
	}
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
	made, open := relay.Connections()
	if made-before > 10 || open != 1 {
		t.Errorf("5 reconnects made %d connections, %d are open", made-before, open)
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
	if _, open := relay.Connections(); open != 1 {
		t.Errorf("%d connections are open, want 1", open)
	}
}

func testAddressChange(t *testing.T, server *zktest.Server) {
	// Two addresses of one name, on the same port: the name moves from the first to the second.
	first := zktest.NewRelayOn(t, "127.0.0.2:0", server.Addr())
	_, port, err := net.SplitHostPort(first.Addr())
	if err != nil {
		t.Fatal(err)
	}
	zktest.NewRelayOn(t, "127.0.0.3:"+port, server.Addr())
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
	await(t, "the loss to be noticed", func() bool { return !s.Status().Connected })
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
	begin := time.Now()
	if err := far.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("Close took %s", took)
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
		begin := time.Now()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		group.Wait()
		if took := time.Since(begin); took > 4*time.Second {
			t.Fatalf("round %d: Close took %s", round, took)
		}
	}
}

func testHangingHandshake(t *testing.T, server *zktest.Server) {
	relay := zktest.NewRelay(t, server.Addr())
	relay.Hold()
	s := open(t, Config{Servers: relay.Addr() + chroot(), SessionTimeout: 30 * time.Second})
	begin := time.Now()
	_, err := s.TagKey(within(t, 300*time.Millisecond))
	if !errors.Is(err, store.ErrUnavailable) || time.Since(begin) > 2*time.Second {
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
		"Entry":    func(ctx context.Context) error { _, _, err := far.Entry(ctx, storetest.Topic(1)); return err },
		"Entries":  func(ctx context.Context) error { _, err := far.Entries(ctx); return err },
		"Rules":    func(ctx context.Context) error { _, err := far.Rules(ctx); return err },
		"Switches": func(ctx context.Context) error { _, err := far.Switches(ctx, 5); return err },
		"History":  func(ctx context.Context) error { _, err := far.History(ctx, 5); return err },
		"Proxies":  func(ctx context.Context) error { _, err := far.Proxies(ctx); return err },
		"Register": func(ctx context.Context) error { return far.Register(ctx, store.Proxy{ID: "p"}) },
		"Apply": func(ctx context.Context) error {
			return far.Apply(ctx, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), nil))
		},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		begin := time.Now()
		err := op(ctx)
		cancel()
		if !errors.Is(err, store.ErrUnavailable) || time.Since(begin) > 2*time.Second {
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
	begin := time.Now()
	if err := far.Close(); err != nil || time.Since(begin) > 4*time.Second {
		t.Errorf("Close with a hanging server: %v after %s", err, time.Since(begin))
	}
}

func testLostAnswer(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 30*time.Second)
	apply(t, far, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	const opMulti = 14
	multi := func(request []byte) bool {
		return len(request) >= 12 && binary.BigEndian.Uint32(request[8:]) == opMulti
	}
	// begin starts a write whose answer is kept back.
	begin := func(ctx context.Context, c store.Change) <-chan error {
		relay.HoldRepliesFrom(multi)
		result := make(chan error, 1)
		go func() { result <- far.Apply(ctx, c) }()
		return result
	}
	cut := func() {
		relay.Cut()
		relay.Release()
		relay.Restore()
	}
	isNow := func(want route.Entry) func() bool {
		return func() bool {
			e, _, err := near.Entry(within(t, 10*time.Second), want.Topic)
			return err == nil && e == want
		}
	}
	// Carried out: Apply looks and finds its own work.
	result := begin(within(t, 20*time.Second), storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), storetest.Entry(1, "b", 2)))
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "b", 2)))
	cut()
	if err := <-result; err != nil {
		t.Errorf("a change whose answer was lost: %v", err)
	}
	// Carried out with a switch, and changed by somebody else since: the switch proves it.
	c := storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", 2), storetest.Entry(1, "a", 3))
	c.Switch = &switching.Record{ID: "s-1", Rev: 1, Topic: storetest.Topic(1), Epoch: 3, Started: time.Unix(7, 0)}
	result = begin(within(t, 20*time.Second), c)
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "a", 3)))
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 3), storetest.Entry(1, "b", 4)))
	cut()
	if err := <-result; err != nil {
		t.Errorf("a switch whose answer was lost: %v", err)
	}
	// The same without one cannot be decided.
	result = begin(within(t, 20*time.Second), storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", 4), storetest.Entry(1, "a", 5)))
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "a", 5)))
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 5), storetest.Entry(1, "b", 6)))
	cut()
	if err := <-result; !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a change whose answer was lost and whose entry has changed since: %v, want ErrUnknown", err)
	}
	// The deadline comes before the answer.
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	err := <-begin(ctx, storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "a", 1)))
	cancel()
	if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a write without an answer: %v, want ErrUnavailable and ErrUnknown", err)
	}
	cut()

	// The same before anything was written: the outcome is known.
	await(t, "the connection", func() bool { return far.Status().Connected })
	relay.HoldReplies()
	ctx, cancel = context.WithTimeout(context.Background(), 300*time.Millisecond)
	err = far.Apply(ctx, storetest.Set(storetest.Topic(3), nil, storetest.Entry(3, "a", 1)))
	cancel()
	if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		t.Errorf("a read that was not answered: %v, want ErrUnavailable and not ErrUnknown, as nothing was written", err)
	}
	relay.Release()

	// Under connections that break at any moment, each success is exactly one change in the history.
	var before *route.Entry
	for epoch := uint64(1); epoch <= 20; epoch++ {
		after := storetest.Entry(7, "a", epoch)
		result := make(chan error, 1)
		go func() { result <- far.Apply(within(t, 20*time.Second), storetest.Set(after.Topic, before, after)) }()
		if epoch%2 == 0 {
			relay.HoldReplies()
			<-time.After(time.Duration(epoch) * time.Millisecond)
			cut()
		}
		if err := <-result; err != nil {
			t.Fatalf("epoch %d: %v", epoch, err)
		}
		before = after
	}
	history, err := near.History(within(t, 10*time.Second), 100)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]int{}
	for _, h := range history {
		if h.Entries[0].Topic == storetest.Topic(7) {
			seen[h.Entries[0].After.Epoch]++
		}
	}
	for epoch := uint64(1); epoch <= 20; epoch++ {
		if seen[epoch] != 1 {
			t.Errorf("epoch %d is %d times in the history", epoch, seen[epoch])
		}
	}
}

func testBadValues(t *testing.T, server *zktest.Server) {
	far, near, _ := pair(t, server, 30*time.Second)
	e := storetest.Entry(1, "a", 1)
	index := route.Bucket(e.Topic)
	apply(t, near, storetest.Set(e.Topic, nil, e))
	rule := route.Rule{Cluster: "a"}
	apply(t, near, store.Change{Rules: []store.RuleChange{{After: &rule}}})
	v := storetest.Watch(t, far)
	v.AwaitMap(t, []route.Entry{*e}, []route.Rule{rule})
	good := store.NewBucket([]route.Entry{*e}).Append(nil)
	other := storetest.Entry(2, "a", 1)
	for name, data := range map[string][]byte{
		"empty":        {},
		"noise":        []byte("hello, this is no bucket at all"),
		"truncated":    good[:len(good)-3],
		"newer":        append([]byte{9}, good[1:]...),
		"oversized":    make([]byte, store.MaxBucketBytes+1),
		"other bucket": store.NewBucket([]route.Entry{*other}).Append(nil),
	} {
		raw(t, near, near.bucketPath(index), data)
		v.Await(t, name, func(v *storetest.View) bool { return v.Bad(index) != nil && v.Entries() == 1 })
		if err := near.Apply(within(t, 10*time.Second), storetest.Set(e.Topic, e, nil)); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: Apply to a bucket that cannot be read: %v", name, err)
		}
		raw(t, near, near.bucketPath(index), good)
		v.Await(t, name+", mended", func(v *storetest.View) bool { return v.Bad(index) == nil && v.Entries() == 1 })
	}
	apply(t, near, storetest.Set(other.Topic, nil, other)) // others are not affected
	v.AwaitMap(t, []route.Entry{*e, *other}, []route.Rule{rule})
	for name, data := range map[string]string{
		"noise": "}{", "newer": `{"format":2,"rules":[]}`, "twice": `{"format":1,"rules":[{"scope":"t"},{"scope":"t"}]}`,
		"oversized": `{"format":1,"rules":[],"x":"` + strings.Repeat("x", maxRulesBytes) + `"}`,
	} {
		raw(t, near, near.root+"/rules", []byte(data))
		v.Await(t, "rules: "+name, func(v *storetest.View) bool { return v.Bad(store.BadRules) != nil && len(v.Rules()) == 1 })
		raw(t, near, near.root+"/rules", []byte(`{"format":1,"later":true,"rules":[{"scope":"","cluster":"a","epoch":0,"later":1}]}`))
		v.Await(t, "rules: "+name+", mended", func(v *storetest.View) bool { return v.Bad(store.BadRules) == nil && len(v.Rules()) == 1 })
	}
}

// removeTree removes everything below and at path.
func removeTree(t *testing.T, s *Store, path string) {
	t.Helper()
	names, err := s.children(within(t, 10*time.Second), path)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		removeTree(t, s, path+"/"+name)
	}
	if err := s.delete(within(t, 10*time.Second), path); err != nil {
		t.Fatal(err)
	}
}

func testWipedTree(t *testing.T, server *zktest.Server) {
	root := chroot()
	watcher := open(t, Config{Servers: server.Addr() + root})
	operator := open(t, Config{Servers: server.Addr() + root})
	e := storetest.Entry(1, "a", 1)
	apply(t, operator, storetest.Set(e.Topic, nil, e))
	v := storetest.Watch(t, watcher)
	v.AwaitMap(t, []route.Entry{*e}, nil)
	removeTree(t, operator, operator.root)
	v.Await(t, "the loss to be reported", func(v *storetest.View) bool { return len(v.Rules()) == 0 && v.Bad(store.BadRules) != nil })
	if _, err := watcher.Rules(within(t, 10*time.Second)); err == nil || !strings.Contains(err.Error(), "restore it") {
		t.Errorf("Rules: %v, want what to do", err)
	}
	// Somebody begins a new map in its place.
	anew := open(t, Config{Servers: server.Addr() + root})
	apply(t, anew, storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "b", 1)))
	v.Await(t, "the other map to be reported", func(v *storetest.View) bool {
		err := v.Bad(store.BadRules)
		return err != nil && strings.Contains(err.Error(), "another map")
	})
	v.Await(t, "the old map to stay", func(v *storetest.View) bool { return v.Entries() == 1 })
	v.AwaitEntry(t, *e)
}

func testNewerTree(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	if err := s.boot(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	raw(t, s, s.root+"/meta", []byte(`{"format":2,"buckets":1024}`))
	newer := open(t, Config{Servers: s.client.ensemble.String()})
	if err := newer.Watch(within(t, 20*time.Second), func(store.Update) {}); err == nil || !strings.Contains(err.Error(), "format 2") {
		t.Errorf("Watch: %v, want a refusal that names the format", err)
	}
	if err := newer.Apply(within(t, 10*time.Second), storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1))); err == nil {
		t.Error("a tree of a newer version is written to")
	}
}

func testCredentials(t *testing.T, server *zktest.Server) {
	root := chroot()
	owner := &Auth{Scheme: "digest", Credentials: "proxy:secret"}
	relay := zktest.NewRelay(t, server.Addr())
	s := open(t, Config{Servers: relay.Addr() + root, Auth: owner, ACL: "auth::cdrwa,world:anyone:r"})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	key, err := s.TagKey(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	stranger := open(t, Config{Servers: server.Addr() + root})
	if e, ok, err := stranger.Entry(within(t, 10*time.Second), storetest.Topic(1)); err != nil || !ok || e.Cluster != "a" {
		t.Errorf("the ACL lets everybody read: %v, %v", ok, err)
	}
	if _, err := stranger.TagKey(within(t, 10*time.Second)); !errors.Is(err, zk.ErrNoAuth) {
		t.Errorf("a stranger reads the tag key: %v", err)
	}
	if err := stranger.Apply(within(t, 10*time.Second), storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "a", 1))); !errors.Is(err, zk.ErrNoAuth) {
		t.Errorf("a stranger writes: %v", err)
	}
	// The credentials are there again after a reconnect.
	relay.Cut()
	await(t, "the loss to be noticed", func() bool { return !s.Status().Connected })
	relay.Restore()
	if again, err := s.TagKey(within(t, 20*time.Second)); err != nil || !slices.Equal(again, key) {
		t.Errorf("TagKey after a reconnect: %v", err)
	}
	// Without an ACL of its own, a store with credentials lets nobody else in.
	closed := chroot()
	s = open(t, Config{Servers: server.Addr() + closed, Auth: owner})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	stranger = open(t, Config{Servers: server.Addr() + closed, Auth: &Auth{Scheme: "digest", Credentials: "proxy:wrong"}})
	err = stranger.Watch(within(t, 20*time.Second), func(store.Update) {})
	if !errors.Is(err, zk.ErrNoAuth) || !strings.Contains(err.Error(), "credentials") || strings.Contains(err.Error(), "wrong") {
		t.Errorf("Watch with wrong credentials: %v, want an error that names them and does not tell them", err)
	}
}

func testTooLarge(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	noise := func(n int) string {
		var b strings.Builder
		for x := uint64(n)*2654435761 + 12345; b.Len() < 9000; {
			x = x*6364136223846793005 + 1442695040888963407
			fmt.Fprintf(&b, "%x", x)
		}
		return "persistent://t/n/" + b.String()
	}
	var c store.Change
	for n := range store.MaxChange {
		topic := noise(n)
		c.Entries = append(c.Entries, store.EntryChange{Topic: topic, After: &route.Entry{Topic: topic, Cluster: "a"}})
	}
	if err := s.Apply(within(t, 10*time.Second), c); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("a write of more than a megabyte: %v, want ErrTooLarge", err)
	}
	half := store.Change{Entries: c.Entries[:len(c.Entries)/2]}
	if err := s.Apply(within(t, 10*time.Second), half); err != nil {
		t.Errorf("half of it: %v", err)
	}
	// One bucket over its limit.
	var full []route.Entry
	index := route.Bucket(noise(0))
	for n := range 70 {
		base := noise(n)
		topic := base
		for k := 0; route.Bucket(topic) != index; k++ {
			topic = fmt.Sprint(base, "-", k)
		}
		full = append(full, route.Entry{Topic: topic, Cluster: "a"})
	}
	for _, e := range full[1:] {
		err := s.Apply(within(t, 10*time.Second), storetest.Set(e.Topic, nil, &e))
		if err != nil {
			if !strings.Contains(err.Error(), fmt.Sprint(store.MaxBucketBytes)) {
				t.Errorf("a bucket over its limit: %v, want an error that names the limit", err)
			}
			return
		}
	}
	t.Error("a bucket grew over its limit")
}

func testHistoryBound(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	var before *route.Entry
	for n := 1; n <= keptSegments+3; n++ {
		for range 2 {
			after := storetest.Entry(1, "a", uint64(2*n))
			if before != nil {
				after.Epoch = before.Epoch + 1
			}
			c := storetest.Set(after.Topic, before, after)
			if after.Epoch%2 == 0 {
				c.Switch = &switching.Record{ID: fmt.Sprint("s-", n), Rev: 1, Topic: after.Topic, State: switching.StateDone}
			}
			apply(t, s, c)
			if c.Switch != nil {
				if err := s.PutAck(within(t, 10*time.Second), c.Switch.ID, switching.Ack{Proxy: "p", Incarnation: "i"}); err != nil {
					t.Fatal(err)
				}
			}
			before = after
		}
		segment, stat, err := s.head(within(t, 10*time.Second))
		if err != nil || segment != int64(n) {
			t.Fatalf("segment %d, want %d (%v)", segment, n, err)
		}
		if err := s.rollHistory(within(t, 30*time.Second), &found{segment: segment, headStat: stat}); err != nil {
			t.Fatal(err)
		}
	}
	segments, err := s.segments(within(t, 10*time.Second))
	if err != nil || len(segments) != keptSegments {
		t.Errorf("%d segments are kept, want %d (%v)", len(segments), keptSegments, err)
	}
	history, err := s.History(within(t, 30*time.Second), 10_000)
	if err != nil || len(history) != 2*(keptSegments-1) { // the newest is empty
		t.Errorf("%d changes are kept, want %d (%v)", len(history), 2*(keptSegments-1), err)
	}
	for i := range history[1:] {
		if history[i+1].Seq >= history[i].Seq || history[i+1].Entries[0].After.Epoch >= history[i].Entries[0].After.Epoch {
			t.Errorf("change %d is out of order", i)
		}
	}
	if _, err := s.Switch(within(t, 10*time.Second), "s-1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the switch of a change that is forgotten: %v, want ErrNotFound", err)
	}
	if list, err := s.Switches(within(t, 30*time.Second), 10_000); err != nil || len(list) != keptSegments-1 {
		t.Errorf("%d switches are kept, want %d (%v)", len(list), keptSegments-1, err)
	}
}

func testSameID(t *testing.T, server *zktest.Server) {
	root := chroot()
	one := open(t, Config{Servers: server.Addr() + root})
	two := open(t, Config{Servers: server.Addr() + root})
	if err := one.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	if err := two.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "2"}); err != nil {
		t.Fatal(err)
	}
	if err := one.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("the one that was replaced: %v, want an error that says so", err)
	}
	proxies, err := two.Proxies(within(t, 10*time.Second))
	if err != nil || len(proxies) != 1 || proxies[0].Incarnation != "2" || !proxies[0].Live {
		t.Errorf("Proxies: %+v, %v", proxies, err)
	}
}

func testAnnouncementRemoved(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	if err := s.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	if err := s.delete(within(t, 10*time.Second), s.root+"/proxies/p"); err != nil {
		t.Fatal(err)
	}
	await(t, "the announcement", func() bool {
		proxies, err := s.Proxies(within(t, 10*time.Second))
		return err == nil && len(proxies) == 1 && proxies[0].Live
	})
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
		leader := slices.IndexFunc(servers, (*zktest.Server).Leader)
		if leader < 0 {
			t.Fatal("no server leads")
		}
		servers[leader].Kill()
		servers[leader].Start()
	}
	await(t, "both to be connected", func() bool { return s.Status().Connected && other.Status().Connected })
	total := 0
	for _, server := range servers {
		total += server.Connections()
	}
	if total != 2 {
		t.Errorf("two stores have %d connections", total)
	}
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
	begin := time.Now()
	if _, err := d.dial("tcp", l.Addr().String(), 0); err != nil {
		t.Fatal(err)
	}
	if time.Since(begin) < dialPause/2 {
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
