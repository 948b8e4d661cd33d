package config

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"pointsman/internal/golden"
)

const minimal = "clusters: { a: { service_url: \"pulsar://h:6650\" } }\ndefault_cluster: a\n"

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func load(t *testing.T, text string, env, set []string) (*Config, []Fault, error) {
	t.Helper()
	return Load(writeFile(t, "pointsman.yaml", text), env, set)
}

// faultsOf loads text and returns what is wrong, a line each, without the directory of the file.
func faultsOf(t *testing.T, text string, env, set []string) string {
	t.Helper()
	path := writeFile(t, "pointsman.yaml", text)
	_, _, err := Load(path, env, set)
	if err == nil {
		return ""
	}
	var fs Faults
	if !errors.As(err, &fs) {
		t.Fatalf("error is a %T, want Faults", err)
	}
	return strings.ReplaceAll(err.Error(), path, "pointsman.yaml")
}

// sample is the file of the design: it must load as it stands.
const sample = `
listeners:
  pulsar: 0.0.0.0:6650          # binary protocol
  ops: 127.0.0.1:7780           # control API, metrics, health
advertised_url: pulsar://pulsar.example.com:6650
store: { type: zookeeper, servers: "zk1:2181,zk2:2181/chroot", session_timeout: 12s }
state_dir: /var/lib/pointsman
default_cluster: a
clusters:
  a: { metadata_store: "zk:zka1:2181,zka2:2181/pulsar", web_url: "http://broker-a:8080" }
  b:
    service_url: "pulsar://broker-b1:6650,broker-b2:6650"
    allow: ["broker-*.b:6650-6659", "10.1.2.3:*"]
    resolve: { "broker-0:6650": "10.1.2.3:6650" }
    allow_link_local: true
    listener_name: external
limits: { connections: 20_000, high_watermark: 512KiB, low_watermark: 100KB, lookup_timeout: 5s }
eviction: { rate: 50, receipt_wait: 250ms }
message_ids: native
log: { level: debug, format: json }
loops: 2
`

func TestAFileSetsWhatItNamesAndKeepsTheOtherDefaults(t *testing.T) {
	c, warnings, err := load(t, sample, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.AdvertisedURL = "pulsar://pulsar.example.com:6650"
	want.Store = Store{Type: "zookeeper", Path: "/var/lib/pointsman", Servers: "zk1:2181,zk2:2181/chroot", SessionTimeout: Duration(12 * time.Second)}
	want.StateDir = "/var/lib/pointsman"
	want.DefaultCluster = "a"
	want.Clusters = map[string]*Cluster{
		"a": {MetadataStore: "zk:zka1:2181,zka2:2181/pulsar", WebURL: "http://broker-a:8080"},
		"b": {
			ServiceURL: "pulsar://broker-b1:6650,broker-b2:6650", Allow: []string{"broker-*.b:6650-6659", "10.1.2.3:*"},
			Resolve: map[string]string{"broker-0:6650": "10.1.2.3:6650"}, AllowLinkLocal: true, ListenerName: "external",
		},
	}
	want.Limits.Connections, want.Limits.HighWatermark, want.Limits.LowWatermark = 20_000, 512<<10, 100_000
	want.Limits.LookupTimeout = Duration(5 * time.Second)
	want.Eviction.Rate, want.Eviction.ReceiptWait = 50, Duration(250*time.Millisecond)
	want.MessageIDs = NativeIDs
	want.Log = Log{Level: "debug", Format: "json"}
	want.Loops = 2
	c.origin = nil
	if !reflect.DeepEqual(c, want) {
		t.Errorf("loaded\n%+v\nwant\n%+v", c, want)
	}
	if len(warnings) != 1 || warnings[0].Key != "listeners.ops" || !strings.Contains(warnings[0].String(), "--immediate") {
		t.Errorf("warnings = %v, want one about the operations port on loopback", warnings)
	}
}

func TestFlagsBeatTheEnvironmentWhichBeatsTheFile(t *testing.T) {
	text := minimal + "limits: { connections: 1, lookups_per_cluster: 1, lookups_per_connection: 1 }\n"
	env := []string{"POINTSMAN_LIMITS_LOOKUPS_PER_CLUSTER=2", "POINTSMAN_LIMITS_LOOKUPS_PER_CONNECTION=2", "POINTSMAN_CLUSTERS_A_ALLOW=x:1, y:2", "PATH=/bin", "POINTSMAN_ADMIN=http://x"}
	set := []string{"limits.lookups_per_connection=3", "clusters.a.resolve=b:1=c:2,d:3=e:4", "log.level=warn"}
	c, _, err := load(t, text, env, set)
	if err != nil {
		t.Fatal(err)
	}
	if got := [...]int{c.Limits.Connections, c.Limits.LookupsPerCluster, c.Limits.LookupsPerConnection}; got != [...]int{1, 2, 3} {
		t.Errorf("file, environment, flag = %v, want 1 2 3", got)
	}
	if a := c.Clusters["a"]; !reflect.DeepEqual(a.Allow, []string{"x:1", "y:2"}) || !reflect.DeepEqual(a.Resolve, map[string]string{"b:1": "c:2", "d:3": "e:4"}) {
		t.Errorf("cluster a = %+v", a)
	}
	if c.Log.Level != "warn" {
		t.Errorf("log.level = %q", c.Log.Level)
	}
}

func TestAdminAddressesMayBeSeveral(t *testing.T) {
	for text, want := range map[string][]string{
		"http://h1:8080": {"http://h1:8080"}, "https://h1:8443,h2:8443/": {"https://h1:8443", "https://h2:8443"}, "": nil,
	} {
		c := Cluster{WebURL: text}
		if got := c.WebURLs(); !slices.Equal(got, want) {
			t.Errorf("%q names %q, want %q", text, got, want)
		}
	}
	for _, bad := range []string{"http://h1:8080,", "http://h1:8080,http://h2:8080", "http://u:p@h1:8080", "ftp://h", "http://h1:8080/admin"} {
		if got := faultsOf(t, "clusters: { a: { service_url: \"pulsar://h:6650\", web_url: \""+bad+"\" } }", nil, nil); !strings.Contains(got, "clusters.a.web_url") {
			t.Errorf("%s: faults %q, want one of clusters.a.web_url", bad, got)
		}
	}
}

// A secret is named by its file, and looked at when the file is checked.
func TestAControllerTokenMustBeThere(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{empty: "is empty; write one line with the token into it", empty + "x": "cannot be read"} {
		if got := faultsOf(t, "clusters: { a: { service_url: \"pulsar://h:6650\", web_url: \"http://h:8080\", controller_token_file: "+file+" } }", nil, nil); !strings.Contains(got, want) {
			t.Errorf("faults %q, want %q", got, want)
		}
	}
}

func TestEveryFaultIsReportedAtOnce(t *testing.T) {
	text := `
listeners: { pulsar: "6650", ops: 127.0.0.1:99999, http: 0.0.0.0:8080 }
servicePort: 6650
conections: 5
advertised_url: http://x
store: { type: zookeeper, path: /x, servers: "zk1:2181/a,zk2:2181/a", acl: creator, session_timeout: 5 }
default_cluster: c
clusters:
  a: { metadata_store: "etcd:http://h:2379" }
  b: { service_url: "pulsar+ssl://h:6651,h2:0", web_url: broker, tls: { ca_file: /nonexistent/ca.pem, server_name: "a:b", ca_flie: x } }
  bad name: { service_url: "pulsar://h:6650" }
  d: {}
  e: { service_url: "pulsar://h:6650,h2", metadata_store: "zk:h:2181" }
  f: { service_url: "pulsar://h:6650,h2:x", allow: ["h", "h:1-0", "h:70000"], resolve: { "x": "y:1" }, listener_name: "a:b" }
  g: pulsar://h:6650
limits:
  connections: many
  connections: 7
  high_watermark: 1048576
  low_watermark: 2MiB
  dial_timeout: 1h
  lookup_timeout: -1s
loops: &x 1
eviction: [1]
log: { level: loud, format: xml }
shutdown: { timeout: 30, drain_delays: 1s }
tag_key_file: /nonexistent/key
`
	env := []string{"POINTSMAN_LIMITS_CONNECTION=5", "POINTSMAN_EVICTION_RATE=fast", "POINTSMAN_PORT_6650_TCP_ADDR=10.0.0.1", "POINTSMAN_OPS_SERVICE_HOST=10.0.0.1", "POINTSMAN_SERVICE_PORT_PULSAR=6650"}
	set := []string{"limits.frames=1MiB", "loops", "clusters.z.service_url=pulsar://h:1"}
	golden.File(t, "faults.txt", faultsOf(t, text, env, set)+"\n")
}

func TestSingleFaultsNameKeyValueAndRemedy(t *testing.T) {
	check := func(text, want string) {
		t.Helper()
		if got := faultsOf(t, text, nil, nil); got != want {
			t.Errorf("%s\n got %s\nwant %s", text, got, want)
		}
	}
	check("", `clusters: no cluster is configured; add clusters: { a: { service_url: "pulsar://broker:6650" } }`)
	check(minimal+"limits: { conections: 5 }", `pointsman.yaml:3: limits.conections: is not a known key; did you mean limits.connections?`)
	check(minimal+"connections: 5", `pointsman.yaml:3: connections: is not a known key; did you mean limits.connections?`)
	check(minimal+"keepAliveIntervalSeconds: 5", `pointsman.yaml:3: keepAliveIntervalSeconds: is not a known key; this key of the official proxy is limits.keep_alive_interval here`)
	check(minimal+"limits: { frame: 5242880 }", `pointsman.yaml:3: limits.frame: "5242880": is not a size with a unit; write one such as 32MiB (B, KiB, MiB, GiB)`)
	check(minimal+"limits: { dial_timeout: 10 }", `pointsman.yaml:3: limits.dial_timeout: "10": is not a duration with a unit; write one such as 10s (ms, s, m, h)`)
	check(minimal+"limits: { frame: 99999999999GiB }", `pointsman.yaml:3: limits.frame: "99999999999GiB": is not a size with a unit; write one such as 32MiB (B, KiB, MiB, GiB)`)
	check(minimal+"store: { servers: \"zk:1\" }", `pointsman.yaml:3: store.servers: "zk:1": is not for store.type file; remove it`)
	check(minimal+"---\nloops: 1", `pointsman.yaml:4: a second YAML document; keep one; nothing after --- is read`)
	check(minimal+"listeners: { ops: \"0.0.0.0:6650\" }", `pointsman.yaml:3: listeners.ops: "0.0.0.0:6650": is the same address as listeners.pulsar; give it a port of its own, such as 127.0.0.1:7780`)
	check("default_cluster: b\nclusters: { a: { service_url: \"pulsar://h:6650\" } }", `pointsman.yaml:1: default_cluster: "b": is not among the clusters; did you mean a? or add it under clusters`)
	if got := faultsOf(t, "a: [", nil, nil); !strings.HasPrefix(got, "pointsman.yaml: is not YAML: ") {
		t.Errorf("broken YAML: %s", got)
	}
	if _, _, err := Load(filepath.Join(t.TempDir(), "none.yaml"), nil, nil); err == nil || !strings.Contains(err.Error(), "--config") {
		t.Errorf("missing file: %v", err)
	}
}

// No fault may show what a secret file holds (AU-11).
func TestSecretFilesAreCheckedAndNeverShown(t *testing.T) {
	secret := writeFile(t, "zk", "hunter2hunter2hunter2\n")
	got := faultsOf(t, minimal+"state_dir: /x\nstore: { type: zookeeper, servers: \"zk:2181\", credentials_file: "+secret+" }", nil, nil)
	if !strings.Contains(got, "does not hold scheme:credentials") || strings.Contains(got, "hunter2") {
		t.Errorf("credentials: %s", got)
	}
	short := writeFile(t, "key", "hunter2\n")
	got = faultsOf(t, minimal+"tag_key_file: "+short, nil, nil)
	if !strings.Contains(got, "key 1 has 7 bytes, at least 16 are needed") || strings.Contains(got, "hunter2") {
		t.Errorf("tag key: %s", got)
	}
	good := writeFile(t, "good", strings.Repeat("n", 32)+"\n"+strings.Repeat("o", 16)+"\n")
	keys, err := ReadTagKeys(good)
	if err != nil || len(keys) != 2 || len(keys[0]) != 32 || len(keys[1]) != 16 {
		t.Errorf("ReadTagKeys = %d keys, %v", len(keys), err)
	}
}

func TestAdvertisedAddressesAreDerivedFromTheListener(t *testing.T) {
	c := Default()
	if got := c.OpsURL("127.0.0.1:7780"); got != "http://127.0.0.1:7780" {
		t.Errorf("OpsURL = %s", got)
	}
	if got := c.PulsarURL("[::]:6650", false); got != "pulsar://"+hostname()+":6650" {
		t.Errorf("PulsarURL = %s", got)
	}
	if got := c.ID("0.0.0.0:6651"); got != hostname()+"-6651" {
		t.Errorf("ID = %s", got)
	}
	c.AdvertisedURL, c.AdvertisedOpsURL, c.ProxyID = "pulsar://p:1", "http://p:2/", "p1"
	if got := []string{c.PulsarURL("x:1", true), c.OpsURL("x:1"), c.ID("x:1")}; !reflect.DeepEqual(got, []string{"pulsar://p:1", "http://p:2", "p1"}) {
		t.Errorf("configured ones are not used: %v", got)
	}
}

func TestTheDefaultsAreAFileThatLoadsToTheDefaults(t *testing.T) {
	var b strings.Builder
	WriteDefaults(&b)
	golden.File(t, "defaults.yaml", b.String())
	c, _, err := load(t, strings.Replace(b.String(), "clusters: {}", "clusters: { a: { service_url: \"pulsar://h:6650\" } }", 1), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.origin, c.Clusters = nil, map[string]*Cluster{}
	if !reflect.DeepEqual(c, Default()) {
		t.Errorf("the printed defaults load to %+v", c)
	}
}

func TestEveryKeyHasADocAndAnEnvironmentNameOfItsOwn(t *testing.T) {
	seen := map[string]string{}
	for _, k := range Reference() {
		if k.Doc == "" {
			t.Errorf("%s has no doc", k.Key)
		}
		name := EnvName(k.Key)
		if other := seen[name]; other != "" {
			t.Errorf("%s and %s share %s", other, k.Key, name)
		}
		if kubernetesVariable.MatchString(name) {
			t.Errorf("%s would be taken for a variable of Kubernetes", name)
		}
		seen[name] = k.Key
	}
}

func TestDurationsAndSizesReadWhatTheyPrint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Size(rapid.Int64Range(0, maxSize).Draw(t, "size"))
		if back, err := parseSize(s.String()); err != nil || back != s {
			t.Fatalf("%d → %s → %d, %v", s, s, back, err)
		}
		d := Duration(rapid.Int64Range(0, int64(100*time.Hour)).Draw(t, "duration"))
		if back, err := time.ParseDuration(d.String()); err != nil || back != d.Std() {
			t.Fatalf("%d → %s → %d, %v", d, d, back, err)
		}
	})
	for d, want := range map[time.Duration]string{5 * time.Minute: "5m", time.Hour: "1h", 90 * time.Second: "1m30s", 500 * time.Millisecond: "500ms", 0: "0s", 100 * time.Second: "1m40s"} {
		if got := Duration(d).String(); got != want {
			t.Errorf("%d prints as %s, want %s", d, got, want)
		}
	}
}

// Hostile files end in faults, never in a panic.
func FuzzLoad(f *testing.F) {
	f.Add(sample)
	f.Add("clusters: 1\nlimits: [a: b]\n? [x]\n: y")
	f.Add("clusters: { a: }\n")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		path := filepath.Join(dir, "f.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, _, err := Load(path, nil, nil)
		if (c == nil) == (err == nil) {
			t.Fatalf("config %v, error %v: exactly one must be there", c, err)
		}
	})
}

// The reference in docs/configuration.md is written from the struct, so neither can have a key that the other lacks.
func TestTheReferenceListsExactlyTheKeysThereAre(t *testing.T) {
	cell := strings.NewReplacer("|", `\|`, "\n", " ")
	var keys, theirs strings.Builder
	keys.WriteString("| key | type | default | meaning |\n|---|---|---|---|\n")
	for _, k := range Reference() {
		keys.WriteString("| `" + k.Key + "` | " + k.Type + " | `" + k.Default + "` | " + cell.Replace(k.Doc) + " |\n")
	}
	theirs.WriteString("| official proxy | here |\n|---|---|\n")
	for _, key := range slices.Sorted(maps.Keys(official)) {
		theirs.WriteString("| `" + key + "` | " + official[key] + " |\n")
	}
	golden.Sections(t, "../../docs/configuration.md", map[string]string{"keys": keys.String(), "official": theirs.String()})
}

// Every key that the translation table points to must exist.
func TestTheOfficialProxysKeysAreTranslatedToKeysThatExist(t *testing.T) {
	for theirs, ours := range official {
		key, _, _ := strings.Cut(ours, " ")
		if !slices.ContainsFunc(Reference(), func(k Key) bool { return k.Key == key }) {
			t.Errorf("%s is translated to %s, which does not exist", theirs, key)
		}
	}
}

func TestASessionTooShortForALeaseIsRefused(t *testing.T) {
	text := minimal + "state_dir: /x\nstore: { type: zookeeper, servers: \"zk:2181\", session_timeout: "
	if got := faultsOf(t, text+"9999ms }", nil, nil); !strings.Contains(got, "store.session_timeout") || strings.Count(got, "\n") > 0 {
		t.Errorf("9.999 s: %q, want one fault, of store.session_timeout", got)
	}
	if got := faultsOf(t, text+"10s }", nil, nil); got != "" {
		t.Errorf("10 s: %s", got)
	}
}

func TestAMapAgeThatOneLostServerReachesIsRefused(t *testing.T) {
	text := minimal + "state_dir: /x\nstore: { type: zookeeper, servers: \"zk:2181\", session_timeout: 20s, max_map_age: "
	for age, want := range map[string]string{
		"0s": "", "60s": "", "7h": "",
		"29s":  "store.max_map_age: \"29s\": is not between 30s and 168h",
		"59s":  "store.max_map_age: \"59s\": is less than 3 times store.session_timeout (20s)",
		"169h": "store.max_map_age: \"169h\": is not between 30s and 168h",
	} {
		if got := faultsOf(t, text+age+" }", nil, nil); want == "" && got != "" || !strings.Contains(got, want) || strings.Count(got, "\n") > 0 {
			t.Errorf("%s: %q, want %q", age, got, want)
		}
	}
	if got := faultsOf(t, minimal+"store: { type: file, path: /x, max_map_age: 60s }", nil, nil); !strings.Contains(got, "store.max_map_age: \"1m\": is not for store.type file") {
		t.Errorf("a store of one node: %q", got)
	}
}
