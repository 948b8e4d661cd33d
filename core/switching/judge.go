package switching

import (
	"fmt"
	"slices"
	"strings"

	"pointsman/core/route"
)

// ParseMode accepts the modes that exist, and names them for any other; "" is the planned one.
func ParseMode(mode string) (Mode, error) {
	switch Mode(mode) {
	case ModePlanned, "":
		return ModePlanned, nil
	case ModeImmediate:
		return ModeImmediate, nil
	case ModeDrain:
		return ModeDrain, nil
	case ModeFailover:
		return ModeFailover, nil
	}
	return "", fmt.Errorf("mode %q does not exist; those that exist are %s, %s, %s and %s", mode, ModePlanned, ModeDrain, ModeImmediate, ModeFailover)
}

// Promised says what a switch of this mode guarantees, a sentence each.
func Promised(m Mode) []string {
	switch m {
	case ModeDrain:
		return []string{
			"one writer cluster: publishers wait for some 100 ms, as in planned mode, and then all of them are on the new cluster",
			"nothing acknowledged is lost, though nothing is replicated: what is on the old cluster is consumed there, and the new one keeps for each subscription what is published after the switch",
			"order: a subscription reads the new cluster only when it has nothing left on the old one, where nobody publishes any more",
			"the way back, as long as every subscription reads the old cluster (one that is caught up leaves it after about a second) and none had a message on the new one: `pointsman switch reverse` copies what was published there, and nobody has to move a cursor",
		}
	case ModeImmediate:
		return []string{
			"one cluster in the map: it changes in one write; every proxy that sees the map store closes the producers and consumers of the topic, and no others, and lets none through to the old cluster any more",
			"nothing is deleted: what the old cluster has acknowledged stays there, and comes to the new one by replication, where that is configured",
		}
	case ModeFailover:
		return []string{
			"no need of the old cluster: it is not called, and nothing that it owes is waited for",
			"one cluster in the map: it changes in one write for each topic or rule; every proxy that sees the map store closes their producers and consumers, and lets none through to the old cluster any more",
			"nothing on the new cluster is skipped: subscriptions that were last seen on the old one and that it lacks are made there at the oldest message, unless you say --subscriptions none",
		}
	}
	return []string{
		"one writer cluster: at no moment do both clusters take a publish; publishers wait meanwhile, 10 s at most while the proxy that leads lives",
		"nothing acknowledged is lost: the map changes only when the new cluster has everything; whatever goes wrong before that gives the topic back to the old one",
		"order and cursors: each producer's messages stay in order, and every subscription goes on where it is, acknowledged ranges included; where that cannot be found exactly messages come again, and none is skipped",
	}
}

// NotPromised says what a switch of this mode does not guarantee, a sentence each.
func NotPromised(m Mode) []string {
	if m == ModeDrain {
		return []string{
			"an end: the switch is done when every subscription has acknowledged everything on the old cluster; one that nobody consumes keeps it open, and both clusters are needed until then",
			"history: nothing of before the switch is copied; when it is done, readers and seeks find only what was published after it",
			"duplicates: what was delivered and not acknowledged comes again to a client that has to reconnect, as after any reconnect",
		}
	}
	if m == ModeFailover {
		return []string{
			"one writer cluster: a proxy that is cut off from the map store, or a client that bypasses the proxies, may still write to the old cluster, if that lives",
			"nothing acknowledged is lost: what the old cluster had acknowledged and not replicated is missing on the new one until the old one is back (`pointsman switch salvage`)",
			"exact cursors: subscriptions continue where the new cluster has them; what was acknowledged on the old one may come again, and a subscription that is made anew begins with the oldest message",
			"order: what had not been replicated comes behind newer messages, when the old cluster is back and goes on replicating",
			"the way back: nothing ever switches back by itself; `pointsman switch reverse`, or a planned switch, does it when you ask",
		}
	}
	if m != ModeImmediate {
		return []string{"duplicates: what was delivered and not acknowledged comes again, as after any reconnect; the forecast counts it"}
	}
	return []string{
		"duplicates: messages that are in flight at the flip may be stored on both clusters",
		"order: a producer may write on the new cluster before replication has brought its last messages there",
		"cursors: subscriptions continue where the new cluster has them; what was acknowledged on the old one may come again, and without replication nothing follows",
		"readers: message ids of the old cluster mean nothing on the new one; a running reader or cumulative acknowledgement may skip messages there",
	}
}

// Outcome is how far the proxies have come with a switch.
type Outcome struct {
	// Waiting are the members that have neither reported nor restarted.
	Waiting []string
	// Restarted are the members that are another process now: their connections ended with the old one.
	Restarted []string
	// Overtaken is what has changed the same topic or rule since ("switch X", "a later change"). Whoever has not reported
	// may have skipped this switch and act on the later one; the map leads nobody to Record.To any more.
	Overtaken string
	// Producers, Consumers and Unresolved sum up the acks.
	Producers, Consumers, Unresolved int
}

// Judge compares the acks of the eviction with the members that have to report. running are the proxies that are alive now.
func Judge(expect []Member, acks []Ack, running []Member) Outcome {
	var o Outcome
	// A planned switch has acks of earlier phases as well: those tell of no handle that was closed.
	acks = slices.DeleteFunc(slices.Clone(acks), func(a Ack) bool { return a.Phase != "" && a.Phase != StateEvicting })
	for _, a := range acks {
		o.Producers += a.Producers
		o.Consumers += a.Consumers
		o.Unresolved += a.Unresolved
	}
	for _, m := range expect {
		if slices.ContainsFunc(acks, func(a Ack) bool { return a.Proxy == m.ID && a.Incarnation == m.Incarnation }) {
			continue
		}
		// Being gone proves nothing: a proxy that is cut off from the store may go on with the old map. Only its own
		// successor proves that the process has ended.
		if slices.ContainsFunc(running, func(r Member) bool { return r.ID == m.ID && r.Incarnation != m.Incarnation }) {
			o.Restarted = append(o.Restarted, m.ID)
			continue
		}
		o.Waiting = append(o.Waiting, m.ID)
	}
	return o
}

// Done tells whether nobody is waited for.
func (o Outcome) Done() bool { return len(o.Waiting) == 0 || o.Overtaken != "" }

// Note is what an operator should know about a switch that ends with this outcome; "" when there is nothing.
func (o Outcome) Note() string {
	var parts []string
	if o.Overtaken != "" {
		parts = append(parts, "overtaken by "+o.Overtaken)
	} else if len(o.Waiting) > 0 {
		parts = append(parts, "no report from "+strings.Join(o.Waiting, ", ")+": clients there may still be on the old cluster; see its log, or restart it")
	}
	if len(o.Restarted) > 0 {
		parts = append(parts, "restarted meanwhile: "+strings.Join(o.Restarted, ", "))
	}
	if o.Unresolved > 0 {
		parts = append(parts, fmt.Sprintf("%d messages had no receipt when their producer was closed: each may be stored twice", o.Unresolved))
	}
	return strings.Join(parts, "; ")
}

// NamespacePlan is how a namespace moves: first the exact entries that are elsewhere, one by one, then the rule, then the
// exact entries that the rule makes superfluous are removed.
type NamespacePlan struct {
	Topics    []string // base names to flip, sorted
	Rule      bool     // the rule must change
	Redundant []string // base names whose entries the rule replaces afterwards, sorted
}

// PlanNamespace plans the move of a namespace to the cluster to.
func PlanNamespace(t *route.Table, namespace, to, listenerDefault string) NamespacePlan {
	var p NamespacePlan
	for e := range t.Each {
		topic, err := route.ParseTopic(e.Topic)
		if err != nil || e.Floor() || !topic.In(namespace) {
			continue
		}
		if e.Cluster != to {
			p.Topics = append(p.Topics, e.Topic)
		}
		p.Redundant = append(p.Redundant, e.Topic)
	}
	slices.Sort(p.Topics)
	slices.Sort(p.Redundant)
	p.Rule = t.DecideScope(namespace, listenerDefault).Cluster != to
	return p
}

// Empty tells that the namespace is there already.
func (p NamespacePlan) Empty() bool { return len(p.Topics) == 0 && !p.Rule }
