package app

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/cluster"
	"pointsman/core/session"
	"pointsman/netio"
)

// collector reads the counters of all parts when it is scraped. Names that the official proxy has keep its meaning
// (pulsar_proxy_…); everything else is pointsman_…. Nothing is labelled by topic or client: the number of series is fixed by the configuration.
type collector struct {
	app      *App
	all      []metric
	turnDesc *prometheus.Desc // of the one histogram
}

// metric is one family: read calls emit once per series.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func(emit func(value float64, labels ...string))
}

func newCollector(a *App) *collector {
	c := &collector{app: a, turnDesc: prometheus.NewDesc("pointsman_loop_turn_seconds", "Turns of the event loop: how long it did not come back for new events.", []string{"loop"}, nil)}
	c.add()
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.all {
		ch <- m.desc
	}
	ch <- c.turnDesc
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c.all {
		m.read(func(value float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
		})
	}
	c.turns(ch)
}

func (c *collector) family(kind prometheus.ValueType, name, help string, labels []string, read func(emit func(float64, ...string))) {
	c.all = append(c.all, metric{prometheus.NewDesc(name, help, labels, nil), kind, read})
}

// turns collects the histogram of turns.
func (c *collector) turns(ch chan<- prometheus.Metric) {
	for i, l := range c.app.engine.Stats().Loops {
		buckets, count := map[float64]uint64{}, uint64(0)
		for class, bound := range netio.TurnBounds {
			count += uint64(l.Turns[class])
			buckets[bound.Seconds()] = count
		}
		count += uint64(l.Turns[len(netio.TurnBounds)])
		ch <- prometheus.MustNewConstHistogram(c.turnDesc, count, l.Busy.Seconds(), buckets, strconv.Itoa(i))
	}
}

func (c *collector) counter(name, help string, read func(*session.Counters) uint64) {
	c.family(prometheus.CounterValue, name, help, nil, func(emit func(float64, ...string)) {
		var sum uint64
		for _, sh := range c.app.shards {
			sum += read(sh.Counters())
		}
		emit(float64(sum))
	})
}

func (c *collector) gauge(name, help string, read func(*session.Counters) int64) {
	c.family(prometheus.GaugeValue, name, help, nil, func(emit func(float64, ...string)) {
		var sum int64
		for _, sh := range c.app.shards {
			sum += read(sh.Counters())
		}
		emit(float64(sum))
	})
}

func (c *collector) add() {
	c.gauge("pulsar_proxy_active_connections", "Client connections that are open.", func(s *session.Counters) int64 { return s.Active.Load() })
	c.counter("pulsar_proxy_new_connections_total", "Client connections accepted.", func(s *session.Counters) uint64 { return s.Accepted.Load() })
	c.family(prometheus.CounterValue, "pulsar_proxy_rejected_connections_total", "Client connections closed at once because of limits.connections.", nil, func(emit func(float64, ...string)) {
		var sum int64
		for _, l := range c.app.engine.Stats().Loops {
			sum += l.Refused
		}
		emit(float64(sum))
	})
	c.counter("pulsar_proxy_binary_ops_total", "Frames taken from clients and brokers.", func(s *session.Counters) uint64 { return s.ClientFrames.Load() + s.BrokerFrames.Load() })
	c.counter("pulsar_proxy_binary_bytes_total", "Bytes taken from clients and brokers.", func(s *session.Counters) uint64 { return s.ClientBytes.Load() + s.BrokerBytes.Load() })
	for kind, name := range map[session.RequestKind]string{
		session.RequestLookup: "lookup", session.RequestPartitions: "partitions_metadata", session.RequestTopics: "get_topics_of_namespace", session.RequestSchema: "get_schema",
	} {
		c.counter("pulsar_proxy_"+name+"_requests_total", "Requests of clients of that kind.", func(s *session.Counters) uint64 { return s.Requests[kind].Load() })
		c.counter("pulsar_proxy_rejected_"+name+"_requests_total", "Requests answered with TooManyRequests because of limits.lookups_per_cluster.", func(s *session.Counters) uint64 { return s.Throttled[kind].Load() })
	}

	c.gauge("pointsman_bridged_connections", "Client connections with a connection to a broker.", func(s *session.Counters) int64 { return s.Bridged.Load() })
	c.gauge("pointsman_extra_broker_connections", "Connections of clients beside those, to brokers of clusters that topics are leaving without replication.", func(s *session.Counters) int64 { return s.ExtraLegs.Load() })
	c.counter("pointsman_extra_broker_connections_total", "Those of all time.", func(s *session.Counters) uint64 { return s.ExtraLegsOpened.Load() })
	c.counter("pointsman_extra_broker_connection_failures_total", "Those that did not come about, or were lost: their consumers were closed and come back.", func(s *session.Counters) uint64 { return s.ExtraLegsFailed.Load() })
	c.gauge("pointsman_handles", "Producers and consumers that are open.", func(s *session.Counters) int64 { return s.Handles.Load() })
	c.gauge("pointsman_lookup_connections", "Shared connections to brokers for lookups.", func(s *session.Counters) int64 { return s.UpstreamConns.Load() })
	c.counter("pointsman_client_bytes_total", "Bytes taken from clients.", func(s *session.Counters) uint64 { return s.ClientBytes.Load() })
	c.counter("pointsman_broker_bytes_total", "Bytes taken from brokers on bridged connections.", func(s *session.Counters) uint64 { return s.BrokerBytes.Load() })
	c.counter("pointsman_dropped_frames_total", "Frames of evicted producers and consumers that were dropped, both directions.", func(s *session.Counters) uint64 { return s.DroppedFrames.Load() })
	c.counter("pointsman_coalesced_lookups_total", "Requests answered by the answer to an identical one under way.", func(s *session.Counters) uint64 { return s.Coalesced.Load() })
	c.counter("pointsman_evicted_producers_total", "Producers closed because their topic moved.", func(s *session.Counters) uint64 { return s.EvictedProducers.Load() })
	c.counter("pointsman_evicted_consumers_total", "Consumers closed because their topic moved.", func(s *session.Counters) uint64 { return s.EvictedConsumers.Load() })
	c.counter("pointsman_mapped_id_frames_total", "Frames of moved topics whose message ids were rewritten.", func(s *session.Counters) uint64 { return s.MappedFrames.Load() })
	c.counter("pointsman_carried_acks_total", "Acknowledgements of before a move that were remembered for the new cluster.", func(s *session.Counters) uint64 { return s.CarriedAcks.Load() })
	c.counter("pointsman_lost_acks_total", "Acknowledgements of before a move that could not be: the messages are delivered again.", func(s *session.Counters) uint64 { return s.LostAcks.Load() })
	c.counter("pointsman_skipped_messages_total", "Messages that were acknowledged to the new cluster instead of delivered again.", func(s *session.Counters) uint64 { return s.SkippedMessages.Load() })
	c.counter("pointsman_translated_ids_total", "SUBSCRIBEs and SEEKs to a message of before a move.", func(s *session.Counters) uint64 { return s.Translations.Load() })
	c.counter("pointsman_translation_failures_total", "Those whose message was not found on the new cluster.", func(s *session.Counters) uint64 { return s.TranslationsFailed.Load() })
	c.counter("pointsman_readers_sent_round_total", "Readers closed because they had been given all that a cluster has of a topic that leaves it without replication: they come back to the new one.", func(s *session.Counters) uint64 { return s.ReadersSentRound.Load() })
	c.counter("pointsman_restarted_readers_total", "Those that began with the oldest message.", func(s *session.Counters) uint64 { return s.ReadersRestarted.Load() })
	c.counter("pointsman_old_ids_total", "Message ids of before a move that clients used after it.", func(s *session.Counters) uint64 { return s.OldIDs.Load() })
	c.counter("pointsman_unresolved_evictions_total", "Producers evicted although a SEND had no receipt within eviction.receipt_wait: duplicates are possible.", func(s *session.Counters) uint64 { return s.Unresolved.Load() })
	c.value("pointsman_fenced_topics", "Topics that are fenced because a switch moves them.", func() float64 {
		var most int64 // every loop knows all of them
		for _, sh := range c.app.shards {
			most = max(most, sh.Counters().FencedTopics.Load())
		}
		return float64(most)
	})
	c.gauge("pointsman_parked_requests", "Requests of clients that wait for a topic that is being moved; their limit is limits.parked_requests.", func(s *session.Counters) int64 { return s.Parked.Load() })
	c.counter("pointsman_parked_requests_total", "Requests of clients that had to wait for a topic that was being moved.", func(s *session.Counters) uint64 { return s.ParkedTotal.Load() })
	c.counter("pointsman_fence_dropped_sends_total", "SENDs dropped because their topic was fenced, or prepared while this proxy had no contact with the store, or because that lasted longer than store.max_map_age: clients send them again.", func(s *session.Counters) uint64 { return s.DroppedSends.Load() })
	c.counter("pointsman_fence_dropped_messages_total", "MESSAGEs dropped because their topic was fenced: they are delivered again.", func(s *session.Counters) uint64 { return s.DroppedMessages.Load() })
	c.gauge("pointsman_held_ack_bytes", "Memory of acknowledgements and permits that wait for the end of a fence.", func(s *session.Counters) int64 { return s.HeldBytes.Load() })
	c.counter("pointsman_held_acks_total", "Acknowledgements and permits that had to wait for the end of a fence.", func(s *session.Counters) uint64 { return s.HeldTotal.Load() })
	c.counter("pointsman_held_acks_lost_total", "Acknowledgements and permits dropped because too many waited for the end of a fence: the messages are delivered again.", func(s *session.Counters) uint64 { return s.HeldLost.Load() })
	c.counter("pointsman_rerouted_lookups_total", "Lookups that were asked again because their topic moved before the answer came.", func(s *session.Counters) uint64 { return s.Rerouted.Load() })
	c.gauge("pointsman_eviction_queue", "Producers and consumers whose topic moved and that wait for their turn.", func(s *session.Counters) int64 { return s.EvictQueue.Load() })

	c.family(prometheus.CounterValue, "pointsman_closed_connections_total", "Client connections closed, by who was the cause, why, and whether the client may simply come back.", []string{"side", "reason", "retry"}, func(emit func(float64, ...string)) {
		for _, cause := range session.Causes() {
			var sum uint64
			for _, sh := range c.app.shards {
				sum += sh.Counters().Closed[cause].Load()
			}
			emit(float64(sum), cause.Side().String(), cause.Code(), strconv.FormatBool(cause.RetrySafe()))
		}
	})
	c.family(prometheus.CounterValue, "pointsman_refused_requests_total", "Requests answered with an error of the proxy's own, by reason.", []string{"reason"}, func(emit func(float64, ...string)) {
		for _, reason := range session.Refusals() {
			var sum uint64
			for _, sh := range c.app.shards {
				sum += sh.Counters().Refused[reason].Load()
			}
			emit(float64(sum), reason.String())
		}
	})
	c.perCluster(prometheus.GaugeValue, "pointsman_cluster_bridged_connections", "Client connections that lead to the cluster.", func(s *session.ClusterCounters) float64 { return float64(s.Bridged.Load()) })
	c.perCluster(prometheus.GaugeValue, "pointsman_cluster_lookup_connections", "Shared connections to the cluster for lookups.", func(s *session.ClusterCounters) float64 { return float64(s.UpstreamConns.Load()) })
	c.perCluster(prometheus.CounterValue, "pointsman_cluster_lookups_total", "Requests that the cluster answered.", func(s *session.ClusterCounters) float64 { return float64(s.Lookups.Load()) })
	c.perCluster(prometheus.CounterValue, "pointsman_cluster_lookup_failures_total", "Requests that ended in an error.", func(s *session.ClusterCounters) float64 { return float64(s.LookupFailures.Load()) })
	c.perCluster(prometheus.CounterValue, "pointsman_cluster_dial_failures_total", "Connections to brokers of the cluster that failed before or in the handshake.", func(s *session.ClusterCounters) float64 { return float64(s.DialFailures.Load()) })
	c.family(prometheus.GaugeValue, "pointsman_cluster_up", "1 when lookups to the cluster answer, 0 when they do not, -1 when it is not known yet.", []string{"target_cluster"}, func(emit func(float64, ...string)) {
		set := c.app.clusters.set.Load()
		for _, name := range set.Names() {
			one, _ := set.Get(name)
			value := map[cluster.State]float64{cluster.Up: 1, cluster.Down: 0, cluster.Unknown: -1}[one.Health()]
			emit(value, name)
		}
	})
	c.family(prometheus.GaugeValue, "pointsman_cluster_brokers", "Brokers of the cluster that are known.", []string{"target_cluster"}, func(emit func(float64, ...string)) {
		set := c.app.clusters.set.Load()
		for _, name := range set.Names() {
			one, _ := set.Get(name)
			emit(float64(len(one.Brokers())), name)
		}
	})

	c.value("pointsman_map_entries", "Exact entries of the map that is served.", func() float64 { return float64(c.app.Table().Len()) })
	c.value("pointsman_map_rules", "Rules of the map that is served.", func() float64 { return float64(len(c.app.Table().Rules())) })
	c.value("pointsman_map_age_seconds", "Time since the map store last answered.", func() float64 { return c.app.MapAge().Seconds() })
	c.value("pointsman_map_too_old", "1 while no publishes are taken because the map is older than store.max_map_age.", func() float64 {
		if c.app.age.told.Load() {
			return 1
		}
		return 0
	})
	c.value("pointsman_map_bad_parts", "Parts of the stored map that cannot be used; their last good value is served.", func() float64 { return float64(c.app.maps.bad.Load()) })
	c.value("pointsman_map_store_connected", "1 while the map store can be reached.", func() float64 {
		if c.app.store.Status().Connected {
			return 1
		}
		return 0
	})
	if counted, ok := c.app.store.(interface{ Operations() map[string]uint64 }); ok {
		c.family(prometheus.CounterValue, "pointsman_map_store_operations_total", "Requests that this proxy has sent to the ZooKeeper of the map.", []string{"operation"}, func(emit func(float64, ...string)) {
			for name, n := range counted.Operations() {
				emit(float64(n), name)
			}
		})
	}
	c.value("pointsman_ready", "1 when /readyz says yes.", func() float64 {
		if ok, _ := c.app.Ready(); ok {
			return 1
		}
		return 0
	})
	c.value("pointsman_buffer_bytes", "Memory of all queues for peers that do not read; its limit is limits.buffer_memory.", func() float64 { return float64(c.app.engine.Stats().BufferMemory) })
	c.loops(prometheus.GaugeValue, "pointsman_loop_connections", "Connections of the event loop, both sides.", func(l netio.LoopStats) float64 { return float64(l.Conns) })
	c.loops(prometheus.GaugeValue, "pointsman_loop_utilisation", "Busy share of the event loop, 0 to 1.", func(l netio.LoopStats) float64 { return l.Utilisation })
	c.loops(prometheus.GaugeValue, "pointsman_loop_turn_max_seconds", "Longest time since the start for which the event loop did not come back for new events.", func(l netio.LoopStats) float64 { return l.LongestTurn.Seconds() })
	c.loops(prometheus.GaugeValue, "pointsman_loop_paused_connections", "Connections that are not read because their peer is full.", func(l netio.LoopStats) float64 { return float64(l.Paused) })
	c.loops(prometheus.CounterValue, "pointsman_loop_reads_total", "read system calls.", func(l netio.LoopStats) float64 { return float64(l.Reads) })
	c.loops(prometheus.CounterValue, "pointsman_loop_writes_total", "write system calls.", func(l netio.LoopStats) float64 { return float64(l.Writes) })
	c.loops(prometheus.CounterValue, "pointsman_loop_spliced_bytes_total", "Bytes that were moved inside the kernel.", func(l netio.LoopStats) float64 { return float64(l.SplicedBytes) })
	c.loops(prometheus.GaugeValue, "pointsman_loop_tls_handshakes_running", "TLS handshakes under way, with clients and brokers.", func(l netio.LoopStats) float64 { return float64(l.Handshaking) })
	c.loops(prometheus.CounterValue, "pointsman_loop_tls_handshakes_total", "TLS handshakes completed.", func(l netio.LoopStats) float64 { return float64(l.Handshakes) })
	c.loops(prometheus.CounterValue, "pointsman_loop_tls_handshake_failures_total", "TLS handshakes that failed; the log and pointsman_closed_connections_total say why.", func(l netio.LoopStats) float64 { return float64(l.HandshakeFailures) })
	c.loops(prometheus.CounterValue, "pointsman_loop_ports_used_up_total", "Dials that failed because no source port was free.", func(l netio.LoopStats) float64 { return float64(l.PortsUsedUp) })
}

func (c *collector) value(name, help string, read func() float64) {
	c.family(prometheus.GaugeValue, name, help, nil, func(emit func(float64, ...string)) { emit(read()) })
}

func (c *collector) perCluster(kind prometheus.ValueType, name, help string, read func(*session.ClusterCounters) float64) {
	c.family(kind, name, help, []string{"target_cluster"}, func(emit func(float64, ...string)) {
		for _, cluster := range c.app.info.Clusters {
			var sum float64
			for _, sh := range c.app.shards {
				sum += read(sh.Counters().Clusters[cluster])
			}
			emit(sum, cluster)
		}
	})
}

func (c *collector) loops(kind prometheus.ValueType, name, help string, read func(netio.LoopStats) float64) {
	c.family(kind, name, help, []string{"loop"}, func(emit func(float64, ...string)) {
		for i, l := range c.app.engine.Stats().Loops {
			emit(read(l), strconv.Itoa(i))
		}
	})
}
