package admin

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"pointsman/core/route"
	"pointsman/store"
)

// peerTimeout is how long another proxy has to say how many clients it has.
const peerTimeout = 2 * time.Second

// peerParallel bounds how many proxies are asked at once.
const peerParallel = 16

// maxHandleTopics bounds the topics in one answer; above it only the totals are right.
const maxHandleTopics = 200_000

// askHandles asks every member for the handles of the names (as in Route.Name), and keeps those for which keep is true. A member that
// cannot be asked is in the answer with its Error. The answer is sorted by proxy; members without handles are left out.
func (s *Server) askHandles(ctx context.Context, names []string, keep func(route.Topic) bool) ([]ProxyHandles, map[string]HandleCount, error) {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return nil, nil, err
	}
	self := s.proxy.Info()
	if !slices.ContainsFunc(members, func(m store.Proxy) bool { return m.ID == self.ID }) {
		self.Live = true
		members = append(members, self)
	}
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()

	var (
		mu      sync.Mutex // guards answers and topics
		answers []ProxyHandles
		topics  = map[string]HandleCount{}
	)
	inParallel(len(members), peerParallel, func(i int) {
		m := members[i]
		h, err := s.handlesOf(ctx, m, self, names)
		a := ProxyHandles{Proxy: m.ID, Ops: m.Ops}
		if err != nil {
			a.Error = err.Error()
		}
		mu.Lock()
		defer mu.Unlock()
		a.HandleCount = addHandles(topics, h, keep)
		if a.Error != "" || a.HandleCount != (HandleCount{}) {
			answers = append(answers, a)
		}
	})
	slices.SortFunc(answers, func(a, b ProxyHandles) int { return cmp.Compare(a.Proxy, b.Proxy) })
	return answers, topics, nil
}

// addHandles adds those of h that are kept to topics, and returns their sum.
func addHandles(topics map[string]HandleCount, h Handles, keep func(route.Topic) bool) HandleCount {
	var sum, listed HandleCount
	for base, n := range h.Topics {
		listed.Producers += n.Producers
		listed.Consumers += n.Consumers
		if t, err := route.ParseTopic(base); err == nil && !keep(t) {
			continue
		}
		sum.Producers += n.Producers
		sum.Consumers += n.Consumers
		sum.Leaving += n.Leaving
		all := topics[base]
		topics[base] = HandleCount{all.Producers + n.Producers, all.Consumers + n.Consumers, all.Leaving + n.Leaving}
	}
	// What an answer counts but does not list may be of any topic.
	sum.Producers += max(0, h.Producers-listed.Producers)
	sum.Consumers += max(0, h.Consumers-listed.Consumers)
	return sum
}

func (s *Server) handlesOf(ctx context.Context, m, self store.Proxy, names []string) (Handles, error) {
	switch {
	case m.ID == self.ID:
		return s.ownHandles(ctx, names)
	case !m.Live:
		return Handles{}, fmt.Errorf("is a member but not connected to the map store")
	case m.Ops == "":
		return Handles{}, fmt.Errorf("announces no operations port")
	}
	c, err := NewClient(m.Ops, peerTimeout, s.peers)
	if err != nil {
		return Handles{}, err
	}
	return c.Handles(ctx, names)
}

// ownHandles counts the handles here.
func (s *Server) ownHandles(ctx context.Context, names []string) (Handles, error) {
	const askOneByOne = 32 // above it, everything is fetched once and filtered
	targets := make([]target, 0, len(names))
	topics := make(map[string]bool, len(names))
	for _, name := range names {
		t, err := parseName(name)
		if err != nil {
			return Handles{}, err
		}
		targets = append(targets, t)
		if t.isTopic {
			topics[t.topic.Base()] = true
		}
	}
	out := Handles{Topics: map[string]HandleCount{}}
	add := func(h Handles, keep func(string) bool) {
		for base, n := range h.Topics {
			if _, twice := out.Topics[base]; twice || !keep(base) {
				continue
			}
			out.Producers += n.Producers
			out.Consumers += n.Consumers
			out.Leaving += n.Leaving
			if len(out.Topics) < maxHandleTopics {
				out.Topics[base] = n
			}
		}
	}
	if len(targets) <= askOneByOne {
		for _, t := range targets {
			name := t.scope
			if t.isTopic {
				name = t.topic.Base()
			}
			h, err := s.proxy.Handles(ctx, name)
			if err != nil {
				return Handles{}, err
			}
			add(h, func(string) bool { return true })
		}
		return out, nil
	}
	h, err := s.proxy.Handles(ctx, "")
	if err != nil {
		return Handles{}, err
	}
	add(h, func(base string) bool {
		if topics[base] {
			return true
		}
		topic, err := route.ParseTopic(base)
		return err == nil && slices.ContainsFunc(targets, func(t target) bool { return !t.isTopic && topic.In(t.scope) })
	})
	return out, nil
}

func (s *Server) handleHandles(ctx context.Context, r *http.Request) (any, error) {
	q := r.URL.Query()
	return s.ownHandles(ctx, slices.Concat(q["topic"], q["scope"]))
}

func (s *Server) handleHandlesQuery(ctx context.Context, q *HandlesQuery) (any, error) {
	return s.ownHandles(ctx, q.Names)
}

// guardClients refuses a change that would move live clients, or might: a proxy that cannot be asked counts as one that has some.
func (s *Server) guardClients(ctx context.Context, p *planner, immediate bool) ([]ProxyHandles, error) {
	names := p.movedNames()
	if len(names) == 0 {
		return nil, nil
	}
	answers, topics, err := s.askHandles(ctx, names, p.moves)
	if err != nil || immediate || len(answers) == 0 {
		return answers, err
	}
	var sum HandleCount
	var unreachable, counts []string
	details := make([]Detail, 0, len(answers))
	for _, a := range answers {
		details = append(details, Detail{Proxy: a.Proxy, Problem: a.Error, Producers: a.Producers, Consumers: a.Consumers})
		if a.Error != "" {
			unreachable = append(unreachable, fmt.Sprintf("%s (%s)", a.Proxy, a.Error))
			continue
		}
		sum.Producers += a.Producers
		sum.Consumers += a.Consumers
		counts = append(counts, fmt.Sprintf("%s: %d and %d", a.Proxy, a.Producers, a.Consumers))
	}
	what := names[0]
	if len(names) > 1 {
		what = fmt.Sprintf("%d routes", len(names))
	}
	if len(counts) > 0 {
		return answers, &Error{
			Code: CodeLiveClients,
			Message: fmt.Sprintf("changing %s would move %d producers and %d consumers that are connected now, of %d topic(s) (%s)",
				what, sum.Producers, sum.Consumers, len(topics), strings.Join(append(counts, unreachable...), "; ")),
			Remedy:  "repeat with --immediate to move them at once like an immediate switch, or stop them first",
			Details: details,
		}
	}
	return answers, &Error{
		Code:    CodeProxyUnreachable,
		Message: fmt.Sprintf("changing %s may move clients, and these proxies cannot be asked for theirs: %s", what, strings.Join(unreachable, "; ")),
		Remedy:  "bring them back or look at `pointsman proxies ls`; or repeat with --immediate to change the map all the same",
		Details: details,
	}
}

// guardCluster refuses a cluster that a proxy does not know: clients there would get errors.
func (s *Server) guardCluster(ctx context.Context, clusters []string, force bool) error {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return err
	}
	self := s.proxy.Info()
	if !slices.ContainsFunc(members, func(m store.Proxy) bool { return m.ID == self.ID }) {
		members = append(members, self)
	}
	for _, cluster := range clusters {
		var without []string
		var details []Detail
		for _, m := range members {
			if (m.Live || m.ID == self.ID) && !slices.Contains(m.Clusters, cluster) {
				without = append(without, m.ID)
				details = append(details, Detail{Proxy: m.ID, Name: cluster, Problem: "knows only " + strings.Join(m.Clusters, ", ")})
			}
		}
		if len(without) == 0 || force {
			continue
		}
		message := fmt.Sprintf("cluster %q is unknown to proxy %s", cluster, strings.Join(without, ", "))
		if len(without) > 1 && len(without) == len(members) {
			message = fmt.Sprintf("cluster %q is unknown to every proxy; they know %s", cluster, strings.Join(self.Clusters, ", "))
		}
		return &Error{
			Code: CodeUnknownCluster, Message: message, Details: details,
			Remedy: "add it under clusters in their configuration and restart them, or repeat with --force (clients are refused until then)",
		}
	}
	return nil
}
