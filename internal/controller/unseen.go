package controller

import (
	"fmt"
	"sync"
	"time"

	"pointsman/core/switching"
	"pointsman/store"
)

// unseen is since when members of the roster were not live in one leader's readings of it, each of which was behind a sync, and since when the tombstones of
// former members were there. What follows from the first is argued in internal/app, mapAge: a member that has promised a max_map_age holds its publishes by
// itself some time after that (protocol rule P8). From the second follows that nothing of a former member is on its way any more (C4). When a tombstone was
// written says only the clock of another machine: nothing goes by that.
type unseen struct {
	mu     sync.Mutex
	since  map[string]sighting  // guarded by mu; by id
	stones map[string]time.Time // guarded by mu; by stoneName
}

// sighting is the first reading, of those without a break, in which a member was not live.
type sighting struct {
	mark string // store.Proxy.Mark
	at   time.Time
}

func newUnseen() *unseen { return &unseen{} }

// note takes a reading that was complete at now, which needs a monotonic clock; one that stands still while the machine sleeps does no harm.
func (u *unseen) note(now time.Time, r roster) {
	u.mu.Lock()
	defer u.mu.Unlock()
	stones := make(map[string]time.Time, len(r.stones))
	for _, t := range r.stones {
		at, ok := u.stones[stoneName(t)]
		if !ok || now.Before(at) {
			at = now
		}
		stones[stoneName(t)] = at
	}
	u.stones = stones
	since := make(map[string]sighting, len(u.since))
	for _, p := range r.proxies {
		if p.Live {
			continue
		}
		s, ok := u.since[p.ID]
		if !ok || s.mark != p.Mark || now.Before(s.at) {
			s = sighting{p.Mark, now}
		}
		since[p.ID] = s
	}
	u.since = since
}

// facts is what a reading, which was noted, says of its members at now.
func (u *unseen) facts(now time.Time, proxies []store.Proxy) []switching.MemberFact {
	u.mu.Lock()
	defer u.mu.Unlock()
	facts := make([]switching.MemberFact, 0, len(proxies))
	for _, p := range proxies {
		f := switching.MemberFact{Member: switching.Member{ID: p.ID, Incarnation: p.Incarnation}, Live: p.Live}
		if promised := promisedAge(p); promised > 0 && !p.Live {
			s, ok := u.since[p.ID]
			if !ok || s.mark != p.Mark { // a reading that was noted since has another one
				s.at = now
			}
			f.AgedIn = max(0, s.at.Add(promised+switching.AgeMargin(promised)).Sub(now))
			f.Aged = f.AgedIn == 0
		}
		facts = append(facts, f)
	}
	return facts
}

// fresh are the members of a reading, which was noted, whose tombstones were not there for SettleTime at now.
func (u *unseen) fresh(now time.Time, stones []store.Tombstone) (ids []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, t := range stones {
		if at, ok := u.stones[stoneName(t)]; !ok || now.Sub(at) < switching.SettleTime { // without: a reading that was noted since has it no more
			ids = append(ids, t.ID)
		}
	}
	return ids
}

// stoneName is another one whenever the tombstone was written anew.
func stoneName(t store.Tombstone) string {
	return fmt.Sprintf("%s@%s@%d", t.ID, t.Incarnation, t.At.UnixNano())
}

func promisedAge(p store.Proxy) time.Duration {
	return time.Duration(p.MaxMapAgeMillis) * time.Millisecond
}
