#!/bin/sh
# The main job in one command. With an NVIDIA GPU and PyTorch: trains a small model, first under
# PyTorch's own allocator and then under concertina, and shows both. Anywhere else: replays recorded
# training and serving jobs on a simulated GPU. Builds the library first, or uses what
# CONCERTINA_LIBRARY names; without Rust, what has been built before.
#
#     scripts/quickstart.sh [--sim]     --sim: the simulated GPU, even where there is a real one
#
# PYTHON names the Python to use (default: python3).
set -eu
case ${1:-} in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

say() {
    echo "quickstart.sh: $*" >&2
}
give_up() {
    say "$*"
    exit 1
}
have() {
    command -v "$1" >/dev/null 2>&1
}

sim=no
case "$#:${1:-}" in
0:) ;;
1:--sim) sim=yes ;;
*) give_up "'$*' means nothing here; allowed is --sim, or nothing" ;;
esac

built=${CARGO_TARGET_DIR:-target}/release/libconcertina.so
if [ -n "${CONCERTINA_LIBRARY:-}" ]; then
    [ -f "$CONCERTINA_LIBRARY" ] || give_up "CONCERTINA_LIBRARY names $CONCERTINA_LIBRARY, where no file is"
    library=$CONCERTINA_LIBRARY
elif have cargo; then
    have cc || give_up "missing: cc, which Rust links with (Debian and Ubuntu: gcc libc6-dev)"
    cargo build --release --locked || give_up "the library could not be built; what cargo said stands above"
    library=$built
    [ -f "$library" ] || give_up "cargo left no library at $library"
elif [ -f "$built" ]; then
    library=$built
else
    give_up "missing: cargo (Rust, from https://rustup.rs), or a built library named by CONCERTINA_LIBRARY"
fi
have "$python" || give_up "missing: $python (Debian and Ubuntu: python3)"
library=$(cd "$(dirname "$library")" && pwd)/$(basename "$library")

if [ $sim = no ]; then
    # What the probe says is the reason why no model is trained.
    reason=$("$python" scripts/quickstart.py --probe) && {
        CONCERTINA_LIBRARY=$library exec "$python" scripts/quickstart.py
    }
    say "${reason:-$python could not look for PyTorch and a GPU}; replaying recorded jobs on a simulated GPU instead"
fi

# Beside the library, or where pip puts it with the module: with --target, or in an environment.
at=$(dirname "$library")
command=$at/concertina
for other in "$at/../bin/concertina" "$at/../../../../bin/concertina"; do
    [ -x "$command" ] || ! [ -f "$other" ] || command=$other
done
[ -x "$command" ] || give_up "missing: the command concertina beside $library (cargo build --release makes both)"
echo "Five recorded PyTorch jobs, replayed. reserved: peak reserved over peak live memory (1.000 is"
echo "perfect). smallest limit: over peak live, under which the job still completes. concertina:"
echo "measured now, on a simulated GPU; default and expandable: PyTorch 2.11's own allocator, measured"
echo "on one H100 80GB."
echo
exec "$python" scripts/traces.py --command "$command"
