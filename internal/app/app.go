// Package app puts the parts of a proxy together: configuration → store, clusters, event loops, operations port → run →
// drain. cmd/pointsman and the demo call it. It holds no rule of the protocol and no rule of the map; what is decided here is only who
// knows whom, and in which order things start and stop.
package app

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/codec"
	"pointsman/core/cluster"
	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/netio"
	"pointsman/store"
	"pointsman/zk"
)

// Version is the version of this build; set by the linker.
var Version = "0.1.0-dev"

// App is one running proxy.
type App struct {
	cfg      *config.Config
	log      *slog.Logger
	store    store.Store
	clusters *clusterKeeper
	maps     *mapKeeper
	engine   *netio.Engine
	shards   []*session.Shard
	admin    *admin.Server
	opsLn    net.Listener
	info     store.Proxy // all but the digest

	draining atomic.Bool
}

// Run serves until ctx ends, then drains. It is New, Start and Wait in one.
func Run(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	a, err := New(ctx, cfg, log)
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// startTimeout bounds what has to be known before the listeners open: the shared tag key.
const startTimeout = 30 * time.Second

// New opens the store and the listeners. Nothing is served before Run.
func New(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *App, err error) {
	a := &App{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			a.release()
		}
	}()
	if a.store, err = openStore(ctx, cfg, log); err != nil {
		return nil, err
	}
	keys, err := a.tagKeys(ctx)
	if err != nil {
		return nil, err
	}
	set, sources, err := clusterSet(cfg, keys, log)
	if err != nil {
		return nil, err
	}
	a.clusters = newClusterKeeper(set, sources, log)

	var disk *diskCopy
	if cfg.StateDir != "" && cfg.Store.Type != "file" {
		if disk, err = newDiskCopy(cfg.StateDir); err != nil {
			return nil, err
		}
	}
	a.maps = newMapKeeper(a.store, log, disk)
	if err := a.maps.loadCopy(); err != nil {
		log.Error("no map from the disk", "err", err)
	}
	if err := a.openEngine(); err != nil {
		return nil, err
	}
	a.clusters.loops, a.maps.loops = a, a
	a.maps.self = a.Info

	if a.opsLn, err = net.Listen("tcp", cfg.Listeners.Ops); err != nil {
		return nil, fmt.Errorf("listeners.ops %s: %w", cfg.Listeners.Ops, err)
	}
	a.info = store.Proxy{
		ID: cfg.ID(a.PulsarAddr()), Incarnation: incarnation(), Version: Version,
		Advertised: cfg.PulsarURL(a.PulsarAddr()), Ops: cfg.OpsURL(a.opsLn.Addr().String()),
		Clusters: slices.Sorted(slices.Values(set.Names())), Started: time.Now().UTC(), Live: true,
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(newCollector(a))
	a.admin = admin.New(admin.Config{Store: a.store, Proxy: a, Metrics: registry, Logger: log})
	return a, nil
}

func openStore(ctx context.Context, cfg *config.Config, log *slog.Logger) (store.Store, error) {
	if cfg.Store.Type == "file" {
		return store.OpenFile(cfg.Store.Path)
	}
	c := zk.Config{Servers: cfg.Store.Servers, SessionTimeout: cfg.Store.SessionTimeout.Std(), Logger: log}
	if file := cfg.Store.CredentialsFile; file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("store.credentials_file: %w", err)
		}
		scheme, credentials, ok := strings.Cut(strings.TrimSpace(string(text)), ":")
		if !ok {
			return nil, fmt.Errorf("store.credentials_file %s: want one line scheme:credentials, as in digest:user:password", file)
		}
		c.Auth = &zk.Auth{Scheme: scheme, Credentials: credentials}
	}
	if cfg.Store.ACL == "world" {
		c.ACL = "world:anyone:cdrwa"
	}
	return zk.Open(ctx, c)
}

// tagKeys reads the keys for tagged broker addresses from tag_key_file, or the shared one from the store.
func (a *App) tagKeys(ctx context.Context) (cluster.TagKeys, error) {
	if file := a.cfg.TagKeyFile; file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return cluster.TagKeys{}, fmt.Errorf("tag_key_file: %w", err)
		}
		lines := strings.Fields(string(text))
		if len(lines) == 0 {
			return cluster.TagKeys{}, fmt.Errorf("tag_key_file %s: it is empty", file)
		}
		var previous [][]byte
		for _, line := range lines[1:] {
			previous = append(previous, []byte(line))
		}
		return cluster.NewTagKeys([]byte(lines[0]), previous...)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	key, err := a.keyFromStore(ctx)
	if err != nil {
		return cluster.TagKeys{}, fmt.Errorf("the key for broker addresses cannot be read from the store (or set tag_key_file, and proxies start without it): %w", err)
	}
	return cluster.NewTagKeys(key)
}

// keyCopyName is the file in state_dir that holds the store's key, for starts while the store is away.
const keyCopyName = "tag-key"

func (a *App) keyFromStore(ctx context.Context) ([]byte, error) {
	key, err := a.store.TagKey(ctx)
	if a.cfg.StateDir == "" || a.cfg.Store.Type == "file" {
		return key, err
	}
	file := a.cfg.StateDir + string(os.PathSeparator) + keyCopyName
	if err != nil {
		saved, readErr := os.ReadFile(file)
		if readErr != nil {
			return nil, errors.Join(err, readErr)
		}
		a.log.Warn("the store is away: the key for broker addresses comes from the disk", "file", file, "err", err)
		return saved, nil
	}
	if err := os.MkdirAll(a.cfg.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state_dir: %w", err)
	}
	return key, writeDurably(file, key) // mode 0600, as all temporary files
}

func clusterSet(cfg *config.Config, keys cluster.TagKeys, log *slog.Logger) (*cluster.Set, map[string]zk.DiscoveryConfig, error) {
	sources := make(map[string]zk.DiscoveryConfig)
	var configs []cluster.Config
	for name, c := range cfg.Clusters {
		one := cluster.Config{
			Name: name, WebURL: c.WebURL, ListenerName: c.ListenerName, Allow: c.Allow, Resolve: c.Resolve, AllowLinkLocal: c.AllowLinkLocal,
		}
		if c.ServiceURL != "" {
			one.ServiceURLs = []string{c.ServiceURL}
		}
		if c.MetadataStore != "" {
			sources[name] = zk.DiscoveryConfig{Servers: c.MetadataStore, Logger: log.With("cluster", name)}
		}
		configs = append(configs, one)
	}
	set, err := cluster.NewSet(configs, keys)
	return set, sources, err
}

func (a *App) openEngine() error {
	l := a.cfg.Limits
	e := a.cfg.Eviction
	sc := &session.Config{
		ServerVersion: "Pointsman-v" + Version, DefaultCluster: a.cfg.DefaultCluster, ClusterNames: a.clusters.set.Load().Names(),
		MaxFrame: l.Frame.Bytes(), MaxControl: l.ControlFrame.Bytes(),
		ConnectTimeout: l.ConnectTimeout.Std(), HandshakeTimeout: l.DialTimeout.Std() + l.HandshakeTimeout.Std(),
		LookupTimeout: l.LookupTimeout.Std(), KeepAlive: l.KeepAliveInterval.Std(),
		LookupsPerConnection: l.LookupsPerConnection, LookupsPerCluster: l.LookupsPerCluster, MaxHandles: maxHandles,
		ReceiptWait: e.ReceiptWait.Std(), EvictRate: e.Rate, EvictBurst: e.Burst, EvictJitter: e.Jitter.Std(),
		Table: a.maps.table.Load, Clusters: a.clusters.set.Load,
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return err
	}
	var err error
	a.engine, err = netio.New(netio.Config{
		Listeners: []netio.Listener{{Network: "tcp", Addr: a.cfg.Listeners.Pulsar}},
		Loops:     a.cfg.Loops,
		HighWater: l.HighWatermark.Bytes(), LowWater: l.LowWatermark.Bytes(), BufferMemory: int64(l.BufferMemory.Bytes()),
		MaxRest: l.ControlFrame.Bytes() + 1<<20, DialTimeout: l.DialTimeout.Std(), WriteStall: l.WriteStallTimeout.Std(), MaxConns: l.Connections,
		NewShard: func(loop int) netio.Shard {
			sh := session.NewShard(sc, loop, uint64(seed[0])|uint64(seed[1])<<8|uint64(seed[2])<<16|uint64(seed[3])<<24)
			a.shards = append(a.shards, sh)
			return sh
		},
		Report: newReporter(a.log).report,
		Fault:  func(err error) { a.log.Error("event loop", "err", err) },
	})
	if err != nil {
		return fmt.Errorf("listeners.pulsar %s: %w", a.cfg.Listeners.Pulsar, err)
	}
	return nil
}

// maxHandles bounds the producers and consumers of one client connection.
const maxHandles = 100_000

// incarnation tells this start of the process from every other one.
func incarnation() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// PulsarAddr is the address that the binary listener is bound to.
func (a *App) PulsarAddr() string { return a.engine.Addrs()[0].String() }

// OpsURL is the address of the operations port.
func (a *App) OpsURL() string { return "http://" + a.opsLn.Addr().String() }

// Loops is the number of event loops.
func (a *App) Loops() int { return a.engine.Loops() }

// Post runs fn on an event loop; false when that has ended.
func (a *App) Post(loop int, fn func(now time.Time, sh *session.Shard)) bool {
	return a.engine.Post(loop, func(now time.Time, s netio.Shard) { fn(now, s.(*session.Shard)) })
}

// Run serves until ctx ends, then drains.
func (a *App) Run(ctx context.Context) error {
	defer a.release()
	life, stop := context.WithCancel(context.WithoutCancel(ctx)) // the parts outlive ctx, for the draining
	defer stop()
	fatal := make(chan error, 4)
	var parts sync.WaitGroup
	part := func(name string, f func() error) {
		parts.Go(func() {
			if err := f(); err != nil {
				fatal <- fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	part("operations port", func() error { return a.admin.Serve(a.opsLn) })
	part("map", func() error { return a.maps.run(life) })
	if err := a.engine.Start(); err != nil {
		return err
	}
	part("clusters", func() error { a.clusters.run(life); return nil })
	part("registration", func() error { a.keepRegistered(life); return nil })
	a.log.Info("pointsman is serving", "version", Version, "pulsar", a.PulsarAddr(), "ops", a.OpsURL(), "id", a.info.ID, "clusters", strings.Join(a.info.Clusters, ","))

	var err error
	select {
	case <-ctx.Done():
	case err = <-fatal:
		a.log.Error("a part has failed, the proxy ends", "err", err)
	}
	a.drain(life)
	stop()
	parts.Wait()
	return err
}

// keepRegistered announces this proxy, and again whenever it serves another map.
func (a *App) keepRegistered(ctx context.Context) {
	const settle = 200 * time.Millisecond // several changes in a row are announced once
	for {
		err := a.store.Register(ctx, a.Info())
		wait := a.maps.changed
		if err != nil && ctx.Err() == nil {
			a.log.Warn("this proxy could not be announced in the store", "err", err)
			wait = nil
		}
		var again <-chan time.Time
		if wait == nil {
			again = time.After(time.Second)
		}
		select {
		case <-wait:
		case <-again:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(settle):
		case <-ctx.Done():
			return
		}
	}
}

// drain ends the service: not ready first, so that balancers send new clients elsewhere; then no new connections; then
// the open ones are closed, broker legs before clients, at a pace.
func (a *App) drain(ctx context.Context) {
	s := a.cfg.Shutdown
	a.draining.Store(true)
	a.log.Info("draining", "delay", s.DrainDelay.String(), "timeout", s.Timeout.String())
	open := func() (n int64) {
		for _, sh := range a.shards {
			n += sh.Counters().Active.Load()
		}
		return n
	}
	waitUntil(time.Now().Add(s.DrainDelay.Std()), func() bool { return open() == 0 })
	a.engine.StopAccepting()
	const drainPart = 2 // half of the timeout is for closing at a pace, half for what is queued
	perSecond := int(float64(open())/(s.Timeout.Std().Seconds()/drainPart)) + 100
	for i := range a.Loops() {
		a.Post(i, func(now time.Time, sh *session.Shard) { sh.Drain(now, perSecond) })
	}
	deadline := time.Now().Add(s.Timeout.Std())
	waitUntil(deadline, func() bool { return open() == 0 })
	until, cancel := context.WithDeadline(ctx, deadline.Add(time.Second))
	defer cancel()
	if err := a.engine.Shutdown(until); err != nil {
		a.log.Warn("event loops did not end in time", "err", err)
	}
	if err := a.store.Unregister(until); err != nil {
		a.log.Warn("this proxy could not be taken off the roster", "err", err)
	}
	if err := a.admin.Shutdown(until); err != nil {
		a.log.Warn("operations port did not end in time", "err", err)
	}
	a.log.Info("stopped")
}

// waitUntil polls; it serves a process that is about to end.
func waitUntil(deadline time.Time, done func() bool) {
	for !done() && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
}

// release closes what New opened.
func (a *App) release() {
	if a.opsLn != nil {
		_ = a.opsLn.Close()
	}
	if a.engine != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = a.engine.Shutdown(ctx)
	}
	if a.store != nil {
		_ = a.store.Close()
	}
}

var _ admin.Proxy = (*App)(nil)

// Table is the map that is served now.
func (a *App) Table() *route.Table { return a.maps.table.Load() }

// DefaultCluster decides when the map does not.
func (a *App) DefaultCluster() string { return a.cfg.DefaultCluster }

// MapAge is how long ago the store last answered.
func (a *App) MapAge() time.Duration {
	contact := a.store.Status().Contact
	if contact.IsZero() {
		contact = a.info.Started
	}
	return time.Since(contact)
}

// Info is what this proxy announces of itself.
func (a *App) Info() store.Proxy {
	p, t := a.info, a.Table()
	p.Digest, p.Entries = t.Digest(), t.Len()
	return p
}

// Ready tells whether new clients should come here, and why not.
func (a *App) Ready() (ok bool, reasons []string) {
	if a.draining.Load() {
		reasons = append(reasons, "draining")
	}
	if !a.maps.served.Load() {
		reasons = append(reasons, "the map was never loaded: "+a.store.Status().Detail)
	}
	select {
	case <-a.clusters.probed:
	default:
		reasons = append(reasons, "the clusters were not asked yet")
	}
	return len(reasons) == 0, reasons
}

// Lookup asks a cluster which broker owns a topic.
func (a *App) Lookup(ctx context.Context, name, topic string) (admin.LookupAnswer, error) {
	answer, err := a.ask(ctx, session.RequestLookup, name, topic)
	if err != nil {
		return admin.LookupAnswer{}, err
	}
	return admin.LookupAnswer{Broker: answer.Broker, Tagged: answer.Tagged}, nil
}

// Partitions asks a cluster for the number of partitions of a topic; 0 when it has none, or does not exist.
func (a *App) Partitions(ctx context.Context, name, base string) (int, error) {
	answer, err := a.ask(ctx, session.RequestPartitions, name, base)
	if answer.FromBroker() && answer.Code == codec.ErrorTopicNotFound {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return int(answer.Command.GetPartitionMetadataResponse().GetPartitions()), nil
}

func (a *App) ask(ctx context.Context, kind session.RequestKind, name, topic string) (session.Answer, error) {
	answer, err := askCluster(ctx, a, kind, name, topic, a.cfg.Limits.LookupTimeout.Std())
	switch {
	case err != nil:
		return answer, err
	case answer.Failed() && answer.FromBroker() && namespaceMissing(answer.Text):
		return answer, fmt.Errorf("%w: cluster %s: %s", admin.ErrNamespaceNotFound, name, answer.Text)
	case answer.Failed():
		return answer, fmt.Errorf("cluster %s: %s", name, answer.Text)
	}
	return answer, nil
}

// namespaceMissing: the protocol has no code for it, so the broker's words have to do.
func namespaceMissing(text string) bool {
	text = strings.ToLower(text)
	return strings.Contains(text, "namespace") && (strings.Contains(text, "not found") || strings.Contains(text, "does not exist"))
}

// Handles counts the open producers and consumers of a base name or a scope; "" is everything.
func (a *App) Handles(ctx context.Context, name string) (admin.Handles, error) {
	match := func(string) bool { return true }
	switch {
	case strings.Contains(name, "://"):
		match = func(base string) bool { return base == name }
	case name != "":
		match = func(base string) bool {
			topic, err := route.ParseTopic(base)
			return err == nil && topic.In(name)
		}
	}
	found := make(chan map[string]session.HandleCount, a.Loops())
	asked := 0
	for i := range a.Loops() {
		if a.Post(i, func(_ time.Time, sh *session.Shard) { found <- sh.Handles(match) }) {
			asked++
		}
	}
	all := admin.Handles{Topics: make(map[string]admin.HandleCount)}
	for range asked {
		select {
		case topics := <-found:
			for base, n := range topics {
				sum := all.Topics[base]
				sum.Producers += n.Producers
				sum.Consumers += n.Consumers
				all.Topics[base] = sum
				all.Producers += n.Producers
				all.Consumers += n.Consumers
			}
		case <-ctx.Done():
			return all, ctx.Err()
		}
	}
	return all, nil
}

// Clusters are all configured clusters.
func (a *App) Clusters() []admin.ClusterStatus {
	set := a.clusters.set.Load()
	var all []admin.ClusterStatus
	for _, name := range slices.Sorted(slices.Values(set.Names())) {
		c, _ := set.Get(name)
		discovery := "service_url"
		if _, ok := a.clusters.sources[name]; ok {
			discovery = "metadata_store"
		}
		all = append(all, admin.ClusterStatus{
			Name: name, Health: c.Health().String(), Detail: a.clusters.detailOf(name), Discovery: discovery, Brokers: c.Brokers(), WebURL: c.WebURL(),
		})
	}
	return all
}
