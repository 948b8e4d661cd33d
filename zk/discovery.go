package zk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
)

const (
	// brokersNode is where the brokers of a Pulsar cluster register, with every load manager.
	brokersNode = "/loadbalance/brokers"
	// discoveryAudit is how often the brokers are read again without an event.
	discoveryAudit = 5 * time.Minute
	// discoverySession is the session time-out that discovery asks for; it owns no ephemeral node.
	discoverySession = 30 * time.Second
)

// DiscoveryConfig names the metadata store of one Pulsar cluster.
type DiscoveryConfig struct {
	Servers string // "h1:2181,h2:2181/chroot", or Pulsar's form with "zk:" before it
	Chroot  string
	Auth    *Auth
	Logger  *slog.Logger // nil: slog.Default

	resolve func(ctx context.Context, host string) ([]string, error) // of tests
}

// Broker is a broker as it registered itself. URLs are as the broker wrote them; "" where it has none.
type Broker struct {
	ID            string // "<advertised address>:<web port>": an identifier and no address to dial
	ServiceURL    string // pulsar://host:port
	ServiceURLTLS string // pulsar+ssl://host:port
	WebURL        string // http://host:port
	WebURLTLS     string // https://host:port
	Version       string
	Started       time.Time // zero: not told
	Listeners     map[string]Listener
}

// Listener is an advertised listener of a broker.
type Listener struct {
	ServiceURL    string `json:"brokerServiceUrl"`
	ServiceURLTLS string `json:"brokerServiceUrlTls"`
	WebURL        string `json:"brokerHttpUrl"`
	WebURLTLS     string `json:"brokerHttpsUrl"`
}

// Discover calls sink, from one goroutine at a time, with all brokers that are registered in a cluster, in the order of
// their ids, at first and whenever that changes, until ctx ends. No broker at all is an empty list. While the ensemble
// is away nothing is called: the last list stays good. A registration that cannot be read is logged and left out.
//
// It returns nil when ctx ends, and an error only for a configuration that can never work.
func Discover(ctx context.Context, cfg DiscoveryConfig, sink func([]Broker)) error {
	e, err := ParseServers(cfg.Servers)
	if err != nil {
		return fmt.Errorf("broker discovery: %w", err)
	}
	if e.Chroot, err = oneChroot(e.Chroot, cfg.Chroot); err != nil {
		return fmt.Errorf("broker discovery: %w", err)
	}
	log := cfg.Logger
	if log == nil {
		log = slog.Default()
	}
	c, err := newClient(e, discoverySession, cfg.Auth, log, cfg.resolve)
	if err != nil {
		return fmt.Errorf("broker discovery: %w", err)
	}
	defer c.close()
	d := &discovery{client: c, path: e.Chroot + brokersNode, reported: map[string]string{}}
	signal := make(chan struct{}, 1)
	signal <- struct{}{}
	wake := func() {
		select {
		case signal <- struct{}{}:
		default:
		}
	}
	stop := c.listen(&listener{connected: wake, event: func(string) { wake() }})
	defer stop()
	first, last := true, []Broker(nil)
	for {
		audit := time.NewTimer(discoveryAudit)
		select {
		case <-ctx.Done():
			audit.Stop()
			return nil
		case <-signal:
		case <-audit.C:
		}
		audit.Stop()
		brokers, err := d.read(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			d.report("", err)
			if pause(ctx, time.Second) == nil {
				wake()
			}
			continue
		}
		delete(d.reported, "")
		if first || !reflect.DeepEqual(brokers, last) {
			if len(brokers) == 0 {
				c.log.Warn("no broker is registered", "path", d.path)
			}
			first, last = false, brokers
			sink(slices.Clone(brokers))
		}
	}
}

type discovery struct {
	client   *client
	path     string
	reported map[string]string // broker id → fault that was logged
}

// read lists the brokers and leaves a watch on the list. Brokers rewrite their registrations with every load report,
// so only those that cannot be used are watched themselves.
func (d *discovery) read(ctx context.Context) ([]Broker, error) {
	ids, err := d.client.childrenWatched(ctx, d.path)
	if err != nil {
		return nil, err
	}
	slices.Sort(ids)
	brokers := make([]*Broker, len(ids))
	faults := make([]error, len(ids))
	_ = parallel(len(ids), func(i int) error {
		path := d.path + "/" + ids[i]
		n, err := d.client.get(ctx, path)
		if err == nil && !n.exists() {
			return nil // gone meanwhile: the list has changed
		}
		if err == nil {
			if brokers[i], err = parseBroker(ids[i], n.data); err != nil {
				// A watch must be there before the value is judged, or its mending might be missed.
				if n, err = d.client.getWatched(ctx, path); err == nil && n.exists() {
					brokers[i], err = parseBroker(ids[i], n.data)
				}
			}
		}
		faults[i] = err
		return nil
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	maps.DeleteFunc(d.reported, func(id, _ string) bool { return id != "" && !slices.Contains(ids, id) })
	list := make([]Broker, 0, len(ids))
	for i, id := range ids {
		if faults[i] != nil {
			d.report(id, faults[i])
			continue
		}
		delete(d.reported, id)
		if brokers[i] != nil {
			list = append(list, *brokers[i])
		}
	}
	return list, nil
}

// report logs a fault once.
func (d *discovery) report(id string, err error) {
	if d.reported[id] == err.Error() {
		return
	}
	d.reported[id] = err.Error()
	if id == "" {
		d.client.log.Warn("the brokers of this cluster cannot be listed, the last list stays", "path", d.path, "err", err)
		return
	}
	d.client.log.Warn("a broker's registration cannot be used, the broker is left out", "path", d.path+"/"+id, "err", err)
}

// registration holds what both forms of registration have in common: the modular load manager's LocalBrokerData and
// the extensible one's BrokerLookupData.
type registration struct {
	WebServiceURL       string                     `json:"webServiceUrl"`
	WebServiceURLTLS    string                     `json:"webServiceUrlTls"`
	PulsarServiceURL    string                     `json:"pulsarServiceUrl"`
	PulsarServiceURLTLS string                     `json:"pulsarServiceUrlTls"`
	VersionString       string                     `json:"brokerVersionString"` // modular
	Version             string                     `json:"brokerVersion"`       // extensible
	StartTimestamp      int64                      `json:"startTimestamp"`      // milliseconds
	Listeners           map[string]json.RawMessage `json:"advertisedListeners"`
}

// parseBroker reads a registration. A listener that cannot be used is left out, for the others are good without it.
func parseBroker(id string, src []byte) (*Broker, error) {
	var r registration
	if err := json.Unmarshal(src, &r); err != nil {
		return nil, fmt.Errorf("the registration is no JSON object of the expected kind: %w", err)
	}
	b := &Broker{ID: id, ServiceURL: r.PulsarServiceURL, ServiceURLTLS: r.PulsarServiceURLTLS,
		WebURL: r.WebServiceURL, WebURLTLS: r.WebServiceURLTLS, Version: r.Version}
	if b.Version == "" {
		b.Version = r.VersionString
	}
	if r.StartTimestamp > 0 {
		b.Started = time.UnixMilli(r.StartTimestamp)
	}
	if b.ServiceURL == "" && b.ServiceURLTLS == "" {
		return nil, errors.New("the registration has neither pulsarServiceUrl nor pulsarServiceUrlTls")
	}
	err := checkURLs("pulsarServiceUrl", b.ServiceURL, "pulsar", "pulsarServiceUrlTls", b.ServiceURLTLS, "pulsar+ssl",
		"webServiceUrl", b.WebURL, "http", "webServiceUrlTls", b.WebURLTLS, "https")
	if err != nil {
		return nil, err
	}
	for name, text := range r.Listeners {
		var l Listener
		if json.Unmarshal(text, &l) != nil || name == "" || checkURLs("", l.ServiceURL, "pulsar", "", l.ServiceURLTLS, "pulsar+ssl",
			"", l.WebURL, "http", "", l.WebURLTLS, "https") != nil {
			continue
		}
		if b.Listeners == nil {
			b.Listeners = map[string]Listener{}
		}
		b.Listeners[name] = l
	}
	return b, nil
}

// checkURLs takes triples of field, URL and scheme; an empty URL is fine.
func checkURLs(triples ...string) error {
	for t := range slices.Chunk(triples, 3) {
		field, text, scheme := t[0], t[1], t[2]
		if text == "" {
			continue
		}
		u, err := url.Parse(text)
		if err != nil || u.Scheme != scheme || u.Hostname() == "" || u.Port() == "" || u.User != nil || strings.Trim(u.Path, "/") != "" {
			return fmt.Errorf("%s %q is no %s://host:port", field, text, scheme)
		}
	}
	return nil
}

// childrenWatched lists a node's children and makes sure that there is a watch on the list, or on the node's creation.
func (c *client) childrenWatched(ctx context.Context, path string) ([]string, error) {
	return read(ctx, c, "listing "+path, func(conn *zk.Conn) ([]string, error) {
		for {
			confirm := c.arming(path, true)
			if confirm == nil {
				names, _, err := conn.Children(path)
				if errors.Is(err, zk.ErrNoNode) {
					return nil, nil
				}
				return names, err
			}
			names, _, _, err := conn.ChildrenW(path)
			if err == nil {
				confirm()
				return names, nil
			}
			if !errors.Is(err, zk.ErrNoNode) {
				return nil, err
			}
			created := c.arming(path, false)
			if created == nil {
				return nil, nil
			}
			exists, _, _, err := conn.ExistsW(path)
			if err != nil {
				return nil, err
			}
			created()
			if !exists {
				return nil, nil
			}
		}
	})
}
