// Package app puts the parts of a proxy together: configuration → store, clusters, event loops, operations port → run →
// drain. cmd/pointsman and the demo call it. It holds no rule of the protocol and no rule of the map; what is decided here is only who
// knows whom, and in which order things start and stop.
package app

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/cluster"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/internal/controller"
	"pointsman/internal/pulsaradmin"
	"pointsman/netio"
	"pointsman/store"
	"pointsman/zk"
)

// Version is the version of this build; set by the linker.
var Version = "0.1.0-dev"

// App is one running proxy.
type App struct {
	cfg       *config.Config
	log       *slog.Logger
	store     store.Store
	clusters  *clusterKeeper
	maps      *mapKeeper
	old       *oldIDs
	age       *mapAge
	engine    *netio.Engine
	shards    []*session.Shard
	admin     *admin.Server
	control   *controller.Controller
	failovers *controller.Failovers
	clients   map[string]*pulsaradmin.Client // of the clusters with an admin address
	opsLn     net.Listener
	info      store.Proxy // all but the digest
	stateLock *os.File    // of state_dir, held while this process lives; nil without one

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

// The shared tag key has to be known before the listeners open.
const (
	startTimeout         = 10 * time.Second
	startTimeoutWithCopy = 3 * time.Second // when the last one is on the disk
)

// New opens the store and the listeners. Nothing is served before Run.
func New(ctx context.Context, cfg *config.Config, log *slog.Logger) (*App, error) {
	st, err := openStore(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	return newOn(ctx, st, cfg, log)
}

// newOn is New on a store that is open; the App closes it, also when it fails.
func newOn(ctx context.Context, st store.Store, cfg *config.Config, log *slog.Logger) (_ *App, err error) {
	a := &App{cfg: cfg, log: log, store: st}
	defer func() {
		if err != nil {
			a.release()
		}
	}()
	if a.stateLock, err = claimStateDir(cfg); err != nil {
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
	a.clusters = newClusterKeeper(set, sources, cfg.Health, log)

	var disk *diskCopy
	stateDir := ""
	if cfg.StateDir != "" && cfg.Store.Type != "file" {
		stateDir = cfg.StateDir
		if disk, err = newDiskCopy(stateDir); err != nil {
			return nil, err
		}
	}
	a.maps = newMapKeeper(a.store, log, disk)
	a.maps.def = cfg.DefaultCluster
	a.old = newOldIDs(a.store, log, cfg.DefaultCluster)
	if a.clients, err = adminClients(cfg); err != nil {
		return nil, err
	}
	a.old.translate = adminTranslator{clients: a.clients, down: a.clusters.isDown, pairs: new(pulsaradmin.Translator)}
	a.maps.old = a.old
	if err := a.maps.loadCopy(); err != nil {
		log.Error("no map from the disk", "err", err)
	}
	if a.age, err = newMapAge(a.store, log, cfg.Store.MaxMapAge.Std(), stateDir); err != nil {
		return nil, err
	}
	if err := a.openEngine(); err != nil {
		return nil, err
	}
	a.clusters.loops, a.maps.loops, a.old.loops, a.age.loops = a, a, a, a
	a.maps.self = a.Info

	if a.opsLn, err = net.Listen("tcp", cfg.Listeners.Ops); err != nil {
		return nil, fmt.Errorf("listeners.ops %s: %w", cfg.Listeners.Ops, err)
	}
	a.info = store.Proxy{
		ID: cfg.ID(a.mainAddr()), Incarnation: incarnation(), Version: Version,
		Advertised: cfg.PulsarURL(a.mainAddr(), a.PulsarAddr() == ""), Ops: cfg.OpsURL(a.opsLn.Addr().String()),
		Clusters: slices.Sorted(slices.Values(set.Names())), Started: time.Now().UTC(), Live: true,
		MaxMapAgeMillis: cfg.Store.MaxMapAge.Std().Milliseconds(),
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(newCollector(a))
	a.admin = admin.New(admin.Config{
		Store: a.store, Proxy: a, Metrics: registry, Logger: log,
		Check: func(ctx context.Context, r switching.CheckRequest) (switching.Preflight, error) {
			return a.control.Check(ctx, r)
		},
		Nudge: func() { a.control.Nudge() },
		Plan: func(ctx context.Context, r switching.BatchRequest) (switching.BatchPlan, error) {
			return a.control.PlanBatch(ctx, r)
		},
		Failover: &controller.FailoverWork{Store: a.store, Clients: a.clients}, NudgeFailover: func() { a.failovers.Nudge() },
		Salvage: func(ctx context.Context, r switching.SalvageRequest) (switching.Salvage, error) {
			return controller.Salvage(ctx, a.clients, r)
		},
	})
	a.failovers = controller.NewFailovers(controller.FailoverConfig{
		Store: a.store, Pairs: failoverPairs(cfg), SampleEvery: cfg.Health.SampleInterval.Std(), Clients: a.clients, Table: a.Table, DefaultCluster: cfg.DefaultCluster,
		Execute: a.admin.RunFailover, Log: log,
	})
	registry.MustRegister(a.failovers)
	control := controller.Config{
		Store: a.store, ID: a.info.ID, DefaultCluster: cfg.DefaultCluster, Open: controller.OpenPulsar(a.clients), Assign: a.admin.Assign,
		Clients: a.clients, Fleet: a.admin, NativeIDs: a.cfg.MessageIDs == config.NativeIDs, Beside: a.failovers.Lead, Log: log,
	}
	if cfg.StateDir != "" {
		control.Receipt = (&receipts{dir: filepath.Join(cfg.StateDir, receiptsDir), log: log}).keep
	}
	a.control = controller.New(control)
	registry.MustRegister(a.control)
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
		keys, err := config.ReadTagKeys(file)
		if err != nil {
			return cluster.TagKeys{}, fmt.Errorf("tag_key_file %s: %w", file, err)
		}
		return cluster.NewTagKeys(keys[0], keys[1:]...)
	}
	key, err := a.keyFromStore(ctx)
	if err != nil {
		return cluster.TagKeys{}, err
	}
	return cluster.NewTagKeys(key)
}

func clusterSet(cfg *config.Config, keys cluster.TagKeys, log *slog.Logger) (*cluster.Set, map[string]zk.DiscoveryConfig, error) {
	sources := make(map[string]zk.DiscoveryConfig)
	var configs []cluster.Config
	for name, c := range cfg.Clusters {
		one := cluster.Config{
			Name: name, TLS: c.TLS != nil, WebURL: c.WebURL, ListenerName: c.ListenerName, Allow: c.Allow, Resolve: c.Resolve, AllowLinkLocal: c.AllowLinkLocal,
		}
		if c.TLS != nil {
			one.ServerName = c.TLS.ServerName
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
	loops := a.cfg.Loops
	if loops == 0 {
		loops = runtime.GOMAXPROCS(0)
	}
	sc := &session.Config{
		ServerVersion: "Pointsman-v" + Version, DefaultCluster: a.cfg.DefaultCluster, ClusterNames: a.clusters.set.Load().Names(),
		MaxFrame: l.Frame.Bytes(), MaxControl: l.ControlFrame.Bytes(),
		ConnectTimeout: l.ConnectTimeout.Std(), HandshakeTimeout: l.DialTimeout.Std() + l.HandshakeTimeout.Std(),
		LookupTimeout: l.LookupTimeout.Std(), KeepAlive: l.KeepAliveInterval.Std(),
		LookupsPerConnection: l.LookupsPerConnection, LookupsPerCluster: max(l.LookupsPerCluster/loops, 1), MaxHandles: maxHandles,
		ClusterAt: a.old.clusterAt,
		NativeIDs: a.cfg.MessageIDs == config.NativeIDs,
		ParkTime:  parkTime, MaxParked: max(l.ParkedRequests/loops, 1),
		ReceiptWait: e.ReceiptWait.Std(), EvictRate: e.Rate, EvictBurst: e.Burst, EvictJitter: e.Jitter.Std(),
		Table: a.maps.table.Load, Clusters: a.clusters.set.Load,
		Lease: func() bool { return a.store.Lease() > store.Boottime() },
	}
	if a.age.promised.Load() > 0 {
		sc.TooOld = a.age.tooOld
	}
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return err
	}
	listeners, err := a.listeners()
	if err != nil {
		return err
	}
	clientTLS, err := clusterTLS(a.cfg, a.clusters.set.Load())
	if err != nil {
		return err
	}
	a.engine, err = netio.New(netio.Config{
		Listeners: listeners,
		Loops:     loops,
		HighWater: l.HighWatermark.Bytes(), LowWater: l.LowWatermark.Bytes(), BufferMemory: int64(l.BufferMemory.Bytes()),
		MaxRest: l.ControlFrame.Bytes() + 1<<20, DialTimeout: l.DialTimeout.Std(), WriteStall: l.WriteStallTimeout.Std(), MaxConns: l.Connections,
		HandshakeTimeout: l.TLSHandshakeTimeout.Std(), ClientTLS: func(name string) *tls.Config { return clientTLS[name] },
		NewShard: func(loop int) netio.Shard {
			sh := session.NewShard(sc, loop, uint64(seed[0])|uint64(seed[1])<<8|uint64(seed[2])<<16|uint64(seed[3])<<24)
			a.shards = append(a.shards, sh)
			return sh
		},
		Report: newReporter(a.log).report,
		Ask:    a.old.request,
		Fault:  func(err error) { a.log.Error("event loop", "err", err) },
	})
	if err != nil {
		return fmt.Errorf("listeners.pulsar %q, listeners.pulsar_tls %q: %w", a.cfg.Listeners.Pulsar, a.cfg.Listeners.PulsarTLS, err)
	}
	return nil
}

// maxHandles bounds the producers and consumers of one client connection.
const maxHandles = 100_000

// parkTime is how long a request waits for a topic that is being moved: together with the lookup that follows below the 30 s after which
// clients give up.
const parkTime = 10 * time.Second

// adminClients are those of the clusters that have an admin address.
func adminClients(cfg *config.Config) (map[string]*pulsaradmin.Client, error) {
	clients := make(map[string]*pulsaradmin.Client)
	for name, c := range cfg.Clusters {
		if c.WebURL == "" {
			continue // no planned switch from or to it
		}
		client, err := pulsaradmin.Open(name, c)
		if err != nil {
			return nil, err
		}
		clients[name] = client
	}
	return clients, nil
}

// failoverPairs are the pairs of clusters for which a failover is configured.
func failoverPairs(cfg *config.Config) []switching.FailoverPair {
	var pairs []switching.FailoverPair
	for _, name := range slices.Sorted(maps.Keys(cfg.Clusters)) {
		f := cfg.Clusters[name].Failover
		if f == nil {
			continue
		}
		pairs = append(pairs, switching.FailoverPair{
			From: name, To: f.To, Automatic: f.Automatic,
			After: cmp.Or(f.After, config.DefaultFailoverAfter).Std(), Cooldown: cmp.Or(f.Cooldown, config.DefaultFailoverCooldown).Std(),
		})
	}
	return pairs
}

// incarnation tells this start of the process from every other one.
func incarnation() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// listeners are the configured ones, the one without TLS first.
func (a *App) listeners() (all []netio.Listener, err error) {
	if addr := a.cfg.Listeners.Pulsar; addr != "" {
		all = append(all, netio.Listener{Network: "tcp", Addr: addr})
	}
	if addr := a.cfg.Listeners.PulsarTLS; addr != "" {
		server, err := a.cfg.TLS.Server(time.Now())
		if err != nil {
			return nil, err
		}
		all = append(all, netio.Listener{Network: "tcp", Addr: addr, TLS: server})
	}
	return all, nil
}

// clusterTLS are the configurations for the brokers of the clusters that have TLS, by name of the cluster.
func clusterTLS(cfg *config.Config, set *cluster.Set) (map[string]*tls.Config, error) {
	all := make(map[string]*tls.Config)
	for name, c := range cfg.Clusters {
		if one, ok := set.Get(name); !ok || !one.TLS() {
			continue
		}
		client, err := c.TLS.Client(name)
		if err != nil {
			return nil, err
		}
		all[name] = client
	}
	return all, nil
}

// PulsarAddr is the address that the binary listener without TLS is bound to; "" when there is none.
func (a *App) PulsarAddr() string {
	if a.cfg.Listeners.Pulsar == "" {
		return ""
	}
	return a.mainAddr()
}

// PulsarTLSAddr is the address that the binary listener with TLS is bound to; "" when there is none.
func (a *App) PulsarTLSAddr() string {
	if a.cfg.Listeners.PulsarTLS == "" {
		return ""
	}
	addrs := a.engine.Addrs()
	return addrs[len(addrs)-1].String()
}

// mainAddr is the one that a proxy is named by.
func (a *App) mainAddr() string { return a.engine.Addrs()[0].String() }

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
	registered, retire := context.WithCancel(life)
	var registration sync.WaitGroup
	part("operations port", func() error { return a.admin.Serve(a.opsLn) })
	announced := make(chan error, 1)
	part("map", func() error {
		announced <- a.announceFirst(ctx)
		return a.maps.run(life)
	})
	err := a.awaitMap(ctx, fatal)
	if err == nil && ctx.Err() == nil {
		a.joinRoster(ctx, announced)
		err = a.engine.Start()
	}
	if err == nil && ctx.Err() == nil {
		part("clusters", func() error { a.clusters.run(life); return nil })
		part("age of the map", func() error { a.age.run(life); return nil })
		part("switch controller", func() error { return a.control.Run(life) })
		registration.Go(func() { a.keepRegistered(registered) })
		a.log.Info("pointsman is serving", "version", Version, "pulsar", a.PulsarAddr(), "pulsar_tls", a.PulsarTLSAddr(), "ops", a.OpsURL(), "id", a.info.ID, "clusters", strings.Join(a.info.Clusters, ","))
		select {
		case <-ctx.Done():
		case err = <-fatal:
		}
	}
	if err != nil {
		a.log.Error("a part has failed, the proxy ends", "err", err)
	}
	retire()
	registration.Wait() // or it would put the proxy on the roster again that has left it
	a.drain(life)
	stop()
	parts.Wait()
	return err
}

// mapPatience is how long the first map may take before that is worth a line.
const mapPatience = 2 * time.Second

// awaitMap waits until there is a map: by an empty one topics would go to the wrong cluster. Until then connections wait in the
// listener, and /readyz says no.
func (a *App) awaitMap(ctx context.Context, fatal <-chan error) error {
	late := time.NewTimer(mapPatience)
	defer late.Stop()
	for {
		select {
		case <-a.maps.loaded:
			return nil
		case <-ctx.Done():
			return nil
		case err := <-fatal:
			return err
		case <-late.C:
			a.log.Warn("nobody is served yet: the map store does not answer and state_dir has no copy of the map", "store", a.store.Status().Detail)
		}
	}
}

// rosterTimeout bounds one attempt to get onto the roster.
const rosterTimeout = 3 * time.Second

// rosterRetry is the pause after a failed attempt.
const rosterRetry = 200 * time.Millisecond

// announceFirst puts this proxy on the roster before it reads the map, if the store answers: what was read before would have to be compared
// once more. Who has nothing to serve meanwhile waits longer for it.
func (a *App) announceFirst(ctx context.Context) error {
	patience := store.DefaultTimeout
	select {
	case <-a.maps.loaded:
		patience = rosterTimeout
	default:
	}
	return a.announce(ctx, patience)
}

func (a *App) announce(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return a.register(ctx)
}

// register puts this proxy on the roster, and what it promises.
func (a *App) register(ctx context.Context) error {
	err := a.store.Register(ctx, a.Info())
	if err == nil {
		a.age.registered()
	}
	return err
}

// joinRoster makes sure that this proxy is on the roster, and has the map of after that, before it serves for the first time: who moves a topic
// must know of every proxy that may have its clients. A proxy that starts from the disk while the store is away is on the roster: who leaves
// it has no copy any more. announced is what becomes of the first attempt.
func (a *App) joinRoster(ctx context.Context, announced <-chan error) {
	err := <-announced
	for late := false; ctx.Err() == nil; late = true {
		if late || err == nil || a.maps.isSynced() {
			// The session may have been lost meanwhile: then all of it counts anew.
			err = a.announce(ctx, rosterTimeout)
		}
		if err == nil {
			select {
			case <-a.maps.synced:
			case <-ctx.Done():
			case <-time.After(rosterTimeout):
				err = errors.New("the store is slow to deliver the map")
			}
		}
		switch {
		case err == nil:
			return
		case !a.maps.isSynced():
			a.log.Warn("serving without contact to the map store, from the copy on the disk; switches wait for this proxy", "err", err)
			return
		case !late:
			a.log.Warn("nobody is served yet: this proxy is not on the roster, and a switch could overlook it", "err", err)
		}
		select {
		case <-time.After(rosterRetry):
		case <-ctx.Done():
		}
	}
}

// keepRegistered announces this proxy, and again whenever it serves another map: not at the same moment as all others, and not
// each time when one topic is moved after the other, because every announcement is a write of the store.
func (a *App) keepRegistered(ctx context.Context) {
	const (
		settle = 200 * time.Millisecond
		spread = 800 * time.Millisecond
		pace   = 2 * time.Second // between two announcements
	)
	for {
		err := a.register(ctx)
		announced := time.Now()
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
		case <-a.clusters.changed:
		case <-again:
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(max(settle+mathrand.N(spread), pace-time.Since(announced))):
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
	a.leaveRoster(until)
	if err := a.admin.Shutdown(until); err != nil {
		a.log.Warn("operations port did not end in time", "err", err)
	}
	a.log.Info("stopped")
}

// leaveRoster ends the membership of a proxy that has closed its last connection. From then on switches do not wait for it, so its
// copy of the map must not be served again. What it had sent without an answer may still arrive: that is left behind for them to know (C4).
func (a *App) leaveRoster(ctx context.Context) {
	copy := a.maps.copy
	if copy != nil {
		if err := copy.setAside(); err != nil {
			a.log.Warn("this proxy stays on the roster: its copy of the map could not be put aside", "err", err)
			return
		}
	}
	now := time.Now()
	settled := !slices.ContainsFunc(a.shards, func(sh *session.Shard) bool { return sh.Unsettled(now) }) // their loops have ended
	if err := a.store.Unregister(ctx, settled); err != nil {
		a.log.Warn("this proxy could not be taken off the roster: it keeps its copy of the map, and planned switches wait until it is back or forgotten (pointsman proxies forget)", "err", err)
		if copy != nil {
			if err := copy.takeBack(); err != nil {
				a.log.Warn("the copy of the map was lost: this proxy starts again only with the map store", "err", err)
			}
		}
		return
	}
	if copy != nil {
		copy.discard()
	}
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
	if a.old != nil {
		a.old.close()
	}
	for _, c := range a.clients {
		c.Close()
	}
	if a.store != nil {
		_ = a.store.Close()
	}
	if a.stateLock != nil {
		_ = a.stateLock.Close()
	}
}
