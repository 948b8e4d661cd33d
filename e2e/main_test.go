//go:build e2e

package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// rig, artifacts, processes and runID are set by TestMain before any test runs and not changed after.
var (
	rig       *Rig
	artifacts *Artifacts
	processes *Processes
	runID     string // part of every topic's name: a kept rig remembers the topics of earlier runs
)

// prepareLimit is how long fetching and compiling may take with empty caches.
const prepareLimit = 10 * time.Minute

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(childVariable) != "" {
		os.Exit(m.Run()) // a helper of a test about processes, which needs no rig
	}
	os.Exit(runAll(m))
}

func runAll(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), prepareLimit)
	defer cancel()
	fail := func(err error) int {
		fmt.Fprintf(os.Stderr, "e2e: %v\n", err)
		return 1
	}
	module, err := filepath.Abs("..")
	if err != nil {
		return fail(err)
	}
	if err := Preflight(ctx, module); err != nil {
		if os.Getenv("REQUIRE_E2E") == "1" {
			return fail(err)
		}
		fmt.Printf("\n*** e2e SKIPPED: nothing was tested against real clusters ***\n%v\n(REQUIRE_E2E=1 makes this a failure)\n\n", err)
		return 0
	}
	clients := []Client{Java, Go, Python}
	if only := os.Getenv("E2E_CLIENTS"); only != "" {
		all := append(clients, Rust)
		clients = nil
		for name := range strings.SplitSeq(only, ",") {
			if !slices.Contains(all, Client(name)) {
				return fail(fmt.Errorf("E2E_CLIENTS names %q; there are java, go, python and rust", name))
			}
			clients = append(clients, Client(name))
		}
	}
	began := time.Now()
	runID = strconv.FormatInt(began.UnixMilli()%100_000_000, 36)
	if artifacts, err = Prepare(ctx, module, clients); err != nil {
		return fail(err)
	}
	fmt.Printf("e2e: artifacts ready after %.1f s\n", time.Since(began).Seconds())
	dir := filepath.Join(module, "e2e", ".rig")
	if processes, err = NewProcesses(filepath.Join(dir, "logs")); err != nil {
		return fail(err)
	}
	defer processes.Close()
	if run := flag.Lookup("test.run").Value.String(); run == "" || run == "." {
		// The last test of all needs them. An error is that test's to tell.
		go func() {
			_, _ = artifacts.Classpath(context.Background(), oldVersion)
			_, _ = artifacts.Classpath(context.Background(), newVersion)
		}()
	}
	began = time.Now()
	open := OpenRig
	if os.Getenv("E2E_RIG") == "map" {
		open = OpenMap
	}
	if rig, err = open(context.Background(), artifacts, processes, dir); err != nil { // it has a limit of its own
		return fail(err)
	}
	fmt.Printf("e2e: rig ready after %.1f s (taken over from an earlier run: %v)\n", time.Since(began).Seconds(), rig.Reused)
	code = m.Run()
	if os.Getenv("KEEP") == "1" {
		told, err := rig.Keep()
		if err != nil {
			return fail(err)
		}
		fmt.Print("e2e: " + told)
	}
	return code
}
