package session

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
)

// handleConnect takes the client's CONNECT: without a target it is answered at once, with one a leg is dialled.
func (s *Session) handleConnect(now time.Time, frame []byte, h codec.Head) {
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil || cmd.Connect == nil {
		s.close(now, CauseClientFrame, fmt.Sprintf("CONNECT cannot be parsed: %v", err))
		return
	}
	connect := cmd.Connect
	s.protocol = connect.GetProtocolVersion()
	switch {
	case s.protocol < codec.MinProtocolVersion:
		s.refuse(now, CauseClientVersion, codec.ErrorUnsupportedVersion,
			fmt.Sprintf("client %q speaks protocol version %d; a proxy needs at least %d", connect.GetClientVersion(), s.protocol, codec.MinProtocolVersion))
		return
	case connect.ProxyVersion != nil:
		s.refuse(now, CauseClientCredentials, codec.ErrorNotAllowed,
			fmt.Sprintf("CONNECT carries proxy_version %q: another proxy in front of this one is not supported", connect.GetProxyVersion()))
		return
	case connect.OriginalPrincipal != nil || connect.OriginalAuthData != nil || connect.OriginalAuthMethod != nil:
		s.refuse(now, CauseClientCredentials, codec.ErrorNotAllowed,
			"CONNECT carries original_principal or original_auth_data: a client may only speak for itself")
		return
	}
	s.ident = s.sh.pool.identityOf(connect)
	if connect.ProxyToBrokerUrl == nil {
		s.startLookups(now)
		return
	}
	s.startLeg(now, &cmd)
}

// startLookups answers CONNECT of a connection for lookups. No broker is asked: the client learns what every
// configured cluster supports.
func (s *Session) startLookups(now time.Time) {
	s.state = stateLookup
	caps := s.sh.cfg.Clusters().Capabilities()
	version := min(s.protocol, codec.ProtocolVersion)
	if v := int32(caps.ProtocolVersion); v > 0 {
		version = min(version, v)
	}
	s.sendCommand(command(codec.TypeConnected, &pulsarpb.BaseCommand{Connected: &pulsarpb.CommandConnected{
		ServerVersion:   &s.sh.cfg.ServerVersion,
		ProtocolVersion: &version,
		FeatureFlags: &pulsarpb.FeatureFlags{
			SupportsGetPartitionedMetadataWithoutAutoCreation: proto.Bool(caps.Features&cluster.FeatureGetPartitionedMetadataWithoutAutoCreation != 0),
			SupportsReplDedupByLidAndEid:                      proto.Bool(caps.Features&cluster.FeatureReplDedupByLidAndEid != 0),
			SupportsTopicWatchers:                             proto.Bool(false),
		},
	}}))
	s.sh.timers.set(&s.timer, now.Add(s.sh.cfg.KeepAlive))
}

// startLeg dials the broker that the client named.
func (s *Session) startLeg(now time.Time, cmd *pulsarpb.BaseCommand) {
	set := s.sh.cfg.Clusters()
	target, err := set.Resolve(cmd.Connect.GetProxyToBrokerUrl())
	if err != nil {
		s.refuse(now, CauseTargetRefused, codec.ErrorServiceNotReady, err.Error())
		return
	}
	c, ok := set.Get(target.Cluster)
	if !ok {
		panic("session: cluster.Set resolved a target to a cluster that it does not have: " + target.Cluster)
	}
	cmd.Connect.ProxyToBrokerUrl = nil
	s.state = stateConnecting
	s.leg = &leg{s: s, cluster: target.Cluster, broker: target.Broker, connect: codec.AppendCommand(nil, cmd)}
	s.sh.dial(c, target.Broker, s.leg)
	s.sh.timers.set(&s.timer, now.Add(s.sh.cfg.HandshakeTimeout))
}

// leg is one broker connection of a session: the Endpoint of that connection. Loop-owned.
type leg struct {
	s        *Session
	conn     Conn      // 0 while dialling and after the end
	extra    *extraLeg // nil for the one that the client asked for
	cluster  string
	broker   string // logical address
	ready    bool   // the broker has said CONNECTED
	dead     bool
	cut      bool // its broker gets nothing any more, not even what waits to be sent
	paused   bool // the loop does not read it now, for a full peer
	held     bool // we asked the loop not to read it: another leg has the client's side
	pinged   bool
	pingOwed bool   // the broker's PING waits for a sign of life of the client
	connect  []byte // CONNECT frame, until it was sent
	deferred []byte // own frames for the broker that wait for the end of the client's frame
	down     stream // leg → client
	asked    uint32 // PINGs of ours
	answered uint32 // of them
	marks    []mark // fences that wait for a PONG, in order
	heard    time.Time
}

// Dialed sends the client's CONNECT, without the target.
func (l *leg) Dialed(now time.Time, c Conn) {
	if l.dead {
		l.s.sh.ops = append(l.s.sh.ops, Op{Kind: OpClose, Conn: c})
		return
	}
	l.conn, l.heard = c, now
	l.s.sh.write(c, l.connect, false)
	l.connect = nil
}

// Data takes what the broker sent.
func (l *leg) Data(now time.Time, src []byte) int {
	if l.dead {
		return len(src)
	}
	l.heard, l.pinged = now, false
	l.s.sh.counters.BrokerBytes.Add(uint64(len(src)))
	switch {
	case l.ready:
		return l.relayDown(now, src)
	case l.extra != nil:
		return l.extraHandshake(now, src)
	}
	return l.handshake(now, src)
}

// handshake relays the broker's answers to CONNECT.
func (l *leg) handshake(now time.Time, src []byte) (pos int) {
	s := l.s
	for pos < len(src) {
		h, ok, err := codec.ParseHead(src[pos:], s.maxFrame)
		if err != nil {
			s.failConnect(now, CauseBrokerFrame, fmt.Sprintf("broker %s of cluster %s answered CONNECT with what is no frame: %v", l.broker, l.cluster, err))
			return len(src)
		}
		if !ok || len(src)-pos < h.Size {
			return pos
		}
		frame := src[pos : pos+h.Size]
		pos += h.Size
		switch h.Type {
		case codec.TypeConnected:
			s.handleConnected(now, frame, h)
			if s.state != stateBridged {
				return len(src)
			}
			return pos + l.relayDown(now, src[pos:])
		case codec.TypeAuthChallenge:
			s.sh.write(s.conn, frame, false)
		case codec.TypePing:
			l.send(pongFrame)
		case codec.TypePong:
		case codec.TypeError:
			s.sh.write(s.conn, frame, false)
			s.close(now, CauseBrokerError, brokerErrorText(frame, h))
			return len(src)
		default:
			s.failConnect(now, CauseBrokerFrame, fmt.Sprintf("broker %s of cluster %s answered CONNECT with %s", l.broker, l.cluster, h.Type))
			return len(src)
		}
	}
	return pos
}

func brokerErrorText(frame []byte, h codec.Head) string {
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("error %d: %s", cmd.GetError().GetError(), cmd.GetError().GetMessage())
}

// handleConnected begins to relay. The client is told what this broker supports, in the broker's own words.
func (s *Session) handleConnected(now time.Time, frame []byte, h codec.Head) {
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		s.failConnect(now, CauseBrokerFrame, err.Error())
		return
	}
	if n := cmd.GetConnected().GetMaxMessageSize(); n > 0 {
		s.maxFrame = int(n) + codec.FrameSlack
	}
	s.state = stateBridged
	s.leg.ready = true
	s.sh.counters.Bridged.Add(1)
	s.sh.counters.cluster(s.leg.cluster).Bridged.Add(1)
	s.sh.pool.noteAlive(s.leg.cluster, s.leg.broker)
	s.sh.write(s.conn, frame, false)
	s.heard = now
	s.sh.timers.set(&s.timer, now.Add(s.sh.cfg.KeepAlive))
}

// Tail tells the loop about the rest of a large MESSAGE.
func (l *leg) Tail() (Conn, int) {
	if l.dead || !l.down.busy() {
		return 0, 0
	}
	return l.s.conn, l.down.left
}

// Moved takes notice that the loop moved n bytes of the tail.
func (l *leg) Moved(now time.Time, n int) {
	if l.dead {
		return
	}
	l.heard, l.pinged = now, false
	l.s.sh.counters.BrokerBytes.Add(uint64(n))
	l.down.left -= n
	if l.down.left == 0 {
		l.s.flushDeferred()
		if l.s.aside != nil {
			l.s.aside.next(now)
		}
	}
}

// ReadPaused notes that the loop stopped or resumed reading.
func (l *leg) ReadPaused(now time.Time, paused bool) {
	l.paused = paused
	l.heard, l.pinged = now, false
	if a := l.s.aside; paused && a != nil && a.turn == l && !l.down.busy() {
		a.next(now) // it may be a while
	}
}

// Closed ends the session: a client without its broker has to look up again. An extra leg ends alone, if it can.
func (l *leg) Closed(now time.Time, reason NetReason, err error) {
	if l.dead {
		return
	}
	s := l.s
	l.conn = 0
	cause := brokerCause(reason)
	if l.extra != nil {
		text := cause.Code()
		if err != nil {
			text += ": " + err.Error()
		}
		l.fail(now, cause, text)
		return
	}
	text := fmt.Sprintf("broker %s of cluster %s", l.broker, l.cluster)
	if err != nil {
		text += ": " + err.Error()
	}
	if s.state != stateConnecting {
		l.fail(now, cause, text)
		return
	}
	s.sh.counters.cluster(l.cluster).DialFailures.Add(1)
	s.sh.pool.noteFailure(now, l.cluster, l.broker)
	s.failConnect(now, cause, text)
}

// send writes a frame of our own to the broker, at the next frame boundary.
func (l *leg) send(frame []byte) {
	if l.s.upLeg == l && l.s.up.busy() {
		l.deferred = append(l.deferred, frame...)
		return
	}
	l.s.sh.write(l.conn, frame, false)
}

func (l *leg) flushDeferred() {
	if len(l.deferred) > 0 {
		l.s.sh.write(l.conn, l.deferred, false)
		l.deferred = nil
	}
}

// close ends the leg; what the client sent before is still sent, unless it is cut.
func (l *leg) close() {
	l.dead = true
	if l.conn != 0 {
		l.s.sh.ops = append(l.s.sh.ops, Op{Kind: OpClose, Conn: l.conn, Flush: !l.cut})
		l.conn = 0
	}
}
