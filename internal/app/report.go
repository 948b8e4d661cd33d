package app

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
	"pointsman/core/session"
)

// reporter turns the event loops' reports into log lines, at most a number of them per second, so that a storm of bad
// clients does not become a storm of lines. It is called on the loops' goroutines.
type reporter struct {
	log     *slog.Logger
	second  atomic.Int64 // the second that lines are counted for
	lines   atomic.Int64
	skipped atomic.Int64

	mu      sync.Mutex
	lookups map[string]repeated // guarded by mu: failures of lookup connections, by cluster and broker
}

// repeated is a line that is said again after repeatAfter only.
type repeated struct {
	said  time.Time
	times int // since then
}

const (
	// repeatAfter is how often it is said that a broker cannot be reached, which is tried several times a second for as long as it is so.
	repeatAfter = 30 * time.Second
	// maxRepeated bounds how many brokers are remembered; there are never that many at once.
	maxRepeated = 10_000
)

// linesPerSecond bounds lines below the level of errors.
const linesPerSecond = 200

func newReporter(log *slog.Logger) *reporter {
	return &reporter{log: log, lookups: map[string]repeated{}}
}

func (r *reporter) report(e session.Report) { r.reportAt(time.Now(), e) }

func (r *reporter) reportAt(now time.Time, e session.Report) {
	level := levelOf(e)
	if !r.log.Enabled(context.Background(), level) {
		return
	}
	times := 0
	if e.Event == session.EventUpstream {
		if times = r.lookupFailed(now, e.Cluster+" "+e.Broker); times == 0 {
			return
		}
	}
	if !r.allow(now.Unix()) {
		return
	}
	attrs := make([]slog.Attr, 0, 8)
	if e.Session != 0 {
		attrs = append(attrs, slog.String("conn", fmt.Sprintf("%x", e.Session)), slog.String("peer", e.Peer.String()))
	}
	for _, a := range [...]struct{ key, value string }{{"cluster", e.Cluster}, {"broker", e.Broker}, {"topic", e.Topic}} {
		if a.value != "" {
			attrs = append(attrs, slog.String(a.key, short(a.value)))
		}
	}
	message := "a lookup connection failed"
	switch e.Event {
	case session.EventClosed:
		message = "client connection closed"
		attrs = append(attrs, slog.String("reason", e.Cause.String()))
	case session.EventRefused:
		message = "request refused"
		attrs = append(attrs, slog.String("reason", e.Refusal.String()))
	case session.EventRestarted:
		message = "a reader begins with the oldest message"
	case session.EventLegLost:
		message = "a connection to the cluster that a topic is leaving was lost"
		attrs = append(attrs, slog.String("event", e.Event.String()), slog.String("reason", e.Cause.String()))
	}
	if e.Text != "" {
		attrs = append(attrs, slog.String("detail", short(e.Text)))
	}
	if times > 1 {
		attrs = append(attrs, slog.Int("times", times))
	}
	r.log.LogAttrs(context.Background(), level, message, attrs...)
}

// lookupFailed counts one more failure, and tells how many the line stands for that is due now; 0: none is.
func (r *reporter) lookupFailed(now time.Time, broker string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.lookups) >= maxRepeated {
		clear(r.lookups)
	}
	seen := r.lookups[broker]
	seen.times++
	if now.Sub(seen.said) < repeatAfter {
		r.lookups[broker] = seen
		return 0
	}
	r.lookups[broker] = repeated{said: now}
	return seen.times
}

// maxValue bounds what clients may write into a line: names are theirs, and may be megabytes.
const maxValue = 500

func short(value string) string {
	if len(value) <= maxValue {
		return value
	}
	return fmt.Sprintf("%s… (%d bytes)", strings.ToValidUTF8(value[:maxValue], ""), len(value))
}

// levelOf: what clients do every day is for debugging, what an operator may have to mend is a warning.
func levelOf(e session.Report) slog.Level {
	if e.Event != session.EventClosed {
		return slog.LevelWarn
	}
	switch e.Cause {
	case session.CauseClientEOF, session.CauseClientReset, session.CauseShutdown:
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

func (r *reporter) allow(second int64) bool {
	if old := r.second.Load(); old != second && r.second.CompareAndSwap(old, second) {
		r.lines.Store(0)
		if n := r.skipped.Swap(0); n > 0 {
			r.log.Warn("lines were left out", "count", n, "limit_per_second", linesPerSecond)
		}
	}
	if r.lines.Add(1) > linesPerSecond {
		r.skipped.Add(1)
		return false
	}
	return true
}

// capabilitiesOf is what a broker said of itself in CONNECTED.
func capabilitiesOf(c *pulsarpb.CommandConnected) cluster.Capabilities {
	caps := cluster.Capabilities{ProtocolVersion: uint32(c.GetProtocolVersion())}
	f := c.GetFeatureFlags()
	for _, one := range [...]struct {
		on   bool
		flag cluster.Features
	}{
		{f.GetSupportsTopicWatchers(), cluster.FeatureTopicWatchers},
		{f.GetSupportsGetPartitionedMetadataWithoutAutoCreation(), cluster.FeatureGetPartitionedMetadataWithoutAutoCreation},
		{f.GetSupportsReplDedupByLidAndEid(), cluster.FeatureReplDedupByLidAndEid},
		{f.GetSupportsTopicWatcherReconcile(), cluster.FeatureTopicWatcherReconcile},
	} {
		if one.on {
			caps.Features |= one.flag
		}
	}
	return caps
}
