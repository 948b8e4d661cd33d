package session

import (
	"fmt"
	"testing"
	"time"
)

// A review of many topics looks at a bounded number of them in one turn of the loop, and reports when it is through.
func TestAReviewOfManyTopicsIsDoneInSteps(t *testing.T) {
	const topics = 3*reviewSlice + 1
	p := newPlayer(t, false)
	p.sh.cfg.EvictBurst, p.sh.cfg.MaxHandles = topics, topics
	step := func(format string, args ...any) {
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
	}
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
