package route

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// model is the slow honest table.
type model struct {
	entries map[string]Entry
	rules   []Rule
}

func (m *model) decide(topic Topic, listenerDefault string) Decision {
	if topic.Namespace() == "pulsar/system" && listenerDefault != "" {
		return Decision{Cluster: listenerDefault, Source: SourceDefault}
	}
	floor := uint64(0)
	if e, ok := m.entries[topic.Base()]; ok && !topic.System() {
		if e.Cluster != "" {
			return Decision{Cluster: e.Cluster, Epoch: e.Epoch, State: e.State, Source: SourceTopic, Scope: e.Topic, SwitchID: e.SwitchID, Drain: e.Drain}
		}
		floor = e.Epoch
	}
	for i, scope := range []string{topic.Namespace(), topic.Tenant(), ""} {
		for _, r := range m.rules {
			if r.Scope != scope {
				continue
			}
			floor = max(floor, r.Epoch)
			if r.Cluster != "" {
				return Decision{Cluster: r.Cluster, Epoch: floor, Source: SourceNamespace + Source(i), Scope: r.Scope, SwitchID: r.SwitchID}
			}
		}
	}
	if listenerDefault != "" {
		return Decision{Cluster: listenerDefault, Source: SourceDefault, Epoch: floor}
	}
	return Decision{Source: SourceNone, Epoch: floor}
}

// bucketed sorts entries into the form that With takes.
func bucketed(entries ...Entry) map[int][]Entry {
	buckets := map[int][]Entry{}
	for _, e := range entries {
		b := Bucket(e.Topic)
		buckets[b] = append(buckets[b], e)
	}
	return buckets
}

func mustWith(t testing.TB, table *Table, rules []Rule, entries ...Entry) *Table {
	t.Helper()
	next, _, err := table.With(bucketed(entries...), &rules)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func TestTheMostSpecificRuleDecides(t *testing.T) {
	table := mustWith(t, Empty(),
		[]Rule{{Scope: "", Cluster: "d", Epoch: 1}, {Scope: "t", Cluster: "c", Epoch: 2, SwitchID: "s9"}, {Scope: "t/ns", Cluster: "b", Epoch: 3}, {Scope: "t/c/ns", Cluster: "v1", Epoch: 4},
			{Scope: "f", Epoch: 6}, {Scope: "f/ns", Epoch: 5}, {Scope: "pulsar", Cluster: "p"}, {Scope: "pulsar/system", Cluster: "q", Epoch: 2}},
		Entry{Topic: "persistent://t/ns/x", Cluster: "a", Epoch: 9, State: StateFenced, SwitchID: "s1", Attempt: 2},
		Entry{Topic: "persistent://t/ns/floor", Epoch: 7},
		Entry{Topic: "persistent://t/ns/lowfloor", Epoch: 1},
		Entry{Topic: "persistent://t/ns/__change_events", Cluster: "a", Epoch: 8},
	)
	is := func(topic string, want Decision) {
		t.Helper()
		if got := table.Decide(mustTopic(t, topic), "l"); got != want {
			t.Errorf("%s: %+v, want %+v", topic, got, want)
		}
	}
	exact := Decision{Cluster: "a", Epoch: 9, State: StateFenced, Source: SourceTopic, Scope: "persistent://t/ns/x", SwitchID: "s1"}
	is("persistent://t/ns/x", exact)
	is("persistent://t/ns/x-partition-3", exact)
	is("topic://t/ns/x", exact)
	is("segment://t/ns/x/0-f-1", exact)
	ns := Decision{Cluster: "b", Epoch: 3, Source: SourceNamespace, Scope: "t/ns"}
	is("persistent://t/ns/y", ns)
	is("non-persistent://t/ns/x", ns)
	is("persistent://t/ns/.*", ns)
	is("persistent://t/ns/[^/]*x", ns)
	is("persistent://t/ns/__change_events", ns) // an exact entry of a system topic is ignored
	is("persistent://t/ns/lowfloor", ns)
	is("persistent://t/ns/floor", Decision{Cluster: "b", Epoch: 7, Source: SourceNamespace, Scope: "t/ns"})
	is("persistent://t/other/x", Decision{Cluster: "c", Epoch: 2, Source: SourceTenant, Scope: "t", SwitchID: "s9"})
	is("persistent://t/c/ns/x", Decision{Cluster: "v1", Epoch: 4, Source: SourceNamespace, Scope: "t/c/ns"})
	is("x", Decision{Cluster: "d", Epoch: 1, Source: SourceDefault})
	is("persistent://f/ns/x", Decision{Cluster: "d", Epoch: 6, Source: SourceDefault})
	// A listener decides which cluster has its transactions; health checks follow the rules.
	is("persistent://pulsar/system/transaction_coordinator_assign-partition-1", Decision{Cluster: "l", Source: SourceDefault})
	is("persistent://pulsar/h:8080/healthcheck", Decision{Cluster: "p", Source: SourceTenant, Scope: "pulsar"})

	if got := table.Decide(mustTopic(t, "persistent://pulsar/system/x"), ""); got.Cluster != "q" {
		t.Errorf("pulsar/system without a listener default: %+v", got)
	}
	if got := Empty().Decide(mustTopic(t, "x"), ""); got != (Decision{Source: SourceNone}) {
		t.Errorf("the empty map decides %+v", got)
	}
	if got := Empty().Decide(mustTopic(t, "x"), "l"); got != (Decision{Cluster: "l", Source: SourceDefault}) {
		t.Errorf("the empty map with a listener default decides %+v", got)
	}
}

func TestARejectedChangeNamesItsBucketAndLeavesTheTableAlone(t *testing.T) {
	x := "persistent://t/ns/x"
	table := mustWith(t, Empty(), nil, Entry{Topic: x, Cluster: "a", Epoch: 1})
	refused := func(want string, buckets map[int][]Entry, rules *[]Rule, bad ...int) {
		t.Helper()
		next, changes, err := table.With(buckets, rules)
		var be *BuildError
		if !errors.As(err, &be) || next != table || !changes.Empty() {
			t.Errorf("%s: table changed=%v, %+v, %v", want, next != table, changes, err)
			return
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not contain %q", err, want)
		}
		for _, b := range bad {
			if be.Bad[b] == nil {
				t.Errorf("%q does not name bucket %d", err, b)
			}
		}
		if len(be.Bad) != len(bad) {
			t.Errorf("%q names %d buckets, want %d", err, len(be.Bad), len(bad))
		}
	}
	b := Bucket(x)
	in := func(e ...Entry) map[int][]Entry { return map[int][]Entry{b: e} }
	refused("belongs into bucket", map[int][]Entry{(b + 1) % BucketCount: {{Topic: x, Cluster: "b"}}}, nil, (b+1)%BucketCount)
	refused("two entries", in(Entry{Topic: x, Cluster: "b"}, Entry{Topic: x, Cluster: "c"}), nil, b)
	refused(`would be "persistent://t/ns/x"`, in(Entry{Topic: x + "-partition-1", Cluster: "b"}), nil, b)
	refused("not a canonical base name", in(Entry{Topic: "t/ns/x", Cluster: "b"}), nil, b)
	refused("not a canonical base name", in(Entry{Topic: "topic://t/ns/x", Cluster: "b"}), nil, b)
	refused("too few parts", in(Entry{Topic: "persistent://t/ns", Cluster: "b"}), nil, b)
	refused("control character", in(Entry{Topic: x, Cluster: "b\n"}), nil, b)
	refused("switch id", in(Entry{Topic: x, Cluster: "b", SwitchID: "\x00"}), nil, b)
	refused("more than the 512", in(Entry{Topic: x, Cluster: strings.Repeat("b", 513)}), nil, b)
	refused("state 4", in(Entry{Topic: x, Cluster: "b", State: 4}), nil, b)
	refused("without a cluster", in(Entry{Topic: x, State: StateFenced}), nil, b)
	refused("no real number of moves", in(Entry{Topic: x, Cluster: "b", Epoch: MaxEpoch + 1}), nil, b)
	refused("no such bucket", map[int][]Entry{BucketCount: nil, -2: nil}, nil, BucketCount, -2)
	refused("two rules", nil, &[]Rule{{Scope: "t", Cluster: "a"}, {Scope: "t", Cluster: "b"}}, RulesBucket)
	refused("two rules", nil, &[]Rule{{Cluster: "a"}, {Cluster: "b"}}, RulesBucket)
	refused(`the part "n s"`, nil, &[]Rule{{Scope: "t/n s", Cluster: "a"}}, RulesBucket)
	refused("no real number", nil, &[]Rule{{Scope: "t", Cluster: "a", Epoch: 1 << 40}}, RulesBucket)
	refused("control character", nil, &[]Rule{{Scope: "t", Cluster: "a\t"}}, RulesBucket)
	refused("switch id", nil, &[]Rule{{Scope: "t", Cluster: "a", SwitchID: "\x7f"}}, RulesBucket)
	refused("; rules: ", map[int][]Entry{2000: nil}, &[]Rule{{Scope: "/"}}, RulesBucket, 2000)
	if e, ok := table.Entry(x); !ok || e.Cluster != "a" || table.Len() != 1 {
		t.Errorf("the old table has %+v", e)
	}
}

func TestChangesNameWhatDiffers(t *testing.T) {
	e := func(name, cluster string, epoch uint64) Entry {
		return Entry{Topic: "persistent://t/ns/" + name, Cluster: cluster, Epoch: epoch}
	}
	names := func(short ...string) (full []string) {
		for _, s := range short {
			full = append(full, "persistent://t/ns/"+s)
		}
		return full
	}
	old := mustWith(t, Empty(), []Rule{{Scope: "", Cluster: "a"}, {Scope: "t", Cluster: "a"}, {Scope: "u", Cluster: "a"}}, e("keep", "a", 1), e("alter", "a", 1), e("drop", "a", 1), e("attempt", "a", 1))
	buckets := bucketed(e("keep", "a", 1), e("alter", "b", 2), e("new", "c", 1))
	attempt := e("attempt", "a", 1)
	attempt.Attempt = 1
	buckets[Bucket(attempt.Topic)] = append(buckets[Bucket(attempt.Topic)], attempt)
	drop := Bucket(names("drop")[0])
	buckets[drop] = append([]Entry{}, buckets[drop]...)
	next, changes, err := old.With(buckets, &[]Rule{{Scope: "t", Cluster: "a"}, {Scope: "u", Cluster: "b"}, {Scope: "v", Cluster: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := names("alter", "attempt", "drop", "new"); !slices.Equal(changes.Topics, want) {
		t.Errorf("topics %v, want %v", changes.Topics, want)
	}
	if want := []string{"", "u", "v"}; !slices.Equal(changes.Scopes, want) {
		t.Errorf("scopes %q, want %q", changes.Scopes, want)
	}
	if next.Len() != 4 || old.Len() != 4 {
		t.Errorf("lengths %d and %d", next.Len(), old.Len())
	}
	// The same again, in another order, is no change at all: nothing to publish.
	for b := range buckets {
		slices.Reverse(buckets[b])
	}
	if again, changes, err := next.With(buckets, &[]Rule{{Scope: "v", Cluster: "a"}, {Scope: "u", Cluster: "b"}, {Scope: "t", Cluster: "a"}}); again != next || !changes.Empty() || err != nil {
		t.Errorf("a repeated value changes the table: %+v %v", changes, err)
	}
}

func TestTheDigestCoversEveryField(t *testing.T) {
	e := Entry{Topic: "persistent://t/ns/x", Cluster: "a", State: StatePrepared, Epoch: 1, SwitchID: "s", Attempt: 1}
	r := Rule{Scope: "t", Cluster: "a", Epoch: 1, SwitchID: "s"}
	seen := map[string]string{}
	digest := func(what string, entries []Entry, rules []Rule) {
		t.Helper()
		d := mustWith(t, Empty(), rules, entries...).Digest()
		if other, ok := seen[d]; ok {
			t.Errorf("%s and %s have the same digest", what, other)
		}
		seen[d] = what
	}
	entry := func(what string, change func(*Entry)) {
		t.Helper()
		changed := e
		change(&changed)
		digest("entry with another "+what, []Entry{changed}, []Rule{r})
	}
	rule := func(what string, change func(*Rule)) {
		t.Helper()
		changed := r
		change(&changed)
		digest("rule with another "+what, []Entry{e}, []Rule{changed})
	}
	digest("both", []Entry{e}, []Rule{r})
	digest("nothing", nil, nil)
	digest("entry alone", []Entry{e}, nil)
	digest("rule alone", nil, []Rule{r})
	entry("topic", func(e *Entry) { e.Topic += "y" })
	entry("cluster", func(e *Entry) { e.Cluster = "b" })
	entry("state", func(e *Entry) { e.State = StateFenced })
	entry("epoch", func(e *Entry) { e.Epoch++ })
	entry("switch", func(e *Entry) { e.SwitchID = "" })
	entry("attempt", func(e *Entry) { e.Attempt++ })
	rule("scope", func(r *Rule) { r.Scope = "" })
	rule("cluster", func(r *Rule) { r.Cluster = "b" })
	rule("epoch", func(r *Rule) { r.Epoch++ })
	rule("switch", func(r *Rule) { r.SwitchID = "" })
}

// Buckets are part of the stored format, and digests are compared between versions: neither may change.
func TestBucketsAndDigestsAreTheSameInEveryVersion(t *testing.T) {
	for name, want := range map[string]int{"persistent://public/default/x": 936, "non-persistent://t/ns/y": 879} {
		if got := Bucket(name); got != want {
			t.Errorf("Bucket(%q) = %d, want %d", name, got, want)
		}
	}
	table := mustWith(t, Empty(), []Rule{{Scope: "t", Cluster: "a", Epoch: 2}}, Entry{Topic: "persistent://public/default/x", Cluster: "b", Epoch: 1, SwitchID: "s"})
	if got := table.Digest(); got != "f4c932dc2e759140" {
		t.Errorf("digest %s", got)
	}
}

func TestWithRebuildsOnlyTheBucketsItIsGiven(t *testing.T) {
	old, _ := syntheticTable(t, 20_000)
	name := "persistent://t/ns/new"
	next, err := old.WithEntry(name, &Entry{Topic: name, Cluster: "b", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	for b := range next.shards {
		if same := next.shards[b] == old.shards[b]; same != (b != Bucket(name)) {
			t.Fatalf("bucket %d: same shard %v", b, same)
		}
	}
	if back, err := next.WithEntry(name, nil); err != nil || back.Digest() != old.Digest() || back.Len() != old.Len() {
		t.Errorf("taking it back: %v", err)
	}
	if _, err := old.WithEntry(name, &Entry{Topic: name + "y"}); err == nil {
		t.Error("an entry of another topic is accepted")
	}
	if _, err := old.WithRule("t", &Rule{Scope: "u"}); err == nil {
		t.Error("a rule of another scope is accepted")
	}
}

func TestATableKeepsNothingOfItsArguments(t *testing.T) {
	name := []byte("persistent://t/ns/x")
	entries := bucketed(Entry{Topic: string(name), Cluster: "a", Epoch: 1})
	rules := []Rule{{Scope: "t", Cluster: "a"}}
	table, _, err := Empty().With(entries, &rules)
	if err != nil {
		t.Fatal(err)
	}
	digest := table.Digest()
	rules[0].Cluster = "z"
	entries[Bucket(string(name))][0].Cluster = "z"
	table.Rules()[0].Cluster = "z"
	table.Entries(Bucket(string(name)))[0].Cluster = "z"
	if d := table.Decide(mustTopic(t, string(name)), ""); d.Cluster != "a" || table.Digest() != digest || table.Rules()[0].Cluster != "a" {
		t.Errorf("a write through an argument or result reached the table: %+v", d)
	}
}

// drawEntries and drawRules make values of a small world, so that they collide.
func drawTopic(t *rapid.T) string {
	name := rapid.SampledFrom([]string{"x", "y", "z", "__change_events", "a%2Fb", "日次"}).Draw(t, "name")
	ns := rapid.SampledFrom([]string{"t/a", "t/b", "u/a", "t/c/v1", "pulsar/system"}).Draw(t, "namespace")
	return rapid.SampledFrom([]string{"persistent", "non-persistent"}).Draw(t, "domain") + "://" + ns + "/" + name
}

func drawScope(t *rapid.T) string {
	return rapid.SampledFrom([]string{"", "t", "u", "pulsar", "t/a", "t/b", "u/a", "t/c/v1", "pulsar/system"}).Draw(t, "scope")
}

func drawEntry(t *rapid.T, topic string) Entry {
	e := Entry{Topic: topic, Epoch: rapid.Uint64Range(0, 5).Draw(t, "epoch"), Cluster: rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "cluster")}
	if e.Cluster != "" {
		e.State = State(rapid.IntRange(0, int(StateDraining)).Draw(t, "state"))
	}
	e.SwitchID = rapid.SampledFrom([]string{"", "s1", "s2"}).Draw(t, "switch")
	e.Attempt = rapid.Uint32Range(0, 2).Draw(t, "attempt")
	if e.State == StateDraining || e.State != StateActive && rapid.Bool().Draw(t, "drains") {
		e.Drain = Drain{From: "d", Gone: rapid.IntRange(0, 2).Draw(t, "gone"), Tails: []Tail{{3, 4}}}.String()
	}
	return e
}

// checkAgainstModel compares everything that a table says with the model.
func checkAgainstModel(t interface{ Fatalf(string, ...any) }, table *Table, m *model, topics []string) {
	for _, name := range topics {
		for _, suffix := range []string{"", "-partition-3"} {
			topic, err := ParseTopic(name + suffix)
			if err != nil {
				t.Fatalf("%v", err)
			}
			for _, def := range []string{"", "l"} {
				if got, want := table.Decide(topic, def), m.decide(topic, def); got != want {
					t.Fatalf("%s, default %q: %+v, the model says %+v", name+suffix, def, got, want)
				}
			}
		}
		got, ok := table.Entry(name)
		if want, wantOK := m.entries[name]; got != want || ok != wantOK {
			t.Fatalf("Entry(%s) = %+v, %v; the model says %+v, %v", name, got, ok, want, wantOK)
		}
	}
	seen := map[string]Entry{}
	for e := range table.Each {
		seen[e.Topic] = e
	}
	if !reflect.DeepEqual(seen, m.entries) || table.Len() != len(m.entries) {
		t.Fatalf("Each yields %d entries, Len %d, the model has %d", len(seen), table.Len(), len(m.entries))
	}
	// The digest depends on the content alone: a table built at once from the model has the same one.
	all := []Entry{}
	for _, e := range m.entries {
		all = append(all, e)
	}
	fresh, _, err := Empty().With(bucketed(all...), &m.rules)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if fresh.Digest() != table.Digest() {
		t.Fatalf("digest %s, of the same content built at once %s", table.Digest(), fresh.Digest())
	}
}

// step replaces whole buckets and, sometimes, the rules in both table and model, and checks the reported changes.
func step(t *rapid.T, table *Table, m *model) *Table {
	before := &model{entries: map[string]Entry{}, rules: m.rules}
	for k, v := range m.entries {
		before.entries[k] = v
	}
	buckets := map[int][]Entry{}
	for range rapid.IntRange(0, 4).Draw(t, "touched") {
		topic := drawTopic(t)
		b := Bucket(topic)
		delete(m.entries, topic)
		if rapid.Bool().Draw(t, "present") {
			m.entries[topic] = drawEntry(t, topic)
		}
		buckets[b] = nil
	}
	for b := range buckets {
		for _, e := range m.entries {
			if Bucket(e.Topic) == b {
				buckets[b] = append(buckets[b], e)
			}
		}
	}
	var rules *[]Rule
	if rapid.Bool().Draw(t, "rules") {
		byScope := map[string]Rule{}
		for range rapid.IntRange(0, 5).Draw(t, "rule count") {
			s := drawScope(t)
			byScope[s] = Rule{Scope: s, Cluster: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "rule cluster"), Epoch: rapid.Uint64Range(0, 5).Draw(t, "rule epoch")}
		}
		m.rules = []Rule{}
		for _, r := range byScope {
			m.rules = append(m.rules, r)
		}
		rules = &m.rules
	}
	next, changes, err := table.With(buckets, rules)
	if err != nil {
		t.Fatalf("%v", err)
	}
	var topics []string
	for k, v := range m.entries {
		if old, ok := before.entries[k]; !ok || old != v {
			topics = append(topics, k)
		}
	}
	for k := range before.entries {
		if _, ok := m.entries[k]; !ok {
			topics = append(topics, k)
		}
	}
	if slices.Sort(topics); !slices.Equal(topics, changes.Topics) {
		t.Fatalf("changed topics %v, the model says %v", changes.Topics, topics)
	}
	return next
}

func runSequence(t *rapid.T) {
	table, m := Empty(), &model{entries: map[string]Entry{}}
	var topics []string
	for _, d := range []string{"persistent", "non-persistent"} {
		for _, ns := range []string{"t/a", "t/b", "u/a", "t/c/v1", "pulsar/system"} {
			for _, n := range []string{"x", "y", "z", "__change_events", "a%2Fb", "日次"} {
				topics = append(topics, d+"://"+ns+"/"+n)
			}
		}
	}
	for range rapid.IntRange(1, 12).Draw(t, "steps") {
		old, digest := table, table.Digest()
		table = step(t, table, m)
		if old.Digest() != digest {
			t.Fatalf("the old table changed")
		}
		checkAgainstModel(t, table, m, topics)
	}
}

func TestAnySequenceOfChangesDecidesLikeAPlainMap(t *testing.T) { rapid.Check(t, runSequence) }

func FuzzTableAgainstPlainMap(f *testing.F) { f.Fuzz(rapid.MakeFuzz(runSequence)) }

func TestAFullTableFindsEveryTopicAndNoOther(t *testing.T) {
	const n = 50_000
	table, names := syntheticTable(t, n)
	for i, name := range names {
		if e, ok := table.Entry(name); !ok || e.Topic != name || e.Epoch != uint64(i%7) {
			t.Fatalf("%s: %+v, %v", name, e, ok)
		}
		if _, ok := table.Entry(name + "x"); ok {
			t.Fatalf("%sx is found", name)
		}
	}
	count := 0
	for range table.Each {
		if count++; count == 10 {
			break // Each stops when asked to
		}
	}
	if count != 10 || table.Len() != n {
		t.Errorf("count %d, Len %d", count, table.Len())
	}
}

// syntheticTable has n topics with names of 40 to 60 bytes over 3 clusters.
func syntheticTable(t testing.TB, n int) (*Table, []string) {
	t.Helper()
	names := make([]string, n)
	buckets := map[int][]Entry{}
	for i := range names {
		names[i] = fmt.Sprintf("persistent://tenant-%02d/namespace-%03d/topic-%0*d", i%40, i%400, 3+i%15, i)
		b := Bucket(names[i])
		buckets[b] = append(buckets[b], Entry{Topic: names[i], Cluster: []string{"a", "b", "us-east"}[i%3], Epoch: uint64(i % 7)})
	}
	rules := []Rule{{Scope: "", Cluster: "a"}, {Scope: "tenant-01", Cluster: "b", Epoch: 1}, {Scope: "tenant-02/namespace-002", Cluster: "b", Epoch: 1}}
	table, _, err := Empty().With(buckets, &rules)
	if err != nil {
		t.Fatal(err)
	}
	return table, names
}

func TestADecisionAllocatesNothing(t *testing.T) {
	table, names := syntheticTable(t, 2000)
	table, err := table.WithEntry(names[1], &Entry{Topic: names[1], Epoch: 9})
	if err != nil {
		t.Fatal(err)
	}
	table, err = table.WithEntry(names[2], &Entry{Topic: names[2], Cluster: "c", State: StateFenced, SwitchID: "s1", Attempt: 3})
	if err != nil {
		t.Fatal(err)
	}
	for what, name := range map[string]string{
		"an exact entry": names[0], "a floor": names[1], "a moving entry": names[2], "a partition": names[0] + "-partition-1",
		"a namespace rule": "persistent://tenant-02/namespace-002/none", "a tenant rule": "persistent://tenant-01/x/none",
		"the default": "persistent://t/ns/none", "a system topic": "persistent://pulsar/system/x",
	} {
		topic := mustTopic(t, name)
		if n := testing.AllocsPerRun(100, func() { table.Decide(topic, "l") }); n != 0 {
			t.Errorf("deciding by %s allocates %v times", what, n)
		}
	}
	if n := testing.AllocsPerRun(100, func() { table.Entry(names[2]) }); n != 0 {
		t.Errorf("Entry allocates %v times", n)
	}
}

// A topic whose part of the map was never read is not sent to the default cluster; reading it changes that.
func TestWhatWasNeverReadDecidesNothing(t *testing.T) {
	topic := mustTopic(t, "persistent://t/ns/x")
	other := mustTopic(t, "persistent://t/ns/other")
	if Bucket(topic.Base()) == Bucket(other.Base()) {
		t.Fatal("the two topics share a bucket: take another name")
	}
	table := mustWith(t, Empty(), []Rule{{Scope: "t/ns", Cluster: "a"}})
	blind := table.WithUnknown(Bucket(topic.Base()))
	if d := blind.Decide(topic, "z"); d.Source != SourceUnknown || d.Cluster != "" {
		t.Errorf("unread bucket: %+v, want SourceUnknown", d)
	}
	if d := blind.Decide(other, "z"); d.Cluster != "a" {
		t.Errorf("another bucket: %+v, want a", d)
	}
	if blind.Digest() == table.Digest() {
		t.Error("the digest does not tell that a bucket is unread")
	}
	seen, _, err := blind.With(map[int][]Entry{Bucket(topic.Base()): nil}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := seen.Decide(topic, "z"); d.Cluster != "a" || seen.Digest() != table.Digest() {
		t.Errorf("read and empty: %+v, digest %s, want a, %s", d, seen.Digest(), table.Digest())
	}

	noRules := mustWith(t, Empty(), nil, Entry{Topic: topic.Base(), Cluster: "b"}).WithUnknown(RulesBucket)
	if d := noRules.Decide(topic, "z"); d.Cluster != "b" {
		t.Errorf("an exact entry without rules: %+v, want b", d)
	}
	if d := noRules.Decide(other, "z"); d.Source != SourceUnknown {
		t.Errorf("unread rules: %+v, want SourceUnknown", d)
	}
	seen, _, err = noRules.With(nil, &[]Rule{})
	if err != nil {
		t.Fatal(err)
	}
	if d := seen.Decide(other, "z"); d.Cluster != "z" {
		t.Errorf("rules read and none: %+v, want the default", d)
	}
	// A part with a last good value stays as it is.
	if d := seen.WithUnknown(Bucket(topic.Base())).Decide(topic, "z"); d.Cluster != "b" {
		t.Errorf("a bucket with entries was hidden: %+v", d)
	}
}
