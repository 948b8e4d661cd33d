package zk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/store"
)

const (
	// maxInFlight bounds the requests of one client that wait for an answer.
	maxInFlight = 64
	// watchesGrace is how long operations wait after a reconnect for the library to set its watches again, when it
	// does not say so.
	watchesGrace = 300 * time.Millisecond
	// closeTimeout bounds the wait for the library when a client is closed, beyond the second that it takes to say so.
	closeTimeout = 5 * time.Second
	// maxReply is the largest answer that is taken from a server: a list of 32,000 children is 2 MB.
	maxReply = 16 << 20
)

// client is one connection to one ensemble over any number of reconnects and sessions.
//
// The library reports every event by a callback on its receiving goroutine, which must not wait: the callback only
// marks and signals. Operations are let through by a gate, which is shut between a loss and the moment at which the
// library has sent its watches again (wire says why).
type client struct {
	ensemble Ensemble
	auth     *Auth
	log      *slog.Logger
	conn     *zk.Conn
	dialer   *dialer
	ctx      context.Context
	cancel   context.CancelFunc
	slots    chan struct{}
	wake     chan struct{} // capacity 1: the session changed
	finished sync.WaitGroup
	contact  atomic.Int64 // Unix nanoseconds of the last bytes from a server
	lease    *lease
	traffic  traffic

	mu         sync.Mutex // guards what follows
	closing    bool
	up         bool // the library has a session
	open       chan struct{}
	isOpen     bool
	connection uint64 // counts established connections
	session    int64
	sessions   uint64 // counts sessions
	watching   chan struct{}
	authAdded  bool
	watches    map[watchKey]watchState
	listeners  map[*listener]struct{}
	granted    time.Duration
	downSince  time.Time
	lastError  error
	lastWarned time.Time
}

// traffic is what the connections of a client have carried since it was made: what a proxy costs an ensemble.
type traffic struct {
	requests, sent, received atomic.Int64 // messages, bytes, bytes
	ops                      [len(operations)]atomic.Uint64
}

// operations are the kinds of requests that are counted, by the codes of the protocol; the last one is all others.
var operations = [...]struct {
	name string
	code int32
}{{"create", 1}, {"delete", 2}, {"exists", 3}, {"get", 4}, {"set", 5}, {"sync", 9}, {"ping", 11}, {"children", 12}, {"multi", 14}, {"other", 0}}

// count notes a request.
func (t *traffic) count(code int32) {
	for i, op := range operations {
		if op.code == code || i == len(operations)-1 {
			t.ops[i].Add(1)
			return
		}
	}
}

// Operations is how many requests of each kind this store has sent to its ensemble.
func (s *Store) Operations() map[string]uint64 {
	counts := make(map[string]uint64, len(operations))
	for i, op := range operations {
		counts[op.name] = s.client.traffic.ops[i].Load()
	}
	return counts
}

// listener is told of events; its functions must not wait.
type listener struct {
	// event: the node's data, existence or children changed, and the watch on it is gone.
	event func(path string)
	// connected: operations go through again. Anything may have changed.
	connected func()
}

type watchKey struct {
	path     string
	children bool
}

// watchState is of one session. A watch is armed when the library surely holds it, so that reading again needs no new
// one: the library keeps a channel for each call until the event comes.
type watchState struct {
	armed bool
	fired uint64
}

func newClient(e Ensemble, timeout time.Duration, auth *Auth, log *slog.Logger, resolve func(context.Context, string) ([]string, error)) (*client, error) {
	ctx, cancel := context.WithCancel(context.Background())
	c := &client{
		ensemble:  e,
		auth:      auth,
		log:       log.With("zookeeper", e.String()),
		ctx:       ctx,
		cancel:    cancel,
		slots:     make(chan struct{}, maxInFlight),
		wake:      make(chan struct{}, 1),
		open:      make(chan struct{}),
		watching:  make(chan struct{}),
		watches:   map[watchKey]watchState{},
		listeners: map[*listener]struct{}{},
		downSince: time.Now(),
		lease:     newLease(timeout),
	}
	if resolve == nil {
		resolve = net.DefaultResolver.LookupHost
	}
	c.dialer = &dialer{
		ctx:     ctx,
		resolve: resolve,
		contact: func(at time.Time) { c.contact.Store(at.UnixNano()) },
		traffic: &c.traffic,
		granted: c.sessionGranted(timeout),
		watched: c.watchesSent,
		await:   c.awaitWatches,
		failed:  c.dialFailed,
	}
	// The library's goroutine may call back before Connect has returned; the callback waits for mu.
	c.mu.Lock()
	conn, events, err := zk.Connect(e.Servers, timeout,
		zk.WithDialer(c.dialer.dial),
		zk.WithHostProvider(&hosts{}),
		zk.WithEventCallback(c.onEvent),
		zk.WithLogger(libraryLog{c.log}),
		zk.WithLogInfo(false),
		zk.WithMaxBufferSize(maxReply),
	)
	c.conn = conn
	c.mu.Unlock()
	if err != nil {
		cancel()
		return nil, fmt.Errorf("ZooKeeper %s: %w", e, err)
	}
	c.finished.Add(2)
	go func() {
		defer c.finished.Done()
		// The callback has them all; the library closes the channel when its loop has ended.
		for range events {
		}
	}()
	go func() {
		defer c.finished.Done()
		c.run()
	}()
	return c, nil
}

// close ends the session, so that ephemeral nodes go at once, and waits for every goroutine of the library.
func (c *client) close() {
	c.mu.Lock()
	c.closing = true
	up := c.up
	c.mu.Unlock()
	if !up {
		// Nothing to end at the server, and a dial or a handshake to cut short.
		c.cancel()
		c.dialer.close()
	}
	c.conn.Close()
	c.cancel()
	c.dialer.close()
	c.finish()
}

// finish waits for the goroutines, but not for ever: a shutdown must not hang on the library.
func (c *client) finish() {
	done := make(chan struct{})
	go func() {
		c.finished.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(closeTimeout):
		c.log.Error("the ZooKeeper library does not end; going on without it", "after", closeTimeout)
	}
}

// onEvent is the library's callback: it runs on its receiving goroutine.
func (c *client) onEvent(ev zk.Event) {
	if ev.Type == zk.EventSession {
		switch ev.State {
		case zk.StateHasSession:
			c.established()
		case zk.StateExpired:
			c.lease.ended()
			c.lost()
		case zk.StateDisconnected:
			c.lost()
		}
		return
	}
	if ev.Type == zk.EventNotWatching {
		return // the session is gone: established forgets all watches
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range []watchKey{{ev.Path, false}, {ev.Path, true}} {
		if key.children == (ev.Type == zk.EventNodeChildrenChanged) || ev.Type == zk.EventNodeDeleted {
			if w, ok := c.watches[key]; ok {
				c.watches[key] = watchState{fired: w.fired + 1}
			}
		}
	}
	for l := range c.listeners {
		l.event(ev.Path)
	}
}

func (c *client) established() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up = true
	c.connection++
	c.watching = make(chan struct{})
	if id := c.conn.SessionID(); id != c.session {
		c.session = id
		c.sessions++
		clear(c.watches)
	}
	c.lease.connected(c.session, c.granted)
	if len(c.watches) == 0 {
		close(c.watching)
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// lost shuts the gate.
func (c *client) lost() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up = false
	c.shut()
}

// failed shuts the gate because an operation on that connection was not answered, and ends the connection: the library
// may not have noticed, and only a new connection opens the gate. While the client is being closed the connection is
// left alone: operations fail then, and the end of the session may not have been sent yet.
func (c *client) failed(connection uint64) {
	c.mu.Lock()
	shut := connection == c.connection && !c.closing && c.shut()
	c.mu.Unlock()
	if shut {
		c.dialer.close()
	}
}

// shut is called with mu held and tells whether the gate was open.
func (c *client) shut() bool {
	if !c.isOpen {
		return false
	}
	c.isOpen = false
	c.open = make(chan struct{})
	c.downSince = time.Now()
	if !c.closing {
		c.log.Warn("connection to ZooKeeper lost", "session", fmt.Sprintf("%#x", c.session))
	}
	return true
}

func (c *client) watchesSent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.watching:
	default:
		close(c.watching)
	}
}

// awaitWatches waits until the library has sent its watches on this connection. It may have fewer than are remembered
// here, and none at all, so it does not wait long.
func (c *client) awaitWatches() {
	c.mu.Lock()
	watching := c.watching
	c.mu.Unlock()
	select {
	case <-watching:
		return
	default:
	}
	select {
	case <-watching:
	case <-time.After(watchesGrace):
		c.watchesSent()
	case <-c.ctx.Done():
	}
}

func (c *client) sessionGranted(asked time.Duration) func(time.Duration) {
	return func(granted time.Duration) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if granted > 0 && granted != c.granted && granted != asked {
			c.log.Warn("ZooKeeper granted another session time-out than was asked for", "asked", asked, "granted", granted,
				"remedy", "ask for one between the server's minSessionTimeout and maxSessionTimeout")
		}
		if granted > 0 {
			c.granted = granted
		}
	}
}

func (c *client) dialFailed(server string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	c.lastError = fmt.Errorf("%s: %w", server, err)
	if now := time.Now(); now.Sub(c.lastWarned) >= 30*time.Second {
		c.lastWarned = now
		c.log.Warn("connecting to ZooKeeper failed, trying on", "server", server, "err", err)
	}
}

// run opens the gate after each new connection.
func (c *client) run() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.wake:
		}
		c.mu.Lock()
		connection, up, add := c.connection, c.up, c.auth != nil && !c.authAdded
		c.mu.Unlock()
		if !up {
			continue
		}
		if add {
			// On every later connection the library sends the credentials first, by itself.
			if err := c.conn.AddAuth(c.auth.Scheme, []byte(c.auth.Credentials)); err != nil {
				if c.ctx.Err() == nil {
					c.mu.Lock()
					c.lastError = fmt.Errorf("credentials of scheme %q: %w", c.auth.Scheme, err)
					c.mu.Unlock()
					c.log.Warn("ZooKeeper did not take the credentials", "scheme", c.auth.Scheme, "err", err)
				}
				continue // the connection is lost; the next one wakes this loop
			}
			c.mu.Lock()
			c.authAdded = true
			c.mu.Unlock()
		}
		c.awaitWatches()
		c.opened(connection)
	}
}

func (c *client) opened(connection uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.up || c.isOpen || connection != c.connection {
		return
	}
	c.isOpen = true
	close(c.open)
	c.lastError = nil
	c.lastWarned = time.Time{}
	c.log.Info("connected to ZooKeeper", "server", c.conn.Server(), "session", fmt.Sprintf("%#x", c.session),
		"session_timeout", c.granted, "away", time.Since(c.downSince).Round(time.Millisecond))
	for l := range c.listeners {
		l.connected()
	}
}

func (c *client) listen(l *listener) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listeners[l] = struct{}{}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, l)
	}
}

// sessionID is that of the newest session.
func (c *client) sessionID() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

// gate waits until operations may be sent and returns the number of the connection.
func (c *client) gate(ctx context.Context) (uint64, error) {
	for {
		c.mu.Lock()
		open, isOpen, connection := c.open, c.isOpen, c.connection
		c.mu.Unlock()
		if isOpen {
			return connection, nil
		}
		select {
		case <-open:
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-c.ctx.Done():
			return 0, store.ErrClosed
		}
	}
}

// errNotSent: the operation surely did not reach a server.
var errNotSent = errors.New("not sent")

// call performs one library call, which cannot be cancelled, and returns by the end of ctx. The library call may go on
// afterwards, until its connection ends.
func call[T any](ctx context.Context, c *client, op func(*zk.Conn) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	connection, err := c.gate(ctx)
	if err != nil {
		return none, fmt.Errorf("%w: %w", errNotSent, err)
	}
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return none, fmt.Errorf("%w: %w", errNotSent, ctx.Err())
	case <-c.ctx.Done():
		return none, fmt.Errorf("%w: %w", errNotSent, store.ErrClosed)
	}
	answer := make(chan result, 1)
	go func() {
		value, err := op(c.conn)
		<-c.slots
		answer <- result{value, err}
	}()
	select {
	case r := <-answer:
		if lostAnswer(r.err) {
			if c.ctx.Err() != nil {
				return none, store.ErrClosed
			}
			c.failed(connection)
		}
		return r.value, r.err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// read performs an operation that may be repeated, until it is answered or ctx ends.
func read[T any](ctx context.Context, c *client, what string, op func(*zk.Conn) (T, error)) (T, error) {
	for {
		v, err := call(ctx, c, op)
		if lostAnswer(err) && ctx.Err() == nil {
			continue
		}
		return v, c.describe(ctx, what, err)
	}
}

// describe turns what the library or a context said into an error for the operator.
func (c *client) describe(ctx context.Context, what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, store.ErrClosed):
		return fmt.Errorf("%s: %w", what, store.ErrClosed)
	case ctx.Err() != nil || lostAnswer(err) || errors.Is(err, errNotSent):
		return fmt.Errorf("%s: %w: ZooKeeper %s: %s", what, store.ErrUnavailable, c.ensemble, c.detail())
	case errors.Is(err, zk.ErrNoAuth):
		return fmt.Errorf("%s: ZooKeeper %s refuses it: check the credentials of the store and the ACL of the node: %w", what, c.ensemble, err)
	}
	return fmt.Errorf("%s: ZooKeeper %s: %w", what, c.ensemble, err)
}

// detail says in words how the connection is.
func (c *client) detail() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isOpen {
		return fmt.Sprintf("connected to %s, session %#x, session time-out %s", c.conn.Server(), c.session, c.granted)
	}
	text := fmt.Sprintf("not connected since %s", time.Since(c.downSince).Round(100*time.Millisecond))
	if c.lastError != nil {
		text += ": " + c.lastError.Error()
	}
	return text
}

func (c *client) status() (connected bool, contact time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.contact.Load(); at != 0 {
		contact = time.Unix(0, at)
	}
	return c.isOpen, contact
}

// lostAnswer tells whether err leaves open what the server did, or whether it heard of the request at all.
func lostAnswer(err error) bool {
	if err == nil || errors.Is(err, errNotSent) || errors.Is(err, store.ErrClosed) {
		return false
	}
	for _, lost := range []error{zk.ErrConnectionClosed, zk.ErrNoServer, zk.ErrSessionExpired, zk.ErrSessionMoved, zk.ErrClosing,
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed} {
		if errors.Is(err, lost) {
			return true
		}
	}
	var network net.Error
	return errors.As(err, &network) && !errors.Is(err, context.DeadlineExceeded) // context errors are net.Errors too
}

// libraryLog takes what the library prints. All of it is seen from here as well, and said once, so it is for debugging.
type libraryLog struct{ log *slog.Logger }

func (l libraryLog) Printf(format string, args ...any) {
	if l.log.Enabled(context.Background(), slog.LevelDebug) {
		l.log.Debug("library: " + strings.TrimSpace(fmt.Sprintf(format, args...)))
	}
}
