package route

// MaxEpoch is the highest epoch that a table accepts: more moves than any topic will see, so a higher one is a
// broken value, which must not be allowed to wrap around.
const MaxEpoch = 1<<32 - 1

// This file computes what to store. The promise: whatever is set, removed, imported or ruled, in whatever order, the
// epoch decided for a topic never shrinks, and it grows whenever the topic's cluster changes. A connection's handle captures
// its epoch, so a cluster that changed without it would go unnoticed.
//
// For the promise to hold the caller must compute each step from the table that the step before it left (WithEntry,
// WithRule), and its compare-and-set must cover every entry and rule that the computation looked at: the rules
// above the changed name and, for a rule, the floors below it.
//
// listenerDefault below is the default cluster of all listeners. When they differ, pass "": then whatever leaves or joins
// the listeners' defaults counts as a move. Changing a listener's default is configuration, outside of the promise: who needs
// connected clients to follow writes a default rule instead.

// NextEpoch is the epoch of a move away from all of these.
func NextEpoch(epochs ...uint64) uint64 {
	next := uint64(0)
	for _, e := range epochs {
		next = max(next, e)
	}
	return next + 1
}

// Move is the entry that maps a topic to the cluster to. before is its present entry (nil for none), decided what
// Table.Decide says of it now. The epoch grows if that changes the cluster, and otherwise stays as decided; an entry that
// would say the same is returned as it is.
func Move(topic Topic, before *Entry, decided Decision, to, switchID string) Entry {
	epoch := decided.Epoch
	if before != nil {
		epoch = max(epoch, before.Epoch)
	}
	if decided.Cluster != to {
		epoch = NextEpoch(epoch)
	} else if before != nil && before.Cluster == to {
		return *before
	}
	return Entry{Topic: topic.Base(), Cluster: to, Epoch: epoch, SwitchID: switchID}
}

// Remove is what must stay of an entry so that rules decide the topic again. byRule is what Table.DecideByRule says of it. It
// is nil when the rule's own epoch suffices, else a floor.
func Remove(before Entry, byRule Decision) *Entry {
	need := before.Epoch
	if before.Cluster != byRule.Cluster && !before.Floor() {
		need = NextEpoch(need)
	}
	if need <= byRule.Epoch {
		return nil
	}
	return &Entry{Topic: before.Topic, Epoch: need}
}

// SetRule is the rule that maps a scope ("" for the default) to the cluster to. If that changes the cluster of the topics
// that follow it, its epoch is above that of the rule that decided them so far, above every floor in the scope, and above
// every exact entry in it that names another cluster; it is not below those that name the same one. So entries may be removed in favour of
// the rule and leave no floor behind, and topics that moved one by one before their rule keep their epoch where they all have the same.
// If it does not, the rule has the epoch of the one that decided so far, for nothing moves; entries above it leave floors.
func SetRule(t *Table, scope, to, switchID, listenerDefault string) (Rule, error) {
	if err := checkScope(scope); err != nil {
		return Rule{}, err
	}
	before, exists := t.Rule(scope)
	decided := t.DecideScope(scope, listenerDefault)
	if decided.Cluster == to {
		if exists && before.Cluster == to {
			return before, nil
		}
		return Rule{Scope: scope, Cluster: to, Epoch: decided.Epoch, SwitchID: switchID}, nil
	}
	here, elsewhere := t.highest(scope, to)
	return Rule{Scope: scope, Cluster: to, Epoch: max(here, NextEpoch(decided.Epoch, elsewhere)), SwitchID: switchID}, nil
}

// RemoveRule is what must stay of a scope's rule so that the next rule above decides. It is nil when nothing must, else a
// floor: a rule without a cluster, which only carries an epoch that has to survive.
func RemoveRule(t *Table, scope, listenerDefault string) (*Rule, error) {
	before, ok := t.Rule(scope)
	if !ok {
		return nil, checkScope(scope)
	}
	without, err := t.WithRule(scope, nil)
	if err != nil {
		return nil, err
	}
	now, above := t.DecideScope(scope, listenerDefault), without.DecideScope(scope, listenerDefault)
	need := now.Epoch
	if !before.Floor() && now.Cluster != above.Cluster {
		here, elsewhere := t.highest(scope, "")
		need = NextEpoch(need, here, elsewhere)
	}
	if need <= above.Epoch {
		return nil, nil
	}
	return &Rule{Scope: scope, Epoch: need}, nil
}

// highest is the highest epoch within a scope of the entries that name the cluster to, and of everything else: other entries, floors, and floors of rules.
func (t *Table) highest(scope, to string) (here, elsewhere uint64) {
	for _, s := range t.shards {
		for r, ok := s.next(0); ok; r, ok = s.next(r) {
			highest := &elsewhere
			if to != "" && s.cluster(r) == to {
				highest = &here
			}
			if s.epoch(r) <= *highest {
				continue
			}
			if topic, err := ParseTopic(s.name(r)); err == nil && topic.In(scope) {
				*highest = s.epoch(r)
			}
		}
	}
	for i := range t.rules {
		if r := &t.rules[i]; r.Floor() && scopeIn(r.Scope, scope) {
			elsewhere = max(elsewhere, r.Epoch)
		}
	}
	return here, elsewhere
}

// scopeIn tells whether every topic of inner is one of outer.
func scopeIn(inner, outer string) bool {
	return outer == "" || inner == outer ||
		len(inner) > len(outer) && inner[:len(outer)] == outer && inner[len(outer)] == '/'
}
