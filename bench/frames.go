package bench

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// firstID is where sequence, entry and request ids start: from 2²⁸ to 2³⁵ every number is a canonical varint of idWidth bytes,
// so that a frame can be a template in which only these bytes change.
const (
	firstID = 1 << 28
	idWidth = 5
)

// maxHandles bounds the producers or consumers of one connection: their ids are varints of one byte.
const maxHandles = 127

// putID writes id, from firstID on, as a varint of idWidth bytes.
func putID(dst []byte, id uint64) {
	_ = dst[idWidth-1]
	for i := range idWidth - 1 {
		dst[i] = byte(id) | 0x80
		id >>= 7
	}
	dst[idWidth-1] = byte(id)
}

// template is a frame whose handle and id can be set in place.
type template struct {
	frame      []byte
	handle, id int // offsets
}

func (t *template) size() int { return len(t.frame) }

// sendTemplate is a SEND of one message of size bytes, checksummed. The id is the sequence id of the command; the one
// inside the checksummed metadata stays the same.
func sendTemplate(size int) *template {
	t := &template{}
	cmd := []byte{0x08, byte(codec.TypeSend), byte(codec.TypeSend)<<3 | 2, 0}
	cmd = append(cmd, 1<<3, 0)
	t.handle = len(cmd) - 1
	cmd = append(cmd, 2<<3)
	t.id = len(cmd)
	cmd = append(cmd, make([]byte, idWidth)...)
	cmd[3] = byte(len(cmd) - 4)
	return t.finish(cmd, size)
}

// messageTemplate is a MESSAGE of size bytes. The id is the entry id.
func messageTemplate(size int) *template {
	t := &template{}
	cmd := []byte{0x08, byte(codec.TypeMessage), byte(codec.TypeMessage)<<3 | 2, 0}
	cmd = append(cmd, 1<<3, 0)
	t.handle = len(cmd) - 1
	cmd = append(cmd, 2<<3|2, 2+1+idWidth, 1<<3, ledgerID, 2<<3)
	t.id = len(cmd)
	cmd = append(cmd, make([]byte, idWidth)...)
	cmd[3] = byte(len(cmd) - 4)
	return t.finish(cmd, size)
}

// ledgerID is the ledger of every message.
const ledgerID = 7

// finish puts the frame around the command and a payload of size bytes.
func (t *template) finish(cmd []byte, size int) *template {
	body := appendPayload(nil, size)
	t.frame = binary.BigEndian.AppendUint32(nil, uint32(4+len(cmd)+len(body)))
	t.frame = binary.BigEndian.AppendUint32(t.frame, uint32(len(cmd)))
	t.handle += len(t.frame)
	t.id += len(t.frame)
	t.frame = append(append(t.frame, cmd...), body...)
	putID(t.frame[t.id:], firstID)
	return t
}

// appendPayload is what follows the command of SEND and MESSAGE: magic, CRC32C, metadata, payload.
func appendPayload(dst []byte, size int) []byte {
	metadata, err := proto.Marshal(&pulsarpb.MessageMetadata{
		ProducerName: proto.String("pointsman-bench"), SequenceId: proto.Uint64(firstID), PublishTime: proto.Uint64(1_700_000_000_000),
	})
	if err != nil {
		panic("bench: metadata that cannot be marshalled: " + err.Error())
	}
	checked := binary.BigEndian.AppendUint32(nil, uint32(len(metadata)))
	checked = append(checked, metadata...)
	for i := range size {
		checked = append(checked, byte('a'+i%26))
	}
	dst = binary.BigEndian.AppendUint16(dst, 0x0e01)
	dst = binary.BigEndian.AppendUint32(dst, crc32.Checksum(checked, crc32.MakeTable(crc32.Castagnoli)))
	return append(dst, checked...)
}

// stream writes the same template again and again with growing ids, in batches, without copying what a full socket
// leaves over: it only remembers how far it came.
type stream struct {
	tmpl   *template
	handle byte
	next   uint64 // id of the frame that is being written
	off    int    // bytes of it that are written
}

// batch is the shared memory of streams of one template: as many frames as fit batchBytes, at least one.
type batch struct {
	tmpl *template
	buf  []byte
	size int // of a frame
}

// batchBytes is how much is written at once.
const batchBytes = 64 << 10

func newBatch(t *template) *batch {
	n := max(1, batchBytes/t.size())
	b := &batch{tmpl: t, size: t.size(), buf: make([]byte, 0, n*t.size())}
	for range n {
		b.buf = append(b.buf, t.frame...)
	}
	return b
}

// fill returns the bytes of the next frames of s, at most owed of them; valid until the next fill of b.
func (b *batch) fill(s *stream, owed int) []byte {
	n := min(owed, len(b.buf)/b.size)
	for i := range n {
		frame := b.buf[i*b.size:]
		frame[s.tmpl.handle] = s.handle
		putID(frame[s.tmpl.id:], s.next+uint64(i))
	}
	return b.buf[s.off : n*b.size]
}

// wrote takes note of n written bytes and returns how many frames are complete by them.
func (s *stream) wrote(n int) (frames int) {
	at := s.off + n
	frames, s.off = at/s.tmpl.size(), at%s.tmpl.size()
	s.next += uint64(frames)
	return frames
}

// subField reads a varint field of the sub-message of a command; false when there is none. It allocates nothing.
func subField(cmd []byte, t codec.Type, field protowire.Number) (uint64, bool) {
	sub, ok := subMessage(cmd, t)
	for ok && len(sub) > 0 {
		num, typ, n := protowire.ConsumeTag(sub)
		if n < 0 {
			break
		}
		sub = sub[n:]
		if num == field && typ == protowire.VarintType {
			v, k := protowire.ConsumeVarint(sub)
			return v, k > 0
		}
		if n = protowire.ConsumeFieldValue(num, typ, sub); n < 0 {
			break
		}
		sub = sub[n:]
	}
	return 0, false
}

// subMessage is the sub-message of the frame that cmd begins with.
func subMessage(cmd []byte, t codec.Type) ([]byte, bool) {
	const prefix = 8
	for rest := cmd[prefix:]; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return nil, false
		}
		rest = rest[n:]
		if codec.Type(num) == t && typ == protowire.BytesType {
			sub, k := protowire.ConsumeBytes(rest)
			return sub, k > 0
		}
		if n = protowire.ConsumeFieldValue(num, typ, rest); n < 0 {
			return nil, false
		}
		rest = rest[n:]
	}
	return nil, false
}

// appendFrame appends a frame whose command is type t with the sub-message sub.
func appendFrame(dst []byte, t codec.Type, sub []byte) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0)
	dst = protowire.AppendTag(dst, 1, protowire.VarintType)
	dst = protowire.AppendVarint(dst, uint64(t))
	dst = protowire.AppendTag(dst, protowire.Number(t), protowire.BytesType)
	dst = protowire.AppendBytes(dst, sub)
	n := len(dst) - start - 8
	binary.BigEndian.PutUint32(dst[start:], uint32(n+4))
	binary.BigEndian.PutUint32(dst[start+4:], uint32(n))
	return dst
}

func appendUint(dst []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(dst, field, protowire.VarintType), v)
}

// The schemes of broker addresses: of the first and the second field of a lookup's answer.
const (
	plainScheme  = "pulsar://"
	secureScheme = "pulsar+ssl://"
)

// brokerTarget is the broker that a lookup named, as clients put it into proxy_to_broker_url.
func brokerTarget(a *pulsarpb.CommandLookupTopicResponse) string {
	if url := a.GetBrokerServiceUrl(); url != "" {
		return strings.TrimPrefix(url, plainScheme)
	}
	return strings.TrimPrefix(a.GetBrokerServiceUrlTls(), secureScheme)
}

func appendText(dst []byte, field protowire.Number, v string) []byte {
	return protowire.AppendString(protowire.AppendTag(dst, field, protowire.BytesType), v)
}

// commandFrame is a frame for the commands that are sent once; cmd.Type is set from t.
func commandFrame(t codec.Type, cmd *pulsarpb.BaseCommand) []byte {
	cmd.Type = proto.Int32(int32(t))
	return codec.AppendCommand(nil, cmd)
}

func connectFrame(target string) []byte {
	c := &pulsarpb.CommandConnect{
		ClientVersion: proto.String("pointsman-bench"), ProtocolVersion: proto.Int32(codec.ProtocolVersion),
		FeatureFlags: &pulsarpb.FeatureFlags{SupportsBrokerEntryMetadata: proto.Bool(true), SupportsPartialProducer: proto.Bool(true)},
	}
	if target != "" {
		c.ProxyToBrokerUrl = &target
	}
	return commandFrame(codec.TypeConnect, &pulsarpb.BaseCommand{Connect: c})
}

func lookupFrame(topic string, request uint64) []byte {
	return commandFrame(codec.TypeLookup, &pulsarpb.BaseCommand{LookupTopic: &pulsarpb.CommandLookupTopic{Topic: &topic, RequestId: &request}})
}

func producerFrame(topic string, id, request uint64) []byte {
	return commandFrame(codec.TypeProducer, &pulsarpb.BaseCommand{Producer: &pulsarpb.CommandProducer{Topic: &topic, ProducerId: &id, RequestId: &request}})
}

// subscribeFrame asks for messages of size bytes: the fake broker takes the size from the subscription's name.
func subscribeFrame(topic string, id, request uint64, size int) []byte {
	return commandFrame(codec.TypeSubscribe, &pulsarpb.BaseCommand{Subscribe: &pulsarpb.CommandSubscribe{
		Topic: &topic, Subscription: proto.String(sizePrefix + strconv.Itoa(size)), SubType: proto.Int32(1), ConsumerId: &id, RequestId: &request,
	}})
}

// sizePrefix is how such names begin.
const sizePrefix = "size-"

// subscriptionOf is the subscription of a SUBSCRIBE, "" when it cannot be read.
func subscriptionOf(cmd []byte) string {
	var c pulsarpb.BaseCommand
	if proto.Unmarshal(cmd[8:], &c) != nil {
		return ""
	}
	return c.GetSubscribe().GetSubscription()
}

// flowFrame grants permits.
func flowFrame(dst []byte, consumer byte, permits int) []byte {
	var sub [16]byte
	return appendFrame(dst, codec.TypeFlow, appendUint(appendUint(sub[:0], 1, uint64(consumer)), 2, uint64(permits)))
}

// ackFrame acknowledges everything up to entry, as a client does once for a group of messages.
func ackFrame(dst []byte, consumer byte, entry uint64) []byte {
	var id, sub [32]byte
	msg := appendUint(appendUint(id[:0], 1, ledgerID), 2, entry)
	s := appendUint(appendUint(sub[:0], 1, uint64(consumer)), 2, 1)
	s = protowire.AppendBytes(protowire.AppendTag(s, 3, protowire.BytesType), msg)
	return appendFrame(dst, codec.TypeAck, s)
}

// benchTopic is the name of topic i; all names have the same length.
func benchTopic(i int) string { return fmt.Sprintf("persistent://bench/load/topic-%07d", i) }
