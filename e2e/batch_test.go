//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"hash/crc32"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

// awaitBatch reads the record of a batch until it is as wanted.
func awaitBatch(t *testing.T, st store.Store, id, what string, is func(switching.Batch) bool) (b switching.Batch) {
	t.Helper()
	ctx := limited(t, 3*time.Minute)
	err := WaitUntil(ctx, "batch "+id+" "+what, func() (bool, error) {
		var err error
		b, err = st.Batch(ctx, id)
		return err == nil && is(b), nil
	})
	if err != nil {
		t.Fatalf("%v; it is %s: %+v, pause %+v, note %q", err, b.State, b.Count, b.Pause, b.Note)
	}
	return b
}

// flipsTo counts how often the history has each topic of a namespace moved from one cluster to another.
func flipsTo(t *testing.T, st store.Store, namespace, from, to string) map[string]int {
	t.Helper()
	history, err := st.History(limited(t, 30*time.Second), 2000)
	must(t, err)
	flips := map[string]int{}
	for _, h := range history {
		for _, e := range h.Entries {
			if e.Before != nil && e.After != nil && e.Before.Cluster == from && e.After.Cluster == to && strings.HasPrefix(e.Topic, "persistent://"+namespace+"/") {
				flips[e.Topic]++
			}
		}
	}
	return flips
}

// wantRule checks that a namespace is one rule, and that each of its topics has moved once.
func wantRule(t *testing.T, st store.Store, namespace, from, to string, topics []string) {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	rules, err := st.Rules(ctx)
	must(t, err)
	entries, err := st.Entries(ctx)
	must(t, err)
	ruled := false
	for _, r := range rules {
		ruled = ruled || r.Scope == namespace && r.Cluster == to
	}
	if !ruled || len(entries) != 0 {
		t.Errorf("rules %+v, %d entries; want one rule that names %s", rules, len(entries), to)
	}
	flips := flipsTo(t, st, namespace, from, to)
	if want := slices.Sorted(slices.Values(topics)); !slices.Equal(slices.Sorted(maps.Keys(flips)), want) {
		t.Errorf("%d topics have moved to %s, want %d", len(flips), to, len(want))
	}
	for topic, n := range flips {
		if n != 1 {
			t.Errorf("%s has moved to %s %d times", topic, to, n)
		}
	}
}

// A namespace moves topic by topic under load, by two leaders, the first of which is killed in the middle, and ends as one rule; back again a writer past the proxies pauses it,
// and when he is gone it goes on.
func TestABatchMovesANamespaceWhoseLeaderIsKilledAndPausesAtAGate(t *testing.T) {
	proxies := faultyPair(t, "batch")
	namespace := "acme/batch-" + runID
	for _, c := range []*Cluster{rig.A, rig.B} {
		must(t, c.Admin(limited(t, 30*time.Second), http.MethodPut, "/admin/v2/namespaces/"+namespace, map[string]any{"replication_clusters": []string{"a", "b"}, "bundles": map[string]any{"numBundles": 4}}, nil))
	}
	each := often(8, 12)
	var topics []string
	drivers := map[Client]*Driver{}
	clients := []Client{Go, Java, Python}[:often(2, 3)]
	for i, client := range clients {
		var mine []string
		for range each {
			mine = append(mine, newTopic(namespace, string(client)))
		}
		topics = append(topics, mine...)
		drivers[client] = startDriver(t, client, "live", append(patient(client), "--url", proxies[i%2].URL, "--topics", strings.Join(mine, ","), "--rates", strings.TrimSuffix(strings.Repeat("5,", each), ","), "--type", "shared")...)
	}
	flow := func(when string) {
		t.Helper()
		for client, d := range drivers {
			before := d.Record()
			counts := func(r Record) map[int]int {
				n := map[int]int{}
				for e := range r.Recvs.All() {
					n[e.K]++
				}
				return n
			}
			had := counts(before)
			await(t, d, fmt.Sprintf("messages of every topic of the %s client %s", client, when), func(r Record) bool {
				now := counts(r)
				for k := range each {
					if now[k] < had[k]+3 {
						return false
					}
				}
				return true
			})
		}
	}
	flow("at the start")
	leader, other := leaderOf(t, proxies)
	st := openMap(t, other)

	var dry, started struct {
		ID    string `json:"id"`
		Total int    `json:"total"`
	}
	must(t, other.CLI(limited(t, 90*time.Second), &dry, "switch", "start", "--namespace", namespace, "--to", "b", "--dry-run", "--force"))
	if dry.Total != len(topics) || dry.ID != "" {
		t.Errorf("dry run: %+v", dry)
	}
	began := time.Now()
	must(t, other.CLI(limited(t, 60*time.Second), &started, "switch", "start", "--namespace", namespace, "--to", "b", "--force", "--pace", "2/s", "--max-hold", "0s", "--no-wait")) // for some seconds yet when its leader is killed
	awaitBatch(t, st, started.ID, "to be in its last wave", func(b switching.Batch) bool { return b.Count.Moved >= 6 })
	killed := float64(time.Now().UnixMilli())
	leader.Proc.Signal(syscall.SIGKILL)
	must(t, leader.Proc.WaitEnd(10*time.Second))
	awaitSuccessor(t, proxies, other)
	b := awaitBatch(t, st, started.ID, "to wait for the proxy that was killed", func(b switching.Batch) bool {
		return b.State.Over() || b.Pause != nil || strings.Contains(b.Note, "waits: ")
	})
	if !strings.Contains(b.Note, leader.Name) {
		t.Fatalf("without the proxy that was killed: %s, paused %+v; %s", b.State, b.Pause, b.Note)
	}
	must(t, leader.Start(limited(t, 40*time.Second)))
	b = awaitBatch(t, st, started.ID, "to end", func(b switching.Batch) bool { return b.State.Over() || b.Pause != nil })
	t.Logf("%d topics in %.1f s, a leader killed after the sixth: %s, hold p50 %.0f ms, p99 %.0f ms, rule of epoch %d for %d entries, ended by %s; %s", b.Count.Moved, time.Since(began).Seconds(), b.State, b.HoldP50, b.HoldP99, b.Rule, b.Removed, b.Runner, b.Note)
	if b.State != switching.BatchDone && (b.State != switching.BatchIncomplete || b.Count.Troubled == 0) || b.Count.Moved != len(topics) || b.Pause != nil || b.Rule == 0 || b.Runner != other.Name {
		t.Fatalf("%s by %s, paused %+v: %+v; %s", b.State, b.Runner, b.Pause, b.Count, b.Note)
	}
	wantRule(t, st, namespace, "a", "b", topics)
	flow("after the move")

	// Back again, with somebody who writes past the proxies to one of them.
	writer := startDriver(t, Go, "live", "--url", rig.B.URL(), "--topic", topics[0], "--topics", topics[0], "--rates", "20", "--size", strconv.Itoa(pastSize), "--sub", "past-the-proxies", "--type", "shared")
	await(t, writer, "the writer past the proxies", func(r Record) bool { return r.Acks.Len() > 5 })
	var back struct {
		ID string `json:"id"`
	}
	must(t, other.CLI(limited(t, 60*time.Second), &back, "switch", "reverse", started.ID, "--force", "--no-wait"))
	b = awaitBatch(t, st, back.ID, "to pause", func(b switching.Batch) bool { return b.Pause != nil || b.State.Over() })
	if b.Pause == nil || b.Pause.Gate != switching.GateFailed {
		// By the order of the names its topic may be among the last, where one failure of many is no reason to pause; then it ends incomplete.
		if b.State != switching.BatchIncomplete || b.Count.Failed != 1 {
			t.Fatalf("%s, paused %+v: %+v", b.State, b.Pause, b.Count)
		}
	}
	t.Logf("back: %s, %+v, paused %+v", b.State, b.Count, b.Pause)
	must(t, writer.Say("quit"))
	_, err := writer.WaitDone(limited(t, 30*time.Second))
	must(t, err)
	must(t, other.CLI(limited(t, 60*time.Second), nil, "switch", "resume", back.ID, "--force", "--no-wait"))
	b = awaitBatch(t, st, back.ID, "to end after its resume", func(b switching.Batch) bool { return b.State.Over() || b.Pause != nil })
	if b.State != switching.BatchDone || b.Count.Moved != len(topics) {
		t.Fatalf("%s, paused %+v: %+v; %s", b.State, b.Pause, b.Count, b.Note)
	}
	wantRule(t, st, namespace, "b", "a", topics)
	flow("after the way back")

	holds := map[string][]float64{} // by topic
	for _, id := range []string{started.ID, back.ID} {
		for _, r := range recordsOf(limited(t, 30*time.Second), t, st, id, 2*len(topics)) {
			if r.State == switching.StateDone && r.Receipt != nil {
				holds[r.Topic] = append(holds[r.Topic], r.Receipt.HoldMillis)
			}
		}
	}
	for client, d := range drivers {
		must(t, d.Say("stop"))
		await(t, d, "the producers to stop", func(r Record) bool { return r.Stopped })
		flowed, cancel := context.WithTimeout(context.Background(), catchUpLimit)
		lost := func(r Record) (n int) {
			for k := range each {
				acks, recvs := r.Of(k)
				n += len(Compare(acks, ownOf(recvs)).Lost)
			}
			return n
		}
		record, err := d.Wait(flowed, "everything to arrive", func(r Record) bool { return lost(r) == 0 })
		cancel()
		if err != nil {
			t.Errorf("%s: %d messages are lost: %v", client, lost(record), err)
		}
		must(t, d.Say("quit"))
		if len(record.Errors) > 0 {
			t.Errorf("the %s application saw %d errors, the first: %+v", client, len(record.Errors), record.Errors[0])
		}
		row := Row{Mode: "planned", Class: classBatch, Scenario: "a namespace there and back as one batch, the leader killed on the way", Client: string(client), Subscription: "shared, individual acks, 1 consumer(s)",
			Lost: lost(record), Unordered: true, Errors: len(record.Errors)}
		duplicates := 0
		for k := range each {
			acks, recvs := record.Of(k)
			d := Compare(acks, ownOf(recvs))
			duplicates += d.Duplicates
			row.Acked += d.Acked
			row.Holds = append(row.Holds, holds[topics[slices.Index(clients, client)*each+k]]...)
		}
		row.Duplicates = duplicates
		row.save(t)
		t.Logf("%s, of proxy %s: %d receipts, %d messages, 0 lost, %d twice: %s", client, proxies[slices.Index(clients, client)%2].Name, record.Acks.Len(), record.Recvs.Len(), duplicates, repeats(record, killed))
	}
}

// pastSize is the payload of who writes past the proxies. He numbers his messages from 0 like everybody, and those who read his topic get them too.
const pastSize = 100

// ownOf are the messages that are not of who writes past the proxies.
func ownOf(recvs iter.Seq[Message]) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for m := range recvs {
			payload := append(strconv.AppendInt(nil, m.N, 10), ';')
			for i := int64(len(payload)); i < pastSize; i++ {
				payload = append(payload, byte(' '+(m.N+i)%90)) // as the drivers fill them
			}
			if m.CRC != crc32.ChecksumIEEE(payload) && !yield(m) {
				return
			}
		}
	}
}

// repeats tells of the messages that came more than once when they came first and again, in seconds after a moment.
func repeats(r Record, moment float64) string {
	type message struct {
		k int
		n int64
	}
	first := map[message]float64{}
	var came, again []float64
	topics := map[int]int{}
	for e := range ownOf(r.Recvs.All()) {
		m := message{e.K, e.N}
		if at, ok := first[m]; ok {
			came, again = append(came, (at-moment)/1000), append(again, (e.T-moment)/1000)
			topics[e.K]++
		} else {
			first[m] = e.T
		}
	}
	if len(came) == 0 {
		return "none"
	}
	return fmt.Sprintf("of %d topics; they came first at %.1f / %.1f / %.1f s after the kill (least, median, most) and again at %.1f / %.1f / %.1f s", len(topics),
		Percentile(came, 0), Percentile(came, .5), Percentile(came, 1), Percentile(again, 0), Percentile(again, .5), Percentile(again, 1))
}
