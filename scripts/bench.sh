#!/bin/sh
# Measures what concertina costs, beside PyTorch's own allocator where there are a GPU and PyTorch, and
# prints a table. Builds the library first, or uses what CONCERTINA_LIBRARY names; without Rust, what has
# been built before.
#
#     scripts/bench.sh [--quick] [--json FILE] …     --help says the rest
#
# PYTHON names the Python to use (default: python3), CXX the C++ compiler (default: c++).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

give_up() {
    echo "bench.sh: $*" >&2
    exit 1
}
have() {
    command -v "$1" >/dev/null 2>&1
}

have "$python" || give_up "missing: $python (Debian and Ubuntu: python3)"
case " $* " in
*" --help "* | *" -h "* | *" --keep "* | *" --check "*) exec "$python" tests/bench/bench.py "$@" ;;
esac
built=${CARGO_TARGET_DIR:-target}/release/libconcertina.so
if [ -n "${CONCERTINA_LIBRARY:-}" ]; then
    library=$CONCERTINA_LIBRARY
elif have cargo; then
    cargo build --release --locked || give_up "the library could not be built; what cargo said stands above"
    library=$built
else
    library=$built
fi
[ -f "$library" ] || give_up "no library at $library: cargo (Rust, from https://rustup.rs) builds it, CONCERTINA_LIBRARY names a built one"
[ -x "$(dirname "$library")/concertina" ] || give_up "missing: the command concertina beside $library (cargo build --release makes both)"
have "${CXX:-c++}" || give_up "missing: ${CXX:-c++}, a C++ compiler (Debian and Ubuntu: g++)"
CONCERTINA_LIBRARY=$library exec "$python" tests/bench/bench.py "$@"
