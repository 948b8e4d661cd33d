package netio

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

// The resolver's limits. A name that resolved once keeps its addresses for staleFor: while the name service is slow or dead they are
// better than nothing (OP-05), but only after it was asked, because a broker that moved has another address under the same name.
const (
	resolveWorkers = 32
	resolveTimeout = 3 * time.Second
	freshFor       = 10 * time.Second
	failedFor      = time.Second
	staleFor       = time.Hour
	maxNames       = 4096
)

// resolver resolves names off the loops, each once at a time, by a bounded number of goroutines. Guarded by mu.
type resolver struct {
	lookup  func(ctx context.Context, host string) ([]netip.Addr, error)
	ctx     context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup

	mu      sync.Mutex
	names   map[string]*name
	running int
	waiting []string // names that no worker has taken yet
	closed  bool
}

type name struct {
	addrs  []netip.Addr // the last ones known; never changed in place
	seen   time.Time    // when
	err    error        // of the last lookup, unless addrs are used in its place
	until  time.Time    // addrs or err hold until then
	busy   bool
	callee []func([]netip.Addr, error)
}

func newResolver(lookup func(context.Context, string) ([]netip.Addr, error)) *resolver {
	if lookup == nil {
		lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	r := &resolver{lookup: lookup, names: make(map[string]*name)}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// resolve returns what is known about host; when that is nothing (known is false) it calls done later, on a goroutine of its own.
func (r *resolver) resolve(host string, now time.Time, done func([]netip.Addr, error)) (addrs []netip.Addr, err error, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.names[host]
	if n == nil {
		r.makeRoom(now)
		n = new(name)
		r.names[host] = n
	}
	if now.Before(n.until) {
		return n.addrs, n.err, true
	}
	if r.closed {
		return nil, fmt.Errorf("resolve %q: %w", host, context.Canceled), true
	}
	n.callee = append(n.callee, done)
	if n.busy {
		return nil, nil, false
	}
	n.busy = true
	if r.running < resolveWorkers {
		r.running++
		r.workers.Add(1)
		go r.work(host)
	} else {
		r.waiting = append(r.waiting, host)
	}
	return nil, nil, false
}

func (r *resolver) work(host string) {
	defer r.workers.Done()
	for {
		ctx, cancel := context.WithTimeout(r.ctx, resolveTimeout)
		addrs, err := r.lookup(ctx, host)
		cancel()
		if err == nil && len(addrs) == 0 {
			err = fmt.Errorf("resolve %q: the name has no address", host)
		}
		done, more := r.settle(host, addrs, err, time.Now())
		done()
		if more == "" {
			return
		}
		host = more
	}
}

// settle notes the outcome for host. It returns the calls to be made without the lock, and the next name to resolve; "" ends the worker.
func (r *resolver) settle(host string, addrs []netip.Addr, err error, now time.Time) (done func(), more string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.names[host]
	switch {
	case err == nil:
		n.addrs, n.seen, n.err, n.until = addrs, now, nil, now.Add(freshFor)
	case n.addrs != nil && now.Sub(n.seen) < staleFor:
		n.err, n.until = nil, now.Add(failedFor)
	default:
		n.addrs, n.err, n.until = nil, fmt.Errorf("resolve %q: %w", host, err), now.Add(failedFor)
	}
	callee := n.callee
	n.callee, n.busy = nil, false
	addrs, err = n.addrs, n.err
	if len(r.waiting) > 0 && !r.closed {
		more = r.waiting[0]
		r.waiting = r.waiting[1:]
	} else {
		r.running--
	}
	return func() {
		for _, fn := range callee {
			fn(addrs, err)
		}
	}, more
}

// makeRoom keeps the cache below maxNames: what is out of date goes first, then anything that nobody waits for.
func (r *resolver) makeRoom(now time.Time) {
	if len(r.names) < maxNames {
		return
	}
	for host, n := range r.names {
		if !n.busy && now.Sub(n.seen) >= freshFor && !now.Before(n.until) {
			delete(r.names, host)
		}
	}
	for host, n := range r.names {
		if len(r.names) < maxNames {
			return
		}
		if !n.busy {
			delete(r.names, host)
		}
	}
}

// close ends the lookups and waits for their goroutines.
func (r *resolver) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.workers.Wait()
}
