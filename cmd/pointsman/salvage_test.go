package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pointsman/core/switching"
	"pointsman/internal/golden"
)

// What an operator sees of a list of missing messages: the summary once, then pages, each with the command for the next one.
func TestASalvageReadsAsDocumented(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	message := func(n int) switching.SalvageMessage {
		return switching.SalvageMessage{Position: fmt.Sprintf("17:%d", n), Producer: "orders-1", Sequence: int64(n), Published: at, Bytes: 120, Messages: 1}
	}
	const one, many, whole = "persistent://acme/orders/t1", "persistent://acme/orders/t2-partition-0", "persistent://acme/orders/t3"
	var b strings.Builder
	for _, page := range []struct {
		first bool
		s     switching.Salvage
	}{
		{true, switching.Salvage{From: "a", To: "b", Missing: 100_002, AtLeast: true, Listed: 3, Next: many + "@17:3", Unread: []string{"persistent://acme/orders/t4: no answer"}, Topics: []switching.SalvageTopic{
			{Topic: one, Missing: 2, Behind: 5, Replication: "running", Messages: []switching.SalvageMessage{message(1), message(2)}},
			{Topic: many, Missing: 100_000, AtLeast: true, Behind: 1_000_000, Replication: "none", Messages: []switching.SalvageMessage{message(3)}},
			{Topic: whole},
		}}},
		{false, switching.Salvage{From: "a", To: "b", Missing: 1, Listed: 1, Topics: []switching.SalvageTopic{{Topic: many, Missing: 1, Messages: []switching.SalvageMessage{message(4)}}}}},
		{true, switching.Salvage{From: "a", To: "b", Topics: []switching.SalvageTopic{{Topic: whole}, {Topic: one}}}},
		{false, switching.Salvage{From: "a", To: "b"}},
		{true, switching.Salvage{From: "a", To: "b", AtLeast: true, Left: 2_000, Next: one + "@-1:-1", Topics: []switching.SalvageTopic{{Topic: one}}}},
	} {
		writeSalvage(&b, "fo-20260102-030405-678", page.s, page.first)
		b.WriteString("\n")
	}
	golden.File(t, "salvage.txt", normal(b.String()))
}
