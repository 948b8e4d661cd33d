//go:build e2e

package e2e

import "testing"

func TestBothClustersAdvertiseTheSameBrokerNames(t *testing.T) {
	t.Log(rig.A, rig.B)
}
