package route

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unique"
)

// RulesBucket stands for the rules wherever buckets are numbered.
const RulesBucket = -1

// Table is one snapshot of the map. It is immutable: any number of goroutines may read it while With builds the next
// one. The owner publishes the current table through one atomic pointer.
//
// Strings that it hands out share memory with a shard; who keeps one for long after the table was replaced should clone it.
type Table struct {
	shards      [BucketCount]*shard
	scopes      map[string]Rule // by scope, without the default
	rules       []Rule          // all, sorted by scope
	rulesDigest uint64
	digest      uint64
	count       int
	rulesUnread bool // the rules have never been read: only exact entries decide
}

// Empty is the map that maps nothing.
func Empty() *Table {
	t := &Table{scopes: map[string]Rule{}}
	for i := range t.shards {
		t.shards[i] = emptyShard
	}
	return t
}

// Bucket is the bucket, 0 to BucketCount−1, of a canonical base name: the low 10 bits of its xxhash64. It is part of the
// stored format.
func Bucket(base string) int { return bucketOf(hashName(base)) }

// Decide answers which cluster a topic belongs to. The order is: exact entry, namespace rule, tenant rule, default rule,
// listenerDefault (the cluster of the listener that was asked, "" for none).
//
// System topics have no entry of their own, and pulsar/system (transaction coordinators) belongs to listenerDefault before any rule.
//
// It allocates nothing.
func (t *Table) Decide(topic Topic, listenerDefault string) Decision {
	if topic.system {
		return t.DecideByRule(topic, listenerDefault)
	}
	h := hashName(topic.base)
	s := t.shards[bucketOf(h)]
	r := s.find(topic.base, h)
	if r == 0 {
		if s.unknown {
			return Decision{Source: SourceUnknown}
		}
		return t.DecideByRule(topic, listenerDefault)
	}
	if cluster := s.cluster(r); cluster != "" {
		_, switchID, drain := s.extra(r)
		return Decision{
			Cluster: cluster, Epoch: s.epoch(r), State: s.state(r),
			Source: SourceTopic, Scope: topic.base, SwitchID: switchID, Drain: drain,
		}
	}
	d := t.DecideByRule(topic, listenerDefault)
	d.Epoch = max(d.Epoch, s.epoch(r))
	return d
}

// DecideByRule answers what Decide would if the topic had no exact entry.
func (t *Table) DecideByRule(topic Topic, listenerDefault string) Decision {
	if topic.system && listenerDefault != "" && topic.Namespace() == systemNamespace {
		return Decision{Cluster: listenerDefault, Source: SourceDefault}
	}
	return t.decideScope(topic.Namespace(), topic.Tenant(), listenerDefault)
}

// DecideScope answers for a topic of the scope (as in Rule.Scope) that has neither an exact entry nor a more specific rule.
func (t *Table) DecideScope(scope, listenerDefault string) Decision {
	tenant, _, isNamespace := strings.Cut(scope, "/")
	if !isNamespace {
		scope = "" // there is no namespace rule to look at
	}
	return t.decideScope(scope, tenant, listenerDefault)
}

func (t *Table) decideScope(namespace, tenant, listenerDefault string) Decision {
	if t.rulesUnread {
		return Decision{Source: SourceUnknown}
	}
	floor := uint64(0)
	if len(t.scopes) > 0 {
		if r, ok := t.scopes[namespace]; ok {
			if r.Cluster != "" {
				return ruleDecision(&r, SourceNamespace, 0)
			}
			floor = r.Epoch
		}
		if r, ok := t.scopes[tenant]; ok {
			if r.Cluster != "" {
				return ruleDecision(&r, SourceTenant, floor)
			}
			floor = max(floor, r.Epoch)
		}
	}
	if len(t.rules) > 0 && t.rules[0].Scope == "" {
		r := &t.rules[0]
		if r.Cluster != "" {
			return ruleDecision(r, SourceDefault, floor)
		}
		floor = max(floor, r.Epoch)
	}
	if listenerDefault == "" {
		return Decision{Source: SourceNone, Epoch: floor}
	}
	return Decision{Cluster: listenerDefault, Source: SourceDefault, Epoch: floor}
}

func ruleDecision(r *Rule, source Source, floor uint64) Decision {
	return Decision{Cluster: r.Cluster, Epoch: max(r.Epoch, floor), Source: source, Scope: r.Scope, SwitchID: r.SwitchID}
}

// Entry returns the exact entry of a canonical base name.
func (t *Table) Entry(base string) (Entry, bool) {
	h := hashName(base)
	s := t.shards[bucketOf(h)]
	r := s.find(base, h)
	if r == 0 {
		return Entry{}, false
	}
	return s.entry(r), true
}

// Each yields all entries, floors included, in no particular order: for e := range table.Each.
func (t *Table) Each(yield func(Entry) bool) {
	for _, s := range t.shards {
		for r, ok := s.next(0); ok; r, ok = s.next(r) {
			if !yield(s.entry(r)) {
				return
			}
		}
	}
}

// Entries returns the entries of one bucket, in no particular order; the slice is the caller's.
func (t *Table) Entries(bucket int) []Entry {
	s := t.shards[bucket]
	entries := make([]Entry, 0, s.count)
	for r, ok := s.next(0); ok; r, ok = s.next(r) {
		entries = append(entries, s.entry(r))
	}
	return entries
}

// Len is the number of entries, floors included.
func (t *Table) Len() int { return t.count }

// Rules returns all rules sorted by scope; the slice is the caller's.
func (t *Table) Rules() []Rule { return slices.Clone(t.rules) }

// Rule returns the rule of exactly this scope.
func (t *Table) Rule(scope string) (Rule, bool) {
	if scope != "" {
		r, ok := t.scopes[scope]
		return r, ok
	}
	if len(t.rules) > 0 && t.rules[0].Scope == "" {
		return t.rules[0], true
	}
	return Rule{}, false
}

// Digest stands for the whole content, whatever order it came in: two proxies with the same digest serve the same map.
// It finds disagreement, not forgery.
func (t *Table) Digest() string { return fmt.Sprintf("%016x", t.digest) }

// BuildError says which buckets With was given something unusable for. The others would be accepted: the caller
// may remove those of Bad and call again, so that a bad value never holds up the rest.
type BuildError struct {
	Bad map[int]error // by bucket; RulesBucket for the rules
}

func (e *BuildError) Error() string {
	var b strings.Builder
	b.WriteString("the map was not changed")
	for _, bucket := range slices.Sorted(maps.Keys(e.Bad)) {
		if bucket == RulesBucket {
			fmt.Fprintf(&b, "; rules: %v", e.Bad[bucket])
		} else {
			fmt.Fprintf(&b, "; bucket %d: %v", bucket, e.Bad[bucket])
		}
	}
	return b.String()
}

// With returns the table in which each bucket of buckets holds exactly the given entries and, when rules is not nil,
// the rules are exactly those. It rebuilds only these shards; t stays as it is. When nothing differs it returns t itself.
// An error is a *BuildError.
func (t *Table) With(buckets map[int][]Entry, rules *[]Rule) (*Table, Changes, error) {
	next := *t
	var changes Changes
	bad := map[int]error{}
	read := false // something that was unknown
	for bucket, entries := range buckets {
		if bucket < 0 || bucket >= BucketCount {
			bad[bucket] = fmt.Errorf("there is no such bucket; they are 0 to %d", BucketCount-1)
			continue
		}
		s, err := newShard(bucket, entries, intern)
		if err != nil {
			bad[bucket] = err
			continue
		}
		old, before := t.shards[bucket], len(changes.Topics)
		if changes.Topics = old.diff(s, changes.Topics); old.unknown {
			read = true
		} else if len(changes.Topics) == before {
			continue // the same content: keep the old memory
		}
		next.shards[bucket] = s
		next.count += s.count - old.count
		next.digest += s.digest - old.digest
	}
	if rules != nil {
		read, next.rulesUnread = read || t.rulesUnread, false
		scopes, err := next.setRules(*rules, t)
		if err != nil {
			bad[RulesBucket] = err
		}
		changes.Scopes = scopes
	}
	if len(bad) > 0 {
		return t, Changes{}, &BuildError{Bad: bad}
	}
	if changes.Empty() && !read {
		return t, Changes{}, nil
	}
	slices.Sort(changes.Topics)
	return &next, changes, nil
}

// WithUnknown returns the table in which the given parts (buckets, RulesBucket for the rules), as far as they are empty, count as
// never read: what they would decide is SourceUnknown until With brings them. A topic must not go to the default cluster because its
// entry is unreadable.
func (t *Table) WithUnknown(parts ...int) *Table {
	next := *t
	for _, part := range parts {
		switch {
		case part == RulesBucket:
			next.rulesUnread = len(t.rules) == 0
		case t.shards[part].count == 0 && !next.shards[part].unknown:
			next.shards[part] = unknownShard
			next.digest += unknownShard.digest
		}
	}
	return &next
}

// Unknown lists the parts that count as never read, as WithUnknown takes them.
func (t *Table) Unknown() []int {
	var parts []int
	if t.rulesUnread {
		parts = append(parts, RulesBucket)
	}
	for i, s := range t.shards {
		if s.unknown {
			parts = append(parts, i)
		}
	}
	return parts
}

// setRules replaces the rules of t, which is still being built, and returns the scopes that differ from old.
func (t *Table) setRules(rules []Rule, old *Table) (scopes []string, err error) {
	t.rules = slices.Clone(rules)
	t.scopes = make(map[string]Rule, len(rules))
	slices.SortFunc(t.rules, func(a, b Rule) int { return strings.Compare(a.Scope, b.Scope) })
	digest := uint64(0)
	var faults []error
	for i := range t.rules {
		r := &t.rules[i]
		if err := checkRule(r); err != nil {
			faults = append(faults, err)
			continue
		}
		if i > 0 && r.Scope == t.rules[i-1].Scope {
			faults = append(faults, fmt.Errorf("the scope %q has two rules", r.Scope))
			continue
		}
		r.Cluster = intern(r.Cluster)
		if r.Scope != "" {
			t.scopes[r.Scope] = *r
		}
		digest += hashRule(r)
		if before, ok := old.Rule(r.Scope); !ok || before != *r {
			scopes = append(scopes, r.Scope)
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	for i := range old.rules {
		if _, ok := t.Rule(old.rules[i].Scope); !ok {
			scopes = append(scopes, old.rules[i].Scope)
		}
	}
	slices.Sort(scopes)
	t.digest += digest - t.rulesDigest
	t.rulesDigest = digest
	return scopes, nil
}

// WithEntry returns the table in which the entry of one canonical base name is replaced; nil removes it. For the stepwise planning
// of a write that changes several things, where each step must see the one before it.
func (t *Table) WithEntry(base string, after *Entry) (*Table, error) {
	if after != nil && after.Topic != base {
		return t, fmt.Errorf("the new entry of %q is one of %q", clip(base), clip(after.Topic))
	}
	bucket := Bucket(base)
	entries := slices.DeleteFunc(t.Entries(bucket), func(e Entry) bool { return e.Topic == base })
	if after != nil {
		entries = append(entries, *after)
	}
	next, _, err := t.With(map[int][]Entry{bucket: entries}, nil)
	return next, err
}

// WithRule returns the table in which the rule of one scope is replaced; nil removes it.
func (t *Table) WithRule(scope string, after *Rule) (*Table, error) {
	if after != nil && after.Scope != scope {
		return t, fmt.Errorf("the new rule of %q is one of %q", clip(scope), clip(after.Scope))
	}
	rules := slices.DeleteFunc(t.Rules(), func(r Rule) bool { return r.Scope == scope })
	if after != nil {
		rules = append(rules, *after)
	}
	next, _, err := t.With(nil, &rules)
	return next, err
}

// intern gives equal names one memory: there are few clusters and many shards.
func intern(s string) string { return unique.Make(s).Value() }
