// Command godriver is the Go client (pulsar-client-go) behind the common command line of the client drivers (see
// ../README.md). The end-to-end tests build and run it; nothing of the product may import it.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	pulsarlog "github.com/apache/pulsar-client-go/pulsar/log"
)

// event is one line of output that tells of no message; the fields are described in ../README.md.
type event struct {
	E    string  `json:"e"`
	What string  `json:"what,omitempty"`
	N    *int64  `json:"n,omitempty"`
	K    int     `json:"k"`
	C    int     `json:"c"`
	T    float64 `json:"t,omitempty"`
	Text string  `json:"text,omitempty"`
}

// flushInterval is how long a line may wait for more. A wait for less than a millisecond is none: timers cost more than they bring at high rates.
const (
	flushInterval = 5 * time.Millisecond
	shortestWait  = time.Millisecond
)

type driver struct {
	client pulsar.Client
	ctx    context.Context // ends when receiving must end
	end    context.CancelFunc

	producing chan struct{} // closed by stop
	stopOnce  sync.Once
	outMu     sync.Mutex // guards out and line
	out       *bufio.Writer
	line      []byte

	url, readURL, ca, topic, topics, rates   string
	sub, kind, ack, subs, from               string
	count, start, rate, idle, linger, keys   int64
	skip, fromTime, sendTimeout              int64
	size, consumers, lag                     int
	chunkSize                                uint
	batch, synchronous, chunk, replicatedSub bool
	reader, toEnd, ids, pattern              bool
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: godriver produce|consume|reader|live --flag value ...")
		os.Exit(2)
	}
	d := &driver{producing: make(chan struct{}), out: bufio.NewWriterSize(os.Stdout, 64<<10)}
	go func() {
		for range time.Tick(flushInterval) {
			d.flush()
		}
	}()
	defer d.flush()
	d.ctx, d.end = context.WithCancel(context.Background())
	flags := flag.NewFlagSet("godriver", flag.ExitOnError)
	flags.StringVar(&d.url, "url", "", "service URL")
	flags.StringVar(&d.readURL, "read-url", "", "service URL of the consumers and readers of live")
	flags.StringVar(&d.ca, "ca", "", "file of the trusted authority, for pulsar+ssl")
	flags.StringVar(&d.topic, "topic", "", "topic")
	flags.StringVar(&d.topics, "topics", "", "topics of live, comma-separated")
	flags.StringVar(&d.rates, "rates", "", "rates of live, comma-separated")
	flags.StringVar(&d.sub, "sub", "e2e", "subscription")
	flags.StringVar(&d.kind, "type", "exclusive", "subscription type")
	flags.StringVar(&d.ack, "ack", "individual", "individual or cumulative acknowledgements")
	flags.StringVar(&d.subs, "subs", "", "subscriptions of live: name:type:ack:consumers, comma-separated")
	flags.StringVar(&d.from, "from", "", "message id to begin behind, or to seek")
	flags.Int64Var(&d.fromTime, "from-time", 0, "ms since 1970 to seek")
	flags.Int64Var(&d.sendTimeout, "send-timeout", 0, "ms until a send without a receipt is an error")
	flags.Int64Var(&d.skip, "skip", 0, "numbers divisible by it are not acknowledged")
	flags.IntVar(&d.lag, "lag", 0, "messages in hand")
	flags.Int64Var(&d.count, "count", 1, "messages")
	flags.Int64Var(&d.start, "start", 0, "first number")
	flags.Int64Var(&d.rate, "rate", 0, "messages per second")
	flags.Int64Var(&d.idle, "idle", 120_000, "ms without a message")
	flags.Int64Var(&d.linger, "linger", 300, "ms after the last wanted message")
	flags.Int64Var(&d.keys, "keys", 0, "different keys")
	flags.UintVar(&d.chunkSize, "chunk-size", 0, "largest chunk")
	flags.IntVar(&d.size, "size", 64, "payload bytes")
	flags.IntVar(&d.consumers, "consumers", 1, "consumers")
	asBool := func(name string, into *bool, byDefault bool) {
		*into = byDefault
		flags.Func(name, "true or false", func(s string) (err error) { *into, err = strconv.ParseBool(s); return err })
	}
	asBool("batch", &d.batch, true)
	asBool("sync", &d.synchronous, false)
	asBool("chunk", &d.chunk, false)
	asBool("replicated", &d.replicatedSub, false)
	asBool("reader", &d.reader, false)
	asBool("to-end", &d.toEnd, false)
	asBool("ids", &d.ids, false)
	asBool("pattern", &d.pattern, false)
	_ = flags.Parse(os.Args[2:]) // ExitOnError

	client, err := d.connect(d.url)
	if err != nil {
		d.error("client", -1, err)
		d.emit(event{E: "done"})
		return
	}
	d.client = client
	switch os.Args[1] {
	case "produce":
		d.produce(d.topic, 0, d.rate, d.count)
	case "consume":
		d.consume()
	case "reader":
		d.read()
	case "live":
		d.live()
	default:
		fmt.Fprintf(os.Stderr, "unknown mode %q\n", os.Args[1])
		os.Exit(2)
	}
	client.Close()
	d.emit(event{E: "done"})
}

func (d *driver) connect(url string) (pulsar.Client, error) {
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	return pulsar.NewClient(pulsar.ClientOptions{
		URL: url, Logger: pulsarlog.NewLoggerWithSlog(logger), TLSTrustCertsFilePath: d.ca, TLSValidateHostname: d.ca != "",
	})
}

func (d *driver) produce(topic string, k int, rate, count int64) {
	options := pulsar.ProducerOptions{
		Topic: topic, DisableBatching: !d.batch || d.chunk, EnableChunking: d.chunk, ChunkMaxMessageSize: d.chunkSize, MaxPendingMessages: 2000,
		BatchingMaxPublishDelay: time.Millisecond, SendTimeout: time.Duration(d.sendTimeout) * time.Millisecond,
	}
	if d.keys > 0 {
		options.BatcherBuilderType = pulsar.KeyBasedBatchBuilder
	}
	producer, err := d.client.CreateProducer(options)
	if err != nil {
		d.error("producer", -1, err)
		return
	}
	d.emit(event{E: "ready", What: "producer", K: k})
	var outstanding sync.WaitGroup
	began := time.Now()
	for i := range count {
		if rate > 0 {
			d.pace(began.Add(time.Duration(float64(i) / float64(rate) * float64(time.Second))))
		}
		if d.stopped() {
			break
		}
		n := d.start + i
		message := &pulsar.ProducerMessage{Payload: payloadOf(n, d.size)}
		if d.keys > 0 {
			message.Key = fmt.Sprintf("key-%d", n%d.keys)
		}
		if d.synchronous {
			if _, err := producer.Send(d.ctx, message); err != nil {
				d.error("send", n, err)
			} else {
				d.acked(n, k, message.Payload)
			}
			continue
		}
		outstanding.Add(1)
		producer.SendAsync(d.ctx, message, func(_ pulsar.MessageID, m *pulsar.ProducerMessage, err error) {
			defer outstanding.Done()
			if err != nil {
				d.error("send", n, err)
				return
			}
			d.acked(n, k, m.Payload)
		})
	}
	if err := producer.FlushWithCtx(d.ctx); err != nil {
		d.error("flush", -1, err)
	}
	outstanding.Wait()
	producer.Close()
}

func (d *driver) acked(n int64, k int, payload []byte) {
	d.outMu.Lock()
	defer d.outMu.Unlock()
	d.message('a', n, payload)
	d.line = strconv.AppendInt(append(d.line, '\t'), int64(k), 10)
	d.write()
}

func (d *driver) pace(due time.Time) {
	wait := time.Until(due)
	if wait < shortestWait {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.producing:
	}
}

func (d *driver) stop() { d.stopOnce.Do(func() { close(d.producing) }) }

func (d *driver) stopped() bool {
	select {
	case <-d.producing:
		return true
	default:
		return false
	}
}

// sub is one subscription: name:type:ack:consumers.
type sub struct {
	name       string
	kind       pulsar.SubscriptionType
	cumulative bool
	consumers  int
}

func (d *driver) subscriptions() (all []sub, err error) {
	text := d.subs
	if text == "" {
		text = fmt.Sprintf("%s:%s:%s:%d", d.sub, d.kind, d.ack, d.consumers)
	}
	for one := range strings.SplitSeq(text, ",") {
		parts := strings.Split(one, ":")
		if len(parts) != 4 {
			return nil, fmt.Errorf("subscription %q, want name:type:ack:consumers", one)
		}
		kind, ok := map[string]pulsar.SubscriptionType{
			"exclusive": pulsar.Exclusive, "shared": pulsar.Shared, "failover": pulsar.Failover, "key_shared": pulsar.KeyShared,
		}[parts[1]]
		if !ok {
			return nil, fmt.Errorf("unknown subscription type %q", parts[1])
		}
		s := sub{name: parts[0], kind: kind, cumulative: parts[2] == "cumulative"}
		if s.consumers, err = strconv.Atoi(parts[3]); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// storedID is the id of -from, or the earliest.
func (d *driver) storedID() (pulsar.MessageID, error) {
	if d.from == "" {
		return pulsar.EarliestMessageID(), nil
	}
	data, err := base64.StdEncoding.DecodeString(d.from)
	if err != nil {
		return nil, err
	}
	return pulsar.DeserializeMessageID(data)
}

func (d *driver) subscribe(client pulsar.Client, topic string, k int, s sub, c int) (pulsar.Consumer, error) {
	options := pulsar.ConsumerOptions{
		SubscriptionName: s.name, Type: s.kind, Name: fmt.Sprintf("consumer-%d", c),
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, ReplicateSubscriptionState: d.replicatedSub,
	}
	if d.pattern {
		options.TopicsPattern = topic
	} else {
		options.Topics = strings.Split(topic, ",")
	}
	consumer, err := client.Subscribe(options)
	if err == nil && d.from != "" {
		var id pulsar.MessageID
		if id, err = d.storedID(); err == nil {
			err = consumer.Seek(id)
		}
	}
	if err == nil && d.fromTime > 0 {
		err = consumer.SeekByTime(time.UnixMilli(d.fromTime))
	}
	if err == nil {
		d.emit(event{E: "ready", What: "consumer", K: k, C: c})
	}
	return consumer, err
}

func (d *driver) consume() {
	tally := newTally(d)
	subs, err := d.subscriptions()
	if err != nil {
		d.error("flags", -1, err)
		return
	}
	var receiving sync.WaitGroup
	for c := range subs[0].consumers {
		consumer, err := d.subscribe(d.client, d.topic, 0, subs[0], c)
		if err != nil {
			d.error("subscribe", -1, err)
			continue
		}
		receiving.Go(func() { d.receiveAll(consumer, 0, subs[0], c, tally) })
	}
	receiving.Wait()
}

func (d *driver) receiveAll(consumer pulsar.Consumer, k int, s sub, c int, tally *tally) {
	defer consumer.Close()
	var inHand []pulsar.Message
	acknowledgeDownTo := func(lag int) {
		for ; len(inHand) > lag; inHand = inHand[1:] {
			acknowledge := consumer.Ack
			if s.cumulative {
				acknowledge = consumer.AckCumulative
			}
			if err := acknowledge(inHand[0]); err != nil {
				d.error("acknowledge", -1, err)
			}
		}
	}
	wait := waiting{parent: d.ctx}
	defer wait.end()
	for d.ctx.Err() == nil && (tally == nil || tally.goesOn()) {
		message, err := consumer.Receive(wait.context())
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			continue
		}
		if err != nil {
			d.error("receive", -1, err)
			return
		}
		d.received(message, k, s.name, c)
		if d.skip == 0 || numberOf(message.Payload())%d.skip != 0 {
			inHand = append(inHand, message)
		}
		acknowledgeDownTo(d.lag)
		if tally != nil {
			tally.one()
		}
	}
	acknowledgeDownTo(0)
}

// waiting hands out contexts that end within receiveWait, the same one for as long as it lasts: one for each message would cost more than the message.
type waiting struct {
	parent context.Context
	ctx    context.Context
	cancel context.CancelFunc
}

// receiveWait is how long is waited for a message before a consumer looks whether it is to end.
const receiveWait = 100 * time.Millisecond

func (w *waiting) context() context.Context {
	if w.ctx == nil || w.ctx.Err() != nil {
		w.end()
		w.ctx, w.cancel = context.WithTimeout(w.parent, receiveWait)
	}
	return w.ctx
}

func (w *waiting) end() {
	if w.cancel != nil {
		w.cancel()
	}
}

func (d *driver) openReader(client pulsar.Client, topic string, k int) (pulsar.Reader, error) {
	id, err := d.storedID()
	if err != nil {
		return nil, err
	}
	reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: id})
	if err == nil && d.fromTime > 0 {
		err = reader.SeekByTime(time.UnixMilli(d.fromTime))
	}
	if err == nil {
		d.emit(event{E: "ready", What: "reader", K: k})
	}
	return reader, err
}

func (d *driver) read() {
	reader, err := d.openReader(d.client, d.topic, 0)
	if err != nil {
		d.error("reader", -1, err)
		return
	}
	if !d.toEnd {
		d.readAll(reader, 0, newTally(d))
		return
	}
	defer reader.Close()
	for reader.HasNext() {
		message, err := reader.Next(d.ctx)
		if err != nil {
			d.error("read", -1, err)
			return
		}
		d.received(message, 0, "", 0)
	}
}

func (d *driver) readAll(reader pulsar.Reader, k int, tally *tally) {
	defer reader.Close()
	name := "reader"
	if tally != nil {
		name = ""
	}
	wait := waiting{parent: d.ctx}
	defer wait.end()
	for d.ctx.Err() == nil && (tally == nil || tally.goesOn()) {
		message, err := reader.Next(wait.context())
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			continue
		}
		if err != nil {
			d.error("read", -1, err)
			return
		}
		d.received(message, k, name, 0)
		if tally != nil {
			tally.one()
		}
	}
}

func (d *driver) received(message pulsar.Message, k int, s string, c int) {
	stored := ""
	if d.ids {
		stored = base64.StdEncoding.EncodeToString(message.ID().Serialize())
	}
	d.outMu.Lock()
	defer d.outMu.Unlock()
	d.message('r', numberOf(message.Payload()), message.Payload())
	for _, number := range []int{k, c} {
		d.line = strconv.AppendInt(append(d.line, '\t'), int64(number), 10)
	}
	for _, text := range []string{s, message.Key(), stored} {
		d.line = append(append(d.line, '\t'), text...)
	}
	d.write()
}

// message begins a line about a message.
func (d *driver) message(kind byte, n int64, payload []byte) {
	d.line = append(d.line[:0], kind)
	for _, number := range []int64{n, time.Now().UnixMicro(), int64(crc32.ChecksumIEEE(payload))} {
		d.line = strconv.AppendInt(append(d.line, '\t'), number, 10)
	}
}

func (d *driver) live() {
	topics, rates := strings.Split(d.topics, ","), strings.Split(d.rates, ",")
	var producers, consumers sync.WaitGroup
	reading, subs, err := d.client, []sub(nil), error(nil)
	if d.readURL != "" {
		if reading, err = d.connect(d.readURL); err != nil {
			d.error("client", -1, err)
			return
		}
		defer reading.Close()
	}
	if subs, err = d.subscriptions(); err != nil {
		d.error("flags", -1, err)
		return
	}
	for k, topic := range topics {
		for _, s := range subs {
			for c := range s.consumers {
				consumer, err := d.subscribe(reading, topic, k, s, c)
				if err != nil {
					d.error("subscribe", -1, err)
					return
				}
				consumers.Go(func() { d.receiveAll(consumer, k, s, c, nil) })
			}
		}
		if d.reader {
			reader, err := d.openReader(reading, topic, k)
			if err != nil {
				d.error("reader", -1, err)
				return
			}
			consumers.Go(func() { d.readAll(reader, k, nil) })
		}
	}
	for k, topic := range topics {
		rate, err := strconv.ParseInt(rates[k], 10, 64)
		if err != nil {
			d.error("rates", -1, err)
			return
		}
		producers.Go(func() { d.produce(topic, k, rate, math.MaxInt64) })
	}
	stopped := make(chan struct{})
	go func() {
		producers.Wait()
		d.emit(event{E: "stopped"})
		close(stopped)
	}()
	for in := bufio.NewScanner(os.Stdin); in.Scan() && in.Text() != "quit"; {
		if in.Text() == "stop" {
			d.stop()
		}
	}
	d.stop()
	<-stopped
	d.end()
	consumers.Wait()
}

// tally decides when a consume or reader run ends: after the wanted count and the linger, or when nothing comes any more.
type tally struct {
	want         int64
	idle, linger time.Duration
	seen, last   atomic.Int64 // last: ns since 1970
}

func newTally(d *driver) *tally {
	t := &tally{want: d.count, idle: time.Duration(d.idle) * time.Millisecond, linger: time.Duration(d.linger) * time.Millisecond}
	t.last.Store(time.Now().UnixNano())
	return t
}

func (t *tally) one() {
	t.last.Store(time.Now().UnixNano())
	t.seen.Add(1)
}

func (t *tally) goesOn() bool {
	limit := t.idle
	if t.seen.Load() >= t.want {
		limit = t.linger
	}
	return time.Now().UnixNano()-t.last.Load() < int64(limit)
}

// payloadOf is the number, a semicolon, then printable filler that differs from number to number.
func payloadOf(n int64, size int) []byte {
	payload := append(strconv.AppendInt(make([]byte, 0, max(size, 24)), n, 10), ';')
	for i := int64(len(payload)); i < int64(size); i++ {
		payload = append(payload, byte(' '+(n+i)%90))
	}
	return payload
}

// numberOf undoes payloadOf; -1 for a payload that is not one.
func numberOf(payload []byte) int64 {
	head, _, ok := bytes.Cut(payload[:min(len(payload), 24)], []byte(";"))
	n, err := strconv.ParseInt(string(head), 10, 64)
	if !ok || err != nil {
		return -1
	}
	return n
}

func nowMillis() float64 { return float64(time.Now().UnixMicro()) / 1000 }

func (d *driver) error(what string, n int64, err error) {
	d.emit(event{E: "error", What: what, N: &n, T: nowMillis(), Text: err.Error()})
}

func (d *driver) emit(e event) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // every field can be marshalled
	}
	d.outMu.Lock()
	defer d.outMu.Unlock()
	d.line = append(d.line[:0], line...)
	d.write()
}

// write ends a line. A reader that went away ends this process by SIGPIPE.
func (d *driver) write() { _, _ = d.out.Write(append(d.line, '\n')) }

func (d *driver) flush() {
	d.outMu.Lock()
	defer d.outMu.Unlock()
	_ = d.out.Flush()
}
