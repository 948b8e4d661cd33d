package session

import (
	"fmt"
	"net/netip"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// state is how far a session has come.
type state uint8

const (
	stateInit       state = iota // waiting for CONNECT
	stateLookup                  // no target: requests are answered through the pool
	stateConnecting              // a leg is being dialled or shakes hands
	stateBridged                 // frames are relayed
	stateClosed
)

// Session is one client connection and its broker legs. It is the Endpoint of its client side. Loop-owned.
type Session struct {
	sh       *Shard
	id       uint64
	conn     Conn
	peer     netip.AddrPort
	state    state
	paused   bool // the loop does not read the client now, for a full peer
	held     bool // we asked the loop not to read the client (OpPause)
	pinged   bool // a PING of ours waits for a sign of life
	maxFrame int
	inflight int // requests in the pool, by cost
	heard    time.Time
	timer    timer

	protocol int32
	ident    *identity // credentials and version: key of the pooled lookup connections

	up       stream // client → leg
	upLeg    *leg   // where the current frame goes
	deferred []byte // own frames for the client that wait for the end of a leg's frame
	leg      *leg   // nil without a target
	aside    *aside // nil while there was never a leg beside it

	producers map[uint64]*handle
	consumers map[uint64]*handle
	lastP     *handle // the producer and the consumer of the last frame
	lastC     *handle
	pending   map[uint64]pendingRequest
	nextReq   uint64 // of requests of our own towards the broker
	awaiting  int    // handles that wait for receipts before their eviction
	evicted   int    // handles that were evicted and are remembered
	parked    map[*parked]struct{}
	until     time.Time // while something that was parked is judged again: when it gives up
}

// stream is one direction's place in the frame that is passing through.
type stream struct {
	left int  // bytes of the frame that have not passed yet
	drop bool // they are thrown away
}

// busy tells that the receiver is in the middle of a frame: nothing may be inserted.
func (st *stream) busy() bool { return st.left > 0 && !st.drop }

// ownRequestBase is where the proxy's own request ids towards a broker start: far above any client's counter.
const ownRequestBase = 1 << 62

func newSession(sh *Shard, now time.Time, c Conn, peer netip.AddrPort) *Session {
	s := &Session{sh: sh, id: sh.nextID(), conn: c, peer: peer, heard: now, maxFrame: sh.cfg.MaxFrame, nextReq: ownRequestBase}
	s.timer.owner = s
	sh.timers.set(&s.timer, now.Add(sh.cfg.ConnectTimeout))
	return s
}

// Dialed never happens: the client side is accepted.
func (s *Session) Dialed(time.Time, Conn) { panic("session: Dialed on an accepted connection") }

// Data takes what the client sent.
func (s *Session) Data(now time.Time, src []byte) int {
	s.heard, s.pinged = now, false
	s.sh.counters.ClientBytes.Add(uint64(len(src)))
	if s.state == stateBridged {
		if s.leg.pingOwed {
			s.leg.answerPing()
		}
		if s.aside != nil {
			s.aside.answerPings()
		}
		return s.relayUp(now, src)
	}
	return s.control(now, src)
}

// control takes whole commands of a client that is not bridged.
func (s *Session) control(now time.Time, src []byte) (pos int) {
	s.sh.pool.turn++
	for commands := 0; pos < len(src) && !s.held; commands++ {
		if commands == commandsPerCall {
			s.goOn()
			return pos
		}
		h, ok, err := codec.ParseHead(src[pos:], s.maxFrame)
		if err != nil {
			s.closeMalformed(now, err)
			return len(src)
		}
		if ok && h.Size > s.maxControl() {
			s.closeMalformed(now, tooLarge(h, s.maxControl()))
			return len(src)
		}
		if !ok || len(src)-pos < h.Size {
			return pos
		}
		s.sh.counters.ClientFrames.Add(1)
		s.handleControl(now, src[pos:pos+h.Size], h)
		if s.state == stateClosed {
			return len(src)
		}
		pos += h.Size
	}
	return pos
}

// commandsPerCall bounds the commands of one client that are handled at a time, a fraction of a millisecond; the others come after those of other connections.
const commandsPerCall = 128

// goOn has the loop hand over later what was not consumed.
func (s *Session) goOn() {
	s.sh.ops = append(s.sh.ops, Op{Kind: OpResume, Conn: s.conn})
}

// maxConnectFrame bounds CONNECT, which strangers may send: credentials are the largest part of it.
const maxConnectFrame = 64 << 10

// maxClientCommand bounds what a client may have decoded: a command of many empty fields becomes some thirty times as
// large in memory. The largest honest ones are acknowledgements of many messages and schemas.
const maxClientCommand = 1 << 20

// maxControl is the size of the largest command of the client that is held whole.
func (s *Session) maxControl() int {
	if s.state == stateInit {
		return maxConnectFrame
	}
	return min(s.sh.cfg.MaxControl, maxClientCommand)
}

func tooLarge(h codec.Head, limit int) error {
	return fmt.Errorf("%w: %s of %d bytes, limit for commands %d", codec.ErrFrameTooLarge, h.Type, h.Size, limit)
}

func (s *Session) handleControl(now time.Time, frame []byte, h codec.Head) {
	switch h.Type {
	case codec.TypePing:
		s.send(pongFrame)
		return
	case codec.TypePong:
		return
	}
	switch {
	case s.state == stateInit && h.Type == codec.TypeConnect:
		s.handleConnect(now, frame, h)
	case s.state == stateInit:
		s.close(now, CauseClientProtocol, fmt.Sprintf("%s before CONNECT", h.Type))
	case h.Type == codec.TypeConnect:
		s.close(now, CauseClientProtocol, "a second CONNECT")
	case s.state == stateConnecting && h.Type == codec.TypeAuthResponse:
		s.leg.send(frame)
	case s.state == stateConnecting:
		s.close(now, CauseClientProtocol, fmt.Sprintf("%s before CONNECTED", h.Type))
	default:
		s.handleRequest(now, frame, h)
	}
}

// Tail tells the loop about the rest of a large SEND.
func (s *Session) Tail() (Conn, int) {
	if s.state != stateBridged || !s.up.busy() {
		return 0, 0
	}
	return s.upLeg.conn, s.up.left
}

// Moved takes notice that the loop moved n bytes of the tail.
func (s *Session) Moved(now time.Time, n int) {
	s.heard, s.pinged = now, false
	s.sh.counters.ClientBytes.Add(uint64(n))
	s.up.left -= n
	if s.up.left == 0 {
		s.upLeg.flushDeferred()
	}
}

// ReadPaused notes that the loop stopped or resumed reading: silence does not count meanwhile.
func (s *Session) ReadPaused(now time.Time, paused bool) {
	s.paused = paused
	s.heard, s.pinged = now, false
}

// Closed ends the session after its client side is gone.
func (s *Session) Closed(now time.Time, reason NetReason, err error) {
	s.conn = 0
	text := ""
	if err != nil {
		text = err.Error()
	}
	s.close(now, clientCause(reason), text)
}

// send writes a frame of our own to the client, at the next frame boundary.
func (s *Session) send(frame []byte) {
	if s.talking() != nil {
		s.deferred = append(s.deferred, frame...)
		return
	}
	s.sh.write(s.conn, frame, false)
}

// sendCommand writes a command of our own to the client.
func (s *Session) sendCommand(cmd *pulsarpb.BaseCommand) { s.send(s.sh.encode(cmd)) }

func (s *Session) flushDeferred() {
	if len(s.deferred) > 0 {
		s.sh.write(s.conn, s.deferred, false)
		s.deferred = nil
	}
}

// hold stops reading the client until release.
func (s *Session) hold() {
	if !s.held {
		s.held = true
		s.sh.ops = append(s.sh.ops, Op{Kind: OpPause, Conn: s.conn})
	}
}

func (s *Session) release(now time.Time) {
	if s.held && s.state != stateClosed {
		s.held = false
		s.heard = now
		s.sh.ops = append(s.sh.ops, Op{Kind: OpResume, Conn: s.conn})
	}
}

// fire looks after everything of the session that waits for time.
func (s *Session) fire(now time.Time) {
	next := now.Add(s.sh.cfg.KeepAlive)
	switch s.state {
	case stateClosed:
		return
	case stateInit:
		s.close(now, CauseClientNoConnect, fmt.Sprintf("no CONNECT within %s", s.sh.cfg.ConnectTimeout))
		return
	case stateConnecting:
		s.failConnect(now, CauseBrokerHandshake, fmt.Sprintf("broker %s of cluster %s did not complete the handshake within %s",
			s.leg.broker, s.leg.cluster, s.sh.cfg.HandshakeTimeout))
		return
	}
	if !s.paused && !s.held {
		if at, dead := s.sh.cfg.keepAlive(now, s.heard, &s.pinged, s.send); dead {
			s.close(now, CauseClientSilent, fmt.Sprintf("silent for %s although asked", now.Sub(s.heard).Round(time.Second)))
			return
		} else if at.Before(next) {
			next = at
		}
	}
	if s.leg != nil {
		if at := s.leg.lookAfter(now); s.state == stateClosed {
			return
		} else if at.Before(next) {
			next = at
		}
	}
	if s.aside != nil {
		if at := s.lookAside(now); s.state == stateClosed {
			return
		} else if at.Before(next) {
			next = at
		}
	}
	if s.aside != nil && s.aside.readers > 0 {
		if at := s.lookAtReaders(now); !at.IsZero() && at.Before(next) {
			next = at
		}
	}
	if s.awaiting > 0 {
		if at := s.finishOverdue(now); !at.IsZero() && at.Before(next) {
			next = at
		}
	}
	if s.evicted > 0 {
		s.forgetEvicted(now)
	}
	s.sh.timers.set(&s.timer, next)
}

// keepAlive asks a peer that has been silent for the interval, and tells when it has been for two. at is when to look again.
func (c *Config) keepAlive(now, heard time.Time, pinged *bool, send func([]byte)) (at time.Time, dead bool) {
	interval := c.KeepAlive
	silent := now.Sub(heard)
	switch {
	case silent < interval:
		return heard.Add(interval), false
	case silent >= 2*interval && *pinged:
		return now, true
	case !*pinged:
		*pinged = true
		send(pingFrame)
	}
	return maxTime(heard.Add(2*interval), now.Add(interval/2)), false
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// pingFrame and pongFrame are whole frames: total size, command size, {type, empty sub-message}.
var (
	pingFrame = []byte{0, 0, 0, 9, 0, 0, 0, 5, 0x08, 18, 0x92, 0x01, 0}
	pongFrame = []byte{0, 0, 0, 9, 0, 0, 0, 5, 0x08, 19, 0x9a, 0x01, 0}
)
