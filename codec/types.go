package codec

import "strconv"

// Type is the type of a command. The number of the sub-message's field equals it.
type Type uint32

// The types that Pointsman treats by name. Others travel by number.
const (
	TypeConnect                   Type = 2
	TypeConnected                 Type = 3
	TypeSubscribe                 Type = 4
	TypeProducer                  Type = 5
	TypeSend                      Type = 6
	TypeSendReceipt               Type = 7
	TypeSendError                 Type = 8
	TypeMessage                   Type = 9
	TypeAck                       Type = 10
	TypeFlow                      Type = 11
	TypeUnsubscribe               Type = 12
	TypeSuccess                   Type = 13
	TypeError                     Type = 14
	TypeCloseProducer             Type = 15
	TypeCloseConsumer             Type = 16
	TypeProducerSuccess           Type = 17
	TypePing                      Type = 18
	TypePong                      Type = 19
	TypeRedeliver                 Type = 20
	TypePartitionedMetadata       Type = 21
	TypePartitionedMetadataResp   Type = 22
	TypeLookup                    Type = 23
	TypeLookupResponse            Type = 24
	TypeConsumerStats             Type = 25
	TypeConsumerStatsResponse     Type = 26
	TypeReachedEndOfTopic         Type = 27
	TypeSeek                      Type = 28
	TypeGetLastMessageID          Type = 29
	TypeGetLastMessageIDResponse  Type = 30
	TypeActiveConsumerChange      Type = 31
	TypeGetTopicsOfNamespace      Type = 32
	TypeGetTopicsOfNamespaceResp  Type = 33
	TypeGetSchema                 Type = 34
	TypeGetSchemaResponse         Type = 35
	TypeAuthChallenge             Type = 36
	TypeAuthResponse              Type = 37
	TypeAckResponse               Type = 38
	TypeGetOrCreateSchema         Type = 39
	TypeGetOrCreateSchemaResponse Type = 40
	TypeTopicMigrated             Type = 68
	// TypeUnknown stands for every number that no version of the protocol uses.
	TypeUnknown Type = 1 << 20
)

var typeNames = map[Type]string{
	TypeConnect: "CONNECT", TypeConnected: "CONNECTED", TypeSubscribe: "SUBSCRIBE", TypeProducer: "PRODUCER",
	TypeSend: "SEND", TypeSendReceipt: "SEND_RECEIPT", TypeSendError: "SEND_ERROR", TypeMessage: "MESSAGE",
	TypeAck: "ACK", TypeFlow: "FLOW", TypeUnsubscribe: "UNSUBSCRIBE", TypeSuccess: "SUCCESS", TypeError: "ERROR",
	TypeCloseProducer: "CLOSE_PRODUCER", TypeCloseConsumer: "CLOSE_CONSUMER", TypeProducerSuccess: "PRODUCER_SUCCESS",
	TypePing: "PING", TypePong: "PONG", TypeRedeliver: "REDELIVER_UNACKNOWLEDGED_MESSAGES",
	TypePartitionedMetadata: "PARTITIONED_METADATA", TypePartitionedMetadataResp: "PARTITIONED_METADATA_RESPONSE",
	TypeLookup: "LOOKUP", TypeLookupResponse: "LOOKUP_RESPONSE", TypeConsumerStats: "CONSUMER_STATS",
	TypeConsumerStatsResponse: "CONSUMER_STATS_RESPONSE", TypeReachedEndOfTopic: "REACHED_END_OF_TOPIC", TypeSeek: "SEEK",
	TypeGetLastMessageID: "GET_LAST_MESSAGE_ID", TypeGetLastMessageIDResponse: "GET_LAST_MESSAGE_ID_RESPONSE",
	TypeActiveConsumerChange: "ACTIVE_CONSUMER_CHANGE", TypeGetTopicsOfNamespace: "GET_TOPICS_OF_NAMESPACE",
	TypeGetTopicsOfNamespaceResp: "GET_TOPICS_OF_NAMESPACE_RESPONSE", TypeGetSchema: "GET_SCHEMA",
	TypeGetSchemaResponse: "GET_SCHEMA_RESPONSE", TypeAuthChallenge: "AUTH_CHALLENGE", TypeAuthResponse: "AUTH_RESPONSE",
	TypeAckResponse: "ACK_RESPONSE", TypeGetOrCreateSchema: "GET_OR_CREATE_SCHEMA",
	TypeGetOrCreateSchemaResponse: "GET_OR_CREATE_SCHEMA_RESPONSE", TypeTopicMigrated: "TOPIC_MIGRATED",
}

// String is the protocol's name of the type, or its number.
func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return "command " + strconv.FormatUint(uint64(t), 10)
}

// ServerError is the protocol's error code.
type ServerError int32

// The error codes of the protocol.
const (
	ErrorUnknown                ServerError = 0
	ErrorMetadata               ServerError = 1
	ErrorPersistence            ServerError = 2
	ErrorAuthentication         ServerError = 3
	ErrorAuthorization          ServerError = 4
	ErrorConsumerBusy           ServerError = 5
	ErrorServiceNotReady        ServerError = 6
	ErrorProducerBlockedQuota   ServerError = 7
	ErrorProducerBlockedQuotaEx ServerError = 8
	ErrorChecksum               ServerError = 9
	ErrorUnsupportedVersion     ServerError = 10
	ErrorTopicNotFound          ServerError = 11
	ErrorSubscriptionNotFound   ServerError = 12
	ErrorConsumerNotFound       ServerError = 13
	ErrorTooManyRequests        ServerError = 14
	ErrorTopicTerminated        ServerError = 15
	ErrorProducerBusy           ServerError = 16
	ErrorInvalidTopicName       ServerError = 17
	ErrorIncompatibleSchema     ServerError = 18
	ErrorConsumerAssign         ServerError = 19
	ErrorTxnCoordinatorNotFound ServerError = 20
	ErrorInvalidTxnStatus       ServerError = 21
	ErrorNotAllowed             ServerError = 22
	ErrorTransactionConflict    ServerError = 23
	ErrorTransactionNotFound    ServerError = 24
	ErrorProducerFenced         ServerError = 25
)

// Values of CommandLookupTopicResponse.response.
const (
	LookupRedirect int32 = 0
	LookupConnect  int32 = 1
	LookupFailed   int32 = 2
)

// MetadataFailed is CommandPartitionedTopicMetadataResponse.response for an error; 0 is success.
const MetadataFailed int32 = 1

// NoRequest is the request id of commands that a server sends by itself: −1 as the protocol's unsigned 64-bit number.
const NoRequest = ^uint64(0)

// ProtocolVersion is the newest protocol version that Pointsman speaks.
const ProtocolVersion = 21

// MinProtocolVersion is the oldest version whose clients can be proxied.
const MinProtocolVersion = 10
