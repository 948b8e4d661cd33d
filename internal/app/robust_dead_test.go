package app

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pointsman/codec"
	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
)

// SW-18: a cluster that hangs: the system accepts connections and takes bytes for it. Its topic moves without anybody who waits for it; when it goes on, nothing of it
// reaches a client of the topic any more, and it gets nothing that a client sent after the flip.
func TestAClusterThatHangsIsLeftAtOnce(t *testing.T) {
	const topic, receiptWait = "persistent://public/default/hangs", 10 * time.Second // who waited for a receipt, or for the end of a fence, would show
	const limit = receiptWait / 2
	r := newRig(t, testkit.Options{}, func(c *config.Config) {
		c.Health.Interval, c.Health.Timeout, c.Health.Over, c.Health.Failures = config.Duration(50*time.Millisecond), config.Duration(time.Second), config.Duration(time.Second), 2
		c.Eviction.ReceiptWait, c.Limits.HandshakeTimeout = config.Duration(receiptWait), config.Duration(time.Minute)
	})
	lookups := r.connect(t, "")
	target := r.owner(t, topic)
	stays := topic // another one of the same broker
	for i := 0; stays == topic || r.owner(t, stays) != target; i++ {
		stays = fmt.Sprintf("persistent://public/default/stays-%d", i)
	}
	alone, shared := r.connect(t, target), r.connect(t, target)
	alone.produce(topic, "", 1)
	alone.publish(1, 1, []byte("before"))
	shared.produce(topic, "", 1)
	shared.produce(stays, "", 2)
	shared.publish(1, 1, []byte("before"))

	for _, b := range r.a.Brokers() {
		b.Freeze()
	}
	alone.write(sendFrame(1, 2, []byte("alone, in flight")))
	shared.write(sendFrame(1, 2, []byte("shared, in flight")))
	lookups.send(lookupCommand(topic, 7))
	connecting := r.dial(t)
	connecting.send(connectCommand(target))
	r.await(t, "the cluster to be found down", func() bool {
		c, err := r.admin.Clusters(t.Context())
		return err == nil && len(c.Clusters) == 2 && c.Clusters[0].Health == admin.HealthDown && c.Clusters[0].Votes.MostlyDown()
	})

	began := time.Now()
	st, err := r.admin.StartSwitch(t.Context(), admin.SwitchRequest{Topics: []string{topic}, To: "b", Mode: "failover"})
	if err == nil {
		st, err = r.admin.WaitSwitch(t.Context(), st.ID, nil)
	}
	if err != nil || !st.Done() {
		t.Fatalf("the failover: %+v, %v", st, err)
	}
	for _, p := range []*peer{alone, shared} {
		if c := p.expect(codec.TypeCloseProducer).GetCloseProducer(); c.GetProducerId() != 1 || c.GetAssignedBrokerServiceUrl() == "" {
			t.Errorf("a client was told %v", c)
		}
	}
	alone.ended(limit) // nothing else is on it
	lost := connecting.expect(codec.TypeError).GetError()
	if codec.ServerError(lost.GetError()) != codec.ErrorServiceNotReady || !strings.Contains(lost.GetMessage(), "left for dead") {
		t.Errorf("a connection that was being made: %v", lost)
	}
	connecting.ended(limit)
	moved := r.connect(t, lookups.target())
	moved.produce(topic, "", 1)
	moved.publish(1, 2, []byte("again"))
	if took := time.Since(began); took > limit {
		t.Errorf("it took %v until the topic was published to again", took)
	} else {
		t.Logf("published to again %v after the order", took)
	}
	shared.write(sendFrame(1, 3, []byte("after the flip")))

	for _, b := range r.a.Brokers() {
		b.Thaw()
	}
	shared.publish(2, 1, []byte("goes on")) // the next frame is its receipt: none for the topic that has moved
	onA, onB := r.a.Messages(topic), r.b.Messages(topic)
	for _, m := range onA {
		if strings.HasPrefix(string(m.Payload), "after") {
			t.Errorf("cluster a has taken %q", m.Payload)
		}
	}
	if len(onA) < 2 || len(onA) > 4 || len(onB) != 1 || string(onB[0].Payload) != "again" {
		t.Errorf("%d messages on a and %d on b", len(onA), len(onB))
	}
	r.await(t, "the cluster to be found up", func() bool {
		c, err := r.admin.Clusters(t.Context())
		return err == nil && c.Clusters[0].Health == "up"
	})
	if e, _ := r.app.Table().Entry(topic); e.Cluster != "b" {
		t.Errorf("the topic is on %s again", e.Cluster)
	}
	if n := r.closed(t, "proxy", "cluster_dead"); n != 2 {
		t.Errorf("%v connections count as left for dead, want 2", n)
	}
}

// A refusal is an answer: with a MetadataError a healthy cluster says that it lacks the namespace of the question, and such a cluster must not be thought dead. ServiceNotReady is none.
func TestAClusterThatRefusesIsUpAndOneThatIsNotReadyIsDown(t *testing.T) {
	r := newRig(t, testkit.Options{}, func(c *config.Config) {
		quick := config.Duration(50 * time.Millisecond)
		c.Health.Interval, c.Health.Over, c.Health.Failures = quick, quick, 2 // and every question is answered
	})
	asked := func() int { return len(r.a.Commands(codec.TypeLookup)) }
	health := func() string {
		c, err := r.admin.Clusters(t.Context())
		if err != nil || len(c.Clusters) != 2 {
			t.Fatalf("clusters = %+v, %v", c, err)
		}
		return c.Clusters[0].Health
	}
	r.await(t, "the cluster to be up", func() bool { return health() == "up" })
	remove := r.a.Handle(codec.TypeLookup, testkit.Refuse(codec.ErrorMetadata, "Namespace not found"))
	many := asked() + 20
	r.await(t, "twenty questions more", func() bool { return asked() >= many })
	if h := health(); h != "up" {
		t.Errorf("a cluster that refuses is %s", h)
	}
	remove()
	r.a.Handle(codec.TypeLookup, testkit.Refuse(codec.ErrorServiceNotReady, "no metadata store"))
	r.await(t, "the cluster to be down", func() bool { return health() == admin.HealthDown })
}
