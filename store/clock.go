package store

import (
	"time"

	"golang.org/x/sys/unix"
)

// Boottime is the clock of leases: the time since the machine was started. Unlike Go's own it goes on while the machine is
// suspended, so that a lease ends there too.
func Boottime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(bootClock, &t); err != nil {
		panic("the kernel has no clock that counts since the start of the machine: " + err.Error())
	}
	return time.Duration(t.Nano())
}
