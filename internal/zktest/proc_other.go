//go:build !linux

package zktest

import "syscall"

// dieWithParent: only Linux ties the life of a process to its parent's.
func dieWithParent() *syscall.SysProcAttr { return nil }
