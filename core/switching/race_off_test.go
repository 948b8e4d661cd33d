//go:build !race

package switching

const raceEnabled = false
