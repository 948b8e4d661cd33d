package switching

import (
	"time"

	"pointsman/core/route"
)

// Work is what a Controller wants done. The driver does one work at a time and reports it with Observe; each may be done twice.
type Work uint8

// The kinds of work.
const (
	// WorkOver: nothing more, ever.
	WorkOver Work = iota
	// WorkWait: call Next again at Step.Until. When an ack or the record has changed, call Nudge first and do not wait.
	WorkWait
	// WorkRead: sync, then read the record, and then the entry. In this order: a record that is newer than the entry would be taken for
	// one that lags. Report: Record, Entry, Absent.
	WorkRead
	// WorkWrite: in one write replace exactly the entry Step.Before by Step.After, and the record of revision Step.Record.Rev−1 by one
	// that has Step.Record. When Before is the zero entry the topic has none of its own: the rules that decide it are compared in the
	// same write. An abort (StateAborted) of a topic that had none before the attempt may put that back in place of After, when the rules
	// that decide it then are compared in the same write and lead to After's cluster. The driver repeats it after a conflict only if that
	// was on a neighbour's account. NotYet only if it is certain that the write will never come.
	WorkWrite
	// WorkSurvey: sync, then read the record, then the roster with sessions and tombstones, then the acks, in this order, none of them
	// from a cache or from before the step. Report: Record, Survey.
	WorkSurvey
	// In the following, the old cluster is the one that the attempt leads away from: of a way back (Step.Return) it is the record's To.

	// WorkEvict: unload every partition of the topic on the old cluster, now.
	WorkEvict
	// WorkTail: read the last position of every partition on the old cluster. Report: Tail.
	WorkTail
	// WorkReplicated: OK when the replication to the new cluster has passed Step.Tail on every partition, else NotYet with Why saying
	// how far it is. Decided by positions: "disconnected" is neither drained nor broken (SW-09).
	WorkReplicated
	// WorkCarry, of a drain: make sure that the new cluster has every durable subscription that the old one has; one that is missing is made, at
	// the end, which has no message of the topic's since the fence. One that is there stays where it is. Report: Subs.
	//
	// WorkCarry, else: put every cursor of the new cluster where that of the old one is, by absolute positions only, never "end",
	// clear-backlog or skip (C8): this call may arrive late, from a leader that was frozen. Nothing is taken over from an earlier attempt.
	WorkCarry
	// WorkReadBack: OK when every cursor of the new cluster is where that of the old one is, else NotYet with Why naming one.
	WorkReadBack
	// WorkTailAgain: list who publishes on the old cluster, and then read what was stored there after Step.Tail, apart from replicated entries
	// and markers. In this order: who is seen neither there nor by what he wrote comes later. Report: Publishers; Foreign names the producer
	// and its address, "" when there is nothing.
	WorkTailAgain
	// WorkVerify: compare the tails of both clusters by producer and sequence id, and the subscriptions with what was carried. Report: Why is what the receipt says of it.
	WorkVerify
	// WorkRecord: write the record of revision Step.Record.Rev−1 alone.
	WorkRecord
	// WorkDrained: what is left on the old cluster of the subscriptions of Step.Drain, over all partitions: first who is connected, then
	// backlogs, none of them from before the step. Report: Drained. There is no deadline.
	WorkDrained
	// WorkReturnable, of a way back: OK as long as nothing that was published on the new cluster since the flip has been delivered there to
	// anybody, else Never with Why naming who had it.
	WorkReturnable
	// WorkCopy, of a way back: copy what the new cluster got since the flip to the old one, in its order and behind what is there, each marked with
	// where it comes from, so that whoever repeats this goes on behind what has come. With Step.Tail: all until there. Without: while
	// producers go on, until little is left, without a deadline. NotYet with Why saying how much is left. Report: Copied.
	WorkCopy
)

var workNames = [...]string{"over", "wait", "read", "write", "survey", "evict", "tail", "replicated", "carry", "read back", "tail again", "verify", "record",
	"drained", "returnable", "copy"}

func (w Work) String() string { return workNames[w] }

// onStore tells that the work is on the store, which repeats what it refused.
func (w Work) onStore() bool {
	return w == WorkRead || w == WorkWrite || w == WorkSurvey || w == WorkRecord
}

// Step is the next work of a switch.
type Step struct {
	Work   Work
	Until  time.Time   // of WorkWait
	Before route.Entry // of WorkWrite; the zero entry is an absent one
	After  route.Entry // of WorkWrite
	Record RecordState // of WorkWrite and WorkRecord: what the record becomes
	Tail   string      // of WorkReplicated, WorkCarry, WorkReadBack, WorkTailAgain and WorkVerify
	Why    string      // of WorkWait: who or what is waited for
	// Return tells that the attempt leads back (Record.Return).
	Return bool
	// Drain is the text of the route.Drain that the map has, of WorkDrained, WorkReturnable and WorkCopy.
	Drain string
}

// RecordState is the part of a Record that a controller reads and writes.
type RecordState struct {
	Rev     uint64
	Attempt uint32
	State   State
	Wish    Wish // read only
	WishBy  string
	Note    string
	Return  bool
}

// Answer is how a work went.
type Answer uint8

// The answers.
const (
	OK Answer = iota
	// Conflict, of a write: the entry or the record was not as expected; nothing was written.
	Conflict
	// Unknown, of a write: it may have been done, or may be done yet.
	Unknown
	// NotYet: it was not done, or the answer is no. It is tried again until the deadline.
	NotYet
	// Never: trying again is of no use. The switch aborts.
	Never
)

func (a Answer) String() string {
	return [...]string{"ok", "conflict", "unknown", "not yet", "never"}[a]
}

// Report is what became of a step.
type Report struct {
	Answer Answer
	Why    string    // for an operator, of NotYet and Never: what is wrong, and where
	Late   bool      // of NotYet: the deadline cut the work off; what was waited for before it says more than Why
	Began  time.Time // when the driver began the step
	// Entry is what the map says of the topic; Absent tells that it has no entry of its own and rules decided.
	Entry  route.Entry
	Absent bool
	Record RecordState
	Survey Survey
	// Tail is the driver's own notation of one position per partition.
	Tail string
	// Tails are the same positions, one for each partition in its order, or one for a topic without partitions.
	Tails []route.Tail
	// Subs are the durable subscriptions of the old cluster, of WorkCarry of a drain.
	Subs    []string
	Drained Drained
	Copied  int64 // messages that this step has copied
	// Publishers are the producers on the old cluster, replicators left out.
	Publishers []Publisher
	Foreign    string
}

// Publisher is a producer on the old cluster.
type Publisher struct {
	Name string
	// Text tells an operator who it is: name, address and library.
	Text string
}

// Drained is what the old cluster has of a topic that drains.
type Drained struct {
	// Subs are its durable subscriptions, in any order. One that is missing does not exist there any more.
	Subs []SubFact
	// Readers are the connected consumers that have no durable subscription.
	Readers int
}

// SubFact is a durable subscription, over all partitions.
type SubFact struct {
	Name      string
	Backlog   int64  // entries that are not acknowledged, those held back for later included
	Unacked   int64  // messages that consumers have and did not acknowledge, as the broker counts them; for people
	Consumers int    // that are connected
	By        string // who they are, for an operator
}

// Survey is who could act on a topic, and what they have acknowledged.
type Survey struct {
	Members    []MemberFact
	Tombstones []string // members forgotten so recently that the old cluster may have SENDs of theirs: the driver has not seen the tombstone for SettleTime
	Acks       []Ack    // of this switch, every attempt
}

// MemberFact is one member of the roster.
type MemberFact struct {
	Member
	// Live: its session has not expired. Being disconnected is not being expired.
	Live bool
	// Aged: it was not seen for longer than max_map_age and a margin, so that it holds all publishes by itself (P8).
	Aged bool
	// AgedIn is how long that will take yet, at the earliest; 0: it will not, or is so.
	AgedIn time.Duration
}
