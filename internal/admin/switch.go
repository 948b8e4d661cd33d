package admin

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// Bounds of switches.
const (
	maxBatches     = 64 // kept, running and ended
	maxRunning     = 4  // batches at once
	switchParallel = 8  // topics of one batch at once, after the first one went well
	ackTimeout     = 10 * time.Second
	ackPerHandles  = 500 // a namespace's proxies get a second more for so many clients: eviction is paced
	maxAckTimeout  = 10 * time.Minute
	ackGrace       = 5 * time.Second // after the deadline, before another proxy ends an orphaned switch
	assignTimeout  = 2 * time.Second
	assignParallel = 16
	maxAssigned    = 2_000 // addresses in one record
	maxDetails     = 100
	maxRecords     = 10_000
	maxChecked     = 16 // namespaces whose existence is asked for
)

// handleSwitchStart checks everything that can be checked before anything is changed, and then moves the topics in the background.
func (s *Server) handleSwitchStart(ctx context.Context, r *SwitchRequest) (any, error) {
	mode, err := switching.ParseMode(r.Mode)
	if err != nil {
		return nil, &Error{Code: CodeUnsupportedMode, Message: err.Error(), Remedy: "leave it out for the planned one (`pointsman switch start --help`)"}
	}
	if option := r.given(); option != "" && !mode.Driven() {
		return nil, &Error{Code: CodeUnsupportedMode, Message: option + " is for batches, in mode planned or drain", Remedy: "leave it out, or change --mode"}
	}
	if r.Reversible && !mode.Driven() {
		return nil, &Error{Code: CodeUnsupportedMode, Message: "--reversible is for mode planned or drain: the others have no preflight that looks at the way back", Remedy: "leave it out, or change --mode"}
	}
	if mode == switching.ModeFailover {
		return s.startFailover(ctx, r)
	}
	targets, err := switchTargets(r)
	if err != nil {
		return nil, err
	}
	if mode.Driven() {
		return s.startPlanned(ctx, r, mode, targets)
	}
	if err := s.guardSwitch(ctx, r); err != nil {
		return nil, err
	}
	b := &batch{id: newSwitchID(time.Now()), to: r.To, mode: mode, who: whoOr(r.Who), why: r.Why, force: r.Force, ended: make(chan struct{})}
	plan, err := s.planBatch(ctx, b, targets)
	if err != nil {
		return nil, err
	}
	if len(b.items) == 0 {
		return nil, &Error{
			Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: %s on %s already", isAre(len(b.skipped), r), r.To),
			Remedy: "`pointsman explain TOPIC` tells why", Details: b.skipped,
		}
	}
	topics := make([]string, 0, len(b.items))
	for _, it := range b.items {
		topics = append(topics, it.target.name())
	}
	if err := s.guardRunning(ctx, topics, ""); err != nil {
		return nil, err
	}
	if !r.Force {
		if err := s.guardNamespaces(ctx, b); err != nil {
			return nil, err
		}
	}
	if r.DryRun {
		status := b.status()
		status.State = statePlanned
		status.Clients, _, err = s.askHandles(ctx, topics, func(t route.Topic) bool {
			return plan.table.Decide(t, plan.def).Cluster != b.to
		})
		return status, err
	}
	if err := s.startBatch(b); err != nil {
		return nil, err
	}
	return b.status(), nil
}

// switchTargets reads what is to be moved; all bad names are reported at once.
func switchTargets(r *SwitchRequest) ([]target, error) {
	switch {
	case r.To == "":
		return nil, &Error{Code: CodeBadRequest, Message: "no target cluster is named", Remedy: "add --to CLUSTER"}
	case r.From != "" && r.Mode != string(switching.ModeFailover):
		return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("--from %s is for --mode failover: in the others the map says where a topic is", r.From), Remedy: "leave it out, and name --topic, --topics-from or --namespace; or, when the cluster is dead, add --mode failover"}
	case r.Subscriptions != "" && r.Mode != string(switching.ModeFailover):
		return nil, &Error{Code: CodeUnsupportedMode, Message: fmt.Sprintf("--subscriptions %s is for --mode failover", r.Subscriptions), Remedy: "leave it out"}
	case (len(r.Topics) > 0) == (r.Namespace != "" || r.Prefix != ""):
		return nil, &Error{Code: CodeBadRequest, Message: "a switch moves either topics or one namespace", Remedy: "name --topic (repeatable), --topics-from FILE, or --namespace TENANT/NAMESPACE (or --prefix)"}
	case r.Mode == string(switching.ModeImmediate) && (r.Prefix != "" || r.Percent != 0):
		return nil, &Error{Code: CodeUnsupportedMode, Message: "immediate mode moves topics by name, or a whole namespace", Remedy: "leave --prefix and --percent out, or use --mode planned"}
	}
	if r.Namespace == "" && r.Prefix != "" {
		return []target{}, nil // the prefix names it
	}
	if r.Namespace != "" {
		t, err := parseName(r.Namespace)
		if err == nil && (t.isTopic || scopeKind(t.scope) != "namespace") {
			err = &Error{Code: CodeBadName, Message: fmt.Sprintf("%q is no namespace", r.Namespace), Remedy: "write TENANT/NAMESPACE (V1: namespace:PROPERTY/CLUSTER/NAMESPACE)"}
		}
		return []target{t}, err
	}
	var targets []target
	var faults []Detail
	seen := map[string]bool{}
	for i, name := range r.Topics {
		t, err := parseTopicName(name)
		if err != nil {
			faults = append(faults, Detail{Name: name, Line: i + 1, Problem: err.Error()})
			continue
		}
		if !seen[t.name()] {
			seen[t.name()] = true
			targets = append(targets, t)
		}
	}
	switch {
	case len(faults) == 1 && len(r.Topics) == 1:
		_, err := parseTopicName(r.Topics[0])
		return nil, err
	case len(faults) > 0:
		return nil, &Error{Code: CodeBadName, Message: fmt.Sprintf("%d of %d topics cannot be moved; nothing was changed", len(faults), len(r.Topics)), Remedy: "mend or remove these and repeat", Details: faults}
	}
	return targets, nil
}

// guardSwitch refuses a target that is unknown or down, and members that would not see the flip.
func (s *Server) guardSwitch(ctx context.Context, r *SwitchRequest) error {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return err
	}
	if err := s.guardCluster(ctx, []string{r.To}, r.Force); err != nil || r.Force {
		return err
	}
	var gone []string
	for _, m := range members {
		if !m.Live && m.ID != s.proxy.Info().ID {
			gone = append(gone, m.ID)
		}
	}
	if len(gone) > 0 {
		return &Error{
			Code:    CodeProxyUnreachable,
			Message: fmt.Sprintf("proxy %s is a member but not connected to the map store: if it still runs, it would keep its clients on the old cluster", strings.Join(gone, ", ")),
			Remedy:  "bring it back; or, when its process has certainly ended, repeat with --force",
		}
	}
	for _, c := range s.proxy.Clusters() {
		if c.Name == r.To && c.Health == HealthDown {
			return &Error{Code: CodeClusterDown, Message: fmt.Sprintf("cluster %s does not answer: %s", r.To, c.Detail), Remedy: "look at `pointsman clusters ls`; to move there all the same, repeat with --force"}
		}
	}
	return nil
}

// HealthDown is ClusterStatus.Health of a cluster that does not answer.
const HealthDown = "down"

// planBatch decides what has to be moved and in which order.
func (s *Server) planBatch(ctx context.Context, b *batch, targets []target) (*planner, error) {
	base := ""
	if len(targets) == 1 && targets[0].isTopic {
		base = targets[0].topic.Base()
	}
	p, err := s.plan(ctx, base)
	if err != nil {
		return nil, err
	}
	if !targets[0].isTopic {
		return p, b.planNamespace(p, targets[0])
	}
	for _, t := range targets {
		if _, err := p.entry(t.topic.Base()); err != nil {
			return nil, err
		}
		d := p.table.Decide(t.topic, p.def)
		if d.Cluster == b.to {
			b.skipped = append(b.skipped, Detail{Name: t.name(), Code: CodeAlreadyThere, Problem: "is on " + b.to + " already"})
			continue
		}
		b.add(t, d.Cluster)
	}
	return p, nil
}

func (b *batch) planNamespace(p *planner, ns target) error {
	plan := switching.PlanNamespace(p.table, ns.scope, b.to, p.def)
	if plan.Empty() {
		b.skipped = append(b.skipped, Detail{Name: ns.name(), Code: CodeAlreadyThere, Problem: "is on " + b.to + " already"})
		return nil
	}
	for _, base := range plan.Topics {
		t, err := route.ParseTopic(base)
		if err != nil {
			return badName(err)
		}
		if _, err := p.entry(base); err != nil {
			return err
		}
		b.add(target{topic: t, isTopic: true}, p.table.Decide(t, p.def).Cluster)
	}
	if plan.Rule {
		b.add(ns, p.table.DecideScope(ns.scope, p.def).Cluster)
	}
	b.redundant = plan.Redundant
	b.namespace = &ns
	return nil
}

// guardNamespaces asks the target, for one topic of each namespace, whether the namespace exists there. A cluster that
// does not answer in time is believed.
func (s *Server) guardNamespaces(ctx context.Context, b *batch) error {
	ctx, cancel := context.WithTimeout(ctx, assignTimeout)
	defer cancel()
	asked := map[string]bool{}
	for _, it := range b.items {
		if !it.target.isTopic || asked[it.target.topic.Namespace()] || len(asked) == maxChecked {
			continue
		}
		ns := it.target.topic.Namespace()
		asked[ns] = true
		if _, err := s.proxy.Partitions(ctx, b.to, it.target.topic.Base()); errors.Is(err, ErrNamespaceNotFound) {
			return &Error{Code: CodeNoNamespace, Message: fmt.Sprintf("namespace %s does not exist on cluster %s (%v)", ns, b.to, err), Remedy: "create it there first; clients would be refused"}
		}
	}
	return nil
}

func isAre(n int, r *SwitchRequest) string {
	switch {
	case r.Namespace != "":
		return "namespace " + r.Namespace + " is"
	case n == 1:
		return r.Topics[0] + " is"
	}
	return fmt.Sprintf("all %d topics are", n)
}

// Assign is which brokers of a cluster own the partitions of a topic, by full name, and how many could not be found out. It takes assignTimeout
// at most.
func (s *Server) Assign(ctx context.Context, cluster, base string) (map[string]string, int) {
	return s.assign(ctx, cluster, []string{base})
}

// assign asks the cluster which brokers own the topics, so that evicted clients can be sent there without a lookup of their own. What
// cannot be found out in time is left out and counted.
func (s *Server) assign(ctx context.Context, cluster string, bases []string) (map[string]string, int) {
	ctx, cancel := context.WithTimeout(ctx, assignTimeout)
	defer cancel()
	counts := make([]int, len(bases)) // of partitions; -1 unknown
	inParallel(len(bases), assignParallel, func(i int) {
		n, err := s.proxy.Partitions(ctx, cluster, bases[i])
		if err != nil {
			n = -1
		}
		counts[i] = n
	})
	var names []string
	missing := 0
	for i, base := range bases {
		switch n := counts[i]; {
		case n < 0:
			missing++
		case n == 0:
			names = append(names, base)
		default:
			for p := range n {
				names = append(names, fmt.Sprintf("%s-partition-%d", base, p))
			}
		}
	}
	over := max(0, len(names)-maxAssigned)
	names = names[:len(names)-over]
	owners := make([]string, len(names))
	inParallel(len(names), assignParallel, func(i int) {
		if owner, err := s.proxy.Lookup(ctx, cluster, names[i]); err == nil {
			owners[i] = owner.Broker
		}
	})
	assigned := map[string]string{}
	for i, name := range names {
		if owners[i] != "" {
			assigned[name] = owners[i]
		}
	}
	return assigned, missing + over + len(names) - len(assigned)
}

// inParallel calls f for 0 to n−1, at most limit at once, and returns when all have returned.
func inParallel(n, limit int, f func(i int)) {
	var wg sync.WaitGroup
	free := make(chan struct{}, limit)
	for i := range n {
		free <- struct{}{}
		wg.Go(func() {
			defer func() { <-free }()
			f(i)
		})
	}
	wg.Wait()
}

// flip moves one item: everything that can be known before is asked for, then one write changes the map. A record is returned
// when the map was changed, even if something went wrong afterwards.
func (s *Server) flip(ctx context.Context, b *batch, it *item) (*switching.Record, error) {
	const attempts = 3
	started := time.Now()
	var conflict error
	for range attempts {
		p, err := s.planFor(ctx, it.target)
		if err != nil {
			return nil, err
		}
		if now := p.decided(it.target); now == b.to {
			return nil, errAlreadyThere
		} else if now != it.from {
			e := &Error{Code: CodeConflict, Message: fmt.Sprintf("%s was on %q when the switch was started and is on %q now", it.target.name(), it.from, now), Remedy: "look at `pointsman history` and decide anew"}
			if winner := s.winner(ctx, it.target.name()); winner != "" {
				e.Message += "; " + winner
			}
			return nil, e
		}
		if _, err := p.set(it.target, b.to, 0, it.id); err != nil {
			return nil, err
		}
		rec, again, err := s.writeItem(ctx, b, it, p, started, nil, cmp.Or(b.why, "switch "+b.id))
		if !again {
			return rec, err
		}
		conflict = err // perhaps only of a rule above: look again
	}
	return nil, conflict
}

// writeItem writes the move of one item that p has planned, with its record. again tells that somebody was faster, and nothing was written.
func (s *Server) writeItem(ctx context.Context, b *batch, it *item, p *planner, started time.Time, facts *switching.FailoverFacts, why string) (done *switching.Record, again bool, err error) {
	rec, err := s.record(ctx, b, it, p, started)
	if err != nil {
		return nil, false, err
	}
	rec.Failover = facts
	written, err := s.write(ctx, p, rec, b.who, why)
	switch {
	case written > 0:
		return rec, false, err
	case errors.Is(err, store.ErrConflict):
		return nil, true, err
	case errors.Is(err, store.ErrUnknown):
		done, err = s.settle(ctx, rec, err)
		return done, false, err
	}
	return nil, false, err
}

// errAlreadyThere ends an item that somebody else moved to the same cluster.
var errAlreadyThere = errors.New("already there")

// decided is the cluster of a target now.
func (p *planner) decided(t target) string {
	if t.isTopic {
		return p.table.Decide(t.topic, p.def).Cluster
	}
	return p.table.DecideScope(t.scope, p.def).Cluster
}

// record makes the account of a flip that is about to be written.
func (s *Server) record(ctx context.Context, b *batch, it *item, p *planner, started time.Time) (*switching.Record, error) {
	bases, ackTime := []string{it.target.name()}, ackTimeout
	if !it.target.isTopic {
		_, topics, err := s.askHandles(ctx, []string{it.target.name()}, p.moves)
		if err != nil {
			return nil, err
		}
		bases = bases[:0]
		handles := 0
		for base, n := range topics {
			bases = append(bases, base)
			handles += n.Producers + n.Consumers
		}
		slices.Sort(bases)
		ackTime = min(ackTimeout+time.Duration(handles/ackPerHandles)*time.Second, maxAckTimeout)
	}
	rec := &switching.Record{
		ID: it.id, Rev: 1, Topic: it.target.name(), From: it.from, To: b.to, Mode: b.mode, State: switching.StateEvicting,
		Runner: s.proxy.Info().ID, Who: b.who, Why: b.why, Started: started,
	}
	if !it.target.isTopic {
		rec.Topic = it.target.scope
	}
	if it.id != b.id {
		rec.Batch = b.id
	}
	over := max(0, len(bases)-maxAssigned)
	rec.Assigned, rec.Unassigned = s.assign(ctx, b.to, bases[:len(bases)-over])
	rec.Unassigned += over
	members, err := s.members(ctx)
	if err != nil {
		return nil, err
	}
	rec.Expect = liveMembers(members)
	st := p.steps[len(p.steps)-1]
	if st.entry != nil {
		rec.Epoch = st.entry.After.Epoch
	} else {
		rec.Epoch = st.rule.After.Epoch
	}
	rec.Flipped = time.Now()
	rec.Deadline = rec.Flipped.Add(ackTime)
	return rec, nil
}

// settle finds out whether a write whose answer was lost has happened: its record was created with it.
func (s *Server) settle(ctx context.Context, rec *switching.Record, lost error) (*switching.Record, error) {
	_, err := s.store.Switch(ctx, rec.ID)
	switch {
	case err == nil:
		return rec, nil
	case errors.Is(err, store.ErrNotFound):
		return nil, fmt.Errorf("the flip was not written: %w", store.ErrUnavailable)
	}
	return nil, lost
}

// detail adds the acks to a record. A switch whose driver is gone is ended here.
func (s *Server) detail(ctx context.Context, rec switching.Record) (SwitchDetail, error) {
	if rec.Mode.Driven() {
		return s.detailPlanned(ctx, rec)
	}
	acks, err := s.store.Acks(ctx, rec.ID)
	if err != nil {
		return SwitchDetail{}, err
	}
	if acks == nil {
		acks = []switching.Ack{}
	}
	o, err := s.judge(ctx, &rec)
	if err != nil {
		return SwitchDetail{}, err
	}
	if rec.State == switching.StateEvicting && time.Since(rec.Deadline) > ackGrace {
		if err := s.end(ctx, &rec); err != nil {
			return SwitchDetail{}, err
		}
	}
	d := SwitchDetail{Record: rec, Acks: acks, Producers: o.Producers, Consumers: o.Consumers, Unresolved: o.Unresolved}
	if rec.State != switching.StateDone {
		d.Waiting = o.Waiting
	}
	return d, nil
}

// handleSwitch answers GET /switches/{id} for the id of one switch or of a command that moves several.
func (s *Server) handleSwitch(ctx context.Context, r *http.Request) (any, error) {
	st, err := s.status(ctx, r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return st, nil
}

// status is how far the switches of an id are.
func (s *Server) status(ctx context.Context, id string) (*SwitchStatus, error) {
	if o, ok, err := s.failoverOf(ctx, id); err != nil {
		return nil, err
	} else if ok {
		return s.statusFailover(ctx, o)
	}
	if b, ok, err := s.storedBatch(ctx, id); err != nil {
		return nil, err
	} else if ok {
		return s.batchStatus(ctx, b)
	}
	var status *SwitchStatus
	if b := s.batch(id); b != nil {
		status = b.status()
	}
	records, err := s.records(ctx, id)
	if err != nil {
		return nil, err
	}
	if status == nil {
		if len(records) == 0 {
			return nil, noSwitch(id)
		}
		status = &SwitchStatus{ID: id, To: records[0].To, Mode: string(records[0].Mode), Promised: switching.Promised(records[0].Mode), NotPromised: switching.NotPromised(records[0].Mode)}
		if records[0].Mode.Driven() {
			status.Total = len(records) // all were written at the start
		}
	}
	status.Flipped, status.Ended = 0, 0
	// Troubled ones first: they are what an operator looks for.
	slices.SortStableFunc(records, func(a, b switching.Record) int { return cmp.Compare(stateRank(a.State), stateRank(b.State)) })
	status.Switches = []SwitchDetail{}
	for i, rec := range records {
		if i < maxDetails {
			d, err := s.detail(ctx, rec)
			if err != nil {
				return nil, err
			}
			rec = d.Record
			status.Switches = append(status.Switches, d)
		}
		if rec.State.Over() {
			status.Ended++
		}
		if !rec.Flipped.IsZero() {
			status.Flipped++
		}
	}
	status.State = cmp.Or(status.State, stateOf(status.Switches))
	return status, nil
}

// records are the stored switches of an id.
func (s *Server) records(ctx context.Context, id string) ([]switching.Record, error) {
	rec, err := s.store.Switch(ctx, id)
	if err == nil {
		return []switching.Record{rec}, nil
	}
	if !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	return s.store.SwitchesOf(ctx, id)
}

func stateRank(s switching.State) int {
	return slices.Index([]switching.State{
		switching.StateIncomplete, switching.StateAborted, switching.StateFenced, switching.StatePrepared, switching.StateEvicting, switching.StateRequested, switching.StateDraining, switching.StateReturned, switching.StateDone,
	}, s)
}

// stateOf is the state of a command that this proxy does not drive, from its switches. What still runs counts before what went wrong, but in
// immediate mode, which begins nothing more after trouble.
func stateOf(ds []SwitchDetail) string {
	count := map[string]int{}
	for _, d := range ds {
		switch {
		case d.State == switching.StateIncomplete && d.Mode == switching.ModeImmediate:
			return stateIncomplete
		case d.State == switching.StateRequested && d.Wish == switching.WishPause:
			count[statePaused]++
		case d.State == switching.StateDraining:
			count[stateDraining]++
		case !d.State.Over():
			count[stateRunning]++
		default:
			count[string(d.State)]++
		}
	}
	for _, state := range []string{stateRunning, statePaused, stateDraining, stateAborted, stateIncomplete, string(switching.StateReturned)} {
		if count[state] > 0 {
			return state
		}
	}
	return stateDone
}

func (s *Server) handleSwitches(ctx context.Context, r *http.Request) (any, error) {
	limit, err := intParam(r.URL.Query().Get("limit"), 20, maxRecords)
	if err != nil {
		return nil, err
	}
	records, err := s.store.Switches(ctx, limit)
	if err != nil {
		return nil, err
	}
	if records == nil {
		records = []switching.Record{}
	}
	proposals, err := s.proposals(ctx)
	if err != nil {
		return nil, err
	}
	failovers, err := s.failovers(ctx, limit)
	if err != nil {
		return nil, err
	}
	batches, err := s.newestBatches(ctx, limit)
	return SwitchList{Switches: records, Batches: batches, Proposals: proposals, Failovers: failovers}, err
}

// newSwitchID sorts by time and can be read out over a telephone.
func newSwitchID(now time.Time) string {
	var r [3]byte
	_, _ = rand.Read(r[:]) // never fails
	return "sw-" + now.UTC().Format("20060102-150405") + "-" + hex.EncodeToString(r[:])
}
