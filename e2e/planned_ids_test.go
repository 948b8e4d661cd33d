//go:build e2e

package e2e

import (
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
)

// SW-07: a consumer that has nothing to do moves at once, and gets what is published afterwards.
func TestAnIdleConsumerMovesAtOnce(t *testing.T) {
	proxies := pair(t)
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			topic := newTopic("acme/geo", "idle-"+string(client))
			setRoute(t, proxies[0], topic, "a")
			awaitRoute(t, topic, "a")
			consumer := startDriver(t, client, "consume", "--url", proxies[1].URL, "--topic", topic, "--type", "shared", "--count", "20", "--idle", "300000")
			awaitReady(t, consumer, 1)
			awaitTopic(t, rig.B, topic)
			row := Row{Mode: "planned", Scenario: "idle consumer", Client: string(client), Subscription: "shared, individual acks, 1 consumer(s)"}
			var acks []iter.Seq[Message]
			for i, to := range []*Cluster{rig.B, rig.A} {
				rec := plannedDone(t, proxies[i], topic, to)
				row.Holds = append(row.Holds, rec.Receipt.HoldMillis)
				must(t, WaitUntil(limited(t, awaitLimit), "the idle consumer to be on cluster "+to.Name, func() (bool, error) {
					stats, err := to.Stats(t.Context(), topic)
					return err == nil && strings.Contains(connections(stats), "consumer"), nil
				}))
				sent := runDriver(t, 30*time.Second, client, "produce", "--url", proxies[0].URL, "--topic", topic, "--count", "10", "--start", strconv.Itoa(10*i))
				acks = append(acks, sent.Acks.All())
			}
			record := finish(t, 30*time.Second, consumer)
			d := Compare(Joined(acks...), record.Recvs.All())
			row.take(d, len(record.Errors))
			row.save(t)
			want(t, "the idle consumer", d, 20)
		})
	}
}

// GR-02: messages that are in the application's hands, or were passed over, come again: exactly as many as the receipt has forecast.
func TestDuplicatesAreAsManyAsWereForecast(t *testing.T) {
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			proxies := pair(t)
			if client == Go {
				proxies = faultyPair(t, "forecast") // so young that the old cluster is made to unload the topic, and forgets what consumers have
			}
			_, rec := duplicatesAreForecast(t, client, proxies, [2]*Cluster{rig.A, rig.B}, newTopic("acme/geo", "forecast-"+string(client)), "messages in hand and passed over")
			if client == Go && !rec.Receipt.Evicted {
				t.Error("the topic was not evicted: the test shows nothing about the forecast after an eviction")
			}
		})
	}
}

// duplicatesAreForecast moves a topic from the first to the second cluster, whose consumers have passed over some messages and have some in hand.
func duplicatesAreForecast(t *testing.T, client Client, proxies [2]*Pointsman, clusters [2]*Cluster, topic, scenario string) (switching.Preflight, switching.Record) {
	t.Helper()
	const count, skip, lag = 2_000, 50, 100
	setRoute(t, proxies[0], topic, clusters[0].Name)
	awaitRouteOn(t, proxies[0], topic, clusters[0].Name)
	awaitRouteOn(t, proxies[1], topic, clusters[0].Name)
	subs := []string{"shared", "key_shared", "exclusive", "failover"}
	kinds := ""
	for _, kind := range subs {
		kinds += "," + kind + ":" + kind + ":individual:1"
	}
	live := startDriver(t, client, "live", "--url", proxies[0].URL, "--read-url", proxies[1].URL, "--topics", topic, "--rates", "2000", "--batch", "false", "--keys", "10",
		"--subs", kinds[1:], "--skip", strconv.Itoa(skip), "--lag", strconv.Itoa(lag))
	await(t, live, "messages", func(r Record) bool { return r.Acks.Len() >= count })
	must(t, live.Say("stop"))
	record := await(t, live, "the producer to stop", func(r Record) bool { return r.Stopped })
	sent := record.Acks.Len()
	await(t, live, "all subscriptions to have everything", func(r Record) bool { return r.Recvs.Len() == len(subs)*sent })
	// Of the last ones, the client has lag in hand that it would acknowledge.
	holes := 0
	for n := range sent {
		if n%skip == 0 {
			holes++
		}
	}
	open := int64(holes + lag)
	must(t, WaitThrough(limited(t, awaitLimit), fmt.Sprintf("%d unacknowledged messages of each subscription", open), func() (bool, error) {
		stats, err := clusters[0].Stats(t.Context(), topic)
		return !slices.ContainsFunc(subs, func(name string) bool { return stats.Subscriptions[name].MsgBacklog != open }), err
	}))
	before := check(t, proxies[0], topic, clusters[1].Name)
	if before.Forecast == nil || before.Forecast.Duplicates != int64(len(subs))*open {
		t.Errorf("preflight %+v; want a forecast of %d duplicates", before, int64(len(subs))*open)
	}
	rec := plannedDone(t, proxies[1], topic, clusters[1])
	for _, s := range rec.Receipt.Subscriptions {
		if s.Unacked != open || s.Repeated+s.Missing != 0 {
			t.Errorf("subscription %s: forecast %+v, want %d duplicates", s.Subscription, s, open)
		}
		if s.After == nil || s.After.Difference > 0 {
			t.Errorf("subscription %s: after the flip %+v, want no more than was carried", s.Subscription, s.After)
		}
	}
	await(t, live, "what is not acknowledged to come again", func(r Record) bool { return r.Recvs.Len() >= len(subs)*(sent+int(open)) })
	must(t, live.Say("quit"))
	record = finish(t, 30*time.Second, live)
	for _, name := range subs {
		d := Compare(record.Acks.All(), record.Recvs.Where(func(m Message) bool { return m.S == name }))
		row := Row{Mode: "planned", Class: classHand, Scenario: scenario, Client: string(client), Subscription: name + ", individual acks, 1 consumer(s)", Forecast: &open, Holds: []float64{rec.Receipt.HoldMillis}}
		row.take(d, len(record.Errors))
		row.save(t)
		t.Logf("%s: %v; forecast %d", name, d, open)
		if int64(d.Duplicates) != open {
			t.Errorf("%s: %d duplicates, the receipt forecast %d", name, d.Duplicates, open)
		}
		if d.Duplicates = 0; !d.Perfect() {
			t.Errorf("%s: %v; want nothing lost, and the first copies in order", name, d)
		}
	}
	return before, rec
}

// SW-02, SW-03: an application that has stored an id before a switch begins behind that message with it afterwards, there and back, by a new reader and by a seek; and a
// reader that asks whether there is more comes exactly to the end.
func TestAStoredIDMeansTheSameMessageAfterASwitch(t *testing.T) {
	raiseLedgers(t, rig.A)
	proxies := pair(t)
	for _, client := range artifacts.Clients {
		if client == Rust { // where it begins behind an id, it does not tell the messages of a batch apart
			continue
		}
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			storedIDsMeanTheSame(t, client, proxies, [2]*Cluster{rig.A, rig.B}, newTopic("acme/geo", "stored-"+string(client)))
		})
	}
}

// storedIDsMeanTheSame moves a topic from the first to the second cluster and back.
func storedIDsMeanTheSame(t *testing.T, client Client, proxies [2]*Pointsman, clusters [2]*Cluster, topic string) {
	t.Helper()
	const part, stored = 200, 77
	setRoute(t, proxies[0], topic, clusters[0].Name)
	for _, p := range proxies {
		awaitRouteOn(t, p, topic, clusters[0].Name)
	}
	publish := func(first int) {
		t.Helper()
		got := runDriver(t, 30*time.Second, client, "produce", "--url", proxies[0].URL, "--topic", topic, "--count", strconv.Itoa(part), "--start", strconv.Itoa(first), "--rate", "2000")
		if got.Acks.Len() != part {
			t.Fatalf("%d receipts, want %d", got.Acks.Len(), part)
		}
	}
	// read gives the ids by number, of everything behind an id.
	read := func(from string, first, next int) map[int64]string {
		t.Helper()
		args := []string{"--url", proxies[1].URL, "--topic", topic, "--to-end", "true", "--ids", "true"}
		if from != "" {
			args = append(args, "--from", from)
		}
		got := runDriver(t, 60*time.Second, client, "reader", args...)
		ids := map[int64]string{}
		for i := range got.Recvs.Len() {
			e := got.Recvs.At(i)
			if ids[e.N] = e.Stored; e.N != int64(first+i) {
				t.Fatalf("message %d of the reader is number %d, want %d", i, e.N, first+i)
			}
		}
		if got.Recvs.Len() != next-first {
			t.Errorf("the reader came to number %d, the last is %d", first+got.Recvs.Len()-1, next-1)
		}
		return ids
	}
	// seek gives the first number that a new subscription gets after seeking an id, having checked that the rest follows. It waits for those from number first on.
	seek := func(from string, first, next int) int64 {
		t.Helper()
		name := fmt.Sprintf("seek-%d", topicSeq.Add(1))
		got := runDriver(t, 60*time.Second, client, "consume", "--url", proxies[1].URL, "--topic", topic, "--sub", name, "--from", from, "--count", strconv.Itoa(next-first), "--linger", "1500")
		if got.Recvs.Len() == 0 {
			t.Fatalf("no message came after a seek, want all up to number %d", next-1)
		}
		start := got.Recvs.At(0).N
		for i := range got.Recvs.Len() {
			if n := got.Recvs.At(i).N; n != start+int64(i) {
				t.Fatalf("after a seek message %d is number %d, want %d", i, n, start+int64(i))
			}
		}
		if start+int64(got.Recvs.Len()) != int64(next) {
			t.Fatalf("after a seek %d messages came, want all up to number %d", got.Recvs.Len(), next-1)
		}
		return start
	}
	publish(0)
	ids := read("", 0, part)
	onA := ids[stored]
	baseline := seek(onA, stored+1, part) // of some clients with the message itself
	if baseline != stored && baseline != stored+1 {
		t.Fatalf("a seek of number %d begins at %d", stored, baseline)
	}

	plannedDone(t, proxies[0], topic, clusters[1])
	publish(part)
	ids = read(onA, stored+1, 2*part)
	onB := ids[part+stored]
	if got := seek(onA, int(baseline), 2*part); got != baseline {
		t.Errorf("on cluster %s a seek of an id of cluster %s begins at %d, on that one it did at %d", clusters[1].Name, clusters[0].Name, got, baseline)
	}

	plannedDone(t, proxies[1], topic, clusters[0])
	publish(2 * part)
	read(onA, stored+1, 3*part)
	read(onB, part+stored+1, 3*part)
	if got := seek(onB, part+int(baseline), 3*part); got != baseline+part {
		t.Errorf("back on cluster %s a seek of an id of cluster %s begins at %d, want %d", clusters[0].Name, clusters[1].Name, got, baseline+part)
	}
}

// SW-02, SW-03: a consumer of several topics, by their names or by a pattern, while one of them moves and comes back: everything once and in order. And a seek by time, of a
// consumer and a reader, begins at the same message on either cluster, wherever that was published.
func TestConsumersOfSeveralTopicsAndSeeksByTime(t *testing.T) {
	raiseLedgers(t, rig.A)
	proxies := pair(t)
	for _, client := range artifacts.Clients {
		if client == Rust { // its driver has neither
			continue
		}
		t.Run(string(client), func(t *testing.T) {
			t.Parallel()
			stem := newTopic("acme/geo", "several-"+string(client))
			severalTopics(t, client, proxies, stem, []string{stem + "-one", stem + "-two"})
		})
	}
}

// severalTopics moves the first of the topics from cluster a to b and back. Numbers of topic i begin at i × 10,000.
func severalTopics(t *testing.T, client Client, proxies [2]*Pointsman, stem string, topics []string) {
	t.Helper()
	const part, apart, rounds = 200, 10_000, 4
	for _, topic := range topics {
		setRoute(t, proxies[0], topic, "a")
		for _, p := range proxies {
			awaitRouteOn(t, p, topic, "a")
		}
	}
	acks := make([][]iter.Seq[Message], len(topics))
	begins := map[int]float64{} // ms since 1970: before the first number of a round on the first topic, and after the last one of the round before
	published := 0
	publish := func() {
		t.Helper()
		for i, topic := range topics {
			got := runDriver(t, 30*time.Second, client, "produce", "--url", proxies[0].URL, "--topic", topic, "--count", strconv.Itoa(part), "--start", strconv.Itoa(i*apart+published), "--rate", "2000")
			if got.Acks.Len() != part {
				t.Fatalf("%d receipts of %s, want %d", got.Acks.Len(), topic, part)
			}
			acks[i] = append(acks[i], got.Acks.All())
			if i == 0 {
				begins[published+part] = got.Acks.At(part-1).T + 1
			}
		}
		published += part
	}
	// seek wants a new subscription and a reader of the first topic to begin with that number by its time.
	seek := func(first int) {
		t.Helper()
		at := strconv.FormatInt(int64(begins[first]), 10)
		flags := []string{"--url", proxies[1].URL, "--topic", topics[0], "--from-time", at}
		for what, got := range map[string]Record{
			"consumer": runDriver(t, 60*time.Second, client, "consume", append(flags, "--sub", fmt.Sprintf("time-%d", topicSeq.Add(1)), "--count", strconv.Itoa(published-first), "--linger", "1000")...),
			"reader":   runDriver(t, 60*time.Second, client, "reader", append(flags, "--to-end", "true")...),
		} {
			if len(got.Errors) > 0 || got.Recvs.Len() != published-first {
				t.Errorf("after %d messages a seek of a %s by the time of number %d gave %d messages, want %d; errors %v", published, what, first, got.Recvs.Len(), published-first, got.Errors)
			}
			for i := range got.Recvs.Len() {
				if n := got.Recvs.At(i).N; n != int64(first+i) {
					t.Errorf("after %d messages a seek of a %s by the time of number %d: message %d is number %d", published, what, first, i, n)
					break
				}
			}
		}
	}
	publish()
	all := rounds * part * len(topics)
	end := []string{"--count", strconv.Itoa(all), "--idle", "300000", "--linger", "2000"}
	consumers := map[string]*Driver{
		"by names":   startDriver(t, client, "consume", append(end, "--url", proxies[1].URL, "--sub", "names", "--topic", strings.Join(topics, ","))...),
		"by pattern": startDriver(t, client, "consume", append(end, "--url", proxies[1].URL, "--sub", "pattern", "--topic", stem+"-.*", "--pattern", "true")...),
	}
	caughtUp := func() {
		t.Helper()
		for how, c := range consumers {
			await(t, c, fmt.Sprintf("everything, %s", how), func(r Record) bool { return r.Recvs.Len() >= published*len(topics) })
		}
	}
	publish()
	caughtUp()
	seek(part)
	plannedDone(t, proxies[0], topics[0], rig.B)
	publish()
	caughtUp()
	seek(part)
	seek(2 * part)
	plannedDone(t, proxies[1], topics[0], rig.A)
	publish()
	seek(part)
	seek(2 * part)
	seek(3 * part)
	for how, c := range consumers {
		record := finish(t, 60*time.Second, c)
		for i, topic := range topics {
			d := Compare(Joined(acks[i]...), record.Recvs.Where(func(m Message) bool { return m.N/apart == int64(i) }))
			want(t, fmt.Sprintf("the consumer %s, of %s", how, topic), d, published)
		}
		if len(record.Errors) > 0 {
			t.Errorf("the consumer %s: %v", how, record.Errors)
		}
	}
}
