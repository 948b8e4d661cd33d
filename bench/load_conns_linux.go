package bench

import (
	"fmt"
	"sync"
	"time"

	"pointsman/codec"
)

// churnLoad connects, looks one topic up and closes, on as many connections at a time as p says. In the scenario connect it names a broker
// in its CONNECT and closes when that has answered: what is left is the making and ending of connections, and the handshakes.
type churnLoad struct {
	tally
	at      server
	connect []byte
	bare    bool // no LOOKUP
	tmpl    lookupTemplate
	cycles  int
	start   time.Time

	shakes  sync.WaitGroup // TLS handshakes, each on a goroutine of its own
	closing bool
}

// cycle is one connection of a churnLoad.
type cycle struct {
	load  *churnLoad
	begun time.Duration
}

func newChurnLoad(p Params, at server) (*churnLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &churnLoad{tally: t, at: at, connect: connectFrame(""), bare: p.Scenario == "connect", tmpl: newLookupTemplate(), start: time.Now()}
	if l.bare {
		target, err := lookupOnce(at)
		if err != nil {
			l.loop.close()
			return nil, err
		}
		l.connect = connectFrame(target)
	}
	for range p.Connections {
		l.begin()
	}
	return l, l.err
}

// lookupOnce is the broker of a topic, asked for on a connection of its own.
func lookupOnce(at server) (target string, err error) {
	k, err := openLink(at, 0, "")
	if err != nil {
		return "", err
	}
	defer k.close()
	return k.lookup(benchTopic(0))
}

func (l *churnLoad) close() {
	l.closing = true
	l.shakes.Wait()
	l.loop.runPosted()
	l.loop.close()
}

func (l *churnLoad) begin() {
	if l.at.tls != nil {
		l.beginTLS()
		return
	}
	fd, err := dial(l.at.AddrPort, l.cycles, true)
	if err != nil {
		l.fail(err)
		return
	}
	l.cycles++
	c, err := l.loop.add(fd, &cycle{load: l, begun: time.Since(l.start)})
	if err != nil {
		l.fail(err)
		return
	}
	c.send(l.connect)
}

// beginTLS is begin with a handshake.
func (l *churnLoad) beginTLS() {
	i, begun := l.cycles, time.Since(l.start)
	l.cycles++
	l.shakes.Go(func() {
		k, err := dialLink(l.at, i)
		l.loop.post(func() {
			if err == nil && l.closing {
				k.close()
				return
			}
			var c *conn
			if err == nil {
				c, err = l.loop.take(k, &cycle{load: l, begun: begun})
			}
			if err != nil {
				l.fail(err)
				return
			}
			c.send(l.connect)
		})
	})
}

func (c *cycle) frame(k *conn, h codec.Head, cmd []byte) {
	l := c.load
	switch h.Type {
	case codec.TypeConnected:
		if l.bare {
			c.end(k)
			return
		}
		k.send(l.tmpl.set(l.cycles%1_000_000, firstID))
	case codec.TypeLookupResponse:
		if response, _ := subField(cmd, h.Type, 3); int32(response) != codec.LookupConnect {
			l.fail(fmt.Errorf("a LOOKUP was answered with an error or a redirect"))
			return
		}
		c.end(k)
	default:
		l.fail(fmt.Errorf("a new connection received %s", h.Type))
	}
}

// end closes and begins anew.
func (c *cycle) end(k *conn) {
	l := c.load
	l.record(time.Since(l.start) - c.begun)
	l.done++
	k.close()
	l.begin()
}

func (c *cycle) flush(*conn) {}

func (c *cycle) writable(*conn) {}

func (c *cycle) closed(_ *conn, err error) {
	c.load.fail(fmt.Errorf("a new connection ended before it was answered: %w", err))
}

// holdLoad keeps connections that do nothing but answer PINGs: bridged ones with a producer each, or ones for lookups.
type holdLoad struct {
	tally
	held int
}

type holding struct{ load *holdLoad }

func newHoldLoad(p Params, at server) (*holdLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &holdLoad{tally: t}
	var links []*link
	if p.Unbridged {
		links, err = connections(at, p.Connections)
	} else {
		links, err = bridges(at, p.Connections, func(k *link, i int) error { return k.producer(benchTopic(i), 0) })
	}
	if err != nil {
		l.loop.close()
		return nil, err
	}
	for i, k := range links {
		if _, err := l.loop.take(k, holding{l}); err != nil {
			closeLinks(links[i:])
			l.loop.close()
			return nil, err
		}
	}
	l.held = len(links)
	return l, nil
}

func (l *holdLoad) close() { l.loop.close() }

func (c holding) frame(k *conn, h codec.Head, _ []byte) {
	if h.Type == codec.TypePing {
		k.send(pongFrame)
	}
}

func (c holding) flush(*conn) {}

func (c holding) writable(*conn) {}

func (c holding) closed(_ *conn, err error) {
	c.load.fail(fmt.Errorf("an idle connection ended: %w", err))
}

// stallLoad is open-loop traffic that goes on while other peers stop reading: see addStalled.
type stallLoad struct {
	*produceLoad
	p       Params
	at      server
	lookups lookupTemplate
	floods  []*flooding
	quiet   float64 // p99 of the healthy traffic before anybody stalled, in µs
	turn    int
}

func newStallLoad(p Params, at server) (*stallLoad, error) {
	small := p // the size of p is that of the messages that nobody reads
	small.Size = healthySize
	healthy, err := newProduceLoad(small, at)
	if err != nil {
		return nil, err
	}
	return &stallLoad{produceLoad: healthy, p: p, at: at, lookups: newLookupTemplate()}, nil
}

// healthySize is the payload of the traffic that goes on, in bytes.
const healthySize = 1 << 10

// stallPermits is how many messages a consumer asks for that will never read them.
const stallPermits = 1000

// addStalled opens the peers that never read: consumers with permits for large messages, or connections that write
// LOOKUPs for as long as the proxy takes them.
func (l *stallLoad) addStalled() error {
	p := l.p
	p.Connections, p.Producers = p.Stalled, 1
	if p.Stall == "consumers" {
		links, err := consumers(l.at, p)
		if err != nil {
			return err
		}
		for _, k := range links {
			c, err := l.loop.take(k, stalled{})
			if err != nil {
				return err
			}
			c.mute = true
			c.send(flowFrame(nil, 0, stallPermits))
		}
		return nil
	}
	if p.Stall != "lookups" {
		return fmt.Errorf("stall %q: want consumers or lookups", p.Stall)
	}
	links, err := connections(l.at, p.Connections)
	if err != nil {
		return err
	}
	for i, k := range links {
		f := &flooding{load: l, next: firstID, topic: i * 1000}
		if f.conn, err = l.loop.take(k, f); err != nil {
			return err
		}
		f.conn.mute = true
		l.floods = append(l.floods, f)
	}
	l.loop.tick = l.flood
	return nil
}

// floodPace is how often LOOKUPs are added.
const floodPace = 100 * time.Microsecond

// flood adds some LOOKUPs on the next connection that takes them, besides the healthy traffic.
func (l *stallLoad) flood() (next time.Duration) {
	next = min(l.pace(), floodPace)
	for range l.floods {
		f := l.floods[l.turn%len(l.floods)]
		l.turn++
		if !f.conn.full && !f.conn.ended {
			f.write()
			break
		}
	}
	return next
}

// stalled is a peer that never reads.
type stalled struct{}

func (stalled) frame(*conn, codec.Head, []byte) {}
func (stalled) flush(*conn)                     {}
func (stalled) writable(*conn)                  {}

// closed is no failure: a proxy may cut off who never reads.
func (stalled) closed(*conn, error) {}

// flooding writes LOOKUPs and never reads.
type flooding struct {
	stalled
	load  *stallLoad
	conn  *conn
	next  uint64
	topic int
	buf   []byte
}

// floodBatch is how many LOOKUPs a connection writes at once.
const floodBatch = 20

func (f *flooding) write() {
	f.buf = f.buf[:0]
	for range floodBatch {
		f.buf = append(f.buf, f.load.lookups.set(f.topic%f.load.p.Topics, f.next)...)
		f.topic++
		f.next++
	}
	f.conn.send(f.buf)
}
