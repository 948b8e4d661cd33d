package session

import (
	"errors"
	"fmt"
	"time"

	"pointsman/codec"
	"pointsman/codec/pulsarpb"
)

// close ends the session: broker legs first, so that the brokers free names and subscriptions before the client comes
// back. What was relayed before is still sent. Calling it again does nothing.
func (s *Session) close(now time.Time, cause Cause, text string) {
	if s.state == stateClosed {
		return
	}
	c := s.sh.counters
	if s.state == stateBridged {
		c.Bridged.Add(-1)
		c.cluster(s.leg.cluster).Bridged.Add(-1)
	}
	s.state = stateClosed
	r := Report{Event: EventClosed, Session: s.id, Peer: s.peer, Cause: cause, Text: text}
	if s.leg != nil {
		r.Cluster, r.Broker = s.leg.cluster, s.leg.broker
		s.leg.close()
	}
	for _, l := range s.extraLegs() {
		l.close()
	}
	if s.conn != 0 {
		s.sh.ops = append(s.sh.ops, Op{Kind: OpClose, Conn: s.conn, Flush: true})
		s.conn = 0
	}
	s.sh.timers.stop(&s.timer)
	for _, p := range s.pending {
		if p.kind.moves() {
			s.sh.answered(now, keyOf(p.h))
		}
		s.sh.payDebt(now, p.h, true) // of handles as well that are no longer among those below
	}
	for _, h := range s.producers {
		if h.owed {
			s.sh.payDebt(now, h, true)
		} else if h.owes() {
			s.sh.debts.lose(now, h)
		}
		s.unindex(now, h)
	}
	for _, h := range s.consumers {
		s.sh.payDebt(now, h, true)
		h.takeQueue()
		h.waiting.cancel()
		s.unindex(now, h)
	}
	for p := range s.parked {
		p.drop()
	}
	if s.leg != nil {
		s.leg.passMarks(now)
	}
	s.closeAside(now)
	s.producers, s.consumers, s.pending, s.lastP, s.lastC, s.deferred = nil, nil, nil, nil, nil, nil
	if s.ident != nil {
		s.sh.pool.releaseIdentity(s.ident)
	}
	delete(s.sh.sessions, s)
	c.Active.Add(-1)
	c.Closed[cause].Add(1)
	s.sh.report(r)
}

// refuse tells the client why, then closes.
func (s *Session) refuse(now time.Time, cause Cause, code codec.ServerError, text string) {
	s.sendCommand(errorCommand(codec.NoRequest, code, s.say(text)))
	s.close(now, cause, text)
}

// failConnect ends a session whose leg could not be made.
func (s *Session) failConnect(now time.Time, cause Cause, text string) {
	s.refuse(now, cause, codec.ErrorServiceNotReady, text)
}

// closeMalformed ends a session whose client does not speak the protocol.
func (s *Session) closeMalformed(now time.Time, err error) {
	cause := CauseClientFrame
	switch {
	case errors.Is(err, codec.ErrTLSHello):
		cause = CauseClientTLSHello
	case errors.Is(err, codec.ErrHTTP):
		cause = CauseClientHTTP
	}
	s.close(now, cause, err.Error())
}

// say puts the connection id behind an error text, so that the client's log leads to ours.
func (s *Session) say(text string) string { return fmt.Sprintf("%s [pointsman conn=%x]", text, s.id) }

// deny answers one request with an error of the proxy's own and counts it.
func (s *Session) deny(reason Refusal, req uint64, code codec.ServerError, topic, text string) {
	s.noteRefusal(reason, topic, text)
	s.sendCommand(errorCommand(req, code, s.say(text)))
}

func (s *Session) noteRefusal(reason Refusal, topic, text string) {
	s.sh.counters.Refused[reason].Add(1)
	s.sh.report(Report{Event: EventRefused, Session: s.id, Peer: s.peer, Refusal: reason, Topic: topic, Text: text})
}

func errorCommand(req uint64, code codec.ServerError, text string) *pulsarpb.BaseCommand {
	c := int32(code)
	return command(codec.TypeError, &pulsarpb.BaseCommand{Error: &pulsarpb.CommandError{RequestId: &req, Error: &c, Message: &text}})
}

func successCommand(req uint64) *pulsarpb.BaseCommand {
	return command(codec.TypeSuccess, &pulsarpb.BaseCommand{Success: &pulsarpb.CommandSuccess{RequestId: &req}})
}

func command(t codec.Type, cmd *pulsarpb.BaseCommand) *pulsarpb.BaseCommand {
	n := int32(t)
	cmd.Type = &n
	return cmd
}
