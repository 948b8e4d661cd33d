package zk

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"google.golang.org/protobuf/encoding/protowire"

	"pointsman/core/route"
	"pointsman/internal/zktest"
	"pointsman/store/storetest"
)

func TestResume(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a watch that goes on from a copy is given only what changed": testResumeReadsChanges,
		"a copy of another map counts for nothing":                    testResumeOtherMap,
		"a version that is not the stored one counts for nothing":     testResumeForgedVersion,
		"a bucket that is not wholly understood is read again":        testResumeNotUnderstood,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

// stopped is what a watch has seen that ended.
func stopped(t *testing.T, s *Store) *storetest.View {
	v := storetest.Watch(t, s)
	v.AwaitSynced(t)
	v.Stop(t)
	return v
}

func testResumeReadsChanges(t *testing.T, server *zktest.Server) {
	root := chroot()
	first, writer := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	fill(t, writer, 500)
	one, two := storetest.Neighbours()
	kept := route.Entry{Topic: one, Cluster: "a", Epoch: 1}
	apply(t, writer, storetest.Set(one, nil, &kept))
	goes, stays := storetest.Entry(1000, "a", 1), storetest.Entry(1001, "a", 1)
	apply(t, writer, storetest.Set(goes.Topic, nil, goes))
	apply(t, writer, storetest.Set(stays.Topic, nil, stays))
	before := stopped(t, first)

	apply(t, writer, storetest.Set(goes.Topic, goes, nil))
	changed := storetest.Entry(1001, "b", 2)
	apply(t, writer, storetest.Set(stays.Topic, stays, changed))
	made := storetest.Entry(1002, "b", 1)
	apply(t, writer, storetest.Set(made.Topic, nil, made))
	all, err := writer.Entries(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}

	v := storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), before)
	v.AwaitSynced(t)
	v.AwaitMap(t, all, nil)
	held := map[int]bool{}
	for _, e := range all {
		held[route.Bucket(e.Topic)] = true
	}
	v.Await(t, "only changed and empty buckets", func(v *storetest.View) bool {
		for i := range route.BucketCount {
			wrote := i == route.Bucket(goes.Topic) || i == route.Bucket(changed.Topic) || i == route.Bucket(made.Topic)
			if held[i] && v.Got(i) != wrote {
				t.Fatalf("bucket %d: delivered %v, written since the copy %v", i, v.Got(i), wrote)
			}
		}
		return true
	})
	// A bucket that was not read has a watch all the same.
	neighbour := route.Entry{Topic: two, Cluster: "b", Epoch: 3}
	apply(t, writer, storetest.Set(two, nil, &neighbour))
	v.AwaitEntry(t, neighbour)
	v.AwaitEntry(t, kept)
	v.Stop(t)
	// What it knows now is as good as what a watch knows that has read everything.
	again := storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), v)
	again.AwaitMap(t, append(all, neighbour), nil)
	again.Await(t, "nothing to be read", func(v *storetest.View) bool { return !v.Got(route.Bucket(one)) && !v.Got(route.Bucket(made.Topic)) })
}

func testResumeOtherMap(t *testing.T, server *zktest.Server) {
	root := chroot()
	old := open(t, Config{Servers: server.Addr() + root})
	fill(t, old, 100)
	before := stopped(t, old)
	all, err := old.Entries(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	// The nodes stay as they are, transaction numbers included; only what says which map they are is new.
	raw(t, old, old.root+"/meta", []byte(`{"format":1,"id":"another","buckets":1024}`))
	v := storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), before)
	v.AwaitSynced(t)
	v.AwaitMap(t, all, nil)
	v.Await(t, "everything to be read", func(v *storetest.View) bool {
		for _, e := range all {
			if !v.Got(route.Bucket(e.Topic)) {
				t.Fatalf("bucket %d of another map was kept", route.Bucket(e.Topic))
			}
		}
		return v.Known().Map == "another"
	})
}

func testResumeForgedVersion(t *testing.T, server *zktest.Server) {
	root := chroot()
	old := open(t, Config{Servers: server.Addr() + root})
	e := storetest.Entry(1, "a", 1)
	apply(t, old, storetest.Set(e.Topic, nil, e))
	before := stopped(t, old)
	before.Known().Versions[route.Bucket(e.Topic)] += "0"
	v := storetest.Resume(t, open(t, Config{Servers: server.Addr() + root}), before)
	v.AwaitSynced(t)
	v.Await(t, "the bucket to be read", func(v *storetest.View) bool { return v.Got(route.Bucket(e.Topic)) })
}

func testResumeNotUnderstood(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	plain, newer := storetest.Entry(1, "a", 1), storetest.Entry(2, "a", 1)
	apply(t, s, storetest.Set(plain.Topic, nil, plain))
	apply(t, s, storetest.Set(newer.Topic, nil, newer))
	// A newer version has put a field into the entry that this one does not know.
	message := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), newer.Topic)
	message = protowire.AppendString(protowire.AppendTag(message, 2, protowire.BytesType), newer.Cluster)
	message = protowire.AppendVarint(protowire.AppendTag(message, 99, protowire.VarintType), 1)
	plainText := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), message)
	value := bytes.NewBuffer([]byte{1, 0, 0, 0, 0})
	deflater, err := flate.NewWriter(value, flate.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := deflater.Write(plainText); err != nil {
		t.Fatal(err)
	}
	if err := deflater.Close(); err != nil {
		t.Fatal(err)
	}
	binary.BigEndian.PutUint32(value.Bytes()[1:], crc32.Checksum(value.Bytes()[5:], crc32.MakeTable(crc32.Castagnoli)))
	raw(t, s, s.bucketPath(route.Bucket(newer.Topic)), value.Bytes())
	v := stopped(t, s)
	if v.Entries() != 2 || v.Known().Versions[route.Bucket(plain.Topic)] == "" {
		t.Fatalf("%d entries, versions %v", v.Entries(), v.Known().Versions)
	}
	if version := v.Known().Versions[route.Bucket(newer.Topic)]; version != "" {
		t.Errorf("the bucket with an unknown field has version %q: an upgraded proxy would not read the field", version)
	}
}

// A server that was restored from a backup counts its transactions a second time.
func TestAVersionTellsValuesApartWhoseTransactionsHaveTheSameNumber(t *testing.T) {
	stat := zk.Stat{Czxid: 1, Mzxid: 2, Version: 3, Mtime: 4, DataLength: 5}
	if version(&stat) != version(&zk.Stat{Czxid: 1, Mzxid: 2, Version: 3, Mtime: 4, DataLength: 5, Pzxid: 9}) {
		t.Error("the version of one value has changed")
	}
	seen := map[string]bool{version(&stat): true}
	for _, change := range []func(*zk.Stat){
		func(s *zk.Stat) { s.Czxid++ }, func(s *zk.Stat) { s.Mzxid++ }, func(s *zk.Stat) { s.Version++ },
		func(s *zk.Stat) { s.Mtime++ }, func(s *zk.Stat) { s.DataLength++ },
	} {
		other := stat
		change(&other)
		if seen[version(&other)] {
			t.Errorf("%+v has the version of another value", other)
		}
		seen[version(&other)] = true
	}
}
