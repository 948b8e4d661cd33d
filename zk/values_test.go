package zk

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestValues(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"a value that cannot be used keeps the last good one": testBadValues,
		"a tree that was wiped empties nobody's map":          testWipedTree,
		"a tree of a newer version is refused":                testNewerTree,
		"credentials hide the tag key and the map":            testCredentials,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

func testBadValues(t *testing.T, server *zktest.Server) {
	far, near, _ := pair(t, server, 30*time.Second)
	e := storetest.Entry(1, "a", 1)
	index := route.Bucket(e.Topic)
	apply(t, near, storetest.Set(e.Topic, nil, e))
	rule := route.Rule{Cluster: "a"}
	apply(t, near, store.Change{Rules: []store.RuleChange{{After: &rule}}})
	v := storetest.Watch(t, far)
	v.AwaitMap(t, []route.Entry{*e}, []route.Rule{rule})
	good := store.NewBucket([]route.Entry{*e}).Append(nil)
	other := storetest.Entry(2, "a", 1)
	for name, data := range map[string][]byte{
		"empty":        {},
		"noise":        []byte("hello, this is no bucket at all"),
		"truncated":    good[:len(good)-3],
		"newer":        append([]byte{9}, good[1:]...),
		"oversized":    make([]byte, store.MaxBucketBytes+1),
		"other bucket": store.NewBucket([]route.Entry{*other}).Append(nil),
	} {
		raw(t, near, near.bucketPath(index), data)
		v.Await(t, name, func(v *storetest.View) bool { return v.Bad(index) != nil && v.Entries() == 1 })
		if err := near.Apply(within(t, 10*time.Second), storetest.Set(e.Topic, e, nil)); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: Apply to a bucket that cannot be read: %v", name, err)
		}
		raw(t, near, near.bucketPath(index), good)
		v.Await(t, name+", mended", func(v *storetest.View) bool { return v.Bad(index) == nil && v.Entries() == 1 })
	}
	// The same of the moving node: the bucket alone would show the topic as it was before its switch.
	fenced := *e
	fenced.State, fenced.SwitchID = route.StateFenced, "s-1"
	moving := store.NewBucket([]route.Entry{fenced}).Append(nil)
	for name, data := range map[string][]byte{
		"empty": {}, "noise": []byte("hello"), "newer": append([]byte{9}, moving[1:]...), "an entry that does not move": good,
	} {
		raw(t, near, near.movingPath(index), moving)
		v.AwaitEntry(t, fenced)
		raw(t, near, near.movingPath(index), data)
		v.Await(t, "moving: "+name, func(v *storetest.View) bool { return v.Bad(index) != nil && v.Entries() == 1 })
		v.AwaitEntry(t, fenced)
		raw(t, near, near.bucketPath(index), store.NewBucket([]route.Entry{*e}).Append(nil)) // a reason to read the bucket
		if err := near.Apply(within(t, 10*time.Second), storetest.Set(e.Topic, e, nil)); err == nil || errors.Is(err, store.ErrConflict) {
			t.Errorf("%s: Apply beside a moving node that cannot be read: %v", name, err)
		}
		for what, read := range map[string]func() error{
			"Entry":   func() error { _, _, err := near.Entry(within(t, 10*time.Second), e.Topic); return err },
			"Entries": func() error { _, err := near.Entries(within(t, 10*time.Second)); return err },
		} {
			if err := read(); err == nil || !strings.Contains(err.Error(), near.movingPath(index)) {
				t.Errorf("%s: %s: %v, want an error that names the node", name, what, err)
			}
		}
		v.AwaitEntry(t, fenced)
		if err := near.delete(within(t, 10*time.Second), near.movingPath(index)); err != nil {
			t.Fatal(err)
		}
		v.Await(t, "moving: "+name+", mended", func(v *storetest.View) bool { return v.Bad(index) == nil })
		v.AwaitEntry(t, *e)
	}
	apply(t, near, storetest.Set(other.Topic, nil, other)) // others are not affected
	v.AwaitMap(t, []route.Entry{*e, *other}, []route.Rule{rule})
	for name, data := range map[string]string{
		"noise": "}{", "newer": `{"format":2,"rules":[]}`, "twice": `{"format":1,"rules":[{"scope":"t"},{"scope":"t"}]}`,
		"oversized": `{"format":1,"rules":[],"x":"` + strings.Repeat("x", maxRulesBytes) + `"}`,
	} {
		raw(t, near, near.root+"/rules", []byte(data))
		v.Await(t, "rules: "+name, func(v *storetest.View) bool { return v.Bad(store.BadRules) != nil && len(v.Rules()) == 1 })
		raw(t, near, near.root+"/rules", []byte(`{"format":1,"later":true,"rules":[{"scope":"","cluster":"a","epoch":0,"later":1}]}`))
		v.Await(t, "rules: "+name+", mended", func(v *storetest.View) bool { return v.Bad(store.BadRules) == nil && len(v.Rules()) == 1 })
	}
}

// removeTree removes everything below and at path.
func removeTree(t *testing.T, s *Store, path string) {
	t.Helper()
	names, err := s.children(within(t, 10*time.Second), path)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		removeTree(t, s, path+"/"+name)
	}
	if err := s.delete(within(t, 10*time.Second), path); err != nil {
		t.Fatal(err)
	}
}

func testWipedTree(t *testing.T, server *zktest.Server) {
	root := chroot()
	watcher := open(t, Config{Servers: server.Addr() + root})
	operator := open(t, Config{Servers: server.Addr() + root})
	e := storetest.Entry(1, "a", 1)
	apply(t, operator, storetest.Set(e.Topic, nil, e))
	v := storetest.Watch(t, watcher)
	v.AwaitMap(t, []route.Entry{*e}, nil)
	removeTree(t, operator, operator.root)
	v.Await(t, "the loss to be reported", func(v *storetest.View) bool { return len(v.Rules()) == 0 && v.Bad(store.BadRules) != nil })
	if _, err := watcher.Rules(within(t, 10*time.Second)); err == nil || !strings.Contains(err.Error(), "restore it") {
		t.Errorf("Rules: %v, want what to do", err)
	}
	// Somebody begins a new map in its place.
	anew := open(t, Config{Servers: server.Addr() + root})
	apply(t, anew, storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "b", 1)))
	v.Await(t, "the other map to be reported", func(v *storetest.View) bool {
		err := v.Bad(store.BadRules)
		return err != nil && strings.Contains(err.Error(), "another map")
	})
	v.Await(t, "the old map to stay", func(v *storetest.View) bool { return v.Entries() == 1 })
	v.AwaitEntry(t, *e)
}

func testNewerTree(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	if err := s.boot(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	raw(t, s, s.root+"/meta", []byte(`{"format":2,"buckets":1024}`))
	newer := open(t, Config{Servers: s.client.ensemble.String()})
	if err := newer.Watch(within(t, 20*time.Second), func(store.Update) {}); err == nil || !strings.Contains(err.Error(), "format 2") {
		t.Errorf("Watch: %v, want a refusal that names the format", err)
	}
	if err := newer.Apply(within(t, 10*time.Second), storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1))); err == nil {
		t.Error("a tree of a newer version is written to")
	}
}

func testCredentials(t *testing.T, server *zktest.Server) {
	root := chroot()
	owner := &Auth{Scheme: "digest", Credentials: "proxy:secret"}
	relay := zktest.NewRelay(t, server.Addr())
	s := open(t, Config{Servers: relay.Addr() + root, Auth: owner, ACL: "auth::cdrwa,world:anyone:r"})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	key, err := s.TagKey(within(t, 10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	stranger := open(t, Config{Servers: server.Addr() + root})
	if e, ok, err := stranger.Entry(within(t, 10*time.Second), storetest.Topic(1)); err != nil || !ok || e.Cluster != "a" {
		t.Errorf("the ACL lets everybody read: %v, %v", ok, err)
	}
	if _, err := stranger.TagKey(within(t, 10*time.Second)); !errors.Is(err, zk.ErrNoAuth) {
		t.Errorf("a stranger reads the tag key: %v", err)
	}
	if err := stranger.Apply(within(t, 10*time.Second), storetest.Set(storetest.Topic(2), nil, storetest.Entry(2, "a", 1))); !errors.Is(err, zk.ErrNoAuth) {
		t.Errorf("a stranger writes: %v", err)
	}
	// The credentials are there again after a reconnect.
	relay.Cut()
	await(t, "the loss to be noticed", func() bool { return !s.Status().Connected })
	relay.Restore()
	if again, err := s.TagKey(within(t, 20*time.Second)); err != nil || !slices.Equal(again, key) {
		t.Errorf("TagKey after a reconnect: %v", err)
	}
	// Without an ACL of its own, a store with credentials lets nobody else in.
	closed := chroot()
	s = open(t, Config{Servers: server.Addr() + closed, Auth: owner})
	apply(t, s, storetest.Set(storetest.Topic(1), nil, storetest.Entry(1, "a", 1)))
	stranger = open(t, Config{Servers: server.Addr() + closed, Auth: &Auth{Scheme: "digest", Credentials: "proxy:wrong"}})
	err = stranger.Watch(within(t, 20*time.Second), func(store.Update) {})
	if !errors.Is(err, zk.ErrNoAuth) || !strings.Contains(err.Error(), "credentials") || strings.Contains(err.Error(), "wrong") {
		t.Errorf("Watch with wrong credentials: %v, want an error that names them and does not tell them", err)
	}
}
