package session

import "net/netip"

// Report is one thing that happened and that an operator may want to read: the observer turns it into a log line.
type Report struct {
	Event   Event
	Session uint64 // the connection id of every log line and error text; 0 = not about one client connection
	Peer    netip.AddrPort
	Cause   Cause   // EventClosed
	Refusal Refusal // EventRefused
	Cluster string
	Broker  string // logical address
	Topic   string
	Text    string
}

// Event is what a report is about.
type Event uint8

// The events.
const (
	EventClosed    Event = iota // a client connection ended
	EventRefused                // a request was answered with an error of the proxy's own
	EventRestarted              // a reader begins with the oldest message, for where it was is not known
	EventUpstream               // a lookup connection to a broker failed
	EventLegLost                // a connection to a broker of the cluster that a topic is leaving failed; the client's goes on
)

var eventNames = [...]string{"closed", "refused", "reader_restarted", "upstream_failed", "leg_lost"}

func (e Event) String() string { return eventNames[e] }

// Side is who a cause is about.
type Side uint8

// The sides.
const (
	SideClient Side = iota
	SideBroker
	SideProxy
)

var sideNames = [...]string{"client", "broker", "proxy"}

func (s Side) String() string { return sideNames[s] }

// Cause is why a client connection was closed: the closed list that labels the counter, the log line and the test.
type Cause uint8

// The causes.
const (
	CauseClientEOF Cause = iota
	CauseClientReset
	CauseClientStalled
	CauseClientSilent
	CauseClientNoConnect
	CauseClientTLSHello
	CauseClientTLSHandshake
	CauseClientPlaintext
	CauseClientHTTP
	CauseClientFrame
	CauseClientProtocol
	CauseClientVersion
	CauseClientCredentials
	CauseTargetRefused
	CauseBrokerResolve
	CauseBrokerDenied
	CauseBrokerDial
	CauseBrokerDialTimeout
	CauseBrokerTLSHandshake
	CauseBrokerHandshake
	CauseBrokerError
	CauseBrokerEOF
	CauseBrokerReset
	CauseBrokerStalled
	CauseBrokerSilent
	CauseBrokerFrame
	CauseShutdown
	CauseClusterDead
	causeCount
)

type causeInfo struct {
	side  Side
	code  string
	retry bool // whether the same client may simply connect again
}

var causes = [causeCount]causeInfo{
	CauseClientEOF:          {SideClient, "eof", true},
	CauseClientReset:        {SideClient, "reset", true},
	CauseClientStalled:      {SideClient, "stalled", true},
	CauseClientSilent:       {SideClient, "silent", true},
	CauseClientNoConnect:    {SideClient, "no_connect", true},
	CauseClientTLSHello:     {SideClient, "tls_on_plaintext_port", false},
	CauseClientTLSHandshake: {SideClient, "tls_handshake", false},
	CauseClientPlaintext:    {SideClient, "plaintext_on_tls_port", false},
	CauseClientHTTP:         {SideClient, "http_on_binary_port", false},
	CauseClientFrame:        {SideClient, "malformed_frame", false},
	CauseClientProtocol:     {SideClient, "protocol_violation", false},
	CauseClientVersion:      {SideClient, "version_too_old", false},
	CauseClientCredentials:  {SideClient, "foreign_credentials", false},
	CauseTargetRefused:      {SideClient, "target_refused", false},
	CauseBrokerResolve:      {SideBroker, "name_not_resolved", true},
	CauseBrokerDenied:       {SideBroker, "address_denied", false},
	CauseBrokerDial:         {SideBroker, "dial_failed", true},
	CauseBrokerDialTimeout:  {SideBroker, "dial_timeout", true},
	CauseBrokerTLSHandshake: {SideBroker, "tls_handshake", false},
	CauseBrokerHandshake:    {SideBroker, "handshake_timeout", true},
	CauseBrokerError:        {SideBroker, "refused_connect", false},
	CauseBrokerEOF:          {SideBroker, "eof", true},
	CauseBrokerReset:        {SideBroker, "reset", true},
	CauseBrokerStalled:      {SideBroker, "stalled", true},
	CauseBrokerSilent:       {SideBroker, "silent", true},
	CauseBrokerFrame:        {SideBroker, "malformed_frame", true},
	CauseShutdown:           {SideProxy, "shutdown", true},
	CauseClusterDead:        {SideProxy, "cluster_dead", true},
}

// Causes lists every cause, for registries that want each of them to exist from the start.
func Causes() []Cause {
	all := make([]Cause, causeCount)
	for i := range all {
		all[i] = Cause(i)
	}
	return all
}

// Side is who the cause is about.
func (c Cause) Side() Side { return causes[c].side }

// Code is the stable name within the side.
func (c Cause) Code() string { return causes[c].code }

// RetrySafe tells whether the same client may simply connect again.
func (c Cause) RetrySafe() bool { return causes[c].retry }

func (c Cause) String() string { return c.Side().String() + "_" + c.Code() }

// clientCause and brokerCause translate what the loop says of a connection.
func clientCause(r NetReason) Cause {
	switch r {
	case NetEOF:
		return CauseClientEOF
	case NetWriteStalled:
		return CauseClientStalled
	case NetShutdown:
		return CauseShutdown
	case NetTLSFailed:
		return CauseClientTLSHandshake
	case NetPlaintext:
		return CauseClientPlaintext
	default:
		return CauseClientReset
	}
}

func brokerCause(r NetReason) Cause {
	switch r {
	case NetEOF:
		return CauseBrokerEOF
	case NetDialFailed:
		return CauseBrokerDial
	case NetDialTimeout:
		return CauseBrokerDialTimeout
	case NetDialDenied:
		return CauseBrokerDenied
	case NetResolve:
		return CauseBrokerResolve
	case NetWriteStalled:
		return CauseBrokerStalled
	case NetShutdown:
		return CauseShutdown
	case NetTLSFailed:
		return CauseBrokerTLSHandshake
	default:
		return CauseBrokerReset
	}
}

// Refusal is why the proxy answered a request with an error of its own; the connection stays.
type Refusal uint8

// The refusals.
const (
	RefusedTopicName Refusal = iota
	RefusedUnmapped
	RefusedUnknownCluster
	RefusedWrongCluster
	RefusedClusterUnreachable
	RefusedClusterDisagrees
	RefusedRedirects
	RefusedThrottled
	RefusedUnsupported
	RefusedMoved
	RefusedClosing
	RefusedIDInUse
	RefusedTooManyHandles
	RefusedTranslation
	RefusedSwitching
	RefusedLegLost
	RefusedTooManyLegs
	RefusedMapTooOld
	refusalCount
)

var refusalCodes = [refusalCount]string{
	RefusedTopicName:          "invalid_topic_name",
	RefusedUnmapped:           "unmapped",
	RefusedUnknownCluster:     "unknown_cluster",
	RefusedWrongCluster:       "wrong_cluster",
	RefusedClusterUnreachable: "cluster_unreachable",
	RefusedClusterDisagrees:   "map_and_cluster_disagree",
	RefusedRedirects:          "too_many_redirects",
	RefusedThrottled:          "too_many_lookups",
	RefusedUnsupported:        "unsupported_command",
	RefusedMoved:              "moved",
	RefusedClosing:            "still_closing",
	RefusedIDInUse:            "id_in_use",
	RefusedTooManyHandles:     "too_many_handles",
	RefusedTranslation:        "old_message_id",
	RefusedSwitching:          "switching",
	RefusedLegLost:            "broker_lost",
	RefusedTooManyLegs:        "too_many_brokers",
	RefusedMapTooOld:          "map_too_old",
}

// Refusals lists every refusal.
func Refusals() []Refusal {
	all := make([]Refusal, refusalCount)
	for i := range all {
		all[i] = Refusal(i)
	}
	return all
}

func (r Refusal) String() string { return refusalCodes[r] }
