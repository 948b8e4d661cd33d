package switching

import "errors"

// ErrTooManyTopics: a request is for more than MaxBatchTopics.
var ErrTooManyTopics = errors.New("more than one batch moves")

// BatchRequest says which topics a batch is to move: those named, or those of a namespace, of a prefix, or a share of these.
type BatchRequest struct {
	To     string
	Topics []string // base names
	// Namespace ("tenant/namespace"), Prefix (of base names) and Percent narrow each other down; 0 is everything.
	Namespace string
	Prefix    string
	Percent   float64
}

// Whole tells that everything in the namespace moves, so that it can end as one rule.
func (r BatchRequest) Whole() bool {
	return r.Namespace != "" && r.Prefix == "" && (r.Percent == 0 || r.Percent == 100)
}

// BatchPlan is what a request comes to, as of now.
type BatchPlan struct {
	Items []BatchItem // in the order in which they move
	From  []string    // the clusters that they are on, sorted
	// There are topics that are on the new cluster already; Gone are mapped nowhere.
	There, Gone []string
	Warnings    []string
}
