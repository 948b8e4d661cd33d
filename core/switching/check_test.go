package switching

import (
	"fmt"
	"hash/maphash"
	"strings"
	"syscall"
	"time"
)

// seen is a set of 16-byte hashes, with a number for each: the order of discovery, from 1.
type seen struct {
	keys []([2]uint64) // by slot; zero is empty
	ids  []uint32
	n    int
}

func newSeen() *seen {
	return &seen{keys: make([][2]uint64, 1<<12), ids: make([]uint32, 1<<12)}
}

// add gives the number of the key, and whether it is new.
func (s *seen) add(k [2]uint64) (uint32, bool) {
	if s.n*8 >= len(s.keys)*7 {
		old := *s
		s.keys, s.ids = make([][2]uint64, 2*len(old.keys)), make([]uint32, 2*len(old.keys))
		for i, key := range old.keys {
			if key != [2]uint64{} {
				slot := s.slot(key)
				s.keys[slot], s.ids[slot] = key, old.ids[i]
			}
		}
	}
	slot := s.slot(k)
	if s.keys[slot] == k {
		return s.ids[slot], false
	}
	s.n++
	s.keys[slot], s.ids[slot] = k, uint32(s.n)
	return uint32(s.n), true
}

func (s *seen) slot(k [2]uint64) int {
	mask := len(s.keys) - 1
	i := int(k[0]) & mask
	for s.keys[i] != [2]uint64{} && s.keys[i] != k {
		i = (i + 1) & mask
	}
	return i
}

// step is how a state was found first.
type foundBy struct {
	parent uint32
	nth    uint16 // of the events of the parent
}

// search goes through all states of a config, depth first.
type search struct {
	model
	seeds    [2]maphash.Seed
	buf      []byte
	seen     *seen
	found    []foundBy // by number − 1
	edges    [][2]uint32
	goods    []uint32
	coverage [kinds]int
	limit    int // of states; 0 is none
	cut      bool
	deepest  int
	steps    int
	pruned   int
	trace    string // of the violation
}

func newSearch(c config, limit int) *search {
	return &search{model: model{config: c}, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, seen: newSeen(), limit: limit}
}

func (s *search) hash(w *world) [2]uint64 {
	s.buf = s.appendWorld(s.buf[:0], w)
	return [2]uint64{maphash.Bytes(s.seeds[0], s.buf), maphash.Bytes(s.seeds[1], s.buf) | 1}
}

// item is a state whose events are still to be followed.
type item struct {
	w  world
	id uint32
}

// run gives the violation, "" when there is none.
func (s *search) run() string {
	w := s.initial()
	id, _ := s.seen.add(s.hash(&w))
	s.found = append(s.found, foundBy{})
	stack := []item{{w, id}}
	for len(stack) > 0 {
		s.deepest = max(s.deepest, len(stack))
		it := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		nth := uint16(0)
		s.each(&it.w, func(e event, next *world) {
			nth++
			s.steps++
			if s.trace != "" {
				return
			}
			if s.bad == "" {
				s.check(next)
			}
			if s.bad != "" {
				s.trace = s.tell(it.id) + fmt.Sprintf("%v\n%s", e, s.bad)
				return
			}
			if s.full {
				s.full = false
				s.pruned++
				return
			}
			s.coverage[e.kind]++
			id, isNew := s.seen.add(s.hash(next))
			if s.live && !e.fault {
				s.edges = append(s.edges, [2]uint32{it.id, id})
			}
			if !isNew {
				return
			}
			s.found = append(s.found, foundBy{it.id, nth})
			if s.live && s.good(next) {
				s.goods = append(s.goods, id)
			}
			if s.limit > 0 && s.seen.n >= s.limit {
				s.cut = true
				return
			}
			stack = append(stack, item{*next, id})
		})
		if s.trace != "" {
			return s.bad
		}
	}
	if s.live && !s.cut {
		return s.stuck()
	}
	return ""
}

// stuck is I5: a state from which the good end cannot be reached without further faults.
func (s *search) stuck() string {
	first := make([]uint32, s.seen.n+2) // edges by target
	for _, e := range s.edges {
		first[e[1]+1]++
	}
	for i := 1; i < len(first); i++ {
		first[i] += first[i-1]
	}
	sources := make([]uint32, len(s.edges))
	at := append([]uint32(nil), first...)
	for _, e := range s.edges {
		sources[at[e[1]]] = e[0]
		at[e[1]]++
	}
	reached := make([]bool, s.seen.n+1)
	queue := append([]uint32(nil), s.goods...)
	for _, id := range queue {
		reached[id] = true
	}
	for len(queue) > 0 {
		id := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		for _, from := range sources[first[id]:first[id+1]] {
			if !reached[from] {
				reached[from] = true
				queue = append(queue, from)
			}
		}
	}
	for id := 1; id <= s.seen.n; id++ {
		if !reached[id] {
			s.trace = s.tell(uint32(id))
			s.bad = "I5: from here the good end cannot be reached"
			return s.bad
		}
	}
	return ""
}

// tell replays how a state was found.
func (s *search) tell(id uint32) string {
	var path []uint16
	for id > 1 {
		path = append(path, s.found[id-1].nth)
		id = s.found[id-1].parent
	}
	m := model{config: s.config}
	w := m.initial()
	var text strings.Builder
	for i := len(path) - 1; i >= 0; i-- {
		nth := uint16(0)
		at := w
		m.each(&at, func(e event, next *world) {
			if nth++; nth == path[i] {
				w = *next
				fmt.Fprintf(&text, "%v\n", e)
			}
		})
	}
	fmt.Fprintf(&text, "entry %+v\nrecord %+v\n", w.entry, w.rec)
	for i := range m.proxies {
		fmt.Fprintf(&text, "proxy %d: %+v\n", i+1, w.procs[i])
	}
	for i := range w.leaders {
		fmt.Fprintf(&text, "leader %d: %+v\n", i+1, w.leaders[i])
	}
	return text.String()
}

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (s *search) summary(took time.Duration) string {
	done := "complete"
	if s.cut {
		done = "NOT complete"
	}
	return fmt.Sprintf("%s: %s, %d states, %d steps, %.0fk states/s, %v CPU, stack %d, pruned %d", s.name, done, s.seen.n, s.steps, float64(s.seen.n)/took.Seconds()/1000, took.Round(time.Millisecond), s.deepest, s.pruned)
}
