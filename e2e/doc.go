// Package e2e puts Pointsman in front of real Apache Pulsar clusters and lets real clients talk through it.
//
// The plain files of the package are the harness: they fetch the artifacts, run the clusters, steer the client drivers
// (clients/) and count what came of it. The tests carry the build tag e2e, so that `go test ./...` needs no Java:
//
//	go test -tags e2e ./e2e/... [-run REGEX]      RUN_E2E knobs: KEEP=1 leaves the rig up, REQUIRE_E2E=1 forbids skipping
//
// Nothing of the product may import this package, and it imports nothing of the product but codec (for the raw
// frames of the refusal tests): what it knows of Pointsman it knows through the binary, as a user does.
package e2e
