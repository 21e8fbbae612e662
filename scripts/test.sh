#!/usr/bin/env bash
# Runs everything that proves the project on a machine without a GPU, and ends with one line that
# says what failed. Takes no arguments.
set -uo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
[ $# -eq 0 ] || {
    echo "test.sh: '$*' means nothing here; it takes no arguments" >&2
    exit 2
}
cd "$(dirname "$0")/.."

missing=()
need() {
    command -v "$1" >/dev/null || missing+=("$1 ($2)")
}
need cargo "Rust, from https://rustup.rs"
need cc "Debian and Ubuntu: gcc libc6-dev"
need c++ "Debian and Ubuntu: g++"
need python3 "Debian and Ubuntu: python3"
need nm "Debian and Ubuntu: binutils"
need readelf "Debian and Ubuntu: binutils"
if command -v cargo >/dev/null; then
    cargo fmt --version &>/dev/null || missing+=("cargo fmt (rustup component add rustfmt)")
    cargo clippy --version &>/dev/null || missing+=("cargo clippy (rustup component add clippy)")
fi
if [ ${#missing[@]} -gt 0 ]; then
    printf -v list ', %s' "${missing[@]}"
    echo "test.sh: missing: ${list:2}" >&2
    exit 1
fi

# What a person has set for their own programs is not under test.
unset "${!CONCERTINA_@}" PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF LD_PRELOAD

failed=()
steps=0
step() {
    local name=$1 start=$SECONDS
    shift
    steps=$((steps + 1))
    echo "== $name: $*"
    if "$@"; then
        echo "== $name: passed in $((SECONDS - start)) s"
    else
        echo "== $name: FAILED after $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

step format cargo fmt --all --check
step lint cargo clippy --locked --workspace --all-targets -- -D warnings
step documentation env RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps
# Most of them wait for programs that they run.
step tests env RUST_TEST_THREADS=$((2 * $(nproc))) cargo test --locked --workspace --no-fail-fast
step quickstart scripts/quickstart.sh --sim
step PyTorch python3 tests/torch/run.py
step "PyTorch, preloaded" python3 tests/torch/run.py --attach run
step "PyTorch, newest" python3 tests/torch/run.py --torch 2.15.0 --core
step wheel python3 tests/wheel.py
step "documented traces" scripts/traces.py --check
step "documented measurements" python3 tests/bench/bench.py --check
step pictures scripts/pictures.py --check

if [ ${#failed[@]} -gt 0 ]; then
    printf -v list ', %s' "${failed[@]}"
    echo "test.sh: FAILED: ${list:2} (${#failed[@]} of $steps steps, $SECONDS s)"
    exit 1
fi
echo "test.sh: all $steps steps passed in $SECONDS s"
