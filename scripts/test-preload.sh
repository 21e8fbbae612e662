#!/usr/bin/env bash
# Runs the programs of tests/programs/preload on this machine's GPU, bare and with the library
# preloaded, and compares what they say; each is built with CUDA's runtime as a library and linked in.
#
#   scripts/test-preload.sh [--library FILE] [--sanitizer] [--speed] [--facts] [PROGRAM...]
#
# --library    the built libconcertina.so; without it the one under the target directory
# --sanitizer  runs each preloaded program under compute-sanitizer, too
# --speed      then measures what allocations cost (bare, strict and relaxed), and what the library
#              adds to the start of a program that does not use CUDA
# --facts      then prints what CUDA itself does where its documentation leaves it open
#
# Needs nvcc, and no Rust. How a program is to be run stands in it (`Run:`). Prints PASS or FAIL for
# each, with the differences, and fails if one differs or if there was none.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
sources=$root/tests/programs/preload

library='' sanitizer='' speed='' facts='' only=()
while [ $# -gt 0 ]; do
    case $1 in
        --library) library=${2:-} && shift ;;
        --sanitizer) sanitizer=yes ;;
        --speed) speed=yes ;;
        --facts) facts=yes ;;
        -*) echo "test-preload.sh: no option $1; there are --library FILE, --sanitizer, --speed and --facts" >&2 && exit 2 ;;
        *) only+=("$1") ;;
    esac
    shift
done
if [ -z "$library" ]; then
    for found in "${CARGO_TARGET_DIR:-$root/target}"/{release,debug}/libconcertina.so; do
        [ -f "$found" ] && library=$found && break
    done
fi
if [ ! -f "$library" ]; then
    echo "test-preload.sh: no library${library:+ at $library}: build it with cargo build --release" >&2
    exit 2
fi
library=$(realpath "$library")
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
if [ -z "$nvcc" ]; then
    echo "test-preload.sh: no nvcc on the path or in /usr/local/cuda" >&2
    exit 2
fi
unset "${!CONCERTINA_@}" LD_PRELOAD PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=()

build() { # program, shared or static
    "$nvcc" -cudart "$2" -Xcompiler -std=gnu11,-pthread -o "$work/$1-$2" "$sources/$1.c" \
        -lcuda -ldl -lpthread >"$work/build" 2>&1
}

# The statistics' count of allocations that the pools served.
served() {
    grep -o '"allocation.all.allocated":[0-9]*' "$1" 2>/dev/null | cut -d: -f2 | awk '{ sum += $1 } END { print sum + 0 }'
}

compare() { # name, then the command
    local name=$1 status=0
    shift
    timeout 120 "$@" >"$work/bare" 2>&1
    echo "exit status $?" >>"$work/bare"
    rm -f "$work/stats"
    CONCERTINA_STATS=$work/stats LD_PRELOAD=$library timeout 120 "$@" >"$work/preloaded" 2>&1
    echo "exit status $?" >>"$work/preloaded"
    if ! cmp -s "$work/bare" "$work/preloaded"; then
        status=1
        echo "FAIL $name"
        diff "$work/bare" "$work/preloaded" | sed 's/^</    bare:     /; s/^>/    preloaded:/' | head -40
    fi
    if [ -n "$sanitizer" ] && ! timeout 300 compute-sanitizer --preload-library "$library" \
        --report-api-errors no --error-exitcode 99 "$@" >"$work/sanitizer" 2>&1 &&
        grep -q 'ERROR SUMMARY: [1-9]' "$work/sanitizer"; then
        status=1
        echo "FAIL $name, under compute-sanitizer"
        grep '=========' "$work/sanitizer" | head -20 | sed 's/^/    /'
    fi
    if [ "$status" -eq 0 ]; then
        passed=$((passed + 1))
        echo "PASS $name (from the pool: $(served "$work/stats"))"
    else
        failed+=("$name")
    fi
}

for source in "$sources"/*.c; do
    program=$(basename "$source" .c)
    runs=$(sed -n 's/^.*Run: *\([^*]*[^ *]\).*$/\1/p' "$source")
    [ -n "$runs" ] || continue
    [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $program "* ]] || continue
    for runtime in shared static; do
        if ! build "$program" "$runtime"; then
            failed+=("$program, $runtime runtime: does not build")
            sed 's/^/    /' "$work/build"
            continue
        fi
        while read -r _ arguments; do
            # shellcheck disable=SC2086 # arguments are words
            compare "$program${arguments:+ $arguments}, $runtime runtime" \
                "$work/$program-$runtime" $arguments
        done <<<"$runs"
    done
done

# What relaxed frees promise shows in no comparison.
for runtime in shared static; do
    [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" relaxed "* ]] || continue
    name="relaxed, $runtime runtime"
    if build relaxed "$runtime" &&
        CONCERTINA_CONF=free:relaxed LD_PRELOAD=$library timeout 120 "$work/relaxed-$runtime" \
            >"$work/relaxed" 2>&1 &&
        [ "$(grep -c '^returned at once: 1$' "$work/relaxed")" -eq 20 ] &&
        [ "$(grep -c '^read what it held: 1$' "$work/relaxed")" -eq 20 ]; then
        passed=$((passed + 1))
        echo "PASS $name"
    else
        failed+=("$name")
        echo "FAIL $name"
        grep -v ': 0$' "$work/relaxed" | head -40 | sed 's/^/    /'
    fi
done

# Microseconds that a program takes to start and end: the median of many, the two ways in turn.
starts() {
    local bare=() preloaded=() before after i
    for ((i = 0; i < 201; i++)); do
        before=$EPOCHREALTIME
        /bin/true
        after=$EPOCHREALTIME
        bare+=($((${after/./} - ${before/./})))
        before=$EPOCHREALTIME
        LD_PRELOAD=$library /bin/true
        after=$EPOCHREALTIME
        preloaded+=($((${after/./} - ${before/./})))
    done
    echo "bare $(printf '%s\n' "${bare[@]}" | sort -n | sed -n 101p) us," \
        "preloaded $(printf '%s\n' "${preloaded[@]}" | sort -n | sed -n 101p) us"
}

if [ -n "$speed" ]; then
    echo "== start of a program that does not use CUDA: $(starts)"
    for runtime in shared static; do
        build speed "$runtime" || continue
        for way in bare strict relaxed; do
            echo "== speed, $runtime runtime, $way"
            case $way in
                bare) "$work/speed-$runtime" ;;
                *) CONCERTINA_CONF=free:$way LD_PRELOAD=$library "$work/speed-$runtime" ;;
            esac
        done
    done
fi

if [ -n "$facts" ] && build facts static; then
    echo "== facts"
    "$work/facts-static"
fi

echo
echo "on the GPU: $passed passed, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ] || printf 'FAILED %s\n' "${failed[@]}"
[ "$passed" -gt 0 ] && [ ${#failed[@]} -eq 0 ]
