package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// lookupTimeout bounds the question to a broker in explain.
const lookupTimeout = 3 * time.Second

func (s *Server) handleExplain(ctx context.Context, r *http.Request) (any, error) {
	asked := r.URL.Query().Get("topic")
	t, err := route.ParseTopic(asked)
	if err != nil {
		return nil, badName(err)
	}
	table, self := s.proxy.Table(), s.proxy.Info()
	d := table.Decide(t, s.proxy.DefaultCluster())
	x := Explanation{
		Asked: asked, Topic: t.Full(), Base: t.Base(), Partition: t.Partition(), System: t.System(),
		Source: sourceName(d.Source), Rule: ruleName(d, table), Cluster: d.Cluster, Epoch: d.Epoch, State: stateName(d.State), SwitchID: d.SwitchID,
		Proxy: self.ID, Digest: table.Digest(), MapAgeSeconds: s.proxy.MapAge().Round(time.Millisecond).Seconds(), Disagree: []string{}, Notes: []string{},
	}
	note := func(format string, args ...any) { x.Notes = append(x.Notes, fmt.Sprintf(format, args...)) }

	i := slices.IndexFunc(s.proxy.Clusters(), func(c ClusterStatus) bool { return c.Name == d.Cluster })
	x.ClusterKnown = i >= 0
	switch {
	case d.Cluster == "":
		note("nothing maps this topic, not even a default: clients are refused; map it, or a scope of it, or * for everything")
	case !x.ClusterKnown:
		note("this proxy has no cluster %q in its configuration: clients of this topic are refused here, others are unaffected", d.Cluster)
	default:
		s.explainLookup(ctx, &x)
	}
	if !strings.Contains(asked, "/") {
		note("a name without / is a topic of public/default, for clients too; which route a tenant has tells `pointsman routes get %s`", asked)
	}
	if d.Drain != "" {
		note("%s", drainNote(d))
	}
	if t.System() {
		note("this topic belongs to Pulsar itself: it has no entry of its own and follows its namespace")
	}
	if h, err := s.proxy.Handles(ctx, t.Base()); err != nil {
		note("the clients connected here could not be counted: %v", err)
	} else {
		x.Here = h.HandleCount
	}
	s.explainStore(ctx, &x, t, d)
	return x, nil
}

// drainNote says who is served by which cluster, of a topic that drains or whose drain is being taken back.
func drainNote(d route.Decision) string {
	drain, err := route.ParseDrain(d.Drain)
	if err != nil {
		return "who still reads the old cluster cannot be told: " + err.Error()
	}
	if len(drain.Subs) == 0 {
		return fmt.Sprintf("every subscription has left cluster %s; the drain ends when nobody is connected there any more", drain.From)
	}
	const most = 20
	var names []string
	for _, sub := range drain.Subs[:min(most, len(drain.Subs))] {
		name := fmt.Sprintf("%q", sub.Name)
		if sub.Leaving {
			name += " (about to move)"
		}
		names = append(names, name)
	}
	if more := len(drain.Subs) - most; more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return fmt.Sprintf("producers and new subscriptions are on cluster %s; these subscriptions read cluster %s until they have nothing left there: %s; %d have moved; see `pointsman switch status %s`",
		d.Cluster, drain.From, strings.Join(names, ", "), drain.Gone, d.SwitchID)
}

func (s *Server) explainLookup(ctx context.Context, x *Explanation) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	a, err := s.proxy.Lookup(ctx, x.Cluster, x.Topic)
	if err != nil {
		x.LookupError = err.Error()
		return
	}
	x.Broker = a.Broker
	x.ClientURL = "pulsar://" + a.Tagged
}

// explainStore compares what is served here with what the store has and with what the other proxies serve.
func (s *Server) explainStore(ctx context.Context, x *Explanation, t route.Topic, served route.Decision) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	p, err := s.plan(ctx, t.Base())
	if err != nil {
		x.Notes = append(x.Notes, fmt.Sprintf("the map store could not be read: %v; this proxy goes on with the map it has", err))
		return
	}
	if stored := p.table.Decide(t, p.def); stored != served {
		x.Notes = append(x.Notes, fmt.Sprintf("the store says %q (epoch %d) and this proxy does not serve that yet", stored.Cluster, stored.Epoch))
	}
	members, err := s.store.Proxies(ctx)
	if err != nil {
		x.Notes = append(x.Notes, fmt.Sprintf("the list of proxies could not be read: %v", err))
		return
	}
	for _, m := range members {
		if m.Live && m.ID != x.Proxy && m.Digest != x.Digest {
			x.Disagree = append(x.Disagree, m.ID)
		}
	}
	if len(x.Disagree) > 0 {
		x.Notes = append(x.Notes, "another map is served by "+strings.Join(x.Disagree, ", ")+": ask them with --admin, or look at `pointsman proxies ls`")
	}
}

// ruleName is the route that decided, as in Route.Name.
func ruleName(d route.Decision, table *route.Table) string {
	switch d.Source {
	case route.SourceTopic:
		return d.Scope
	case route.SourceNone, route.SourceUnknown:
		return ""
	case route.SourceDefault:
		if r, ok := table.Rule(""); !ok || r.Floor() {
			return "default_cluster"
		}
	}
	return scopeName(d.Scope)
}

func (s *Server) handleClusters(ctx context.Context, _ *http.Request) (any, error) {
	counts := map[string]int{}
	for e := range s.proxy.Table().Each {
		counts[e.Cluster]++
	}
	list := ClusterList{Proxy: s.proxy.Info().ID, Default: s.proxy.DefaultCluster(), Clusters: slices.Clone(s.proxy.Clusters())}
	for i := range list.Clusters {
		c := &list.Clusters[i]
		c.Topics = counts[c.Name]
		if c.Brokers == nil {
			c.Brokers = []string{}
		}
	}
	list.Proposals = []Proposal{}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	if proposals, err := s.proposals(ctx); err == nil { // without the store the rest is worth telling
		list.Proposals = proposals
	}
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return list, nil
	}
	views := store.LiveHealth(members)
	for i := range list.Clusters {
		v := switching.CountVotes(list.Clusters[i].Name, views)
		list.Clusters[i].Votes = &v
	}
	return list, nil
}

// Proxies announce a new map a little late, several changes at once: to be asked right after a change must not look like a
// disagreement, nor like an agreement on the map before.
const (
	agreeWait = time.Second
	agreeStep = 50 * time.Millisecond
)

func (s *Server) handleProxies(ctx context.Context, _ *http.Request) (any, error) {
	for deadline := time.Now().Add(agreeWait); ; {
		list, err := s.proxyList(ctx)
		if err != nil || list.Agree || time.Now().After(deadline) {
			return list, err
		}
		select {
		case <-time.After(agreeStep):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// proxyList is the roster, with the map that this proxy serves now rather than the one that it announced last.
func (s *Server) proxyList(ctx context.Context) (ProxyList, error) {
	members, err := s.store.Proxies(ctx)
	if err != nil {
		return ProxyList{}, err
	}
	self := s.proxy.Info()
	for i := range members {
		if m := &members[i]; m.ID == self.ID {
			m.Digest, m.Entries = self.Digest, self.Entries
		}
	}
	slices.SortFunc(members, func(a, b store.Proxy) int { return strings.Compare(a.ID, b.ID) })
	list := ProxyList{Proxies: members, Agree: true}
	if list.Proxies == nil {
		list.Proxies = []store.Proxy{}
	}
	digest := ""
	for i := range members {
		if m := &members[i]; m.Live {
			list.Agree = list.Agree && (digest == "" || digest == m.Digest)
			digest = m.Digest
		}
	}
	return list, nil
}

// handleForget takes a proxy that will not come back off the roster, so that it is no longer asked about its clients.
func (s *Server) handleForget(ctx context.Context, r *ForgetRequest) (any, error) {
	err := s.store.Forget(ctx, r.ID)
	switch {
	case errors.Is(err, store.ErrLive):
		return nil, &Error{Code: CodeProxyLive, Message: fmt.Sprintf("proxy %s is alive", r.ID), Remedy: "stop it first: a proxy that stops in order takes itself off the roster"}
	case errors.Is(err, store.ErrNotFound):
		return nil, &Error{Code: CodeNotFound, Message: fmt.Sprintf("no proxy %q is on the roster", r.ID), Remedy: "look at `pointsman proxies ls`"}
	case err != nil:
		return nil, err
	}
	s.log.Info("proxy forgotten", "proxy", r.ID)
	return s.proxyList(ctx)
}

func (s *Server) handleHistory(ctx context.Context, r *http.Request) (any, error) {
	limit, err := intParam(r.URL.Query().Get("limit"), 20, 10_000)
	if err != nil {
		return nil, err
	}
	history, err := s.store.History(ctx, limit)
	if err != nil {
		return nil, err
	}
	list := HistoryList{Changes: make([]HistoryEntry, 0, len(history))}
	for _, h := range history {
		list.Changes = append(list.Changes, HistoryEntry{Seq: h.Seq, At: h.At, Who: h.Who, Why: h.Why, SwitchID: h.Switch, Changes: historyChanges(h)})
	}
	return list, nil
}
