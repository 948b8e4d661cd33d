package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
	"pointsman/store"
)

const (
	// checkTimeout bounds the reading of one preflight.
	checkTimeout = 25 * time.Second
	// progressApart is between two looks at a replicator that has something to send.
	progressApart = time.Second
)

// survey is everything that a preflight has read; judges.go says what it means.
type survey struct {
	req       switching.CheckRequest
	nativeIDs bool
	noAddress []string // clusters without an admin address

	members    []store.Proxy
	leader     string
	leaderErr  error
	from, to   pulsaradmin.Facts
	fromErr    error
	toErr      error
	siblings   []sibling
	siblingErr error
	late       map[string]int // by cluster: questions that were answered only when they were asked again

	forth, back replication
	subs        []subscription
	readTook    time.Duration // one look at the ends of all partitions, on both clusters
	planTook    time.Duration // one look at all subscriptions, after a first one

	// Of mode drain:
	left    []pulsaradmin.Remaining // by name
	leftErr error
	had     []string // of the way back: who has had messages of since the switch
	toCopy  int64    // of the way back, in entries
	now     time.Time
	oldest  map[string]time.Time // by subscription: when its oldest message that is not acknowledged was published
}

// sibling is a DLQ or RETRY topic of the topic.
type sibling struct {
	topic   string
	cluster string // that the map names
}

// replication is two looks at the replicators of one direction, by partition.
type replication struct {
	before, after []pulsaradmin.Replicator
	err           error
}

// subscription is one durable subscription of one partition, and how it would be carried.
type subscription struct {
	topic string
	sub   pulsaradmin.Sub
	plan  pulsaradmin.Plan
	err   error
}

// Check is the preflight of a switch of one topic, in mode planned or drain. It reads from both clusters and the store and writes nothing. What cannot be read is
// a finding, when it was asked for three times or checkTimeout is over; the error is for the store alone.
func (c *Controller) Check(ctx context.Context, req switching.CheckRequest) (switching.Preflight, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	ctx, patience := pulsaradmin.Patiently(ctx)
	s := &survey{req: req, nativeIDs: c.cfg.NativeIDs, now: began, late: map[string]int{}}
	var err error
	if s.members, s.leader, s.leaderErr, err = c.seated(ctx, req.Batch); err != nil {
		return switching.Preflight{}, err
	}
	from, to := c.cfg.Clients[req.From], c.cfg.Clients[req.To]
	for name, client := range map[string]*pulsaradmin.Client{req.From: from, req.To: to} {
		if client == nil {
			s.noAddress = append(s.noAddress, name)
		}
	}
	slices.Sort(s.noAddress)
	if len(s.noAddress) == 0 {
		s.read(ctx, from, to, func() ([]string, error) {
			if req.Batch {
				return c.names.siblings(ctx, from, req.Topic)
			}
			return from.Siblings(ctx, req.Topic)
		})
		if s.readable() {
			c.mapSiblings(ctx, s)
			switch {
			case s.returns():
				s.readSince(ctx, from)
			case s.drains():
				s.readLeft(ctx, from, to)
			default:
				s.readMore(ctx, from, to)
			}
		}
	}
	for _, name := range []string{req.From, req.To} {
		s.late[name] = patience.Late(name)
	}
	p := s.judge()
	p.At = began
	return p, nil
}

// seats are the members and the leader as they were a moment ago. Preflights of a batch go by them: whether a topic may flip, its own
// survey decides.
type seats struct {
	mu        sync.Mutex
	at        time.Time // all guarded by mu
	members   []store.Proxy
	leader    string
	leaderErr error
}

// seatsKept is how old they may be.
const seatsKept = time.Second

// seated are the members and the leader: as of now, or in a batch as of a moment ago.
func (c *Controller) seated(ctx context.Context, batch bool) (members []store.Proxy, leader string, leaderErr, err error) {
	if !batch {
		if members, err = c.cfg.Store.Proxies(ctx); err == nil {
			leader, leaderErr = c.cfg.Store.Leader(ctx)
		}
		return members, leader, leaderErr, err
	}
	k := &c.seats
	k.mu.Lock() // those who come meanwhile wait: they would all read the same
	defer k.mu.Unlock()
	if time.Since(k.at) > seatsKept {
		began := time.Now()
		if members, leader, leaderErr, err = c.seated(ctx, false); err != nil {
			return nil, "", nil, err
		}
		k.at, k.members, k.leader, k.leaderErr = began, members, leader, leaderErr
	}
	return k.members, k.leader, k.leaderErr, nil
}

// read takes the facts of both clusters; siblings names what belongs to the topic.
func (s *survey) read(ctx context.Context, from, to *pulsaradmin.Client, siblings func() ([]string, error)) {
	var wg sync.WaitGroup
	wg.Go(func() { s.from, s.fromErr = from.Facts(ctx, s.req.Topic) })
	wg.Go(func() { s.to, s.toErr = to.Facts(ctx, s.req.Topic) })
	wg.Go(func() {
		names, err := siblings()
		for _, name := range names {
			s.siblings = append(s.siblings, sibling{topic: name})
		}
		s.siblingErr = err
	})
	wg.Wait()
}

// readable tells whether the topic is there on both clusters, partition by partition: the rest cannot be asked otherwise.
func (s *survey) readable() bool {
	missing := func(p pulsaradmin.PartFacts) bool { return p.Missing }
	if s.drains() { // what the new cluster lacks is made
		return len(s.noAddress) == 0 && s.fromErr == nil && s.toErr == nil && s.from.Exists && s.to.Namespace && (!s.to.Exists || s.from.Partitions == s.to.Partitions) &&
			!slices.ContainsFunc(s.from.Parts, missing)
	}
	return len(s.noAddress) == 0 && s.fromErr == nil && s.toErr == nil && s.from.Exists && s.to.Exists && s.from.Partitions == s.to.Partitions &&
		!slices.ContainsFunc(s.from.Parts, missing) && !slices.ContainsFunc(s.to.Parts, missing)
}

// mapSiblings looks up which clusters the siblings are on.
func (c *Controller) mapSiblings(ctx context.Context, s *survey) {
	if len(s.siblings) == 0 || s.siblingErr != nil {
		return
	}
	rules, err := c.cfg.Store.Rules(ctx)
	buckets := map[int][]route.Entry{}
	for i := 0; i < len(s.siblings) && err == nil; i++ {
		name := s.siblings[i].topic
		var e route.Entry
		var ok bool
		if e, ok, err = c.cfg.Store.Entry(ctx, name); ok {
			buckets[route.Bucket(name)] = append(buckets[route.Bucket(name)], e)
		}
	}
	if err != nil {
		s.siblingErr = err
		return
	}
	table, _, err := route.Empty().With(buckets, &rules)
	if err != nil {
		s.siblingErr = err
		return
	}
	for i := range s.siblings {
		if t, err := route.ParseTopic(s.siblings[i].topic); err == nil {
			s.siblings[i].cluster = table.Decide(t, c.cfg.DefaultCluster).Cluster
		}
	}
}

// readMore looks at both directions of replication and makes the plans of all subscriptions, all at once.
func (s *survey) readMore(ctx context.Context, from, to *pulsaradmin.Client) {
	names := pulsaradmin.PartitionNames(s.req.Topic, s.from.Partitions)
	progress := func(r *replication, c *pulsaradmin.Client, target string) {
		r.before, r.after, r.err = c.Progress(ctx, names, target, progressApart)
	}
	subs := make([][]subscription, len(names))
	took := make([]time.Duration, len(names))
	var wg sync.WaitGroup
	wg.Go(func() { progress(&s.forth, from, s.req.To) })
	if s.to.Replicates(s.req.From) {
		wg.Go(func() { progress(&s.back, to, s.req.From) })
	}
	for i, name := range names {
		wg.Go(func() { subs[i], took[i] = planAll(ctx, pulsaradmin.NewPair(name, from, to)) })
	}
	wg.Wait()
	s.subs, s.planTook = slices.Concat(subs...), slices.Max(took)
	began := time.Now()
	for _, name := range names {
		for _, c := range []*pulsaradmin.Client{from, to} {
			wg.Go(func() { _, _ = c.Tail(ctx, name) }) // only how long it takes counts
		}
	}
	wg.Wait()
	s.readTook = time.Since(began)
}

// plansAtOnce is how many subscriptions of one partition are looked at at once; the clients bound their calls.
const plansAtOnce = 16

// planAll makes the plans of one partition twice: the first time reads what the warm-up of a switch will have read, and the second is timed.
func planAll(ctx context.Context, pair *pulsaradmin.Pair) (subs []subscription, took time.Duration) {
	defer pair.Close()
	for range 2 {
		began := time.Now()
		snapshot, err := pair.Snapshot(ctx)
		if err == nil {
			err = pair.Load(ctx)
		}
		if err != nil {
			return []subscription{{topic: pair.Topic, err: err}}, 0
		}
		subs = make([]subscription, len(snapshot.Subs))
		slots := make(chan struct{}, plansAtOnce)
		var wg sync.WaitGroup
		for i, sub := range snapshot.Subs {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				subs[i] = subscription{topic: pair.Topic, sub: sub}
				subs[i].plan, subs[i].err = pair.Plan(ctx, sub)
			})
		}
		wg.Wait()
		took = time.Since(began)
	}
	return subs, took
}

// ahead tells that a subscription only waits for what the replicator is about to send: the next look will find it.
func (s subscription) ahead() bool {
	var behind *pulsaradmin.ErrBehind
	return errors.As(s.err, &behind)
}

func (s subscription) String() string {
	if s.sub.Name == "" { // they could not be listed
		return "the subscriptions of " + s.topic
	}
	return fmt.Sprintf("subscription %q of %s", s.sub.Name, s.topic)
}
