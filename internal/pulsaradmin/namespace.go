package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"pointsman/core/route"
)

// Topics names the persistent topics of a namespace ("tenant/namespace"), by base names, sorted; Pulsar's own are left out. ErrNotFound when the
// cluster has no such namespace.
func (c *Client) Topics(ctx context.Context, namespace string) ([]string, error) {
	scope, err := route.ParseScope(namespace)
	if err != nil {
		return nil, fmt.Errorf("namespace %q: %w", namespace, err)
	}
	var found []string
	for i, kind := range []string{"", "/partitioned"} {
		var all []string
		if _, err := c.call(ctx, http.MethodGet, "/admin/v2/persistent/"+scope+kind, nil, &all); err != nil && (i == 0 || !errors.Is(err, ErrNotFound)) {
			return nil, err
		}
		for _, name := range all {
			if t, err := route.ParseTopic(name); err == nil && !t.System() {
				found = append(found, t.Base())
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// HasNamespace tells whether the cluster has the namespace of a topic.
func (c *Client) HasNamespace(ctx context.Context, base string) (bool, error) {
	n, err := split(base)
	if err != nil {
		return false, err
	}
	_, err = c.call(ctx, http.MethodGet, "/admin/v2/namespaces/"+n.tenant+"/"+n.namespace, nil, nil)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}
