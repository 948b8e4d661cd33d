package bench

import (
	"errors"
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"pointsman/codec"
)

// Params say what a load does. Zero values take the defaults of withDefaults.
type Params struct {
	Scenario    string        `json:"scenario"`
	Connections int           `json:"connections"`
	Producers   int           `json:"producers"` // producers, or consumers, per connection
	Size        int           `json:"size"`      // payload of a message in bytes
	Window      int           `json:"window"`    // operations in flight per connection (closed loops)
	Rate        int           `json:"rate"`      // messages per second over all connections (open loops)
	Stall       string        `json:"stall,omitempty"`
	Stalled     int           `json:"stalled,omitempty"` // peers that stop reading
	Topics      int           `json:"topics,omitempty"`
	Unbridged   bool          `json:"unbridged,omitempty"` // hold: connections for lookups, without a broker behind them
	Namespace   bool          `json:"namespace,omitempty"` // switch: by one rule for all topics instead of topic by topic
	TLS         string        `json:"tls,omitempty"`       // where: tlsClients, tlsBrokers or tlsBoth
	Warmup      time.Duration `json:"warmup_ns"`
	Duration    time.Duration `json:"duration_ns"`
}

// withDefaults fills in what was left out.
func (p Params) withDefaults() Params {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&p.Connections, map[string]int{"churn": 50, "connect": 50, "hold": 5000, "stall": 10, "switch": 10}[p.Scenario])
	def(&p.Connections, 50)
	def(&p.Producers, map[string]int{"switch": 100}[p.Scenario])
	def(&p.Producers, 1)
	def(&p.Size, map[string]int{"stall": 1 << 20}[p.Scenario])
	def(&p.Size, 1024)
	if p.Window == 0 {
		switch p.Scenario {
		case "lookup":
			p.Window = 10
		case "switch":
			p.Window = 1
		default:
			// As many as keep the proxy busy and no more than sockets hold: 1,000 in flight for 1 connection, 100 for 50, 20 for 500.
			p.Window = min(max(5000/p.Connections, 20), 1000, max(4, (2<<20)/p.Size))
		}
	}
	def(&p.Rate, map[string]int{"rate": 10_000, "stall": 1_000}[p.Scenario])
	if p.Scenario == "stall" {
		def(&p.Stalled, 200)
		if p.Stall == "" {
			p.Stall = "consumers"
		}
	}
	def(&p.Topics, 100_000)
	if p.Warmup == 0 {
		p.Warmup = 500 * time.Millisecond
	}
	if p.Duration == 0 {
		p.Duration = 3 * time.Second
	}
	return p
}

// tally is what a load counts; the loop's goroutine owns it.
type tally struct {
	loop *loop
	done uint64 // operations that are complete: messages acknowledged or received, lookups, cycles
	err  error  // why the load cannot go on

	// latency is in ns, in open loops from the time at which an operation was due: free of coordinated omission.
	latency *hdrhistogram.Histogram
}

func newTally() (tally, error) {
	l, err := newLoop()
	return tally{loop: l, latency: newHistogram()}, err
}

// newHistogram takes 100 ns to 5 min with three digits.
func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(100, int64(5*time.Minute), 3) }

// fail ends the load.
func (t *tally) fail(err error) {
	if t.err == nil {
		t.err = err
	}
	t.loop.ended = true
}

// reset forgets the warm-up.
func (t *tally) reset() {
	t.done = 0
	t.latency.Reset()
}

// runFor lets the load work for d.
func (t *tally) runFor(d time.Duration) error {
	if err := t.loop.run(time.Now().Add(d)); err != nil {
		return err
	}
	return t.err
}

func (t *tally) base() *tally { return t }

// load is a scenario's traffic from its set-up on.
type load interface {
	base() *tally
	close()
}

// startLoad sets the traffic of p up towards at.
func startLoad(p Params, at server) (load, error) {
	if open := p.Scenario == "rate" || p.Scenario == "stall"; open && p.Producers != 1 {
		return nil, fmt.Errorf("%d producers per connection: at a fixed rate each connection has one", p.Producers)
	}
	if p.Producers > maxHandles {
		return nil, fmt.Errorf("%d producers per connection: at most %d", p.Producers, maxHandles)
	}
	switch p.Scenario {
	case "produce", "rate":
		return newProduceLoad(p, at)
	case "consume":
		return newConsumeLoad(p, at)
	case "lookup":
		return newLookupLoad(p, at)
	case "churn", "connect":
		return newChurnLoad(p, at)
	case "hold":
		return newHoldLoad(p, at)
	case "stall":
		return newStallLoad(p, at)
	}
	return nil, fmt.Errorf("scenario %q: want one of %v", p.Scenario, Scenarios)
}

// Scenarios are the names that Params.Scenario takes; switch and routes are measured by functions of their own.
var Scenarios = []string{"produce", "consume", "rate", "lookup", "connect", "churn", "hold", "stall", "switch", "routes"}

// produceLoad keeps a window of SENDs in flight per connection (closed loop: k receipts cause k SENDs), or sends at fixed times (open).
type produceLoad struct {
	tally
	p     Params
	tmpl  *template
	batch *batch
	conns []*producing

	// Of the open loop: message n over all connections is due at start + n × interval, and belongs to connection n mod len(conns).
	start    time.Time
	interval time.Duration
	sent     int
}

// producing is one connection.
type producing struct {
	load    *produceLoad
	conn    *conn
	streams []stream
	turn    int  // the stream that is written next
	owed    int  // SENDs that may be written
	pong    bool // a PING waits for its answer until a frame ends
}

func newProduceLoad(p Params, at server) (*produceLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &produceLoad{tally: t, p: p, tmpl: sendTemplate(p.Size)}
	l.batch = newBatch(l.tmpl)
	links, err := bridges(at, p.Connections, func(k *link, i int) error {
		for id := range p.Producers {
			if err := k.producer(benchTopic(i*p.Producers+id), id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		l.loop.close()
		return nil, err
	}
	for i, k := range links {
		c := &producing{load: l}
		for id := range p.Producers {
			c.streams = append(c.streams, stream{tmpl: l.tmpl, handle: byte(id), next: firstID})
		}
		if c.conn, err = l.loop.take(k, c); err != nil {
			closeLinks(links[i:])
			l.loop.close()
			return nil, err
		}
		c.conn.id = i
		l.conns = append(l.conns, c)
	}
	if p.Scenario == "produce" {
		for _, c := range l.conns {
			c.owed = p.Window
			c.writable(c.conn)
		}
		return l, nil
	}
	l.interval = time.Second / time.Duration(p.Rate)
	l.start = time.Now()
	return l, l.loop.schedule(l.pace)
}

func (l *produceLoad) close() { l.loop.close() }

// minPace is the shortest time between two turns of a pacer: what becomes due in between goes out together.
const minPace = 20 * time.Microsecond

// pace sends what is due by now, and says when the next one is.
func (l *produceLoad) pace() (next time.Duration) {
	for due := int(time.Since(l.start)/l.interval) + 1; l.sent < due; l.sent++ {
		c := l.conns[l.sent%len(l.conns)]
		c.owed++
		c.writable(c.conn)
	}
	return max(time.Duration(l.sent)*l.interval-time.Since(l.start), minPace)
}

func (c *producing) frame(k *conn, h codec.Head, cmd []byte) {
	switch h.Type {
	case codec.TypeSendReceipt:
		c.load.done++
		if c.load.interval == 0 {
			c.owed++
			return
		}
		seq, _ := subField(cmd, h.Type, 2)
		due := time.Duration(int(seq-firstID)*len(c.load.conns)+k.id) * c.load.interval
		c.load.record(time.Since(c.load.start) - due)
	case codec.TypePing:
		c.pong = true
	case codec.TypePong:
	default:
		c.load.fail(fmt.Errorf("a producer received %s", h.Type))
	}
}

// record notes a latency; one beyond the histogram's end counts as its end.
func (t *tally) record(d time.Duration) {
	_ = t.latency.RecordValue(min(max(int64(d), t.latency.LowestTrackableValue()), t.latency.HighestTrackableValue()))
}

func (c *producing) flush(k *conn) { c.writable(k) }

// writable writes what is owed, one producer after the other.
func (c *producing) writable(k *conn) {
	if c.pong && c.streams[c.turn].off == 0 {
		c.pong = false
		k.send(pongFrame)
	}
	for c.owed > 0 && !k.full && !k.ended {
		// A share each, so that all producers take part; a frame that is half written is ended before the next producer's turn.
		s := &c.streams[c.turn]
		share := max(c.owed/len(c.streams), 1)
		c.owed -= k.pump(s, c.load.batch, share)
		if s.off > 0 {
			return
		}
		c.turn = (c.turn + 1) % len(c.streams)
	}
}

func (c *producing) closed(_ *conn, err error) {
	c.load.fail(fmt.Errorf("a producer's connection ended: %w", err))
}

// consumeLoad receives MESSAGEs on consumers that grant permits by halves of their window, as clients do, and acknowledge as often.
type consumeLoad struct {
	tally
	p Params
}

type consuming struct {
	load  *consumeLoad
	since [maxHandles + 1]int // messages since the last FLOW, by consumer
	out   []byte
}

func newConsumeLoad(p Params, at server) (*consumeLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &consumeLoad{tally: t, p: p}
	links, err := consumers(at, p)
	if err != nil {
		l.loop.close()
		return nil, err
	}
	for i, k := range links {
		c, err := l.loop.take(k, &consuming{load: l})
		if err != nil {
			closeLinks(links[i:])
			l.loop.close()
			return nil, err
		}
		var flows []byte
		for id := range p.Producers {
			flows = flowFrame(flows, byte(id), p.Window)
		}
		c.send(flows)
	}
	return l, nil
}

// consumers opens connections with consumers that have no permits yet.
func consumers(at server, p Params) ([]*link, error) {
	return bridges(at, p.Connections, func(k *link, i int) error {
		for id := range p.Producers {
			if err := k.consumer(benchTopic(i*p.Producers+id), id, p.Size); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *consumeLoad) close() { l.loop.close() }

func (c *consuming) frame(k *conn, h codec.Head, cmd []byte) {
	switch h.Type {
	case codec.TypeMessage:
		id, _ := subField(cmd, h.Type, 1)
		c.load.done++
		if c.since[id&maxHandles]++; c.since[id&maxHandles] >= max(c.load.p.Window/2, 1) {
			c.out = ackFrame(c.out, byte(id), firstID)
			c.out = flowFrame(c.out, byte(id), c.since[id&maxHandles])
			c.since[id&maxHandles] = 0
		}
	case codec.TypePing:
		c.out = append(c.out, pongFrame...)
	case codec.TypePong, codec.TypeActiveConsumerChange:
	default:
		c.load.fail(fmt.Errorf("a consumer received %s", h.Type))
	}
}

func (c *consuming) flush(k *conn) {
	if len(c.out) > 0 {
		k.send(c.out)
		c.out = c.out[:0]
	}
}

func (c *consuming) writable(*conn) {}

func (c *consuming) closed(_ *conn, err error) {
	c.load.fail(fmt.Errorf("a consumer's connection ended: %w", err))
}

// lookupLoad keeps a window of LOOKUPs in flight on each connection; the topics differ, so that nobody answers two with one answer.
type lookupLoad struct {
	tally
	p     Params
	tmpl  lookupTemplate
	start time.Time
	topic int
}

// lookupTemplate is a LOOKUP whose topic number and request id can be set in place.
type lookupTemplate struct {
	frame       []byte
	topic, id   int // offsets
	topicDigits int
}

func newLookupTemplate() lookupTemplate {
	name := benchTopic(0)
	const digits = 7
	t := lookupTemplate{frame: lookupFrame(name, firstID), topicDigits: digits}
	// The command ends with the name and the request id: see CommandLookupTopic.
	t.id = len(t.frame) - idWidth
	t.topic = t.id - 1 - digits
	return t
}

// set returns the frame for a topic and a request; valid until the next call.
func (t *lookupTemplate) set(topic int, request uint64) []byte {
	for i := t.topicDigits - 1; i >= 0; i-- {
		t.frame[t.topic+i] = byte('0' + topic%10)
		topic /= 10
	}
	putID(t.frame[t.id:], request)
	return t.frame
}

type asking struct {
	load    *lookupLoad
	next    uint64
	sentAt  [1024]int64
	pending []byte
}

func newLookupLoad(p Params, at server) (*lookupLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &lookupLoad{tally: t, p: p, tmpl: newLookupTemplate(), start: time.Now()}
	if p.Window > len(asking{}.sentAt) {
		return nil, fmt.Errorf("a window of %d lookups: at most %d", p.Window, len(asking{}.sentAt))
	}
	links, err := connections(at, p.Connections)
	if err != nil {
		l.loop.close()
		return nil, err
	}
	for i, k := range links {
		c := &asking{load: l, next: firstID}
		conn, err := l.loop.take(k, c)
		if err != nil {
			closeLinks(links[i:])
			l.loop.close()
			return nil, err
		}
		for range p.Window {
			c.ask()
		}
		c.flush(conn)
	}
	return l, nil
}

// connections opens n connections for lookups.
func connections(at server, n int) ([]*link, error) {
	links := make([]*link, n)
	err := each(n, func(i int) (err error) {
		links[i], err = openLink(at, i, "")
		return err
	})
	if err != nil {
		closeLinks(links)
	}
	return links, err
}

func (l *lookupLoad) close() { l.loop.close() }

func (c *asking) ask() {
	l := c.load
	l.topic = (l.topic + 1) % l.p.Topics
	c.pending = append(c.pending, l.tmpl.set(l.topic, c.next)...)
	c.sentAt[c.next%uint64(len(c.sentAt))] = int64(time.Since(l.start))
	c.next++
}

func (c *asking) frame(k *conn, h codec.Head, cmd []byte) {
	switch h.Type {
	case codec.TypeLookupResponse:
		if response, _ := subField(cmd, h.Type, 3); int32(response) != codec.LookupConnect {
			c.load.fail(errors.New("a LOOKUP was answered with an error or a redirect"))
			return
		}
		id, _ := subField(cmd, h.Type, 4)
		took := time.Since(c.load.start) - time.Duration(c.sentAt[id%uint64(len(c.sentAt))])
		c.load.record(took)
		c.load.done++
		c.ask()
	case codec.TypePing:
		c.pending = append(c.pending, pongFrame...)
	case codec.TypePong:
	default:
		c.load.fail(fmt.Errorf("a connection for lookups received %s", h.Type))
	}
}

func (c *asking) flush(k *conn) {
	k.send(c.pending)
	c.pending = c.pending[:0]
}

func (c *asking) writable(*conn) {}

func (c *asking) closed(_ *conn, err error) {
	c.load.fail(fmt.Errorf("a connection for lookups ended: %w", err))
}
