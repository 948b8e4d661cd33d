package switching

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pointsman/core/route"
	"pointsman/internal/golden"
)

// A scenario is a conversation with a Controller, over a store of one entry and one record. Lines of a script:
//
//	# comment
//	leader                 a new leader takes over
//	at 3s                  the time since the beginning
//	wish abort             an operator writes the record
//	nudge                  something has changed
//	entry a/active/1       somebody else writes the entry (cluster/state/epoch, then /switch/attempt); "entry absent" removes it
//	record done            somebody else ends the record
//	again                  an operator asks for the next attempt
//	drain                  the switch is to drain (at the beginning)
//	back                   an operator asks for the way back of a drain
//	ok|conflict|unknown|notyet|never|lost [key=value ...]
//	                       the answer to the step; a write is done on ok and unknown, not done on lost, which is also unknown to the
//	                       controller. Values have _ for spaces. Keys: why, tail, publishers, foreign; of a drain tails=7:99,…, subs=one,…,
//	                       sub=name:backlog[:unacked[:connected[:by]]], readers=1; of a survey member=p1:i1[:gone|:aged],
//	                       ack=p1:i1:prepared, ack=p1:i1:fenced[:dirty][:claims,…], ack=p1:i1:evicting, tombstone=p1
//
// Each is followed by the next step, two spaces indented; `go test ./core/switching -rewrite` writes those down.
type scenario struct {
	t      *testing.T
	start  time.Time
	now    time.Time
	entry  route.Entry
	rec    Record
	leader Controller
}

func newScenario(t *testing.T) *scenario {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := &scenario{t: t, start: start, now: start}
	s.entry = route.Entry{Topic: "persistent://acme/ns/t", Cluster: "a", Epoch: 4}
	s.rec = Record{ID: "s1", Rev: 1, Attempt: 1, Topic: s.entry.Topic, From: "a", To: "b", Mode: ModePlanned, State: StateRequested, Epoch: 5}
	s.leader = NewController(s.rec)
	return s
}

func (s *scenario) recordState() RecordState {
	return RecordState{Rev: s.rec.Rev, Attempt: s.rec.Attempt, State: s.rec.State, Wish: s.rec.Wish, Note: s.rec.Note, Return: s.rec.Return}
}

func (s *scenario) setRecord(r RecordState) {
	s.rec.Rev, s.rec.State, s.rec.Note, s.rec.Return = r.Rev, r.State, r.Note, r.Return
}

var scenarioStates = map[string]route.State{"active": route.StateActive, "prepared": route.StatePrepared, "fenced": route.StateFenced, "draining": route.StateDraining}

// play does one line.
func (s *scenario) play(line string) {
	words := strings.Fields(line)
	arg := func() string {
		if len(words) != 2 {
			s.t.Fatalf("%q: one argument is missing", line)
		}
		return words[1]
	}
	answers := map[string]Answer{"ok": OK, "conflict": Conflict, "unknown": Unknown, "lost": Unknown, "notyet": NotYet, "never": Never}
	switch words[0] {
	case "leader":
		s.leader = NewController(s.rec)
	case "at":
		d, err := time.ParseDuration(arg())
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.start.Add(d)
	case "wish":
		s.rec.Rev, s.rec.Wish = s.rec.Rev+1, Wish(strings.TrimSuffix(arg(), "none"))
	case "nudge":
		s.leader.Nudge()
	case "again":
		s.rec = s.rec.Again(s.now)
	case "drain":
		s.rec.Mode = ModeDrain
		s.leader = NewController(s.rec)
	case "back":
		s.rec = s.rec.Back()
	case "record":
		s.rec.Rev, s.rec.State = s.rec.Rev+1, State(arg())
	case "entry":
		s.entry = s.parseEntry(arg())
	default:
		answer, ok := answers[words[0]]
		if !ok {
			s.t.Fatalf("%q: no such line", line)
		}
		s.answer(answer, words[0] != "lost", words[1:])
	}
}

func (s *scenario) parseEntry(text string) route.Entry {
	if text == "absent" {
		return route.Entry{}
	}
	e := route.Entry{Topic: s.rec.Topic}
	parts := strings.Split(text, "/")
	e.Cluster, e.State = parts[0], scenarioStates[parts[1]]
	fmt.Sscan(parts[2], &e.Epoch)
	if len(parts) > 4 {
		e.SwitchID = parts[3]
		fmt.Sscan(parts[4], &e.Attempt)
	}
	if len(parts) > 5 {
		e.Drain = parts[5]
	}
	return e
}

func (s *scenario) answer(answer Answer, done bool, args []string) {
	step := s.leader.Next(s.now)
	r := Report{Answer: answer, Began: s.now, Entry: s.entry, Record: s.recordState()}
	if s.entry.Topic == "" { // a rule maps it to a
		r.Absent, r.Entry = true, route.Entry{Topic: s.rec.Topic, Cluster: "a", Epoch: 4}
	}
	if done && (answer == OK || answer == Unknown) {
		switch step.Work {
		case WorkWrite:
			if step.Before != s.entry || step.Record.Rev != s.rec.Rev+1 {
				s.t.Fatalf("a write of %+v over %+v, record %+v, cannot be %v", step, s.entry, s.rec, answer)
			}
			s.entry = step.After
			s.setRecord(step.Record)
		case WorkRecord:
			s.setRecord(step.Record)
		}
	}
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		value = strings.ReplaceAll(value, "_", " ")
		parts := strings.Split(value, ":")
		switch key {
		case "why":
			r.Why = value
		case "late":
			r.Late = true
		case "tail":
			r.Tail = value
		case "publishers":
			for name := range strings.SplitSeq(value, ",") {
				r.Publishers = append(r.Publishers, Publisher{Name: name, Text: name + " from 10.0.0.9"})
			}
		case "foreign":
			r.Foreign = value
		case "tails":
			for text := range strings.SplitSeq(value, ",") {
				var t route.Tail
				fmt.Sscanf(text, "%d:%d", &t.Ledger, &t.Entry)
				r.Tails = append(r.Tails, t)
			}
		case "subs":
			r.Subs = strings.Split(value, ",")
		case "sub":
			f := SubFact{Name: parts[0]}
			for i, to := range []any{nil, &f.Backlog, &f.Unacked, &f.Consumers} {
				if i > 0 && i < len(parts) {
					fmt.Sscan(parts[i], to)
				}
			}
			if len(parts) > 4 {
				f.By = parts[4]
			}
			r.Drained.Subs = append(r.Drained.Subs, f)
		case "readers":
			fmt.Sscan(value, &r.Drained.Readers)
		case "member":
			m := MemberFact{Member: Member{parts[0], parts[1]}, Live: len(parts) < 3}
			m.Aged = !m.Live && parts[2] == "aged"
			r.Survey.Members = append(r.Survey.Members, m)
		case "tombstone":
			r.Survey.Tombstones = append(r.Survey.Tombstones, value)
		case "ack":
			a := Ack{Proxy: parts[0], Incarnation: parts[1], Phase: State(parts[2]), Attempt: s.rec.Attempt, Clean: true}
			for _, more := range parts[3:] {
				switch {
				case more == "dirty":
					a.Clean, a.Why = false, "leg lost with 3 messages on the way"
				case strings.HasPrefix(more, "attempt"):
					fmt.Sscan(strings.TrimPrefix(more, "attempt"), &a.Attempt)
				default:
					a.Claims = strings.Split(more, ",")
				}
			}
			r.Survey.Acks = append(r.Survey.Acks, a)
		default:
			s.t.Fatalf("no such key: %s", arg)
		}
	}
	s.leader.Observe(s.now, step, r)
}

func (s *scenario) describe(step Step) string {
	entry := func(e route.Entry) string {
		if e.Topic == "" {
			return "absent"
		}
		text := fmt.Sprintf("%s/%s/%d", e.Cluster, stateName(e.State), e.Epoch)
		if e.SwitchID != "" {
			text += fmt.Sprintf("/%s/%d", e.SwitchID, e.Attempt)
		}
		if e.Drain != "" {
			text += " [" + e.Drain + "]"
		}
		return text
	}
	text := step.Work.String()
	switch step.Work {
	case WorkWait:
		text += fmt.Sprintf(" until %v", step.Until.Sub(s.start))
		if step.Why != "" {
			text += ": " + step.Why
		}
	case WorkWrite:
		text += " " + entry(step.Before) + " > " + entry(step.After)
	}
	if step.Tail != "" {
		text += " after " + step.Tail
	}
	if step.Drain != "" {
		text += " of " + step.Drain
	}
	if step.Return && step.Work != WorkWait {
		text += " (back)"
	}
	if step.Record.State != "" {
		text += fmt.Sprintf(", record %d %s", step.Record.Rev, step.Record.State)
		if step.Record.Return {
			text += " back"
		}
		if step.Record.Note != "" {
			text += " (" + step.Record.Note + ")"
		}
	}
	return text
}

func TestScenariosOfTheController(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			s := newScenario(t)
			var out strings.Builder
			for line := range strings.Lines(string(text)) {
				line = strings.TrimSuffix(line, "\n")
				switch {
				case strings.HasPrefix(line, "  "):
				case line == "" || strings.HasPrefix(line, "#"):
					out.WriteString(line + "\n")
				default:
					if line == "new" {
						s = newScenario(t)
					} else {
						s.play(line)
					}
					out.WriteString(line + "\n  " + s.describe(s.leader.Next(s.now)) + "\n")
				}
			}
			golden.File(t, filepath.Base(file), out.String())
		})
	}
}
