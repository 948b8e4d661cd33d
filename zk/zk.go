// Package zk keeps the map in ZooKeeper (Open) and learns the brokers of Pulsar clusters from theirs (Discover).
// internal/app calls it. It is the only package that knows a ZooKeeper client; it must never meet netio, and never
// decide anything from what it stores.
//
// Each ensemble has one connection of its own, so that one that hangs delays no other.
package zk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
	"pointsman/store"
)

// DefaultSessionTimeout is asked for when the configuration names none. The server may grant another one.
const DefaultSessionTimeout = 15 * time.Second

// minSessionTimeout: below it the library, which counts in thirds of it, and a garbage collection get in each other's way.
const minSessionTimeout = time.Second

// Auth are credentials that are presented to ZooKeeper, for example scheme "digest", credentials "user:password".
type Auth struct {
	Scheme, Credentials string
}

// Config is how to reach the map in ZooKeeper.
type Config struct {
	Servers        string // "h1:2181,h2:2181", optionally followed by a chroot
	Chroot         string // "" or "/a/b"; may not be given twice
	SessionTimeout time.Duration
	Auth           *Auth
	// ACL is that of created nodes: "scheme:id:permissions", comma-separated, permissions out of "cdrwa". Empty: with
	// credentials only their owner ("auth::cdrwa"), otherwise everybody ("world:anyone:cdrwa").
	ACL    string
	Logger *slog.Logger // nil: slog.Default

	resolve func(ctx context.Context, host string) ([]string, error) // of tests; nil: the system's resolver
}

// Store is the map in ZooKeeper, under /pointsman below the chroot:
//
//	meta                     {"format":1,"id":…}: written last when the tree is made, so where it is the tree is whole
//	rules                    all rules
//	routes/0000 … 1023       the buckets (store.Bucket); a node exists from the first entry of its bucket on
//	moving/0000 … 1023       entries that are not active (store.Bucket); a node exists only while there are any
//	members/<proxy>          persistent: the roster
//	proxies/<proxy>          ephemeral: who is connected, with its incarnation
//	tombstones/<proxy>@<incarnation>  members that were forgotten
//	leader                   ephemeral: who leads
//	running/<id>             empty; there while the record of that switch is not over
//	switches/<id>            record; acks/<attempt>-<phase>-<proxy>@<incarnation> below it
//	batches/<id>             record of a batch; <part> below it, its topics
//	batching/<id>            empty; there while the record of that batch is not over
//	history                  {"segment":n}: the segment that is written to
//	history/<segment>/<c|s|r>-<seq>  changes; "s" those that made a switch, "r" switches that were made without one
//	documents/<kind>/<name>  values that are no part of the map (store.Document)
//	tagkey                   the key for tagged broker addresses; never readable by everybody when there are credentials
//
// Without credentials everybody who reaches the ensemble can read the tag key and so forge tagged addresses: then keep
// the key in a file of its own.
type Store struct {
	client    *client
	root      string
	acl       []zk.ACL
	secretACL []zk.ACL
	log       *slog.Logger

	bootLock lock // one boot at a time
	booted   atomic.Bool
	mapID    atomic.Pointer[string] // meta's id, once booted
	indexed  atomic.Bool            // every switch that is not over has its node in running

	syncs      store.Joint[struct{}] // whoever wants to read what is there now, at the same moment
	registrar  registrar
	written    atomic.Int64 // history bytes that this store has written into segment
	segment    atomic.Int64
	trimming   atomic.Bool
	background sync.WaitGroup

	closing   context.Context // ends with the beginning of Close
	stop      context.CancelFunc
	leading   sync.RWMutex // read-locked by each Lead
	closeOnce sync.Once
}

// Open prepares the store and connects in the background: it fails only for a configuration that can never work.
// While there is no ensemble, operations fail with store.ErrUnavailable by their deadline.
func Open(_ context.Context, cfg Config) (*Store, error) {
	e, err := ParseServers(cfg.Servers)
	if err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	if e.Chroot, err = oneChroot(e.Chroot, cfg.Chroot); err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	timeout := cfg.SessionTimeout
	if timeout == 0 {
		timeout = DefaultSessionTimeout
	}
	if timeout < minSessionTimeout {
		return nil, fmt.Errorf("map store: session time-out %s: want at least %s", timeout, minSessionTimeout)
	}
	if cfg.Auth != nil && (cfg.Auth.Scheme == "" || cfg.Auth.Credentials == "") {
		return nil, errors.New("map store: ZooKeeper credentials need both a scheme and a value, for example digest and user:password")
	}
	acl, secret, err := parseACL(cfg.ACL, cfg.Auth != nil)
	if err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	log := cfg.Logger
	if log == nil {
		log = slog.Default()
	}
	c, err := newClient(e, timeout, cfg.Auth, log, cfg.resolve)
	if err != nil {
		return nil, fmt.Errorf("map store: %w", err)
	}
	s := &Store{client: c, root: e.Chroot + "/pointsman", acl: acl, secretACL: secret, log: c.log, bootLock: make(lock, 1)}
	s.registrar = registrar{changed: make(chan struct{}, 1), lock: make(lock, 1)}
	s.closing, s.stop = context.WithCancel(context.Background())
	s.background.Add(2)
	go func() {
		defer s.background.Done()
		s.keepRegistered()
	}()
	go func() {
		defer s.background.Done()
		s.keepLease()
	}()
	return s, nil
}

// Close implements store.Store. The registration ends with the session; the membership stays.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		s.stop()
		s.awaitLeads()
		s.client.lease.ended()
		s.client.close()
		s.background.Wait()
	})
	return nil
}

// awaitLeads gives those that lead the time to end before the session does, which would let somebody else lead.
func (s *Store) awaitLeads() {
	ended := make(chan struct{})
	go func() {
		s.leading.Lock()
		defer s.leading.Unlock()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(leadRelease):
		s.log.Error("the leader does not end; the store is closed without waiting for it", "after", leadRelease)
	}
}

// Status implements store.Store.
func (s *Store) Status() store.Status {
	connected, contact := s.client.status()
	return store.Status{Kind: "zookeeper", Connected: connected, Contact: contact, Detail: s.client.ensemble.String() + ": " + s.client.detail()}
}

// Entry implements store.Store.
func (s *Store) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	index := route.Bucket(topic)
	if err := s.boot(ctx); err != nil {
		return route.Entry{}, false, err
	}
	var e route.Entry
	var ok bool
	err := s.synced(ctx, func() error {
		m, err := s.moving(ctx, index)
		if err != nil {
			return err
		}
		if e, ok = m.entry(topic); ok {
			return nil
		}
		b, _, err := s.bucket(ctx, index)
		if err == nil && b != nil {
			e, ok = b.Entry(topic)
		}
		return err
	})
	return e, ok, err
}

// Entries implements store.Store.
func (s *Store) Entries(ctx context.Context) ([]route.Entry, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	var all []route.Entry
	err := s.synced(ctx, func() (err error) {
		all, err = s.entries(ctx)
		return err
	})
	return all, err
}

func (s *Store) entries(ctx context.Context) ([]route.Entry, error) {
	moving, err := s.allMoving(ctx)
	if err != nil {
		return nil, err
	}
	names, err := s.children(ctx, s.root+"/routes")
	if err != nil {
		return nil, err
	}
	buckets := make([][]route.Entry, len(names))
	err = parallel(len(names), func(i int) error {
		index, ok := bucketIndex(names[i])
		if !ok {
			return nil // not ours
		}
		b, _, err := s.bucket(ctx, index)
		if err == nil {
			buckets[i] = moving[index].over(b)
		}
		return err
	})
	return slices.Concat(buckets...), err
}

// Rules implements store.Store.
func (s *Store) Rules(ctx context.Context) ([]route.Rule, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	rules, _, err := s.rules(ctx)
	return rules, err
}

// fresh makes sure that the tree exists and that what is read next on this session is no older than now.
func (s *Store) fresh(ctx context.Context) error {
	if err := s.boot(ctx); err != nil {
		return err
	}
	return s.sync(ctx)
}

// node is a stored value. A node that does not exist has a nil stat.
type node struct {
	data []byte
	stat *zk.Stat
}

func (n node) exists() bool { return n.stat != nil }

func (s *Store) get(ctx context.Context, path string) (node, error) { return s.client.get(ctx, path) }

func (c *client) get(ctx context.Context, path string) (node, error) {
	n, err := read(ctx, c, "reading "+path, func(conn *zk.Conn) (node, error) {
		data, stat, err := conn.Get(path)
		return node{data, stat}, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return node{}, nil
	}
	return n, err
}

// children lists a node's children; none when it does not exist.
func (s *Store) children(ctx context.Context, path string) ([]string, error) {
	names, err := read(ctx, s.client, "listing "+path, func(c *zk.Conn) ([]string, error) {
		names, _, err := c.Children(path)
		return names, err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	return names, err
}

// bucket reads a bucket; nil when it has no entries.
func (s *Store) bucket(ctx context.Context, index int) (*store.Bucket, *zk.Stat, error) {
	n, err := s.get(ctx, s.bucketPath(index))
	if err != nil || !n.exists() {
		return nil, nil, err
	}
	b, err := store.DecodeBucket(index, n.data)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", s.bucketPath(index), err)
	}
	return b, n.stat, nil
}

func (s *Store) rules(ctx context.Context) ([]route.Rule, *zk.Stat, error) {
	path := s.root + "/rules"
	n, err := s.get(ctx, path)
	if err != nil {
		return nil, nil, err
	}
	if !n.exists() {
		return nil, nil, s.rootGone(path)
	}
	rules, err := decodeRules(n.data)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return rules, n.stat, nil
}

func (s *Store) rootGone(path string) error {
	return fmt.Errorf("ZooKeeper %s: %s is gone although the map was there before: restore it from a backup, or restart the proxies "+
		"to begin with an empty map", s.client.ensemble, path)
}

func (s *Store) bucketPath(index int) string { return fmt.Sprintf("%s/routes/%04d", s.root, index) }

// parallel calls f for 0 to n-1, some at a time, and returns the first error.
func parallel(n int, f func(i int) error) error {
	var next atomic.Int64
	var group sync.WaitGroup
	var once sync.Once
	var first error
	for range min(n, maxInFlight/2) {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					once.Do(func() { first = err })
					next.Store(int64(n))
				}
			}
		}()
	}
	group.Wait()
	return first
}

// lock is a mutex for holders that talk to the ensemble: whoever waits for it keeps to a deadline. Capacity 1.
type lock chan struct{}

func (l lock) take(ctx context.Context) error {
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l lock) give() { <-l }

func withDefaultTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, store.DefaultTimeout)
}

func oneChroot(inServers, given string) (string, error) {
	given, err := cleanChroot(given)
	if err != nil {
		return "", err
	}
	switch {
	case given == "":
		return inServers, nil
	case inServers != "" && inServers != given:
		return "", fmt.Errorf("two chroots are given, %q after the servers and %q: drop one", inServers, given)
	}
	return given, nil
}

// parseACL reads Config.ACL. The second list is for secrets: without the entries for everybody when there are
// credentials, whose owner can always read it.
func parseACL(text string, credentials bool) (acl, secret []zk.ACL, err error) {
	if text == "" {
		if !credentials {
			return zk.WorldACL(zk.PermAll), zk.WorldACL(zk.PermAll), nil
		}
		return zk.AuthACL(zk.PermAll), zk.AuthACL(zk.PermAll), nil
	}
	const letters = "rwcda" // in the order of the bits
	for _, part := range strings.Split(text, ",") {
		part = strings.TrimSpace(part)
		scheme, rest, ok := strings.Cut(part, ":")
		last := strings.LastIndexByte(rest, ':')
		if !ok || last < 0 || scheme == "" || rest[last+1:] == "" {
			return nil, nil, fmt.Errorf("ACL %q: want scheme:id:permissions, for example world:anyone:r or auth::cdrwa", part)
		}
		a := zk.ACL{Scheme: scheme, ID: rest[:last]}
		for _, letter := range rest[last+1:] {
			bit := strings.IndexRune(letters, letter)
			if bit < 0 {
				return nil, nil, fmt.Errorf("ACL %q: permission %q is none of c, d, r, w, a", part, string(letter))
			}
			a.Perms |= 1 << bit
		}
		if scheme == "auth" && !credentials {
			return nil, nil, fmt.Errorf("ACL %q: scheme auth needs credentials", part)
		}
		acl = append(acl, a)
		if credentials && scheme != "world" {
			secret = append(secret, a)
		}
	}
	switch {
	case !credentials:
		secret = acl
	case !slices.ContainsFunc(secret, func(a zk.ACL) bool { return a.Scheme == "auth" }):
		secret = append(secret, zk.AuthACL(zk.PermAll)...)
	}
	return acl, secret, nil
}

var (
	_ store.Store   = (*Store)(nil)
	_ store.Resumer = (*Store)(nil)
)
