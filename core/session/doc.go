// Package session is the heart of the proxy as a sans-IO state machine: client connections with their broker legs, and
// the pooled lookup connections towards brokers, all of one event loop. netio calls it with events and performs the ops
// that it answers with. It owns no goroutine, socket, clock, log or lock, and must never block.
package session
