package codec

import (
	"encoding/binary"
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// This file rewrites the message ids inside a command and leaves every other byte of it as it is. Metadata and payload are not
// touched: the checksum does not cover the command.

const (
	// EpochShift is where the map's epoch sits in a ledger id that clients see.
	EpochShift = 44
	// MaxEpoch is the largest epoch that fits: with one more, Long.MAX_VALUE (the newest message) could be meant.
	MaxEpoch = 1<<(63-EpochShift) - 2

	maxLedger = 1<<EpochShift - 1
)

// ShowLedger is the ledger id that clients see of real on a topic of the given epoch. What does not fit, or is none (−1, Long.MAX_VALUE), stays as it is.
func ShowLedger(real, epoch uint64) uint64 {
	if real > maxLedger {
		return real
	}
	return real | epoch<<EpochShift
}

// SplitLedger undoes ShowLedger. ok is false for what no cluster has shown: −1 (the oldest message), Long.MAX_VALUE (the newest), anything negative.
func SplitLedger(shown uint64) (real, epoch uint64, ok bool) {
	if shown >= math.MaxInt64 {
		return shown, 0, false
	}
	return shown & maxLedger, shown >> EpochShift, true
}

// MessageID is what decides how a MessageIdData is rewritten.
type MessageID struct {
	Ledger, Entry uint64
	Partial       bool // it has an ack_set: some messages of a batch are meant
	Chunk         bool // it is the first_chunk_message_id of the id around it, which was mapped before
}

// IDMapper decides what becomes of a message id. keep == false leaves it out, which only ACK and REDELIVER_UNACKNOWLEDGED_MESSAGES
// allow for an id that is not a Chunk.
type IDMapper interface {
	MapID(id MessageID) (ledger, entry uint64, keep bool)
}

// AppendIDs appends the sizes and the command of the frame that src begins with, every message id in it as m has it. What follows the command,
// src[h.CmdEnd:h.Size], belongs behind it unchanged. The whole command must be in src. Fields that are no ids keep their bytes and their order. An id without
// a ledger stays as it is.
func AppendIDs(dst, src []byte, h Head, m IDMapper) ([]byte, error) {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0)
	one, two := idFields(h.Type)
	for cmd := src[prefixLen:h.CmdEnd]; len(cmd) > 0; {
		num, typ, n := consumeTag(cmd)
		if n < 0 {
			return dst[:start], ErrCommand
		}
		if Type(num) == h.Type && typ == protowire.BytesType && one != 0 {
			sub, k := protowire.ConsumeBytes(cmd[n:])
			if k < 0 {
				return dst[:start], ErrCommand
			}
			dst = append(dst, cmd[:n]...)
			at := len(dst)
			var ok bool
			if dst, ok = appendSub(append(dst, 0), sub, one, two, m); !ok {
				return dst[:start], ErrCommand
			}
			dst = closeLength(dst, at)
			cmd = cmd[n+k:]
			continue
		}
		k := consumeValue(num, typ, cmd[n:])
		if k < 0 {
			return dst[:start], ErrCommand
		}
		dst = append(dst, cmd[:n+k]...)
		cmd = cmd[n+k:]
	}
	size := len(dst) - start - prefixLen
	binary.BigEndian.PutUint32(dst[start:], uint32(size+4+h.Size-h.CmdEnd))
	binary.BigEndian.PutUint32(dst[start+4:], uint32(size))
	return dst, nil
}

// idFields are the fields of a command that hold message ids; 0 is none.
func idFields(t Type) (one, two protowire.Number) {
	switch t {
	case TypeSubscribe, TypeSend:
		return 9, 0
	case TypeMessage, TypeRedeliver:
		return 2, 0
	case TypeSendReceipt, TypeAck, TypeSeek:
		return 3, 0
	case TypeGetLastMessageIDResponse:
		return 1, 3
	}
	return 0, 0
}

// HasIDs tells whether the command of the frame that src begins with holds a message id. The whole command must be in src.
func HasIDs(src []byte, h Head) bool {
	one, two := idFields(h.Type)
	for cmd := src[prefixLen:h.CmdEnd]; len(cmd) > 0; {
		num, typ, n := consumeTag(cmd)
		if n < 0 {
			return false
		}
		cmd = cmd[n:]
		if Type(num) == h.Type && typ == protowire.BytesType {
			sub, k := protowire.ConsumeBytes(cmd)
			if k < 0 {
				return false
			}
			for len(sub) > 0 {
				num, typ, n := consumeTag(sub)
				if n < 0 {
					return false
				}
				if typ == protowire.BytesType && (num == one || num == two) {
					return true
				}
				k := consumeValue(num, typ, sub[n:])
				if k < 0 {
					return false
				}
				sub = sub[n+k:]
			}
			cmd = cmd[k:]
			continue
		}
		k := consumeValue(num, typ, cmd)
		if k < 0 {
			return false
		}
		cmd = cmd[k:]
	}
	return false
}

// appendSub appends a sub-message of a command with the ids in its fields one and two mapped.
func appendSub(dst, sub []byte, one, two protowire.Number, m IDMapper) ([]byte, bool) {
	for len(sub) > 0 {
		num, typ, n := consumeTag(sub)
		if n < 0 {
			return dst, false
		}
		k := consumeValue(num, typ, sub[n:])
		if k < 0 {
			return dst, false
		}
		if typ != protowire.BytesType || num != one && num != two {
			dst = append(dst, sub[:n+k]...)
			sub = sub[n+k:]
			continue
		}
		id, _ := protowire.ConsumeBytes(sub[n:])
		var ok bool
		if dst, ok = appendID(dst, sub[:n], id, false, m); !ok {
			return dst, false
		}
		sub = sub[n+k:]
	}
	return dst, true
}

// appendID appends a field whose tag is given and whose value is a MessageIdData. A later field replaces an earlier one, so what is mapped is the last
// ledger and the last entry, and that is then written for each.
func appendID(dst, tag, id []byte, chunk bool, m IDMapper) ([]byte, bool) {
	const (
		ledger   = 1
		entry    = 2
		ackSet   = 5
		firstOne = 7
	)
	is := MessageID{Chunk: chunk}
	ledgers := 0
	for rest := id; len(rest) > 0; {
		num, typ, n := consumeTag(rest)
		if n < 0 {
			return dst, false
		}
		rest = rest[n:]
		switch {
		case num == ledger && typ == protowire.VarintType:
			if is.Ledger, n = protowire.ConsumeVarint(rest); n < 0 {
				return dst, false
			}
			ledgers++
		case num == entry && typ == protowire.VarintType:
			if is.Entry, n = protowire.ConsumeVarint(rest); n < 0 {
				return dst, false
			}
		default:
			if n = consumeValue(num, typ, rest); n < 0 {
				return dst, false
			}
			is.Partial = is.Partial || num == ackSet
		}
		rest = rest[n:]
	}
	at := len(dst) + len(tag)
	if ledgers == 0 {
		dst = append(dst, tag...)
		dst = protowire.AppendBytes(dst, id)
		return dst, true
	}
	toLedger, toEntry, keep := m.MapID(is)
	if !keep {
		return dst, true
	}
	dst = append(append(dst, tag...), 0)
	for len(id) > 0 {
		num, typ, n := consumeTag(id)
		k := consumeValue(num, typ, id[n:])
		switch {
		case num == ledger && typ == protowire.VarintType:
			dst = protowire.AppendVarint(append(dst, id[:n]...), toLedger)
		case num == entry && typ == protowire.VarintType:
			dst = protowire.AppendVarint(append(dst, id[:n]...), toEntry)
		case num == firstOne && typ == protowire.BytesType && !chunk:
			first, _ := protowire.ConsumeBytes(id[n:])
			var ok bool
			if dst, ok = appendID(dst, id[:n], first, true, m); !ok {
				return dst, false
			}
		default:
			dst = append(dst, id[:n+k]...)
		}
		id = id[n+k:]
	}
	return closeLength(dst, at), true
}

// closeLength writes the length of what is behind the byte of dst at that was left for it, which takes more bytes when it is long.
func closeLength(dst []byte, at int) []byte {
	size := len(dst) - at - 1
	if size < 0x80 {
		dst[at] = byte(size)
		return dst
	}
	var room [9]byte
	n := protowire.SizeVarint(uint64(size))
	dst = append(dst, room[:n-1]...)
	copy(dst[at+n:], dst[at+1:at+1+size])
	protowire.AppendVarint(dst[:at], uint64(size))
	return dst
}

// Source is where a replicator took a message from, as its metadata says.
type Source struct {
	Cluster       []byte // Pulsar's name of it; a view of the frame
	Ledger, Entry uint64 // there
	Messages      int    // in the batch, at least 1: what it takes of a consumer's permits
}

// SourceProperty is the property in which replicators note the position of the original, as in 146:36.
const SourceProperty = "__MSG_PROP_REPL_SOURCE_POSITION"

// maxMetadata is how much metadata ParseSource waits for; a message with more counts as not replicated.
const maxMetadata = 128 << 10

// ParseSource reads the metadata of the MESSAGE that src begins with. found is false for a message that no replicator has written, that does not say from
// where, or that says it twice. ok is false when more bytes are needed.
func ParseSource(src []byte, h Head) (s Source, found, ok bool) {
	meta, known, ok := metadata(src, h)
	if !known || !ok {
		return Source{}, false, ok
	}
	if s, found = parseMetadata(meta); !found {
		return Source{}, false, true
	}
	return s, true, true
}

// ParseBatchSize reads how many messages are in the entry of the MESSAGE that src begins with: 1 when it is no batch, or does not say. ok is false when
// more bytes are needed.
func ParseBatchSize(src []byte, h Head) (n int, ok bool) {
	meta, known, ok := metadata(src, h)
	if !known || !ok {
		return 1, ok
	}
	s, _ := parseMetadata(meta)
	return max(s.Messages, 1), true
}

// metadata finds the metadata of a MESSAGE: known is false when there is none, or too much of it, and ok when more bytes are needed.
func metadata(src []byte, h Head) (meta []byte, known, ok bool) {
	const (
		magicEntry    = 0x0e02 // metadata that the broker adds for clients that want it
		magicChecksum = 0x0e01
	)
	at := h.CmdEnd
	for _, magic := range [...]uint16{magicEntry, magicChecksum} {
		if at+2 > h.Size {
			return nil, false, true
		}
		if len(src) < at+2 {
			return nil, false, false
		}
		if binary.BigEndian.Uint16(src[at:]) != magic {
			continue
		}
		at += 2
		if magic == magicEntry {
			n, known, have := sizeAt(src, h, at)
			if !known || !have {
				return nil, false, have
			}
			at += n
		}
		at += 4 // its own size, or the checksum
	}
	n, known, have := sizeAt(src, h, at)
	if !known || !have {
		return nil, false, have
	}
	at += 4
	if len(src) < at+n {
		return nil, false, false
	}
	return src[at : at+n], true, true
}

// sizeAt reads the size of a part of the frame at offset at. known is false when no such part can be there.
func sizeAt(src []byte, h Head, at int) (n int, known, have bool) {
	if at+4 > h.Size {
		return 0, false, true
	}
	if len(src) < at+4 {
		return 0, false, false
	}
	size := binary.BigEndian.Uint32(src[at:])
	if size > maxMetadata || at+4+int(size) > h.Size {
		return 0, false, true
	}
	return int(size), true, true
}

func parseMetadata(meta []byte) (s Source, found bool) {
	const (
		properties     = 4
		replicatedFrom = 5
		inBatch        = 11
	)
	s.Messages = 1
	positions := 0
	for len(meta) > 0 {
		num, typ, n := consumeTag(meta)
		if n < 0 {
			return Source{}, false
		}
		meta = meta[n:]
		k := consumeValue(num, typ, meta)
		if k < 0 {
			return Source{}, false
		}
		switch {
		case num == properties && typ == protowire.BytesType:
			property, _ := protowire.ConsumeBytes(meta)
			key, value := parseProperty(property)
			if string(key) != SourceProperty {
				break
			}
			var ok bool
			if s.Ledger, s.Entry, ok = parsePosition(value); !ok {
				return Source{}, false
			}
			positions++
		case num == replicatedFrom && typ == protowire.BytesType:
			s.Cluster, _ = protowire.ConsumeBytes(meta)
		case num == inBatch && typ == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(meta)
			s.Messages = max(int(int32(v)), 1)
		}
		meta = meta[k:]
	}
	return s, positions == 1 && len(s.Cluster) > 0
}

// parseProperty reads a KeyValue.
func parseProperty(property []byte) (key, value []byte) {
	for len(property) > 0 {
		num, typ, n := consumeTag(property)
		if n < 0 {
			return nil, nil
		}
		property = property[n:]
		k := consumeValue(num, typ, property)
		if k < 0 {
			return nil, nil
		}
		if typ == protowire.BytesType && num == 1 {
			key, _ = protowire.ConsumeBytes(property)
		} else if typ == protowire.BytesType && num == 2 {
			value, _ = protowire.ConsumeBytes(property)
		}
		property = property[k:]
	}
	return key, value
}

// parsePosition reads "ledger:entry".
func parsePosition(text []byte) (ledger, entry uint64, ok bool) {
	at := &ledger
	digits := 0
	for _, c := range text {
		switch {
		case c == ':' && at == &ledger && digits > 0:
			at, digits = &entry, 0
		case c >= '0' && c <= '9' && digits < 18:
			*at = *at*10 + uint64(c-'0')
			digits++
		default:
			return 0, 0, false
		}
	}
	return ledger, entry, at == &entry && digits > 0
}
