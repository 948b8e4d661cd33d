package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/admin"
)

// leftText is what a subscription has still to do on the old cluster of a drain.
func leftText(l switching.Left, at time.Time) string {
	parts := []string{fmt.Sprintf("%s: %s", l.Subscription, pluralOf(l.Backlog, "entry", "entries"))}
	if l.Reader {
		parts[0] = "reader " + parts[0]
	}
	if l.Unacked > 0 {
		parts = append(parts, fmt.Sprintf("%d unacknowledged", l.Unacked))
	}
	if l.Delayed > 0 {
		parts = append(parts, fmt.Sprintf("%d delayed", l.Delayed))
	}
	if !l.Oldest.IsZero() {
		parts = append(parts, "the oldest is "+max(at.Sub(l.Oldest), 0).Round(time.Second).String()+" old")
	}
	if l.PerSecond > 0 {
		parts = append(parts, fmt.Sprintf("%.0f a second", l.PerSecond))
	}
	if l.ETA > 0 {
		parts = append(parts, "done in about "+seconds(l.ETA))
	}
	if l.Leaving {
		parts = append(parts, "leaving")
	}
	text := strings.Join(parts, ", ")
	switch {
	case len(l.By) > 0:
		text += "; held by " + strings.Join(l.By, ", ")
		if more := l.Consumers - len(l.By); more > 0 {
			text += fmt.Sprintf(" (%s in all)", plural(l.Consumers, "consumer"))
		}
	case l.Backlog > 0:
		text += "; no consumer"
	}
	return text
}

func pluralOf(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func seconds(n float64) string {
	return (time.Duration(n) * time.Second).Round(time.Second).String()
}

// drainText is how far a drain is, in a few words; "" of one that is not known.
func drainText(d admin.SwitchDetail) string {
	t := d.Draining
	switch {
	case t == nil:
		return ""
	case t.Why != "":
		return ": " + t.Why
	case d.Return:
		return fmt.Sprintf(": %s copied to %s, %d to go", pluralOf(t.Copied, "entry", "entries"), d.From, t.ToCopy)
	}
	text := fmt.Sprintf(": %s on %s, %s left", plural(t.Subscriptions, "subscription"), d.From, pluralOf(t.Backlog, "entry", "entries"))
	if t.Readers > 0 {
		text += ", " + plural(t.Readers, "reader")
	}
	if t.ETA > 0 {
		text += ", done in about " + seconds(t.ETA)
	}
	return text
}

// writeDraining shows what is left of a drain, and what has moved.
func writeDraining(w io.Writer, d admin.SwitchDetail) {
	if text := drainText(d); text != "" {
		fmt.Fprintf(w, "  %s%s\n", d.State, text)
		for _, l := range d.Draining.Left {
			fmt.Fprintf(w, "  left: %s\n", leftText(l, d.Draining.At))
		}
		if !d.Return && slices.ContainsFunc(d.Draining.Left, func(l switching.Left) bool { return l.Backlog > 0 && l.Consumers == 0 && !l.Reader }) {
			fmt.Fprintf(w, "  without a consumer a subscription stays; for one that nobody needs: pulsar-admin topics unsubscribe -s NAME %s, on cluster %s (it is kept on %s)\n", d.Topic, d.From, d.To)
		}
	}
	rc := d.Receipt
	if d.Mode != switching.ModeDrain || rc == nil {
		return
	}
	for _, m := range rc.Moved {
		fmt.Fprintf(w, "  moved: %s, %s after the producers\n", m.Subscription, (time.Duration(m.Seconds * float64(time.Second))).Round(100*time.Millisecond))
	}
	if more := rc.MovedCount - len(rc.Moved); more > 0 {
		fmt.Fprintf(w, "  moved: and %d more\n", more)
	}
	if rc.Copied > 0 {
		fmt.Fprintf(w, "  copied back to %s: %s\n", d.From, pluralOf(rc.Copied, "entry", "entries"))
	}
}
