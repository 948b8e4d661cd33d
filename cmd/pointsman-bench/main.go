// Command pointsman-bench measures Pointsman against other proxies: see package bench, and BENCHMARKS.md for what it found.
package main

import (
	"fmt"
	"os"
	"runtime"
)

func main() {
	// The kernel ends the children when the thread that started them ends: let that be the main thread.
	runtime.LockOSThread()
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pointsman-bench:", err)
		os.Exit(1)
	}
}
