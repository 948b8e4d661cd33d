//go:build !linux

package zktest

import (
	"errors"
	"syscall"
	"time"
)

// dieWithParent: only Linux ties the life of a process to its parent's.
func dieWithParent() *syscall.SysProcAttr { return nil }

func processCPU(int) (time.Duration, error) {
	return 0, errors.New("the time of a process is read from /proc, which this system does not have")
}
