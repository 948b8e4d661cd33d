// Package bench measures proxies for the Pulsar protocol against each other: a fake broker, a load generator that speaks
// the protocol as clients do, scenarios, and the arithmetic of paired ratios. cmd/pointsman-bench calls it, and
// guard_test.go counts allocations and system calls with it.
//
// Broker, load and every proxy are processes of their own, so that the kernel's accounting tells them apart. The package
// must never be linked into the product, and must never draw a conclusion from one run: a number is a ratio of runs that
// were made side by side, with its interval and with what else the machine did meanwhile.
//
// All but the arithmetic needs Linux: /proc and epoll.
package bench
