package testkit

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"pointsman/codec"
)

// Broker is one broker of a cluster: a listener, its connections and the faults that were ordered.
type Broker struct {
	cluster    *Cluster
	index      int
	advertised string

	mu       sync.Mutex // guards what follows
	moved    *sync.Cond // frozen, deaf or a connection's end changed
	addr     string     // as bound; kept over a Stop
	ln       net.Listener
	conns    map[*Conn]struct{}
	accepted int
	hooks    []*hook
	frozen   bool // neither reads nor writes
	deaf     bool // does not read
}

func newBroker(c *Cluster, index int) *Broker {
	b := &Broker{cluster: c, index: index, conns: map[*Conn]struct{}{}}
	b.moved = sync.NewCond(&b.mu)
	return b
}

func (b *Broker) listen(addr string) error {
	ctx, cancel := context.WithTimeout(b.cluster.ctx, 5*time.Second)
	defer cancel()
	ln, err := listenAgain(ctx, addr)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", addr, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ln, b.addr = ln, ln.Addr().String()
	if b.advertised == "" {
		b.advertised = b.addr
		if names := b.cluster.opts.Advertised; len(names) > 0 {
			b.advertised = names[b.index]
		}
	}
	b.cluster.wg.Go(func() { b.accept(ln) })
	return nil
}

func (b *Broker) accept(ln net.Listener) {
	for {
		nc, err := ln.Accept()
		if err != nil {
			return // closed by Stop: nothing else ends a loopback listener
		}
		if config := b.cluster.opts.TLS; config != nil {
			nc = tls.Server(nc, config)
		}
		c := newConn(b, nc)
		b.mu.Lock()
		if b.ln != ln {
			b.mu.Unlock()
			nc.Close()
			return
		}
		b.accepted++
		b.conns[c] = struct{}{}
		b.cluster.wg.Add(2)
		b.mu.Unlock()
		go func() { defer b.cluster.wg.Done(); c.readLoop() }()
		go func() { defer b.cluster.wg.Done(); c.writeLoop() }()
		b.cluster.mu.Lock()
		b.cluster.notify()
		b.cluster.mu.Unlock()
	}
}

// Stop kills the broker: its port refuses connections and its connections end with a reset. Its topics stay its own.
func (b *Broker) Stop() {
	b.mu.Lock()
	ln := b.ln
	b.ln = nil
	b.mu.Unlock()
	if ln != nil {
		ln.Close()
	}
	b.ResetConns()
}

// Start brings a stopped broker back on the same port.
func (b *Broker) Start() error {
	return b.listen(b.Addr())
}

// ResetConns ends all connections with a TCP reset.
func (b *Broker) ResetConns() {
	for _, c := range b.liveConns() {
		c.Reset()
	}
}

// CloseConns ends all connections in good order.
func (b *Broker) CloseConns() {
	for _, c := range b.liveConns() {
		c.Close()
	}
}

func (b *Broker) liveConns() []*Conn {
	b.mu.Lock()
	defer b.mu.Unlock()
	conns := make([]*Conn, 0, len(b.conns))
	for c := range b.conns {
		conns = append(conns, c)
	}
	slices.SortFunc(conns, func(x, y *Conn) int { return int(x.id) - int(y.id) })
	return conns
}

// Index is the broker's place in its cluster.
func (b *Broker) Index() int { return b.index }

// Addr is the address that the broker is bound to.
func (b *Broker) Addr() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.addr
}

// Advertised is the logical "host:port" of the broker.
func (b *Broker) Advertised() string { return b.advertised }

// URL is what a lookup answer names.
func (b *Broker) URL() string { return b.cluster.scheme() + b.advertised }

// Freeze makes the broker behave as a stopped process: the system still accepts connections and takes bytes for it, but
// it reads and says nothing until Thaw (CN-03).
func (b *Broker) Freeze() { b.setFaults(true, b.deafNow()) }

// Thaw ends Freeze and StopReading.
func (b *Broker) Thaw() { b.setFaults(false, false) }

// StopReading makes the broker write but not read, until Thaw. A frame that is being read is still taken.
func (b *Broker) StopReading() {
	b.mu.Lock()
	frozen := b.frozen
	b.mu.Unlock()
	b.setFaults(frozen, true)
}

func (b *Broker) deafNow() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.deaf
}

func (b *Broker) setFaults(frozen, deaf bool) {
	b.mu.Lock()
	b.frozen, b.deaf = frozen, deaf
	b.mu.Unlock()
	b.moved.Broadcast()
}

// gate holds a reader or writer of c while a fault is on. It returns at once when c has ended.
func (b *Broker) gate(c *Conn, reading bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for (b.frozen || reading && (b.deaf || c.deaf)) && c.ctx.Err() == nil {
		b.moved.Wait()
	}
}

// forget drops an ended connection.
func (b *Broker) forget(c *Conn) {
	b.mu.Lock()
	delete(b.conns, c)
	b.mu.Unlock()
	b.moved.Broadcast()
}

// hook is one order for one type of command.
type hook struct {
	typ codec.Type
	fn  Hook
}

// hooksFor are the hooks of a type, the newest first.
func (b *Broker) hooksFor(t codec.Type) []Hook {
	b.mu.Lock()
	defer b.mu.Unlock()
	var fns []Hook
	for _, h := range slices.Backward(b.hooks) {
		if h.typ == t {
			fns = append(fns, h.fn)
		}
	}
	return fns
}
