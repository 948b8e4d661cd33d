// Package leaktest fails the tests of a package that leave goroutines behind. It must never be linked into the product.
package leaktest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

// settleTime is what a goroutine may take to end after the last test, on a machine with other things to do; goleak alone waits for half a second.
const settleTime = 10 * time.Second

// Main runs the tests of a package, as its TestMain, and looks for goroutines that are left; ours are those that may be.
func Main(m *testing.M, ours ...goleak.Option) {
	goleak.VerifyTestMain(settled{m, ours}, ours...)
}

type settled struct {
	*testing.M
	ours []goleak.Option
}

func (m settled) Run() (code int) {
	code = m.M.Run()
	for deadline := time.Now().Add(settleTime); code == 0 && goleak.Find(m.ours...) != nil && time.Now().Before(deadline); {
	}
	return code
}
