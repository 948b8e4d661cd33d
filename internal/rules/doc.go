// Package rules holds rules about the code itself, as tests: who may import whom, and what stays out of the binary. It
// has no code, and nothing may import it.
package rules
