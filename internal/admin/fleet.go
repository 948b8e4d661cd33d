package admin

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// This file is what the controller asks of the proxies for its batches, and has done to the map (controller.Fleet).

// maxTogether bounds the sets of topics that a proxy tells of.
const maxTogether = 10_000

// TogetherAnswer are sets of topics that some client consumes together on one connection.
type TogetherAnswer struct {
	Sets [][]string `json:"sets"`
}

// HandleFacts are what the proxies say of their clients on topics (base names).
func (s *Server) HandleFacts(ctx context.Context, topics []string) (map[string]switching.HandleFacts, error) {
	answers, handles, err := s.askHandles(ctx, topics, func(route.Topic) bool { return true })
	if err != nil {
		return nil, err
	}
	var unasked []string
	for _, a := range answers {
		if a.Error != "" {
			unasked = append(unasked, a.Proxy+": "+a.Error)
		}
	}
	facts := make(map[string]switching.HandleFacts, len(topics))
	for _, t := range topics {
		facts[t] = switching.HandleFacts{Producers: handles[t].Producers, Consumers: handles[t].Consumers, Unasked: unasked}
	}
	return facts, nil
}

// Together are the sets of topics of a namespace that some client consumes under one subscription name on one connection, of all proxies.
func (s *Server) Together(ctx context.Context, namespace string) ([][]string, error) {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return nil, err
	}
	self := s.proxy.Info()
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	var mu sync.Mutex // guards sets and silent
	var sets [][]string
	var silent []string
	inParallel(len(members), peerParallel, func(i int) {
		found, err := s.togetherOf(ctx, members[i], self, namespace)
		mu.Lock()
		defer mu.Unlock()
		sets = append(sets, found...)
		if err != nil {
			silent = append(silent, members[i].ID+": "+err.Error())
		}
	})
	slices.SortFunc(sets, slices.Compare)
	if len(silent) > 0 {
		slices.Sort(silent)
		err = fmt.Errorf("not all proxies could be asked: %s", strings.Join(silent, "; "))
	}
	return sets, err
}

func (s *Server) togetherOf(ctx context.Context, m, self store.Proxy, namespace string) ([][]string, error) {
	switch {
	case m.ID == self.ID:
		return s.proxy.Together(ctx, namespace)
	case !m.Live:
		return nil, fmt.Errorf("is a member but not connected to the map store")
	case m.Ops == "":
		return nil, fmt.Errorf("announces no operations port")
	}
	c, err := NewClient(m.Ops, peerTimeout, s.peers)
	if err != nil {
		return nil, err
	}
	answer, err := c.Together(ctx, namespace)
	return answer.Sets, err
}

func (s *Server) handleTogether(ctx context.Context, r *http.Request) (any, error) {
	sets, err := s.proxy.Together(ctx, r.URL.Query().Get("namespace"))
	if sets == nil {
		sets = [][]string{}
	}
	return TogetherAnswer{Sets: sets[:min(len(sets), maxTogether)]}, err
}

// Together asks the proxy which topics of a namespace its clients consume together.
func (c *Client) Together(ctx context.Context, namespace string) (TogetherAnswer, error) {
	return get[TogetherAnswer](ctx, c, "/api/v1/together", url.Values{"namespace": {namespace}})
}

// RuleNamespace maps the namespace of a batch by one rule and removes the entries that say the same. First the rule: until that is written no entry is
// missing, and afterwards each one that is removed changes nothing. All of it may be repeated. floors are the topics that have moved more often than the
// rule: their epochs stay in the map.
func (s *Server) RuleNamespace(ctx context.Context, b switching.Batch) (epoch uint64, removed, floors int, err error) {
	ns, err := parseName(b.Namespace)
	if err != nil {
		return 0, 0, 0, err
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return 0, 0, 0, err
	}
	why := "batch " + b.ID + ": all topics of " + b.Namespace + " are on " + b.To
	if _, err := p.set(ns, b.To, 0, ""); err != nil {
		return 0, 0, 0, err
	}
	if _, err := s.write(ctx, p, nil, b.Who, why); err != nil {
		return 0, 0, 0, err
	}
	if p, err = s.plan(ctx, ""); err != nil {
		return 0, 0, 0, err
	}
	rule, ok := p.table.Rule(ns.scope)
	if !ok || rule.Cluster != b.To {
		return 0, 0, 0, fmt.Errorf("the rule of %s names cluster %q: somebody has changed it meanwhile", b.Namespace, rule.Cluster)
	}
	var redundant []string
	for e := range p.table.Each {
		t, err := route.ParseTopic(e.Topic)
		if err != nil || !t.In(ns.scope) {
			continue
		}
		same := e.State == route.StateActive && e.Cluster == b.To && !e.Floor()
		if same {
			redundant = append(redundant, e.Topic)
		}
		if (same || e.Floor()) && e.Epoch > rule.Epoch {
			floors++
		}
	}
	slices.Sort(redundant)
	removed, err = s.dropEntries(ctx, redundant, b.To, b.Who, why)
	return rule.Epoch, removed, floors, err
}

// dropEntries removes entries that say the same as a rule, some at a time, unless they have become somebody else's.
func (s *Server) dropEntries(ctx context.Context, names []string, to, who, why string) (removed int, err error) {
	for chunk := range slices.Chunk(names, store.MaxChange/2) {
		p, err := s.plan(ctx, "")
		if err != nil {
			return removed, err
		}
		for _, base := range chunk {
			t, err := route.ParseTopic(base)
			if err != nil {
				continue
			}
			e, ok := p.table.Entry(base)
			if !ok || e.Floor() || e.State != route.StateActive || e.Cluster != to || p.table.DecideByRule(t, p.def).Cluster != to {
				continue
			}
			if _, err := p.remove(target{topic: t, isTopic: true}, 0); err != nil {
				return removed, err
			}
		}
		if _, err := s.write(ctx, p, nil, who, why); err != nil {
			return removed, err
		}
		removed += len(p.steps)
	}
	return removed, nil
}
