//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// What goes wrong while a topic drains, and what its consumers may do meanwhile: docs/adr/007-drain.md.

// gathered is what a subscription of the test's own got of numbered messages.
type gathered struct {
	mu    sync.Mutex
	got   []int64       // in the order in which they came
	times map[int64]int // how often
	held  []func() error
	let   bool // nothing is held any more
}

// take has a consumer receive until the test is over. Of the messages for which keep says so, it keeps those that it has for the first time in hand, or asks for them again and again, until letGo.
func (n *gathered) take(t *testing.T, consumer pulsar.Consumer, keep func(number int64) (hold, again bool)) {
	t.Helper()
	n.mu.Lock()
	if n.times == nil {
		n.times = map[int64]int{}
	}
	n.mu.Unlock()
	ctx := t.Context()
	go func() {
		for {
			m, err := consumer.Receive(ctx)
			if err != nil {
				return // it is closed
			}
			number := numberIn(m.Payload())
			hold, again := keep(number)
			n.mu.Lock()
			n.got = append(n.got, number)
			n.times[number]++
			switch {
			case !n.let && hold:
				n.held = append(n.held, func() error { return consumer.Ack(m) })
			case !n.let && again:
				consumer.Nack(m)
			default:
				_ = consumer.Ack(m) // one that is lost comes again, and is seen
			}
			n.mu.Unlock()
		}
	}()
}

// letGo acknowledges what is held, and everything that comes from now on.
func (n *gathered) letGo() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.let = true
	for _, ack := range n.held {
		_ = ack() // of a consumer that is closed: it comes again
	}
	n.held = nil
}

// await waits until every number from first to last has come.
func (n *gathered) await(t *testing.T, who string, first, last int64) {
	t.Helper()
	missing := int64(0)
	if err := WaitUntil(limited(t, catchUpLimit), fmt.Sprintf("%s to have %d to %d", who, first, last), func() (bool, error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		for missing = first; missing <= last; missing++ {
			if n.times[missing] == 0 {
				return false, nil
			}
		}
		return true, nil
	}); err != nil {
		t.Fatalf("%v: %d is missing", err, missing)
	}
}

// highest is the highest number that has come.
func (n *gathered) highest() (highest int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for number := range n.times {
		highest = max(highest, number)
	}
	return highest
}

// firstCopies are the numbers of a key, which is number % keys, in the order in which each has come first.
func (n *gathered) firstCopies(key, keys int64) (first []int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	seen := map[int64]bool{}
	for _, number := range n.got {
		if number%keys == key && !seen[number] {
			seen[number] = true
			first = append(first, number)
		}
	}
	return first
}

// numberIn is the number that a driver, or sendKeyed, has put into a payload.
func numberIn(payload []byte) int64 {
	head, _, _ := strings.Cut(string(payload[:min(len(payload), 24)]), ";")
	number, err := strconv.ParseInt(head, 10, 64)
	if err != nil {
		return -1
	}
	return number
}

// sendKeyed publishes the numbers from first to last, each with one of some keys and its receipt.
func sendKeyed(t *testing.T, c pulsar.Client, topic string, first, last, keys int64) {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	p, err := c.CreateProducer(pulsar.ProducerOptions{Topic: topic, DisableBatching: true})
	must(t, err)
	defer p.Close()
	for n := first; n <= last; n++ {
		_, err := p.Send(ctx, &pulsar.ProducerMessage{Key: strconv.FormatInt(n%keys, 10), Payload: fmt.Appendf(nil, "%d;", n)})
		must(t, err)
	}
}

// draining is the drain that the map has of a topic.
func draining(t *testing.T, st store.Store, topic string) route.Drain {
	t.Helper()
	e, ok, err := st.Entry(limited(t, 20*time.Second), topic)
	must(t, err)
	if !ok || e.State != route.StateDraining {
		t.Fatalf("%s: %+v, %v; want it to drain", topic, e, ok)
	}
	d, err := route.ParseDrain(e.Drain)
	must(t, err)
	return d
}

// The leader is killed while the topic is fenced, and again while it drains: another proxy goes on, and nothing is lost. A subscription that nobody consumes keeps the drain open until then.
func TestADrainOutlivesItsLeaders(t *testing.T) {
	for _, client := range someClients(Go) {
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			drainOutlivesItsLeaders(t, client)
		})
	}
}

func drainOutlivesItsLeaders(t *testing.T, client Client) {
	proxies := faultyPair(t, "drain-kill-"+string(client))
	topic := newTopic("acme/plain", "drain-kill")
	setRoute(t, proxies[0], topic, "a")
	awaitRouteOn(t, proxies[1], topic, "a")
	subscribeAt(t, session(t, proxies[1]), topic, "late").Close()
	l := startLoad(t, loadConfig{
		scenario: "the leading proxy is killed in the fence and while the topic drains", mode: switching.ModeDrain, class: classFaults, client: client, topic: topic, rate: 200, keys: 20, proxies: proxies,
		subs:  []string{"exclusive:exclusive:individual:1", "cumulative:failover:cumulative:1", "shared:shared:individual:2", "key-shared:key_shared:individual:2"},
		flags: patient(client),
	})
	st := openMap(t, proxies[0])
	kill := func(p *Pointsman) {
		p.Proc.Signal(syscall.SIGKILL)
		must(t, p.Proc.WaitEnd(10*time.Second))
	}
	var rec switching.Record
	for attempt := 1; ; attempt++ {
		leader, _ := leaderOf(t, proxies)
		l.began = append(l.began, nowMillis())
		rec = requestMode(t, st, topic, rig.B, switching.ModeDrain)
		rec = awaitRecord(t, st, rec, 30*time.Second, "to be prepared", func(r switching.Record) bool { return r.State != switching.StateRequested })
		pass(time.Duration(rand.Int64N(150)) * time.Millisecond)
		at, err := st.Switch(limited(t, 10*time.Second), rec.ID)
		must(t, err)
		kill(leader)
		must(t, leader.Start(limited(t, 40*time.Second)))
		rec = awaitRecord(t, st, rec, 60*time.Second, "to drain or to be aborted", func(r switching.Record) bool { return r.State.Over() || r.State == switching.StateDraining })
		t.Logf("attempt %d: %s killed when the switch was %s: it is %s: %s %s", attempt, leader.Name, at.State, rec.State, rec.Note, holdSteps(rec))
		if rec.State == switching.StateDraining {
			break
		}
		if rec.State != switching.StateAborted || attempt == 4 {
			t.Fatalf("the switch ended as %s: %s\n%s", rec.State, rec.Note, steps(rec))
		}
		l.flow("after an abort")
	}
	l.flow("with a subscription that still drains")
	if d := draining(t, st, topic); len(d.Subs) != 1 || d.Subs[0].Name != "late" {
		t.Errorf("on the old cluster are %+v, want what nobody consumes", d.Subs)
	}
	leader, other := leaderOf(t, proxies)
	kill(leader)
	awaitSuccessor(t, proxies, other)
	must(t, leader.Start(limited(t, 40*time.Second)))
	late := &gathered{}
	late.take(t, subscribeAt(t, session(t, leader), topic, "late"), func(int64) (bool, bool) { return false, false })
	rec = awaitSwitch(t, st, rec)
	wantDone(t, rec, rig.B, nil)
	if rec.Receipt.MovedCount != len(l.c.subs)+1 {
		t.Errorf("moved: %+v, want all %d subscriptions", rec.Receipt.Moved, len(l.c.subs)+1)
	}
	l.moved(rec, rig.B)
	l.flow("after the drain")
	l.nothingNewOn(rec)
	l.end(false) // who is cut off gets again what was in flight
	last := int64(0)
	for m := range l.driver.Record().Acks.All() {
		last = max(last, m.N)
	}
	late.await(t, "the subscription that was late", 0, last)
	for key := range l.c.keys {
		if first := late.firstCopies(key, l.c.keys); !slices.IsSorted(first) {
			t.Errorf("key %d of the subscription that was late is out of order: %v", key, first)
		}
	}
}

// Messages in hand, messages that are asked for again and again, and a consumer that ends with messages in hand: a Shared and a Key_Shared subscription stay on the old cluster until everything there is
// acknowledged, and get nothing of the new one before. What was acknowledged does not come again.
func TestDrainWaitsForEveryHole(t *testing.T) {
	t.Parallel()
	const onOld, all, keys = 200, 300, 8
	topic := onA(t, "holes")
	st := openMap(t, pair(t)[0])
	c := session(t, pair(t)[1])
	open := func(name string, kind pulsar.SubscriptionType) pulsar.Consumer {
		consumer, err := c.Subscribe(pulsar.ConsumerOptions{
			Topic: topic, SubscriptionName: name, Type: kind, SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest, NackRedeliveryDelay: 300 * time.Millisecond, ReceiverQueueSize: 50, AckGroupingOptions: acksAtOnce,
		})
		must(t, err)
		return consumer
	}
	keep := func(n int64) (hold, again bool) { return n%10 == 3, n%10 == 7 }
	subs := map[string]*gathered{"shared": {}, "keyed": {}}
	var ends pulsar.Consumer
	for name, kind := range map[string]pulsar.SubscriptionType{"shared": pulsar.Shared, "keyed": pulsar.KeyShared} {
		for range 2 {
			consumer := open(name, kind)
			subs[name].take(t, consumer, keep)
			if kind == pulsar.Shared {
				ends = consumer
			}
		}
	}
	sendKeyed(t, c, topic, 1, onOld, keys)
	for name, got := range subs {
		got.await(t, name, 1, onOld)
	}
	rec := drains(t, topic)
	sendKeyed(t, c, topic, onOld+1, all, keys)
	ends.Close()
	stay := func(when string) {
		t.Helper()
		if d := draining(t, st, topic); d.Gone != 0 || len(d.Subs) != len(subs) {
			t.Errorf("%s %d subscriptions have left, %+v are there: with messages that are not acknowledged none may leave", when, d.Gone, d.Subs)
		}
		for name, got := range subs {
			if n := got.highest(); n > onOld {
				t.Errorf("%s %s has %d, which is of the new cluster, and messages on the old one that are not acknowledged", when, name, n)
			}
		}
	}
	pass(3 * time.Second)
	stay("after 3 s")
	subs["shared"].letGo()
	subs["shared"].await(t, "shared", 1, all)
	if n := subs["keyed"].highest(); n > onOld {
		t.Errorf("keyed has %d of the new cluster: only the other subscription may leave", n)
	}
	if d := draining(t, st, topic); d.Gone != 1 || len(d.Subs) != 1 || d.Subs[0].Name != "keyed" {
		t.Errorf("%d subscriptions have left, %+v are there; want one, and the one with messages in hand", d.Gone, d.Subs)
	}
	subs["keyed"].letGo()
	rec, err := tryPlanned(t, pair(t)[0], "watch", rec.ID)
	wantDone(t, rec, rig.B, err)
	for name, got := range subs {
		got.await(t, name, 1, all)
		got.mu.Lock()
		for n, times := range got.times {
			if hold, again := keep(n); times != 1 && !(n <= onOld && (hold || again)) {
				t.Errorf("%s got %d %d times, and had acknowledged it", name, n, times)
			}
		}
		got.mu.Unlock()
	}
	for key := range int64(keys) {
		if first := subs["keyed"].firstCopies(key, keys); !slices.IsSorted(first) {
			t.Errorf("key %d of the Key_Shared subscription is out of order: %v", key, first)
		}
	}
}

// Applications of every client that leave messages unacknowledged for ever, and have others in hand: the drain waits for whoever comes after them.
func TestDrainWaitsForWhatApplicationsLeave(t *testing.T) {
	if !full {
		t.Skip("E2E_FULL=1: TestDrainWaitsForEveryHole has the same by hand")
	}
	for _, client := range artifacts.Clients {
		if client == Rust { // it acknowledges whole batches
			continue
		}
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			const skip, lag, keys = 10, 20, 10
			topic := onA(t, "left-"+string(client))
			st := openMap(t, pair(t)[0])
			live := startDriver(t, client, "live", "--url", pair(t)[0].URL, "--read-url", pair(t)[1].URL, "--topics", topic, "--rates", "200", "--keys", strconv.Itoa(keys),
				"--subs", "shared:shared:individual:2,keyed:key_shared:individual:2", "--skip", strconv.Itoa(skip), "--lag", strconv.Itoa(lag))
			await(t, live, "messages", func(r Record) bool { return r.Recvs.Len() >= 400 })
			rec := drains(t, topic)
			flipped := live.Record().Acks.Len()
			await(t, live, "messages on the new cluster", func(r Record) bool { return r.Acks.Len() >= flipped+200 })
			must(t, live.Say("stop"))
			await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
			if d := draining(t, st, topic); d.Gone != 0 || len(d.Subs) != 2 {
				t.Errorf("%d subscriptions have left, %+v are there: with messages that are not acknowledged none may leave", d.Gone, d.Subs)
			}
			must(t, live.Say("quit"))
			record := finish(t, 30*time.Second, live)
			c := session(t, pair(t)[1])
			for name, kind := range map[string]pulsar.SubscriptionType{"shared": pulsar.Shared, "keyed": pulsar.KeyShared} {
				consumer, err := c.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: name, Type: kind})
				must(t, err)
				rest := &gathered{}
				rest.take(t, consumer, func(int64) (bool, bool) { return false, false })
				had := map[int64]bool{}
				for m := range record.Recvs.All() {
					had[m.N] = had[m.N] || m.S == name
				}
				must(t, WaitUntil(limited(t, catchUpLimit), name+" to have what is left", func() (bool, error) {
					rest.mu.Lock()
					defer rest.mu.Unlock()
					for m := range record.Acks.All() {
						if rest.times[m.N] == 0 && (!had[m.N] || m.N%skip == 0) { // the application has not acknowledged it
							return false, nil
						}
					}
					return true, nil
				}))
			}
			rec, err := tryPlanned(t, pair(t)[0], "watch", rec.ID)
			wantDone(t, rec, rig.B, err)
		})
	}
}

// refusedBack is what the refusal of a way back says.
func refusedBack(t *testing.T, id string) string {
	t.Helper()
	var refused *CLIError
	if err := pair(t)[1].CLI(limited(t, 30*time.Second), nil, "switch", "reverse", id, "--force"); !errors.As(err, &refused) {
		t.Fatalf("the way back of %s was not refused: %v", id, err)
	}
	return refused.Output
}

// takenBack leads a topic that drains back to its old cluster.
func takenBack(t *testing.T, p *Pointsman, id string) switching.Record {
	t.Helper()
	rec, err := tryPlanned(t, p, "reverse", id)
	if rec.State != switching.StateReturned {
		t.Fatalf("the way back ended as %s: %s; %v\n%s", rec.State, rec.Note, err, steps(rec))
	}
	return rec
}

// Under load a drain is taken back: what was published on the new cluster comes behind what the old one had, and nothing is lost.
func TestDrainIsTakenBackUnderLoad(t *testing.T) {
	for _, client := range someClients(Go) {
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: "taken back while it drains", mode: switching.ModeDrain, class: classTakenBack, client: client, topic: newTopic("acme/plain", "back-"+string(client)), rate: 200, keys: 20,
				subs: drainKinds, flags: lagging,
			})
			l.drainAndBack(often(1, 5))
			l.end(false) // a consumer that gets a message within a fence is closed, and gets again what it has in hand
		})
	}
}

// lagging has consumers keep some messages in hand, so that no subscription ever has acknowledged everything.
var lagging = []string{"--lag", "5"}

// drainAndBack begins to drain the topic and takes it back, that many times.
func (l *load) drainAndBack(times int) {
	l.t.Helper()
	const published = 100 // on the new cluster, at least
	from, to := l.c.clusters[0], l.c.clusters[1]
	for i := range times {
		l.began = append(l.began, nowMillis())
		rec := drainsTo(l.t, l.c.proxies[0], l.c.topic, to)
		acked := l.driver.Record().Acks.Len()
		await(l.t, l.driver, "messages on the new cluster", func(r Record) bool { return r.Acks.Len() >= acked+published })
		l.began = append(l.began, nowMillis())
		rec = takenBack(l.t, l.c.proxies[1], rec.ID)
		l.t.Logf("way back %d: %d entries copied, hold %.0f ms, evicted %v: %s %s", i+1, rec.Receipt.Copied, rec.Receipt.HoldMillis, rec.Receipt.Evicted, rec.Note, holdSteps(rec))
		if rec.Receipt.Copied == 0 {
			l.t.Errorf("nothing was copied back, though %d messages at least were published on cluster %s", published, to.Name)
		}
		l.moved(rec, from)
		l.flow("after the way back")
		wantActive(l.t, openMap(l.t, l.c.proxies[0]), l.c.topic, from.Name)
	}
}

// A way back that has to be given up after it has copied: the topic drains on, and exactly what was copied comes twice, as the receipt says.
func TestAWayBackThatIsGivenUpCostsWhatItHasCopied(t *testing.T) {
	if !full {
		t.Skip("it waits for the end of a fence: E2E_FULL=1")
	}
	t.Parallel()
	topic := onA(t, "given-up")
	c := session(t, pair(t)[1])
	consumer := subscribeAt(t, c, topic, "s")
	send(t, c, topic, 1, 30)
	got, held := receiveBut(t, consumer, 30)
	rec := drains(t, topic)
	send(t, c, topic, 31, 60)
	stranger, err := goClient(t, rig.B).CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "past-the-proxies-" + topic[len(topic)-8:]})
	must(t, err)
	rec, err = tryPlanned(t, pair(t)[1], "reverse", rec.ID, "--force")
	if rec.State != switching.StateDraining || rec.Return || !strings.Contains(rec.Note, "the way back was given up") || !strings.Contains(rec.Note, stranger.Name()) {
		t.Fatalf("with somebody who publishes past the proxies the way back ended as %s: %s; %v\n%s", rec.State, rec.Note, err, steps(rec))
	}
	if rec.Receipt.Copied != 30 {
		t.Errorf("the receipt says that %d were copied, want 30", rec.Receipt.Copied)
	}
	stranger.Close()
	must(t, consumer.Ack(held))
	again := receive(t, consumer, 60)
	if want := append(inOrder(31, 60), inOrder(31, 60)...); !slices.Equal(append(got, "30"), inOrder(1, 30)) || !slices.Equal(again, want) {
		t.Errorf("%q, and then %q; want what was copied on the old cluster, and again on the new one", got, again)
	}
	rec, err = tryPlanned(t, pair(t)[0], "watch", rec.ID)
	wantDone(t, rec, rig.B, err)
	nothing(t, consumer)
}

// receiveBut is receive of n messages, of which the last one stays in hand.
func receiveBut(t *testing.T, c pulsar.Consumer, n int) (got []string, held pulsar.Message) {
	t.Helper()
	got = receive(t, c, n-1)
	held, err := c.Receive(limited(t, 20*time.Second))
	must(t, err)
	return got, held
}

// receiveBehind is receive for a consumer that had a message in hand: whoever is closed for a fence gets that again when its acknowledgement comes later.
func receiveBehind(t *testing.T, c pulsar.Consumer, held string, n int) []string {
	t.Helper()
	got := receive(t, c, n)
	if got[0] == held {
		got = append(got[1:], receive(t, c, 1)...)
	}
	return got
}

// The way back is open while nobody has had a message on the new cluster. A subscription that was made there meanwhile, and has had none, is brought along; one that has had one closes it.
func TestTheWayBackEndsWithTheFirstMessageOnTheNewCluster(t *testing.T) {
	t.Parallel()
	topic := onA(t, "first-message")
	c := session(t, pair(t)[1])
	consumer := subscribeAt(t, c, topic, "s")
	send(t, c, topic, 1, 10)
	got, held := receiveBut(t, consumer, 10)
	rec := drains(t, topic)
	subscribeAt(t, c, topic, "idle").Close()
	send(t, c, topic, 11, 20)
	back := takenBack(t, pair(t)[1], rec.ID)
	if back.Receipt.Copied != 10 {
		t.Errorf("%d were copied, want 10", back.Receipt.Copied)
	}
	idle := subscribeAt(t, c, topic, "idle")
	if first := receive(t, idle, 9); !slices.Equal(first, inOrder(11, 19)) {
		t.Errorf("the subscription that was made on cluster b: %q, want 11 to 19", first)
	}
	idle.Close() // with one left, so that it stays on the old cluster
	must(t, consumer.Ack(held))
	if got = append(got, receiveBehind(t, consumer, "10", 9)...); !slices.Equal(got, append(inOrder(1, 9), inOrder(11, 19)...)) {
		t.Errorf("s: %q", got)
	}
	held, err := consumer.Receive(limited(t, 20*time.Second))
	must(t, err)

	rec = drains(t, topic)
	send(t, c, topic, 21, 30)
	eager := subscribeAt(t, c, topic, "eager")
	// What was published there before the first way back is still in the log of b: it begins there, and not with what a has.
	if first := receive(t, eager, 1); !slices.Equal(first, []string{"11"}) {
		t.Errorf("a subscription that is made while the topic drains begins with %q, want the first message of the new cluster", first)
	}
	if text := refusedBack(t, rec.ID); !strings.Contains(text, "had messages on cluster b already") || !strings.Contains(text, "eager") || strings.Contains(text, "idle") || !strings.Contains(text, "drain from b to a") {
		t.Errorf("the refusal does not say who had messages, and what to do: %s", text)
	}
	must(t, consumer.Ack(held))
	idle = subscribeAt(t, c, topic, "idle")
	if rest := receive(t, idle, 1); !slices.Equal(rest, []string{"20"}) {
		t.Errorf("idle on cluster a: %q", rest)
	}
	if rest := receiveBehind(t, consumer, "20", 10); !slices.Equal(rest, inOrder(21, 30)) {
		t.Errorf("s on cluster b: %q", rest)
	}
	rec, err = tryPlanned(t, pair(t)[0], "watch", rec.ID)
	wantDone(t, rec, rig.B, err)
	if rest := receive(t, idle, 10); !slices.Equal(rest, inOrder(21, 30)) { // what was copied to a does not come a second time
		t.Errorf("idle on cluster b: %q", rest)
	}
	if rest := receive(t, eager, 19); !slices.Equal(rest, inOrder(12, 30)) {
		t.Errorf("eager: %q", rest)
	}
	// By now it is an ordinary topic of b: back it goes by a drain of its own.
	backwards, err := tryPlanned(t, pair(t)[1], "reverse", rec.ID, "--force")
	if backwards.ID == "" {
		t.Fatal(err)
	}
	backwards, err = tryPlanned(t, pair(t)[0], "watch", backwards.ID)
	wantDone(t, backwards, rig.A, err)
	if backwards.From != "b" || backwards.To != "a" {
		t.Errorf("reversed from %s to %s", backwards.From, backwards.To)
	}
	send(t, c, topic, 31, 40)
	for _, s := range []pulsar.Consumer{consumer, eager, idle} {
		if rest := receive(t, s, 10); !slices.Equal(rest, inOrder(31, 40)) {
			t.Errorf("%s after the drain back: %q", s.Subscription(), rest)
		}
	}
}

// Readers do not close the way back: one that had messages of the new cluster has what comes next on the old one, and none of them again.
func TestTheWayBackTakesReadersAlong(t *testing.T) {
	t.Parallel()
	topic := onA(t, "reader-back")
	c := session(t, pair(t)[1])
	consumer := subscribeAt(t, c, topic, "s")
	send(t, c, topic, 1, 10)
	got, held := receiveBut(t, consumer, 10)
	rec := drains(t, topic)
	reader, err := c.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.LatestMessageID()})
	must(t, err)
	defer reader.Close()
	read := func(first, last int) {
		t.Helper()
		ctx := limited(t, 30*time.Second)
		for _, want := range inOrder(first, last) {
			if m, err := reader.Next(ctx); err != nil || string(m.Payload()) != want {
				t.Fatalf("the reader waits for %s and has %v, %v", want, m, err)
			}
		}
	}
	send(t, c, topic, 11, 20)
	read(11, 20)
	if back := takenBack(t, pair(t)[1], rec.ID); back.Receipt.Copied != 10 {
		t.Errorf("%d were copied, want 10", back.Receipt.Copied)
	}
	send(t, c, topic, 21, 30)
	read(21, 30)
	must(t, consumer.Ack(held))
	if got = append(got, receiveBehind(t, consumer, "10", 20)...); !slices.Equal(got, append(inOrder(1, 9), inOrder(11, 30)...)) {
		t.Errorf("s: %q", got)
	}
}
