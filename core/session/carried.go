package session

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/route"
)

// This file remembers for a while what was acknowledged under the ids of a cluster that had the topic before: during a fence, and by clients
// that hold acknowledgements back. When the new cluster delivers the copy of such a message, which says of itself where it was copied from, it is
// acknowledged there and not delivered again. Only while something is remembered of a subscription is the metadata of its messages read.

// Position is a place in a topic, under the ids of one cluster.
type Position struct{ Ledger, Entry uint64 }

func (p Position) less(o Position) bool {
	return p.Ledger < o.Ledger || p.Ledger == o.Ledger && p.Entry < o.Entry
}

// OldAcks are acknowledgements of one subscription under the ids of a cluster that had the topic before.
type OldAcks struct {
	Topic        string // full name, with the partition
	Subscription string
	Cluster      string
	Positions    []Position
	Before       bool // everything before each of Positions, and not that itself
	// Forget: nothing is to be remembered of the subscription any more, for somebody has moved it. The fields above except the names are empty then.
	Forget bool

	copies []copyBlock // instead of Positions: what the subscription was given on Cluster that is from elsewhere
}

type subscriptionKey struct{ topic, name string }

// carried is what a subscription brings along over a move. Loop-owned.
type carried struct {
	key   subscriptionKey
	until time.Time           // its acknowledgements are forgotten then
	acks  map[string]*oldAcks // by cluster
	// copies are those that consumers were given, by the cluster that gave them.
	copies map[string]*copies

	// One message of the old cluster that the client goes by, and its copy: the copy is shown under the id that the client knows, so that it
	// leaves out as much of it as it would have on the old cluster. Valid for handles of aliasTag.
	aliasTag    uint64
	real, shown Position
	failing     time.Time // since when translations of its start position fail; zero: they do not
}

type oldAcks struct {
	cluster string // whose positions they are
	single  map[Position]struct{}
	before  Position
}

// carrying is all that is remembered. Loop-owned.
type carrying struct {
	sh     *Shard
	subs   map[subscriptionKey]*carried
	count  int // of single positions
	blocks int // of copies
	timer  timer
}

const (
	carryTime       = 30 * time.Second // after the last acknowledgement
	maxCarried      = 4096             // subscriptions of one shard
	maxOldAcks      = 20_000           // positions of one subscription
	maxOldAcksOfAll = 200_000          // and of one shard
)

func (cs *carrying) init(sh *Shard) {
	cs.sh = sh
	cs.timer.owner = cs
}

// of is what is remembered of a subscription, from now on for carryTime at least; nil when there is no room.
func (cs *carrying) of(now time.Time, key subscriptionKey) *carried {
	c := cs.subs[key]
	if c == nil {
		if len(cs.subs) >= maxCarried {
			return nil
		}
		if cs.subs == nil {
			cs.subs = make(map[subscriptionKey]*carried)
		}
		c = &carried{key: key}
		cs.subs[key] = c
		cs.each(c, func(h *handle) { h.carried = c })
	}
	if until := now.Add(carryTime); until.After(c.until) {
		c.until = until
	}
	cs.sh.timers.sooner(&cs.timer, c.until)
	return c
}

// each calls f for the live consumers of a subscription.
func (cs *carrying) each(c *carried, f func(h *handle)) {
	topic, err := route.ParseTopic(c.key.topic)
	if err != nil {
		return
	}
	if t := cs.sh.index[topic.Base()]; t != nil {
		for _, h := range t.list {
			if !h.producer && h.full == c.key.topic && h.sub == c.key.name {
				f(h)
			}
		}
	}
}

// fire forgets what is over. A copy that is shown under an old id is not, as long as a consumer of it lives.
func (cs *carrying) fire(now time.Time) {
	var next time.Time
	for key, c := range cs.subs {
		if !c.until.After(now) {
			cs.forgetAcks(c)
			used := cs.forgetCopies(c, now.Add(-carryTime))
			cs.each(c, func(h *handle) { used = used || h.tag > 0 && c.aliasTag == h.tag })
			if !used {
				cs.each(c, func(h *handle) { h.carried = nil })
				delete(cs.subs, key)
				continue
			}
			c.until = now.Add(carryTime)
		}
		if next.IsZero() || c.until.Before(next) {
			next = c.until
		}
	}
	if !next.IsZero() {
		cs.sh.timers.set(&cs.timer, next)
	}
}

func (cs *carrying) forgetAcks(c *carried) {
	for _, a := range c.acks {
		cs.count -= len(a.single)
	}
	c.acks = nil
}

// CarryAcks remembers acknowledgements that another loop got. It tells whether all of them are.
func (sh *Shard) CarryAcks(now time.Time, a OldAcks) bool {
	cs := &sh.carrying
	key := subscriptionKey{a.Topic, a.Subscription}
	if a.Forget {
		if c := cs.subs[key]; c != nil {
			cs.forgetAcks(c)
		}
		return true
	}
	c := cs.of(now, key)
	if c == nil {
		return false
	}
	if len(a.copies) > 0 {
		cs.addCopies(now, c, a.Cluster, a.copies...)
		return true
	}
	of := c.acks[a.Cluster]
	if of == nil {
		of = &oldAcks{cluster: a.Cluster, single: make(map[Position]struct{})}
		if c.acks == nil {
			c.acks = make(map[string]*oldAcks)
		}
		c.acks[a.Cluster] = of
	}
	all := true
	for _, p := range a.Positions {
		_, known := of.single[p]
		switch {
		case known:
		case a.Before:
			if of.before.less(p) {
				of.before = p
			}
		case len(of.single) >= maxOldAcks || cs.count >= maxOldAcksOfAll:
			all = false
		default:
			of.single[p] = struct{}{}
			cs.count++
		}
	}
	return all
}

// take tells whether the message at a place of a cluster was acknowledged, once for each; of is what is remembered of that cluster, or nil.
func (cs *carrying) take(c *carried, of *oldAcks, at Position) bool {
	if of == nil {
		return false
	}
	_, single := of.single[at]
	switch {
	case single:
		delete(of.single, at)
		cs.count--
	case at.less(of.before):
		return true
	default:
		of.before = Position{} // what is acknowledged cumulatively comes in order: this is behind all of it
	}
	if len(of.single) == 0 && of.before == (Position{}) {
		delete(c.acks, of.cluster)
	}
	return single
}

// skip acknowledges a message instead of delivering it, and gives the client's permit for it back.
func (l *leg) skip(h *handle, at Position, messages int) {
	sh := l.s.sh
	sh.counters.SkippedMessages.Add(1)
	l.send(sh.encode(command(codec.TypeAck, &pulsarpb.BaseCommand{Ack: &pulsarpb.CommandAck{
		ConsumerId: &h.id, AckType: proto.Int32(0), MessageId: []*pulsarpb.MessageIdData{{LedgerId: &at.Ledger, EntryId: &at.Entry}},
	}})))
	l.send(sh.encode(command(codec.TypeFlow, &pulsarpb.BaseCommand{Flow: &pulsarpb.CommandFlow{ConsumerId: &h.id, MessagePermits: proto.Uint32(uint32(messages))}})))
}

// forgetAcks is called when somebody moves the subscription of h: what was acknowledged before may have to be delivered again.
func (s *Session) forgetAcks(h *handle) {
	c := s.sh.carrying.subs[h.key()]
	if c == nil || len(c.acks) == 0 {
		return
	}
	s.sh.carrying.forgetAcks(c)
	s.sh.tellOthers(OldAcks{Topic: h.full, Subscription: h.sub, Forget: true})
}

// moveTo is called when the client moves the subscription of h, to a message or (nil) a time. What it compares ids with is that from then on.
func (s *Session) moveTo(h *handle, id *pulsarpb.MessageIdData) {
	s.forgetAcks(h)
	if c := h.carried; c != nil && (id == nil || !c.shows(h, Position{id.GetLedgerId(), id.GetEntryId()})) {
		c.aliasTag = 0
	}
}

func (sh *Shard) tellOthers(a OldAcks) {
	sh.ops = append(sh.ops, Op{Kind: OpOldAcks, OldAcks: &a})
}

func (h *handle) key() subscriptionKey { return subscriptionKey{h.full, h.sub} }

// clusterAt is the cluster that had the topic of h at an epoch; "" when that is not known.
func (h *handle) clusterAt(epoch uint64) string {
	if epoch == h.tag {
		return h.leg.cluster
	}
	topic, err := route.ParseTopic(h.full)
	if f := h.s.sh.cfg.ClusterAt; err == nil && f != nil {
		return f(topic.Base(), epoch)
	}
	return ""
}

// carryAcks remembers what an ACK of h says of messages that are not those of the cluster that has the topic now. It tells whether it remembers all of that.
func (s *Session) carryAcks(now time.Time, h *handle, ack *pulsarpb.CommandAck, old []oldID) bool {
	sh := s.sh
	kept := 0
	if ack.GetTxnidLeastBits() == 0 && ack.GetTxnidMostBits() == 0 && h.state != handleCreating && sh.mappedCluster(h.full) != "" {
		for i := 0; i < len(old); {
			cluster, whole := h.clusterAt(old[i].epoch), 0
			all := originals{h: h, cluster: cluster, before: ack.GetAckType() == ackCumulative}
			if c := sh.carrying.subs[h.key()]; c != nil {
				all.copies = c.copies[cluster]
			}
			for epoch := old[i].epoch; i < len(old) && old[i].epoch == epoch; i++ {
				if all.before || !old[i].partial {
					all.add(old[i])
					whole++
				}
			}
			if cluster == "" || cluster == sh.mappedCluster(h.full) {
				continue
			}
			for _, a := range all.acks {
				if !sh.CarryAcks(now, a) {
					whole = 0
				}
				sh.tellOthers(a)
			}
			kept += whole
		}
	}
	sh.counters.CarriedAcks.Add(uint64(kept))
	sh.counters.LostAcks.Add(uint64(len(old) - kept))
	return kept == len(old)
}

// originals are acknowledgements of messages that one cluster has told, sorted by the clusters that have the originals.
type originals struct {
	h       *handle
	cluster string
	before  bool
	copies  *copies // that the subscription was given there; nil without any
	acks    []OldAcks
}

func (o *originals) add(id oldID) {
	at := id.at
	if !o.before {
		if cluster, of, ok := o.copies.original(at); ok {
			o.put(cluster, of)
			return
		}
		o.put(o.cluster, at)
		return
	}
	if !id.partial {
		at.Entry++
	}
	o.put(o.cluster, at)
	o.copies.before(at, func(cluster string, last Position) {
		last.Entry++
		o.put(cluster, last)
	})
}

func (o *originals) put(cluster string, at Position) {
	i := slices.IndexFunc(o.acks, func(a OldAcks) bool { return a.Cluster == cluster })
	if i < 0 {
		i = len(o.acks)
		o.acks = append(o.acks, OldAcks{Topic: o.h.full, Subscription: o.h.sub, Cluster: cluster, Before: o.before})
	}
	o.acks[i].Positions = append(o.acks[i].Positions, at)
}

// ackCumulative is CommandAck.ack_type for everything up to a message.
const ackCumulative = 1

// carryEvicted is carryAcks for an ACK of a consumer that was closed because its topic moved: its ids are those of the old cluster.
func (s *Session) carryEvicted(now time.Time, h *handle, ack *pulsarpb.CommandAck) bool {
	if s.sh.cfg.NativeIDs || s.sh.mappedCluster(h.full) == h.leg.cluster {
		return false
	}
	var old []oldID
	for _, id := range ack.GetMessageId() {
		real, epoch, ok := codec.SplitLedger(id.GetLedgerId())
		at := Position{real, id.GetEntryId()}
		if c := h.carried; c.shows(h, Position{id.GetLedgerId(), id.GetEntryId()}) {
			at, epoch = c.real, h.tag
		}
		if ok {
			old = append(old, oldID{at, epoch, len(id.AckSet) > 0})
		}
	}
	return s.carryAcks(now, h, ack, old) && len(old) > 0
}

// shows tells whether h shows a copy under this id of the old cluster.
func (c *carried) shows(h *handle, id Position) bool {
	return c != nil && c.aliasTag == h.tag && h.tag > 0 && id == c.shown
}

// answerAck answers an ACK well.
func (s *Session) answerAck(h *handle, req uint64) {
	s.sendCommand(command(codec.TypeAckResponse, &pulsarpb.BaseCommand{AckResponse: &pulsarpb.CommandAckResponse{ConsumerId: &h.id, RequestId: &req}}))
}
