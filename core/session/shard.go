package session

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
	"pointsman/core/route"
)

// Config is what all shards of a process share. Immutable.
type Config struct {
	ServerVersion  string // told to clients in CONNECTED and to brokers as client version
	DefaultCluster string // of the listener, when no rule decides
	ClusterNames   []string

	MaxFrame             int           // bytes, before a broker has told its own limit
	MaxControl           int           // bytes of a command that has to be held whole
	ConnectTimeout       time.Duration // until a client has sent CONNECT
	HandshakeTimeout     time.Duration // of a broker leg or lookup connection, dial included
	LookupTimeout        time.Duration // of one request, retries inside included
	KeepAlive            time.Duration // silence after which a peer is asked; after twice that it is closed
	LookupsPerConnection int           // in flight; then the connection is not read
	LookupsPerCluster    int           // in flight per shard; then TooManyRequests
	MaxHandles           int           // producers and consumers of one client connection

	// ClusterAt is the cluster that a topic, by its base name, had at an epoch of the map; "" when that is not known. nil: never.
	ClusterAt func(base string, epoch uint64) string
	// NativeIDs leaves message ids as the clusters have them: a topic that moves may then lose what readers and cumulative consumers have not read.
	NativeIDs bool

	ReceiptWait time.Duration // how long an evicted producer may wait for outstanding receipts
	EvictRate   int           // handles per second and shard
	EvictBurst  int           // handles that are evicted at once
	EvictJitter time.Duration // random delay between the steps of a paced eviction

	ParkTime  time.Duration // how long a request waits for the end of a fence, for a lease or for a broker's answer to our CLOSE
	MaxParked int           // requests of a shard that wait for that

	// Lease tells whether this process may act on what it knows of topics in a switch; nil: always.
	Lease func() bool
	// TooOld tells whether the last contact with the map store is older than max_map_age, by the clock: no PRODUCER may pass then. nil: never.
	TooOld func() bool
	// Table and Clusters give what is in force now: one atomic load each.
	Table    func() *route.Table
	Clusters func() *cluster.Set
}

// Shard is everything that one event loop owns: sessions, pooled lookup connections, timers, and the index topic →
// handles. All methods are called on that loop.
type Shard struct {
	cfg      *Config
	loop     uint64
	lastID   uint64
	counters *Counters
	ops      []Op
	scratch  []byte
	ids      idMap
	target   *leg // where the frame goes that judgeUp has just judged
	via      *leg // while a SUBSCRIBE is judged again that waited for an extra leg: that

	carrying     carrying
	translations translations
	timers       timers
	rng          *rand.Rand

	sessions map[*Session]struct{}
	index    map[string]*topicHandles // by base name
	moving   map[string]*moving       // by base name
	debts    debts
	parking  parking
	evict    evictor
	aging    aging
	sweep    sweeper
	pool     pool
}

// NewShard makes the shard of the loop with that number.
func NewShard(cfg *Config, loop int, seed uint64) *Shard {
	sh := &Shard{
		cfg:      cfg,
		loop:     uint64(loop),
		counters: newCounters(cfg.ClusterNames),
		rng:      rand.New(rand.NewPCG(seed, uint64(loop))),
		sessions: make(map[*Session]struct{}),
		index:    make(map[string]*topicHandles),
		moving:   make(map[string]*moving),
	}
	sh.evict.init(sh)
	sh.parking.init(sh)
	sh.aging.init(sh)
	sh.sweep.init(sh)
	sh.pool.init(sh)
	sh.carrying.init(sh)
	return sh
}

// Counters are the shard's numbers, readable from any goroutine.
func (sh *Shard) Counters() *Counters { return sh.counters }

// Accept makes the session of a new client connection.
func (sh *Shard) Accept(now time.Time, c Conn, listener int, peer, local netip.AddrPort) Endpoint {
	s := newSession(sh, now, c, peer)
	sh.sessions[s] = struct{}{}
	sh.counters.Accepted.Add(1)
	sh.counters.Active.Add(1)
	return s
}

// timersPerTick bounds the work of one Tick.
const timersPerTick = 512

// Tick fires what is due and returns when to call again (zero: no deadline).
func (sh *Shard) Tick(now time.Time) (next time.Time) {
	return sh.timers.fire(now, timersPerTick)
}

// Ops is the work that was asked for since the last ResetOps, in order. The loop performs it after every call.
func (sh *Shard) Ops() []Op { return sh.ops }

// scratchKeep is the size up to which the buffer of the shard's own frames is kept.
const scratchKeep = 512 << 10

// ResetOps forgets the ops, after they were performed: all views in them end here.
func (sh *Shard) ResetOps() {
	clear(sh.ops)
	sh.ops = sh.ops[:0]
	if cap(sh.scratch) > scratchKeep {
		sh.scratch = nil
	}
	sh.scratch = sh.scratch[:0]
}

// encode builds a frame in the shard's scratch buffer, valid until ResetOps.
func (sh *Shard) encode(cmd *pulsarpb.BaseCommand) []byte {
	start := len(sh.scratch)
	sh.scratch = codec.AppendCommand(sh.scratch, cmd)
	return sh.scratch[start:]
}

// write sends data to c.
func (sh *Shard) write(c Conn, data []byte, relay bool) {
	if len(data) == 0 || sh.extend(c, data, relay) {
		return
	}
	sh.ops = append(sh.ops, Op{Kind: OpWrite, Conn: c, Data: data, Relay: relay})
}

// gather sends data to c at the end of the loop's turn.
func (sh *Shard) gather(c Conn, data []byte) {
	if !sh.extend(c, data, false) {
		sh.ops = append(sh.ops, Op{Kind: OpWrite, Conn: c, Data: data, Gather: true})
	}
}

// extend makes data, when it lies behind that of the last op in memory and is for the same connection, a part of it.
func (sh *Shard) extend(c Conn, data []byte, relay bool) bool {
	if len(sh.ops) == 0 {
		return false
	}
	last := &sh.ops[len(sh.ops)-1]
	n := len(last.Data)
	if last.Kind != OpWrite || last.Conn != c || last.Relay != relay || cap(last.Data) < n+len(data) || &last.Data[:n+1][n] != &data[0] {
		return false
	}
	last.Data = last.Data[:n+len(data)]
	return true
}

// dial has ep connected to a broker.
func (sh *Shard) dial(c *cluster.Cluster, broker string, ep Endpoint) {
	op := Op{Kind: OpDial, Addr: c.DialAddr(broker), Deny: c.Denies, Endpoint: ep}
	if c.TLS() {
		op.TLS, op.ServerName = c.Name(), c.ServerName(broker)
	}
	sh.ops = append(sh.ops, op)
}

func (sh *Shard) report(r Report) {
	sh.ops = append(sh.ops, Op{Kind: OpReport, Report: &r})
}

func (sh *Shard) nextID() uint64 {
	sh.lastID++
	return sh.loop<<48 | sh.lastID
}

// Drain closes every client connection at the given rate per second, broker legs first, so that brokers free names and
// subscriptions before the clients come back elsewhere. Lookup connections of the pool stay until the loop ends.
func (sh *Shard) Drain(now time.Time, perSecond int) {
	d := &drainer{sh: sh, perSecond: max(perSecond, 1), last: now}
	d.timer.owner = d
	for s := range sh.sessions {
		d.queue = append(d.queue, s)
	}
	d.fire(now)
}

// drainStep is how often a drainer closes some.
const drainStep = 10 * time.Millisecond

type drainer struct {
	sh        *Shard
	timer     timer
	queue     []*Session
	perSecond int
	last      time.Time
	credit    float64
}

func (d *drainer) fire(now time.Time) {
	d.credit += float64(d.perSecond) * now.Sub(d.last).Seconds()
	d.last = now
	for d.credit >= 1 && len(d.queue) > 0 {
		s := d.queue[len(d.queue)-1]
		d.queue = d.queue[:len(d.queue)-1]
		d.credit--
		s.close(now, CauseShutdown, "")
	}
	if len(d.queue) > 0 {
		d.sh.timers.set(&d.timer, now.Add(drainStep))
	}
}
