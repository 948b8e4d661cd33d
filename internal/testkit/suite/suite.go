// Package suite is what a Pulsar client expects of whatever answers at a service URL: the fake broker, a real cluster, or
// either of them behind the proxy. Tests of testkit and e2e call it with pulsar-client-go underneath. It must never
// depend on what is behind the URL: what only one of them can do comes in through Options.
package suite

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/prometheus/client_golang/prometheus"
)

// Options of a run.
type Options struct {
	Namespace         string                                   // "tenant/namespace"; default public/default
	Prefix            string                                   // of topic names, so that runs do not meet; default by the clock
	Messages          int                                      // per scenario; default 200
	Timeout           time.Duration                            // of each scenario; default one minute
	CreatePartitioned func(topic string, partitions int) error // nil: the partitioned scenario is skipped
	Client            func(*pulsar.ClientOptions)              // may change how clients are made
}

// Suite runs every scenario against serviceURL.
func Suite(t *testing.T, serviceURL string, opts Options) {
	if opts.Namespace == "" {
		opts.Namespace = "public/default"
	}
	if opts.Prefix == "" {
		opts.Prefix = "suite-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	}
	if opts.Messages == 0 {
		opts.Messages = 200
	}
	if opts.Timeout == 0 {
		opts.Timeout = time.Minute
	}
	for _, s := range scenarios() {
		t.Run(s.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), opts.Timeout)
			defer cancel()
			r := &run{T: t, ctx: ctx, url: serviceURL, opts: opts, n: opts.Messages}
			name := strings.ReplaceAll(s.name, " ", "-")
			r.topic = fmt.Sprintf("persistent://%s/%s-%s", opts.Namespace, opts.Prefix, name)
			r.client = r.newClient()
			s.fn(r)
		})
	}
}

// run is one scenario that runs: a topic of its own and a client.
type run struct {
	*testing.T
	ctx    context.Context
	url    string
	opts   Options
	n      int
	topic  string
	client pulsar.Client
}

func (r *run) newClient() pulsar.Client {
	r.Helper()
	co := pulsar.ClientOptions{
		URL: r.url, Logger: pulsarlog.DefaultNopLogger(), MetricsRegisterer: prometheus.NewRegistry(),
		OperationTimeout: 20 * time.Second, ConnectionTimeout: 10 * time.Second,
	}
	if r.opts.Client != nil {
		r.opts.Client(&co)
	}
	c, err := pulsar.NewClient(co)
	r.must(err, "client")
	r.Cleanup(c.Close)
	return c
}

func (r *run) must(err error, what string) {
	r.Helper()
	if err != nil {
		r.Fatalf("%s: %v", what, err)
	}
}

func (r *run) producer(change func(*pulsar.ProducerOptions)) pulsar.Producer {
	r.Helper()
	po := pulsar.ProducerOptions{Topic: r.topic, BatchingMaxPublishDelay: 2 * time.Millisecond}
	if change != nil {
		change(&po)
	}
	p, err := r.client.CreateProducer(po)
	r.must(err, "producer")
	r.Cleanup(p.Close)
	return p
}

func (r *run) consumer(typ pulsar.SubscriptionType, change func(*pulsar.ConsumerOptions)) pulsar.Consumer {
	r.Helper()
	c, err := r.trySubscribe(r.client, typ, change)
	r.must(err, "subscribe")
	r.Cleanup(c.Close)
	return c
}

func (r *run) trySubscribe(client pulsar.Client, typ pulsar.SubscriptionType, change func(*pulsar.ConsumerOptions)) (pulsar.Consumer, error) {
	co := pulsar.ConsumerOptions{
		Topic: r.topic, SubscriptionName: "sub", Type: typ, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
		NackRedeliveryDelay: 100 * time.Millisecond, AckWithResponse: true,
	}
	if change != nil {
		change(&co)
	}
	return client.Subscribe(co)
}

// send publishes the numbers from up to but not including to, all in flight at once, and returns their ids.
func (r *run) send(p pulsar.Producer, from, to int) []pulsar.MessageID {
	r.Helper()
	type result struct {
		i   int
		id  pulsar.MessageID
		err error
	}
	results := make(chan result, to-from)
	for i := from; i < to; i++ {
		msg := &pulsar.ProducerMessage{Payload: []byte(strconv.Itoa(i)), Key: "key-" + strconv.Itoa(i%7)}
		p.SendAsync(r.ctx, msg, func(id pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { results <- result{i, id, err} })
	}
	r.must(p.FlushWithCtx(r.ctx), "flush")
	ids := make([]pulsar.MessageID, to-from)
	for range to - from {
		select {
		case res := <-results:
			r.must(res.err, "send "+strconv.Itoa(res.i))
			ids[res.i-from] = res.id
		case <-r.ctx.Done():
			r.Fatal("receipts are missing")
		}
	}
	return ids
}

// next receives one message and returns it with its number.
func (r *run) next(c pulsar.Consumer) (pulsar.Message, int) {
	r.Helper()
	msg, err := c.Receive(r.ctx)
	r.must(err, "receive")
	return msg, r.number(msg)
}

func (r *run) number(msg pulsar.Message) int {
	r.Helper()
	i, err := strconv.Atoi(string(msg.Payload()))
	r.must(err, "payload")
	return i
}

// expect receives the numbers from up to but not including to, in order, and hands each to then.
func (r *run) expect(c pulsar.Consumer, from, to int, then func(pulsar.Message, int)) {
	r.Helper()
	for want := from; want < to; want++ {
		msg, got := r.next(c)
		if got != want {
			r.Fatalf("received %d, want %d", got, want)
		}
		if then != nil {
			then(msg, got)
		}
	}
}

// ack acknowledges a message and waits for the answer.
func (r *run) ack(c pulsar.Consumer) func(pulsar.Message, int) {
	return func(msg pulsar.Message, i int) { r.must(c.Ack(msg), "ack "+strconv.Itoa(i)) }
}

// silent checks that nothing more comes for a moment.
func (r *run) silent(c pulsar.Consumer) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond)
	defer cancel()
	if msg, err := c.Receive(ctx); err == nil {
		r.Fatalf("received %q, which should not be there", msg.Payload())
	} else if !errors.Is(err, context.DeadlineExceeded) {
		r.Fatal(err)
	}
}
