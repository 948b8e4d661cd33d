package app

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
	"pointsman/store"
)

// bufferSlack is what limits.buffer_memory may be exceeded by: each of the connections may have read a little when its last
// byte was used up.
const bufferSlack = 4 << 20

// buffers sets limits.buffer_memory.
func buffers(megabytes int) func(*config.Config) {
	return func(c *config.Config) { c.Limits.BufferMemory = config.Size(megabytes << 20) }
}

// watcher samples the proxy's buffers and the memory of the process until it is stopped.
type watcher struct {
	limit           int64
	stop            func()
	maxBuffers, rss int64 // highest; rss above that at the start
}

func (r *rig) watchMemory(t *testing.T) *watcher {
	t.Helper()
	debug.FreeOSMemory()
	w, before := &watcher{limit: int64(r.cfg.Limits.BufferMemory)}, rss(t)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			w.maxBuffers = max(w.maxBuffers, r.app.engine.Stats().BufferMemory)
			w.rss = max(w.rss, rss(t)-before)
			select {
			case <-tick.C:
			case <-quit:
				return
			}
		}
	}()
	w.stop = sync.OnceFunc(func() { close(quit); <-done })
	t.Cleanup(w.stop)
	return w
}

// check stops the watcher and compares with the limits. others is what the peers and the fake brokers, which are in this process
// as well, may have taken.
func (w *watcher) check(t *testing.T, what string, others int64) {
	t.Helper()
	w.stop()
	t.Logf("%s: buffers at most %.1f MiB of %d, resident memory grew by at most %.1f MiB", what, float64(w.maxBuffers)/(1<<20), w.limit>>20, float64(w.rss)/(1<<20))
	if w.maxBuffers > w.limit+bufferSlack {
		t.Errorf("%s: buffers of %d bytes, limits.buffer_memory is %d", what, w.maxBuffers, w.limit)
	}
	if limit := 2*w.limit + others; w.rss > limit*raceScale { // a collection may come when as much again was allocated
		t.Errorf("%s: resident memory grew by %d bytes, want at most %d", what, w.rss, limit)
	}
}

func (r *rig) relayed() (n int64) {
	for _, l := range r.app.engine.Stats().Loops {
		n += l.ReadBytes
	}
	return n
}

// compareLatency says what the neighbour saw before and during, and fails when it was as good as stopped. A few messages may wait for a machine with
// other things to do.
func compareLatency(t *testing.T, before, during []time.Duration) {
	t.Helper()
	t.Logf("the neighbour's publish: before p50 %s p99 %s (%d), during p50 %s p99 %s (%d)", percentile(before, 50), percentile(before, 99), len(before),
		percentile(during, 50), percentile(during, 99), len(during))
	if p := percentile(during, 95); len(during) < 10 || p > time.Second {
		t.Errorf("the neighbour's p95 was %s in %d messages", p, len(during))
	}
}

// onB is a neighbour on the other cluster: what it sees is the proxy's doing, not the fake broker's.
func (r *rig) onB(t *testing.T) *neighbour {
	t.Helper()
	return r.neighbourOn(t, "persistent://public/b/neighbour", time.Millisecond)
}

// ME-01: consumers that stop reading 1 MB messages at the broker's full speed. The proxy's memory stays under its limit, the
// broker is slowed through TCP, others keep their latency, and who reads again gets everything.
func TestConsumersThatStopReadingHoldBoundedMemory(t *testing.T) {
	const topic, messages = "persistent://public/default/slow-consumers", 20
	n := scaled(200)
	r := newRig(t, testkit.Options{}, buffers(64))
	r.route(t, "public/b", "b")
	payload := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB
	for i := range uint64(messages) {
		r.a.Publish(topic, "p", i, payload)
	}
	target := r.owner(t, topic)
	calm := r.onB(t)
	r.await(t, "neighbour's first messages", func() bool { return r.b.Count(codec.TypeSend) > 300 })
	before := calm.stop()

	memory := r.watchMemory(t)
	neighbour := r.onB(t)
	var peers []*peer
	for i := range n {
		p := r.connect(t, target)
		p.nc.(*net.TCPConn).SetReadBuffer(64 << 10)
		p.subscribe(topic, fmt.Sprintf("s%d", i), testkit.Exclusive, 1)
		p.send(flowCommand(1, 1000))
		peers = append(peers, p)
	}
	sends := r.b.Count(codec.TypeSend)
	r.await(t, "paused legs", func() bool { return r.paused() >= int64(n) })
	r.await(t, "neighbour's messages", func() bool { return r.b.Count(codec.TypeSend) > sends+300 })
	during := neighbour.stop()
	memory.stop()
	if memory.maxBuffers < memory.limit/4 && raceScale == 1 {
		t.Errorf("buffers of %d bytes only: the limit was not put to the test", memory.maxBuffers)
	}
	memory.check(t, fmt.Sprintf("%d consumers that do not read", n), 64<<20)
	compareLatency(t, before, during)
	if total := int64(n) * messages << 20; r.relayed() > total/2 {
		t.Errorf("the broker could send %d of %d bytes: it was not slowed", r.relayed(), total)
	}

	for _, p := range peers[5:] {
		p.nc.Close()
	}
	for i, p := range peers[:5] {
		for m := range messages {
			cmd, got, err := p.next()
			if err != nil || cmd.GetMessage() == nil || !bytes.HasSuffix(got, payload) {
				t.Fatalf("consumer %d, message %d: %v, %d bytes, %v", i, m, cmd, len(got), err)
			}
		}
		p.nc.Close()
	}
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
}

// paused is how many connections are not read for a full peer.
func (r *rig) paused() (n int64) {
	for _, l := range r.app.engine.Stats().Loops {
		n += l.Paused
	}
	return n
}

// relay is a TCP relay that holds little: in front of a broker, where the kernel's buffers of tens of megabytes would hide what the
// proxy does with one that is slow, or in front of proxies as a balancer. Once it is slowed it reads relayBuffer/2 each relayTick.
type relay struct {
	net.Listener
	slowed atomic.Bool
	resume chan struct{}
	group  sync.WaitGroup
}

const (
	relayBuffer = 32 << 10
	relayTick   = 50 * time.Millisecond // so that a test may take its time before all has passed
)

// newRelay relays each connection to the first of the targets that accepts it.
func newRelay(t *testing.T, targets ...string) *relay {
	t.Helper()
	small := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, relayBuffer) }), err)
	}}
	l, err := small.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l, resume: make(chan struct{})}
	r.group.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			var to net.Conn
			for _, target := range targets {
				if to, err = net.Dial("tcp", target); err == nil {
					break
				}
			}
			if err != nil {
				from.Close()
				continue
			}
			r.group.Go(func() { defer from.Close(); defer to.Close(); r.copy(to, from) })
			r.group.Go(func() { defer from.Close(); defer to.Close(); _, _ = io.Copy(from, to) })
		}
	})
	t.Cleanup(func() { l.Close(); r.group.Wait() })
	return r
}

func (r *relay) copy(to io.Writer, from io.Reader) {
	tick := time.NewTicker(relayTick)
	defer tick.Stop()
	buf := make([]byte, relayBuffer/2)
	for {
		if r.slowed.Load() {
			select {
			case <-tick.C: // about 300 kB/s
			case <-r.resume:
			}
		}
		k, err := from.Read(buf)
		if k > 0 {
			if _, err := to.Write(buf[:k]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// ME-02: brokers that read about 300 kB/s per connection from producers that could send five hundred times as much. The producers
// are slowed through TCP, memory is bounded, others keep their latency, and everything arrives.
func TestASlowBrokerSlowsItsProducers(t *testing.T) {
	const topic, messages = "persistent://public/default/slow-broker", 48
	n := scaled(40)
	r := newRig(t, testkit.Options{MaxTopicBytes: 4 << 30}, nil)
	r.a.CreateTopic(topic, 0)
	info, _ := r.a.Topic(topic)
	way := newRelay(t, r.a.Broker(info.Broker).Addr())
	slow := r.beside(t, store.NewMemory(), func(c *config.Config) {
		buffers(16)(c)
		c.Clusters["a"].Resolve[fmt.Sprintf("broker-%d:6650", info.Broker)] = way.Addr().String()
	})
	slow.route(t, "public/b", "b")
	target := slow.owner(t, topic)
	var peers []*peer
	for i := range n {
		p := slow.connect(t, target)
		p.nc.(*net.TCPConn).SetWriteBuffer(64 << 10)
		p.produce(topic, fmt.Sprintf("p%d", i), 1)
		peers = append(peers, p)
	}
	calm := slow.onB(t)
	slow.await(t, "neighbour's first messages", func() bool { return r.b.Count(codec.TypeSend) > 300 })
	before := calm.stop()
	way.slowed.Store(true)

	memory := slow.watchMemory(t)
	neighbour := slow.onB(t)
	var sent atomic.Int64
	var writers sync.WaitGroup
	payload := make([]byte, 256<<10)
	for _, p := range peers {
		writers.Go(func() {
			for seq := range uint64(messages) {
				if err := p.tryWrite(sendFrame(1, seq, payload)); err != nil {
					t.Errorf("message %d: %v", seq, err)
					return
				}
				sent.Add(1)
			}
		})
	}
	sends := r.b.Count(codec.TypeSend)
	slow.await(t, "paused producers", func() bool { return slow.paused() >= int64(n) })
	taken := sent.Load()
	slow.await(t, "neighbour's messages", func() bool { return r.b.Count(codec.TypeSend) > sends+300 })
	during := neighbour.stop()
	memory.check(t, fmt.Sprintf("%d producers to a broker that is slow (%d of %d MiB taken)", n, taken/4, n*messages/4), 192<<20)
	compareLatency(t, before, during)
	if taken >= int64(n)*messages {
		t.Errorf("all %d messages were taken: nobody was slowed", taken)
	}

	way.slowed.Store(false)
	close(way.resume)
	writers.Wait()
	for i, p := range peers {
		for seq := range uint64(messages) {
			if got := p.expect(codec.TypeSendReceipt).GetSendReceipt().GetSequenceId(); got != seq {
				t.Fatalf("producer %d: receipt of %d, want %d", i, got, seq)
			}
		}
		p.nc.Close()
	}
	if got := len(r.a.Messages(topic)); got != n*messages {
		t.Errorf("%d messages are stored, want %d", got, n*messages)
	}
	slow.await(t, "return of the buffers", func() bool { return slow.app.engine.Stats().BufferMemory == 0 })
}

// Clients that ask and ask and never read an answer are not read either.
func TestClientsThatNeverReadTheirAnswersHoldBoundedMemory(t *testing.T) {
	// What was asked before the reading stopped is still answered: that is not under limits.buffer_memory.
	const questions, inFlight, answer = 5_000, 4, 4 << 10
	n := scaled(40)
	r := newRig(t, testkit.Options{}, func(c *config.Config) {
		buffers(16)(c)
		c.Limits.LookupsPerConnection = inFlight
	})
	r.route(t, "public/b", "b")
	calm := r.onB(t)
	r.await(t, "neighbour's first messages", func() bool { return r.b.Count(codec.TypeSend) > 300 })
	before := calm.stop()
	memory := r.watchMemory(t)
	neighbour := r.onB(t)
	var asked atomic.Int64
	var writers sync.WaitGroup
	var peers []*peer
	long := "persistent://public/default/" + string(bytes.Repeat([]byte("x"), answer)) // the error repeats it
	for range n {
		p := r.connect(t, "")
		p.nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		peers = append(peers, p)
		writers.Go(func() {
			for i := range uint64(questions) {
				frame := codec.AppendCommand(nil, commandOf(codec.TypeGetSchema, &pulsarpb.BaseCommand{GetSchema: &pulsarpb.CommandGetSchema{Topic: &long, RequestId: &i}}))
				p.nc.SetWriteDeadline(time.Now().Add(patience))
				if _, err := p.nc.Write(frame); err != nil {
					return // closed below, while it waits
				}
				asked.Add(1)
			}
		})
	}
	sends := r.b.Count(codec.TypeSend)
	r.await(t, "askers that are not read", func() bool { return r.paused() >= int64(n) })
	r.await(t, "neighbour's messages", func() bool { return r.b.Count(codec.TypeSend) > sends+300 })
	during := neighbour.stop()
	t.Logf("%d of %d questions were taken", asked.Load(), n*questions)
	if asked.Load() >= int64(n)*questions {
		t.Error("all questions were taken: nobody was stopped")
	}
	memory.stop()
	if memory.maxBuffers < memory.limit/4 && raceScale == 1 {
		t.Errorf("buffers of %d bytes only: the limit was not put to the test", memory.maxBuffers)
	}
	memory.maxBuffers -= int64(n * inFlight * answer)
	memory.check(t, fmt.Sprintf("%d clients that never read", n), 64<<20)
	compareLatency(t, before, during)
	for _, p := range peers {
		p.nc.Close()
	}
	writers.Wait()
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
}

// CN-09: a lot of traffic one way, the other way, and both ways at once with slow readers: nothing stalls, nothing is damaged.
func TestTrafficInEitherDirectionNeverStalls(t *testing.T) {
	const topic, size = "persistent://public/default/one-way", 512 << 10
	messages := scaled(400) // 200 MiB each way
	r := newRig(t, testkit.Options{MaxTopicBytes: 1 << 30}, func(c *config.Config) {
		c.Limits.KeepAliveInterval = config.Duration(time.Second) // silence in one direction must not be taken for death
	})
	payload := func(i uint64) []byte {
		b := make([]byte, size)
		for at := 0; at < size; at += 4096 {
			binary.BigEndian.PutUint64(b[at:], i*size+uint64(at))
		}
		return b
	}
	publish := func(t *testing.T, p *peer, slow bool) (finish func()) {
		if slow {
			remove := r.a.Handle(codec.TypeSend, testkit.Delay(2*time.Millisecond))
			t.Cleanup(remove)
		}
		var group sync.WaitGroup
		group.Go(func() {
			for i := range uint64(messages) {
				if err := p.tryWrite(sendFrame(1, i, payload(i))); err != nil {
					t.Errorf("message %d: %v", i, err)
					return
				}
			}
		})
		return group.Wait
	}
	// read takes what comes: messages of the consumer are compared with the sums, receipts are counted.
	read := func(t *testing.T, p *peer, wantMessages, wantReceipts int, slow bool) {
		t.Helper()
		pace := time.NewTicker(2 * time.Millisecond)
		defer pace.Stop()
		for gotMessages, gotReceipts := 0, 0; gotMessages < wantMessages || gotReceipts < wantReceipts; {
			cmd, body, err := p.next()
			switch {
			case err != nil:
				t.Fatalf("after %d messages and %d receipts: %v", gotMessages, gotReceipts, err)
			case cmd.GetMessage() != nil:
				if want := payload(uint64(gotMessages)); crc32.ChecksumIEEE(body[len(body)-size:]) != crc32.ChecksumIEEE(want) {
					t.Fatalf("message %d is damaged", gotMessages)
				}
				gotMessages++
				p.send(ackCommand(2, cmd.GetMessage().GetMessageId()))
			case cmd.GetSendReceipt() != nil:
				if got := cmd.GetSendReceipt().GetSequenceId(); got != uint64(gotReceipts) {
					t.Fatalf("receipt of %d, want %d", got, gotReceipts)
				}
				gotReceipts++
			default:
				t.Fatalf("received %v", cmd)
			}
			if slow && (gotMessages+gotReceipts)%2 == 0 {
				<-pace.C
			}
		}
	}
	for i := range uint64(messages) {
		r.a.Publish(topic, "p", i, payload(i))
	}
	target := r.owner(t, topic)
	rate := func(t *testing.T, start time.Time, megabytes int) {
		t.Logf("%.0f MB/s", float64(megabytes*size/1e6)/time.Since(start).Seconds())
	}
	t.Run("broker to client", func(t *testing.T) {
		p := r.connect(t, target)
		p.subscribe(topic, "down", testkit.Exclusive, 2)
		start := time.Now()
		p.send(flowCommand(2, uint32(messages)))
		read(t, p, messages, 0, false)
		rate(t, start, messages)
	})
	t.Run("client to broker", func(t *testing.T) {
		p := r.connect(t, r.owner(t, "persistent://public/default/up"))
		p.produce("persistent://public/default/up", "", 1)
		start := time.Now()
		finish := publish(t, p, false)
		read(t, p, 0, messages, false)
		finish()
		rate(t, start, messages)
		stored := r.a.Messages("persistent://public/default/up")
		for i, m := range stored {
			if crc32.ChecksumIEEE(m.Payload) != crc32.ChecksumIEEE(payload(uint64(i))) {
				t.Fatalf("message %d was damaged on the way", i)
			}
		}
		if len(stored) != messages {
			t.Errorf("%d messages are stored, want %d", len(stored), messages)
		}
	})
	t.Run("both, with slow readers", func(t *testing.T) {
		p := r.connect(t, target)
		p.nc.(*net.TCPConn).SetReadBuffer(64 << 10)
		p.subscribe(topic, "both", testkit.Exclusive, 2)
		p.produce(topic, "", 1)
		start := time.Now()
		p.send(flowCommand(2, uint32(messages)))
		finish := publish(t, p, true)
		read(t, p, messages, messages, true)
		finish()
		rate(t, start, 2*messages)
	})
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
}
