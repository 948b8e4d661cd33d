package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Targets are the names that a comparison takes. direct is no proxy at all: the baseline of latencies.
var Targets = []string{"direct", "pointsman", "haproxy", "haproxy64k", "java-proxy", "go-relay", "go-relay-copy"}

// Lab is where a comparison runs: folders and the child processes that are alive. It must be used by the goroutine that is locked to the
// main thread, because the kernel ends the children when the thread that started them ends.
type Lab struct {
	Root  string // of the checkout: bin/pointsman, e2e/pom.xml
	tmp   string
	id    *identity // nil until TLS is asked for
	live  map[*process]bool
	n     int
	files int // descriptors that each process may open
}

// NewLab makes a folder for configurations and logs, and raises the limit of open files for all children.
func NewLab(root string) (*Lab, error) {
	tmp, err := os.MkdirTemp("", "pointsman-bench-")
	if err != nil {
		return nil, err
	}
	return &Lab{Root: root, tmp: tmp, live: map[*process]bool{}, files: raiseFiles()}, nil
}

// Close ends all children and removes the folder.
func (l *Lab) Close() {
	for p := range l.live {
		p.stop()
	}
	l.Remove()
}

// Remove removes the folder only; any goroutine may call it when the process is about to end.
func (l *Lab) Remove() { _ = os.RemoveAll(l.tmp) }

// folder makes a new one.
func (l *Lab) folder(name string) (string, error) {
	l.n++
	dir := filepath.Join(l.tmp, fmt.Sprintf("%s-%d", name, l.n))
	return dir, os.MkdirAll(dir, 0o755)
}

// process is a child.
type process struct {
	lab *Lab
	cmd *exec.Cmd
	log string
}

// start runs a command in the background; what it says goes to a file.
func (l *Lab) start(name string, cmd *exec.Cmd) (*process, error) {
	dir, err := l.folder("log-" + name)
	if err != nil {
		return nil, err
	}
	p := &process{lab: l, cmd: cmd, log: filepath.Join(dir, "log")}
	f, err := os.Create(p.log)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if cmd.Stdout == nil {
		cmd.Stdout = f
	}
	cmd.Stderr = f
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	l.live[p] = true
	return p, nil
}

// stop ends the child at once: none keeps anything that matters.
func (p *process) stop() {
	if p == nil || !p.lab.live[p] {
		return
	}
	delete(p.lab.live, p)
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// ended tells whether the child has ended by itself: nobody has waited for it yet.
func (p *process) ended() bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid()))
	return err != nil || processState(text) == 'Z'
}

// logTail is the end of what the child said.
func (p *process) logTail() string {
	text, _ := os.ReadFile(p.log)
	return string(text[max(0, len(text)-2000):])
}

// target is something that clients can connect to in order to reach the broker.
type target struct {
	name string
	at   server
	proc *process // nil: no proxy
	ops  string   // of Pointsman: the control API

	broker *process // behind it
}

// unavailable says why a target cannot be measured here; a comparison goes on without it.
type unavailable struct{ what, remedy string }

func (e *unavailable) Error() string { return e.what + ": " + e.remedy }

// startBroker runs a fake broker as a process of its own and returns its addresses. It speaks TLS when it is given an identity.
func (l *Lab) startBroker(ports int, id *identity) (*process, []string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	cmd := exec.Command(self, "broker", fmt.Sprintf("--ports=%d", ports))
	if id != nil {
		cmd.Args = append(cmd.Args, "--certificate="+id.certFile, "--key="+id.keyFile)
	}
	cmd.Stdout = w
	p, err := l.start("broker", cmd)
	w.Close()
	if err != nil {
		return nil, nil, err
	}
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil {
		p.stop()
		return nil, nil, fmt.Errorf("the fake broker said no address: %w\n%s", err, p.logTail())
	}
	return p, strings.Split(strings.TrimSpace(line), ","), nil
}

// sides are the two certificates of a target: nil where it speaks plaintext.
type sides struct{ client, broker *identity }

// startTarget starts the target called name in front of brokers and waits until it answers. more are the brokers of Pointsman's
// second cluster; security is Params.TLS.
func (l *Lab) startTarget(name string, brokers, more []string, security string) (*target, error) {
	t := &target{name: name}
	var cmd *exec.Cmd
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	t.at.AddrPort = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(ports[0]))
	listen := t.at.String()
	var ids sides
	if security != "" {
		id, err := l.identity()
		if err != nil {
			return nil, fmt.Errorf("certificate for %s: %w", name, err)
		}
		if withClientTLS(security) {
			ids.client, t.at.tls = id, newTLSClient(id.ca)
		}
		if withBrokerTLS(security) {
			ids.broker = id
		}
	}
	switch name {
	case "direct":
		t.at.AddrPort, err = netip.ParseAddrPort(brokers[0])
	case "pointsman":
		t.ops = fmt.Sprintf("127.0.0.1:%d", ports[1])
		cmd, err = l.pointsman(listen, t.ops, brokers, more, ids)
	case "haproxy":
		cmd, err = l.haproxy(listen, brokers, "", ids)
	case "haproxy64k":
		cmd, err = l.haproxy(listen, brokers, "  tune.bufsize 65536\n", ids)
	case "java-proxy":
		cmd, err = l.javaProxy(ports[0], ports[1], brokers[0])
	case "go-relay", "go-relay-copy":
		var self string
		self, err = os.Executable()
		cmd = exec.Command(self, "relay", "--listen="+listen, "--to="+strings.Join(brokers, ","), fmt.Sprintf("--copy=%t", name == "go-relay-copy"))
		if id := ids.client; id != nil {
			cmd.Args = append(cmd.Args, "--certificate="+id.certFile, "--key="+id.keyFile)
		}
		if id := ids.broker; id != nil {
			cmd.Args = append(cmd.Args, "--ca="+id.caFile)
		}
	default:
		return nil, fmt.Errorf("target %q: want some of %v", name, Targets)
	}
	if err != nil || cmd == nil {
		return t, err
	}
	if t.proc, err = l.start(name, cmd); err != nil {
		return nil, err
	}
	if err := t.waitReady(); err != nil {
		log := t.proc.logTail()
		t.proc.stop()
		return nil, fmt.Errorf("%s does not get ready: %w\n%s", name, err, log)
	}
	return t, nil
}

// waitReady looks a topic up until it is answered.
func (t *target) waitReady() error {
	const limit, pause = time.Minute, 50 * time.Millisecond
	deadline := time.Now().Add(limit)
	for {
		err := t.probe()
		if err == nil {
			return nil
		}
		if t.proc.ended() || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}

func (t *target) probe() error {
	if t.ops != "" {
		resp, err := http.Get("http://" + t.ops + "/readyz")
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New("/readyz answered " + resp.Status)
		}
	}
	k, err := openLink(t.at, 0, "")
	if err != nil {
		return err
	}
	defer k.close()
	_, err = k.lookup(benchTopic(0))
	return err
}

func (t *target) stop() {
	if t != nil {
		t.proc.stop()
	}
}

func freePorts(n int) (ports []int, err error) {
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer ln.Close() // all at the end, so that they differ
		ports = append(ports, ln.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

func (l *Lab) pointsman(listen, ops string, brokers, more []string, ids sides) (*exec.Cmd, error) {
	binary := filepath.Join(l.Root, "bin", "pointsman")
	if _, err := os.Stat(binary); err != nil {
		return nil, &unavailable{"no " + binary, "run make build"}
	}
	dir, err := l.folder("pointsman")
	if err != nil {
		return nil, err
	}
	scheme, trust := plainScheme, ""
	if ids.broker != nil {
		scheme, trust = secureScheme, fmt.Sprintf(", tls: { ca_file: %q }", ids.broker.caFile)
	}
	clusters := fmt.Sprintf("  a: { service_url: \"%s%s\"%s }\n", scheme, strings.Join(brokers, ","), trust)
	if len(more) > 0 {
		clusters += fmt.Sprintf("  b: { service_url: \"%s%s\"%s }\n", scheme, strings.Join(more, ","), trust)
	}
	file := filepath.Join(dir, "pointsman.yaml")
	listener, extra := fmt.Sprintf("pulsar: %q", listen), ""
	if id := ids.client; id != nil {
		listener = fmt.Sprintf("pulsar: \"\", pulsar_tls: %q", listen)
		extra = fmt.Sprintf("tls: { certificate_file: %q, key_file: %q, min_version: 1.3 }\n", id.certFile, id.keyFile)
	}
	text := fmt.Sprintf("listeners: { %s, ops: %q }\n%sstore: { type: file, path: %q }\ndefault_cluster: a\nclusters:\n%s", listener, ops, extra, filepath.Join(dir, "store"), clusters)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return nil, err
	}
	return exec.Command(binary, "serve", "--config", file), nil
}

func (l *Lab) haproxy(listen string, brokers []string, global string, ids sides) (*exec.Cmd, error) {
	binary, err := exec.LookPath("haproxy")
	if err != nil {
		if binary, err = exec.LookPath("/usr/sbin/haproxy"); err != nil {
			return nil, &unavailable{"no haproxy", "apt-get install -y haproxy"}
		}
	}
	dir, err := l.folder("haproxy")
	if err != nil {
		return nil, err
	}
	if id := ids.client; id != nil {
		listen += fmt.Sprintf(" ssl crt %s ssl-min-ver TLSv1.3 ciphersuites TLS_AES_128_GCM_SHA256 curves X25519", id.chain)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "global\n  maxconn %d\n%sdefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\nlisten bench\n  bind %s\n", (l.files-spareFiles)/2, global, listen)
	for i, broker := range brokers {
		fmt.Fprintf(&b, "  server b%d %s", i, broker)
		if id := ids.broker; id != nil {
			// A handshake for each connection, as the fake broker resumes none.
			fmt.Fprintf(&b, " ssl verify required ca-file %s sni str(%s) verifyhost %[2]s ssl-min-ver TLSv1.3 ciphersuites TLS_AES_128_GCM_SHA256 no-ssl-reuse", id.caFile, certificateName)
		}
		b.WriteString("\n")
	}
	file := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
		return nil, err
	}
	return exec.Command(binary, "-db", "-f", file), nil
}

// spareFiles are descriptors that a proxy needs besides its connections.
const spareFiles = 200

// javaProxy is the official proxy from the jars of the end-to-end tests, which are fetched when they are missing.
func (l *Lab) javaProxy(port, web int, broker string) (*exec.Cmd, error) {
	java, err := exec.LookPath("java")
	if err != nil {
		return nil, &unavailable{"no java", "apt-get install -y openjdk-17-jre-headless"}
	}
	here := filepath.Join(l.Root, "e2e")
	jars := filepath.Join(here, ".cache", "lib")
	if found, _ := filepath.Glob(filepath.Join(jars, "pulsar-proxy-*.jar")); len(found) == 0 {
		const patience = 10 * time.Minute
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		fmt.Fprintln(os.Stderr, "java-proxy: fetching the official proxy's jars")
		if out, err := exec.CommandContext(ctx, "mvn", "-q", "-B", "-f", filepath.Join(here, "pom.xml"), "dependency:copy-dependencies", "-DoutputDirectory="+jars).CombinedOutput(); err != nil {
			return nil, &unavailable{fmt.Sprintf("no jars of the official proxy (%v: %s)", err, strings.TrimSpace(string(out))), "apt-get install -y maven, and a Maven repository that can be reached"}
		}
	}
	dir, err := l.folder("java-proxy")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "proxy.conf")
	if err := os.WriteFile(file, fmt.Appendf(nil, "clusterName=bench\nbindAddress=127.0.0.1\nadvertisedAddress=127.0.0.1\nservicePort=%d\nwebServicePort=%d\n"+
		"brokerServiceURL=pulsar://%s\nbrokerWebServiceURL=http://127.0.0.1:%d\nbrokerProxyAllowedTargetPorts=*\n", port, web, broker, web), 0o644); err != nil {
		return nil, err
	}
	args := []string{
		"-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-Dio.netty.leakDetectionLevel=disabled", "-Dio.netty.tryReflectionSetAccessible=true",
		"-Dlog4j.configurationFile=" + filepath.Join(here, "log4j2.xml"),
	}
	for _, open := range []string{"java.base/java.lang", "java.base/java.nio", "java.base/sun.nio.ch", "java.base/jdk.internal.misc", "java.base/jdk.internal.platform", "java.management/sun.management", "jdk.management/com.sun.management.internal"} {
		args = append(args, "--add-opens", open+"=ALL-UNNAMED")
	}
	args = append(args, "-cp", filepath.Join(jars, "*"), "org.apache.pulsar.proxy.server.ProxyServiceStarter", "-c", file)
	cmd := exec.Command(java, args...)
	cmd.Dir = dir
	return cmd, nil
}
