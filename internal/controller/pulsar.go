package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// pulsarTopic is a Topic on two Pulsar clusters, through their admin addresses.
type pulsarTopic struct {
	from, to   *pulsaradmin.Client
	base       string
	partitions int
	names      []string // of the partitions
	pairs      []*pulsaradmin.Pair
	plans      [][]pulsaradmin.Plan       // of the last Carry, by partition
	stood      [][]pulsaradmin.Difference // of the last ReadBack, by partition; nil in a leader that has come after it
}

const (
	// verifyEntries is how many of the last messages of each partition are looked for on the new cluster after the flip.
	verifyEntries = 100
	// laterTimeout bounds the look at the subscriptions after the flip; the rest of the step is for the messages.
	laterTimeout = stepTimeout / 4
)

// OpenPulsar is a Config.Open for Pulsar clusters: clients has one for each cluster that has an admin address.
func OpenPulsar(clients map[string]*pulsaradmin.Client) func(context.Context, switching.Record) (Topic, error) {
	return func(ctx context.Context, rec switching.Record) (Topic, error) {
		if rec.Mode == switching.ModeDrain {
			return openDrain(ctx, rec, clients)
		}
		return openPulsar(ctx, rec.Topic, clients, rec.From, rec.To)
	}
}

func openPulsar(ctx context.Context, base string, clients map[string]*pulsaradmin.Client, from, to string) (*pulsarTopic, error) {
	t := &pulsarTopic{from: clients[from], to: clients[to]}
	for name, c := range map[string]*pulsaradmin.Client{from: t.from, to: t.to} {
		if c == nil {
			return nil, fmt.Errorf("cluster %s has no admin address, which a planned switch needs: set clusters.%s.web_url", name, name)
		}
	}
	var err error
	if t.partitions, err = t.from.Partitions(ctx, base); err != nil {
		return nil, err
	}
	t.base, t.names = base, pulsaradmin.PartitionNames(base, t.partitions)
	t.pairs = pulsaradmin.NewPairs(base, t.partitions, t.from, t.to)
	t.plans = make([][]pulsaradmin.Plan, len(t.names))
	return t, nil
}

func (t *pulsarTopic) Close() {
	for _, p := range t.pairs {
		p.Close()
	}
}

// each calls f for every partition at once; the clients bound what is under way. Errors are joined.
func (t *pulsarTopic) each(f func(i int) error) error {
	errs := make([]error, len(t.names))
	var wg sync.WaitGroup
	for i := range t.names {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	err := errors.Join(errs...)
	if errors.Is(err, pulsaradmin.ErrForbidden) {
		err = fmt.Errorf("%w: %w", ErrHopeless, err)
	}
	return err
}

// Warm has both clusters know every partition, and carries the subscriptions as they are now.
func (t *pulsarTopic) Warm(ctx context.Context) error {
	for _, c := range []*pulsaradmin.Client{t.from, t.to} {
		if err := c.CreateMissing(ctx, t.base, t.partitions); err != nil {
			return err
		}
	}
	carried, err := pulsaradmin.CarryAll(ctx, t.pairs)
	for _, part := range carried {
		// Clients go on acknowledging meanwhile: what differs now is no fault yet.
		if text := pulsaradmin.Differences(part.Differences); text != "" && err == nil {
			err = fmt.Errorf("%s: %s", part.Topic, text)
		}
	}
	return err
}

// Evict unloads every partition of the old cluster. What its consumers have and did not acknowledge is noted before: afterwards the cluster has forgotten.
func (t *pulsarTopic) Evict(ctx context.Context) error {
	// Without the numbers the forecast is too low, and the switch no less safe.
	_ = t.each(func(i int) error { return t.pairs[i].NoteGiven(ctx) })
	// Neither does it know open transactions any more, until somebody goes on with one.
	if _, err := t.publishers(ctx); errors.Is(err, ErrHopeless) {
		return err
	}
	return t.each(func(i int) error { return t.from.Evict(ctx, t.names[i]) })
}

// publishers are those of the old cluster. A transaction that was begun after the preflight ends the attempt: what its producer publishes after the flip would be on another cluster than what it
// has published before, and its coordinator knows nothing of that.
func (t *pulsarTopic) publishers(ctx context.Context) ([]switching.Publisher, error) {
	var mu sync.Mutex
	var all []switching.Publisher
	open := int64(0)
	err := t.each(func(i int) error {
		s, err := t.from.Stats(ctx, t.names[i])
		mu.Lock()
		defer mu.Unlock()
		open += s.OngoingTxn
		for _, p := range s.Publishers {
			all = append(all, switching.Publisher{Name: p.Name, Text: p.String()})
		}
		return err
	})
	if err == nil && open > 0 {
		err = fmt.Errorf("%w: the topic has messages of %s on cluster %s, begun since the preflight: switch when they are committed or aborted", ErrHopeless, count(int(open), "open transaction"), t.from.Cluster())
	}
	// A producer on many partitions is named once.
	slices.SortFunc(all, func(a, b switching.Publisher) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(all, func(a, b switching.Publisher) bool { return a.Name == b.Name }), err
}

// grown tells that the topic has more partitions than when the switch was opened: nothing of the new ones would be drained or carried.
func (t *pulsarTopic) grown(ctx context.Context) error {
	n, err := t.from.Partitions(ctx, t.base)
	if err == nil && n != t.partitions {
		err = fmt.Errorf("%w: topic %s has %d partitions on cluster %s now and had %d when the switch began: ask for it again", ErrHopeless, t.base, n, t.from.Cluster(), t.partitions)
	}
	return err
}

// Tail reads the ends of the old cluster's logs, "topic=ledger:entry", one a line.
func (t *pulsarTopic) Tail(ctx context.Context) (string, error) {
	lines := make([]string, len(t.names))
	grown := make(chan error, 1)
	go func() { grown <- t.grown(ctx) }()
	err := t.each(func(i int) error {
		log, err := t.from.Tail(ctx, t.names[i])
		lines[i] = t.names[i] + "=" + log.Last.String()
		return err
	})
	if err := errors.Join(err, <-grown); err != nil {
		return "", err
	}
	return strings.Join(lines, "\n"), nil
}

// positions is what Tail has written down, by partition.
func (t *pulsarTopic) positions(tail string) ([]pulsaradmin.Position, error) {
	if tail == "" {
		return nil, errors.New("where the old cluster ended was not written down")
	}
	ends := tailMap(tail)
	if len(ends) != len(t.names) {
		return nil, fmt.Errorf("%w: the drain was of %d partitions, now there are %d", ErrHopeless, len(ends), len(t.names))
	}
	all := make([]pulsaradmin.Position, len(t.names))
	for i, name := range t.names {
		p, err := pulsaradmin.ParsePosition(ends[name])
		if err != nil {
			return nil, fmt.Errorf("end of %s: %w", name, err)
		}
		all[i] = p
	}
	return all, nil
}

// tailMap is what Tail has written down as a receipt has it, by partition, and tailText the opposite.
func tailMap(tail string) map[string]string {
	ends := map[string]string{}
	for line := range strings.SplitSeq(tail, "\n") {
		if name, at := cutEnd(line); name != "" {
			ends[name] = at
		}
	}
	return ends
}

// cutEnd splits a line of Tail; name is "" without one.
func cutEnd(line string) (name, at string) {
	i := strings.LastIndexByte(line, '=') // a name may have one
	return line[:max(i, 0)], line[i+1:]
}

func tailText(ends map[string]string) string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(ends)) {
		lines = append(lines, name+"="+ends[name])
	}
	return strings.Join(lines, "\n")
}

// Replicated compares the replicators' positions with tail.
func (t *pulsarTopic) Replicated(ctx context.Context, tail string) (string, error) {
	want, err := t.positions(tail)
	if err != nil {
		return "", err
	}
	missing := make([]string, len(t.names))
	err = t.each(func(i int) error {
		r, err := t.from.Replicator(ctx, t.names[i], t.to.Cluster(), time.Now())
		switch {
		case err != nil || r.Reached(want[i]):
		case !r.Exists && want[i].Entry < 0: // nothing was ever published
		case !r.Exists:
			missing[i] = fmt.Sprintf("%s: cluster %s has no replicator to %s", t.names[i], t.from.Cluster(), t.to.Cluster())
		default:
			missing[i] = fmt.Sprintf("%s: %d entries are not replicated yet, it stands at %v, the last is %v", t.names[i], r.Backlog, r.Position, want[i])
		}
		return err
	})
	return joined(missing, "; "), err
}

// joined leaves out what is "".
func joined(texts []string, separator string) string {
	return strings.Join(slices.DeleteFunc(texts, func(s string) bool { return s == "" }), separator)
}

// Carry carries the subscriptions of every partition. ReadBack follows.
func (t *pulsarTopic) Carry(ctx context.Context) (carried []switching.Carried, err error) {
	err = t.each(func(i int) (err error) {
		if t.plans[i], err = t.pairs[i].Plans(ctx); err != nil {
			return err
		}
		return t.pairs[i].Apply(ctx, t.plans[i])
	})
	for _, plans := range t.plans {
		for _, p := range plans {
			carried = append(carried, carriedOf(p))
		}
	}
	return carried, err
}

func carriedOf(p pulsaradmin.Plan) switching.Carried {
	return switching.Carried{
		Topic: p.Topic, Subscription: p.Subscription, How: string(p.How), By: string(p.By), First: p.First.String(), Holes: len(p.Holes),
		Backlog: p.Backlog, Unacked: p.Unacked, Repeated: p.Repeated, Missing: p.Missing, Note: p.Note,
	}
}

// ReadBack compares the subscriptions of the new cluster with the plans of the last Carry.
func (t *pulsarTopic) ReadBack(ctx context.Context) (string, error) {
	found, stood := make([]string, len(t.names)), make([][]pulsaradmin.Difference, len(t.names))
	err := t.each(func(i int) error {
		differences, err := t.pairs[i].ReadBack(ctx, t.plans[i])
		stood[i] = differences
		if text := pulsaradmin.Differences(differences); text != "" {
			found[i] = t.names[i] + ": " + text
		}
		return err
	})
	t.stood = stood
	return joined(found, "; "), err
}

// later looks at the subscriptions once more, when clients use them, and adds to v what it has found.
func (t *pulsarTopic) later(ctx context.Context, v *Verified) error {
	if t.stood == nil {
		return errors.New("the proxy that has carried them does not drive the switch any more")
	}
	ctx, cancel := context.WithTimeout(ctx, laterTimeout)
	defer cancel()
	found := make([][]pulsaradmin.Difference, len(t.names))
	err := t.each(func(i int) (err error) {
		found[i], err = t.pairs[i].Later(ctx, t.stood[i])
		return err
	})
	if err != nil {
		return err
	}
	var wrong []string
	for i, plans := range t.plans {
		for k, plan := range plans {
			c, d := carriedOf(plan), found[i][k]
			c.After = &switching.After{Backlog: d.Backlog, Difference: d.Backlog - d.Forecast}
			v.Carried = append(v.Carried, c)
		}
		if text := pulsaradmin.Differences(found[i]); text != "" {
			wrong = append(wrong, t.names[i]+": "+text)
		}
	}
	v.Differences = strings.Join(wrong, "; ")
	return nil
}

// Since looks for messages of clients behind tail.
func (t *pulsarTopic) Since(ctx context.Context, tail string) (string, []switching.Publisher, error) {
	after, err := t.positions(tail)
	if err != nil {
		return "", nil, err
	}
	publishers, err := t.publishers(ctx)
	if err != nil {
		return "", nil, err
	}
	found := make([]string, len(t.names))
	grown := make(chan error, 1)
	go func() { grown <- t.grown(ctx) }()
	err = t.each(func(i int) error {
		own, err := t.from.OwnSince(ctx, t.names[i], after[i])
		if len(own) > 0 {
			found[i] = fmt.Sprintf("%s at %v", t.writer(ctx, t.names[i], own[0].Producer), own[0].Position)
		}
		return err
	})
	if err := errors.Join(err, <-grown); err != nil {
		return "", nil, err
	}
	return joined(found, ", "), publishers, nil
}

// writer names a producer with its address, as long as it is connected.
func (t *pulsarTopic) writer(ctx context.Context, topic, name string) string {
	if s, err := t.from.Stats(ctx, topic); err == nil {
		for _, p := range s.Publishers {
			if p.Name == name {
				return p.String()
			}
		}
	}
	return fmt.Sprintf("producer %q", name)
}

// Verify looks at the subscriptions of the new cluster, and then for the last messages of the old cluster there.
func (t *pulsarTopic) Verify(ctx context.Context, tail string) (Verified, error) {
	v := Verified{Tail: map[string]string{}, First: map[string]string{}}
	later := t.later(ctx, &v)
	last, err := t.positions(tail)
	if err != nil {
		return v, err
	}
	var mu sync.Mutex
	compared, wrong := 0, []string{}
	err = t.each(func(i int) error {
		if err := t.pairs[i].Load(ctx); err != nil {
			return err
		}
		r, err := t.pairs[i].CompareTails(ctx, last[i], verifyEntries)
		mu.Lock()
		defer mu.Unlock()
		v.Tail[t.names[i]], v.First[t.names[i]] = last[i].String(), r.Last.String()
		compared += r.Compared
		if text := r.String(); text != "" {
			wrong = append(wrong, text)
		}
		return err
	})
	v.Wrong = strings.Join(wrong, "; ")
	v.Text = fmt.Sprintf("the last %d messages of the old cluster were looked for on the new one: all are there, in order", compared)
	if v.Wrong != "" {
		v.Text = v.Wrong
	}
	switch {
	case later != nil:
		v.Text += "; its subscriptions were not looked at after the flip: " + later.Error()
	case v.Differences != "":
		v.Text += "; " + v.Differences
	default:
		v.Text += fmt.Sprintf("; no backlog of %s is larger than was carried", count(len(v.Carried), "subscription"))
	}
	return v, err
}
