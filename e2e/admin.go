package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// TopicStats are the fields of Pulsar's topic statistics that the tests look at.
type TopicStats struct {
	MsgInCounter  int64                        `json:"msgInCounter"`
	Publishers    []ClientStats                `json:"publishers"`
	Subscriptions map[string]SubscriptionStats `json:"subscriptions"`
	Replication   map[string]ReplicationStats  `json:"replication"`
}

// ClientStats is one producer or consumer as its broker sees it.
type ClientStats struct {
	Name           string `json:"producerName"`
	Address        string `json:"address"`
	ConnectedSince string `json:"connectedSince"`
	ClientVersion  string `json:"clientVersion"`
}

// SubscriptionStats is one subscription as its broker sees it.
type SubscriptionStats struct {
	MsgBacklog int64         `json:"msgBacklog"`
	Consumers  []ClientStats `json:"consumers"`
}

// ReplicationStats is one replicator.
type ReplicationStats struct {
	Backlog   int64 `json:"replicationBacklog"`
	Connected bool  `json:"connected"`
}

// statusError is an answer of the admin API other than success.
type statusError struct {
	call   string
	status int
	body   string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s: status %d: %s", e.call, e.status, e.body)
}

var adminClient = &http.Client{Timeout: 30 * time.Second}

// Admin calls the admin API of the cluster's first broker; redirects to the owner of a topic are followed. body and
// into may be nil.
func (c *Cluster) Admin(ctx context.Context, method, path string, body, into any) error {
	var payload io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(text)
	}
	url := c.Brokers[0].WebURL + path
	req, err := http.NewRequestWithContext(ctx, method, url, payload)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := adminClient.Do(req)
	if err != nil {
		return fmt.Errorf("cluster %s: %w", c.Name, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("cluster %s: %s %s: %w", c.Name, method, url, err)
	}
	if resp.StatusCode/100 != 2 {
		return &statusError{call: "cluster " + c.Name + ": " + method + " " + url, status: resp.StatusCode, body: string(text)}
	}
	if into == nil || len(text) == 0 {
		return nil
	}
	return json.Unmarshal(text, into)
}

// Topics lists the topics of a namespace ("tenant/namespace") that exist on the cluster, partitions one by one.
func (c *Cluster) Topics(ctx context.Context, namespace string) ([]string, error) {
	var topics []string
	err := c.Admin(ctx, http.MethodGet, "/admin/v2/persistent/"+namespace, nil, &topics)
	return topics, err
}

// TopicsOf lists what exists on the cluster of one topic: itself, or its partitions.
func (c *Cluster) TopicsOf(ctx context.Context, topic string) ([]string, error) {
	all, err := c.Topics(ctx, namespaceOf(topic))
	if err != nil {
		return nil, err
	}
	var found []string
	for _, name := range all {
		if name == topic || strings.HasPrefix(name, topic+"-partition-") {
			found = append(found, name)
		}
	}
	return found, nil
}

// Stats reads the statistics of one topic or partition, with backlogs that are counted: those that brokers keep account of are one too many after a cursor was placed at the end of a log
// that was emptied.
func (c *Cluster) Stats(ctx context.Context, topic string) (TopicStats, error) {
	var stats TopicStats
	err := c.Admin(ctx, http.MethodGet, "/admin/v2/"+adminPath(topic)+"/stats?getPreciseBacklog=true", nil, &stats)
	return stats, err
}

// CreatePartitioned creates a topic with partitions.
func (c *Cluster) CreatePartitioned(ctx context.Context, topic string, partitions int) error {
	return c.Admin(ctx, http.MethodPut, "/admin/v2/"+adminPath(topic)+"/partitions", partitions, nil)
}

// Unload takes a topic off its broker, so that its clients must look it up again.
func (c *Cluster) Unload(ctx context.Context, topic string) error {
	return c.Admin(ctx, http.MethodPut, "/admin/v2/"+adminPath(topic)+"/unload", nil, nil)
}

// Owner looks a topic up and returns the address of the broker that owns it.
func (c *Cluster) Owner(ctx context.Context, topic string) (string, error) {
	var answer struct {
		BrokerURL string `json:"brokerUrl"`
	}
	err := c.Admin(ctx, http.MethodGet, "/lookup/v2/topic/"+adminPath(topic), nil, &answer)
	return strings.TrimPrefix(answer.BrokerURL, "pulsar://"), err
}

// adminPath turns persistent://t/ns/topic into persistent/t/ns/topic.
func adminPath(topic string) string { return strings.Replace(topic, "://", "/", 1) }

// namespaceOf returns t/ns of persistent://t/ns/topic.
func namespaceOf(topic string) string {
	_, name, _ := strings.Cut(topic, "://")
	return name[:strings.LastIndexByte(name, '/')]
}
