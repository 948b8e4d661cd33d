//go:build linux

package netio

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"testing"
)

// frame is a length and that many random bytes.
func frame(rng *rand.ChaCha8, n int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(n))
	b = append(b, make([]byte, n)...)
	_, _ = rng.Read(b[4:])
	return b
}

func TestEchoReturnsEverything(t *testing.T) {
	e := engine(t, Config{Loops: 2}, echoing)
	c := connect(t, addr(e))
	want := frame(rand.NewChaCha8([32]byte{1}), 3<<20)
	go func() { _, _ = c.Write(want) }()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the echo differs")
	}
}

// EL-01: frames cut at every byte, and many frames in one piece.
func TestEL01FramesCutAtEveryByteArriveIdentical(t *testing.T) {
	e := engine(t, Config{}, relayTo(echoServer(t), true, nil))
	rng := rand.NewChaCha8([32]byte{2})
	var all []byte
	for _, n := range []int{0, 1, 3, 50, 200} {
		all = append(all, frame(rng, n)...)
	}
	for cut := 1; cut < len(all); cut++ {
		c := connect(t, addr(e))
		got := make([]byte, len(all))
		write := func(b []byte) {
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		write(all[:cut])
		if whole := wholeFrames(all[:cut]); whole > 0 { // comes back before the rest is sent, so that the cut really is one
			if _, err := io.ReadFull(c, got[:whole]); err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			write(all[cut:])
			if _, err := io.ReadFull(c, got[whole:]); err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
		} else {
			write(all[cut:])
			if _, err := io.ReadFull(c, got); err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
		}
		if !bytes.Equal(got, all) {
			t.Fatalf("cut at %d: bytes differ", cut)
		}
		c.Close()
	}
}

// wholeFrames is how many bytes of b are forwarded at once: all but an incomplete head.
func wholeFrames(b []byte) int {
	n := 0
	for len(b)-n >= 4 {
		n += min(len(b)-n, 4+int(binary.BigEndian.Uint32(b[n:])))
	}
	return n
}
