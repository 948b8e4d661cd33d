// Package zktest runs real ZooKeeper servers for tests: of package zk, of store/storetest and of e2e. It needs Java and
// Maven; nothing outside of tests may import it.
package zktest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TickTime is the servers' tick: session time-outs are granted from two ticks on.
const TickTime = 500 * time.Millisecond

// startTimeout bounds the start of a server, stopTimeout its stop, askTimeout a question. A start takes a second or two; on a machine with a load of 60 it took longer than a minute.
const (
	startTimeout = 5 * time.Minute
	stopTimeout  = 20 * time.Second
	askTimeout   = 20 * time.Second
)

// Server is one ZooKeeper server process on a loopback port that stays the same over stops and starts.
type Server struct {
	t       testing.TB
	classes string
	dir     string // data, configuration and log
	port    int
	command *exec.Cmd // nil while it is stopped
	done    chan struct{}
	log     *os.File
}

// Start runs a single server until the test ends. Without Java or Maven the test is skipped, or fails when
// REQUIRE_E2E=1.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, classes: classPath(t), dir: t.TempDir(), port: freePorts(t, 1)[0]}
	s.configure("")
	s.Start()
	return s
}

// Ensemble runs n servers that elect a leader.
func Ensemble(t testing.TB, n int) []*Server {
	t.Helper()
	classes := classPath(t)
	ports := freePorts(t, 3*n)
	var peers strings.Builder
	for i := range n {
		fmt.Fprintf(&peers, "server.%d=127.0.0.1:%d:%d\n", i+1, ports[n+2*i], ports[n+2*i+1])
	}
	servers := make([]*Server, n)
	for i := range servers {
		servers[i] = &Server{t: t, classes: classes, dir: t.TempDir(), port: ports[i]}
		servers[i].configure(peers.String() + "initLimit=60\nsyncLimit=20\n") // ticks: a busy machine is no reason to elect another one
		if err := os.WriteFile(filepath.Join(servers[i].dir, "data", "myid"), []byte(strconv.Itoa(i+1)), 0o600); err != nil {
			t.Fatal(err)
		}
		servers[i].launch()
	}
	for _, s := range servers {
		s.awaitReady()
	}
	return servers
}

// Addr is the server's host:port for clients.
func (s *Server) Addr() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

// Start starts a stopped server on its old data and waits until it serves.
func (s *Server) Start() {
	s.t.Helper()
	s.launch()
	s.awaitReady()
}

// Launch starts a stopped server and does not wait.
func (s *Server) Launch() {
	s.t.Helper()
	s.launch()
}

// Stop ends the server in an orderly way.
func (s *Server) Stop() { s.end(syscall.SIGTERM) }

// Kill ends the server at once.
func (s *Server) Kill() { s.end(syscall.SIGKILL) }

// Pause stops the process without ending it: its connections stay and nothing answers.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

// Ask sends one of the four-letter commands and returns the answer.
func (s *Server) Ask(word string) (string, error) {
	conn, err := net.DialTimeout("tcp", s.Addr(), askTimeout)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(askTimeout)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, word); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

// Connections is the number of client connections that the server has, without the one that asks.
func (s *Server) Connections() int {
	s.t.Helper()
	answer, err := s.Ask("cons")
	if err != nil {
		s.t.Fatalf("asking ZooKeeper for its connections: %v", err)
	}
	n := 0
	for line := range strings.Lines(answer) {
		if strings.HasPrefix(line, " /") && strings.Contains(line, "sid=") {
			n++
		}
	}
	return n
}

// CPU is the processor time that the server has used since it was started; an error where the system does not tell.
func (s *Server) CPU() (time.Duration, error) {
	if s.command == nil {
		return 0, errors.New("the server is not running")
	}
	return processCPU(s.command.Process.Pid)
}

// Counters are the numbers that the server tells of itself, by name without "zk_": watch_count, packets_received, ….
func (s *Server) Counters() map[string]int64 {
	s.t.Helper()
	answer, err := s.Ask("mntr")
	if err != nil {
		s.t.Fatalf("asking ZooKeeper for its counters: %v", err)
	}
	counters := map[string]int64{}
	for line := range strings.Lines(answer) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if n, err := strconv.ParseFloat(value, 64); err == nil {
			counters[strings.TrimPrefix(name, "zk_")] = int64(n)
		}
	}
	return counters
}

// Leader tells whether the server leads an ensemble.
func (s *Server) Leader() bool {
	answer, err := s.Ask("srvr")
	return err == nil && strings.Contains(answer, "Mode: leader")
}

func (s *Server) configure(more string) {
	s.t.Helper()
	data := filepath.Join(s.dir, "data")
	if err := os.MkdirAll(data, 0o700); err != nil {
		s.t.Fatal(err)
	}
	text := fmt.Sprintf("tickTime=%d\ndataDir=%s\nclientPort=%d\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n"+
		"4lw.commands.whitelist=*\nmaxClientCnxns=0\nforceSync=no\nmaxSessionTimeout=60000\n%s", TickTime.Milliseconds(), data, s.port, more)
	if err := os.WriteFile(filepath.Join(s.dir, "zoo.cfg"), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *Server) launch() {
	s.t.Helper()
	if s.command != nil {
		s.t.Fatal("zktest: the server is running already")
	}
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command("java", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.jmx.log4j.disable=true",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Djava.net.preferIPv4Stack=true", "-cp", s.classes, "org.apache.zookeeper.server.quorum.QuorumPeerMain", filepath.Join(s.dir, "zoo.cfg"))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		s.t.Fatalf("starting ZooKeeper: %v", err)
	}
	s.command, s.log, s.done = cmd, log, make(chan struct{})
	done := s.done
	go func() {
		defer close(done)
		_ = cmd.Wait() // ended by a signal of ours, or awaitReady notices
	}()
	s.t.Cleanup(func() {
		if s.command == cmd {
			s.signal(syscall.SIGCONT)
			s.Kill()
		}
	})
}

func (s *Server) awaitReady() {
	s.t.Helper()
	deadline := time.Now().Add(startTimeout)
	for time.Now().Before(deadline) {
		if answer, err := s.Ask("srvr"); err == nil && strings.Contains(answer, "Mode:") {
			return
		}
		select {
		case <-s.done:
			s.t.Fatalf("ZooKeeper on %s ended by itself: %s", s.Addr(), s.tail())
		case <-time.After(50 * time.Millisecond):
		}
	}
	s.t.Fatalf("ZooKeeper on %s does not serve after %s: %s", s.Addr(), startTimeout, s.tail())
}

func (s *Server) end(signal syscall.Signal) {
	s.t.Helper()
	if s.command == nil {
		return
	}
	s.signal(signal)
	select {
	case <-s.done:
	case <-time.After(stopTimeout):
		_ = s.command.Process.Kill()
		<-s.done
	}
	_ = s.log.Close()
	s.command = nil
}

func (s *Server) signal(signal syscall.Signal) {
	s.t.Helper()
	if s.command == nil {
		s.t.Fatalf("zktest: the server is not running, signal %s makes no sense", signal)
	}
	if err := s.command.Process.Signal(signal); err != nil {
		select {
		case <-s.done: // gone already
		default:
			s.t.Fatalf("zktest: signal %s: %v", signal, err)
		}
	}
}

// tail is the end of the server's log.
func (s *Server) tail() string {
	f, err := os.Open(filepath.Join(s.dir, "log"))
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	var lines []string
	for scanner := bufio.NewScanner(f); scanner.Scan(); {
		lines = append(lines, scanner.Text())
		if len(lines) > 20 {
			lines = lines[1:]
		}
	}
	return strings.Join(lines, "\n")
}

// freePorts finds ports that nobody listens on now, below those that the kernel hands out by itself: a server keeps its
// port while it is stopped, and no outgoing connection must take it. Until the test ends the same port of another loopback address, where there
// are several, tells other test processes that it is taken: nobody listens on it while its server starts.
func freePorts(t testing.TB, n int) []int {
	t.Helper()
	var ports []int
	for attempts := 0; len(ports) < n; attempts++ {
		port := 15_000 + rand.IntN(15_000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			if attempts > 100 {
				t.Fatalf("zktest: no free port: %v", err)
			}
			continue
		}
		defer l.Close()
		switch claim, err := net.Listen("tcp", fmt.Sprintf("127.0.0.9:%d", port)); {
		case err == nil:
			t.Cleanup(func() { claim.Close() })
		case errors.Is(err, syscall.EADDRINUSE):
			continue
		}
		ports = append(ports, port)
	}
	return ports
}
