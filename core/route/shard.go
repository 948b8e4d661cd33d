package route

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// shard is one bucket's entries: immutable after newShard, and without a pointer per entry, so that a million topics cost the
// garbage collector nothing. All text is in one arena; slots is an open-addressed index (linear probing) into records.
type shard struct {
	slots    []uint32 // 0 = free, else tag<<indexBits | record+1
	records  []record
	extras   []extra
	clusters []string // distinct cluster names of this shard; "" among them for floors
	arena    string
	digest   uint64 // sum of the entries' hashes
}

// record is one entry: 16 bytes besides its name.
type record struct {
	name    uint32 // start in the arena
	nameLen uint16
	cluster uint16 // index into clusters
	epoch   uint32
	extra   uint32 // 0 = none, else index into extras + 1
}

// extra is what few entries have: those that a switch has written.
type extra struct {
	switchID    uint32 // start in the arena
	switchIDLen uint16
	state       State
	attempt     uint32
}

const (
	indexBits       = 20 // of a slot; the rest is a tag from the hash, which saves most looks at a wrong record
	maxShardEntries = 1<<indexBits - 1

	// A name's hash is cut up: the low bits name the bucket, the next the tag, the upper half the slot.
	bucketBits = 10
)

var emptyShard = &shard{}

func hashName(base string) uint64 { return xxhash.Sum64String(base) }

func bucketOf(h uint64) int { return int(h & (BucketCount - 1)) }

func tagOf(h uint64) uint32 { return uint32(h>>bucketBits) << indexBits }

func slotOf(h uint64, slots int) int { return int((h >> 32) * uint64(slots) >> 32) }

// find returns the record of base, or nil.
func (s *shard) find(base string, h uint64) *record {
	if len(s.slots) == 0 {
		return nil
	}
	tag := tagOf(h)
	for i := slotOf(h, len(s.slots)); ; {
		slot := s.slots[i]
		if slot == 0 {
			return nil
		}
		if slot>>indexBits<<indexBits == tag {
			if r := &s.records[slot&maxShardEntries-1]; s.name(r) == base {
				return r
			}
		}
		if i++; i == len(s.slots) {
			i = 0
		}
	}
}

func (s *shard) name(r *record) string { return s.arena[r.name : r.name+uint32(r.nameLen)] }

func (s *shard) cluster(r *record) string { return s.clusters[r.cluster] }

func (s *shard) switchID(r *record) string {
	if r.extra == 0 {
		return ""
	}
	x := &s.extras[r.extra-1]
	return s.arena[x.switchID : x.switchID+uint32(x.switchIDLen)]
}

func (s *shard) state(r *record) State {
	if r.extra == 0 {
		return StateActive
	}
	return s.extras[r.extra-1].state
}

func (s *shard) entry(r *record) Entry {
	e := Entry{Topic: s.name(r), Cluster: s.cluster(r), State: s.state(r), Epoch: uint64(r.epoch), SwitchID: s.switchID(r)}
	if r.extra != 0 {
		e.Attempt = s.extras[r.extra-1].attempt
	}
	return e
}

// newShard builds the shard of bucket from all its entries. It keeps no reference to them. intern gives equal cluster
// names one memory.
func newShard(bucket int, entries []Entry, intern func(string) string) (*shard, error) {
	if len(entries) == 0 {
		return emptyShard, nil
	}
	if len(entries) > maxShardEntries {
		return nil, fmt.Errorf("%d entries, more than the %d that one bucket holds", len(entries), maxShardEntries)
	}
	text, extras := 0, 0
	for i := range entries {
		text += len(entries[i].Topic) + len(entries[i].SwitchID)
		if hasExtra(&entries[i]) {
			extras++
		}
	}
	if text > math.MaxUint32 {
		return nil, fmt.Errorf("%d bytes of names, more than one bucket holds", text)
	}
	s := &shard{
		slots:   make([]uint32, len(entries)+len(entries)/3+1), // at most three quarters full
		records: make([]record, 0, len(entries)),
		extras:  make([]extra, 0, extras),
	}
	var arena strings.Builder
	arena.Grow(text)
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
		if s.find(e.Topic, h) != nil {
			return nil, fmt.Errorf("the topic %q has two entries", clip(e.Topic))
		}
		cluster, err := s.internCluster(e.Cluster, intern)
		if err != nil {
			return nil, err
		}
		r := record{name: uint32(arena.Len()), nameLen: uint16(len(e.Topic)), cluster: cluster, epoch: uint32(e.Epoch)}
		arena.WriteString(e.Topic)
		if hasExtra(e) {
			s.extras = append(s.extras, extra{switchID: uint32(arena.Len()), switchIDLen: uint16(len(e.SwitchID)), state: e.State, attempt: e.Attempt})
			arena.WriteString(e.SwitchID)
			r.extra = uint32(len(s.extras))
		}
		s.records = append(s.records, r)
		s.insert(h, uint32(len(s.records)))
		s.digest += hashEntry(e)
	}
	s.arena = arena.String()
	return s, nil
}

func (s *shard) insert(h uint64, n uint32) {
	i := slotOf(h, len(s.slots))
	for s.slots[i] != 0 {
		if i++; i == len(s.slots) {
			i = 0
		}
	}
	s.slots[i] = tagOf(h) | n
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
	if s == next {
		return topics
	}
	for i := range next.records {
		r := &next.records[i]
		name := next.name(r)
		if old := s.find(name, hashName(name)); old == nil || s.entry(old) != next.entry(r) {
			topics = append(topics, name)
		}
	}
	for i := range s.records {
		name := s.name(&s.records[i])
		if next.find(name, hashName(name)) == nil {
			topics = append(topics, name)
		}
	}
	return topics
}

func hasExtra(e *Entry) bool { return e.State != StateActive || e.SwitchID != "" || e.Attempt != 0 }

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
