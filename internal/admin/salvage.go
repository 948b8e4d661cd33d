package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"pointsman/core/route"
	"pointsman/core/switching"
)

const (
	// defaultSalvage is how many messages a page of a salvage lists unless it is told, maxSalvageLimit the most.
	defaultSalvage  = 100
	maxSalvageLimit = 10_000
)

// handleSalvage answers GET /switches/{id}/salvage for the id of one switch, or of a command that moved several.
func (s *Server) handleSalvage(ctx context.Context, r *http.Request) (any, error) {
	if s.salvage == nil {
		return nil, &Error{Code: CodeUnsupportedMode, Message: "this proxy cannot look at clusters", Remedy: "ask another one with --admin"}
	}
	limit, err := intParam(r.URL.Query().Get("limit"), defaultSalvage, maxSalvageLimit)
	if err != nil {
		return nil, err
	}
	id := r.PathValue("id")
	o, ordered, err := s.failoverOf(ctx, id)
	if err != nil {
		return nil, err
	}
	records, err := s.records(ctx, id)
	if err != nil {
		return nil, err
	}
	lost := forgotten(o, records)
	switch {
	case len(records) > 0:
	case lost != "":
		return nil, &Error{Code: CodeNotFound, Message: lost, Remedy: fmt.Sprintf("which topics it has moved cannot be told any more: `pointsman routes ls --cluster %s` says what is on %s by now", o.To, o.To)}
	case ordered:
		return nil, movedNothing(id, o.From)
	default:
		return nil, noSwitch(id)
	}
	of := records[0]
	if i := slices.IndexFunc(records, func(rec switching.Record) bool { return !rec.Flipped.IsZero() }); i >= 0 {
		of = records[i]
	}
	from, to := of.From, of.To
	for _, c := range s.proxy.Clusters() {
		if c.Name == from && c.Health == HealthDown {
			return nil, &Error{Code: CodeClusterDown, Message: fmt.Sprintf("cluster %s does not answer: %s", from, c.Detail), Remedy: fmt.Sprintf("what it holds can be told when it is back; what was known of it says `pointsman switch status %s`", id)}
		}
	}
	request := switching.SalvageRequest{From: from, To: to, Limit: limit, After: r.URL.Query().Get("after")}
	var unread []string
	if lost != "" {
		unread = append(unread, lost)
	}
	for _, rec := range records {
		switch {
		case rec.Flipped.IsZero() && rec.Mode == switching.ModePlanned: // never left
		case rec.From != from || rec.To != to:
			if len(unread) < switching.MaxFailoverNames {
				unread = append(unread, fmt.Sprintf("%s: from cluster %s to %s: `pointsman switch salvage %s`", rec.Topic, rec.From, rec.To, rec.ID))
			}
		case strings.Contains(rec.Topic, "://"):
			request.Topics = append(request.Topics, rec.Topic)
		default:
			request.Scopes = append(request.Scopes, rec.Topic)
		}
	}
	if len(request.Topics)+len(request.Scopes) == 0 {
		return nil, movedNothing(id, from)
	}
	p, err := s.plan(ctx, "")
	if err != nil {
		return nil, err
	}
	named := make(map[string]bool, len(request.Topics))
	for _, base := range request.Topics {
		named[base] = true
	}
	request.Decided = func(base string) bool {
		t, err := route.ParseTopic(base)
		return err == nil && (named[base] || p.table.Decide(t, p.def).Cluster == to)
	}
	found, err := s.salvage(ctx, request)
	if errors.Is(err, switching.ErrSalvageCursor) {
		return nil, &Error{Code: CodeBadRequest, Message: "after: " + err.Error(), Remedy: "or leave it out for the first page"}
	}
	found.Unread = slices.Concat(unread, found.Unread)
	return found, err
}

func movedNothing(id, from string) *Error {
	return &Error{Code: CodeTooLate, Message: fmt.Sprintf("switch %s has moved nothing off cluster %s", id, from), Remedy: "look at `pointsman switch status`"}
}
