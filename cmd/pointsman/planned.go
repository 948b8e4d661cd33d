package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pointsman/core/switching"
	"pointsman/internal/admin"
)

func (c *cli) switchCheck() *cobra.Command {
	var r admin.SwitchRequest
	var from string
	cmd := &cobra.Command{
		Use:   "check (--topic T... | --topics-from FILE | --namespace NS | --prefix P) --to CLUSTER",
		Short: "Tell what a planned switch would run into, and cost",
		Long: `Tell what a planned switch would run into, and cost: the preflight and the forecast of "switch start", alone. Nothing is changed
anywhere. Of more than 64 topics a sample is looked at. What each finding means, and what to do, is in docs/operations.md.

` + exitHelp + `
Here: 0 when all is fine, 3 when there is a blocker or a warning ("verdict" in the JSON output tells which).`,
		Example: `  pointsman switch check --topic persistent://acme/orders/created --to b
  pointsman switch check --topics-from topics.txt --to b --reversible --output json`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			if err := c.topicsFrom(from, &r.Topics); err != nil {
				return err
			}
			if err := checkShare(cmd, r.Percent); err != nil {
				return err
			}
			r.DryRun, r.Who = true, c.author()
			st, err := client.StartSwitch(cmd.Context(), r)
			if err != nil {
				return err
			}
			return c.started(cmd.Context(), client, st, false, false)
		},
	}
	c.topicFlags(cmd, &r, &from)
	scopeFlags(cmd, &r)
	cmd.Flags().StringVar(&r.Mode, "mode", string(switching.ModePlanned), "of which mode: planned or drain")
	return cmd
}

func (c *cli) switchAbort() *cobra.Command {
	var noWait bool
	cmd := &cobra.Command{
		Use:   "abort ID",
		Short: "Give the topic of a planned switch back to the old cluster",
		Long: `Give the topic of a planned switch back to the old cluster, as long as the map does not name the new one, and wait for the end. Clients see one
slow publish. A switch that has flipped is not undone: "switch reverse" moves the topic back. A batch begins nothing more; what has moved stays moved.
Of a drain that is being taken back, the way back is given up.

` + exitHelp,
		Example: `  pointsman switch abort sw-20260102-030405-a1b2c3`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			st, err := client.AbortSwitch(cmd.Context(), admin.SwitchCommand{ID: args[0], Who: c.author()})
			if err != nil {
				return err
			}
			if st.Batch != nil && !noWait {
				if st, err = client.WaitSwitch(cmd.Context(), args[0], nil); err != nil {
					return err
				}
			} else if !noWait && st.Running() {
				skipped, failed := st.Skipped, st.Failed
				if st, err = client.WaitMoved(cmd.Context(), args[0], nil); err != nil {
					return err
				}
				st.Skipped, st.Failed = skipped, failed
			}
			if err := c.print(st, func(w io.Writer) { writeSwitch(w, st) }); err != nil {
				return err
			}
			if st.State != string(switching.StateAborted) && !st.Running() || st.Batch == nil && len(st.Skipped)+len(st.Failed) > 0 {
				return &codeError{code: exitFailed} // it was too late, for some at least
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "do not wait for the end")
	return cmd
}

func (c *cli) switchPause() *cobra.Command {
	return &cobra.Command{
		Use:   "pause ID",
		Short: "Keep a planned switch from beginning",
		Long: `Keep a planned switch, or what a batch has not begun, from beginning, until "switch resume". A topic is not left in the middle: a switch that
has begun ends within seconds. Of a drain it keeps subscriptions that have nothing left from leaving the old cluster.

` + exitHelp,
		Example: `  pointsman switch pause sw-20260102-030405-a1b2c3`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			st, err := client.PauseSwitch(cmd.Context(), admin.SwitchCommand{ID: args[0], Who: c.author()})
			if err != nil {
				return err
			}
			return c.print(st, func(w io.Writer) { writeSwitch(w, st) })
		},
	}
}

func (c *cli) switchResume() *cobra.Command {
	var r admin.SwitchCommand
	var noWait bool
	cmd := &cobra.Command{
		Use:   "resume ID",
		Short: "Let a paused switch begin, or an aborted one begin anew",
		Long: `Let a paused switch begin, or ask for the next attempt of an aborted one; there is a preflight before it. A batch goes on, whatever had paused it, and
tries those topics again that have failed or were blocked; also one that has ended incomplete or was aborted. --force, --reversible and --on-blocked hold for what has
not moved yet.

` + exitHelp,
		Example: `  pointsman switch resume sw-20260102-030405-a1b2c3`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			r.ID, r.Who = args[0], c.author()
			if err := c.foretellOf(cmd.Context(), client, r.ID, false); err != nil {
				return err
			}
			st, err := client.ResumeSwitch(cmd.Context(), r)
			if err != nil {
				return err
			}
			if st.Batch != nil {
				st.Skipped, st.Failed = nil, nil // they have their turn again
			}
			return c.started(cmd.Context(), client, st, r.Force, !noWait)
		},
	}
	cmd.Flags().BoolVar(&r.Force, "force", false, "in spite of warnings of the preflight")
	cmd.Flags().BoolVar(&r.Reversible, "reversible", false, "the way back is wanted: what it lacks is a blocker")
	onBlockedFlag(cmd, &r)
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "do not wait for the end")
	return cmd
}

func (c *cli) switchReverse() *cobra.Command {
	var r admin.SwitchCommand
	var noWait bool
	cmd := &cobra.Command{
		Use:   "reverse ID",
		Short: "Move the topics of a switch back, by a new planned switch",
		Long: `Move the topics of a switch that is done back to where they came from: a new planned switch in the other direction, with a preflight before it.
Refused when a topic has moved on since. Of a namespace, topics that the batch has not moved stay where they are, with a warning.
A failover goes back as a batch: one of topics, or of one namespace; for one of several rules the error says the commands.
Topics of which it has only ended a drain stay.

A switch that drains is taken back instead, as long as every subscription reads the old cluster ("switch pause" keeps them there; one that is caught up leaves
after about a second) and no other one has had a message on the new one: what was published there is copied behind what the old cluster has, and then the topic is
there again as if nothing had been. Later than that the drain has to end, and the way back is another one.

What a way back promises is what its mode does: planned, and drain of a drain. It is said before anything is asked for, as by "switch start".

` + exitHelp,
		Example: `  pointsman switch reverse sw-20260102-030405-a1b2c3 --dry-run
  pointsman switch reverse sw-20260102-030405-a1b2c3 --why "errors since the move"`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			r.ID, r.Who, r.Why = args[0], c.author(), c.why
			if !r.DryRun { // whose answer says it
				if err := c.foretellOf(cmd.Context(), client, r.ID, true); err != nil {
					return err
				}
			}
			st, err := client.ReverseSwitch(cmd.Context(), r)
			if err != nil {
				return err
			}
			return c.started(cmd.Context(), client, st, r.Force, !noWait)
		},
	}
	cmd.Flags().BoolVar(&r.Force, "force", false, "in spite of warnings of the preflight")
	cmd.Flags().BoolVar(&r.DryRun, "dry-run", false, "only the preflight")
	onBlockedFlag(cmd, &r)
	cmd.Flags().BoolVar(&r.Reversible, "reversible", false, "the way back is wanted again: what it lacks is a blocker")
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "do not wait for the end")
	c.changeFlags(cmd)
	return cmd
}

// refusedBy is the exit code of a dry run: that of the start that it stands for.
func refusedBy(checks []switching.Preflight, force bool) error {
	worst := switching.Fine
	for _, p := range checks {
		worst = worst.Worse(p.Verdict)
	}
	if worst.Refuses(force) {
		return &codeError{code: exitRefused}
	}
	return nil
}

// writePreflight shows what was found before a switch, the worst first, and what it would cost.
func writePreflight(w io.Writer, p switching.Preflight, mode switching.Mode) {
	fmt.Fprintf(w, "%s: from %s to %s, epoch %d: %s\n", p.Topic, p.From, p.To, p.Epoch, p.Verdict)
	for _, v := range []switching.Verdict{switching.Blocker, switching.Warning, switching.Fine} {
		for _, f := range p.Findings {
			if f.Verdict != v {
				continue
			}
			fmt.Fprintf(w, "  %-7s  %s: %s\n", v, f.Item, f.Evidence)
			if f.Remedy != "" {
				fmt.Fprintf(w, "           remedy: %s\n", f.Remedy)
			}
		}
	}
	f := p.Forecast
	if f == nil {
		fmt.Fprintln(w, "  no forecast: see the blockers")
		return
	}
	todo := fmt.Sprintf("; %s to be replicated", pluralOf(f.Unreplicated, "entry", "entries"))
	if mode == switching.ModeDrain { // nothing is replicated, but what was published meanwhile is copied on the way back
		if todo = ""; f.Unreplicated > 0 {
			todo = fmt.Sprintf("; %s to be copied", pluralOf(f.Unreplicated, "entry", "entries"))
		}
	}
	fmt.Fprintf(w, "  forecast: publishers wait about %.0f ms; %s may come twice%s\n", f.HoldMillis, pluralOf(f.Duplicates, "message", "messages"), todo)
	fmt.Fprintf(w, "  forecast: %s and %s on %s move; cluster %s gains %s/s in and %s/s out\n", plural(f.Producers, "producer"), plural(f.Consumers, "consumer"),
		plural(f.Connections, "connection"), p.To, byteSize(f.BytesIn), byteSize(f.BytesOut))
	writeCarried(w, p.Subscriptions, p.SubscriptionCount)
	for _, l := range f.Draining {
		fmt.Fprintf(w, "  to drain: %s\n", leftText(l, p.At))
	}
}

// writeCarried shows how subscriptions are carried, indented.
func writeCarried(w io.Writer, all []switching.Carried, count int) {
	if len(all) == 0 {
		return
	}
	rows := [][]string{{"  SUBSCRIPTION", "TOPIC", "FOUND BY", "FIRST", "HOLES", "BACKLOG", "UNACKED", "TWICE", "MISSING"}}
	for _, s := range all {
		rows = append(rows, []string{"  " + s.Subscription, s.Topic, s.How, s.First, strconv.Itoa(s.Holes), number(s.Backlog), number(s.Unacked), number(s.Unacked + s.Repeated), number(s.Missing)})
	}
	writeRows(w, rows)
	if more := count - len(all); more > 0 {
		fmt.Fprintf(w, "  … and %d more\n", more)
	}
	var notes []string
	for _, s := range all {
		if s.Note != "" && !slices.Contains(notes, s.Note) && len(notes) < maxNotes {
			notes = append(notes, s.Note)
			fmt.Fprintf(w, "  note: %s\n", s.Note)
		}
	}
}

// maxNotes bounds how many different notes about subscriptions are shown; --output json has all.
const maxNotes = 5

// writeAccepted names the warnings that --force goes over.
func writeAccepted(w io.Writer, checks []switching.Preflight) {
	for _, p := range checks {
		for _, f := range p.Findings {
			if f.Verdict == switching.Warning {
				fmt.Fprintf(w, "accepted: %s: %s: %s\n", p.Topic, f.Item, f.Evidence)
			}
		}
	}
}

// writeProgress is a line of watch.
func writeProgress(w io.Writer, st admin.SwitchStatus) {
	if b := st.Batch; b != nil {
		line := batchProgress(*b, time.Now())
		if b.Note != "" && st.Running() {
			line += "; " + b.Note
		}
		fmt.Fprintln(w, line)
		return
	}
	if len(st.Switches) == 1 && switching.Mode(st.Mode).Driven() {
		fmt.Fprintln(w, stateText(st.Switches[0].Record)+drainText(st.Switches[0]))
		return
	}
	fmt.Fprintf(w, "%s: %d moved, %d ended%s\n", st.State, st.Flipped, st.Ended, ofTotal(st.Total))
}

// stateText is the state of a switch and what its operator wants.
func stateText(r switching.Record) string {
	switch {
	case r.Return && !r.State.Over():
		text := "on the way back, " + string(r.State)
		if r.Wish == switching.WishAbort {
			text += ", giving up"
		}
		return text
	case r.Wish == switching.WishPause && (r.State == switching.StateRequested || r.State == switching.StateDraining):
		return string(r.State) + ", paused"
	case r.Wish == switching.WishAbort && !r.State.Over():
		return string(r.State) + ", aborting"
	}
	return string(r.State)
}

// lastWord is a line that says who has spoken last since the switch was asked for; "" when nobody has.
func lastWord(r switching.Record) string {
	what := "resumed by "
	switch {
	case r.Wish == switching.WishPause:
		what = "paused by "
	case r.Wish == switching.WishAbort:
		what = "abort asked for by "
	case r.Return || r.State == switching.StateReturned:
		what = "way back asked for by "
	}
	return ifSet(what, r.WishBy)
}

// hold is how long publishers have waited.
func hold(r switching.Record) string {
	if r.Receipt == nil || r.Receipt.HoldMillis == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f ms", r.Receipt.HoldMillis)
}

// writePlanned shows planned switches; one alone with its whole receipt.
func writePlanned(w io.Writer, st admin.SwitchStatus) {
	rows := [][]string{{"TOPIC", "FROM", "EPOCH", "STATE", "HOLD", "SUBSCRIPTIONS", "TWICE", "PRODUCERS", "CONSUMERS", "BROKERS NAMED"}}
	for _, d := range st.Switches {
		subs, twice := "-", "-"
		if rc := d.Receipt; rc != nil {
			subs, twice = strconv.Itoa(rc.SubscriptionCount), number(rc.DuplicatesForecast)
		}
		named := fmt.Sprintf("%d of %d", len(d.Assigned), len(d.Assigned)+d.Unassigned)
		rows = append(rows, []string{d.Topic, d.From, strconv.FormatUint(d.Epoch, 10), stateText(d.Record), hold(d.Record), subs, twice, strconv.Itoa(d.Producers), strconv.Itoa(d.Consumers), named})
	}
	writeRows(w, rows)
	for _, d := range st.Switches {
		if len(st.Switches) > 1 && (d.Draining != nil || d.Mode == switching.ModeDrain && d.Receipt != nil && d.Receipt.MovedCount > 0) {
			fmt.Fprintf(w, "%s:\n", d.Topic)
		}
		writeDraining(w, d)
	}
	if len(st.Switches) != 1 || st.Switches[0].Receipt == nil && len(st.Switches[0].Acks) == 0 {
		return
	}
	d := st.Switches[0]
	for _, a := range d.Acks {
		fmt.Fprintf(w, "  proxy %s: %s%s\n", a.Proxy, ackText(a), ifSet("; ", a.Why))
	}
	rc := d.Receipt
	if rc == nil {
		return
	}
	for _, step := range rc.Steps {
		times := ""
		if step.Times > 1 {
			times = fmt.Sprintf(", %d times", step.Times)
		}
		fmt.Fprintf(w, "  step %s: %.1f ms%s%s\n", step.Work, step.Millis, times, ifSet("; ", step.Why))
	}
	if rc.Evicted {
		fmt.Fprintf(w, "  cluster %s was made to unload the topic, because not every proxy could vouch for what it had sent\n", d.From)
	}
	for _, topic := range slices.Sorted(maps.Keys(rc.Tail)) {
		fmt.Fprintf(w, "  end of %s: %s\n", topic, endText(d.Record, topic))
	}
	writeCarried(w, rc.Subscriptions, rc.SubscriptionCount)
	if rc.Verified != "" {
		fmt.Fprintln(w, "  verified:", rc.Verified)
	}
}

// endText says where a partition ended on both clusters.
func endText(r switching.Record, topic string) string {
	old, now := r.Receipt.Tail[topic], r.Receipt.First[topic]
	switch {
	case r.Mode == switching.ModeDrain:
		if strings.HasSuffix(now, ":-1") {
			now = "nothing"
		}
		return fmt.Sprintf("%s on %s when it moved, and %s on %s", old, r.From, orDash(now), r.To)
	case now == "":
		return fmt.Sprintf("%s on %s", old, r.From)
	}
	return fmt.Sprintf("%s on %s is %s on %s", old, r.From, now, r.To)
}

// ackText is what a proxy has reported.
func ackText(a switching.Ack) string {
	switch a.Phase {
	case switching.StatePrepared:
		return "prepared"
	case switching.StateFenced:
		if !a.Clean {
			return "fenced, not clean"
		}
		return "fenced, clean"
	}
	text := fmt.Sprintf("clients sent over: %s, %s", plural(a.Producers, "producer"), plural(a.Consumers, "consumer"))
	if a.Unresolved > 0 {
		text += fmt.Sprintf(", %d messages without a receipt", a.Unresolved)
	}
	return text
}

func ifSet(before, text string) string {
	if text == "" {
		return ""
	}
	return before + text
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

// byteSize is an amount in a unit that people read.
func byteSize(n float64) string {
	for _, unit := range []string{"B", "KB", "MB"} {
		if n < 1000 {
			return strings.TrimSuffix(fmt.Sprintf("%.1f", n), ".0") + " " + unit
		}
		n /= 1000
	}
	return fmt.Sprintf("%.1f GB", n)
}
