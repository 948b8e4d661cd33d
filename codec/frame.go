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
func ParseHead(src []byte, maxFrame int) (h Head, ok bool, err error) {
	if len(src) < prefixLen {
		return Head{}, false, checkStart(src, maxFrame)
	}
	total := binary.BigEndian.Uint32(src)
	cmdSize := binary.BigEndian.Uint32(src[4:])
	if uint64(total)+4 > uint64(maxFrame) || total < 4 || cmdSize > total-4 || cmdSize < 2 {
		return Head{}, false, headError(src, total, cmdSize, maxFrame)
	}
	h.Size, h.CmdEnd = int(total)+4, prefixLen+int(cmdSize)
	// Every implementation writes field 1, the type, first.
	if len(src) > prefixLen+1 && src[8] == 0x08 && src[9] < 0x80 {
		h.Type = Type(src[9])
		return h, true, nil
	}
	return parseType(src, h)
}

// parseType finds the type of a command that does not begin with a one-byte type.
func parseType(src []byte, h Head) (Head, bool, error) {
	cmd := src[prefixLen:min(len(src), h.CmdEnd)]
	whole := len(src) >= h.CmdEnd
	for len(cmd) > 0 {
		num, typ, n := protowire.ConsumeTag(cmd)
		if n < 0 {
			break
		}
		m := protowire.ConsumeFieldValue(num, typ, cmd[n:])
		if num == 1 && typ == protowire.VarintType {
			if v, k := protowire.ConsumeVarint(cmd[n:]); k > 0 {
				h.Type = Type(min(v, uint64(TypeUnknown)))
				return h, true, nil
			}
		}
		if m < 0 {
			break
		}
		cmd = cmd[n+m:]
	}
	if !whole {
		return Head{}, false, nil
	}
	return Head{}, false, fmt.Errorf("%w: no command type", ErrCommand)
}

// checkStart refuses early what can never become a frame, so that a peer of another protocol is told at once.
func checkStart(src []byte, maxFrame int) error {
	if len(src) < 4 {
		return nil
	}
	if total := binary.BigEndian.Uint32(src); uint64(total)+4 > uint64(maxFrame) {
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
// others (see docs of each command). found is false when there is no such field. ok is false when more bytes are needed.
func ParseID(src []byte, h Head) (id uint64, found, ok bool, err error) {
	cmd := src[prefixLen:min(len(src), h.CmdEnd)]
	whole := len(src) >= h.CmdEnd
	for i := 0; i < len(cmd); {
		num, typ, n := protowire.ConsumeTag(cmd[i:])
		if n < 0 {
			break
		}
		i += n
		if Type(num) == h.Type && typ == protowire.BytesType {
			_, n = protowire.ConsumeVarint(cmd[i:])
			if n < 0 {
				break
			}
			sub := cmd[i+n:]
			if len(sub) > 0 && sub[0] == 0x08 {
				if id, n = protowire.ConsumeVarint(sub[1:]); n > 0 {
					return id, true, true, nil
				}
				break
			}
			if !whole && len(sub) == 0 {
				return 0, false, false, nil
			}
			return parseIDSlow(sub, whole)
		}
		n = protowire.ConsumeFieldValue(num, typ, cmd[i:])
		if n < 0 {
			break
		}
		i += n
	}
	if !whole {
		return 0, false, false, nil
	}
	return 0, false, true, nil
}

// parseIDSlow looks for field 1 in a sub-message that does not begin with it.
func parseIDSlow(sub []byte, whole bool) (id uint64, found, ok bool, err error) {
	if !whole {
		return 0, false, false, nil
	}
	for len(sub) > 0 {
		num, typ, n := protowire.ConsumeTag(sub)
		if n < 0 {
			return 0, false, true, ErrCommand
		}
		if num == 1 && typ == protowire.VarintType {
			v, k := protowire.ConsumeVarint(sub[n:])
			return v, k > 0, true, nil
		}
		m := protowire.ConsumeFieldValue(num, typ, sub[n:])
		if m < 0 {
			return 0, false, true, nil
		}
		sub = sub[n+m:]
	}
	return 0, false, true, nil
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
		panic("codec: a command that cannot be marshalled: " + err.Error()) // invalid UTF-8 never gets here: proto2
	}
	n := len(dst) - start - prefixLen
	binary.BigEndian.PutUint32(dst[start:], uint32(n+4))
	binary.BigEndian.PutUint32(dst[start+4:], uint32(n))
	return dst
}
