package zk

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/internal/zktest"
	"pointsman/store"
)

func TestMembers(t *testing.T) {
	server := zktest.Start(t)
	for name, test := range map[string]func(*testing.T, *zktest.Server){
		"two processes under one id do not fight":                                               testSameID,
		"an announcement that was removed comes back":                                           testAnnouncementRemoved,
		"the process before is not the one that the member node names":                          testOldAnnouncement,
		"a proxy that comes back is not forgotten, nor announced without a place on the roster": testForgetAgainstRegister,
		"tombstones are dropped when they are of no use":                                        testTombstonesAge,
	} {
		t.Run(name, func(t *testing.T) { test(t, server) })
	}
}

func testSameID(t *testing.T, server *zktest.Server) {
	root := chroot()
	one := open(t, Config{Servers: server.Addr() + root})
	two := open(t, Config{Servers: server.Addr() + root})
	if err := one.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	if err := two.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "2"}); err != nil {
		t.Fatal(err)
	}
	if err := one.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("the one that was replaced: %v, want an error that says so", err)
	}
	proxies, err := two.Proxies(within(t, 10*time.Second))
	if err != nil || len(proxies) != 1 || proxies[0].Incarnation != "2" || !proxies[0].Live {
		t.Errorf("Proxies: %+v, %v", proxies, err)
	}
}

func testAnnouncementRemoved(t *testing.T, server *zktest.Server) {
	s := open(t, Config{Servers: server.Addr() + chroot()})
	if err := s.Register(within(t, 10*time.Second), store.Proxy{ID: "p", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	if err := s.delete(within(t, 10*time.Second), s.root+"/proxies/p"); err != nil {
		t.Fatal(err)
	}
	await(t, "the announcement", func() bool {
		proxies, err := s.Proxies(within(t, 10*time.Second))
		return err == nil && len(proxies) == 1 && proxies[0].Live
	})
}

// testOldAnnouncement: what is announced is the process before the one that the member node names.
func testOldAnnouncement(t *testing.T, server *zktest.Server) {
	root := chroot()
	old, next := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	register(t, old, "p", "1")
	raw(t, next, next.root+"/members/p", []byte(`{"id":"p","incarnation":"2"}`)) // as far as the second has come
	proxies, err := next.Proxies(within(t, 10*time.Second))
	if err != nil || len(proxies) != 1 || proxies[0].Incarnation != "2" || proxies[0].Live {
		t.Errorf("Proxies: %+v, %v; want the second process, which is not live yet", proxies, err)
	}
	if err := next.Forget(within(t, 10*time.Second), "p"); !errors.Is(err, store.ErrLive) {
		t.Errorf("Forget: %v, want ErrLive while somebody is connected under that id", err)
	}
	register(t, next, "p", "2")
	if proxies, err = old.Proxies(within(t, 10*time.Second)); err != nil || len(proxies) != 1 || !proxies[0].Live {
		t.Errorf("Proxies: %+v, %v; want the second process, live", proxies, err)
	}
}

// awaitGone waits until nobody is announced under an id: a Close does not wait for a server that is slow.
func awaitGone(t *testing.T, s *Store, id string) {
	t.Helper()
	await(t, "the announcement of "+id+" to go", func() bool {
		n, err := s.get(within(t, 10*time.Second), s.root+"/proxies/"+id)
		return err == nil && !n.exists()
	})
}

// testForgetAgainstRegister lets a proxy come back, or a forget happen, between the reading and the writing of the other.
func testForgetAgainstRegister(t *testing.T, server *zktest.Server) {
	root := chroot()
	gone, s := open(t, Config{Servers: server.Addr() + root}), open(t, Config{Servers: server.Addr() + root})
	register(t, gone, "p", "1")
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	awaitGone(t, s, "p")
	w := &forgetting{s: s, id: "p"}
	if err := w.look(within(t, 10*time.Second)); err != nil || w.conflict() != nil {
		t.Fatal(err, w.conflict())
	}
	ops, err := w.ops()
	if err != nil {
		t.Fatal(err)
	}
	back := open(t, Config{Servers: server.Addr() + root})
	register(t, back, "p", "1")
	_, err = call(within(t, 10*time.Second), s.client, func(conn *zk.Conn) ([]zk.MultiResponse, error) { return conn.Multi(ops...) })
	if !errors.Is(err, zk.ErrNodeExists) {
		t.Errorf("a forget that comes after the registration: %v, want that it is not carried out", err)
	}
	// The other way round: the member node goes before the announcement is made.
	for _, node := range []string{"/members/p", "/proxies/p"} {
		if err := s.delete(within(t, 10*time.Second), s.root+node); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "the member to be back with its announcement", func() bool {
		n, err := s.get(within(t, 10*time.Second), s.root+"/members/p")
		if err != nil || !n.exists() {
			return false
		}
		proxies, err := s.Proxies(within(t, 10*time.Second))
		return err == nil && len(proxies) == 1 && proxies[0].Live
	})
}

func testTombstonesAge(t *testing.T, server *zktest.Server) {
	root := chroot()
	s := open(t, Config{Servers: server.Addr() + root})
	forget := func(id string) {
		t.Helper()
		other := open(t, Config{Servers: server.Addr() + root})
		register(t, other, id, "1")
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
		awaitGone(t, s, id)
		if err := s.Forget(within(t, 10*time.Second), id); err != nil {
			t.Fatal(err)
		}
	}
	forget("p-1")
	forget("p-1") // it came back, under the same incarnation
	old := store.Tombstone{ID: "p-0", Incarnation: "1", At: time.Now().Add(-store.TombstoneKept - time.Minute)}
	data, err := json.Marshal(old)
	if err != nil {
		t.Fatal(err)
	}
	raw(t, s, s.root+"/tombstones/p-0@1", data)
	if tombs, err := s.Tombstones(within(t, 10*time.Second)); err != nil || len(tombs) != 2 || tombs[0].ID != "p-0" {
		t.Errorf("Tombstones: %+v, %v; want the old one first", tombs, err)
	}
	forget("p-2")
	tombs, err := s.Tombstones(within(t, 10*time.Second))
	if err != nil || len(tombs) != 2 || tombs[0].ID != "p-1" || tombs[1].ID != "p-2" {
		t.Errorf("Tombstones: %+v, %v; want those of p-1 and p-2", tombs, err)
	}
}
