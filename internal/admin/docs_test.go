package admin_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"pointsman/internal/golden"
)

// docsPath is the reference of the control API. Its lists of codes and types are written from the source, so neither can have
// what the other lacks.
const docsPath = "../../docs/cli.md"

func TestTheReferenceListsExactlyTheCodesAndTypesThereAre(t *testing.T) {
	fset := token.NewFileSet()
	var codes, types strings.Builder
	codes.WriteString("| code | HTTP status: meaning |\n|---|---|\n")
	for _, file := range []string{"api.go", "../../store/store.go", "../../core/switching/record.go", "../../core/switching/preflight.go", "fleet.go", "../../core/switching/batch.go"} {
		f, err := parser.ParseFile(fset, file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range f.Decls {
			g, ok := decl.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range g.Specs {
				switch spec := spec.(type) {
				case *ast.ValueSpec:
					if len(spec.Values) == 1 && file == "api.go" && strings.HasPrefix(spec.Names[0].Name, "Code") {
						code, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
						if err != nil {
							t.Fatal(err)
						}
						fmt.Fprintf(&codes, "| `%s` | %s |\n", code, comment(spec.Comment))
					}
				case *ast.TypeSpec:
					if s, ok := spec.Type.(*ast.StructType); ok && (file == "api.go" || file == "fleet.go" || wanted[spec.Name.Name]) {
						writeType(t, &types, fset, spec.Name.Name, comment(g.Doc), s)
					}
				}
			}
		}
	}
	golden.Sections(t, docsPath, map[string]string{"codes": codes.String(), "types": types.String()})
}

// wanted are the types of other packages that the API embeds.
var wanted = map[string]bool{"Batch": true, "BatchLimits": true, "BatchPause": true, "BatchCount": true, "BatchForecast": true, "Proxy": true, "Record": true, "Ack": true, "Member": true, "Receipt": true, "StepTime": true, "Carried": true, "After": true, "Preflight": true, "Finding": true, "Forecast": true, "Left": true, "Moved": true, "Draining": true}

func writeType(t *testing.T, b *strings.Builder, fset *token.FileSet, name, doc string, s *ast.StructType) {
	t.Helper()
	fmt.Fprintf(b, "**%s**: %s\n\n| field | type | meaning |\n|---|---|---|\n", name, strings.TrimPrefix(strings.TrimPrefix(doc, name+" "), "is "))
	for _, f := range s.Fields.List {
		var kind bytes.Buffer
		if err := printer.Fprint(&kind, fset, f.Type); err != nil {
			t.Fatal(err)
		}
		typ := strings.ReplaceAll(regexp.MustCompile(`\b(store|switching)\.`).ReplaceAllString(kind.String(), ""), "|", `\|`)
		if len(f.Names) == 0 {
			fmt.Fprintf(b, "| all fields of %s | | |\n", typ)
			continue
		}
		tag, err := strconv.Unquote(f.Tag.Value)
		if err != nil {
			t.Fatal(err)
		}
		key, options, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		if key == "-" {
			continue // not told
		}
		if strings.HasPrefix(options, "omit") {
			typ += ", may be absent"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", key, typ, strings.TrimSpace(comment(f.Doc)+" "+comment(f.Comment)))
	}
	b.WriteString("\n")
}

// comment is a comment group in one line of a table.
func comment(c *ast.CommentGroup) string {
	return strings.ReplaceAll(strings.Join(strings.Fields(c.Text()), " "), "|", `\|`)
}

// Each path in the reference is answered, and each path that is answered is in the reference.
func TestTheReferenceListsExactlyThePathsThereAre(t *testing.T) {
	text, err := os.ReadFile(docsPath)
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("admin.go")
	if err != nil {
		t.Fatal(err)
	}
	listed, served := map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `((?:GET|POST) /[^`]*)`").FindAllSubmatch(text, -1) {
		listed[string(m[1])] = true
	}
	for _, m := range regexp.MustCompile(`mux\.Handle(?:Func)?\("((?:GET|POST) /[^"]*)"`).FindAllSubmatch(source, -1) {
		served[string(m[1])] = true
	}
	if len(served) < 15 || !reflect.DeepEqual(listed, served) {
		t.Errorf("listed: %v\nserved: %v", listed, served)
	}
}
