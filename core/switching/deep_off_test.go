//go:build !model

package switching

const modelDeep = false
