package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/goccy/go-yaml"

	"pointsman/internal/admin"
)

const (
	formatTable = "table"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// print writes v as JSON or YAML, or lets table write it for people.
func (c *cli) print(v any, table func(io.Writer)) error {
	if c.output == formatTable {
		table(c.stdout)
		return nil
	}
	return c.encode(v)
}

func (c *cli) encode(v any) error {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	text := b.String()
	if c.output == formatYAML {
		y, err := yaml.JSONToYAML([]byte(text))
		if err != nil {
			return fmt.Errorf("encode the answer: %w", err)
		}
		text = string(y)
	}
	_, err := io.WriteString(c.stdout, text)
	return err
}

// writeRows aligns columns, also where cells at the end of a row are empty; the first row is the heading.
func writeRows(w io.Writer, rows [][]string) {
	var table strings.Builder
	t := tabwriter.NewWriter(&table, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(t, strings.Join(r, "\t"))
	}
	_ = t.Flush()
	for line := range strings.Lines(table.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// detailLine is one line of a refusal.
func detailLine(d admin.Detail) string {
	var parts []string
	if d.Line > 0 {
		parts = append(parts, fmt.Sprintf("line %d", d.Line))
	}
	if d.Proxy != "" {
		parts = append(parts, "proxy "+d.Proxy)
	}
	if d.Name != "" {
		parts = append(parts, d.Name)
	}
	if d.Producers+d.Consumers > 0 {
		parts = append(parts, fmt.Sprintf("%s, %s", plural(d.Producers, "producer"), plural(d.Consumers, "consumer")))
	}
	if d.Item != "" {
		parts = append(parts, string(d.Verdict), d.Item)
	}
	if d.Problem != "" {
		parts = append(parts, d.Problem)
	}
	if d.Remedy != "" {
		parts[len(parts)-1] += "; " + d.Remedy
	}
	return strings.Join(parts, ": ")
}

// routeText is a route in a few words.
func routeText(r *admin.Route) string {
	switch {
	case r == nil:
		return "none"
	case r.Cluster == "":
		return fmt.Sprintf("none (epoch %d kept)", r.Epoch)
	}
	return fmt.Sprintf("%s (epoch %d)", r.Cluster, r.Epoch)
}
