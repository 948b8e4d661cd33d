package zk

import (
	"bytes"
	"compress/flate"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"pointsman/core/route"
)

// treeFormat is the layout that this version reads and writes.
const treeFormat = 1

type meta struct {
	Format int `json:"format"`
	// ID is new for each tree: a map that was wiped and begun anew is another one.
	ID string `json:"id"`
	// Buckets is how many buckets the map is cut into.
	Buckets int `json:"buckets"`
}

type storedRules struct {
	Format int          `json:"format"`
	Rules  []route.Rule `json:"rules"`
}

type historyHead struct {
	Segment int64 `json:"segment"`
}

// errTree: the tree is one that this version must not touch.
var errTree = errors.New("the map cannot be used")

// boot makes sure once that the tree exists and has a format that this version knows.
func (s *Store) boot(ctx context.Context) error {
	if s.booted.Load() {
		return nil
	}
	if err := s.bootLock.take(ctx); err != nil {
		return s.client.describe(ctx, "opening the map", err)
	}
	defer s.bootLock.give()
	if s.booted.Load() {
		return nil
	}
	// A follower may not know the tree yet that another proxy has just made.
	if _, err := read(ctx, s.client, "syncing", func(c *zk.Conn) (string, error) { return c.Sync("/") }); err != nil {
		return err
	}
	m, err := s.meta(ctx)
	if err == nil && m == nil {
		if err = s.makeTree(ctx); err == nil {
			m, err = s.meta(ctx)
		}
		if err == nil && m == nil {
			err = s.rootGone(s.root + "/meta")
		}
	}
	for _, later := range []string{"/moving", "/tombstones", "/running", "/documents", "/batches", "/batching"} { // a tree may have been made before there were these
		if err == nil {
			err = s.ensure(ctx, s.root+later, nil, s.acl)
		}
	}
	if err != nil {
		return err
	}
	s.mapID.Store(&m.ID)
	s.booted.Store(true)
	return nil
}

// meta reads and checks the description of the tree; nil when there is none.
func (s *Store) meta(ctx context.Context) (*meta, error) {
	n, err := s.get(ctx, s.root+"/meta")
	if err != nil {
		return nil, err
	}
	return s.parseMeta(n)
}

func (s *Store) parseMeta(n node) (*meta, error) {
	if !n.exists() {
		return nil, nil
	}
	path := s.root + "/meta"
	var m meta
	if err := json.Unmarshal(n.data, &m); err != nil {
		return nil, fmt.Errorf("%w: ZooKeeper %s: %s is damaged: %w", errTree, s.client.ensemble, path, err)
	}
	if m.Format != treeFormat || m.Buckets != route.BucketCount {
		return nil, fmt.Errorf("%w: ZooKeeper %s: %s has format %d with %d buckets, this version knows format %d with %d: run the version that wrote it",
			errTree, s.client.ensemble, path, m.Format, m.Buckets, treeFormat, route.BucketCount)
	}
	return &m, nil
}

// makeTree creates what is missing of the tree, meta last. Several proxies may do it at once.
func (s *Store) makeTree(ctx context.Context) error {
	rules, err := encodeRules(nil)
	if err != nil {
		return err
	}
	type stored struct {
		path string
		data []byte
	}
	var nodes []stored
	for i, r := range s.root {
		if r == '/' && i > 0 {
			nodes = append(nodes, stored{path: s.root[:i]}) // the chroot
		}
	}
	head, err := json.Marshal(historyHead{Segment: 1})
	if err != nil {
		return err
	}
	description, err := json.Marshal(meta{Format: treeFormat, ID: rand.Text(), Buckets: route.BucketCount})
	if err != nil {
		return err
	}
	nodes = append(nodes,
		stored{path: s.root}, stored{s.root + "/rules", rules}, stored{path: s.root + "/routes"},
		stored{path: s.root + "/members"}, stored{path: s.root + "/proxies"}, stored{path: s.root + "/switches"}, stored{s.root + "/running", []byte(runningWhole)},
		stored{s.root + "/history", head}, stored{path: s.segmentPath(1)}, stored{s.root + "/meta", description})
	for _, n := range nodes {
		if err := s.ensure(ctx, n.path, n.data, s.acl); err != nil {
			return err
		}
	}
	return nil
}

// ensure creates a node unless it is there. It looks first: a parent may belong to somebody else, who lets us create
// nothing.
func (s *Store) ensure(ctx context.Context, path string, data []byte, acl []zk.ACL) error {
	n, err := read(ctx, s.client, "reading "+path, func(c *zk.Conn) (bool, error) {
		ok, _, err := c.Exists(path)
		return ok, err
	})
	if err != nil || n {
		return err
	}
	_, err = read(ctx, s.client, "creating "+path, func(c *zk.Conn) (string, error) { return c.Create(path, data, 0, acl) })
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

func (s *Store) segmentPath(segment int64) string {
	return fmt.Sprintf("%s/history/%010d", s.root, segment)
}

func (s *Store) switchPath(id string) string { return s.root + "/switches/" + id }

func (s *Store) runningPath(id string) string { return s.root + "/running/" + id }

// bucketIndex reads the name of a bucket's node.
func bucketIndex(name string) (int, bool) {
	i, err := strconv.Atoi(name)
	return i, err == nil && len(name) == 4 && i >= 0 && i < route.BucketCount && !strings.ContainsAny(name, "+-")
}

func encodeRules(rules []route.Rule) ([]byte, error) {
	return json.Marshal(storedRules{Format: treeFormat, Rules: rules})
}

func decodeRules(src []byte) ([]route.Rule, error) {
	var r storedRules
	if err := json.Unmarshal(src, &r); err != nil {
		return nil, fmt.Errorf("the stored rules are damaged: %w", err)
	}
	if r.Format != treeFormat {
		return nil, fmt.Errorf("the stored rules have format %d and this version knows format %d only: upgrade this proxy", r.Format, treeFormat)
	}
	seen := make(map[string]bool, len(r.Rules))
	for _, rule := range r.Rules {
		if seen[rule.Scope] {
			return nil, fmt.Errorf("the stored rules hold scope %q twice", rule.Scope)
		}
		seen[rule.Scope] = true
	}
	return r.Rules, nil
}

// Values of some size, as those of big changes, are stored deflated behind this byte, which no JSON begins with.
const (
	deflated      = 1
	deflateFrom   = 1024
	maxJSONLength = 64 << 20
)

func encodeJSON(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil || len(text) < deflateFrom {
		return text, err
	}
	out := bytes.NewBuffer([]byte{deflated})
	w, err := flate.NewWriter(out, flate.BestSpeed)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(text); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func decodeJSON(src []byte, v any) error {
	if len(src) > 0 && src[0] == deflated {
		text, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(src[1:])), maxJSONLength))
		if err != nil {
			return fmt.Errorf("the stored value is damaged: %w", err)
		}
		src = text
	}
	if err := json.Unmarshal(src, v); err != nil {
		return fmt.Errorf("the stored value is damaged: %w", err)
	}
	return nil
}
