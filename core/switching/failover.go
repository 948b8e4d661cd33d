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
	// Members are all proxies, those included that are not connected to the map store and have no vote.
	Members int
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

// judgeGap is the longest time between two judgements in which nothing is thought to have happened: a leader that was frozen, or whose clock was set, counts anew.
const judgeGap = 30 * time.Second

// Judge takes what is stored of the pair and what there is to be seen, and returns what is to be stored, and what follows from it. Executing comes
// after the storing: who stores it first does it, once.
func (j *FailoverJudge) Judge(now time.Time, stored PairState, in FailoverInput) (PairState, FailoverStep) {
	if gap := now.Sub(j.last); !j.last.IsZero() && (gap > judgeGap || gap < 0) {
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
	if 2*in.From.Down <= in.Members {
		// Who is cut off from the map store may well be answered by the cluster, and would stay there with its clients: two clusters would take their publishes.
		return fmt.Sprintf("%d of %d proxies are not connected to the map store, and %d that say down are no majority of all: start it by hand if the cluster is dead, or forget proxies that have ended (`pointsman proxies ls`)",
			in.Members-in.From.Live, in.Members, in.From.Down)
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

// Failover is an order to move topics off a cluster that is dead. It is stored, the leader carries it out, and its successor goes on with it: topics that
// have moved by then are left alone.
type Failover struct {
	ID   string `json:"id"`
	Rev  uint64 `json:"-"` // of the stored document
	From string `json:"from"`
	To   string `json:"to"`
	// What is moved: Topics (base names); or everything in Scope (a namespace) that is mapped to From; or, with All, everything.
	Topics []string `json:"topics,omitempty"`
	Scope  string   `json:"scope,omitempty"`
	All    bool     `json:"all,omitempty"`
	// NoSubscriptions leaves out the creation of subscriptions that To lacks.
	NoSubscriptions bool          `json:"no_subscriptions,omitempty"`
	Force           bool          `json:"force,omitempty"`
	Automatic       bool          `json:"automatic,omitempty"`
	Who             string        `json:"who,omitempty"`
	Why             string        `json:"why,omitempty"`
	State           FailoverState `json:"state"`
	// Wish is WishAbort when nothing more is to be moved.
	Wish  Wish      `json:"wish,omitempty"`
	Asked time.Time `json:"asked"`
	Ended time.Time `json:"ended,omitzero"`
	// Total, Moved and Done count topics and rules: of the order, that the map names To for, and of which every proxy has reported.
	Total int `json:"total"`
	Moved int `json:"moved"`
	Done  int `json:"done"`
	// Failed are those that could not be moved, at most MaxFailed; FailedCount is how many there are.
	Failed      []FailedMove `json:"failed,omitempty"`
	FailedCount int          `json:"failed_count,omitempty"`
	Notes       []string     `json:"notes,omitempty"`
	// Late are the ids of switches whose proxies have not all reported in time, at most MaxFailed.
	Late []string `json:"late,omitempty"`
	// Created is how many subscriptions were made on To, Again how many entries they deliver from the oldest one on, and Backlog how many entries were
	// last seen unreplicated, over all topics. Unreplicated is how many topics had no replication to To, which has none of their messages, and Unknown
	// of how many nothing was ever seen: of these Backlog says nothing.
	Created      int   `json:"created"`
	Again        int64 `json:"again"`
	Backlog      int64 `json:"backlog"`
	Unreplicated int   `json:"unreplicated,omitempty"`
	Unknown      int   `json:"unknown,omitempty"`
}

// FailoverID makes the id of an order: it sorts by time and can be read out over a telephone.
func FailoverID(now time.Time) string {
	return fmt.Sprintf("%s%s-%03d", FailoverPrefix, now.UTC().Format("20060102-150405"), now.UTC().Nanosecond()/int(time.Millisecond))
}

// FailoverPrefix is what the id of every order begins with.
const FailoverPrefix = "fo-"

// FailedMove is a topic that could not be moved.
type FailedMove struct {
	Name    string `json:"name"`
	Problem string `json:"problem"`
}

// MaxFailed bounds Failover.Failed.
const MaxFailed = 100

// FailoverState is how far an order is.
type FailoverState string

// The states.
const (
	FailoverRequested  FailoverState = "requested"
	FailoverRunning    FailoverState = "running"
	FailoverDone       FailoverState = "done"       // all have moved, and every live proxy has reported
	FailoverIncomplete FailoverState = "incomplete" // something has failed or did not report
	FailoverAborted    FailoverState = "aborted"    // somebody wished so; what had moved stays moved
)

// Over tells whether nothing more will happen.
func (s FailoverState) Over() bool {
	return s == FailoverDone || s == FailoverIncomplete || s == FailoverAborted
}

// FailoverFacts is what is known of one topic, or of the topics of one rule, that are moved off a dead cluster, and what was done for them.
type FailoverFacts struct {
	// Topics is how many topics it is about, and Unknown of how many of them nothing was ever seen.
	Topics  int `json:"topics"`
	Unknown int `json:"unknown"`
	// Measured is when the cluster was last seen: the oldest time of all topics.
	Measured time.Time `json:"measured,omitzero"`
	// Backlog are the entries that had not been replicated then, Delay the age of the oldest of them in seconds, and Unreplicated how many topics
	// had no replication to the new cluster: of those it has nothing.
	Backlog      int64 `json:"backlog"`
	Delay        int64 `json:"delay_seconds"`
	Unreplicated int   `json:"unreplicated"`
	// Subscriptions is how many were seen, Missing how many of them the new cluster lacks, Created how many were made there, and Again how many entries
	// those deliver that may have been consumed before.
	Subscriptions int   `json:"subscriptions"`
	Missing       int   `json:"missing"`
	Created       int   `json:"created"`
	Again         int64 `json:"again"`
	// Names are the subscriptions that are missing, "topic subscription", at most MaxFailoverNames.
	Names []string `json:"names,omitempty"`
	// Problems are what keeps a topic from working on the new cluster, Notes what somebody should know; at most MaxFailoverNames of each.
	Problems []string `json:"problems,omitempty"`
	Notes    []string `json:"notes,omitempty"`
}

// MaxFailoverNames bounds the lists of FailoverFacts.
const MaxFailoverNames = 50

// Add takes in what is known of more topics.
func (f *FailoverFacts) Add(other FailoverFacts) {
	if !other.Measured.IsZero() && (f.Measured.IsZero() || other.Measured.Before(f.Measured)) {
		f.Measured = other.Measured
	}
	f.Topics, f.Unknown, f.Backlog, f.Unreplicated = f.Topics+other.Topics, f.Unknown+other.Unknown, f.Backlog+other.Backlog, f.Unreplicated+other.Unreplicated
	f.Delay = max(f.Delay, other.Delay)
	f.Subscriptions, f.Missing, f.Created, f.Again = f.Subscriptions+other.Subscriptions, f.Missing+other.Missing, f.Created+other.Created, f.Again+other.Again
	some := func(into *[]string, more []string) {
		*into = append(*into, more[:min(len(more), MaxFailoverNames-len(*into))]...)
	}
	some(&f.Names, other.Names)
	some(&f.Problems, other.Problems)
	some(&f.Notes, other.Notes)
}
