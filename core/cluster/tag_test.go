package cluster

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"testing"
)

// A host that all measured clients take: see the rules at Tag.
var clientHost = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]([a-z0-9-]*[a-z0-9])?$`)

// checkTagged fails when a client would not take the address.
func checkTagged(t testing.TB, tagged string, port uint16) {
	t.Helper()
	host, gotPort, err := splitAddr(tagged)
	if err != nil || gotPort != port {
		t.Fatalf("%q: port %d, %v; want port %d", tagged, gotPort, err, port)
	}
	if !clientHost.MatchString(host) || len(host) > 253 {
		t.Fatalf("%q (%d bytes) is no host that every client takes", host, len(host))
	}
	for label := range strings.SplitSeq(host, ".") {
		if len(label) > 63 {
			t.Fatalf("%q has a label of %d bytes", host, len(label))
		}
	}
	if u, err := url.Parse("pulsar://" + tagged); err != nil || u.Host != tagged {
		t.Fatalf("%q is no URL: %v", tagged, err)
	}
}

func TestATaggedAddressIsReadableAndComesBack(t *testing.T) {
	name := "us-east_1.Prod"
	s := mustSet(t, Config{Name: "a"}, Config{Name: name}, Config{Name: strings.Repeat("_", 63)})
	is := func(cluster, broker, wantPrefix string) {
		t.Helper()
		tagged := s.Tag(cluster, broker)
		_, port, err := splitAddr(broker)
		if err != nil {
			t.Fatal(err)
		}
		checkTagged(t, tagged, port)
		if !strings.HasPrefix(tagged, wantPrefix+".pm-") {
			t.Errorf("Tag(%q, %q) = %q, want %q first", cluster, broker, tagged, wantPrefix)
		}
		if again := s.Tag(cluster, broker); again != tagged {
			t.Errorf("the tag of %q changes: %q, %q", broker, tagged, again)
		}
		got, err := s.Resolve(tagged)
		if want := (Target{cluster, broker, true}); err != nil || got != want {
			t.Errorf("Resolve(%q) = %+v, %v; want %+v", tagged, got, err, want)
		}
	}
	is("a", "broker-0:6650", "broker-0.a")
	is("a", "pulsar-broker-0.pulsar.svc.cluster.local:6650", "pulsar-broker-0.pulsar.svc.cluster.local.a")
	is(name, "broker-0:65535", "broker-0.us-eastxq5f1xq2exq50rod")
	is("a", "Broker_0:1", "xq42rokerxq5f0.a")
	is("a", "10.1.2.3:6650", "10.1.2.3.a")
	is("a", "[2001:db8::1]:6650", "2001xq3adb8xq3axq3a1.a")
	is("a", "broker.:6650", "brokerxq2e.a")
	is("a", ".b:1", "xq2eb.a")
	is("a", "a..b:1", "a.xq2eb.a")
	is("a", "-a-.-b-:1", "xq2daxq2d.xq2dbxq2d.a")
	is("a", "a---b:1", "a---b.a")
	is("a", "maxqueue:1", "maxq78queue.a")
	is("a", "xxq5f:1", "xxq78q5f.a")
	is("a", "pm-aaaa-bbbbbbbbbbbbbbbb:1", "pm-aaaa-bbbbbbbbbbbbbbbb.a")
	is("a", strings.Repeat("l", 64)+":1", strings.Repeat("l", 60)+"xqz."+strings.Repeat("l", 4)+".a")
	is("a", strings.Repeat("x", 60)+"-q:1", strings.Repeat("x", 60)+"xqz.xq2dq.a") // a hyphen never begins a label
	is("a", strings.Repeat("d.", 100)+"com:1", strings.Repeat("d.", 100)+"com.a")
	// A cluster name that needs breaks of its own.
	if tagged := s.Tag(strings.Repeat("_", 63), "b:1"); !strings.Contains(tagged, ".ph-") {
		t.Errorf("%q is not in hash form", tagged)
	}
	long := strings.Repeat("c", 50) + strings.Repeat("_", 13)
	s2 := mustSet(t, Config{Name: long})
	tagged := s2.Tag(long, "b:1")
	checkTagged(t, tagged, 1)
	if got, err := s2.Resolve(tagged); err != nil || got != (Target{long, "b:1", true}) {
		t.Errorf("Resolve(%q) = %+v, %v", tagged, got, err)
	}
}

func TestAnAddressThatIsTooLongIsNamedByHashAndFoundAmongTheKnownBrokers(t *testing.T) {
	broker := strings.Repeat("very-long-label.", 15) + "example:6650"
	s := mustSet(t, Config{Name: "a"}, Config{Name: "b"})
	known := mustBrokers(t, s, "a", Broker{Addr: broker})
	tagged := known.Tag("a", broker)
	checkTagged(t, tagged, 6650)
	if !strings.Contains(tagged, ".nvery-long-label-very") || !strings.Contains(tagged, ".na.ph-") {
		t.Errorf("%q shows neither broker nor cluster", tagged)
	}
	if s.Tag("a", broker) != tagged || s.Tag("b", broker) == tagged {
		t.Error("the hash form depends on what is known, or not on the cluster")
	}
	if got, err := known.Resolve(tagged); err != nil || got != (Target{"a", broker, true}) {
		t.Errorf("%+v, %v", got, err)
	}
	// LK-09's kind: a broker that is gone cannot be named any more, and the error says what to do.
	wantFault(t, s, tagged, TargetUnknownBroker, "by hash", "new lookup")
	wantFault(t, known, strings.Replace(tagged, ".ph-", ".pm-", 1), TargetBadMAC, "check code")
	wantFault(t, known, strings.Replace(tagged, "nvery", "nvary", 1), TargetBadMAC)
}

func wantFault(t testing.TB, s *Set, target string, fault TargetFault, texts ...string) {
	t.Helper()
	got, err := s.Resolve(target)
	var te *TargetError
	if !errors.As(err, &te) || te.Fault != fault || got != (Target{}) {
		t.Errorf("Resolve(%.80q) = %+v, %v; want fault %v", target, got, err, fault)
		return
	}
	for _, text := range append(texts, "proxy_to_broker_url", "refused") {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("Resolve(%.80q): %q does not contain %q", target, err, text)
		}
	}
	if len(err.Error()) > 500 {
		t.Errorf("the error has %d bytes", len(err.Error()))
	}
}

// LK-01: the same broker name in two clusters gives two addresses, each of which finds its own cluster.
func TestEqualBrokerNamesOfTwoClustersAreToldApart(t *testing.T) {
	s := mustSet(t, Config{Name: "a"}, Config{Name: "b"})
	for _, c := range []string{"a", "b"} {
		s = mustBrokers(t, s, c, Broker{Addr: "broker-0:6650"})
	}
	a, b := s.Tag("a", "broker-0:6650"), s.Tag("b", "broker-0:6650")
	if a == b {
		t.Fatal("the same address")
	}
	for _, c := range []string{"a", "b"} {
		if got, err := s.Resolve(s.Tag(c, "broker-0:6650")); err != nil || got.Cluster != c {
			t.Errorf("%s: %+v, %v", c, got, err)
		}
	}
	wantFault(t, s, "broker-0:6650", TargetAmbiguous, "a, b", "broker-0:6650", "look the topic up")
}

// LK-03: an address that was never handed out.
func TestATargetThatNobodyVouchesForIsRefused(t *testing.T) {
	s := mustSet(t, Config{Name: "a", Allow: []string{"169.254.*:1-65535", "allowed:6650"}}, Config{Name: "lax", Allow: []string{"fe80*:6650", "169.254.169.254:80"}, AllowLinkLocal: true})
	s = mustBrokers(t, s, "a", Broker{Addr: "broker-0:6650"})
	for _, target := range []string{"evil.example.com:6650", "broker-0:22", "broker-0.a:6650", "10.0.0.1:6650", "metadata.google.internal:80"} {
		wantFault(t, s, target, TargetUnknownBroker, target, "no configured cluster")
	}
	wantFault(t, s, "169.254.1.1:6650", TargetDenied, "169.254.1.1:6650", `cluster "a"`)
	wantFault(t, s, "169.254.169.254:80", TargetAmbiguous)
	if got, err := s.Resolve("[fe80::1]:6650"); err != nil || got != (Target{Cluster: "lax", Broker: "[fe80::1]:6650"}) {
		t.Errorf("a link-local address that is configured: %+v, %v", got, err)
	}
	if got, err := s.Resolve("allowed:6650"); err != nil || got != (Target{Cluster: "a", Broker: "allowed:6650"}) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := s.Resolve("Broker-0.:6650"); err != nil || got.Cluster != "a" {
		t.Errorf("%+v, %v", got, err)
	}

	// A valid tag does not make a forbidden address diallable either, nor does a resolve entry.
	wantFault(t, s, s.Tag("a", "169.254.1.1:6650"), TargetDenied, "never dialled")
	wantFault(t, s, s.Tag("a", "[fd00:ec2::254]:80"), TargetDenied, "never dialled")
	wantFault(t, s, s.Tag("lax", "169.254.169.254:80"), TargetDenied)
	mapped := mustSet(t, Config{Name: "a", ServiceURLs: []string{"pulsar://b:6650"}, Resolve: map[string]string{"b:6650": "169.254.169.254:80"}})
	wantFault(t, mapped, "b:6650", TargetDenied, "169.254.169.254:80")

	// A broker of a cluster that this proxy does not have.
	other := mustSet(t, Config{Name: "z"})
	wantFault(t, s, other.Tag("z", "broker-0:6650"), TargetUnknownCluster, `cluster "z"`)
}

// LK-04: malformed targets.
func TestAMalformedTargetIsRefusedWithTheReason(t *testing.T) {
	s := mustSet(t, Config{Name: "a", Allow: []string{"*:1-65535"}})
	bad := func(target, reason string) {
		t.Helper()
		wantFault(t, s, target, TargetMalformed, reason)
	}
	bad("", "it is empty")
	bad("pulsar://h:6650", "it has a scheme")
	bad("h", "it has no port")
	bad("h:", "port is not a number")
	bad("h:0", "port is not a number")
	bad("h:65536", "port is not a number")
	bad("h:+1", "port is not a number")
	bad("h:06650", "port is not a number")
	bad("h:http", "port is not a number")
	bad(":6650", "it has no host")
	bad("::1", "IPv6 address without brackets")
	bad("2001:db8::1:6650", "IPv6 address without brackets")
	bad("[::1]", "it has no port")
	bad("[::1", "a character")
	bad("[::1]6650", "port is not a number")
	bad("[h]:6650", "a character")
	bad("[1.2.3.4]:6650", "a character")
	bad("user@h:6650", "a character")
	bad("h/x:6650", "a character")
	bad("h x:6650", "a character")
	bad("h\x00:6650", "a character")
	bad("hö:6650", "a character")
	bad("h1:6650,h2:6650", "a character")
	bad(strings.Repeat("h", 4096)+":6650", "longer than the 261 bytes")
	if got, err := s.Resolve("[::1]:6650"); err != nil || got.Broker != "[::1]:6650" {
		t.Errorf("an IPv6 literal in brackets: %+v, %v", got, err)
	}
}

func TestAnyChangeToATaggedAddressIsRefused(t *testing.T) {
	s := mustSet(t, Config{Name: "a"}, Config{Name: "b"})
	tagged := s.Tag("a", "broker-10:6650")
	for i := range len(tagged) {
		for _, c := range []byte("a1b-.x:") {
			if tagged[i] == c {
				continue
			}
			forged := tagged[:i] + string(c) + tagged[i+1:]
			if got, err := s.Resolve(forged); err == nil {
				t.Fatalf("%q is accepted as %+v (the real one is %q)", forged, got, tagged)
			}
		}
	}
	wantFault(t, s, strings.Replace(tagged, "broker-10", "broker-11", 1), TargetBadMAC, "check code")
	wantFault(t, s, strings.Replace(tagged, ".a.pm", ".b.pm", 1), TargetBadMAC)
	wantFault(t, s, strings.Replace(tagged, ":6650", ":22", 1), TargetBadMAC)
	wantFault(t, s, strings.Replace(tagged, "broker-10.", "", 1), TargetBadMAC)
	// Another spelling of the same broker is not the address that was handed out.
	wantFault(t, s, strings.Replace(tagged, "broker", "xq62roker", 1), TargetBadMAC)
	wantFault(t, s, strings.Replace(tagged, "broker", "brokerxqz.", 1), TargetBadMAC)
	wantFault(t, s, strings.Replace(tagged, "broker", "brokerxqzz", 1), TargetBadMAC)
	wantFault(t, s, strings.Replace(tagged, "broker-10.a.", "xq.a.", 1), TargetBadMAC)
}

func TestAKeyCanBeRotated(t *testing.T) {
	oldKey, newKey := []byte("0123456789abcdef"), []byte("fedcba9876543210")
	set := func(current []byte, previous ...[]byte) *Set {
		keys, err := NewTagKeys(current, previous...)
		if err != nil {
			t.Fatal(err)
		}
		s, err := NewSet([]Config{{Name: "a"}}, keys)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before, during, after := set(oldKey), set(newKey, oldKey), set(newKey)
	tagged := before.Tag("a", "b:1")
	if got, err := during.Resolve(tagged); err != nil || got.Broker != "b:1" {
		t.Errorf("during the rotation: %+v, %v", got, err)
	}
	if during.Tag("a", "b:1") != after.Tag("a", "b:1") || during.Tag("a", "b:1") == tagged {
		t.Error("the current key does not sign")
	}
	wantFault(t, after, tagged, TargetUnknownKey, before.keys.IDs()[0], after.keys.IDs()[0], "same tag key")

	if _, err := NewTagKeys(make([]byte, 15)); err == nil || !strings.Contains(err.Error(), "15 bytes") {
		t.Errorf("a short key: %v", err)
	}
	if _, err := NewTagKeys(newKey, nil); err == nil || !strings.Contains(err.Error(), "previous key 1") {
		t.Errorf("a short previous key: %v", err)
	}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, value := range []any{during.keys, during, *during} {
			if out := fmt.Sprintf(format, value); strings.Contains(out, string(newKey)) || strings.Contains(out, fmt.Sprint(newKey)) || strings.Contains(out, fmt.Sprintf("%#v", newKey)) {
				t.Errorf("%s shows the key: %s", format, out)
			}
		}
	}
	own := []byte("0123456789abcdef")
	keys, _ := NewTagKeys(own)
	clear(own)
	s, _ := NewSet([]Config{{Name: "a"}}, keys)
	if s.Tag("a", "b:1") != tagged {
		t.Error("the key shares memory with its argument")
	}
}

func TestABrokerURLIsRewrittenForBothKindsOfClients(t *testing.T) {
	s := mustSet(t, Config{Name: "a"})
	for _, in := range []string{"pulsar://broker:6650", "pulsar+ssl://broker:6650", "pulsar://broker:6650/"} {
		plain, tls, err := s.TagURL("a", in)
		if want := s.Tag("a", "broker:6650"); err != nil || plain != "pulsar://"+want || tls != "pulsar+ssl://"+want {
			t.Errorf("TagURL(%q) = %q, %q, %v", in, plain, tls, err)
		}
	}
	for _, in := range []string{"", "broker:6650", "http://broker:8080", "pulsar://broker", "pulsar://a:1,b:1", "pulsar://"} {
		if _, _, err := s.TagURL("a", in); err == nil || !strings.Contains(err.Error(), `"a"`) {
			t.Errorf("TagURL(%q): %v", in, err)
		}
	}
	if _, _, err := s.TagURL("z", "pulsar://broker:6650"); err == nil || !strings.Contains(err.Error(), `"z" is not configured`) {
		t.Errorf("an unknown cluster: %v", err)
	}
	if s.Tag("z", "b:1") != "" || s.Tag("a", "b") != "" {
		t.Error("something without an address has a tag")
	}
	if _, tls, err := ParseBrokerURL("pulsar+ssl://h:1"); !tls || err != nil {
		t.Error("pulsar+ssl is not seen as TLS")
	}
}

func TestTheFaultsAreAClosedListWithStableNames(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range TargetFaults() {
		if f.String() == "unknown" || seen[f.String()] {
			t.Errorf("fault %d is called %q", f, f)
		}
		seen[f.String()] = true
	}
	if TargetFault(len(seen)+1).String() != "unknown" || len(seen) != 7 {
		t.Error("a fault is missing from the list")
	}
}

func TestTheTagOfAKnownBrokerAllocatesNothing(t *testing.T) {
	s := mustBrokers(t, mustSet(t, Config{Name: "a"}), "a", Broker{Addr: "broker-0:6650"})
	if n := testing.AllocsPerRun(100, func() { s.Tag("a", "broker-0:6650") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzTagResolve: whatever has an address comes back from its tag exactly, through every key that is held.
func FuzzTagResolve(f *testing.F) {
	for _, seed := range []string{"broker-0", "B_0.", "::1", "a..b", "-x-", "xq5f", "xqz.", strings.Repeat("ab-.", 60), strings.Repeat("_", 61), "pm-aaaa-bbbbbbbbbbbbbbbb"} {
		f.Add("a", seed, uint16(6650))
		f.Add("C_1.x", seed, uint16(1))
	}
	f.Fuzz(func(t *testing.T, name, host string, port uint16) {
		broker := joinAddr(host, port)
		if !validName(name) {
			return
		}
		s := mustSet(t, Config{Name: name, AllowLinkLocal: true})
		tagged := s.Tag(name, broker)
		h, p, err := splitAddr(broker)
		if (err == nil) != (tagged != "") {
			t.Fatalf("Tag(%q) = %q, but splitting gives %v", broker, tagged, err)
		}
		if err != nil {
			return
		}
		checkTagged(t, tagged, p)
		if back, ok := unescape(escape(h, true)); !ok || back != h {
			t.Fatalf("%q escapes to %q and back to %q", h, escape(h, true), back)
		}
		// The hash form is found only among known brokers.
		got, err := mustBrokers(t, s, name, Broker{Addr: broker}).Resolve(tagged)
		var te *TargetError
		if errors.As(err, &te) && te.Fault == TargetDenied {
			return
		}
		if want := (Target{name, broker, true}); err != nil || got != want {
			t.Fatalf("Resolve(Tag(%q, %q) = %q) = %+v, %v", name, broker, tagged, got, err)
		}
	})
}

// FuzzResolveRefusesForgeries: an address is accepted only if Tag makes exactly it, and no input makes a panic or a long error.
func FuzzResolveRefusesForgeries(f *testing.F) {
	s := mustSet(f, Config{Name: "a"}, Config{Name: "b-2"})
	f.Add(s.Tag("a", "broker-0:6650"))
	f.Add(s.Tag("b-2", "[::1]:1"))
	f.Add(s.Tag("a", strings.Repeat("x.", 125)+"c:1"))
	f.Add("xqz.xqz.a.pm-aaaa-aaaaaaaaaaaaaaaa:1")
	f.Add("broker:6650")
	f.Add("pulsar://h:6650")
	f.Fuzz(func(t *testing.T, target string) {
		got, err := s.Resolve(target)
		if err != nil {
			var te *TargetError
			if !errors.As(err, &te) || te.Fault == 0 || got != (Target{}) || len(err.Error()) > 1000 {
				t.Fatalf("Resolve(%q) = %+v, %v", target, got, err)
			}
			return
		}
		if !got.Tagged || s.Tag(got.Cluster, got.Broker) != target {
			t.Fatalf("Resolve(%q) accepts %+v, whose tag is %q", target, got, s.Tag(got.Cluster, got.Broker))
		}
	})
}

func BenchmarkResolveTagged(b *testing.B) {
	s := mustSet(b, Config{Name: "a"})
	tagged := s.Tag("a", "broker-0.example.com:6650")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Resolve(tagged); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTagUnknownBroker(b *testing.B) {
	s := mustSet(b, Config{Name: "a"})
	b.ReportAllocs()
	for b.Loop() {
		s.Tag("a", "broker-0.example.com:6650")
	}
}
