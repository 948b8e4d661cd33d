package switching

import (
	"bytes"
	"compress/flate"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
)

// Seen is what the leader has last seen of one cluster: what is known of it when it is dead. It is stored in parts of a bounded size.
type Seen struct {
	Cluster string    `json:"cluster"`
	At      time.Time `json:"at"` // when the cluster was last asked with success
	// Topics are in the order of their names.
	Topics []SeenTopic `json:"-"`
	Count  int         `json:"topics"`
	// LeftOut is how many topics were seen and are not kept, because there are too many.
	LeftOut int `json:"left_out,omitempty"`
	// Parts is how many parts hold the topics.
	Parts int `json:"parts"`
	// Trouble is what could not be asked the last time; "" for nothing.
	Trouble string `json:"trouble,omitempty"`
}

// SeenTopic is what was last seen of one topic, over all of its partitions.
type SeenTopic struct {
	Topic      string `json:"t"`           // base name
	Partitions int    `json:"p,omitempty"` // 0: not partitioned
	// At is when it was last seen, if that was before Seen.At: brokers tell only of topics that are in use.
	At time.Time `json:"at,omitzero"`
	// Replication is by the name of the other cluster.
	Replication   map[string]SeenReplication `json:"r,omitempty"`
	Subscriptions []SeenSubscription         `json:"s,omitempty"` // durable ones, in the order of their names
}

// SeenReplication is how far a topic had been sent to another cluster.
type SeenReplication struct {
	Backlog int64 `json:"b,omitempty"` // entries not sent yet
	Delay   int64 `json:"d,omitempty"` // age of the oldest of them, in seconds
}

// SeenSubscription is a subscription. Only its durable form is worth knowing: the others end with their consumer.
type SeenSubscription struct {
	Name       string            `json:"n"`
	Replicated bool              `json:"r,omitempty"`
	Properties map[string]string `json:"p,omitempty"`
	// Unsure tells that nobody has asked yet whether it is durable.
	Unsure bool `json:"u,omitempty"`
}

// Bounds of what is kept of one cluster.
const (
	maxSeenParts     = 64
	seenPerPart      = 1_500 // topics of a part, about
	maxSeenPart      = 192 << 10
	maxSeenText      = 64 << 20 // of a part that is unpacked
	maxSeenSubs      = 200      // subscriptions of a topic
	seenKept         = 7 * 24 * time.Hour
	MaxSeenTopics    = maxSeenParts * seenPerPart
	maxSeenTroubling = 300 // characters of Seen.Trouble
)

// Topic is what is known of a topic (base name), and as of when.
func (s *Seen) Topic(base string) (t SeenTopic, at time.Time, ok bool) {
	i, ok := slices.BinarySearchFunc(s.Topics, base, func(t SeenTopic, base string) int { return strings.Compare(t.Topic, base) })
	if !ok {
		return SeenTopic{}, time.Time{}, false
	}
	t = s.Topics[i]
	if at = t.At; at.IsZero() {
		at = s.At
	}
	return t, at, true
}

// Merge is what is known after a look at a cluster. Topics that were not seen keep what was known of them, for as long as wanted says that they
// matter, and a week at most.
func (s *Seen) Merge(now time.Time, topics []SeenTopic, trouble string, wanted func(base string) bool) Seen {
	next := Seen{Cluster: s.Cluster, At: now, Trouble: clip(trouble, maxSeenTroubling)}
	slices.SortFunc(topics, func(a, b SeenTopic) int { return strings.Compare(a.Topic, b.Topic) })
	found := func(base string) bool {
		_, ok := slices.BinarySearchFunc(topics, base, func(t SeenTopic, base string) int { return strings.Compare(t.Topic, base) })
		return ok
	}
	for _, t := range topics {
		t.At = time.Time{}
		if over := len(t.Subscriptions) - maxSeenSubs; over > 0 {
			t.Subscriptions = t.Subscriptions[:maxSeenSubs]
			next.LeftOut++
		}
		next.Topics = append(next.Topics, t)
	}
	for _, t := range s.Topics {
		if t.At.IsZero() {
			t.At = s.At
		}
		if found(t.Topic) || now.Sub(t.At) > seenKept || !wanted(t.Topic) {
			continue
		}
		next.Topics = append(next.Topics, t)
	}
	if over := len(next.Topics) - MaxSeenTopics; over > 0 { // those that were seen last come first
		next.Topics, next.LeftOut = next.Topics[:MaxSeenTopics], next.LeftOut+over
	}
	slices.SortFunc(next.Topics, func(a, b SeenTopic) int { return strings.Compare(a.Topic, b.Topic) })
	next.Count = len(next.Topics)
	for next.Parts = 1; next.Parts < maxSeenParts && next.Parts*seenPerPart < next.Count; next.Parts *= 2 {
	}
	return next
}

// Encode makes the stored form: a head, and the parts. What does not fit into a part is left out of it, and counted.
func (s *Seen) Encode() (head []byte, parts [][]byte, err error) {
	all := make([][]SeenTopic, s.Parts)
	for _, t := range s.Topics {
		i := route.Bucket(t.Topic) % s.Parts
		all[i] = append(all[i], t)
	}
	parts = make([][]byte, s.Parts)
	for i, topics := range all {
		for {
			if parts[i], err = pack(topics); err != nil {
				return nil, nil, err
			}
			if len(parts[i]) <= maxSeenPart {
				break
			}
			keep := len(topics) * maxSeenPart / len(parts[i]) * 9 / 10
			s.LeftOut += len(topics) - keep
			topics = topics[:keep]
		}
	}
	head, err = json.Marshal(s)
	return head, parts, err
}

// DecodeSeen reads what Encode has made; missing parts, as after an interrupted write, are left out.
func DecodeSeen(head []byte, part func(i int) []byte) (Seen, error) {
	var s Seen
	if err := json.Unmarshal(head, &s); err != nil {
		return Seen{}, fmt.Errorf("what was last seen of a cluster cannot be read: %w", err)
	}
	if s.Parts < 0 || s.Parts > maxSeenParts {
		return Seen{}, fmt.Errorf("what was last seen of cluster %s has %d parts, at most %d", s.Cluster, s.Parts, maxSeenParts)
	}
	for i := range s.Parts {
		text := part(i)
		if text == nil {
			continue
		}
		topics, err := unpack(text)
		if err != nil {
			return Seen{}, fmt.Errorf("what was last seen of cluster %s, part %d, cannot be read: %w", s.Cluster, i, err)
		}
		s.Topics = append(s.Topics, topics...)
	}
	slices.SortFunc(s.Topics, func(a, b SeenTopic) int { return strings.Compare(a.Topic, b.Topic) })
	// A change of the number of parts that was interrupted has left some twice.
	s.Topics = slices.CompactFunc(s.Topics, func(a, b SeenTopic) bool { return a.Topic == b.Topic })
	s.Count = len(s.Topics)
	return s, nil
}

func pack(topics []SeenTopic) ([]byte, error) {
	var out bytes.Buffer
	w, err := flate.NewWriter(&out, flate.DefaultCompression)
	if err != nil {
		return nil, err
	}
	if err := json.NewEncoder(w).Encode(topics); err != nil {
		return nil, err
	}
	err = w.Close()
	return out.Bytes(), err
}

func unpack(src []byte) (topics []SeenTopic, err error) {
	err = json.NewDecoder(io.LimitReader(flate.NewReader(bytes.NewReader(src)), maxSeenText)).Decode(&topics)
	return topics, err
}

// clip shortens a text for a record.
func clip(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
