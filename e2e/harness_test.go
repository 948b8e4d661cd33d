//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

// limited returns a context for one step of a test, or of its clean-up, which runs when t.Context has ended.
func limited(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
	t.Cleanup(cancel)
	return ctx
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var topicSeq atomic.Int64

// newTopic names a topic that no test and no earlier run has used.
func newTopic(namespace, what string) string {
	return fmt.Sprintf("persistent://%s/%s-%s-%d", namespace, what, runID, topicSeq.Add(1))
}

// address is one way from a client to a cluster: direct, through the official proxy, or through Pointsman.
type address struct {
	name     string
	clusters []*Cluster
	// write and read are the service URLs of producers and of consumers for a topic on c.
	write, read func(t *testing.T, c *Cluster) string
	// place makes topic live on c.
	place func(t *testing.T, topic string, c *Cluster)
}

// addresses are all ways; the official proxy stands in front of cluster a only. Through Pointsman, producers use one
// proxy and consumers the other.
func addresses() []address {
	nowhere := func(*testing.T, string, *Cluster) {}
	direct := func(_ *testing.T, c *Cluster) string { return c.URL() }
	official := func(*testing.T, *Cluster) string { return rig.ProxyURL }
	return []address{
		{name: "direct", clusters: []*Cluster{rig.A, rig.B}, write: direct, read: direct, place: nowhere},
		{name: "official-proxy", clusters: []*Cluster{rig.A}, write: official, read: official, place: nowhere},
		{
			name: "pointsman", clusters: []*Cluster{rig.A, rig.B},
			write: func(t *testing.T, _ *Cluster) string { return pair(t)[0].URL },
			read:  func(t *testing.T, _ *Cluster) string { return pair(t)[1].URL },
			place: func(t *testing.T, topic string, c *Cluster) {
				setRoute(t, pair(t)[0], topic, c.Name)
				awaitRoute(t, topic, c.Name)
			},
		},
	}
}

// driverSeq numbers the drivers, for the names of their logs.
var driverSeq atomic.Int64

// startDriver starts a client driver that ends with the test at the latest.
func startDriver(t *testing.T, client Client, mode string, args ...string) *Driver {
	t.Helper()
	name := fmt.Sprintf("driver-%03d-%s-%s", driverSeq.Add(1), client, mode)
	d, err := StartDriver(artifacts, processes, client, name, mode, args...)
	must(t, err)
	proc := d.proc // and not the driver, with all that it has said
	t.Cleanup(func() { _ = proc.Stop(10 * time.Second) })
	return d
}

// runDriver runs a driver to its end and fails the test if it reports an error.
func runDriver(t *testing.T, limit time.Duration, client Client, mode string, args ...string) Record {
	t.Helper()
	return finish(t, limit, startDriver(t, client, mode, args...))
}

// finish waits for the end of a driver and fails the test if it reports an error.
func finish(t *testing.T, limit time.Duration, d *Driver) Record {
	t.Helper()
	record, err := d.WaitDone(limited(t, limit))
	if err != nil {
		t.Errorf("%v", err)
	}
	noErrors(t, d, record)
	return record
}

// noErrors fails the test for each error that the application saw.
func noErrors(t *testing.T, d *Driver, record Record) {
	t.Helper()
	for _, e := range record.Errors {
		t.Errorf("%s: application error: %s (number %d): %s", d.proc.Name, e.What, e.N, e.Text)
	}
}

// awaitLimit is many times what a driver needs to start, or to say the next thing, on a machine with nothing else to do.
const awaitLimit = 90 * time.Second

// await waits until a driver's record is as wanted.
func await(t *testing.T, d *Driver, what string, reached func(Record) bool) Record {
	t.Helper()
	record, err := d.Wait(limited(t, awaitLimit), what, reached)
	must(t, err)
	return record
}

// awaitReady waits until n producers, consumers or readers of a driver are open.
func awaitReady(t *testing.T, d *Driver, n int) {
	t.Helper()
	await(t, d, fmt.Sprintf("%d to be ready", n), func(r Record) bool { return len(r.Ready) >= n })
}

// patient has a driver bear that its proxy is away for as long as a session lasts, until another one leads. Clients try again after twice as long each time, the Go client after 12.7 to
// 15.2 s and then not before 25.5 to 30.6 s: what had no receipt when the proxy went away is then 30 s old, which is the libraries' limit.
func patient(client Client) []string {
	if client == Rust { // its driver cannot
		return nil
	}
	return []string{"--send-timeout", "90000"}
}

// awaitEach waits until so many messages of each of the first topics have come to a driver, so that its producers and consumers are all there.
func awaitEach(t *testing.T, d *Driver, topics, messages int) {
	t.Helper()
	seen, came := 0, make([]int, topics)
	await(t, d, fmt.Sprintf("%d messages of each of %d topics", messages, topics), func(r Record) bool {
		for ; seen < r.Recvs.Len(); seen++ {
			came[r.Recvs.At(seen).K]++
		}
		return slices.Min(came) >= messages
	})
}

// awaitReceived waits until everything acknowledged on the topics whose index passes has been received.
func awaitReceived(t *testing.T, d *Driver, limit time.Duration, passes func(k int) bool) {
	t.Helper()
	var open Awaited[int]
	acked, received := 0, 0 // looked at so far
	_, err := d.Wait(limited(t, limit), "everything acknowledged to be received", func(r Record) bool {
		for ; acked < r.Acks.Len(); acked++ {
			if m := r.Acks.At(acked); passes(m.K) {
				open.Want(m.K, m.N)
			}
		}
		for ; received < r.Recvs.Len(); received++ {
			m := r.Recvs.At(received)
			open.Came(m.K, m.N)
		}
		return len(open.Missing()) == 0
	})
	if err != nil {
		t.Errorf("%v; missing by topic: %v", err, open.Missing())
	}
}

// want compares a digest with perfect delivery of count messages.
func want(t *testing.T, who string, d Digest, count int) {
	t.Helper()
	if d.Acked != count || d.Received != count || len(d.Lost)+len(d.Unexpected)+len(d.Corrupt)+d.Duplicates+d.OrderBreaks != 0 {
		t.Errorf("%s: %v; want %d acknowledged and each of them received once, intact and in order", who, d, count)
	}
}

// onlyOn checks that topic exists on the wanted cluster and not on the other one, and how many messages came in there;
// messages < 0 leaves the number out.
func onlyOn(t *testing.T, topic string, c *Cluster, messages int64) {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	other := rig.A
	if c == rig.A {
		other = rig.B
	}
	stray, err := other.TopicsOf(ctx, topic)
	must(t, err)
	if len(stray) != 0 {
		t.Errorf("%s is mapped to cluster %s, but cluster %s has %v", topic, c.Name, other.Name, stray)
	}
	names, err := c.TopicsOf(ctx, topic)
	must(t, err)
	if len(names) == 0 {
		t.Errorf("%s does not exist on cluster %s, where the map puts it", topic, c.Name)
	}
	var in int64
	for _, name := range names {
		stats, err := c.Stats(ctx, name)
		must(t, err)
		in += stats.MsgInCounter
	}
	if messages >= 0 && in != messages {
		t.Errorf("cluster %s counts %d messages into %v, want %d", c.Name, in, names, messages)
	}
}

// ---- Pointsman

var startPair = sync.OnceValues(func() (pair [2]*Pointsman, err error) { return newPair("p", "pointsman-"+runID) })

// newPair starts two proxies that share a map of their own.
func newPair(name, chroot string) ([2]*Pointsman, error) {
	return startTwo(name, chroot, rig.PointsmanConfig(chroot, ""))
}

// startTwo starts two proxies of a configuration whose map lies under chroot.
func startTwo(name, chroot, config string) (pair [2]*Pointsman, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for i := range pair {
		if pair[i], err = StartPointsman(ctx, artifacts, processes, rig.Dir, fmt.Sprintf("%s%d", name, i+1), config); err != nil {
			return pair, err
		}
		pair[i].Map = rig.MapZK + "/" + chroot
	}
	return pair, nil
}

// pair returns the two proxies of this run, started at the first call.
func pair(t *testing.T) [2]*Pointsman {
	t.Helper()
	both, err := startPair()
	must(t, err)
	return both
}

// aged waits until the proxies of a map are old enough to vouch for what their predecessors had on the way: before that the old cluster is made to unload a topic, and
// what consumers have in hand comes again.
func aged(t *testing.T, st store.Store) {
	t.Helper()
	members, err := st.Proxies(limited(t, 10*time.Second))
	must(t, err)
	for _, p := range members {
		if p.Live {
			pass(time.Until(p.Started.Add(switching.SettleTime + time.Second)))
		}
	}
}

// metric reads a metric of a proxy.
func metric(t *testing.T, p *Pointsman, name string, labels ...string) float64 {
	t.Helper()
	value, err := p.Metric(limited(t, 10*time.Second), name, labels...)
	must(t, err)
	return value
}

// The parts of the CLI's JSON that the tests read.
type (
	explanation struct {
		Cluster     string `json:"cluster"`
		Source      string `json:"source"`
		Epoch       uint64 `json:"epoch"`
		LookupError string `json:"lookup_error"`
	}
	proxyList struct {
		Proxies []struct {
			ID     string `json:"id"`
			Digest string `json:"map_digest"`
			Live   bool   `json:"live"`
		} `json:"proxies"`
		Agree bool `json:"agree"`
	}
	switchStatus struct {
		ID          string   `json:"id"`
		State       string   `json:"state"`
		NotPromised []string `json:"not_promised"`
		Switches    []struct {
			Producers  int `json:"producers"`
			Consumers  int `json:"consumers"`
			Unresolved int `json:"unresolved"`
		} `json:"switches"`
	}
)

// setRoute maps a topic or scope through one proxy.
func setRoute(t *testing.T, p *Pointsman, name, cluster string, flags ...string) {
	t.Helper()
	ctx := limited(t, awaitLimit)
	must(t, WaitThrough(ctx, p.Name+" to map "+name+" to "+cluster, func() (bool, error) { // it is refused while a proxy cannot be asked for its clients
		return true, p.CLI(ctx, nil, append([]string{"routes", "set", name, cluster}, flags...)...)
	}))
}

// awaitRoute waits until both proxies serve a map that puts topic on cluster.
func awaitRoute(t *testing.T, topic, cluster string) {
	t.Helper()
	for _, p := range pair(t) {
		awaitRouteOn(t, p, topic, cluster)
	}
}

func awaitRouteOn(t *testing.T, p *Pointsman, topic, cluster string) {
	t.Helper()
	ctx := limited(t, awaitLimit)
	must(t, WaitThrough(ctx, p.Name+" to map "+topic+" to "+cluster, func() (bool, error) {
		var e explanation
		err := p.CLI(ctx, &e, "explain", topic)
		return e.Cluster == cluster, err
	}))
}

// switchTopic moves a topic in immediate mode and returns how it ended.
func switchTopic(t *testing.T, p *Pointsman, topic, to string) switchStatus {
	t.Helper()
	ctx := limited(t, 30*time.Second)
	var s switchStatus
	must(t, p.CLI(ctx, &s, "switch", "start", "--topic", topic, "--to", to, "--mode", "immediate"))
	must(t, WaitUntil(ctx, "switch "+s.ID+" of "+topic+" to end", func() (bool, error) {
		if s.State != "running" {
			return true, nil
		}
		return false, p.CLI(ctx, &s, "switch", "status", s.ID)
	}))
	if s.State != "done" {
		t.Errorf("the switch of %s to %s ended as %q, want done: %+v", topic, to, s.State, s)
	}
	return s
}

// take fills in what a comparison of receipts and messages found.
func (r *Row) take(d Digest, errors int) {
	r.Acked, r.Lost, r.Duplicates, r.OrderBreaks, r.Errors = d.Acked, len(d.Lost)+len(d.Corrupt), d.Duplicates, d.OrderBreaks, errors
}

// sockets returns how many sockets a process has open.
func sockets(t *testing.T, p *Process) int {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(p.Pid) + "/fd"
	entries, err := os.ReadDir(dir)
	must(t, err)
	n := 0
	for _, entry := range entries {
		if target, err := os.Readlink(dir + "/" + entry.Name()); err == nil && strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n
}
