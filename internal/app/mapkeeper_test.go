package app

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/store"
)

// noLoops has no event loops.
type noLoops struct{}

func (noLoops) Loops() int { return 0 }

func (noLoops) Post(int, func(time.Time, *session.Shard)) bool { return false }

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

	k := newMapKeeper(st, slog.New(slog.DiscardHandler), nil)
	k.loops, k.self = noLoops{}, func() store.Proxy { return store.Proxy{} }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	<-k.loaded
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
	select {
	case <-k.changed:
	case <-time.After(10 * time.Second):
		t.Fatal("the mended bucket did not arrive")
	}
	if d := k.table.Load().Decide(topic, "a"); d.Cluster != "b" {
		t.Errorf("after the bucket was mended: %+v, want b", d)
	}
}
