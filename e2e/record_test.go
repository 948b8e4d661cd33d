package e2e

import (
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestALogKeepsWhatDriversSay(t *testing.T) {
	var r Record
	lines := []string{
		"a\t0\t1700000000000000\t4294967295\t2",
		"r\t7\t1700000000000120\t1\t0\t1\tshared\tkey-7\tCAE=",
		"r\t-1\t1699999999999120\t3\t0\t0\t\t\t",
		`{"e":"ready","what":"producer","k":1}`,
		`{"e":"error","what":"send","n":5,"text":"too large"}`,
		`{"e":"stopped"}`,
		`{"e":"done"}`,
	}
	for _, line := range lines {
		r.add([]byte(line + "\n"))
	}
	if got, want := slices.Collect(r.Acks.All()), []Message{{N: 0, T: 1_700_000_000_000, CRC: 4294967295, K: 2}}; !reflect.DeepEqual(got, want) {
		t.Errorf("receipts %+v, want %+v", got, want)
	}
	if got, want := slices.Collect(r.Recvs.All()), []Message{
		{N: 7, T: 1_700_000_000_000.12, CRC: 1, C: 1, S: "shared", Key: "key-7", Stored: "CAE="}, {N: -1, T: 1_699_999_999_999.12, CRC: 3},
	}; !reflect.DeepEqual(got, want) {
		t.Errorf("messages %+v, want %+v", got, want)
	}
	if len(r.Ready) != 1 || r.Ready[0].K != 1 || len(r.Errors) != 1 || r.Errors[0].N != 5 || !r.Stopped || !r.Done {
		t.Errorf("got %+v, want one ready, one error, stopped and done", r)
	}
}

func TestALineThatIsNoneIsAnError(t *testing.T) {
	for _, line := range []string{
		"", "a", "a\t1", "a\t1\t2\t3", "a\tx\t2\t3\t0", "a\t1\t2\t4294967296\t0", "a\t2147483648\t2\t3\t0", "a\t1\t-\t3\t0", "a\t99999999999999999999\t2\t3\t0", "r\t1\t2\t3\t0\t0\ts\tk",
		"r\t1\t2\t3\t0\tx\ts\tk\t", "a 1 2 3 0", "Exception in thread", `{"e":"acked"}`, "{}",
	} {
		var r Record
		r.add([]byte(line))
		if len(r.Errors) != 1 || r.Acks.Len()+r.Recvs.Len() != 0 {
			t.Errorf("%q: got %+v, want one error", line, r)
		}
	}
}

func TestALongLogIsReadWhileItGrows(t *testing.T) {
	var l Log
	var halfway Log
	const count = 3*logPage + 5
	for n := range count {
		if n == count/2 {
			halfway = l
		}
		if err := l.add(fmt.Appendf(nil, "%d\t%d\t%d\t%d", n, 1_700_000_000_000_000+100*n, n, n%3)); err != nil {
			t.Fatal(err)
		}
	}
	for _, some := range []Log{halfway, l} {
		n := 0
		for m := range some.All() {
			if want := (Message{N: int64(n), T: float64(1_700_000_000_000_000+100*n) / 1000, CRC: uint32(n), K: n % 3}); m != want {
				t.Fatalf("message %d is %+v, want %+v", n, m, want)
			}
			n++
		}
		if n != some.Len() {
			t.Errorf("%d messages in a log of %d", n, some.Len())
		}
	}
	if halfway.Len() != count/2 || l.Len() != count {
		t.Errorf("lengths %d and %d, want %d and %d", halfway.Len(), l.Len(), count/2, count)
	}
	odd := slices.Collect(l.Where(func(m Message) bool { return m.K == 1 }))
	if len(odd) != (count+1)/3 || odd[1].N != 4 {
		t.Errorf("%d messages of topic 1, the second %+v; want %d and number 4", len(odd), odd[1], (count+1)/3)
	}
}

func TestALogTakesAMessageWithoutAllocating(t *testing.T) {
	var r Record
	line := []byte("r\t123456\t1700000000000000\t4294967295\t0\t0\tshared\tkey-7\t\n")
	r.add(line)
	if got := testing.AllocsPerRun(logPage/2, func() { r.add(line) }); got > 0 {
		t.Errorf("%v allocations for a message, want none but one for each page of %d", got, logPage)
	}
}

func TestWhatIsAwaitedMayComeBeforeItIsWanted(t *testing.T) {
	var open Awaited[string]
	open.Came("early", 5)
	open.Want("early", 5)
	for _, n := range []int64{-1, 3, 3, 9_000} {
		open.Want("late", n)
	}
	if got, want := open.Missing(), map[string]int{"late": 3}; !maps.Equal(got, want) {
		t.Errorf("missing %v, want %v", got, want)
	}
	for _, n := range []int64{9_000, 9_000, -1, 3, 4} {
		open.Came("late", n)
	}
	if got := open.Missing(); len(got) != 0 {
		t.Errorf("missing %v, want none", got)
	}
}

func TestAListenerTakesLinesAsTheyAreCut(t *testing.T) {
	whole := strings.Repeat("a\t1\t1700000000000000\t1\t0\n", 40) + `{"e":"done"}` + "\n"
	for _, size := range []int{1, 7, 64, len(whole)} {
		d := newDriver(Go, nil)
		reader, writer := io.Pipe()
		go func() {
			for piece := range slices.Chunk([]byte(whole), size) {
				_, _ = writer.Write(piece) // to a pipe that nobody closes before
			}
			_ = writer.Close()
		}()
		d.listen(reader)
		if r := d.Record(); r.Acks.Len() != 40 || !r.Done || !r.Ended || len(r.Errors) != 0 {
			t.Errorf("in pieces of %d bytes: %d receipts, %+v; want 40, done and ended", size, r.Acks.Len(), r.Errors)
		}
	}
}
