// Package config is what an operator may set: one Config, read from a YAML file, then the environment, then flags. It is
// called by cmd/pointsman (serve, check-config) and handed to internal/app. It reports every fault at once, each with its
// key, its value and what to do. It must never dial, listen or resolve a name: checking a file is safe anywhere.
package config

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// Config is the whole configuration of one proxy. The field tags are the reference: "key" is the name in YAML and "doc"
// what docs/configuration.md says of it. Default holds the defaults.
type Config struct {
	Listeners        Listeners           `key:"listeners" doc:"Addresses that this proxy listens on."`
	TLS              TLS                 `key:"tls" doc:"What clients see on listeners.pulsar_tls."`
	AdvertisedURL    string              `key:"advertised_url" doc:"Address under which clients reach the proxies (normally the balancer's); shown to operators, never dialled: pulsar:// or pulsar+ssl://. Empty: this host's name and the port of listeners.pulsar, or of listeners.pulsar_tls without that."`
	AdvertisedOpsURL string              `key:"advertised_ops_url" doc:"Address under which the other proxies reach this one's operations port: a change that would move topics is refused unless every proxy can be asked. Empty: derived from listeners.ops."`
	ProxyID          string              `key:"proxy_id" doc:"Name of this proxy among the others; must be unique and stay the same over restarts. Empty: host name and port of listeners.pulsar (or pulsar_tls)."`
	Store            Store               `key:"store" doc:"Where the map topic → cluster lives."`
	StateDir         string              `key:"state_dir" doc:"Directory for the last good map, which is served after a restart while ZooKeeper is away (not needed for that with the file store), and for receipts/: the newest 1,000 switches that this proxy has driven."`
	DefaultCluster   string              `key:"default_cluster" doc:"Cluster of everything that no entry and no rule maps. Empty: such topics are refused."`
	TagKeyFile       string              `key:"tag_key_file" doc:"File with the key (at least 16 bytes) that signs the broker addresses told to clients; a second line holds the previous key during a rotation. Empty: the key is kept in the store. All proxies need the same one."`
	Clusters         map[string]*Cluster `key:"clusters" doc:"The Pulsar clusters behind this address, by name."`
	Health           Health              `key:"health" doc:"How it is found out whether a cluster is dead, and what is written down for that case."`
	Limits           Limits              `key:"limits" doc:"Bounds on connections, memory and waiting."`
	MessageIDs       string              `key:"message_ids" doc:"What clients see as message ids of a topic that was moved: monotonic (the epoch of the map in the upper bits, so that ids keep growing) or native (as the clusters have them: readers and consumers with cumulative acknowledgements may silently skip messages after a move). The same on all proxies; do not change it once topics have moved."`
	Eviction         Eviction            `key:"eviction" doc:"How the clients of a moved topic are sent to its new cluster."`
	Log              Log                 `key:"log" doc:"The log, on standard error."`
	Shutdown         Shutdown            `key:"shutdown" doc:"What happens on SIGTERM."`
	Loops            int                 `key:"loops" doc:"Most event loops to use; they are filled one after the other. 0: one per core."`

	origin map[string]string // key path → where its value came from; for faults only
}

// Listeners are "host:port" addresses; port 0 picks a free one.
type Listeners struct {
	Pulsar    string `key:"pulsar" doc:"Binary protocol without TLS (the official proxy's servicePort). Empty (written \"\"): none."`
	PulsarTLS string `key:"pulsar_tls" doc:"Binary protocol with TLS (the official proxy's servicePortTls), as in 0.0.0.0:6651; needs tls. Empty: none."`
	Ops       string `key:"ops" doc:"Operations port: control API, /metrics, /healthz, /readyz. It has no authentication: keep it on loopback or behind a network policy."`
}

// TLS is the certificate of the TLS listener.
type TLS struct {
	CertificateFile string `key:"certificate_file" doc:"Certificate chain (PEM), the server's own first (the official proxy's tlsCertificateFilePath). It must be for the name that clients connect to."`
	KeyFile         string `key:"key_file" doc:"Its private key (PEM, without a password; the official proxy's tlsKeyFilePath)."`
	MinVersion      string `key:"min_version" doc:"Oldest version of TLS that is spoken with clients: 1.2 or 1.3."`
}

// Store says where the map lives.
type Store struct {
	Type            string   `key:"type" doc:"file (one proxy) or zookeeper (any number)."`
	Path            string   `key:"path" doc:"file: directory of the map, created when missing; one process at a time."`
	Servers         string   `key:"servers" doc:"zookeeper: servers and chroot, as in zk1:2181,zk2:2181,zk3:2181/chroot."`
	SessionTimeout  Duration `key:"session_timeout" doc:"zookeeper: session time-out to ask for, from 10s to 5m. Two thirds of it is how long a proxy without contact still publishes to a topic whose switch has begun. Keep it within what the servers grant and at five of their ticks or more."`
	MaxMapAge       Duration `key:"max_map_age" doc:"zookeeper: a proxy without contact to the map store for longer takes no publishes of any topic, from 30s and three session_timeout upwards, until there is contact; and a switch waits for a proxy that cannot be reached no longer than this and a margin (61s and 2%). 0s: publishes go on without limit, and a proxy that cannot be reached blocks switches. Each proxy announces its own."`
	CredentialsFile string   `key:"credentials_file" doc:"zookeeper: file with one line scheme:credentials, as in digest:user:password."`
	ACL             string   `key:"acl" doc:"zookeeper: who may use the nodes that are created: world (everybody) or creator (only these credentials). Empty: creator with credentials_file, world without."`
}

// Cluster is one Pulsar cluster. Exactly one of MetadataStore and ServiceURL is set.
type Cluster struct {
	MetadataStore       string            `key:"metadata_store" doc:"That cluster's ZooKeeper, for broker discovery, as in zk:h1:2181,h2:2181/chroot (the official proxy's metadataStoreUrl). Either this or service_url."`
	ServiceURL          string            `key:"service_url" doc:"Brokers to ask, as in pulsar://h1:6650,h2:6650, or pulsar+ssl://h1:6651,h2:6651 for TLS (the official proxy's brokerServiceURL and brokerServiceURLTLS, but several). Either this or metadata_store."`
	TLS                 *ClusterTLS       `key:"tls" doc:"TLS to the brokers. With metadata_store its presence alone, even tls: {}, has the brokers' TLS addresses used; with service_url the scheme pulsar+ssl:// decides."`
	WebURL              string            `key:"web_url" doc:"Admin address of the cluster, as in http://h1:8080,h2:8080 (several are tried in turn), or https://h1:8443."`
	ControllerTokenFile string            `key:"controller_token_file" doc:"File with the token that planned switches, and readers that come back after one, have proxies authenticate with at this cluster; it must allow to administer the topics and to consume from them. Every proxy needs it, for the message ids of before a move; it is read anew for each connection. Empty: no authentication."`
	Allow               []string          `key:"allow" doc:"Broker addresses, besides the discovered ones, that clients may be connected to: host:port, with * in the host, and lo-hi or * as port."`
	AllowLinkLocal      bool              `key:"allow_link_local" doc:"Also dial link-local addresses (169.254.0.0/16, fe80::/10); cloud metadata services live there."`
	ListenerName        string            `key:"listener_name" doc:"Advertised listener that lookups ask for when the client names none."`
	Failover            *Failover         `key:"failover" doc:"Which cluster the topics of this one go to when it is dead: a failover is proposed then, or done."`
	Resolve             map[string]string `key:"resolve" doc:"Where to dial a broker's advertised host:port instead; tells brokers of the same name in two clusters apart."`
}

// ClusterTLS is how the brokers of a cluster are verified: always by chain and name.
type ClusterTLS struct {
	CAFile     string `key:"ca_file" doc:"Certificates (PEM) of the authorities that the brokers' certificates must come from (the official proxy's brokerClientTrustCertsFilePath). Empty: the system's."`
	ServerName string `key:"server_name" doc:"Name that every broker's certificate must be for. Empty: the host in the broker's own address, wherever resolve dials it."`
}

// Failover is what is done about a dead cluster. The leader's counts: it should be the same on all proxies.
type Failover struct {
	To        string   `key:"to" doc:"Cluster that the topics go to."`
	After     Duration `key:"after" doc:"How long a majority of the live proxies must have found the cluster down without a break. 0s stands for 5m."`
	Automatic bool     `key:"automatic" doc:"Do it without anybody, once within cooldown, if those who find the cluster down are a majority of all proxies, connected to the map store or not. Without it a failover is only proposed (pointsman switch list). What it does not promise: pointsman switch start --help."`
	Cooldown  Duration `key:"cooldown" doc:"After an automatic failover from or to either of the two clusters, how long no other one is done by itself. 0s stands for 24h."`
}

// The defaults of Failover.
const (
	DefaultFailoverAfter    = Duration(5 * time.Minute)
	DefaultFailoverCooldown = Duration(24 * time.Hour)
)

// Health is how clusters are looked at.
type Health struct {
	Interval       Duration `key:"interval" doc:"How often each proxy asks each cluster, by a lookup as a client makes it, of a topic of pulsar/system. What a broker answers counts, a refusal as well, but for ServiceNotReady; nothing else tells a cluster that lacks that namespace from one without its metadata store."`
	Timeout        Duration `key:"timeout" doc:"Time that the cluster has to answer."`
	Failures       int      `key:"failures" doc:"So many failures in a row, spread over at least over, make a cluster down for this proxy."`
	Over           Duration `key:"over" doc:"See failures."`
	Successes      int      `key:"successes" doc:"So many answers in a row make it up again."`
	SampleInterval Duration `key:"sample_interval" doc:"How often the leader writes down the replication backlog and the subscriptions of each cluster with a web_url, one call for each of its brokers, so that they are known when it is dead. 0s: never."`
}

// Limits bound what one proxy takes on. Nothing in Pointsman is unlimited.
type Limits struct {
	Connections          int      `key:"connections" doc:"Client connections at once (the official proxy's maxConcurrentInboundConnections); more are closed at once."`
	Frame                Size     `key:"frame" doc:"Largest frame accepted from either side; at least the clusters' maxMessageSize plus 10KiB. Frames are streamed, so this is no memory."`
	ControlFrame         Size     `key:"control_frame" doc:"Largest command of a broker that must be held in memory whole (topic lists are the largest); commands of clients are bounded by 1MiB."`
	BufferMemory         Size     `key:"buffer_memory" doc:"All bytes queued for peers that do not read, over all connections; when it is used up, sources are paused at once."`
	HighWatermark        Size     `key:"high_watermark" doc:"Queued bytes towards one peer above which its source is no longer read."`
	LowWatermark         Size     `key:"low_watermark" doc:"Queued bytes towards one peer below which its source is read again."`
	LookupsPerConnection int      `key:"lookups_per_connection" doc:"Lookups in flight per client connection; then the connection is not read until half of them are answered. A list of topics counts as half of the limit, a schema as a twentieth."`
	LookupsPerCluster    int      `key:"lookups_per_cluster" doc:"Lookups in flight per cluster and proxy, shared out evenly to the event loops (the official proxy's maxConcurrentLookupRequests, but it works); more get TooManyRequests."`
	ParkedRequests       int      `key:"parked_requests" doc:"Requests of clients (lookups, new producers and consumers, seeks) that may wait at once for a topic that is being moved, shared out evenly to the event loops; more get an error that clients retry."`
	ConnectTimeout       Duration `key:"connect_timeout" doc:"Time that a client has for its CONNECT."`
	HandshakeTimeout     Duration `key:"handshake_timeout" doc:"Time that a broker has for its CONNECTED."`
	DialTimeout          Duration `key:"dial_timeout" doc:"Time for a TCP connection to a broker, name resolution included (the official proxy's brokerProxyConnectTimeoutMs)."`
	TLSHandshakeTimeout  Duration `key:"tls_handshake_timeout" doc:"Time for a TLS handshake, with clients and with brokers."`
	LookupTimeout        Duration `key:"lookup_timeout" doc:"Time for one lookup, redirects included; below the 30 s after which clients give up."`
	KeepAliveInterval    Duration `key:"keep_alive_interval" doc:"Silence after which a peer is sent a PING; after as much again it is closed (the official proxy's keepAliveIntervalSeconds)."`
	WriteStallTimeout    Duration `key:"write_stall_timeout" doc:"Time after which a peer that takes no byte at all is closed."`
}

// Eviction paces what happens to clients when the map changes.
type Eviction struct {
	Rate        int      `key:"rate" doc:"Producers and consumers told per second, once burst is used up."`
	Burst       int      `key:"burst" doc:"Producers and consumers told at once, before pacing and jitter begin."`
	Jitter      Duration `key:"jitter" doc:"Random delay of each paced one, so that clients do not all look up at the same moment."`
	ReceiptWait Duration `key:"receipt_wait" doc:"How long a producer's outstanding receipts are waited for before it is closed."`
}

// The values of message_ids.
const (
	MonotonicIDs = "monotonic"
	NativeIDs    = "native"
)

// Log says what is logged and how.
type Log struct {
	Level  string `key:"level" doc:"debug, info, warn or error."`
	Format string `key:"format" doc:"text or json."`
}

// Shutdown says how the process ends.
type Shutdown struct {
	DrainDelay Duration `key:"drain_delay" doc:"How long /readyz says no before the listener closes, so that balancers notice."`
	Timeout    Duration `key:"timeout" doc:"After this long, what is still open is cut."`
}

// Default returns the configuration of an empty file. It is not valid by itself: it has no cluster.
func Default() *Config {
	return &Config{
		TLS:       TLS{MinVersion: "1.2"},
		Listeners: Listeners{Pulsar: "0.0.0.0:6650", Ops: "127.0.0.1:7780"},
		Store:     Store{Type: "file", Path: "/var/lib/pointsman", SessionTimeout: Duration(10 * time.Second)},
		Clusters:  map[string]*Cluster{},
		Limits: Limits{
			Connections:          50_000,
			Frame:                32 << 20,
			ControlFrame:         6 << 20,
			BufferMemory:         256 << 20,
			HighWatermark:        1 << 20,
			LowWatermark:         256 << 10,
			LookupsPerConnection: 1_000,
			LookupsPerCluster:    50_000,
			ParkedRequests:       20_000,
			ConnectTimeout:       Duration(10 * time.Second),
			HandshakeTimeout:     Duration(10 * time.Second),
			DialTimeout:          Duration(10 * time.Second),
			TLSHandshakeTimeout:  Duration(5 * time.Second),
			LookupTimeout:        Duration(20 * time.Second),
			KeepAliveInterval:    Duration(30 * time.Second),
			WriteStallTimeout:    Duration(5 * time.Minute),
		},
		Health: Health{
			Interval: Duration(5 * time.Second), Timeout: Duration(5 * time.Second), Failures: 5, Over: Duration(5 * time.Second), Successes: 3,
			SampleInterval: Duration(30 * time.Second),
		},
		MessageIDs: MonotonicIDs,
		Eviction:   Eviction{Rate: 2_000, Burst: 64, Jitter: Duration(50 * time.Millisecond), ReceiptWait: Duration(500 * time.Millisecond)},
		Log:        Log{Level: "info", Format: "text"},
		Shutdown:   Shutdown{DrainDelay: Duration(5 * time.Second), Timeout: Duration(30 * time.Second)},
	}
}

// WebURLs are the addresses that WebURL names, each with its scheme: http://h1:8080, http://h2:8080.
func (c *Cluster) WebURLs() []string {
	scheme, hosts, ok := strings.Cut(c.WebURL, "://")
	if !ok {
		return nil
	}
	var all []string
	for host := range strings.SplitSeq(strings.TrimRight(hosts, "/"), ",") {
		all = append(all, scheme+"://"+host)
	}
	return all
}

// PulsarURL is the address to announce for a listener, with TLS or not, that is bound to "host:port": the configured one, else bound with
// this host's name when it listens on every interface.
func (c *Config) PulsarURL(bound string, tls bool) string {
	if c.AdvertisedURL != "" {
		return c.AdvertisedURL
	}
	if tls {
		return "pulsar+ssl://" + reachable(bound)
	}
	return "pulsar://" + reachable(bound)
}

// OpsURL is PulsarURL for the operations port.
func (c *Config) OpsURL(bound string) string {
	if c.AdvertisedOpsURL != "" {
		return strings.TrimSuffix(c.AdvertisedOpsURL, "/")
	}
	return "http://" + reachable(bound)
}

// ID is the name of this proxy when its Pulsar listener is bound to "host:port".
func (c *Config) ID(bound string) string {
	if c.ProxyID != "" {
		return c.ProxyID
	}
	_, port, err := net.SplitHostPort(bound)
	if err != nil {
		return hostname()
	}
	return hostname() + "-" + port
}

// reachable replaces an unspecified host by this host's name.
func reachable(bound string) string {
	host, port, err := net.SplitHostPort(bound)
	if err != nil {
		return bound
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = hostname()
	}
	return net.JoinHostPort(host, port)
}

func hostname() string {
	if name, err := os.Hostname(); err == nil && name != "" {
		return name
	}
	return "localhost"
}

// Duration is a time.Duration that is written with its unit: 500ms, 10s, 5m.
type Duration time.Duration

// Std returns d as the standard library's type.
func (d Duration) Std() time.Duration { return time.Duration(d) }

func (d Duration) String() string {
	s := time.Duration(d).String() // 5m0s, 1h0m0s
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Size is a number of bytes that is written with its unit: 512B, 64KiB, 1MiB, 2GiB (or KB, MB, GB for powers of ten).
type Size int64

// Bytes returns s as a plain number.
func (s Size) Bytes() int { return int(s) }

func (s Size) String() string {
	n := int64(s)
	for _, u := range [...]sizeUnit{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10) + "B"
}

type sizeUnit struct {
	name  string
	bytes int64
}

// parseSize reads what Size.String writes, and decimal units.
func parseSize(text string) (Size, error) {
	units := [...]sizeUnit{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}}
	for _, u := range units {
		digits, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a whole number", digits)
		}
		if n < 0 || n > maxSize/u.bytes {
			return 0, fmt.Errorf("out of range")
		}
		return Size(n * u.bytes), nil
	}
	return 0, fmt.Errorf("no unit")
}

// maxSize bounds every size (1 TiB), so that sums of sizes cannot overflow.
const maxSize = 1 << 40
