package app

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/store"
)

// diskCopy is the last good map on the disk of a proxy whose store is elsewhere: what is served after a restart while
// the store is away, and what need not be read again when it answers. The file is a JSON header line, the stored buckets,
// each with index and length in front, and a SHA-256 of all of it.
type diskCopy struct {
	path   string
	moving *movingCopy

	mu    sync.Mutex // held while the file is replaced or put aside
	aside bool       // guarded by mu: nothing is saved any more
}

type copyHeader struct {
	Format  int          `json:"format"`
	Saved   time.Time    `json:"saved"`
	Digest  string       `json:"digest"`
	Buckets int          `json:"buckets"`
	Rules   []route.Rule `json:"rules"`
	// Unknown are the parts that were never read (route.Table.Unknown).
	Unknown []int `json:"unknown,omitempty"`
	// Map and Versions are a store.Known.
	Map      string         `json:"map,omitempty"`
	Versions map[int]string `json:"versions,omitempty"`
}

// servedMap is a table together with what it was made from.
type servedMap struct {
	table *route.Table
	known store.Known // versions of buckets of table; never of others
}

const copyFormat = 1

func (m servedMap) same(o servedMap) bool {
	return o.table != nil && m.table.Digest() == o.table.Digest() && m.known.Map == o.known.Map && maps.Equal(m.known.Versions, o.known.Versions)
}

// newDiskCopy makes the directory when it is missing.
func newDiskCopy(dir string) (*diskCopy, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state_dir: %w", err)
	}
	return &diskCopy{path: filepath.Join(dir, "last-good-map"), moving: newMovingCopy(dir)}, nil
}

// save replaces the copy, atomically and durably.
func (d *diskCopy) save(m servedMap, now time.Time) error {
	var buckets [][]byte
	for i := range route.BucketCount {
		entries := m.table.Entries(i)
		if len(entries) == 0 {
			continue
		}
		body := store.NewBucket(entries).Append(nil)
		frame := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(nil, uint16(i)), uint32(len(body)))
		buckets = append(buckets, append(frame, body...))
	}
	head, err := json.Marshal(copyHeader{
		Format: copyFormat, Saved: now.UTC(), Digest: m.table.Digest(), Buckets: len(buckets), Rules: m.table.Rules(),
		Unknown: m.table.Unknown(), Map: m.known.Map, Versions: m.known.Versions,
	})
	if err != nil {
		return err
	}
	body := append(append(head, '\n'), slices.Concat(buckets...)...)
	sum := sha256.Sum256(body)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.aside {
		return errAside
	}
	return writeDurably(d.path, append(body, sum[:]...))
}

// asideSuffix is that of a copy which is not loaded.
const asideSuffix = ".left"

// setAside keeps the copy from being loaded again, durably; takeBack undoes it, and discard ends it.
func (d *diskCopy) setAside() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aside = true
	err := errors.Join(renameIfThere(d.path, d.path+asideSuffix), d.moving.setAside())
	return errors.Join(err, syncDir(filepath.Dir(d.path)))
}

func (d *diskCopy) takeBack() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aside = false
	// The small one first: without it the other one must not be loaded.
	if err := d.moving.takeBack(); err != nil {
		return err
	}
	return renameIfThere(d.path+asideSuffix, d.path)
}

func (d *diskCopy) discard() {
	_ = os.Remove(d.path + asideSuffix)
	_ = os.Remove(d.moving.path + asideSuffix)
}

func renameIfThere(from, to string) error {
	if err := os.Rename(from, to); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// load reads the copy; a nil table means that there is none.
func (d *diskCopy) load() (servedMap, time.Time, error) {
	raw, err := os.ReadFile(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return servedMap{}, time.Time{}, nil
	}
	if err != nil {
		return servedMap{}, time.Time{}, err
	}
	m, saved, err := parseCopy(raw)
	if err != nil {
		return servedMap{}, time.Time{}, fmt.Errorf("the last good map in %s cannot be used (remove the file to start without it): %w", d.path, err)
	}
	return m, saved, nil
}

func parseCopy(raw []byte) (servedMap, time.Time, error) {
	if len(raw) < sha256.Size {
		return servedMap{}, time.Time{}, errors.New("it is cut off")
	}
	body := raw[:len(raw)-sha256.Size]
	if sum := sha256.Sum256(body); string(sum[:]) != string(raw[len(body):]) {
		return servedMap{}, time.Time{}, errors.New("its checksum does not match")
	}
	end := slices.Index(body, '\n')
	if end < 0 {
		return servedMap{}, time.Time{}, errors.New("it has no header")
	}
	var head copyHeader
	if err := json.Unmarshal(body[:end], &head); err != nil {
		return servedMap{}, time.Time{}, fmt.Errorf("header: %w", err)
	}
	if head.Format != copyFormat {
		return servedMap{}, time.Time{}, fmt.Errorf("format %d, this version knows %d", head.Format, copyFormat)
	}
	body = body[end+1:]
	buckets := make(map[int][]route.Entry, head.Buckets)
	for range head.Buckets {
		if len(body) < 6 || len(body)-6 < int(binary.BigEndian.Uint32(body[2:])) {
			return servedMap{}, time.Time{}, errors.New("a bucket is cut off")
		}
		index, size := int(binary.BigEndian.Uint16(body)), int(binary.BigEndian.Uint32(body[2:]))
		bucket, err := store.DecodeBucket(index, body[6:6+size])
		if err != nil {
			return servedMap{}, time.Time{}, err
		}
		buckets[index] = bucket.Entries()
		body = body[6+size:]
	}
	table, _, err := route.Empty().With(buckets, &head.Rules)
	if err != nil {
		return servedMap{}, time.Time{}, err
	}
	if len(head.Unknown) > 0 {
		for _, part := range head.Unknown {
			if part < route.RulesBucket || part >= route.BucketCount {
				return servedMap{}, time.Time{}, fmt.Errorf("there is no part %d of a map", part)
			}
		}
		table = table.WithUnknown(head.Unknown...)
	}
	if table.Digest() != head.Digest {
		return servedMap{}, time.Time{}, fmt.Errorf("its content has digest %s, its header says %s", table.Digest(), head.Digest)
	}
	return servedMap{table, store.Known{Map: head.Map, Versions: head.Versions}}, head.Saved, nil
}

// writeDurably replaces a file so that a crash leaves the old or the new one.
func writeDurably(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}
