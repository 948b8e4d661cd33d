package zk

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/internal/leaktest"
	"pointsman/internal/zktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestZooKeeperKeepsThePromisesOfAStore(t *testing.T) {
	server := zktest.Start(t)
	storetest.Run(t, func(t *testing.T) storetest.Map {
		servers := server.Addr() + chroot()
		return storetest.Map{Open: func(t *testing.T) store.Store { return open(t, Config{Servers: servers}) }}
	})
}

var chroots atomic.Int64

// chroot is a part of a server's tree for one test.
func chroot() string { return fmt.Sprintf("/test-%d", chroots.Add(1)) }

// open opens a store that the test closes.
func open(t *testing.T, cfg Config) *Store {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = testLog(t)
	}
	s, err := Open(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// testLog writes to the test's output, and nothing once the test has ended.
func testLog(t *testing.T) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct {
	mu sync.Mutex
	t  *testing.T
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(string(p[:len(p)-1]))
		if bytes.Contains(p, []byte("does not end")) {
			w.t.Error("a client was closed, and the goroutines of the library went on")
		}
	}
	return len(p), nil
}

// within is a context for what must not take long.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}
