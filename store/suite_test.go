package store_test

import (
	"testing"

	"pointsman/internal/leaktest"
	"pointsman/store"
	"pointsman/store/storetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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
