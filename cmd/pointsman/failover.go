package main

import (
	"fmt"
	"io"
	"strconv"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/admin"
)

// writeProposals shows the failovers that are proposed, each with the command that does it.
func writeProposals(w io.Writer, all []admin.Proposal) {
	for _, p := range all {
		fmt.Fprintf(w, "PROPOSED: cluster %s is dead since %s (%v): move what is mapped to it to %s:\n  %s\n", p.From, stamp(p.Down), p.Votes, p.To, p.Command)
		if p.Blocked != "" {
			fmt.Fprintln(w, "  in the way:", p.Blocked)
		}
	}
}

// writeFailovers shows the failovers that are under way, and the last ones.
func writeFailovers(w io.Writer, all []admin.FailoverSummary) {
	if len(all) == 0 {
		return
	}
	rows := [][]string{{"FAILOVER", "STARTED", "FROM", "TO", "WHAT", "STATE", "MOVED", "WHO"}}
	for _, o := range all {
		moved := strconv.Itoa(o.Moved) + ofTotal(o.Total)
		if o.Failed > 0 {
			moved += fmt.Sprintf(", %d failed", o.Failed)
		}
		who := o.Who
		if o.Automatic {
			who = "by itself"
		}
		rows = append(rows, []string{o.ID, stamp(o.Asked), o.From, o.To, o.What, string(o.State), moved, orDash(who)})
	}
	writeRows(w, rows)
	fmt.Fprintln(w)
}

// votes is what all live proxies say of a cluster.
func votes(v *switching.Votes) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%d up, %d down", v.Up, v.Down)
}

// writeFailover shows what is known before a failover, or how far it is.
func writeFailover(w io.Writer, st admin.SwitchStatus) {
	if p := st.Failover; p != nil && st.State == "planned" {
		writeFailoverPlan(w, p)
	}
	o := st.Order
	if o == nil {
		return
	}
	what := plural(len(o.Topics), "topic")
	switch {
	case o.All:
		what = "everything that is mapped to it"
	case o.Scope != "":
		what = "namespace " + o.Scope
	}
	fmt.Fprintf(w, "failover from %s: %s\n", o.From, what)
	fmt.Fprintf(w, "missing on %s, as far as is known: entries that were not replicated: %s; subscriptions made at the oldest message: %d; entries that those deliver again, at most: %d\n",
		o.To, missingText(o.Backlog, o.Unreplicated, o.Unknown), o.Created, o.Again)
	if o.State.Over() && o.Moved > 0 {
		fmt.Fprintf(w, "nothing goes back by itself. When cluster %s is back: `pointsman switch salvage %s` lists what %s never got, and `pointsman switch reverse %s --dry-run` is the way back\n", o.From, o.ID, o.To, o.ID)
	}
}

func writeFailoverPlan(w io.Writer, p *admin.FailoverPlan) {
	fmt.Fprintf(w, "failover from %s to %s: %v\n", p.From, p.To, p.Votes)
	rows := [][]string{{"  PROXY", "LIVE", "SAYS OF " + p.From, "SINCE", "WHY"}}
	for _, v := range p.Views {
		since := "-"
		if !v.Since.IsZero() {
			since = stamp(v.Since)
		}
		rows = append(rows, []string{"  " + v.Proxy, yesNo(v.Live), v.State, since, v.Why})
	}
	writeRows(w, rows)
	if p.Seen.IsZero() {
		fmt.Fprintf(w, "cluster %s was never looked at (it has no web_url, or health.sample_interval is 0s): nothing is known of what is missing\n", p.From)
	} else {
		fmt.Fprintf(w, "cluster %s was last looked at %s (brokers count once a minute)\n", p.From, stamp(p.Seen))
	}
	for _, a := range p.Aborts {
		fmt.Fprintln(w, "ended first:", a)
	}
	rows = [][]string{{"MOVES", "EPOCH", "TOPICS SEEN", "MEASURED", "NOT REPLICATED", "OLDEST", "SUBSCRIPTIONS", "MADE ANEW", "COMES AGAIN"}}
	for _, m := range p.Moves {
		rows = append(rows, factsRow(m.Name, strconv.FormatUint(m.Epoch, 10), m.Facts))
	}
	if len(p.Moves) > 1 {
		rows = append(rows, factsRow("all", "", p.Facts))
	}
	writeRows(w, rows)
	f := p.Facts
	if f.Unreplicated > 0 {
		fmt.Fprintf(w, "%s had no replication to %s, which has none of their messages\n", plural(f.Unreplicated, "topic"), p.To)
	}
	if f.Unknown > 0 {
		fmt.Fprintf(w, "of %s nothing was ever seen: a subscription that %s lacks begins where its client says, which by default skips what is there\n", plural(f.Unknown, "topic"), p.To)
	}
	for _, name := range f.Names {
		fmt.Fprintln(w, "made anew, at the oldest message:", name)
	}
	if more := f.Missing - len(f.Names); more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	for _, d := range p.Stays {
		fmt.Fprintf(w, "STAYS on %s: %s: %s\n", p.From, d.Name, d.Problem)
	}
	if more := p.Staying - len(p.Stays); more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	for _, text := range f.Problems {
		fmt.Fprintln(w, "PROBLEM:", text)
	}
	for _, text := range f.Notes {
		fmt.Fprintln(w, "note:", text)
	}
	for _, text := range p.Notes {
		fmt.Fprintln(w, "note:", text)
	}
}

// missingText is what the new cluster lacks: topics without replication lack everything, and of some nothing is known.
func missingText(backlog int64, unreplicated, unknown int) string {
	text := number(backlog)
	if unreplicated > 0 {
		text += ", and all of " + plural(unreplicated, "topic")
	}
	if unknown > 0 {
		text += fmt.Sprintf(", and what %s had of which nothing was ever seen", plural(unknown, "topic"))
	}
	return text
}

func factsRow(name, epoch string, f switching.FailoverFacts) []string {
	measured, backlog, oldest := "never", "?", "-"
	if !f.Measured.IsZero() {
		measured, backlog = stamp(f.Measured), number(f.Backlog)
		switch f.Unreplicated {
		case 0:
		case f.Topics - f.Unknown:
			backlog = "everything"
		default:
			backlog = missingText(f.Backlog, f.Unreplicated, 0)
		}
		if f.Delay > 0 {
			oldest = (time.Duration(f.Delay) * time.Second).String()
		}
	}
	return []string{name, epoch, strconv.Itoa(f.Topics - f.Unknown), measured, backlog, oldest, strconv.Itoa(f.Subscriptions), strconv.Itoa(f.Missing), number(f.Again)}
}
