//go:build race

package switching

// The race detector makes the search ten times as slow, and there is nothing to find: the values have one owner.
const raceEnabled = true
