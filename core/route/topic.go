package route

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxTopicLen is the longest topic name, in bytes, that ParseTopic accepts. Pulsar has no limit of its own, but a name becomes a
// path in its metadata store; a pattern consumer's regular expression, which is looked up like a name, may be long.
const MaxTopicLen = 8 << 10

// The domains of a topic name.
const (
	domainPersistent    = "persistent"
	domainNonPersistent = "non-persistent"
	domainTopic         = "topic"
	domainSegment       = "segment"
)

const (
	schemeSep       = "://"
	partitionSuffix = "-partition-"
	systemNamespace = "pulsar/system"
)

// Topic is a parsed topic name. It is a value: comparable, and free to keep (it shares memory only with the string that
// it was parsed from). The zero Topic is no topic.
type Topic struct {
	full      string
	base      string
	nsStart   int32 // the namespace is base[nsStart:nsEnd]
	nsEnd     int32
	tenantEnd int32 // the tenant is base[nsStart:tenantEnd]
	partition int32
	system    bool
}

// ParseTopic parses any form in which a client may write a topic:
//
//	persistent://tenant/namespace/name          non-persistent://tenant/namespace/name
//	persistent://property/cluster/namespace/name   (the V1 form, as old as it is; non-persistent as well)
//	name                    = persistent://public/default/name
//	tenant/namespace/name   = persistent://tenant/namespace/name
//	topic://tenant/namespace/name               (scalable topic)
//	segment://tenant/namespace/name/descriptor  (segment of a scalable topic)
//
// Any of them may end in -partition-N. A scalable topic and its segments are mapped like persistent://tenant/namespace/name, so
// that they always move together.
//
// The characters of a name are not judged beyond what would make it ambiguous (the broker does that): a pattern consumer
// looks up its regular expression as if it were a topic, and that must parse and follow its namespace. Hence one refinement of the V1 rule: a
// third part that cannot be a namespace ("persistent://t/ns/(a|b)/.*") belongs to the local name.
//
// A canonical name (with domain) costs no allocation.
func ParseTopic(name string) (Topic, error) {
	if len(name) > MaxTopicLen {
		return Topic{}, topicError(name, fmt.Sprintf("has %d bytes, more than the %d allowed", len(name), MaxTopicLen))
	}
	if fault := textFault(name); fault != "" {
		return Topic{}, topicError(name, fault)
	}
	domain, rest, ok := strings.Cut(name, schemeSep)
	if !ok {
		switch strings.Count(name, "/") {
		case 0:
			name = domainPersistent + "://public/default/" + name
		case 2:
			name = domainPersistent + schemeSep + name
		default:
			return Topic{}, topicError(name, "is a short name of the wrong form; write NAME, TENANT/NAMESPACE/NAME or persistent://TENANT/NAMESPACE/NAME")
		}
		domain, rest, _ = strings.Cut(name, schemeSep)
	}
	switch domain {
	case domainPersistent, domainNonPersistent, domainTopic, domainSegment:
	default:
		return Topic{}, topicError(name, fmt.Sprintf("has the unknown domain %q; known are persistent, non-persistent, topic and segment", clip(domain)))
	}

	tenant, afterTenant, ok1 := strings.Cut(rest, "/")
	namespace, local, ok2 := strings.Cut(afterTenant, "/")
	if !ok1 || !ok2 {
		return Topic{}, topicError(name, "has too few parts; the form is "+domain+"://TENANT/NAMESPACE/NAME")
	}
	if tenant == "" || namespace == "" || local == "" || local[0] == '/' {
		return Topic{}, topicError(name, "has an empty part; the form is "+domain+"://TENANT/NAMESPACE/NAME")
	}
	nsLen := len(tenant) + 1 + len(namespace)

	third, tail, slash := strings.Cut(local, "/")
	switch {
	case domain == domainSegment:
		if !slash || tail == "" || strings.Contains(tail, "/") {
			return Topic{}, topicError(name, "is not of the form segment://TENANT/NAMESPACE/PARENT/DESCRIPTOR")
		}
		return scalable(name, rest[:nsLen+1+len(third)], len(tenant), nsLen), nil
	case domain == domainTopic:
		if slash {
			return Topic{}, topicError(name, "has too many parts; the form is topic://TENANT/NAMESPACE/NAME")
		}
		return scalable(name, rest, len(tenant), nsLen), nil
	case slash && entityName(third):
		if tail == "" {
			return Topic{}, topicError(name, "has an empty part; the form is "+domain+"://PROPERTY/CLUSTER/NAMESPACE/NAME")
		}
		nsLen += 1 + len(third)
	}
	return newTopic(name, name, len(domain)+len(schemeSep), len(tenant), nsLen), nil
}

// scalable is a topic of the domains topic and segment: full stays what it is, the base is that of the persistent topic.
func scalable(full, path string, tenantLen, nsLen int) Topic {
	t := newTopic(full, domainPersistent+schemeSep+path, len(domainPersistent)+len(schemeSep), tenantLen, nsLen)
	if strings.HasPrefix(full, domainSegment) {
		t.partition = -1 // a segment is not a partition, whatever its parent is called
	}
	return t
}

// newTopic strips the partition suffix from name and fills in the rest.
//
// Pulsar strips the last suffix only. Here a name like x-partition-1-partition-2 has the base x (Partition is 2): a client that
// opens x-partition-1 asks for its partition metadata, mapped as x, and must find its partitions on the same cluster.
func newTopic(full, name string, start, tenantLen, nsLen int) Topic {
	localStart := start + nsLen + 1
	base, partition := stripPartition(name, localStart)
	for b, p := base, partition; p >= 0; {
		base = b
		b, p = stripPartition(base, localStart)
	}
	t := Topic{
		full: full, base: base, partition: partition,
		nsStart: int32(start), tenantEnd: int32(start + tenantLen), nsEnd: int32(start + nsLen),
	}
	t.system = systemTopic(t.Tenant(), t.Namespace(), base[localStart:])
	return t
}

// stripPartition cuts one -partition-N off name, whose local part starts at localStart. N is a plain decimal that fits
// in 31 bits, without sign or leading zero (Pulsar's own rule: x-partition-01 is no partition). Nothing is cut
// when nothing would be left.
func stripPartition(name string, localStart int) (base string, partition int32) {
	i := strings.LastIndex(name, partitionSuffix)
	if i <= localStart {
		return name, -1
	}
	digits := name[i+len(partitionSuffix):]
	if digits == "" || len(digits) > 10 || len(digits) > 1 && digits[0] == '0' {
		return name, -1
	}
	var n int64
	for _, c := range []byte(digits) {
		if c < '0' || c > '9' {
			return name, -1
		}
		n = n*10 + int64(c-'0')
	}
	if n > 1<<31-1 {
		return name, -1
	}
	return name[:i], int32(n)
}

// systemTopic tells whether Pulsar itself owns the topic: topic policies, transactions, load balancing, health checks.
func systemTopic(tenant, namespace, local string) bool {
	return tenant == "pulsar" ||
		tenant == "sla-monitor" && heartbeatNamespace(namespace) ||
		local == "__change_events" ||
		strings.HasPrefix(local, "__transaction_") ||
		strings.HasSuffix(local, "__transaction_pending_ack")
}

// heartbeatNamespace: the last part of the namespaces that brokers make for themselves is host:port.
func heartbeatNamespace(namespace string) bool {
	last := namespace[strings.LastIndexByte(namespace, '/')+1:]
	host, port, ok := strings.Cut(last, ":")
	return ok && host != "" && port != "" && strings.Trim(port, "0123456789") == ""
}

// Base is the canonical name without partition: the key of the map.
func (t Topic) Base() string { return t.base }

// Full is the canonical name with its partition suffix, as brokers want it. ParseTopic(t.Full()) is t again.
func (t Topic) Full() string { return t.full }

func (t Topic) String() string { return t.full }

// Partition is N of the last -partition-N, or -1.
func (t Topic) Partition() int {
	if t.base == "" {
		return -1
	}
	return int(t.partition)
}

// Tenant is the first part of the namespace (V1: the property).
func (t Topic) Tenant() string { return t.base[t.nsStart:t.tenantEnd] }

// Namespace is "tenant/namespace", or "property/cluster/namespace" of a V1 name.
func (t Topic) Namespace() string { return t.base[t.nsStart:t.nsEnd] }

// Persistent is false for non-persistent:// only.
func (t Topic) Persistent() bool { return !strings.HasPrefix(t.full, domainNonPersistent) }

// System tells that Pulsar itself owns the topic. Such a topic has no entry of its own: it follows its namespace.
func (t Topic) System() bool { return t.system }

// In tells whether a rule of this scope covers the topic (which says nothing about more specific rules).
func (t Topic) In(scope string) bool {
	return scope == "" || scope == t.Namespace() || scope == t.Tenant()
}

// ParseScope checks the scope of a rule, "tenant", "tenant/namespace" or "property/cluster/namespace". The default's scope, "", is
// not accepted: whoever means the default should have to say so.
func ParseScope(scope string) (string, error) {
	if scope == "" {
		return "", fmt.Errorf("the scope of a rule is empty; write TENANT or TENANT/NAMESPACE")
	}
	return scope, checkScope(scope)
}

func checkScope(scope string) error {
	if scope == "" {
		return nil
	}
	parts := strings.Split(scope, "/")
	if len(parts) > 3 {
		return fmt.Errorf("the scope %q has %d parts; write TENANT or TENANT/NAMESPACE (V1: PROPERTY/CLUSTER/NAMESPACE)", clip(scope), len(parts))
	}
	for _, p := range parts {
		if !entityName(p) {
			return fmt.Errorf("the scope %q has the part %q; a tenant or namespace consists of letters, digits and - = : . _", clip(scope), clip(p))
		}
	}
	if len(scope) > maxNameLen {
		return fmt.Errorf("the scope %q has %d bytes, more than the %d allowed", clip(scope), len(scope), maxNameLen)
	}
	return nil
}

// maxNameLen bounds scopes, cluster names and switch ids.
const maxNameLen = 512

// entityName: what Pulsar accepts as a tenant, cluster or namespace.
func entityName(s string) bool {
	for _, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("-=:._", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}

// textFault says what is wrong with s as printable text, "" for nothing. Names go into logs, JSON and terminals.
func textFault(s string) string {
	if s == "" {
		return "is empty"
	}
	ascii := true
	for i := range len(s) {
		if s[i] < 0x20 || s[i] == 0x7f {
			return fmt.Sprintf("has the control character %#02x at byte %d", s[i], i)
		}
		ascii = ascii && s[i] < utf8.RuneSelf
	}
	if ascii {
		return ""
	}
	if !utf8.ValidString(s) {
		return "is not valid UTF-8"
	}
	for i, r := range s {
		if unicode.IsControl(r) {
			return fmt.Sprintf("has the control character %U at byte %d", r, i)
		}
	}
	return ""
}

func topicError(name, fault string) error {
	return fmt.Errorf("topic name %q %s", clip(name), fault)
}

// clip shortens what a stranger sent before it goes into an error.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}
