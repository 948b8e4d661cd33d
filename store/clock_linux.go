package store

import "golang.org/x/sys/unix"

// bootClock counts the time in which the machine is suspended too.
const bootClock = unix.CLOCK_BOOTTIME
