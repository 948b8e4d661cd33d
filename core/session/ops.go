package session

import (
	"net/netip"
	"time"
)

// Conn names a connection of one event loop. Conn values are never reused; the zero Conn is none.
type Conn uint64

// Endpoint is the owner of one connection: the client side of a session, a broker leg, an upstream lookup connection,
// or a probe. The loop calls it; calls never overlap within one loop. An endpoint answers by adding to the shard's
// ops, which the loop performs after the call has returned.
type Endpoint interface {
	// Dialed tells that the connection asked for with OpDial exists and is c.
	Dialed(now time.Time, c Conn)
	// Data hands over everything that was received and not consumed yet. An accepted connection may be in a TLS handshake until the first
	// call, and must not be written to before. It returns how much it consumed; the loop
	// keeps the rest and hands it over again, in front of what comes next, or when an OpResume asks for it. src, and every
	// view of it put into an op, is valid until those ops were performed.
	Data(now time.Time, src []byte) (n int)
	// Tail tells that the next n bytes belong to dst verbatim (the rest of a large frame): the loop may move them by
	// itself, without Data, and must report each piece with Moved. n == 0: nothing of the kind.
	Tail() (dst Conn, n int)
	// Moved reports that n bytes of the tail went to dst's queue or socket.
	Moved(now time.Time, n int)
	// ReadPaused tells that the loop stopped (true) or resumed (false) reading because of a full peer. Silence does not count meanwhile.
	ReadPaused(now time.Time, paused bool)
	// Closed tells that the connection is gone, or that the dial failed (then Dialed was never called). It is the last
	// call. It does not follow an OpClose of the endpoint's own.
	Closed(now time.Time, reason NetReason, err error)
}

// NetReason is why the loop ended a connection by itself.
type NetReason uint8

// The reasons of the loop.
const (
	NetEOF          NetReason = iota // orderly end by the peer
	NetReset                         // error on read or write
	NetDialFailed                    // refused, unreachable
	NetDialTimeout                   // no answer within the deadline
	NetDialDenied                    // the resolved address is one that must never be dialled
	NetResolve                       // the name did not resolve
	NetWriteStalled                  // the peer took no byte for the write deadline
	NetShutdown                      // the loop stops
	NetTLSFailed                     // no TLS session: not trusted, nothing in common, not in time
	NetPlaintext                     // an accepted connection that should speak TLS speaks something else
)

// OpKind is what an op asks of the loop.
type OpKind uint8

// The kinds of ops.
const (
	// OpWrite sends Data to Conn, after all that was sent before. Data is only valid while ops are performed: what the
	// socket does not take now is copied.
	OpWrite OpKind = iota
	// OpDial opens a connection to Addr ("host:port", a literal IP or a name) for Endpoint, with TLS where that is named.
	OpDial
	// OpClose ends Conn. With Flush, what was queued is sent first (bounded by the loop's flush deadline).
	OpClose
	// OpPause stops reading Conn until OpResume. The loop's own back-pressure is independent of it.
	OpPause
	// OpResume reads Conn again, and hands over again what Data did not consume.
	OpResume
	// OpReport hands Report to the observer (log). It asks nothing of the loop.
	OpReport
	// OpTranslate hands Translation to the application, which answers with Shard.Translated on this loop.
	OpTranslate
	// OpOldAcks hands OldAcks to the application, which gives it to Shard.CarryAcks of every other loop.
	OpOldAcks
)

// Op is one piece of work for the loop.
type Op struct {
	Kind  OpKind
	Flush bool
	// Relay marks an OpWrite whose bytes came from the connection whose Data is being handled: if Conn's queue is above
	// the high watermark afterwards, that connection is not read until the queue is below the low one. An OpWrite without Relay that
	// leaves the queue above the high watermark stops the reading of Conn itself: who asks without taking answers is not heard.
	Relay bool
	// Gather lets an OpWrite wait for the end of the loop's turn, so that many small ones to Conn become one. What is written to Conn
	// meanwhile waits behind it.
	Gather bool
	Conn   Conn
	Data   []byte
	Addr   string // OpDial
	TLS    string // OpDial: the name of a client's TLS configuration; "" is plaintext
	// ServerName is the name, or IP address, that the certificate must be for.
	ServerName string
	Deny       func(netip.Addr) bool // OpDial: of every resolved address; true ends in NetDialDenied
	Endpoint   Endpoint
	Report     *Report

	Translation *Translation
	OldAcks     *OldAcks
}
