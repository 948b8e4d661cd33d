package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"pointsman/codec"
	"pointsman/internal/testkit"
)

const (
	// interval is the time between two messages of a stream.
	interval = 2 * time.Millisecond
	// settle is how long after a switch a gap still counts as its doing.
	settle = time.Second
	// drainLimit is how long a stream may take to read what was published.
	drainLimit = 15 * time.Second
)

// stream publishes numbers to a topic and reads them again, and keeps account.
type stream struct {
	producer pulsar.Producer
	consumer pulsar.Consumer
	stop     chan struct{} // closed: publish no more
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu       sync.Mutex // guards what follows
	sent     int
	receipts []time.Time
	acked    map[int]bool // numbers that were acknowledged to the producer
	received map[int]int  // how often each number was read
	missing  int          // acknowledged and not read yet
	faults   []error
	progress chan struct{} // capacity 1
}

func newStream() *stream {
	return &stream{stop: make(chan struct{}), acked: map[int]bool{}, received: map[int]int{}, progress: make(chan struct{}, 1)}
}

// open makes the producer and consumer of a topic.
func open(client pulsar.Client, topic string) (*stream, error) {
	s := newStream()
	var err error
	s.consumer, err = client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "demo", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to %s: %w", topic, err)
	}
	s.producer, err = client.CreateProducer(pulsar.ProducerOptions{Topic: topic, BatchingMaxPublishDelay: time.Millisecond})
	if err != nil {
		s.consumer.Close()
		return nil, fmt.Errorf("create a producer for %s: %w", topic, err)
	}
	return s, nil
}

// start begins to publish and read.
func (s *stream) start(ctx context.Context) {
	ctx, s.cancel = context.WithCancel(ctx)
	s.wg.Go(func() { s.publish(ctx) })
	s.wg.Go(func() { s.read(ctx) })
}

func (s *stream) publish(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for n := 0; ; n++ {
		select {
		case <-ticker.C:
		case <-s.stop:
			return
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		s.sent++
		s.mu.Unlock()
		s.producer.SendAsync(ctx, &pulsar.ProducerMessage{Payload: []byte(strconv.Itoa(n))},
			func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { s.noteReceipt(n, err, time.Now()) })
	}
}

func (s *stream) read(ctx context.Context) {
	for {
		msg, err := s.consumer.Receive(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.noteFault(fmt.Errorf("receive: %w", err))
			return
		}
		n, err := strconv.Atoi(string(msg.Payload()))
		if err != nil {
			s.noteFault(fmt.Errorf("a payload that was never sent: %w", err))
			continue
		}
		s.noteRead(n)
		if err := s.consumer.Ack(msg); err != nil {
			s.noteFault(fmt.Errorf("acknowledge %d: %w", n, err))
		}
	}
}

func (s *stream) noteReceipt(n int, err error, now time.Time) {
	if err != nil {
		s.noteFault(fmt.Errorf("publish %d: %w", n, err))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receipts = append(s.receipts, now)
	s.acked[n] = true
	if s.received[n] == 0 {
		s.missing++
	}
	s.progressed()
}

func (s *stream) noteRead(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.received[n]++; s.received[n] == 1 && s.acked[n] {
		s.missing--
	}
	s.progressed()
}

func (s *stream) noteFault(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, err)
	s.progressed()
}

func (s *stream) progressed() {
	select {
	case s.progress <- struct{}{}:
	default:
	}
}

// finish publishes no more and waits until what was acknowledged has been read.
func (s *stream) finish(ctx context.Context) {
	close(s.stop)
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	if err := s.producer.FlushWithCtx(ctx); err != nil {
		s.noteFault(fmt.Errorf("flush: %w", err))
	}
	s.await(ctx, s.complete) // what is missing then is lost
}

// await waits until done is true, as far as the stream's own progress can make it so, for drainLimit at most.
func (s *stream) await(ctx context.Context, done func() bool) {
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	for !done() {
		select {
		case <-s.progress:
		case <-ctx.Done():
			return
		}
	}
}

// complete tells whether every message has its receipt, or an error, and every acknowledged one was read.
func (s *stream) complete() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.missing == 0 && len(s.acked)+len(s.faults) >= s.sent
}

func (s *stream) close() {
	s.cancelReads()
	s.wg.Wait()
	s.producer.Close()
	s.consumer.Close()
}

func (s *stream) cancelReads() {
	if s.cancel != nil {
		s.cancel()
	}
}

// gap is the longest time between two successive receipts, of those times that touch the span from..to.
func (s *stream) gap(from, to time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	var longest time.Duration
	for i := 1; i < len(s.receipts); i++ {
		if a, b := s.receipts[i-1], s.receipts[i]; b.After(from) && a.Before(to) {
			longest = max(longest, b.Sub(a))
		}
	}
	return longest
}

// tally counts what was lost and what came more than once.
func (s *stream) tally() (lost, duplicates int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.acked {
		if s.received[n] == 0 {
			lost++
		}
	}
	for _, times := range s.received {
		duplicates += times - 1
	}
	return lost, duplicates
}

func (s *stream) soFar() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("%d published and acknowledged, %d read, %d errors", len(s.acked), len(s.received), len(s.faults))
}

// result is the outcome of the demo.
type result struct {
	lost, duplicates, errors int
	gap                      time.Duration
	faults                   faultList
}

func (r result) String() string {
	return fmt.Sprintf("lost=%d duplicates=%d errors=%d gap_ms=%d", r.lost, r.duplicates, r.errors, r.gap.Milliseconds())
}

type faultList []error

func (l faultList) String() string {
	var b strings.Builder
	for _, err := range l {
		fmt.Fprintf(&b, "demo: %v\n", err)
	}
	return b.String()
}

// judge adds up what both streams and both clusters saw. What breaks a promise counts as an error.
func judge(orders, invoices *stream, blue, green *testkit.Cluster, m move) result {
	r := result{gap: orders.gap(m.from, m.to.Add(settle))}
	for _, s := range []*stream{orders, invoices} {
		lost, duplicates := s.tally()
		r.lost += lost
		r.duplicates += duplicates
		r.faults = append(r.faults, s.faults...)
	}
	broken := func(format string, args ...any) { r.faults = append(r.faults, fmt.Errorf(format, args...)) }
	if n := publishedSince(blue, ordersTopic, m.to); n > 0 {
		broken("%d orders were published to blue after the switch", n)
	}
	if published(green, ordersTopic) == 0 {
		broken("no order was published to green")
	}
	if n := len(green.Messages(invoicesTopic)); n > 0 {
		broken("%d invoices are on green, where no invoice belongs", n)
	}
	if n := opened(blue, invoicesTopic); n != 1 {
		broken("the producer of invoices was opened %d times: the switch of orders disturbed it", n)
	}
	if !sameConnection(blue, ordersTopic, invoicesTopic) {
		broken("orders and invoices did not share one connection to blue that is still open: the demo proves nothing about neighbours")
	}
	r.errors = len(r.faults)
	return r
}

// published counts the messages of a topic that were published to a cluster, rather than replicated to it.
func published(c *testkit.Cluster, topic string) int { return publishedSince(c, topic, time.Time{}) }

func publishedSince(c *testkit.Cluster, topic string, since time.Time) (n int) {
	for _, m := range c.Messages(topic) {
		if m.ReplicatedFrom == "" && m.At.After(since) {
			n += len(m.Payloads())
		}
	}
	return n
}

// sameConnection tells whether the producers of both topics were first opened on one connection, and it is still open.
func sameConnection(c *testkit.Cluster, x, y string) bool {
	on := map[string]uint64{}
	for _, cmd := range c.Commands(codec.TypeProducer) {
		if topic := cmd.Cmd.GetProducer().GetTopic(); on[topic] == 0 {
			on[topic] = cmd.Conn
		}
	}
	return on[x] != 0 && on[x] == on[y] && c.Conn(on[x]) != nil
}

// opened counts how often a producer was opened for a topic.
func opened(c *testkit.Cluster, topic string) (n int) {
	for _, cmd := range c.Commands(codec.TypeProducer) {
		if cmd.Cmd.GetProducer().GetTopic() == topic {
			n++
		}
	}
	return n
}
