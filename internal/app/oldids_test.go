package app

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/internal/testkit"
	"pointsman/store"
)

const topicOfOldIDs = "persistent://public/default/t"

// fakeTranslator knows one answer.
type fakeTranslator struct {
	asked []string
	last  pulsaradmin.Position
	err   error
}

func (f *fakeTranslator) Translate(_ context.Context, topic, from, to string, at session.Position) (session.Translated, error) {
	f.asked = append(f.asked, topic+" "+from+"→"+to)
	return session.Translated{Kind: session.TranslatedCopy, At: session.Position{Ledger: at.Ledger + 1, Entry: at.Entry}}, f.err
}

func (f *fakeTranslator) Last(_ context.Context, topic, cluster string) (pulsaradmin.Position, error) {
	f.asked = append(f.asked, topic+" at "+cluster)
	return f.last, f.err
}

func move(t *testing.T, table *route.Table, cluster string) *route.Table {
	t.Helper()
	topic, err := route.ParseTopic(topicOfOldIDs)
	if err != nil {
		t.Fatal(err)
	}
	var old *route.Entry
	if e, ok := table.Entry(topicOfOldIDs); ok {
		old = &e
	}
	e := route.Move(topic, old, table.Decide(topic, "a"), cluster, "")
	next, err := table.WithEntry(topicOfOldIDs, &e)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func TestTheClusterOfAnEarlierEpochIsRemembered(t *testing.T) {
	o := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
	defer o.close()
	table := route.Empty()
	for _, to := range []string{"b", "c"} {
		next := move(t, table, to)
		o.note(table, next, route.Changes{Topics: []string{topicOfOldIDs}})
		table = next
	}
	for epoch, want := range []string{"a", "b", ""} {
		if got := o.clusterAt(topicOfOldIDs, uint64(epoch)); got != want {
			t.Errorf("epoch %d was in %q, want %q", epoch, got, want)
		}
	}
	// By a rule: no topic is named.
	r, err := route.SetRule(table, "public/other", "b", "", "a")
	if err != nil {
		t.Fatal(err)
	}
	next, err := table.WithRule(r.Scope, &r)
	if err != nil {
		t.Fatal(err)
	}
	o.note(table, next, route.Changes{Scopes: []string{r.Scope}})
	if r, err = route.SetRule(next, "public/other", "c", "", "a"); err != nil {
		t.Fatal(err)
	}
	last, err := next.WithRule(r.Scope, &r)
	if err != nil {
		t.Fatal(err)
	}
	o.note(next, last, route.Changes{Scopes: []string{r.Scope}})
	for range tablesKept { // topics that move one by one take no table's place
		o.note(last, last, route.Changes{Topics: []string{topicOfOldIDs}})
	}
	for epoch, want := range []string{"a", "b", ""} {
		if got := o.clusterAt("persistent://public/other/x", uint64(epoch)); got != want {
			t.Errorf("epoch %d of what rules decide was in %q, want %q", epoch, got, want)
		}
	}
	gap := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
	defer gap.close()
	gap.note(last, table, route.Changes{Scopes: []string{r.Scope}})
	if got := gap.clusterAt("persistent://public/other/x", 1); got != "" {
		t.Errorf("of an epoch before what was seen it says %q", got)
	}
}

func TestMovesThatAreRememberedAreBounded(t *testing.T) {
	o := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
	defer o.close()
	for i := range pastKept + 10 {
		o.remember(epochOf{topicOfOldIDs, uint64(i)}, owner{switchID: "s1"})
		o.remember(epochOf{topicOfOldIDs, uint64(i)}, owner{cluster: "a"}) // it takes the place of the one before
	}
	if len(o.past) != pastKept || len(o.order) != pastKept || o.clusterAt(topicOfOldIDs, 9) != "" || o.clusterAt(topicOfOldIDs, 10) != "a" {
		t.Errorf("%d moves are remembered, want the last %d", len(o.past), pastKept)
	}
}

func TestAPositionIsTranslatedByTheHistoryOfTheMap(t *testing.T) {
	st := store.NewMemory()
	ctx := t.Context()
	first := route.Entry{Topic: topicOfOldIDs, Cluster: "b", Epoch: 1, SwitchID: "s1"}
	second := route.Entry{Topic: topicOfOldIDs, Cluster: "a", Epoch: 2}
	for _, c := range []store.Change{
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, After: &first}}, Switch: &switching.Record{ID: "s1", Rev: 1, Topic: topicOfOldIDs, From: "a", To: "b", Epoch: 1}},
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, Before: &first, After: &second}}},
	} {
		if err := st.Apply(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	o := newOldIDs(st, slog.New(slog.DiscardHandler), "a")
	defer o.close()
	f := &fakeTranslator{}
	ask := func(epoch uint64) session.Translated {
		return o.find(t.Context(), session.Translation{Topic: topicOfOldIDs + "-partition-1", Epoch: epoch, At: session.Position{Ledger: 7, Entry: 8}, Cluster: "a"})
	}
	o.translate = adminTranslator{down: func(string) bool { return false }}
	if a := ask(1); a.Kind != session.TranslatedFailed || !strings.Contains(a.Text, "clusters.b.web_url") {
		t.Errorf("without an admin address: %+v", a)
	}
	o.translate = f
	if a := ask(0); a.Kind != session.TranslatedCopy || a.At.Ledger != 7 || len(f.asked) > 0 {
		t.Errorf("an id of the cluster that has the topic again became %+v", a)
	}
	if a := ask(1); a.At.Ledger != 8 || !slices.Equal(f.asked, []string{topicOfOldIDs + "-partition-1 b→a"}) {
		t.Errorf("%+v, asked %v", a, f.asked)
	}
	if a := ask(9); a.Kind != session.TranslatedUnknown {
		t.Errorf("an epoch that never was: %+v", a)
	}
	f.err = errors.New("cluster b does not answer")
	if a := ask(1); a.Kind != session.TranslatedFailed || a.Text != f.err.Error() {
		t.Errorf("%+v", a)
	}
}

// countedStore counts how often the history is read.
type countedStore struct {
	store.Store
	histories atomic.Int32
}

func (s *countedStore) History(ctx context.Context, limit int) ([]store.HistoryEntry, error) {
	s.histories.Add(1)
	return s.Store.History(ctx, limit)
}

// A process that begins anew knows of a move however many followed, and does not read all of the history for each position that is asked for.
func TestTheHistoryIsReadOnceAndAsAWhole(t *testing.T) {
	st := &countedStore{Store: store.NewMemory()}
	apply := func(rec *switching.Record, before, after *route.Entry) {
		t.Helper()
		if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: after.Topic, Before: before, After: after}}, Switch: rec}); err != nil {
			t.Fatal(err)
		}
	}
	const once, twice = topicOfOldIDs + "1", topicOfOldIDs + "2"
	first := route.Entry{Topic: once, Cluster: "b", Epoch: 1, SwitchID: "s1"}
	apply(&switching.Record{ID: "s1", Rev: 1, Topic: once, From: "a", To: "b", Epoch: 1}, nil, &first)
	second := route.Entry{Topic: twice, Cluster: "b", Epoch: 1, SwitchID: "s2"}
	apply(&switching.Record{ID: "s2", Rev: 1, Topic: twice, From: "a", To: "b", Epoch: 1}, nil, &second)
	third := route.Entry{Topic: twice, Cluster: "c", Epoch: 2}
	apply(nil, &second, &third)
	var last *route.Entry
	for epoch := range uint64(3000) {
		next := route.Entry{Topic: topicOfOldIDs, Cluster: string(rune('a' + epoch%2)), Epoch: epoch}
		apply(nil, last, &next)
		last = &next
	}
	o := newOldIDs(st, slog.New(slog.DiscardHandler), "a")
	defer o.close()
	f := &fakeTranslator{}
	o.translate = f
	ask := func(topic string, epoch uint64, want session.TranslatedKind, asked string) {
		t.Helper()
		f.asked = nil
		a := o.find(t.Context(), session.Translation{Topic: topic, Epoch: epoch, Cluster: "d"})
		if a.Kind != want || strings.Join(f.asked, "") != asked {
			t.Errorf("epoch %d of %s: %+v, asked %v; want kind %d, asked %q", epoch, topic, a, f.asked, want, asked)
		}
	}
	ask(once, 0, session.TranslatedCopy, once+" a→d")
	if n := st.histories.Load(); n != 0 {
		t.Errorf("for the last move of a topic the history was read %d times", n)
	}
	ask(twice, 0, session.TranslatedCopy, twice+" a→d")
	ask(twice, 1, session.TranslatedCopy, twice+" b→d")
	ask(topicOfOldIDs, 7, session.TranslatedCopy, topicOfOldIDs+" b→d")
	for range 3 {
		ask(once, 9, session.TranslatedUnknown, "")
	}
	if n := st.histories.Load(); n != 1 {
		t.Errorf("the history was read %d times, want once", n)
	}
	// A watch may skip what was soon replaced.
	skipped := route.Entry{Topic: topicOfOldIDs, Cluster: "c", Epoch: last.Epoch + 1}
	now := route.Entry{Topic: topicOfOldIDs, Cluster: "a", Epoch: last.Epoch + 2}
	apply(nil, last, &skipped)
	apply(nil, &skipped, &now)
	before, err := route.Empty().WithEntry(topicOfOldIDs, last)
	if err != nil {
		t.Fatal(err)
	}
	after, err := before.WithEntry(topicOfOldIDs, &now)
	if err != nil {
		t.Fatal(err)
	}
	o.note(before, after, route.Changes{Topics: []string{topicOfOldIDs}})
	ask(topicOfOldIDs, skipped.Epoch, session.TranslatedCopy, topicOfOldIDs+" c→d")
}

// failing is a store of which some operations fail.
type failing struct {
	store.Store
	history, record, entry error
}

func (s *failing) History(ctx context.Context, limit int) ([]store.HistoryEntry, error) {
	if s.history != nil {
		return nil, s.history
	}
	return s.Store.History(ctx, limit)
}

func (s *failing) Switch(ctx context.Context, id string) (switching.Record, error) {
	if s.record != nil {
		return switching.Record{}, s.record
	}
	return s.Store.Switch(ctx, id)
}

func (s *failing) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	if s.entry != nil {
		return route.Entry{}, false, s.entry
	}
	return s.Store.Entry(ctx, topic)
}

// What the store does not tell now is a failure, which clients meet by trying again, and not an id that nobody knows, which they give up. What this process knows, or
// what the history has of a switch whose record is gone, is enough.
func TestAStoreThatDoesNotAnswerIsNotOneThatKnowsNothing(t *testing.T) {
	away := store.ErrUnavailable
	const removed = topicOfOldIDs + "-removed"
	for name, c := range map[string]struct {
		failing
		topic string
		epoch uint64
		last  bool
		want  session.TranslatedKind
	}{
		"the history is away":            {failing: failing{history: away}, epoch: 1, want: session.TranslatedFailed},
		"all of it is away":              {failing: failing{history: away, record: away, entry: away}, epoch: 1, want: session.TranslatedFailed},
		"the records are gone":           {failing: failing{record: store.ErrNotFound}, epoch: 1, want: session.TranslatedCopy},
		"the record is away":             {failing: failing{record: away}, epoch: 2, want: session.TranslatedFailed},
		"the record is gone":             {failing: failing{record: store.ErrNotFound}, epoch: 2, want: session.TranslatedCopy},
		"the last one, of no drain":      {epoch: 2, last: true, want: session.TranslatedFailed},
		"an entry that was removed":      {topic: removed, epoch: 1, want: session.TranslatedCopy},
		"before the last move":           {epoch: 0, want: session.TranslatedCopy},
		"a switch that carried messages": {epoch: 2, want: session.TranslatedCopy},
	} {
		t.Run(name, func(t *testing.T) {
			st := store.NewMemory()
			entries := []route.Entry{{Topic: topicOfOldIDs, Cluster: "a"}, {Topic: topicOfOldIDs, Cluster: "b", Epoch: 1}, {Topic: topicOfOldIDs, Cluster: "a", Epoch: 2}, {Topic: topicOfOldIDs, Cluster: "d", Epoch: 3, SwitchID: "s1"}}
			for i := range entries {
				change := store.Change{Entries: []store.EntryChange{{Topic: topicOfOldIDs, After: &entries[i]}}}
				if i > 0 {
					change.Entries[0].Before = &entries[i-1]
				}
				if entries[i].SwitchID != "" { // what it says of both ends is of other epochs, and of a switch with messages
					change.Switch = &switching.Record{ID: "s1", Rev: 1, Topic: topicOfOldIDs, From: "a", To: "d", Epoch: 3, Mode: switching.ModePlanned,
						Receipt: &switching.Receipt{Tail: map[string]string{topicOfOldIDs: "1:1"}, First: map[string]string{topicOfOldIDs: "2:2"}}}
				}
				if err := st.Apply(t.Context(), change); err != nil {
					t.Fatal(err)
				}
			}
			gone := route.Entry{Topic: removed, Cluster: "b", Epoch: 1}
			for _, change := range []store.EntryChange{{Topic: removed, After: &gone}, {Topic: removed, Before: &gone}} {
				if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{change}}); err != nil {
					t.Fatal(err)
				}
			}
			c.Store = st
			o := newOldIDs(&c.failing, slog.New(slog.DiscardHandler), "a")
			defer o.close()
			o.translate = &fakeTranslator{}
			if c.topic == "" {
				c.topic = topicOfOldIDs
			}
			question := session.Translation{Topic: c.topic, Epoch: c.epoch, At: session.Position{Ledger: 7, Entry: 8}, Cluster: "d", Last: c.last}
			a := o.find(t.Context(), question)
			if a.Kind != c.want || a.Kind == session.TranslatedCopy && a.At.Ledger != 8 {
				t.Errorf("%+v, want kind %d", a, c.want)
			}
			if c.want == session.TranslatedFailed && !c.last {
				c.failing = failing{Store: st}
				if a := o.find(t.Context(), question); a.Kind != session.TranslatedCopy {
					t.Errorf("once the store answers: %+v", a)
				}
				c.failing = failing{Store: st, history: away, record: away, entry: away}
				if cluster, err := o.clusterOf(t.Context(), c.topic, c.epoch); err != nil || cluster == "" {
					t.Errorf("what is known needs no store: %q, %v", cluster, err)
				}
			}
		})
	}
}

// The receipt of a drain is for ids of the epoch that it ended, and of no earlier one.
func TestADrainSaysNothingOfEarlierMoves(t *testing.T) {
	st := store.NewMemory()
	first := route.Entry{Topic: topicOfOldIDs, Cluster: "b", Epoch: 1}
	second := route.Entry{Topic: topicOfOldIDs, Cluster: "c", Epoch: 2, SwitchID: "s1"}
	rec := switching.Record{ID: "s1", Rev: 1, Topic: topicOfOldIDs, From: "b", To: "c", Epoch: 2, Mode: switching.ModeDrain, Receipt: &switching.Receipt{
		Tail: map[string]string{topicOfOldIDs: "5:9"}, First: map[string]string{topicOfOldIDs: "7:-1"},
	}}
	for _, c := range []store.Change{
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, After: &first}}},
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, Before: &first, After: &second}}, Switch: &rec},
	} {
		if err := st.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	away := &failing{Store: st}
	o := newOldIDs(away, slog.New(slog.DiscardHandler), "a")
	defer o.close()
	f := &fakeTranslator{}
	o.translate = f
	o.remember(epochOf{topicOfOldIDs, 0}, owner{cluster: "a"})
	o.remember(epochOf{topicOfOldIDs, 1}, owner{cluster: "b"})
	ask := func(epoch uint64, partition string, last bool) session.Translated {
		return o.find(t.Context(), session.Translation{Topic: topicOfOldIDs + partition, Epoch: epoch, At: session.Position{Ledger: 5, Entry: 9}, Cluster: "c", Last: last})
	}
	if a := ask(0, "", false); a.Kind != session.TranslatedCopy || !slices.Equal(f.asked, []string{topicOfOldIDs + " a→c"}) {
		t.Errorf("an id of the cluster before: %+v, asked %v", a, f.asked)
	}
	want := session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: 7, Entry: 0}}
	if a := ask(1, "", false); a != want {
		t.Errorf("the last message of the old cluster became %+v, want the first of the new one, %+v", a, want)
	}
	f.last = pulsaradmin.Position{Ledger: 7, Entry: 0}
	if a := ask(1, "", true); a.Kind != session.TranslatedCopy || a.At != want.At {
		t.Errorf("the only message of the new cluster became %+v", a)
	}
	f.err = errors.New("cluster c does not answer")
	if a := ask(1, "", true); a.Kind != session.TranslatedFailed {
		t.Errorf("%+v", a)
	}
	f.err = nil
	if a := ask(1, "-partition-7", false); a.Kind != session.TranslatedFailed {
		t.Errorf("of a partition that the receipt does not have: %+v", a)
	}
	for _, half := range []func(*switching.Receipt){func(r *switching.Receipt) { r.Tail = nil }, func(r *switching.Receipt) { r.Tail, r.First = rec.Receipt.Tail, nil }} {
		next, err := st.Switch(t.Context(), "s1")
		if err != nil {
			t.Fatal(err)
		}
		receipt := *rec.Receipt
		half(&receipt)
		next.Rev, next.Receipt = next.Rev+1, &receipt
		if err := st.PutSwitch(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		if a := ask(1, "", false); a.Kind != session.TranslatedFailed {
			t.Errorf("with half a receipt: %+v", a)
		}
	}
	for _, s := range []failing{{Store: st, entry: store.ErrUnavailable}, {Store: st, record: store.ErrUnavailable}} {
		if *away = s; ask(1, "", false).Kind != session.TranslatedFailed {
			t.Errorf("nobody knows whether it was drained, and it is %+v", ask(1, "", false))
		}
	}
}

// A stop waits for no turn.
func TestAStopEndsWhatWaitsForATurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
		for range translateAtOnce {
			o.slots <- struct{}{}
		}
		answer := make(chan session.Translated, 1)
		o.tasks.Go(func() { answer <- o.inTurn(session.Translation{Topic: topicOfOldIDs}) })
		synctest.Wait()
		began := time.Now()
		o.close()
		select {
		case a := <-answer:
			if a.Kind != session.TranslatedBusy || time.Since(began) != 0 {
				t.Errorf("%+v after %v", a, time.Since(began))
			}
		default:
			t.Error("it was closed, and something is under way still")
		}
	})
}

// A cluster that does not answer is not asked: the copies on the other one have to do.
func TestADeadClusterIsNotAskedForItsMessages(t *testing.T) {
	a, b := testkit.NewCluster("a", testkit.Options{}), testkit.NewCluster("b", testkit.Options{LedgerBase: 500})
	defer b.Close()
	defer a.Close()
	clients := map[string]*pulsaradmin.Client{}
	for _, k := range []*testkit.Cluster{a, b} {
		k.CreateTopic(topicOfOldIDs, 0)
		clients[k.Name()] = pulsaradmin.New(pulsaradmin.Config{Cluster: k.Name(), WebURLs: []string{k.Web()}})
		defer clients[k.Name()].Close()
	}
	dead := ""
	tr := adminTranslator{clients: clients, down: func(cluster string) bool { return cluster == dead }, pairs: new(pulsaradmin.Translator)}
	a.Publish(topicOfOldIDs, "p", 1, []byte("x"))
	message := a.Messages(topicOfOldIDs)[0]
	at := session.Position{Ledger: message.Ledger, Entry: message.Entry}
	ask := func() (session.Translated, error) { return tr.Translate(t.Context(), topicOfOldIDs, "a", "b", at) }
	dead = "a"
	if _, err := ask(); err == nil || !strings.Contains(err.Error(), "cluster a is dead, and cluster b has no message") {
		t.Errorf("of a dead cluster: %v", err)
	}
	dead = ""
	r := testkit.Replicate(a, b, testkit.ReplicationOptions{})
	defer r.Close()
	awaitCluster(t, b, "the copy", func() bool { return len(b.Messages(topicOfOldIDs)) == 1 })
	if got, err := ask(); err != nil || got.Kind != session.TranslatedCopy || got.At.Ledger < 500 {
		t.Errorf("%+v, %v", got, err)
	}
	if last, err := tr.Last(t.Context(), topicOfOldIDs, "b"); err != nil || last.Ledger < 500 {
		t.Errorf("%v, %v", last, err)
	}
	if _, err := tr.Last(t.Context(), topicOfOldIDs+"-none", "b"); err == nil {
		t.Error("a topic that is not there has a last message")
	}
	if _, err := tr.Translate(t.Context(), topicOfOldIDs+"-none", "a", "b", at); err == nil {
		t.Error("a topic that is not there has messages")
	}
}

// A topic that left a cluster without its messages: who has had all of that goes on with what was published since, who has not is refused, and
// what was published since is the end of the topic for a reader that asks.
func TestAPositionOfADrainedClusterIsAPlaceOnTheNewOne(t *testing.T) {
	st := store.NewMemory()
	e := route.Entry{Topic: topicOfOldIDs, Cluster: "b", Epoch: 1, SwitchID: "s1"}
	const one, empty = topicOfOldIDs + "-partition-0", topicOfOldIDs + "-partition-1"
	rec := switching.Record{ID: "s1", Rev: 1, Topic: topicOfOldIDs, From: "a", To: "b", Epoch: 1, Mode: switching.ModeDrain, Receipt: &switching.Receipt{
		Tail: map[string]string{one: "5:9", empty: "-1:-1"}, First: map[string]string{one: "7:3", empty: "-1:-1"},
	}}
	if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: topicOfOldIDs, After: &e}}, Switch: &rec}); err != nil {
		t.Fatal(err)
	}
	o := newOldIDs(st, slog.New(slog.DiscardHandler), "a")
	defer o.close()
	f := &fakeTranslator{}
	o.translate = f
	at := func(topic string, ledger, entry uint64, last bool) session.Translated {
		return o.find(t.Context(), session.Translation{Topic: topic, Epoch: 0, At: session.Position{Ledger: ledger, Entry: entry}, Cluster: "b", Last: last})
	}
	if a := at(one, 5, 8, false); a.Kind != session.TranslatedGone || !strings.Contains(a.Text, "5:8 is on cluster a") {
		t.Errorf("what is on the old cluster alone became %+v", a)
	}
	want := session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: 7, Entry: 4}}
	if a := at(one, 5, 9, false); a != want {
		t.Errorf("the last message became %+v, want %+v", a, want)
	}
	if a := at(empty, 5, 0, false); a.Kind != session.TranslatedNext || a.At != (session.Position{Ledger: math.MaxUint64, Entry: math.MaxUint64}) {
		t.Errorf("on a partition that was empty on both clusters it became %+v", a)
	}
	for _, c := range []struct {
		last pulsaradmin.Position
		want session.TranslatedKind
	}{
		{pulsaradmin.Position{Ledger: 7, Entry: 3}, session.TranslatedUnknown},
		{pulsaradmin.Position{Ledger: 8, Entry: -1}, session.TranslatedUnknown},
		{pulsaradmin.Position{Ledger: 7, Entry: 4}, session.TranslatedCopy},
	} {
		f.last = c.last
		if a := at(one, 5, 9, true); a.Kind != c.want {
			t.Errorf("with %s as the last message of the new cluster: %+v", c.last, a)
		}
	}
	if !slices.Equal(f.asked, []string{one + " at b", one + " at b", one + " at b"}) {
		t.Errorf("asked %v", f.asked)
	}
	rec.Rev, rec.Receipt = 2, nil
	if err := st.PutSwitch(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if a := at(one, 5, 9, false); a.Kind != session.TranslatedFailed {
		t.Errorf("without a receipt: %+v", a)
	}
}

// A reader that had messages of the new cluster when the topic was taken back goes on behind the copy of the last one, as after any move: that the switch was to drain
// matters for ids of the old cluster only.
func TestAPositionOfADrainThatWasTakenBackIsTheCopyOfItsMessage(t *testing.T) {
	st := store.NewMemory()
	draining := route.Entry{Topic: topicOfOldIDs, Cluster: "b", Epoch: 1, SwitchID: "s1", Attempt: 1, State: route.StateDraining, Drain: route.Drain{From: "a", Subs: []route.DrainSub{{Name: "s"}}, Tails: []route.Tail{{Ledger: 5, Entry: 9}}}.String()}
	back := route.Entry{Topic: topicOfOldIDs, Cluster: "a", Epoch: 2, SwitchID: "s1", Attempt: 2}
	rec := switching.Record{ID: "s1", Rev: 1, Attempt: 1, Topic: topicOfOldIDs, From: "a", To: "b", Epoch: 1, Mode: switching.ModeDrain, State: switching.StateDraining, Receipt: &switching.Receipt{
		Tail: map[string]string{topicOfOldIDs: "5:9"}, First: map[string]string{topicOfOldIDs: "7:3"},
	}}
	returned := rec.Back()
	returned.State = switching.StateReturned
	for _, c := range []store.Change{
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, After: &draining}}, Switch: &rec},
		{Entries: []store.EntryChange{{Topic: topicOfOldIDs, Before: &draining, After: &back}}, Switch: &returned},
	} {
		if err := st.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	f := &fakeTranslator{}
	for epoch, want := range map[uint64]session.Translated{
		0: {Kind: session.TranslatedCopy, At: session.Position{Ledger: 7, Entry: 8}}, // of a, which has it again
		1: {Kind: session.TranslatedCopy, At: session.Position{Ledger: 8, Entry: 8}}, // the copy that was asked for
	} {
		o := newOldIDs(st, slog.New(slog.DiscardHandler), "a") // one that knows nothing of the other question
		defer o.close()
		o.translate = f
		if got := o.find(t.Context(), session.Translation{Topic: topicOfOldIDs, Epoch: epoch, At: session.Position{Ledger: 7, Entry: 8}, Cluster: "a"}); got != want {
			t.Errorf("a position of epoch %d became %+v, want %+v", epoch, got, want)
		}
	}
	if !slices.Equal(f.asked, []string{topicOfOldIDs + " b→a"}) {
		t.Errorf("asked %v", f.asked)
	}
}

func TestOnlyAnExactCopyIsShownUnderTheOldID(t *testing.T) {
	at, next := pulsaradmin.Position{Ledger: 4, Entry: 5}, pulsaradmin.Position{Ledger: 4, Entry: 6}
	for _, c := range []struct {
		t    pulsaradmin.Translation
		want session.Translated
	}{
		{pulsaradmin.Translation{At: at, Next: next, How: pulsaradmin.ByOrigin}, session.Translated{Kind: session.TranslatedCopy, At: session.Position{Ledger: 4, Entry: 5}}},
		{pulsaradmin.Translation{At: at, Next: next, How: pulsaradmin.ByTime}, session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: 4, Entry: 5}}},
		{pulsaradmin.Translation{At: pulsaradmin.NoPosition, Next: next, How: pulsaradmin.AtEnd}, session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: 4, Entry: 6}}},
	} {
		if got := translated(c.t); got != c.want {
			t.Errorf("%+v became %+v", c.t, got)
		}
	}
}

// slowTranslator takes a while for each answer.
type slowTranslator struct{ fakeTranslator }

func (f *slowTranslator) Translate(ctx context.Context, _, _, _ string, at session.Position) (session.Translated, error) {
	select {
	case <-time.After(300 * time.Millisecond):
		return session.Translated{Kind: session.TranslatedCopy, At: at}, nil
	case <-ctx.Done():
		return session.Translated{}, ctx.Err()
	}
}

// SW-03: many readers come back at a flip. They are served one after the other; who has to come again is told that nobody has looked, which does not count as a failure.
func TestManyReadersAreServedInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
		defer o.close()
		o.remember(epochOf{topicOfOldIDs, 0}, owner{cluster: "a"})
		o.translate = &slowTranslator{}
		for _, readers := range []int{160, 1000} {
			answers := make(chan session.TranslatedKind, readers)
			for range readers {
				o.tasks.Go(func() {
					answers <- o.inTurn(session.Translation{Topic: topicOfOldIDs, Cluster: "b"}).Kind
				})
			}
			o.tasks.Wait()
			close(answers)
			kinds := make(map[session.TranslatedKind]int)
			for k := range answers {
				kinds[k]++
			}
			if kinds[session.TranslatedCopy] < 160 || kinds[session.TranslatedCopy]+kinds[session.TranslatedBusy] != readers {
				t.Errorf("of %d readers so many were answered, by kind of the answer: %v; want 160 copies at least and otherwise %d (busy)", readers, kinds, session.TranslatedBusy)
			}
		}
	})
}

// loopsAsked notes what is posted to whom, and runs nothing.
type loopsAsked chan int

func (l loopsAsked) Loops() int { return 3 }

func (l loopsAsked) Post(loop int, _ func(time.Time, *session.Shard)) bool {
	l <- loop
	return true
}

func TestOldAcknowledgementsGoToTheOtherLoops(t *testing.T) {
	o := newOldIDs(store.NewMemory(), slog.New(slog.DiscardHandler), "a")
	defer o.close()
	posted := make(loopsAsked, 10)
	o.loops = posted
	o.request(1, session.Op{Kind: session.OpOldAcks, OldAcks: &session.OldAcks{}})
	if a, b := <-posted, <-posted; a != 0 || b != 2 || len(posted) > 0 {
		t.Errorf("posted to %d and %d, and %d more", a, b, len(posted))
	}
	// An answer goes to the loop that asked.
	o.request(1, session.Op{Kind: session.OpTranslate, Translation: &session.Translation{Topic: "no name"}})
	if loop := <-posted; loop != 1 {
		t.Errorf("answered to loop %d", loop)
	}
}
