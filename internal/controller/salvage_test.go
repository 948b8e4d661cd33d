package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/pulsaradmin"
)

// lostOf has a salvor find so many missing messages in each partition; each look sees at most window of them.
func lostOf(missing map[string]int64, window int64, looks *atomic.Int64) salvor {
	return salvor{
		partitions: func(_ context.Context, base string) (int, error) {
			switch base {
			case "persistent://t/n/gone":
				return 0, fmt.Errorf("no such topic: %w", pulsaradmin.ErrNotFound)
			case "persistent://t/n/parts":
				return 12, nil
			}
			return 0, nil
		},
		look: func(_ context.Context, topic string, page pulsaradmin.Page) (looked, error) {
			looks.Add(1)
			if topic == "persistent://t/n/broken" {
				return looked{}, errors.New("no answer")
			}
			l := looked{SalvageTopic: switching.SalvageTopic{Topic: topic}, seen: page.After}
			start := page.After.Entry + 1
			for i := start; i < missing[topic]; i++ {
				full := len(l.Messages) >= page.Limit
				if l.more = i == start+window || full && !page.Count; l.more {
					break
				}
				l.seen = pulsaradmin.Position{Ledger: 5, Entry: i}
				if l.Missing++; !full {
					l.Messages = append(l.Messages, switching.SalvageMessage{Position: l.seen.String(), Sequence: i})
				}
			}
			l.AtLeast = l.more && page.Count
			return l, nil
		},
	}
}

// Whatever the size of a page, and wherever looking stops: every message is on one page, in order, and the first page counts all.
func TestPagesOfASalvageListEachMessageOnce(t *testing.T) {
	topics := []string{"persistent://t/n/a", "persistent://t/n/b", "persistent://t/n/broken", "persistent://t/n/gone", "persistent://t/n/parts", "persistent://t/n/z"}
	missing := map[string]int64{"persistent://t/n/a": 7, "persistent://t/n/parts-partition-1": 1, "persistent://t/n/parts-partition-2": 25, "persistent://t/n/parts-partition-10": 3, "persistent://t/n/z": 4}
	var want []string
	for _, part := range append(append([]string{"persistent://t/n/a"}, pulsaradmin.PartitionNames("persistent://t/n/parts", 12)...), "persistent://t/n/z") {
		for i := range missing[part] {
			want = append(want, fmt.Sprint(part, "@5:", i))
		}
	}
	var until time.Time
	for limit := 1; limit <= len(want)+1; limit++ {
		for _, window := range []int64{3, 1000, 1001} {
			if until = time.Now().Add(time.Hour); window == 1001 {
				until = time.Time{} // two topics a page, and all of what they lack
			}
			var got []string
			var looks atomic.Int64
			after := ""
			for pages := 0; ; pages++ {
				if pages > 100 {
					t.Fatalf("limit %d, window %d: no end, at %s", limit, window, after)
				}
				s, err := salvagePage(t.Context(), until, switching.SalvageRequest{From: "a", To: "b", Limit: limit, After: after}, topics, lostOf(missing, window, &looks))
				if err != nil {
					t.Fatal(err)
				}
				if after == "" && window < 1001 && (s.AtLeast != (window < 1000) || window == 1000 && s.Missing != int64(len(want)) || len(s.Topics) != 15 || len(s.Unread) != 1) {
					t.Errorf("limit %d, window %d: the first page says %d, at least %v, of %d partitions, unread %v", limit, window, s.Missing, s.AtLeast, len(s.Topics), s.Unread)
				}
				n := 0
				for _, topic := range s.Topics {
					for _, m := range topic.Messages {
						got, n = append(got, topic.Topic+"@"+m.Position), n+1
					}
				}
				if n > limit || n != s.Listed {
					t.Errorf("limit %d: a page of %d, which says %d", limit, n, s.Listed)
				}
				if after = s.Next; after == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("limit %d, window %d: listed %v, want %v", limit, window, got, want)
			}
		}
	}
	until = time.Now().Add(time.Hour)
	var looks atomic.Int64
	if _, err := salvagePage(t.Context(), until, switching.SalvageRequest{Limit: 5, After: "persistent://t/n/parts-partition-2@5:3"}, topics, lostOf(missing, 1000, &looks)); err != nil || looks.Load() != 1 {
		t.Errorf("%d partitions were looked at for a page that one of them fills, %v", looks.Load(), err)
	}
	for _, bad := range []string{"persistent://t/n/a", "@1:2", "persistent://t/n/a@x"} {
		if _, err := salvagePage(t.Context(), until, switching.SalvageRequest{Limit: 5, After: bad}, topics, lostOf(missing, 1000, &looks)); !errors.Is(err, switching.ErrSalvageCursor) {
			t.Errorf("after %q: %v", bad, err)
		}
	}
}

// A rule may have decided any number of topics: a page looks at so many of them, and says how many are left to those behind it.
func TestASalvageOfMoreTopicsThanAPageLooksAtGoesOnBehindIt(t *testing.T) {
	const count = 2*maxSalvaged + 500
	names, missing := make([]string, count), map[string]int64{}
	for i := range names {
		names[i] = fmt.Sprintf("persistent://acme/many/t%05d", i)
		if i%1_000 == 999 {
			missing[names[i]] = 2
		}
	}
	listing, err := json.Marshal(names)
	if err != nil {
		t.Fatal(err)
	}
	a := serveAnswers(t, map[string]string{"GET /admin/v2/persistent/acme/many": string(listing)})
	from := pulsaradmin.New(pulsaradmin.Config{Cluster: "a", WebURLs: []string{a.URL}})
	topics, err := salvageTopics(t.Context(), from, switching.SalvageRequest{Scopes: []string{"acme/many"}, Decided: func(string) bool { return true }})
	if err != nil || !slices.Equal(topics, names) {
		t.Fatalf("%d topics, %v", len(topics), err)
	}
	var got, left []int64
	after := ""
	for {
		var looks atomic.Int64
		s, err := salvagePage(t.Context(), time.Now().Add(time.Hour), switching.SalvageRequest{From: "a", To: "b", Limit: 100, After: after}, topics, lostOf(missing, 1000, &looks))
		if err != nil {
			t.Fatal(err)
		}
		if looks.Load() > maxSalvaged {
			t.Errorf("%d partitions were looked at for one page", looks.Load())
		}
		got, left = append(got, int64(s.Listed)), append(left, int64(s.Left))
		if after = s.Next; after == "" {
			break
		}
	}
	// The topic of the cursor is looked at again by the page behind it.
	if want := []int64{count - maxSalvaged, count - 2*maxSalvaged + 1, 0}; !slices.Equal(left, want) || !slices.Equal(got, []int64{20, 18, 2}) {
		t.Errorf("pages list %v and leave %v topics, want %v", got, left, want)
	}
}
