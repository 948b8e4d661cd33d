package switching

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

var seenAt = time.Date(2024, 1, 2, 3, 4, 5, 0, time.UTC)

func all(string) bool { return true }

// stored is what comes out of the store again.
func stored(t *testing.T, s Seen) Seen {
	t.Helper()
	head, parts, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range append(parts, head) {
		if len(p) > maxSeenPart {
			t.Errorf("part %d has %d bytes, which no node of ZooKeeper takes", i, len(p))
		}
	}
	again, err := DecodeSeen(head, func(i int) []byte { return parts[i] })
	if err != nil {
		t.Fatal(err)
	}
	return again
}

func TestWhatIsNotSeenAgainKeepsItsAge(t *testing.T) {
	one := SeenTopic{Topic: "persistent://acme/geo/one", Partitions: 3, Replication: map[string]SeenReplication{"b": {Backlog: 7, Delay: 2}},
		Subscriptions: []SeenSubscription{{Name: "a/b c", Replicated: true, Properties: map[string]string{"k": "v"}}, {Name: "x", Unsure: true}}}
	two := SeenTopic{Topic: "persistent://acme/geo/two"}
	s := Seen{Cluster: "a"}
	s = stored(t, s.Merge(seenAt, []SeenTopic{two, one}, "", all))
	if got, at, ok := s.Topic(one.Topic); !ok || !at.Equal(seenAt) || !reflect.DeepEqual(got, one) {
		t.Errorf("%+v as of %v, %v; want %+v", got, at, ok, one)
	}
	later := seenAt.Add(time.Hour)
	s = stored(t, s.Merge(later, []SeenTopic{two}, "broker x: refused", all))
	if got, at, ok := s.Topic(one.Topic); !ok || !at.Equal(seenAt) || got.Replication["b"].Backlog != 7 {
		t.Errorf("of a topic that nobody uses any more: %+v as of %v, %v", got, at, ok)
	}
	if _, at, _ := s.Topic(two.Topic); !at.Equal(later) || s.Trouble == "" || s.Count != 2 {
		t.Errorf("as of %v, %+v", at, s)
	}
	if _, _, ok := s.Topic("persistent://acme/geo/three"); ok {
		t.Error("a topic that nobody has seen is known")
	}
	if s := s.Merge(later, nil, "", func(base string) bool { return base == two.Topic }); s.Count != 1 {
		t.Errorf("a topic that has moved away is kept: %+v", s.Topics)
	}
	if s := s.Merge(seenAt.Add(seenKept+time.Minute), nil, "", all); s.Count != 1 {
		t.Errorf("a topic that was not seen for a week is kept: %+v", s.Topics)
	}
}

func TestTheSameSampleIsTheSameBytes(t *testing.T) {
	topics := func() (all []SeenTopic) {
		for i := range 3000 {
			all = append(all, SeenTopic{Topic: fmt.Sprintf("persistent://acme/geo/%d", i), Replication: map[string]SeenReplication{"c": {}, "b": {}}})
		}
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all
	}
	s := Seen{Cluster: "a"}
	first := s.Merge(seenAt, topics(), "", all)
	second := first.Merge(seenAt.Add(30*time.Second), topics(), "", all)
	_, a, err := first.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, b, err := second.Encode(); err != nil || !reflect.DeepEqual(a, b) || len(a) != 2 {
		t.Errorf("parts that say the same would be written again (%d and %d parts, %v)", len(a), len(b), err)
	}
}

func TestOfTooManyTopicsSomeAreLeftOutAndCounted(t *testing.T) {
	topics := make([]SeenTopic, MaxSeenTopics+500)
	for i := range topics {
		topics[i] = SeenTopic{Topic: fmt.Sprintf("persistent://acme/geo/%06d", i)}
	}
	s := Seen{Cluster: "a"}
	if s = s.Merge(seenAt, topics, "", all); s.Count != MaxSeenTopics || s.LeftOut != 500 || s.Parts != maxSeenParts {
		t.Fatalf("%d topics, %d left out, %d parts", s.Count, s.LeftOut, s.Parts)
	}

	// Names that hardly shrink: a part takes what fits.
	s = Seen{Cluster: "a", Parts: 1}
	for i := range 4000 {
		s.Topics = append(s.Topics, SeenTopic{Topic: fmt.Sprintf("persistent://acme/geo/%06d-%016x%016x%016x%016x", i, rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64()),
			Subscriptions: []SeenSubscription{{Name: fmt.Sprintf("%016x%016x%016x", rand.Uint64(), rand.Uint64(), rand.Uint64())}}})
	}
	again := stored(t, s)
	if again.Count+again.LeftOut != len(s.Topics) || again.Count < 2000 || again.LeftOut == 0 {
		t.Errorf("%d topics are stored, %d left out, of %d", again.Count, again.LeftOut, len(s.Topics))
	}
}

func TestAHalfWrittenSampleIsReadAsFarAsItGoes(t *testing.T) {
	topics := make([]SeenTopic, 4000)
	for i := range topics {
		topics[i] = SeenTopic{Topic: fmt.Sprintf("persistent://acme/geo/%d", i)}
	}
	s := Seen{Cluster: "a"}
	s = s.Merge(seenAt, topics, "", all)
	head, parts, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	parts[1] = nil
	got, err := DecodeSeen(head, func(i int) []byte { return parts[i] })
	if err != nil || got.Count == 0 || got.Count >= 4000 {
		t.Errorf("%d topics, %v", got.Count, err)
	}
	parts[1] = []byte("no such thing")
	if _, err := DecodeSeen(head, func(i int) []byte { return parts[i] }); err == nil {
		t.Error("a damaged part is no error")
	}
}
