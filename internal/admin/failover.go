package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file is how failovers are asked for and looked at. The leader carries them out (failover_run.go); the cluster that is dead is never called.

// FailoverWork is what a failover needs to know of clusters. internal/controller implements it.
type FailoverWork interface {
	// Seen is what was last seen of a cluster, from the map store.
	Seen(ctx context.Context, cluster string) (switching.Seen, error)
	// Ready finds out what cluster to lacks for a topic that was seen on cluster from, and makes it when create says so.
	Ready(ctx context.Context, base, from, to string, seen *switching.Seen, create bool) (switching.FailoverFacts, error)
}

const (
	// subscriptionsNone is the value of SwitchRequest.Subscriptions that leaves them alone.
	subscriptionsNone = "none"
	// maxFailoverTopics bounds the topics that one order names; a namespace or cluster may have any number.
	maxFailoverTopics = 1_000
	// maxFailoverChecked is how many topics are looked at on the new cluster before an order is written; the others are when their turn comes.
	maxFailoverChecked = 500
	// readyParallel is how many topics are looked at at once, readyTimeout how long each may take.
	readyParallel = 16
	readyTimeout  = time.Minute
)

// FailoverPlan is what is known before a failover.
type FailoverPlan struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Votes are what the live proxies say of From, Views what each member says.
	Votes switching.Votes `json:"votes"`
	Views []ClusterView   `json:"views"`
	// Seen is when From was last seen by the leader, with success.
	Seen time.Time `json:"seen,omitzero"`
	// Facts is what is known of all topics together, of the first Checked ones of Topics.
	Facts   switching.FailoverFacts `json:"facts"`
	Topics  int                     `json:"topics"`
	Checked int                     `json:"checked"`
	Moves   []FailoverMove          `json:"moves"` // at most maxDetails
	// Aborts are the switches that are aborted or ended first.
	Aborts []string `json:"aborts,omitempty"`
	// Stays are topics that To cannot serve, at most maxDetails, and Staying how many of those looked at: they stay on From, also when a rule of theirs moves.
	Stays   []Detail `json:"stays,omitempty"`
	Staying int      `json:"staying,omitempty"`

	skipped []Detail // topics that were named and are not on From
	Notes   []string `json:"notes,omitempty"`
}

// ClusterView is what one proxy says of a cluster.
type ClusterView struct {
	Proxy string    `json:"proxy"`
	Live  bool      `json:"live"`
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	Why   string    `json:"why,omitempty"`
}

// FailoverMove is a topic or rule that moves.
type FailoverMove struct {
	Name  string `json:"name"`
	Epoch uint64 `json:"epoch"` // that it gets
	// Facts is what is known of the topic, or of those that the rule decides.
	Facts switching.FailoverFacts `json:"facts"`
}

// failing is one topic or rule of an order, as the map is now.
type failing struct {
	target target
	// topics are the base names that were seen of it: of a topic itself, of a rule those that it decides.
	topics []string
	moving *route.Entry // set when the topic is in the middle of a switch
}

// startFailover checks what can be checked without the cluster that is dead, and writes an order for the leader.
func (s *Server) startFailover(ctx context.Context, r *SwitchRequest) (any, error) {
	if s.failover == nil {
		return nil, &Error{Code: CodeUnsupportedMode, Message: "this proxy cannot do failovers", Remedy: "ask another one with --admin"}
	}
	o, err := s.failoverOrder(ctx, r)
	if err != nil {
		return nil, err
	}
	p, items, err := s.planFailover(ctx, &o)
	if err != nil {
		return nil, err
	}
	if len(items) == 0 {
		return nil, &Error{Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: of what is named, the map has nothing on cluster %s", o.From), Remedy: "`pointsman explain TOPIC` tells where a topic is, and why", Details: p.skipped}
	}
	if err := s.guardFailover(ctx, &o, p); err != nil {
		return nil, err
	}
	nothing, err := s.factsOf(ctx, &o, p, items)
	if err != nil {
		return nil, err
	}
	st := &SwitchStatus{
		To: o.To, Mode: string(switching.ModeFailover), State: statePlanned, Total: len(items), Switches: []SwitchDetail{}, Failover: p, Skipped: p.skipped,
		Promised: switching.Promised(switching.ModeFailover), NotPromised: switching.NotPromised(switching.ModeFailover),
	}
	if r.DryRun {
		return st, nil
	}
	if nothing != nil {
		nothing.Details = p.Stays
		return nil, nothing
	}
	o.ID, o.State, o.Asked, o.Total = switching.FailoverID(time.Now()), switching.FailoverRequested, time.Now().UTC(), len(items)
	if err := store.PutFailover(ctx, s.store, &o); err != nil {
		if errors.Is(err, store.ErrTooLarge) {
			return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("the names of %d topics are too long for one order", len(o.Topics)), Remedy: "name them in several commands, or name their namespace"}
		}
		return nil, err
	}
	s.log.Warn("failover asked for", "failover", o.ID, "from", o.From, "to", o.To, "moves", o.Total, "force", o.Force, "who", o.Who, "why", o.Why)
	s.nudgeFailover()
	st.ID, st.State = o.ID, stateRunning
	return st, nil
}

// failoverOrder reads what is asked for.
func (s *Server) failoverOrder(ctx context.Context, r *SwitchRequest) (switching.Failover, error) {
	o := switching.Failover{From: r.From, To: r.To, NoSubscriptions: r.Subscriptions == subscriptionsNone, Force: r.Force, Who: whoOr(r.Who), Why: r.Why}
	known := s.proxy.Info().Clusters
	switch {
	case r.To == "":
		return o, &Error{Code: CodeBadRequest, Message: "no target cluster is named", Remedy: "add --to CLUSTER"}
	case r.Subscriptions != "" && r.Subscriptions != subscriptionsNone && r.Subscriptions != "create":
		return o, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("--subscriptions is %q", r.Subscriptions), Remedy: "leave it out to have those made that the new cluster lacks, or write none"}
	case r.Prefix != "" || r.Percent != 0: // never everything in place of a part
		return o, &Error{
			Code: CodeUnsupportedMode, Message: "a failover moves topics by name, a whole namespace, or everything on the cluster that is dead, and no prefix or share of them",
			Remedy: "leave --prefix and --percent out; or name the topics with --topics-from FILE",
		}
	case len(r.Topics) > maxFailoverTopics:
		return o, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("%d topics are more than the %d that one failover names", len(r.Topics), maxFailoverTopics), Remedy: "name them in several commands; or --namespace, or --from for everything on the cluster"}
	case len(r.Topics) == 0 && r.Namespace == "" && r.From == "":
		return o, &Error{Code: CodeBadRequest, Message: "a failover moves topics, a namespace, or everything on a cluster", Remedy: "name --topic (repeatable), --topics-from FILE, --namespace TENANT/NAMESPACE, or --from CLUSTER alone"}
	case !slices.Contains(known, r.To):
		return o, &Error{Code: CodeUnknownCluster, Message: fmt.Sprintf("cluster %q is unknown; this proxy knows %s", r.To, strings.Join(known, ", ")), Remedy: "correct --to, or add it under clusters in the configuration of every proxy"}
	case r.From != "" && !slices.Contains(known, r.From):
		return o, &Error{Code: CodeUnknownCluster, Message: fmt.Sprintf("cluster %q is unknown; this proxy knows %s", r.From, strings.Join(known, ", ")), Remedy: "correct --from"}
	case r.From == r.To:
		return o, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("--from and --to are both %s", r.To), Remedy: "name two clusters"}
	}
	if len(r.Topics) == 0 && r.Namespace == "" {
		o.All = true
		return o, nil
	}
	targets, err := switchTargets(r)
	if err != nil {
		return o, err
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return o, err
	}
	for _, t := range targets {
		if t.isTopic {
			o.Topics = append(o.Topics, t.topic.Base())
		} else {
			o.Scope = t.scope
		}
		// The cluster that is left follows from the map, if it is not named.
		now := p.decided(t)
		if e, ok := p.table.Entry(t.name()); ok && e.Drain != "" && r.From == "" {
			switch old := route.DrainFrom(e.Drain); r.To {
			case e.Cluster:
				now = old
			case old:
			default:
				return o, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("%s is on two clusters: it drains from %s to %s by switch %s", e.Topic, old, e.Cluster, e.SwitchID), Remedy: fmt.Sprintf("say which one is dead: add --from %s or --from %s", old, e.Cluster)}
			}
		}
		switch {
		case now == r.To || now == "" || r.From != "":
		case o.From == "":
			o.From = now
		case o.From != now:
			return o, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("the topics are on several clusters, %s and %s among them", o.From, now), Remedy: "say which one is dead: add --from CLUSTER; the others stay"}
		}
	}
	if o.From == "" {
		return o, &Error{Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: %s on %s already, or mapped nowhere", isAre(len(targets), r), r.To), Remedy: "`pointsman explain TOPIC` tells why"}
	}
	return o, nil
}

// guardFailover refuses a failover from a cluster that lives, and one to a cluster that does not.
func (s *Server) guardFailover(ctx context.Context, o *switching.Failover, p *FailoverPlan) error {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return err
	}
	var live []map[string]switching.ClusterHealth
	var gone []string
	for _, m := range members {
		h := m.Health[o.From]
		v := ClusterView{Proxy: m.ID, Live: m.Live, State: h.State, Since: h.Since, Why: h.Why}
		if v.State == "" {
			v.State = "unknown"
		}
		p.Views = append(p.Views, v)
		if m.Live {
			live = append(live, m.Health)
		} else {
			gone = append(gone, m.ID)
		}
	}
	p.Votes = switching.CountVotes(o.From, live)
	if len(gone) > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("proxy %s is a member and not connected to the map store: its clients, if it has any, stay on cluster %s", strings.Join(gone, ", "), o.From))
	}
	if o.Force {
		return nil
	}
	if p.Votes.MostlyUp() {
		return &Error{
			Code: CodeClusterUp, Message: fmt.Sprintf("cluster %s answers: of %d live proxies %d are answered by it, %d are not", o.From, p.Votes.Live, p.Votes.Up, p.Votes.Down),
			Remedy: "move topics off a cluster that lives with `--mode planned`, which loses nothing; a cluster that has just died is noticed within half a minute; if you know better, repeat with --force",
		}
	}
	if v := switching.CountVotes(o.To, live); v.MostlyDown() {
		return &Error{Code: CodeClusterDown, Message: fmt.Sprintf("cluster %s does not answer either: %v", o.To, v), Remedy: "look at `pointsman clusters ls`; to move there all the same, repeat with --force"}
	}
	return s.guardCluster(ctx, []string{o.To}, false)
}

// planFailover decides what of an order is still to be moved, rules first: one write moves everything that a rule decides.
func (s *Server) planFailover(ctx context.Context, o *switching.Failover) (*FailoverPlan, []failing, error) {
	p := &FailoverPlan{From: o.From, To: o.To, Views: []ClusterView{}, Moves: []FailoverMove{}}
	seen, err := s.failover.Seen(ctx, o.From)
	if err != nil {
		return nil, nil, err
	}
	p.Seen = seen.At
	if seen.LeftOut > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("of %d topics of cluster %s more was seen than is kept", seen.LeftOut, o.From))
	}
	plan, err := s.plan(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	items, skipped, err := failingItems(plan, o, &seen)
	if err != nil {
		return nil, nil, err
	}
	p.skipped = skipped
	for _, it := range items {
		p.Topics += len(it.topics)
		if it.moving != nil {
			p.Aborts = append(p.Aborts, it.ends(o))
		}
	}
	running, err := s.store.Running(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, rec := range running {
		if notBegun(&rec, o) {
			p.Aborts = append(p.Aborts, fmt.Sprintf("switch %s of %s, which has not begun", rec.ID, rec.Topic))
		}
	}
	return p, items, nil
}

func failingItems(p *planner, o *switching.Failover, seen *switching.Seen) (items []failing, skipped []Detail, err error) {
	entry := func(base string) error {
		t, err := route.ParseTopic(base)
		if err != nil {
			return badName(err)
		}
		it := failing{target: target{topic: t, isTopic: true}, topics: []string{base}}
		if e, ok := p.table.Entry(base); ok && e.State != route.StateActive {
			it.moving = &e
		}
		switch {
		case it.stays(o.From):
			it.topics = nil // nothing is made for it
		case p.decided(it.target) != o.From:
			if len(o.Topics) > 0 {
				skipped = append(skipped, notThere(base, p.decided(it.target), o))
			}
			return nil
		}
		items = append(items, it)
		return nil
	}
	if len(o.Topics) > 0 {
		for _, base := range o.Topics {
			if err := entry(base); err != nil {
				return nil, nil, err
			}
		}
		return items, skipped, nil
	}
	// What rules decide of the topics that were seen.
	ruled := map[string][]string{}
	for _, t := range seen.Topics {
		topic, err := route.ParseTopic(t.Topic)
		if err != nil {
			continue
		}
		if e, ok := p.table.Entry(t.Topic); ok && !e.Floor() {
			continue
		}
		if d := p.table.DecideByRule(topic, p.def); d.Cluster == o.From {
			ruled[d.Scope] = append(ruled[d.Scope], t.Topic)
		}
	}
	within := func(topics []string) []string {
		return slices.DeleteFunc(slices.Clone(topics), func(base string) bool {
			t, err := route.ParseTopic(base)
			return err != nil || o.Scope != "" && !t.In(o.Scope)
		})
	}
	scopes := []string{o.Scope}
	if o.All {
		scopes = []string{""}
		for _, r := range p.table.Rules() {
			if r.Scope != "" && !r.Floor() && r.Cluster == o.From {
				scopes = append(scopes, r.Scope)
			}
		}
	}
	for _, scope := range scopes {
		d := p.table.DecideScope(scope, p.def)
		if d.Cluster != o.From {
			continue
		}
		topics := ruled[scope]
		if !o.All {
			topics = nil
			for _, all := range ruled {
				topics = append(topics, within(all)...)
			}
			slices.Sort(topics)
		}
		items = append(items, failing{target: target{scope: scope}, topics: topics})
	}
	for e := range p.table.Each {
		if t, err := route.ParseTopic(e.Topic); err != nil || e.Floor() || o.Scope != "" && !t.In(o.Scope) {
			continue
		}
		if err := entry(e.Topic); err != nil {
			return nil, nil, err
		}
	}
	first := slices.IndexFunc(items, func(it failing) bool { return it.target.isTopic })
	if first >= 0 {
		slices.SortFunc(items[first:], func(a, b failing) int { return strings.Compare(a.target.name(), b.target.name()) })
	}
	return items, skipped, nil
}

// notThere is why a topic that was named is left alone.
func notThere(base, on string, o *switching.Failover) Detail {
	switch on {
	case o.To:
		return Detail{Name: base, Code: CodeAlreadyThere, Problem: "is on " + o.To + " already"}
	case "":
		return Detail{Name: base, Problem: "is mapped nowhere"}
	}
	return Detail{Name: base, Problem: fmt.Sprintf("is on %s, and not on %s", on, o.From)}
}

// factsOf looks at the new cluster for as many topics as fit into a request. Nothing is made there. nothing is why no item can move at all.
func (s *Server) factsOf(ctx context.Context, o *switching.Failover, p *FailoverPlan, items []failing) (nothing *Error, err error) {
	seen, err := s.failover.Seen(ctx, o.From)
	if err != nil {
		return nil, err
	}
	plan, err := s.plan(ctx, "")
	if err != nil {
		return nil, err
	}
	var all []string
	for _, it := range items {
		all = append(all, it.topics...)
	}
	all = all[:min(len(all), maxFailoverChecked)]
	found := s.readyEach(ctx, o, all, &seen, false)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.Checked = len(all)
	moves := false
	for _, it := range items {
		var facts switching.FailoverFacts
		epoch := nextEpoch(plan, it.target)
		if it.stays(o.From) {
			facts, epoch = drainFacts(), it.moving.Epoch
		}
		n, unfit := min(len(it.topics), len(found)), 0
		for _, f := range found[:n] {
			if f.unfit == nil {
				facts.Add(f.facts)
				continue
			}
			if nothing == nil {
				nothing = f.unfit
			}
			if unfit++; len(p.Stays) < maxDetails {
				p.Stays = append(p.Stays, Detail{Name: f.base, Code: f.unfit.Code, Problem: f.unfit.Error()})
			}
		}
		found = found[n:]
		p.Staying += unfit
		p.Facts.Add(facts)
		moves = moves || unfit == 0 || unfit < len(it.topics)
		if unfit > 0 && it.target.isTopic {
			continue
		}
		if len(p.Moves) < maxDetails {
			p.Moves = append(p.Moves, FailoverMove{Name: it.target.name(), Epoch: epoch, Facts: facts})
		}
	}
	if left := p.Topics - p.Checked; left > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("%d topics were looked at on cluster %s, the other %d are when their turn comes", p.Checked, o.To, left))
	}
	if p.Staying > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("%d of the %d topics looked at stay on cluster %s, which serves them when it is back: cluster %s cannot. The others move without them", p.Staying, p.Checked, o.From, o.To))
	}
	if moves {
		nothing = nil
	}
	return nothing, nil
}

// nextEpoch is the epoch that a target gets when it moves.
func nextEpoch(p *planner, t target) uint64 {
	if t.isTopic {
		return route.NextEpoch(p.table.Decide(t.topic, p.def).Epoch)
	}
	return route.NextEpoch(p.table.DecideScope(t.scope, p.def).Epoch)
}

// readied is what was found of one topic on the new cluster, and made there.
type readied struct {
	base  string
	facts switching.FailoverFacts
	// unfit is why it cannot go there; nil when it can, or is to go all the same.
	unfit *Error
}

// readyEach looks at topics on the new cluster, and makes what they lack when create says so.
func (s *Server) readyEach(ctx context.Context, o *switching.Failover, topics []string, seen *switching.Seen, create bool) []readied {
	all := make([]readied, len(topics))
	inParallel(len(topics), readyParallel, func(i int) {
		ctx, cancel := context.WithTimeout(ctx, readyTimeout)
		defer cancel()
		r := &all[i]
		var err error
		r.base = topics[i]
		r.facts, err = s.failover.Ready(ctx, r.base, o.From, o.To, seen, create && !o.NoSubscriptions)
		switch {
		case err != nil && o.NoSubscriptions:
			r.facts.Notes = append(r.facts.Notes, err.Error())
		case err != nil:
			r.unfit = &Error{
				Code: CodeSubscriptions, Message: fmt.Sprintf("what cluster %s lacks for the subscriptions of %s cannot be found out, or made: %v", o.To, r.base, err),
				Remedy: "mend that; or repeat with --subscriptions none: a consumer whose subscription cluster " + o.To + " lacks then begins where it says itself, which by default skips what is there",
			}
		case len(r.facts.Problems) > 0 && !o.Force:
			r.unfit = &Error{
				Code: CodePreflight, Message: r.facts.Problems[0],
				Remedy: "mend it on cluster " + o.To + ", and order the failover again; or repeat with --force, and the clients of that topic may not work",
			}
		}
	})
	return all
}

// failoverOf is the order with that id, if it is one of a failover.
func (s *Server) failoverOf(ctx context.Context, id string) (o switching.Failover, ok bool, err error) {
	if !strings.HasPrefix(id, switching.FailoverPrefix) {
		return o, false, nil
	}
	o, err = store.Failover(ctx, s.store, id)
	if errors.Is(err, store.ErrNotFound) {
		return o, false, nil // the record of one topic, or one that is forgotten
	}
	return o, err == nil, err
}

// statusFailover is how far an order is.
func (s *Server) statusFailover(ctx context.Context, o switching.Failover) (*SwitchStatus, error) {
	st := &SwitchStatus{
		ID: o.ID, To: o.To, Mode: string(switching.ModeFailover), Total: o.Total, Flipped: o.Moved, Ended: o.Done, Switches: []SwitchDetail{}, Order: &o,
		Notes: o.Notes, Promised: switching.Promised(switching.ModeFailover), NotPromised: switching.NotPromised(switching.ModeFailover),
	}
	switch o.State {
	case switching.FailoverDone:
		st.State = stateDone
	case switching.FailoverIncomplete:
		st.State = stateIncomplete
	case switching.FailoverAborted:
		st.State = stateAborted
	default:
		st.State = stateRunning
	}
	for _, f := range o.Failed {
		st.Failed = append(st.Failed, Detail{Name: f.Name, Problem: f.Problem})
	}
	records, err := s.shownRecords(ctx, o)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(records, func(a, b switching.Record) int { return stateRank(a.State) - stateRank(b.State) })
	for _, rec := range records[:min(len(records), maxDetails)] {
		acks, err := s.store.Acks(ctx, rec.ID)
		if err != nil {
			return nil, err
		}
		d := SwitchDetail{Record: rec, Acks: acks}
		for _, a := range acks {
			d.Producers, d.Consumers, d.Unresolved = d.Producers+a.Producers, d.Consumers+a.Consumers, d.Unresolved+a.Unresolved
		}
		if rec.State == switching.StateEvicting {
			if outcome, err := s.judge(ctx, &rec); err == nil {
				d.Waiting = outcome.Waiting
			}
		}
		st.Switches = append(st.Switches, d)
	}
	return st, nil
}

// shownRecords are records of what an order has done. Who waits for one asks every second, so that not all thousands are read before it is over: only those that are in
// trouble, and of the others the newest.
func (s *Server) shownRecords(ctx context.Context, o switching.Failover) ([]switching.Record, error) {
	if o.State.Over() {
		return s.store.SwitchesOf(ctx, o.ID)
	}
	records, err := s.store.Switches(ctx, maxShown)
	if err != nil {
		return nil, err
	}
	records = slices.DeleteFunc(records, func(r switching.Record) bool { return r.Batch != o.ID })
	for _, id := range o.Late {
		if slices.ContainsFunc(records, func(r switching.Record) bool { return r.ID == id }) {
			continue
		}
		rec, err := s.store.Switch(ctx, id)
		switch {
		case err == nil:
			records = append(records, rec)
		case !errors.Is(err, store.ErrNotFound):
			return nil, err
		}
	}
	return records, nil
}

// maxShown bounds the records that are looked through for the status of an order that is under way.
const maxShown = 500

// forgotten says how many records of what an order has done are not kept any more; "" for none.
func forgotten(o switching.Failover, records []switching.Record) string {
	if len(records) >= o.Moved {
		return ""
	}
	return fmt.Sprintf("failover %s has moved %d topics and rules, and the map store keeps the records of %d: the oldest are dropped", o.ID, o.Moved, len(records))
}

// abortFailover has an order end: what has moved stays moved.
func (s *Server) abortFailover(ctx context.Context, o switching.Failover) (any, error) {
	for range wishAttempts {
		if o.State.Over() {
			return nil, &Error{Code: CodeTooLate, Message: fmt.Sprintf("failover %s is over: %s", o.ID, o.State), Remedy: fmt.Sprintf("to bring topics back, `pointsman switch reverse %s`", o.ID)}
		}
		o.Wish = switching.WishAbort
		err := store.PutFailover(ctx, s.store, &o)
		if err == nil {
			s.nudgeFailover()
			return s.statusFailover(ctx, o)
		}
		if !errors.Is(err, store.ErrConflict) {
			return nil, err
		}
		if o, err = store.Failover(ctx, s.store, o.ID); err != nil {
			return nil, err
		}
	}
	return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("failover %s changed %d times while it was written to", o.ID, wishAttempts), Remedy: "repeat the command"}
}

// proposals are the failovers that are proposed now.
func (s *Server) proposals(ctx context.Context) ([]Proposal, error) {
	states, _, err := store.FailoverPairs(ctx, s.store)
	if err != nil {
		return nil, err
	}
	all := []Proposal{}
	for _, p := range states {
		if p.Proposal != nil {
			all = append(all, Proposal{Proposal: *p.Proposal, Command: p.Proposal.Command()})
		}
	}
	return all, nil
}

// FailoverSummary is one order in a list.
type FailoverSummary struct {
	ID    string    `json:"id"`
	Asked time.Time `json:"asked"`
	From  string    `json:"from"`
	To    string    `json:"to"`
	// What moves: a topic, "N topics", a namespace, or everything.
	What  string                  `json:"what"`
	State switching.FailoverState `json:"state"`
	Total int                     `json:"total"`
	Moved int                     `json:"moved"`
	// Failed is how many could not be moved.
	Failed    int    `json:"failed,omitempty"`
	Automatic bool   `json:"automatic,omitempty"`
	Who       string `json:"who,omitempty"`
}

// maxListedFailovers is how many orders that are over are in a list.
const maxListedFailovers = 5

// failovers are the orders for a list.
func (s *Server) failovers(ctx context.Context, limit int) ([]FailoverSummary, error) {
	running, err := store.Failovers(ctx, s.store)
	if err != nil {
		return nil, err
	}
	over, err := store.FailoversOver(ctx, s.store)
	if err != nil {
		return nil, err
	}
	all := []FailoverSummary{}
	over = over[max(0, len(over)-min(limit, maxListedFailovers)):]
	for _, o := range slices.Backward(slices.Concat(over, running)) {
		if len(all) > 0 && all[len(all)-1].ID == o.ID {
			continue // it ends in this moment
		}
		what := fmt.Sprintf("%d topics", len(o.Topics))
		switch {
		case o.All:
			what = "everything"
		case o.Scope != "":
			what = scopeName(o.Scope)
		case len(o.Topics) == 1:
			what = o.Topics[0]
		}
		all = append(all, FailoverSummary{ID: o.ID, Asked: o.Asked, From: o.From, To: o.To, What: what, State: o.State, Total: o.Total, Moved: o.Moved, Failed: o.FailedCount, Automatic: o.Automatic, Who: o.Who})
	}
	return all, nil
}

// Proposal is a failover that is proposed, and the command that does it.
type Proposal struct {
	switching.Proposal
	Command string `json:"command"`
}
