package pulsaradmin

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/testkit"
)

const backTopic = "persistent://acme/plain/back"

// twoClusters are the fake clusters a and b with one topic, and a client for each.
func twoClusters(t *testing.T) (a, b *testkit.Cluster, toA, toB *Client) {
	t.Helper()
	open := func(name string, opts testkit.Options) (*testkit.Cluster, *Client) {
		k := testkit.NewCluster(name, opts)
		t.Cleanup(k.Close)
		k.CreateTopic(backTopic, 0)
		c := New(Config{Cluster: name, WebURLs: []string{k.Web()}})
		c.messageWait = CallTimeout
		t.Cleanup(c.Close)
		return k, c
	}
	a, toA = open("a", testkit.Options{EntriesPerLedger: 7})
	b, toB = open("b", testkit.Options{EntriesPerLedger: 5, LedgerBase: 500})
	return a, b, toA, toB
}

// nobodyPublishes waits until a cluster has seen the end of the connection that a copier published by.
func nobodyPublishes(t *testing.T, k *testkit.Cluster) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := k.Await(ctx, "the producer to be gone", func() bool {
		info, _ := k.Topic(backTopic)
		return len(info.Producers) == 0
	}); err != nil {
		t.Fatal(err)
	}
}

func publish(k *testkit.Cluster, from, n int) {
	for i := range n {
		k.Publish(backTopic, "app", uint64(from+i), fmt.Appendf(nil, "%s %d", k.Name(), from+i))
	}
}

// ends are the last positions of both clusters.
func ends(t *testing.T, a, b *Client) (behind, boundary Position) {
	t.Helper()
	return ok[Log](t)(a.Tail(t.Context(), backTopic)).Last, ok[Log](t)(b.Tail(t.Context(), backTopic)).Last
}

func copier(t *testing.T, from, to *Client, boundary, behind Position) *Copier {
	c := NewCopier(backTopic, from, to, boundary, behind)
	t.Cleanup(c.Close)
	return c
}

// payloads are what a topic has, in order.
func payloads(k *testkit.Cluster) (all []string) {
	for _, m := range k.Messages(backTopic) {
		all = append(all, string(m.Payload))
	}
	return all
}

func series(cluster string, from, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("%s %d", cluster, from+i))
	}
	return all
}

func TestWhatWasPublishedSinceIsCopiedOnceAndInOrder(t *testing.T) {
	a, b, toA, toB := twoClusters(t)
	publish(a, 0, 10)
	publish(b, 100, 3) // from before: it is not copied
	behind, boundary := ends(t, toA, toB)
	c := copier(t, toB, toA, boundary, behind)
	if n, err := c.Copy(t.Context(), 1<<40); n != 0 || err != nil || a.Count(codec.TypeProducer) != 0 {
		t.Fatalf("%d copied, %v; there is nothing yet", n, err)
	}
	publish(b, 10, 600) // more than a window
	if n := ok[int64](t)(c.Missing(t.Context())); n != 600 {
		t.Errorf("%d are missing, want 600", n)
	}
	for range 2 {
		if _, err := c.Copy(t.Context(), 1<<40); err != nil {
			t.Fatal(err)
		}
	}
	publish(b, 610, 5)
	if n, err := c.Copy(t.Context(), 1<<40); n != 5 || err != nil {
		t.Errorf("%d copied, %v; want the 5 new ones", n, err)
	}
	if got, want := payloads(a), slices.Concat(series("a", 0, 10), series("b", 10, 605)); !slices.Equal(got, want) {
		t.Errorf("cluster a has %d entries %.300q, want %d", len(got), got, len(want))
	}
	if n, err := c.Missing(t.Context()); n != 0 || err != nil {
		t.Errorf("%d are missing, %v", n, err)
	}
	for i, m := range a.Messages(backTopic)[10:] {
		source := b.Messages(backTopic)[3+i]
		if m.Producer != "app" || m.Sequence != source.Sequence || m.ReplicatedFrom != "b" || m.Metadata.GetProperties()[0].GetValue() != place(source).String() {
			t.Fatalf("copy %d: %+v of %+v", i, m, source)
		}
	}
	if info, _ := a.Topic(backTopic); len(info.Producers)+len(info.Subscriptions) != 0 {
		t.Errorf("left behind: %+v", info)
	}
}

// The successor of a leader that died in the middle repeats nothing, and has what that one sent settle first.
func TestASuccessorGoesOnBehindWhatIsCopied(t *testing.T) {
	a, b, toA, toB := twoClusters(t)
	publish(a, 0, 4)
	behind, boundary := ends(t, toA, toB)
	publish(b, 10, 20)
	died := 0
	remove := a.Handle(codec.TypeSend, func(conn *testkit.Conn, _ *pulsarpb.BaseCommand) bool {
		if died++; died >= 13 {
			conn.Close()
			return true
		}
		return false
	})
	first := copier(t, toB, toA, boundary, behind)
	if _, err := first.Copy(t.Context(), 1<<40); err == nil {
		t.Fatal("the copying went on without its connection")
	}
	remove()
	nobodyPublishes(t, a)
	publish(b, 30, 5)
	if n, err := copier(t, toB, toA, boundary, behind).Copy(t.Context(), 1<<40); n != 13 || err != nil {
		t.Errorf("%d copied, %v; want the 13 that are missing", n, err)
	}
	if got, want := payloads(a), slices.Concat(series("a", 0, 4), series("b", 10, 25)); !slices.Equal(got, want) {
		t.Errorf("cluster a has %q, want %q", got, want)
	}
	// The first one was only slow: it finds that all is there.
	if n, err := first.Copy(t.Context(), 1<<40); n != 0 || err != nil {
		t.Errorf("the first one copied %d, %v", n, err)
	}
}

// A copy that the broker refuses leaves a hole when those behind it were stored: it must never be taken for done.
func TestAHoleAmongTheCopiesIsFound(t *testing.T) {
	a, b, toA, toB := twoClusters(t)
	behind, boundary := ends(t, toA, toB)
	publish(b, 0, 10)
	n := 0
	remove := a.Handle(codec.TypeSend, func(conn *testkit.Conn, cmd *pulsarpb.BaseCommand) bool {
		if n++; n == 4 {
			conn.Hush()
			go func() {
				_ = a.Await(t.Context(), "those behind it to be stored", func() bool { return len(a.Messages(backTopic)) == 9 })
				conn.Speak()
			}()
			conn.Send(&pulsarpb.BaseCommand{Type: number(codec.TypeSendError), SendError: &pulsarpb.CommandSendError{
				ProducerId: cmd.Send.ProducerId, SequenceId: cmd.Send.SequenceId, Error: proto.Int32(int32(codec.ErrorNotAllowed)), Message: proto.String("too large")}})
			return true
		}
		return false
	})
	c := copier(t, toB, toA, boundary, behind)
	if _, err := c.Copy(t.Context(), 1<<40); err == nil || !strings.Contains(err.Error(), "too large") {
		t.Fatalf("error %v, want what the broker said", err)
	}
	remove()
	nobodyPublishes(t, a)
	for _, one := range []*Copier{c, copier(t, toB, toA, boundary, behind)} {
		if _, err := one.Copy(t.Context(), 1<<40); !errors.Is(err, ErrNoCopy) || !strings.Contains(err.Error(), "none of ") {
			t.Errorf("error %v, want the hole", err)
		}
		if n, err := one.Missing(t.Context()); !errors.Is(err, ErrNoCopy) {
			t.Errorf("%d are missing, %v", n, err)
		}
	}
}

func TestNothingIsCopiedBesideSomebodyElse(t *testing.T) {
	a, b, toA, toB := twoClusters(t)
	behind, boundary := ends(t, toA, toB)
	publish(b, 0, 3)
	w := ok[*wire](t)(toA.open(t.Context(), backTopic))
	defer w.close()
	app := ok[*solo](t)(w.produce(t.Context(), "app", nil))
	c := copier(t, toB, toA, boundary, behind)
	if _, err := c.Copy(t.Context(), 1<<40); err == nil || errors.Is(err, ErrNoCopy) || !strings.Contains(err.Error(), "somebody publishes on the topic there") {
		t.Errorf("error %v, want one that says who is in the way", err)
	}
	if info, _ := a.Topic(backTopic); len(info.Producers) != 1 {
		t.Errorf("producers %v: the client was disturbed", info.Producers)
	}
	if err := app.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	publish(a, 7, 1) // past the proxies
	if _, err := c.Copy(t.Context(), 1<<40); !errors.Is(err, ErrNoCopy) || !strings.Contains(err.Error(), `past the proxies (producer "app"`) {
		t.Errorf("error %v, want the stranger", err)
	}
}

// field is one field of a message's metadata.
type field struct {
	number protowire.Number
	bytes  []byte
}

func fields(t *testing.T, metadata []byte) (all []field) {
	t.Helper()
	for len(metadata) > 0 {
		num, typ, n := protowire.ConsumeTag(metadata)
		size := protowire.ConsumeFieldValue(num, typ, metadata[n:])
		if n < 0 || size < 0 {
			t.Fatalf("metadata %x", metadata)
		}
		all = append(all, field{num, metadata[:n+size]})
		metadata = metadata[n+size:]
	}
	return all
}

// Whatever a producer wrote is kept byte by byte, also what this program does not know; cut anywhere, it is refused and never panics.
func TestACopyKeepsWhatTheProducerWrote(t *testing.T) {
	var m []byte
	text := func(num protowire.Number, s string) {
		m = protowire.AppendBytes(protowire.AppendTag(m, num, protowire.BytesType), []byte(s))
	}
	varint := func(num protowire.Number, n uint64) {
		m = protowire.AppendVarint(protowire.AppendTag(m, num, protowire.VarintType), n)
	}
	text(1, "app")
	varint(2, 7)
	varint(3, 1795984289617)
	text(4, "\x0a\x01k\x12\x01v")
	text(6, "key")
	varint(8, 3)  // compression
	varint(9, 99) // size before
	varint(11, 10)
	text(13, "\x0a\x01x\x12\x02yz") // encryption key
	text(14, "AES")
	text(15, "nonce")
	text(16, "\x00\x00\x00\x00\x00\x00\x00\x01") // schema version
	varint(19, 1795984299617)                    // to be delivered later
	text(26, "uuid")
	varint(27, 4)
	varint(28, 4000)
	varint(29, 2) // chunk
	text(77, "of a later version")
	kept := len(fields(t, m))
	text(4, "\x0a\x1f"+sourceProperty+"\x12\x049:99") // an application's, copied from another message
	payload := []byte("\x00\x01whatever it is")
	sized := func(part []byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(part))), part...)
	}
	plain := append(sized(m), payload...)
	checked := slices.Concat([]byte{0x0e, 0x01, 1, 2, 3, 4}, plain)
	broker := slices.Concat([]byte{0x0e, 0x02}, sized([]byte("index")), checked)
	for _, body := range [][]byte{plain, checked, broker} {
		frame := ok[[]byte](t)(markedCopy(body, "b", pos("6:36")))
		if binary.BigEndian.Uint16(frame) != magicChecksum || binary.BigEndian.Uint32(frame[2:]) != crc32.Checksum(frame[6:], crc32.MakeTable(crc32.Castagnoli)) {
			t.Errorf("checksum of %x", frame)
		}
		got, rest, err := splitBody(frame)
		if err != nil || !bytes.Equal(rest, payload) {
			t.Errorf("payload %q, %v", rest, err)
		}
		all, was := fields(t, got), fields(t, m)
		for i := range kept {
			if !bytes.Equal(all[i].bytes, was[i].bytes) {
				t.Errorf("field %d: %x, was %x", was[i].number, all[i].bytes, was[i].bytes)
			}
		}
		if len(all) != kept+2 {
			t.Errorf("%d fields, want %d and the two that say where it comes from", len(all), kept)
		}
		e := ok[Entry](t)(messageEntry(pos("1:1"), frame))
		if e.From != "b" || e.Source != pos("6:36") || e.Messages != 10 || e.Producer != "app" || e.Chunk != 2 {
			t.Errorf("entry %+v", e)
		}
		for cut := range len(body) - len(payload) {
			if _, err := markedCopy(body[:cut], "b", pos("6:36")); err == nil {
				t.Errorf("cut after %d of %d bytes: taken", cut, len(body))
			}
		}
	}
	varint(22, 1)
	if _, err := markedCopy(append(sized(m), payload...), "b", pos("6:36")); !errors.Is(err, errTransaction) {
		t.Errorf("error %v, want that transactions are not copied", err)
	}
}

// When a topic is taken back, what was copied is not delivered on the other cluster any more; what was left there from before is, and so is what comes later.
func TestSubscriptionsPassOverWhatWasCopiedAndNothingElse(t *testing.T) {
	_, b, toA, toB := twoClusters(t)
	publish(b, 0, 12)
	b.Acknowledge(backTopic, "caught-up", func(int) bool { return true })
	b.Acknowledge(backTopic, "behind", func(n int) bool { return n < 9 })
	_, boundary := ends(t, toA, toB)
	publish(b, 12, 8)
	left := func() (caughtUp, behind int64) {
		info, _ := b.Topic(backTopic)
		return int64(info.Subscriptions["caught-up"].Backlog), int64(info.Subscriptions["behind"].Backlog)
	}
	if n, m := left(); n != 8 || m != 11 {
		t.Fatalf("%d and %d before", n, m)
	}
	for range 2 { // a second time by a successor
		if err := toB.PassOver(t.Context(), backTopic, boundary, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
		if n, m := left(); n != 0 || m != 11 {
			t.Errorf("%d and %d entries are left, want none and 11", n, m)
		}
	}
	publish(b, 20, 3)
	if n, m := left(); n != 3 || m != 14 {
		t.Errorf("%d and %d entries are left of what came later", n, m)
	}
	// Somebody who is frozen when he has read the end, and asks then whether the topic is still on the other cluster, comes too late for what is published meanwhile.
	moved := errors.New("it has moved on")
	if err := toB.PassOver(t.Context(), backTopic, boundary, func() error { publish(b, 23, 2); return moved }); !errors.Is(err, moved) {
		t.Errorf("error %v", err)
	}
	if n, _ := left(); n != 5 {
		t.Errorf("%d entries are left, want all 5", n)
	}
	if err := toB.PassOver(t.Context(), backTopic, boundary, func() error { publish(b, 25, 4); return nil }); err != nil {
		t.Error(err)
	}
	if n, _ := left(); n != 4 {
		t.Errorf("%d entries are left, want the 4 that came when the end was read", n)
	}
}
