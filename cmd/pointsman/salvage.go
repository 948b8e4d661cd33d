package main

import (
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"
)

func (c *cli) switchSalvage() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:   "salvage ID",
		Short: "List what the old cluster of a failover holds that the new one never got",
		Long: `List the messages that clients published on the old cluster of a switch, or of all switches of one command, and that have no copy on the new cluster. The old
one must be back. Copies are known by their source position or, where brokers do not tell that, by producer, sequence id and time of publishing. Nothing is
changed: where replication goes on, it brings the messages by itself, and they drop out of the list.

` + exitHelp,
		Example: `  pointsman switch salvage fo-20260102-030405-678
  pointsman switch salvage fo-20260102-030405-678 --limit 10000 --output json`,
		Args: exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			s, err := client.Salvage(cmd.Context(), args[0], limit)
			if err != nil {
				return err
			}
			err = c.print(s, func(w io.Writer) {
				fmt.Fprintf(w, "cluster %s holds %d entries that cluster %s never got\n", s.From, s.Missing, s.To)
				rows := [][]string{{"TOPIC", "MISSING", "REPLICATION TO " + s.To}}
				for _, t := range s.Topics {
					count := strconv.FormatInt(t.Missing, 10)
					if t.AtLeast {
						count = "at least " + count
					}
					rows = append(rows, []string{t.Topic, count, t.Replication})
				}
				writeRows(w, rows)
				if s.Listed > 0 {
					rows := [][]string{{"TOPIC", "POSITION", "PRODUCER", "SEQUENCE", "PUBLISHED", "KEY", "BYTES", "MESSAGES"}}
					for _, t := range s.Topics {
						for _, m := range t.Messages {
							rows = append(rows, []string{t.Topic, m.Position, m.Producer, strconv.FormatInt(m.Sequence, 10), stamp(m.Published), orDash(m.Key), strconv.Itoa(m.Bytes), strconv.Itoa(m.Messages)})
						}
					}
					writeRows(w, rows)
				}
				if more := s.Missing - int64(s.Listed); more > 0 {
					fmt.Fprintf(w, "… and %d more (--limit)\n", more)
				}
				for _, u := range s.Unread {
					fmt.Fprintln(w, "NOT LOOKED AT:", u)
				}
			})
			if err == nil && len(s.Unread) > 0 {
				err = &codeError{code: exitFailed}
			}
			return err
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "most messages to list, over all topics")
	return cmd
}
