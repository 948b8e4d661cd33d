package admin_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/store"
)

func immediate(to string, topics ...string) admin.SwitchRequest {
	return admin.SwitchRequest{Topics: topics, To: to, Mode: "immediate", Who: "ann@ops", Why: "test"}
}

func TestASwitchNamesTheNewBrokersFlipsOnceAndWaitsForEveryProxy(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.clients("p1", topic1, 1, 2)
	r.clients("p2", topic1, 3, 0)
	r.clients("p2", topic2, 7, 7)
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.Partitions["b "+topic1] = 3 })
	r.proxies["p2"].Do(func(f *admintest.Fields) { f.Unresolved = 4 })
	st, err := r.switchAndWait(immediate("b", "acme/orders/t1"))
	if err != nil {
		t.Fatal(err)
	}
	if !st.Done() || st.Total != 1 || st.Flipped != 1 || st.Ended != 1 || len(st.Switches) != 1 || len(st.NotPromised) != 4 {
		t.Fatalf("status = %+v", st)
	}
	d := st.Switches[0]
	want := map[string]string{topic1 + "-partition-0": "broker-0.b:6650", topic1 + "-partition-1": "broker-0.b:6650", topic1 + "-partition-2": "broker-0.b:6650"}
	if fmt.Sprint(d.Assigned) != fmt.Sprint(want) || d.Unassigned != 0 {
		t.Errorf("assigned = %v, unassigned %d", d.Assigned, d.Unassigned)
	}
	if d.ID != st.ID || d.From != "a" || d.To != "b" || d.Epoch != 1 || d.Who != "ann@ops" || d.Runner != "p1" || len(d.Expect) != 2 || len(d.Acks) != 2 {
		t.Errorf("record = %+v", d)
	}
	if d.Producers != 4 || d.Consumers != 2 || d.Unresolved != 4 || !strings.Contains(d.Note, "4 messages had no receipt") {
		t.Errorf("moved %d producers, %d consumers, %d unresolved, note %q", d.Producers, d.Consumers, d.Unresolved, d.Note)
	}
	r.expect(topic1, "b", 1)
	r.expect(topic2, "a", 0)
	if e, _, err := r.st.Entry(t.Context(), topic1); err != nil || e.SwitchID != st.ID {
		t.Errorf("entry = %+v, %v: it must name its switch", e, err)
	}
	h, err := r.client("p2").History(t.Context(), 1)
	if err != nil || h.Changes[0].SwitchID != st.ID || h.Changes[0].Who != "ann@ops" || len(h.Changes[0].Changes) != 1 {
		t.Errorf("history = %+v, %v", h, err)
	}
	// The other proxy tells the same of it.
	other, err := r.client("p2").Switch(t.Context(), st.ID)
	if err != nil || !other.Done() || len(other.Switches) != 1 || other.To != "b" {
		t.Errorf("at p2: %+v, %v", other, err)
	}
	list, err := r.client("p2").Switches(t.Context(), 5)
	if err != nil || len(list.Switches) != 1 || list.Switches[0].ID != st.ID {
		t.Errorf("list = %+v, %v", list, err)
	}
}

func TestBrokersThatCannotBeLookedUpAreLeftOutAndCounted(t *testing.T) {
	r := newRig(t, "p1")
	r.proxies["p1"].Do(func(f *admintest.Fields) { f.LookupErr = errors.New("timed out") })
	st, err := r.switchAndWait(immediate("b", topic1))
	if err != nil || !st.Done() || st.Switches[0].Unassigned != 1 || len(st.Switches[0].Assigned) != 0 {
		t.Errorf("status = %+v, %v", st, err)
	}
}

// SW-05 in immediate mode: who does not report is named, and the flip stands.
func TestAProxyThatDoesNotReportIsNamedAfterTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		r.proxies["p2"].Do(func(f *admintest.Fields) { f.NoAcks = true })
		start := time.Now()
		st, err := r.switchAndWait(immediate("b", topic1))
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 10*time.Second || took > 12*time.Second {
			t.Errorf("it took %v, want about 10 s", took)
		}
		d := st.Switches[0]
		if st.State != "incomplete" || d.State != switching.StateIncomplete || !slices.Equal(d.Waiting, []string{"p2"}) || !strings.Contains(d.Note, "no report from p2") {
			t.Errorf("status = %+v", st)
		}
		r.expect(topic1, "b", 1)
	})
}

func TestAProxyThatRestartsNeedNotReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		p2 := r.proxies["p2"]
		p2.Do(func(f *admintest.Fields) { f.NoAcks = true })
		st, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic1))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		p2.Do(func(f *admintest.Fields) { f.Info.Incarnation = "p2-2" })
		p2.Register(t)
		st, err = r.client("p1").WaitSwitch(t.Context(), st.ID, nil)
		if err != nil || !st.Done() || !strings.Contains(st.Switches[0].Note, "restarted meanwhile: p2") {
			t.Errorf("status = %+v, %v", st, err)
		}
	})
}

// The driver of a switch may stop: the flip stands, what was not flipped is untouched, and another proxy ends the record.
func TestASwitchWhoseProxyStopsIsEndedByAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		r.proxies["p2"].Do(func(f *admintest.Fields) { f.NoAcks = true })
		st, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic1, topic2))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := r.servers["p1"].Shutdown(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic2)); err == nil || !strings.Contains(err.Error(), "stopping") {
			t.Errorf("a stopping proxy starts a switch: %v", err)
		}
		st, err = r.client("p2").Switch(t.Context(), st.ID)
		if err != nil || !st.Running() {
			t.Fatalf("at p2: %+v, %v; want it running still", st, err)
		}
		time.Sleep(16 * time.Second) // faked: beyond the time for reports
		st, err = r.client("p2").Switch(t.Context(), st.ID)
		if err != nil || st.State != "incomplete" || len(st.Switches) != 1 || st.Switches[0].State != switching.StateIncomplete {
			t.Errorf("at p2: %+v, %v; want it incomplete", st, err)
		}
		r.expect(topic1, "b", 1)
		r.expect(topic2, "a", 0)
	})
}

func TestABatchMovesEveryTopicAndSkipsWhatIsThere(t *testing.T) {
	r := newRig(t, "p1", "p2")
	var topics []string
	for i := range 30 {
		topics = append(topics, fmt.Sprintf("persistent://acme/orders/n%d", i))
	}
	r.set(topics[3], "b")
	st, err := r.switchAndWait(immediate("b", topics...))
	if err != nil || !st.Done() || st.Total != 29 || st.Flipped != 29 || st.Ended != 29 || len(st.Skipped) != 1 || st.Skipped[0].Name != topics[3] {
		t.Fatalf("status = %+v, %v", st, err)
	}
	for _, topic := range topics {
		r.expect(topic, "b", 1)
	}
	other, err := r.client("p2").Switch(t.Context(), st.ID)
	if err != nil || !other.Done() || other.Flipped != 29 {
		t.Errorf("at p2: %+v, %v", other, err)
	}
	one, err := r.client("p2").Switch(t.Context(), st.Switches[0].ID)
	if err != nil || len(one.Switches) != 1 || one.Switches[0].Batch != st.ID {
		t.Errorf("one of them: %+v, %v", one, err)
	}
}

func TestABatchStopsAtTheFirstTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		r.proxies["p2"].Do(func(f *admintest.Fields) { f.NoAcks = true })
		st, err := r.switchAndWait(immediate("b", topic1, topic2, topic3))
		if err != nil {
			t.Fatal(err)
		}
		if st.State != "incomplete" || st.Flipped != 1 || len(st.Notes) != 1 || !strings.Contains(st.Notes[0], "2 of 3 were not touched") {
			t.Errorf("status = %+v", st)
		}
		r.expect(topic2, "a", 0)
		r.expect(topic3, "a", 0)
	})
}

func TestTooManySwitchesAtOnceAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1")
		r.proxies["p1"].Do(func(f *admintest.Fields) { f.NoAcks = true })
		for i := range 4 {
			if _, err := r.client("p1").StartSwitch(t.Context(), immediate("b", fmt.Sprintf("acme/orders/n%d", i))); err != nil {
				t.Fatal(err)
			}
		}
		_, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic1))
		if err == nil || !strings.HasPrefix(refusal(t, err), "409 busy: 4 commands are moving topics through this proxy already") {
			t.Errorf("the fifth: %v", err)
		}
	})
}

func TestANamespaceMovesItsEntriesThenItsRuleAndKeepsNoDoubles(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.set(topic1, "c")                        // elsewhere: flipped first
	r.set(topic2, "b")                        // there already: becomes superfluous
	r.set("persistent://acme/orders/t9", "b") // and a floor: moved there and back, then removed
	r.set("persistent://acme/orders/t9", "a")
	if _, err := r.client("p1").Remove(t.Context(), admin.RemoveRequest{Name: "persistent://acme/orders/t9"}); err != nil {
		t.Fatal(err)
	}
	r.clients("p2", "persistent://acme/orders/t5", 1500, 4) // follows the rule
	before := map[string]route.Decision{}
	names := []string{topic1, topic2, "persistent://acme/orders/t5", "persistent://acme/orders/t9"}
	for _, n := range names {
		before[n] = r.stored(n)
	}
	st, err := r.switchAndWait(admin.SwitchRequest{Namespace: "acme/orders", To: "b", Mode: "immediate"})
	if err != nil || !st.Done() || st.Total != 2 || len(st.Notes) != 0 {
		t.Fatalf("status = %+v, %v; want one entry and the rule", st, err)
	}
	for _, n := range names {
		d := r.stored(n)
		if d.Cluster != "b" || d.Source != route.SourceNamespace || d.Epoch < before[n].Epoch || before[n].Cluster != "b" && d.Epoch == before[n].Epoch {
			t.Errorf("%s: %+v → %+v", n, before[n], d)
		}
	}
	r.expect(topic3, "a", 0)
	rec, err := r.st.Switch(t.Context(), st.ID+"-2")
	if wait := rec.Deadline.Sub(rec.Flipped); wait != 13*time.Second {
		t.Errorf("the proxies have %v to report; want 10 s and a second for each 500 of the 1,504 clients", wait)
	}
	if err != nil || rec.Topic != "acme/orders" || rec.Assigned["persistent://acme/orders/t5"] != "broker-0.b:6650" {
		t.Errorf("the rule's record = %+v, %v; want the broker of the topic with live clients", rec, err)
	}
	if entries, err := r.st.Entries(t.Context()); err != nil || slices.ContainsFunc(entries, func(e route.Entry) bool { return !e.Floor() }) {
		t.Errorf("entries left = %+v, %v", entries, err)
	}
}

// SW-16: two operators switch the same topic to different clusters through different proxies.
func TestOfTwoSwitchesOfOneTopicOneWins(t *testing.T) {
	for range 10 {
		r := newRig(t, "p1", "p2")
		var wg sync.WaitGroup
		states := make([]admin.SwitchStatus, 2)
		errs := make([]error, 2)
		for i, id := range []string{"p1", "p2"} {
			wg.Go(func() {
				c := r.client(id)
				req := immediate([]string{"b", "c"}[i], topic1)
				req.Who = "op-" + id
				if states[i], errs[i] = c.StartSwitch(t.Context(), req); errs[i] == nil {
					states[i], errs[i] = c.WaitSwitch(t.Context(), states[i].ID, nil)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		wins := 0
		for _, st := range states {
			switch {
			case st.Done():
				wins++
			case st.State != "failed" || len(st.Failed) != 1 || st.Failed[0].Code != admin.CodeConflict || !strings.Contains(st.Failed[0].Problem, "changed by op-"):
				t.Errorf("the loser sees %+v", st)
			}
		}
		// Both may win, one after the other, when they do not overlap; then the topic moved twice.
		d := r.stored(topic1)
		if wins == 0 || d.Epoch != uint64(wins) {
			t.Errorf("%d won, epoch %d", wins, d.Epoch)
		}
	}
}

func TestALostAnswerToTheFlipIsSettledByReading(t *testing.T) {
	r := newRig(t, "p1")
	r.stores["p1"].SetFaults(store.Faults{LoseAnswers: true, Only: []string{"Apply"}})
	st, err := r.switchAndWait(immediate("b", topic1))
	if err != nil || !st.Done() {
		t.Errorf("status = %+v, %v", st, err)
	}
	r.expect(topic1, "b", 1)
}

func TestAMemberThatIsNotConnectedBlocksByName(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.stores["p2"].Close()
	_, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic1))
	if err == nil || !strings.HasPrefix(refusal(t, err), "409 proxy_unreachable: proxy p2 is a member but not connected to the map store") {
		t.Errorf("error = %v", err)
	}
	r.clients("p1", topic2, 1, 0)
	_, err = r.client("p1").Set(t.Context(), admin.SetRequest{Name: topic3, Cluster: "b"})
	if err == nil || !strings.Contains(refusal(t, err), "p2 (is a member but not connected to the map store)") {
		t.Errorf("set: %v", err)
	}
	req := immediate("b", topic1)
	req.Force = true
	if st, err := r.switchAndWait(req); err != nil || !st.Done() || len(st.Switches[0].Expect) != 1 {
		t.Errorf("with --force: %+v, %v", st, err)
	}
}

func TestADryRunOfASwitchCountsAndChangesNothing(t *testing.T) {
	r := newRig(t, "p1", "p2")
	r.clients("p2", topic1, 1, 2)
	req := immediate("b", topic1, topic2)
	req.DryRun = true
	st, err := r.client("p1").StartSwitch(t.Context(), req)
	if err != nil || st.State != "planned" || st.Total != 2 || len(st.Clients) != 1 || st.Clients[0].Producers != 1 || st.Clients[0].Consumers != 2 {
		t.Errorf("dry run = %+v, %v", st, err)
	}
	r.expect(topic1, "a", 0)
	if list, err := r.client("p1").Switches(t.Context(), 5); err != nil || len(list.Switches) != 0 {
		t.Errorf("switches = %+v, %v", list, err)
	}
}

// While a rule is being changed somebody may remove an entry below it and leave an epoch floor: the rule must end up above it.
func TestARuleIsRaisedAboveAFloorThatAppearedMeanwhile(t *testing.T) {
	r := newRig(t, "p1")
	for _, cluster := range []string{"b", "c", "b", "a"} {
		r.set(topic1, cluster)
	}
	r.expect(topic1, "a", 4)
	hook := &hookStore{Memory: r.stores["p1"]}
	hook.before = func() { // between reading and writing
		entry, _, err := r.st.Entry(t.Context(), topic1)
		if err != nil {
			t.Error(err)
		}
		floor := route.Remove(entry, route.Decision{Cluster: "a", Source: route.SourceDefault})
		// A floor for a topic that the reader has not seen as one: its entry said the same cluster as the rule.
		if err := r.st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: topic1, Before: &entry, After: floor}}, Who: "other"}); err != nil {
			t.Error(err)
		}
		raised := *floor
		raised.Epoch = 9
		if err := r.st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: topic1, Before: floor, After: &raised}}, Who: "other"}); err != nil {
			t.Error(err)
		}
	}
	s := admin.New(admin.Config{Store: hook, Proxy: r.proxies["p1"], PeerTransport: r.net})
	r.net.Add("hooked:7780", s.Handler())
	t.Cleanup(func() { _ = s.Shutdown(context.Background()) })
	if _, err := r.client("hooked").Set(t.Context(), admin.SetRequest{Name: "acme/orders", Cluster: "b"}); err != nil {
		t.Fatal(err)
	}
	if d := r.stored(topic1); d.Cluster != "b" || d.Epoch <= 9 {
		t.Errorf("decided %+v; the topic moved from a at epoch 9 to b, so its epoch must be above 9", d)
	}
}

// hookStore runs before once, ahead of the first Apply.
type hookStore struct {
	*store.Memory
	once   sync.Once
	before func()
}

func (h *hookStore) Apply(ctx context.Context, c store.Change) error {
	h.once.Do(h.before)
	return h.Memory.Apply(ctx, c)
}

func TestASwitchThatALaterChangeOvertakesIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		r.proxies["p2"].Do(func(f *admintest.Fields) { f.NoAcks = true }) // as if it had skipped the first value
		st, err := r.client("p1").StartSwitch(t.Context(), immediate("b", topic1))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		r.set(topic1, "c")
		start := time.Now()
		st, err = r.client("p1").WaitSwitch(t.Context(), st.ID, nil)
		if err != nil || !st.Done() || st.Switches[0].Note != "overtaken by a later change of the map" || time.Since(start) > 2*time.Second {
			t.Errorf("status = %+v, %v after %v", st, err, time.Since(start))
		}
	})
}

// SW-16, the narrow window: the other operator writes between the switch's check and its flip.
func TestASwitchThatFindsTheTopicElsewhereChangesNothing(t *testing.T) {
	r := newRig(t, "p1", "p2")
	var once sync.Once
	r.proxies["p1"].Do(func(f *admintest.Fields) {
		f.BeforeFlip = func() {
			once.Do(func() {
				if _, err := r.client("p2").Set(t.Context(), admin.SetRequest{Name: topic1, Cluster: "c", ChangeOptions: admin.ChangeOptions{Who: "eve"}}); err != nil {
					t.Error(err)
				}
			})
		}
	})
	st, err := r.switchAndWait(immediate("b", topic1))
	if err != nil || st.State != "failed" || st.Flipped != 0 || st.Failed[0].Code != admin.CodeConflict || !strings.Contains(st.Failed[0].Problem, "changed by eve") {
		t.Errorf("status = %+v, %v", st, err)
	}
	r.expect(topic1, "c", 1)
}

func TestTroubleAmongManyStopsTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1", "p2")
		r.proxies["p1"].Do(func(f *admintest.Fields) {
			calls := 0
			f.BeforeFlip = func() {
				r.proxies["p2"].Do(func(f *admintest.Fields) {
					if calls++; calls > 2 { // the check of the namespace, the first topic, and then the others
						f.NoAcks = true
					}
				})
			}
		})
		var topics []string
		for i := range 30 {
			topics = append(topics, fmt.Sprintf("acme/orders/n%d", i))
		}
		st, err := r.switchAndWait(immediate("b", topics...))
		if err != nil || st.State != "incomplete" || st.Flipped != 9 || !strings.Contains(st.Notes[0], "21 of 30 were not touched") {
			t.Errorf("state %s, flipped %d, notes %v, %v; want the first and eight at once", st.State, st.Flipped, st.Notes, err)
		}
	})
}

// The lookups before a flip run side by side: 100 partitions of 100 ms each fit into the two seconds that they have. What does
// not fit is left out and counted.
func TestLookupsBeforeAFlipRunInParallelAndInBoundedTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "p1")
		flip := func(topic string, delay time.Duration) (admin.SwitchDetail, time.Duration) {
			r.proxies["p1"].Do(func(f *admintest.Fields) { f.Partitions["b "+topic], f.LookupDelay = 100, delay })
			start := time.Now()
			st, err := r.switchAndWait(immediate("b", topic))
			if err != nil || !st.Done() {
				t.Fatalf("%+v, %v", st, err)
			}
			return st.Switches[0], time.Since(start)
		}
		if d, took := flip(topic1, 100*time.Millisecond); len(d.Assigned) != 100 || took > 1500*time.Millisecond {
			t.Errorf("%d assigned after %v", len(d.Assigned), took)
		}
		if d, took := flip(topic2, time.Second); len(d.Assigned)+d.Unassigned != 100 || d.Unassigned < 60 || took > 4*time.Second {
			t.Errorf("%d assigned, %d not, after %v", len(d.Assigned), d.Unassigned, took)
		}
	})
}

// A proxy that died blocks a switch by name, until it is forgotten; one that is alive is not forgotten.
func TestAProxyThatWillNotComeBackIsForgotten(t *testing.T) {
	r := newRig(t, "p1", "p2")
	c := r.client("p1")
	refused := func(what string, err error, want admin.Code) {
		t.Helper()
		var e *admin.Error
		if !errors.As(err, &e) || e.Code != want {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	_, err := c.Forget(t.Context(), admin.ForgetRequest{ID: "p2"})
	refused("forgetting a live proxy", err, admin.CodeProxyLive)
	_, err = c.Forget(t.Context(), admin.ForgetRequest{ID: "p9"})
	refused("forgetting nobody", err, admin.CodeNotFound)

	if err := r.stores["p2"].Close(); err != nil {
		t.Fatal(err)
	}
	start := admin.SwitchRequest{Topics: []string{topic1}, To: "b", Mode: "immediate", DryRun: true}
	_, err = c.StartSwitch(t.Context(), start)
	refused("a switch while p2 is away", err, admin.CodeProxyUnreachable)
	list, err := c.Forget(t.Context(), admin.ForgetRequest{ID: "p2"})
	if err != nil || len(list.Proxies) != 1 || list.Proxies[0].ID != "p1" {
		t.Errorf("forget: %+v, %v; want p1 left", list, err)
	}
	if _, err := c.StartSwitch(t.Context(), start); err != nil {
		t.Errorf("a switch after p2 was forgotten: %v", err)
	}
}
