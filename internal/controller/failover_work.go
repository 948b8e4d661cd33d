package controller

import (
	"context"
	"errors"
	"fmt"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// FailoverWork is what a failover asks of the cluster that the topics go to, and of what was last seen of the one that is dead. That one is never
// called.
type FailoverWork struct {
	Store   store.Store
	Clients map[string]*pulsaradmin.Client
}

// Seen is what was last seen of a cluster.
func (w *FailoverWork) Seen(ctx context.Context, cluster string) (switching.Seen, error) {
	s, _, err := store.ReadSeen(ctx, w.Store, cluster)
	return s, err
}

// ErrNoAdmin: the cluster that topics go to has no admin address, so that nothing can be made there.
var ErrNoAdmin = errors.New("has no admin address")

// Ready finds out what cluster to lacks for a topic (base name) that was seen on cluster from, and with create makes it: the topic with its partitions,
// and the subscriptions, which begin with the oldest message. What cannot work whatever is done is among the Problems.
func (w *FailoverWork) Ready(ctx context.Context, base, from, to string, seen *switching.Seen, create bool) (switching.FailoverFacts, error) {
	facts := switching.FailoverFacts{Topics: 1}
	t, at, known := seen.Topic(base)
	c := w.Clients[to]
	if c != nil && !(known && create) { // else making the topic tells
		if has, err := c.HasNamespace(ctx, base); err == nil && !has {
			facts.Problems = append(facts.Problems, fmt.Sprintf("%s: its namespace does not exist on cluster %s; create it there", base, to))
			return facts, nil
		}
	}
	if !known {
		facts.Unknown = 1
		facts.Notes = append(facts.Notes, fmt.Sprintf("%s: nothing was ever seen of it on cluster %s: a subscription that cluster %s lacks begins where its client says, which by default skips what is there", base, from, to))
		return facts, nil
	}
	facts.Measured, facts.Subscriptions = at, len(t.Subscriptions)
	if r, ok := t.Replication[to]; ok {
		facts.Backlog, facts.Delay = r.Backlog, r.Delay
	} else {
		facts.Unreplicated = 1
		facts.Notes = append(facts.Notes, fmt.Sprintf("%s was not replicated from %s to %s: %s has none of its messages", base, from, to, to))
	}
	if c == nil {
		return facts, fmt.Errorf("cluster %s %w; set clusters.%s.web_url", to, ErrNoAdmin, to)
	}
	partitions, err := c.Partitions(ctx, base)
	exists := err == nil
	if err != nil && !errors.Is(err, pulsaradmin.ErrNotFound) {
		return facts, err
	}
	switch {
	case exists && partitions > 0 && t.Partitions == 0, exists && partitions == 0 && t.Partitions > 0 && w.stored(ctx, c, base):
		facts.Problems = append(facts.Problems, fmt.Sprintf("%s has %s on cluster %s and %s on cluster %s: its clients would not agree with it; remove it on %s, if it is empty", base, parts(t.Partitions), from, parts(partitions), to, to))
		return facts, nil
	case exists && partitions > 0 && partitions < t.Partitions:
		facts.Problems = append(facts.Problems, fmt.Sprintf("%s has %s on cluster %s and %s on cluster %s; raise them there first (`pulsar-admin topics update-partitioned-topic %s -p %d`)", base, parts(t.Partitions), from, parts(partitions), to, base, t.Partitions))
		return facts, nil
	}
	have, entries, err := c.Subscribed(ctx, base, max(partitions, t.Partitions))
	if err != nil {
		return facts, err
	}
	if create {
		if err := c.CreateTopic(ctx, base, t.Partitions); err != nil {
			return facts, err
		}
	}
	for _, s := range t.Subscriptions {
		if have[s.Name] {
			continue
		}
		facts.Missing++
		facts.Again += entries
		if len(facts.Names) < switching.MaxFailoverNames {
			facts.Names = append(facts.Names, base+" "+s.Name)
		}
		if !create {
			continue
		}
		if err := c.CreateEarliest(ctx, base, s.Name, s.Replicated, s.Properties); err != nil {
			return facts, fmt.Errorf("%s: subscription %s: %w", base, s.Name, err)
		}
		facts.Created++
	}
	return facts, nil
}

// stored tells whether a topic without partitions exists; brokers answer 0 partitions for one that does not.
func (w *FailoverWork) stored(ctx context.Context, c *pulsaradmin.Client, base string) bool {
	_, err := c.Stats(ctx, base)
	return err == nil
}

func parts(n int) string {
	switch n {
	case 0:
		return "no partitions"
	case 1:
		return "1 partition"
	}
	return fmt.Sprintf("%d partitions", n)
}
