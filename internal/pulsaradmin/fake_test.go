package pulsaradmin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
)

// fakeTopic is one partition on one cluster, in memory: a side and a target.
type fakeTopic struct {
	mu      sync.Mutex // guards all below against the calls of one test
	cluster string
	entries []Entry // what is still there
	last    Position
	cursors map[string]Cursor
	subs    map[string]Sub
	silent  bool // copies do not say where they come from
	sent    int  // how many of the entries were looked at for replication
	loads   int  // of the log and the cursors
	reads   int  // calls that read entries
	moves   int  // cursors moved or made
	hidden  bool // subscriptions are there and are not told
	deleted bool
}

func newFake(cluster string, firstLedger int64) *fakeTopic {
	return &fakeTopic{cluster: cluster, last: Position{firstLedger, -1}, cursors: map[string]Cursor{}, subs: map[string]Sub{}}
}

func (f *fakeTopic) append(e Entry) Position {
	f.last.Entry++
	e.Position = f.last
	if e.From == "" || f.silent {
		e.Source = NoPosition
	}
	f.entries = append(f.entries, e)
	return f.last
}

// roll begins a new ledger.
func (f *fakeTopic) roll() {
	if f.last.Entry >= 0 {
		f.last = Position{f.last.Ledger + 3, -1}
	}
}

// trim removes the oldest entries, whole ledgers as brokers do.
func (f *fakeTopic) trim(before Position) {
	f.entries = slices.DeleteFunc(f.entries, func(e Entry) bool { return e.Position.Ledger < before.Ledger })
}

func (f *fakeTopic) Cluster() string { return f.cluster }
func (f *fakeTopic) Close()          {}

func (f *fakeTopic) Load(context.Context) (Internal, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loads++
	if f.deleted {
		return Internal{}, &Error{Cluster: f.cluster, Call: "load", Status: 404}
	}
	in := Internal{Log: Log{Last: f.last}, Cursors: maps.Clone(f.cursors)}
	for _, e := range f.entries {
		if n := len(in.Ledgers); n == 0 || in.Ledgers[n-1].ID != e.Position.Ledger {
			in.Ledgers = append(in.Ledgers, Ledger{ID: e.Position.Ledger})
		}
		in.Ledgers[len(in.Ledgers)-1].Entries = e.Position.Entry + 1
	}
	if f.last.Entry < 0 && len(f.entries) > 0 { // the last confirmed entry is in the ledger before
		in.Last = f.entries[len(f.entries)-1].Position
	}
	return in, nil
}

func (f *fakeTopic) Entry(_ context.Context, p Position) (Entry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	if i, ok := slices.BinarySearchFunc(f.entries, p, comparePosition); ok {
		return f.entries[i], nil
	}
	return Entry{}, &Error{Cluster: f.cluster, Call: "entry " + p.String(), Status: 404}
}

// AtTime halves, as brokers do, whether times grow or not.
func (f *fakeTopic) AtTime(_ context.Context, ms int64) (Position, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := sort.Search(len(f.entries), func(i int) bool { return f.entries[i].Time >= ms }); i < len(f.entries) {
		return f.entries[i].Position, nil
	}
	return Position{f.last.Ledger, f.last.Entry + 1}, nil
}

func (f *fakeTopic) Heads(_ context.Context, first, last Position) (all []Entry, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	for _, e := range f.entries {
		if !e.Position.Before(first) && !last.Before(e.Position) {
			all = append(all, e)
		}
	}
	return all, nil
}

// Block leaves markers out, and never ends without the final message.
func (f *fakeTopic) Block(ctx context.Context, first, last, final Position) ([]Entry, error) {
	if final.Before(first) {
		panic(fmt.Sprintf("a reader at %v waits for ever: %v was the last message", first, final))
	}
	if e, err := f.Entry(ctx, final); err != nil || !e.deliverable() || e.Pending {
		panic(fmt.Sprintf("a reader at %v waits for ever: %v is no message", first, final))
	}
	all, err := f.Heads(ctx, first, last)
	return slices.DeleteFunc(all, func(e Entry) bool { return !e.deliverable() }), err
}

func (f *fakeTopic) Subscriptions(context.Context) (Snapshot, error) {
	in, _ := f.Load(context.Background())
	f.mu.Lock()
	defer f.mu.Unlock()
	s := Snapshot{Cluster: f.cluster, Log: in.Log, Sent: in.sent()}
	for _, name := range slices.Sorted(maps.Keys(f.subs)) {
		if f.hidden {
			continue
		}
		sub := f.subs[name]
		sub.Name, sub.Cursor = name, f.cursors[name]
		sub.Backlog = int64(len(f.left(name)))
		s.Subs = append(s.Subs, sub)
	}
	return s, nil
}

func (f *fakeTopic) Create(_ context.Context, name string, first Position, replicated bool, properties map[string]string) error {
	f.mu.Lock()
	_, exists := f.subs[name]
	if !exists {
		f.subs[name] = Sub{Type: "None", Replicated: replicated, Properties: properties}
	}
	f.mu.Unlock()
	if exists {
		return &Error{Cluster: f.cluster, Call: "create", Status: 409}
	}
	return f.Move(context.Background(), name, first)
}

func (f *fakeTopic) Move(_ context.Context, name string, first Position) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.moves++
	mark := Position{first.Ledger, first.Entry - 1}
	f.cursors[name] = Cursor{MarkDelete: mark, Read: first}
	s := f.subs[name]
	s.Replicated = false // as brokers do
	f.subs[name] = s
	return nil
}

func (f *fakeTopic) SetReplicated(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.subs[name]
	s.Replicated = true
	f.subs[name] = s
	return nil
}

func (f *fakeTopic) Acker(context.Context) acker { return f }

func (f *fakeTopic) Ack(name, _ string, positions []Position) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.cursors[name]
	for _, p := range positions {
		c = f.acknowledge(c, p)
	}
	f.cursors[name] = c
	return nil
}

// acknowledge is what a broker does to a cursor: ranges of entries that exist, joined, the first ones swallowed by the mark-delete position.
func (f *fakeTopic) acknowledge(c Cursor, p Position) Cursor {
	out := Cursor{MarkDelete: c.MarkDelete, Read: c.Read}
	for _, e := range f.entries {
		q := e.Position
		if !c.acked(q) && q != p {
			continue
		}
		n := len(out.Acked)
		switch before := f.before(q); {
		case !out.MarkDelete.Before(q):
		case n == 0 && !out.MarkDelete.Before(before):
			out.MarkDelete = q
		case n > 0 && out.Acked[n-1].Last == before:
			out.Acked[n-1].Last = q
		default:
			out.Acked = append(out.Acked, Range{Position{q.Ledger, q.Entry - 1}, q})
		}
	}
	return out
}

// before is the entry before p, or NoPosition.
func (f *fakeTopic) before(p Position) Position {
	i, _ := slices.BinarySearchFunc(f.entries, p, comparePosition)
	if i == 0 {
		return NoPosition
	}
	return f.entries[i-1].Position
}

// left is what a subscription has not acknowledged, markers included.
func (f *fakeTopic) left(name string) (all []Entry) {
	c := f.cursors[name]
	for _, e := range f.entries {
		if !c.acked(e.Position) {
			all = append(all, e)
		}
	}
	return all
}

// delivered are the names of the messages that a subscription will still get, in order.
func (f *fakeTopic) delivered(name string) (all []string) {
	for _, e := range f.left(name) {
		if e.deliverable() {
			all = append(all, fmt.Sprintf("%s/%d", e.Producer, e.Sequence))
		}
	}
	return all
}

// replicate sends the next n entries of from to to, as a replicator does.
func replicate(from, to *fakeTopic, n int) {
	for ; n > 0 && from.sent < len(from.entries); n-- {
		e := from.entries[from.sent]
		from.sent++
		if e.From == "" {
			copied := e
			copied.From, copied.Source = from.cluster, e.Position
			to.append(copied)
		}
	}
	if from.sent > 0 {
		from.cursors[replicatorCursor+to.cluster] = Cursor{MarkDelete: from.entries[from.sent-1].Position}
	}
}

func settle(a, b *fakeTopic) {
	replicate(a, b, 1<<30)
	replicate(b, a, 1<<30)
}

var clock int64

// message is one that a client publishes.
func message(producer string, sequence int) Entry {
	clock++
	return Entry{Time: 1_000_000 + clock, Producer: producer, Sequence: int64(sequence), Messages: 1}
}

func marker() Entry {
	e := message("pulsar.marker", 0)
	e.Marker = true
	return e
}
