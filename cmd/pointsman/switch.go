package main

import (
	"context"
	"fmt"
	"io"
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
	}, c.switchStart(), c.switchStatus(), c.switchList(), c.switchWatch())
}

func (c *cli) switchStart() *cobra.Command {
	var r admin.SwitchRequest
	var from string
	var noWait bool
	cmd := &cobra.Command{
		Use:   "start (--topic T... | --topics-from FILE | --namespace NS) --to CLUSTER --mode immediate",
		Short: "Move topics, a list of topics or a namespace to a cluster",
		Long: `Move topics to a cluster. What happens in immediate mode, topic by topic:
  1. the new cluster is asked which broker owns the topic (each partition, at most 2 s);
  2. the map is changed in one compare-and-set write, the epoch grows by one;
  3. every proxy waits up to eviction.receipt_wait for outstanding receipts, then closes exactly the producers and consumers
     of the topic and names the new broker; other topics on the same connections go on;
  4. the command waits up to 10 s for the reports of all proxies.
The first topic moves alone, then several at a time; at the first trouble no further topic is touched. A namespace moves its single
entries first, then its rule, and then drops the entries that say the same as the rule.

Immediate mode does not promise:
` + bullets(switching.NotPromised(switching.ModeImmediate)) + `
Refused: a topic that is there already, a cluster that is unknown to a proxy or does not answer, a namespace that does not exist there,
a member proxy that is not connected to the map store (--force goes on in these cases).

` + exitHelp,
		Example: `  pointsman switch start --topic persistent://acme/orders/created --to b --mode immediate
  pointsman switch start --topics-from topics.txt --to b --mode immediate --why "ticket 4711"
  pointsman switch start --namespace acme/orders --to b --mode immediate --dry-run`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			if from != "" {
				text, err := c.read(from)
				if err != nil {
					return err
				}
				for line := range strings.Lines(string(text)) {
					if fields, err := splitFields(line); err != nil || len(fields) > 1 {
						return usage("%s: the line %q is not one topic", from, strings.TrimSpace(line))
					} else if len(fields) == 1 {
						r.Topics = append(r.Topics, fields[0])
					}
				}
				if len(r.Topics) == 0 {
					return usage("%s names no topic", from)
				}
			}
			r.Who, r.Why = c.author(), c.why
			st, err := client.StartSwitch(cmd.Context(), r)
			if err != nil {
				return err
			}
			if !r.DryRun && !noWait {
				if c.output == formatTable {
					fmt.Fprintf(c.stderr, "switch %s started; Ctrl-C stops the watching, not the switch\n", st.ID)
				}
				return c.watch(cmd.Context(), client, st.ID, st.Total > 1)
			}
			return c.print(st, func(w io.Writer) { writeSwitch(w, st) })
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&r.Topics, "topic", nil, "topic to move (repeatable)")
	f.StringVar(&from, "topics-from", "", "file with one topic a line (- for standard input)")
	f.StringVar(&r.Namespace, "namespace", "", "move everything in TENANT/NAMESPACE")
	f.StringVar(&r.To, "to", "", "cluster to move to")
	f.StringVar(&r.Mode, "mode", "", "how: immediate is the only mode so far")
	f.BoolVar(&r.Force, "force", false, "go on although the cluster or a proxy is not as it should be")
	f.BoolVar(&r.DryRun, "dry-run", false, "only check, and count the clients that would move")
	f.BoolVar(&noWait, "no-wait", false, "do not wait for the end")
	c.changeFlags(cmd)
	return cmd
}

// watch waits for the end of a switch, prints it, and turns trouble into an exit code.
func (c *cli) watch(ctx context.Context, client *admin.Client, id string, progress bool) error {
	var seen func(admin.SwitchStatus)
	if progress && c.output == formatTable {
		seen = func(st admin.SwitchStatus) {
			fmt.Fprintf(c.stderr, "%s: %d moved, %d ended%s\n", st.State, st.Flipped, st.Ended, ofTotal(st.Total))
		}
	}
	st, err := client.WaitSwitch(ctx, id, seen)
	if err != nil {
		return err
	}
	if err := c.print(st, func(w io.Writer) { writeSwitch(w, st) }); err != nil {
		return err
	}
	if st.Done() {
		return nil
	}
	code := exitFailed
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
			return c.watch(cmd.Context(), client, args[0], true)
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
				if len(list.Switches) == 0 {
					fmt.Fprintln(w, "no switches")
					return
				}
				rows := [][]string{{"ID", "STARTED", "TOPIC", "FROM", "TO", "EPOCH", "STATE", "WHO"}}
				for _, s := range list.Switches {
					rows = append(rows, []string{s.ID, stamp(s.Started), s.Topic, orDash(s.From), s.To, strconv.FormatUint(s.Epoch, 10), string(s.State), s.Who})
				}
				writeRows(w, rows)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "most switches to list")
	return cmd
}

func writeSwitch(w io.Writer, st admin.SwitchStatus) {
	fmt.Fprintf(w, "switch %s to %s, %s: %s\n", st.ID, st.To, st.Mode, st.State)
	fmt.Fprintf(w, "moved %d%s, ended %d\n", st.Flipped, ofTotal(st.Total), st.Ended)
	if len(st.Switches) > 0 {
		rows := [][]string{{"TOPIC", "FROM", "EPOCH", "STATE", "PRODUCERS", "CONSUMERS", "NO RECEIPT", "BROKERS NAMED"}}
		for _, d := range st.Switches {
			named := fmt.Sprintf("%d of %d", len(d.Assigned), len(d.Assigned)+d.Unassigned)
			rows = append(rows, []string{d.Topic, orDash(d.From), strconv.FormatUint(d.Epoch, 10), string(d.State),
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
		fmt.Fprintln(w, "skipped:", detailLine(d))
	}
	for _, d := range st.Failed {
		fmt.Fprintln(w, "failed:", detailLine(d))
	}
	for _, n := range st.Notes {
		fmt.Fprintln(w, "note:", n)
	}
	fmt.Fprintf(w, "%s mode does not promise:\n%s", st.Mode, bullets(st.NotPromised))
}

func bullets(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString("  - " + l + "\n")
	}
	return b.String()
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }
