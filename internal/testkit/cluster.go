// Package testkit is a fake Pulsar: clusters of brokers on loopback ports, in one process and in memory, that real
// clients can look up, produce to, consume from and acknowledge. Tests, the demo and the bench harness call it: directly,
// or with the proxy in between. Every command can be delayed, dropped, refused or answered by hand, and everything that
// a broker saw can be inspected. It must never be linked into the product, and never forgive what a real broker refuses.
package testkit

import (
	"context"
	"crypto/tls"
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Options of a cluster. The zero value is one broker that creates topics as they are asked for.
type Options struct {
	Brokers          int           // default 1
	LedgerBase       uint64        // first ledger id; default 1
	EntriesPerLedger int           // default DefaultEntriesPerLedger
	Advertised       []string      // logical "host:port" by broker, told in lookup answers; default: the bound addresses
	TLS              *tls.Config   // spoken by every broker, and told as such in lookup answers; nil: plaintext
	Redirects        int           // how often a lookup is redirected before it is answered; < 0: for ever
	AutoPartitions   int           // partitions of a topic that is created because someone asked; default 0, not partitioned
	NoAutoCreation   bool          // a topic must have been created with CreateTopic
	PingInterval     time.Duration // how often a client is PINGed; 0: never
	PongWait         time.Duration // how long its PONG may take, when that is more than a PingInterval
	LivenessTimeout  time.Duration // how long a name's old holder may take to prove alive; default DefaultLivenessTimeout
	MaxMessageSize   int           // told in CONNECTED; default DefaultMaxMessageSize
	MaxTopicBytes    int           // stored per topic; beyond it publishes are refused; default DefaultMaxTopicBytes
	LogSize          int           // commands of each sort, data and control, that Commands remembers; default DefaultLogSize
}

// The defaults of Options.
const (
	DefaultEntriesPerLedger = 1000
	DefaultMaxMessageSize   = 5 << 20
	DefaultMaxTopicBytes    = 256 << 20
	DefaultLogSize          = 10_000
	DefaultLivenessTimeout  = 5 * time.Second
)

func (o Options) withDefaults() Options {
	o.Brokers = max(o.Brokers, 1)
	o.LedgerBase = max(o.LedgerBase, 1)
	orDefault(&o.EntriesPerLedger, DefaultEntriesPerLedger)
	orDefault(&o.MaxMessageSize, DefaultMaxMessageSize)
	orDefault(&o.MaxTopicBytes, DefaultMaxTopicBytes)
	orDefault(&o.LogSize, DefaultLogSize)
	if o.LivenessTimeout == 0 {
		o.LivenessTimeout = DefaultLivenessTimeout
	}
	return o
}

func orDefault(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// Cluster is a fake Pulsar cluster. Its methods may be called from any goroutine.
type Cluster struct {
	name    string
	opts    Options
	brokers []*Broker
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup // every goroutine of the cluster

	mu         sync.Mutex // guards what follows, and every topic, subscription, producer and consumer
	topics     map[string]*topic
	partitions map[string]int // by base name
	schemas    map[string][]*pulsarpb.Schema
	hops       map[string]int // redirects given for a topic's current lookup
	nextLedger uint64
	nextConn   uint64
	nextName   uint64
	data       ring // SEND, ACK, FLOW and their like, so that they do not push out the others
	control    ring // everything else
	logged     int  // commands ever seen
	counts     map[codec.Type]int
	ways       []*direction  // replications out of here
	changed    chan struct{} // closed at the next change; nil when nobody waits
}

// NewCluster starts a cluster. It panics when the loopback interface cannot be listened on, because no test can go on
// from there, or when Advertised names fewer brokers than there are.
func NewCluster(name string, opts Options) *Cluster {
	opts = opts.withDefaults()
	if n := len(opts.Advertised); n != 0 && n < opts.Brokers {
		panic(fmt.Sprintf("testkit: cluster %s has %d brokers but %d advertised names", name, opts.Brokers, n))
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Cluster{
		name: name, opts: opts, ctx: ctx, cancel: cancel,
		topics: map[string]*topic{}, partitions: map[string]int{}, schemas: map[string][]*pulsarpb.Schema{},
		hops: map[string]int{}, counts: map[codec.Type]int{}, nextLedger: opts.LedgerBase,
	}
	for i := range opts.Brokers {
		b := newBroker(c, i)
		if err := b.listen("127.0.0.1:0"); err != nil {
			panic(fmt.Sprintf("testkit: cluster %s, broker %d: %v", name, i, err))
		}
		c.brokers = append(c.brokers, b)
	}
	return c
}

// Close ends every broker and connection and waits until all goroutines of the cluster have ended.
func (c *Cluster) Close() {
	c.cancel()
	for _, b := range c.brokers {
		b.Stop()
	}
	c.wg.Wait()
}

// Name is the cluster's name.
func (c *Cluster) Name() string { return c.name }

// Brokers are the cluster's brokers.
func (c *Cluster) Brokers() []*Broker { return c.brokers }

// Broker is broker i.
func (c *Cluster) Broker(i int) *Broker { return c.brokers[i] }

// ServiceURL names all brokers, as a client is configured with.
func (c *Cluster) ServiceURL() string { return c.scheme() + strings.Join(c.Addrs(), ",") }

func (c *Cluster) scheme() string {
	if c.opts.TLS != nil {
		return "pulsar+ssl://"
	}
	return "pulsar://"
}

// Addrs are the bound addresses of the brokers.
func (c *Cluster) Addrs() []string {
	var addrs []string
	for _, b := range c.brokers {
		addrs = append(addrs, b.Addr())
	}
	return addrs
}

// Resolve maps each broker's advertised name to the address that it is bound to.
func (c *Cluster) Resolve() map[string]string {
	m := map[string]string{}
	for _, b := range c.brokers {
		m[b.Advertised()] = b.Addr()
	}
	return m
}

// CreateTopic creates a topic; with partitions > 0 a partitioned one and its partitions.
func (c *Cluster) CreateTopic(name string, partitions int) {
	name = canonical(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	if partitions == 0 {
		c.topic(name)
	} else {
		c.createPartitioned(name, partitions)
	}
	c.notify()
}

func (c *Cluster) createPartitioned(name string, partitions int) {
	c.partitions[name] = partitions
	for i := range partitions {
		c.topic(fmt.Sprintf("%s-partition-%d", name, i))
	}
}

// topic returns the topic of that canonical name and creates it when there is none. Callers hold mu.
func (c *Cluster) topic(name string) *topic {
	t := c.topics[name]
	if t == nil {
		t = newTopic(c, name)
		c.topics[name] = t
	}
	return t
}

// owner is the broker that serves the topic of that name, whether it exists or not. Callers hold mu.
func (c *Cluster) owner(name string) *Broker {
	if t := c.topics[name]; t != nil {
		return t.owner
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	return c.brokers[h.Sum32()%uint32(len(c.brokers))]
}

// exists tells whether a name is known here, as a topic, a partition or a partitioned topic. Callers hold mu.
func (c *Cluster) exists(name string) bool {
	return c.topics[name] != nil || c.partitions[name] > 0
}

// newLedger starts a ledger. Callers hold mu.
func (c *Cluster) newLedger() uint64 {
	id := c.nextLedger
	c.nextLedger++
	return id
}

// notify wakes those who wait for a change. Callers hold mu.
func (c *Cluster) notify() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// signalAcks wakes the replications out of here that copy acknowledgements. Callers hold mu.
func (c *Cluster) signalAcks() {
	for _, d := range c.ways {
		if d.opts.Subscriptions {
			d.wake()
		}
	}
}

// Await waits until cond is true. It is asked again after each change in this cluster (a command, a connection that came
// or went, a stored message), so cond must depend on this cluster alone. The error names what was waited for.
func (c *Cluster) Await(ctx context.Context, what string, cond func() bool) error {
	for {
		c.mu.Lock()
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		if cond() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("cluster %s: %s: %w", c.name, what, ctx.Err())
		}
	}
}

// canonical completes a short topic name.
func canonical(name string) string {
	switch {
	case strings.Contains(name, "://"):
		return name
	case strings.Contains(name, "/"):
		return "persistent://" + name
	default:
		return "persistent://public/default/" + name
	}
}

// namespaceOf is the "tenant/namespace" of a canonical name.
func namespaceOf(name string) string {
	_, rest, _ := strings.Cut(name, "://")
	if i := strings.LastIndexByte(rest, '/'); i >= 0 {
		return rest[:i]
	}
	return rest
}

// listenAgain binds addr, which this process had bound before: the port may take a moment to be free.
func listenAgain(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	for {
		ln, err := lc.Listen(ctx, "tcp", addr)
		if err == nil || ctx.Err() != nil {
			return ln, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// sortedKeys are the keys of m in order.
func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
