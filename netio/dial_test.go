//go:build linux

package netio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/session"
)

// outcome is how a dial ended: NetEOF stands for connected.
type outcome struct {
	reason session.NetReason
	err    error
}

const connected = session.NetReason(255)

type dialing struct {
	base
	out chan outcome
}

func (d *dialing) Dialed(_ time.Time, c session.Conn) {
	d.out <- outcome{reason: connected}
	d.s.do(session.Op{Kind: session.OpClose, Conn: c})
}

func dialOn(e *Engine, target string, deny func(netip.Addr) bool) outcome {
	return <-beginDial(e, target, deny)
}

func beginDial(e *Engine, target string, deny func(netip.Addr) bool) <-chan outcome {
	out := make(chan outcome, 1)
	e.Post(0, func(_ time.Time, sh Shard) {
		s := sh.(*fakeShard)
		d := &dialing{out: out}
		d.s = s
		d.onEnd = func(r session.NetReason, err error) { out <- outcome{r, err} }
		s.do(session.Op{Kind: session.OpDial, Addr: target, Deny: deny, Endpoint: d})
	})
	return out
}

func TestDialOutcomes(t *testing.T) {
	live := echoServer(t)
	_, port, _ := net.SplitHostPort(live)
	hole := fullListener(t)
	_, holePort, _ := net.SplitHostPort(hole)
	lo, lo6 := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")
	mapped := netip.MustParseAddr("::ffff:127.0.0.1")
	hasty := engine(t, Config{DialTimeout: 400 * time.Millisecond}, echoing) // for what never answers; all else has time
	e := engine(t, Config{DialTimeout: time.Minute, Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		switch host {
		case "live":
			return []netip.Addr{lo}, nil
		case "second": // nobody listens on the first
			return []netip.Addr{lo6, lo}, nil
		case "mapped":
			return []netip.Addr{mapped}, nil
		case "empty":
			return nil, nil
		}
		return nil, errors.New("no such host")
	}}, echoing)
	denyLoopback := func(a netip.Addr) bool { return a == lo }
	for _, c := range []struct {
		target string
		deny   func(netip.Addr) bool
		want   session.NetReason
		text   string
	}{
		{"127.0.0.1:" + port, nil, connected, ""},
		{"live:" + port, nil, connected, ""},
		{"second:" + port, nil, connected, ""},
		{"mapped:" + port, nil, connected, ""},
		{"127.0.0.1:1", nil, session.NetDialFailed, "connection refused"},
		{"second:1", nil, session.NetDialFailed, "second:1 at 127.0.0.1: connect"},
		{"127.0.0.1:" + holePort, nil, session.NetDialTimeout, "no answer"},
		{"127.0.0.1:" + port, denyLoopback, session.NetDialDenied, "must not be dialled"},
		{"mapped:" + port, denyLoopback, session.NetDialDenied, "must not be dialled"},
		{"second:" + port, denyLoopback, session.NetDialFailed, "refused"},
		{"empty:" + port, nil, session.NetResolve, "no address"},
		{"unknown:" + port, nil, session.NetResolve, `resolve "unknown": no such host`},
		{"noport", nil, session.NetDialFailed, "no port"},
		{"127.0.0.1:0", nil, session.NetDialFailed, "port from 1 to 65535"},
		{"127.0.0.1:70000", nil, session.NetDialFailed, "port from 1 to 65535"},
		{":6650", nil, session.NetDialFailed, "host:port"},
	} {
		on := e
		if c.want == session.NetDialTimeout {
			on = hasty
		}
		got := dialOn(on, c.target, c.deny)
		if got.reason != c.want || (c.text != "" && (got.err == nil || !strings.Contains(got.err.Error(), c.text))) {
			t.Errorf("%s: reason %d, %v; want %d with %q", c.target, got.reason, got.err, c.want, c.text)
		}
	}
	eventually(t, "no connection is left", func() bool { return e.Stats().Loops[0].Conns+hasty.Stats().Loops[0].Conns == 0 })
}

// The first address does not answer: the second is tried inside the same deadline.
func TestABlackHoledFirstAddressLeavesTimeForTheSecond(t *testing.T) {
	hole := fullListener(t)
	_, port, _ := net.SplitHostPort(hole)
	ln, err := net.Listen("tcp", "[::1]:"+port)
	if err != nil {
		t.Skipf("no second address with this port: %v", err)
	}
	defer ln.Close()
	first := netip.MustParseAddr("127.0.0.1")
	e := engine(t, Config{DialTimeout: time.Hour, Lookup: func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{first, netip.MustParseAddr("::1")}, nil
	}}, echoing)
	out := beginDial(e, "broker:"+port, nil)
	tried := func() (yes bool) {
		inOneTurn(e, func() {
			for _, c := range e.loops[0].conns {
				yes = yes || c != nil && c.dial != nil && c.dial.trying == first
			}
		})
		return yes
	}
	eventually(t, "the first address is tried", tried)
	passes(e, 29*time.Minute)
	if !tried() {
		t.Error("the first address was given up before half of the time was over")
	}
	passes(e, 2*time.Minute)
	if tried() {
		t.Fatal("the first address has all the time, and the second none")
	}
	if got := <-out; got.reason != connected {
		t.Errorf("reason %d, %v", got.reason, got.err)
	}
}

// ask resolves and waits.
func ask(r *resolver, host string) ([]netip.Addr, error) {
	type answer struct {
		addrs []netip.Addr
		err   error
	}
	ch := make(chan answer, 1)
	addrs, err, known := r.resolve(host, time.Now(), func(addrs []netip.Addr, err error) { ch <- answer{addrs, err} })
	if known {
		return addrs, err
	}
	a := <-ch
	return a.addrs, a.err
}

// OP-05: a dead name service is asked, but the addresses known before are used; failures are remembered shortly.
func TestOP05CachedAddressesAreUsedWhileTheNameServiceIsDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked int
		var dead bool
		first, second := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
		current := first
		r := newResolver(func(ctx context.Context, _ string) ([]netip.Addr, error) {
			asked++
			if dead {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return []netip.Addr{current}, nil
		})
		defer r.close()
		want := func(what string, addr netip.Addr, lookups int) {
			t.Helper()
			got, err := ask(r, "broker")
			if err != nil || !slices.Equal(got, []netip.Addr{addr}) || asked != lookups {
				t.Fatalf("%s: %v, %v after %d lookups; want %v after %d", what, got, err, asked, addr, lookups)
			}
		}
		want("unknown", first, 1)
		want("fresh", first, 1)
		time.Sleep(freshFor)
		current = second
		want("moved", second, 2)
		dead = true
		time.Sleep(freshFor)
		began := time.Now()
		want("dead", second, 3)
		if d := time.Since(began); d != resolveTimeout {
			t.Errorf("answered after %v, want %v", d, resolveTimeout)
		}
		want("dead, asked just now", second, 3)
		time.Sleep(failedFor)
		want("dead, asked again", second, 4)
		time.Sleep(staleFor)
		if got, err := ask(r, "broker"); err == nil {
			t.Errorf("addresses of an hour ago: %v", got)
		}
	})
}

func TestTheResolverIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var running, highest, asked atomic.Int32
		r := newResolver(func(ctx context.Context, _ string) ([]netip.Addr, error) {
			asked.Add(1)
			highest.Store(max(highest.Load(), running.Add(1)))
			defer running.Add(-1)
			<-ctx.Done()
			return nil, ctx.Err()
		})
		defer r.close()
		var answered atomic.Int32
		for i := range 200 {
			for range 3 { // the same name is asked once
				r.resolve(fmt.Sprint("host", i), time.Now(), func([]netip.Addr, error) { answered.Add(1) })
			}
		}
		time.Sleep(resolveTimeout * (200/resolveWorkers + 1))
		synctest.Wait()
		if highest.Load() > resolveWorkers || asked.Load() != 200 || answered.Load() != 600 {
			t.Errorf("%d at a time, %d lookups, %d answers", highest.Load(), asked.Load(), answered.Load())
		}
		time.Sleep(time.Minute)
		for i := range 3 * maxNames {
			r.resolve(fmt.Sprint("many", i), time.Now(), func([]netip.Addr, error) {})
			if i%resolveWorkers == 0 {
				time.Sleep(resolveTimeout)
			}
		}
		if n := len(r.names); n > maxNames+resolveWorkers {
			t.Errorf("%d names are kept", n)
		}
	})
}

func TestPickPacksBeforeItSpreads(t *testing.T) {
	for _, c := range []struct {
		loads []load
		want  int
		why   string
	}{
		{[]load{{}, {}}, 0, "all idle"},
		{[]load{{util: 0.5, clients: 5000}, {}}, 0, "below the marks"},
		{[]load{{util: 0.8}, {}}, 1, "the first is busy"},
		{[]load{{clients: packConns}, {clients: 3}}, 1, "the first is full"},
		{[]load{{accepts: packAccepts}, {}}, 1, "a burst"},
		{[]load{{util: 0.9}, {util: 0.9, clients: 100}, {util: 0.1}}, 2, "the third is free"},
		{[]load{{util: 0.9}, {util: 0.8}}, 1, "all busy: the least"},
		{[]load{{util: 0.9, accepts: 300}, {util: 0.9, accepts: 260}}, 1, "all busy in a burst: even"},
	} {
		if got := pick(c.loads); got != c.want {
			t.Errorf("%s: loop %d, want %d", c.why, got, c.want)
		}
	}
}

// The number of a window counts, not how fast this machine connects.
func TestABurstOfConnectionsIsSpreadAndATrickleIsPacked(t *testing.T) {
	loops := []*loop{{}, {}}
	a := &acceptor{e: &Engine{loops: loops}, loads: make([]load, len(loops)), meter: meter{loops: loops}}
	now := time.Now()
	come := func(n int) (to [2]int) {
		for range n {
			i := a.choose(now)
			loops[i].counters.clients.Add(1)
			to[i]++
		}
		return to
	}
	if to := come(20); to != [2]int{20, 0} {
		t.Errorf("20 connections: %v", to)
	}
	if to := come(4 * packAccepts); to[0] < packAccepts || to[1] < packAccepts {
		t.Errorf("a burst of %d: %v", 4*packAccepts, to)
	}
	now = now.Add(loadWindow)
	if to := come(20); to != [2]int{20, 0} {
		t.Errorf("20 connections after the burst: %v", to)
	}
}

func TestAConnectionThatAnotherLoopTakesIsServedThere(t *testing.T) {
	e := engine(t, Config{Loops: 2}, echoing)
	e.loops[0].counters.clients.Add(packConns)
	defer e.loops[0].counters.clients.Add(-packConns)
	c := connect(t, addr(e))
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if s := e.Stats(); s.Loops[0].Accepted != 0 || s.Loops[1].Accepted != 1 {
		t.Errorf("loop 0 has %d, loop 1 %d", s.Loops[0].Accepted, s.Loops[1].Accepted)
	}
}
