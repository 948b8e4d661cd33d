package controller

import (
	"context"
	"errors"

	"pointsman/core/switching"
)

// Topic is the work of one switch on both clusters. It is used by one goroutine. All methods may be repeated, in any order: a leader that
// was frozen may come late with any of them, and its successor begins anew.
type Topic interface {
	// Warm does as much of Carry as can be done while the topic is in use.
	Warm(ctx context.Context) error
	// Evict has the old cluster unload every partition.
	Evict(ctx context.Context) error
	// Tail is the last position of every partition on the old cluster.
	Tail(ctx context.Context) (tail string, err error)
	// Replicated says how far replication is, as long as it has not passed tail.
	Replicated(ctx context.Context, tail string) (missing string, err error)
	// Carry puts the subscriptions of the new cluster where those of the old one are, by absolute positions.
	Carry(ctx context.Context) ([]switching.Carried, error)
	// ReadBack compares the subscriptions of both clusters and says what is wrong.
	ReadBack(ctx context.Context) (wrong string, err error)
	// Since names who publishes on the old cluster, replicators left out, and what clients have published there after tail, read in this order.
	Since(ctx context.Context, tail string) (foreign string, publishers []switching.Publisher, err error)
	// Verify compares the tails of both clusters, and the subscriptions of the new one with what was carried.
	Verify(ctx context.Context, tail string) (Verified, error)
	Close()
}

// Verified is what a comparison of both clusters found.
type Verified struct {
	Tail, First map[string]string // by partition: the last position on the old cluster, and that of its copy
	Text        string            // for the receipt
	Wrong       string            // "" when all is as it should be
	// Carried are the subscriptions with what was found of them; nil when that is not known. It may be there with an error. Differences is what is wrong with them.
	Carried     []switching.Carried
	Differences string
}

// ErrHopeless is matched by an error of a Topic that trying again does not mend.
var ErrHopeless = errors.New("this cannot be mended by trying again")
