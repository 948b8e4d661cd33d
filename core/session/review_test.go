package session

import (
	"fmt"
	"testing"
	"time"
)

// A review of many topics looks at a bounded number of them in one turn of the loop, and reports when it is through.
func TestAReviewOfManyTopicsIsDoneInSteps(t *testing.T) {
	const topics = 3*reviewSlice + 1
	p, step := withProducers(t, topics)
	step("rule public/default b")
	done := 0
	p.sh.Review(p.now, Assigned{}, func(e Evicted) {
		if done++; e.Producers != topics {
			t.Errorf("%d producers were closed, want %d", e.Producers, topics)
		}
	})
	evicted := func() int { return int(p.sh.counters.EvictedProducers.Load()) }
	for i := range 4 {
		if want := min((i+1)*reviewSlice, topics); evicted() != want {
			t.Errorf("after %d steps %d producers are closed, want %d", i+1, evicted(), want)
		}
		if (done == 1) != (i == 3) {
			t.Errorf("after %d steps it is reported %d times", i+1, done)
		}
		p.now = p.now.Add(reviewStep)
		p.sh.Tick(p.now)
	}
	p.now = p.now.Add(time.Second)
	p.sh.Tick(p.now)
	if done != 1 {
		t.Errorf("the end was reported %d times", done)
	}
}

// withProducers has a client open a producer on each of many topics.
func withProducers(t *testing.T, topics int) (p *player, step func(format string, args ...any)) {
	p = newPlayer(t, false)
	p.sh.cfg.EvictBurst, p.sh.cfg.MaxHandles = topics, topics
	step = func(format string, args ...any) {
		t.Helper()
		if err := p.step(fmt.Sprintf(format, args...)); err != nil {
			t.Fatal(err)
		}
	}
	step("rule public/default a")
	step("client c1")
	step(`c1> connect{client_version:"x" protocol_version:21 proxy_to_broker_url:"TAG(a,broker-0:6650)"}`)
	step("d1 up")
	step(`d1> connected{server_version:"x" protocol_version:21}`)
	for i := range topics {
		step(`c1> producer{topic:"t%d" producer_id:%d request_id:%d}`, i, i, i)
		step(`d1> producer_success{request_id:%d producer_name:"p%d" producer_ready:true}`, i, i)
	}
	return p, step
}

// P8: so does what a map that is too old, and one that is not any more, means for many topics.
func TestAnAgeThatConcernsManyTopicsIsLookedAtInSteps(t *testing.T) {
	const topics = reviewSlice + 1
	p, step := withProducers(t, topics)
	send := func(seq int) {
		for i := range topics {
			step(`c1> send{producer_id:%d sequence_id:%d} +10`, i, seq)
		}
	}
	tick := func(d time.Duration) {
		p.now = p.now.Add(d)
		p.sh.Tick(p.now)
		p.perform()
	}
	dropped := func() int { return int(p.sh.counters.DroppedSends.Load()) }
	p.sh.Age(p.now, true)
	for i := range 2 {
		before := dropped()
		send(2*i + 1)
		if want := min((i+1)*reviewSlice, topics); dropped()-before != want {
			t.Errorf("after %d steps %d SENDs were dropped, want %d", i+1, dropped()-before, want)
		}
		for n := range topics { // those that passed
			step(`d1> send_receipt{producer_id:%d sequence_id:%d}`, n, 2*i+1)
		}
		tick(reviewStep)
	}
	p.sh.Age(p.now, false)
	p.sh.Age(p.now, true)
	p.sh.Age(p.now, false)
	tick(reviewStep)
	tick(reviewStep)
	tick(time.Second)
	if n := int(p.sh.counters.EvictedProducers.Load()); n != topics {
		t.Errorf("%d producers that dropped something were closed, want %d", n, topics)
	}
}
