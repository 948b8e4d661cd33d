package route

import (
	"strings"
	"testing"
)

func mustTopic(t testing.TB, name string) Topic {
	t.Helper()
	topic, err := ParseTopic(name)
	if err != nil {
		t.Fatal(err)
	}
	return topic
}

func TestEveryFormOfATopicNameHasOneBase(t *testing.T) {
	is := func(name, full, base, namespace string, partition int) {
		t.Helper()
		topic := mustTopic(t, name)
		if topic.Full() != full || topic.Base() != base || topic.Namespace() != namespace || topic.Partition() != partition {
			t.Errorf("ParseTopic(%q) = full %q, base %q, namespace %q, partition %d; want %q, %q, %q, %d", name,
				topic.Full(), topic.Base(), topic.Namespace(), topic.Partition(), full, base, namespace, partition)
		}
		if tenant, _, _ := strings.Cut(namespace, "/"); topic.Tenant() != tenant {
			t.Errorf("ParseTopic(%q).Tenant() = %q, want %q", name, topic.Tenant(), tenant)
		}
		if again := mustTopic(t, topic.Full()); again != topic {
			t.Errorf("parsing %q again gives %+v, not %+v", topic.Full(), again, topic)
		}
	}
	same := func(name, namespace string) { t.Helper(); is(name, name, name, namespace, -1) }

	same("persistent://t/ns/x", "t/ns")
	same("non-persistent://t/ns/x", "t/ns")
	is("x", "persistent://public/default/x", "persistent://public/default/x", "public/default", -1)
	is("t/ns/x", "persistent://t/ns/x", "persistent://t/ns/x", "t/ns", -1)
	is("t/ns/x-partition-7", "persistent://t/ns/x-partition-7", "persistent://t/ns/x", "t/ns", 7)

	// V1: the fourth part on is the local name, slashes and all.
	same("persistent://prop/use/ns/x", "prop/use/ns")
	same("persistent://prop/use/ns/x/y//z", "prop/use/ns")
	is("persistent://prop/use/ns/x-partition-0", "persistent://prop/use/ns/x-partition-0", "persistent://prop/use/ns/x", "prop/use/ns", 0)

	// Scalable topics and their segments move with the persistent topic of that name.
	is("topic://t/ns/x", "topic://t/ns/x", "persistent://t/ns/x", "t/ns", -1)
	is("segment://t/ns/x/0000-7fff-1", "segment://t/ns/x/0000-7fff-1", "persistent://t/ns/x", "t/ns", -1)
	is("segment://t/ns/x-partition-3/0-f-1", "segment://t/ns/x-partition-3/0-f-1", "persistent://t/ns/x", "t/ns", -1)

	// A partition is a plain decimal that fits in a Java int.
	is("persistent://t/ns/x-partition-2147483647", "persistent://t/ns/x-partition-2147483647", "persistent://t/ns/x", "t/ns", 1<<31-1)
	same("persistent://t/ns/x-partition-2147483648", "t/ns")
	same("persistent://t/ns/x-partition-99999999999999999999", "t/ns")
	same("persistent://t/ns/x-partition-01", "t/ns")
	same("persistent://t/ns/x-partition--1", "t/ns")
	same("persistent://t/ns/x-partition-+1", "t/ns")
	same("persistent://t/ns/x-partition-", "t/ns")
	same("persistent://t/ns/x-partition-1a", "t/ns")
	same("persistent://t/ns/-partition-1", "t/ns")
	same("persistent://t/ns-partition-1/x", "t/ns-partition-1")
	// Both opens of x-partition-1, its metadata and its own "partition" 2, must ask the same cluster.
	is("persistent://t/ns/x-partition-1-partition-2", "persistent://t/ns/x-partition-1-partition-2", "persistent://t/ns/x", "t/ns", 2)

	// Dead letter and retry topics are ordinary topics.
	same("persistent://t/ns/x-sub-DLQ", "t/ns")
	is("persistent://t/ns/x-partition-1-sub-RETRY", "persistent://t/ns/x-partition-1-sub-RETRY", "persistent://t/ns/x-partition-1-sub-RETRY", "t/ns", -1)

	// Whatever the local name is made of.
	same("persistent://t/ns/a%2Fb", "t/ns")
	same("persistent://t/ns/täglich-日次", "t/ns")
	same("persistent://t/ns/with space?&#", "t/ns")

	// A pattern consumer's regular expression follows its namespace, also when it contains a slash.
	same("persistent://t/ns/.*", "t/ns")
	same("persistent://t/ns/(a|b)-[0-9]+.*", "t/ns")
	same("persistent://t/ns/[^/]*-eu", "t/ns")
	is("t/ns/foo.*", "persistent://t/ns/foo.*", "persistent://t/ns/foo.*", "t/ns", -1)
}

func TestAPersistentAndANonPersistentTopicOfOneNameAreTwoTopics(t *testing.T) {
	p, n := mustTopic(t, "persistent://t/ns/x"), mustTopic(t, "non-persistent://t/ns/x")
	if p.Base() == n.Base() || p == n {
		t.Error("the same topic")
	}
	if !p.Persistent() || n.Persistent() || !mustTopic(t, "topic://t/ns/x").Persistent() {
		t.Error("Persistent is wrong")
	}
}

func TestABadTopicNameIsRefusedWithItsNameAndTheFault(t *testing.T) {
	bad := func(name string, want ...string) {
		t.Helper()
		topic, err := ParseTopic(name)
		if err == nil {
			t.Errorf("ParseTopic(%q) = %v, want an error", name, topic)
			return
		}
		for _, w := range append(want, "topic name") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("ParseTopic(%.40q): error %q does not contain %q", name, err, w)
			}
		}
		if len(err.Error()) > 600 {
			t.Errorf("ParseTopic(%.40q): the error has %d bytes", name, len(err.Error()))
		}
	}
	bad("", "is empty")
	bad("a/b", "short name", "a/b")
	bad("a/b/c/d", "short name")
	bad("http://t/ns/x", `unknown domain "http"`)
	bad("://t/ns/x", "unknown domain")
	bad("persistent://", "too few parts")
	bad("persistent://t", "too few parts")
	bad("persistent://t/ns", "too few parts")
	bad("persistent://t/ns/", "empty part")
	bad("persistent:///ns/x", "empty part")
	bad("persistent://t//x", "empty part")
	bad("persistent://t/ns//x", "empty part")
	bad("persistent://t/c/ns/", "empty part")
	bad("//x", "empty part")
	bad("topic://t/ns/x/y", "too many parts")
	bad("segment://t/ns/x", "segment://TENANT/NAMESPACE/PARENT/DESCRIPTOR")
	bad("segment://t/ns/x/", "segment://")
	bad("segment://t/ns/x/y/z", "segment://")
	bad("persistent://t/ns/a\nb", "control character 0x0a")
	bad("persistent://t/ns/a\x00b", "control character")
	bad("persistent://t/ns/a\u0085b", "control character U+0085")
	bad("persistent://t/ns/\xff", "UTF-8")
	bad("persistent://t/ns/"+strings.Repeat("x", MaxTopicLen), "more than the 8192 allowed")
	mustTopic(t, "persistent://t/ns/"+strings.Repeat("x", MaxTopicLen-len("persistent://t/ns/")))
}

func TestSystemTopicsAreRecognised(t *testing.T) {
	system := func(name string, want bool) {
		t.Helper()
		if got := mustTopic(t, name).System(); got != want {
			t.Errorf("ParseTopic(%q).System() = %v, want %v", name, got, want)
		}
	}
	system("persistent://t/ns/__change_events", true)
	system("persistent://t/ns/__change_events-partition-2", true)
	system("persistent://t/ns/__transaction_buffer_snapshot", true)
	system("persistent://t/ns/x-sub__transaction_pending_ack", true)
	system("persistent://pulsar/system/transaction_coordinator_assign-partition-3", true)
	system("persistent://pulsar/broker-0:8080/healthcheck", true)
	system("persistent://pulsar/use/broker-0:8080/healthcheck", true)
	system("non-persistent://pulsar/system/loadbalancer-x", true)
	system("persistent://sla-monitor/use/broker-0:8080/test", true)
	system("persistent://t/ns/__change_events2", false)
	system("persistent://t/ns/my__change_events", false)
	system("persistent://sla-monitor/ns/x", false)
	system("persistent://t/host:80/x", false)
	system("persistent://pulsarx/ns/x", false)
}

func TestAScopeIsATenantOrANamespace(t *testing.T) {
	for _, s := range []string{"t", "t/ns", "prop/use/ns", "a-b=c:d.e_f/x"} {
		if got, err := ParseScope(s); err != nil || got != s {
			t.Errorf("ParseScope(%q) = %q, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "/", "t/", "/ns", "a/b/c/d", "t/n s", "persistent://t/ns", "t/*", strings.Repeat("t", maxNameLen+1)} {
		if _, err := ParseScope(s); err == nil {
			t.Errorf("ParseScope(%.40q) is accepted", s)
		}
	}
}

func TestATopicKnowsTheScopesThatCoverIt(t *testing.T) {
	x := mustTopic(t, "persistent://t/ns/x")
	v1 := mustTopic(t, "persistent://t/c/ns/x")
	for scope, want := range map[string][2]bool{"": {true, true}, "t": {true, true}, "t/ns": {true, false}, "t/c/ns": {false, true}, "t/n": {false, false}, "u": {false, false}} {
		if got := [2]bool{x.In(scope), v1.In(scope)}; got != want {
			t.Errorf("In(%q) = %v, want %v", scope, got, want)
		}
	}
}

func TestParsingACanonicalNameAllocatesNothing(t *testing.T) {
	for _, name := range []string{"persistent://t/ns/x-partition-3", "non-persistent://prop/use/ns/täglich"} {
		if n := testing.AllocsPerRun(100, func() { _, _ = ParseTopic(name) }); n != 0 {
			t.Errorf("ParseTopic(%q) allocates %v times", name, n)
		}
	}
}

// FuzzParseTopic: what parses is canonical after one step, and its base is a fixed point without partition.
func FuzzParseTopic(f *testing.F) {
	for _, s := range []string{
		"x", "t/ns/x-partition-1", "persistent://t/ns/x-partition-1-partition-2", "persistent://p/c/ns/x", "topic://t/ns/x-partition-0",
		"segment://t/ns/x/0-f-1-partition-2", "persistent://t/ns/(a|b)/-partition-1", "persistent://t/ns/-partition-1-partition-2",
		"persistent://t/c/ns//-partition-1", "persistent://t/ns/[^/]*", "non-persistent://pulsar/h:1/x", "-partition-1",
		"-partition--partition-0", // its base ends in the suffix without a number, which is no partition
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		topic, err := ParseTopic(name)
		if err != nil {
			if topic != (Topic{}) {
				t.Fatalf("%q: an error and a topic", name)
			}
			return
		}
		again, err := ParseTopic(topic.Full())
		if err != nil || again != topic {
			t.Fatalf("%q: full name %q parses as %+v (%v), want %+v", name, topic.Full(), again, err, topic)
		}
		base, err := ParseTopic(topic.Base())
		if err != nil || base.Base() != topic.Base() || base.Full() != topic.Base() || base.Partition() != -1 {
			t.Fatalf("%q: base %q is not canonical: %+v (%v)", name, topic.Base(), base, err)
		}
		if base.Namespace() != topic.Namespace() || base.Tenant() != topic.Tenant() || base.System() != topic.System() || base.Persistent() != topic.Persistent() {
			t.Fatalf("%q: its base is judged differently", name)
		}
		if !strings.HasPrefix(topic.Namespace(), topic.Tenant()+"/") || !topic.In(topic.Namespace()) {
			t.Fatalf("%q: tenant %q, namespace %q", name, topic.Tenant(), topic.Namespace())
		}
	})
}
