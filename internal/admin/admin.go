// Package admin is the operations port of a proxy: the control API that the command line and the other proxies talk to,
// /metrics, /healthz and /readyz; and Client, the other side of that API. internal/app runs it, cmd/pointsman calls it
// through Client. What the routes commands and switches mean is decided here; which epoch follows is core/route's business.
//
// It must never touch a connection of a client or a broker: it changes the map in the store, and the proxies act on
// what they then see there. It must never write to the store without compare-and-set.
package admin

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/store"
)

// Proxy is what the operations port needs to know of the running proxy. internal/app implements it. Methods may be called from any
// goroutine; those with a context return by its deadline.
type Proxy interface {
	// Table is the map that is served now.
	Table() *route.Table
	// DefaultCluster is what decides when the map does not; "" for none.
	DefaultCluster() string
	// MapAge is how long ago the map store last answered.
	MapAge() time.Duration
	// Clusters are all configured clusters, sorted by name.
	Clusters() []ClusterStatus
	// Lookup asks the cluster which broker owns a topic (full name, with partition).
	Lookup(ctx context.Context, cluster, topic string) (LookupAnswer, error)
	// Partitions asks the cluster for the number of partitions of a base name, 0 for none, and creates nothing there.
	Partitions(ctx context.Context, cluster, base string) (int, error)
	// Handles counts the open producers and consumers of a base name or a scope; "" is everything.
	Handles(ctx context.Context, name string) (Handles, error)
	// Together are the sets of topics (base names) of a namespace that a client consumes under one subscription name on one connection.
	Together(ctx context.Context, namespace string) ([][]string, error)
	// Ready tells whether new clients should come here, and why not.
	Ready() (ok bool, reasons []string)
	// Info is what this proxy announces of itself.
	Info() store.Proxy
}

// ErrNamespaceNotFound is what Lookup and Partitions answer (wrapped) when the cluster says that the topic's namespace or
// tenant does not exist there.
var ErrNamespaceNotFound = errors.New("the namespace does not exist on that cluster")

// LookupAnswer is which broker owns a topic.
type LookupAnswer struct {
	Broker string // logical "host:port" of the owner
	Tagged string // "host:port" that clients are told instead
}

// Config is what a Server needs.
type Config struct {
	Store   store.Store
	Proxy   Proxy
	Metrics prometheus.Gatherer
	Logger  *slog.Logger
	// Check is the preflight of a planned switch; nil when this proxy can plan none. Nudge tells the controller that a record was written; may be nil.
	Check func(ctx context.Context, r switching.CheckRequest) (switching.Preflight, error)
	Nudge func()
	// Plan finds out which topics a batch is about; nil when this proxy can plan none.
	Plan func(ctx context.Context, r switching.BatchRequest) (switching.BatchPlan, error)
	// Failover is what a failover needs to know of clusters; nil when this proxy can do none. NudgeFailover tells the leader that an order was written; may be nil.
	Failover      FailoverWork
	NudgeFailover func()
	// Salvage lists what an old cluster holds that the new one never got; nil when this proxy cannot ask clusters.
	Salvage func(ctx context.Context, r switching.SalvageRequest) (switching.Salvage, error)
	// PeerTransport carries the questions to other proxies; nil is a transport of its own.
	PeerTransport http.RoundTripper
}

// Bounds of the operations port.
const (
	headerTimeout = 5 * time.Second
	readTimeout   = 30 * time.Second
	writeTimeout  = 90 * time.Second // above the longest request: an import of many chunks
	idleTimeout   = time.Minute
	maxHeader     = 64 << 10
	maxBody       = 1 << 20
	maxImport     = 64 << 20 // a list of topics
	// requestTimeout bounds everything that a request waits for.
	requestTimeout = 60 * time.Second
)

// Server is the operations port. Its own state is the batches of switches that it drives (guarded by mu).
type Server struct {
	store   store.Store
	proxy   Proxy
	log     *slog.Logger
	peers   http.RoundTripper
	handler http.Handler
	// preflight and nudge are Config.Check and Config.Nudge.
	preflight  func(context.Context, switching.CheckRequest) (switching.Preflight, error)
	nudge      func()
	planTopics func(context.Context, switching.BatchRequest) (switching.BatchPlan, error) // Config.Plan
	// failover and nudgeFailover are Config.Failover and Config.NudgeFailover.
	failover      FailoverWork
	nudgeFailover func()
	salvage       func(context.Context, switching.SalvageRequest) (switching.Salvage, error) // Config.Salvage
	http          *http.Server

	stop context.CancelFunc // ends the batches
	life context.Context
	wg   sync.WaitGroup // batches
	// roster is shared by all who look at it in the same moment: a batch has many switches under way, and shows them.
	roster store.Joint[[]store.Proxy]

	mu      sync.Mutex
	batches []*batch // oldest first, bounded by maxBatches
}

// New makes a Server; nothing runs until Serve.
func New(cfg Config) *Server {
	s := &Server{store: cfg.Store, proxy: cfg.Proxy, log: cfg.Logger, peers: cfg.PeerTransport, preflight: cfg.Check, nudge: cfg.Nudge, planTopics: cfg.Plan, failover: cfg.Failover, nudgeFailover: cfg.NudgeFailover, salvage: cfg.Salvage}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.nudge == nil {
		s.nudge = func() {}
	}
	if s.nudgeFailover == nil {
		s.nudgeFailover = func() {}
	}
	if s.peers == nil {
		s.peers = newTransport()
	}
	s.life, s.stop = context.WithCancel(context.Background())

	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", s.handleReady)
	if cfg.Metrics != nil {
		mux.Handle("GET /metrics", promhttp.HandlerFor(cfg.Metrics, promhttp.HandlerOpts{Timeout: readTimeout, MaxRequestsInFlight: 4}))
	}
	mux.Handle("GET /api/v1/routes", answer(s.handleList))
	mux.Handle("GET /api/v1/routes/get", answer(s.handleGet))
	mux.Handle("POST /api/v1/routes/set", command(maxBody, s.handleSet))
	mux.Handle("POST /api/v1/routes/rm", command(maxBody, s.handleRemove))
	mux.Handle("POST /api/v1/routes/import", command(maxImport, s.handleImport))
	mux.Handle("GET /api/v1/explain", answer(s.handleExplain))
	mux.Handle("GET /api/v1/clusters", answer(s.handleClusters))
	mux.Handle("GET /api/v1/proxies", answer(s.handleProxies))
	mux.Handle("POST /api/v1/proxies/forget", command(maxBody, s.handleForget))
	mux.Handle("GET /api/v1/history", answer(s.handleHistory))
	mux.Handle("GET /api/v1/handles", answer(s.handleHandles))
	mux.Handle("POST /api/v1/handles", command(maxImport, s.handleHandlesQuery))
	mux.Handle("GET /api/v1/together", answer(s.handleTogether))
	mux.Handle("GET /api/v1/switches", answer(s.handleSwitches))
	mux.Handle("POST /api/v1/switches", command(maxImport, s.handleSwitchStart))
	mux.Handle("POST /api/v1/switches/abort", command(maxBody, s.handleAbort))
	mux.Handle("POST /api/v1/switches/pause", command(maxBody, s.handlePause))
	mux.Handle("POST /api/v1/switches/resume", command(maxBody, s.handleResume))
	mux.Handle("POST /api/v1/switches/reverse", command(maxBody, s.handleReverse))
	mux.Handle("GET /api/v1/switches/{id}/salvage", answer(s.handleSalvage))
	mux.Handle("GET /api/v1/switches/{id}", answer(s.handleSwitch))
	mux.Handle("/api/", answer(func(_ context.Context, r *http.Request) (any, error) {
		return nil, &Error{Code: CodeNotFound, Message: "there is no " + r.Method + " " + r.URL.Path, Remedy: "see docs/cli.md for the control API; the command line and the proxy may be of different versions"}
	}))
	// A web page that an operator happens to look at must not be able to move topics: cross-origin requests are refused.
	s.handler = http.NewCrossOriginProtection().Handler(mux)
	s.http = &http.Server{
		Handler: s.handler, ReadHeaderTimeout: headerTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	return s
}

// Handler is the port without a listener.
func (s *Server) Handler() http.Handler { return s.handler }

// Serve answers on ln until Shutdown; it then returns nil.
func (s *Server) Serve(ln net.Listener) error {
	if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Shutdown ends the port: requests may finish, and batches of switches stop between two topics. What ctx does not allow
// to finish is cut.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stop()
	err := s.http.Shutdown(ctx)
	if err != nil {
		_ = s.http.Close()
	}
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		err = errors.Join(err, ctx.Err())
	}
	if t, ok := s.peers.(interface{ CloseIdleConnections() }); ok {
		t.CloseIdleConnections()
	}
	return err
}

func (s *Server) handleReady(w http.ResponseWriter, _ *http.Request) {
	ok, reasons := s.proxy.Ready()
	status := http.StatusOK
	if !ok {
		status = http.StatusServiceUnavailable
	}
	if reasons == nil {
		reasons = []string{}
	}
	writeJSON(w, status, Readiness{Ready: ok, Reasons: reasons})
}

func newTransport() *http.Transport {
	return &http.Transport{
		DialContext:           (&net.Dialer{Timeout: peerTimeout}).DialContext,
		MaxIdleConnsPerHost:   2,
		IdleConnTimeout:       30 * time.Second,
		ResponseHeaderTimeout: writeTimeout,
	}
}
