package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"pointsman/core/session"
	"pointsman/store"
)

// mapAge keeps the promise of store.max_map_age (protocol rule P8): from X after its last contact with the store this proxy takes no publish of any
// topic, until it has contact again and, with it, the map of since then. In return a switch waits for a proxy that cannot be reached no
// longer than X and a margin (switching.AgeMargin).
//
// Nobody compares clocks of two machines. Each measures a duration on its own: this process from the *sending* of the last question that counted
// as contact; the leader from the moment after it has read, behind a sync, that this member's session has ended. The question was answered in that
// session, so it was sent before. A process that comes back is seen: it is announced before anything counts as contact, and that changes its mark
// in the roster (store.Proxy.Mark), with which the leader begins anew; so does a new leader. What is left is how fast the clocks run, a leader that
// is suspended (its clock stands still then, and it waits longer), and what was sent before X: that is what the margin is for. This process counts
// the time in which the machine was suspended. A restart counts from the contact that is on the disk, if the machine was not started
// since; otherwise there was none. The promise that the roster may still hold of the process before counts until the roster has the present one.
//
// A process that was frozen for longer than X cannot know, when it goes on, before it looks. PRODUCERs are judged by the clock. SENDs
// that pass before the loops are told go to producers of before: either the leader had them evicted, or what they store is read with the tail.
type mapAge struct {
	log   *slog.Logger
	store interface{ Confirmed() time.Duration }
	loops poster
	clock func() time.Duration // of Confirmed
	limit time.Duration        // as configured, and announced; 0: off
	path  string               // of the promise; "" without state_dir: then nothing is served before this process is announced

	before   time.Duration // the last contact of the process before this one; 0: none that is known
	promised atomic.Int64  // what holds; 0: nothing
	kept     atomic.Bool   // the roster has limit, and so has the disk
	told     atomic.Bool   // the loops take no publishes
}

// promise is the file beside the copy of the map.
type promise struct {
	MaxMapAge time.Duration `json:"max_map_age_nanos"`
	Boot      string        `json:"boot"` // of the machine: the clock of Contact begins anew with it
	Contact   time.Duration `json:"contact_nanos"`
}

const (
	// ageLook is how often is looked whether the map has become too old, or has contact again.
	ageLook = 200 * time.Millisecond
	// promiseSaves is how often within max_map_age the contact is written down, and promiseMost how far apart at most.
	promiseSaves = 10
	promiseMost  = 30 * time.Second
)

// newMapAge reads what the process before has promised, and writes down what this one is about to.
func newMapAge(st store.Store, log *slog.Logger, limit time.Duration, dir string) (*mapAge, error) {
	a := &mapAge{log: log, store: st, clock: store.Boottime, limit: limit}
	held := limit
	if dir != "" {
		a.path = filepath.Join(dir, "promised-map-age")
		old, err := a.load()
		switch {
		case err != nil:
			log.Error("what this proxy has promised as store.max_map_age cannot be read: it takes no publishes before it has contact with the map store", "err", err)
			held = 1
		case old.MaxMapAge > 0:
			if held == 0 || old.MaxMapAge < held {
				held = old.MaxMapAge
			}
			if old.Boot != "" && old.Boot == bootID() {
				a.before = old.Contact
			}
		}
	}
	a.promised.Store(int64(held))
	if limit > 0 {
		if err := a.save(held); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func (a *mapAge) load() (promise, error) {
	var p promise
	raw, err := os.ReadFile(a.path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &p)
	}
	if err == nil && p.MaxMapAge <= 0 {
		err = errors.New("it promises nothing")
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", a.path, err)
	}
	return p, err
}

// save writes down what holds, durably.
func (a *mapAge) save(held time.Duration) error {
	if a.path == "" {
		return nil
	}
	raw, err := json.Marshal(promise{MaxMapAge: held, Boot: bootID(), Contact: a.contact()})
	if err == nil {
		err = writeDurably(a.path, raw)
	}
	if err != nil {
		return fmt.Errorf("store.max_map_age: what is promised must be on the disk: %w", err)
	}
	return nil
}

// bootID tells the present start of the machine from every other one; "" when that cannot be told.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// registered is called when the roster has what this process announces: from now on only that counts.
func (a *mapAge) registered() {
	if a.kept.Load() || a.promised.Load() == 0 {
		return
	}
	var err error
	switch {
	case a.limit > 0:
		err = a.save(a.limit)
	case a.path != "":
		if err = os.Remove(a.path); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil { // the next process keeps the old promise, which is the shorter one
		a.log.Warn("a new store.max_map_age could not be written down", "err", err)
	}
	a.promised.Store(int64(a.limit))
	a.kept.Store(err == nil)
}

func (a *mapAge) contact() time.Duration { return max(a.before, a.store.Confirmed()) }

// tooOld is asked by event loops for each PRODUCER.
func (a *mapAge) tooOld() bool {
	held := time.Duration(a.promised.Load())
	if held == 0 {
		return false
	}
	contact := a.contact()
	return contact == 0 || a.clock()-contact > held
}

// ready is "" or why this proxy should get no new clients.
func (a *mapAge) ready() string {
	if !a.told.Load() {
		return ""
	}
	return fmt.Sprintf("without contact to the map store for longer than store.max_map_age (%s), publishes wait here", time.Duration(a.promised.Load()))
}

// run tells the loops, and writes the contact down, until ctx ends.
func (a *mapAge) run(ctx context.Context) {
	if a.promised.Load() == 0 {
		return
	}
	look := time.NewTicker(ageLook)
	defer look.Stop()
	every := max(min(a.limit/promiseSaves, promiseMost), ageLook)
	saved := time.Now()
	for {
		a.look()
		if a.limit > 0 && time.Since(saved) >= every && !a.told.Load() {
			saved = time.Now()
			if err := a.save(time.Duration(a.promised.Load())); err != nil {
				a.log.Warn("a restart without the map store would take no publishes sooner than need be", "err", err)
			}
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

// look tells the loops when that has changed.
func (a *mapAge) look() {
	old := a.tooOld()
	if old == a.told.Load() {
		return
	}
	a.told.Store(old)
	for i := range a.loops.Loops() {
		a.loops.Post(i, func(now time.Time, sh *session.Shard) { sh.Age(now, old) })
	}
	if old {
		a.log.Error("no contact with the map store for longer than store.max_map_age: this proxy takes no publishes until there is", "max_map_age", time.Duration(a.promised.Load()))
		return
	}
	a.log.Info("there is contact with the map store again: publishes go on")
}
