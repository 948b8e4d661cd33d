// Package codec reads and writes the frames of the Pulsar binary protocol: bytes in, views out; values in, appended
// bytes out. core/session calls it for every frame. It must never copy a payload, keep a view, or allocate by what a
// peer claims.
//
// A frame is totalSize (4 bytes, big-endian, counts what follows it), commandSize (4 bytes), the command (protobuf), and
// for SEND and MESSAGE the checksummed rest, which this package never looks at.
package codec

import (
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// DefaultMaxFrame is the protocol's default message limit plus its slack for metadata, in bytes.
const DefaultMaxFrame = 5<<20 + FrameSlack

// FrameSlack is what a frame may be larger than the maximum message size.
const FrameSlack = 10 << 10

// prefixLen is the length of the two size fields in front of the command.
const prefixLen = 8

// minCommand is the size of the smallest command, a bare type; minTotal that of the smallest total size.
const (
	minCommand = 2
	minTotal   = 4 + minCommand
)

// Head is what the first bytes of a frame tell.
type Head struct {
	Size   int  // of the whole frame, in bytes, its length field included
	CmdEnd int  // offset in the frame at which the command ends; == Size when there is no payload
	Type   Type // of the command; may be one that this package has no name for
}

// Reasons for which a frame is malformed, to be matched with errors.Is.
var (
	ErrFrameTooLarge = errors.New("frame larger than the limit")
	ErrFrameShape    = errors.New("frame sizes contradict each other")
	ErrCommand       = errors.New("command cannot be parsed")
	ErrTLSHello      = errors.New("a TLS handshake on a plaintext port")
	ErrHTTP          = errors.New("an HTTP request on the binary protocol port")
)

// ParseHead classifies the frame that src begins with. ok is false when more bytes are needed, which is not an error;
// err is set when the bytes cannot be a frame of at most maxFrame bytes. It never allocates unless err is set.
//
// The type is the one that the other end will see: protobuf lets a later value replace an earlier one, and a peer could
// hide a PRODUCER behind the head of a SEND. Only the form that every implementation writes (the type, then one
// sub-message that fills the command) is believed by its first bytes; any other is read to the end of the command.
func ParseHead(src []byte, maxFrame int) (h Head, ok bool, err error) {
	if len(src) < prefixLen {
		return Head{}, false, checkStart(src, maxFrame)
	}
	total := binary.BigEndian.Uint32(src)
	cmdSize := binary.BigEndian.Uint32(src[4:])
	if uint64(total)+4 > uint64(maxFrame) || total < minTotal || cmdSize > total-4 || cmdSize < minCommand {
		return Head{}, false, headError(src, total, cmdSize, maxFrame)
	}
	h.Size, h.CmdEnd = int(total)+4, prefixLen+int(cmdSize)
	if len(src) > subStart && src[8] == 0x08 && src[9] < 0x10 && src[10] == src[9]<<3|2 {
		// Types below 16 have a tag of one byte: all of the hot ones.
		h.Type = Type(src[9])
		if n, k := consumeSize(src[subStart:]); k > 0 && subStart+k+n == h.CmdEnd {
			return h, true, nil
		}
	} else if len(src) > subStart+1 && src[8] == 0x08 && src[9] < 0x80 && src[10] == src[9]<<3|2|0x80 && src[11] == src[9]>>4 {
		// Those below 128 have one of two bytes: lookups and their like.
		h.Type = Type(src[9])
		if n, k := consumeSize(src[subStart+1:]); k > 0 && subStart+1+k+n == h.CmdEnd {
			return h, true, nil
		}
	}
	return parseType(src, h)
}

// subStart is where the length of the sub-message of a type below 16 lies.
const subStart = prefixLen + 3

// consumeSize reads the length of a sub-message and how many bytes it takes: 0 when it is cut or too long for a frame.
func consumeSize(src []byte) (size, n int) {
	for i := 0; i < min(len(src), 4); i++ {
		size |= int(src[i]&0x7f) << (7 * i)
		if src[i] < 0x80 {
			return size, i + 1
		}
	}
	return 0, 0
}

// parseType finds the type of a command whose first bytes do not settle it.
func parseType(src []byte, h Head) (Head, bool, error) {
	whole := len(src) >= h.CmdEnd
	cmd := src[prefixLen:min(len(src), h.CmdEnd)]
	found := false
	for rest := cmd; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return notWhole(whole)
		}
		switch {
		case num == 1 && typ == protowire.VarintType:
			v, k := protowire.ConsumeVarint(rest[n:])
			if k < 0 {
				return notWhole(whole)
			}
			// A peer that reads an int keeps the low 32 bits.
			h.Type, found = min(Type(uint32(v)), TypeUnknown), true
			n += k
		case found && typ == protowire.BytesType && Type(num) == h.Type:
			size, k := protowire.ConsumeVarint(rest[n:])
			at := prefixLen + len(cmd) - len(rest) + n + k
			if k > 0 && !whole && size == uint64(h.CmdEnd-at) {
				return h, true, nil // the sub-message fills the command: nothing can follow it
			}
			fallthrough
		default:
			k := protowire.ConsumeFieldValue(num, typ, rest[n:])
			if k < 0 {
				return notWhole(whole)
			}
			n += k
		}
		rest = rest[n:]
	}
	if !whole || !found {
		return notWhole(whole)
	}
	return h, true, nil
}

// notWhole is the outcome for bytes that end early: more are needed, unless the command is all there.
func notWhole(whole bool) (Head, bool, error) {
	if !whole {
		return Head{}, false, nil
	}
	return Head{}, false, fmt.Errorf("%w: its type cannot be told", ErrCommand)
}

// checkStart refuses early what can never become a frame, so that a peer of another protocol is told at once.
func checkStart(src []byte, maxFrame int) error {
	if len(src) < 4 {
		return nil
	}
	if total := binary.BigEndian.Uint32(src); uint64(total)+4 > uint64(maxFrame) || total < minTotal {
		return headError(src, total, 0, maxFrame)
	}
	return nil
}

func headError(src []byte, total, cmdSize uint32, maxFrame int) error {
	switch {
	case src[0] == 0x16 && src[1] == 0x03:
		return ErrTLSHello
	case looksLikeHTTP(src):
		return ErrHTTP
	case uint64(total)+4 > uint64(maxFrame):
		return fmt.Errorf("%w: %d bytes announced, limit %d", ErrFrameTooLarge, uint64(total)+4, maxFrame)
	default:
		return fmt.Errorf("%w: total size %d, command size %d", ErrFrameShape, total, cmdSize)
	}
}

func looksLikeHTTP(src []byte) bool {
	for _, method := range [...]string{"GET ", "POST", "PUT ", "HEAD", "DELE", "OPTI", "PATC", "CONN", "PRI "} {
		if string(src[:4]) == method {
			return true
		}
	}
	return false
}

// ParseID reads field 1 of the sub-message of the frame that src begins with, when that field is a varint: the producer
// or consumer id of SEND, SEND_RECEIPT, SEND_ERROR, MESSAGE, ACK, FLOW, REDELIVER and their like, the request id of most
// others (see docs of each command). found is false when there is no such field. ok is false when more bytes are needed:
// the whole command must be there, because a later field 1 replaces an earlier one at the other end.
func ParseID(src []byte, h Head) (id uint64, found, ok bool, err error) {
	if len(src) < h.CmdEnd {
		return 0, false, false, nil
	}
	if id, ok = plainID(src, h); ok {
		return id, true, true, nil
	}
	for cmd := src[prefixLen:h.CmdEnd]; len(cmd) > 0; {
		num, typ, n := consumeTag(cmd)
		if n < 0 {
			return 0, false, false, ErrCommand
		}
		cmd = cmd[n:]
		if Type(num) == h.Type && typ == protowire.BytesType {
			sub, k := protowire.ConsumeBytes(cmd)
			if k < 0 {
				return 0, false, false, ErrCommand
			}
			if v, has, good := lastID(sub); has {
				id, found = v, true
			} else if _, known := typeNames[h.Type]; !good && known {
				return 0, false, false, ErrCommand // of an unknown command only its frame is known to be one
			}
			cmd = cmd[k:]
			continue
		}
		if n = consumeValue(num, typ, cmd); n < 0 {
			return 0, false, false, ErrCommand
		}
		cmd = cmd[n:]
	}
	return id, found, true, nil
}

// plainID is ParseID for the form that hot commands have: one sub-message that fills the command and begins with the id, behind it
// only varints and short sub-messages of other fields. ok is false for every other form.
func plainID(src []byte, h Head) (id uint64, ok bool) {
	if h.CmdEnd <= subStart || src[8] != 0x08 || src[9] >= 0x10 || src[10] != src[9]<<3|2 {
		return 0, false
	}
	size, n := consumeSize(src[subStart:h.CmdEnd])
	i := subStart + n
	if n == 0 || i+size != h.CmdEnd || size < 2 || src[i] != 0x08 {
		return 0, false
	}
	sub := src[i+1 : h.CmdEnd]
	i = 0
	for shift := 0; ; shift += 7 {
		if i == len(sub) || shift > 56 {
			return 0, false
		}
		b := sub[i]
		i++
		id |= uint64(b&0x7f) << shift
		if b < 0x80 {
			break
		}
	}
	for i < len(sub) {
		tag := sub[i]
		i++
		if tag < 0x10 || tag >= 0x80 || i == len(sub) {
			return 0, false
		}
		switch tag & 7 {
		case 0:
			for end := i + 10; sub[i] >= 0x80; {
				if i++; i == len(sub) || i == end {
					return 0, false
				}
			}
			i++
		case 2:
			if sub[i] >= 0x80 {
				return 0, false
			}
			if i += 1 + int(sub[i]); i > len(sub) {
				return 0, false
			}
		default:
			return 0, false
		}
	}
	return id, true
}

// lastID is the value of the last field 1 of sub that is a varint.
func lastID(sub []byte) (id uint64, found, good bool) {
	for len(sub) > 0 {
		num, typ, n := consumeTag(sub)
		if n < 0 {
			return 0, false, false
		}
		sub = sub[n:]
		if num == 1 && typ == protowire.VarintType {
			if id, n = protowire.ConsumeVarint(sub); n < 0 {
				return 0, false, false
			}
			found = true
		} else if n = consumeValue(num, typ, sub); n < 0 {
			return 0, false, false
		}
		sub = sub[n:]
	}
	return id, found, true
}

// consumeTag is protowire.ConsumeTag with the one-byte case in line.
func consumeTag(src []byte) (protowire.Number, protowire.Type, int) {
	if b := src[0]; b >= 0x08 && b < 0x80 {
		return protowire.Number(b >> 3), protowire.Type(b & 7), 1
	}
	return protowire.ConsumeTag(src)
}

// consumeValue is protowire.ConsumeFieldValue with the one-byte varint in line.
func consumeValue(num protowire.Number, typ protowire.Type, src []byte) int {
	if typ == protowire.VarintType && len(src) > 0 && src[0] < 0x80 {
		return 1
	}
	return protowire.ConsumeFieldValue(num, typ, src)
}

// Parse decodes the command of the complete frame src. Strings and byte slices of dst are copies; src may be reused.
func Parse(dst *pulsarpb.BaseCommand, src []byte, h Head) error {
	if err := proto.Unmarshal(src[prefixLen:h.CmdEnd], dst); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrCommand, h.Type, err)
	}
	return nil
}

// AppendCommand appends a frame without payload that carries cmd. cmd.Type must agree with the sub-message that is set.
func AppendCommand(dst []byte, cmd *pulsarpb.BaseCommand) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, prefixLen)...)
	dst, err := proto.MarshalOptions{AllowPartial: true}.MarshalAppend(dst, cmd)
	if err != nil {
		panic("codec: a command that cannot be marshalled: " + err.Error()) // proto2 does not check UTF-8, so nothing can fail
	}
	n := len(dst) - start - prefixLen
	binary.BigEndian.PutUint32(dst[start:], uint32(n+4))
	binary.BigEndian.PutUint32(dst[start+4:], uint32(n))
	return dst
}
