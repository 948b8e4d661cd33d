package app

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"pointsman/core/session"
)

// A dead cluster is tried several times a second, for hours.
func TestABrokerThatCannotBeReachedIsSaidEveryHalfMinute(t *testing.T) {
	var out bytes.Buffer
	r := newReporter(slog.New(slog.NewTextHandler(&out, nil)))
	lines := func(now time.Time, broker string) int {
		out.Reset()
		r.reportAt(now, session.Report{Event: session.EventUpstream, Cluster: "a", Broker: broker, Text: "connection refused"})
		return strings.Count(out.String(), "\n")
	}
	now := time.Unix(1000, 0)
	if lines(now, "b1:6650") != 1 || lines(now, "b2:6650") != 1 {
		t.Error("the first failure of each broker is said at once")
	}
	for range 99 {
		now = now.Add(repeatAfter / 100)
		if n := lines(now, "b1:6650"); n != 0 {
			t.Fatalf("%d lines within half a minute", n)
		}
	}
	now = now.Add(repeatAfter / 100)
	if lines(now, "b1:6650") != 1 || !strings.Contains(out.String(), "times=100") {
		t.Errorf("after half a minute: %q", out.String())
	}
	now = now.Add(time.Hour)
	if lines(now, "b1:6650") != 1 || strings.Contains(out.String(), "times") {
		t.Errorf("one failure after an hour: %q", out.String())
	}
}

// Operators look for what the documentation names.
func TestWhatHappenedIsSaidByItsName(t *testing.T) {
	for event, want := range map[session.Event]string{
		session.EventUpstream:  "a lookup connection failed",
		session.EventRestarted: "a reader begins with the oldest message",
		session.EventLegLost:   "event=leg_lost",
	} {
		var out bytes.Buffer
		newReporter(slog.New(slog.NewTextHandler(&out, nil))).report(session.Report{Event: event, Session: 1, Cluster: "a", Broker: "b1:6650", Topic: "persistent://acme/orders/t1", Text: "connection refused"})
		if !strings.Contains(out.String(), want) || !strings.Contains(out.String(), `detail="connection refused"`) {
			t.Errorf("%v: %s", event, out.String())
		}
	}
}
