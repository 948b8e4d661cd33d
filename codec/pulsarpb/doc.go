// Package pulsarpb is generated from pulsar.proto, our own minimal description of the Pulsar binary protocol: only the
// fields that Pointsman uses; unknown fields are preserved when a command is written again.
package pulsarpb

//go:generate protoc --go_out=. --go_opt=paths=source_relative pulsar.proto
