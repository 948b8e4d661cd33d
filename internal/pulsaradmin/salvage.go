package pulsaradmin

import (
	"context"
)

// Absent is what one partition holds on the old cluster that the new one never got.
type Absent struct {
	Topic   string
	Count   int64
	Entries []Entry // the first ones
	// AtLeast tells that the log before was not looked at.
	AtLeast bool
}

const (
	// salvageWindow is how many entries of the new cluster are read at each place where copies may lie.
	salvageWindow = 8_192
	// salvageScan bounds how many entries of the old cluster are looked at.
	salvageScan = 100_000
)

// Absent finds the messages that clients published on the old cluster and of which the new one has no copy, at most limit of them by name. Load comes
// first. A replicator sends in order, so everything up to the last copy is there. Its cursor is believed only where copies do not say where they come from: one
// that was made anew, because replication was switched off and on, stands behind messages that were never sent.
func (p *Pair) Absent(ctx context.Context, limit int) (Absent, error) {
	a := Absent{Topic: p.Topic}
	start := max(0, p.from.in.Len()-salvageScan)
	cursor, sent := p.from.in.Cursors[replicatorCursor+p.to.Cluster()]
	behind := start
	if sent {
		behind = p.from.in.Index(Position{cursor.MarkDelete.Ledger, cursor.MarkDelete.Entry + 1})
	}
	near, ok, err := p.from.firstData(ctx, behind)
	if err == nil && !ok {
		near, ok, err = p.from.last(ctx)
	}
	if err != nil || !ok {
		return a, err
	}
	top, err := p.lastCopy(ctx, near)
	if err != nil {
		return a, err
	}
	switch {
	case top != NoPosition:
		if next := p.from.in.Index(Position{top.Ledger, top.Entry + 1}); next >= start {
			start = next
		} else {
			a.AtLeast = true
		}
	case sent && behind >= start:
		start = behind
	default:
		a.AtLeast = start > 0
	}
	err = p.from.forward(ctx, start, func(e Entry) (bool, error) {
		if e.From != "" || !e.deliverable() || !top.Before(e.Position) {
			return false, nil
		}
		if _, there := p.to.lookup(&e, p.from.Cluster()); there {
			return false, nil
		}
		if a.Count++; len(a.Entries) < limit {
			a.Entries = append(a.Entries, e)
		}
		return false, nil
	})
	return a, err
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
