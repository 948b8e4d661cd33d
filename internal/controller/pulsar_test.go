package controller

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/internal/testkit"
)

// paths are what a cluster was asked.
type paths struct {
	mu  sync.Mutex
	all []string
}

func (p *paths) add(path string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, path)
}

func (p *paths) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.all
	p.all = nil
	return all
}

// C5 is about every partition: one that was added since the switch was opened would be neither drained nor carried, and what was acknowledged
// there missing on the new cluster.
func TestAPartitionThatWasAddedMeanwhileEndsTheSwitch(t *testing.T) {
	var partitions atomic.Int64
	var asked paths
	partitions.Store(2)
	cluster := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.add(r.URL.Path)
		answer := `{}`
		switch {
		case strings.HasSuffix(r.URL.Path, "/partitions"):
			answer = fmt.Sprintf(`{"partitions":%d}`, partitions.Load())
		case strings.HasSuffix(r.URL.Path, "/internalStats"):
			answer = `{"lastConfirmedEntry":"7:-1"}`
		}
		_, _ = w.Write([]byte(answer))
	}))
	defer cluster.Close()
	clients := map[string]*pulsaradmin.Client{}
	for _, name := range []string{"a", "b"} {
		clients[name] = pulsaradmin.New(pulsaradmin.Config{Cluster: name, WebURLs: []string{cluster.URL}})
		defer clients[name].Close()
	}
	topic, err := OpenPulsar(clients)(t.Context(), switching.Record{ID: "sw-1", Topic: base, From: "a", To: "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer topic.Close()
	tail, err := topic.Tail(t.Context())
	if err != nil || strings.Count(tail, "=7:-1") != 2 {
		t.Fatalf("tail %q, %v", tail, err)
	}
	asked.take()
	if _, _, err := topic.Since(t.Context(), tail); err != nil {
		t.Fatal(err)
	}
	// Who writes after he was looked for, and is gone before his messages are, would be overlooked.
	of := func(call string) func(string) bool {
		return func(path string) bool { return strings.HasSuffix(path, call) }
	}
	all := asked.take()
	listed, read := slices.IndexFunc(all, of("/stats")), slices.IndexFunc(all, of("/internalStats"))
	if listed < 0 || read < 0 || slices.ContainsFunc(all[read:], of("/stats")) {
		t.Errorf("publishers must be listed before messages are read: %q", all)
	}
	partitions.Store(3)
	if _, _, err := topic.Since(t.Context(), tail); !errors.Is(err, ErrHopeless) {
		t.Errorf("since the tail: %v", err)
	}
	if _, err := topic.Tail(t.Context()); !errors.Is(err, ErrHopeless) || !strings.Contains(err.Error(), "3 partitions on cluster a now and had 2") {
		t.Errorf("the tail: %v", err)
	}
}

// A name may have the sign that stands between name and position, and partitions may be written down in any order.
func TestTheEndsOfPartitionsAreKeptByName(t *testing.T) {
	const odd = "persistent://acme/orders/key=value-partition-"
	ends := map[string]string{odd + "0": "7:41", odd + "1": "8:-1"}
	if have := tailMap(tailText(ends)); !maps.Equal(have, ends) {
		t.Errorf("%v became %v", ends, have)
	}
	topic := &pulsarTopic{names: []string{odd + "1", odd + "0"}}
	have, err := topic.positions(tailText(ends))
	if err != nil || have[0].String() != "8:-1" || have[1].String() != "7:41" {
		t.Errorf("%v, %v", have, err)
	}
	tails, err := tailsOf(odd + "1=7:41\n" + odd + "2=8:3")
	if err != nil || len(tails) != 2 || tails[0].Ledger != 7 || tails[1].Entry != 3 {
		t.Errorf("%v, %v", tails, err)
	}
	topic.names = topic.names[:1]
	if _, err := topic.positions(tailText(ends)); !errors.Is(err, ErrHopeless) {
		t.Errorf("of two partitions, now there is one: %v", err)
	}
}

// Promise 3: what the subscriptions have left when clients use them is held against what was carried; a proxy that has not carried them says so, and compares the tails all the same.
func TestTheVerificationHoldsTheSubscriptionsAgainstThePlan(t *testing.T) {
	w := newDrainWorld(t, 0)
	w.b.CreateTopic(base, 0)
	replication := testkit.Replicate(w.a, w.b, testkit.ReplicationOptions{})
	t.Cleanup(replication.Close)
	const messages = 40
	for i := range uint64(messages) {
		w.a.Publish(base, "p", i, fmt.Append(nil, i))
	}
	w.a.Acknowledge(base, "holes", func(n int) bool { return n < 10 || n%3 == 0 })
	w.a.Acknowledge(base, "all", func(int) bool { return true })
	w.a.Acknowledge(base, "lost", func(n int) bool { return n < 30 })
	rec := switching.Record{ID: "sw-1", Topic: base, From: "a", To: "b", Mode: switching.ModePlanned}
	open := func() (Topic, string) {
		topic, err := OpenPulsar(w.c.cfg.Clients)(t.Context(), rec)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(topic.Close)
		tail, err := topic.Tail(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return topic, tail
	}
	topic, tail := open()
	if err := w.a.Await(t.Context(), "everything to be replicated", func() bool {
		missing, err := topic.Replicated(t.Context(), tail)
		return err == nil && missing == ""
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := topic.Carry(t.Context()); err != nil {
		t.Fatal(err)
	}
	if wrong, err := topic.ReadBack(t.Context()); err != nil || wrong != "" {
		t.Fatalf("%s, %v", wrong, err)
	}
	verify := func(topic Topic) Verified {
		v, err := topic.Verify(t.Context(), tail)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	w.b.Acknowledge(base, "holes", func(int) bool { return true })
	w.b.Publish(base, "q", 0, []byte("new"))
	v := verify(topic)
	after := map[string]switching.After{}
	for _, c := range v.Carried {
		after[c.Subscription] = *c.After
	}
	if want := map[string]switching.After{"all": {Backlog: 1}, "holes": {Backlog: 1, Difference: -20}, "lost": {Backlog: 11}}; !maps.Equal(after, want) {
		t.Errorf("found %+v, want %+v", after, want)
	}
	if v.Wrong != "" || v.Differences != "" || !strings.HasSuffix(v.Text, "all are there, in order; no backlog of 3 subscriptions is larger than was carried") {
		t.Errorf("%+v", v)
	}
	first := w.b.Messages(base)[0]
	answer, err := http.Post(w.b.Web()+"/admin/v2/persistent/acme/orders/created/subscription/lost/resetcursor", "application/json",
		strings.NewReader(fmt.Sprintf(`{"ledgerId":%d,"entryId":%d,"partitionIndex":-1}`, first.Ledger, first.Entry)))
	if err != nil || answer.Body.Close() != nil || answer.StatusCode != http.StatusNoContent {
		t.Fatal(answer, err)
	}
	if v = verify(topic); !strings.Contains(v.Differences, "subscription lost: cluster b counts a backlog of 41 entries") || !strings.HasSuffix(v.Text, v.Differences) || v.Wrong != "" {
		t.Errorf("%+v", v)
	}
	late, _ := open()
	if v = verify(late); v.Carried != nil || v.Differences != "" || !strings.Contains(v.Text, "all are there, in order; its subscriptions were not looked at after the flip: the proxy that has carried them") {
		t.Errorf("%+v", v)
	}
}
