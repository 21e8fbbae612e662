#!/usr/bin/env bash
# Runs the pool's tests on the cards of this machine: the binary that also runs on the simulated GPU.
#
#   scripts/test-gpu.sh [BINARY]
#
# BINARY is a built tests/pool (`cargo test --test pool --no-run`); without it, the newest one under
# the target directory. Needs neither Rust nor the sources. Fails if a test fails, if one is skipped
# (a line `SKIP name: reason`), or if none ran.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
binary=${1:-}
if [ -z "$binary" ]; then
    target=${CARGO_TARGET_DIR:-$root/target}
    for found in "$target"/*/deps/pool-*; do
        if [ -f "$found" ] && [ -x "$found" ] && { [ -z "$binary" ] || [ "$found" -nt "$binary" ]; }; then
            binary=$found
        fi
    done
fi
if [ -z "$binary" ] || [ ! -x "$binary" ]; then
    echo "test-gpu.sh: no test binary${binary:+ at $binary}: build it with cargo test --test pool --no-run" >&2
    exit 2
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
# A test that waits for ever would keep the card for ever.
CONCERTINA_TEST_DRIVER=cuda timeout 900 "$binary" --nocapture --test-threads=1 --skip sim_only 2>&1 |
    tee "$log" || status=$?

passed=$(sed -n 's/^test result: .* \([0-9]*\) passed.*/\1/p' "$log")
passed=${passed:-0}
skipped=$(grep -c 'SKIP ' "$log" || true)
echo
echo "on the GPU: $passed passed, $skipped skipped, exit status $status"
grep -oE 'SKIP .*' "$log" || true
if [ "$status" -ne 0 ] || [ "$skipped" -ne 0 ] || [ "$passed" -eq 0 ]; then
    exit 1
fi
