package main

import (
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"pointsman/core/switching"
)

func (c *cli) switchSalvage() *cobra.Command {
	var limit int
	var after string
	cmd := &cobra.Command{
		Use:   "salvage ID",
		Short: "List what the old cluster of a failover holds that the new one never got",
		Long: `List the messages that clients published on the old cluster of a switch, or of all switches of one command, and that have no copy on the new cluster. The old
one must be back. Copies are known by their source position or, where brokers do not tell that, by producer, sequence id and time of publishing. Nothing is
changed: where replication goes on, it brings the messages by itself, and they drop out of the list.

A summary comes first: how much is missing of each partition, and whether replication is bringing it. Of a partition with more than 100,000 entries behind
the last copy, "at least" so many of at most so many. Then the oldest messages; --after goes on behind them, as the last line says. One page looks at
10,000 topics, and for 40 seconds; it says how many it has left to those behind it, and a summary that has left some counts less than there may be.

` + exitHelp,
		Example: `  pointsman switch salvage fo-20260102-030405-678
  pointsman switch salvage fo-20260102-030405-678 --limit 10000 --output json
  pointsman switch salvage fo-20260102-030405-678 --after persistent://acme/orders/t1@17:99`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			s, err := client.Salvage(cmd.Context(), args[0], limit, after)
			if err != nil {
				return err
			}
			err = c.print(s, func(w io.Writer) { writeSalvage(w, args[0], s, after == "") })
			if err == nil && len(s.Unread) > 0 {
				err = &codeError{code: exitFailed}
			}
			return err
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "most messages to list, over all topics (up to 10000)")
	cmd.Flags().StringVar(&after, "after", "", "list what follows: a partition and a position in it, as the last line of a page says")
	return cmd
}

// writeSalvage shows one page; the first one begins with a summary.
func writeSalvage(w io.Writer, id string, s switching.Salvage, first bool) {
	if first {
		fmt.Fprintf(w, "cluster %s holds %s entries that cluster %s never got\n", s.From, atLeast(s.Missing, s.AtLeast), s.To)
		rows, whole := [][]string{{"TOPIC", "MISSING", "OF", "REPLICATION TO " + s.To}}, 0
		for _, t := range s.Topics {
			if t.Missing == 0 && !t.AtLeast {
				whole++
				continue
			}
			rows = append(rows, []string{t.Topic, atLeast(t.Missing, t.AtLeast), strconv.FormatInt(t.Behind, 10), orDash(t.Replication)})
		}
		if len(rows) > 1 {
			writeRows(w, rows)
		}
		if whole > 0 {
			what := "partition"
			if len(rows) > 1 {
				what = "other partition"
			}
			fmt.Fprintf(w, "%s: nothing is missing\n", plural(whole, what))
		}
	}
	rows := [][]string{{"TOPIC", "POSITION", "PRODUCER", "SEQUENCE", "PUBLISHED", "KEY", "BYTES", "MESSAGES"}}
	for _, t := range s.Topics {
		for _, m := range t.Messages {
			rows = append(rows, []string{t.Topic, m.Position, m.Producer, strconv.FormatInt(m.Sequence, 10), stamp(m.Published), orDash(m.Key), strconv.Itoa(m.Bytes), strconv.Itoa(m.Messages)})
		}
	}
	if len(rows) > 1 {
		writeRows(w, rows)
	} else if !first && s.Next == "" {
		fmt.Fprintln(w, "nothing more is missing")
	}
	for _, u := range s.Unread {
		fmt.Fprintln(w, "NOT LOOKED AT:", u)
	}
	if s.Left > 0 {
		fmt.Fprintf(w, "left to the next page: %s\n", plural(s.Left, "topic"))
	}
	if s.Next != "" {
		fmt.Fprintf(w, "go on with: pointsman switch salvage %s --after '%s'\n", id, s.Next)
	}
}

func atLeast(n int64, more bool) string {
	if more {
		return "at least " + strconv.FormatInt(n, 10)
	}
	return strconv.FormatInt(n, 10)
}
