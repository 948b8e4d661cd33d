// Package e2e puts Pointsman in front of real Apache Pulsar clusters and lets real clients talk through it.
//
// The plain files of the package are the harness: they fetch the artifacts, run the clusters, steer the client drivers
// (clients/) and count what came of it. The tests carry the build tag e2e, so that `go test ./...` needs no Java:
//
//	make e2e [RUN=regex] [KEEP=1]       or: go test -count=1 -tags e2e ./e2e -run REGEX -v
//
// Nothing of the product may import this package, and it imports nothing of the product but codec/pulsarpb (for the raw
// frames of the refusal tests): what it knows of Pointsman it knows through the binary, as a user does.
package e2e
