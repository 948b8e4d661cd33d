package switching

import (
	"fmt"
	"slices"
	"time"
)

// Verdict is what a finding means for a planned switch.
type Verdict string

// The verdicts, the worst last.
const (
	// Fine: as it should be.
	Fine Verdict = "fine"
	// Warning: somebody has to decide that it is acceptable (--force).
	Warning Verdict = "warning"
	// Blocker: the switch would break a promise, or abort. Nothing overrides it.
	Blocker Verdict = "blocker"
)

// Worse is the worse one of two verdicts.
func (v Verdict) Worse(other Verdict) Verdict {
	rank := map[Verdict]int{Warning: 1, Blocker: 2}
	if rank[other] > rank[v] {
		return other
	}
	return v
}

// Refuses tells whether a topic with such a finding must not move. force goes over warnings.
func (v Verdict) Refuses(force bool) bool { return v != Fine && !(v == Warning && force) }

// CheckRequest asks for the preflight of one topic.
type CheckRequest struct {
	Topic, From, To string   // Topic is a base name
	Mode            Mode     // ModePlanned, or ModeDrain
	Reversible      bool     // the way back is wanted: what would be missing for it is a blocker
	With            []string // base names that move by the same command
	Handles         HandleFacts
	// Since, of the way back of a drain, is the last position of each partition of From that was there before the switch (Receipt.First).
	Since map[string]string
	Batch bool // one of many: the names of the namespace may be some seconds old
}

// HandleFacts is what the proxies say of their clients on a topic.
type HandleFacts struct {
	Producers, Consumers int
	Unasked              []string // proxies that could not be asked, each with the reason
}

// Preflight is what was found out before a planned switch of one topic.
type Preflight struct {
	Topic    string    `json:"topic"`
	From     string    `json:"from"`
	To       string    `json:"to"`
	Epoch    uint64    `json:"epoch"`   // that the flip would write
	Verdict  Verdict   `json:"verdict"` // the worst of all findings: fine, warning or blocker
	Findings []Finding `json:"findings"`
	// Subscriptions are how each would be carried, at most MaxCarried; SubscriptionCount is how many there are.
	Subscriptions     []Carried `json:"subscriptions"`
	SubscriptionCount int       `json:"subscription_count"`
	Forecast          *Forecast `json:"forecast"` // null when the clusters could not be read
	At                time.Time `json:"at"`
}

// Add appends a finding.
func (p *Preflight) Add(fs ...Finding) {
	for _, f := range fs {
		p.Findings = append(p.Findings, f)
		p.Verdict = Fine.Worse(p.Verdict).Worse(f.Verdict)
	}
}

// Refusal says why the topic must not move: its worst finding, and how many more there are. "" lets it. force goes over warnings.
func (p Preflight) Refusal(force bool) string {
	worst, text, more := Warning, "", 0
	for _, f := range p.Findings {
		switch {
		case !f.Verdict.Refuses(force):
		case text == "" || f.Verdict == Blocker && worst == Warning:
			if text != "" {
				more++
			}
			worst = f.Verdict
			if text = f.Item + ": " + f.Evidence; f.Remedy != "" {
				text += "; " + f.Remedy
			}
		default:
			more++
		}
	}
	if more > 0 {
		text += fmt.Sprintf(" (and %d more: `pointsman switch check --topic %s --to %s`)", more, p.Topic, p.To)
	}
	return text
}

// Passes tells whether the topic must not move for nothing but what passes by itself.
func (p Preflight) Passes(force bool) bool {
	return !slices.ContainsFunc(p.Findings, func(f Finding) bool { return f.Verdict.Refuses(force) && !f.Passing })
}

// Finding is one thing that a preflight has looked at.
type Finding struct {
	Item     string  `json:"item"`
	Verdict  Verdict `json:"verdict"`
	Evidence string  `json:"evidence"`
	Remedy   string  `json:"remedy,omitempty"`
	// Passing: it may be over in a moment, by itself. It is no finding of the topic, but of proxies that are not there now.
	Passing bool `json:"-"`
}

// Forecast is what a planned switch would cost, as far as can be told before.
type Forecast struct {
	// HoldMillis is how long publishers would wait: estimated from how long the same questions took now.
	HoldMillis float64 `json:"hold_ms"`
	// Duplicates are the entries that may be delivered twice, over all subscriptions: delivered by the old cluster and not acknowledged, or
	// acknowledged where it cannot be carried.
	Duplicates int64 `json:"duplicates"`
	// Bare is how many subscriptions are carried by producer, sequence id and time of publishing, because the old cluster's brokers do not say in the copies
	// where they come from: what clients acknowledge while the topic moves is among Duplicates then.
	Bare        int `json:"bare_copies,omitempty"`
	Producers   int `json:"producers"`   // connected to the old cluster
	Consumers   int `json:"consumers"`   // the same, readers included
	Connections int `json:"connections"` // that have them
	// BytesIn and BytesOut are per second, what the clients publish and are sent now: the new cluster gains both.
	BytesIn  float64 `json:"bytes_in_per_second"`
	BytesOut float64 `json:"bytes_out_per_second"`
	// Unreplicated are the entries that the replicator had still to send.
	Unreplicated int64 `json:"unreplicated"`
	// Draining is what each subscription has to do on the old cluster before it follows, in mode drain; at most MaxCarried, the longest first.
	Draining []Left `json:"draining,omitempty"`
}

// Left is what one subscription has still to do on the old cluster of a switch that drains, over all partitions.
type Left struct {
	Subscription string `json:"subscription"`
	// Backlog are the entries that are not acknowledged; those that are held back by delayed delivery are among them.
	Backlog int64 `json:"backlog"`
	Unacked int64 `json:"unacked"` // messages that consumers have and did not acknowledge
	Delayed int64 `json:"delayed,omitempty"`
	// Consumers is how many are connected, By some of them, by name and address.
	Consumers int      `json:"consumers"`
	By        []string `json:"by,omitempty"`
	// Oldest is when the oldest message that is not acknowledged was published, where that was looked up.
	Oldest time.Time `json:"oldest,omitzero"`
	// Reader: it is not durable; Subscription is then a name that its client made.
	Reader bool `json:"reader,omitempty"`
	// Leaving: nothing is left, and its consumers are being sent to the new cluster.
	Leaving bool `json:"leaving,omitempty"`
	// PerSecond is how fast the backlog has fallen lately, and ETA how many seconds are left at that rate; both omitted where that is not known.
	PerSecond float64 `json:"per_second,omitempty"`
	ETA       float64 `json:"eta_seconds,omitempty"`
}

// Draining is what the leader has seen last of a switch that drains.
type Draining struct {
	At time.Time `json:"at"`
	// Backlog and Subscriptions are those that are still on the old cluster, Readers the consumers there without a durable subscription.
	Subscriptions int   `json:"subscriptions"`
	Backlog       int64 `json:"backlog"`
	Readers       int   `json:"readers"`
	// ETA is how many seconds the slowest subscription will take as it goes now; omitted when one does not move, or that is not known yet.
	ETA float64 `json:"eta_seconds,omitempty"`
	// Left are those subscriptions and readers, the longest first, at most MaxCarried.
	Left []Left `json:"left"`
	// Why is what is waited for, or what is wrong.
	Why string `json:"why,omitempty"`
	// Copied is how many messages a way back has copied to the old cluster, and ToCopy how many are left.
	Copied int64 `json:"copied,omitempty"`
	ToCopy int64 `json:"to_copy,omitempty"`
}
