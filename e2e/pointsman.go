package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Pointsman is a running proxy process.
type Pointsman struct {
	Name string
	URL  string // pulsar://host:port for clients
	TLS  string // pulsar+ssl://localhost:port; its certificate is for that name alone
	Ops  string // http://host:port for the CLI
	Proc *Process
	// Map is where its map lies: "host:port/chroot" of ZooKeeper.
	Map    string
	art    *Artifacts
	procs  *Processes
	config string // file
	starts int
}

// StartPointsman runs `pointsman serve` under the given name and waits until it is ready. config is YAML without
// listeners and names (see PointsmanConfig), and tells of the log first, if at all; dir is emptied and becomes its state directory.
func StartPointsman(ctx context.Context, art *Artifacts, procs *Processes, dir, name, config string) (*Pointsman, error) {
	if art.PointsmanErr != nil {
		return nil, fmt.Errorf("no Pointsman to test: %w", art.PointsmanErr)
	}
	ports, err := procs.FreePorts(3)
	if err != nil {
		return nil, err
	}
	p := &Pointsman{Name: name, URL: "pulsar://" + local(ports[0]), TLS: fmt.Sprintf("pulsar+ssl://localhost:%d", ports[2]), Ops: "http://" + local(ports[1]), art: art}
	path := filepath.Join(dir, name, "pointsman.yaml")
	if !strings.HasPrefix(config, "log:") {
		config = "log: { level: debug }\n" + config
	}
	if err := freshFile(path, fmt.Sprintf(`listeners:
  pulsar: %s
  pulsar_tls: %s
  ops: %s
advertised_url: %s
proxy_id: %s
state_dir: %s
shutdown: { drain_delay: 0s }
%s`, local(ports[0]), local(ports[2]), local(ports[1]), p.URL, name, filepath.Join(dir, name), config)); err != nil {
		return nil, err
	}
	p.procs, p.config = procs, path
	return p, p.Start(ctx)
}

// Start runs the proxy, again after it has ended: with the same addresses, name and state directory.
func (p *Pointsman) Start(ctx context.Context) (err error) {
	name := p.Name
	if p.starts++; p.starts > 1 {
		name = fmt.Sprintf("%s-%d", p.Name, p.starts)
	}
	if p.Proc, err = p.procs.Start(name, exec.Command(p.art.Pointsman, "serve", "--config", p.config)); err != nil {
		return err
	}
	return WaitUntil(ctx, "Pointsman "+name+" to be ready", func() (bool, error) {
		if !p.Proc.Alive() {
			return false, fmt.Errorf("it has ended; its log %s ends with:\n%s", p.Proc.Log, p.Proc.LogTail(20))
		}
		return httpOK(ctx, p.Ops+"/readyz"), nil
	})
}

// PointsmanConfig is the part of the configuration that proxies share: the map in the rig's ZooKeeper under chroot,
// and both clusters, A by discovery and B by service URL, made diallable although their brokers carry equal names.
// alias, when not empty, is one more name for cluster B.
func (r *Rig) PointsmanConfig(chroot, alias string) string {
	head := fmt.Sprintf("store: { type: zookeeper, servers: %q, session_timeout: 10s }\ndefault_cluster: a\nclusters:\n", r.MapZK+"/"+chroot)
	config := head + clusterConfig("a", fmt.Sprintf("metadata_store: %q", "zk:"+r.A.ZooKeeper), r.A) +
		clusterConfig("b", fmt.Sprintf("service_url: %q", r.B.URL()), r.B)
	if alias != "" {
		config += clusterConfig(alias, fmt.Sprintf("service_url: %q", r.B.URL()), r.B)
	}
	return r.listenerTLS("proxy") + config
}

// ConfigOf is the same for other clusters, all found by their ZooKeepers; the first one is the default.
func (r *Rig) ConfigOf(chroot string, clusters ...*Cluster) string {
	config := r.listenerTLS("proxy") + fmt.Sprintf("store: { type: zookeeper, servers: %q, session_timeout: 10s }\ndefault_cluster: %s\nclusters:\n", r.MapZK+"/"+chroot, clusters[0].Name)
	for _, c := range clusters {
		config += clusterConfig(c.Name, fmt.Sprintf("metadata_store: %q", "zk:"+c.ZooKeeper), c)
	}
	return config
}

// listenerTLS has the proxy show one of the rig's certificates.
func (r *Rig) listenerTLS(name string) string {
	return fmt.Sprintf("tls: { certificate_file: %s, key_file: %s }\n", r.tlsFile(name+".pem"), r.tlsFile(name+"-key.pem"))
}

// PointsmanTLSConfig is for a proxy with a map of its own in dir and the certificate of that name. It speaks TLS to one of the clusters:
// to "a" by discovery, or to "b" by service URL.
func (r *Rig) PointsmanTLSConfig(dir, certificate, secure string) string {
	tls := "\n    tls: { ca_file: " + r.tlsFile("ca.pem") + " }"
	a, b := fmt.Sprintf("metadata_store: %q", "zk:"+r.A.ZooKeeper), fmt.Sprintf("service_url: %q", r.B.URL())
	if secure == "a" {
		a += tls
	} else {
		b = fmt.Sprintf("service_url: %q", "pulsar+ssl://"+r.B.Brokers[0].AddrTLS+","+r.B.Brokers[1].AddrTLS) + tls
	}
	return r.listenerTLS(certificate) + fmt.Sprintf("store: { type: file, path: %s }\ndefault_cluster: a\nclusters:\n", dir) + clusterConfig("a", a, r.A) + clusterConfig("b", b, r.B)
}

func clusterConfig(name, discovery string, c *Cluster) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %s:\n    %s\n    web_url: %q\n    listener_name: external\n    resolve:\n", name, discovery, c.Brokers[0].WebURL)
	for _, broker := range c.Brokers {
		fmt.Fprintf(&b, "      %q: %q\n", broker.Logical, broker.Addr)
		if broker.LogicalTLS != "" {
			fmt.Fprintf(&b, "      %q: %q\n", broker.LogicalTLS, broker.AddrTLS)
		}
	}
	return b.String()
}

// CLIError is a command of the CLI that failed.
type CLIError struct {
	Command string
	Err     error
	Output  string // both streams
}

func (e *CLIError) Error() string { return fmt.Sprintf("%s: %v\n%s", e.Command, e.Err, e.Output) }

// CLI runs a pointsman command against this proxy and decodes its JSON output into into, which may be nil.
func (p *Pointsman) CLI(ctx context.Context, into any, args ...string) error {
	args = append([]string{"--admin", p.Ops, "--output", "json"}, args...)
	cmd := exec.CommandContext(ctx, p.art.Pointsman, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	command := "pointsman " + strings.Join(args, " ")
	if err := cmd.Run(); err != nil {
		return &CLIError{Command: command, Err: err, Output: stdout.String() + stderr.String()}
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(stdout.Bytes(), into); err != nil {
		return &CLIError{Command: command, Err: fmt.Errorf("output is not the expected JSON: %w", err), Output: stdout.String()}
	}
	return nil
}

// Metric sums the series of /metrics that have the name and all the labels (each as `label="value"`).
func (p *Pointsman) Metric(ctx context.Context, name string, labels ...string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Ops+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := adminClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	for line := range strings.Lines(string(text)) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if base, _, _ := strings.Cut(series, "{"); !ok || base != name {
			continue
		}
		if slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(series, label) }) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("metric line %q: %w", line, err)
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, fmt.Errorf("%s has no metric %s with %v; every series should exist from the start", p.Name, name, labels)
	}
	return sum, nil
}
