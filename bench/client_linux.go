package bench

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// link is a connection during its blocking set-up, before a loop takes its descriptor over.
type link struct {
	fd      int
	tls     *tlsStream // nil: plaintext
	request uint64
}

// setupTimeout bounds each answer during set-up.
const setupTimeout = 10 * time.Second

// dialLink connects, and makes the TLS handshake where there is one.
func dialLink(at server, i int) (*link, error) {
	fd, err := dial(at.AddrPort, i, false)
	if err != nil {
		return nil, err
	}
	l := &link{fd: fd}
	tv := syscall.NsecToTimeval(int64(setupTimeout))
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &tv)
	if at.tls != nil {
		_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
		if l.tls, err = at.tls.secure(fd); err != nil {
			syscall.Close(fd)
			return nil, err
		}
	}
	return l, nil
}

// acceptLink is the server's side of dialLink with TLS; it closes the descriptor when the handshake fails.
func acceptLink(fd int, config *tls.Config) (*link, error) {
	err := syscall.SetNonblock(fd, false)
	if err == nil {
		tv := syscall.NsecToTimeval(int64(setupTimeout))
		_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &tv)
		_ = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
		s := &tlsStream{fd: fd}
		s.conn = tls.Server(s, config)
		if err = s.conn.Handshake(); err == nil {
			return &link{fd: fd, tls: s}, nil
		}
	}
	syscall.Close(fd)
	return nil, fmt.Errorf("TLS handshake: %w", err)
}

// openLink is dialLink with CONNECT; target is the broker that a LOOKUP named, "" for a connection for lookups.
func openLink(at server, i int, target string) (*link, error) {
	l, err := dialLink(at, i)
	if err != nil {
		return nil, err
	}
	if _, err := l.ask(connectFrame(target), codec.TypeConnected); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// ask writes a frame and reads one, which must be of that type. PINGs are answered and left out.
func (l *link) ask(frame []byte, want codec.Type) (*pulsarpb.BaseCommand, error) {
	if err := l.write(frame); err != nil {
		return nil, err
	}
	for {
		cmd, err := l.read()
		if err != nil {
			return nil, fmt.Errorf("waiting for %s: %w", want, err)
		}
		switch got := codec.Type(cmd.GetType()); got {
		case want:
			return cmd, nil
		case codec.TypePing:
			if err := l.write(pongFrame); err != nil {
				return nil, err
			}
		default:
			return nil, fmt.Errorf("received %s, want %s: %v", got, want, cmd)
		}
	}
}

var pongFrame = commandFrame(codec.TypePong, &pulsarpb.BaseCommand{Pong: &pulsarpb.CommandPong{}})

func (l *link) write(src []byte) error {
	if l.tls != nil {
		_, err := l.tls.conn.Write(src)
		return err
	}
	for len(src) > 0 {
		n, err := syscall.Write(l.fd, src)
		if err != nil && err != syscall.EINTR {
			return fmt.Errorf("write: %w", err)
		}
		src = src[max(n, 0):]
	}
	return nil
}

func (l *link) read() (*pulsarpb.BaseCommand, error) {
	frame := make([]byte, 4)
	if err := l.readFull(frame); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(frame)
	if size > 1<<20 {
		return nil, fmt.Errorf("a frame of %d bytes during set-up", size)
	}
	frame = append(frame, make([]byte, size)...)
	if err := l.readFull(frame[4:]); err != nil {
		return nil, err
	}
	h, err := parseHead(frame)
	if err != nil {
		return nil, err
	}
	cmd := new(pulsarpb.BaseCommand)
	return cmd, codec.Parse(cmd, frame, h)
}

func (l *link) readFull(dst []byte) error {
	if l.tls != nil {
		_, err := io.ReadFull(l.tls.conn, dst)
		return err
	}
	for len(dst) > 0 {
		n, err := syscall.Read(l.fd, dst)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return errors.New("no answer within " + setupTimeout.String())
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		default:
			dst = dst[n:]
		}
	}
	return nil
}

// lookup asks for the owner of a topic and returns it as clients put it into proxy_to_broker_url.
func (l *link) lookup(topic string) (target string, err error) {
	l.request++
	cmd, err := l.ask(lookupFrame(topic, l.request), codec.TypeLookupResponse)
	if err != nil {
		return "", err
	}
	a := cmd.GetLookupTopicResponse()
	if a.GetResponse() != codec.LookupConnect {
		return "", fmt.Errorf("LOOKUP of %s answered %v", topic, a)
	}
	return brokerTarget(a), nil
}

func (l *link) producer(topic string, id int) error {
	l.request++
	_, err := l.ask(producerFrame(topic, uint64(id), l.request), codec.TypeProducerSuccess)
	return err
}

func (l *link) consumer(topic string, id, size int) error {
	l.request++
	_, err := l.ask(subscribeFrame(topic, uint64(id), l.request, size), codec.TypeSuccess)
	return err
}

func (l *link) close() {
	l.tls.goodbye()
	syscall.Close(l.fd)
}

// bridges opens n connections as clients do: a lookup on a connection of its own, then CONNECT with the target; set goes on from there.
// The lookup connection is closed afterwards: these scenarios count bridged connections only.
func bridges(at server, n int, set func(l *link, i int) error) ([]*link, error) {
	links := make([]*link, n)
	err := each(n, func(i int) error {
		asking, err := openLink(at, i, "")
		if err != nil {
			return err
		}
		target, err := asking.lookup(benchTopic(i))
		asking.close()
		if err != nil {
			return err
		}
		if links[i], err = openLink(at, i, target); err != nil {
			return err
		}
		return set(links[i], i)
	})
	if err != nil {
		closeLinks(links)
		return nil, fmt.Errorf("set-up of %d connections to %s: %w", n, at, err)
	}
	return links, nil
}

func closeLinks(links []*link) {
	for _, l := range links {
		if l != nil {
			l.close()
		}
	}
}

// each calls f for 0 to n−1, several at a time, and returns the first error.
func each(n int, f func(i int) error) error {
	const workers = 16
	var wg sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n && errs[w] == nil; i += workers {
				errs[w] = f(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
