package pulsaradmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"pointsman/core/route"
)

// replicatorCursor is what the cursor of the replicator to a cluster is called.
const replicatorCursor = "pulsar.repl."

// Stats are the statistics of one topic, as far as a switch needs them.
type Stats struct {
	Publishers    []Publisher                  `json:"publishers"` // without replicators
	Subscriptions map[string]SubscriptionStats `json:"subscriptions"`
	Replication   map[string]ReplicationStats  `json:"replication"` // by remote cluster
	Deduplication string                       `json:"deduplicationStatus"`
	// Transactions since the topic was loaded.
	OngoingTxn   int64   `json:"ongoingTxnCount"`
	AbortedTxn   int64   `json:"abortedTxnCount"`
	CommittedTxn int64   `json:"committedTxnCount"`
	BytesIn      float64 `json:"msgThroughputIn"` // per second
	BytesOut     float64 `json:"msgThroughputOut"`
	StorageSize  int64   `json:"storageSize"`
	OwnerBroker  string  `json:"ownerBroker"`
	Compaction   struct {
		LastSucceeded int64 `json:"lastCompactionSucceedTimestamp"` // ms
	} `json:"compaction"`
}

// Publisher is one producer.
type Publisher struct {
	Name           string  `json:"producerName"`
	ID             int64   `json:"producerId"`
	Address        string  `json:"address"`
	ClientVersion  string  `json:"clientVersion"`
	ConnectedSince string  `json:"connectedSince"`
	AccessMode     string  `json:"accessMode"` // Shared, Exclusive, WaitForExclusive, ExclusiveWithFencing
	MsgRate        float64 `json:"msgRateIn"`
	BytesRate      float64 `json:"msgThroughputIn"`
	SupportsPartly bool    `json:"supportsPartialProducer"`
}

func (p Publisher) String() string {
	return fmt.Sprintf("producer %q from %s (%s)", p.Name, strings.TrimPrefix(p.Address, "/"), p.ClientVersion)
}

// Consumer is one consumer of a subscription.
type Consumer struct {
	Name           string `json:"consumerName"`
	Address        string `json:"address"`
	ClientVersion  string `json:"clientVersion"`
	ConnectedSince string `json:"connectedSince"`
	Unacked        int64  `json:"unackedMessages"`
	Permits        int64  `json:"availablePermits"`
}

func (c Consumer) String() string {
	return fmt.Sprintf("consumer %q from %s (%s)", c.Name, strings.TrimPrefix(c.Address, "/"), c.ClientVersion)
}

// SubscriptionStats is one subscription.
type SubscriptionStats struct {
	Type       string            `json:"type"` // Exclusive, Shared, Failover, Key_Shared; None when nobody has been connected since the topic was loaded
	Durable    bool              `json:"isDurable"`
	Replicated bool              `json:"isReplicated"`
	Backlog    int64             `json:"msgBacklog"`      // entries that are not acknowledged, markers included
	Unacked    int64             `json:"unackedMessages"` // delivered and not acknowledged
	Delayed    int64             `json:"msgDelayed"`
	Consumers  []Consumer        `json:"consumers"`
	Properties map[string]string `json:"subscriptionProperties"`
	KeyShared  string            `json:"keySharedMode"` // AUTO_SPLIT or STICKY
	Expired    int64             `json:"totalMsgExpired"`
}

// ReplicationStats is one replicator as the sending broker counts it.
type ReplicationStats struct {
	Backlog   int64   `json:"replicationBacklog"` // entries
	Connected bool    `json:"connected"`          // false is nothing bad at backlog 0: brokers disconnect idle replicators
	Delay     int64   `json:"replicationDelayInSeconds"`
	RateOut   float64 `json:"msgRateOut"`
}

// Internal is what the broker's storage knows of one topic.
type Internal struct {
	Log
	Cursors   map[string]Cursor
	Compacted bool // a compacted form exists
}

// Cursor is one subscription, or one replicator, as the storage keeps it.
type Cursor struct {
	MarkDelete Position `json:"markDeletePosition"` // everything up to it is acknowledged
	Read       Position `json:"readPosition"`
	Active     bool     `json:"active"`
	Acked      []Range  `json:"-"` // behind MarkDelete, acknowledged one by one
}

// names are the parts of a topic's name.
type names struct{ tenant, namespace, local string }

// split takes apart a full topic name.
func split(topic string) (names, error) {
	t, err := route.ParseTopic(topic)
	if err != nil {
		return names{}, err
	}
	domain, rest, _ := strings.Cut(t.Full(), "://")
	parts := strings.SplitN(rest, "/", 3)
	if domain != "persistent" || len(parts) != 3 || strings.Count(t.Namespace(), "/") != 1 {
		return names{}, fmt.Errorf("topic %s is none of the form persistent://tenant/namespace/name: nothing of it is stored, or only the old admin API knows it, so that a planned switch cannot be done; use --mode immediate", topic)
	}
	return names{parts[0], parts[1], parts[2]}, nil
}

// path is the admin path of a topic and what follows it.
func path(topic string, parts ...string) (string, error) {
	n, err := split(topic)
	if err != nil {
		return "", err
	}
	return "/admin/v2/persistent/" + n.tenant + "/" + n.namespace + "/" + url.QueryEscape(n.local) + escaped(parts), nil
}

// subscriptionPath is that of a subscription. Brokers decode its name twice.
func subscriptionPath(topic, subscription string, parts ...string) (string, error) {
	return path(topic, append([]string{"subscription", url.QueryEscape(subscription)}, parts...)...)
}

func escaped(parts []string) string {
	var b strings.Builder
	for _, part := range parts {
		b.WriteString("/" + url.PathEscape(part))
	}
	return b.String()
}

// get reads an answer in JSON about a topic.
func (c *Client) get(ctx context.Context, into any, topic string, parts ...string) error {
	p, err := path(topic, parts...)
	if err != nil {
		return err
	}
	_, err = c.call(ctx, http.MethodGet, p, nil, into)
	return err
}

// Partitions is how many partitions a topic has; 0 for one without. The error matches ErrNotFound when there is no such topic.
func (c *Client) Partitions(ctx context.Context, base string) (int, error) {
	var answer struct {
		Partitions int `json:"partitions"`
	}
	err := c.get(ctx, &answer, base, "partitions")
	return answer.Partitions, err
}

// PartitionNames are the full names of the topics that store base: itself, or its partitions.
func PartitionNames(base string, partitions int) []string {
	if partitions == 0 {
		return []string{base}
	}
	all := make([]string, partitions)
	for i := range all {
		all[i] = base + "-partition-" + strconv.Itoa(i)
	}
	return all
}

// Stats reads the statistics of one partition, with exact backlogs.
func (c *Client) Stats(ctx context.Context, topic string) (Stats, error) {
	p, err := path(topic, "stats")
	if err != nil {
		return Stats{}, err
	}
	var s Stats
	_, err = c.call(ctx, http.MethodGet, p+"?getPreciseBacklog=true&subscriptionBacklogSize=false", nil, &s)
	return s, err
}

// Internal reads the ledgers and cursors of one partition.
func (c *Client) Internal(ctx context.Context, topic string) (Internal, error) {
	var answer struct {
		Last    Position `json:"lastConfirmedEntry"`
		Ledgers []struct {
			ID      int64 `json:"ledgerId"`
			Entries int64 `json:"entries"`
		} `json:"ledgers"`
		Cursors map[string]struct {
			Cursor
			Individually string `json:"individuallyDeletedMessages"`
		} `json:"cursors"`
		Compacted struct {
			ID int64 `json:"ledgerId"`
		} `json:"compactedLedger"`
	}
	answer.Last, answer.Compacted.ID = NoPosition, -1
	if err := c.get(ctx, &answer, topic, "internalStats"); err != nil {
		return Internal{}, err
	}
	if answer.Last == NoPosition {
		return Internal{}, &Error{Cluster: c.cfg.Cluster, Call: "GET internalStats of " + topic, Err: fmt.Errorf("the answer has no lastConfirmedEntry"),
			Remedy: fmt.Sprintf("is clusters.%s.web_url the admin address of a Pulsar cluster?", c.cfg.Cluster)}
	}
	in := Internal{Log: Log{Last: answer.Last}, Cursors: make(map[string]Cursor, len(answer.Cursors)), Compacted: answer.Compacted.ID >= 0}
	for _, l := range answer.Ledgers {
		if l.ID == in.Last.Ledger {
			l.Entries = in.Last.Entry + 1 // brokers count the ledger that they are writing only when it is full
		}
		if l.Entries > 0 {
			in.Ledgers = append(in.Ledgers, Ledger{l.ID, l.Entries})
		}
	}
	for name, cursor := range answer.Cursors {
		ranges, err := parseRanges(cursor.Individually)
		if err != nil {
			return Internal{}, fmt.Errorf("cluster %s: internalStats of %s: subscription %s: %w", c.cfg.Cluster, topic, name, err)
		}
		cursor.Acked = ranges
		if plain, err := url.QueryUnescape(name); err == nil { // a cursor's name is that of its subscription, encoded
			name = plain
		}
		in.Cursors[name] = cursor.Cursor
	}
	return in, nil
}

// Tail is the last confirmed position and the ledgers of one partition.
func (c *Client) Tail(ctx context.Context, topic string) (Log, error) {
	in, err := c.Internal(ctx, topic)
	return in.Log, err
}

// Replicator is how far one cluster has sent a partition to another.
type Replicator struct {
	Exists    bool     // there is a cursor for it
	Position  Position // everything up to it is stored on the other cluster
	Last      Position // the last confirmed position of the sender
	Backlog   int64    // entries
	Connected bool
	At        time.Time // of the reading
}

// Replicator reads how far the partition has been sent to cluster to.
func (c *Client) Replicator(ctx context.Context, topic, to string, now time.Time) (Replicator, error) {
	in, err := c.Internal(ctx, topic)
	if err != nil {
		return Replicator{}, err
	}
	cursor, ok := in.Cursors[replicatorCursor+to]
	if !ok {
		return Replicator{Position: NoPosition, Last: in.Last, At: now}, nil
	}
	r := Replicator{Exists: true, Position: cursor.MarkDelete, Last: in.Last, At: now, Backlog: in.Len() - in.Index(Position{cursor.MarkDelete.Ledger, cursor.MarkDelete.Entry + 1})}
	stats, err := c.Stats(ctx, topic)
	if err != nil {
		return Replicator{}, err
	}
	r.Connected = stats.Replication[to].Connected
	return r, nil
}

// Reached tells whether everything up to position p of the sender is stored on the other cluster.
func (r Replicator) Reached(p Position) bool { return r.Exists && !r.Position.Before(p) }

// Drained tells whether everything that the sender had at the reading is stored on the other cluster.
func (r Replicator) Drained() bool { return r.Reached(r.Last) }

// Alive judges two readings of one replicator, a while apart: being connected says nothing in either direction (SW-09, GR-01). why is set
// when it is not alive.
func Alive(before, after Replicator) (alive bool, why string) {
	switch {
	case !after.Exists:
		return false, "there is no replicator: add the cluster to the namespace's (or the topic's) replication clusters"
	case after.Drained(), before.Position.Before(after.Position):
		return true, ""
	}
	return false, fmt.Sprintf("%d entries wait to be replicated and none was sent in %v (it stands at %v, the last entry is %v)",
		after.Backlog, after.At.Sub(before.At).Round(time.Millisecond), after.Position, after.Last)
}

// Evict takes a partition off its broker (unload). The error of a broker that is just doing it for somebody else counts as success only
// when a later call does: it may be repeated.
func (c *Client) Evict(ctx context.Context, topic string) error {
	p, err := path(topic, "unload")
	if err != nil {
		return err
	}
	_, err = c.call(ctx, http.MethodPut, p, nil, nil)
	return err
}

// CreateMissing creates what of a topic does not exist yet: the partitions that nobody has used, or the topic itself when it has none. Both clusters need
// all of them before subscriptions can be carried. The list of partitions must be there.
func (c *Client) CreateMissing(ctx context.Context, base string, partitions int) error {
	method, parts := http.MethodPut, []string{}
	if partitions > 0 {
		method, parts = http.MethodPost, []string{"createMissedPartitions"}
	}
	p, err := path(base, parts...)
	if err != nil {
		return err
	}
	if _, err = c.call(ctx, method, p, struct{}{}, nil); errors.Is(err, ErrConflict) {
		return nil
	}
	return err
}

// Lookup names the broker that owns a partition: host:port of its binary protocol, of TLS when Config.BinaryTLS says so.
func (c *Client) Lookup(ctx context.Context, topic string) (string, error) {
	n, err := split(topic)
	if err != nil {
		return "", err
	}
	p := "/lookup/v2/topic/persistent/" + n.tenant + "/" + n.namespace + "/" + url.QueryEscape(n.local)
	if c.cfg.ListenerName != "" {
		p += "?listenerName=" + url.QueryEscape(c.cfg.ListenerName)
	}
	var answer struct {
		URL    string `json:"brokerUrl"`
		URLTLS string `json:"brokerUrlTls"`
	}
	if _, err := c.call(ctx, http.MethodGet, p, nil, &answer); err != nil {
		return "", err
	}
	scheme, owner := "pulsar://", answer.URL
	if c.cfg.BinaryTLS {
		scheme, owner = "pulsar+ssl://", answer.URLTLS
	}
	addr, ok := strings.CutPrefix(owner, scheme)
	if !ok || addr == "" {
		return "", &Error{Cluster: c.cfg.Cluster, Call: "GET " + p, Err: fmt.Errorf("the owner's address is %q and not %shost:port", owner, scheme),
			Remedy: fmt.Sprintf("does clusters.%s say rightly whether its brokers speak TLS?", c.cfg.Cluster)}
	}
	return addr, nil
}

// rawOrNil reads JSON and leaves nothing for null, {} and [].
func rawOrNil(text []byte) json.RawMessage {
	switch s := strings.TrimSpace(string(text)); s {
	case "", "null", "{}", "[]":
		return nil
	default:
		return json.RawMessage(s)
	}
}
