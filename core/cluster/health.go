package cluster

import "time"

// State is whether a cluster answers.
type State uint8

// The states. Unknown lasts until the first lookup is decided; it is treated as up.
const (
	Unknown State = iota
	Up
	Down
)

func (s State) String() string {
	switch s {
	case Up:
		return "up"
	case Down:
		return "down"
	default:
		return "unknown"
	}
}

// HealthPolicy is the hysteresis of Health.
type HealthPolicy struct {
	// Failures in a row, spread over at least Over, make a cluster down: a burst of lookups that fail in one moment is one event.
	Failures int
	Over     time.Duration
	// Successes in a row make it up again.
	Successes int
}

// Health judges one cluster by the results of real lookups. It is a value: the zero Health is Unknown, and its owner
// keeps what Observe returns.
type Health struct {
	State State
	// Since is when State was last changed; zero while Unknown.
	Since time.Time
	run   int       // results in a row that speak against State
	first time.Time // of the run
}

// Observe takes one result and returns the health after it. Results may come slightly out of order.
func (h Health) Observe(now time.Time, ok bool, policy HealthPolicy) Health {
	if ok == (h.State == Up) && h.State != Unknown {
		h.run = 0 // it confirms
		return h
	}
	if h.State == Unknown && ok {
		return Health{State: Up, Since: now}
	}
	if h.run == 0 {
		h.first = now
	}
	h.run++
	switch {
	case ok && h.run >= policy.Successes:
		return Health{State: Up, Since: now}
	case !ok && h.run >= policy.Failures && now.Sub(h.first) >= policy.Over:
		return Health{State: Down, Since: now}
	}
	return h
}
