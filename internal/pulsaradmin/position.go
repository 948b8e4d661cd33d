package pulsaradmin

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Position is a place in the log of one topic on one cluster.
type Position struct {
	Ledger int64 `json:"ledger"`
	Entry  int64 `json:"entry"` // −1: before the first of the ledger
}

// NoPosition is the position of nothing: it is before all others.
var NoPosition = Position{-1, -1}

// ParsePosition reads "7:36".
func ParsePosition(text string) (Position, error) {
	l, e, ok := strings.Cut(text, ":")
	ledger, err1 := strconv.ParseInt(l, 10, 64)
	entry, err2 := strconv.ParseInt(e, 10, 64)
	if !ok || err1 != nil || err2 != nil {
		return NoPosition, fmt.Errorf("%q is not a position of the form ledger:entry", text)
	}
	return Position{ledger, entry}, nil
}

func (p Position) String() string { return fmt.Sprintf("%d:%d", p.Ledger, p.Entry) }

// Compare is negative when p is before q.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.Ledger, q.Ledger), cmp.Compare(p.Entry, q.Entry))
}

// Before tells whether p is before q.
func (p Position) Before(q Position) bool { return p.Compare(q) < 0 }

// UnmarshalJSON reads the form in which brokers write positions: "7:36".
func (p *Position) UnmarshalJSON(text []byte) (err error) {
	unquoted, err := strconv.Unquote(string(text))
	if err != nil {
		return err
	}
	*p, err = ParsePosition(unquoted)
	return err
}

// MarshalJSON writes "7:36".
func (p Position) MarshalJSON() ([]byte, error) { return []byte(strconv.Quote(p.String())), nil }

// Range is what follows After, up to and including Last.
type Range struct{ After, Last Position }

func (r Range) String() string { return fmt.Sprintf("(%v..%v]", r.After, r.Last) }

// Contains tells whether p is in the range.
func (r Range) Contains(p Position) bool { return r.After.Before(p) && !r.Last.Before(p) }

// parseRanges reads "[(7:36..7:45],(7:46..7:55]]", the form of individuallyDeletedMessages.
func parseRanges(text string) ([]Range, error) {
	inner, begins := strings.CutPrefix(text, "[")
	inner, ends := strings.CutSuffix(inner, "]")
	if !begins || !ends {
		return nil, fmt.Errorf("%.80q is not a list of ranges", text)
	}
	var ranges []Range
	for inner != "" {
		if !strings.HasPrefix(inner, "(") {
			return nil, fmt.Errorf("%.80q is not a range of the form (ledger:entry..ledger:entry]", inner)
		}
		one, rest, ok := strings.Cut(inner[1:], "]")
		from, to, ok2 := strings.Cut(one, "..")
		if !ok || !ok2 {
			return nil, fmt.Errorf("%.80q is not a range of the form (ledger:entry..ledger:entry]", inner)
		}
		after, err := ParsePosition(from)
		if err != nil {
			return nil, err
		}
		last, err := ParsePosition(to)
		if err != nil {
			return nil, err
		}
		ranges = append(ranges, Range{after, last})
		inner = strings.TrimPrefix(rest, ",")
	}
	return ranges, nil
}

// Ledger is one piece of a topic's log.
type Ledger struct {
	ID      int64
	Entries int64
}

// Log is which positions of a topic exist on one cluster: its ledgers, oldest first, without empty ones, and the last entry.
type Log struct {
	Ledgers []Ledger
	Last    Position // the last entry that was confirmed, also when it is gone; entry −1 of the first ledger for a topic without any
}

// Len is the number of entries.
func (l *Log) Len() int64 {
	var n int64
	for _, ledger := range l.Ledgers {
		n += ledger.Entries
	}
	return n
}

// First is the oldest entry that exists; ok is false for an empty log.
func (l *Log) First() (p Position, ok bool) {
	if len(l.Ledgers) == 0 {
		return NoPosition, false
	}
	return Position{l.Ledgers[0].ID, 0}, true
}

// Index counts the entries before p: it is a number for every position, also for one that is gone or not written yet.
func (l *Log) Index(p Position) int64 {
	var n int64
	for _, ledger := range l.Ledgers {
		if ledger.ID > p.Ledger {
			break
		}
		if ledger.ID == p.Ledger {
			return n + min(max(p.Entry, 0), ledger.Entries)
		}
		n += ledger.Entries
	}
	return n
}

// without counts the entries from index i on and before index end that are in none of the ranges, which do not overlap.
func (l *Log) without(i, end int64, ranges []Range) int64 {
	n := max(0, end-i)
	for _, r := range ranges {
		first, next := l.Index(Position{r.After.Ledger, r.After.Entry + 1}), l.Index(Position{r.Last.Ledger, r.Last.Entry + 1})
		n -= max(0, min(next, end)-max(first, i))
	}
	return n
}

// At is the entry with index i, which must be at least 0 and less than Len.
func (l *Log) At(i int64) Position {
	for _, ledger := range l.Ledgers {
		if i < ledger.Entries {
			return Position{ledger.ID, i}
		}
		i -= ledger.Entries
	}
	panic(fmt.Sprintf("pulsaradmin: the log ends %d entries before the index", i+1))
}

// Has tells whether p is an entry that exists.
func (l *Log) Has(p Position) bool {
	for _, ledger := range l.Ledgers {
		if ledger.ID == p.Ledger {
			return p.Entry >= 0 && p.Entry < ledger.Entries
		}
	}
	return false
}

// Next is the first existing entry after p; ok is false when there is none.
func (l *Log) Next(p Position) (next Position, ok bool) {
	i := l.Index(p)
	if l.Has(p) {
		i++
	}
	if i >= l.Len() {
		return NoPosition, false
	}
	return l.At(i), true
}

// End is the position that the next message will be written at or after: the first one that does not exist yet. As the first position to be delivered
// it means "nothing that exists", without meaning "the end, wherever that is when the call arrives".
func (l *Log) End() Position { return Position{l.Last.Ledger, l.Last.Entry + 1} }
