//go:build e2e

package e2e

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// replicated makes a namespace of its own on both clusters, replicated both ways, so that a test may spoil its replication.
func replicatedNamespace(t *testing.T, name string) string {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	name = "acme/" + name + "-" + runID
	for _, c := range []*Cluster{rig.A, rig.B} {
		must(t, c.Admin(ctx, http.MethodPut, "/admin/v2/namespaces/"+name, map[string]any{
			"replication_clusters": []string{"a", "b"}, "bundles": map[string]any{"numBundles": 4}, "retention_policies": map[string]int{"retentionTimeInMinutes": 60, "retentionSizeInMB": 512},
		}, nil))
	}
	return name
}

// slowReplication has a cluster replicate a namespace to another one at one message a second, until the function it returns is called.
func slowReplication(t *testing.T, from, to *Cluster, namespace, topic string) (restore func()) {
	t.Helper()
	path := "/admin/v2/namespaces/" + namespace + "/replicatorDispatchRate"
	must(t, from.Admin(limited(t, 20*time.Second), http.MethodPost, path, map[string]any{
		"dispatchThrottlingRateInMsg": 1, "dispatchThrottlingRateInByte": -1, "relativeToPublishRate": false, "ratePeriodInSecond": 1,
	}, nil))
	must(t, WaitThrough(limited(t, awaitLimit), "replication to fall behind", func() (bool, error) {
		stats, err := from.Stats(t.Context(), topic)
		return stats.Replication[to.Name].Backlog > 200, err
	}))
	return func() {
		t.Helper()
		must(t, from.Admin(limited(t, 20*time.Second), http.MethodDelete, path, nil, nil))
		// A replicator that was slowed down may stand still for minutes. Unloading the topic makes it go on; with traffic, what has no receipt then comes twice.
		unloaded, began := false, time.Now()
		must(t, WaitThrough(limited(t, 2*time.Minute), "replication to catch up", func() (bool, error) {
			if !unloaded && time.Since(began) > 4*time.Second {
				unloaded = true
				t.Log("the replicator stands still: the topic is unloaded")
				return false, from.Unload(t.Context(), topic)
			}
			stats, err := from.Stats(t.Context(), topic)
			return stats.Replication[to.Name].Backlog < 50, err
		}))
	}
}

// wantAborted checks that a switch was aborted with a reason that has each of the words, and that the topic is active on cluster a as before.
func wantAborted(t *testing.T, st store.Store, rec switching.Record, words ...string) {
	t.Helper()
	if rec.State != switching.StateAborted {
		t.Fatalf("the switch ended as %s: %s; want it aborted\n%s", rec.State, rec.Note, steps(rec))
	}
	t.Logf("aborted, hold %.0f ms: %s", rec.Receipt.HoldMillis, rec.Note)
	for _, word := range words {
		if !strings.Contains(rec.Note, word) {
			t.Errorf("the reason %q does not name %q", rec.Note, word)
		}
	}
	wantActive(t, st, rec.Topic, "a")
}

func wantActive(t *testing.T, st store.Store, topic, cluster string) {
	t.Helper()
	if e, ok, err := st.Entry(limited(t, 20*time.Second), topic); err != nil || !ok || e.State != route.StateActive || e.Cluster != cluster {
		t.Errorf("the entry of %s is %+v, %v, %v; want it active on cluster %s", topic, e, ok, err, cluster)
	}
}

// abortLoad is traffic on a topic that stays on cluster a for a while.
func abortLoad(t *testing.T, scenario string, client Client, topic string) *load {
	t.Helper()
	return startLoad(t, loadConfig{
		scenario: scenario, class: classFaults, client: client, topic: topic, rate: 300, reader: true,
		subs: []string{"shared:shared:individual:1", "cumulative:exclusive:cumulative:1"},
	})
}

// outcome makes the row of a switch that was aborted count, and its gap.
func (l *load) aborted(rec switching.Record) {
	l.holds = append(l.holds, rec.Receipt.HoldMillis)
}

// SW-08: replication stands still: the switch gives up within the time of a fence and says how much is missing; an operator who aborts in the middle of a fence is obeyed at
// once; the application sees nothing of either but one slow publish. When replication goes on, the switch does.
func TestASwitchThatCannotDrainIsAborted(t *testing.T) {
	for _, client := range someClients(Java) {
		t.Run(string(client), func(t *testing.T) {
			proxies := pair(t)
			namespace := replicatedNamespace(t, "slow-"+string(client))
			topic := newTopic(namespace, "slow")
			l := abortLoad(t, "aborted twice (replication stands still; operator), then unloaded by hand, then done", client, topic)
			st := openMap(t, proxies[0])
			restore := slowReplication(t, rig.A, rig.B, namespace, topic)

			l.began = append(l.began, nowMillis())
			rec := awaitSwitch(t, st, request(t, st, topic, rig.B))
			wantAborted(t, st, rec, "entries are not replicated yet")
			if rec.Receipt.HoldMillis > 20_000 { // FenceLimit, and a machine that stands still for a while
				t.Errorf("the topic was fenced for %.0f ms, want about ten seconds", rec.Receipt.HoldMillis)
			}
			l.aborted(rec)
			l.flow("after the first abort")

			l.began = append(l.began, nowMillis())
			rec = request(t, st, topic, rig.B)
			rec = awaitRecord(t, st, rec, 30*time.Second, "to be fenced", func(r switching.Record) bool { return r.State == switching.StateFenced })
			wish(t, st, rec.ID, switching.WishAbort)
			asked := time.Now()
			rec = awaitSwitch(t, st, rec)
			if took := time.Since(asked); took > 8*time.Second { // the fence would have ended by itself
				t.Errorf("the operator's abort took %v", took)
			}
			wantAborted(t, st, rec, "aborted by the operator")
			l.aborted(rec)
			l.flow("after the second abort")

			restore()
			l.thereAndBack(2)
			l.end(false)
		})
	}
}

// wish writes what the operator wants into a record, against its leader's own writes.
func wish(t *testing.T, st store.Store, id string, w switching.Wish) {
	t.Helper()
	ctx := limited(t, 10*time.Second)
	must(t, WaitUntil(ctx, "a wish to be written into switch "+id, func() (bool, error) {
		rec, err := st.Switch(ctx, id)
		if err != nil {
			return false, err
		}
		rec.Rev++
		rec.Wish = w
		return st.PutSwitch(ctx, rec) == nil, nil
	}))
}

// SW-10: what cluster b lacks is found before anything is changed, and named; the topic stays where it is and its clients notice nothing.
func TestAPreflightRefusesWhatTheOtherClusterLacks(t *testing.T) {
	proxies := pair(t)
	ctx := limited(t, 60*time.Second)
	alone := "acme/alone-" + runID
	must(t, rig.A.Admin(ctx, http.MethodPut, "/admin/v2/namespaces/"+alone, map[string]any{"replication_clusters": []string{"a"}}, nil))
	parts := newTopic("acme/plain", "four-and-two")
	must(t, rig.A.CreatePartitioned(ctx, parts, 4))
	must(t, rig.B.CreatePartitioned(ctx, parts, 2))
	schema := newTopic("acme/plain", "schema")
	for c, s := range map[*Cluster]pulsar.Schema{rig.A: pulsar.NewStringSchema(nil), rig.B: pulsar.NewInt32Schema(nil)} {
		producer, err := goClient(t, c).CreateProducer(pulsar.ProducerOptions{Topic: schema, Schema: s})
		must(t, err)
		producer.Close()
	}
	for topic, words := range map[string][]string{
		newTopic(alone, "t"):                     {"namespace", alone, "does not exist"},
		parts:                                    {"partitions", "4", "2"},
		schema:                                   {"schema", "STRING", "INT32"},
		newTopic("acme/plain", "not-replicated"): {"replication"},
	} {
		setRoute(t, proxies[0], topic, "a")
		awaitRoute(t, topic, "a")
		live := startDriver(t, Go, "live", "--url", proxies[0].URL, "--topics", topic, "--rates", "100")
		await(t, live, "messages", func(r Record) bool { return r.Recvs.Len() >= 20 })
		err := proxies[1].CLI(limited(t, 30*time.Second), nil, "switch", "start", "--topic", topic, "--to", "b", "--force")
		var refused *CLIError
		if !errors.As(err, &refused) {
			t.Errorf("the switch of %s was not refused: %v", topic, err)
			continue
		}
		t.Logf("%s", refused.Output)
		for _, word := range append(words, "blocker") {
			if !strings.Contains(refused.Output, word) {
				t.Errorf("the refusal of %s does not say %q", topic, word)
			}
		}
		wantActive(t, openMap(t, proxies[0]), topic, "a")
		perfectEnd(t, live)
	}
}

// Pulsar's replication leaves out chunks that fill a message to the maximum: what it adds makes them too large for the other cluster. A subscription that would miss them
// there is found before anything is changed.
func TestAPreflightFindsWhatReplicationHasLeftOut(t *testing.T) {
	proxies := pair(t)
	topic := newTopic("acme/geo", "left-out")
	setRoute(t, proxies[0], topic, "a")
	awaitRoute(t, topic, "a")
	subscribe(t, rig.A, topic, "behind", take{kind: pulsar.Shared}).Close()
	sent := runDriver(t, 60*time.Second, Go, "produce", "--url", proxies[0].URL, "--topic", topic, "--count", "1", "--size", "12000000", "--chunk", "true")
	if sent.Acks.Len() != 1 {
		t.Fatalf("%d receipts, want one", sent.Acks.Len())
	}
	drain(t, rig.A, rig.B, []string{topic})
	err := proxies[1].CLI(limited(t, 30*time.Second), nil, "switch", "start", "--topic", topic, "--to", "b", "--force")
	var refused *CLIError
	if !errors.As(err, &refused) || !strings.Contains(refused.Output, "have no copy on cluster b") || !strings.Contains(refused.Output, "behind") {
		t.Errorf("the switch of a topic of which replication has left something out: %v; want a refusal that names the subscription", err)
	}
	wantActive(t, openMap(t, proxies[0]), topic, "a")
}

// A program that writes to cluster a past the proxies stops the switch, which names it; without it the switch is done.
func TestAWriterPastTheProxiesStopsTheSwitch(t *testing.T) {
	for _, client := range someClients(Go) {
		t.Run(string(client), func(t *testing.T) {
			proxies := pair(t)
			topic := newTopic("acme/geo", "bypass")
			l := abortLoad(t, "aborted once (a writer past the proxies), then done", client, topic)
			st := openMap(t, proxies[0])
			producer, err := goClient(t, rig.A).CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "past-the-proxies-" + runID})
			must(t, err)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				ticker := time.NewTicker(5 * time.Millisecond)
				defer ticker.Stop()
				for {
					select {
					case <-ctx.Done():
						return
					case <-ticker.C:
						producer.SendAsync(ctx, &pulsar.ProducerMessage{Payload: []byte("not a number")}, func(pulsar.MessageID, *pulsar.ProducerMessage, error) {})
					}
				}
			}()
			l.began = append(l.began, nowMillis())
			rec := awaitSwitch(t, st, request(t, st, topic, rig.B))
			wantAborted(t, st, rec, "past-the-proxies-"+runID, "127.0.0.1:")
			l.aborted(rec)
			l.flow("after the abort")
			stop()
			<-stopped
			producer.Close()
			l.thereAndBack(2)
			l.dropForeign = true
			l.end(false)
		})
	}
}
