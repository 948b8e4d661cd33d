package store

import "golang.org/x/sys/unix"

// bootClock counts the time in which the machine sleeps too.
const bootClock = unix.CLOCK_MONOTONIC_RAW
