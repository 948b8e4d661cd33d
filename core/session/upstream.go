package session

import (
	"fmt"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
)

// upstream is one pooled lookup connection to a broker: the Endpoint of that connection. Request ids are its own.
// Loop-owned.
type upstream struct {
	pool      *pool
	key       upstreamKey
	ident     *identity
	conn      Conn
	connected *pulsarpb.CommandConnected // nil until the handshake is over
	dead      bool
	pinged    bool
	paused    bool
	heard     time.Time
	used      time.Time // when it was asked last
	timer     timer
	waiting   []*question // for the handshake
	asked     map[uint64]*question
	lastReq   uint64
}

// upstreamIdle is how long a lookup connection stays open without a question.
const upstreamIdle = 2 * time.Minute

func (p *pool) upstream(now time.Time, c *cluster.Cluster, broker string, id *identity) *upstream {
	key := upstreamKey{brokerKey{c.Name(), broker}, id}
	if up := p.upstreams[key]; up != nil {
		return up
	}
	up := &upstream{pool: p, key: key, ident: id, heard: now, asked: make(map[uint64]*question)}
	id.refs++
	up.timer.owner = up
	p.upstreams[key] = up
	p.sh.counters.UpstreamConns.Add(1)
	p.sh.counters.cluster(key.cluster).UpstreamConns.Add(1)
	p.sh.dial(c, broker, up)
	p.sh.timers.set(&up.timer, now.Add(p.sh.cfg.HandshakeTimeout))
	return up
}

// ask sends q, now or after the handshake.
func (up *upstream) ask(now time.Time, q *question) {
	q.up = up
	up.used = now
	if up.connected == nil {
		up.waiting = append(up.waiting, q)
		return
	}
	up.lastReq++
	q.req = up.lastReq
	up.asked[q.req] = q
	sh := up.pool.sh
	if q.cmd != nil {
		setRequestID(q.cmd, q.req)
		sh.gather(up.conn, sh.encode(q.cmd))
		return
	}
	t, _ := q.kind.types()
	start := len(sh.scratch)
	sh.scratch = codec.AppendQuestion(sh.scratch, t, q.fields[:q.split], q.req, q.fields[q.split:])
	sh.gather(up.conn, sh.scratch[start:])
}

// forget takes q out; a late answer to it is ignored.
func (up *upstream) forget(q *question) {
	if up.asked[q.req] == q {
		delete(up.asked, q.req)
		return
	}
	for i, w := range up.waiting {
		if w == q {
			up.waiting = append(up.waiting[:i], up.waiting[i+1:]...)
			return
		}
	}
}

// Dialed sends CONNECT.
func (up *upstream) Dialed(now time.Time, c Conn) {
	if up.dead {
		up.pool.sh.ops = append(up.pool.sh.ops, Op{Kind: OpClose, Conn: c})
		return
	}
	up.conn, up.heard = c, now
	up.pool.sh.write(c, up.ident.connect, false)
}

// Data takes answers.
func (up *upstream) Data(now time.Time, src []byte) (pos int) {
	up.heard, up.pinged = now, false
	for answers := 0; pos < len(src) && !up.dead; answers++ {
		if answers == answersPerCall {
			up.pool.sh.ops = append(up.pool.sh.ops, Op{Kind: OpResume, Conn: up.conn})
			return pos
		}
		h, ok, err := codec.ParseHead(src[pos:], up.pool.sh.cfg.MaxControl)
		if err != nil {
			up.fail(now, fmt.Sprintf("sent what is no frame: %v", err))
			return len(src)
		}
		if !ok || len(src)-pos < h.Size {
			return pos
		}
		up.handle(now, src[pos:pos+h.Size], h)
		pos += h.Size
	}
	if up.dead {
		return len(src)
	}
	return pos
}

// answersPerCall bounds the answers that are handled at a time, as commandsPerCall does for commands.
const answersPerCall = 256

func (up *upstream) handle(now time.Time, frame []byte, h codec.Head) {
	switch h.Type {
	case codec.TypePing:
		up.pool.sh.write(up.conn, pongFrame, false)
		return
	case codec.TypePong:
		return
	}
	if up.connected != nil {
		r, plain := &up.pool.response, false
		if *r, plain = codec.ParseResponse(frame, h); plain {
			if q := up.asked[r.ID]; q != nil && q.handlePlain(now, r) {
				return
			}
		}
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		up.fail(now, err.Error())
		return
	}
	if up.connected == nil {
		up.handleHandshake(now, &cmd)
		return
	}
	id, ok := responseID(&cmd)
	if !ok {
		return // nothing that a lookup connection has to know
	}
	if id == codec.NoRequest {
		up.fail(now, "says: "+cmd.GetError().GetMessage())
		return
	}
	if q := up.asked[id]; q != nil {
		q.handleResponse(now, &cmd)
	}
}

func (up *upstream) handleHandshake(now time.Time, cmd *pulsarpb.BaseCommand) {
	switch {
	case cmd.Connected != nil:
		up.connected = cmd.Connected
		up.pool.noteAlive(up.key.cluster, up.key.broker)
		up.pool.sh.timers.set(&up.timer, now.Add(up.pool.sh.cfg.KeepAlive))
		waiting := up.waiting
		up.waiting = nil
		for _, q := range waiting {
			up.ask(now, q)
		}
	case cmd.Error != nil:
		code := codec.ServerError(cmd.Error.GetError())
		if code == codec.ErrorAuthentication || code == codec.ErrorAuthorization {
			up.denyAll(now, code, cmd.Error.GetMessage())
		}
		up.fail(now, "refused the connection: "+cmd.Error.GetMessage())
	default:
		up.fail(now, fmt.Sprintf("answered CONNECT with %s", codec.Type(cmd.GetType())))
	}
}

// denyAll ends all questions with what the broker said of the client's credentials: asking again would not help.
func (up *upstream) denyAll(now time.Time, code codec.ServerError, text string) {
	for _, q := range append([]*question(nil), up.waiting...) {
		up.pool.finish(now, q, Answer{failed: true, Refusal: notRefused, Code: code,
			Text: fmt.Sprintf("cluster %q: %s", up.key.cluster, text)})
	}
}

// Tail is never: lookup connections relay nothing.
func (up *upstream) Tail() (Conn, int) { return 0, 0 }

// Moved is never called, for Tail is never.
func (up *upstream) Moved(time.Time, int) {}

// ReadPaused notes that the loop stopped or resumed reading.
func (up *upstream) ReadPaused(now time.Time, paused bool) {
	up.paused, up.heard, up.pinged = paused, now, false
}

// Closed makes every question look for another broker.
func (up *upstream) Closed(now time.Time, reason NetReason, err error) {
	up.conn = 0
	if reason == NetShutdown {
		up.close()
		return
	}
	text := brokerCause(reason).Code()
	if err != nil {
		text += ": " + err.Error()
	}
	up.fail(now, text)
}

// fail ends the connection; its questions go on elsewhere.
func (up *upstream) fail(now time.Time, trouble string) {
	if up.dead {
		return
	}
	if up.connected == nil {
		up.pool.sh.counters.cluster(up.key.cluster).DialFailures.Add(1)
		up.pool.noteFailure(now, up.key.cluster, up.key.broker)
	}
	text := fmt.Sprintf("broker %s %s", up.key.broker, trouble)
	up.pool.sh.report(Report{Event: EventUpstream, Cluster: up.key.cluster, Broker: up.key.broker, Text: trouble})
	up.close()
	for _, q := range up.waiting {
		q.up = nil
		q.retry(now, text)
	}
	for _, q := range up.asked {
		q.up = nil
		q.retry(now, text)
	}
	up.waiting, up.asked = nil, nil
}

func (up *upstream) close() {
	up.dead = true
	p := up.pool
	p.sh.timers.stop(&up.timer)
	delete(p.upstreams, up.key)
	p.releaseIdentity(up.ident)
	p.sh.counters.UpstreamConns.Add(-1)
	p.sh.counters.cluster(up.key.cluster).UpstreamConns.Add(-1)
	if up.conn != 0 {
		p.sh.ops = append(p.sh.ops, Op{Kind: OpClose, Conn: up.conn})
		up.conn = 0
	}
}

// fire looks after silence and idleness.
func (up *upstream) fire(now time.Time) {
	cfg := up.pool.sh.cfg
	if up.connected == nil {
		up.fail(now, fmt.Sprintf("did not complete the handshake within %s", cfg.HandshakeTimeout))
		return
	}
	if len(up.asked) == 0 && now.Sub(up.used) >= upstreamIdle {
		up.close()
		return
	}
	next := now.Add(cfg.KeepAlive)
	if !up.paused {
		at, dead := cfg.keepAlive(now, up.heard, &up.pinged, func(frame []byte) { up.pool.sh.write(up.conn, frame, false) })
		if dead {
			up.fail(now, fmt.Sprintf("silent for %s although asked", now.Sub(up.heard).Round(time.Second)))
			return
		}
		next = at
	}
	up.pool.sh.timers.set(&up.timer, next)
}
