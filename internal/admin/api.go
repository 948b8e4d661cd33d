package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// The types below are the JSON of the control API, documented in docs/cli.md. They are stable: a field may be added, none
// changes its meaning or goes away.

// Code is what kind of error an Error is.
type Code string

// The codes, a closed list.
const (
	CodeBadRequest       Code = "bad_request"       // 400: the request cannot be understood
	CodeBadName          Code = "bad_name"          // 400: a topic, scope or cluster name is not one
	CodeUnsupportedMode  Code = "unsupported_mode"  // 400: no such mode of switching
	CodeNotFound         Code = "not_found"         // 404: no such route, switch or path
	CodeUnknownCluster   Code = "unknown_cluster"   // 409: a proxy has no cluster of that name
	CodeLiveClients      Code = "live_clients"      // 409: producers or consumers would be moved
	CodeProxyUnreachable Code = "proxy_unreachable" // 409: a proxy cannot be asked
	CodeProxyLive        Code = "proxy_live"        // 409: the proxy to be forgotten is alive
	CodeAlreadyThere     Code = "already_there"     // 409: nothing would move
	CodeConflict         Code = "conflict"          // 409: somebody else changed the map meanwhile
	CodeClusterDown      Code = "cluster_down"      // 409: a cluster that has to answer does not
	CodeNoNamespace      Code = "no_namespace"      // 409: the target lacks the namespace
	CodeClusterUp        Code = "cluster_up"        // 409: the cluster of a failover is not dead
	CodeSubscriptions    Code = "subscriptions"     // 409: the target lacks subscriptions, and they cannot be made there
	CodeBusy             Code = "busy"              // 409: too many switches at once
	CodePreflight        Code = "preflight_failed"  // 409: the preflight of a planned switch found something; each finding is a detail
	CodeSwitching        Code = "switch_under_way"  // 409: the topic has a planned switch that has not ended
	CodeTooLate          Code = "too_late"          // 409: the switch has gone too far, or not far enough, for that
	CodeStoreUnavailable Code = "store_unavailable" // 503: the map store is away; nothing was changed
	CodeOutcomeUnknown   Code = "outcome_unknown"   // 503: a write may or may not have happened
	CodeInternal         Code = "internal"          // 500
)

// Status is the HTTP status of the code.
func (c Code) Status() int {
	switch c {
	case CodeBadRequest, CodeBadName, CodeUnsupportedMode:
		return http.StatusBadRequest
	case CodeNotFound:
		return http.StatusNotFound
	case CodeUnknownCluster, CodeLiveClients, CodeProxyUnreachable, CodeProxyLive, CodeAlreadyThere, CodeConflict, CodeClusterDown, CodeNoNamespace, CodeClusterUp, CodeSubscriptions, CodeBusy,
		CodePreflight, CodeSwitching, CodeTooLate:
		return http.StatusConflict
	case CodeStoreUnavailable, CodeOutcomeUnknown:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// Error is why a request failed or was refused.
type Error struct {
	Code    Code     `json:"code"`
	Message string   `json:"message"`
	Remedy  string   `json:"remedy,omitempty"`
	Details []Detail `json:"details,omitempty"`
}

// Detail is one of several things that an Error is about.
type Detail struct {
	Name      string `json:"name,omitempty"`  // topic or scope
	Line      int    `json:"line,omitempty"`  // of an imported file
	Code      Code   `json:"code,omitempty"`  // when it is an error of its own
	Proxy     string `json:"proxy,omitempty"` // id
	Problem   string `json:"problem,omitempty"`
	Producers int    `json:"producers,omitempty"`
	Consumers int    `json:"consumers,omitempty"`
	// Item, Verdict and Remedy are those of a preflight's finding.
	Item    string            `json:"item,omitempty"`
	Verdict switching.Verdict `json:"verdict,omitempty"`
	Remedy  string            `json:"remedy,omitempty"`
}

func (e *Error) Error() string {
	if e.Remedy == "" {
		return e.Message
	}
	return e.Message + "; " + e.Remedy
}

// Refused tells that the request was understood and not done.
func (e *Error) Refused() bool { return e.Code.Status() == http.StatusConflict }

// Readiness is the answer of /readyz.
type Readiness struct {
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons"`
}

// Route is one entry or rule.
type Route struct {
	Name     string `json:"name"`    // canonical topic, tenant/namespace, tenant, or * for the default
	Kind     string `json:"kind"`    // topic, namespace, tenant or default
	Cluster  string `json:"cluster"` // "" when only the epoch is kept and the next rule decides
	Epoch    uint64 `json:"epoch"`
	State    string `json:"state"`
	SwitchID string `json:"switch_id,omitempty"`
}

// RouteList is a page of the map.
type RouteList struct {
	Routes []Route `json:"routes"`
	Total  int     `json:"total"` // that match, on all pages
}

// RouteChange is one change of the map.
type RouteChange struct {
	Name   string `json:"name"`
	Before *Route `json:"before"` // null: absent
	After  *Route `json:"after"`  // null: absent
	// Moved tells that the cluster that decides changed (in the history: that another cluster is named).
	Moved bool `json:"moved"`
}

// ChangeOptions go with every request that changes the map.
type ChangeOptions struct {
	Immediate bool   `json:"immediate,omitempty"` // also when clients would be moved
	Force     bool   `json:"force,omitempty"`     // also when a proxy does not know the cluster
	DryRun    bool   `json:"dry_run,omitempty"`
	Who       string `json:"who,omitempty"`
	Why       string `json:"why,omitempty"`
}

// SetRequest maps a topic or scope to a cluster.
type SetRequest struct {
	Name    string `json:"name"`
	Cluster string `json:"cluster"`
	ChangeOptions
}

// RemoveRequest removes an entry or rule.
type RemoveRequest struct {
	Name string `json:"name"`
	ChangeOptions
}

// ImportRequest sets many routes.
type ImportRequest struct {
	Routes []ImportItem `json:"routes"`
	Prune  bool         `json:"prune,omitempty"` // remove what is not in Routes
	ChangeOptions
}

// ImportItem is one of them. Cluster "-" keeps only the epoch. The epoch is never lowered.
type ImportItem struct {
	Name    string `json:"name"`
	Cluster string `json:"cluster"`
	Epoch   uint64 `json:"epoch,omitempty"`
	Line    int    `json:"line,omitempty"`
}

// ChangeResult is what a change did, or would do in a dry run.
type ChangeResult struct {
	Changed   []RouteChange  `json:"changed"`
	Unchanged int            `json:"unchanged"`
	DryRun    bool           `json:"dry_run"`
	Clients   []ProxyHandles `json:"clients,omitempty"` // that are moved, per proxy
	Notes     []string       `json:"notes,omitempty"`
}

// HandleCount is how many producers and consumers are open.
type HandleCount struct {
	Producers int `json:"producers"`
	Consumers int `json:"consumers"`
	Leaving   int `json:"leaving,omitempty"` // of the consumers: on a cluster that their topic is leaving
}

// Handles are the open producers and consumers of one proxy.
type Handles struct {
	HandleCount
	Topics map[string]HandleCount `json:"topics"` // by base name
}

// ProxyHandles is how many a proxy has, or why it could not be asked.
type ProxyHandles struct {
	Proxy string `json:"proxy"`
	Ops   string `json:"ops_url,omitempty"`
	HandleCount
	Error string `json:"error,omitempty"`
}

// HandlesQuery asks for the handles of many topics and scopes (as in Route.Name).
type HandlesQuery struct {
	Names []string `json:"names"`
}

// Explanation is what happens to a client that asks for a topic, and why.
type Explanation struct {
	Asked         string      `json:"asked"`
	Topic         string      `json:"topic"` // canonical, with partition
	Base          string      `json:"base"`
	Partition     int         `json:"partition"` // -1: none
	System        bool        `json:"system"`
	Source        string      `json:"source"` // topic, namespace, tenant, default, none, or unknown (that part of the map cannot be read)
	Rule          string      `json:"rule"`   // the route that decides, as in Route.Name; "default_cluster" for the configured one
	Cluster       string      `json:"cluster"`
	ClusterKnown  bool        `json:"cluster_known"`
	Epoch         uint64      `json:"epoch"`
	State         string      `json:"state"`
	SwitchID      string      `json:"switch_id,omitempty"`
	Broker        string      `json:"broker,omitempty"`     // owner now
	ClientURL     string      `json:"client_url,omitempty"` // what a client is told
	LookupError   string      `json:"lookup_error,omitempty"`
	Here          HandleCount `json:"handles_here"`
	Proxy         string      `json:"proxy"`
	Digest        string      `json:"map_digest"`
	MapAgeSeconds float64     `json:"map_age_seconds"`
	Disagree      []string    `json:"disagree"` // live proxies that serve another map
	Notes         []string    `json:"notes"`
}

// ClusterStatus is one configured cluster.
type ClusterStatus struct {
	Name      string   `json:"name"`
	Health    string   `json:"health"` // up, down or unknown
	Detail    string   `json:"detail,omitempty"`
	Discovery string   `json:"discovery"` // metadata_store or service_url
	Brokers   []string `json:"brokers"`
	WebURL    string   `json:"web_url,omitempty"`
	// Topics is how many exact entries name it in the map served here; filled in by the operations port.
	Topics int `json:"topics"`
	// Votes is what all live proxies say of it; null while the map store is away.
	Votes *switching.Votes `json:"votes,omitempty"`
}

// ClusterList is the answer of clusters ls.
type ClusterList struct {
	Proxy    string          `json:"proxy"` // as seen by
	Default  string          `json:"default_cluster"`
	Clusters []ClusterStatus `json:"clusters"`
	// Proposals are the failovers that are proposed now.
	Proposals []Proposal `json:"proposals"`
}

// ProxyList is the answer of proxies ls.
type ProxyList struct {
	Proxies []store.Proxy `json:"proxies"`
	Agree   bool          `json:"agree"` // all live ones serve the same map
}

// ForgetRequest names a proxy that will not come back.
type ForgetRequest struct {
	ID string `json:"id"`
}

// HistoryList is the answer of history, newest first.
type HistoryList struct {
	Changes []HistoryEntry `json:"changes"`
}

// HistoryEntry is one write.
type HistoryEntry struct {
	Seq      uint64        `json:"seq"`
	At       time.Time     `json:"at"`
	Who      string        `json:"who"`
	Why      string        `json:"why"`
	SwitchID string        `json:"switch_id,omitempty"`
	Changes  []RouteChange `json:"changes"`
}

// SwitchRequest starts the move of topics, or of a namespace, to a cluster.
type SwitchRequest struct {
	Topics    []string `json:"topics,omitempty"`
	Namespace string   `json:"namespace,omitempty"`
	To        string   `json:"to"`
	Mode      string   `json:"mode"`            // planned (also when empty), drain, immediate or failover
	Force     bool     `json:"force,omitempty"` // planned: in spite of warnings, never of blockers
	DryRun    bool     `json:"dry_run,omitempty"`
	// From is the cluster that is dead; failover mode: alone it stands for everything that is mapped to it.
	From string `json:"from,omitempty"`
	// Subscriptions, in failover mode, is create ("" as well) or none: whether subscriptions that the new cluster lacks are made there.
	Subscriptions string `json:"subscriptions,omitempty"`
	// Reversible has the way back checked as strictly as the way there; planned mode.
	Reversible bool   `json:"reversible,omitempty"`
	Who        string `json:"who,omitempty"`
	Why        string `json:"why,omitempty"`
	// Prefix (of base names) and Percent choose from the topics of a namespace; planned mode.
	Prefix  string  `json:"prefix,omitempty"`
	Percent float64 `json:"percent,omitempty"`
	BatchOptions
}

// BatchOptions are how a batch goes about it, and make one of any request in planned or drain mode.
type BatchOptions struct {
	Waves    []string `json:"waves,omitempty"`    // how much has moved at the end of each: numbers of topics, or shares such as "10%"; default 1, 1%, 10%, 100%
	Pace     float64  `json:"pace,omitempty"`     // switches that begin in a second at most; 0 is no limit
	Parallel int      `json:"parallel,omitempty"` // switches under way at once; default 8
	// The gates, above which it pauses: share of failed switches (default 0.05), 99th percentile of the hold (5,000), entries of one topic that are not replicated (10,000); 0 is no
	// limit for the latter two.
	MaxFailed     *float64            `json:"max_failed,omitempty"`
	MaxHoldMillis *float64            `json:"max_hold_ms,omitempty"`
	MaxBacklog    *int64              `json:"max_backlog,omitempty"`
	OnBlocked     switching.OnBlocked `json:"on_blocked,omitempty"` // stop (default) or skip
}

// SwitchCommand is about a switch, or all switches of one command.
type SwitchCommand struct {
	ID         string `json:"id"`
	Force      bool   `json:"force,omitempty"`      // resume, reverse: in spite of warnings
	DryRun     bool   `json:"dry_run,omitempty"`    // reverse: only the preflight
	Reversible bool   `json:"reversible,omitempty"` // resume, reverse: as of SwitchRequest
	Who        string `json:"who,omitempty"`        // who gives the command
	Why        string `json:"why,omitempty"`        // reverse; pause of a batch
	// OnBlocked, when not "", is what a batch does from now on with topics that a preflight does not let move: resume and reverse.
	OnBlocked switching.OnBlocked `json:"on_blocked,omitempty"`
}

// SwitchStatus is one command's worth of switches.
type SwitchStatus struct {
	ID   string `json:"id"`
	To   string `json:"to"`
	Mode string `json:"mode"`
	// State is planned (a dry run), running, paused, draining, done, incomplete, returned, aborted or failed.
	State string `json:"state"`
	// Total is how many topics and rules the command moves; 0 when an immediate one is asked of a proxy that does not drive it.
	Total    int            `json:"total"`
	Flipped  int            `json:"flipped"`
	Ended    int            `json:"ended"`
	Switches []SwitchDetail `json:"switches"` // at most the newest maxDetails, troubled ones first
	Skipped  []Detail       `json:"skipped,omitempty"`
	Failed   []Detail       `json:"failed,omitempty"`
	Clients  []ProxyHandles `json:"clients,omitempty"` // of an immediate dry run: who would be moved
	// Preflights are what was found before a planned switch, by topic: in the answer to its start or dry run.
	Preflights []switching.Preflight `json:"preflights,omitempty"`
	// Failover is what is known before a failover: in the answer to its start or dry run. Order is how far it is.
	Failover    *FailoverPlan       `json:"failover,omitempty"`
	Order       *switching.Failover `json:"order,omitempty"`
	Notes       []string            `json:"notes,omitempty"`
	Promised    []string            `json:"promised"`
	NotPromised []string            `json:"not_promised"`
	// Batch is the record of a batch, whose Switches are only those under way when it has more than maxDetails; Skipped and Failed are its topics that have not moved.
	Batch *switching.Batch `json:"batch,omitempty"`
}

// SwitchDetail is the switch of one topic or rule.
type SwitchDetail struct {
	switching.Record
	Producers  int      `json:"producers"` // evicted, over all proxies
	Consumers  int      `json:"consumers"`
	Unresolved int      `json:"unresolved"`
	Waiting    []string `json:"waiting,omitempty"` // proxies that have not reported the present state
	// Draining is what the leader has seen last of a drain; null before, and when it is over.
	Draining *switching.Draining `json:"draining,omitempty"`
	Acks     []switching.Ack     `json:"acks"`
}

// SwitchList is the answer of switch list, newest first.
type SwitchList struct {
	Switches []switching.Record `json:"switches"`
	Batches  []switching.Batch  `json:"batches"`
	// Proposals are the failovers that are proposed now, Failovers those that are under way and the newest that are over, newest first.
	Proposals []Proposal        `json:"proposals"`
	Failovers []FailoverSummary `json:"failovers"`
}

// answer runs a handler under requestTimeout and writes what it returns.
func answer(f func(context.Context, *http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
		defer cancel()
		v, err := f(ctx, r)
		if err != nil {
			e := asError(err)
			writeJSON(w, e.Code.Status(), map[string]*Error{"error": e})
			return
		}
		writeJSON(w, http.StatusOK, v)
	})
}

// command is answer for requests that carry a JSON body of at most limit bytes.
func command[T any](limit int64, f func(context.Context, *T) (any, error)) http.Handler {
	return answer(func(ctx context.Context, r *http.Request) (any, error) {
		if kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); kind != "application/json" {
			return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("Content-Type is %q", kind), Remedy: "send application/json"}
		}
		body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
		if err != nil {
			return nil, &Error{Code: CodeBadRequest, Message: "the request body broke off: " + err.Error()}
		}
		if int64(len(body)) > limit {
			return nil, &Error{Code: CodeBadRequest, Message: fmt.Sprintf("the request body is above %d bytes", limit), Remedy: "send it in parts"}
		}
		var v T
		d := json.NewDecoder(strings.NewReader(string(body)))
		d.DisallowUnknownFields()
		if err := d.Decode(&v); err != nil {
			return nil, &Error{Code: CodeBadRequest, Message: "the request body is not the JSON expected: " + err.Error(), Remedy: "see docs/cli.md"}
		}
		return f(ctx, &v)
	})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // the client is gone
}

// asError turns what the store and this package return into what a client is told.
func asError(err error) *Error {
	var e *Error
	var conflict *store.ConflictError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, store.ErrUnknown):
		return &Error{Code: CodeOutcomeUnknown, Message: err.Error(), Remedy: "the map store did not confirm the write: look with `pointsman routes get` or `pointsman history` before you repeat it"}
	case errors.As(err, &conflict), errors.Is(err, store.ErrConflict):
		return &Error{Code: CodeConflict, Message: err.Error(), Remedy: "look at `pointsman history` and repeat if it is still right"}
	case errors.Is(err, store.ErrUnavailable), errors.Is(err, store.ErrClosed), errors.Is(err, context.DeadlineExceeded):
		return &Error{Code: CodeStoreUnavailable, Message: err.Error(), Remedy: "traffic goes on from the last known map; changes and switches have to wait until the map store is back"}
	case errors.Is(err, store.ErrNotFound):
		return &Error{Code: CodeNotFound, Message: err.Error()}
	}
	return &Error{Code: CodeInternal, Message: err.Error(), Remedy: "this is a fault of pointsman: see the log of the proxy"}
}

// stateName is how a route.State is written.
func stateName(s route.State) string {
	switch s {
	case route.StatePrepared:
		return "prepared"
	case route.StateFenced:
		return "fenced"
	case route.StateDraining:
		return "draining"
	}
	return "active"
}

func sourceName(s route.Source) string {
	switch s {
	case route.SourceTopic:
		return "topic"
	case route.SourceNamespace:
		return "namespace"
	case route.SourceTenant:
		return "tenant"
	case route.SourceDefault:
		return "default"
	}
	if s == route.SourceUnknown {
		return "unknown"
	}
	return "none"
}

func entryRoute(e *route.Entry) *Route {
	if e == nil {
		return nil
	}
	return &Route{Name: e.Topic, Kind: "topic", Cluster: e.Cluster, Epoch: e.Epoch, State: stateName(e.State), SwitchID: e.SwitchID}
}

func ruleRoute(r *route.Rule) *Route {
	if r == nil {
		return nil
	}
	return &Route{Name: scopeName(r.Scope), Kind: scopeKind(r.Scope), Cluster: r.Cluster, Epoch: r.Epoch, State: stateName(route.StateActive), SwitchID: r.SwitchID}
}

func scopeKind(scope string) string {
	switch {
	case scope == "":
		return "default"
	case strings.Contains(scope, "/"):
		return "namespace"
	}
	return "tenant"
}
