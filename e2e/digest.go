package e2e

import (
	"fmt"
	"iter"
	"slices"
	"sort"
	"time"
)

// Digest says what became of numbered messages.
type Digest struct {
	Acked       int     // different numbers with a receipt
	Received    int     // different numbers that arrived
	Lost        []int64 // acknowledged to the producer, never received
	Unexpected  []int64 // received without a receipt: allowed for a send whose receipt was lost
	Duplicates  int     // receipts of a number beyond its first
	OrderBreaks int     // a number that came for the first time after a higher one
	Corrupt     []int64 // received with other contents than were sent
}

// Compare judges what was received by what was acknowledged to the producer.
func Compare(acks, recvs iter.Seq[Message]) Digest { return CompareKeys(acks, recvs, 0) }

// CompareKeys is Compare where only the order of each key is promised: number n has key n % keys. Without keys it is Compare.
func CompareKeys(acks, recvs iter.Seq[Message], keys int64) Digest {
	var d Digest
	type fate struct {
		crc         uint32 // that was sent
		acked, came bool
	}
	var fates byNumber[fate]
	for m := range acks {
		f := fates.at(m.N)
		if !f.acked {
			d.Acked++
		}
		f.crc, f.acked = m.CRC, true
	}
	highest := slices.Repeat([]int64{-1}, int(max(keys, 1))) // by key
	for m := range recvs {
		f := fates.at(m.N)
		if f.acked && f.crc != m.CRC {
			d.Corrupt = append(d.Corrupt, m.N)
		}
		if f.came {
			d.Duplicates++
			continue
		}
		f.came = true
		d.Received++
		if !f.acked {
			d.Unexpected = append(d.Unexpected, m.N)
		}
		if keys > 0 && m.N < 0 {
			continue // it has no key
		}
		last := &highest[m.N%int64(len(highest))]
		if m.N < *last {
			d.OrderBreaks++
		}
		*last = max(*last, m.N)
	}
	for n, f := range fates.all() {
		if f.acked && !f.came {
			d.Lost = append(d.Lost, n)
		}
	}
	return d
}

// Perfect tells that each acknowledged message came once, intact and in order, and nothing else.
func (d Digest) Perfect() bool {
	return len(d.Lost)+len(d.Corrupt)+len(d.Unexpected)+d.Duplicates+d.OrderBreaks == 0
}

func (d Digest) String() string {
	return fmt.Sprintf("acknowledged %d, received %d, lost %s, duplicates %d, order breaks %d, without receipt %d, corrupt %s",
		d.Acked, d.Received, few(d.Lost), d.Duplicates, d.OrderBreaks, len(d.Unexpected), few(d.Corrupt))
}

// few shows how many numbers there are, and some of them.
func few(numbers []int64) string {
	if len(numbers) == 0 {
		return "0"
	}
	return fmt.Sprintf("%d %v", len(numbers), numbers[:min(len(numbers), 10)])
}

// Burst is a row of messages that came again, with less than a second between two of them.
type Burst struct {
	From, To float64 // ms since 1970
	Messages int
	Lowest   int64 // numbers
	Highest  int64
	Behind   float64 // ms from the receipt of the lowest number to From; −1 without one
}

func (b Burst) String() string {
	at := time.UnixMilli(int64(b.From)).UTC().Format("15:04:05.000")
	return fmt.Sprintf("%d messages between number %d and %d, at %s for %.0f ms, published %.0f ms before", b.Messages, b.Lowest, b.Highest, at, b.To-b.From, b.Behind)
}

// Again tells when messages came that had come before, and how old they were.
func Again(acks, recvs iter.Seq[Message]) (bursts []Burst) {
	var came byNumber[bool]
	for m := range recvs {
		seen := came.at(m.N)
		if !*seen {
			*seen = true
			continue
		}
		if last := len(bursts) - 1; last < 0 || m.T-bursts[last].To > 1000 {
			bursts = append(bursts, Burst{From: m.T, Lowest: m.N, Highest: m.N})
		}
		b := &bursts[len(bursts)-1]
		b.To, b.Messages, b.Lowest, b.Highest = m.T, b.Messages+1, min(b.Lowest, m.N), max(b.Highest, m.N)
	}
	if len(bursts) == 0 {
		return nil
	}
	var published byNumber[float64]
	for m := range acks {
		*published.at(m.N) = m.T
	}
	for i := range bursts {
		b := &bursts[i]
		if b.Behind = -1; *published.at(b.Lowest) > 0 {
			b.Behind = b.From - *published.at(b.Lowest)
		}
	}
	return bursts
}

// TimesOf are the times of messages, sorted.
func TimesOf(messages iter.Seq[Message]) []float64 {
	var times []float64
	for m := range messages {
		times = append(times, m.T)
	}
	slices.Sort(times)
	return times
}

// LongestGap is the longest time in ms between successive receipts of which at least a part lies in [from, to] (ms
// since 1970). The times are sorted.
func LongestGap(times []float64, from, to float64) float64 {
	longest := 0.0
	begin, _ := slices.BinarySearch(times, from)
	for i := max(begin, 1); i < len(times) && times[i-1] <= to; i++ {
		longest = max(longest, times[i]-times[i-1])
	}
	return longest
}

// Percentile returns the value below which the share p (0 to 1) of values lies; 0 of none.
func Percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Clone(values)
	sort.Float64s(sorted)
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
