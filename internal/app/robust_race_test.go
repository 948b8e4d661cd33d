//go:build race

package app

// raceScale divides the numbers of the robustness tests: the race detector is five to ten times slower and larger.
const raceScale = 5
