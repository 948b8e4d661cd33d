package app

import (
	"bufio"
	"crypto/tls"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
)

// follower is a client with one producer or consumer that finds its topic, and finds it again whenever it is told or cut off, as
// real clients do. It stands in for pulsar-client-go, which races with itself when it reconnects after it has sent.
type follower struct {
	testing.TB
	addr     string      // of a proxy, or of what is in front of several
	secure   *tls.Config // nil: plaintext
	topic    string
	producer bool
	name     string // of the producer or subscription
	kind     int32  // access mode or subscription type

	quit, done chan struct{}
	requests   chan []byte
	receipts   chan struct{}
	messages   chan []byte

	// Owned by run:
	sequence uint64
	unacked  []byte // the SEND that waits for its receipt
}

// follow starts a producer.
func follow(t testing.TB, addr, topic, name string, access int32) *follower {
	return startFollower(&follower{TB: t, addr: addr, topic: topic, producer: true, name: name, kind: access})
}

// followAs starts a consumer, from the beginning of the topic.
func followAs(t testing.TB, addr, topic, subscription string, typ int32) *follower {
	return startFollower(&follower{TB: t, addr: addr, topic: topic, name: subscription, kind: typ})
}

func startFollower(f *follower) *follower {
	f.quit, f.done = make(chan struct{}), make(chan struct{})
	f.requests, f.receipts, f.messages = make(chan []byte), make(chan struct{}), make(chan []byte, 10_000)
	go f.run()
	f.Cleanup(func() { close(f.quit); <-f.done })
	return f
}

// mustSend publishes n messages and waits for each.
func (f *follower) mustSend(n int) {
	f.Helper()
	for i := range n {
		if !f.trySend([]byte(strconv.Itoa(i))) {
			f.Fatalf("message %d to %s has no receipt", i, f.topic)
		}
	}
}

func (f *follower) trySend(payload []byte) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case f.requests <- payload:
	case <-timer.C:
		return false
	}
	select {
	case <-f.receipts:
		return true
	case <-timer.C:
		return false
	}
}

// mustReceive takes n messages, which are acknowledged.
func (f *follower) mustReceive(n int) {
	f.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for i := range n {
		select {
		case <-f.messages:
		case <-timer.C:
			f.Fatalf("message %d of %d from %s did not come", i, n, f.topic)
		}
	}
}

func (f *follower) run() {
	defer close(f.done)
	assigned := ""
	for {
		p := f.attach(assigned)
		if p == nil {
			return
		}
		assigned = f.serve(p)
		p.nc.Close()
	}
}

// attach tries until the producer or consumer is open; nil when the follower is to end.
func (f *follower) attach(assigned string) *peer {
	const backoff = 5 * time.Millisecond
	for wait := time.Duration(0); ; wait = backoff {
		select {
		case <-f.quit:
			return nil
		case <-time.After(wait):
		}
		if p := f.tryAttach(assigned); p != nil {
			return p
		}
		assigned = ""
	}
}

func (f *follower) tryAttach(target string) *peer {
	if target == "" {
		lookups := f.connect("")
		if lookups == nil {
			return nil
		}
		defer lookups.nc.Close()
		if lookups.tryWrite(codec.AppendCommand(nil, lookupCommand(f.topic, 1))) != nil {
			return nil
		}
		cmd, _, err := lookups.next()
		if err != nil || cmd.GetLookupTopicResponse().GetResponse() != codec.LookupConnect {
			return nil
		}
		target = cmd.GetLookupTopicResponse().GetBrokerServiceUrl()
	}
	p := f.connect(strings.TrimPrefix(target, "pulsar://"))
	if p == nil {
		return nil
	}
	cmd := subscribeCommand(f.topic, f.name, f.kind, 1, 1)
	if f.producer {
		cmd = producerCommand(f.topic, f.name, 1, 1)
		cmd.Producer.ProducerAccessMode = &f.kind
	}
	if p.tryWrite(codec.AppendCommand(nil, cmd)) == nil {
		for {
			cmd, _, err := p.next()
			switch {
			case err != nil || cmd.Error != nil:
			case cmd.ProducerSuccess != nil:
				return p.attend()
			case cmd.Success != nil:
				if p.tryWrite(codec.AppendCommand(nil, flowCommand(1, 10_000))) == nil {
					return p.attend()
				}
			default:
				continue // ACTIVE_CONSUMER_CHANGE
			}
			break
		}
	}
	p.nc.Close()
	return nil
}

// connect dials and shakes hands; nil when that fails.
func (f *follower) connect(target string) *peer {
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		return nil
	}
	if f.secure != nil {
		nc = tls.Client(nc, f.secure)
	}
	p := &peer{TB: f.TB, nc: nc, r: bufio.NewReader(nc)}
	if p.tryWrite(codec.AppendCommand(nil, connectCommand(target))) == nil {
		if cmd, _, err := p.next(); err == nil && cmd.Connected != nil {
			return p
		}
	}
	nc.Close()
	return nil
}

// serve does what is asked for until the connection or the handle ends; it returns where to go then, if that was said.
func (f *follower) serve(p *peer) (assigned string) {
	if f.unacked != nil && p.tryWrite(f.unacked) != nil {
		return ""
	}
	for {
		requests := f.requests
		if f.unacked != nil || !f.producer {
			requests = nil
		}
		select {
		case frame, ok := <-p.frames:
			if !ok || frame.err != nil || frame.cmd.Error != nil {
				return ""
			}
			switch {
			case frame.cmd.SendReceipt != nil && f.unacked != nil && frame.cmd.SendReceipt.GetSequenceId() == f.sequence:
				f.unacked = nil
				select {
				case f.receipts <- struct{}{}:
				case <-f.quit:
					return ""
				}
			case frame.cmd.CloseProducer != nil:
				return frame.cmd.CloseProducer.GetAssignedBrokerServiceUrl()
			case frame.cmd.CloseConsumer != nil:
				return frame.cmd.CloseConsumer.GetAssignedBrokerServiceUrl()
			case frame.cmd.Message != nil:
				select {
				case f.messages <- frame.payload:
				case <-f.quit:
					return ""
				}
				if p.tryWrite(codec.AppendCommand(nil, ackCommand(1, frame.cmd.Message.MessageId))) != nil {
					return ""
				}
			}
		case payload := <-requests:
			f.sequence++
			f.unacked = sendFrame(1, f.sequence, payload)
			if p.tryWrite(f.unacked) != nil {
				return ""
			}
		case <-f.quit:
			return ""
		}
	}
}
