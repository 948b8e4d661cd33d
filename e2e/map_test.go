//go:build e2e

package e2e

import (
	"errors"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// A topic that no entry and no rule maps lives on the default cluster; a namespace rule moves the rest of its namespace.
func TestUnmappedTopicsGoToTheDefaultClusterAndRulesDecideTheirNamespace(t *testing.T) {
	const count = 100
	proxies := pair(t)
	unmapped := newTopic("public/default", "unmapped")
	setRoute(t, proxies[0], "acme/part4", "b")
	t.Cleanup(func() {
		must(t, proxies[0].CLI(limited(t, 20*time.Second), nil, "routes", "rm", "acme/part4", "--immediate"))
	})
	ruled := newTopic("acme/part4", "ruled")
	awaitRoute(t, ruled, "b")
	for topic, cluster := range map[string]*Cluster{unmapped: rig.A, ruled: rig.B} {
		consumer := startDriver(t, Go, "consume", "--url", proxies[1].URL, "--topic", topic, "--count", strconv.Itoa(count))
		sent := runDriver(t, 30*time.Second, Python, "produce", "--url", proxies[0].URL, "--topic", topic, "--count", strconv.Itoa(count), "--keys", "8")
		want(t, topic, sorted(Compare(sent.Acks.All(), finish(t, 30*time.Second, consumer).Recvs.All())), count)
		onlyOn(t, topic, cluster, count)
	}
	for topic, source := range map[string]string{unmapped: "default", ruled: "namespace"} {
		var e explanation
		must(t, proxies[1].CLI(limited(t, 20*time.Second), &e, "explain", topic))
		if e.Source != source || e.LookupError != "" {
			t.Errorf("explain %s: %+v, want source %s and no lookup error", topic, e, source)
		}
	}
}

// A map entry with a cluster that a proxy does not know is refused to its clients with a text that names topic and
// cluster, in a code that makes no client drop its connection; everything else goes on. A proxy that does know the
// cluster serves the topic.
func TestAnUnknownClusterInTheMapIsAClearErrorAndOthersGoOn(t *testing.T) {
	proxies := pair(t)
	ctx := limited(t, 60*time.Second)
	other := newTopic("acme/plain", "goes-on")
	setRoute(t, proxies[0], other, "b")
	awaitRoute(t, other, "b")
	live := startDriver(t, Go, "live", "--url", proxies[0].URL, "--topics", other, "--rates", "200")
	await(t, live, "messages", func(r Record) bool { return r.Recvs.Len() >= 100 })

	third, err := StartPointsman(ctx, artifacts, processes, rig.Dir, "p3", rig.PointsmanConfig("pointsman-"+runID, "c"))
	must(t, err)
	t.Cleanup(func() {
		if err := third.Proc.Stop(20 * time.Second); err != nil {
			t.Errorf("graceful stop: %v", err)
		}
	})
	topic := newTopic("acme/plain", "on-c")
	var refused *CLIError
	if err := third.CLI(ctx, nil, "routes", "set", topic, "c"); !errors.As(err, &refused) || !strings.Contains(refused.Output, "p1") {
		t.Errorf("mapping to a cluster that p1 and p2 do not know: got %v, want a refusal that names them", err)
	}
	setRoute(t, third, topic, "c", "--force")
	awaitRoute(t, topic, "c")

	conn, err := DialRaw(strings.TrimPrefix(proxies[0].URL, "pulsar://"), 20*time.Second)
	must(t, err)
	defer conn.Close()
	if answer, err := conn.Connect(nil); err != nil || answer.GetType() != cmdConnected {
		t.Fatalf("CONNECT without a target: %v, %v", answer, err)
	}
	countBefore := metric(t, proxies[0], "pointsman_refused_requests_total")
	must(t, conn.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdLookup), LookupTopic: &pulsarpb.CommandLookupTopic{
		Topic: &topic, RequestId: proto.Uint64(7),
	}}))
	answer, err := conn.Receive()
	must(t, err)
	response := answer.GetLookupTopicResponse()
	if response.GetResponse() != lookupFailed || response.GetRequestId() != 7 || response.GetError() == serviceNotReady {
		t.Errorf("LOOKUP of a topic on an unknown cluster: %v; want Failed for request 7 with a code that closes no connection", answer)
	}
	for _, part := range []string{topic, `c`, "cluster"} {
		if !strings.Contains(response.GetMessage(), part) {
			t.Errorf("the refusal %q does not name %q", response.GetMessage(), part)
		}
	}

	if got := metric(t, proxies[0], "pointsman_refused_requests_total") - countBefore; got != 1 {
		t.Errorf("the counter of refused requests grew by %v, want 1", got)
	}

	sent := runDriver(t, 30*time.Second, Go, "produce", "--url", third.URL, "--topic", topic, "--count", "10")
	if sent.Acks.Len() != 10 {
		t.Errorf("through the proxy that knows cluster c: %d receipts, want 10", sent.Acks.Len())
	}
	onlyOn(t, topic, rig.B, 10)

	acked := live.Record().Acks.Len()
	await(t, live, "more messages of the other topic", func(r Record) bool { return r.Acks.Len() >= acked+100 })
	perfectEnd(t, live)
}

// ZK-01, ZK-02: while the map's ZooKeeper is away, traffic and new lookups go on and changes are refused; a change that
// is made after it has come back, while one proxy sleeps through its session, arrives there without a restart.
func TestTrafficOutlivesTheMapsZooKeeperAndMissedChangesArrive(t *testing.T) {
	proxies := pair(t)
	ctx := limited(t, 5*time.Minute)
	onA, onB, early, late := newTopic("acme/plain", "zk-a"), newTopic("acme/plain", "zk-b"), newTopic("acme/plain", "zk-early"), newTopic("acme/plain", "zk-late")
	for topic, cluster := range map[string]string{onA: "a", onB: "b", early: "b", late: "a"} {
		setRoute(t, proxies[0], topic, cluster)
		awaitRoute(t, topic, cluster)
	}
	lives := []*Driver{
		startDriver(t, Go, "live", "--url", proxies[0].URL, "--topics", onA, "--rates", "200"),
		startDriver(t, Python, "live", "--url", proxies[1].URL, "--topics", onB, "--rates", "200"),
	}
	goOn := func(when string) {
		t.Helper()
		for _, live := range lives {
			acked := live.Record().Acks.Len()
			await(t, live, "traffic "+when, func(r Record) bool { return r.Recvs.Len() >= acked+200 })
		}
	}
	goOn("before")

	must(t, rig.StopMapZooKeeper())
	restarted := false
	t.Cleanup(func() {
		if !restarted {
			must(t, rig.StartMapZooKeeper(limited(t, 60*time.Second)))
		}
	})
	goOn("without ZooKeeper")
	for _, p := range proxies {
		if connected, age := metric(t, p, "pointsman_map_store_connected"), metric(t, p, "pointsman_map_age_seconds"); connected != 0 || age < 0.5 {
			t.Errorf("%s without ZooKeeper: store connected %v, age of the map %v s; want 0 and the time since it went away", p.Name, connected, age)
		}
	}
	for i, cluster := range []*Cluster{rig.B, rig.A} {
		topic := []string{early, newTopic("public/default", "zk-new")}[i]
		sent := runDriver(t, 30*time.Second, []Client{Java, Go, Python}[i], "produce", "--url", proxies[i].URL, "--topic", topic, "--count", "100")
		if sent.Acks.Len() != 100 {
			t.Errorf("a new client without ZooKeeper: %d receipts, want 100", sent.Acks.Len())
		}
		onlyOn(t, topic, cluster, 100)
	}
	var refused *CLIError
	// An operator is told at once, not after minutes.
	if err := proxies[0].CLI(limited(t, 40*time.Second), nil, "routes", "set", late, "b"); !errors.As(err, &refused) || !strings.Contains(refused.Output, "store_unavailable") {
		t.Errorf("a change of the map without ZooKeeper: got %v, want a refusal with the code store_unavailable within 40 s: it takes ten", err)
	} else {
		t.Logf("refused as it should be: %s", strings.TrimSpace(refused.Output))
	}
	goOn("after two refused changes")

	must(t, rig.StartMapZooKeeper(ctx))
	restarted = true
	proxies[1].Proc.Signal(syscall.SIGSTOP)
	defer proxies[1].Proc.Signal(syscall.SIGCONT)
	must(t, WaitUntil(ctx, "p2's session to expire", func() (bool, error) {
		var list proxyList
		if err := proxies[0].CLI(ctx, &list, "proxies", "ls"); err != nil {
			return false, nil // its own session is being renewed
		}
		live := map[string]bool{}
		for _, p := range list.Proxies {
			live[p.ID] = p.Live
		}
		return live["p1"] && !live["p2"], nil
	}))
	// p2 cannot be asked for its clients: it blocks the change by name, until the operator insists.
	if err := proxies[0].CLI(ctx, nil, "routes", "set", late, "b"); !errors.As(err, &refused) || !strings.Contains(refused.Output, "p2") {
		t.Errorf("a change while p2 sleeps: got %v, want a refusal that names p2", err)
	}
	setRoute(t, proxies[0], late, "b", "--immediate")
	awaitRouteOn(t, proxies[0], late, "b")
	proxies[1].Proc.Signal(syscall.SIGCONT)
	awaitRouteOn(t, proxies[1], late, "b")
	sent := runDriver(t, 30*time.Second, Go, "produce", "--url", proxies[1].URL, "--topic", late, "--count", "100")
	if sent.Acks.Len() != 100 {
		t.Errorf("after the change: %d receipts, want 100", sent.Acks.Len())
	}
	onlyOn(t, late, rig.B, 100)
	must(t, WaitUntil(ctx, "the proxies to agree again", func() (bool, error) {
		var list proxyList
		err := proxies[1].CLI(ctx, &list, "proxies", "ls")
		return list.Agree && len(list.Proxies) >= 2, err
	}))
	goOn("after everything")
	for _, live := range lives {
		perfectEnd(t, live)
	}
}

// perfectEnd stops a live driver of one topic; it must have received everything exactly once, in order, without error.
func perfectEnd(t *testing.T, live *Driver) {
	t.Helper()
	must(t, live.Say("stop"))
	await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
	awaitReceived(t, live, 30*time.Second, func(int) bool { return true })
	must(t, live.Say("quit"))
	record := finish(t, 30*time.Second, live)
	want(t, live.proc.Name, Compare(record.Acks.All(), record.Recvs.All()), record.Acks.Len())
}
