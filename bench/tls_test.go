//go:build linux

package bench

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/internal/tlstest"
)

// identityHere is a certificate, and the load's side that trusts it.
func identityHere(t testing.TB) (tls.Certificate, *tlsClient) {
	t.Helper()
	ca, err := tlstest.NewCA("bench test")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Issue(certificateName)
	if err != nil {
		t.Fatal(err)
	}
	return cert, newTLSClient(ca)
}

// listenTLS listens as the relay does for TLS.
func listenTLS(t testing.TB) (net.Listener, server) {
	t.Helper()
	cert, client := identityHere(t)
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln, server{netip.MustParseAddrPort(ln.Addr().String()), client}
}

// startRelayHere is the plain relay with TLS in front of a fake broker.
func startRelayHere(t testing.TB) server {
	broker := startBrokerHere(t, 1)[0]
	ln, at := listenTLS(t)
	go func() { _ = Relay(ln, []string{broker.String()}, nil, false) }()
	return at
}

// startTLSBrokerHere is a fake broker that speaks TLS, and the certificates that prove it.
func startTLSBrokerHere(t testing.TB) (at server, ca *tlstest.CA) {
	t.Helper()
	ca, err := tlstest.NewCA("bench test brokers")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.Issue(certificateName, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	at = runBrokerHere(t, BrokerConfig{Ports: 1, TLS: &cert})[0]
	at.tls = newTLSClient(ca)
	return at, ca
}

func TestEveryLoadMakesProgressOverTLS(t *testing.T) {
	proxy, _ := startProxy(t, tlsClients)
	toBrokers, _ := startProxy(t, tlsBrokers)
	twice, _ := startProxy(t, tlsBoth)
	relay := startRelayHere(t)
	broker, _ := startTLSBrokerHere(t)
	for name, at := range map[string]server{"pointsman": proxy, "to brokers": toBrokers, "twice": twice, "broker": broker, "go-relay": relay} {
		for _, p := range []Params{
			{Scenario: "produce", Connections: 5},
			{Scenario: "produce", Connections: 2, Producers: 7, Size: 300 << 10},
			{Scenario: "consume", Connections: 3, Producers: 2},
			{Scenario: "consume", Connections: 2, Producers: 3, Size: 300 << 10},
			{Scenario: "lookup", Connections: 4},
			{Scenario: "churn", Connections: 10},
			{Scenario: "connect", Connections: 10},
		} {
			p = p.withDefaults()
			t.Run(name+" "+p.Label(), func(t *testing.T) {
				l, err := startLoad(p, at)
				if err != nil {
					t.Fatal(err)
				}
				defer l.close()
				runUntil(t, l, 100)
			})
		}
	}
	// The suite in between is the machine's choice: AES where it is in hardware.
	if got := broker.tls.negotiated(); got != proxy.tls.negotiated() {
		t.Errorf("with the fake broker %q was negotiated, with the proxy %q", got, proxy.tls.negotiated())
	}
	ours, theirs := proxy.tls.negotiated(), relay.tls.negotiated()
	if ours != theirs || !strings.HasPrefix(ours, "TLS 1.3, TLS_") || !strings.HasSuffix(ours, ", X25519") {
		t.Errorf("negotiated %q and %q: want the same, TLS 1.3 with X25519, or peers are compared over different ciphers", ours, theirs)
	}
}

func TestIdleConnectionsOverTLSAreHeld(t *testing.T) {
	at, _ := startProxy(t, tlsClients)
	l, err := startLoad(Params{Scenario: "hold", Connections: 20, TLS: tlsClients}.withDefaults(), at)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	if err := l.base().runFor(20 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, c := range l.base().loop.conns {
		if c != nil && c.tls != nil {
			held++
		}
	}
	if held != 20 {
		t.Errorf("%d connections with TLS are open, want 20", held)
	}
}

// The set-up asks its tls.Conn for a frame, which may decrypt more than that: no event of the socket tells of the rest.
func TestWhatTheSetUpHasReadTooMuchReachesTheLoop(t *testing.T) {
	ln, at := listenTLS(t)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		connected := (&brokerConn{}).rare(codec.Head{Type: codec.TypeConnect}, nil)
		_, _ = c.Write(append(connected, appendFrame(nil, codec.TypePing, nil)...)) // one record
		_, _ = io.Copy(io.Discard, c)                                               // stay until the load ends
		c.Close()
	}()
	k, err := openLink(at, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	got := &noted{}
	if _, err := l.take(k, got); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); len(got.lines) == 0 && time.Now().Before(deadline); {
		if err := l.run(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
	}
	if len(got.lines) != 1 || !strings.HasPrefix(got.lines[0], codec.TypePing.String()) {
		t.Errorf("%q, want one %s", got.lines, codec.TypePing)
	}
}

// countedConn counts the bytes that are read from it.
type countedConn struct {
	net.Conn
	n int
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n += n
	return n, err
}

// A proxy may count an end without close_notify as a fault, and log it: that would be measured as well.
func TestAnAnswerToAClientThatHasLeftGoesToNobody(t *testing.T) {
	at, _ := startTLSBrokerHere(t)
	stays, err := openLink(at, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stays.close()
	leaves, err := openLink(at, 0, "")
	if err != nil {
		t.Fatal(err)
	}
	defer leaves.close()
	// A question and close_notify in one segment.
	s := leaves.tls
	s.driven = true
	if _, err := s.conn.Write(lookupFrame(benchTopic(0), 7)); err != nil {
		t.Fatal(err)
	}
	if err := s.conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := (&link{fd: leaves.fd}).write(s.out); err != nil {
		t.Fatal(err)
	}
	s.driven, s.out = false, nil
	if n, err := s.conn.Read(make([]byte, 1)); err == nil {
		t.Fatalf("%d bytes instead of the end", n)
	}
	if _, err := stays.ask(appendFrame(nil, codec.TypePing, nil), codec.TypePong); err != nil {
		t.Error(err)
	}
}

func TestAnEndOverTLSIsAnnounced(t *testing.T) {
	cert, client := identityHere(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	at := server{netip.MustParseAddrPort(ln.Addr().String()), client}
	for _, driven := range []bool{false, true} {
		shaken, announced := make(chan struct{}), make(chan int, 1)
		go func() {
			c, err := ln.Accept()
			if err != nil {
				close(announced)
				return
			}
			defer c.Close()
			counted := &countedConn{Conn: c}
			secure := tls.Server(counted, &tls.Config{Certificates: []tls.Certificate{cert}})
			_ = secure.Handshake()
			before := counted.n
			close(shaken) // only now does the client end, or its end is read with the handshake
			_, _ = secure.Read(make([]byte, 1))
			announced <- counted.n - before
		}()
		k, err := dialLink(at, 0)
		if err != nil {
			t.Fatal(err)
		}
		<-shaken
		if driven {
			l, err := newLoop()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.take(k, &noted{}); err != nil {
				t.Fatal(err)
			}
			l.close()
		} else {
			k.close()
		}
		if <-announced == 0 {
			t.Errorf("driven=%v: the server saw the end of the connection only, no close_notify", driven)
		}
	}
}

func TestAFullSocketLosesNothingOverTLS(t *testing.T) {
	const parts, size = 4, 8 << 20 // more than sockets hold
	part := make([]byte, size)
	rand.NewChaCha8([32]byte{}).Read(part)
	ln, at := listenTLS(t)
	full, received := make(chan struct{}), make(chan error, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			received <- err
			return
		}
		_ = c.(*tls.Conn).Handshake()
		<-full
		for i := range parts {
			got := make([]byte, size)
			if _, err := io.ReadFull(c, got); err != nil {
				received <- fmt.Errorf("part %d: %w", i, err)
				return
			}
			if !bytes.Equal(got, part) {
				received <- fmt.Errorf("part %d arrived changed", i)
				return
			}
		}
		received <- nil
	}()
	k, err := dialLink(at, 0)
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	c, err := l.take(k, &noted{})
	if err != nil {
		t.Fatal(err)
	}
	for range parts {
		c.send(part)
	}
	if !c.full {
		t.Fatal("the socket took everything at once: this test sees nothing")
	}
	close(full)
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
		if err := l.run(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-received:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
	}
	t.Error("not everything has arrived")
}

func TestACertificateOfAnotherAuthorityIsRefused(t *testing.T) {
	ln, at := listenTLS(t)
	go func() {
		c, err := ln.Accept()
		if err == nil {
			_ = c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	_, at.tls = identityHere(t)
	if k, err := dialLink(at, 0); err == nil {
		k.close()
		t.Error("the load trusts a certificate of nobody it knows")
	} else if !strings.Contains(err.Error(), "unknown authority") {
		t.Error(err)
	}
}

func TestAChurnOverTLSEndsInTheMiddleOfHandshakes(t *testing.T) {
	at := startRelayHere(t)
	l, err := startLoad(Params{Scenario: "churn", Connections: 20, TLS: tlsClients}.withDefaults(), at)
	if err != nil {
		t.Fatal(err)
	}
	l.close()
	churn := l.(*churnLoad)
	churn.shakes.Wait() // close has waited already
	churn.loop.mu.Lock()
	defer churn.loop.mu.Unlock()
	if n := len(churn.loop.posted); n > 0 {
		t.Errorf("%d connections are nobody's", n)
	}
	for _, c := range churn.loop.conns {
		if c != nil {
			t.Error("a connection is open after the end of its load")
		}
	}
}

func TestWhatCannotBeMeasuredOverTLSIsRefused(t *testing.T) {
	refuse := func(p Params, want string, names ...string) {
		t.Helper()
		if err := checkTLS(p, names); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v on %v: %v, want a word about %s", p, names, err, want)
		}
	}
	refuse(Params{Scenario: "produce", TLS: "all"}, `"all"`, "pointsman")
	refuse(Params{Scenario: "rate", TLS: tlsClients}, `"rate"`, "pointsman")
	refuse(Params{Scenario: "produce", TLS: tlsClients}, `"java-proxy"`, "pointsman", "java-proxy")
	for _, p := range []Params{{Scenario: "churn", TLS: tlsClients}, {Scenario: "rate"}} {
		if err := checkTLS(p, []string{"pointsman", "haproxy"}); err != nil {
			t.Error(err)
		}
	}
}

func TestTheStandardTextHasTLSInATableOfItsOwn(t *testing.T) {
	var results []*Result
	for _, p := range []Params{{Scenario: "churn"}, {Scenario: "connect", TLS: tlsClients}} {
		r := &Result{Params: p.withDefaults()}
		for round := range pairsWanted {
			for name, v := range map[string]float64{"pointsman": 8, "haproxy": 10} {
				r.Runs = append(r.Runs, Run{Target: name, Round: round, Measure: map[string]float64{"cpu_per_10k_cycles": v}})
			}
		}
		r.sum()
		results = append(results, r)
	}
	goals, rest, _ := strings.Cut(standardText(results, &SwitchResult{}, nil, 0), "### Cases")
	cases, secure, _ := strings.Cut(rest, "### TLS")
	if want := "| TLS connect 50 at a time | cpu per 10k cycles | ≤ 1.25 × haproxy | 0.80 (0.80–0.80) | 10 | met |"; !strings.Contains(goals, want) {
		t.Errorf("no %q in the goals:\n%s", want, goals)
	}
	if strings.Contains(cases, "TLS connect") || !strings.Contains(cases, "| churn 50") {
		t.Errorf("the cases are for plaintext:\n%s", cases)
	}
	if !strings.Contains(secure, "| TLS connect") || strings.Contains(secure, "| churn") {
		t.Errorf("the table of TLS is for TLS:\n%s", secure)
	}
}

func TestTheTableOfTLSNamesWhatWasNegotiated(t *testing.T) {
	r := &Result{Params: Params{Scenario: "churn", TLS: tlsClients}.withDefaults()}
	for name, v := range map[string]float64{"pointsman": 8, "haproxy": 10, "go-relay": 16} {
		said := "TLS 1.3, one"
		if name == "go-relay" {
			said = "TLS 1.3, another"
		}
		r.Runs = append(r.Runs, Run{Target: name, Negotiated: said, Measure: map[string]float64{"cpu_per_10k_cycles": v}})
	}
	r.sum()
	table := tlsTable([]*Result{r})
	for _, want := range []string{
		"| TLS churn 50 at a time | cpu per 10k cycles, s | 8.00 | 10.0 | 16.0 | 0.80 (0.80–0.80) | 0.50 (0.50–0.50) |",
		"TLS 1.3, another (go-relay); TLS 1.3, one (",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
}
