package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// maxMemoryHistory is how many changes a memory store remembers.
const maxMemoryHistory = 10_000

// Memory is a store without a file: for tests, which give it faults. It forgets everything with the process.
type Memory struct {
	core    *core
	history *[]HistoryEntry // shared like core, guarded by core.mu

	// Guarded by core.mu:
	faults     Faults
	registered string // id of the proxy that this handle announced
	expired    bool   // the session has ended; Register begins another one
	unread     bool   // there was no lease: the watches have to deliver the map before there is one again
	contact    time.Time
	confirmed  time.Duration // the last answer of Confirmed

	closed    chan struct{}
	closeOnce sync.Once
}

// Faults are what a Memory does wrong, until they are replaced.
type Faults struct {
	// Err, when not nil, is what every operation fails with at once; nothing is written.
	Err error
	// Hang makes every operation wait for the end of its context and then fail with ErrUnavailable.
	Hang bool
	// LoseAnswers makes Apply, PutSwitch and PutAck write and then fail with ErrUnavailable and ErrUnknown.
	LoseAnswers bool
	// Only limits the three above to these operations, by the names of Store's methods; nil: all of them. "Lead" stands
	// for the leadership: a handle that it fails for does not lead, and ceases to.
	Only []string
	// NoLease takes the lease away.
	NoLease bool
	// HoldWatches keeps updates from this handle's watches; afterwards only the last values arrive.
	HoldWatches bool
	// RepeatUpdates makes every update arrive twice.
	RepeatUpdates bool
}

func (f Faults) concern(op string) bool { return f.Only == nil || slices.Contains(f.Only, op) }

// away tells whether op fails or hangs.
func (f Faults) away(op string) bool { return (f.Hang || f.Err != nil) && f.concern(op) }

// NewMemory makes an empty store.
func NewMemory() *Memory {
	return &Memory{core: newCore(), history: &[]HistoryEntry{}, contact: time.Now(), closed: make(chan struct{})}
}

// Join makes another handle to the same map, as another proxy would have: with faults, a registration and a Close of
// its own.
func (m *Memory) Join() *Memory {
	return &Memory{core: m.core, history: m.history, contact: time.Now(), closed: make(chan struct{})}
}

// SetFaults replaces the faults of this handle.
func (m *Memory) SetFaults(f Faults) {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	m.confirmedNow()
	m.unread = m.unread || m.faults.NoLease
	m.faults = f
	m.core.election.elect()
	m.core.wake()
}

// Expire ends the session of this handle, as a server does that has not heard of a process for too long: its registration
// is not live, it has no lease and does not lead, until it registers again.
func (m *Memory) Expire() {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	m.confirmedNow()
	m.expired, m.unread = true, true
	m.disconnect()
	m.core.election.elect()
}

// disconnect is called with core.mu held.
func (m *Memory) disconnect() {
	if p, ok := m.core.proxies[m.registered]; ok {
		p.Live = false
		m.core.proxies[p.ID] = p
	}
}

// SetBad makes a bucket (or BadRules) unusable, for all handles; nil mends it.
func (m *Memory) SetBad(index int, err error) {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	if err == nil {
		delete(m.core.bad, index)
	} else {
		m.core.bad[index] = err
	}
	for w := range m.core.watchers {
		w.some = true
		if index == BadRules {
			w.rules = true
		} else {
			w.buckets[index] = true
		}
	}
	m.core.wake()
}

// Redeliver makes every watch, of all handles, deliver the whole map again.
func (m *Memory) Redeliver() {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	m.core.markAll()
}

// begin starts the operation of that name: it returns with core.mu locked, or an error.
func (m *Memory) begin(ctx context.Context, op string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	m.core.mu.Lock()
	faults := m.faults
	if !faults.concern(op) {
		faults = Faults{}
	}
	err := faults.Err
	if m.isClosed() {
		err = ErrClosed
	}
	if err != nil {
		m.core.mu.Unlock()
		return err
	}
	if faults.Hang {
		m.core.mu.Unlock()
		ctx, cancel := withDefaultTimeout(ctx)
		defer cancel()
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		case <-m.closed:
			return ErrClosed
		}
	}
	m.contact = time.Now()
	return nil
}

// Watch implements Store.
func (m *Memory) Watch(ctx context.Context, sink func(Update)) error {
	away := func() bool { return m.faults.HoldWatches || m.faults.away("Watch") }
	m.core.watch(ctx, m, m.closed, sink, away, func() bool { return m.faults.RepeatUpdates })
	return nil
}

// Entry implements Store.
func (m *Memory) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	if err := m.begin(ctx, "Entry"); err != nil {
		return route.Entry{}, false, err
	}
	defer m.core.mu.Unlock()
	e, ok := m.core.entry(topic)
	return e, ok, nil
}

// Entries implements Store.
func (m *Memory) Entries(ctx context.Context) ([]route.Entry, error) {
	if err := m.begin(ctx, "Entries"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.entries(), nil
}

// Rules implements Store.
func (m *Memory) Rules(ctx context.Context) ([]route.Rule, error) {
	if err := m.begin(ctx, "Rules"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return slices.Clone(m.core.rules), nil
}

// Apply implements Store.
func (m *Memory) Apply(ctx context.Context, c Change) error {
	if err := c.Validate(); err != nil {
		return err
	}
	if err := m.begin(ctx, "Apply"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	r, err := m.core.change(c, time.Now())
	if err != nil {
		return err
	}
	m.core.apply(r)
	*m.history = append(*m.history, *r.Change)
	if len(*m.history) > maxMemoryHistory {
		*m.history = (*m.history)[1:]
	}
	return m.answer("Apply")
}

// answer is what a write that was carried out returns. core.mu is held.
func (m *Memory) answer(op string) error {
	if m.faults.LoseAnswers && m.faults.concern(op) {
		return fmt.Errorf("%w: %w", ErrUnavailable, ErrUnknown)
	}
	return nil
}

// Switch implements Store.
func (m *Memory) Switch(ctx context.Context, id string) (switching.Record, error) {
	if err := m.begin(ctx, "Switch"); err != nil {
		return switching.Record{}, err
	}
	defer m.core.mu.Unlock()
	return m.core.switchRecord(id)
}

// Switches implements Store.
func (m *Memory) Switches(ctx context.Context, limit int) ([]switching.Record, error) {
	if err := m.begin(ctx, "Switches"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.switchRecords(limit), nil
}

// SwitchesOf implements Store.
func (m *Memory) SwitchesOf(ctx context.Context, batch string) ([]switching.Record, error) {
	if err := m.begin(ctx, "SwitchesOf"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.recordsOf(batch), nil
}

// Running implements Store.
func (m *Memory) Running(ctx context.Context) ([]switching.Record, error) {
	if err := m.begin(ctx, "Running"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.runningRecords(), nil
}

// PutSwitch implements Store.
func (m *Memory) PutSwitch(ctx context.Context, rec switching.Record) error {
	if err := CheckRecord(rec); err != nil {
		return err
	}
	if err := m.begin(ctx, "PutSwitch"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	r, err := m.core.putSwitchRecord(rec)
	if err != nil {
		return err
	}
	m.core.apply(r)
	return m.answer("PutSwitch")
}

// PutAck implements Store.
func (m *Memory) PutAck(ctx context.Context, id string, a switching.Ack) error {
	if err := CheckAck(a); err != nil {
		return err
	}
	if err := m.begin(ctx, "PutAck"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	r, err := m.core.putAckRecord(id, a)
	if err != nil {
		return err
	}
	m.core.apply(r)
	return m.answer("PutAck")
}

// Acks implements Store.
func (m *Memory) Acks(ctx context.Context, id string) ([]switching.Ack, error) {
	if err := m.begin(ctx, "Acks"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.acks(id)
}

// History implements Store.
func (m *Memory) History(ctx context.Context, limit int) ([]HistoryEntry, error) {
	if err := m.begin(ctx, "History"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	newest := *m.history
	newest = slices.Clone(newest[max(0, len(newest)-max(0, limit)):])
	slices.Reverse(newest)
	return newest, nil
}

// Register implements Store.
func (m *Memory) Register(ctx context.Context, p Proxy) error {
	if err := CheckProxy(p); err != nil {
		return err
	}
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := m.begin(ctx, "Register"); err != nil {
		return err
	}
	anew := m.expired || m.registered != p.ID
	if m.registered != "" && m.registered != p.ID {
		delete(m.core.proxies, m.registered)
	}
	m.core.announcements++
	p.Live, p.Mark = true, strconv.Itoa(m.core.announcements)
	m.core.proxies[p.ID] = p
	m.registered, m.expired = p.ID, false
	m.core.election.elect()
	m.core.mu.Unlock()
	return m.core.awaitWatches(ctx, m, anew)
}

// Unregister implements Store.
func (m *Memory) Unregister(ctx context.Context, settled bool) error {
	if err := m.begin(ctx, "Unregister"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	m.core.leave(m.registered, settled, time.Now())
	m.registered = ""
	return nil
}

// Forget implements Store.
func (m *Memory) Forget(ctx context.Context, id string) error {
	if err := m.begin(ctx, "Forget"); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	return m.core.forget(id, time.Now())
}

// Proxies implements Store.
func (m *Memory) Proxies(ctx context.Context) ([]Proxy, error) {
	if err := m.begin(ctx, "Proxies"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.listProxies(), nil
}

// Tombstones implements Store.
func (m *Memory) Tombstones(ctx context.Context) ([]Tombstone, error) {
	if err := m.begin(ctx, "Tombstones"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.tombstones(), nil
}

// Lease implements Store: it has one that never ends, but for faults, and after those until its watches have delivered the map.
func (m *Memory) Lease() time.Duration {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	if m.faults.NoLease || m.expired {
		return 0
	}
	if m.unread = m.unread && m.core.behind(m, true); m.unread {
		return 0
	}
	return Forever
}

// Confirmed implements Store: it is now, but for the faults that take the lease, the end of the session, and watches that are behind.
func (m *Memory) Confirmed() time.Duration {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	return m.confirmedNow()
}

// confirmedNow is called with core.mu held.
func (m *Memory) confirmedNow() time.Duration {
	if !m.faults.NoLease && !m.expired && m.registered != "" && !m.core.behind(m, true) {
		m.confirmed = Boottime()
	}
	return m.confirmed
}

// Lead implements Store.
func (m *Memory) Lead(ctx context.Context, id string, lead func(context.Context)) error {
	if err := CheckID("proxy", id); err != nil {
		return err
	}
	m.core.lead(ctx, m.closed, id, func() bool { return !m.isClosed() && !m.expired && !m.faults.away("Lead") }, lead)
	return nil
}

func (m *Memory) isClosed() bool {
	select {
	case <-m.closed:
		return true
	default:
		return false
	}
}

// Leader implements Store.
func (m *Memory) Leader(ctx context.Context) (string, error) {
	if err := m.begin(ctx, "Leader"); err != nil {
		return "", err
	}
	defer m.core.mu.Unlock()
	return m.core.leaderID(), nil
}

// TagKey implements Store.
func (m *Memory) TagKey(ctx context.Context) ([]byte, error) {
	if err := m.begin(ctx, "TagKey"); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	if m.core.tagKey == nil {
		m.core.apply(record{Seq: m.core.seq + 1, TagKey: NewTagKey()})
	}
	return slices.Clone(m.core.tagKey), nil
}

// Status implements Store.
func (m *Memory) Status() Status {
	m.core.mu.Lock()
	defer m.core.mu.Unlock()
	s := Status{Kind: "memory", Connected: true, Contact: m.contact}
	if m.isClosed() {
		s.Connected, s.Detail = false, "closed"
	}
	switch {
	case m.faults.Err != nil && m.faults.Only == nil:
		s.Connected, s.Detail = false, m.faults.Err.Error()
	case m.faults.Hang && m.faults.Only == nil:
		s.Connected, s.Detail = false, "hanging"
	case s.Connected:
		s.Contact = time.Now()
	}
	return s
}

// Close implements Store: the registration of this handle is gone, but its membership is not.
func (m *Memory) Close() error {
	m.closeOnce.Do(func() {
		m.core.mu.Lock()
		defer m.core.mu.Unlock()
		m.disconnect()
		close(m.closed)
		m.core.election.elect()
	})
	return nil
}

// withDefaultTimeout gives ctx the deadline that every operation must have.
func withDefaultTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, DefaultTimeout)
}

var _ Store = (*Memory)(nil)

// errUnwritable marks a store that must not write any more.
var errUnwritable = errors.New("the store takes no more writes until it is opened again")
