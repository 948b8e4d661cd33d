package controller

import (
	"testing"

	"pointsman/internal/pulsaradmin"
)

// GR-02: an eviction makes the old cluster forget what consumers have in hand; what it said before counts for the forecast, but nothing that was acknowledged since.
func TestTheForecastRemembersWhatAnEvictionForgets(t *testing.T) {
	plan := pulsaradmin.Plan{Subscription: "s", Backlog: 100, Unacked: 3}
	for name, c := range map[string]struct {
		before []map[string]int64
		want   int64
	}{
		"without an eviction":                 {nil, 3},
		"forgotten":                           {[]map[string]int64{nil, {"s": 40, "other": 70}}, 40},
		"not more than there is left to have": {[]map[string]int64{nil, {"s": 400}}, 100},
		"more by now":                         {[]map[string]int64{nil, {"s": 1}}, 3},
		"a new subscription":                  {[]map[string]int64{nil, {}}, 3},
	} {
		topic := pulsarTopic{unacked: c.before}
		if got := topic.inHand(1, plan); got != c.want {
			t.Errorf("%s: %d entries in hand, want %d", name, got, c.want)
		}
	}
}
