package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"pointsman/internal/app"
	"pointsman/internal/config"
)

func (c *cli) serveCommand() *cobra.Command {
	var file string
	var set []string
	cmd := &cobra.Command{
		Use:   "serve --config FILE",
		Short: "Run a proxy",
		Long: `Run a proxy until SIGTERM or SIGINT. Then it says "not ready", waits for shutdown.drain_delay, stops listening and closes
its connections so that clients reconnect elsewhere.

Values come from the file, then from the environment (POINTSMAN_LIMITS_CONNECTIONS for limits.connections), then from --set.
A configuration with faults is not started; "pointsman check-config FILE" explains them.

` + exitHelp,
		Example: `  pointsman serve --config pointsman.yaml
  pointsman serve --config pointsman.yaml --set log.level=debug`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usage("serve needs --config FILE; `pointsman check-config --defaults` prints one to start from")
			}
			cfg, warnings, err := config.Load(file, c.env, set)
			if err != nil {
				return configError(err)
			}
			log := newLogger(c.stderr, cfg.Log)
			for _, w := range warnings {
				log.Warn("configuration", "key", w.Key, "value", w.Value, "problem", w.Problem, "remedy", w.Remedy)
			}
			return c.serve(cmd.Context(), cfg, log)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (YAML)")
	cmd.Flags().StringArrayVar(&set, "set", nil, "override one key, as in limits.connections=1000 (repeatable)")
	return cmd
}

func (c *cli) checkConfigCommand() *cobra.Command {
	var defaults bool
	var set []string
	cmd := &cobra.Command{
		Use:   "check-config FILE",
		Short: "Explain every fault of a configuration, or print what was understood",
		Long: `Read a configuration as "serve" would, environment included, and report every fault at once: where it is, the key, the
value, what is wrong and what to do. Nothing is dialled and nothing is opened but the files that the configuration names.
Exit code 1 when there are faults; warnings alone are exit code 0.`,
		Example: `  pointsman check-config pointsman.yaml
  pointsman check-config --defaults > pointsman.yaml`,
		Args: func(cmd *cobra.Command, args []string) error {
			if defaults && len(args) == 0 {
				return nil
			}
			return exactly("FILE")(cmd, args)
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if defaults {
				config.WriteDefaults(c.stdout)
				return nil
			}
			cfg, warnings, err := config.Load(args[0], c.env, set)
			report := struct {
				OK       bool           `json:"ok"`
				Faults   []config.Fault `json:"faults"`
				Warnings []config.Fault `json:"warnings"`
				Values   []config.Value `json:"values,omitempty"`
			}{OK: err == nil, Faults: []config.Fault{}, Warnings: append([]config.Fault{}, warnings...)}
			var faults config.Faults
			if errors.As(err, &faults) {
				report.Faults = faults
			} else if err != nil {
				return err
			}
			if cfg != nil {
				report.Values = cfg.Values()
			}
			err = c.print(report, func(w io.Writer) {
				for _, f := range report.Faults {
					fmt.Fprintf(w, "fault: %v\n", f)
				}
				for _, f := range report.Warnings {
					fmt.Fprintf(w, "warning: %v\n", f)
				}
				if report.OK {
					fmt.Fprintf(w, "%s is good. This is what was understood:\n", args[0])
					rows := [][]string{{"KEY", "VALUE", "FROM"}}
					for _, v := range report.Values {
						rows = append(rows, []string{v.Key, v.Value, v.From})
					}
					writeRows(w, rows)
				} else {
					fmt.Fprintf(w, "%s has %s; a proxy would not start with it\n", args[0], plural(len(report.Faults), "fault"))
				}
			})
			if err == nil && !report.OK {
				err = &codeError{code: exitFailed}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&defaults, "defaults", false, "print every key with its default and meaning, as a file to start from")
	cmd.Flags().StringArrayVar(&set, "set", nil, "override one key, as in limits.connections=1000 (repeatable)")
	return cmd
}

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  exactly(),
		RunE: func(*cobra.Command, []string) error {
			v := struct {
				Version string `json:"version"`
				Commit  string `json:"commit"`
				Go      string `json:"go"`
				System  string `json:"system"`
			}{app.Version, commit(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			return c.print(v, func(w io.Writer) { fmt.Fprintln(w, "pointsman", v.Version, v.Commit, v.Go, v.System) })
		},
	}
}

// commit is what the program was built from; "unknown" outside of a checkout.
func commit() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "unknown"
}

func configError(err error) error {
	return &codeError{code: exitFailed, err: fmt.Errorf("the configuration has faults:\n%w", err)}
}

func newLogger(w io.Writer, l config.Log) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(l.Level)) // checked by config
	o := &slog.HandlerOptions{Level: level}
	if l.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
