package controller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// What a preflight makes of a topic that is to move without replication (docs/adr/007-drain.md). The items are those of judges.go.

func (s *survey) drains() bool { return s.req.Mode == switching.ModeDrain }

// readLeft reads what every subscription has left on the old cluster, and how old that is.
func (s *survey) readLeft(ctx context.Context, from, to *pulsaradmin.Client) {
	names := pulsaradmin.PartitionNames(s.req.Topic, s.from.Partitions)
	watch := pulsaradmin.NewWatch(from, names)
	defer watch.Close()
	if s.left, _, s.leftErr = watch.Look(ctx); s.leftErr == nil {
		s.oldest, s.leftErr = watch.Oldest(ctx)
	}
	began := time.Now()
	var wg sync.WaitGroup
	for _, name := range names {
		wg.Go(func() { _, _ = from.Tail(ctx, name) }) // only how long it takes counts
		if s.to.Exists {
			wg.Go(func() { _, _ = to.Tail(ctx, name) })
		}
	}
	wg.Wait()
	s.readTook = time.Since(began)
}

// judgeDrain adds what is particular to this mode, and what is not.
func (s *survey) judgeDrain(p *switching.Preflight) {
	p.Add(s.drainSchema(), s.drainReplication(), s.drainWayBack())
	p.Add(s.drainSubscriptions()...)
	p.Add(s.drainRetention()...)
	p.Add(s.drainReaders(), s.drainProducers(), s.judgeClients())
	p.Add(s.judgeBypass()...)
	p.Add(s.judgeTransactions(), s.drainDelayed(), s.judgeSiblings(), s.drainCompaction())
	p.Add(s.judgePolicies()...)
	p.SubscriptionCount = len(s.left)
	p.Forecast = s.forecast()
	p.Forecast.HoldMillis = millis((acksTook + looksInFence*s.readTook).Round(time.Millisecond))
	for _, r := range s.left {
		p.Forecast.Draining = append(p.Forecast.Draining, leftOf(r))
	}
	for i, l := range p.Forecast.Draining {
		p.Forecast.Draining[i].Oldest = s.oldest[l.Subscription]
	}
	p.Forecast.Draining = longestFirst(p.Forecast.Draining)
}

// longestFirst sorts by what is left, and keeps the first ones.
func longestFirst(all []switching.Left) []switching.Left {
	slices.SortStableFunc(all, func(a, b switching.Left) int {
		return cmp.Or(cmp.Compare(b.Backlog, a.Backlog), cmp.Compare(b.Unacked, a.Unacked), cmp.Compare(a.Subscription, b.Subscription))
	})
	return all[:min(len(all), switching.MaxCarried)]
}

func leftOf(r pulsaradmin.Remaining) switching.Left {
	l := switching.Left{Subscription: r.Name, Backlog: r.Backlog, Unacked: r.Unacked, Delayed: r.Delayed, Consumers: len(r.Consumers)}
	for _, c := range r.Consumers {
		// One client has a consumer on each partition.
		if text := c.String(); len(l.By) < maxNamed && !slices.Contains(l.By, text) {
			l.By = append(l.By, text)
		}
	}
	return l
}

// drainSchema: what the new cluster lacks is registered there before the fence (SW-10).
func (s *survey) drainSchema() switching.Finding {
	if len(s.to.Schemas) == 0 && len(s.from.Schemas) > 0 {
		return fine(itemSchema, "%s, registered on cluster %s under the same numbers before anything moves", count(len(s.from.Schemas), "version"), s.req.To)
	}
	if d := pulsaradmin.SchemaDifference(s.from, s.to); d != "" {
		return blocker(itemSchema, fmt.Sprintf("register the versions on cluster %s in the order of cluster %s (`pulsar-admin schemas upload`), on a topic without other versions", s.req.To, s.req.From),
			"%s: messages say their schema by its number, so readers would decode them by another one", d)
	}
	return fine(itemSchema, "%s, the same numbers on both clusters", count(len(s.from.Schemas), "version"))
}

// drainReplication: with replication each message would come twice, from the old cluster and as a copy on the new one, or the other way round (SW-17).
func (s *survey) drainReplication() switching.Finding {
	for _, f := range []pulsaradmin.Facts{s.from, s.to} {
		other := s.req.To
		if f.Cluster == s.req.To {
			other = s.req.From
		}
		if f.Replicates(other) {
			return blocker(itemReplication, "use --mode planned, which needs replication and moves subscriptions at once; or take the cluster out of the replication clusters first",
				"cluster %s replicates the topic to %s: each message would be delivered twice, once by each cluster", f.Cluster, other)
		}
	}
	var left []string
	for _, c := range s.from.ReplicatedTo() {
		if c != s.req.From && !s.to.Replicates(c) {
			left = append(left, c)
		}
	}
	if left != nil {
		return warning(itemReplication, fmt.Sprintf("have cluster %s replicate to the same clusters, or accept it", s.req.To), "cluster %s replicates the topic to %s, and cluster %s does not: what is published after the switch does not get there", s.req.From, named(left, same), s.req.To)
	}
	return fine(itemReplication, "none between %s and %s", s.req.From, s.req.To)
}

// drainWayBack: it is closed by the first message that is consumed on the new cluster.
func (s *survey) drainWayBack() switching.Finding {
	done := slices.DeleteFunc(slices.Clone(s.left), func(r pulsaradmin.Remaining) bool { return !r.Drained() })
	switch {
	case len(s.left) == 0:
		return fine(itemWayBack, "by `pointsman switch reverse` until a subscription has had a message on cluster %s: what is published there by then is copied back", s.req.To)
	case len(done) == len(s.left):
		return fine(itemWayBack, "by `pointsman switch reverse` until the first subscription has moved, which is at once, because all are caught up; later by a drain from %s to %s", s.req.To, s.req.From)
	}
	return fine(itemWayBack, "by `pointsman switch reverse` until the first subscription has moved (%d of %d are caught up, and move at once); later by a drain from %s to %s", len(done), len(s.left), s.req.To, s.req.From)
}

// drainSubscriptions: what each has to do, and what is on the new cluster already.
func (s *survey) drainSubscriptions() (found []switching.Finding) {
	if s.leftErr != nil {
		return []switching.Finding{blocker(itemSubscriptions, mend(s.leftErr), "what the subscriptions have left on cluster %s cannot be read: %v", s.req.From, s.leftErr)}
	}
	drain := route.Drain{From: s.req.From}
	for _, r := range s.left {
		drain.Subs = append(drain.Subs, route.DrainSub{Name: r.Name})
	}
	for _, part := range s.from.Parts {
		drain.Tails = append(drain.Tails, route.Tail{Ledger: part.Internal.Last.Ledger, Entry: part.Internal.Last.Entry})
	}
	if err := drain.Check(); err != nil {
		return []switching.Finding{blocker(itemSubscriptions, "remove subscriptions that nobody uses (`pulsar-admin topics unsubscribe`); or use --mode planned, which has no such limit", "the topic cannot be drained: %v", err)}
	}
	for _, r := range s.left {
		switch {
		case r.Drained():
		case len(r.Consumers) == 0:
			found = append(found, warning(itemSubscriptions, fmt.Sprintf("start its consumers; or, when nobody needs it, `pulsar-admin topics unsubscribe -s %s %s`, on cluster %s; or accept that the switch stays open until then", r.Name, s.req.Topic, s.req.From),
				"subscription %q has %s left on cluster %s, and no consumer: it stays there until somebody consumes them", r.Name, entries(r.Backlog), s.req.From))
		}
	}
	for _, part := range s.to.Parts {
		for _, name := range slices.Sorted(maps.Keys(part.Stats.Subscriptions)) {
			there := part.Stats.Subscriptions[name]
			if !there.Durable || strings.HasPrefix(name, "pulsar.") || strings.HasPrefix(name, "__") {
				continue
			}
			if len(there.Consumers) > 0 {
				found = append(found, warning(itemSubscriptions, "end that client: it does not come through the proxies, and what it consumes closes the way back", "subscription %q of %s is in use on cluster %s already, by %v", name, part.Topic, s.req.To, there.Consumers[0]))
			}
			if _, known := s.subscriptionsOf(part.Topic)[name]; known && there.Backlog > 0 {
				found = append(found, warning(itemSubscriptions, fmt.Sprintf("`pulsar-admin topics clear-backlog -s %s`, on cluster %s, if nobody is to get them; or accept that they are delivered", name, s.req.To),
					"subscription %q of %s has %s on cluster %s, from before: they are delivered when it has moved, before what is published after the switch", name, part.Topic, entries(there.Backlog), s.req.To))
			}
		}
	}
	if found = s.limited(found); found != nil {
		return found
	}
	var sum int64
	for _, r := range s.left {
		sum += r.Backlog
	}
	return append(found, fine(itemSubscriptions, "%s, with %s to drain", count(len(s.left), "subscription"), entries(sum)))
}

func entries(n int64) string {
	if n == 1 {
		return "1 entry"
	}
	return fmt.Sprintf("%d entries", n)
}

// drainRetention: what may be removed before it is consumed, on either cluster, and what is not seen any more afterwards.
func (s *survey) drainRetention() (found []switching.Finding) {
	if ttl := timeToLive(s.from); ttl > 0 {
		for _, r := range s.left {
			if at := s.oldest[r.Name]; !at.IsZero() && !r.Drained() && s.now.Sub(at) > ttl/2 {
				found = append(found, warning(itemRetention, fmt.Sprintf("have the subscription catch up; or set a longer message TTL, on cluster %s", s.req.From),
					"the oldest message of subscription %q is %v old, and the message TTL on cluster %s is %v: messages expire before they are consumed, as they would without the switch", r.Name, s.now.Sub(at).Round(time.Second), s.req.From, ttl))
			}
		}
	}
	waiting := slices.ContainsFunc(s.left, func(r pulsaradmin.Remaining) bool { return !r.Drained() })
	if ttl := timeToLive(s.to); ttl > 0 && waiting {
		found = append(found, warning(itemRetention, fmt.Sprintf("set a message TTL that is longer than the drain takes, on cluster %s, or none", s.req.To),
			"the message TTL on cluster %s is %v: a subscription that drains for longer loses what is published there meanwhile", s.req.To, ttl))
	}
	if minutes := s.to.Policies.SubExpiration; minutes != nil && *minutes > 0 && waiting {
		found = append(found, warning(itemRetention, fmt.Sprintf("pulsar-admin namespaces remove-subscription-expiration-time, on cluster %s, until the switch is done", s.req.To),
			"cluster %s removes subscriptions that nobody has used for %d minutes: one that drains for longer loses what is published there meanwhile", s.req.To, *minutes))
	}
	if found = s.limited(found); found != nil {
		return found
	}
	if retains(s.from) {
		return append(found, warning(itemRetention, "accept it; or keep the messages elsewhere, if somebody still needs to read them",
			"cluster %s keeps messages that were consumed: when the switch is done, readers and seeks find only what was published after it", s.req.From))
	}
	return append(found, fine(itemRetention, "nothing expires before it is consumed, as far as can be seen now"))
}

// timeToLive is for how long a topic keeps messages that nobody has consumed; 0 for ever.
func timeToLive(f pulsaradmin.Facts) time.Duration {
	seconds := int64(0)
	if f.Policies.TTL != nil {
		seconds = *f.Policies.TTL
	}
	if own, ok := f.TopicPolicies["messageTTL"]; ok {
		var n int64
		if json.Unmarshal(own, &n) == nil {
			seconds = n
		}
	}
	return time.Duration(seconds) * time.Second
}

// drainReaders: they are sent over when they have had the last message here.
func (s *survey) drainReaders() switching.Finding {
	f := s.judgeReaders()
	if f.Verdict != switching.Fine || f.Evidence == "none" {
		return f
	}
	return fine(itemReaders, "%s", strings.Replace(f.Evidence, "go on at the message after the last one that they got", fmt.Sprintf("read cluster %s to its end, and then go on at the first message of cluster %s; a reader that does not read keeps the switch open", s.req.From, s.req.To), 1))
}

// drainProducers: without a replicator in the topic every access mode is let in.
func (s *survey) drainProducers() switching.Finding {
	all := s.publishers()
	alone := slices.DeleteFunc(slices.Clone(all), func(p pulsaradmin.Publisher) bool { return p.AccessMode == "" || p.AccessMode == "Shared" })
	if len(alone) > 0 {
		return fine(itemProducers, "%d, of which %d not with access mode Shared: they are let in on cluster %s as here", len(all), len(alone), s.req.To)
	}
	return fine(itemProducers, "%d, all with access mode Shared", len(all))
}

func (s *survey) drainDelayed() switching.Finding {
	var n int64
	for _, r := range s.left {
		n += r.Delayed
	}
	if n > 0 {
		return warning(itemDelayed, "wait until they were delivered; or accept that the switch stays open until then", "%d messages are delayed: their subscriptions stay on cluster %s until those were delivered and acknowledged", n, s.req.From)
	}
	return fine(itemDelayed, "none")
}

// drainCompaction: the last value of a key may be of before the switch.
func (s *survey) drainCompaction() switching.Finding {
	for _, part := range s.from.Parts {
		if part.Internal.Compacted {
			return warning(itemCompaction, "use --mode planned, which needs replication; or have every key published again after the switch",
				"%s is compacted: when the switch is done, who reads compacted finds only the keys that were published after it", part.Topic)
		}
	}
	return fine(itemCompaction, "not compacted")
}

// returns tells that the preflight is of the way back of a drain.
func (s *survey) returns() bool { return s.drains() && s.req.Since != nil }

// readSince reads who has had a message that was published since the switch on the cluster that is to be left again.
func (s *survey) readSince(ctx context.Context, from *pulsaradmin.Client) {
	for _, part := range s.from.Parts {
		at, err := pulsaradmin.ParsePosition(s.req.Since[part.Topic])
		if err != nil {
			s.leftErr = fmt.Errorf("the receipt does not say where the messages of since the switch begin on %s", part.Topic)
			return
		}
		in := part.Internal
		s.toCopy += in.Len() - in.Index(pulsaradmin.Position{Ledger: at.Ledger, Entry: at.Entry + 1})
		had, err := from.Had(ctx, part.Topic, at)
		if s.had = append(s.had, had...); err != nil {
			s.leftErr = err
			return
		}
	}
}

// judgeReturn: nobody may have had anything, and what was published must mean the same on the old cluster.
func (s *survey) judgeReturn(p *switching.Preflight) {
	switch {
	case s.leftErr != nil:
		p.Add(blocker(itemWayBack, mend(s.leftErr)+"; or let the drain end, and drain back", "whether somebody had messages on cluster %s cannot be told: %v", s.req.From, s.leftErr))
	case len(s.had) > 0:
		p.Add(blocker(itemWayBack, fmt.Sprintf("let the drain end, then drain from %s to %s", s.req.From, s.req.To), "%s had messages on cluster %s already", named(s.had, same), s.req.From))
	default:
		p.Add(fine(itemWayBack, "nobody has had a message on cluster %s yet; %s to be copied to cluster %s", s.req.From, entries(s.toCopy), s.req.To))
	}
	p.Add(s.judgeReturnedSchema(), s.judgeTransactions(), s.judgeClients())
	p.Add(s.judgeBypass()...)
	p.Forecast = s.forecast()
	p.Forecast.Unreplicated = s.toCopy
	p.Forecast.HoldMillis = millis(acksTook + time.Duration(looksInFence)*s.readTook)
}

func (s *survey) judgeReturnedSchema() switching.Finding {
	if d := pulsaradmin.SchemaDifference(s.from, s.to); d != "" {
		return blocker(itemSchema, "register the versions there, in order (`pulsar-admin schemas upload`)", "%s: what was published since the switch would be decoded by another schema", d)
	}
	return fine(itemSchema, "%s, the same numbers on both clusters", count(len(s.from.Schemas), "version"))
}
