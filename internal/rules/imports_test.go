package rules

import (
	"os/exec"
	"strings"
	"testing"
)

// ban forbids packages below from to import anything below to, directly.
type ban struct{ from, to, why string }

var bans = []ban{
	{"pointsman/codec", "pointsman/core", "the codec is the bottom: it knows frames and nothing of what they mean"},
	{"pointsman/codec", "net", "bytes come in as slices"},
	{"pointsman/core", "net/http", "core is sans-IO"},
	{"pointsman/core", "os", "core is sans-IO: what is on the disk comes in as values"},
	{"pointsman/core", "sync", "core has one owner per piece of state and no lock; counters are sync/atomic"},
	{"pointsman/core", "log", "core reports events; netio's owner logs"},
	{"pointsman/core", "log/slog", "core reports events; netio's owner logs"},
	{"pointsman/core", "context", "core never waits"},
	{"pointsman/core", "pointsman/netio", "imports go downwards"},
	{"pointsman/core", "pointsman/store", "imports go downwards: core does not know where the map is kept"},
	{"pointsman/core", "pointsman/zk", "imports go downwards"},
	{"pointsman/core", "pointsman/internal", "imports go downwards"},
	{"pointsman/core/route", "pointsman/core/session", "the table decides; it does not know who asks"},
	{"pointsman/core/cluster", "pointsman/core/session", "the same"},
	{"pointsman/netio", "pointsman/codec", "the loop knows no Pulsar"},
	{"pointsman/netio", "pointsman/store", "the loop knows no map"},
	{"pointsman/netio", "pointsman/zk", "netio and zk never meet"},
	{"pointsman/netio", "pointsman/internal", "imports go downwards"},
	{"pointsman/zk", "pointsman/netio", "netio and zk never meet"},
	{"pointsman/zk", "pointsman/internal", "imports go downwards"},
	{"pointsman/store", "pointsman/internal", "imports go downwards"},
	{"pointsman/store", "pointsman/netio", "a store knows no sockets"},
	{"pointsman/internal/admin", "pointsman/netio", "the operations port asks through admin.Proxy"},
	{"pointsman/internal/admin", "pointsman/zk", "the operations port writes through store.Store"},
	{"pointsman/internal/admin", "pointsman/internal/app", "app runs admin"},
}

// only lists who may import a library that should have one home.
var only = map[string][]string{
	"github.com/go-zookeeper/zk":      {"pointsman/zk"},
	"github.com/panjf2000/gnet":       {"pointsman/netio"},
	"golang.org/x/sys":                {"pointsman/netio", "pointsman/store", "pointsman/bench"},
	"github.com/spf13/cobra":          {"pointsman/cmd/pointsman"},
	"github.com/goccy/go-yaml":        {"pointsman/internal/config", "pointsman/internal/admin", "pointsman/cmd/pointsman"},
	"github.com/prometheus":           {"pointsman/internal/app", "pointsman/internal/controller", "pointsman/internal/admin", "pointsman/internal/testkit/suite", "pointsman/cmd/pointsman-demo", "pointsman/e2e"},
	"github.com/HdrHistogram":         {"pointsman/bench"},
	"github.com/apache/pulsar-client": {"pointsman/internal/testkit/suite", "pointsman/cmd/pointsman-demo", "pointsman/e2e"},
}

// outside are what must not be linked into the product.
var outside = map[string]string{
	"github.com/apache/pulsar-client": "tests and the demo only",
	"pointsman/internal/testkit":      "tests and the demo only",
	"pointsman/internal/zktest":       "tests only",
	"pointsman/internal/tlstest":      "tests only",
	"pointsman/internal/golden":       "tests only",
	"pointsman/internal/leaktest":     "tests only",
	"testing":                         "tests only",
	"pointsman/bench":                 "measures the product from outside",
	"github.com/HdrHistogram":         "benchmarks only",
	"pgregory.net/rapid":              "tests only",
	"go.uber.org/goleak":              "tests only",
	"github.com/puzpuzpuz/xsync":      "benchmarks only",
}

func below(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/") || strings.HasPrefix(path, prefix) && strings.Contains(prefix, "pulsar-client")
}

// golist runs go list and gives its lines.
func golist(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

func TestImportsGoDownwards(t *testing.T) {
	imports := map[string][]string{}
	for _, line := range golist(t, "-f", `{{.ImportPath}} {{join .Imports " "}}`, "./...") {
		words := strings.Fields(line)
		imports[words[0]] = words[1:]
	}
	if len(imports["pointsman/core/session"]) == 0 {
		t.Fatal("go list found no imports of core/session: this test looks at nothing")
	}
	for pkg, list := range imports {
		for _, imported := range list {
			for _, b := range bans {
				exact := imported == b.to || strings.HasPrefix(b.to, "pointsman/") && below(imported, b.to)
				if below(pkg, b.from) && exact {
					t.Errorf("%s imports %s: %s", pkg, imported, b.why)
				}
			}
			for lib, homes := range only {
				if !below(imported, lib) {
					continue
				}
				allowed := false
				for _, home := range homes {
					allowed = allowed || below(pkg, home)
				}
				if !allowed {
					t.Errorf("%s imports %s, which may be imported by %v only", pkg, imported, homes)
				}
			}
		}
	}
}

func TestTestToolsStayOutOfTheBinary(t *testing.T) {
	for _, dep := range golist(t, "-deps", "./cmd/pointsman") {
		for lib, why := range outside {
			if below(dep, lib) {
				t.Errorf("bin/pointsman links %s: %s", dep, why)
			}
		}
	}
}
