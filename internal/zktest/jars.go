package zktest

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

//go:embed pom.xml
var pom []byte

// classPath returns Java's class path of the server, which Maven fetches once into the repository's e2e/.cache.
func classPath(t testing.TB) string {
	t.Helper()
	for _, tool := range []string{"java", "mvn"} {
		if _, err := exec.LookPath(tool); err != nil {
			unavailable(t, fmt.Sprintf("%s is not installed; this test needs a real ZooKeeper server: install a Java runtime (17 or newer) and Maven", tool))
		}
	}
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	lib, err := fetch(filepath.Join(root, "e2e", ".cache", "zookeeper"))
	if err != nil {
		unavailable(t, fmt.Sprintf("ZooKeeper could not be fetched with Maven; look at its settings and at the network: %v", err))
	}
	return filepath.Join(lib, "*")
}

func unavailable(t testing.TB, text string) {
	t.Helper()
	if os.Getenv("REQUIRE_E2E") == "1" {
		t.Fatal("REQUIRE_E2E=1, and " + text)
	}
	t.Skip("SKIPPED: " + text)
}

// fetch fills dir unless that was done before for the same pom. Test packages run at once, so it holds a lock.
func fetch(dir string) (lib string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	lib = filepath.Join(dir, "lib")
	done := filepath.Join(dir, "pom.xml")
	if have, err := os.ReadFile(done); err == nil && string(have) == string(pom) {
		return lib, nil
	}
	if err := os.RemoveAll(lib); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(dir, "fetch")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := os.WriteFile(filepath.Join(work, "pom.xml"), pom, 0o600); err != nil {
		return "", err
	}
	cmd := exec.Command("mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+lib)
	cmd.Dir = work
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return lib, os.WriteFile(done, pom, 0o600)
}

// repository is the folder of go.mod at or above the working directory, which for a test is that of its package.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod at or above the working directory")
		}
		dir = parent
	}
}
