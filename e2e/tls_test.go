//go:build e2e

package e2e

import (
	"fmt"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// startSecure starts a proxy that speaks TLS to one of the clusters and not to the other, and ends it with the test.
func startSecure(t *testing.T, secure, certificate string) *Pointsman {
	t.Helper()
	name := "tls-" + secure
	p, err := StartPointsman(limited(t, 30*time.Second), artifacts, processes, rig.Dir, name, rig.PointsmanTLSConfig(filepath.Join(rig.Dir, name, "map"), certificate, secure))
	must(t, err)
	t.Cleanup(func() { _ = p.Proc.Stop(10 * time.Second) })
	return p
}

// Each client over the TLS listener, verifying the proxy's name, against brokers with TLS and without; and over the plaintext
// listener against brokers with TLS. Cluster a is discovered with TLS by the first proxy, b is named with it by the second.
func TestTLSOnEitherSideWithEachClient(t *testing.T) {
	const count = 2_000
	for _, secure := range []string{"a", "b"} {
		p := startSecure(t, secure, "proxy")
		t.Run("brokers of "+secure, func(t *testing.T) {
			for _, client := range artifacts.Clients {
				for _, c := range []*Cluster{rig.A, rig.B} {
					topic := newTopic("acme/plain", fmt.Sprintf("tls-%s-%s", secure, client))
					setRoute(t, p, topic, c.Name)
					t.Run(string(client)+"/"+c.Name, func(t *testing.T) {
						t.Parallel()
						write, read := p.TLS, p.TLS
						if c.Name == secure { // one side of it without
							write = p.URL
						}
						consumer := startDriver(t, client, "consume", "--url", read, "--ca", rig.tlsFile("ca.pem"), "--topic", topic, "--count", strconv.Itoa(count))
						sent := runDriver(t, 60*time.Second, client, "produce", "--url", write, "--ca", rig.tlsFile("ca.pem"), "--topic", topic, "--count", strconv.Itoa(count))
						want(t, string(client), Compare(sent.Acks.All(), finish(t, 60*time.Second, consumer).Recvs.All()), count)
						onlyOn(t, topic, c, count)
					})
				}
			}
		})
		if n := metric(t, p, "pointsman_loop_tls_handshakes_total"); n == 0 {
			t.Error("no TLS handshake was counted")
		}
	}
}

// A live topic of each client over TLS moves from a cluster with TLS to one without, and back.
func TestTLSLiveSwitch(t *testing.T) {
	p := startSecure(t, "a", "proxy")
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			topic := newTopic("acme/geo", "tls-live-"+string(client))
			setRoute(t, p, topic, "a")
			live := startDriver(t, client, "live", "--url", p.TLS, "--ca", rig.tlsFile("ca.pem"), "--topics", topic, "--rates", "500", "--type", "shared", "--replicated", strconv.FormatBool(client.Replicates()))
			await(t, live, "the first messages", func(r Record) bool { return r.Recvs.Len() >= 300 })
			for _, to := range []*Cluster{rig.B, rig.A} {
				switchTopic(t, p, topic, to.Name)
				acked := live.Record().Acks.Len()
				awaitClients(t, topic, to)
				noErrors(t, live, await(t, live, "receipts after the move", func(r Record) bool { return r.Acks.Len() >= acked+300 }))
			}
			must(t, live.Say("stop"))
			await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
			must(t, live.Say("quit"))
			acks, _ := finish(t, 30*time.Second, live).Of(0)
			for _, c := range []*Cluster{rig.A, rig.B} {
				if d := Compare(acks, readUntilComplete(t, c, topic, acks)); len(d.Lost) != 0 || len(d.Corrupt) != 0 {
					t.Errorf("read on cluster %s: %v; want every acknowledged number", c.Name, d)
				}
			}
		})
	}
}

// The clients do verify: a certificate for another name is refused by each.
func TestTLSClientsVerifyTheProxysName(t *testing.T) {
	p := startSecure(t, "b", "stranger")
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			before := metric(t, p, "pointsman_closed_connections_total", `side="client"`, `reason="tls_handshake"`)
			d := startDriver(t, client, "produce", "--url", p.TLS, "--ca", rig.tlsFile("ca.pem"), "--topic", newTopic("acme/plain", "refused"), "--count", "1")
			must(t, WaitUntil(limited(t, 40*time.Second), "a refused handshake", func() (bool, error) {
				return metric(t, p, "pointsman_closed_connections_total", `side="client"`, `reason="tls_handshake"`) > before, nil
			}))
			if r := d.Record(); r.Acks.Len() != 0 || len(r.Ready) != 0 {
				t.Errorf("it came through: %+v", r)
			}
		})
	}
}
