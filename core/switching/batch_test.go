package switching

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestWavesSayHowMuchHasMovedWhenTheyAreOver(t *testing.T) {
	f := func(waves string, total int, want ...int) {
		t.Helper()
		if have, err := WaveEnds(strings.Split(waves, ","), total); err != nil || !slices.Equal(have, want) {
			t.Errorf("%s of %d: %v, %v; want %v", waves, total, have, err, want)
		}
	}
	f("1,1%,10%,100%", 10_000, 1, 100, 1000, 10_000)
	f("1,1%,10%,100%", 40, 1, 4, 40) // 1 % is one topic
	f("1,5%,50%,100%", 3, 1, 2, 3)
	f("5,10%", 1000, 5, 100, 1000) // the rest is a wave of its own
	f("100%", 1, 1)
	f("7", 3, 3)
	f("1", 0)
	for waves, says := range map[string]string{"0": "1 or more", "x": "no number", "101%": "at most 100%", "0%": "at most 100%", "NaN%": "at most", "10%,5%": "does not grow", "3,3": "does not grow", "-1": "1 or more"} {
		if _, err := WaveEnds(strings.Split(waves, ","), 100); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want an error that says %q", waves, err, says)
		}
	}
}

func names(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("persistent://acme/orders/t%d", i))
	}
	return all
}

func TestAShareOfANamespaceIsAPartOfEveryLargerShare(t *testing.T) {
	all := append(names(5000), "persistent://acme/orders/t7-billing-DLQ", "persistent://acme/orders/t7-billing-RETRY", "persistent://acme/orders/t7-billing-RETRY-again-DLQ")
	known := func(name string) bool { return slices.Contains(all, name) }
	for _, topic := range all {
		for p := 5.0; p < 100; p += 5 {
			if InPercent(topic, p, known) && !InPercent(topic, p+5, known) {
				t.Fatalf("%s is among %v%% and not among %v%%", topic, p, p+5)
			}
			if InPercent("persistent://acme/orders/t7", p, known) != InPercent(all[len(all)-1], p, known) {
				t.Fatalf("at %v%% a topic and its DLQ are parted", p)
			}
		}
	}
	n := 0
	for _, topic := range all {
		if InPercent(topic, 20, known) {
			n++
		}
		if !InPercent(topic, 100, known) {
			t.Fatalf("%s is not among 100%%", topic)
		}
	}
	if n < 900 || n > 1100 {
		t.Errorf("20%% of 5,000 topics are %d", n)
	}
}

func TestTopicsThatBelongTogetherAreNextToEachOtherAndInOneWave(t *testing.T) {
	all := append(names(50), "persistent://acme/orders/t7-billing-DLQ", "persistent://acme/orders/t7-billing-RETRY", "persistent://acme/orders/stray-x-DLQ")
	items := OrderBatch(all, [][]string{{all[3], all[40], "persistent://acme/other/x"}, {all[40], all[7]}})
	if len(items) != len(all) {
		t.Fatalf("%d items of %d topics", len(items), len(all))
	}
	var group []string
	for i, it := range items {
		if it.Topic == all[3] || group != nil && it.Joined {
			group = append(group, it.Topic)
		} else if group != nil {
			break
		} else if it.Joined && items[i-1].Topic == all[3] {
			t.Errorf("joined too early: %v", it)
		}
	}
	joined := 0
	for _, it := range items {
		if it.Joined {
			joined++
		}
	}
	if joined != 4 { // t3, t40, t7 and the two of t7
		t.Errorf("%d topics are joined to the one before, want 4: %+v", joined, items)
	}
	first := slices.IndexFunc(items, func(it BatchItem) bool { return it.Joined }) - 1
	for end := first + 1; end <= first+4; end++ {
		if have := JoinWaves([]int{end, len(items)}, items); have[0] != first+5 {
			t.Errorf("a wave that would end at %d ends at %v; the group is %d to %d", end, have, first, first+5)
		}
	}
	// The order of everything is that of the shares: what moves as 10 % comes first in the whole.
	var last bool
	for i, it := range OrderBatch(names(1000), nil) {
		in := InPercent(it.Topic, 10, func(string) bool { return false })
		if in && i > 0 && !last {
			t.Fatalf("%s of the first 10%% comes behind others", it.Topic)
		}
		last = in
	}
}

func TestSiblingsThatStayBehindAreNamed(t *testing.T) {
	all := append(names(3), "persistent://acme/orders/t1-billing-DLQ")
	items := OrderBatch(all[:2], nil)
	have := strings.Join(Outside(items, all, [][]string{{all[0], all[2]}}, 10), "\n")
	for _, want := range []string{"t1-billing-DLQ is not in the batch: it takes what clients of persistent://acme/orders/t1", "t2 is not in the batch: a client consumes it together with persistent://acme/orders/t0"} {
		if !strings.Contains(have, want) {
			t.Errorf("%q does not say %q", have, want)
		}
	}
	if have := Outside(OrderBatch(all[3:], nil), all, nil, 10); len(have) != 1 || !strings.Contains(have[0], "t1 is not in the batch, but") {
		t.Errorf("a DLQ alone: %v", have)
	}
	if have := Outside(OrderBatch(all[:2], nil), all, [][]string{{all[0], all[2]}}, 1); len(have) != 2 || !strings.Contains(have[1], "and 1 more") {
		t.Errorf("at most one: %v", have)
	}
}

// The largest part that can be is below the 256 KiB that a node of ZooKeeper should have.
func TestAPartWithTheLongestNotesFitsIntoOneValue(t *testing.T) {
	var items []BatchItem
	for i := range 2 * MaxPartItems {
		items = append(items, BatchItem{
			Topic: fmt.Sprintf("persistent://acme/orders/%s-%d", strings.Repeat("x", 200), i), State: ItemBlocked, Joined: true, Attempt: 9999, Note: CutNote(strings.Repeat("ü\"", 500)),
		})
	}
	parts := SplitBatch(items, 3)
	n := 0
	for i, p := range parts {
		text, err := json.Marshal(p)
		if err != nil || len(text) > 256<<10 || p.Index != 3+i || len(p.Items) > MaxPartItems {
			t.Errorf("part %d of %d items has %d bytes, %v", p.Index, len(p.Items), len(text), err)
		}
		n += len(p.Items)
	}
	if n != len(items) {
		t.Errorf("%d items in the parts, want %d", n, len(items))
	}
}

// run is a leader of a batch in a test: it does what the batch wants, at once or when told.
type run struct {
	t       *testing.T
	r       *BatchRun
	now     time.Time
	started []int
	checked int
	busy    []int
	end     func(i int) ItemEnd // nil: moved
	check   func(i int) ItemEnd
	late    bool // switches end only by finish
	backlog int64
	rounds  [][]string // what each look at the namespace finds
	waves   []int      // how many had begun when each wave began
}

func newRun(t *testing.T, n int, change func(*Batch)) *run {
	b := Batch{ID: "sw-1", Rev: 1, To: "b", Mode: ModePlanned, State: BatchChecking, Limits: BatchLimits{Parallel: 4, MaxFailed: 0.05, OnBlocked: StopOnBlocked}}
	b.Ends, _ = WaveEnds(DefaultWaves(), n)
	if change != nil {
		change(&b)
	}
	return &run{t: t, now: time.Unix(1000, 0), r: NewBatchRun(b, OrderBatch(names(n), nil))}
}

// drive goes on until nothing is to be done any more without an event, and returns why.
func (r *run) drive() BatchStep {
	for range 1_000_000 {
		step := r.r.Next(r.now)
		switch step.Do {
		case BatchWait:
			if step.Until.After(r.now) && !r.late {
				r.now = step.Until
				continue
			}
			return step
		case BatchOver:
			return step
		case BatchCheck:
			r.checked++
			e := ItemEnd{State: ItemChecked, Forecast: &Forecast{HoldMillis: 10, Duplicates: 1}}
			if r.check != nil {
				e = r.check(step.Item)
			}
			r.r.Checked(step.Item, e)
		case BatchStart:
			if r.r.b.Abort { // nobody has begun it
				r.r.Ended(r.now, step.Item, ItemEnd{})
				continue
			}
			r.started = append(r.started, step.Item)
			if r.late {
				r.busy = append(r.busy, step.Item)
			} else {
				r.finish(step.Item)
			}
		case BatchSettle:
			return step
		case BatchMeasure:
			r.r.Measured(r.now, r.backlog, "t")
		case BatchRule:
			if len(r.rounds) > 0 {
				var items []BatchItem
				for _, name := range r.rounds[0] {
					items = append(items, BatchItem{Topic: name})
				}
				r.rounds = r.rounds[1:]
				r.r.Found(r.now, items)
				continue
			}
			r.r.Ruled(r.now, 7, 3, "")
		case BatchWrite:
			b := r.r.Batch(r.now)
			r.r.Wrote(b.Rev + 1)
			if b.State == BatchMoving && len(r.waves) == b.Wave {
				r.waves = append(r.waves, len(r.started))
			}
		}
	}
	r.t.Fatal("the batch never rests")
	return BatchStep{}
}

func (r *run) finish(i int) {
	e := ItemEnd{State: ItemMoved, HoldMillis: 100}
	if r.end != nil {
		e = r.end(i)
	}
	r.r.Ended(r.now, i, e)
}

// resume is what an operator does.
func (r *run) resume(change func(*Batch)) {
	b := r.r.Batch(r.now)
	b.Rev++
	b.Pause, b.Resumed = nil, b.Resumed+1
	if b.State.Over() {
		b.State = BatchMoving
	}
	if change != nil {
		change(&b)
	}
	r.r.Observe(b)
}

func (r *run) expect(state BatchState, gate BatchGate, moved, failed, blocked int) {
	r.t.Helper()
	b := r.r.Batch(r.now)
	have := BatchGate("")
	if b.Pause != nil {
		have = b.Pause.Gate
	}
	if b.State != state || have != gate || b.Count.Moved != moved || b.Count.Failed != failed || b.Count.Blocked != blocked {
		r.t.Fatalf("the batch is %s, paused by %q (%+v), count %+v; want %s, %q, %d moved, %d failed, %d blocked", b.State, have, b.Pause, b.Count, state, gate, moved, failed, blocked)
	}
}

func TestABatchChecksEverythingAndThenMovesItInWaves(t *testing.T) {
	r := newRun(t, 1000, nil)
	r.drive()
	r.expect(BatchDone, "", 1000, 0, 0)
	if !slices.Equal(r.waves, []int{0, 1, 10, 100}) || r.checked != 1000 || len(r.started) != 1000 || !slices.IsSorted(r.started) {
		t.Errorf("%d checked, %d started, waves began at %v", r.checked, len(r.started), r.waves)
	}
	if b := r.r.Batch(r.now); b.Forecast.Topics != 1000 || b.Forecast.Duplicates != 1000 || b.Forecast.MaxHold != 10 || b.HoldP99 != 100 {
		t.Errorf("%+v", b)
	}
}

func TestNoWaveBeginsBeforeTheOneBeforeHasEnded(t *testing.T) {
	r := newRun(t, 100, nil)
	r.late = true
	most := 0
	for {
		step := r.drive()
		if step.Do == BatchOver {
			break
		}
		most = max(most, len(r.busy))
		wave := r.r.Batch(r.now).Ends[r.r.Batch(r.now).Wave]
		for _, i := range r.busy {
			if i >= wave {
				t.Fatalf("topic %d has begun in a wave that ends at %d", i, wave)
			}
		}
		i := r.busy[0]
		r.busy = r.busy[1:]
		r.finish(i)
	}
	r.expect(BatchDone, "", 100, 0, 0)
	if most != 4 {
		t.Errorf("%d switches at once, want 4", most)
	}
}

func TestThePaceIsKept(t *testing.T) {
	r := newRun(t, 100, func(b *Batch) { b.Limits.Pace = 10 })
	began := r.now
	r.drive()
	if took := r.now.Sub(began); took < 9800*time.Millisecond || took > 10*time.Second {
		t.Errorf("100 switches at 10 a second took %v", took)
	}
}

func TestABlockedTopicStopsTheBatchBeforeAnythingMovesUnlessItIsSkipped(t *testing.T) {
	r := newRun(t, 100, nil)
	blocked := true
	r.check = func(i int) ItemEnd {
		if blocked && i%50 == 7 {
			return ItemEnd{State: ItemBlocked, Note: "replication: there is none"}
		}
		return ItemEnd{State: ItemChecked}
	}
	r.drive()
	r.expect(BatchChecking, GatePreflight, 0, 0, 2)
	if why := r.r.Batch(r.now).Pause.Why; !strings.Contains(why, "2 of 100 topics cannot move, and nothing has") || !strings.Contains(why, "there is none") {
		t.Errorf("why: %s", why)
	}
	r.resume(nil) // they are checked again, and only they
	r.drive()
	r.expect(BatchChecking, GatePreflight, 0, 0, 2)
	if r.checked != 102 {
		t.Errorf("%d checks, want 102", r.checked)
	}
	blocked = false
	r.resume(nil)
	r.drive()
	r.expect(BatchDone, "", 100, 0, 0)

	r = newRun(t, 100, func(b *Batch) { b.Limits.OnBlocked, b.Namespace = SkipOnBlocked, "acme/orders" })
	r.check = func(i int) ItemEnd { return ItemEnd{State: []ItemState{ItemChecked, ItemBlocked}[i%2]} }
	r.drive()
	r.expect(BatchIncomplete, "", 50, 0, 50)
	if b := r.r.Batch(r.now); b.Rule != 0 || !strings.Contains(b.Note, "the namespace has no rule") {
		t.Errorf("%+v", b)
	}
}

func TestATopicThatIsBlockedWhenItsTurnComesStopsTheBatchOrIsSkipped(t *testing.T) {
	for policy, gate := range map[OnBlocked]BatchGate{StopOnBlocked: GatePreflight, SkipOnBlocked: ""} {
		r := newRun(t, 100, func(b *Batch) { b.Limits.OnBlocked = policy })
		r.end = func(i int) ItemEnd {
			if i == 30 {
				return ItemEnd{State: ItemBlocked, Note: "replication: there is none"}
			}
			return ItemEnd{State: ItemMoved}
		}
		r.drive()
		if gate == "" {
			r.expect(BatchIncomplete, "", 99, 0, 1)
			continue
		}
		r.expect(BatchMoving, gate, 30, 0, 1)
		r.end = nil
		r.resume(nil)
		r.drive()
		r.expect(BatchDone, "", 100, 0, 0)
	}
}

func TestGatesPauseABatchAndOnlyAResumeHasItGoOn(t *testing.T) {
	for name, c := range map[string]struct {
		gate   BatchGate
		end    ItemEnd
		change func(*BatchLimits)
		says   string
	}{
		"failed":     {GateFailed, ItemEnd{State: ItemFailed, Note: "aborted: no answer"}, func(l *BatchLimits) {}, "were aborted or are incomplete, more than 5%"},
		"incomplete": {GateFailed, ItemEnd{State: ItemMoved, Troubled: true}, func(l *BatchLimits) {}, "1 of 1 switches were aborted or are incomplete"},
		"hold":       {GateHold, ItemEnd{State: ItemMoved, HoldMillis: 2001}, func(l *BatchLimits) { l.MaxHoldMillis = 2000 }, "publishers wait 2001 ms"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRun(t, 100, func(b *Batch) { c.change(&b.Limits) })
			r.end = func(int) ItemEnd { return c.end }
			r.drive()
			b := r.r.Batch(r.now)
			if b.Pause == nil || b.Pause.Gate != c.gate || !strings.Contains(b.Pause.Why, c.says) || len(r.started) != 1 {
				t.Fatalf("after %d switches: %+v, want the gate %s that says %q", len(r.started), b.Pause, c.gate, c.says)
			}
			if step := r.drive(); step.Do != BatchWait {
				t.Errorf("it goes on by itself: %v", step.Do)
			}
			r.end = nil
			r.resume(nil)
			r.drive()
			if b := r.r.Batch(r.now); b.Count.Moved != 100 || !b.State.Over() {
				t.Errorf("resumed: %+v", b)
			}
		})
	}
	// The odd failure among many is no reason.
	r := newRun(t, 1000, nil)
	r.end = func(i int) ItemEnd {
		if i%100 == 99 {
			return ItemEnd{State: ItemFailed}
		}
		return ItemEnd{State: ItemMoved}
	}
	r.drive()
	r.expect(BatchIncomplete, "", 990, 10, 0)
	r.end = nil
	n := len(r.started)
	r.resume(nil)
	r.drive()
	r.expect(BatchDone, "", 1000, 0, 0)
	if len(r.started) != n+10 {
		t.Errorf("%d topics have begun again, want the 10 that failed", len(r.started)-n)
	}
	for _, it := range r.r.Items() {
		if it.Attempt != 0 && it.Attempt != 2 {
			t.Errorf("%+v", it)
		}
	}
}

func TestAReplicationThatLagsPausesABatchBeforeItsNextTopics(t *testing.T) {
	r := newRun(t, 100, func(b *Batch) { b.Limits.MaxBacklog = 500 })
	r.backlog = 501
	r.drive()
	r.expect(BatchMoving, GateBacklog, 0, 0, 0)
	r.backlog = 500
	r.resume(nil)
	r.late = true
	r.drive()
	r.finish(r.busy[0])
	r.backlog, r.busy = 501, nil
	r.drive() // the next wave is not begun
	r.expect(BatchMoving, GateBacklog, 1, 0, 0)
	r.backlog = 0
	r.resume(nil)
	r.drive()
	r.now, r.backlog = r.now.Add(MeasureInterval), 501 // nor goes one on that has begun
	for _, i := range r.busy {
		r.finish(i)
	}
	n := len(r.started)
	r.drive()
	if b := r.r.Batch(r.now); b.Pause == nil || b.Pause.Gate != GateBacklog || len(r.started) != n {
		t.Errorf("%+v, %d more have begun", b.Pause, len(r.started)-n)
	}
}

func TestAnAbortWaitsForWhatHasBegunAndAResumeGoesOn(t *testing.T) {
	r := newRun(t, 100, nil)
	r.late = true
	r.drive()
	b := r.r.Batch(r.now)
	b.Rev, b.Abort = b.Rev+1, true
	r.r.Observe(b)
	if step := r.drive(); step.Do != BatchWait {
		t.Fatalf("%v", step.Do)
	}
	r.expect(BatchMoving, "", 0, 0, 0)
	r.end = func(int) ItemEnd { return ItemEnd{State: ItemFailed, Note: "aborted by the operator"} }
	r.finish(r.busy[0])
	r.busy = nil
	r.drive()
	r.expect(BatchAborted, "", 0, 1, 0)
	r.end, r.late = nil, false
	r.resume(nil)
	r.drive()
	r.expect(BatchDone, "", 100, 0, 0)
}

// Topics that wait again, after a resume, do not hide one behind them that a dead leader has begun.
func TestAnAbortFindsWhatHasBegunBehindTopicsThatWaitAgain(t *testing.T) {
	r := newRun(t, 100, func(b *Batch) { b.State, b.Abort, b.Limits.Parallel = BatchMoving, true, 2 })
	const again, begun = 20, 21
	for i := range r.r.items {
		if r.r.items[i].State = ItemChecked; i < again {
			r.r.items[i].State = ItemWaiting
		}
	}
	looks := map[int]int{}
	for step := r.r.Next(r.now); step.Do == BatchStart; step = r.r.Next(r.now) {
		looks[step.Item]++
		e := ItemEnd{}
		if step.Item == begun {
			e = ItemEnd{State: ItemFailed, Note: "aborted"}
		}
		r.r.Ended(r.now, step.Item, e)
	}
	for i, n := range looks {
		if n != 1 {
			t.Errorf("topic %d is looked at %d times", i, n)
		}
	}
	if looks[begun] == 0 || len(looks) > begun+1+2 {
		t.Errorf("it has looked at %v", looks)
	}
	r.drive()
	r.expect(BatchAborted, "", 0, 1, 0)
}

// A leader that was frozen while others ended the batch has nothing to write, whatever its own topics come to.
func TestALeaderThatWasOvertakenWritesNothing(t *testing.T) {
	r := newRun(t, 4, nil)
	r.late = true
	r.drive()
	b := r.r.Batch(r.now)
	b.Rev, b.State, b.Ended = b.Rev+9, BatchDone, r.now
	r.r.Observe(b)
	r.r.Ended(r.now, r.busy[0], ItemEnd{State: ItemBlocked, Note: "is on b already"})
	if step := r.r.Next(r.now); step.Do != BatchOver || !r.r.Overtaken() {
		t.Errorf("%+v", step)
	}
}

// What a late write of a leader that was frozen says of topics counts in the end of the batch, and that nothing drains is looked at again.
func TestASuccessorDoesNotBelieveThatABatchIsReadyForItsRule(t *testing.T) {
	for mode, want := range map[Mode]BatchDo{ModePlanned: BatchRule, ModeDrain: BatchSettle} {
		r := newRun(t, 2, func(b *Batch) { b.State, b.Mode, b.Namespace = BatchRuling, mode, "acme/orders" })
		r.r.items[0].State, r.r.items[1].State, r.r.b.State = ItemMoved, ItemFailed, BatchRuling
		r.r = NewBatchRun(r.r.b, r.r.items)
		step := r.r.Next(r.now)
		if step.Do == BatchWrite {
			r.r.Wrote(2)
			step = r.r.Next(r.now)
		}
		if step.Do != want {
			t.Errorf("%s: %+v", mode, step)
		}
		if r.r.Ruled(r.now, 1, 1, ""); r.r.Batch(r.now).State != BatchIncomplete {
			t.Errorf("%s: the batch is %s with one topic that has failed", mode, r.r.Batch(r.now).State)
		}
	}
}

func TestANamespaceHasItsRuleOnceNothingIsLeftOnTheOldCluster(t *testing.T) {
	r := newRun(t, 10, func(b *Batch) { b.Namespace = "acme/orders" })
	r.rounds = [][]string{{"persistent://acme/orders/new1"}, {"persistent://acme/orders/new2", "persistent://acme/orders/new3"}}
	r.drive()
	r.expect(BatchDone, "", 13, 0, 0)
	if b := r.r.Batch(r.now); !b.Ruled || b.Rule != 7 || b.Removed != 3 || b.Count.Total != 13 {
		t.Errorf("%+v", b)
	}
	r = newRun(t, 10, func(b *Batch) { b.Namespace = "acme/orders" })
	for i := range 10 {
		r.rounds = append(r.rounds, []string{fmt.Sprint("persistent://acme/orders/new", i)})
	}
	r.drive()
	r.expect(BatchRuling, GateNamespace, 15, 0, 0)
	if why := r.r.Batch(r.now).Pause.Why; !strings.Contains(why, "orders/new5") {
		t.Errorf("%s", why)
	}
	r.rounds = nil
	r.resume(nil)
	r.drive()
	r.expect(BatchDone, "", 15, 0, 0)
}

func TestTopicsThatARecordCountsAndNoPartHasAreFoundAgain(t *testing.T) {
	r := newRun(t, 10, func(b *Batch) { b.Namespace, b.State, b.Ends = "acme/orders", BatchMoving, []int{1, 10, 12} })
	r.rounds = [][]string{{"persistent://acme/orders/new1", "persistent://acme/orders/new2"}}
	r.drive()
	r.expect(BatchDone, "", 12, 0, 0)
}

func TestASwitchThatItsLeaderHasLeftBehindIsBegunAgain(t *testing.T) {
	r := newRun(t, 10, func(b *Batch) { b.Limits.MaxHoldMillis = 5000 })
	died := true
	r.end = func(i int) ItemEnd {
		if i == 0 && died {
			died = false
			return ItemEnd{State: ItemFailed, Inherited: true}
		}
		if i == 1 { // it was held until the new leader came
			return ItemEnd{State: ItemMoved, Inherited: true, HoldMillis: 9000}
		}
		return ItemEnd{State: ItemMoved}
	}
	r.drive()
	r.expect(BatchDone, "", 10, 0, 0)
	if len(r.started) != 11 || r.started[1] != 0 || r.r.Items()[0].Attempt != 2 {
		t.Errorf("began %v, attempt %d", r.started, r.r.Items()[0].Attempt)
	}
}

// A new leader knows what is stored, which may be older than what has happened.
func TestASuccessorGoesOnFromWhatIsStored(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		r := newRun(t, 60, func(b *Batch) { b.Namespace = "acme/orders" })
		r.late = true
		truth := map[int]bool{} // moved, by the switches' own records
		stored := r.r.Batch(r.now)
		items := slices.Clone(r.r.Items())
		for range 10_000 {
			if step := r.drive(); step.Do == BatchOver {
				break
			}
			if len(r.busy) > 0 {
				k := random.IntN(len(r.busy))
				i := r.busy[k]
				r.busy = slices.Delete(r.busy, k, k+1)
				truth[i] = true
				r.finish(i)
			}
			if random.IntN(3) == 0 { // written down
				stored, items = r.r.Batch(r.now), slices.Clone(r.r.Items())
			}
			if random.IntN(10) == 0 { // the leader dies
				r.r, r.busy = NewBatchRun(stored, slices.Clone(items)), nil
				if stored.Count.Left() > 0 && stored.State.Over() {
					t.Fatalf("over with something left: %+v", stored)
				}
			}
		}
		r.expect(BatchDone, "", 60, 0, 0)
		if len(truth) != 60 {
			t.Fatalf("%d topics have moved", len(truth))
		}
	}
}
