package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// watchdogScript ends the process groups that are still registered when its standard input ends, which it does
// however the test binary dies: a panic, a test timeout, Ctrl-C or kill -9.
const watchdogScript = `pids=
while read -r op pid; do
  case $op in
    +) pids="$pids $pid" ;;
    -) rest=; for p in $pids; do [ "$p" = "$pid" ] || rest="$rest $p"; done; pids=$rest ;;
  esac
done
for p in $pids; do kill -s KILL -- "-$p" 2>/dev/null; done`

// Processes starts children, each in a process group of its own, and makes sure that none outlives the tests. It is
// safe for concurrent use.
type Processes struct {
	logs string

	mu     sync.Mutex // guards the fields below
	stdin  io.WriteCloser
	cmd    *exec.Cmd
	living map[int]*Process
	ports  map[int]bool // that were given away
}

// Process is one child, or one that an earlier run left behind and this one took over.
type Process struct {
	Name string
	Pid  int
	Log  string // file with its standard error (and output, unless a pipe was asked for)

	owner *Processes
	done  chan struct{} // closed when a child has ended; nil for one that was taken over
}

// NewProcesses starts the watchdog. Logs go to files under logs.
func NewProcesses(logs string) (*Processes, error) {
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command("sh", "-c", watchdogScript)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C must not end the watchdog before its work is done
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	return &Processes{logs: logs, stdin: stdin, cmd: cmd, living: map[int]*Process{}, ports: map[int]bool{}}, nil
}

// Start runs cmd under name. Its log file is <logs>/<name>.log and is replaced.
func (ps *Processes) Start(name string, cmd *exec.Cmd) (*Process, error) {
	log, err := os.Create(filepath.Join(ps.logs, name+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	if cmd.Stdout == nil {
		cmd.Stdout = log
	}
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &Process{Name: name, Pid: cmd.Process.Pid, Log: log.Name(), owner: ps, done: make(chan struct{})}
	ps.register(p)
	go func() {
		_ = cmd.Wait() // how it ended is in its log; that it ended is what callers act on
		ps.forget(p)
		close(p.done)
	}()
	return p, nil
}

// Adopt takes over a process group that an earlier run left behind.
func (ps *Processes) Adopt(name string, pid int) *Process {
	p := &Process{Name: name, Pid: pid, Log: filepath.Join(ps.logs, name+".log"), owner: ps}
	ps.register(p)
	return p
}

// Release lets p live on after the tests.
func (ps *Processes) Release(p *Process) { ps.forget(p) }

// Close ends everything that was not released and then the watchdog.
func (ps *Processes) Close() {
	ps.mu.Lock()
	living := make([]*Process, 0, len(ps.living))
	for _, p := range ps.living {
		living = append(living, p)
	}
	ps.mu.Unlock()
	for _, p := range living {
		p.Signal(syscall.SIGKILL)
	}
	for _, p := range living {
		_ = p.WaitEnd(10 * time.Second) // a process that survives SIGKILL is the kernel's
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	_ = ps.stdin.Close()
	_ = ps.cmd.Wait()
}

func (ps *Processes) register(p *Process) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.living[p.Pid] = p
	_, _ = fmt.Fprintf(ps.stdin, "+ %d\n", p.Pid) // fails only after Close
}

func (ps *Processes) forget(p *Process) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	delete(ps.living, p.Pid)
	_, _ = fmt.Fprintf(ps.stdin, "- %d\n", p.Pid)
}

// Signal sends sig to the whole process group.
func (p *Process) Signal(sig syscall.Signal) {
	if p.Alive() {
		_ = syscall.Kill(-p.Pid, sig)
	}
}

// Alive tells whether the process has not ended yet.
func (p *Process) Alive() bool {
	if p.done != nil {
		select {
		case <-p.done:
			return false
		default:
			return true
		}
	}
	return syscall.Kill(p.Pid, 0) == nil
}

// Stop asks p to end by SIGTERM, and ends it by SIGKILL when it takes longer than patience.
func (p *Process) Stop(patience time.Duration) error {
	p.Signal(syscall.SIGTERM)
	if p.WaitEnd(patience) == nil {
		return nil
	}
	p.Signal(syscall.SIGKILL)
	if err := p.WaitEnd(10 * time.Second); err != nil {
		return err
	}
	return fmt.Errorf("%s (pid %d) did not end within %v of SIGTERM and was killed; its log: %s", p.Name, p.Pid, patience, p.Log)
}

// WaitEnd waits until p has ended.
func (p *Process) WaitEnd(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if p.done == nil {
		err := WaitUntil(ctx, fmt.Sprintf("%s (pid %d) to end", p.Name, p.Pid), func() (bool, error) { return !p.Alive(), nil })
		if err == nil {
			p.owner.forget(p)
		}
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s (pid %d) is still running after %v", p.Name, p.Pid, limit)
	}
}

// LogTail returns the last lines of the log, for error messages.
func (p *Process) LogTail(lines int) string {
	text, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// pollEvery is how often WaitUntil asks, where an answer costs less.
const pollEvery = 25 * time.Millisecond

// WaitUntil asks ready until it says yes, returns an error, or ctx ends. It is for the state of other processes,
// which can only be asked for; within this process wait for the event itself. Between two questions it waits for as long as
// the first one took: those who are asked need the machine as well.
func WaitUntil(ctx context.Context, what string, ready func() (bool, error)) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	began := time.Now()
	for {
		asked := time.Now()
		ok, err := ready()
		if err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		if ok {
			return nil
		}
		timer.Reset(max(pollEvery, time.Since(asked)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fmt.Errorf("waited %v in vain for %s", time.Since(began).Round(time.Millisecond), what)
		}
	}
}

// WaitThrough is WaitUntil of somebody who may answer with an error for a while, as brokers do that are just loading a topic. It tells of the last
// one when ctx ends.
func WaitThrough(ctx context.Context, what string, ready func() (bool, error)) error {
	var last error
	err := WaitUntil(ctx, what, func() (bool, error) {
		var ok bool
		ok, last = ready()
		return ok && last == nil, nil
	})
	if err != nil && last != nil {
		return fmt.Errorf("%w; the last answer: %w", err, last)
	}
	return err
}

// FreePorts returns n different TCP ports of 127.0.0.1 that nobody listens on now. They lie below the range from
// which the kernel takes the ports of outgoing connections, and none is given away twice: so none is taken between here and its use,
// or while who uses it is being started again.
func (ps *Processes) FreePorts(n int) ([]int, error) {
	const low, high = 20_000, 32_000
	var held []net.Listener
	defer func() {
		for _, l := range held {
			_ = l.Close()
		}
	}()
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ports := make([]int, 0, n)
	for range 50 * n {
		port := low + rand.IntN(high-low)
		if ps.ports[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		held = append(held, l)
		ps.ports[port] = true
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, errors.New("no free ports between 20000 and 32000 on 127.0.0.1; what is listening there? (ss -ltnp)")
}
