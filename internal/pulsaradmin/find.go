package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// How tells how sure the answer of a search is.
type How string

// The ways in which a position on the other cluster was found, the surest first.
const (
	// ByOrigin: the copy says itself where it comes from. Exact.
	ByOrigin How = "source position"
	// ByProducer: producer name, sequence id and time of publishing are equal. Exact unless a producer repeats itself within a millisecond.
	ByProducer How = "producer and sequence id"
	// ByTime: the first entry that was not published earlier. Messages before it may come again, none is left out as long as the producers' clocks agree.
	ByTime How = "publish time"
	// AtEnd: nothing follows on either cluster; the position after the last copy.
	AtEnd How = "end of what was copied"
	// NotThere: the other cluster has no copy, though it has later ones: retention removed it, or it was never replicated. The position is that of the
	// next one that exists.
	NotThere How = "no copy"
)

// Exact tells whether delivery from the position on loses and repeats nothing.
func (h How) Exact() bool { return h == ByOrigin || h == ByProducer || h == AtEnd }

// Bare tells that copies do not say where they come from, so that they are known by what their producers wrote. Acknowledgements that clients give while
// the topic moves cannot be carried then.
func (h How) Bare() bool { return h == ByProducer || h == ByTime }

// Found is where something lies on the other cluster.
type Found struct {
	// Position is the first one to be delivered.
	Position Position
	How      How
	// By is How, and with AtEnd the way in which the last copy was found.
	By How
	// Entry is the entry that was looked for, as the first cluster has it; its Position is NoPosition with AtEnd.
	Entry Entry
	// Next is the position right after the copy: where somebody who had the entry goes on.
	Next Position
}

// Pair is one partition on two clusters: the one that has it and the one that it goes to. It remembers what it has read, so
// that a second search costs little. It may be used by several goroutines, but not while Load runs.
type Pair struct {
	Topic    string
	from, to *view
	back     *Pair // the other direction, over the same views

	mu     sync.Mutex
	given  map[string]given // guarded by mu: by subscription, see NoteGiven
	sent   Position         // guarded by mu: up to where the new cluster had stored what the old one replicates to it, when Snapshot looked; NoPosition: not known
	absent []Range          // guarded by mu: positions of the new cluster, from After on and before Last, whose messages the old one does not have
}

// NewPair makes the pair of one partition. Load comes before everything else.
func NewPair(topic string, from, to *Client) *Pair {
	return newPair(topic, &remote{Client: from, topic: topic}, &remote{Client: to, topic: topic})
}

func newPair(topic string, from, to side) *Pair {
	p := &Pair{Topic: topic, from: newView(from), to: newView(to), sent: NoPosition}
	p.back = &Pair{Topic: topic, from: p.to, to: p.from, back: p, sent: NoPosition}
	return p
}

// Load reads both logs and all cursors as they are now.
func (p *Pair) Load(ctx context.Context) error {
	p.absent = nil // what was not there may have come
	return each(2, 2, func(i int) error {
		v := []*view{p.from, p.to}[i]
		err := v.load(ctx)
		if errors.Is(err, ErrNotFound) {
			return fmt.Errorf("%s does not exist on cluster %s, so that nothing can be carried: create it there, or its missing partitions: %w", p.Topic, v.Cluster(), err)
		}
		return err
	})
}

// Close ends the connections that the pair has open.
func (p *Pair) Close() {
	p.from.side.Close()
	p.to.side.Close()
}

// Find is where the first message at or after pos lies on the other cluster.
func (p *Pair) Find(ctx context.Context, pos Position) (Found, error) {
	i := p.from.in.Index(pos)
	e, ok, err := p.from.firstData(ctx, i)
	if err != nil {
		return Found{}, err
	}
	if !ok {
		return p.end(ctx)
	}
	return p.copyOf(ctx, e)
}

// end is the position after the other cluster's copy of the last message.
func (p *Pair) end(ctx context.Context) (Found, error) {
	nothing := Entry{Position: NoPosition, Source: NoPosition}
	e, ok, err := p.from.last(ctx)
	if err != nil {
		return Found{}, err
	}
	if !ok { // nothing was ever published here, or all of it is gone: nothing that the other has can have been acknowledged here
		at := p.to.in.End()
		if first, any := p.to.in.First(); any && p.from.in.Last.Entry < 0 {
			at = first
		}
		return Found{Position: at, How: AtEnd, By: AtEnd, Entry: nothing, Next: at}, nil
	}
	f, err := p.copyOf(ctx, e)
	if err != nil {
		return Found{}, err
	}
	if f.How == NotThere || f.How == ByTime {
		return Found{Position: f.Position, How: f.How, By: f.How, Entry: nothing, Next: f.Position}, nil
	}
	return Found{Position: f.Next, How: AtEnd, By: f.How, Entry: nothing, Next: f.Next}, nil
}

// ErrBehind says that the other cluster does not have the message yet.
type ErrBehind struct {
	Topic    string
	From, To string
	Origin   string // the cluster that it was published on, which replicates it
	Position Position
}

func (e *ErrBehind) Error() string {
	return fmt.Sprintf("%s: cluster %s has no copy of the message at %v of cluster %s, nor of any later one; wait until replication from %s to %s has passed it, or look why it does not (backlog of %s%s)",
		e.Topic, e.To, e.Position, e.From, e.Origin, e.To, replicatorCursor, e.To)
}

func (p *Pair) behind(e *Entry) error {
	return &ErrBehind{p.Topic, p.from.Cluster(), p.to.Cluster(), e.from(p.from.Cluster()), e.Position}
}

// copyOf finds the other cluster's copy of an entry.
func (p *Pair) copyOf(ctx context.Context, e Entry) (Found, error) {
	found := func(at Position, how How) (Found, error) {
		f := Found{Position: at, How: how, By: how, Entry: e, Next: Position{at.Ledger, at.Entry + 1}}
		if how == NotThere || how == ByTime {
			f.Next = at
		}
		return f, nil
	}
	if e.From == p.to.Cluster() && e.Source != NoPosition { // it was published there: its copy here says where
		if p.to.in.Has(e.Source) {
			return found(e.Source, ByOrigin)
		}
		if next, ok := p.to.in.Next(e.Source); ok {
			return found(next, NotThere)
		}
		return found(p.to.in.End(), NotThere)
	}
	if at, ok := p.to.lookup(&e, p.from.Cluster()); ok && p.to.in.Has(at) {
		if _, exact := e.origin(p.from.Cluster()); exact {
			if copied, err := p.to.at(ctx, at); err == nil && copied.Source != NoPosition {
				return found(at, ByOrigin)
			}
		}
		return found(at, ByProducer)
	}
	if len(p.to.in.Ledgers) == 0 {
		return Found{}, p.behind(&e)
	}
	guess, err := p.to.AtTime(ctx, e.Time)
	if err != nil {
		return Found{}, err
	}
	if origin, ok := e.origin(p.from.Cluster()); ok {
		at, how, _, err := p.search(ctx, origin, guess)
		if err != nil {
			return Found{}, err
		}
		switch how {
		case ByOrigin, NotThere:
			return found(at, how)
		case AtEnd:
			return Found{}, p.behind(&e)
		}
	}
	return p.byPrint(ctx, e, guess, found) // copies do not say where they come from, or there is none
}

// search finds the copy of an entry by its origin: copies from one cluster lie in the order that they had there, so that comparing one tells on
// which side to go on. how is AtEnd when all of them come before, and "" as soon as a copy does not say where it comes from: then all of them may not, and
// looking for one that does would mean reading the whole log. lo is the index right behind the last copy that is known to come before it, whatever else is returned.
func (p *Pair) search(ctx context.Context, want key, guess Position) (at Position, how How, lo int64, err error) {
	var after *Entry // the first known copy that does not come before the wanted one
	seen, bare := false, false
	hi := p.to.in.Len() // copies below lo come before it, those from hi on do not
	next := min(p.to.in.Index(guess), hi-1)
	// judge narrows the interval by the entry with index i and tells whether it is a copy from that cluster.
	judge := func(e *Entry, i int64) bool {
		k, exact := e.origin(p.to.Cluster())
		switch {
		case k.cluster != want.cluster:
			return false
		case !exact:
			bare = true
			return true
		}
		seen = true
		if k.position.Before(want.position) {
			lo = i + 1
		} else {
			hi, after = i, e
		}
		if k.cluster == p.from.Cluster() { // copies lie as far apart as their originals, apart from what is between
			next = i + p.from.in.Index(want.position) - p.from.in.Index(k.position)
		}
		return true
	}
	for step := 0; hi-lo > blockSize/4; step++ {
		if step > maxLeaps || next < lo || next >= hi {
			next = lo + (hi-lo)/2
		}
		judged := false
		// Entries from elsewhere may be in the way: look further and further to both sides.
		for reach := int64(0); !judged && reach < hi-lo; reach = max(1, 2*reach) {
			for _, i := range [2]int64{next + reach, next - reach} {
				if judged || i < lo || i >= hi {
					continue
				}
				e, err := p.to.at(ctx, p.to.in.At(i))
				if err != nil {
					return NoPosition, "", lo, err
				}
				judged = judge(&e, i)
			}
		}
		if bare {
			return NoPosition, "", lo, nil
		}
		if after != nil && after.isCopy(want, p.to.Cluster()) {
			return after.Position, ByOrigin, lo, nil
		}
		if !judged {
			if hi-lo > maxScan {
				return NoPosition, "", lo, fmt.Errorf("%s: the copy of %v of cluster %s cannot be found on cluster %s: it would %w: %d", p.Topic, want.position, want.cluster, p.to.Cluster(), errElsewhere, hi-lo)
			}
			break
		}
	}
	err = p.to.forward(ctx, lo, func(e Entry) (bool, error) {
		i := p.to.in.Index(e.Position)
		return i >= hi || judge(&e, i) && (bare || after != nil && after.Position == e.Position), nil
	})
	switch {
	case err != nil || bare:
		return NoPosition, "", lo, err
	case after != nil && after.isCopy(want, p.to.Cluster()):
		return after.Position, ByOrigin, lo, nil
	case after != nil:
		return after.Position, NotThere, lo, nil
	case seen:
		return NoPosition, AtEnd, lo, nil
	}
	return NoPosition, "", lo, nil
}

// errElsewhere: a search gives up.
var errElsewhere = errors.New("lie among too many messages that come from elsewhere")

// isCopy tells whether the entry, stored on cluster where, has that origin.
func (e *Entry) isCopy(origin key, where string) bool {
	k, exact := e.origin(where)
	return exact && k == origin
}

const (
	// maxLeaps is how often the search leaps by distance before it only halves.
	maxLeaps = 12
	// maxScan is how many entries are read one after the other in search of one.
	maxScan = 20_000
	// printScan is how many entries on each side of the time of publishing are compared by producer and sequence id.
	printScan = 4_096
	// clockSkew is how much producers' clocks may disagree, in milliseconds, for a message to be found by its time.
	clockSkew = 2_000
)

// byPrint finds the copy by what the producer wrote: for brokers that do not say where an entry comes from. It lies near the guess, which is by its time
// of publishing; before it where producers' clocks disagree.
func (p *Pair) byPrint(ctx context.Context, e Entry, guess Position, found func(Position, How) (Found, error)) (Found, error) {
	origin := e.from(p.from.Cluster())
	exact, _ := e.origin(p.from.Cluster())
	var at *Position
	how := ByProducer
	bare := false // there are copies from that cluster which do not say where they lay
	look := func(first, end int64) error {
		return p.to.forward(ctx, first, func(other Entry) (bool, error) {
			if p.to.in.Index(other.Position) >= end {
				return true, nil
			}
			switch {
			case other.from(p.to.Cluster()) != origin:
			case other.Source != NoPosition: // of brokers that were newer by then
				if other.isCopy(exact, p.to.Cluster()) {
					at, how = &other.Position, ByOrigin
				}
			default:
				bare = true
				if other.print() == e.print() {
					at = &other.Position
				}
			}
			return at != nil || other.Time > e.Time+clockSkew, nil
		})
	}
	near := p.to.in.Index(guess)
	if err := look(near, near+printScan); err != nil {
		return Found{}, err
	}
	if at == nil {
		early, err := p.to.AtTime(ctx, e.Time-clockSkew)
		if err != nil {
			return Found{}, err
		}
		if err := look(max(p.to.in.Index(early), near-printScan), near); err != nil {
			return Found{}, err
		}
	}
	switch {
	case at != nil:
		return found(*at, how)
	case !bare, !p.to.in.Has(guess): // the time says nothing without a copy near it
		return Found{}, p.behind(&e)
	}
	return found(guess, ByTime)
}
