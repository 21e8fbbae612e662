#!/bin/sh
# Makes a wheel of concertina-cuda for pip, and prints its path: the Python module with the library in
# it, and the command. Builds the two first, or takes the library that CONCERTINA_LIBRARY names and the
# command beside it.
#
#     scripts/wheel.sh [--portable] [DIRECTORY]     where the wheel is left; target/wheel without it
#
# The wheel runs where the C library is that of this machine or newer. With --portable it runs from glibc 2.28
# on (manylinux_2_28): cargo-zigbuild links it (pip install cargo-zigbuild ziglang).
#
# PYTHON names the Python to use (default: python3).
set -eu
portable=
case ${1:-} in
--portable)
    portable=1
    shift
    ;;
esac
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
-*)
    echo "wheel.sh: invalid option '$1'; allowed is --portable, one DIRECTORY, --help, or nothing" >&2
    exit 2
    ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

give_up() {
    echo "wheel.sh: $*" >&2
    exit 1
}

[ $# -le 1 ] || give_up "'$*' is too much; allowed is one DIRECTORY, or nothing"
command -v "$python" >/dev/null || give_up "missing: $python (Debian and Ubuntu: python3)"
target=${CARGO_TARGET_DIR:-$root/target}
library=${CONCERTINA_LIBRARY:-}
if [ -n "$portable" ]; then
    command -v cargo-zigbuild >/dev/null || give_up "missing: cargo-zigbuild (pip install cargo-zigbuild ziglang)"
    triple=$(uname -m)-unknown-linux-gnu
    # zig would link an unwinder of its own, which exceptions of PyTorch's cannot pass.
    unwinder=$(cc -print-file-name=libgcc_s.so.1)
    RUSTFLAGS="-C link-arg=$unwinder -C link-arg=-Wl,--allow-shlib-undefined" \
        cargo zigbuild --release --locked --target "$triple.2.28" --manifest-path "$root/Cargo.toml" --lib --bins >&2 ||
        give_up "cargo-zigbuild could not build the library"
    library=$target/$triple/release/libconcertina.so
elif [ -z "$library" ]; then
    cargo build --release --locked --manifest-path "$root/Cargo.toml" >&2 || give_up "cargo could not build the library"
    library=$target/release/libconcertina.so
fi
command=$(dirname "$library")/concertina
for file in "$library" "$command"; do
    [ -f "$file" ] || give_up "no file is at $file"
done
exec "$python" "$root/scripts/wheel.py" "$library" "$command" "${1:-$target/wheel}"
