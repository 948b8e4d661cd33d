package session

import (
	"maps"
	"math/bits"
	"slices"
	"sort"
	"time"

	"pointsman/codec"
)

// This file remembers of what a subscription was given which messages are copies, and of what. A consumer that is behind still reads what was published to the
// other cluster when its topic comes from there; if the topic goes back before that is acknowledged, the other cluster delivers the originals, which do not say
// that they have copies. So what was acknowledged of a copy is remembered as acknowledged of the original. Only subscriptions of topics that have moved pay for it.

// copyBlock tells the originals of copiesPerBlock places side by side, which replicators keep side by side.
type copyBlock struct {
	at      Position // the first place, whether or not there is a copy
	cluster string   // of the originals
	of      Position // what a copy at the first place would be of: its entry may lie below 0
	has     uint64   // the places that are known to have a copy, the first one in the lowest bit
}

const (
	copiesPerBlock     = 64
	maxCopyBlocks      = 1024    // of a subscription on one cluster: some 65,000 messages that a consumer may have unacknowledged
	maxCopyBlocksOfAll = 1 << 15 // of one shard
)

// blockOf splits a place into that of its block and the one within.
func blockOf(at Position) (start Position, place uint64) {
	place = at.Entry % copiesPerBlock
	return Position{at.Ledger, at.Entry - place}, place
}

// copies are those that a subscription was given on one cluster, by place. Loop-owned.
type copies struct {
	blocks []copyBlock
	last   time.Time // when one was given
	told   time.Time // when the other loops were told of them
}

// behind is the index of the first block behind a place.
func (c *copies) behind(at Position) int {
	if n := len(c.blocks); n == 0 || !at.less(c.blocks[n-1].at) {
		return n
	}
	return sort.Search(len(c.blocks), func(i int) bool { return at.less(c.blocks[i].at) })
}

// add notes copies. It tells whether they took a new block.
func (c *copies) add(b copyBlock) bool {
	i := c.behind(b.at)
	for j := i - 1; j >= 0 && c.blocks[j].at == b.at; j-- {
		if known := &c.blocks[j]; known.of == b.of && known.cluster == b.cluster {
			known.has |= b.has
			return false
		}
	}
	c.blocks = slices.Insert(c.blocks, i, b)
	return true
}

// original is what the message at a place is a copy of; ok is false when it is not known to be one.
func (c *copies) original(at Position) (cluster string, of Position, ok bool) {
	if c == nil {
		return "", Position{}, false
	}
	start, place := blockOf(at)
	for j := c.behind(start) - 1; j >= 0 && c.blocks[j].at == start; j-- {
		if b := &c.blocks[j]; b.has>>place&1 == 1 {
			return b.cluster, Position{b.of.Ledger, b.of.Entry + place}, true
		}
	}
	return "", Position{}, false
}

// before calls f for each cluster that copies before a place are from, with the last original of them: copies from one cluster keep its order.
func (c *copies) before(at Position, f func(cluster string, last Position)) {
	if c == nil {
		return
	}
	start, place := blockOf(at)
	last := map[string]Position{}
	for _, b := range c.blocks[:c.behind(start)] {
		if b.at == start {
			b.has &= 1<<place - 1
		}
		if of := (Position{b.of.Ledger, b.of.Entry + uint64(bits.Len64(b.has)) - 1}); b.has != 0 && last[b.cluster].less(of) {
			last[b.cluster] = of
		}
	}
	for _, cluster := range slices.Sorted(maps.Keys(last)) {
		f(cluster, last[cluster])
	}
}

// noteCopy remembers that h is given a copy.
func (l *leg) noteCopy(now time.Time, h *handle, at Position, src codec.Source) {
	cs := &l.s.sh.carrying
	c := h.carried
	if c == nil {
		if len(cs.subs) >= maxCarried/2 {
			return // the rest is for acknowledgements
		}
		c = cs.of(now, h.key())
		h.carried = c
	}
	start, place := blockOf(at)
	b := copyBlock{at: start, of: Position{src.Ledger, src.Entry - place}, has: 1 << place}
	known := c.copies[l.cluster]
	if known != nil && len(known.blocks) > 0 {
		if last := &known.blocks[len(known.blocks)-1]; last.at == b.at && last.of == b.of && last.cluster == string(src.Cluster) {
			last.has |= b.has
			known.last = now
			return
		}
	}
	cluster, ok := l.s.sh.cfg.Clusters().Get(string(src.Cluster))
	if !ok {
		return // no topic of ours goes there
	}
	b.cluster = cluster.Name()
	cs.addCopies(now, c, l.cluster, b)
}

// addCopies notes copies that a subscription was given on a cluster. When there is no room, its oldest ones go: they would be delivered again.
func (cs *carrying) addCopies(now time.Time, c *carried, on string, blocks ...copyBlock) {
	known := c.copies[on]
	if known == nil {
		if c.copies == nil {
			c.copies = make(map[string]*copies)
		}
		known = new(copies)
		c.copies[on] = known
	}
	known.last = now
	for _, b := range blocks {
		if known.add(b) {
			cs.blocks++
		}
		if len(known.blocks) > maxCopyBlocks || cs.blocks > maxCopyBlocksOfAll {
			n := max(1, len(known.blocks)/4)
			known.blocks = slices.Delete(known.blocks, 0, n)
			cs.blocks -= n
		}
	}
}

// forgetCopies forgets those of clusters where none was given since a time. It tells whether there are others.
func (cs *carrying) forgetCopies(c *carried, since time.Time) bool {
	for on, known := range c.copies {
		if !known.last.After(since) {
			cs.blocks -= len(known.blocks)
			delete(c.copies, on)
		}
	}
	return len(c.copies) > 0
}

// tellPause is the shortest time between two tellings: many consumers of a subscription may be closed one after the other.
const tellPause = time.Second

// tellCopies tells the other loops what h was given copies of: its client may come back to one of them, and acknowledge them there.
func (s *Session) tellCopies(now time.Time, h *handle) {
	if h.carried == nil {
		return
	}
	if known := h.carried.copies[h.leg.cluster]; known != nil && known.last.After(known.told) && now.Sub(known.told) >= tellPause {
		known.told = now
		s.sh.tellOthers(OldAcks{Topic: h.full, Subscription: h.sub, Cluster: h.leg.cluster, copies: slices.Clone(known.blocks)})
	}
}
