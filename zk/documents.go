package zk

import (
	"context"
	"slices"
	"strings"

	"github.com/go-zookeeper/zk"

	"pointsman/store"
)

func (s *Store) documentPath(kind, name string) string {
	return s.root + "/documents/" + kind + "/" + name
}

// Documents implements store.Store.
func (s *Store) Documents(ctx context.Context, kind string) ([]store.Document, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.fresh(ctx); err != nil {
		return nil, err
	}
	if err := store.CheckDocument(kind, store.Document{Name: "any", Rev: 1}); err != nil {
		return nil, err
	}
	names, err := s.children(ctx, s.root+"/documents/"+kind)
	if err != nil {
		return nil, err
	}
	all := make([]store.Document, len(names))
	err = parallel(len(names), func(i int) error {
		n, err := s.get(ctx, s.documentPath(kind, names[i]))
		if err != nil || !n.exists() {
			return err
		}
		all[i], err = store.DecodeDocument(kind, names[i], n.data)
		return err
	})
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(d store.Document) bool { return d.Rev == 0 }) // removed meanwhile
	slices.SortFunc(all, func(a, b store.Document) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// PutDocument implements store.Store.
func (s *Store) PutDocument(ctx context.Context, kind string, d store.Document) error {
	if err := store.CheckDocument(kind, d); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	if d.Rev == 1 {
		if err := s.ensure(ctx, s.root+"/documents/"+kind, nil, s.acl); err != nil {
			return err
		}
	}
	return s.write(ctx, "writing document "+kind+"/"+d.Name, &documentWrite{s: s, kind: kind, document: d})
}

// documentWrite is a PutDocument.
type documentWrite struct {
	s        *Store
	kind     string
	document store.Document
	node     node
	have     store.Document // what it holds
}

func (w *documentWrite) path() string { return w.s.documentPath(w.kind, w.document.Name) }

func (w *documentWrite) look(ctx context.Context) (err error) {
	if err := w.s.sync(ctx); err != nil {
		return err
	}
	w.have = store.Document{}
	if w.node, err = w.s.get(ctx, w.path()); err != nil || !w.node.exists() {
		return err
	}
	w.have, err = store.DecodeDocument(w.kind, w.document.Name, w.node.data)
	return err
}

func (w *documentWrite) done() bool { return w.document.Same(w.have) }

func (w *documentWrite) conflict() error {
	return store.DocumentConflict(w.kind, w.document, w.have)
}

func (w *documentWrite) ops() ([]any, error) {
	if !w.node.exists() {
		return []any{&zk.CreateRequest{Path: w.path(), Data: w.document.Encode(), Acl: w.s.acl}}, nil
	}
	return []any{&zk.SetDataRequest{Path: w.path(), Data: w.document.Encode(), Version: w.node.stat.Version}}, nil
}

func (w *documentWrite) written([]zk.MultiResponse, []any) {}

// DropDocument implements store.Store.
func (s *Store) DropDocument(ctx context.Context, kind, name string) error {
	if err := store.CheckDocument(kind, store.Document{Name: name, Rev: 1}); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	return s.delete(ctx, s.documentPath(kind, name))
}
