package bench

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"pointsman/internal/tlstest"
)

// The values of Params.TLS: TLS between the load and the proxy, between the proxy and the broker, or both; plaintext where there is none.
const (
	tlsClients = "client"
	tlsBrokers = "broker"
	tlsBoth    = "both"
)

func withClientTLS(security string) bool { return security == tlsClients || security == tlsBoth }
func withBrokerTLS(security string) bool { return security == tlsBrokers || security == tlsBoth }

// The scenarios and targets that can be measured with TLS.
var (
	tlsScenarios = []string{"produce", "consume", "lookup", "connect", "churn", "hold"}
	tlsTargets   = []string{"pointsman", "haproxy", "haproxy64k", "go-relay"}
)

// checkTLS says what cannot be measured with TLS, and why.
func checkTLS(p Params, names []string) error {
	if p.TLS == "" {
		return nil
	}
	if !withClientTLS(p.TLS) && !withBrokerTLS(p.TLS) {
		return fmt.Errorf("TLS %q: want %q, %q or %q, or nothing for plaintext", p.TLS, tlsClients, tlsBrokers, tlsBoth)
	}
	if !slices.Contains(tlsScenarios, p.Scenario) {
		return fmt.Errorf("scenario %q has no TLS: want one of %v", p.Scenario, tlsScenarios)
	}
	for _, name := range names {
		if !slices.Contains(tlsTargets, name) {
			return fmt.Errorf("target %q is not set up for TLS: want some of %v", name, tlsTargets)
		}
	}
	return nil
}

// server is where a load connects to.
type server struct {
	netip.AddrPort
	tls *tlsClient // nil: plaintext
}

// tlsClient is the load's side of TLS with one target. All targets are offered the same, and only what each of them can do: TLS 1.3, no
// resumption, and X25519 (with Go servers X25519MLKEM768 would be agreed on otherwise, which OpenSSL 3.0 does not know). Nobody can
// tell crypto/tls which suite of TLS 1.3 to use: with AES in hardware its servers take TLS_AES_128_GCM_SHA256, and the peers are told to.
type tlsClient struct {
	config *tls.Config

	mu   sync.Mutex
	said []string // what was negotiated, each once
}

func newTLSClient(ca *tlstest.CA) *tlsClient {
	return &tlsClient{config: &tls.Config{
		RootCAs: ca.Pool(), ServerName: certificateName, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519},
		DynamicRecordSizingDisabled: true, // batches of messages, as clients with a large pipeline write them
	}}
}

// serverTLS is what the fake broker and the relay offer: the same to everybody.
func serverTLS(cert tls.Certificate) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}, SessionTicketsDisabled: true}
}

// certificateName is whom the certificate of all targets is for.
const certificateName = "localhost"

// secure makes the handshake on a blocking descriptor.
func (t *tlsClient) secure(fd int) (*tlsStream, error) {
	s := &tlsStream{fd: fd}
	s.conn = tls.Client(s, t.config)
	if err := s.conn.Handshake(); err != nil {
		return nil, fmt.Errorf("TLS handshake: %w", err)
	}
	state := s.conn.ConnectionState()
	what := fmt.Sprintf("%s, %s, %s", tls.VersionName(state.Version), tls.CipherSuiteName(state.CipherSuite), state.CurveID)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.said, what) {
		t.said = append(t.said, what)
	}
	return s, nil
}

// negotiated is what all handshakes so far agreed on; "" for plaintext.
func (t *tlsClient) negotiated() string {
	if t == nil {
		return ""
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.said, " or ")
}

// tlsStream is the TLS of a connection, and the net.Conn below it: at first one that blocks, then one that is driven by a loop.
type tlsStream struct {
	conn   *tls.Conn
	fd     int
	driven bool
	in     []byte // driven: ciphertext to be read
	out    []byte // driven: ciphertext that the socket has not taken
}

// noBytes is a temporary error, which a tls.Conn survives.
type noBytes struct{}

func (noBytes) Error() string   { return "no bytes now" }
func (noBytes) Timeout() bool   { return true }
func (noBytes) Temporary() bool { return true }

func (s *tlsStream) Read(p []byte) (int, error) {
	if s.driven {
		if len(s.in) == 0 {
			return 0, noBytes{}
		}
		n := copy(p, s.in)
		s.in = s.in[n:]
		return n, nil
	}
	for {
		n, err := syscall.Read(s.fd, p)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, errors.New("no answer within " + setupTimeout.String())
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (s *tlsStream) Write(p []byte) (int, error) {
	if s.driven {
		s.out = append(s.out, p...)
		return len(p), nil
	}
	if err := (&link{fd: s.fd}).write(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close, the addresses and the deadlines are the owner's business.
func (s *tlsStream) Close() error                     { return nil }
func (s *tlsStream) LocalAddr() net.Addr              { return nil }
func (s *tlsStream) RemoteAddr() net.Addr             { return nil }
func (s *tlsStream) SetDeadline(time.Time) error      { return nil }
func (s *tlsStream) SetReadDeadline(time.Time) error  { return nil }
func (s *tlsStream) SetWriteDeadline(time.Time) error { return nil }

// plainSize is room for the plaintext of one read, with what a record and the set-up have left over.
const plainSize = readSize + 64<<10

// take is add for a connection whose set-up is over, TLS included.
func (l *loop) take(k *link, h handler) (*conn, error) {
	c, err := l.add(k.fd, h)
	if err != nil || k.tls == nil {
		return c, err
	}
	if l.plain == nil {
		l.plain = make([]byte, plainSize)
	}
	c.tls = k.tls
	c.tls.driven = true
	l.post(func() { // what the set-up has read too much causes no event
		if !c.ended {
			c.got(nil)
		}
	})
	return c, nil
}

// open decrypts src into dst, which is valid until the next read of the loop. err is how the stream has ended.
func (s *tlsStream) open(dst, src []byte) (n int, err error) {
	for s.in = src; err == nil; {
		var k int
		k, err = s.conn.Read(dst[n:])
		n += k
	}
	if (err == noBytes{}) {
		err = nil
	}
	return n, err
}

// writeTLS is write for a connection with TLS: it takes everything, and keeps the ciphertext that the socket does not take.
func (c *conn) writeTLS(src []byte) int {
	s := c.tls
	s.out = c.loop.sealed[:0]
	if _, err := s.conn.Write(src); err != nil {
		c.fail(err)
		return 0
	}
	c.loop.sealed = s.out
	s.out = bytes.Clone(s.out[c.put(s.out):])
	return len(src)
}

// resend writes ciphertext that was kept.
func (c *conn) resend() {
	if c.tls != nil && len(c.tls.out) > 0 {
		c.tls.out = c.tls.out[c.put(c.tls.out):]
	}
}

// goodbye sends close_notify if the socket takes it at once.
func (s *tlsStream) goodbye() {
	if s == nil || len(s.out) > 0 {
		return
	}
	if s.conn.CloseWrite() == nil && len(s.out) > 0 {
		_, _ = syscall.Write(s.fd, s.out)
	}
}

// identity is the certificate that the targets of a lab present, made when it is first needed.
type identity struct {
	ca                       *tlstest.CA
	certFile, keyFile, chain string // chain holds both, as HAProxy wants them
	caFile                   string
}

func (l *Lab) identity() (*identity, error) {
	if l.id != nil {
		return l.id, nil
	}
	ca, err := tlstest.NewCA("pointsman-bench")
	if err != nil {
		return nil, err
	}
	cert, err := ca.Issue(certificateName, "127.0.0.1")
	if err != nil {
		return nil, err
	}
	dir, err := l.folder("tls")
	if err != nil {
		return nil, err
	}
	id := &identity{ca: ca, chain: filepath.Join(dir, "chain.pem"), caFile: filepath.Join(dir, "ca.pem")}
	if err := os.WriteFile(id.caFile, ca.PEM(), 0o644); err != nil {
		return nil, err
	}
	if id.certFile, id.keyFile, err = tlstest.Write(dir, "server", cert); err != nil {
		return nil, err
	}
	var both []byte
	for _, file := range []string{id.certFile, id.keyFile} {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		both = append(both, text...)
	}
	if err := os.WriteFile(id.chain, both, 0o600); err != nil {
		return nil, err
	}
	l.id = id
	return id, nil
}
