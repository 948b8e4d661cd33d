package controller

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// answers is a cluster that answers admin calls by fixed texts, and notes what is called.
type answers struct {
	*httptest.Server
	mu    sync.Mutex
	texts map[string]string
	calls []string
}

func serveAnswers(t *testing.T, texts map[string]string) *answers {
	a := &answers{texts: texts}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		a.mu.Lock()
		defer a.mu.Unlock()
		call := r.Method + " " + r.URL.Path
		a.calls = append(a.calls, strings.TrimSpace(call+" "+string(body)))
		text, ok := a.texts[call]
		if !ok && r.Method == http.MethodGet {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = w.Write([]byte(strings.ReplaceAll(text, "SELF", strings.TrimPrefix(a.URL, "http://"))))
	}))
	t.Cleanup(a.Close)
	return a
}

// SW-18: what is seen while the cluster lives is what is known when it is dead, and what the new one lacks is made there without a call to the old one.
func TestWhatWasSeenOfAClusterMakesTheOtherOneReady(t *testing.T) {
	ctx, st := context.Background(), store.NewMemory()
	defer st.Close()
	const topic = "persistent://acme/geo/t"
	at := "/admin/v2/persistent/acme/geo/t"
	a := serveAnswers(t, map[string]string{
		"GET /admin/v2/brokers": `["SELF"]`,
		"GET /admin/v2/broker-stats/topics": `{"acme/geo":{"0x0_0x1":{"persistent":{"` + topic + `-partition-0":{"replication":{"b":{"replicationBacklog":5,"replicationDelayInSeconds":3}},
			"subscriptions":{"idle":{"consumers":[],"type":"None"},"busy":{"consumers":[{}],"type":"Shared"},"reader-1":{"consumers":[{}],"type":"Exclusive"},"__compaction":{"consumers":[]}}},
			"` + topic + `-partition-1":{"replication":{"b":{"replicationBacklog":2,"replicationDelayInSeconds":9}},"subscriptions":{}}}}},
			"acme/other":{"0x0_0x1":{"persistent":{"persistent://acme/other/elsewhere":{"replication":{},"subscriptions":{}}}}}}`,
		"GET " + at + "/partitions":        `{"partitions":3}`,
		"GET " + at + "-partition-0/stats": `{"subscriptions":{"idle":{"isDurable":true,"isReplicated":true},"busy":{"isDurable":true},"reader-1":{"isDurable":false}}}`,
	})
	b := serveAnswers(t, map[string]string{
		"GET /admin/v2/namespaces/acme/geo":        `{}`,
		"GET " + at + "/partitions":                `{"partitions":3}`,
		"GET " + at + "-partition-0/subscriptions": `["busy"]`,
		"GET " + at + "-partition-0/internalStats": `{"lastConfirmedEntry":"4:9","ledgers":[{"ledgerId":4,"entries":0}],"cursors":{}}`,
	})
	clients := map[string]*pulsaradmin.Client{}
	for name, s := range map[string]*answers{"a": a, "b": b} {
		clients[name] = pulsaradmin.New(pulsaradmin.Config{Cluster: name, WebURLs: []string{s.URL}})
		defer clients[name].Close()
	}
	rules := []route.Rule{{Scope: "acme/other", Cluster: "b", Epoch: 1}}
	table, _, err := route.Empty().With(nil, &rules)
	if err != nil {
		t.Fatal(err)
	}
	f := NewFailovers(FailoverConfig{Store: st, Clients: clients, Table: func() *route.Table { return table }, DefaultCluster: "a", Log: slog.New(slog.DiscardHandler)})
	readers := map[string]time.Time{}
	for range 2 {
		if err := f.look(ctx, "a", readers); err != nil {
			t.Fatal(err)
		}
	}
	a.mu.Lock()
	stats := 0
	for _, c := range a.calls {
		if strings.HasSuffix(c, "/stats") {
			stats++
		}
	}
	a.mu.Unlock()
	if stats != 1 { // the first partition tells of all subscriptions, and the second look knows
		t.Errorf("%d calls for single topics, want 1: %v", stats, a.calls)
	}

	a.Close() // it dies
	if err := f.look(ctx, "a", readers); err == nil {
		t.Error("a dead cluster was looked at")
	}
	w := &FailoverWork{Store: st.Join(), Clients: map[string]*pulsaradmin.Client{"b": clients["b"]}}
	seen, err := w.Seen(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	want := switching.SeenTopic{Topic: topic, Partitions: 3, Replication: map[string]switching.SeenReplication{"b": {Backlog: 7, Delay: 9}},
		Subscriptions: []switching.SeenSubscription{{Name: "busy"}, {Name: "idle", Replicated: true}}}
	if got, _, ok := seen.Topic(topic); !ok || !reflect.DeepEqual(got, want) || seen.Count != 1 {
		t.Fatalf("seen: %+v of %d topics, want %+v alone", got, seen.Count, want)
	}
	facts, err := w.Ready(ctx, topic, "a", "b", &seen, false)
	if err != nil || facts.Backlog != 7 || facts.Delay != 9 || facts.Subscriptions != 2 || facts.Missing != 1 || facts.Again != 10 || facts.Created != 0 || !slices.Equal(facts.Names, []string{topic + " idle"}) {
		t.Errorf("facts: %+v, %v", facts, err)
	}
	for _, c := range b.calls {
		if !strings.HasPrefix(c, "GET ") {
			t.Errorf("a look changes the new cluster: %s", c)
		}
	}
	if facts, err = w.Ready(ctx, topic, "a", "b", &seen, true); err != nil || facts.Created != 1 {
		t.Errorf("made: %+v, %v", facts, err)
	}
	if make := "PUT " + at + `/subscription/idle {"ledgerId":-1,"entryId":-1,"partitionIndex":-1}`; !slices.Contains(b.calls, make) {
		t.Errorf("calls: %v, want %s", b.calls, make)
	}
	// A namespace that the new cluster lacks is found before anything moves, whether the topic was seen or not.
	for _, base := range []string{topic, "persistent://acme/geo/unseen"} {
		b.texts["GET /admin/v2/namespaces/acme/geo"] = `{}`
		if facts, err = w.Ready(ctx, base, "a", "b", &seen, false); err != nil || len(facts.Problems) != 0 {
			t.Errorf("%s: %+v, %v", base, facts, err)
		}
		delete(b.texts, "GET /admin/v2/namespaces/acme/geo")
		if facts, err = w.Ready(ctx, base, "a", "b", &seen, false); err != nil || len(facts.Problems) != 1 || !strings.Contains(facts.Problems[0], "its namespace does not exist on cluster b; create it there") {
			t.Errorf("%s, without its namespace: %+v, %v", base, facts, err)
		}
	}
	b.texts["GET "+at+"/partitions"] = `{"partitions":2}`
	if facts, err = w.Ready(ctx, topic, "a", "b", &seen, true); err != nil || len(facts.Problems) != 1 || !strings.Contains(facts.Problems[0], "-p 3") {
		t.Errorf("fewer partitions: %+v, %v", facts, err)
	}
}

// A cluster from which a topic drains has something left to be moved off it, though the map names it nowhere else.
func TestAClusterFromWhichTopicsDrainIsMapped(t *testing.T) {
	const base = "persistent://acme/plain/t"
	e := route.Entry{Topic: base, Cluster: "b", Epoch: 1, State: route.StateDraining, SwitchID: "sw-1", Drain: route.Drain{From: "a", Tails: []route.Tail{{Ledger: 1, Entry: 2}}}.String()}
	table, _, err := route.Empty().With(map[int][]route.Entry{route.Bucket(base): {e}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for cluster, want := range map[string]bool{"a": true, "b": true, "c": true, "d": false} {
		if mapped(table, cluster, "c") != want {
			t.Errorf("cluster %s: mapped is %v, want %v", cluster, !want, want)
		}
	}
}

// leads leads failovers for some time, and returns the orders that it has carried out.
func leads(t *testing.T, st store.Store, long time.Duration, pairs ...switching.FailoverPair) (carried []switching.Failover) {
	t.Helper()
	table := route.Empty()
	f := NewFailovers(FailoverConfig{
		Store: st, Pairs: pairs, Table: func() *route.Table { return table }, DefaultCluster: "a", Log: slog.New(slog.DiscardHandler),
		Execute: func(ctx context.Context, o switching.Failover) {
			carried = append(carried, o)
			o.State = switching.FailoverDone
			if err := store.PutFailover(ctx, st, &o); err != nil {
				t.Error(err)
			}
		},
	})
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	f.Lead(ctx)
	return carried
}

// A leader that has decided on an automatic failover and died before it wrote the order is followed by one that writes it: once, and not hours later.
func TestAnOrderThatALeaderDidNotComeToWriteIsWrittenByTheNext(t *testing.T) {
	for _, after := range []time.Duration{time.Minute, time.Hour} {
		t.Run(after.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := store.NewMemory()
				defer st.Close()
				pair := switching.FailoverPair{From: "a", To: "b", After: time.Minute, Automatic: true, Cooldown: 24 * time.Hour}
				decided := switching.PairState{From: "a", To: "b", Executed: time.Now(), Order: switching.FailoverID(time.Now())}
				if err := store.PutFailoverPair(t.Context(), st, decided, 0); err != nil {
					t.Fatal(err)
				}
				time.Sleep(after)
				carried := leads(t, st, 10*time.Second, pair)
				if late := after > missedFor; late != (len(carried) == 0) {
					t.Fatalf("%v later: carried out %+v", after, carried)
				} else if late {
					return
				}
				o := carried[0]
				if len(carried) != 1 || o.ID != decided.Order || o.From != "a" || o.To != "b" || !o.All || !o.Automatic || !o.Asked.Equal(decided.Executed) {
					t.Errorf("carried out %+v", carried)
				}
				// It is over, and the next leader finds it so.
				if again := leads(t, st, 10*time.Second, pair); len(again) != 0 {
					t.Errorf("carried out again: %+v", again)
				}
			})
		})
	}
}

// A proposal of a pair that was taken out of the configuration is withdrawn; that a failover was done is still known, for the cool-down.
func TestTheProposalOfAPairThatIsNotConfiguredAnyMoreIsWithdrawn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := store.NewMemory()
		defer st.Close()
		for _, p := range []switching.PairState{
			{From: "a", To: "b", Proposal: &switching.Proposal{From: "a", To: "b", Made: time.Now()}},
			{From: "a", To: "c", Proposal: &switching.Proposal{From: "a", To: "c", Made: time.Now()}, Executed: time.Now().Add(-time.Hour), Order: "fo-1"},
		} {
			if err := store.PutFailoverPair(t.Context(), st, p, 0); err != nil {
				t.Fatal(err)
			}
		}
		leads(t, st, 10*time.Second, switching.FailoverPair{From: "a", To: "b", After: time.Minute})
		states, _, err := store.FailoverPairs(t.Context(), st)
		if err != nil || len(states) != 2 {
			t.Fatalf("states %+v, %v", states, err)
		}
		for _, s := range states {
			if kept := s.To == "b"; kept != (s.Proposal != nil) { // of that one nobody knows anything yet
				t.Errorf("to %s: the proposal is %+v", s.To, s.Proposal)
			}
			if s.To == "c" && (s.Order != "fo-1" || s.Executed.IsZero()) {
				t.Errorf("what was done is forgotten: %+v", s)
			}
		}
	})
}
