package controller

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// GR-02: an eviction makes the old cluster forget what consumers have in hand; what it said before counts for the forecast, but nothing that was acknowledged since.
func TestTheForecastRemembersWhatAnEvictionForgets(t *testing.T) {
	plan := pulsaradmin.Plan{Subscription: "s", Backlog: 100, Unacked: 3}
	for name, c := range map[string]struct {
		before []map[string]int64
		want   int64
	}{
		"without an eviction":                 {nil, 3},
		"forgotten":                           {[]map[string]int64{nil, {"s": 40, "other": 70}}, 40},
		"not more than there is left to have": {[]map[string]int64{nil, {"s": 400}}, 100},
		"more by now":                         {[]map[string]int64{nil, {"s": 1}}, 3},
		"a new subscription":                  {[]map[string]int64{nil, {}}, 3},
	} {
		topic := pulsarTopic{unacked: c.before}
		if got := topic.inHand(1, plan); got != c.want {
			t.Errorf("%s: %d entries in hand, want %d", name, got, c.want)
		}
	}
}

// C5 is about every partition: one that was added since the switch was opened would be neither drained nor carried, and what was acknowledged
// there missing on the new cluster.
func TestAPartitionThatWasAddedMeanwhileEndsTheSwitch(t *testing.T) {
	var partitions atomic.Int64
	partitions.Store(2)
	cluster := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
	tail, _, err := topic.Tail(t.Context())
	if err != nil || strings.Count(tail, "=7:-1") != 2 {
		t.Fatalf("tail %q, %v", tail, err)
	}
	if _, _, err := topic.Since(t.Context(), tail); err != nil {
		t.Fatal(err)
	}
	partitions.Store(3)
	if _, _, err := topic.Since(t.Context(), tail); !errors.Is(err, ErrHopeless) {
		t.Errorf("since the tail: %v", err)
	}
	if _, _, err := topic.Tail(t.Context()); !errors.Is(err, ErrHopeless) || !strings.Contains(err.Error(), "3 partitions on cluster a now and had 2") {
		t.Errorf("the tail: %v", err)
	}
}
