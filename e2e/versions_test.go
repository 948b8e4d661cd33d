//go:build e2e

package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
)

// The versions that the tests between versions move topics between, besides the rig's own.
const (
	oldVersion = "3.0.0" // its replicators do not say of a copy where it comes from
	newVersion = "4.2.4"
)

// versionsLimit is how long both clusters may take to start, their jars included when they are not there yet.
const versionsLimit = 4 * time.Minute

// versioned are clusters of three versions, and two proxies in front of them.
type versioned struct {
	old, mid, young *Cluster
	proxies         [2]*Pointsman
}

// startVersions starts them; they end with the test.
func startVersions(t *testing.T) versioned {
	t.Helper()
	ctx := limited(t, versionsLimit)
	began := time.Now()
	v := versioned{mid: rig.A}
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
	for into, done := range map[**Cluster]chan started{&v.old: start("v30", oldVersion), &v.young: start("v42", newVersion)} {
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
	must(t, rig.Introduce(ctx, "oldnew", v.old, v.young))
	must(t, rig.Introduce(ctx, "midnew", v.mid, v.young))
	t.Cleanup(func() { // the rig may live longer than this cluster: nothing shall wait for it
		must(t, v.mid.Admin(limited(t, 20*time.Second), "POST", "/admin/v2/namespaces/midnew/geo/replication", []string{v.mid.Name}, nil))
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
	for _, client := range Clients {
		t.Run("3.0.0-to-4.2.4/"+string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: "3.0.0 to 4.2.4 and back, every subscription type", client: client, topic: newTopic("oldnew/geo", "every-"+string(client)), rate: 300, keys: 20, reader: true,
				subs: every, proxies: v.proxies, clusters: oldNew, bounded: true,
			})
			l.thereAndBack(often(2, 6))
			l.end(false)
		})
		t.Run("in-hand-3.0.0-to-4.2.4/"+string(client), func(t *testing.T) {
			t.Parallel()
			rec := duplicatesAreForecast(t, client, v.proxies, oldNew, newTopic("oldnew/geo", "forecast-"+string(client)), "3.0.0 to 4.2.4, messages in hand and passed over")
			wantFallBack(t, rec)
		})
		t.Run("stored-ids-3.0.0-to-4.2.4/"+string(client), func(t *testing.T) {
			t.Parallel()
			storedIDsMeanTheSame(t, client, v.proxies, oldNew, newTopic("oldnew/geo", "stored-"+string(client)))
		})
	}
	for _, client := range someClients(Java) {
		t.Run("4.0.8-to-4.2.4/"+string(client), func(t *testing.T) {
			t.Parallel()
			l := startLoad(t, loadConfig{
				scenario: "4.0.8 to 4.2.4 and back, every subscription type", client: client, topic: newTopic("midnew/geo", "every-"+string(client)), rate: 300, keys: 20, reader: true,
				subs: every, proxies: v.proxies, clusters: midNew,
			})
			l.thereAndBack(often(2, 6))
			l.end(true)
		})
	}
	for _, client := range someClients(Python) {
		t.Run("partitions-3.0.0-to-4.2.4/"+string(client), func(t *testing.T) {
			t.Parallel()
			topic := newTopic("oldnew/geo", "parts-"+string(client))
			must(t, v.old.CreatePartitioned(limited(t, 30*time.Second), topic, 3))
			l := startLoad(t, loadConfig{
				scenario: "3.0.0 to 4.2.4 and back, three partitions", client: client, topic: topic, parts: 3, rate: 300, keys: 30,
				subs: []string{"failover:failover:cumulative:1", "shared:shared:individual:1"}, proxies: v.proxies, clusters: oldNew, bounded: true,
			})
			l.thereAndBack(2)
			l.end(false)
		})
	}
}

// wantFallBack checks that a receipt says that no copy says where it comes from.
func wantFallBack(t *testing.T, rec switching.Record) {
	t.Helper()
	if slices.ContainsFunc(rec.Receipt.Subscriptions, func(c switching.Carried) bool { return strings.Contains(c.How, "producer") }) {
		return
	}
	t.Errorf("receipt %+v; want one that says by what else than the source position subscriptions were carried", rec.Receipt.Subscriptions)
}
