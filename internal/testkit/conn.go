package testkit

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Conn is one connection to a broker.
type Conn struct {
	broker *Broker
	id     uint64
	nc     net.Conn
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	deaf   bool // guarded by broker.mu

	mu       sync.Mutex // guards what follows
	room     *sync.Cond // outBytes fell
	out      net.Buffers
	outBytes int
	starved  bool // a consumer waits for room in the queue
	closing  bool // close when the queue is empty
	silent   bool // nothing is taken from the queue
	pong     chan struct{}
	wake     chan struct{} // of the writer; capacity 1, not guarded

	// Guarded by cluster.mu:
	connect   *pulsarpb.CommandConnect
	lookups   int
	everUsed  bool // had a producer or consumer
	producers map[uint64]*producer
	dismissed map[uint64]bool // producers that the broker closed: late messages of theirs are no offence
	consumers map[uint64]*consumer
}

const (
	// deliverBelow is how many queued bytes a connection may have for a message to be added.
	deliverBelow = 1 << 20
	// readBelow is how many queued bytes a connection may have for its next command to be read.
	readBelow = 4 << 20
	// readBuffer is the size of a connection's read buffer.
	readBuffer = 64 << 10
)

func newConn(b *Broker, nc net.Conn) *Conn {
	cl := b.cluster
	ctx, cancel := context.WithCancel(cl.ctx)
	cl.mu.Lock()
	defer cl.mu.Unlock()
	cl.nextConn++
	c := &Conn{
		broker: b, id: cl.nextConn, nc: nc, ctx: ctx, cancel: cancel, wake: make(chan struct{}, 1),
		producers: map[uint64]*producer{}, dismissed: map[uint64]bool{}, consumers: map[uint64]*consumer{},
	}
	c.room = sync.NewCond(&c.mu)
	return c
}

// ID is the connection's number, unique in its cluster.
func (c *Conn) ID() uint64 { return c.id }

// Broker is the broker that the connection belongs to.
func (c *Conn) Broker() *Broker { return c.broker }

// Send writes a command.
func (c *Conn) Send(cmd *pulsarpb.BaseCommand) { c.SendRaw(codec.AppendCommand(nil, cmd)) }

// SendRaw writes bytes as they are.
func (c *Conn) SendRaw(src ...[]byte) {
	c.mu.Lock()
	if !c.closing && c.ctx.Err() == nil {
		for _, b := range src {
			c.out = append(c.out, b)
			c.outBytes += len(b)
		}
	}
	c.mu.Unlock()
	c.wakeWriter()
}

// Close ends the connection after what was written before has been sent.
func (c *Conn) Close() {
	c.mu.Lock()
	c.closing = true
	c.mu.Unlock()
	c.wakeWriter()
}

// Reset ends the connection at once, with a TCP reset.
func (c *Conn) Reset() {
	nc := c.nc
	if t, ok := nc.(*tls.Conn); ok {
		nc = t.NetConn()
	}
	if tcp, ok := nc.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	nc.Close() // under any TLS, which would take its leave
	c.end()
}

// StopReading makes the connection read nothing more until the broker's Thaw; it still writes.
func (c *Conn) StopReading() { c.setDeaf(true) }

// ResumeReading undoes StopReading.
func (c *Conn) ResumeReading() { c.setDeaf(false) }

func (c *Conn) setDeaf(deaf bool) {
	c.broker.mu.Lock()
	c.deaf = deaf
	c.broker.mu.Unlock()
	c.broker.moved.Broadcast()
}

// Hush keeps what the connection is to write until Speak; it goes on reading.
func (c *Conn) Hush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.silent = true
}

// Speak undoes Hush.
func (c *Conn) Speak() {
	c.mu.Lock()
	c.silent = false
	c.mu.Unlock()
	c.wakeWriter()
}

// Wait waits for d, or until the connection ends.
func (c *Conn) Wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ctx.Done():
	}
}

func (c *Conn) wakeWriter() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// hasRoom tells whether a message may be queued; when not, the consumers are served again once there is.
func (c *Conn) hasRoom() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing || c.ctx.Err() != nil {
		return false
	}
	c.starved = c.outBytes >= deliverBelow
	return !c.starved
}

// end closes the connection and lets go of what it held. It may be called twice.
func (c *Conn) end() {
	c.mu.Lock() // or a waiter that has just looked misses the broadcast
	c.cancel()
	c.mu.Unlock()
	c.nc.Close()
	c.room.Broadcast()
	c.broker.forget(c)
	cl := c.broker.cluster
	cl.mu.Lock()
	defer cl.mu.Unlock()
	for _, p := range c.producers {
		p.remove()
	}
	for _, s := range c.consumers {
		s.remove()
	}
	cl.notify()
}

func (c *Conn) readLoop() {
	defer c.Close() // what was answered is still sent; the writer then ends the connection
	r := bufio.NewReaderSize(c.nc, readBuffer)
	maxFrame := c.broker.cluster.opts.MaxMessageSize + codec.FrameSlack
	for {
		c.broker.gate(c, true)
		c.waitForRoom()
		src, err := readFrame(r, maxFrame)
		if err != nil {
			return
		}
		h, ok, err := codec.ParseHead(src, maxFrame)
		if err != nil || !ok {
			return
		}
		cmd := new(pulsarpb.BaseCommand)
		if codec.Parse(cmd, src, h) != nil {
			return
		}
		c.broker.gate(c, true) // a fault that came while the frame was awaited
		if c.ctx.Err() != nil {
			return
		}
		c.broker.cluster.record(c, h.Type, cmd, len(src)-h.CmdEnd)
		if !c.asked(h.Type, cmd) && !c.handle(h.Type, cmd, src[h.CmdEnd:]) {
			return
		}
	}
}

// readFrame reads a whole frame into memory of its own.
func readFrame(r *bufio.Reader, maxFrame int) ([]byte, error) {
	size, err := r.Peek(4)
	if err != nil {
		return nil, err
	}
	total := binary.BigEndian.Uint32(size)
	if uint64(total)+4 > uint64(maxFrame) || total < 4 {
		return nil, fmt.Errorf("%w: %d bytes announced", codec.ErrFrameTooLarge, total)
	}
	src := make([]byte, int(total)+4)
	_, err = io.ReadFull(r, src)
	return src, err
}

func (c *Conn) waitForRoom() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.outBytes > readBelow && c.ctx.Err() == nil {
		c.room.Wait()
	}
}

// asked tells whether a hook took the command.
func (c *Conn) asked(t codec.Type, cmd *pulsarpb.BaseCommand) bool {
	for _, fn := range c.broker.hooksFor(t) {
		if fn(c, cmd) {
			return true
		}
	}
	return false
}

func (c *Conn) writeLoop() {
	defer c.end()
	var tick <-chan time.Time
	if d := c.broker.cluster.opts.PingInterval; d > 0 {
		ticker := time.NewTicker(d)
		defer ticker.Stop()
		tick = ticker.C
	}
	var pong <-chan struct{}
	var asked time.Time
	for {
		c.broker.gate(c, false)
		more, ok := c.flush()
		if !ok {
			return
		}
		if more {
			continue
		}
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return
		case <-tick:
			select {
			case <-pong:
			default:
				if pong != nil && time.Since(asked) < c.broker.cluster.opts.PongWait {
					continue
				}
				if pong != nil {
					return // the last PING was not answered
				}
			}
			pong, asked = c.ping(), time.Now()
		}
	}
}

// flush writes what is queued. more tells that there may be more by now; ok is false when the connection is over.
func (c *Conn) flush() (more, ok bool) {
	c.mu.Lock()
	if c.silent {
		c.mu.Unlock()
		return false, true
	}
	bufs := c.out
	c.out = nil
	closing := c.closing
	c.mu.Unlock()
	if len(bufs) == 0 {
		return false, !closing
	}
	n, err := bufs.WriteTo(c.nc)
	if err != nil {
		return false, false
	}
	c.mu.Lock()
	c.outBytes -= int(n)
	starved := c.starved && c.outBytes < deliverBelow
	c.mu.Unlock()
	c.room.Broadcast()
	if starved {
		cl := c.broker.cluster
		cl.mu.Lock()
		for _, s := range c.consumers {
			s.sub.dispatch()
		}
		cl.mu.Unlock()
	}
	return true, true
}

// ping sends a PING. The channel is closed when a PONG comes.
func (c *Conn) ping() <-chan struct{} {
	c.mu.Lock()
	if c.pong == nil {
		c.pong = make(chan struct{})
	}
	pong := c.pong
	c.mu.Unlock()
	c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePing), Ping: &pulsarpb.CommandPing{}})
	return pong
}

func (c *Conn) handlePong() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pong != nil {
		close(c.pong)
		c.pong = nil
	}
}

// afterProof PINGs the holder of a name or subscription, as a broker does before it refuses a newcomer, and calls then
// with cluster.mu held: when the holder proved alive, or after the end of its connection when it did not.
func (c *Conn) afterProof(holder *Conn, then func()) {
	cl := c.broker.cluster
	cl.wg.Go(func() {
		timer := time.NewTimer(cl.opts.LivenessTimeout)
		defer timer.Stop()
		select {
		case <-holder.ping():
		case <-holder.ctx.Done():
			holder.end() // idempotent, and waits for nothing: after it the holder's things are gone
		case <-timer.C:
			holder.Reset()
		}
		cl.mu.Lock()
		defer cl.mu.Unlock()
		if c.ctx.Err() == nil {
			then()
			cl.notify()
		}
	})
}
