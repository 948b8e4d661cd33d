package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
)

// TailReport compares the end of one partition on two clusters.
type TailReport struct {
	Topic    string
	Compared int // messages (entries) of the old cluster that were looked for
	// Missing are those that the new cluster does not have; the first ones only.
	Missing []Entry
	// First and Last are where the first and the last of those compared lie on the new cluster, as far as they are there.
	First, Last Position
	// OutOfOrder is how many copies lie before the copy of the message before them.
	OutOfOrder int
}

// maxMissing bounds how many missing messages a report names.
const maxMissing = 20

// CompareTails looks for the last n entries of the old cluster up to last on the new one, by origin or by producer and sequence id. Load comes first. What lies behind
// last has come from the new cluster since, which Load may have read before it was there.
func (p *Pair) CompareTails(ctx context.Context, last Position, n int64) (TailReport, error) {
	r := TailReport{Topic: p.Topic, First: NoPosition, Last: NoPosition}
	before := NoPosition
	err := p.from.forward(ctx, p.from.in.Index(Position{last.Ledger, last.Entry + 1})-n, func(e Entry) (bool, error) {
		if last.Before(e.Position) {
			return true, nil
		}
		if !e.deliverable() {
			return false, nil
		}
		r.Compared++
		f, err := p.copyOf(ctx, e)
		var behind *ErrBehind
		switch {
		case errors.As(err, &behind) || err == nil && !f.How.Exact():
			r.Missing = append(r.Missing, e)
			return len(r.Missing) == maxMissing, nil
		case err != nil:
			return false, err
		}
		if r.First == NoPosition {
			// A replicator that began anew has stored some twice, before what was found: the first copies count, for all.
			if err := p.to.readAhead(ctx, p.to.in.Index(f.Position)-guard, guard+1); err != nil {
				return false, err
			}
			if at, ok := p.to.lookup(&e, p.from.Cluster()); ok {
				f.Position = at
			}
		}
		if f.Position.Before(before) && e.From == "" { // what comes from elsewhere may lie in another order
			r.OutOfOrder++
		}
		if e.From == "" {
			before = f.Position
		}
		if r.First == NoPosition {
			r.First = f.Position
		}
		r.Last = f.Position
		// Its neighbours will be looked for next.
		_, err = p.to.block(ctx, f.Position)
		return false, err
	})
	return r, err
}

// String says what is wrong; "" when nothing is.
func (r TailReport) String() string {
	switch {
	case len(r.Missing) > 0 && r.First == NoPosition: // a quiet topic's log, most likely: what is not acknowledged was looked for before the flip
		return fmt.Sprintf("%s: of the last %d messages that were looked for none has a copy any more: the new cluster removes what nobody there has subscribed to, unless a retention keeps it", r.Topic, r.Compared)
	case len(r.Missing) > 0:
		e := r.Missing[0]
		return fmt.Sprintf("%s: %d of the last %d messages have no copy; the first is at %v (producer %q, sequence id %d)", r.Topic, len(r.Missing), r.Compared, e.Position, e.Producer, e.Sequence)
	case r.OutOfOrder > 0:
		return fmt.Sprintf("%s: %d of the last %d messages lie in another order", r.Topic, r.OutOfOrder, r.Compared)
	}
	return ""
}

// OwnSince lists what clients, and not replicators or brokers, have published on a cluster after a position: after the drain there must be nothing. It
// names at most some.
func (c *Client) OwnSince(ctx context.Context, topic string, after Position) ([]Entry, error) {
	v := newView(&remote{Client: c, topic: topic})
	defer v.side.Close()
	if err := v.load(ctx); err != nil {
		return nil, err
	}
	var own []Entry
	err := v.forward(ctx, v.in.Index(Position{after.Ledger, after.Entry + 1}), func(e Entry) (bool, error) {
		if after.Before(e.Position) && !e.Marker && e.From == "" {
			own = append(own, e)
		}
		return len(own) == maxMissing, nil
	})
	return own, err
}
