package bench

import (
	"crypto/tls"
	"io"
	"net"
	"sync/atomic"
)

// copyBuffer is the buffer of a relay that copies through user space: the one of io.Copy.
const copyBuffer = 32 << 10

// Relay is the plainest TCP proxy that Go can write, a peer to compare with: two goroutines per connection, each in
// io.Copy, which splices inside the kernel on Linux, or with user set through a buffer. ln may be one for TLS (then io.Copy has a
// buffer, of the same size), and secure, unless it is nil, the TLS that is spoken with brokers. It accepts until ln is closed.
func Relay(ln net.Listener, brokers []string, secure *tls.Config, user bool) error {
	dial := net.Dial
	if secure != nil {
		dial = (&tls.Dialer{Config: secure}).Dial
	}
	var turn atomic.Uint64
	for {
		client, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer client.Close()
			broker, err := dial("tcp", brokers[turn.Add(1)%uint64(len(brokers))])
			if err != nil {
				return
			}
			defer broker.Close()
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				relayOne(broker, client, user)
			}()
			relayOne(client, broker, user)
			<-ended
		}()
	}
}

// relayOne copies src to dst until either ends, and then ends the writing side of dst: of a TCP or TLS connection.
func relayOne(dst, src net.Conn, user bool) {
	if user {
		// Wrapped, so that neither side offers a shortcut.
		_, _ = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, copyBuffer))
	} else {
		_, _ = io.Copy(dst, src)
	}
	_ = dst.(interface{ CloseWrite() error }).CloseWrite()
}
