package zk

import (
	"context"
	"testing"

	"pointsman/core/route"
	"pointsman/internal/zktest"
	"pointsman/store"
)

// BenchmarkLoad is the time from a connected store to a whole map of a million entries, which a real server holds.
func BenchmarkLoadOf1000000Entries(b *testing.B) {
	server := zktest.Start(b)
	servers := server.Addr() + chroot()
	writer, err := Open(context.Background(), Config{Servers: servers})
	if err != nil {
		b.Fatal(err)
	}
	defer writer.Close()
	fill(b, writer, 1_000_000)
	all, bytes := 0, 0
	for i := range route.BucketCount {
		n, err := writer.get(context.Background(), writer.bucketPath(i))
		if err != nil {
			b.Fatal(err)
		}
		bytes += len(n.data)
	}
	for b.Loop() {
		s, err := Open(context.Background(), Config{Servers: servers})
		if err != nil {
			b.Fatal(err)
		}
		all = 0
		ctx, cancel := context.WithCancel(context.Background())
		err = s.Watch(ctx, func(u store.Update) {
			for _, bucket := range u.Buckets {
				all += len(bucket)
			}
			if u.Synced {
				cancel()
			}
		})
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
	if all != 1_000_000 {
		b.Fatalf("%d entries were loaded", all)
	}
	b.ReportMetric(float64(bytes)/1_000_000, "stored-B/entry")
}

// BenchmarkApply is one change of one entry, as a switch makes it, on a real server.
func BenchmarkApply(b *testing.B) {
	server := zktest.Start(b)
	s, err := Open(context.Background(), Config{Servers: server.Addr() + chroot()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	e := route.Entry{Topic: "persistent://t/n/topic", Cluster: "a"}
	first := true
	for b.Loop() {
		next := e
		next.Epoch++
		c := store.Change{Entries: []store.EntryChange{{Topic: e.Topic, Before: &e, After: &next}}}
		if first {
			c.Entries[0].Before = nil
		}
		if err := s.Apply(context.Background(), c); err != nil {
			b.Fatal(err)
		}
		e, first = next, false
	}
}
