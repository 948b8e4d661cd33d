package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

const (
	// salvageParallel is how many partitions are looked at at once.
	salvageParallel = 8
	// salvageApart is between the two readings that tell whether a replicator goes on.
	salvageApart = time.Second
	// salvageTime is how long a page is looked for, well below the minute that the command line waits: what is left is for the next page.
	salvageTime = 40 * time.Second
	// maxSalvaged bounds the topics of a page.
	maxSalvaged = 10_000
)

// Salvage lists what the old cluster, which is back, holds of topics that moved and that the new one never got: the first page with a count of all, others with what follows.
// Nothing is changed anywhere. What ctx leaves no time for is among the unread.
func Salvage(ctx context.Context, clients map[string]*pulsaradmin.Client, r switching.SalvageRequest) (switching.Salvage, error) {
	from, to := clients[r.From], clients[r.To]
	for name, c := range map[string]*pulsaradmin.Client{r.From: from, r.To: to} {
		if c == nil {
			return switching.Salvage{}, fmt.Errorf("cluster %s %w; set clusters.%s.web_url", name, ErrNoAdmin, name)
		}
	}
	until := time.Now().Add(salvageTime)
	topics, err := salvageTopics(ctx, from, r)
	if err != nil {
		return switching.Salvage{}, err
	}
	return salvagePage(ctx, until, r, topics, salvor{
		partitions: from.Partitions,
		look: func(ctx context.Context, topic string, page pulsaradmin.Page) (looked, error) {
			return salvageOne(ctx, topic, from, to, page)
		},
	})
}

// salvor is what a page asks of the clusters.
type salvor struct {
	partitions func(ctx context.Context, base string) (int, error)
	look       func(ctx context.Context, topic string, page pulsaradmin.Page) (looked, error)
}

// looked is what is missing of one partition.
type looked struct {
	switching.SalvageTopic
	seen pulsaradmin.Position // up to where was looked
	more bool                 // there is something behind it
}

// salvageCursor is where the next page begins: behind a position of a partition. Its text is "PARTITION@LEDGER:ENTRY".
type salvageCursor struct {
	base  string
	topic route.Topic
	at    pulsaradmin.Position
}

func parseSalvageCursor(text string) (c salvageCursor, err error) {
	if text == "" {
		return salvageCursor{at: pulsaradmin.NoPosition}, nil
	}
	i := strings.LastIndexByte(text, '@')
	if i < 0 {
		return c, fmt.Errorf("%q %w", text, switching.ErrSalvageCursor)
	}
	if c.topic, err = route.ParseTopic(text[:i]); err == nil {
		c.at, err = pulsaradmin.ParsePosition(text[i+1:])
	}
	if err != nil {
		return c, fmt.Errorf("%q %w: %v", text, switching.ErrSalvageCursor, err)
	}
	c.base = c.topic.Base()
	return c, nil
}

// behind is what of a partition of base is to be looked at: ok is false when the page is past it.
func (c *salvageCursor) behind(base string, partition int) (after pulsaradmin.Position, ok bool) {
	switch at := strings.Compare(base, c.base); {
	case c.base == "" || at > 0 || at == 0 && partition > c.topic.Partition():
		return pulsaradmin.NoPosition, true
	case at == 0 && partition == c.topic.Partition():
		return c.at, true
	}
	return pulsaradmin.NoPosition, false
}

// salvagePage puts a page together, in the order of the topics (base names, sorted) and of their partitions. The first page looks at all, several at a time; those behind it at one
// after the other, until they are full. After until no more topics are begun, and no more than maxSalvaged.
func salvagePage(ctx context.Context, until time.Time, r switching.SalvageRequest, topics []string, on salvor) (switching.Salvage, error) {
	cursor, err := parseSalvageCursor(r.After)
	if err != nil {
		return switching.Salvage{}, err
	}
	p := &salvaging{on: on, limit: r.Limit, first: r.After == "", cursor: cursor, topics: topics[sort.SearchStrings(topics, cursor.base):]}
	p.found = make([][]looked, len(p.topics))
	// The topic of the cursor may be done with: another one each time, at least.
	late := func(i int) bool { return i > 1 && (i >= maxSalvaged || time.Now().After(until)) }
	begun := 0
	if p.first {
		var group sync.WaitGroup
		free := make(chan struct{}, salvageParallel)
		for i := range p.topics {
			if free <- struct{}{}; late(i) {
				break
			}
			begun++
			group.Go(func() {
				defer func() { <-free }()
				p.topic(ctx, i)
			})
		}
		group.Wait()
	} else {
		for ; begun < len(p.topics) && !p.full && !late(begun); begun++ {
			p.topic(ctx, begun)
		}
	}
	s := switching.Salvage{From: r.From, To: r.To, Topics: []switching.SalvageTopic{}, Unread: p.unread, At: time.Now().UTC()}
	p.assemble(&s, begun, r.After)
	return s, nil
}

// salvaging is one page in the making.
type salvaging struct {
	on     salvor
	limit  int
	first  bool
	cursor salvageCursor
	topics []string

	mu     sync.Mutex
	found  [][]looked // guarded by mu, as all below: by topic, and by partition in order
	unread []string
	kept   int  // messages in found
	full   bool // nothing more is to be looked at, for a page that is not the first one
}

// topic looks at the partitions of topic i.
func (p *salvaging) topic(ctx context.Context, i int) {
	base := p.topics[i]
	n, err := p.on.partitions(ctx, base)
	if errors.Is(err, pulsaradmin.ErrNotFound) {
		return // the old cluster never had it
	}
	if err != nil {
		p.failed(base, err)
		return
	}
	for k, name := range pulsaradmin.PartitionNames(base, n) {
		if n == 0 {
			k = -1 // as a name without a number has
		}
		after, ok := p.cursor.behind(base, k)
		page := pulsaradmin.Page{After: after, Limit: p.limit, Count: p.first}
		if !p.first { // one after the other
			ok = ok && !p.full
			page.Limit -= p.kept
		}
		if !ok {
			continue
		}
		l, err := p.on.look(ctx, name, page)
		switch {
		case errors.Is(err, pulsaradmin.ErrNotFound): // nobody has used that partition
		case err != nil:
			p.failed(name, err)
		default:
			p.take(i, l)
		}
	}
}

func (p *salvaging) failed(topic string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.unread) < switching.MaxFailoverNames {
		p.unread = append(p.unread, topic+": "+err.Error())
	}
}

// take keeps what was found, but of all no more messages than twice a page.
func (p *salvaging) take(i int, l looked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.found[i] = append(p.found[i], l)
	p.kept += len(l.Messages)
	if !p.first {
		p.full = l.more || p.kept >= p.limit
	}
	if p.kept <= 2*p.limit {
		return
	}
	p.kept = 0
	for _, parts := range p.found {
		for k := range parts {
			m := &parts[k].Messages
			*m = slices.Clip((*m)[:min(len(*m), p.limit-p.kept)])
			p.kept += len(*m)
		}
	}
}

// assemble lists what fits into the page, and where the next one begins: last is up to where nothing is left out, begun how many topics were looked at.
func (p *salvaging) assemble(s *switching.Salvage, begun int, last string) {
	for i, parts := range p.found[:begun] {
		if s.Next == "" && len(parts) == 0 {
			last = p.topics[i] + "@" + pulsaradmin.NoPosition.String()
		}
		for _, l := range parts {
			t := l.SalvageTopic
			s.Missing, s.AtLeast = s.Missing+t.Missing, s.AtLeast || t.AtLeast
			if s.Next != "" {
				t.Messages = t.Messages[:0]
			}
			t.Messages = slices.Clone(t.Messages[:min(len(t.Messages), p.limit-s.Listed)])
			if s.Next == "" {
				if n := len(t.Messages); int64(n) < t.Missing {
					if n > 0 {
						last = t.Topic + "@" + t.Messages[n-1].Position
					}
					s.Next = last
				} else if last = t.Topic + "@" + l.seen.String(); l.more || p.full && s.Listed+n >= p.limit {
					s.Next = last
				}
			}
			s.Listed += len(t.Messages)
			s.Topics = append(s.Topics, t)
		}
	}
	if s.Left = len(p.topics) - begun; s.Left > 0 {
		s.AtLeast = s.AtLeast || p.first
		s.Next = cmp.Or(s.Next, last)
	}
}

// salvageTopics are the topics that are named, and those of the rules that the old cluster has.
func salvageTopics(ctx context.Context, from *pulsaradmin.Client, r switching.SalvageRequest) ([]string, error) {
	topics := slices.Clone(r.Topics)
	for _, scope := range r.Scopes {
		tenants := []string{scope}
		switch {
		case strings.Contains(scope, "/"):
			tenants = nil
			found, err := from.Topics(ctx, scope)
			if err != nil && !errors.Is(err, pulsaradmin.ErrNotFound) {
				return nil, err
			}
			topics = append(topics, found...)
		case scope == "":
			all, err := from.Tenants(ctx)
			if err != nil {
				return nil, err
			}
			tenants = all
		}
		for _, tenant := range tenants {
			namespaces, err := from.Namespaces(ctx, tenant)
			if err != nil {
				return nil, err
			}
			for _, ns := range namespaces {
				if t, err := route.ParseTopic("persistent://" + ns + "/x"); err != nil || t.System() {
					continue
				}
				found, err := from.Topics(ctx, ns)
				if err != nil && !errors.Is(err, pulsaradmin.ErrNotFound) {
					return nil, err
				}
				topics = append(topics, found...)
			}
		}
	}
	slices.Sort(topics)
	return slices.DeleteFunc(slices.Compact(topics), func(base string) bool { return !r.Decided(base) }), nil
}

func salvageOne(ctx context.Context, topic string, from, to *pulsaradmin.Client, page pulsaradmin.Page) (looked, error) {
	l := looked{SalvageTopic: switching.SalvageTopic{Topic: topic, Messages: []switching.SalvageMessage{}}}
	if _, err := from.Tail(ctx, topic); err != nil {
		return l, err
	}
	p := pulsaradmin.NewPair(topic, from, to)
	defer p.Close()
	if err := p.Load(ctx); err != nil {
		return l, errors.New(err.Error()) // also one that only the new cluster lacks is not read
	}
	absent, err := p.Absent(ctx, page)
	if err != nil {
		return l, err
	}
	l.Missing, l.seen, l.more = absent.Count, absent.Seen, absent.More
	if page.Count {
		l.Behind, l.AtLeast = absent.Behind, absent.More
	}
	for _, e := range absent.Entries {
		l.Messages = append(l.Messages, switching.SalvageMessage{
			Position: e.Position.String(), Producer: e.Producer, Sequence: e.Sequence, Published: time.UnixMilli(e.Time).UTC(), Key: e.Key, Bytes: e.Bytes, Messages: e.Messages,
		})
	}
	if l.Missing == 0 || !page.Count {
		return l, nil
	}
	before, after, err := from.Progress(ctx, []string{topic}, to.Cluster(), salvageApart)
	if err != nil {
		return l, err
	}
	l.Replication = "none"
	if after[0].Exists {
		l.Replication = "running"
		if alive, why := pulsaradmin.Alive(before[0], after[0]); !alive {
			l.Replication = why
		}
	}
	return l, nil
}
