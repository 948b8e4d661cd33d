//go:build !race

package app

// raceScale is 1: the numbers are as written.
const raceScale = 1
