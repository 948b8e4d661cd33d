//go:build e2e

package e2e

import (
	"fmt"
	"iter"
	"strconv"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
)

const (
	switches       = 20    // per client
	unloads        = 5     // per client, in the baseline without a proxy
	liveRate       = 1_000 // messages per second on the topic that moves
	neighbourRate  = 20    // on each topic that stays
	betweenMoves   = 500   // receipts between two moves
	catchUpLimit   = 60 * time.Second
	endOfRun       = time.Minute // for what comes after the last move, besides reading two logs
	judged         = 40_000      // messages per second that are read from both logs and compared, on a busy machine
	neighbourPause = 15_000      // ms; that connections stay is proved by the brokers' stats: this finds a neighbour that stood still, and not a busy machine
)

// A live switch at 1,000 messages per second, there and back 20 times, said to either proxy in turn: every acknowledged
// number is read on b and on a, the application sees no error, neighbours keep their connections (LK-02, SW-12).
func TestLiveSwitch(t *testing.T) {
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			proxies := pair(t)
			topic := newTopic("acme/geo", "live-"+string(client))
			neighbourA, neighbourB := newTopic("acme/plain", "neighbour-a"), newTopic("acme/plain", "neighbour-b")
			for name, cluster := range map[string]*Cluster{topic: rig.A, neighbourA: rig.A, neighbourB: rig.B} {
				setRoute(t, proxies[0], name, cluster.Name)
				awaitRoute(t, name, cluster.Name)
			}
			live := startLive(t, client, proxies[0].URL, liveRate, nil, topic, sameOwner(t, rig.A, topic, neighbourA, proxies[0]), sameOwner(t, rig.B, topic, neighbourB, proxies[0]))
			var evicted, unresolved int
			gaps := live.moves(t, switches, func(round int) {
				to := [2]*Cluster{rig.A, rig.B}[round%2]
				status := switchTopic(t, proxies[round%2], topic, to.Name)
				for _, s := range status.Switches {
					evicted, unresolved = evicted+s.Producers+s.Consumers, unresolved+s.Unresolved
				}
				if len(status.NotPromised) == 0 {
					t.Errorf("switch %s does not say what immediate mode leaves unpromised", status.ID)
				}
				awaitClients(t, topic, to)
			})
			record := live.end(t, t.Errorf)
			t.Logf("%s: %d switches: gap p50 %.0f ms, max %.0f ms; %d handles evicted, %d sends without receipt at the eviction",
				client, switches, Percentile(gaps, 0.5), Percentile(gaps, 1), evicted, unresolved)
			if evicted < 2*switches {
				t.Errorf("%d handles evicted in %d switches, want a producer and a consumer in each", evicted, switches)
			}
			acks, recvs := record.Of(0)
			judge := func(subscription string, recvs iter.Seq[Message]) {
				d := Compare(acks, recvs)
				row := Row{Mode: string(switching.ModeImmediate), Scenario: "with neighbours, two-way replication", Client: string(client), Subscription: subscription, Gaps: gaps}
				row.take(d, len(record.Errors))
				row.save(t)
				t.Logf("%s: %s: %v", client, subscription, d)
				if row.Lost != 0 {
					t.Errorf("%s: %v; want every acknowledged number", subscription, d)
				}
			}
			judge("shared, individual acks, 1 consumer(s)", recvs)
			for _, c := range []*Cluster{rig.B, rig.A} {
				judge("log of cluster "+c.Name+" in the end", readUntilComplete(t, c, topic, acks))
			}
		})
	}
}

// The same with clients that talk to the brokers directly and a topic that is unloaded from its broker: what a client
// does without any proxy when its topic moves within one cluster. It is the number to compare the gaps above with.
func TestLiveUnloadWithoutAProxy(t *testing.T) {
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			topic := newTopic("acme/plain", "unload-"+string(client))
			neighbour := sameOwner(t, rig.A, topic, newTopic("acme/plain", "unload-neighbour"), nil)
			live := startLive(t, client, rig.A.URL(), liveRate, nil, topic, neighbour)
			gaps := live.moves(t, unloads, func(int) { must(t, rig.A.Unload(limited(t, 30*time.Second), topic)) })
			// C++ (Python) closes a broker's connection when one topic of it is not ready: neighbours do suffer there.
			record := live.end(t, t.Logf)
			acks, recvs := record.Of(0)
			d := Compare(acks, recvs)
			t.Logf("%s: %d unloads: gap p50 %.0f ms, max %.0f ms; %v", client, unloads, Percentile(gaps, 0.5), Percentile(gaps, 1), d)
			if len(d.Lost) != 0 || len(d.Corrupt) != 0 {
				t.Errorf("live consumer: %v; want nothing lost", d)
			}
		})
	}
}

// sameOwner returns a topic, neighbour or one named like it, that the same broker of c owns as topic, so that a client
// reaches both by one connection. Where p is not nil the neighbour is mapped to c.
func sameOwner(t *testing.T, c *Cluster, topic, neighbour string, p *Pointsman) string {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	owner, err := c.Owner(ctx, topic)
	must(t, err)
	for i := range 100 {
		candidate := fmt.Sprintf("%s-%d", neighbour, i)
		if i%2 == 1 { // a broker may own no bundle of one namespace, but one of the topic's own
			_, name, _ := strings.Cut(candidate, namespaceOf(candidate)+"/")
			candidate = "persistent://" + namespaceOf(topic) + "/" + name
		}
		its, err := c.Owner(ctx, candidate)
		must(t, err)
		if its == owner {
			if p != nil {
				setRoute(t, p, candidate, c.Name)
				awaitRoute(t, candidate, c.Name)
			}
			return candidate
		}
	}
	t.Fatalf("none of 100 topics like %s is owned by %s on cluster %s; are the bundles spread?", neighbour, owner, c.Name)
	return ""
}

// liveRun is a live driver on a topic that moves and on neighbours that do not.
type liveRun struct {
	driver     *Driver
	topic      string
	neighbours []string // the first lives on a, the second on b
	before     []string // their connections, as their brokers see them
	sockets    int
}

func startLive(t *testing.T, client Client, url string, rate int, flags []string, topic string, neighbours ...string) *liveRun {
	t.Helper()
	rates := fmt.Sprint(rate) + strings.Repeat(fmt.Sprintf(",%d", neighbourRate), len(neighbours))
	l := &liveRun{topic: topic, neighbours: neighbours}
	l.driver = startDriver(t, client, "live", append([]string{"--url", url, "--topics", strings.Join(append([]string{topic}, neighbours...), ","),
		"--rates", rates, "--type", "shared", "--replicated", strconv.FormatBool(client.Replicates())}, flags...)...)
	awaitEach(t, l.driver, 1+len(neighbours), 1) // a producer that comes later would be a connection that has changed
	await(t, l.driver, "the first messages", func(r Record) bool { return r.Recvs.Len() >= 2*betweenMoves })
	l.before = l.connections(t)
	l.sockets = sockets(t, l.driver.proc)
	return l
}

func (l *liveRun) connections(t *testing.T) []string {
	t.Helper()
	var all []string
	for i, neighbour := range l.neighbours {
		stats, err := [2]*Cluster{rig.A, rig.B}[i].Stats(limited(t, 30*time.Second), neighbour)
		must(t, err)
		all = append(all, connections(stats))
	}
	return all
}

// moves calls move rounds times, counted from 1, with a stretch of undisturbed traffic after each, and returns the
// longest gap between receipts of each round in ms.
func (l *liveRun) moves(t *testing.T, rounds int, move func(round int)) []float64 {
	t.Helper()
	type window struct{ from, to float64 }
	var windows []window
	enough := func() bool { // a long run by hand ends in time to be judged
		deadline, limited := t.Deadline()
		reading := time.Duration(l.driver.Record().Acks.Len()/judged) * time.Second
		return limited && byHand(0) > 0 && time.Until(deadline) < endOfRun+reading
	}
	for round := 1; round <= rounds && !t.Failed() && !enough(); round++ {
		from := nowMillis()
		move(round)
		acked := l.driver.Record().Acks.Len()
		record := await(t, l.driver, fmt.Sprintf("receipts after move %d", round), func(r Record) bool { return r.Acks.Len() >= acked+betweenMoves })
		noErrors(t, l.driver, record)
		windows = append(windows, window{from, nowMillis()})
	}
	acks, _ := l.driver.Record().Of(0)
	times := TimesOf(acks)
	var gaps []float64
	for _, w := range windows {
		gaps = append(gaps, LongestGap(times, w.from, w.to))
	}
	return gaps
}

// end stops the driver once it has received what was acknowledged, and returns all it said. It reports on the neighbours:
// by complain when one of them was interrupted.
func (l *liveRun) end(t *testing.T, complain func(format string, args ...any)) Record {
	t.Helper()
	if after := l.connections(t); strings.Join(after, "\n") != strings.Join(l.before, "\n") {
		complain("the neighbours' connections changed:\n before %v\n after  %v", l.before, after)
	}
	must(t, l.driver.Say("stop"))
	await(t, l.driver, "the producers to stop", func(r Record) bool { return r.Stopped })
	socketsAfter := sockets(t, l.driver.proc)
	awaitReceived(t, l.driver, catchUpLimit, func(int) bool { return true })
	must(t, l.driver.Say("quit"))
	record := finish(t, 30*time.Second, l.driver)
	for k := range l.neighbours {
		acks, recvs := record.Of(k + 1)
		if d := Compare(acks, recvs); len(d.Lost)+len(d.Corrupt)+len(d.Unexpected)+d.Duplicates+d.OrderBreaks != 0 {
			complain("neighbour %s: %v; want each message once, intact and in order", l.neighbours[k], d)
		}
		times := TimesOf(acks)
		gap := LongestGap(times, 0, nowMillis())
		t.Logf("neighbour %d: longest gap %.0f ms over %d messages at %d/s; client sockets %d before, %d after",
			k+1, gap, len(times), neighbourRate, l.sockets, socketsAfter)
		if gap > neighbourPause {
			complain("neighbour %s paused for %.0f ms", l.neighbours[k], gap)
		}
	}
	return record
}

// awaitClients waits until the producer of a topic is on c and neither producer nor consumer is left on the other cluster.
func awaitClients(t *testing.T, topic string, c *Cluster) {
	t.Helper()
	ctx := limited(t, awaitLimit)
	other := rig.A
	if c == rig.A {
		other = rig.B
	}
	must(t, WaitThrough(ctx, "the clients of "+topic+" to be on cluster "+c.Name, func() (bool, error) {
		here, err := c.Stats(ctx, topic)
		if err != nil {
			return false, err // not loaded there yet; on the other one, perhaps just unloaded
		}
		there, err := other.Stats(ctx, topic)
		if err != nil {
			return false, err
		}
		at, left := connections(here), connections(there)
		return strings.Contains(at, "producer") && strings.Contains(at, "consumer") && left == "", nil
	}))
}

// readUntilComplete reads a replicated topic directly from its first message until each acknowledged number has come, or
// nothing comes any more.
func readUntilComplete(t *testing.T, c *Cluster, topic string, acks iter.Seq[Message]) iter.Seq[Message] {
	t.Helper()
	var open Awaited[string]
	wanted := 0
	for m := range acks {
		open.Want(c.Name, m.N)
		wanted++
	}
	reader := startDriver(t, Go, "reader", "--url", c.URL(), "--topic", topic, "--count", "1000000000", "--idle", "60000")
	received := 0
	record, err := reader.Wait(limited(t, catchUpLimit+time.Duration(wanted/20)*time.Millisecond), "a reader to see every acknowledged number", func(r Record) bool {
		for ; received < r.Recvs.Len(); received++ {
			open.Came(c.Name, r.Recvs.At(received).N)
		}
		return len(open.Missing()) == 0 || r.Done
	})
	if err != nil {
		t.Error(err)
	}
	noErrors(t, reader, record)
	return record.Recvs.All()
}

func nowMillis() float64 { return float64(time.Now().UnixMicro()) / 1000 }
