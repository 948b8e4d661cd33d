// Command pointsman is the proxy (serve) and its command line. Operators run it; it parses, calls internal/app or the
// control API of a running proxy through internal/admin, and prints. It must never decide anything about the map itself.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"os/user"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"pointsman/internal/admin"
	"pointsman/internal/app"
	"pointsman/internal/config"
)

// Exit codes.
const (
	exitOK      = 0
	exitFailed  = 1
	exitUsage   = 2
	exitRefused = 3
)

const exitHelp = `Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused (nothing was changed; the text says why and what to do).`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c := &cli{env: os.Environ(), stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, serve: app.Run}
	code := c.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// cli is one run of the command line.
type cli struct {
	env            []string
	stdin          io.Reader
	stdout, stderr io.Writer
	serve          func(context.Context, *config.Config, *slog.Logger) error
	transport      http.RoundTripper // to proxies; nil is the network

	admin   string
	output  string
	timeout time.Duration
	who     string
	why     string
}

// codeError ends the process with a code of its own.
type codeError struct {
	code int
	err  error // nil: everything was said
}

func (e *codeError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

func usage(format string, args ...any) error {
	return &codeError{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// run executes one command line and returns the exit code.
func (c *cli) run(ctx context.Context, args []string) int {
	root := c.root()
	root.SetArgs(args)
	root.SetIn(c.stdin)
	root.SetOut(c.stdout)
	root.SetErr(c.stderr)
	return c.report(root.ExecuteContext(ctx))
}

// report prints an error and chooses the exit code.
func (c *cli) report(err error) int {
	if err == nil {
		return exitOK
	}
	var refusal *admin.Error
	var code *codeError
	switch {
	case errors.As(err, &refusal):
		c.printError(refusal)
		switch {
		case refusal.Refused():
			return exitRefused
		case refusal.Code.Status() == 400:
			return exitUsage
		}
		return exitFailed
	case errors.As(err, &code):
		if code.err != nil {
			fmt.Fprintln(c.stderr, "pointsman:", code.err)
		}
		return code.code
	case strings.HasPrefix(err.Error(), "unknown command"), strings.HasPrefix(err.Error(), "required flag"):
		fmt.Fprintln(c.stderr, "pointsman:", err)
		return exitUsage
	}
	fmt.Fprintln(c.stderr, "pointsman:", err)
	var slow interface{ Timeout() bool }
	switch {
	case !errors.Is(err, admin.ErrNoAnswer):
	case errors.As(err, &slow) && slow.Timeout():
		fmt.Fprintln(c.stderr, "remedy: is a proxy running there, and can this host reach it? It may still do what it was asked for: look with `pointsman history` and `pointsman switch list` before you repeat a change; --timeout allows more time")
	default:
		fmt.Fprintln(c.stderr, "remedy: is a proxy running there? Name the operations port of any running proxy with --admin or POINTSMAN_ADMIN")
	}
	return exitFailed
}

// printError writes what the proxy refused: as JSON on standard output when that was asked for, so that scripts can read
// it, and as text on standard error otherwise.
func (c *cli) printError(e *admin.Error) {
	if c.output != formatTable {
		_ = c.encode(map[string]*admin.Error{"error": e})
		return
	}
	word := "failed"
	if e.Refused() {
		word = "refused"
	}
	fmt.Fprintf(c.stderr, "%s: %s\n", word, e.Message)
	for _, d := range e.Details {
		if line := detailLine(d); len(e.Details) > 1 || !strings.Contains(e.Message, line) { // one alone may be the message
			fmt.Fprintln(c.stderr, "  "+line)
		}
	}
	if e.Remedy != "" {
		fmt.Fprintln(c.stderr, "remedy:", e.Remedy)
	}
}

func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "pointsman",
		Short: "One address in front of many Apache Pulsar clusters",
		Long: `Pointsman is one address in front of many Apache Pulsar clusters: a map says which topic lives on which cluster, and
topics move from one cluster to another while their clients keep running.

"serve" runs a proxy. All other commands talk to the operations port of any running proxy.

` + exitHelp,
		Example: `  pointsman serve --config pointsman.yaml
  pointsman explain persistent://acme/orders/created
  pointsman routes set acme/orders b
  pointsman switch start --topic persistent://acme/orders/created --to b`,
		SilenceErrors: true, SilenceUsage: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usage("%w; see `%s --help`", err, cmd.CommandPath())
	})
	f := root.PersistentFlags()
	f.StringVar(&c.admin, "admin", c.getenv("POINTSMAN_ADMIN", "http://127.0.0.1:7780"), "operations port of any proxy (or POINTSMAN_ADMIN)")
	f.StringVarP(&c.output, "output", "o", c.getenv("POINTSMAN_OUTPUT", formatTable), "table, json or yaml (or POINTSMAN_OUTPUT)")
	f.DurationVar(&c.timeout, "timeout", 60*time.Second, "time for one answer of the proxy (or POINTSMAN_TIMEOUT)")
	var badTimeout error
	if text := c.getenv("POINTSMAN_TIMEOUT", ""); text != "" && f.Set("timeout", text) != nil {
		badTimeout = usage("POINTSMAN_TIMEOUT is %q; write a duration such as 30s", text)
	}
	// The defaults shown in --help must not depend on the environment.
	f.Lookup("admin").DefValue, f.Lookup("output").DefValue, f.Lookup("timeout").DefValue = "http://127.0.0.1:7780", formatTable, "1m0s"
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		switch {
		case badTimeout != nil:
			return badTimeout
		case c.output != formatTable && c.output != formatJSON && c.output != formatYAML:
			given := c.output
			c.output = formatTable
			return usage("--output %q does not exist; write table, json or yaml", given)
		case c.timeout <= 0:
			return usage("--timeout %v is not positive; write a duration such as 30s", c.timeout)
		}
		return nil
	}
	root.AddCommand(c.serveCommand(), c.checkConfigCommand(), c.routesCommand(), c.explainCommand(), c.clustersCommand(),
		c.proxiesCommand(), c.historyCommand(), c.switchCommand(), c.versionCommand())
	return root
}

// changeFlags are those of every command that changes the map.
func (c *cli) changeFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.who, "who", "", "who changes the map, for the history (default USER@HOST)")
	cmd.Flags().StringVar(&c.why, "why", "", "why, for the history")
}

// author is who the history names.
func (c *cli) author() string {
	if c.who != "" {
		return c.who
	}
	name := c.getenv("USER", "")
	if name == "" {
		if u, err := user.Current(); err == nil {
			name = u.Username
		}
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	return name + "@" + host
}

func (c *cli) getenv(name, otherwise string) string {
	for _, pair := range c.env {
		if value, ok := strings.CutPrefix(pair, name+"="); ok && value != "" {
			return value
		}
	}
	return otherwise
}

// client connects to the proxy that --admin names.
func (c *cli) client() (*admin.Client, error) {
	client, err := admin.NewClient(c.admin, c.timeout, c.transport)
	if err != nil {
		return nil, usage("--%w", err)
	}
	return client, nil
}

// exactly checks the number of arguments and names them when they are wrong.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(names) {
			want := "no argument"
			if len(names) > 0 {
				want = strings.Join(names, " ")
			}
			return usage("%s needs %s, but has %q; see `%s --help`", cmd.CommandPath(), want, args, cmd.CommandPath())
		}
		return nil
	}
}

// group is a command that only holds others.
func group(cmd *cobra.Command, sub ...*cobra.Command) *cobra.Command {
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usage("%s has no command %q; see `%s --help`", cmd.CommandPath(), args[0], cmd.CommandPath())
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(sub...)
	return cmd
}
