package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// schemaTypes are the numbers of the protocol. What the admin API tells of others (KEY_VALUE, PROTOBUF_NATIVE) is not what a producer sends.
var schemaTypes = map[string]int32{
	"NONE": 0, "STRING": 1, "JSON": 2, "PROTOBUF": 3, "AVRO": 4, "BOOLEAN": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9, "FLOAT": 10, "DOUBLE": 11, "DATE": 12, "TIME": 13,
	"TIMESTAMP": 14, "INSTANT": 16, "LOCAL_DATE": 17, "LOCAL_TIME": 18, "LOCAL_DATE_TIME": 19,
}

func schemaPath(base, call string) (string, error) {
	n, err := split(base)
	if err != nil {
		return "", err
	}
	return "/admin/v2/schemas/" + n.tenant + "/" + n.namespace + "/" + url.QueryEscape(n.local) + "/" + call, nil
}

// schemaText is one version as the admin API tells it.
type schemaText struct {
	Version    int64             `json:"version"`
	Type       string            `json:"type"`
	Data       string            `json:"data"`
	Properties map[string]string `json:"properties"`
}

// schemaTexts are all versions, oldest first.
func (c *Client) schemaTexts(ctx context.Context, base string) ([]schemaText, error) {
	p, err := schemaPath(base, "schemas")
	if err != nil {
		return nil, err
	}
	var answer struct {
		Versions []schemaText `json:"getSchemaResponses"`
	}
	if _, err = c.call(ctx, http.MethodGet, p, nil, &answer); err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	slices.SortFunc(answer.Versions, func(a, b schemaText) int { return int(a.Version - b.Version) })
	return answer.Versions, nil
}

// lastSchema is the latest version of a topic's schema, as a PRODUCER names it; nil when there is none.
func (c *Client) lastSchema(ctx context.Context, topic string) (*pulsarpb.Schema, error) {
	p, err := schemaPath(topic, "schema")
	if err != nil {
		return nil, err
	}
	var s schemaText
	if _, err := c.call(ctx, http.MethodGet, p, nil, &s); errors.Is(err, ErrNotFound) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	kind, known := schemaTypes[s.Type]
	if !known {
		return nil, fmt.Errorf("cluster %s: %s has a schema of type %s, which cannot be named by a producer of the controller", c.cfg.Cluster, topic, s.Type)
	}
	schema := &pulsarpb.Schema{Name: proto.String("schema"), SchemaData: []byte(s.Data), Type: proto.Int32(kind)}
	for k, v := range s.Properties {
		schema.Properties = append(schema.Properties, &pulsarpb.KeyValue{Key: proto.String(k), Value: proto.String(v)})
	}
	return schema, nil
}

// CopySchemas registers all versions of a topic's schema (base name) on another cluster that has none, in their order, so that each gets the number that it has
// here. Where the other cluster has some already nothing is done. Whether the numbers are equal afterwards the caller must look up: SchemaDifference.
func (c *Client) CopySchemas(ctx context.Context, base string, to *Client) error {
	there, err := to.Schemas(ctx, base)
	if err != nil || len(there) > 0 {
		return err
	}
	versions, err := c.schemaTexts(ctx, base)
	if err != nil {
		return err
	}
	p, err := schemaPath(base, "schema")
	if err != nil {
		return err
	}
	for _, v := range versions {
		if _, known := schemaTypes[v.Type]; !known {
			return fmt.Errorf("cluster %s: version %d of the schema of %s is of type %s, which the admin API does not tell as it takes it: register it on cluster %s by hand, or with a producer", c.cfg.Cluster, v.Version, base, v.Type, to.cfg.Cluster)
		}
		body := struct {
			Type       string            `json:"type"`
			Schema     string            `json:"schema"`
			Properties map[string]string `json:"properties"`
		}{v.Type, v.Data, v.Properties}
		if _, err := to.call(ctx, http.MethodPost, p, body, nil); err != nil {
			return err
		}
	}
	return nil
}
