package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"pointsman/internal/admin"
)

const nameHelp = `NAME is a topic (persistent://TENANT/NAMESPACE/TOPIC, or TENANT/NAMESPACE/TOPIC), a TENANT/NAMESPACE, a TENANT, or * for
everything else. V1 namespaces are written namespace:PROPERTY/CLUSTER/NAMESPACE. All partitions of a topic are mapped together.`

const guardHelp = `A change that would move topics with live clients is refused with their numbers; --immediate moves them at once, like an
immediate switch (see "pointsman switch start --help" for what that does not promise).`

func (c *cli) routesCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "routes",
		Short: "Read and change the map: which topic lives on which cluster",
		Long: `Read and change the map. For a topic the most specific route decides: the topic itself, else its namespace, else its
tenant, else *, else default_cluster of the configuration. Every change is written to the history.

` + nameHelp,
	}, c.routesSet(), c.routesGet(), c.routesList(), c.routesRemove(), c.routesImport(), c.routesExport())
}

func (c *cli) optionFlags(cmd *cobra.Command, o *admin.ChangeOptions) {
	c.changeFlags(cmd)
	cmd.Flags().BoolVar(&o.Immediate, "immediate", false, "move topics that have live clients, or whose clients cannot be counted")
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only say what would change")
}

func (c *cli) fill(o *admin.ChangeOptions) { o.Who, o.Why = c.author(), c.why }

func (c *cli) routesSet() *cobra.Command {
	var o admin.ChangeOptions
	cmd := &cobra.Command{
		Use:   "set NAME CLUSTER",
		Short: "Map a topic, namespace, tenant or everything else to a cluster",
		Long:  "Map NAME to CLUSTER.\n\n" + nameHelp + "\n\n" + guardHelp + "\n\n" + exitHelp,
		Example: `  pointsman routes set persistent://acme/orders/created b
  pointsman routes set acme/orders b --why "EU move, ticket 4711"
  pointsman routes set '*' a`,
		Args: exactly("NAME", "CLUSTER"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			c.fill(&o)
			r, err := client.Set(cmd.Context(), admin.SetRequest{Name: args[0], Cluster: args[1], ChangeOptions: o})
			return c.printChange(r, err)
		},
	}
	c.optionFlags(cmd, &o)
	cmd.Flags().BoolVar(&o.Force, "force", false, "also when a proxy does not know the cluster (yet)")
	return cmd
}

func (c *cli) routesRemove() *cobra.Command {
	var o admin.ChangeOptions
	cmd := &cobra.Command{
		Use:     "rm NAME",
		Short:   "Remove a route, so that the next wider one decides",
		Long:    "Remove the route of exactly NAME. Its epoch is kept where it must not shrink.\n\n" + nameHelp + "\n\n" + guardHelp + "\n\n" + exitHelp,
		Example: `  pointsman routes rm persistent://acme/orders/created`,
		Args:    exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			c.fill(&o)
			r, err := client.Remove(cmd.Context(), admin.RemoveRequest{Name: args[0], ChangeOptions: o})
			return c.printChange(r, err)
		},
	}
	c.optionFlags(cmd, &o)
	return cmd
}

func (c *cli) printChange(r admin.ChangeResult, err error) error {
	if err != nil {
		return err
	}
	return c.print(r, func(w io.Writer) {
		verb := "changed"
		if r.DryRun {
			verb = "would change"
		}
		for _, ch := range r.Changed {
			moved := ""
			if ch.Moved {
				moved = "  (moves)"
			}
			fmt.Fprintf(w, "%s %s: %s → %s%s\n", verb, ch.Name, routeText(ch.Before), routeText(ch.After), moved)
		}
		if len(r.Changed) == 0 {
			fmt.Fprintln(w, "nothing to change: the map says so already")
		} else if r.Unchanged > 0 {
			fmt.Fprintf(w, "%s as asked for already\n", plural(r.Unchanged, "route"))
		}
		for _, p := range r.Clients {
			if p.Error == "" {
				fmt.Fprintf(w, "clients of proxy %s that move: %s, %s\n", p.Proxy, plural(p.Producers, "producer"), plural(p.Consumers, "consumer"))
			}
		}
		for _, n := range r.Notes {
			fmt.Fprintln(w, "note:", n)
		}
	})
}

func (c *cli) routesGet() *cobra.Command {
	return &cobra.Command{
		Use:     "get NAME",
		Short:   "Show the route of exactly this name",
		Long:    "Show the route of exactly NAME, as the store has it. \"pointsman explain TOPIC\" tells which route decides for a topic.\n\n" + nameHelp,
		Example: `  pointsman routes get acme/orders`,
		Args:    exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			r, err := client.Route(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) { writeRoutes(w, []admin.Route{r}) })
		},
	}
}

func (c *cli) routesList() *cobra.Command {
	var q admin.RouteQuery
	cmd := &cobra.Command{
		Use:   "ls [SCOPE]",
		Short: "List routes, the wider ones first",
		Long:  "List the routes of a tenant or namespace, or all of them: * first, then tenants, namespaces and topics.",
		Example: `  pointsman routes ls
  pointsman routes ls acme/orders --cluster b`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) <= 1 {
				return nil
			}
			return exactly("[SCOPE]")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				q.Within = args[0]
			}
			list, err := client.Routes(cmd.Context(), q)
			if err != nil {
				return err
			}
			return c.print(list, func(w io.Writer) {
				if len(list.Routes) == 0 {
					fmt.Fprintln(w, noRoutes(q))
					return
				}
				writeRoutes(w, list.Routes)
				if len(list.Routes) < list.Total && len(list.Routes) > 0 {
					fmt.Fprintf(w, "%d of %d; for more add --limit N or --after %s\n", len(list.Routes), list.Total, list.Routes[len(list.Routes)-1].Name)
				}
			})
		},
	}
	cmd.Flags().StringVar(&q.Cluster, "cluster", "", "only routes to this cluster")
	cmd.Flags().StringVar(&q.After, "after", "", "begin behind this name")
	cmd.Flags().IntVar(&q.Limit, "limit", 0, "most routes to list (default 1000)")
	cmd.Flags().BoolVar(&q.Floors, "floors", false, "also names of which only the epoch is kept")
	return cmd
}

// noRoutes says what there is none of.
func noRoutes(q admin.RouteQuery) string {
	text := "no routes" + ifSet(" within ", q.Within) + ifSet(" to cluster ", q.Cluster) + ifSet(" behind ", q.After)
	if text != "no routes" {
		text += "; `pointsman routes ls` has all, `pointsman explain TOPIC` tells what decides for a topic"
	}
	return text
}

func writeRoutes(w io.Writer, routes []admin.Route) {
	rows := [][]string{{"NAME", "CLUSTER", "EPOCH", "STATE", "SWITCH"}}
	for _, r := range routes {
		rows = append(rows, []string{r.Name, orDash(r.Cluster), strconv.FormatUint(r.Epoch, 10), r.State, orDash(r.SwitchID)})
	}
	writeRows(w, rows)
}

const fileHelp = `The file has lines of the form "NAME CLUSTER" (blanks or commas between; # begins a comment), or is JSON or YAML with
{"routes": [{"name": ..., "cluster": ...}]}. A third column, or "epoch", keeps an epoch at least as high as that; the cluster "-" keeps
only the epoch. "pointsman routes export" writes what import reads.`

func (c *cli) routesImport() *cobra.Command {
	var r admin.ImportRequest
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Set many routes from a file",
		Long: `Set every route of FILE (- for standard input). All faults of the file are reported at once, and then nothing is changed. What is
as the file says already is left alone, so an import may be repeated.

` + fileHelp + "\n\n" + guardHelp + "\n\n" + exitHelp,
		Example: `  pointsman routes import routes.txt --dry-run
  pointsman routes import - --prune --why "as on Monday" < routes.txt`,
		Args: exactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			text, err := c.read(args[0])
			if err != nil {
				return err
			}
			if r.Routes, err = parseImport(args[0], text); err != nil {
				return err
			}
			c.fill(&r.ChangeOptions)
			result, err := client.Import(cmd.Context(), r)
			return c.printChange(result, err)
		},
	}
	c.optionFlags(cmd, &r.ChangeOptions)
	cmd.Flags().BoolVar(&r.Force, "force", false, "also when a proxy does not know a cluster (yet)")
	cmd.Flags().BoolVar(&r.Prune, "prune", false, "remove every route that is not in the file")
	return cmd
}

func (c *cli) routesExport() *cobra.Command {
	return &cobra.Command{
		Use:     "export",
		Short:   "Write all routes in the form that import reads",
		Long:    "Write all routes with their epochs, as lines or (--output) as JSON or YAML.\n\n" + fileHelp,
		Example: `  pointsman routes export > routes.txt`,
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client()
			if err != nil {
				return err
			}
			routes, err := client.AllRoutes(cmd.Context())
			if err != nil {
				return err
			}
			file := importFile{Routes: make([]admin.ImportItem, 0, len(routes))}
			for _, r := range routes {
				item := admin.ImportItem{Name: r.Name, Cluster: orDash(r.Cluster), Epoch: r.Epoch}
				file.Routes = append(file.Routes, item)
			}
			return c.print(file, func(w io.Writer) {
				for _, i := range file.Routes {
					fmt.Fprintf(w, "%s %s %d\n", quoteField(i.Name), quoteField(i.Cluster), i.Epoch)
				}
			})
		},
	}
}

type importFile struct {
	Routes []admin.ImportItem `json:"routes"`
}

// read reads a file, or standard input for "-".
func (c *cli) read(name string) ([]byte, error) {
	const most = 64 << 20
	in := c.stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, usage("%w; name a readable file, or - for standard input", err)
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, most+1))
	text = bytes.TrimPrefix(text, []byte("\ufeff")) // as editors on Windows put in front
	if err == nil && len(text) > most {
		err = fmt.Errorf("is above %d bytes; split it", most)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return text, nil
}

// parseImport reads lines, JSON or YAML.
func parseImport(name string, text []byte) ([]admin.ImportItem, error) {
	switch ext := filepath.Ext(name); {
	case ext == ".yaml" || ext == ".yml":
		j, err := yaml.YAMLToJSON(text)
		if err != nil {
			return nil, usage("%s is not YAML: %w", name, err)
		}
		text = j
	case ext == ".json" || strings.HasPrefix(strings.TrimSpace(string(text)), "{"):
	case strings.HasPrefix(string(text), "routes:"):
		return parseImport(".yaml", text)
	default:
		return parseLines(string(text))
	}
	var f importFile
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, usage("%s is not a list of routes: %w; write {\"routes\": [{\"name\": …, \"cluster\": …}]}", name, err)
	}
	for i := range f.Routes {
		f.Routes[i].Line = i + 1
	}
	return f.Routes, nil
}

func parseLines(text string) ([]admin.ImportItem, error) {
	var items []admin.ImportItem
	var faults []admin.Detail
	line := 0
	for raw := range strings.Lines(text) {
		line++
		fields, err := splitFields(raw)
		if err == nil && len(fields) == 0 {
			continue
		}
		item := admin.ImportItem{Line: line}
		switch {
		case err != nil:
		case len(fields) < 2 || len(fields) > 3:
			err = fmt.Errorf("has %s; write NAME CLUSTER [EPOCH]", plural(len(fields), "column"))
		case len(fields) == 3:
			if item.Epoch, err = strconv.ParseUint(fields[2], 10, 64); err != nil {
				err = fmt.Errorf("the third column, %s, is not an epoch; write a number or leave it out", shown(fields[2]))
			}
		}
		if err != nil {
			faults = append(faults, admin.Detail{Line: line, Name: shown(raw), Problem: err.Error()})
			continue
		}
		item.Name, item.Cluster = fields[0], fields[1]
		items = append(items, item)
	}
	if len(faults) > 0 {
		return nil, &admin.Error{Code: admin.CodeBadRequest, Message: fmt.Sprintf("%s cannot be read; nothing was changed", plural(len(faults), "line")), Remedy: "mend them and repeat", Details: faults}
	}
	return items, nil
}

// splitFields cuts a line at blanks and commas; a field in double quotes may contain them.
func splitFields(line string) ([]string, error) {
	var fields []string
	for {
		line = strings.TrimLeft(line, " \t\r\n,")
		switch {
		case line == "" || line[0] == '#':
			return fields, nil
		case line[0] == '"':
			quoted, err := strconv.QuotedPrefix(line)
			if err != nil {
				return nil, fmt.Errorf("has an open quote")
			}
			field, err := strconv.Unquote(quoted)
			if err != nil {
				return nil, fmt.Errorf("has the quoted text %s, which is not one: %w", quoted, err)
			}
			fields, line = append(fields, field), line[len(quoted):]
		default:
			end := strings.IndexAny(line, " \t\r\n,")
			if end < 0 {
				end = len(line)
			}
			fields, line = append(fields, line[:end]), line[end:]
		}
	}
}

// quoteField is the opposite of splitFields for one field.
func quoteField(s string) string {
	if s == "" || strings.ContainsAny(s, " \t\r\n,\"#") {
		return strconv.Quote(s)
	}
	return s
}

// shown is a line of a file in an error: whole unless it is long, and quoted when a terminal would not show it as it is.
func shown(line string) string {
	const most = 80
	line = strings.TrimSpace(line)
	if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return r != '\t' && !unicode.IsPrint(r) }) {
		line = strings.Trim(strconv.QuoteToASCII(line), `"`)
	}
	if runes := []rune(line); len(runes) > most {
		line = string(runes[:most]) + "…"
	}
	return line
}
