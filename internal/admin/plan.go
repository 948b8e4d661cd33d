package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// planner computes the changes of one command step by step: each step sees the table that the one before it left, which is
// what core/route's epochs need.
type planner struct {
	before *route.Table // as the store has it
	table  *route.Table // after the steps so far
	def    string       // the listeners' default cluster
	steps  []step
}

// step is one entry or rule that changes.
type step struct {
	target target
	entry  *store.EntryChange
	rule   *store.RuleChange
	// guards are the rules that the step's epoch was computed from: if one of them changes before the write, the write must fail.
	guards []store.RuleChange
	moved  bool // the decided cluster changes
}

// change is the step as clients are told of it.
func (s step) change() RouteChange {
	c := RouteChange{Name: s.target.name(), Moved: s.moved}
	if s.entry != nil {
		c.Before, c.After = entryRoute(s.entry.Before), entryRoute(s.entry.After)
	} else {
		c.Before, c.After = ruleRoute(s.rule.Before), ruleRoute(s.rule.After)
	}
	return c
}

// plan reads what the store has now: the rules and either the one entry named, or all entries.
func (s *Server) plan(ctx context.Context, base string) (*planner, error) {
	rules, err := s.store.Rules(ctx)
	if err != nil {
		return nil, err
	}
	buckets := map[int][]route.Entry{}
	if base != "" {
		e, ok, err := s.store.Entry(ctx, base)
		if err != nil {
			return nil, err
		}
		if ok {
			buckets[route.Bucket(base)] = []route.Entry{e}
		}
	} else {
		entries, err := s.store.Entries(ctx)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			b := route.Bucket(e.Topic)
			buckets[b] = append(buckets[b], e)
		}
	}
	table, _, err := route.Empty().With(buckets, &rules)
	if err != nil {
		return nil, fmt.Errorf("the stored map holds something unusable, so no change is computed from it: %w", err)
	}
	return &planner{before: table, table: table, def: s.proxy.DefaultCluster()}, nil
}

// set maps a target to a cluster; minEpoch (of an import) is never undercut. It tells whether anything changes.
func (p *planner) set(t target, cluster string, minEpoch uint64, switchID string) (bool, error) {
	if !t.isTopic {
		return p.setRule(t, cluster, minEpoch, switchID)
	}
	base := t.topic.Base()
	before, err := p.entry(base)
	if err != nil {
		return false, err
	}
	after := route.Move(t.topic, before, p.table.Decide(t.topic, p.def), cluster, switchID)
	after.Epoch = max(after.Epoch, minEpoch)
	return p.putEntry(t, before, &after)
}

// remove lets the rules decide; minEpoch is kept as a floor.
func (p *planner) remove(t target, minEpoch uint64) (bool, error) {
	if !t.isTopic {
		before, ok := p.table.Rule(t.scope)
		if !ok && minEpoch == 0 || ok && before.Floor() && before.Epoch >= minEpoch {
			return false, nil // a floor that another makes superfluous stays: removing it is not worth a write
		}
		after, err := route.RemoveRule(p.table, t.scope, p.def)
		if err != nil {
			return false, badName(err)
		}
		if without, err := p.table.WithRule(t.scope, after); err == nil && without.DecideScope(t.scope, p.def).Epoch < minEpoch {
			after = &route.Rule{Scope: t.scope, Epoch: minEpoch}
		}
		return p.putRule(t, rulePointer(before, ok), after)
	}
	before, err := p.entry(t.topic.Base())
	if err != nil || before == nil && minEpoch == 0 || before != nil && before.Floor() && before.Epoch >= minEpoch {
		return false, err
	}
	byRule := p.table.DecideByRule(t.topic, p.def)
	var after *route.Entry
	if before != nil {
		after = route.Remove(*before, byRule)
	}
	if have := max(byRule.Epoch, epochOf(after)); have < minEpoch {
		after = &route.Entry{Topic: t.topic.Base(), Epoch: minEpoch}
	}
	return p.putEntry(t, before, after)
}

func (p *planner) setRule(t target, cluster string, minEpoch uint64, switchID string) (bool, error) {
	after, err := route.SetRule(p.table, t.scope, cluster, switchID, p.def)
	if err != nil {
		return false, badName(err)
	}
	after.Epoch = max(after.Epoch, minEpoch)
	before, ok := p.table.Rule(t.scope)
	return p.putRule(t, rulePointer(before, ok), &after)
}

// entry is the present entry of a base name. One that is in the middle of a switch must not be touched.
func (p *planner) entry(base string) (*route.Entry, error) {
	e, ok := p.table.Entry(base)
	if !ok {
		return nil, nil
	}
	switch e.State {
	case route.StateActive:
		return &e, nil
	case route.StateDraining:
		return nil, &Error{
			Code: CodeConflict, Message: fmt.Sprintf("%s is draining from cluster %s by switch %s", base, route.DrainFrom(e.Drain), e.SwitchID),
			Remedy: fmt.Sprintf("see what is left with `pointsman switch status %s`, or take it back with `pointsman switch reverse %s`", e.SwitchID, e.SwitchID),
		}
	}
	return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("%s is %s by switch %s", base, stateName(e.State), e.SwitchID), Remedy: "wait for that switch to end"}
}

func (p *planner) putEntry(t target, before, after *route.Entry) (bool, error) {
	if before == nil && after == nil || before != nil && after != nil && *before == *after {
		return false, nil
	}
	next, err := p.table.WithEntry(t.topic.Base(), after)
	if err != nil {
		return false, badName(err)
	}
	p.steps = append(p.steps, step{
		target: t, entry: &store.EntryChange{Topic: t.topic.Base(), Before: before, After: after},
		guards: p.guards(t.topic.Namespace(), t.topic.Tenant(), ""),
		moved:  p.table.Decide(t.topic, p.def).Cluster != next.Decide(t.topic, p.def).Cluster,
	})
	p.table = next
	return true, nil
}

func (p *planner) putRule(t target, before, after *route.Rule) (bool, error) {
	if onlyGuards(store.RuleChange{Before: before, After: after}) {
		return false, nil
	}
	next, err := p.table.WithRule(t.scope, after)
	if err != nil {
		return false, badName(err)
	}
	above := []string{}
	if t.scope != "" {
		above = append(above, "")
	}
	if tenant := tenantOf(t.scope); tenant != t.scope {
		above = append(above, tenant)
	}
	p.steps = append(p.steps, step{
		target: t, rule: &store.RuleChange{Scope: t.scope, Before: before, After: after},
		guards: p.guards(above...),
		moved:  p.table.DecideScope(t.scope, p.def).Cluster != next.DecideScope(t.scope, p.def).Cluster,
	})
	p.table = next
	return true, nil
}

// guards are changes that change nothing: they only let the write fail when a rule is no longer what it was.
func (p *planner) guards(scopes ...string) []store.RuleChange {
	gs := make([]store.RuleChange, 0, len(scopes))
	for _, scope := range scopes {
		r, ok := p.table.Rule(scope)
		gs = append(gs, store.RuleChange{Scope: scope, Before: rulePointer(r, ok), After: rulePointer(r, ok)})
	}
	return gs
}

// moves tells whether the steps change the cluster of a topic.
func (p *planner) moves(t route.Topic) bool {
	return p.before.Decide(t, p.def).Cluster != p.table.Decide(t, p.def).Cluster
}

// movedNames are the topics and scopes in which clients may be moved.
func (p *planner) movedNames() []string {
	var names []string
	for _, st := range p.steps {
		if st.moved {
			names = append(names, st.target.name())
		}
	}
	return names
}

// changes are the steps as clients are told of them.
func (p *planner) changes() []RouteChange {
	cs := make([]RouteChange, 0, len(p.steps))
	for _, st := range p.steps {
		cs = append(cs, st.change())
	}
	return cs
}

// write applies the steps in order, in chunks that are each atomic. It returns how many steps were written. rec, for a
// single step, is the record of the switch that the step is.
func (s *Server) write(ctx context.Context, p *planner, rec *switching.Record, who, why string) (int, error) {
	written := 0
	for written < len(p.steps) {
		n, err := s.writeSome(ctx, p.steps[written:], store.MaxChange, rec, who, why)
		if err != nil {
			return written, err
		}
		written += n
	}
	return written, s.raiseRules(ctx, p, who)
}

// writeSome writes as many steps as fit into one change of at most limit parts.
func (s *Server) writeSome(ctx context.Context, steps []step, limit int, rec *switching.Record, who, why string) (int, error) {
	c := store.Change{Switch: rec, Who: who, Why: why, At: time.Now()}
	n := 0
	for _, st := range steps {
		rules := slices.Clone(c.Rules)
		entries := c.Entries
		if st.entry != nil {
			entries = append(entries, *st.entry)
		} else if i := slices.IndexFunc(rules, func(r store.RuleChange) bool { return r.Scope == st.rule.Scope }); i >= 0 {
			if !onlyGuards(rules[i]) {
				break // changed twice: the second time in the next chunk
			}
			rules[i] = *st.rule
		} else {
			rules = append(rules, *st.rule)
		}
		for _, g := range st.guards {
			if !slices.ContainsFunc(rules, func(r store.RuleChange) bool { return r.Scope == g.Scope }) {
				rules = append(rules, g)
			}
		}
		if n > 0 && len(entries)+len(rules) > limit {
			break
		}
		c.Entries, c.Rules = entries, rules
		n++
	}
	err := s.store.Apply(ctx, c)
	if errors.Is(err, store.ErrTooLarge) && n > 1 {
		return s.writeSome(ctx, steps, max(1, limit/2), rec, who, why)
	}
	return n, err
}

// raiseRules closes the one gap that the guards leave: an epoch floor that somebody else wrote within a rule's scope while the rule
// was being changed. The rule's epoch must be above it, or a topic's cluster changed without its epoch.
func (s *Server) raiseRules(ctx context.Context, p *planner, who string) error {
	if !slices.ContainsFunc(p.steps, func(st step) bool { return st.rule != nil && st.moved }) {
		return nil
	}
	now, err := s.plan(ctx, "")
	if err != nil {
		return fmt.Errorf("the change was made, but reading it back failed: %w", err)
	}
	for _, st := range p.steps {
		if st.rule == nil || !st.moved || st.rule.After == nil {
			continue
		}
		rule, ok := now.table.Rule(st.target.scope)
		if !ok || rule != *st.rule.After {
			continue // somebody else's by now
		}
		highest := rule.Epoch
		for e := range now.table.Each {
			t, err := route.ParseTopic(e.Topic)
			if err != nil || !e.Floor() || !t.In(st.target.scope) || e.Epoch < rule.Epoch {
				continue
			}
			if was, known := p.before.Entry(e.Topic); !known || was != e {
				highest = max(highest, route.NextEpoch(e.Epoch))
			}
		}
		if highest > rule.Epoch {
			raised := rule
			raised.Epoch = highest
			if _, err := now.putRule(st.target, &rule, &raised); err != nil {
				return err
			}
		}
	}
	if len(now.steps) == 0 {
		return nil
	}
	_, err = s.writeSome(ctx, now.steps, store.MaxChange, nil, who, "epoch raised above a topic that was removed meanwhile")
	return err
}

// onlyGuards tells that a rule change changes nothing.
func onlyGuards(c store.RuleChange) bool {
	return c.Before == c.After || c.Before != nil && c.After != nil && *c.Before == *c.After
}

func rulePointer(r route.Rule, ok bool) *route.Rule {
	if !ok {
		return nil
	}
	return &r
}

func epochOf(e *route.Entry) uint64 {
	if e == nil {
		return 0
	}
	return e.Epoch
}

func tenantOf(scope string) string {
	for i := range len(scope) {
		if scope[i] == '/' {
			return scope[:i]
		}
	}
	return scope
}

func badName(err error) error { return &Error{Code: CodeBadName, Message: err.Error()} }
