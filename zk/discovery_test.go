package zk

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/internal/zktest"
)

// Registrations as brokers of Pulsar 4.0 write them, shortened: the modular load manager's and the extensible one's.
const (
	modular = `{"webServiceUrl":"http://broker-0:8080","webServiceUrlTls":null,"pulsarServiceUrl":"pulsar://broker-0:6650","pulsarServiceUrlTls":"pulsar+ssl://broker-0:6651",
		"persistentTopicsEnabled":true,"nonPersistentTopicsEnabled":true,"cpu":{"usage":1.5,"limit":200.0},"numTopics":3,"bundles":["public/default/0x00000000_0x40000000"],
		"lastUpdate":1714979289000,"startTimestamp":1714979280000,"protocols":{},"advertisedListeners":{"internal":{"brokerServiceUrl":"pulsar://10.0.0.1:6650","brokerServiceUrlTls":null,
		"brokerHttpUrl":null,"brokerHttpsUrl":null},"external":{"brokerServiceUrl":"pulsar://broker-0.example:6650"},"odd":{"brokerServiceUrl":"nonsense"}},
		"brokerId":"broker-0:8080","loadManagerClassName":"org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl","brokerVersionString":"4.0.8","loadReportType":"LocalBrokerData"}`
	extensible = `{"webServiceUrl":"http://broker-1:8080","webServiceUrlTls":"https://broker-1:8443","pulsarServiceUrl":"pulsar://broker-1:6650","pulsarServiceUrlTls":null,
		"advertisedListeners":{},"protocols":{},"persistentTopicsEnabled":true,"nonPersistentTopicsEnabled":true,
		"loadManagerClassName":"org.apache.pulsar.broker.loadbalance.extensions.ExtensibleLoadManagerImpl","startTimestamp":1714979281000,"brokerVersion":"4.0.8","properties":{}}`
)

func TestBothFormsOfRegistrationAreRead(t *testing.T) {
	got, err := parseBroker("broker-0:8080", []byte(modular))
	want := &Broker{ID: "broker-0:8080", ServiceURL: "pulsar://broker-0:6650", ServiceURLTLS: "pulsar+ssl://broker-0:6651", WebURL: "http://broker-0:8080",
		Version: "4.0.8", Started: time.UnixMilli(1714979280000), Listeners: map[string]Listener{
			"internal": {ServiceURL: "pulsar://10.0.0.1:6650"}, "external": {ServiceURL: "pulsar://broker-0.example:6650"}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("modular: %+v, %v; want %+v", got, err, want)
	}
	got, err = parseBroker("broker-1:8080", []byte(extensible))
	want = &Broker{ID: "broker-1:8080", ServiceURL: "pulsar://broker-1:6650", WebURL: "http://broker-1:8080", WebURLTLS: "https://broker-1:8443",
		Version: "4.0.8", Started: time.UnixMilli(1714979281000)}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("extensible: %+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []string{``, `null`, `[]`, `"text"`, `{}`, `{"pulsarServiceUrl":7}`, `{"pulsarServiceUrl":"http://x:1"}`, `{"pulsarServiceUrl":"pulsar://x"}`,
		`{"pulsarServiceUrl":"pulsar://:6650"}`, `{"pulsarServiceUrl":"pulsar://user:pw@x:6650"}`, `{"pulsarServiceUrl":"pulsar://x:6650","webServiceUrl":"x:80"}`} {
		if b, err := parseBroker("b", []byte(bad)); err == nil {
			t.Errorf("%s is taken: %+v", bad, b)
		}
	}
}

// brokerList is what a Discover says.
type brokerList struct {
	mu    sync.Mutex
	lists [][]Broker
}

func discover(t *testing.T, cfg DiscoveryConfig) *brokerList {
	t.Helper()
	l := &brokerList{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	cfg.Logger = testLog(t)
	go func() {
		done <- Discover(ctx, cfg, func(b []Broker) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.lists = append(l.lists, b)
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Discover: %v", err)
		}
	})
	return l
}

// await waits until the newest list has these ids.
func (l *brokerList) await(t *testing.T, ids ...string) {
	t.Helper()
	await(t, fmt.Sprintf("brokers %v", ids), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.lists) == 0 {
			return false
		}
		have := []string{}
		for _, b := range l.lists[len(l.lists)-1] {
			have = append(have, b.ID)
		}
		return slices.Equal(have, ids)
	})
}

func TestDiscoveryFollowsTheBrokersOfACluster(t *testing.T) {
	server := zktest.Start(t)
	root := chroot()
	cluster := open(t, Config{Servers: server.Addr()}) // only its connection is used
	relay := zktest.NewRelay(t, server.Addr())
	l := discover(t, DiscoveryConfig{Servers: "zk:" + relay.Addr() + root})
	l.await(t) // no such node yet: an empty list, which is said
	ctx := within(t, time.Minute)
	for _, path := range []string{root, root + "/loadbalance", root + brokersNode} {
		if err := cluster.ensure(ctx, path, nil, zk.WorldACL(zk.PermAll)); err != nil {
			t.Fatal(err)
		}
	}
	brokers := root + brokersNode + "/"
	raw(t, cluster, brokers+"broker-0:8080", []byte(modular))
	l.await(t, "broker-0:8080")
	// One that cannot be read hides no other, and is taken once it is mended.
	raw(t, cluster, brokers+"broker-9:8080", []byte(`{"pulsarServiceUrl":`))
	raw(t, cluster, brokers+"broker-1:8080", []byte(extensible))
	l.await(t, "broker-0:8080", "broker-1:8080")
	raw(t, cluster, brokers+"broker-9:8080", []byte(extensible))
	l.await(t, "broker-0:8080", "broker-1:8080", "broker-9:8080")
	// While the ensemble is away the last list stays, and what happened meanwhile arrives.
	l.mu.Lock()
	count := len(l.lists)
	l.mu.Unlock()
	relay.Cut()
	if err := cluster.delete(ctx, brokers+"broker-0:8080"); err != nil {
		t.Fatal(err)
	}
	await(t, "the loss to be seen", func() bool { _, open := relay.Connections(); return open == 0 })
	l.mu.Lock()
	if len(l.lists) != count {
		t.Errorf("%d lists while the ensemble is away", len(l.lists)-count)
	}
	l.mu.Unlock()
	relay.Restore()
	l.await(t, "broker-1:8080", "broker-9:8080")
	for _, id := range []string{"broker-1:8080", "broker-9:8080"} {
		if err := cluster.delete(ctx, brokers+id); err != nil {
			t.Fatal(err)
		}
	}
	l.await(t)
	raw(t, cluster, brokers+"broker-1:8080", []byte(extensible))
	l.await(t, "broker-1:8080")
}

func TestAnEnsembleThatHangsDelaysNoOther(t *testing.T) {
	server := zktest.Start(t)
	hanging := zktest.NewRelay(t, server.Addr())
	hanging.Hold()
	root := chroot()
	cluster := open(t, Config{Servers: server.Addr()})
	ctx := within(t, time.Minute)
	for _, path := range []string{root, root + "/loadbalance", root + brokersNode, root + brokersNode + "/broker-1:8080"} {
		if err := cluster.ensure(ctx, path, []byte(extensible), zk.WorldACL(zk.PermAll)); err != nil {
			t.Fatal(err)
		}
	}
	slow := discover(t, DiscoveryConfig{Servers: hanging.Addr() + root})
	fast := discover(t, DiscoveryConfig{Servers: server.Addr() + root})
	fast.await(t, "broker-1:8080")
	slow.mu.Lock()
	if len(slow.lists) != 0 {
		t.Error("an ensemble that hangs has said something")
	}
	slow.mu.Unlock()
	hanging.Release()
	slow.await(t, "broker-1:8080")
}

func TestDiscoveryRefusesAConfigurationThatCannotWork(t *testing.T) {
	for _, cfg := range []DiscoveryConfig{{}, {Servers: "etcd:x:1"}, {Servers: "x:1/a", Chroot: "/b"}, {Servers: "x:1", Chroot: "b"}} {
		if err := Discover(within(t, time.Second), cfg, func([]Broker) {}); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}

// FuzzRegistration: a broker that is taken has an address to dial, and only URLs that are what they should be.
func FuzzRegistration(f *testing.F) {
	f.Add([]byte(modular))
	f.Add([]byte(extensible))
	f.Add([]byte(`{"pulsarServiceUrl":"pulsar://[::1]:6650","advertisedListeners":{"":null,"a":[]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := parseBroker("id", data)
		if err != nil {
			return
		}
		if b.ServiceURL == "" && b.ServiceURLTLS == "" {
			t.Fatal("a broker without an address is taken")
		}
		if checkURLs("", b.ServiceURL, "pulsar", "", b.ServiceURLTLS, "pulsar+ssl", "", b.WebURL, "http", "", b.WebURLTLS, "https") != nil {
			t.Fatalf("%+v", b)
		}
		for name, l := range b.Listeners {
			if name == "" || checkURLs("", l.ServiceURL, "pulsar", "", l.ServiceURLTLS, "pulsar+ssl") != nil {
				t.Fatalf("%q: %+v", name, l)
			}
		}
	})
}
