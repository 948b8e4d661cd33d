//go:build e2e

package e2e

import (
	"net/http"
	"testing"
	"time"
)

// LK-01 is only worth something when the names really are the same, and both brokers of each cluster own something.
func TestBothClustersAdvertiseTheSameBrokerNames(t *testing.T) {
	ctx := limited(t, 30*time.Second)
	seen := map[string]map[string]bool{}
	for _, c := range []*Cluster{rig.A, rig.B} {
		seen[c.Name] = map[string]bool{}
		for range 40 {
			var answer struct {
				BrokerURL string `json:"brokerUrl"`
			}
			must(t, c.Admin(ctx, http.MethodGet, "/lookup/v2/topic/"+adminPath(newTopic("acme/plain", "names"))+"?listenerName=external", nil, &answer))
			if seen[c.Name][answer.BrokerURL] = true; len(seen[c.Name]) == 2 {
				break
			}
		}
	}
	for _, name := range []string{"pulsar://broker-0:6650", "pulsar://broker-1:6650"} {
		if !seen["a"][name] || !seen["b"][name] {
			t.Errorf("brokers by listener external: a %v, b %v; want %s in both", seen["a"], seen["b"], name)
		}
	}
}
