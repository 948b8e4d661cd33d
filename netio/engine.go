// Package netio is the event loops: it accepts, dials, reads, writes, pauses and closes, and knows no Pulsar. internal/app
// builds one Engine; core/session is called by it through the contract of session.Endpoint and answers with session.Ops.
// It is the only package that knows sockets. It must never decide anything about the protocol, hold bytes without a limit, or block a loop.
//
// Everything of a loop (connections, buffers, timers, shard) is owned by that loop's goroutine. What crosses loops is an
// accepted descriptor, a Post and the counters.
package netio

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"pointsman/core/session"
)

// Listener is one address to accept on.
type Listener struct {
	Network string // tcp (both families where the host has them), tcp4 or tcp6
	Addr    string // host:port; port 0 takes a free one, see Engine.Addrs
	ID      int    // handed to Shard.Accept
	// TLS is spoken on it; nil is plaintext. It must not be changed any more, and should be the same for all listeners of a certificate,
	// for sessions are resumed by its keys.
	TLS *tls.Config
}

// Shard is what runs on one loop: all the sessions of it. Its methods and those of the endpoints it hands out are only
// called on that loop, never at the same time.
type Shard interface {
	// Accept takes the new connection c; nil refuses it (what Ops ask for c is performed first).
	Accept(now time.Time, c session.Conn, listener int, peer, local netip.AddrPort) session.Endpoint
	// Tick fires what is due and returns the next deadline; the zero time is none. The loop calls it at that deadline, and after every
	// event as well, because any call may have set an earlier one: it must be cheap when nothing is due.
	Tick(now time.Time) (next time.Time)
	// Ops are the ops that the shard and its endpoints ask for, in order; the loop performs them after every call, then calls ResetOps.
	Ops() []session.Op
	// ResetOps forgets the ops; all views in them end here.
	ResetOps()
}

// The defaults of Config.
const (
	DefaultHighWater    = 1 << 20
	DefaultLowWater     = 256 << 10
	DefaultBufferMemory = 256 << 20
	DefaultReadBuffer   = 256 << 10
	DefaultMaxRest      = 8 << 20
	DefaultDialTimeout  = 10 * time.Second
	DefaultWriteStall   = 5 * time.Minute
	DefaultFlushTimeout = 5 * time.Second

	DefaultHandshakeTimeout = 5 * time.Second
	DefaultMaxHandshakes    = 512
)

// Config is how an Engine is made. Zero values mean the defaults above.
type Config struct {
	Listeners []Listener
	Loops     int // 0 = GOMAXPROCS, at most 256

	HighWater    int   // bytes queued for a connection above which its sources are not read
	LowWater     int   // and below which they are read again
	BufferMemory int64 // bytes of all queues and unconsumed rests together; near it the high watermark shrinks to nothing
	ReadBuffer   int   // bytes of one read, and of one connection's share of a turn
	MaxRest      int   // bytes that an endpoint may leave unconsumed; a connection with more is closed

	DialTimeout  time.Duration // resolving and connecting, over all addresses of a name
	WriteStall   time.Duration // a peer that took no byte of its queue for so long is closed
	FlushTimeout time.Duration // how long a closing connection may take to take its queue

	HandshakeTimeout time.Duration // for TLS, from the connection on; again when it had to wait for its turn
	MaxHandshakes    int           // TLS handshakes under way of one loop and side (clients, brokers); more wait
	// ClientTLS is the configuration that a dial names (Op.TLS); its ServerName is replaced. nil refuses the dial. Called on the loops.
	ClientTLS func(name string) *tls.Config

	MaxConns int // accepted connections at a time; more are closed at once. 0 = no limit

	// Lookup resolves a name off the loops; nil is the system's resolver.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	// NewShard makes the shard of a loop; called once per loop by New.
	NewShard func(loop int) Shard
	// Report observes OpReports, on the loop's goroutine.
	Report func(session.Report)
	// Ask takes the ops that are the application's (OpTranslate, OpOldAcks), on the loop's goroutine.
	Ask func(loop int, op session.Op)
	// Fault is told about troubles of a loop itself (no descriptors left, the poller failed), at most one a second and kind.
	Fault func(error)
}

// Engine is a set of event loops. Its methods may be called from any goroutine.
type Engine struct {
	cfg      Config
	base     time.Time // zero of the loops' clocks
	loops    []*loop
	resolver *resolver
	acceptor *acceptor

	mem     atomic.Int64 // bytes of all queues and rests, by capacity
	clients atomic.Int64 // accepted connections that are open

	slots      chan struct{}  // of TLS handshakes that compute
	handshakes sync.WaitGroup // their goroutines
	fields     tlsFields

	mu      sync.Mutex // guards started and stopped
	started bool
	stopped bool
	running sync.WaitGroup
}

// New opens the listeners and the loops; nothing is accepted before Start. An Engine that is not started is released by Shutdown as well.
func New(cfg Config) (*Engine, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, base: time.Now(), fields: findTLSFields()}
	e.slots = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1)) // one core stays for the loops
	e.resolver = newResolver(cfg.Lookup)
	e.acceptor = &acceptor{e: e, reserve: openReserve()}
	for i := range cfg.Loops {
		l, err := newLoop(e, i)
		if err != nil {
			e.release()
			return nil, fmt.Errorf("netio: event loop %d of %d: %w", i, cfg.Loops, err)
		}
		e.loops = append(e.loops, l)
	}
	e.acceptor.meter.loops = e.loops
	for _, ln := range cfg.Listeners {
		if err := e.acceptor.listen(ln); err != nil {
			e.release()
			return nil, err
		}
	}
	for i, l := range e.loops {
		l.shard = cfg.NewShard(i)
	}
	return e, nil
}

func (cfg *Config) complete() error {
	if cfg.Loops == 0 {
		cfg.Loops = min(runtime.GOMAXPROCS(0), maxLoops)
	}
	setDefault(&cfg.HighWater, DefaultHighWater)
	setDefault(&cfg.LowWater, min(DefaultLowWater, cfg.HighWater/4))
	setDefault(&cfg.BufferMemory, DefaultBufferMemory)
	setDefault(&cfg.ReadBuffer, DefaultReadBuffer)
	setDefault(&cfg.MaxRest, DefaultMaxRest)
	setDefault(&cfg.DialTimeout, DefaultDialTimeout)
	setDefault(&cfg.WriteStall, DefaultWriteStall)
	setDefault(&cfg.FlushTimeout, DefaultFlushTimeout)
	setDefault(&cfg.HandshakeTimeout, DefaultHandshakeTimeout)
	setDefault(&cfg.MaxHandshakes, DefaultMaxHandshakes)
	switch {
	case cfg.NewShard == nil:
		return errors.New("netio: Config.NewShard is nil")
	case cfg.Loops < 0 || cfg.Loops > maxLoops:
		return fmt.Errorf("netio: %d loops; set 0 (one per core) to %d", cfg.Loops, maxLoops)
	case cfg.LowWater >= cfg.HighWater:
		return fmt.Errorf("netio: the low watermark (%d bytes) must be below the high one (%d bytes)", cfg.LowWater, cfg.HighWater)
	case cfg.ReadBuffer < minRead:
		return fmt.Errorf("netio: a read buffer of %d bytes is below the least, %d", cfg.ReadBuffer, minRead)
	}
	return nil
}

func setDefault[T int | int64 | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Start runs the loops and begins to accept.
func (e *Engine) Start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.started || e.stopped {
		return errors.New("netio: Start on an engine that was started or shut down before")
	}
	e.started = true
	for _, l := range e.loops {
		e.running.Add(1)
		go func() {
			defer e.running.Done()
			l.run()
		}()
	}
	return e.acceptor.start()
}

// Addrs are the listening addresses in the order of Config.Listeners.
func (e *Engine) Addrs() []netip.AddrPort {
	addrs := make([]netip.AddrPort, 0, len(e.acceptor.listeners))
	for _, ln := range e.acceptor.listeners {
		addrs = append(addrs, ln.addr)
	}
	return addrs
}

// Loops is the number of loops; Post takes 0 to Loops()-1.
func (e *Engine) Loops() int { return len(e.loops) }

// Post runs fn on a loop, soon, and performs the ops it leaves. false: the loop has ended and fn will not run.
func (e *Engine) Post(loop int, fn func(now time.Time, s Shard)) bool {
	l := e.loops[loop]
	return l.post(func() {
		fn(l.now, l.shard)
		l.perform(nil)
	})
}

// StopAccepting closes the listeners and returns when they are closed. Connections stay.
func (e *Engine) StopAccepting() {
	e.mu.Lock()
	live := e.started
	e.mu.Unlock()
	done := make(chan struct{})
	if live && e.loops[0].post(func() { e.acceptor.close(); close(done) }) {
		<-done
		return
	}
	if live {
		<-e.loops[0].ended
	}
	e.acceptor.close() // its loop has ended or never ran: nobody else touches it
}

// Shutdown stops accepting and closes everything: endpoints get NetShutdown, queues are flushed within Config.FlushTimeout or until
// ctx ends, whichever is first. It returns when the loops have ended, with ctx's error if queues were cut.
func (e *Engine) Shutdown(ctx context.Context) error {
	e.mu.Lock()
	first, started := !e.stopped, e.started
	e.stopped = true
	e.mu.Unlock()
	if !started {
		if first {
			e.release()
		}
		return nil
	}
	if first {
		e.StopAccepting()
		for _, l := range e.loops {
			l.post(l.stop)
		}
	}
	ended := make(chan struct{})
	go func() {
		e.running.Wait()
		close(ended)
	}()
	var err error
	select {
	case <-ended:
	case <-ctx.Done():
		err = fmt.Errorf("netio: shutdown cut the queues of some connections: %w", context.Cause(ctx))
		for _, l := range e.loops {
			l.post(l.cut)
		}
		<-ended
	}
	if first {
		e.release()
	}
	return err
}

// release gives back the descriptors of loops that do not run.
func (e *Engine) release() {
	e.resolver.close()
	e.handshakes.Wait()
	e.acceptor.close()
	e.acceptor.closeReserve()
	for _, l := range e.loops {
		l.release()
	}
}

func (e *Engine) fault(err error) {
	if e.cfg.Fault != nil {
		e.cfg.Fault(err)
	}
}
