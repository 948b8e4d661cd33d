//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
	"pointsman/core/switching"
)

// inFlight is how many messages may have been stored without a receipt when a cluster is killed.
const inFlight = 100

// failoverLimit is how long the whole test may take; most of it are three starts of a cluster.
const failoverLimit = 5 * time.Minute

// SW-18: a cluster is killed under load, with messages that were not replicated. Its topic goes on at the other cluster, without a call to the dead one; when that returns
// nothing goes back, what the other one lacks is listed exactly, and drops out of the list as replication brings it. Then it does not die, but hangs.
func TestATopicLeavesAClusterThatIsDead(t *testing.T) {
	t.Parallel()
	ctx := limited(t, failoverLimit)
	names := [2]string{"dies" + runID, "lives" + runID}
	var clusters [2]*Cluster
	errs := make(chan error, len(clusters))
	for i, name := range names {
		go func() {
			var err error
			clusters[i], err = rig.StartLone(ctx, name, newVersion)
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
	config := strings.Replace(rig.ConfigOf("failover-"+runID, a, b), "  "+a.Name+":\n", fmt.Sprintf("  %s:\n    failover: { to: %s, after: 3s }\n", a.Name, b.Name), 1) +
		"health: { interval: 1s, timeout: 2s, failures: 3, over: 3s, sample_interval: 5s }\n"
	proxies := pairOf(t, "failover", config)
	leader := proxies[0]
	topic := newTopic(tenant+"/geo", "dies")

	live := startDriver(t, Go, "live", "--url", proxies[1].URL, "--topics", topic, "--rates", "100", "--batch", "false", "--subs", "shared:shared:individual:1")
	await(t, live, "messages", func(r Record) bool { return r.Recvs.Len() >= 200 })
	awaitTopic(t, b, topic)
	restore := slowReplication(t, a, b, tenant+"/geo", topic)

	start := []string{"switch", "start", "--mode", "failover", "--topic", topic, "--to", b.Name}
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
	must(t, WaitUntil(ctx, "the leader to have seen what is not replicated", func() (bool, error) {
		err := leader.CLI(ctx, &plan, append(start, "--dry-run", "--force")...)
		return plan.Failover.Facts.Backlog > 0, err
	}))
	if f := plan.Failover.Facts; f.Subscriptions == 0 || f.Measured.IsZero() || len(plan.NotPromised) == 0 {
		t.Errorf("the plan: %+v, not promised %q", f, plan.NotPromised)
	}

	must(t, rig.KillLone(a))
	killed := time.Now()
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
	must(t, leader.CLI(ctx, &found, "switch", "salvage", order.ID, "--limit", "10000"))
	after := missingOn(t, topic, a, b)
	if n := int(found.Missing); n < len(after) || n > len(before)+inFlight || len(after) == 0 || found.Listed != n || len(found.Topics) != 1 {
		t.Errorf("salvage lists %d of %d messages in %d topics; %d were missing before and %d afterwards", found.Listed, found.Missing, len(found.Topics), len(before), len(after))
	}
	t.Logf("salvage: %d messages, replication %s", found.Missing, found.Topics[0].Replication)
	restore()
	must(t, WaitUntil(limited(t, 60*time.Second), "the list of what is missing to be empty", func() (bool, error) {
		err := leader.CLI(ctx, &found, "switch", "salvage", order.ID)
		return found.Missing == 0, err
	}))
	wantCluster(t, leader, topic, b)
	must(t, live.Say("stop"))
	await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
	must(t, live.Say("quit"))
	record := finish(t, 60*time.Second, live)
	all := numbersOn(t, topic, b)
	var lost []int64
	for ack := range record.Acks.All() {
		if !all[ack.N] {
			lost = append(lost, ack.N)
		}
	}
	if len(lost) > 0 {
		t.Errorf("%d of %d messages with a receipt are not on cluster %s in the end: %v", len(lost), record.Acks.Len(), b.Name, lost[:min(10, len(lost))])
	}
	row := Row{Mode: "failover", Scenario: "cluster killed with messages not replicated; it returns, replication brings them", Client: string(Go), Subscription: "log of the new cluster in the end",
		Acked: record.Acks.Len(), Lost: len(lost), Unordered: true, Errors: len(record.Errors)}
	row.save(t)
	hangs(t, proxies, a, b, tenant+"/geo")
}

// hangs has cluster a stop in the middle of everything, without an end of any connection, moves a topic off it, and has it go on.
//
// SW-18: what hangs must not be waited for by anybody: not by the order, not by producers that miss receipts, not by lookups that were under way.
func hangs(t *testing.T, proxies [2]*Pointsman, a, b *Cluster, namespace string) {
	t.Helper()
	topic := newTopic(namespace, "hangs")
	live := startDriver(t, Go, "live", "--url", proxies[1].URL, "--topics", topic, "--rates", "100", "--batch", "false", "--subs", "shared:shared:individual:1")
	await(t, live, "messages", func(r Record) bool { return r.Recvs.Len() >= 100 })
	awaitTopic(t, b, topic)
	process := rig.Process("lone-" + a.Name)
	process.Signal(syscall.SIGSTOP)
	defer process.Signal(syscall.SIGCONT)
	stopped := time.Now()
	lookup, err := DialRaw(strings.TrimPrefix(proxies[0].URL, "pulsar://"), 60*time.Second)
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
	if moved > 5*time.Second || hold > 2000 { // about a second and half a second, on a machine with nothing else to do
		t.Errorf("a cluster that hangs has delayed its failover: %.2f s in all, %.0f ms without a receipt after the flip", moved.Seconds(), hold)
	}

	awaitProposals(t, proxies[0], 0)
	wantCluster(t, proxies[0], topic, b)
	must(t, live.Say("stop"))
	await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
	must(t, live.Say("quit"))
	record = finish(t, 60*time.Second, live)
	var found switching.Salvage
	must(t, WaitUntil(limited(t, 60*time.Second), "replication to bring what is missing", func() (bool, error) {
		err := proxies[0].CLI(t.Context(), &found, "switch", "salvage", order.ID)
		return found.Missing == 0 && len(found.Topics) == 1, err
	}))
	all, lost := numbersOn(t, topic, b), 0
	for ack := range record.Acks.All() {
		if !all[ack.N] {
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d messages with a receipt are not on cluster %s in the end", lost, record.Acks.Len(), b.Name)
	}
	row := Row{Mode: "failover", Scenario: "cluster stopped in mid-traffic, hanging; it goes on, replication brings what is missing", Client: string(Go), Subscription: "log of the new cluster in the end",
		Acked: record.Acks.Len(), Lost: lost, Unordered: true, Errors: len(record.Errors)}
	row.save(t)
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
