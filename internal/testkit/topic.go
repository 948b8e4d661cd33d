package testkit

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// topic is one topic or partition. Guarded by cluster.mu, as everything that hangs on it.
type topic struct {
	cluster   *Cluster
	name      string
	partition int32
	owner     *Broker
	ledger    uint64
	nextEntry uint64
	first     int64 // position of entries[0]; positions count entries from the topic's birth and are never reused
	entries   []*entry
	bytes     int
	lastID    [2]uint64 // ledger and entry of the last entry ever written
	written   int64
	subs      map[string]*subscription
	producers []*producer
	waiting   []*producer // for exclusive access
	cursors   map[*direction]int64
	epoch     uint64 // of the latest exclusive producer
	hadEpoch  bool   // there has been one

	transactions int // that are open, as its statistics say
}

// entry is one stored message or batch. Immutable but for peer.
type entry struct {
	ledger, entry uint64
	at            time.Time
	raw           []byte // as it came after the command: checksum, metadata, payload
	meta          metadata
	from          string // the cluster that it was replicated from; "" = published here
	source        string // "ledger:entry" there
	peer          int64  // position of its copy or original in the other cluster; -1 = none
}

// metadata is what the broker reads of a message's metadata.
type metadata struct {
	*pulsarpb.MessageMetadata
	key     string
	body    int // offset of the payload in raw
	metaAt  int // offset of the metadata in raw
	encoded bool
}

func newTopic(c *Cluster, name string) *topic {
	return &topic{
		cluster: c, name: name, partition: partitionOf(name), owner: c.owner(name), ledger: c.newLedger(),
		subs: map[string]*subscription{}, cursors: map[*direction]int64{},
	}
}

func (t *topic) persistent() bool { return !strings.HasPrefix(t.name, "non-persistent://") }

// end is the position that the next entry will get.
func (t *topic) end() int64 { return t.first + int64(len(t.entries)) }

func (t *topic) at(pos int64) *entry { return t.entries[pos-t.first] }

// find is the position of the first entry that is not before the given id; end when there is none.
func (t *topic) find(ledger, entryID uint64) int64 {
	return t.first + int64(sort.Search(len(t.entries), func(i int) bool {
		e := t.entries[i]
		return e.ledger > ledger || e.ledger == ledger && e.entry >= entryID
	}))
}

// lookup is the position of the entry with exactly that id.
func (t *topic) lookup(ledger, entryID uint64) (int64, bool) {
	pos := t.find(ledger, entryID)
	if pos >= t.end() {
		return 0, false
	}
	e := t.at(pos)
	return pos, e.ledger == ledger && e.entry == entryID
}

// hasRoom makes room for n bytes by dropping what everyone has acknowledged, and tells whether there is room then.
func (t *topic) hasRoom(n int) bool {
	limit := t.cluster.opts.MaxTopicBytes
	if t.bytes+n > limit {
		done := t.end() - 1
		for _, s := range t.subs {
			done = min(done, s.mark)
		}
		for _, pos := range t.cursors {
			done = min(done, pos-1)
		}
		for len(t.entries) > 0 && t.first <= done && t.bytes+n > limit {
			t.bytes -= len(t.entries[0].raw)
			t.entries[0] = nil
			t.entries = t.entries[1:]
			t.first++
		}
	}
	return t.bytes+n <= limit
}

// append stores an entry under the next id and offers it to the subscriptions.
func (t *topic) append(e *entry) {
	if t.nextEntry >= uint64(t.cluster.opts.EntriesPerLedger) {
		t.roll()
	}
	e.ledger, e.entry, e.at = t.ledger, t.nextEntry, time.Now()
	t.nextEntry++
	t.written++
	t.lastID = [2]uint64{e.ledger, e.entry}
	if !t.persistent() {
		for _, s := range t.subs {
			s.deliverNow(e)
		}
		return
	}
	t.entries = append(t.entries, e)
	t.bytes += len(e.raw)
	for _, s := range t.subs {
		s.dispatch()
	}
	for _, d := range t.cluster.ways {
		d.behind[t] = true
		d.wake()
	}
}

// roll starts a new ledger, as a broker does when one is full or the topic is loaded anew.
func (t *topic) roll() {
	if t.nextEntry > 0 {
		t.ledger, t.nextEntry = t.cluster.newLedger(), 0
	}
}

var (
	errChecksum = errors.New("checksum of the message does not match")
	errMetadata = errors.New("metadata of the message cannot be read")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The lengths of what stands in front of a message's metadata: magic and checksum, then the metadata's size.
const (
	checksumLen = 6
	sizeLen     = 4
)

// parseMetadata reads and verifies what follows the command of a SEND.
func parseMetadata(raw []byte) (metadata, error) {
	m := metadata{MessageMetadata: new(pulsarpb.MessageMetadata)}
	at := 0
	if len(raw) >= checksumLen && raw[0] == 0x0e && raw[1] == 0x01 {
		if binary.BigEndian.Uint32(raw[2:]) != crc32.Checksum(raw[checksumLen:], castagnoli) {
			return m, errChecksum
		}
		at = checksumLen
	}
	if len(raw) < at+sizeLen {
		return m, errMetadata
	}
	m.metaAt = at + sizeLen
	size := uint64(binary.BigEndian.Uint32(raw[at:]))
	if uint64(len(raw)-m.metaAt) < size {
		return m, errMetadata
	}
	m.body = m.metaAt + int(size)
	if proto.Unmarshal(raw[m.metaAt:m.body], m.MessageMetadata) != nil {
		return m, errMetadata
	}
	// Of the fields that our own description does not have: partition_key 6, compression 8, encryption 13, ordering_key 18.
	for rest := []byte(m.ProtoReflect().GetUnknown()); len(rest) > 0; {
		num, typ, n := protowire.ConsumeField(rest)
		_, _, tagLen := protowire.ConsumeTag(rest)
		value := rest[tagLen:n]
		switch {
		case (num == 6 || num == 18) && typ == protowire.BytesType:
			key, _ := protowire.ConsumeBytes(value)
			if num == 18 || m.key == "" {
				m.key = string(key)
			}
		case num == 8 && typ == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(value)
			m.encoded = m.encoded || v != 0
		case num == 13:
			m.encoded = true
		}
		rest = rest[n:]
	}
	return m, nil
}

// withReplicatedFrom is raw with the fields added that tell from which cluster a message was copied, and from where there.
func withReplicatedFrom(raw []byte, m metadata, cluster, source string) []byte {
	field := protowire.AppendString(protowire.AppendTag(nil, 5, protowire.BytesType), cluster)
	property, err := proto.Marshal(sourceOf(source))
	if err != nil {
		panic("testkit: a property of two strings cannot be encoded: " + err.Error())
	}
	field = protowire.AppendBytes(protowire.AppendTag(field, 4, protowire.BytesType), property)
	dst := make([]byte, 0, len(raw)+len(field)+checksumLen)
	dst = append(dst, 0x0e, 0x01, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, uint32(m.body-m.metaAt+len(field)))
	dst = append(dst, raw[m.metaAt:m.body]...)
	dst = append(dst, field...)
	dst = append(dst, raw[m.body:]...)
	binary.BigEndian.PutUint32(dst[2:], crc32.Checksum(dst[checksumLen:], castagnoli))
	return dst
}

// partitionOf is the number at the end of a partition's name, or -1.
func partitionOf(name string) int32 {
	if i := strings.LastIndex(name, "-partition-"); i >= 0 {
		if n, err := strconv.ParseInt(name[i+len("-partition-"):], 10, 32); err == nil && n >= 0 {
			return int32(n)
		}
	}
	return -1
}

// baseName is a name without its partition.
func baseName(name string) string {
	if partitionOf(name) >= 0 {
		return name[:strings.LastIndex(name, "-partition-")]
	}
	return name
}

func beBytes(v int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(v)) }

func beInt64(src []byte) int64 { return int64(binary.BigEndian.Uint64(src)) }
