package switching

import (
	"errors"
	"time"
)

// ErrSalvageCursor is matched by the error about a SalvageRequest.After that is none.
var ErrSalvageCursor = errors.New("is no place in a list of messages: write it as the last line of the page before says, PARTITION@LEDGER:ENTRY")

// SalvageRequest asks what one cluster holds of topics that another one never got.
type SalvageRequest struct {
	From, To string
	Topics   []string // base names
	// Scopes are those of rules that moved: everything of them that cluster From has is looked at, if Decided says that it is on To by now.
	Scopes  []string
	Decided func(base string) bool
	// Limit is how many messages are listed, over all topics, behind After, which is the Next of an answer before; "" for the first ones.
	Limit int
	After string
}

// Salvage is the answer.
type Salvage struct {
	From   string         `json:"from"`
	To     string         `json:"to"`
	Topics []SalvageTopic `json:"topics"`
	// Missing is how many entries there are in all, AtLeast that there was more to look at than is looked at, Listed how many of them are listed. An answer
	// behind After counts what it lists.
	Missing int64 `json:"missing"`
	AtLeast bool  `json:"at_least,omitempty"`
	Listed  int   `json:"listed"`
	// Next is what to ask for the messages after these: `after` of the query; "" when there are none.
	Next string `json:"next,omitempty"`
	// Left is how many topics this answer has not looked at: those behind Next.
	Left int `json:"left,omitempty"`
	// Unread are topics that could not be looked at, each with the reason; at most MaxFailoverNames of them.
	Unread []string  `json:"unread,omitempty"`
	At     time.Time `json:"at"`
}

// SalvageTopic is one partition.
type SalvageTopic struct {
	Topic   string `json:"topic"`
	Missing int64  `json:"missing"`
	// AtLeast tells that there was more to look at than is looked at; Behind is how many entries there are, what is not missing included.
	AtLeast bool  `json:"at_least,omitempty"`
	Behind  int64 `json:"behind,omitempty"`
	// Replication is none, running (it brings them by itself), or why it does not. It is not asked about where nothing is missing.
	Replication string           `json:"replication,omitempty"`
	Messages    []SalvageMessage `json:"messages"`
}

// SalvageMessage is an entry of the old cluster that has no copy on the new one.
type SalvageMessage struct {
	Position  string    `json:"position"`
	Producer  string    `json:"producer"`
	Sequence  int64     `json:"sequence_id"`
	Published time.Time `json:"published"`
	Key       string    `json:"key,omitempty"`
	Bytes     int       `json:"bytes"`    // of the payload, as it is stored
	Messages  int       `json:"messages"` // in a batch
}
