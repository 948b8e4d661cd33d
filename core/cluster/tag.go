package cluster

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// A tagged address is what clients are shown instead of a broker's own:
//
//	broker-0.eu.example.com.cluster-a.pm-k7qd-mq3v5lxnyt2ge6da:6650
//	└──── broker host ────┘ └cluster┘ │  └key └ MAC over cluster, host and port
//	                                  └ "pm": readable form, "ph": hash form
//
// Clients echo it verbatim and never resolve it. What they accept decides its form: characters [a-z0-9.-], labels
// that neither begin nor end with "-", a last label that begins with a letter, at most 253 in all, the port explicit. There is nothing in it
// that changes while the broker and cluster stay the same.
//
// The broker's host and the cluster are escaped: escapeMark and two hex digits stand for any byte that does not fit, softBreak
// for nothing at all where a label would grow beyond 63. The MAC is over the unescaped values, and only the one spelling
// that Tag makes is accepted.
const (
	escapeMark = "xq"
	softBreak  = "xqz."
	markPlain  = "pm"
	markHashed = "ph"
	maxHost    = 253
	maxLabel   = 63
	macBytes   = 10 // 80 bits
	keyIDChars = 4
	minKey     = 16
	macChars   = macBytes * 8 / 5
	// sealLen is the length of the last label: mark, key id, MAC, and the two "-" between them.
	sealLen = len(markPlain) + 1 + keyIDChars + 1 + macChars
)

var lowerBase32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// TagKeys are the keys of tagged addresses: the first signs, all verify.
type TagKeys struct {
	keys []tagKey
}

type tagKey struct {
	id string
	// secret is behind a function so that no way of printing a value that contains keys shows it.
	secret func() []byte
}

// NewTagKeys makes keys from raw bytes, at least 16 each. Addresses made with a previous key stay valid as long as it is given.
func NewTagKeys(current []byte, previous ...[]byte) (TagKeys, error) {
	var k TagKeys
	for i, secret := range append([][]byte{current}, previous...) {
		if len(secret) < minKey {
			which := "current key"
			if i > 0 {
				which = fmt.Sprintf("previous key %d", i)
			}
			return TagKeys{}, fmt.Errorf("the %s for tagged broker addresses has %d bytes; it needs at least %d", which, len(secret), minKey)
		}
		id := sha256.Sum256(append([]byte("pointsman tag key id\x00"), secret...))
		own := bytes.Clone(secret)
		k.keys = append(k.keys, tagKey{id: lowerBase32.EncodeToString(id[:5])[:keyIDChars], secret: func() []byte { return own }})
	}
	return k, nil
}

// IDs are the public ids of the keys, the current one first.
func (k TagKeys) IDs() []string {
	ids := make([]string, len(k.keys))
	for i := range k.keys {
		ids[i] = k.keys[i].id
	}
	return ids
}

// String keeps the secrets out of logs.
func (k TagKeys) String() string { return "tag keys " + strings.Join(k.IDs(), ", ") }

// GoString keeps the secrets out of %#v.
func (k TagKeys) GoString() string { return k.String() }

// Tag is the address that clients are shown for a broker's logical "host:port" of a cluster. It is "" when broker is
// no such address or the cluster is not configured.
func (s *Set) Tag(cluster, broker string) string {
	c := s.byName[cluster]
	if c == nil {
		return ""
	}
	if tagged, ok := c.tags[broker]; ok {
		return tagged
	}
	return s.keys.tag(s.keys.keys[0], cluster, broker)
}

// TagURL rewrites a broker URL that a cluster's broker named into the two that a client is told: the same tagged address
// with both schemes, of which it takes the one it speaks.
func (s *Set) TagURL(cluster, brokerURL string) (plain, tls string, err error) {
	addr, _, err := ParseBrokerURL(brokerURL)
	if err != nil {
		return "", "", fmt.Errorf("cluster %q: %w", cluster, err)
	}
	tagged := s.Tag(cluster, addr)
	if tagged == "" {
		return "", "", fmt.Errorf("cluster %q is not configured, so its broker %q has no tagged address", cluster, addr)
	}
	return "pulsar://" + tagged, "pulsar+ssl://" + tagged, nil
}

// tag makes the address with one of the keys; "" when broker is no "host:port".
func (k TagKeys) tag(key tagKey, cluster, broker string) string {
	host, port, err := splitAddr(broker)
	if err != nil {
		return ""
	}
	tagged := escape(host, true) + "." + escape(cluster, false) + "." + key.seal(markPlain, cluster, host, port)
	if len(tagged) > maxHost {
		tagged = digestLabel(cluster, broker) + "." + readable(host) + "." + readable(cluster) + "." + key.seal(markHashed, cluster, host, port)
	}
	return joinAddr(tagged, port)
}

// seal is the last label of a tagged host.
func (k tagKey) seal(mark, cluster, host string, port uint16) string {
	mac := hmac.New(sha256.New, k.secret())
	// Neither a cluster's name nor a host has a zero byte, so these values cannot run into each other.
	fmt.Fprintf(mac, "pointsman tagged address 1\x00%s\x00%s\x00%s\x00", mark, cluster, host)
	_ = binary.Write(mac, binary.BigEndian, port) // a hash never fails
	return mark + "-" + k.id + "-" + lowerBase32.EncodeToString(mac.Sum(nil)[:macBytes])
}

// hashedBroker is a known broker whose tagged address does not fit in readable form.
type hashedBroker struct{ cluster, broker string }

// indexDigests finds the known brokers that only a hash form can name.
func (s *Set) indexDigests() {
	s.digests = map[string]hashedBroker{}
	for _, c := range s.clusters {
		for broker, tagged := range c.tags {
			host, _, _ := splitAddr(tagged)
			if _, mark, _, ok := splitSeal(host); ok && mark == markHashed {
				s.digests[digestLabel(c.config.Name, broker)] = hashedBroker{c.config.Name, broker}
			}
		}
	}
}

// digestLabel names a broker by a hash: 26 characters for 128 bits after a letter. It is no secret and vouches for nothing.
func digestLabel(cluster, broker string) string {
	sum := sha256.Sum256([]byte(cluster + "\x00" + broker))
	return "h" + lowerBase32.EncodeToString(sum[:16])
}

// splitSeal takes a host apart whose last label has the form of a seal.
func splitSeal(host string) (body, mark, keyID string, ok bool) {
	dot := strings.LastIndexByte(host, '.')
	seal := host[dot+1:]
	if dot < 0 || len(seal) != sealLen || seal[2] != '-' || seal[2+1+keyIDChars] != '-' {
		return "", "", "", false
	}
	mark, keyID = seal[:2], seal[3:3+keyIDChars]
	return host[:dot], mark, keyID, mark == markPlain || mark == markHashed
}

var (
	errTagForm    = errors.New("not a tagged address")
	errTagKey     = errors.New("unknown key")
	errTagMAC     = errors.New("wrong MAC")
	errTagCluster = errors.New("unknown cluster")
	errTagBroker  = errors.New("unknown broker")
)

// untag reads a tagged address. detail names what the error is about.
func (s *Set) untag(host string, port uint16) (target Target, detail string, err error) {
	body, mark, keyID, ok := splitSeal(host)
	if !ok {
		return Target{}, "", errTagForm
	}
	var cluster, broker string
	if mark == markPlain {
		dot := strings.LastIndexByte(body, '.')
		// A soft break inside the cluster's label hides the dot that separates it.
		for dot >= len(softBreak)-1 && body[dot+1-len(softBreak):dot+1] == softBreak {
			dot = strings.LastIndexByte(body[:dot], '.')
		}
		if dot < 0 {
			return Target{}, "", errTagMAC
		}
		brokerHost, ok1 := unescape(body[:dot])
		name, ok2 := unescape(body[dot+1:])
		if !ok1 || !ok2 {
			return Target{}, "", errTagMAC
		}
		cluster, broker = name, joinAddr(brokerHost, port)
	} else {
		label, _, _ := strings.Cut(body, ".")
		known, ok := s.digests[label]
		if !ok {
			return Target{}, "", errTagBroker
		}
		cluster, broker = known.cluster, known.broker
	}
	err = errTagKey
	for _, key := range s.keys.keys {
		if key.id != keyID {
			continue
		}
		err = errTagMAC
		// Comparing with the one spelling that Tag makes checks the MAC and everything around it.
		want := s.keys.tag(key, cluster, broker)
		if subtle.ConstantTimeCompare([]byte(want), []byte(joinAddr(host, port))) == 1 {
			if s.byName[cluster] == nil {
				return Target{}, cluster, errTagCluster
			}
			return Target{Cluster: cluster, Broker: broker, Tagged: true}, "", nil
		}
	}
	return Target{}, keyID, err
}

// escape writes a name with the characters that clients accept in a host, keeping what can be kept. With dots, the
// dots between its labels stay.
func escape(name string, dots bool) string {
	var b strings.Builder
	label := 0 // length of the label being written
	for i := range len(name) {
		c := name[i]
		piece := name[i : i+1]
		switch {
		case c == '.' && dots && i > 0 && i < len(name)-1 && name[i-1] != '.':
			b.WriteByte('.')
			label = 0
			continue
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
			if strings.HasPrefix(name[i:], escapeMark) {
				piece = escapeByte(c)
			}
		case c == '-' && label > 0 && i < len(name)-1 && name[i+1] != '.':
			// stays: it neither begins nor ends a label
		default:
			piece = escapeByte(c)
		}
		// Room for the break itself, and never a "-" before or after one.
		if label+len(piece)+len(softBreak)-1 > maxLabel {
			b.WriteString(softBreak)
			label = 0
			if c == '-' {
				piece = escapeByte(c)
			}
		}
		b.WriteString(piece)
		label += len(piece)
	}
	return b.String()
}

func escapeByte(c byte) string { return fmt.Sprintf(escapeMark+"%02x", c) }

// unescape undoes escape. It may accept more than escape writes.
func unescape(s string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if !strings.HasPrefix(s[i:], escapeMark) {
			b.WriteByte(s[i])
			continue
		}
		if strings.HasPrefix(s[i:], softBreak) {
			i += len(softBreak) - 1
			continue
		}
		if len(s) < i+4 {
			return "", false
		}
		hi, lo := hexDigit(s[i+2]), hexDigit(s[i+3])
		if hi < 0 || lo < 0 {
			return "", false
		}
		b.WriteByte(byte(hi<<4 | lo))
		i += 3
	}
	return b.String(), true
}

func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	}
	return -1
}

// readable is the beginning of a name as one label: a hint for whoever reads a hash form.
func readable(name string) string {
	var b strings.Builder
	for _, c := range []byte(strings.ToLower(name)) {
		if b.Len() == 40 {
			break
		}
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			b.WriteByte(c)
		} else {
			b.WriteByte('-')
		}
	}
	return "n" + strings.TrimRight(b.String(), "-")
}
