package session

import (
	"encoding/binary"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
	"pointsman/core/route"
	"pointsman/core/switching"
)

var rewrite = flag.Bool("rewrite", false, "write what the scenarios do now into their files")

// TestScenarios plays the conversations of testdata. A line at the margin is an event, the indented lines below it are
// everything that the shard does about it. Each scenario is played twice: once with whole frames, once with every byte
// handed over alone, which must come to the same bytes on every connection.
//
//	client c1                     a client connects
//	c1> lookup_topic{...} +100    it sends a command, with 100 bytes behind it; several on one line with " ; "
//	c1>part 20 send{...} +100     only the first 20 bytes of it; "c1>rest" sends the others
//	c1>hex 00 ff                  it sends raw bytes
//	d1 up | d1 closed eof         the first dial succeeds; the connection ends
//	d1> connected{...}            the broker sends
//	c1 closed reset
//	tick 30s
//	map TOPIC CLUSTER | rule SCOPE CLUSTER    the map changes (no eviction yet)
//	evict TOPIC [FULL=BROKER ...] | review [FULL=BROKER ...]    as the watcher of the map would ask; the brokers are
//	                              those of the cluster that the map names now; dead=CLUSTER: that is left for dead
//	state TOPIC prepared|fenced|active        the map says so of the topic, which stays on its cluster
//	draining TOPIC FROM TO LEDGER:ENTRY[,...] SUBSCRIPTION ... [>SUBSCRIPTION ...]    the map says so of the topic: FROM is left with that tail, and the
//	                              subscriptions still read it; > marks one that is leaving
//	prepare TOPIC | fence TOPIC | unfence TOPIC [FULL=BROKER ...]    as the watcher of the map would tell
//	lease on|off                  the process has a lease, or not
//	parked                        prints what waits and what was held
//	translated ID copy|next LEDGER:ENTRY | translated ID failed|busy|unknown|gone WHY    the answer to a translation
//	carry TOPIC SUBSCRIPTION CLUSTER [before|forget] LEDGER:ENTRY ...    acknowledgements that another loop got
//	amnesia                       nobody knows which cluster had a topic before
//	carried                       prints what is remembered of acknowledgements
//	handles TOPIC                 prints the live handles
//	remembers c1                  prints how many answers and evicted handles it remembers
//	ask lookup CLUSTER TOPIC      a question of the proxy's own
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			whole := play(t, newPlayer(t, false), string(raw))
			if *rewrite {
				if err := os.WriteFile(file, []byte(whole.transcript.String()), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got := whole.transcript.String(); got != string(raw) {
				t.Errorf("%s plays differently now (-rewrite writes it down; review the diff):\n%s", file, diffLines(string(raw), got))
			}
			cut := play(t, newPlayer(t, true), string(raw))
			for name, want := range whole.sent {
				if got := cut.sent[name]; string(got) != string(want) {
					t.Errorf("%s got other bytes when frames were cut at every byte:\n%q\nwhole:\n%q", name, got, want)
				}
			}
			unusual := newPlayer(t, false)
			unusual.unusual = true
			if got := play(t, unusual, string(raw)).transcript.String(); got != string(raw) {
				t.Errorf("%s plays differently when lookups have an unusual form, for the general decoder:\n%s", file, diffLines(string(raw), got))
			}
		})
	}
}

// player is a shard with a script in front and a transcript behind.
type player struct {
	past       map[pastEpoch]string // clusters of topics, by epoch
	sh         *Shard
	now        time.Time
	table      *route.Table
	cut        bool
	unusual    bool // lookups and their responses come in a form that only the general decoder takes
	transcript strings.Builder
	names      map[Conn]string
	endpoints  map[string]Endpoint
	conns      map[string]Conn
	rest       map[string][]byte // not consumed yet
	later      map[string][]byte // the rest of what "part" began
	held       map[string]bool
	partial    map[string][]byte // written, not a whole frame yet
	sent       map[string][]byte // everything written
	clients    int
	dials      int
	noLease    bool
	tooOld     bool
	lastConn   Conn
	onFrame    func(to string, frame []byte) // instead of a line in the transcript
}

var scenarioStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newPlayer(t testing.TB, cut bool) *player {
	p := &player{past: map[pastEpoch]string{}, now: scenarioStart, table: route.Empty(), cut: cut, names: map[Conn]string{}, endpoints: map[string]Endpoint{},
		conns: map[string]Conn{}, rest: map[string][]byte{}, held: map[string]bool{}, later: map[string][]byte{}, partial: map[string][]byte{}, sent: map[string][]byte{}}
	set := testSet(t)
	cfg := testConfig()
	cfg.Table = func() *route.Table { return p.table }
	cfg.Clusters = func() *cluster.Set { return set }
	cfg.ClusterAt = func(base string, epoch uint64) string { return p.past[pastEpoch{base, epoch}] }
	cfg.Lease = func() bool { return !p.noLease }
	cfg.TooOld = func() bool { return p.tooOld }
	p.sh = NewShard(cfg, 0, 1)
	return p
}

type pastEpoch struct {
	base  string
	epoch uint64
}

func parsePosition(text string) (p Position, err error) {
	_, err = fmt.Sscanf(text, "%d:%d", &p.Ledger, &p.Entry)
	return p, err
}

func testConfig() *Config {
	return &Config{
		ServerVersion: "Pointsman-test", DefaultCluster: "a", ClusterNames: []string{"a", "b"},
		MaxFrame: codec.DefaultMaxFrame, MaxControl: 1 << 20, ConnectTimeout: 10 * time.Second, HandshakeTimeout: 15 * time.Second, LookupTimeout: 20 * time.Second,
		KeepAlive: 30 * time.Second, LookupsPerConnection: 3, LookupsPerCluster: 5, MaxHandles: 100,
		ParkTime: 10 * time.Second, MaxParked: 6,
		ReceiptWait: 500 * time.Millisecond, EvictRate: 100, EvictBurst: 4,
	}
}

// testSet has two clusters whose only brokers carry the same name (LK-01).
func testSet(t testing.TB) *cluster.Set {
	keys, err := cluster.NewTagKeys([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := cluster.NewSet([]cluster.Config{
		{Name: "a", ServiceURLs: []string{"pulsar://broker-0:6650"}, Resolve: map[string]string{"broker-0:6650": "10.0.0.1:6650", "broker-1:6650": "10.0.0.2:6650"}},
		{Name: "b", ServiceURLs: []string{"pulsar://broker-0:6650"}, Resolve: map[string]string{"broker-0:6650": "10.0.1.1:6650"}},
		{Name: "s", ServiceURLs: []string{"pulsar+ssl://Broker-0.:6651"}, Resolve: map[string]string{"broker-0:6651": "10.0.2.1:6651", "broker-1:6651": "10.0.2.2:6651"}},
	}, keys)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func play(t *testing.T, p *player, script string) *player {
	for n, line := range strings.Split(strings.TrimSuffix(script, "\n"), "\n") {
		if strings.HasPrefix(line, "  ") {
			continue
		}
		p.transcript.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := p.step(line); err != nil {
			t.Fatalf("line %d: %q: %v", n+1, line, err)
		}
	}
	for name, bytes := range p.partial {
		if len(bytes) > 0 {
			p.note("%s is left with %d bytes of an unfinished frame", name, len(bytes))
		}
	}
	return p
}

func (p *player) note(format string, args ...any) {
	fmt.Fprintf(&p.transcript, "  "+format+"\n", args...)
}

func (p *player) step(line string) error {
	if name, what, ok := strings.Cut(line, "> "); ok && !strings.Contains(name, " ") {
		bytes, err := p.frames(what)
		if err != nil {
			return err
		}
		return p.deliver(name, bytes)
	}
	if name, what, ok := strings.Cut(line, ">part "); ok {
		size, frames, _ := strings.Cut(what, " ")
		n, err := strconv.Atoi(size)
		if err != nil {
			return err
		}
		bytes, err := p.frames(frames)
		if err != nil {
			return err
		}
		p.later[name] = bytes[n:]
		return p.deliver(name, bytes[:n])
	}
	if name, ok := strings.CutSuffix(line, ">rest"); ok {
		return p.deliver(name, p.later[name])
	}
	if name, what, ok := strings.Cut(line, ">hex "); ok && !strings.Contains(name, " ") {
		var bytes []byte
		for _, f := range strings.Fields(what) {
			b, err := strconv.ParseUint(f, 16, 8)
			if err != nil {
				return err
			}
			bytes = append(bytes, byte(b))
		}
		return p.deliver(name, bytes)
	}
	words := strings.Fields(line)
	switch words[0] {
	case "client":
		p.clients++
		p.lastConn++
		peer := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(40000+p.clients))
		p.open(words[1], p.lastConn, p.sh.Accept(p.now, p.lastConn, 0, peer, netip.AddrPort{}))
	case "tick":
		d, err := time.ParseDuration(words[1])
		if err != nil {
			return err
		}
		p.now = p.now.Add(d)
		p.sh.Tick(p.now)
	case "map":
		return p.change(func() (*route.Table, error) {
			topic, err := route.ParseTopic(words[1])
			if err != nil {
				return nil, err
			}
			before, ok := p.table.Entry(topic.Base())
			var old *route.Entry
			if ok {
				old = &before
			}
			d := p.table.Decide(topic, "a")
			p.past[pastEpoch{topic.Base(), d.Epoch}] = d.Cluster
			e := route.Move(topic, old, p.table.Decide(topic, "a"), words[2], "")
			return p.table.WithEntry(topic.Base(), &e)
		})
	case "rule":
		return p.change(func() (*route.Table, error) {
			r, err := route.SetRule(p.table, words[1], words[2], "", "a")
			if err != nil {
				return nil, err
			}
			return p.table.WithRule(words[1], &r)
		})
	case "state":
		return p.change(func() (*route.Table, error) {
			topic, err := route.ParseTopic(words[1])
			if err != nil {
				return nil, err
			}
			d := p.table.Decide(topic, "a")
			e := route.Entry{Topic: topic.Base(), Cluster: d.Cluster, Epoch: d.Epoch, SwitchID: "s1", Attempt: 1, Drain: d.Drain, State: map[string]route.State{
				"prepared": route.StatePrepared, "fenced": route.StateFenced, "active": route.StateActive}[words[2]]}
			if e.State == route.StateActive {
				e.Drain = ""
			}
			return p.table.WithEntry(topic.Base(), &e)
		})
	case "draining":
		return p.change(func() (*route.Table, error) { return p.draining(words[1], words[2], words[3], words[4], words[5:]) })
	case "prepare":
		p.sh.Prepare(p.now, words[1])
	case "fence":
		p.sh.Fence(p.now, words[1], switching.Key{Switch: "s1", Attempt: 1}, func(f Fenced) {
			p.note("fenced producers=%d consumers=%d clean=%v claims=%v %s", f.Producers, f.Consumers, f.Clean, f.Claims, f.Why)
		})
	case "unfence":
		p.sh.Unfence(p.now, words[1], p.assigned(words[2:]), p.evicted)
	case "lease":
		p.noLease = words[1] == "off"
	case "too": // "too old", and "too fresh": what the clock says; the shard is told by "age"
		p.tooOld = words[1] == "old"
	case "age":
		p.tooOld = words[1] == "on"
		p.sh.Age(p.now, p.tooOld)
	case "parked":
		c := p.sh.counters
		p.note("parked=%d held=%d bytes, dropped sends=%d messages=%d, fenced topics=%d", c.Parked.Load(), c.HeldBytes.Load(), c.DroppedSends.Load(), c.DroppedMessages.Load(), c.FencedTopics.Load())
	case "evict":
		p.sh.Evict(p.now, words[1], p.assigned(words[2:]), p.evicted)
	case "review":
		p.sh.Review(p.now, p.assigned(words[1:]), p.evicted)
	case "drain":
		p.sh.Drain(p.now, 1000)
	case "handles":
		n := p.sh.HandlesOf(words[1])
		if n.Leaving > 0 {
			p.note("producers=%d consumers=%d, %d of them on the cluster that is left", n.Producers, n.Consumers, n.Leaving)
		} else {
			p.note("producers=%d consumers=%d", n.Producers, n.Consumers)
		}
	case "remembers":
		s := p.endpoints[words[1]].(*Session)
		p.note("pending=%d evicted=%d", len(s.pending), s.evicted)
	case "translated":
		id, err := strconv.ParseUint(words[1], 10, 64)
		if err != nil {
			return err
		}
		a := Translated{Kind: map[string]TranslatedKind{"copy": TranslatedCopy, "next": TranslatedNext, "failed": TranslatedFailed, "busy": TranslatedBusy, "unknown": TranslatedUnknown, "gone": TranslatedGone}[words[2]]}
		if a.Kind >= TranslatedFailed {
			a.Text = strings.Join(words[3:], " ")
		} else if a.At, err = parsePosition(words[3]); err != nil {
			return err
		}
		p.sh.Translated(p.now, id, a)
	case "carry":
		a := OldAcks{Topic: words[1], Subscription: words[2], Cluster: words[3]}
		for _, w := range words[4:] {
			if w == "before" || w == "forget" {
				a.Before, a.Forget = w == "before", w == "forget"
				continue
			}
			at, err := parsePosition(w)
			if err != nil {
				return err
			}
			a.Positions = append(a.Positions, at)
		}
		p.note("all=%v", p.sh.CarryAcks(p.now, a))
	case "amnesia":
		clear(p.past)
	case "carried":
		acks := 0
		for _, c := range p.sh.carrying.subs {
			acks += len(c.acks)
		}
		p.note("subscriptions=%d positions=%d with_acks=%d copies=%d waiting=%d", len(p.sh.carrying.subs), p.sh.carrying.count, acks, p.sh.carrying.blocks, len(p.sh.translations.list))
	case "ask":
		kind := RequestLookup
		if words[1] == "partitions" {
			kind = RequestPartitions
		}
		p.sh.Ask(p.now, kind, words[2], words[3], func(a Answer) {
			p.note("answer failed=%v %s broker=%s partitions=%d", a.Failed(), a.Text, a.Broker, a.Command.GetPartitionMetadataResponse().GetPartitions())
		})
	default:
		return p.connectionEvent(words)
	}
	p.perform()
	return nil
}

func (p *player) draining(name, from, to, tails string, subs []string) (*route.Table, error) {
	topic, err := route.ParseTopic(name)
	if err != nil {
		return nil, err
	}
	drain := route.Drain{From: from}
	for _, at := range strings.Split(tails, ",") {
		var tail route.Tail
		if _, err := fmt.Sscanf(at, "%d:%d", &tail.Ledger, &tail.Entry); err != nil {
			return nil, err
		}
		drain.Tails = append(drain.Tails, tail)
	}
	for _, s := range subs {
		name, leaving := strings.CutPrefix(s, ">")
		drain.Subs = append(drain.Subs, route.DrainSub{Name: name, Leaving: leaving})
	}
	d := p.table.Decide(topic, "a")
	e := route.Entry{Topic: topic.Base(), Cluster: to, Epoch: d.Epoch, State: route.StateDraining, SwitchID: "s1", Attempt: 1, Drain: drain.String()}
	if d.Cluster != to {
		p.past[pastEpoch{topic.Base(), d.Epoch}] = d.Cluster
		e.Epoch++
	}
	return p.table.WithEntry(topic.Base(), &e)
}

func (p *player) assigned(words []string) Assigned {
	to := Assigned{Brokers: map[string]string{}}
	for _, w := range words {
		full, broker, _ := strings.Cut(w, "=")
		if full == "dead" {
			to.Dead = broker
			continue
		}
		to.Cluster, to.Brokers[full] = p.sh.mappedCluster(full), broker
	}
	return to
}

func (p *player) evicted(e Evicted) {
	p.note("evicted producers=%d consumers=%d unresolved=%d", e.Producers, e.Consumers, e.Unresolved)
}

func (p *player) change(f func() (*route.Table, error)) error {
	table, err := f()
	if err == nil {
		p.table = table
	}
	return err
}

var netReasons = map[string]NetReason{"eof": NetEOF, "reset": NetReset, "refused": NetDialFailed, "timeout": NetDialTimeout, "denied": NetDialDenied, "unresolved": NetResolve, "stalled": NetWriteStalled, "tls": NetTLSFailed, "plaintext": NetPlaintext}

func (p *player) connectionEvent(words []string) error {
	name := words[0]
	ep := p.endpoints[name]
	if ep == nil {
		return fmt.Errorf("no connection %s", name)
	}
	switch words[1] {
	case "up":
		p.lastConn++
		p.open(name, p.lastConn, ep)
		ep.Dialed(p.now, p.lastConn)
	case "closed":
		reason, ok := netReasons[words[2]]
		if !ok {
			return fmt.Errorf("unknown reason %s", words[2])
		}
		delete(p.endpoints, name)
		ep.Closed(p.now, reason, nil)
	case "paused", "resumed":
		ep.ReadPaused(p.now, words[1] == "paused")
	default:
		return fmt.Errorf("unknown event")
	}
	p.perform()
	return nil
}

func (p *player) open(name string, c Conn, ep Endpoint) {
	p.names[c], p.endpoints[name], p.conns[name] = name, ep, c
}

// deliver hands bytes over as the loop does: with what was not consumed before in front.
func (p *player) deliver(name string, bytes []byte) error {
	if p.endpoints[name] == nil {
		return fmt.Errorf("no connection %s", name)
	}
	if !p.cut {
		p.rest[name] = append(p.rest[name], bytes...)
		p.hand(name)
		return nil
	}
	for _, b := range bytes {
		p.rest[name] = append(p.rest[name], b)
		p.hand(name)
	}
	return nil
}

func (p *player) hand(name string) {
	for ep := p.endpoints[name]; ep != nil && !p.held[name] && len(p.rest[name]) > 0; {
		view := append([]byte(nil), p.rest[name]...)
		n := ep.Data(p.now, view)
		p.rest[name] = p.rest[name][n:]
		p.perform()
		for i := range view {
			view[i] = 0xdb // a view kept beyond its lifetime shows
		}
		if n == 0 || p.endpoints[name] != ep {
			return
		}
	}
}

func (p *player) perform() {
	for len(p.sh.ops) > 0 {
		ops := append([]Op(nil), p.sh.ops...)
		var resumed []string
		for _, op := range ops {
			name := p.names[op.Conn]
			switch op.Kind {
			case OpWrite:
				p.written(name, op.Data)
			case OpDial:
				p.dials++
				name := fmt.Sprintf("d%d", p.dials)
				p.endpoints[name] = op.Endpoint
				if op.TLS != "" {
					p.note("%s dial %s tls=%s server_name=%s", name, op.Addr, op.TLS, op.ServerName)
				} else {
					p.note("%s dial %s", name, op.Addr)
				}
			case OpClose:
				if l, ok := p.endpoints[name].(*leg); ok && l.cut && !op.Flush {
					p.note("cut %s", name)
				} else {
					p.note("close %s", name)
				}
				delete(p.endpoints, name)
			case OpPause:
				p.held[name] = true
				p.note("pause %s", name)
			case OpResume:
				p.held[name] = false
				p.note("resume %s", name)
				resumed = append(resumed, name)
			case OpTranslate:
				t := op.Translation
				what := "translate"
				if t.Last {
					what = "last behind"
				}
				p.note("%s %d %s %d:%d of epoch %d for cluster %s", what, t.ID, t.Topic, t.At.Ledger, t.At.Entry, t.Epoch, t.Cluster)
			case OpOldAcks:
				if a := op.OldAcks; len(a.copies) > 0 {
					p.note("copies %s %s on %s: %s", a.Topic, a.Subscription, a.Cluster, copiesText(a.copies))
				} else {
					p.note("old acks {Topic:%s Subscription:%s Cluster:%s Positions:%+v Before:%v Forget:%v}", a.Topic, a.Subscription, a.Cluster, a.Positions, a.Before, a.Forget)
				}
			case OpReport:
				p.note("%s", reportLine(op.Report))
			}
		}
		p.sh.ResetOps()
		for _, name := range resumed {
			p.hand(name)
		}
	}
}

func reportLine(r *Report) string {
	switch r.Event {
	case EventClosed:
		return fmt.Sprintf("! closed %s: %s", r.Cause, r.Text)
	case EventRefused:
		return fmt.Sprintf("! refused %s", r.Refusal)
	case EventUpstream:
		return fmt.Sprintf("! upstream %s/%s %s", r.Cluster, r.Broker, r.Text)
	default:
		return fmt.Sprintf("! %s %s", r.Event, r.Text)
	}
}

// written prints the frames that are complete now.
func (p *player) written(name string, data []byte) {
	p.sent[name] = append(p.sent[name], data...)
	buf := append(p.partial[name], data...)
	for len(buf) >= 4 {
		size := int(binary.BigEndian.Uint32(buf)) + 4
		if len(buf) < size {
			break
		}
		if p.onFrame != nil {
			p.onFrame(name, buf[:size])
		} else {
			p.note("%s< %s", name, printFrame(buf[:size]))
		}
		buf = buf[size:]
	}
	p.partial[name] = append([]byte(nil), buf...)
}

func printFrame(frame []byte) string {
	h, ok, err := codec.ParseHead(frame, 64<<20)
	if !ok {
		return fmt.Sprintf("unreadable frame of %d bytes: %v", len(frame), err)
	}
	var cmd pulsarpb.BaseCommand
	if err := codec.Parse(&cmd, frame, h); err != nil {
		return err.Error()
	}
	text := h.Type.String()
	cmd.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Message() != nil {
			text = string(f.Name()) + printMessage(v.Message())
		}
		return true
	})
	if extra := h.Size - h.CmdEnd; extra > 0 {
		text += fmt.Sprintf(" +%d", extra)
	}
	return text
}

// printMessage is deterministic, which the library's own text form is not.
func printMessage(m protoreflect.Message) string {
	var parts []string
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		v := m.Get(f)
		switch {
		case f.IsList() && f.Message() != nil && f.Message().Name() == "MessageIdData":
			for i := range v.List().Len() {
				parts = append(parts, string(f.Name())+printMessage(v.List().Get(i).Message()))
			}
		case f.IsList():
			parts = append(parts, fmt.Sprintf("%s:%d entries", f.Name(), v.List().Len()))
		case f.Message() != nil:
			parts = append(parts, string(f.Name())+printMessage(v.Message()))
		case f.Kind() == protoreflect.StringKind:
			parts = append(parts, fmt.Sprintf("%s:%q", f.Name(), v.String()))
		default:
			parts = append(parts, fmt.Sprintf("%s:%v", f.Name(), v.Interface()))
		}
	}
	if n := len(m.GetUnknown()); n > 0 {
		parts = append(parts, fmt.Sprintf("unknown:%d bytes", n))
	}
	return "{" + strings.Join(parts, " ") + "}"
}

// frames parses "send{producer_id:1 sequence_id:0} +100 ; ping{}". A MESSAGE may be followed by FROM(a,146:36,10), see appendMetadata. TAG(a,broker-0:6650) becomes the tagged address.
func (p *player) frames(text string) ([]byte, error) {
	var out []byte
	for _, one := range strings.Split(text, " ; ") {
		extra := 0
		one, source, replicated := strings.Cut(one, " FROM(")
		if replicated {
			var rest string
			source, rest, _ = strings.Cut(source, ")")
			one += rest
		}
		if body, n, ok := strings.Cut(one, "} +"); ok {
			var err error
			if extra, err = strconv.Atoi(strings.TrimSpace(n)); err != nil {
				return nil, err
			}
			one = body + "}"
		}
		for {
			before, after, ok := strings.Cut(one, "TAG(")
			if !ok {
				break
			}
			arg, after, _ := strings.Cut(after, ")")
			name, broker, _ := strings.Cut(arg, ",")
			one = before + p.sh.cfg.Clusters().Tag(name, broker) + after
		}
		var cmd pulsarpb.BaseCommand
		if err := (prototext.UnmarshalOptions{AllowPartial: true}).Unmarshal([]byte(one), &cmd); err != nil {
			return nil, err
		}
		cmd.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if f.Message() != nil {
				command(codec.Type(f.Number()), &cmd)
			}
			return true
		})
		frame := codec.AppendCommand(nil, &cmd)
		if t := codec.Type(cmd.GetType()); p.unusual && t >= codec.TypePartitionedMetadata && t <= codec.TypeLookupResponse {
			// A second, empty sub-message, which protobuf merges into the first.
			frame = append(frame, byte(t<<3)|2|0x80, byte(t>>4), 0)
			binary.BigEndian.PutUint32(frame[4:], uint32(len(frame)-8))
		}
		if replicated {
			var err error
			if frame, err = appendMetadata(frame, source); err != nil {
				return nil, err
			}
		}
		for i := range extra {
			frame = append(frame, byte(i))
		}
		binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
		out = append(out, frame...)
	}
	return out, nil
}

// appendMetadata appends checksum and metadata of a replicated message, as "a,146:36,10": cluster, position there, messages in the batch.
func appendMetadata(frame []byte, source string) ([]byte, error) {
	words := strings.Split(source, ",")
	if len(words) != 3 {
		return nil, fmt.Errorf("FROM(%s) is not CLUSTER,LEDGER:ENTRY,MESSAGES", source)
	}
	n, err := strconv.Atoi(words[2])
	if err != nil {
		return nil, err
	}
	meta, err := proto.MarshalOptions{AllowPartial: true}.Marshal(&pulsarpb.MessageMetadata{
		ReplicatedFrom: &words[0], NumMessagesInBatch: proto.Int32(int32(n)),
		Properties: []*pulsarpb.KeyValue{{Key: proto.String(codec.SourceProperty), Value: &words[1]}},
	})
	if err != nil {
		return nil, err
	}
	frame = binary.BigEndian.AppendUint16(frame, 0x0e01)
	frame = binary.BigEndian.AppendUint32(frame, 0)
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(meta)))
	frame = append(frame, meta...)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
	return frame, nil
}

// diffLines shows the first lines that differ.
func diffLines(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		a, b := "(end)", "(end)"
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if a != b {
			return fmt.Sprintf("line %d\n-%s\n+%s", i+1, a, b)
		}
	}
	return ""
}
