package pulsaradmin

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// Patience has a cluster asked again that does not answer a question: an overloaded broker that lets one of a hundred time out is no broker that is gone. A
// preflight is patient; a fence, which publishers wait for, is not, and repeats its steps by itself. It counts what had to be asked again.
type Patience struct {
	mu   sync.Mutex
	late map[string]int // guarded by mu: by cluster, how many questions were answered only when they were asked again
}

const (
	// asks is how often a patient caller puts one question. Each time may take its share of what is left of the deadline, and at least leastWait: a broker that needs
	// longer for a single answer is none to switch with.
	asks      = 3
	leastWait = 5 * time.Second
	// asksApart is between an answer that failed and the next time.
	asksApart = 300 * time.Millisecond
)

type patienceKey struct{}

// Patiently has all questions (GET and HEAD) that are asked with the context it returns put up to three times, within the deadline of ctx.
func Patiently(ctx context.Context) (context.Context, *Patience) {
	p := &Patience{late: map[string]int{}}
	return context.WithValue(ctx, patienceKey{}, p), p
}

// Late is how many questions a cluster has answered only when they were asked again.
func (p *Patience) Late(cluster string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.late[cluster]
}

// patienceOf is the patience that a call has; nil for none.
func patienceOf(ctx context.Context, method string) *Patience {
	if method != http.MethodGet && method != http.MethodHead {
		return nil
	}
	p, _ := ctx.Value(patienceKey{}).(*Patience)
	return p
}

// patientLimit is how long a question may take that is put for the nth time.
func patientLimit(ctx context.Context, n int) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(CallTimeout, max(time.Until(deadline)/time.Duration(asks-n+1), leastWait))
	}
	return CallTimeout
}

// repeat calls ask until it is answered, by a refusal too.
func (p *Patience) repeat(ctx context.Context, c *Client, ask func(n int) (answer, error)) (answer, error) {
	for n := 1; ; n++ {
		a, err := ask(n)
		if err == nil || !Unanswered(err) {
			if n > 1 {
				p.mu.Lock()
				p.late[c.cfg.Cluster]++
				p.mu.Unlock()
			}
			return a, err
		}
		if n < asks {
			pause := time.NewTimer(asksApart)
			select {
			case <-pause.C:
				continue
			case <-ctx.Done():
				pause.Stop()
			}
		}
		var e *Error
		if errors.As(err, &e) {
			e.Asked = n
		}
		return a, err
	}
}

// Unanswered tells whether an error is that of a broker which did not answer, or could not for the moment: asked again, it may.
func Unanswered(err error) bool {
	var e *Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case 0:
	default:
		return false
	}
	var n net.Error
	if errors.As(err, &n) && n.Timeout() { // a deadline is one, too
		return true
	}
	for _, broken := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, broken) {
			return true
		}
	}
	return false
}

// Asked is how often the question was put whose answer err is; 1 for one that was not repeated.
func Asked(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return max(1, e.Asked)
	}
	return 1
}
