package bench

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// rack is the fake brokers (one speaks TLS, started when it is needed) and the targets in front of them, which stay up from round to
// round and from case to case.
type rack struct {
	lab      *Lab
	plain    fakeBroker
	secure   fakeBroker
	ports    int
	live     map[string]*target
	skipped  map[string]string
	progress io.Writer
}

// javaWarmup is how long the official proxy is warmed before it is measured for the first time, for its compilers.
const javaWarmup = 20 * time.Second

// fakeBroker is a running broker.
type fakeBroker struct {
	proc  *process
	addrs []string
}

// newRack starts the broker; targets are started when they are first needed.
func newRack(lab *Lab, connections int, progress io.Writer) (*rack, error) {
	const perPort = 20_000 // connections from one address to one port, with room
	k := &rack{lab: lab, ports: 1 + connections/perPort, live: map[string]*target{}, skipped: map[string]string{}, progress: progress}
	var err error
	k.plain.proc, k.plain.addrs, err = lab.startBroker(k.ports, nil)
	return k, err
}

// start starts a target in front of the broker that speaks as security (Params.TLS) wants.
func (k *rack) start(name, security string) (*target, error) {
	b := k.plain
	if withBrokerTLS(security) {
		if k.secure.proc == nil {
			id, err := k.lab.identity()
			if err != nil {
				return nil, err
			}
			if k.secure.proc, k.secure.addrs, err = k.lab.startBroker(k.ports, id); err != nil {
				return nil, err
			}
		}
		b = k.secure
	}
	t, err := k.lab.startTarget(name, b.addrs, nil, security)
	if err == nil {
		t.broker = b.proc
	}
	return t, err
}

func (k *rack) close() {
	for _, t := range k.live {
		t.stop()
	}
	k.plain.proc.stop()
	k.secure.proc.stop()
}

// round measures each target of r once, and adds the runs to r.
func (k *rack) round(r *Result, round int) error {
	for _, name := range r.names {
		if r.peerRounds > 0 && round >= r.peerRounds && name != "pointsman" {
			continue
		}
		if k.skipped[name] != "" {
			r.Skipped[name] = k.skipped[name]
			continue
		}
		var t *target
		var err error
		if fresh(r.Params.Scenario) {
			t, err = k.start(name, r.Params.TLS)
		} else {
			t, err = k.target(name, r.Params.TLS)
		}
		var no *unavailable
		if errors.As(err, &no) {
			k.skipped[name], r.Skipped[name] = err.Error(), err.Error()
			fmt.Fprintf(k.progress, "######## %s IS SKIPPED: %v\n", name, err)
			continue
		}
		if err != nil {
			return err
		}
		run, err := measure(t, r.Params)
		if err != nil {
			return fmt.Errorf("%s on %s: %w", r.Params.Scenario, name, err)
		}
		if fresh(r.Params.Scenario) {
			t.stop()
		}
		run.Target, run.Round = name, round
		r.Runs = append(r.Runs, run)
		fmt.Fprintf(k.progress, "%s %s\n", r.Params.Label(), run)
	}
	return nil
}

// target returns a target that is up and warm.
func (k *rack) target(name, security string) (*target, error) {
	key := name + " " + security
	if t := k.live[key]; t != nil {
		return t, nil
	}
	t, err := k.start(name, security)
	if err != nil {
		return nil, err
	}
	k.live[key] = t
	if name != "java-proxy" {
		return t, nil
	}
	for _, scenario := range []string{"produce", "consume", "lookup", "churn"} {
		const parts = 4
		p := Params{Scenario: scenario, Warmup: javaWarmup / parts, Duration: 100 * time.Millisecond}.withDefaults()
		if _, err := measure(t, p); err != nil {
			return nil, fmt.Errorf("%s, warming up with %s: %w", name, scenario, err)
		}
	}
	return t, nil
}
