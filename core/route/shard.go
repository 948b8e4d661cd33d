package route

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// shard is one bucket's entries: immutable after newShard, and without a pointer per entry, so that a million topics cost the
// garbage collector nothing. slots is an open-addressed index (linear probing) of records in the arena; the index and
// the record with its name beside it are the only two places of memory that a lookup has to wait for.
type shard struct {
	unknown  bool     // has never been read: no topic in it may be decided
	slots    []uint32 // 0 = free, else tag<<offsetBits | offset of the record in units of recordAlign
	arena    string   // records: see recordHead
	clusters []string // distinct cluster names of this shard; "" among them for floors
	count    int
	digest   uint64 // sum of the entries' hashes
}

const (
	// A record is a head of fixed size (epoch 4 bytes, length of the name 2, index of the cluster 2, length of the extra part 2, state 1,
	// 1 that tells whether there is a drain; little endian), the name, and the extra part: nothing, or attempt (4 bytes) and switch id, and then
	// a zero byte and the drain.
	recordHead  = 12
	recordAlign = 4
	extraHead   = 4

	offsetBits = 24 // of a slot; the rest is a tag from the hash, which saves most looks at a wrong record
	maxArena   = recordAlign << offsetBits

	// A name's hash is cut up: the low bits name the bucket, the next the tag, the upper half the slot.
	bucketBits = 10
)

var emptyShard = &shard{}

// unknownShard stands for a bucket that has never been read. Its digest tells the table from one that knows.
var unknownShard = &shard{unknown: true, digest: 0x9e3779b97f4a7c15}

func hashName(base string) uint64 { return xxhash.Sum64String(base) }

func bucketOf(h uint64) int { return int(h & (BucketCount - 1)) }

func tagOf(h uint64) uint32 { return uint32(h>>bucketBits) << offsetBits }

func slotOf(h uint64, slots int) int { return int((h >> 32) * uint64(slots) >> 32) }

// record is where a record begins in its shard's arena. 0 is none: the first begins at recordAlign.
type record int

// find returns the record of base, or 0.
func (s *shard) find(base string, h uint64) record {
	if len(s.slots) == 0 {
		return 0
	}
	tag := tagOf(h)
	for i := slotOf(h, len(s.slots)); ; {
		slot := s.slots[i]
		if slot == 0 {
			return 0
		}
		if slot>>offsetBits<<offsetBits == tag {
			if r := record(slot&(1<<offsetBits-1)) * recordAlign; s.name(r) == base {
				return r
			}
		}
		if i++; i == len(s.slots) {
			i = 0
		}
	}
}

// head is the head of a record; its length is known, so that reading it checks bounds once.
func (s *shard) head(r record) string { return s.arena[r:][:recordHead] }

func u16(src string, at int) uint16 { return uint16(src[at]) | uint16(src[at+1])<<8 }

func u32(src string, at int) uint32 {
	return uint32(src[at]) | uint32(src[at+1])<<8 | uint32(src[at+2])<<16 | uint32(src[at+3])<<24
}

func (s *shard) epoch(r record) uint64 { return uint64(u32(s.head(r), 0)) }

func (s *shard) name(r record) string { return s.arena[r+recordHead:][:u16(s.head(r), 4)] }

func (s *shard) cluster(r record) string { return s.clusters[u16(s.head(r), 6)] }

func (s *shard) state(r record) State { return State(s.head(r)[10]) }

// extra is the extra part of a record.
func (s *shard) extra(r record) (attempt uint32, switchID, drain string) {
	head := s.head(r)
	n := u16(head, 8)
	if n == 0 {
		return 0, "", ""
	}
	part := s.arena[r+recordHead+record(u16(head, 4)):][:n]
	attempt, switchID = u32(part, 0), part[extraHead:]
	if head[11] != 0 {
		switchID, drain, _ = strings.Cut(switchID, "\x00")
	}
	return attempt, switchID, drain
}

// next is the record after r, or the first for 0; ok is false at the end: for r, ok := s.next(0); ok; r, ok = s.next(r).
func (s *shard) next(r record) (record, bool) {
	if r == 0 {
		return recordAlign, s.count > 0
	}
	head := s.head(r)
	r += recordHead + record(u16(head, 4)) + record(u16(head, 8))
	r = (r + recordAlign - 1) / recordAlign * recordAlign
	return r, int(r) < len(s.arena)
}

func (s *shard) entry(r record) Entry {
	attempt, switchID, drain := s.extra(r)
	return Entry{Topic: s.name(r), Cluster: s.cluster(r), State: s.state(r), Epoch: s.epoch(r), SwitchID: switchID, Attempt: attempt, Drain: drain}
}

// newShard builds the shard of bucket from all its entries. It keeps no reference to them. intern gives equal cluster
// names one memory.
func newShard(bucket int, entries []Entry, intern func(string) string) (*shard, error) {
	if len(entries) == 0 {
		return emptyShard, nil
	}
	size := recordAlign
	for i := range entries {
		size += recordSize(&entries[i])
	}
	if size > maxArena {
		return nil, fmt.Errorf("%d entries of %d bytes, more than the %d bytes that one bucket holds", len(entries), size, maxArena)
	}
	s := &shard{slots: make([]uint32, len(entries)+len(entries)/3+1)} // at most three quarters full
	var arena strings.Builder
	arena.Grow(size)
	arena.WriteString("\x00\x00\x00\x00")
	var tmp [recordHead]byte
	for i := range entries {
		e := &entries[i]
		if err := checkEntry(e); err != nil {
			return nil, err
		}
		h := hashName(e.Topic)
		if b := bucketOf(h); b != bucket {
			return nil, fmt.Errorf("the entry of %q belongs into bucket %d", clip(e.Topic), b)
		}
		s.arena = arena.String() // no copy: for find to compare against
		if s.find(e.Topic, h) != 0 {
			return nil, fmt.Errorf("the topic %q has two entries", clip(e.Topic))
		}
		cluster, err := s.internCluster(e.Cluster, intern)
		if err != nil {
			return nil, err
		}
		s.insert(h, uint32(arena.Len()/recordAlign))
		head := binary.LittleEndian.AppendUint32(tmp[:0], uint32(e.Epoch))
		head = binary.LittleEndian.AppendUint16(head, uint16(len(e.Topic)))
		head = binary.LittleEndian.AppendUint16(head, cluster)
		head = binary.LittleEndian.AppendUint16(head, uint16(extraSize(e)))
		drains := byte(0)
		if e.Drain != "" {
			drains = 1
		}
		arena.Write(append(head, byte(e.State), drains))
		arena.WriteString(e.Topic)
		if extraSize(e) > 0 {
			arena.Write(binary.LittleEndian.AppendUint32(tmp[:0], e.Attempt))
			arena.WriteString(e.SwitchID)
		}
		if drains != 0 {
			arena.WriteByte(0)
			arena.WriteString(e.Drain)
		}
		for arena.Len()%recordAlign != 0 {
			arena.WriteByte(0)
		}
		s.count++
		s.digest += hashEntry(e)
	}
	s.arena = arena.String()
	return s, nil
}

func extraSize(e *Entry) int {
	switch {
	case e.Drain != "":
		return extraHead + len(e.SwitchID) + 1 + len(e.Drain)
	case e.SwitchID == "" && e.Attempt == 0:
		return 0
	}
	return extraHead + len(e.SwitchID)
}

func recordSize(e *Entry) int {
	n := recordHead + len(e.Topic) + extraSize(e)
	return (n + recordAlign - 1) / recordAlign * recordAlign
}

func (s *shard) insert(h uint64, offset uint32) {
	i := slotOf(h, len(s.slots))
	for s.slots[i] != 0 {
		if i++; i == len(s.slots) {
			i = 0
		}
	}
	s.slots[i] = tagOf(h) | offset
}

func (s *shard) internCluster(name string, intern func(string) string) (uint16, error) {
	for i, c := range s.clusters {
		if c == name {
			return uint16(i), nil
		}
	}
	if len(s.clusters) > math.MaxUint16 {
		return 0, fmt.Errorf("more than %d different clusters in one bucket", len(s.clusters))
	}
	s.clusters = append(s.clusters, intern(name))
	return uint16(len(s.clusters) - 1), nil
}

// diff adds to topics the names whose entries differ between s and next.
func (s *shard) diff(next *shard, topics []string) []string {
	for r, ok := next.next(0); ok; r, ok = next.next(r) {
		name := next.name(r)
		if old := s.find(name, hashName(name)); old == 0 || s.entry(old) != next.entry(r) {
			topics = append(topics, name)
		}
	}
	for r, ok := s.next(0); ok; r, ok = s.next(r) {
		name := s.name(r)
		if next.find(name, hashName(name)) == 0 {
			topics = append(topics, name)
		}
	}
	return topics
}

// checkEntry refuses what a table must not hold.
func checkEntry(e *Entry) error {
	t, err := ParseTopic(e.Topic)
	if err != nil {
		return fmt.Errorf("entry: %w", err)
	}
	if t.Base() != e.Topic || t.Full() != e.Topic {
		return fmt.Errorf("the entry's topic %q is not a canonical base name; that would be %q", clip(e.Topic), clip(t.Base()))
	}
	if e.Cluster != "" {
		if err := checkName("cluster name", e.Cluster); err != nil {
			return fmt.Errorf("entry of %q: %w", clip(e.Topic), err)
		}
	}
	if e.SwitchID != "" {
		if err := checkName("switch id", e.SwitchID); err != nil {
			return fmt.Errorf("entry of %q: %w", clip(e.Topic), err)
		}
	}
	if e.State > StateDraining {
		return fmt.Errorf("entry of %q: state %d is unknown to this version", clip(e.Topic), e.State)
	}
	if e.Floor() && e.State != StateActive {
		return fmt.Errorf("entry of %q: state %d without a cluster", clip(e.Topic), e.State)
	}
	if e.Epoch > MaxEpoch {
		return fmt.Errorf("entry of %q: epoch %d is above %d, no real number of moves", clip(e.Topic), e.Epoch, uint64(MaxEpoch))
	}
	return checkDrain(e)
}

// checkDrain: the prepared and fenced entries of a way back keep their drain, those of other switches have none.
func checkDrain(e *Entry) error {
	switch {
	case e.Drain == "" && e.State == StateDraining:
		return fmt.Errorf("entry of %q: it drains, and does not say what", clip(e.Topic))
	case e.Drain == "":
		return nil
	case e.State == StateActive:
		return fmt.Errorf("entry of %q: it is active and drains", clip(e.Topic))
	case DrainFrom(e.Drain) == e.Cluster:
		return fmt.Errorf("entry of %q: it drains %s into itself", clip(e.Topic), e.Cluster)
	}
	if _, err := ParseDrain(e.Drain); err != nil {
		return fmt.Errorf("entry of %q: %w", clip(e.Topic), err)
	}
	return nil
}

func checkRule(r *Rule) error {
	if err := checkScope(r.Scope); err != nil {
		return err
	}
	if r.Cluster != "" {
		if err := checkName("cluster name", r.Cluster); err != nil {
			return fmt.Errorf("rule of %q: %w", r.Scope, err)
		}
	}
	if r.SwitchID != "" {
		if err := checkName("switch id", r.SwitchID); err != nil {
			return fmt.Errorf("rule of %q: %w", r.Scope, err)
		}
	}
	if r.Epoch > MaxEpoch {
		return fmt.Errorf("rule of %q: epoch %d is above %d, no real number of moves", r.Scope, r.Epoch, uint64(MaxEpoch))
	}
	return nil
}

func checkName(what, name string) error {
	if len(name) > maxNameLen {
		return fmt.Errorf("the %s %q has %d bytes, more than the %d allowed", what, clip(name), len(name), maxNameLen)
	}
	if fault := textFault(name); fault != "" {
		return fmt.Errorf("the %s %q %s", what, clip(name), fault)
	}
	return nil
}

// hashEntry and hashRule: what Digest sums up. Names have no control characters (checked), so zero bytes separate them without ambiguity.
func hashEntry(e *Entry) uint64 {
	var tmp [512]byte
	b := append(tmp[:0], 'e')
	b = append(append(b, e.Topic...), 0)
	b = append(append(b, e.Cluster...), 0)
	b = append(append(b, e.SwitchID...), 0)
	b = append(b, byte(e.State))
	b = binary.BigEndian.AppendUint64(b, e.Epoch)
	b = binary.BigEndian.AppendUint32(b, e.Attempt)
	b = append(b, e.Drain...) // all before it has a length that is known or an end
	return xxhash.Sum64(b)
}

func hashRule(r *Rule) uint64 {
	var tmp [512]byte
	b := append(tmp[:0], 'r')
	b = append(append(b, r.Scope...), 0)
	b = append(append(b, r.Cluster...), 0)
	b = append(append(b, r.SwitchID...), 0)
	b = binary.BigEndian.AppendUint64(b, r.Epoch)
	return xxhash.Sum64(b)
}
