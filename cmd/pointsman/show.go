package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pointsman/internal/admin"
	"pointsman/internal/config"
	"pointsman/store"
)

func (c *cli) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain TOPIC",
		Short: "Tell which rule and cluster a topic has, its broker, and what clients are told",
		Long: `Tell what happens to a client that asks the proxy (--admin) for TOPIC: the canonical name, the route that decides, the cluster,
the epoch, the broker that owns it now, the address that the client is told, the clients connected to this proxy, and whether
other proxies serve another map. A topic in any form that clients write is accepted, a partition as well.`,
		Example: `  pointsman explain persistent://acme/orders/created-partition-3
  pointsman explain acme/orders/created --output json`,
		Args: exactly("TOPIC"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			x, err := client.Explain(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.print(x, func(w io.Writer) {
				rows := [][]string{{"topic", x.Topic}}
				if x.Partition >= 0 {
					rows = append(rows, []string{"mapped as", fmt.Sprintf("%s (partition %d)", x.Base, x.Partition)})
				}
				known := ""
				if x.Cluster != "" && !x.ClusterKnown {
					known = "  UNKNOWN to this proxy"
				}
				rows = append(rows,
					[]string{"decided by", strings.TrimSpace(x.Source + " " + x.Rule)},
					[]string{"cluster", orDash(x.Cluster) + known},
					[]string{"epoch", strconv.FormatUint(x.Epoch, 10)},
					[]string{"state", x.State},
				)
				if x.SwitchID != "" {
					rows = append(rows, []string{"last switch", x.SwitchID})
				}
				if x.LookupError != "" {
					rows = append(rows, []string{"lookup", "failed: " + x.LookupError})
				}
				if x.Broker != "" {
					rows = append(rows, []string{"broker now", x.Broker}, []string{"clients are told", x.ClientURL})
				}
				rows = append(rows,
					[]string{"clients here", fmt.Sprintf("%s, %s", plural(x.Here.Producers, "producer"), plural(x.Here.Consumers, "consumer"))},
					[]string{"proxy", fmt.Sprintf("%s, map %s, %.0f s old", x.Proxy, x.Digest, x.MapAgeSeconds)},
				)
				writeRows(w, rows)
				for _, n := range x.Notes {
					fmt.Fprintln(w, "note:", n)
				}
			})
		},
	}
}

func (c *cli) clustersCommand() *cobra.Command {
	return group(&cobra.Command{Use: "clusters", Short: "Show the clusters behind a proxy"}, &cobra.Command{
		Use:     "ls",
		Short:   "List the clusters that the proxy is configured with, and their health",
		Long:    "List the clusters that the proxy is configured with, their health, and how many topics have a route of their own to each.",
		Example: `  pointsman clusters ls`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			list, err := client.Clusters(cmd.Context())
			if err != nil {
				return err
			}
			return c.print(list, func(w io.Writer) {
				writeProposals(w, list.Proposals)
				rows := [][]string{{"CLUSTER", "HEALTH", "ALL PROXIES", "TOPICS", "BROKERS", "DISCOVERY", "WEB", "DETAIL"}}
				for _, cl := range list.Clusters {
					name := cl.Name
					if name == list.Default {
						name += " (default)"
					}
					rows = append(rows, []string{name, cl.Health, votes(cl.Votes), strconv.Itoa(cl.Topics), orDash(strings.Join(cl.Brokers, ",")), cl.Discovery, orDash(cl.WebURL), cl.Detail})
				}
				writeRows(w, rows)
			})
		},
	})
}

// maxMapAge is what a proxy promises.
func maxMapAge(p store.Proxy) string {
	if p.MaxMapAgeMillis == 0 {
		return "-"
	}
	return config.Duration(time.Duration(p.MaxMapAgeMillis) * time.Millisecond).String()
}

func (c *cli) proxiesCommand() *cobra.Command {
	return group(&cobra.Command{Use: "proxies", Short: "Show all proxies of the map"}, &cobra.Command{
		Use:   "ls",
		Short: "List the proxies, the digest of the map that each serves, and whether they agree",
		Long: `List all member proxies. LIVE is "no" for one that is not connected to the map store: it may still serve clients from the last map it
knows, and switches wait for it; with a MAX MAP AGE (store.max_map_age) no longer than that and a margin. Exit code 1 when live proxies serve different maps.`,
		Example: `  pointsman proxies ls`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			list, err := client.Proxies(cmd.Context())
			if err != nil {
				return err
			}
			err = c.print(list, func(w io.Writer) {
				rows := [][]string{{"PROXY", "LIVE", "MAP", "ENTRIES", "CLUSTERS", "VERSION", "STARTED", "MAX MAP AGE", "OPS"}}
				for _, p := range list.Proxies {
					rows = append(rows, []string{p.ID, yesNo(p.Live), p.Digest, strconv.Itoa(p.Entries), strings.Join(p.Clusters, ","), p.Version, stamp(p.Started), maxMapAge(p), p.Ops})
				}
				writeRows(w, rows)
				if list.Agree {
					fmt.Fprintln(w, "all live proxies serve the same map")
				} else {
					fmt.Fprintln(w, "the live proxies serve DIFFERENT maps: if this lasts longer than a moment, look at the log of the one that is behind")
				}
			})
			if err == nil && !list.Agree {
				err = &codeError{code: exitFailed}
			}
			return err
		},
	}, &cobra.Command{
		Use:   "forget ID",
		Short: "Take a proxy that will not come back off the roster",
		Long: `A proxy that stops in order leaves the roster by itself; one that died stays on it, and changes which would move live
topics are refused because it cannot be asked. Forget it only when its process is gone for good: if it still runs somewhere without contact, it
goes on to serve the map that it knows.`,
		Example: `  pointsman proxies forget proxy-3-6650`,
		Args:    exactly("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			list, err := client.Forget(cmd.Context(), admin.ForgetRequest{ID: args[0]})
			if err != nil {
				return err
			}
			return c.print(list, func(w io.Writer) {
				fmt.Fprintf(w, "%s is forgotten, %s left\n", args[0], plural(len(list.Proxies), "member"))
			})
		},
	})
}

func (c *cli) historyCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "history",
		Short:   "List who changed the map, when and why, newest first",
		Example: `  pointsman history --limit 50`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			list, err := client.History(cmd.Context(), limit)
			if err != nil {
				return err
			}
			return c.print(list, func(w io.Writer) {
				if len(list.Changes) == 0 {
					fmt.Fprintln(w, "no changes")
					return
				}
				rows := [][]string{{"SEQ", "WHEN", "WHO", "NAME", "BEFORE", "AFTER", "WHY"}}
				for _, h := range list.Changes {
					for _, ch := range h.Changes {
						rows = append(rows, []string{strconv.FormatUint(h.Seq, 10), stamp(h.At), h.Who, ch.Name, routeText(ch.Before), routeText(ch.After), h.Why})
					}
				}
				writeRows(w, rows)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "most changes to list")
	return cmd
}
