//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"pointsman/core/switching"
)

// found is what a preflight says, as an operator's script reads it.
type found struct {
	Preflights []switching.Preflight `json:"preflights"`
}

// check is the preflight of a topic, asked for on the command line; it exits with 3 unless all is fine.
func check(t *testing.T, p *Pointsman, topic, to string) switching.Preflight {
	t.Helper()
	var f found
	err := p.CLI(limited(t, time.Minute), &f, "switch", "check", "--topic", topic, "--to", to)
	var refused *CLIError
	if errors.As(err, &refused) {
		if err = json.Unmarshal([]byte(refused.Output), &f); err != nil {
			t.Fatal(refused)
		}
	}
	must(t, err)
	if len(f.Preflights) != 1 || (f.Preflights[0].Verdict == switching.Fine) != (refused == nil) {
		t.Fatalf("preflights %+v, %v; want one, and a refusal unless it is fine", f.Preflights, err)
	}
	for _, x := range f.Preflights[0].Findings {
		t.Logf("%s: %s: %s: %s", to, x.Verdict, x.Item, x.Evidence)
	}
	return f.Preflights[0]
}

// SW-01 as an operator does it: check, start, reverse, under load, with the forecast beside what came of it.
func TestThePlannedSwitchOfTheCommandLine(t *testing.T) {
	proxies := pair(t)
	topic := newTopic("acme/geo", "cli")
	setRoute(t, proxies[0], topic, rig.A.Name)
	awaitRoute(t, topic, rig.A.Name)
	live := startLive(t, Go, proxies[0].URL, 200, nil, topic)
	p := check(t, proxies[0], topic, rig.B.Name)
	if p.Verdict != switching.Fine || p.Forecast == nil || p.Forecast.Producers != 1 || p.Forecast.Consumers != 1 || p.SubscriptionCount != 1 {
		t.Errorf("preflight: %s, forecast %+v, %d subscriptions; want all fine, one producer, consumer and subscription", p.Verdict, p.Forecast, p.SubscriptionCount)
	}
	var st struct {
		ID       string `json:"id"`
		State    string `json:"state"`
		Switches []switching.Record
	}
	must(t, proxies[1].CLI(limited(t, time.Minute), &st, "switch", "start", "--topic", topic, "--to", rig.B.Name))
	if st.State != "done" || st.Switches[0].Receipt == nil {
		t.Fatalf("the switch ended as %+v", st)
	}
	t.Logf("forecast: hold %.0f ms, %d duplicates; receipt: hold %.0f ms, %d duplicates", p.Forecast.HoldMillis, p.Forecast.Duplicates, st.Switches[0].Receipt.HoldMillis, st.Switches[0].Receipt.DuplicatesForecast)
	awaitClients(t, topic, rig.B)
	must(t, proxies[0].CLI(limited(t, time.Minute), &st, "switch", "reverse", st.ID))
	if st.State != "done" || st.Switches[0].To != rig.A.Name || st.Switches[0].Epoch != 2 {
		t.Fatalf("the way back ended as %+v", st)
	}
	awaitClients(t, topic, rig.A)
	record := live.end(t, t.Errorf)
	acks, recvs := record.Of(0)
	if d := Compare(acks, recvs); len(d.Lost) != 0 || len(d.Corrupt) != 0 {
		t.Errorf("live consumer: %v; want nothing lost", d)
	}
}
