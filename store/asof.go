package store

import (
	"context"
	"time"
)

// AsOf lets what is read with ctx be as of since, on the clock of Boottime, or later. What is read without is as of the moment of the call. Who reads
// several things in one step asks a store that must catch up first to do so once, and not for each of them.
func AsOf(ctx context.Context, since time.Duration) context.Context {
	return context.WithValue(ctx, asOfKey{}, since)
}

// Since is what AsOf has set; ok is false without.
func Since(ctx context.Context) (since time.Duration, ok bool) {
	since, ok = ctx.Value(asOfKey{}).(time.Duration)
	return since, ok
}

type asOfKey struct{}
