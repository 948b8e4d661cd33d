package testkit

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// refusable is a command per response type, and how its refusal is read.
func refusable() map[codec.Type]struct {
	cmd  *pulsarpb.BaseCommand
	code func(*pulsarpb.BaseCommand) (request uint64, code int32)
} {
	type row = struct {
		cmd  *pulsarpb.BaseCommand
		code func(*pulsarpb.BaseCommand) (uint64, int32)
	}
	plain := func(c *pulsarpb.BaseCommand) (uint64, int32) {
		return c.GetError().GetRequestId(), c.GetError().GetError()
	}
	return map[codec.Type]row{
		codec.TypeLookup: {lookup(topicT, 5), func(c *pulsarpb.BaseCommand) (uint64, int32) {
			return c.GetLookupTopicResponse().GetRequestId(), c.GetLookupTopicResponse().GetError()
		}},
		codec.TypePartitionedMetadata: {&pulsarpb.BaseCommand{Type: typeOf(codec.TypePartitionedMetadata),
			PartitionMetadata: &pulsarpb.CommandPartitionedTopicMetadata{Topic: ptr(topicT), RequestId: ptr(uint64(5))}},
			func(c *pulsarpb.BaseCommand) (uint64, int32) {
				return c.GetPartitionMetadataResponse().GetRequestId(), c.GetPartitionMetadataResponse().GetError()
			}},
		codec.TypeGetSchema: {&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetSchema),
			GetSchema: &pulsarpb.CommandGetSchema{Topic: ptr(topicT), RequestId: ptr(uint64(5))}},
			func(c *pulsarpb.BaseCommand) (uint64, int32) {
				return c.GetGetSchemaResponse().GetRequestId(), c.GetGetSchemaResponse().GetErrorCode()
			}},
		codec.TypeProducer: {func() *pulsarpb.BaseCommand {
			cmd := producerCommand(topicT, "p", 1)
			cmd.Producer.RequestId = ptr(uint64(5))
			return cmd
		}(), plain},
		codec.TypeGetTopicsOfNamespace: {&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetTopicsOfNamespace),
			GetTopicsOfNamespace: &pulsarpb.CommandGetTopicsOfNamespace{RequestId: ptr(uint64(5)), Namespace: ptr("t/n")}}, plain},
		codec.TypeAck: {ackCommand(1, 0, &pulsarpb.MessageIdData{LedgerId: ptr(uint64(1)), EntryId: ptr(uint64(1))}),
			func(c *pulsarpb.BaseCommand) (uint64, int32) {
				return c.GetAckResponse().GetRequestId() - 2, c.GetAckResponse().GetError() // its own request id is 7
			}},
	}
}

func TestARefusalHasTheResponseTypeOfItsCommand(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	for typ, row := range refusable() {
		remove := c.Handle(typ, Refuse(codec.ErrorTooManyRequests, "not now"))
		r.send(row.cmd)
		if id, code := row.code(r.read()); id != 5 || codec.ServerError(code) != codec.ErrorTooManyRequests {
			t.Errorf("%v: request %d, code %d", typ, id, code)
		}
		remove()
	}
}

func TestARefusedConnectIsAnErrorAndTheEnd(t *testing.T) {
	c := start(t, Options{})
	defer c.Handle(codec.TypeConnect, Times(1, Refuse(codec.ErrorAuthentication, "who are you?")))()
	r := dial(t, c.Broker(0))
	r.send(connectCommand())
	if got := r.readType(codec.TypeError).GetError(); codec.ServerError(got.GetError()) != codec.ErrorAuthentication || got.GetRequestId() != codec.NoRequest {
		t.Fatalf("answer %v", got)
	}
	r.ended()
	connect(t, c.Broker(0)) // the second is not refused
}

func TestHooksAreAskedNewestFirstAndCanBeRemoved(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	var mu sync.Mutex
	var asked []string
	note := func(name string, handled bool) Hook {
		return func(c *Conn, cmd *pulsarpb.BaseCommand) bool {
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, name)
			return handled
		}
	}
	c.Handle(codec.TypeLookup, note("old", false))
	remove := c.Handle(codec.TypeLookup, note("new", false))
	r.send(lookup(topicT, 1))
	r.readType(codec.TypeLookupResponse)
	remove()
	c.Handle(codec.TypeLookup, ForTopic("persistent://t/n/other", Drop))
	r.send(lookup(topicT, 2))
	r.readType(codec.TypeLookupResponse)
	mu.Lock()
	got := strings.Join(asked, " ")
	mu.Unlock()
	if got != "new old old" {
		t.Fatalf("asked %q", got)
	}
	r.send(lookup("persistent://t/n/other", 3))
	r.send(lookup(topicT, 4))
	if got := r.readType(codec.TypeLookupResponse).GetLookupTopicResponse().GetRequestId(); got != 4 {
		t.Fatalf("answer to %d, want 4: the third was to be dropped", got)
	}
	if n := c.Count(codec.TypeLookup); n != 4 {
		t.Errorf("%d lookups counted, want 4", n)
	}
}

func TestACommandCanBeHeldAndTheOnesBehindItWait(t *testing.T) {
	c := start(t, Options{})
	r, other := connect(t, c.Broker(0)), connect(t, c.Broker(0))
	release := make(chan struct{})
	c.Handle(codec.TypeLookup, ForTopic(topicT, Hold(release)))
	r.send(lookup(topicT, 1))
	r.send(lookup("persistent://t/n/y", 2))
	await(t, c, "the lookup is seen", func() bool { return c.Count(codec.TypeLookup) == 1 })
	other.send(lookup("persistent://t/n/y", 3))
	other.readType(codec.TypeLookupResponse)
	r.mute()
	close(release)
	for want := uint64(1); want <= 2; want++ {
		if got := r.readType(codec.TypeLookupResponse).GetLookupTopicResponse().GetRequestId(); got != want {
			t.Fatalf("answer to %d, want %d", got, want)
		}
	}
}

func TestADelayedCommandDoesNotHoldUpClose(t *testing.T) {
	c := NewCluster("a", Options{})
	r := connect(t, c.Broker(0))
	c.Handle(codec.TypeLookup, Delay(time.Hour))
	r.send(lookup(topicT, 1))
	await(t, c, "the lookup is seen", func() bool { return c.Count(codec.TypeLookup) == 1 })
	c.Close()
	r.ended()
}

func TestAConnectionCanEndInsideAFrame(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	c.Handle(codec.TypeLookup, HangUpInsideFrame)
	r.send(lookup(topicT, 1))
	if _, _, err := r.frame(); err == nil || !strings.Contains(err.Error(), "unexpected EOF") {
		t.Fatalf("error %v, want an end inside a frame", err)
	}
}

// CN-03: the broker accepts TCP but says nothing; it recovers without a restart.
func TestAFrozenBrokerAcceptsButSaysNothing(t *testing.T) {
	c := start(t, Options{Brokers: 2})
	old := connect(t, c.Broker(0))
	c.Broker(0).Freeze()
	fresh := dial(t, c.Broker(0))
	fresh.send(connectCommand())
	old.send(lookup(topicT, 1))
	fresh.mute()
	old.mute()
	connect(t, c.Broker(1))
	c.Broker(0).Thaw()
	fresh.readType(codec.TypeConnected)
	old.readType(codec.TypeLookupResponse)
}

func TestAFrozenBrokerCanBeClosed(t *testing.T) {
	c := NewCluster("a", Options{})
	r := connect(t, c.Broker(0))
	c.Broker(0).Freeze()
	r.send(lookup(topicT, 1))
	c.Close()
	r.ended()
}

func TestADeafBrokerStillWrites(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(subscribeCommand(topicT, "s", Shared, 1))
	r.readType(codec.TypeSuccess)
	r.send(flow(1, 10))
	await(t, c, "permits", func() bool { return c.Count(codec.TypeFlow) == 1 })
	c.Broker(0).StopReading()
	r.send(lookup(topicT, 1))
	r.mute()
	c.Publish(topicT, "p", 0, []byte("x"))
	r.readType(codec.TypeMessage)
	c.Broker(0).Thaw()
	r.readType(codec.TypeLookupResponse)
}

// ME-02: a peer that is not read from is slowed down by TCP.
func TestADeafConnectionSlowsItsSender(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	c.Handle(codec.TypeProducer, Times(1, GoDeaf))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess) // a deaf connection still answers what it has read
	r.write(sendFrame(1, 0, nil))
	r.nc.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
	var sent int
	for src := sendFrame(1, 0, make([]byte, 1<<20)); sent < 1<<30; sent++ {
		if _, err := r.nc.Write(src); err != nil {
			if ne, ok := err.(net.Error); !ok || !ne.Timeout() {
				t.Fatal(err)
			}
			break
		}
	}
	if sent > 64 {
		t.Fatalf("%d MiB were taken by a connection that does not read", sent)
	}
	c.Conn(c.Conns()[0].ID).ResumeReading()
	r.readType(codec.TypeSendReceipt)
}

// CN-04, LK-09: a broker dies and comes back on its port.
func TestAStoppedBrokerResetsRefusesAndComesBack(t *testing.T) {
	c := start(t, Options{})
	b := c.Broker(0)
	r := connect(t, b)
	b.Stop()
	if _, _, err := r.frame(); err == nil {
		t.Fatal("the connection is still open")
	}
	if nc, err := net.Dial("tcp", b.Addr()); err == nil {
		nc.Close()
		t.Fatal("a stopped broker accepts")
	}
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	connect(t, b)
}

func TestConnectionsAreToldApartByTheirUse(t *testing.T) {
	c := start(t, Options{})
	dial(t, c.Broker(0))
	await(t, c, "the silent one", func() bool { return c.Accepted() == 1 })
	connect(t, c.Broker(0))
	asks := connect(t, c.Broker(0))
	asks.send(lookup(topicT, 1))
	asks.readType(codec.TypeLookupResponse)
	data := connect(t, c.Broker(0))
	data.send(producerCommand(topicT, "p", 1))
	data.readType(codec.TypeProducerSuccess)
	var kinds []string
	for _, info := range c.Conns() {
		kinds = append(kinds, string(info.Kind))
	}
	if got := strings.Join(kinds, " "); got != "silent idle lookup data" {
		t.Fatalf("kinds %q", got)
	}
	data.nc.Close()
	await(t, c, "the producer has left", func() bool {
		info, _ := c.Topic(topicT)
		return len(info.Producers) == 0 && len(c.Conns()) == 3
	})
}

func TestTheLogKeepsTheNewestCommands(t *testing.T) {
	c := start(t, Options{LogSize: 3})
	r := connect(t, c.Broker(0))
	for i := range uint64(5) {
		r.send(lookup(topicT, i))
		r.readType(codec.TypeLookupResponse)
	}
	seen := c.Commands(codec.TypeLookup)
	if len(seen) != 3 || seen[0].Cmd.GetLookupTopic().GetRequestId() != 2 || seen[2].Cmd.GetLookupTopic().GetRequestId() != 4 {
		t.Fatalf("log %v", seen)
	}
}

func TestTimesCountsAcrossConnections(t *testing.T) {
	c := start(t, Options{})
	var asked atomic.Int64
	c.Handle(codec.TypeLookup, Times(2, func(*Conn, *pulsarpb.BaseCommand) bool { asked.Add(1); return false }))
	for range 2 {
		r := connect(t, c.Broker(0))
		for i := range uint64(2) {
			r.send(lookup(topicT, i))
			r.readType(codec.TypeLookupResponse)
		}
	}
	if asked.Load() != 2 {
		t.Fatalf("asked %d times", asked.Load())
	}
}
