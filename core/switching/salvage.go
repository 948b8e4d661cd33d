package switching

import "time"

// SalvageRequest asks what one cluster holds of topics that another one never got.
type SalvageRequest struct {
	From, To string
	Topics   []string // base names
	// Scopes are those of rules that moved: everything of them that cluster From has is looked at, if Decided says that it is on To by now.
	Scopes  []string
	Decided func(base string) bool
	// Limit is how many messages are listed, over all topics.
	Limit int
}

// Salvage is the answer.
type Salvage struct {
	From   string         `json:"from"`
	To     string         `json:"to"`
	Topics []SalvageTopic `json:"topics"`
	// Missing is how many entries there are in all, Listed how many of them are listed.
	Missing int64 `json:"missing"`
	Listed  int   `json:"listed"`
	// Unread are topics that could not be looked at, each with the reason; at most MaxFailoverNames of them.
	Unread []string  `json:"unread,omitempty"`
	At     time.Time `json:"at"`
}

// SalvageTopic is one partition.
type SalvageTopic struct {
	Topic   string `json:"topic"`
	Missing int64  `json:"missing"`
	// AtLeast tells that there was more to look at than is looked at.
	AtLeast bool `json:"at_least,omitempty"`
	// Replication is none, running (it brings them by itself), or why it does not.
	Replication string           `json:"replication"`
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
