package e2e

import (
	"bytes"
	"errors"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Message is a receipt, or a message that was received.
type Message struct {
	N   int64   // its number; -1 of a message that is no driver's
	T   float64 // ms since 1970
	CRC uint32  // of the payload
	K   int     // index of the topic
	// Of what was received: the consumer's index, its subscription ("reader" of a reader beside others), the key, and the id as an application would store it.
	C              int
	S, Key, Stored string
}

// Log keeps messages in their order, in 16 bytes each: a long run has tens of millions. Copies share what they keep, and none of them sees what another one adds.
type Log struct {
	pages   []*[logPage]logged
	n       int
	first   int64    // µs since 1970 of its first message
	origins []origin // what many messages have in common
	known   map[string]uint32
}

const logPage = 1 << 14

type logged struct {
	n      int32
	after  int32 // first, in units of timeUnit
	crc    uint32
	origin uint32 // index in origins
}

// timeUnit is in µs: 31 bits of it are 5 hours.
const timeUnit = 10

type origin struct {
	k, c           int
	s, key, stored string
}

var errLine = errors.New("not a line of a message")

// add takes the fields of a line that a driver has printed (clients/README.md), and keeps nothing of its bytes.
func (l *Log) add(line []byte) error {
	var fields [3]int64
	rest := line
	for i := range fields {
		text, after, ok := bytes.Cut(rest, []byte{'\t'})
		n, valid := parseNumber(text)
		if !ok || !valid {
			return errLine
		}
		fields[i], rest = n, after
	}
	if l.n == 0 {
		l.first = fields[1]
	}
	after := (fields[1] - l.first) / timeUnit
	if fields[0] != int64(int32(fields[0])) || after != int64(int32(after)) || fields[2] != int64(uint32(fields[2])) {
		return errLine
	}
	from, known := l.known[string(rest)]
	if !known {
		o, err := parseOrigin(string(rest))
		if err != nil {
			return err
		}
		if l.known == nil {
			l.known = map[string]uint32{}
		}
		from = uint32(len(l.origins))
		l.known[string(rest)], l.origins = from, append(l.origins, o)
	}
	if l.n%logPage == 0 {
		l.pages = append(l.pages, new([logPage]logged))
	}
	l.pages[l.n/logPage][l.n%logPage] = logged{n: int32(fields[0]), after: int32(after), crc: uint32(fields[2]), origin: from}
	l.n++
	return nil
}

// parseNumber is strconv.ParseInt without a copy.
func parseNumber(text []byte) (n int64, ok bool) {
	digits, negative := bytes.CutPrefix(text, []byte{'-'})
	for _, c := range digits {
		if c < '0' || c > '9' || n > math.MaxInt64/10-1 {
			return 0, false
		}
		n = 10*n + int64(c-'0')
	}
	if negative {
		n = -n
	}
	return n, len(digits) > 0
}

// parseOrigin reads the rest of a line: a receipt's topic, or a message's topic, consumer, subscription, key and stored id.
func parseOrigin(text string) (o origin, err error) {
	parts := strings.Split(text, "\t")
	if o.k, err = strconv.Atoi(parts[0]); err != nil || len(parts) == 1 {
		return o, err
	}
	if len(parts) != 5 {
		return o, errLine
	}
	o.s, o.key, o.stored = parts[2], parts[3], parts[4]
	o.c, err = strconv.Atoi(parts[1])
	return o, err
}

// Len is how many there are.
func (l Log) Len() int { return l.n }

// At is the message with index i, which is below Len.
func (l Log) At(i int) Message {
	if i >= l.n {
		panic("e2e: a message behind the end of its log")
	}
	e := &l.pages[i/logPage][i%logPage]
	o := &l.origins[e.origin]
	return Message{N: int64(e.n), T: float64(l.first+int64(e.after)*timeUnit) / 1000, CRC: e.crc, K: o.k, C: o.c, S: o.s, Key: o.key, Stored: o.stored}
}

// All are all messages.
func (l Log) All() iter.Seq[Message] { return l.Where(func(Message) bool { return true }) }

// Where are the messages that match.
func (l Log) Where(matches func(Message) bool) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for i := range l.n {
			if m := l.At(i); matches(m) && !yield(m) {
				return
			}
		}
	}
}

// Joined are messages, one sequence after the other.
func Joined(all ...iter.Seq[Message]) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for _, some := range all {
			for m := range some {
				if !yield(m) {
					return
				}
			}
		}
	}
}

// byNumber keeps a T for each number of a message; the zero T for those that nobody asked for. Numbers count up, so that pages of them cost less than the
// entries of a map.
type byNumber[T any] struct {
	pages map[int64]*[numberPage]T
	page  *[numberPage]T // the last one that was used
	index int64          // of page
}

const numberPage = 1 << 12

func (b *byNumber[T]) at(n int64) *T {
	index, within := n>>12, n&(numberPage-1) // -1 has a page as well
	if b.page == nil || b.index != index {
		if b.pages == nil {
			b.pages = map[int64]*[numberPage]T{}
		}
		if b.pages[index] == nil {
			b.pages[index] = new([numberPage]T)
		}
		b.page, b.index = b.pages[index], index
	}
	return &b.page[within]
}

// all goes through the numbers upwards.
func (b *byNumber[T]) all() iter.Seq2[int64, *T] {
	return func(yield func(int64, *T) bool) {
		for _, index := range slices.Sorted(maps.Keys(b.pages)) {
			for i := range b.pages[index] {
				if !yield(index*numberPage+int64(i), &b.pages[index][i]) {
					return
				}
			}
		}
	}
}

// Awaited counts numbers that are wanted and have not come, for each of several receivers.
type Awaited[K comparable] struct {
	of   map[K]*byNumber[awaitedNumber]
	left map[K]int
}

type awaitedNumber struct{ wanted, came bool }

// Want and Came may be said in either order, and again.
func (a *Awaited[K]) Want(who K, n int64) {
	if e := a.at(who, n); !e.wanted {
		if e.wanted = true; !e.came {
			a.left[who]++
		}
	}
}

// Came says that a number has come to its receiver.
func (a *Awaited[K]) Came(who K, n int64) {
	if e := a.at(who, n); !e.came {
		if e.came = true; e.wanted {
			a.left[who]--
		}
	}
}

func (a *Awaited[K]) at(who K, n int64) *awaitedNumber {
	if a.of == nil {
		a.of, a.left = map[K]*byNumber[awaitedNumber]{}, map[K]int{}
	}
	if a.of[who] == nil {
		a.of[who] = new(byNumber[awaitedNumber])
	}
	return a.of[who].at(n)
}

// Missing is how many have not come, of the receivers that lack any.
func (a *Awaited[K]) Missing() map[K]int {
	missing := maps.Clone(a.left)
	maps.DeleteFunc(missing, func(_ K, left int) bool { return left == 0 })
	return missing
}
