#!/bin/sh
# Runs every fuzz target of the module for FUZZTIME (runs, or a time) each: a number of runs, because the end of a time can meet a slow one and fail; the first failure ends it.
set -e
GO=${GO:-go}
FUZZTIME=${FUZZTIME:-10000x}
for file in $(git ls-files '*_test.go'); do
	for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
		dir=./$(dirname "$file")
		echo "fuzz $dir $target"
		"$GO" test -run '^$' -fuzz "^$target\$" -fuzztime "$FUZZTIME" "$dir" >/tmp/pointsman-fuzz.$$ 2>&1 || { cat /tmp/pointsman-fuzz.$$; rm -f /tmp/pointsman-fuzz.$$; exit 1; }
		rm -f /tmp/pointsman-fuzz.$$
	done
done
