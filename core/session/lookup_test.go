package session

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
	"pointsman/core/cluster"
)

// asking is a client that has asked a broker once, and that broker.
func asking(t testing.TB, steps ...string) (p *player, s *Session, up *upstream) {
	p = newPlayer(t, false)
	for _, line := range append([]string{
		"client c1",
		`c1> connect{client_version:"x" protocol_version:21}`,
		`c1> lookup_topic{topic:"persistent://public/default/t1" request_id:1}`,
		"d1 up",
		`d1> connected{server_version:"4.0.8" protocol_version:21}`,
		`d1> lookup_topic_response{brokerServiceUrl:"pulsar://broker-0:6650" response:1 request_id:1}`,
	}, steps...) {
		if err := p.step(line); err != nil {
			t.Fatal(err)
		}
	}
	return p, p.endpoints["c1"].(*Session), p.endpoints["d1"].(*upstream)
}

// roundTrip has a client ask n things in one read and the broker answer all of them in one.
type roundTrip struct {
	p          *player
	s          *Session
	up         *upstream
	ask, reply string // formats of the frame, for the number of the question and the broker's request id
	asked      []byte
}

func (r *roundTrip) prepare(t testing.TB, n int) {
	r.p, r.s, r.up = asking(t)
	r.p.sh.cfg.LookupsPerConnection, r.p.sh.cfg.LookupsPerCluster = 2*n, 2*n
	r.p.sh.scratch = make([]byte, 0, scratchKeep)
	for i := range n {
		r.asked = append(r.asked, flow(t, r.p, 1, fmt.Sprintf(r.ask, i, i))...)
	}
}

// answers are the frames of the broker for the questions that it will be asked next.
func (r *roundTrip) answers(t testing.TB, n int) (all []byte) {
	for i := range n {
		all = append(all, flow(t, r.p, 1, fmt.Sprintf(r.reply, r.up.lastReq+uint64(i)+1))...)
	}
	return all
}

func (r *roundTrip) play(t testing.TB, answers []byte) {
	r.p.sh.ResetOps()
	r.s.Data(r.p.now, r.asked)
	if len(r.p.sh.ops) != 1 || r.p.sh.ops[0].Conn != r.up.conn {
		t.Fatalf("%d ops for one read of questions, want one write to the broker", len(r.p.sh.ops))
	}
	if !r.p.sh.ops[0].Gather {
		t.Fatal("questions of other clients of the same turn go in writes of their own")
	}
	r.p.sh.ResetOps()
	r.up.Data(r.p.now, answers)
	if len(r.p.sh.ops) != 1 || r.p.sh.ops[0].Conn != r.s.conn {
		t.Fatalf("%d ops for one read of answers, want one write to the client", len(r.p.sh.ops))
	}
}

var (
	lookupTrip     = roundTrip{ask: `lookup_topic{topic:"persistent://public/default/u%d" request_id:%d}`, reply: `lookup_topic_response{brokerServiceUrl:"pulsar://broker-0:6650" response:1 request_id:%d authoritative:true}`}
	partitionsTrip = roundTrip{ask: `partition_metadata{topic:"persistent://public/default/u%d" request_id:%d}`, reply: `partition_metadata_response{partitions:3 response:0 request_id:%d}`}
)

// The name of the topic is the only thing that has to be made for a question.
func TestALookupAllocatesItsTopicOnly(t *testing.T) {
	const n, rounds = 20, 50
	for name, r := range map[string]roundTrip{"LOOKUP": lookupTrip, "PARTITIONED_METADATA": partitionsTrip} {
		r.prepare(t, n)
		var answers [][]byte
		for range rounds + 2 {
			answers = append(answers, r.answers(t, n))
			r.up.lastReq += n
		}
		r.up.lastReq -= uint64(n * len(answers))
		allocs := testing.AllocsPerRun(rounds, func() {
			r.play(t, answers[0])
			answers = answers[1:]
		})
		if perQuestion := allocs / n; perQuestion > 1.1 {
			t.Errorf("%s: %.2f allocations from client to broker and back, want 1", name, perQuestion)
		}
	}
}

func BenchmarkLookupRoundTrip(b *testing.B) {
	const n = 10
	r := lookupTrip
	r.prepare(b, n)
	answers := r.answers(b, n)
	first := r.up.lastReq
	b.ReportAllocs()
	for b.Loop() {
		r.up.lastReq = first
		r.play(b, answers)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/lookup")
}

// A cluster's listener name is asked for when the client names none, in whatever form the question comes.
func TestAClustersListenerNameIsAskedFor(t *testing.T) {
	for _, unusual := range []bool{false, true} {
		p, _, _ := asking(t)
		keys, err := cluster.NewTagKeys([]byte("0123456789abcdef0123456789abcdef"))
		if err != nil {
			t.Fatal(err)
		}
		set, err := cluster.NewSet([]cluster.Config{{Name: "a", ServiceURLs: []string{"pulsar://broker-0:6650"}, ListenerName: "internal"}}, keys)
		if err != nil {
			t.Fatal(err)
		}
		p.sh.cfg.Clusters = func() *cluster.Set { return set }
		p.unusual = unusual
		p.transcript.Reset()
		const ask = `c1> lookup_topic{topic:"t" request_id:5} ; lookup_topic{topic:"t" request_id:6 advertised_listener_name:"own"} ; lookup_topic{topic:"u" request_id:7 advertised_listener_name:""}`
		if err := p.step(ask); err != nil {
			t.Fatal(err)
		}
		const want = `  d1< lookup_topic{topic:"t" request_id:2 advertised_listener_name:"internal"}
  d1< lookup_topic{topic:"t" request_id:3 advertised_listener_name:"own"}
  d1< lookup_topic{topic:"u" request_id:4 advertised_listener_name:"internal"}
`
		if got := strings.Replace(p.transcript.String(), "  pause c1\n", "", 1); got != want {
			t.Errorf("unusual form %v: asked\n%swant\n%s", unusual, got, want)
		}
	}
}

// What a client asks in one read is asked of one broker, so that one write brings the answers; the next read goes to the next broker, and
// so does another try.
func TestTheQuestionsOfOneReadGoToOneBroker(t *testing.T) {
	p, _, _ := asking(t)
	keys, err := cluster.NewTagKeys([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := cluster.NewSet([]cluster.Config{{Name: "a", ServiceURLs: []string{"pulsar://x:6650,y:6650"}}}, keys)
	if err != nil {
		t.Fatal(err)
	}
	p.sh.cfg.Clusters = func() *cluster.Set { return set }
	p.sh.cfg.LookupsPerConnection = 100
	p.transcript.Reset()
	for _, line := range []string{
		`c1> lookup_topic{topic:"t1" request_id:5} ; lookup_topic{topic:"t2" request_id:6} ; partition_metadata{topic:"t3" request_id:7}`, "d2 up", `d2> connected{server_version:"4.0.8" protocol_version:21}`,
		`c1> lookup_topic{topic:"t4" request_id:8} ; lookup_topic{topic:"t5" request_id:9}`, "d3 up", `d3> connected{server_version:"4.0.8" protocol_version:21}`,
		`d3> lookup_topic_response{response:2 request_id:1 error:6}`, "tick 50ms",
	} {
		if err := p.step(line); err != nil {
			t.Fatal(err)
		}
	}
	const connect = `connect{client_version:"Pointsman-test" protocol_version:21}`
	want := "  d2 dial x:6650\n  d2< " + connect + `
  d2< lookup_topic{topic:"t1" request_id:1}
  d2< lookup_topic{topic:"t2" request_id:2}
  d2< partition_metadata{topic:"t3" request_id:3}
  d3 dial x:6650
  d3< ` + connect + `
  d3< lookup_topic{topic:"t4" request_id:1}
  d3< lookup_topic{topic:"t5" request_id:2}
  d2< lookup_topic{topic:"t4" request_id:4}
`
	if got := strings.ReplaceAll(p.transcript.String(), " y:", " x:"); got != want { // which of them is first does not matter
		t.Errorf("asked\n%swant\n%s", got, want)
	}
}

// The owners that are kept belong to one state of the clusters, and are not more than a bound.
func TestOwnersAreForgottenWhenTheClustersChange(t *testing.T) {
	p, _, up := asking(t)
	r := codec.Response{Type: codec.TypeLookupResponse, URL: []byte("pulsar://broker-0:6650")}
	pool := up.pool
	before := pool.owner("a", &r)
	if before == nil || before != pool.owner("a", &r) {
		t.Fatal("the owner is not kept")
	}
	keys, err := cluster.NewTagKeys([]byte("another key of 32 bytes, another"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := cluster.NewSet([]cluster.Config{{Name: "a", ServiceURLs: []string{"pulsar://broker-0:6650"}}}, keys)
	if err != nil {
		t.Fatal(err)
	}
	p.sh.cfg.Clusters = func() *cluster.Set { return set }
	if after := pool.owner("a", &r); after == nil || string(after.fields) == string(before.fields) {
		t.Error("an owner is told under the old key")
	}
	for i := range 2 * maxOwners {
		r.URL = fmt.Appendf(nil, "pulsar://broker-%d:6650", i)
		pool.owner("a", &r)
	}
	if len(pool.owners) > maxOwners {
		t.Errorf("%d owners are kept, at most %d", len(pool.owners), maxOwners)
	}
}

// Whatever clients ask and brokers answer, in whatever order and form: each request is answered exactly once and in its own type of
// response, at the latest when the lookup timeout is over; and then nothing of it is left.
func TestEveryRandomQuestionIsAnsweredOnce(t *testing.T) { rapid.Check(t, randomQuestions) }

type questioning struct {
	p       *player
	t       *rapid.T
	open    map[string]bool                    // "c1 lookup 5": not answered yet
	clients map[string]bool                    // those that are open
	asked   map[string][]*pulsarpb.BaseCommand // broker connection → what it was asked and has not answered
	lastReq int
}

func randomQuestions(t *rapid.T) {
	w := &questioning{p: newPlayer(quietTB{}, false), t: t, open: map[string]bool{}, clients: map[string]bool{}, asked: map[string][]*pulsarpb.BaseCommand{}}
	w.p.onFrame = w.take
	w.p.sh.cfg.LookupsPerConnection, w.p.sh.cfg.LookupsPerCluster = 6, 8
	t.Repeat(map[string]func(*rapid.T){
		"connect": func(t *rapid.T) {
			name := fmt.Sprintf("c%d", w.p.clients+1)
			if len(w.clients) == 4 {
				t.Skip("enough clients")
			}
			w.clients[name] = true
			w.step("client " + name)
			w.step(fmt.Sprintf(`%s> connect{client_version:"x" protocol_version:%d}`, name, rapid.IntRange(20, 21).Draw(t, "version")))
		},
		"ask":    func(t *rapid.T) { w.ask(t, pick(t, w.clients)) },
		"answer": func(t *rapid.T) { w.answer(t, w.broker(t)) },
		"begin": func(t *rapid.T) {
			name := w.broker(t)
			if up := w.p.endpoints[name].(*upstream); up.conn == 0 {
				w.step(name + " up")
				if w.p.endpoints[name] != nil { // nobody had given it up meanwhile
					w.step(name + `> connected{server_version:"x" protocol_version:21}`)
				}
			}
		},
		"lose": func(t *rapid.T) {
			name := w.broker(t)
			delete(w.asked, name)
			w.step(name + " closed reset")
		},
		"hang up": func(t *rapid.T) {
			w.step(pick(t, w.clients) + " closed eof")
		},
		"time": func(t *rapid.T) { w.step(fmt.Sprintf("tick %dms", rapid.IntRange(1, 3000).Draw(t, "ms"))) },
		"":     func(*rapid.T) { w.invariants() },
	})
	for range 20 { // one that is not read has more to ask when it is
		w.step("tick 20s")
	}
	for name := range w.open {
		t.Fatalf("%s was never answered", name)
	}
	pool := &w.p.sh.pool
	if len(pool.questions) > 0 || pool.first != nil || pool.last != nil {
		t.Fatalf("%d questions are left", len(pool.questions))
	}
	for name, l := range pool.loads {
		if l.underWay != 0 {
			t.Fatalf("%d questions to cluster %s are counted as under way", l.underWay, name)
		}
	}
	for name := range w.clients {
		w.step(name + " closed eof")
	}
	for range 10 {
		w.step("tick 60s") // the lookup connections end
	}
	if len(pool.identities) != 1 || pool.own.refs != 1 {
		t.Fatalf("%d identities are left, %d holders of the proxy's own", len(pool.identities), pool.own.refs)
	}
}

func pick(t *rapid.T, names map[string]bool) string {
	var all []string
	for name, ok := range names {
		if ok {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	if len(all) == 0 {
		t.Skip("none")
	}
	return rapid.SampledFrom(all).Draw(t, "name")
}

func (w *questioning) broker(t *rapid.T) string {
	names := map[string]bool{}
	for name := range w.p.endpoints {
		names[name] = strings.HasPrefix(name, "d")
	}
	return pick(t, names)
}

func (w *questioning) step(line string) {
	if err := w.p.step(line); err != nil {
		w.t.Fatalf("%s: %v", line, err)
	}
	for client := range w.clients {
		if w.p.endpoints[client] != nil {
			continue
		}
		delete(w.clients, client)
		for name := range w.open {
			if strings.HasPrefix(name, client+" ") {
				delete(w.open, name)
			}
		}
	}
}

func (w *questioning) ask(t *rapid.T, client string) {
	var frames []string
	for range rapid.IntRange(1, 3).Draw(t, "questions") {
		w.lastReq++
		topic := rapid.SampledFrom([]string{"t1", "t2", "persistent://t/n/x", "bad/name"}).Draw(t, "topic")
		kind := rapid.SampledFrom([]string{"lookup", "lookup", "partitions"}).Draw(t, "kind")
		w.open[fmt.Sprintf("%s %s %d", client, kind, w.lastReq)] = true
		if kind == "lookup" {
			frames = append(frames, fmt.Sprintf(`lookup_topic{topic:%q request_id:%d}`, topic, w.lastReq))
		} else {
			frames = append(frames, fmt.Sprintf(`partition_metadata{topic:%q request_id:%d}`, topic, w.lastReq))
		}
	}
	w.p.unusual = rapid.Bool().Draw(t, "unusual")
	w.step(client + "> " + strings.Join(frames, " ; "))
}

// answer has a broker answer one of its questions, in any order.
func (w *questioning) answer(t *rapid.T, name string) {
	asked := w.asked[name]
	if len(asked) == 0 {
		t.Skip("not asked")
	}
	i := rapid.IntRange(0, len(asked)-1).Draw(t, "question")
	cmd := asked[i]
	w.asked[name] = append(append([]*pulsarpb.BaseCommand(nil), asked[:i]...), asked[i+1:]...)
	w.p.unusual = rapid.Bool().Draw(t, "unusual")
	outcome := rapid.SampledFrom([]string{"yes", "yes", "redirect", "not ready", "no"}).Draw(t, "outcome")
	if m := cmd.PartitionMetadata; m != nil {
		w.step(fmt.Sprintf("%s> %s", name, map[string]string{
			"yes": fmt.Sprintf("partition_metadata_response{partitions:3 request_id:%d}", m.GetRequestId()), "redirect": "pong{}",
			"not ready": fmt.Sprintf("partition_metadata_response{request_id:%d response:1 error:6}", m.GetRequestId()),
			"no":        fmt.Sprintf("error{request_id:%d error:5 message:\"no\"}", m.GetRequestId()),
		}[outcome]))
		return
	}
	req := cmd.LookupTopic.GetRequestId()
	w.step(fmt.Sprintf("%s> %s", name, map[string]string{
		"yes":       fmt.Sprintf(`lookup_topic_response{brokerServiceUrl:"pulsar://broker-0:6650" response:1 request_id:%d}`, req),
		"redirect":  fmt.Sprintf(`lookup_topic_response{brokerServiceUrl:"pulsar://broker-1:6650" response:0 request_id:%d}`, req),
		"not ready": fmt.Sprintf(`lookup_topic_response{response:2 request_id:%d error:6}`, req),
		"no":        fmt.Sprintf(`lookup_topic_response{response:2 request_id:%d error:5}`, req),
	}[outcome]))
}

// take is called for every frame that the proxy writes.
func (w *questioning) take(to string, frame []byte) {
	h, _, err := codec.ParseHead(frame, codec.DefaultMaxFrame)
	var cmd pulsarpb.BaseCommand
	if err == nil {
		err = codec.Parse(&cmd, frame, h)
	}
	if err != nil {
		w.t.Fatalf("%s received what is no frame: %v: % x", to, err, frame)
	}
	answered := ""
	switch {
	case cmd.LookupTopic != nil, cmd.PartitionMetadata != nil:
		w.asked[to] = append(w.asked[to], &cmd)
		return
	case cmd.LookupTopicResponse != nil:
		answered = fmt.Sprintf("%s lookup %d", to, cmd.LookupTopicResponse.GetRequestId())
	case cmd.PartitionMetadataResponse != nil:
		answered = fmt.Sprintf("%s partitions %d", to, cmd.PartitionMetadataResponse.GetRequestId())
	default:
		return
	}
	if !w.open[answered] {
		w.t.Fatalf("%s was answered, and nobody waits for that", answered)
	}
	delete(w.open, answered)
}

// invariants: the questions under way are in the order of their deadlines, each found by its hash.
func (w *questioning) invariants() {
	pool := &w.p.sh.pool
	n, at := 0, time.Time{}
	var older *question
	for q := pool.first; q != nil; q = q.newer {
		if n++; q.deadline.Before(at) || q.older != older {
			w.t.Fatalf("question %d is out of order", n)
		}
		at, older = q.deadline, q
		found := pool.questions[q.hash]
		for found != nil && found != q {
			found = found.chain
		}
		if found == nil {
			w.t.Fatalf("question %d is not found by its hash", n)
		}
	}
	if pool.last != older {
		w.t.Fatal("the last question is not the newest")
	}
	if n > 0 && (pool.expiry.pos == 0 || pool.expiry.at.After(pool.first.deadline)) {
		w.t.Fatal("nothing will end the oldest question")
	}
}

// Whoever asks a lot at once is heard in parts, so that the loop comes to others in between; so is a broker that answers a lot.
func TestALongReadOfCommandsIsTakenInParts(t *testing.T) {
	const n = 2*answersPerCall + 1
	r := lookupTrip
	r.prepare(t, n)
	answers := r.answers(t, n)
	inParts := func(ep Endpoint, conn Conn, src []byte, perCall int) {
		t.Helper()
		calls := 0
		for ; len(src) > 0; calls++ {
			r.p.sh.ResetOps()
			k := ep.Data(r.p.now, src)
			src = src[k:]
			goesOn := slices.ContainsFunc(r.p.sh.ops, func(op Op) bool { return op.Kind == OpResume && op.Conn == conn })
			if k == 0 || goesOn != (len(src) > 0) {
				t.Fatalf("call %d took %d bytes and left %d; asked to go on: %t", calls, k, len(src), goesOn)
			}
		}
		if want := (n + perCall - 1) / perCall; calls != want {
			t.Errorf("%d frames took %d calls, want %d", n, calls, want)
		}
	}
	inParts(r.s, r.s.conn, r.asked, commandsPerCall)
	if r.s.inflight != n {
		t.Fatalf("%d of %d questions are under way", r.s.inflight, n)
	}
	inParts(r.up, r.up.conn, answers, answersPerCall)
	if r.s.inflight != 0 {
		t.Errorf("%d questions were not answered", r.s.inflight)
	}
}

// The same on a connection with a target, where commands lie between messages.
func TestCommandsBetweenMessagesAreTakenInParts(t *testing.T) {
	p, s, _ := bridged(t)
	p.sh.cfg.LookupsPerConnection = 10 * commandsPerCall
	one := append(flow(t, p, 1, `lookup_topic{topic:"persistent://public/default/u" request_id:9}`), flow(t, p, 1, sendFrame)...)
	src := bytes.Repeat(one, commandsPerCall+1)
	p.sh.ResetOps()
	if n := s.Data(p.now, src); n != len(src)-len(one) {
		t.Errorf("%d of %d bytes were taken, want %d", n, len(src), len(src)-len(one))
	}
	if last := p.sh.ops[len(p.sh.ops)-1]; last.Kind != OpResume || last.Conn != s.conn {
		t.Errorf("the last op is %+v, want to be resumed", last)
	}
	if n := s.Data(p.now, src[len(src)-len(one):]); n != len(one) {
		t.Errorf("then %d of %d bytes", n, len(one))
	}
}
