package netio

import (
	"crypto/tls"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	errorx "github.com/panjf2000/gnet/v2/pkg/errors"
	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"

	"pointsman/core/session"
)

// loop is one event loop. All fields are owned by its goroutine except the inbox (guarded by mu), waking and the counters.
type loop struct {
	e      *Engine
	index  int
	poller *netpoll.Poller
	wait   func() error // poll: handles events until the loop ends
	waker  waker
	alarm  alarm
	shard  Shard

	now      time.Time // of this callback
	conns    []*conn   // by descriptor
	live     int       // connections, dials included
	seq      uint32    // last used number of a connection
	timers   timerHeap
	acceptAt time.Duration // loop 0: when accepting goes on after a fault; 0 = not waiting

	buf    []byte // what is read, behind the rest of before
	raw    []byte // what is read of TLS; nil before the first
	sealed []byte // what TLS writes
	// together is for small views that share a record.
	together []byte
	lanes    [2]lane // handshakes: of clients, of brokers
	// clientConfigs are the copies of Config.ClientTLS by server name.
	clientConfigs map[clientKey]*tls.Config
	pool          pool
	pipes         pipes
	follows       bool  // the bytes at hand are the head of a large frame, and more of it is there
	corked        *conn // what was written to it in this turn of its source waits for more, or for the end of the turn
	views         []view
	dirty         []*conn
	vecs          [][]byte
	iov           iovecs
	notices       []notice
	ready         []*conn // to be served again, without an event
	gathered      []*conn // with a queue to be flushed at the end of the turn
	direct        bool    // the loop looks for ready ones by itself

	stopping bool
	quit     bool

	waking atomic.Bool
	mu     sync.Mutex
	inbox  []func()
	closed bool
	ended  chan struct{} // closed when the loop has ended

	counters counters
}

// notice is a call to an endpoint that has to wait until the ops at hand are performed.
type notice struct {
	kind   noticeKind
	ep     session.Endpoint
	c      *conn
	reason session.NetReason
	err    error
}

type noticeKind uint8

const (
	noticeClosed noticeKind = iota
	noticeDialed
	noticePaused
	noticeResumed
)

func newLoop(e *Engine, index int) (*loop, error) {
	l := &loop{
		e: e, index: index, now: e.base, ended: make(chan struct{}),
		buf:           make([]byte, inlineRest+e.cfg.ReadBuffer+recordRoom),
		clientConfigs: make(map[clientKey]*tls.Config),
		pool:          pool{mem: &e.mem},
		pipes:         pipes{mem: &e.mem},
		waker:         noWaker(),
		alarm:         noAlarm(),
	}
	l.wait = l.poll
	var err error
	if l.poller, err = netpoll.OpenPoller(); err != nil {
		return nil, err
	}
	if l.waker, err = openWaker(); err != nil {
		l.release()
		return nil, fmt.Errorf("open the wake-up descriptor: %w", err)
	}
	if l.alarm, err = openAlarm(); err != nil {
		l.release()
		return nil, fmt.Errorf("open the timer descriptor: %w", err)
	}
	for _, fd := range []int{l.waker.fd(), l.alarm.fd()} {
		if err := l.watch(fd, false); err != nil {
			l.release()
			return nil, err
		}
	}
	return l, nil
}

// watch registers fd once and for good, edge-triggered: a paused connection is one that is not read, and the interest in writing costs
// nothing while the socket has room.
func (l *loop) watch(fd int, write bool) error {
	if write {
		return l.poller.AddReadWrite(&netpoll.PollAttachment{FD: fd}, true)
	}
	return l.poller.AddRead(&netpoll.PollAttachment{FD: fd}, true)
}

func (l *loop) run() {
	defer close(l.ended)
	l.now = time.Now()
	l.rearm()
	err := l.wait()
	if !l.quit {
		l.e.fault(fmt.Errorf("netio: event loop %d ends, all its connections are closed: %w", l.index, err))
		l.now = time.Now()
		l.stop()
		l.cut()
	}
	for l.drainInbox(true) { // what was posted too late still runs, and finds the loop stopping
	}
}

// event is the poller's callback, for whom each event is a turn.
func (l *loop) event(fd int, ev netpoll.IOEvent, flags netpoll.IOFlags) error {
	if err := l.handle(fd, ev, flags); err != nil {
		return err
	}
	return l.endTurn()
}

// handle handles one of the events of a turn. What it says about fd is only a hint: within one turn fd may have been closed and
// given to another connection.
func (l *loop) handle(fd int, ev netpoll.IOEvent, flags netpoll.IOFlags) error {
	l.now = time.Now()
	start := l.now
	l.counters.wakeups.Add(1)
	if fd < len(l.conns) && l.conns[fd] != nil {
		l.connEvent(l.conns[fd], ev, flags)
	} else if fd == l.alarm.fd() {
		l.fire()
	} else if fd == l.waker.fd() {
		l.serve()
	} else if l.index == 0 {
		l.e.acceptor.ready(l, fd)
	}
	l.rearm()
	l.counters.busy.Add(int64(time.Since(start)))
	if l.quit {
		return errorx.ErrEngineShutdown
	}
	return nil
}

// endTurn sends what gathered during the events of a turn. It has to be called before the loop waits again.
func (l *loop) endTurn() error {
	if len(l.gathered) == 0 {
		l.counters.turn()
		return nil
	}
	start := time.Now()
	for len(l.gathered) > 0 {
		for i := 0; i < len(l.gathered); i++ {
			if c := l.gathered[i]; c.gathering && c.out != nil {
				l.flush(c)
			}
		}
		clear(l.gathered)
		l.gathered = l.gathered[:0]
		l.perform(nil)
		l.rearm()
	}
	l.counters.busy.Add(int64(time.Since(start)))
	l.counters.turn()
	if l.quit {
		return errorx.ErrEngineShutdown
	}
	return nil
}

// clock is now on the scale of deadlines.
func (l *loop) clock() time.Duration { return l.now.Sub(l.e.base) }

// fire does what is due.
func (l *loop) fire() {
	l.alarm.fired()
	now := l.clock()
	for c := l.timers.due(now); c != nil; c = l.timers.due(now) {
		l.expired(c)
		l.perform(nil)
	}
	if l.acceptAt != 0 && l.acceptAt <= now {
		l.acceptAt = 0
		l.e.acceptor.again(l)
	}
}

// rearm ticks the shard and sets the alarm when the earliest deadline is earlier than what it is set for. A deadline that moved to
// later lets it ring in vain once, which is cheaper than setting it each time.
func (l *loop) rearm() {
	var shardNext time.Time
	for ticks := 0; ; ticks++ {
		shardNext = l.shard.Tick(l.now)
		if !l.perform(nil) {
			break
		}
		// What was performed may have set an earlier deadline.
		if ticks == maxTicks {
			l.wake()
			break
		}
	}
	at := l.timers.next()
	if !shardNext.IsZero() {
		at = min(at, shardNext.Sub(l.e.base))
	}
	if l.acceptAt != 0 {
		at = min(at, l.acceptAt)
	}
	if at < l.alarm.at {
		if err := l.alarm.set(at, l.clock()); err != nil {
			l.e.fault(fmt.Errorf("netio: event loop %d: set its timer: %w", l.index, err))
		}
	}
}

// serve runs what was posted and goes on with connections that had more to do than their share of a turn.
func (l *loop) serve() {
	l.waker.woken()
	l.waking.Store(false)
	l.drainInbox(false)
	if l.index == 0 && l.acceptAt == 0 {
		l.e.acceptor.again(l)
	}
	if !l.direct {
		l.serveReady()
	}
}

// readyTime bounds how long those that are scheduled keep the loop from new events.
const readyTime = 500 * time.Microsecond

// serveReady gives each of those that were scheduled a turn, in order, or as many as readyTime allows; the others stay.
func (l *loop) serveReady() {
	start := l.now
	served := 0
	for n := len(l.ready); served < n && l.now.Sub(start) < readyTime; served++ {
		c := l.ready[served]
		c.scheduled = false
		if !c.dead {
			l.turn(c)
			l.now = time.Now()
		}
	}
	rest := copy(l.ready, l.ready[served:])
	clear(l.ready[rest:])
	l.ready = l.ready[:rest]
	if rest > 0 && !l.direct {
		l.wake()
	}
}

// goOn serves those that are scheduled between two looks at the poller.
func (l *loop) goOn() error {
	l.now = time.Now()
	start := l.now
	l.serveReady()
	l.rearm()
	l.counters.busy.Add(int64(time.Since(start)))
	if l.quit {
		return errorx.ErrEngineShutdown
	}
	return nil
}

// schedule has c served after the events that wait now.
func (l *loop) schedule(c *conn) {
	if c.scheduled || c.dead {
		return
	}
	c.scheduled = true
	l.ready = append(l.ready, c)
	if !l.direct {
		l.wake()
	}
}

// wake makes serve be called. The poller's own Trigger would not do: it empties its queue before it looks for events, so that a busy
// connection that schedules itself again would be the only one served.
func (l *loop) wake() {
	if l.waking.CompareAndSwap(false, true) {
		l.waker.wake()
	}
}

// post has fn run on the loop; false when it has ended.
func (l *loop) post(fn func()) bool {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return false
	}
	l.inbox = append(l.inbox, fn)
	l.wake() // under mu: once the inbox is closed nobody else touches the waker, and it may be released
	l.mu.Unlock()
	return true
}

// drainInbox runs what was posted. last: with nothing left the inbox is closed and the result is false.
func (l *loop) drainInbox(last bool) bool {
	l.mu.Lock()
	inbox := l.inbox
	l.inbox = nil
	if last && len(inbox) == 0 {
		l.closed = true
	}
	l.mu.Unlock()
	for _, fn := range inbox {
		fn()
	}
	return len(inbox) > 0
}

// stop tells every endpoint that the loop ends; what is queued may still be taken by its peers.
func (l *loop) stop() {
	l.stopping = true
	for _, c := range l.timers.dialing() {
		l.fail(c, session.NetShutdown, nil)
	}
	l.perform(nil)
	for _, c := range l.conns {
		if c != nil && !c.dead && !c.closing {
			l.finish(c, session.NetShutdown, nil)
			l.perform(nil)
		}
	}
	l.quit = l.quit || l.live == 0
}

// cut closes what stop left open.
func (l *loop) cut() {
	for _, c := range l.conns {
		if c != nil {
			l.drop(c)
		}
	}
	l.quit = true
}

// release closes the loop's own descriptors; it does not run any more.
func (l *loop) release() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.pipes.close()
	l.waker.close()
	l.alarm.close()
	if l.poller != nil {
		_ = l.poller.Close()
		l.poller = nil
	}
}

// attach makes a connection of an accepted descriptor and asks the shard for its endpoint. It is counted in clients already.
func (l *loop) attach(fd, listener int, secret *tls.Config, peer netip.AddrPort) {
	c := &conn{fd: int32(fd), accepted: true}
	if l.stopping {
		l.uncount()
		unix.Close(fd)
		return
	}
	l.enter(c)
	if err := l.watch(fd, true); err != nil {
		l.e.fault(fmt.Errorf("netio: connection from %s refused: %w", peer, err))
		l.drop(c)
		return
	}
	var local netip.AddrPort
	if sa, err := unix.Getsockname(fd); err == nil {
		local = addrPort(sa)
	}
	if secret != nil {
		l.secure(c, secret)
	}
	c.ep = l.shard.Accept(l.now, c.id, listener, peer, local)
	refused := c.ep == nil
	if refused {
		l.counters.refused.Add(1)
	} else {
		l.counters.accepted.Add(1)
	}
	l.perform(nil)
	if refused && !c.dead && !c.closing {
		l.close(c, true)
	}
}

func (l *loop) uncount() {
	l.e.clients.Add(-1)
	l.counters.clients.Add(-1)
}

// enter puts c, whose descriptor is open, into the table and names it.
func (l *loop) enter(c *conn) {
	fd := int(c.fd)
	if fd >= len(l.conns) {
		l.conns = append(l.conns, make([]*conn, fd+1-len(l.conns)+fd/4)...)
	}
	l.conns[fd] = c
	l.seq++
	if l.seq == 0 { // four billion connections later
		l.seq = 1
	}
	c.id = session.Conn(uint64(l.seq)<<32 | uint64(l.index)<<24 | uint64(fd))
	l.live++
	l.counters.conns.Add(1)
}

// conn finds an open connection by name; nil when it is gone.
func (l *loop) conn(id session.Conn) *conn {
	fd := int(id & maxFD)
	if fd >= len(l.conns) {
		return nil
	}
	if c := l.conns[fd]; c != nil && c.id == id {
		return c
	}
	return nil
}

// maxTicks bounds how often a shard is ticked again after one event; with more to do, other events come first.
const maxTicks = 4

// A Conn is number<<32 | loop<<24 | descriptor.
const (
	maxLoops = 1 << 8
	maxFD    = 1<<24 - 1
)
