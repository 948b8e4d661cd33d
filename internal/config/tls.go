package config

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// expiresSoon is how long before its end a certificate is worth a warning.
const expiresSoon = 14 * 24 * time.Hour

// FileError is what is wrong with a file of certificates or keys, and what to do.
type FileError struct {
	Key     string // of the configuration
	Path    string
	Problem string
	Remedy  string
}

func (e *FileError) Error() string {
	return fmt.Sprintf("%s %s: %s; %s", e.Key, e.Path, e.Problem, e.Remedy)
}

// Server is the configuration of the TLS listeners. It reads the files.
func (t *TLS) Server(now time.Time) (*tls.Config, error) {
	cert, err := t.certificate(now)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tlsVersions[t.MinVersion]}, nil
}

// Client is the configuration for connections to the brokers of the cluster; the host name is verified always. It reads the file.
// c may be nil.
func (c *ClusterTLS) Client(cluster string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ClientSessionCache: tls.NewLRUClientSessionCache(clientSessions)}
	if c == nil || c.CAFile == "" {
		return config, nil // the system's authorities
	}
	key := "clusters." + cluster + ".tls.ca_file"
	text, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, &FileError{key, c.CAFile, unreadable(err), "name the file with the certificates (PEM) of the authority that signed those of the brokers"}
	}
	config.RootCAs = x509.NewCertPool()
	if !config.RootCAs.AppendCertsFromPEM(text) {
		return nil, &FileError{key, c.CAFile, "holds " + contents(text) + " and no certificate in PEM that can be read", "name the file with the certificates (PEM) of the authority that signed those of the brokers"}
	}
	return config, nil
}

// clientSessions is how many TLS sessions with brokers are remembered per cluster, to be resumed; the brokers' names are their keys.
const clientSessions = 1024

// tlsVersions are the values of tls.min_version.
var tlsVersions = map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}

// certificate reads the pair; Leaf is set.
func (t *TLS) certificate(now time.Time) (tls.Certificate, error) {
	fail := func(key, path, problem, remedy string) (tls.Certificate, error) {
		return tls.Certificate{}, &FileError{"tls." + key, path, problem, remedy}
	}
	certText, err := os.ReadFile(t.CertificateFile)
	if err != nil {
		return fail("certificate_file", t.CertificateFile, unreadable(err), "name the file with the certificate chain (PEM), the server's own first")
	}
	keyText, err := os.ReadFile(t.KeyFile)
	if err != nil {
		return fail("key_file", t.KeyFile, unreadable(err), "name the file with the private key (PEM), readable by this user")
	}
	if kind := contents(certText); !strings.HasPrefix(kind, "CERTIFICATE") {
		return fail("certificate_file", t.CertificateFile, "holds "+kind+" and no certificate", "name the file with the certificate chain (PEM), the server's own first")
	}
	switch kind := contents(keyText); {
	case strings.Contains(kind, "ENCRYPTED") || strings.Contains(string(keyText), "Proc-Type: 4,ENCRYPTED"):
		return fail("key_file", t.KeyFile, "holds a key that is protected by a password, which nobody can type here", "write it out without one: openssl pkey -in KEY -out FILE, readable by this user only")
	case !strings.HasSuffix(kind, "PRIVATE KEY"):
		return fail("key_file", t.KeyFile, "holds "+kind+" and no private key", "name the file with the private key (PEM)")
	}
	cert, err := tls.X509KeyPair(certText, keyText)
	if err != nil {
		if strings.Contains(err.Error(), "does not match") {
			return fail("key_file", t.KeyFile, "is not the key of the certificate in "+t.CertificateFile, "name the two files of the same pair; the server's own certificate must be the first in its file")
		}
		return fail("certificate_file", t.CertificateFile, "cannot be used with "+t.KeyFile+": "+err.Error(), "make the pair anew")
	}
	switch leaf := cert.Leaf; {
	case now.After(leaf.NotAfter):
		return fail("certificate_file", t.CertificateFile, "expired at "+leaf.NotAfter.UTC().Format(time.RFC3339), "renew it: no client accepts it")
	case now.Before(leaf.NotBefore):
		return fail("certificate_file", t.CertificateFile, "is not valid before "+leaf.NotBefore.UTC().Format(time.RFC3339), "wait, or look at this host's clock: no client accepts it yet")
	}
	return cert, nil
}

func unreadable(err error) string {
	if cause := errors.Unwrap(err); cause != nil {
		err = cause
	}
	return "cannot be read: " + err.Error()
}

// contents names what a PEM file begins with.
func contents(text []byte) string {
	block, _ := pem.Decode(text)
	switch {
	case len(strings.TrimSpace(string(text))) == 0:
		return "nothing"
	case block == nil:
		return "no PEM"
	}
	return block.Type
}
