package testkit

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"pointsman/codec/pulsarpb"
)

// Web begins to serve the cluster's admin REST API, as much of it as a planned switch asks for, and returns its address (http://host:port). It ends with the
// cluster. Namespaces and tenants exist when a topic of theirs does; they are replicated to the clusters that Replicate copies to. There
// are no schemas, no policies of topics, and nobody has to log in.
func (c *Cluster) Web() string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(fmt.Sprintf("testkit: admin address of cluster %s: %v", c.name, err))
	}
	w := &web{c: c}
	mux := http.NewServeMux()
	const topic = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
	mux.HandleFunc("GET /admin/v2/tenants/{tenant}", w.tenant)
	mux.HandleFunc("GET /admin/v2/clusters", w.clusters)
	mux.HandleFunc("GET /admin/v2/namespaces/{tenant}/{namespace}", w.namespace)
	mux.HandleFunc("GET /admin/v2/persistent/{tenant}/{namespace}", w.list)
	mux.HandleFunc("GET /admin/v2/persistent/{tenant}/{namespace}/partitioned", w.partitioned)
	mux.HandleFunc("GET /lookup/v2/topic/persistent/{tenant}/{namespace}/{topic}", w.lookup)
	mux.HandleFunc("PUT "+topic, w.create)
	mux.HandleFunc("POST "+topic+"/createMissedPartitions", w.create)
	mux.HandleFunc("GET "+topic+"/partitions", w.partitions)
	mux.HandleFunc("PUT "+topic+"/partitions", w.partition)
	mux.HandleFunc("GET "+topic+"/stats", w.stats)
	mux.HandleFunc("GET "+topic+"/internalStats", w.internal)
	mux.HandleFunc("PUT "+topic+"/unload", w.unload)
	mux.HandleFunc("HEAD "+topic+"/ledger/{ledger}/entry/{entry}", w.entry)
	mux.HandleFunc("GET "+topic+"/messageid/{time}", w.atTime)
	mux.HandleFunc("PUT "+topic+"/subscription/{sub}", w.subscribe)
	mux.HandleFunc("POST "+topic+"/subscription/{sub}/resetcursor", w.reset)
	mux.HandleFunc("POST "+topic+"/subscription/{sub}/replicatedSubscriptionStatus", w.done)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	c.wg.Go(func() { _ = server.Serve(ln) })
	c.wg.Go(func() {
		<-c.ctx.Done()
		_ = server.Close()
	})
	return "http://" + ln.Addr().String()
}

// web answers admin calls.
type web struct{ c *Cluster }

// named is the full name of the topic in a path; clients encode it twice.
func named(r *http.Request) string {
	local := r.PathValue("topic")
	if plain, err := url.QueryUnescape(local); err == nil {
		local = plain
	}
	return "persistent://" + r.PathValue("tenant") + "/" + r.PathValue("namespace") + "/" + local
}

// with answers with what f makes of the topic in the path, as JSON, or with 404.
func (w *web) with(rw http.ResponseWriter, r *http.Request, f func(t *topic) (answer any, status int)) {
	w.c.mu.Lock()
	t := w.c.topics[named(r)]
	var answer any
	status := http.StatusNotFound
	if t != nil {
		answer, status = f(t)
		w.c.notify()
	}
	w.c.mu.Unlock()
	if t == nil {
		reply(rw, status, map[string]string{"reason": "Topic " + named(r) + " not found"})
		return
	}
	reply(rw, status, answer)
}

func reply(rw http.ResponseWriter, status int, answer any) {
	if answer == nil {
		rw.WriteHeader(status)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(status)
	_ = json.NewEncoder(rw).Encode(answer) // the client may be gone
}

func (w *web) done(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusNoContent) }

// any tells whether a topic begins with that.
func (w *web) any(prefix string) bool {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	for name := range w.c.topics {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

func (w *web) tenant(rw http.ResponseWriter, r *http.Request) {
	if !w.any("persistent://" + r.PathValue("tenant") + "/") {
		reply(rw, http.StatusNotFound, map[string]string{"reason": "Tenant does not exist"})
		return
	}
	reply(rw, http.StatusOK, map[string]any{"allowedClusters": w.peers()})
}

func (w *web) clusters(rw http.ResponseWriter, _ *http.Request) { reply(rw, http.StatusOK, w.peers()) }

// peers are this cluster and those that it is replicated to.
func (w *web) peers() []string {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	names := []string{w.c.name}
	for _, d := range w.c.ways {
		names = append(names, d.dst.name)
	}
	return names
}

func (w *web) namespace(rw http.ResponseWriter, r *http.Request) {
	if !w.any("persistent://" + r.PathValue("tenant") + "/" + r.PathValue("namespace") + "/") {
		reply(rw, http.StatusNotFound, map[string]string{"reason": "Namespace does not exist"})
		return
	}
	reply(rw, http.StatusOK, map[string]any{"replication_clusters": w.peers()})
}

func (w *web) list(rw http.ResponseWriter, r *http.Request) {
	reply(rw, http.StatusOK, within(w.c, r, w.c.topics))
}

func (w *web) partitioned(rw http.ResponseWriter, r *http.Request) {
	reply(rw, http.StatusOK, within(w.c, r, w.c.partitions))
}

// within are the names of all that is in the namespace of a path.
func within[V any](c *Cluster, r *http.Request, all map[string]V) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := []string{}
	for _, name := range sortedKeys(all) {
		if namespaceOf(name) == r.PathValue("tenant")+"/"+r.PathValue("namespace") {
			names = append(names, name)
		}
	}
	return names
}

func (w *web) lookup(rw http.ResponseWriter, r *http.Request) {
	w.c.mu.Lock()
	u := w.c.owner(named(r)).URL()
	w.c.mu.Unlock()
	answer := map[string]string{"brokerUrl": u}
	if w.c.opts.TLS != nil {
		answer = map[string]string{"brokerUrlTls": u}
	}
	reply(rw, http.StatusOK, answer)
}

func (w *web) create(rw http.ResponseWriter, r *http.Request) {
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	switch name := named(r); {
	case w.c.partitions[name] > 0:
		w.c.createPartitioned(name, w.c.partitions[name])
	case w.c.topics[name] != nil:
		reply(rw, http.StatusConflict, map[string]string{"reason": "This topic already exists"})
		return
	default:
		w.c.topic(name)
	}
	w.c.notify()
	rw.WriteHeader(http.StatusNoContent)
}

// partition makes a partitioned topic.
func (w *web) partition(rw http.ResponseWriter, r *http.Request) {
	var n int
	if json.NewDecoder(r.Body).Decode(&n) != nil || n < 1 {
		reply(rw, http.StatusPreconditionFailed, map[string]string{"reason": "Number of partitions should be positive"})
		return
	}
	w.c.mu.Lock()
	defer w.c.mu.Unlock()
	name := named(r)
	if w.c.exists(name) {
		reply(rw, http.StatusConflict, map[string]string{"reason": "This topic already exists"})
		return
	}
	w.c.createPartitioned(name, n)
	w.c.notify()
	rw.WriteHeader(http.StatusNoContent)
}

func (w *web) partitions(rw http.ResponseWriter, r *http.Request) {
	w.c.mu.Lock()
	n, exists := w.c.partitions[named(r)], w.c.exists(named(r))
	w.c.mu.Unlock()
	if !exists {
		reply(rw, http.StatusNotFound, map[string]string{"reason": "Topic not found"})
		return
	}
	reply(rw, http.StatusOK, map[string]int{"partitions": n})
}

// typeNames are those of the subscription types.
var typeNames = map[int32]string{Exclusive: "Exclusive", Shared: "Shared", Failover: "Failover", KeyShared: "Key_Shared"}

func (w *web) stats(rw http.ResponseWriter, r *http.Request) {
	w.with(rw, r, func(t *topic) (any, int) {
		publishers := []map[string]any{}
		for _, p := range t.producers {
			publishers = append(publishers, map[string]any{
				"producerName": p.name, "producerId": p.id, "address": p.conn.nc.RemoteAddr().String(), "clientVersion": p.conn.version(), "accessMode": "Shared",
			})
		}
		subs := map[string]any{}
		for name, s := range t.subs {
			consumers := []map[string]any{}
			for _, o := range s.consumers {
				held := 0
				for _, d := range s.pending {
					if d.to == o {
						held++
					}
				}
				consumers = append(consumers, map[string]any{
					"consumerName": o.name, "address": o.conn.nc.RemoteAddr().String(), "clientVersion": o.conn.version(), "unackedMessages": held, "availablePermits": o.permits,
				})
			}
			subs[name] = map[string]any{
				"type": typeNames[s.typ], "isDurable": s.durable, "msgBacklog": s.backlog(), "unackedMessages": len(s.pending), "consumers": consumers,
			}
		}
		replication := map[string]any{}
		for _, d := range w.c.ways {
			if d.covers(t) {
				replication[d.dst.name] = map[string]any{"connected": true, "replicationBacklog": t.end() - max(t.cursors[d], t.first)}
			}
		}
		return map[string]any{
			"publishers": publishers, "subscriptions": subs, "replication": replication, "storageSize": t.bytes, "ownerBroker": t.owner.Advertised(), "ongoingTxnCount": t.transactions,
		}, http.StatusOK
	})
}

func (c *Conn) version() string {
	if c.connect == nil {
		return ""
	}
	return c.connect.GetClientVersion()
}

// backlog is how many entries are not acknowledged.
func (s *subscription) backlog() (n int) {
	for pos := max(s.mark+1, s.topic.first); pos < s.topic.end(); pos++ {
		if !s.isAcked(pos) {
			n++
		}
	}
	return n
}

// before is the storage's place right before a position: that of the entry in front of it.
func (t *topic) before(pos int64) string {
	switch {
	case pos > t.first && pos <= t.end():
		e := t.at(pos - 1)
		return fmt.Sprintf("%d:%d", e.ledger, e.entry)
	case len(t.entries) > 0:
		e := t.entries[0]
		return fmt.Sprintf("%d:%d", e.ledger, int64(e.entry)-1)
	case t.written > 0:
		return fmt.Sprintf("%d:%d", t.lastID[0], t.lastID[1])
	default:
		return fmt.Sprintf("%d:-1", t.ledger)
	}
}

func (w *web) internal(rw http.ResponseWriter, r *http.Request) {
	w.with(rw, r, func(t *topic) (any, int) {
		type ledger struct {
			ID      uint64 `json:"ledgerId"`
			Entries int    `json:"entries"`
		}
		ledgers := []ledger{}
		for _, e := range t.entries {
			if n := len(ledgers); n == 0 || ledgers[n-1].ID != e.ledger {
				ledgers = append(ledgers, ledger{ID: e.ledger})
			}
			ledgers[len(ledgers)-1].Entries = int(e.entry) + 1
		}
		if n := len(ledgers); n == 0 || ledgers[n-1].ID != t.ledger {
			ledgers = append(ledgers, ledger{ID: t.ledger})
		}
		cursors := map[string]any{}
		for name, s := range t.subs {
			cursors[url.QueryEscape(name)] = map[string]any{
				"markDeletePosition": t.before(s.mark + 1), "readPosition": t.before(s.read), "active": len(s.consumers) > 0, "individuallyDeletedMessages": s.ranges(),
			}
		}
		for _, d := range w.c.ways {
			if d.covers(t) {
				at := t.before(max(t.cursors[d], t.first))
				cursors["pulsar.repl."+d.dst.name] = map[string]any{"markDeletePosition": at, "readPosition": at, "individuallyDeletedMessages": "[]"}
			}
		}
		return map[string]any{
			"lastConfirmedEntry": t.before(t.end()), "ledgers": ledgers, "cursors": cursors, "compactedLedger": map[string]int{"ledgerId": -1},
		}, http.StatusOK
	})
}

// ranges are the entries that are acknowledged one by one, as the storage writes them.
func (s *subscription) ranges() string {
	positions := make([]int64, 0, len(s.acked))
	for pos := range s.acked {
		if pos >= s.topic.first && pos < s.topic.end() {
			positions = append(positions, pos)
		}
	}
	slices.Sort(positions)
	var all []string
	for i := 0; i < len(positions); {
		j := i + 1
		for j < len(positions) && positions[j] == positions[j-1]+1 {
			j++
		}
		all = append(all, "("+s.topic.before(positions[i])+".."+s.topic.before(positions[j-1]+1)+"]")
		i = j
	}
	return "[" + strings.Join(all, ",") + "]"
}

func (w *web) unload(rw http.ResponseWriter, r *http.Request) {
	if err := w.c.Unload(named(r), nil, false); err != nil {
		reply(rw, http.StatusNotFound, map[string]string{"reason": err.Error()})
		return
	}
	rw.WriteHeader(http.StatusNoContent)
}

func (w *web) entry(rw http.ResponseWriter, r *http.Request) {
	ledger, err1 := strconv.ParseUint(r.PathValue("ledger"), 10, 64)
	number, err2 := strconv.ParseUint(r.PathValue("entry"), 10, 64)
	if err1 != nil || err2 != nil {
		reply(rw, http.StatusBadRequest, map[string]string{"reason": "no position"})
		return
	}
	w.with(rw, r, func(t *topic) (any, int) {
		pos, ok := t.lookup(ledger, number)
		if !ok {
			return nil, http.StatusNotFound
		}
		m, h := t.at(pos).meta, rw.Header()
		h.Set("X-Pulsar-publish-time", time.UnixMilli(int64(m.GetPublishTime())).UTC().Format(time.RFC3339Nano))
		h.Set("X-Pulsar-producer-name", m.GetProducerName())
		h.Set("X-Pulsar-sequence-id", strconv.FormatUint(m.GetSequenceId(), 10))
		if m.NumMessagesInBatch != nil {
			h.Set("X-Pulsar-num-batch-message", strconv.Itoa(int(m.GetNumMessagesInBatch())))
		}
		if from := t.at(pos).from; from != "" {
			h.Set("X-Pulsar-replicated-from", from)
		}
		if source := t.at(pos).source; source != "" {
			properties, _ := json.Marshal(map[string]string{sourceProperty: source}) // a map of strings has no fault
			h.Set("X-Pulsar-PROPERTY", string(properties))
		}
		return nil, http.StatusOK
	})
}

func (w *web) atTime(rw http.ResponseWriter, r *http.Request) {
	ms, err := strconv.ParseUint(r.PathValue("time"), 10, 64)
	if err != nil {
		reply(rw, http.StatusBadRequest, map[string]string{"reason": "no time"})
		return
	}
	w.with(rw, r, func(t *topic) (any, int) {
		type id struct {
			Ledger uint64 `json:"ledgerId"`
			Entry  int64  `json:"entryId"`
		}
		for _, e := range t.entries {
			if e.meta.GetPublishTime() >= ms {
				return id{e.ledger, int64(e.entry)}, http.StatusOK
			}
		}
		return id{t.ledger, int64(t.nextEntry)}, http.StatusOK
	})
}

// startIn is where the body of a call has a subscription begin.
func startIn(r *http.Request, t *topic) (int64, bool) {
	var at struct {
		Ledger int64 `json:"ledgerId"`
		Entry  int64 `json:"entryId"`
	}
	if json.NewDecoder(r.Body).Decode(&at) != nil || at.Ledger < 0 {
		return 0, false
	}
	return t.find(uint64(at.Ledger), uint64(max(at.Entry, 0))), true
}

func subscriptionOf(r *http.Request) string {
	name := r.PathValue("sub")
	if plain, err := url.QueryUnescape(name); err == nil {
		name = plain
	}
	return name
}

func (w *web) subscribe(rw http.ResponseWriter, r *http.Request) {
	w.with(rw, r, func(t *topic) (any, int) {
		name := subscriptionOf(r)
		pos, ok := startIn(r, t)
		switch {
		case !ok:
			return map[string]string{"reason": "no position"}, http.StatusBadRequest
		case t.subs[name] != nil:
			return map[string]string{"reason": "Subscription already exists for topic"}, http.StatusConflict
		}
		newSubscription(t, name, Shared, true, pos)
		return nil, http.StatusNoContent
	})
}

func (w *web) reset(rw http.ResponseWriter, r *http.Request) {
	w.with(rw, r, func(t *topic) (any, int) {
		s := t.subs[subscriptionOf(r)]
		pos, ok := startIn(r, t)
		switch {
		case !ok:
			return map[string]string{"reason": "no position"}, http.StatusBadRequest
		case s == nil:
			return map[string]string{"reason": "Subscription not found"}, http.StatusNotFound
		case len(s.consumers) > 0:
			return map[string]string{"reason": "Subscription has active connected consumers"}, http.StatusPreconditionFailed
		}
		s.reset(pos)
		return nil, http.StatusNoContent
	})
}

// sourceProperty is the one in which a replicator says where a message lies on the cluster that it comes from.
const sourceProperty = "__MSG_PROP_REPL_SOURCE_POSITION"

// sourceOf is the field of a message's metadata that holds it.
func sourceOf(source string) *pulsarpb.KeyValue {
	return &pulsarpb.KeyValue{Key: ptr(sourceProperty), Value: &source}
}
