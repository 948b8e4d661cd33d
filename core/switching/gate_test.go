package switching

import (
	"testing"

	"pointsman/core/route"
)

func TestTheTableOfWhatAProxyMayDoWithoutTheStore(t *testing.T) {
	all := Table{}
	fenced := Table{Send: Drop, Produce: Hold, Open: Hold, Message: Drop, Ack: Hold, Other: Hold}
	check := func(what string, s Standing, want Table) {
		t.Helper()
		if got := Admit(s); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	check("active, lease", Standing{Lease: true}, all)
	check("active without the store goes on without limit", Standing{}, all)
	check("prepared, lease", Standing{State: route.StatePrepared, Lease: true}, all)
	check("prepared, no lease: what is on its way goes on, nothing new is written", Standing{State: route.StatePrepared}, Table{Send: Drop, Produce: Hold, Open: Hold})
	check("fenced, lease", Standing{State: route.StateFenced, Lease: true}, fenced)
	check("fenced never leaves by itself", Standing{State: route.StateFenced}, fenced)
	check("draining, lease", Standing{State: route.StateDraining, Lease: true}, all)
	check("draining without the store goes on without limit", Standing{State: route.StateDraining}, all)
	check("draining, map too old", Standing{State: route.StateDraining, Aged: true}, Table{Send: Drop, Produce: Hold})
	check("an unknown state is treated as fenced", Standing{State: route.StateDraining + 7, Lease: true}, fenced)
	check("active, map too old: no publishes, consumers go on", Standing{Aged: true}, Table{Send: Drop, Produce: Hold})
	check("prepared, map too old", Standing{State: route.StatePrepared, Lease: true, Aged: true}, Table{Send: Drop, Produce: Hold})
	check("fenced, map too old", Standing{State: route.StateFenced, Aged: true}, fenced)
}

func TestAProducerThatDroppedOneSendNeverForwardsAgain(t *testing.T) {
	active, fence := Standing{Epoch: 3, Lease: true}, Standing{State: route.StateFenced, Epoch: 3, Lease: true}
	g := Gate{Epoch: 3}
	if g.Send(active) != Pass || g.Outstanding != 1 || g.Drained() {
		t.Fatalf("the first SEND: %+v", g)
	}
	if g.Send(fence) != Drop || !g.Poisoned || g.Outstanding != 1 || g.MustClose(fence) {
		t.Fatalf("a SEND under the fence is dropped, and the handle stays open: %+v", g)
	}
	if g.Receipt(); !g.Drained() || g.Outstanding != 0 {
		t.Fatalf("the receipt drains it: %+v", g)
	}
	// The switch was aborted: message 2 may not pass while message 1 was dropped (hole "unfence").
	if g.Send(active) != Drop || !g.MustClose(active) {
		t.Fatalf("after the abort it is closed, and forwards nothing: %+v", g)
	}
	if g.Close(); g.Reopen() != Hold || g.MustClose(active) || g.Send(active) != Drop {
		t.Fatalf("until the broker has answered, the id cannot be opened again: %+v", g)
	}
	if g.Closed(); g.Reopen() != Pass {
		t.Fatalf("after the answer it can: %+v", g)
	}
}

func TestAProducerWithoutALeaseWaitsForIt(t *testing.T) {
	held := Standing{State: route.StatePrepared, Epoch: 1}
	g := Gate{Epoch: 1}
	if g.Send(held) != Drop || g.MustClose(held) {
		t.Fatalf("without a lease its SEND is dropped, and it is not closed: there is nowhere to go: %+v", g)
	}
	held.Lease = true
	if !g.MustClose(held) {
		t.Fatalf("with a lease it is closed, so that the client sends again: %+v", g)
	}
}

func TestAHandleOfAnotherEpochIsClosed(t *testing.T) {
	g, s := Gate{Epoch: 1}, Standing{Epoch: 2, Lease: true}
	if !g.MustClose(s) || g.Send(s) != Drop || g.Message(s) != Drop || g.Ack(s) != Drop {
		t.Fatalf("a handle of epoch 1 under an entry of epoch 2: %+v", g)
	}
}

func TestAConsumerThatDrainsStaysUnderTheNextEpoch(t *testing.T) {
	fence, after := Standing{State: route.StateFenced, Epoch: 1, Lease: true}, Standing{State: route.StateDraining, Epoch: 2}
	g := Gate{Epoch: 1}
	if g.Ack(fence) != Hold || !g.MustClose(after) {
		t.Fatalf("a handle of epoch 1 under an entry of epoch 2: %+v", g)
	}
	if g.Follow(2); g.MustClose(after) || g.Message(after) != Pass || g.Ack(after) != Pass {
		t.Fatalf("one that follows goes on: %+v", g)
	}
	g = Gate{Epoch: 1}
	g.Message(fence)
	if g.Follow(2); !g.MustClose(after) || g.Message(after) != Drop {
		t.Fatalf("but not when it dropped something: %+v", g)
	}
}

func TestAConsumerUnderTheFence(t *testing.T) {
	active, fence := Standing{Lease: true}, Standing{State: route.StateFenced, Lease: true}
	var g Gate
	if g.Message(active) != Pass || g.Ack(active) != Pass || g.Ack(fence) != Hold || g.Poisoned {
		t.Fatalf("messages pass, under the fence acknowledgements are held: %+v", g)
	}
	if g.Message(fence) != Drop || !g.MustClose(active) || g.Message(active) != Drop || g.Ack(active) != Pass {
		t.Fatalf("after a dropped message it is closed at the abort; what it had may be acknowledged: %+v", g)
	}
}

func TestOnlyWhatIsUnansweredMakesALostLegDirty(t *testing.T) {
	s := Standing{Lease: true}
	var g Gate
	g.Send(s)
	g.Receipt()
	if g.LegLost(); g.Lost || !g.Drained() {
		t.Errorf("everything was answered: %+v", g)
	}
	g.Send(s)
	if g.LegLost(); !g.Lost || !g.Drained() || g.Send(s) != Drop {
		t.Errorf("an unanswered SEND may be stored later: %+v", g)
	}
	g = Gate{}
	g.Send(s)
	g.Close()
	if g.Closed(); g.Lost || !g.Drained() {
		t.Errorf("the answer to CLOSE comes after the SENDs: %+v", g)
	}
	g.Send(s)
	g.Close()
	if g.LegLost(); !g.Lost {
		t.Errorf("the answer to CLOSE never came: %+v", g)
	}
}
