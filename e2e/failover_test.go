//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
	"pointsman/core/switching"
)

// inFlight is how many messages may have been stored without a receipt when a cluster is killed: of 100 a second, on a machine that stands still for a while.
const inFlight = 400

// failoverLimit is how long the whole test may take; most of it are four starts of a cluster.
const failoverLimit = 15 * time.Minute

// SW-18: a cluster is killed under load, with messages that were not replicated. Its topic goes on at the other cluster, without a call to the dead one; when that returns
// nothing goes back, what the other one lacks is listed exactly, and drops out of the list as replication brings it. Then it does not die, but hangs. In the end it is killed
// once more, and nobody orders anything.
func TestATopicLeavesAClusterThatIsDead(t *testing.T) {
	t.Parallel()
	ctx := limited(t, failoverLimit)
	names := [2]string{"dies" + runID, "lives" + runID}
	var clusters [2]*Cluster
	errs := make(chan error, len(clusters))
	for i, name := range names {
		go func() {
			var err error
			clusters[i], err = rig.StartLone(ctx, name, newVersion, "statsUpdateFrequencyInSecs=5", "statsUpdateInitialDelayInSecs=5") // from which the leader learns the backlog; it is a minute
			errs <- err
		}()
	}
	err := errors.Join(<-errs, <-errs)
	t.Cleanup(func() {
		for _, c := range clusters {
			if c != nil {
				_ = rig.StopLone(c)
			}
		}
	})
	must(t, err)
	a, b := clusters[0], clusters[1]
	tenant := "failover" + runID
	must(t, rig.Introduce(ctx, tenant, a, b))
	proxies := pairOf(t, "failover", failoverConfig("failover-"+runID, a, b, ""))
	leader := proxies[0]
	all := []victim{startVictim(t, Go, proxies[1], tenant+"/geo")}
	for _, client := range artifacts.Clients {
		if full && client != Go {
			all = append(all, startVictim(t, client, proxies[1], tenant+"/geo"))
		}
	}
	for _, v := range all {
		awaitTopic(t, b, v.topic)
	}
	topic, live := all[0].topic, all[0].driver
	restore := slowReplication(t, a, b, tenant+"/geo", topic)

	startOf := func(topic string) []string {
		return []string{"switch", "start", "--mode", "failover", "--topic", topic, "--to", b.Name}
	}
	start := startOf(topic)
	var refused *CLIError
	if err := leader.CLI(ctx, nil, start...); !errors.As(err, &refused) || !strings.Contains(refused.Output, "cluster_up") || !strings.Contains(refused.Output, "--mode planned") {
		t.Errorf("a failover of a cluster that lives: %v; want a refusal that names --mode planned", err)
	}
	var plan struct {
		Failover struct {
			Facts switching.FailoverFacts `json:"facts"`
		} `json:"failover"`
		NotPromised []string `json:"not_promised"`
	}
	for _, v := range slices.Backward(all) {
		must(t, WaitThrough(ctx, "the leader to have seen what is not replicated", func() (bool, error) {
			err := leader.CLI(ctx, &plan, append(startOf(v.topic), "--dry-run", "--force")...)
			return plan.Failover.Facts.Backlog > 0, err
		}))
	}
	if f := plan.Failover.Facts; f.Subscriptions == 0 || f.Measured.IsZero() || len(plan.NotPromised) == 0 {
		t.Errorf("the plan: %+v, not promised %q", f, plan.NotPromised)
	}

	must(t, rig.KillLone(a))
	killed, silent := time.Now(), nowMillis()
	awaitProposals(t, leader, 1)
	proposed := time.Since(killed)
	if e, ok, err := openMap(t, leader).Entry(ctx, topic); err != nil || ok && e.Cluster != a.Name {
		t.Errorf("a proposal has moved the topic: %+v, %v", e, err)
	}
	began := time.Now()
	var order struct {
		ID    string `json:"id"`
		State string `json:"state"`
	}
	must(t, leader.CLI(limited(t, 30*time.Second), &order, start...))
	if order.State != "done" {
		t.Fatalf("the failover ended as %q", order.State)
	}
	moved := time.Since(began)
	flipped := nowMillis()
	orders := []string{order.ID}
	for _, v := range all[1:] {
		must(t, leader.CLI(limited(t, 30*time.Second), &order, startOf(v.topic)...))
		if order.State != "done" {
			t.Fatalf("the failover of the %s client's topic ended as %q", v.driver.Client, order.State)
		}
		orders = append(orders, order.ID)
	}
	await(t, live, "receipts of the other cluster", func(r Record) bool {
		n := 0
		for ack := range r.Acks.All() {
			if ack.T > flipped {
				n++
			}
		}
		return n >= 400
	})
	t.Logf("proposed %.1f s after the kill, moved in %.2f s", proposed.Seconds(), moved.Seconds())

	must(t, rig.RunLone(ctx, a))
	awaitProposals(t, leader, 0)
	wantCluster(t, leader, topic, b)

	// Replication goes on meanwhile, at one message a second: what is missing lies between what was so before and what is afterwards. What had no receipt was sent again to b, so
	// that it is there by its number although its entry is not: at most what was in flight at the kill.
	before := missingOn(t, topic, a, b)
	var found switching.Salvage
	must(t, leader.CLI(ctx, &found, "switch", "salvage", orders[0], "--limit", "10000"))
	after := missingOn(t, topic, a, b)
	if n := int(found.Missing); n < len(after) || n > len(before)+inFlight || len(after) == 0 || found.Listed != n || len(found.Topics) != 1 {
		t.Errorf("salvage lists %d of %d messages in %d topics; %d were missing before and %d afterwards", found.Listed, found.Missing, len(found.Topics), len(before), len(after))
	}
	t.Logf("salvage: %d messages, replication %s", found.Missing, found.Topics[0].Replication)
	restore()
	for _, v := range all[1:] {
		must(t, a.Unload(ctx, v.topic)) // as restore may have done with the first one: a replicator that was slowed down may stand still for minutes
	}
	for _, id := range orders {
		must(t, WaitThrough(limited(t, 2*time.Minute), "the list of what is missing to be empty", func() (bool, error) {
			err := leader.CLI(ctx, &found, "switch", "salvage", id)
			return found.Missing == 0, err
		}))
	}
	wantCluster(t, leader, topic, b)
	for _, v := range all {
		v.end(t, b, "cluster killed with messages not replicated; it returns, replication brings them", silent)
	}
	byItself(t, a, b, tenant+"/geo")
	awaitProposals(t, leader, 0)
	hangs(t, proxies, a, b, tenant+"/geo") // last: a broker that has hung takes its own bookie for faulty, and makes no new ledger for half an hour
}

// failoverConfig is for proxies that soon find cluster a dead, and know that its topics go to b; more is what else they do.
func failoverConfig(chroot string, a, b *Cluster, more string) string {
	return strings.Replace(rig.ConfigOf(chroot, a, b), "  "+a.Name+":\n", fmt.Sprintf("  %s:\n    failover: { to: %s, after: 3s%s }\n", a.Name, b.Name, more), 1) +
		"health: { interval: 1s, timeout: 2s, failures: 3, over: 3s, sample_interval: 5s }\n"
}

// victim is traffic on a topic whose cluster dies.
type victim struct {
	topic  string
	driver *Driver
}

func startVictim(t *testing.T, client Client, p *Pointsman, namespace string) victim {
	t.Helper()
	v := victim{topic: newTopic(namespace, "dies-"+string(client))}
	v.driver = startDriver(t, client, "live", "--url", p.URL, "--topics", v.topic, "--rates", "100", "--batch", "false", "--subs", "shared:shared:individual:1")
	await(t, v.driver, "messages", func(r Record) bool { return r.Recvs.Len() >= 200 })
	return v
}

// end judges what became of the messages, now that nothing is missing on the new cluster: its log has all, and the application has got all, some more than once. silent is when the old cluster fell silent.
func (v victim) end(t *testing.T, b *Cluster, scenario string, silent float64) {
	t.Helper()
	must(t, v.driver.Say("stop"))
	await(t, v.driver, "the producer to stop", func(r Record) bool { return r.Stopped })
	awaitReceived(t, v.driver, catchUpLimit, func(int) bool { return true })
	must(t, v.driver.Say("quit"))
	record := finish(t, 60*time.Second, v.driver)
	stored := readUntilComplete(t, b, v.topic, record.Acks.All())
	for subscription, recvs := range map[string]iter.Seq[Message]{"shared, individual acks, 1 consumer(s)": record.Recvs.All(), "log of the new cluster in the end": stored} {
		d := Compare(record.Acks.All(), recvs)
		row := Row{Mode: "failover", Scenario: scenario, Client: string(v.driver.Client), Subscription: subscription, Gaps: []float64{LongestGap(TimesOf(record.Acks.All()), silent, nowMillis())}}
		row.take(d, len(record.Errors))
		row.OrderBreaks, row.Unordered = 0, true // what replication brings late comes late
		row.save(t)
		t.Logf("%s, %s: %v", v.driver.Client, subscription, d)
		if len(d.Lost)+len(d.Corrupt) > 0 {
			t.Errorf("%s, %s: %v; want nothing lost when the old cluster is back", v.driver.Client, subscription, d)
		}
	}
}

// hangs has cluster a stop in the middle of everything, without an end of any connection, moves a topic off it, and has it go on.
//
// SW-18: what hangs must not be waited for by anybody: not by the order, not by producers that miss receipts, not by lookups that were under way.
func hangs(t *testing.T, proxies [2]*Pointsman, a, b *Cluster, namespace string) {
	t.Helper()
	v := startVictim(t, Go, proxies[1], namespace)
	topic, live := v.topic, v.driver
	awaitTopic(t, b, topic)
	process := rig.Process("lone-" + a.Name)
	process.Signal(syscall.SIGSTOP)
	defer process.Signal(syscall.SIGCONT)
	stopped, silent := time.Now(), nowMillis()
	lookup, err := DialRaw(strings.TrimPrefix(proxies[0].URL, "pulsar://"), 3*time.Minute)
	must(t, err)
	defer lookup.Close()
	_, err = lookup.Connect(nil)
	must(t, err)
	must(t, lookup.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdLookup), LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: proto.Uint64(1)}}))
	awaitProposals(t, proxies[0], 1)
	proposed := time.Since(stopped)

	var order struct {
		ID       string             `json:"id"`
		State    string             `json:"state"`
		Switches []switching.Record `json:"switches"`
	}
	began := time.Now()
	must(t, proxies[0].CLI(limited(t, 30*time.Second), &order, "switch", "start", "--mode", "failover", "--topic", topic, "--to", b.Name))
	moved := time.Since(began)
	if order.State != "done" || len(order.Switches) != 1 {
		t.Fatalf("the failover of a cluster that hangs: %+v", order)
	}
	flipped := float64(order.Switches[0].Flipped.UnixMicro()) / 1000
	record := await(t, live, "receipts of the other cluster", func(r Record) bool { return r.Acks.Len() > 0 && r.Acks.At(r.Acks.Len()-1).T > flipped+1000 })
	hold := -1.0
	for ack := range record.Acks.All() {
		if ack.T > flipped {
			hold = ack.T - flipped
			break
		}
	}
	answer, err := lookup.Receive()
	if r := answer.GetLookupTopicResponse(); err != nil || r.GetError() != 0 || !strings.Contains(r.GetBrokerServiceUrl(), b.Name) {
		t.Errorf("a lookup of before the failover: %v, %v; want a broker of cluster %s", answer, err, b.Name)
	}
	waited := time.Since(stopped)
	process.Signal(syscall.SIGCONT)
	t.Logf("hung for %.1f s: proposed after %.1f s, moved in %.2f s, first receipt of the other cluster %.0f ms after the flip", waited.Seconds(), proposed.Seconds(), moved.Seconds(), hold)
	// About a second and half a second, on a machine with nothing else to do. Who waits for the cluster, does so for ten seconds or longer.
	if moved > 8*time.Second || hold > 8000 {
		t.Errorf("a cluster that hangs has delayed its failover: %.2f s in all, %.0f ms without a receipt after the flip", moved.Seconds(), hold)
	}

	awaitProposals(t, proxies[0], 0)
	wantCluster(t, proxies[0], topic, b)
	var found switching.Salvage
	must(t, WaitThrough(limited(t, 2*time.Minute), "replication to bring what is missing", func() (bool, error) {
		err := proxies[0].CLI(t.Context(), &found, "switch", "salvage", order.ID)
		return found.Missing == 0 && len(found.Topics) == 1, err
	}))
	v.end(t, b, "cluster stopped in mid-traffic, hanging; it goes on, replication brings what is missing", silent)
}

// byItself has cluster a killed where its failover is automatic: the leader moves what is mapped to it, once, and nothing moves back when it returns.
func byItself(t *testing.T, a, b *Cluster, namespace string) {
	t.Helper()
	ctx := limited(t, 6*time.Minute)
	proxies := pairOf(t, "automatic", failoverConfig("automatic-"+runID, a, b, ", automatic: true"))
	v := startVictim(t, Go, proxies[1], namespace)
	awaitTopic(t, b, v.topic)
	var list struct {
		Failovers []struct {
			ID        string `json:"id"`
			State     string `json:"state"`
			Automatic bool   `json:"automatic"`
		} `json:"failovers"`
	}
	must(t, rig.KillLone(a))
	killed, silent := time.Now(), nowMillis()
	must(t, WaitUntil(limited(t, 60*time.Second), "a failover that nobody has ordered to be over", func() (bool, error) {
		err := proxies[0].CLI(ctx, &list, "switch", "list")
		return len(list.Failovers) == 1 && switching.FailoverState(list.Failovers[0].State).Over(), err
	}))
	order := list.Failovers[0]
	t.Logf("moved by itself %.1f s after the kill", time.Since(killed).Seconds())
	if order.State != string(switching.FailoverDone) || !order.Automatic {
		var status any
		_ = proxies[0].CLI(ctx, &status, "switch", "status", order.ID)
		t.Fatalf("the automatic failover: %+v; %v", order, status)
	}
	wantCluster(t, proxies[0], v.topic, b)
	flipped := nowMillis()
	await(t, v.driver, "receipts of the other cluster", func(r Record) bool { return r.Acks.Len() > 0 && r.Acks.At(r.Acks.Len()-1).T > flipped+1000 })

	must(t, rig.RunLone(ctx, a))
	var found switching.Salvage
	must(t, WaitThrough(limited(t, 2*time.Minute), "replication to bring what is missing", func() (bool, error) {
		err := proxies[0].CLI(ctx, &found, "switch", "salvage", order.ID)
		return found.Missing == 0, err
	}))
	awaitProposals(t, proxies[0], 0)
	wantCluster(t, proxies[0], v.topic, b)
	if err := proxies[0].CLI(ctx, &list, "switch", "list"); err != nil || len(list.Failovers) != 1 {
		t.Errorf("the cluster is back: %+v, %v; want the one failover", list.Failovers, err)
	}
	v.end(t, b, "cluster killed, its failover automatic; it returns, replication brings what is missing", silent)
}

// awaitProposals waits until so many failovers are proposed.
func awaitProposals(t *testing.T, p *Pointsman, want int) {
	t.Helper()
	var list struct {
		Proposals []struct{ Command string } `json:"proposals"`
	}
	must(t, WaitUntil(limited(t, 60*time.Second), fmt.Sprintf("%d proposals", want), func() (bool, error) {
		err := p.CLI(t.Context(), &list, "switch", "list")
		return len(list.Proposals) == want, err
	}))
}

// wantCluster checks where the map has a topic.
func wantCluster(t *testing.T, p *Pointsman, topic string, c *Cluster) {
	t.Helper()
	var e explanation
	must(t, p.CLI(limited(t, 20*time.Second), &e, "explain", topic))
	if e.Cluster != c.Name {
		t.Errorf("the topic is on cluster %s, want %s", e.Cluster, c.Name)
	}
}

// numbersOn reads the numbers of a topic past the proxies.
func numbersOn(t *testing.T, topic string, c *Cluster) map[int64]bool {
	t.Helper()
	found := map[int64]bool{}
	read := runDriver(t, 60*time.Second, Go, "reader", "--url", c.URL(), "--topic", topic, "--to-end", "true")
	for m := range read.Recvs.All() {
		found[m.N] = true
	}
	return found
}

// missingOn are the numbers that cluster a has of a topic and b has not.
func missingOn(t *testing.T, topic string, a, b *Cluster) (missing []int64) {
	t.Helper()
	here := numbersOn(t, topic, a) // first: what is new on b is replicated to a
	there := numbersOn(t, topic, b)
	for n := range here {
		if !there[n] {
			missing = append(missing, n)
		}
	}
	slices.Sort(missing)
	return missing
}
