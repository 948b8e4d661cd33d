package store_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"pointsman/store"
	"pointsman/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(settled{m}) }

// settled gives what ended with the last test the time that it takes on a machine with other things to do; goleak waits for half a second only.
type settled struct{ *testing.M }

func (m settled) Run() (code int) {
	code = m.M.Run()
	for deadline := time.Now().Add(10 * time.Second); code == 0 && goleak.Find() != nil && time.Now().Before(deadline); {
	}
	return code
}

func TestMemoryKeepsThePromisesOfAStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Map {
		first := store.NewMemory()
		return storetest.Map{Open: func(*testing.T) store.Store { return first.Join() }}
	})
}

func TestMemoryThatRepeatsUpdatesKeepsThePromises(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Map {
		first := store.NewMemory()
		return storetest.Map{Open: func(*testing.T) store.Store {
			m := first.Join()
			m.SetFaults(store.Faults{RepeatUpdates: true})
			return m
		}}
	})
}

func TestFileKeepsThePromisesOfAStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Map {
		dir := t.TempDir()
		return storetest.Map{Single: true, Open: func(t *testing.T) store.Store {
			s, err := store.OpenFile(dir)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}}
	})
}
