package store

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"pointsman/core/route"
)

// A stored bucket is one byte of format, the CRC-32C of the rest, and the rest: a protobuf message, deflated.
//
//	message RouteBucket { repeated RouteEntry entries = 1; }
//	message RouteEntry  { string topic = 1; string cluster = 2; uint32 state = 3; uint64 epoch = 4;
//	                      string switch_id = 5; uint32 attempt = 6; string drain = 7; }
//
// It is deflated because the names of a bucket have most of their bytes in common (measured: 5 to 8 times smaller),
// and one ZooKeeper write may hold 1 MB. Fields that this version does not know survive a rewrite, so an older proxy
// may edit a neighbour's entry that a newer one wrote.
const (
	bucketFormat = 1
	// MaxBucketBytes is the size of the largest stored bucket.
	MaxBucketBytes = 256 << 10
	// maxBucketPlain bounds what a stored bucket may inflate to.
	maxBucketPlain = 16 << 20
	bucketHeader   = 5
)

// Bucket is a decoded bucket: its entries in the order of their topics, and what this version does not know of them.
type Bucket struct {
	records []bucketRecord
	unknown []byte
}

type bucketRecord struct {
	route.Entry
	unknown []byte
}

// DecodeBucket reads the stored value of bucket index. It keeps nothing of src.
func DecodeBucket(index int, src []byte) (*Bucket, error) {
	if len(src) > MaxBucketBytes {
		return nil, fmt.Errorf("the stored value has %d bytes, more than the %d that a bucket may have", len(src), MaxBucketBytes)
	}
	return decodeBucket(index, src)
}

// decodeBucket is DecodeBucket without the limit on the stored size, which the file store does not need.
func decodeBucket(index int, src []byte) (*Bucket, error) {
	if len(src) < bucketHeader {
		return nil, fmt.Errorf("the stored value has %d bytes, fewer than its header of %d", len(src), bucketHeader)
	}
	if src[0] != bucketFormat {
		return nil, fmt.Errorf("the stored value has format %d and this version knows format %d only: upgrade this proxy", src[0], bucketFormat)
	}
	if want, have := binary.BigEndian.Uint32(src[1:]), crc32.Checksum(src[bucketHeader:], castagnoli()); want != have {
		return nil, fmt.Errorf("the stored value is damaged: checksum %08x, computed %08x", want, have)
	}
	inflater := flate.NewReader(bytes.NewReader(src[bucketHeader:]))
	plain, err := io.ReadAll(io.LimitReader(inflater, maxBucketPlain+1))
	if err != nil {
		return nil, fmt.Errorf("the stored value cannot be inflated: %w", err)
	}
	if len(plain) > maxBucketPlain {
		return nil, fmt.Errorf("the stored value inflates to more than %d bytes", maxBucketPlain)
	}
	b, err := parseBucket(plain)
	if err != nil {
		return nil, err
	}
	for i := range b.records {
		topic := b.records[i].Topic
		if i > 0 && b.records[i-1].Topic >= topic {
			return nil, fmt.Errorf("topic %q is out of order or occurs twice", topic)
		}
		if want := route.Bucket(topic); want != index {
			return nil, fmt.Errorf("topic %q belongs to bucket %04d", topic, want)
		}
	}
	return b, nil
}

// NewBucket makes a bucket of entries, in any order, no topic twice.
func NewBucket(entries []route.Entry) *Bucket {
	b := &Bucket{records: make([]bucketRecord, len(entries))}
	for i, e := range entries {
		b.records[i].Entry = e
	}
	slices.SortFunc(b.records, func(x, y bucketRecord) int { return strings.Compare(x.Topic, y.Topic) })
	return b
}

// Len is the number of entries.
func (b *Bucket) Len() int { return len(b.records) }

// Entries are the entries in the order of their topics; the caller owns the slice.
func (b *Bucket) Entries() []route.Entry {
	entries := make([]route.Entry, len(b.records))
	for i := range b.records {
		entries[i] = b.records[i].Entry
	}
	return entries
}

// Understood tells whether b holds nothing but its entries: a later version may read more from the stored value.
func (b *Bucket) Understood() bool {
	return len(b.unknown) == 0 && !slices.ContainsFunc(b.records, func(r bucketRecord) bool { return len(r.unknown) > 0 })
}

// Entry looks a topic up.
func (b *Bucket) Entry(topic string) (route.Entry, bool) {
	if i, ok := b.find(topic); ok {
		return b.records[i].Entry, true
	}
	return route.Entry{}, false
}

// Set replaces the entry of a topic; nil removes it.
func (b *Bucket) Set(topic string, e *route.Entry) {
	i, ok := b.find(topic)
	switch {
	case ok && e != nil:
		b.records[i].Entry = *e
	case ok:
		b.records = slices.Delete(b.records, i, i+1)
	case e != nil:
		b.records = slices.Insert(b.records, i, bucketRecord{Entry: *e})
	}
}

// Append appends the stored form of b to dst.
func (b *Bucket) Append(dst []byte) []byte {
	var plain, message []byte
	for i := range b.records {
		message = appendRecord(message[:0], &b.records[i])
		plain = protowire.AppendTag(plain, 1, protowire.BytesType)
		plain = protowire.AppendBytes(plain, message)
	}
	plain = append(plain, b.unknown...)

	start := len(dst)
	out := bytes.NewBuffer(append(dst, bucketFormat, 0, 0, 0, 0))
	deflater, err := flate.NewWriter(out, flate.BestSpeed)
	if err != nil {
		panic("flate.BestSpeed is no level: " + err.Error())
	}
	// A bytes.Buffer takes everything, so neither call can fail.
	_, _ = deflater.Write(plain)
	_ = deflater.Close()
	dst = out.Bytes()
	binary.BigEndian.PutUint32(dst[start+1:], crc32.Checksum(dst[start+bucketHeader:], castagnoli()))
	return dst
}

func (b *Bucket) find(topic string) (int, bool) {
	return slices.BinarySearchFunc(b.records, topic, func(r bucketRecord, t string) int { return strings.Compare(r.Topic, t) })
}

func appendRecord(dst []byte, r *bucketRecord) []byte {
	dst = appendString(dst, 1, r.Topic)
	dst = appendString(dst, 2, r.Cluster)
	dst = appendVarint(dst, 3, uint64(r.State))
	dst = appendVarint(dst, 4, r.Epoch)
	dst = appendString(dst, 5, r.SwitchID)
	dst = appendVarint(dst, 6, uint64(r.Attempt))
	dst = appendString(dst, 7, r.Drain)
	return append(dst, r.unknown...)
}

func appendString(dst []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return dst
	}
	return protowire.AppendString(protowire.AppendTag(dst, field, protowire.BytesType), s)
}

func appendVarint(dst []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return dst
	}
	return protowire.AppendVarint(protowire.AppendTag(dst, field, protowire.VarintType), v)
}

func parseBucket(src []byte) (*Bucket, error) {
	b := &Bucket{}
	var clusters interned
	for len(src) > 0 {
		num, typ, n := protowire.ConsumeTag(src)
		if n < 0 {
			return nil, malformed(n)
		}
		size := protowire.ConsumeFieldValue(num, typ, src[n:])
		if size < 0 {
			return nil, malformed(size)
		}
		if num == 1 && typ == protowire.BytesType {
			message, _ := protowire.ConsumeBytes(src[n:])
			r, err := parseRecord(message, &clusters)
			if err != nil {
				return nil, err
			}
			b.records = append(b.records, r)
		} else {
			b.unknown = append(b.unknown, src[:n+size]...)
		}
		src = src[n+size:]
	}
	return b, nil
}

func parseRecord(src []byte, clusters *interned) (bucketRecord, error) {
	var r bucketRecord
	for len(src) > 0 {
		num, typ, n := protowire.ConsumeTag(src)
		if n < 0 {
			return r, malformed(n)
		}
		size := protowire.ConsumeFieldValue(num, typ, src[n:])
		if size < 0 {
			return r, malformed(size)
		}
		value := src[n : n+size]
		var text []byte
		var number uint64
		switch typ {
		case protowire.BytesType:
			text, _ = protowire.ConsumeBytes(value)
		case protowire.VarintType:
			number, _ = protowire.ConsumeVarint(value)
		}
		known := true
		switch {
		case num == 1 && typ == protowire.BytesType:
			r.Topic = string(text)
		case num == 2 && typ == protowire.BytesType:
			r.Cluster = clusters.get(text)
		case num == 3 && typ == protowire.VarintType:
			if number > uint64(route.StateDraining) {
				return r, fmt.Errorf("topic %q has state %d, which this version does not know: upgrade this proxy", r.Topic, number)
			}
			r.State = route.State(number)
		case num == 4 && typ == protowire.VarintType:
			r.Epoch = number
		case num == 5 && typ == protowire.BytesType:
			r.SwitchID = clusters.get(text)
		case num == 6 && typ == protowire.VarintType:
			if number > 1<<32-1 {
				return r, fmt.Errorf("topic %q has attempt %d, which is out of range", r.Topic, number)
			}
			r.Attempt = uint32(number)
		case num == 7 && typ == protowire.BytesType:
			r.Drain = string(text)
		default:
			known = false
		}
		if !known {
			r.unknown = append(r.unknown, src[:n+size]...)
		}
		src = src[n+size:]
	}
	if r.Topic == "" {
		return r, errors.New("an entry has no topic")
	}
	return r, nil
}

// interned keeps one copy of the strings that most entries of a bucket share: clusters, and the switch of a batch.
type interned struct{ recent [4]string }

func (in *interned) get(b []byte) string {
	for i, s := range in.recent {
		if s == string(b) {
			return in.recent[i]
		}
	}
	s := string(b)
	copy(in.recent[1:], in.recent[:])
	in.recent[0] = s
	return s
}

func malformed(n int) error {
	return fmt.Errorf("the stored value is no RouteBucket: %w", protowire.ParseError(n))
}

// castagnoli is the CRC-32C table; the standard library makes it once and hands out the same one.
func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }
