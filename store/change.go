package store

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
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
		if e.After != nil && (e.After.Drain != "" || e.After.State == route.StateDraining) {
			if _, err := route.ParseDrain(e.After.Drain); err != nil {
				return fmt.Errorf("topic %s: %w", e.Topic, err)
			}
		}
		for _, side := range []*route.Entry{e.Before, e.After} {
			if err := c.ownStep(side); err != nil {
				return err
			}
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
		return CheckRecord(*c.Switch)
	}
	return nil
}

// Moving tells whether e is in the middle of a switch, in any state but active: then only its switch may change it.
func Moving(e route.Entry) bool { return e.State != route.StateActive }

// ownStep tells why c may not have e, which moves, on one of its sides.
func (c Change) ownStep(e *route.Entry) error {
	switch {
	case e == nil || !Moving(*e):
		return nil
	case e.SwitchID == "":
		return fmt.Errorf("topic %s: state %d without the id of a switch", e.Topic, e.State)
	case c.Switch != nil && c.Switch.ID == e.SwitchID:
		return nil
	case e.State == route.StateDraining:
		return fmt.Errorf("%w: %s drains from cluster %s by switch %s, and this change is no step of it: see what is left with "+
			"`pointsman switch status %s`, or take it back with `pointsman switch reverse %s`", ErrMoving, e.Topic, route.DrainFrom(e.Drain), e.SwitchID, e.SwitchID, e.SwitchID)
	}
	return fmt.Errorf("%w: %s belongs to switch %s until that ends, and this change is no step of it: "+
		"wait for it, or stop it with `pointsman switch abort %s`", ErrMoving, e.Topic, e.SwitchID, e.SwitchID)
}

// CheckRecord tells what makes a record unfit for every store.
func CheckRecord(r switching.Record) error {
	if r.Rev == 0 {
		return fmt.Errorf("switch %s: the record has revision 0: want 1 for a new one, else one more than that of the record that it replaces", r.ID)
	}
	return CheckID("switch", r.ID)
}

// RecordConflict compares the stored record (nil: none) with the one that r replaces. Nil: r may be written.
func RecordConflict(r switching.Record, have *switching.Record) *ConflictError {
	rev, found := uint64(0), "absent"
	if have != nil {
		rev, found = have.Rev, fmt.Sprintf("revision %d, %s", have.Rev, have.State)
	}
	if rev == r.Rev-1 {
		return nil
	}
	want := "absent"
	if r.Rev > 1 {
		want = fmt.Sprintf("revision %d", r.Rev-1)
	}
	return &ConflictError{Name: "switch " + r.ID, Want: want, Have: found}
}

// SortRecords puts records into the order in which every store lists those that are not over, and those of one command.
func SortRecords(records []switching.Record) {
	slices.SortFunc(records, func(a, b switching.Record) int {
		return cmp.Or(a.Started.Compare(b.Started), strings.Compare(a.ID, b.ID))
	})
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

// CheckAck tells why a store cannot keep a.
func CheckAck(a switching.Ack) error {
	if err := CheckID("proxy", a.Proxy); err != nil {
		return err
	}
	if !slices.Contains([]switching.State{"", switching.StatePrepared, switching.StateFenced, switching.StateEvicting}, a.Phase) {
		return fmt.Errorf("ack of proxy %s: phase %q is none that is acknowledged: want prepared, fenced or evicting", a.Proxy, a.Phase)
	}
	return checkIncarnation(a.Proxy, a.Incarnation)
}

// CheckProxy tells why p cannot be a member.
func CheckProxy(p Proxy) error {
	if err := CheckID("proxy", p.ID); err != nil {
		return err
	}
	return checkIncarnation(p.ID, p.Incarnation)
}

// checkIncarnation: stores name things "proxy@incarnation".
func checkIncarnation(proxy, incarnation string) error {
	if incarnation == "" {
		return nil
	}
	if strings.Contains(incarnation, "@") {
		return fmt.Errorf("proxy %s: incarnation %q: want none with '@' in it", proxy, incarnation)
	}
	return CheckID("incarnation", incarnation)
}

// AckName names an ack among those of its switch: one process has one for each phase of each attempt.
func AckName(a switching.Ack) string {
	return fmt.Sprintf("%d-%s-%s@%s", a.Attempt, ackPhase(a), a.Proxy, a.Incarnation)
}

func ackPhase(a switching.Ack) switching.State { return cmp.Or(a.Phase, switching.StateEvicting) }

// SortAcks puts acks into the order in which every store lists them: by attempt, phase, proxy, incarnation.
func SortAcks(acks []switching.Ack) {
	phases := []switching.State{switching.StatePrepared, switching.StateFenced, switching.StateEvicting}
	slices.SortFunc(acks, func(a, b switching.Ack) int {
		return cmp.Or(cmp.Compare(a.Attempt, b.Attempt), cmp.Compare(slices.Index(phases, ackPhase(a)), slices.Index(phases, ackPhase(b))),
			strings.Compare(a.Proxy, b.Proxy), strings.Compare(a.Incarnation, b.Incarnation))
	})
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
	if e.Drain != "" {
		text += ", draining " + clip(e.Drain)
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

// clip shortens what may be long to what a person reads.
func clip(text string) string {
	const most = 100
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// maxID is the longest id of a switch or a proxy.
const maxID = 200
