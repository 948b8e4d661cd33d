package store

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"pointsman/core/route"
)

// sameBucket makes n topics of one bucket.
func sameBucket(n int) (index int, entries []route.Entry) {
	index = route.Bucket("persistent://tenant/namespace/topic-0")
	for i := 0; len(entries) < n; i++ {
		if t := topic(i); route.Bucket(t) == index {
			e := route.Entry{Topic: t, Cluster: "cluster-a", State: route.State(i % 4), Epoch: uint64(i), SwitchID: fmt.Sprint(i % 3), Attempt: uint32(i)}
			if e.State == route.StateDraining {
				e.Drain = route.Drain{From: "cluster-b", Gone: i, Subs: []route.DrainSub{{Name: t, Leaving: i%8 == 3}}, Tails: []route.Tail{{Ledger: int64(i), Entry: -1}}}.String()
			}
			entries = append(entries, e)
		}
	}
	return index, entries
}

// seal makes a stored value of a message that Append would not make.
func seal(plain []byte) []byte {
	out := bytes.NewBuffer([]byte{bucketFormat, 0, 0, 0, 0})
	w, _ := flate.NewWriter(out, flate.BestSpeed)
	_, _ = w.Write(plain)
	_ = w.Close()
	value := out.Bytes()
	binary.BigEndian.PutUint32(value[1:], crc32.Checksum(value[bucketHeader:], castagnoli()))
	return value
}

func TestBucketComesBackAsItWas(t *testing.T) {
	index, entries := sameBucket(50)
	for n := range len(entries) + 1 {
		value := NewBucket(entries[:n]).Append([]byte("before"))
		b, err := DecodeBucket(index, value[len("before"):])
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Clone(entries[:n])
		slices.SortFunc(want, func(a, b route.Entry) int { return strings.Compare(a.Topic, b.Topic) })
		if !slices.Equal(b.Entries(), want) || b.Len() != n {
			t.Fatalf("%d entries come back as %v", n, b.Entries())
		}
	}
}

func TestBucketKeepsWhatALaterVersionWrote(t *testing.T) {
	index, entries := sameBucket(2)
	slices.SortFunc(entries, func(a, b route.Entry) int { return strings.Compare(a.Topic, b.Topic) })
	var plain []byte
	for _, e := range entries {
		message := appendRecord(nil, &bucketRecord{Entry: e})
		message = protowire.AppendString(protowire.AppendTag(message, 77, protowire.BytesType), "later")
		plain = protowire.AppendBytes(protowire.AppendTag(plain, 1, protowire.BytesType), message)
	}
	plain = protowire.AppendVarint(protowire.AppendTag(plain, 99, protowire.VarintType), 5)
	b, err := DecodeBucket(index, seal(plain))
	if err != nil {
		t.Fatal(err)
	}
	changed := entries[0]
	changed.Epoch = 1000
	b.Set(changed.Topic, &changed)
	again, err := DecodeBucket(index, b.Append(nil))
	if err != nil {
		t.Fatal(err)
	}
	if b.Understood() || !NewBucket(entries).Understood() {
		t.Error("Understood does not tell whether there are unknown fields")
	}
	if !reflect.DeepEqual(again.unknown, b.unknown) || len(again.unknown) == 0 {
		t.Error("an unknown field of the bucket is lost")
	}
	for i, r := range again.records {
		if !bytes.Contains(r.unknown, []byte("later")) {
			t.Errorf("an unknown field of entry %d is lost", i)
		}
	}
	if e, _ := again.Entry(changed.Topic); e != changed {
		t.Errorf("the change is lost: %+v", e)
	}
}

func TestBucketThatCannotBeUsedIsRefusedWithAReason(t *testing.T) {
	index, entries := sameBucket(3)
	slices.SortFunc(entries, func(a, b route.Entry) int { return strings.Compare(a.Topic, b.Topic) })
	good := NewBucket(entries).Append(nil)
	flipped := slices.Clone(good)
	flipped[len(flipped)/2] ^= 1
	bomb := seal(make([]byte, maxBucketPlain+1))
	order := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), appendRecord(nil, &bucketRecord{Entry: entries[1]}))
	order = protowire.AppendBytes(protowire.AppendTag(order, 1, protowire.BytesType), appendRecord(nil, &bucketRecord{Entry: entries[0]}))
	nameless := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), appendRecord(nil, &bucketRecord{Entry: route.Entry{Cluster: "a"}}))
	odd := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), appendRecord(nil, &bucketRecord{Entry: route.Entry{Topic: entries[0].Topic, State: 9}}))
	for want, value := range map[string][]byte{
		"fewer than its header": good[:3],
		"format 7":              append([]byte{7}, good[1:]...),
		"checksum":              flipped,
		"damaged":               good[:len(good)-1],
		"more than the":         make([]byte, MaxBucketBytes+1),
		"inflates to more":      bomb,
		"out of order":          seal(order),
		"no topic":              seal(nameless),
		"state 9":               seal(odd),
		"no RouteBucket":        seal([]byte{0xff, 0xff, 0xff}),
	} {
		if _, err := DecodeBucket(index, value); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	if _, err := DecodeBucket((index+1)%route.BucketCount, good); err == nil || !strings.Contains(err.Error(), "belongs to bucket") {
		t.Errorf("another bucket's value: %v", err)
	}
}

// FuzzBucket: whatever is decoded is encoded to something that decodes to the same; nothing else comes out of noise.
func FuzzBucket(f *testing.F) {
	index, entries := sameBucket(5)
	f.Add(NewBucket(entries).Append(nil), true)
	f.Add([]byte{}, false)
	f.Add([]byte{0x0a, 0x03, 0x0a, 0x01, 'x'}, false)
	f.Fuzz(func(t *testing.T, data []byte, whole bool) {
		if !whole {
			data = seal(data) // past the checksum
		}
		b, err := DecodeBucket(index, data)
		if err != nil {
			return
		}
		again, err := DecodeBucket(index, b.Append(nil))
		if err != nil {
			t.Fatalf("a decoded bucket does not decode again: %v", err)
		}
		if !slices.Equal(again.Entries(), b.Entries()) || !bytes.Equal(again.unknown, b.unknown) {
			t.Fatalf("%+v comes back as %+v", b, again)
		}
	})
}

func BenchmarkBucketOf1000(b *testing.B) {
	index, entries := sameBucket(1000)
	value := NewBucket(entries).Append(nil)
	b.ReportMetric(float64(len(value))/1000, "stored-B/entry")
	b.Run("decode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := DecodeBucket(index, value); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		bucket := NewBucket(entries)
		for b.Loop() {
			value = bucket.Append(value[:0])
		}
		b.ReportMetric(float64(len(value))/1000, "stored-B/entry")
	})
}
