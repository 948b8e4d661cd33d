package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/admin"
	"pointsman/internal/admin/admintest"
)

// orders is a transport that notes what an operator has read when a switch, its going on or its way back is asked for, and not as a dry run.
type orders struct {
	http.RoundTripper
	stderr *bytes.Buffer
	read   []string
}

func (o *orders) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPost && slices.Contains([]string{"/api/v1/switches", "/api/v1/switches/resume", "/api/v1/switches/reverse"}, r.URL.Path) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		var asked admin.SwitchRequest
		if err := json.Unmarshal(body, &asked); err != nil {
			return nil, err
		}
		if !asked.DryRun {
			o.read = append(o.read, o.stderr.String())
		}
	}
	return o.RoundTripper.RoundTrip(r)
}

// A switch that has begun is no time to learn what it does not promise; and what a program reads is one document, with the same in it.
func TestEachModeSaysWhatItPromisesBeforeAnythingIsAskedFor(t *testing.T) {
	for mode, what := range map[switching.Mode]string{
		switching.ModePlanned: "--topic " + topic1, switching.ModeDrain: "--topic " + topic1, switching.ModeImmediate: "--topic " + topic1, switching.ModeFailover: "--from a",
	} {
		promised, not := switching.Promised(mode), switching.NotPromised(mode)
		if len(promised) < 2 || len(not) == 0 {
			t.Errorf("mode %s promises %q and does not promise %q", mode, promised, not)
		}
		for _, output := range []string{formatTable, formatJSON} {
			t.Run(fmt.Sprintf("%s, %s", mode, output), func(t *testing.T) {
				s := newShell(t)
				for _, p := range []*admintest.Proxy{s.p1, s.p2} {
					p.Health(t, "a", "up")
					if mode == switching.ModeFailover {
						p.Health(t, "a", "down")
					}
					p.Health(t, "b", "up")
				}
				seen := switching.Seen{Cluster: "a"}
				s.work.See(seen.Merge(time.Now(), []switching.SeenTopic{{Topic: topic1}}, "", func(string) bool { return true }))
				s.work.Find(func(string) (switching.FailoverFacts, error) {
					return switching.FailoverFacts{Topics: 1, Measured: time.Now(), Backlog: 1234}, nil
				})
				var out, errs bytes.Buffer
				o := &orders{RoundTripper: s.net, stderr: &errs}
				c := &cli{env: s.env, stdin: strings.NewReader(""), stdout: &out, stderr: &errs, transport: o}
				if code := c.run(t.Context(), strings.Fields(fmt.Sprintf("switch start %s --to b --mode %s --no-wait --output %s", what, mode, output))); code != exitOK {
					t.Fatalf("exit code %d\n%s%s", code, out.String(), errs.String())
				}
				if len(o.read) != 1 {
					t.Fatalf("asked for %d switches, want 1", len(o.read))
				}
				if output == formatJSON {
					var st admin.SwitchStatus
					if err := json.Unmarshal(out.Bytes(), &st); err != nil || fmt.Sprint(st.Promised, st.NotPromised) != fmt.Sprint(promised, not) || errs.Len() != 0 {
						t.Errorf("%v\n%s%s", err, out.String(), errs.String())
					}
					return
				}
				want := []string{fmt.Sprintf("%s mode promises:\n%s%s mode does not promise:\n%s", mode, bullets(promised), mode, bullets(not))}
				if mode == switching.ModeFailover {
					want = append(want, "failover from a to b: 2 of 2 proxies say down", " 1234 ")
				}
				for _, text := range want {
					if !strings.Contains(o.read[0], text) {
						t.Errorf("before the switch is asked for the operator has read\n%swant\n%s", o.read[0], text)
					}
				}
			})
		}
	}
}

// Going on, and the way back, are switches too: the one of the mode that it has, the other of the mode that leads back.
func TestGoingOnAndBackSayWhatTheyPromise(t *testing.T) {
	for mode, back := range map[switching.Mode]switching.Mode{
		switching.ModePlanned: switching.ModePlanned, switching.ModeDrain: switching.ModeDrain, switching.ModeImmediate: switching.ModePlanned,
	} {
		t.Run(string(mode), func(t *testing.T) {
			s := newShell(t)
			var out, errs bytes.Buffer
			o := &orders{RoundTripper: s.net, stderr: &errs}
			c := &cli{env: s.env, stdin: strings.NewReader(""), stdout: &out, stderr: &errs, transport: o}
			start := fmt.Sprintf("switch start --topic %s --to b --mode %s --force", topic1, mode)
			if mode.Driven() {
				start += " --no-wait" // nobody leads
			}
			if code := c.run(t.Context(), strings.Fields(start)); code != exitOK {
				t.Fatalf("exit code %d\n%s%s", code, out.String(), errs.String())
			}
			id := s.newest()
			for command, want := range map[string]switching.Mode{"resume": mode, "reverse": back} {
				errs.Reset()
				o.read = nil
				c.run(t.Context(), []string{"switch", command, id, "--no-wait"}) // which may well be refused: it has been asked for
				text := fmt.Sprintf("%s mode promises:\n%s%s mode does not promise:\n%s", want, bullets(switching.Promised(want)), want, bullets(switching.NotPromised(want)))
				if len(o.read) != 1 || o.read[0] != text {
					t.Errorf("before the switch is asked to %s the operator has read\n%q\nwant\n%s", command, o.read, text)
				}
			}
		})
	}
}
