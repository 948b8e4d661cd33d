package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// noLoops has no event loops.
type noLoops struct{}

func (noLoops) Loops() int { return 0 }

func (noLoops) Post(int, func(time.Time, *session.Shard)) bool { return false }

// keep runs the keeper of a store until the test ends, and returns when it has a map.
func keep(t *testing.T, st store.Store, loops poster) *mapKeeper {
	k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
	k.loops, k.self = loops, func() store.Proxy { return store.Proxy{} }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	<-k.loaded
	return k
}

// awaitChange waits until the table was replaced once more.
func awaitChange(t *testing.T, k *mapKeeper) {
	t.Helper()
	select {
	case <-k.changed:
	case <-time.After(10 * time.Second):
		t.Fatal("the change of the map did not arrive")
	}
}

// A topic whose bucket cannot be read when a proxy starts is refused, not sent to the default cluster; others are served; and
// when the bucket is mended its entry counts.
func TestABucketThatCannotBeReadAtTheStartHidesItsTopicsOnly(t *testing.T) {
	st := store.NewMemory()
	defer st.Close()
	topic, err := route.ParseTopic("persistent://acme/orders/created")
	if err != nil {
		t.Fatal(err)
	}
	other, err := route.ParseTopic("persistent://acme/orders/other")
	if err != nil {
		t.Fatal(err)
	}
	e := route.Entry{Topic: topic.Base(), Cluster: "b"}
	if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: e.Topic, After: &e}}}); err != nil {
		t.Fatal(err)
	}
	st.SetBad(route.Bucket(topic.Base()), errors.New("checksum does not match"))

	k := keep(t, st, noLoops{})
	if d := k.table.Load().Decide(topic, "a"); d.Source != route.SourceUnknown {
		t.Errorf("%s in an unreadable bucket: %+v, want SourceUnknown", topic, d)
	}
	if d := k.table.Load().Decide(other, "a"); d.Cluster != "a" {
		t.Errorf("%s: %+v, want the default", other, d)
	}
	if n := k.bad.Load(); n != 1 {
		t.Errorf("%d bad parts, want 1", n)
	}
	for len(k.changed) > 0 {
		<-k.changed
	}
	st.SetBad(route.Bucket(topic.Base()), nil)
	awaitChange(t, k)
	if d := k.table.Load().Decide(topic, "a"); d.Cluster != "b" {
		t.Errorf("after the bucket was mended: %+v, want b", d)
	}
}

// A part that could not be read at the start and turns out to be empty decides nothing: its topics go where the rules say.
func TestABucketThatIsMendedAndEmptyHidesItsTopicsNoMore(t *testing.T) {
	st := store.NewMemory()
	defer st.Close()
	topic, err := route.ParseTopic("persistent://acme/orders/created")
	if err != nil {
		t.Fatal(err)
	}
	st.SetBad(route.Bucket(topic.Base()), errors.New("checksum does not match"))
	k := keep(t, st, noLoops{})
	if d := k.table.Load().Decide(topic, "a"); d.Source != route.SourceUnknown {
		t.Fatalf("%s in an unreadable bucket: %+v, want SourceUnknown", topic, d)
	}
	for len(k.changed) > 0 {
		<-k.changed
	}
	st.SetBad(route.Bucket(topic.Base()), nil)
	awaitChange(t, k)
	if d := k.table.Load().Decide(topic, "a"); d.Cluster != "a" {
		t.Errorf("after the bucket was mended: %+v, want the default", d)
	}
}

// A bucket that cannot be read when a proxy starts leaves what its own disk has of it in force, and what came before the map was whole counts as it came last. Parts that are mended
// are bad no more.
func TestWhatCannotBeReadAtTheStartIsWhatTheDiskHas(t *testing.T) {
	st := store.NewMemory()
	defer st.Close()
	k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
	k.loops, k.self = noLoops{}, func() store.Proxy { return store.Proxy{} }
	topic, err := route.ParseTopic("persistent://acme/orders/created")
	if err != nil {
		t.Fatal(err)
	}
	e := route.Entry{Topic: topic.Base(), Cluster: "b"}
	own, another := route.Bucket(e.Topic), (route.Bucket(e.Topic)+1)%route.BucketCount
	onDisk, err := route.Empty().WithEntry(e.Topic, &e)
	if err != nil {
		t.Fatal(err)
	}
	k.table.Store(onDisk)
	k.known = store.Known{Map: "m", Versions: map[int]string{own: "1"}}
	bad := func(when string, want int64) {
		t.Helper()
		if n := k.bad.Load(); n != want {
			t.Errorf("%s: %d bad parts, want %d", when, n, want)
		}
	}
	wrong := errors.New("checksum does not match")
	k.update(t.Context(), store.Update{Map: "m", Bad: map[int]error{own: wrong, route.RulesBucket: wrong}, Buckets: map[int][]route.Entry{another: nil}, Versions: map[int]string{another: "1"}})
	k.update(t.Context(), store.Update{Buckets: map[int][]route.Entry{another: nil}, Synced: true})
	if d := k.table.Load().Decide(topic, "a"); d.Cluster != "b" {
		t.Errorf("a bucket that cannot be read: %+v, want what the disk has", d)
	}
	if known := k.served().known.Versions; known[own] != "1" || known[another] != "" {
		t.Errorf("versions %v, want that of the disk alone: the other bucket came again without one", known)
	}
	bad("at the start", 2)
	k.update(t.Context(), store.Update{Rules: &[]route.Rule{}})
	bad("after the rules were mended", 1)
	k.update(t.Context(), store.Update{Buckets: map[int][]route.Entry{own: {e}}})
	bad("after the bucket was mended", 0)
	k.tasks.Wait()
}

// countingLoops takes what is posted and never runs it.
type countingLoops struct{ posted atomic.Int64 }

func (*countingLoops) Loops() int { return 2 }

func (c *countingLoops) Post(int, func(time.Time, *session.Shard)) bool {
	c.posted.Add(1)
	return true
}

// Loops that have not started keep what is posted to them: a large map must not become as many functions.
func TestTheFirstMapIsOneMessageToEachLoop(t *testing.T) {
	st := store.NewMemory()
	defer st.Close()
	const topics = 1000
	for i := range topics {
		e := route.Entry{Topic: fmt.Sprintf("persistent://acme/orders/t%d", i), Cluster: "b"}
		if err := st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: e.Topic, After: &e}}}); err != nil {
			t.Fatal(err)
		}
	}
	loops := &countingLoops{}
	k := keep(t, st, loops)
	if n := k.table.Load().Len(); n != topics {
		t.Fatalf("%d entries in the table, want %d", n, topics)
	}
	if n := loops.posted.Load(); n != int64(loops.Loops()) {
		t.Errorf("%d functions were posted to %d loops, want one each", n, loops.Loops())
	}
}

// ackedStore tells of acks.
type ackedStore struct {
	*store.Memory
	acked chan string
}

func (s ackedStore) PutAck(ctx context.Context, id string, a switching.Ack) error {
	err := s.Memory.PutAck(ctx, id, a)
	s.acked <- id + " by " + a.Incarnation
	return err
}

// oneLoop is a loop that has ended: nothing is left on it.
type oneLoop struct{ noLoops }

func (oneLoop) Loops() int { return 1 }

// A switch in immediate mode that begins between the announcement of a process and its first map waits for that process, which finds the topic
// moved already. One that it does not find yet is not acknowledged before it comes.
func TestASwitchThatBeganBeforeTheFirstMapIsAcknowledged(t *testing.T) {
	st := ackedStore{store.NewMemory(), make(chan string, 10)}
	self := switching.Member{ID: "p", Incarnation: "i"}
	for _, r := range []switching.Record{
		{ID: "of-a-predecessor", Expect: []switching.Member{{ID: "p", Incarnation: "h"}}}, {ID: "of-others", Expect: []switching.Member{{ID: "q", Incarnation: "i"}}},
		{ID: "planned", Mode: switching.ModePlanned, Expect: []switching.Member{self}}, {ID: "not-here", Expect: []switching.Member{self}}, {ID: "mine", Expect: []switching.Member{self}},
	} {
		r.Rev, r.State, r.Topic, r.To = 1, switching.StateEvicting, "persistent://acme/orders/"+r.ID, "b"
		if r.Mode == "" {
			r.Mode = switching.ModeImmediate
		}
		err := st.PutSwitch(t.Context(), r)
		if e := (route.Entry{Topic: r.Topic, Cluster: "b", Epoch: 1, SwitchID: r.ID}); err == nil && r.ID != "not-here" {
			err = st.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: e.Topic, After: &e}}})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
	k.loops, k.self = oneLoop{}, func() store.Proxy { return store.Proxy{ID: "p", Incarnation: "i"} }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	if first := <-st.acked; first != "mine by i" {
		t.Errorf("acknowledged: %s", first)
	}
	select {
	case more := <-st.acked:
		t.Errorf("acknowledged as well: %s", more)
	case <-time.After(50 * time.Millisecond):
	}
}

// orderedStore tells in which order a proxy begins.
type orderedStore struct {
	*store.Memory
	calls chan string
}

func (s orderedStore) Register(ctx context.Context, p store.Proxy) error {
	s.note("Register")
	return s.Memory.Register(ctx, p)
}

func (s orderedStore) Watch(ctx context.Context, sink func(store.Update)) error {
	s.note("Watch")
	return s.Memory.Watch(ctx, sink)
}

func (s orderedStore) note(call string) {
	select {
	case s.calls <- call:
	default:
	}
}

// P1: the map that a proxy reads is of after its announcement, and before it serves it makes sure that this is so still.
func TestAProxyIsOnTheRosterBeforeItReadsTheMap(t *testing.T) {
	first := newRig(t, testkit.Options{}, nil)
	st := orderedStore{store.NewMemory(), make(chan string, 3)}
	r := &rig{world: &world{a: first.a, b: first.b}}
	r.run(t, st, r.config(nil))
	if a, b, c := <-st.calls, <-st.calls, <-st.calls; a != "Register" || b != "Watch" || c != "Register" {
		t.Errorf("it begins with %s, %s, %s", a, b, c)
	}
}
