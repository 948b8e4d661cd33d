package netio

import (
	"testing"
	"time"
)

func TestATurnIsCountedByTheTimeThatItsEventsTook(t *testing.T) {
	var c counters
	for _, events := range [][]time.Duration{{}, {200 * time.Microsecond, 300 * time.Microsecond}, {time.Millisecond, time.Nanosecond}, {5 * time.Millisecond}, {time.Second, time.Second}, {time.Microsecond}} {
		for _, took := range events {
			c.busy.Add(int64(took))
		}
		c.turn()
	}
	var got [len(TurnBounds) + 1]int64
	for i := range c.turns {
		got[i] = c.turns[i].Load()
	}
	if want := [...]int64{3, 0, 2, 0, 0, 1}; got != want {
		t.Errorf("turns by class %v, want %v", got, want)
	}
	if longest := time.Duration(c.longestTurn.Load()); longest != 2*time.Second {
		t.Errorf("the longest took %s", longest)
	}
	if n := testing.AllocsPerRun(100, c.turn); n != 0 {
		t.Errorf("%v allocations per turn", n)
	}
}
