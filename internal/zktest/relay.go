package zktest

import (
	"net"
	"sync"
	"testing"
)

// Relay is a TCP relay in front of a server whose connections a test can cut or let hang: what a network does.
type Relay struct {
	listener net.Listener
	group    sync.WaitGroup

	mu     sync.Mutex // guards what follows
	target string
	cut    bool
	held   chan struct{} // not nil: bytes wait until it is closed
	oneWay bool          // only those of the server
	match  func([]byte) bool
	conns  map[net.Conn]bool
	made   int
}

// NewRelay starts a relay to target, "host:port", on a free port.
func NewRelay(t testing.TB, target string) *Relay {
	t.Helper()
	return NewRelayOn(t, "127.0.0.1:0", target)
}

// NewRelayOn starts a relay that listens on an address of its own.
func NewRelayOn(t testing.TB, listen, target string) *Relay {
	t.Helper()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{listener: l, target: target, conns: map[net.Conn]bool{}}
	r.group.Add(1)
	go func() {
		defer r.group.Done()
		r.accept()
	}()
	t.Cleanup(func() {
		_ = l.Close()
		r.Release()
		r.Cut()
		r.group.Wait()
	})
	return r
}

// Addr is where the relay listens.
func (r *Relay) Addr() string { return r.listener.Addr().String() }

// Cut ends all connections and lets no new one through until Restore.
func (r *Relay) Cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = true
	for c := range r.conns {
		_ = c.Close()
	}
}

// Restore ends a Cut.
func (r *Relay) Restore() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = false
}

// Hold keeps all bytes back, both ways, until Release; connections stay and are accepted.
func (r *Relay) Hold() { r.hold(false) }

// HoldReplies keeps only what the server says back: requests are carried out and nobody hears of it.
func (r *Relay) HoldReplies() { r.hold(true) }

// HoldRepliesFrom waits for bytes of the client that match says yes to (they arrive as they were written, as a rule) and
// keeps replies back from there on, until Release.
func (r *Relay) HoldRepliesFrom(match func(request []byte) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.match = match
}

func (r *Relay) hold(oneWay bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.oneWay = oneWay
	if r.held == nil {
		r.held = make(chan struct{})
	}
}

// Release ends a Hold.
func (r *Relay) Release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held != nil {
		close(r.held)
		r.held = nil
	}
}

// Connections counts the connections that were let through so far, and those that are open now.
func (r *Relay) Connections() (made, open int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.made, len(r.conns) / 2
}

func (r *Relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return // closed
		}
		r.mu.Lock()
		target, cut := r.target, r.cut
		r.mu.Unlock()
		var server net.Conn
		if !cut {
			server, err = net.Dial("tcp", target)
		}
		if cut || err != nil {
			_ = client.Close()
			continue
		}
		r.mu.Lock()
		if r.cut {
			r.mu.Unlock()
			_ = client.Close()
			_ = server.Close()
			continue
		}
		r.conns[client], r.conns[server] = true, true
		r.made++
		r.mu.Unlock()
		var both sync.WaitGroup
		both.Add(2)
		r.group.Add(1)
		go r.copy(client, server, true, &both)
		go r.copy(server, client, false, &both)
		go func() {
			defer r.group.Done()
			both.Wait()
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.conns, client)
			delete(r.conns, server)
		}()
	}
}

func (r *Relay) copy(dst, src net.Conn, reply bool, both *sync.WaitGroup) {
	defer both.Done()
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		r.mu.Lock()
		if !reply && r.match != nil && r.match(buf[:n]) {
			r.match, r.oneWay = nil, true
			if r.held == nil {
				r.held = make(chan struct{})
			}
		}
		held := r.held
		if r.oneWay && !reply {
			held = nil
		}
		r.mu.Unlock()
		if held != nil {
			<-held
		}
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
