package zk

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of a connection attempt.
const (
	// connectTimeout bounds one TCP connect, resolveTimeout one name, handshakeTimeout the time from there until the
	// server has granted a session. (The library waits almost seven session time-outs for that, which is minutes
	// behind a server that hangs.)
	connectTimeout   = 2 * time.Second
	resolveTimeout   = 3 * time.Second
	handshakeTimeout = 5 * time.Second
	// dialPause is the least time between two connection attempts: a server that ends every connection at once would
	// otherwise be called in an endless loop.
	dialPause = 200 * time.Millisecond
)

// The protocol's numbers of requests: the one with which the library sets its watches again, and those whose answers
// carry no transaction number.
const (
	opPing       = 11
	opSetAuth    = 100
	opSetWatches = 101
)

// hosts hands out the servers to the library in turn, by name: the names are resolved at every connect, so addresses
// may change and a name that does not resolve stops nobody. Used by the library's one loop only.
type hosts struct {
	servers []string
	next    int
	tried   int // since the last session
}

// Init implements the library's HostProvider; the servers are shuffled already.
func (h *hosts) Init(servers []string) error {
	h.servers = slices.Clone(servers)
	rand.Shuffle(len(h.servers), func(i, j int) { h.servers[i], h.servers[j] = h.servers[j], h.servers[i] })
	return nil
}

// Len implements HostProvider.
func (h *hosts) Len() int { return len(h.servers) }

// Next implements HostProvider. After each round without a session the library pauses for a second.
func (h *hosts) Next() (server string, retryStart bool) {
	server = h.servers[h.next]
	h.next = (h.next + 1) % len(h.servers)
	retryStart = h.tried > 0 && h.tried%len(h.servers) == 0
	h.tried++
	return server, retryStart
}

// Connected implements HostProvider.
func (h *hosts) Connected() { h.tried = 0 }

// dialer makes the connections of one client: one at a time.
type dialer struct {
	ctx     context.Context // ends with the client
	resolve func(ctx context.Context, host string) ([]string, error)
	contact func(at time.Time) // bytes came from the server
	traffic *traffic
	granted func(sessionTimeout time.Duration) // the server has granted a session
	watched func()                             // the library has sent its watches
	await   func()                             // waits until it has, or has none
	failed  func(server string, err error)

	// Used by the library's loop only:
	dials int
	last  time.Time

	mu      sync.Mutex
	current net.Conn // guarded by mu
}

func (d *dialer) dial(_, server string, _ time.Duration) (net.Conn, error) {
	// The library forgets to close a connection whose session had expired.
	d.close()
	if wait := dialPause - time.Since(d.last); wait > 0 {
		select {
		case <-time.After(wait):
		case <-d.ctx.Done():
			return nil, d.ctx.Err()
		}
	}
	d.last = time.Now()
	conn, err := d.connect(server)
	if err != nil {
		d.failed(server, err)
		return nil, err
	}
	// A deadline for the whole handshake, which wire keeps the library from lifting.
	if err := conn.SetReadDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		_ = conn.Close()
		return nil, err
	}
	w := &wire{Conn: conn, d: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil {
		_ = conn.Close()
		return nil, d.ctx.Err()
	}
	d.current = w
	return w, nil
}

// connect tries the addresses of a server, each time beginning with another one.
func (d *dialer) connect(server string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(server)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(d.ctx, resolveTimeout)
	addresses, err := d.resolve(ctx, host)
	cancel()
	if err != nil {
		return nil, fmt.Errorf("resolving %s: %w", host, err)
	}
	if len(addresses) == 0 {
		return nil, fmt.Errorf("resolving %s: the name has no address", host)
	}
	slices.Sort(addresses)
	d.dials++
	for i := range addresses {
		address := addresses[(d.dials+i)%len(addresses)]
		ctx, cancel := context.WithTimeout(d.ctx, connectTimeout)
		var conn net.Conn
		conn, err = new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(address, port))
		cancel()
		if err == nil {
			return conn, nil
		}
	}
	return nil, err
}

// close ends the current connection, if any.
func (d *dialer) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.current != nil {
		_ = d.current.Close()
		d.current = nil
	}
}

// wire is a connection whose beginning is observed: the library tells neither the granted session time-out nor when it
// has set its watches again.
//
// For these it tells the server the newest transaction that it has seen, and wants to hear of later ones. A request
// that was waiting since before may be answered first, with a newer number, and then a change in between would be
// reported by no watch. (The library also reads that number without a lock.) So answers wait until the watches were sent.
type wire struct {
	net.Conn
	d     *dialer
	early atomic.Bool // a request was sent before the watches

	// Used by the reading side only, which is the library's loop until granted and its receiver afterwards:
	head    []byte // length, protocol version and session time-out of the connect response
	left    int    // bytes of the connect response still to come, once its length is known
	granted bool
}

// Read implements net.Conn.
func (w *wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if n > 0 {
		w.d.contact(time.Now())
		w.d.traffic.received.Add(int64(n))
		if !w.granted {
			w.handshake(p[:n])
		} else if w.early.Load() {
			w.d.await()
		}
	}
	return n, err
}

func (w *wire) handshake(p []byte) {
	for _, b := range p {
		if len(w.head) < 12 {
			w.head = append(w.head, b)
			if len(w.head) == 4 {
				w.left = int(binary.BigEndian.Uint32(w.head)) + 1
			}
		}
		if w.left > 0 {
			w.left--
		}
	}
	if len(w.head) >= 12 && w.left == 0 {
		w.granted = true
		w.d.granted(time.Duration(int32(binary.BigEndian.Uint32(w.head[8:]))) * time.Millisecond)
	}
}

// SetReadDeadline implements net.Conn. Until a session is granted the deadline of dial stays.
func (w *wire) SetReadDeadline(t time.Time) error {
	if !w.granted {
		return nil
	}
	return w.Conn.SetReadDeadline(t)
}

// Write implements net.Conn. The library writes one request per call: length, number, operation, body.
//
// It never fails: after an error it ends the connection, and the reading side tells the library. Told here as well, the
// library would answer the request twice, and three times while it is being closed; then its loop waits for ever for
// somebody to take the last answer.
func (w *wire) Write(p []byte) (int, error) {
	w.d.traffic.requests.Add(1)
	w.d.traffic.sent.Add(int64(len(p)))
	op := uint32(0)
	if len(p) >= 12 {
		op = binary.BigEndian.Uint32(p[8:])
	}
	w.d.traffic.count(int32(op))
	if op != opSetWatches && op != opSetAuth && op != opPing {
		w.early.Store(true)
	}
	if _, err := w.Conn.Write(p); err != nil {
		_ = w.Conn.Close()
	} else if op == opSetWatches {
		w.d.watched()
	}
	return len(p), nil
}
