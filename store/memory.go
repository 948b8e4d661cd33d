package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	contact    time.Time

	closed    chan struct{}
	closeOnce sync.Once
}

// Faults are what a Memory does wrong, until they are replaced.
type Faults struct {
	// Err, when not nil, is what every operation fails with at once; nothing is written.
	Err error
	// Hang makes every operation wait for the end of its context and then fail with ErrUnavailable.
	Hang bool
	// LoseAnswers makes Apply write and then fail with ErrUnavailable and ErrUnknown.
	LoseAnswers bool
	// HoldWatches keeps updates from this handle's watches; afterwards only the last values arrive.
	HoldWatches bool
	// RepeatUpdates makes every update arrive twice.
	RepeatUpdates bool
}

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
	m.faults = f
	m.core.wake()
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

// begin starts an operation: it returns with core.mu locked, or an error.
func (m *Memory) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	m.core.mu.Lock()
	faults := m.faults
	err := faults.Err
	select {
	case <-m.closed:
		err = ErrClosed
	default:
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
	away := func() bool { return m.faults.HoldWatches || m.faults.Hang || m.faults.Err != nil }
	m.core.watch(ctx, m.closed, sink, away, func() bool { return m.faults.RepeatUpdates })
	return nil
}

// Entry implements Store.
func (m *Memory) Entry(ctx context.Context, topic string) (route.Entry, bool, error) {
	if err := m.begin(ctx); err != nil {
		return route.Entry{}, false, err
	}
	defer m.core.mu.Unlock()
	e, ok := m.core.entry(topic)
	return e, ok, nil
}

// Entries implements Store.
func (m *Memory) Entries(ctx context.Context) ([]route.Entry, error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.entries(), nil
}

// Rules implements Store.
func (m *Memory) Rules(ctx context.Context) ([]route.Rule, error) {
	if err := m.begin(ctx); err != nil {
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
	if err := m.begin(ctx); err != nil {
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
	if m.faults.LoseAnswers {
		return fmt.Errorf("%w: %w", ErrUnavailable, ErrUnknown)
	}
	return nil
}

// Switch implements Store.
func (m *Memory) Switch(ctx context.Context, id string) (switching.Record, error) {
	if err := m.begin(ctx); err != nil {
		return switching.Record{}, err
	}
	defer m.core.mu.Unlock()
	return m.core.switchRecord(id)
}

// Switches implements Store.
func (m *Memory) Switches(ctx context.Context, limit int) ([]switching.Record, error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.switchRecords(limit), nil
}

// EndSwitch implements Store.
func (m *Memory) EndSwitch(ctx context.Context, id string, state switching.State, ended time.Time, note string) error {
	return m.write(ctx, id, record{End: &endRecord{ID: id, State: state, Ended: ended, Note: note}})
}

// PutAck implements Store.
func (m *Memory) PutAck(ctx context.Context, id string, a switching.Ack) error {
	if err := CheckID("proxy", a.Proxy); err != nil {
		return err
	}
	return m.write(ctx, id, record{Ack: &ackRecord{ID: id, Ack: a}})
}

// write applies a record that belongs to switch id.
func (m *Memory) write(ctx context.Context, id string, r record) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	if _, err := m.core.switchRecord(id); err != nil {
		return err
	}
	r.Seq = m.core.seq + 1
	m.core.apply(r)
	return nil
}

// Acks implements Store.
func (m *Memory) Acks(ctx context.Context, id string) ([]switching.Ack, error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.acks(id)
}

// History implements Store.
func (m *Memory) History(ctx context.Context, limit int) ([]HistoryEntry, error) {
	if err := m.begin(ctx); err != nil {
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
	if err := CheckID("proxy", p.ID); err != nil {
		return err
	}
	if err := m.begin(ctx); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	p.Live = true
	if m.registered != "" && m.registered != p.ID {
		delete(m.core.proxies, m.registered)
	}
	m.core.proxies[p.ID] = p
	m.registered = p.ID
	return nil
}

// Unregister implements Store.
func (m *Memory) Unregister(ctx context.Context) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	delete(m.core.proxies, m.registered)
	m.registered = ""
	return nil
}

// Forget implements Store.
func (m *Memory) Forget(ctx context.Context, id string) error {
	if err := m.begin(ctx); err != nil {
		return err
	}
	defer m.core.mu.Unlock()
	return m.core.forget(id)
}

// Proxies implements Store.
func (m *Memory) Proxies(ctx context.Context) ([]Proxy, error) {
	if err := m.begin(ctx); err != nil {
		return nil, err
	}
	defer m.core.mu.Unlock()
	return m.core.listProxies(), nil
}

// TagKey implements Store.
func (m *Memory) TagKey(ctx context.Context) ([]byte, error) {
	if err := m.begin(ctx); err != nil {
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
	select {
	case <-m.closed:
		s.Connected, s.Detail = false, "closed"
	default:
	}
	switch {
	case m.faults.Err != nil:
		s.Connected, s.Detail = false, m.faults.Err.Error()
	case m.faults.Hang:
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
		if p, ok := m.core.proxies[m.registered]; ok {
			p.Live = false
			m.core.proxies[p.ID] = p
		}
		close(m.closed)
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
