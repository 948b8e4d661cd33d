package controller

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// receipt is the one that is being made.
func (d *driver) receipt() *switching.Receipt {
	if d.rec.Receipt == nil {
		d.rec.Receipt = &switching.Receipt{}
	}
	return d.rec.Receipt
}

// cloneReceipt is one that shares nothing that is written to: a store keeps what it is given.
func cloneReceipt(r *switching.Receipt) *switching.Receipt {
	if r == nil {
		return nil
	}
	c := *r
	c.Steps, c.Acks = slices.Clone(r.Steps), slices.Clone(r.Acks)
	return &c
}

// note adds a step to the receipt.
func (d *driver) note(step switching.Step, r switching.Report, took time.Duration) {
	if d.rec.State == switching.StateDraining && !d.rec.Return && r.Answer == switching.OK && step.Work != switching.WorkWrite {
		return // it is done every second, maybe for days
	}
	name := step.Work.String()
	if step.Work == switching.WorkWrite {
		name = "write " + string(step.Record.State)
	}
	why := ""
	if r.Answer != switching.OK {
		why = r.Why
	}
	d.addStep(name, r.Began, took, why)
}

func (d *driver) addStep(name string, began time.Time, took time.Duration, why string) {
	rc := d.receipt()
	if n := len(rc.Steps); n > 0 && rc.Steps[n-1].Work == name {
		last := &rc.Steps[n-1]
		last.Times = max(last.Times, 1) + 1
		last.Millis, last.Why = millis(began.Add(took).Sub(last.Began)), why
		return
	}
	if len(rc.Steps) < maxSteps {
		rc.Steps = append(rc.Steps, switching.StepTime{Work: name, Began: began, Millis: millis(took), Why: why})
	}
}

// maxSteps bounds a receipt; a switch has some twenty steps.
const maxSteps = 200

func millis(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }

func (d *driver) carried(all []switching.Carried) {
	rc := d.receipt()
	rc.SubscriptionCount, rc.DuplicatesForecast = len(all), 0
	d.ways, d.inexact = [len(carryWays)]int{}, [len(inexactKinds)]int64{}
	for _, c := range all {
		if d.rec.Mode != switching.ModeDrain {
			d.ways[max(0, slices.Index(carryWays[:], pulsaradmin.How(c.By)))]++
			for i, n := range [...]int64{c.Unacked, c.Repeated, c.Missing} {
				d.inexact[i] += n
			}
		}
		rc.DuplicatesForecast += c.Unacked + c.Repeated
	}
	rc.Subscriptions = all[:min(len(all), switching.MaxCarried)]
}

// addAcks writes down what the proxies have said. Without it the receipt is still true. A switch is done because all have said what there is to say
// when they were last asked, and an abort must not keep the topic waiting for more; of others there may be more by now.
func (d *driver) addAcks(ctx context.Context, end switching.State) {
	acks := d.acks
	if acks == nil || end != switching.StateDone && end != switching.StateAborted {
		var err error
		if acks, err = d.c.cfg.Store.Acks(ctx, d.key.Switch); err != nil {
			return
		}
	}
	rc := d.receipt()
	rc.Acks = nil
	for _, a := range acks {
		if a.Attempt == d.key.Attempt {
			a.Claims = nil
			rc.Acks = append(rc.Acks, a)
		}
	}
}

// stats are the numbers of a controller, for /metrics.
type stats struct {
	leading atomic.Bool
	states  atomic.Pointer[map[switching.State]int] // of those that are not over
	over    [len(endStates)]atomic.Uint64
	carried [len(carryWays)]atomic.Uint64
	inexact [len(inexactKinds)]atomic.Uint64
	differs [len(differTimes)]atomic.Uint64
	hold    histogram
	batches batchStats
	drains  drainStats
}

// ended counts a switch that this controller has driven to its end.
func (s *stats) ended(state switching.State) {
	for i, end := range endStates {
		if end == state {
			s.over[i].Add(1)
		}
	}
}

// note counts the planned switches that are under way by state.
func (s *stats) note(records []switching.Record) {
	count := map[switching.State]int{}
	for _, r := range records {
		if r.Mode.Driven() {
			count[r.State]++
		}
	}
	s.states.Store(&count)
}

// histogram counts into fixed buckets, in seconds.
type histogram struct {
	counts [len(holdBuckets) + 1]atomic.Uint64
	micros atomic.Uint64
}

// holdBuckets are the upper bounds of pointsman_switch_hold_seconds.
var holdBuckets = [...]float64{.01, .025, .05, .1, .25, .5, 1, 2, 5, 10}

func (h *histogram) observe(seconds float64) {
	i := 0
	for i < len(holdBuckets) && seconds > holdBuckets[i] {
		i++
	}
	h.counts[i].Add(1)
	h.micros.Add(uint64(seconds * 1e6))
}

var (
	descLeading = prometheus.NewDesc("pointsman_switch_leader", "1 while this proxy drives the planned switches.", nil, nil)
	descStates  = prometheus.NewDesc("pointsman_switches", "Switches in mode planned or drain that are under way, by state; the leader tells, on other proxies it is absent.", []string{"state"}, nil)
	descEnded   = prometheus.NewDesc("pointsman_switches_ended_total", "Switches in mode planned or drain that ended while this proxy drove them, by state.", []string{"state"}, nil)
	descCarried = prometheus.NewDesc("pointsman_switch_subscriptions_total", "Subscriptions of a partition that switches have carried which this proxy drove to their end, by how messages were recognised on the new cluster.", []string{"by"}, nil)
	descInexact = prometheus.NewDesc("pointsman_switch_carried_entries_total", "What was not carried exactly by switches that this proxy drove to their end. in_hand: messages that consumers had and did not acknowledge, which may come again; repeated: acknowledged entries that come again; missing: entries without a copy that are not acknowledged, for which the switch was aborted.", []string{"what"}, nil)
	descDiffers = prometheus.NewDesc("pointsman_switch_carry_differences_total", "Times that this proxy has found subscriptions of the new cluster not as they were to be carried: in the fence, where it carries them again, or after_flip, with more to deliver.", []string{"when"}, nil)
	descHold    = prometheus.NewDesc("pointsman_switch_hold_seconds", "How long topics were fenced in switches that this proxy has driven to the new cluster.", nil, nil)
)

// The states exist in the metrics from the start, at zero.
var (
	runStates    = [...]switching.State{switching.StateRequested, switching.StatePrepared, switching.StateFenced, switching.StateEvicting, switching.StateDraining}
	carryWays    = [...]pulsaradmin.How{pulsaradmin.AtEnd, pulsaradmin.ByOrigin, pulsaradmin.ByProducer, pulsaradmin.ByTime, pulsaradmin.NotThere}
	inexactKinds = [...]string{"in_hand", "repeated", "missing"}
	differTimes  = [...]string{"fence", "after_flip"}
	endStates    = [...]switching.State{switching.StateDone, switching.StateIncomplete, switching.StateAborted, switching.StateReturned}
)

// Describe implements prometheus.Collector.
func (c *Controller) Describe(ch chan<- *prometheus.Desc) {
	ch <- descLeading
	ch <- descStates
	ch <- descEnded
	ch <- descCarried
	ch <- descInexact
	ch <- descDiffers
	ch <- descHold
	describeBatches(ch)
	ch <- descDrainSubs
	ch <- descDrainBacklog
}

// Collect implements prometheus.Collector.
func (c *Controller) Collect(ch chan<- prometheus.Metric) {
	leading := 0.0
	if c.stats.leading.Load() {
		leading = 1
	}
	ch <- prometheus.MustNewConstMetric(descLeading, prometheus.GaugeValue, leading)
	if states := c.stats.states.Load(); leading == 1 && states != nil {
		for _, s := range runStates {
			ch <- prometheus.MustNewConstMetric(descStates, prometheus.GaugeValue, float64((*states)[s]), string(s))
		}
	}
	if leading == 1 {
		c.stats.batches.collect(ch)
		subs, backlog := c.stats.drains.sum()
		ch <- prometheus.MustNewConstMetric(descDrainSubs, prometheus.GaugeValue, float64(subs))
		ch <- prometheus.MustNewConstMetric(descDrainBacklog, prometheus.GaugeValue, float64(backlog))
	}
	for i, s := range endStates {
		ch <- prometheus.MustNewConstMetric(descEnded, prometheus.CounterValue, float64(c.stats.over[i].Load()), string(s))
	}
	for i, way := range carryWays {
		ch <- prometheus.MustNewConstMetric(descCarried, prometheus.CounterValue, float64(c.stats.carried[i].Load()), strings.ReplaceAll(string(way), " ", "_"))
	}
	for i, what := range inexactKinds {
		ch <- prometheus.MustNewConstMetric(descInexact, prometheus.CounterValue, float64(c.stats.inexact[i].Load()), what)
	}
	for i, when := range differTimes {
		ch <- prometheus.MustNewConstMetric(descDiffers, prometheus.CounterValue, float64(c.stats.differs[i].Load()), when)
	}
	buckets, total := make(map[float64]uint64, len(holdBuckets)), uint64(0)
	for i, bound := range holdBuckets {
		total += c.stats.hold.counts[i].Load()
		buckets[bound] = total
	}
	total += c.stats.hold.counts[len(holdBuckets)].Load()
	ch <- prometheus.MustNewConstHistogram(descHold, total, float64(c.stats.hold.micros.Load())/1e6, buckets)
}
