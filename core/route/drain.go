package route

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Limits of a Drain.
const (
	// MaxDrainSubs is the largest number of subscriptions that may drain at once on one topic.
	MaxDrainSubs = 1000
	// MaxDrainText is the longest text of a Drain, in bytes. An entry with one is part of everything that holds entries.
	MaxDrainText = 32 << 10
)

// Drain is what a draining entry says beside the new cluster: who still reads the old one (docs/adr/007-drain.md). In an Entry it is a
// text, so that entries stay comparable; String and ParseDrain are the only way from one to the other.
type Drain struct {
	// From is the old cluster.
	From string
	// Gone is how many subscriptions have left From since the flip. While it is 0 the switch can still be taken back.
	Gone int
	// Subs are the durable subscriptions that still read From, sorted by name. All others belong to the new cluster.
	Subs []DrainSub
	// Tails is the last position of each partition on From at the flip; one element for a topic without partitions.
	Tails []Tail
}

// DrainSub is a subscription that still reads the old cluster.
type DrainSub struct {
	Name string
	// Leaving: it has nothing left there, and is about to move. Its consumers are closed, its SUBSCRIBEs wait.
	Leaving bool
}

// Tail is the position of a message. Ledger −1 means that there is none.
type Tail struct{ Ledger, Entry int64 }

// The text is four fields divided by ';': From, Gone, the tails ("ledger:entry" divided by ','), and then one for each subscription: '=' for one
// that stays and '>' for one that leaves, and its name. A byte of a name that is not printable ASCII, and '%' and ';', is written as %XX: names may
// hold any bytes, and the text is valid UTF-8 without control characters.
const (
	drainStays  = '='
	drainLeaves = '>'
)

// String is the one text of d: equal drains have equal texts.
func (d Drain) String() string {
	byName := func(a, b DrainSub) int { return strings.Compare(a.Name, b.Name) }
	if !slices.IsSortedFunc(d.Subs, byName) {
		d.Subs = slices.Clone(d.Subs)
		slices.SortFunc(d.Subs, byName)
	}
	text := appendDrainName(make([]byte, 0, 256), d.From)
	text = append(text, ';')
	text = strconv.AppendInt(text, int64(d.Gone), 10)
	text = append(text, ';')
	for i, t := range d.Tails {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendInt(text, t.Ledger, 10)
		text = append(text, ':')
		text = strconv.AppendInt(text, t.Entry, 10)
	}
	for _, s := range d.Subs {
		mark := byte(drainStays)
		if s.Leaving {
			mark = drainLeaves
		}
		text = appendDrainName(append(text, ';', mark), s.Name)
	}
	return string(text)
}

// Check tells why d cannot be stored.
func (d Drain) Check() error {
	if d.From == "" {
		return errors.New("it names no cluster that is drained")
	}
	if d.Gone < 0 {
		return fmt.Errorf("%d subscriptions have left", d.Gone)
	}
	if len(d.Subs) > MaxDrainSubs {
		return fmt.Errorf("%d subscriptions, more than the %d that may drain at once", len(d.Subs), MaxDrainSubs)
	}
	names := make(map[string]bool, len(d.Subs))
	for _, s := range d.Subs {
		if names[s.Name] {
			return fmt.Errorf("the subscription %q occurs twice", clip(s.Name))
		}
		names[s.Name] = true
	}
	if n := len(d.String()); n > MaxDrainText {
		return fmt.Errorf("its text has %d bytes, more than the %d allowed: the names of its %d subscriptions or its %d partitions are too many",
			n, MaxDrainText, len(d.Subs), len(d.Tails))
	}
	return nil
}

// ParseDrain reads what String wrote, and nothing else.
func ParseDrain(text string) (Drain, error) {
	if len(text) > MaxDrainText {
		return Drain{}, fmt.Errorf("the drain has %d bytes, more than the %d allowed", len(text), MaxDrainText)
	}
	fields := strings.Split(text, ";")
	if len(fields) < 3 {
		return Drain{}, fmt.Errorf("the drain %q has %d fields, fewer than 3", clip(text), len(fields))
	}
	d := Drain{From: drainName(fields[0])}
	d.Gone, _ = strconv.Atoi(fields[1])
	if fields[2] != "" {
		for part := range strings.SplitSeq(fields[2], ",") {
			d.Tails = append(d.Tails, parseTail(part))
		}
	}
	for _, field := range fields[3:] {
		if field == "" {
			return Drain{}, fmt.Errorf("the drain %q has an empty field", clip(text))
		}
		d.Subs = append(d.Subs, DrainSub{Name: drainName(field[1:]), Leaving: field[0] == drainLeaves})
	}
	// There is one text for each drain, so whatever was misread above comes out differently.
	if err := d.Check(); err != nil {
		return Drain{}, fmt.Errorf("the drain %q: %w", clip(text), err)
	}
	if again := d.String(); again != text {
		return Drain{}, fmt.Errorf("the drain %q is not as it is written: that would be %q", clip(text), clip(again))
	}
	return d, nil
}

// Find looks a subscription up.
func (d Drain) Find(sub string) (at int, ok bool) {
	return slices.BinarySearchFunc(d.Subs, sub, func(s DrainSub, name string) int { return strings.Compare(s.Name, name) })
}

// DrainHas tells, of a valid text, whether a subscription still reads the old cluster, and whether it is leaving it. It allocates
// nothing. Of "", the drain of an entry that does not drain, no subscription is listed.
func DrainHas(text, sub string) (listed, leaving bool) {
	for range 3 {
		_, rest, ok := strings.Cut(text, ";")
		if !ok {
			return false, false
		}
		text = rest
	}
	for {
		field, rest, more := strings.Cut(text, ";")
		if field != "" && isDrainName(field[1:], sub) {
			return true, field[0] == drainLeaves
		}
		if !more {
			return false, false
		}
		text = rest
	}
}

// Home is the cluster that a durable subscription of the topic belongs to. wait tells that it is about to leave that one for d.Cluster: its
// consumers are closed, and its SUBSCRIBEs wait until the map goes on. It allocates nothing as a rule (DrainFrom).
func (d Decision) Home(sub string) (cluster string, wait bool) {
	if d.Drain == "" {
		return d.Cluster, false
	}
	listed, leaving := DrainHas(d.Drain, sub)
	if !listed {
		return d.Cluster, false
	}
	return DrainFrom(d.Drain), leaving
}

// DrainFrom is the old cluster of a valid text; "" of "". It allocates nothing unless the name has unusual characters.
func DrainFrom(text string) string {
	from, _, _ := strings.Cut(text, ";")
	return drainName(from)
}

// DrainTail is the last position of a partition (0 for a topic without partitions) on the old cluster, of a valid text; ok is false for a
// partition that was not there at the flip. It allocates nothing.
func DrainTail(text string, partition int) (tail Tail, ok bool) {
	for range 2 {
		_, text, _ = strings.Cut(text, ";")
	}
	text, _, _ = strings.Cut(text, ";")
	for ; text != ""; partition-- {
		part, rest, _ := strings.Cut(text, ",")
		if partition == 0 {
			return parseTail(part), true
		}
		text = rest
	}
	return Tail{}, false
}

func parseTail(text string) Tail {
	ledger, entry, _ := strings.Cut(text, ":")
	var t Tail
	t.Ledger, _ = strconv.ParseInt(ledger, 10, 64)
	t.Entry, _ = strconv.ParseInt(entry, 10, 64)
	return t
}

const upperHex = "0123456789ABCDEF"

// drainPlain tells whether a byte stands for itself.
func drainPlain(b byte) bool { return b > ' ' && b < 0x7f && b != '%' && b != ';' }

func appendDrainName(dst []byte, name string) []byte {
	for i := range len(name) {
		if b := name[i]; drainPlain(b) {
			dst = append(dst, b)
		} else {
			dst = append(dst, '%', upperHex[b>>4], upperHex[b&15])
		}
	}
	return dst
}

// drainName reads what appendDrainName wrote; anything else comes out as something that is written differently.
func drainName(text string) string {
	if strings.IndexByte(text, '%') < 0 {
		return text
	}
	name := make([]byte, 0, len(text))
	for text != "" {
		b, n := drainByte(text)
		name, text = append(name, b), text[n:]
	}
	return string(name)
}

// drainByte is the first byte of a name, and how long it is in the text.
func drainByte(text string) (b byte, n int) {
	if text[0] != '%' || len(text) < 3 {
		return text[0], 1
	}
	high, low := strings.IndexByte(upperHex, text[1]), strings.IndexByte(upperHex, text[2])
	if high < 0 || low < 0 {
		return text[0], 1
	}
	return byte(high<<4 | low), 3
}

// isDrainName tells whether text is how name is written.
func isDrainName(text, name string) bool {
	if len(text) < len(name) {
		return false
	}
	for i := range len(name) {
		if text == "" {
			return false
		}
		b, n := drainByte(text)
		if b != name[i] {
			return false
		}
		text = text[n:]
	}
	return text == ""
}
