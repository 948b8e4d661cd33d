package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// Fleet is what a batch asks of the proxies, and has them do. internal/admin implements it; it may be used by any number of goroutines.
type Fleet interface {
	// HandleFacts are what the proxies say of their clients on topics (base names).
	HandleFacts(ctx context.Context, topics []string) (map[string]switching.HandleFacts, error)
	// Together are the sets of topics of a namespace that some client consumes under one subscription name on one connection.
	Together(ctx context.Context, namespace string) ([][]string, error)
	// RuleNamespace maps a namespace of which every topic is on the new cluster by one rule, and removes the entries that it makes superfluous, in steps that
	// may each be repeated. It tells the rule's epoch, how many entries it has removed, and how many topics of the namespace have a higher epoch, in a floor.
	RuleNamespace(ctx context.Context, b switching.Batch) (epoch uint64, removed, floors int, err error)
}

// Ground is what a batch asks of the clusters beside what each of its switches does. Config.Ground is for tests; without it the clusters are asked.
type Ground struct {
	// List names the topics of a namespace.
	List func(ctx context.Context, cluster, namespace string) ([]string, error)
	// Check is the preflight of one topic.
	Check func(ctx context.Context, r switching.CheckRequest) (switching.Preflight, error)
	// Backlog is how many entries of a topic the replication has still to send.
	Backlog func(ctx context.Context, topic, from, to string) (int64, error)
}

// maxListed is how many namespaces are asked for the siblings of topics that were named one by one.
const maxListed = 16

// ground is Config.Ground, or the clusters.
func (c *Controller) ground() Ground {
	if c.cfg.Ground != nil {
		return *c.cfg.Ground
	}
	return Ground{
		List: func(ctx context.Context, cluster, namespace string) ([]string, error) {
			client := c.cfg.Clients[cluster]
			if client == nil {
				return nil, fmt.Errorf("cluster %s has no admin address, and so cannot name its topics: set clusters.%s.web_url", cluster, cluster)
			}
			names, err := client.Topics(ctx, namespace)
			if errors.Is(err, pulsaradmin.ErrNotFound) {
				return nil, nil // no such namespace: no topics
			}
			return names, err
		},
		Check: c.Check,
		Backlog: func(ctx context.Context, topic, from, to string) (int64, error) {
			client := c.cfg.Clients[from]
			if client == nil {
				return 0, fmt.Errorf("cluster %s has no admin address: set clusters.%s.web_url", from, from)
			}
			n, err := client.Partitions(ctx, topic)
			if err != nil {
				return 0, err
			}
			sum := int64(0)
			for _, name := range pulsaradmin.PartitionNames(topic, n) {
				r, err := client.Replicator(ctx, name, to, time.Now())
				if err != nil {
					return 0, err
				}
				sum += r.Backlog
			}
			return sum, nil
		},
	}
}

// mapNow is the map as the store has it.
func (c *Controller) mapNow(ctx context.Context) (*route.Table, error) {
	rules, err := c.cfg.Store.Rules(ctx)
	if err != nil {
		return nil, err
	}
	entries, err := c.cfg.Store.Entries(ctx)
	if err != nil {
		return nil, err
	}
	buckets := map[int][]route.Entry{}
	for _, e := range entries {
		buckets[route.Bucket(e.Topic)] = append(buckets[route.Bucket(e.Topic)], e)
	}
	table, _, err := route.Empty().With(buckets, &rules)
	return table, err
}

// PlanBatch finds out which topics a request is about, and in which order they move. It reads the map and the clusters, and writes nothing.
func (c *Controller) PlanBatch(ctx context.Context, r switching.BatchRequest) (switching.BatchPlan, error) {
	var plan switching.BatchPlan
	table, err := c.mapNow(ctx)
	if err != nil {
		return plan, err
	}
	all, err := c.candidates(ctx, table, r)
	if err != nil {
		return plan, err
	}
	from := map[string]bool{}
	var topics []string
	for _, name := range selected(all, r) {
		t, err := route.ParseTopic(name)
		if err != nil {
			return plan, err
		}
		switch d := table.Decide(t, c.cfg.DefaultCluster); d.Cluster {
		case r.To:
			plan.There = append(plan.There, name)
		case "":
			plan.Gone = append(plan.Gone, name)
		default:
			from[d.Cluster] = true
			topics = append(topics, name)
		}
	}
	plan.From = slices.Sorted(maps.Keys(from))
	if len(topics) > switching.MaxBatchTopics {
		return plan, fmt.Errorf("%d topics are %w, %d: name a share of them with --percent or --prefix", len(topics), switching.ErrTooManyTopics, switching.MaxBatchTopics)
	}
	known, together := c.neighbours(ctx, table, topics, all, r, &plan)
	plan.Items = switching.OrderBatch(topics, together)
	// What is on the new cluster already stays behind nowhere.
	known = slices.DeleteFunc(known, func(name string) bool {
		t, err := route.ParseTopic(name)
		return err != nil || table.Decide(t, c.cfg.DefaultCluster).Cluster == r.To
	})
	plan.Warnings = append(plan.Warnings, switching.Outside(plan.Items, known, together, switching.MaxBatchListed)...)
	return plan, nil
}

// candidates are the topics that were named, or all of the namespace: those of the map and those that its cluster has.
func (c *Controller) candidates(ctx context.Context, table *route.Table, r switching.BatchRequest) ([]string, error) {
	if len(r.Topics) > 0 {
		return slices.Compact(slices.Sorted(slices.Values(r.Topics))), nil
	}
	return c.inNamespace(ctx, table, r.Namespace)
}

// inNamespace names every topic of a namespace that has an entry of its own, or is on the cluster that its rules name.
func (c *Controller) inNamespace(ctx context.Context, table *route.Table, namespace string) ([]string, error) {
	found := map[string]bool{}
	for e := range table.Each {
		if t, err := route.ParseTopic(e.Topic); err == nil && !e.Floor() && !t.System() && t.In(namespace) {
			found[e.Topic] = true
		}
	}
	ruled := table.DecideScope(namespace, c.cfg.DefaultCluster).Cluster
	if ruled != "" {
		names, err := c.ground().List(ctx, ruled, namespace)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			// What has an entry elsewhere is only left over here.
			if t, err := route.ParseTopic(name); err == nil && table.Decide(t, c.cfg.DefaultCluster).Cluster == ruled {
				found[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// selected are the topics that the request's prefix and share leave.
func selected(all []string, r switching.BatchRequest) []string {
	known := func(name string) bool { _, ok := slices.BinarySearch(all, name); return ok }
	return slices.DeleteFunc(slices.Clone(all), func(name string) bool {
		return !strings.HasPrefix(name, r.Prefix) || r.Percent > 0 && !switching.InPercent(name, r.Percent, known)
	})
}

// neighbours are the names among which siblings are looked for, and what clients consume together. What cannot be found out is a warning.
func (c *Controller) neighbours(ctx context.Context, table *route.Table, topics, all []string, r switching.BatchRequest, plan *switching.BatchPlan) (known []string, together [][]string) {
	known = all
	namespaces := map[string]bool{}
	for _, name := range topics {
		if t, err := route.ParseTopic(name); err == nil {
			namespaces[t.Namespace()] = true
		}
	}
	listed := slices.Sorted(maps.Keys(namespaces))
	if over := len(listed) - maxListed; over > 0 {
		plan.Warnings = append(plan.Warnings, fmt.Sprintf("the topics are of %d namespaces; siblings (DLQ, RETRY, consumed together) were looked for in the first %d only", len(listed), maxListed))
		listed = listed[:maxListed]
	}
	for _, ns := range listed {
		if len(r.Topics) > 0 {
			names, err := c.inNamespace(ctx, table, ns)
			if err != nil {
				plan.Warnings = append(plan.Warnings, fmt.Sprintf("siblings in %s that are not in the batch cannot be named: %v", ns, err))
			}
			known = append(known, names...)
		}
		if c.cfg.Fleet == nil {
			continue
		}
		sets, err := c.cfg.Fleet.Together(ctx, ns)
		if err != nil {
			plan.Warnings = append(plan.Warnings, fmt.Sprintf("which topics of %s are consumed together cannot be told: %v", ns, err))
		}
		together = append(together, sets...)
	}
	slices.Sort(known)
	return slices.Compact(known), together
}

// left are the topics of a namespace that the map has on another cluster than to.
func (c *Controller) left(ctx context.Context, namespace, to string) ([]string, error) {
	table, err := c.mapNow(ctx)
	if err != nil {
		return nil, err
	}
	all, err := c.inNamespace(ctx, table, namespace)
	return slices.DeleteFunc(all, func(name string) bool {
		t, err := route.ParseTopic(name)
		return err != nil || table.Decide(t, c.cfg.DefaultCluster).Cluster == to
	}), err
}

// decide is where the map has a topic, as of now, and its own entry.
func (c *Controller) decide(ctx context.Context, base string) (route.Decision, error) {
	t, err := route.ParseTopic(base)
	if err != nil {
		return route.Decision{}, err
	}
	rules, err := c.cfg.Store.Rules(ctx)
	if err != nil {
		return route.Decision{}, err
	}
	buckets := map[int][]route.Entry{}
	if e, ok, err := c.cfg.Store.Entry(ctx, base); err != nil {
		return route.Decision{}, err
	} else if ok {
		buckets[route.Bucket(base)] = []route.Entry{e}
	}
	table, _, err := route.Empty().With(buckets, &rules)
	if err != nil {
		return route.Decision{}, err
	}
	return table.Decide(t, c.cfg.DefaultCluster), nil
}

// listing keeps the names of a namespace for a while: the preflights of a batch ask for the siblings of each topic.
type listing struct {
	mu    sync.Mutex
	names map[string]listed // by cluster and namespace; guarded by mu
}

type listed struct {
	at    time.Time
	names []string // sorted
}

// listingKept is how old the names may be that the preflights of a batch go by; listingsKept how many namespaces are kept.
const (
	listingKept  = 30 * time.Second
	listingsKept = 64
)

// siblings are the DLQ and RETRY topics of a topic, from names that may be listingKept old.
func (l *listing) siblings(ctx context.Context, from *pulsaradmin.Client, base string) ([]string, error) {
	t, err := route.ParseTopic(base)
	if err != nil {
		return nil, err
	}
	key := from.Cluster() + " " + t.Namespace()
	// Those who come meanwhile wait for it: they would all read the same.
	l.mu.Lock()
	defer l.mu.Unlock()
	have, ok := l.names[key]
	if !ok || time.Since(have.at) > listingKept {
		names, err := from.Topics(ctx, t.Namespace())
		if err != nil {
			return nil, err
		}
		if len(l.names) >= listingsKept || l.names == nil {
			l.names = map[string]listed{}
		}
		have = listed{time.Now(), names}
		l.names[key] = have
	}
	first, _ := slices.BinarySearch(have.names, base+"-")
	var found []string
	for _, name := range have.names[first:] {
		if !strings.HasPrefix(name, base+"-") {
			break
		}
		if strings.HasSuffix(name, "-DLQ") || strings.HasSuffix(name, "-RETRY") {
			found = append(found, name)
		}
	}
	return found, nil
}

// on names what some clusters have of a namespace.
func (c *Controller) on(ctx context.Context, clusters []string, namespace string) (map[string]bool, error) {
	found := map[string]bool{}
	for _, cluster := range clusters {
		all, err := c.ground().List(ctx, cluster, namespace)
		if err != nil {
			return nil, err
		}
		for _, name := range all {
			found[name] = true
		}
	}
	return found, nil
}
