// Package cluster is what the proxy knows about the Pulsar clusters behind it, as immutable values: their brokers, how these are
// dialled, their health and what they can do; and the two questions that decide where a connection may go: how is a
// broker's address shown to clients (Tag), and which broker does a client mean by the address it names (Resolve).
//
// internal/app builds a Set from the configuration, replaces it as discovery and health report, and publishes each through one
// atomic pointer; core/session asks it. The package must never dial, resolve a name, read a clock or a file; and it must never
// let a client's word alone make an address diallable.
package cluster

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Config is the configured part of one cluster.
type Config struct {
	// Name is 1 to 63 letters, digits or - = : . _ and is shown in logs, metrics and tagged addresses.
	Name string
	// ServiceURLs are static addresses: "pulsar://h1:6650,h2:6650", one or more. May be empty when brokers are discovered. All have
	// the same scheme; with pulsar+ssl:// brokers are spoken to by TLS.
	ServiceURLs []string
	// TLS says so for discovered brokers.
	TLS bool
	// ServerName is what the certificate of every broker must be for; "" is the host of its logical address.
	ServerName string
	WebURL     string
	// ListenerName is asked for in lookups; "" for none.
	ListenerName string
	// Allow lists brokers that clients may name although discovery does not know them: "host-glob:port" or "host-glob:low-high"
	// ("*" matches any run of characters).
	Allow []string
	// Resolve says where a broker is really dialled: "broker-0:6650" → "10.1.2.3:6650".
	Resolve map[string]string
	// AllowLinkLocal permits link-local addresses (never the metadata services, see DenyAddr).
	AllowLinkLocal bool
}

// Broker is one broker that discovery found.
type Broker struct {
	// Addr is its logical "host:port": that of pulsarServiceUrl, or of pulsarServiceUrlTls for a cluster with TLS.
	Addr string
	// Aliases are those of its advertised listeners.
	Aliases []string
}

// Features are the feature flags that a peer told: bit n stands for field n of the protocol's FeatureFlags.
type Features uint32

// The features of the protocol.
const (
	FeatureAuthRefresh Features = 1 << (1 + iota)
	FeatureBrokerEntryMetadata
	FeaturePartialProducer
	FeatureTopicWatchers
	FeatureGetPartitionedMetadataWithoutAutoCreation
	FeatureReplDedupByLidAndEid
	FeatureTopicWatcherReconcile
	FeatureScalableTopics
)

// Capabilities is what the brokers of a cluster told in CONNECTED. The zero value means unknown.
type Capabilities struct {
	ProtocolVersion uint32
	Features        Features
}

// Known tells whether any broker told something.
func (c Capabilities) Known() bool { return c.ProtocolVersion != 0 }

// Cluster is one cluster of a Set. It is immutable; slices and maps it hands out must not be changed.
type Cluster struct {
	config       Config
	tls          bool
	static       []string          // from ServiceURLs
	allow        []allowed         // from Config.Allow
	resolve      map[string]string // by brokerKey
	discovered   []string          // Broker.Addr, in the order of discovery
	known        map[string]string // brokerKey → address: static, discovered and aliases
	tags         map[string]string // address → tagged address, of the known ones
	health       State
	capabilities Capabilities
}

// Set is a snapshot of all configured clusters. It is immutable; the With methods give a new one.
type Set struct {
	clusters []*Cluster // sorted by name
	byName   map[string]*Cluster
	keys     TagKeys
	// digests finds the broker of a tagged address in hash form.
	digests map[string]hashedBroker
}

// NewSet checks the configurations and builds the snapshot in which nothing is discovered yet. The error names every fault.
func NewSet(configs []Config, keys TagKeys) (*Set, error) {
	if len(keys.keys) == 0 {
		return nil, errors.New("there is no key for tagged broker addresses")
	}
	s := &Set{byName: map[string]*Cluster{}, keys: keys}
	var faults []error
	for _, config := range configs {
		c, err := newCluster(config)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		if s.byName[config.Name] != nil {
			faults = append(faults, fmt.Errorf("cluster %q is configured twice", config.Name))
			continue
		}
		s.byName[config.Name] = c
		s.clusters = append(s.clusters, c)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	slices.SortFunc(s.clusters, func(a, b *Cluster) int { return strings.Compare(a.config.Name, b.config.Name) })
	for _, c := range s.clusters {
		c.index(s.keys, nil)
	}
	s.indexDigests()
	return s, nil
}

func newCluster(config Config) (*Cluster, error) {
	c := &Cluster{config: config, tls: config.TLS, resolve: map[string]string{}}
	var faults []error
	fault := func(err error) { faults = append(faults, fmt.Errorf("cluster %q: %w", config.Name, err)) }
	if !validName(config.Name) {
		fault(errors.New("the name must be 1 to 63 letters, digits or - = : . _"))
	}
	for i, u := range config.ServiceURLs {
		addrs, tls, err := parseServiceURL(u)
		switch {
		case err != nil:
			fault(err)
		case i == 0 && !config.TLS:
			c.tls = tls
		case tls != c.tls:
			fault(fmt.Errorf("service URL %q: all brokers of a cluster must be spoken to in the same way, by TLS (pulsar+ssl://) or without", u))
		}
		c.static = append(c.static, addrs...)
	}
	for _, pattern := range config.Allow {
		a, err := parseAllowed(pattern)
		if err != nil {
			fault(err)
		}
		c.allow = append(c.allow, a)
	}
	for from, to := range config.Resolve {
		for _, addr := range []string{from, to} {
			if _, _, err := splitAddr(addr); err != nil {
				fault(fmt.Errorf("resolve %q to %q: address %q: %w", from, to, addr, err))
			}
		}
		c.resolve[brokerKey(from)] = to
	}
	c.config.ServiceURLs = slices.Clone(config.ServiceURLs)
	c.config.Allow = slices.Clone(config.Allow)
	c.config.Resolve = maps.Clone(config.Resolve)
	return c, errors.Join(faults...)
}

// index fills in what follows from static, discovered, the aliases, and the names that resolve tells how to dial: whoever
// writes those down knows that the cluster's brokers call themselves so.
func (c *Cluster) index(keys TagKeys, aliases []string) {
	c.known, c.tags = map[string]string{}, map[string]string{}
	for _, list := range [][]string{slices.Collect(maps.Keys(c.config.Resolve)), c.static, c.discovered, aliases} {
		for _, addr := range list {
			c.known[brokerKey(addr)] = addr
			c.tags[addr] = keys.tag(keys.keys[0], c.config.Name, addr)
		}
	}
}

// WithBrokers returns the set in which discovery knows exactly these brokers of a cluster. Brokers without a usable address
// are left out and named by the error; the returned set is good all the same. An unknown cluster changes nothing.
func (s *Set) WithBrokers(name string, brokers []Broker) (*Set, error) {
	var faults []error
	next := s.with(name, func(c *Cluster) {
		c.discovered = nil
		var aliases []string
		for _, b := range brokers {
			if _, _, err := splitAddr(b.Addr); err != nil {
				faults = append(faults, fmt.Errorf("cluster %q: discovered broker %q: %w", name, clip(b.Addr), err))
			} else {
				c.discovered = append(c.discovered, b.Addr)
			}
			for _, alias := range b.Aliases {
				if _, _, err := splitAddr(alias); err != nil {
					faults = append(faults, fmt.Errorf("cluster %q: advertised listener %q of broker %q: %w", name, clip(alias), clip(b.Addr), err))
				} else {
					aliases = append(aliases, alias)
				}
			}
		}
		c.index(s.keys, aliases)
	})
	if next != s {
		next.indexDigests()
	}
	return next, errors.Join(faults...)
}

// WithHealth returns the set in which the health of a cluster is h. An unknown cluster changes nothing.
func (s *Set) WithHealth(name string, h State) *Set {
	return s.with(name, func(c *Cluster) { c.health = h })
}

// WithCapabilities returns the set in which the brokers of a cluster told these. An unknown cluster changes nothing.
func (s *Set) WithCapabilities(name string, capabilities Capabilities) *Set {
	return s.with(name, func(c *Cluster) { c.capabilities = capabilities })
}

func (s *Set) with(name string, change func(*Cluster)) *Set {
	old := s.byName[name]
	if old == nil {
		return s
	}
	c := *old
	change(&c)
	next := *s
	next.clusters = slices.Clone(s.clusters)
	next.clusters[slices.Index(next.clusters, old)] = &c
	next.byName = maps.Clone(s.byName)
	next.byName[name] = &c
	return &next
}

// Get returns a cluster by name.
func (s *Set) Get(name string) (*Cluster, bool) {
	c, ok := s.byName[name]
	return c, ok
}

// Names are the names of all clusters, sorted; the slice is the caller's.
func (s *Set) Names() []string {
	names := make([]string, len(s.clusters))
	for i, c := range s.clusters {
		names[i] = c.config.Name
	}
	return names
}

// Capabilities is what all clusters that told something have in common: what may be promised to a client that has not
// chosen a broker yet. It is the zero value as long as none did.
func (s *Set) Capabilities() Capabilities {
	var common Capabilities
	for _, c := range s.clusters {
		switch told := c.capabilities; {
		case !told.Known():
		case !common.Known():
			common = told
		default:
			common.ProtocolVersion = min(common.ProtocolVersion, told.ProtocolVersion)
			common.Features &= told.Features
		}
	}
	return common
}

// Name is the configured name.
func (c *Cluster) Name() string { return c.config.Name }

// WebURL is the configured web URL, "" for none.
func (c *Cluster) WebURL() string { return c.config.WebURL }

// ListenerName is what lookups ask for, "" for none.
func (c *Cluster) ListenerName() string { return c.config.ListenerName }

// Health is what real lookups say.
func (c *Cluster) Health() State { return c.health }

// Capabilities is what the brokers told.
func (c *Cluster) Capabilities() Capabilities { return c.capabilities }

// Brokers are the logical addresses to begin a lookup with: the discovered brokers, else the static service URLs. Empty means
// that nothing is known yet.
func (c *Cluster) Brokers() []string {
	if len(c.discovered) > 0 {
		return c.discovered
	}
	return c.static
}

// Knows tells whether the cluster vouches for a broker's logical address: by discovery, static service URL or allow-list.
// Case and a trailing dot of the host make no difference.
func (c *Cluster) Knows(broker string) bool {
	if _, ok := c.known[brokerKey(broker)]; ok {
		return true
	}
	host, port, err := splitAddr(broker)
	if err != nil {
		return false
	}
	host = hostKey(host)
	return slices.ContainsFunc(c.allow, func(a allowed) bool { return a.match(host, port) })
}

// DialAddr is the "host:port" to dial for a broker's logical address.
func (c *Cluster) DialAddr(broker string) string {
	if addr, ok := c.resolve[brokerKey(broker)]; ok {
		return addr
	}
	return broker
}

// TLS tells whether the brokers are spoken to by TLS, all of them.
func (c *Cluster) TLS() bool { return c.tls }

// ServerName is what the certificate of a broker must be for: a host name or an IP address.
func (c *Cluster) ServerName(broker string) string {
	if c.config.ServerName != "" {
		return c.config.ServerName
	}
	host, _, err := splitAddr(broker)
	if err != nil {
		return broker
	}
	return hostKey(host)
}

// OwnURL chooses, of the two URLs that a broker of this cluster names for itself or another one, the one that it is to be dialled by.
// missing is the field that should hold it, where it does not.
func (c *Cluster) OwnURL(plain, tls string) (brokerURL, missing string) {
	switch {
	case c.tls && tls == "":
		return "", "brokerServiceUrlTls"
	case c.tls:
		return tls, ""
	case plain == "":
		return "", "brokerServiceUrl"
	}
	return plain, ""
}

// Denies tells whether a resolved address must not be dialled for this cluster.
func (c *Cluster) Denies(addr netip.Addr) bool {
	return DenyAddr(addr) && !(c.config.AllowLinkLocal && onlyLinkLocal(addr))
}

func validName(s string) bool {
	for _, b := range []byte(s) {
		switch {
		case b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', b >= '0' && b <= '9', strings.IndexByte("-=:._", b) >= 0:
		default:
			return false
		}
	}
	return s != "" && len(s) <= 63
}
