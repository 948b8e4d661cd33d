package zk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestWrites(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a lost answer is looked up and not repeated":           testLostAnswer,
		"a change that no request can hold is refused":          testTooLarge,
		"the history is bounded and takes old switches with it": testHistoryBound,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

func testLostAnswer(t *testing.T, server *zktest.Server) {
	far, near, relay := pair(t, server, 30*time.Second)
	apply(t, far, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	const opMulti = 14
	multi := func(requests []byte) bool { // one, or another one before it that renews the lease
		for len(requests) >= 12 {
			if binary.BigEndian.Uint32(requests[8:]) == opMulti {
				return true
			}
			requests = requests[min(len(requests), 4+int(binary.BigEndian.Uint32(requests))):]
		}
		return false
	}
	// begin starts a write whose answer is kept back.
	begin := func(ctx context.Context, c store.Change) <-chan error {
		relay.HoldRepliesFrom(multi)
		result := make(chan error, 1)
		go func() { result <- far.Apply(ctx, c) }()
		return result
	}
	cut := func() {
		relay.Cut()
		relay.Release()
		relay.Restore()
	}
	isNow := func(want route.Entry) func() bool {
		return func() bool {
			e, _, err := near.Entry(within(t, 10*time.Second), want.Topic)
			return err == nil && e == want
		}
	}
	// Carried out: Apply looks and finds its own work.
	result := begin(within(t, 20*time.Second), storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 1), storetest.Entry(1, "b", 2)))
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "b", 2)))
	cut()
	if err := <-result; err != nil {
		t.Errorf("a change whose answer was lost: %v", err)
	}
	// Carried out with a switch, and changed by somebody else since: the switch proves it.
	c := storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", 2), storetest.Entry(1, "a", 3))
	c.Switch = &switching.Record{ID: "s-1", Rev: 1, Topic: storetest.Topic(1), Epoch: 3, Started: time.Unix(7, 0)}
	result = begin(within(t, 20*time.Second), c)
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "a", 3)))
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 3), storetest.Entry(1, "b", 4)))
	cut()
	if err := <-result; err != nil {
		t.Errorf("a switch whose answer was lost: %v", err)
	}
	// The same without one cannot be decided.
	result = begin(within(t, 20*time.Second), storetest.Set(storetest.Topic(1), storetest.Entry(1, "b", 4), storetest.Entry(1, "a", 5)))
	await(t, "the server to carry it out", isNow(*storetest.Entry(1, "a", 5)))
	apply(t, near, storetest.Set(storetest.Topic(1), storetest.Entry(1, "a", 5), storetest.Entry(1, "b", 6)))
	cut()
	if err := <-result; !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a change whose answer was lost and whose entry has changed since: %v, want ErrUnknown", err)
	}
	// A step of a planned switch: the flip, whose record has later revisions too.
	e := storetest.Entry(4, "a", 1)
	apply(t, near, storetest.Set(e.Topic, nil, e))
	fenced := *e
	fenced.State, fenced.SwitchID, fenced.Attempt = route.StateFenced, "s-4", 1
	c = storetest.Set(e.Topic, e, &fenced)
	c.Switch = &switching.Record{ID: "s-4", Rev: 1, State: switching.StateFenced}
	apply(t, near, c)
	flipped := storetest.Entry(4, "b", 2)
	flipped.SwitchID = "s-4"
	c = storetest.Set(e.Topic, &fenced, flipped)
	c.Switch = &switching.Record{ID: "s-4", Rev: 2, State: switching.StateEvicting}
	result = begin(within(t, 20*time.Second), c)
	await(t, "the server to carry it out", isNow(*flipped))
	cut()
	if err := <-result; err != nil {
		t.Errorf("a flip whose answer was lost: %v", err)
	}
	relay.HoldRepliesFrom(multi)
	put := make(chan error, 1)
	go func() {
		put <- far.PutSwitch(within(t, 20*time.Second), switching.Record{ID: "s-4", Rev: 3, State: switching.StateDone})
	}()
	await(t, "the server to write the record", func() bool {
		r, err := near.Switch(within(t, 10*time.Second), "s-4")
		return err == nil && r.Rev == 3
	})
	cut()
	if err := <-put; err != nil {
		t.Errorf("a record whose answer was lost: %v", err)
	}
	// Its caller goes away before the answer comes.
	ctx, cancel := context.WithCancel(context.Background())
	result = begin(ctx, storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "a", 1)))
	await(t, "the server to carry it out", isNow(*storetest.Entry(2, "a", 1)))
	cancel()
	err := <-result
	if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, store.ErrUnknown) {
		t.Errorf("a write without an answer: %v, want ErrUnavailable and ErrUnknown", err)
	}
	cut()

	// The same before anything was written: the outcome is known.
	await(t, "the connection", func() bool { return far.Status().Connected })
	relay.HoldReplies()
	ctx, cancel = context.WithTimeout(context.Background(), 300*time.Millisecond)
	err = far.Apply(ctx, storetest.Set(storetest.Topic(3), nil, storetest.Entry(3, "a", 1)))
	cancel()
	if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUnknown) {
		t.Errorf("a read that was not answered: %v, want ErrUnavailable and not ErrUnknown, as nothing was written", err)
	}
	relay.Release()

	// Under connections that break at any moment, each success is exactly one change in the history.
	var before *route.Entry
	for epoch := uint64(1); epoch <= 20; epoch++ {
		after := storetest.Entry(7, "a", epoch)
		result := make(chan error, 1)
		go func() { result <- far.Apply(within(t, 20*time.Second), storetest.Set(after.Topic, before, after)) }()
		if epoch%2 == 0 {
			relay.HoldReplies()
			<-time.After(time.Duration(epoch) * time.Millisecond)
			cut()
		}
		if err := <-result; err != nil {
			t.Fatalf("epoch %d: %v", epoch, err)
		}
		before = after
	}
	history, err := near.History(within(t, 10*time.Second), 100)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]int{}
	for _, h := range history {
		if h.Entries[0].Topic == storetest.Topic(7) {
			seen[h.Entries[0].After.Epoch]++
		}
	}
	for epoch := uint64(1); epoch <= 20; epoch++ {
		if seen[epoch] != 1 {
			t.Errorf("epoch %d is %d times in the history", epoch, seen[epoch])
		}
	}
}

func testTooLarge(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	noise := func(n int) string {
		var b strings.Builder
		for x := uint64(n)*2654435761 + 12345; b.Len() < 9000; {
			x = x*6364136223846793005 + 1442695040888963407
			fmt.Fprintf(&b, "%x", x)
		}
		return "persistent://t/n/" + b.String()
	}
	var c store.Change
	for n := range store.MaxChange {
		topic := noise(n)
		c.Entries = append(c.Entries, store.EntryChange{Topic: topic, After: &route.Entry{Topic: topic, Cluster: "a"}})
	}
	if err := s.Apply(within(t, 10*time.Second), c); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("a write of more than a megabyte: %v, want ErrTooLarge", err)
	}
	half := store.Change{Entries: c.Entries[:len(c.Entries)/2]}
	if err := s.Apply(within(t, 10*time.Second), half); err != nil {
		t.Errorf("half of it: %v", err)
	}
	// One bucket over its limit.
	var full []route.Entry
	index := route.Bucket(noise(0))
	for n := range 70 {
		base := noise(n)
		topic := base
		for k := 0; route.Bucket(topic) != index; k++ {
			topic = fmt.Sprint(base, "-", k)
		}
		full = append(full, route.Entry{Topic: topic, Cluster: "a"})
	}
	for _, e := range full[1:] {
		err := s.Apply(within(t, 10*time.Second), storetest.Set(e.Topic, nil, &e))
		if err != nil {
			if !strings.Contains(err.Error(), fmt.Sprint(store.MaxBucketBytes)) {
				t.Errorf("a bucket over its limit: %v, want an error that names the limit", err)
			}
			return
		}
	}
	t.Error("a bucket grew over its limit")
}

func testHistoryBound(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	for id, state := range map[string]switching.State{"running": switching.StateFenced, "over": switching.StateAborted} {
		if err := s.PutSwitch(within(t, 10*time.Second), switching.Record{ID: id, Rev: 1, State: state}); err != nil {
			t.Fatal(err)
		}
	}
	var before *route.Entry
	for n := 1; n <= keptSegments+3; n++ {
		for range 2 {
			after := storetest.Entry(1, "a", uint64(2*n))
			if before != nil {
				after.Epoch = before.Epoch + 1
			}
			c := storetest.Set(after.Topic, before, after)
			if after.Epoch%2 == 0 {
				c.Switch = &switching.Record{ID: fmt.Sprint("s-", n), Rev: 1, Topic: after.Topic, State: switching.StateDone}
			}
			apply(t, s, c)
			if c.Switch != nil {
				if err := s.PutAck(within(t, 10*time.Second), c.Switch.ID, switching.Ack{Proxy: "p", Incarnation: "i"}); err != nil {
					t.Fatal(err)
				}
			}
			before = after
		}
		segment, stat, err := s.head(within(t, 10*time.Second))
		if err != nil || segment != int64(n) {
			t.Fatalf("segment %d, want %d (%v)", segment, n, err)
		}
		if err := s.rollHistory(within(t, 30*time.Second), &found{segment: segment, headStat: stat}); err != nil {
			t.Fatal(err)
		}
	}
	segments, err := s.segments(within(t, 10*time.Second))
	if err != nil || len(segments) != keptSegments+1 || segments[0] != 1 { // the first one has a switch that runs
		t.Errorf("the segments %v are kept, want the newest %d and the first (%v)", segments, keptSegments, err)
	}
	history, err := s.History(within(t, 30*time.Second), 10_000)
	if err != nil || len(history) != 2*(keptSegments-1) { // the newest is empty
		t.Errorf("%d changes are kept, want %d (%v)", len(history), 2*(keptSegments-1), err)
	}
	for i := range history[1:] {
		if history[i+1].Seq >= history[i].Seq || history[i+1].Entries[0].After.Epoch >= history[i].Entries[0].After.Epoch {
			t.Errorf("change %d is out of order", i)
		}
	}
	if _, err := s.Switch(within(t, 10*time.Second), "s-1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the switch of a change that is forgotten: %v, want ErrNotFound", err)
	}
	if _, err := s.Switch(within(t, 10*time.Second), "over"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a switch that is over and forgotten: %v, want ErrNotFound", err)
	}
	list, err := s.Switches(within(t, 30*time.Second), 10_000)
	if err != nil || len(list) != keptSegments || list[len(list)-1].ID != "running" {
		t.Errorf("%d switches are kept, want %d, the last of them the one that runs (%v)", len(list), keptSegments, err)
	}
	// When it is over it goes with the next roll, and so does its segment.
	if err := s.PutSwitch(within(t, 10*time.Second), switching.Record{ID: "running", Rev: 2, State: switching.StateDone}); err != nil {
		t.Fatal(err)
	}
	segment, stat, err := s.head(within(t, 10*time.Second))
	if err == nil {
		err = s.rollHistory(within(t, 30*time.Second), &found{segment: segment, headStat: stat})
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Switch(within(t, 10*time.Second), "running"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the switch that was running: %v, want ErrNotFound", err)
	}
	if segments, err = s.segments(within(t, 10*time.Second)); err != nil || len(segments) != keptSegments || segments[0] == 1 {
		t.Errorf("the segments %v are kept, want the newest %d (%v)", segments, keptSegments, err)
	}
}
