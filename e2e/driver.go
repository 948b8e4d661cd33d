package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
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

// Event is one line of a client driver's output that tells of no message; see clients/README.md.
type Event struct {
	E    string  `json:"e"`
	What string  `json:"what"`
	N    int64   `json:"n"`
	K    int     `json:"k"`
	C    int     `json:"c"`
	T    float64 `json:"t"` // ms since 1970
	Text string  `json:"text"`
}

// Record is what a driver has said so far, in order.
type Record struct {
	Ready   []Event
	Acks    Log
	Recvs   Log
	Errors  []Event // application errors; and lines that are no events
	Stopped bool    // live: producing has ended
	Done    bool    // the driver has ended by itself
	Ended   bool    // its output has ended, however
}

// Of returns the receipts and the received messages of the topic with index k.
func (r Record) Of(k int) (acks, recvs iter.Seq[Message]) {
	its := func(m Message) bool { return m.K == k }
	return r.Acks.Where(its), r.Recvs.Where(its)
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
	d := newDriver(client, stdin)
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

func newDriver(client Client, stdin io.WriteCloser) *Driver {
	d := &Driver{Client: client, stdin: stdin}
	d.changed = sync.NewCond(&d.mu)
	return d
}

// listen collects what the driver says until its output ends, all that has come at once.
func (d *Driver) listen(stdout io.Reader) {
	lines := bufio.NewReaderSize(stdout, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		more, _ := lines.Peek(lines.Buffered())
		used := bytes.LastIndexByte(more, '\n') + 1
		d.mu.Lock()
		if err == nil {
			d.record.add(line)
		}
		for line := range bytes.Lines(more[:used]) {
			d.record.add(line)
		}
		d.record.Ended = err != nil
		d.changed.Broadcast()
		d.mu.Unlock()
		if err != nil {
			return
		}
		_, _ = lines.Discard(used)
	}
}

// add takes a line, and keeps nothing of its bytes.
func (r *Record) add(line []byte) {
	line = bytes.TrimSuffix(line, []byte{'\n'})
	var err error
	switch {
	case bytes.HasPrefix(line, []byte("a\t")):
		err = r.Acks.add(line[2:])
	case bytes.HasPrefix(line, []byte("r\t")):
		err = r.Recvs.add(line[2:])
	default:
		err = r.event(line)
	}
	if err != nil {
		r.Errors = append(r.Errors, Event{E: "error", What: "output", Text: fmt.Sprintf("%v: %q", err, line)})
	}
}

func (r *Record) event(line []byte) error {
	var e Event
	if err := json.Unmarshal(line, &e); err != nil {
		return err
	}
	switch e.E {
	case "ready":
		r.Ready = append(r.Ready, e)
	case "stopped":
		r.Stopped = true
	case "done":
		r.Done = true
	default:
		r.Errors = append(r.Errors, e)
	}
	return nil
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

// Wait waits until the record is as wanted; reached is called after each growth and must be quick. It fails when ctx
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
			d.proc.Name, d.Client, what, why, r.Acks.Len(), r.Recvs.Len(), r.Errors, d.proc.Log)
	}
	return d.record, nil
}

// WaitDone waits until the driver has ended by itself.
func (d *Driver) WaitDone(ctx context.Context) (Record, error) {
	return d.Wait(ctx, "the end", func(r Record) bool { return r.Done && r.Ended })
}
