package store

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDocumentsOfAFileStoreOutliveTheProcess(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	f, err := OpenFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []Document{{Name: "a", Rev: 1, Data: []byte("one")}, {Name: "a", Rev: 2, Data: []byte("two")}, {Name: "gone", Rev: 1}} {
		if err := f.PutDocument(ctx, "seen", d); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.DropDocument(ctx, "seen", "gone"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(dir, documentsDir, "seen@b"+temporaryEnd)
	if err := os.WriteFile(left, []byte("half of a wri"), 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err = OpenFile(dir); err != nil {
		t.Fatal(err)
	}
	got, err := f.Documents(ctx, "seen")
	if err != nil || len(got) != 1 || got[0].Rev != 2 || string(got[0].Data) != "two" {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("what an interrupted write has left is still there: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}

	path := filepath.Join(dir, documentsDir, "seen@a")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)-1] ^= 1
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err = OpenFile(dir); err == nil {
		_ = f.Close()
		t.Fatal("a damaged document is taken")
	}
	if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("the error does not name the file and the remedy: %v", err)
	}
}
