package zk

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// DefaultPort is ZooKeeper's client port, for servers that are named without one.
const DefaultPort = 2181

// Ensemble is where a ZooKeeper ensemble is, and which part of its tree is meant.
type Ensemble struct {
	Servers []string // host:port, in the order of the text
	Chroot  string   // "" or "/a/b"
}

func (e Ensemble) String() string { return strings.Join(e.Servers, ",") + e.Chroot }

// ParseServers reads "host:port,host:port/chroot", and the metadata store URLs of Pulsar, which put "zk:" before it.
// A server without a port gets DefaultPort.
func ParseServers(text string) (Ensemble, error) {
	fail := func(format string, args ...any) (Ensemble, error) {
		return Ensemble{}, fmt.Errorf("ZooKeeper servers %q: "+format+` (want "host:port,host:port/chroot")`, append([]any{text}, args...)...)
	}
	rest := strings.TrimSpace(text)
	// A server may be called zk: then a port follows, and no other server's name.
	if scheme, after, ok := strings.Cut(rest, ":"); ok && strings.Trim(firstServer(after), "0123456789") != "" {
		switch scheme {
		case "zk":
			rest = strings.TrimPrefix(after, "//")
		case "etcd", "rocksdb", "oxia", "memory", "file":
			return fail("metadata store %q is not supported, only ZooKeeper is: name the cluster's brokers with service_url instead", scheme)
		}
	}
	var e Ensemble
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		if strings.Contains(rest[i:], ",") {
			return fail("the chroot %q contains a comma; it is written once, after the last server", rest[i:])
		}
		chroot, err := cleanChroot(rest[i:])
		if err != nil {
			return fail("%w", err)
		}
		e.Chroot, rest = chroot, rest[:i]
	}
	if rest == "" {
		return fail("no server is named")
	}
	if strings.Contains(rest, ";") {
		return fail("servers are separated by ',' and not by ';'")
	}
	seen := map[string]bool{}
	for _, server := range strings.Split(rest, ",") {
		address, err := serverAddress(strings.TrimSpace(server))
		if err != nil {
			return fail("server %q: %w", server, err)
		}
		if seen[address] {
			return fail("server %s is named twice", address)
		}
		seen[address] = true
		e.Servers = append(e.Servers, address)
	}
	return e, nil
}

// firstServer is what comes before the first ',' or '/'; a lone "//" is part of a URL.
func firstServer(text string) string {
	if i := strings.IndexAny(text, ",/"); i >= 0 && !strings.HasPrefix(text, "//") {
		return text[:i]
	}
	return text
}

func serverAddress(server string) (string, error) {
	if server == "" {
		return "", errors.New("it is empty")
	}
	host, port := server, strconv.Itoa(DefaultPort)
	if strings.HasPrefix(server, "[") && strings.HasSuffix(server, "]") {
		host = server[1 : len(server)-1]
	} else if strings.Contains(server, ":") {
		var err error
		host, port, err = net.SplitHostPort(server)
		if err != nil {
			return "", errors.New("it is no host:port; an IPv6 address needs brackets")
		}
	}
	if host == "" {
		return "", errors.New("it has no host")
	}
	if strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("[]@?#\"'\\<>{}|^`", r) }) {
		return "", errors.New("it contains a character that no host name has")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", fmt.Errorf("port %q is not between 1 and 65535", port)
	}
	return net.JoinHostPort(host, port), nil
}

// cleanChroot turns "" and "/" into "", and "/a/b/" into "/a/b".
func cleanChroot(chroot string) (string, error) {
	chroot = strings.TrimRight(chroot, "/")
	if chroot == "" {
		return "", nil
	}
	if chroot[0] != '/' {
		return "", fmt.Errorf("the chroot %q does not begin with '/'", chroot)
	}
	for _, part := range strings.Split(chroot[1:], "/") {
		if part == "" || part == "." || part == ".." || strings.ContainsFunc(part, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return "", fmt.Errorf("the chroot %q has a part %q that is no ZooKeeper node name", chroot, part)
		}
	}
	return chroot, nil
}
