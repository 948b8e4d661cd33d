package config

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Fault is one thing that is wrong, or (as a warning) that an operator should know.
type Fault struct {
	Key     string `json:"key,omitempty"`   // path, as in limits.connections
	Value   string `json:"value,omitempty"` // as it was written
	Where   string `json:"where,omitempty"` // file:line, an environment variable, or --set
	Problem string `json:"problem"`
	Remedy  string `json:"remedy,omitempty"`
}

func (f Fault) String() string {
	var b strings.Builder
	if f.Where != "" {
		b.WriteString(f.Where + ": ")
	}
	if f.Key != "" {
		b.WriteString(f.Key)
		if f.Value != "" {
			fmt.Fprintf(&b, ": %q", shorten(f.Value))
		}
		b.WriteString(": ")
	}
	b.WriteString(f.Problem)
	if f.Remedy != "" {
		b.WriteString("; " + f.Remedy)
	}
	return b.String()
}

// Faults is the error of Load: everything that is wrong, in the order of the file.
type Faults []Fault

func (fs Faults) Error() string {
	lines := make([]string, len(fs))
	for i, f := range fs {
		lines[i] = f.String()
	}
	return strings.Join(lines, "\n")
}

// Load reads path, then lets the variables of env ("NAME=value", see EnvName) and then the settings of set
// ("key.path=value") override it, and checks the result. The error is a Faults that holds every fault; warnings do not
// stop a start. An empty path reads no file.
func Load(path string, env, set []string) (cfg *Config, warnings []Fault, err error) {
	l := &loader{cfg: Default(), file: path}
	l.cfg.origin = map[string]string{}
	if path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, Faults{{Where: path, Problem: "cannot be read: " + err.Error(), Remedy: "name a readable file with --config"}}
		}
		if !l.readFile(text) {
			return nil, nil, Faults(l.faults) // nothing else can be said of it
		}
	}
	l.readEnv(env)
	l.readSet(set)
	unreadable := len(l.faults)
	faults, warnings := validate(l.cfg)
	for _, f := range faults {
		// A value that could not be read was reported already, and its default says nothing about it.
		if unreadable == 0 || !slices.ContainsFunc(l.faults[:unreadable], func(g Fault) bool { return g.Key == f.Key }) {
			l.faults = append(l.faults, f)
		}
	}
	if len(l.faults) > 0 {
		return nil, warnings, Faults(l.faults)
	}
	return l.cfg, warnings, nil
}

type loader struct {
	cfg    *Config
	file   string
	faults []Fault
}

func (l *loader) fault(key, value, where, problem, remedy string) {
	l.faults = append(l.faults, Fault{Key: key, Value: value, Where: where, Problem: problem, Remedy: remedy})
}

// readFile tells whether text is YAML at all.
func (l *loader) readFile(text []byte) bool {
	f, err := parser.ParseBytes(text, 0, parser.AllowDuplicateMapKey()) // walkMapping reports them with all the rest
	if err != nil {
		l.fault("", "", l.file, "is not YAML: "+strings.TrimSpace(yaml.FormatError(err, false, true)), "mend the marked line")
		return false
	}
	for i, doc := range f.Docs {
		if doc.Body == nil {
			continue
		}
		if i > 0 {
			l.fault("", "", l.at(doc.Body), "a second YAML document", "keep one; nothing after --- is read")
			break
		}
		l.walk(doc.Body, reflect.ValueOf(l.cfg).Elem(), "")
	}
	return true
}

func (l *loader) at(n ast.Node) string {
	return l.file + ":" + strconv.Itoa(n.GetToken().Position.Line)
}

// walk stores what node holds in v, which is what the key path names.
func (l *loader) walk(node ast.Node, v reflect.Value, path string) {
	where := l.at(node)
	if _, ok := node.(*ast.NullNode); ok {
		return // "key:" with nothing behind it keeps the default
	}
	switch node.(type) {
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		l.fault(path, "", where, "anchors, aliases and tags are not supported", "write the value out")
		return
	}
	isMapping := node.Type() == ast.MappingType || node.Type() == ast.MappingValueType
	switch {
	case v.Kind() == reflect.Pointer:
		there(v)
		l.walk(node, v.Elem(), path)
	case v.Kind() == reflect.Struct || v.Kind() == reflect.Map:
		if !isMapping {
			l.fault(path, nodeText(node), where, "must be a mapping of keys to values", example(v, path))
			return
		}
		l.walkMapping(node, v, path)
	case v.Kind() == reflect.Slice:
		seq, ok := node.(*ast.SequenceNode)
		if !ok {
			l.fault(path, nodeText(node), where, "must be a list", "write ["+nodeText(node)+"]")
			return
		}
		l.cfg.origin[path] = where
		list := make([]string, 0, len(seq.Values))
		for _, item := range seq.Values {
			if !isScalar(item) {
				l.fault(path, "", l.at(item), "an item must be a plain value", "")
				continue
			}
			list = append(list, nodeText(item))
		}
		v.Set(reflect.ValueOf(list))
	case !isScalar(node):
		l.fault(path, "", where, "must be a single value", example(v, path))
	default:
		l.set(v, path, nodeText(node), where)
	}
}

func (l *loader) walkMapping(node ast.Node, v reflect.Value, path string) {
	var pairs []*ast.MappingValueNode
	switch n := node.(type) {
	case *ast.MappingNode:
		pairs = n.Values
	case *ast.MappingValueNode:
		pairs = []*ast.MappingValueNode{n}
	}
	seen := map[string]bool{}
	for _, pair := range pairs {
		key, where := nodeText(pair.Key), l.at(pair.Key)
		full := join(path, key)
		if seen[key] {
			l.fault(full, "", where, "is given twice", "keep one")
			continue
		}
		seen[key] = true
		switch {
		case v.Kind() == reflect.Struct:
			field, ok := fieldByKey(v, key)
			if !ok {
				l.fault(full, "", where, "is not a known key", nearest(v, path, key))
				continue
			}
			if field.Kind() == reflect.Struct || field.Kind() == reflect.Map || field.Kind() == reflect.Pointer {
				l.cfg.origin[full] = where
			}
			l.walk(pair.Value, field, full)
		case v.Type().Elem().Kind() == reflect.String: // a map of plain values
			if !isScalar(pair.Value) {
				l.fault(full, "", where, "must be a single value", "")
				continue
			}
			if v.IsNil() {
				v.Set(reflect.MakeMap(v.Type()))
			}
			l.cfg.origin[full] = where
			v.SetMapIndex(reflect.ValueOf(key), reflect.ValueOf(nodeText(pair.Value)))
		default: // clusters by name
			l.cfg.origin[full] = where
			c := &Cluster{}
			l.walk(pair.Value, reflect.ValueOf(c).Elem(), full)
			v.SetMapIndex(reflect.ValueOf(key), reflect.ValueOf(c))
		}
	}
}

// EnvName is the environment variable that overrides a key: POINTSMAN_ and the key path in upper case, with everything
// that is no letter or digit as an underscore.
func EnvName(path string) string {
	return "POINTSMAN_" + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z' || r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, path)
}

// kubernetesVariable matches what Kubernetes puts into the environment of every pod for a Service whose name begins with
// pointsman: it is not meant for us.
var kubernetesVariable = regexp.MustCompile(`^POINTSMAN_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.*)?)?)$`)

// cliVariables are read by the command line, not here.
var cliVariables = []string{"POINTSMAN_ADMIN", "POINTSMAN_OUTPUT", "POINTSMAN_TIMEOUT"}

func (l *loader) readEnv(env []string) {
	known := map[string]string{} // variable → key path
	for _, path := range l.settable() {
		known[EnvName(path)] = path
	}
	env = slices.Sorted(slices.Values(env))
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, "POINTSMAN_") || slices.Contains(cliVariables, name) {
			continue
		}
		path, ok := known[name]
		if !ok {
			if !kubernetesVariable.MatchString(name) {
				l.fault("", "", name, "is an environment variable that names no key", didYouMean(name, slices.Collect(maps.Keys(known)))+"unset it; clusters can only be added in the file")
			}
			continue
		}
		v, _ := l.lookup(path)
		l.set(v, path, value, name)
	}
}

func (l *loader) readSet(set []string) {
	for _, pair := range set {
		path, value, ok := strings.Cut(pair, "=")
		if !ok {
			l.fault("", pair, "--set", fmt.Sprintf("%q is not key=value", pair), "write --set limits.connections=1000")
			continue
		}
		v, ok := l.lookup(path)
		if !ok {
			l.fault(path, value, "--set", "is not a key that can be set", didYouMean(path, l.settable())+"clusters can only be added in the file")
			continue
		}
		l.set(v, path, value, "--set")
	}
}

// settable lists the key paths that environment and flags may override: every leaf, and the leaves of the clusters in
// the file.
func (l *loader) settable() []string {
	var paths []string
	for _, k := range Reference() {
		rest, ok := strings.CutPrefix(k.Key, clusterPrefix)
		if !ok {
			paths = append(paths, k.Key)
			continue
		}
		for name := range l.cfg.Clusters {
			paths = append(paths, "clusters."+name+"."+rest)
		}
	}
	return paths
}

// lookup finds the field that a key path names; cluster names may contain dots.
func (l *loader) lookup(path string) (reflect.Value, bool) {
	v := reflect.ValueOf(l.cfg).Elem()
	if rest, ok := strings.CutPrefix(path, "clusters."); ok {
		name := ""
		for known := range l.cfg.Clusters {
			if strings.HasPrefix(rest, known+".") && len(known) > len(name) {
				name = known
			}
		}
		if name == "" {
			return reflect.Value{}, false
		}
		v, path = reflect.ValueOf(l.cfg.Clusters[name]).Elem(), rest[len(name)+1:]
	}
	for key := range strings.SplitSeq(path, ".") {
		if v.Kind() == reflect.Pointer {
			there(v)
			v = v.Elem()
		}
		if v.Kind() != reflect.Struct {
			return reflect.Value{}, false
		}
		field, ok := fieldByKey(v, key)
		if !ok {
			return reflect.Value{}, false
		}
		v = field
	}
	return v, v.Kind() != reflect.Struct && v.Kind() != reflect.Pointer && v.Type() != reflect.TypeFor[map[string]*Cluster]()
}

// there makes what an optional part points to.
func there(v reflect.Value) {
	if v.IsNil() {
		v.Set(reflect.New(v.Type().Elem()))
	}
}

// set stores text in the leaf v.
func (l *loader) set(v reflect.Value, path, text, where string) {
	l.cfg.origin[path] = where
	switch p := v.Addr().Interface().(type) {
	case *string:
		*p = text
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			l.fault(path, text, where, "is neither true nor false", "write true or false")
			return
		}
		*p = b
	case *int:
		n, err := strconv.Atoi(strings.ReplaceAll(text, "_", ""))
		if err != nil {
			l.fault(path, text, where, "is not a whole number", "write a number such as "+strconv.Itoa(*p))
			return
		}
		*p = n
	case *Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			l.fault(path, text, where, "is not a duration with a unit", "write one such as "+orIfZero(p.String(), "10s")+" (ms, s, m, h)")
			return
		}
		*p = Duration(d)
	case *Size:
		s, err := parseSize(text)
		if err != nil {
			l.fault(path, text, where, "is not a size with a unit", "write one such as "+orIfZero(p.String(), "1MiB")+" (B, KiB, MiB, GiB)")
			return
		}
		*p = s
	case *[]string:
		*p = nil
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item != "" {
				*p = append(*p, item)
			}
		}
	case *map[string]string:
		*p = map[string]string{}
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item == "" {
				continue
			}
			from, to, ok := strings.Cut(item, "=")
			if !ok {
				l.fault(path, item, where, "is not from=to", "write broker-0:6650=10.1.2.3:6650,broker-1:6650=10.1.2.4:6650")
				continue
			}
			(*p)[from] = to
		}
	default:
		panic("config: no rule for the type of " + path)
	}
}

func orIfZero(s, otherwise string) string {
	if strings.HasPrefix(s, "0") {
		return otherwise
	}
	return s
}

func isScalar(n ast.Node) bool {
	switch n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.LiteralNode, *ast.NullNode, *ast.InfinityNode, *ast.NanNode:
		return true
	}
	return false
}

// nodeText is a scalar as it was written, without quotes.
func nodeText(n ast.Node) string {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value
	case *ast.LiteralNode:
		return strings.TrimSpace(n.Value.Value)
	case *ast.NullNode:
		return ""
	}
	if isScalar(n) {
		return n.GetToken().Value
	}
	return n.String()
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// fieldByKey finds the field of the struct v that is called key in YAML.
func fieldByKey(v reflect.Value, key string) (reflect.Value, bool) {
	for f, field := range v.Fields() {
		if f.IsExported() && f.Tag.Get("key") == key {
			return field, true
		}
	}
	return reflect.Value{}, false
}

// official maps keys of the official proxy to ours, for whoever brings a proxy.conf along.
var official = map[string]string{
	"servicePort":                       "listeners.pulsar",
	"webServicePort":                    "listeners.ops (only control API and metrics)",
	"bindAddress":                       "listeners.pulsar",
	"servicePortTls":                    "listeners.pulsar_tls",
	"tlsCertificateFilePath":            "tls.certificate_file",
	"tlsKeyFilePath":                    "tls.key_file",
	"tlsProtocols":                      "tls.min_version",
	"brokerServiceURLTLS":               "clusters.NAME.service_url (pulsar+ssl://)",
	"tlsEnabledWithBroker":              "clusters.NAME.service_url (pulsar+ssl://), or clusters.NAME.tls with metadata_store",
	"brokerClientTrustCertsFilePath":    "clusters.NAME.tls.ca_file",
	"advertisedAddress":                 "advertised_url",
	"metadataStoreUrl":                  "clusters.NAME.metadata_store",
	"zookeeperServers":                  "clusters.NAME.metadata_store",
	"configurationMetadataStoreUrl":     "clusters.NAME.metadata_store",
	"brokerServiceURL":                  "clusters.NAME.service_url",
	"brokerWebServiceURL":               "clusters.NAME.web_url",
	"brokerProxyAllowedHostNames":       "clusters.NAME.allow",
	"brokerProxyAllowedIPAddresses":     "clusters.NAME.allow",
	"brokerProxyAllowedTargetPorts":     "clusters.NAME.allow",
	"brokerProxyConnectTimeoutMs":       "limits.dial_timeout",
	"maxConcurrentInboundConnections":   "limits.connections",
	"maxConcurrentLookupRequests":       "limits.lookups_per_cluster",
	"keepAliveIntervalSeconds":          "limits.keep_alive_interval",
	"maxMessageSize":                    "limits.frame (plus 10KiB)",
	"numIOThreads":                      "loops",
	"metadataStoreSessionTimeoutMillis": "store.session_timeout",
	"proxyLogLevel":                     "log.level",
}

// nearest is the remedy for a key that the struct v at path does not have.
func nearest(v reflect.Value, path, key string) string {
	if ours, ok := official[key]; ok {
		return "this key of the official proxy is " + ours + " here"
	}
	var siblings []string
	for f := range v.Fields() {
		if f.IsExported() {
			siblings = append(siblings, f.Tag.Get("key"))
		}
	}
	if sibling := closest(key, siblings); sibling != "" {
		return "did you mean " + join(path, sibling) + "?"
	}
	leaves := map[string]string{} // a known key at the wrong place
	for _, k := range Reference() {
		leaves[k.Key[strings.LastIndexByte(k.Key, '.')+1:]] = k.Key
	}
	if leaf := closest(key, slices.Collect(maps.Keys(leaves))); leaf != "" {
		return "did you mean " + leaves[leaf] + "?"
	}
	what := "known keys"
	if path != "" {
		what += " of " + path
	}
	return what + ": " + strings.Join(siblings, ", ")
}

// didYouMean names the closest of known, ending in " or ", when there is one.
func didYouMean(name string, known []string) string {
	if best := closest(name, known); best != "" {
		return "did you mean " + best + "? or "
	}
	return ""
}

// closest returns that of known which is most like name, or "" when none is.
func closest(name string, known []string) string {
	best, bestDistance := "", len(name)/3+2
	for _, k := range slices.Sorted(slices.Values(known)) {
		if d := distance(name, k); d < bestDistance {
			best, bestDistance = k, d
		}
	}
	return best
}

// distance is Levenshtein's.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}

func shorten(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}

func example(v reflect.Value, path string) string {
	if v.Kind() == reflect.Struct {
		var keys []string
		for f := range v.Fields() {
			if f.IsExported() {
				keys = append(keys, f.Tag.Get("key"))
			}
		}
		return "keys are " + strings.Join(keys, ", ")
	}
	if v.Kind() == reflect.Map {
		if path == "clusters" {
			return `write a: { service_url: "pulsar://host:6650" }`
		}
		return `write { "broker-0:6650": "10.1.2.3:6650" }`
	}
	return ""
}
