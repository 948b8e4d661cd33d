package zktest

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

// dieWithParent makes sure that no server survives a test that was killed.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// clockTick is the unit of /proc/PID/stat, which Linux gives to programs as 100 a second whatever the kernel counts in.
const clockTick = 10 * time.Millisecond

// processCPU is the user and system time that a process has used.
func processCPU(pid int) (time.Duration, error) {
	name := fmt.Sprintf("/proc/%d/stat", pid)
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	// The name of the program, in brackets, may hold anything; user and system time are the 12th and 13th field after it.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var user, system int64
	if len(fields) < 13 {
		return 0, fmt.Errorf("%s has too few fields", name)
	}
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return time.Duration(user+system) * clockTick, nil
}
