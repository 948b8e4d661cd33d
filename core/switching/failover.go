package switching

import (
	"fmt"
	"time"
)

// ClusterHealth is what one proxy has seen of one cluster, by real lookups. Proxies announce it with their registration.
type ClusterHealth struct {
	State string    `json:"state"`          // up, down or unknown, as core/cluster names them
	Since time.Time `json:"since,omitzero"` // by that proxy's clock
	Why   string    `json:"why,omitempty"`  // of down: what the last lookup was answered
}

// The states of a ClusterHealth.
const (
	HealthUp   = "up"
	HealthDown = "down"
)

// Votes are what the live proxies say of one cluster.
type Votes struct {
	Up   int `json:"up"`
	Down int `json:"down"`
	Live int `json:"live"` // proxies, those included that do not know
}

// MostlyUp tells whether a majority of the live proxies is answered.
func (v Votes) MostlyUp() bool { return 2*v.Up > v.Live }

// MostlyDown tells whether a majority of the live proxies is not.
func (v Votes) MostlyDown() bool { return 2*v.Down > v.Live }

func (v Votes) String() string {
	return fmt.Sprintf("%d of %d proxies say down, %d say up", v.Down, v.Live, v.Up)
}

// CountVotes counts what live proxies say of a cluster, one map by cluster for each of them.
func CountVotes(cluster string, live []map[string]ClusterHealth) Votes {
	v := Votes{Live: len(live)}
	for _, says := range live {
		switch says[cluster].State {
		case HealthUp:
			v.Up++
		case HealthDown:
			v.Down++
		}
	}
	return v
}

// FailoverPair says to which cluster the topics of another one go when that is dead.
type FailoverPair struct {
	From, To string
	// After is how long a majority of the proxies must have found it down.
	After time.Duration
	// Automatic has it done without anybody, once within Cooldown; otherwise it is only proposed.
	Automatic bool
	Cooldown  time.Duration
}

// PairState is what is stored of a pair, so that the next leader goes on with it.
type PairState struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Proposal is that in force; nil when there is none.
	Proposal *Proposal `json:"proposal,omitempty"`
	// Executed is when a failover was last begun without anybody asking, and Order its id.
	Executed time.Time `json:"executed,omitzero"`
	Order    string    `json:"order,omitempty"`
}

// Proposal is that a failover should be done.
type Proposal struct {
	From  string    `json:"from"`
	To    string    `json:"to"`
	Made  time.Time `json:"made"`
	Down  time.Time `json:"down_since"` // by the clock of the leader that made it
	Votes Votes     `json:"votes"`      // then
	// Automatic tells that the leader does it by itself as soon as nothing is in the way.
	Automatic bool `json:"automatic,omitempty"`
	// Blocked is why it must not be done, or is not done by itself; "" for nothing.
	Blocked string `json:"blocked,omitempty"`
}

// Command is what an operator runs to do it.
func (p Proposal) Command() string {
	return fmt.Sprintf("pointsman switch start --mode failover --from %s --to %s", p.From, p.To)
}

// FailoverInput is what a judgement goes by.
type FailoverInput struct {
	From, To Votes
	// Mapped tells whether the map still names From for anything.
	Mapped bool
	// Running tells that a failover from From is under way.
	Running bool
	// Others are the states of all pairs, as stored.
	Others []PairState
}

// FailoverStep is what follows from a judgement.
type FailoverStep uint8

// The steps.
const (
	// FailoverNothing: all is as it was.
	FailoverNothing FailoverStep = iota
	// FailoverPropose: the state has a new proposal, or says something else of it.
	FailoverPropose
	// FailoverWithdraw: the cluster is back, or has nothing left to be moved.
	FailoverWithdraw
	// FailoverExecute: the failover is to be begun, once the state is stored.
	FailoverExecute
)

// FailoverJudge judges one pair as one leader sees it. Its successor counts anew: a cluster counts as dead only after somebody has looked
// at it for that long.
type FailoverJudge struct {
	pair FailoverPair
	down time.Time // since when a majority has found From down, without a break; zero: it does not
	last time.Time // of the last judgement
}

// NewFailoverJudge begins to judge a pair.
func NewFailoverJudge(pair FailoverPair) *FailoverJudge { return &FailoverJudge{pair: pair} }

// judgeGap is the longest time between two judgements in which nothing is thought to have happened: a leader that was frozen counts anew.
const judgeGap = 30 * time.Second

// Judge takes what is stored of the pair and what there is to be seen, and returns what is to be stored, and what follows from it. Executing comes
// after the storing: who stores it first does it, once.
func (j *FailoverJudge) Judge(now time.Time, stored PairState, in FailoverInput) (PairState, FailoverStep) {
	if !j.last.IsZero() && now.Sub(j.last) > judgeGap {
		j.down = time.Time{}
	}
	j.last = now
	switch {
	case !in.From.MostlyDown():
		j.down = time.Time{}
	case j.down.IsZero():
		j.down = now
	}
	next := stored
	next.From, next.To = j.pair.From, j.pair.To
	if in.From.MostlyUp() || !in.Mapped {
		next.Proposal = nil
		if stored.Proposal != nil {
			return next, FailoverWithdraw
		}
		return next, FailoverNothing
	}
	if in.Running || j.down.IsZero() || now.Sub(j.down) < j.pair.After {
		return stored, FailoverNothing // neither long enough down nor back: what was proposed stays
	}
	blocked := j.blocked(now, in)
	if j.pair.Automatic && blocked == "" {
		next.Proposal, next.Executed = nil, now
		return next, FailoverExecute
	}
	if old := stored.Proposal; old != nil {
		if old.Blocked == blocked && old.Automatic == j.pair.Automatic {
			return stored, FailoverNothing
		}
		changed := *old
		changed.Blocked, changed.Automatic = blocked, j.pair.Automatic
		next.Proposal = &changed
		return next, FailoverPropose
	}
	next.Proposal = &Proposal{From: j.pair.From, To: j.pair.To, Made: now, Down: j.down, Votes: in.From, Automatic: j.pair.Automatic, Blocked: blocked}
	return next, FailoverPropose
}

// blocked tells what is in the way.
func (j *FailoverJudge) blocked(now time.Time, in FailoverInput) string {
	if !in.To.MostlyUp() {
		return fmt.Sprintf("cluster %s is not up either: %v", j.pair.To, in.To)
	}
	if !j.pair.Automatic {
		return ""
	}
	for _, s := range in.Others {
		// Whatever touched one of the two clusters counts: what was moved here by itself is not moved on, or back, by itself.
		touches := s.From == j.pair.From || s.From == j.pair.To || s.To == j.pair.From || s.To == j.pair.To
		if end := s.Executed.Add(j.pair.Cooldown); touches && !s.Executed.IsZero() && now.Before(end) {
			return fmt.Sprintf("the automatic failover %s from %s to %s was at %s; the next one by itself is at %s at the earliest", s.Order, s.From, s.To,
				s.Executed.UTC().Format(time.RFC3339), end.UTC().Format(time.RFC3339))
		}
	}
	return ""
}
