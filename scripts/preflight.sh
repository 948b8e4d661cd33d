#!/bin/sh
# Names everything that `make test` needs and that is missing, with the line that installs it on Debian. Java, Maven and
# python3-venv are needed by the real-cluster tests only: without them those are skipped, unless REQUIRE_E2E=1. Cargo and protoc are asked
# for when E2E_CLIENTS has rust.
missing= ; optional=
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
case ",$E2E_CLIENTS," in
*,rust,*)
	# "cargo 1.85.0 (…)", for e2e/clients/rust/Cargo.toml
	minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
	[ "${minor:-0}" -ge 85 ] || { echo "preflight: cargo 1.85 or newer is missing: apt-get install -y cargo (Debian 12: cargo-web), or https://rustup.rs"; optional=1; }
	have protoc || { echo "preflight: protoc is missing: apt-get install -y protobuf-compiler"; optional=1; }
	;;
esac

if [ -n "$missing" ]; then
	exit 1
fi
if [ -n "$optional" ]; then
	if [ "$REQUIRE_E2E" = 1 ]; then
		echo "preflight: REQUIRE_E2E=1 and the real-cluster tests cannot run: install what is named above"
		exit 1
	fi
	echo "preflight: ############################################################"
	echo "preflight: # THE REAL-CLUSTER TESTS WILL BE SKIPPED (see above)       #"
	echo "preflight: ############################################################"
fi
