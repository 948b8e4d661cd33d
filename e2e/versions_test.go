//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// The versions that the tests between versions move topics between, besides the rig's own. The old one's replicators do not say of a copy where it comes from;
// E2E_OLD_VERSION is for runs by hand.
const newVersion = "4.2.4"

var oldVersion = cmp.Or(os.Getenv("E2E_OLD_VERSION"), "3.0.0")

// versionsLimit is how long both clusters may take to start, their jars included when they are not there yet.
const versionsLimit = 4 * time.Minute

// versioned are clusters of three versions, and two proxies in front of them.
type versioned struct {
	old, mid, young *Cluster
	oldNew, midNew  string // tenants of old and young, and of mid and young
	proxies         [2]*Pointsman
}

// startVersions starts them; they end with the test.
func startVersions(t *testing.T) versioned {
	t.Helper()
	ctx := limited(t, versionsLimit)
	began := time.Now()
	// Brokers of a kept rig remember where a cluster was that they have replicated to: each run has names of its own.
	v := versioned{mid: rig.A, oldNew: "oldnew" + runID, midNew: "midnew" + runID}
	type started struct {
		c   *Cluster
		err error
	}
	start := func(name, version string) chan started {
		done := make(chan started, 1)
		go func() {
			c, err := rig.StartLone(ctx, name, version)
			done <- started{c, err}
		}()
		return done
	}
	for into, done := range map[**Cluster]chan started{&v.old: start("v30"+runID, oldVersion), &v.young: start("v42"+runID, newVersion)} {
		s := <-done
		if s.c != nil {
			t.Cleanup(func() {
				if err := rig.StopLone(s.c); err != nil {
					t.Error(err)
				}
			})
		}
		must(t, s.err)
		*into = s.c
	}
	must(t, rig.Introduce(ctx, v.oldNew, v.old, v.young))
	must(t, rig.Introduce(ctx, v.midNew, v.mid, v.young))
	t.Cleanup(func() { // the rig may live longer than this cluster: nothing shall wait for it
		must(t, v.mid.Admin(limited(t, 20*time.Second), "POST", "/admin/v2/namespaces/"+v.midNew+"/geo/replication", []string{v.mid.Name}, nil))
	})
	t.Logf("clusters of versions %s and %s ready after %.1f s", oldVersion, newVersion, time.Since(began).Seconds())
	v.proxies = pairOf(t, "versions", rig.ConfigOf("versions-"+runID, v.old, v.mid, v.young))
	return v
}

// Issue 6: topics move between clusters of different versions, there and back under load, with every kind of subscription; where the copies do not say where they
// come from, the receipt says what was used instead.
func TestBetweenVersions(t *testing.T) {
	t.Parallel()
	v := startVersions(t)
	raiseLedgers(t, v.old)
	oldNew, midNew := [2]*Cluster{v.old, v.young}, [2]*Cluster{v.mid, v.young}
	every := []string{
		"exclusive:exclusive:individual:1", "cumulative:exclusive:cumulative:1", "failover:failover:individual:2",
		"shared:shared:individual:2", "key-shared:key_shared:individual:2",
	}
	for _, client := range []Client{Java, Go, Python} {
		t.Run("old-to-new/"+string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: oldVersion + " to 4.2.4 and back, every subscription type", client: client, topic: newTopic(v.oldNew+"/geo", "every-"+string(client)), rate: 300, keys: 20, reader: true,
				subs: every, proxies: v.proxies, clusters: oldNew, bounded: true, flags: []string{"--replicated", strconv.FormatBool(client == Go)},
			})
			awaitTopic(t, v.young, l.c.topic)
			l.thereAndBack(often(2, 6))
			l.end(false)
		})
	}
	for _, client := range someClients(Go) {
		t.Run("in-hand/"+string(client), func(t *testing.T) {
			t.Parallel()
			before, rec := duplicatesAreForecast(t, client, v.proxies, oldNew, newTopic(v.oldNew+"/geo", "forecast-"+string(client)), oldVersion+" to 4.2.4, messages in hand and passed over")
			wantFallBack(t, v, before, rec)
		})
	}
	for _, client := range someClients(Java) {
		t.Run("drain/"+string(client), func(t *testing.T) {
			t.Parallel()
			drainsBetweenVersions(t, v, client)
		})
	}
	for _, client := range someClients(Go) {
		t.Run("stored-ids/"+string(client), func(t *testing.T) {
			t.Parallel()
			storedIDsMeanTheSame(t, client, v.proxies, oldNew, newTopic(v.oldNew+"/geo", "stored-"+string(client)))
		})
	}
	t.Run("features", func(t *testing.T) {
		t.Parallel()
		featuresAreThoseOfAll(t, v)
	})
	for _, client := range someClients(Java) {
		t.Run("rig-to-new/"+string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: "4.0.8 to 4.2.4 and back, every subscription type", client: client, topic: newTopic(v.midNew+"/geo", "every-"+string(client)), rate: 300, keys: 20, reader: true,
				subs: every, proxies: v.proxies, clusters: midNew,
			})
			awaitTopic(t, v.young, l.c.topic)
			l.thereAndBack(often(2, 6))
			l.end(true)
		})
	}
	for _, client := range someClients(Go) {
		t.Run("new-to-old/"+string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: "4.2.4 to " + oldVersion + ", every subscription type", client: client, topic: newTopic(v.oldNew+"/geo", "down-"+string(client)), rate: 300, keys: 20, reader: true,
				subs: every, proxies: v.proxies, clusters: [2]*Cluster{v.young, v.old}, bounded: true,
			})
			awaitTopic(t, v.old, l.c.topic)
			l.thereAndBack(1)
			l.end(false) // of shared subscriptions, what is in hand is forecast; of the others nothing is
		})
	}
	for _, client := range someClients(Python) {
		t.Run("partitions/"+string(client), func(t *testing.T) {
			t.Parallel()
			topic := newTopic(v.oldNew+"/geo", "parts-"+string(client))
			must(t, v.old.CreatePartitioned(limited(t, 30*time.Second), topic, 3))
			l := startLoad(t, loadConfig{
				scenario: oldVersion + " to 4.2.4 and back, three partitions", client: client, topic: topic, parts: 3, rate: 300, keys: 30,
				subs: []string{"failover:failover:cumulative:1", "shared:shared:individual:1"}, proxies: v.proxies, clusters: oldNew, bounded: true,
			})
			awaitTopic(t, v.young, l.c.topic)
			l.thereAndBack(2)
			l.end(false)
		})
	}
}

// drainsBetweenVersions moves a topic that is not replicated: producers at once, each subscription when it has read the old cluster to its end.
func drainsBetweenVersions(t *testing.T, v versioned, client Client) {
	t.Helper()
	topic, parts := newTopic(v.oldNew+"/plain", "drain-"+string(client)), 0
	if client == Python {
		parts = 3
		must(t, v.old.CreatePartitioned(limited(t, 30*time.Second), topic, parts))
	}
	l := startLoad(t, loadConfig{
		scenario: oldVersion + " to 4.2.4 without replication", mode: switching.ModeDrain, client: client, topic: topic, parts: parts, rate: 300, keys: 20, reader: parts == 0,
		subs: []string{
			"exclusive:exclusive:individual:1", "failover:failover:cumulative:1", "shared:shared:individual:2", "key-shared:key_shared:individual:2",
		},
		proxies: v.proxies, clusters: [2]*Cluster{v.old, v.young},
	})
	l.began = append(l.began, nowMillis())
	st := openMap(t, v.proxies[0])
	rec := awaitSwitch(t, st, requestMode(t, st, topic, v.young, switching.ModeDrain))
	if rec.State != switching.StateDone {
		t.Fatalf("the drain ended as %s: %s\n%s", rec.State, rec.Note, steps(rec))
	}
	t.Logf("drained: hold %.0f ms, %s %s", rec.Receipt.HoldMillis, rec.Note, holdSteps(rec))
	l.moved(rec, v.young)
	l.flow("after the drain")
	l.nothingNewOn(rec)
	l.end(false) // a consumer that is closed for the fence, or by an unload, gets again what it has in hand, as after any reconnect
}

// featuresAreThoseOfAll: a connection for lookups tells what every configured cluster supports; one to a broker what that broker said, on both sides of a move.
func featuresAreThoseOfAll(t *testing.T, v versioned) {
	t.Helper()
	connect := func(addr string, target *string) (*RawConn, *pulsarpb.CommandConnected) {
		conn, err := DialRaw(addr, 20*time.Second)
		must(t, err)
		t.Cleanup(conn.Close)
		answer, err := conn.Connect(target)
		must(t, err)
		if answer.GetType() != cmdConnected {
			t.Fatalf("CONNECT to %s: %v", addr, answer)
		}
		return conn, answer.GetConnected()
	}
	said := func(c *pulsarpb.CommandConnected) string {
		f := c.GetFeatureFlags()
		return fmt.Sprintf("version %d, partitions without creation %v, replication by position %v", c.GetProtocolVersion(),
			f.GetSupportsGetPartitionedMetadataWithoutAutoCreation(), f.GetSupportsReplDedupByLidAndEid())
	}
	broker := map[*Cluster]*pulsarpb.CommandConnected{}
	all := &pulsarpb.CommandConnected{ProtocolVersion: proto.Int32(protocolVersion), FeatureFlags: &pulsarpb.FeatureFlags{
		SupportsGetPartitionedMetadataWithoutAutoCreation: proto.Bool(true), SupportsReplDedupByLidAndEid: proto.Bool(true),
	}}
	for _, c := range []*Cluster{v.old, v.mid, v.young} {
		_, broker[c] = connect(c.Brokers[0].Addr, nil)
		t.Logf("Pulsar %s: %s", cmp.Or(c.Version, "4.0.8"), said(broker[c]))
		*all.ProtocolVersion = min(*all.ProtocolVersion, broker[c].GetProtocolVersion())
		f := broker[c].GetFeatureFlags()
		*all.FeatureFlags.SupportsGetPartitionedMetadataWithoutAutoCreation = all.FeatureFlags.GetSupportsGetPartitionedMetadataWithoutAutoCreation() && f.GetSupportsGetPartitionedMetadataWithoutAutoCreation()
		*all.FeatureFlags.SupportsReplDedupByLidAndEid = all.FeatureFlags.GetSupportsReplDedupByLidAndEid() && f.GetSupportsReplDedupByLidAndEid()
	}
	if said(broker[v.old]) == said(broker[v.young]) {
		t.Errorf("both versions say %s: the test shows nothing", said(broker[v.old]))
	}
	proxy := strings.TrimPrefix(v.proxies[0].URL, "pulsar://")
	topic := newTopic(v.oldNew+"/geo", "features")
	setRoute(t, v.proxies[0], topic, v.old.Name)
	awaitRouteOn(t, v.proxies[0], topic, v.old.Name)
	runDriver(t, 30*time.Second, Go, "produce", "--url", v.proxies[0].URL, "--topic", topic)
	for i, c := range []*Cluster{v.old, v.young} {
		lookups, connected := connect(proxy, nil)
		if said(connected) != said(all) || connected.GetFeatureFlags().GetSupportsTopicWatchers() {
			t.Errorf("a connection for lookups says %s, want what all have in common: %s", said(connected), said(all))
		}
		must(t, lookups.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdLookup), LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: proto.Uint64(7)}}))
		answer, err := lookups.Receive()
		must(t, err)
		target := strings.TrimPrefix(answer.GetLookupTopicResponse().GetBrokerServiceUrl(), "pulsar://")
		if _, bridged := connect(proxy, &target); target == "" || said(bridged) != said(broker[c]) {
			t.Errorf("a connection to %q on cluster %s says %s, the broker says %s", target, c.Name, said(bridged), said(broker[c]))
		}
		if i == 0 {
			awaitTopic(t, v.young, topic)
			plannedDone(t, v.proxies[0], topic, v.young)
		}
	}
}

// awaitTopic waits until replication has created a topic.
func awaitTopic(t *testing.T, c *Cluster, topic string) {
	t.Helper()
	must(t, WaitUntil(limited(t, 30*time.Second), "replication to create "+topic+" on cluster "+c.Name, func() (bool, error) {
		names, err := c.TopicsOf(t.Context(), topic)
		return len(names) > 0, err
	}))
}

// wantFallBack checks that preflight, receipt and metric say that no copy says where it comes from.
func wantFallBack(t *testing.T, v versioned, before switching.Preflight, rec switching.Record) {
	t.Helper()
	if before.Verdict != switching.Fine || before.Forecast == nil || before.Forecast.Bare != 2 ||
		!slices.ContainsFunc(before.Findings, func(f switching.Finding) bool {
			return strings.Contains(f.Evidence, "do not say where they lay on cluster "+v.old.Name)
		}) {
		t.Errorf("preflight %+v; want it fine, and to say of both subscriptions what they will be carried by", before)
	}
	for _, c := range rec.Receipt.Subscriptions {
		if c.By != string(pulsaradmin.ByProducer) || !strings.Contains(c.Note, "older than 4.0.4") {
			t.Errorf("subscription %+v; want it to say that it was carried by what producers wrote", c)
		}
	}
	counted := 0.0
	for _, p := range v.proxies {
		counted += metric(t, p, "pointsman_switch_subscriptions_total", `by="producer_and_sequence_id"`)
	}
	if counted < 2 {
		t.Errorf("the metric counts %v subscriptions, want the 2 of this switch at least", counted)
	}
}
