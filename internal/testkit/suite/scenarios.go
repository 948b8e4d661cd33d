package suite

import (
	"bytes"
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

type scenario struct {
	name string
	fn   func(*run)
}

func scenarios() []scenario {
	return []scenario{
		{"batched messages arrive in order and once", func(r *run) { r.inOrder(false) }},
		{"single messages arrive in order and once", func(r *run) { r.inOrder(true) }},
		{"what is not acknowledged comes again to the next consumer", unacknowledged},
		{"a cumulative acknowledgement covers all before it", cumulative},
		{"a negative acknowledgement brings a message back", negative},
		{"seek by id and by time", seek},
		{"a reader reads from where it is told", reader},
		{"a partitioned topic keeps order in each partition", partitioned},
		{"shared consumers divide the messages", shared},
		{"failover goes to the next consumer", failover},
		{"key shared keeps a key with one consumer", keyShared},
		{"exclusive admits one consumer", exclusive},
		{"unsubscribe forgets the position", unsubscribe},
		{"producers and consumers close and open again", reopen},
		{"large and chunked messages arrive whole", large},
		{"compressed messages with properties and schema", schema},
		{"an exclusive producer keeps others out", exclusiveProducer},
		{"many topics on one client", manyTopics},
		{"non-persistent messages reach who listens", nonPersistent},
	}
}

func (r *run) inOrder(single bool) {
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = single })
	ids := r.send(p, 0, r.n)
	for i := 1; i < len(ids); i++ {
		a, b := ids[i-1], ids[i]
		if b.LedgerID() < a.LedgerID() || b.LedgerID() == a.LedgerID() && b.EntryID() < a.EntryID() {
			r.Fatalf("receipt %d has %v, before it came %v", i, b, a)
		}
	}
	r.expect(c, 0, r.n, r.ack(c))
	r.silent(c)
	c.Close()
	c = r.consumer(pulsar.Exclusive, nil)
	r.send(p, r.n, r.n+1)
	r.expect(c, r.n, r.n+1, r.ack(c))
}

func unacknowledged(r *run) {
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	r.send(p, 0, 10)
	r.expect(c, 0, 10, func(msg pulsar.Message, i int) {
		if i%2 == 0 {
			r.must(c.Ack(msg), "ack")
		}
	})
	c.Close()
	c = r.consumer(pulsar.Exclusive, nil)
	for i := 1; i < 10; i += 2 {
		r.expect(c, i, i+1, r.ack(c))
	}
	r.silent(c)
}

func cumulative(r *run) {
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(nil)
	// Two flushes, so that the acknowledgement does not end within a batch.
	r.send(p, 0, 10)
	r.send(p, 10, 20)
	r.expect(c, 0, 20, func(msg pulsar.Message, i int) {
		if i == 9 {
			r.must(c.AckCumulative(msg), "cumulative ack")
		}
	})
	c.Close()
	c = r.consumer(pulsar.Exclusive, nil)
	r.expect(c, 10, 20, nil)
	r.silent(c)
}

func negative(r *run) {
	c := r.consumer(pulsar.Shared, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	r.send(p, 0, 5)
	r.expect(c, 0, 5, func(msg pulsar.Message, i int) {
		if i == 3 {
			c.Nack(msg)
		} else {
			r.must(c.Ack(msg), "ack")
		}
	})
	r.expect(c, 3, 4, func(msg pulsar.Message, i int) {
		if msg.RedeliveryCount() != 1 {
			r.Errorf("redelivery count %d, want 1", msg.RedeliveryCount())
		}
		r.must(c.Ack(msg), "ack")
	})
	r.silent(c)
}

func seek(r *run) {
	c := r.consumer(pulsar.Exclusive, func(o *pulsar.ConsumerOptions) { o.StartMessageIDInclusive = true })
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	ids := r.send(p, 0, 10)
	r.expect(c, 0, 10, r.ack(c))
	r.must(c.SeekByTime(time.UnixMilli(1)), "seek to before all")
	r.expect(c, 0, 10, nil)

	time.Sleep(5 * time.Millisecond) // publish times have a resolution of a millisecond
	then := time.Now()
	r.send(p, 10, 15)
	r.must(c.SeekByTime(then), "seek by time")
	r.expect(c, 10, 15, nil)
	r.must(c.SeekByTime(time.Now().Add(time.Hour)), "seek to after all")
	r.send(p, 15, 16)
	r.expect(c, 15, 16, nil)

	// Last, because this client drops what lies before it even after a later seek by time.
	r.must(c.Seek(ids[5]), "seek by id")
	r.expect(c, 5, 16, r.ack(c))
}

func reader(r *run) {
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	ids := r.send(p, 0, 10)
	read := func(from pulsar.MessageID, inclusive bool, first int) {
		rd, err := r.client.CreateReader(pulsar.ReaderOptions{Topic: r.topic, StartMessageID: from, StartMessageIDInclusive: inclusive})
		r.must(err, "reader")
		defer rd.Close()
		want := first
		for ; rd.HasNext(); want++ {
			msg, err := rd.Next(r.ctx)
			r.must(err, "next")
			if got := r.number(msg); got != want {
				r.Fatalf("read %d, want %d", got, want)
			}
		}
		if want != 10 {
			r.Fatalf("the reader from %v ended before %d", from, want)
		}
	}
	read(pulsar.EarliestMessageID(), false, 0)
	read(ids[4], true, 4)
	read(ids[4], false, 5)
	read(pulsar.LatestMessageID(), false, 10)

	rd, err := r.client.CreateReader(pulsar.ReaderOptions{Topic: r.topic, StartMessageID: pulsar.LatestMessageID()})
	r.must(err, "reader")
	defer rd.Close()
	r.send(p, 10, 11)
	msg, err := rd.Next(r.ctx)
	r.must(err, "next")
	if got := r.number(msg); got != 10 {
		r.Fatalf("read %d after the latest, want 10", got)
	}
	last, err := rd.GetLastMessageID()
	r.must(err, "last message id")
	if last.LedgerID() != msg.ID().LedgerID() || last.EntryID() != msg.ID().EntryID() {
		r.Fatalf("last message id %v, the last message has %v", last, msg.ID())
	}
}

func partitioned(r *run) {
	if r.opts.CreatePartitioned == nil {
		r.Skip("no way to create a partitioned topic")
	}
	r.must(r.opts.CreatePartitioned(r.topic, 3), "create")
	parts, err := r.client.TopicPartitions(r.topic)
	r.must(err, "partitions")
	if len(parts) != 3 {
		r.Fatalf("partitions %v, want 3", parts)
	}
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) {
		o.MessageRouter = func(m *pulsar.ProducerMessage, md pulsar.TopicMetadata) int {
			i, _ := strconv.Atoi(string(m.Payload))
			return i % int(md.NumPartitions())
		}
	})
	r.send(p, 0, r.n)
	next := []int{0, 1, 2}
	for range r.n {
		msg, i := r.next(c)
		if i != next[i%3] {
			r.Fatalf("received %d, want %d in that partition", i, next[i%3])
		}
		next[i%3] += 3
		r.must(c.Ack(msg), "ack")
	}
	r.silent(c)
}

// collect receives with all consumers until n different numbers were acknowledged, and returns who received what.
func (r *run) collect(n int, consumers ...pulsar.Consumer) [][]int {
	r.Helper()
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	seen := map[int]int{}
	got := make([][]int, len(consumers))
	for k, c := range consumers {
		wg.Go(func() {
			for {
				msg, err := c.Receive(ctx)
				if err != nil {
					return
				}
				i, _ := strconv.Atoi(string(msg.Payload()))
				if err := c.Ack(msg); err != nil {
					r.Errorf("ack %d: %v", i, err)
				}
				mu.Lock()
				seen[i]++
				got[k] = append(got[k], i)
				if len(seen) == n {
					cancel()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	r.must(r.ctx.Err(), "not everything arrived")
	for i, times := range seen {
		if times != 1 {
			r.Errorf("%d was received %d times", i, times)
		}
	}
	return got
}

func shared(r *run) {
	small := func(o *pulsar.ConsumerOptions) { o.ReceiverQueueSize = 10 }
	a, b := r.consumer(pulsar.Shared, small), r.consumer(pulsar.Shared, small)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	r.send(p, 0, r.n)
	for _, c := range []pulsar.Consumer{a, b} { // each gets some, as the other takes no more than its queue holds
		msg, i := r.next(c)
		r.ack(c)(msg, i)
	}
	r.collect(r.n-2, a, b)
}

func failover(r *run) {
	named := func(name string) func(*pulsar.ConsumerOptions) {
		return func(o *pulsar.ConsumerOptions) { o.Name = name }
	}
	a := r.consumer(pulsar.Failover, named("a"))
	b := r.consumer(pulsar.Failover, named("b"))
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	r.send(p, 0, 1)
	active, other := a, b // which one a broker prefers is its own affair
	var msg pulsar.Message
	select {
	case m := <-a.Chan():
		msg = m.Message
	case m := <-b.Chan():
		active, other, msg = b, a, m.Message
	case <-r.ctx.Done():
		r.Fatal("nobody received the first message")
	}
	r.must(active.Ack(msg), "ack")
	r.send(p, 1, 10)
	r.expect(active, 1, 10, r.ack(active))
	active.Close()
	r.send(p, 10, 20)
	r.expect(other, 10, 20, r.ack(other))
}

func keyShared(r *run) {
	a, b := r.consumer(pulsar.KeyShared, nil), r.consumer(pulsar.KeyShared, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.BatcherBuilderType = pulsar.KeyBasedBatchBuilder })
	r.send(p, 0, r.n)
	owner, last := map[int]int{}, map[int]int{}
	for k, numbers := range r.collect(r.n, a, b) {
		for _, i := range numbers {
			key := i % 7
			if o, ok := owner[key]; ok && o != k {
				r.Errorf("key %d went to both consumers", key)
			}
			owner[key] = k
			if prev, ok := last[key]; ok && prev > i {
				r.Errorf("key %d: %d came after %d", key, i, prev)
			}
			last[key] = i
		}
	}
}

func exclusive(r *run) {
	c := r.consumer(pulsar.Exclusive, nil)
	if second, err := r.trySubscribe(r.newClient(), pulsar.Exclusive, nil); err == nil {
		second.Close()
		r.Fatal("a second exclusive consumer was admitted")
	}
	p := r.producer(nil)
	r.send(p, 0, 1)
	r.expect(c, 0, 1, r.ack(c))
}

func unsubscribe(r *run) {
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(nil)
	r.send(p, 0, 5)
	r.expect(c, 0, 5, r.ack(c))
	r.must(c.Unsubscribe(), "unsubscribe")
	c = r.consumer(pulsar.Exclusive, func(o *pulsar.ConsumerOptions) {
		o.SubscriptionInitialPosition = pulsar.SubscriptionPositionLatest
	})
	r.send(p, 5, 6)
	r.expect(c, 5, 6, r.ack(c))
}

func reopen(r *run) {
	for round := range 5 {
		c := r.consumer(pulsar.Exclusive, nil)
		p := r.producer(func(o *pulsar.ProducerOptions) { o.Name = "the-same-name" })
		r.send(p, round*10, round*10+10)
		r.expect(c, round*10, round*10+10, r.ack(c))
		p.Close()
		c.Close()
	}
}

func large(r *run) {
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true; o.EnableChunking = true })
	for _, size := range []int{64 << 10, 5_000_000, 12 << 20} {
		payload := bytes.Repeat([]byte("0123456789abcdef"), size/16)
		_, err := p.Send(r.ctx, &pulsar.ProducerMessage{Payload: payload})
		r.must(err, "send "+strconv.Itoa(size))
		msg, err := c.Receive(r.ctx)
		r.must(err, "receive "+strconv.Itoa(size))
		if !bytes.Equal(msg.Payload(), payload) {
			r.Fatalf("a message of %d bytes arrived with %d, or changed", size, len(msg.Payload()))
		}
		r.must(c.Ack(msg), "ack")
	}
}

type record struct {
	Number int `json:"number"`
}

func schema(r *run) {
	const definition = `{"type":"record","name":"record","fields":[{"name":"number","type":"int"}]}`
	c := r.consumer(pulsar.Exclusive, func(o *pulsar.ConsumerOptions) { o.Schema = pulsar.NewJSONSchema(definition, nil) })
	p := r.producer(func(o *pulsar.ProducerOptions) {
		o.Schema = pulsar.NewJSONSchema(definition, nil)
		o.CompressionType = pulsar.ZLib
	})
	for i := range 10 {
		_, err := p.Send(r.ctx, &pulsar.ProducerMessage{Value: record{i}, Properties: map[string]string{"n": strconv.Itoa(i)}})
		r.must(err, "send")
		msg, err := c.Receive(r.ctx)
		r.must(err, "receive")
		var got record
		r.must(msg.GetSchemaValue(&got), "decode")
		if got.Number != i || msg.Properties()["n"] != strconv.Itoa(i) {
			r.Fatalf("received %+v with %v, want number %d", got, msg.Properties(), i)
		}
	}
}

func exclusiveProducer(r *run) {
	first := r.producer(func(o *pulsar.ProducerOptions) { o.ProducerAccessMode = pulsar.ProducerAccessModeExclusive })
	r.send(first, 0, 1)
	p, err := r.newClient().CreateProducer(pulsar.ProducerOptions{Topic: r.topic, ProducerAccessMode: pulsar.ProducerAccessModeExclusive})
	if err == nil {
		p.Close()
		r.Fatal("a second exclusive producer was admitted")
	}
	first.Close()
	r.send(r.producer(nil), 1, 2)
}

func manyTopics(r *run) {
	base := r.topic
	for i := range 10 {
		r.topic = base + "-" + strconv.Itoa(i)
		c, p := r.consumer(pulsar.Exclusive, nil), r.producer(nil)
		r.send(p, i, i+1)
		r.expect(c, i, i+1, r.ack(c))
	}
}

func nonPersistent(r *run) {
	r.topic = "non-" + r.topic
	c := r.consumer(pulsar.Exclusive, nil)
	p := r.producer(func(o *pulsar.ProducerOptions) { o.DisableBatching = true })
	// What is sent before the consumer's first permits arrive is lost, and nothing tells when they have.
	for arrived := false; !arrived; {
		r.send(p, 0, 1)
		select {
		case <-c.Chan():
			arrived = true
		case <-time.After(100 * time.Millisecond):
		case <-r.ctx.Done():
			r.Fatal("nothing arrived")
		}
	}
	for i := 1; i < 10; i++ {
		r.send(p, i, i+1)
		for got := 0; got != i; {
			_, got = r.next(c) // a late copy of the first may come before
		}
	}
}
