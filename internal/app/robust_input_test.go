package app

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"golang.org/x/sys/unix"

	"pointsman/codec"
	"pointsman/internal/config"
	"pointsman/internal/testkit"
)

// claimSend is a SEND that says it is size bytes long, without its end.
func claimSend(size uint32) []byte {
	frame := sendFrame(1, 1, nil)
	binary.BigEndian.PutUint32(frame, size)
	return frame
}

// claimCommand is the beginning of a command, without payload, that says it is size bytes long.
func claimCommand(field codec.Type, size uint32) []byte {
	tag := uint32(field)<<3 | 2
	sub := size - 4 - 2 - 2 - 5 // sizes, type, tag, length
	return []byte{
		byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size), byte((size - 4) >> 24), byte((size - 4) >> 16), byte((size - 4) >> 8), byte(size - 4),
		0x08, byte(field), byte(tag) | 0x80, byte(tag >> 7), byte(sub) | 0x80, byte(sub>>7) | 0x80, byte(sub>>14) | 0x80, byte(sub>>21) | 0x80, byte(sub >> 28),
	}
}

func randomBytes(seed uint64, n int) []byte {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	b := make([]byte, n)
	_, _ = r.Read(b)
	return b
}

// What a publish of a neighbour allocates in this process at most, and leaves behind: the client and the broker are in it as well.
const (
	publishCost = 16 << 10
	publishKept = 2 << 10
)

// ME-06: what is not the protocol is closed at once, with one line that says why, counted once, and without the memory
// that it claims. Others do not notice.
func TestWhatIsNotTheProtocolIsClosedAtOnce(t *testing.T) {
	const topic = "persistent://public/default/bad-input"
	r := newRig(t, testkit.Options{}, nil)
	neighbour := r.neighbourOn(t, "persistent://public/default/neighbour", 2*time.Millisecond)
	target := r.owner(t, topic)

	fresh := func(t testing.TB) *peer { return r.dial(t) }
	lookups := func(t testing.TB) *peer { return r.connect(t, "") }
	bridged := func(t testing.TB) *peer {
		p := r.connect(t, target)
		p.produce(topic, "", 1)
		return p
	}
	hello := "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + string(randomBytes(9, 500))
	for _, c := range []struct {
		name   string
		open   func(testing.TB) *peer
		bytes  []byte
		reason string
	}{
		{"a TLS hello", fresh, []byte(hello), "tls_on_plaintext_port"},
		{"a TLS hello in a session", lookups, []byte(hello), "tls_on_plaintext_port"},
		{"an HTTP GET", fresh, []byte("GET /admin/v2/clusters HTTP/1.1\r\nHost: pulsar\r\n\r\n"), "http_on_binary_port"},
		{"an HTTP/2 preface", fresh, []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "http_on_binary_port"},
		{"random bytes", fresh, randomBytes(1, 4096), "malformed_frame"},
		{"other random bytes on a bridge", bridged, randomBytes(2, 4096), "malformed_frame"},
		{"a length of 0xFFFFFFFF", fresh, []byte("\xff\xff\xff\xff"), "malformed_frame"},
		{"a length of 0xFFFFFFFF for lookups", lookups, []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), "malformed_frame"},
		{"a length of 0xFFFFFFFF on a bridge", bridged, []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), "malformed_frame"},
		{"a length of zero", fresh, []byte("\x00\x00\x00\x00"), "malformed_frame"},
		{"a frame over the broker's limit", bridged, claimSend(5<<20 + codec.FrameSlack), "malformed_frame"},
		{"a command larger than its frame", fresh, []byte("\x00\x00\x00\x10\x00\x00\x10\x00\x08\x02"), "malformed_frame"},
		{"a CONNECT of a megabyte", fresh, claimCommand(codec.TypeConnect, 1<<20), "malformed_frame"},
		{"a LOOKUP over limits.control_frame", lookups, claimCommand(codec.TypeLookup, 7<<20), "malformed_frame"},
		{"a LOOKUP before CONNECT", fresh, codec.AppendCommand(nil, lookupCommand(topic, 1)), "protocol_violation"},
		{"a PRODUCER before CONNECT", fresh, codec.AppendCommand(nil, producerCommand(topic, "", 1, 1)), "protocol_violation"},
		{"a SEND before CONNECT", fresh, sendFrame(1, 1, []byte("x")), "protocol_violation"},
		{"a second CONNECT for lookups", lookups, codec.AppendCommand(nil, connectCommand("")), "protocol_violation"},
		{"a second CONNECT on a bridge", bridged, codec.AppendCommand(nil, connectCommand("")), "protocol_violation"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := c.open(t)
			counted, lines := r.closed(t, "client", c.reason), len(r.log.with("client connection closed", "reason=client_"+c.reason))
			before, published := allocated(), r.a.Count(codec.TypeSend)
			p.write(c.bytes)
			p.ended(patience)
			grown := allocated() - before
			if others := int64(r.a.Count(codec.TypeSend)-published) * publishCost; grown > 1<<20+others {
				t.Errorf("%d bytes were allocated, %d of them by the neighbour", grown, others)
			}
			r.await(t, "count of the close", func() bool { return r.closed(t, "client", c.reason) > counted })
			if n := r.closed(t, "client", c.reason) - counted; n != 1 {
				t.Errorf("counted %v times", n)
			}
			r.await(t, "line", func() bool { // it is written after the count
				return len(r.log.with("client connection closed", "reason=client_"+c.reason)) > lines
			})
			said := r.log.with("client connection closed", "reason=client_"+c.reason)
			if len(said)-lines != 1 {
				t.Errorf("%d lines: %q", len(said)-lines, said[lines:])
			} else if line := said[lines]; !strings.Contains(line, "detail=") || !strings.Contains(line, "peer="+p.nc.LocalAddr().String()) {
				t.Errorf("the line lacks who or why: %s", line)
			}
		})
	}
	if n := len(neighbour.stop()); n == 0 {
		t.Error("the neighbour published nothing")
	}
	r.await(t, "end of all bridges", func() bool { return r.bridged() == 0 })
}

// A name that a client makes up does not fill the log.
func TestALongNameMakesNoLongLine(t *testing.T) {
	r := newRig(t, testkit.Options{}, nil)
	p := r.connect(t, "")
	p.send(lookupCommand("persistent://public/default/"+strings.Repeat("é", 50_000), 1))
	a := p.expect(codec.TypeLookupResponse).GetLookupTopicResponse()
	if codec.ServerError(a.GetError()) != codec.ErrorInvalidTopicName || len(a.GetMessage()) > 500 {
		t.Errorf("answer %d with a text of %d bytes", a.GetError(), len(a.GetMessage()))
	}
	r.await(t, "line", func() bool { return len(r.log.with("request refused", "invalid_topic_name")) == 1 })
} // and the rig checks the length of every line

// A peer that sends bytes of a command and stops in the middle holds only what it sent, and ends with the time for CONNECT.
func TestAHalfCommandEndsWithTheTimeForConnect(t *testing.T) {
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Limits.ConnectTimeout = config.Duration(300 * time.Millisecond) })
	before := r.closed(t, "client", "no_connect")
	start := time.Now()
	p := r.dial(t)
	p.write(claimCommand(codec.TypeConnect, 60<<10))
	p.ended(patience)
	if d := time.Since(start); d < 300*time.Millisecond || d > config.Default().Limits.ConnectTimeout.Std() {
		t.Errorf("closed after %s, want about 300 ms", d)
	}
	r.await(t, "count", func() bool { return r.closed(t, "client", "no_connect") == before+1 })
	r.await(t, "return of the buffers", func() bool { return r.app.engine.Stats().BufferMemory == 0 })
}

// silentPeersEnv makes the test binary open connections and say nothing, in a process of its own: the descriptors of both sides
// would not fit into one, and its memory is not to be measured. Its value is "address count".
const silentPeersEnv = "POINTSMAN_TEST_SILENT_PEERS"

// TestSilentPeersProcess is not a test: it is the other process of those that need many silent peers.
func TestSilentPeersProcess(t *testing.T) {
	spec := os.Getenv(silentPeersEnv)
	if spec == "" {
		t.Skip("runs as a child only")
	}
	host, count, _ := strings.Cut(spec, " ")
	addr, err := net.ResolveTCPAddr("tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(count)
	if err != nil {
		t.Fatal(err)
	}
	to := &unix.SockaddrInet4{Port: addr.Port, Addr: [4]byte(addr.IP.To4())}
	var fds []int
	for i := range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err == nil { // another source address per thousand, so that ports that are still in TIME_WAIT do not matter
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 1, byte(i / 1000), 1}})
		}
		if err == nil {
			err = unix.Connect(fd, to)
		}
		if err != nil {
			fmt.Printf("failed %d: %v\n", i, err)
			break
		}
		fds = append(fds, fd)
	}
	fmt.Printf("opened %d\n", len(fds))
	ended := 0
	for _, fd := range fds {
		var b [1]byte
		if n, err := unix.Read(fd, b[:]); n == 0 && err == nil {
			ended++
		}
		unix.Close(fd)
	}
	fmt.Printf("ended %d\n", ended)
}

// silentPeers starts the process; opened and ended tell what it saw.
func (r *rig) silentPeers(t *testing.T, n int) (opened, ended func() int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSilentPeersProcess$", "-test.v")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", silentPeersEnv, r.app.PulsarAddr(), n))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	read := func(word string) int {
		t.Helper()
		for lines.Scan() {
			if number, ok := strings.CutPrefix(lines.Text(), word+" "); ok {
				n, err := strconv.Atoi(number)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			if strings.HasPrefix(lines.Text(), "failed") {
				t.Error(lines.Text())
			}
		}
		t.Fatalf("the process of the silent peers ended without saying %q: %v", word, cmd.Wait())
		return 0
	}
	return func() int { return read("opened") }, func() int {
		n := read("ended")
		for lines.Scan() {
		}
		_ = cmd.Wait()
		return n
	}
}

// Connections that never speak are closed after limits.connect_timeout, cost little meanwhile, and a normal client works.
func TestConnectionsThatNeverSpeakAreClosedAndCheap(t *testing.T) {
	n := scaled(10_000)
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Limits.ConnectTimeout = config.Duration(6 * time.Second) }) // in which all of them have to be opened
	r.connect(t, "").nc.Close()                                                                                              // whatever is made once
	counted := r.closed(t, "client", "no_connect")
	heapBefore, rssBefore := heap(), rss(t)
	opened, ended := r.silentPeers(t, n)
	neighbour := r.neighbourOn(t, "persistent://public/default/neighbour", 2*time.Millisecond)

	if got := opened(); got != n {
		t.Fatalf("%d of %d connections were opened", got, n)
	}
	open := r.active()
	perHeap, perRSS := (heap()-heapBefore-int64(r.a.Count(codec.TypeSend))*publishKept)/max(open, 1), (rss(t)-rssBefore)/max(open, 1)
	t.Logf("%d of %d open at once; per connection: heap %d bytes, RSS %d bytes", open, n, perHeap, perRSS)
	if open < int64(n)/2 {
		t.Errorf("only %d of %d connections were open at once: the memory was not measured", open, n)
	}
	if perHeap > 4<<10 {
		t.Errorf("a silent connection costs %d bytes of heap, want at most 4 KiB", perHeap)
	}
	if perRSS > 16<<10*raceScale {
		t.Errorf("a silent connection costs %d bytes of resident memory", perRSS)
	}
	if got := ended(); got != n {
		t.Errorf("%d of %d connections saw their end", got, n)
	}
	r.await(t, "count of all", func() bool { return r.closed(t, "client", "no_connect") == counted+float64(n) })
	times := neighbour.stop()
	t.Logf("the neighbour published %d messages meanwhile, p99 %s", len(times), percentile(times, 99))
	if len(times) == 0 {
		t.Error("the neighbour published nothing")
	}
	if left := len(r.log.with("lines were left out")); n > 1000 && left == 0 && len(r.log.with("no_connect")) > n/2 {
		t.Errorf("%d lines for %d silent connections: a storm of peers is a storm of lines", len(r.log.with("no_connect")), n)
	}
}

// More than limits.connections: the surplus is closed at once and counted, and there is room again when one leaves.
// CN-11: a client that knows a second proxy ends there.
func TestSurplusConnectionsAreRefusedAndGoElsewhere(t *testing.T) {
	const limit, surplus = 20, 10
	r := newRig(t, testkit.Options{}, func(c *config.Config) { c.Limits.Connections = limit })
	other := r.beside(t, r.app.store.(joiner).Join(), nil)
	var held []*peer
	for range limit {
		held = append(held, r.connect(t, ""))
	}
	before := r.metric(t, "pulsar_proxy_rejected_connections_total")
	for range surplus {
		p := r.dial(t)
		_ = p.tryWrite(codec.AppendCommand(nil, connectCommand(""))) // may fail: it is closed at once
		p.ended(patience)
	}
	if n := r.metric(t, "pulsar_proxy_rejected_connections_total") - before; n != surplus {
		t.Errorf("%v connections were counted as rejected, want %d", n, surplus)
	}
	for i, p := range held {
		p.send(lookupCommand(fmt.Sprintf("held-%d", i), 1))
		p.target()
	}

	// The Go client takes the addresses in turn and tries only one of them for the connection to the broker.
	full, free := r.app.PulsarAddr(), other.app.PulsarAddr()
	client := newClient(t, "pulsar://"+strings.Join([]string{full, free, free, free}, ","))
	var producer pulsar.Producer
	r.await(t, "producer by way of the free proxy", func() bool {
		var err error
		producer, err = client.CreateProducer(pulsar.ProducerOptions{Topic: "persistent://public/default/elsewhere"})
		return err == nil
	})
	if _, err := producer.Send(t.Context(), &pulsar.ProducerMessage{Payload: []byte("x")}); err != nil {
		t.Error(err)
	}
	if other.bridged() == 0 {
		t.Error("the client works and is on neither proxy")
	}
	client.Close()

	held[0].nc.Close()
	r.await(t, "room for one", func() bool {
		p := r.dial(t)
		defer p.nc.Close()
		if p.tryWrite(codec.AppendCommand(nil, connectCommand(""))) != nil {
			return false
		}
		_, _, err := p.next()
		return err == nil
	})
}
