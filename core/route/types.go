// Package route is the map topic → cluster as a value: topic names, an immutable hashed table of entries and rules that answers
// Decide without a lock or an allocation, and the pure functions that compute what to store when a topic or rule changes.
//
// internal/app builds tables from what a store delivers and publishes each through one atomic pointer; core/session asks
// them; internal/admin plans writes with them. The package never reads a store, a clock or a socket, and never
// changes a table that was handed out.
package route

// BucketCount is the number of buckets that the map is cut into: the unit of storage, of watching and of
// copy-on-write. A topic's bucket is Bucket(base name).
const BucketCount = 1024

// State is what is going on with a topic's entry.
type State uint8

// The states of an entry. Only StateActive occurs outside a switch.
const (
	StateActive State = iota
	StatePrepared
	StateFenced
	// StateDraining: producers and new subscriptions belong to Cluster; Entry.Drain says who still reads the old one.
	StateDraining
)

// Entry is the stored mapping of one topic. Topic is the canonical base name
// ("persistent://tenant/namespace/topic", no partition suffix).
//
// An entry with an empty Cluster is an epoch floor: the topic follows the rules, but its epoch is at least Epoch.
// `routes rm` leaves one behind when the removed entry had moved, so that an epoch never shrinks.
type Entry struct {
	Topic   string `json:"topic"`
	Cluster string `json:"cluster,omitempty"`
	State   State  `json:"state"`
	// Epoch counts the moves of the topic; it never shrinks.
	Epoch uint64 `json:"epoch"`
	// SwitchID names the switch that wrote the entry last ("" for a plain routes command). Its record holds the
	// broker addresses that evicted clients are sent to.
	SwitchID string `json:"switch_id,omitempty"`
	// Attempt counts the attempts of that switch.
	Attempt uint32 `json:"attempt,omitempty"`
	// Drain is the text of a Drain, of a draining entry, and of the prepared and fenced ones of its way back; else "".
	Drain string `json:"drain,omitempty"`
}

// Floor tells whether e only holds the topic's epoch and the rules decide its cluster.
func (e Entry) Floor() bool { return e.Cluster == "" }

// Rule maps everything in a namespace or a tenant that has no exact entry, or is the default.
// Scope is "tenant/namespace" (V1: "tenant/cluster/namespace"), "tenant", or "" for the default.
//
// A rule with an empty Cluster is an epoch floor: the next rule above decides, but the epoch is at least Epoch. Removing a
// rule leaves one behind when nothing else would keep its epoch.
type Rule struct {
	Scope    string `json:"scope"`
	Cluster  string `json:"cluster"`
	Epoch    uint64 `json:"epoch"`
	SwitchID string `json:"switch_id,omitempty"`
}

// Floor tells whether r only holds an epoch and the next rule above decides.
func (r Rule) Floor() bool { return r.Cluster == "" }

// Source says which kind of rule decided.
type Source uint8

// The sources of a decision, most specific first.
const (
	SourceTopic Source = iota
	SourceNamespace
	SourceTenant
	SourceDefault
	// SourceNone: nothing maps the topic, not even a default; Decision.Cluster is empty.
	SourceNone
	// SourceUnknown: the part of the map that would decide has never been read (Table.WithUnknown); Decision.Cluster is empty.
	SourceUnknown
)

// Decision is the answer of the map for one topic.
type Decision struct {
	// Cluster is the name of the mapped cluster. It may name a cluster that this proxy does not know.
	Cluster string
	Epoch   uint64
	State   State
	Source  Source
	// Scope is the rule that decided: the base name, "tenant/namespace", "tenant" or "".
	Scope string
	// SwitchID is that of the entry or rule that decided.
	SwitchID string
	// Drain is that of the entry that decided: DrainHas tells whether a subscription still belongs to DrainFrom.
	Drain string
}

// Changes says what a new table decides differently from the one before it.
type Changes struct {
	// Topics are the base names whose exact entries were added, removed or altered.
	Topics []string
	// Scopes are the rules that were added, removed or altered ("" = the default).
	Scopes []string
}

// Empty tells whether nothing changed.
func (c Changes) Empty() bool { return len(c.Topics) == 0 && len(c.Scopes) == 0 }
