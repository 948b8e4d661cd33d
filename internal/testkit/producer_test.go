package testkit

import (
	"testing"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// As a broker does: late messages of a producer that it closed are ignored; those of one that the client closed, or
// never opened, end the connection with everything on it.
func TestAMessageWithoutAProducerEndsTheConnection(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	if err := c.Unload(topicT, nil, false); err != nil {
		t.Fatal(err)
	}
	r.readType(codec.TypeCloseProducer)
	r.write(sendFrame(1, 0, []byte("late")))
	r.send(producerCommand(topicT, "p", 1))
	r.readType(codec.TypeProducerSuccess)
	r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeCloseProducer), CloseProducer: &pulsarpb.CommandCloseProducer{
		ProducerId: ptr(uint64(1)), RequestId: ptr(uint64(1))}})
	r.readType(codec.TypeSuccess)
	r.write(sendFrame(1, 0, []byte("late")))
	r.ended()
	if n := len(c.Messages(topicT)); n != 0 {
		t.Fatalf("%d messages were stored", n)
	}
}

func TestAProducerThatWaitsForExclusiveAccessIsToldWhenItHasIt(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	with := func(mode int32, id uint64, epoch *uint64) *pulsarpb.BaseCommand {
		cmd := producerCommand(topicT, "p"+string(rune('0'+id)), id)
		cmd.Producer.ProducerAccessMode, cmd.Producer.TopicEpoch = &mode, epoch
		return cmd
	}
	r.send(with(accessExclusive, 1, nil))
	if got := r.readType(codec.TypeProducerSuccess).GetProducerSuccess(); got.TopicEpoch == nil || got.GetTopicEpoch() != 0 {
		t.Fatalf("the first: %v", got)
	}
	r.send(with(0, 2, nil))
	r.readType(codec.TypeError)
	r.send(with(accessWaitForExclusive, 3, nil))
	if got := r.readType(codec.TypeProducerSuccess).GetProducerSuccess(); got.GetProducerReady() {
		t.Fatalf("the waiting one: %v", got)
	}
	r.send(&pulsarpb.BaseCommand{Type: typeOf(codec.TypeCloseProducer), CloseProducer: &pulsarpb.CommandCloseProducer{
		ProducerId: ptr(uint64(1)), RequestId: ptr(uint64(1))}})
	r.readType(codec.TypeSuccess)
	if got := r.readType(codec.TypeProducerSuccess).GetProducerSuccess(); !got.GetProducerReady() || got.GetRequestId() != 103 || got.GetTopicEpoch() != 1 {
		t.Fatalf("the waiting one, later: %v", got)
	}
	r.send(with(accessExclusive, 4, ptr(uint64(0))))
	if got := r.readType(codec.TypeError).GetError(); codec.ServerError(got.GetError()) != codec.ErrorProducerFenced {
		t.Fatalf("one of an older epoch: %v", got)
	}
}

// LK-14: a broker ends the connection of a command number that it has never heard of, and refuses one that it does not do.
func TestUnknownCommandsAreTreatedAsABrokerDoes(t *testing.T) {
	c := start(t, Options{})
	r := connect(t, c.Broker(0))
	r.send(&pulsarpb.BaseCommand{Type: ptr(int32(50))})
	if got := r.readType(codec.TypeError).GetError(); codec.ServerError(got.GetError()) != codec.ErrorNotAllowed {
		t.Fatalf("answer %v", got)
	}
	r.send(&pulsarpb.BaseCommand{Type: ptr(int32(900))})
	r.ended()
}
