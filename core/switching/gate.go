package switching

import "pointsman/core/route"

// Key names one attempt of one switch. Entries, acks, disk copies and the work on both clusters are tied to it: what belongs to
// another attempt counts for nothing.
type Key struct {
	Switch  string
	Attempt uint32
}

// KeyOf is the attempt that wrote an entry last.
func KeyOf(e route.Entry) Key { return Key{e.SwitchID, e.Attempt} }

// Standing is what a proxy goes by for one topic at one moment. A session asks for it anew before each frame of a topic that
// moves: a lease ends by itself, with no event.
type Standing struct {
	State route.State
	// Epoch of the entry.
	Epoch uint64
	// Lease tells that the process may act on what it knows: it has a lease, and the entry does not come from the disk alone.
	Lease bool
	// Aged tells that the last contact with the store is older than max_map_age (rule P8; never when that is off).
	Aged bool
}

// Action is what happens to a frame.
type Action uint8

// The actions.
const (
	// Pass: as on any topic.
	Pass Action = iota
	// Hold: keep it, bounded in number, bytes and time (the session bounds it, and answers with an error that clients retry), until the standing changes; then judge it again.
	Hold
	// Drop: the other side still has it unacknowledged and sends it again once the handle has been closed.
	Drop
)

func (a Action) String() string { return [...]string{"pass", "hold", "drop"}[a] }

// Table says what happens to the frames of a topic.
type Table struct {
	Send    Action // SEND
	Receipt Action // SEND_RECEIPT and SEND_ERROR: always Pass
	Produce Action // PRODUCER
	// Open is SUBSCRIBE and the lookups of the topic (LOOKUP, PARTITIONED_METADATA and their like).
	Open    Action
	Message Action // MESSAGE
	Ack     Action // ACK
	// Other is every other command of a handle: FLOW, SEEK, REDELIVER, UNSUBSCRIBE, GET_LAST_MESSAGE_ID, ... CLOSE_* of the client
	// always passes. CLOSE_* of the old broker is swallowed while Message is Drop: the flip or the abort closes the handle.
	Other Action
}

// Admit is the table of protocol rule P6: what a proxy may do for a topic, with and without contact to the store.
//
// A SEND that must wait is dropped and not kept: the client holds it until its receipt, and keeping it would stop every other topic
// of the connection. So a proxy that loses its lease under a prepared topic poisons the producers that send, and closes them when
// it has a lease again. Not before: they would come back over the same connection, to wait for the same lease. Until then the send timeout of the client
// is the error that tells them.
func Admit(s Standing) Table {
	var t Table
	if s.Aged {
		t = Table{Send: Drop, Produce: Hold}
	}
	switch {
	case s.State == route.StateActive, s.State == route.StateDraining:
		return t // which cluster a subscription of a draining topic belongs to says route.Decision.Home
	case s.State == route.StatePrepared && s.Lease:
		return t
	case s.State == route.StatePrepared:
		return Table{Send: Drop, Produce: Hold, Open: Hold}
	}
	// Fenced. Without contact it stays so: a proxy's own clock never undoes a fence (P6, C1). A state that this version does not
	// know is treated alike, the safest of all.
	return Table{Send: Drop, Produce: Hold, Open: Hold, Message: Drop, Ack: Hold, Other: Hold}
}

// Gate is the switch's view of one handle: one producer or consumer of a client at a broker. The session keeps one in each handle,
// of any topic, for what was forwarded before a switch began counts as well.
type Gate struct {
	// Epoch of the entry when PRODUCER or SUBSCRIBE was admitted.
	Epoch uint64
	// Outstanding are the SENDs that were forwarded and have neither receipt nor error.
	Outstanding uint32
	// Poisoned: it dropped a SEND or a MESSAGE. It never forwards one again (P4): what was dropped must not be overtaken.
	Poisoned bool
	// Closing: the broker has our CLOSE and has not answered. The id must not be opened again before (P7): the broker would answer
	// for the old producer or consumer.
	Closing bool
	// Lost: the leg went with SENDs outstanding, which may reach the broker still. Nothing will resolve them but time (SettleTime)
	// or an eviction on the old cluster.
	Lost bool
}

// Send judges one SEND of the client and counts it when it passes.
func (g *Gate) Send(s Standing) Action {
	if g.refuses(s) || Admit(s).Send != Pass {
		g.Poisoned = true
		return Drop
	}
	g.Outstanding++
	return Pass
}

// Message judges one MESSAGE of the broker.
func (g *Gate) Message(s Standing) Action {
	if g.refuses(s) || Admit(s).Message != Pass {
		g.Poisoned = true
		return Drop
	}
	return Pass
}

// Ack judges one ACK of the client. A poisoned consumer may acknowledge what it got before. An ACK on a handle of another epoch, or one
// that is closing, is dropped: the message comes again.
func (g Gate) Ack(s Standing) Action {
	if g.Closing || g.Lost || g.Epoch != s.Epoch {
		return Drop
	}
	return Admit(s).Ack
}

// Follow notes that the entry has another epoch and that the handle stays where it is all the same: a consumer of a subscription that drains
// at the flip, or that never left the old cluster when the switch is taken back. What it has dropped still closes it (MustClose).
func (g *Gate) Follow(epoch uint64) { g.Epoch = epoch }

// Reopen judges a PRODUCER or SUBSCRIBE for the id of this handle.
func (g Gate) Reopen() Action {
	if g.Closing {
		return Hold
	}
	return Pass
}

// Receipt takes note of a SEND_RECEIPT or SEND_ERROR. It always passes to the client. What counts for a fence is that it arrived here:
// a client that stops reading must not block a switch.
func (g *Gate) Receipt() {
	if g.Outstanding > 0 {
		g.Outstanding--
	}
}

// MustClose tells that the handle is to be closed now: it is of another epoch, or it is poisoned and could be of use again
// (a client that came back to a fenced topic would only be parked).
func (g Gate) MustClose(s Standing) bool {
	if g.Closing || g.Lost {
		return false
	}
	return g.Epoch != s.Epoch || g.Poisoned && Admit(s).Produce == Pass
}

// Close notes that our CLOSE is on its way to the broker, behind all forwarded SENDs.
func (g *Gate) Close() { g.Closing = true }

// Closed notes the broker's answer to our CLOSE: everything that was forwarded before has been judged by the broker.
func (g *Gate) Closed() { g.Closing, g.Outstanding = false, 0 }

// BrokerClosed notes a CLOSE of the broker that was swallowed under the fence: an unload. The broker has judged what was forwarded, and
// forgets what comes after it.
func (g *Gate) BrokerClosed() { g.Poisoned, g.Outstanding = true, 0 }

// LegLost notes that the leg ended, or that it is given up without waiting for the answer to CLOSE. What was outstanding may be
// stored at any time until SettleTime has passed: the fenced ack of this proxy is not clean (P5).
func (g *Gate) LegLost() {
	g.Lost = g.Outstanding > 0
	g.Closing, g.Outstanding = false, 0
}

// Drained tells whether every forwarded SEND is answered, or never will be (then Lost is set and the ack is not clean).
func (g Gate) Drained() bool { return g.Outstanding == 0 }

func (g Gate) refuses(s Standing) bool {
	return g.Closing || g.Lost || g.Epoch != s.Epoch || g.Poisoned
}
