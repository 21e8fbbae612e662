#!/usr/bin/env bash
# Runs the cases of tests/torch on the simulated GPU with other releases of PyTorch than the one that
# scripts/test.sh tries, and says in a line for each what holds.
#
#   scripts/torch-versions.sh [VERSION...]        2.9.1 and 2.10.0 where none is named
#
# Each needs about 900 MB of download the first time, and then 1.5 GB under ~/.cache/concertina. What
# the cases printed is in torch-VERSION.out in the current directory.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- 2.9.1 2.10.0
status=0
for version in "$@"; do
    out=torch-$version.out
    if python3 "$root/tests/torch/run.py" --torch "$version" >"$out" 2>&1; then
        holds="all that was run"
    else
        status=1
        holds=$(sed -n '/^torch .* could not be run/,$ s/^FAIL //p' "$out" | paste -sd ';' | sed 's/;/, /g')
        holds="not ${holds:-$(tail -n 1 "$out")}"
    fi
    counts=$(sed -n 's/^torch .* on .*: \(.* could not be run\).*/\1/p' "$out")
    echo "torch $version: $holds (${counts:-nothing was run})"
done
exit "$status"
