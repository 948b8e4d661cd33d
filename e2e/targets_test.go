//go:build e2e

package e2e

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// Numbers of the protocol that the refusal tests look at.
const (
	serviceNotReady = 6
	authentication  = 3
	lookupConnect   = 1
	lookupFailed    = 2
)

// LK-03, LK-04: a client names the broker it wants in CONNECT. Only an address that a configured cluster vouches for is
// dialled; everything else is refused with an error that names the field, and nobody hears from the proxy.
func TestRefusedTargets(t *testing.T) {
	proxy := pair(t)[0]
	addr := strings.TrimPrefix(proxy.URL, "pulsar://")

	// A server that no configured cluster knows: it must not see a connection.
	stranger, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer stranger.Close()
	var visitors atomic.Int32
	go func() {
		for {
			conn, err := stranger.Accept()
			if err != nil {
				return
			}
			visitors.Add(1)
			_ = conn.Close()
		}
	}()

	tagged := taggedAddress(t, addr, newTopic("acme/plain", "target"))
	t.Logf("a broker as the proxy names it: %s", tagged)
	if _, err := net.LookupHost(strings.Split(tagged, ":")[0]); err == nil {
		t.Errorf("%s resolves; a tagged address must lead nowhere but through a proxy", tagged)
	}
	accepted := map[string]string{"the address that the proxy's own LOOKUP named": tagged}
	refused := map[string]string{
		"LK-03 outside host":                  "broker.example.org:6650",
		"LK-03 metadata service":              "169.254.169.254:80",
		"LK-03 metadata service, Pulsar":      "169.254.169.254:6650",
		"LK-03 link-local IPv6":               "[fe80::1]:6650",
		"LK-03 port 22":                       "127.0.0.1:22",
		"LK-03 a server of no cluster":        stranger.Addr().String(),
		"LK-01 a name that both clusters use": "broker-0:6650",
		"LK-03 tampered MAC":                  tamper(tagged),
		"LK-04 with a scheme":                 "pulsar://h:6650",
		"LK-04 without a port":                "h",
		"LK-04 IPv6 literal":                  "[::1]:6650",
		"LK-04 port above 65535":              "h:66500",
		"LK-04 port 0":                        "h:0",
		"LK-04 port that is no number":        "h:pulsar",
		"LK-04 4 KB":                          strings.Repeat("h", 4090) + ":6650",
		"LK-04 control characters":            "h\r\n\x00:6650",
	}
	countRefused := func() float64 {
		return metric(t, proxy, "pointsman_closed_connections_total", `side="client"`, `reason="target_refused"`)
	}
	countBefore := countRefused()
	for name, target := range accepted {
		t.Run(name, func(t *testing.T) {
			answer, _ := ask(t, addr, target)
			if answer.GetType() != cmdConnected {
				t.Errorf("CONNECT to %q: %v, want CONNECTED", target, answer)
			}
		})
	}
	for name, target := range refused {
		t.Run(name, func(t *testing.T) {
			answer, closed := ask(t, addr, target)
			e := answer.GetError()
			if answer.GetType() != cmdError || e.GetError() != serviceNotReady || !strings.Contains(e.GetMessage(), "proxy_to_broker_url") {
				t.Errorf("CONNECT to %.60q: %v; want ERROR ServiceNotReady that names proxy_to_broker_url", target, answer)
			}
			if strings.Contains(strings.ToLower(e.GetMessage()), "authenticat") {
				t.Errorf("CONNECT to %.60q: %q speaks of authentication, which is not the reason", target, e.GetMessage())
			}
			if len(e.GetMessage()) > 1000 {
				t.Errorf("the error for a target of %d bytes has %d bytes; what the client sent must be cut", len(target), len(e.GetMessage()))
			}
			if !closed {
				t.Error("the connection was left open after the refusal")
			}
		})
	}
	if got := countRefused() - countBefore; got != float64(len(refused)) {
		t.Errorf("the counter of refused targets grew by %v, want %d", got, len(refused))
	}
	// LK-04: empty is either a lookup connection or refused by name, never a crash and never "authentication failed".
	t.Run("LK-04 empty", func(t *testing.T) {
		answer, _ := ask(t, addr, "")
		if e := answer.GetError(); answer.GetType() != cmdConnected && (answer.GetType() != cmdError || e.GetError() == authentication || !strings.Contains(e.GetMessage(), "proxy_to_broker_url")) {
			t.Errorf("CONNECT to an empty target: %v", answer)
		}
	})
	if n := visitors.Load(); n != 0 {
		t.Errorf("a server of no cluster was connected to %d times, want never", n)
	}
	if !httpOK(limited(t, 10*time.Second), proxy.Ops+"/readyz") {
		t.Error("the proxy is not ready any more")
	}
}

// ask sends CONNECT with a target and returns the answer, and whether the proxy closed the connection after it.
func ask(t *testing.T, addr, target string) (answer *pulsarpb.BaseCommand, closed bool) {
	t.Helper()
	conn, err := DialRaw(addr, 10*time.Second)
	must(t, err)
	defer conn.Close()
	answer, err = conn.Connect(&target)
	if err != nil {
		t.Fatalf("CONNECT to %.60q: no answer: %v", target, err)
	}
	if answer.GetType() == cmdConnected {
		return answer, false
	}
	_, err = conn.Receive()
	return answer, errors.Is(err, io.EOF) || (err != nil && !errors.Is(err, os.ErrDeadlineExceeded))
}

// taggedAddress looks a topic up and returns the broker's address as host:port.
func taggedAddress(t *testing.T, addr, topic string) string {
	t.Helper()
	conn, err := DialRaw(addr, 20*time.Second)
	must(t, err)
	defer conn.Close()
	_, err = conn.Connect(nil)
	must(t, err)
	must(t, conn.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdLookup), LookupTopic: &pulsarpb.CommandLookupTopic{
		Topic: &topic, RequestId: proto.Uint64(1),
	}}))
	answer, err := conn.Receive()
	must(t, err)
	response := answer.GetLookupTopicResponse()
	if response.GetResponse() != lookupConnect || !response.GetProxyThroughServiceUrl() {
		t.Fatalf("LOOKUP of %s: %v; want Connect through the service URL", topic, answer)
	}
	return strings.TrimPrefix(response.GetBrokerServiceUrl(), "pulsar://")
}

// tamper changes one character in the first label of an address.
func tamper(address string) string {
	changed := []byte(address)
	if changed[1] == 'q' {
		changed[1] = 'z'
	} else {
		changed[1] = 'q'
	}
	return string(changed)
}
