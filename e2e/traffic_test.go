//go:build e2e

package e2e

import (
	"fmt"
	"iter"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Each client produces and consumes 10,000 numbered messages on a topic of each cluster, and the topic exists nowhere
// else (LK-01).
func TestEachClientMovesTenThousandMessages(t *testing.T) {
	const count = 10_000
	for _, addr := range addresses() {
		for _, cluster := range addr.clusters {
			t.Run(addr.name+"/"+cluster.Name, func(t *testing.T) {
				for _, client := range artifacts.Clients {
					topic := newTopic("acme/plain", "ten-thousand-"+string(client))
					addr.place(t, topic, cluster)
					write, read := addr.write(t, cluster), addr.read(t, cluster)
					t.Run(string(client), func(t *testing.T) {
						t.Parallel()
						consumer := startDriver(t, client, "consume", "--url", read, "--topic", topic, "--count", strconv.Itoa(count))
						sent := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--topic", topic, "--count", strconv.Itoa(count))
						got := finish(t, 60*time.Second, consumer)
						want(t, string(client), Compare(sent.Acks.All(), got.Recvs.All()), count)
						onlyOn(t, topic, cluster, count)
					})
				}
			})
		}
	}
}

// forEach runs a scenario for each address and client, on cluster a where the address has a choice; the clients of one
// address run in parallel.
func forEach(t *testing.T, scenario func(t *testing.T, client Client, addr address, cluster *Cluster)) {
	for _, addr := range addresses() {
		cluster := addr.clusters[len(addr.clusters)-1] // b through Pointsman: the default cluster would hide a fault
		t.Run(addr.name, func(t *testing.T) {
			if addr.name == "pointsman" {
				pair(t)
			}
			for _, client := range artifacts.Clients {
				t.Run(string(client), func(t *testing.T) {
					t.Parallel()
					scenario(t, client, addr, cluster)
				})
			}
		})
	}
}

// All subscription types and a reader on one topic with keyed batches: 2 consumers each.
func TestSubscriptionTypesAndReader(t *testing.T) {
	const count, keys = 2_000, 20
	forEach(t, func(t *testing.T, client Client, addr address, cluster *Cluster) {
		topic := newTopic("acme/plain", "types-"+string(client))
		addr.place(t, topic, cluster)
		read := addr.read(t, cluster)
		consume := func(kind string) *Driver {
			return startDriver(t, client, "consume", "--url", read, "--topic", topic, "--sub", kind, "--type", kind,
				"--consumers", "2", "--count", strconv.Itoa(count), "--linger", "1000")
		}
		exclusive, shared, failover, keyShared := consume("exclusive"), consume("shared"), consume("failover"), consume("key_shared")
		awaitReady(t, exclusive, 1)
		for _, d := range []*Driver{shared, failover, keyShared} {
			awaitReady(t, d, 2)
		}
		reader := startDriver(t, client, "reader", "--url", read, "--topic", topic, "--count", strconv.Itoa(count))
		sent := runDriver(t, 60*time.Second, client, "produce", "--url", addr.write(t, cluster), "--topic", topic,
			"--count", strconv.Itoa(count), "--keys", strconv.Itoa(keys))

		want(t, "reader", sorted(Compare(sent.Acks.All(), finish(t, 60*time.Second, reader).Recvs.All())), count)

		got, err := exclusive.WaitDone(limited(t, 60*time.Second))
		must(t, err)
		want(t, "exclusive", sorted(Compare(sent.Acks.All(), got.Recvs.All())), count)
		if client == Rust { // it tries again until the first one has gone
			noErrors(t, exclusive, got)
		} else if len(got.Errors) != 1 || !strings.Contains(got.Errors[0].Text, "ConsumerBusy") {
			t.Errorf("the second exclusive consumer saw %v, want exactly one ConsumerBusy", got.Errors)
		}

		got = finish(t, 60*time.Second, shared)
		want(t, "shared", sorted(Compare(sent.Acks.All(), got.Recvs.All())), count)
		if by := byConsumer(got.Recvs.All()); len(by) != 2 {
			t.Errorf("shared: messages by consumer %v, want some for each of 2", by)
		}

		got = finish(t, 60*time.Second, failover)
		want(t, "failover", sorted(Compare(sent.Acks.All(), got.Recvs.All())), count)
		if by := byConsumer(got.Recvs.All()); len(by) != 1 {
			t.Errorf("failover: messages by consumer %v, want all for one", by)
		}

		got = finish(t, 60*time.Second, keyShared)
		want(t, "key_shared", sorted(Compare(sent.Acks.All(), got.Recvs.All())), count)
		owner, last := map[string]int{}, map[string]int64{}
		for e := range got.Recvs.All() {
			if c, known := owner[e.Key]; known && c != e.C {
				t.Fatalf("key_shared: key %q came to consumers %d and %d, want one consumer per key", e.Key, c, e.C)
			}
			if n, known := last[e.Key]; known && n > e.N {
				t.Fatalf("key_shared: number %d of key %q came after %d, want order per key", e.N, e.Key, n)
			}
			owner[e.Key], last[e.Key] = e.C, e.N
		}
		if len(owner) != keys || len(byConsumer(got.Recvs.All())) != 2 {
			t.Errorf("key_shared: %d keys, by consumer %v, want %d keys over 2 consumers", len(owner), byConsumer(got.Recvs.All()), keys)
		}
		onlyOn(t, topic, cluster, count)
	})
}

// sorted leaves the order out of a judgement: key-based batches and two consumers have none.
func sorted(d Digest) Digest {
	d.OrderBreaks = 0
	return d
}

func byConsumer(recvs iter.Seq[Message]) map[int]int {
	by := map[int]int{}
	for e := range recvs {
		by[e.C]++
	}
	return by
}

// Synchronous sends and sends without batching.
func TestBatchingOffAndSynchronousSends(t *testing.T) {
	const count = 500
	forEach(t, func(t *testing.T, client Client, addr address, cluster *Cluster) {
		topic := newTopic("acme/plain", "unbatched-"+string(client))
		addr.place(t, topic, cluster)
		write := addr.write(t, cluster)
		consumer := startDriver(t, client, "consume", "--url", addr.read(t, cluster), "--topic", topic, "--count", strconv.Itoa(2*count))
		single := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--topic", topic, "--count", strconv.Itoa(count), "--batch", "false")
		synchronous := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--topic", topic, "--count", strconv.Itoa(count),
			"--start", strconv.Itoa(count), "--sync", "true", "--batch", "false")
		want(t, string(client), Compare(Joined(single.Acks.All(), synchronous.Acks.All()), finish(t, 60*time.Second, consumer).Recvs.All()), 2*count)
		onlyOn(t, topic, cluster, 2*count)
	})
}

// A topic with 3 partitions, and one that auto-creation makes with 4 (LK-11): every partition is used, none strays.
func TestPartitionedTopics(t *testing.T) {
	const count = 3_000
	forEach(t, func(t *testing.T, client Client, addr address, cluster *Cluster) {
		created := newTopic("acme/plain", "three-"+string(client))
		must(t, cluster.CreatePartitioned(limited(t, 30*time.Second), created, 3))
		for topic, partitions := range map[string]int{created: 3, newTopic("acme/part4", "auto-"+string(client)): 4} {
			addr.place(t, topic, cluster)
			consumer := startDriver(t, client, "consume", "--url", addr.read(t, cluster), "--topic", topic, "--type", "failover", "--count", strconv.Itoa(count))
			sent := runDriver(t, 60*time.Second, client, "produce", "--url", addr.write(t, cluster), "--topic", topic,
				"--count", strconv.Itoa(count), "--keys", "50")
			want(t, string(client), sorted(Compare(sent.Acks.All(), finish(t, 60*time.Second, consumer).Recvs.All())), count)
			onlyOn(t, topic, cluster, count)
			names, err := cluster.TopicsOf(limited(t, 30*time.Second), topic)
			must(t, err)
			if len(names) != partitions {
				t.Errorf("cluster %s has %v of %s, want %d partitions", cluster.Name, names, topic, partitions)
			}
			for _, name := range names {
				stats, err := cluster.Stats(limited(t, 30*time.Second), name)
				must(t, err)
				if stats.MsgInCounter == 0 {
					t.Errorf("%s has no message; 50 keys should reach every partition", name)
				}
			}
		}
	})
}

// ME-04: 5 MB in one frame, 12 MB in chunks, and the refusal of one message above the broker's maximum.
func TestLargeAndChunkedMessages(t *testing.T) {
	forEach(t, func(t *testing.T, client Client, addr address, cluster *Cluster) {
		topic := newTopic("acme/plain", "large-"+string(client))
		addr.place(t, topic, cluster)
		write := addr.write(t, cluster)
		count := 5
		if client == Rust { // it has no chunks
			count = 3
		}
		consumer := startDriver(t, client, "consume", "--url", addr.read(t, cluster), "--topic", topic, "--count", strconv.Itoa(count))
		acks := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--topic", topic, "--count", "3", "--size", "5000000", "--batch", "false").Acks.All()
		if count > 3 {
			chunked := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--topic", topic, "--count", "2", "--start", "3",
				"--size", "12000000", "--chunk", "true")
			acks = Joined(acks, chunked.Acks.All())
		}
		want(t, string(client), Compare(acks, finish(t, 60*time.Second, consumer).Recvs.All()), count)

		onlyOn(t, topic, cluster, -1)

		if client == Rust { // it sends what is refused again for 30 s
			return
		}
		tooLarge, err := startDriver(t, client, "produce", "--url", write, "--topic", topic, "--count", "1", "--start", "9",
			"--size", "5300000", "--batch", "false").WaitDone(limited(t, 60*time.Second))
		must(t, err)
		if tooLarge.Acks.Len() != 0 || len(tooLarge.Errors) == 0 {
			t.Errorf("5.3 MB without chunking: receipts %v, errors %v; want a refusal, the maximum is 5 MiB", tooLarge.Acks, tooLarge.Errors)
		}
	})
}

// The same client process on topics of both clusters at once, in either order of connecting (LK-01), and a move of one
// of them that leaves the other alone (LK-02).
func TestEqualBrokerNamesDoNotCrossTalk(t *testing.T) {
	for _, client := range artifacts.Clients {
		for _, first := range []string{"a", "b"} {
			t.Run(fmt.Sprintf("%s/%s-first", client, first), func(t *testing.T) {
				proxies := pair(t)
				t.Parallel()
				onA, onB, moving := newTopic("acme/plain", "on-a"), newTopic("acme/plain", "on-b"), newTopic("acme/plain", "moving")
				for topic, cluster := range map[string]string{onA: "a", onB: "b", moving: "a"} {
					setRoute(t, proxies[0], topic, cluster)
					awaitRoute(t, topic, cluster)
				}
				topics := []string{onA, onB, moving}
				if first == "b" {
					topics = []string{onB, onA, moving}
				}
				live := startDriver(t, client, "live", "--url", proxies[0].URL, "--topics", strings.Join(topics, ","), "--rates", "100,100,100")
				awaitEach(t, live, len(topics), 200)
				ctx := limited(t, 3*time.Minute)
				before, err := rig.A.Stats(ctx, onA)
				must(t, err)

				// LK-02: from here on, moving lives on b; what it wrote on a stays there (no replication in this namespace).
				switchTopic(t, proxies[1], moving, "b")
				moved := live.Record().Acks.Len()
				await(t, live, "messages after the move", func(r Record) bool { return r.Acks.Len() >= moved+600 })
				after, err := rig.A.Stats(ctx, onA)
				must(t, err)
				if got, want := connections(after), connections(before); got != want {
					t.Errorf("the neighbour's producer and consumer on a came by %s before and %s after the move", want, got)
				}
				must(t, live.Say("stop"))
				await(t, live, "producers to stop", func(r Record) bool { return r.Stopped })
				// What the moved topic had unread on a is not delivered on b: nothing replicates it here.
				awaitReceived(t, live, 30*time.Second, func(k int) bool { return topics[k] != moving })
				must(t, live.Say("quit"))
				record := finish(t, 30*time.Second, live)
				for k, topic := range topics {
					acks, recvs := record.Of(k)
					if d := Compare(acks, recvs); topic != moving {
						want(t, topic, d, d.Acked)
						onlyOn(t, topic, map[string]*Cluster{onA: rig.A, onB: rig.B}[topic], int64(d.Acked))
					} else {
						t.Logf("%s, moved: %v", topic, d)
						checkMoved(t, moving, acks)
					}
				}
			})
		}
	}
}

// checkMoved checks that a topic that moved once from a to b without replication has each acknowledged number on exactly
// the cluster of its time, and both parts together are everything.
func checkMoved(t *testing.T, topic string, acks iter.Seq[Message]) {
	t.Helper()
	parts := map[string]Log{}
	for _, c := range []*Cluster{rig.A, rig.B} {
		parts[c.Name] = readAll(t, c, topic)
		stats, err := c.Stats(limited(t, 30*time.Second), topic)
		must(t, err)
		t.Logf("%s on %s: %d messages read, %d came in", topic, c.Name, parts[c.Name].Len(), stats.MsgInCounter)
	}
	d := Compare(acks, Joined(parts["a"].All(), parts["b"].All()))
	if len(d.Lost) != 0 || len(d.Corrupt) != 0 {
		t.Errorf("%s over both clusters: %v; want nothing lost", topic, d)
	}
	if parts["a"].Len() == 0 || parts["b"].Len() == 0 {
		t.Errorf("%s has %d messages on a and %d on b; want some on both", topic, parts["a"].Len(), parts["b"].Len())
	}
}

// readAll reads a topic of a cluster directly, from its first message to its last.
func readAll(t *testing.T, c *Cluster, topic string) Log {
	t.Helper()
	stats, err := c.Stats(limited(t, 30*time.Second), topic)
	must(t, err)
	return runDriver(t, 60*time.Second, Go, "reader", "--url", c.URL(), "--topic", topic,
		"--count", strconv.FormatInt(stats.MsgInCounter, 10), "--linger", "500").Recvs
}

// connections lists by which connections, opened when, a topic's clients came to its broker; replicators left out.
func connections(s TopicStats) string {
	var all []string
	add := func(kind string, c ClientStats) {
		if !strings.HasPrefix(c.Name, "pulsar.repl.") {
			all = append(all, kind+" "+c.Address+" since "+c.ConnectedSince)
		}
	}
	for _, p := range s.Publishers {
		add("producer", p)
	}
	for _, sub := range s.Subscriptions {
		for _, c := range sub.Consumers {
			add("consumer", c)
		}
	}
	return strings.Join(all, ", ")
}
