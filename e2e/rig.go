package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"pointsman/internal/tlstest"
)

// Memory limits in MiB (heap, direct). A standalone holds a bookie and a ZooKeeper as well.
const (
	standaloneHeap, standaloneDirect = 512, 512
	brokerHeap, brokerDirect         = 384, 384
	proxyHeap, proxyDirect           = 192, 256
	zookeeperHeap, zookeeperDirect   = 96, 64
	largeMapHeap                     = 768      // of a map's ZooKeeper alone: the records, acks and history of 6,800 switches have filled 96
	loneHeap, loneDirect             = 320, 256 // of another version
)

// startLimit is how long the clusters may take to answer their health checks.
const startLimit = 5 * time.Minute

// Broker is one broker of a cluster.
type Broker struct {
	// Logical is what a LOOKUP by the listener "external" answers. Both clusters use the same names (LK-01).
	Logical string `json:"logical"`
	Addr    string `json:"addr"` // where it really listens
	// The same with TLS. The certificate is for the logical host name, localhost and 127.0.0.1.
	LogicalTLS string `json:"logical_tls"`
	AddrTLS    string `json:"addr_tls"`
	WebURL     string `json:"web_url"` // its admin API
}

// Cluster is one Pulsar cluster: a standalone with its own ZooKeeper and bookie, and a second broker process.
type Cluster struct {
	Name      string   `json:"name"`
	ZooKeeper string   `json:"zookeeper"`
	Brokers   []Broker `json:"brokers"`
	// Version is that of a cluster besides a and b (StartLone); "" is the rig's.
	Version string `json:"version,omitempty"`
	bookie  int    // its port; of those besides a and b
}

// URL is the service URL that names all brokers.
func (c *Cluster) URL() string {
	addrs := make([]string, len(c.Brokers))
	for i, b := range c.Brokers {
		addrs[i] = b.Addr
	}
	return "pulsar://" + strings.Join(addrs, ",")
}

// rigState is what a run leaves behind for the next one when the rig is kept.
type rigState struct {
	A        *Cluster       `json:"a"`
	B        *Cluster       `json:"b"`
	ProxyURL string         `json:"official_proxy"`
	MapZK    string         `json:"map_zookeeper"`
	Pids     map[string]int `json:"pids"`
}

// Rig is two clusters with two-way geo-replication, the official proxy in front of A, and a ZooKeeper for the map.
type Rig struct {
	A, B     *Cluster
	ProxyURL string // official proxy in front of A
	MapZK    string // host:port
	Dir      string // e2e/.rig
	Reused   bool   // left behind by an earlier run
	mapHeap  int    // MiB of the map's ZooKeeper; 0: zookeeperHeap

	art       *Artifacts
	procs     *Processes
	lock      *os.File   // never closed: the lock lives as long as the process
	mu        sync.Mutex // guards processes
	processes map[string]*Process
}

// OpenRig starts the rig, or takes over the one that an earlier run kept.
func OpenRig(ctx context.Context, art *Artifacts, procs *Processes, dir string) (*Rig, error) {
	r := &Rig{Dir: dir, art: art, procs: procs, processes: map[string]*Process{}}
	if err := r.lockFolder(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if r.takeOver(ctx) {
		return r, nil
	}
	return r, r.start(ctx)
}

// OpenMap starts the map's ZooKeeper alone, for tests on fake brokers; there are no clusters.
func OpenMap(ctx context.Context, art *Artifacts, procs *Processes, dir string) (*Rig, error) {
	r := &Rig{Dir: filepath.Join(dir, "map-alone"), art: art, procs: procs, processes: map[string]*Process{}} // beside a rig that was kept
	if err := os.MkdirAll(r.Dir, 0o755); err != nil {
		return nil, err
	}
	if err := r.lockFolder(); err != nil {
		return nil, err
	}
	ports, err := procs.FreePorts(1)
	if err != nil {
		return nil, err
	}
	r.MapZK, r.mapHeap = local(ports[0]), largeMapHeap
	if err := r.writeCertificates(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return r, r.startMap(ctx)
}

// lockFolder keeps a second run of the tests out of the folder until this process ends.
func (r *Rig) lockFolder() (err error) {
	if r.lock, err = os.Create(filepath.Join(r.Dir, "lock")); err != nil {
		return err
	}
	if err := syscall.Flock(int(r.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another run of the end-to-end tests is using %s (%w); wait for its end", r.Dir, err)
	}
	return nil
}

// takeOver returns false, with nothing left of the kept rig, when there is none or it is not in order any more.
func (r *Rig) takeOver(ctx context.Context) bool {
	text, err := os.ReadFile(r.stateFile())
	if err != nil {
		return false
	}
	var state rigState
	if err := json.Unmarshal(text, &state); err != nil || os.Remove(r.stateFile()) != nil {
		return false
	}
	for name, pid := range state.Pids {
		// Only a process that still is what the file says: pids are used again after a restart of the machine.
		if commandLineHas(pid, r.Dir) {
			r.processes[name] = r.procs.Adopt(name, pid)
		}
	}
	r.A, r.B, r.ProxyURL, r.MapZK = state.A, state.B, state.ProxyURL, state.MapZK
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if len(r.processes) == len(state.Pids) && r.healthy(ctx, r.A) == nil && r.healthy(ctx, r.B) == nil && r.waitZooKeeper(ctx) == nil {
		r.Reused = true
		return true
	}
	for name, p := range r.processes {
		p.Signal(syscall.SIGKILL)
		_ = p.WaitEnd(10 * time.Second) // what survives would show as a port in use, and ports are chosen anew
		delete(r.processes, name)
	}
	return false
}

// commandLineHas tells whether the process with that pid names text in its arguments.
func commandLineHas(pid int, text string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(line), text)
}

func (r *Rig) start(ctx context.Context) error {
	ports, err := r.procs.FreePorts(19)
	if err != nil {
		return err
	}
	if err := r.writeCertificates(); err != nil {
		return err
	}
	next := func() int { p := ports[0]; ports = ports[1:]; return p }
	newCluster := func(name string) (*Cluster, int) {
		c := &Cluster{Name: name, ZooKeeper: local(next())}
		for i := range 2 {
			c.Brokers = append(c.Brokers, Broker{
				Logical: fmt.Sprintf("broker-%d:6650", i), Addr: local(next()), WebURL: "http://" + local(next()),
				LogicalTLS: fmt.Sprintf("broker-%d:6651", i), AddrTLS: local(next()),
			})
		}
		return c, next()
	}
	var bookieA, bookieB int
	r.A, bookieA = newCluster("a")
	r.B, bookieB = newCluster("b")
	r.MapZK = local(next())
	proxyPort, proxyWeb := next(), next()
	r.ProxyURL = "pulsar://" + local(proxyPort)

	if err := r.startMap(ctx); err != nil {
		return err
	}
	if err := r.startStandalone(r.A, bookieA); err != nil {
		return err
	}
	if err := r.startStandalone(r.B, bookieB); err != nil {
		return err
	}
	both := func(step func(c *Cluster) error) error {
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for i, c := range []*Cluster{r.A, r.B} {
			wg.Go(func() { errs[i] = step(c) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	if err := both(func(c *Cluster) error { return r.waitBroker(ctx, c, 0) }); err != nil {
		return err
	}
	if err := r.startOfficialProxy(proxyPort, proxyWeb); err != nil {
		return err
	}
	if err := both(func(c *Cluster) error {
		if err := r.startSecondBroker(c); err != nil {
			return err
		}
		if err := r.configure(ctx, c); err != nil {
			return err
		}
		return r.waitBroker(ctx, c, 1)
	}); err != nil {
		return err
	}
	return r.waitOfficialProxy(ctx)
}

// commonConfig is common to all brokers.
func commonConfig(c *Cluster) []string {
	return []string{
		"clusterName=" + c.Name,
		"bindAddress=127.0.0.1",
		"internalListenerName=internal",
		"numIOThreads=2",
		"numHttpServerThreads=8",
		"managedLedgerDefaultEnsembleSize=1",
		"managedLedgerDefaultWriteQuorum=1",
		"managedLedgerDefaultAckQuorum=1",
		"allowLoopback=true",
		"transactionCoordinatorEnabled=false",
		"systemTopicEnabled=true",
		"topicLevelPoliciesEnabled=true",
		"enableReplicatedSubscriptions=true",
		"brokerDeleteInactiveTopicsEnabled=false",
		"zooKeeperSessionTimeoutMillis=30000",
		"journalSyncData=false",
		// Without it a bookie refuses entries of 5 MiB and the broker creates ledgers in a loop.
		"nettyMaxFrameSizeBytes=5253120",
	}
}

// brokerConfig is common to the standalone and the second broker of a cluster.
func (r *Rig) brokerConfig(c *Cluster, i int) string {
	b := c.Brokers[i]
	return strings.Join(append(commonConfig(c),
		"advertisedListeners=internal:pulsar://"+b.Addr+",internal:pulsar+ssl://"+b.AddrTLS+",external:pulsar://"+b.Logical+",external:pulsar+ssl://"+b.LogicalTLS,
		"brokerServicePort="+portOf(b.Addr),
		"brokerServicePortTls="+portOf(b.AddrTLS),
		"tlsCertificateFilePath="+r.tlsFile("broker.pem"),
		"tlsKeyFilePath="+r.tlsFile("broker-key.pem"),
		"tlsTrustCertsFilePath="+r.tlsFile("ca.pem"),
		"webServicePort="+portOf(b.WebURL),
		// Two brokers share the bundles, but nothing may move by itself while a test measures.
		"loadBalancerEnabled=true",
		"loadBalancerSheddingEnabled=false",
		"loadBalancerAutoBundleSplitEnabled=false",
		"loadManagerClassName=org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl",
		"loadBalancerLoadPlacementStrategy=org.apache.pulsar.broker.loadbalance.impl.RoundRobinBrokerSelector",
		"",
	), "\n")
}

// tlsFile is a file that writeCertificates has made: ca.pem, and certificate and key of the brokers, of the proxies, and for another name.
func (r *Rig) tlsFile(name string) string { return filepath.Join(r.Dir, "tls", name) }

// writeCertificates makes an authority and what it signs. A rig that is kept keeps them.
func (r *Rig) writeCertificates() error {
	ca, err := tlstest.NewCA("pointsman e2e")
	if err != nil {
		return err
	}
	if err := freshFile(r.tlsFile("ca.pem"), string(ca.PEM())); err != nil {
		return err
	}
	for name, hosts := range map[string][]string{"broker": {"broker-0", "broker-1", "localhost", "127.0.0.1"}, "proxy": {"localhost"}, "stranger": {"stranger.example.com"}} {
		cert, err := ca.Issue(hosts...)
		if err != nil {
			return err
		}
		if _, _, err := tlstest.Write(filepath.Join(r.Dir, "tls"), name, cert); err != nil {
			return err
		}
	}
	return nil
}

func (r *Rig) startStandalone(c *Cluster, bookiePort int) error {
	dir := filepath.Join(r.Dir, c.Name)
	conf := filepath.Join(dir, "standalone.conf")
	if err := freshFile(conf, r.brokerConfig(c, 0)); err != nil {
		return err
	}
	cmd := r.art.javaCommand(standaloneHeap, standaloneDirect, "Standalone",
		"--config", conf, "--wipe-data", "--zookeeper-dir", filepath.Join(dir, "zk"), "--bookkeeper-dir", filepath.Join(dir, "bk"),
		"--zookeeper-port", portOf(c.ZooKeeper), "--bookkeeper-port", strconv.Itoa(bookiePort), "-nfw", "-nss")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PULSAR_STANDALONE_USE_ZOOKEEPER=1")
	return r.spawn("standalone-"+c.Name, func(name string) (*Process, error) { return r.procs.Start(name, cmd) })
}

// StartLone starts a cluster of one broker of another version, with a ZooKeeper and a bookie, and waits until it is healthy. Its broker carries the
// same name as those of the other clusters. Process "lone-NAME" is it; stopping it is the caller's. settings are lines of its configuration.
func (r *Rig) StartLone(ctx context.Context, name, version string, settings ...string) (*Cluster, error) {
	ports, err := r.procs.FreePorts(4)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Name: name, Version: version, ZooKeeper: local(ports[0]), Brokers: []Broker{{Logical: "broker-0:6650", Addr: local(ports[1]), WebURL: "http://" + local(ports[2])}}, bookie: ports[3]}
	lines := append(commonConfig(c),
		"advertisedListeners=internal:pulsar://"+c.Brokers[0].Addr+",external:pulsar://"+c.Brokers[0].Logical,
		"brokerServicePort="+portOf(c.Brokers[0].Addr),
		"webServicePort="+portOf(c.Brokers[0].WebURL),
		"loadBalancerEnabled=false",
	)
	if err := freshFile(r.loneConfig(c), strings.Join(append(append(lines, settings...), ""), "\n")); err != nil {
		return nil, err
	}
	return c, r.RunLone(ctx, c)
}

func (r *Rig) loneConfig(c *Cluster) string { return filepath.Join(r.Dir, c.Name, "standalone.conf") }

// RunLone runs a cluster that StartLone has made, on the data that it has, and waits until it is healthy.
func (r *Rig) RunLone(ctx context.Context, c *Cluster) error {
	classpath, err := r.art.Classpath(ctx, c.Version)
	if err != nil {
		return err
	}
	dir := filepath.Dir(r.loneConfig(c))
	cmd := r.art.javaOn(classpath, loneHeap, loneDirect, "org.apache.pulsar.PulsarStandaloneStarter",
		"--config", r.loneConfig(c), "--zookeeper-dir", filepath.Join(dir, "zk"), "--bookkeeper-dir", filepath.Join(dir, "bk"),
		"--zookeeper-port", portOf(c.ZooKeeper), "--bookkeeper-port", strconv.Itoa(c.bookie), "-nfw", "-nss")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PULSAR_STANDALONE_USE_ZOOKEEPER=1")
	name := "lone-" + c.Name
	if err := r.spawn(name, func(process string) (*Process, error) { return r.procs.Start(process, cmd) }); err != nil {
		return err
	}
	return WaitUntil(ctx, "cluster "+c.Name+" (Pulsar "+c.Version+") to be healthy", func() (bool, error) {
		if p := r.Process(name); !p.Alive() {
			return false, fmt.Errorf("it has ended; its log %s ends with:\n%s", p.Log, p.LogTail(20))
		}
		return httpOK(ctx, c.Brokers[0].WebURL+"/admin/v2/brokers/health"), nil
	})
}

// KillLone ends a cluster that StartLone has started with a signal that it cannot handle. Its data stay.
func (r *Rig) KillLone(c *Cluster) error {
	p := r.Process("lone-" + c.Name)
	r.mu.Lock()
	delete(r.processes, p.Name)
	r.mu.Unlock()
	p.Signal(syscall.SIGKILL)
	return p.WaitEnd(10 * time.Second)
}

// StopLone ends a cluster that StartLone has started; its data are not used again.
func (r *Rig) StopLone(c *Cluster) error {
	return errors.Join(r.KillLone(c), os.RemoveAll(filepath.Dir(r.loneConfig(c))))
}

// Introduce makes clusters known to each other, with a new tenant of theirs and its namespaces: geo, replicated between all of them, and plain.
func (r *Rig) Introduce(ctx context.Context, tenant string, clusters ...*Cluster) error {
	var names []string
	for _, c := range clusters {
		names = append(names, c.Name)
	}
	for _, c := range clusters {
		var errs []error
		call := func(method, path string, body any) { errs = append(errs, c.Admin(ctx, method, path, body, nil)) }
		for _, known := range clusters {
			url, data := "/admin/v2/clusters/"+known.Name, map[string]string{"serviceUrl": known.Brokers[0].WebURL, "brokerServiceUrl": known.URL()}
			if err := c.Admin(ctx, http.MethodPut, url, data, nil); err != nil { // it has an entry of its own, and a kept rig old ones
				call(http.MethodPost, url, data)
			}
		}
		call(http.MethodPut, "/admin/v2/tenants/"+tenant, map[string]any{"adminRoles": []string{}, "allowedClusters": names})
		for name, replicated := range map[string][]string{"geo": names, "plain": {c.Name}} {
			call(http.MethodPut, "/admin/v2/namespaces/"+tenant+"/"+name, map[string]any{
				"replication_clusters": replicated, "retention_policies": map[string]int{"retentionTimeInMinutes": 60, "retentionSizeInMB": 4096},
			})
		}
		if err := errors.Join(errs...); err != nil {
			return fmt.Errorf("introduce %v to cluster %s: %w", names, c.Name, err)
		}
	}
	return nil
}

func (r *Rig) startSecondBroker(c *Cluster) error {
	dir := filepath.Join(r.Dir, c.Name+"-broker-1")
	conf := filepath.Join(dir, "broker.conf")
	store := "metadataStoreUrl=zk:" + c.ZooKeeper + "\nconfigurationMetadataStoreUrl=zk:" + c.ZooKeeper + "\n"
	if err := freshFile(conf, r.brokerConfig(c, 1)+store); err != nil {
		return err
	}
	cmd := r.art.javaCommand(brokerHeap, brokerDirect, "org.apache.pulsar.PulsarBrokerStarter", "--broker-conf", conf)
	cmd.Dir = dir
	return r.spawn("broker-1-"+c.Name, func(name string) (*Process, error) { return r.procs.Start(name, cmd) })
}

func (r *Rig) startOfficialProxy(port, web int) error {
	dir := filepath.Join(r.Dir, "proxy")
	conf := filepath.Join(dir, "proxy.conf")
	if err := freshFile(conf, strings.Join([]string{
		"clusterName=proxy", "bindAddress=127.0.0.1", "advertisedAddress=127.0.0.1",
		"servicePort=" + strconv.Itoa(port), "webServicePort=" + strconv.Itoa(web),
		"brokerServiceURL=pulsar://" + r.A.Brokers[0].Addr, "brokerWebServiceURL=" + r.A.Brokers[0].WebURL,
		"brokerProxyAllowedTargetPorts=*", "authenticateMetricsEndpoint=false", "",
	}, "\n")); err != nil {
		return err
	}
	cmd := r.art.javaCommand(proxyHeap, proxyDirect, "org.apache.pulsar.proxy.server.ProxyServiceStarter", "-c", conf)
	cmd.Dir = dir
	return r.spawn("official-proxy", func(name string) (*Process, error) { return r.procs.Start(name, cmd) })
}

// startMap starts the ZooKeeper of the map without what earlier runs have left: thousands of switches fill its heap.
func (r *Rig) startMap(ctx context.Context) error {
	if err := os.RemoveAll(r.mapDir()); err != nil {
		return err
	}
	return r.StartMapZooKeeper(ctx)
}

func (r *Rig) mapDir() string { return filepath.Join(r.Dir, "map-zookeeper") }

// StartMapZooKeeper starts the ZooKeeper of the map on its old data, if there are any, and waits until it serves.
func (r *Rig) StartMapZooKeeper(ctx context.Context) error {
	dir := r.mapDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	cmd := r.art.javaCommand(cmp.Or(r.mapHeap, zookeeperHeap), zookeeperDirect, "org.apache.zookeeper.server.ZooKeeperServerMain", portOf(r.MapZK), dir, "1000")
	cmd.Dir = dir
	if err := r.spawn("map-zookeeper", func(name string) (*Process, error) { return r.procs.Start(name, cmd) }); err != nil {
		return err
	}
	return r.waitZooKeeper(ctx)
}

// StopMapZooKeeper ends the map's ZooKeeper; its data stay.
func (r *Rig) StopMapZooKeeper() error { return r.Process("map-zookeeper").Stop(10 * time.Second) }

// Process returns a process of the rig by name: standalone-a, broker-1-a (and b), official-proxy, map-zookeeper.
func (r *Rig) Process(name string) *Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.processes[name]
}

func (r *Rig) spawn(name string, start func(name string) (*Process, error)) error {
	p, err := start(name)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.processes[name] = p
	return nil
}

// configure makes the clusters known to each other and creates tenant and namespaces. Each cluster keeps its own
// configuration store, so everything is said to both.
func (r *Rig) configure(ctx context.Context, c *Cluster) error {
	var errs []error
	call := func(method, path string, body any) { errs = append(errs, c.Admin(ctx, method, path, body, nil)) }
	for _, known := range []*Cluster{r.A, r.B} {
		method := http.MethodPut
		if known == c {
			method = http.MethodPost // the standalone has created its own entry
		}
		call(method, "/admin/v2/clusters/"+known.Name, map[string]string{
			"serviceUrl":       "http://" + strings.TrimPrefix(known.Brokers[0].WebURL, "http://"),
			"brokerServiceUrl": known.URL(),
		})
	}
	call(http.MethodPut, "/admin/v2/tenants/acme", map[string]any{"adminRoles": []string{}, "allowedClusters": []string{"a", "b"}})
	namespace := func(name string, clusters ...string) {
		// With retention the tests can read what was consumed: brokers throw full ledgers away otherwise.
		call(http.MethodPut, "/admin/v2/namespaces/acme/"+name, map[string]any{"replication_clusters": clusters, "bundles": map[string]any{
			"numBundles": 8,
		}, "retention_policies": map[string]int{"retentionTimeInMinutes": 60, "retentionSizeInMB": 4096}})
	}
	namespace("plain", c.Name)
	namespace("geo", "a", "b")
	namespace("part4", c.Name)
	call(http.MethodPost, "/admin/v2/namespaces/acme/part4/autoTopicCreation", map[string]any{
		"allowAutoTopicCreation": true, "topicType": "partitioned", "defaultNumPartitions": 4,
	})
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("configure cluster %s: %w", c.Name, err)
	}
	return nil
}

// waitBroker waits for a broker's health check, which writes and reads a message.
func (r *Rig) waitBroker(ctx context.Context, c *Cluster, i int) error {
	name := "standalone-" + c.Name
	if i == 1 {
		name = "broker-1-" + c.Name
	}
	return WaitUntil(ctx, name+" to be healthy", func() (bool, error) {
		if p := r.Process(name); !p.Alive() {
			return false, fmt.Errorf("%s has ended; its log %s ends with:\n%s", name, p.Log, p.LogTail(20))
		}
		if i == 0 {
			if _, err := os.Stat(filepath.Join(r.Dir, c.Name, "READY")); err != nil {
				return false, nil
			}
		}
		return httpOK(ctx, c.Brokers[i].WebURL+"/admin/v2/brokers/health"), nil
	})
}

func (r *Rig) healthy(ctx context.Context, c *Cluster) error {
	for i := range c.Brokers {
		if err := r.waitBroker(ctx, c, i); err != nil {
			return err
		}
	}
	return nil
}

func (r *Rig) waitOfficialProxy(ctx context.Context) error {
	addr := strings.TrimPrefix(r.ProxyURL, "pulsar://")
	return WaitUntil(ctx, "the official proxy on "+addr, func() (bool, error) {
		if p := r.Process("official-proxy"); !p.Alive() {
			return false, fmt.Errorf("it has ended; its log %s ends with:\n%s", p.Log, p.LogTail(20))
		}
		conn, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return false, nil
		}
		return true, conn.Close()
	})
}

func (r *Rig) waitZooKeeper(ctx context.Context) error {
	return WaitUntil(ctx, "the map's ZooKeeper on "+r.MapZK, func() (bool, error) {
		if p := r.Process("map-zookeeper"); p == nil || !p.Alive() {
			return false, errors.New("it has ended; its log is map-zookeeper.log")
		}
		conn, err := net.DialTimeout("tcp", r.MapZK, time.Second)
		if err != nil {
			return false, nil
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		if _, err := io.WriteString(conn, "srvr"); err != nil {
			return false, nil
		}
		answer, err := io.ReadAll(conn)
		return err == nil && strings.Contains(string(answer), "Mode: standalone"), nil
	})
}

// Keep lets the rig live on after this process and returns what to tell the user.
func (r *Rig) Keep() (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := rigState{A: r.A, B: r.B, ProxyURL: r.ProxyURL, MapZK: r.MapZK, Pids: map[string]int{}}
	groups := make([]string, 0, len(r.processes))
	for name, p := range r.processes {
		state.Pids[name] = p.Pid
		groups = append(groups, "-"+strconv.Itoa(p.Pid))
	}
	text, err := json.MarshalIndent(state, "", "  ")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(r.stateFile(), text, 0o644); err != nil {
		return "", err
	}
	for _, p := range r.processes {
		r.procs.Release(p)
	}
	return fmt.Sprintf(`the rig stays up (KEEP=1); the next run uses it again, and ends it unless KEEP=1 is said again
  cluster a       %s   admin %s   zookeeper %s
  cluster b       %s   admin %s   zookeeper %s
  official proxy  %s (in front of a)
  map zookeeper   %s
  logs            %s
  proxies         have ended; again: bin/pointsman serve --config %s
  end it by       kill -9 -- %s; rm %s
`, r.A.URL(), r.A.Brokers[0].WebURL, r.A.ZooKeeper, r.B.URL(), r.B.Brokers[0].WebURL, r.B.ZooKeeper, r.ProxyURL, r.MapZK,
		filepath.Join(r.Dir, "logs"), filepath.Join(r.Dir, "p1", "pointsman.yaml"), strings.Join(groups, " "), r.stateFile()), nil
}

func (r *Rig) stateFile() string { return filepath.Join(r.Dir, "kept.json") }

func httpOK(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := adminClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode == http.StatusOK
}

// freshFile writes a file into a new, empty folder.
func freshFile(path, contents string) error {
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(contents), 0o644)
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

func portOf(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }
