package session

import (
	"bytes"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
	"pointsman/core/route"
)

// waiter is who wants an answer: a request of a session, a SUBSCRIBE that needs an extra leg, or a function.
type waiter struct {
	s    *Session
	req  uint64
	far  *parked
	tell func(Answer)
}

// decoded tells whether the answer is wanted with its command.
func (w *waiter) decoded() bool { return w.s == nil }

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
	told     bool         // one of them wants the answer decoded
	table    *route.Table // the map by which the cluster was chosen; nil when it was named
	bare     int          // fields without the listener's name that was added for the cluster
	named    bool         // that was added to cmd
	final    *bool        // of cmd as the client sent it: authoritative

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

// complete adds what the cluster wants to be asked with, and makes fields that tell q from any other question.
func (q *question) complete(c *cluster.Cluster) {
	name := c.ListenerName()
	q.bare = len(q.fields)
	if q.cmd == nil {
		if q.kind == RequestLookup && !q.listener && name != "" {
			q.fields = codec.AppendListenerName(q.fields, name)
		}
		return
	}
	if q.kind == RequestLookup && q.cmd.LookupTopic.AdvertisedListenerName == nil && name != "" {
		q.cmd.LookupTopic.AdvertisedListenerName = proto.String(name)
		q.named = true
	}
	if q.kind == RequestLookup {
		q.final = q.cmd.LookupTopic.Authoritative
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
	return q.kind == o.kind && q.ident == o.ident && q.decoded == o.decoded && q.split == o.split && q.named == o.named && (q.decoded || q.bare == o.bare) && q.cluster == o.cluster && bytes.Equal(q.fields, o.fields)
}

// uncomplete undoes complete, and what redirects did to the command: another cluster will be asked.
func (q *question) uncomplete() {
	q.fields = q.fields[:q.bare]
	if !q.decoded {
		q.cmd = nil
		return
	}
	if q.kind == RequestLookup {
		q.cmd.LookupTopic.Authoritative = q.final
		if q.named {
			q.cmd.LookupTopic.AdvertisedListenerName = nil
		}
	}
	q.decoded, q.named = false, false
}

// overtaken tells whether the map sends q elsewhere by now, or has it wait. An answer of the old cluster would lead its client astray.
func (q *question) overtaken() bool {
	sh := q.pool.sh
	table := sh.cfg.Table()
	if q.table == nil || q.table == table {
		return false
	}
	q.table = table
	d, _, err := sh.decideAbout(q)
	return err == nil && (d.Cluster != q.cluster || d.State != route.StateActive && q.waits() && sh.holds(d, codec.TypeLookup))
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
		silent := fmt.Sprintf("broker %s does not answer", q.up.key.broker)
		if trouble != "" {
			silent += "; before that: " + trouble
		}
		trouble = silent
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
