// Package pulsaradmin is what a planned switch asks of a Pulsar cluster: facts for the preflight, the ends of its logs, whether
// replication has come so far, eviction, and above all the carrying of subscriptions from one cluster to the other
// (Pair). internal/controller and the preflight call it. It speaks the admin REST API and, where that has no call
// (acknowledging one message, reading many entries), the binary protocol as a minimal consumer.
//
// It must never move a cursor by anything but an absolute position that follows from acknowledged facts: no "end", no skip, no
// clear-backlog, because a late call of a frozen process would jump over messages (protocol rule C8).
//
// All topics are named in full, one partition at a time: persistent://tenant/namespace/topic-partition-3. A Client and what
// it returns may be used by any number of goroutines.
package pulsaradmin

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"pointsman/codec"
	"pointsman/internal/config"
)

// Bounds of every client.
const (
	// CallTimeout is the deadline of one call, all hosts and redirects included.
	CallTimeout = 15 * time.Second
	// Parallel is how many calls one client has under way at once: brokers serve HTTP with few threads.
	Parallel = 16
	// maxAnswer bounds the body of an answer: statistics of a topic with thousands of subscriptions have tens of megabytes.
	maxAnswer = 64 << 20
	// maxReason bounds what of a broker's refusal becomes part of an error.
	maxReason = 300
	// maxRedirects bounds how often a call is sent on to another broker.
	maxRedirects = 10
)

// Config says how one cluster is asked.
type Config struct {
	Cluster string   // its name, for errors
	WebURLs []string // http:// or https:// and host:port; tried in turn
	// TLS is for https:// and, when Binary says so, for the binary protocol; nil is the system's trust.
	TLS *tls.Config
	// Token returns the secret to authenticate with; nil for none. It is asked for each connection, so that a new one is seen.
	Token func() (string, error)
	// Resolve says where an advertised host:port is dialled instead, for both protocols.
	Resolve map[string]string
	// ListenerName is the advertised listener that the binary protocol uses; "" for the default one.
	ListenerName string
	// BinaryTLS has the binary protocol spoken by TLS; ServerName is then what each broker's certificate must be for, "" its host.
	BinaryTLS  bool
	ServerName string
}

// Client asks one cluster.
type Client struct {
	cfg   Config
	http  *http.Client
	slots chan struct{} // one for each call under way
	// messageWait is the constant of that name; tests wait longer.
	messageWait time.Duration

	mu   sync.Mutex
	host int // guarded by mu: index of the web URL that answered last
}

// Open makes the client of a configured cluster. It dials nothing.
func Open(name string, c *config.Cluster) (*Client, error) {
	if c.WebURL == "" {
		return nil, fmt.Errorf("cluster %s has no admin address; set clusters.%s.web_url, such as http://broker:8080", name, name)
	}
	trust, err := c.TLS.Client(name)
	if err != nil {
		return nil, err
	}
	cfg := Config{
		Cluster: name, WebURLs: c.WebURLs(), TLS: trust, Resolve: c.Resolve, ListenerName: c.ListenerName,
		BinaryTLS: c.TLS != nil || strings.HasPrefix(c.ServiceURL, "pulsar+ssl://"),
	}
	if c.TLS != nil {
		cfg.ServerName = c.TLS.ServerName
	}
	if file := c.ControllerTokenFile; file != "" {
		cfg.Token = func() (string, error) {
			text, err := os.ReadFile(file)
			if err != nil {
				return "", fmt.Errorf("clusters.%s.controller_token_file: %w", name, err)
			}
			return strings.TrimSpace(string(text)), nil
		}
	}
	return New(cfg), nil
}

// New makes a client. It dials nothing.
func New(cfg Config) *Client {
	c := &Client{cfg: cfg, slots: make(chan struct{}, Parallel), messageWait: messageWait}
	transport := &http.Transport{
		TLSClientConfig: cfg.TLS.Clone(), MaxIdleConnsPerHost: Parallel, MaxConnsPerHost: Parallel, IdleConnTimeout: time.Minute,
		DisableCompression: true, DialContext: c.dial, MaxResponseHeaderBytes: 1 << 20,
	}
	c.http = &http.Client{Transport: transport, CheckRedirect: c.redirect}
	return c
}

// Cluster is the name of the cluster that is asked.
func (c *Client) Cluster() string { return c.cfg.Cluster }

// Close ends idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

func (c *Client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if to, ok := c.cfg.Resolve[addr]; ok {
		addr = to
	}
	return (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, network, addr)
}

// dialTimeout is short, so that the next host has its turn within CallTimeout.
const dialTimeout = 4 * time.Second

// redirect carries the credentials on to the broker that the cluster names (net/http drops them for another host), but never out
// of TLS.
func (c *Client) redirect(req *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return fmt.Errorf("redirected more than %d times", maxRedirects)
	}
	if via[0].URL.Scheme == "https" && req.URL.Scheme != "https" {
		return fmt.Errorf("redirected from https to %s://%s, where the credentials would be readable", req.URL.Scheme, req.URL.Host)
	}
	if auth := via[0].Header.Get("Authorization"); auth != "" {
		req.Header.Set("Authorization", auth)
	}
	return nil
}

// Error is a call that a cluster did not do.
type Error struct {
	Cluster string
	Call    string            // method and path
	Status  int               // of the answer; 0 when there was none
	Code    codec.ServerError // of an ERROR of the binary protocol
	Reason  string            // the broker's own words, shortened
	Remedy  string
	Err     error // when there was no answer
	Asked   int   // how often, where a patient caller has asked (Patiently)
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cluster %s: %s: ", e.Cluster, e.Call)
	switch {
	case e.Status == 0:
		b.WriteString(e.Err.Error())
	case e.Reason == "":
		fmt.Fprintf(&b, "status %d", e.Status)
	default:
		fmt.Fprintf(&b, "status %d: %s", e.Status, e.Reason)
	}
	if e.Asked > 1 {
		fmt.Fprintf(&b, " (asked %d times)", e.Asked)
	}
	if e.Remedy != "" {
		b.WriteString("; " + e.Remedy)
	}
	return b.String()
}

// Unwrap gives the reason for which there was no answer.
func (e *Error) Unwrap() error { return e.Err }

// Kinds of refusals, for errors.Is.
var (
	ErrNotFound  = errors.New("does not exist")
	ErrForbidden = errors.New("not allowed")
	ErrConflict  = errors.New("exists already")
)

// Is matches the kinds of refusals by status.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrNotFound:
		return e.Status == http.StatusNotFound
	case ErrForbidden:
		return e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden
	case ErrConflict:
		return e.Status == http.StatusConflict
	}
	return false
}

func (c *Client) remedy(status int) string {
	name := c.cfg.Cluster
	switch {
	case status == http.StatusUnauthorized:
		return fmt.Sprintf("give clusters.%s.controller_token_file a token that cluster %s accepts", name, name)
	case status == http.StatusForbidden:
		return fmt.Sprintf("let the role of clusters.%s.controller_token_file administer the tenant, and consume from the namespace", name)
	case status == http.StatusTooManyRequests:
		return "the broker limits its admin calls; try again"
	case status == http.StatusServiceUnavailable || status == http.StatusBadGateway || status == http.StatusGatewayTimeout:
		return "the broker or the balancer in front of it is not ready; try again"
	case status >= 500:
		return fmt.Sprintf("the log of the broker of cluster %s says more", name)
	}
	return ""
}

// answer is a complete answer with a status of 2xx.
type answer struct {
	header http.Header
	body   []byte
}

// call does one admin call and returns its answer; into may be nil, and is left alone by an answer without a body. Every call that
// this package makes may be repeated: it is sent to the next host when one did not answer, and more than once for a patient caller.
func (c *Client) call(ctx context.Context, method, path string, body, into any) (answer, error) {
	var payload []byte
	if body != nil {
		var err error
		if payload, err = json.Marshal(body); err != nil {
			return answer{}, fmt.Errorf("%s %s: %w", method, path, err)
		}
	}
	var a answer
	var err error
	if p := patienceOf(ctx, method); p != nil {
		a, err = p.repeat(ctx, c, func(n int) (answer, error) {
			return c.ask(ctx, method, path, payload, n-1, func() time.Duration { return patientLimit(ctx, n) })
		})
	} else {
		a, err = c.ask(ctx, method, path, payload, 0, func() time.Duration { return CallTimeout })
	}
	if err != nil || into == nil || len(bytes.TrimSpace(a.body)) == 0 {
		return a, err
	}
	if err := json.Unmarshal(a.body, into); err != nil {
		return a, &Error{Cluster: c.cfg.Cluster, Call: method + " " + path, Err: fmt.Errorf("the answer is not what this call answers: %w", err),
			Remedy: fmt.Sprintf("is clusters.%s.web_url the admin address of a Pulsar cluster?", c.cfg.Cluster)}
	}
	return a, nil
}

// ask puts a question to all hosts in turn until one answers, within the limit as it is when its turn has come. It begins with the one that answered last, or skip
// hosts behind that.
func (c *Client) ask(ctx context.Context, method, path string, payload []byte, skip int, limit func() time.Duration) (a answer, err error) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return answer{}, &Error{Cluster: c.cfg.Cluster, Call: method + " " + path, Err: ctx.Err()}
	}
	ctx, cancel := context.WithTimeout(ctx, limit())
	defer cancel()
	first := c.current() + skip
	for i := range c.cfg.WebURLs {
		host := (first + i) % len(c.cfg.WebURLs)
		a, err = c.try(ctx, c.cfg.WebURLs[host], method, path, payload)
		if !anotherHost(err) || ctx.Err() != nil {
			if err == nil {
				c.prefer(host)
			}
			break
		}
	}
	return a, err
}

// anotherHost tells whether a call should be sent to the next host: this one did not answer, or cannot.
func anotherHost(err error) bool {
	var e *Error
	if !errors.As(err, &e) {
		return false
	}
	return e.Status == 0 || e.Status == http.StatusBadGateway || e.Status == http.StatusServiceUnavailable || e.Status == http.StatusGatewayTimeout
}

func (c *Client) try(ctx context.Context, base, method, path string, payload []byte) (a answer, err error) {
	err = c.send(ctx, base, method, path, payload, func(resp *http.Response) error {
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		switch {
		case err != nil:
			return c.failed(method, path, 0, "", fmt.Errorf("%s: the answer broke off: %w", base, err), "try again")
		case len(text) > maxAnswer:
			return c.failed(method, path, 0, "", fmt.Errorf("%s: the answer has more than %d MiB", base, maxAnswer>>20), "look at the topic's subscriptions: are there thousands that nobody uses?")
		}
		a = answer{header: resp.Header, body: text}
		return nil
	})
	return a, err
}

func (c *Client) failed(method, path string, status int, reason string, err error, remedy string) error {
	return &Error{Cluster: c.cfg.Cluster, Call: method + " " + path, Status: status, Reason: reason, Err: err, Remedy: remedy}
}

// send does one call at one host and hands an answer with a status of 2xx to take.
func (c *Client) send(ctx context.Context, base, method, path string, payload []byte, take func(*http.Response) error) error {
	fail := func(status int, reason string, err error, remedy string) error {
		return c.failed(method, path, status, reason, err, remedy)
	}
	var body io.Reader
	if payload != nil {
		body = bytes.NewReader(payload)
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, body)
	if err != nil {
		return fail(0, "", err, "")
	}
	req.Header.Set("Accept", "application/json, */*;q=0.5")
	if payload != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.cfg.Token != nil {
		token, err := c.cfg.Token()
		if err != nil {
			return fail(0, "", err, "make the file readable by this user")
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = fmt.Errorf("%s: %w", base, u.Err) // its URL is in Call already
		}
		return fail(0, "", err, fmt.Sprintf("is clusters.%s.web_url right, and can this host reach it?", c.cfg.Cluster))
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 == 2 {
		return take(resp)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxReasonRead))
	if err != nil {
		return fail(0, "", fmt.Errorf("%s: the answer broke off: %w", base, err), "try again")
	}
	return fail(resp.StatusCode, reason(text), nil, c.remedy(resp.StatusCode))
}

// maxReasonRead bounds what is read of a refusal.
const maxReasonRead = 64 << 10

// reason is what a broker says of a refusal.
func reason(text []byte) string {
	var said struct {
		Reason string `json:"reason"`
	}
	words := string(text)
	if json.Unmarshal(text, &said) == nil && said.Reason != "" {
		words = said.Reason
	}
	words = strings.Join(strings.Fields(strings.ToValidUTF8(words, "?")), " ")
	if len(words) > maxReason {
		words = strings.ToValidUTF8(words[:maxReason], "") + "…"
	}
	return words
}

func (c *Client) current() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.host
}

func (c *Client) prefer(host int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.host = host
}

// each runs do for 0 to n−1 on at most width goroutines and joins the errors.
func each(n, width int, do func(i int) error) error {
	errs := make([]error, n)
	slots := make(chan struct{}, width)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			errs[i] = do(i)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
