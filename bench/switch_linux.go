package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/admin"
	"pointsman/internal/config"
)

// SwitchResult is what clients see of a switch in immediate mode: half of the producers of each connection move, the others are neighbours.
type SwitchResult struct {
	Params    Params  `json:"params"`
	Machine   Machine `json:"machine"`
	Moved     int     `json:"moved"`                // producers
	Assigned  int     `json:"assigned"`             // of them told the new broker, so that they needed no lookup
	PerSecond float64 `json:"evictions_per_second"` // between the first and the last CLOSE_PRODUCER
	Busiest   int     `json:"evictions_busiest_second"`
	Pace      int     `json:"pace_per_second"` // eviction.rate, of each event loop
	Loops     int     `json:"loops"`
	Dropped   int     `json:"dropped"` // SENDs in flight at the CLOSE: sent again
	Errors    int     `json:"errors"`  // answers to PRODUCER that were errors

	// From CLOSE_PRODUCER to the first receipt of the new cluster, ms.
	GapP50 float64 `json:"gap_p50_ms"`
	GapP99 float64 `json:"gap_p99_ms"`
	GapMax float64 `json:"gap_max_ms"`

	// From SEND to receipt of the neighbours, before and during the switch, µs.
	NeighboursP99Before float64 `json:"neighbours_p99_before_us"`
	NeighboursP99During float64 `json:"neighbours_p99_during_us"`
	NeighboursMaxDuring float64 `json:"neighbours_max_during_us"`

	// What the clients asked of the proxy because of it: connections that they made and lookups, in all and in the busiest second.
	Connects        int `json:"connects"`
	ConnectsBusiest int `json:"connects_busiest_second"`
	Lookups         int `json:"lookups"`
	LookupsBusiest  int `json:"lookups_busiest_second"`

	// Turns of the event loops that took more than 5 ms by the clock on the wall, before and during the switch, and the longest so far.
	SlowTurnsBefore  float64 `json:"turns_over_5ms_before"`
	SlowTurnsDuring  float64 `json:"turns_over_5ms_during"`
	TurnsDuring      float64 `json:"turns_during"`
	LongestTurnMs    float64 `json:"longest_turn_ms"`
	LongestBeforeMs  float64 `json:"longest_turn_before_ms"`
	SecondsOfSwitch  float64 `json:"seconds"`
	SecondsOfTraffic float64 `json:"seconds_before"`

	ProxyCPU   float64 `json:"proxy_cpu_s"`
	OtherCores float64 `json:"other_cores"`
	Load1      float64 `json:"load_average"`
}

// Switch moves half of the producers of p from one fake cluster to another while all of them send, and watches.
func Switch(lab *Lab, p Params) (*SwitchResult, error) {
	p.Scenario = "switch"
	p = p.withDefaults()
	if p.Producers < 2 || p.Producers > maxHandles {
		return nil, fmt.Errorf("%d producers per connection: want 2 to %d, half of them move", p.Producers, maxHandles)
	}
	if p.Rate == 0 {
		const each = 10 // messages per second and producer
		p.Rate = each * p.Connections * p.Producers
	}
	a, addrsA, err := lab.startBroker(1, nil)
	if err != nil {
		return nil, err
	}
	defer a.stop()
	b, addrsB, err := lab.startBroker(1, nil)
	if err != nil {
		return nil, err
	}
	defer b.stop()
	t, err := lab.startTarget("pointsman", addrsA, addrsB, "")
	if err != nil {
		return nil, err
	}
	defer t.stop()
	t.broker = b
	control, err := admin.NewClient("http://"+t.ops, time.Minute, nil)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	l, err := newSwitchLoad(p, t.at.AddrPort)
	if err != nil {
		return nil, err
	}
	defer l.loop.close()
	if err := l.runFor(p.Warmup); err != nil {
		return nil, err
	}
	quiet, err := loopTurns(t)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := l.runFor(p.Duration); err != nil {
		return nil, err
	}
	r := &SwitchResult{Params: p, Machine: lab.machine(), NeighboursP99Before: micros(l.latency.ValueAtQuantile(99))}
	l.reset()
	turns, err := loopTurns(t)
	if err != nil {
		return nil, err
	}
	r.SlowTurnsBefore, r.LongestBeforeMs, r.SecondsOfTraffic = turns.slow-quiet.slow, 1e3*turns.longest, time.Since(began).Seconds()
	l.evictions, l.connects, l.lookups = nil, nil, nil
	w, err := openWindow(t)
	if err != nil {
		return nil, err
	}
	if err := l.follow(control); err != nil {
		return nil, err
	}
	var run Run
	if err := w.close(&run); err != nil {
		return nil, err
	}
	after, err := loopTurns(t)
	if err != nil {
		return nil, err
	}
	r.SlowTurnsDuring, r.TurnsDuring, r.LongestTurnMs, r.SecondsOfSwitch = after.slow-turns.slow, after.all-turns.all, 1e3*after.longest, run.Seconds
	r.Loops, r.Pace = int(after.loops), config.Default().Eviction.Rate
	r.Connects, r.Lookups = len(l.connects), len(l.lookups)
	r.Busiest, r.ConnectsBusiest, r.LookupsBusiest = busiest(l.evictions), busiest(l.connects), busiest(l.lookups)
	slices.Sort(l.gaps)
	r.Moved, r.Assigned, r.Dropped, r.Errors = len(l.gaps), l.assigned, l.dropped, l.errors
	if took := l.evictions[len(l.evictions)-1].Sub(l.evictions[0]); took > 0 {
		r.PerSecond = float64(r.Moved) / took.Seconds()
	}
	ms := func(i int) float64 { return l.gaps[i].Seconds() * 1e3 }
	r.GapP50, r.GapP99, r.GapMax = ms(len(l.gaps)/2), ms(len(l.gaps)*99/100), ms(len(l.gaps)-1)
	r.NeighboursP99During, r.NeighboursMaxDuring = micros(l.latency.ValueAtQuantile(99)), micros(l.latency.Max())
	r.ProxyCPU, r.OtherCores, r.Load1 = w.cpu.Seconds(), run.OtherCores, run.Load1
	return r, nil
}

// turnCount is what the proxy says of its loops' turns.
type turnCount struct{ all, slow, longest, loops float64 }

func loopTurns(t *target) (c turnCount, err error) {
	m, err := scrape("http://" + t.ops)
	if err != nil {
		return c, err
	}
	const family = "pointsman_loop_turn_seconds"
	var quick float64
	for _, x := range []struct {
		to            *float64
		family, label string
	}{{&c.all, family + "_count", ""}, {&quick, family + "_bucket", `le="0.005"`}, {&c.longest, "pointsman_loop_turn_max_seconds", ""}} {
		if *x.to, err = m.sum(x.family, x.label); err != nil {
			return c, err
		}
	}
	c.slow, c.loops, c.longest = c.all-quick, 0, 0
	for {
		one, err := m.sum("pointsman_loop_turn_max_seconds", fmt.Sprintf("loop=%q", strconv.Itoa(int(c.loops))))
		if err != nil {
			return c, nil
		}
		c.loops++
		c.longest = max(c.longest, one)
	}
}

// busiest is the largest number of times within one second; they are in order.
func busiest(times []time.Time) (most int) {
	from := 0
	for i, t := range times {
		for t.Sub(times[from]) >= time.Second {
			from++
		}
		most = max(most, i-from+1)
	}
	return most
}

// follow starts the switch and goes on until it has ended and every producer that moves has a receipt of its new cluster.
func (l *switchLoad) follow(control *admin.Client) error {
	const limit = 2 * time.Minute
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		request := admin.SwitchRequest{To: "b", Mode: "immediate", Who: "pointsman-bench", Why: "measurement"}
		if l.p.Namespace {
			request.Namespace = movingNamespace
		} else {
			request.Topics = l.moving
		}
		st, err := control.StartSwitch(ctx, request)
		if err == nil {
			st, err = control.WaitSwitch(ctx, st.ID, nil)
		}
		if err == nil && !st.Done() {
			err = fmt.Errorf("the switch ended as %s: %v", st.State, st.Failed)
		}
		ended <- err
	}()
	var switched bool
	for !switched || len(l.gaps) < len(l.moving) {
		if err := l.runFor(10 * time.Millisecond); err != nil {
			return err
		}
		select {
		case err := <-ended:
			if err != nil {
				return err
			}
			switched = true
		default:
		}
		if ctx.Err() != nil {
			return fmt.Errorf("after %s only %d of %d producers are back: %w", limit, len(l.gaps), len(l.moving), ctx.Err())
		}
	}
	return nil
}

// Table is the result for people, in Markdown.
func (r *SwitchResult) Table() string {
	return fmt.Sprintf("| producers moved | evictions per s | gap p50, ms | p99 | max | neighbours p99 before, µs | during | max | proxy CPU, s | errors |\n|---|---|---|---|---|---|---|---|---|---|\n"+
		"| %d (%d told where to) | %s | %s | %s | %s | %s | %s | %s | %s | %d |\n\n",
		r.Moved, r.Assigned, number(r.PerSecond), number(r.GapP50), number(r.GapP99), number(r.GapMax), number(r.NeighboursP99Before), number(r.NeighboursP99During),
		number(r.NeighboursMaxDuring), number(r.ProxyCPU), r.Errors) +
		fmt.Sprintf("In the busiest second %d evictions (the pace: %d per event loop, %d loops), %d connections (%d in all), %d lookups (%d in all). "+
			"Turns of the loops above 5 ms: %s in %s s before, %s of %s in the %s s of the switch; the longest took %s ms (before: %s). Others used %s cores; load average %s.\n",
			r.Busiest, r.Pace, r.Loops, r.ConnectsBusiest, r.Connects, r.LookupsBusiest, r.Lookups,
			number(r.SlowTurnsBefore), number(r.SecondsOfTraffic), number(r.SlowTurnsDuring), number(r.TurnsDuring), number(r.SecondsOfSwitch), number(r.LongestTurnMs), number(r.LongestBeforeMs),
			number(r.OtherCores), number(r.Load1))
}

// switchLoad is producers that send one message at a time at fixed intervals and follow CLOSE_PRODUCER as clients do: to the
// assigned broker, on one connection per broker, or by a lookup.
type switchLoad struct {
	tally
	p         Params
	addr      netip.AddrPort
	batch     *batch
	producers []*mover
	moving    []string // topics
	start     time.Time
	sent      int

	gaps                         []time.Duration
	evictions, connects, lookups []time.Time
	assigned, dropped, errors    int
}

// movingNamespace has the topics that move, and no other.
const movingNamespace = "bench/move"

// topicName is the name of topic i.
func (m *mover) topicName(i int) string {
	if m.moves {
		return fmt.Sprintf("persistent://%s/topic-%07d", movingNamespace, i)
	}
	return benchTopic(i)
}

// maxErrors ends a run that goes wrong.
const maxErrors = 1000

// mover is one producer.
type mover struct {
	client   *follower
	topic    string
	on       *followed // nil: not open
	stream   stream
	inFlight bool
	moves    bool
	sentAt   time.Time
	closedAt time.Time // of the CLOSE that it has not recovered from
}

// follower is one client: a connection per broker, and one for lookups.
type follower struct {
	load   *switchLoad
	byAddr map[string]*followed // "" is for lookups
	n      int
}

// followed is one connection of a client. Request ids are the producers' numbers.
type followed struct {
	client  *follower
	conn    *conn
	ready   bool
	waiting []*mover
}

func newSwitchLoad(p Params, addr netip.AddrPort) (*switchLoad, error) {
	t, err := newTally()
	if err != nil {
		return nil, err
	}
	l := &switchLoad{tally: t, p: p, addr: addr, batch: newBatch(sendTemplate(p.Size))}
	tmpl := sendTemplate(p.Size)
	for i := range p.Connections {
		c := &follower{load: l, byAddr: map[string]*followed{}, n: i}
		for id := range p.Producers {
			m := &mover{client: c, stream: stream{tmpl: tmpl, handle: byte(id), next: firstID}, moves: id%2 == 0}
			m.topic = m.topicName(i*p.Producers + id)
			l.producers = append(l.producers, m)
			if m.moves {
				l.moving = append(l.moving, m.topic)
			}
			c.lookup(m)
		}
	}
	const limit = 30 * time.Second
	for deadline := time.Now().Add(limit); ; {
		if err := l.runFor(10 * time.Millisecond); err != nil {
			l.loop.close()
			return nil, err
		}
		if !slices.ContainsFunc(l.producers, func(m *mover) bool { return m.on == nil }) {
			break
		}
		if time.Now().After(deadline) {
			l.loop.close()
			return nil, fmt.Errorf("not all of %d producers are open after %s", len(l.producers), limit)
		}
	}
	l.start = time.Now()
	return l, l.loop.schedule(l.pace)
}

// pace lets the producers whose turn it is send, unless their last message has no receipt yet.
func (l *switchLoad) pace() (next time.Duration) {
	for due := int(time.Since(l.start).Seconds() * float64(l.p.Rate)); l.sent < due; l.sent++ {
		if m := l.producers[l.sent%len(l.producers)]; m.on != nil && !m.inFlight {
			m.send()
		}
	}
	return time.Millisecond
}

func (m *mover) send() {
	m.inFlight, m.sentAt = true, time.Now()
	frame := m.client.load.batch.fill(&m.stream, 1)
	m.stream.wrote(len(frame))
	m.on.conn.send(frame)
}

// connection is the client's one to a broker, made when there is none.
func (c *follower) connection(target string) *followed {
	if f := c.byAddr[target]; f != nil {
		return f
	}
	f := &followed{client: c}
	c.byAddr[target] = f
	c.load.connects = append(c.load.connects, time.Now())
	fd, err := dial(c.load.addr, c.n, true)
	if err == nil {
		f.conn, err = c.load.loop.add(fd, f)
	}
	if err != nil {
		c.load.fail(err)
		return f
	}
	f.conn.send(connectFrame(target))
	return f
}

// when lets m go on with f once that stands.
func (f *followed) when(m *mover) {
	if !f.ready {
		f.waiting = append(f.waiting, m)
		return
	}
	request := uint64(m.stream.handle)
	if f.client.byAddr[""] == f {
		f.client.load.lookups = append(f.client.load.lookups, time.Now())
		f.conn.send(lookupFrame(m.topic, request))
		return
	}
	f.conn.send(producerFrame(m.topic, request, request))
}

func (c *follower) lookup(m *mover) { c.connection("").when(m) }

func (c *follower) mover(id uint64) *mover {
	if id >= uint64(c.load.p.Producers) {
		c.load.fail(fmt.Errorf("an answer for producer %d, which there is not", id))
		id = 0
	}
	return c.load.producers[c.n*c.load.p.Producers+int(id)]
}

func (f *followed) frame(k *conn, h codec.Head, cmd []byte) {
	l := f.client.load
	if h.Type == codec.TypeSendReceipt {
		id, _ := subField(cmd, h.Type, 1)
		f.receipt(f.client.mover(id))
		return
	}
	var c pulsarpb.BaseCommand
	if err := proto.Unmarshal(cmd[8:], &c); err != nil {
		l.fail(err)
		return
	}
	switch h.Type {
	case codec.TypeConnected:
		f.ready = true
		for _, m := range f.waiting {
			f.when(m)
		}
		f.waiting = nil
	case codec.TypePing:
		k.send(pongFrame)
	case codec.TypePong:
	case codec.TypeLookupResponse:
		a := c.GetLookupTopicResponse()
		if a.GetResponse() != codec.LookupConnect {
			l.fail(fmt.Errorf("a LOOKUP answered %v", a))
			return
		}
		f.client.connection(brokerTarget(a)).when(f.client.mover(a.GetRequestId()))
	case codec.TypeProducerSuccess:
		m := f.client.mover(c.GetProducerSuccess().GetRequestId())
		m.on, m.inFlight = f, false
		if !m.closedAt.IsZero() {
			m.send()
		}
	case codec.TypeCloseProducer:
		f.evicted(f.client.mover(c.GetCloseProducer().GetProducerId()), c.GetCloseProducer().GetAssignedBrokerServiceUrl())
	case codec.TypeError:
		l.errors++
		if l.errors > maxErrors {
			l.fail(errors.New("too many errors, the last: " + c.GetError().GetMessage()))
		}
		f.client.lookup(f.client.mover(c.GetError().GetRequestId()))
	default:
		l.fail(fmt.Errorf("a producer received %s", h.Type))
	}
}

func (f *followed) receipt(m *mover) {
	l := f.client.load
	if m.on != f {
		return // a late one of the cluster before
	}
	now := time.Now()
	m.inFlight = false
	l.done++
	if !m.moves {
		l.record(now.Sub(m.sentAt))
	}
	if !m.closedAt.IsZero() {
		l.gaps = append(l.gaps, now.Sub(m.closedAt))
		m.closedAt = time.Time{}
	}
}

func (f *followed) evicted(m *mover, url string) {
	l := f.client.load
	m.closedAt = time.Now()
	l.evictions = append(l.evictions, m.closedAt)
	if m.inFlight {
		l.dropped++
	}
	m.on = nil
	if url == "" {
		f.client.lookup(m)
		return
	}
	l.assigned++
	f.client.connection(strings.TrimPrefix(url, plainScheme)).when(m)
}

func (f *followed) flush(*conn) {}

func (f *followed) writable(*conn) {}

func (f *followed) closed(_ *conn, err error) {
	f.client.load.fail(fmt.Errorf("a client's connection ended: %w", err))
}
