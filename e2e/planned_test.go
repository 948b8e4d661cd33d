//go:build e2e

package e2e

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/zk"
)

// plannedMoves is how many planned switches each client has to go through, there and back in turn.
const plannedMoves = 10

// SW-01, SW-07, GR-02: a planned switch at 1,000 messages per second, there and back: the application sees no error, nothing is lost, nothing
// comes twice, and the order of the producer is kept, by the live consumer and in the logs of both clusters.
func TestPlannedSwitch(t *testing.T) {
	for _, client := range Clients {
		t.Run(string(client), func(t *testing.T) {
			proxies := pair(t)
			topic := newTopic("acme/geo", "planned-"+string(client))
			neighbourA, neighbourB := newTopic("acme/plain", "neighbour-a"), newTopic("acme/plain", "neighbour-b")
			for name, cluster := range map[string]*Cluster{topic: rig.A, neighbourA: rig.A, neighbourB: rig.B} {
				setRoute(t, proxies[0], name, cluster.Name)
				awaitRoute(t, name, cluster.Name)
			}
			live := startLive(t, client, proxies[0].URL, topic, sameOwner(t, rig.A, topic, neighbourA, proxies[0]), sameOwner(t, rig.B, topic, neighbourB, proxies[0]))
			var holds []float64
			gaps := live.moves(t, plannedMoves, func(round int) {
				rec := planned(t, proxies[round%2], topic, []*Cluster{rig.A, rig.B}[round%2])
				if rec.State != switching.StateDone {
					t.Fatalf("switch %d ended as %s: %s\n%s", round, rec.State, rec.Note, steps(rec))
				}
				t.Logf("switch %d: hold %.0f ms, duplicates forecast %d: %s\n%s", round, rec.Receipt.HoldMillis, rec.Receipt.DuplicatesForecast, rec.Note, steps(rec))
				holds = append(holds, rec.Receipt.HoldMillis)
				awaitClients(t, topic, []*Cluster{rig.A, rig.B}[round%2])
			})
			record := live.end(t, t.Errorf)
			t.Logf("%s: %d planned switches: hold p50 %.0f ms, max %.0f ms; gap p50 %.0f ms, max %.0f ms", client, plannedMoves,
				Percentile(holds, 0.5), Percentile(holds, 1), Percentile(gaps, 0.5), Percentile(gaps, 1))
			acks, recvs := record.Of(0)
			d := Compare(acks, recvs)
			t.Logf("%s: live consumer: %v", client, d)
			if len(d.Lost)+len(d.Corrupt)+len(d.Unexpected)+d.Duplicates+d.OrderBreaks != 0 {
				t.Errorf("live consumer: %v; want each message once and in order", d)
			}
			for _, c := range []*Cluster{rig.B, rig.A} {
				got := readUntilComplete(t, c, topic, acks)
				d := Compare(acks, got)
				t.Logf("%s: read on %s: %v", client, c.Name, d)
				if len(d.Lost)+len(d.Corrupt)+len(d.Unexpected)+d.Duplicates+d.OrderBreaks != 0 {
					t.Errorf("read on cluster %s: %v; want each message once and in order", c.Name, d)
				}
			}
		})
	}
}

// planned runs a planned switch to its end.
func planned(t *testing.T, p *Pointsman, topic string, to *Cluster) switching.Record {
	t.Helper()
	ctx := limited(t, 90*time.Second)
	st, err := zk.Open(ctx, zk.Config{Servers: rig.MapZK + "/pointsman-" + runID, SessionTimeout: 10 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	defer st.Close()
	e, ok, err := st.Entry(ctx, topic)
	must(t, err)
	if !ok || e.State != route.StateActive {
		t.Fatalf("entry %+v, %v", e, ok)
	}
	rec := switching.Record{
		ID: fmt.Sprintf("sw-%d", time.Now().UnixNano()), Rev: 1, Attempt: 1, Topic: topic, From: e.Cluster, To: to.Name, Mode: switching.ModePlanned,
		State: switching.StateRequested, Epoch: e.Epoch + 1, Started: time.Now(), Who: "e2e",
	}
	must(t, st.PutSwitch(ctx, rec))
	must(t, WaitUntil(ctx, "switch "+rec.ID+" to end", func() (bool, error) {
		var err error
		rec, err = st.Switch(ctx, rec.ID)
		return rec.State.Over(), err
	}))
	return rec
}

func steps(rec switching.Record) (text string) {
	if rec.Receipt == nil {
		return "no receipt"
	}
	for _, s := range rec.Receipt.Steps {
		text += fmt.Sprintf("  %s %-16s %7.1f ms ×%d %s\n", s.Began.Format("05.000"), s.Work, s.Millis, max(s.Times, 1), s.Why)
	}
	return text
}
