package session

import (
	"fmt"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// handleRequest takes a command of a connection without a target.
func (s *Session) handleRequest(now time.Time, frame []byte, h codec.Head) {
	switch h.Type {
	case codec.TypeLookup, codec.TypePartitionedMetadata, codec.TypeGetTopicsOfNamespace, codec.TypeGetSchema:
		if m, ok := codec.ParseQuestion(frame, h); ok {
			s.handlePlainQuestion(now, h.Type, &m)
			return
		}
		var cmd pulsarpb.BaseCommand
		if err := codec.Parse(&cmd, frame, h); err != nil {
			s.closeMalformed(now, err)
			return
		}
		s.handleQuestion(now, &cmd)
	case codec.TypeProducer, codec.TypeSubscribe:
		var cmd pulsarpb.BaseCommand
		if err := codec.Parse(&cmd, frame, h); err != nil {
			s.closeMalformed(now, err)
			return
		}
		req, topic := cmd.GetProducer().GetRequestId(), cmd.GetProducer().GetTopic()
		if h.Type == codec.TypeSubscribe {
			req, topic = cmd.GetSubscribe().GetRequestId(), cmd.GetSubscribe().GetTopic()
		}
		s.deny(RefusedUnsupported, req, codec.ErrorNotAllowed, topic,
			fmt.Sprintf("%s on a connection for lookups: connect with the proxy_to_broker_url that a LOOKUP of %s answers", h.Type, topic))
	case codec.TypeAuthResponse:
		// No challenge of ours is open; nothing waits for it.
	default:
		// Field 1 of a request is its id. A command without one expects no answer.
		if id, found, _, err := codec.ParseID(frame, h); found && err == nil {
			s.deny(RefusedUnsupported, id, codec.ErrorNotAllowed, "", fmt.Sprintf("%s is not supported on a connection for lookups", h.Type))
			return
		}
		s.noteRefusal(RefusedUnsupported, "", fmt.Sprintf("%s ignored on a connection for lookups", h.Type))
	}
}

// cost is what a request counts for in LookupsPerConnection: the answers to some are large, and wait in the proxy's memory for a
// client that does not read. At most two lists of topics and twenty schemas of one connection are under way.
func (c *Config) cost(kind RequestKind) int {
	switch kind {
	case RequestTopics:
		return max(c.LookupsPerConnection/2, 1)
	case RequestSchema:
		return max(c.LookupsPerConnection/20, 1)
	}
	return 1
}

// handlePlainQuestion takes a question that needs no decoder.
func (s *Session) handlePlainQuestion(now time.Time, t codec.Type, m *codec.Question) {
	q := s.sh.pool.take(s.ident)
	if q.kind = RequestLookup; t == codec.TypePartitionedMetadata {
		q.kind = RequestPartitions
	}
	q.topic = string(m.Topic)
	q.fields = append(append(q.fields, m.Before...), m.After...)
	q.split, q.listener = len(m.Before), m.Listener
	s.ask(now, q, m.ID)
}

// handleQuestion takes any other one.
func (s *Session) handleQuestion(now time.Time, cmd *pulsarpb.BaseCommand) {
	q := s.sh.pool.take(s.ident)
	q.cmd = cmd
	var req uint64
	switch codec.Type(cmd.GetType()) {
	case codec.TypeLookup:
		m := cmd.LookupTopic
		q.kind, q.topic, req = RequestLookup, m.GetTopic(), m.GetRequestId()
		if m.GetAdvertisedListenerName() == "" {
			m.AdvertisedListenerName = nil // some clients send an empty one, and brokers then pick the wrong listener
		}
		m.OriginalPrincipal, m.OriginalAuthData, m.OriginalAuthMethod = nil, nil, nil
	case codec.TypePartitionedMetadata:
		m := cmd.PartitionMetadata
		q.kind, q.topic, req = RequestPartitions, m.GetTopic(), m.GetRequestId()
		m.OriginalPrincipal, m.OriginalAuthData, m.OriginalAuthMethod = nil, nil, nil
	case codec.TypeGetSchema:
		q.kind, q.topic, req = RequestSchema, cmd.GetGetSchema().GetTopic(), cmd.GetGetSchema().GetRequestId()
	default:
		q.kind, q.topic, req = RequestTopics, cmd.GetGetTopicsOfNamespace().GetNamespace(), cmd.GetGetTopicsOfNamespace().GetRequestId()
	}
	s.ask(now, q, req)
}

// ask asks the mapped cluster what the client asks.
func (s *Session) ask(now time.Time, q *question, req uint64) {
	s.sh.counters.Requests[q.kind].Add(1)
	s.inflight += s.sh.cfg.cost(q.kind)
	s.route(now, q, req, time.Time{})
	if s.state != stateClosed && s.inflight >= s.sh.cfg.LookupsPerConnection {
		s.hold()
	}
}

// route sends q to the cluster that the map names, or has it wait. until is when it gives up, if it has waited before.
func (s *Session) route(now time.Time, q *question, req uint64, until time.Time) {
	w := waiter{s: s, req: req}
	q.table = s.sh.cfg.Table()
	d, base, err := s.sh.decideAbout(q)
	switch {
	case err != nil:
		s.sh.pool.refuse(now, q, w, failure(RefusedTopicName, codec.ErrorInvalidTopicName, err.Error()))
	case undecidedText(d, q.topic) != "":
		s.sh.pool.refuse(now, q, w, failure(RefusedUnmapped, codec.ErrorMetadata, undecidedText(d, q.topic)))
	case d.State != route.StateActive && q.waits() && s.sh.holds(d, codec.TypeLookup):
		s.parkLookup(now, s.sh.movingTopic(base, d), q, req, until)
	default:
		q.cluster = d.Cluster
		s.sh.pool.ask(now, q, w)
	}
}

// decideAbout is what the map of q says about its topic or namespace.
func (sh *Shard) decideAbout(q *question) (d route.Decision, base string, err error) {
	if q.kind == RequestTopics {
		scope, err := route.ParseScope(q.topic)
		if err != nil {
			return d, "", err
		}
		return q.table.DecideScope(scope, sh.cfg.DefaultCluster), "", nil
	}
	topic, err := route.ParseTopic(q.topic)
	if err != nil {
		return d, "", err
	}
	return q.table.Decide(topic, sh.cfg.DefaultCluster), topic.Base(), nil
}

// waits tells whether a request of this kind waits for the end of a fence: those after which clients open a topic.
func (q *question) waits() bool { return q.kind == RequestLookup || q.kind == RequestPartitions }

// undecidedText says why the map names no cluster for a topic or namespace; "" when it does.
func undecidedText(d route.Decision, name string) string {
	switch {
	case d.Source == route.SourceUnknown:
		return fmt.Sprintf("the part of the map that decides about %s cannot be read by this proxy: see its log", name)
	case d.Cluster == "":
		return fmt.Sprintf("%s is mapped to no cluster and there is no default: set a route for it, its namespace or its tenant, or default_cluster", name)
	}
	return ""
}

// answer gives a client the answer to one of its requests, in the type of response that belongs to it.
func (s *Session) answer(now time.Time, q *question, w waiter, a Answer) {
	if s.state == stateClosed {
		return
	}
	s.inflight -= s.sh.cfg.cost(q.kind)
	switch {
	case a.Failed():
		if a.Refusal != notRefused {
			s.noteRefusal(a.Refusal, q.topic, a.Text)
			a.Text = s.say(a.Text)
		}
		s.sendCommand(failedResponse(q.kind, w.req, a.Code, a.Text))
	case a.plain != nil:
		s.send(s.sh.plainResponse(w.req, &a))
	default:
		s.sendCommand(s.sh.response(q, w.req, a))
	}
	s.maybeRelease(now)
}

// maybeRelease reads a client again that had too many requests under way.
func (s *Session) maybeRelease(now time.Time) {
	if s.held && s.inflight <= s.sh.cfg.LookupsPerConnection/2 {
		s.release(now)
	}
}

// plainResponse is response for an answer that needed no decoder.
func (sh *Shard) plainResponse(req uint64, a *Answer) []byte {
	start := len(sh.scratch)
	if a.owner != nil {
		sh.scratch = a.plain.AppendOwner(sh.scratch, req, a.owner)
	} else {
		sh.scratch = a.plain.Append(sh.scratch, req)
	}
	return sh.scratch[start:]
}

// taggedURLs are the broker URLs that clients are told: of both they take the one whose scheme they speak.
func taggedURLs(tagged string) (plain, tls string) {
	return "pulsar://" + tagged, "pulsar+ssl://" + tagged
}

// response is the cluster's answer under the client's request id, every field that we do not know included.
func (sh *Shard) response(q *question, req uint64, a Answer) *pulsarpb.BaseCommand {
	cmd := a.Command
	switch q.kind {
	case RequestLookup:
		r := cmd.LookupTopicResponse
		yes := true
		plain, tls := taggedURLs(a.Tagged)
		r.BrokerServiceUrl, r.BrokerServiceUrlTls = &plain, &tls
		r.ProxyThroughServiceUrl, r.Authoritative, r.RequestId = &yes, &yes, &req
	case RequestPartitions:
		cmd.PartitionMetadataResponse.RequestId = &req
	case RequestTopics:
		cmd.GetTopicsOfNamespaceResponse.RequestId = &req
	default:
		cmd.GetSchemaResponse.RequestId = &req
	}
	return cmd
}

// failedResponse is an error in the type of response that the request expects: an error of another type would leave
// some clients waiting, or close their connection.
func failedResponse(kind RequestKind, req uint64, code codec.ServerError, text string) *pulsarpb.BaseCommand {
	c := int32(code)
	switch kind {
	case RequestLookup:
		failed := codec.LookupFailed
		return command(codec.TypeLookupResponse, &pulsarpb.BaseCommand{LookupTopicResponse: &pulsarpb.CommandLookupTopicResponse{
			RequestId: &req, Response: &failed, Error: &c, Message: &text,
		}})
	case RequestPartitions:
		failed := codec.MetadataFailed
		return command(codec.TypePartitionedMetadataResp, &pulsarpb.BaseCommand{PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
			RequestId: &req, Response: &failed, Error: &c, Message: &text,
		}})
	case RequestSchema:
		return command(codec.TypeGetSchemaResponse, &pulsarpb.BaseCommand{GetSchemaResponse: &pulsarpb.CommandGetSchemaResponse{
			RequestId: &req, ErrorCode: &c, ErrorMessage: &text,
		}})
	default:
		return errorCommand(req, code, text)
	}
}
