package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Target is the broker that a client means.
type Target struct {
	Cluster string
	// Broker is its logical "host:port".
	Broker string
	// Tagged tells that a lookup had named it; false is a plain address that exactly one cluster knows.
	Tagged bool
}

// TargetFault is why a target was refused: the closed list that labels counters and logs.
type TargetFault uint8

// The faults of a target.
const (
	TargetMalformed TargetFault = iota + 1
	TargetUnknownKey
	TargetBadMAC
	TargetUnknownCluster
	TargetUnknownBroker
	TargetAmbiguous
	TargetDenied
)

// TargetFaults are all of them, for counters that exist from the start.
func TargetFaults() []TargetFault {
	return []TargetFault{TargetMalformed, TargetUnknownKey, TargetBadMAC, TargetUnknownCluster, TargetUnknownBroker, TargetAmbiguous, TargetDenied}
}

func (f TargetFault) String() string {
	switch f {
	case TargetMalformed:
		return "malformed"
	case TargetUnknownKey:
		return "unknown_key"
	case TargetBadMAC:
		return "bad_mac"
	case TargetUnknownCluster:
		return "unknown_cluster"
	case TargetUnknownBroker:
		return "unknown_broker"
	case TargetAmbiguous:
		return "ambiguous"
	case TargetDenied:
		return "denied_address"
	default:
		return "unknown"
	}
}

// TargetError is the refusal of a target, in words for the client's log.
type TargetError struct {
	Fault  TargetFault
	Value  string // as the client sent it, possibly long and hostile; Error shows a part of it
	Reason string
}

func (e *TargetError) Error() string {
	return fmt.Sprintf("proxy_to_broker_url %q is refused: %s", clip(e.Value), e.Reason)
}

// Resolve tells which broker a client means by the proxy_to_broker_url of its CONNECT. A tagged address must carry a valid MAC;
// a plain "host:port" is accepted when exactly one cluster knows it. Everything else is a *TargetError.
// The resolved IP address must still pass Cluster.Denies before it is dialled.
func (s *Set) Resolve(target string) (Target, error) {
	refuse := func(fault TargetFault, format string, args ...any) (Target, error) {
		return Target{}, &TargetError{Fault: fault, Value: target, Reason: fmt.Sprintf(format, args...)}
	}
	host, port, err := splitAddr(target)
	if err != nil {
		return refuse(TargetMalformed, "%v", err)
	}
	t, detail, err := s.untag(host, port)
	switch {
	case err == nil:
		return s.checkLiteral(t, target)
	case errors.Is(err, errTagForm):
	case errors.Is(err, errTagKey):
		return refuse(TargetUnknownKey, "it was made with the key %q and this proxy has %s; have all proxies the same tag key?", detail, strings.Join(s.keys.IDs(), ", "))
	case errors.Is(err, errTagCluster):
		return refuse(TargetUnknownCluster, "it names the cluster %q, which this proxy does not have; a new lookup gives a valid address", detail)
	case errors.Is(err, errTagBroker):
		return refuse(TargetUnknownBroker, "it names by hash a broker that no cluster has now; a new lookup gives a valid address")
	default:
		return refuse(TargetBadMAC, "its check code does not fit; only an address that a lookup through these proxies gave is accepted")
	}

	var vouching []string
	for _, c := range s.clusters {
		if c.Knows(target) {
			vouching = append(vouching, c.config.Name)
		}
	}
	switch len(vouching) {
	case 0:
		return refuse(TargetUnknownBroker, "no configured cluster has such a broker (by discovery, service_url or allow-list); look the topic up through this proxy")
	case 1:
		return s.checkLiteral(Target{Cluster: vouching[0], Broker: target}, target)
	default:
		return refuse(TargetAmbiguous, "the clusters %s all have a broker of this name; look the topic up through this proxy, which gives an address that tells them apart", strings.Join(vouching, ", "))
	}
}

// checkLiteral refuses an address that needs no resolving to be seen as forbidden.
func (s *Set) checkLiteral(t Target, value string) (Target, error) {
	c := s.byName[t.Cluster]
	dial := c.DialAddr(t.Broker)
	if host, _, err := splitAddr(dial); err == nil {
		if ip, err := netip.ParseAddr(host); err == nil && c.Denies(ip) {
			return Target{}, &TargetError{Fault: TargetDenied, Value: value,
				Reason: fmt.Sprintf("%s of cluster %q is a link-local, metadata, multicast or unspecified address, which is never dialled", dial, t.Cluster)}
		}
	}
	return t, nil
}
