package e2e

import (
	"fmt"
	"slices"
	"sort"
)

// Event is one line of a client driver's output; see clients/README.md.
type Event struct {
	E    string  `json:"e"`
	What string  `json:"what"`
	N    int64   `json:"n"`
	K    int     `json:"k"`
	C    int     `json:"c"`
	T    float64 `json:"t"` // ms since 1970
	CRC  uint32  `json:"crc"`
	Len  int     `json:"len"`
	Key  string  `json:"key"`
	ID   string  `json:"id"`
	Text string  `json:"text"`
	// S is the subscription that received it, "reader" for a reader beside others; Stored is the id as an application would store it.
	S      string `json:"s"`
	Stored string `json:"stored"`
}

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
func Compare(acks, recvs []Event) Digest {
	var d Digest
	sent := make(map[int64]uint32, len(acks))
	for _, e := range acks {
		sent[e.N] = e.CRC
	}
	d.Acked = len(sent)
	seen := make(map[int64]bool, len(recvs))
	highest := int64(-1)
	for _, e := range recvs {
		crc, known := sent[e.N]
		if known && crc != e.CRC {
			d.Corrupt = append(d.Corrupt, e.N)
		}
		if seen[e.N] {
			d.Duplicates++
			continue
		}
		seen[e.N] = true
		if !known {
			d.Unexpected = append(d.Unexpected, e.N)
		}
		if e.N < highest {
			d.OrderBreaks++
		}
		highest = max(highest, e.N)
	}
	d.Received = len(seen)
	for n := range sent {
		if !seen[n] {
			d.Lost = append(d.Lost, n)
		}
	}
	slices.Sort(d.Lost)
	return d
}

// CompareKeys is Compare where only the order of each key is promised: number n has key n % keys. Without keys it is Compare.
func CompareKeys(acks, recvs []Event, keys int64) Digest {
	d := Compare(acks, recvs)
	if keys == 0 {
		return d
	}
	d.OrderBreaks = 0
	byKey := make([][]Event, keys)
	for _, e := range recvs {
		if e.N >= 0 {
			byKey[e.N%keys] = append(byKey[e.N%keys], e)
		}
	}
	for _, some := range byKey {
		d.OrderBreaks += Compare(nil, some).OrderBreaks
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

// LongestGap is the longest time in ms between successive receipts of which at least a part lies in [from, to] (ms
// since 1970). Receipts need not be sorted.
func LongestGap(acks []Event, from, to float64) float64 {
	times := make([]float64, 0, len(acks))
	for _, e := range acks {
		times = append(times, e.T)
	}
	sort.Float64s(times)
	longest := 0.0
	for i := 1; i < len(times); i++ {
		if times[i] >= from && times[i-1] <= to {
			longest = max(longest, times[i]-times[i-1])
		}
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
