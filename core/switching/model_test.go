package switching

import (
	"fmt"
	"time"

	"pointsman/core/route"
)

// The model: two clusters, up to three proxies, a store with late watches and sessions, one client that publishes and one that
// consumes, and the real Gate, Proxy, Lease and Controller between them. A world is one state, a comparable value; model.each gives
// what can happen next. What is simplified: a survey is one instant unless the config is slow, telling
// the loops is instant (the table is swapped first), B does not replicate to A, and a broker opens and closes at once.

const (
	maxProxies  = 3
	maxSubs     = 2
	maxAttempts = 4
)

var (
	modelNow  = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	modelLate = modelNow.Add(time.Hour) // after every deadline
	modelOld  = modelNow.Add(-time.Hour)
	ids       = [maxProxies]string{"p1", "p2", "p3"}
	incs      = [...]string{"i0", "i1", "i2", "i3", "i4"}
	tails     = [...]string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"} // in order
)

const modelTimeout = 15 * time.Second // a session's

// queue is a short sequence of messages.
type queue struct {
	n uint8
	m [12]uint8
}

func (q *queue) push(m uint8) bool {
	if int(q.n) == len(q.m) {
		return false
	}
	q.m[q.n] = m
	q.n++
	return true
}

func (q *queue) pop() uint8 {
	m := q.m[0]
	copy(q.m[:], q.m[1:q.n])
	q.n--
	q.m[q.n] = 0
	return m
}

// set is the messages of a queue as bits.
func (q queue) set() (s uint8) {
	for _, m := range q.m[:q.n] {
		s |= 1 << m
	}
	return s
}

// handle is a producer or a consumer in a proxy.
type handle struct {
	on     bool
	client bool // the client has it open
	b      bool // it leads to cluster b
	dead   bool // the broker has closed it
	g      Gate
	sent   queue // SENDs that the broker has not judged
	back   queue // receipts on their way back
	seen   uint8 // consumer: messages that came on it
	unread uint8 // consumer: messages that its client has not acknowledged
	held   uint8 // consumer: ACKs held
}

// connection of a process to the store, in the order of P1.
const (
	noSession uint8 = iota
	hasSession
	halfway // registered, not read; the other way round for the mutant
	connected
)

// Owners of the ephemeral node of a proxy.
const (
	nobody uint8 = iota
	thisSession
	oldSession // of the process before
)

// proc is a proxy: its process, its node's disk, and what the store and the brokers have of it.
type proc struct {
	up, cut  bool
	conn     uint8
	inc      uint8
	p        Proxy
	lease    Lease
	prod     handle
	cons     [maxSubs]handle // a consumer of each subscription
	lost     bool            // SENDs of a leg that was lost may be at the broker
	aged     bool            // no contact for max_map_age
	disk     route.Entry
	oldDisk  bool // and of the disk copy, whatever the process knows
	member   bool
	tomb     bool
	node     uint8
	session  bool  // the store has the session of this process
	old      bool  // and that of the process before
	orphans  queue // SENDs in cluster a's buffers from legs that ended
	orphansB queue // and in those of b, of a drain: only then b can become the old cluster
	prepared [maxAttempts]uint8
	fenced   [maxAttempts]uint8 // acks by attempt; bits are incarnations
	clean    [maxAttempts]uint8
	evicting [maxAttempts]uint8
}

// leader is one process that believes to lead.
type leader struct {
	on       bool
	c        Controller
	half     bool        // the first half of a read or of a carry is done
	rec      RecordState // of a read
	snap     uint8       // of a carry: the cursor of a
	members  uint8       // what the mutants remember of earlier surveys
	live     uint8
	gone     uint8
	incs     [maxProxies]uint8 // of a survey of which the roster has been read, as members and live
	early    bool
	tailSeen bool
	tail     uint8
	pass     passing // of a way back that is over
	over     uint8   // the subscriptions that are to pass over, as bits
}

// passing is how far a leader has come with what is left to do on b when a topic is on a again.
type passing uint8

const (
	notPassing passing = iota
	endRead            // and which subscriptions have something left, and nothing of before the flip
	mapAsked
	passedOver
)

// budget is how much may still go wrong.
type budget struct {
	crash, cut, leg, move, change, unknown, again, forget, age, wish int8
	back, seek, late                                                 int8 // of a drain
}

// world is one state.
type world struct {
	entry   route.Entry
	rec     RecordState
	procs   [maxProxies]proc
	leaders [2]leader
	ghost   Step // a write whose sender does not know what became of it, and that may still come
	haunted bool

	a, b       queue          // what is stored
	replicated uint8          // how many of a's entries are on b
	home       uint8          // the proxy that the client goes to
	next       uint8          // of the producer: the next message on this connection
	acked      uint8          // of the producer: the last receipt
	ackA, ackB [maxSubs]uint8 // the subscriptions' cursors, as bits of messages
	processed  [maxSubs]uint8 // messages that the consumer has had
	carried    uint8          // attempts that have carried cursors, as bits
	// inexact: cursors may be behind: a leader that was replaced has carried, or a member that holds publishes alone (P8) was not waited for
	// and its consumers go on; of a drain, something comes twice that ADR 007 does not promise to come once.
	inexact bool
	left    budget

	// Of a drain:
	at       [maxSubs]uint8     // the proxy that the consumer goes to
	onA      uint8              // subscriptions that a has, as bits
	made     uint8              // and that b has
	hadOnB   [maxSubs]uint8     // messages that the consumer had from b
	want     [maxSubs]uint8     // messages that the consumer wants again
	copied   uint8              // how many of b's entries are on a
	copies   uint8              // messages that a has by copying alone
	boundary [maxAttempts]uint8 // how many b had when the topic last moved there, before or in an attempt
	epoch    uint64             // that the record says
}

// mutant is a set of rules that are taken out.
type mutant uint64

const (
	noRoster mutant = 1 << iota
	sessionsBeforeFence
	registerAfterRead
	notOwnNode
	rememberVanished
	noExpiry
	noLease
	leaseFromPings
	leaseBeforeRead
	leaseAtStart
	ackBeforeDisk
	noHoldFromDisk
	noReceipts
	dirtyLegClean
	youngClean
	noEvict
	evictBeforeAcks
	drainBeforeFence
	notPoisoned
	localUndo
	noIdentity
	unconditionalAbort
	recordIsTruth
	splitWrites
	recordLags // not a mutant of the protocol: a store that writes the entry and leaves the record for later
	acksOfAnyAttempt
	forgetKeepsDisk
	noTombstone
	noAgeHold
	cursorsAtEnd
	acksNotHeld
	carryOnce
	subsNotMade // of a drain, as the following
	homeIgnored
	leftByDelivery
	leavesAtOnce
	alwaysReturnable
	returnableOnce
	goneForgotten
	copyInPart
	notPassedOver
	passUnasked
	passAskedFirst
	passAll
	passWhileFenced
	recordFirst
)

// config is one bounded world.
type config struct {
	name     string
	proxies  int
	messages uint8
	consumer bool
	drain    bool // without replication
	two      bool // a second subscription
	fresh    bool // and the second one is made on b, after the flip
	leftover bool // b has a message that is not of this switch (bit 0), and the subscriptions there have not had it
	joiner   bool // the last proxy is new
	left     budget
	mutant   mutant
	// live also checks that the good end can be reached from everywhere without further faults.
	live bool
	deep bool // only in the full set
	// lateChange: leaders change only when a topic was taken back and the record does not say so yet.
	lateChange bool
	// slow: time passes between the reads of a survey.
	slow bool
}

// Events, for coverage and traces.
type kind uint8

const (
	evSend kind = iota
	evDrop
	evStoreA
	evStoreB
	evOrphan
	evReceipt
	evReplicate
	evOpen
	evCloseHandle
	evCloseAnswered
	evMove
	evLegLost
	evDeliver
	evMessageDropped
	evAck
	evAckHeld
	evSubscribe
	evLearn
	evSave
	evLazySave
	evAckPrepared
	evAckClean
	evAckDirty
	evAckEvicting
	evCrash
	evStart
	evStartFromDisk
	evSession
	evRegister
	evSync
	evRenew
	evLapse
	evCut
	evHeal
	evExpire
	evOldExpire
	evSettle
	evAge
	evForget
	evLeaderChange
	evRead
	evWrite
	evConflict
	evUnknownDone
	evUnknownLost
	evGhost
	evRoster
	evSurvey
	evEvict
	evTail
	evReplicated
	evCarrySnap
	evCarry
	evReadBack
	evTailAgain
	evRecord
	evDeadline
	evAgain
	evWish
	evFlip
	evAbort
	evBack // of a drain, as the following
	evRedrive
	evConsumerMoves
	evSeek
	evOrphanB
	evConnected
	evDrained
	evLate
	evLeaving
	evPutBack
	evLeft
	evEmpty
	evReturnable
	evTouched
	evCopyReads
	evCopy
	evCopied
	evReturn
	evGivenUp
	evDrainsAgain
	evEndRead
	evStill
	evNotStill
	evPassOver
	evLocalUndo
	kinds
)

var kindNames = [kinds]string{"send", "drop", "a stores", "b stores", "a stores from a lost leg", "receipt", "replicate", "open", "close", "close answered", "client moves", "leg lost",
	"deliver", "message dropped", "ack", "ack held", "subscribe", "learn", "save", "lazy save", "ack prepared", "ack clean", "ack dirty", "ack evicting", "crash", "start", "start from disk",
	"open session", "register", "sync", "renew lease", "lease lapses", "cut off", "heal", "session expires", "old session expires", "settle", "map too old", "forget",
	"leader changes", "read", "write", "conflict", "unknown, done", "unknown, on its way", "late write comes", "roster", "survey", "evict", "tail", "replicated", "carry reads", "carry writes",
	"read back", "tail again", "record", "deadline", "next attempt", "operator aborts", "flip", "abort",
	"the way back", "driven anew", "consumer moves", "seek", "b stores from a lost leg", "who is connected", "what is left", "leaving for too long", "leaving", "put back", "left", "nothing is left",
	"nobody had a message", "somebody had a message", "copy reads", "copy writes", "all is copied", "return", "return given up", "drains again", "end read", "still on a", "moved on", "pass over", "local undo"}

// event is what happened: to which proxy or leader.
type event struct {
	kind  kind
	who   uint8
	fault bool
}

func (e event) String() string { return fmt.Sprintf("%s %d", kindNames[e.kind], e.who+1) }

// model runs one config. bad is the violation that the last step made; full tells that a bound of the representation was met.
type model struct {
	config
	bad  string
	full bool
	next world // of each
	only int   // of each: 0 is everything; n only the nth event; −1 only names them, without a world
}

func (m *model) is(x mutant) bool { return m.mutant&x != 0 }

func (m *model) fail(format string, args ...any) {
	if m.bad == "" {
		m.bad = fmt.Sprintf(format, args...)
	}
}

func (m *model) record() Record {
	rec := Record{ID: "s", Attempt: 1, Topic: "t", From: "a", To: "b", Mode: ModePlanned, State: StateRequested, Epoch: 2}
	if m.drain {
		rec.Mode = ModeDrain
	}
	return rec
}

func (m *model) initial() world {
	w := world{entry: route.Entry{Topic: "t", Cluster: "a", Epoch: 1}, rec: RecordState{Rev: 1, Attempt: 1, State: StateRequested}, next: 1, left: m.left}
	for i := range m.proxies {
		p := &w.procs[i]
		if m.joiner && i == m.proxies-1 {
			continue
		}
		*p = proc{up: true, conn: connected, disk: w.entry, member: true, node: thisSession, session: true}
		p.p = NewProxy(modelOld, w.entry)
		p.p.Learn(w.entry)
		p.lease = NewLease(modelTimeout)
		p.lease.Synced(0)
	}
	w.leaders[0] = leader{on: true, c: NewController(m.record())}
	w.epoch = m.record().Epoch
	for k := range w.at {
		w.at[k] = uint8((2*m.proxies - 1 - k) % m.proxies)
	}
	for k := range m.subs() {
		if m.listed(k) {
			w.onA |= 1 << k
		}
		if m.leftover {
			w.made |= 1 << k
		}
	}
	if m.leftover {
		w.b.push(0)
	}
	return w
}

// subs are the subscriptions of the world.
func (m *model) subs() int {
	switch {
	case m.two, m.fresh:
		return 2
	case m.consumer:
		return 1
	}
	return 0
}

func (m *model) standing(p *proc) Standing {
	s := p.p.Standing(p.lease.Left(0) > 0, p.aged && !m.is(noAgeHold))
	if m.is(noLease) {
		s.Lease = true
	}
	return s
}

// store appends a publish, or a replicated one.
func (m *model) store(w *world, b, replicated bool, msg uint8) {
	log, flipped := &w.a, w.entry.Cluster == "b"
	if b {
		log = &w.b
	}
	switch {
	case !b && flipped && (!m.drain || !replicated):
		m.fail("I1: message %d is stored on a after the flip", msg)
	case b && !replicated && !flipped:
		m.fail("I1: message %d is stored on b before the flip", msg)
	}
	has := log.set()
	if m.drain {
		has = w.a.set() | w.b.set()
	}
	if has>>msg&1 == 0 {
		for x := uint8(1); x < msg; x++ {
			if has>>x&1 == 0 {
				m.fail("I3: message %d is stored before message %d", msg, x)
			}
		}
	}
	if !log.push(msg) {
		m.full = true
	}
}

// apply is a compare-and-set of entry and record.
func (m *model) apply(w *world, s Step) bool {
	same := w.entry == s.Before && w.rec.Rev+1 == s.Record.Rev
	switch {
	case m.is(noIdentity) && w.entry.State == s.Before.State && w.entry.Cluster == s.Before.Cluster && !w.rec.State.Over():
		same = true
	case m.is(unconditionalAbort) && s.Record.State == StateAborted:
		same = true
	case (m.is(splitWrites) || m.is(recordLags)) && w.entry == s.Before:
		same = true // the record was written, or will be, in a write of its own
	}
	if !same {
		return false
	}
	if w.entry.Cluster == "b" && s.After.Cluster == "a" && !s.Record.Return {
		m.fail("I4: the entry goes back from b to a")
	}
	if m.drain {
		m.checkDrain(w, s)
	}
	if s.After.Epoch < w.entry.Epoch {
		m.fail("I4: the epoch shrinks")
	}
	if s.After.Cluster == "b" && w.entry.Cluster == "a" && !m.drain {
		if lost := w.a.set() &^ w.b.set(); lost != 0 {
			m.fail("I2: at the flip messages %b of a are not on b", lost)
		}
		if behind := w.ackA[0] &^ w.ackB[0]; behind != 0 && !w.inexact {
			m.fail("cursors: at the flip b does not know that messages %b are acknowledged", behind)
		}
	}
	m.noteDrain(w, s)
	w.entry = s.After
	if !m.is(recordLags) && !m.is(splitWrites) || m.is(splitWrites) && w.rec.Rev+1 == s.Record.Rev {
		w.rec.Rev, w.rec.State, w.rec.Return = s.Record.Rev, s.Record.State, s.Record.Return
	}
	m.checkRecord(w)
	return true
}

// checkRecord is I7, and that the end in the record is the end in the map.
func (m *model) checkRecord(w *world) {
	mine := w.entry.Attempt == w.rec.Attempt || w.entry.State == route.StateDraining // a way back may have been asked for
	switch {
	case w.entry.State != route.StateActive && !m.is(recordLags) && (w.rec.State.Over() || !mine):
		m.fail("I7: the entry is in attempt %d, and no running record has it", w.entry.Attempt)
	case w.rec.State == StateAborted && w.entry.Cluster == "b" && mine:
		m.fail("I7: the record says aborted, the map says b")
	case w.rec.State == StateReturned && w.entry.Cluster != "a":
		m.fail("I7: the record says returned, the map says b")
	case (w.rec.State == StateDone || w.rec.State == StateIncomplete) && w.entry.Cluster != "b":
		m.fail("I7: the record says %s, the map says a", w.rec.State)
	}
}

// listed tells whether subscription k was there before the switch.
func (m *model) listed(k int) bool { return !m.fresh || k == 0 }

// good is the end that I5 wants to be reachable: everything at rest, everything acknowledged.
func (m *model) good(w *world) bool {
	if !w.rec.State.Over() || w.entry.State != route.StateActive || w.acked != m.messages {
		return false
	}
	all := allMessages(m.messages)
	for k := range m.subs() {
		if m.drain && m.listed(k) && (w.processed[k]&all != all || w.behind(k) != 0 || w.want[k] != 0) || !m.drain && w.acknowledged(k)&all != all {
			return false
		}
	}
	return true
}

func (w *world) acknowledged(k int) uint8 {
	if w.entry.Cluster == "b" {
		return w.ackB[k]
	}
	return w.ackA[k]
}

// behind are the messages that the topic's cluster has and that are not acknowledged.
func (w *world) behind(k int) uint8 {
	if w.entry.Cluster == "b" {
		return w.b.set() &^ w.ackB[k]
	}
	return w.a.set() &^ w.ackA[k]
}

func allMessages(n uint8) uint8 { return (1<<n - 1) << 1 }

// check is what must hold in every state.
func (m *model) check(w *world) {
	for k := range m.subs() {
		passed := w.ackB[k] &^ w.processed[k]
		if m.drain && passed != 0 {
			if home, _ := (route.Decision{Cluster: w.entry.Cluster, Drain: w.entry.Drain}).Home(subNames[k]); home == "a" {
				passed &^= w.a.set() // it comes there
			}
		}
		if passed != 0 {
			m.fail("I6: b's cursor has passed messages %b, which nobody has had", passed)
		}
	}
	for i := range m.proxies {
		p := &w.procs[i]
		if e := p.p.Entry(); p.up && e.Topic != "" && (e.State == route.StateActive || e.State == route.StateDraining) && !p.aged {
			if Admit(m.standing(p)).Send != Pass {
				m.fail("I8: proxy %d knows the topic as active or draining and takes no publish", i+1)
			}
		}
	}
}
