# Pointsman. On a fresh machine `make demo` needs only Go, `make test` does everything.
#
# What each part of `make test` costs on 2 shared cores (seconds; first run / with warm caches):
#
#   preflight      1 /   1    names what is missing, with its apt line
#   lint          60 /  15    gofmt, go vet, staticcheck
#   test-unit    500 / 430    unit tests, -race -shuffle=on, a real ZooKeeper included; a slice of the switch's model
#   bench-once    60 /  30    every benchmark once, so that none rots
#   fuzz          90 /  60    every fuzz target for FUZZTIME (a number of runs, or a time)
#   e2e         1050 / 950    two real Pulsar clusters, the official proxy, Java, Go and Python clients
#
# `make e2e RUN=regex KEEP=1` runs a part of the end-to-end tests and leaves the clusters up.

GO         ?= go
FUZZTIME   ?= 10000x
SEEDS      ?= 100000
RUN        ?= .
KEEP       ?=
VERSION    ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
BENCHSTAT   = golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
LDFLAGS     = -s -w -X pointsman/internal/app.Version=$(VERSION)

.PHONY: build demo test test-unit model e2e guarantees fuzz bench bench-compare bench-peers bench-scale bench-batch bench-once robustness lint preflight generate clean

build: ## bin/pointsman
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/pointsman ./cmd/pointsman

demo: ## moves a live topic between two embedded clusters and tells what happened
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/pointsman-demo ./cmd/pointsman-demo
	@bin/pointsman-demo

test: preflight lint test-unit bench-once fuzz e2e ## everything
	@echo "make test: all of it passed"

preflight:
	@sh scripts/preflight.sh

lint:
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "gofmt these files:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags e2e ./e2e/...
	$(GO) run $(STATICCHECK) ./...
	$(GO) run $(STATICCHECK) -tags e2e ./e2e/...

test-unit:
	$(GO) test -race -shuffle=on -timeout 10m ./...
	$(GO) test -run 'NoInterleaving|EveryRule|Random' -timeout 10m ./core/switching

model: ## the checker of planned switches and drains in full: every world, every rule taken out, SEEDS random switches; up to twenty minutes of one idle core, 1.8 GiB
	GOMAXPROCS=1 GOMEMLIMIT=1800MiB $(GO) test -tags model -count=1 -timeout 6h -v -run 'NoInterleaving|EveryRule|Random' ./core/switching -seeds $(SEEDS) -batches $(SEEDS)

bench: ## microbenchmarks; compare two runs with benchstat
	$(GO) test -run '^$$' -bench . ./...

bench-once:
	$(GO) test -run '^$$' -bench . -benchtime 1x ./...

bench-compare: ## OLD=file NEW=file, two outputs of make bench
	$(GO) run $(BENCHSTAT) $(OLD) $(NEW)

bench-peers: build ## the standard set beside HAProxy, the official proxy and plain relays, at most 20 minutes; writes BENCHMARKS.md
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/pointsman-bench ./cmd/pointsman-bench
	bin/pointsman-bench standard

bench-scale: build ## idle sessions, thousands of connections and moved topics, ten million routes: eight minutes, 8 GB; writes BENCHMARKS.md
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/pointsman-bench ./cmd/pointsman-bench
	bin/pointsman-bench scale

bench-batch: build ## a batch of 100,000 topics planned, a namespace of 10,000 on fake brokers and one of 500 on real ones moved under load through three proxies: what it costs
	E2E_RIG=map E2E_TOPICS=10000 E2E_PLANNED=100000 $(GO) test -tags e2e -count=1 -timeout 60m -v -run 'TestALargeBatchIs|TestANamespaceOfManyTopicsMoves/fake' ./e2e
	E2E_REAL_TOPICS=500 $(GO) test -tags e2e -count=1 -timeout 60m -v -run TestANamespaceOfManyTopicsMoves/real ./e2e

robustness: ## hostile and unlucky peers at full size, with the numbers
	$(GO) test -count=1 -v -timeout 5m -run 'NotTheProtocol|NeverSpeak|StopReading|SlowBroker|NeverRead|EitherDirection|LookupStorm|LookUpAndLeave|CutWith|StopUnderLoad|DrainedClient' ./internal/app
	$(GO) test -count=1 -v -timeout 15m -run TestAFleet ./zk -fleet.proxies 200 -fleet.topics 100000 -fleet.changes 100

fuzz: ## FUZZTIME for each fuzz target
	@GO='$(GO)' FUZZTIME='$(FUZZTIME)' sh scripts/fuzz.sh

e2e: build ## RUN=regex KEEP=1
	KEEP='$(KEEP)' $(GO) test -tags e2e -count=1 -timeout 25m -v -run '$(RUN)' ./e2e/...

GUARANTEES = TestPlanned|TestBetweenVersions|TestAnIdleConsumer|TestDuplicatesAre|TestASwitchThat|TestASwitchWaits|TestAWriterPast|TestAStoredID|TestKillingTheLeader|TestAFrozenProxy|TestAFenceOutlives|TestABatchMoves|TestDrain|TestADrain|TestAWayBack|TestTheWayBack|TestANamespaceDrains|TestATopicLeaves|TestSwitchesOfClusters|TestLiveSwitch
guarantees: build ## measures the tables of docs/guarantees.md anew: the end-to-end tests of switches in full, up to an hour; RUN=regex measures a part of them and leaves the other rows
	@[ '$(RUN)' != . ] || : >e2e/testdata/guarantees.jsonl
	E2E_FULL=1 E2E_RESULTS='$(CURDIR)/e2e/testdata/guarantees.jsonl' $(GO) test -tags e2e -count=1 -timeout 90m -v -run '$(if $(filter-out .,$(RUN)),$(RUN),$(GUARANTEES))' ./e2e
	$(GO) test ./e2e -run TestTheTableOfGuarantees -rewrite

generate: ## codec/pulsarpb from pulsar.proto; needs protoc and protoc-gen-go
	$(GO) generate ./codec/pulsarpb

clean:
	rm -rf bin e2e/.rig
