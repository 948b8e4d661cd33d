package session

import (
	"maps"
	"slices"
)

// Together are the sets of topics (base names, sorted) that one client consumes under one subscription name on one connection, of those that match accepts:
// they move at the same time where that can be. A client has a connection for each broker, so what it consumes from several of them is not found. It looks
// at every handle; the control API asks once for a batch.
func (sh *Shard) Together(match func(base string) bool) [][]string {
	type client struct {
		s   *Session
		sub string
	}
	topics := map[client]map[string]bool{}
	for base, t := range sh.index {
		if !match(base) {
			continue
		}
		for _, h := range t.list {
			if h.producer || h.sub == "" {
				continue
			}
			c := client{h.s, h.sub}
			if topics[c] == nil {
				topics[c] = map[string]bool{}
			}
			topics[c][base] = true
		}
	}
	var sets [][]string
	for _, set := range topics {
		if len(set) > 1 {
			sets = append(sets, slices.Sorted(maps.Keys(set)))
		}
	}
	slices.SortFunc(sets, slices.Compare)
	return slices.CompactFunc(sets, slices.Equal)
}
