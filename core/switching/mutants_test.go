package switching

import (
	"strings"
	"testing"
)

// mutants are the rules of the protocol, each taken out, with a world that is big enough to notice, and what it must notice.
var mutants = []struct {
	rule string
	out  mutant
	in   config
	want string // the beginning of the violation
}{
	{"every member counts, not only those with a session (C2)", noRoster, config{proxies: 2, messages: 1, left: budget{cut: 1}}, "I1"},
	{"sessions are judged after the fence (C3)", sessionsBeforeFence, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"who vanished once is not remembered as gone (C3)", rememberVanished, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"a prepared ack alone counts only with an expired session (C3)", noExpiry, config{proxies: 1, messages: 1}, "I"},
	{"a proxy is a member before it reads the map (P1)", registerAfterRead, config{proxies: 2, messages: 1, joiner: true, left: budget{move: 1}}, "I1"},
	{"a process has a node of its own session (P1)", notOwnNode, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"publishes of a prepared topic need a lease (P2)", noLease, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"pings prolong no lease (P2)", leaseFromPings, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"a new session has no lease before a synced read (P2)", leaseBeforeRead, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"a new process has no lease (P2)", leaseAtStart, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"prepared is acknowledged when it is on the disk (P3)", ackBeforeDisk, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"what the disk has in a switch stays held (P6)", noHoldFromDisk, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"a handle that dropped once never forwards again (P4)", notPoisoned, config{proxies: 1, messages: 2}, "I3"},
	{"fenced is acknowledged when every SEND is answered (P5)", noReceipts, config{proxies: 1, messages: 1}, "I"},
	{"a leg that was lost with SENDs on it makes the ack dirty (P5)", dirtyLegClean, config{proxies: 1, messages: 1, left: budget{leg: 1}}, "I1"},
	{"so does a process that is too young (P5)", youngClean, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"no proxy undoes a fence by its own clock (P6, C1)", localUndo, config{proxies: 1, messages: 1, left: budget{cut: 1}}, "I1"},
	{"who is not clean makes the controller evict (C4)", noEvict, config{proxies: 1, messages: 1, left: budget{leg: 1}}, "I1"},
	{"it evicts after the last ack (C4)", evictBeforeAcks, config{proxies: 1, messages: 1, left: budget{crash: 1}}, "I1"},
	{"the tail is read after the acks (C5)", drainBeforeFence, config{proxies: 1, messages: 1}, "I2"},
	{"a write replaces exactly the entry of its attempt (S1, C6)", noIdentity, config{proxies: 1, messages: 1, left: budget{change: 1, again: 1}}, "I"},
	{"so does an abort (C6)", unconditionalAbort, config{proxies: 1, messages: 0, left: budget{change: 1}}, "I4"},
	{"entry and record change in one write (S1)", splitWrites, config{proxies: 1, messages: 0, left: budget{change: 1, wish: 1}}, "I7"},
	{"the entry is the truth, not the record (C7)", recordLags | recordIsTruth, config{proxies: 1, messages: 0, left: budget{change: 1, wish: 1}}, "I7: the record says aborted"},
	{"acks of another attempt count for nothing (S3)", acksOfAnyAttempt, config{proxies: 1, messages: 1, left: budget{again: 1}}, "I"},
	{"a member is forgotten when its disk copy is destroyed (C9)", forgetKeepsDisk, config{proxies: 2, messages: 1, left: budget{crash: 1, forget: 1}}, "I1"},
	{"forgetting leaves a tombstone (C9, C4)", noTombstone, config{proxies: 2, messages: 1, left: budget{crash: 1, forget: 1}}, "I1"},
	{"a map that is too old holds publishes (P8)", noAgeHold, config{proxies: 2, messages: 1, left: budget{cut: 1, age: 1}}, "I1"},
	{"cursors are absolute positions (C8)", cursorsAtEnd, config{proxies: 1, messages: 1, consumer: true}, "I6"},
	{"acknowledgements are held under the fence (P7)", acksNotHeld, config{proxies: 1, messages: 1, consumer: true}, "cursors"},
	{"every attempt carries the cursors anew (C8)", carryOnce, config{proxies: 1, messages: 1, consumer: true, left: budget{again: 1}}, "cursors"},

	// Of a drain.
	{"the subscriptions are on the new cluster before the flip", subsNotMade, config{proxies: 1, messages: 2, drain: true, consumer: true}, "I6"},
	{"a subscription that is listed is served by the old cluster", homeIgnored, config{proxies: 1, messages: 2, drain: true, consumer: true}, "order"},
	{"what is not acknowledged is left, delivered or not", leftByDelivery, config{proxies: 1, messages: 1, drain: true, consumer: true}, "drain: subscription 0 leaves messages"},
	{"who leaves is first cut off from the old cluster", leavesAtOnce, config{proxies: 1, messages: 1, drain: true, consumer: true, left: budget{seek: 1}}, "drain: subscription 0 leaves"},
	{"the way back is closed when somebody had a message", alwaysReturnable, config{proxies: 1, messages: 1, drain: true, consumer: true, fresh: true, left: budget{back: 1}}, "return: subscription"},
	{"or has left, with nothing on the new cluster yet: a proxy that has not heard of it consumes the copy on the old one", goneForgotten, config{proxies: 1, messages: 1, drain: true, consumer: true, left: budget{back: 1}}, "twice"},
	{"which is judged within the fence", returnableOnce, config{proxies: 1, messages: 1, drain: true, consumer: true, fresh: true, left: budget{back: 1}}, "return: subscription"},
	{"the way back brings all messages", copyInPart, config{proxies: 1, messages: 2, drain: true, consumer: true, left: budget{back: 1}}, "return: messages"},
	{"what was copied is passed over on the new cluster", notPassedOver, config{proxies: 1, messages: 1, drain: true, consumer: true, left: budget{back: 1, again: 1}}, "twice"},
	{"before the record says that the topic was taken back", recordFirst, config{proxies: 1, messages: 1, drain: true, consumer: true, left: budget{back: 1, again: 1}}, "twice"},
	{"and not before it was", passWhileFenced, config{proxies: 1, messages: 1, drain: true, consumer: true, fresh: true, left: budget{back: 1}}, "I6"},
	{"by a leader that has asked the map", passUnasked, config{proxies: 1, messages: 1, drain: true, consumer: true, lateChange: true, left: budget{change: 1, back: 1, again: 1}}, "I6"},
	{"after it read the end", passAskedFirst, config{proxies: 1, messages: 1, drain: true, consumer: true, lateChange: true, left: budget{change: 1, back: 1, again: 1}}, "I6"},
	{"but not by who has something left of before the flip", passAll, config{proxies: 1, messages: 1, drain: true, consumer: true, leftover: true, left: budget{back: 1}}, "I6"},
	{"the fence of a drain waits for receipts (P5)", noReceipts, config{proxies: 1, messages: 1, drain: true, consumer: true}, "I1"},
	{"so does that of a way back (P5)", noReceipts, config{proxies: 1, messages: 1, drain: true, consumer: true, left: budget{back: 1}}, "I1"},
}

func TestEveryRuleIsNeeded(t *testing.T) {
	for _, mutant := range mutants {
		t.Run(mutant.rule, func(t *testing.T) {
			c := mutant.in
			if raceEnabled && c.left.again > 0 && c.left.back > 0 {
				t.Skip("a large world: without the race detector only")
			}
			c.name, c.mutant = mutant.rule, mutant.out
			s := newSearch(c, 0)
			began := cpu()
			bad := s.run()
			t.Log(s.summary(cpu() - began))
			if !strings.HasPrefix(bad, mutant.want) {
				t.Errorf("without the rule the checker found %q, want %s\n%s", bad, mutant.want, s.trace)
			}
			if testing.Verbose() && bad != "" {
				t.Log(bad)
			}
		})
	}
}
