//go:build model

package switching

// make model
const modelDeep = true
