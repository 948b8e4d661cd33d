// Package admintest stands in for running proxies in tests of the operations port and of the command line: they watch a memory
// store, serve what it says, report switches, and count the clients that a test gives them. It must never be part of the product.
package admintest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/store"
)

// Proxy is a stand-in that implements admin.Proxy. Change its fields only through Do.
type Proxy struct {
	mu sync.Mutex
	F  Fields

	store   store.Store
	table   *route.Table
	synced  chan struct{} // closed when the whole map is there
	changed chan struct{} // replaced, after the old one was closed, with each new table
}

// Fields are what a test sets.
type Fields struct {
	Info     store.Proxy
	Default  string
	Age      time.Duration
	Clusters []admin.ClusterStatus
	Clients  map[string]admin.HandleCount // by base name
	// Partitions by "cluster base"; absent is 0. Missing names the clusters that lack every namespace.
	Partitions  map[string]int
	Missing     map[string]bool
	LookupErr   error
	LookupDelay time.Duration
	HandlesErr  error
	NotReady    []string
	BeforeFlip  func() // runs while a switch asks for partitions, just before it writes
	NoAcks      bool   // never reports a switch
	// Sets are what Together tells.
	Sets [][]string
	// Preflight, when not nil, adds to what Check finds.
	Preflight  func(r switching.CheckRequest, p *switching.Preflight) error
	Unresolved int
}

// Start makes a proxy called id with the given clusters, registers it at st and lets it follow the map until the test ends.
func Start(t testing.TB, st store.Store, id string, clusters ...string) *Proxy {
	t.Helper()
	p := &Proxy{store: st, table: route.Empty(), synced: make(chan struct{}), changed: make(chan struct{})}
	p.F.Info = store.Proxy{
		ID: id, Incarnation: id + "-1", Version: "0.0.0-test", Advertised: "pulsar://" + id + ":6650", Ops: "http://" + id + ":7780",
		Clusters: clusters, Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Live: true,
	}
	p.F.Clients = map[string]admin.HandleCount{}
	p.F.Partitions = map[string]int{}
	p.F.Missing = map[string]bool{}
	if len(clusters) > 0 {
		p.F.Default = clusters[0]
	}
	for _, c := range clusters {
		p.F.Clusters = append(p.F.Clusters, admin.ClusterStatus{Name: c, Health: "up", Discovery: "service_url", Brokers: []string{"broker-0." + c + ":6650"}, WebURL: "http://broker-0." + c + ":8080"})
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := st.Watch(ctx, func(u store.Update) { p.update(ctx, u) }); err != nil {
			t.Errorf("proxy %s: watch: %v", id, err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	<-p.synced
	p.Register(t)
	return p
}

// Register announces the proxy as it is now.
func (p *Proxy) Register(t testing.TB) {
	t.Helper()
	if err := p.store.Register(context.Background(), p.Info()); err != nil {
		t.Fatalf("register: %v", err)
	}
}

// Do changes or reads the fields.
func (p *Proxy) Do(f func(*Fields)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.F)
}

// update follows the map. Like a real proxy it reports a switch when it has dealt with the clients of its topic.
func (p *Proxy) update(ctx context.Context, u store.Update) {
	p.mu.Lock()
	before := p.table
	next, changes, err := before.With(u.Buckets, u.Rules)
	if err != nil {
		p.mu.Unlock()
		panic("admintest: the store delivered something unusable: " + err.Error())
	}
	p.table = next
	var acks []switching.Ack
	var ids []string
	report := func(id string, moves func(route.Topic) bool) {
		ack := switching.Ack{Proxy: p.F.Info.ID, Incarnation: p.F.Info.Incarnation, Unresolved: p.F.Unresolved, At: time.Now()}
		for base, n := range p.F.Clients {
			if t, err := route.ParseTopic(base); err == nil && moves(t) {
				ack.Producers += n.Producers
				ack.Consumers += n.Consumers
			}
		}
		ids, acks = append(ids, id), append(acks, ack)
	}
	for _, base := range changes.Topics {
		now, _ := next.Entry(base)
		was, _ := before.Entry(base)
		if now.Attempt > 0 {
			if a, ok := p.planned(was, now); ok {
				ids, acks = append(ids, now.SwitchID), append(acks, a)
			}
		} else if now.SwitchID != "" && now.SwitchID != was.SwitchID {
			report(now.SwitchID, func(t route.Topic) bool { return t.Base() == base })
		}
	}
	for _, scope := range changes.Scopes {
		now, _ := next.Rule(scope)
		if was, _ := before.Rule(scope); now.SwitchID != "" && now.SwitchID != was.SwitchID {
			report(now.SwitchID, func(t route.Topic) bool { return next.Decide(t, p.F.Default).SwitchID == now.SwitchID })
		}
	}
	noAcks := p.F.NoAcks
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	for i := range acks {
		if noAcks {
			break
		}
		if err := p.store.PutAck(ctx, ids[i], acks[i]); err != nil && ctx.Err() == nil && !errors.Is(err, store.ErrNotFound) {
			panic("admintest: " + err.Error())
		}
	}
	if u.Synced {
		select {
		case <-p.synced:
		default:
			close(p.synced)
		}
	}
}

// planned is what a real proxy reports of an entry in a planned switch. mu is held.
func (p *Proxy) planned(was, now route.Entry) (a switching.Ack, ok bool) {
	a = switching.Ack{Attempt: now.Attempt, Proxy: p.F.Info.ID, Incarnation: p.F.Info.Incarnation, At: time.Now()}
	n := p.F.Clients[now.Topic]
	switch {
	case now.State == route.StatePrepared:
		a.Phase = switching.StatePrepared
	case now.State == route.StateFenced:
		a.Phase, a.Clean, a.Producers, a.Consumers = switching.StateFenced, true, n.Producers, n.Consumers
	case was.Cluster != "" && was.Cluster != now.Cluster:
		a.Phase, a.Producers, a.Consumers = switching.StateEvicting, n.Producers, n.Consumers
	default:
		return a, false // given back
	}
	return a, true
}

// Check is the preflight of planned switches: Fields.Preflight, or one that finds all fine.
func (p *Proxy) Check(_ context.Context, r switching.CheckRequest) (switching.Preflight, error) {
	p.mu.Lock()
	judge := p.F.Preflight
	p.mu.Unlock()
	pre := switching.Preflight{Topic: r.Topic, From: r.From, To: r.To, Findings: []switching.Finding{}, Subscriptions: []switching.Carried{}, At: time.Now()}
	pre.Add(switching.Finding{Item: "clusters", Verdict: switching.Fine, Evidence: "both answer, and have the namespace"})
	pre.Forecast = &switching.Forecast{HoldMillis: 180, Producers: r.Handles.Producers, Consumers: r.Handles.Consumers, Connections: 2, BytesIn: 1_200_000, BytesOut: 2400}
	if judge != nil {
		if err := judge(r, &pre); err != nil {
			return switching.Preflight{}, err
		}
	}
	return pre, nil
}

// Await waits until the map that the proxy serves is as wanted.
func (p *Proxy) Await(t testing.TB, what string, wanted func(*route.Table) bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		p.mu.Lock()
		table, changed := p.table, p.changed
		p.mu.Unlock()
		if wanted(table) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("the proxy never came to serve %s", what)
		}
	}
}

// Table, DefaultCluster, MapAge, Clusters, Lookup, Partitions, Handles, Ready and Info are admin.Proxy.

func (p *Proxy) Table() *route.Table {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.table
}

func (p *Proxy) DefaultCluster() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.F.Default
}

func (p *Proxy) MapAge() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.F.Age
}

func (p *Proxy) Clusters() []admin.ClusterStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.F.Clusters)
}

func (p *Proxy) Lookup(ctx context.Context, cluster, topic string) (admin.LookupAnswer, error) {
	p.mu.Lock()
	delay := p.F.LookupDelay
	p.mu.Unlock()
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return admin.LookupAnswer{}, ctx.Err()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.F.LookupErr != nil {
		return admin.LookupAnswer{}, p.F.LookupErr
	}
	return admin.LookupAnswer{Broker: "broker-0." + cluster + ":6650", Tagged: fmt.Sprintf("broker-0.%s.pm-test:6650", cluster)}, nil
}

func (p *Proxy) Partitions(_ context.Context, cluster, base string) (int, error) {
	p.mu.Lock()
	hook := p.F.BeforeFlip
	p.mu.Unlock()
	if hook != nil {
		hook()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.F.Missing[cluster] {
		return 0, fmt.Errorf("partitions of %s: %w", base, admin.ErrNamespaceNotFound)
	}
	if p.F.LookupErr != nil {
		return 0, p.F.LookupErr
	}
	return p.F.Partitions[cluster+" "+base], nil
}

func (p *Proxy) Handles(_ context.Context, name string) (admin.Handles, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := admin.Handles{Topics: map[string]admin.HandleCount{}}
	for base, n := range p.F.Clients {
		if t, err := route.ParseTopic(base); err != nil || base != name && !t.In(name) {
			continue
		}
		h.Topics[base] = n
		h.Producers += n.Producers
		h.Consumers += n.Consumers
	}
	return h, p.F.HandlesErr
}

// Together is admin.Proxy.
func (p *Proxy) Together(context.Context, string) ([][]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.F.Sets, nil
}

func (p *Proxy) Ready() (bool, []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.F.NotReady) == 0, slices.Clone(p.F.NotReady)
}

func (p *Proxy) Info() store.Proxy {
	p.mu.Lock()
	defer p.mu.Unlock()
	info := p.F.Info
	info.Digest, info.Entries = p.table.Digest(), p.table.Len()
	return info
}

// Net carries requests to handlers by host, without sockets: tests with a faked clock can use it.
type Net struct {
	mu    sync.Mutex
	hosts map[string]http.Handler
}

// Add makes h answer for host ("p1:7780").
func (n *Net) Add(host string, h http.Handler) {
	n.mu.Lock()
	defer n.mu.Unlock()
	hosts := maps.Clone(n.hosts)
	if hosts == nil {
		hosts = map[string]http.Handler{}
	}
	hosts[host] = h
	n.hosts = hosts
}

// RoundTrip is http.RoundTripper.
func (n *Net) RoundTrip(r *http.Request) (*http.Response, error) {
	n.mu.Lock()
	h := n.hosts[r.URL.Host]
	n.mu.Unlock()
	if h == nil {
		return nil, errors.New("connection refused")
	}
	done := make(chan *http.Response, 1)
	go func() {
		w := httptest.NewRecorder()
		w.Body = &bytes.Buffer{}
		h.ServeHTTP(w, r)
		done <- w.Result()
	}()
	select {
	case resp := <-done:
		resp.Request = r
		return resp, nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}
