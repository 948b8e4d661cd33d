package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// maxAddrLen bounds a logical "host:port": the longest DNS name, the port, and brackets.
const maxAddrLen = 253 + len("[]:65535")

// The faults of an address, in the words of an error.
var (
	errEmpty    = errors.New("it is empty; write host:port")
	errLong     = fmt.Errorf("it is longer than the %d bytes that host:port can have", maxAddrLen)
	errScheme   = errors.New("it has a scheme; write host:port alone")
	errNoPort   = errors.New("it has no port; write host:port")
	errPort     = errors.New("its port is not a number from 1 to 65535")
	errIPv6     = errors.New("it looks like an IPv6 address without brackets; write [address]:port")
	errNoHost   = errors.New("it has no host; write host:port")
	errHostChar = errors.New("its host has a character that no host name has")
)

// splitAddr takes "host:port" apart. The host comes without the brackets of an IPv6 literal. It accepts any printable
// ASCII host that is not ambiguous in an address: whether such a host exists is for others to say.
func splitAddr(addr string) (host string, port uint16, err error) {
	switch {
	case addr == "":
		return "", 0, errEmpty
	case len(addr) > maxAddrLen:
		return "", 0, errLong
	case strings.Contains(addr, "://"):
		return "", 0, errScheme
	}
	colon := strings.LastIndexByte(addr, ':')
	if colon < 0 || addr[len(addr)-1] == ']' {
		return "", 0, errNoPort
	}
	host, digits := addr[:colon], addr[colon+1:]
	if port, err = parsePort(digits); err != nil {
		return "", 0, err
	}
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		host = host[1 : len(host)-1]
		if ip, err := netip.ParseAddr(host); err != nil || !ip.Is6() {
			return "", 0, errHostChar
		}
		return host, port, nil
	}
	if host == "" {
		return "", 0, errNoHost
	}
	if strings.Contains(host, ":") && strings.Trim(host, "0123456789abcdefABCDEF:.") == "" {
		return "", 0, errIPv6
	}
	for _, b := range []byte(host) {
		if b <= ' ' || b >= 0x7f || strings.IndexByte(`/\:@[]?#%,"<>`, b) >= 0 {
			return "", 0, errHostChar
		}
	}
	return host, port, nil
}

// parsePort accepts the plain decimal form only, so that an address has one spelling.
func parsePort(digits string) (uint16, error) {
	if digits == "" || digits[0] < '1' || digits[0] > '9' {
		return 0, errPort
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return 0, errPort
	}
	return uint16(n), nil
}

func joinAddr(host string, port uint16) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// hostKey and brokerKey: host names compare without case and trailing dot.
func hostKey(host string) string { return strings.ToLower(strings.TrimSuffix(host, ".")) }

func brokerKey(addr string) string {
	host, port, err := splitAddr(addr)
	if err != nil {
		return addr
	}
	return joinAddr(hostKey(host), port)
}

// ParseBrokerURL takes a broker's service URL apart, "pulsar://host:port" or "pulsar+ssl://host:port".
func ParseBrokerURL(brokerURL string) (addr string, tls bool, err error) {
	scheme, addr, ok := strings.Cut(brokerURL, "://")
	if !ok || scheme != "pulsar" && scheme != "pulsar+ssl" {
		return "", false, fmt.Errorf("broker URL %q: it does not begin with pulsar:// or pulsar+ssl://", clip(brokerURL))
	}
	addr = strings.TrimSuffix(addr, "/")
	if _, _, err := splitAddr(addr); err != nil {
		return "", false, fmt.Errorf("broker URL %q: %w", clip(brokerURL), err)
	}
	return addr, scheme == "pulsar+ssl", nil
}

// parseServiceURL takes "pulsar://h1:6650,h2" or "pulsar+ssl://h1:6651,h2" apart; 6650 and 6651 are the default ports.
func parseServiceURL(serviceURL string) (addrs []string, tls bool, err error) {
	list, ok := strings.CutPrefix(serviceURL, "pulsar://")
	port := ":6650"
	if !ok {
		if list, tls = strings.CutPrefix(serviceURL, "pulsar+ssl://"); !tls {
			return nil, false, fmt.Errorf("service URL %q: it does not begin with pulsar:// or pulsar+ssl://", serviceURL)
		}
		port = ":6651"
	}
	for addr := range strings.SplitSeq(strings.TrimSuffix(list, "/"), ",") {
		_, _, err := splitAddr(addr)
		if errors.Is(err, errNoPort) {
			addr += port
			_, _, err = splitAddr(addr)
		}
		if err != nil {
			return nil, false, fmt.Errorf("service URL %q: host %q: %w", serviceURL, addr, err)
		}
		addrs = append(addrs, addr)
	}
	return addrs, tls, nil
}

// allowed is one pattern of an allow-list.
type allowed struct {
	host      string // lower case; "*" matches any run of characters
	low, high uint16
}

func parseAllowed(pattern string) (allowed, error) {
	fault := func(why string) (allowed, error) {
		return allowed{}, fmt.Errorf("allow-list pattern %q: %s; write host:port or host:low-high, with * for any characters of the host", pattern, why)
	}
	colon := strings.LastIndexByte(pattern, ':')
	if colon <= 0 {
		return fault("it has no port")
	}
	host := strings.TrimSuffix(strings.TrimPrefix(pattern[:colon], "["), "]")
	lowText, highText, isRange := strings.Cut(pattern[colon+1:], "-")
	if !isRange {
		highText = lowText
	}
	low, err1 := parsePort(lowText)
	high, err2 := parsePort(highText)
	switch {
	case err1 != nil || err2 != nil:
		return fault("its port is not a number from 1 to 65535")
	case low > high:
		return fault("its port range is empty")
	case host == "" || strings.ContainsAny(host, "/@ \t"):
		return fault("its host is not one")
	}
	return allowed{host: hostKey(host), low: low, high: high}, nil
}

// match takes a host in the form of hostKey.
func (a allowed) match(host string, port uint16) bool {
	return port >= a.low && port <= a.high && glob(a.host, host)
}

// glob matches s against a pattern whose only special character is "*". It takes time proportional to the product of the lengths at
// most, whatever a stranger sends.
func glob(pattern, s string) bool {
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && pattern[p] == s[i]:
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

var (
	metadataIPv4 = netip.MustParsePrefix("169.254.169.254/32")
	metadataECS  = netip.MustParsePrefix("169.254.170.0/24") // container credentials
	metadataIPv6 = netip.MustParsePrefix("fd00:ec2::/64")
	nat64        = netip.MustParsePrefix("64:ff9b::/96")
	ipv4Compat   = netip.MustParsePrefix("::/96")
	thisNetwork  = netip.MustParsePrefix("0.0.0.0/8")
)

// DenyAddr tells whether an address must never be dialled on behalf of a client, whatever vouches for it: link-local
// and metadata service addresses, the unspecified ones, multicast and broadcast. IPv4 addresses inside IPv6 ones are
// judged as well. Loopback and private ranges are allowed. It is asked of the resolved address, not of a name.
func DenyAddr(addr netip.Addr) bool {
	addr = plainAddr(addr)
	return !addr.IsValid() || onlyLinkLocal(addr) || metadata(addr) || addr.IsMulticast() || addr.IsUnspecified() ||
		thisNetwork.Contains(addr) || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// onlyLinkLocal: link-local, but nothing worse.
func onlyLinkLocal(addr netip.Addr) bool {
	addr = plainAddr(addr)
	return addr.IsLinkLocalUnicast() && !metadata(addr)
}

func metadata(addr netip.Addr) bool {
	return metadataIPv4.Contains(addr) || metadataECS.Contains(addr) || metadataIPv6.Contains(addr)
}

// plainAddr strips the zone, and unwraps an IPv4 address that is embedded in an IPv6 one.
func plainAddr(addr netip.Addr) netip.Addr {
	addr = addr.WithZone("").Unmap()
	if addr.Is6() && (nat64.Contains(addr) || ipv4Compat.Contains(addr) && !addr.IsLoopback() && !addr.IsUnspecified()) {
		b := addr.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}

// clip shortens what a stranger sent before it goes into an error.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}
