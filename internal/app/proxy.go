package app

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"pointsman/codec"
	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/store"
)

// This file is what the operations port may ask of the running proxy.

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
	p.Digest, p.Entries, p.Health = t.Digest(), t.Len(), a.clusters.announced()
	return p
}

// Ready tells whether new clients should come here, and why not.
func (a *App) Ready() (ok bool, reasons []string) {
	if a.draining.Load() {
		reasons = append(reasons, "draining")
	}
	select {
	case <-a.maps.loaded:
	default:
		reasons = append(reasons, "the map was never loaded: "+a.store.Status().Detail)
	}
	select {
	case <-a.clusters.probed:
	default:
		reasons = append(reasons, "the clusters were not asked yet")
	}
	if topics := a.maps.mover.held(); len(topics) > 0 {
		reasons = append(reasons, "without the map store, topics in a switch wait here: "+switching.Few(topics, 3))
	}
	if why := a.age.ready(); why != "" {
		reasons = append(reasons, why)
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
				sum.Leaving += n.Leaving
				all.Topics[base] = sum
				all.Producers += n.Producers
				all.Consumers += n.Consumers
				all.Leaving += n.Leaving
			}
		case <-ctx.Done():
			return all, ctx.Err()
		}
	}
	return all, nil
}

// Together are the sets of topics of a namespace that a client consumes under one subscription name on one connection.
func (a *App) Together(ctx context.Context, namespace string) ([][]string, error) {
	match := func(base string) bool {
		topic, err := route.ParseTopic(base)
		return err == nil && topic.In(namespace)
	}
	found := make(chan [][]string, a.Loops())
	asked := 0
	for i := range a.Loops() {
		if a.Post(i, func(_ time.Time, sh *session.Shard) { found <- sh.Together(match) }) {
			asked++
		}
	}
	var all [][]string
	for range asked {
		select {
		case sets := <-found:
			all = append(all, sets...)
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
