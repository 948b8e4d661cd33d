package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Artifacts are the programs that a run needs, all under Cache except the binary under test.
type Artifacts struct {
	Cache    string // e2e/.cache: fetched and compiled once, kept from run to run
	Jars     string // folder with Pulsar and its dependencies
	Classes  string // the compiled Java driver and the rig's standalone
	GoDriver string
	Python   string // interpreter of the venv with pulsar-client
	PyDriver string
	// RustDriver is there only when Clients contains Rust.
	RustDriver string
	Clients    []Client // those that can run here
	Pointsman  string   // bin/pointsman; PointsmanErr says why there is none
	// PointsmanErr is set when the binary could not be built: everything but the Pointsman tests can still run.
	PointsmanErr error

	mu sync.Mutex // held while Maven runs
}

// Preflight names every tool that is missing, each with the command that installs it; nil when all are there.
func Preflight(ctx context.Context, module string) error {
	cmd := exec.CommandContext(ctx, "sh", filepath.Join("scripts", "preflight.sh"))
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "REQUIRE_E2E=1") // to it, whatever these tests need is required
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("the end-to-end tests cannot run here (%w):\n%s", err, out)
	}
	return nil
}

// Prepare fetches and compiles what is not in the cache yet. module is the root folder of the checkout.
func Prepare(ctx context.Context, module string, clients []Client) (*Artifacts, error) {
	here := filepath.Join(module, "e2e")
	cache := filepath.Join(here, ".cache")
	a := &Artifacts{
		Cache: cache, Jars: filepath.Join(cache, "lib"), Classes: filepath.Join(cache, "classes"),
		GoDriver: filepath.Join(cache, "bin", "godriver"), Python: filepath.Join(cache, "venv", "bin", "python"),
		PyDriver: filepath.Join(here, "clients", "python", "driver.py"), Pointsman: filepath.Join(module, "bin", "pointsman"),
		RustDriver: filepath.Join(cache, "rust", "release", "driver"), Clients: clients,
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	var java, python, golang, rust error
	wg.Go(func() { java = a.prepareJava(ctx, here) })
	wg.Go(func() { python = a.preparePython(ctx, here) })
	wg.Go(func() {
		if slices.Contains(clients, Rust) { // cargo knows by itself what is built
			rust = run(ctx, filepath.Join(here, "clients", "rust"), "cargo", "build", "-q", "--release", "--locked", "--target-dir", filepath.Join(cache, "rust"))
		}
	})
	wg.Go(func() {
		golang = run(ctx, module, "go", "build", "-o", a.GoDriver, "./e2e/clients/godriver")
		a.PointsmanErr = run(ctx, module, "make", "-s", "build") // never an old binary under test
	})
	wg.Wait()
	return a, errors.Join(java, python, golang, rust)
}

func (a *Artifacts) prepareJava(ctx context.Context, here string) error {
	pom := filepath.Join(here, "pom.xml")
	if err := once(a.Jars, pom, func() error {
		// Into an empty folder: jars of an older pom would stay on the class path.
		if err := os.RemoveAll(a.Jars); err != nil {
			return err
		}
		return fetch(ctx, here, "mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", "-DoutputDirectory="+a.Jars)
	}); err != nil {
		return fmt.Errorf("fetch the jars of Pulsar: %w", err)
	}
	for _, source := range []string{filepath.Join("broker", "Standalone.java"), filepath.Join("clients", "java", "Driver.java")} {
		class := filepath.Join(a.Classes, strings.TrimSuffix(filepath.Base(source), ".java"))
		if err := once(class, filepath.Join(here, source), func() error {
			return run(ctx, here, "javac", "-d", a.Classes, "-cp", filepath.Join(a.Jars, "*"), source)
		}); err != nil {
			return err
		}
	}
	return nil
}

func (a *Artifacts) preparePython(ctx context.Context, here string) error {
	requirements := filepath.Join(here, "clients", "python", "requirements.txt")
	venv := filepath.Join(a.Cache, "venv")
	return once(venv, requirements, func() error {
		if err := run(ctx, here, "python3", "-m", "venv", "--clear", venv); err != nil {
			return err
		}
		return fetch(ctx, here, a.Python, "-m", "pip", "install", "-q", "-r", requirements)
	})
}

// Classpath is that of one broker of another version (pom-versions.xml). The jars are in Maven's own repository; they are fetched when they are not there (yet, or any more).
func (a *Artifacts) Classpath(ctx context.Context, version string) (string, error) {
	a.mu.Lock() // Maven's repository is for one at a time
	defer a.mu.Unlock()
	pom, list := filepath.Join(a.Cache, "..", "pom-versions.xml"), filepath.Join(a.Cache, "classpath-"+version)
	resolve := func() error {
		return fetch(ctx, a.Cache, "mvn", "-q", "-B", "-f", pom, "-Dpulsar.version="+version, "dependency:build-classpath", "-Dmdep.outputFile="+list)
	}
	err := once(list, pom, resolve)
	jars, readErr := os.ReadFile(list)
	if err == nil && !allExist(filepath.SplitList(string(jars))) {
		err = resolve()
		jars, readErr = os.ReadFile(list)
	}
	if err := errors.Join(err, readErr); err != nil {
		return "", fmt.Errorf("fetch the jars of Pulsar %s: %w", version, err)
	}
	return strings.TrimSpace(string(jars)), nil
}

func allExist(files []string) bool {
	return !slices.ContainsFunc(files, func(name string) bool { _, err := os.Stat(strings.TrimSpace(name)); return err != nil })
}

// once runs make unless it already succeeded for target with the same contents of source.
func once(target, source string, make func() error) error {
	contents, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(contents)
	want := hex.EncodeToString(sum[:])
	stamp := target + ".stamp"
	if have, err := os.ReadFile(stamp); err == nil && string(have) == want {
		return nil
	}
	if err := make(); err != nil {
		return err
	}
	return os.WriteFile(stamp, []byte(want), 0o644)
}

// How often a download is tried, and how long after one that has failed.
const (
	fetchTimes = 3
	fetchPause = 5 * time.Second
)

// fetch runs a command that downloads something, again when it fails: a registry may be out of order for a moment.
func fetch(ctx context.Context, dir, name string, args ...string) error {
	for tried := 1; ; tried++ {
		err := run(ctx, dir, name, args...)
		if err == nil || tried == fetchTimes {
			return err
		}
		select {
		case <-time.After(fetchPause):
		case <-ctx.Done():
			return err
		}
	}
}

// run runs a command and returns its output as part of the error.
func run(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// javaCommand runs a class on the jars of the rig. heap and direct are limits in MiB.
func (a *Artifacts) javaCommand(heap, direct int, class string, args ...string) *exec.Cmd {
	return a.javaOn(filepath.Join(a.Jars, "*")+string(os.PathListSeparator)+a.Classes, heap, direct, class, args...)
}

// javaOn is javaCommand on another class path.
func (a *Artifacts) javaOn(classpath string, heap, direct int, class string, args ...string) *exec.Cmd {
	flags := []string{
		// Tests end long before the second compiler would have paid for itself, on few cores.
		"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xms64m",
		fmt.Sprintf("-Xmx%dm", heap), fmt.Sprintf("-XX:MaxDirectMemorySize=%dm", direct),
		"-Dio.netty.tryReflectionSetAccessible=true", "-Dzookeeper.admin.enableServer=false",
		"-Dzookeeper.4lw.commands.whitelist=*", "-Dpulsar.allocator.exit_on_oom=false",
		"-Dlog4j.configurationFile=" + filepath.Join(a.Cache, "..", "log4j2.xml"),
	}
	for _, open := range []string{
		"java.base/jdk.internal.loader", "java.base/java.lang", "java.base/java.io", "java.base/java.nio", "java.base/java.util.zip",
		"java.base/sun.net", "java.base/sun.nio.ch", "java.base/jdk.internal.misc", "java.base/jdk.internal.platform",
		"java.management/sun.management", "jdk.management/com.sun.management.internal",
	} {
		flags = append(flags, "--add-opens", open+"=ALL-UNNAMED")
	}
	flags = append(flags, "-cp", classpath, class)
	return exec.Command("java", append(flags, args...)...)
}
