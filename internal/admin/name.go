package admin

import (
	"fmt"
	"strings"

	"pointsman/core/route"
)

// target is what a name on the command line or in a file stands for.
type target struct {
	topic   route.Topic // when isTopic
	scope   string      // otherwise; "" is the default
	isTopic bool
}

// name is the canonical form, as in Route.Name.
func (t target) name() string {
	if t.isTopic {
		return t.topic.Base()
	}
	return scopeName(t.scope)
}

// DefaultName stands for the default rule.
const DefaultName = "*"

const namespacePrefix = "namespace:" // for V1 namespaces, which look like short topic names
const tenantPrefix = "tenant:"

// scopeName is a scope as parseName reads it.
func scopeName(scope string) string {
	switch strings.Count(scope, "/") {
	case 0:
		if scope == "" {
			return DefaultName
		}
	case 2:
		return namespacePrefix + scope
	}
	return scope
}

// parseName reads *, a tenant, a tenant/namespace, or a topic in any form that has a slash or a domain. The errors are for the operator.
func parseName(name string) (target, error) {
	scope, isNamespace := strings.CutPrefix(name, namespacePrefix)
	tenant, isTenant := strings.CutPrefix(name, tenantPrefix)
	switch {
	case name == "":
		return target{}, &Error{Code: CodeBadName, Message: "the name is empty", Remedy: "name a topic, a tenant/namespace, a tenant, or " + DefaultName + " for the default"}
	case name == DefaultName:
		return target{}, nil
	case isNamespace && !strings.Contains(scope, "/"):
		return target{}, &Error{Code: CodeBadName, Message: fmt.Sprintf("%q is no namespace", name), Remedy: "write TENANT/NAMESPACE"}
	case isTenant && strings.Contains(tenant, "/"):
		return target{}, &Error{Code: CodeBadName, Message: fmt.Sprintf("%q is no tenant", name), Remedy: "write TENANT"}
	case isNamespace:
	case isTenant:
		scope = tenant
	case strings.Contains(name, "://") || strings.Count(name, "/") >= 2:
		return parseTopicName(name)
	default:
		scope = name
	}
	scope, err := route.ParseScope(scope)
	if err != nil {
		return target{}, &Error{Code: CodeBadName, Message: err.Error()}
	}
	return target{scope: scope}, nil
}

// parseTopicName reads the name of a topic that may be mapped.
func parseTopicName(name string) (target, error) {
	t, err := route.ParseTopic(name)
	if err != nil {
		return target{}, &Error{Code: CodeBadName, Message: err.Error()}
	}
	if t.Partition() >= 0 {
		return target{}, &Error{Code: CodeBadName, Message: fmt.Sprintf("%q is partition %d of a topic; all partitions are mapped together", name, t.Partition()), Remedy: "name " + t.Base()}
	}
	if t.System() {
		return target{}, &Error{Code: CodeBadName, Message: fmt.Sprintf("%q belongs to Pulsar itself and always follows its namespace", name), Remedy: "map the namespace " + t.Namespace()}
	}
	return target{topic: t, isTopic: true}, nil
}
