package store

import (
	"fmt"
	"strings"
	"time"

	"pointsman/core/route"
)

// Validate tells what makes c unfit for every store: too many changes, a name twice, a value under another name.
func (c Change) Validate() error {
	if n := len(c.Entries) + len(c.Rules); n > MaxChange {
		return fmt.Errorf("%w: %d entries and rules, at most %d", ErrTooLarge, n, MaxChange)
	}
	if len(c.Entries)+len(c.Rules) == 0 {
		return fmt.Errorf("the change is empty: it names no topic and no rule")
	}
	seen := make(map[string]bool, len(c.Entries))
	for _, e := range c.Entries {
		switch {
		case e.Topic == "":
			return fmt.Errorf("the change names a topic with an empty name")
		case seen[e.Topic]:
			return fmt.Errorf("topic %s occurs twice in the change", e.Topic)
		case e.Before != nil && e.Before.Topic != e.Topic:
			return fmt.Errorf("topic %s: the entry before is of topic %s", e.Topic, e.Before.Topic)
		case e.After != nil && e.After.Topic != e.Topic:
			return fmt.Errorf("topic %s: the entry after is of topic %s", e.Topic, e.After.Topic)
		case e.After != nil && e.After.State > route.StateDraining:
			return fmt.Errorf("topic %s: there is no state %d", e.Topic, e.After.State)
		}
		seen[e.Topic] = true
	}
	scopes := make(map[string]bool, len(c.Rules))
	for _, r := range c.Rules {
		switch {
		case scopes[r.Scope]:
			return fmt.Errorf("rule %q occurs twice in the change", r.Scope)
		case r.Before != nil && r.Before.Scope != r.Scope:
			return fmt.Errorf("rule %q: the rule before has scope %q", r.Scope, r.Before.Scope)
		case r.After != nil && r.After.Scope != r.Scope:
			return fmt.Errorf("rule %q: the rule after has scope %q", r.Scope, r.After.Scope)
		}
		scopes[r.Scope] = true
	}
	if c.Switch != nil {
		return CheckID("switch", c.Switch.ID)
	}
	return nil
}

// Conflict compares what is stored, as entry and rule tell it, with the Before side of c. Nil: c may be written.
func (c Change) Conflict(entry func(topic string) (route.Entry, bool), rule func(scope string) (route.Rule, bool)) *ConflictError {
	for _, e := range c.Entries {
		if have, ok := entry(e.Topic); !sameEntry(e.Before, have, ok) {
			return &ConflictError{Name: e.Topic, Want: describeEntry(e.Before), Have: describeEntry(present(have, ok))}
		}
	}
	for _, r := range c.Rules {
		if have, ok := rule(r.Scope); !sameRule(r.Before, have, ok) {
			return &ConflictError{Name: describeScope(r.Scope), Want: describeRule(r.Before), Have: describeRule(present(have, ok))}
		}
	}
	return nil
}

// Applied tells whether everything that is stored is as the After side of c says.
func (c Change) Applied(entry func(topic string) (route.Entry, bool), rule func(scope string) (route.Rule, bool)) bool {
	for _, e := range c.Entries {
		if have, ok := entry(e.Topic); !sameEntry(e.After, have, ok) {
			return false
		}
	}
	for _, r := range c.Rules {
		if have, ok := rule(r.Scope); !sameRule(r.After, have, ok) {
			return false
		}
	}
	return true
}

// HistoryEntry is the record of c under seq; now stands in for a zero c.At.
func (c Change) HistoryEntry(seq uint64, now time.Time) HistoryEntry {
	h := HistoryEntry{Seq: seq, At: c.At, Who: c.Who, Why: c.Why, Entries: c.Entries, Rules: c.Rules}
	if h.At.IsZero() {
		h.At = now
	}
	if c.Switch != nil {
		h.Switch = c.Switch.ID
	}
	return h
}

// SwitchConflict is the error of a Change whose switch id is taken.
func SwitchConflict(id string) *ConflictError {
	return &ConflictError{Name: "switch " + id, Want: "absent", Have: "a switch of that id"}
}

// CheckID tells why id cannot be the name of a switch or of a proxy (kind says which) in a store.
func CheckID(kind, id string) error {
	if id == "" || len(id) > maxID || id == "." || id == ".." || strings.ContainsFunc(id, func(r rune) bool {
		return r <= ' ' || r == '/' || r >= 0x7f
	}) {
		return fmt.Errorf("%s id %q: want 1 to %d printable ASCII characters without a blank and without '/'", kind, id, maxID)
	}
	return nil
}

func present[T any](v T, ok bool) *T {
	if !ok {
		return nil
	}
	return &v
}

func sameEntry(want *route.Entry, have route.Entry, ok bool) bool {
	if want == nil {
		return !ok
	}
	return ok && *want == have
}

func sameRule(want *route.Rule, have route.Rule, ok bool) bool {
	if want == nil {
		return !ok
	}
	return ok && *want == have
}

func describeEntry(e *route.Entry) string {
	if e == nil {
		return "absent"
	}
	text := fmt.Sprintf("cluster %s, epoch %d", e.Cluster, e.Epoch)
	if e.Floor() {
		text = fmt.Sprintf("no cluster of its own, epoch %d", e.Epoch)
	}
	if e.State != route.StateActive {
		text += fmt.Sprintf(", state %d", e.State)
	}
	return text + describeSwitch(e.SwitchID, e.Attempt)
}

func describeRule(r *route.Rule) string {
	if r == nil {
		return "absent"
	}
	return fmt.Sprintf("cluster %s, epoch %d", r.Cluster, r.Epoch) + describeSwitch(r.SwitchID, 0)
}

func describeSwitch(id string, attempt uint32) string {
	if id == "" {
		return ""
	}
	if attempt == 0 {
		return ", written by switch " + id
	}
	return fmt.Sprintf(", written by switch %s, attempt %d", id, attempt)
}

func describeScope(scope string) string {
	if scope == "" {
		return "the default rule"
	}
	return "rule " + scope
}

// maxID is the longest id of a switch or a proxy.
const maxID = 200
