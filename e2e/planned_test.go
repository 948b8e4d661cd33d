//go:build e2e

package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	zkclient "github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
	"pointsman/zk"
)

// full asks for everything that docs/guarantees.md tells: more rounds, and each client in each scenario.
var full = os.Getenv("E2E_FULL") == "1"

// often is how many times something is done: few in an ordinary run.
func often(few, many int) int {
	if full {
		return many
	}
	return few
}

// someClient is all clients, or in an ordinary run one of them.
func someClients(one Client) []Client {
	if full {
		return artifacts.Clients
	}
	return []Client{one}
}

// plannedRate is the messages per second on the topic that moves; E2E_RATE is for runs by hand.
func plannedRate() int {
	if rate, err := strconv.Atoi(os.Getenv("E2E_RATE")); err == nil {
		return rate
	}
	return liveRate
}

// byHand is n, or the number in E2E_SWITCHES, which is for runs by hand.
func byHand(n int) int {
	if more, err := strconv.Atoi(os.Getenv("E2E_SWITCHES")); err == nil {
		return more
	}
	return n
}

// everyKind is what a subscription of each type is called, how it acknowledges, and by how many consumers.
var everyKind = []string{
	"exclusive:exclusive:individual:1", "cumulative:exclusive:cumulative:1", "failover:failover:individual:2",
	"shared:shared:individual:2", "key-shared:key_shared:individual:2",
}

// SW-01, SW-02, SW-03, SW-14: one producer, every kind of subscription and a reader, producer and consumers through different proxies, ledger ids on cluster a
// far above those of b; there and back under load. The application sees no error, nothing is lost, nothing comes twice, the order of each key is kept.
func TestPlannedSwitchWithEverySubscription(t *testing.T) {
	raiseLedgers(t, rig.A)
	for _, client := range artifacts.Clients {
		t.Run(string(client), func(t *testing.T) {
			rate := often(300, 0) // each message is read seven times: at a thousand a second that is more than a single core can do, and TestPlannedSwitch has that rate
			if client == Rust {
				rate = 300 // it has no keyed batches, so that each message is an entry for every subscription
			}
			l := startLoad(t, loadConfig{
				scenario: "every subscription type, keyed batches", client: client, topic: newTopic("acme/geo", "every-"+string(client)), rate: rate, keys: 20, reader: client.ReadsOn(),
				subs:  append(slices.Clone(everyKind), "failover-cumulative:failover:cumulative:1"),
				flags: []string{"--replicated", strconv.FormatBool(client == Go)},
			})
			wantHigherLedgers(t, l.c.topic)
			l.thereAndBack(often(4, 6))
			l.end(true)
		})
	}
}

// The other shapes of traffic: chunks, synchronous sends, no batches, partitions; there, and back by `switch reverse`. Each with all clients in a full run.
func TestPlannedSwitchOfOtherTraffic(t *testing.T) {
	scenarios := []struct {
		name, sub string
		one       Client
		rate      int
		keys      int64
		parts     int
		flags     []string
	}{
		// Chunks as large as a broker takes are refused by the other cluster: the replicator adds to their metadata, and goes on without them.
		{name: "chunked messages of 3 MB in chunks of 1 MB", one: Java, rate: 4, flags: []string{"--chunk", "true", "--size", "3000000", "--chunk-size", "1000000"}},
		{name: "messages of 1 MB, no batches", one: Go, rate: 10, flags: []string{"--batch", "false", "--size", "1000000"}},
		{name: "synchronous sends, no batches", one: Python, rate: 300, flags: []string{"--batch", "false", "--sync", "true"}},
		{name: "three partitions", one: Java, rate: 500, keys: 30, parts: 3},
		{name: "three partitions", one: Python, rate: 500, keys: 30, parts: 3},
		{name: "no batches", one: Go, rate: 500, flags: []string{"--batch", "false"}},
	}
	done := map[string]bool{}
	for _, s := range scenarios[:often(5, 6)] {
		for _, client := range someClients(s.one) {
			name := strings.ReplaceAll(s.name, " ", "-") + "/" + string(client)
			if done[name] || (client == Python || client == Rust) && slices.Contains(s.flags, "--chunk-size") { // Python cannot choose the size, Rust has no chunks
				continue
			}
			done[name] = true
			t.Run(name, func(t *testing.T) {
				topic := newTopic("acme/geo", "shape")
				if s.parts > 0 {
					must(t, rig.A.CreatePartitioned(limited(t, 30*time.Second), topic, s.parts))
				}
				l := startLoad(t, loadConfig{
					scenario: s.name, client: client, topic: topic, parts: s.parts, rate: s.rate, keys: s.keys, flags: s.flags, reader: s.parts == 0 && client.ReadsOn(), reverse: true,
					subs: []string{"failover:failover:individual:1", "shared:shared:individual:1"},
				})
				l.thereAndBack(2)
				l.end(true)
			})
		}
	}
}

// SW-01: at 1,000 messages per second, there and back, with neighbours on the same connections: each message once and in order, for the live consumer and in
// the logs of both clusters, and the neighbours notice nothing (SW-12).
func TestPlannedSwitch(t *testing.T) {
	for _, client := range artifacts.Clients {
		for i, flags := range strings.Split(os.Getenv("E2E_FLAGS"), ";") { // more flags for the driver, for runs by hand
			t.Run(strings.Repeat("again-", i)+string(client), func(t *testing.T) { plannedSwitches(t, client, strings.Fields(flags)) })
		}
	}
}

func plannedSwitches(t *testing.T, client Client, flags []string) {
	proxies := pair(t)
	if os.Getenv("E2E_PARALLEL") == "1" { // by hand: most of a long run is waiting
		t.Parallel()
	}
	topic := newTopic("acme/geo", "planned-"+string(client))
	neighbourA, neighbourB := newTopic("acme/plain", "neighbour-a"), newTopic("acme/plain", "neighbour-b")
	for name, cluster := range map[string]*Cluster{topic: rig.A, neighbourA: rig.A, neighbourB: rig.B} {
		setRoute(t, proxies[0], name, cluster.Name)
		awaitRoute(t, name, cluster.Name)
	}
	live := startLive(t, client, proxies[0].URL, plannedRate(), flags, topic, sameOwner(t, rig.A, topic, neighbourA, proxies[0]), sameOwner(t, rig.B, topic, neighbourB, proxies[0]))
	var holds []float64
	undone := 0 // on a machine that is too busy; that many are borne in a long run by hand
	gaps := live.moves(t, byHand(often(4, 10)), func(round int) {
		to := []*Cluster{rig.A, rig.B}[round%2]
		rec, err := tryPlanned(t, proxies[round%2], "start", "--topic", topic, "--to", to.Name)
		for ; rec.State != switching.StateDone && undone < byHand(0)/5; undone++ {
			t.Logf("switch %d is not done, but %q: %s; %v", round, rec.State, rec.Note, err)
			rec, err = tryPlanned(t, proxies[round%2], "start", "--topic", topic, "--to", to.Name)
		}
		wantDone(t, rec, to, err)
		holds = append(holds, rec.Receipt.HoldMillis)
		awaitClients(t, topic, to)
	})
	record := live.end(t, t.Errorf)
	acks, recvs := record.Of(0)
	d := Compare(acks, recvs)
	run := Run{
		Date: time.Now().UTC().Format(time.DateOnly), Client: string(client), Traffic: TrafficOf(flags), Asked: plannedRate(), Seconds: secondsOf(TimesOf(acks)), Undone: undone,
		Messages: d.Acked, Errors: len(record.Errors), Holds: holds,
	}
	t.Logf("%s: %d planned switches at %.0f msg/s: hold p50 %.0f ms, p99 %.0f ms, max %.0f ms; gap p50 %.0f ms, max %.0f ms", client, len(holds), run.reached(),
		Percentile(holds, 0.5), Percentile(holds, 0.99), Percentile(holds, 1), Percentile(gaps, 0.5), Percentile(gaps, 1))
	row := Row{Mode: "planned", Scenario: fmt.Sprintf("neighbours on the same connections, %d msg/s", plannedRate()), Client: string(client), Subscription: "shared, individual acks, 1 consumer(s)", Holds: holds, Gaps: gaps}
	row.take(d, len(record.Errors))
	row.save(t)
	run.take(d)
	t.Logf("%s: live consumer: %v", client, d)
	if !d.Perfect() {
		t.Errorf("live consumer: %v; want each message once and in order; what came again: %v", d, Again(acks, recvs))
	}
	for _, c := range []*Cluster{rig.B, rig.A} {
		got := readUntilComplete(t, c, topic, acks)
		d := Compare(acks, got)
		run.take(d)
		t.Logf("%s: read on %s: %v", client, c.Name, d)
		if !d.Perfect() {
			t.Errorf("read on cluster %s: %v; want each message once and in order", c.Name, d)
		}
	}
	if len(holds) > 0 { // of several clients, the last ones may come too late
		appendLine(t, os.Getenv("E2E_RUNS"), run)
	}
}

// loadConfig is traffic on one topic.
type loadConfig struct {
	scenario string
	mode     switching.Mode // of the rows; "" is planned
	class    string         // of the rows
	client   Client
	topic    string
	parts    int // partitions; 0 is a topic without
	rate     int // 0 is plannedRate
	keys     int64
	subs     []string // name:type:ack:consumers
	reader   bool
	flags    []string
	reverse  bool          // the way back by `switch reverse`
	proxies  [2]*Pointsman // zero: those that all tests share
	clusters [2]*Cluster   // zero: a and b
	bounded  bool          // duplicates, where they are allowed, are no more than were forecast
}

// load is a live driver on a topic that moves: its producer comes by the first proxy, its consumers by the second.
type load struct {
	t        *testing.T
	c        loadConfig
	names    []string // of the subscriptions, and the reader
	driver   *Driver
	at       *Cluster
	last     string // switch that was done
	holds    []float64
	began    []float64        // of each switch, ms since 1970
	forecast map[string]int64 // duplicates, by subscription
	// highest number that has come, by name; seen is how much of the record that covers.
	highest map[string]int64
	seen    int
	// dropForeign leaves out what somebody else has published, which has no number.
	dropForeign bool
}

func startLoad(t *testing.T, c loadConfig) *load {
	t.Helper()
	if c.proxies[0] == nil {
		c.proxies = pair(t)
	}
	if c.rate == 0 {
		c.rate = plannedRate()
	}
	if c.clusters[0] == nil {
		c.clusters = [2]*Cluster{rig.A, rig.B}
	}
	setRoute(t, c.proxies[0], c.topic, c.clusters[0].Name)
	for _, p := range c.proxies {
		awaitRouteOn(t, p, c.topic, c.clusters[0].Name)
	}
	l := &load{t: t, c: c, at: c.clusters[0], highest: map[string]int64{}, forecast: map[string]int64{}}
	for _, s := range c.subs {
		name, _, _ := strings.Cut(s, ":")
		l.names = append(l.names, name)
	}
	if c.reader {
		l.names = append(l.names, "reader")
	}
	for _, name := range l.names {
		l.highest[name] = -1
	}
	args := append([]string{
		"--url", c.proxies[0].URL, "--read-url", c.proxies[1].URL, "--topics", c.topic, "--rates", strconv.Itoa(c.rate), "--keys", strconv.FormatInt(c.keys, 10),
		"--subs", strings.Join(c.subs, ","), "--reader", strconv.FormatBool(c.reader),
	}, c.flags...)
	l.driver = startDriver(t, c.client, "live", args...)
	l.flow("the first messages")
	return l
}

// flow waits until everything that has its receipt by now, and half a second's worth more, has come to every subscription.
func (l *load) flow(when string) {
	l.t.Helper()
	target := int64(-1)
	for e := range l.driver.Record().Acks.All() {
		target = max(target, e.N)
	}
	target += max(1, int64(l.c.rate)/2)
	_, err := l.driver.Wait(limited(l.t, catchUpLimit), fmt.Sprintf("traffic on every subscription %s, up to number %d", when, target), func(r Record) bool {
		for ; l.seen < r.Recvs.Len(); l.seen++ {
			m := r.Recvs.At(l.seen)
			l.highest[m.S] = max(l.highest[m.S], m.N)
		}
		for _, name := range l.names {
			if l.highest[name] < target {
				return false
			}
		}
		return true
	})
	if err != nil {
		l.t.Fatalf("%v; highest numbers %v", err, l.highest)
	}
}

// thereAndBack moves the topic that many times; the last ones to ask are asked of the other proxy.
func (l *load) thereAndBack(times int) {
	l.t.Helper()
	for i := range times {
		to := l.other()
		l.began = append(l.began, nowMillis())
		var rec switching.Record
		if i%2 == 1 && l.c.reverse {
			rec = commandDone(l.t, l.c.proxies[1], to, "reverse", l.last)
		} else {
			rec = plannedDone(l.t, l.c.proxies[i%2], l.c.topic, to)
		}
		l.moved(rec, to)
		l.flow(fmt.Sprintf("after switch %d", i+1))
		l.nothingNewOn(rec)
	}
}

func (l *load) moved(rec switching.Record, to *Cluster) {
	l.at, l.last = to, rec.ID
	l.holds = append(l.holds, rec.Receipt.HoldMillis)
	l.expect(rec)
}

// expect adds the forecast of a receipt.
func (l *load) expect(rec switching.Record) {
	for _, s := range rec.Receipt.Subscriptions {
		l.forecast[s.Subscription] += s.Unacked + s.Repeated
	}
}

func (l *load) other() *Cluster {
	if l.at == l.c.clusters[0] {
		return l.c.clusters[1]
	}
	return l.c.clusters[0]
}

func (l *load) named(cluster string) *Cluster {
	return l.c.clusters[slices.IndexFunc(l.c.clusters[:], func(c *Cluster) bool { return c.Name == cluster })]
}

// save adds the row to the file that E2E_RESULTS names.
func (r *Row) save(t *testing.T) {
	t.Helper()
	r.Test, r.Run, r.Date, r.Load = t.Name(), runID, time.Now().UTC().Format(time.DateOnly), loadAverage(t)
	appendLine(t, os.Getenv("E2E_RESULTS"), r)
}

// loadAverage is how many processes of the machine wanted to run in the last minute.
func loadAverage(t *testing.T) float64 {
	t.Helper()
	text, err := os.ReadFile("/proc/loadavg")
	must(t, err)
	first, _, _ := strings.Cut(string(text), " ")
	load, err := strconv.ParseFloat(first, 64)
	must(t, err)
	return load
}

// appendLine adds a line of JSON to a file; to none where path is empty.
func appendLine(t *testing.T, path string, line any) {
	t.Helper()
	if path == "" {
		return
	}
	text, err := json.Marshal(line)
	must(t, err)
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	must(t, err)
	_, err = file.Write(append(text, '\n')) // one write: tests run in parallel
	must(t, err)
	must(t, file.Close())
}

// nothingNewOn checks that no client's message came to the old cluster after the last one of the drain (promise 2).
func (l *load) nothingNewOn(rec switching.Record) {
	l.t.Helper()
	old := carrier(l.t, l.named(rec.From))
	for part, text := range rec.Receipt.Tail {
		tail, err := pulsaradmin.ParsePosition(text)
		must(l.t, err)
		own, err := old.OwnSince(limited(l.t, 60*time.Second), part, tail)
		must(l.t, err)
		if len(own) != 0 {
			l.t.Errorf("switch %s: cluster %s got %d messages of %s after the drain at %v, the first of %q at %v; want none", rec.ID, rec.From, len(own), part, tail, own[0].Producer, own[0].Position)
		}
	}
}

// end stops the traffic and judges what every subscription got; exact allows no duplicates.
func (l *load) end(exact bool) {
	t := l.t
	t.Helper()
	must(t, l.driver.Say("stop"))
	await(t, l.driver, "the producer to stop", func(r Record) bool { return r.Stopped })
	l.complete()
	must(t, l.driver.Say("quit"))
	record := finish(t, 30*time.Second, l.driver)
	var gaps []float64
	times := TimesOf(record.Acks.All())
	for _, from := range l.began {
		gaps = append(gaps, LongestGap(times, from, from+5_000))
	}
	t.Logf("%s, %s: %d switches: hold p50 %.0f ms, max %.0f ms; longest gap between receipts p50 %.0f ms, max %.0f ms; duplicates forecast %v", l.c.scenario, l.c.client,
		len(l.holds), Percentile(l.holds, 0.5), Percentile(l.holds, 1), Percentile(gaps, 0.5), Percentile(gaps, 1), l.forecast)
	for i, name := range l.names {
		row := Row{Mode: string(cmp.Or(l.c.mode, switching.ModePlanned)), Class: l.c.class, Scenario: l.c.scenario, Client: string(l.c.client), Subscription: "reader", Holds: l.holds, Gaps: gaps}
		ordered := true
		if i < len(l.c.subs) {
			parts := strings.Split(l.c.subs[i], ":")
			row.Subscription = parts[1] + ", " + parts[2] + " acks, " + parts[3] + " consumer(s)"
			ordered = parts[1] != "shared" || parts[3] == "1"
		}
		d := CompareKeys(record.Acks.All(), l.of(record, name), l.c.keys)
		if !ordered {
			d.OrderBreaks, row.Unordered = 0, true
		}
		row.take(d, len(record.Errors))
		if most := l.forecast[name]; exact {
			row.AtMost = new(int64)
		} else if l.c.bounded {
			row.AtMost = &most
		}
		row.save(t)
		t.Logf("  %-20s %v", name, d)
		if !exact && (!l.c.bounded || int64(d.Duplicates) <= l.forecast[name]) {
			d.Duplicates = 0
		}
		if !d.Perfect() {
			t.Errorf("%s: %v; want each message once and in order (forecast of duplicates %d)", name, d, l.forecast[name])
		}
	}
}

func (l *load) of(record Record, name string) iter.Seq[Message] {
	return record.Recvs.Where(func(m Message) bool { return m.S == name && !(l.dropForeign && m.N < 0) })
}

// complete waits until every subscription has got everything that has a receipt.
func (l *load) complete() {
	l.t.Helper()
	var open Awaited[string]
	for e := range l.driver.Record().Acks.All() {
		for _, name := range l.names {
			open.Want(name, e.N)
		}
	}
	seen := 0
	if _, err := l.driver.Wait(limited(l.t, catchUpLimit), "every subscription to have everything", func(r Record) bool {
		for ; seen < r.Recvs.Len(); seen++ {
			m := r.Recvs.At(seen)
			open.Came(m.S, m.N)
		}
		return len(open.Missing()) == 0
	}); err != nil {
		l.t.Errorf("%v; missing by subscription: %v", err, open.Missing())
	}
}

// plannedDone runs a planned switch, which has to succeed.
func plannedDone(t *testing.T, p *Pointsman, topic string, to *Cluster) switching.Record {
	t.Helper()
	return commandDone(t, p, to, "start", "--topic", topic, "--to", to.Name)
}

// commandDone runs a command that switches one topic to a cluster, and waits for its end.
func commandDone(t *testing.T, p *Pointsman, to *Cluster, command ...string) switching.Record {
	t.Helper()
	rec, err := tryPlanned(t, p, command...)
	wantDone(t, rec, to, err)
	return rec
}

// wantDone checks how a switch has ended.
func wantDone(t *testing.T, rec switching.Record, to *Cluster, err error) {
	t.Helper()
	if rec.State != switching.StateDone {
		t.Fatalf("the switch to %s ended as %q: %s\n%s%v", to.Name, rec.State, rec.Note, steps(rec), err)
	}
	t.Logf("%s to %s: hold %.0f ms, duplicates forecast %d, evicted %v: %s %s", time.Now().UTC().Format("15:04:05.000"), to.Name, rec.Receipt.HoldMillis, rec.Receipt.DuplicatesForecast, rec.Receipt.Evicted, rec.Note, holdSteps(rec))
}

// plannedLimit is how long one switch may take, and how long it may be refused for what passes by itself.
const plannedLimit = 2 * time.Minute

// passing is what a preflight finds for as long as a machine is too busy: that replication is a second behind, say. The remedy is to ask again.
var passing = []string{"entries wait to be replicated", "could be asked for their producers", "was not looked at within", "more subscriptions with a", "no proxy drives the switches now"}

// passes tells whether a command was refused by a preflight, and for nothing but what passes by itself.
func passes(err error) bool {
	var failed *CLIError
	var said struct {
		Error struct {
			Code    string `json:"code"`
			Details []struct {
				Problem string `json:"problem"`
			} `json:"details"`
		} `json:"error"`
	}
	if !errors.As(err, &failed) || json.Unmarshal([]byte(failed.Output), &said) != nil || said.Error.Code != "preflight_failed" {
		return false
	}
	for _, d := range said.Error.Details {
		if !slices.ContainsFunc(passing, func(text string) bool { return strings.Contains(d.Problem, text) }) {
			return false
		}
	}
	return len(said.Error.Details) > 0
}

// tryPlanned runs a command that switches one topic, to its end; an error when there was no switch.
func tryPlanned(t *testing.T, p *Pointsman, command ...string) (switching.Record, error) {
	t.Helper()
	var status struct {
		Switches []switching.Record `json:"switches"`
	}
	err := p.CLI(limited(t, plannedLimit), &status, append([]string{"switch"}, command...)...)
	for until := time.Now().Add(plannedLimit); passes(err) && time.Now().Before(until); err = p.CLI(limited(t, plannedLimit), &status, append([]string{"switch"}, command...)...) {
		t.Logf("refused for now: %v", err)
		pass(time.Second)
	}
	var failed *CLIError
	if errors.As(err, &failed) { // one that was aborted is shown all the same
		_ = json.NewDecoder(strings.NewReader(failed.Output)).Decode(&status)
	}
	if len(status.Switches) != 1 {
		return switching.Record{}, fmt.Errorf("switch %s: %d switches, want one; %v", strings.Join(command, " "), len(status.Switches), err)
	}
	return status.Switches[0], nil
}

// openMap opens the store of a proxy's map.
func openMap(t *testing.T, p *Pointsman) store.Store {
	t.Helper()
	st, err := zk.Open(limited(t, 30*time.Second), zk.Config{Servers: p.Map, SessionTimeout: 10 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	t.Cleanup(func() { _ = st.Close() })
	return st
}

// request asks the leader for a planned switch by its record alone: no preflight refuses it.
func request(t *testing.T, st store.Store, topic string, to *Cluster) switching.Record {
	t.Helper()
	return requestMode(t, st, topic, to, switching.ModePlanned)
}

func requestMode(t *testing.T, st store.Store, topic string, to *Cluster, mode switching.Mode) switching.Record {
	t.Helper()
	ctx := limited(t, 20*time.Second)
	e, ok, err := st.Entry(ctx, topic)
	must(t, err)
	if !ok || e.State != route.StateActive {
		t.Fatalf("entry %+v, %v", e, ok)
	}
	rec := switching.Record{
		ID: fmt.Sprintf("sw-%d", time.Now().UnixNano()), Rev: 1, Attempt: 1, Topic: topic, From: e.Cluster, To: to.Name, Mode: mode,
		State: switching.StateRequested, Epoch: e.Epoch + 1, Started: time.Now(), Who: "e2e",
	}
	must(t, st.PutSwitch(ctx, rec))
	return rec
}

// awaitSwitch waits for the end of a switch.
func awaitSwitch(t *testing.T, st store.Store, rec switching.Record) switching.Record {
	t.Helper()
	return awaitRecord(t, st, rec, 90*time.Second, "to end", func(r switching.Record) bool { return r.State.Over() })
}

func awaitRecord(t *testing.T, st store.Store, rec switching.Record, limit time.Duration, what string, reached func(switching.Record) bool) switching.Record {
	t.Helper()
	ctx := limited(t, limit)
	err := WaitUntil(ctx, "switch "+rec.ID+" "+what, func() (bool, error) {
		once, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if now, err := st.Switch(once, rec.ID); err == nil { // else the store is away, or gone for the moment
			rec = now
		}
		return reached(rec), nil
	})
	if err != nil {
		t.Fatalf("%v: %s: %s\n%s", err, rec.State, rec.Note, steps(rec))
	}
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

// holdSteps is what the time of a fence went for, in one line.
func holdSteps(rec switching.Record) string {
	var parts []string
	for _, s := range rec.Receipt.Steps {
		parts = append(parts, fmt.Sprintf("%s %.0f", s.Work, s.Millis))
	}
	return "(ms: " + strings.Join(parts, ", ") + ")"
}

// raiseLedgers makes the next ledger ids of a cluster larger, as if it had been in use for years (SW-02): BookKeeper takes them from the
// counter of children that this node of ZooKeeper ever had.
func raiseLedgers(t *testing.T, c *Cluster) {
	t.Helper()
	conn, events, err := zkclient.Connect([]string{c.ZooKeeper}, 10*time.Second, zkclient.WithLogger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)))
	must(t, err)
	defer conn.Close()
	for e := range events {
		if e.State == zkclient.StateHasSession {
			break
		}
	}
	for range 20 { // 10,000 at least: each is counted again when it goes
		var ops []any
		for range 500 {
			ops = append(ops, &zkclient.CreateRequest{Path: "/ledgers/idgen/ID-", Acl: zkclient.WorldACL(zkclient.PermAll), Flags: zkclient.FlagEphemeral | zkclient.FlagSequence})
		}
		_, err := conn.Multi(ops...)
		must(t, err)
	}
}

// wantHigherLedgers makes sure that raiseLedgers has done its work for a topic on both clusters.
func wantHigherLedgers(t *testing.T, topic string) {
	t.Helper()
	var ledgers [2]int64
	for i, c := range []*Cluster{rig.A, rig.B} {
		must(t, WaitUntil(limited(t, 20*time.Second), topic+" to have messages on cluster "+c.Name, func() (bool, error) {
			tail, err := carrier(t, c).Tail(t.Context(), topic)
			ledgers[i] = tail.Last.Ledger
			return err == nil && tail.Last.Entry >= 0, nil
		}))
	}
	if ledgers[0] < ledgers[1]+5_000 {
		t.Errorf("the ledger of %s is %d on cluster a and %d on b; want a's far above, to prove anything about message ids", topic, ledgers[0], ledgers[1])
	}
}
