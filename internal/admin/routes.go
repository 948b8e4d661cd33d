package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"pointsman/core/route"
	"pointsman/store"
)

// pageSize is how many routes one answer holds unless asked otherwise; maxPage is the most.
const (
	pageSize = 1_000
	maxPage  = 100_000
)

// handleList answers GET /routes?within=scope&cluster=name&after=name&limit=n&floors=1, sorted: rules first, then topics.
func (s *Server) handleList(ctx context.Context, r *http.Request) (any, error) {
	q := r.URL.Query()
	limit, err := intParam(q.Get("limit"), pageSize, maxPage)
	if err != nil {
		return nil, err
	}
	within := target{}
	if name := q.Get("within"); name != "" {
		if within, err = parseName(name); err != nil {
			return nil, err
		}
		if within.isTopic {
			return nil, &Error{Code: CodeBadName, Message: fmt.Sprintf("%q is a topic", name), Remedy: "use `pointsman routes get`, or name a tenant or tenant/namespace"}
		}
	}
	rules, err := s.store.Rules(ctx)
	if err != nil {
		return nil, err
	}
	entries, err := s.store.Entries(ctx)
	if err != nil {
		return nil, err
	}
	wanted := func(cluster string) bool {
		if cluster == "" {
			return q.Get("floors") != "" && q.Get("cluster") == ""
		}
		return q.Get("cluster") == "" || q.Get("cluster") == cluster
	}
	var all []Route
	for i := range rules {
		scope := rules[i].Scope
		if wanted(rules[i].Cluster) && (within.scope == "" || scope == within.scope || strings.HasPrefix(scope, within.scope+"/")) {
			all = append(all, *ruleRoute(&rules[i]))
		}
	}
	for i := range entries {
		if !wanted(entries[i].Cluster) {
			continue
		}
		if t, err := route.ParseTopic(entries[i].Topic); within.scope == "" || err == nil && t.In(within.scope) {
			all = append(all, *entryRoute(&entries[i]))
		}
	}
	slices.SortFunc(all, compareRoutes)
	list := RouteList{Total: len(all), Routes: all}
	if after := q.Get("after"); after != "" {
		t, err := parseName(after)
		if err != nil {
			return nil, err
		}
		at := Route{Name: t.name(), Kind: "topic"}
		if !t.isTopic {
			at.Kind = scopeKind(t.scope)
		}
		i, found := slices.BinarySearchFunc(all, at, compareRoutes)
		if found {
			i++
		}
		list.Routes = all[i:]
	}
	list.Routes = slices.Clone(list.Routes[:min(limit, len(list.Routes))])
	if list.Routes == nil {
		list.Routes = []Route{}
	}
	return list, nil
}

// compareRoutes sorts the default first, then tenants, namespaces and topics, each by name.
func compareRoutes(a, b Route) int {
	rank := func(kind string) int { return slices.Index([]string{"default", "tenant", "namespace", "topic"}, kind) }
	return cmp.Or(cmp.Compare(rank(a.Kind), rank(b.Kind)), cmp.Compare(a.Name, b.Name))
}

// handleGet answers GET /routes/get?name=… with the entry or rule of exactly that name.
func (s *Server) handleGet(ctx context.Context, r *http.Request) (any, error) {
	t, err := parseName(r.URL.Query().Get("name"))
	if err != nil {
		return nil, err
	}
	notFound := &Error{Code: CodeNotFound, Message: "there is no route for exactly " + t.name(), Remedy: "`pointsman explain TOPIC` tells which rule decides for a topic"}
	if t.isTopic {
		e, ok, err := s.store.Entry(ctx, t.topic.Base())
		if err == nil && !ok {
			err = notFound
		}
		return entryRoute(&e), err
	}
	rules, err := s.store.Rules(ctx)
	if err != nil {
		return nil, err
	}
	for i := range rules {
		if rules[i].Scope == t.scope {
			return ruleRoute(&rules[i]), nil
		}
	}
	return nil, notFound
}

func (s *Server) handleSet(ctx context.Context, r *SetRequest) (any, error) {
	t, err := parseName(r.Name)
	if err != nil {
		return nil, err
	}
	if r.Cluster == "" || r.Cluster == noCluster {
		return nil, &Error{Code: CodeBadName, Message: "no cluster is named", Remedy: "to let the rules decide, use `pointsman routes rm " + t.name() + "`"}
	}
	if err := s.guardCluster(ctx, []string{r.Cluster}, r.Force); err != nil {
		return nil, err
	}
	p, err := s.planFor(ctx, t)
	if err != nil {
		return nil, err
	}
	if _, err := p.set(t, r.Cluster, 0, ""); err != nil {
		return nil, err
	}
	return s.finish(ctx, p, 1, r.ChangeOptions, "routes set "+t.name()+" "+r.Cluster)
}

func (s *Server) handleRemove(ctx context.Context, r *RemoveRequest) (any, error) {
	t, err := parseName(r.Name)
	if err != nil {
		return nil, err
	}
	p, err := s.planFor(ctx, t)
	if err != nil {
		return nil, err
	}
	if !p.exists(t) {
		return nil, &Error{Code: CodeNotFound, Message: "there is no route for exactly " + t.name(), Remedy: "look at `pointsman routes ls`"}
	}
	if _, err := p.remove(t, 0); err != nil {
		return nil, err
	}
	return s.finish(ctx, p, 1, r.ChangeOptions, "routes rm "+t.name())
}

// exists tells whether there is a route (not only a floor) of exactly this name.
func (p *planner) exists(t target) bool {
	if t.isTopic {
		e, ok := p.table.Entry(t.topic.Base())
		return ok && !e.Floor()
	}
	r, ok := p.table.Rule(t.scope)
	return ok && !r.Floor()
}

// planFor reads as much of the map as a change of t needs.
func (s *Server) planFor(ctx context.Context, t target) (*planner, error) {
	if t.isTopic {
		return s.plan(ctx, t.topic.Base())
	}
	return s.plan(ctx, "")
}

// noCluster stands for "the rules decide" in an import.
const noCluster = "-"

func (s *Server) handleImport(ctx context.Context, r *ImportRequest) (any, error) {
	type wish struct {
		target
		ImportItem
	}
	var (
		faults   []Detail
		wishes   []wish
		clusters []string
		first    = map[string]int{}
	)
	for i, item := range r.Routes {
		if item.Line == 0 {
			item.Line = i + 1
		}
		fault := func(problem string) {
			faults = append(faults, Detail{Line: item.Line, Name: item.Name, Problem: problem})
		}
		t, err := parseName(item.Name)
		if err != nil {
			fault(err.Error())
			continue
		}
		if line, twice := first[t.name()]; twice {
			fault(fmt.Sprintf("is %s, which line %d has already; keep one", t.name(), line))
			continue
		}
		first[t.name()] = item.Line
		switch {
		case item.Cluster == "":
			fault("has no cluster; write NAME CLUSTER")
		case item.Cluster == noCluster && item.Epoch == 0:
			fault("has neither a cluster nor an epoch to keep; leave the line out, or use --prune to remove what is not in the file")
		case item.Epoch > route.MaxEpoch:
			fault(fmt.Sprintf("epoch %d is above %d", item.Epoch, uint64(route.MaxEpoch)))
		}
		if item.Cluster != noCluster && !slices.Contains(clusters, item.Cluster) {
			clusters = append(clusters, item.Cluster)
		}
		wishes = append(wishes, wish{t, item})
	}
	if len(faults) == 0 && len(wishes) == 0 && !r.Prune {
		return nil, &Error{Code: CodeBadRequest, Message: "there is nothing to import", Remedy: "the file needs lines of the form: TOPIC-OR-SCOPE CLUSTER"}
	}
	if len(faults) > 0 {
		return nil, &Error{Code: CodeBadName, Message: fmt.Sprintf("%d of %d lines cannot be imported; nothing was changed", len(faults), len(r.Routes)), Remedy: "mend these lines and repeat", Details: faults}
	}
	slices.Sort(clusters)
	if err := s.guardCluster(ctx, slices.DeleteFunc(clusters, func(c string) bool { return c == "" }), r.Force); err != nil {
		return nil, err
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return nil, err
	}
	// Topics first, so that those which keep their place are pinned before a rule moves around them; then rules, the wider ones
	// first; removals last.
	slices.SortStableFunc(wishes, func(a, b wish) int {
		rank := func(w wish) int {
			switch {
			case w.Cluster == noCluster:
				return 2
			case w.isTopic:
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(len(a.scope), len(b.scope)), cmp.Compare(a.name(), b.name()))
	})
	total := len(wishes)
	for _, w := range wishes {
		if w.Cluster == noCluster {
			_, err = p.remove(w.target, w.Epoch)
		} else {
			_, err = p.set(w.target, w.Cluster, w.Epoch, "")
		}
		if err != nil {
			return nil, err
		}
	}
	if r.Prune {
		pruned, err := p.prune(first)
		if err != nil {
			return nil, err
		}
		total += pruned
	}
	return s.finish(ctx, p, total, r.ChangeOptions, fmt.Sprintf("routes import of %d routes", len(wishes)))
}

// prune removes every route that is not named in keep.
func (p *planner) prune(keep map[string]int) (int, error) {
	var gone []target
	for _, r := range p.table.Rules() {
		if _, ok := keep[scopeName(r.Scope)]; !ok && !r.Floor() {
			gone = append(gone, target{scope: r.Scope})
		}
	}
	for e := range p.table.Each {
		if _, ok := keep[e.Topic]; ok || e.Floor() {
			continue
		}
		t, err := route.ParseTopic(e.Topic)
		if err != nil {
			return 0, badName(err)
		}
		gone = append(gone, target{topic: t, isTopic: true})
	}
	slices.SortFunc(gone, func(a, b target) int { return cmp.Compare(a.name(), b.name()) })
	for _, t := range gone {
		if _, err := p.remove(t, 0); err != nil {
			return 0, err
		}
	}
	return len(gone), nil
}

// finish guards, writes and reports a plan of total wishes.
func (s *Server) finish(ctx context.Context, p *planner, total int, o ChangeOptions, defaultWhy string) (any, error) {
	clients, err := s.guardClients(ctx, p, o.Immediate)
	result := ChangeResult{Changed: p.changes(), Unchanged: max(0, total-len(p.steps)), DryRun: o.DryRun, Clients: clients}
	if o.DryRun {
		var refused *Error
		if errors.As(err, &refused) {
			result.Notes = append(result.Notes, "would be refused: "+refused.Error())
			err = nil
		}
		return result, err
	}
	if err != nil {
		return nil, err
	}
	for _, c := range clients {
		if c.Error != "" {
			result.Notes = append(result.Notes, fmt.Sprintf("proxy %s could not be asked for its clients: it %s", c.Proxy, c.Error))
		}
	}
	written, err := s.write(ctx, p, nil, whoOr(o.Who), cmp.Or(o.Why, defaultWhy))
	if err != nil {
		return nil, s.writeError(ctx, p, written, err)
	}
	return result, nil
}

// writeError says how far a write came, and who was faster.
func (s *Server) writeError(ctx context.Context, p *planner, written int, err error) error {
	e := *asError(err)
	if written > 0 {
		e.Message = fmt.Sprintf("stopped after %d of %d changes: %s", written, len(p.steps), e.Message)
		e.Remedy = "repeat the command: what is done already is left alone; " + e.Remedy
	}
	var conflict *store.ConflictError
	if errors.As(err, &conflict) {
		if winner := s.winner(ctx, conflict.Name); winner != "" {
			e.Message += "; " + winner
		}
	}
	return &e
}

// winner says who changed a topic or scope last; "" when the history does not tell.
func (s *Server) winner(ctx context.Context, name string) string {
	const recent = 50
	scope := strings.TrimPrefix(name, "rule ") // as a store's ConflictError calls it
	if name == "the default rule" {
		scope = ""
	}
	history, err := s.store.History(ctx, recent)
	if err != nil {
		return ""
	}
	for _, h := range history {
		for _, c := range historyChanges(h) {
			if c.Name == name || c.Name == scopeName(scope) {
				return fmt.Sprintf("changed by %s at %s (%s): %s", h.Who, h.At.UTC().Format("15:04:05.000"), h.Why, beforeAfter(c))
			}
		}
	}
	return ""
}

// historyChanges are the changes of a write, without those that only guarded it.
func historyChanges(h store.HistoryEntry) []RouteChange {
	changes := make([]RouteChange, 0, len(h.Entries)+len(h.Rules))
	for _, c := range h.Entries {
		changes = append(changes, RouteChange{Name: c.Topic, Before: entryRoute(c.Before), After: entryRoute(c.After), Moved: entryCluster(c.Before) != entryCluster(c.After)})
	}
	for _, c := range h.Rules {
		if onlyGuards(c) {
			continue
		}
		changes = append(changes, RouteChange{Name: scopeName(c.Scope), Before: ruleRoute(c.Before), After: ruleRoute(c.After), Moved: ruleCluster(c.Before) != ruleCluster(c.After)})
	}
	return changes
}

func entryCluster(e *route.Entry) string {
	if e == nil {
		return ""
	}
	return e.Cluster
}

func ruleCluster(r *route.Rule) string {
	if r == nil {
		return ""
	}
	return r.Cluster
}

// beforeAfter is a change in one line.
func beforeAfter(c RouteChange) string { return describe(c.Before) + " → " + describe(c.After) }

func describe(r *Route) string {
	switch {
	case r == nil:
		return "none"
	case r.Cluster == "":
		return fmt.Sprintf("none (epoch %d kept)", r.Epoch)
	}
	return fmt.Sprintf("%s (epoch %d)", r.Cluster, r.Epoch)
}

func whoOr(who string) string { return cmp.Or(who, "unknown") }

func intParam(text string, otherwise, most int) (int, error) {
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("limit %q is not a number from 1 to %d", text, most)}
	}
	return n, nil
}
