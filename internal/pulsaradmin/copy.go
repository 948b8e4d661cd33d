package pulsaradmin

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Copier copies what one cluster has behind a boundary to another one, for one partition, as a replicator would: entry for entry and in order, payload
// untouched, metadata kept, marked with where it comes from. It publishes alone: of two copiers at the same time one is refused, so that nothing is
// copied twice, and a client that publishes is never disturbed. A copier that takes the place of one that has died goes on behind what that
// one has stored. One goroutine uses it at a time.
type Copier struct {
	topic    string
	from, to *view
	// boundary is the last position on the first cluster that is not copied; behind is the last one on the second cluster that is no copy.
	boundary, behind Position
	begun            bool // this copier has published
	// at is the source of the last copy on the second cluster when all before it are known to be there, too; NoPosition when that must be found out.
	at Position
}

// NewCopier makes the copier of one partition (full name). Everything on cluster from behind boundary is copied; on cluster to nothing but copies may lie behind
// the position that behind says.
func NewCopier(topic string, from, to *Client, boundary, behind Position) *Copier {
	return &Copier{
		topic: topic, from: newView(&remote{Client: from, topic: topic}), to: newView(&remote{Client: to, topic: topic}),
		boundary: boundary, behind: behind, at: NoPosition,
	}
}

// Close ends what the copier has open.
func (c *Copier) Close() {
	c.from.side.Close()
	c.to.side.Close()
}

// ErrNoCopy is matched by an error that trying again does not mend: there is something that must not be copied, or was not copied by a copier.
var ErrNoCopy = errors.New("it cannot be copied")

const (
	// copyWindow bounds what is sent and not answered yet, in entries and in bytes.
	copyWindow      = 256
	copyWindowBytes = 4 << 20
	// copyAtOnce is how many entries are read before the reading begins anew: it has a deadline.
	copyAtOnce = 4_000
)

// Copy copies what is there when it is called, up to about limit entries, and tells how many it has copied.
func (c *Copier) Copy(ctx context.Context, limit int64) (copied int64, err error) {
	last, done, ok, err := c.pending(ctx)
	if err != nil || !ok {
		return 0, err
	}
	to := c.to.side.(*remote)
	if !c.begun && c.boundary.Before(done) {
		// Another one has begun. What it has sent may be on its way into the log yet: unloading ends that.
		if err := to.Evict(ctx, c.topic); err != nil {
			return 0, err
		}
	}
	w, err := to.open(ctx, c.topic)
	if err != nil {
		return 0, err
	}
	defer w.close()
	p, err := w.produceAlone(ctx, "pointsman-return")
	if err != nil {
		return 0, err
	}
	c.begun = true
	// Only now nobody else writes there.
	if done, err = c.done(ctx); err != nil {
		return 0, err
	}
	for done.Before(last.Position) && copied < limit {
		n, at, err := c.some(ctx, p, done, last.Position)
		copied += n
		if err != nil {
			c.at = NoPosition // whatever was stored behind the one that failed
			return copied, err
		}
		c.at, done = at, at
	}
	return copied, p.close(ctx)
}

// done is the last position on the first cluster up to which the second one has a copy of everything; the boundary without any.
func (c *Copier) done(ctx context.Context) (Position, error) {
	if err := c.to.load(ctx); err != nil {
		return NoPosition, err
	}
	e, any, err := c.to.last(ctx)
	switch {
	case err != nil:
		return NoPosition, err
	case !any || !c.behind.Before(e.Position):
		return c.boundary, nil
	case c.at != NoPosition && e.From == c.from.Cluster() && e.Source == c.at:
		return c.at, nil
	}
	return c.verify(ctx)
}

// verify holds all that the second cluster has behind its boundary against what it should have: a copy that was refused in the middle would be missing for ever.
func (c *Copier) verify(ctx context.Context) (Position, error) {
	var copies []Position // where they come from
	err := c.to.forward(ctx, c.to.in.Index(Position{c.behind.Ledger, c.behind.Entry + 1}), func(e Entry) (bool, error) {
		switch {
		case !e.deliverable():
			return false, nil
		case e.From != c.from.Cluster() || e.Source == NoPosition:
			return true, fmt.Errorf("%w: %s: somebody has published at %v of cluster %s, past the proxies (producer %q, sequence id %d)", ErrNoCopy, c.topic, e.Position, c.to.Cluster(), e.Producer, e.Sequence)
		}
		copies = append(copies, e.Source)
		return false, nil
	})
	done := c.boundary
	if err == nil {
		err = c.from.forward(ctx, c.from.in.Index(Position{c.boundary.Ledger, c.boundary.Entry + 1}), func(e Entry) (bool, error) {
			for len(copies) > 0 && copies[0].Before(e.Position) {
				copies = copies[1:] // a second copy
			}
			switch {
			case len(copies) == 0:
				return true, nil
			case !e.deliverable():
				return false, nil
			case copies[0] != e.Position:
				return true, fmt.Errorf("%w: %s: cluster %s has a copy of %v of cluster %s and none of %v before it", ErrNoCopy, c.topic, c.to.Cluster(), copies[0], c.from.Cluster(), e.Position)
			}
			done, copies = e.Position, copies[1:]
			return false, nil
		})
	}
	if err != nil {
		return NoPosition, err
	}
	c.at = done
	return done, nil
}

// some copies what lies behind after, up to last at most, and tells how far it came.
func (c *Copier) some(ctx context.Context, p *solo, after, last Position) (n int64, done Position, err error) {
	from := c.from.side.(*remote)
	r, err := from.open(ctx, c.topic)
	if err != nil {
		return 0, after, err
	}
	defer r.close()
	done = after
	err = r.scanBodies(ctx, Position{after.Ledger, after.Entry + 1}, func(e Entry, body []byte) (bool, error) {
		frame, err := c.copyOf(e, body)
		if err != nil {
			return true, err
		}
		if err := p.send(ctx, e, frame); err != nil {
			return true, err
		}
		n, done = n+1, e.Position
		return n == copyAtOnce || !e.Position.Before(last), nil
	})
	return n, done, errors.Join(err, p.settle(ctx))
}

// copyOf is what follows the command of the SEND that stores a copy.
func (c *Copier) copyOf(e Entry, body []byte) ([]byte, error) {
	if e.From != "" {
		return nil, fmt.Errorf("%w: %s: the message at %v of cluster %s was replicated there from cluster %s", ErrNoCopy, c.topic, e.Position, c.from.Cluster(), e.From)
	}
	frame, err := markedCopy(body, c.from.Cluster(), e.Position)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: the message at %v of cluster %s: %w", ErrNoCopy, c.topic, e.Position, c.from.Cluster(), err)
	}
	return frame, nil
}

// pending reads both logs: last is the last message of the first cluster, done what the second one has of it already. ok is false when that is all.
func (c *Copier) pending(ctx context.Context) (last Entry, done Position, ok bool, err error) {
	if err := c.from.load(ctx); err != nil {
		return last, done, false, err
	}
	last, any, err := c.from.last(ctx)
	if err != nil || !any || !c.boundary.Before(last.Position) {
		return last, done, false, err
	}
	done, err = c.done(ctx)
	return last, done, err == nil && done.Before(last.Position), err
}

// Missing is how many entries, markers included, the second cluster has no copy of, as of now.
func (c *Copier) Missing(ctx context.Context) (int64, error) {
	last, done, ok, err := c.pending(ctx)
	if err != nil || !ok {
		return 0, err
	}
	return c.from.in.Index(Position{last.Position.Ledger, last.Position.Entry + 1}) - c.from.in.Index(Position{done.Ledger, done.Entry + 1}), nil
}

// PassOver has the subscriptions of a topic pass over all that it has, if they have had everything up to boundary; who has something left of before stays where he is. It is for what was copied
// elsewhere, of a topic that nobody publishes to or consumes: still tells that this is so, and is asked when the end was read and before anything is moved. For whoever is frozen meanwhile comes late,
// and brings a subscription to where everybody had everything, never to a later end (C8).
func (c *Client) PassOver(ctx context.Context, topic string, boundary Position, still func() error) error {
	now, err := c.Snapshot(ctx, topic)
	if err == nil {
		err = still()
	}
	if err != nil {
		return err
	}
	to := &remote{Client: c, topic: topic}
	return each(len(now.Subs), Parallel, func(i int) error {
		s := now.Subs[i]
		if s.Backlog == 0 || s.Cursor.MarkDelete.Before(boundary) {
			return nil
		}
		err := to.Move(ctx, s.Name, now.Log.End())
		if err == nil && s.Replicated { // placing a cursor makes a broker forget it
			err = to.SetReplicated(ctx, s.Name)
		}
		if err != nil {
			return fmt.Errorf("%s: subscription %s: %w", topic, s.Name, err)
		}
		return nil
	})
}

// Numbers of fields of MessageMetadata.
const (
	fieldProperty       = 4
	fieldReplicatedFrom = 5
	fieldTxnLeast       = 22
	fieldTxnMost        = 23
)

var errTransaction = errors.New("it belongs to a transaction, and those do not span clusters")

// castagnoli is the checksum of the protocol.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// markedCopy makes, from what a MESSAGE carries behind its command, what a SEND of the same message carries: the payload is the same byte by byte, the
// metadata as well, but that it says where the message lies on the cluster that it comes from.
func markedCopy(body []byte, cluster string, at Position) ([]byte, error) {
	metadata, payload, err := splitBody(body)
	if err != nil {
		return nil, err
	}
	kept := make([]byte, 0, len(metadata)+len(cluster)+64)
	for rest := metadata; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return nil, errMessage
		}
		size := protowire.ConsumeFieldValue(num, typ, rest[n:])
		if size < 0 {
			return nil, errMessage
		}
		field := rest[:n+size]
		rest = rest[n+size:]
		switch num {
		case fieldTxnLeast, fieldTxnMost:
			return nil, errTransaction
		case fieldReplicatedFrom:
			continue
		case fieldProperty:
			text, _ := protowire.ConsumeBytes(field[n:])
			var pair pulsarpb.KeyValue
			if proto.Unmarshal(text, &pair) == nil && pair.GetKey() == sourceProperty {
				continue // an application that copies properties from one message to another
			}
		}
		kept = append(kept, field...)
	}
	property, err := proto.Marshal(&pulsarpb.KeyValue{Key: proto.String(sourceProperty), Value: proto.String(at.String())})
	if err != nil {
		return nil, err
	}
	kept = protowire.AppendTag(kept, fieldProperty, protowire.BytesType)
	kept = protowire.AppendBytes(kept, property)
	kept = protowire.AppendTag(kept, fieldReplicatedFrom, protowire.BytesType)
	kept = protowire.AppendString(kept, cluster)

	frame := make([]byte, 10, 10+len(kept)+len(payload))
	binary.BigEndian.PutUint16(frame, magicChecksum)
	binary.BigEndian.PutUint32(frame[6:], uint32(len(kept)))
	frame = append(append(frame, kept...), payload...)
	binary.BigEndian.PutUint32(frame[2:], crc32.Checksum(frame[6:], castagnoli))
	return frame, nil
}

// solo is a producer that has its topic alone.
type solo struct {
	w        *wire
	id       uint64
	sequence uint64 // of the next SEND
	waiting  int    // SENDs without a receipt
	bytes    int
}

// produceAlone opens a producer of exclusive access, of a name that nobody else has: its sequence ids begin at 0, and the broker's deduplication drops none.
func (w *wire) produceAlone(ctx context.Context, name string) (*solo, error) {
	p, err := w.produce(ctx, name, nil)
	var refused *Error
	if errors.As(err, &refused) && refused.Code == codec.ErrorIncompatibleSchema { // the cluster wants every producer to name one
		schema, schemaErr := w.c.lastSchema(ctx, w.topic)
		if schemaErr != nil {
			return nil, errors.Join(err, schemaErr)
		}
		return w.produce(ctx, name, schema)
	}
	return p, err
}

func (w *wire) produce(ctx context.Context, name string, schema *pulsarpb.Schema) (*solo, error) {
	defer w.within(ctx)()
	p := &solo{w: w, id: w.id()}
	request := w.id()
	what := "publish copies"
	if err := w.write(&pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeProducer)), Producer: &pulsarpb.CommandProducer{
		Topic: &w.topic, ProducerId: &p.id, RequestId: &request, ProducerName: proto.String(fmt.Sprintf("%s-%016x", name, rand.Uint64())), Encrypted: proto.Bool(true),
		Schema: schema, UserProvidedProducerName: proto.Bool(true), ProducerAccessMode: proto.Int32(accessExclusive),
	}}); err != nil {
		return nil, w.fail(what, err)
	}
	_, _, err := w.await(what, func(cmd *pulsarpb.BaseCommand, _ codec.Head) bool {
		return cmd.ProducerSuccess != nil && cmd.ProducerSuccess.GetRequestId() == request && cmd.ProducerSuccess.GetProducerReady()
	})
	return p, err
}

// accessExclusive is the number of the access mode.
const accessExclusive = 1

// send stores one entry. It does not wait for the receipt as long as few are outstanding.
func (p *solo) send(ctx context.Context, e Entry, body []byte) error {
	if p.waiting == copyWindow || p.waiting > 0 && p.bytes+len(body) > copyWindowBytes {
		if err := p.settle(ctx); err != nil {
			return err
		}
	}
	defer p.w.within(ctx)()
	cmd := &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeSend)), Send: &pulsarpb.CommandSend{ProducerId: &p.id, SequenceId: proto.Uint64(p.sequence)}}
	if e.Messages > 1 {
		cmd.Send.NumMessages = proto.Int32(int32(e.Messages))
	}
	head := codec.AppendCommand(nil, cmd)
	binary.BigEndian.PutUint32(head, uint32(len(head)-4+len(body)))
	if _, err := p.w.conn.Write(append(head, body...)); err != nil {
		return p.w.fail("publish copies", err)
	}
	p.sequence++
	p.waiting++
	p.bytes += len(body)
	return nil
}

// settle waits for all receipts.
func (p *solo) settle(ctx context.Context) error {
	defer p.w.within(ctx)()
	for ; p.waiting > 0; p.waiting-- {
		want := p.sequence - uint64(p.waiting)
		cmd, _, err := p.w.await("publish copies", func(cmd *pulsarpb.BaseCommand, _ codec.Head) bool {
			return cmd.SendReceipt != nil || cmd.SendError != nil || cmd.CloseProducer != nil
		})
		switch {
		case err != nil:
			return err
		case cmd.SendError != nil:
			return p.w.refused("publish copies", cmd.SendError.GetError(), cmd.SendError.GetMessage())
		case cmd.CloseProducer != nil:
			return p.w.fail("publish copies", errors.New("the broker closed the producer: the topic has moved to another broker, or is being unloaded"))
		case cmd.SendReceipt.GetSequenceId() != want:
			return p.w.fail("publish copies", fmt.Errorf("it sent the receipt of %d where that of %d was due", cmd.SendReceipt.GetSequenceId(), want))
		case cmd.SendReceipt.GetMessageId().GetLedgerId() > 1<<62:
			return p.w.fail("publish copies", fmt.Errorf("it took %d for a copy that it had already", want)) // deduplication answers −1:−1
		}
	}
	p.bytes = 0
	return nil
}

// close leaves the topic to others.
func (p *solo) close(ctx context.Context) error {
	defer p.w.within(ctx)()
	request := p.w.id()
	return p.w.request("publish copies", request, &pulsarpb.BaseCommand{Type: proto.Int32(int32(codec.TypeCloseProducer)), CloseProducer: &pulsarpb.CommandCloseProducer{
		ProducerId: &p.id, RequestId: &request,
	}})
}
