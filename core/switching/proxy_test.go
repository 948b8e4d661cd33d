package switching

import (
	"testing"
	"time"

	"pointsman/core/route"
)

var (
	proxyTopic = route.Entry{Topic: "persistent://acme/ns/t", Cluster: "a", Epoch: 4}
	proxyStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	proxyOld   = proxyStart.Add(SettleTime)
)

func inSwitch(s route.State) route.Entry {
	e := proxyTopic
	e.State, e.SwitchID, e.Attempt = s, "s1", 1
	return e
}

func owes(t *testing.T, p Proxy, now time.Time, want Duty, why string) {
	t.Helper()
	if got := p.Next(now); got.Do != want.Do || got.Phase != want.Phase || got.Clean != want.Clean {
		t.Fatalf("%s: owes %+v, want %+v", why, got, want)
	}
}

func TestAProxyInAPlannedSwitch(t *testing.T) {
	p := NewProxy(proxyStart, proxyTopic)
	p.Learn(proxyTopic)
	owes(t, p, proxyOld, Duty{}, "nothing moves")
	prepared := inSwitch(route.StatePrepared)
	p.Learn(prepared)
	owes(t, p, proxyOld, Duty{Do: DoPrepare}, "the loops come first")
	p.Told(prepared)
	owes(t, p, proxyOld, Duty{Do: DoSave}, "then the disk (P3)")
	p.Saved(prepared)
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StatePrepared}, "then the ack")
	p.Acked(StatePrepared, KeyOf(prepared))
	owes(t, p, proxyOld, Duty{}, "until the fence")
	fenced := inSwitch(route.StateFenced)
	p.Learn(fenced)
	owes(t, p, proxyOld, Duty{Do: DoFence}, "the loops come first")
	p.Told(fenced)
	owes(t, p, proxyOld, Duty{}, "SENDs are unanswered (P5)")
	p.Drained(Key{"s1", 2}, true, "")
	owes(t, p, proxyOld, Duty{}, "that was the drain of another attempt")
	p.Drained(KeyOf(fenced), true, "")
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StateFenced, Clean: true}, "all are answered")
	owes(t, p, proxyOld.Add(-1), Duty{Do: DoAck, Phase: StateFenced}, "what the process before it had sent may still come (P5)")
	p.Acked(StateFenced, KeyOf(fenced))
	owes(t, p, proxyOld, Duty{}, "until the flip")
	flipped := inSwitch(route.StateActive)
	flipped.Cluster, flipped.Epoch = "b", 5
	p.Learn(flipped)
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "the loops close what is of the old epoch")
	p.Told(flipped)
	p.Evicted(flipped)
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StateEvicting}, "everybody was told")
	p.Acked(StateEvicting, KeyOf(flipped))
	owes(t, p, proxyOld, Duty{}, "the end")
	if p.Learn(prepared); p.Entry() != flipped {
		t.Errorf("a late watch brought %+v back", p.Entry())
	}
}

func draining(drain string) route.Entry {
	e := inSwitch(route.StateDraining)
	e.Cluster, e.Epoch, e.Drain = "b", 5, drain
	return e
}

func TestAProxyInADrain(t *testing.T) {
	p := NewProxy(proxyStart, proxyTopic)
	fenced := inSwitch(route.StateFenced)
	p.Learn(fenced)
	p.Told(fenced)
	p.Saved(fenced)
	first, second := draining("a;0;3:4;=one;=two"), draining("a;0;3:4;>one;=two")
	p.Learn(first)
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "producers go to the new cluster")
	p.Told(first)
	owes(t, p, proxyOld, Duty{}, "they are being told")
	p.Learn(second)
	owes(t, p, proxyOld, Duty{Do: DoFollow}, "one subscription is about to leave")
	p.Told(second)
	p.Evicted(first)
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StateEvicting}, "everybody was told of the flip, whoever drains by now")
	p.Acked(StateEvicting, KeyOf(second))
	owes(t, p, proxyOld, Duty{}, "of what drains the disk has what the copy of the map has")
	if s := p.Standing(false, false); Admit(s) != (Table{}) {
		t.Errorf("it goes on without the store: %+v", s)
	}
	// The way back is another attempt, with acks of its own; then it is given up.
	back := second
	back.State, back.Attempt = route.StatePrepared, 2
	p.Learn(back)
	owes(t, p, proxyOld, Duty{Do: DoPrepare}, "the loops come first")
	p.Told(back)
	owes(t, p, proxyOld, Duty{Do: DoSave}, "then the disk (P3)")
	p.Saved(back)
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StatePrepared}, "then the ack")
	p.Acked(StatePrepared, KeyOf(back))
	again := second
	again.Attempt = 2
	p.Learn(again)
	owes(t, p, proxyOld, Duty{Do: DoRelease}, "it drains on, for the attempt that led back")
	p.Told(again)
	owes(t, p, proxyOld, Duty{}, "nobody was told anything")
	done := again
	done.State, done.Drain = route.StateActive, ""
	p.Learn(done)
	owes(t, p, proxyOld, Duty{Do: DoRelease}, "the drain has ended")
	p.Told(done)
	owes(t, p, proxyOld, Duty{}, "the end")
}

func TestAProxyThatMissesStepsOfADrain(t *testing.T) {
	p := NewProxy(proxyStart, proxyTopic)
	p.Learn(proxyTopic)
	p.Learn(draining("a;1;3:4;=two"))
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "the flip comes with what has become of it")
	p.Told(p.Entry())
	later := draining("a;2;3:4")
	later.Attempt = 4
	p.Learn(later)
	owes(t, p, proxyOld, Duty{Do: DoFollow}, "a way back that was given up went unnoticed")
	p.Told(later)
	returned := later
	returned.State, returned.Cluster, returned.Epoch, returned.Drain = route.StateActive, "a", 6, ""
	p.Learn(returned)
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "another one did not")

	p = NewProxy(proxyStart, route.Entry{})
	p.Learn(later)
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "a process that knows the topic only since it drains may have handles of before")
	p = NewProxy(proxyStart, later)
	owes(t, p, proxyOld, Duty{Do: DoEvict}, "so may one that starts from its disk")
	p.Told(later)
	if s := p.Standing(false, false); Admit(s) != (Table{}) {
		t.Errorf("what drains goes on from the disk without limit: %+v", s)
	}
}

func TestAProxyThatMissedTheAbort(t *testing.T) {
	p := NewProxy(proxyStart, proxyTopic)
	first := inSwitch(route.StateFenced)
	p.Learn(first)
	p.Told(first)
	p.Saved(first)
	p.Drained(KeyOf(first), false, "leg lost")
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StateFenced}, "not clean")
	p.Acked(StateFenced, KeyOf(first))
	second := first
	second.Attempt = 2
	p.Learn(second)
	p.Told(second)
	owes(t, p, proxyOld, Duty{Do: DoSave}, "the disk knows another attempt")
	p.Saved(second)
	owes(t, p, proxyOld, Duty{}, "the drain of the first attempt counts for nothing")
	p.Drained(KeyOf(second), true, "")
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StateFenced, Clean: true}, "nor does its ack")
	aborted := second
	aborted.State = route.StateActive
	p.Learn(aborted)
	owes(t, p, proxyOld, Duty{Do: DoRelease}, "back on the same cluster")
}

func TestWhatAProxyGoesByWithoutTheStore(t *testing.T) {
	if s := NewProxy(proxyStart, route.Entry{}).Standing(true, false); Admit(s).Open != Hold || Admit(s).Send != Drop {
		t.Errorf("with neither store nor disk nothing passes: %+v", s)
	}
	p := NewProxy(proxyStart, inSwitch(route.StatePrepared))
	if s := p.Standing(true, false); s.Lease || Admit(s).Send != Drop {
		t.Errorf("what comes from the disk has no lease, whatever the clock says: %+v", s)
	}
	owes(t, p, proxyOld, Duty{Do: DoPrepare}, "the loops of the new process know nothing")
	p.Told(p.Entry())
	owes(t, p, proxyOld, Duty{}, "nothing is acknowledged before a synced read")
	p.Learn(p.Entry())
	if s := p.Standing(true, false); Admit(s).Send != Pass || Admit(p.Standing(false, false)).Send != Drop {
		t.Errorf("after it the lease counts: %+v", s)
	}
	owes(t, p, proxyOld, Duty{Do: DoAck, Phase: StatePrepared}, "the disk has it already")
	p.SessionLost()
	if s := p.Standing(true, false); Admit(s).Send != Drop {
		t.Errorf("a new session has read nothing yet: %+v", s)
	}
	p = NewProxy(proxyStart, proxyTopic)
	if Admit(p.Standing(false, false)) != (Table{}) {
		t.Error("an active topic goes on from the disk without limit")
	}
}

func TestALeaseRunsFromTheSendingOfWhatWasAnswered(t *testing.T) {
	left := func(l Lease, now, want time.Duration) {
		t.Helper()
		if got := l.Left(now); got != want {
			t.Errorf("at %v %v is left, want %v", now, got, want)
		}
	}
	l := NewLease(15 * time.Second)
	l.Answered(100 * time.Second)
	left(l, 100*time.Second, 0) // a write alone says nothing about the map
	l.Synced(100 * time.Second)
	left(l, 103*time.Second, 7*time.Second) // ⅔ of 15 s, from the sending
	l.Answered(105 * time.Second)
	left(l, 105*time.Second, 10*time.Second)
	l.Answered(101 * time.Second) // an answer that was overtaken
	left(l, 105*time.Second, 10*time.Second)
	left(l, 115*time.Second, 0)
	left(Lease{}, 0, 0)
}
