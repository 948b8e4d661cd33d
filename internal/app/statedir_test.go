package app

import (
	"path/filepath"
	"strings"
	"testing"

	"pointsman/internal/config"
)

// Two processes in one directory would end each other's copy of the map, and with it what fences rely on.
func TestAStateDirIsOfOneProcess(t *testing.T) {
	cfg := &config.Config{StateDir: filepath.Join(t.TempDir(), "made")}
	cfg.Store.Type = "zookeeper"
	lock, err := claimStateDir(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := claimStateDir(cfg); err == nil || !strings.Contains(err.Error(), "state_dir "+cfg.StateDir) || !strings.Contains(err.Error(), "in use by process ") {
		t.Errorf("a second one: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if lock, err = claimStateDir(cfg); err != nil {
		t.Fatalf("after the first one's end: %v", err)
	}
	defer lock.Close()
	cfg.StateDir = filepath.Join(cfg.StateDir, "LOCK", "below") // a file
	if _, err := claimStateDir(cfg); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("below a file: %v", err)
	}
	for _, none := range []func(){func() { cfg.StateDir = "" }, func() { cfg.StateDir, cfg.Store.Type = t.TempDir(), "file" }} {
		none()
		if lock, err := claimStateDir(cfg); lock != nil || err != nil {
			t.Errorf("nothing is there to be claimed: %v, %v", lock, err)
		}
	}
}
