package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra"
	"pgregory.net/rapid"

	"pointsman/core/route"
	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
	"pointsman/internal/config"
	"pointsman/internal/controller"
	"pointsman/internal/golden"
	"pointsman/internal/leaktest"
	"pointsman/store"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// shell runs command lines against two proxies.
type shell struct {
	t       *testing.T
	env     []string
	stdin   string
	net     *admintest.Net
	st      *store.Memory
	p1, p2  *admintest.Proxy
	leader  *controller.Controller // nil: nobody drives planned switches
	listed  map[string][]string    // topics that each cluster has
	servers map[string]*admin.Server
	work    admintest.Work
	served  []string // configurations that serve was called with
}

func newShell(t *testing.T) *shell {
	t.Helper()
	st := store.NewMemory()
	t.Cleanup(func() { st.Close() })
	s := &shell{t: t, listed: map[string][]string{}, servers: map[string]*admin.Server{}, net: &admintest.Net{}, st: st, env: []string{"POINTSMAN_ADMIN=http://p1:7780", "USER=ann"}}
	s.p1, s.p2 = s.proxy("p1"), s.proxy("p2")
	return s
}

func (s *shell) proxy(id string) *admintest.Proxy {
	st := s.st.Join()
	s.t.Cleanup(func() { st.Close() })
	p := admintest.Start(s.t, st, id, "a", "b")
	srv := admin.New(admin.Config{Store: st, Proxy: p, PeerTransport: s.net, Check: p.Check, Failover: &s.work, Plan: admintest.Plan(st, s.listed), Nudge: func() {
		if s.leader != nil {
			s.leader.Nudge()
		}
	}})
	s.t.Cleanup(func() {
		if err := srv.Shutdown(context.Background()); err != nil {
			s.t.Error(err)
		}
	})
	s.net.Add(id+":7780", srv.Handler())
	s.servers[id] = srv
	return p
}

// run executes one command line, given as words separated by blanks.
func (s *shell) run(line string) (code int, stdout, stderr string) {
	s.t.Helper()
	var out, errs bytes.Buffer
	c := &cli{env: s.env, stdin: strings.NewReader(s.stdin), stdout: &out, stderr: &errs, transport: s.net}
	if s.net == nil {
		c.transport = nil
	}
	c.serve = func(_ context.Context, cfg *config.Config, log *slog.Logger) error {
		s.served = append(s.served, cfg.Listeners.Pulsar+" "+cfg.Log.Level)
		log.Info("serving")
		return nil
	}
	code = c.run(s.t.Context(), strings.Fields(line))
	return code, out.String(), errs.String()
}

// transcribe runs a command line, with output behind it, and writes down what an operator sees: what is said on standard error behind "!", and the exit code.
func (s *shell) transcribe(b *strings.Builder, line, output string) {
	s.t.Helper()
	code, out, errs := s.run(strings.TrimSpace(line + " " + output))
	fmt.Fprintf(b, "$ pointsman %s\n%s", normal(line), normal(out))
	for l := range strings.Lines(normal(errs)) {
		fmt.Fprintf(b, "! %s", l)
	}
	fmt.Fprintf(b, "[%d]\n\n", code)
}

// must runs a command line that has to succeed.
func (s *shell) must(line string) string {
	s.t.Helper()
	code, out, errs := s.run(line)
	if code != exitOK {
		s.t.Fatalf("%s: exit code %d\n%s%s", line, code, out, errs)
	}
	return out
}

// settle waits until both proxies serve and announce what the store has.
func (s *shell) settle() {
	s.t.Helper()
	entries, err := s.st.Entries(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	rules, err := s.st.Rules(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, p := range []*admintest.Proxy{s.p1, s.p2} {
		p.Await(s.t, "the store's map", func(tb *route.Table) bool { return tb.Len() == len(entries) && len(tb.Rules()) == len(rules) })
		p.Register(s.t)
	}
}

// What differs from run to run, and what it becomes in a golden file.
var volatile = []struct {
	re   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`sw-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}`), "sw-ID"},
	{regexp.MustCompile(`20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:.]+(Z|[+-][0-9:]+)`), "TIME"},
	{regexp.MustCompile(`at [0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}`), "at TIME"},
	// How often a leader has looked before the acks were there depends on the scheduler.
	{regexp.MustCompile(`[0-9]+(\.[0-9]+)? ms(, [0-9]+ times)?`), "N ms"},
	{regexp.MustCompile(`"(hold_ms|hold_p50_ms|hold_p99_ms|ms)": [0-9.e-]+`), `"$1": N`},
	{regexp.MustCompile(`, [0-9.]+(ms|s) after the producers`), ", N s after the producers"},
	{regexp.MustCompile(`(?m),\n *"times": [0-9]+$`), ""},
	{regexp.MustCompile(`(?m)^(requested|prepared|fenced|evicting)\n`), ""},
	{regexp.MustCompile(`(?m)^(checking|moving|draining|ruling|new)[,:].*\n`), ""}, // progress of a batch
	{regexp.MustCompile(`ann@[^\s",]+`), "ann@HOST"},
}

// newest is the id of the newest switch.
func (s *shell) newest() string {
	s.t.Helper()
	all, err := s.st.Switches(s.t.Context(), 1)
	if err != nil || len(all) == 0 {
		s.t.Fatalf("no switch: %v", err)
	}
	return all[0].ID
}

func normal(text string) string {
	for _, v := range volatile {
		text = v.re.ReplaceAllString(text, v.with)
	}
	// Columns move with the widths of what was replaced.
	return regexp.MustCompile(`(\S) {2,}`).ReplaceAllString(text, "$1  ")
}

const topic1, topic2 = "persistent://acme/orders/t1", "persistent://acme/orders/t2"

// session is a whole day of an operator; its golden files are the documented output of every command.
func session(t *testing.T, output string) (text string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { text = sessionNow(t, output) })
	return text
}

func sessionNow(t *testing.T, output string) string {
	s := newShell(t)
	var b strings.Builder
	run := func(line string) {
		t.Helper()
		s.transcribe(&b, line, output)
	}
	clients := func(p *admintest.Proxy, base string, producers, consumers int) {
		p.Do(func(f *admintest.Fields) {
			f.Clients[base] = admin.HandleCount{Producers: producers, Consumers: consumers}
		})
	}
	run("routes ls")
	run("routes set acme/orders/t1 b --why ticket-1")
	run("routes set acme/orders/t1 b")
	run("routes set * a")
	run("routes set acme b --dry-run")
	s.settle()
	run("routes ls")
	run("routes get " + topic1)
	run("explain acme/orders/t1-partition-2")
	run("clusters ls")
	run("proxies ls")
	clients(s.p2, topic1, 1, 2)
	run("routes rm " + topic1)
	run("routes rm " + topic1 + " --immediate")
	clients(s.p2, topic1, 0, 0)
	s.stdin = "# a comment\nacme/orders/t1, b\nacme/orders/t2 b 7 # at least epoch 7\n"
	run("routes import -")
	run("routes export")
	s.stdin = topic1 + " a\nbroken\n\"open a\n" + topic2 + " b x\n"
	run("routes import -")
	s.stdin = topic1 + "-partition-1 a\n" + topic2 + " z\n"
	run("routes import -")
	run("switch list")
	clients(s.p2, topic1, 3, 4)
	run("switch start --topic " + topic1 + " --to a --mode immediate --dry-run")
	run("switch start --topic " + topic1 + " --to a --mode immediate --why ticket-2")
	run("switch start --topic " + topic1 + " --to a --mode immediate")
	run("switch list")
	run("history --limit 3")

	findings := func(fs ...switching.Finding) {
		s.p1.Do(func(f *admintest.Fields) {
			f.Preflight = func(_ switching.CheckRequest, p *switching.Preflight) error {
				p.Add(fs...)
				p.Subscriptions = []switching.Carried{{Topic: topic1, Subscription: "billing", How: "source position", First: "9:42", Holes: 2, Backlog: 7, Unacked: 3, Repeated: 1}}
				p.SubscriptionCount, p.Forecast.Duplicates = 1, 4
				return nil
			}
		})
	}
	warn := switching.Finding{Item: "policies", Verdict: switching.Warning, Evidence: "message TTL of the namespace (seconds): 60 on cluster a, not set on cluster b", Remedy: "make them equal, or accept what changes for clients"}
	block := switching.Finding{Item: "replication", Verdict: switching.Blocker, Evidence: "cluster a replicates the topic to [a] and not to b", Remedy: "pulsar-admin namespaces set-clusters"}
	findings(warn, block)
	run("switch check --topic " + topic1 + " --to b")
	run("switch start --topic " + topic1 + " --to b --force")
	findings(warn)
	run("switch start --topic " + topic1 + " --to b --dry-run")
	run("switch start --topic " + topic1 + " --to b")
	run("switch start --topic " + topic1 + " --to b --force --no-wait")
	run("switch start --topic " + topic1 + " --to b --force")
	id := s.newest()
	run("switch pause " + id)
	run("switch list --limit 1")
	s.leader, _ = admintest.Lead(t, s.st.Join(), "p1", &admintest.Topic{}, func(c *controller.Config) { c.Fleet = s.servers["p1"] })
	run("switch resume " + id)
	run("switch resume " + id + " --force")
	run("switch status " + id)
	run("switch abort " + id)
	findings()
	run("switch reverse " + id + " --dry-run")
	run("switch reverse " + id + " --why trouble")
	run("switch reverse " + id)
	run("switch start --topic " + topic1 + " --topic " + topic2 + " --to b --mode planned")
	if output == "" {
		run("switch status none")
	}
	return b.String()
}

func TestTheTablesReadAsDocumented(t *testing.T) { golden.File(t, "session.txt", session(t, "")) }

func TestTheJSONIsAsDocumented(t *testing.T) {
	golden.File(t, "session.json.txt", session(t, "--output json"))
}

func TestYAMLSaysTheSameAsJSON(t *testing.T) {
	s := newShell(t)
	s.must("routes set acme b --who x")
	out := s.must("routes ls --output yaml")
	if want := "routes:\n- name: acme\n  kind: tenant\n  cluster: b\n  epoch: 1\n  state: active\ntotal: 1\n"; out != want {
		t.Errorf("yaml:\n%swant:\n%s", out, want)
	}
}

func TestTheHelpOfEveryCommand(t *testing.T) {
	s := &shell{t: t, env: []string{"POINTSMAN_ADMIN=http://elsewhere:1", "POINTSMAN_OUTPUT=json"}}
	var b strings.Builder
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == "completion" {
			return
		}
		path := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "pointsman"), " ")
		fmt.Fprintf(&b, "==== pointsman %s\n%s\n", path, s.must(path+" --help"))
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk((&cli{stdout: io.Discard, stderr: io.Discard}).root())
	golden.File(t, "help.txt", b.String())
}

func TestWrongUsageIsExitCode2AndSaysWhereToLook(t *testing.T) {
	s := newShell(t)
	check := func(line, text string) {
		t.Helper()
		code, out, errs := s.run(line)
		if code != exitUsage || !strings.Contains(errs+out, text) {
			t.Errorf("%s: exit code %d, %s%s; want 2 with %q", line, code, out, errs, text)
		}
	}
	check("rotes ls", "unknown command")
	check("routes sett", `pointsman routes has no command "sett"`)
	check("routes set x", "needs NAME CLUSTER, but has [\"x\"]; see `pointsman routes set --help`")
	check("routes set x b --imediate", "unknown flag: --imediate; see `pointsman routes set --help`")
	check("routes set acme/orders/t1-partition-1 b", "name persistent://acme/orders/t1")
	check("routes ls --output xml", "write table, json or yaml")
	check("routes ls --timeout 0s", "is not positive")
	check("routes ls --admin 127.0.0.1:7780", "write http://host:7780")
	check("routes import /nonexistent", "no such file")
	check("switch start --topic a/b/c --to b --mode teleport", "those that exist are planned")
	check("switch start --prefix eu- --to b", "names no namespace")
	check("switch start --namespace acme/orders --to b --percent 0", "--percent 0 is no share")
	check("switch check --namespace acme/orders --to b --percent NaN", "--percent NaN is no share")
	check("switch start --namespace acme/orders --to b --percent +Inf", "--percent +Inf is no share")
	check("switch start --namespace acme/orders --to b --parallel 0", "--parallel 0 would move nothing; write 1 to 64")
	check("switch start --namespace acme/orders --to b --pace NaN", "is no pace")
	check("switch start --namespace acme/orders --to b --max-failed NaN%", "is no share")
	check("switch abort", "needs ID")
	check("switch start --topics-from - --to b --mode immediate", "names no topic")
	check("serve", "serve needs --config FILE")
	check("check-config", "needs FILE")
	s.env = append(s.env, "POINTSMAN_TIMEOUT=soon")
	check("routes ls", "POINTSMAN_TIMEOUT")
}

func TestAProxyThatCannotBeReachedIsExitCode1AndNamed(t *testing.T) {
	s := &shell{t: t, env: []string{"POINTSMAN_ADMIN=http://127.0.0.1:1"}}
	code, _, errs := s.run("routes ls")
	if code != exitFailed || !strings.Contains(errs, "no answer from the operations port http://127.0.0.1:1: ") || !strings.Contains(errs, "--admin") {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

func TestProxiesThatDisagreeAreExitCode1(t *testing.T) {
	s := newShell(t)
	s.must("routes set acme b")
	s.p1.Await(t, "the rule", func(tb *route.Table) bool { return len(tb.Rules()) == 1 })
	s.p1.Register(t)
	code, out, _ := s.run("proxies ls")
	if code != exitFailed || !strings.Contains(out, "DIFFERENT maps") {
		t.Errorf("exit code %d\n%s", code, out)
	}
}

func TestASwitchThatIsIncompleteIsExitCode1(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newShell(t)
		s.p2.Do(func(f *admintest.Fields) { f.NoAcks = true })
		out := s.must("switch start --topic " + topic1 + " --to b --mode immediate --no-wait --output json")
		id := regexp.MustCompile(`sw-[0-9a-f-]+`).FindString(out)
		code, out, _ := s.run("switch watch " + id)
		if code != exitFailed || !strings.Contains(out, "no report from p2") {
			t.Errorf("exit code %d\n%s", code, out)
		}
	})
}

// Somebody else is faster than a switch: nothing was changed by it, so it counts as refused (SW-16). It may be over before the answer to its start is.
func TestASwitchThatLosesARaceIsExitCode3AndNamesTheWinner(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("answer comes late: %t", late), func(t *testing.T) {
			s := newShell(t)
			var once sync.Once
			s.p1.Do(func(f *admintest.Fields) {
				f.BeforeFlip = func() {
					once.Do(func() { s.must("routes set " + topic1 + " b --who eve --admin http://p2:7780") })
				}
				f.Clusters = append(f.Clusters, admin.ClusterStatus{Name: "c", Health: "up"})
			})
			if late {
				s.answerLate()
			}
			code, out, _ := s.run("switch start --topic " + topic1 + " --to c --mode immediate --force")
			if code != exitRefused || !strings.Contains(out, "changed by eve") {
				t.Errorf("exit code %d\n%s", code, out)
			}
		})
	}
}

// answerLate makes p1 answer the start of a switch when that is over, with what is known then.
func (s *shell) answerLate() {
	early := s.servers["p1"].Handler()
	s.net.Add("early:7780", early)
	s.net.Add("p1:7780", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/api/v1/switches" {
			early.ServeHTTP(w, r)
			return
		}
		started := httptest.NewRecorder()
		early.ServeHTTP(started, r)
		var st admin.SwitchStatus
		client, err := admin.NewClient("http://early:7780", 10*time.Second, s.net)
		if err == nil {
			err = json.Unmarshal(started.Body.Bytes(), &st)
		}
		if err == nil {
			st, err = client.WaitSwitch(r.Context(), st.ID, nil)
		}
		if err == nil {
			err = json.NewEncoder(w).Encode(st)
		}
		if err != nil {
			s.t.Error(err)
		}
	}))
}

func TestServeReadsTheConfigurationAndRefusesFaults(t *testing.T) {
	s := &shell{t: t}
	good := filepath.Join(t.TempDir(), "good.yaml")
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	for path, text := range map[string]string{good: "clusters: { a: { service_url: \"pulsar://h:6650\" } }\n", bad: "clusters: { a: { service_url: \"http://h:6650\" } }\nloops: x\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.env = []string{"POINTSMAN_LOG_LEVEL=debug"}
	_, errs := "", ""
	if code, _, e := s.run("serve --config " + good + " --set listeners.pulsar=127.0.0.1:0"); code != exitOK || len(s.served) != 1 || s.served[0] != "127.0.0.1:0 debug" {
		t.Errorf("serve: exit code %d, served %v, %s", code, s.served, e)
	} else {
		errs = e
	}
	if !strings.Contains(errs, "level=WARN msg=configuration key=default_cluster") || !strings.Contains(errs, "msg=serving") {
		t.Errorf("log = %s", errs)
	}
	code, _, errs := s.run("serve --config " + bad)
	if code != exitFailed || !strings.Contains(errs, "clusters.a.service_url") || !strings.Contains(errs, "loops") || len(s.served) != 1 {
		t.Errorf("serve with faults: exit code %d, %s", code, errs)
	}
	code, out, _ := s.run("check-config " + bad)
	if code != exitFailed || strings.Count(out, "fault: ") != 2 || !strings.Contains(out, "has 2 faults; a proxy would not start") {
		t.Errorf("check-config with faults: exit code %d, %s", code, out)
	}
	out = s.must("check-config " + good)
	for _, want := range []string{"warning: default_cluster: is not set", "is good", "clusters.a.service_url", "POINTSMAN_LOG_LEVEL", "good.yaml:1"} {
		if !strings.Contains(out, want) {
			t.Errorf("check-config does not say %q:\n%s", want, out)
		}
	}
	if out = s.must("check-config " + good + " -o json"); !strings.Contains(out, `"ok": true`) {
		t.Errorf("check-config as JSON: %s", out)
	}
	if out = s.must("check-config --defaults"); !strings.Contains(out, "\nlisteners:\n") {
		t.Errorf("defaults: %s", out)
	}
	if out = s.must("version"); !strings.HasPrefix(out, "pointsman ") {
		t.Errorf("version: %s", out)
	}
}

// Whatever a topic is called (pattern consumers look up regular expressions), its exported line reads back.
func TestExportedLinesReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name, cluster := rapid.StringN(1, 20, -1).Draw(t, "name"), rapid.StringMatching(`[a-z]{1,5}`).Draw(t, "cluster")
		name = strings.ToValidUTF8(name, "x")
		items, err := parseLines(fmt.Sprintf("%s %s 7\n", quoteField(name), quoteField(cluster)))
		if err != nil || len(items) != 1 || items[0].Name != name || items[0].Cluster != cluster || items[0].Epoch != 7 {
			t.Fatalf("%q reads back as %+v, %v", name, items, err)
		}
	})
}

func TestImportFilesMayBeLinesJSONOrYAML(t *testing.T) {
	want := fmt.Sprint([]admin.ImportItem{{Name: "acme", Cluster: "a", Epoch: 3, Line: 1}, {Name: "acme/ns", Cluster: "b", Line: 2}})
	for name, text := range map[string]string{
		"lines.txt": "acme a 3\nacme/ns,b\n",
		"x.json":    `{"routes":[{"name":"acme","cluster":"a","epoch":3},{"name":"acme/ns","cluster":"b"}]}`,
		"-":         ` {"routes":[{"name":"acme","cluster":"a","epoch":3},{"name":"acme/ns","cluster":"b"}]}`,
		"x.yaml":    "routes:\n- {name: acme, cluster: a, epoch: 3}\n- name: acme/ns\n  cluster: b\n",
		"piped":     "routes:\n- {name: acme, cluster: a, epoch: 3}\n- name: acme/ns\n  cluster: b\n",
	} {
		items, err := parseImport(name, []byte(text))
		if err != nil || fmt.Sprint(items) != want {
			t.Errorf("%s: %v, %v", name, items, err)
		}
	}
	if _, err := parseImport("x.json", []byte(`{"route":[]}`)); err == nil {
		t.Error("an unknown key was accepted")
	}
}

func TestTheHistoryNamesTheUserUnlessTold(t *testing.T) {
	c := &cli{env: []string{"USER=bob"}}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if got := c.author(); got != "bob@"+host {
		t.Errorf("author = %q", got)
	}
	if u, err := user.Current(); err == nil {
		if got := (&cli{}).author(); got != u.Username+"@"+host {
			t.Errorf("without USER: %q", got)
		}
	}
	c.who = "release-7"
	if got := c.author(); got != "release-7" {
		t.Errorf("with --who: %q", got)
	}
	if got := stamp(time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("x", 3600))); got != "2026-01-02T02:04:05Z" {
		t.Errorf("stamp = %s", got)
	}
}

func TestTheReferenceListsExactlyTheCommandsThereAre(t *testing.T) {
	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	listed, there := map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `pointsman ([a-z -]*[a-z])").FindAllStringSubmatch(string(text), -1) {
		listed[strings.TrimSuffix(m[1], " --config")] = true
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			if !sub.HasSubCommands() {
				there[strings.TrimPrefix(sub.CommandPath(), "pointsman ")] = true
			}
			walk(sub)
		}
	}
	walk((&cli{stdout: io.Discard, stderr: io.Discard}).root())
	if !reflect.DeepEqual(listed, there) {
		t.Errorf("listed: %v\nthere: %v", listed, there)
	}
}

// Lists come out of all kinds of editors.
func TestAListOfTopicsIsReadAsItWasMeant(t *testing.T) {
	var topics []string
	c := &cli{stdin: strings.NewReader("\ufeffacme/orders/t1\r\n\r\n# a comment\r\n  acme/orders/t2\t# another one\r\n\"acme/orders/with blank\"\nacme/orders/t1")}
	if err := c.topicsFrom("-", &topics); err != nil {
		t.Fatal(err)
	}
	if want := []string{"acme/orders/t1", "acme/orders/t2", "acme/orders/with blank", "acme/orders/t1"}; !slices.Equal(topics, want) {
		t.Errorf("%q, want %q", topics, want)
	}
	s := newShell(t)
	s.stdin = "acme/orders/t1\nacme/orders/t1 b\n\"open\n\x1b[2J \xff " + strings.Repeat("x", 500)
	code, _, errs := s.run("switch start --topics-from - --to b")
	want := `failed: 3 lines of - cannot be read; nothing was changed
  line 2: acme/orders/t1 b: has 2 columns; write one topic
  line 3: "open: has an open quote
  line 4: \x1b[2J \xff ` + strings.Repeat("x", 67) + `…: has 3 columns; write one topic
remedy: mend them and repeat
`
	if code != exitUsage || errs != want {
		t.Errorf("exit code %d\n%swant\n%s", code, errs, want)
	}
	s.stdin = "\ufeffacme b\r\n"
	s.must("routes import -")
	if out := s.must("routes export"); out != "acme b 1\n" {
		t.Errorf("imported: %s", out)
	}
}

// A name that is misspelt must not look like one that has moved already.
func TestAScopeWithoutTopicsIsNotSaidToHaveMoved(t *testing.T) {
	s := newShell(t)
	s.listed["a"] = []string{topic1}
	for _, line := range []string{"--namespace acme/ordres --to b", "--namespace acme/ordres --to a", "--prefix acme/orders/x --to b"} {
		code, _, errs := s.run("switch start " + line)
		if code != exitRefused || !strings.Contains(errs, "there is no topic of it") || !strings.Contains(errs, "is the name right?") || strings.Contains(errs, "already") {
			t.Errorf("%s: exit code %d, %s", line, code, errs)
		}
	}
	code, _, errs := s.run("switch start --prefix acme/orders/t --to a")
	if code != exitRefused || !strings.Contains(errs, "is on a already") {
		t.Errorf("exit code %d, %s", code, errs)
	}
	if code, out, _ := s.run("routes ls acme/ordres"); code != exitOK || !strings.HasPrefix(out, "no routes within acme/ordres; ") {
		t.Errorf("exit code %d, %s", code, out)
	}
}

// Whoever stops watching must not think that the proxy is gone.
func TestStoppingToWatchSaysThatTheSwitchGoesOn(t *testing.T) {
	s := newShell(t)
	s.must("switch start --topic " + topic1 + " --to b --no-wait")
	ctx, stop := context.WithCancel(t.Context())
	stop()
	var errs bytes.Buffer
	c := &cli{env: s.env, stdin: strings.NewReader(""), stdout: io.Discard, stderr: &errs, transport: s.net}
	id := s.newest()
	if code := c.run(ctx, []string{"switch", "watch", id}); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if text := errs.String(); !strings.Contains(text, id+" goes on") || strings.Contains(text, "is a proxy running there") {
		t.Error(text)
	}
}
