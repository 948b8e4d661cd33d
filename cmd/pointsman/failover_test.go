package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/golden"
)

// SW-18, as an operator sees it.
func TestAFailoverReadsAsDocumented(t *testing.T) {
	for _, output := range []string{"", "--output json"} {
		var text string
		synctest.Test(t, func(t *testing.T) { text = failoverNow(t, output) })
		name := "failover.txt"
		if output != "" {
			name = "failover.json.txt"
		}
		golden.File(t, name, text)
	}
}

func failoverNow(t *testing.T, output string) string {
	s := newShell(t)
	var b strings.Builder
	run := func(line string) {
		t.Helper()
		s.transcribe(&b, line, output)
	}
	say := func(cluster, state string) {
		s.p1.Health(t, cluster, state)
		s.p2.Health(t, cluster, state)
	}
	say("a", "up")
	say("b", "up")
	s.p2.Do(func(f *admintest.Fields) { f.Clients[topic1] = admin.HandleCount{Producers: 1, Consumers: 2} })
	seen := switching.Seen{Cluster: "a"}
	seen = seen.Merge(time.Now(), []switching.SeenTopic{{Topic: topic1}, {Topic: topic2}}, "", func(string) bool { return true })
	s.work.See(seen)
	at := time.Now()
	s.work.Find(func(base string) (switching.FailoverFacts, error) {
		f := switching.FailoverFacts{Topics: 1, Measured: at, Subscriptions: 2}
		switch base {
		case topic1:
			f.Backlog, f.Delay, f.Missing, f.Again, f.Names = 1234, 17, 1, 5000, []string{topic1 + " billing"}
		case topic2:
			f.Unreplicated = 1
			f.Notes = []string{topic2 + " was not replicated from a to b: b has none of its messages"}
		default:
			f = switching.FailoverFacts{Topics: 1, Unknown: 1}
		}
		return f, nil
	})
	run("switch start --mode failover --from a --to b")
	time.Sleep(time.Minute)
	say("a", "down")
	admintest.LeadFailovers(t, s.st.Join(), s.p1, s.servers["p1"], switching.FailoverPair{From: "a", To: "b", After: 30 * time.Second})
	time.Sleep(time.Minute)
	run("clusters ls")
	run("switch list")
	run("switch start --mode failover --topic " + topic1 + " --topic acme/orders/t3 --to b --dry-run")
	run("switch start --mode failover --from a --to b --dry-run")
	run("switch start --mode failover --from a --to b --why fire")
	time.Sleep(time.Minute) // the leader withdraws the proposal at its next look, in the second in which the failover ends or the one after
	run("switch list --limit 3")
	run("switch start --mode failover --from a --to b")
	run("switch start --mode failover --to b")
	run("switch start --mode failover --topic " + topic1 + " --to a --subscriptions all")
	return b.String()
}
