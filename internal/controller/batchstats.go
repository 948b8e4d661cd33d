package controller

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"pointsman/core/switching"
)

// batchStats are the numbers of the batches that are not over, as the leader has last read them.
type batchStats struct {
	states [len(batchStates)]atomic.Int64
	paused [len(switching.BatchGates)]atomic.Int64
	left   atomic.Int64
}

// batchStates are those that are not over, as operators see them. They exist in the metrics from the start, at zero.
var batchStates = [...]string{"new", "checking", "moving", "draining", "ruling", "paused", "aborting"}

// note counts the batches that are under way.
func (s *batchStats) note(batches []switching.Batch) {
	left := 0
	var states [len(batchStates)]int64
	var paused [len(switching.BatchGates)]int64
	for _, b := range batches {
		left += b.Count.Left()
		for i, state := range batchStates {
			if b.Shown() == state {
				states[i]++
			}
		}
		for i, gate := range switching.BatchGates {
			if b.Pause != nil && b.Pause.Gate == gate {
				paused[i]++
			}
		}
	}
	s.left.Store(int64(left))
	for i, n := range states {
		s.states[i].Store(n)
	}
	for i, n := range paused {
		s.paused[i].Store(n)
	}
}

var (
	descBatches = prometheus.NewDesc("pointsman_batches", "Batches that are under way, by state; the leader tells, on other proxies it is absent.", []string{"state"}, nil)
	descPaused  = prometheus.NewDesc("pointsman_batches_paused", "Batches that wait for a resume, by the gate that has paused them; the leader tells.", []string{"gate"}, nil)
	descLeft    = prometheus.NewDesc("pointsman_batch_topics_left", "Topics of all batches that are under way that have still to move; the leader tells.", nil, nil)
)

func describeBatches(ch chan<- *prometheus.Desc) {
	ch <- descBatches
	ch <- descPaused
	ch <- descLeft
}

func (s *batchStats) collect(ch chan<- prometheus.Metric) {
	for i, state := range batchStates {
		ch <- prometheus.MustNewConstMetric(descBatches, prometheus.GaugeValue, float64(s.states[i].Load()), state)
	}
	for i, gate := range switching.BatchGates {
		ch <- prometheus.MustNewConstMetric(descPaused, prometheus.GaugeValue, float64(s.paused[i].Load()), string(gate))
	}
	ch <- prometheus.MustNewConstMetric(descLeft, prometheus.GaugeValue, float64(s.left.Load()))
}
