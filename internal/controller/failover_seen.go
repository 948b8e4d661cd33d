package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

const (
	// sampleTimeout bounds one look at a cluster, and what is written of it.
	sampleTimeout = 2 * time.Minute
	// maxAsked is how many topics of one look are asked for what the brokers' lists do not tell: whether a subscription is durable.
	maxAsked = 200
	// ownSubscription is made by brokers themselves.
	ownSubscription = "__compaction"
)

// sample looks at one cluster again and again, and writes down what matters when it is dead.
func (f *Failovers) sample(ctx context.Context, name string) {
	ticker := time.NewTicker(f.cfg.SampleEvery)
	defer ticker.Stop()
	said, readers := "", map[string]time.Time{}
	for {
		err := f.look(ctx, name, readers)
		if text := errText(err); text != said && ctx.Err() == nil {
			if said = text; err != nil {
				f.cfg.Log.Warn("what is known of a cluster, should it die, grows old: it cannot be looked at now", "cluster", name, "err", err)
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// look is one sample. What a cluster that does not answer was seen to have is left as it is. readers are the subscriptions that are known not to be durable, and
// since when: "topic subscription".
func (f *Failovers) look(ctx context.Context, name string, readers map[string]time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	before, known, err := store.ReadSeen(ctx, f.cfg.Store, name)
	if err != nil {
		return err
	}
	table := f.cfg.Table()
	mine := func(base string) bool {
		t, err := route.ParseTopic(base)
		return err == nil && !t.System() && table.Decide(t, f.cfg.DefaultCluster).Cluster == name
	}
	topics, trouble := f.topics(ctx, name, mine)
	if len(topics) == 0 && trouble != nil {
		return trouble
	}
	asked := f.durable(ctx, name, topics, &before, readers)
	seen := before.Merge(time.Now().UTC().Truncate(time.Millisecond), topics, errText(errors.Join(trouble, asked)), mine)
	return errors.Join(trouble, asked, store.WriteSeen(ctx, f.cfg.Store, &seen, known))
}

// topics is what the brokers of a cluster count, put together by base name. Of a subscription with consumers it is not known whether it is durable; one
// without would not be there if it were not.
func (f *Failovers) topics(ctx context.Context, name string, mine func(base string) bool) ([]switching.SeenTopic, error) {
	all := map[string]*switching.SeenTopic{}
	subs := map[string]map[string]bool{} // by topic and name: whether it is unsure
	err := f.cfg.Clients[name].BrokerTopics(ctx, func(c pulsaradmin.TopicCounts) {
		t, err := route.ParseTopic(c.Topic)
		if err != nil || !mine(t.Base()) {
			return
		}
		s := all[t.Base()]
		if s == nil {
			s = &switching.SeenTopic{Topic: t.Base()}
			all[t.Base()], subs[t.Base()] = s, map[string]bool{}
		}
		s.Partitions = max(s.Partitions, t.Partition()+1)
		for to, r := range c.Replication {
			if s.Replication == nil {
				s.Replication = map[string]switching.SeenReplication{}
			}
			sum := s.Replication[to]
			sum.Backlog, sum.Delay = sum.Backlog+r.Backlog, max(sum.Delay, r.Delay)
			s.Replication[to] = sum
		}
		for sub, counts := range c.Subscriptions {
			if sub != ownSubscription {
				unsure, seen := subs[t.Base()][sub]
				subs[t.Base()][sub] = len(counts.Consumers) > 0 && (unsure || !seen)
			}
		}
	})
	topics := make([]switching.SeenTopic, 0, len(all))
	for base, s := range all {
		for sub, unsure := range subs[base] {
			s.Subscriptions = append(s.Subscriptions, switching.SeenSubscription{Name: sub, Unsure: unsure})
		}
		slices.SortFunc(s.Subscriptions, func(a, b switching.SeenSubscription) int { return strings.Compare(a.Name, b.Name) })
		topics = append(topics, *s)
	}
	return topics, err
}

// durable finds out, for what is new, what the brokers' lists do not tell: how many partitions there are, and which subscriptions end with their consumer;
// those are left out. What it does not come to stays unsure, and is asked for at the next look.
func (f *Failovers) durable(ctx context.Context, name string, topics []switching.SeenTopic, before *switching.Seen, readers map[string]time.Time) error {
	var faults []error
	now, asked := time.Now(), 0
	for reader, since := range readers {
		if now.Sub(since) > readersKept || len(readers) > maxReaders {
			delete(readers, reader)
		}
	}
	for i := range topics {
		t := &topics[i]
		old, _, known := before.Topic(t.Topic)
		t.Partitions = max(t.Partitions, old.Partitions)
		open := !known && t.Partitions > 0
		t.Subscriptions = slices.DeleteFunc(t.Subscriptions, func(s switching.SeenSubscription) bool {
			_, reader := readers[t.Topic+" "+s.Name]
			return s.Unsure && reader
		})
		for k := range t.Subscriptions {
			s := &t.Subscriptions[k]
			if at := slices.IndexFunc(old.Subscriptions, func(o switching.SeenSubscription) bool { return o.Name == s.Name && !o.Unsure }); at >= 0 {
				*s = old.Subscriptions[at]
				continue
			}
			open = true
		}
		if !open || asked == maxAsked || ctx.Err() != nil {
			continue
		}
		asked++
		if err := f.ask(ctx, name, t, func(sub string) { readers[t.Topic+" "+sub] = now }); err != nil && len(faults) < 3 {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

const (
	// readersKept is how long a subscription that was not durable is thought to stay so.
	readersKept = 10 * time.Minute
	maxReaders  = 50_000
)

// ask looks at one topic alone.
func (f *Failovers) ask(ctx context.Context, name string, t *switching.SeenTopic, reader func(sub string)) error {
	c := f.cfg.Clients[name]
	if t.Partitions > 0 {
		n, err := c.Partitions(ctx, t.Topic)
		if err != nil {
			return err
		}
		t.Partitions = max(t.Partitions, n)
	}
	left := map[string]bool{} // not found yet; most often the first partition has all
	for _, s := range t.Subscriptions {
		left[s.Name] = true
	}
	for _, part := range pulsaradmin.PartitionNames(t.Topic, t.Partitions) {
		if len(left) == 0 {
			return nil
		}
		stats, err := c.Stats(ctx, part)
		if errors.Is(err, pulsaradmin.ErrNotFound) {
			continue // nobody has used that partition
		}
		if err != nil {
			return err
		}
		t.Subscriptions = slices.DeleteFunc(t.Subscriptions, func(s switching.SeenSubscription) bool {
			found, ok := stats.Subscriptions[s.Name]
			if ok && !found.Durable {
				reader(s.Name)
				delete(left, s.Name)
			}
			return ok && !found.Durable
		})
		for k := range t.Subscriptions {
			s := &t.Subscriptions[k]
			if found, ok := stats.Subscriptions[s.Name]; ok {
				s.Replicated, s.Properties, s.Unsure = found.Replicated, smallProperties(found.Properties), false
				delete(left, s.Name)
			}
		}
	}
	return nil
}

// smallProperties keeps the properties of a subscription if they are no burden to the store.
func smallProperties(p map[string]string) map[string]string {
	size := 0
	for k, v := range p {
		size += len(k) + len(v)
	}
	if size == 0 || size > 1024 {
		return nil
	}
	return p
}
