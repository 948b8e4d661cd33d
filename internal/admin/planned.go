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

// This file is the surface of planned switches: it writes records and reads them, through the store alone, so that any proxy can do it. The
// proxy that leads does the work (internal/controller).

const (
	// maxPlanned is how many topics one command may move in planned mode: each has a preflight within one request.
	maxPlanned = 64
	// checkParallel is how many preflights run at once.
	checkParallel = 8
	// wishAttempts is how often a write of a record is repeated that the leader has overtaken.
	wishAttempts = 20
	// statePaused is that of a command of which nothing runs, and something is paused; stateAborted of one that has ended otherwise than it should.
	statePaused  = "paused"
	stateAborted = "aborted"
)

// move is one topic that is to be moved in planned mode.
type move struct {
	target   target
	from, to string
	epoch    uint64 // of the decision now
}

// order is what goes with the moves of one command.
type order struct {
	mode       switching.Mode
	since      map[string]map[string]string // of a way back, by topic: CheckRequest.Since
	who, why   string
	force      bool
	dryRun     bool
	reversible bool
}

// startPlanned plans the moves of a request, and asks for them.
func (s *Server) startPlanned(ctx context.Context, r *SwitchRequest, mode switching.Mode, targets []target) (any, error) {
	scope := len(r.Topics) == 0 || r.Percent != 0 || r.Prefix != ""
	// A few drains by name stay together without a batch: `reverse` takes all of them back.
	if scope || len(targets) > 1 && mode == switching.ModePlanned || len(targets) > maxPlanned || r.given() != "" {
		return s.startStored(ctx, r, mode, targets)
	}
	if known := s.proxy.Info().Clusters; !slices.Contains(known, r.To) {
		return nil, &Error{Code: CodeUnknownCluster, Message: fmt.Sprintf("cluster %q is unknown; this proxy knows %s", r.To, strings.Join(known, ", ")), Remedy: "correct --to, or add it under clusters in the configuration of every proxy"}
	}
	var moves []move
	var skipped []Detail
	for _, t := range targets {
		d, err := s.decide(ctx, t)
		switch {
		case err != nil:
			return nil, err
		case d.Cluster == r.To:
			skipped = append(skipped, Detail{Name: t.name(), Code: CodeAlreadyThere, Problem: "is on " + r.To + " already"})
			continue
		case d.Cluster == "":
			return nil, &Error{Code: CodeBadName, Message: fmt.Sprintf("%s is mapped nowhere, so there is nothing to move", t.name()), Remedy: fmt.Sprintf("`pointsman routes set %s %s`", t.name(), r.To)}
		}
		moves = append(moves, move{target: t, from: d.Cluster, to: r.To, epoch: d.Epoch})
	}
	if len(moves) == 0 {
		return nil, &Error{
			Code: CodeAlreadyThere, Message: fmt.Sprintf("nothing to move: %s on %s already", isAre(len(skipped), r), r.To),
			Remedy: "`pointsman explain TOPIC` tells why", Details: skipped,
		}
	}
	st, err := s.request(ctx, moves, order{mode: mode, who: whoOr(r.Who), why: r.Why, force: r.Force, dryRun: r.DryRun, reversible: r.Reversible})
	if err != nil {
		return nil, err
	}
	st.Skipped = skipped
	return st, nil
}

func names(moves []move) []string {
	all := make([]string, len(moves))
	for i, m := range moves {
		all[i] = m.target.name()
	}
	return all
}

// decide is where a topic is, as the store has it.
func (s *Server) decide(ctx context.Context, t target) (route.Decision, error) {
	p, err := s.plan(ctx, t.topic.Base())
	if err != nil {
		return route.Decision{}, err
	}
	return p.table.Decide(t.topic, p.def), nil
}

// request has the moves checked and writes a record for each. Nothing is written unless all may begin; when a write fails after the first, the
// answer names its topic.
func (s *Server) request(ctx context.Context, moves []move, o order) (*SwitchStatus, error) {
	if len(moves) > maxPlanned {
		return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("%d topics are more than the %d that one command moves in planned mode", len(moves), maxPlanned), Remedy: "name them in several commands"}
	}
	if err := s.guardRunning(ctx, names(moves), ""); err != nil {
		return nil, err
	}
	checks, err := s.check(ctx, moves, o)
	if err != nil {
		return nil, err
	}
	st := &SwitchStatus{
		To: moves[0].to, Mode: string(o.mode), State: statePlanned, Total: len(moves), Switches: []SwitchDetail{},
		Preflights: checks, Promised: switching.Promised(o.mode), NotPromised: switching.NotPromised(o.mode),
	}
	if o.dryRun {
		return st, nil
	}
	if err := judged(checks, o.force); err != nil {
		return nil, err
	}
	now := time.Now()
	st.ID, st.State = newSwitchID(now), stateRunning
	for i, m := range moves {
		rec := switching.Record{
			ID: st.ID, Rev: 1, Attempt: 1, Topic: m.target.name(), From: m.from, To: m.to, Mode: o.mode, State: switching.StateRequested,
			Epoch: route.NextEpoch(m.epoch), Who: o.who, Why: o.why, Started: now,
		}
		if len(moves) > 1 {
			rec.ID, rec.Batch = fmt.Sprintf("%s-%d", st.ID, i+1), st.ID
		}
		if err := s.ask(ctx, rec); err != nil {
			e := asError(err)
			if i == 0 {
				return nil, e
			}
			st.Failed = append(st.Failed, Detail{Name: rec.Topic, Code: e.Code, Problem: e.Error()})
			continue
		}
		st.Switches = append(st.Switches, SwitchDetail{Record: rec, Acks: []switching.Ack{}})
		s.log.Info("planned switch asked for", "switch", rec.ID, "topic", rec.Topic, "from", rec.From, "to", rec.To, "epoch", rec.Epoch, "who", rec.Who, "why", rec.Why)
	}
	s.nudge()
	return st, nil
}

// ask writes the record of a new switch, and takes it back when it finds another one of the same topic: of two operators at the same moment
// at least one sees the other.
func (s *Server) ask(ctx context.Context, rec switching.Record) error {
	if err := s.store.PutSwitch(ctx, rec); errors.Is(err, store.ErrUnknown) {
		if have, readErr := s.store.Switch(ctx, rec.ID); readErr != nil || have.Rev == 0 {
			return err
		}
	} else if err != nil {
		return err
	}
	refusal := s.guardRunning(ctx, []string{rec.Topic}, rec.ID)
	if refusal == nil {
		return nil
	}
	rec.Rev, rec.State, rec.Ended, rec.Note = 2, switching.StateAborted, time.Now(), "withdrawn: "+asError(refusal).Message
	if err := s.store.PutSwitch(ctx, rec); err != nil {
		// The leader was faster: it has the entry decide between the two, and one of them aborts.
		s.log.Info("a switch that should be withdrawn has begun", "switch", rec.ID, "topic", rec.Topic, "err", err)
		return nil
	}
	return refusal
}

// guardRunning refuses topics (base names) that have a planned switch under way, or are in a batch, other than the one named.
func (s *Server) guardRunning(ctx context.Context, names []string, except string) error {
	records, err := s.store.Running(ctx)
	if err != nil {
		return err
	}
	topics := make(map[string]bool, len(names))
	for _, name := range names {
		topics[name] = true
	}
	busy, ids, err := s.guardBatches(ctx, topics, except)
	if err != nil {
		return err
	}
	for _, rec := range records {
		if topics[rec.Topic] && rec.ID != except && (rec.Batch == "" || rec.Batch != except) && rec.Mode.Driven() {
			busy = append(busy, Detail{Name: rec.Topic, Code: CodeSwitching, Problem: fmt.Sprintf("switch %s of %s from %s to %s is %s", rec.ID, cmp.Or(rec.Who, "somebody"), rec.From, rec.To, rec.State)})
			ids = append(ids, rec.ID)
		}
	}
	if len(busy) == 0 {
		return nil
	}
	message := fmt.Sprintf("%s: %s", busy[0].Name, busy[0].Problem)
	if len(busy) > 1 {
		message = fmt.Sprintf("%d of the topics have a switch under way, the first is %s: %s", len(busy), busy[0].Name, busy[0].Problem)
	}
	id := ids[0]
	if slices.ContainsFunc(ids, func(other string) bool { return other != id }) {
		id = "ID"
	}
	return &Error{
		Code: CodeSwitching, Message: message, Details: busy,
		Remedy: fmt.Sprintf("wait for its end (`pointsman switch watch %s`; if it is paused, `pointsman switch resume %s` first), or end it (`pointsman switch abort %s`)", id, id, id),
	}
}

// check runs the preflights of all moves.
func (s *Server) check(ctx context.Context, moves []move, o order) ([]switching.Preflight, error) {
	if s.preflight == nil {
		return nil, &Error{Code: CodeUnsupportedMode, Message: "this proxy cannot plan switches", Remedy: "use --mode immediate"}
	}
	return s.checkWith(ctx, moves, o, names(moves))
}

// checkWith is check for moves that are some of many by the same command.
func (s *Server) checkWith(ctx context.Context, moves []move, o order, with []string) ([]switching.Preflight, error) {
	topics := names(moves)
	facts, err := s.HandleFacts(ctx, topics)
	if err != nil {
		return nil, err
	}
	checks, errs := make([]switching.Preflight, len(moves)), make([]error, len(moves))
	inParallel(len(moves), checkParallel, func(i int) {
		checks[i], errs[i] = s.preflight(ctx, switching.CheckRequest{
			Topic: topics[i], From: moves[i].from, To: moves[i].to, Mode: o.mode, Since: o.since[topics[i]], Reversible: o.reversible, With: with,
			Handles: facts[topics[i]],
		})
		checks[i].Epoch = route.NextEpoch(moves[i].epoch)
	})
	return checks, errors.Join(errs...)
}

// judged refuses what the preflights do not allow, with everything that they found.
func judged(checks []switching.Preflight, force bool) error {
	counts := map[switching.Verdict]int{}
	var details []Detail
	for _, v := range []switching.Verdict{switching.Blocker, switching.Warning} {
		for _, c := range checks {
			for _, f := range c.Findings {
				if f.Verdict == v {
					counts[v]++
					details = append(details, Detail{Name: c.Topic, Item: f.Item, Verdict: v, Problem: f.Evidence, Remedy: f.Remedy})
				}
			}
		}
	}
	switch {
	case counts[switching.Blocker] > 0:
		return &Error{Code: CodePreflight, Message: "the preflight found " + found(counts), Remedy: "remove the blockers: nothing overrides them; look with `pointsman switch check`", Details: details}
	case counts[switching.Warning] > 0 && !force:
		return &Error{Code: CodePreflight, Message: "the preflight found " + found(counts), Remedy: "remove the causes; or, if you accept them all, repeat with --force", Details: details}
	}
	return nil
}

func found(counts map[switching.Verdict]int) string {
	var parts []string
	for _, v := range []switching.Verdict{switching.Blocker, switching.Warning} {
		switch n := counts[v]; {
		case n == 1:
			parts = append(parts, "1 "+string(v))
		case n > 1:
			parts = append(parts, fmt.Sprintf("%d %ss", n, v))
		}
	}
	return strings.Join(parts, " and ")
}

// handleAbort asks for the end of switches that have not flipped yet.
func (s *Server) handleAbort(ctx context.Context, r *SwitchCommand) (any, error) {
	if o, ok, err := s.failoverOf(ctx, r.ID); err != nil {
		return nil, err
	} else if ok {
		return s.abortFailover(ctx, o)
	}
	if b, ok, err := s.storedBatch(ctx, r.ID); err != nil || ok {
		return orError(func() (*SwitchStatus, error) { return s.abortBatch(ctx, b, r.Who) }, err)
	}
	return s.wish(ctx, r.ID, r.Who, func(rec *switching.Record) error {
		switch {
		case rec.State.Over():
			return tooLate(*rec, "it has ended; to bring the topic back, `pointsman switch reverse %s`")
		case rec.Return || rec.State == switching.StateDraining:
			return abortDrain(rec)
		case rec.State == switching.StateEvicting:
			return tooLate(*rec, "the map names the new cluster already, which is never undone; `pointsman switch reverse %s` when it has ended")
		}
		rec.Wish = switching.WishAbort
		return nil
	})
}

// handlePause keeps switches from beginning.
func (s *Server) handlePause(ctx context.Context, r *SwitchCommand) (any, error) {
	if b, ok, err := s.storedBatch(ctx, r.ID); err != nil || ok {
		return orError(func() (*SwitchStatus, error) { return s.pauseBatch(ctx, b, r.Who, r.Why) }, err)
	}
	return s.wish(ctx, r.ID, r.Who, func(rec *switching.Record) error {
		switch {
		case rec.State.Over():
			return tooLate(*rec, "it has ended")
		case pauseDrain(rec):
			return nil
		case rec.State != switching.StateRequested:
			return tooLate(*rec, "it has begun, and a topic is not left in the middle; it ends within seconds, or `pointsman switch abort %s`")
		case rec.Wish == switching.WishAbort:
			return tooLate(*rec, "it is being aborted")
		}
		rec.Wish = switching.WishPause
		return nil
	})
}

// handleResume lets paused switches begin, and asks for the next attempt of aborted ones, after a preflight: what was fine when they were asked for need not be so any more.
func (s *Server) handleResume(ctx context.Context, r *SwitchCommand) (any, error) {
	if b, ok, err := s.storedBatch(ctx, r.ID); err != nil || ok {
		return orError(func() (*SwitchStatus, error) { return s.resumeBatch(ctx, b, r) }, err)
	}
	records, err := s.planned(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	if err := noBatch(r); err != nil {
		return nil, err
	}
	again := map[string]uint64{} // by id, of aborted ones: the epoch that the next attempt writes
	var moves []move
	var ended []string // topics of aborted ones: somebody else may have them by now
	for _, rec := range records {
		aborted := rec.State == switching.StateAborted
		if paused := rec.State == switching.StateRequested && rec.Wish == switching.WishPause && !rec.Return; !aborted && !paused {
			continue
		}
		t, err := parseTopicName(rec.Topic)
		if err != nil {
			return nil, err
		}
		d, err := s.decide(ctx, t)
		if err != nil {
			return nil, err
		}
		if d.Cluster != rec.From {
			return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("%s is on %s by now, not on %s where switch %s began", rec.Topic, d.Cluster, rec.From, rec.ID), Remedy: "plan a new switch from there"}
		}
		if aborted {
			again[rec.ID] = route.NextEpoch(d.Epoch)
			ended = append(ended, rec.Topic)
		}
		moves = append(moves, move{target: t, from: rec.From, to: rec.To, epoch: d.Epoch})
	}
	if len(moves) > 0 {
		if err := s.guardRunning(ctx, ended, ""); err != nil {
			return nil, err
		}
		checks, err := s.check(ctx, moves, order{mode: records[0].Mode, reversible: r.Reversible})
		if err == nil {
			err = judged(checks, r.Force)
		}
		if err != nil {
			return nil, err
		}
	}
	return s.wish(ctx, r.ID, r.Who, func(rec *switching.Record) error {
		epoch, aborted := again[rec.ID]
		switch {
		case aborted && rec.State == switching.StateAborted:
			next := rec.Again(time.Now())
			next.Rev-- // the write counts it
			*rec, rec.Epoch = next, epoch
		case (rec.State == switching.StateRequested || rec.State == switching.StateDraining) && rec.Wish == switching.WishPause:
			rec.Wish = ""
		case rec.State == switching.StateRequested && rec.Wish == "" && rec.Attempt > 1 && aborted:
			return nil // somebody else asked at the same time
		case rec.State.Over():
			return tooLate(*rec, "it has ended")
		default:
			return tooLate(*rec, "it is neither paused nor aborted")
		}
		return nil
	})
}

// handleReverse moves the topics of switches that are done back to where they came from: by new switches, with a preflight of their own.
func (s *Server) handleReverse(ctx context.Context, r *SwitchCommand) (any, error) {
	if b, ok, err := s.storedBatch(ctx, r.ID); err != nil || ok {
		return orError(func() (*SwitchStatus, error) { return s.reverseBatch(ctx, b, r) }, err)
	}
	if o, ok, err := s.failoverOf(ctx, r.ID); err != nil || ok {
		return orError(func() (*SwitchStatus, error) { return s.reverseFailover(ctx, o, r) }, err)
	}
	records, err := s.records(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	if len(records) == 0 {
		return nil, noSwitch(r.ID)
	}
	if err := noBatch(r); err != nil {
		return nil, err
	}
	if records[0].Mode == switching.ModeDrain && slices.ContainsFunc(records, func(rec switching.Record) bool { return !rec.State.Over() }) {
		return s.takeBack(ctx, r, records)
	}
	var moves []move
	var faults []Detail
	for _, rec := range records {
		fault := func(format string, args ...any) {
			faults = append(faults, Detail{Name: rec.Topic, Problem: fmt.Sprintf(format, args...)})
		}
		t, err := parseTopicName(rec.Topic)
		switch {
		case !strings.Contains(rec.Topic, "://") || err != nil:
			fault("switch %s moved a rule, and not a topic", rec.ID)
			continue
		case !rec.State.Over():
			fault("switch %s is %s", rec.ID, rec.State)
			continue
		case rec.State == switching.StateAborted:
			fault("switch %s was aborted: the topic never left %s", rec.ID, rec.From)
			continue
		case rec.State == switching.StateReturned:
			fault("switch %s was taken back: the topic is on %s again", rec.ID, rec.From)
			continue
		}
		d, err := s.decide(ctx, t)
		if err != nil {
			return nil, err
		}
		if d.Cluster != rec.To || d.Epoch != rec.Epoch {
			fault("is on %s at epoch %d by now; switch %s left it on %s at epoch %d", d.Cluster, d.Epoch, rec.ID, rec.To, rec.Epoch)
			continue
		}
		moves = append(moves, move{target: t, from: rec.To, to: rec.From, epoch: d.Epoch})
	}
	if len(faults) > 0 {
		return nil, &Error{Code: CodeConflict, Message: fmt.Sprintf("switch %s cannot be reversed: %s: %s", r.ID, faults[0].Name, faults[0].Problem), Remedy: "plan a new switch with `pointsman switch start`", Details: faults}
	}
	st, err := s.request(ctx, moves, order{mode: records[0].Mode.Back(), who: whoOr(r.Who), why: cmp.Or(r.Why, "reverse of "+r.ID), force: r.Force, dryRun: r.DryRun, reversible: r.Reversible})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// orError is the answer of a command about a batch, unless that could not be read.
func orError(f func() (*SwitchStatus, error), err error) (any, error) {
	if err != nil {
		return nil, err
	}
	st, err := f()
	if err != nil {
		return nil, err
	}
	return st, nil
}

// noBatch refuses what a command has for batches only.
func noBatch(r *SwitchCommand) error {
	if r.OnBlocked == "" {
		return nil
	}
	return &Error{Code: CodeBadRequest, Message: fmt.Sprintf("--on-blocked is for batches, and %s is none", r.ID), Remedy: "leave it out"}
}

func noSwitch(id string) *Error {
	return &Error{Code: CodeNotFound, Message: fmt.Sprintf("there is no switch %q", id), Remedy: "look at `pointsman switch list`"}
}

func tooLate(rec switching.Record, why string) *Error {
	if strings.Contains(why, "%s") {
		why = fmt.Sprintf(why, rec.ID)
	}
	return &Error{Code: CodeTooLate, Message: fmt.Sprintf("switch %s of %s is %s", rec.ID, rec.Topic, rec.State), Remedy: why}
}

// planned are the stored switches of an id, all in planned mode.
func (s *Server) planned(ctx context.Context, id string) ([]switching.Record, error) {
	records, err := s.records(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case len(records) == 0:
		return nil, noSwitch(id)
	case !records[0].Mode.Driven():
		return nil, &Error{Code: CodeTooLate, Message: fmt.Sprintf("switch %s is in %s mode: its map changed at once", id, records[0].Mode), Remedy: "`pointsman switch reverse ID` moves the topic back"}
	}
	return records, nil
}

// wish changes the records of an id, for who. Of several switches those for which it is too late are skipped, and what else goes wrong is in the answer; for
// all of them, or a single one, it is the error.
func (s *Server) wish(ctx context.Context, id, who string, change func(*switching.Record) error) (any, error) {
	records, err := s.planned(ctx, id)
	if err != nil {
		return nil, err
	}
	var skipped, failed []Detail
	var first error
	for _, rec := range records {
		err := s.amend(ctx, rec, whoOr(who), change)
		if err == nil {
			continue
		}
		if first == nil {
			first = err
		}
		e := asError(err)
		d := Detail{Name: rec.Topic, Code: e.Code, Problem: e.Error()}
		if e.Code == CodeTooLate {
			skipped = append(skipped, d)
		} else {
			failed = append(failed, d)
		}
	}
	s.nudge()
	if len(skipped)+len(failed) == len(records) {
		return nil, first
	}
	st, err := s.status(ctx, id)
	if err != nil {
		return nil, err
	}
	st.Skipped, st.Failed = skipped, failed
	return st, nil
}

// amend writes a record that who has changed over exactly the one that the change was made on, and begins anew when the leader was faster.
func (s *Server) amend(ctx context.Context, rec switching.Record, who string, change func(*switching.Record) error) error {
	var err error
	for range wishAttempts {
		before := rec
		if err := change(&rec); err != nil {
			return err
		}
		if rec.Wish == before.Wish && rec.State == before.State {
			return nil
		}
		rec.Rev++
		rec.WishBy = who
		if err = s.store.PutSwitch(ctx, rec); err == nil {
			s.log.Info("a planned switch was changed by its operator", "switch", rec.ID, "state", rec.State, "wish", rec.Wish, "attempt", rec.Attempt, "who", who)
			return nil
		}
		if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrUnknown) {
			return err
		}
		if rec, err = s.store.Switch(ctx, rec.ID); err != nil {
			return err
		}
	}
	return &Error{Code: CodeConflict, Message: fmt.Sprintf("switch %s changed %d times while it was written to", rec.ID, wishAttempts), Remedy: "repeat the command"}
}

// detailPlanned adds to a record what the proxies have said of its present attempt, and who has not said yet what is waited for.
func (s *Server) detailPlanned(ctx context.Context, rec switching.Record) (SwitchDetail, error) {
	d := SwitchDetail{Record: rec, Acks: []switching.Ack{}}
	var acks []switching.Ack
	var err error
	if rec.State == switching.StateDone && rec.Receipt != nil && len(rec.Receipt.Acks) > 0 {
		acks = rec.Receipt.Acks // nobody has more to say
	} else if acks, err = s.store.Acks(ctx, rec.ID); err != nil {
		return d, err
	}
	for _, a := range acks {
		if a.Attempt != rec.Attempt {
			continue
		}
		d.Acks = append(d.Acks, a)
		if a.Phase == switching.StateEvicting || a.Phase == "" {
			d.Producers += a.Producers
			d.Consumers += a.Consumers
			d.Unresolved += a.Unresolved
		}
	}
	slices.SortStableFunc(d.Acks, func(a, b switching.Ack) int {
		return cmp.Or(cmp.Compare(phaseRank(a.Phase), phaseRank(b.Phase)), cmp.Compare(a.Proxy, b.Proxy))
	})
	if rec.Mode == switching.ModeDrain && !rec.State.Over() {
		if d.Draining, err = s.told(ctx, rec.ID); err != nil {
			return d, err
		}
	}
	switch rec.State {
	case switching.StatePrepared, switching.StateFenced, switching.StateEvicting:
	default:
		return d, nil // nobody is waited for
	}
	members, err := s.members(ctx)
	if err != nil {
		return d, err
	}
	for _, m := range members {
		if !slices.ContainsFunc(d.Acks, func(a switching.Ack) bool {
			return a.Proxy == m.ID && a.Incarnation == m.Incarnation && cmp.Or(a.Phase, switching.StateEvicting) == rec.State
		}) {
			d.Waiting = append(d.Waiting, m.ID)
		}
	}
	return d, nil
}

// phaseRank is the order in which proxies report.
func phaseRank(phase switching.State) int {
	return slices.Index([]switching.State{switching.StatePrepared, switching.StateFenced, switching.StateEvicting, ""}, phase)
}
