package session

import (
	"sync/atomic"

	"pointsman/codec"
)

// Counters are one shard's numbers. The shard adds, anybody may read. Every series exists from the start at zero.
type Counters struct {
	Accepted        atomic.Uint64
	Active          atomic.Int64 // client connections
	Bridged         atomic.Int64 // of them with a broker leg
	ExtraLegs       atomic.Int64 // broker legs beside those, to clusters that topics are leaving
	ExtraLegsOpened atomic.Uint64
	ExtraLegsFailed atomic.Uint64 // that did not come about, or were lost
	Handles         atomic.Int64  // live producers and consumers
	UpstreamConns   atomic.Int64  // pooled lookup connections
	ClientFrames    atomic.Uint64
	BrokerFrames    atomic.Uint64
	ClientBytes     atomic.Uint64
	BrokerBytes     atomic.Uint64
	MappedFrames    atomic.Uint64 // whose message ids were rewritten
	CarriedAcks     atomic.Uint64 // acknowledgements of before a move that are remembered for the new cluster
	LostAcks        atomic.Uint64 // and that are not: the messages are delivered again
	SkippedMessages atomic.Uint64 // acknowledged to the new cluster instead of delivered again
	Translations    atomic.Uint64 // SUBSCRIBEs and SEEKs to a message of before a move
	// TranslationsFailed: of them without an answer.
	TranslationsFailed atomic.Uint64
	ReadersSentRound   atomic.Uint64 // readers closed because they had all of the cluster that their topic is leaving
	ReadersRestarted   atomic.Uint64 // of them that began with the oldest message
	OldIDs             atomic.Uint64 // message ids of before a move that a client used after it
	DroppedFrames      atomic.Uint64 // frames of evicted handles, both directions
	Coalesced          atomic.Uint64 // lookups answered by another one's answer
	Rerouted           atomic.Uint64 // lookups that were asked again because their topic moved meanwhile
	EvictedProducers   atomic.Uint64
	EvictedConsumers   atomic.Uint64
	EvictQueue         atomic.Int64
	Unresolved         atomic.Uint64 // SENDs without a receipt when their producer was evicted
	FencedTopics       atomic.Int64
	Parked             atomic.Int64  // requests that wait for the end of a fence, a lease or a broker
	ParkedTotal        atomic.Uint64 // of all time
	DroppedSends       atomic.Uint64 // for a fence or for want of a lease: clients send them again
	DroppedMessages    atomic.Uint64 // for a fence: brokers deliver them again
	HeldBytes          atomic.Int64  // acknowledgements and permits that wait for the end of a fence
	HeldTotal          atomic.Uint64 // frames of them, of all time
	HeldLost           atomic.Uint64 // of them dropped for want of room
	Closed             [causeCount]atomic.Uint64
	Refused            [refusalCount]atomic.Uint64
	Requests           [requestKinds]atomic.Uint64
	Throttled          [requestKinds]atomic.Uint64
	Clusters           map[string]*ClusterCounters // fixed after NewShard
}

// ClusterCounters are the numbers of one cluster within one shard.
type ClusterCounters struct {
	Bridged        atomic.Int64
	Lookups        atomic.Uint64 // answered
	LookupFailures atomic.Uint64 // ended in an error of any kind
	DialFailures   atomic.Uint64
	UpstreamConns  atomic.Int64
}

// RequestKind is a kind of request that the proxy answers itself.
type RequestKind uint8

// The kinds.
const (
	RequestLookup RequestKind = iota
	RequestPartitions
	RequestTopics
	RequestSchema
	requestKinds
)

// RequestKinds is the number of kinds.
const RequestKinds = int(requestKinds)

var requestNames = [requestKinds]string{"lookup", "partitions_metadata", "get_topics_of_namespace", "get_schema"}

func (k RequestKind) String() string { return requestNames[k] }

// types are the commands that ask and answer it.
func (k RequestKind) types() (question, response codec.Type) {
	switch k {
	case RequestLookup:
		return codec.TypeLookup, codec.TypeLookupResponse
	case RequestPartitions:
		return codec.TypePartitionedMetadata, codec.TypePartitionedMetadataResp
	case RequestTopics:
		return codec.TypeGetTopicsOfNamespace, codec.TypeGetTopicsOfNamespaceResp
	default:
		return codec.TypeGetSchema, codec.TypeGetSchemaResponse
	}
}

func newCounters(clusters []string) *Counters {
	c := &Counters{Clusters: make(map[string]*ClusterCounters, len(clusters))}
	for _, name := range clusters {
		c.Clusters[name] = &ClusterCounters{}
	}
	return c
}

// cluster gives the counters of a cluster; those of one that was not configured at the start are thrown away.
func (c *Counters) cluster(name string) *ClusterCounters {
	if cc := c.Clusters[name]; cc != nil {
		return cc
	}
	return &ClusterCounters{}
}
