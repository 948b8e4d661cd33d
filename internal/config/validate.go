package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"pointsman/store"
)

// minTagKey is the least number of bytes in a key that signs broker addresses.
const minTagKey = 16

// clusterName is what a cluster may be called: it becomes part of host names, metrics and file names.
var clusterName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// validator collects what is wrong with values that could be read.
type validator struct {
	cfg      *Config
	faults   []Fault
	warnings []Fault
}

func validate(c *Config) (faults, warnings []Fault) {
	v := &validator{cfg: c}
	v.listeners()
	v.store()
	v.clusters()
	v.limits()
	v.rest()
	return v.faults, v.warnings
}

func (v *validator) fault(key, value, problem, remedy string) {
	v.faults = append(v.faults, v.entry(key, value, problem, remedy))
}

func (v *validator) warn(key, value, problem, remedy string) {
	v.warnings = append(v.warnings, v.entry(key, value, problem, remedy))
}

func (v *validator) entry(key, value, problem, remedy string) Fault {
	return Fault{Key: key, Value: value, Where: v.cfg.origin[key], Problem: problem, Remedy: remedy}
}

func (v *validator) listeners() {
	c := v.cfg
	if c.Listeners.Pulsar == "" && c.Listeners.PulsarTLS == "" {
		v.fault("listeners.pulsar", "", "is empty, and so is listeners.pulsar_tls: no client could come", "set one of them, such as 0.0.0.0:6650")
	}
	v.optionalHostPort("listeners.pulsar", c.Listeners.Pulsar)
	v.optionalHostPort("listeners.pulsar_tls", c.Listeners.PulsarTLS)
	v.hostPort("listeners.ops", c.Listeners.Ops, true)
	own := func(key, value, other, taken, sample string) {
		if value == taken && value != "" && !strings.HasSuffix(value, ":0") {
			v.fault(key, value, "is the same address as "+other, "give it a port of its own, such as "+sample)
		}
	}
	own("listeners.pulsar_tls", c.Listeners.PulsarTLS, "listeners.pulsar", c.Listeners.Pulsar, "0.0.0.0:6651")
	own("listeners.ops", c.Listeners.Ops, "listeners.pulsar", c.Listeners.Pulsar, "127.0.0.1:7780")
	own("listeners.ops", c.Listeners.Ops, "listeners.pulsar_tls", c.Listeners.PulsarTLS, "127.0.0.1:7780")
	v.tls()
	if c.AdvertisedURL != "" {
		v.url("advertised_url", c.AdvertisedURL, "pulsar://pulsar.example.com:6650", "pulsar", "pulsar+ssl")
	}
	if c.AdvertisedOpsURL != "" {
		v.url("advertised_ops_url", c.AdvertisedOpsURL, "http://10.1.2.3:7780", "http", "https")
	}
	host, _, err := net.SplitHostPort(c.Listeners.Ops)
	if err == nil && c.Store.Type == "zookeeper" && c.AdvertisedOpsURL == "" && isLoopback(host) {
		v.warn("listeners.ops", c.Listeners.Ops, "proxies on other hosts cannot ask this one for its live clients, so they will refuse to move topics without --immediate",
			"listen on an address that they reach and set advertised_ops_url")
	}
}

func (v *validator) tls() {
	t := v.cfg.TLS
	v.oneOf("tls.min_version", t.MinVersion, "1.2", "1.3")
	if v.cfg.Listeners.PulsarTLS == "" {
		for _, file := range [...]struct{ key, path string }{{"tls.certificate_file", t.CertificateFile}, {"tls.key_file", t.KeyFile}} {
			if file.path != "" {
				v.warn(file.key, file.path, "is not used, because there is no listeners.pulsar_tls", "set it, such as 0.0.0.0:6651, or remove this")
			}
		}
		return
	}
	if t.CertificateFile == "" || t.KeyFile == "" {
		v.fault("listeners.pulsar_tls", v.cfg.Listeners.PulsarTLS, "needs a certificate", "set tls.certificate_file and tls.key_file")
		return
	}
	now := time.Now()
	cert, err := t.certificate(now)
	if err != nil {
		v.fileFault(err)
		return
	}
	if left := cert.Leaf.NotAfter.Sub(now); left < expiresSoon {
		v.warn("tls.certificate_file", t.CertificateFile, fmt.Sprintf("expires at %s, in %s", cert.Leaf.NotAfter.UTC().Format(time.RFC3339), left.Round(time.Hour)), "renew it; a new pair is read at the next start")
	}
	if u, err := url.Parse(v.cfg.AdvertisedURL); err == nil && u.Scheme == "pulsar+ssl" && cert.Leaf.VerifyHostname(u.Hostname()) != nil {
		v.warn("tls.certificate_file", t.CertificateFile, fmt.Sprintf("is not for the host of advertised_url (%s), so clients that verify host names refuse it", u.Hostname()), "use a certificate for that name")
	}
}

// fileFault reports a *FileError.
func (v *validator) fileFault(err error) {
	var file *FileError
	if !errors.As(err, &file) {
		panic("config: a certificate fault without its file: " + err.Error())
	}
	v.fault(file.Key, file.Path, file.Problem, file.Remedy)
}

func (v *validator) optionalHostPort(key, value string) {
	if value != "" {
		v.hostPort(key, value, true)
	}
}

func (v *validator) store() {
	s, defaults := v.cfg.Store, Default().Store
	foreign := func(key, value, unset string) {
		if value != unset {
			v.fault(key, value, "is not for store.type "+s.Type, "remove it")
		}
	}
	switch s.Type {
	case "file":
		if s.Path == "" {
			v.fault("store.path", "", "is empty", "name a directory that only this proxy uses, such as /var/lib/pointsman")
		}
		foreign("store.servers", s.Servers, "")
		foreign("store.credentials_file", s.CredentialsFile, "")
		foreign("store.acl", s.ACL, "")
		foreign("store.session_timeout", s.SessionTimeout.String(), defaults.SessionTimeout.String())
		foreign("store.max_map_age", s.MaxMapAge.String(), defaults.MaxMapAge.String())
	case "zookeeper":
		foreign("store.path", s.Path, defaults.Path)
		v.zookeeper("store.servers", s.Servers, "zk1:2181,zk2:2181,zk3:2181/chroot")
		v.duration("store.session_timeout", s.SessionTimeout, store.MinSessionTimeout, 5*time.Minute)
		v.maxMapAge()
		if s.CredentialsFile != "" {
			if line, ok := v.secretFile("store.credentials_file", s.CredentialsFile, "one line scheme:credentials, as in digest:user:password"); ok && !strings.Contains(line, ":") {
				v.fault("store.credentials_file", s.CredentialsFile, "does not hold scheme:credentials", "write one line such as digest:user:password into it")
			}
		}
		v.oneOf("store.acl", s.ACL, "", "world", "creator")
		if s.ACL == "creator" && s.CredentialsFile == "" {
			v.fault("store.acl", s.ACL, "creator needs credentials", "set store.credentials_file, or acl: world")
		}
		if v.cfg.StateDir == "" {
			v.warn("state_dir", "", "is not set: a proxy that restarts while ZooKeeper is away serves nothing", "name a directory such as /var/lib/pointsman")
		}
	default:
		v.fault("store.type", s.Type, "is not a store", "write file or zookeeper")
	}
}

const (
	minMapAge = 30 * time.Second
	maxMapAge = 7 * 24 * time.Hour
	// ageSessions: the loss of one server or one leader election must not stop publishes.
	ageSessions = 3
)

func (v *validator) maxMapAge() {
	age, session := v.cfg.Store.MaxMapAge, v.cfg.Store.SessionTimeout
	switch {
	case age == 0:
	case age.Std() < ageSessions*session.Std() && age.Std() >= minMapAge:
		v.fault("store.max_map_age", age.String(), fmt.Sprintf("is less than %d times store.session_timeout (%s): the loss of one ZooKeeper server would stop publishes", ageSessions, session),
			fmt.Sprintf("write %s or more, or 0s for no limit", session*ageSessions))
	default:
		v.duration("store.max_map_age", age, minMapAge, maxMapAge)
	}
}

func (v *validator) clusters() {
	c := v.cfg
	if len(c.Clusters) == 0 {
		v.fault("clusters", "", "no cluster is configured", `add clusters: { a: { service_url: "pulsar://broker:6650" } }`)
	}
	names := make([]string, 0, len(c.Clusters))
	for name := range c.Clusters {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		v.cluster(name, c.Clusters[name])
	}
	for _, name := range names {
		v.failover("clusters."+name+".failover", name, c.Clusters[name].Failover, names)
	}
	if _, ok := c.Clusters[c.DefaultCluster]; c.DefaultCluster != "" && !ok {
		v.fault("default_cluster", c.DefaultCluster, "is not among the clusters", didYouMean(c.DefaultCluster, names)+"add it under clusters")
	}
	if c.DefaultCluster == "" && len(c.Clusters) > 0 {
		v.warn("default_cluster", "", "is not set: topics that no entry and no rule maps are refused", "name one of "+strings.Join(names, ", ")+", or add a rule for * later")
	}
}

func (v *validator) failover(path, name string, f *Failover, names []string) {
	switch {
	case f == nil:
		return
	case f.To == "":
		v.fault(path+".to", "", "is empty", "name the cluster that the topics of "+name+" go to when it is dead")
	case f.To == name:
		v.fault(path+".to", f.To, "is the cluster itself", "name another one")
	case !slices.Contains(names, f.To):
		v.fault(path+".to", f.To, "is not among the clusters", didYouMean(f.To, slices.DeleteFunc(slices.Clone(names), func(other string) bool { return other == name }))+"add it under clusters")
	}
	if f.After != 0 {
		v.duration(path+".after", f.After, time.Second, 24*time.Hour)
	}
	if f.Cooldown != 0 {
		v.duration(path+".cooldown", f.Cooldown, time.Second, 365*24*time.Hour)
	}
	if f.Automatic && v.cfg.Store.Type == "file" {
		v.warn(path+".automatic", "true", "with one proxy alone, trouble of its own network looks like a dead cluster", "run several proxies over ZooKeeper, or leave it out and decide yourself")
	}
}

func (v *validator) cluster(name string, c *Cluster) {
	path := "clusters." + name
	if !clusterName.MatchString(name) {
		v.fault(path, name, "is not a usable cluster name", "use letters, digits, dots, dashes and underscores, at most 63, with a letter or digit at both ends")
	}
	switch {
	case c.MetadataStore == "" && c.ServiceURL == "":
		v.fault(path, "", "has neither metadata_store nor service_url", `set one, such as service_url: "pulsar://broker:6650"`)
	case c.MetadataStore != "" && c.ServiceURL != "":
		v.fault(path+".service_url", c.ServiceURL, "is set beside metadata_store", "keep one: metadata_store discovers the brokers, service_url lists them")
	case c.MetadataStore != "":
		rest := c.MetadataStore
		if scheme, after, ok := strings.Cut(rest, ":"); ok && scheme == "zk" {
			rest = after
		} else if i := strings.Index(rest, "://"); i >= 0 || scheme == "etcd" || scheme == "rocksdb" || scheme == "memory" || scheme == "oxia" {
			v.fault(path+".metadata_store", c.MetadataStore, "only ZooKeeper is supported for discovery", "write zk:h1:2181,h2:2181/chroot, or use service_url")
			rest = ""
		}
		if rest != "" {
			v.zookeeper(path+".metadata_store", rest, "zk:h1:2181,h2:2181/chroot")
		}
	default:
		v.serviceURL(path+".service_url", c.ServiceURL)
	}
	if c.TLS != nil {
		if strings.HasPrefix(c.ServiceURL, "pulsar://") {
			v.fault(path+".service_url", c.ServiceURL, "is for plaintext, and "+path+".tls is set", "write pulsar+ssl:// and the brokers' TLS port, or remove tls")
		}
		if strings.ContainsAny(c.TLS.ServerName, " \t,:/*") && net.ParseIP(c.TLS.ServerName) == nil {
			v.fault(path+".tls.server_name", c.TLS.ServerName, "is no host name", "write the name that stands in the brokers' certificates, without port")
		}
		if _, err := c.TLS.Client(name); err != nil {
			v.fileFault(err)
		}
	}
	if c.WebURL != "" {
		v.webURL(path+".web_url", c)
	}
	if file := c.ControllerTokenFile; file != "" {
		if line, ok := v.secretFile(path+".controller_token_file", file, "one line with the token"); ok && line == "" {
			v.fault(path+".controller_token_file", file, "is empty", "write one line with the token into it")
		}
		if c.WebURL == "" {
			v.warn(path+".controller_token_file", file, "is not used, because there is no "+path+".web_url", "set it, such as http://broker:8080, or remove this")
		}
	}
	for _, pattern := range c.Allow {
		v.pattern(path+".allow", pattern)
	}
	for from, to := range c.Resolve {
		key := path + ".resolve." + from
		v.hostPort(key, from, false)
		v.hostPort(key, to, false)
	}
	if strings.ContainsAny(c.ListenerName, " \t,:/") {
		v.fault(path+".listener_name", c.ListenerName, "is not a listener name", "write the name before the colon in the brokers' advertisedListeners")
	}
}

func (v *validator) serviceURL(key, value string) {
	scheme, rest, ok := strings.Cut(value, "://")
	if !ok || scheme != "pulsar" && scheme != "pulsar+ssl" {
		v.fault(key, value, "does not begin with pulsar:// or pulsar+ssl://", "write pulsar://h1:6650,h2:6650, or pulsar+ssl://h1:6651,h2:6651 for TLS")
		return
	}
	port := map[string]string{"pulsar": "6650", "pulsar+ssl": "6651"}[scheme]
	for host := range strings.SplitSeq(rest, ",") {
		if host != "" && !strings.HasSuffix(host, "]") && !strings.Contains(host, ":") {
			host += ":" + port // the default
		}
		if _, _, err := splitHostPort(host, false); err != nil {
			v.fault(key, value, fmt.Sprintf("host %q: %v", host, err), fmt.Sprintf("write %s://h1:%s,h2:%s, without a path", scheme, port, port))
		}
	}
}

func (v *validator) zookeeper(key, value, sample string) {
	if value == "" {
		v.fault(key, value, "names no server", "write "+sample)
		return
	}
	servers, chroot, hasChroot := strings.Cut(value, "/")
	for host := range strings.SplitSeq(servers, ",") {
		if _, _, err := splitHostPort(host, false); err != nil {
			v.fault(key, value, fmt.Sprintf("server %q: %v", host, err), "write "+sample+"; the chroot stands once, at the end")
		}
	}
	if hasChroot && (chroot == "" || strings.HasSuffix(chroot, "/") || strings.Contains(chroot, "//") || strings.ContainsAny(chroot, ",: ")) {
		v.fault(key, value, fmt.Sprintf("chroot %q is not a path", "/"+chroot), "write "+sample+"; the chroot stands once, at the end")
	}
}

// pattern checks one allow pattern: host:port, * in the host, and port, lo-hi or * behind it.
func (v *validator) pattern(key, value string) {
	const remedy = "write host:port, such as broker-*.example.com:6650 or 10.1.2.3:6650-6660"
	i := strings.LastIndexByte(value, ':')
	if i <= 0 || strings.ContainsAny(value[:i], "/ @") {
		v.fault(key, value, "is not host:port", remedy)
		return
	}
	ports := value[i+1:]
	if ports == "*" {
		return
	}
	lo, hi, isRange := strings.Cut(ports, "-")
	if !isRange {
		hi = lo
	}
	l, errLo := strconv.ParseUint(lo, 10, 16)
	h, errHi := strconv.ParseUint(hi, 10, 16)
	if errLo != nil || errHi != nil || l == 0 || l > h {
		v.fault(key, value, fmt.Sprintf("port %q is no port from 1 to 65535 and no range", ports), remedy)
	}
}

func (v *validator) limits() {
	l := v.cfg.Limits
	v.between("limits.connections", l.Connections, 1, 10_000_000)
	v.size("limits.frame", l.Frame, 64<<10, 1<<30)
	v.size("limits.control_frame", l.ControlFrame, 64<<10, 64<<20)
	v.size("limits.buffer_memory", l.BufferMemory, 1<<20, maxSize)
	v.size("limits.high_watermark", l.HighWatermark, 4<<10, maxSize)
	v.size("limits.low_watermark", l.LowWatermark, 1<<10, maxSize)
	if l.LowWatermark >= l.HighWatermark {
		v.fault("limits.low_watermark", l.LowWatermark.String(), "is not below limits.high_watermark ("+l.HighWatermark.String()+")", "a quarter of it is a good value")
	}
	if l.HighWatermark > l.BufferMemory {
		v.fault("limits.high_watermark", l.HighWatermark.String(), "is above limits.buffer_memory ("+l.BufferMemory.String()+")", "lower it, or raise limits.buffer_memory")
	}
	if l.ControlFrame > l.Frame {
		v.fault("limits.control_frame", l.ControlFrame.String(), "is above limits.frame ("+l.Frame.String()+")", "lower it, or raise limits.frame")
	}
	v.between("limits.lookups_per_connection", l.LookupsPerConnection, 1, 1_000_000)
	v.between("limits.lookups_per_cluster", l.LookupsPerCluster, 1, 1_000_000)
	v.between("limits.parked_requests", l.ParkedRequests, 1, 1_000_000)
	v.duration("limits.connect_timeout", l.ConnectTimeout, 100*time.Millisecond, 5*time.Minute)
	v.duration("limits.handshake_timeout", l.HandshakeTimeout, 100*time.Millisecond, 5*time.Minute)
	v.duration("limits.dial_timeout", l.DialTimeout, 100*time.Millisecond, 5*time.Minute)
	v.duration("limits.tls_handshake_timeout", l.TLSHandshakeTimeout, 100*time.Millisecond, 5*time.Minute)
	v.duration("limits.lookup_timeout", l.LookupTimeout, 100*time.Millisecond, 29*time.Second)
	v.duration("limits.keep_alive_interval", l.KeepAliveInterval, time.Second, time.Hour)
	v.duration("limits.write_stall_timeout", l.WriteStallTimeout, time.Second, 24*time.Hour)
}

func (v *validator) rest() {
	c := v.cfg
	v.between("loops", c.Loops, 0, 1024)
	v.between("eviction.rate", c.Eviction.Rate, 1, 1_000_000)
	v.between("eviction.burst", c.Eviction.Burst, 1, 1_000_000)
	v.duration("eviction.jitter", c.Eviction.Jitter, 0, 10*time.Second)
	v.duration("eviction.receipt_wait", c.Eviction.ReceiptWait, 0, 10*time.Second)
	h := c.Health
	v.duration("health.interval", h.Interval, 100*time.Millisecond, time.Hour)
	v.duration("health.timeout", h.Timeout, 100*time.Millisecond, time.Minute)
	v.between("health.failures", h.Failures, 1, 1_000)
	v.duration("health.over", h.Over, 0, time.Hour)
	v.between("health.successes", h.Successes, 1, 1_000)
	if h.SampleInterval != 0 {
		v.duration("health.sample_interval", h.SampleInterval, time.Second, 24*time.Hour)
	}
	v.oneOf("message_ids", c.MessageIDs, MonotonicIDs, NativeIDs)
	v.oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error")
	v.oneOf("log.format", c.Log.Format, "text", "json")
	v.duration("shutdown.drain_delay", c.Shutdown.DrainDelay, 0, 10*time.Minute)
	v.duration("shutdown.timeout", c.Shutdown.Timeout, 100*time.Millisecond, time.Hour)
	if strings.ContainsFunc(c.ProxyID, func(r rune) bool { return r <= ' ' || r == '/' || r >= 0x7f }) || len(c.ProxyID) > 120 || strings.Trim(c.ProxyID, ".") == "" && c.ProxyID != "" {
		v.fault("proxy_id", c.ProxyID, "is not a usable name", "use letters, digits, dots and dashes, at most 120")
	}
	if c.TagKeyFile != "" {
		if _, err := ReadTagKeys(c.TagKeyFile); err != nil {
			v.fault("tag_key_file", c.TagKeyFile, err.Error(), "write a random key into it: openssl rand -hex 32 > FILE")
		}
	}
}

// ReadTagKeys reads tag_key_file: the current key in the first line, the previous one, if any, in the second.
func ReadTagKeys(path string) ([][]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w", errors.Unwrap(err))
	}
	var keys [][]byte
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		if len(line) < minTagKey {
			return nil, fmt.Errorf("key %d has %d bytes, at least %d are needed", len(keys)+1, len(line), minTagKey)
		}
		keys = append(keys, []byte(line))
	}
	if len(keys) == 0 || len(keys) > 2 {
		return nil, fmt.Errorf("holds %d keys, one or two lines are expected", len(keys))
	}
	return keys, nil
}

// secretFile reads the first line of a file that holds a secret; no fault ever shows what is in it.
func (v *validator) secretFile(key, path, what string) (string, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		v.fault(key, path, "cannot be read: "+errors.Unwrap(err).Error(), "create it with "+what+", readable by this user")
		return "", false
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(line), true
}

func (v *validator) hostPort(key, value string, zeroPort bool) {
	if _, _, err := splitHostPort(value, zeroPort); err != nil {
		v.fault(key, value, err.Error(), "write host:port, such as "+map[bool]string{true: "0.0.0.0:6650", false: "10.1.2.3:6650"}[zeroPort])
	}
}

// splitHostPort is net.SplitHostPort with a port that must be a number, and a host that must be there unless zeroPort
// (a listener) allows an empty one.
func splitHostPort(value string, zeroPort bool) (host, port string, err error) {
	host, port, err = net.SplitHostPort(value)
	if err != nil {
		return "", "", errors.New("is not host:port")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 && !zeroPort {
		return "", "", fmt.Errorf("port %q is not a number from 1 to 65535", port)
	}
	if host == "" && !zeroPort {
		return "", "", errors.New("has no host")
	}
	if strings.ContainsAny(host, "/@ \t") {
		return "", "", errors.New("has a host that is no host name")
	}
	return host, port, nil
}

func (v *validator) url(key, value, sample string, schemes ...string) {
	u, err := url.Parse(value)
	if err != nil || !slices.Contains(schemes, u.Scheme) || u.Hostname() == "" || u.User != nil || strings.Contains(u.Host, ",") {
		v.fault(key, value, "is not a URL of the form "+strings.Join(schemes, ":// or ")+"://host:port", "write "+sample)
	}
}

// webURL judges one or more addresses with one scheme in front.
func (v *validator) webURL(key string, c *Cluster) {
	all := c.WebURLs()
	for _, one := range all {
		if u, err := url.Parse(one); err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.User == nil && u.Path == "" && u.RawQuery == "" {
			continue
		}
		all = nil
	}
	if len(all) == 0 {
		v.fault(key, c.WebURL, "is not of the form http://host:port, with more of host:port behind commas", "write http://h1:8080,h2:8080, or https://h1:8443")
	}
}

func (v *validator) oneOf(key, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		allowed = slices.DeleteFunc(slices.Clone(allowed), func(s string) bool { return s == "" })
		v.fault(key, value, "is not one of "+strings.Join(allowed, ", "), "write one of them")
	}
}

func (v *validator) between(key string, value, lo, hi int) {
	if value < lo || value > hi {
		v.fault(key, strconv.Itoa(value), fmt.Sprintf("is not between %d and %d", lo, hi), "choose a value in between")
	}
}

func (v *validator) size(key string, value, lo, hi Size) {
	if value < lo || value > hi {
		v.fault(key, value.String(), fmt.Sprintf("is not between %s and %s", lo, hi), "choose a value in between")
	}
}

func (v *validator) duration(key string, value Duration, lo, hi time.Duration) {
	if value.Std() < lo || value.Std() > hi {
		v.fault(key, value.String(), fmt.Sprintf("is not between %s and %s", Duration(lo), Duration(hi)), "choose a value in between")
	}
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
