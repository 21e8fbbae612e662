#!/usr/bin/env bash
# Builds stand-ins for libcuda.so.1, libcudart.so.12 and libcudart.so.13 over the simulated GPU, for
# programs that are to run unchanged on a machine without a GPU, and prints the directory they are in:
#
#   LD_LIBRARY_PATH=$(scripts/standin.sh) ./program
#
# tests/standin/driver/settings.rs lists the variables that say what the simulated GPU is like.
set -euo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
[ $# -eq 0 ] || {
    echo "standin.sh: '$*' means nothing here; it takes no arguments" >&2
    exit 2
}
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
cargo build --locked --quiet -p concertina-standin-driver -p concertina-standin-runtime >&2
into=$target/debug/standin
mkdir -p "$into"
into=$(cd "$into" && pwd)
made=$(mktemp -d "$into/.new.XXXXXX")
trap 'rm -rf "$made"' EXIT

# Links one library: its name, its archive, its version of the symbols (nothing: without), and
# further sources. What Rust itself exports from the archive stays hidden.
link() {
    local name=$1 archive=$2 version=$3
    shift 3
    echo "$version { global: cu[A-Z]*; cuda[A-Z]*; __cuda*; local: *; };" >"$made/$name.map"
    cc -shared -o "$made/$name" -Wl,-soname,"$name" -Wl,--version-script="$made/$name.map" \
        -Wl,-Bsymbolic -Wl,--gc-sections -Wl,-S -Wl,-z,nodelete "$@" \
        -Wl,--whole-archive "$archive" -Wl,--no-whole-archive -lpthread -ldl -lm -lgcc_s
    # In one step: a program that runs now keeps the library that it has.
    mv "$made/$name" "$into/$name"
}

link libcuda.so.1 "$target/debug/libstandin_driver.a" ""
for major in 12 13; do
    # The real libraries version their symbols by their own name.
    echo "const int standin_runtime_version = ${major}000;" >"$made/version.c"
    link "libcudart.so.$major" "$target/debug/libstandin_runtime.a" "libcudart.so.$major" \
        "$made/version.c"
done
# What programs are linked with.
ln -sf libcuda.so.1 "$into/libcuda.so"
ln -sf libcudart.so.13 "$into/libcudart.so"
echo "$into"
