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
	// same write. The driver repeats it after a conflict only if that was on a neighbour's account. NotYet only if it is certain that
	// the write will never come.
	WorkWrite
	// WorkSurvey: sync, then read the record, then the roster with sessions and tombstones, then the acks, in this order, none of them
	// from a cache or from before the step. Report: Record, Survey.
	WorkSurvey
	// WorkEvict: unload every partition of the topic on the old cluster, now.
	WorkEvict
	// WorkTail: read the last position of every partition on the old cluster. Report: Tail.
	WorkTail
	// WorkReplicated: OK when the replication to the new cluster has passed Step.Tail on every partition, else NotYet with Why saying
	// how far it is. Decided by positions: "disconnected" is neither drained nor broken (SW-09).
	WorkReplicated
	// WorkCarry: put every cursor of the new cluster where that of the old one is, by absolute positions only, never "end",
	// clear-backlog or skip (C8): this call may arrive late, from a leader that was frozen. Nothing is taken over from an earlier attempt.
	WorkCarry
	// WorkReadBack: OK when every cursor of the new cluster is where that of the old one is, else NotYet with Why naming one.
	WorkReadBack
	// WorkTailAgain: list who publishes on the old cluster, and then read what was stored there after Step.Tail, apart from replicated entries
	// and markers. In this order: who is seen neither there nor by what he wrote comes later. Report: Publishers; Foreign names the producer
	// and its address, "" when there is nothing.
	WorkTailAgain
	// WorkVerify: compare the tails of both clusters by producer and sequence id. Report: Why is what the receipt says of it.
	WorkVerify
	// WorkRecord: write the record of revision Step.Record.Rev−1 alone.
	WorkRecord
)

var workNames = [...]string{"over", "wait", "read", "write", "survey", "evict", "tail", "replicated", "carry", "read back", "tail again", "verify", "record"}

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
}

// RecordState is the part of a Record that a controller reads and writes.
type RecordState struct {
	Rev     uint64
	Attempt uint32
	State   State
	Wish    Wish // read only
	Note    string
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

// Survey is who could act on a topic, and what they have acknowledged.
type Survey struct {
	Members    []MemberFact
	Tombstones []string // members forgotten so recently (SettleTime) that the old cluster may have SENDs of theirs
	Acks       []Ack    // of this switch, every attempt
}

// MemberFact is one member of the roster.
type MemberFact struct {
	Member
	// Live: its session has not expired. Being disconnected is not being expired.
	Live bool
	// Aged: it was not seen for longer than max_map_age and a margin, so that it holds all publishes by itself (P8).
	Aged bool
}
