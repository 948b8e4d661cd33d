package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A Document is a value of its own beside the map: what the leader has last seen of a cluster, or an order that its successor goes on
// with. Nothing of the map depends on one.
type Document struct {
	Name string
	// Rev counts the writes: revision 1 creates, revision n replaces n−1 and nothing else.
	Rev  uint64
	Data []byte
}

// MaxDocument is the largest Document.Data, so that it fits into one node of ZooKeeper.
const MaxDocument = 192 << 10

// CheckDocument tells why a store cannot keep d.
func CheckDocument(kind string, d Document) error {
	for what, name := range map[string]string{"kind of a document": kind, "document": d.Name} {
		if err := CheckID(what, name); err != nil {
			return err
		}
		if strings.Contains(name, "@") {
			return fmt.Errorf("%s %q: want none with '@' in it", what, name)
		}
	}
	switch {
	case d.Rev == 0:
		return fmt.Errorf("document %s/%s: revisions count from 1", kind, d.Name)
	case len(d.Data) > MaxDocument:
		return fmt.Errorf("document %s/%s: %w: %d bytes, at most %d", kind, d.Name, ErrTooLarge, len(d.Data), MaxDocument)
	}
	return nil
}

// DocumentConflict tells why d must not be written over have; nil when it may. have.Rev is 0 when there is none.
func DocumentConflict(kind string, d, have Document) error {
	if d.Rev == have.Rev+1 {
		return nil
	}
	return &ConflictError{Name: "document " + kind + "/" + d.Name, Want: fmt.Sprintf("revision %d", d.Rev-1), Have: fmt.Sprintf("revision %d", have.Rev)}
}

// Encode is the stored form of a document.
func (d Document) Encode() []byte {
	return append(binary.BigEndian.AppendUint64(nil, d.Rev), d.Data...)
}

// DecodeDocument reads what Encode has made.
func DecodeDocument(kind, name string, src []byte) (Document, error) {
	if len(src) < 8 {
		return Document{}, fmt.Errorf("document %s/%s is damaged: it has %d bytes", kind, name, len(src))
	}
	return Document{Name: name, Rev: binary.BigEndian.Uint64(src), Data: bytes.Clone(src[8:])}, nil
}

// Same tells whether have is what was written as d: a write whose answer was lost was carried out.
func (d Document) Same(have Document) bool {
	return d.Rev == have.Rev && bytes.Equal(d.Data, have.Data)
}

// The documents of a core, by kind and name; guarded by mu.

func (c *core) documents(kind string) []Document {
	all := make([]Document, 0, len(c.docs[kind]))
	for _, d := range c.docs[kind] {
		d.Data = bytes.Clone(d.Data)
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b Document) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (c *core) putDocument(kind string, d Document) {
	if c.docs[kind] == nil {
		c.docs[kind] = map[string]Document{}
	}
	d.Data = bytes.Clone(d.Data)
	c.docs[kind][d.Name] = d
}

// Documents implements Store.
func (m *Memory) Documents(ctx context.Context, kind string) ([]Document, error) {
	if err := m.begin(ctx, "Documents"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.documents(kind), nil
}

// PutDocument implements Store.
func (m *Memory) PutDocument(ctx context.Context, kind string, d Document) error {
	if err := CheckDocument(kind, d); err != nil {
		return err
	}
	if err := m.begin(ctx, "PutDocument"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	if err := DocumentConflict(kind, d, m.core.docs[kind][d.Name]); err != nil {
		return err
	}
	m.core.putDocument(kind, d)
	return m.answer("PutDocument")
}

// DropDocument implements Store.
func (m *Memory) DropDocument(ctx context.Context, kind, name string) error {
	if err := m.begin(ctx, "DropDocument"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	delete(m.core.docs[kind], name)
	return nil
}

// documentsDir is the directory of a file store that holds the documents, one a file, outside of the journal: they are written
// often, and are no history.
const documentsDir = "documents"

// Documents implements Store.
func (f *File) Documents(ctx context.Context, kind string) ([]Document, error) {
	if err := f.begin(ctx); err != nil {
		return nil, err
	}
	defer f.core.mu.Unlock()
	return f.core.documents(kind), nil
}

// PutDocument implements Store.
func (f *File) PutDocument(ctx context.Context, kind string, d Document) error {
	if err := CheckDocument(kind, d); err != nil {
		return err
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	if err := DocumentConflict(kind, d, f.core.docs[kind][d.Name]); err != nil {
		return err
	}
	dir := filepath.Join(f.dir, documentsDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("map store %s: %w", f.dir, err)
	}
	if err := writeFile(dir, kind+"@"+d.Name, func(w io.Writer) error {
		_, err := w.Write(appendFrame(nil, d.Encode()))
		return err
	}); err != nil {
		return fmt.Errorf("map store %s: %w", f.dir, err)
	}
	f.core.putDocument(kind, d)
	return nil
}

// DropDocument implements Store.
func (f *File) DropDocument(ctx context.Context, kind, name string) error {
	if err := f.begin(ctx); err != nil {
		return err
	}
	defer f.core.mu.Unlock()
	if _, ok := f.core.docs[kind][name]; !ok {
		return nil
	}
	if err := os.Remove(filepath.Join(f.dir, documentsDir, kind+"@"+name)); err != nil {
		return fmt.Errorf("map store %s: %w", f.dir, err)
	}
	delete(f.core.docs[kind], name)
	return nil
}

// loadDocuments reads what PutDocument has written; what an interrupted write has left is removed.
func (f *File) loadDocuments() error {
	dir := filepath.Join(f.dir, documentsDir)
	files, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, file := range files {
		path := filepath.Join(dir, file.Name())
		if strings.HasSuffix(path, temporaryEnd) {
			if err := os.Remove(path); err != nil {
				return err
			}
			continue
		}
		kind, name, ok := strings.Cut(file.Name(), "@")
		if !ok {
			continue // nobody's
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var d Document
		_, clean, _, err := readFrames(text, func(payload []byte) (err error) {
			d, err = DecodeDocument(kind, name, payload)
			return err
		})
		if err != nil || !clean || d.Rev == 0 {
			return fmt.Errorf("%s is damaged; remove it (errors: %v): what was seen is seen again, and an order that it held is forgotten", path, err)
		}
		f.core.putDocument(kind, d)
	}
	return nil
}
