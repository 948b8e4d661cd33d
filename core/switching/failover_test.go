package switching

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// watch plays what a leader sees of a pair: one letter a second. Each line is "who says what of From; of To", for three proxies.
type watch struct {
	t      *testing.T
	pair   FailoverPair
	judge  *FailoverJudge
	stored PairState
	now    time.Time
	others []PairState
	bare   bool // nothing is mapped to From
	absent int  // members that are not connected to the map store
}

func newWatch(t *testing.T, automatic bool) *watch {
	pair := FailoverPair{From: "a", To: "b", After: 5 * time.Second, Automatic: automatic, Cooldown: 24 * time.Hour}
	return &watch{t: t, pair: pair, judge: NewFailoverJudge(pair), now: time.Date(2024, 1, 2, 3, 4, 5, 0, time.UTC)}
}

// votes reads "uud?": up, up, down, unknown.
func votes(text string) Votes {
	var live []map[string]ClusterHealth
	for _, c := range text {
		live = append(live, map[string]ClusterHealth{"x": {State: map[rune]string{'u': HealthUp, 'd': HealthDown, '?': "unknown"}[c]}})
	}
	return CountVotes("x", live)
}

// see judges once a second for so many seconds and tells what happened, as in "3:propose".
func (w *watch) see(seconds int, from, to string) string {
	var steps []string
	running := false // what a step of this call has begun
	for i := range seconds {
		next, step := w.judge.Judge(w.now, w.stored, FailoverInput{From: votes(from), To: votes(to), Members: len(from) + w.absent, Mapped: !w.bare, Running: running, Others: append(w.others, w.stored)})
		if step != FailoverNothing {
			steps = append(steps, fmt.Sprintf("%d:%s", i, []string{"", "propose", "withdraw", "execute"}[step]))
			if step == FailoverExecute {
				next.Order, running = fmt.Sprintf("fo-%d", i), true
			}
		} else if fmt.Sprint(next.Proposal) != fmt.Sprint(w.stored.Proposal) || !next.Executed.Equal(w.stored.Executed) {
			w.t.Errorf("the state changed without a step: %+v, %+v", w.stored, next)
		}
		w.stored = next
		w.now = w.now.Add(time.Second)
	}
	return strings.Join(steps, " ")
}

func (w *watch) expect(what, got, want string) {
	w.t.Helper()
	if got != want {
		w.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func TestADeadClusterIsProposedOnceAndWithdrawnWhenItIsBack(t *testing.T) {
	w := newWatch(t, false)
	w.expect("all is well", w.see(10, "uuu", "uuu"), "")
	w.expect("dead", w.see(20, "ddd", "uuu"), "5:propose")
	p := w.stored.Proposal
	if p == nil || p.Blocked != "" || p.Automatic || p.Votes.Down != 3 || p.Made.Sub(p.Down) != 5*time.Second {
		t.Fatalf("the proposal is %+v", p)
	}
	if p.Command() != "pointsman switch start --mode failover --from a --to b" {
		t.Errorf("the command is %q", p.Command())
	}
	w.expect("two are answered again", w.see(3, "uud", "uuu"), "0:withdraw")
	if w.stored.Proposal != nil || !w.stored.Executed.IsZero() {
		t.Errorf("afterwards: %+v", w.stored)
	}
}

func TestAMinorityOrATieProposesNothing(t *testing.T) {
	for _, says := range []string{"duu", "du", "d?u", "dd??", "???", "", "d??"} {
		w := newWatch(t, true)
		w.expect(says, w.see(60, says, "uuu"), "")
	}
	for _, says := range []string{"d", "dd", "ddu", "dd?"} {
		w := newWatch(t, false)
		w.expect(says, w.see(60, says, "uuu"), "5:propose")
	}
}

func TestAFlappingClusterBeginsAnewEachTime(t *testing.T) {
	w := newWatch(t, true)
	for range 20 {
		w.expect("down", w.see(5, "ddd", "uuu"), "") // seconds 0 to 4
		w.expect("for a moment not", w.see(1, "d?u", "uuu")+w.see(1, "duu", "uuu"), "")
	}
	w.expect("down for good", w.see(6, "ddd", "uuu"), "5:execute")
}

func TestAProposalOutlivesProxiesThatDoNotKnowYet(t *testing.T) {
	w := newWatch(t, false)
	w.expect("dead", w.see(6, "ddd", "uuu"), "5:propose")
	w.expect("all proxies restart", w.see(10, "???", "uuu"), "")
	if w.stored.Proposal == nil {
		t.Fatal("nobody has seen the cluster, and the proposal is gone")
	}
	w.expect("they find it dead again", w.see(20, "ddd", "uuu"), "")
	w.expect("it is back", w.see(1, "uuu", "uuu"), "0:withdraw")
}

func TestANewLeaderCountsAnewAndRepeatsNothing(t *testing.T) {
	w := newWatch(t, true)
	w.expect("the first leader", w.see(4, "ddd", "uuu"), "")
	w.judge = NewFailoverJudge(w.pair)
	w.expect("the second one", w.see(6, "ddd", "uuu"), "5:execute")
	w.judge = NewFailoverJudge(w.pair)
	w.expect("the third one, with something left on the old cluster", w.see(100, "ddd", "uuu"), "5:propose")
	if p := w.stored.Proposal; p == nil || !strings.Contains(p.Blocked, "fo-5") {
		t.Errorf("the proposal does not say what is in the way: %+v", p)
	}
	w.bare = true
	w.expect("nothing is left", w.see(5, "ddd", "uuu"), "0:withdraw")
	w.expect("and stays so", w.see(100, "ddd", "uuu"), "")
}

func TestALeaderThatWasFrozenCountsAnew(t *testing.T) {
	w := newWatch(t, true)
	w.expect("down", w.see(4, "ddd", "uuu"), "")
	w.now = w.now.Add(time.Minute)
	w.expect("a minute later", w.see(6, "ddd", "uuu"), "5:execute")
}

func TestAutomaticFailoversHaveACoolDownInBothDirections(t *testing.T) {
	w := newWatch(t, true)
	w.expect("dead", w.see(6, "ddd", "uuu"), "5:execute")
	w.expect("back, with new topics", w.see(5, "uuu", "uuu"), "")
	w.expect("dead again within the cool-down", w.see(20, "ddd", "uuu"), "5:propose")
	w.now = w.stored.Executed.Add(24*time.Hour - 10*time.Second)
	w.expect("the cool-down ends", w.see(20, "ddd", "uuu"), "10:execute")

	// SW-18: what was moved by itself does not go back by itself.
	back := newWatch(t, true)
	back.pair.From, back.pair.To = "b", "a"
	back.judge = NewFailoverJudge(back.pair)
	back.others = []PairState{{From: "a", To: "b", Executed: back.now.Add(-time.Hour), Order: "fo-1"}}
	back.expect("the other cluster dies an hour later", back.see(20, "ddd", "uuu"), "5:propose")
	other := newWatch(t, true)
	other.others = []PairState{{From: "c", To: "d", Executed: other.now.Add(-time.Hour), Order: "fo-1"}}
	other.expect("another pair's failover is no obstacle", other.see(20, "ddd", "uuu"), "5:execute")
}

func TestNothingIsMovedToAClusterThatIsNotUp(t *testing.T) {
	w := newWatch(t, true)
	w.expect("both are down: it may be the proxies' own network", w.see(20, "ddd", "ddd"), "5:propose")
	if p := w.stored.Proposal; p == nil || !strings.Contains(p.Blocked, "cluster b is not up either") {
		t.Errorf("the proposal is %+v", p)
	}
	w.expect("the other one is back", w.see(3, "ddd", "uuu"), "0:execute")
}

func TestWithoutAutomaticNothingIsEverExecuted(t *testing.T) {
	w := newWatch(t, false)
	w.expect("dead for a day", w.see(24*3600, "ddd", "uuu"), "5:propose")
}

// A ZooKeeper that is cut in two leaves some proxies without a vote. They may be answered by the cluster, and would go on with it: nothing moves by itself unless
// those that are left are a majority of all.
func TestProxiesThatAreCutOffFromTheMapStoreCountForAutomaticFailovers(t *testing.T) {
	for _, c := range []struct {
		says    string
		absent  int
		blocked bool
	}{{"d", 0, false}, {"d", 1, true}, {"d", 2, true}, {"dd", 1, false}, {"dd", 2, true}, {"ddd", 2, false}, {"dd?", 1, true}, {"ddu", 0, false}} {
		w := newWatch(t, true)
		w.absent = c.absent
		if !c.blocked {
			w.expect(c.says, w.see(20, c.says, "uuu"), "5:execute")
			continue
		}
		w.expect(c.says, w.see(20, c.says, "uuu"), "5:propose")
		if p := w.stored.Proposal; p == nil || !strings.Contains(p.Blocked, fmt.Sprintf("%d of %d proxies are not connected", c.absent, len(c.says)+c.absent)) {
			t.Errorf("%s and %d absent: the proposal is %+v", c.says, c.absent, p)
		}
		w.absent = 0
		w.expect("they are back and say the same", w.see(3, strings.Repeat("d", len(c.says)+c.absent), "uuu"), "0:execute")
	}
	// By hand it is for the operator to know: what is connected proposes.
	w := newWatch(t, false)
	w.absent = 5
	w.expect("a minority of all", w.see(20, "dd", "uu"), "5:propose")
	if p := w.stored.Proposal; p.Blocked != "" {
		t.Errorf("the proposal is blocked: %s", p.Blocked)
	}
	// They come back, and are answered: a majority of all is, and nothing was moved meanwhile.
	back := newWatch(t, true)
	back.absent = 3
	back.expect("cut off", back.see(20, "dd", "uu"), "5:propose")
	back.absent = 0
	back.expect("together again", back.see(1, "dduuu", "uuuuu"), "0:withdraw")
}

func TestAProxyThatRestartsHasNoVoteUntilItKnows(t *testing.T) {
	w := newWatch(t, true)
	w.expect("two of two", w.see(4, "dd", "uu"), "")
	w.expect("one restarts", w.see(2, "d?", "u?"), "")
	w.expect("it finds the same: the time counts anew", w.see(20, "dd", "uu"), "5:execute")

	three := newWatch(t, true)
	three.expect("three of three", three.see(4, "ddd", "uuu"), "")
	three.expect("one restarts: the others are a majority", three.see(2, "dd?", "uu?"), "1:execute")

	gone := newWatch(t, true)
	gone.expect("three of three", gone.see(4, "ddd", "uuu"), "")
	gone.absent = 1
	gone.expect("one is stopped for good: two of three members are a majority", gone.see(2, "dd", "uu"), "1:execute")
}

func TestAClockThatIsSetMakesNoClusterDead(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour, 24 * time.Hour, -time.Second} {
		w := newWatch(t, true)
		w.expect("down", w.see(3, "ddd", "uuu"), "")
		w.now = w.now.Add(jump - time.Second)
		w.expect(fmt.Sprintf("the clock is set by %v", jump), w.see(20, "ddd", "uuu"), "5:execute")
	}
	// One that was set back after an automatic failover makes the cool-down longer, never shorter.
	w := newWatch(t, true)
	w.expect("dead", w.see(6, "ddd", "uuu"), "5:execute")
	w.now = w.now.Add(-48 * time.Hour)
	w.expect("two days earlier", w.see(100, "ddd", "uuu"), "5:propose")
}
