package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/session"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

// oldIDs answers what event loops ask about message ids of before a move: which cluster a topic had, and where a message of it is now. It passes on
// between the loops what was acknowledged under such ids. Its methods may be called from any goroutine.
type oldIDs struct {
	store     store.Store
	log       *slog.Logger
	loops     poster
	fallback  string // cluster of what nothing maps
	translate translator

	slots chan struct{} // translations under way
	tasks sync.WaitGroup
	life  context.Context
	stop  context.CancelFunc

	reading sync.Mutex // held while the history is read; before mu

	mu     sync.Mutex // guards the rest
	past   map[epochOf]owner
	order  []epochOf                // of past, the oldest first
	tables [tablesKept]*route.Table // before the last changes of rules, the newest first
	read   bool                     // past has all that the history said, and what came since
}

// translator finds a message of one cluster on another: what it returns is TranslatedCopy or TranslatedNext.
type translator interface {
	Translate(ctx context.Context, topic, from, to string, at session.Position) (session.Translated, error)
	// Last is the position of a cluster's last message; Entry −1 when its ledger has none.
	Last(ctx context.Context, topic, cluster string) (pulsaradmin.Position, error)
}

type epochOf struct {
	base  string
	epoch uint64
}

// owner is the cluster that had a topic.
type owner struct {
	cluster  string
	switchID string // of the switch that knows it, when cluster is ""
}

const (
	pastKept         = 50_000 // moves that are remembered
	tablesKept       = 4
	translateAtOnce  = 16
	translateTimeout = 4500 * time.Millisecond // commands wait 5 s
	turnTimeout      = 3 * time.Second         // of these; the rest is for the search
)

func newOldIDs(st store.Store, log *slog.Logger, fallback string) *oldIDs {
	o := &oldIDs{store: st, log: log, fallback: fallback, slots: make(chan struct{}, translateAtOnce), past: make(map[epochOf]owner)}
	o.life, o.stop = context.WithCancel(context.Background())
	return o
}

// close ends translations and returns when none is under way. The loops ask nothing any more.
func (o *oldIDs) close() {
	o.stop()
	o.tasks.Wait()
}

// note remembers what a table said of topics, and with rules of everything, before another one replaces it.
func (o *oldIDs) note(before, after *route.Table, changes route.Changes) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(changes.Scopes) > 0 {
		copy(o.tables[1:], o.tables[:])
		o.tables[0] = before
	}
	for _, base := range changes.Topics {
		topic, err := route.ParseTopic(base)
		if err != nil {
			continue
		}
		was, is := before.Decide(topic, o.fallback), after.Decide(topic, o.fallback)
		if was.Epoch != is.Epoch {
			o.remember(epochOf{base, was.Epoch}, owner{cluster: was.Cluster})
		}
		if is.Epoch > was.Epoch+1 { // what was between, the history knows
			o.read = false
		}
	}
}

// remember must be called with mu held.
func (o *oldIDs) remember(e epochOf, of owner) {
	was, known := o.past[e]
	if was.cluster != "" || of == (owner{}) {
		return
	}
	o.past[e] = of
	if known {
		return
	}
	o.order = append(o.order, e)
	if len(o.order) > pastKept {
		delete(o.past, o.order[0])
		o.order = o.order[1:]
	}
}

// clusterAt is what this process has seen of a topic at an epoch; "" when it has not.
func (o *oldIDs) clusterAt(base string, epoch uint64) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if of := o.past[epochOf{base, epoch}]; of.cluster != "" {
		return of.cluster
	}
	topic, err := route.ParseTopic(base)
	if err != nil {
		return ""
	}
	for _, t := range o.tables {
		if t == nil {
			break
		}
		if d := t.Decide(topic, o.fallback); d.Epoch == epoch {
			return d.Cluster
		}
	}
	return ""
}

// clusterOf is clusterAt, and what the topic's last switch and the history of the map say.
func (o *oldIDs) clusterOf(ctx context.Context, base string, epoch uint64) (string, error) {
	if cluster := o.clusterAt(base, epoch); cluster != "" {
		return cluster, nil
	}
	e, ok, err := o.store.Entry(ctx, base)
	if err != nil {
		return "", err
	}
	if ok && e.Epoch == epoch+1 {
		if cluster, err := o.movedFrom(ctx, base, epoch, e.SwitchID); cluster != "" || err != nil {
			return cluster, err
		}
	}
	if err := o.readHistory(ctx); err != nil {
		return "", err
	}
	if cluster := o.clusterAt(base, epoch); cluster != "" {
		return cluster, nil
	}
	o.mu.Lock()
	id := o.past[epochOf{base, epoch}].switchID
	o.mu.Unlock()
	return o.movedFrom(ctx, base, epoch, id)
}

// movedFrom is the cluster that a switch took a topic of that epoch away from; "" when it did not.
func (o *oldIDs) movedFrom(ctx context.Context, base string, epoch uint64, id string) (string, error) {
	if id == "" {
		return "", nil
	}
	rec, err := o.store.Switch(ctx, id)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	case rec.Epoch != epoch+1:
		return "", nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.remember(epochOf{base, epoch}, owner{cluster: rec.From})
	return rec.From, nil
}

// readHistory has past know all moves that the history of the map tells of.
func (o *oldIDs) readHistory(ctx context.Context) error {
	o.reading.Lock()
	defer o.reading.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	o.mu.Lock()
	known := o.read
	o.read = true // unless note takes it back meanwhile
	o.mu.Unlock()
	if known {
		return nil
	}
	history, err := o.store.History(o.life, math.MaxInt) // whoever comes next needs it as well
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		o.read = false
		return err
	}
	for _, h := range slices.Backward(history) {
		for _, c := range h.Entries {
			switch {
			case c.Before != nil && (c.After == nil || c.After.Epoch != c.Before.Epoch):
				o.remember(epochOf{c.Topic, c.Before.Epoch}, owner{cluster: c.Before.Cluster})
			case c.Before == nil && c.After != nil && c.After.Epoch > 0:
				o.remember(epochOf{c.Topic, c.After.Epoch - 1}, owner{switchID: h.Switch})
			}
		}
	}
	return nil
}

// request takes an op of a loop that is for the application.
func (o *oldIDs) request(loop int, op session.Op) {
	switch op.Kind {
	case session.OpOldAcks:
		acks := *op.OldAcks
		for i := range o.loops.Loops() {
			if i != loop {
				o.loops.Post(i, func(now time.Time, sh *session.Shard) { sh.CarryAcks(now, acks) })
			}
		}
	case session.OpTranslate:
		t := *op.Translation
		o.tasks.Go(func() {
			a := o.inTurn(t)
			o.loops.Post(loop, func(now time.Time, sh *session.Shard) { sh.Translated(now, t.ID, a) })
		})
	}
}

// inTurn is find when it is the turn of t. How many wait is bounded by the loops.
func (o *oldIDs) inTurn(t session.Translation) session.Translated {
	ctx, cancel := context.WithTimeout(o.life, translateTimeout)
	defer cancel()
	select {
	case o.slots <- struct{}{}:
		defer func() { <-o.slots }()
		return o.find(ctx, t)
	case <-time.After(turnTimeout):
		return session.Translated{Kind: session.TranslatedBusy, Text: fmt.Sprintf("%d others were under way for %s: try again", translateAtOnce, turnTimeout)}
	case <-ctx.Done():
		return session.Translated{Kind: session.TranslatedBusy, Text: "the proxy stops"}
	}
}

// find is the answer to a translation.
func (o *oldIDs) find(ctx context.Context, t session.Translation) session.Translated {
	topic, err := route.ParseTopic(t.Topic)
	if err != nil {
		return session.Translated{Kind: session.TranslatedUnknown, Text: err.Error()}
	}
	from, err := o.clusterOf(ctx, topic.Base(), t.Epoch)
	switch {
	case err != nil:
		return session.Translated{Kind: session.TranslatedFailed, Text: fmt.Sprintf("the map's history does not say which cluster had epoch %d: %v", t.Epoch, err)}
	case from == "":
		return session.Translated{Kind: session.TranslatedUnknown, Text: fmt.Sprintf("the map's history has nothing of epoch %d", t.Epoch)}
	case from == t.Cluster:
		return session.Translated{Kind: session.TranslatedCopy, At: t.At}
	}
	drained, err := o.drainOf(ctx, topic.Base(), t)
	if err != nil {
		return session.Translated{Kind: session.TranslatedFailed, Text: err.Error()}
	}
	if drained != nil || t.Last {
		return o.findDrained(ctx, t, from, drained)
	}
	a, err := o.translate.Translate(ctx, t.Topic, from, t.Cluster, t.At)
	if err != nil {
		o.log.Warn("a message id of before a move could not be translated", "topic", t.Topic, "from", from, "to", t.Cluster, "ledger", t.At.Ledger, "entry", t.At.Entry, "err", err)
		return session.Translated{Kind: session.TranslatedFailed, Text: err.Error()}
	}
	return a
}

// drainOf is the record of the switch that took the topic away from the cluster of t without its messages; nil when the topic was moved otherwise.
func (o *oldIDs) drainOf(ctx context.Context, base string, t session.Translation) (*switching.Record, error) {
	e, ok, err := o.store.Entry(ctx, base)
	if err != nil || !ok || e.SwitchID == "" || e.Cluster != t.Cluster || e.Epoch != t.Epoch+1 {
		return nil, err
	}
	rec, err := o.store.Switch(ctx, e.SwitchID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil
	}
	if err != nil || rec.Mode != switching.ModeDrain || rec.To != t.Cluster {
		return nil, err
	}
	return &rec, nil
}

// findDrained is find for a topic that left a cluster without its messages: whoever has had all of that goes on with what was published since.
func (o *oldIDs) findDrained(ctx context.Context, t session.Translation, from string, rec *switching.Record) session.Translated {
	var tail, end pulsaradmin.Position // of both clusters, when the topic moved
	known := rec != nil && rec.Receipt != nil
	if known {
		var errTail, errEnd error
		tail, errTail = pulsaradmin.ParsePosition(rec.Receipt.Tail[t.Topic])
		end, errEnd = pulsaradmin.ParsePosition(rec.Receipt.First[t.Topic])
		known = errTail == nil && errEnd == nil
	}
	if !known {
		return session.Translated{Kind: session.TranslatedFailed, Text: fmt.Sprintf("the receipt of the switch that took the topic from cluster %s does not say where both clusters ended", from)}
	}
	if t.Last {
		last, err := o.translate.Last(ctx, t.Topic, t.Cluster)
		switch {
		case err != nil:
			o.log.Warn("the last message of a topic that leaves a cluster could not be found out", "topic", t.Topic, "from", from, "to", t.Cluster, "err", err)
			return session.Translated{Kind: session.TranslatedFailed, Text: err.Error()}
		case last.Entry < 0 || !end.Before(last):
			return session.Translated{Kind: session.TranslatedUnknown, Text: fmt.Sprintf("nothing was published to cluster %s since the switch", t.Cluster)}
		}
		return session.Translated{Kind: session.TranslatedCopy, At: session.Position{Ledger: uint64(last.Ledger), Entry: uint64(last.Entry)}}
	}
	if at := (pulsaradmin.Position{Ledger: int64(t.At.Ledger), Entry: int64(t.At.Entry)}); at.Before(tail) {
		return session.Translated{Kind: session.TranslatedGone, Text: fmt.Sprintf("message %s is on cluster %s, whose last one is %s", at, from, tail)}
	}
	if end.Ledger < 0 {
		return session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: math.MaxUint64, Entry: math.MaxUint64}} // the oldest one
	}
	return session.Translated{Kind: session.TranslatedNext, At: session.Position{Ledger: uint64(end.Ledger), Entry: uint64(end.Entry + 1)}}
}

// adminTranslator finds messages by the clusters' admin addresses.
type adminTranslator struct {
	clients map[string]*pulsaradmin.Client
	// down tells of a cluster that does not answer: it is not asked, and the copies on the other one have to do.
	down  func(cluster string) bool
	pairs *pulsaradmin.Translator
}

func (a adminTranslator) client(name string) (*pulsaradmin.Client, error) {
	if c := a.clients[name]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("cluster %s has no admin address; set clusters.%s.web_url, such as http://broker:8080", name, name)
}

// Translate implements translator.
func (a adminTranslator) Translate(ctx context.Context, topic, from, to string, at session.Position) (session.Translated, error) {
	old, err := a.client(from)
	if err != nil {
		return session.Translated{}, err
	}
	now, err := a.client(to)
	if err != nil {
		return session.Translated{}, err
	}
	position := pulsaradmin.Position{Ledger: int64(at.Ledger), Entry: int64(at.Entry)}
	if a.down(from) {
		t, err := pulsaradmin.TranslateAlone(ctx, topic, from, now, position)
		if err != nil {
			return session.Translated{}, err
		}
		return translated(t), nil
	}
	t, err := a.pairs.Translate(ctx, topic, old, now, position)
	if err != nil {
		return session.Translated{}, err
	}
	return translated(t), nil
}

// Last implements translator.
func (a adminTranslator) Last(ctx context.Context, topic, cluster string) (pulsaradmin.Position, error) {
	c, err := a.client(cluster)
	if err != nil {
		return pulsaradmin.NoPosition, err
	}
	log, err := c.Tail(ctx, topic)
	return log.Last, err
}

// translated: only what is exact counts as the copy itself. What is not sure is delivered again.
func translated(t pulsaradmin.Translation) session.Translated {
	a, at := session.Translated{Kind: session.TranslatedNext}, t.Next
	if t.At != pulsaradmin.NoPosition {
		at = t.At
		if t.How.Exact() {
			a.Kind = session.TranslatedCopy
		}
	}
	a.At = session.Position{Ledger: uint64(at.Ledger), Entry: uint64(at.Entry)}
	return a
}
