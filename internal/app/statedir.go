package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"pointsman/internal/config"
	"pointsman/store"
)

// claimStateDir makes state_dir when it is missing, and keeps other processes out of it until the file is closed: what is in it is one proxy's word to all others
// (which topics it knows to be moving, how old its map is), and a second one would end the copies of the first.
func claimStateDir(cfg *config.Config) (*os.File, error) {
	if cfg.StateDir == "" || cfg.Store.Type == "file" { // only receipts then
		return nil, nil
	}
	err := os.MkdirAll(cfg.StateDir, 0o700)
	var lock *os.File
	if err == nil {
		lock, err = store.LockDir(cfg.StateDir)
	}
	if errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("state_dir %s: %w; make it writable for the user of this process (uid %d), or name another directory", cfg.StateDir, err, os.Getuid())
	}
	if err != nil {
		return nil, fmt.Errorf("state_dir %s: %w", cfg.StateDir, err)
	}
	return lock, nil
}

// keyCopyName is the file in state_dir that holds the store's key, for starts while the store is away.
const keyCopyName = "tag-key"

func (a *App) keyFromStore(ctx context.Context) ([]byte, error) {
	const what, remedy = "the key for broker addresses cannot be read from the map store", "proxies start without the store once state_dir has a copy, or with tag_key_file"
	if a.cfg.StateDir == "" || a.cfg.Store.Type == "file" {
		key, err := a.store.TagKey(ctx)
		if err != nil {
			err = fmt.Errorf("%s: %w (%s)", what, err, remedy)
		}
		return key, err
	}
	file := filepath.Join(a.cfg.StateDir, keyCopyName)
	saved, readErr := os.ReadFile(file)
	timeout := startTimeout
	if readErr == nil {
		timeout = startTimeoutWithCopy
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	key, err := a.store.TagKey(ctx)
	switch {
	case err != nil && readErr != nil:
		return nil, fmt.Errorf("%s: %w; and there is no copy of it: %w (%s)", what, err, readErr, remedy)
	case err != nil:
		a.log.Warn("the store is away: the key for broker addresses comes from the disk", "file", file, "err", err)
		return saved, nil
	}
	if err := writeDurably(file, key); err != nil { // mode 0600, as all temporary files
		return nil, fmt.Errorf("the copy of the key for broker addresses cannot be written to state_dir: %w", err)
	}
	return key, nil
}
