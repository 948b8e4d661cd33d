package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/internal/admin"
	"pointsman/internal/testkit"
)

// evicted is how many producers and consumers were told that their topic moved.
func (r *rig) evicted() (producers, consumers uint64) {
	for _, sh := range r.app.shards {
		producers += sh.Counters().EvictedProducers.Load()
		consumers += sh.Counters().EvictedConsumers.Load()
	}
	return producers, consumers
}

// SW-07: a consumer without traffic moves at once, not with its next message.
func TestAnIdleConsumerMovesAtOnce(t *testing.T) {
	const topic = "persistent://public/default/idle-consumer"
	r := newRig(t, testkit.Options{}, nil)
	consumer := followAs(t, r.app.PulsarAddr(), topic, "s", testkit.Shared)
	awaitCluster(t, r.a, "the consumer", func() bool {
		info, _ := r.a.Topic(topic)
		return len(info.Subscriptions["s"].Consumers) == 1
	})
	start := time.Now()
	if err := r.switchTo(t, "b", topic); err != nil {
		t.Fatal(err)
	}
	awaitCluster(t, r.b, "the consumer", func() bool {
		info, _ := r.b.Topic(topic)
		return len(info.Subscriptions["s"].Consumers) == 1
	})
	t.Logf("the idle consumer was on b %s after the command", time.Since(start))
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("it took %s", d)
	}
	awaitClients(t, r.a, topic, 0, 0)
	r.b.Publish(topic, "p", 1, []byte("x"))
	consumer.mustReceive(1)
}

// Clients of a namespace that moves are told the broker that owns their topic there, like those of a single topic.
func TestClientsOfANamespaceAreToldWhereToGo(t *testing.T) {
	const topic, namespace = "persistent://public/live/t", "public/live"
	r := newRig(t, testkit.Options{}, nil)
	r.route(t, namespace, "a")
	home := r.bridge(t, topic)
	home.produce(topic, "", 1)
	if _, err := r.admin.StartSwitch(t.Context(), admin.SwitchRequest{Namespace: namespace, To: "b", Mode: "immediate"}); err != nil {
		t.Fatal(err)
	}
	told := home.expect(codec.TypeCloseProducer).GetCloseProducer()
	if got, want := told.GetAssignedBrokerServiceUrl(), "pulsar://"+r.owner(t, topic); got != want {
		t.Errorf("the client was sent to %q, the owner on b is %q", got, want)
	}
}

// SW-12: one client has many topics over a few connections; one topic is switched. The others see nothing of it.
func TestOneTopicOfABusyConnectionMovesAlone(t *testing.T) {
	n := scaled(500)
	const moved = 7
	r := newRig(t, testkit.Options{}, nil)
	name := func(i int) string { return fmt.Sprintf("persistent://public/default/busy-%d", i) }
	lookups, bridges, home := r.connect(t, ""), map[string]*peer{}, make([]*peer, n)
	for i := range n {
		lookups.send(lookupCommand(name(i), uint64(i)))
		target := lookups.target()
		if bridges[target] == nil {
			bridges[target] = r.connect(t, target)
		}
		home[i] = bridges[target]
		home[i].produce(name(i), "", uint64(i))
	}
	created := r.a.Count(codec.TypeProducer)
	if err := r.switchTo(t, "b", name(moved)); err != nil {
		t.Fatal(err)
	}
	told := home[moved].expect(codec.TypeCloseProducer).GetCloseProducer()
	if told.GetProducerId() != moved || told.GetRequestId() != codec.NoRequest || told.GetAssignedBrokerServiceUrl() == "" {
		t.Errorf("the client was told %v", told)
	}
	for i := range n {
		p := home[i]
		if i == moved {
			p = r.connect(t, strings.TrimPrefix(told.GetAssignedBrokerServiceUrl(), "pulsar://"))
			p.produce(name(i), "", moved)
		}
		p.publish(uint64(i), 1, []byte("x")) // the next frame is its receipt: nothing else was said on any connection
		want, other := r.a, r.b
		if i == moved {
			want, other = r.b, r.a
		}
		if got, not := len(want.Messages(name(i))), len(other.Messages(name(i))); got != 1 || not != 0 {
			t.Errorf("topic %d: %d messages on %s and %d on %s", i, got, want.Name(), not, other.Name())
		}
	}
	if got, _ := r.evicted(); got != 1 {
		t.Errorf("%d producers were told to move, want 1", got)
	}
	if got := r.a.Count(codec.TypeProducer) - created; got != 0 {
		t.Errorf("%d producers were created anew on a", got)
	}
	if got := dataConns(r.a); len(got) != len(bridges) {
		t.Errorf("%d connections to a, want the %d of before", len(got), len(bridges))
	}
}

// A change of the map that would move live clients is refused without --immediate, with how many; with it they move.
func TestRoutesOfLiveTopicsMoveOnlyWhenToldSo(t *testing.T) {
	const topic, namespace = "persistent://public/live/t", "public/live"
	immediately := admin.ChangeOptions{Immediate: true}
	r := newRig(t, testkit.Options{}, nil)
	producer := follow(t, r.app.PulsarAddr(), topic, "", 0)
	consumer := followAs(t, r.app.PulsarAddr(), topic, "s", testkit.Shared)
	producer.mustSend(1)
	consumer.mustReceive(1)
	bystander := r.bridge(t, "persistent://public/bystander/t")
	bystander.produce("persistent://public/bystander/t", "", 1)
	on := r.a
	steps := []struct {
		name   string
		to     *testkit.Cluster
		change func(admin.ChangeOptions) error
	}{
		{"routes set TOPIC", r.b, func(o admin.ChangeOptions) error {
			_, err := r.admin.Set(t.Context(), admin.SetRequest{Name: topic, Cluster: "b", ChangeOptions: o})
			return err
		}},
		{"routes rm TOPIC", r.a, func(o admin.ChangeOptions) error {
			_, err := r.admin.Remove(t.Context(), admin.RemoveRequest{Name: topic, ChangeOptions: o})
			return err
		}},
		{"routes set NAMESPACE", r.b, func(o admin.ChangeOptions) error {
			_, err := r.admin.Set(t.Context(), admin.SetRequest{Name: namespace, Cluster: "b", ChangeOptions: o})
			return err
		}},
		{"routes import", r.a, func(o admin.ChangeOptions) error {
			_, err := r.admin.Import(t.Context(), admin.ImportRequest{Routes: []admin.ImportItem{{Name: namespace, Cluster: "a"}, {Name: "public/bystander", Cluster: "a"}, {Name: "public/elsewhere", Cluster: "b"}}, ChangeOptions: o})
			return err
		}},
		{"routes set TENANT, overruled by namespaces", nil, func(o admin.ChangeOptions) error { // moves nothing of ours: the namespace decides
			_, err := r.admin.Set(t.Context(), admin.SetRequest{Name: "public", Cluster: "b", ChangeOptions: o})
			return err
		}},
		{"routes rm NAMESPACE", r.b, func(o admin.ChangeOptions) error {
			_, err := r.admin.Remove(t.Context(), admin.RemoveRequest{Name: namespace, ChangeOptions: o})
			return err
		}},
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			digest := r.app.Table().Digest()
			producers, consumers := r.evicted()
			err := s.change(admin.ChangeOptions{})
			if s.to == nil {
				if err != nil {
					t.Errorf("it moves no client and was refused: %v", err)
				}
				producer.mustSend(1)
				consumer.mustReceive(1)
				if p, c := r.evicted(); p != producers || c != consumers {
					t.Errorf("%d producers and %d consumers were told to move", p-producers, c-consumers)
				}
				return
			}
			var refused *admin.Error
			if !errors.As(err, &refused) || refused.Code != admin.CodeLiveClients || refused.Remedy == "" || len(refused.Details) == 0 ||
				refused.Details[0].Producers != 1 || refused.Details[0].Consumers != 1 {
				t.Fatalf("without --immediate: %v, want a refusal with one producer and one consumer", err)
			}
			if got := r.app.Table().Digest(); got != digest {
				t.Error("the map changed although the change was refused")
			}
			producer.mustSend(1)
			consumer.mustReceive(1)
			before := len(on.Messages(topic))

			if err := s.change(immediately); err != nil {
				t.Fatal(err)
			}
			awaitClients(t, s.to, topic, 1, 1)
			awaitClients(t, on, topic, 0, 0) // or those that have yet to leave would count in the next step
			producer.mustSend(5)
			consumer.mustReceive(5)
			if p, c := r.evicted(); p != producers+1 || c != consumers+1 {
				t.Errorf("%d producers and %d consumers were told to move, want one each", p-producers, c-consumers)
			}
			if got := len(on.Messages(topic)); got != before {
				t.Errorf("%d messages went to %s after the change", got-before, on.Name())
			}
			on = s.to
		})
	}
	bystander.publish(1, 1, []byte("x")) // its receipt is the first thing that it hears
}

// A non-persistent topic moves in immediate mode.
func TestANonPersistentTopicMoves(t *testing.T) {
	const topic = "non-persistent://public/default/volatile"
	r := newRig(t, testkit.Options{}, nil)
	consumer := followAs(t, r.app.PulsarAddr(), topic, "s", testkit.Shared)
	producer := follow(t, r.app.PulsarAddr(), topic, "", 0)
	producer.mustSend(1)
	if err := r.switchTo(t, "b", topic); err != nil {
		t.Fatal(err)
	}
	awaitCluster(t, r.b, "both clients, and permits", func() bool {
		info, _ := r.b.Topic(topic)
		return len(info.Producers) == 1 && len(info.Subscriptions["s"].Consumers) == 1 && info.Subscriptions["s"].Permits > 0
	})
	producer.mustSend(5)
	consumer.mustReceive(5)
	if _, ok := r.b.Topic("persistent://public/default/volatile"); ok {
		t.Error("its persistent namesake was made")
	}
}

// All partitions of a partitioned topic move together; the base name's entry decides for each of them.
func TestAllPartitionsMove(t *testing.T) {
	const topic, partitions = "persistent://public/default/partitioned", 5
	r := newRig(t, testkit.Options{}, nil)
	r.a.CreateTopic(topic, partitions)
	r.b.CreateTopic(topic, partitions)
	var producers, consumers []*follower
	name := func(i int) string { return fmt.Sprintf("%s-partition-%d", topic, i) }
	for i := range partitions {
		producers = append(producers, follow(t, r.app.PulsarAddr(), name(i), "", 0))
		consumers = append(consumers, followAs(t, r.app.PulsarAddr(), name(i), "s", testkit.Shared))
		producers[i].mustSend(2)
		consumers[i].mustReceive(2)
	}
	if err := r.switchTo(t, "b", topic); err != nil {
		t.Fatal(err)
	}
	for i := range partitions {
		producers[i].mustSend(4)
		consumers[i].mustReceive(4)
		awaitClients(t, r.a, name(i), 0, 0)
		a, _ := r.a.Topic(name(i))
		b, _ := r.b.Topic(name(i))
		if a.Written != 2 {
			t.Errorf("partition %d on a: %+v", i, a)
		}
		if b.Written != 4 || len(b.Producers) != 1 || len(b.Subscriptions["s"].Consumers) != 1 {
			t.Errorf("partition %d on b: %+v", i, b)
		}
	}
	if p, c := r.evicted(); p != partitions || c != partitions {
		t.Errorf("%d producers and %d consumers were told, want %d each", p, c, partitions)
	}
	p := r.connect(t, "")
	p.send(partitionsCommand(topic, 3))
	if got := p.expect(codec.TypePartitionedMetadataResp).GetPartitionMetadataResponse(); got.GetPartitions() != partitions {
		t.Errorf("the topic has %d partitions now", got.GetPartitions())
	}
}

// Two proxies on one store: a switch that is said to one takes effect on both, is acknowledged by both, and both serve the same map.
func TestASwitchSaidToOneProxyMovesTheClientsOfBoth(t *testing.T) {
	const topic = "persistent://public/default/two-proxies"
	one := newRig(t, testkit.Options{}, nil)
	two := one.beside(t, one.app.store.(joiner).Join(), nil)
	one.await(t, "both on the roster", func() bool {
		l, err := one.admin.Proxies(t.Context())
		return err == nil && len(l.Proxies) == 2 && l.Agree
	})
	var producers []*follower
	for _, r := range []*rig{one, two} {
		p := follow(t, r.app.PulsarAddr(), topic, "", 0)
		p.mustSend(3)
		producers = append(producers, p)
	}
	s, err := one.admin.StartSwitch(t.Context(), admin.SwitchRequest{Topics: []string{topic}, To: "b", Mode: "immediate"})
	if err == nil {
		s, err = one.admin.WaitSwitch(t.Context(), s.ID, nil)
	}
	if err != nil || !s.Done() || len(s.Switches) != 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	if acks := s.Switches[0].Acks; len(acks) != 2 || acks[0].Producers != 1 || acks[1].Producers != 1 {
		t.Errorf("acknowledged by %+v, want both, one producer each", acks)
	}
	for _, p := range producers {
		p.mustSend(3)
	}
	if a, b := len(one.a.Messages(topic)), len(one.b.Messages(topic)); a != 6 || b != 6 {
		t.Errorf("%d messages on a and %d on b, want 6 and 6", a, b)
	}
	one.agree(t, two)
}

// agree waits until two proxies serve the same map and say so.
func (r *rig) agree(t *testing.T, other *rig) {
	t.Helper()
	r.await(t, "the same map on both proxies", func() bool {
		l, err := r.admin.Proxies(t.Context())
		return err == nil && l.Agree && r.app.Table().Digest() == other.app.Table().Digest()
	})
}

// SW-16: two operators switch one topic at the same moment through different proxies. Each of them either wins or is told
// clearly; the map, both proxies and the client agree afterwards, and epochs only grow.
func TestTwoOperatorsAtOnceLeaveOneOutcome(t *testing.T) {
	const topic = "persistent://public/default/cycle"
	one := newRig(t, testkit.Options{}, nil)
	two := one.beside(t, one.app.store.(joiner).Join(), nil)
	one.await(t, "both on the roster", func() bool {
		l, err := one.admin.Proxies(t.Context())
		return err == nil && len(l.Proxies) == 2
	})
	producer := follow(t, one.app.PulsarAddr(), topic, "", 0)
	producer.mustSend(1)
	clusters := map[string]*testkit.Cluster{"a": one.a, "b": one.b}
	epoch, won, refused := uint64(0), 0, 0
	for round := range scaled(25) {
		targets := [2]string{"a", "b"} // one of them is where the topic is already, or will be
		if round%2 == 1 {
			targets = [2]string{"b", "b"} // both want the same
			if one.cluster(topic) == "b" {
				targets = [2]string{"a", "a"}
			}
		}
		var errs [2]error
		var group sync.WaitGroup
		for i, r := range []*rig{one, two} {
			group.Go(func() { errs[i] = r.switchTo(t, targets[i], topic) })
		}
		group.Wait()
		moved := 0
		for i, err := range errs {
			var e *admin.Error
			switch {
			case err == nil:
				moved++
				won++
			case errors.As(err, &e) && (e.Code == admin.CodeAlreadyThere || e.Code == admin.CodeConflict) && e.Message != "":
				refused++
			case switchFailedClearly(err):
				refused++
			default:
				t.Errorf("round %d, operator %d: %v", round, i, err)
			}
		}
		entry, ok, err := one.app.store.Entry(context.Background(), topic)
		if err != nil || moved > 0 && !ok {
			t.Fatalf("entry %v, %v, %v", entry, ok, err)
		}
		if entry.Epoch < epoch || moved > 0 && entry.Epoch == epoch || entry.Epoch > epoch+2 {
			t.Errorf("round %d: the epoch went from %d to %d", round, epoch, entry.Epoch)
		}
		epoch = entry.Epoch
		one.agree(t, two)
		producer.mustSend(1)
		home := clusters[one.cluster(topic)]
		for _, c := range clusters {
			want := 0
			if c == home {
				want = 1
			}
			awaitClients(t, c, topic, want, 0)
		}
	}
	t.Logf("%d switches were done, %d refused, epoch %d", won, refused, epoch)
	if won == 0 || refused == 0 {
		t.Error("nobody won, or nobody was refused")
	}
}

// cluster is where the map that is served has a topic.
func (r *rig) cluster(topic string) string {
	if e, ok := r.app.Table().Entry(topic); ok && !e.Floor() {
		return e.Cluster
	}
	return "a"
}

// switchFailedClearly tells a switch that lost against another after it was accepted, from one that failed for no reason.
func switchFailedClearly(err error) bool {
	var ended *endedError
	if !errors.As(err, &ended) {
		return false
	}
	for _, d := range ended.status.Failed {
		if d.Code != admin.CodeConflict && d.Code != admin.CodeAlreadyThere || d.Problem == "" {
			return false
		}
	}
	for _, s := range ended.status.Switches {
		if s.State != "done" && s.Note == "" {
			return false
		}
	}
	return len(ended.status.Failed)+len(ended.status.Skipped)+len(ended.status.Switches) > 0
}

// A proxy that is cut off from the store blocks nothing and lies to nobody: the switch is shown as incomplete and names it, its
// clients stay, and everything is made good when it hears again.
func TestAProxyThatHearsLateIsNamedAndCatchesUp(t *testing.T) {
	t.Parallel() // it waits for the ten seconds that a proxy has for its ack
	const topic = "persistent://public/default/hears-late"
	one := newRig(t, testkit.Options{}, nil)
	deaf := one.app.store.(joiner).Join()
	two := one.beside(t, deaf, nil)
	one.await(t, "both on the roster", func() bool {
		l, err := one.admin.Proxies(t.Context())
		return err == nil && len(l.Proxies) == 2
	})
	producer := follow(t, two.app.PulsarAddr(), topic, "", 0)
	producer.mustSend(1)
	deaf.SetFaults(faultsHoldWatches)
	err := one.switchTo(t, "b", topic)
	var ended *endedError
	if !errors.As(err, &ended) || ended.status.State != "incomplete" || len(ended.status.Switches) != 1 ||
		!slices.Equal(ended.status.Switches[0].Waiting, []string{two.app.Info().ID}) {
		t.Fatalf("the switch ended with %v, want incomplete, waiting for %s", err, two.app.Info().ID)
	}
	producer.mustSend(1) // nothing was done to it
	l, err := one.admin.Proxies(t.Context())
	if err != nil || l.Agree {
		t.Errorf("the proxies agree: %+v, %v", l, err)
	}
	deaf.SetFaults(faultsNone)
	awaitCluster(t, one.b, "the producer", func() bool {
		info, _ := one.b.Topic(topic)
		return len(info.Producers) == 1
	})
	producer.mustSend(1)
	one.agree(t, two)
}
