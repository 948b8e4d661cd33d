package pulsaradmin

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/internal/config"
)

const someTopic = "persistent://acme/geo/t1"

// serve answers paths (with their query) by fixed texts; what is not listed is 404 as a broker says it.
func serve(t *testing.T, answers map[string]string) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := answers[r.Method+" "+r.URL.RequestURI()]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			body = `{"reason":"Topic not found"}`
		}
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

// serveFunc answers by a function and returns the address.
func serveFunc(t *testing.T, answer http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(s.Close)
	return s.URL
}

func client(t *testing.T, urls ...string) *Client {
	t.Helper()
	c := New(Config{Cluster: "a", WebURLs: urls})
	t.Cleanup(c.Close)
	return c
}

func recorded(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func ok[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func pos(text string) Position {
	p, err := ParsePosition(text)
	if err != nil {
		panic(err)
	}
	return p
}

func recordedTopic(t *testing.T) *Client {
	const base = "GET /admin/v2/persistent/acme/geo/t1/"
	return client(t, serve(t, map[string]string{
		"GET /admin/v2/clusters":                                            `["a","b","global"]`,
		"GET /admin/v2/brokers/version":                                     "4.0.8\n",
		"GET /admin/v2/tenants/acme":                                        `{"adminRoles":[],"allowedClusters":["a","b"]}`,
		"GET /admin/v2/namespaces/acme/geo":                                 `{"replication_clusters":["a","b"],"backlog_quota_map":{},"schema_compatibility_strategy":"UNDEFINED","is_allow_auto_update_schema":true}`,
		base + "partitions":                                                 `{"partitions":0,"deleted":false}`,
		base + "stats?getPreciseBacklog=true&subscriptionBacklogSize=false": recorded(t, "stats.json"),
		base + "internalStats":                                              recorded(t, "internal.json"),
		base + "retention":                                                  `{"retentionTimeInMinutes":10,"retentionSizeInMB":10}`,
		base + "messageTTL":                                                 ``,
		base + "backlogQuotaMap":                                            `{}`,
		"GET /admin/v2/schemas/acme/geo/t1/schemas":                         `{"getSchemaResponses":[{"version":1,"type":"JSON","data":"{\"type\": \"int\"}"},{"version":0,"type":"STRING","data":""}]}`,
	}).URL)
}

// The answers are those of a real cluster.
func TestFactsOfATopicAreReadFromRecordedAnswers(t *testing.T) {
	f := ok[Facts](t)(recordedTopic(t).Facts(t.Context(), someTopic))
	if !f.Tenant || !f.Namespace || !f.Exists || f.Partitions != 0 || len(f.Parts) != 1 {
		t.Fatalf("tenant, namespace and a topic without partitions exist, but the facts are %+v", f)
	}
	if !slices.Equal(f.Known, []string{"a", "b", "global"}) || f.Version != "4.0.8" {
		t.Errorf("version %q knows the clusters %q", f.Version, f.Known)
	}
	if !f.Replicates("b") || f.Replicates("c") {
		t.Error("the namespace is replicated to b and not to c")
	}
	if got := f.TopicPolicies; len(got) != 1 || string(got["retention"]) != `{"retentionTimeInMinutes":10,"retentionSizeInMB":10}` {
		t.Errorf("topic policies %s, want retention alone: an empty answer is no policy", got)
	}
	if len(f.Schemas) != 2 || f.Schemas[0].Type != "STRING" || f.Schemas[1].Fingerprint != fingerprint("JSON", `{"type":"int"}`) {
		t.Errorf("schemas %v, want versions 0 and 1 in order, with fingerprints that do not depend on white space", f.Schemas)
	}
	sub, cursor := f.Parts[0].Stats.Subscriptions["repl"], f.Parts[0].Internal.Cursors["repl"]
	if sub.Type != "Shared" || !sub.Durable || !sub.Replicated || sub.Backlog != 45 || len(sub.Consumers) != 0 {
		t.Errorf("subscription repl is %+v", sub)
	}
	want := []Range{{pos("7:36"), pos("7:45")}, {pos("7:46"), pos("7:55")}, {pos("7:56"), pos("7:59")}, {pos("7:99"), pos("7:102")}}
	if cursor.MarkDelete != pos("7:35") || cursor.Read != pos("7:103") || !slices.Equal(cursor.Acked, want) {
		t.Errorf("cursor repl is %+v", cursor)
	}
	// The ledger that is written to is listed with 0 entries: the last confirmed entry counts.
	if l := f.Parts[0].Internal.Log; l.Len() != 105 || l.Last != pos("7:104") || l.End() != pos("7:105") {
		t.Errorf("the log is %+v, want the 105 entries of ledger 7", l)
	}
	if r := ok[Replicator](t)(recordedTopic(t).Replicator(t.Context(), someTopic, "b", time.Now())); !r.Drained() || !r.Connected || r.Backlog != 0 || r.Reached(pos("7:105")) {
		t.Errorf("replicator %+v, want one that has sent everything up to 7:104", r)
	}
}

// SW-10: what is missing is a fact, not a failure.
func TestFactsSayWhatIsMissing(t *testing.T) {
	f := ok[Facts](t)(client(t, serve(t, map[string]string{"GET /admin/v2/tenants/acme": "{}"}).URL).Facts(t.Context(), someTopic))
	if !f.Tenant || f.Namespace || f.Exists {
		t.Errorf("facts %+v, want a tenant without the namespace", f)
	}
}

func TestSchemasAreComparedByVersionNumber(t *testing.T) {
	v := func(n int64, data string) Schema { return Schema{n, "JSON", fingerprint("JSON", data)} }
	a := Facts{Cluster: "a", Schemas: []Schema{v(0, "1"), v(1, "2")}}
	for want, b := range map[string]Facts{
		"":                        {Cluster: "b", Schemas: []Schema{v(0, "1"), v(1, "2"), v(2, "3")}},
		"lacks version 1":         {Cluster: "b", Schemas: []Schema{v(0, "1")}},
		"version 0 of the schema": {Cluster: "b", Schemas: []Schema{v(0, "2"), v(1, "1")}},
	} {
		if got := SchemaDifference(a, b); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("difference %q, want %q", got, want)
		}
	}
}

func TestPolicyDifferencesAreNamed(t *testing.T) {
	one, two := int64(60), int64(60)
	a := Facts{Cluster: "a", Policies: Policies{TTL: &one, SchemaStrategy: "UNDEFINED", Retention: []byte(`{"a":1,"b":2}`)}}
	b := Facts{Cluster: "b", Policies: Policies{TTL: &two, Retention: []byte(`{"b":2, "a":1}`)}}
	if got := PolicyDifferences(a, b); got != nil {
		t.Errorf("equal policies differ: %q", got)
	}
	// Brokers say false of topics that have other policies.
	a.TopicPolicies = map[string]json.RawMessage{"schemaValidationEnforced": json.RawMessage(`false`), "deduplicationEnabled": json.RawMessage(`false`)}
	if got := PolicyDifferences(a, b); !slices.Equal(got, []string{"topic policy deduplicationEnabled: false on cluster a, not set on cluster b"}) {
		t.Errorf("a policy that is false and one that is not set: %q", got)
	}
	a.TopicPolicies = map[string]json.RawMessage{"schemaValidationEnforced": json.RawMessage(`true`)}
	if got := PolicyDifferences(a, b); len(got) != 1 {
		t.Errorf("a policy that is true and one that is not set: %q", got)
	}
	a.TopicPolicies = nil
	two = 61
	b.TopicPolicies = map[string]json.RawMessage{"retention": json.RawMessage(`{"x":1}`)}
	want := []string{"message TTL of the namespace (seconds): 60 on cluster a, 61 on cluster b", `topic policy retention: not set on cluster a, {"x":1} on cluster b`}
	if got := PolicyDifferences(a, b); !slices.Equal(got, want) {
		t.Errorf("differences %q, want %q", got, want)
	}
}

// SW-08, SW-09, GR-01: judged by positions, never by "connected".
func TestAReplicatorIsAliveWhenItMovesOrHasNothingToDo(t *testing.T) {
	now := time.Now()
	at := func(p, last string, backlog int64) Replicator {
		return Replicator{Exists: true, Position: pos(p), Last: pos(last), Backlog: backlog, At: now}
	}
	for _, c := range []struct {
		before, after Replicator
		alive         bool
	}{
		{at("7:9", "7:9", 0), at("7:9", "7:9", 0), true},
		{at("7:5", "7:9", 4), at("7:6", "7:20", 14), true},
		{at("7:5", "7:9", 4), at("7:5", "7:9", 4), false},
		{Replicator{}, Replicator{}, false},
	} {
		if alive, why := Alive(c.before, c.after); alive != c.alive || alive != (why == "") {
			t.Errorf("from %v to %v of %v: alive %v (%s), want %v", c.before.Position, c.after.Position, c.after.Last, alive, why, c.alive)
		}
	}
}

func TestTheNextHostIsAskedWhenOneDoesNotAnswer(t *testing.T) {
	var refused atomic.Int32
	sick := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		refused.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer sick.Close()
	gone := httptest.NewServer(nil)
	gone.Close()
	well := serve(t, map[string]string{"GET /admin/v2/persistent/acme/geo/t1/partitions": `{"partitions":3}`})
	c := client(t, sick.URL, gone.URL, well.URL)
	for range 3 {
		if n := ok[int](t)(c.Partitions(t.Context(), someTopic)); n != 3 {
			t.Errorf("%d partitions, want 3", n)
		}
	}
	if refused.Load() != 1 {
		t.Errorf("the sick host was asked %d times, want once: the one that answered is asked first from then on", refused.Load())
	}
}

// What an operator configures: addresses, trust, and a token that is read when it is needed.
func TestAClientIsOpenedFromTheConfiguration(t *testing.T) {
	got := ""
	web := serveFunc(t, func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		_, _ = w.Write([]byte(`{"partitions":0}`))
	})
	file := filepath.Join(t.TempDir(), "token")
	cluster := &config.Cluster{WebURL: web, ServiceURL: "pulsar+ssl://h:6651", ControllerTokenFile: file}
	c := ok[*Client](t)(Open("a", cluster))
	defer c.Close()
	if !c.cfg.BinaryTLS || c.Cluster() != "a" {
		t.Errorf("configuration %+v", c.cfg)
	}
	if _, err := c.Partitions(t.Context(), someTopic); err == nil || !strings.Contains(err.Error(), "clusters.a.controller_token_file") {
		t.Errorf("error %v, want the missing file", err)
	}
	for _, token := range []string{"one", "two"} {
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Partitions(t.Context(), someTopic); err != nil || got != "Bearer "+token {
			t.Errorf("sent %q, %v; want the token as it is now", got, err)
		}
	}
	if _, err := Open("b", &config.Cluster{}); err == nil || !strings.Contains(err.Error(), "set clusters.b.web_url") {
		t.Errorf("error %v, want a remedy", err)
	}
}

// A redirect names another host: net/http would drop the credentials.
func TestARedirectKeepsTheCredentialsAndTheBody(t *testing.T) {
	var got [2]string
	owner := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body := make([]byte, 64)
		n, _ := r.Body.Read(body)
		got = [2]string{r.Header.Get("Authorization"), string(body[:n])}
	}))
	defer owner.Close()
	elsewhere := strings.Replace(owner.URL, "127.0.0.1", "localhost", 1)
	first := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	defer first.Close()
	c := New(Config{Cluster: "a", WebURLs: []string{first.URL}, Token: func() (string, error) { return "s3cret", nil }})
	defer c.Close()
	if _, err := c.call(t.Context(), http.MethodPost, "/x", map[string]int{"n": 1}, nil); err != nil {
		t.Fatal(err)
	}
	if want := [2]string{"Bearer s3cret", `{"n":1}`}; got != want {
		t.Errorf("the owner got %q, want %q", got, want)
	}
}

func TestCredentialsNeverLeaveTLS(t *testing.T) {
	first := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://127.0.0.1:1/x", http.StatusTemporaryRedirect)
	}))
	defer first.Close()
	trust := first.Client().Transport.(*http.Transport).TLSClientConfig
	c := New(Config{Cluster: "a", WebURLs: []string{first.URL}, TLS: trust, Token: func() (string, error) { return "s3cret", nil }})
	defer c.Close()
	_, err := c.call(t.Context(), http.MethodGet, "/x", nil, nil)
	if err == nil || !strings.Contains(err.Error(), "redirected from https to http://127.0.0.1:1") || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("error %v, want a refusal to follow, without the token", err)
	}
}

// A tired operator reads which cluster, which call, what it said, and what to do.
func TestErrorsNameClusterCallStatusAndRemedy(t *testing.T) {
	answer := func(status int, body string) error {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		}))
		defer s.Close()
		_, err := client(t, s.URL).Partitions(t.Context(), someTopic)
		return err
	}
	const call = "cluster a: GET /admin/v2/persistent/acme/geo/t1/partitions: "
	for _, c := range []struct {
		err  error
		want string
		kind error
	}{
		{answer(401, ""), call + "status 401; give clusters.a.controller_token_file a token that cluster a accepts", ErrForbidden},
		{answer(404, `{"reason":"Topic persistent://acme/geo/t1 not found"}`), call + "status 404: Topic persistent://acme/geo/t1 not found", ErrNotFound},
		{answer(409, "busy\n now"), call + "status 409: busy now", ErrConflict},
		{answer(500, strings.Repeat("x", 1000)), call + "status 500: " + strings.Repeat("x", 300) + "…; the log of the broker of cluster a says more", nil},
	} {
		if c.err == nil || c.err.Error() != c.want || c.kind != nil && !errors.Is(c.err, c.kind) {
			t.Errorf("error\n  %v\nwant\n  %s", c.err, c.want)
		}
	}
	if err := answer(200, "<html>"); err == nil || !strings.Contains(err.Error(), "is clusters.a.web_url the admin address") {
		t.Errorf("error %v, want a doubt about the address", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := client(t, "http://127.0.0.1:1").Partitions(ctx, someTopic); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
}

func TestTopicsWithoutAStoredLogAreRefused(t *testing.T) {
	for _, topic := range []string{"non-persistent://acme/geo/t1", "persistent://prop/cluster/ns/t1"} {
		if _, err := split(topic); err == nil || !strings.Contains(err.Error(), "--mode immediate") {
			t.Errorf("%s: error %v, want a refusal with a remedy", topic, err)
		}
	}
	if p, err := subscriptionPath("persistent://acme/geo/a b%2F", "s/1 %", "resetcursor"); err != nil || p != "/admin/v2/persistent/acme/geo/a+b%252F/subscription/s%252F1+%2525/resetcursor" {
		t.Errorf("path %q, %v", p, err)
	}
}

func TestRangesAreParsedAndWritten(t *testing.T) {
	got := ok[[]Range](t)(parseRanges("[(7:36..7:45],(7:46..8:-1]]"))
	if want := []Range{{pos("7:36"), pos("7:45")}, {pos("7:46"), pos("8:-1")}}; !reflect.DeepEqual(got, want) || got[0].String() != "(7:36..7:45]" {
		t.Errorf("ranges %v, want %v", got, want)
	}
	if got[0].Contains(pos("7:36")) || !got[0].Contains(pos("7:37")) || !got[0].Contains(pos("7:45")) || got[0].Contains(pos("7:46")) {
		t.Error("a range is open on the left and closed on the right")
	}
	if got := ok[[]Range](t)(parseRanges("[]")); got != nil {
		t.Errorf("no ranges are %v", got)
	}
	for _, bad := range []string{"", "[", "(1:2..3:4]", "[(1:2..3:4)]", "[(1:2,3:4]]", "(1:2..3:4]]", "]", "[x]", "[(a:2..3:4]]", "[(1:2..3:b]]"} {
		if got, err := parseRanges(bad); err == nil {
			t.Errorf("%q gives %v, want an error", bad, got)
		}
	}
}

// The arithmetic over ledgers against a plain list of positions.
func TestPositionsOfALogAreCountedOverLedgers(t *testing.T) {
	log := Log{Ledgers: []Ledger{{3, 2}, {7, 1}, {9, 3}}, Last: pos("9:2")}
	all := []Position{pos("3:0"), pos("3:1"), pos("7:0"), pos("9:0"), pos("9:1"), pos("9:2")}
	if log.Len() != int64(len(all)) {
		t.Fatalf("length %d, want %d", log.Len(), len(all))
	}
	for i, p := range all {
		if log.At(int64(i)) != p || log.Index(p) != int64(i) || !log.Has(p) {
			t.Errorf("entry %d is %v with index %d, want %v", i, log.At(int64(i)), log.Index(p), p)
		}
	}
	for _, p := range append([]Position{NoPosition, pos("2:9"), pos("3:-1"), pos("3:2"), pos("5:5"), pos("7:4"), pos("9:3"), pos("11:0")}, all...) {
		index, next := 0, NoPosition
		for _, q := range all {
			if q.Before(p) {
				index++
			} else if p.Before(q) {
				next = q
				break
			}
		}
		got, found := log.Next(p)
		if log.Index(p) != int64(index) || got != next || found != (next != NoPosition) {
			t.Errorf("%v: index %d, next %v; want %d, %v", p, log.Index(p), got, index, next)
		}
	}
	empty := Log{Last: pos("7:-1")}
	if _, found := empty.First(); found || empty.Len() != 0 || empty.End() != pos("7:0") {
		t.Errorf("an empty log begins at %v", empty.End())
	}
}
