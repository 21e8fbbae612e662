#!/usr/bin/env bash
# Runs the pool's tests on the cards of this machine: the binary that also runs on the simulated GPU;
# and then, where python3 has PyTorch, the cases of tests/torch with the library in
# CONCERTINA_LIBRARY or target/release.
#
#   scripts/test-gpu.sh [--gpus 2] [BINARY [FILTER...]]
#
# With --gpus 2 the jobs of tests/several_gpus run as well, on two GPUs over NCCL.
#
# BINARY is a built tests/device (`cargo test --test device --no-run`); without it, the newest one under
# the target directory. FILTERs choose tests as the binary's own arguments do: on a machine with one
# card `--skip devices` leaves out what needs two. Needs neither Rust nor the sources.
#
# Each test runs in a process of its own, so that one that crashes takes no other along. Fails if a
# test fails, if one of the pool's is skipped (a line `SKIP name: reason`), or if there was none; says
# which of PyTorch's cases could not be run, and why.
set -euo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
gpus=1
if [ "${1:-}" = --gpus ]; then
    gpus=${2:-}
    [ "$gpus" = 1 ] || [ "$gpus" = 2 ] || {
        echo "test-gpu.sh: --gpus '$gpus' makes no sense: 1 or 2" >&2
        exit 2
    }
    shift 2
fi
binary=${1:-}
if [ -z "$binary" ]; then
    target=${CARGO_TARGET_DIR:-$root/target}
    for found in "$target"/*/deps/device-*; do
        if [ -f "$found" ] && [ -x "$found" ] && { [ -z "$binary" ] || [ "$found" -nt "$binary" ]; }; then
            binary=$found
        fi
    done
fi
if [ -z "$binary" ] || [ ! -x "$binary" ]; then
    echo "test-gpu.sh: no test binary${binary:+ at $binary}: build it with cargo test --test device --no-run" >&2
    exit 2
fi

export CONCERTINA_TEST_DRIVER=cuda
list=$("$binary" --list --format terse --skip sim_only "${@:2}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 skipped=() failed=()
while read -r name; do
    status=0
    # A test that waits for ever would keep the card for ever.
    timeout 300 "$binary" --nocapture --test-threads=1 --exact "$name" </dev/null >"$log" 2>&1 ||
        status=$?
    if [ "$status" -ne 0 ]; then
        failed+=("$name")
        echo "FAILED $name (exit status $status)"
        sed 's/^/    /' "$log"
    elif skip=$(grep -o 'SKIP .*' "$log"); then
        skipped+=("$name")
        echo "$skip"
    else
        passed=$((passed + 1))
        echo "passed $name"
    fi
done < <(sed -n 's/: test$//p' <<<"$list")

echo
echo "on the GPU: $passed passed, ${#skipped[@]} skipped, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ] || printf 'FAILED %s\n' "${failed[@]}"
[ ${#skipped[@]} -eq 0 ] || printf 'SKIP %s\n' "${skipped[@]}"

torch=0
if why=$(python3 -c "import torch" 2>&1); then
    python3 "$root/tests/torch/run.py" --gpu || torch=$?
else
    echo "PyTorch's cases could not be run: ${why##*$'\n'}"
fi
jobs=0
if [ "$gpus" = 2 ]; then
    python3 "$root/tests/several_gpus/run.py" || jobs=$?
fi
[ "$jobs" -eq 0 ] && [ "$passed" -gt 0 ] && [ ${#skipped[@]} -eq 0 ] && [ ${#failed[@]} -eq 0 ] && [ "$torch" -eq 0 ]
