package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"pointsman/core/switching"
)

// This file keeps, as documents, what has to do with dead clusters: orders to move their topics, what is judged of each pair of clusters, and what
// was last seen of each cluster.

// The kinds of the documents.
const (
	kindOrders = "failovers"      // switching.Failover, not over
	kindOver   = "failovers-over" // the same, over
	kindPairs  = "failover-pairs" // switching.PairState
	kindSeen   = "seen"           // switching.Seen: head and parts
)

// maxFailoversKept is how many orders that are over are kept.
const maxFailoversKept = 100

// Failovers lists the orders that are not over, oldest first.
func Failovers(ctx context.Context, s Store) ([]switching.Failover, error) {
	return failovers(ctx, s, kindOrders)
}

// FailoversOver lists those that are, oldest first; the oldest of all are forgotten.
func FailoversOver(ctx context.Context, s Store) ([]switching.Failover, error) {
	return failovers(ctx, s, kindOver)
}

func failovers(ctx context.Context, s Store, kind string) ([]switching.Failover, error) {
	docs, err := s.Documents(ctx, kind)
	if err != nil {
		return nil, err
	}
	all := make([]switching.Failover, 0, len(docs))
	for _, d := range docs {
		var o switching.Failover
		if err := json.Unmarshal(d.Data, &o); err != nil {
			return nil, fmt.Errorf("failover %s cannot be read: %w", d.Name, err)
		}
		o.Rev = d.Rev
		all = append(all, o)
	}
	slices.SortStableFunc(all, func(a, b switching.Failover) int { return a.Asked.Compare(b.Asked) })
	return all, nil
}

// Failover reads an order, over or not; ErrNotFound.
func Failover(ctx context.Context, s Store, id string) (switching.Failover, error) {
	for _, kind := range []string{kindOver, kindOrders} { // one that ends in between is in both
		all, err := failovers(ctx, s, kind)
		if err != nil {
			return switching.Failover{}, err
		}
		if i := slices.IndexFunc(all, func(o switching.Failover) bool { return o.ID == id }); i >= 0 {
			return all[i], nil
		}
	}
	return switching.Failover{}, fmt.Errorf("failover %s: %w", id, ErrNotFound)
}

// PutFailover writes the next revision of an order; Rev is that of the one before, 0 for a new one, and is counted up. One that is over moves to those
// that are kept.
func PutFailover(ctx context.Context, s Store, o *switching.Failover) error {
	next := *o
	next.Rev++
	data, err := json.Marshal(next)
	if err != nil {
		return err
	}
	if err := s.PutDocument(ctx, kindOrders, Document{Name: o.ID, Rev: next.Rev, Data: data}); err != nil {
		return err
	}
	o.Rev = next.Rev
	if !o.State.Over() {
		return nil
	}
	return closeFailover(ctx, s, *o, data)
}

// closeFailover keeps an order that is over apart from the others.
func closeFailover(ctx context.Context, s Store, o switching.Failover, data []byte) error {
	err := s.PutDocument(ctx, kindOver, Document{Name: o.ID, Rev: 1, Data: data})
	if err != nil && !errors.Is(err, ErrConflict) { // it was written before
		return err
	}
	if err := s.DropDocument(ctx, kindOrders, o.ID); err != nil {
		return err
	}
	over, err := FailoversOver(ctx, s)
	if err != nil {
		return err
	}
	for len(over) > maxFailoversKept {
		if err := s.DropDocument(ctx, kindOver, over[0].ID); err != nil {
			return err
		}
		over = over[1:]
	}
	return nil
}

// CloseFailover is for an order that is over and still among the others, because its last writer ended too early.
func CloseFailover(ctx context.Context, s Store, o switching.Failover) error {
	data, err := json.Marshal(o)
	if err != nil {
		return err
	}
	return closeFailover(ctx, s, o, data)
}

// FailoverPairs reads what is judged of all pairs, with the revisions for PutFailoverPair by from and to.
func FailoverPairs(ctx context.Context, s Store) ([]switching.PairState, map[[2]string]uint64, error) {
	docs, err := s.Documents(ctx, kindPairs)
	if err != nil {
		return nil, nil, err
	}
	var all []switching.PairState
	revs := map[[2]string]uint64{}
	for _, d := range docs {
		var p switching.PairState
		if err := json.Unmarshal(d.Data, &p); err != nil {
			return nil, nil, fmt.Errorf("what is judged of the clusters %s cannot be read: %w", d.Name, err)
		}
		all = append(all, p)
		revs[[2]string{p.From, p.To}] = d.Rev
	}
	return all, revs, nil
}

// PutFailoverPair writes it over the revision rev, 0 for none.
func PutFailoverPair(ctx context.Context, s Store, p switching.PairState, rev uint64) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return s.PutDocument(ctx, kindPairs, Document{Name: p.From + "--to--" + p.To, Rev: rev + 1, Data: data})
}

// LiveHealth is what each live proxy says of the clusters.
func LiveHealth(members []Proxy) []map[string]switching.ClusterHealth {
	var live []map[string]switching.ClusterHealth
	for _, m := range members {
		if m.Live {
			live = append(live, m.Health)
		}
	}
	return live
}

// SeenRevisions are the stored revisions of what was seen of one cluster, and the bytes of its parts: what has not changed is not written again.
type SeenRevisions struct {
	revs  map[string]uint64
	parts map[string]string
}

// ReadSeen reads what was last seen of a cluster; At is zero when nothing was.
func ReadSeen(ctx context.Context, s Store, cluster string) (switching.Seen, SeenRevisions, error) {
	known := SeenRevisions{revs: map[string]uint64{}, parts: map[string]string{}}
	docs, err := s.Documents(ctx, kindSeen)
	if err != nil {
		return switching.Seen{}, known, err
	}
	var head []byte
	for _, d := range docs {
		if d.Name == cluster {
			head = d.Data
		} else if of, _, ok := cutPart(d.Name); !ok || of != cluster {
			continue
		} else {
			known.parts[d.Name] = string(d.Data)
		}
		known.revs[d.Name] = d.Rev
	}
	if head == nil {
		return switching.Seen{Cluster: cluster}, known, nil
	}
	seen, err := switching.DecodeSeen(head, func(i int) []byte {
		if text, ok := known.parts[partName(cluster, i)]; ok {
			return []byte(text)
		}
		return nil
	})
	return seen, known, err
}

// WriteSeen writes what has changed, the parts before the head, and removes parts that there are no more.
func WriteSeen(ctx context.Context, s Store, seen *switching.Seen, known SeenRevisions) error {
	head, parts, err := seen.Encode()
	if err != nil {
		return err
	}
	put := func(name string, data []byte) error {
		if err := s.PutDocument(ctx, kindSeen, Document{Name: name, Rev: known.revs[name] + 1, Data: data}); err != nil {
			return err
		}
		known.revs[name]++
		return nil
	}
	for i, data := range parts {
		name := partName(seen.Cluster, i)
		if known.parts[name] == string(data) && known.revs[name] > 0 {
			continue
		}
		if err := put(name, data); err != nil {
			return err
		}
		known.parts[name] = string(data)
	}
	if err := put(seen.Cluster, head); err != nil {
		return err
	}
	for name := range known.parts {
		if _, i, _ := cutPart(name); i >= len(parts) {
			if err := s.DropDocument(ctx, kindSeen, name); err != nil {
				return err
			}
			delete(known.parts, name)
			delete(known.revs, name)
		}
	}
	return nil
}

// partSeparator lies between the name of a cluster and the number of a part; no name of a cluster has a comma.
const partSeparator = ",part-"

func partName(cluster string, i int) string {
	return fmt.Sprintf("%s%s%02d", cluster, partSeparator, i)
}

func cutPart(name string) (cluster string, i int, ok bool) {
	cluster, number, ok := strings.Cut(name, partSeparator)
	if _, err := fmt.Sscanf(number, "%d", &i); err != nil {
		return "", 0, false
	}
	return cluster, i, ok
}
