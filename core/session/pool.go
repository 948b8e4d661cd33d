package session

import (
	"fmt"
	"strconv"
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
	upstreams  map[upstreamKey]*upstream
	questions  map[string]*question
	asking     map[string]int // questions under way per cluster
	failing    map[brokerKey]time.Time
	turn       int
	own        *identity // for the proxy's own questions
}

type brokerKey struct{ cluster, broker string }

type upstreamKey struct {
	brokerKey
	identity string
}

// failingFor is how long a broker that could not be reached is avoided.
const failingFor = 3 * time.Second

// maxFailing bounds the memory for brokers that could not be reached.
const maxFailing = 4096

func (p *pool) init(sh *Shard) {
	p.sh = sh
	p.identities = make(map[string]*identity)
	p.upstreams = make(map[upstreamKey]*upstream)
	p.questions = make(map[string]*question)
	p.asking = make(map[string]int)
	p.failing = make(map[brokerKey]time.Time)
	version := int32(codec.ProtocolVersion)
	p.own = p.identityOf(&pulsarpb.CommandConnect{ClientVersion: &sh.cfg.ServerVersion, ProtocolVersion: &version, FeatureFlags: &pulsarpb.FeatureFlags{
		SupportsGetPartitionedMetadataWithoutAutoCreation: proto.Bool(true),
	}})
}

// identity is what a broker may answer differently by: credentials, protocol version and features of the client.
type identity struct {
	key     string
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
		id = &identity{key: string(frame), connect: frame}
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

// question is one request under way towards a cluster.
type question struct {
	pool    *pool
	kind    RequestKind
	cluster string
	topic   string // or namespace
	ident   *identity
	cmd     *pulsarpb.BaseCommand
	key     string
	waiters []waiter

	deadline time.Time
	timer    timer
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
	sh.pool.ask(now, &question{kind: kind, cluster: clusterName, topic: topic, ident: sh.pool.own, cmd: cmd}, waiter{tell: tell})
}

func (p *pool) ask(now time.Time, q *question, w waiter) {
	q.pool = p
	c, ok := p.sh.cfg.Clusters().Get(q.cluster)
	if !ok {
		p.tell(now, q, w, failure(RefusedUnknownCluster, codec.ErrorMetadata,
			fmt.Sprintf("%s is mapped to cluster %q, which this proxy does not know: configure it under clusters", q.topic, q.cluster)))
		return
	}
	if q.kind == RequestLookup && q.cmd.LookupTopic.AdvertisedListenerName == nil && c.ListenerName() != "" {
		q.cmd.LookupTopic.AdvertisedListenerName = proto.String(c.ListenerName())
	}
	setRequestID(q.cmd, 0)
	key, err := proto.MarshalOptions{Deterministic: true, AllowPartial: true}.Marshal(q.cmd)
	if err != nil {
		panic("session: a parsed command that cannot be marshalled: " + err.Error())
	}
	q.key = strconv.Itoa(int(q.kind)) + "|" + q.cluster + "|" + q.ident.key + "|" + string(key)
	if same := p.questions[q.key]; same != nil {
		p.sh.counters.Coalesced.Add(1)
		same.waiters = append(same.waiters, w)
		return
	}
	if p.asking[q.cluster] >= p.sh.cfg.LookupsPerCluster {
		p.sh.counters.Throttled[q.kind].Add(1)
		p.tell(now, q, w, failure(RefusedThrottled, codec.ErrorTooManyRequests,
			fmt.Sprintf("%d requests to cluster %q are under way, the limit (limits.lookups_per_cluster)", p.sh.cfg.LookupsPerCluster, q.cluster)))
		return
	}
	q.waiters = append(q.waiters, w)
	q.deadline = now.Add(p.sh.cfg.LookupTimeout)
	q.timer.owner = q
	p.questions[q.key] = q
	p.asking[q.cluster]++
	p.dispatch(now, q)
}

func (p *pool) tell(now time.Time, q *question, w waiter, a Answer) {
	if w.s != nil {
		w.s.answer(now, q, w, a)
		return
	}
	w.tell(a)
}

// finish answers everybody who waits for q.
func (p *pool) finish(now time.Time, q *question, a Answer) {
	cc := p.sh.counters.cluster(q.cluster)
	if a.failed {
		cc.LookupFailures.Add(1)
	} else {
		cc.Lookups.Add(1)
	}
	q.leaveUpstream()
	p.sh.timers.stop(&q.timer)
	delete(p.questions, q.key)
	if p.asking[q.cluster]--; p.asking[q.cluster] == 0 {
		delete(p.asking, q.cluster)
	}
	for _, w := range q.waiters {
		p.tell(now, q, w, a)
	}
	q.waiters = nil
}

// dispatch sends q to the broker it is meant for, or to any that is not known to fail.
func (p *pool) dispatch(now time.Time, q *question) {
	c, ok := p.sh.cfg.Clusters().Get(q.cluster)
	if !ok {
		p.finish(now, q, noLongerConfigured(q.cluster))
		return
	}
	broker := q.broker
	if broker == "" {
		broker = p.pick(now, c)
	}
	if broker == "" {
		q.retry(now, fmt.Sprintf("no broker of cluster %q is known", q.cluster))
		return
	}
	p.sh.timers.set(&q.timer, q.deadline)
	p.upstream(now, c, broker, q.ident).ask(now, q)
}

// pick takes the brokers in turn, those just seen failing last.
func (p *pool) pick(now time.Time, c *cluster.Cluster) string {
	brokers := c.Brokers()
	if len(brokers) == 0 {
		return ""
	}
	p.turn++
	for i := range brokers {
		b := brokers[(p.turn+i)%len(brokers)]
		if !p.isFailing(now, c.Name(), b) {
			return b
		}
	}
	return brokers[p.turn%len(brokers)]
}

func (p *pool) isFailing(now time.Time, clusterName, broker string) bool {
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
	at := now.Add(wait)
	if at.After(q.deadline) {
		at = q.deadline
	}
	q.pool.sh.timers.set(&q.timer, at)
}

// fire asks again, or gives up.
func (q *question) fire(now time.Time) {
	if now.Before(q.deadline) {
		q.pool.dispatch(now, q)
		return
	}
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
		q.cmd.LookupTopic.Authoritative = proto.Bool(r.GetAuthoritative())
		p.dispatch(now, q)
		return
	}
	if p.isFailing(now, q.cluster, broker) {
		q.retry(now, fmt.Sprintf("broker %s owns it and cannot be reached", broker))
		return
	}
	a.Broker, a.Tagged = broker, set.Tag(q.cluster, broker)
	p.finish(now, q, a)
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
