package app

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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

// movingCopy is a small file beside the disk copy of the map, with the entries of topics that are prepared or fenced. A proxy must not
// acknowledge an attempt before a restart would know of it, and the whole map is too large to be written for each. An entry
// stays until the copy of the whole map has what became of it: an active one, or one that drains, which the copy of the whole map keeps.
type movingCopy struct {
	path string

	// file is held while the file is written or renamed, and mu never for so long. Who has both takes file first.
	file   sync.Mutex
	writes store.Joint[struct{}] // whoever puts an entry at the same moment shares a write

	mu      sync.Mutex
	entries map[string]route.Entry // guarded by mu: what the file is to hold
	changes uint64                 // guarded by mu: counts what has changed in entries
	written uint64                 // guarded by mu: changes as of what is on the disk
	broken  bool                   // guarded by mu: what is on the disk cannot be used
	aside   bool                   // guarded by mu: nothing is written any more
}

// movingFile is the content: entries and a checksum of their JSON.
type movingFile struct {
	Entries json.RawMessage `json:"entries"`
	Sum     string          `json:"sha256"`
}

func newMovingCopy(dir string) *movingCopy {
	return &movingCopy{path: filepath.Join(dir, "moving-topics"), entries: make(map[string]route.Entry)}
}

// load reads the file and lays its entries over a table that was read from the disk copy of the map.
func (c *movingCopy) load(table *route.Table) (*route.Table, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	raw, err := os.ReadFile(c.path)
	if errors.Is(err, fs.ErrNotExist) {
		return table, nil
	}
	if err != nil {
		return table, err
	}
	broken := func(err error) error {
		c.broken = true
		return fmt.Errorf("the copy of moving topics in %s cannot be used: without it a topic that is being moved could be served by the old map; it is replaced when the map was read from the store: %w", c.path, err)
	}
	var file movingFile
	if err := json.Unmarshal(raw, &file); err != nil {
		return table, broken(err)
	}
	if sum := sha256.Sum256(file.Entries); hex.EncodeToString(sum[:]) != file.Sum {
		return table, broken(errors.New("its checksum does not match"))
	}
	var entries []route.Entry
	if err := json.Unmarshal(file.Entries, &entries); err != nil {
		return table, broken(err)
	}
	for _, e := range entries {
		c.entries[e.Topic] = e
		if have, ok := table.Entry(e.Topic); ok && have.Epoch > e.Epoch {
			continue // it has moved since
		}
		if table, err = table.WithEntry(e.Topic, &e); err != nil {
			return table, broken(err)
		}
	}
	return table, nil
}

// errAside: a process that has left the roster must not say that its disk knows something.
var errAside = errors.New("this proxy is leaving the roster")

// put adds an entry, durably. One that could not be written stays to be written: it is what the map says.
func (c *movingCopy) put(e route.Entry) error {
	c.mu.Lock()
	before, had := c.entries[e.Topic]
	if had && before == e && c.written == c.changes && !c.aside {
		c.mu.Unlock()
		return nil
	}
	c.entries[e.Topic] = e
	c.changes++
	c.mu.Unlock()
	_, err := c.writes.Get(context.Background(), time.Hour, func(context.Context) (struct{}, error) { return struct{}{}, c.write() })
	return err
}

// all is what the file is to hold.
func (c *movingCopy) all() map[string]route.Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.entries)
}

// settle takes out what is over according to table, which is on the disk. known are those that were there before table was taken: an entry that
// came later is not in it yet, and must not be forgotten.
func (c *movingCopy) settle(table *route.Table, known map[string]route.Entry) error {
	c.mu.Lock()
	if c.aside {
		c.mu.Unlock()
		return nil
	}
	over := 0
	for topic, e := range known {
		if have, ok := table.Entry(topic); c.entries[topic] == e && (!ok || have.State == route.StateActive || have.State == route.StateDraining) {
			delete(c.entries, topic)
			c.changes++
			over++
		}
	}
	idle := over == 0 && !c.broken
	c.mu.Unlock()
	if idle {
		return nil
	}
	if err := c.write(); !errors.Is(err, errAside) {
		return err
	}
	return nil
}

// setAside keeps the file from being loaded and written again; takeBack undoes it.
func (c *movingCopy) setAside() error {
	c.file.Lock()
	defer c.file.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.aside = true
	return renameIfThere(c.path, c.path+asideSuffix)
}

func (c *movingCopy) takeBack() error {
	c.file.Lock()
	defer c.file.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.aside = false
	return renameIfThere(c.path+asideSuffix, c.path)
}

// write replaces the file by the entries of this moment.
func (c *movingCopy) write() error {
	c.file.Lock()
	defer c.file.Unlock()
	c.mu.Lock()
	if c.aside {
		c.mu.Unlock()
		return errAside
	}
	all, changes := slices.Collect(maps.Values(c.entries)), c.changes
	c.mu.Unlock()
	entries, err := json.Marshal(all)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(entries)
	raw, err := json.Marshal(movingFile{entries, hex.EncodeToString(sum[:])})
	if err != nil {
		return err
	}
	if err := writeDurably(c.path, raw); err != nil {
		return fmt.Errorf("writing the copy of moving topics: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken, c.written = false, changes
	return nil
}
