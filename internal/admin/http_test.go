package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/golden"
)

// indented is an answer as a script sees it.
func indented(t *testing.T, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text) + "\n"
}

func TestExplainTellsWhoDecidedWhereItIsAndWhoDisagrees(t *testing.T) {
	r := newRig(t, "p1", "p2")
	var out strings.Builder
	explain := func(what, topic string) {
		t.Helper()
		x, err := r.client("p1").Explain(t.Context(), topic)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "== %s\n%s", what, indented(t, x))
	}
	served := func(topic, cluster string) {
		t.Helper()
		r.set(topic, cluster)
		for _, p := range r.proxies {
			p.Await(t, topic, r.served)
			p.Register(t)
		}
	}
	served(topic1, "b")
	r.clients("p1", topic1, 1, 2)
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Age = 2 * time.Second })
	explain("a partition of a mapped topic (LK-20)", "acme/orders/t1-partition-4")
	explain("by the configured default", topic2)
	served("acme", "c")
	explain("by a tenant's rule", "non-persistent://acme/bills/t3")
	explain("a system topic", "persistent://acme/orders/__change_events")
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.LookupErr = errors.New("broker-0.c:6650: TooManyRequests") })
	explain("a lookup that fails", topic2)
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Clusters = f.Clusters[:2] })
	explain("a cluster that this proxy does not know", topic2)
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Default = "" })
	explain("mapped by nothing", "persistent://other/ns/t")
	golden.File(t, "explain.txt", out.String())

	// A proxy that is behind is named, and so is an own map that is behind the store.
	r.set(topic3, "b")
	r.proxies["p1"].Await(t, topic3, r.served)
	x, err := r.client("p1").Explain(t.Context(), topic3)
	if err != nil || len(x.Disagree) != 1 || x.Disagree[0] != "p2" || !strings.Contains(strings.Join(x.Notes, "\n"), "another map is served by p2") {
		t.Errorf("explain = %+v, %v; p2 has announced an older digest", x, err)
	}
	list, err := r.client("p1").Proxies(t.Context())
	if err != nil || list.Agree != (list.Proxies[0].Digest == list.Proxies[1].Digest) || len(list.Proxies) != 2 {
		t.Errorf("proxies = %+v, %v", list, err)
	}
}

func TestClustersAreCountedAndProxiesThatDisagreeAreSeen(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.set(topic1, "b")
	r.set(topic2, "b")
	r.proxies["p1"].Await(t, "both", r.served)
	list, err := r.client("p1").Clusters(t.Context())
	if err != nil || list.Default != "a" || len(list.Clusters) != 3 || list.Clusters[1].Topics != 2 || list.Clusters[0].Topics != 0 {
		t.Errorf("clusters = %+v, %v", list, err)
	}
	// Both still announce the empty map, and p1 serves the new one.
	proxies, err := r.client("p1").Proxies(t.Context())
	if err != nil || proxies.Agree {
		t.Errorf("proxies = %+v, %v; they disagree", proxies, err)
	}
	// Only p2's announcement of itself is late.
	r.proxies["p1"].Register(t)
	r.proxies["p2"].Await(t, "both", r.served)
	if proxies, err = r.client("p2").Proxies(t.Context()); err != nil || !proxies.Agree {
		t.Errorf("proxies = %+v, %v; they agree", proxies, err)
	}
	r.proxies["p2"].Register(t)
	if proxies, err = r.client("p1").Proxies(t.Context()); err != nil || !proxies.Agree {
		t.Errorf("proxies = %+v, %v; they agree", proxies, err)
	}
}

func TestHandlesAreCountedForTopicsAndScopes(t *testing.T) {
	r := newRig(t, "p1")
	r.clients("p1", topic1, 1, 2)
	r.clients("p1", topic2, 4, 8)
	r.clients("p1", topic3, 16, 32)
	check := func(query string, producers, consumers int) {
		t.Helper()
		status, body := r.do("GET", "/api/v1/handles?"+query, "")
		var h admin.Handles
		if err := json.Unmarshal([]byte(body), &h); status != 200 || err != nil || h.Producers != producers || h.Consumers != consumers {
			t.Errorf("%s: %d %s, want %d and %d", query, status, body, producers, consumers)
		}
	}
	check("topic="+topic1, 1, 2)
	check("topic="+topic1+"&topic="+topic2, 5, 10)
	check("scope=acme/orders", 5, 10)
	check("scope=acme/orders&topic="+topic1, 5, 10) // counted once
	check("scope=acme", 21, 42)
	check("scope=*", 21, 42)
	check("scope=none/ns", 0, 0)
	var names []string
	for i := range 100 {
		names = append(names, fmt.Sprintf("acme/orders/n%d", i))
	}
	h, err := r.client("p1").Handles(t.Context(), append(names, topic1, "acme/bills"))
	if err != nil || h.Producers != 17 || len(h.Topics) != 2 {
		t.Errorf("a long list = %+v, %v", h, err)
	}
}

func TestHealthAndReadinessNeedNothing(t *testing.T) {
	r := newRig(t, "p1")
	check := func(path string, wantStatus int, wantBody string) {
		t.Helper()
		if status, body := r.do("GET", path, ""); status != wantStatus || strings.TrimSpace(body) != wantBody {
			t.Errorf("%s: %d %s, want %d %s", path, status, body, wantStatus, wantBody)
		}
	}
	check("/healthz", 200, "ok")
	check("/readyz", 200, `{"ready":true,"reasons":[]}`)
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.NotReady = []string{"draining"} })
	check("/healthz", 200, "ok") // ED-04: liveness does not depend on readiness
	check("/readyz", 503, `{"ready":false,"reasons":["draining"]}`)
}

func TestBadRequestsAreRefusedWithAText(t *testing.T) {
	r := newRig(t, "p1")
	check := func(what, method, path, body string, status int, text string, header ...string) {
		t.Helper()
		if got, answer := r.do(method, path, body, header...); got != status || !strings.Contains(answer, text) {
			t.Errorf("%s: %d %s, want %d with %q", what, got, answer, status, text)
		}
	}
	isJSON := []string{"Content-Type", "application/json"}
	check("an unknown path", "GET", "/api/v2/routes", "", 404, "there is no GET /api/v2/routes")
	check("the wrong method", "DELETE", "/api/v1/routes/set", "", 404, "there is no DELETE")
	check("a form", "POST", "/api/v1/routes/set", "name=x", 400, "send application/json", "Content-Type", "application/x-www-form-urlencoded")
	check("no JSON", "POST", "/api/v1/routes/set", "{", 400, "not the JSON expected", isJSON...)
	check("an unknown field", "POST", "/api/v1/routes/set", `{"names":"x"}`, 400, `unknown field \"names\"`, isJSON...)
	check("too large a body", "POST", "/api/v1/routes/set", `{"name":"`+strings.Repeat("x", 1<<20)+`"}`, 400, "above 1048576 bytes", isJSON...)
	check("a page of another origin", "POST", "/api/v1/routes/set", `{"name":"acme","cluster":"b"}`, 403, "cross-origin", "Content-Type", "application/json", "Origin", "http://evil.example", "Sec-Fetch-Site", "cross-site")
	r.expect(topic1, "a", 0)
}

func TestThePortServesMetricsAndEndsInTime(t *testing.T) {
	r := newRig(t)
	st := r.st.Join()
	t.Cleanup(func() { st.Close() })
	p := admintest.Start(t, st, "p1", "a")
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "pointsman_test", Help: "x"}, func() float64 { return 7 }))
	s := admin.New(admin.Config{Store: st, Proxy: p, Metrics: registry})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	c, err := admin.NewClient("http://"+ln.Addr().String(), time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if ready, err := c.Ready(t.Context()); err != nil || !ready.Ready {
		t.Errorf("ready = %+v, %v", ready, err)
	}
	resp, err := http.Get("http://" + ln.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || !strings.Contains(string(text), "pointsman_test 7") {
		t.Errorf("metrics = %s, %v", text, err)
	}
	http.DefaultClient.CloseIdleConnections()
	// A client that sends half a request must not keep the port from ending.
	half, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	if _, err := half.Write([]byte("POST /api/v1/routes/set HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	start := time.Now()
	_ = s.Shutdown(ctx)
	if took := time.Since(start); took > 20*time.Second { // it would wait for the rest of the request for 30 s
		t.Errorf("shutdown took %v", took)
	}
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	if _, err := c.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "no answer from the operations port http://127.0.0.1:") {
		t.Errorf("after the end: %v", err)
	}
}
