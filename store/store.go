// Package store defines where the map topic → cluster lives, and holds the two stores that need no server: memory
// (tests, with faults) and file (one node). The third, ZooKeeper, is package zk. All pass store/storetest.
//
// internal/app watches a store and builds route tables from it; internal/admin writes to it. A store never interprets
// the map: it does not know which decision follows from an entry. It must never know a socket of a client, a broker or
// a session.
package store

import (
	"context"
	"errors"
	"math"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// Errors that every store returns, to be matched with errors.Is.
var (
	// ErrConflict: an entry or rule is not as the change expected; ConflictError names it.
	ErrConflict = errors.New("the map was changed by somebody else meanwhile")
	// ErrUnavailable: the store cannot be reached now. The change may or may not have been applied if the
	// error also matches ErrUnknown.
	ErrUnavailable = errors.New("the map store cannot be reached")
	// ErrUnknown: the answer to a write was lost; read before repeating.
	ErrUnknown = errors.New("the outcome of the write is unknown")
	// ErrMoving: the change touches an entry that is prepared, fenced or draining without being a step of its switch.
	ErrMoving = errors.New("the topic is in the middle of a switch")
	// ErrLive: the proxy to be forgotten is registered.
	ErrLive = errors.New("the proxy is alive")
	// ErrNotFound: no such switch, proxy or key.
	ErrNotFound = errors.New("not found")
	// ErrTooLarge: the change does not fit into one write of this store. Nothing was written; halves of it may fit.
	ErrTooLarge = errors.New("the change is too large for one write; split it")
	// ErrClosed: the store was closed by its owner.
	ErrClosed = errors.New("the map store is closed")
)

// ConflictError says which entry or rule was not as expected. It matches ErrConflict.
type ConflictError struct {
	Name       string // topic or scope
	Want, Have string // human-readable: "cluster a, epoch 3" or "absent"
}

func (e *ConflictError) Error() string {
	return "conflict on " + e.Name + ": expected " + e.Want + ", found " + e.Have
}

func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// BadRules is the key of Update.Bad that stands for the rules.
const BadRules = -1

// Update is one event of a watch. A nil map and a nil pointer mean "unchanged".
type Update struct {
	// Buckets holds whole buckets: every entry of each bucket that is named, in any order. An empty slice empties it.
	// A bucket that is named here is no longer bad.
	Buckets map[int][]route.Entry
	// Rules, when not nil, are all rules; they are no longer bad.
	Rules *[]route.Rule
	// Synced is true from the first update on which the whole map has been delivered (or reported in Bad).
	Synced bool
	// Bad names the buckets (and BadRules) whose stored value cannot be used; the last good one stays in force.
	Bad map[int]error
	// Map is the identity of the whole map, and Versions those of values in Buckets, from a store that is a Resumer. A
	// bucket without a version is one that a Resume would have to deliver again.
	Map      string
	Versions map[int]string
	// Kept names, after Resume only, buckets whose value the receiver has already. They are no longer bad.
	Kept []int
}

// Known is what a receiver has of a map from the updates of an earlier watch, perhaps of a process before it.
type Known struct {
	Map      string         // Update.Map
	Versions map[int]string // Update.Versions of the values that it holds, as they were delivered
}

// Resumer is a store that can tell whether a value is still the one that a receiver has, without reading it.
type Resumer interface {
	// Resume is Watch for a receiver that has a part of the map: the first updates name a bucket in Kept instead of
	// delivering it if its value surely is the known one. Knowledge of another map counts for nothing.
	Resume(ctx context.Context, known Known, sink func(Update)) error
}

// EntryChange replaces one entry. Nil means absent.
type EntryChange struct {
	Topic  string       `json:"topic"`
	Before *route.Entry `json:"before"`
	After  *route.Entry `json:"after"`
}

// RuleChange replaces one rule. Nil means absent.
type RuleChange struct {
	Scope  string      `json:"scope"`
	Before *route.Rule `json:"before"`
	After  *route.Rule `json:"after"`
}

// MaxChange is the largest number of entries and rules in one Change.
const MaxChange = 128

// Change is one atomic write: all of it happens, or nothing. A history entry is written with it.
type Change struct {
	Entries []EntryChange
	Rules   []RuleChange
	// Switch, when not nil, is written in the same write, under the rule of PutSwitch. A change to or from an entry that is
	// not active must carry the record of the switch that the entry names: it is that switch's own step.
	Switch *switching.Record
	Who    string
	Why    string
	At     time.Time // zero: the store's clock
}

// HistoryEntry is one applied Change.
type HistoryEntry struct {
	// Seq grows with every change; it is unique within a store and may have gaps.
	Seq     uint64        `json:"seq"`
	At      time.Time     `json:"at"`
	Who     string        `json:"who"`
	Why     string        `json:"why"`
	Switch  string        `json:"switch_id,omitempty"`
	Entries []EntryChange `json:"entries,omitempty"`
	Rules   []RuleChange  `json:"rules,omitempty"`
}

// Proxy is what a running proxy says of itself.
type Proxy struct {
	ID          string    `json:"id"`
	Incarnation string    `json:"incarnation"` // new with every start
	Version     string    `json:"version"`
	Advertised  string    `json:"advertised_url"`
	Ops         string    `json:"ops_url"` // http://host:port of its control API
	Clusters    []string  `json:"clusters"`
	Digest      string    `json:"map_digest"` // of the map it serves: route.Table.Digest
	Entries     int       `json:"entries"`
	Started     time.Time `json:"started"`
	// Health is what this proxy has last seen of each cluster, by real lookups.
	Health map[string]switching.ClusterHealth `json:"health,omitempty"`
	// MaxMapAgeMillis, when not 0, is a promise: this member takes no publish of any topic while its last contact (Store.Confirmed, its own and
	// that of the processes before it) is older. Whoever has not seen it for longer need not wait for it (protocol rule P8).
	MaxMapAgeMillis int64 `json:"max_map_age_millis,omitempty"`
	// Live: the member is connected, and what is connected is the incarnation that its member entry names. False may
	// mean that it is cut off and still serves.
	Live bool `json:"live"`
	// Mark is another one whenever the member was announced anew: who is not live, and has the mark of an earlier reading, was never
	// live in between.
	Mark string `json:"-"`
}

// Tombstone is what is left of a member that was forgotten, or has left without knowing what became of all that it had sent: that may still be on
// its way.
type Tombstone struct {
	ID          string    `json:"id"`
	Incarnation string    `json:"incarnation"`
	At          time.Time `json:"at"` // when the membership ended, by the clock of whoever wrote this: nothing but TombstoneKept goes by it
}

// Status is how a store is doing.
type Status struct {
	Kind      string `json:"kind"` // memory, file, zookeeper
	Connected bool   `json:"connected"`
	// Contact is when the last answer came from the store: the age of the map is counted from it.
	Contact time.Time `json:"contact"`
	Detail  string    `json:"detail,omitempty"`
}

// Store is the whole interface. All methods may be called from any goroutine. Every method that takes a context
// returns by its deadline, and after DefaultTimeout at the latest (Watch and Lead excepted).
type Store interface {
	// Watch calls sink, from one goroutine at a time, with the map and then with its changes until ctx ends or the
	// store is closed; then it returns nil, when no call of sink is running any more. The contract:
	//   - the first updates together name every bucket, the empty ones too, and the rules; the last of them is the
	//     first that is marked Synced;
	//   - it may repeat a value and may skip values that were soon replaced;
	//   - each bucket eventually agrees with the store, and never goes back to an older value;
	//   - while the store is away nothing is called, and after it the difference comes by itself;
	//   - a value that cannot be used is reported in Bad and does not replace the good one before it;
	//   - slices are the receiver's to keep.
	// It returns an error only if the watch can never work (a format that this version does not know, wrong
	// credentials). Any number of watches may run at once; ending one touches no other.
	Watch(ctx context.Context, sink func(Update)) error

	// Entry reads the entry of a topic, as of now (no older than the call). ok is false when it is absent.
	Entry(ctx context.Context, topic string) (e route.Entry, ok bool, err error)
	// Entries reads all entries, as of now, in no particular order.
	Entries(ctx context.Context) ([]route.Entry, error)
	// Rules reads all rules, as of now.
	Rules(ctx context.Context) ([]route.Rule, error)
	// Apply writes c if every entry and rule is as its Before says (compared by all fields), else a *ConflictError.
	// Neighbours in the same bucket are never a conflict. ErrTooLarge, ErrUnavailable and ErrUnknown are possible.
	Apply(ctx context.Context, c Change) error

	// Switch reads a switch record; ErrNotFound.
	Switch(ctx context.Context, id string) (switching.Record, error)
	// Switches lists the records, newest first, at most limit.
	Switches(ctx context.Context, limit int) ([]switching.Record, error)
	// SwitchesOf lists the records of one command, whose Batch is batch and whose ids are batch, a hyphen and more, as far as they are kept, in the order of
	// Running. However many switches came after them, it costs what they cost, and a list of names.
	SwitchesOf(ctx context.Context, batch string) ([]switching.Record, error)
	// Running reads all records that are not over, as of now, in the order of Record.Started and then of their ids. However
	// many have ended, it costs what the running ones cost. A record that cannot be read hides no other: those that can are
	// returned together with an error that names it.
	Running(ctx context.Context) ([]switching.Record, error)
	// PutSwitch writes a record over the one with the revision before: revision 1 creates, revision n replaces n−1. Anything
	// else is a *ConflictError.
	PutSwitch(ctx context.Context, r switching.Record) error
	// PutAck writes or replaces the ack of one process for one phase of one attempt (AckName); ErrNotFound when
	// there is no such switch.
	PutAck(ctx context.Context, id string, a switching.Ack) error
	// Acks reads the acks of a switch, as of now.
	Acks(ctx context.Context, id string) ([]switching.Ack, error)

	Batches

	// History reads the newest changes, newest first, at most limit. It is bounded: the oldest are dropped, and with
	// them the records of the switches that began then and are over.
	History(ctx context.Context, limit int) ([]HistoryEntry, error)

	// Register makes this process a member and keeps it announced over session loss until Unregister or Close; calling it
	// again replaces what is announced. When it returns nil, the member is on the roster, this process is announced in
	// the present session, and every watch that runs has delivered the map as it was after that: whoever registers
	// before it serves cannot be overlooked by a switch. After ErrUnavailable all of it follows when the store is back.
	Register(ctx context.Context, p Proxy) error
	// Unregister ends the membership (clean stop, after the last connection). Without a registration it does nothing. settled tells
	// that nothing which this process has sent can still arrive anywhere; if not, it leaves a tombstone as Forget does.
	Unregister(ctx context.Context, settled bool) error
	// Forget ends the membership of a process that is dead and whose copy of the map is destroyed, and leaves a tombstone;
	// ErrNotFound, and ErrLive for one that is connected.
	Forget(ctx context.Context, id string) error
	// Tombstones lists what Forget and Unregister have left, for TombstoneKept at least.
	Tombstones(ctx context.Context) ([]Tombstone, error)
	// Proxies lists all members, live or not, as of now.
	Proxies(ctx context.Context) ([]Proxy, error)

	// Lease is until when, on the clock of Boottime, this process may act on a prepared entry that it knows; 0: it may
	// not. It is ⅔ of the session time-out from the sending of the last answered write or sync, in a session in which
	// the process is announced and all its watches have delivered the map since. It may shrink to 0 at any time and
	// costs an atomic load. A store of one node always has one.
	Lease() time.Duration
	// Confirmed is when, on the clock of Boottime, the last answered sync or write was sent that counts for a lease; 0: never. Unlike a lease
	// it outlives the session: what this process has known since then is no older. It costs an atomic load. For a store of one
	// node it is now.
	Confirmed() time.Duration
	// Lead campaigns for the leadership until ctx ends or the store is closed; then it returns nil. While this process
	// leads, lead runs, with a context that ends as soon as another process may lead. Lead waits for lead to return; then
	// the leadership is released, and after a pause it campaigns again. At most one of the functions whose context has
	// not ended runs in all processes, as far as clocks and schedulers allow: writes must be conditional all the same.
	Lead(ctx context.Context, id string, lead func(ctx context.Context)) error
	// Leader is the id of the process that leads, as of now; "" when nobody does.
	Leader(ctx context.Context) (id string, err error)

	// Documents reads all documents of a kind, as of now, in the order of their names; none of a kind that nobody has written.
	Documents(ctx context.Context, kind string) ([]Document, error)
	// PutDocument writes a document under the rule of its Rev; anything else is a *ConflictError. ErrTooLarge above MaxDocument.
	PutDocument(ctx context.Context, kind string, d Document) error
	// DropDocument removes a document, whatever its revision; where there is none, it does nothing.
	DropDocument(ctx context.Context, kind, name string) error

	// TagKey returns the shared key for tagged broker addresses, creating it when there is none.
	TagKey(ctx context.Context) ([]byte, error)

	Status() Status
	Close() error
}

const (
	// DefaultTimeout bounds every store operation but Watch and Lead.
	DefaultTimeout = 10 * time.Second
	// MinSessionTimeout is the shortest session that gives leases in production: shorter ones end in a pause of a
	// garbage collection or of a virtual machine.
	MinSessionTimeout = 10 * time.Second
	// Forever is the lease of a store that cannot be cut off from its process.
	Forever time.Duration = math.MaxInt64
	// TombstoneKept is how long a tombstone is kept at least: much longer than a message can be on its way.
	TombstoneKept = 7 * 24 * time.Hour
	// LeadPause is between the end of a leadership and the next campaign of the same process.
	LeadPause = time.Second
)
