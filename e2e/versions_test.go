//go:build e2e

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"slices"
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
const (
	rigVersion = "4.0.8"
	newVersion = "4.2.4"
)

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
	type way struct {
		name, tenant string
		clusters     [2]*Cluster
		bare         bool // copies of the first cluster's messages do not say where they lay
	}
	oldNew := way{oldVersion + " to " + newVersion, v.oldNew, [2]*Cluster{v.old, v.young}, true}
	newOld := way{newVersion + " to " + oldVersion, v.oldNew, [2]*Cluster{v.young, v.old}, false}
	midNew := way{rigVersion + " to " + newVersion, v.midNew, [2]*Cluster{v.mid, v.young}, false}
	// each runs a case with the clients, side by side with all others.
	each := func(clients []Client, name string, run func(t *testing.T, client Client)) {
		for _, client := range clients {
			t.Run(name+"/"+string(client), func(t *testing.T) {
				t.Parallel()
				run(t, client)
			})
		}
	}
	// What only a full run has.
	var inFull []Client
	if full {
		inFull = artifacts.Clients
	}
	// there moves a replicated topic under load, as often as is said.
	there := func(t *testing.T, w way, client Client, times int, c loadConfig) {
		t.Helper()
		c.class, c.client, c.proxies, c.clusters, c.rate, c.bounded = classVersions, client, v.proxies, w.clusters, 300, w != midNew
		c.topic = newTopic(w.tenant+"/geo", "planned-"+string(client))
		if c.parts > 0 {
			must(t, w.clusters[0].CreatePartitioned(limited(t, 30*time.Second), c.topic, c.parts))
		}
		l := startLoad(t, c)
		awaitTopic(t, w.clusters[1], c.topic)
		l.thereAndBack(times)
		l.end(!c.bounded) // where copies say where they come from, what is acknowledged while the topic moves does not come again
	}
	every := func(w way, times int, flags ...string) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			c := loadConfig{scenario: w.name + " and back, every subscription type", keys: 20, reader: client.ReadsOn(), subs: everyKind, flags: flags}
			if times == 1 {
				c.scenario = w.name + ", every subscription type"
			}
			there(t, w, client, times, c)
		}
	}
	partitioned := func(w way) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			there(t, w, client, 2, loadConfig{scenario: w.name + " and back, three partitions", parts: 3, keys: 30, subs: []string{"failover:failover:cumulative:1", "shared:shared:individual:1"}})
		}
	}
	inHand := func(w way) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			before, rec := duplicatesAreForecast(t, client, v.proxies, w.clusters, newTopic(w.tenant+"/geo", "forecast-"+string(client)), w.name+", messages in hand and passed over")
			if w.bare {
				wantFallBack(t, v, before, rec)
			}
		}
	}
	storedIDs := func(w way) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			if client == Rust { // where it begins behind an id, it does not tell the messages of a batch apart
				t.Skip("it cannot")
			}
			storedIDsMeanTheSame(t, client, v.proxies, w.clusters, newTopic(w.tenant+"/geo", "stored-"+string(client)))
		}
	}
	drain := func(w way, parts int) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			drainsBetweenVersions(t, v, w.name, w.tenant, w.clusters, client, parts)
		}
	}
	back := func(w way) func(t *testing.T, client Client) {
		return func(t *testing.T, client Client) {
			subs := slices.Clone(drainKinds)
			if w != midNew {
				// Brokers of before 4.0 give a Key_Shared consumer that came back beside another one nothing new until everything of before is acknowledged, and these consumers acknowledge
				// when they get more: both would wait, as without any proxy.
				subs[3] = "key-shared:key_shared:individual:1"
			}
			l := startLoad(t, loadConfig{
				scenario: w.name + ", taken back while it drains", mode: switching.ModeDrain, class: classVersions, client: client, topic: newTopic(w.tenant+"/plain", "back-"+string(client)), rate: 200, keys: 20,
				subs: subs, flags: lagging, proxies: v.proxies, clusters: w.clusters,
			})
			l.drainAndBack(2)
			l.end(false) // as between equal versions
		}
	}

	each([]Client{Go}, "old-to-new", every(oldNew, often(2, 6), "--replicated", "true"))
	each(slices.DeleteFunc(slices.Clone(artifacts.Clients), func(c Client) bool { return c == Go }), "old-to-new", every(oldNew, often(2, 6)))
	each(someClients(Go), "in-hand", inHand(oldNew))
	each(someClients(Java), "drain", drain(oldNew, 0))
	each(someClients(Go), "stored-ids", storedIDs(oldNew))
	t.Run("features", func(t *testing.T) {
		t.Parallel()
		featuresAreThoseOfAll(t, v)
	})
	each(someClients(Java), "rig-to-new", every(midNew, often(2, 6)))
	each(someClients(Go), "new-to-old", every(newOld, 1))
	each(someClients(Python), "partitions", partitioned(oldNew))

	each(inFull, "drain-partitions", drain(oldNew, 3))
	each(inFull, "drain-back", back(oldNew))
	each(inFull, "rig-partitions", partitioned(midNew))
	each(inFull, "rig-in-hand", inHand(midNew))
	each(inFull, "rig-stored-ids", storedIDs(midNew))
	each(inFull, "rig-drain", drain(midNew, 0))
	each(inFull, "rig-drain-back", back(midNew))
	each(inFull, "new-drain", drain(newOld, 0))
	each(inFull, "new-drain-back", back(newOld))
}

// drainsBetweenVersions moves a topic that is not replicated: producers at once, each subscription when it has read the first cluster to its end. In a full run it goes back in the same way, by
// `switch reverse` of the drain that is done.
func drainsBetweenVersions(t *testing.T, v versioned, name, tenant string, clusters [2]*Cluster, client Client, parts int) {
	t.Helper()
	c := loadConfig{
		scenario: name + " without replication", mode: switching.ModeDrain, class: classVersions, client: client, topic: newTopic(tenant+"/plain", "drain-"+string(client)), parts: parts, rate: 300, keys: 20,
		reader: parts == 0 && client.ReadsOn(), subs: drainKinds, proxies: v.proxies, clusters: clusters,
	}
	if full {
		c.scenario = name + " and back without replication"
	}
	if parts > 0 {
		c.scenario += fmt.Sprintf(", %d partitions", parts)
		must(t, clusters[0].CreatePartitioned(limited(t, 30*time.Second), c.topic, parts))
	}
	l := startLoad(t, c)
	st := openMap(t, v.proxies[0])
	drained := func(rec switching.Record, to *Cluster) switching.Record {
		t.Helper()
		rec = awaitSwitch(t, st, rec)
		wantDone(t, rec, to, nil)
		l.moved(rec, to)
		l.flow("after the drain")
		l.nothingNewOn(rec)
		return rec
	}
	l.began = append(l.began, nowMillis())
	rec := drained(requestMode(t, st, c.topic, clusters[1], switching.ModeDrain), clusters[1])
	if full {
		l.began = append(l.began, nowMillis())
		back, err := tryPlanned(t, v.proxies[1], "reverse", rec.ID, "--force")
		if back.ID == "" {
			t.Fatal(err)
		}
		drained(back, clusters[0])
	}
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
		t.Logf("Pulsar %s: %s", cmp.Or(c.Version, rigVersion), said(broker[c]))
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
	must(t, WaitThrough(limited(t, awaitLimit), "replication to create "+topic+" on cluster "+c.Name, func() (bool, error) {
		names, err := c.TopicsOf(t.Context(), topic)
		return len(names) > 0, err
	}))
}

// wantFallBack checks that preflight, receipt and metric say that no copy says where it comes from.
func wantFallBack(t *testing.T, v versioned, before switching.Preflight, rec switching.Record) {
	t.Helper()
	if before.Verdict != switching.Fine || before.Forecast == nil || before.Forecast.Bare != len(rec.Receipt.Subscriptions) ||
		!slices.ContainsFunc(before.Findings, func(f switching.Finding) bool {
			return strings.Contains(f.Evidence, "do not say where they lay on cluster "+v.old.Name)
		}) {
		t.Errorf("preflight %+v; want it fine, and to say of all subscriptions what they will be carried by", before)
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
	if n := len(rec.Receipt.Subscriptions); counted < float64(n) {
		t.Errorf("the metric counts %v subscriptions, want the %d of this switch at least", counted, n)
	}
}
