package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pointsman/core/switching"
	"pointsman/internal/admin"
)

// scopeFlags choose topics that are not named one by one.
func scopeFlags(cmd *cobra.Command, r *admin.SwitchRequest) {
	f := cmd.Flags()
	f.StringVar(&r.Namespace, "namespace", "", "move everything in TENANT/NAMESPACE")
	f.StringVar(&r.Prefix, "prefix", "", "move what begins with TENANT/NAMESPACE/BEGINNING, or with BEGINNING in --namespace")
	f.Float64Var(&r.Percent, "percent", 0, "move this share of it, chosen by name: 10 is a part of 20")
}

// checkShare refuses a --percent that would be taken for none: without one, all of it moves.
func checkShare(cmd *cobra.Command, percent float64) error {
	if cmd.Flags().Changed("percent") && !(percent > 0 && percent <= 100) {
		return usage("--percent %g is no share; write more than 0 and at most 100, or leave it out for all topics", percent)
	}
	return nil
}

// batchFlags are how a batch goes about it, as they are written.
type batchFlags struct {
	waves, pace, maxFailed, onBlocked string
	parallel                          int
	maxHold                           time.Duration
	maxBacklog                        int64
}

func (b *batchFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&b.waves, "waves", strings.Join(switching.DefaultWaves(), ","), "batch: how much has moved at the end of each wave, in topics or shares")
	f.StringVar(&b.pace, "pace", "0", "batch: switches that begin in a second at most, as in 5/s; 0 is no limit")
	f.IntVar(&b.parallel, "parallel", admin.DefaultBatchParallel, "batch: switches under way at once")
	f.StringVar(&b.maxFailed, "max-failed", "5%", "batch: pause when more switches than that are aborted or incomplete")
	f.DurationVar(&b.maxHold, "max-hold", admin.DefaultMaxHoldMillis*time.Millisecond, "batch: pause when publishers wait longer (99th percentile); 0 is no limit")
	f.Int64Var(&b.maxBacklog, "max-backlog", admin.DefaultMaxBacklog, "batch: pause when one of the next topics has more entries to be replicated; 0 is no limit")
	f.StringVar(&b.onBlocked, "on-blocked", string(switching.StopOnBlocked), "batch: stop, or skip topics that the preflight does not let move")
}

// onBlockedFlag changes what a batch was told before.
func onBlockedFlag(cmd *cobra.Command, r *admin.SwitchCommand) {
	cmd.Flags().StringVar((*string)(&r.OnBlocked), "on-blocked", "", "batch: from now on stop, or skip topics that the preflight does not let move")
}

// into reads the flags that are given; the proxy knows what the others are.
func (b *batchFlags) into(cmd *cobra.Command, o *admin.BatchOptions) error {
	given := cmd.Flags().Changed
	if given("waves") {
		for wave := range strings.SplitSeq(b.waves, ",") {
			o.Waves = append(o.Waves, strings.TrimSpace(wave))
		}
	}
	if given("parallel") {
		if o.Parallel = b.parallel; b.parallel == 0 {
			return usage("--parallel 0 would move nothing; write 1 to %d, or leave it out for %d", switching.MaxBatchParallel, admin.DefaultBatchParallel)
		}
	}
	if given("max-hold") {
		hold := float64(b.maxHold.Milliseconds())
		o.MaxHoldMillis = &hold
	}
	if given("max-backlog") {
		o.MaxBacklog = &b.maxBacklog
	}
	if given("on-blocked") {
		o.OnBlocked = switching.OnBlocked(b.onBlocked)
	}
	var err error
	if o.Pace, err = strconv.ParseFloat(strings.TrimSuffix(b.pace, "/s"), 64); err != nil || math.IsNaN(o.Pace) || math.IsInf(o.Pace, 0) {
		return usage("--pace %q is no pace; write a number of switches per second such as 5/s; see `%s --help`", b.pace, cmd.CommandPath())
	}
	if given("max-failed") {
		share, err := strconv.ParseFloat(strings.TrimSuffix(b.maxFailed, "%"), 64)
		if err != nil || !strings.HasSuffix(b.maxFailed, "%") || math.IsNaN(share) || math.IsInf(share, 0) {
			return usage("--max-failed %q is no share; write one such as 5%%; see `%s --help`", b.maxFailed, cmd.CommandPath())
		}
		share /= 100
		o.MaxFailed = &share
	}
	return nil
}

// writeBatch shows a batch: what it was asked for, how far it is, and what it waits for.
func writeBatch(w io.Writer, st admin.SwitchStatus) {
	b := *st.Batch
	if st.ID == "" {
		fmt.Fprintf(w, "batch of %s to %s, %s: %s\n", b.Scope, b.To, b.Mode, plural(b.Count.Total, "topic"))
	} else {
		fmt.Fprintf(w, "batch %s of %s to %s, %s: %s\n", b.ID, b.Scope, b.To, b.Mode, b.Shown())
		fmt.Fprintln(w, batchProgress(b, time.Now()))
		fmt.Fprintln(w, asked(b.Who, b.Why, b.Started, b.Ended))
	}
	switch {
	case b.WishBy == "":
	case b.Abort || b.State == switching.BatchAborted:
		fmt.Fprintln(w, "abort asked for by", b.WishBy)
	case b.Pause == nil:
		fmt.Fprintln(w, "resumed by", b.WishBy)
	}
	if b.Pause != nil {
		fmt.Fprintf(w, "paused by gate %s: %s\n", b.Pause.Gate, b.Pause.Why)
		fmt.Fprintf(w, "to go on: pointsman switch resume %s%s; to give it up: pointsman switch abort %s\n", b.ID, resumeHint(b), b.ID)
	}
	if b.Note != "" {
		fmt.Fprintln(w, "note:", b.Note)
	}
	l := b.Limits
	pace := "no limit"
	if l.Pace > 0 {
		pace = fmt.Sprintf("%g/s", l.Pace)
	}
	ends := make([]string, len(b.Ends))
	for i, end := range b.Ends {
		ends[i] = strconv.Itoa(end)
	}
	fmt.Fprintf(w, "plan: waves end at %s; %d at once, pace %s; blocked topics: %s\n", orDash(strings.Join(ends, ", ")), l.Parallel, pace, l.OnBlocked)
	fmt.Fprintf(w, "gates: failed above %g%%, hold above %s, backlog above %s\n", l.MaxFailed*100, limitText(l.MaxHoldMillis, " ms"), limitText(float64(l.MaxBacklog), " entries"))
	switch {
	case b.Ruled:
		fmt.Fprintf(w, "namespace %s is one rule now, epoch %d, in place of %s\n", b.Namespace, b.Rule, pluralOf(int64(b.Removed), "entry", "entries"))
	case b.Namespace != "":
		when := "when all have moved"
		if b.Mode == switching.ModeDrain {
			when = "when nothing drains any more"
		}
		fmt.Fprintf(w, "%s, namespace %s becomes one rule\n", when, b.Namespace)
	}
	if f := b.Forecast; f.Topics > 0 {
		todo := fmt.Sprintf("%s may come twice; %s and %s move; cluster %s gains %s/s in and %s/s out; %s to be replicated",
			pluralOf(f.Duplicates, "message", "messages"), plural(f.Producers, "producer"), plural(f.Consumers, "consumer"), b.To, byteSize(f.BytesIn), byteSize(f.BytesOut), pluralOf(f.Unreplicated, "entry", "entries"))
		if b.Mode == switching.ModeDrain {
			todo = fmt.Sprintf("%s; cluster %s gains %s/s in; %s to drain before all subscriptions have followed", plural(f.Producers, "producer")+" move", b.To, byteSize(f.BytesIn), pluralOf(f.ToDrain, "entry", "entries"))
		}
		fmt.Fprintf(w, "forecast of %s: publishers wait up to about %.0f ms; %s\n", plural(f.Topics, "topic"), f.MaxHold, todo)
	}
	for _, text := range b.Warnings {
		fmt.Fprintln(w, "warning:", text)
	}
}

// resumeHint is how a batch goes on in spite of what its preflights have found.
func resumeHint(b switching.Batch) string {
	if b.Pause.Gate != switching.GatePreflight {
		return ""
	}
	if b.Limits.Force {
		return " when that is mended (--on-blocked skip leaves the blocked topics behind)"
	}
	return " when that is mended (--force moves topics in spite of warnings, --on-blocked skip leaves the blocked ones behind)"
}

func limitText(v float64, unit string) string {
	if v == 0 {
		return "any"
	}
	return strconv.FormatFloat(v, 'f', -1, 64) + unit
}

// batchProgress is one line about how far a batch is.
func batchProgress(b switching.Batch, now time.Time) string {
	c := b.Count
	var t strings.Builder
	switch {
	case b.State == switching.BatchNew:
		return "new: its topics are being written down"
	case b.State == switching.BatchChecking:
		fmt.Fprintf(&t, "%s: %d of %d looked at, %d blocked", b.Shown(), c.Checked, c.Total, c.Blocked)
		return t.String()
	case b.State.Over(), b.State == switching.BatchDraining:
		fmt.Fprintf(&t, "%s: ", b.Shown())
	default:
		fmt.Fprintf(&t, "%s, wave %d of %d: ", b.Shown(), b.Wave+1, max(len(b.Ends), 1))
	}
	fmt.Fprintf(&t, "%d of %d moved", c.Moved, c.Total)
	for _, part := range []struct {
		n    int
		what string
	}{{c.Draining, "of them still drain"}, {c.Running, "under way"}, {c.Failed, "failed"}, {c.Blocked, "blocked"}, {c.Skipped, "skipped"}, {c.Troubled, "incomplete"}} {
		if part.n > 0 {
			fmt.Fprintf(&t, ", %d %s", part.n, part.what)
		}
	}
	if b.HoldP99 > 0 {
		fmt.Fprintf(&t, "; hold p50 %.0f ms, p99 %.0f ms", b.HoldP50, b.HoldP99)
	}
	if b.AtOnce > 0 && b.Pause == nil {
		fmt.Fprintf(&t, "; %d at once for now", b.AtOnce)
	}
	if !b.ETA.IsZero() {
		fmt.Fprintf(&t, "; done in about %s", max(b.ETA.Sub(now), 0).Round(time.Second))
	}
	return t.String()
}

// writeBatches lists batches.
func writeBatches(w io.Writer, all []switching.Batch) {
	if len(all) == 0 {
		return
	}
	rows := [][]string{{"BATCH", "STARTED", "MODE", "WHAT", "TO", "STATE", "TOPICS", "MOVED", "FAILED", "BLOCKED", "WHO"}}
	for _, b := range all {
		rows = append(rows, []string{b.ID, stamp(b.Started), string(b.Mode), b.Scope, b.To, b.Shown(), strconv.Itoa(b.Count.Total), strconv.Itoa(b.Count.Moved), strconv.Itoa(b.Count.Failed), strconv.Itoa(b.Count.Blocked), b.Who})
	}
	writeRows(w, rows)
	fmt.Fprintln(w)
}
