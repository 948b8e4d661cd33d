#!/bin/sh
# Names everything that `make test` needs and that is missing, with the line that installs it on Debian. Java, Maven and
# python3-venv are needed by the real-cluster tests only: without them those are skipped. Cargo and protoc are for their Rust client
# only, which is left out without them. REQUIRE_E2E=1 makes either a failure, REQUIRE_E2E=all-but-cargo the first.
missing= ; optional= ; rust=
have() { command -v "$1" >/dev/null 2>&1; }

have go || { echo "preflight: go is missing (https://go.dev/dl)"; exit 1; }
have gcc || { echo "preflight: gcc is missing (the race detector needs it): apt-get install -y gcc libc6-dev"; missing=1; }
have java && have javac || { echo "preflight: java or javac is missing: apt-get install -y openjdk-17-jdk-headless"; optional=1; }
have mvn || { echo "preflight: mvn is missing: apt-get install -y maven"; optional=1; }
if have python3; then
	python3 -c 'import venv, ensurepip' >/dev/null 2>&1 || { echo "preflight: python3-venv is missing: apt-get install -y python3-venv"; optional=1; }
else
	echo "preflight: python3 is missing: apt-get install -y python3 python3-venv"
	optional=1
fi
# "cargo 1.85.0 (…)", for e2e/clients/rust/Cargo.toml
minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
if [ "${minor:-0}" -lt 85 ]; then
	echo "preflight: cargo 1.85 or newer is missing: apt-get install -y cargo (Debian 12: cargo-web), or https://rustup.rs"
	rust=1
fi
have protoc || { echo "preflight: protoc is missing: apt-get install -y protobuf-compiler"; rust=1; }

if [ -n "$missing" ]; then
	exit 1
fi
case "$REQUIRE_E2E" in
1) needed="$optional$rust" ;;
all-but-cargo) needed="$optional" ;;
*) needed= ;;
esac
if [ -n "$needed" ]; then
	echo "preflight: REQUIRE_E2E=$REQUIRE_E2E and the real-cluster tests cannot run as a whole: install what is named above"
	exit 1
fi
if [ -n "$optional" ]; then
	echo "preflight: ############################################################"
	echo "preflight: # THE REAL-CLUSTER TESTS WILL BE SKIPPED (see above)       #"
	echo "preflight: ############################################################"
elif [ -n "$rust" ]; then
	echo "preflight: ############################################################"
	echo "preflight: # THE RUST CLIENT WILL BE LEFT OUT OF THEM (see above)     #"
	echo "preflight: ############################################################"
fi
