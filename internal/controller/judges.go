package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// The items of a preflight, a closed list: scripts depend on the names, and docs/operations.md says what each means.
const (
	itemAddress       = "admin address"
	itemProxies       = "proxies"
	itemLeader        = "leader"
	itemClusters      = "clusters"
	itemTopic         = "topic"
	itemSchema        = "schema"
	itemReplication   = "replication"
	itemWayBack       = "way back"
	itemSubscriptions = "subscriptions"
	itemRetention     = "retention"
	itemReaders       = "readers"
	itemProducers     = "producers"
	itemClients       = "clients"
	itemBypass        = "past the proxies"
	itemTransactions  = "transactions"
	itemDelayed       = "delayed messages"
	itemSiblings      = "siblings"
	itemCompaction    = "compaction"
	itemPolicies      = "policies"
)

const (
	// smallBacklog is how many entries a live replicator may have to send without being worth a word.
	smallBacklog = 1_000
	// largeBacklog is how many would not be sent within a fence on many clusters.
	largeBacklog = 10_000
	// slowReplication is the rate, in entries per second, that is assumed where none was measured.
	slowReplication = 1_000
	// acksTook is what the proxies' acks of a fence and the two writes of the map cost, measured on an idle machine.
	acksTook = 60 * time.Millisecond
	// looksInFence is how often the ends of all partitions are looked at within a fence.
	looksInFence = 5
	// maxNamed is how many things of a kind a finding names.
	maxNamed = 5
)

// judge says what all that was read means. It reads nothing.
func (s *survey) judge() switching.Preflight {
	p := switching.Preflight{Topic: s.req.Topic, From: s.req.From, To: s.req.To, Findings: []switching.Finding{}, Subscriptions: []switching.Carried{}}
	p.Add(s.judgeProxies()...)
	p.Add(s.judgeLeader())
	p.Add(s.judgeClusters()...)
	if !s.readable() {
		return p
	}
	switch {
	case s.returns():
		s.judgeReturn(&p)
		return p
	case s.drains():
		s.judgeDrain(&p)
		return p
	}
	p.Add(s.judgeSchema()...)
	p.Add(s.judgeReplication(), s.judgeWayBack())
	p.Add(s.judgeSubscriptions()...)
	p.Add(s.judgeRetention())
	p.Add(s.judgeReaders(), s.judgeProducers(), s.judgeClients())
	p.Add(s.judgeBypass()...)
	p.Add(s.judgeTransactions(), s.judgeDelayed(), s.judgeSiblings(), s.judgeCompaction())
	p.Add(s.judgePolicies()...)
	for _, sub := range s.subs {
		if sub.err == nil {
			p.Subscriptions = append(p.Subscriptions, carriedOf(sub.plan))
		}
	}
	p.SubscriptionCount = len(s.subs)
	p.Forecast = s.forecast()
	p.Subscriptions = p.Subscriptions[:min(len(p.Subscriptions), switching.MaxCarried)]
	return p
}

func fine(item, format string, args ...any) switching.Finding {
	return switching.Finding{Item: item, Verdict: switching.Fine, Evidence: fmt.Sprintf(format, args...)}
}

func warning(item, remedy, format string, args ...any) switching.Finding {
	return switching.Finding{Item: item, Verdict: switching.Warning, Evidence: fmt.Sprintf(format, args...), Remedy: remedy}
}

func blocker(item, remedy, format string, args ...any) switching.Finding {
	return switching.Finding{Item: item, Verdict: switching.Blocker, Evidence: fmt.Sprintf(format, args...), Remedy: remedy}
}

// passing is a finding that may be over in a moment.
func passing(f switching.Finding) switching.Finding {
	f.Passing = true
	return f
}

// named lists the first of many.
func named[T any](all []T, name func(T) string) string {
	var parts []string
	for _, one := range all[:min(len(all), maxNamed)] {
		parts = append(parts, name(one))
	}
	if more := len(all) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, ", ")
}

func same(s string) string { return s }

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// judgeProxies: every proxy on the roster has to acknowledge, and to serve both clusters (P3, P4).
func (s *survey) judgeProxies() (found []switching.Finding) {
	if len(s.members) == 0 {
		return []switching.Finding{blocker(itemProxies, "start a proxy on this map", "no proxy is on the roster: nobody could hold the topic back")}
	}
	for _, m := range s.members {
		switch promised := promisedAge(m); {
		case m.Live:
		case promised > 0:
			found = append(found, passing(warning(itemProxies, "bring it back, or ask for the switch when that time has passed: before, it is aborted",
				"proxy %s is on the roster and not connected to the map store: the switch does not wait for it once the leader has not seen it for %s (its max_map_age of %s and a margin). Its consumers stay on cluster %s until it has contact",
				m.ID, (promised+switching.AgeMargin(promised)).Round(time.Second), promised, s.req.From)))
		default:
			found = append(found, passing(blocker(itemProxies, fmt.Sprintf("bring it back; or, when its process has ended for good, `pointsman proxies forget %s`", m.ID),
				"proxy %s is on the roster and not connected to the map store: if it still runs, it serves the topic on cluster %s and cannot acknowledge the fence", m.ID, s.req.From)))
		}
		for _, cluster := range []string{s.req.From, s.req.To} {
			if !slices.Contains(m.Clusters, cluster) {
				found = append(found, blocker(itemProxies, fmt.Sprintf("add clusters.%s to its configuration and restart it", cluster),
					"proxy %s does not know cluster %s (it has %s): it would refuse the topic's clients", m.ID, cluster, strings.Join(m.Clusters, ", ")))
			}
		}
	}
	if found == nil {
		found = append(found, fine(itemProxies, "%d on the roster, all connected; all know both clusters", len(s.members)))
	}
	return found
}

func (s *survey) judgeLeader() switching.Finding {
	switch {
	case s.leaderErr != nil:
		return passing(warning(itemLeader, "try again", "which proxy drives the switches cannot be read: %v", s.leaderErr))
	case s.leader == "":
		return passing(warning(itemLeader, "try again in some seconds; if it stays so, look at the logs of the proxies for the leadership", "no proxy drives the switches now: the switch would wait for one"))
	}
	return fine(itemLeader, "proxy %s drives the switches", s.leader)
}

// unknown is the name, of the two of the switch, by which a cluster knows none; "" when there is none such, or it does not matter.
func (s *survey) unknown(f pulsaradmin.Facts) string {
	for _, name := range []string{s.req.From, s.req.To} {
		if len(f.Known) > 0 && !slices.Contains(f.Known, name) && !s.drains() {
			return name
		}
	}
	return ""
}

// judgeClusters: both answer, and have the namespace and the topic with as many partitions (SW-10, SW-11 for the controller's own credentials).
func (s *survey) judgeClusters() (found []switching.Finding) {
	for _, name := range s.noAddress {
		found = append(found, blocker(itemAddress, fmt.Sprintf("set clusters.%s.web_url (as in http://broker:8080) in the configuration of every proxy and restart them; or use --mode immediate, with what that does not promise", name),
			"clusters.%s.web_url is not set: a switch of this mode asks both clusters about the topic", name))
	}
	if found != nil {
		return found
	}
	for _, side := range []struct {
		name  string
		facts pulsaradmin.Facts
		err   error
	}{{s.req.From, s.from, s.fromErr}, {s.req.To, s.to, s.toErr}} {
		f := side.facts
		namespace := namespaceOf(s.req.Topic)
		tenant, _, _ := strings.Cut(namespace, "/")
		switch {
		case errors.Is(side.err, pulsaradmin.ErrForbidden):
			found = append(found, blocker(itemClusters, fmt.Sprintf("give clusters.%s.controller_token_file the token of a role that administers tenant %s there and may consume", side.name, tenant),
				"cluster %s does not accept the controller's credentials: %v", side.name, side.err))
		case pulsaradmin.Unanswered(side.err):
			found = append(found, blocker(itemClusters, mend(side.err)+s.ifDead(side.name), "cluster %s does not answer (a preflight waits for %v at most): %v", side.name, checkTimeout, side.err))
		case side.err != nil:
			found = append(found, blocker(itemClusters, mend(side.err)+s.ifDead(side.name), "cluster %s cannot be asked about the topic: %v", side.name, side.err))
		case !f.Tenant:
			found = append(found, blocker(itemClusters, fmt.Sprintf("pulsar-admin tenants create %s, on cluster %s", tenant, side.name), "tenant %s does not exist on cluster %s", tenant, side.name))
		case !f.Namespace:
			found = append(found, blocker(itemClusters, s.makeNamespace(namespace, side.name), "namespace %s does not exist on cluster %s", namespace, side.name))
		case s.unknown(f) != "":
			found = append(found, blocker(itemClusters, "give the clusters in the configuration of every proxy the names that they have among themselves (pulsar-admin clusters list), or have them know each other by the configured ones",
				"cluster %s knows no cluster %s but %s: replication goes by those names", side.name, s.unknown(f), strings.Join(f.Known, ", ")))
		case f.Policies.Migrated:
			found = append(found, blocker(itemClusters, fmt.Sprintf("pulsar-admin namespaces update-migration-state %s, on cluster %s", namespace, side.name), "namespace %s is marked as migrated on cluster %s, which sends its clients away", namespace, side.name))
		case !f.Exists && side.name == s.req.From:
			found = append(found, blocker(itemTopic, fmt.Sprintf("is the name right? If so, nothing has to be carried: `pointsman routes set %s %s`", s.req.Topic, s.req.To), "the topic does not exist on cluster %s", side.name))
		case !f.Exists && (s.drains() || s.fromErr == nil && !s.from.Exists): // it is made, or there is nothing to be moved
		case !f.Exists && s.fromErr == nil && !s.from.Replicates(s.req.To):
			found = append(found, blocker(itemTopic, "move it without replication, by `--mode drain`; or have it replicated", "the topic does not exist on cluster %s, and cluster %s does not replicate it there", side.name, s.req.From))
		case !f.Exists:
			found = append(found, blocker(itemTopic, "see that replication has created it, or create it with as many partitions", "the topic does not exist on cluster %s", side.name))
		}
	}
	if found != nil {
		return found
	}
	if s.to.Exists && s.from.Partitions != s.to.Partitions {
		return append(found, blocker(itemTopic, fmt.Sprintf("pulsar-admin topics update-partitioned-topic %s -p N, on the cluster that has fewer", s.req.Topic),
			"the topic has %s on cluster %s and %s on cluster %s", partitions(s.from.Partitions), s.req.From, partitions(s.to.Partitions), s.req.To))
	}
	for _, f := range []pulsaradmin.Facts{s.from, s.to} {
		missing := slices.DeleteFunc(slices.Clone(f.Parts), func(p pulsaradmin.PartFacts) bool { return !p.Missing })
		if len(missing) > 0 && !(s.drains() && f.Cluster == s.req.To) {
			found = append(found, blocker(itemTopic, fmt.Sprintf("pulsar-admin topics create-missed-partitions %s, on cluster %s (or wait for replication, when it was created just now)", s.req.Topic, f.Cluster),
				"cluster %s does not have %s yet, because nobody has used it", f.Cluster, named(missing, func(p pulsaradmin.PartFacts) string { return p.Topic })))
		}
	}
	if found == nil {
		topic := fine(itemTopic, "%s on both clusters", partitions(s.from.Partitions))
		if !s.to.Exists {
			topic = fine(itemTopic, "%s; it is made on cluster %s in the same way", partitions(s.from.Partitions), s.req.To)
		}
		found = append(found, fine(itemClusters, "both answer, and have the namespace%s", s.answeredLate()), topic)
	}
	return found
}

// answeredLate says which cluster had to be asked again, in order to go on behind a finding; "" for none.
func (s *survey) answeredLate() (text string) {
	for _, name := range []string{s.req.From, s.req.To} {
		if n := s.late[name]; n > 0 {
			text += fmt.Sprintf("; cluster %s answered %s only when asked again: are its brokers overloaded?", name, count(n, "question"))
		}
	}
	return text
}

// ifDead is a remedy more when it is the old cluster that does not answer.
func (s *survey) ifDead(cluster string) string {
	if cluster != s.req.From {
		return ""
	}
	return fmt.Sprintf("; or, when cluster %s is dead, `pointsman switch start --mode failover --from %s --to %s --dry-run`", cluster, cluster, s.req.To)
}

// mend is the remedy for what could not be read.
func mend(err error) string {
	if pulsaradmin.Unanswered(err) || errors.Is(err, context.DeadlineExceeded) {
		return "see whether its brokers run, and what keeps them busy; then try again"
	}
	return "mend that, and try again"
}

// makeNamespace is how a namespace comes to a cluster.
func (s *survey) makeNamespace(namespace, cluster string) string {
	make := fmt.Sprintf("pulsar-admin namespaces create %s, on cluster %s", namespace, cluster)
	if s.drains() {
		return make + ", with the policies that it has on the other one"
	}
	return make + ", and have it replicated to both clusters"
}

// namespaceOf is that of a topic (base name).
func namespaceOf(topic string) string {
	t, _ := route.ParseTopic(topic)
	return t.Namespace()
}

func partitions(n int) string {
	if n == 0 {
		return "no partitions"
	}
	return count(n, "partition")
}

// judgeSchema: pending SENDs carry the number of their schema version (SW-10).
func (s *survey) judgeSchema() []switching.Finding {
	if d := pulsaradmin.SchemaDifference(s.from, s.to); d != "" {
		return []switching.Finding{blocker(itemSchema, fmt.Sprintf("register the versions on cluster %s in the order of cluster %s (`pulsar-admin schemas upload`), on a topic without other versions", s.req.To, s.req.From),
			"%s: messages say their schema by its number, so readers would decode them by another one", d)}
	}
	if d := pulsaradmin.SchemaDifference(s.to, s.from); d != "" {
		if s.req.Reversible {
			return []switching.Finding{blocker(itemSchema, "register the missing versions, in order", "the way back: %s", d)}
		}
		return []switching.Finding{warning(itemSchema, "register the missing versions, in order, if the topic is to come back", "the way back: %s", d)}
	}
	return []switching.Finding{fine(itemSchema, "%s, the same numbers on both clusters", count(len(s.from.Schemas), "version"))}
}

// judge says whether replication of one direction is configured and alive: by positions, never by "connected" (SW-09, GR-01).
func (r replication) judge(f pulsaradmin.Facts, to string) (why, remedy string) {
	switch {
	case !f.Replicates(to):
		return fmt.Sprintf("cluster %s replicates the topic to [%s] and not to %s", f.Cluster, strings.Join(f.ReplicatedTo(), ", "), to),
			fmt.Sprintf("`pulsar-admin namespaces set-clusters --clusters %s %s`, on cluster %s; the names under clusters must be those that the clusters call themselves by",
				strings.Join(append(slices.Clone(f.ReplicatedTo()), to), ","), namespaceOf(f.Topic), f.Cluster)
	case r.err != nil:
		return fmt.Sprintf("how far cluster %s has replicated the topic cannot be read: %v", f.Cluster, r.err), mend(r.err)
	}
	var dead []string
	for i := range r.after {
		alive, why := pulsaradmin.Alive(r.before[i], r.after[i])
		if empty := !r.after[i].Exists && r.after[i].Last.Entry < 0; !alive && !empty {
			dead = append(dead, fmt.Sprintf("%s: %s", f.Parts[i].Topic, why))
		}
	}
	if dead != nil {
		return named(dead, same), fmt.Sprintf("look at the replicator in the log of the broker of cluster %s; `pulsar-admin topics unload` of the topic there starts it anew", f.Cluster)
	}
	return "", ""
}

// backlog is what the replicators had to send, at the second look and at the first.
func (r replication) backlog() (now, before int64) {
	for i := range r.after {
		now += r.after[i].Backlog
		before += r.before[i].Backlog
	}
	return now, before
}

// judgeReplication: what is on the old cluster has to come to the new one, soon (SW-08, SW-17).
func (s *survey) judgeReplication() switching.Finding {
	if why, remedy := s.forth.judge(s.from, s.req.To); why != "" {
		if !s.from.Replicates(s.req.To) {
			remedy += "; or move it without replication, by `--mode drain`"
		}
		return blocker(itemReplication, remedy, "%s", why)
	}
	now, before := s.forth.backlog()
	switch {
	case now >= largeBacklog:
		return blocker(itemReplication, "wait until it has fallen (it was read twice, so that its speed can be seen)", "%d entries wait to be replicated from %s to %s (%d a moment before): they would have to be sent while publishers wait", now, s.req.From, s.req.To, before)
	case now >= smallBacklog:
		return warning(itemReplication, "wait until it has fallen; or accept that publishers wait for it", "%d entries wait to be replicated from %s to %s (%d a moment before)", now, s.req.From, s.req.To, before)
	}
	return fine(itemReplication, "from %s to %s: alive, %d entries to be sent", s.req.From, s.req.To, now)
}

func (s *survey) judgeWayBack() switching.Finding {
	why, remedy := s.back.judge(s.to, s.req.From)
	switch {
	case why == "":
		return fine(itemWayBack, "replication from %s to %s is alive: the switch can be reversed", s.req.To, s.req.From)
	case s.req.Reversible:
		return blocker(itemWayBack, remedy, "%s: there would be no way back", why)
	}
	return warning(itemWayBack, remedy, "%s: what is published after the switch would not come back to %s, so that it could not be reversed", why, s.req.From)
}

// judgeSubscriptions: each has a place on the new cluster, and nobody sits there.
func (s *survey) judgeSubscriptions() (found []switching.Finding) {
	ways, waiting, bare := map[string]int{}, 0, int64(-1)
	for _, sub := range s.subs {
		switch {
		case sub.err == nil:
		case sub.ahead():
			waiting++
			continue
		case errors.Is(sub.err, context.DeadlineExceeded) && pulsaradmin.Asked(sub.err) == 1: // there were too many to look at
			found = append(found, warning(itemSubscriptions, "the switch itself has more time before the fence; or try again", "%v was not looked at within %v", sub, checkTimeout))
			continue
		case errors.Is(sub.err, pulsaradmin.ErrForbidden):
			found = append(found, blocker(itemSubscriptions, "let the role of the controller consume from the namespace, on both clusters", "%v: %v", sub, sub.err))
			continue
		default:
			found = append(found, blocker(itemSubscriptions, mend(sub.err), "%v: %v", sub, sub.err))
			continue
		}
		plan := sub.plan
		ways[string(plan.How)]++
		if plan.By.Bare() {
			bare = max(bare, 0) + plan.Unacked
		}
		switch {
		case plan.Missing > 0:
			found = append(found, blocker(itemSubscriptions, fmt.Sprintf("have them consumed on cluster %s first; and set a retention on cluster %s that keeps them", s.req.From, s.req.To),
				"%v: %d entries that are not acknowledged have no copy on cluster %s (%s)", sub, plan.Missing, s.req.To, plan.Note))
		case plan.Unsettled:
			found = append(found, warning(itemSubscriptions, fmt.Sprintf("have it consumed on cluster %s first, or look after the switch whether messages that were published to other clusters are missing", s.req.From),
				"%v: it may skip messages that came from other clusters (%s)", sub, plan.Note))
		case plan.Repeated > 0:
			found = append(found, warning(itemSubscriptions, "accept that they are delivered twice; or have the oldest unacknowledged message acknowledged first", "%v: %d entries come again (%s)", sub, plan.Repeated, plan.Note))
		case !plan.How.Exact():
			found = append(found, warning(itemSubscriptions, "accept that messages are delivered twice", "%v: its place on cluster %s is found by %s only (%s)", sub, s.req.To, plan.How, plan.Note))
		}
	}
	found = s.limited(found)
	var alone []string // only the new cluster has them
	for _, part := range s.to.Parts {
		for _, name := range slices.Sorted(maps.Keys(part.Stats.Subscriptions)) {
			there := part.Stats.Subscriptions[name]
			switch _, known := s.subscriptionsOf(part.Topic)[name]; {
			case !there.Durable || pulsaradmin.Reserved(name):
			case !known:
				alone = append(alone, name)
			case len(there.Consumers) > 0:
				found = append(found, blocker(itemSubscriptions, "end that client: it does not come through the proxies", "subscription %q of %s is in use on cluster %s already, by %v", name, part.Topic, s.req.To, there.Consumers[0]))
			}
		}
	}
	slices.Sort(alone)
	if alone = slices.Compact(alone); len(alone) > 0 {
		found = append(found, warning(itemSubscriptions, fmt.Sprintf("`pulsar-admin topics unsubscribe -s NAME %s`, on cluster %s, for those that nobody needs; or accept it", s.req.Topic, s.req.To),
			"cluster %s has %s that cluster %s does not have: %s. They are not carried: their backlog grows, and whoever subscribes again gets all of it", s.req.To, count(len(alone), "subscription"), s.req.From, named(alone, same)))
	}
	if found != nil {
		return found
	}
	var how []string
	for _, way := range slices.Sorted(maps.Keys(ways)) {
		how = append(how, fmt.Sprintf("%d by %s", ways[way], way))
	}
	if waiting > 0 {
		how = append(how, fmt.Sprintf("%d at messages that are being replicated just now", waiting))
	}
	text := strings.Join(append([]string{count(len(s.subs), "subscription") + " to carry, all exactly"}, how...), ": ")
	if bare >= 0 {
		text += fmt.Sprintf("; the copies on cluster %s do not say where they lay on cluster %s, whose brokers are older than 4.0.4: what clients acknowledge while the topic moves comes again, at most the %d messages that they have now or as many as then",
			s.req.To, s.req.From, bare)
	}
	return append(found, fine(itemSubscriptions, "%s", text))
}

// limited keeps the first findings of each verdict and counts the others: a topic may have thousands of subscriptions.
func (s *survey) limited(found []switching.Finding) []switching.Finding {
	seen := map[switching.Verdict]int{}
	kept := slices.DeleteFunc(slices.Clone(found), func(f switching.Finding) bool { seen[f.Verdict]++; return seen[f.Verdict] > maxNamed })
	for _, v := range []switching.Verdict{switching.Blocker, switching.Warning} {
		if more := seen[v] - maxNamed; more > 0 {
			kept = append(kept, switching.Finding{Item: itemSubscriptions, Verdict: v, Evidence: fmt.Sprintf("and %d more subscriptions with a %s", more, v), Remedy: "as above"})
		}
	}
	return kept
}

// subscriptionsOf are the statistics of a partition's subscriptions on the old cluster.
func (s *survey) subscriptionsOf(topic string) map[string]pulsaradmin.SubscriptionStats {
	if i := slices.IndexFunc(s.from.Parts, func(p pulsaradmin.PartFacts) bool { return p.Topic == topic }); i >= 0 {
		return s.from.Parts[i].Stats.Subscriptions
	}
	return nil
}

// judgeRetention: what nobody has subscribed to on the new cluster yet is removed there as soon as it is stored, unless retention keeps it.
func (s *survey) judgeRetention() switching.Finding {
	var without []string
	for _, sub := range s.subs {
		i := slices.IndexFunc(s.to.Parts, func(p pulsaradmin.PartFacts) bool { return p.Topic == sub.topic })
		if i < 0 || sub.err != nil && !sub.ahead() || sub.sub.Backlog == 0 {
			continue
		}
		if _, there := s.to.Parts[i].Stats.Subscriptions[sub.sub.Name]; !there {
			without = append(without, sub.String())
		}
	}
	kept := retains(s.to)
	switch {
	case len(without) == 0:
		return fine(itemRetention, "no subscription with a backlog is new on cluster %s", s.req.To)
	case !kept:
		return warning(itemRetention, fmt.Sprintf("`pulsar-admin namespaces set-retention --time TIME --size -1 %s`, on cluster %s, with a time longer than the age of the oldest backlog; the switch creates the subscriptions before the fence, so what is there then stays", namespaceOf(s.req.Topic), s.req.To),
			"cluster %s keeps no messages without a subscription, and does not have %s yet: a backlog may be removed before it is carried", s.req.To, named(without, same))
	}
	return fine(itemRetention, "cluster %s keeps messages; new there: %s", s.req.To, count(len(without), "subscription"))
}

// retains tells whether a topic keeps messages that nobody has subscribed to, by a policy.
func retains(f pulsaradmin.Facts) bool {
	policy := f.Policies.Retention
	if own, ok := f.TopicPolicies["retention"]; ok {
		policy = own
	}
	var r struct {
		Minutes int64 `json:"retentionTimeInMinutes"`
		MB      int64 `json:"retentionSizeInMB"`
	}
	return json.Unmarshal(policy, &r) == nil && r.Minutes != 0 && r.MB != 0
}

// judgeReaders: they are not carried, and go on by the ids that they have (SW-02, SW-03).
func (s *survey) judgeReaders() switching.Finding {
	n, anew := 0, 0
	for _, part := range s.from.Parts {
		for _, sub := range part.Stats.Subscriptions {
			if sub.Durable {
				continue
			}
			n++
			if slices.ContainsFunc(sub.Consumers, func(c pulsaradmin.Consumer) bool { return strings.HasPrefix(c.ClientVersion, beginsAnew) }) {
				anew++
			}
		}
	}
	switch {
	case s.nativeIDs:
		return warning(itemReaders, "set message_ids to monotonic on every proxy, or make sure that no client reads or acknowledges cumulatively", "message_ids is native: readers (%d now) and cumulative acknowledgements may skip messages where the ids of cluster %s are lower", n, s.req.To)
	case anew > 0:
		return warning(itemReaders, "see that their applications bear messages that they have had, or end them before", "%s of the Rust client, whose readers begin anew where they were told to begin whenever their topic is closed, without a proxy too", count(anew, "reader"))
	case n > 0:
		return fine(itemReaders, "%s (or non-durable consumers) go on at the message after the last one that they got", count(n, "reader"))
	}
	return fine(itemReaders, "none")
}

func (s *survey) publishers() (all []pulsaradmin.Publisher) {
	for _, part := range s.from.Parts {
		all = append(all, part.Stats.Publishers...)
	}
	return all
}

// judgeProducers: replication holds the new cluster's topic with a producer of its own, so that no other may have it alone (measured:
// ProducerFenced).
func (s *survey) judgeProducers() switching.Finding {
	all := s.publishers()
	alone := slices.DeleteFunc(slices.Clone(all), func(p pulsaradmin.Publisher) bool { return p.AccessMode == "" || p.AccessMode == "Shared" })
	if len(alone) > 0 {
		return blocker(itemProducers, "have them connect with access mode Shared for the time of the switch",
			"%s: while %s replicates to %s, only Shared producers are let in there", named(alone, func(p pulsaradmin.Publisher) string { return fmt.Sprintf("%v has access mode %s", p, p.AccessMode) }), s.req.From, s.req.To)
	}
	return fine(itemProducers, "%d, all with access mode Shared", len(all))
}

// beginsAnew is how the version of the client begins whose readers ask for their first position again when they come back (measured).
const beginsAnew = "pulsar-rs-v"

// measured are the clients that were put through switches, by how their versions begin. They send again what had no receipt.
var measured = []string{"Pulsar-Java-v", "Pulsar-Go-v", "Pulsar Go ", "Pulsar-CPP-v", "pulsar-rs-v"}

func (s *survey) judgeClients() switching.Finding {
	versions := map[string]int{}
	for _, part := range s.from.Parts {
		for _, p := range part.Stats.Publishers {
			versions[p.ClientVersion]++
		}
		for _, sub := range part.Stats.Subscriptions {
			for _, c := range sub.Consumers {
				versions[c.ClientVersion]++
			}
		}
	}
	var strange []string
	for _, v := range slices.Sorted(maps.Keys(versions)) {
		if !slices.ContainsFunc(measured, func(prefix string) bool { return strings.HasPrefix(v, prefix) }) {
			strange = append(strange, fmt.Sprintf("%q (%d)", v, versions[v]))
		}
	}
	if strange != nil {
		return warning(itemClients, "try a switch with such a client on a topic that does not matter, or accept it", "of these client versions it is not known whether they send again what had no receipt: %s", named(strange, same))
	}
	if len(versions) == 0 {
		return fine(itemClients, "none are connected")
	}
	return fine(itemClients, "%s", named(slices.Sorted(maps.Keys(versions)), same))
}

// judgeBypass: who publishes past the proxies is not fenced, and the switch will find it and abort.
func (s *survey) judgeBypass() (found []switching.Finding) {
	publishers := s.publishers()
	if len(s.req.Handles.Unasked) > 0 {
		found = append(found, passing(warning(itemBypass, "see that the proxies reach each other's listeners.ops", "not all proxies could be asked for their producers (%s), so clients that do not come through them cannot be told from others", named(s.req.Handles.Unasked, same))))
	} else if len(publishers) > s.req.Handles.Producers {
		found = append(found, warning(itemBypass, "find the client that connects to the brokers directly: the switch aborts when it is still there in the fence",
			"cluster %s has %d producers on the topic, and the proxies have %d: %s", s.req.From, len(publishers), s.req.Handles.Producers, named(publishers, pulsaradmin.Publisher.String)))
	}
	var there []pulsaradmin.Publisher
	for _, part := range s.to.Parts {
		there = append(there, part.Stats.Publishers...)
	}
	if len(there) > 0 {
		found = append(found, warning(itemBypass, "end that client: it does not come through the proxies", "somebody publishes on cluster %s already: %s", s.req.To, named(there, pulsaradmin.Publisher.String)))
	}
	if found == nil {
		found = append(found, fine(itemBypass, "cluster %s has no more producers on the topic than the proxies", s.req.From))
	}
	return found
}

// judgeTransactions: they belong to one cluster (SW-15).
func (s *survey) judgeTransactions() switching.Finding {
	var open, ended int64
	for _, part := range s.from.Parts {
		open += part.Stats.OngoingTxn
		ended += part.Stats.CommittedTxn + part.Stats.AbortedTxn
	}
	switch {
	case open > 0:
		return blocker(itemTransactions, "wait until they are committed or aborted", "%d open transactions have messages in the topic: they could not be committed on cluster %s", open, s.req.To)
	case ended > 0 && s.returns():
		return blocker(itemTransactions, fmt.Sprintf("let the drain end, then drain from %s to %s", s.req.From, s.req.To), "%d transactions have ended on cluster %s since the topic was loaded: their messages cannot be copied", ended, s.req.From)
	case ended > 0 && s.drains():
		return fine(itemTransactions, "none is open; the messages of %d that have ended are consumed on cluster %s", ended, s.req.From)
	case ended > 0 && s.from.TellsTransactions():
		return fine(itemTransactions, "none is open; of %d that have ended cluster %s has what was committed, as ordinary messages", ended, s.req.To)
	case ended > 0:
		return blocker(itemTransactions, "switch when the messages of transactions are consumed and removed by retention, and no client uses transactions on the topic any more; or --mode drain, which copies nothing",
			"%d transactions have ended since the topic was loaded, and brokers of cluster %s (version %q) do not tell what was aborted, as those from 4.0 on do", ended, s.req.From, s.from.Version)
	}
	return fine(itemTransactions, "none")
}

func (s *survey) judgeDelayed() switching.Finding {
	var n int64
	for _, part := range s.from.Parts {
		for _, sub := range part.Stats.Subscriptions {
			n += sub.Delayed
		}
	}
	if n > 0 {
		return warning(itemDelayed, fmt.Sprintf("see that cluster %s has delayedDeliveryEnabled in broker.conf", s.req.To), "%d messages are delayed: they keep their time if cluster %s delivers with delay, and come at once if not", n, s.req.To)
	}
	return fine(itemDelayed, "none")
}

func (s *survey) judgeSiblings() switching.Finding {
	if s.siblingErr != nil {
		return warning(itemSiblings, mend(s.siblingErr), "the DLQ and RETRY topics cannot be listed: %v", s.siblingErr)
	}
	left := slices.DeleteFunc(slices.Clone(s.siblings), func(x sibling) bool { return x.cluster == s.req.To || slices.Contains(s.req.With, x.topic) })
	if len(left) > 0 {
		return warning(itemSiblings, "move them with the topic: name them with --topic as well", "DLQ and RETRY topics stay behind: %s", named(left, func(x sibling) string { return x.topic + " (on " + x.cluster + ")" }))
	}
	if len(s.siblings) == 0 {
		return fine(itemSiblings, "no DLQ or RETRY topics")
	}
	return fine(itemSiblings, "%s, moving too or there already", count(len(s.siblings), "DLQ or RETRY topic"))
}

func (s *survey) judgeCompaction() switching.Finding {
	for i, part := range s.from.Parts {
		if part.Internal.Compacted && !s.to.Parts[i].Internal.Compacted {
			return warning(itemCompaction, fmt.Sprintf("pulsar-admin topics compact %s, on cluster %s", part.Topic, s.req.To), "%s is compacted on cluster %s and not on cluster %s: who reads compacted reads the whole log there", part.Topic, s.req.From, s.req.To)
		}
	}
	return fine(itemCompaction, "as on cluster %s", s.req.From)
}

func (s *survey) judgePolicies() (found []switching.Finding) {
	for _, d := range pulsaradmin.PolicyDifferences(s.from, s.to) {
		found = append(found, warning(itemPolicies, "make them equal, or accept what changes for clients", "%s", d))
	}
	if found == nil {
		found = append(found, fine(itemPolicies, "equal, as far as clients see them"))
	}
	return found
}

// forecast is what the switch would cost.
func (s *survey) forecast() *switching.Forecast {
	f := &switching.Forecast{}
	connections := map[string]bool{}
	sendRate := 0.0
	for _, part := range s.from.Parts {
		f.Producers += len(part.Stats.Publishers)
		for _, p := range part.Stats.Publishers {
			connections[p.Address] = true
		}
		for _, sub := range part.Stats.Subscriptions {
			f.Consumers += len(sub.Consumers)
			for _, c := range sub.Consumers {
				connections[c.Address] = true
			}
		}
		f.BytesIn += part.Stats.BytesIn
		f.BytesOut += part.Stats.BytesOut
		sendRate += part.Stats.Replication[s.req.To].RateOut
	}
	f.Connections = len(connections)
	for _, sub := range s.subs {
		f.Duplicates += sub.plan.Unacked + sub.plan.Repeated
		if sub.plan.By.Bare() {
			f.Bare++
		}
	}
	f.Unreplicated, _ = s.forth.backlog()
	catchUp := time.Duration(float64(f.Unreplicated) / max(sendRate, slowReplication) * float64(time.Second))
	f.HoldMillis = millis((acksTook + catchUp + s.planTook + looksInFence*s.readTook).Round(time.Millisecond))
	return f
}
