// Package golden compares what the code says with files that are reviewed as diffs: whole files of testdata, and parts of the
// documents in docs. Tests call it; `go test PACKAGE -rewrite` writes down what the code says now. It must not be linked into the
// product.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files and the parts of docs anew")

// File compares got with the file of that name in testdata.
func File(t testing.TB, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		write(t, path, got)
	}
	if want := read(t, path); got != want {
		t.Errorf("%s differs (-rewrite writes it down; review the diff); got:\n%s\nwant:\n%s", path, got, want)
	}
}

// Sections compares parts of a document, each between the comments <!-- NAME: ... --> and <!-- /NAME -->, with what they should be.
func Sections(t testing.TB, path string, sections map[string]string) {
	t.Helper()
	text := read(t, path)
	want := text
	for name, section := range sections {
		begin, end := strings.Index(want, "<!-- "+name+":"), strings.Index(want, "<!-- /"+name+" -->")
		if begin < 0 || end < begin {
			t.Fatalf("%s has no section %s", path, name)
		}
		begin += strings.Index(want[begin:], "-->\n") + len("-->\n")
		want = want[:begin] + section + want[end:]
	}
	switch {
	case *rewrite:
		write(t, path, want)
	case want != text:
		t.Errorf("%s is not what the code says; run this test with -rewrite and review the diff", path)
	}
}

func read(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
