package session

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// A client that consumes topics of several brokers has a connection to each: of what it consumes together, that of one broker is known (ADR 009).
func TestWhatAClientConsumesTogetherIsKnownForEachBroker(t *testing.T) {
	p := newPlayer(t, false)
	step := func(format string, args ...any) {
		t.Helper()
		if err := p.step(fmt.Sprintf(format, args...)); err != nil {
			t.Fatal(err)
		}
	}
	step("rule public/default a")
	subscribe := func(conn, leg string, id int, topic, sub string) {
		t.Helper()
		step(`%s> subscribe{topic:"%s" subscription:"%s" sub_type:1 consumer_name:"java-1" consumer_id:%d request_id:%d}`, conn, topic, sub, id, id)
		step(`%s> success{request_id:%d}`, leg, id)
	}
	for i := range 2 {
		step("client c%d", i+1)
		step(`c%d> connect{client_version:"x" protocol_version:21 proxy_to_broker_url:"TAG(a,broker-%d:6650)"}`, i+1, i)
		step("d%d up", i+1)
		step(`d%d> connected{server_version:"x" protocol_version:21}`, i+1)
	}
	subscribe("c1", "d1", 1, "t1", "s")
	subscribe("c1", "d1", 2, "t2-partition-0", "s")
	subscribe("c1", "d1", 3, "t2-partition-1", "s")
	subscribe("c1", "d1", 4, "t3", "other")
	subscribe("c1", "d1", 5, "x1", "s")
	step(`c1> producer{topic:"t4" producer_id:6 request_id:6}`)
	subscribe("c2", "d2", 7, "t5", "s")
	match := func(base string) bool { return strings.Contains(base, "/t") }
	name := "persistent://public/default/t"
	if sets, want := p.sh.Together(match), [][]string{{name + "1", name + "2"}}; !reflect.DeepEqual(sets, want) {
		t.Errorf("consumed together: %v, want %v", sets, want)
	}
	subscribe("c2", "d2", 8, "t6", "s")
	if sets, want := p.sh.Together(match), [][]string{{name + "1", name + "2"}, {name + "5", name + "6"}}; !reflect.DeepEqual(sets, want) {
		t.Errorf("consumed together: %v, want %v", sets, want)
	}
}
