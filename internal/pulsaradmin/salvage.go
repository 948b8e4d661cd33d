package pulsaradmin

import (
	"context"
)

// Absent is what one partition holds on the old cluster that the new one never got: of all that lies behind the last copy, a page.
type Absent struct {
	Topic string
	// Behind is how many entries lie behind the last copy, markers and what was replicated here included: nothing else can be missing.
	Behind int64
	// Count is how many entries are missing of those that were looked at, and Entries the first ones.
	Count   int64
	Entries []Entry
	// Seen is the last position that was looked at; with More there are others behind it.
	Seen Position
	More bool
}

// Page is which part of what is missing is wanted.
type Page struct {
	After Position // NoPosition: from the first one on
	Limit int      // of Entries
	// Count has those counted that do not fit into the page any more; without it the looking ends with the page.
	Count bool
}

const (
	// salvageWindow is how many entries of the new cluster are read at each place where copies may lie.
	salvageWindow = 8_192
	// salvageScan bounds how many entries of the old cluster are looked at for one page.
	salvageScan = 100_000
	// salvageKept bounds how many of them are remembered: none is needed twice.
	salvageKept = 4 * blockSize
)

// Absent finds the messages that clients published on the old cluster and of which the new one has no copy, the oldest first. Load comes
// first. A replicator sends in order, so everything up to the last copy is there. Its cursor is believed only where copies do not say where they come from: one
// that was made anew, because replication was switched off and on, stands behind messages that were never sent.
func (p *Pair) Absent(ctx context.Context, page Page) (Absent, error) {
	p.from.most = salvageKept
	a := Absent{Topic: p.Topic, Seen: page.After}
	start, ok, err := p.afterLastCopy(ctx)
	if err != nil || !ok {
		return a, err
	}
	a.Behind = p.from.in.Len() - start
	if page.After != NoPosition {
		start = max(start, p.from.in.Index(Position{page.After.Ledger, page.After.Entry + 1}))
	}
	end := start + salvageScan
	err = p.from.forward(ctx, start, func(e Entry) (bool, error) {
		full := len(a.Entries) >= page.Limit && !page.Count
		if a.More = full || p.from.in.Index(e.Position) >= end; a.More {
			return true, nil
		}
		a.Seen = e.Position
		if e.From != "" || !e.deliverable() {
			return false, nil
		}
		if _, there := p.to.lookup(&e, p.from.Cluster()); there {
			return false, nil
		}
		if a.Count++; len(a.Entries) < page.Limit {
			a.Entries = append(a.Entries, e)
		}
		return false, nil
	})
	return a, err
}

// afterLastCopy is the index of the old cluster's log from where on things may be missing; ok is false when nothing is.
func (p *Pair) afterLastCopy(ctx context.Context) (start int64, ok bool, err error) {
	cursor, sent := p.from.in.Cursors[replicatorCursor+p.to.Cluster()]
	behind := max(0, p.from.in.Len()-salvageScan) // where a replicator that has gone may have stopped
	if sent {
		behind = p.from.in.Index(Position{cursor.MarkDelete.Ledger, cursor.MarkDelete.Entry + 1})
	}
	near, ok, err := p.from.firstData(ctx, behind)
	if err == nil && !ok {
		near, ok, err = p.from.last(ctx)
	}
	if err != nil || !ok {
		return 0, false, err
	}
	top, err := p.lastCopy(ctx, near)
	switch {
	case err != nil:
		return 0, false, err
	case top != NoPosition:
		return p.from.in.Index(Position{top.Ledger, top.Entry + 1}), true, nil
	case sent:
		return behind, true, nil
	}
	return 0, true, nil
}

// lastCopy reads the new cluster where copies of what follows first may lie: where messages of that time are, and at its end, where a replicator that
// goes on late puts them. It returns the last position of the old cluster that a copy names; what was read is remembered by the view.
func (p *Pair) lastCopy(ctx context.Context, first Entry) (Position, error) {
	top, n := NoPosition, p.to.in.Len()
	if n == 0 {
		return top, nil
	}
	at, err := p.to.AtTime(ctx, first.Time-clockSkew)
	if err != nil {
		return top, err
	}
	for _, from := range []int64{max(0, p.to.in.Index(at)-salvageWindow/2), max(0, n-salvageWindow)} {
		if err := p.to.readAhead(ctx, from, salvageWindow); err != nil {
			return top, err
		}
		left := salvageWindow
		err := p.to.forward(ctx, from, func(e Entry) (bool, error) {
			if e.From == p.from.Cluster() && e.Source != NoPosition && top.Before(e.Source) {
				top = e.Source
			}
			left--
			return left == 0, nil
		})
		if err != nil {
			return top, err
		}
	}
	return top, nil
}
