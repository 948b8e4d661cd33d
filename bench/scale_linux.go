package bench

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// scaleStep is one measurement at a size where most machines' limits are near.
type scaleStep struct {
	title, command string
	run            func(lab *Lab, progress io.Writer) (text string, err error)
}

// scaleConnections are as many bridged connections as a limit of 20,000 open files allows a proxy.
const scaleConnections = 9500

func scaleSteps() []scaleStep {
	bridged, lookups := []int{2000, 4000, 6000, 8000, scaleConnections}, []int{4000, 8000, 12_000, 16_000, 2 * scaleConnections}
	topics := Params{Connections: 200, Producers: 100, Rate: 2000, Warmup: 2 * time.Second, Duration: 5 * time.Second} // half of the producers move
	moved := func(p Params) func(*Lab, io.Writer) (string, error) {
		return func(lab *Lab, _ io.Writer) (string, error) {
			r, err := Switch(lab, p)
			if err != nil {
				return "", err
			}
			return r.Table(), nil
		}
	}
	atOnce := topics
	atOnce.Namespace = true
	return []scaleStep{
		{"Idle sessions", "pointsman-bench sessions", func(lab *Lab, progress io.Writer) (string, error) {
			const repeat = 3
			var results []SessionsResult
			for i, sizes := range [][]int{bridged, lookups} {
				r, err := Sessions(lab, sizes, i == 1, repeat, progress)
				if err != nil {
					return "", err
				}
				results = append(results, r)
			}
			return SessionsTable(results), nil
		}},
		{"Latency on thousands of connections", fmt.Sprintf("pointsman-bench rate --rate 10000 --connections %d --targets pointsman,haproxy --repeat %d --warmup 1s --duration 3s", scaleConnections, pairsWanted), func(lab *Lab, progress io.Writer) (string, error) {
			p := Params{Scenario: "rate", Rate: 10_000, Connections: scaleConnections, Warmup: time.Second, Duration: 3 * time.Second}
			r, err := Compare(lab, p, []string{"pointsman", "haproxy"}, pairsWanted, progress)
			if err != nil {
				return "", err
			}
			if _, err := r.WriteRaw(lab.Root); err != nil {
				return "", err
			}
			return r.Table(), nil
		}},
		{"10,000 topics switched one by one", "pointsman-bench switch --connections 200 --producers 100 --rate 2000 --warmup 2s --duration 5s", moved(topics)},
		{"10,000 topics switched at once, by their namespace", "pointsman-bench switch --namespace --connections 200 --producers 100 --rate 2000 --warmup 2s --duration 5s", moved(atOnce)},
		{"Ten million topics", "pointsman-bench routes --topics 1000000,10000000", func(*Lab, io.Writer) (string, error) {
			var results []RoutesResult
			for _, n := range []int{1_000_000, 10_000_000} {
				r, err := Routes(n)
				if err != nil {
					return "", err
				}
				results = append(results, r)
			}
			return RoutesTable(results), nil
		}},
	}
}

// Scale makes all measurements at scale and writes them into file, between markers: about eight minutes and 8 GB of memory.
func Scale(lab *Lab, file string, progress io.Writer) error {
	start := time.Now()
	m := lab.machine()
	var b strings.Builder
	for _, step := range scaleSteps() {
		text, err := step.run(lab, progress)
		if err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
		fmt.Fprintf(&b, "### %s\n\n`%s`\n\n%s\n", step.title, step.command, strings.TrimRight(text, "\n")+"\n")
	}
	text := fmt.Sprintf("Made by `make bench-scale` on %s in %s: %d CPUs, Linux %s, %s, commit %s; at most %d open files per process.\n\n%s",
		start.UTC().Format(time.DateOnly), time.Since(start).Round(time.Second), m.CPUs, m.Kernel, m.Go, m.Commit, lab.files, b.String())
	fmt.Fprintln(progress, text)
	return replaceBetween(file, scaleMarker, text)
}
