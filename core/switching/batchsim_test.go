package switching

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// This file plays batches at random: the real BatchRun, driven as internal/controller drives it, between a store, a map, switches that end as they like, an operator, and leaders that
// die in the middle of anything or wake up late. What must hold is checked wherever something is written or begun, and in the end, when nothing goes wrong any more, all must have moved.

var batchSeeds = flag.Int("batches", 20_000, "how many random batches TestRandomBatches plays")

// batchRule is a rule that is taken out.
type batchRule uint8

const (
	noRule batchRule = iota
	mapHasTheLastWord
	idFollowsFromThePlace
	partsBeforeTheRecord
	attemptsGrow
	operatorsAreHeard
	switchesAreMadeOnce
	beginnersAreLookedFor
	takenBackHasItsAttempt
)

const partItems = 4 // of a part: small, so that there are several

type simTopic struct {
	on                       string
	draining, refused, extra bool
}

type simSwitch struct {
	item    int
	topic   string
	rev     int
	attempt uint32
	state   State
	abort   bool
	late    bool // a leader that was frozen has asked for it
	hold    float64
}

// simJob is work on a topic or on the map that is under way beside a leader.
type simJob struct {
	do        BatchDo
	item      int
	attempt   uint32
	id, topic string
	phase     int
	rev       int // of the switch, as it was seen
	inherited bool
	moved     map[int]string
}

// simLeader is a process that drives the batch, or believes to.
type simLeader struct {
	n        int
	run      *BatchRun
	revs     []uint64 // of the parts
	ends     []int    // and where they end
	jobs     []*simJob
	inbox    []func()
	drains   int // as the list of switches said
	record   *Batch
	given    bool
	dead     bool
	turns    int            // of one that is frozen: how many are left
	failed   map[int]uint32 // attempts whose failure it has been told of
	judged   int
	troubled int
	retried  uint32
}

// batchSim is one random batch.
type batchSim struct {
	rng      *rand.Rand
	without  batchRule
	now      time.Time
	faults   bool
	away     bool // a proxy of the roster is not there
	stored   Batch
	parts    [][]BatchItem
	partRevs []uint64
	topics   map[string]*simTopic
	switches map[string]*simSwitch
	order    []string // of switches, as they were asked for
	leader   *simLeader
	frozen   []*simLeader
	leaders  int
	ruled    bool
	late     bool // a leader that was frozen has written parts
	bad      string
	seen     map[string]int
	trace    []string
}

func (s *batchSim) fail(format string, args ...any) {
	if s.bad == "" {
		s.bad = fmt.Sprintf(format, args...)
	}
}

func (s *batchSim) note(what string) {
	s.seen[what]++
	s.trace = append(s.trace, what)
}

// odds is true once in n times, as long as things go wrong.
func (s *batchSim) odds(n int) bool { return s.faults && s.rng.IntN(n) == 0 }

func newBatchSim(seed uint64, without batchRule, seen map[string]int) *batchSim {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := &batchSim{rng: rng, without: without, now: time.Unix(1000, 0), faults: true, topics: map[string]*simTopic{}, switches: map[string]*simSwitch{}, seen: seen}
	n := 1 + rng.IntN(14)
	all := names(n)
	var together [][]string
	if n > 3 && rng.IntN(2) == 0 {
		together = append(together, []string{all[0], all[n-1], all[n/2]})
	}
	items := OrderBatch(all, together)
	ends, _ := WaveEnds([][]string{DefaultWaves(), {"1", "50%"}, {"100%"}}[rng.IntN(3)], n)
	s.stored = Batch{
		ID: "sw", Rev: 1, From: []string{"a"}, To: "b", Mode: ModeDrain, State: BatchChecking, Ends: JoinWaves(ends, items),
		Limits: BatchLimits{Parallel: 1 + rng.IntN(5), MaxFailed: []float64{0, 0.3, 1}[rng.IntN(3)], OnBlocked: []OnBlocked{StopOnBlocked, SkipOnBlocked}[rng.IntN(2)], Pace: []float64{0, 0, 10}[rng.IntN(3)]},
	}
	if rng.IntN(5) == 0 {
		s.stored.Mode = ModePlanned
	}
	if rng.IntN(2) == 0 {
		s.stored.Namespace = "acme/orders"
	}
	for _, name := range all {
		s.topics[name] = &simTopic{on: "a", refused: rng.IntN(12) == 0}
	}
	s.stored.Count.Total = n
	for from := 0; from < n; from += partItems {
		s.parts, s.partRevs = append(s.parts, slices.Clone(items[from:min(n, from+partItems)])), append(s.partRevs, 1)
	}
	s.stored.Parts = len(s.parts)
	s.leader = s.newLeader()
	return s
}

func (s *batchSim) newLeader() *simLeader {
	s.leaders++
	return &simLeader{n: s.leaders}
}

// load is what a leader does with a batch that is not over.
func (s *batchSim) load(l *simLeader) {
	l.run, l.revs, l.given = NewBatchRun(s.stored, slices.Concat(s.parts...)), slices.Clone(s.partRevs), s.stored.Abort
	l.failed, l.judged, l.troubled, l.retried = map[int]uint32{}, 0, 0, s.stored.Retried
	l.drains = s.draining()
	l.ends = nil
	for end := 0; len(l.ends) < len(s.parts); l.ends = append(l.ends, end) {
		end += len(s.parts[len(l.ends)])
	}
}

// draining is what the list of the switches under way says.
func (s *batchSim) draining() (n int) {
	for _, sw := range s.switches {
		if sw.state == StateDraining {
			n++
		}
	}
	return n
}

// look is what a leader reads now and then.
func (s *batchSim) look(l *simLeader) {
	if l.drains = s.draining(); l.drains > 0 && s.odds(4) {
		l.drains = s.rng.IntN(l.drains) // the list was read in part
	}
	b := s.stored
	if l.record = &b; l.run == nil && !b.State.Over() {
		l.record = nil
		s.load(l)
	}
}

// die tells whether a leader dies at this moment.
func (s *batchSim) die(l *simLeader) bool {
	l.dead = l.dead || s.odds(60)
	return l.dead
}

// turn is one turn of the leader's goroutine for the batch.
func (s *batchSim) turn(l *simLeader) {
	if l.run == nil || l.dead {
		return
	}
	reports := l.inbox
	l.inbox = nil
	for _, f := range reports {
		f()
	}
	if l.record != nil {
		if l.run.Drains(l.drains); l.record.Rev > l.run.b.Rev {
			l.run.Observe(*l.record)
			l.given = l.record.Abort
		}
		l.record = nil
	}
	step := l.run.Next(s.now)
	if l.run.b.Retried != l.retried {
		l.retried, l.judged, l.troubled = l.run.b.Retried, 0, 0
	}
	s.checkCounts(l.run)
	switch step.Do {
	case BatchOver:
		if l.run.Overtaken() || s.save(l, true) {
			l.run, l.jobs, l.inbox, l.given = nil, nil, nil, false
		}
	case BatchWrite:
		s.save(l, true)
	case BatchWait:
		if s.rng.IntN(3) == 0 {
			s.save(l, false)
		}
	case BatchCheck, BatchStart:
		it := l.run.Items()[step.Item]
		s.checkBegin(l, step)
		j := &simJob{do: step.Do, item: step.Item, attempt: max(it.Attempt, 1), id: s.stored.SwitchID(step.Item), topic: it.Topic}
		if s.without == attemptsGrow {
			j.attempt = 1
		}
		if s.without == idFollowsFromThePlace {
			j.id = fmt.Sprintf("%s of %d", j.id, l.n)
		}
		l.jobs = append(l.jobs, j)
	case BatchSettle:
		j := &simJob{do: step.Do, moved: map[int]string{}}
		for i, it := range l.run.Items() {
			if it.State == ItemMoved {
				j.moved[i] = it.Topic
			}
		}
		l.jobs = append(l.jobs, j)
	case BatchRule:
		l.jobs = append(l.jobs, &simJob{do: step.Do})
	}
}

// checkBegin: a pause holds, waves come one after the other, and no more begins than may.
func (s *batchSim) checkBegin(l *simLeader, step BatchStep) {
	b, items, i := l.run.b, l.run.Items(), step.Item
	switch {
	case b.Pause != nil || b.Abort && step.Do == BatchCheck || b.State.Over():
		s.fail("pause: topic %d begins in a batch that is %s", i, b.Shown())
	case step.Do == BatchCheck, b.Abort: // what has begun is looked for
	case items[i].State.Over():
		s.fail("twice: topic %d is %s, and begins", i, items[i].State)
	case float64(l.troubled) > b.Limits.MaxFailed*float64(l.judged):
		s.fail("gate: topic %d begins though %d of %d have failed", i, l.troubled, l.judged)
	case i >= l.run.waveEnd() || len(l.run.busy) > l.run.parallel():
		s.fail("order: topic %d begins in wave %d, %d are under way", i, b.Wave, len(l.run.busy))
	default:
		for n, end := range b.Ends {
			if end < len(items) && items[end].Joined {
				s.fail("siblings: wave %d ends between %s and %s", n, items[end-1].Topic, items[end].Topic)
			}
			for k := 0; n < b.Wave && k < end; k++ {
				if !items[k].State.Over() {
					s.fail("order: topic %d begins in wave %d, and topic %d of wave %d is not over", i, b.Wave, k, n)
				}
			}
		}
	}
}

func (s *batchSim) checkCounts(r *BatchRun) {
	have := r.b.Count
	if r.recount(); have != r.b.Count {
		s.fail("counts: %+v, want %+v", have, r.b.Count)
	}
}

// save writes down what has changed: the parts, and then the record that counts on them.
func (s *batchSim) save(l *simLeader, force bool) bool {
	changed := false
	items := l.run.Items()
	parts := func() bool {
		if last := l.ends[len(l.ends)-1]; last < len(items) { // topics that were found later
			l.ends, l.revs = append(l.ends, len(items)), append(l.revs, 0)
		}
		for p, to := range l.ends {
			from := 0
			if p > 0 {
				from = l.ends[p-1]
			}
			if !l.run.Dirty(from, to) {
				continue
			}
			if s.die(l) {
				return false
			}
			if p == len(s.parts) {
				s.parts, s.partRevs = append(s.parts, nil), append(s.partRevs, 0)
			}
			if l.revs[p] != s.partRevs[p] { // a leader that was frozen has written it
				l.revs[p] = s.partRevs[p]
				return false
			}
			s.late = s.late || l != s.leader
			s.parts[p], s.partRevs[p] = slices.Clone(items[from:to]), s.partRevs[p]+1
			if l.revs[p]++; s.odds(40) {
				return false // the answer was lost
			}
			l.run.Saved(from, to)
			changed = true
		}
		return true
	}
	if s.without != partsBeforeTheRecord && !parts() {
		return false
	}
	if s.without != partsBeforeTheRecord && !force && !changed && !l.run.Counted() {
		return true
	}
	if s.die(l) {
		return false
	}
	b := l.run.Batch(s.now)
	b.Rev, b.Parts = b.Rev+1, len(s.parts)
	if b.Rev != s.stored.Rev+1 { // an operator was faster, or another leader
		s.note("conflict")
		have := s.stored
		if s.without == operatorsAreHeard {
			have.Pause, have.Abort = l.run.b.Pause, l.run.b.Abort
		}
		l.run.Observe(have)
		l.given = have.Abort
		return true // the next turn writes again
	}
	s.checkWrite(b)
	s.stored = b
	l.run.Wrote(b.Rev)
	return s.without != partsBeforeTheRecord || parts()
}

// checkWrite is what must hold when a leader writes the record.
func (s *batchSim) checkWrite(b Batch) {
	was := s.stored
	if was.Pause != nil && b.Pause == nil && !b.Ruled || was.Abort && !b.Abort && !b.State.Over() {
		s.fail("pause: the batch was %s, and is %s without its operator", was.Shown(), b.Shown())
	}
	if !b.State.Over() {
		if was.State.Over() {
			s.fail("pause: the batch was %s, and goes on without its operator", was.State)
		}
		return
	}
	s.note("over: " + string(b.State))
	for id, sw := range s.switches {
		if !over(sw) && !sw.late && !s.late {
			s.fail("ends: the batch is %s, and switch %s is %s", b.State, id, sw.state)
		}
	}
	if b.State == BatchAborted {
		return
	}
	for i, it := range slices.Concat(s.parts...) {
		t, sw := s.topics[it.Topic], s.switches[b.SwitchID(i)]
		switch {
		case b.State == BatchDone && t.on != "b":
			s.fail("forgotten: the batch is done, and topic %d, which is %q, is on a", i, it.State)
		case s.late, sw != nil && sw.late: // the next resume finds out
		case !it.State.Over():
			s.fail("forgotten: the batch is %s, and topic %d is %q", b.State, i, it.State)
		case t.draining:
			s.fail("ends: the batch is %s, and topic %d drains", b.State, i)
		case (it.State == ItemMoved || it.State == ItemSkipped) && t.on != "b" && b.Mode == ModeDrain:
			s.fail("forgotten: the batch is %s, and topic %d, which is %s, is on a", b.State, i, it.State)
		}
	}
	if c := b.Count; c.Left() != 0 || b.State == BatchDone && (c.Failed+c.Blocked+c.Troubled > 0 || b.Namespace != "" && !s.ruled) {
		s.fail("ends: the batch is %s with %+v, ruled %v", b.State, c, s.ruled)
	}
}

// over tells whether a batch has nothing to wait for any more, of a switch.
func over(sw *simSwitch) bool { return sw.state.Over() || sw.state == StateDraining }

// work goes on with one of a leader's jobs; false when it is done.
func (s *batchSim) work(l *simLeader, j *simJob) bool {
	report := func(f func()) bool {
		l.inbox = append(l.inbox, f)
		return false
	}
	switch j.do {
	case BatchCheck:
		e := ItemEnd{}
		if !l.given {
			e = s.judge(j.topic)
		}
		return report(func() { l.run.Checked(j.item, e) })
	case BatchStart:
		return s.move(l, j, func(e ItemEnd) bool {
			return report(func() {
				switch again := e.State == ItemFailed && e.Inherited && !l.run.b.Abort; {
				case again:
					s.note("begun again")
				case e.State == ItemFailed:
					l.judged, l.troubled = l.judged+1, l.troubled+1
				case e.State == ItemMoved:
					l.judged++
				}
				if e.Troubled {
					l.troubled++
				}
				l.run.Ended(s.now, j.item, e)
			})
		})
	case BatchSettle:
		draining, gone, why := s.settle(l, j)
		return report(func() { l.run.Settled(s.now, draining, gone, why) })
	case BatchRule:
		return s.rule(l, j, report)
	}
	panic("no such job")
}

// judge is a preflight.
func (s *batchSim) judge(topic string) ItemEnd {
	switch t := s.topics[topic]; {
	case t.draining:
		return ItemEnd{State: ItemBlocked, Note: "a switch is moving it"}
	case t.on == "b":
		return ItemEnd{State: ItemSkipped}
	case s.away:
		s.note("a proxy was not there")
		return ItemEnd{State: ItemBlocked, Note: "proxies", Away: true}
	case t.refused:
		s.note("refused")
		return ItemEnd{State: ItemBlocked, Note: "its client"}
	}
	return ItemEnd{State: ItemChecked, Forecast: &Forecast{}}
}

// move sees to the switch of a topic until it is over.
func (s *batchSim) move(l *simLeader, j *simJob, end func(ItemEnd) bool) bool {
	sw := s.switches[j.id]
	switch j.phase {
	case 0: // look
		if sw != nil && s.without != beginnersAreLookedFor && (!sw.state.Over() || sw.attempt >= j.attempt || sw.state != StateAborted && sw.state != StateReturned) {
			j.inherited, j.phase = !sw.state.Over(), 2
			if attempt, told := l.failed[j.item]; told && attempt == sw.attempt && sw.state.Over() && l.run != nil && l.run.busy[j.item] {
				s.fail("forgotten: topic %d begins again, and comes to the end of attempt %d, which was known", j.item, attempt)
			}
			return true
		}
		if l.given {
			return end(ItemEnd{})
		}
		if e := s.judge(j.topic); e.State != ItemChecked {
			return end(e)
		}
		if j.phase, j.rev = 1, 0; sw != nil {
			j.rev = sw.rev
		}
	case 1: // ask
		if s.without != switchesAreMadeOnce && (sw == nil && j.rev != 0 || sw != nil && sw.rev != j.rev) {
			j.phase = 0 // somebody was faster
			return true
		}
		next := &simSwitch{item: j.item, topic: j.topic, rev: 1, attempt: j.attempt, state: StateRequested, late: l != s.leader}
		if sw == nil {
			s.order = append(s.order, j.id)
		} else {
			next.rev, next.attempt = sw.rev+1, max(sw.attempt+1, j.attempt)
		}
		for id, other := range s.switches {
			if other.topic == j.topic && !other.state.Over() {
				s.fail("twice: %s is asked to move topic %d, and %s is doing so", j.id, j.item, id)
			}
		}
		s.switches[j.id], j.phase = next, 2
	case 2: // follow
		if !over(sw) {
			if l.given && !sw.abort {
				sw.abort, sw.rev = true, sw.rev+1
			}
			return true
		}
		e := ItemEnd{State: ItemMoved, Troubled: sw.state == StateIncomplete, HoldMillis: sw.hold}
		switch sw.state {
		case StateAborted:
			e.State, e.Attempt = ItemFailed, sw.attempt
			l.failed[j.item] = sw.attempt
		case StateReturned:
			e = TakenBack(Record{ID: j.id, From: "a", Attempt: sw.attempt})
			l.failed[j.item] = sw.attempt
		}
		e.Inherited = j.inherited
		return end(e)
	}
	return true
}

// settle is a look at the map.
func (s *batchSim) settle(l *simLeader, j *simJob) (draining int, gone map[int]ItemEnd, why string) {
	if gone = map[int]ItemEnd{}; s.odds(8) {
		return 0, gone, "the store is away"
	}
	for i, topic := range j.moved {
		switch t := s.topics[topic]; {
		case s.without == mapHasTheLastWord:
		case t.draining:
			draining++
		case t.on != "b":
			e := ItemEnd{State: ItemFailed, Note: "it has left"}
			if sw := s.switches[s.stored.SwitchID(i)]; sw != nil && sw.state == StateReturned {
				if e = TakenBack(Record{ID: s.stored.SwitchID(i), From: "a", Attempt: sw.attempt}); s.without == takenBackHasItsAttempt {
					e.Attempt = 0
				}
				l.failed[i] = sw.attempt
			}
			gone[i] = e
		}
	}
	if draining > 0 {
		s.note("the list was behind the map")
	}
	return draining, gone, ""
}

// rule looks for what is left on the old cluster, and then writes the rule.
func (s *batchSim) rule(l *simLeader, j *simJob, report func(func()) bool) bool {
	if j.phase == 0 {
		j.phase = 1
		var fresh []BatchItem
		ours := ""
		for name, t := range s.topics {
			if t.on == "b" {
				continue
			}
			if slices.ContainsFunc(l.run.Items(), func(it BatchItem) bool { return it.Topic == name }) {
				ours = name
			} else {
				fresh = append(fresh, BatchItem{Topic: name})
			}
		}
		switch {
		case ours != "":
			return report(func() { l.run.Unruled(s.now, ours+" has left") })
		case len(fresh) > 0:
			s.note("found")
			slices.SortFunc(fresh, func(a, b BatchItem) int { return strings.Compare(a.Topic, b.Topic) })
			return report(func() { l.run.Found(s.now, fresh) })
		}
		return true
	}
	for name, t := range s.topics {
		if t.draining {
			s.fail("rule: written while %s drains", name)
		}
	}
	s.note("ruled")
	s.ruled = true
	return report(func() { l.run.Ruled(s.now, 0, 1, "") })
}

// progress is what becomes of a switch that is under way.
func (s *batchSim) progress(sw *simSwitch) {
	t := s.topics[sw.topic]
	sw.rev++
	switch {
	case sw.state.Over():
		sw.rev--
	case sw.state == StateDraining && s.odds(6):
		s.note("taken back")
		sw.state, sw.attempt, t.on, t.draining = StateReturned, sw.attempt+1, "a", false
	case sw.state == StateDraining && s.odds(12):
		s.note("way back given up")
		sw.attempt++
	case sw.state == StateDraining:
		sw.state, t.draining = StateDone, false
	case sw.abort || s.odds(8) || t.on != "a" || t.draining:
		sw.state = StateAborted
	default:
		sw.hold, t.on = float64(1+s.rng.IntN(100)), "b"
		if sw.state = StateDone; s.stored.Mode == ModeDrain {
			sw.state, t.draining = StateDraining, true
		} else if s.odds(10) {
			sw.state = StateIncomplete
		}
	}
}

// operate is what an operator does.
func (s *batchSim) operate() {
	b := &s.stored
	switch n := s.rng.IntN(12); {
	case n < 3 && !b.State.Over() && !b.Abort && b.Pause == nil:
		s.note("pause")
		b.Pause = &BatchPause{Gate: GateOperator, At: s.now}
		b.Rev++
	case n == 3 && !b.State.Over():
		s.note("abort")
		b.Abort, b.Pause = true, nil
		b.Rev++
	case n < 9:
		s.resume()
	case n == 9:
		t := s.topics[s.parts[0][s.rng.IntN(len(s.parts[0]))].Topic]
		t.refused = !t.refused
	case n == 10 && b.Namespace != "" && !s.ruled && len(s.topics) < 20:
		s.topics[fmt.Sprintf("persistent://acme/orders/new%d", len(s.topics))] = &simTopic{on: "a", extra: true}
	}
}

// resume is `switch resume`, unless there is nothing to resume.
func (s *batchSim) resume() {
	b := &s.stored
	if b.State == BatchDone || !b.State.Over() && b.Pause == nil {
		return
	}
	if s.note("resume"); b.State.Over() {
		if b.State = BatchChecking; !b.Moving.IsZero() {
			b.State = BatchMoving
		}
		b.Ended, b.Note = time.Time{}, ""
	}
	if b.Pause, b.Abort = nil, false; !s.faults {
		b.Limits.OnBlocked = StopOnBlocked // those that were skipped, too
	}
	b.Resumed++
	b.Rev++
}

// replace has another process lead; the one before may wake up later.
func (s *batchSim) replace() {
	if s.note("leader died"); s.rng.IntN(2) == 0 && !s.leader.dead && s.leader.run != nil {
		s.note("leader frozen")
		s.leader.turns = 1 + s.rng.IntN(20)
		s.frozen = append(s.frozen, s.leader)
	}
	s.leader = s.newLeader()
}

func (s *batchSim) act(l *simLeader) {
	if n := len(l.jobs); n > 0 && s.rng.IntN(2) == 0 {
		k := s.rng.IntN(n)
		if j := l.jobs[k]; l.run != nil && !l.dead && !s.work(l, j) && k < len(l.jobs) {
			l.jobs = slices.Delete(l.jobs, k, k+1)
		}
		return
	}
	s.turn(l)
}

// step does one thing.
func (s *batchSim) step() {
	if s.leader.dead || s.odds(150) {
		s.replace()
	}
	if s.odds(100) {
		s.away = !s.away
	}
	switch n := s.rng.IntN(20); {
	case n == 0:
		s.now = s.now.Add(time.Duration(s.rng.IntN(4000)) * time.Millisecond)
	case n < 3:
		s.look(s.leader)
	case n < 7 && len(s.order) > 0:
		s.progress(s.switches[s.order[s.rng.IntN(len(s.order))]])
	case n == 7 && s.odds(4):
		s.operate()
	case n == 8 && len(s.frozen) > 0:
		l := s.frozen[0]
		if l.turns--; l.turns < 0 || l.dead || l.run == nil || l.run.b.State == BatchRuling {
			s.frozen = s.frozen[1:]
			return
		}
		s.act(l)
	default:
		s.act(s.leader)
	}
}

func (s *batchSim) run() string {
	for range 400 + s.rng.IntN(800) {
		if s.step(); s.bad != "" {
			return s.bad
		}
	}
	s.faults, s.frozen, s.away = false, nil, false
	for _, t := range s.topics {
		t.refused = false
	}
	for n := 0; s.bad == "" && s.stored.State != BatchDone && (s.stored.State != BatchIncomplete || s.stored.Count.Failed+s.stored.Count.Blocked > 0); n++ {
		if s.step(); s.rng.IntN(20) == 0 {
			s.resume()
		}
		if n == 40_000 {
			s.fail("ends: the batch rests as %s (%+v) with %+v", s.stored.Shown(), s.stored.Pause, s.stored.Count)
		}
	}
	for name, t := range s.topics {
		if s.bad == "" && t.on != "b" && !t.extra {
			s.fail("forgotten: %s is on a when the batch is %s", name, s.stored.State)
		}
	}
	return s.bad
}

func TestRandomBatches(t *testing.T) {
	seen := map[string]int{}
	n := *batchSeeds
	if raceEnabled {
		n /= 10
	}
	for seed := range uint64(n) {
		s := newBatchSim(seed, noRule, seen)
		if bad := s.run(); bad != "" {
			t.Fatalf("seed %d: %s\n%s\n%+v", seed, bad, strings.Join(s.trace, "\n"), s.stored)
		}
	}
	t.Log(seen)
	for _, what := range []string{"pause", "resume", "abort", "leader died", "leader frozen", "conflict", "refused", "a proxy was not there", "taken back", "way back given up", "begun again", "found", "ruled", "the list was behind the map",
		"over: done", "over: incomplete", "over: aborted"} {
		if seen[what] == 0 && !raceEnabled {
			t.Errorf("%q never happened", what)
		}
	}
}

// batchRules are rules that a batch goes by, each taken out, and what the games must find without it.
var batchRules = []struct {
	rule string
	out  batchRule
	want string // how the violation begins
}{
	{"the map has the last word on what drains, and not the list of switches", mapHasTheLastWord, "ends"},
	{"the id of a switch follows from the batch and the place of its topic", idFollowsFromThePlace, "twice"},
	{"a record is written for the first time once", switchesAreMadeOnce, "twice"},
	{"whoever begins a topic looks for a switch that has begun", beginnersAreLookedFor, "twice"},
	{"parts are written before the record that counts on them", partsBeforeTheRecord, "forgotten"},
	{"who tries again does so by a later attempt", attemptsGrow, "forgotten"},
	{"the attempt of a way back counts", takenBackHasItsAttempt, "forgotten"},
	{"what an operator has written is not written over", operatorsAreHeard, "pause"},
}

func TestEveryRuleOfABatchIsNeeded(t *testing.T) {
	for _, mutant := range batchRules {
		t.Run(mutant.rule, func(t *testing.T) {
			const most = 20_000
			for seed := range uint64(most) {
				s := newBatchSim(seed, mutant.out, map[string]int{})
				if bad := s.run(); strings.HasPrefix(bad, mutant.want) {
					t.Logf("seed %d: %s", seed, bad)
					return
				}
			}
			t.Errorf("without the rule %d batches go well", most)
		})
	}
}
