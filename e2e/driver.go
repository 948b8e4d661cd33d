package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"sync"
	"time"
)

// Client names a client library with a driver.
type Client string

// The clients. Python wraps C++.
const (
	Java   Client = "java"
	Go     Client = "go"
	Python Client = "python"
	Rust   Client = "rust"
)

// Replicates tells whether the client can ask for a subscription whose state is replicated.
func (c Client) Replicates() bool { return c != Rust }

// ReadsOn tells whether the client's reader goes on where it was after its topic was closed. Rust's begins anew at its start position.
func (c Client) ReadsOn() bool { return c != Rust }

// Driver is a running client driver. Its methods may be called from any goroutine.
type Driver struct {
	Client Client
	proc   *Process
	stdin  io.WriteCloser

	mu      sync.Mutex // guards record
	changed *sync.Cond // of mu: record has grown
	record  Record
}

// Record is what a driver has said so far, in order.
type Record struct {
	Ready   []Event
	Acks    []Event
	Recvs   []Event
	Errors  []Event // application errors; and lines that are no events
	Stopped bool    // live: producing has ended
	Done    bool    // the driver has ended by itself
	Ended   bool    // its output has ended, however
}

// Of returns the receipts and the received messages of the topic with index k.
func (r Record) Of(k int) (acks, recvs []Event) {
	pick := func(all []Event) (some []Event) {
		for _, e := range all {
			if e.K == k {
				some = append(some, e)
			}
		}
		return some
	}
	return pick(r.Acks), pick(r.Recvs)
}

// StartDriver runs a driver in the given mode. name is for its log; args are "--flag", "value" pairs.
func StartDriver(art *Artifacts, procs *Processes, client Client, name, mode string, args ...string) (*Driver, error) {
	args = append([]string{mode}, args...)
	var cmd *exec.Cmd
	switch client {
	case Java:
		cmd = art.javaCommand(256, 256, "Driver", args...)
	case Go:
		cmd = exec.Command(art.GoDriver, args...)
	case Rust:
		cmd = exec.Command(art.RustDriver, args...)
	default:
		cmd = exec.Command(art.Python, append([]string{art.PyDriver}, args...)...)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// Not StdoutPipe: Wait, which the process's keeper calls, would close it before everything is read.
	reader, writer := io.Pipe()
	cmd.Stdout = writer
	d := &Driver{Client: client, stdin: stdin}
	d.changed = sync.NewCond(&d.mu)
	if d.proc, err = procs.Start(name, cmd); err != nil {
		return nil, err
	}
	go func() {
		<-d.proc.done
		_ = writer.Close() // after Wait, all output is in the pipe
	}()
	go d.listen(reader)
	return d, nil
}

// listen collects the driver's events until its output ends.
func (d *Driver) listen(stdout io.Reader) {
	lines := bufio.NewReaderSize(stdout, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var e Event
		if json.Unmarshal(line, &e) != nil {
			e = Event{E: "error", What: "output", Text: "not an event: " + string(line)}
		}
		d.mu.Lock()
		d.record.add(e)
		d.changed.Broadcast()
		d.mu.Unlock()
	}
	d.mu.Lock()
	d.record.Ended = true
	d.changed.Broadcast()
	d.mu.Unlock()
}

func (r *Record) add(e Event) {
	switch e.E {
	case "ready":
		r.Ready = append(r.Ready, e)
	case "ack":
		r.Acks = append(r.Acks, e)
	case "recv":
		r.Recvs = append(r.Recvs, e)
	case "stopped":
		r.Stopped = true
	case "done":
		r.Done = true
	default:
		r.Errors = append(r.Errors, e)
	}
}

// Say writes a line to the driver's standard input.
func (d *Driver) Say(line string) error {
	_, err := io.WriteString(d.stdin, line+"\n")
	return err
}

// Record returns what the driver has said so far.
func (d *Driver) Record() Record {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.record
}

// Wait waits until the record is as wanted; reached is called after each event and must be quick. It fails when ctx
// ends or when the driver ends first.
func (d *Driver) Wait(ctx context.Context, what string, reached func(Record) bool) (Record, error) {
	stop := context.AfterFunc(ctx, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.changed.Broadcast()
	})
	defer stop()
	began := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for !reached(d.record) {
		var why string
		switch {
		case ctx.Err() != nil:
			why = fmt.Sprintf("%.1f s have passed", time.Since(began).Seconds())
		case d.record.Ended:
			why = "it has ended"
		default:
			d.changed.Wait()
			continue
		}
		r := d.record
		return r, fmt.Errorf("%s (%s): waiting for %s, but %s: %d receipts, %d received, errors %v; its log: %s",
			d.proc.Name, d.Client, what, why, len(r.Acks), len(r.Recvs), r.Errors, d.proc.Log)
	}
	return d.record, nil
}

// WaitDone waits until the driver has ended by itself.
func (d *Driver) WaitDone(ctx context.Context) (Record, error) {
	return d.Wait(ctx, "the end", func(r Record) bool { return r.Done && r.Ended })
}
