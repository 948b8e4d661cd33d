package switching

import (
	"time"

	"pointsman/core/route"
)

// Lease is until when a process may act on what it knows of topics in a switch (P2). Instants are readings of a clock that counts
// suspend (CLOCK_BOOTTIME); the zero Lease is none. The store's client keeps one per session.
type Lease struct {
	length time.Duration
	until  time.Duration
	synced bool
}

// NewLease is that of a new session with the negotiated timeout: none until a synced read.
func NewLease(sessionTimeout time.Duration) Lease { return Lease{length: sessionTimeout * 2 / 3} }

// Synced notes that the map was read behind a sync, which was sent at that instant, and has been handed to the proxies.
func (l *Lease) Synced(sent time.Duration) {
	l.synced = true
	l.until = max(l.until, sent+l.length)
}

// Answered notes the answer to a sync or write that was sent at that instant. Pings do not count: a follower answers those alone, while
// the leader lets the session expire.
func (l *Lease) Answered(sent time.Duration) {
	if l.synced {
		l.until = max(l.until, sent+l.length)
	}
}

// Left is how long the lease still lasts; 0 is none.
func (l Lease) Left(now time.Duration) time.Duration { return max(0, l.until-now) }

// Do is what a proxy owes.
type Do uint8

// What a proxy owes, in the order in which it comes.
const (
	// DoNothing: until something is learned.
	DoNothing Do = iota
	// DoPrepare, DoFence, DoRelease, DoFollow, DoEvict: tell every loop, then Told. The table that sessions ask must have the entry already.
	// DoRelease is the end of a fence, or of a drain, on the same cluster; DoFollow that other subscriptions drain now; DoEvict the arrival
	// of another epoch.
	DoPrepare
	DoFence
	DoRelease
	DoFollow
	DoEvict
	// DoSave: write the entry to the disk copy and fsync it, then Saved.
	DoSave
	// DoAck: write the ack of Duty.Phase to the store, then Acked. Writing it twice does no harm.
	DoAck
)

// Duty is the next thing that a proxy owes for its topic.
type Duty struct {
	Do    Do
	Entry route.Entry // as of which
	Phase State       // of DoAck
	Clean bool        // of DoAck in phase fenced
	Why   string      // of DoAck that is not clean
}

// Proxy is what one process knows and owes of one topic that moves. Its owner calls Next until DoNothing after each event, and
// reports what was done. It is a value: copy and compare it freely.
type Proxy struct {
	started time.Time
	entry   route.Entry // what the process goes by
	told    route.Entry // what the loops were told last
	saved   Key         // the attempt that the disk copy knows
	known   bool        // entry is of the store or of the disk, not the zero value
	synced  bool        // entry was read, or confirmed, within the present session of the store
	drained bool        // the loops have reported for the fence that they were told
	clean   bool
	evicted bool
	why     string
	acked   State // the phase that was acknowledged last for the attempt
}

// NewProxy starts with the entry of the disk copy; the zero entry when the copy does not have the topic. started is when the
// process started.
func NewProxy(started time.Time, disk route.Entry) Proxy {
	p := Proxy{started: started, entry: disk, told: disk, known: disk.Topic != ""}
	p.told.State = route.StateActive // the loops of a new process were told nothing
	if disk.State != route.StateActive {
		p.saved = KeyOf(disk)
	}
	return p
}

// Learn takes the entry from a watch or a synced read of the present session. A topic without an entry of its own has the
// one that rules give it: their cluster, their epoch, active. Older epochs are ignored: the map never goes back.
func (p *Proxy) Learn(e route.Entry) {
	if p.known && e.Epoch < p.entry.Epoch {
		return
	}
	if !p.known {
		p.told = e
		p.told.State = route.StateActive
	}
	if KeyOf(e) != KeyOf(p.entry) || e.State != p.entry.State {
		p.drained, p.clean, p.why, p.evicted = false, false, "", false
	}
	if KeyOf(e) != KeyOf(p.entry) {
		p.acked = ""
	}
	p.entry, p.known, p.synced = e, true, true
}

// SessionLost notes that the store's session is gone: nothing counts as read until the next Learn.
func (p *Proxy) SessionLost() {
	p.synced = false
}

// Standing is what the sessions go by. lease tells that the store's Lease is not over, aged that max_map_age has passed. Of a topic that is
// neither in the store nor on the disk nothing passes (P1).
func (p Proxy) Standing(lease, aged bool) Standing {
	s := Standing{State: p.entry.State, Epoch: p.entry.Epoch, Lease: lease && p.synced, Aged: aged}
	if !p.known {
		s.State = stateUnknown
	}
	return s
}

// stateUnknown is one that no version writes; Admit treats it as fenced.
const stateUnknown route.State = 255

// Entry is what the process goes by.
func (p Proxy) Entry() route.Entry { return p.entry }

// Next is what is owed now.
func (p Proxy) Next(now time.Time) Duty {
	duty := func(do Do) Duty { return Duty{Do: do, Entry: p.entry} }
	if p.entry != p.told {
		switch {
		case p.entry.State == route.StatePrepared:
			return duty(DoPrepare)
		case p.entry.State != route.StateActive && p.entry.State != route.StateDraining:
			return duty(DoFence)
		case p.entry.Epoch != p.told.Epoch, p.entry.State == route.StateDraining && p.told.State == route.StateActive:
			return duty(DoEvict) // also of a process that knows a topic only since it drains
		case p.entry.State == route.StateDraining && p.told.State == route.StateDraining:
			return duty(DoFollow)
		}
		return duty(DoRelease)
	}
	if !p.synced {
		return Duty{}
	}
	switch p.entry.State {
	case route.StatePrepared:
		if p.acked == StatePrepared {
			return Duty{}
		}
		// P3: an ack of what a crash would make forget lets the restarted process go on with the old map.
		if !p.onDisk() {
			return duty(DoSave)
		}
		return Duty{Do: DoAck, Entry: p.entry, Phase: StatePrepared}
	case route.StateFenced:
		if !p.onDisk() {
			return duty(DoSave) // it came between prepare and fence, or missed the first
		}
		if p.acked == StateFenced || !p.drained {
			return Duty{}
		}
		d := Duty{Do: DoAck, Entry: p.entry, Phase: StateFenced, Clean: p.clean, Why: p.why}
		if now.Before(p.started.Add(SettleTime)) {
			d.Clean, d.Why = false, "the process is too young to know what its predecessor had on the way"
		}
		return d
	case route.StateActive, route.StateDraining:
		if p.evicted && p.acked != StateEvicting && p.entry.SwitchID != "" {
			return Duty{Do: DoAck, Entry: p.entry, Phase: StateEvicting}
		}
	}
	return Duty{}
}

func (p Proxy) onDisk() bool { return p.saved == KeyOf(p.entry) }

// Told notes that the loops have the entry. For DoFence and DoEvict their reports follow: Drained, Evicted.
func (p *Proxy) Told(e route.Entry) { p.told = e }

// Saved notes that the disk copy, fsynced, has this entry.
func (p *Proxy) Saved(e route.Entry) {
	if e.State != route.StateActive {
		p.saved = KeyOf(e)
	} else {
		p.saved = Key{}
	}
}

// Drained notes that every SEND which any loop forwarded for the topic is answered, or never will be. clean tells that none of the
// latter, nor of those lost within SettleTime before, can still be stored; why names the first that can.
func (p *Proxy) Drained(key Key, clean bool, why string) {
	if p.entry.State == route.StateFenced && key == KeyOf(p.entry) {
		p.drained, p.clean, p.why = true, clean, why
	}
}

// Evicted notes that no handle is left that e leads elsewhere. Who drains may have changed meanwhile.
func (p *Proxy) Evicted(e route.Entry) {
	if e.Drain = p.entry.Drain; e == p.entry {
		p.evicted = true
	}
}

// Acked notes that the store has the ack.
func (p *Proxy) Acked(phase State, key Key) {
	if key == KeyOf(p.entry) {
		p.acked = phase
	}
}
