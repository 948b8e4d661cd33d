package codec

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"
)

// This file reads LOOKUP, PARTITIONED_METADATA and their successful responses without the general decoder, and writes them with another request
// id. It takes one form only: the command is its type and one sub-message that fills it, with every known field at most once and of
// its own wire type, every other one a varint or bytes with a tag of one byte. That is what clients and brokers write. For
// anything else ok is false, and the general decoder has to judge.

// Question is a LOOKUP or PARTITIONED_METADATA. Its slices are views of the frame.
type Question struct {
	Topic         []byte
	ID            uint64
	Listener      bool   // it names an advertised listener
	Before, After []byte // all fields of the sub-message in front of the request id and behind it
}

// ParseQuestion reads the complete frame src. It also leaves questions to the general decoder from which something has to be taken out:
// an original principal or its credentials, an empty listener name.
func ParseQuestion(src []byte, h Head) (q Question, ok bool) {
	f := &plainLookup
	if h.Type == TypePartitionedMetadata {
		f = &plainPartitions
	} else if h.Type != TypeLookup {
		return Question{}, false
	}
	sub, ok := plainSub(src, h)
	if !ok {
		return Question{}, false
	}
	seen := uint16(0)
	for i := 0; i < len(sub); {
		p, ok := f.next(sub, i, &seen)
		if !ok {
			return Question{}, false
		}
		switch {
		case p.number == 1:
			q.Topic = p.bytes
		case p.number == f.id:
			q.ID, q.Before, q.After = p.varint, sub[:i], sub[p.end:]
		case p.number == 7 && h.Type == TypeLookup:
			if len(p.bytes) == 0 {
				return Question{}, false
			}
			q.Listener = true
		}
		i = p.end
	}
	return q, seen&f.required == f.required
}

// AppendQuestion appends the frame of a question: the fields in front of its request id, the id, the fields behind it.
func AppendQuestion(dst []byte, t Type, before []byte, id uint64, after []byte) []byte {
	return appendExchange(dst, t, plainLookup.id, before, id, after)
}

// AppendListenerName appends the field for the advertised listener to the fields of a LOOKUP.
func AppendListenerName(dst []byte, name string) []byte {
	return protowire.AppendString(protowire.AppendTag(dst, 7, protowire.BytesType), name)
}

// Response is a LOOKUP_RESPONSE that names the owner, or a PARTITIONED_METADATA_RESPONSE without an error. Its slices are views of the frame.
type Response struct {
	Type        Type
	ID          uint64
	URL, URLTLS []byte // LOOKUP_RESPONSE: as the broker says
	sub         []byte
	at, end     int // of the request id in sub
	replaced    int // LOOKUP_RESPONSE: bytes of sub that AppendOwner leaves out
}

// ParseResponse reads the complete frame src. Redirects and errors are for the general decoder.
func ParseResponse(src []byte, h Head) (r Response, ok bool) {
	f := &plainLookupResponse
	if h.Type == TypePartitionedMetadataResp {
		f = &plainPartitionsResponse
	} else if h.Type != TypeLookupResponse {
		return Response{}, false
	}
	if r.sub, ok = plainSub(src, h); !ok {
		return Response{}, false
	}
	r.Type = h.Type
	outcome, success := uint64(0), uint64(0)
	if h.Type == TypeLookupResponse {
		success = uint64(LookupConnect)
	}
	seen := uint16(0)
	for i := 0; i < len(r.sub); {
		p, ok := f.next(r.sub, i, &seen)
		if !ok {
			return Response{}, false
		}
		switch {
		case p.number == f.id:
			r.ID, r.at, r.end = p.varint, i, p.end
		case p.number == 3:
			outcome = p.varint
		case h.Type == TypeLookupResponse && p.number == 1:
			r.URL = p.bytes
		case h.Type == TypeLookupResponse && p.number == 2:
			r.URLTLS = p.bytes
		}
		if ownerFields&(1<<p.number) != 0 {
			r.replaced += p.end - i
		}
		i = p.end
	}
	return r, seen&f.required == f.required && outcome == success
}

// Append appends the frame of a PARTITIONED_METADATA_RESPONSE with another request id.
func (r *Response) Append(dst []byte, id uint64) []byte {
	return appendExchange(dst, r.Type, plainPartitionsResponse.id, r.sub[:r.at], id, r.sub[r.end:])
}

// AppendOwner appends the frame of a LOOKUP_RESPONSE with another request id and what AppendOwnerFields has made for its owner.
func (r *Response) AppendOwner(dst []byte, id uint64, owner []byte) []byte {
	const number = 4
	dst = appendHead(dst, r.Type, len(owner)+len(r.sub)-r.replaced+1+protowire.SizeVarint(id))
	dst = append(dst, owner...)
	seen := uint16(0)
	for i := 0; i < len(r.sub); {
		p, ok := plainLookupResponse.next(r.sub, i, &seen)
		if !ok {
			panic("codec: the frame of a Response has changed since it was read")
		}
		if ownerFields&(1<<p.number) == 0 {
			dst = append(dst, r.sub[i:p.end]...)
		}
		i = p.end
	}
	return protowire.AppendVarint(append(dst, number<<3), id)
}

// ownerFields are the fields of a LOOKUP_RESPONSE that AppendOwner writes itself, one bit each: both URLs, request id, authoritative,
// proxy_through_service_url.
const ownerFields = 1<<1 | 1<<2 | 1<<4 | 1<<5 | 1<<8

// AppendOwnerFields appends the fields by which a LOOKUP_RESPONSE sends the client back to the proxy with these broker URLs.
func AppendOwnerFields(dst []byte, url, urlTLS string) []byte {
	dst = protowire.AppendString(protowire.AppendTag(dst, 1, protowire.BytesType), url)
	dst = protowire.AppendString(protowire.AppendTag(dst, 2, protowire.BytesType), urlTLS)
	dst = protowire.AppendVarint(protowire.AppendTag(dst, 5, protowire.VarintType), 1)
	return protowire.AppendVarint(protowire.AppendTag(dst, 8, protowire.VarintType), 1)
}

// fields is what is known of a sub-message, one bit for each field number.
type fields struct {
	id       int    // number of the request id
	varints  uint16 // known fields of this wire type
	texts    uint16
	decoded  uint16 // known fields that are left to the general decoder
	required uint16
}

var (
	plainLookup             = fields{id: 2, texts: 1<<1 | 1<<7, varints: 1<<2 | 1<<3, decoded: 1<<4 | 1<<5 | 1<<6 | 1<<8, required: 1<<1 | 1<<2}
	plainPartitions         = fields{id: 2, texts: 1 << 1, varints: 1<<2 | 1<<6, decoded: 1<<3 | 1<<4 | 1<<5, required: 1<<1 | 1<<2}
	plainLookupResponse     = fields{id: 4, texts: 1<<1 | 1<<2 | 1<<7, varints: 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<8, required: 1 << 4}
	plainPartitionsResponse = fields{id: 2, texts: 1 << 5, varints: 1<<1 | 1<<2 | 1<<3 | 1<<4, required: 1 << 2}
)

// piece is one field of a sub-message.
type piece struct {
	number int
	varint uint64
	bytes  []byte
	end    int // its offset
}

// next reads the field of sub at offset i and notes it in seen. ok is false when it is none of a plain form.
func (f *fields) next(sub []byte, i int, seen *uint16) (p piece, ok bool) {
	tag := sub[i]
	i++
	p.number = int(tag >> 3)
	if tag >= 0x80 || p.number == 0 {
		return piece{}, false
	}
	bit := uint16(1) << p.number
	known := f.varints
	switch tag & 7 {
	case 0:
		if i < len(sub) && sub[i] < 0x80 {
			p.varint, p.end = uint64(sub[i]), i+1
		} else {
			v, n := protowire.ConsumeVarint(sub[i:])
			if n < 0 {
				return piece{}, false
			}
			p.varint, p.end = v, i+n
		}
	case 2:
		known = f.texts
		size, n := consumeSize(sub[i:])
		if n == 0 || size > len(sub)-i-n {
			return piece{}, false
		}
		p.end = i + n + size
		p.bytes = sub[i+n : p.end]
	default:
		return piece{}, false
	}
	if all := f.varints | f.texts | f.decoded; all&bit != 0 && (known&bit == 0 || *seen&bit != 0) {
		return piece{}, false
	}
	*seen |= bit
	return p, true
}

// plainSub is the sub-message of a command of a type from 16 to 127, when it fills the command.
func plainSub(src []byte, h Head) (sub []byte, ok bool) {
	const start = subStart + 1 // a tag of two bytes
	if h.CmdEnd <= start || len(src) < h.CmdEnd || src[8] != 0x08 || Type(src[9]) != h.Type || src[10] != byte(h.Type<<3)|2|0x80 || src[11] != byte(h.Type>>4) {
		return nil, false
	}
	size, n := consumeSize(src[start:h.CmdEnd])
	if n == 0 || start+n+size != h.CmdEnd {
		return nil, false
	}
	return src[start+n : h.CmdEnd], true
}

// appendHead appends all of a frame in front of its sub-message, of a type from 16 to 127 and size bytes long.
func appendHead(dst []byte, t Type, size int) []byte {
	command := 4 + protowire.SizeVarint(uint64(size)) + size
	dst = binary.BigEndian.AppendUint32(dst, uint32(command+4))
	dst = binary.BigEndian.AppendUint32(dst, uint32(command))
	dst = append(dst, 0x08, byte(t), byte(t<<3)|2|0x80, byte(t>>4))
	return protowire.AppendVarint(dst, uint64(size))
}

// appendExchange appends a frame with the fields in front of the request id, the id under its number, and the fields behind it.
func appendExchange(dst []byte, t Type, number int, before []byte, id uint64, after []byte) []byte {
	dst = appendHead(dst, t, len(before)+1+protowire.SizeVarint(id)+len(after))
	dst = append(dst, before...)
	dst = protowire.AppendVarint(append(dst, byte(number<<3)), id)
	return append(dst, after...)
}
