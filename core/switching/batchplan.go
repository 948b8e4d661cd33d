package switching

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// DefaultWaves are those of a batch whose operator names none.
func DefaultWaves() []string { return []string{"1", "1%", "10%", "100%"} }

// maxWaves bounds how many there may be.
const maxWaves = 100

// WaveEnds computes how many of total topics have moved at the end of each wave. Waves that add nothing are left out; the last end is total.
func WaveEnds(waves []string, total int) ([]int, error) {
	if len(waves) > maxWaves {
		return nil, fmt.Errorf("%d waves are more than %d", len(waves), maxWaves)
	}
	var ends []int
	share, count := 0.0, 0 // of the wave before
	for _, text := range waves {
		end := 0
		if percent, ok := strings.CutSuffix(text, "%"); ok {
			p, err := strconv.ParseFloat(percent, 64)
			if err != nil || !(p > 0 && p <= 100) {
				return nil, fmt.Errorf("wave %q is no share: want more than 0%% and at most 100%%", text)
			}
			if p <= share {
				return nil, fmt.Errorf("wave %q does not grow: each says how much has moved when it is over, after %v%%", text, share)
			}
			share = p
			end = int(float64(total)*p/100 + 0.999999)
		} else {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 {
				return nil, fmt.Errorf("wave %q is no number of topics: want 1 or more, or a share such as 10%%", text)
			}
			if n <= count {
				return nil, fmt.Errorf("wave %q does not grow: each says how much has moved when it is over, after %d topics", text, count)
			}
			count, end = n, n
		}
		if end = min(end, total); len(ends) == 0 && end > 0 || len(ends) > 0 && end > ends[len(ends)-1] {
			ends = append(ends, end)
		}
	}
	if total > 0 && (len(ends) == 0 || ends[len(ends)-1] < total) {
		ends = append(ends, total)
	}
	return ends, nil
}

// JoinWaves moves the ends of waves so that no topics that belong together are parted.
func JoinWaves(ends []int, items []BatchItem) []int {
	var joined []int
	for _, end := range ends {
		for end < len(items) && items[end].Joined {
			end++
		}
		if len(joined) == 0 || end > joined[len(joined)-1] {
			joined = append(joined, end)
		}
	}
	return joined
}

// InPercent tells whether a topic is among the given share of all. Its name alone decides, or that of the topic which it is a DLQ or RETRY topic of: 10 %
// are among 20 %, whenever they are asked for.
func InPercent(topic string, percent float64, known func(string) bool) bool {
	for parent := ParentOf(topic, known); parent != ""; parent = ParentOf(topic, known) {
		topic = parent
	}
	const bits = 20
	return float64(xxhash.Sum64String(topic)>>(64-bits)) < percent/100*(1<<bits)
}

// siblingEnds are those of the names that clients make for what they could not process: TOPIC-SUBSCRIPTION-DLQ and -RETRY.
var siblingEnds = [...]string{"-DLQ", "-RETRY"}

// ParentOf is the topic for which a DLQ or RETRY topic was made: the longest name in known that it can be of; "" when it is neither, or none is known.
func ParentOf(topic string, known func(string) bool) string {
	for _, end := range siblingEnds {
		name, ok := strings.CutSuffix(topic, end)
		if !ok {
			continue
		}
		for i := strings.LastIndexByte(name, '-'); i > 0; i = strings.LastIndexByte(name[:i], '-') {
			if known(name[:i]) {
				return name[:i]
			}
		}
	}
	return ""
}

// OrderBatch puts the topics of a batch into the order in which they move: those that belong together are next to each other, and all but the first
// of them Joined. together are sets of topics that some client consumes together; topics that are not in the batch are left out of it.
//
// The order is that of the names' hashes, so that the first waves are a sample of all, and the share of a namespace that moved before comes first.
func OrderBatch(topics []string, together [][]string) []BatchItem {
	index := make(map[string]int, len(topics))
	for i, t := range topics {
		index[t] = i
	}
	leader := make([]int, len(topics)) // union-find
	for i := range leader {
		leader[i] = i
	}
	find := func(i int) int {
		for leader[i] != i {
			leader[i] = leader[leader[i]]
			i = leader[i]
		}
		return i
	}
	join := func(a, b int) { leader[find(a)] = find(b) }
	known := func(name string) bool { _, ok := index[name]; return ok }
	for i, t := range topics {
		if parent := ParentOf(t, known); parent != "" {
			join(i, index[parent])
		}
	}
	for _, set := range together {
		first := -1
		for _, t := range set {
			i, ok := index[t]
			switch {
			case !ok:
			case first < 0:
				first = i
			default:
				join(i, first)
			}
		}
	}
	groups := make(map[int][]string, len(topics))
	for i, t := range topics {
		groups[find(i)] = append(groups[find(i)], t)
	}
	type group struct {
		key    uint64
		topics []string
	}
	ordered := make([]group, 0, len(groups))
	for _, g := range groups {
		slices.Sort(g) // a topic comes before its DLQ
		ordered = append(ordered, group{xxhash.Sum64String(g[0]), g})
	}
	slices.SortFunc(ordered, func(a, b group) int {
		return cmp.Or(cmp.Compare(a.key, b.key), strings.Compare(a.topics[0], b.topics[0]))
	})
	items := make([]BatchItem, 0, len(topics))
	for _, g := range ordered {
		for i, t := range g.topics {
			items = append(items, BatchItem{Topic: t, Joined: i > 0})
		}
	}
	return items
}

// Outside names the topics that belong together with one of the batch and are not in it, each with the one that it belongs to, at most limit. all are
// the names that the clusters know.
func Outside(items []BatchItem, all []string, together [][]string, limit int) []string {
	in := make(map[string]bool, len(items))
	for _, it := range items {
		in[it.Topic] = true
	}
	known := make(map[string]bool, len(all))
	for _, t := range all {
		known[t] = true
	}
	found := map[string]string{}
	for _, t := range all {
		parent := ParentOf(t, func(name string) bool { return known[name] })
		switch {
		case parent == "" || in[t] == in[parent]:
		case in[parent]:
			found[t] = fmt.Sprintf("%s is not in the batch: it takes what clients of %s could not process, and stays where it is", t, parent)
		default:
			found[parent] = fmt.Sprintf("%s is not in the batch, but %s is, which takes what its clients could not process", parent, t)
		}
	}
	for _, set := range together {
		inside := slices.IndexFunc(set, func(t string) bool { return in[t] })
		if inside < 0 {
			continue
		}
		for _, t := range set {
			if !in[t] && found[t] == "" {
				found[t] = fmt.Sprintf("%s is not in the batch: a client consumes it together with %s", t, set[inside])
			}
		}
	}
	names := make([]string, 0, len(found))
	for t := range found {
		names = append(names, t)
	}
	slices.Sort(names)
	texts := make([]string, 0, min(len(names), limit))
	for i, t := range names {
		if i == limit {
			texts = append(texts, fmt.Sprintf("and %d more that belong together with topics of the batch", len(names)-limit))
			break
		}
		texts = append(texts, found[t])
	}
	return texts
}
