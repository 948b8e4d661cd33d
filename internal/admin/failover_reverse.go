package admin

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// This file is the way back from a failover, which is always somebody's decision: a batch of planned switches to the cluster that was dead.

// reverseFailover starts a batch that moves back what an order has moved: topics, or one namespace. Rules above that have no way back in one command, for nobody knows which
// topics they are about; the error says for each what to do.
func (s *Server) reverseFailover(ctx context.Context, o switching.Failover, r *SwitchCommand) (*SwitchStatus, error) {
	if !o.State.Over() {
		return nil, &Error{Code: CodeTooLate, Message: fmt.Sprintf("failover %s is %s", o.ID, o.State), Remedy: fmt.Sprintf("wait for its end, or end it with `pointsman switch abort %s`", o.ID)}
	}
	records, err := s.store.SwitchesOf(ctx, o.ID)
	if err != nil {
		return nil, err
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return nil, err
	}
	var topics, rules, stay []string
	var faults []Detail
	own := map[string]bool{} // ids of its switches
	for _, rec := range records {
		if rec.Flipped.IsZero() { // only its drain was ended
			stay = append(stay, rec.Topic)
			continue
		}
		own[rec.ID] = true
		t := target{scope: rec.Topic}
		if strings.Contains(rec.Topic, "://") {
			if t, err = parseTopicName(rec.Topic); err != nil {
				return nil, err
			}
			topics = append(topics, rec.Topic)
		} else {
			rules = append(rules, rec.Topic)
		}
		if now := p.decided(t); now != o.To {
			faults = append(faults, Detail{Name: t.name(), Problem: fmt.Sprintf("is on %s by now, and not on %s as the failover has left it", cmp.Or(now, "no cluster"), o.To)})
		}
	}
	slices.Sort(topics)
	slices.Sort(rules)
	slices.Sort(stay)
	ended, lost := switching.Few(stay, 1), forgotten(o, records)
	req := &SwitchRequest{
		To: o.From, Mode: string(switching.ModePlanned), Force: r.Force, DryRun: r.DryRun, Reversible: r.Reversible, Who: r.Who, Why: cmp.Or(r.Why, "reverse of "+o.ID),
		BatchOptions: BatchOptions{OnBlocked: r.OnBlocked},
	}
	switch {
	case lost != "":
		return nil, &Error{Code: CodeConflict, Message: lost, Remedy: "move back by name what is to go: `pointsman routes ls --cluster " + o.To + "` says what is there, and `pointsman switch start --to " + o.From + " --topics-from FILE --dry-run` moves it"}
	case len(stay) > 0 && len(stay) == len(records):
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s has moved nothing, and only ended drains, of %s", o.ID, ended),
			Remedy: "to move those to " + o.From + " all the same: `pointsman switch start --to " + o.From + " --topics-from FILE --dry-run`"}
	case len(records) == 0:
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s has moved nothing that could be moved back", o.ID), Remedy: "look at `pointsman switch status " + o.ID + "`"}
	case len(faults) > 0:
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s cannot be reversed: %s %s", o.ID, faults[0].Name, faults[0].Problem),
			Remedy: "move back the others by name: `pointsman switch start --to " + o.From + " --topics-from FILE --dry-run`", Details: faults[:min(len(faults), maxDetails)]}
	case len(rules) == 0:
		req.Topics = topics
	case len(rules) == 1 && scopeKind(rules[0]) == "namespace" && !slices.ContainsFunc(topics, func(base string) bool { return !within(base, rules[0]) }):
		if stays := others(p, rules[0], o.To, own); stays != "" {
			return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s moved the rule of namespace %s, and %s was on %s without it: the whole namespace must not follow", o.ID, rules[0], stays, o.To),
				Remedy: "move back by name what is to go: `pointsman switch start --to " + o.From + " --topics-from FILE --dry-run`"}
		}
		req.Namespace = scopeName(rules[0])
	default:
		return nil, manyRules(o, rules, topics, func(scope string) string { return others(p, scope, o.To, own) })
	}
	targets, err := switchTargets(req)
	if err != nil {
		return nil, err
	}
	st, err := s.startStored(ctx, req, switching.ModePlanned, targets)
	if err == nil && len(stay) > 0 {
		st.Notes = append(st.Notes, "not among them, for the failover has only ended their drains: "+ended)
	}
	return st, err
}

// manyRules says how what more than one rule has moved goes back. stays names a topic of a namespace that was on the new cluster before.
func manyRules(o switching.Failover, rules, topics []string, stays func(scope string) string) *Error {
	e := &Error{
		Code: CodeConflict, Message: fmt.Sprintf("failover %s moved more than one namespace: it goes back step by step", o.ID),
		Remedy: "run these, each with --dry-run first; `pointsman switch salvage " + o.ID + "` should be empty before",
	}
	for _, scope := range rules {
		d := Detail{Name: target{scope: scope}.name()}
		if scopeKind(scope) == "namespace" {
			d.Problem = fmt.Sprintf("`pointsman switch start --namespace %s --to %s`", scopeName(scope), o.From)
			if name := stays(scope); name != "" {
				d.Problem = fmt.Sprintf("`pointsman switch start --to %s --topics-from FILE` with what is to go back: %s was on %s before", o.From, name, o.To)
			}
			topics = slices.DeleteFunc(topics, func(base string) bool { return within(base, scope) })
		} else {
			d.Problem = fmt.Sprintf("`pointsman switch start --namespace NAMESPACE --to %s` for each namespace that it decides; then, for names that nobody uses yet, `pointsman routes set '%s' %s`",
				o.From, target{scope: scope}.name(), o.From)
		}
		e.Details = append(e.Details, d)
	}
	for _, name := range topics {
		e.Details = append(e.Details, Detail{Name: name, Problem: fmt.Sprintf("`pointsman switch start --topic %s --to %s`", name, o.From)})
	}
	e.Details = e.Details[:min(len(e.Details), maxDetails)]
	return e
}

func within(base, scope string) bool {
	t, err := route.ParseTopic(base)
	return err == nil && t.In(scope)
}

// others is a topic of a namespace that is on a cluster by an entry of its own, which is of none of these switches; "" when there is none.
func others(p *planner, scope, cluster string, switches map[string]bool) string {
	found := ""
	for e := range p.table.Each {
		if !e.Floor() && e.Cluster == cluster && !switches[e.SwitchID] && within(e.Topic, scope) && (found == "" || e.Topic < found) {
			found = e.Topic
		}
	}
	return found
}
