package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// Drainer is the work of a switch that drains (docs/adr/007-drain.md), beyond that of every Topic. Of an attempt that leads back Topic's old cluster is the
// record's To; here old and new are always the record's From and To.
type Drainer interface {
	Topic
	// Drained is what is left on the old cluster: for the judgement, and for people. ErrRevived: a subscription stood still there, and something was done about it.
	Drained(ctx context.Context) (switching.Drained, []switching.Left, error)
	// Returnable names who has had a message on the new cluster that was published there since the flip.
	Returnable(ctx context.Context) (had string, err error)
	// CopyBack copies what the new cluster got since the flip to the old one, behind what that had then. While producers go on it stops after a while. left is how
	// much is not copied yet.
	CopyBack(ctx context.Context, d route.Drain, all bool) (copied, left int64, err error)
	// PassOver has the subscriptions of the new cluster pass over what a way back has copied, when the topic is on the old one again: it would come a second time if the topic drained again.
	// still tells that it is there; it is asked after the ends were read.
	PassOver(ctx context.Context, still func() error) error
}

// ErrRevived says that the old cluster did not deliver what is left, and was made to.
var ErrRevived = errors.New("a subscription stood still")

const (
	// copyAtOnce is how many entries of a partition are copied by one step while producers go on.
	copyAtOnce = 20_000
	// fewToCopy is what may be left for the fence: it takes a fraction of a second.
	fewToCopy = 500
)

// How a subscription is on the new cluster of a drain.
const (
	howAtEnd  = "at the end"
	howBehind = "was there, with a backlog"
)

// drainTopic is a Drainer on two Pulsar clusters. from and to are those of the attempt, from where it leads away.
type drainTopic struct {
	*pulsarTopic
	old, new *pulsaradmin.Client
	watch    *pulsaradmin.Watch
	// boundary is the last position of each partition of the new cluster when it had nothing of the topic's producers yet, as the receipt has it; of a way back.
	boundary []pulsaradmin.Position
	copiers  []*pulsaradmin.Copier // of a way back, made when they are used first
	ends     []pulsaradmin.Position
	made     bool // the topic is there on the new cluster, with its schemas
}

func openDrain(ctx context.Context, rec switching.Record, clients map[string]*pulsaradmin.Client) (Topic, error) {
	from, to := rec.From, rec.To
	if rec.Return {
		from, to = to, from
	}
	p, err := openPulsar(ctx, rec.Topic, clients, from, to)
	if err != nil {
		return nil, err
	}
	t := &drainTopic{pulsarTopic: p, old: clients[rec.From], new: clients[rec.To], ends: make([]pulsaradmin.Position, len(p.names))}
	t.watch = pulsaradmin.NewWatch(t.old, p.names)
	if rec.Return {
		for _, name := range p.names {
			at, err := pulsaradmin.NoPosition, errors.New("the receipt does not say it")
			if rec.Receipt != nil && rec.Receipt.First[name] != "" {
				at, err = pulsaradmin.ParsePosition(rec.Receipt.First[name])
			}
			if err != nil {
				t.Close()
				return nil, fmt.Errorf("%w: where the messages begin that were published to %s on cluster %s since the switch is not known: %w; let the drain end, then switch back by another one", ErrHopeless, name, rec.To, err)
			}
			t.boundary = append(t.boundary, at)
		}
	}
	return t, nil
}

func (t *drainTopic) Close() {
	t.pulsarTopic.Close()
	t.watch.Close()
	for _, c := range t.copiers {
		c.Close()
	}
}

// Warm makes the topic and its subscriptions on the new cluster.
func (t *drainTopic) Warm(ctx context.Context) error {
	_, err := t.Carry(ctx)
	return err
}

// make has the new cluster know the topic: every partition, and every version of the schema under its number.
func (t *drainTopic) make(ctx context.Context) error {
	if t.made {
		return nil
	}
	if err := t.old.CreateMissing(ctx, t.base, t.partitions); err != nil {
		return err
	}
	if err := t.new.CreateTopic(ctx, t.base, t.partitions); err != nil {
		return err
	}
	n, err := t.new.Partitions(ctx, t.base)
	if err == nil && n != t.partitions {
		err = fmt.Errorf("%w: topic %s has %d partitions on cluster %s and %d on cluster %s", ErrHopeless, t.base, t.partitions, t.old.Cluster(), n, t.new.Cluster())
	}
	if err != nil {
		return err
	}
	if err := t.old.CopySchemas(ctx, t.base, t.new); err != nil {
		return err
	}
	facts := [2]pulsaradmin.Facts{{Cluster: t.old.Cluster()}, {Cluster: t.new.Cluster()}}
	for i, c := range []*pulsaradmin.Client{t.old, t.new} {
		if facts[i].Schemas, err = c.Schemas(ctx, t.base); err != nil {
			return err
		}
	}
	if d := pulsaradmin.SchemaDifference(facts[0], facts[1]); d != "" {
		return fmt.Errorf("%w: %s", ErrHopeless, d)
	}
	t.made = true
	return nil
}

// Carry makes the subscriptions that the new cluster lacks, at its end. Nothing has been published there since the fence began, so that none is ahead, and
// none is moved that is there: it may be called late (C8).
func (t *drainTopic) Carry(ctx context.Context) (carried []switching.Carried, err error) {
	if err := t.make(ctx); err != nil {
		return nil, err
	}
	all := make([][]switching.Carried, len(t.names))
	err = t.each(func(i int) error {
		name := t.names[i]
		here, err := t.old.Snapshot(ctx, name)
		if err != nil {
			return err
		}
		log, err := t.new.Tail(ctx, name)
		if err != nil {
			return err
		}
		existing, err := t.new.CreateSubscriptions(ctx, name, log.End(), here.Subs)
		if err != nil {
			return err
		}
		t.ends[i] = log.Last
		for _, s := range here.Subs {
			c := switching.Carried{Topic: name, Subscription: s.Name, How: howAtEnd, First: log.End().String()}
			if at := slices.IndexFunc(existing, func(e pulsaradmin.Sub) bool { return e.Name == s.Name }); at >= 0 {
				there := existing[at]
				if there.Backlog > 0 {
					c.How = howBehind
				}
				c.Backlog, c.First = there.Backlog, pulsaradmin.Position{Ledger: there.Cursor.MarkDelete.Ledger, Entry: there.Cursor.MarkDelete.Entry + 1}.String()
			}
			all[i] = append(all[i], c)
		}
		return nil
	})
	return slices.Concat(all...), err
}

// Tails are both clusters' ends as Tail and the last Carry have found them, by partition.
func (t *drainTopic) Tails(tail string) (old, new map[string]string, err error) {
	positions, err := t.positions(tail)
	if err != nil {
		return nil, nil, err
	}
	old, new = map[string]string{}, map[string]string{}
	for i, name := range t.names {
		old[name], new[name] = positions[i].String(), t.ends[i].String()
	}
	return old, new, nil
}

// subscriptionsOf names the subscriptions of what was carried, sorted.
func subscriptionsOf(carried []switching.Carried) []string {
	var names []string
	for _, c := range carried {
		names = append(names, c.Subscription)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// tailsOf is what Tail has written down, as the map has it.
func tailsOf(tail string) ([]route.Tail, error) {
	var tails []route.Tail
	for line := range strings.SplitSeq(tail, "\n") {
		_, at := cutEnd(line)
		p, err := pulsaradmin.ParsePosition(at)
		if err != nil {
			return nil, err
		}
		if p.Entry < 0 {
			p = pulsaradmin.NoPosition // nothing was ever published
		}
		tails = append(tails, route.Tail{Ledger: p.Ledger, Entry: p.Entry})
	}
	return tails, nil
}

// Drained implements Drainer.
func (t *drainTopic) Drained(ctx context.Context) (switching.Drained, []switching.Left, error) {
	durable, readers, err := t.watch.Look(ctx)
	if err != nil {
		return switching.Drained{}, nil, err
	}
	if said, err := t.watch.Revive(ctx, time.Now()); said != "" || err != nil {
		return switching.Drained{}, nil, cmp.Or(err, fmt.Errorf("%w: %s", ErrRevived, said))
	}
	var found switching.Drained
	var left []switching.Left
	for _, r := range durable {
		l := leftOf(r)
		found.Subs = append(found.Subs, switching.SubFact{Name: r.Name, Backlog: r.Backlog, Unacked: int64(r.Unacked), Consumers: l.Consumers, By: strings.Join(l.By, ", ")})
		left = append(left, l)
	}
	for _, r := range readers {
		found.Readers += len(r.Consumers)
		l := leftOf(r)
		l.Reader = true
		left = append(left, l)
	}
	return found, left, nil
}

// Returnable implements Drainer.
func (t *drainTopic) Returnable(ctx context.Context) (string, error) {
	had := make([][]string, len(t.names))
	err := t.each(func(i int) (err error) {
		had[i], err = t.new.Had(ctx, t.names[i], t.boundary[i])
		return err
	})
	all := slices.Concat(had...)
	if err != nil || len(all) == 0 {
		return "", err
	}
	return fmt.Sprintf("%s had messages on cluster %s already", named(all, same), t.new.Cluster()), nil
}

// CopyBack implements Drainer. With all of them the subscriptions are carried as well that somebody has made on the new cluster only.
func (t *drainTopic) CopyBack(ctx context.Context, d route.Drain, all bool) (copied, left int64, err error) {
	if len(d.Tails) != len(t.names) {
		return 0, 0, fmt.Errorf("%w: the drain began with %d partitions, now there are %d", ErrHopeless, len(d.Tails), len(t.names))
	}
	if t.copiers == nil {
		for i, name := range t.names {
			t.copiers = append(t.copiers, pulsaradmin.NewCopier(name, t.new, t.old, t.boundary[i], pulsaradmin.Position(d.Tails[i])))
		}
	}
	limit := int64(copyAtOnce)
	if all {
		limit = 1 << 62
	}
	var mu sync.Mutex
	err = t.each(func(i int) error {
		n, err := t.copiers[i].Copy(ctx, limit)
		var missing int64
		if err == nil {
			missing, err = t.copiers[i].Missing(ctx)
		}
		if err == nil && all && missing == 0 {
			_, err = t.pairs[i].CarryNew(ctx, t.boundary[i])
		}
		if errors.Is(err, pulsaradmin.ErrNoCopy) {
			err = fmt.Errorf("%w: %w", ErrHopeless, err)
		}
		mu.Lock()
		defer mu.Unlock()
		copied, left = copied+n, left+missing
		return err
	})
	return copied, left, err
}

// PassOver implements Drainer.
func (t *drainTopic) PassOver(ctx context.Context, still func() error) error {
	return t.each(func(i int) error { return t.new.PassOver(ctx, t.names[i], t.boundary[i], still) })
}
