package zktest

import "syscall"

// dieWithParent makes sure that no server survives a test that was killed.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
