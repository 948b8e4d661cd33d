package pulsaradmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// TopicCounts is one partition as the broker that owns it counts it, once a minute.
type TopicCounts struct {
	Topic         string                      `json:"-"` // full name
	Replication   map[string]ReplicationStats `json:"replication"`
	Subscriptions map[string]struct {
		Type      string     `json:"type"`
		Consumers []struct{} `json:"consumers"`
	} `json:"subscriptions"`
}

// Brokers are the active brokers of the cluster, by the host:port of their admin address.
func (c *Client) Brokers(ctx context.Context) (brokers []string, err error) {
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/brokers", nil, &brokers)
	var refused *Error
	if errors.As(err, &refused) && (refused.Status == http.StatusNotFound || refused.Status == http.StatusMethodNotAllowed) { // older than 2.11
		_, err = c.call(ctx, http.MethodGet, "/admin/v2/brokers/"+url.PathEscape(c.cfg.Cluster), nil, &brokers)
	}
	return brokers, err
}

// BrokerTopics hands the counts of every persistent topic that is in use to visit: one call for each broker, one after the other. What brokers answered
// was visited also when there is an error, which names those that did not.
func (c *Client) BrokerTopics(ctx context.Context, visit func(TopicCounts)) error {
	brokers, err := c.Brokers(ctx)
	if err != nil {
		return err
	}
	scheme, _, _ := strings.Cut(c.cfg.WebURLs[0], "://")
	var faults []error
	for _, broker := range brokers {
		ctx, cancel := context.WithTimeout(ctx, CallTimeout)
		err := c.send(ctx, scheme+"://"+broker, http.MethodGet, "/admin/v2/broker-stats/topics", nil, func(resp *http.Response) error {
			if err := eachTopic(json.NewDecoder(resp.Body), 0, "", visit); err != nil {
				return fmt.Errorf("cluster %s: GET broker-stats/topics of broker %s: %w", c.cfg.Cluster, broker, err)
			}
			return nil
		})
		cancel()
		if err != nil {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

// statsDepth is how many objects lie around that of a topic: namespaces, bundles, domains.
const statsDepth = 4

// eachTopic reads namespace → bundle → domain → topic → counts, a topic at a time: a broker's answer may have tens of megabytes.
func eachTopic(d *json.Decoder, depth int, domain string, visit func(TopicCounts)) error {
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return errors.Join(err, errors.New("the answer is not the statistics of a broker"))
	}
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return err
		}
		name, _ := token.(string)
		switch {
		case depth+1 < statsDepth:
			if err := eachTopic(d, depth+1, name, visit); err != nil {
				return err
			}
		default:
			t := TopicCounts{Topic: name}
			if err := d.Decode(&t); err != nil {
				return err
			}
			if domain == "persistent" {
				visit(t)
			}
		}
	}
	_, err := d.Token()
	return err
}

// Subscribed are the subscriptions that a topic (base name) has, by name: those of any partition. entries is how many entries all partitions hold. What
// does not exist has none.
func (c *Client) Subscribed(ctx context.Context, base string, partitions int) (names map[string]bool, entries int64, err error) {
	parts := PartitionNames(base, partitions)
	logs, lists := make([]Log, len(parts)), make([][]string, len(parts))
	err = each(len(parts), Parallel, func(i int) error {
		err := c.get(ctx, &lists[i], parts[i], "subscriptions")
		if err == nil {
			logs[i], err = c.Tail(ctx, parts[i])
		}
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		return err
	})
	names = map[string]bool{}
	for i, list := range lists {
		entries += logs[i].Len()
		for _, name := range list {
			names[name] = true
		}
	}
	return names, entries, err
}

// CreateEarliest makes a subscription on a topic (base name; all partitions) that begins with the oldest message there is. One that exists stays as it is.
func (c *Client) CreateEarliest(ctx context.Context, base, subscription string, replicated bool, properties map[string]string) error {
	at, err := subscriptionPath(base, subscription)
	if err != nil {
		return err
	}
	if replicated {
		at += "?replicated=true"
	}
	_, err = c.call(ctx, http.MethodPut, at, resetTo{-1, -1, -1, properties}, nil)
	switch {
	case errors.Is(err, ErrConflict):
		return nil
	case err != nil || !replicated:
		return err
	}
	return (&remote{Client: c, topic: base}).SetReplicated(ctx, subscription) // placing a cursor makes a broker forget it
}

// Namespaces lists those of a tenant, as tenant/namespace.
func (c *Client) Namespaces(ctx context.Context, tenant string) (namespaces []string, err error) {
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/namespaces/"+url.PathEscape(tenant), nil, &namespaces)
	return namespaces, err
}

// Tenants lists all tenants.
func (c *Client) Tenants(ctx context.Context) (tenants []string, err error) {
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/tenants", nil, &tenants)
	return tenants, err
}
