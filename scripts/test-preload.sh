#!/usr/bin/env bash
# Runs the programs of tests/programs/preload on this machine's GPU, bare and with the library
# preloaded, and compares what they say; each is built with CUDA's runtime as a library and linked in.
#
#   scripts/test-preload.sh [--library FILE] [--sanitizer] [--speed] [--starts] [--facts] [PROGRAM...]
#
# --library    the built libconcertina.so; without it the one under the target directory
# --sanitizer  runs each preloaded program under compute-sanitizer, too, several at once
# --speed      then measures what allocations cost (bare, strict and relaxed)
# --starts     only measures what the library adds to the start of programs that do not use CUDA, which
#              have to say the same; needs neither nvcc nor a GPU
# --facts      then prints what CUDA itself does where its documentation leaves it open
#
# Needs nvcc, and no Rust. How a program is to be run stands in it (`Run:`). Prints PASS or FAIL for
# each, with the differences, and fails if one differs or if there was none.
set -uo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
sources=$root/tests/programs/preload

library='' sanitizer='' speed='' starts='' facts='' only=()
while [ $# -gt 0 ]; do
    case $1 in
        --library) library=${2:-} && shift ;;
        --sanitizer) sanitizer=yes ;;
        --speed) speed=yes ;;
        --starts) starts=yes ;;
        --facts) facts=yes ;;
        -*) echo "test-preload.sh: no option $1; there are --library FILE, --sanitizer, --speed, --starts and --facts" >&2 && exit 2 ;;
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
if [ -z "$nvcc$starts" ]; then
    echo "test-preload.sh: no nvcc on the path or in /usr/local/cuda" >&2
    exit 2
fi
checker=$(command -v compute-sanitizer || ls "$(dirname "$nvcc")/compute-sanitizer" 2>/dev/null)
if [ -n "$sanitizer" ] && [ -z "$checker" ]; then
    echo "test-preload.sh: no compute-sanitizer on the path or beside nvcc" >&2
    exit 2
fi
unset "${!CONCERTINA_@}" LD_PRELOAD PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=() watched=() flawless=0

# What the library adds to a program that does not use CUDA: microseconds from its start to its end, the
# median of several, bare and preloaded in turn; and whether it prints the same.
start() { # number of runs, then the command
    local count=$1 bare=() preloaded=() before after i
    shift
    if ! command -v "$1" >/dev/null; then
        echo "$1: not here"
        return
    fi
    for ((i = 0; i < count; i++)); do
        before=$EPOCHREALTIME
        "$@" >"$work/bare" 2>&1
        after=$EPOCHREALTIME
        bare+=($((${after/./} - ${before/./})))
        before=$EPOCHREALTIME
        LD_PRELOAD=$library "$@" >"$work/preloaded" 2>&1
        after=$EPOCHREALTIME
        preloaded+=($((${after/./} - ${before/./})))
        if ! cmp -s "$work/bare" "$work/preloaded"; then
            failed+=("$1 says something else when preloaded")
            return
        fi
    done
    echo "${1##*/}: bare $(printf '%s\n' "${bare[@]}" | sort -n | sed -n $((count / 2 + 1))p) us," \
        "preloaded $(printf '%s\n' "${preloaded[@]}" | sort -n | sed -n $((count / 2 + 1))p) us"
}

if [ -n "$starts" ]; then
    start 201 /bin/true
    start 201 ls /
    start 101 bash -c 'echo $((6 * 7))'
    start 31 python3 -c 'print(42)'
    start 31 node -e 'console.log(42)'
    # With a C part, so that it is linked to the C library: others take no preloaded library at all.
    printf 'package main\n\nimport "C"\n\nfunc main() { println(42) }\n' >"$work/program.go"
    if ! command -v go >/dev/null; then
        echo "go: not here"
    elif HOME=$work CGO_ENABLED=1 go build -o "$work/go-program" "$work/program.go" 2>"$work/build"; then
        start 101 "$work/go-program"
    else
        failed+=("the Go program does not build: $(tail -n 1 "$work/build")")
    fi
    [ ${#failed[@]} -eq 0 ] || printf 'FAILED %s\n' "${failed[@]}"
    [ ${#failed[@]} -eq 0 ]
    exit
fi

build() { # program, shared or static
    "$nvcc" -cudart "$2" -Xcompiler -std=gnu11,-pthread -o "$work/$1-$2" "$sources/$1.c" \
        -lcuda -ldl -lpthread >"$work/build" 2>&1
}

# Whether a command ran to its end under compute-sanitizer and nothing was found. Calls that fail are the
# programs' own business.
clean() { # file for what it says, the library or nothing, then the command
    local said=$1 preload=$2
    shift 2
    timeout 120 "$checker" ${preload:+--preload-library "$preload"} --report-api-errors no "$@" \
        >"$said" 2>&1
    grep -q 'ERROR SUMMARY: 0 errors' "$said" && ! grep -q 'ERROR SUMMARY: [1-9]' "$said"
}

# One program under compute-sanitizer. Prints what is wrong, and nothing where nothing is.
watch() { # file to work with, name, then the command
    local file=$1 name=$2
    shift 2
    clean "$file" "$library" "$@" && return
    if ! clean "$file.bare" '' "$@"; then
        echo "compute-sanitizer does not get through $name bare either"
        return
    fi
    echo "FAIL $name, under compute-sanitizer"
    { grep '=========' "$file" || tail -n 20 "$file"; } | head -20 | sed 's/^/    /'
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
    [ -z "$sanitizer" ] || watched+=("$name"$'\t'"$*")
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

# Under compute-sanitizer nothing is compared, so several run at once.
for index in "${!watched[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge 6 ]; do wait -n; done
    IFS=$'\t' read -r name command <<<"${watched[index]}"
    # shellcheck disable=SC2086 # the command's arguments are words
    watch "$work/watched-$index" "$name" $command >"$work/verdict-$index" &
done
wait
for index in "${!watched[@]}"; do
    cat "$work/verdict-$index"
    name=${watched[index]%%$'\t'*}
    if grep -q '^FAIL' "$work/verdict-$index"; then
        failed+=("$name, under compute-sanitizer")
    elif [ ! -s "$work/verdict-$index" ]; then
        flawless=$((flawless + 1))
    fi
done
[ -z "$sanitizer" ] || echo "compute-sanitizer: $flawless of ${#watched[@]} ran to their end, and nothing was found"

# What free:relaxed promises shows in no comparison.
for runtime in shared static; do
    [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" free_relaxed "* ]] || continue
    name="free_relaxed, $runtime runtime"
    if build free_relaxed "$runtime" &&
        CONCERTINA_CONF=free:relaxed LD_PRELOAD=$library timeout 120 "$work/free_relaxed-$runtime" \
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

if [ -n "$speed" ]; then
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
