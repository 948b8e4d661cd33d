package codec

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"pointsman/codec/pulsarpb"
)

func lookupCommand(l *pulsarpb.CommandLookupTopic) []byte {
	return AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeLookup)), LookupTopic: l})
}

func partitionsCommand(m *pulsarpb.CommandPartitionedTopicMetadata) []byte {
	return AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypePartitionedMetadata)), PartitionMetadata: m})
}

func lookupResponse(r *pulsarpb.CommandLookupTopicResponse) []byte {
	return AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypeLookupResponse)), LookupTopicResponse: r})
}

func partitionsResponse(r *pulsarpb.CommandPartitionedTopicMetadataResponse) []byte {
	return AppendCommand(nil, &pulsarpb.BaseCommand{Type: proto.Int32(int32(TypePartitionedMetadataResp)), PartitionMetadataResponse: r})
}

// subFrame is a frame of type t (below 128) whose command is one sub-message of these bytes.
func subFrame(t Type, sub ...[]byte) []byte {
	return frame(join(varintField(1, uint64(t)), bytesField(protowire.Number(t), join(sub...))))
}

var (
	aTopic = bytesField(1, []byte("persistent://t/n/x"))
	anID   = varintField(2, 7)
	anURL  = bytesField(1, []byte("pulsar://broker-0:6650"))
	aTLS   = bytesField(2, []byte("pulsar+ssl://broker-0:6651"))
)

// plainQuestions and plainResponses are in the form that is read without the general decoder.
func plainQuestions() map[string][]byte {
	topic := proto.String("persistent://t/n/x-partition-3")
	return map[string][]byte{
		"lookup":                    lookupCommand(&pulsarpb.CommandLookupTopic{Topic: topic, RequestId: proto.Uint64(9)}),
		"lookup of a client":        lookupCommand(&pulsarpb.CommandLookupTopic{Topic: topic, RequestId: proto.Uint64(1 << 40), Authoritative: proto.Bool(true), AdvertisedListenerName: proto.String("internal")}),
		"lookup, id first":          subFrame(TypeLookup, anID, aTopic),
		"lookup, unknown fields":    subFrame(TypeLookup, varintField(9, 1<<50), aTopic, bytesField(15, []byte("new")), anID, bytesField(9, nil)),
		"lookup, overlong id":       subFrame(TypeLookup, aTopic, []byte{0x10, 0x87, 0x80, 0x00}),
		"lookup, no topic":          subFrame(TypeLookup, bytesField(1, nil), anID),
		"partitions":                partitionsCommand(&pulsarpb.CommandPartitionedTopicMetadata{Topic: topic, RequestId: proto.Uint64(NoRequest), MetadataAutoCreationEnabled: proto.Bool(false)}),
		"partitions, unknown field": subFrame(TypePartitionedMetadata, aTopic, varintField(8, 3), anID),
		"lookup with a payload":     frame(lookupCommand(&pulsarpb.CommandLookupTopic{Topic: topic, RequestId: proto.Uint64(9)})[prefixLen:], 1, 2, 3),
	}
}

// unusualQuestions and unusualResponses are for the general decoder.
func unusualQuestions() map[string][]byte {
	return map[string][]byte{
		"two topics":              subFrame(TypeLookup, aTopic, anID, bytesField(1, []byte("persistent://t/n/y"))),
		"two ids":                 subFrame(TypeLookup, aTopic, anID, varintField(2, 8)),
		"no id":                   subFrame(TypeLookup, aTopic),
		"no topic":                subFrame(TypePartitionedMetadata, anID),
		"topic as a number":       subFrame(TypeLookup, varintField(1, 5), aTopic, anID),
		"empty listener":          subFrame(TypeLookup, aTopic, anID, bytesField(7, nil)),
		"a property":              subFrame(TypeLookup, aTopic, anID, bytesField(8, join(bytesField(1, []byte("k")), bytesField(2, []byte("v"))))),
		"an original principal":   subFrame(TypeLookup, aTopic, anID, bytesField(4, []byte("admin"))),
		"original auth data":      subFrame(TypePartitionedMetadata, aTopic, anID, bytesField(4, []byte("secret"))),
		"a fixed field":           subFrame(TypeLookup, aTopic, anID, []byte{15<<3 | 5, 1, 2, 3, 4}),
		"a group":                 subFrame(TypeLookup, aTopic, anID, []byte{15<<3 | 3, 15<<3 | 4}),
		"a tag of two bytes":      subFrame(TypeLookup, aTopic, anID, varintField(16, 1)),
		"a cut field":             subFrame(TypeLookup, aTopic, anID, []byte{9<<3 | 2, 5, 1}),
		"a number without end":    subFrame(TypeLookup, aTopic, anID, []byte{9 << 3}, bytes.Repeat([]byte{0xff}, 10)),
		"two sub-messages":        frame(join(varintField(1, 23), bytesField(23, join(aTopic, anID)), bytesField(23, bytesField(1, []byte("y"))))),
		"a field in front":        frame(join(varintField(100, 1), varintField(1, 23), bytesField(23, join(aTopic, anID)))),
		"a sub-message of others": frame(join(varintField(1, 23), bytesField(21, join(aTopic, anID)), bytesField(23, join(aTopic, anID)))),
		"an overlong type":        frame(join([]byte{0x08, 0x97, 0x00}, bytesField(23, join(aTopic, anID)))),
		"another command":         corpus()["producer"],
	}
}

func plainResponses() map[string][]byte {
	return map[string][]byte{
		"lookup": lookupResponse(&pulsarpb.CommandLookupTopicResponse{BrokerServiceUrl: proto.String("pulsar://b:6650"), Response: proto.Int32(LookupConnect),
			RequestId: proto.Uint64(5), Authoritative: proto.Bool(true)}),
		"lookup, all fields": lookupResponse(&pulsarpb.CommandLookupTopicResponse{BrokerServiceUrl: proto.String("pulsar://b:6650"), BrokerServiceUrlTls: proto.String("pulsar+ssl://b:6651"),
			Response: proto.Int32(LookupConnect), RequestId: proto.Uint64(1 << 60), Authoritative: proto.Bool(false), Error: proto.Int32(-1), Message: proto.String("m"), ProxyThroughServiceUrl: proto.Bool(false)}),
		"lookup, unknown fields": subFrame(TypeLookupResponse, bytesField(12, []byte("new")), anURL, varintField(3, 1), varintField(15, 1<<63), varintField(4, 3), aTLS),
		"lookup, no URL":         subFrame(TypeLookupResponse, varintField(3, 1), varintField(4, 3)),
		"partitions":             partitionsResponse(&pulsarpb.CommandPartitionedTopicMetadataResponse{Partitions: proto.Uint32(300), RequestId: proto.Uint64(5), Response: proto.Int32(0)}),
		"partitions, no outcome": partitionsResponse(&pulsarpb.CommandPartitionedTopicMetadataResponse{Partitions: proto.Uint32(1), RequestId: proto.Uint64(5), Message: proto.String("m")}),
		"partitions, unknown":    subFrame(TypePartitionedMetadataResp, varintField(9, 9), varintField(2, 1), varintField(1, 4)),
	}
}

func unusualResponses() map[string][]byte {
	return map[string][]byte{
		"redirect":            subFrame(TypeLookupResponse, anURL, varintField(3, 0), varintField(4, 3)),
		"no outcome":          subFrame(TypeLookupResponse, anURL, varintField(4, 3)),
		"failed":              subFrame(TypeLookupResponse, varintField(3, 2), varintField(4, 3), varintField(6, 6)),
		"no id":               subFrame(TypeLookupResponse, anURL, varintField(3, 1)),
		"two URLs":            subFrame(TypeLookupResponse, anURL, anURL, varintField(3, 1), varintField(4, 3)),
		"two outcomes":        subFrame(TypeLookupResponse, anURL, varintField(3, 1), varintField(4, 3), varintField(3, 2)),
		"outcome beyond 32":   subFrame(TypeLookupResponse, anURL, varintField(3, 1<<32|1), varintField(4, 3)),
		"partitions failed":   subFrame(TypePartitionedMetadataResp, varintField(2, 1), varintField(3, 1), varintField(4, 6)),
		"partitions of bytes": subFrame(TypePartitionedMetadataResp, varintField(2, 1), bytesField(1, []byte{1})),
		"another command":     corpus()["producer"],
	}
}

func TestTheUsualFormOfALookupNeedsNoDecoder(t *testing.T) {
	for name, src := range plainQuestions() {
		if !checkQuestion(t, src, 1<<33, "") {
			t.Errorf("question %q is left to the general decoder", name)
		}
	}
	for name, src := range plainResponses() {
		if !checkResponse(t, src, 1<<33) {
			t.Errorf("response %q is left to the general decoder", name)
		}
	}
}

func TestAnyOtherFormOfALookupIsForTheDecoder(t *testing.T) {
	for name, src := range unusualQuestions() {
		if h, ok, err := ParseHead(src, DefaultMaxFrame); err != nil || !ok {
			t.Errorf("question %q is no frame: %v", name, err)
		} else if _, ok := ParseQuestion(src, h); ok {
			t.Errorf("question %q is taken without the general decoder", name)
		}
	}
	for name, src := range unusualResponses() {
		if h, ok, err := ParseHead(src, DefaultMaxFrame); err != nil || !ok {
			t.Errorf("response %q is no frame: %v", name, err)
		} else if _, ok := ParseResponse(src, h); ok {
			t.Errorf("response %q is taken without the general decoder", name)
		}
	}
}

// decode is what the other end sees of a frame that was built; it must be one, and nothing else.
func decode(t *testing.T, src []byte, want Type) *pulsarpb.BaseCommand {
	t.Helper()
	h, ok, err := ParseHead(src, 4*DefaultMaxFrame)
	if err != nil || !ok || h.Size != len(src) || h.CmdEnd != len(src) || h.Type != want {
		t.Fatalf("not one frame of type %v: %+v %v %v: % x", want, h, ok, err, src)
	}
	var cmd pulsarpb.BaseCommand
	if err := Parse(&cmd, src, h); err != nil {
		t.Fatalf("%v: % x", err, src)
	}
	return &cmd
}

// checkQuestion compares with decoding, changing and encoding. It returns whether src is a question of the plain form.
func checkQuestion(t *testing.T, src []byte, id uint64, listener string) bool {
	t.Helper()
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if err != nil || !ok {
		return false
	}
	q, ok := ParseQuestion(src, h)
	if !ok {
		return false
	}
	var want pulsarpb.BaseCommand
	if err := Parse(&want, src, h); err != nil {
		t.Fatalf("taken, but the decoder refuses it: %v: % x", err, src)
	}
	l, m := want.LookupTopic, want.PartitionMetadata
	after := bytes.Clone(q.After)
	if h.Type == TypeLookup {
		if string(q.Topic) != l.GetTopic() || q.ID != l.GetRequestId() || q.Listener != (l.AdvertisedListenerName != nil) {
			t.Fatalf("topic %q, id %d, listener %v of %v", q.Topic, q.ID, q.Listener, l)
		}
		if l.OriginalPrincipal != nil || l.OriginalAuthData != nil || l.OriginalAuthMethod != nil || q.Listener && l.GetAdvertisedListenerName() == "" {
			t.Fatalf("taken with what has to be taken out: %v", l)
		}
		l.RequestId = &id
		if listener != "" && !q.Listener {
			l.AdvertisedListenerName = &listener
			after = AppendListenerName(after, listener)
		}
	} else {
		if string(q.Topic) != m.GetTopic() || q.ID != m.GetRequestId() {
			t.Fatalf("topic %q, id %d of %v", q.Topic, q.ID, m)
		}
		if m.OriginalPrincipal != nil || m.OriginalAuthData != nil || m.OriginalAuthMethod != nil {
			t.Fatalf("taken with what has to be taken out: %v", m)
		}
		m.RequestId = &id
	}
	if got := decode(t, AppendQuestion(nil, h.Type, q.Before, id, after), h.Type); !proto.Equal(got, &want) {
		t.Fatalf("% x became %v, want %v", src, got, &want)
	}
	return true
}

// checkResponse compares with decoding, changing and encoding. It returns whether src is a response of the plain form.
func checkResponse(t *testing.T, src []byte, id uint64) bool {
	t.Helper()
	h, ok, err := ParseHead(src, DefaultMaxFrame)
	if err != nil || !ok {
		return false
	}
	r, ok := ParseResponse(src, h)
	if !ok {
		return false
	}
	var want pulsarpb.BaseCommand
	if err := Parse(&want, src, h); err != nil {
		t.Fatalf("taken, but the decoder refuses it: %v: % x", err, src)
	}
	if h.Type == TypePartitionedMetadataResp {
		m := want.PartitionMetadataResponse
		if r.ID != m.GetRequestId() || m.GetResponse() != 0 {
			t.Fatalf("id %d of %v", r.ID, m)
		}
		m.RequestId = &id
		if got := decode(t, r.Append(nil, id), h.Type); !proto.Equal(got, &want) {
			t.Fatalf("% x became %v, want %v", src, got, &want)
		}
		return true
	}
	l := want.LookupTopicResponse
	if r.ID != l.GetRequestId() || string(r.URL) != l.GetBrokerServiceUrl() || string(r.URLTLS) != l.GetBrokerServiceUrlTls() || l.GetResponse() != LookupConnect {
		t.Fatalf("id %d, URLs %q %q of %v", r.ID, r.URL, r.URLTLS, l)
	}
	plain, tls := "pulsar://tagged:6650", "pulsar+ssl://tagged:6650"
	l.BrokerServiceUrl, l.BrokerServiceUrlTls, l.RequestId = &plain, &tls, &id
	l.Authoritative, l.ProxyThroughServiceUrl = proto.Bool(true), proto.Bool(true)
	if got := decode(t, r.AppendOwner(nil, id, AppendOwnerFields(nil, plain, tls)), h.Type); !proto.Equal(got, &want) {
		t.Fatalf("% x became %v, want %v", src, got, &want)
	}
	return true
}

// Property: a question read and written without the general decoder is what decoding, changing and encoding makes of it.
func FuzzQuestionAgainstDecoder(f *testing.F) {
	for _, all := range []map[string][]byte{plainQuestions(), unusualQuestions()} {
		for _, src := range all {
			h, _, _ := ParseHead(src, DefaultMaxFrame)
			f.Add(src[prefixLen:h.CmdEnd], uint64(1)<<40, "internal")
		}
	}
	f.Fuzz(func(t *testing.T, cmd []byte, id uint64, listener string) { checkQuestion(t, frame(cmd), id, listener) })
}

// Property: a response read and written without the general decoder is what decoding, changing and encoding makes of it.
func FuzzResponseAgainstDecoder(f *testing.F) {
	for _, all := range []map[string][]byte{plainResponses(), unusualResponses()} {
		for _, src := range all {
			h, _, _ := ParseHead(src, DefaultMaxFrame)
			f.Add(src[prefixLen:h.CmdEnd], uint64(1)<<40)
		}
	}
	f.Fuzz(func(t *testing.T, cmd []byte, id uint64) { checkResponse(t, frame(cmd), id) })
}

// passLookup is what the proxy does with a LOOKUP and its response.
func passLookup(dst, question, response, owner []byte) []byte {
	h, _, _ := ParseHead(question, DefaultMaxFrame)
	q, _ := ParseQuestion(question, h)
	dst = AppendQuestion(dst, h.Type, q.Before, q.ID+1, q.After)
	h, _, _ = ParseHead(response, DefaultMaxFrame)
	r, _ := ParseResponse(response, h)
	return r.AppendOwner(dst, r.ID+1, owner)
}

func TestALookupIsReadAndWrittenWithoutAllocation(t *testing.T) {
	question, response := plainQuestions()["lookup"], plainResponses()["lookup"]
	owner, dst := AppendOwnerFields(nil, "pulsar://tagged:6650", "pulsar+ssl://tagged:6650"), make([]byte, 0, 4096)
	if n := testing.AllocsPerRun(100, func() { dst = passLookup(dst[:0], question, response, owner) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkLookup(b *testing.B) {
	question, response := plainQuestions()["lookup"], plainResponses()["lookup"]
	owner, dst := AppendOwnerFields(nil, "pulsar://tagged:6650", "pulsar+ssl://tagged:6650"), make([]byte, 0, 4096)
	b.ReportAllocs()
	for b.Loop() {
		dst = passLookup(dst[:0], question, response, owner)
	}
}
