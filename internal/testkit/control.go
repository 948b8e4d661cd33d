package testkit

import (
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// Hook is asked about a command before the broker handles it. When it returns true the command counts as handled. It
// runs on the connection's own goroutine, so that waiting in it delays everything that comes later on the connection; it
// must not keep cmd's payload.
type Hook func(c *Conn, cmd *pulsarpb.BaseCommand) (handled bool)

// Handle puts a hook in front of a type of command. The newest hook is asked first, and an older one only when it
// returned false. The returned function takes the hook away.
func (b *Broker) Handle(t codec.Type, fn Hook) (remove func()) {
	h := &hook{typ: t, fn: fn}
	b.mu.Lock()
	b.hooks = append(b.hooks, h)
	b.mu.Unlock()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.hooks = slices.DeleteFunc(b.hooks, func(x *hook) bool { return x == h })
	}
}

// Handle puts a hook in front of a type of command at every broker.
func (c *Cluster) Handle(t codec.Type, fn Hook) (remove func()) {
	var removes []func()
	for _, b := range c.brokers {
		removes = append(removes, b.Handle(t, fn))
	}
	return func() {
		for _, r := range removes {
			r()
		}
	}
}

// Drop swallows the command.
func Drop(*Conn, *pulsarpb.BaseCommand) bool { return true }

// Delay lets the command wait, and everything behind it on its connection.
func Delay(d time.Duration) Hook {
	return func(c *Conn, _ *pulsarpb.BaseCommand) bool {
		c.Wait(d)
		return false
	}
}

// Hold lets commands wait until release is closed.
func Hold(release <-chan struct{}) Hook {
	return func(c *Conn, _ *pulsarpb.BaseCommand) bool {
		select {
		case <-release:
		case <-c.ctx.Done():
		}
		return false
	}
}

// Refuse answers with an error, in the response type of the command. A CONNECT that is refused ends its connection.
func Refuse(code codec.ServerError, text string) Hook {
	return func(c *Conn, cmd *pulsarpb.BaseCommand) bool {
		c.Fail(cmd, code, text)
		return true
	}
}

// HangUp ends the connection in good order.
func HangUp(c *Conn, _ *pulsarpb.BaseCommand) bool {
	c.Close()
	return true
}

// HangUpInsideFrame sends the first bytes of a frame, and ends the connection.
func HangUpInsideFrame(c *Conn, _ *pulsarpb.BaseCommand) bool {
	whole := codec.AppendCommand(nil, &pulsarpb.BaseCommand{Type: typeOf(codec.TypePing), Ping: &pulsarpb.CommandPing{}})
	c.SendRaw(whole[:len(whole)-2])
	c.Close()
	return true
}

// GoDeaf makes the connection read nothing more; it still writes.
func GoDeaf(c *Conn, _ *pulsarpb.BaseCommand) bool {
	c.StopReading()
	return false
}

// Times asks fn for the first n commands only.
func Times(n int, fn Hook) Hook {
	var left atomic.Int64
	left.Store(int64(n))
	return func(c *Conn, cmd *pulsarpb.BaseCommand) bool {
		return left.Add(-1) >= 0 && fn(c, cmd)
	}
}

// ForTopic asks fn only for commands that name that topic.
func ForTopic(name string, fn Hook) Hook {
	name = canonical(name)
	return func(c *Conn, cmd *pulsarpb.BaseCommand) bool {
		return canonical(topicOf(cmd)) == name && fn(c, cmd)
	}
}

// Fail answers cmd with an error, in the response type of the command.
func (c *Conn) Fail(cmd *pulsarpb.BaseCommand, code codec.ServerError, text string) {
	id, num := requestID(cmd), int32(code)
	switch codec.Type(cmd.GetType()) {
	case codec.TypeConnect:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeError), Error: &pulsarpb.CommandError{
			RequestId: ptr(codec.NoRequest), Error: &num, Message: &text}})
		c.Close()
	case codec.TypeLookup:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeLookupResponse), LookupTopicResponse: &pulsarpb.CommandLookupTopicResponse{
			RequestId: &id, Response: ptr(codec.LookupFailed), Error: &num, Message: &text}})
	case codec.TypePartitionedMetadata:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypePartitionedMetadataResp),
			PartitionMetadataResponse: &pulsarpb.CommandPartitionedTopicMetadataResponse{
				RequestId: &id, Response: ptr(codec.MetadataFailed), Error: &num, Message: &text}})
	case codec.TypeGetSchema:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetSchemaResponse), GetSchemaResponse: &pulsarpb.CommandGetSchemaResponse{
			RequestId: &id, ErrorCode: &num, ErrorMessage: &text}})
	case codec.TypeGetOrCreateSchema:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeGetOrCreateSchemaResponse),
			GetOrCreateSchemaResponse: &pulsarpb.CommandGetOrCreateSchemaResponse{RequestId: &id, ErrorCode: &num, ErrorMessage: &text}})
	case codec.TypeSend:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeSendError), SendError: &pulsarpb.CommandSendError{
			ProducerId: cmd.GetSend().ProducerId, SequenceId: cmd.GetSend().SequenceId, Error: &num, Message: &text}})
	case codec.TypeAck:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeAckResponse), AckResponse: &pulsarpb.CommandAckResponse{
			ConsumerId: cmd.GetAck().ConsumerId, RequestId: &id, Error: &num, Message: &text}})
	default:
		c.Send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeError), Error: &pulsarpb.CommandError{
			RequestId: &id, Error: &num, Message: &text}})
	}
}

// requestID is the request id of a command, or NoRequest.
func requestID(cmd *pulsarpb.BaseCommand) uint64 {
	if v, ok := subField(cmd, "request_id"); ok {
		return v.Uint()
	}
	return codec.NoRequest
}

// topicOf is the topic that a command names, or "".
func topicOf(cmd *pulsarpb.BaseCommand) string {
	if v, ok := subField(cmd, "topic"); ok {
		return v.String()
	}
	return ""
}

// subField reads a field of the command's sub-message by name.
func subField(cmd *pulsarpb.BaseCommand, name protoreflect.Name) (protoreflect.Value, bool) {
	m := cmd.ProtoReflect()
	fd := m.Descriptor().Fields().ByNumber(protoreflect.FieldNumber(cmd.GetType()))
	if fd == nil || fd.Message() == nil || !m.Has(fd) {
		return protoreflect.Value{}, false
	}
	sub := m.Get(fd).Message()
	field := sub.Descriptor().Fields().ByName(name)
	if field == nil || !sub.Has(field) {
		return protoreflect.Value{}, false
	}
	return sub.Get(field), true
}

func typeOf(t codec.Type) *int32 { return ptr(int32(t)) }

func ptr[T any](v T) *T { return &v }
