package zk

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestServersAreReadInEveryForm(t *testing.T) {
	for text, want := range map[string]string{
		"h1:2181":                              "h1:2181",
		"h1":                                   "h1:2181",
		"h1:2181,h2:2182/a/b":                  "h1:2181,h2:2182/a/b",
		" h1:2181 , h2:2182 ":                  "h1:2181,h2:2182",
		"zk:h1:2181,h2:2181/chroot":            "h1:2181,h2:2181/chroot",
		"zk://h1:2181/chroot/":                 "h1:2181/chroot",
		"zk:2181,h2:1/a":                       "zk:2181,h2:1/a",
		"zk":                                   "zk:2181",
		"zk:zk:2181":                           "zk:2181",
		"zk:h1":                                "h1:2181",
		"[::1]:2181,[::2]":                     "[::1]:2181,[::2]:2181",
		"h1:2181/":                             "h1:2181",
		"zk-0.zk.svc.cluster.local,10.0.0.1:1": "zk-0.zk.svc.cluster.local:2181,10.0.0.1:1",
	} {
		if e, err := ParseServers(text); err != nil || e.String() != want {
			t.Errorf("%q: %q, %v; want %q", text, e, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                       "no server",
		"zk:":                    "port",
		"/a":                     "no server",
		"h1,":                    "it is empty",
		"h1:2181/a,h2:2181/a":    "comma",
		"h1;h2":                  "';'",
		"h1:0":                   "port",
		"h1:70000":               "port",
		"h1:x":                   "port",
		":2181":                  "no host",
		"::1":                    "no host:port",
		"h1,h1:2181":             "twice",
		"h1/a//b":                "node name",
		"h1/../b":                "node name",
		"etcd:http://h1:2379":    "service_url",
		"oxia://h1:6648/default": "service_url",
		"user@h1":                "character",
	} {
		if e, err := ParseServers(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v; want an error with %q", text, e, err, want)
		}
	}
}

func FuzzServers(f *testing.F) {
	f.Add("zk:h1:2181,h2:2181/chroot")
	f.Add("[::1]:1,h/a/b")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := ParseServers(text)
		if err != nil {
			return
		}
		again, err := ParseServers(e.String())
		if err != nil || again.Chroot != e.Chroot || !slices.Equal(again.Servers, e.Servers) {
			t.Fatalf("%q reads as %q, which reads as %q, %v", text, e, again, err)
		}
	})
}

func TestConfigurationsThatCannotWorkAreRefused(t *testing.T) {
	for want, cfg := range map[string]Config{
		"no server":        {},
		"two chroots":      {Servers: "h/a", Chroot: "/b"},
		"session time-out": {Servers: "h", SessionTimeout: time.Millisecond},
		"credentials":      {Servers: "h", Auth: &Auth{Scheme: "digest"}},
		"permission":       {Servers: "h", ACL: "world:anyone:x"},
		"scheme:id":        {Servers: "h", ACL: "world"},
		"needs credential": {Servers: "h", ACL: "auth::cdrwa"},
	} {
		if s, err := Open(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cfg, err, want)
			if s != nil {
				_ = s.Close()
			}
		}
	}
}

func TestSecretsAreKeptFromEverybodyWhenThereAreCredentials(t *testing.T) {
	_, secret, err := parseACL("world:anyone:r,digest:x:hash:cdrwa", true)
	if err != nil || len(secret) != 2 || secret[0].Scheme != "digest" || secret[0].ID != "x:hash" || secret[1].Scheme != "auth" {
		t.Errorf("%+v, %v", secret, err)
	}
	acl, _, err := parseACL("world:anyone:rc", false)
	if err != nil || len(acl) != 1 || acl[0].Perms != 1|4 {
		t.Errorf("%+v, %v", acl, err)
	}
}
