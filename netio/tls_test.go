//go:build linux

package netio

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/session"
	"pointsman/internal/tlstest"
)

// authority makes the certificates of all tests here.
var authority = sync.OnceValue(func() *tlstest.CA {
	ca, err := tlstest.NewCA("netio test")
	if err != nil {
		panic(err)
	}
	return ca
})

var certificate = sync.OnceValue(func() tls.Certificate {
	cert, err := authority().Issue("localhost", "127.0.0.1")
	if err != nil {
		panic(err)
	}
	return cert
})

func serverTLS(change func(*tls.Config)) *tls.Config {
	c := &tls.Config{Certificates: []tls.Certificate{certificate()}}
	if change != nil {
		change(c)
	}
	return c
}

func clientTLS(change func(*tls.Config)) *tls.Config {
	c := &tls.Config{RootCAs: authority().Pool(), ServerName: "localhost"}
	if change != nil {
		change(c)
	}
	return c
}

func only(version uint16) func(*tls.Config) {
	return func(c *tls.Config) { c.MinVersion, c.MaxVersion = version, version }
}

// secret is a configuration with one TLS listener, and with a plaintext one behind it.
func secret(cfg Config, change func(*tls.Config)) Config {
	cfg.Listeners = []Listener{
		{Network: "tcp", Addr: "127.0.0.1:0", ID: 1, TLS: serverTLS(change)},
		{Network: "tcp", Addr: "127.0.0.1:0", ID: 2},
	}
	if cfg.ClientTLS == nil {
		cfg.ClientTLS = func(name string) *tls.Config {
			if name != "b" {
				return nil
			}
			return clientTLS(nil)
		}
	}
	return cfg
}

func connectTLS(t testing.TB, address string, change func(*tls.Config)) *tls.Conn {
	t.Helper()
	c := tls.Client(connect(t, address), clientTLS(change))
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	return c
}

// versions runs a test for both versions, and without the buffers that are lent to a tls.Conn.
func versions(t *testing.T, test func(t *testing.T, version uint16, e func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine)) {
	for name, version := range map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13} {
		t.Run(name, func(t *testing.T) { test(t, version, engine) })
		t.Run(name+"/nothing lent", func(t *testing.T) { test(t, version, engineWithoutLending) })
	}
}

func engineWithoutLending(t testing.TB, cfg Config, accept func(*fakeShard, session.Conn) session.Endpoint) *Engine {
	t.Helper()
	cfg.NewShard = func(int) Shard { return &fakeShard{accept: accept} }
	return engineAs(t, cfg, accept, func(e *Engine) { e.fields = tlsFields{} })
}

// The buffers of a tls.Conn are lent by way of fields that Go may rename; then this test asks for another look.
func TestTheBuffersOfATLSConnectionAreFound(t *testing.T) {
	if !findTLSFields().known {
		t.Fatal("crypto/tls.Conn has no rawInput or hand of type bytes.Buffer any more: idle TLS connections now hold up to 18 KiB each")
	}
}

func TestTLSEchoReturnsEverything(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		e := engine(t, secret(Config{Loops: 2}, nil), echoing)
		c := connectTLS(t, addr(e), only(version))
		want := frame(rand.NewChaCha8([32]byte{1}), 3<<20)
		go func() { _, _ = c.Write(want) }()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatal("the echo differs")
		}
	})
}

var _ = []any{context.Background, x509.NewCertPool, errors.New, fmt.Sprint, net.Dial, strings.Join, time.Now, &atomic.Bool{}}
