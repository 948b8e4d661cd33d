package app

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
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
}

// linesPerSecond bounds lines below the level of errors.
const linesPerSecond = 200

func newReporter(log *slog.Logger) *reporter { return &reporter{log: log} }

func (r *reporter) report(e session.Report) {
	level := levelOf(e)
	if !r.log.Enabled(context.Background(), level) || !r.allow(time.Now().Unix()) {
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
	}
	if e.Text != "" {
		attrs = append(attrs, slog.String("detail", short(e.Text)))
	}
	r.log.LogAttrs(context.Background(), level, message, attrs...)
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
