//go:build linux

package netio

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/core/session"
	"pointsman/internal/tlstest"
)

// dialTLS dials by name and returns how that ended.
func dialTLS(e *Engine, target, config, serverName string) outcome {
	out := make(chan outcome, 1)
	e.Post(0, func(_ time.Time, sh Shard) {
		d := &dialing{out: out}
		d.s = sh.(*fakeShard)
		d.onEnd = func(r session.NetReason, err error) { out <- outcome{r, err} }
		d.s.do(session.Op{Kind: session.OpDial, Addr: target, TLS: config, ServerName: serverName, Endpoint: d})
	})
	return <-out
}

// What a broker may present, and what is said about it.
func TestTLSDialOutcomes(t *testing.T) {
	stranger, err := tlstest.NewCA("stranger")
	if err != nil {
		t.Fatal(err)
	}
	present := func(cert tls.Certificate, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		return tlsServer(t, func(c *tls.Config) { c.Certificates = []tls.Certificate{cert} }, func(c *tls.Conn) { _, _ = io.Copy(io.Discard, c) })
	}
	good := present(certificate(), nil)
	e := engine(t, secret(Config{HandshakeTimeout: time.Minute}, nil), echoing)
	hasty := engine(t, secret(Config{HandshakeTimeout: 300 * time.Millisecond}, nil), echoing) // for what never answers
	for _, c := range []struct {
		name, target, config, server string
		want                         string // in the error; "" is connected
	}{
		{"good", good, "b", "localhost", ""},
		{"good by address", good, "b", "127.0.0.1", ""},
		{"good again, perhaps resumed", good, "b", "localhost", ""},
		{"wrong name", good, "b", "broker-0.example.com", "not broker-0.example.com"},
		{"wrong address", good, "b", "127.0.0.2", "127.0.0.2"},
		{"other authority", present(stranger.Issue("localhost")), "b", "localhost", "certificate signed by unknown authority"},
		{"expired", present(authority().IssueBetween(time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour), "localhost")), "b", "localhost", "expired"},
		{"plaintext", server(t, func(c *net.TCPConn) { _, _ = c.Write([]byte("\x00\x00\x00\x05hello")); _, _ = io.Copy(io.Discard, c) }), "b", "localhost", "is this a plaintext port?"},
		{"plaintext that hangs up", server(t, func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 1)) }), "b", "localhost", "is this a plaintext port?"},
		{"silent", server(t, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) }), "b", "localhost", "not complete within 300ms"},
		{"no such configuration", good, "c", "localhost", `no TLS configuration for "c"`},
	} {
		on := e
		if c.name == "silent" {
			on = hasty
		}
		got := dialTLS(on, c.target, c.config, c.server)
		switch {
		case c.want == "" && got.reason != connected:
			t.Errorf("%s: %d, %v; want a connection", c.name, got.reason, got.err)
		case c.want != "" && (got.reason != session.NetTLSFailed || got.err == nil || !strings.Contains(got.err.Error(), c.want) || !strings.Contains(got.err.Error(), c.target)):
			t.Errorf("%s: %d, %v; want a failure of TLS that mentions %q and %s", c.name, got.reason, got.err, c.want, c.target)
		}
	}
	if s := e.Stats().Loops[0]; s.Handshakes != 3 || s.HandshakeFailures != 7 || s.DialFailures != 7 {
		t.Errorf("counted: %+v", s)
	}
	if s := hasty.Stats().Loops[0]; s.Handshakes != 0 || s.HandshakeFailures != 1 || s.DialFailures != 1 {
		t.Errorf("counted for the silent one: %+v", s)
	}
}

// EL-07: a flood of handshakes of all kinds of slowness. Those who are there already do not notice, a good client gets through, and never
// are more under way than may be.
func TestEL07AHandshakeFloodStarvesNobody(t *testing.T) {
	const most, flood, hellos = 8, 300, 100
	// Of those that have said hello, most are given up each second (handshakePatience): the flood lasts until the time-out.
	e := engine(t, secret(Config{MaxHandshakes: most, HandshakeTimeout: 10 * time.Second}, nil), echoing)
	established := connectTLS(t, addr(e), nil)
	pass := func(c net.Conn) {
		buf := []byte("0123456789")
		if _, err := c.Write(buf); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			t.Fatal(err)
		}
	}
	pass(established)
	hello := recordHello(t)
	var all []net.Conn
	for i := range flood {
		c := connect(t, addr(e))
		all = append(all, c)
		switch i % 3 { // silent; half a hello; a hello, and then nothing
		case 1:
			_, _ = c.Write(hello[:len(hello)/2])
		case 2:
			_, _ = c.Write(hello)
		}
	}
	eventually(t, "as many are under way as may be", func() bool { return e.Stats().Loops[0].Handshaking == most })
	done := make(chan struct{})
	peak := make(chan int64)
	go func() {
		var p int64
		for {
			select {
			case <-done:
				peak <- p
				return
			default:
				p = max(p, e.Stats().Loops[0].Handshaking)
				runtime.Gosched()
			}
		}
	}()
	for i := range 5 {
		pass(established) // a loop that waits for one of the flood has to wait until it is over
		// A client whose machine stands still for a second is given up like the others, and comes again.
		for {
			c := tls.Client(connect(t, addr(e)), clientTLS(nil))
			err := c.Handshake()
			if err == nil {
				pass(c)
			}
			c.Close()
			failed := e.Stats().Loops[0].HandshakeFailures
			if i == 0 && failed > hellos/2 {
				t.Fatalf("%d of the flood had their turn before a good client (%v)", failed, err)
			}
			if err == nil {
				break
			}
		}
	}
	close(done)
	if p := <-peak; p > most {
		t.Errorf("%d handshakes were under way at once, the most is %d", p, most)
	}
	for _, c := range all {
		c.Close()
	}
	eventually(t, "the flood is over", func() bool { s := e.Stats().Loops[0]; return s.Handshaking == 0 && s.Clients == 1 })
	pass(established)
}

// recordHello is what a client says first.
func recordHello(t *testing.T) []byte {
	c := &corked{Conn: nil, cork: true}
	_ = tls.Client(endless{c}, clientTLS(nil)).Handshake()
	return c.kept
}

type endless struct{ *corked }

func (endless) Read([]byte) (int, error) { return 0, io.EOF }

// Whatever ends a handshake in its middle, it leaves no goroutine and no descriptor, and its endpoint is told once.
func TestHandshakesThatAreCutLeaveNothing(t *testing.T) {
	before := descriptors(t)
	hello := recordHello(t)
	for name, cut := range map[string]func(e *Engine, peers []*net.TCPConn, eps chan *base){
		"by the peers": func(_ *Engine, peers []*net.TCPConn, _ chan *base) {
			for i, c := range peers {
				if i%2 == 0 {
					_ = c.SetLinger(0)
				}
				c.Close()
			}
		},
		"by the endpoints": func(e *Engine, peers []*net.TCPConn, eps chan *base) {
			for range peers {
				ep := <-eps
				e.Post(0, func(_ time.Time, sh Shard) {
					ep.closed.Store(1)
					ep.s.do(session.Op{Kind: session.OpClose, Conn: ep.c, Flush: true})
				})
			}
		},
		"by the shutdown": func(e *Engine, _ []*net.TCPConn, _ chan *base) {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := e.Shutdown(ctx); err != nil {
				t.Error(err)
			}
		},
		"by the deadline": func(*Engine, []*net.TCPConn, chan *base) {},
	} {
		t.Run(name, func(t *testing.T) {
			eps := make(chan *base, 100)
			e := engine(t, secret(Config{MaxHandshakes: 10, HandshakeTimeout: time.Second}, nil), func(s *fakeShard, c session.Conn) session.Endpoint {
				ep := &base{s: s, c: c}
				eps <- ep
				return ep
			})
			deaf := server(t, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
			out := make(chan outcome, 20)
			for range cap(out) { // and as many on the other side
				go func() { out <- dialTLS(e, deaf, "b", "localhost") }()
			}
			var peers []*net.TCPConn
			for i := range 30 {
				c := connect(t, addr(e))
				_, _ = c.Write(hello[:len(hello)>>(i%2)])
				peers = append(peers, c)
			}
			eventually(t, "handshakes are under way on both sides", func() bool {
				s := e.Stats().Loops[0]
				// On a machine that stood still some are given up by now.
				return s.Dials == 20 && s.Accepted == 30 && (s.Handshaking == 20 || s.HandshakeFailures > 0)
			})
			cut(e, peers, eps)
			for range cap(out) {
				if o := <-out; o.reason != session.NetTLSFailed && o.reason != session.NetShutdown {
					t.Errorf("a dial ended with %d, %v", o.reason, o.err)
				}
			}
			eventually(t, "everything is closed", func() bool { s := e.Stats().Loops[0]; return s.Conns == 0 && s.Handshaking == 0 })
			for len(eps) > 0 {
				if ep := <-eps; ep.closed.Load() != 1 {
					t.Errorf("an endpoint was told %d times", ep.closed.Load())
				}
			}
		})
	}
	eventually(t, "no descriptor is left", func() bool { return descriptors(t) <= before })
}

// Connections that are reset while their handshakes compute: the descriptor is the goroutine's until it is done with it.
func TestHandshakesUnderChurn(t *testing.T) {
	e := engine(t, secret(Config{Loops: 2, MaxHandshakes: 20}, nil), echoing)
	hello := recordHello(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 60 {
				tcp, err := net.Dial("tcp", addr(e))
				if err != nil {
					t.Error(err)
					return
				}
				if (n+i)%2 == 0 {
					_, _ = tcp.Write(hello)
					_ = tcp.(*net.TCPConn).SetLinger(0)
					tcp.Close()
					continue
				}
				c := tls.Client(tcp, clientTLS(nil))
				_ = c.SetDeadline(time.Now().Add(patience))
				buf := fmt.Appendf(nil, "%4d %4d", i, n)
				want := string(buf)
				if _, err := c.Write(buf); err != nil {
					t.Error(err)
				}
				if _, err := io.ReadFull(c, buf); err != nil || string(buf) != want {
					t.Errorf("echo %q, %v; want %q", buf, err, want)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
}

// A session that was opened before is resumed: the second handshake needs no signature.
func TestTLSSessionsAreResumed(t *testing.T) {
	versions(t, func(t *testing.T, version uint16, engine func(testing.TB, Config, func(*fakeShard, session.Conn) session.Endpoint) *Engine) {
		e := engine(t, secret(Config{}, only(version)), echoing)
		cache := tls.NewLRUClientSessionCache(1)
		for i := range 2 {
			c := connectTLS(t, addr(e), func(c *tls.Config) { only(version)(c); c.ClientSessionCache = cache })
			buf := []byte("x")
			_, _ = c.Write(buf)
			if _, err := io.ReadFull(c, buf); err != nil { // reads the ticket of 1.3
				t.Fatal(err)
			}
			if resumed := c.ConnectionState().DidResume; resumed != (i == 1) {
				t.Errorf("handshake %d resumed: %v", i, resumed)
			}
			c.Close()
		}
	})
}
