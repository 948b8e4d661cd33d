//go:build e2e

package e2e

import (
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"

	"pointsman/core/switching"
)

// faultyPair is two proxies with a map of their own, which a test may kill.
func faultyPair(t *testing.T, name string) [2]*Pointsman {
	t.Helper()
	return pairOf(t, name, rig.PointsmanConfig(name+"-"+runID, ""))
}

// pairOf starts two proxies with a map of their own, that of the configuration, which is NAME-RUN, and ends them with the test.
func pairOf(t *testing.T, name, config string) [2]*Pointsman {
	t.Helper()
	proxies, err := startTwo(name, name+"-"+runID, config)
	t.Cleanup(func() {
		for _, p := range proxies {
			if p != nil && p.Proc != nil {
				p.Proc.Signal(syscall.SIGCONT)
				_ = p.Proc.Stop(20 * time.Second)
			}
		}
	})
	must(t, err)
	return proxies
}

// leaderOf waits until one of two proxies leads the switches, and returns it and the other one.
func leaderOf(t *testing.T, proxies [2]*Pointsman) (leader, other *Pointsman) {
	t.Helper()
	ctx := limited(t, 40*time.Second)
	must(t, WaitUntil(ctx, "one of the proxies to lead", func() (bool, error) {
		for i, p := range proxies {
			if leads, err := p.Metric(ctx, "pointsman_switch_leader"); err == nil && leads == 1 {
				leader, other = p, proxies[1-i]
				return true, nil
			}
		}
		return false, nil
	}))
	return leader, other
}

// awaitSuccessor waits until that one of two proxies leads; the other one was killed.
func awaitSuccessor(t *testing.T, proxies [2]*Pointsman, p *Pointsman) {
	t.Helper()
	if next, _ := leaderOf(t, proxies); next != p {
		t.Fatalf("%s leads, though it was killed", next.Name)
	}
}

// pass lets time pass outside of this process: for a fault that comes at some moment.
func pass(d time.Duration) { <-time.After(d) }

// ended judges a switch that something happened to: it is done or aborted, the topic is active, and the traffic goes on.
func (l *load) ended(rec switching.Record) {
	l.t.Helper()
	st := openMap(l.t, l.c.proxies[0])
	to := map[string]*Cluster{"a": rig.A, "b": rig.B}[rec.To]
	switch rec.State {
	case switching.StateDone:
		wantActive(l.t, st, rec.Topic, rec.To)
		l.at = to
	case switching.StateAborted:
		wantActive(l.t, st, rec.Topic, rec.From)
	default:
		l.t.Errorf("the switch ended as %s: %s; want it done or aborted\n%s", rec.State, rec.Note, steps(rec))
	}
	if rec.Receipt != nil && rec.Receipt.HoldMillis > 0 {
		l.holds = append(l.holds, rec.Receipt.HoldMillis)
		l.expect(rec)
	}
	l.flow("after a switch with a fault")
	if rec.State == switching.StateDone && rec.Receipt != nil {
		l.nothingNewOn(rec)
	}
}

// A leader is killed at some moment of a switch, and started again: the switch always ends done or aborted, the topic is never fenced for ever, the application sees no
// error, and nothing is lost.
func TestKillingTheLeaderInTheMiddleOfASwitch(t *testing.T) {
	for _, client := range someClients(Go) {
		t.Run(string(client), func(t *testing.T) {
			proxies := faultyPair(t, "kill-"+string(client))
			l := startLoad(t, loadConfig{
				scenario: "the leading proxy is killed in mid-switch", class: classFaults, client: client, topic: newTopic("acme/geo", "kill"), rate: 300, reader: true, proxies: proxies,
				subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
			})
			st := openMap(t, proxies[0])
			outcomes := map[switching.State]int{}
			for round := range often(2, 3) {
				leader, _ := leaderOf(t, proxies)
				l.began = append(l.began, nowMillis())
				rec := request(t, st, l.c.topic, l.other())
				// From the second round on within the time that the topic is prepared or fenced, which is short.
				if round > 0 {
					rec = awaitRecord(t, st, rec, 30*time.Second, "to be prepared", func(r switching.Record) bool { return r.State != switching.StateRequested })
				}
				after := time.Duration(rand.Int64N(300)) * time.Millisecond
				pass(after)
				at, err := st.Switch(limited(t, 10*time.Second), rec.ID)
				must(t, err)
				leader.Proc.Signal(syscall.SIGKILL)
				must(t, leader.Proc.WaitEnd(10*time.Second))
				must(t, leader.Start(limited(t, 40*time.Second)))
				began := time.Now()
				rec = awaitSwitch(t, st, rec)
				outcomes[rec.State]++
				t.Logf("round %d: %s killed %v after the request was seen, at %s; ended as %s %.1f s later: %s %s", round, leader.Name, after, at.State, rec.State, time.Since(began).Seconds(), rec.Note, holdSteps(rec))
				l.ended(rec)
			}
			t.Logf("outcomes: %v", outcomes)
			l.end(false)
		})
	}
}

// SW-05: a proxy that does not lead is frozen for 15 s, before a switch or in the middle of it. The switch waits for it or gives up naming it; when the proxy goes on, with
// thousands of messages in its buffers, none of them comes to the old cluster after the flip.
func TestAFrozenProxyWritesNothingToTheOldCluster(t *testing.T) {
	const frozen = 15 * time.Second // longer than a session
	proxies := faultyPair(t, "freeze")
	for _, moment := range []string{"before", "prepared", "fenced"}[:often(1, 3)] {
		t.Run(moment, func(t *testing.T) {
			leader, other := leaderOf(t, proxies)
			l := startLoad(t, loadConfig{
				scenario: "a proxy is frozen for 15 s", class: classFaults, client: Go, topic: newTopic("acme/geo", "freeze"), rate: 300, reader: true, proxies: [2]*Pointsman{other, leader},
				subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
			})
			st := openMap(t, leader)
			freeze := func() time.Time { other.Proc.Signal(syscall.SIGSTOP); return time.Now() }
			var since time.Time
			if moment == "before" {
				since = freeze()
			}
			l.began = append(l.began, nowMillis())
			rec := request(t, st, l.c.topic, rig.B)
			if moment != "before" {
				rec = awaitRecord(t, st, rec, 30*time.Second, "to be "+moment, func(r switching.Record) bool {
					return r.State == switching.State(moment) || r.State == switching.StateFenced || r.State == switching.StateEvicting || r.State.Over()
				})
				since = freeze()
				t.Logf("frozen when the switch was %s", rec.State)
			}
			pass(frozen - time.Since(since))
			during, err := st.Switch(limited(t, 10*time.Second), rec.ID)
			must(t, err)
			t.Logf("after %v of it the switch is %s: %s", frozen, during.State, during.Note)
			if moment == "before" && during.State != switching.StatePrepared && during.State != switching.StateAborted {
				t.Errorf("with %s frozen from before the switch it came to %s, want it to wait or to be aborted", other.Name, during.State)
			}
			other.Proc.Signal(syscall.SIGCONT)
			rec = awaitSwitch(t, st, rec)
			t.Logf("ended as %s: %s %s", rec.State, rec.Note, holdSteps(rec))
			if rec.State == switching.StateAborted && !strings.Contains(rec.Note, other.Name) {
				t.Errorf("the reason %q does not name %s", rec.Note, other.Name)
			}
			l.ended(rec)
			l.thereAndBack(1)
			l.end(false)
		})
	}
}

// P8: a switch waits for a proxy that has promised max_map_age only until that and the margin have passed, though it is frozen and not dead. When it goes on, it takes
// no publish for the old cluster, and its client comes to the new one.
func TestASwitchWaitsForAFrozenProxyNoLongerThanItsMapAge(t *testing.T) {
	if !full {
		t.Skip("it waits two minutes: E2E_FULL=1")
	}
	const age = 30 * time.Second
	proxies := pairOf(t, "age", strings.Replace(rig.PointsmanConfig("age-"+runID, ""), "session_timeout: 10s", "session_timeout: 10s, max_map_age: "+age.String(), 1))
	leader, other := leaderOf(t, proxies)
	l := startLoad(t, loadConfig{
		scenario: "a proxy with max_map_age is frozen for longer", class: classFaults, client: Go, topic: newTopic("acme/geo", "age"), rate: 100, proxies: [2]*Pointsman{leader, leader},
		subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
	})
	l.dropForeign = true
	awaitRouteOn(t, other, l.c.topic, "a")
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: other.URL, Logger: pulsarlog.DefaultNopLogger()})
	must(t, err)
	defer client.Close()
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: l.c.topic, Name: "behind-the-frozen-" + runID, SendTimeout: 2 * time.Minute})
	must(t, err)
	send := func() {
		t.Helper()
		_, err := producer.Send(limited(t, 2*time.Minute), &pulsar.ProducerMessage{Payload: []byte("not a number")})
		must(t, err)
	}
	send()
	st := openMap(t, leader)
	other.Proc.Signal(syscall.SIGSTOP)
	since := time.Now()
	rec := awaitSwitch(t, st, request(t, st, l.c.topic, rig.B))
	wantAborted(t, st, rec, other.Name, "by its max_map_age")
	unseen := 10*time.Second + age + switching.AgeMargin(age) // its session has to end first
	pass(time.Until(since.Add(unseen - switching.PrepareLimit/2)))
	l.began = append(l.began, nowMillis())
	rec = awaitSwitch(t, st, request(t, st, l.c.topic, rig.B))
	if rec.State != switching.StateDone || !rec.Receipt.Evicted || !strings.Contains(rec.Note, other.Name+": not seen for longer than max_map_age") {
		t.Errorf("the switch ended as %s (evicted %v): %s", rec.State, rec.Receipt.Evicted, rec.Note)
	}
	t.Logf("frozen for %.0f s: ended as %s: %s %s", time.Since(since).Seconds(), rec.State, rec.Note, holdSteps(rec))
	other.Proc.Signal(syscall.SIGCONT)
	l.ended(rec)
	send()
	l.nothingNewOn(rec)
	l.end(false)
}

// The ZooKeeper of the map stops in the middle of a fence: no proxy undoes the fence by itself; when ZooKeeper is back the switch ends, and the application sees no error.
func TestAFenceOutlivesTheMapsZooKeeper(t *testing.T) {
	proxies := faultyPair(t, "fence-zk")
	namespace := replicatedNamespace(t, "fence-zk")
	topic := newTopic(namespace, "fence-zk")
	l := startLoad(t, loadConfig{
		scenario: "the map's ZooKeeper stops in a fence", class: classFaults, client: Go, topic: topic, rate: 300, reader: true, proxies: proxies,
		subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
	})
	st := openMap(t, proxies[0])
	restore := slowReplication(t, rig.A, rig.B, namespace, topic)
	l.began = append(l.began, nowMillis())
	rec := awaitRecord(t, st, request(t, st, topic, rig.B), 30*time.Second, "to be fenced", func(r switching.Record) bool { return r.State == switching.StateFenced })
	must(t, rig.StopMapZooKeeper())
	running := false
	t.Cleanup(func() {
		if !running {
			must(t, rig.StartMapZooKeeper(limited(t, 60*time.Second)))
		}
	})
	acked := l.driver.Record().Acks.Len()
	record, err := l.driver.Wait(limited(t, 4*time.Second), "receipts in a fence", func(r Record) bool { return r.Acks.Len() > acked+20 })
	if err == nil {
		t.Errorf("%d receipts in a fence without ZooKeeper, want none: only the map undoes a fence", record.Acks.Len()-acked)
	}
	for _, p := range proxies {
		if connected := metric(t, p, "pointsman_map_store_connected"); connected != 0 {
			t.Errorf("%s: store connected %v without ZooKeeper", p.Name, connected)
		}
	}
	must(t, rig.StartMapZooKeeper(limited(t, 60*time.Second)))
	running = true
	rec = awaitSwitch(t, st, rec)
	t.Logf("ended as %s: %s\n%s", rec.State, rec.Note, steps(rec))
	l.ended(rec)
	if rec.State != switching.StateAborted {
		t.Errorf("the switch ended as %s, want it aborted: replication stands still", rec.State)
	}
	restore()
	l.thereAndBack(2)
	l.end(false)
}
