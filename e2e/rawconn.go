package e2e

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"

	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

// Command types of the protocol that the raw connection uses.
const (
	cmdConnect   = 2
	cmdConnected = 3
	cmdError     = 14
	cmdPing      = 18
	cmdPong      = 19
	cmdLookup    = 23
)

// protocolVersion is what the Java client of 4.0.8 says.
const protocolVersion = 21

// RawConn speaks single commands to a proxy, for what no client library would say.
type RawConn struct {
	conn net.Conn
}

// DialRaw connects to "host:port". Everything on the connection must happen within limit.
func DialRaw(addr string, limit time.Duration) (*RawConn, error) {
	conn, err := net.DialTimeout("tcp", addr, limit)
	if err != nil {
		return nil, err
	}
	return &RawConn{conn: conn}, conn.SetDeadline(time.Now().Add(limit))
}

// Close closes the connection.
func (c *RawConn) Close() { _ = c.conn.Close() }

// Send writes one command.
func (c *RawConn) Send(cmd *pulsarpb.BaseCommand) error {
	body, err := proto.Marshal(cmd)
	if err != nil {
		return err
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(body)))
	_, err = c.conn.Write(append(frame, body...))
	return err
}

// Receive reads one command and answers PINGs, of which one comes first when the proxy had nothing else to say for a while; io.EOF when the peer has closed.
func (c *RawConn) Receive() (*pulsarpb.BaseCommand, error) {
	for {
		cmd, err := c.receive()
		if err != nil || cmd.GetType() != cmdPing {
			return cmd, err
		}
		if err := c.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdPong), Pong: &pulsarpb.CommandPong{}}); err != nil {
			return nil, err
		}
	}
}

func (c *RawConn) receive() (*pulsarpb.BaseCommand, error) {
	var head [8]byte
	if _, err := io.ReadFull(c.conn, head[:]); err != nil {
		return nil, err
	}
	total, size := binary.BigEndian.Uint32(head[:4]), binary.BigEndian.Uint32(head[4:])
	if total > 6<<20 || size > total-4 {
		return nil, fmt.Errorf("frame of %d bytes with a command of %d: not the Pulsar protocol", total, size)
	}
	body := make([]byte, total-4)
	if _, err := io.ReadFull(c.conn, body); err != nil {
		return nil, err
	}
	cmd := &pulsarpb.BaseCommand{}
	return cmd, proto.Unmarshal(body[:size], cmd)
}

// Connect says CONNECT, with a target unless target is nil, and returns the answer.
func (c *RawConn) Connect(target *string) (*pulsarpb.BaseCommand, error) {
	if err := c.Send(&pulsarpb.BaseCommand{Type: proto.Int32(cmdConnect), Connect: &pulsarpb.CommandConnect{
		ClientVersion: proto.String("Pulsar-E2E"), ProtocolVersion: proto.Int32(protocolVersion), ProxyToBrokerUrl: target,
	}}); err != nil {
		return nil, err
	}
	return c.Receive()
}
