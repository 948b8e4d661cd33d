package session

import (
	"bytes"
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

// Answer is what came of a question.
type Answer struct {
	Code    codec.ServerError // valid if Failed
	Text    string
	Refusal Refusal // why the proxy itself gave up; notRefused when the broker said so
	failed  bool

	Command   *pulsarpb.BaseCommand      // the broker's response
	Connected *pulsarpb.CommandConnected // what the broker that answered had said of itself
	Broker    string                     // LOOKUP: logical address of the owner
	Tagged    string                     // LOOKUP: the same, as told to clients

	plain *codec.Response // the broker's response instead of Command, valid while the answer is told
	owner []byte          // plain LOOKUP: the fields that tell clients the owner
}

// notRefused marks a failure that a broker reported.
const notRefused Refusal = refusalCount

// Failed tells whether there is an error instead of a response.
func (a *Answer) Failed() bool { return a.failed }

// FromBroker tells that the failure is the broker's own answer: the cluster is there.
func (a *Answer) FromBroker() bool { return a.failed && a.Refusal == notRefused }

func failure(reason Refusal, code codec.ServerError, text string) Answer {
	return Answer{failed: true, Refusal: reason, Code: code, Text: text}
}

// waiter is who wants an answer: a request of a session, or a function.
type waiter struct {
	s    *Session
	req  uint64
	tell func(Answer)
}

// question is one request under way towards a cluster. Made by pool.take, and given back once it is answered.
type question struct {
	pool     *pool
	kind     RequestKind
	cluster  string
	topic    string // or namespace
	ident    *identity
	cmd      *pulsarpb.BaseCommand // nil while fields are enough to ask
	fields   []byte                // what is asked: of the command all fields but the request id, or with decoded all of cmd
	split    int                   // place of the request id in fields
	decoded  bool                  // cmd was there from the beginning
	listener bool                  // an advertised listener is named
	waiters  []waiter
	told     bool // one of them wants the answer decoded

	hash         uint64
	chain        *question // the next one of the same hash
	older, newer *question
	load         *clusterLoad

	deadline time.Time
	timer    timer  // for another try
	broker   string // to be asked next; "" = any
	hops     int    // redirects followed
	tries    int
	trouble  string // what went wrong last
	up       *upstream
	req      uint64
}

// maxRedirects is how many redirects of one LOOKUP are followed.
const maxRedirects = 10

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
			same.told = same.told || w.tell != nil
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
	q.told = w.tell != nil
	q.deadline = now.Add(p.sh.cfg.LookupTimeout)
	p.enter(q)
	p.dispatch(now, q, c)
}

// complete adds what the cluster wants to be asked with, and makes fields that tell q from any other question.
func (q *question) complete(c *cluster.Cluster) {
	name := c.ListenerName()
	if q.cmd == nil {
		if q.kind == RequestLookup && !q.listener && name != "" {
			q.fields = codec.AppendListenerName(q.fields, name)
		}
		return
	}
	if q.kind == RequestLookup && q.cmd.LookupTopic.AdvertisedListenerName == nil && name != "" {
		q.cmd.LookupTopic.AdvertisedListenerName = proto.String(name)
	}
	setRequestID(q.cmd, 0)
	var err error
	if q.fields, err = (proto.MarshalOptions{Deterministic: true, AllowPartial: true}).MarshalAppend(q.fields, q.cmd); err != nil {
		panic("session: a parsed command that cannot be marshalled: " + err.Error())
	}
	q.decoded = true
}

// equal tells whether the answer to q is that to o as well.
func (q *question) equal(o *question) bool {
	return q.kind == o.kind && q.ident == o.ident && q.decoded == o.decoded && q.split == o.split && q.cluster == o.cluster && bytes.Equal(q.fields, o.fields)
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
	if w.s != nil {
		w.s.answer(now, q, w, a)
		return
	}
	w.tell(a)
}

// finish answers everybody who waits for q, which ends with that.
func (p *pool) finish(now time.Time, q *question, a Answer) {
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

// again sends q once more.
func (p *pool) again(now time.Time, q *question) {
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

// retry asks again a little later, until the deadline has passed.
func (q *question) retry(now time.Time, trouble string) {
	q.leaveUpstream()
	q.trouble = trouble
	q.broker, q.hops = "", 0
	wait := min(50*time.Millisecond<<min(q.tries, 5), time.Second)
	q.tries++
	q.pool.turn++
	q.pool.sh.timers.set(&q.timer, now.Add(wait))
}

// fire asks again, or gives up.
func (q *question) fire(now time.Time) {
	if now.Before(q.deadline) {
		q.pool.again(now, q)
		return
	}
	q.giveUp(now)
}

func (q *question) giveUp(now time.Time) {
	trouble := q.trouble
	if q.up != nil {
		trouble = fmt.Sprintf("broker %s does not answer", q.up.key.broker)
	}
	// Not ServiceNotReady: on a connection for lookups, which many topics share, clients close it on that.
	q.pool.finish(now, q, failure(RefusedClusterUnreachable, codec.ErrorMetadata,
		fmt.Sprintf("cluster %q did not answer about %s within %s: %s", q.cluster, q.topic, q.pool.sh.cfg.LookupTimeout, trouble)))
}

func (q *question) leaveUpstream() {
	if q.up != nil {
		q.up.forget(q)
		q.up = nil
	}
}

// handleResponse judges a broker's answer.
func (q *question) handleResponse(now time.Time, cmd *pulsarpb.BaseCommand) {
	up := q.up
	q.leaveUpstream()
	a := Answer{Command: cmd, Connected: up.connected}
	failed, code, text := responseError(cmd)
	switch {
	case failed && code == codec.ErrorServiceNotReady:
		q.retry(now, fmt.Sprintf("broker %s says: %s", up.key.broker, text))
		return
	case failed:
		q.pool.finish(now, q, Answer{failed: true, Refusal: notRefused, Code: code, Text: text, Connected: up.connected})
		return
	case q.kind == RequestLookup && cmd.LookupTopicResponse != nil:
		q.handleLookupResponse(now, up, cmd.LookupTopicResponse, a)
		return
	case q.kind == RequestPartitions && cmd.PartitionMetadataResponse != nil,
		q.kind == RequestTopics && cmd.GetTopicsOfNamespaceResponse != nil,
		q.kind == RequestSchema && cmd.GetSchemaResponse != nil:
		q.pool.finish(now, q, a)
		return
	}
	q.pool.finish(now, q, failure(RefusedClusterUnreachable, codec.ErrorMetadata,
		fmt.Sprintf("broker %s of cluster %q answered a %s request with %s", up.key.broker, q.cluster, q.kind, codec.Type(cmd.GetType()))))
}

func (q *question) handleLookupResponse(now time.Time, up *upstream, r *pulsarpb.CommandLookupTopicResponse, a Answer) {
	p := q.pool
	set := p.sh.cfg.Clusters()
	c, ok := set.Get(q.cluster)
	if !ok {
		p.finish(now, q, noLongerConfigured(q.cluster))
		return
	}
	url, missing := c.OwnURL(r.GetBrokerServiceUrl(), r.GetBrokerServiceUrlTls())
	if missing != "" {
		p.finish(now, q, failure(RefusedClusterDisagrees, codec.ErrorMetadata,
			fmt.Sprintf("broker %s of cluster %q answered the lookup of %s without %s, and the cluster is configured %s: give the broker (and its advertised listener) such an address, or change clusters.%s",
				up.key.broker, q.cluster, q.topic, missing, map[bool]string{true: "with TLS", false: "without TLS"}[c.TLS()], q.cluster)))
		return
	}
	broker, _, err := cluster.ParseBrokerURL(url)
	if err != nil {
		p.finish(now, q, failure(RefusedClusterDisagrees, codec.ErrorMetadata,
			fmt.Sprintf("broker %s of cluster %q answered the lookup of %s with an address that cannot be used: %v", up.key.broker, q.cluster, q.topic, err)))
		return
	}
	if !c.Knows(broker) {
		if other := knownElsewhere(set, broker); other != "" {
			p.finish(now, q, failure(RefusedClusterDisagrees, codec.ErrorMetadata,
				fmt.Sprintf("map and cluster disagree: the map says that %s is in cluster %q, whose broker sends to %s of cluster %q", q.topic, q.cluster, broker, other)))
			return
		}
	}
	if r.GetResponse() == codec.LookupRedirect {
		if q.hops++; q.hops > maxRedirects {
			p.finish(now, q, failure(RefusedRedirects, codec.ErrorMetadata,
				fmt.Sprintf("the brokers of cluster %q redirected the lookup of %s more than %d times", q.cluster, q.topic, maxRedirects)))
			return
		}
		q.broker = broker
		q.decode()
		q.cmd.LookupTopic.Authoritative = proto.Bool(r.GetAuthoritative())
		p.dispatch(now, q, c)
		return
	}
	if p.isFailing(now, q.cluster, broker) {
		q.retry(now, fmt.Sprintf("broker %s owns it and cannot be reached", broker))
		return
	}
	a.Broker, a.Tagged = broker, set.Tag(q.cluster, broker)
	p.finish(now, q, a)
}

// handlePlain takes a broker's answer that needs no decoder; false when it needs one.
func (q *question) handlePlain(now time.Time, r *codec.Response) bool {
	if _, t := q.kind.types(); q.told || r.Type != t {
		return false
	}
	a := Answer{plain: r}
	if q.kind == RequestLookup {
		o := q.pool.owner(q.cluster, r)
		if o == nil || q.pool.isFailing(now, q.cluster, o.broker) {
			return false
		}
		a.owner = o.fields
	}
	q.pool.finish(now, q, a)
	return true
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

// decode makes the command that fields are those of.
func (q *question) decode() {
	if q.cmd != nil {
		return
	}
	t, _ := q.kind.types()
	l := new(pulsarpb.CommandLookupTopic)
	if err := (proto.UnmarshalOptions{AllowPartial: true}).Unmarshal(q.fields, l); err != nil || q.kind != RequestLookup {
		panic(fmt.Sprintf("session: a %s that was read without the decoder cannot be decoded: %v", t, err))
	}
	q.cmd = command(t, &pulsarpb.BaseCommand{LookupTopic: l})
}

func noLongerConfigured(name string) Answer {
	return failure(RefusedUnknownCluster, codec.ErrorMetadata, fmt.Sprintf("cluster %q is no longer configured", name))
}

func knownElsewhere(set *cluster.Set, broker string) string {
	for _, name := range set.Names() {
		if c, _ := set.Get(name); c.Knows(broker) {
			return name
		}
	}
	return ""
}

// responseError finds the error of any response.
func responseError(cmd *pulsarpb.BaseCommand) (failed bool, code codec.ServerError, text string) {
	switch codec.Type(cmd.GetType()) {
	case codec.TypeError:
		return true, codec.ServerError(cmd.GetError().GetError()), cmd.GetError().GetMessage()
	case codec.TypeLookupResponse:
		r := cmd.GetLookupTopicResponse()
		return r.GetResponse() == codec.LookupFailed, codec.ServerError(r.GetError()), r.GetMessage()
	case codec.TypePartitionedMetadataResp:
		r := cmd.GetPartitionMetadataResponse()
		return r.GetResponse() == codec.MetadataFailed, codec.ServerError(r.GetError()), r.GetMessage()
	case codec.TypeGetSchemaResponse:
		r := cmd.GetGetSchemaResponse()
		return r.ErrorCode != nil, codec.ServerError(r.GetErrorCode()), r.GetErrorMessage()
	}
	return false, 0, ""
}

// setRequestID writes the request id of a question.
func setRequestID(cmd *pulsarpb.BaseCommand, id uint64) {
	switch codec.Type(cmd.GetType()) {
	case codec.TypeLookup:
		cmd.LookupTopic.RequestId = &id
	case codec.TypePartitionedMetadata:
		cmd.PartitionMetadata.RequestId = &id
	case codec.TypeGetSchema:
		cmd.GetSchema.RequestId = &id
	default:
		cmd.GetTopicsOfNamespace.RequestId = &id
	}
}

// responseID reads the request id of a response.
func responseID(cmd *pulsarpb.BaseCommand) (uint64, bool) {
	switch codec.Type(cmd.GetType()) {
	case codec.TypeError:
		return cmd.GetError().GetRequestId(), true
	case codec.TypeLookupResponse:
		return cmd.GetLookupTopicResponse().GetRequestId(), true
	case codec.TypePartitionedMetadataResp:
		return cmd.GetPartitionMetadataResponse().GetRequestId(), true
	case codec.TypeGetSchemaResponse:
		return cmd.GetGetSchemaResponse().GetRequestId(), true
	case codec.TypeGetTopicsOfNamespaceResp:
		return cmd.GetGetTopicsOfNamespaceResponse().GetRequestId(), true
	}
	return 0, false
}

// ProbeTopic is what health checks look up: any answer about it is one.
const ProbeTopic = "persistent://pulsar/system/pointsman-probe"
