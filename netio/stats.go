package netio

import (
	"sync"
	"sync/atomic"
	"time"
)

// counters are written by the loop (Clients also by the acceptor) and read by anyone.
type counters struct {
	conns, clients, queued, paused         atomic.Int64
	reads, writes, readBytes, writtenBytes atomic.Int64
	spliced                                atomic.Int64
	accepted, refused                      atomic.Int64
	dials, dialFailures, portsUsedUp       atomic.Int64
	stalled                                atomic.Int64
	handshaking                            atomic.Int64
	handshakes, handshakeFailures          atomic.Int64
	busy                                   atomic.Int64 // ns
	wakeups                                atomic.Int64
	turns                                  [len(TurnBounds) + 1]atomic.Int64
	longestTurn                            atomic.Int64 // ns
	turned                                 int64        // busy at the end of the last turn; the loop's own
}

// TurnBounds are the upper ends of the classes that LoopStats.Turns counts by; one more class has what is longer.
var TurnBounds = [...]time.Duration{500 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}

// turn counts a turn: what was added to busy since the last one.
func (c *counters) turn() {
	busy := c.busy.Load()
	took := time.Duration(busy - c.turned)
	c.turned = busy
	class := 0
	for class < len(TurnBounds) && took > TurnBounds[class] {
		class++
	}
	c.turns[class].Add(1)
	if int64(took) > c.longestTurn.Load() {
		c.longestTurn.Store(int64(took))
	}
}

// LoopStats are the counters of one loop. Conns, Clients, QueuedBytes, Paused and Handshaking are levels; the rest only grows.
type LoopStats struct {
	Conns       int64 // open connections, both sides
	Clients     int64 // of them accepted ones
	QueuedBytes int64 // bytes that peers have not taken yet
	Paused      int64 // connections that are not read because of a full peer
	Handshaking int64 // TLS handshakes under way

	Reads, Writes           int64 // system calls
	ReadBytes, WrittenBytes int64 // spliced ones included
	SplicedBytes            int64 // moved inside the kernel
	Events                  int64 // callbacks of the poller

	Accepted     int64
	Refused      int64 // by MaxConns, or by the shard
	Dials        int64
	DialFailures int64
	PortsUsedUp  int64 // dials that failed because no source port was free (CN-13)
	WriteStalled int64 // connections closed by the write deadline

	Handshakes        int64 // TLS handshakes that were completed
	HandshakeFailures int64

	// A turn is what a loop does from one look for events to the next; everything else on the loop waits meanwhile. It is measured by the
	// clock on the wall: on a machine that is full it contains the time for which the loop's thread was not given a processor.
	Turns       [len(TurnBounds) + 1]int64 // by how long they took: see TurnBounds
	LongestTurn time.Duration              // so far

	Busy        time.Duration // time spent in callbacks
	Utilisation float64       // busy share of the last window of loadWindow or more
}

// Stats are the counters of the engine.
type Stats struct {
	Loops        []LoopStats
	BufferMemory int64 // capacity of all queues and unconsumed rests; Config.BufferMemory is its limit
	OutOfFiles   int64 // accepts that failed because no descriptor was left
}

// Stats reads the counters; it takes no lock of a loop.
func (e *Engine) Stats() Stats {
	s := Stats{BufferMemory: e.mem.Load(), OutOfFiles: e.acceptor.outOfFiles.Load()}
	util := e.acceptor.meter.utilisation(time.Now())
	for i, l := range e.loops {
		c := &l.counters
		s.Loops = append(s.Loops, LoopStats{
			Conns: c.conns.Load(), Clients: c.clients.Load(), QueuedBytes: c.queued.Load(), Paused: c.paused.Load(),
			Reads: c.reads.Load(), Writes: c.writes.Load(), ReadBytes: c.readBytes.Load(), WrittenBytes: c.writtenBytes.Load(),
			SplicedBytes: c.spliced.Load(), Events: c.wakeups.Load(),
			Accepted: c.accepted.Load(), Refused: c.refused.Load(),
			Dials: c.dials.Load(), DialFailures: c.dialFailures.Load(), PortsUsedUp: c.portsUsedUp.Load(), WriteStalled: c.stalled.Load(),
			Handshaking: c.handshaking.Load(), Handshakes: c.handshakes.Load(), HandshakeFailures: c.handshakeFailures.Load(),
			Busy: time.Duration(c.busy.Load()), Utilisation: util[i], LongestTurn: time.Duration(c.longestTurn.Load()),
		})
		for class := range c.turns {
			s.Loops[i].Turns[class] = c.turns[class].Load()
		}
	}
	return s
}

// loadWindow is the least time over which utilisation is measured.
const loadWindow = 100 * time.Millisecond

// meter turns the loops' busy time into utilisation. Guarded by mu; the acceptor and Stats ask it.
type meter struct {
	loops []*loop
	mu    sync.Mutex
	at    time.Time
	busy  []int64
	util  []float64
	// window counts the windows: the acceptor starts its per-window numbers anew when it changes.
	window int
}

// utilisation is the busy share of each loop over the last complete window.
func (m *meter) utilisation(now time.Time) []float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.roll(now)
	return append([]float64(nil), m.util...)
}

// current is utilisation without a copy: into dst, with the number of the window.
func (m *meter) current(now time.Time, dst []load) (window int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.roll(now)
	for i := range dst {
		dst[i].util = m.util[i]
	}
	return m.window
}

func (m *meter) roll(now time.Time) {
	if m.busy == nil {
		m.busy, m.util = make([]int64, len(m.loops)), make([]float64, len(m.loops))
		m.at = now
	}
	d := now.Sub(m.at)
	if d < loadWindow {
		return
	}
	for i, l := range m.loops {
		busy := l.counters.busy.Load()
		m.util[i] = min(1, float64(busy-m.busy[i])/float64(d))
		m.busy[i] = busy
	}
	m.at = now
	m.window++
}
