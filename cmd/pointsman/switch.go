package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pointsman/core/switching"
	"pointsman/internal/admin"
)

func (c *cli) switchCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "switch",
		Short: "Move topics from one cluster to another while their clients run",
		Long:  `Move topics from one cluster to another while their clients run, and look at such moves.`,
	}, c.switchStart(), c.switchCheck(), c.switchStatus(), c.switchList(), c.switchWatch(), c.switchAbort(), c.switchPause(), c.switchResume(), c.switchReverse(), c.switchSalvage())
}

func (c *cli) switchStart() *cobra.Command {
	var r admin.SwitchRequest
	var from string
	var batch batchFlags
	var noWait bool
	cmd := &cobra.Command{
		Use:   "start (--topic T... | --topics-from FILE | --namespace NS | --prefix P) --to CLUSTER [--mode planned|drain|immediate|failover]",
		Short: "Move topics, a list of topics or a namespace to a cluster",
		Long: `Move topics to a cluster. Before anything is asked for, the command says what the mode promises and what it does not, and in failover mode what is known to
be missing (on standard error; as JSON it is in the answer). What happens in planned mode, the default, topic by topic:
  1. preflight: both clusters are asked about everything that could go wrong. A blocker refuses the switch; a warning does so unless --force
     is given, which never overrides a blocker. --dry-run stops here and shows findings and forecast;
  2. prepare: every proxy writes down that the topic will move; then fence: publishers wait, what was sent gets its receipt;
  3. the old cluster is drained, replication caught up with, every subscription carried to exactly where it is, acknowledged ranges included;
  4. flip: the map is changed in one compare-and-set write, and clients are sent to their new broker;
  5. verify: the ends of both clusters are compared, and what each subscription has left with what was carried. The receipt is in "switch status" and in state_dir/receipts.
Until the flip any trouble gives the topic back to the old cluster; publishers have waited 10 s at most.

Several topics, a namespace, what begins with a prefix, or a share of these are a batch, in planned and drain mode: the proxy that leads looks at all topics first, and moves
nothing when one is blocked (--on-blocked skip leaves it behind); then it moves them in waves, at a pace, DLQ and RETRY topics next to each other, and what a client
consumes together from one broker (from several it is not recognised: --topics-from with --waves 100% moves such topics in one wave). It pauses, and waits for
"switch resume", when too many switches fail, publishers wait too long, or replication lags. It goes on when its leader dies.
A whole namespace ends as one rule, with its entries removed. A --dry-run looks at 64 of its topics at most, and says so.

Planned mode promises:
` + bullets(switching.Promised(switching.ModePlanned)) + `
and does not promise:
` + bullets(switching.NotPromised(switching.ModePlanned)) + `
Drain mode is for topics without replication. Producers move as in planned mode; nothing is copied: each subscription goes on reading the old cluster until it has
acknowledged everything there, and then follows by itself. The command ends when the producers have moved; "switch watch" waits for the end, which may take as long as the
slowest subscription. "switch pause" keeps subscriptions where they are. Up to 64 topics by name have a switch each; more, a namespace, a prefix or a share of them, or
any option of batches, are a batch, which begins no more while 500 of its topics drain, and makes the rule of a namespace when none drains any more.

Drain mode promises:
` + bullets(switching.Promised(switching.ModeDrain)) + `
and does not promise:
` + bullets(switching.NotPromised(switching.ModeDrain)) + `
In immediate mode the map is changed at once: brokers of the new cluster are looked up (at most 2 s), one compare-and-set write, and every proxy
closes exactly the producers and consumers of the topic after up to eviction.receipt_wait; the command waits up to 10 s for the
reports of all proxies. The first topic moves alone, then several at a time; at the first trouble no further topic is touched. A namespace moves its
single entries first, then its rule, and then drops the entries that say the same as the rule.

Immediate mode promises:
` + bullets(switching.Promised(switching.ModeImmediate)) + `
and does not promise:
` + bullets(switching.NotPromised(switching.ModeImmediate)) + `
Refused in immediate mode: a topic that is there already, a cluster that is unknown to a proxy or does not answer, a namespace that does not
exist there, a member proxy that is not connected to the map store (--force goes on in these cases).

Failover mode is for a cluster that is dead, which it never calls. The topics named, what of the namespace is on it, or with --from alone everything that
is mapped to it, go to the new cluster: planned switches under way are aborted and drains from or to it ended first, subscriptions that were last seen on the dead cluster and that
the new one lacks are made there, at the oldest message; then the map is changed, and clients are sent over at the pace of evictions. The leader does
it, and its successor goes on. --dry-run shows what is known to be missing, and which topics stay because the new cluster cannot serve them: those do not
keep the others, and are listed at the end. Refused when nothing can move, and while a majority of the proxies is answered by the cluster, unless --force is given.

Failover mode promises:
` + bullets(switching.Promised(switching.ModeFailover)) + `
and does not promise:
` + bullets(switching.NotPromised(switching.ModeFailover)) + `
` + exitHelp,
		Example: `  pointsman switch start --topic persistent://acme/orders/created --to b --dry-run
  pointsman switch start --topic persistent://acme/orders/created --to b --why "ticket 4711"
  pointsman switch start --topics-from topics.txt --to b --reversible
  pointsman switch start --namespace acme/orders --to b --dry-run
  pointsman switch start --namespace acme/orders --to b --percent 10 --waves 1,50%,100% --pace 5/s
  pointsman switch start --prefix acme/orders/eu- --to b --parallel 16 --on-blocked skip
  pointsman switch start --topic persistent://acme/plain/events --to b --mode drain --dry-run
  pointsman switch start --namespace acme/plain --to b --mode drain --pace 5/s
  pointsman switch start --namespace acme/orders --to b --mode immediate
  pointsman switch start --from a --to b --mode failover --dry-run`,
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
			if err := batch.into(cmd, &r.BatchOptions); err != nil {
				return err
			}
			r.Who, r.Why = c.author(), c.why
			if err := c.foretell(cmd.Context(), client, r); err != nil {
				return err
			}
			st, err := client.StartSwitch(cmd.Context(), r)
			if err != nil {
				return err
			}
			return c.started(cmd.Context(), client, st, r.Force, !noWait)
		},
	}
	f := cmd.Flags()
	c.topicFlags(cmd, &r, &from)
	scopeFlags(cmd, &r)
	batch.add(cmd)
	f.StringVar(&r.Mode, "mode", string(switching.ModePlanned), "how: planned, drain, immediate or failover")
	f.StringVar(&r.From, "from", "", "failover mode: the cluster that is dead; without topics or a namespace, everything that is mapped to it")
	f.StringVar(&r.Subscriptions, "subscriptions", "", "failover mode: none leaves those alone that the new cluster lacks")
	f.BoolVar(&r.Force, "force", false, "go on in spite of warnings; in immediate mode although the cluster or a proxy is not as it should be; in failover mode although the old cluster answers")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check, and show what would happen")
	f.BoolVar(&noWait, "no-wait", false, "do not wait for the end")
	c.changeFlags(cmd)
	return cmd
}

// topicFlags are those of start and check.
func (c *cli) topicFlags(cmd *cobra.Command, r *admin.SwitchRequest, from *string) {
	f := cmd.Flags()
	f.StringArrayVar(&r.Topics, "topic", nil, "topic to move (repeatable)")
	f.StringVar(from, "topics-from", "", "file with one topic a line (- for standard input)")
	f.StringVar(&r.To, "to", "", "cluster to move to")
	f.BoolVar(&r.Reversible, "reversible", false, "the way back is wanted: what it lacks is a blocker")
}

// topicsFrom adds the topics of a file.
func (c *cli) topicsFrom(file string, topics *[]string) error {
	if file == "" {
		return nil
	}
	text, err := c.read(file)
	if err != nil {
		return err
	}
	var faults []admin.Detail
	named := len(*topics)
	line := 0
	for raw := range strings.Lines(string(text)) {
		line++
		fields, err := splitFields(raw)
		if err == nil && len(fields) > 1 {
			err = fmt.Errorf("has %s; write one topic", plural(len(fields), "column"))
		}
		if err != nil {
			faults = append(faults, admin.Detail{Line: line, Name: shown(raw), Problem: err.Error()})
			continue
		}
		*topics = append(*topics, fields...)
	}
	if len(faults) > 0 {
		return &admin.Error{Code: admin.CodeBadRequest, Message: fmt.Sprintf("%s of %s cannot be read; nothing was changed", plural(len(faults), "line"), file), Remedy: "mend them and repeat", Details: faults}
	}
	if len(*topics) == named {
		return usage("%s names no topic; write one a line (blank lines and what follows a # are left out)", file)
	}
	return nil
}

// foretell tells people, before a switch is asked for, what its mode promises and what it does not; and before a failover what is known to be missing, by a dry run.
func (c *cli) foretell(ctx context.Context, client *admin.Client, r admin.SwitchRequest) error {
	mode, err := switching.ParseMode(r.Mode)
	if c.output != formatTable || r.DryRun || err != nil {
		return nil // the answer says it, or what is wrong with the mode
	}
	if mode == switching.ModeFailover {
		r.DryRun = true
		st, err := client.StartSwitch(ctx, r)
		if err != nil {
			return err
		}
		writeFailover(c.stderr, st)
	}
	c.promise(mode)
	return nil
}

// foretellOf is foretell for a switch that there is already: before it is asked to go on, or back.
func (c *cli) foretellOf(ctx context.Context, client *admin.Client, id string, back bool) error {
	if c.output != formatTable {
		return nil // the answer says it
	}
	st, err := client.Switch(ctx, id)
	if err != nil {
		return err
	}
	mode := switching.Mode(st.Mode)
	if back {
		mode = mode.Back()
	}
	c.promise(mode)
	return nil
}

func (c *cli) promise(mode switching.Mode) {
	writePromised(c.stderr, string(mode), switching.Promised(mode))
	writeNotPromised(c.stderr, string(mode), switching.NotPromised(mode))
}

// started shows a dry run, or waits for the end of what was started.
func (c *cli) started(ctx context.Context, client *admin.Client, st admin.SwitchStatus, force, wait bool) error {
	if !wait || !st.Running() {
		err := c.print(st, func(w io.Writer) { writeSwitch(w, st) })
		switch {
		case err != nil:
			return err
		case st.State == "planned":
			return refusedBy(st.Preflights, force)
		case !st.Running(): // it was over before the answer was
			return c.verdict(st, st)
		}
		return nil
	}
	if c.output == formatTable {
		writeAccepted(c.stderr, st.Preflights)
		what := "switch"
		if st.Batch != nil {
			what = "batch"
		}
		fmt.Fprintf(c.stderr, "%s %s is under way; Ctrl-C stops the watching, not the %s\n", what, st.ID, what)
	}
	if !switching.Mode(st.Mode).Driven() {
		return c.watch(ctx, client, st.ID, st.Total > 1, admin.SwitchStatus{Failover: st.Failover}) // the proxy tells all else again
	}
	return c.watch(ctx, client, st.ID, true, st)
}

// watch waits for the end of a switch, prints it, and turns trouble into an exit code. What was skipped or failed at the start has no record and is
// said again.
func (c *cli) watch(ctx context.Context, client *admin.Client, id string, progress bool, start admin.SwitchStatus) error {
	var seen func(admin.SwitchStatus)
	if progress && c.output == formatTable {
		seen = func(st admin.SwitchStatus) { writeProgress(c.stderr, st) }
	}
	wait := client.WaitSwitch
	if start.ID != "" {
		wait = client.WaitMoved
	}
	st, err := wait(ctx, id, seen)
	if err != nil {
		return err
	}
	st.Skipped, st.Failed, st.Failover = append(st.Skipped, start.Skipped...), append(st.Failed, start.Failed...), start.Failover
	if err := c.print(st, func(w io.Writer) { writeSwitch(w, st) }); err != nil {
		return err
	}
	return c.verdict(st, start)
}

// verdict turns the trouble of a switch that has ended, or drains, into an exit code; start is what the answer to its start said.
func (c *cli) verdict(st, start admin.SwitchStatus) error {
	back := len(start.Switches) > 0 && start.Switches[0].Return
	if (st.Done() || st.State == string(switching.StateReturned) || st.Drains() && !back) && len(start.Failed) == 0 {
		if st.Drains() && c.output == formatTable {
			fmt.Fprintf(c.stderr, "the producers have moved; `pointsman switch watch %s` waits for the subscriptions\n", st.ID)
		}
		return nil
	}
	code := exitFailed
	if b := st.Batch; b != nil {
		if b.Pause != nil && b.Pause.Gate == switching.GatePreflight && b.Moving.IsZero() {
			code = exitRefused // nothing has moved
		}
		return &codeError{code: code}
	}
	if len(st.Failed) > 0 && st.Flipped == 0 {
		code = exitRefused
		for _, d := range st.Failed {
			if e := (admin.Error{Code: d.Code}); !e.Refused() {
				code = exitFailed
			}
		}
	}
	return &codeError{code: code}
}

func ofTotal(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" of %d", n)
}

func (c *cli) switchStatus() *cobra.Command {
	return &cobra.Command{
		Use:     "status ID",
		Short:   "Show a switch, or all switches of one command",
		Example: `  pointsman switch status sw-20260102-030405-a1b2c3`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			st, err := client.Switch(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.print(st, func(w io.Writer) { writeSwitch(w, st) })
		},
	}
}

func (c *cli) switchWatch() *cobra.Command {
	return &cobra.Command{
		Use:     "watch ID",
		Short:   "Wait until a switch has ended and show it",
		Long:    "Wait until a switch has ended and show it. Ctrl-C stops the watching, not the switch.\n\n" + exitHelp,
		Example: `  pointsman switch watch sw-20260102-030405-a1b2c3`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			return c.watch(cmd.Context(), client, args[0], true, admin.SwitchStatus{})
		},
	}
}

func (c *cli) switchList() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List switches, newest first",
		Example: `  pointsman switch list --limit 5`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			list, err := client.Switches(cmd.Context(), limit)
			if err != nil {
				return err
			}
			return c.print(list, func(w io.Writer) {
				writeProposals(w, list.Proposals)
				writeFailovers(w, list.Failovers)
				if len(list.Switches)+len(list.Batches)+len(list.Failovers) == 0 {
					fmt.Fprintln(w, "no switches")
					return
				}
				writeBatches(w, list.Batches)
				if len(list.Switches) == 0 {
					return
				}
				rows := [][]string{{"ID", "STARTED", "MODE", "TOPIC", "FROM", "TO", "EPOCH", "STATE", "HOLD", "WHO"}}
				for _, s := range list.Switches {
					rows = append(rows, []string{s.ID, stamp(s.Started), string(s.Mode), cmp.Or(s.Topic, "*"), orDash(s.From), s.To, strconv.FormatUint(s.Epoch, 10), stateText(s), hold(s), s.Who})
				}
				writeRows(w, rows)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "most switches to list")
	return cmd
}

func writeSwitch(w io.Writer, st admin.SwitchStatus) {
	planned := switching.Mode(st.Mode).Driven()
	switch {
	case st.Batch != nil:
		writeBatch(w, st)
	case st.ID != "":
		fmt.Fprintf(w, "switch %s to %s, %s: %s\n", st.ID, st.To, st.Mode, st.State)
		fmt.Fprintf(w, "moved %d%s, ended %d\n", st.Flipped, ofTotal(st.Total), st.Ended)
		if len(st.Switches) > 0 {
			d := st.Switches[0]
			fmt.Fprintln(w, asked(d.Who, d.Why, d.Started, d.Ended))
			if by := lastWord(d.Record); by != "" {
				fmt.Fprintln(w, by)
			}
		}
	}
	writeFailover(w, st)
	fine := 0
	for _, p := range st.Preflights {
		if st.Batch != nil && p.Verdict == switching.Fine {
			fine++ // of many topics only those are shown that have something
			continue
		}
		if st.State == "planned" {
			writePreflight(w, p, switching.Mode(st.Mode))
		}
	}
	if st.Batch != nil && len(st.Preflights) > 0 {
		fmt.Fprintf(w, "%d of the %d topics that were looked at are fine\n", fine, len(st.Preflights))
	}
	switch {
	case len(st.Switches) > 0 && planned:
		writePlanned(w, st)
	case len(st.Switches) > 0:
		rows := [][]string{{"TOPIC", "FROM", "EPOCH", "STATE", "PRODUCERS", "CONSUMERS", "NO RECEIPT", "BROKERS NAMED"}}
		for _, d := range st.Switches {
			named := fmt.Sprintf("%d of %d", len(d.Assigned), len(d.Assigned)+d.Unassigned)
			rows = append(rows, []string{cmp.Or(d.Topic, "*"), orDash(d.From), strconv.FormatUint(d.Epoch, 10), string(d.State),
				strconv.Itoa(d.Producers), strconv.Itoa(d.Consumers), strconv.Itoa(d.Unresolved), named})
		}
		writeRows(w, rows)
		if len(st.Switches) < st.Flipped {
			fmt.Fprintf(w, "… and %d more\n", st.Flipped-len(st.Switches))
		}
	}
	for _, d := range st.Switches {
		if len(d.Waiting) > 0 {
			fmt.Fprintf(w, "waiting for proxy %s: %s\n", strings.Join(d.Waiting, ", "), d.Topic)
		}
		if d.Note != "" {
			fmt.Fprintf(w, "note on %s: %s\n", d.Topic, d.Note)
		}
	}
	for _, p := range st.Clients {
		if p.Error != "" {
			fmt.Fprintf(w, "proxy %s could not be asked for its clients: it %s\n", p.Proxy, p.Error)
			continue
		}
		fmt.Fprintf(w, "clients of proxy %s that would move: %s, %s\n", p.Proxy, plural(p.Producers, "producer"), plural(p.Consumers, "consumer"))
	}
	for _, d := range st.Skipped {
		word := "skipped:"
		if d.Code == admin.CodePreflight {
			word, d.Verdict = "blocked:", ""
		}
		fmt.Fprintln(w, word, detailLine(d))
	}
	if i := slices.IndexFunc(st.Skipped, func(d admin.Detail) bool { return d.Code == admin.CodePreflight && strings.HasSuffix(d.Problem, "…") }); i >= 0 {
		fmt.Fprintf(w, "the whole of it, with the remedy: pointsman switch check --topic %s --to %s --mode %s\n", st.Skipped[i].Name, st.To, st.Mode)
	}
	for _, d := range st.Failed {
		fmt.Fprintln(w, "failed:", detailLine(d))
	}
	for _, n := range st.Notes {
		fmt.Fprintln(w, "note:", n)
	}
	if st.State == "planned" {
		writePromised(w, st.Mode, st.Promised)
	}
	writeNotPromised(w, st.Mode, st.NotPromised)
}

func writePromised(w io.Writer, mode string, promised []string) {
	fmt.Fprintf(w, "%s mode promises:\n%s", mode, bullets(promised))
}

func writeNotPromised(w io.Writer, mode string, not []string) {
	fmt.Fprintf(w, "%s mode does not promise:\n%s", mode, bullets(not))
}

// asked is who has asked for a switch, when and why, and when it was over.
func asked(who, why string, started, ended time.Time) string {
	text := fmt.Sprintf("asked for by %s at %s", cmp.Or(who, "somebody"), stamp(started))
	if !ended.IsZero() {
		text += ", over at " + stamp(ended)
	}
	return text + ifSet(": ", why)
}

func bullets(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString("  - " + l + "\n")
	}
	return b.String()
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }
