package app

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/prometheus/client_golang/prometheus"

	"pointsman/codec"
	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/internal/testkit/suite"
	"pointsman/internal/tlstest"
	"pointsman/store"
)

// authority signs for the proxy and for the brokers.
var authority = sync.OnceValue(func() *tlstest.CA {
	ca, err := tlstest.NewCA("app test")
	if err != nil {
		panic(err)
	}
	return ca
})

func issue(t *testing.T, names ...string) tls.Certificate {
	t.Helper()
	cert, err := authority().Issue(names...)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// tlsFiles writes the authority's certificate and the proxy's pair.
func tlsFiles(t *testing.T) (ca string, server config.TLS) {
	t.Helper()
	dir := t.TempDir()
	ca = filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, authority().PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	cert, key, err := tlstest.Write(dir, "proxy", issue(t, "localhost"))
	if err != nil {
		t.Fatal(err)
	}
	return ca, config.TLS{CertificateFile: cert, KeyFile: key, MinVersion: "1.2"}
}

// tlsRig is a rig with both listeners. Clusters named in certs have TLS, with those names in their brokers' certificates.
func tlsRig(t *testing.T, opts testkit.Options, certs map[string][]string, change func(*config.Config)) *rig {
	t.Helper()
	ca, server := tlsFiles(t)
	r := &rig{world: &world{}}
	opts.Brokers = max(opts.Brokers, 2)
	for i, c := range []**testkit.Cluster{&r.a, &r.b} {
		o := opts
		o.LedgerBase = uint64(1000 * (i + 1))
		o.Advertised = []string{"broker-0:6650", "broker-1:6650"}
		name := string(rune('a' + i))
		if names, ok := certs[name]; ok {
			o.TLS = &tls.Config{Certificates: []tls.Certificate{issue(t, names...)}}
		}
		*c = testkit.NewCluster(name, o)
		t.Cleanup((*c).Close)
	}
	r.cfg = r.config(func(cfg *config.Config) {
		cfg.TLS, cfg.Listeners.PulsarTLS = server, "127.0.0.1:0"
		for name := range certs {
			c := cfg.Clusters[name]
			c.ServiceURL = "pulsar+ssl://broker-0:6650,broker-1:6650"
			c.TLS = &config.ClusterTLS{CAFile: ca}
		}
		if change != nil {
			change(cfg)
		}
	})
	r.run(t, store.NewMemory(), r.cfg)
	return r
}

// tlsURL names the proxy as in its certificate.
func (r *rig) tlsURL() string {
	_, port, _ := net.SplitHostPort(r.app.PulsarTLSAddr())
	return "pulsar+ssl://localhost:" + port
}

func (r *rig) trusting(t *testing.T) func(*pulsar.ClientOptions) {
	t.Helper()
	ca, _ := tlsFiles(t)
	return func(o *pulsar.ClientOptions) { o.TLSTrustCertsFilePath, o.TLSValidateHostname = ca, true }
}

func (r *rig) tlsClient(t *testing.T) pulsar.Client {
	t.Helper()
	o := pulsar.ClientOptions{URL: r.tlsURL(), Logger: pulsarlog.DefaultNopLogger(), MetricsRegisterer: prometheus.NewRegistry(), OperationTimeout: 10 * time.Second}
	r.trusting(t)(&o)
	c, err := pulsar.NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

var brokerNames = []string{"broker-0", "broker-1"}

// Plaintext and TLS in any combination on both sides: a client sees no difference.
func TestAClientSeesNoDifferenceOverTLS(t *testing.T) {
	r := tlsRig(t, pinging, map[string][]string{"b": brokerNames}, nil)
	if _, err := r.admin.Set(t.Context(), admin.SetRequest{Name: "public/moved", Cluster: "b"}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		client, brokers string
		url             string
		namespace       string
		on              *testkit.Cluster
	}{
		{"TLS", "plain", r.tlsURL(), "public/default", r.a},
		{"TLS", "TLS", r.tlsURL(), "public/moved", r.b},
		{"plain", "TLS", r.url(), "public/moved", r.b},
	} {
		t.Run("client "+c.client+" brokers "+c.brokers, func(t *testing.T) {
			suite.Suite(t, c.url, suite.Options{Namespace: c.namespace, Prefix: "tls-" + c.client, Client: r.trusting(t), CreatePartitioned: func(topic string, n int) error {
				c.on.CreateTopic(topic, n)
				return nil
			}})
		})
	}
	if n := r.metric(t, "pointsman_loop_tls_handshakes_total"); n == 0 {
		t.Error("no TLS handshake was counted")
	}
	// Each is read a moment after the one before.
	longest := r.metric(t, "pointsman_loop_turn_max_seconds")
	turns := r.metric(t, "pointsman_loop_turn_seconds_count")
	all := r.metric(t, "pointsman_loop_turn_seconds_bucket", `le="+Inf"`)
	if busy := r.metric(t, "pointsman_loop_turn_seconds_sum"); turns == 0 || all < turns || longest <= 0 || longest > busy {
		t.Errorf("%v turns of the loops (%v a moment later) took %v s, the longest %v s", turns, all, busy, longest)
	}
}

// A live producer over TLS moves from a plaintext cluster to one with TLS, and back.
func TestASwitchBetweenAPlaintextAndATLSCluster(t *testing.T) {
	r := tlsRig(t, testkit.Options{}, map[string][]string{"b": brokerNames}, nil)
	const topic = "persistent://public/default/moving"
	f := startFollower(&follower{TB: t, addr: r.app.PulsarTLSAddr(), secure: &tls.Config{RootCAs: authority().Pool(), ServerName: "localhost"}, topic: topic, producer: true})
	f.mustSend(50)
	for _, to := range []*testkit.Cluster{r.b, r.a} {
		s, err := r.admin.StartSwitch(t.Context(), admin.SwitchRequest{Topics: []string{topic}, To: to.Name(), Mode: "immediate", Why: "test"})
		if err == nil {
			s, err = r.admin.WaitSwitch(t.Context(), s.ID, nil)
		}
		if err != nil || s.State != "done" {
			t.Fatalf("switch to %s: %+v, %v", to.Name(), s, err)
		}
		before := len(to.Messages(topic))
		f.mustSend(50)
		if got := len(to.Messages(topic)) - before; got < 50 {
			t.Errorf("%d of 50 messages are on %s after the switch", got, to.Name())
		}
	}
}

// AU-10: the certificates of b's brokers are for other names. Its clients are refused with a text that names host and cluster; a is not affected.
func TestAU10AWrongNameInTheCertificatesOfOneCluster(t *testing.T) {
	r := tlsRig(t, testkit.Options{}, map[string][]string{"a": brokerNames, "b": {"other.example.com"}}, func(cfg *config.Config) {
		cfg.Limits.LookupTimeout = config.Duration(4 * time.Second)
	})
	const onA, onB = "persistent://public/default/on-a", "persistent://public/default/on-b"
	if _, err := r.admin.Set(t.Context(), admin.SetRequest{Name: onB, Cluster: "b"}); err != nil {
		t.Fatal(err)
	}
	p, err := r.tlsClient(t).CreateProducer(pulsar.ProducerOptions{Topic: onA})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(t.Context(), &pulsar.ProducerMessage{Payload: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	c := r.connect(t, "")
	c.send(lookupCommand(onB, 1))
	text := c.expect(codec.TypeLookupResponse).GetLookupTopicResponse().GetMessage()
	for _, want := range []string{`cluster "b"`, `"broker-`, "other.example.com", "tls_handshake"} {
		if !strings.Contains(text, want) {
			t.Errorf("the lookup of a topic on b is answered %q, which does not name %s", text, want)
		}
	}
	if r.b.Accepted() == 0 {
		t.Error("b's brokers were never dialled")
	}
	for _, m := range r.b.Commands() {
		t.Errorf("a broker with the wrong name was sent %v", m)
	}
}

// A peer that speaks the wrong protocol for the port, or does not come to terms, is named as such, in the log and in the counter.
func TestClientsThatDoNotGetTLSAreNamed(t *testing.T) {
	r := tlsRig(t, testkit.Options{}, nil, func(cfg *config.Config) {
		cfg.Limits.TLSHandshakeTimeout = config.Duration(3 * time.Second) // those that speak must be heard in time
		cfg.TLS.MinVersion = "1.3"
	})
	raw := func(first []byte) func(net.Conn) {
		return func(c net.Conn) { _, _ = c.Write(first) }
	}
	for _, c := range []struct {
		name   string
		do     func(net.Conn)
		reason string
		words  []string
	}{
		{"plaintext", raw(codec.AppendCommand(nil, connectCommand(""))), "plaintext_on_tls_port", []string{"plaintext Pulsar protocol on the TLS port"}},
		{"HTTP", raw([]byte("GET / HTTP/1.1\r\n\r\n")), "plaintext_on_tls_port", []string{"an HTTP request on the TLS port"}},
		{"noise", raw([]byte("\xff\xfe\xfd\xfc\xfb\xfa")), "tls_handshake", []string{"ff fe fd fc fb", "not TLS"}},
		{"silence", func(net.Conn) {}, "tls_handshake", []string{"no TLS hello within 3s"}},
		{"half a hello", raw([]byte("\x16\x03\x01\x02\x00\x01")), "tls_handshake", []string{"no TLS hello within 3s"}},
		{"an old version", func(c net.Conn) {
			_ = tls.Client(c, &tls.Config{RootCAs: authority().Pool(), ServerName: "localhost", MaxVersion: tls.VersionTLS12}).Handshake()
		}, "tls_handshake", []string{"client offered only unsupported versions"}},
		{"another authority", func(c net.Conn) {
			_ = tls.Client(c, &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "localhost"}).Handshake()
		}, "tls_handshake", []string{"bad certificate"}},
	} {
		before := r.closed(t, "client", c.reason)
		nc, err := net.Dial("tcp", r.app.PulsarTLSAddr())
		if err != nil {
			t.Fatal(err)
		}
		peer := nc.LocalAddr().String()
		c.do(nc)
		_ = nc.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the connection was not closed: %v", c.name, err)
		}
		nc.Close()
		r.await(t, c.name+": a line of the log", func() bool { return len(r.log.with(append(c.words, c.reason, peer)...)) == 1 })
		if n := r.closed(t, "client", c.reason) - before; n != 1 {
			t.Errorf("%s: the counter of %s grew by %v", c.name, c.reason, n)
		}
	}
}

// A broker that does not speak TLS on the port it is configured with: the text asks the right question.
func TestABrokersPlaintextPortConfiguredAsTLS(t *testing.T) {
	r := tlsRig(t, testkit.Options{}, nil, func(cfg *config.Config) {
		cfg.Limits.LookupTimeout = config.Duration(4 * time.Second)
		cfg.Clusters["b"].ServiceURL = "pulsar+ssl://broker-0:6650"
	})
	const topic = "persistent://public/default/t"
	if _, err := r.admin.Set(t.Context(), admin.SetRequest{Name: topic, Cluster: "b"}); err != nil {
		t.Fatal(err)
	}
	c := r.connect(t, "")
	c.send(lookupCommand(topic, 1))
	if text := c.expect(codec.TypeLookupResponse).GetLookupTopicResponse().GetMessage(); !strings.Contains(text, "is this a plaintext port?") {
		t.Errorf("the lookup is answered %q", text)
	}
}

func TestAProxyMayHaveTheTLSListenerAlone(t *testing.T) {
	r := tlsRig(t, testkit.Options{}, nil, func(cfg *config.Config) { cfg.Listeners.Pulsar = "" })
	if r.app.PulsarAddr() != "" || r.app.PulsarTLSAddr() == "" {
		t.Fatalf("listeners %q and %q", r.app.PulsarAddr(), r.app.PulsarTLSAddr())
	}
	if url := r.app.Info().Advertised; !strings.HasPrefix(url, "pulsar+ssl://") {
		t.Errorf("it is announced as %s", url)
	}
	p, err := r.tlsClient(t).CreateProducer(pulsar.ProducerOptions{Topic: "t"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(t.Context(), &pulsar.ProducerMessage{Payload: []byte("x")}); err != nil {
		t.Fatal(err)
	}
}
