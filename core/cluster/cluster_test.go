package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

func testKeys(t testing.TB) TagKeys {
	t.Helper()
	keys, err := NewTagKeys([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func mustSet(t testing.TB, configs ...Config) *Set {
	t.Helper()
	s, err := NewSet(configs, testKeys(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustBrokers(t testing.TB, s *Set, cluster string, brokers ...Broker) *Set {
	t.Helper()
	next, err := s.WithBrokers(cluster, brokers)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func get(t testing.TB, s *Set, name string) *Cluster {
	t.Helper()
	c, ok := s.Get(name)
	if !ok {
		t.Fatalf("no cluster %q", name)
	}
	return c
}

func TestEveryFaultOfAConfigurationIsNamed(t *testing.T) {
	keys := testKeys(t)
	_, err := NewSet([]Config{
		{Name: ""}, {Name: "a b"}, {Name: strings.Repeat("x", 64)}, {Name: "twice"}, {Name: "twice"},
		{Name: "u", ServiceURLs: []string{"pulsar://h:6650", "pulsar+ssl://h:6651", "h:6650", "pulsar://h1:6650,h2:0", "pulsar://"}},
		{Name: "v", TLS: true, ServiceURLs: []string{"pulsar://plain:6650"}},
		{Name: "p", Allow: []string{"h", "h:0", "h:9-8", ":6650", "h:http", "a/b:1"}},
		{Name: "r", Resolve: map[string]string{"broker": "10.0.0.1:6650", "broker:6650": "pulsar://x"}},
	}, keys)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		`cluster ""`, `cluster "a b"`, "1 to 63 letters", `"twice" is configured twice`,
		`"pulsar+ssl://h:6651": all brokers`, `"pulsar://plain:6650": all brokers`, `"h:6650"`, `"h2:0"`, `"pulsar://"`, `pattern "h"`, `pattern "h:0"`, "range is empty", `pattern ":6650"`, `pattern "h:http"`, `pattern "a/b:1"`,
		`address "broker": it has no port`, `address "pulsar://x": it has a scheme`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not mention %s:\n%v", want, err)
		}
	}
	if _, err := NewSet(nil, TagKeys{}); err == nil {
		t.Error("a set without a key is accepted")
	}
}

func TestAClusterKnowsItsBrokersByDiscoveryServiceURLAndAllowList(t *testing.T) {
	s := mustSet(t, Config{Name: "a", ServiceURLs: []string{"pulsar://s1:6650,s2", "pulsar://[::1]:6651/"},
		Allow: []string{"*.svc:6650", "10.1.2.*:6650-6659", "fix.example.com.:7000"}, WebURL: "http://w", ListenerName: "l"})
	c := get(t, s, "a")
	if want := []string{"s1:6650", "s2:6650", "[::1]:6651"}; !slices.Equal(c.Brokers(), want) {
		t.Errorf("before discovery lookups begin at %v, want %v", c.Brokers(), want)
	}
	s2 := mustBrokers(t, s, "a", Broker{Addr: "b1:6650", Aliases: []string{"ext-1:6650"}}, Broker{Addr: "B2.example.com:6650"})
	c2 := get(t, s2, "a")
	if want := []string{"b1:6650", "B2.example.com:6650"}; !slices.Equal(c2.Brokers(), want) {
		t.Errorf("after discovery lookups begin at %v, want %v", c2.Brokers(), want)
	}
	knows := func(broker string, before, after bool) {
		t.Helper()
		if c.Knows(broker) != before || c2.Knows(broker) != after {
			t.Errorf("Knows(%q) = %v, after discovery %v; want %v, %v", broker, c.Knows(broker), c2.Knows(broker), before, after)
		}
	}
	knows("s1:6650", true, true)
	knows("b1:6650", false, true)
	knows("ext-1:6650", false, true)
	knows("b2.EXAMPLE.com.:6650", false, true) // names compare without case and trailing dot
	knows("b1:6651", false, false)
	knows("x.y.svc:6650", true, true)
	knows("X.SVC:6650", true, true)
	knows("x.svc:22", false, false)
	knows("svc:6650", false, false)
	knows("10.1.2.3:6655", true, true)
	knows("10.1.2.3:6660", false, false)
	knows("10.1.3.3:6655", false, false)
	knows("fix.example.com:7000", true, true)
	knows("[::1]:6651", true, true)
	knows("", false, false)
	knows("x.svc", false, false)

	gone := mustBrokers(t, s2, "a")
	if got := get(t, gone, "a"); got.Knows("b1:6650") || len(got.Brokers()) != 3 {
		t.Error("a broker that left discovery is still known")
	}
	if c.WebURL() != "http://w" || c.ListenerName() != "l" || c.Name() != "a" {
		t.Error("the configuration got lost")
	}
}

func TestABrokerWithoutAUsableAddressIsNamedAndDoesNotHideTheOthers(t *testing.T) {
	s, err := mustSet(t, Config{Name: "a"}).WithBrokers("a", []Broker{{Addr: "b1"}, {Addr: "b2:6650", Aliases: []string{"x:99999", "y:1"}}})
	if err == nil || !strings.Contains(err.Error(), `"b1": it has no port`) || !strings.Contains(err.Error(), `"x:99999"`) {
		t.Errorf("error %v", err)
	}
	if c := get(t, s, "a"); !c.Knows("b2:6650") || !c.Knows("y:1") || !slices.Equal(c.Brokers(), []string{"b2:6650"}) {
		t.Errorf("brokers %v", c.Brokers())
	}
}

func TestASnapshotNeverChanges(t *testing.T) {
	s := mustSet(t, Config{Name: "b"}, Config{Name: "a"})
	next := mustBrokers(t, s, "a", Broker{Addr: "x:1"}).WithHealth("a", Down).WithCapabilities("a", Capabilities{ProtocolVersion: 21})
	if c := get(t, s, "a"); c.Knows("x:1") || c.Health() != Unknown || c.Capabilities().Known() {
		t.Error("the old snapshot changed")
	}
	if c := get(t, next, "a"); !c.Knows("x:1") || c.Health() != Down || !c.Capabilities().Known() {
		t.Error("a With method undid another")
	}
	if get(t, s, "b") != get(t, next, "b") {
		t.Error("the other cluster was rebuilt")
	}
	if !slices.Equal(next.Names(), []string{"a", "b"}) {
		t.Errorf("names %v", next.Names())
	}
	if other, err := s.WithBrokers("none", nil); other != s || err != nil || s.WithHealth("none", Up) != s || s.WithCapabilities("none", Capabilities{}) != s {
		t.Error("an unknown cluster changes something")
	}
	if _, ok := s.Get("none"); ok {
		t.Error("an unknown cluster is found")
	}
}

func TestAClientIsPromisedWhatAllKnownClustersCanDo(t *testing.T) {
	s := mustSet(t, Config{Name: "a"}, Config{Name: "b"}, Config{Name: "c"})
	if s.Capabilities().Known() {
		t.Error("something is known of nobody")
	}
	s = s.WithCapabilities("a", Capabilities{21, FeatureAuthRefresh | FeatureTopicWatchers | FeaturePartialProducer})
	s = s.WithCapabilities("c", Capabilities{19, FeatureAuthRefresh | FeaturePartialProducer | FeatureReplDedupByLidAndEid})
	if got, want := s.Capabilities(), (Capabilities{19, FeatureAuthRefresh | FeaturePartialProducer}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	// The bits are the field numbers of the protocol's FeatureFlags.
	if FeatureAuthRefresh != 1<<1 || FeatureTopicWatchers != 1<<4 || FeatureScalableTopics != 1<<8 {
		t.Error("the feature bits moved")
	}
}

func TestResolveSaysWhereALogicalAddressIsDialled(t *testing.T) {
	c := get(t, mustSet(t, Config{Name: "a", Resolve: map[string]string{"broker-0:6650": "10.1.2.3:16650"}}), "a")
	for broker, want := range map[string]string{"broker-0:6650": "10.1.2.3:16650", "Broker-0.:6650": "10.1.2.3:16650", "broker-0:6651": "broker-0:6651", "other:1": "other:1"} {
		if got := c.DialAddr(broker); got != want {
			t.Errorf("DialAddr(%q) = %q, want %q", broker, got, want)
		}
	}
}

// LK-03: these are refused whatever vouches for them.
func TestForbiddenAddressesAreDeniedInEverySpelling(t *testing.T) {
	deny := func(addr string, plain, whenLinkLocalAllowed bool) {
		t.Helper()
		ip := netip.MustParseAddr(addr)
		strict := get(t, mustSet(t, Config{Name: "a"}), "a")
		lax := get(t, mustSet(t, Config{Name: "a", AllowLinkLocal: true}), "a")
		if DenyAddr(ip) != plain || strict.Denies(ip) != plain || lax.Denies(ip) != whenLinkLocalAllowed {
			t.Errorf("%s: DenyAddr %v, Denies %v, with allow_link_local %v; want %v, %v, %v", addr, DenyAddr(ip), strict.Denies(ip), lax.Denies(ip), plain, plain, whenLinkLocalAllowed)
		}
	}
	deny("169.254.1.1", true, false)
	deny("fe80::1", true, false)
	deny("fe80::1%eth0", true, false)
	deny("febf::1", true, false)
	deny("::ffff:169.254.1.1", true, false)
	deny("64:ff9b::169.254.1.1", true, false)
	deny("::169.254.1.1", true, false)
	deny("169.254.169.254", true, true)
	deny("::ffff:169.254.169.254", true, true)
	deny("64:ff9b::a9fe:a9fe", true, true)
	deny("169.254.170.2", true, true)
	deny("fd00:ec2::254", true, true)
	deny("fd00:ec2::254%eth0", true, true)
	deny("64:ff9b::a9fe:a9fe%1", true, true)
	deny("0.0.0.0", true, true)
	deny("0.1.2.3", true, true)
	deny("::", true, true)
	deny("::ffff:0.0.0.0", true, true)
	deny("224.0.0.1", true, true)
	deny("ff02::1", true, true)
	deny("255.255.255.255", true, true)
	for _, fine := range []string{"127.0.0.1", "::1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "8.8.8.8", "fd00::1", "2001:db8::1", "64:ff9b::8.8.8.8", "169.253.0.1"} {
		deny(fine, false, false)
	}
	if !DenyAddr(netip.Addr{}) {
		t.Error("the zero address is allowed")
	}
}

func TestGlobsMatchRunsOfCharacters(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"*", "", true}, {"*", "abc", true}, {"a*", "abc", true}, {"a*", "ba", false}, {"*c", "abcc", true}, {"a*c", "abcb", false},
		{"a*b*c", "aXbYbZc", true}, {"abc", "abc", true}, {"abc", "abcd", false}, {"abcd", "abc", false}, {"a**c", "ac", true}, {"", "", true}, {"", "a", false},
	} {
		if got := glob(c.pattern, c.s); got != c.want {
			t.Errorf("glob(%q, %q) = %v", c.pattern, c.s, got)
		}
	}
	if glob(strings.Repeat("*a", 100), strings.Repeat("a", 250)+"b") {
		t.Error("a pathological pattern matches")
	}
}

func TestHealthHasHysteresis(t *testing.T) {
	start := time.Unix(1000, 0)
	policy := HealthPolicy{Failures: 3, Over: 5 * time.Second, Successes: 2}
	var h Health
	at := func(seconds float64, ok bool, want State) {
		t.Helper()
		h = h.Observe(start.Add(time.Duration(seconds*float64(time.Second))), ok, policy)
		if h.State != want {
			t.Errorf("at %v s after ok=%v: %v, want %v", seconds, ok, h.State, want)
		}
	}
	at(0, true, Up)
	for range 100 {
		at(1, false, Up) // a burst in one moment is one event
	}
	at(5.9, false, Up)
	at(6, false, Down)
	if !h.Since.Equal(start.Add(6 * time.Second)) {
		t.Errorf("since %v", h.Since)
	}
	at(7, true, Down)
	at(8, false, Down) // breaks the run
	at(9, true, Down)
	at(10, true, Up)
	at(11, false, Up)
	at(20, false, Up) // long enough, but too few
	at(21, true, Up)  // starts over
	at(22, false, Up)
	at(23, false, Up)
	at(27, false, Down)

	h = Health{}
	at(0, false, Unknown)
	at(1, false, Unknown)
	at(5, false, Down) // a cluster that never answered becomes down as well
	h = Health{}
	at(0, false, Unknown)
	at(1, true, Up)
	if h := (Health{}).Observe(start, true, policy); h.State != Up || !h.Since.Equal(start) {
		t.Errorf("the first success gives %+v", h)
	}
	if Unknown.String() != "unknown" || Up.String() != "up" || Down.String() != "down" {
		t.Error("the names of the states changed: metrics depend on them")
	}
}

// Two clusters by service_url whose brokers have the same advertised names: only resolve tells them apart (LK-01).
func TestWhatResolveNamesIsKnown(t *testing.T) {
	set, err := NewSet([]Config{
		{Name: "a", ServiceURLs: []string{"pulsar://10.0.0.1:6650"}, Resolve: map[string]string{"broker-0:6650": "10.0.0.1:6650"}},
		{Name: "b", ServiceURLs: []string{"pulsar://10.0.1.1:6650"}, Resolve: map[string]string{"broker-0:6650": "10.0.1.1:6650"}},
	}, testKeys(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range set.Names() {
		if c, _ := set.Get(name); !c.Knows("broker-0:6650") {
			t.Errorf("cluster %s does not know broker-0:6650, which its resolve names", name)
		}
	}
}

func TestAClusterIsSpokenToByTLSOrNot(t *testing.T) {
	set := mustSet(t, Config{Name: "plain", ServiceURLs: []string{"pulsar://h1,h2:1"}}, Config{Name: "tls", ServiceURLs: []string{"pulsar+ssl://H1.,[::1]:1"}},
		Config{Name: "named", TLS: true, ServerName: "broker.example.com"})
	for name, want := range map[string]struct {
		tls          bool
		brokers      string
		serverName   string
		url, missing string // of a broker that tells a plaintext URL only
	}{
		"plain": {false, "[h1:6650 h2:1]", "broker-0", "pulsar://p:1", ""},
		"tls":   {true, "[H1.:6651 [::1]:1]", "broker-0", "", "brokerServiceUrlTls"},
		"named": {true, "[]", "broker.example.com", "", "brokerServiceUrlTls"},
	} {
		c, _ := set.Get(name)
		if c.TLS() != want.tls || fmt.Sprint(c.Brokers()) != want.brokers || c.ServerName("Broker-0.:6651") != want.serverName {
			t.Errorf("%s: TLS %v, brokers %v, server name %q; want %+v", name, c.TLS(), c.Brokers(), c.ServerName("Broker-0.:6651"), want)
		}
		if url, missing := c.OwnURL("pulsar://p:1", ""); url != want.url || missing != want.missing {
			t.Errorf("%s: of a plaintext URL it takes %q and misses %q; want %+v", name, url, missing, want)
		}
		if url, missing := c.OwnURL("pulsar://p:1", "pulsar+ssl://s:1"); missing != "" || (url == "pulsar+ssl://s:1") != want.tls {
			t.Errorf("%s: of both URLs it takes %q and misses %q", name, url, missing)
		}
	}
	if c, _ := set.Get("tls"); c.ServerName("[::1]:1") != "::1" {
		t.Errorf("the server name of an IPv6 address is %q", c.ServerName("[::1]:1"))
	}
	if c, _ := set.Get("plain"); true {
		if _, missing := c.OwnURL("", "pulsar+ssl://s:1"); missing != "brokerServiceUrl" {
			t.Errorf("a cluster without TLS misses %q", missing)
		}
	}
}
