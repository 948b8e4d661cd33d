package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"pointsman/bench"
)

const usage = `pointsman-bench measures proxies for the Pulsar protocol side by side.

  compare   one scenario over several targets, interleaved; prints a table of ratios
  standard  the standard set; writes the tables of BENCHMARKS.md (at most 20 minutes)
  produce, consume, rate, lookup, connect, churn, hold, stall
            the same for the scenario of that name: produce is compare --scenario produce
  scale     idle sessions, thousands of connections, thousands of topics moved, ten million routes; writes into BENCHMARKS.md
  switch    topics moved under load: evictions per second and the gap that clients see
  sessions  memory of idle sessions at several sizes: a line through them, and what it says of more
  routes    the route table in process: load, change, decide
  broker    the fake broker (compare starts it by itself)
  relay     the plain Go relay (compare starts it by itself)

pointsman-bench COMMAND -h lists the flags.`

func run(args []string) error {
	if len(args) == 0 || args[0] == "-h" || args[0] == "--help" || args[0] == "help" {
		fmt.Println(usage)
		return nil
	}
	commands := map[string]func([]string) error{"compare": compare, "standard": standard, "scale": scale, "switch": switches, "sessions": sessions, "routes": routes, "broker": broker, "relay": relay}
	command := commands[args[0]]
	if command == nil && slices.Contains(bench.Scenarios, args[0]) {
		command = func(rest []string) error { return compare(append([]string{"--scenario=" + args[0]}, rest...)) }
	}
	if command == nil {
		return fmt.Errorf("unknown command %q: pointsman-bench help lists them", args[0])
	}
	err := command(args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	return err
}

func broker(args []string) error {
	f := flag.NewFlagSet("broker", flag.ContinueOnError)
	var cfg bench.BrokerConfig
	f.IntVar(&cfg.Ports, "ports", 1, "listening ports; lookups name one after the other")
	certificate := f.String("certificate", "", "certificate (PEM) to speak TLS 1.3")
	key := f.String("key", "", "its private key (PEM)")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *certificate != "" {
		pair, err := tls.LoadX509KeyPair(*certificate, *key)
		if err != nil {
			return fmt.Errorf("--certificate and --key: %w", err)
		}
		cfg.TLS = &pair
	}
	b, err := bench.NewBroker(cfg)
	if err != nil {
		return err
	}
	fmt.Println(strings.Join(b.Addrs(), ","))
	return b.Run()
}

func relay(args []string) error {
	f := flag.NewFlagSet("relay", flag.ContinueOnError)
	listen := f.String("listen", "127.0.0.1:0", "address")
	to := f.String("to", "", "brokers, with commas between them")
	user := f.Bool("copy", false, "copy through user space")
	certificate := f.String("certificate", "", "certificate (PEM) to speak TLS 1.3 with clients")
	key := f.String("key", "", "its private key (PEM)")
	ca := f.String("ca", "", "authorities (PEM) of the brokers' certificates, to speak TLS 1.3 with brokers")
	if err := f.Parse(args); err != nil {
		return err
	}
	var secure *tls.Config
	if *ca != "" {
		text, err := os.ReadFile(*ca)
		if err != nil {
			return fmt.Errorf("--ca: %w", err)
		}
		secure = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS13}
		if !secure.RootCAs.AppendCertsFromPEM(text) {
			return fmt.Errorf("--ca %s: no certificate in it", *ca)
		}
	}
	ln, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	if *certificate != "" {
		pair, err := tls.LoadX509KeyPair(*certificate, *key)
		if err != nil {
			return fmt.Errorf("--certificate and --key: %w", err)
		}
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13})
	}
	return bench.Relay(ln, strings.Split(*to, ","), secure, *user)
}

// loadFlags are the parameters of a load.
func loadFlags(f *flag.FlagSet) func() bench.Params {
	var p bench.Params
	f.StringVar(&p.Scenario, "scenario", "produce", "one of "+strings.Join(bench.Scenarios, ", "))
	f.IntVar(&p.Connections, "connections", 0, "client connections (0: the scenario's default)")
	f.IntVar(&p.Producers, "producers", 0, "producers or consumers per connection")
	f.IntVar(&p.Window, "window", 0, "operations in flight per connection")
	f.IntVar(&p.Rate, "rate", 0, "messages per second, for produce (which is then rate), rate and stall")
	f.StringVar(&p.Stall, "stall", "", "what stalls: consumers or lookups")
	f.IntVar(&p.Stalled, "stalled", 0, "peers that stop reading")
	f.BoolVar(&p.Unbridged, "unbridged", false, "hold: connections for lookups, without a broker behind them")
	f.StringVar(&p.TLS, "tls", "", "TLS 1.3 where: client (load to proxy), broker (proxy to broker) or both; for pointsman, haproxy, haproxy64k and go-relay")
	f.DurationVar(&p.Warmup, "warmup", 0, "before each measurement")
	f.DurationVar(&p.Duration, "duration", 0, "of each measurement")
	size := sizeFlag(f, "size", "payload of a message, as in 100B, 1KiB, 1MiB")
	return func() bench.Params {
		p.Size = *size
		return p
	}
}

func sizeFlag(f *flag.FlagSet, name, usage string) *int {
	var value int
	f.Func(name, usage, func(text string) (err error) {
		value, err = parseSize(text)
		return err
	})
	return &value
}

func parseSize(text string) (int, error) {
	digits, unit := text, 1
	for _, u := range []struct {
		name  string
		bytes int
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"B", 1}} {
		if d, ok := strings.CutSuffix(text, u.name); ok {
			digits, unit = d, u.bytes
			break
		}
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("size %q: want a number with B, KiB or MiB", text)
	}
	return n * unit, nil
}

// inLab runs f in a new lab, which ends with the process's children whatever happens.
func inLab(root string, f func(lab *bench.Lab) error) error {
	if root == "" {
		var err error
		if root, err = findRoot(); err != nil {
			return err
		}
	}
	lab, err := bench.NewLab(root)
	if err != nil {
		return err
	}
	defer lab.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-ctx.Done():
			lab.Remove()
			os.Exit(130) // the kernel ends the children with us
		case <-done:
		}
	}()
	return f(lab)
}

// findRoot is the checkout that the working directory is in.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod here or above: run it inside the checkout, or say --root DIR")
		}
		dir = parent
	}
}

func compare(args []string) error {
	f := flag.NewFlagSet("compare", flag.ContinueOnError)
	params := loadFlags(f)
	targets := f.String("targets", "pointsman,haproxy,haproxy64k,java-proxy,go-relay", "some of "+strings.Join(bench.Targets, ", "))
	repeat := f.Int("repeat", 3, "rounds; an interval of 95 % needs 6")
	asJSON := f.Bool("json", false, "print one line of JSON at the end")
	root := f.String("root", "", "the checkout, for bin/pointsman (default: where this is run)")
	if err := f.Parse(args); err != nil {
		return err
	}
	return inLab(*root, func(lab *bench.Lab) error {
		r, err := bench.Compare(lab, params(), strings.Split(*targets, ","), *repeat, os.Stderr)
		if err != nil {
			return err
		}
		raw, err := r.WriteRaw(lab.Root)
		if err != nil {
			return err
		}
		fmt.Fprintln(os.Stderr, "raw:", raw)
		fmt.Println(r.Table())
		if !*asJSON {
			return nil
		}
		line, err := r.Line()
		if err == nil {
			fmt.Println(line)
		}
		return err
	})
}

func switches(args []string) error {
	f := flag.NewFlagSet("switch", flag.ContinueOnError)
	params := loadFlags(f)
	namespace := f.Bool("namespace", false, "move them all at once, by a rule for their namespace, instead of topic by topic")
	asJSON := f.Bool("json", false, "print one line of JSON at the end")
	root := f.String("root", "", "the checkout, for bin/pointsman (default: where this is run)")
	if err := f.Parse(args); err != nil {
		return err
	}
	return inLab(*root, func(lab *bench.Lab) error {
		p := params()
		p.Namespace = *namespace
		r, err := bench.Switch(lab, p)
		if err != nil {
			return err
		}
		fmt.Println(r.Table())
		return printJSON(*asJSON, r)
	})
}

func sessions(args []string) error {
	f := flag.NewFlagSet("sessions", flag.ContinueOnError)
	bridged := f.String("bridged", "2000,4000,6000,8000,9500", "numbers of connections with a broker behind them (two descriptors each), with commas between them")
	lookups := f.String("lookups", "4000,8000,12000,16000,19000", "numbers of connections for lookups (one descriptor each)")
	repeat := f.Int("repeat", 2, "runs of each number")
	asJSON := f.Bool("json", false, "print one line of JSON at the end")
	root := f.String("root", "", "the checkout, for bin/pointsman (default: where this is run)")
	if err := f.Parse(args); err != nil {
		return err
	}
	return inLab(*root, func(lab *bench.Lab) error {
		var results []bench.SessionsResult
		for _, kind := range []struct {
			flag, text string
			unbridged  bool
		}{{"--bridged", *bridged, false}, {"--lookups", *lookups, true}} {
			var sizes []int
			for text := range strings.SplitSeq(kind.text, ",") {
				n, err := strconv.Atoi(text)
				if err != nil || n <= 0 {
					return fmt.Errorf("%s %q: want numbers", kind.flag, kind.text)
				}
				sizes = append(sizes, n)
			}
			r, err := bench.Sessions(lab, sizes, kind.unbridged, *repeat, os.Stderr)
			if err != nil {
				return err
			}
			results = append(results, r)
		}
		fmt.Println(bench.SessionsTable(results))
		return printJSON(*asJSON, map[string]any{"scenario": "sessions", "results": results})
	})
}

func routes(args []string) error {
	f := flag.NewFlagSet("routes", flag.ContinueOnError)
	sizes := f.String("topics", "1000,100000,1000000", "sizes of the map, with commas between them; 10000000 takes 5 GB and a minute")
	asJSON := f.Bool("json", false, "print one line of JSON at the end")
	if err := f.Parse(args); err != nil {
		return err
	}
	var results []bench.RoutesResult
	for text := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n <= 0 {
			return fmt.Errorf("--topics %q: want numbers", *sizes)
		}
		r, err := bench.Routes(n)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	fmt.Println(bench.RoutesTable(results))
	return printJSON(*asJSON, map[string]any{"scenario": "routes", "results": results})
}

// printJSON prints v as the last line, when asked.
func printJSON(asked bool, v any) error {
	if !asked {
		return nil
	}
	line, err := json.Marshal(v)
	if err == nil {
		fmt.Println(string(line))
	}
	return err
}

func scale(args []string) error {
	f := flag.NewFlagSet("scale", flag.ContinueOnError)
	file := f.String("file", "BENCHMARKS.md", "where the tables go, between its markers")
	root := f.String("root", "", "the checkout (default: where this is run)")
	if err := f.Parse(args); err != nil {
		return err
	}
	return inLab(*root, func(lab *bench.Lab) error {
		return bench.Scale(lab, filepath.Join(lab.Root, *file), os.Stderr)
	})
}

func standard(args []string) error {
	f := flag.NewFlagSet("standard", flag.ContinueOnError)
	limit := f.Duration("limit", 20*time.Minute, "time for everything; rounds are made for as long as it allows")
	file := f.String("file", "BENCHMARKS.md", "where the tables go, between its markers")
	root := f.String("root", "", "the checkout (default: where this is run)")
	if err := f.Parse(args); err != nil {
		return err
	}
	return inLab(*root, func(lab *bench.Lab) error {
		return bench.Standard(lab, *limit, filepath.Join(lab.Root, *file), os.Stderr)
	})
}
