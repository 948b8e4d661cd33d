// Package switching plans and judges the moves of topics from one cluster to another. It is sans-IO: plain values
// in, plain values out. internal/admin drives it; it must never know a socket, a store or a clock.
package switching

import (
	"time"

	"pointsman/core/route"
)

// Mode is how a topic is moved.
type Mode string

// The modes.
const (
	// ModePlanned fences, drains, carries the subscriptions and then flips; it needs both clusters.
	ModePlanned Mode = "planned"
	// ModeImmediate flips at once.
	ModeImmediate Mode = "immediate"
	// ModeDrain needs no replication: producers move fenced, and each subscription follows when it has nothing left on the old cluster.
	ModeDrain Mode = "drain"
	// ModeFailover flips at once and asks the old cluster nothing: it is dead.
	ModeFailover Mode = "failover"
)

// Driven tells whether the proxy that leads drives switches of this mode, step by step.
func (m Mode) Driven() bool { return m == ModePlanned || m == ModeDrain }

// Back is the mode in which a switch of this mode is reversed.
func (m Mode) Back() Mode {
	if m == ModeDrain {
		return ModeDrain
	}
	return ModePlanned
}

// State is how far a switch has come.
type State string

// The states of a switch. One in immediate mode is created together with its flip in one write; a planned one passes all
// of them. The topic's entry in the map is the truth; a record that lags behind it is mended by the next leader.
const (
	// StateRequested: somebody asked for it; nothing has changed yet.
	StateRequested State = "requested"
	// StatePrepared: the entry is prepared; every proxy has to write it to its disk and acknowledge.
	StatePrepared State = "prepared"
	// StateFenced: the entry is fenced; proxies hold back, the old cluster is drained, the subscriptions are carried.
	StateFenced State = "fenced"
	// StateEvicting: the map names the new cluster; proxies are telling the clients.
	StateEvicting State = "evicting"
	// StateDraining, of mode drain: producers are on the new cluster, and some subscriptions read the old one still.
	StateDraining State = "draining"
	// StateReturned, of mode drain: the switch was taken back, and the topic is active on the old cluster, with an epoch of its own.
	StateReturned State = "returned"
	// StateDone: every proxy that was alive has reported that no handle of the topic is left on the old cluster.
	StateDone State = "done"
	// StateIncomplete: the flip holds, but some proxy did not report in time; Record.Note names it.
	StateIncomplete State = "incomplete"
	// StateAborted: the entry is active on the old cluster again; Record.Note says why.
	StateAborted State = "aborted"
)

// Wish is what the operator wants of a switch. It is written into the record alone; the leader finds it there.
type Wish string

// The wishes.
const (
	// WishAbort: go back to the old cluster. Without effect after the flip, which is never undone.
	WishAbort Wish = "abort"
	// WishPause: do not begin. Without effect once the topic is prepared: a topic is not left in the middle.
	WishPause Wish = "pause"
)

// Over tells whether nothing more will happen.
func (s State) Over() bool {
	return s == StateDone || s == StateIncomplete || s == StateAborted || s == StateReturned
}

// Member is a proxy that was alive at the flip, and so has to report.
type Member struct {
	ID          string `json:"id"`
	Incarnation string `json:"incarnation"`
}

// Record is the stored account of one switch of one topic.
type Record struct {
	ID string `json:"id"`
	// Rev counts the writes of the record: revision n replaces n−1 and nothing else.
	Rev uint64 `json:"rev,omitempty"`
	// Attempt counts the attempts of a planned switch, from 1. An abort ends the attempt and with it the switch, until Again asks
	// for the next one.
	Attempt uint32 `json:"attempt,omitempty"`
	Batch   string `json:"batch,omitempty"` // shared by the switches of one command
	Topic   string `json:"topic"`           // canonical base name, or the scope of a rule
	From    string `json:"from"`
	To      string `json:"to"`
	Mode    Mode   `json:"mode"`
	State   State  `json:"state"`
	Wish    Wish   `json:"wish,omitempty"`
	// WishBy is who has spoken last since Who asked: of the Wish, or, without one, of the resume or of the way back.
	WishBy string `json:"wish_by,omitempty"`
	Epoch  uint64 `json:"epoch"` // the epoch that the flip writes; a return writes the next one
	// Return, of mode drain: this attempt leads back from To to From, which keep their meaning. When it is given up, it is false again and the
	// switch drains on.
	Return bool `json:"return,omitempty"`
	// Ruled tells that rules decided the topic before this attempt, and Floor is the entry that kept its epoch, if any: an abort puts both back.
	Ruled bool         `json:"ruled,omitempty"`
	Floor *route.Entry `json:"floor,omitempty"`
	// Assigned holds, per full topic name (with partition suffix), the logical address ("host:port") of the broker of
	// cluster To that a LOOKUP named before the flip. A name that could not be looked up is absent.
	Assigned map[string]string `json:"assigned,omitempty"`
	// Unassigned is how many names could not be looked up: their clients come back by a lookup of their own.
	Unassigned int `json:"unassigned,omitempty"`
	// Expect are the proxies whose acks end the switch.
	Expect []Member `json:"expect,omitempty"`
	// Deadline is when a switch whose proxies have not all reported ends as incomplete.
	Deadline time.Time `json:"deadline,omitzero"`
	// Runner is the id of the proxy that drives the switch.
	Runner  string    `json:"runner,omitempty"`
	Who     string    `json:"who,omitempty"`
	Why     string    `json:"why,omitempty"`
	Started time.Time `json:"started"`
	// Fenced is when the write that fenced the topic was sent.
	Fenced  time.Time `json:"fenced,omitzero"`
	Flipped time.Time `json:"flipped,omitzero"`
	Ended   time.Time `json:"ended,omitzero"`
	Note    string    `json:"note,omitempty"`
	// Failover is what a failover knew of the topic, or of those of a rule, and what it did for them.
	Failover *FailoverFacts `json:"failover,omitempty"`
	// Receipt is what a planned switch has measured and found so far.
	Receipt *Receipt `json:"receipt,omitempty"`
}

// Receipt is the evidence of a planned switch: of its last attempt.
type Receipt struct {
	// Steps are the works of the controller in their order, each with when it began and how long it took; the same work is one step as long as
	// it is repeated without another in between.
	Steps []StepTime `json:"steps,omitempty"`
	// HoldMillis is how long the topic was fenced: from the sending of that write to that of the one that ended it, by the clocks of the
	// two leaders when the first one has died in between.
	HoldMillis float64 `json:"hold_ms,omitempty"`
	// Tail is the last position on the old cluster for each partition, in the drain.
	Tail map[string]string `json:"tail,omitempty"`
	// First is where each partition's copy of that position lies on the new cluster.
	First map[string]string `json:"tail_on_new,omitempty"`
	// Acks are those of the proxies, without the producers' names.
	Acks []Ack `json:"acks,omitempty"`
	// Subscriptions are how each was carried, at most MaxCarried; SubscriptionCount is how many there were.
	Subscriptions     []Carried `json:"subscriptions,omitempty"`
	SubscriptionCount int       `json:"subscription_count,omitempty"`
	// DuplicatesForecast are the entries that may be delivered twice, over all subscriptions: delivered by the old cluster and not
	// acknowledged, or acknowledged where it could not be carried.
	DuplicatesForecast int64 `json:"duplicates_forecast"`
	// Evicted tells that the old cluster was made to unload the topic, because not every proxy could vouch for what it had sent.
	Evicted bool `json:"evicted,omitempty"`
	// Moved are the subscriptions that have left the old cluster of a drain, in that order, at most MaxCarried; MovedCount is how many.
	Moved      []Moved `json:"moved,omitempty"`
	MovedCount int     `json:"moved_count,omitempty"`
	// Copied is how many messages a way back has copied to the old cluster. When it was given up they come again on the new one.
	Copied int64 `json:"copied,omitempty"`
	// Verified is what the comparison of both tails, and of the subscriptions with what was carried, found after the flip.
	Verified string `json:"verified,omitempty"`
}

// Moved is when a subscription had nothing left on the old cluster of a drain, and went to the new one.
type Moved struct {
	Subscription string    `json:"subscription"`
	At           time.Time `json:"at"`
	Seconds      float64   `json:"seconds"` // after the flip
}

// MaxCarried bounds the subscriptions that a receipt lists.
const MaxCarried = 200

// StepTime is one step of a receipt.
type StepTime struct {
	Work   string    `json:"work"`
	Began  time.Time `json:"began"`
	Millis float64   `json:"ms"`
	Times  int       `json:"times,omitempty"` // how often it was done; omitted for once
	Why    string    `json:"why,omitempty"`   // what was said when it was not done at last
}

// Carried is how one subscription of one partition came to the new cluster.
type Carried struct {
	Topic        string `json:"topic"`
	Subscription string `json:"subscription"`
	How          string `json:"how"`          // source position, producer and sequence id, publish time, ...
	By           string `json:"by,omitempty"` // how copies are recognised, which How leaves open at the end of the log
	First        string `json:"first"`        // the first position to be delivered on the new cluster
	Holes        int    `json:"holes"`        // ranges behind First that are acknowledged already
	Backlog      int64  `json:"backlog"`
	Unacked      int64  `json:"unacked"`            // delivered by the old cluster and not acknowledged
	Repeated     int64  `json:"repeated,omitempty"` // acknowledged there and delivered again all the same
	Missing      int64  `json:"missing,omitempty"`  // not acknowledged, and without a copy on the new cluster
	Note         string `json:"note,omitempty"`
	// After is what the verification after the flip has found; null when the subscription was not looked at then.
	After *After `json:"after,omitempty"`
}

// After is a subscription on the new cluster a moment after the flip, when clients use it.
type After struct {
	Backlog int64 `json:"backlog"` // in entries
	// Difference is the backlog less what it would be by the plan if nobody had acknowledged anything since: below 0 that much was acknowledged, above 0 that much
	// comes again and was not to.
	Difference int64 `json:"difference"`
}

// Again is the record that asks for the next attempt of a switch that was aborted, or taken back.
func (r Record) Again(now time.Time) Record {
	r.Rev++
	r.Attempt++
	r.State, r.Wish, r.WishBy, r.Note, r.Runner, r.Return = StateRequested, "", "", "", "", false
	r.Started, r.Fenced, r.Flipped, r.Ended = now, time.Time{}, time.Time{}, time.Time{}
	r.Receipt, r.Ruled, r.Floor = nil, false, nil
	return r
}

// Back is the record that asks for the return of a switch that drains: the next attempt, in the other direction. Whether it is possible
// is judged by the leader.
func (r Record) Back() Record {
	r.Rev++
	r.Attempt++
	r.State, r.Wish, r.WishBy, r.Note, r.Runner, r.Return = StateRequested, "", "", "", "", true
	r.Ruled, r.Floor = false, nil
	return r
}

// Ack is what one proxy reports when it has come so far as Phase: its disk copy knows that the topic is prepared; every message
// that it has forwarded is answered (fenced); the handles are closed (evicting).
type Ack struct {
	Attempt     uint32 `json:"attempt,omitempty"`
	Phase       State  `json:"phase,omitempty"` // prepared, fenced or evicting; "" is evicting
	Proxy       string `json:"proxy"`
	Incarnation string `json:"incarnation"`
	// Clean tells, of a fenced ack, that nothing which this process may have sent can still arrive at the old cluster; Why says why not.
	Clean bool   `json:"clean,omitempty"`
	Why   string `json:"why,omitempty"`
	// Claims are the producer names that this proxy's clients have on the old cluster, of a fenced ack.
	Claims     []string  `json:"claims,omitempty"`
	Producers  int       `json:"producers"` // handles evicted
	Consumers  int       `json:"consumers"`
	Unresolved int       `json:"unresolved"` // SENDs without a receipt when the eviction wait ended
	At         time.Time `json:"at"`
}
