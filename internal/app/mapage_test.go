package app

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// cutOff is what a Memory does for a process that reaches no server and hears of nothing.
var cutOff = store.Faults{Err: store.ErrUnavailable, NoLease: true, HoldWatches: true}

// aging starts a proxy that holds its publishes after half a second without contact.
func aging(t *testing.T, dir string) *rig {
	return newRig(t, testkit.Options{}, func(c *config.Config) {
		c.Store.MaxMapAge, c.StateDir = config.Duration(500*time.Millisecond), dir
	})
}

func (r *rig) awaitAged(t *testing.T) {
	t.Helper()
	r.await(t, "a map that is too old", func() bool {
		ok, reasons := r.app.Ready()
		return !ok && len(reasons) == 1 && strings.Contains(reasons[0], "longer than store.max_map_age (500ms)")
	})
	// It is said, and the loops are told, a moment later.
	r.await(t, "line that says so", func() bool { return len(r.log.with("takes no publishes until there is")) == 1 })
	if _, err := r.app.Handles(t.Context(), ""); err != nil { // asks every loop
		t.Fatal(err)
	}
}

// P8, SW-05: a proxy without contact for longer than max_map_age takes no publishes of any topic, and says so; consumers go on. With contact it goes on by
// itself: nothing is lost, and the order kept. What has moved meanwhile goes to its new cluster.
func TestAProxyWithoutContactForTooLongTakesNoPublishes(t *testing.T) {
	const stays, moves = "persistent://public/default/stays", "persistent://public/default/moves"
	r := aging(t, t.TempDir())
	st := r.app.store.(*store.Memory)
	if p := r.app.Info(); p.MaxMapAgeMillis != 500 {
		t.Errorf("it promises %d ms", p.MaxMapAgeMillis)
	}
	p, q := follow(t, r.app.PulsarAddr(), stays, "p", 0), follow(t, r.app.PulsarAddr(), moves, "q", 0)
	c := followAs(t, r.app.PulsarAddr(), stays, "s", 0)
	p.mustSend(2)
	q.mustSend(1)
	c.mustReceive(2)
	st.SetFaults(cutOff)
	r.awaitAged(t)
	if r.metric(t, "pointsman_map_too_old") != 1 {
		t.Error("the metric does not say so")
	}
	receipts := make(chan bool, 3)
	dropped := r.metric(t, "pointsman_fence_dropped_sends_total")
	for _, f := range []*follower{p, q} {
		go func() { receipts <- f.trySend([]byte("held")) }()
	}
	late := follow(t, r.app.PulsarAddr(), stays, "late", 0)
	go func() { receipts <- late.trySend([]byte("late")) }()
	r.await(t, "two dropped SENDs and a PRODUCER that waits", func() bool {
		return r.metric(t, "pointsman_fence_dropped_sends_total") == dropped+2 && r.metric(t, "pointsman_parked_requests") == 1
	})
	select {
	case <-receipts:
		t.Error("a publish has a receipt, and the map is too old")
	default:
	}
	consumer := followAs(t, r.app.PulsarAddr(), stays, "s2", 0)
	consumer.mustReceive(2)
	if n := len(r.a.Messages(stays)); n != 2 {
		t.Errorf("%d messages are on a, want 2", n)
	}
	other := st.Join()
	if err := other.Apply(t.Context(), store.Change{Entries: []store.EntryChange{{Topic: moves, After: &route.Entry{Topic: moves, Cluster: "b", Epoch: 1}}}}); err != nil {
		t.Fatal(err)
	}
	st.SetFaults(store.Faults{})
	for range 3 {
		select {
		case ok := <-receipts:
			if !ok {
				t.Error("a publish that was held has no receipt")
			}
		case <-time.After(patience):
			t.Fatal("a publish that was held has no receipt, and there is contact")
		}
	}
	p.mustSend(1)
	if a, b := payloads(r.a, stays), payloads(r.b, moves); len(a) != 5 || !inOrder(a, "0", "1", "held", "0") || len(b) != 1 || b[0] != "held" || len(payloads(r.a, moves)) != 1 {
		t.Errorf("on a: %q and %q, on b: %q", a, payloads(r.a, moves), b)
	}
	r.await(t, "readiness", func() bool { ok, _ := r.app.Ready(); return ok })
	r.await(t, "line that says that it is over", func() bool { return len(r.log.with("publishes go on")) == 1 })
	if r.metric(t, "pointsman_map_too_old") != 0 {
		t.Error("the metric does not say that it is over")
	}
}

func payloads(c *testkit.Cluster, topic string) (all []string) {
	for _, m := range c.Messages(topic) {
		all = append(all, string(m.Payload))
	}
	return all
}

// inOrder tells whether want is a subsequence of all.
func inOrder(all []string, want ...string) bool {
	for _, one := range all {
		if len(want) > 0 && one == want[0] {
			want = want[1:]
		}
	}
	return len(want) == 0
}

// P8: a proxy that restarts while the store is away keeps the promise of the process before, by the contact that it had; whatever its own
// configuration says, until the roster has that. Consumers are served from the copy.
func TestAProxyThatRestartsWithoutContactKeepsThePromise(t *testing.T) {
	const topic = "persistent://public/default/t"
	dir := t.TempDir()
	r := aging(t, dir)
	st := r.app.store.(*store.Memory)
	r.await(t, "copy of the map", func() bool { _, err := os.Stat(filepath.Join(dir, "last-good-map")); return err == nil })
	f := follow(t, r.app.PulsarAddr(), topic, "p", 0)
	f.mustSend(1)
	crashed := t.TempDir()
	for _, name := range []string{"last-good-map", "tag-key", "promised-map-age"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(crashed, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	away := st.Join()
	away.SetFaults(cutOff)
	late := &rig{world: &world{a: r.a, b: r.b}}
	late.cfg = late.config(func(c *config.Config) { c.StateDir = crashed }) // no max_map_age any more
	late.launch(t, away, late.cfg)
	late.awaitAged(t)
	followAs(t, late.app.PulsarAddr(), topic, "s", 0).mustReceive(1)
	g := follow(t, late.app.PulsarAddr(), topic, "q", 0)
	received := make(chan bool, 1)
	go func() { received <- g.trySend([]byte("held")) }()
	late.await(t, "a PRODUCER that waits", func() bool { return late.metric(t, "pointsman_parked_requests") == 1 })
	away.SetFaults(store.Faults{})
	if ok := <-received; !ok {
		t.Error("the publish has no receipt, and there is contact")
	}
	late.await(t, "the end of the promise", func() bool {
		_, err := os.Stat(filepath.Join(crashed, "promised-map-age"))
		return os.IsNotExist(err)
	})
	away.SetFaults(cutOff)
	g.mustSend(1) // without a promise that goes on without limit
}

// ageStore is the contact of a mapAge under test.
type ageStore struct {
	store.Store
	contact atomic.Int64
}

func (s *ageStore) Confirmed() time.Duration { return time.Duration(s.contact.Load()) }

// P8: which promise holds, and since when.
func TestWhichPromiseHoldsAndSinceWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		now := 1000 * time.Hour
		st := &ageStore{}
		loop := slowLoop{posts: make(chan func(time.Time, *session.Shard), 100)}
		begin := func(limit time.Duration) *mapAge {
			t.Helper()
			a, err := newMapAge(st, slog.New(slog.DiscardHandler), limit, dir)
			if err != nil {
				t.Fatal(err)
			}
			a.clock, a.loops = func() time.Duration { return now }, loop
			return a
		}
		expect := func(what string, a *mapAge, old bool) {
			t.Helper()
			if a.tooOld() != old {
				t.Errorf("%s: too old is %v", what, !old)
			}
		}
		contact := func(ago time.Duration) { st.contact.Store(int64(now - ago)) }
		age := begin(time.Minute)
		expect("never any contact", age, true)
		contact(time.Minute)
		expect("at the limit", age, false)
		contact(time.Minute + 1)
		expect("above it", age, true)
		contact(0)
		age.registered()
		if err := age.save(time.Minute); err != nil {
			t.Fatal(err)
		}

		st.contact.Store(0)
		now += 50 * time.Second
		longer := begin(time.Hour)
		expect("the process before had contact in time", longer, false)
		now += 11 * time.Second
		expect("and promised a minute", longer, true)
		contact(30 * time.Minute)
		expect("a longer promise that the roster does not have", longer, true)
		longer.registered()
		expect("and has", longer, false)

		off := begin(0)
		now += 2 * time.Hour
		contact(61 * time.Minute)
		expect("no promise, but the roster has one still", off, true)
		contact(59 * time.Minute)
		expect("of an hour", off, false)
		contact(61 * time.Minute)
		off.registered()
		expect("and has it no more", off, false)
		expect("nothing was ever promised", begin(0), false)

		shorter := begin(time.Minute)
		contact(61 * time.Second)
		expect("a shorter promise counts at once", shorter, true)

		saved, err := shorter.load()
		if err != nil {
			t.Fatal(err)
		}
		saved.Boot, saved.Contact = "another start of the machine", now
		st.contact.Store(0)
		raw, err := json.Marshal(saved)
		if err == nil {
			err = os.WriteFile(shorter.path, raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		expect("the machine was started since", begin(time.Minute), true)
		if err := os.WriteFile(shorter.path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		broken := begin(time.Minute)
		contact(time.Second)
		expect("nobody knows what was promised", broken, true)
		broken.registered()
		expect("until the roster has the new one", broken, false)
	})
}
