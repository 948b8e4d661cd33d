package config

import (
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pointsman/internal/tlstest"
)

// What an operator may get wrong with certificates, and what is said: the key, the file, the problem and the remedy, never a key's text.
func TestFaultsOfCertificateFilesAreExplained(t *testing.T) {
	ca, err := tlstest.NewCA("config test")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	pair := func(name string, cert tls.Certificate, err error) (certFile, keyFile string) {
		if err == nil {
			certFile, keyFile, err = tlstest.Write(dir, name, cert)
		}
		if err != nil {
			t.Fatal(err)
		}
		return certFile, keyFile
	}
	const day = 24 * time.Hour
	issue := func(name string, begin, end time.Duration) (string, string) {
		cert, err := ca.IssueBetween(time.Now().Add(begin), time.Now().Add(end), "pulsar.example.com")
		return pair(name, cert, err)
	}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, key := issue("good", -day, 30*day)
	_, otherKey := issue("other", -day, 30*day)
	old, oldKey := issue("old", -2*day, -day)
	early, earlyKey := issue("early", day, 30*day)
	soon, soonKey := issue("soon", -day, 2*day)
	caFile := write("ca.pem", string(ca.PEM()))
	locked := write("locked.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
	noise, empty := write("noise.pem", "hello"), write("empty.pem", "\n")
	listener := func(cert, key string) string {
		return minimal + fmt.Sprintf("listeners: { pulsar_tls: 0.0.0.0:6651 }\ntls: { certificate_file: %s, key_file: %s }\n", cert, key)
	}
	cluster := func(service, tls string) string {
		return fmt.Sprintf("default_cluster: a\nclusters: { a: { service_url: %q, tls: %s } }\n", service, tls)
	}
	for _, c := range []struct {
		name, text string
		want       []string // in the one fault; none: it loads
	}{
		{"good", listener(cert, key), nil},
		{"no files", minimal + "listeners: { pulsar_tls: 0.0.0.0:6651 }", []string{"listeners.pulsar_tls", "needs a certificate", "tls.key_file"}},
		{"missing", listener(filepath.Join(dir, "none"), key), []string{"tls.certificate_file", "none", "no such file"}},
		{"no PEM", listener(noise, key), []string{"tls.certificate_file", "holds no PEM"}},
		{"empty", listener(empty, key), []string{"tls.certificate_file", "holds nothing"}},
		{"exchanged", listener(key, cert), []string{"tls.certificate_file", "holds PRIVATE KEY and no certificate"}},
		{"no key", listener(cert, caFile), []string{"tls.key_file", "holds CERTIFICATE and no private key"}},
		{"locked", listener(cert, locked), []string{"tls.key_file", "password", "openssl pkey"}},
		{"not a pair", listener(cert, otherKey), []string{"tls.key_file", "is not the key of the certificate in " + cert}},
		{"expired", listener(old, oldKey), []string{"tls.certificate_file", "expired at 20", "renew it"}},
		{"too early", listener(early, earlyKey), []string{"tls.certificate_file", "is not valid before 20", "clock"}},
		{"no listener", minimal + `listeners: { pulsar: "" }`, []string{"listeners.pulsar", "so is listeners.pulsar_tls"}},
		{"TLS alone", strings.Replace(listener(cert, key), "{ pulsar_tls", `{ pulsar: "", pulsar_tls`, 1), nil},
		{"authority", cluster("pulsar+ssl://h:6651,h2", "{ ca_file: "+caFile+", server_name: broker.example.com }"), nil},
		{"system authorities", cluster("pulsar+ssl://h", "{}"), nil},
		{"authority without PEM", cluster("pulsar+ssl://h", "{ ca_file: "+noise+" }"), []string{"clusters.a.tls.ca_file", "holds no PEM and no certificate"}},
		{"key as authority", cluster("pulsar+ssl://h", "{ ca_file: "+key+" }"), []string{"clusters.a.tls.ca_file", "holds PRIVATE KEY"}},
		{"plaintext URL with TLS", cluster("pulsar://h", "{}"), []string{"clusters.a.service_url", "is for plaintext", "pulsar+ssl://"}},
	} {
		got := faultsOf(t, c.text, nil, nil)
		if len(c.want) == 0 && got != "" || len(c.want) > 0 && strings.Count(got, "\n") != 0 {
			t.Errorf("%s: faults %q", c.name, got)
		}
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q does not mention %q", c.name, got, want)
			}
		}
	}
	got := faultsOf(t, minimal+"listeners: { pulsar_tls: \"0.0.0.0:6650\" }\ntls: { certificate_file: "+cert+", key_file: "+key+", min_version: 1.1 }", nil, nil)
	for _, want := range []string{`tls.min_version: "1.1": is not one of 1.2, 1.3`, "listeners.pulsar_tls: \"0.0.0.0:6650\": is the same address as listeners.pulsar"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not mention %q", got, want)
		}
	}

	for text, want := range map[string]string{
		listener(soon, soonKey): "expires at",
		listener(cert, key) + "advertised_url: pulsar+ssl://other.example.com:6651\n":  "is not for the host of advertised_url (other.example.com)",
		minimal + "tls: { certificate_file: " + cert + ", key_file: " + key + " }\n":   "is not used",
		listener(cert, key) + "advertised_url: pulsar+ssl://pulsar.example.com:6651\n": "",
	} {
		_, warnings, err := load(t, text, nil, nil)
		if err != nil || (want == "") != (len(warnings) == 0) || !strings.Contains(fmt.Sprint(warnings), want) {
			t.Errorf("warnings %v, error %v; want %q", warnings, err, want)
		}
	}
}

func TestTheTLSOfAClusterCanBeSetFromOutside(t *testing.T) {
	text := "default_cluster: a.b\nclusters: { a.b: { metadata_store: \"zk:h:2181\" }, a: { service_url: \"pulsar+ssl://h\" } }\n"
	c, _, err := load(t, text, []string{"POINTSMAN_CLUSTERS_A_B_TLS_SERVER_NAME=broker.example.com"}, []string{"clusters.a.tls.server_name=x"})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Clusters["a.b"].TLS; got == nil || got.ServerName != "broker.example.com" {
		t.Errorf("cluster a.b has TLS %+v", got)
	}
	if got := c.Clusters["a"].TLS; got == nil || got.ServerName != "x" {
		t.Errorf("cluster a has TLS %+v", got)
	}
	found := false
	for _, v := range c.Values() {
		found = found || v.Key == "clusters.a.b.tls.server_name" && v.Value == "broker.example.com" && v.From == "POINTSMAN_CLUSTERS_A_B_TLS_SERVER_NAME"
	}
	if !found {
		t.Errorf("the value and its origin are not listed: %v", c.Values())
	}
	if got := faultsOf(t, text, nil, []string{"clusters.a.tls.name=x"}); !strings.Contains(got, "is not a key that can be set") {
		t.Errorf("an unknown key: %q", got)
	}
}
