package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"pointsman/core/switching"
)

// maxAnswer bounds what a client reads.
const maxAnswer = 256 << 20

// ErrNoAnswer is wrapped by what a Client returns when nobody, or something else, answers at its address.
var ErrNoAnswer = errors.New("no answer")

// Client talks to the control API of one proxy: the command line uses it, and the proxies among themselves.
// Errors are *Error when the proxy answered. Its methods may be called from any goroutine.
type Client struct {
	base string
	http *http.Client
}

// NewClient makes a client for the operations port at base (http://host:port). Each request ends after timeout. A nil
// transport is one of its own.
func NewClient(base string, timeout time.Duration, transport http.RoundTripper) (*Client, error) {
	if transport == nil {
		transport = newTransport()
	}
	base = strings.TrimSuffix(base, "/")
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, fmt.Errorf("admin address %q is not a URL; write http://host:7780", base)
	}
	return &Client{base: base, http: &http.Client{
		Transport: transport, Timeout: timeout,
		// The API never redirects: who does is something else, and must not be handed a command.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// RouteQuery selects routes. The zero value is the first page of everything.
type RouteQuery struct {
	Within  string // tenant or tenant/namespace
	Cluster string
	After   string // last name of the page before
	Limit   int
	Floors  bool // also what only keeps an epoch
}

// Routes lists entries and rules.
func (c *Client) Routes(ctx context.Context, q RouteQuery) (RouteList, error) {
	v := url.Values{}
	for key, value := range map[string]string{"within": q.Within, "cluster": q.Cluster, "after": q.After} {
		if value != "" {
			v.Set(key, value)
		}
	}
	if q.Limit > 0 {
		v.Set("limit", strconv.Itoa(q.Limit))
	}
	if q.Floors {
		v.Set("floors", "1")
	}
	return get[RouteList](ctx, c, "/api/v1/routes", v)
}

// AllRoutes lists everything, floors included, page by page.
func (c *Client) AllRoutes(ctx context.Context) ([]Route, error) {
	var all []Route
	q := RouteQuery{Limit: maxPage, Floors: true}
	for {
		page, err := c.Routes(ctx, q)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Routes...)
		if len(page.Routes) < q.Limit {
			return all, nil
		}
		q.After = page.Routes[len(page.Routes)-1].Name
	}
}

// Route reads one entry or rule.
func (c *Client) Route(ctx context.Context, name string) (Route, error) {
	return get[Route](ctx, c, "/api/v1/routes/get", url.Values{"name": {name}})
}

// Set maps a topic or scope.
func (c *Client) Set(ctx context.Context, r SetRequest) (ChangeResult, error) {
	return post[ChangeResult](ctx, c, "/api/v1/routes/set", r)
}

// Remove removes an entry or rule.
func (c *Client) Remove(ctx context.Context, r RemoveRequest) (ChangeResult, error) {
	return post[ChangeResult](ctx, c, "/api/v1/routes/rm", r)
}

// Import sets many.
func (c *Client) Import(ctx context.Context, r ImportRequest) (ChangeResult, error) {
	return post[ChangeResult](ctx, c, "/api/v1/routes/import", r)
}

// Explain tells what happens to a topic's clients, and why.
func (c *Client) Explain(ctx context.Context, topic string) (Explanation, error) {
	return get[Explanation](ctx, c, "/api/v1/explain", url.Values{"topic": {topic}})
}

// Clusters lists the clusters that the proxy is configured with.
func (c *Client) Clusters(ctx context.Context) (ClusterList, error) {
	return get[ClusterList](ctx, c, "/api/v1/clusters", nil)
}

// Proxies lists all proxies.
func (c *Client) Proxies(ctx context.Context) (ProxyList, error) {
	return get[ProxyList](ctx, c, "/api/v1/proxies", nil)
}

// Forget takes a proxy that will not come back off the roster, and lists the others.
func (c *Client) Forget(ctx context.Context, r ForgetRequest) (ProxyList, error) {
	return post[ProxyList](ctx, c, "/api/v1/proxies/forget", r)
}

// History lists the newest writes.
func (c *Client) History(ctx context.Context, limit int) (HistoryList, error) {
	return get[HistoryList](ctx, c, "/api/v1/history", url.Values{"limit": {strconv.Itoa(limit)}})
}

// StartSwitch starts a move.
func (c *Client) StartSwitch(ctx context.Context, r SwitchRequest) (SwitchStatus, error) {
	return post[SwitchStatus](ctx, c, "/api/v1/switches", r)
}

// AbortSwitch asks for the end of planned switches that have not flipped yet.
func (c *Client) AbortSwitch(ctx context.Context, r SwitchCommand) (SwitchStatus, error) {
	return post[SwitchStatus](ctx, c, "/api/v1/switches/abort", r)
}

// PauseSwitch keeps planned switches from beginning.
func (c *Client) PauseSwitch(ctx context.Context, r SwitchCommand) (SwitchStatus, error) {
	return post[SwitchStatus](ctx, c, "/api/v1/switches/pause", r)
}

// ResumeSwitch lets paused ones begin, and aborted ones begin anew.
func (c *Client) ResumeSwitch(ctx context.Context, r SwitchCommand) (SwitchStatus, error) {
	return post[SwitchStatus](ctx, c, "/api/v1/switches/resume", r)
}

// ReverseSwitch starts planned switches back.
func (c *Client) ReverseSwitch(ctx context.Context, r SwitchCommand) (SwitchStatus, error) {
	return post[SwitchStatus](ctx, c, "/api/v1/switches/reverse", r)
}

// Switch reads one switch, or the command that moves several.
func (c *Client) Switch(ctx context.Context, id string) (SwitchStatus, error) {
	return get[SwitchStatus](ctx, c, "/api/v1/switches/"+url.PathEscape(id), nil)
}

// Switches lists the newest switches.
func (c *Client) Switches(ctx context.Context, limit int) (SwitchList, error) {
	return get[SwitchList](ctx, c, "/api/v1/switches", url.Values{"limit": {strconv.Itoa(limit)}})
}

// WaitSwitch asks until the switch has ended, and hands each answer that differs in progress to seen (may be nil).
func (c *Client) WaitSwitch(ctx context.Context, id string, seen func(SwitchStatus)) (SwitchStatus, error) {
	return c.wait(ctx, id, seen, func(st SwitchStatus) bool { return !st.Running() })
}

// WaitMoved is WaitSwitch, but does not wait for what drains.
func (c *Client) WaitMoved(ctx context.Context, id string, seen func(SwitchStatus)) (SwitchStatus, error) {
	return c.wait(ctx, id, seen, func(st SwitchStatus) bool { return !st.Running() || st.Drains() })
}

func (c *Client) wait(ctx context.Context, id string, seen func(SwitchStatus), enough func(SwitchStatus) bool) (SwitchStatus, error) {
	const often, rarely = 50 * time.Millisecond, time.Second
	var last SwitchStatus
	for pause := often; ; pause = min(2*pause, rarely) {
		st, err := c.Switch(ctx, id)
		switch {
		case err != nil && ctx.Err() != nil:
			return st, stoppedWatching(ctx, id)
		case err != nil && last.ID != "" && errors.Is(err, ErrNoAnswer):
			return st, fmt.Errorf("%s goes on, but this proxy does not tell of it any more: ask another one: %w", id, err)
		case err != nil:
			return st, err
		}
		if seen != nil && progress(st) != progress(last) {
			seen(st)
		}
		// A batch that has paused waits for somebody, who may be the one that waits here.
		if last = st; enough(st) || st.Batch != nil && st.Batch.Pause != nil {
			return st, nil
		}
		select {
		case <-ctx.Done():
			return st, stoppedWatching(ctx, id)
		case <-time.After(pause):
		}
	}
}

// stoppedWatching is why a wait has ended before what was waited for.
func stoppedWatching(ctx context.Context, id string) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("the watching was stopped, and %s goes on: `pointsman switch watch %s` again, or end it with `pointsman switch abort %s`: %w", id, id, id, ctx.Err())
	}
	return fmt.Errorf("%s is still running after the time allowed; look again with `pointsman switch status %s`: %w", id, id, ctx.Err())
}

// Salvage lists what the old cluster of a switch holds that the new one never got: limit messages behind after, the Next of an answer before; "" for the first ones.
func (c *Client) Salvage(ctx context.Context, id string, limit int, after string) (switching.Salvage, error) {
	q := url.Values{"limit": {strconv.Itoa(limit)}}
	if after != "" {
		q.Set("after", after)
	}
	return get[switching.Salvage](ctx, c, "/api/v1/switches/"+url.PathEscape(id)+"/salvage", q)
}

// Running tells whether the switch has not ended yet.
func (st SwitchStatus) Running() bool {
	return st.State == stateRunning || st.State == statePaused || st.State == stateDraining
}

// Drains tells that the producers have moved, and that nothing but subscriptions that drain is left.
func (st SwitchStatus) Drains() bool { return st.State == stateDraining }

// progress differs when there is something new to tell of a switch.
func progress(st SwitchStatus) string {
	text := fmt.Sprintf("%s %d %d", st.State, st.Flipped, st.Ended)
	if b := st.Batch; b != nil {
		return fmt.Sprintf("%s %s %d %d %d %s", text, b.Shown(), b.Wave, b.Count.Checked, b.Count.Draining, b.Note)
	}
	if len(st.Switches) == 1 {
		text += string(st.Switches[0].State)
		if d := st.Switches[0].Draining; d != nil {
			text += fmt.Sprintf(" %d %d %d", d.Subscriptions, d.Backlog, d.ToCopy)
		}
	}
	return text
}

// Done tells whether it ended well.
func (st SwitchStatus) Done() bool { return st.State == stateDone }

// Handles counts the open producers and consumers of topics and scopes at this proxy.
func (c *Client) Handles(ctx context.Context, names []string) (Handles, error) {
	return post[Handles](ctx, c, "/api/v1/handles", HandlesQuery{Names: names})
}

// Ready asks whether the proxy wants clients.
func (c *Client) Ready(ctx context.Context) (Readiness, error) {
	return get[Readiness](ctx, c, "/readyz", nil)
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (T, error) {
	if len(q) > 0 {
		path += "?" + q.Encode()
	}
	return call[T](ctx, c, http.MethodGet, path, nil)
}

func post[T any](ctx context.Context, c *Client, path string, body any) (T, error) {
	text, err := json.Marshal(body)
	if err != nil {
		var none T
		return none, fmt.Errorf("%s: %w", path, err)
	}
	return call[T](ctx, c, http.MethodPost, path, text)
}

func call[T any](ctx context.Context, c *Client, method, path string, body []byte) (T, error) {
	var v T
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return v, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(r)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // the address is named below
		}
		return v, fmt.Errorf("%w from the operations port %s: %w", ErrNoAnswer, c.base, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return v, fmt.Errorf("the answer from %s broke off: %w", c.base, err)
	}
	var failure struct {
		Error *Error `json:"error"`
	}
	if resp.StatusCode != http.StatusOK && json.Unmarshal(text, &failure) == nil && failure.Error != nil {
		return v, failure.Error
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return v, fmt.Errorf("%w from pointsman at %s: what answers there (%s) is not its operations port", ErrNoAnswer, c.base, resp.Status)
	}
	return v, nil
}
