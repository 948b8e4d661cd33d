//go:build linux

package netio

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
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

// relayLate is relayTo that dials, with TLS where config names it, when the client has spoken: before that its handshake may be under way,
// and what comes from the other side has nowhere to go.
func relayLate(addr, config string) func(*fakeShard, session.Conn) session.Endpoint {
	now := relayTo(addr, true, nil)
	return func(s *fakeShard, c session.Conn) session.Endpoint {
		client := now(s, c).(*relay)
		dial := s.ops[len(s.ops)-1]
		s.ops = s.ops[:len(s.ops)-1]
		dial.TLS, dial.ServerName = config, "localhost"
		return &lateRelay{relay: client, dial: dial}
	}
}

type lateRelay struct {
	*relay
	dial  session.Op
	asked bool
}

func (r *lateRelay) Data(now time.Time, src []byte) int {
	if !r.asked {
		r.asked = true
		r.s.do(r.dial)
	}
	return r.relay.Data(now, src)
}

// tlsServer is server behind TLS.
func tlsServer(t testing.TB, change func(*tls.Config), serve func(*tls.Conn)) string {
	config := serverTLS(change)
	return server(t, func(c *net.TCPConn) { serve(tls.Server(c, config)) })
}

// Every combination of plaintext and TLS, with checksummed frames of all sizes both ways at once and a peer that is slow (EL-02).
func TestTLSOnEitherSideIsNotCorrupted(t *testing.T) {
	const perConn = 8 << 20
	check := func(c net.Conn, seed byte, pace func(net.Conn) io.Reader) error {
		_ = c.SetDeadline(time.Now().Add(patience))
		errs := make(chan error, 2)
		go func() { errs <- sendChecked(c, seed, perConn) }()
		go func() { errs <- readChecked(pace(c), perConn) }()
		return errors.Join(<-errs, <-errs)
	}
	fast := func(c net.Conn) io.Reader { return c }
	lazy := func(c net.Conn) io.Reader { return slow{c} }
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		served := make(chan error, 9)
		plain := server(t, func(c *net.TCPConn) { served <- check(c, 90, lazy) })
		secure := tlsServer(t, only(version), func(c *tls.Conn) { served <- check(c, 91, fast) })
		for _, c := range []struct {
			name     string
			relay    func(*fakeShard, session.Conn) session.Endpoint
			listener int
		}{{"TLS to plain", relayLate(plain, ""), 0}, {"plain to TLS", relayLate(secure, "b"), 1}, {"TLS to TLS", relayLate(secure, "b"), 0}} {
			e := engine(t, secret(Config{Loops: 2, HighWater: 128 << 10}, only(version)), c.relay)
			var wg sync.WaitGroup
			for i := range 3 {
				var peer net.Conn = connect(t, e.Addrs()[c.listener].String())
				if c.listener == 0 {
					peer = tls.Client(peer, clientTLS(only(version)))
				}
				wg.Go(func() {
					if err := check(peer, byte(i), [...]func(net.Conn) io.Reader{fast, lazy, fast}[i]); err != nil {
						t.Errorf("%s, connection %d: %v", c.name, i, err)
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			for range 3 { // they may have megabytes to read still
				if err := <-served; err != nil {
					t.Errorf("%s, a server: %v", c.name, err)
				}
			}
			for _, l := range e.Stats().Loops {
				if l.SplicedBytes != 0 {
					t.Errorf("%s: %d bytes were spliced past TLS", c.name, l.SplicedBytes)
				}
			}
		}
	})
}

// chopped sends what is written in pieces.
type chopped struct {
	net.Conn
	size  int
	after func(sent int) // of all, may be nil
	sent  int
}

func (c *chopped) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var k int
		k, err = c.Conn.Write(p[n:min(len(p), n+c.size)])
		n += k
		c.sent += k
		if c.after != nil {
			c.after(c.sent)
		}
	}
	return n, err
}

// EL-01 with TLS: records cut at every 1,000 bytes and at every byte, on both sides, handshake included.
func TestEL01TLSRecordsCutAnywhereArriveWhole(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		for size, total := range map[int]int{1: 3000, 1000: 300 << 10} {
			want := frame(rand.NewChaCha8([32]byte{byte(size)}), total)
			target := server(t, func(c *net.TCPConn) {
				s := tls.Server(&chopped{Conn: c, size: size}, serverTLS(only(version)))
				_, _ = io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s})
			})
			e := engine(t, secret(Config{}, only(version)), relayLate(target, "b"))
			raw := &chopped{Conn: connect(t, addr(e)), size: size}
			c := tls.Client(raw, clientTLS(only(version)))
			if err := c.Handshake(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the handshake is over here as well", func() bool { return e.Stats().Loops[0].Handshakes == 1 })
			base, handshake := e.Stats().Loops[0].Reads, raw.sent
			if size == 1 { // each byte is read alone
				raw.after = func(sent int) {
					for e.Stats().Loops[0].Reads < base+int64(sent-handshake) && !t.Failed() {
						runtime.Gosched()
					}
				}
			}
			go func() { _, _ = c.Write(want) }()
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil {
				t.Fatalf("pieces of %d: %v", size, err)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("pieces of %d: bytes differ", size)
			}
			c.Close()
		}
	})
}

// A TLS peer that asks without reading is not heard, a paused connection is not even decrypted, and both go on.
func TestAStalledTLSPeerHoldsBoundedMemoryAndGoesOn(t *testing.T) {
	ends := make(chan *echo, 1)
	e := engine(t, secret(Config{HighWater: 128 << 10}, nil), func(s *fakeShard, c session.Conn) session.Endpoint {
		ep := &echo{base{s: s, c: c}}
		ends <- ep
		return ep
	})
	c := connectTLS(t, addr(e), nil)
	const total = 32 << 20
	want := frame(rand.NewChaCha8([32]byte{3}), total)
	go func() { _, _ = c.Write(want) }()
	ep := <-ends
	eventually(t, "reading is paused", func() bool { return ep.paused.Load() > 0 && e.Stats().Loops[0].Paused == 1 })
	if m := e.Stats().BufferMemory; m > 128<<10+DefaultReadBuffer+2*largeChunk+mediumChunk {
		t.Errorf("%d bytes are buffered for one peer", m)
	}
	read := e.Stats().Loops[0].ReadBytes
	if read == 0 || read > total/2 {
		t.Errorf("%d of %d bytes were read from a peer that takes nothing", read, total)
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the echo differs")
	}
}

// holder holds its connection after each call of Data, until it is resumed from outside.
type holder struct {
	base
	got chan []byte
}

func (h *holder) Data(_ time.Time, src []byte) int {
	h.s.do(session.Op{Kind: session.OpPause, Conn: h.c})
	h.got <- bytes.Clone(src)
	return len(src)
}

// Bytes that came with the last flight of the handshake, or were decrypted together, are handed over without another event: nothing waits
// for a wake-up that does not come. An end that came with them waits behind them.
func TestBytesBehindTheHandshakeAndAnEndBehindThemAreNotLost(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		h := &holder{got: make(chan []byte, 16)}
		ended := make(chan session.NetReason, 1)
		h.onEnd = func(r session.NetReason, _ error) { ended <- r }
		e := engine(t, secret(Config{}, only(version)), func(s *fakeShard, c session.Conn) session.Endpoint {
			h.s, h.c = s, c
			return h
		})
		// All that the client writes after its first flight goes out in one piece.
		held := &corked{Conn: connect(t, addr(e))}
		c := tls.Client(held, clientTLS(only(version)))
		held.onRead = func() { held.cork = true } // the server has answered: from here on nothing goes out
		go func() {
			if version == tls.VersionTLS13 { // in 1.2 the server speaks last
				_ = c.Handshake()
			} else {
				held.onRead = nil
				_ = c.Handshake()
				held.cork = true
			}
			_, _ = c.Write([]byte("first"))
			_, _ = c.Write([]byte("second"))
			_ = c.CloseWrite()
			held.uncork()
		}()
		if got := string(<-h.got); got != "firstsecond" {
			t.Fatalf("got %q first", got)
		}
		select {
		case r := <-ended:
			t.Fatalf("a paused connection was told its end: %d", r)
		default:
		}
		e.Post(0, func(_ time.Time, sh Shard) { sh.(*fakeShard).do(session.Op{Kind: session.OpResume, Conn: h.c}) })
		if r := <-ended; r != session.NetEOF {
			t.Fatalf("reason %d, want the orderly end", r)
		}
	})
}

// corked keeps what is written while cork is set.
type corked struct {
	net.Conn
	cork   bool
	kept   []byte
	onRead func()
}

func (c *corked) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.onRead != nil {
		c.onRead()
	}
	return n, err
}

func (c *corked) Write(p []byte) (int, error) {
	if c.cork {
		c.kept = append(c.kept, p...)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *corked) uncork() {
	_ = c.SetWriteDeadline(time.Time{}) // which CloseWrite has set
	_, _ = c.Conn.Write(c.kept)
}

// CN-05 with TLS: a client that says close_notify still gets everything that it is owed, and ours at the end.
func TestCN05TLSHalfCloseDeliversWhatCameBefore(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		e := engine(t, secret(Config{}, only(version)), echoing)
		raw := &tapped{Conn: connect(t, addr(e))}
		c := tls.Client(raw, clientTLS(only(version)))
		want := frame(rand.NewChaCha8([32]byte{4}), 6<<20)
		go func() {
			_, _ = c.Write(want)
			_ = c.CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%d of %d bytes came back", len(got), len(want))
		}
		// The type of an alert shows in 1.2; in 1.3 its length does: two bytes, the type, the tag.
		last := raw.head
		if version == tls.VersionTLS12 && last[0] != 21 || version == tls.VersionTLS13 && binary.BigEndian.Uint16(last[3:]) != 2+1+16 {
			t.Errorf("the last record has the header % x: no close_notify", last)
		}
	})
}

// tapped notes the headers of the records that are read.
type tapped struct {
	net.Conn
	cut  recordCutter
	head []byte // of the last record
}

func (c *tapped) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	scratch := make([]byte, len(p))
	for rest := p[:n]; len(rest) > 0; {
		inBody := c.cut.left > 0
		k := c.cut.copy(scratch, rest)
		if !inBody && c.cut.left > 0 {
			c.head = bytes.Clone(c.cut.head[:])
		}
		rest = rest[k:]
	}
	return n, err
}

// A stream that ends inside a record was cut by somebody: that is no orderly end. Between records it is taken for one.
func TestAConnectionCutInsideARecordIsNoOrderlyEnd(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		for _, whole := range []bool{true, false} {
			ended := make(chan outcome, 1)
			e := engine(t, secret(Config{}, only(version)), func(s *fakeShard, c session.Conn) session.Endpoint {
				return &echo{base{s: s, c: c, onEnd: func(r session.NetReason, err error) { ended <- outcome{r, err} }}}
			})
			tcp := connect(t, addr(e))
			raw := &corked{Conn: tcp}
			c := tls.Client(raw, clientTLS(only(version)))
			if err := c.Handshake(); err != nil {
				t.Fatal(err)
			}
			raw.cork = true
			_, _ = c.Write([]byte("some words"))
			if !whole {
				raw.kept = raw.kept[:len(raw.kept)-3]
			}
			raw.uncork()
			_ = tcp.CloseWrite()
			got := <-ended
			if want := map[bool]session.NetReason{true: session.NetEOF, false: session.NetReset}[whole]; got.reason != want {
				t.Errorf("whole %v: reason %d (%v), want %d", whole, got.reason, got.err, want)
			}
			if !whole && !strings.Contains(got.err.Error(), "inside a TLS record") {
				t.Errorf("the error is %v", got.err)
			}
		}
	})
}

// A broken record ends the connection with an alert for the peer, after what came before it.
func TestABrokenRecordEndsTheConnectionWithAnAlert(t *testing.T) {
	ended := make(chan outcome, 1)
	h := &holder{got: make(chan []byte, 16)}
	h.onEnd = func(r session.NetReason, err error) { ended <- outcome{r, err} }
	e := engine(t, secret(Config{}, nil), func(s *fakeShard, c session.Conn) session.Endpoint {
		h.s, h.c = s, c
		return h
	})
	raw := &corked{Conn: connect(t, addr(e))}
	c := tls.Client(raw, clientTLS(nil))
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	raw.cork = true
	_, _ = c.Write([]byte("good"))
	good := len(raw.kept)
	_, _ = c.Write([]byte("bad"))
	raw.kept[good+recordHeader] ^= 1
	raw.uncork()
	if got := string(<-h.got); got != "good" {
		t.Errorf("the endpoint was handed %q", got)
	}
	e.Post(0, func(_ time.Time, sh Shard) { sh.(*fakeShard).do(session.Op{Kind: session.OpResume, Conn: h.c}) })
	if got := <-ended; got.reason != session.NetReset || !strings.Contains(got.err.Error(), "bad record MAC") {
		t.Errorf("ended with %d, %v", got.reason, got.err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "bad record MAC") {
		t.Errorf("the peer is told %v", err)
	}
}

// The peer changes its keys in mid-stream and asks us to do the same. crypto/tls never asks by itself, so the test speaks for it.
func TestAKeyUpdateIsAnsweredAndTheStreamGoesOn(t *testing.T) {
	e := engine(t, secret(Config{}, nil), echoing)
	var log strings.Builder
	raw := connect(t, addr(e))
	c := tls.Client(raw, clientTLS(func(c *tls.Config) {
		only(tls.VersionTLS13)(c)
		c.KeyLogWriter = &log
	}))
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	if suite := c.ConnectionState().CipherSuite; suite != tls.TLS_AES_128_GCM_SHA256 {
		t.Skipf("cipher suite %s; the test speaks AES-128-GCM", tls.CipherSuiteName(suite))
	}
	w := &keyUpdater{t: t, raw: raw, secret: clientSecret(t, log.String())}
	w.record(23, []byte("before"))
	w.record(22, []byte{24, 0, 0, 1, 1}) // KeyUpdate, update_requested
	w.update()
	w.record(23, []byte("after"))
	got := make([]byte, len("beforeafter"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "beforeafter" { // reads our KeyUpdate on the way
		t.Fatalf("echo %q, %v", got, err)
	}
}

// keyUpdater writes records as a TLS 1.3 client whose handshake is over (AES-128-GCM, SHA-256).
type keyUpdater struct {
	t      *testing.T
	raw    net.Conn
	secret []byte
	seq    uint64
}

func (w *keyUpdater) expand(label string, n int) []byte {
	info := binary.BigEndian.AppendUint16(nil, uint16(n))
	info = append(info, byte(len("tls13 "+label)))
	info = append(append(info, "tls13 "+label...), 0)
	key, err := hkdf.Expand(sha256.New, w.secret, string(info), n)
	if err != nil {
		w.t.Fatal(err)
	}
	return key
}

func (w *keyUpdater) update() { w.secret, w.seq = w.expand("traffic upd", 32), 0 }

func (w *keyUpdater) record(typ byte, data []byte) {
	block, err := aes.NewCipher(w.expand("key", 16))
	if err != nil {
		w.t.Fatal(err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		w.t.Fatal(err)
	}
	nonce := w.expand("iv", 12)
	for i := range 8 {
		nonce[4+i] ^= byte(w.seq >> (56 - 8*i))
	}
	w.seq++
	head := []byte{23, 3, 3, 0, 0}
	binary.BigEndian.PutUint16(head[3:], uint16(len(data)+1+aead.Overhead()))
	if _, err := w.raw.Write(aead.Seal(head, nonce, append(bytes.Clone(data), typ), head)); err != nil {
		w.t.Fatal(err)
	}
}

func clientSecret(t *testing.T, log string) []byte {
	for line := range strings.Lines(log) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "CLIENT_TRAFFIC_SECRET_0" {
			b, err := hex.DecodeString(f[2])
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
	}
	t.Fatal("no client secret in the key log")
	return nil
}
