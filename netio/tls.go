package netio

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"time"
	"unsafe"

	"pointsman/core/session"
)

// TLS is a layer of a connection. The handshake runs on a goroutine of its own (handshake.go); afterwards the same tls.Conn is driven
// by the loop: reads decrypt what the loop has read from the socket, writes leave ciphertext in the loop's sealed buffer. Everything
// above (endpoints) sees plaintext, everything below (queues, watermarks, deadlines) ciphertext.

// The sizes of TLS: a record's header, the plaintext that fits in one, and room for any record (RFC 8446 allows 256 bytes of expansion, TLS 1.2 2 KiB).
const (
	recordHeader = 5
	recordText   = 16 << 10
	recordRoom   = mediumChunk
)

// gatherBelow is the length up to which views are copied together, to share a record.
const gatherBelow = 4 << 10

// sealedKeep is the size up to which a loop keeps its buffer of ciphertext.
const sealedKeep = 1 << 20

// tlsLayer is the TLS of one connection, and the net.Conn below its tls.Conn. Owned by the loop, during the handshake by that's goroutine.
type tlsLayer struct {
	loop  *loop
	conn  *tls.Conn
	shake *handshake    // nil once it is over
	raw   *bytes.Buffer // where conn keeps ciphertext; nil: it is not lent a buffer, and copies
	in    []byte        // ciphertext for Read, unless it is lent
	rest  []byte        // ciphertext of an incomplete record
	end   error         // how the stream ended, while the endpoint does not read
	fresh bool          // rest may hold whole records: what the handshake read too much
	cut   recordCutter
}

// tlsFields says where a tls.Conn keeps the buffers that are lent to it for the length of a turn, so that an idle connection has none (up
// to 18 KiB otherwise). They are unexported; when a Go release moves them, nothing is lent, at the cost of that memory and of a copy.
type tlsFields struct {
	raw, hand uintptr
	known     bool
}

func findTLSFields() tlsFields {
	conn, buffer := reflect.TypeFor[tls.Conn](), reflect.TypeFor[bytes.Buffer]()
	raw, ok1 := conn.FieldByName("rawInput")
	hand, ok2 := conn.FieldByName("hand")
	if !ok1 || !ok2 || raw.Type != buffer || hand.Type != buffer {
		return tlsFields{}
	}
	return tlsFields{raw: raw.Offset, hand: hand.Offset, known: true}
}

// noBytes is what Read says when the loop has no more: a temporary error, which a tls.Conn survives.
type noBytes struct{}

func (noBytes) Error() string   { return "netio: no bytes now" }
func (noBytes) Timeout() bool   { return true }
func (noBytes) Temporary() bool { return true }

var _ net.Error = noBytes{}

// Read hands ciphertext to the tls.Conn.
func (t *tlsLayer) Read(p []byte) (int, error) {
	if t.shake != nil {
		return t.shake.read(p, &t.cut)
	}
	if len(t.in) == 0 {
		return 0, noBytes{}
	}
	n := t.cut.copy(p, t.in)
	t.in = t.in[n:]
	return n, nil
}

// Write takes ciphertext from the tls.Conn. After the handshake it is left in the loop's sealed buffer and never fails.
func (t *tlsLayer) Write(p []byte) (int, error) {
	if t.shake != nil {
		return t.shake.write(p)
	}
	t.loop.sealed = append(t.loop.sealed, p...)
	return len(p), nil
}

// Close, the addresses and the deadlines are the loop's business.
func (t *tlsLayer) Close() error                     { return nil }
func (t *tlsLayer) LocalAddr() net.Addr              { return nil }
func (t *tlsLayer) RemoteAddr() net.Addr             { return nil }
func (t *tlsLayer) SetDeadline(time.Time) error      { return nil }
func (t *tlsLayer) SetReadDeadline(time.Time) error  { return nil }
func (t *tlsLayer) SetWriteDeadline(time.Time) error { return nil }

// recordCutter hands out ciphertext in pieces that end where a record's header or body ends: a tls.Conn that is given more buys
// a buffer for two records.
type recordCutter struct {
	head [recordHeader]byte
	have int // bytes of head
	left int // bytes of the body
}

func (r *recordCutter) copy(dst, src []byte) (n int) {
	if r.left > 0 {
		n = copy(dst, src[:min(len(src), r.left)])
		r.left -= n
		return n
	}
	n = copy(dst, src[:min(len(src), recordHeader-r.have)])
	r.have += copy(r.head[r.have:], dst[:n])
	if r.have == recordHeader {
		r.left = int(r.head[3])<<8 | int(r.head[4])
		r.have = 0
	}
	return n
}

// shaking tells that c's TLS handshake is not over.
func (c *conn) shaking() bool { return c.tls != nil && c.tls.shake != nil }

// begin takes the tls.Conn over from the handshake.
func (t *tlsLayer) begin(fields tlsFields) {
	t.shake = nil
	if !fields.known {
		return
	}
	p := unsafe.Pointer(t.conn)
	for _, b := range []*bytes.Buffer{(*bytes.Buffer)(unsafe.Add(p, fields.raw)), (*bytes.Buffer)(unsafe.Add(p, fields.hand))} {
		if b.Len() == 0 {
			*b = bytes.Buffer{}
		}
	}
	if raw := (*bytes.Buffer)(unsafe.Add(p, fields.raw)); raw.Len() == 0 {
		t.raw = raw
	}
}

// readTLS is read for a connection with TLS.
func (l *loop) readTLS(c *conn) int {
	t := c.tls
	if t.end != nil {
		l.endTLS(c)
		return 0
	}
	if l.raw == nil {
		l.raw = make([]byte, recordRoom+l.e.cfg.ReadBuffer)
	}
	kept, n, limit := len(t.rest), 0, l.readLimit()
	if t.fresh {
		t.fresh = false
	} else {
		var errno error
		if n, errno = readSocket(int(c.fd), l.raw[kept:kept+limit]); n <= 0 {
			if n == 0 && t.pending() {
				errno = errors.New("the connection ended inside a TLS record")
				n = -1
			}
			l.readEnd(c, n, errno)
			return 0
		}
		l.counters.reads.Add(1)
		l.counters.readBytes.Add(int64(n))
		if n < limit && !c.hangup && c.werr == nil {
			c.readable = false
		}
	}
	copy(l.raw, t.rest)
	rest := len(c.in)
	if rest > inlineRest {
		rest = 0
	}
	plain, err := l.decrypt(c, l.raw[:kept+n], l.buf[rest:])
	if err != nil {
		t.end, c.readable = err, true
	}
	if len(l.sealed) > 0 { // the answer to a KeyUpdate, or an alert
		c.answered = true
		l.pushSealed(c, nil)
		if c.dead {
			l.perform(nil)
			return n
		}
	}
	if plain > 0 {
		l.deliver(c, rest, plain)
	}
	if t.end != nil && !c.stopped() {
		l.endTLS(c)
	}
	return n
}

// pending tells that a record has begun and is not complete.
func (t *tlsLayer) pending() bool { return len(t.rest) > 0 || t.cut.have > 0 || t.cut.left > 0 }

// decrypt turns src, ciphertext with what was left of the last one in front, into plaintext in dst, which is large enough. An
// incomplete record at the end is kept. err is how the stream ends: io.EOF for an orderly end.
func (l *loop) decrypt(c *conn, src, dst []byte) (n int, err error) {
	t := c.tls
	l.sealed = l.sealed[:0]
	if t.raw != nil {
		*t.raw = *bytes.NewBuffer(src)
	} else {
		t.in = src
	}
	// A Read takes one record, for dst has room for all of src. One that finds none allocates: what can be known before is not asked.
	for err == nil && (t.raw == nil || wholeRecord(t.raw.Bytes())) {
		var k int
		k, err = t.conn.Read(dst[n:])
		n += k
	}
	if (err == noBytes{}) {
		err = nil
	}
	var begun []byte
	if t.raw != nil {
		if err == nil {
			begun = t.raw.Bytes()
		}
		l.keepRecord(t, begun)
		*t.raw = bytes.Buffer{}
	} else {
		l.keepRecord(t, nil)
	}
	return n, err
}

// wholeRecord tells that a Read would come to a record, or to an error.
func wholeRecord(b []byte) bool {
	if len(b) < recordHeader {
		return false
	}
	n := recordHeader + int(b[3])<<8 + int(b[4])
	return len(b) >= n || n > recordRoom
}

// keepRecord keeps the beginning of a record, which must not be in t.rest.
func (l *loop) keepRecord(t *tlsLayer, begun []byte) {
	if cap(t.rest) < len(begun) || len(begun) == 0 {
		l.pool.give(t.rest)
		t.rest = nil
		if len(begun) > 0 {
			t.rest = l.pool.take(len(begun))
		}
	}
	t.rest = append(t.rest[:0], begun...)
}

// endTLS ends a connection whose stream has ended inside TLS.
func (l *loop) endTLS(c *conn) {
	switch err := c.tls.end; {
	case !errors.Is(err, io.EOF):
		l.fail(c, session.NetReset, fmt.Errorf("TLS: %w", err))
	case c.werr != nil:
		l.fail(c, session.NetReset, c.werr)
	default:
		l.finish(c, session.NetEOF, io.EOF)
	}
	l.perform(nil)
}

// seal encrypts vecs, in order, into the loop's sealed buffer. Small ones that follow each other share a record.
func (l *loop) seal(c *conn, vecs [][]byte) error {
	t := c.tls
	if cap(l.sealed) > sealedKeep {
		l.sealed = nil
	}
	l.sealed = l.sealed[:0]
	together := l.together[:0]
	for _, b := range vecs {
		if len(vecs) > 1 && len(b) < gatherBelow {
			if len(together)+len(b) > recordText {
				if _, err := t.conn.Write(together); err != nil {
					return err
				}
				together = together[:0]
			}
			together = append(together, b...)
			continue
		}
		if len(together) > 0 {
			if _, err := t.conn.Write(together); err != nil {
				return err
			}
			together = together[:0]
		}
		if _, err := t.conn.Write(b); err != nil {
			return err
		}
	}
	l.together = together
	if len(together) > 0 {
		_, err := t.conn.Write(together)
		return err
	}
	return nil
}

// sayGoodbye sends TLS's own end, close_notify, or queues it.
func (l *loop) sayGoodbye(c *conn) {
	if c.tls == nil || c.werr != nil {
		return
	}
	l.sealed = l.sealed[:0]
	if c.tls.conn.CloseWrite() == nil && len(l.sealed) > 0 {
		l.pushSealed(c, nil)
	}
}

func (l *loop) pushSealed(c *conn, src *conn) {
	l.vecs = append(l.vecs[:0], l.sealed)
	l.push(c, src, l.vecs)
}

// dropTLS gives back what c's TLS holds. It returns whether the descriptor is the loop's to close.
func (l *loop) dropTLS(c *conn) bool {
	t := c.tls
	if t == nil {
		return true
	}
	l.pool.give(t.rest)
	t.rest = nil
	if t.shake == nil {
		return true
	}
	return l.abandon(c)
}
