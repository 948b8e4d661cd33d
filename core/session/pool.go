package session

import (
	"fmt"
	"hash/maphash"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
)

// pool asks clusters on behalf of sessions, over lookup connections that are shared by all clients of the same identity.
// Identical questions under way are asked once. Nothing is remembered beyond that. Loop-owned.
type pool struct {
	sh         *Shard
	identities map[string]*identity
	lastIdent  uint64
	upstreams  map[upstreamKey]*upstream
	failing    map[brokerKey]time.Time
	turn       int
	own        *identity // for the proxy's own questions

	questions map[uint64]*question // under way, by hash; those of one hash are chained
	seed      maphash.Seed
	first     *question // under way, the oldest first, which is the order of their deadlines
	last      *question
	expiry    timer // set for the deadline of the first one or before while there is one
	spare     []*question
	loads     map[string]*clusterLoad
	owners    map[ownerKey]*owner // as ownersOf has them
	ownersOf  *cluster.Set
	response  codec.Response // that is being handled
}

// clusterLoad is what is counted of the questions to one cluster.
type clusterLoad struct {
	underWay int
	counters *ClusterCounters
}

type brokerKey struct{ cluster, broker string }

type upstreamKey struct {
	brokerKey
	identity *identity
}

// failingFor is how long a broker that could not be reached is avoided.
const failingFor = 3 * time.Second

// maxFailing bounds the memory for brokers that could not be reached.
const maxFailing = 4096

func (p *pool) init(sh *Shard) {
	p.sh = sh
	p.identities = make(map[string]*identity)
	p.upstreams = make(map[upstreamKey]*upstream)
	p.questions = make(map[uint64]*question)
	p.seed = maphash.MakeSeed()
	p.expiry.owner = p
	p.loads = make(map[string]*clusterLoad)
	p.owners = make(map[ownerKey]*owner)
	p.failing = make(map[brokerKey]time.Time)
	version := int32(codec.ProtocolVersion)
	p.own = p.identityOf(&pulsarpb.CommandConnect{ClientVersion: &sh.cfg.ServerVersion, ProtocolVersion: &version, FeatureFlags: &pulsarpb.FeatureFlags{
		SupportsGetPartitionedMetadataWithoutAutoCreation: proto.Bool(true),
	}})
}

// identity is what a broker may answer differently by: credentials, protocol version and features of the client. There is one
// of a kind, as long as a session, a question or a lookup connection holds it.
type identity struct {
	key     string
	number  uint64
	refs    int
	connect []byte // the CONNECT frame of its lookup connections
}

func (p *pool) identityOf(c *pulsarpb.CommandConnect) *identity {
	mine := &pulsarpb.CommandConnect{
		ClientVersion:   &p.sh.cfg.ServerVersion,
		AuthMethod:      c.AuthMethod,
		AuthMethodName:  c.AuthMethodName,
		AuthData:        c.AuthData,
		ProtocolVersion: proto.Int32(min(c.GetProtocolVersion(), codec.ProtocolVersion)),
		FeatureFlags:    c.FeatureFlags,
	}
	frame := codec.AppendCommand(nil, command(codec.TypeConnect, &pulsarpb.BaseCommand{Connect: mine}))
	id := p.identities[string(frame)]
	if id == nil {
		p.lastIdent++
		id = &identity{key: string(frame), number: p.lastIdent, connect: frame}
		p.identities[id.key] = id
	}
	id.refs++
	return id
}

func (p *pool) releaseIdentity(id *identity) {
	if id.refs--; id.refs == 0 {
		delete(p.identities, id.key)
	}
}

// Ask puts a question of the proxy's own: tell is called once, on the loop, by the lookup timeout.
func (sh *Shard) Ask(now time.Time, kind RequestKind, clusterName, topic string, tell func(Answer)) {
	cmd := &pulsarpb.BaseCommand{}
	req := uint64(0)
	switch kind {
	case RequestLookup:
		cmd = command(codec.TypeLookup, &pulsarpb.BaseCommand{LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: &req}})
	case RequestPartitions:
		cmd = command(codec.TypePartitionedMetadata, &pulsarpb.BaseCommand{PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{
			Topic: &topic, RequestId: &req, MetadataAutoCreationEnabled: proto.Bool(false),
		}})
	default:
		panic("session: Ask is for lookups and partition counts, not " + kind.String())
	}
	sh.pool.turn++
	q := sh.pool.take(sh.pool.own)
	q.kind, q.cluster, q.topic, q.cmd = kind, clusterName, topic, cmd
	sh.pool.ask(now, q, waiter{tell: tell})
}

// maxSpare bounds the questions that are kept for use again, and maxSpareFields and maxSpareWaiters what each of them may hold.
const (
	maxSpare        = 1024
	maxSpareFields  = 512
	maxSpareWaiters = 16
)

// take makes a question for ident.
func (p *pool) take(ident *identity) *question {
	var q *question
	if n := len(p.spare); n > 0 {
		q, p.spare[n-1] = p.spare[n-1], nil
		p.spare = p.spare[:n-1]
	} else {
		q = &question{pool: p}
		q.timer.owner = q
	}
	q.ident = ident
	ident.refs++
	return q
}

// give takes back a question that nothing refers to.
func (p *pool) give(q *question) {
	p.releaseIdentity(q.ident)
	if len(p.spare) == maxSpare || cap(q.fields) > maxSpareFields || cap(q.waiters) > maxSpareWaiters {
		return
	}
	clear(q.waiters)
	*q = question{pool: p, fields: q.fields[:0], waiters: q.waiters[:0], timer: timer{owner: q}}
	p.spare = append(p.spare, q)
}

// ask takes q over.
func (p *pool) ask(now time.Time, q *question, w waiter) {
	c, ok := p.sh.cfg.Clusters().Get(q.cluster)
	if !ok {
		p.refuse(now, q, w, failure(RefusedUnknownCluster, codec.ErrorMetadata,
			fmt.Sprintf("%s is mapped to cluster %q, which this proxy does not know: configure it under clusters", q.topic, q.cluster)))
		return
	}
	q.complete(c)
	q.hash = maphash.Bytes(p.seed, q.fields) ^ q.ident.number*0x9e3779b97f4a7c15
	for same := p.questions[q.hash]; same != nil; same = same.chain {
		if same.equal(q) {
			p.sh.counters.Coalesced.Add(1)
			same.waiters = append(same.waiters, w)
			same.told = same.told || w.decoded()
			if same.table == nil {
				same.table = q.table
			}
			p.give(q)
			return
		}
	}
	q.load = p.loads[q.cluster]
	if q.load == nil {
		q.load = &clusterLoad{counters: p.sh.counters.cluster(q.cluster)}
		p.loads[q.cluster] = q.load
	}
	if q.load.underWay >= p.sh.cfg.LookupsPerCluster {
		p.sh.counters.Throttled[q.kind].Add(1)
		p.refuse(now, q, w, failure(RefusedThrottled, codec.ErrorTooManyRequests,
			fmt.Sprintf("%d requests to cluster %q are under way, the limit (limits.lookups_per_cluster)", p.sh.cfg.LookupsPerCluster, q.cluster)))
		return
	}
	q.waiters = append(q.waiters, w)
	q.told = w.decoded()
	q.deadline = now.Add(p.sh.cfg.LookupTimeout)
	p.enter(q)
	p.dispatch(now, q, c)
}

// enter notes that q is under way.
func (p *pool) enter(q *question) {
	q.load.underWay++
	q.chain = p.questions[q.hash]
	p.questions[q.hash] = q
	q.older = p.last
	if p.last != nil {
		p.last.newer = q
	} else {
		p.first = q
	}
	p.last = q
	if p.expiry.pos == 0 {
		p.sh.timers.set(&p.expiry, q.deadline)
	}
}

// leave is the opposite of enter.
func (p *pool) leave(q *question) {
	q.load.underWay--
	switch head := p.questions[q.hash]; {
	case head == q && q.chain == nil:
		delete(p.questions, q.hash)
	case head == q:
		p.questions[q.hash] = q.chain
	default:
		for head.chain != q {
			head = head.chain
		}
		head.chain = q.chain
	}
	if q.older != nil {
		q.older.newer = q.newer
	} else {
		p.first = q.newer
	}
	if q.newer != nil {
		q.newer.older = q.older
	} else {
		p.last = q.older
	}
}

// fire gives up the oldest question when its time is over, one at a call.
func (p *pool) fire(now time.Time) {
	if q := p.first; q != nil && !now.Before(q.deadline) {
		q.giveUp(now)
	}
	if p.first != nil {
		p.sh.timers.set(&p.expiry, p.first.deadline)
	}
}

// refuse answers q, which is not under way.
func (p *pool) refuse(now time.Time, q *question, w waiter, a Answer) {
	p.tell(now, q, w, a)
	p.give(q)
}

func (p *pool) tell(now time.Time, q *question, w waiter, a Answer) {
	switch {
	case w.s != nil:
		w.s.answer(now, q, w, a)
	case w.far != nil:
		w.far.found(now, a)
	default:
		w.tell(a)
	}
}

// finish answers everybody who waits for q, which ends with that.
func (p *pool) finish(now time.Time, q *question, a Answer) {
	if q.overtaken() {
		p.reroute(now, q, a)
		return
	}
	if a.failed {
		q.load.counters.LookupFailures.Add(1)
	} else {
		q.load.counters.Lookups.Add(1)
	}
	q.leaveUpstream()
	p.sh.timers.stop(&q.timer)
	p.leave(q)
	for _, w := range q.waiters {
		p.tell(now, q, w, a)
	}
	p.give(q)
}

// reroute asks for clients once more what the map sends elsewhere by now; each time takes a change of the map. Who had named the cluster
// gets its answer.
func (p *pool) reroute(now time.Time, q *question, a Answer) {
	q.leaveUpstream()
	p.sh.timers.stop(&q.timer)
	p.leave(q)
	q.uncomplete()
	p.sh.counters.Rerouted.Add(1)
	for _, w := range q.waiters {
		if w.s == nil {
			p.tell(now, q, w, a)
			continue
		}
		if w.s.state == stateClosed {
			continue
		}
		next := p.take(q.ident)
		next.kind, next.topic, next.split, next.listener = q.kind, q.topic, q.split, q.listener
		if next.fields = append(next.fields, q.fields...); q.cmd != nil {
			next.cmd = proto.CloneOf(q.cmd)
		}
		w.s.route(now, next, w.req, time.Time{})
	}
	p.give(q)
}

// again sends q once more.
func (p *pool) again(now time.Time, q *question) {
	if q.overtaken() {
		p.reroute(now, q, failure(RefusedClusterUnreachable, codec.ErrorMetadata, q.trouble))
		return
	}
	c, ok := p.sh.cfg.Clusters().Get(q.cluster)
	if !ok {
		p.finish(now, q, noLongerConfigured(q.cluster))
		return
	}
	p.dispatch(now, q, c)
}

// dispatch sends q to the broker of its cluster that it is meant for, or to any that is not known to fail.
func (p *pool) dispatch(now time.Time, q *question, c *cluster.Cluster) {
	broker := q.broker
	if broker == "" {
		broker = p.pick(now, c)
	}
	if broker == "" {
		q.retry(now, fmt.Sprintf("no broker of cluster %q is known", q.cluster))
		return
	}
	p.upstream(now, c, broker, q.ident).ask(now, q)
}

// pick takes the brokers in turn, those just seen failing last. What a client asks in one read goes to the same one, so that its answers
// come together.
func (p *pool) pick(now time.Time, c *cluster.Cluster) string {
	brokers := c.Brokers()
	if len(brokers) == 0 {
		return ""
	}
	for i := range brokers {
		b := brokers[(p.turn+i)%len(brokers)]
		if !p.isFailing(now, c.Name(), b) {
			return b
		}
	}
	return brokers[p.turn%len(brokers)]
}

func (p *pool) isFailing(now time.Time, clusterName, broker string) bool {
	if len(p.failing) == 0 {
		return false
	}
	until, ok := p.failing[brokerKey{clusterName, broker}]
	return ok && now.Before(until)
}

func (p *pool) noteFailure(now time.Time, clusterName, broker string) {
	if len(p.failing) >= maxFailing {
		clear(p.failing)
	}
	p.failing[brokerKey{clusterName, broker}] = now.Add(failingFor)
}

func (p *pool) noteAlive(clusterName, broker string) {
	delete(p.failing, brokerKey{clusterName, broker})
}

// owner is a broker that answers to LOOKUPs name, and the fields of a LOOKUP_RESPONSE that tell it to clients.
type owner struct {
	broker string
	fields []byte
}

type ownerKey struct{ cluster, url string }

// maxOwners bounds the owners that are kept; their URLs come from brokers.
const maxOwners = 4096

// owner finds the owner that a broker of the cluster names; nil when it may not be told as it is.
func (p *pool) owner(clusterName string, r *codec.Response) *owner {
	set := p.sh.cfg.Clusters()
	if set != p.ownersOf {
		clear(p.owners)
		p.ownersOf = set
	}
	c, ok := set.Get(clusterName)
	if !ok {
		return nil
	}
	url := r.URL
	if c.TLS() {
		url = r.URLTLS
	}
	if o := p.owners[ownerKey{clusterName, string(url)}]; o != nil {
		return o
	}
	broker, _, err := cluster.ParseBrokerURL(string(url))
	if err != nil || !c.Knows(broker) && knownElsewhere(set, broker) != "" {
		return nil
	}
	if len(p.owners) >= maxOwners {
		clear(p.owners)
	}
	plain, tls := taggedURLs(set.Tag(clusterName, broker))
	o := &owner{broker: broker, fields: codec.AppendOwnerFields(nil, plain, tls)}
	p.owners[ownerKey{clusterName, string(url)}] = o
	return o
}

func knownElsewhere(set *cluster.Set, broker string) string {
	for _, name := range set.Names() {
		if c, _ := set.Get(name); c.Knows(broker) {
			return name
		}
	}
	return ""
}

// ProbeTopic is what health checks look up: any answer about it is one.
const ProbeTopic = "persistent://pulsar/system/pointsman-probe"
