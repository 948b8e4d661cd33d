package pulsaradmin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
)

// Facts is what one cluster says of one topic before a switch.
type Facts struct {
	Cluster    string
	Topic      string   // base name
	Known      []string // names of the clusters that it knows, its own included; empty when that cannot be asked
	Version    string   // of a broker, as in 4.0.8; empty when that cannot be asked
	Tenant     bool     // exists
	Namespace  bool     // exists
	Exists     bool     // the topic does
	Partitions int      // 0: not partitioned
	Policies   Policies
	// TopicPolicies are the policies that are set on the topic itself, by the name of the admin call, in the broker's own JSON.
	TopicPolicies map[string]json.RawMessage
	Schemas       []Schema // all versions, oldest first
	Parts         []PartFacts
}

// PartFacts is what one cluster says of one partition.
type PartFacts struct {
	Topic    string
	Missing  bool // listed as a partition, but it does not exist yet: nobody has used it
	Stats    Stats
	Internal Internal
}

// Policies are the namespace's, as far as they matter for a switch; the rest of what brokers say is left out.
type Policies struct {
	Replication      []string        `json:"replication_clusters"`
	Allowed          []string        `json:"allowed_clusters"`
	TTL              *int64          `json:"message_ttl_in_seconds"`
	Retention        json.RawMessage `json:"retention_policies"`
	BacklogQuota     json.RawMessage `json:"backlog_quota_map"`
	Deduplication    *bool           `json:"deduplicationEnabled"`
	SchemaStrategy   string          `json:"schema_compatibility_strategy"`
	SchemaAutoUpdate bool            `json:"is_allow_auto_update_schema"`
	SchemaEnforced   bool            `json:"schema_validation_enforced"`
	Encryption       bool            `json:"encryption_required"`
	SubTypes         []string        `json:"subscription_types_enabled"`
	SubExpiration    *int64          `json:"subscription_expiration_time_minutes"`
	DelayedDelivery  json.RawMessage `json:"delayed_delivery_policies"`
	AutoTopic        json.RawMessage `json:"autoTopicCreationOverride"`
	EntryFilters     json.RawMessage `json:"entryFilters"`
	Auth             json.RawMessage `json:"auth_policies"`
	Migrated         bool            `json:"migrated"`
}

// Schema is one version.
type Schema struct {
	Version     int64
	Type        string
	Fingerprint string // of type and definition; equal ones are the same schema
}

// topicPolicies are the admin calls for policies of one topic that change what a switch has to expect.
var topicPolicies = []string{
	"backlogQuotaMap", "compactionThreshold", "deduplicationEnabled", "delayedDelivery", "entryFilters", "maxConsumers", "maxMessageSize",
	"maxProducers", "maxUnackedMessagesOnSubscription", "messageTTL", "persistence", "replication", "retention", "schemaCompatibilityStrategy",
	"schemaValidationEnforced", "subscriptionTypesEnabled",
}

// Facts reads everything that a preflight asks of one cluster for one topic (base name). What does not exist is no error.
func (c *Client) Facts(ctx context.Context, base string) (Facts, error) {
	n, err := split(base)
	if err != nil {
		return Facts{}, err
	}
	f := Facts{Cluster: c.cfg.Cluster, Topic: base}
	exists := func(err error, found *bool) error {
		*found = err == nil
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		return err
	}
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/tenants/"+url.PathEscape(n.tenant), nil, nil)
	if errors.Is(err, ErrForbidden) {
		f.Tenant = true // only superusers may ask; the namespace's answer decides
	} else if err := exists(err, &f.Tenant); err != nil || !f.Tenant {
		return f, err
	}
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/namespaces/"+n.tenant+"/"+n.namespace, nil, &f.Policies)
	if err := exists(err, &f.Namespace); err != nil || !f.Namespace {
		return f, err
	}
	f.Partitions, err = c.Partitions(ctx, base)
	if err := exists(err, &f.Exists); err != nil || !f.Exists {
		return f, err
	}
	parts := PartitionNames(base, f.Partitions)
	f.Parts = make([]PartFacts, len(parts))
	var schemas, policies error
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = c.call(ctx, http.MethodGet, "/admin/v2/clusters", nil, &f.Known) })
	wg.Go(func() {
		if a, err := c.call(ctx, http.MethodGet, "/admin/v2/brokers/version", nil, nil); err == nil {
			f.Version = strings.TrimSpace(string(a.body))
		}
	})
	wg.Go(func() { f.Schemas, schemas = c.Schemas(ctx, base) })
	wg.Go(func() { f.TopicPolicies, policies = c.TopicPolicies(ctx, base) })
	wg.Go(func() {
		err = each(len(parts), Parallel, func(i int) (err error) {
			f.Parts[i], err = c.part(ctx, parts[i])
			return err
		})
	})
	wg.Wait()
	return f, errors.Join(schemas, policies, err)
}

func (c *Client) part(ctx context.Context, topic string) (p PartFacts, err error) {
	p.Topic = topic
	if p.Stats, err = c.Stats(ctx, topic); err == nil {
		p.Internal, err = c.Internal(ctx, topic)
	}
	if errors.Is(err, ErrNotFound) {
		return PartFacts{Topic: topic, Missing: true}, nil
	}
	return p, err
}

// Schemas lists all versions of a topic's schema (base name), oldest first. A pending SEND carries the number of its version, so the same number
// must mean the same schema on both clusters.
func (c *Client) Schemas(ctx context.Context, base string) ([]Schema, error) {
	texts, err := c.schemaTexts(ctx, base)
	if err != nil {
		return nil, err
	}
	all := make([]Schema, 0, len(texts))
	for _, v := range texts {
		all = append(all, Schema{Version: v.Version, Type: v.Type, Fingerprint: fingerprint(v.Type, v.Data)})
	}
	return all, nil
}

// fingerprint does not depend on white space in a definition that is JSON; properties are notes and are left out.
func fingerprint(kind, data string) string {
	var compact bytes.Buffer
	if json.Compact(&compact, []byte(data)) == nil {
		data = compact.String()
	}
	sum := sha256.Sum256([]byte(kind + "\n" + data))
	return hex.EncodeToString(sum[:8])
}

// SchemaDifference says in words where the versions of two clusters differ; "" when b has all of a's under the same numbers.
func SchemaDifference(a, b Facts) string {
	for _, want := range a.Schemas {
		i := slices.IndexFunc(b.Schemas, func(s Schema) bool { return s.Version == want.Version })
		if i < 0 {
			return fmt.Sprintf("cluster %s lacks version %d of the schema (%s, %s)", b.Cluster, want.Version, want.Type, want.Fingerprint)
		}
		if have := b.Schemas[i]; have.Fingerprint != want.Fingerprint {
			return fmt.Sprintf("version %d of the schema is %s %s on cluster %s and %s %s on cluster %s", want.Version, want.Type, want.Fingerprint, a.Cluster, have.Type, have.Fingerprint, b.Cluster)
		}
	}
	return ""
}

// TopicPolicies reads the policies that are set on the topic itself (base name).
func (c *Client) TopicPolicies(ctx context.Context, base string) (map[string]json.RawMessage, error) {
	found := map[string]json.RawMessage{}
	var mu sync.Mutex
	err := each(len(topicPolicies), Parallel, func(i int) error {
		p, err := path(base, topicPolicies[i])
		if err != nil {
			return err
		}
		a, err := c.call(ctx, http.MethodGet, p, nil, nil)
		var refused *Error
		switch {
		case errors.As(err, &refused) && (refused.Status == http.StatusNotFound || refused.Status == http.StatusMethodNotAllowed):
			return nil // this version of the broker has no such policy, or topic policies are switched off
		case err != nil:
			return err
		}
		if said := rawOrNil(a.body); said != nil {
			mu.Lock()
			defer mu.Unlock()
			found[topicPolicies[i]] = said
		}
		return nil
	})
	return found, err
}

// PolicyDifferences names, in words, the policies that differ between two clusters and would change what clients see.
func PolicyDifferences(a, b Facts) []string {
	var found []string
	differ := func(what string, x, y any) {
		left, right := said(x), said(y)
		if left != right {
			found = append(found, fmt.Sprintf("%s: %s on cluster %s, %s on cluster %s", what, left, a.Cluster, right, b.Cluster))
		}
	}
	p, q := a.Policies, b.Policies
	differ("message TTL of the namespace (seconds)", p.TTL, q.TTL)
	differ("retention of the namespace", p.Retention, q.Retention)
	differ("backlog quota of the namespace", p.BacklogQuota, q.BacklogQuota)
	differ("deduplication of the namespace", p.Deduplication, q.Deduplication)
	differ("schema compatibility of the namespace", p.SchemaStrategy, q.SchemaStrategy)
	differ("schema updates by clients in the namespace", p.SchemaAutoUpdate, q.SchemaAutoUpdate)
	differ("required schema in the namespace", p.SchemaEnforced, q.SchemaEnforced)
	differ("required encryption in the namespace", p.Encryption, q.Encryption)
	differ("subscription types of the namespace", p.SubTypes, q.SubTypes)
	differ("subscription expiry of the namespace (minutes)", p.SubExpiration, q.SubExpiration)
	differ("delayed delivery of the namespace", p.DelayedDelivery, q.DelayedDelivery)
	differ("entry filters of the namespace", p.EntryFilters, q.EntryFilters)
	differ("permissions of the namespace", p.Auth, q.Auth)
	names := map[string]bool{}
	for name := range a.TopicPolicies {
		names[name] = true
	}
	for name := range b.TopicPolicies {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		x, y := a.TopicPolicies[name], b.TopicPolicies[name]
		if name == "schemaValidationEnforced" { // brokers say false of every topic that has policies at all, and of one that has none nothing
			x, y = unlessFalse(x), unlessFalse(y)
		}
		differ("topic policy "+name, x, y)
	}
	return found
}

func unlessFalse(policy json.RawMessage) json.RawMessage {
	if string(policy) == "false" {
		return nil
	}
	return policy
}

// said is a policy in JSON, in one form for equal values; "not set" for none.
func said(v any) string {
	text, err := json.Marshal(v)
	var plain any
	if err != nil || json.Unmarshal(text, &plain) != nil {
		return fmt.Sprint(v)
	}
	text, _ = json.Marshal(plain) // keys are sorted now; what came out of JSON goes into it again
	switch s := string(text); s {
	case "null", "{}", "[]", `""`, `"UNDEFINED"`:
		return "not set"
	default:
		return s
	}
}

// Siblings names the topics (base names, sorted) that clients make for what they could not process of a topic: TOPIC-SUBSCRIPTION-DLQ and -RETRY.
func (c *Client) Siblings(ctx context.Context, base string) ([]string, error) {
	n, err := split(base)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, kind := range []string{"", "/partitioned"} {
		var all []string
		if _, err := c.call(ctx, http.MethodGet, "/admin/v2/persistent/"+n.tenant+"/"+n.namespace+kind, nil, &all); err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
		for _, name := range all {
			t, err := route.ParseTopic(name)
			if err == nil && strings.HasPrefix(t.Base(), base+"-") && (strings.HasSuffix(t.Base(), "-DLQ") || strings.HasSuffix(t.Base(), "-RETRY")) {
				found = append(found, t.Base())
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// ReplicatedTo are the clusters that the topic is replicated to, by its own policy or the namespace's.
func (f Facts) ReplicatedTo() []string {
	clusters := f.Policies.Replication
	if own, ok := f.TopicPolicies["replication"]; ok {
		var list []string
		if json.Unmarshal(own, &list) == nil {
			clusters = list
		}
	}
	return clusters
}

// TellsTransactions tells whether the end of transactions shows on both clusters. Brokers replicate what was committed as ordinary messages and nothing of what was aborted (apache/pulsar#18896; tried
// with 3.0.0 and 4.2.4), and say of a stored message whether it was aborted (4.0.8 and 4.2.4 do, 3.0.0 does not), without which its missing copy would look like a loss.
func (f Facts) TellsTransactions() bool {
	major, _, _ := strings.Cut(f.Version, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= 4
}

// Replicates tells whether cluster to is among them.
func (f Facts) Replicates(to string) bool { return slices.Contains(f.ReplicatedTo(), to) }

// Strangers are the publishers of one partition, replicators left out, whose producer name is not among claimed: they do not come through
// the proxies, and what they write after the drain would be missing on the other cluster.
func (c *Client) Strangers(ctx context.Context, topic string, claimed []string) ([]Publisher, error) {
	stats, err := c.Stats(ctx, topic)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(stats.Publishers, func(p Publisher) bool { return slices.Contains(claimed, p.Name) }), nil
}

// Progress reads every partition's replicator to a cluster twice, a while apart unless the first reading says that all is drained.
func (c *Client) Progress(ctx context.Context, topics []string, to string, apart time.Duration) (before, after []Replicator, err error) {
	before, after = make([]Replicator, len(topics)), make([]Replicator, len(topics))
	read := func(into []Replicator) error {
		return each(len(topics), Parallel, func(i int) (err error) {
			into[i], err = c.Replicator(ctx, topics[i], to, time.Now())
			return err
		})
	}
	if err := read(before); err != nil {
		return nil, nil, err
	}
	if !slices.ContainsFunc(before, func(r Replicator) bool { return r.Exists && !r.Drained() }) {
		copy(after, before)
		return before, after, nil
	}
	pause := time.NewTimer(apart)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	return before, after, read(after)
}
