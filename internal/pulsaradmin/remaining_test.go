package pulsaradmin

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/testkit"
)

func TestWhatIsLeftIsCountedOverAllPartitionsAndReadersApart(t *testing.T) {
	part := func(backlog int) string {
		return strings.ReplaceAll(`{"subscriptions":{
			"audit":{"isDurable":true,"msgBacklog":#,"unackedMessages":2,"msgDelayed":1,"consumers":[{"consumerName":"c1","address":"/10.0.0.1:5000"}]},
			"idle":{"isDurable":true,"msgBacklog":0,"consumers":[]},
			"__compaction":{"isDurable":true,"msgBacklog":9},
			"pulsar.dedup":{"isDurable":true,"msgBacklog":9},
			"reader-1":{"isDurable":false,"msgBacklog":#,"consumers":[{"consumerName":"r","address":"/10.0.0.2:5000"}]},
			"reader-gone":{"isDurable":false,"msgBacklog":3,"consumers":[]},
			"pointsman-reader-1":{"isDurable":false,"msgBacklog":3,"consumers":[{"consumerName":"pointsman-controller","address":"/10.0.0.3:5000"}]}}}`, "#", string(rune('0'+backlog)))
	}
	const query = "/stats?getPreciseBacklog=true&subscriptionBacklogSize=false"
	s := serve(t, map[string]string{
		"GET /admin/v2/persistent/acme/geo/t1-partition-0" + query: part(3),
		"GET /admin/v2/persistent/acme/geo/t1-partition-1" + query: part(4),
	})
	w := NewWatch(client(t, s.URL), PartitionNames(someTopic, 2))
	defer w.Close()
	durable, readers, err := w.Look(t.Context())
	if err != nil || len(durable) != 2 || len(readers) != 1 {
		t.Fatalf("durable %+v, readers %+v, %v", durable, readers, err)
	}
	audit, idle := durable[0], durable[1]
	if audit.Name != "audit" || audit.Backlog != 7 || audit.Unacked != 4 || audit.Delayed != 2 || len(audit.Consumers) != 2 || audit.Partitions != 2 || audit.Drained() {
		t.Errorf("audit: %+v", audit)
	}
	if idle.Name != "idle" || !idle.Drained() || len(idle.Consumers) != 0 {
		t.Errorf("idle: %+v", idle)
	}
	if r := readers[0]; r.Name != "reader-1" || len(r.Consumers) != 2 {
		t.Errorf("reader: %+v", r)
	}
}

// A broker of 3.0.0 was seen to deliver nothing more of a key-shared subscription whose consumers had reconnected, until something was published.
func TestASubscriptionThatStandsStillIsRevived(t *testing.T) {
	const standing = `{"subscriptions":{"orders":{"isDurable":true,"type":"Key_Shared","msgBacklog":23,"consumers":[{"consumerName":"c0","availablePermits":0},{"consumerName":"c1","availablePermits":979}]}}}`
	for _, c := range []struct {
		name, stats string
		revived     bool
	}{
		{"nothing is delivered", standing, true},
		{"shared", strings.Replace(standing, "Key_Shared", "Shared", 1), true},
		{"messages are in hand", strings.Replace(standing, `"consumers"`, `"unackedMessages":1,"consumers"`, 1), false},
		{"brokers do not count what is in hand of the others", strings.Replace(standing, "Key_Shared", "Failover", 1), false},
		{"nobody asks", strings.Replace(standing, "979", "0", 1), false},
		{"messages are delayed", strings.Replace(standing, `"consumers"`, `"msgDelayed":23,"consumers"`, 1), false},
		{"a reader", strings.Replace(standing, `"isDurable":true`, `"isDurable":false`, 1), false},
		{"one's own", strings.Replace(standing, `"orders"`, `"pulsar.dedup"`, 1), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			unloads := 0
			url := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/unload") {
					unloads++
				}
				_, _ = w.Write([]byte(c.stats))
			})
			w := NewWatch(client(t, url), []string{someTopic})
			defer w.Close()
			// look looks, and is there that long after what it saw, or a little less.
			look := func(after time.Duration, less bool) {
				t.Helper()
				at := time.Now()
				if _, _, err := w.Look(t.Context()); err != nil {
					t.Fatal(err)
				}
				if !less {
					at = time.Now()
				}
				before := unloads
				said, err := w.Revive(t.Context(), at.Add(after))
				if err != nil || (said != "") != (unloads > before) || said != "" && !strings.Contains(said, "nothing of subscription orders of "+someTopic) {
					t.Fatalf("revive says %q, %v; the topic was unloaded %d times", said, err, unloads)
				}
			}
			look(9*time.Second, true)
			early := unloads
			look(11*time.Second, false)
			once := unloads
			look(19*time.Second, true) // twice as long the next time
			if wait := unloads; early != 0 || (once == 1) != c.revived || wait != once {
				t.Errorf("unloaded %d times within 9 s, %d within 11, %d within 19 more", early, once, wait)
			}
		})
	}
}

// A broker passes over markers only while it delivers: a subscription that nobody uses would never be done for them.
func TestMarkersAreNothingThatIsLeft(t *testing.T) {
	for _, c := range []struct {
		name  string
		acked string // ranges behind 7:1
		kinds string // of the entries 7:0…: m message, x marker
		left  int64
	}{
		{"only markers", "[]", "mmxx", 0},
		{"a message behind markers", "[]", "mmxxm", 3},
		{"markers between what is acknowledged", "[(7:2..7:3],(7:4..7:5]]", "mmxmxmx", 0},
		{"a message behind what is acknowledged", "[(7:2..7:3]]", "mmxmm", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			url := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
				calls++
				write := func(s string) { _, _ = w.Write([]byte(s)) }
				switch path := r.URL.Path; {
				case strings.HasSuffix(path, "/stats"):
					write(strings.ReplaceAll(`{"subscriptions":{"s":{"isDurable":true,"msgBacklog":#,"consumers":[]}}}`, "#", string(rune('0'+strings.Count(c.kinds[2:], "")-1))))
				case strings.HasSuffix(path, "/internalStats"):
					write(`{"lastConfirmedEntry":"7:` + string(rune('0'+len(c.kinds)-1)) + `","ledgers":[{"ledgerId":7,"entries":0}],"cursors":{"s":{"markDeletePosition":"7:1","readPosition":"7:2","individuallyDeletedMessages":"` + c.acked + `"}}}`)
				case strings.Contains(path, "/entry/"):
					w.Header().Set("X-Pulsar-publish-time", "2026-11-29T20:31:29.613Z")
					if c.kinds[path[len(path)-1]-'0'] == 'x' {
						w.Header().Set("X-Pulsar-marker-type", "10")
					}
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			})
			watch := NewWatch(client(t, url), []string{someTopic})
			defer watch.Close()
			durable, _, err := watch.Look(t.Context())
			if err != nil || len(durable) != 1 || durable[0].Drained() != (c.left == 0) {
				t.Fatalf("%+v, %v; want %d left", durable, err, c.left)
			}
			before := calls
			if _, _, err := watch.Look(t.Context()); err != nil || c.left > 0 && calls != before+1 {
				t.Errorf("%d calls for a second look, %v; a message does not become a marker", calls-before, err)
			}
		})
	}
}

func TestSubscriptionsAreCreatedWhereTheyAreMissing(t *testing.T) {
	b := testkit.NewCluster("b", testkit.Options{})
	defer b.Close()
	c := New(Config{Cluster: "b", WebURLs: []string{b.Web()}})
	defer c.Close()
	if err := c.CreateTopic(t.Context(), backTopic, 2); err != nil {
		t.Fatal(err)
	}
	if err := c.CreateTopic(t.Context(), backTopic, 2); err != nil { // somebody else was faster
		t.Fatal(err)
	}
	if n := ok[int](t)(c.Partitions(t.Context(), backTopic)); n != 2 {
		t.Fatalf("%d partitions", n)
	}
	part := PartitionNames(backTopic, 2)[1]
	b.Publish(part, "p", 0, []byte("from before"))
	b.Acknowledge(part, "there", func(int) bool { return false })
	log := ok[Log](t)(c.Tail(t.Context(), part))
	end := log.End()
	subs := []Sub{{Name: "new"}, {Name: "there"}}
	for _, want := range []int{1, 2} { // the second time both are there
		existing, err := c.CreateSubscriptions(t.Context(), part, end, subs)
		if err != nil || len(existing) != want || existing[want-1].Name != "there" || existing[want-1].Backlog != 1 {
			t.Errorf("existing %+v, %v", existing, err)
		}
		b.Publish(part, "p", 1, []byte("afterwards"))
		b.Acknowledge(part, "there", func(n int) bool { return n > 0 })
	}
	info, _ := b.Topic(part)
	if n := info.Subscriptions["new"].Backlog; n != 2 {
		t.Errorf("the new subscription has %d entries, want all since it was made", n)
	}
}

// A subscription that is replicated is so on the other cluster; what is missing is marked there.
func TestSubscriptionsKeepWhetherTheyAreReplicated(t *testing.T) {
	var mu sync.Mutex // guards marked: the calls come at once
	var marked []string
	url := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case strings.HasSuffix(r.URL.Path, "/internalStats"):
			_, _ = w.Write([]byte(`{"lastConfirmedEntry":"7:-1","ledgers":[],"cursors":{"old":{"markDeletePosition":"7:-1","readPosition":"7:0","individuallyDeletedMessages":"[]"}}}`))
		case strings.HasSuffix(r.URL.Path, "/stats"):
			_, _ = w.Write([]byte(`{"subscriptions":{"old":{"isDurable":true,"isReplicated":true}}}`))
		case strings.HasSuffix(r.URL.Path, "/replicatedSubscriptionStatus"), r.Method == http.MethodPut:
			marked = append(marked, r.Method+" "+r.URL.Path[strings.Index(r.URL.Path, "subscription"):]+" "+r.URL.RawQuery)
		}
	})
	_, err := client(t, url).CreateSubscriptions(t.Context(), someTopic, pos("7:0"), []Sub{{Name: "old", Replicated: true}, {Name: "new", Replicated: true}, {Name: "plain"}})
	slices.Sort(marked)
	want := []string{"POST subscription/new/replicatedSubscriptionStatus ", "PUT subscription/new replicated=true", "PUT subscription/plain "}
	if err != nil || !slices.Equal(marked, want) {
		t.Errorf("calls %q, %v; want %q", marked, err, want)
	}
}

func TestSchemasAreRegisteredInTheirOrder(t *testing.T) {
	const versions = `{"getSchemaResponses":[{"version":1,"type":"AVRO","data":"{\"two\":2}","properties":{}},{"version":0,"type":"JSON","data":"{\"one\":1}","properties":{"k":"v"}}]}`
	from := client(t, serve(t, map[string]string{"GET /admin/v2/schemas/acme/geo/t1/schemas": versions}).URL)
	var posted []string
	have := `{"getSchemaResponses":[]}`
	to := client(t, serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			body := make([]byte, 1000)
			n, _ := r.Body.Read(body)
			posted = append(posted, r.URL.Path+" "+string(body[:n]))
			return
		}
		_, _ = w.Write([]byte(have))
	}))
	if err := from.CopySchemas(t.Context(), someTopic, to); err != nil {
		t.Fatal(err)
	}
	want := []string{
		`/admin/v2/schemas/acme/geo/t1/schema {"type":"JSON","schema":"{\"one\":1}","properties":{"k":"v"}}`,
		`/admin/v2/schemas/acme/geo/t1/schema {"type":"AVRO","schema":"{\"two\":2}","properties":{}}`,
	}
	if !slices.Equal(posted, want) {
		t.Errorf("posted %q, want %q", posted, want)
	}
	have, posted = versions, nil
	if err := from.CopySchemas(t.Context(), someTopic, to); err != nil || posted != nil {
		t.Errorf("posted %q, %v where there are some", posted, err)
	}
}

// A cluster that wants every producer to name a schema gets the latest one.
func TestCopiesNameASchemaWhereOneIsWanted(t *testing.T) {
	k := testkit.NewCluster("a", testkit.Options{})
	defer k.Close()
	k.CreateTopic(backTopic, 0)
	k.Handle(codec.TypeProducer, func(conn *testkit.Conn, cmd *pulsarpb.BaseCommand) bool {
		if cmd.Producer.Schema == nil {
			conn.Fail(cmd, codec.ErrorIncompatibleSchema, "Producers cannot connect or send message without a schema")
			return true
		}
		return false
	})
	c := client(t, serve(t, map[string]string{
		"GET /lookup/v2/topic/persistent/acme/plain/back": `{"brokerUrl":"` + k.Broker(0).URL() + `"}`,
		"GET /admin/v2/schemas/acme/plain/back/schema":    `{"version":3,"type":"AVRO","data":"{}","properties":{"k":"v"}}`,
	}).URL)
	w := ok[*wire](t)(c.open(t.Context(), backTopic))
	defer w.close()
	if _, err := w.produceAlone(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	all := k.Commands(codec.TypeProducer)
	if s := all[len(all)-1].Cmd.Producer.GetSchema(); s.GetType() != 4 || string(s.GetSchemaData()) != "{}" || len(s.GetProperties()) != 1 {
		t.Errorf("schema %v", s)
	}
}
