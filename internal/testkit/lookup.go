package testkit

import (
	"fmt"
	"hash/crc32"
	"math/bits"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// handle does what a broker does for a command. It returns false when the connection must end.
func (c *Conn) handle(t codec.Type, cmd *pulsarpb.BaseCommand, payload []byte) bool {
	cl := c.broker.cluster
	cl.mu.Lock()
	defer cl.mu.Unlock()
	defer cl.notify()
	if (t == codec.TypeConnect) == (c.connect != nil) {
		return false // a command before CONNECT, or a second CONNECT
	}
	switch t {
	case codec.TypeConnect:
		c.handleConnect(cmd.GetConnect())
	case codec.TypePing:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePong), Pong: &pulsarpb.CommandPong{}})
	case codec.TypePong:
		c.handlePong()
	case codec.TypeAuthResponse:
	case codec.TypeLookup:
		c.lookups++
		c.handleLookup(cmd)
	case codec.TypePartitionedMetadata:
		c.lookups++
		c.handlePartitionedMetadata(cmd)
	case codec.TypeGetTopicsOfNamespace:
		c.lookups++
		c.handleTopicsOfNamespace(cmd.GetGetTopicsOfNamespace())
	case codec.TypeGetSchema:
		c.lookups++
		c.handleGetSchema(cmd)
	case codec.TypeGetOrCreateSchema:
		r := cmd.GetGetOrCreateSchema()
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetOrCreateSchemaResponse),
			GetOrCreateSchemaResponse: &pulsarpb.CommandGetOrCreateSchemaResponse{
				RequestId: r.RequestId, SchemaVersion: cl.addSchema(r.GetTopic(), r.GetSchema())}})
	case codec.TypeProducer:
		c.handleProducer(cmd, true)
	case codec.TypeSend:
		return c.handleSend(cmd, payload)
	case codec.TypeCloseProducer:
		c.succeed(cmd) // before what the departure brings about
		if p := c.producers[cmd.GetCloseProducer().GetProducerId()]; p != nil {
			p.remove()
		}
	case codec.TypeSubscribe:
		c.handleSubscribe(cmd, true)
	case codec.TypeCloseConsumer:
		if s := c.consumers[cmd.GetCloseConsumer().GetConsumerId()]; s != nil {
			s.remove()
		}
		c.succeed(cmd)
	case codec.TypeFlow, codec.TypeAck, codec.TypeRedeliver, codec.TypeUnsubscribe, codec.TypeSeek, codec.TypeGetLastMessageID,
		codec.TypeConsumerStats:
		c.handleConsumerCommand(t, cmd)
	default:
		if t > newestType {
			return false // a broker cannot even parse it
		}
		c.Fail(cmd, codec.ErrorNotAllowed, fmt.Sprintf("the fake broker does not do %v", t))
	}
	return true
}

// newestType is the highest command number of protocol version 21.
const newestType = codec.TypeTopicMigrated

// succeed answers with SUCCESS.
func (c *Conn) succeed(cmd *pulsarpb.BaseCommand) {
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeSuccess), Success: &pulsarpb.CommandSuccess{RequestId: ptr(requestID(cmd))}})
}

func (c *Conn) handleConnect(r *pulsarpb.CommandConnect) {
	c.connect = r
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeConnected), Connected: &pulsarpb.CommandConnected{
		ServerVersion:   ptr("pointsman-testkit"),
		ProtocolVersion: ptr(min(r.GetProtocolVersion(), codec.ProtocolVersion)),
		MaxMessageSize:  ptr(int32(c.broker.cluster.opts.MaxMessageSize)),
		FeatureFlags: &pulsarpb.FeatureFlags{
			SupportsGetPartitionedMetadataWithoutAutoCreation: ptr(true),
		},
	}})
}

func (c *Conn) handleLookup(cmd *pulsarpb.BaseCommand) {
	cl, r := c.broker.cluster, cmd.GetLookupTopic()
	name := canonical(r.GetTopic())
	if cl.opts.NoAutoCreation && !cl.exists(name) {
		c.Fail(cmd, codec.ErrorTopicNotFound, "topic not found: "+name)
		return
	}
	resp := &pulsarpb.CommandLookupTopicResponse{
		RequestId: r.RequestId, Response: ptr(codec.LookupConnect), Authoritative: ptr(true),
	}
	resp.BrokerServiceUrl, resp.BrokerServiceUrlTls = urlFields(cl.owner(name).URL())
	if done := cl.hops[name]; cl.opts.Redirects < 0 || done < cl.opts.Redirects {
		cl.hops[name] = done + 1
		next := cl.brokers[(c.broker.index+1)%len(cl.brokers)]
		resp.Response = ptr(codec.LookupRedirect)
		resp.BrokerServiceUrl, resp.BrokerServiceUrlTls = urlFields(next.URL())
	} else {
		delete(cl.hops, name)
	}
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeLookupResponse), LookupTopicResponse: resp})
}

// urlFields are the two fields of a broker URL, for plaintext and for TLS; the one that it is not for stays unset.
func urlFields(url string) (plain, tls *string) {
	if strings.HasPrefix(url, "pulsar+ssl://") {
		return nil, &url
	}
	return &url, nil
}

func (c *Conn) handlePartitionedMetadata(cmd *pulsarpb.BaseCommand) {
	cl, r := c.broker.cluster, cmd.GetPartitionMetadata()
	name := canonical(r.GetTopic())
	if !cl.exists(name) {
		if cl.opts.NoAutoCreation || !r.GetMetadataAutoCreationEnabled() {
			c.Fail(cmd, codec.ErrorTopicNotFound, "topic not found: "+name)
			return
		}
		if cl.opts.AutoPartitions > 0 && partitionOf(name) < 0 {
			cl.createPartitioned(name, cl.opts.AutoPartitions)
		}
	}
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePartitionedMetadataResp),
		PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
			RequestId: r.RequestId, Response: ptr(int32(0)), Partitions: ptr(uint32(cl.partitions[name]))}})
}

func (c *Conn) handleTopicsOfNamespace(r *pulsarpb.CommandGetTopicsOfNamespace) {
	var names []string
	for _, name := range sortedKeys(c.broker.cluster.topics) {
		persistent := strings.HasPrefix(name, "persistent://")
		if namespaceOf(name) == r.GetNamespace() && (r.GetMode() == 2 || persistent == (r.GetMode() == 0)) {
			names = append(names, name)
		}
	}
	resp := &pulsarpb.CommandGetTopicsOfNamespaceResponse{
		RequestId: r.RequestId, Topics: names, Filtered: ptr(false), TopicsHash: ptr(TopicsHash(names)), Changed: ptr(true),
	}
	if r.GetTopicsHash() == resp.GetTopicsHash() {
		resp.Topics, resp.Changed = nil, ptr(false)
	}
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetTopicsOfNamespaceResp), GetTopicsOfNamespaceResponse: resp})
}

// TopicsHash is the hash that a broker sends with a topic list: CRC32C of the sorted names joined by commas, its bytes
// in little-endian order.
func TopicsHash(names []string) string {
	names = slices.Sorted(slices.Values(names))
	sum := crc32.Checksum([]byte(strings.Join(names, ",")), crc32.MakeTable(crc32.Castagnoli))
	return fmt.Sprintf("%08x", bits.ReverseBytes32(sum))
}

func (c *Conn) handleGetSchema(cmd *pulsarpb.BaseCommand) {
	r := cmd.GetGetSchema()
	versions := c.broker.cluster.schemas[baseName(canonical(r.GetTopic()))]
	version := len(versions) - 1
	if v := r.GetSchemaVersion(); len(v) == 8 {
		version = int(beInt64(v))
	}
	if version < 0 || version >= len(versions) {
		c.Fail(cmd, codec.ErrorTopicNotFound, "no such schema of "+r.GetTopic())
		return
	}
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetSchemaResponse), GetSchemaResponse: &pulsarpb.CommandGetSchemaResponse{
		RequestId: r.RequestId, Schema: versions[version], SchemaVersion: beBytes(int64(version))}})
}

// addSchema registers a schema of a topic, unless it is there, and returns its version. Callers hold mu.
func (c *Cluster) addSchema(topic string, s *pulsarpb.Schema) []byte {
	if s == nil {
		return nil
	}
	name := baseName(canonical(topic))
	i := slices.IndexFunc(c.schemas[name], func(have *pulsarpb.Schema) bool { return proto.Equal(have, s) })
	if i < 0 {
		i = len(c.schemas[name])
		c.schemas[name] = append(c.schemas[name], s)
	}
	return beBytes(int64(i))
}
