package admin_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/leaktest"
	"pointsman/store"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// rig is some proxies on one map, each with its operations port.
type rig struct {
	t       testing.TB
	st      *store.Memory
	net     *admintest.Net
	proxies map[string]*admintest.Proxy
	stores  map[string]*store.Memory
	servers map[string]*admin.Server
	listed  map[string][]string // topics that each cluster has
	work    *admintest.Work
	// salvaged is what the last salvage asked the clusters for.
	salvaged switching.SalvageRequest
	switches int // written by other
}

// newRig starts proxies that know the clusters a, b and c; a is the default.
func newRig(t testing.TB, ids ...string) *rig {
	t.Helper()
	r := &rig{t: t, st: store.NewMemory(), net: &admintest.Net{}, proxies: map[string]*admintest.Proxy{}, stores: map[string]*store.Memory{}, servers: map[string]*admin.Server{}, listed: map[string][]string{}, work: &admintest.Work{}}
	t.Cleanup(func() { r.st.Close() })
	for _, id := range ids {
		r.start(id, "a", "b", "c")
	}
	return r
}

func (r *rig) start(id string, clusters ...string) *admintest.Proxy {
	r.t.Helper()
	st := r.st.Join()
	r.t.Cleanup(func() { st.Close() })
	p := admintest.Start(r.t, st, id, clusters...)
	s := admin.New(admin.Config{Store: st, Proxy: p, Check: p.Check, Failover: r.work, Plan: admintest.Plan(st, r.listed), PeerTransport: r.net, Salvage: func(_ context.Context, q switching.SalvageRequest) (switching.Salvage, error) {
		r.salvaged = q
		return switching.Salvage{From: q.From, To: q.To}, nil
	}})
	r.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			r.t.Errorf("shutdown of %s: %v", id, err)
		}
	})
	r.net.Add(id+":7780", s.Handler())
	r.proxies[id], r.stores[id], r.servers[id] = p, st, s
	return p
}

func (r *rig) client(id string) *admin.Client {
	r.t.Helper()
	c, err := admin.NewClient("http://"+id+":7780", 30*time.Second, r.net)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// clients gives the proxy id open producers and consumers.
func (r *rig) clients(id, base string, producers, consumers int) {
	r.proxies[id].Do(func(f *admintest.Fields) {
		f.Clients[base] = admin.HandleCount{Producers: producers, Consumers: consumers}
	})
}

// set maps without questions.
func (r *rig) set(name, cluster string) admin.ChangeResult {
	r.t.Helper()
	res, err := r.client("p1").Set(r.t.Context(), admin.SetRequest{Name: name, Cluster: cluster, ChangeOptions: admin.ChangeOptions{Immediate: true, Who: "setup"}})
	if err != nil {
		r.t.Fatalf("set %s %s: %v", name, cluster, err)
	}
	return res
}

// stored is what the store says of a topic now.
func (r *rig) stored(name string) route.Decision {
	r.t.Helper()
	topic, err := route.ParseTopic(name)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.storedTable().Decide(topic, "a")
}

// served tells whether a proxy's map is what the store has.
func (r *rig) served(table *route.Table) bool { return table.Digest() == r.storedTable().Digest() }

func (r *rig) storedTable() *route.Table {
	r.t.Helper()
	entries, err := r.st.Entries(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	rules, err := r.st.Rules(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	buckets := map[int][]route.Entry{}
	for _, e := range entries {
		buckets[route.Bucket(e.Topic)] = append(buckets[route.Bucket(e.Topic)], e)
	}
	table, _, err := route.Empty().With(buckets, &rules)
	if err != nil {
		r.t.Fatal(err)
	}
	return table
}

func (r *rig) expect(name, cluster string, epoch uint64) {
	r.t.Helper()
	if d := r.stored(name); d.Cluster != cluster || d.Epoch != epoch {
		r.t.Errorf("%s is on %q, epoch %d; want %q, epoch %d", name, d.Cluster, d.Epoch, cluster, epoch)
	}
}

// switchAndWait starts a switch at p1 and waits for its end.
func (r *rig) switchAndWait(req admin.SwitchRequest) (admin.SwitchStatus, error) {
	r.t.Helper()
	c := r.client("p1")
	st, err := c.StartSwitch(r.t.Context(), req)
	if err != nil {
		return st, err
	}
	return c.WaitSwitch(r.t.Context(), st.ID, nil)
}

// refusal is an error as an operator reads it.
func refusal(t testing.TB, err error) string {
	t.Helper()
	var e *admin.Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %v (%T), want an *admin.Error", err, err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d %s: %s\n", e.Code.Status(), e.Code, e.Message)
	for _, d := range e.Details {
		fmt.Fprintf(&b, "  - %+v\n", d)
	}
	if e.Remedy != "" {
		fmt.Fprintf(&b, "  remedy: %s\n", e.Remedy)
	}
	return b.String()
}

// do sends a raw request to p1.
func (r *rig) do(method, path, body string, header ...string) (int, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://p1:7780"+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.net.RoundTrip(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}
