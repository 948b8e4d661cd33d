package switching

import "time"

// The durations of the protocol. The controller counts its own; a proxy undoes nothing by its clock.
const (
	// PrepareLimit is how long a topic may be prepared before the switch aborts.
	PrepareLimit = 30 * time.Second
	// FenceLimit is how long a topic may be fenced. Clients give a message 30 s until its receipt.
	FenceLimit = 10 * time.Second
	// ResumeLimit is FenceLimit for a leader that finds the topic fenced: together with the first leader's fence and the time that it
	// takes to notice its death it stays below the clients' 30 s.
	ResumeLimit = 5 * time.Second
	// EvictLimit is how long the proxies may take to tell their clients after the flip; then the switch ends as incomplete.
	EvictLimit = 30 * time.Second
	// BrokerKeepAlive is the keep-alive interval of a broker (keepAliveIntervalSeconds).
	BrokerKeepAlive = 30 * time.Second
	// SettleTime is after how long a broker has read or dropped what a connection that ended had sent: a broker closes a connection
	// that was silent for two of its keep-alive intervals.
	SettleTime = 2 * BrokerKeepAlive
)

// AgeMargin is how much longer than its promised max_map_age a member must be unseen until nobody waits for it (P8). What it had sent before it
// held its publishes arrives within SettleTime, or never; its loops are told within a second; and clocks that are being
// adjusted differ by much less than two in a hundred.
func AgeMargin(maxMapAge time.Duration) time.Duration { return SettleTime + time.Second + maxMapAge/50 }
