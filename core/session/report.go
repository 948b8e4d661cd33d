package session

import "net/netip"

// Report is one thing that happened and that an operator may want to read: the observer turns it into a log line.
type Report struct {
	Event   string // closed list: see the Event constants
	Session uint64 // the connection id of the log lines; 0 = none
	Peer    netip.AddrPort
	Cause   Cause
	Cluster string
	Broker  string
	Topic   string
	Text    string
}

// Cause is why something was closed or refused: the closed list that labels counters, log lines and tests.
type Cause uint8
