package app

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"pointsman/core/cluster"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/config"
	"pointsman/zk"
)

// clusterKeeper follows the configured clusters: which brokers they have, whether they answer, what they can do. It
// publishes each change as a new cluster.Set.
type clusterKeeper struct {
	log   *slog.Logger
	loops poster

	mu      sync.Mutex // serialises replacements of set; guards detail
	set     atomic.Pointer[cluster.Set]
	detail  map[string]string                  // why a cluster is not up
	views   map[string]switching.ClusterHealth // guarded by mu: what is announced of each
	sources map[string]zk.DiscoveryConfig

	health  config.Health
	probed  chan struct{} // closed when every cluster was asked once
	changed chan struct{} // capacity 1: a cluster's health has changed
}

func newClusterKeeper(set *cluster.Set, sources map[string]zk.DiscoveryConfig, health config.Health, log *slog.Logger) *clusterKeeper {
	k := &clusterKeeper{
		log: log, detail: make(map[string]string), views: make(map[string]switching.ClusterHealth), sources: sources, health: health,
		probed: make(chan struct{}), changed: make(chan struct{}, 1),
	}
	k.set.Store(set)
	return k
}

// run discovers and probes until ctx ends.
func (k *clusterKeeper) run(ctx context.Context) {
	var all, first sync.WaitGroup
	for name, source := range k.sources {
		all.Go(func() { k.discover(ctx, name, source) })
	}
	for _, name := range k.set.Load().Names() {
		first.Add(1)
		all.Go(func() { k.probe(ctx, name, sync.OnceFunc(first.Done)) })
	}
	first.Wait()
	close(k.probed)
	all.Wait()
}

func (k *clusterKeeper) discover(ctx context.Context, name string, source zk.DiscoveryConfig) {
	err := zk.Discover(ctx, source, func(found []zk.Broker) {
		var brokers []cluster.Broker
		for _, b := range found {
			if broker, ok := k.brokerOf(name, b); ok {
				brokers = append(brokers, broker)
			}
		}
		k.mu.Lock()
		next, err := k.set.Load().WithBrokers(name, brokers)
		if err == nil {
			k.set.Store(next)
		}
		k.mu.Unlock()
		if err != nil {
			k.log.Error("the brokers of a cluster cannot be used; the last ones stay", "cluster", name, "err", err)
			return
		}
		k.log.Info("brokers of a cluster", "cluster", name, "brokers", len(brokers))
	})
	if err != nil && ctx.Err() == nil {
		k.log.Error("brokers of a cluster cannot be discovered", "cluster", name, "err", err)
	}
}

// brokerOf takes the addresses of one registration.
func (k *clusterKeeper) brokerOf(name string, b zk.Broker) (broker cluster.Broker, ok bool) {
	c, ok := k.set.Load().Get(name)
	if !ok {
		return cluster.Broker{}, false
	}
	url, missing := c.OwnURL(b.ServiceURL, b.ServiceURLTLS)
	addr, _, err := cluster.ParseBrokerURL(url)
	if missing != "" || err != nil {
		need := map[bool]string{true: "pulsarServiceUrlTls, and the cluster is configured with TLS", false: "pulsarServiceUrl, and the cluster is configured without TLS"}[c.TLS()]
		k.log.Warn("a broker registers no address that can be used; it is left out", "cluster", name, "broker", b.ID, "needed", need, "err", err)
		return cluster.Broker{}, false
	}
	broker.Addr = addr
	for _, l := range b.Listeners {
		url, _ := c.OwnURL(l.ServiceURL, l.ServiceURLTLS)
		if alias, _, err := cluster.ParseBrokerURL(url); err == nil && alias != addr {
			broker.Aliases = append(broker.Aliases, alias)
		}
	}
	return broker, true
}

// probe asks the cluster again and again, by a lookup as a client makes it: a TCP connection proves nothing.
func (k *clusterKeeper) probe(ctx context.Context, name string, first func()) {
	defer first()
	var health cluster.Health
	policy := cluster.HealthPolicy{Failures: k.health.Failures, Over: k.health.Over.Std(), Successes: k.health.Successes}
	ticker := time.NewTicker(k.health.Interval.Std())
	defer ticker.Stop()
	for {
		a, err := askCluster(ctx, k.loops, session.RequestLookup, name, session.ProbeTopic, k.health.Timeout.Std())
		if ctx.Err() != nil {
			return
		}
		ok := err == nil && (!a.Failed() || a.FromBroker())
		before := health.State
		health = health.Observe(time.Now(), ok, policy)
		k.note(name, health.State, ok, err, a)
		if health.State != before {
			k.announce(name, health)
			k.log.Info("health of a cluster changed", "cluster", name, "health", health.State.String(), "was", before.String(), "detail", k.detailOf(name))
		}
		first()
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (k *clusterKeeper) note(name string, state cluster.State, ok bool, err error, a session.Answer) {
	k.mu.Lock()
	defer k.mu.Unlock()
	set := k.set.Load().WithHealth(name, state)
	if a.Connected != nil {
		set = set.WithCapabilities(name, capabilitiesOf(a.Connected))
	}
	k.set.Store(set)
	switch {
	case err != nil:
		k.detail[name] = err.Error()
	case !ok:
		k.detail[name] = a.Text
	default:
		delete(k.detail, name)
	}
}

// announce changes what this proxy says of a cluster on the roster.
func (k *clusterKeeper) announce(name string, h cluster.Health) {
	view := switching.ClusterHealth{State: h.State.String(), Since: h.Since.UTC()}
	if h.State == cluster.Down {
		const most = 200
		view.Why = k.detailOf(name)
		view.Why = strings.ToValidUTF8(view.Why[:min(len(view.Why), most)], "")
	}
	k.mu.Lock()
	k.views[name] = view
	k.mu.Unlock()
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// isDown tells whether a cluster does not answer this proxy.
func (k *clusterKeeper) isDown(name string) bool {
	c, ok := k.set.Load().Get(name)
	return ok && c.Health() == cluster.Down
}

// announced is what this proxy says of the clusters.
func (k *clusterKeeper) announced() map[string]switching.ClusterHealth {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.views)
}

func (k *clusterKeeper) detailOf(name string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.detail[name]
}

var errLoopGone = errors.New("the event loop has ended")

// askCluster puts a question of the proxy's own through the first loop and waits for the answer.
func askCluster(ctx context.Context, loops poster, kind session.RequestKind, name, topic string, timeout time.Duration) (session.Answer, error) {
	started := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answers := make(chan session.Answer, 1)
	posted := loops.Post(0, func(now time.Time, sh *session.Shard) {
		sh.Ask(now, kind, name, topic, func(a session.Answer) { answers <- a })
	})
	if !posted {
		return session.Answer{}, errLoopGone
	}
	select {
	case a := <-answers:
		return a, nil
	case <-ctx.Done():
		return session.Answer{}, &noAnswerError{name, topic, time.Since(started).Round(time.Millisecond)}
	}
}

type noAnswerError struct {
	cluster, topic string
	waited         time.Duration
}

func (e *noAnswerError) Error() string {
	return "cluster " + e.cluster + " did not answer about " + e.topic + " within " + e.waited.String()
}
