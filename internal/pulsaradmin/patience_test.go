package pulsaradmin

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// trip answers without a network, so that time may be faked.
type trip func(r *http.Request) (*http.Response, error)

func (f trip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func status(n int, body string) (*http.Response, error) {
	return &http.Response{StatusCode: n, Body: io.NopCloser(strings.NewReader(body))}, nil
}

// silent is a broker that takes a question and never answers.
func silent(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// turns has each question answered by the next one, and the last one answer all that follow.
func turns(asked *int, all ...trip) trip {
	return func(r *http.Request) (*http.Response, error) {
		*asked++
		return all[min(*asked, len(all))-1](r)
	}
}

func answering(n int, body string) trip {
	return func(*http.Request) (*http.Response, error) { return status(n, body) }
}

func broken(err error) trip {
	return func(*http.Request) (*http.Response, error) { return nil, err }
}

func patientClient(answers trip, hosts ...string) *Client {
	c := New(Config{Cluster: "a", WebURLs: append([]string{"http://one"}, hosts...)})
	c.http.Transport = answers
	return c
}

func TestAPatientCallerAsksThreeTimes(t *testing.T) {
	const partitions = `{"partitions":3}`
	for name, first := range map[string]trip{
		"overloaded": answering(http.StatusServiceUnavailable, ""), "limited": answering(http.StatusTooManyRequests, ""), "silent": silent,
		"refused": broken(syscall.ECONNREFUSED), "cut off": broken(io.EOF),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked := 0
				c := patientClient(turns(&asked, first, first, answering(200, partitions)))
				ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second)
				defer cancel()
				patient, p := Patiently(ctx)
				if n, err := c.Partitions(patient, someTopic); err != nil || n != 3 || asked != 3 || p.Late("a") != 1 || p.Late("b") != 0 {
					t.Errorf("%d partitions, %v; asked %d times, %d answered late; want 3 by the third try", n, err, asked, p.Late("a"))
				}
				asked = 0
				if _, err := c.Partitions(ctx, someTopic); err == nil || asked != 1 || !Unanswered(err) || Asked(err) != 1 {
					t.Errorf("error %v after %d tries of a caller that is not patient, want one", err, asked)
				}
			})
		})
	}
}

// A preflight ends in time, and its evidence says how often it has asked.
func TestABrokerThatNeverAnswersIsGivenUpWithinTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		c := patientClient(turns(&asked, silent))
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second)
		defer cancel()
		ctx, p := Patiently(ctx)
		_, err := c.Partitions(ctx, someTopic)
		if took := time.Since(began); asked != 3 || took > 25*time.Second || took < 20*time.Second {
			t.Errorf("asked %d times in %v, want 3 that share the 25s", asked, took)
		}
		if !Unanswered(err) || Asked(err) != 3 || p.Late("a") != 0 || !strings.Contains(err.Error(), "http://one: context deadline exceeded (asked 3 times); is clusters.a.web_url right") {
			t.Errorf("error %v", err)
		}
		// Where little time is left, one whole answer is waited for, rather than the third part of one three times.
		asked, began = 0, time.Now()
		ctx, cancel = context.WithTimeout(t.Context(), 6*time.Second)
		defer cancel()
		ctx, _ = Patiently(ctx)
		if _, err = c.Partitions(ctx, someTopic); asked != 2 || Asked(err) != 2 || time.Since(began) != 6*time.Second {
			t.Errorf("asked %d times in %v (%v), want 2 in 6s, the first for %v", asked, time.Since(began), err, leastWait)
		}
	})
}

// What a broker has answered is not asked again, nor is anything that changes something.
func TestAnAnswerIsNotAskedForAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, _ := Patiently(t.Context())
		for _, n := range []int{401, 403, 404, 409, 500} {
			asked := 0
			if _, err := patientClient(turns(&asked, answering(n, ""))).Partitions(ctx, someTopic); err == nil || asked != 1 || Unanswered(err) {
				t.Errorf("status %d: error %v after %d tries, want one", n, err, asked)
			}
		}
		asked := 0
		if err := patientClient(turns(&asked, answering(503, ""))).Evict(ctx, someTopic); err == nil || asked != 1 {
			t.Errorf("unload: error %v after %d tries, want one: the caller repeats it", err, asked)
		}
		asked = 0
		if _, err := patientClient(turns(&asked, broken(errors.New("x509: unknown authority")))).Partitions(ctx, someTopic); err == nil || asked != 1 {
			t.Errorf("a certificate: error %v after %d tries, want one: the next one is as bad", err, asked)
		}
	})
}

// A host that takes questions and does not answer has its turn only once, when there is another one.
func TestTheNextHostIsAskedWhenOneIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hosts []string
		c := patientClient(func(r *http.Request) (*http.Response, error) {
			if hosts = append(hosts, r.URL.Host); r.URL.Host == "one" {
				return silent(r)
			}
			return status(200, `{"partitions":3}`)
		}, "http://two")
		ctx, cancel := context.WithTimeout(t.Context(), 25*time.Second)
		defer cancel()
		ctx, _ = Patiently(ctx)
		for range 2 {
			if n, err := c.Partitions(ctx, someTopic); err != nil || n != 3 {
				t.Fatalf("%d partitions, %v", n, err)
			}
		}
		if got := strings.Join(hosts, " "); got != "one two two" {
			t.Errorf("asked %s, want one two two", got)
		}
	})
}
