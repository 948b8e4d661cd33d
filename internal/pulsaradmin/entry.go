package pulsaradmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Entry is what identifies one stored entry: a message, a batch, a chunk of a message, or a marker.
type Entry struct {
	Position Position
	Time     int64 // of publishing, by the producer's clock, in milliseconds; replication keeps it
	Producer string
	Sequence int64
	Chunk    int32 // of a chunked message
	Messages int   // in a batch; 1 otherwise
	// Key and Bytes are the key, and the size of the payload as it is stored; empty and 0 when only the head was read.
	Key   string
	Bytes int
	// From is the cluster that it was published on and replicated from; "" when that is this one.
	From string
	// Source is its position on cluster From; NoPosition when From is "", or when brokers of that version do not say.
	Source Position
	Marker bool // written by brokers for themselves, never delivered
	// Aborted and Pending tell of a message in a transaction that was aborted, or is not committed yet.
	Aborted, Pending bool
}

// sourceProperty is the property in which a replicator says where the entry lies on the cluster that it comes from.
const sourceProperty = "__MSG_PROP_REPL_SOURCE_POSITION"

// deliverable tells whether a consumer may ever get the entry.
func (e *Entry) deliverable() bool { return !e.Marker && !e.Aborted }

// from is the cluster that an entry, stored on cluster where, was published on.
func (e *Entry) from(where string) string {
	if e.From == "" {
		return where
	}
	return e.From
}

// key is the identity of an entry that all its copies share: where it was published first, when that is known, else who published it.
type key struct {
	cluster  string // "" for the second form
	position Position

	producer string
	sequence int64
	chunk    int32
	time     int64
}

// origin is the exact identity of an entry that is stored on cluster where; ok is false when brokers do not say.
func (e *Entry) origin(where string) (k key, ok bool) {
	if e.From == "" {
		return key{cluster: where, position: e.Position}, true
	}
	return key{cluster: e.From, position: e.Source}, e.Source != NoPosition
}

// print is the identity by what the producer wrote.
func (e *Entry) print() key {
	return key{producer: e.Producer, sequence: e.Sequence, chunk: e.Chunk, time: e.Time, position: NoPosition}
}

// entry reads one entry's head by the admin API; markers are shown, too.
func (c *Client) entry(ctx context.Context, topic string, p Position) (Entry, error) {
	at, err := path(topic, "ledger", strconv.FormatInt(p.Ledger, 10), "entry", strconv.FormatInt(p.Entry, 10))
	if err != nil {
		return Entry{}, err
	}
	a, err := c.call(ctx, http.MethodHead, at, nil, nil)
	if err != nil {
		return Entry{}, err
	}
	e, err := headerEntry(p, a.header)
	if err != nil {
		return Entry{}, &Error{Cluster: c.cfg.Cluster, Call: "HEAD " + at, Err: err, Remedy: "this version of the broker describes entries in a way that Pointsman does not know"}
	}
	return e, nil
}

// headerEntry reads the headers with which a broker describes an entry.
func headerEntry(p Position, h http.Header) (Entry, error) {
	e := Entry{Position: p, Source: NoPosition, Messages: 1}
	published, err := time.Parse(time.RFC3339Nano, h.Get("X-Pulsar-publish-time"))
	if err != nil {
		return Entry{}, fmt.Errorf("X-Pulsar-publish-time is %q", h.Get("X-Pulsar-publish-time"))
	}
	e.Time = published.UnixMilli()
	e.Producer = h.Get("X-Pulsar-producer-name")
	number := func(name string, otherwise int64) int64 {
		if n, err := strconv.ParseInt(h.Get(name), 10, 64); err == nil {
			return n
		}
		return otherwise
	}
	e.Sequence = number("X-Pulsar-sequence-id", 0)
	e.Messages = int(number("X-Pulsar-num-batch-message", 1))
	e.Chunk = int32(number("X-Pulsar-PROPERTY-CHUNK-ID", number("X-Pulsar-chunk-id", 0)))
	e.From = h.Get("X-Pulsar-replicated-from")
	e.Marker = h.Get("X-Pulsar-marker-type") != ""
	e.Aborted = h.Get("X-Pulsar-txn-aborted") == "true"
	e.Pending = h.Get("X-Pulsar-txn-uncommitted") == "true"
	if e.From == "" {
		return e, nil
	}
	var properties map[string]string
	source := h.Get("X-Pulsar-PROPERTY-" + sourceProperty) // the form of older brokers
	if json.Unmarshal([]byte(h.Get("X-Pulsar-PROPERTY")), &properties) == nil && source == "" {
		source = properties[sourceProperty]
	}
	if source != "" {
		if e.Source, err = ParsePosition(source); err != nil {
			return Entry{}, fmt.Errorf("property %s: %w", sourceProperty, err)
		}
	}
	return e, nil
}

// atTime is the first entry that was published at or after a time (ms), or the end of the log.
func (c *Client) atTime(ctx context.Context, topic string, ms int64) (Position, error) {
	var answer struct {
		Ledger int64 `json:"ledgerId"`
		Entry  int64 `json:"entryId"`
	}
	err := c.get(ctx, &answer, topic, "messageid", strconv.FormatInt(ms, 10))
	return Position{answer.Ledger, answer.Entry}, err
}

// side is one partition on one cluster, as the search and the carrying of cursors need it; the tests have one in memory.
type side interface {
	Cluster() string
	Load(ctx context.Context) (Internal, error)
	Entry(ctx context.Context, p Position) (Entry, error)
	AtTime(ctx context.Context, ms int64) (Position, error)
	// Heads reads all entries of one ledger from first up to and including last, markers included.
	Heads(ctx context.Context, first, last Position) ([]Entry, error)
	// Block reads the same, but may leave out what is not delivered. final is a message of the log, not before first, that will be delivered.
	Block(ctx context.Context, first, last, final Position) ([]Entry, error)
	Close()
}

// remote is the side that asks a cluster.
type remote struct {
	*Client
	topic string

	mu    sync.Mutex
	idle  []*wire // guarded by mu: connections for Block
	plain bool    // guarded by mu: the broker refuses to let it read as a consumer
}

func (r *remote) Load(ctx context.Context) (Internal, error) { return r.Internal(ctx, r.topic) }

// Entry falls back to reading as a consumer: brokers cannot show an entry whose properties are larger than the head of an HTTP answer may be.
func (r *remote) Entry(ctx context.Context, p Position) (Entry, error) {
	e, err := r.entry(ctx, r.topic, p)
	var refused *Error
	if !errors.As(err, &refused) || refused.Status != http.StatusInternalServerError {
		return e, err
	}
	entries, scanned := r.scan(ctx, p, p, p)
	if scanned != nil || len(entries) != 1 {
		return e, err
	}
	return entries[0], nil
}

func (r *remote) AtTime(ctx context.Context, ms int64) (Position, error) {
	return r.atTime(ctx, r.topic, ms)
}

func (r *remote) Heads(ctx context.Context, first, last Position) ([]Entry, error) {
	all := make([]Entry, last.Entry-first.Entry+1)
	err := each(len(all), Parallel, func(i int) (err error) {
		all[i], err = r.Entry(ctx, Position{first.Ledger, first.Entry + int64(i)})
		return err
	})
	return all, err
}

// Block reads as a consumer does, which is many times as fast as one admin call for each entry; it falls back to those, for good only where it is refused: a busy
// broker that did not deliver in time once is not helped by hundreds of calls.
func (r *remote) Block(ctx context.Context, first, last, final Position) ([]Entry, error) {
	r.mu.Lock()
	plain := r.plain
	r.mu.Unlock()
	for range scans {
		if plain {
			break
		}
		entries, err := r.scan(ctx, first, last, final)
		if err == nil || ctx.Err() != nil {
			return entries, err
		}
		if plain = errors.Is(err, errRefused); plain {
			r.mu.Lock()
			r.plain = true
			r.mu.Unlock()
		}
	}
	return r.Heads(ctx, first, last)
}

// scans is how often a block is tried to be read as a consumer.
const scans = 2

// scan reads the messages from first up to and including last; final is one that comes.
func (r *remote) scan(ctx context.Context, first, last, final Position) (entries []Entry, err error) {
	r.mu.Lock()
	var w *wire
	if n := len(r.idle); n > 0 {
		w, r.idle = r.idle[n-1], r.idle[:n-1]
	}
	r.mu.Unlock()
	if w == nil {
		if w, err = r.open(ctx, r.topic); err != nil {
			return nil, err
		}
	}
	err = w.scan(ctx, first, func(e Entry) bool {
		if !last.Before(e.Position) {
			entries = append(entries, e)
		}
		return !e.Position.Before(last) || !e.Position.Before(final)
	})
	if err != nil {
		w.close()
		return nil, err
	}
	r.mu.Lock()
	r.idle = append(r.idle, w)
	r.mu.Unlock()
	return entries, nil
}

func (r *remote) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.idle {
		w.close()
	}
	r.idle = nil
}

const (
	// blockSize is how many entries are read together.
	blockSize = 256
	// maxKept bounds how many entries a view remembers, at about half a kilobyte each.
	maxKept = 128 << 10
)

// view is a side with what was read of it: entries never change, so that they are read once, before the fence as far as possible.
type view struct {
	side
	in Internal // as of the last load

	mu       sync.Mutex
	single   map[Position]Entry // guarded by mu, as all below
	blocks   map[Position]block // by their first position
	known    map[key]Position   // identities of what was read
	bare     map[key]Position   // prints of what was read and does not say where it comes from
	lastData *Entry             // of log end lastEnd
	lastEnd  Position
	kept     int                      // how many entries, about
	most     int                      // of them; set before the view is used
	reading  map[Position]*sync.Mutex // one for each entry or block, so that many who want the same read it once
}

type block struct {
	entries []Entry
	upTo    Position // what was there when it was read
}

func newView(s side) *view {
	return &view{side: s, single: map[Position]Entry{}, blocks: map[Position]block{}, known: map[key]Position{}, bare: map[key]Position{}, reading: map[Position]*sync.Mutex{}, most: maxKept}
}

// load reads the log and the cursors anew. Nobody else may use the view meanwhile.
func (v *view) load(ctx context.Context) (err error) {
	clear(v.reading)
	v.in, err = v.side.Load(ctx)
	return err
}

// alone waits until nobody else reads what is kept under p, and keeps others waiting until what it returns is called.
func (v *view) alone(p Position) func() {
	v.mu.Lock()
	mu, ok := v.reading[p]
	if !ok {
		mu = new(sync.Mutex)
		v.reading[p] = mu
	}
	v.mu.Unlock()
	mu.Lock()
	return mu.Unlock
}

// at reads one entry, from memory if it can.
func (v *view) at(ctx context.Context, p Position) (Entry, error) {
	defer v.alone(p)()
	v.mu.Lock()
	e, ok := v.single[p]
	if !ok {
		entries := v.blocks[blockStart(p)].entries
		if i, found := slices.BinarySearchFunc(entries, p, comparePosition); found {
			e, ok = entries[i], true
		}
	}
	v.mu.Unlock()
	if ok {
		return e, nil
	}
	e, err := v.side.Entry(ctx, p)
	if err == nil {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.keep(e)
	}
	return e, err
}

// keep remembers an entry under its position; v.mu is held. Entries of transactions that are not settled may still change.
func (v *view) keep(e Entry) {
	v.remember(e)
	if !e.Pending {
		v.single[e.Position] = e
	}
}

// remember keeps what an entry is known by; v.mu is held.
func (v *view) remember(e Entry) {
	if v.kept++; v.kept > v.most { // everything here can be read again
		v.kept = 1
		clear(v.single)
		clear(v.blocks)
		clear(v.known)
		clear(v.bare)
	}
	if k, ok := e.origin(v.Cluster()); ok {
		keepFirst(v.known, k, e.Position)
	} else {
		keepFirst(v.bare, e.print(), e.Position)
	}
	keepFirst(v.known, e.print(), e.Position)
}

// keepFirst keeps the first position of an identity: a replicator that began anew has stored a second one.
func keepFirst(known map[key]Position, k key, p Position) {
	if old, ok := known[k]; !ok || p.Before(old) {
		known[k] = p
	}
}

// block reads the block that p lies in: the entries that exist, in order.
func (v *view) block(ctx context.Context, p Position) ([]Entry, error) {
	first := blockStart(p)
	last := Position{p.Ledger, first.Entry + blockSize - 1}
	for _, l := range v.in.Ledgers {
		if l.ID == p.Ledger {
			last.Entry = min(last.Entry, l.Entries-1)
		}
	}
	defer v.alone(Position{first.Ledger, -2 - first.Entry})() // no entry has such a position
	v.mu.Lock()
	have, ok := v.blocks[first]
	v.mu.Unlock()
	if ok && !have.upTo.Before(last) {
		return have.entries, nil
	}
	from := first
	if ok {
		from.Entry = have.upTo.Entry + 1
	}
	final, any, err := v.last(ctx)
	if err != nil {
		return nil, err
	}
	var more []Entry // nothing but markers follows when there is no message
	if any && !final.Position.Before(from) {
		if more, err = v.side.Block(ctx, from, last, final.Position); err != nil {
			return nil, err
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range more {
		v.remember(e)
	}
	entries := append(slices.Clone(have.entries), more...)
	if !slices.ContainsFunc(more, func(e Entry) bool { return e.Pending }) {
		v.blocks[first] = block{entries, last}
	}
	return entries, nil
}

// blockStart is the first position of the block that p lies in.
func blockStart(p Position) Position { return Position{p.Ledger, p.Entry / blockSize * blockSize} }

func comparePosition(e Entry, p Position) int { return e.Position.Compare(p) }

// forward calls visit for each entry from index i on, until it says stop or the log ends.
func (v *view) forward(ctx context.Context, i int64, visit func(e Entry) (stop bool, err error)) error {
	for i = max(i, 0); i < v.in.Len(); {
		p := v.in.At(i)
		entries, err := v.block(ctx, p)
		if err != nil {
			return err
		}
		at, _ := slices.BinarySearchFunc(entries, p, comparePosition)
		for _, e := range entries[at:] {
			if stop, err := visit(e); stop || err != nil {
				return err
			}
		}
		end := Position{p.Ledger, (p.Entry/blockSize + 1) * blockSize}
		i = v.in.Index(end)
	}
	return nil
}

// readAhead reads the blocks of n entries from index i on, several at a time, for whoever goes through them.
func (v *view) readAhead(ctx context.Context, i, n int64) error {
	var starts []Position
	for i, end := max(i, 0), min(i+n, v.in.Len()); i < end; {
		p := v.in.At(i)
		starts = append(starts, p)
		i = v.in.Index(Position{p.Ledger, blockStart(p).Entry + blockSize})
	}
	return each(len(starts), wires, func(k int) error {
		_, err := v.block(ctx, starts[k])
		return err
	})
}

// firstData is the first entry at or after index i that a consumer may get; ok is false when there is none.
func (v *view) firstData(ctx context.Context, i int64) (e Entry, ok bool, err error) {
	// Most often it is the very next one; a block is read only behind a few markers.
	for tries := 0; tries < fewMarkers && i < v.in.Len(); tries, i = tries+1, i+1 {
		if e, err = v.at(ctx, v.in.At(i)); err != nil || e.deliverable() {
			return e, err == nil, err
		}
	}
	err = v.forward(ctx, i, func(next Entry) (bool, error) {
		e, ok = next, next.deliverable()
		return ok, nil
	})
	return e, ok && err == nil, err
}

// fewMarkers is how many entries are read one by one before blocks are.
const fewMarkers = 6

// last is the last entry of the log that a consumer gets; ok is false when there is none.
func (v *view) last(ctx context.Context) (e Entry, ok bool, err error) {
	defer v.alone(NoPosition)()
	v.mu.Lock()
	known, end := v.lastData, v.lastEnd
	v.mu.Unlock()
	if known != nil && end == v.in.End() {
		return *known, true, nil
	}
	size := int64(fewMarkers)
	for i := v.in.Len(); i > 0; size = min(2*size, blockSize) {
		last := v.in.At(i - 1)
		first := Position{last.Ledger, max(0, last.Entry-size+1)}
		heads, err := v.side.Heads(ctx, first, last)
		if err != nil {
			return Entry{}, false, err
		}
		v.mu.Lock()
		for _, e := range heads {
			v.keep(e)
		}
		for _, e := range slices.Backward(heads) {
			if e.deliverable() && !e.Pending {
				v.lastData, v.lastEnd = &e, v.in.End()
				v.mu.Unlock()
				return e, true, nil
			}
		}
		v.mu.Unlock()
		i = v.in.Index(first)
	}
	return Entry{}, false, nil
}

// lookup is where an entry, described by another cluster's copy of it, was seen on this one.
func (v *view) lookup(e *Entry, where string) (Position, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	k, exact := e.origin(where)
	if !exact {
		p, ok := v.known[e.print()]
		return p, ok
	}
	if p, ok := v.known[k]; ok {
		return p, true
	}
	p, ok := v.bare[e.print()]
	return p, ok
}
