package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"pointsman/core/switching"
)

// The states of a SwitchStatus.
const (
	statePlanned    = "planned"
	stateRunning    = "running"
	stateDone       = "done"
	stateIncomplete = "incomplete"
	stateFailed     = "failed"
)

// batch is what one `switch start` moves. What was flipped is in the store; the rest is only here, so that a proxy
// that ends leaves every topic either moved or untouched. Fields up to ended are immutable once the batch runs; the rest is guarded by mu.
type batch struct {
	id        string
	to        string
	mode      switching.Mode
	who, why  string
	force     bool
	items     []*item
	namespace *target  // set when a whole namespace moves
	redundant []string // entries to remove when its rule has moved
	ended     chan struct{}

	mu       sync.Mutex
	skipped  []Detail
	failed   []Detail
	notes    []string
	started  int
	flipped  int
	done     int
	troubled bool // some switch is incomplete
}

// item is one topic or rule of a batch.
type item struct {
	target target
	from   string
	id     string
}

func (b *batch) add(t target, from string) {
	b.items = append(b.items, &item{target: t, from: from})
}

// status is the batch without its records.
func (b *batch) status() *SwitchStatus {
	b.mu.Lock()
	defer b.mu.Unlock()
	st := &SwitchStatus{
		ID: b.id, To: b.to, Mode: string(b.mode), State: stateRunning, Total: len(b.items), Flipped: b.flipped, Ended: b.done,
		Switches: []SwitchDetail{}, Skipped: slices.Clone(b.skipped), Failed: slices.Clone(b.failed), Notes: slices.Clone(b.notes),
		Promised: switching.Promised(b.mode), NotPromised: switching.NotPromised(b.mode),
	}
	select {
	case <-b.ended:
		switch {
		case len(b.failed) > 0:
			st.State = stateFailed
		case b.troubled:
			st.State = stateIncomplete
		default:
			st.State = stateDone
		}
	default:
	}
	return st
}

// batch finds the command, or the command of the switch, of that id.
func (s *Server) batch(id string) *batch {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.batches {
		if b.id == id {
			return b
		}
	}
	return nil
}

// startBatch runs b in the background, or refuses when too many run.
func (s *Server) startBatch(b *batch) error {
	for i, it := range b.items {
		it.id = b.id
		if len(b.items) > 1 {
			it.id = fmt.Sprintf("%s-%d", b.id, i+1)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.life.Err() != nil {
		return &Error{Code: CodeBusy, Message: "this proxy is stopping", Remedy: "ask another one with --admin"}
	}
	running := 0
	for _, other := range s.batches {
		if !other.over() {
			running++
		}
	}
	if running >= maxRunning {
		return &Error{Code: CodeBusy, Message: fmt.Sprintf("%d commands are moving topics through this proxy already", running), Remedy: "wait for one of them (`pointsman switch list`), or ask another proxy with --admin"}
	}
	if len(s.batches) >= maxBatches {
		i := slices.IndexFunc(s.batches, (*batch).over)
		s.batches = slices.Delete(s.batches, i, i+1) // there is one: few run
	}
	s.batches = append(s.batches, b)
	s.wg.Go(func() {
		defer close(b.ended)
		s.runBatch(s.life, b)
	})
	return nil
}

func (b *batch) over() bool {
	select {
	case <-b.ended:
		return true
	default:
		return false
	}
}

// runBatch moves the first topic alone, then the others some at a time, then the namespace's rule, and stops at the first trouble.
func (s *Server) runBatch(ctx context.Context, b *batch) {
	topics, rules := b.items, []*item{}
	if b.namespace != nil {
		if last := len(topics) - 1; !topics[last].target.isTopic {
			topics, rules = topics[:last], topics[last:]
		}
	}
	first := min(1, len(topics))
	ok := s.runItems(ctx, b, topics[:first], 1) && s.runItems(ctx, b, topics[first:], switchParallel) && s.runItems(ctx, b, rules, 1)
	if ok && b.namespace != nil {
		s.removeRedundant(ctx, b)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if rest := len(b.items) - b.started; rest > 0 {
		b.notes = append(b.notes, fmt.Sprintf("stopped: %d of %d were not touched; mend the cause and repeat the command, what has moved is skipped", rest, len(b.items)))
	}
	s.log.Info("switch ended", "switch", b.id, "to", b.to, "moved", b.flipped, "of", len(b.items), "failed", len(b.failed), "who", b.who)
}

// runItems tells whether all went well; after trouble no further item is started.
func (s *Server) runItems(ctx context.Context, b *batch, items []*item, parallel int) bool {
	var wg sync.WaitGroup
	free := make(chan struct{}, parallel)
	for _, it := range items {
		free <- struct{}{}
		if b.inTrouble() || ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-free }()
			s.runItem(ctx, b, it)
		})
	}
	wg.Wait()
	return !b.inTrouble() && ctx.Err() == nil
}

func (b *batch) inTrouble() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.failed) > 0 || b.troubled
}

func (s *Server) runItem(ctx context.Context, b *batch, it *item) {
	b.mu.Lock()
	b.started++
	b.mu.Unlock()
	flipCtx, cancel := context.WithTimeout(ctx, requestTimeout)
	rec, err := s.flip(flipCtx, b, it)
	cancel()
	if errors.Is(err, errAlreadyThere) {
		b.mu.Lock()
		b.skipped = append(b.skipped, Detail{Name: it.target.name(), Code: CodeAlreadyThere, Problem: "is on " + b.to + " already"})
		b.mu.Unlock()
		return
	}
	if rec != nil {
		b.mu.Lock()
		b.flipped++
		b.mu.Unlock()
		s.log.Info("switched", "switch", it.id, "topic", it.target.name(), "from", it.from, "to", b.to, "epoch", rec.Epoch, "assigned", len(rec.Assigned), "unassigned", rec.Unassigned, "who", b.who)
		err = errors.Join(err, s.await(ctx, rec))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		e := asError(err)
		b.failed = append(b.failed, Detail{Name: it.target.name(), Code: e.Code, Problem: e.Error()})
		return
	}
	b.done++
	b.troubled = b.troubled || rec.State != switching.StateDone
}

// removeRedundant removes the entries that say the same as the namespace's rule by now.
func (s *Server) removeRedundant(ctx context.Context, b *batch) {
	if _, err := s.dropEntries(ctx, b.redundant, b.to, b.who, "switch "+b.id+": the rule of "+b.namespace.name()+" says the same"); err != nil {
		e := asError(err)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.notes = append(b.notes, "the namespace has moved; its single entries, which say the same as the rule, could not all be removed: "+e.Error())
	}
}
