package admin

import (
	"cmp"
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

// This file is the surface of batches: it writes their records and reads them, through the store alone. The proxy that leads drives them
// (internal/controller).

const (
	// maxDryRun is how many topics of a batch a dry run looks at: each has a preflight within one request.
	maxDryRun = 64
	// maxRunningBatches is how many may be under way or paused.
	maxRunningBatches = 16
	// partsAtOnce is how many parts are written at once.
	partsAtOnce = 8
	// DefaultBatchParallel is how many switches of a batch are under way at once, and the rest its gates, when a request does not say.
	DefaultBatchParallel = 8
	DefaultMaxFailed     = 0.05
	DefaultMaxHoldMillis = 5000
	DefaultMaxBacklog    = 10_000
)

// limits are those of a request, with the defaults for what it does not say.
func (o BatchOptions) limits() (switching.BatchLimits, error) {
	l := switching.BatchLimits{
		Waves: o.Waves, Pace: o.Pace, Parallel: cmp.Or(o.Parallel, DefaultBatchParallel), OnBlocked: cmp.Or(o.OnBlocked, switching.StopOnBlocked),
		MaxFailed: DefaultMaxFailed, MaxHoldMillis: DefaultMaxHoldMillis, MaxBacklog: DefaultMaxBacklog,
	}
	if len(l.Waves) == 0 {
		l.Waves = switching.DefaultWaves()
	}
	if o.MaxFailed != nil {
		l.MaxFailed = *o.MaxFailed
	}
	if o.MaxHoldMillis != nil {
		l.MaxHoldMillis = *o.MaxHoldMillis
	}
	if o.MaxBacklog != nil {
		l.MaxBacklog = *o.MaxBacklog
	}
	fault := func(format string, args ...any) error {
		return &Error{Code: CodeBadRequest, Message: fmt.Sprintf(format, args...), Remedy: "see `pointsman switch start --help`"}
	}
	switch {
	case l.Parallel < 1 || l.Parallel > switching.MaxBatchParallel:
		return l, fault("--parallel %d: want 1 to %d", l.Parallel, switching.MaxBatchParallel)
	case l.Pace < 0 || l.Pace > 1000:
		return l, fault("--pace %g/s: want at most 1000/s, and 0 for no limit", l.Pace)
	case l.MaxFailed < 0 || l.MaxFailed > 1:
		return l, fault("--max-failed %g%%: want 0%% to 100%%", l.MaxFailed*100)
	case l.MaxHoldMillis < 0 || l.MaxBacklog < 0:
		return l, fault("--max-hold and --max-backlog cannot be negative; 0 is no limit")
	}
	if err := checkOnBlocked(l.OnBlocked); err != nil {
		return l, err
	}
	if _, err := switching.WaveEnds(l.Waves, 1000); err != nil {
		return l, fault("--waves %s: %v", strings.Join(l.Waves, ","), err)
	}
	return l, nil
}

func checkOnBlocked(o switching.OnBlocked) error {
	if o == switching.StopOnBlocked || o == switching.SkipOnBlocked {
		return nil
	}
	return &Error{Code: CodeBadRequest, Message: fmt.Sprintf("--on-blocked %q: want %s or %s", o, switching.StopOnBlocked, switching.SkipOnBlocked), Remedy: "write one of them"}
}

// given is one of the options as the command line has it; "" when there is none.
func (o BatchOptions) given() string {
	switch {
	case len(o.Waves) > 0:
		return "--waves"
	case o.Pace != 0:
		return "--pace"
	case o.Parallel != 0:
		return "--parallel"
	case o.MaxFailed != nil:
		return "--max-failed"
	case o.MaxHoldMillis != nil:
		return "--max-hold"
	case o.MaxBacklog != nil:
		return "--max-backlog"
	case o.OnBlocked != "":
		return "--on-blocked"
	}
	return ""
}

// batchRequest reads which topics a request is about. targets are those that it names, or its namespace.
func batchRequest(r *SwitchRequest, targets []target) (switching.BatchRequest, string, error) {
	b := switching.BatchRequest{To: r.To, Percent: r.Percent}
	fault := func(message, remedy string) (switching.BatchRequest, string, error) {
		return b, "", &Error{Code: CodeBadRequest, Message: message, Remedy: remedy}
	}
	switch {
	case r.Percent < 0 || r.Percent > 100:
		return fault(fmt.Sprintf("--percent %g is no share", r.Percent), "write more than 0 and at most 100")
	case len(r.Topics) > 0 && (r.Percent != 0 || r.Prefix != ""):
		return fault("--percent and --prefix choose from a namespace", "name it with --namespace, or the topics alone with --topic")
	}
	if len(r.Topics) > 0 {
		for _, t := range targets {
			b.Topics = append(b.Topics, t.name())
		}
		return b, fmt.Sprintf("%d topics by name", len(b.Topics)), nil
	}
	if r.Namespace != "" {
		b.Namespace = targets[0].scope
	}
	if r.Prefix != "" {
		prefix := r.Prefix
		if b.Namespace != "" && !strings.Contains(prefix, "/") {
			prefix = b.Namespace + "/" + prefix
		}
		if !strings.Contains(prefix, "://") {
			prefix = "persistent://" + prefix
		}
		// The namespace is what stands before the last slash.
		_, path, _ := strings.Cut(prefix, "://")
		i := strings.LastIndexByte(path, '/')
		if i < 0 || strings.Count(path, "/") < 2 {
			return fault(fmt.Sprintf("--prefix %q names no namespace", r.Prefix), "write TENANT/NAMESPACE/BEGINNING, or add --namespace")
		}
		ns, err := route.ParseScope(path[:i])
		if err != nil {
			return fault(fmt.Sprintf("--prefix %q: %v", r.Prefix, err), "write TENANT/NAMESPACE/BEGINNING")
		}
		if b.Namespace != "" && b.Namespace != ns {
			return fault(fmt.Sprintf("--prefix %q is not in namespace %s", r.Prefix, b.Namespace), "drop one of them")
		}
		b.Namespace, b.Prefix = ns, prefix
	}
	scope := "namespace " + b.Namespace
	if b.Prefix != "" {
		scope = "topics that begin with " + b.Prefix
	}
	if b.Percent != 0 && b.Percent != 100 {
		scope = fmt.Sprintf("%g%% of %s", b.Percent, scope)
	}
	return b, scope, nil
}

// startStored plans a batch, and asks for it. warnings are shown with those of the plan.
func (s *Server) startStored(ctx context.Context, r *SwitchRequest, mode switching.Mode, targets []target, warnings ...string) (*SwitchStatus, error) {
	if s.planTopics == nil || s.preflight == nil {
		return nil, &Error{Code: CodeUnsupportedMode, Message: "this proxy cannot plan switches", Remedy: "use --mode immediate"}
	}
	if known := s.proxy.Info().Clusters; !slices.Contains(known, r.To) {
		return nil, &Error{Code: CodeUnknownCluster, Message: fmt.Sprintf("cluster %q is unknown; this proxy knows %s", r.To, strings.Join(known, ", ")), Remedy: "correct --to, or add it under clusters in the configuration of every proxy"}
	}
	limits, err := r.limits()
	if err != nil {
		return nil, err
	}
	limits.Force, limits.Reversible = r.Force, r.Reversible
	if mode == switching.ModeDrain {
		if r.MaxBacklog != nil && *r.MaxBacklog != 0 {
			return nil, &Error{Code: CodeUnsupportedMode, Message: "--max-backlog is for mode planned: in a drain nothing is replicated", Remedy: "leave it out"}
		}
		limits.MaxBacklog = 0
	}
	req, scope, err := batchRequest(r, targets)
	if err != nil {
		return nil, err
	}
	if len(req.Topics) > switching.MaxBatchTopics {
		return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("%d topics are more than the %d that one command moves", len(req.Topics), switching.MaxBatchTopics), Remedy: "name them in several commands"}
	}
	plan, err := s.planTopics(ctx, req)
	if err != nil {
		return nil, unplanned(err, r.To)
	}
	if len(plan.Gone) > 0 {
		return nil, &Error{Code: CodeBadName, Message: fmt.Sprintf("%d topics are mapped nowhere, so there is nothing to move, as %s", len(plan.Gone), plan.Gone[0]), Remedy: fmt.Sprintf("`pointsman routes set %s %s`", plan.Gone[0], r.To)}
	}
	if len(plan.Items) == 0 && len(plan.There) == 0 {
		return nil, nothingFound(req, scope, r.Percent)
	}
	if len(plan.Items) == 0 && !req.Whole() {
		return nil, &Error{
			Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: all of it (%s) is on %s already", scope, r.To), Remedy: "`pointsman explain TOPIC` tells why", Details: thereDetails(plan.There, r.To),
		}
	}
	now := time.Now()
	b := switching.Batch{
		ID: newSwitchID(now), Rev: 1, From: plan.From, To: r.To, Mode: mode, Scope: scope, Limits: limits, State: switching.BatchNew, Warnings: slices.Concat(warnings, plan.Warnings),
		Who: whoOr(r.Who), Why: r.Why, Started: now, Count: switching.BatchCount{Total: len(plan.Items)},
	}
	if req.Whole() {
		b.Namespace = req.Namespace
	}
	if b.Ends, err = switching.WaveEnds(limits.Waves, len(plan.Items)); err != nil {
		return nil, err
	}
	b.Ends = switching.JoinWaves(b.Ends, plan.Items)
	names := make([]string, len(plan.Items))
	for i, it := range plan.Items {
		names[i] = it.Topic
	}
	if err := s.guardRunning(ctx, names, ""); err != nil {
		return nil, err
	}
	if r.DryRun {
		return s.dryRun(ctx, b, plan, names)
	}
	if err := s.writeBatch(ctx, &b, plan.Items, names); err != nil {
		return nil, err
	}
	s.nudge()
	s.log.Info("batch asked for", "batch", b.ID, "scope", b.Scope, "topics", len(names), "to", b.To, "mode", b.Mode, "who", b.Who, "why", b.Why)
	st, err := s.batchStatus(ctx, b)
	if err != nil {
		return nil, err
	}
	st.Skipped = append(thereDetails(plan.There, r.To), st.Skipped...)
	return st, nil
}

// unplanned says what is wrong when the topics of a batch cannot be named: what is not the map store's trouble is that of the cluster that has them.
func unplanned(err error, to string) error {
	var said *Error
	switch {
	case errors.Is(err, switching.ErrTooManyTopics):
		return &Error{Code: CodeBadRequest, Message: err.Error()}
	case errors.As(err, &said), errors.Is(err, store.ErrUnavailable), errors.Is(err, store.ErrClosed), errors.Is(err, store.ErrNotFound):
		return err
	}
	return &Error{Code: CodeClusterDown, Message: "the topics cannot be listed: " + err.Error(), Remedy: "mend that, and try again; when that cluster is dead, `pointsman switch start --mode failover --from CLUSTER --to " + to + " --dry-run`"}
}

// nothingFound refuses a request for which there are no topics at all: most often its name is wrong.
func nothingFound(req switching.BatchRequest, scope string, percent float64) *Error {
	remedy := fmt.Sprintf("is the name right? `pointsman routes ls %s` and `pulsar-admin topics list %s` name what there is", req.Namespace, req.Namespace)
	switch {
	case percent > 0 && percent < 100:
		remedy = "name a larger share: one of few topics may have none; and is the name right?"
	case req.Prefix == "":
		remedy += fmt.Sprintf("; for topics that are still to come, `pointsman routes set %s %s`", req.Namespace, req.To)
	}
	return &Error{
		Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: there is no topic of it (%s), neither in the map nor on the cluster that its namespace is mapped to", scope), Remedy: remedy,
	}
}

func thereDetails(names []string, to string) []Detail {
	var ds []Detail
	for _, name := range names[:min(len(names), maxDetails)] {
		ds = append(ds, Detail{Name: name, Code: CodeAlreadyThere, Problem: "is on " + to + " already"})
	}
	return ds
}

// dryRun has the preflights of some topics, and shows the plan of all.
func (s *Server) dryRun(ctx context.Context, b switching.Batch, plan switching.BatchPlan, names []string) (*SwitchStatus, error) {
	sample := names
	st := &SwitchStatus{
		To: b.To, Mode: string(b.Mode), State: statePlanned, Total: len(names), Switches: []SwitchDetail{}, Promised: switching.Promised(b.Mode), NotPromised: switching.NotPromised(b.Mode),
		Skipped: thereDetails(plan.There, b.To),
	}
	if len(names) > maxDryRun {
		sample = nil
		for i := range maxDryRun {
			sample = append(sample, names[i*len(names)/maxDryRun])
		}
		st.Notes = append(st.Notes, fmt.Sprintf("a sample of %d of the %d topics was looked at; the batch looks at all of them before it moves the first", len(sample), len(names)))
	}
	if more := len(plan.There) - len(st.Skipped); more > 0 {
		st.Notes = append(st.Notes, fmt.Sprintf("%d more are on %s already", more, b.To))
	}
	moves := make([]move, len(sample))
	for i, name := range sample {
		t, err := parseTopicName(name)
		if err != nil {
			return nil, err
		}
		d, err := s.decide(ctx, t)
		if err != nil {
			return nil, err
		}
		moves[i] = move{target: t, from: d.Cluster, to: b.To, epoch: d.Epoch}
	}
	checks, err := s.checkWith(ctx, moves, order{mode: b.Mode, reversible: b.Limits.Reversible}, names)
	if err != nil {
		return nil, err
	}
	for _, c := range checks {
		b.Forecast.Add(c.Forecast)
		b.Count.Checked++
		if c.Refusal(b.Limits.Force) != "" {
			b.Count.Blocked++
		}
	}
	b.ID, b.State = "", ""
	st.Batch, st.Preflights = &b, checks
	return st, nil
}

// writeBatch writes a batch down: the record, the parts, and when somebody else has none of its topics meanwhile, that it may begin.
func (s *Server) writeBatch(ctx context.Context, b *switching.Batch, items []switching.BatchItem, names []string) error {
	running, err := s.store.RunningBatches(ctx)
	if err != nil {
		return err
	}
	if len(running) >= maxRunningBatches {
		return &Error{Code: CodeBusy, Message: fmt.Sprintf("%d batches are under way or paused", len(running)), Remedy: "end one of them (`pointsman switch list`)"}
	}
	if err := s.store.PutBatch(ctx, *b); err != nil && !errors.Is(err, store.ErrUnknown) {
		return err
	}
	parts := switching.SplitBatch(items, 0)
	errs := make([]error, len(parts))
	inParallel(len(parts), partsAtOnce, func(i int) {
		parts[i].Rev = 1
		errs[i] = s.store.PutBatchPart(ctx, b.ID, parts[i])
	})
	err = errors.Join(errs...)
	if err == nil {
		err = s.guardRunning(ctx, names, b.ID)
	}
	next := *b
	next.Rev, next.Parts = 2, len(parts)
	if next.State = switching.BatchChecking; err != nil {
		next.State, next.Ended, next.Note = switching.BatchAborted, time.Now(), "withdrawn: "+asError(err).Message
	}
	if putErr := s.store.PutBatch(ctx, next); err == nil {
		err = putErr
	}
	*b = next
	return err
}

// guardBatches refuses topics that a batch under way, other than the one named, has still to move.
func (s *Server) guardBatches(ctx context.Context, names map[string]bool, except string) (busy []Detail, ids []string, err error) {
	running, err := s.store.RunningBatches(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, b := range running {
		if b.ID == except {
			continue
		}
		parts, err := s.store.BatchParts(ctx, b.ID)
		if errors.Is(err, store.ErrNotFound) {
			continue
		} else if err != nil {
			return nil, nil, err
		}
		for _, p := range parts {
			for _, it := range p.Items {
				if names[it.Topic] && it.State != switching.ItemMoved && it.State != switching.ItemSkipped && len(busy) < maxDetails {
					busy = append(busy, Detail{Name: it.Topic, Code: CodeSwitching, Problem: fmt.Sprintf("batch %s of %s to %s, which is %s, has it", b.ID, cmp.Or(b.Who, "somebody"), b.To, b.Shown())})
					ids = append(ids, b.ID)
				}
			}
		}
	}
	return busy, ids, nil
}

// storedBatch reads a batch; ok is false when there is none of that id.
func (s *Server) storedBatch(ctx context.Context, id string) (b switching.Batch, ok bool, err error) {
	b, err = s.store.Batch(ctx, id)
	if errors.Is(err, store.ErrNotFound) {
		return b, false, nil
	}
	return b, err == nil, err
}

// batchStatus is how far a batch is: its counts, the switches that are under way or of note, and the topics that have not moved, with the reason.
func (s *Server) batchStatus(ctx context.Context, b switching.Batch) (*SwitchStatus, error) {
	c := b.Count
	st := &SwitchStatus{
		ID: b.ID, To: b.To, Mode: string(b.Mode), State: stateRunning, Total: c.Total, Flipped: c.Moved, Ended: c.Total - c.Left(), Switches: []SwitchDetail{},
		Batch: &b, Promised: switching.Promised(b.Mode), NotPromised: switching.NotPromised(b.Mode),
	}
	switch {
	case b.State.Over():
		st.State = string(b.State)
	case b.Pause != nil:
		st.State = statePaused
	case b.State == switching.BatchDraining:
		st.State = stateDraining
	}
	parts, err := s.store.BatchParts(ctx, b.ID)
	if err != nil {
		return nil, err
	}
	var ids []string // of the switches that are shown
	index := 0
	for _, p := range parts {
		for _, it := range p.Items {
			d := Detail{Name: it.Topic, Problem: it.Note}
			switch {
			case it.State == switching.ItemFailed && len(st.Failed) < maxDetails:
				st.Failed = append(st.Failed, d)
			case it.State == switching.ItemBlocked && len(st.Skipped) < maxDetails:
				d.Code, d.Verdict = CodePreflight, switching.Blocker
				st.Skipped = append(st.Skipped, d)
			case it.State == switching.ItemSkipped && len(st.Skipped) < maxDetails:
				d.Code = CodeAlreadyThere
				st.Skipped = append(st.Skipped, d)
			}
			if c.Total <= maxDetails && it.State != switching.ItemBlocked && it.State != switching.ItemSkipped {
				ids = append(ids, b.SwitchID(index))
			}
			index++
		}
	}
	if more := c.Failed - len(st.Failed); more > 0 {
		st.Notes = append(st.Notes, fmt.Sprintf("%d more have failed", more))
	}
	if more := c.Blocked + c.Skipped - len(st.Skipped); more > 0 {
		st.Notes = append(st.Notes, fmt.Sprintf("%d more were left where they are", more))
	}
	if c.Total > maxDetails { // of many only those under way
		running, err := s.store.Running(ctx)
		if err != nil {
			return nil, err
		}
		for _, rec := range running {
			if rec.Batch == b.ID {
				ids = append(ids, rec.ID)
			}
		}
	}
	return st, s.addSwitches(ctx, st, ids)
}

// addSwitches adds the details of switches that there are; troubled ones come first.
func (s *Server) addSwitches(ctx context.Context, st *SwitchStatus, ids []string) error {
	found, errs := make([]*SwitchDetail, len(ids)), make([]error, len(ids))
	inParallel(len(ids), checkParallel, func(i int) {
		rec, err := s.store.Switch(ctx, ids[i])
		if err == nil {
			var d SwitchDetail
			if d, err = s.detail(ctx, rec); err == nil {
				found[i] = &d
			}
		}
		if !errors.Is(err, store.ErrNotFound) { // it has not begun
			errs[i] = err
		}
	})
	for _, d := range found {
		if d != nil {
			st.Switches = append(st.Switches, *d)
		}
	}
	slices.SortStableFunc(st.Switches, func(a, b SwitchDetail) int { return cmp.Compare(stateRank(a.State), stateRank(b.State)) })
	return errors.Join(errs...)
}

// wishBatch changes the record of a batch over exactly the one that the change was made on, and begins anew when the leader was faster.
func (s *Server) wishBatch(ctx context.Context, b switching.Batch, who string, change func(*switching.Batch) error) (*SwitchStatus, error) {
	for range wishAttempts {
		before := b
		if err := change(&b); err != nil {
			return nil, err
		}
		b.Rev, b.WishBy = before.Rev+1, whoOr(who)
		err := s.store.PutBatch(ctx, b)
		if err == nil {
			s.log.Info("a batch was changed by its operator", "batch", b.ID, "who", b.WishBy, "state", b.Shown(), "abort", b.Abort, "resumed", b.Resumed)
			s.nudge()
			return s.batchStatus(ctx, b)
		}
		if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
			return nil, err
		}
		if b, err = s.store.Batch(ctx, b.ID); err != nil {
			return nil, err
		}
	}
	return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("batch %s changed %d times while it was written to", b.ID, wishAttempts), Remedy: "repeat the command"}
}

func batchTooLate(b switching.Batch, why string) error {
	return &Error{Code: CodeTooLate, Message: fmt.Sprintf("batch %s is %s", b.ID, b.Shown()), Remedy: why}
}

// abortBatch gives a batch up: what has moved stays moved.
func (s *Server) abortBatch(ctx context.Context, b switching.Batch, who string) (*SwitchStatus, error) {
	return s.wishBatch(ctx, b, who, func(b *switching.Batch) error {
		if b.State.Over() {
			return batchTooLate(*b, "it has ended; to bring its topics back, `pointsman switch reverse "+b.ID+"`")
		}
		b.Abort, b.Pause = true, nil
		return nil
	})
}

// pauseBatch keeps more of it from beginning.
func (s *Server) pauseBatch(ctx context.Context, b switching.Batch, who, why string) (*SwitchStatus, error) {
	return s.wishBatch(ctx, b, who, func(b *switching.Batch) error {
		switch {
		case b.State.Over() || b.Abort:
			return batchTooLate(*b, "there is nothing to pause")
		case b.Pause == nil:
			text := "paused by " + whoOr(who)
			if why != "" {
				text += ": " + why
			}
			b.Pause = &switching.BatchPause{Gate: switching.GateOperator, Why: text, At: time.Now()}
		}
		return nil
	})
}

// resumeBatch has a batch go on, and what has failed or was blocked tried again.
func (s *Server) resumeBatch(ctx context.Context, b switching.Batch, r *SwitchCommand) (*SwitchStatus, error) {
	if b.State.Over() && b.State != switching.BatchDone {
		// It lets go of its topics when it ends, so somebody else may have them.
		parts, err := s.store.BatchParts(ctx, b.ID)
		if err != nil {
			return nil, err
		}
		var names []string
		for _, p := range parts {
			for _, it := range p.Items {
				if it.State != switching.ItemMoved && it.State != switching.ItemSkipped {
					names = append(names, it.Topic)
				}
			}
		}
		if err := s.guardRunning(ctx, names, b.ID); err != nil {
			return nil, err
		}
	}
	if r.OnBlocked != "" {
		if err := checkOnBlocked(r.OnBlocked); err != nil {
			return nil, err
		}
	}
	return s.wishBatch(ctx, b, r.Who, func(b *switching.Batch) error {
		switch {
		case b.State == switching.BatchDone:
			return batchTooLate(*b, "every topic has moved; `pointsman switch reverse "+b.ID+"` moves them back")
		case b.Parts == 0 && b.Count.Total > 0:
			return batchTooLate(*b, "its topics were never written down; ask for it again")
		case !b.State.Over() && b.Pause == nil:
			return batchTooLate(*b, "it is not paused")
		}
		if b.State.Over() {
			if b.State = switching.BatchChecking; !b.Moving.IsZero() {
				b.State = switching.BatchMoving
			}
			b.Ended, b.Note = time.Time{}, ""
		}
		b.Pause, b.Abort = nil, false
		b.Resumed++
		b.Limits.Force = b.Limits.Force || r.Force
		b.Limits.Reversible = b.Limits.Reversible || r.Reversible
		b.Limits.OnBlocked = cmp.Or(r.OnBlocked, b.Limits.OnBlocked)
		return nil
	})
}

// reverseBatch starts a new batch in the other direction, of what has moved.
func (s *Server) reverseBatch(ctx context.Context, b switching.Batch, r *SwitchCommand) (*SwitchStatus, error) {
	switch {
	case b.State == switching.BatchDraining:
		return nil, batchTooLate(b, fmt.Sprintf("`pointsman switch reverse %s`, and so on, takes a single topic back as long as nobody has had a message of it on %s; all of them can be brought back when the batch has ended", b.SwitchID(0), b.To))
	case !b.State.Over():
		return nil, batchTooLate(b, "wait for its end, or end it with `pointsman switch abort "+b.ID+"`")
	case len(b.From) != 1:
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("the topics of batch %s came from %d clusters (%s)", b.ID, len(b.From), strings.Join(b.From, ", ")), Remedy: "move them back with one `pointsman switch start --topics-from` for each"}
	}
	req := &SwitchRequest{
		To: b.From[0], Mode: string(b.Mode.Back()), Force: r.Force, DryRun: r.DryRun, Reversible: r.Reversible, Who: r.Who, Why: cmp.Or(r.Why, "reverse of "+b.ID),
		BatchOptions: BatchOptions{
			Waves: b.Limits.Waves, Pace: b.Limits.Pace, Parallel: b.Limits.Parallel, MaxFailed: &b.Limits.MaxFailed, MaxHoldMillis: &b.Limits.MaxHoldMillis, MaxBacklog: &b.Limits.MaxBacklog,
			OnBlocked: cmp.Or(r.OnBlocked, b.Limits.OnBlocked),
		},
	}
	moved, faults, err := s.stillMoved(ctx, b)
	var others []string
	if err == nil && b.Ruled {
		moved, others, err = s.parted(ctx, b, moved)
	}
	var warnings []string
	switch {
	case err != nil:
		return nil, err
	case len(faults) > 0:
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("batch %s cannot be reversed: %s: %s", b.ID, faults[0].Name, faults[0].Problem), Remedy: "plan a new switch with `pointsman switch start`", Details: faults[:min(len(faults), maxDetails)]}
	case b.Ruled && len(others) == 0:
		req.Namespace = scopeName(b.Namespace)
	case len(moved) == 0:
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("no topic of batch %s has moved", b.ID), Remedy: "there is nothing to reverse"}
	default:
		req.Topics = moved
	}
	if len(others) > 0 {
		warnings = append(warnings, fmt.Sprintf("%d topics of %s that batch %s has not moved stay where they are, and its rule goes on naming %s; `pointsman switch start --namespace %s --to %s` moves all of it: %s",
			len(others), b.Namespace, b.ID, b.To, scopeName(b.Namespace), req.To, strings.Join(others[:min(len(others), maxDetails)], ", ")))
	}
	targets, err := switchTargets(req)
	if err != nil {
		return nil, err
	}
	return s.startStored(ctx, req, b.Mode.Back(), targets, warnings...)
}

// parted are the topics of a batch's namespace that are not where they came from: those that it has moved and that there are still, and the others, which
// were there before, or have come since.
func (s *Server) parted(ctx context.Context, b switching.Batch, moved []string) (own, others []string, err error) {
	if s.planTopics == nil {
		return moved, nil, nil // nothing will move
	}
	plan, err := s.planTopics(ctx, switching.BatchRequest{To: b.From[0], Namespace: b.Namespace})
	if err != nil {
		return nil, nil, unplanned(err, b.From[0])
	}
	slices.Sort(moved)
	for _, it := range plan.Items {
		if _, ok := slices.BinarySearch(moved, it.Topic); ok {
			own = append(own, it.Topic)
		} else {
			others = append(others, it.Topic)
		}
	}
	slices.Sort(others)
	return own, others, nil
}

// stillMoved are the topics that a batch has moved; faults are those that somebody else has moved since.
func (s *Server) stillMoved(ctx context.Context, b switching.Batch) (moved []string, faults []Detail, err error) {
	parts, err := s.store.BatchParts(ctx, b.ID)
	if err != nil {
		return nil, nil, err
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	// What follows the rule that the batch has written is as that has left it.
	rule, ok := p.table.Rule(b.Namespace)
	ruled := b.Ruled && ok && rule.Cluster == b.To && rule.Epoch == b.Rule
	index := 0
	for _, part := range parts {
		for _, it := range part.Items {
			id := b.SwitchID(index)
			index++
			if it.State != switching.ItemMoved {
				continue
			}
			t, err := parseTopicName(it.Topic)
			if err != nil {
				return nil, nil, err
			}
			d := p.table.Decide(t.topic, p.def)
			if byRule := ruled && d.Source != route.SourceTopic; d.Cluster != b.To || d.SwitchID != id && !byRule {
				faults = append(faults, Detail{Name: it.Topic, Problem: fmt.Sprintf("is on %s at epoch %d by now, and not as the batch has left it", d.Cluster, d.Epoch)})
				continue
			}
			moved = append(moved, it.Topic)
		}
	}
	return moved, faults, nil
}

// newestBatches are the newest batches.
func (s *Server) newestBatches(ctx context.Context, limit int) ([]switching.Batch, error) {
	all, err := s.store.Batches(ctx, min(limit, store.KeptBatches))
	if all == nil {
		all = []switching.Batch{}
	}
	return all, err
}
