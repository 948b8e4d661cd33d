package bench

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// usage is what the kernel accounts to a process, or to the machine, up to now.
type usage struct {
	cpu      time.Duration // user and system time
	switches int64         // context switches of all threads, voluntary and not
}

// tickLength is the unit of /proc/stat: USER_HZ is 100 on every Linux that Go runs on.
const tickLength = 10 * time.Millisecond

// processUsage reads the CPU time (all threads, ended ones included) and context switches (living ones) of a process. The time is that of
// the process's CPU clock, in ns: what /proc/PID/stat shows in ticks of 10 ms, too coarse for a window of half a second.
func processUsage(pid int) (u usage, err error) {
	const schedClock = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|schedClock, &ts); err != nil {
		return u, fmt.Errorf("the process is gone: %w", err)
	}
	u.cpu = time.Duration(ts.Nano())
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return u, err
	}
	for _, file := range tasks {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // a thread that has just ended
		}
		u.switches += statusField(text, "voluntary_ctxt_switches:") + statusField(text, "nonvoluntary_ctxt_switches:")
	}
	return u, nil
}

// processState is the state in a line of /proc/PID/stat: 'Z' for a child that has ended.
func processState(line []byte) byte {
	if at := bytes.LastIndexByte(line, ')') + 2; at > 1 && at < len(line) {
		return line[at]
	}
	return 0
}

// statusField is a number from a line of /proc/PID/status or smaps_rollup, 0 when there is none.
func statusField(text []byte, name string) int64 {
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			fields := strings.Fields(rest)
			if len(fields) == 0 {
				return 0
			}
			n, _ := strconv.ParseInt(fields[0], 10, 64)
			return n
		}
	}
	return 0
}

// footprint is the memory of a process in KiB, and its open descriptors.
type footprint struct {
	RSS   int64 `json:"rss_kib"`
	PSS   int64 `json:"pss_kib"`
	Files int   `json:"files"`
}

func processFootprint(pid int) (f footprint, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return f, fmt.Errorf("the process is gone: %w", err)
	}
	f.RSS, f.PSS = statusField(text, "Rss:"), statusField(text, "Pss:")
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	f.Files = len(files)
	return f, err
}

// connectionsBetween counts the TCP connections that one process has to another.
func connectionsBetween(from, to int) (n int, err error) {
	text, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0, err
	}
	if six, err := os.ReadFile("/proc/net/tcp6"); err == nil { // sockets for both families are there
		text = append(text, six...)
	}
	mine, err := socketsOf(from)
	if err != nil {
		return 0, err
	}
	theirs, err := socketsOf(to)
	if err != nil {
		return 0, err
	}
	return countConnections(string(text), mine, theirs), nil
}

// countConnections goes through the lines of /proc/net/tcp and tcp6: an end among mine whose other end is among theirs.
func countConnections(table string, mine, theirs map[string]bool) (n int) {
	const local, remote, state, inode = 1, 2, 3, 9
	const established = "01"
	short := func(addr string) string { // of an IPv4 address in IPv6 form only the IPv4 part
		const port, v4 = len(":1234"), 8
		return addr[max(len(addr)-port-v4, 0):]
	}
	ends := map[string]bool{} // "local remote" of theirs
	for line := range strings.Lines(table) {
		if f := strings.Fields(line); len(f) > inode && f[state] == established && theirs[f[inode]] {
			ends[short(f[local])+" "+short(f[remote])] = true
		}
	}
	for line := range strings.Lines(table) {
		if f := strings.Fields(line); len(f) > inode && f[state] == established && mine[f[inode]] && ends[short(f[remote])+" "+short(f[local])] {
			n++
		}
	}
	return n
}

// socketsOf are the inode numbers of a process's sockets.
func socketsOf(pid int) (map[string]bool, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	inodes := map[string]bool{}
	for _, f := range files {
		link, err := os.Readlink(filepath.Join(dir, f.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		if inode, ok := strings.CutPrefix(link, "socket:["); ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
	return inodes, nil
}

// machineBusy is the time that all processors together spent on anything, stolen time included.
func machineBusy() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	busy := int64(0)
	const idle, iowait, guest = 3, 4, 8 // guest time is part of user time
	for i, f := range strings.Fields(strings.TrimPrefix(line, "cpu ")) {
		if i == idle || i == iowait || i >= guest {
			continue
		}
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat cannot be read: %w", err)
		}
		busy += n
	}
	return time.Duration(busy) * tickLength, nil
}

// loadAverage is that of the last minute.
func loadAverage() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

// metrics is a scrape of a proxy's /metrics.
type metrics string

func scrape(ops string) (metrics, error) {
	resp, err := http.Get(ops + "/metrics")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return metrics(text), err
}

// sum adds up the series of a family whose labels contain label; an error when there is none.
func (m metrics) sum(family, label string) (sum float64, err error) {
	found := false
	for line := range strings.Lines(string(m)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != family && !strings.HasPrefix(name, family+"{") || !strings.Contains(name, label) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("/metrics: %q: %w", line, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, fmt.Errorf("/metrics has no series %s with %q", family, label)
	}
	return sum, nil
}
