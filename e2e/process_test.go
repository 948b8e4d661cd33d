package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// childVariable makes the test binary play the harness that is killed.
const childVariable = "E2E_TEST_CHILD"

// A rig that outlives its tests eats the machine: whatever way the test binary dies, its processes end.
func TestNoProcessOutlivesAKilledTestBinary(t *testing.T) {
	if dir := os.Getenv(childVariable); dir != "" {
		playHarness(dir)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), childVariable+"="+t.TempDir())
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() // when the test fails before it does so itself
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the child said nothing: %v", err)
	}
	var pids [2]int
	for i, word := range strings.Fields(line) {
		if pids[i], err = strconv.Atoi(word); err != nil {
			t.Fatalf("the child said %q, want two pids", line)
		}
	}
	for _, pid := range pids {
		if syscall.Kill(pid, 0) != nil {
			t.Fatalf("process %d does not run before the harness dies", pid)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := WaitUntil(ctx, "the guarded process to end", func() (bool, error) { return ended(pids[0]), nil }); err != nil {
		t.Error(err)
	}
	if ended(pids[1]) {
		t.Error("the released process was ended too; KEEP=1 would not keep the rig")
	}
	if err := syscall.Kill(-pids[1], syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

// playHarness starts a guarded and a released process, names their pids and waits to be killed.
func playHarness(dir string) {
	processes, err := NewProcesses(dir)
	if err != nil {
		panic(err)
	}
	guarded, err := processes.Start("guarded", exec.Command("sleep", "600"))
	if err != nil {
		panic(err)
	}
	released, err := processes.Start("released", exec.Command("sleep", "600"))
	if err != nil {
		panic(err)
	}
	processes.Release(released)
	fmt.Println(guarded.Pid, released.Pid)
	select {}
}

// ended tells whether a process is gone or a zombie that its new parent has not collected yet.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(state, "Z")
}

func TestAStoppedProcessIsEndedAndAStubbornOneIsKilledAndNamed(t *testing.T) {
	processes, err := NewProcesses(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer processes.Close()
	polite, err := processes.Start("polite", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	if err := polite.Stop(10 * time.Second); err != nil || polite.Alive() {
		t.Errorf("Stop of a process that obeys: %v, alive %v", err, polite.Alive())
	}
	stubborn, err := processes.Start("stubborn", exec.Command("sh", "-c", "trap '' TERM; echo ready >&2; while :; do sleep 1; done"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := WaitUntil(ctx, "its trap", func() (bool, error) { return stubborn.LogTail(1) == "ready", nil }); err != nil {
		t.Fatal(err)
	}
	if err := stubborn.Stop(100 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "stubborn") || stubborn.Alive() {
		t.Errorf("Stop of a process that ignores SIGTERM: %v, alive %v; want it killed and named", err, stubborn.Alive())
	}
}

func TestNoPortIsGivenAwayTwice(t *testing.T) {
	processes, err := NewProcesses(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer processes.Close()
	seen := map[int]bool{}
	for range 100 { // of 12,000 ports, so many that some would come again by chance
		ports, err := processes.FreePorts(20)
		if err != nil || len(ports) != 20 {
			t.Fatalf("%d ports, %v", len(ports), err)
		}
		for _, port := range ports {
			if seen[port] {
				t.Errorf("port %d was given twice", port)
			}
			seen[port] = true
		}
	}
}

func TestAWaitBearsErrorsOnlyWhereItIsToldTo(t *testing.T) {
	loading := errors.New("loading")
	asked := 0
	ready := func() (bool, error) {
		if asked++; asked < 3 {
			return true, loading
		}
		return true, nil
	}
	if err := WaitUntil(t.Context(), "it", ready); !errors.Is(err, loading) {
		t.Errorf("WaitUntil: %v, want the error at once", err)
	}
	if err := WaitThrough(t.Context(), "it", ready); err != nil || asked != 3 {
		t.Errorf("WaitThrough: %v after %d questions, want none after 3", err, asked)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := WaitThrough(ctx, "it", func() (bool, error) { cancel(); return false, loading }); !errors.Is(err, loading) {
		t.Errorf("WaitThrough in vain: %v, want it to tell of the last error", err)
	}
}
