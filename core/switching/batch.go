package switching

import (
	"fmt"
	"time"
)

// BatchState is how far a batch has come.
type BatchState string

// The states of a batch, in their order.
const (
	// BatchNew: whoever asked for it is still writing down its topics.
	BatchNew BatchState = "new"
	// BatchChecking: the leader runs the preflight of every topic; nothing has moved.
	BatchChecking BatchState = "checking"
	// BatchMoving: topics move, wave after wave.
	BatchMoving BatchState = "moving"
	// BatchDraining, of mode drain: the producers of all topics have moved, and subscriptions still read the old cluster.
	BatchDraining BatchState = "draining"
	// BatchRuling: all topics of a namespace have moved, and one rule takes the place of their entries.
	BatchRuling BatchState = "ruling"
	// BatchDone: every topic is on the new cluster.
	BatchDone BatchState = "done"
	// BatchIncomplete: it has ended, and some topics were skipped or failed, or some proxy has not reported.
	BatchIncomplete BatchState = "incomplete"
	// BatchAborted: its operator has given it up. What had moved by then stays moved.
	BatchAborted BatchState = "aborted"
)

// Over tells whether nothing more will happen, unless somebody resumes it.
func (s BatchState) Over() bool { return s == BatchDone || s == BatchIncomplete || s == BatchAborted }

// Gate is what pauses a batch by itself.
type BatchGate string

// The gates of a batch.
const (
	GateOperator  BatchGate = "operator"  // somebody wants it to pause
	GatePreflight BatchGate = "preflight" // topics are blocked, and the operator wants none left behind unseen
	GateFailed    BatchGate = "failed"    // too many switches were aborted or are incomplete
	GateHold      BatchGate = "hold"      // publishers wait too long
	GateBacklog   BatchGate = "backlog"   // replication has too much to send
	GateNamespace BatchGate = "namespace" // topics keep appearing on the old cluster
)

// BatchGates are all of them, for metrics.
var BatchGates = [...]BatchGate{GateOperator, GatePreflight, GateFailed, GateHold, GateBacklog, GateNamespace}

// BatchPause is why nothing of a batch begins. What has begun goes on to its end.
type BatchPause struct {
	Gate BatchGate `json:"gate"`
	Why  string    `json:"why"`
	At   time.Time `json:"at"`
}

// OnBlocked is what becomes of a batch when a preflight does not let a topic move.
type OnBlocked string

// What may become of it.
const (
	StopOnBlocked OnBlocked = "stop" // it pauses
	SkipOnBlocked OnBlocked = "skip" // the topic is left where it is, and listed
)

// BatchLimits are how a batch goes about it.
type BatchLimits struct {
	// Waves are how many topics have moved when each wave is over: numbers ("1") or shares ("10%"). The last one is everything.
	Waves []string `json:"waves"`
	// Pace is how many switches begin in a second at most; 0 for no limit. Parallel is how many are under way at once at most.
	Pace     float64 `json:"pace,omitempty"`
	Parallel int     `json:"parallel"`
	// MaxFailed is the share of aborted and incomplete switches above which the batch pauses, 0 to 1; MaxHoldMillis the same for the 99th
	// percentile of how long publishers waited, and MaxBacklog for the entries of one of the next topics that are not replicated. 0: no gate (for MaxFailed: any).
	MaxFailed     float64   `json:"max_failed"`
	MaxHoldMillis float64   `json:"max_hold_ms"`
	MaxBacklog    int64     `json:"max_backlog"`
	OnBlocked     OnBlocked `json:"on_blocked"`
	Force         bool      `json:"force,omitempty"`      // topics move in spite of warnings
	Reversible    bool      `json:"reversible,omitempty"` // the way back is checked as strictly as the way there
}

// Bounds of batches.
const (
	// MaxBatchTopics is how many topics one batch moves.
	MaxBatchTopics = 100_000
	// MaxBatchParallel is how many switches may be under way at once, of all batches together: each holds a topic, and asks both clusters.
	MaxBatchParallel = 64
	// MaxBatchDraining is how many topics of one batch may drain at once: the leader looks at each of them, again and again.
	MaxBatchDraining = 500
	// MaxBatchNote is the length to which what is said of a topic is cut, in bytes: a part is one value of a store.
	MaxBatchNote = 240
	// MaxPartItems and MaxPartBytes (of names) bound a part. With the longest notes it stays below 256 KiB.
	MaxPartItems = 400
	MaxPartBytes = 96 << 10
	// MaxBatchListed is how many topics a batch names in texts and lists.
	MaxBatchListed = 100
)

// Batch is the stored account of the move of many topics by one command. Its topics are in its parts.
type Batch struct {
	ID string `json:"id"`
	// Rev counts the writes: revision n replaces n−1 and nothing else. The leader and operators both write it.
	Rev uint64 `json:"rev"`
	// From are the clusters that its topics were on at its start.
	From []string `json:"from"`
	To   string   `json:"to"`
	Mode Mode     `json:"mode"`
	// Scope is what was asked for, in words for an operator. Namespace is set when a whole one moves, and so ends as one rule.
	Scope     string      `json:"scope"`
	Namespace string      `json:"namespace,omitempty"`
	Limits    BatchLimits `json:"limits"`
	State     BatchState  `json:"state"`
	Pause     *BatchPause `json:"pause,omitempty"`
	// Abort tells that it is to be given up.
	Abort bool `json:"abort,omitempty"`
	// WishBy is who has spoken last since Who asked: of the abort or of the pause, or, without them, of the resume.
	WishBy string `json:"wish_by,omitempty"`
	// Resumed counts how often somebody has resumed it: what has failed or was blocked is tried again. Retried is how many of them the leader has taken up.
	Resumed uint32 `json:"resumed,omitempty"`
	Retried uint32 `json:"retried,omitempty"`
	// Parts is how many parts its topics are in.
	Parts int `json:"parts"`
	// Ends are how many topics there are up to the end of each wave; Wave is the one under way, from 0.
	Ends  []int      `json:"ends"`
	Wave  int        `json:"wave"`
	Count BatchCount `json:"count"`
	// Forecast sums up the preflights of its topics.
	Forecast BatchForecast `json:"forecast"`
	// HoldP50 and HoldP99 are of the last holds, in milliseconds.
	HoldP50 float64 `json:"hold_p50_ms,omitempty"`
	HoldP99 float64 `json:"hold_p99_ms,omitempty"`
	// AtOnce is how many switches are under way at once at most, when that is fewer than Limits.Parallel: publishers would only wait longer.
	AtOnce int `json:"at_once,omitempty"`
	// ETA is when it would end at the pace of its last topics; zero when that is not known.
	ETA time.Time `json:"eta,omitzero"`
	// Warnings are what its operator should know that stops nothing: siblings that stay behind, above all.
	Warnings []string  `json:"warnings,omitempty"`
	Runner   string    `json:"runner,omitempty"`
	Who      string    `json:"who,omitempty"`
	Why      string    `json:"why,omitempty"`
	Started  time.Time `json:"started"`
	// Moving is when the first topic began; Ended when it was over.
	Moving time.Time `json:"moving,omitzero"`
	Ended  time.Time `json:"ended,omitzero"`
	Note   string    `json:"note,omitempty"`
	// Ruled tells that the namespace's rule is written; Rule is its epoch, Removed how many entries it has replaced.
	Ruled   bool   `json:"ruled,omitempty"`
	Rule    uint64 `json:"rule_epoch,omitempty"`
	Removed int    `json:"removed,omitempty"`
}

// BatchCount is how many topics of a batch are in which state.
type BatchCount struct {
	Total   int `json:"total"`
	Checked int `json:"checked"` // by the first preflight, whatever it found
	Blocked int `json:"blocked"`
	Skipped int `json:"skipped"` // were there already, or are gone
	Running int `json:"running"`
	Moved   int `json:"moved"` // of a drain: its producers have
	Failed  int `json:"failed"`
	// Troubled are those that have moved with something to tell: a proxy did not report.
	Troubled int `json:"troubled"`
	// Draining are those that have moved and whose subscriptions still read the old cluster, in mode drain.
	Draining int `json:"draining,omitempty"`
}

// Left is how many topics may still move.
func (c BatchCount) Left() int { return c.Total - c.Blocked - c.Skipped - c.Moved - c.Failed }

// BatchForecast sums up preflights.
type BatchForecast struct {
	Topics       int     `json:"topics"` // with a forecast
	MaxHold      float64 `json:"max_hold_ms"`
	Duplicates   int64   `json:"duplicates"`
	Producers    int     `json:"producers"`
	Consumers    int     `json:"consumers"`
	BytesIn      float64 `json:"bytes_in_per_second"`
	BytesOut     float64 `json:"bytes_out_per_second"`
	Unreplicated int64   `json:"unreplicated"`
	// ToDrain are the entries that subscriptions have still to acknowledge on the old cluster, in mode drain.
	ToDrain int64 `json:"to_drain,omitempty"`
}

// Add counts one topic's.
func (b *BatchForecast) Add(f *Forecast) {
	if f == nil {
		return
	}
	b.Topics++
	b.MaxHold = max(b.MaxHold, f.HoldMillis)
	b.Duplicates += f.Duplicates
	b.Producers += f.Producers
	b.Consumers += f.Consumers
	b.BytesIn += f.BytesIn
	b.BytesOut += f.BytesOut
	b.Unreplicated += f.Unreplicated
	for _, l := range f.Draining {
		b.ToDrain += l.Backlog
	}
}

// Shown is the state as an operator sees it.
func (b Batch) Shown() string {
	switch {
	case b.State.Over():
		return string(b.State)
	case b.Abort:
		return "aborting"
	case b.Pause != nil:
		return "paused"
	}
	return string(b.State)
}

// SwitchID is the id of the switch of the topic with that index.
func (b Batch) SwitchID(index int) string { return fmt.Sprintf("%s-%d", b.ID, index+1) }

// ItemState is what has become of one topic of a batch.
type ItemState string

// The states of a topic in a batch.
const (
	ItemWaiting ItemState = ""        // nothing yet
	ItemChecked ItemState = "checked" // the first preflight lets it move
	ItemBlocked ItemState = "blocked" // a preflight does not
	ItemRunning ItemState = "running" // only in status: parts are written once in a while
	ItemMoved   ItemState = "moved"
	ItemFailed  ItemState = "failed"  // its switch was aborted, or could not be asked for
	ItemSkipped ItemState = "skipped" // there is nothing to move
)

// Over tells whether the batch has nothing more to do with the topic, unless it is resumed.
func (s ItemState) Over() bool {
	return s == ItemBlocked || s == ItemMoved || s == ItemFailed || s == ItemSkipped
}

// BatchItem is one topic of a batch.
type BatchItem struct {
	Topic string    `json:"t"`
	State ItemState `json:"s,omitempty"`
	// Joined: it belongs together with the topic before it, and moves in the same wave.
	Joined bool `json:"j,omitempty"`
	// Attempt of its switch that counts; 0 is the first.
	Attempt uint32 `json:"a,omitempty"`
	Note    string `json:"n,omitempty"` // why it is blocked, failed or skipped, or what its switch has noted
}

// BatchPart is a stored piece of the topics of a batch, in the order in which they move.
type BatchPart struct {
	Index int         `json:"index"`
	Rev   uint64      `json:"rev"`
	Items []BatchItem `json:"items"`
}

// SplitBatch cuts the topics of a batch into parts, without revisions. Only the last part of a batch ever grows.
func SplitBatch(items []BatchItem, first int) []BatchPart {
	var parts []BatchPart
	bytes := 0
	for i, it := range items {
		if i == 0 || len(parts[len(parts)-1].Items) == MaxPartItems || bytes+len(it.Topic) > MaxPartBytes {
			parts, bytes = append(parts, BatchPart{Index: first + len(parts)}), 0
		}
		last := &parts[len(parts)-1]
		last.Items = append(last.Items, it)
		bytes += len(it.Topic)
	}
	return parts
}

// CutNote bounds what is said of a topic.
func CutNote(text string) string {
	if len(text) <= MaxBatchNote {
		return text
	}
	cut := MaxBatchNote - len("…")
	for cut > 0 && text[cut]&0xc0 == 0x80 { // not within a character
		cut--
	}
	return text[:cut] + "…"
}
