package pulsaradmin

import (
	"context"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
)

// brokerStats is what a broker of 4.0.8 answers, shortened.
const brokerStats = `{"acme/plain":{"0xa0000000_0xc0000000":{"persistent":{"persistent://acme/plain/p-partition-1":{"publishers":[],"replication":{},
"subscriptions":{"x y":{"consumers":[],"msgBacklog":0,"type":"None"},"reader-1":{"consumers":[{"address":"/127.0.0.1:48456","metadata":{}}],"type":"Exclusive"}},
"producerCount":0,"storageSize":0}},"non-persistent":{"non-persistent://acme/plain/n":{"publishers":[],"replication":{},"subscriptions":{}}}},"0xc0000000_0xe0000000":{}},
"acme/geo":{"0x00000000_0xffffffff":{"persistent":{"persistent://acme/geo/t1":{"publishers":[],"replication":{"b":{"connected":false,"msgRateOut":0.0,
"replicationBacklog":17,"replicationDelayInSeconds":3,"inboundConnection":""}},"subscriptions":{}}}}}}`

func TestOneCallForEachBrokerTellsOfAllTopics(t *testing.T) {
	var mu sync.Mutex
	calls := map[string]int{}
	second := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		calls["second "+r.URL.Path]++
		_, _ = w.Write([]byte(`{}`))
	})
	gone := serve(t, nil)
	gone.Close()
	var brokers string
	first := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		calls["first "+r.URL.Path]++
		switch r.URL.Path {
		case "/admin/v2/brokers":
			_, _ = w.Write([]byte(brokers))
		case "/admin/v2/broker-stats/topics":
			_, _ = w.Write([]byte(brokerStats))
		}
	})
	host := func(url string) string { return strings.TrimPrefix(url, "http://") }
	brokers = `["` + host(first) + `","` + host(gone.URL) + `","` + host(second) + `"]`

	found := map[string]TopicCounts{}
	err := client(t, first).BrokerTopics(context.Background(), func(c TopicCounts) { found[c.Topic] = c })
	if err == nil || !strings.Contains(err.Error(), host(gone.URL)) {
		t.Errorf("a broker that does not answer is not named: %v", err)
	}
	if len(found) != 2 {
		t.Fatalf("found %v", found)
	}
	if r := found["persistent://acme/geo/t1"].Replication["b"]; r.Backlog != 17 || r.Delay != 3 {
		t.Errorf("replication: %+v", r)
	}
	subs := found["persistent://acme/plain/p-partition-1"].Subscriptions
	if len(subs) != 2 || len(subs["x y"].Consumers) != 0 || len(subs["reader-1"].Consumers) != 1 || subs["x y"].Type != "None" {
		t.Errorf("subscriptions: %+v", subs)
	}
	if want := map[string]int{"first /admin/v2/brokers": 1, "first /admin/v2/broker-stats/topics": 1, "second /admin/v2/broker-stats/topics": 1}; !reflect.DeepEqual(calls, want) {
		t.Errorf("calls: %v, want %v", calls, want)
	}
}

func TestStatisticsThatAreNoneAreAnError(t *testing.T) {
	for _, text := range []string{"", "[]", `{"acme/geo":7}`, `{"acme/geo":{"b":{"persistent":{"t":{"replication":`, "<html>"} {
		var url string
		url = serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/admin/v2/brokers" {
				text := `["` + strings.TrimPrefix(url, "http://") + `"]`
				_, _ = w.Write([]byte(text))
				return
			}
			_, _ = w.Write([]byte(text))
		})
		if err := client(t, url).BrokerTopics(context.Background(), func(TopicCounts) {}); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

func TestASubscriptionIsMadeAtTheOldestMessageOfAllPartitions(t *testing.T) {
	var mu sync.Mutex
	var calls []string
	status := http.StatusNoContent
	url := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body := make([]byte, r.ContentLength)
		_, _ = r.Body.Read(body)
		calls = append(calls, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		w.WriteHeader(status)
	})
	c := client(t, url)
	if err := c.CreateEarliest(context.Background(), someTopic, "x y", true, map[string]string{"k": "v"}); err != nil {
		t.Fatal(err)
	}
	at := "/admin/v2/persistent/acme/geo/t1/subscription/x+y"
	want := []string{
		"PUT " + at + `?replicated=true {"ledgerId":-1,"entryId":-1,"partitionIndex":-1,"properties":{"k":"v"}}`,
		"POST " + at + "/replicatedSubscriptionStatus true",
	}
	if !reflect.DeepEqual(calls, want) {
		t.Errorf("calls:\n%s\nwant\n%s", strings.Join(calls, "\n"), strings.Join(want, "\n"))
	}
	status = http.StatusConflict
	if err := c.CreateEarliest(context.Background(), someTopic, "s", true, nil); err != nil {
		t.Errorf("one that exists: %v", err)
	}
}

func TestWhatATopicHasIsTheUnionOfItsPartitions(t *testing.T) {
	at := "GET /admin/v2/persistent/acme/geo/t1-partition-"
	internal := `{"lastConfirmedEntry":"5:2","ledgers":[{"ledgerId":4,"entries":10},{"ledgerId":5,"entries":0}],"cursors":{}}`
	s := serve(t, map[string]string{
		at + "0/subscriptions": `["a"]`, at + "0/internalStats": internal, at + "1/subscriptions": `["a","b"]`, at + "1/internalStats": internal,
	}) // partition 2 does not exist yet
	names, entries, err := client(t, s.URL).Subscribed(context.Background(), someTopic, 3)
	if err != nil || entries != 26 || !reflect.DeepEqual(names, map[string]bool{"a": true, "b": true}) {
		t.Errorf("%v, %d entries, %v", names, entries, err)
	}
}
