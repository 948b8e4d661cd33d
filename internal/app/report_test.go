package app

import (
	"bytes"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
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

// reported is what a reporter says of events, for a log from level on.
func reported(level slog.Level, now time.Time, events ...session.Report) (*reporter, *bytes.Buffer) {
	out := &bytes.Buffer{}
	r := newReporter(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: level})))
	for _, e := range events {
		r.reportAt(now, e)
	}
	return r, out
}

// A line names what there is to name, and nothing else; what clients do every day is for debugging.
func TestALineHasWhatIsKnownAndNoMore(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, c := range []struct {
		e    session.Report
		want string // after the time; "": nothing is said at the usual level
	}{
		{session.Report{Event: session.EventClosed, Cause: session.CauseClientSilent, Session: 31, Cluster: "a"},
			`level=WARN msg="client connection closed" conn=1f peer="invalid AddrPort" cluster=a reason=` + session.CauseClientSilent.String()},
		{session.Report{Event: session.EventRefused, Refusal: session.RefusedMoved, Topic: "t"}, `level=WARN msg="request refused" topic=t reason=` + session.RefusedMoved.String()},
		{session.Report{Event: session.EventClosed, Cause: session.CauseClientEOF}, ""},
		{session.Report{Event: session.EventClosed, Cause: session.CauseClientReset}, ""},
		{session.Report{Event: session.EventClosed, Cause: session.CauseShutdown}, ""},
		{session.Report{Event: session.EventRefused, Cause: session.CauseClientEOF, Refusal: session.RefusedMoved}, `level=WARN msg="request refused" reason=` + session.RefusedMoved.String()},
	} {
		_, out := reported(slog.LevelInfo, now, c.e)
		if _, line, _ := strings.Cut(strings.TrimSpace(out.String()), " "); line != c.want {
			t.Errorf("%+v:\n%s, want\n%s", c.e, line, c.want)
		}
		if _, out := reported(slog.LevelDebug, now, c.e); out.Len() == 0 {
			t.Errorf("%+v: nothing is said", c.e)
		}
	}
}

// Names are the clients'; they may be megabytes, and be cut in the middle of a letter.
func TestALongNameIsCutInALine(t *testing.T) {
	name := strings.Repeat("é", maxValue) // a letter of two bytes, from an odd place on
	_, out := reported(slog.LevelInfo, time.Unix(1000, 0), session.Report{Event: session.EventRefused, Topic: "x" + name, Text: "x" + name})
	if line := out.String(); strings.Count(line, "… (1001 bytes)") != 2 || strings.Count(line, "é") != 2*((maxValue-1)/2) || len(line) > 4*maxValue || strings.Contains(line, `\x`) {
		t.Errorf("%d bytes: %s", len(line), line)
	}
}

// In a storm so many lines a second are written, and then how many were not; what is not for this log takes no line's place.
func TestAStormOfReportsIsNotAStormOfLines(t *testing.T) {
	now := time.Unix(1000, 0)
	quiet := session.Report{Event: session.EventClosed, Cause: session.CauseClientEOF}
	loud := session.Report{Event: session.EventClosed, Cause: session.CauseClientSilent}
	var events []session.Report
	for range 2 * linesPerSecond {
		events = append(events, quiet)
	}
	for range linesPerSecond + 50 {
		events = append(events, loud)
	}
	r, out := reported(slog.LevelInfo, now, events...)
	if n := strings.Count(out.String(), "\n"); n != linesPerSecond {
		t.Errorf("%d lines, want %d", n, linesPerSecond)
	}
	for range 2 {
		out.Reset()
		now = now.Add(time.Second)
		r.reportAt(now, loud)
		r.reportAt(now, loud)
		if said := strings.Contains(out.String(), "lines were left out") && strings.Contains(out.String(), "count=50"); said != (now.Unix() == 1001) || strings.Count(out.String(), "closed") != 2 {
			t.Errorf("second %d: %s", now.Unix(), out)
		}
	}
}

// The brokers that are remembered are bounded, and told apart by their cluster and their name.
func TestBrokersThatCannotBeReachedAreBounded(t *testing.T) {
	now := time.Unix(1000, 0)
	r, out := reported(slog.LevelInfo, now)
	fails := func(cluster, broker string) bool {
		out.Reset()
		now = now.Add(time.Second) // the lines of a second are bounded as well
		r.reportAt(now, session.Report{Event: session.EventUpstream, Cluster: cluster, Broker: broker})
		return out.Len() > 0
	}
	if !fails("a", "b1") || !fails("a", "b2") || !fails("b", "b1") || fails("a", "b1") {
		t.Error("the first failure of each broker is said, and no second one")
	}
	for i := range 2 * maxRepeated {
		r.lookupFailed(now, strconv.Itoa(i))
	}
	if n := len(r.lookups); n > maxRepeated {
		t.Errorf("%d brokers are remembered", n)
	}
}

// What a broker has said of itself is told to clients bit by bit.
func TestEachCapabilityIsTakenForItself(t *testing.T) {
	yes := true
	for want, flags := range map[cluster.Features]*pulsarpb.FeatureFlags{
		0:                                    {},
		cluster.FeatureTopicWatchers:         {SupportsTopicWatchers: &yes},
		cluster.FeatureReplDedupByLidAndEid:  {SupportsReplDedupByLidAndEid: &yes},
		cluster.FeatureTopicWatcherReconcile: {SupportsTopicWatcherReconcile: &yes},
		cluster.FeatureGetPartitionedMetadataWithoutAutoCreation: {SupportsGetPartitionedMetadataWithoutAutoCreation: &yes},
	} {
		version := int32(21)
		if got := capabilitiesOf(&pulsarpb.CommandConnected{ProtocolVersion: &version, FeatureFlags: flags}); got.Features != want || got.ProtocolVersion != 21 {
			t.Errorf("%v became %+v, want %v", flags, got, want)
		}
	}
}
