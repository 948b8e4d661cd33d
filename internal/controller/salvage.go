package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

const (
	// salvageParallel is how many partitions are looked at at once.
	salvageParallel = 8
	// salvageApart is between the two readings that tell whether a replicator goes on.
	salvageApart = time.Second
	// maxSalvaged bounds the topics of one look.
	maxSalvaged = 10_000
)

// Salvage lists what the old cluster, which is back, holds of topics that moved and that the new one never got. Nothing is changed anywhere. What ctx leaves no
// time for is among the unread.
func Salvage(ctx context.Context, clients map[string]*pulsaradmin.Client, r switching.SalvageRequest) (switching.Salvage, error) {
	s := switching.Salvage{From: r.From, To: r.To, Topics: []switching.SalvageTopic{}, At: time.Now().UTC()}
	from, to := clients[r.From], clients[r.To]
	for name, c := range map[string]*pulsaradmin.Client{r.From: from, r.To: to} {
		if c == nil {
			return s, fmt.Errorf("cluster %s %w; set clusters.%s.web_url", name, ErrNoAdmin, name)
		}
	}
	topics, err := salvageTopics(ctx, from, r)
	if err != nil {
		return s, err
	}
	var mu sync.Mutex
	unread := func(topic string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if len(s.Unread) < switching.MaxFailoverNames {
			s.Unread = append(s.Unread, topic+": "+err.Error())
		}
	}
	var group sync.WaitGroup
	free := make(chan struct{}, salvageParallel)
	for _, base := range topics {
		n, err := from.Partitions(ctx, base)
		if err != nil {
			if !errors.Is(err, pulsaradmin.ErrNotFound) {
				unread(base, err)
			}
			continue // the old cluster never had it
		}
		for _, name := range pulsaradmin.PartitionNames(base, n) {
			free <- struct{}{}
			group.Go(func() {
				defer func() { <-free }()
				t, err := salvageOne(ctx, name, from, to, r.Limit)
				switch {
				case errors.Is(err, pulsaradmin.ErrNotFound): // nobody has used that partition
				case err != nil:
					unread(name, err)
				default:
					mu.Lock()
					defer mu.Unlock()
					s.Topics = append(s.Topics, t)
				}
			})
		}
	}
	group.Wait()
	slices.SortFunc(s.Topics, func(a, b switching.SalvageTopic) int { return strings.Compare(a.Topic, b.Topic) })
	for i := range s.Topics {
		t := &s.Topics[i]
		s.Missing += t.Missing
		t.Messages = t.Messages[:min(len(t.Messages), r.Limit-s.Listed)]
		s.Listed += len(t.Messages)
	}
	return s, nil
}

// salvageTopics are the topics that are named, and those of the rules that the old cluster has.
func salvageTopics(ctx context.Context, from *pulsaradmin.Client, r switching.SalvageRequest) ([]string, error) {
	topics := slices.Clone(r.Topics)
	for _, scope := range r.Scopes {
		tenants := []string{scope}
		switch {
		case strings.Contains(scope, "/"):
			tenants = nil
			found, err := from.Topics(ctx, scope)
			if err != nil && !errors.Is(err, pulsaradmin.ErrNotFound) {
				return nil, err
			}
			topics = append(topics, found...)
		case scope == "":
			all, err := from.Tenants(ctx)
			if err != nil {
				return nil, err
			}
			tenants = all
		}
		for _, tenant := range tenants {
			namespaces, err := from.Namespaces(ctx, tenant)
			if err != nil {
				return nil, err
			}
			for _, ns := range namespaces {
				if t, err := route.ParseTopic("persistent://" + ns + "/x"); err != nil || t.System() {
					continue
				}
				found, err := from.Topics(ctx, ns)
				if err != nil && !errors.Is(err, pulsaradmin.ErrNotFound) {
					return nil, err
				}
				topics = append(topics, found...)
			}
		}
	}
	slices.Sort(topics)
	topics = slices.DeleteFunc(slices.Compact(topics), func(base string) bool { return !r.Decided(base) })
	if len(topics) > maxSalvaged {
		return nil, fmt.Errorf("%d topics are more than the %d that are looked at at once: look at single switches of the failover (`pointsman switch list`)", len(topics), maxSalvaged)
	}
	return topics, nil
}

func salvageOne(ctx context.Context, topic string, from, to *pulsaradmin.Client, limit int) (switching.SalvageTopic, error) {
	t := switching.SalvageTopic{Topic: topic, Replication: "none", Messages: []switching.SalvageMessage{}}
	if _, err := from.Tail(ctx, topic); err != nil {
		return t, err
	}
	p := pulsaradmin.NewPair(topic, from, to)
	defer p.Close()
	if err := p.Load(ctx); err != nil {
		return t, errors.New(err.Error()) // also one that only the new cluster lacks is not read
	}
	absent, err := p.Absent(ctx, limit)
	if err != nil {
		return t, err
	}
	t.Missing, t.AtLeast = absent.Count, absent.AtLeast
	for _, e := range absent.Entries {
		t.Messages = append(t.Messages, switching.SalvageMessage{
			Position: e.Position.String(), Producer: e.Producer, Sequence: e.Sequence, Published: time.UnixMilli(e.Time).UTC(), Key: e.Key, Bytes: e.Bytes, Messages: e.Messages,
		})
	}
	before, after, err := from.Progress(ctx, []string{topic}, to.Cluster(), salvageApart)
	if err != nil {
		return t, err
	}
	if !after[0].Exists {
		return t, nil
	}
	t.Replication = "running"
	if alive, why := pulsaradmin.Alive(before[0], after[0]); !alive {
		t.Replication = why
	}
	return t, nil
}
